"""The `convert` command."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from ckpttool.cli import console
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
from ckpttool.cli.styles import wrap_sentence
from ckpttool.cli.tables import SHOWN, labeled_lines, render_remarks
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core import sidecar
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import NotACheckpointError, UsageError, abbreviate_list
from ckpttool.core.text import clean, format_count

if TYPE_CHECKING:
    from ckpttool.conversion.plan import ConversionResult
    from ckpttool.mapping.rules import MappingReport
    from ckpttool.verification.output_comparison import Parity
    from ckpttool.verification.proof import ModelProof

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
    from ckpttool.conversion.format_conversion import run_conversion
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
        done = run_conversion(source, target, options, moving)
    done = replace(done, report=done.report.shown(output.glob))
    _print_conversion(done, options, output)
    whole = done.report.complete and not done.open_entries
    if done.within and (whole or options.allow_missing):
        return 0
    if not output.as_json and (output.quiet or done.written):
        line = wrap_sentence(f"exit status 1: {clean('; '.join(exit_reasons(done)))}")
        (console.print_note if output.quiet else console.print_text)(line)
    return 1


def _print_conversion(
    done: ConversionResult, options: ConversionOptions, output: ConvertOutputOptions
) -> None:
    if output.as_json:
        console.print_document(done.document())
        return
    from ckpttool.conversion.reverse import is_unavoidable_note

    if not output.verbose:
        notes = tuple(note for note in done.report.notes if not is_unavoidable_note(note))
        done = replace(done, report=replace(done.report, notes=notes))
    console.print_text(render_conversion(done, quiet=output.quiet, whole=options.dry_run))
    if options.code == "-" and done.code is not None:
        console.print_text(f"\n{done.code}")
    if console.suggests_commands(quiet=output.quiet):
        from ckpttool.cli import next_steps

        next_steps.print_next_steps(next_steps.after_convert(done))


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


def _entry_lines(label: str, names: Sequence[str]) -> list[str]:
    """Return a line for each entry; if there are more than a dozen, one for names with other numbers."""
    if len(names) <= SHOWN:
        return labeled_lines(label, names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    lines = [
        group[0] if len(group) == 1 else f"{pattern} ({len(group):,} entries)"
        for pattern, group in groups.items()
    ]
    return labeled_lines(label, lines)


def render_conversion(done: ConversionResult, *, quiet: bool, whole: bool) -> str:
    """Return mapped entries (all on a dry run), unmapped ones, and assumptions."""
    report = done.report
    lines: list[str] = []
    if whole:
        from ckpttool.cli.columns import fit_path

        # Two lines per entry: two paths and a rule side by side do not fit a terminal.
        for m in report.mapped:
            shapes = _format_shapes(m.shape_in, m.shape_out)
            sentence = f"  {m.rule}  {shapes}".rstrip()
            lines += [
                fit_path(clean(m.source), 0),
                f"    -> {fit_path(clean(m.target), len(sentence) + 7)}{sentence}",
            ]
        lines += [] if quiet else [""]
    lines += _entry_lines("unmapped", report.unused) + _entry_lines("missing", report.missing)
    if not quiet:
        assumed = dict.fromkeys((*report.assumed, *sidecar.assumption_sentences(done.ledger)))
        lines += [
            *render_remarks([*assumed], report.notes, done.ledger),
            _count_rules(report),
            *_parity_lines(done.parity),
        ]
    elif not done.within:
        lines += _parity_lines(done.parity)
    if done.proof is not None and not done.proof.within:
        lines += _proof_lines(done.proof)
    return "\n".join(lines + _outcome_lines(done, quiet=quiet))


def _outcome_lines(done: ConversionResult, *, quiet: bool) -> list[str]:
    """Return what was written, or why nothing was."""
    report = done.report
    if done.written:
        lines = [f"wrote {clean(done.target)}", f"sha256 {done.digest}"]
        return lines + ([] if quiet else [f"load: {clean(line)}" for line in done.load])
    if not done.within:
        skip = "; --no-verify writes it without the comparison" if done.proof is not None else ""
        return [f"nothing was written: the model's outputs differ from the checkpoint's{skip}"]
    if not report.complete:
        # A partly loaded model computes something else.
        rest = (
            "; missing tensors keep your model's own values"
            if done.loaded is not None and report.missing
            else ""
        )
        option = f"{report.remedy} to write the mapped entries"
        if done.loaded is not None and not report.missing:
            option = "--allow-unused PATTERN to leave out the unmapped tensors"
        return [f"nothing was written: use {option}{rest}"]
    return [] if quiet else ["nothing was written: this was a dry run"]


def exit_reasons(done: ConversionResult) -> list[str]:
    """Return why a conversion without --allow-missing ends with exit status 1; none if it does not."""
    report, reasons = done.report, []
    if not done.within:
        reasons.append("outputs differ from the source's")
    for word, names in (("unmapped", report.unused), ("missing", report.missing)):
        if names:
            reasons.append(f"{word} {abbreviate_list(list(names), 3)}")
    if done.open_entries:
        lost = abbreviate_list([entry.sentence for entry in done.open_entries], 3)
        topics = {entry.what for entry in done.open_entries}
        defaults = (entry for entry in done.ledger if entry.use == "assumed" and entry.what in topics)
        stated = ", ".join(dict.fromkeys(entry.hint for entry in defaults if entry.hint))
        how = f" (state them with {stated})" if stated else ""
        reasons.append(f"not {'applied' if done.playable else 'written'}: {lost}{how}")
    return reasons


# What the summary of a conversion calls the most frequent rules; others keep the name that receipts store.
_RULE_RESULTS = {"keep": "unchanged", "transpose": "transposed", "as a number": "stored as numbers"}


def _count_rules(report: MappingReport) -> str:
    """Return the number of converted entries, in total and by rule, the most frequent first."""
    rules = Counter(_RULE_RESULTS.get(m.rule, m.rule) for m in report.mapped)
    # A chain of rules contains commas itself.
    between = "; " if any("," in rule for rule in rules) else ", "
    counted = between.join(
        f"{count} {rule}" for rule, count in sorted(rules.items(), key=lambda rule: (-rule[1], rule[0]))
    )
    mapped = format_count(len(report.mapped), "entry converted", "entries converted")
    return wrap_sentence(f"{mapped}{': ' if counted else ''}{counted}")


def _parity_lines(networks: Sequence[Parity]) -> list[str]:
    """Return a line for all networks as exact as A's, and one for each of the others."""
    exact = [n for n in networks if n.within and not n.error_a]
    identical = format_count(len(exact), "network gives", "networks give")
    return [f"verified: {identical} identical outputs after reading back"] * bool(exact) + [
        f"{clean(n.name)}: {format_count(n.n, 'output')}, error vs. float64 at most {n.error_b:.2e} "
        f"(NumPy: {n.error_a:.2e})"
        for n in networks
        if n not in exact
    ]


def _proof_lines(proof: ModelProof) -> list[str]:
    """Return the outputs that differ, and the table of layers around the first difference."""
    from ckpttool.cli.verification_tables import layer_lines

    lines = [wrap_sentence(clean(proof.sentence))]
    for output in proof.outputs:
        if not output.within:
            size = f"{output.max_abs:.2e}, {output.max_rel:.2e} of the output's scale"
            lines.append(f"{clean(output.name)}: difference {size}")
    return lines + ([] if proof.comparison is None else layer_lines(proof.comparison))


def _format_shapes(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    return str(list(before)) if before == after else f"{list(before)} -> {list(after)}"
