"""State of the browser, independent of the screen."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from rich.cells import cell_len, chop_cells

from ckpttool.commands import folder, inspect, stats
from ckpttool.commands.diff import AUTO, CheckpointAlignment, DiffSide, align_checkpoints
from ckpttool.commands.inspect import (
    CheckpointSummary,
    ModuleSummary,
    Sort,
    TensorRow,
    ValueRow,
    describe_module_kind,
    group_by_module,
    json_value,
    module_entries,
    signature_lines,
    skip_wrapping_modules,
    user_given_names,
    walk_modules,
)
from ckpttool.commands.stats import ArrayDifference, ChangedEntry, Entry, Moments
from ckpttool.core import urls
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UsageError
from ckpttool.core.source import StreamedArray
from ckpttool.core.text import clean, compile_glob, describe_error, format_count, format_size, shorten
from ckpttool.core.tree import Leaf, Path, ValueLeaf

# Keys of the browser: their actions, for the screens, the last line and the help.


class BrowserKey(NamedTuple):
    """Keys as shown and as Textual names them, the action, and its description.

    `word` labels the key in the last line ("" to omit it). `two` is true for keys that need two
    checkpoints.
    """

    shown: str
    names: str
    action: str
    does: str
    word: str = ""
    two: bool = False


TREE: tuple[BrowserKey, ...] = (
    BrowserKey(
        "↵",
        "enter",
        "enter",
        "fold or unfold a module; show a tensor's values; go from an alias to its tensor",
        "open",
    ),
    BrowserKey(
        "/", "slash", "search", "search for part of a name, a pattern with * or ?, or a native key", "search"
    ),
    BrowserKey("n  N", "n", "following(False)", "next and previous match"),
    BrowserKey("", "N", "following(True)", ""),
    BrowserKey("v", "v", "values", "show the values as a table", "values"),
    BrowserKey("h", "h", "histogram", "show the histogram, one line per range", "bars"),
    BrowserKey("d  D", "d", "difference(False)", "next and previous difference", "difference", two=True),
    BrowserKey("", "D", "difference(True)", "", two=True),
    BrowserKey("a", "a", "alias", "cycle through the aliases of a tensor", "alias"),
    BrowserKey(
        "o", "o", "relative", "go from a slot to its parameter, or from a parameter to its slots", "slot"
    ),
    BrowserKey("b", "b", "back", "go back after a jump"),
    BrowserKey("↑ ↓", "", "", "move (also PageUp, PageDown, Home, End)"),
    BrowserKey("→ ←", "", "", "unfold; fold, or go to the parent module"),
    BrowserKey("e", "e", "everything", "unfold everything in a module"),
    BrowserKey("s", "s", "sort", "sort order: as in the file, by size, by name"),
    BrowserKey("Tab", "tab", "other_pane", "switch between scrolling the details and the tree"),
    BrowserKey("i", "i", "about", "show format, notes and what loading would import and call", "info"),
    BrowserKey("?", "question_mark,f1", "help", "show this help", "help"),
    BrowserKey("q", "q,ctrl+q", "leave", "leave", "quit"),
)

VALUES: tuple[BrowserKey, ...] = (
    BrowserKey("↑ ↓ ← →", "", "", "move (also PageUp, PageDown, Home, End)", "move"),
    BrowserKey(
        "[ ]",
        "left_square_bracket",
        "table(-1)",
        "previous and next table, for three or more axes",
        "table",
    ),
    BrowserKey("", "right_square_bracket", "table(1)", ""),
    BrowserKey("g", "g", "go", "go to an index, e.g. 3, 17", "go to"),
    BrowserKey("x", "x", "side", "switch between left, right and left - right", "side", two=True),
    BrowserKey("Esc", "escape,q", "leave", "back", "back"),
)

PAGE: tuple[BrowserKey, ...] = (
    BrowserKey("↑ ↓", "", "", "scroll (also PageUp, PageDown, Home, End)", "scroll"),
    BrowserKey("Esc", "escape,q,enter", "leave", "back", "back"),
)


# Lines of styled text, independent of drawing: fitted to cells, wrapped, in columns.

# Meaning of a piece of text; panes.py maps it to a style.
Tone = Literal["", "dim", "head", "bar", "good", "warn", "bad", "mark"]
_LABEL = 9
# Maximum lines per fact: a name of a megabyte shows its beginning and its end.
_MOST = 6


class TextPiece(NamedTuple):
    """Text of one tone."""

    text: str
    tone: Tone = ""


Line = tuple[TextPiece, ...]
BLANK: Line = ()


def fit_text(text: str, cells: int) -> str:
    """Return text without control characters, at most `cells` wide, shortened in the middle."""
    text = shorten(clean(text), cells)
    if text.isascii():
        return text
    room = cells
    while cell_len(text) > cells and room > 0:
        room -= 1
        text = shorten(text, room)
    return text


def pad_text(text: str, cells: int, *, right: bool = False) -> str:
    """Return the text fitted to exactly `cells` cells, aligned left or right."""
    text = fit_text(text, cells)
    gap = " " * (cells - cell_len(text))
    return gap + text if right else text + gap


def wrap_text(text: str, cells: int, most: int = _MOST) -> list[str]:
    """Return text without control characters, wrapped to `cells`: at blanks, after slashes, or anywhere.

    The middle is left out if there are more than `most` lines.
    """
    text = shorten(clean(text), cells * most)
    lines, here = [], ""
    for word in _break_words(text):
        for part in chop_cells(word, max(1, cells)) if cell_len(word) > cells else [word]:
            if here and cell_len(here) + cell_len(part.rstrip()) > cells:
                lines.append(here.rstrip())
                here = ""
            here += part
    lines.append(here.rstrip())
    return lines


def _break_words(text: str) -> Iterator[str]:
    """Split the text into parts after which a line may break."""
    start = 0
    for at, letter in enumerate(text):
        if letter in " /" and text[at + 1 : at + 2] not in (" ", ""):
            yield text[start : at + 1]
            start = at + 1
    yield text[start:]


def fact_lines(label: str, text: str, cells: int, tone: Tone = "") -> list[Line]:
    """Return a label and its text, wrapped in a separate column."""
    first, *more = wrap_text(text, max(1, cells - _LABEL))
    lines: list[Line] = [(TextPiece(f"{label:<{_LABEL}}", "dim"), TextPiece(first, tone))]
    return lines + [(TextPiece(" " * _LABEL), TextPiece(line, tone)) for line in more]


def wrap_paragraph(text: str, cells: int, tone: Tone = "") -> list[Line]:
    """Return a sentence wrapped to `cells`."""
    return [(TextPiece(line, tone),) for line in wrap_text(text, cells)]


def to_plain_text(lines: Iterable[Line]) -> str:
    """Return the lines as plain text without tones."""
    return "\n".join("".join(piece.text for piece in line).rstrip() for line in lines)


# Contents of one checkpoint, or of two side by side: entries by name, and their relations.

Row = TensorRow | ValueRow


@dataclass(frozen=True, slots=True)
class AliasRow(ValueRow):
    """Alias from user code, shown at its own place in the tree; `target` is the tensor's path."""

    target: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class BrowserListing:
    """Contents of the browser.

    `summaries` has one checkpoint, or the left and the right one. `rows` are all entries by name (the
    left one's if both have it), `right` those of the right one. `root` holds them and the links.
    `links` are a tensor's aliases shown in the tree, `slots` the optimizer state of a parameter.
    """

    summaries: tuple[CheckpointSummary, ...]
    root: ModuleSummary
    rows: Mapping[str, Row]
    links: Mapping[str, tuple[str, ...]]
    slots: Mapping[str, tuple[str, ...]]
    alignment: CheckpointAlignment | None = None
    right: Mapping[str, Row] | None = None

    def ways(self, name: str) -> tuple[str, ...]:
        """Return the tree positions of one storage: the tensor's own path, then its aliases."""
        row = self.rows.get(name)
        name = row.target if isinstance(row, AliasRow) else name
        return (name, *self.links.get(name, ()))

    def relatives(self, name: str) -> tuple[str, ...]:
        """Return a parameter and its slots, given the name of either."""
        row = self.rows.get(name)
        of = row.of if isinstance(row, TensorRow) and row.of in self.rows else None
        return (of or name, *self.slots.get(of or name, ()))


