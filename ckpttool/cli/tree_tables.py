"""Module tree of `inspect`: plain lines, because a table of 8,000 rows would take seconds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ckpttool.cli.columns import ColumnLine, align_columns
from ckpttool.cli.styles import (
    BOLD,
    GREEN,
    PLAIN,
    RED,
    YELLOW,
    dim,
    has_colors,
    terminal_width,
    wrap_sentence,
)
from ckpttool.core import urls
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.text import clean, format_count, format_size
from ckpttool.core.tree import json_value
from ckpttool.listing.audit import SAFE, format_audit
from ckpttool.listing.modules import (
    ModuleSummary,
    describe_module_kind,
    skip_wrapping_modules,
    user_given_names,
)
from ckpttool.listing.outline import (
    ListingOutline,
    OmittedValues,
    OutlineEntry,
    ScalarReader,
    SiblingGroup,
    describe_group,
    missing_shards,
)
from ckpttool.listing.rows import TensorRow, ValueRow
from ckpttool.listing.signatures import signature_lines

if TYPE_CHECKING:
    from ckpttool.listing.audit import LoadingVerdict
    from ckpttool.listing.contents import CheckpointSummary
    from ckpttool.listing.layers import Architecture
    from ckpttool.listing.modules import Sort


@dataclass(frozen=True, slots=True)
class TreeView:
    """Options of the tree view.

    `keys` and `aliases` add lines below a tensor: its native key, all its other paths. Modules at
    `depth` are one line each. `names` adds what loading the file would import and call. `quiet` omits
    everything but the tree. `whole` shows all values and tensors, however many. `screen` is the number of
    lines that the text may have, if deeper levels are to be folded; None prints all levels. `models` are
    the models whose layers are described.
    """

    keys: bool = False
    aliases: bool = False
    depth: int | None = None
    sort: Sort = "file"
    quiet: bool = False
    names: bool = False
    whole: bool = False
    screen: int | None = None
    models: Sequence[Architecture] = ()


# Limits of the rows in total.
_MOST_VALUES, _MOST_TENSORS = 1000, 10_000
# Rows of the tree on the smallest screens.
_FEWEST_ROWS = 3
# Lines for the tree on a terminal with which everything is printed; those of the dataflow in any case.
_LEAST_ROOM, _LEAST_FLOW = 10, 4


def render_tree(summary: CheckpointSummary, view: TreeView) -> str:
    """Return the tree with a header, the format's own details, and notes."""
    around = [] if view.quiet else _surrounding_parts(summary, view)
    room = None if view.screen is None else _remaining_lines(view.screen, around)
    if around and room is not None and room < _LEAST_ROOM:
        # What the networks compute comes before the numbers of each role, which --json and pipes list.
        head, flow = _header_lines(summary, roles=False), _network_lines(summary, view, short=True)
        most = max(_LEAST_FLOW, _remaining_lines(view.screen or 0, [head, *around[1:]]) - _FEWEST_ROWS - 2)
        if len(flow) > most:
            hidden = format_count(len(flow) - most + 1, "more line")
            flow = [*flow[: most - 1], dim(f"{hidden}: --all shows them")]
        around = [[*head, *flow], *around[1:]]
        room = _remaining_lines(view.screen or 0, around)
    body = _TreeRows(summary, view, room).render()
    parts = [*around[:1], body, *around[1:]]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _remaining_lines(screen: int, around: Sequence[list[str]]) -> int:
    return screen - sum(len(lines) + 1 for part in around if (lines := _screen_lines(part)))


def _surrounding_parts(summary: CheckpointSummary, view: TreeView) -> list[list[str]]:
    """Return the header, and everything below the tree."""
    table = format_audit(summary.checkpoint.code_references) if view.names else []
    return [
        [*_header_lines(summary), *_network_lines(summary, view)],
        signature_lines(summary.checkpoint.details, terminal_width()),
        table,
        [wrap_sentence(f"note: {clean(note)}") for note in summary.notes],
    ]


def _network_lines(summary: CheckpointSummary, view: TreeView, *, short: bool = False) -> list[str]:
    """Return the dataflow of an agent, else the layers of models, of which `short` lists the classes."""
    if summary.binding is None and not view.models:
        return []
    from ckpttool.cli import layer_tables

    if dataflow := layer_tables.dataflow_lines(summary):
        return dataflow
    return layer_tables.outline_lines(view) if short else layer_tables.architecture_lines(view)


def _screen_lines(part: list[str]) -> list[str]:
    return [line for text in part for line in text.split("\n")]


