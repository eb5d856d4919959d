"""Tables and trees in the terminal."""

from __future__ import annotations

import io
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ckpttool.cli.columns import SHORTEST_PATH, fit_path
from ckpttool.cli.styles import adopt_rich_styles, has_colors, strip_line_end, terminal_width, wrap_sentence
from ckpttool.core import deferred, sidecar
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.text import clean, format_count, shorten
from ckpttool.core.tree import Leaf, Record, ValueLeaf

if TYPE_CHECKING:
    from ckpttool.commands.diff import Diff
    from ckpttool.commands.digest import DigestComparison
    from ckpttool.commands.doctor import Diagnosis
    from ckpttool.commands.plugin_rows import PluginRow
    from ckpttool.commands.schemas import SchemaRow
    from ckpttool.commands.stats import Stats
    from ckpttool.commands.verify import Verification
    from ckpttool.conversion.alignment import ChangedEntry, Entry
    from ckpttool.conversion.plan import ConversionResult
    from ckpttool.core.digests import Digest
    from ckpttool.core.sidecar import LedgerEntry
    from ckpttool.mapping.rules import MappingReport
    from ckpttool.verification.moments import Moments
    from ckpttool.verification.output_comparison import Parity
    from ckpttool.verification.proof import ModelProof
    from ckpttool.verification.training import ModelTraining
    from ckpttool.verification.two_models import ModelComparison
    from ckpttool.verification.update_comparison import TrainStepComparison


_SHOWN = 12


def render_table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """Render a table; a column is its title and "left", "right" or "path" (which wraps if needed)."""
    # Imported here because output without a table, e.g. a conversion's, does not need it.
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, kind in columns:
        table.add_column(
            title, justify="right" if kind == "right" else "left", no_wrap=kind != "path", overflow="fold"
        )
    for row in rows:
        table.add_row(*(clean(cell).replace("[", r"\[") for cell in row))
    colours: Literal["auto"] | None = "auto" if has_colors() else None
    console = Console(
        file=io.StringIO(), width=terminal_width(), force_terminal=has_colors(), color_system=colours
    )
    console.print(table)
    text = adopt_rich_styles(console.file.getvalue())  # type: ignore[attr-defined]  # the StringIO given above
    return "\n".join(map(strip_line_end, text.splitlines()))


