"""Drawings of modules and networks as dot, SVG and HTML."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from ckpttool.cli.columns import ColumnLine
from ckpttool.cli.tree_tables import list_rows
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import UsageError
from ckpttool.core.text import clean, format_count, format_size, shorten
from ckpttool.listing.contents import CheckpointSummary
from ckpttool.listing.dataflow import restore_strips
from ckpttool.listing.layers import architecture_strips
from ckpttool.listing.module_graph import ModuleEdge, ModuleGraph, ModuleNode, build_module_graph
from ckpttool.listing.modules import describe_module_kind

if TYPE_CHECKING:
    from ckpttool.listing.layers import Architecture


# A graph in Graphviz's language (https://graphviz.org/doc/info/lang.html), to use Graphviz's layout.

_STYLES = {"child": "solid", "alias": "dashed", "slot": "dotted"}


def render_dot(graph: ModuleGraph) -> str:
    """Return the digraph; backslashes and quotes, the only special characters in strings, are escaped."""
    lines = [
        "digraph checkpoint {",
        f"  label={_quote_lines([clean(graph.title), *map(clean, graph.notes)])};",
        "  labelloc=t; rankdir=LR; ranksep=0.8;",
        '  node [shape=box, style=rounded, fontname="monospace", fontsize=10];',
        '  edge [fontname="monospace", fontsize=9, arrowsize=0.6];',
    ]
    lines += [f"  n{at} [label={_quote_lines(_dot_lines(node))}];" for at, node in enumerate(graph.nodes)]
    for edge in graph.edges:
        # Aliases and optimizer edges must not affect the position of a module.
        free = "" if edge.kind == "child" else ", constraint=false"
        label = f", label={_quote_lines([clean(edge.label)])}" if edge.label else ""
        lines.append(f"  n{edge.source} -> n{edge.target} [style={_STYLES[edge.kind]}{free}{label}];")
    return "\n".join([*lines, "}\n"])


def _dot_lines(node: ModuleNode) -> list[str]:
    module = node.module
    lines = [clean(node.name) or "(root)", describe_module_kind(module)]
    lines.append(f"{format_count(module.parameters, 'parameter')}, {format_size(module.nbytes)}")
    lines += [f"{clean(v.name)}  {v.dtype}{list(v.shape)}" for v in node.variables]
    lines += [f"and {node.left_out:,} more"] if node.left_out else []
    lines += [format_count(node.slots, "slot variable")] if node.slots else []
    lines += [f"{format_count(node.folded, 'tensor')} below"] if node.folded else []
    return [line for line in lines if line]


def _quote_lines(lines: list[str]) -> str:
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    # \l ends a left-aligned line.
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"' if len(lines) > 1 else f'"{escaped[0]}"'


# Layout of a drawing: boxes in columns from left to right, children beside their parent.
#
# All lengths are in pixels, from the upper left corner.

# The widest of the common monospaced fonts has an advance of 0.602 of its size.
FONT = 12
ADVANCE = 0.61 * FONT
LINE = 17.0
PADDING = 10.0
GAP, GUTTER, MARGIN = 14.0, 64.0, 24.0
_NARROWEST = 96.0
_NAME, _LABEL = 36, 24


class TextLine(NamedTuple):
    """One line of text: its left end (or middle, or right end, depending on `anchor`) and baseline."""

    x: float
    y: float
    text: str
    style: str
    anchor: str = "start"
    whole: str = ""

    @property
    def left(self) -> float:
        """Return where the text begins, estimated without the font."""
        return self.x - {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor] * text_width(self.text)


class NodeBox(NamedTuple):
    """Rectangle of a node; `rule` is the height of the line between its head and its variables."""

    x: float
    y: float
    width: float
    height: float
    rule: float | None
    texts: tuple[TextLine, ...]
    optimizer: bool


class EdgeCurve(NamedTuple):
    """Edge: an SVG path and its label."""

    path: str
    kind: str
    label: TextLine | None


@dataclass(frozen=True, slots=True)
class GraphDrawing:
    """Drawing ready for output: `texts` are its title and legend."""

    width: float
    height: float
    texts: tuple[TextLine, ...]
    legend: tuple[tuple[str, float, float], ...]
    boxes: tuple[NodeBox, ...]
    curves: tuple[EdgeCurve, ...]


@dataclass(slots=True)
class _LevelColumns:
    """Position of each level: left ends, widths, and the width of the gap after it."""

    left: list[float] = field(default_factory=list)
    width: list[float] = field(default_factory=list)
    gutter: list[float] = field(default_factory=list)

    def right(self, level: int) -> float:
        return self.left[level] + self.width[level]


def text_width(text: str) -> float:
    """Return the maximum width of a text; East Asian wide characters take two cells."""
    cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
    return cells * ADVANCE


def lay_out_graph(graph: ModuleGraph) -> GraphDrawing:
    """Lay out the graph; nodes precede their children, so that no recursion is needed."""
    heads, legend, top = _layout_head(graph)
    sizes = [_box_size(node) for node in graph.nodes]
    tops, height = _layout_tops(graph, [height for _, height in sizes])
    columns = _layout_columns(graph, [width for width, _ in sizes])
    boxes = [
        _layout_box(node, columns.left[node.level], top + y, *size)
        for node, y, size in zip(graph.nodes, tops, sizes, strict=True)
    ]
    curves = _layout_curves(graph, boxes, columns)
    labels = [curve.label for curve in curves if curve.label is not None]
    right = max(
        [columns.right(len(columns.left) - 1) + columns.gutter[-1]]
        + [text.left + text_width(text.text) for text in (*heads, *labels)]
    )
    lowest = max([top + height, *(label.y + LINE for label in labels)])
    return GraphDrawing(
        right + MARGIN, lowest + MARGIN, tuple(heads), tuple(legend), tuple(boxes), tuple(curves)
    )


def _layout_head(graph: ModuleGraph) -> tuple[list[TextLine], list[tuple[str, float, float]], float]:
    """Return the title, the legend's texts and lines, and the top of the drawing."""
    title = clean(graph.title)
    texts = [TextLine(MARGIN, MARGIN + FONT, shorten(title, 90), "title", whole=title)]
    y = MARGIN + FONT + LINE + 4
    x, legend = MARGIN, []
    for style, line in (
        ("child", "holds"),
        ("alias", "also holds (alias)"),
        ("slot", "optimizer state for"),
    ):
        if style == "child" or any(edge.kind == style for edge in graph.edges):
            legend.append((style, x, y - 4))
            texts.append(TextLine(x + 40, y, line, "dim"))
            x += 40 + text_width(line) + 24
    for note in graph.notes:
        y += LINE
        texts.append(TextLine(MARGIN, y, clean(note), "dim"))
    return texts, legend, y + LINE


