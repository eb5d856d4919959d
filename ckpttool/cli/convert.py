"""`convert`, and `verify`, which checks the result."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpttool.cli import completion, console, next_steps, parameters, styles
from ckpttool.cli.panels import OptionPanel
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
from ckpttool.core import sidecar
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError
from ckpttool.core.text import clean

if TYPE_CHECKING:
    from ckpttool.conversion.options import ConversionOptions
    from ckpttool.conversion.plan import ConversionResult

_TIMEOUT, _SHORTEST = "OPENBLAS_THREAD_TIMEOUT", "4"
Texts = list[str] | None


@dataclass(frozen=True)
class TargetOptions(OptionPanel, title="Target"):
    """What to write."""

    to: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="Target (see above). Default: from the suffix of DST.",
            autocompletion=completion.complete_targets,
        ),
    ] = None
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For onnx: a network, e.g. critic/q1. Default: actor."),
    ] = None
    shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="For safetensors, tf, dcp: files of at most SIZE (5GB)."),
    ] = None
    shards: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="For tf: N files of about equal size.")
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, metavar="N", help="Write several files in N processes."),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Write them on a Ray cluster; local starts --jobs workers."),
    ] = None


@dataclass(frozen=True)
class SelectionOptions(OptionPanel, title="Selection and names"):
    """Selection of the source's entries, and changes to names and weights before conversion."""

    part: Annotated[
        str | None, typer.Option(metavar="PATH", help="Convert only what is under this path in SRC.")
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="ema|raw", help="Convert only averaged or only trained weights.", show_default=False
        ),
    ] = None
    strip: Annotated[
        bool, typer.Option("--strip", help="Strip wrapper prefixes (module., _orig_mod.) from names.")
    ] = False
    restore: Annotated[
        bool, typer.Option("--restore", help="Restore the prefixes that SRC's sidecar lists.")
    ] = False
    fold_weight_norm: Annotated[
        bool, typer.Option("--fold-weight-norm", help="Fold weight_g and weight_v into a single weight.")
    ] = False
    fold_normalizer: Annotated[
        bool, typer.Option("--fold-normalizer", help="Fold observation statistics into the first layers.")
    ] = False


@dataclass(frozen=True)
class MappingOptions(OptionPanel, title="Mapping"):
    """How layers and optimizers map to those of the target."""

    rules: Annotated[
        str | None, typer.Option("--map", metavar="FILE", help="TOML file of your own mapping rules.")
    ] = None
    kind: Annotated[
        Texts,
        typer.Option(metavar="PATTERN=KIND", help="Kind of an ambiguous layer: 'attn=attention:8' (heads)."),
    ] = None
    flatten: Annotated[
        Texts,
        typer.Option(
            metavar="PATTERN=H,W,C", help="Image that a layer receives flattened: 'actor/l1=7,7,64'."
        ),
    ] = None
    unflatten: Annotated[
        Texts,
        typer.Option(metavar="PATTERN=H,W,C", help="Image that a dense output is reshaped to: 'fc=7,7,64'."),
    ] = None
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="FRAMEWORK", help="Orientation of SRC's matrices: torch or tf."),
    ] = None
    l2: Annotated[
        Texts,
        typer.Option(
            "--l2", metavar="PATTERN=FACTOR", help="Keras l2 penalty of weights: 'critic/**/kernel=0.01'."
        ),
    ] = None
    optimizer: Annotated[
        Texts,
        typer.Option(
            metavar="NAME/SETTING=VALUE", help="Hyperparameter that SRC lacks; 'none' leaves out optimizers."
        ),
    ] = None


@dataclass(frozen=True)
class PlayedAgentOptions(AgentOptions, title="Agent"):
    """How to read an agent, facts not stored in the file, and its environment."""

    env: Env = None


