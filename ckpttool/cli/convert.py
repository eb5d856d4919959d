"""`convert`, and `verify`, which checks the result."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli import console, next_steps, styles
from ckpttool.cli.parameters import (
    AgentOptions,
    AsJson,
    Env,
    ModelOptions,
    Quiet,
    make_importable,
    use_checkpoint,
)
from ckpttool.cli.progress import BYTES, show_progress
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core import sidecar
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.core.text import clean

if TYPE_CHECKING:
    from ckpttool.conversion.plan import ConversionResult

_TIMEOUT, _SHORTEST = "OPENBLAS_THREAD_TIMEOUT", "4"
Texts = list[str] | None


@dataclass(frozen=True)
class PlayedAgentOptions(AgentOptions):
    """How to read an agent, facts not stored in the file, and its environment."""

    env: Env = None


@dataclass(frozen=True)
class ConvertModelOptions(ModelOptions):
    """Model to load into, and the code of the source's model.

    Your own model:
        like_source (MODULE:FACTORY): Code that builds SRC's model, to run it.
        like_source_args (JSON): Arguments of the factory of --like-source.
        source_python (INTERPRETER): Python interpreter for --like-source.
    """

    like_source: str | None = None
    like_source_args: str | None = None
    source_python: str | None = None

    def source_model(self) -> Any:
        """Return the code that builds the source's model, or None."""
        if self.like_source is None:
            if self.like_source_args or self.source_python:
                raise UsageError("--like-source-args and --source-python require --like-source")
            return None
        from ckpttool.networks.worker import parse_model_spec

        option, shapes = "--like-source-args", () if self.like else self.input_shape or ()
        return parse_model_spec(self.like_source, self.like_source_args, shapes, self.source_python, option)

    def model(self) -> Any:
        """Return the model of --like, or None; without one, --input-shape is that of --like-source."""
        alone = self.like is None and self.like_source is not None
        return super(ConvertModelOptions, replace(self, input_shape=None) if alone else self).model()


@dataclass(frozen=True)
class ConvertOutputOptions:
    """What is printed about the conversion.

    Output:
        glob (PATTERN): For --dry-run: only entries from or to matching paths.
        verbose (--verbose): Also print notes that no option changes.
    """

    glob: str | None = None
    verbose: bool = False
    as_json: AsJson = False
    quiet: Quiet = False


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint to convert.", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="File to write; a prefix for tf, tf1, fujimoto.", show_default=False
        ),
    ],
    options: ConversionOptions,
    agent: PlayedAgentOptions,
    model: ConvertModelOptions,
    output: ConvertOutputOptions,
) -> int:
    """Convert a checkpoint to another framework or library. The output is written atomically and verified.

    Targets are torch, tf (TensorFlow objects), tf1 (TensorFlow variables by name), keras (a weights
    file), safetensors, npz, dcp (a folder of torch.distributed.checkpoint), onnx (a runnable policy), and
    RL libraries' own formats: fujimoto (the TD3 authors' files), cleanrl, sb3, sb2, tf2rl, tianshou,
    spinningup, d3rlpy (.d3), d3rlpy_model (.pt), rsl_rl, rl_games, fasttd3, skrl, elegantrl, tf_agents,
    acme, keras_rl, rllib. The target is inferred from DST's suffix for .pt, .pth, .index, .h5,
    .cleanrl_model, .d3, .safetensors, .npz and .onnx.
    """
    _prepare_process()
    from ckpttool.commands import convert

    if output.verbose and output.quiet:
        raise UsageError("--verbose and --quiet exclude each other")
    if output.glob is not None and not options.dry_run:
        raise UsageError("--glob requires --dry-run", hint="use --part PATH to convert what is under a path")
    options = replace(
        options,
        layout=agent.layout,
        env=make_importable(agent.env),
        facts=agent.facts(),
        like=model.model(),
        like_source=model.source_model(),
    )
    source = use_checkpoint(source, quiet=output.quiet or output.as_json)
    with show_progress("convert", quiet=output.quiet or output.as_json, unit=BYTES) as moving:
        done = convert.convert(source, target, options, progress=moving)
    done = replace(done, report=done.report.shown(output.glob))
    _print_conversion(done, options, output)
    whole = done.report.complete and not done.open_entries
    if done.within and (whole or options.allow_missing):
        return 0
    if not output.as_json and (output.quiet or done.written):
        from ckpttool.cli import tables

        line = styles.wrap_sentence(f"exit status 1: {clean('; '.join(tables.exit_reasons(done)))}")
        (console.print_note if output.quiet else console.print_text)(line)
    return 1


def _print_conversion(
    done: ConversionResult, options: ConversionOptions, output: ConvertOutputOptions
) -> None:
    if output.as_json:
        console.print_text(console.render_document(done.document()))
        return
    from ckpttool.cli import tables
    from ckpttool.conversion.reverse import is_unavoidable_note

    if not output.verbose:
        notes = tuple(note for note in done.report.notes if not is_unavoidable_note(note))
        done = replace(done, report=replace(done.report, notes=notes))
    console.print_text(tables.render_conversion(done, quiet=output.quiet, whole=options.dry_run))
    if options.code == "-" and done.code is not None:
        console.print_text(f"\n{done.code}")
    next_steps.print_next_steps(next_steps.after_convert, done, quiet=output.quiet)