def list_for_browser(
    path: str, other: str | None = None, *, glob: str | None = None, by: str = AUTO, layout: str | None = None
) -> BrowserListing:
    """List the checkpoint at the path, paired with `other` if given; no tensor is read.

    `by` selects how entries are paired, as in `diff`. Raise any error of opening, and UsageError for a
    folder of checkpoints without a latest one.
    """
    left = _require_summary(path, None if other is not None else glob, layout)
    if other is None:
        return _list_one(left)
    right = _require_summary(other, None, None)
    sides = (DiffSide(each.checkpoint, each.binding) for each in (left, right))
    return _list_two(left, right, align_checkpoints(*sides, glob=glob, by=by))


def _require_summary(path: str, glob: str | None, layout: str | None) -> CheckpointSummary:
    found = folder.inspect_path(path, glob, layout)
    if not isinstance(found, CheckpointSummary):
        raise UsageError("no single checkpoint to browse", file=path, hint=found.hint)
    return found


def _list_one(found: CheckpointSummary) -> BrowserListing:
    entries: tuple[Row, ...] = (*found.tensors, *found.values)
    rows = {row.path: row for row in entries}
    links = _add_aliases(found.tensors, rows)
    tree = found.checkpoint.tree
    modules = group_by_module(rows.items(), tree.containers) if links else found.modules
    return BrowserListing(
        (found,), modules[0] if modules else ModuleSummary("", "", None), rows, links, _group_slots(rows)
    )


def _add_aliases(tensors: Iterable[TensorRow], rows: dict[str, Row]) -> dict[str, tuple[str, ...]]:
    """Add a link to `rows` for each alias from user code; return the links by tensor."""
    found: dict[str, tuple[str, ...]] = {}
    for row in tensors:
        names = tuple(name for name in dict.fromkeys(user_given_names(row.aliases)) if name not in rows)
        if names:
            found[row.path] = names
            for name in names:
                rows[name] = AliasRow(name, (), ValueLeaf(None), row.path)
    return found


