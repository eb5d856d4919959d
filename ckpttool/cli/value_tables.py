"""Tables of a checkpoint's tensors: digests, statistics, differences, findings."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.cli.columns import SHORTEST_PATH, fit_path
from ckpttool.cli.styles import format_fix, terminal_width, wrap_sentence
from ckpttool.cli.tables import labeled_lines, merge_default_sentences
from ckpttool.core import sidecar
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.text import clean, format_count, shorten
from ckpttool.core.tree import Leaf, Record, ValueLeaf

if TYPE_CHECKING:
    from ckpttool.commands.diff import Diff
    from ckpttool.commands.digest import DigestComparison
    from ckpttool.commands.doctor import Diagnosis
    from ckpttool.commands.stats import Stats
    from ckpttool.conversion.alignment import ChangedEntry, Entry
    from ckpttool.core.digests import Digest
    from ckpttool.core.sidecar import LedgerEntry
    from ckpttool.verification.moments import Moments


def render_digest(digest: Digest, compared: DigestComparison | None, *, quiet: bool) -> str:
    """Return one line per tensor in sha256sum's format, then the whole and the comparison."""
    lines = [f"{tensor.sha256}  {clean(tensor.path)}" for tensor in digest.tensors]
    lines += ["", f"{digest.sha256}  {clean(digest.path)}"]
    lines += [] if quiet else [f"checksums: {digest.checksums}"]
    if compared is not None:
        lines += labeled_lines("differs", compared.different)
        lines += labeled_lines("only here", compared.only_here)
        lines += labeled_lines("only in the saved digest", compared.only_saved)
        sentence = "equal to the saved digest" if compared.equal else "not equal to the saved digest"
        lines += [] if quiet else [sentence]
    return "\n".join(lines)


# Eight bar heights, one character wide.
_BARS = "▁▂▃▄▅▆▇█"
_HISTOGRAM, _NUMBER, _SHARE = 8, 9, 5
# Numbers of changes to try, from a pipe's to a small terminal's.
_MOST_CHANGES = (20, 12, 8, 5, 3)
_MEASURES = "relative: largest |a - b| / max(|a|, |b|); cosine: 1 for equal directions"
_HEADS = ("min", "max", "mean", "std")


def render_stats(stats: Stats, depth: int | None, sort: str, *, quiet: bool) -> str:
    """Return a line per tensor, or with `depth` per module down to that level, then warning signs."""
    if depth is not None:
        deep = [module for module in stats.modules if module.path and module.path.count("/") < depth]
        rows = [(module.path, module.moments, "") for module in (*deep, stats.modules[0])]
    else:
        rows = [
            (leaf.path, leaf.moments, _histogram_bars(leaf.histogram)) for leaf in _sort_tensors(stats, sort)
        ]
    lines = _moments_table(rows)
    lines += [
        f"{fit_path(clean(tensor.path), len(sign) + 2)}: {sign}"
        for tensor in stats.tensors
        for sign in tensor.signs
    ]
    if quiet:
        return "\n".join(lines)
    if stats.left_out:
        lines.append(f"{format_count(len(stats.left_out), 'tensor holds', 'tensors hold')} no numbers")
    everything = "all values are finite" if stats.finite else "some values are not finite"
    return "\n".join([*lines, "", f"{format_count(len(stats.tensors), 'tensor')}: {everything}"])


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


def render_diff(diff: Diff, *, whole: bool, quiet: bool, screen: int | None = None) -> str:
    """Return verdict, measures, changes (all if `whole`), entries on one side only, and notes.

    `screen` is the number of lines that the text may have; None in a pipe.
    """
    head = [] if quiet else [_diff_verdict(diff)]
    if not quiet and any(entry.values is not None for entry in diff.changed):
        head.append(wrap_sentence(_MEASURES))
    notes = merge_default_sentences(() if quiet else diff.notes)
    tail = [] if quiet else _declared_lines(diff, whole=whole)
    tail += [wrap_sentence(f"note: {clean(note)}") for note in notes]
    shown_lines = sum(line.count("\n") + 1 for line in (*head, *tail))
    for most in (None,) if whole else _MOST_CHANGES:
        lines = _difference_lines(diff, most)
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


def render_diagnosis(diagnosis: Diagnosis, *, quiet: bool, alone: bool = True) -> str:
    """Return the verdict on loading, unless a listing precedes it, each finding with its fix, and notes."""
    from ckpttool.cli.tree_tables import verdict_line

    lines = [verdict_line(diagnosis.loading)] if alone and not quiet and diagnosis.loading is not None else []
    for number, finding in enumerate(diagnosis.findings):
        lines.append(wrap_sentence(f"{finding.topic}: {clean(finding.sentence)}"))
        # Several findings in a row with one fix: it is below the last one.
        following = {other.fix for other in diagnosis.findings[number + 1 : number + 2]}
        if finding.fix and finding.fix not in following:
            lines.append(format_fix(finding.fix, "    "))
    if quiet:
        return "\n".join(lines)
    lines += [wrap_sentence(f"note: {clean(note)}") for note in diagnosis.notes]
    used = [entry for entry in diagnosis.ledger if entry.use == "used"]
    lines += [wrap_sentence(clean(line)) for line in sidecar.describe_entries(used)]
    lines += [wrap_sentence(f"assumed: {clean(entry)}") for entry in _merge_assumptions(diagnosis.ledger)]
    what = f"{clean(diagnosis.path)}: {diagnosis.format}, layout {diagnosis.layout or 'none recognised'}"
    verdict = format_count(len(diagnosis.findings), "finding") if diagnosis.findings else "no problems found"
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