def _prepare_process() -> None:
    """Disable garbage collection and import numpy.

    Modules and plans are many objects, but no garbage: collecting took a seventh of a small conversion,
    and a sixth at process exit.
    """
    import gc

    gc.disable()
    atexit.register(gc.freeze)
    _import_numpy()


def _import_numpy() -> None:
    """Import numpy with OpenBLAS's threads asleep until there is a product to compute.

    By default they spin for 30 ms on a core that reading and hashing need
    (OpenBLAS, driver/others/blas_server.c: 2 ** OPENBLAS_THREAD_TIMEOUT ticks).
    """
    kept = os.environ.get(_TIMEOUT)
    os.environ.setdefault(_TIMEOUT, _SHORTEST)
    try:
        import numpy  # noqa: F401
    finally:
        if kept is None:
            del os.environ[_TIMEOUT]


@dataclass(frozen=True)
class ComparisonOptions:
    """What to compare, and with which tolerance.

    Comparison:
        tolerance (ERROR, 0..): Maximum error of B vs. float64. Default: see above.
        train_step (--train-step): Train both further and compare the weight updates.
        steps (N): Number of updates for --train-step.
        whole (--all): Also compare optimizers, counters, facts, settings, receipt.
        python (INTERPRETER): Python interpreter that runs the frameworks.
    """

    tolerance: float | None = None
    train_step: bool = False
    steps: int = 100
    whole: bool = False
    python: str | None = None


@dataclass(frozen=True)
class ModelPairOptions:
    """How to run models that are no agents of a known library.

    Models:
        like_a (MODULE:FACTORY): Code that builds A's model.
        like_b (MODULE:FACTORY): Code that builds B's model.
        like_args_a (JSON): Arguments of A's factory, '{"hidden": 256}'.
        like_args_b (JSON): Arguments of B's factory.
        python_a (INTERPRETER): Python interpreter that runs A.
        python_b (INTERPRETER): Python interpreter that runs B.
        input_shape ([NAME=]3,32,32): Shape of an input of A without batch; repeatable.
        inputs (FILE.npz): Your own inputs, instead of random ones.
        transpose_inputs (--transpose-inputs/--no-transpose-inputs):
            Move the channel axis of A's images for B.
        run_code (--run-code): Run models whose file contains code.
        loss (MODULE:LOSS): Loss for --train-step.
        loss_a (MODULE:LOSS): Loss of A alone.
        loss_b (MODULE:LOSS): Loss of B alone.
        optimizer_a (NAME): Optimizer of A, if its file has several.
        optimizer_b (NAME): Optimizer of B, if its file has several.
    """

    like_a: str | None = None
    like_b: str | None = None
    like_args_a: str | None = None
    like_args_b: str | None = None
    python_a: str | None = None
    python_b: str | None = None
    input_shape: Texts = None
    inputs: str | None = None
    transpose_inputs: bool | None = None
    run_code: bool = False
    loss: str | None = None
    loss_a: str | None = None
    loss_b: str | None = None
    optimizer_a: str | None = None
    optimizer_b: str | None = None

    def specs(self) -> tuple[Any, Any]:
        """Return the factories of both sides."""
        if not any((self.like_a, self.like_b, self.like_args_a, self.like_args_b)):
            return None, None
        from ckpttool.networks.worker import parse_model_spec

        found = []
        rows = (("a", self.like_a, self.like_args_a), ("b", self.like_b, self.like_args_b))
        for word, factory, arguments in rows:
            if factory is None and arguments is not None:
                raise UsageError(f"--like-args-{word} requires --like-{word}")
            found.append(None if factory is None else parse_model_spec(factory, arguments, (), None))
        return found[0], found[1]


def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="The source checkpoint.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="The converted checkpoint.", show_default=False)],
    comparison: ComparisonOptions,
    models: ModelPairOptions,
    agent: PlayedAgentOptions,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Run both checkpoints on the same inputs, each in its own framework's process.

    Recognised agents are compared network by network. Other models run by themselves (.keras, Keras .h5,
    ONNX, SavedModel, TorchScript), or are built by your code (--like-a, --like-b); if their outputs
    differ, the first layer that differs is named.

    By default, B's error from float64 may be twice that of A in its own framework, or that of rounding
    the largest sum in a layer.
    """
    from ckpttool.commands import verify

    like_a, like_b = models.specs()
    first, second = (use_checkpoint(each, quiet=quiet or as_json) for each in (first, second))
    with show_progress("verify", quiet=quiet or as_json) as moving:
        found = verify.verify(
            first,
            second,
            tolerance=comparison.tolerance,
            steps=comparison.steps if comparison.train_step else None,
            layout=agent.layout,
            facts=agent.facts(make_importable(agent.env)),
            python=comparison.python,
            whole=comparison.whole,
            like_a=like_a,
            like_b=like_b,
            python_a=models.python_a,
            python_b=models.python_b,
            input_shapes=models.input_shape or (),
            inputs=models.inputs,
            transpose_inputs=models.transpose_inputs,
            run_code=models.run_code,
            loss_a=models.loss_a or models.loss,
            loss_b=models.loss_b or models.loss,
            optimizer_a=models.optimizer_a,
            optimizer_b=models.optimizer_b,
            progress=moving,
        )
    if as_json:
        console.print_text(console.render_document(found.document()))
    else:
        from ckpttool.cli import tables

        console.print_text(tables.render_verification(found, quiet=quiet))
        next_steps.print_next_steps(next_steps.after_verify, second, found, quiet=quiet)
    return 0 if found.within and not sidecar.has_open_entries(found.ledger) else 1
