"""Drawings of modules and networks as dot, SVG and HTML."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from ckpttool.cli.columns import ColumnLine
from ckpttool.cli.tree_tables import list_rows
from ckpttool.core.atomic_write import require_new, write_file
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UsageError
from ckpttool.core.text import clean, format_count, format_size, shorten
from ckpttool.libraries.recognize import has_saver_graph
from ckpttool.listing.contents import CheckpointSummary
from ckpttool.listing.dataflow import find_strips, restore_strips
from ckpttool.listing.layers import architecture_strips
from ckpttool.listing.module_graph import ModuleGraph, ModuleNode, build_module_graph
from ckpttool.listing.modules import describe_module_kind

if TYPE_CHECKING:
    from ckpttool.listing.layers import Architecture
    from ckpttool.listing.strips import FlowStrip
    from ckpttool.pages.computation import Computation


_STYLES = {"child": "solid", "alias": "dashed", "slot": "dotted"}


def render_dot(graph: ModuleGraph) -> str:
    """Return the digraph; backslashes and quotes, the only special characters in strings, are escaped.

    Graphviz's language: https://graphviz.org/doc/info/lang.html.
    """
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


def _node_lines(node: ModuleNode) -> tuple[tuple[str, str, str], list[str]]:
    """Return name, kind and size of a module, and the lines below them: variables, and what has no box."""
    module = node.module
    size = f"{format_count(module.parameters, 'parameter')}, {format_size(module.nbytes)}"
    rows = [f"{clean(v.name)}  {v.dtype}{list(v.shape)}" for v in node.variables]
    rows += [f"and {node.left_out:,} more"] if node.left_out else []
    rows += [format_count(node.slots, "slot variable")] if node.slots else []
    rows += [f"{format_count(node.folded, 'tensor')} below"] if node.folded else []
    return (clean(node.name) or "(root)", describe_module_kind(module), size), rows


def _dot_lines(node: ModuleNode) -> list[str]:
    head, rows = _node_lines(node)
    return [line for line in (*head, *rows) if line]


def _quote_lines(lines: list[str]) -> str:
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    # \l ends a left-aligned line.
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"' if len(lines) > 1 else f'"{escaped[0]}"'


_LINE, _INDENT, _MARGIN, _ADVANCE, _LONGEST = 17, 22, 24, 7.4, 100
_SVG_STYLE = """
text { font: 12px ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.paper { fill: #ffffff } .title, .name { font-weight: bold } .kind { fill: #0a5cad } .dim { fill: #59636e }
.edge { fill: none; stroke: #8c959f } .alias { fill: #1a7f37 } .slot { fill: #9a6700 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117 } .kind { fill: #79c0ff } .dim { fill: #9198a1 }
.edge { stroke: #6e7681 } .alias { fill: #3fb950 } .slot { fill: #d29922 }
}
"""


class SvgLine(NamedTuple):
    """One line of text: its level, its baseline, and its pieces with their style."""

    level: int
    y: int
    pieces: tuple[tuple[str, str], ...]

    @property
    def x(self) -> int:
        """Where the line begins."""
        return _MARGIN + _INDENT * self.level

    def render(self) -> str:
        """Return the text element; a piece that is too long has a tooltip."""
        parts = []
        for number, (text, style) in enumerate(self.pieces):
            short = shorten(text, _LONGEST)
            whole = f"<title>{escape(text)}</title>" if short != text else ""
            gap = ' dx="14"' if number else ""
            parts.append(f'<tspan class="{style}"{gap}>{escape(short)}{whole}</tspan>')
        return f'<text x="{self.x}" y="{self.y}">{"".join(parts)}</text>'


def render_svg(graph: ModuleGraph) -> str:
    """Return the SVG document: each module below the one that contains it, with what it shares and trains."""
    from rich.cells import cell_len

    lines, paths = _svg_lines(graph)
    ends = (
        line.x + sum(14 + cell_len(shorten(text, _LONGEST)) * _ADVANCE for text, _ in line.pieces)
        for line in lines
    )
    size = f'width="{max(ends) + _MARGIN:.0f}" height="{lines[-1].y + _MARGIN}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = f"<title>{escape(clean(graph.title))}</title><style>{_SVG_STYLE}</style>"
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([head, title, paper, *paths, *(line.render() for line in lines), "</svg>\n"])


def _svg_lines(graph: ModuleGraph) -> tuple[list[SvgLine], list[str]]:
    """Return the lines from top to bottom, and the paths from each module to those that it contains."""
    below: dict[int, list[int]] = {}
    links: dict[int, list[tuple[str, str]]] = {}
    for edge in graph.edges:
        target, label = graph.nodes[edge.target].module.path or "(root)", clean(edge.label)
        if edge.kind == "child":
            below.setdefault(edge.source, []).append(edge.target)
        else:
            text = (
                f"{label} is {clean(target)} (alias)"
                if edge.kind == "alias"
                else f"optimizes {clean(target)}: {label}"
            )
            links.setdefault(edge.source, []).append((text, edge.kind))
    texts = [(clean(graph.title), "title"), *((clean(note), "dim") for note in graph.notes)]
    lines = [SvgLine(0, _MARGIN + _LINE * at, (text,)) for at, text in enumerate(texts)]
    paths, heads = [], dict[int, int]()
    waiting: list[tuple[int, int | None]] = [(0, None)]
    while waiting:
        at, parent = waiting.pop()
        node, y = graph.nodes[at], lines[-1].y + _LINE + 4
        heads[at] = y
        if parent is not None:
            x = _MARGIN + _INDENT * (node.level - 1) + 4
            paths.append(f'<path class="edge" d="M{x} {heads[parent] + 5}V{y - 4}h{_INDENT - 8}"/>')
        (name, kind, size), rows = _node_lines(node)
        pieces = ((name, "name"), (kind, "kind"), (size, "dim"))
        lines.append(SvgLine(node.level, y, tuple(piece for piece in pieces if piece[0])))
        for number, row in enumerate([*((text, "dim") for text in rows), *links.get(at, ())], 1):
            lines.append(SvgLine(node.level + 1, y + _LINE * number, (row,)))
        waiting += [(child, at) for child in reversed(below.get(at, []))]
    return lines, paths


# With more entries, alike siblings share a row, as in the terminal: the page stays below a few megabytes.
_MOST_LISTED = 20_000
# Modules are open at first as far as this many rows are visible.
_FIRST_ROWS = 40
_PAGE_STYLES = ("modules.css", "computation.css")
_PAGE_SCRIPTS = ("elements.js", "dagre.min.js", "computation.js", "modules.js")


def render_page(
    title: str,
    rows: Sequence[ColumnLine] = (),
    remark: str = "",
    depth: int | None = None,
    computation: Computation | None = None,
) -> bytes:
    """Return the page; its policy allows only our own scripts and no network requests.

    Args:
        title: the name of the checkpoint.
        rows: the rows of the tree, from top to bottom.
        remark: the line below the title.
        depth: the levels that are open at first; by default those that fit a screen.
        computation: what is computed, None if no file records it.
    """
    from ckpttool.pages.rendering import render_template, trusted_markup

    # The page of a checkpoint without a known computation needs no layout.
    scripts = _PAGE_SCRIPTS if computation is not None else ("elements.js", "modules.js")
    items = trusted_markup("".join(_tree_items(rows, depth or _fitting_level(rows))))
    return render_template(
        "graph.html",
        _PAGE_STYLES,
        scripts,
        title=title,
        remark=remark,
        computation=computation,
        items=items,
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


def _render_module_page(
    summary: CheckpointSummary, depth: int | None, computation: Computation | None
) -> bytes:
    whole = len(summary.tensors) + len(summary.values) <= _MOST_LISTED
    totals = summary.totals
    remark = (
        f"{format_count(totals.tensors, 'tensor')}, {format_count(totals.parameters, 'parameter')}, "
        f"{format_size(totals.nbytes)}; "
        f"format {summary.checkpoint.format}, layout {summary.layout or 'none recognised'}"
    )
    title = clean(os.path.basename(os.path.normpath(summary.checkpoint.path)))
    return render_page(title, list_rows(summary, whole=whole), remark, depth, computation)


_SUFFIXES = (".svg", ".html", ".dot")
_NAMES = f"use a file name that ends in {', '.join(_SUFFIXES)}"


def write_drawing(
    summary: CheckpointSummary, target: str, depth: int | None = None, *, force: bool = False
) -> dict[str, Any]:
    """Draw a listing into a new file and return the JSON object that describes the drawing.

    The suffix selects the format. Raise UsageError for another suffix, TargetExistsError if the file
    exists and `force` is not given.
    """
    suffix = os.path.splitext(target)[1].lower()
    if suffix not in _SUFFIXES:
        raise UsageError("cannot infer the drawing format from the file name", file=target, hint=_NAMES)
    require_new(target, summary.checkpoint.files, force=force)
    graph, computation = build_module_graph(summary, depth), None
    if suffix == ".html":
        from ckpttool.pages.computation import find_computation

        computation = find_computation(summary.checkpoint, summary.binding, None)
        content = _render_module_page(summary, depth, computation)
    else:
        content = (render_svg(graph) if suffix == ".svg" else render_dot(graph)).encode()
    write_file(target, content, force=force)
    sizes = None if computation is None else {"boxes": len(computation.boxes), "edges": computation.edges}
    return {
        "file": target,
        "modules": len(graph.nodes),
        "edges": len(graph.edges),
        "notes": list(graph.notes),
        **({"computation": sizes} if suffix == ".html" else {}),
    }


def write_dataflow(
    summary: CheckpointSummary,
    target: str,
    layout: str | None = None,
    models: Sequence[Architecture] = (),
    *,
    force: bool = False,
) -> dict[str, Any]:
    """Draw an agent's networks into a new .svg file, or the layers of `models`; return its JSON object.

    Args:
        summary: the checkpoint.
        target: the file.
        layout: the layout of the agent.
        models: architectures that a checkpoint without an agent describes.
        force: replace the file.
    """
    from ckpttool.pages.dataflow import render_dataflow

    if os.path.splitext(target)[1].lower() != ".svg":
        raise UsageError("a dataflow is drawn as SVG", file=target, hint="use a file name that ends in .svg")
    require_new(target, summary.checkpoint.files, force=force)
    strips: Sequence[FlowStrip] = ()
    if summary.binding is None and has_saver_graph(summary.checkpoint):
        # Of a whole program, the policy alone if it is known.
        strips = find_strips(summary.checkpoint, None, None)
    if summary.binding is None and models:
        strips = strips or architecture_strips(models)
    strips = strips or restore_strips(summary.checkpoint, layout)
    title = os.path.basename(os.path.normpath(summary.checkpoint.path))
    write_file(target, render_dataflow(strips, title).encode(), force=force)
    return {"file": target, "networks": [strip.document() for strip in strips]}