def _node_texts(node: ModuleNode) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the head's lines (text, style, whole text) and the variables' (name, what)."""
    module = node.module
    whole = clean(module.path or node.name)
    name = clean(node.name) or "(root)"
    head = [(shorten(name, _NAME), "name", whole)]
    if described := describe_module_kind(module):
        head.append((shorten(described, _NAME), "kind", described))
    trained = f"{format_count(module.parameters, 'parameter')}, " if module.parameters else ""
    head.append((f"{trained}{format_size(module.nbytes)}", "dim", ""))
    rows = [
        (shorten(clean(v.name), _NAME), shorten(f"{v.dtype}{list(v.shape)}", _NAME)) for v in node.variables
    ]
    if node.left_out:
        rows.append((f"and {node.left_out:,} more", ""))
    if node.slots:
        rows.append((format_count(node.slots, "slot variable"), ""))
    if node.folded:
        rows.append((f"{format_count(node.folded, 'tensor')} below", ""))
    return head, rows


def _box_size(node: ModuleNode) -> tuple[float, float]:
    head, rows = _node_texts(node)
    texts = [text_width(text) for text, _, _ in head]
    texts += [text_width(f"{name}  {what}" if what else name) for name, what in rows]
    height = LINE * (len(head) + len(rows)) + 2 * PADDING - 4 + (8 if rows else 0)
    return max(_NARROWEST, *texts) + 2 * PADDING, height


def _layout_tops(graph: ModuleGraph, heights: Sequence[float]) -> tuple[list[float], float]:
    """Return the top of each box, and the total height: the children of a node share a band with it."""
    parents = {edge.target: edge.source for edge in graph.edges if edge.kind == "child"}
    below = [0.0] * len(heights)
    bands = [0.0] * len(heights)
    for node in reversed(range(len(heights))):
        bands[node] = max(heights[node] + GAP, below[node])
        if node in parents:
            below[parents[node]] += bands[node]
    # Top of the next child of each node.
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


def _layout_columns(graph: ModuleGraph, widths: Sequence[float]) -> _LevelColumns:
    columns = _LevelColumns()
    levels = max(node.level for node in graph.nodes) + 1
    columns.width = [0.0] * levels
    for node, width in zip(graph.nodes, widths, strict=True):
        columns.width[node.level] = max(columns.width[node.level], width)
    # The gap after a level holds the labels of the edges that bend there.
    columns.gutter = [GUTTER] * (levels - 1) + [0.0]
    for edge in graph.edges:
        if edge.kind != "child":
            at = _bend_level(graph, edge)
            room = text_width(_edge_label(edge)) + 40
            columns.gutter[at] = max(columns.gutter[at], room, GUTTER)
    x = MARGIN
    for width, gutter in zip(columns.width, columns.gutter, strict=True):
        columns.left.append(x)
        x += width + gutter
    return columns


def _bend_level(graph: ModuleGraph, edge: ModuleEdge) -> int:
    """Return the level whose gap holds the bend of the edge: before its target, or after both."""
    source, target = graph.nodes[edge.source].level, graph.nodes[edge.target].level
    return target - 1 if target > source else target


def _edge_label(edge: ModuleEdge) -> str:
    return shorten(clean(edge.label), _LABEL)


def _layout_box(node: ModuleNode, x: float, y: float, width: float, height: float) -> NodeBox:
    head, rows = _node_texts(node)
    texts = []
    line = y + PADDING + FONT - 2
    for text, style, whole in head:
        texts.append(TextLine(x + PADDING, line, text, style, whole=whole))
        line += LINE
    rule = line - FONT + 2 if rows else None
    line += 8 if rows else 0
    for name, what in rows:
        texts.append(TextLine(x + PADDING, line, name, "row" if what else "dim"))
        if what:
            texts.append(TextLine(x + width - PADDING, line, what, "dim", "end"))
        line += LINE
    return NodeBox(x, y, width, height, rule, tuple(texts), bool(node.slots))


def _layout_curves(graph: ModuleGraph, boxes: Sequence[NodeBox], columns: _LevelColumns) -> list[EdgeCurve]:
    curves = []
    taken: dict[int, list[float]] = defaultdict(list)
    for edge in graph.edges:
        source, target = boxes[edge.source], boxes[edge.target]
        start, end = source.y + source.height / 2, target.y + target.height / 2
        at = _bend_level(graph, edge)
        left, right = columns.right(at), columns.right(at) + columns.gutter[at]
        if edge.kind != "child":
            # Beside the existing edge to the same box, not on top of it.
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
            # To a box in the same column or further left: out into the gap behind it, and back.
            out = left + min(columns.gutter[at] - 8, GUTTER) - 12 * (len(taken[at]) % 4)
            begin = source.x if source.x > right else source.x + source.width
            path = (
                f"M{begin:.1f} {start:.1f}H{left:.1f}"
                f"C{out:.1f} {start:.1f} {out:.1f} {end:.1f} {left:.1f} {end:.1f}"
                f"H{target.x + target.width:.1f}"
            )
            x = max(left + (out - left) * 0.75, left + text_width(_edge_label(edge)) / 2 + 8)
        curves.append(EdgeCurve(path, edge.kind, _place_label(edge, x, (start + end) / 2, taken[at])))
    return curves


def _place_label(edge: ModuleEdge, x: float, y: float, taken: list[float]) -> TextLine | None:
    """Return the edge's label at the middle of its bend, lower if another label is in the way."""
    if not edge.label:
        return None
    for other in sorted(taken):
        if abs(other - y) < LINE:
            y = other + LINE
    taken.append(y)
    return TextLine(x, y + 4, _edge_label(edge), "label", "middle", whole=clean(edge.label))


