"""Plots of returns, and drawings of modules as dot, SVG and HTML."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import io
import math
import os
import sys
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckpttool.cli.common import terminal_width
from ckpttool.commands.graph import ModuleEdge, ModuleGraph, ModuleNode, build_module_graph
from ckpttool.commands.inspect import ANY_UNIT, CheckpointSummary, describe_module_kind
from ckpttool.core import search_paths
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.errors import CkpttoolError, MissingExtraError, UsageError
from ckpttool.core.text import clean, format_count, format_size, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

    from ckpttool.commands.algorithms import (
        Algorithm,
        AlgorithmComparison,
        AlgorithmCurvePoint,
        TrainingCurve,
    )
    from ckpttool.commands.architecture import Architecture
    from ckpttool.commands.evaluate import Evaluation
    from ckpttool.commands.sweep import LearningCurvePoint


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


# Drawing as a self-contained page: drag to move, scroll the wheel to zoom.

# Otherwise the page would scroll, and dragging would select the names.
_SCRIPT = """
const view = document.querySelector("svg"), whole = view.viewBox.baseVal;
const full = [whole.x, whole.y, whole.width, whole.height];
let held = null;
const show = (x, y, w, h) => view.setAttribute("viewBox", [x, y, w, h].join(" "));
view.removeAttribute("width"); view.removeAttribute("height");
view.addEventListener("wheel", (event) => {
  event.preventDefault();
  const box = view.viewBox.baseVal, by = Math.exp(event.deltaY * 0.0015);
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(view.getScreenCTM().inverse());
  show(at.x - (at.x - box.x) * by, at.y - (at.y - box.y) * by, box.width * by, box.height * by);
}, { passive: false });
view.addEventListener("pointerdown", (event) => {
  held = [event.clientX, event.clientY]; view.setPointerCapture(event.pointerId);
});
view.addEventListener("pointermove", (event) => {
  if (!held) return;
  const box = view.viewBox.baseVal, scale = view.getScreenCTM().a;
  show(box.x - (event.clientX - held[0]) / scale, box.y - (event.clientY - held[1]) / scale,
       box.width, box.height);
  held = [event.clientX, event.clientY];
});
view.addEventListener("pointerup", () => { held = null; });
view.addEventListener("dblclick", () => show(...full));
document.body.classList.add("moves");
"""
_HTML_STYLE = """
html, body { margin: 0; height: 100%; background: #ffffff }
body.moves { overflow: hidden } body.moves svg { width: 100vw; height: 100vh; cursor: grab }
p { position: fixed; right: 12px; bottom: 4px; margin: 0; display: none }
p { font: 12px sans-serif; color: #59636e }
body.moves p { display: block }
@media (prefers-color-scheme: dark) { html, body { background: #0d1117 } p { color: #9198a1 } }
"""


def render_page(drawing: GraphDrawing) -> str:
    """Return the page; its policy allows only our own script and no network requests."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(drawing.texts[0].whole)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title><style>{_HTML_STYLE}</style></head>\n<body>\n{render_svg(drawing)}"
        f"<p>drag to move, wheel to zoom, double click for the whole</p>\n"
        f"<script>{_SCRIPT}</script>\n</body></html>\n"
    )


# Output of `inspect --graph`: SVG, an HTML page around it, or Graphviz's language.

_WRITERS: dict[str, Callable[[ModuleGraph], str]] = {
    ".svg": lambda made: render_svg(lay_out_graph(made)),
    ".html": lambda made: render_page(lay_out_graph(made)),
    ".dot": render_dot,
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
    write_file(target, writer(made).encode(), force=force)
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
    from ckpttool.commands.architecture import architecture_strips
    from ckpttool.commands.dataflow import restore_strips
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


# Small plots in the terminal: the distribution of one checkpoint's returns, or a learning curve.

# Minimum number of returns for a histogram, and of points for a curve.
FEWEST = 8
_FEWEST_POINTS = 3
_BARS = 8
_CURVE_HEIGHT = 13  # rows for the frame and the step axis
_WIDEST = 100
_BLOCK = "█"
# ASCII replacements of plotext's frame, for encodings without box characters.
_FRAME = str.maketrans("┌┐└┘├┤┬┴┼─│", "+++++++++-|")


def require_chart() -> None:
    """Raise if the library that plots in a terminal is not installed."""
    if importlib.util.find_spec("plotext") is None:
        raise MissingExtraError(
            "plotting in the terminal requires plotext, which is not installed", hint=HINT
        )


def render_chart(
    found: Sequence[Evaluation], curve: Sequence[LearningCurvePoint], unit: str = ANY_UNIT
) -> list[str]:
    """Return the lines of the plot that suits the evaluations; empty if there is nothing to plot."""
    if not all(np.isfinite(one.rollout.returns).all() for one in found):
        return []
    width = min(terminal_width(), _WIDEST)
    if len(found) == 1:
        bars = render_histogram(found[0].rollout.returns, width)
        return ["histogram of returns (episodes per range)", *bars] if bars else []
    enough = len({point.step for point in curve}) >= _FEWEST_POINTS
    if not enough or importlib.util.find_spec("plotext") is None:
        return []
    return ["mean return", *render_learning_curve(curve, width, unit)]


def render_histogram(values: np.ndarray, width: int) -> list[str]:
    """Return a row per range of values: its ends, its count and a bar; at most `width` characters."""
    low, high = float(values.min()), float(values.max())
    if len(values) < FEWEST or low == high:
        return []
    counts, edges = np.histogram(values, min(_BARS, count_bins(len(values))))
    names = [_format_axis_number(edge) for edge in edges]
    wide, digits = max(map(len, names)), len(str(counts.max()))
    room = max(1, width - 2 * wide - digits - 8)
    block = _BLOCK if _can_encode(_BLOCK) else "#"
    lines = []
    for number, amount in enumerate(counts.tolist()):
        bar = block * max(round(amount / counts.max() * room), int(amount > 0))
        lines.append(f"{names[number]:>{wide}} to {names[number + 1]:>{wide}}  {amount:>{digits}}  {bar}")
    return [line.rstrip() for line in lines]


def count_bins(n: int) -> int:
    """Return the number of bins for n values by Rice's rule, which is robust to outliers."""
    return math.ceil(2 * math.cbrt(n))


def render_learning_curve(curve: Sequence[LearningCurvePoint], width: int, unit: str = ANY_UNIT) -> list[str]:
    """Return a plot of the mean over steps, one line per run; a single run has intervals."""
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _CURVE_HEIGHT)
    figure.label(unit)
    ends = sorted({curve[0].step, curve[-1].step})
    figure.ruler("x").ticks(ends, [f"{step:,}" for step in ends])
    lines = _can_encode("⣿│")
    runs = [[p for p in curve if p.run == run] for run in dict.fromkeys(point.run for point in curve)]
    for run in runs:
        strokes = [([point.step for point in run], [point.mean for point in run])]
        if len(runs) == 1:
            strokes += [([point.step] * 2, list(point.ci95)) for point in run if point.ci95 is not None]
        for steps, values in strokes:
            figure.draw(figure.signal(steps, values, marker="braille" if lines else "*").lines())
    text: str = figure.build().string(colorless=True)
    return [line.rstrip() for line in (text if lines else text.translate(_FRAME)).splitlines()]


def _format_axis_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _can_encode(characters: str) -> bool:
    """Return whether the output's encoding has the characters."""
    try:
        characters.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


# Panels of a plot, each on separate axes, with colors and markers that color-blind readers can distinguish.

# Okabe and Ito's palette (jfly.uni-koeln.de/color), without yellow and black.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY)
MARKS = "osD^vP"
INK = "#222222"
_ENDS = (("terminated", ORANGE), ("truncated", SKY))
_MOST_BINS = 40
_LONGEST = 42
# Within one training run, updates start after the first steps and happen at every step or every second one.
_ALIKE = 2.5


def draw_returns(axes: Axes, one: Evaluation) -> None:
    """Plot the distribution of the returns, each return, and the mean with its interval."""
    values, result = one.rollout.returns, one.statistics
    if len(values) >= FEWEST and result.min < result.max:
        over = one.rollout.terminated
        parts = [(values[here], *kind) for here, kind in zip((over, ~over), _ENDS, strict=True) if here.any()]
        held, labels, tones = zip(*parts, strict=True)
        edges = _bin_edges(values)
        axes.hist(held, edges, stacked=True, color=tones, label=labels, edgecolor="white", linewidth=0.5)
        height = axes.get_ylim()[1]
        axes.plot(values, np.full(len(values), -0.04 * height), "|", color=INK, markersize=7)
        axes.set_ylim(-0.08 * height, 1.05 * height)
        axes.set_ylabel("episodes")
    else:
        axes.plot(values, np.linspace(0.8, 0.2, len(values)), "o", color=BLUE, zorder=3, label="episodes")
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    if result.ci95 is not None:
        axes.axvspan(
            *result.ci95, color=RED, alpha=0.18, linewidth=0, zorder=0.6, label="95 % CI of the mean"
        )
    axes.axvline(result.mean, color=RED, linewidth=1.8, label=f"mean {_format_return(result.mean)}")
    axes.axvline(
        result.iqm, color=INK, linewidth=1.4, linestyle="--", label=f"IQM {_format_return(result.iqm)}"
    )
    axes.set_xlabel("return")
    axes.set_title(f"{title_name(one.checkpoint)} in {clean(one.env)}, {format_count(result.n, 'episode')}")
    axes.legend(loc="best")


def draw_lengths(axes: Axes, one: Evaluation) -> None:
    """Plot the episode lengths."""
    from matplotlib.ticker import MaxNLocator

    values = one.rollout.lengths
    axes.hist(values, _bin_edges(values), color=BLUE, edgecolor="white", linewidth=0.5)
    axes.set_xlabel("episode length (steps)")
    if values.min() < values.max():
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    else:
        axes.set_xticks([int(values[0])])
    axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10], integer=True))