@dataclass(frozen=True)
class ConvertModelOptions(ModelOptions, title="Your own model"):
    """Model to load into, and how its layers are matched."""

    match: Annotated[
        Texts, typer.Option(metavar="SOURCE=TARGET", help="For --like: a pair of corresponding layers.")
    ] = None
    cast: Annotated[bool, typer.Option("--cast", help="For --like: round values to your model's dtypes.")] = (
        False
    )
    accept_order: Annotated[
        bool, typer.Option("--accept-order", help="For --like: pair ambiguous layers by their order.")
    ] = False
    allow_unused: Annotated[
        Texts,
        typer.Option(metavar="PATTERN", help="For --like: leave out unused tensors of SRC; repeatable."),
    ] = None
    like_source: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FACTORY", help="Code that builds SRC's model, to run it."),
    ] = None
    like_source_args: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of the factory of --like-source.")
    ] = None
    source_python: Annotated[
        str | None, typer.Option(metavar="INTERPRETER", help="Python interpreter for --like-source.")
    ] = None
    run_code: Annotated[
        bool, typer.Option("--run-code", help="For --like: run SRC although its file contains code.")
    ] = False

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
        shapes = None if self.like is None and self.like_source is not None else self.input_shape
        return parameters.build_like_model(self.like, self.like_args, shapes, self.python)


@dataclass(frozen=True)
class ConvertOutputOptions(OptionPanel, title="Output"):
    """How the target is written, and what is printed about it."""

    code: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py", help="Also write the networks' code; '-' prints it.", show_default=False
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the mapping without writing anything.")] = (
        False
    )
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="For --dry-run: only entries from or to matching paths."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Write even if entries are unmapped or missing.")
    ] = False
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Do not flush to disk before the rename (faster).")
    ] = False
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Skip comparing network outputs after writing.")
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print notes that no option changes.")] = (
        False
    )
    as_json: AsJson = False
    quiet: Quiet = False

    def __post_init__(self) -> None:
        """Raise UsageError for a pattern without a dry run, or --verbose with --quiet."""
        if self.verbose and self.quiet:
            raise UsageError("--verbose and --quiet exclude each other")
        if self.glob is not None and not self.dry_run:
            raise UsageError(
                "--glob requires --dry-run", hint="use --part PATH to convert what is under a path"
            )


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint to convert.", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="File to write; a prefix for tf, tf1, fujimoto.", show_default=False
        ),
    ],
    what: TargetOptions,
    selection: SelectionOptions,
    mapping: MappingOptions,
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

    options = _conversion_options(what, selection, mapping, agent, model, output)
    source = use_checkpoint(source, quiet=output.quiet or output.as_json)
    with show_progress("convert", quiet=output.quiet or output.as_json, unit=BYTES) as moving:
        done = convert.convert(source, target, options, progress=moving)
    done = replace(done, report=done.report.shown(output.glob))
    _print_conversion(done, output)
    whole = done.report.complete and not done.open_entries
    if done.within and (whole or output.allow_missing):
        return 0
    if not output.as_json and (output.quiet or done.written):
        from ckpttool.cli import tables

        line = styles.wrap_sentence(f"exit status 1: {clean('; '.join(tables.exit_reasons(done)))}")
        (console.print_note if output.quiet else console.print_text)(line)
    return 1


def _conversion_options(
    what: TargetOptions,
    selection: SelectionOptions,
    mapping: MappingOptions,
    agent: PlayedAgentOptions,
    model: ConvertModelOptions,
    output: ConvertOutputOptions,
) -> ConversionOptions:
    from ckpttool.conversion.options import ConversionOptions

    env = make_importable(agent.env)
    return ConversionOptions(
        **vars(what),
        **vars(selection),
        rules=mapping.rules,
        kinds=mapping.kind or (),
        flatten=mapping.flatten or (),
        unflatten=mapping.unflatten or (),
        from_=mapping.from_,
        l2=mapping.l2 or (),
        optimizer=mapping.optimizer or (),
        layout=agent.layout,
        env=env,
        facts=agent.facts(),
        like=model.model(),
        match=model.match or (),
        cast=model.cast,
        accept_order=model.accept_order,
        allow_unused=model.allow_unused or (),
        like_source=model.source_model(),
        run_code=model.run_code,
        allow_missing=output.allow_missing,
        dry_run=output.dry_run,
        force=output.force,
        sync=not output.no_sync,
        verify=not output.no_verify,
        code=output.code,
    )