# SVG output: only text and lines, no script, no network requests, readable in light and dark mode.

_SVG_STYLE = f"""
text {{ font: {FONT}px ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }}
.paper {{ fill: #ffffff }} .box {{ fill: #f6f8fa; stroke: #8c959f }} .optimizer {{ fill: #fff8e5 }}
.rule {{ stroke: #d0d7de }} .title {{ font-size: 15px; font-weight: bold }} .name {{ font-weight: bold }}
.kind {{ fill: #0a5cad }} .dim {{ fill: #59636e }}
.label {{ fill: #59636e }}
.edge {{ fill: none; stroke: #8c959f; stroke-width: 1.3 }}
.alias {{ stroke: #1a7f37; stroke-dasharray: 7 4 }} .slot {{ stroke: #9a6700; stroke-dasharray: 1.5 4 }}
.slot {{ stroke-width: 2; stroke-linecap: round }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }} .paper {{ fill: #0d1117 }} .box {{ fill: #161b22; stroke: #6e7681 }}
.optimizer {{ fill: #272115 }} .rule {{ stroke: #30363d }} .kind {{ fill: #79c0ff }} .dim {{ fill: #9198a1 }}
.label {{ fill: #9198a1 }} .edge {{ stroke: #6e7681 }}
.alias {{ stroke: #3fb950 }} .slot {{ stroke: #d29922 }}
}}
"""
_ARROWS = "".join(
    f'<marker id="end-{kind}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8" class="edge {kind}" '
    f'style="stroke-dasharray: none"/></marker>'
    for kind in ("alias", "slot")
)