def draw_learning_curve(
    axes: Axes, found: Sequence[Evaluation], curve: Sequence[LearningCurvePoint], unit: str = ANY_UNIT
) -> Axes:
    """Plot means over steps with their intervals, one line per run, and every return."""
    by_path = {each.checkpoint: each.rollout.returns for each in found}
    runs = list(dict.fromkeys(point.run for point in curve))
    names = _distinct_names(runs)
    for number, run in enumerate(runs):
        points = [point for point in curve if point.run == run]
        colour, mark = COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]
        steps, means = [point.step for point in points], [point.mean for point in points]
        for point in points:
            values = by_path.get(point.checkpoint, np.empty(0))
            axes.plot(np.full(len(values), point.step), values, ".", color=colour, alpha=0.25, markersize=3)
        low, high = zip(*(point.ci95 or (point.mean, point.mean) for point in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        label = names[number] if len(runs) > 1 else "mean, 95 % CI of the mean, episodes"
        axes.plot(steps, means, marker=mark, markersize=4, color=colour, linewidth=1.5, label=label)
    best = max(curve, key=lambda point: point.mean)
    sentence = f"best mean {_format_return(best.mean)} at {best.step:,}"
    axes.plot([best.step], [best.mean], "*", color=INK, markersize=11, label=sentence, linestyle="none")
    axes.set_ylabel("return")
    axes.set_title(f"{clean(found[0].env)}, {format_count(found[0].statistics.n, 'episode')} each")
    _label_steps(axes, unit)
    axes.legend(loc="best")
    return axes


def draw_algorithms(
    figure: Figure,
    place: SubplotSpec,
    found: Sequence[Algorithm],
    compared: AlgorithmComparison | None,
    unit: str = ANY_UNIT,
) -> None:
    """Plot algorithms side by side: mean and interquartile mean with intervals, every run, their curves.

    Intervals come from the bootstrap over training runs (evaluation/statistics.py), as in rliable.
    """
    from ckpttool.commands.algorithms import curve_over_steps

    curves = [curve_over_steps(each) for each in found]
    inner = place.subgridspec(1, 3, width_ratios=[1, 1, 1.5])
    names = algorithm_names(found)
    first = figure.add_subplot(inner[0, 0])
    for axes, title in ((first, "mean"), (figure.add_subplot(inner[0, 1], sharey=first), "IQM")):
        _draw_intervals(axes, found, title)
        if axes is first:
            axes.set_yticks(range(len(found)), names)
            axes.set_ylim(len(found) - 0.5, -0.5)
        else:
            axes.tick_params(labelleft=False)
    last = figure.add_subplot(inner[0, 2])
    if all(len(points) > 1 for points in curves):
        _draw_run_curves(last, curves, names, unit)
    else:
        _draw_run_scores(last, found, names)
    env = clean(found[0].runs[0].scored[0].evaluation.env)
    sentence = "" if compared is None else f": {_format_difference(compared)}"
    figure.suptitle(f"{env}{sentence}", x=0.01, ha="left", fontsize=10)


def algorithm_names(found: Sequence[Algorithm]) -> list[str]:
    """Return a name for each algorithm: its runs' common folder or common name prefix."""
    paths = [[os.path.abspath(run.path) for run in each.runs] for each in found]
    names = [title_name(os.path.commonpath(each)) for each in paths]
    if len(set(names)) < len(names):
        names = [
            _common_prefix([os.path.basename(path) for path in each]) or title_name(each[0]) for each in paths
        ]
    if len(set(names)) < len(names):
        names = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    return [
        f"{name}\n({format_count(len(each.runs), 'run')})" for name, each in zip(names, found, strict=True)
    ]


def _common_prefix(names: Sequence[str]) -> str:
    """Return the common prefix of the names without a run number: `td3` of `td3_seed0`, `td3_seed1`."""
    first, last = min(names), max(names)
    same = next((at for at, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return clean(first[:same].rstrip("0123456789_-. "))


def _draw_intervals(axes: Axes, found: Sequence[Algorithm], title: str) -> None:
    for row, each in enumerate(found):
        estimate = each.mean if title == "mean" else each.iqm
        colour = COLOURS[row % len(COLOURS)]
        if estimate.ci95 is not None:
            low, high = estimate.ci95
            axes.barh(row, high - low, left=low, height=0.5, color=colour, alpha=0.45)
        axes.plot([estimate.value] * 2, [row - 0.25, row + 0.25], color=INK, linewidth=1.8)
    axes.set_title(f"{title}, 95 % CI")
    axes.set_xlabel("return")
    axes.use_sticky_edges = False
    axes.margins(x=0.12)
    _limit_ticks(axes)


def _draw_run_scores(axes: Axes, found: Sequence[Algorithm], names: Sequence[str]) -> None:
    """Plot the score of every run."""
    for row, each in enumerate(found):
        scores = sorted(run.score for run in each.runs)
        places = np.linspace(-0.2, 0.2, len(scores)) if len(scores) > 1 else np.zeros(1)
        mark = MARKS[row % len(MARKS)]
        axes.plot(scores, row + places, mark, color=COLOURS[row % len(COLOURS)], label=names[row])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_title("score of each run")
    axes.set_xlabel("return")
    axes.margins(x=0.12)
    _limit_ticks(axes)


def _draw_run_curves(
    axes: Axes, found: Sequence[Sequence[AlgorithmCurvePoint]], names: Sequence[str], unit: str
) -> None:
    """Plot each algorithm's mean over its runs, step by step, with the interval over runs."""
    for row, points in enumerate(found):
        colour, mark = COLOURS[row % len(COLOURS)], MARKS[row % len(MARKS)]
        steps, means = [point.step for point in points], [point.score.value for point in points]
        low, high = zip(*(point.score.ci95 or (point.score.value,) * 2 for point in points), strict=True)
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(steps, means, marker=mark, markersize=4, color=colour, label=names[row].replace("\n", " "))
    axes.set_title("mean over runs at equal steps, 95 % CI")
    axes.set_ylabel("return")
    _label_steps(axes, unit)
    axes.legend(loc="best")


def _format_difference(found: AlgorithmComparison) -> str:
    estimate, chance = found.difference, found.probability
    spread = (
        ""
        if estimate.ci95 is None
        else f" [{_format_return(estimate.ci95[0])}, {_format_return(estimate.ci95[1])}]"
    )
    return f"difference of means {_format_return(estimate.value)}{spread}, P(improvement) {chance.value:.2f}"


def _limit_ticks(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=4))


def draw_checkpoints(axes: Axes, found: Sequence[Evaluation]) -> None:
    """Plot several checkpoints side by side: every return, the mean and its interval."""
    for number, one in enumerate(found):
        result, values = one.statistics, one.rollout.returns
        # Spread evenly so that equal returns stay visible; random positions would differ in every file.
        across = number + np.linspace(-0.18, 0.18, len(values)) if len(values) > 1 else [number]
        axes.plot(across, values, ".", color=BLUE, alpha=0.4, markersize=4)
        low, high = result.ci95 or (result.mean, result.mean)
        axes.plot([number, number], [low, high], color=RED, linewidth=5, alpha=0.5, solid_capstyle="butt")
        axes.plot([number], [result.mean], "D", color=RED, markersize=6)
    crowded = len(found) > 4
    axes.set_xticks(
        range(len(found)),
        _distinct_names([one.checkpoint for one in found]),
        rotation=30 if crowded else 0,
        ha="right" if crowded else "center",
    )
    axes.set_ylabel("return")
    axes.set_title(f"{clean(found[0].env)}: episodes, mean and 95 % CI of the mean")


def have_similar_range(curve: Sequence[LearningCurvePoint], training: Sequence[TrainingCurve]) -> bool:
    """Return whether both seem to use the same step unit: updates, steps and iterations differ widely."""
    ends = [max(point.step for point in curve), *(int(each.steps[-1]) for each in training)]
    return max(ends) <= _ALIKE * min(ends)


def draw_logged_curves(axes: Axes, training: Sequence[TrainingCurve]) -> None:
    """Plot the returns logged by the training programs, each curve with its moving mean."""
    folders = _distinct_names([os.path.dirname(curve.files[0]) for curve in training])
    for number, curve in enumerate(training):
        colour = COLOURS[number % len(COLOURS)]
        label = clean(curve.tag) if len(training) == 1 else f"{folders[number]}: {clean(curve.tag)}"
        smooth = _moving_mean(curve.values)
        if smooth is not None:
            axes.plot(curve.steps, curve.values, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(curve.steps, curve.values if smooth is None else smooth, color=colour, label=label)
    axes.set_ylabel("return")
    axes.set_title("logged during training")
    _label_steps(axes)
    axes.legend(loc="best")


def title_name(path: str) -> str:
    """Return a checkpoint's name for a title: the end of its path, without unprintable characters."""
    text = clean(os.path.basename(os.path.normpath(path)))
    return text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"


def _distinct_names(paths: Sequence[str]) -> list[str]:
    """Return short distinct names: the ends of the paths, with as few folders as possible."""
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    deepest = max(map(len, parts))
    for depth in range(1, deepest + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            break
    return [clean(name) if len(name) <= _LONGEST else f"...{clean(name)[3 - _LONGEST :]}" for name in names]


def _bin_edges(values: np.ndarray) -> list[float]:
    """Return the edges of a histogram's bins; equal values get one bin."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [low - 0.5, high + 0.5]
    edges: list[float] = np.linspace(low, high, min(_MOST_BINS, count_bins(len(values))) + 1).tolist()
    return edges


def _moving_mean(values: np.ndarray) -> np.ndarray | None:
    """Return the mean over a window of a twentieth of the curve; None for a short curve."""
    window = len(values) // 20 | 1
    if window < 3:
        return None
    ones = np.ones(window)
    counts = np.convolve(np.ones(len(values)), ones, "same")
    smooth: np.ndarray = np.convolve(values, ones, "same") / counts
    return smooth


def _label_steps(axes: Axes, unit: str = ANY_UNIT) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _format_return(value: float) -> str:
    return f"{value:,.1f}"


# Plot files of evaluations: the returns of one checkpoint, the learning curve of several.

HINT = "pip install 'ckpttool[eval]'"
# Metadata with author and date is removed, so that equal numbers give equal files.
_SILENT: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}
# matplotlib's type for it lists all names of one version.
_STYLE: Any = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8,
    # Names come from files, so a dollar sign is no math markup.
    "text.parse_math": False,
    "svg.hashsalt": "ckpttool",
    "svg.fonttype": "none",
    "path.simplify": True,
}
_WIDTH, _HEIGHT, _BELOW = 8.0, 4.0, 2.6  # inches
_DPI = 120
_RC = "MATPLOTLIBRC"


def require_plot(target: str) -> None:
    """Raise if no plot can be written to `target`: unknown suffix, existing file, matplotlib missing."""
    if _suffix(target) not in _SILENT:
        raise UsageError(
            "cannot infer the plot format from the file name",
            file=target,
            hint=f"use a file name that ends in {', '.join(_SILENT)}",
        )
    require_new(target, hint="choose another name")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("plotting requires matplotlib, which is not installed", hint=HINT)


class PlotData(NamedTuple):
    """What a plot shows: evaluations, their curve, curves logged in training, algorithms compared."""

    found: Sequence[Evaluation]
    curve: Sequence[LearningCurvePoint] = ()
    training: Sequence[TrainingCurve] = ()
    algorithms: Sequence[Algorithm] = ()
    comparison: AlgorithmComparison | None = None
    unit: str = ANY_UNIT


def write_plot(target: str, data: PlotData) -> None:
    """Plot evaluations into a new file, and below them the curves logged during training.

    One checkpoint shows the distribution of its returns and lengths; several show their means over
    training steps, or side by side if no steps are known; training runs show the mean and the
    interquartile mean of each algorithm with intervals over its runs. The same values give the same
    bytes. Raise CkpttoolError for a non-finite return.
    """
    for one in data.found:
        if not np.isfinite(one.rollout.returns).all():
            raise CkpttoolError("cannot plot a non-finite return", file=one.checkpoint)
    mpl = _import_matplotlib()
    # Avoid pyplot: it would look for a display and keep every figure.
    with mpl.rc_context(), warnings.catch_warnings():
        # Ignore ./matplotlibrc and the user's own file, so that plots do not depend on them.
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        # Warning about a character that the typeface lacks.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = _draw_figure(data)
        suffix = _suffix(target)
        drawn = io.BytesIO()
        figure.savefig(drawn, format=suffix[1:], metadata=_SILENT[suffix])
    write_file(target, drawn.getvalue())


def _draw_figure(data: PlotData) -> Figure:
    """Return the figure: the evaluations above, the logged curves below."""
    from matplotlib.figure import Figure

    rows = 2 if data.training else 1
    height = _HEIGHT + (_BELOW if data.training else 0)
    figure = Figure((_WIDTH, height), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(rows, 4, height_ratios=[_HEIGHT, _BELOW][:rows])
    above = None
    if len(data.algorithms) > 1 or any(len(each.runs) > 1 for each in data.algorithms):
        draw_algorithms(figure, grid[0, :], data.algorithms, data.comparison, data.unit)
    elif len(data.found) == 1:
        draw_returns(figure.add_subplot(grid[0, :3]), data.found[0])
        draw_lengths(figure.add_subplot(grid[0, 3]), data.found[0])
    elif data.curve:
        above = draw_learning_curve(figure.add_subplot(grid[0, :]), data.found, data.curve, data.unit)
    else:
        draw_checkpoints(figure.add_subplot(grid[0, :]), data.found)
    if data.training:
        shared = above if data.curve and have_similar_range(data.curve, data.training) else None
        draw_logged_curves(figure.add_subplot(grid[1, :], sharex=shared), data.training)
    return figure


def _import_matplotlib() -> Any:
    """Import matplotlib without the settings in ./matplotlibrc or in the user's own file."""
    if "matplotlib" in sys.modules:
        return sys.modules["matplotlib"]
    spec = importlib.util.find_spec("matplotlib")
    package = os.path.dirname(str(spec.origin if spec is not None else None))
    chosen = os.environ.get(_RC)
    try:
        os.environ[_RC] = os.path.join(package, "mpl-data", "matplotlibrc")
        with search_paths.change_directory(package):
            return importlib.import_module("matplotlib")
    finally:
        os.environ.pop(_RC)
        if chosen is not None:
            os.environ[_RC] = chosen


def _suffix(target: str) -> str:
    return os.path.splitext(target)[1].lower()