def _list_two(
    left: CheckpointSummary, right: CheckpointSummary, pairs: CheckpointAlignment
) -> BrowserListing:
    first = _side_rows(pairs.left, pairs.places[0], left)
    second = _side_rows(pairs.right, pairs.places[1], right)
    rows = {**first, **{name: row for name, row in second.items() if name not in first}}
    containers = {} if pairs.by == "agent" else left.checkpoint.tree.containers
    modules = group_by_module(rows.items(), containers)
    return BrowserListing((left, right), modules[0], rows, {}, _group_slots(rows), pairs, second)


def _side_rows(
    entries: Mapping[str, Entry], places: Mapping[str, Path], found: CheckpointSummary
) -> dict[str, Row]:
    stored = {row.keys: row for row in found.tensors}
    names = {found.checkpoint.tree.names.get(place, name): name for name, place in places.items()}
    rows: dict[str, Row] = {}
    for name, entry in entries.items():
        place = places[name]
        own = stored.get(place)
        if isinstance(entry, Leaf):
            of = names.get(own.of) if own is not None and own.of is not None else None
            rows[name] = TensorRow(name, place, entry, of, own.aliases if own is not None else ())
        else:
            rows[name] = ValueRow(name, place, entry)
    return rows


def _group_slots(rows: Mapping[str, Row]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for row in rows.values():
        if isinstance(row, TensorRow) and row.of is not None:
            found.setdefault(row.of, []).append(row.path)
    return {name: tuple(slots) for name, slots in found.items()}


# Pages that are not about one entry: the overview and the key help.

_KEY = 11
_LINES = 200


def about_lines(listing: BrowserListing, cells: int) -> list[Line]:
    """Return an overview of the checkpoint, or of both."""
    lines: list[Line] = []
    for found in listing.summaries:
        lines += [*_summary_lines(found, cells), BLANK]
    for note in listing.alignment.notes if listing.alignment is not None else ():
        lines += wrap_paragraph(f"note: {note}", cells)
    return lines


def _summary_lines(found: CheckpointSummary, cells: int) -> Iterator[Line]:
    checkpoint, totals = found.checkpoint, found.totals
    yield from wrap_paragraph(urls.display_url(checkpoint.path), cells, "head")
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    yield from fact_lines("format", f"{checkpoint.format} ({checks})", cells)
    if checkpoint.writer:
        yield from fact_lines("writer", checkpoint.writer, cells)
    evidence = f": {found.evidence}" if found.evidence else ""
    yield from fact_lines("layout", f"{found.layout or 'none recognised'}{evidence}", cells)
    files = f"{format_count(len(checkpoint.files), 'file')}, {format_size(totals.stored_nbytes)}"
    yield from fact_lines("on disk", files, cells)
    for file in checkpoint.files[:_LINES]:
        yield from fact_lines("", urls.display_url(file.path), cells, "dim")
    yield BLANK
    yield (TextPiece(f"{'':10}{'tensors':>9} {'elements':>15} {'size':>8}", "dim"),)
    rows = [(role, *sums) for role, sums in totals.roles.items()]
    whole = ("all", totals.tensors, sum(row[2] for row in rows), totals.nbytes)
    for name, tensors, elements, nbytes in (*rows, whole):
        yield (
            TextPiece(f"{name:10}", "dim"),
            TextPiece(f"{tensors:>9,} {elements:>15,} {format_size(nbytes):>8}"),
        )
    yield from _load_safety_lines(found, cells)
    for note in found.notes:
        yield BLANK
        yield from wrap_paragraph(f"note: {note}", cells)
    signatures = signature_lines(checkpoint.details, cells)
    yield from ([BLANK] if signatures else [])
    yield from ((TextPiece(line),) for line in signatures[:_LINES])


def _load_safety_lines(found: CheckpointSummary, cells: int) -> Iterator[Line]:
    verdict = found.verdict
    yield BLANK
    yield from wrap_paragraph(verdict.sentence, cells, "good" if verdict.label == inspect.SAFE else "warn")
    for line in inspect.format_audit(found.checkpoint.code_references)[:_LINES]:
        yield from wrap_paragraph(line, cells, "dim")


def key_help(cells: int, *, two: bool) -> list[Line]:
    """Return the key help."""
    lines: list[Line] = []
    for title, table in (("In the tree", TREE), ("In the table of values", VALUES)):
        lines.append((TextPiece(title, "head"),))
        for key in table:
            if key.shown and (two or not key.two):
                first, *more = wrap_paragraph(key.does, cells - _KEY)
                lines.append((TextPiece(f"{key.shown:<{_KEY}}", "mark"), *first))
                lines += [(TextPiece(" " * _KEY), *line) for line in more]
        lines.append(BLANK)
    marks = [("~", "different"), ("-", "only left"), ("+", "only right"), ("!", "unread")]
    if two:
        lines.append((TextPiece("Marks", "head"),))
        lines += [(TextPiece(f"{mark:<{_KEY}}", "mark"), TextPiece(clean(does))) for mark, does in marks]
    return lines


# Comparison of two checkpoints: shapes and types at once, values as they are read.

Mark = Literal["changed", "left", "right", "error"]


class ComparisonState:
    """Comparison results so far. A thread computes more in steps; `note` records them."""

    def __init__(self, listing: BrowserListing, pairs: CheckpointAlignment) -> None:
        self.pairs = pairs
        self.marks: dict[str, Mark] = {}
        self.changes: dict[str, ChangedEntry] = {}
        self.errors: dict[str, str] = {}
        self.below: dict[str, int] = {}
        self.known: set[str] = set()
        both = [name for name in listing.rows if name in pairs.left and name in pairs.right]
        self._waiting = [name for name in both if self._needs_reading(name)]
        self.total = len(both)
        for name in listing.rows:
            if name not in pairs.right:
                self._mark(name, "left")
            elif name not in pairs.left:
                self._mark(name, "right")
        for name in set(both).difference(self._waiting):
            self.note(name, pairs.change(name))

    def _needs_reading(self, name: str) -> bool:
        left, right = self.pairs.left[name], self.pairs.right[name]
        if isinstance(left, Leaf) and isinstance(right, Leaf):
            return left.shape == right.shape
        return isinstance(left, Leaf) or isinstance(right, Leaf)

    @property
    def finished(self) -> bool:
        """Whether every pair has been compared."""
        return len(self.known) == self.total

    def steps(self, note: Callable[[str, ChangedEntry | str | None], None]) -> Iterator[None]:
        """Compare one pair per step; report its change, None if equal, or an error message."""
        for name in self._waiting:
            try:
                found: ChangedEntry | str | None = self.pairs.change(name)
            except CkpttoolError as error:
                found = describe_error(error)
            note(name, found)
            yield

    def note(self, name: str, found: ChangedEntry | str | None) -> None:
        """Record the result of a pair."""
        self.known.add(name)
        if isinstance(found, str):
            self.errors[name] = found
            self._mark(name, "error")
        elif found is not None:
            self.changes[name] = found
            self._mark(name, "changed")

    def state(self) -> str:
        """Return the progress or the result in a few words."""
        kinds = list(self.marks.values())
        words = [format_count(kinds.count("changed"), "differs", "differ")]
        words += [f"{kinds.count(side):,} only {side}" for side in ("left", "right") if side in kinds]
        words += [f"{kinds.count('error'):,} unread"] if "error" in kinds else []
        if not self.finished:
            words.append(f"{len(self.known) / self.total:.0%} compared")
        elif not kinds:
            words = ["identical after mapping" if self.pairs.by == "agent" else "identical"]
        return ", ".join(words)

    def _mark(self, name: str, mark: Mark) -> None:
        self.marks[name] = mark
        at = name.rfind("/")
        while at >= 0:
            self.below[name[:at]] = self.below.get(name[:at], 0) + 1
            at = name.rfind("/", 0, at)


# Statistics of one tensor: read on demand, large tensors in pieces.


@dataclass(frozen=True, slots=True)
class TensorNumbers:
    """A tensor's moments, histogram and warning signs, or the error that prevented reading them."""

    moments: Moments | None = None
    histogram: tuple[int, ...] = ()
    signs: tuple[str, ...] = ()
    error: str | None = None


def read_numbers(row: Row | None, done: Callable[[TensorNumbers | None], None]) -> Iterator[None]:
    """Read a tensor piece by piece; report the result at the end, None if it has no numbers.

    Large tensors are read twice, and their units are not examined; see stats.signs.
    """
    if not isinstance(row, TensorRow) or row.leaf.dtype == "string" or not row.leaf.size:
        done(None)
        return
    try:
        values = row.leaf.values()
        if isinstance(values, StreamedArray):
            yield from _read_streaming(row, values, done)
            return
        found = stats.tensor_stats(row.path, row.keys, row.leaf, values)
        done(TensorNumbers(found.moments, found.histogram, found.signs))
    except CkpttoolError as error:
        done(TensorNumbers(error=describe_error(error)))


def _read_streaming(
    row: TensorRow, values: StreamedArray, done: Callable[[TensorNumbers | None], None]
) -> Iterator[None]:
    known = Moments()
    for piece in values:
        known += stats.compute_moments(piece)
        yield
    counts: list[int] = []
    for piece in values:
        here = stats.histogram(piece, known)
        counts = [a + b for a, b in zip(counts, here, strict=True)] if counts else list(here)
        yield
    done(TensorNumbers(known, tuple(counts), tuple(stats.find_warning_signs(row.keys, row.leaf, known))))


# Text histogram: a few lines of columns, or a line per range.

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_ACROSS = " ▏▎▍▌▋▊▉█"
_TALL = 4


def column_lines(found: TensorNumbers, cells: int) -> list[Line]:
    """Return the histogram as columns, four lines tall, with its range below; empty without a histogram."""
    counts, known = found.histogram, found.moments
    if not counts or known is None:
        return []
    each = max(1, min(3, cells // len(counts)))
    most = max(counts)
    # Nonzero counts stay visible.
    heights = [max(1, round(count / most * _TALL * 8)) if count else 0 for count in counts]
    lines: list[Line] = []
    for row in range(_TALL - 1, -1, -1):
        text = "".join(_EIGHTHS[min(8, max(0, height - 8 * row))] * each for height in heights)
        lines.append((TextPiece(text.rstrip(), "bar"),))
    low, high = f"{known.low:.4g}", f"{known.high:.4g}"
    gap = max(1, each * len(counts) - len(low) - len(high))
    return [*lines, (TextPiece(f"{low}{' ' * gap}{high}", "dim"),)]


def bar_lines(found: TensorNumbers, cells: int) -> list[Line]:
    """Return a line per histogram range: its ends, a bar, the count and the share."""
    counts, known = found.histogram, found.moments
    if not counts or known is None:
        return []
    step = (known.high - known.low) / len(counts)
    ends = [f"{known.low + step * at:.4g}" for at in range(len(counts))] + [f"{known.high:.4g}"]
    wide, digits = max(map(len, ends)), len(f"{max(counts):,}")
    room = max(4, cells - 2 * wide - digits - 15)
    lines: list[Line] = []
    for at, count in enumerate(counts):
        label = f"{ends[at]:>{wide}} to {ends[at + 1]:>{wide}}  "
        bar = _draw_bar(count / max(counts) * room, count)
        share = f"{count / known.finite:.1%}"
        lines.append(
            (
                TextPiece(label, "dim"),
                TextPiece(f"{bar:<{room}}", "bar"),
                TextPiece(f"  {count:>{digits},} {share:>6}"),
            )
        )
    return lines


def _draw_bar(length: float, count: int) -> str:
    eighths = max(round(8 * length), int(count > 0))
    return _ACROSS[8] * (eighths // 8) + _ACROSS[eighths % 8].strip()


def histogram_lines(read: Sequence[TensorNumbers | None], cells: int) -> list[Line]:
    """Return the histogram bars of each side, one side after the other."""
    lines: list[Line] = []
    for word, found in zip(("left", "right") if len(read) > 1 else ("",), read, strict=True):
        if found is not None:
            lines += [(TextPiece(word, "head"),)] if word else []
            lines += [*bar_lines(found, cells), BLANK]
    return lines


# Details of one entry: its facts, its statistics, its differences from the other side.

# Numbers of both sides, or None while they are being read.
Read = Sequence[TensorNumbers | None] | None
_NAMES = 12
_FACTS = 12
# Maximum lines of a long value, and lines reserved for numbers that are being read.
_LONG, _COMING = 200, 9


def detail_lines(
    listing: BrowserListing,
    comparison: ComparisonState | None,
    entry: Row | ModuleSummary,
    read: Read,
    cells: int,
) -> list[Line]:
    """Return the lines about an entry, for a page of this width in cells."""
    lines = wrap_paragraph(entry.path or '""', cells, "head")
    if isinstance(entry, ModuleSummary):
        return [*lines, *_module_lines(comparison, entry, cells)]
    if isinstance(entry, AliasRow):
        lines += wrap_paragraph("alias of", cells, "dim")
        lines += wrap_paragraph(entry.target, cells)
        return lines
    lines += _type_lines(entry, cells)
    if comparison is not None:
        lines += _comparison_lines(comparison, entry.path, cells)
    lines += _number_lines(entry, read, cells)
    return [*lines, *_related_lines(listing, entry, cells)]


def format_shape(leaf: Leaf) -> str:
    """Return type and shape in the usual form: `float32[17, 256]`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def _module_lines(comparison: ComparisonState | None, module: ModuleSummary, cells: int) -> Iterator[Line]:
    if what := describe_module_kind(module):
        yield from wrap_paragraph(what if module.built else f"object of {what}, not built", cells)
    yield BLANK
    yield from fact_lines("tensors", f"{module.tensors:,}", cells)
    yield from fact_lines("trained", format_count(module.parameters, "parameter"), cells)
    yield from fact_lines("size", format_size(module.nbytes), cells)
    for name, value in list(module.facts.items())[:_FACTS]:
        if isinstance(value, str | int | float | bool):
            yield from fact_lines(fit_text(name, 8), str(value), cells)
    if comparison is not None and (found := comparison.below.get(module.path, 0)):
        yield BLANK
        yield from wrap_paragraph(f"{format_count(found, 'differs', 'differ')} in this module", cells, "mark")


def _type_lines(row: Row, cells: int) -> Iterator[Line]:
    if not isinstance(row, TensorRow):
        shown = json_value(row.leaf)
        yield from wrap_paragraph(str(shown["type"]), cells, "dim")
        yield BLANK
        yield from ((TextPiece(line),) for line in wrap_text(str(shown["value"]), cells, _LONG))
        return
    leaf = row.leaf
    lines = [format_shape(leaf), format_count(leaf.size, "element")]
    lines += [format_size(leaf.nbytes)] if leaf.nbytes else []
    yield from wrap_paragraph("  ".join(lines), cells)
    yield from wrap_paragraph(_describe_role(leaf), cells, "dim")


def _related_lines(listing: BrowserListing, row: Row, cells: int) -> Iterator[Line]:
    """Yield the names of a tensor and its related entries."""
    if not isinstance(row, TensorRow):
        return
    leaf = row.leaf
    yield BLANK
    yield from fact_lines("key", leaf.key, cells)
    if leaf.name and leaf.name != leaf.key:
        yield from fact_lines("variable", leaf.name, cells)
    if row.of is not None:
        yield from fact_lines(f"{leaf.slot or 'slot'} of"[:8], row.of, cells)
    for name in listing.slots.get(row.path, ())[:_NAMES]:
        slot = listing.rows[name]
        word = (slot.leaf.slot if isinstance(slot, TensorRow) else None) or "slot"
        yield from fact_lines(f"slot {word}"[:8], name, cells)
    for at, name in enumerate(row.aliases[:_NAMES]):
        yield from fact_lines("also" if at == 0 else "", name, cells)
    if len(row.aliases) > _NAMES:
        yield from fact_lines("", f"and {format_count(len(row.aliases) - _NAMES, 'more name')}", cells)


def _describe_role(leaf: Leaf) -> str:
    if leaf.trainable is None or leaf.role != "parameter":
        return leaf.role
    return f"{leaf.role}, {'trained' if leaf.trainable else 'frozen'}"


def _comparison_lines(comparison: ComparisonState, name: str, cells: int) -> Iterator[Line]:
    mark = comparison.marks.get(name)
    yield BLANK
    if mark in ("left", "right"):
        yield from wrap_paragraph(f"only {mark}", cells, "mark")
    elif mark == "error":
        yield from wrap_paragraph(comparison.errors[name], cells, "bad")
    elif (change := comparison.changes.get(name)) is not None:
        yield from _change_lines(change, cells)
    else:
        yield from wrap_paragraph(
            "identical" if name in comparison.known else "not compared yet", cells, "dim"
        )


def _change_lines(change: ChangedEntry, cells: int) -> Iterator[Line]:
    values = change.values
    if values is None:
        yield from wrap_paragraph(f"different {change.what}", cells, "mark")
        yield from fact_lines("left", _describe_entry(change.left), cells)
        yield from fact_lines("right", _describe_entry(change.right), cells)
        return
    yield from wrap_paragraph(f"{values.different:,} of {values.size:,} differ", cells, "mark")
    yield from _difference_lines(values, cells)


def _difference_lines(values: ArrayDifference, cells: int) -> Iterator[Line]:
    where = f" at {list(values.at)}" if values.at else ""
    yield from fact_lines("largest", f"{values.max_abs:.4g}{where}", cells)
    yield from fact_lines("relative", f"{values.max_rel:.4g}", cells)
    yield from fact_lines("left", _format_number(values.left), cells)
    yield from fact_lines("right", _format_number(values.right), cells)
    if values.cosine is not None:
        yield from fact_lines("cosine", f"{values.cosine:.9g}", cells)
    if values.nans:
        yield from fact_lines("NaN", f"{values.nans:,} on one side only", cells, "bad")


def _format_number(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _describe_entry(entry: Entry) -> str:
    if isinstance(entry, Leaf):
        return format_shape(entry)
    shown = json_value(entry)
    return f"{shown['value']} ({shown['type']})"


def _number_lines(row: Row, read: Read, cells: int) -> Iterator[Line]:
    if not isinstance(row, TensorRow) or row.leaf.dtype == "string":
        return
    yield BLANK
    if not row.leaf.size:
        yield from wrap_paragraph("no elements", cells, "dim")
        return
    if read is None:
        # Reserve the final number of lines, so that the text below does not move.
        yield from wrap_paragraph("reading ...", cells, "dim")
        yield from [BLANK] * (_COMING - 1)
        return
    for found in read:
        if found is not None and found.error is not None:
            yield from wrap_paragraph(found.error, cells, "bad")
    known = [found.moments if found is not None else None for found in read]
    yield from _number_table(known, cells)
    for found in read:
        if found is None:
            continue
        for sign in found.signs:
            yield from wrap_paragraph(sign, cells, "warn")
    first = next((found for found in read if found is not None and found.histogram), None)
    if first is not None:
        yield BLANK
        yield from column_lines(first, cells)


def _number_table(known: Sequence[Moments | None], cells: int) -> Iterator[Line]:
    """Yield the numbers: two per line, or one per line with a column for each side."""
    rows = [_format_moments(each) if each is not None else {} for each in known]
    labels = list(dict.fromkeys(name for row in rows for name in row))
    if len(known) == 1:
        wide = min(12, max(8, (cells - 15) // 2))
        for at in range(0, len(labels), 2):
            pair = labels[at : at + 2]
            yield tuple(piece for label in pair for piece in _number_cell(label, [rows[0]], wide))
        return
    wide = min(14, max(8, (cells - 7) // 2 - 1))
    heads = "".join(f" {word:>{wide}}" for word in ("left", "right"))
    if labels:
        yield (TextPiece(f"{'':6}{heads}", "dim"),)
    for label in labels:
        yield _number_cell(label, rows, wide)


def _number_cell(label: str, rows: Sequence[Mapping[str, str]], wide: int) -> Line:
    tone: Tone = "bad" if label in ("NaN", "inf") else ""
    text = "".join(f" {row.get(label, '-'):>{wide}}" for row in rows)
    return TextPiece(f"{label:<6}", "dim"), TextPiece(text, tone), TextPiece("  ")


def _format_moments(known: Moments) -> Mapping[str, str]:
    found = {}
    if known.finite:
        named = (("min", known.low), ("mean", known.mean), ("max", known.high), ("std", known.std))
        found = {label: f"{value:.5g}" for label, value in (*named, ("norm", known.norm))}
    found["zeros"] = f"{known.zeros:,}"
    found |= {label: f"{n:,}" for label, n in (("NaN", known.nans), ("inf", known.infs)) if n}
    return found


# Unfolded lines of the tree: only these exist, whatever the size of the checkpoint.


@dataclass(frozen=True, slots=True)
class OutlineLine:
    """One line: `name` is the text shown, `path` the full path."""

    level: int
    name: str
    path: str
    entry: Row | ModuleSummary


class Outline:
    """The visible (unfolded) lines, from the top."""

    def __init__(self, root: ModuleSummary, room: int = 0) -> None:
        """Start with the first level, and unfold as many modules from the top as fit into `room` lines."""
        self.root = root
        self.sort: Sort = "file"
        self.lines: list[OutlineLine] = []
        self._open: set[str] = set()
        self._build()
        self._unfold(room)

    def is_open(self, line: OutlineLine) -> bool:
        """Return whether the line's entries are shown."""
        return isinstance(line.entry, ModuleSummary) and line.path in self._open

    def open(self, at: int) -> None:
        """Unfold the module in line `at`."""
        line = self.lines[at]
        if isinstance(line.entry, ModuleSummary) and line.path not in self._open:
            self._open.add(line.path)
            self._show(at, line.entry)

    def close(self, at: int) -> None:
        """Fold the module in line `at`."""
        line = self.lines[at]
        if self.is_open(line):
            self._open.discard(line.path)
            below = takewhile(lambda each: each.level > line.level, self.lines[at + 1 :])
            del self.lines[at + 1 : at + 1 + sum(1 for _ in below)]

    def open_all(self, at: int) -> None:
        """Unfold the module in line `at` and all modules in it."""
        module = self.lines[at].entry
        if isinstance(module, ModuleSummary):
            self.close(at)
            self._open |= {each.path for each in walk_modules(module)}
            self._show(at, module)

    def _show(self, at: int, module: ModuleSummary) -> None:
        self.lines[at + 1 : at + 1] = self._below(module, self.lines[at].level + 1)

    def above(self, at: int) -> int:
        """Return the line of the parent module of line `at`; `at` itself at the first level."""
        level = self.lines[at].level
        return next((n for n in range(at - 1, -1, -1) if self.lines[n].level < level), at)

    def order(self, sort: Sort) -> None:
        """Sort the entries of every module."""
        self.sort = sort
        self._build()

    def reveal(self, path: str) -> int | None:
        """Unfold the parents of an entry; return its line, or None if it is not in the tree."""
        at, start, end = None, 0, len(self.lines)
        for here in _path_prefixes(path):
            # A tensor and a module may have the same name.
            named = (n for n in range(start, end) if self.lines[n].path == here)
            found = next((n for n in named if here == path or self._is_module(self.lines[n])), None)
            if found is None:
                continue
            at = found
            if here != path:
                self.open(at)
                level = self.lines[at].level
                start = at + 1
                end = next(
                    (n for n in range(start, len(self.lines)) if self.lines[n].level <= level),
                    len(self.lines),
                )
        return at if at is not None and self.lines[at].path == path else None

    def _build(self) -> None:
        self.lines = self._below(self.root, 0)

    def _below(self, module: ModuleSummary, level: int) -> list[OutlineLine]:
        """Return the visible lines in a module."""
        made: list[OutlineLine] = []
        waiting = [(level, name, entry) for name, entry in reversed(module_entries(module, self.sort))]
        while waiting:
            depth, name, entry = waiting.pop()
            if isinstance(entry, ModuleSummary):
                name, entry = skip_wrapping_modules(name, entry)
                if entry.path in self._open:
                    below = reversed(module_entries(entry, self.sort))
                    waiting += [(depth + 1, each, inner) for each, inner in below]
            made.append(OutlineLine(depth, name, entry.path, entry))
        return made

    def _unfold(self, room: int) -> None:
        """Unfold level by level as long as all lines of a level fit."""
        level = 0
        while modules := [
            n for n, each in enumerate(self.lines) if each.level == level and self._is_module(each)
        ]:
            inner = [self.lines[at].entry for at in modules]
            more = sum(len(each.rows) + len(each.below) for each in inner if isinstance(each, ModuleSummary))
            if len(self.lines) + more > room:
                return
            for at in reversed(modules):
                self.open(at)
            level += 1

    @staticmethod
    def _is_module(line: OutlineLine) -> bool:
        return isinstance(line.entry, ModuleSummary)


def _path_prefixes(path: str) -> list[str]:
    """Return the paths of an entry's parents, from the top, and its own."""
    return [path[:at] for at, letter in enumerate(path) if letter == "/"] + [path]


# Reader thread: requests from the current view come before the background comparison.

# In order of urgency; only the latest request of each kind is kept.
Kind = Literal["values", "numbers", "comparison"]
_ORDER: tuple[Kind, ...] = ("values", "numbers", "comparison")
# A job runs one step at a time, so that a more urgent one can run in between.
Job = Iterator[None]


class ReaderThread:
    """Daemon thread for reading, which ends with the program."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """Start the thread; it calls `failed` with unexpected errors."""
        self._failed = failed
        self._jobs: dict[Kind, Job] = {}
        self._changed = threading.Condition()
        self._busy = False
        # Keep the user's limits in the thread.
        work = contextvars.copy_context().run
        threading.Thread(target=work, args=(self._work,), daemon=True, name="reader").start()

    def request(self, kind: Kind, job: Job) -> None:
        """Schedule the job; an unfinished job of the same kind is dropped after its current step."""
        with self._changed:
            self._jobs[kind] = job
            self._changed.notify()

    def idle(self) -> bool:
        """Return whether no job is left."""
        with self._changed:
            return not self._jobs and not self._busy

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._jobs:
                    self._changed.wait()
                kind = next(kind for kind in _ORDER if kind in self._jobs)
                job = self._jobs[kind]
                self._busy = True
            try:
                ended = next(job, self) is self
            except Exception as error:  # noqa: BLE001  # our bug: displayed, because a thread fails silently
                self._failed(error)
                ended = True
            if ended:
                with self._changed:
                    if self._jobs.get(kind) is job:
                        del self._jobs[kind]


# Search over all entries of a tree, including folded ones: parts of names, patterns, native keys.


class SearchIndex:
    """All entries of a tree in display order, as if everything were unfolded."""

    def __init__(self, root: ModuleSummary, sort: Sort) -> None:
        self._entries = list(_walk_entries(root, sort))
        self._at = {entry.path: at for at, entry in enumerate(self._entries)}
        self._lower = [entry.path.lower() for entry in self._entries]

    def position(self, path: str) -> int:
        """Return the position of the entry, or -1 if it is not in the tree."""
        return self._at.get(path, -1)

    def find(self, query: str) -> list[int]:
        """Return the positions of the matching entries.

        Case is ignored. A part of a name matches entries whose last step contains its end (`actor` matches
        the actor, not its contents); a query with `*` or `?` is a pattern for tensors and values. If no
        entry matches, native keys are searched.
        """
        if not query:
            return []
        if "*" in query or "?" in query:
            keep = compile_glob(query)
            return self._where(lambda entry: not isinstance(entry, ModuleSummary) and keep(entry.path))
        wanted = query.lower()
        steps = wanted.count("/")
        found = [
            at
            for at, name in enumerate(self._lower)
            if wanted in name and _ends_in_last_step(name, wanted, steps)
        ]
        return found or self._where(
            lambda entry: isinstance(entry, TensorRow) and _matches_key(entry, wanted)
        )

    def path(self, position: int) -> str:
        """Return the entry's path."""
        return self._entries[position].path

    def _where(self, keep: Callable[[Row | ModuleSummary], bool]) -> list[int]:
        return [at for at, entry in enumerate(self._entries) if keep(entry)]


def next_hit(hits: list[int], position: int, *, backwards: bool = False) -> int | None:
    """Return the next hit after (or before) a position, wrapping around; None without hits."""
    if not hits:
        return None
    if backwards:
        return next((hit for hit in reversed(hits) if hit < position), hits[-1])
    return next((hit for hit in hits if hit > position), hits[0])


def _ends_in_last_step(name: str, wanted: str, steps: int) -> bool:
    """Return whether the last match of `wanted` in `name` reaches into the last step of the name."""
    return name.count("/", name.rfind(wanted)) == steps


def _matches_key(row: TensorRow, wanted: str) -> bool:
    return wanted in row.leaf.key.lower() or wanted in (row.leaf.name or "").lower()


def _walk_entries(root: ModuleSummary, sort: Sort) -> Iterator[Row | ModuleSummary]:
    waiting = list(reversed(module_entries(root, sort)))
    while waiting:
        name, entry = waiting.pop()
        if isinstance(entry, ModuleSummary):
            _, entry = skip_wrapping_modules(name, entry)
            waiting += reversed(module_entries(entry, sort))
        yield entry


# Title line and short messages: name of the checkpoint, its size, progress of a comparison.

_SHORTEST = 12


def title_line(listing: BrowserListing, comparison: ComparisonState | None, cells: int) -> Line:
    """Return the title line: the checkpoint's name and a few facts."""
    if comparison is not None:
        state = f"  {comparison.state()} "
        room = max(_SHORTEST, (cells - len(state) - 5) // 2)
        left, right = (fit_text(os.path.basename(each.checkpoint.path), room) for each in listing.summaries)
        names = pad_text(f" {left} ↔ {right}", max(0, cells - len(state)))
        return TextPiece(names, "head"), TextPiece(state, "mark")
    found = listing.summaries[0]
    verdict = found.verdict
    warning = "" if verdict.label == inspect.SAFE else f" {verdict.label} "
    name = os.path.basename(os.path.normpath(found.checkpoint.path))
    details = _title_facts(found, cells - len(warning) - min(len(name), 2 * _SHORTEST) - 3)
    room = max(_SHORTEST, cells - len(details) - len(warning) - 3)
    head = f" {fit_text(name, room)}"
    gap = " " * max(1, cells - len(head) - len(details) - len(warning) - 1)
    return TextPiece(head, "head"), TextPiece(f"{gap}{details} ", "dim"), TextPiece(warning, "warn")


def _title_facts(found: CheckpointSummary, cells: int) -> str:
    """Return as many facts as fit, the most informative first."""
    totals = found.totals
    words = [
        format_count(totals.tensors, "tensor"),
        format_size(totals.nbytes),
        found.checkpoint.format,
        found.layout or "no layout",
        format_count(totals.parameters, "parameter"),
    ]
    lines: list[str] = []
    for word in words:
        if len(" · ".join([*lines, word])) <= cells:
            lines.append(word)
    return " · ".join(lines)


def format_hits(found: tuple[int, int] | None) -> str:
    """Return the number of the current hit and the number of hits."""
    if found is None:
        return ""
    at, number = found
    return f"{at:,} of {number:,}" if number else "not found"