def render_svg(drawing: GraphDrawing) -> str:
    """Return the SVG document, without an XML declaration so that a page can embed it."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    title = drawing.texts[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title.whole)}</title><style>{_SVG_STYLE}</style><defs>{_ARROWS}</defs>",
        '<rect class="paper" width="100%" height="100%"/>',
        *(
            f'<path class="edge {kind}" d="M{x:.1f} {y:.1f}h32"{_arrow_attribute(kind)}/>'
            for kind, x, y in drawing.legend
        ),
        *(_svg_text(text) for text in drawing.texts),
        *(
            f'<path class="edge {curve.kind}" d="{curve.path}"{_arrow_attribute(curve.kind)}/>'
            for curve in drawing.curves
        ),
        *(_svg_box(box) for box in drawing.boxes),
        *(_svg_label(curve.label) for curve in drawing.curves if curve.label is not None),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _arrow_attribute(kind: str) -> str:
    return "" if kind == "child" else f' marker-end="url(#end-{kind})"'


def _svg_box(box: NodeBox) -> str:
    style = "box optimizer" if box.optimizer else "box"
    rule = ""
    if box.rule is not None:
        rule = f'<path class="rule" d="M{box.x:.1f} {box.rule:.1f}h{box.width:.1f}"/>'
    return (
        f'<g><rect class="{style}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="6"/>{rule}{"".join(map(_svg_text, box.texts))}</g>'
    )


def _svg_label(text: TextLine) -> str:
    # The lines below would cross it out.
    width = text_width(text.text) + 6
    return (
        f'<rect class="paper" x="{text.left - 3:.1f}" y="{text.y - FONT:.1f}" width="{width:.1f}" '
        f'height="{FONT + 4}"/>{_svg_text(text)}'
    )


def _svg_text(text: TextLine) -> str:
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    # Tooltip with text that was too long for the drawing.
    whole = f"<title>{escape(text.whole)}</title>" if text.whole and text.whole != text.text else ""
    return (
        f'<text class="{text.style}" x="{text.x:.1f}" y="{text.y:.1f}"{anchor} '
        f'xml:space="preserve">{whole}{escape(text.text)}</text>'
    )


# Page of a checkpoint's modules: the whole tree, whose modules fold, and the drawing, which moves and zooms.

# With more entries, alike siblings share a row, as in the terminal: the page stays below a few megabytes.
_MOST_LISTED = 20_000
# Modules are open at first as far as this many rows are visible.
_FIRST_ROWS = 40
# Width and height up to which the text of a drawing that is scaled to a window can be read.
_LEGIBLE = (1700.0, 1000.0)


def render_page(
    drawing: GraphDrawing,
    rows: Sequence[ColumnLine] = (),
    remark: str = "",
    depth: int | None = None,
    *,
    drawing_first: bool = True,
) -> str:
    """Return the page; its policy allows only our own script and no network requests.

    Args:
        drawing: the drawing of the modules.
        rows: the rows of the tree, from top to bottom.
        remark: the line below the title.
        depth: the levels that are open at first; by default those that fit a screen.
        drawing_first: whether the page shows the drawing at first, not the tree.

    """
    folder = resources.files("ckpttool.report") / "templates"
    script, style = ((folder / name).read_text(encoding="utf-8") for name in ("modules.js", "modules.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(drawing.texts[0].whole)
    first = "drawing" if drawing_first else "tree"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title><style>{style}</style></head>\n"
        f'<body data-first="{first}">\n<header><h1>{title}</h1><p>{escape(remark)}</p>{_PAGE_BAR}</header>\n'
        f'<main>\n<section id="tree" aria-label="Modules and tensors">{_PAGE_HEADS}'
        f"<ul>{''.join(_tree_items(rows, depth or _fitting_level(rows)))}</ul></section>\n"
        f'<section id="drawing" aria-label="Drawing">{render_svg(drawing)}</section>\n'
        f"</main>\n<script>{script}</script>\n</body></html>\n"
    )


_PAGE_BAR = (
    '<div class="bar"><span role="group" aria-label="View">'
    '<button type="button" id="show-tree">Tree</button>'
    '<button type="button" id="show-drawing">Drawing</button></span>'
    '<span id="tree-tools"><button type="button" id="unfold">Expand all</button>'
    '<button type="button" id="fold">Collapse all</button>'
    '<input type="search" id="search" placeholder="Search paths (/)" aria-label="Search paths" '
    'autocomplete="off" spellcheck="false"><span id="count" role="status"></span></span>'
    '<span id="drawing-tools"><button type="button" id="nearer" aria-label="Zoom in">+</button>'
    '<button type="button" id="farther" aria-label="Zoom out">&minus;</button>'
    '<button type="button" id="all">Whole drawing</button></span></div>'
)
_PAGE_HEADS = (
    '<div class="row heads" aria-hidden="true"><span>name</span><span>type</span>'
    "<span>parameters</span><span>size</span><span></span></div>"
)


def _fitting_level(rows: Sequence[ColumnLine]) -> int:
    """Return the number of levels that fit a screen, at least one."""
    visible = 0
    for level in range(1, 1 + max((row.level for row in rows), default=0) + 1):
        visible += sum(row.level == level - 1 for row in rows)
        if visible > _FIRST_ROWS:
            return max(level - 1, 1)
    return level if rows else 1


def _tree_items(rows: Sequence[ColumnLine], depth: int) -> Iterator[str]:
    """Yield the list items of the rows; modules fold, and those above level `depth` are open."""
    open_levels: list[int] = []
    for row, following in itertools.zip_longest(rows, rows[1:]):
        while open_levels and open_levels[-1] >= row.level:
            open_levels.pop()
            yield "</ul></details></li>"
        cells = "".join(f"<span>{escape(text)}</span>" for text in (row.what, row.elements, row.nbytes))
        also = "".join(f'<span class="also">{escape(line)}</span>' for line in row.below)
        name = f"<span>{escape(row.name) or '(empty)'}{also}</span>"
        cells = f"{name}{cells}<span>{escape(row.lead + row.note)}</span>"
        if following is not None and following.level > row.level:
            is_open = " open" if row.level + 1 < depth else ""
            yield f'<li><details{is_open}><summary class="row">{cells}</summary><ul>'
            open_levels.append(row.level)
        else:
            yield f'<li><div class="row" tabindex="-1">{cells}</div></li>'
    yield "</ul></details></li>" * len(open_levels)


def _render_module_page(found: CheckpointSummary, made: ModuleGraph, depth: int | None) -> str:
    whole = len(found.tensors) + len(found.values) <= _MOST_LISTED
    totals = found.totals
    remark = (
        f"{format_count(totals.tensors, 'tensor')}, {format_count(totals.parameters, 'parameter')}, "
        f"{format_size(totals.nbytes)}; "
        f"format {found.checkpoint.format}, layout {found.layout or 'none recognised'}"
    )
    drawing = lay_out_graph(made)
    # A note names modules that have no box.
    legible = not made.notes and drawing.width <= _LEGIBLE[0] and drawing.height <= _LEGIBLE[1]
    return render_page(drawing, list_rows(found, whole=whole), remark, depth, drawing_first=legible)


# Output of `inspect --graph`: SVG, an HTML page around it, or Graphviz's language.

_WRITERS: dict[str, Callable[[CheckpointSummary, ModuleGraph, int | None], str]] = {
    ".svg": lambda _, made, __: render_svg(lay_out_graph(made)),
    ".html": _render_module_page,
    ".dot": lambda _, made, __: render_dot(made),
}


def write_drawing(
    found: CheckpointSummary, target: str, depth: int | None = None, *, force: bool = False
) -> dict[str, Any]:
    """Draw a listing into a new file and return the JSON object that describes the drawing.

    The suffix selects the format. Raise UsageError for another suffix, TargetExistsError if the file
    exists and `force` is not given.
    """
    writer = _WRITERS.get(os.path.splitext(target)[1].lower())
    if writer is None:
        raise UsageError("cannot infer the drawing format from the file name", file=target, hint=f"{_NAMES}")
    require_new(target, found.checkpoint.files, force=force)
    made = build_module_graph(found, depth)
    write_file(target, writer(found, made, depth).encode(), force=force)
    return {
        "file": target,
        "modules": len(made.nodes),
        "edges": len(made.edges),
        "notes": list(made.notes),
    }


def write_dataflow(
    found: CheckpointSummary,
    target: str,
    layout: str | None = None,
    models: Sequence[Architecture] = (),
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Draw an agent's networks into a new .svg file, or the layers of `models`; return its JSON object."""
    from ckpttool.report.dataflow import render_dataflow

    if os.path.splitext(target)[1].lower() != ".svg":
        raise UsageError("a dataflow is drawn as SVG", file=target, hint="use a file name that ends in .svg")
    require_new(target, found.checkpoint.files, force=force)
    strips = architecture_strips(models) if found.binding is None and models else ()
    strips = strips or restore_strips(found.checkpoint, layout)
    title = os.path.basename(os.path.normpath(found.checkpoint.path))
    write_file(target, render_dataflow(strips, title).encode(), force=force)
    return {"file": target, "networks": [strip.document() for strip in strips]}


_NAMES = f"use a file name that ends in {', '.join(_WRITERS)}"
