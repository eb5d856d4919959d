"""The `convert` command."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ckpttool.cli import console, next_steps, styles
from ckpttool.cli.parameters import (
    AgentOptions,
    AsJson,
    Env,
    ModelOptions,
    Quiet,
    argument,
    make_importable,
    use_checkpoint,
)
from ckpttool.cli.progress import BYTES, show_progress
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import NotACheckpointError, UsageError
from ckpttool.core.text import clean

if TYPE_CHECKING:
    from ckpttool.conversion.plan import ConversionResult

_TIMEOUT, _SHORTEST = "OPENBLAS_THREAD_TIMEOUT", "4"


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
    source: Annotated[str, argument("SRC", "Checkpoint to convert.")],
    target: Annotated[str, argument("DST", "File to write, also -o DST; a prefix for tf, tf1, fujimoto.")],
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
    _import_numpy()
    from ckpttool.commands import convert
    from ckpttool.conversion.targets import infer_target_word

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
    try:
        source = use_checkpoint(source, quiet=output.quiet or output.as_json)
    except NotACheckpointError:
        infer_target_word(target, options.to)  # its hint repeats the command, which this would refuse
        raise
    with show_progress("convert", quiet=output.quiet or output.as_json, unit=BYTES) as moving:
        done = convert.run_conversion(source, target, options, moving)
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
        console.print_document(done.document())
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