def _header_lines(summary: CheckpointSummary, *, roles: bool = True) -> list[str]:
    checkpoint, totals = summary.checkpoint, summary.totals
    layout = summary.layout or "none recognised"
    checks = "no checksums" if checkpoint.integrity == "none" else f"{checkpoint.integrity} checksums"
    written = f", {clean(checkpoint.writer)}" if checkpoint.writer else ""
    lines = [
        verdict_line(summary.verdict),
        _title_line(checkpoint),
        f"format {checkpoint.format} ({checks}){written}",
        f"layout {layout}" + (f": {clean(summary.evidence)}" if summary.evidence else ""),
        f"{format_count(totals.tensors, 'tensor')}, {format_count(totals.parameters, 'parameter')}{_frozen_suffix(summary)}, "  # noqa: E501
        f"{format_size(totals.nbytes)} ({format_size(totals.stored_nbytes)} on disk)",
    ]
    if roles and sum(1 for sums in totals.roles.values() if sums.nbytes) > 1:
        # List the roles separately: replay data may outweigh everything else.
        rows = [(role, *sums) for role, sums in totals.roles.items()]
        lines += [
            f"  {role:<9}  {format_count(n, 'tensor'):>13}  {elements:>15,}  {format_size(nbytes):>7}"
            for role, n, elements, nbytes in rows
        ]
    return lines


def verdict_line(verdict: LoadingVerdict) -> str:
    """Return the verdict on loading a checkpoint, whose label is coloured on a terminal."""
    sentence = wrap_sentence(clean(verdict.sentence))
    if not has_colors():
        return sentence
    colour = GREEN if verdict.label == SAFE else YELLOW if verdict.passes else RED
    return f"{colour}{sentence[: len(verdict.label)]}{PLAIN}{sentence[len(verdict.label) :]}"


def _title_line(checkpoint: Checkpoint) -> str:
    """Return the path, and the shards that are missing."""
    where = clean(urls.display_url(checkpoint.path))
    lost = missing_shards(checkpoint)
    title = f"{BOLD}{where}{PLAIN}" if has_colors() else where
    if not lost:
        return title
    what = f"missing {abbreviate_list(list(map(clean, lost)), 3)}"
    return f"{title}: {f'{RED}{what}{PLAIN}' if has_colors() else what}"


def _frozen_suffix(summary: CheckpointSummary) -> str:
    frozen = sum(
        row.leaf.size
        for row in summary.tensors
        if row.leaf.role == "parameter" and row.leaf.trainable is False
    )
    return f" ({frozen:,} frozen)" if frozen else ""


class _TreeRows:
    """The rows of one tree: every level, or those that fit into `room` lines."""

    def __init__(self, summary: CheckpointSummary, view: TreeView, room: int | None) -> None:
        details = view.whole or view.keys or view.aliases
        self.outline = ListingOutline(summary.modules, view.sort, whole=details)
        self.view = view
        self.scalars = ScalarReader(summary.checkpoint)
        self.most, self.depth = None, view.depth
        if room is not None and not details and view.depth is None:
            # The title of the columns and the line on hidden levels take one line each.
            self.most = max(_FEWEST_ROWS, room - 2)
            self.depth = self.outline.fitting_depth(self.most)

    def render(self) -> list[str]:
        """Return the lines in columns, and how to show more."""
        lines = list(self.lines())
        hidden = []
        if self.most is not None and len(lines) > self.most:
            over = len(lines) - self.most + 1
            hidden = [f"{over:,} more entries: --all shows them"]
            lines = _leave_out(lines, over)
        elif self.most is not None and self.depth is not None:
            deeper = f"--depth {self.depth + 1} or --all"
            hidden = [f"{format_count(self.depth, 'level')} shown: {deeper} shows more"]
        return [*align_columns(lines, terminal_width(), cut=sys.stdout.isatty()), *map(dim, hidden)]

    def lines(self) -> Iterator[ColumnLine]:
        """Yield the rows from top to bottom."""
        if self.outline.root is None:
            return
        waiting = self._waiting(0, self.outline.entries(self.outline.root))
        left = {TensorRow: _MOST_TENSORS, ValueRow: _MOST_VALUES}
        over = dict.fromkeys(left, 0)
        while waiting:
            level, name, entry = waiting.pop()
            if isinstance(entry, TensorRow | ValueRow):
                left[type(entry)] -= 1
                if not self.view.whole and left[type(entry)] < 0:
                    over[type(entry)] += 1
                    continue
            folded = self.depth is not None and level + 1 >= self.depth
            yield self._line(level, name, entry, folded=folded)
            if not folded:
                waiting += self._waiting(level + 1, self.outline.children(entry))
        hidden = [format_count(over[kind], word) for kind, word in _ROWS if over[kind]]
        if hidden:
            what = "use --all to show them, --depth N to fold modules"
            yield ColumnLine(0, f"not shown: {' and '.join(hidden)}", what, "", "", "")

    def _waiting(
        self, level: int, entries: list[tuple[str, OutlineEntry]]
    ) -> list[tuple[int, str, OutlineEntry]]:
        return [(level, name, entry) for name, entry in reversed(entries)]

    def _line(self, level: int, name: str, entry: OutlineEntry, *, folded: bool) -> ColumnLine:
        if isinstance(entry, SiblingGroup):
            return _group_line(level, name, entry, folded=folded)
        if isinstance(entry, OmittedValues):
            what = "values; use --all to show them"
            return ColumnLine(level, f"and {entry.values:,} more", what, "", "", "")
        if isinstance(entry, ModuleSummary):
            return _module_line(level, *skip_wrapping_modules(name, entry), folded=folded)
        return _entry_line(level, name, entry, self.view, self.scalars)


