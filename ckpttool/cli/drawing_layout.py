"""Where everything in a drawing stands: boxes in columns from left to right, children beside what holds them.

All lengths are in pixels, from the upper left corner.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.ops.drawing import Edge, Graph, Node
from ckpttool.ops.modules import kind
from ckpttool.shown import clean, count, shortened, size

# The widest of the usual monospaced fonts advances by 0.602 of its size.
FONT = 12
ADVANCE = 0.61 * FONT
LINE = 17.0
PADDING = 10.0
GAP, GUTTER, MARGIN = 14.0, 64.0, 24.0
_NARROWEST = 96.0
_NAME, _LABEL = 36, 24


class Text(NamedTuple):
    """One line of text: its left end (or middle, or right end, as `anchor` says) and baseline."""

    x: float
    y: float
    text: str
    style: str
    anchor: str = "start"
    whole: str = ""

    @property
    def left(self) -> float:
        """Where the text begins, as far as that can be known without the font."""
        return self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * advance(self.text)


class Box(NamedTuple):
    """A node's rectangle; `rule` is the height at which a line parts its head from its variables."""

    x: float
    y: float
    width: float
    height: float
    rule: float | None
    texts: tuple[Text, ...]
    optimizer: bool


class Curve(NamedTuple):
    """An edge: a path in SVG's words, and what is written on it."""

    path: str
    kind: str
    label: Text | None


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing that only needs to be written down: `texts` are its title and legend."""

    width: float
    height: float
    texts: tuple[Text, ...]
    legend: tuple[tuple[str, float, float], ...]
    boxes: tuple[Box, ...]
    curves: tuple[Curve, ...]


@dataclass(slots=True)
class _Columns:
    """Where each level stands: left ends, widths, and how wide the room after it is."""

    left: list[float] = field(default_factory=list)
    width: list[float] = field(default_factory=list)
    gutter: list[float] = field(default_factory=list)

    def right(self, level: int) -> float:
        return self.left[level] + self.width[level]


def advance(text: str) -> float:
    """Return how wide a text is at most; East Asian wide characters take two cells."""
    cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return cells * ADVANCE


def layout(graph: Graph) -> Drawing:
    """Lay the graph out; nodes come before what they hold, so that no recursion is needed."""
    heads, legend, top = _head(graph)
    sizes = [_size(node) for node in graph.nodes]
    tops, height = _tops(graph, [height for _, height in sizes])
    columns = _columns(graph, [width for width, _ in sizes])
    boxes = [
        _box(node, columns.left[node.level], top + y, *size)
        for node, y, size in zip(graph.nodes, tops, sizes, strict=True)
    ]
    curves = _curves(graph, boxes, columns)
    labels = [curve.label for curve in curves if curve.label is not None]
    right = max(
        [columns.right(len(columns.left) - 1) + columns.gutter[-1]]
        + [text.left + advance(text.text) for text in (*heads, *labels)]
    )
    lowest = max([top + height, *(label.y + LINE for label in labels)])
    return Drawing(right + MARGIN, lowest + MARGIN, tuple(heads), tuple(legend), tuple(boxes), tuple(curves))


def _head(graph: Graph) -> tuple[list[Text], list[tuple[str, float, float]], float]:
    """Return the title, the legend's texts and lines, and where the drawing may begin."""
    title = clean(graph.title)
    texts = [Text(MARGIN, MARGIN + FONT, shortened(title, 90), "title", whole=title)]
    y = MARGIN + FONT + LINE + 4
    x, legend = MARGIN, []
    for style, said in (
        ("child", "holds"),
        ("alias", "holds too, by another name"),
        ("slot", "optimizes, and keeps slots of it"),
    ):
        if style == "child" or any(edge.kind == style for edge in graph.edges):
            legend.append((style, x, y - 4))
            texts.append(Text(x + 40, y, said, "dim"))
            x += 40 + advance(said) + 24
    for note in graph.notes:
        y += LINE
        texts.append(Text(MARGIN, y, clean(note), "dim"))
    return texts, legend, y + LINE


