"""What `stats`, `diff` and `doctor` print: a line per tensor, change or finding, and a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool import ledger
from ckpttool.cli.columns import beside, columns, wrapped
from ckpttool.cli.tables import with_joined_defaults
from ckpttool.errors import some
from ckpttool.leaf import Leaf, Record, ValueLeaf
from ckpttool.shown import clean, count, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ckpttool.ops.difference import Changed, Diff, Entry
    from ckpttool.ops.doctor import Diagnosis
    from ckpttool.ops.moments import Moments
    from ckpttool.ops.stats import Stats

# Eight heights of a bar that is one character wide.
_BARS = "▁▂▃▄▅▆▇█"
_HISTOGRAM, _NUMBER, _SHARE = 8, 9, 5
_SHORTEST_PATH = 16
_SHOWN = 20
_HEADS = ("min", "max", "mean", "std")


def stats(found: Stats, depth: int | None, sort: str, *, quiet: bool) -> str:
    """Return a line per tensor, or with `depth` per module down to that level, then what is no good sign."""
    if depth is not None:
        deep = [each for each in found.modules if each.path and each.path.count("/") < depth]
        rows = [(each.path, each.moments, "") for each in (*deep, found.modules[0])]
    else:
        rows = [(each.path, each.moments, _bars(each.histogram)) for each in _ordered(found, sort)]
    lines = _table(rows)
    lines += [
        f"{beside(clean(each.path), len(sign) + 2)}: {sign}" for each in found.tensors for sign in each.signs
    ]
    if quiet:
        return "\n".join(lines)
    if found.left_out:
        lines.append(f"{count(len(found.left_out), 'tensor holds', 'tensors hold')} no numbers")
    everything = "every number is finite" if found.finite else "not every number is finite"
    return "\n".join([*lines, "", f"{count(len(found.tensors), 'tensor')}: {everything}"])


def _ordered(found: Stats, sort: str) -> Sequence[Any]:
    if sort == "file":
        return found.tensors
    if sort == "name":
        return sorted(found.tensors, key=lambda each: each.path)
    return sorted(
        found.tensors, key=lambda each: -(each.moments.size if sort == "size" else each.moments.norm)
    )


def _table(rows: Iterable[tuple[str, Moments, str]]) -> list[str]:
    rows = list(rows)
    drawn = _HISTOGRAM + 1 if any(bars for _, _, bars in rows) else 0
    room = columns() - len(_HEADS) * (_NUMBER + 1) - (_SHARE + 1) - drawn
    width = max(_SHORTEST_PATH, min(room, max((len(clean(path)) for path, _, _ in rows), default=0)))
    lines = [f"{'':{width}}" + "".join(f" {head:>{_NUMBER}}" for head in _HEADS) + f" {'zeros':>{_SHARE}}"]
    for path, known, bars in rows:
        cells = (known.low, known.high, known.mean, known.std) if known.finite else ()
        numbers = [f"{value:.3g}" for value in cells] or ["-"] * 4
        share = f"{known.zeros / known.size:.0%}" if known.size else "-"
        line = f"{shortened(clean(path) or 'all', width):{width}}"
        line += "".join(f" {number:>{_NUMBER}}" for number in numbers)
        lines.append(f"{line} {share:>{_SHARE}} {bars}".rstrip())
    return lines


def _bars(histogram: Sequence[int]) -> str:
    if not histogram:
        return ""
    each = len(histogram) // _HISTOGRAM
    sums = [sum(histogram[at : at + each]) for at in range(0, len(histogram), each)]
    most = max(sums)
    return "".join(_BARS[round(count / most * 7)] if count else " " for count in sums)


def diff(found: Diff, *, whole: bool, quiet: bool) -> str:
    """Return the changes (all of them if `whole`), what one side has alone, and the verdict."""
    shown = found.changed if whole else found.changed[:_SHOWN]
    lines = [line for each in shown for line in _change(each)]
    if len(shown) < len(found.changed):
        lines.append(f"and {len(found.changed) - len(shown):,} more that differ (--all shows them)")
    for word, names in (("left", found.only_left), ("right", found.only_right)):
        some = names if whole else names[:_SHOWN]
        lines += [f"only {word}: {beside(clean(name), len(word) + 7)}" for name in some]
        if len(some) < len(names):
            lines.append(f"only {word}: and {len(names) - len(some):,} more")
    if not quiet:
        lines += _declared(found, whole=whole)
        notes = with_joined_defaults(found.notes)
        lines += [*(wrapped(f"note: {clean(note)}") for note in notes), _verdict(found)]
    return "\n".join(lines)


_REASONS = {
    "kept": "not in the conversion; its sidecar keeps what it needs",
    "dropped": "not converted, as the receipt lists",
    "added": "added by the writer of the format and not compared",
}


def _declared(found: Diff, *, whole: bool) -> list[str]:
    """Return the entries that one side has alone by declaration: all of them, or how many of each sort."""
    if whole:
        lines = ((each, f"only {each.side}, {_REASONS[each.what]}") for each in found.declared)
        return [f"{beside(clean(each.path), len(text) + 2)}: {text}" for each, text in lines]
    sorts = dict.fromkeys((each.side, each.what) for each in found.declared)
    return [
        wrapped(
            f"note: {count(len(names), 'entry', 'entries')} only {side}, {_REASONS[what]}: {some(names, 3)}"
        )
        for side, what in sorts
        if (names := [clean(e.path) for e in found.declared if (e.side, e.what) == (side, what)])
    ]


def _change(change: Changed) -> list[str]:
    head = clean(change.path)
    if change.values is None:
        what = f"{_shown(change.left)} -> {_shown(change.right)}"
        return [f"{beside(head, len(what) + 2)}: {what}"]
    values = change.values
    kinds = {entry.dtype for entry in (change.left, change.right) if isinstance(entry, Leaf)}
    types = f", {' -> '.join(sorted(kinds))}" if len(kinds) > 1 else ""
    where = f" at {list(values.at)}" if values.at else ""
    angle = "" if values.cosine is None else f", cosine {values.cosine:.6g}"
    nans = f", NaN in one alone {values.nans:,}" if values.nans else ""
    what = f"{values.different:,} of {values.size:,} differ{types}"
    return [
        f"{beside(head, len(what) + 2)}: {what}",
        f"    {_text(values.left)} -> {_text(values.right)}{where}",
        f"    largest {values.max_abs:.3g}, relative {values.max_rel:.3g}{angle}{nans}",
    ]


def _verdict(found: Diff) -> str:
    tensors = count(found.equal, "tensor")
    if found.identical:
        how = "identical after mapping" if found.by in ("agent", "conversion") else "identical"
        between = f" ({' -> '.join(str(each) for each in found.layouts)})" if found.by == "agent" else ""
        return f"{how}: {tensors}{between}"
    differing = count(len(found.changed), "entry differs", "entries differ")
    return (
        f"{differing}, {len(found.only_left):,} only left, "
        f"{len(found.only_right):,} only right, {tensors} equal"
    )


def _shown(entry: Entry) -> str:
    if not isinstance(entry, ValueLeaf):
        return f"{entry.dtype}{list(entry.shape)}"
    return clean(entry.value.name) if isinstance(entry.value, Record) else _text(entry.value)


def _text(value: object) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return shortened(clean(text), 60)


def diagnosis(found: Diagnosis, *, quiet: bool) -> str:
    """Return each finding with what mends it, what there is to know, and the verdict."""
    lines = []
    for each in found.findings:
        lines.append(wrapped(f"{each.topic}: {clean(each.sentence)}"))
        lines += [wrapped(f"    fix: {clean(each.fix)}")] if each.fix else []
    if quiet:
        return "\n".join(lines)
    lines += [wrapped(f"note: {clean(note)}") for note in found.notes]
    used = [entry for entry in found.ledger if entry.use == "used"]
    lines += [wrapped(clean(line)) for line in ledger.lines(used)]
    lines += [wrapped(f"assumed: {clean(each)}") for each in ledger.assumptions(found.ledger)]
    what = f"{clean(found.path)}: {found.format}, layout {found.layout or 'none recognised'}"
    verdict = count(len(found.findings), "finding") if found.findings else "nothing found"
    return "\n".join([*lines, wrapped(f"{what}: {verdict}")])