def labeled_lines(label: str, names: Sequence[str]) -> list[str]:
    """Return a line for each name, at most a dozen."""
    shown = [f"{label}: {clean(name)}" for name in names[:_SHOWN]]
    return shown + ([f"{label}: and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])


def _entry_lines(label: str, names: Sequence[str]) -> list[str]:
    """Return a line for each entry; if there are more than a dozen, one for names with other numbers."""
    if len(names) <= _SHOWN:
        return labeled_lines(label, names)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    lines = [
        group[0] if len(group) == 1 else f"{pattern} ({len(group):,} entries)"
        for pattern, group in groups.items()
    ]
    return labeled_lines(label, lines)


# Sentence about an optimizer default (libraries/optimizers_read.py).
_DEFAULT = deferred.compile(
    r"(?P<lead>.*: )?(?P<optimizer>\S+) (?P<setting>\S+ = \S+) "
    r"\(default of (?P<whose>[^;()]+); the checkpoint does not hold it\)"
)


def merge_default_sentences(lines: Sequence[str]) -> list[str]:
    """Merge sentences about optimizer defaults that are the same for several optimizers."""
    defaults = {text: match for text in lines if (match := _DEFAULT.fullmatch(text))}
    settings: dict[tuple[str, str], dict[str, list[str]]] = {}
    for match in defaults.values():
        own = settings.setdefault((match["lead"] or "", match["optimizer"]), {})
        own.setdefault(match["whose"], []).append(match["setting"])
    groups: dict[tuple[str, str], list[str]] = {}
    for (lead, optimizer), own in settings.items():
        shown = "; ".join(f"{', '.join(settings)} (default of {owner})" for owner, settings in own.items())
        groups.setdefault((lead, shown), []).append(optimizer)
    joined = {
        (lead, optimizer): f"{lead}{' and '.join(optimizers)}: {shown}; the checkpoint does not hold them"
        for (lead, shown), optimizers in groups.items()
        for optimizer in optimizers
    }
    return list(
        dict.fromkeys(
            joined[defaults[text]["lead"] or "", defaults[text]["optimizer"]] if text in defaults else text
            for text in lines
        )
    )


def render_remarks(
    assumed: Sequence[str], notes: Sequence[str], entries: Iterable[LedgerEntry] = ()
) -> list[str]:
    """Return the ledger, assumptions and notes; in a pipe, one line each."""
    lines = [
        *map(clean, sidecar.describe_entries(entries)),
        *labeled_lines("assumed", merge_default_sentences(assumed)),
    ]
    lines += [f"note: {clean(note)}" for note in merge_default_sentences(notes)]
    return [wrap_sentence(line) for line in lines]


def render_digest(found: Digest, compared: DigestComparison | None, *, quiet: bool) -> str:
    """Return one line per tensor in sha256sum's format, then the whole and the comparison."""
    lines = [f"{tensor.sha256}  {clean(tensor.path)}" for tensor in found.tensors]
    lines += ["", f"{found.sha256}  {clean(found.path)}"]
    lines += [] if quiet else [f"checksums: {found.checksums}"]
    if compared is not None:
        lines += labeled_lines("differs", compared.different)
        lines += labeled_lines("only here", compared.only_here)
        lines += labeled_lines("only in the saved digest", compared.only_saved)
        sentence = "equal to the saved digest" if compared.equal else "not equal to the saved digest"
        lines += [] if quiet else [sentence]
    return "\n".join(lines)


def render_conversion(done: ConversionResult, *, quiet: bool, whole: bool) -> str:
    """Return mapped entries (all on a dry run), unmapped ones, and assumptions."""
    report = done.report
    lines: list[str] = []
    if whole:
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
    lines = [wrap_sentence(clean(proof.sentence))]
    for output in proof.outputs:
        if not output.within:
            size = f"{output.max_abs:.2e}, {output.max_rel:.2e} of the output's scale"
            lines.append(f"{clean(output.name)}: difference {size}")
    return lines + ([] if proof.comparison is None else layer_lines(proof.comparison))


def _format_shapes(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    return str(list(before)) if before == after else f"{list(before)} -> {list(after)}"


# Maximum number of discrepancies printed; --json lists all.
_DISCREPANCIES = 20


def render_verification(found: Verification, *, quiet: bool) -> str:
    """Return a row per network, then the verdict; `quiet` omits the verdict, assumptions and notes."""
    what = "network" if found.models is None else "output"
    rows = [
        (
            n.name,
            str(n.n),
            # Without inputs, nothing was measured.
            *(f"{x:.2e}" if n.n else "-" for x in (n.max_abs, n.max_rel, n.error_a, n.error_b)),
            "yes" if n.within else "NO",
        )
        for n in found.networks
    ]
    columns = (
        (what, "left"),
        ("n", "right"),
        ("max |A-B|", "right"),
        ("relative", "right"),
        ("A-f64", "right"),
        ("B-f64", "right"),
        ("within", "left"),
    )
    ran = [f" ({backend})" if found.networks else "" for backend in found.backends]
    lines = [
        f"A {clean(found.first)}{ran[0]}",
        f"B {clean(found.second)}{ran[1]}",
        *([render_table(columns, rows)] if rows else []),
        *([] if found.training is None else _training_table(found.training)),
        *([] if found.models is None else _model_lines(found.models, found.networks)),
        *_discrepancy_lines(found),
    ]
    if not quiet:
        lines += render_remarks(found.assumed, found.notes, found.ledger)
        lines.append(wrap_sentence(f"tolerance: {clean(found.tolerance)}"))
        lines += [wrap_sentence(f"not compared: {clean(reason)}") for reason in found.not_compared]
        lines.append(_verification_verdict(found))
    return "\n".join(lines)


def _discrepancy_lines(verification: Verification) -> list[str]:
    """Return two lines per discrepancy: where it is, and the values in A and B."""
    lines = []
    for discrepancy in verification.discrepancies[:_DISCREPANCIES]:
        what = f"{discrepancy.what} ({clean(discrepancy.part)})"
        lines.append(f"{fit_path(clean(discrepancy.path), len(what) + 2)}: {what}")
        lines.append(f"    {clean(discrepancy.a or 'nothing')} -> {clean(discrepancy.b or 'nothing')}")
        lines += [f"    looks like {clean(discrepancy.resembles)}"] if discrepancy.resembles else []
    if len(verification.discrepancies) > _DISCREPANCIES:
        lines.append(f"and {len(verification.discrepancies) - _DISCREPANCIES:,} more (--json lists all)")
    return lines


_LAYER_COLUMNS = (
    ("layer of A", "path"),
    ("layer of B", "path"),
    ("inputs", "right"),
    ("outputs", "right"),
    ("within", "left"),
)
_LAYERS_BEFORE, _LAYERS_AFTER = 8, 6


def _model_lines(models: ModelComparison, outputs: Sequence[Parity]) -> list[str]:
    """Return the layers of a model whose outputs differ, and its updates."""
    layers = [] if all(output.within for output in outputs) else layer_lines(models)
    return [*layers, *_model_training_lines(models.training)]


def layer_lines(models: ModelComparison) -> list[str]:
    """Return the table of layers around the first difference, and its cause."""
    if not models.layers:
        return []
    at = next((n for n, layer in enumerate(models.layers) if not layer.within), len(models.layers))
    shown = models.layers[max(0, at - _LAYERS_BEFORE) : at + _LAYERS_AFTER]
    rows = [
        (layer.a, layer.b, f"{layer.inputs:.1e}", f"{layer.outputs:.1e}", "yes" if layer.within else "NO")
        for layer in shown
    ]
    lines = [render_table(_LAYER_COLUMNS, rows)]
    if len(shown) < len(models.layers):
        lines.append(
            f"{len(shown)} of {format_count(len(models.layers), 'pair')} of layers (--json lists all)"
        )
    first = models.first
    if first is None:
        return lines
    pair = f"{first.a} / {first.b}" if first.a != first.b else first.a
    before = "in" if first.where == "layer" else "before"
    lines.append(wrap_sentence(f"first difference: {before} {clean(pair)}"))
    cause = first.cause or "unknown: no tested setting, tensor, axis or order of the layer explains it"
    lines.append(wrap_sentence(f"cause: {clean(cause)}"))
    if first.fix is not None:
        lines.append(wrap_sentence(f"fix: {clean(first.fix)}"))
    return lines


_UPDATES_SHOWN = 8


def _model_training_lines(steps: ModelTraining | None) -> list[str]:
    """Return the table of the updates that differ most, the cause, and what no file contains."""
    if steps is None:
        return []
    from ckpttool.verification.training import BOUNDS, describe_state

    dtypes = [bound for bound in BOUNDS if any(row.dtype == bound for row in steps.updates)]
    keys = dict.fromkeys((row.a, row.b, row.step) for row in steps.updates)
    by_type = {(row.a, row.b, row.step, row.dtype): row for row in steps.updates}
    columns = [("tensor of A", "path"), ("tensor of B", "path"), ("step", "right")]
    columns += [(dtype, "right") for dtype in dtypes]
    rows = []
    for a, b, step in [*keys][:_UPDATES_SHOWN]:
        deviations = [by_type[a, b, step, dtype] for dtype in dtypes]
        verdict = "yes" if all(row.within for row in deviations) else "NO"
        verdict = "rounding" if any(row.rounding for row in deviations) else verdict
        rows.append((a, b, str(step), *(f"{row.relative:.2e}" for row in deviations), verdict))
    a, b = (describe_state(optimizer) for optimizer in steps.optimizers)
    title = f"{format_count(steps.steps, 'update')} on the {steps.loss} loss; A: {a}; B: {b}"
    lines = [wrap_sentence(clean(title)), render_table([*columns, ("within", "left")], rows)]
    if len(keys) > len(rows):
        lines.append(f"{len(rows)} of {len(keys)} updates (--json lists all)")
    worst = steps.worst
    if worst is not None:
        text = f"largest difference: {clean(worst.a)}, {worst.relative:.1e} of A's update, step {worst.step}"
        lines.append(wrap_sentence(text))
    if steps.cause is not None:
        word = "cause" if steps.cause.confirmed else "suspected cause"
        lines.append(wrap_sentence(f"{word}: {clean(steps.cause.text)}"))
        lines += [wrap_sentence(f"fix: {clean(steps.cause.fix)}")] if steps.cause.fix else []
    if steps.epsilon is not None and steps.epsilon.worst.within:
        text = f"{steps.epsilon.text}; updates differ by {steps.epsilon.worst.relative:.1e} at most"
        lines.append(wrap_sentence(clean(text)))
    bounds = " and ".join(f"{BOUNDS[dtype]:g} in {dtype}" for dtype in dtypes)
    lines.append(f"tolerance of updates: relative difference of {bounds}, or twice A's own rounding error")
    return [*lines, *(wrap_sentence(f"missing: {entry}") for entry in steps.missing)]


def _model_verdict(verification: Verification, models: ModelComparison) -> str:
    wrong = [network.name for network in verification.networks if not network.within]
    training = models.training
    if not wrong and training is not None and not training.within:
        return "FAIL: the outputs match, the updates differ"
    if not wrong:
        pairs = f", {format_count(len(models.layers), 'pair')} of layers compared" if models.layers else ""
        outputs = format_count(len(verification.networks), "output matches", "outputs match")
        updates = "" if training is None else ", all updates agree"
        return f"PASS: {outputs}{pairs}{updates}"
    return wrap_sentence(f"FAIL: the models differ: {clean(abbreviate_list(wrong, 8))}")


def _verification_verdict(result: Verification) -> str:
    if result.models is not None:
        return _model_verdict(result, result.models)
    networks = format_count(len(result.networks), "network")
    wrong = [network.name for network in result.networks if not network.within]
    parts = list(dict.fromkeys(discrepancy.part for discrepancy in result.discrepancies))
    if not result.within:
        differ = [*wrong, *(part for part in parts if part not in wrong)]
        moved = ["updates"] if result.training is not None and not result.training.within else []
        return wrap_sentence(f"FAIL: the agents differ: {clean(abbreviate_list([*differ, *moved], 8))}")
    if sidecar.has_open_entries(result.ledger):
        return f"FAIL: {networks} match, but a fact that affects the actions was not used"
    if result.contents is None:
        return f"PASS: {networks} match" + ("; --all compares the rest" if result.not_compared else "")
    equal = f"{format_count(result.contents.equal, 'entry', 'entries')} equal"
    facts = f", {format_count(len(result.contents.facts), 'fact')} agree" if result.contents.facts else ""
    return f"PASS: {f'{networks} match, ' if result.networks else ''}{equal}{facts}"


def _training_table(training: TrainStepComparison) -> list[str]:
    """Return a row per network and moment: the difference of both sides' updates in each float type."""
    from ckpttool.verification.output_comparison import OWN_ERROR
    from ckpttool.verification.training import BOUNDS

    keys = dict.fromkeys((update.name, update.step) for update in training.moved)
    by_type = {(update.name, update.step, str(update.dtype)): update for update in training.moved}
    columns = [("network", "left"), ("step", "right"), *((f"{d} |dA-dB|/|dA|", "right") for d in BOUNDS)]
    rows = []
    for name, step in keys:
        updates = [by_type[name, step, dtype] for dtype in BOUNDS]
        within = "yes" if all(moved.within for moved in updates) else "NO"
        rows.append((name, str(step), *(f"{moved.relative:.2e}" for moved in updates), within))
    bounds = " and ".join(f"{bound:g} in {dtype}" for dtype, bound in BOUNDS.items())
    sentence = (
        f"tolerance of updates: relative difference of {bounds}, or {OWN_ERROR:g}x A's own error "
        "if that is larger"
    )
    different = [
        wrap_sentence(f"optimizers differ: {clean(difference)}") for difference in training.differences
    ]
    title = f"{format_count(training.steps, 'update')} of {training.algorithm}"
    return [title, render_table([*columns, ("within", "left")], rows), sentence, *different]


def render_plugins(kind: str, rows: Sequence[PluginRow]) -> str:
    """Return a row per format, layout or backend."""
    if kind == "backends":
        first = (("backend", "left"), ("installed", "left"), ("what", "path"))
        return render_table(first, ((r.name, _installed_cell(r), r.title) for r in rows))
    columns = [(kind[:-1], "left"), ("reads", "left"), ("writes", "left"), ("what", "path")]
    cells = [[r.name, _yes_or_no(r.reads), _yes_or_no(r.writes), r.title] for r in rows]
    if kind == "layouts":
        # Mark layouts that were written from the library's source alone, without testing real files.
        columns.insert(3, ("tried", "left"))
        for row, cell in zip(rows, cells, strict=True):
            cell.insert(3, _yes_or_no(bool(row.seen)))
    return render_table(columns, cells)


def render_schemas(rows: Sequence[SchemaRow]) -> str:
    """Return a row per JSON Schema."""
    return render_table(
        (("schema", "left"), ("description", "path")), ((row.name, row.title) for row in rows)
    )


def render_limits(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per limit; values changed by the user are starred."""
    columns = (("limit", "left"), ("value", "right"), ("description", "path"))
    changed = ("", " *")
    cells = ((r["name"], f"{r['value']:,}{changed[r['value'] != r['default']]}", r["meaning"]) for r in rows)
    return render_table(columns, cells)


def _yes_or_no(value: bool | None) -> str:
    return "yes" if value else "no"


def _installed_cell(row: PluginRow) -> str:
    from ckpttool.core.installation import install_extra

    if row.available or row.extra is None:
        return "yes" if row.available else "no"
    return f"no: {install_extra(row.extra)}"


# Eight bar heights, one character wide.
_BARS = "▁▂▃▄▅▆▇█"
_HISTOGRAM, _NUMBER, _SHARE = 8, 9, 5
# Numbers of changes to try, from a pipe's to a small terminal's.
_MOST_CHANGES = (20, 12, 8, 5, 3)
_MEASURES = "relative: largest |a - b| / max(|a|, |b|); cosine: 1 for equal directions"
_HEADS = ("min", "max", "mean", "std")


def render_stats(found: Stats, depth: int | None, sort: str, *, quiet: bool) -> str:
    """Return a line per tensor, or with `depth` per module down to that level, then warning signs."""
    if depth is not None:
        deep = [module for module in found.modules if module.path and module.path.count("/") < depth]
        rows = [(module.path, module.moments, "") for module in (*deep, found.modules[0])]
    else:
        rows = [
            (leaf.path, leaf.moments, _histogram_bars(leaf.histogram)) for leaf in _sort_tensors(found, sort)
        ]
    lines = _moments_table(rows)
    lines += [
        f"{fit_path(clean(tensor.path), len(sign) + 2)}: {sign}"
        for tensor in found.tensors
        for sign in tensor.signs
    ]
    if quiet:
        return "\n".join(lines)
    if found.left_out:
        lines.append(f"{format_count(len(found.left_out), 'tensor holds', 'tensors hold')} no numbers")
    everything = "all values are finite" if found.finite else "some values are not finite"
    return "\n".join([*lines, "", f"{format_count(len(found.tensors), 'tensor')}: {everything}"])


def _sort_tensors(stats: Stats, sort: str) -> Sequence[Any]:
    if sort == "file":
        return stats.tensors
    if sort == "name":
        return sorted(stats.tensors, key=lambda tensor: tensor.path)
    return sorted(
        stats.tensors, key=lambda tensor: -(tensor.moments.size if sort == "size" else tensor.moments.norm)
    )


def _moments_table(rows: Iterable[tuple[str, Moments, str]]) -> list[str]:
    rows = list(rows)
    drawn = _HISTOGRAM + 1 if any(bars for _, _, bars in rows) else 0
    width = max((len(clean(path)) for path, _, _ in rows), default=0)
    if sys.stdout.isatty():
        width = min(width, terminal_width() - len(_HEADS) * (_NUMBER + 1) - (_SHARE + 1) - drawn)
    width = max(SHORTEST_PATH, width)
    lines = [f"{'':{width}}" + "".join(f" {head:>{_NUMBER}}" for head in _HEADS) + f" {'zeros':>{_SHARE}}"]
    for path, known, bars in rows:
        cells = (known.low, known.high, known.mean, known.std) if known.finite else ()
        numbers = [f"{value:.3g}" for value in cells] or ["-"] * 4
        share = f"{known.zeros / known.size:.0%}" if known.size else "-"
        line = f"{shorten(clean(path) or 'all', width):{width}}"
        line += "".join(f" {number:>{_NUMBER}}" for number in numbers)
        lines.append(f"{line} {share:>{_SHARE}} {bars}".rstrip())
    return lines


def _histogram_bars(histogram: Sequence[int]) -> str:
    if not histogram:
        return ""
    width = len(histogram) // _HISTOGRAM
    sums = [sum(histogram[at : at + width]) for at in range(0, len(histogram), width)]
    most = max(sums)
    return "".join(_BARS[round(count / most * 7)] if count else " " for count in sums)


def render_diff(found: Diff, *, whole: bool, quiet: bool, screen: int | None = None) -> str:
    """Return verdict, measures, changes (all if `whole`), entries on one side only, and notes.

    `screen` is the number of lines that the text may have; None in a pipe.
    """
    head = [] if quiet else [_diff_verdict(found)]
    if not quiet and any(entry.values is not None for entry in found.changed):
        head.append(wrap_sentence(_MEASURES))
    notes = merge_default_sentences(() if quiet else found.notes)
    tail = [] if quiet else _declared_lines(found, whole=whole)
    tail += [wrap_sentence(f"note: {clean(note)}") for note in notes]
    shown_lines = sum(line.count("\n") + 1 for line in (*head, *tail))
    for most in (None,) if whole else _MOST_CHANGES:
        lines = _difference_lines(found, most)
        if screen is None or len(lines) + shown_lines <= screen:
            break
    return "\n".join((*head, *lines, *tail))


def _difference_lines(result: Diff, most: int | None) -> list[str]:
    """Return at most `most` changes, and of the entries on each side only as many."""
    lines = [line for entry in result.changed[:most] for line in _change_lines(entry)]
    if most is not None and len(result.changed) > most:
        lines.append(f"and {len(result.changed) - most:,} more differences (--all shows them)")
    for word, names in (("left", result.only_left), ("right", result.only_right)):
        lines += [f"only {word}: {fit_path(clean(name), len(word) + 7)}" for name in names[:most]]
        if most is not None and len(names) > most:
            lines.append(f"only {word}: and {len(names) - most:,} more (--all shows them)")
    return lines


_REASONS = {
    "kept": "not converted; the sidecar records what the target needs from it",
    "dropped": "not converted, as listed in the receipt",
    "added": "added by the format's writer and not compared",
}


def _declared_lines(result: Diff, *, whole: bool) -> list[str]:
    """Return the entries declared to be on one side only: all of them, or the number of each kind."""
    if whole:
        lines = ((entry, f"only {entry.side}, {_REASONS[entry.what]}") for entry in result.declared)
        return [f"{fit_path(clean(entry.path), len(text) + 2)}: {text}" for entry, text in lines]
    sorts = dict.fromkeys((entry.side, entry.what) for entry in result.declared)
    return [
        wrap_sentence(
            f"note: {format_count(len(names), 'entry', 'entries')} only {side}, {_REASONS[what]}: {abbreviate_list(names, 3)}"  # noqa: E501
        )
        for side, what in sorts
        if (names := [clean(e.path) for e in result.declared if (e.side, e.what) == (side, what)])
    ]


def _change_lines(change: ChangedEntry) -> list[str]:
    head = clean(change.path)
    if change.values is None:
        what = f"{_format_entry(change.left)} -> {_format_entry(change.right)}"
        return [f"{fit_path(head, len(what) + 2)}: {what}"]
    values = change.values
    kinds = {entry.dtype for entry in (change.left, change.right) if isinstance(entry, Leaf)}
    types = f", {' -> '.join(sorted(kinds))}" if len(kinds) > 1 else ""
    where = f" at {list(values.at)}" if values.at else ""
    angle = "" if values.cosine is None else f", cosine {values.cosine:.6g}"
    nans = f", NaN on one side only: {values.nans:,}" if values.nans else ""
    what = f"{values.different:,} of {values.size:,} differ{types}"
    return [
        f"{fit_path(head, len(what) + 2)}: {what}",
        f"    {_format_value(values.left)} -> {_format_value(values.right)}{where}",
        f"    largest {values.max_abs:.3g}, relative {values.max_rel:.3g}{angle}{nans}",
    ]


def _diff_verdict(result: Diff) -> str:
    tensors = format_count(result.equal, "tensor")
    if result.identical:
        how = "identical after mapping" if result.by in ("agent", "conversion") else "identical"
        between = (
            f" ({' -> '.join(str(layout) for layout in result.layouts)})" if result.by == "agent" else ""
        )
        return f"{how}: {tensors}{between}"
    differing = format_count(len(result.changed), "entry differs", "entries differ")
    return (
        f"{differing}, {len(result.only_left):,} only left, "
        f"{len(result.only_right):,} only right, {tensors} equal"
    )


def _format_entry(entry: Entry) -> str:
    if not isinstance(entry, ValueLeaf):
        return f"{entry.dtype}{list(entry.shape)}"
    return clean(entry.value.name) if isinstance(entry.value, Record) else _format_value(entry.value)


def _format_value(value: object) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return shorten(clean(text), 60)


def render_diagnosis(found: Diagnosis, *, quiet: bool, alone: bool = True) -> str:
    """Return the verdict on loading, unless a listing precedes it, each finding with its fix, and notes."""
    from ckpttool.cli.tree_tables import verdict_line

    lines = [verdict_line(found.loading)] if alone and not quiet and found.loading is not None else []
    for number, finding in enumerate(found.findings):
        lines.append(wrap_sentence(f"{finding.topic}: {clean(finding.sentence)}"))
        # Several findings in a row with one fix: it is below the last one.
        following = {other.fix for other in found.findings[number + 1 : number + 2]}
        if finding.fix and finding.fix not in following:
            lines.append(wrap_sentence(f"    fix: {clean(finding.fix)}"))
    if quiet:
        return "\n".join(lines)
    lines += [wrap_sentence(f"note: {clean(note)}") for note in found.notes]
    used = [entry for entry in found.ledger if entry.use == "used"]
    lines += [wrap_sentence(clean(line)) for line in sidecar.describe_entries(used)]
    lines += [wrap_sentence(f"assumed: {clean(entry)}") for entry in _merge_assumptions(found.ledger)]
    what = f"{clean(found.path)}: {found.format}, layout {found.layout or 'none recognised'}"
    verdict = format_count(len(found.findings), "finding") if found.findings else "no problems found"
    return "\n".join([*lines, wrap_sentence(f"{what}: {verdict}")])


def _merge_assumptions(entries: Iterable[LedgerEntry]) -> Iterator[str]:
    """Yield the sentences of the assumptions, those of one origin together."""
    values: dict[str, dict[str, None]] = {}
    for entry in entries:
        if entry.use == "assumed":
            values.setdefault(entry.origin or entry.value, {})[entry.value] = None
    for origin, own in values.items():
        text = ", ".join(own)
        yield text if origin in own else f"{text}: {origin}"