def _print_conversion(done: ConversionResult, output: ConvertOutputOptions) -> None:
    if output.as_json:
        console.print_text(console.render_document(done.document()))
        return
    from ckpttool.cli import tables
    from ckpttool.conversion.reverse import is_unavoidable_note

    if not output.verbose:
        notes = tuple(note for note in done.report.notes if not is_unavoidable_note(note))
        done = replace(done, report=replace(done.report, notes=notes))
    console.print_text(tables.render_conversion(done, quiet=output.quiet, whole=output.dry_run))
    if output.code == "-" and done.code is not None:
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
class ComparisonOptions(OptionPanel, title="Comparison"):
    """What to compare, and with which tolerance."""

    tolerance: Annotated[
        float | None,
        typer.Option(min=0, metavar="ERROR", help="Maximum error of B vs. float64. Default: see above."),
    ] = None
    train_step: Annotated[
        bool, typer.Option("--train-step", help="Train both further and compare the weight updates.")
    ] = False
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Number of updates for --train-step.")] = 100
    whole: Annotated[
        bool, typer.Option("--all", help="Also compare optimizers, counters, facts, settings, receipt.")
    ] = False
    python: Annotated[
        str | None, typer.Option(metavar="INTERPRETER", help="Python interpreter that runs the frameworks.")
    ] = None


@dataclass(frozen=True)
class ModelPairOptions(OptionPanel, title="Models"):
    """How to run models that are no agents of a known library."""

    like_a: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="Code that builds A's model.")
    ] = None
    like_b: Annotated[
        str | None, typer.Option(metavar="MODULE:FACTORY", help="Code that builds B's model.")
    ] = None
    like_args_a: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of A's factory, '{\"hidden\": 256}'.")
    ] = None
    like_args_b: Annotated[str | None, typer.Option(metavar="JSON", help="Arguments of B's factory.")] = None
    python_a: Annotated[
        str | None, typer.Option(metavar="INTERPRETER", help="Python interpreter that runs A.")
    ] = None
    python_b: Annotated[
        str | None, typer.Option(metavar="INTERPRETER", help="Python interpreter that runs B.")
    ] = None
    input_shape: Annotated[
        Texts,
        typer.Option(metavar="[NAME=]3,32,32", help="Shape of an input of A without batch; repeatable."),
    ] = None
    inputs: Annotated[
        str | None, typer.Option(metavar="FILE.npz", help="Your own inputs, instead of random ones.")
    ] = None
    transpose_inputs: Annotated[
        bool | None,
        typer.Option(
            "--transpose-inputs/--no-transpose-inputs",
            help="Move the channel axis of A's images for B.",
            show_default=False,
        ),
    ] = None
    run_code: Annotated[bool, typer.Option("--run-code", help="Run models whose file contains code.")] = False
    loss: Annotated[str | None, typer.Option(metavar="MODULE:LOSS", help="Loss for --train-step.")] = None
    loss_a: Annotated[str | None, typer.Option(metavar="MODULE:LOSS", help="Loss of A alone.")] = None
    loss_b: Annotated[str | None, typer.Option(metavar="MODULE:LOSS", help="Loss of B alone.")] = None
    optimizer_a: Annotated[
        str | None, typer.Option(metavar="NAME", help="Optimizer of A, if its file has several.")
    ] = None
    optimizer_b: Annotated[
        str | None, typer.Option(metavar="NAME", help="Optimizer of B, if its file has several.")
    ] = None

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