def list_rows(summary: CheckpointSummary, *, whole: bool) -> list[ColumnLine]:
    """Return all rows of the tree, with aliases; without `whole`, alike siblings share a row."""
    return list(_TreeRows(summary, TreeView(aliases=whole, whole=whole), None).lines())


def _leave_out(lines: list[ColumnLine], over: int) -> list[ColumnLine]:
    """Return the lines without the last `over`: plain values first, then tensors, then modules."""
    ranks = [2 if line.module else 1 if line.nbytes else 0 for line in lines]
    order = sorted(range(len(lines)), key=lambda at: (ranks[at], -at))
    dropped = set(order[:over])
    return [line for at, line in enumerate(lines) if at not in dropped]


_ROWS: tuple[tuple[type[TensorRow | ValueRow], str], ...] = ((TensorRow, "tensor"), (ValueRow, "value"))


def _group_line(level: int, name: str, group: SiblingGroup, *, folded: bool) -> ColumnLine:
    """Return the row of alike siblings: the numbers are sums over all of them."""
    what = f"{describe_group(group)} ({group.count:,} alike)".strip()
    first = group.first
    if isinstance(first, ValueRow):
        return ColumnLine(level, clean(name), what, "", "", "")
    if isinstance(first, TensorRow):
        elements = group.count * first.leaf.size if first.leaf.role == "parameter" else 0
        role = first.leaf.role if first.leaf.role != "parameter" else ""
        note = f"slot {first.leaf.slot}" if first.leaf.slot is not None else role
        nbytes = format_size(group.count * first.leaf.nbytes)
        return ColumnLine(level, clean(name), what, f"{elements:,}" if elements else "", nbytes, clean(note))
    shown, module = skip_wrapping_modules(name, first)
    if folded:
        what = f"{what.removesuffix(')')}, {format_count(group.count * module.tensors, 'tensor')})"
    return ColumnLine(
        level,
        clean(shown),
        what,
        f"{group.count * module.parameters:,}" if module.parameters else "",
        format_size(group.count * module.nbytes) if module.tensors else "",
        "" if module.built else "not built",
        module=True,
    )


def _module_line(level: int, name: str, module: ModuleSummary, *, folded: bool) -> ColumnLine:
    note = "" if module.built else f"object of {clean(str(module.kind))}, not built"
    what = describe_module_kind(module) if module.built else ""
    if note and module.tensors:
        # With its numbers, the row has less space for the note.
        what, note = describe_module_kind(module).rpartition(".")[2], "not built"
    if folded:
        what = f"{what} ({format_count(module.tensors, 'tensor')})".strip()
    return ColumnLine(
        level,
        clean(name),
        what,
        f"{module.parameters:,}" if module.parameters else "",
        format_size(module.nbytes) if module.tensors else "",
        note,
        module=True,
    )


def _entry_line(
    level: int, name: str, row: TensorRow | ValueRow, view: TreeView, scalars: ScalarReader
) -> ColumnLine:
    if isinstance(row, ValueRow):
        shown = json_value(row.leaf)
        text = clean(str(shown["value"]))
        plain = shown["type"] in ("int", "float", "bool", "NoneType")
        return ColumnLine(level, clean(name), f"= {text}" if plain else f"{shown['type']} {text}", "", "", "")
    leaf = row.leaf
    below: tuple[str, ...] = (f"key {clean(leaf.key)}",) if view.keys else ()
    if view.aliases:
        below += tuple(f"also {clean(alias)}" for alias in row.aliases)
    lead, note = _tensor_note(row, recorded=not view.aliases)
    what, value = _type_text(leaf.dtype, leaf.shape), scalars.read(leaf)
    return ColumnLine(
        level,
        clean(name),
        f"{what} = {value}" if value else what,
        f"{leaf.size:,}" if leaf.role == "parameter" else "",
        format_size(leaf.nbytes),
        clean(note),
        clean(lead),
        below=below,
    )


@functools.lru_cache(1024)
def _type_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


def _tensor_note(row: TensorRow, *, recorded: bool) -> tuple[str, str]:
    """Return a note on a tensor that is not simply trained: a fixed lead, then text that may be shortened."""
    leaf = row.leaf
    if leaf.slot is not None and row.of is not None:
        return (
            ("", f"slot {leaf.slot}") if _is_named_by_path(row.path, row.of) else (f"{leaf.slot} of ", row.of)
        )
    note = leaf.role if leaf.role != "parameter" else "frozen" if leaf.trainable is False else ""
    names = user_given_names(row.aliases) if recorded else []
    if names:
        more = f" (+{len(names) - 1})" if len(names) > 1 else ""
        return f"{note}  also ".lstrip(), f"{names[0]}{more}"
    return "", note


def _is_named_by_path(path: str, of: str) -> bool:
    """Return whether a slot's own path names its parameter: `slots/m/l1/kernel`, `l1/kernel/Adam`."""
    return f"/{path}".endswith(f"/{of}") or f"/{path.rpartition('/')[0]}".endswith(f"/{of}")