def _lines(node: Node) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the head's lines (text, style, whole text) and the variables' (name, what)."""
    module = node.module
    whole = clean(module.path or node.name)
    name = clean(node.name) or "(root)"
    head = [(shortened(name, _NAME), "name", whole)]
    if said := kind(module):
        head.append((shortened(said, _NAME), "kind", said))
    trained = f"{count(module.parameters, 'parameter')}, " if module.parameters else ""
    head.append((f"{trained}{size(module.nbytes)}", "dim", ""))
    rows = [
        (shortened(clean(v.name), _NAME), shortened(f"{v.dtype}{list(v.shape)}", _NAME))
        for v in node.variables
    ]
    if node.left_out:
        rows.append((f"and {node.left_out:,} more", ""))
    if node.slots:
        rows.append((count(node.slots, "slot variable"), ""))
    if node.folded:
        rows.append((f"{count(node.folded, 'tensor')} below", ""))
    return head, rows


def _size(node: Node) -> tuple[float, float]:
    head, rows = _lines(node)
    texts = [advance(text) for text, _, _ in head]
    texts += [advance(f"{name}  {what}" if what else name) for name, what in rows]
    height = LINE * (len(head) + len(rows)) + 2 * PADDING - 4 + (8 if rows else 0)
    return max(_NARROWEST, *texts) + 2 * PADDING, height


def _tops(graph: Graph, heights: Sequence[float]) -> tuple[list[float], float]:
    """Return where each box begins, and the height of all: every node's children share a band with it."""
    parents = {edge.target: edge.source for edge in graph.edges if edge.kind == "child"}
    below = [0.0] * len(heights)
    bands = [0.0] * len(heights)
    for node in reversed(range(len(heights))):
        bands[node] = max(heights[node] + GAP, below[node])
        if node in parents:
            below[parents[node]] += bands[node]
    # Where the next child of each node begins.
    free = [0.0] * len(heights)
    tops = [0.0] * len(heights)
    for node in range(len(heights)):
        band = 0.0
        if node in parents:
            band = free[parents[node]]
            free[parents[node]] += bands[node]
        tops[node] = band + (bands[node] - heights[node]) / 2
        free[node] = band + (bands[node] - below[node]) / 2
    return tops, bands[0]


def _columns(graph: Graph, widths: Sequence[float]) -> _Columns:
    columns = _Columns()
    levels = max(node.level for node in graph.nodes) + 1
    columns.width = [0.0] * levels
    for node, width in zip(graph.nodes, widths, strict=True):
        columns.width[node.level] = max(columns.width[node.level], width)
    # The room after a level holds the labels of the edges that bend there.
    columns.gutter = [GUTTER] * (levels - 1) + [0.0]
    for edge in graph.edges:
        if edge.kind != "child":
            at = _bend(graph, edge)
            room = advance(_label(edge)) + 40
            columns.gutter[at] = max(columns.gutter[at], room, GUTTER)
    x = MARGIN
    for width, gutter in zip(columns.width, columns.gutter, strict=True):
        columns.left.append(x)
        x += width + gutter
    return columns


def _bend(graph: Graph, edge: Edge) -> int:
    """Return the level in the room after which the edge bends: before its target, or after both."""
    source, target = graph.nodes[edge.source].level, graph.nodes[edge.target].level
    return target - 1 if target > source else target


def _label(edge: Edge) -> str:
    return shortened(clean(edge.label), _LABEL)


def _box(node: Node, x: float, y: float, width: float, height: float) -> Box:
    head, rows = _lines(node)
    texts = []
    line = y + PADDING + FONT - 2
    for text, style, whole in head:
        texts.append(Text(x + PADDING, line, text, style, whole=whole))
        line += LINE
    rule = line - FONT + 2 if rows else None
    line += 8 if rows else 0
    for name, what in rows:
        texts.append(Text(x + PADDING, line, name, "row" if what else "dim"))
        if what:
            texts.append(Text(x + width - PADDING, line, what, "dim", "end"))
        line += LINE
    return Box(x, y, width, height, rule, tuple(texts), bool(node.slots))


def _curves(graph: Graph, boxes: Sequence[Box], columns: _Columns) -> list[Curve]:
    curves = []
    taken: dict[int, list[float]] = defaultdict(list)
    for edge in graph.edges:
        source, target = boxes[edge.source], boxes[edge.target]
        start, end = source.y + source.height / 2, target.y + target.height / 2
        at = _bend(graph, edge)
        left, right = columns.right(at), columns.right(at) + columns.gutter[at]
        if edge.kind != "child":
            # Beside the edge to the same box, not upon it.
            start, end = start + 8, end + 8
        middle = (left + right) / 2
        before = graph.nodes[edge.target].level > graph.nodes[edge.source].level
        if before:
            path = (
                f"M{source.x + source.width:.1f} {start:.1f}H{left:.1f}"
                f"C{middle:.1f} {start:.1f} {middle:.1f} {end:.1f} {right:.1f} {end:.1f}H{target.x:.1f}"
            )
            x = middle
        else:
            # To a box of the same column, or one further left: out into the room behind it, and back.
            out = left + min(columns.gutter[at] - 8, GUTTER) - 12 * (len(taken[at]) % 4)
            begin = source.x if source.x > right else source.x + source.width
            path = (
                f"M{begin:.1f} {start:.1f}H{left:.1f}"
                f"C{out:.1f} {start:.1f} {out:.1f} {end:.1f} {left:.1f} {end:.1f}"
                f"H{target.x + target.width:.1f}"
            )
            x = max(left + (out - left) * 0.75, left + advance(_label(edge)) / 2 + 8)
        curves.append(Curve(path, edge.kind, _placed(edge, x, (start + end) / 2, taken[at])))
    return curves


def _placed(edge: Edge, x: float, y: float, taken: list[float]) -> Text | None:
    """Return the edge's label in the middle of its bend, lower where another label stands already."""
    if not edge.label:
        return None
    for other in sorted(taken):
        if abs(other - y) < LINE:
            y = other + LINE
    taken.append(y)
    return Text(x, y + 4, _label(edge), "label", "middle", whole=clean(edge.label))
