"""A graph in Graphviz's language (https://graphviz.org/doc/info/lang.html), for those who want its layout."""

from __future__ import annotations

from ckpttool.ops.drawing import Graph, Node
from ckpttool.ops.modules import kind
from ckpttool.shown import clean, count, size

_STYLES = {"child": "solid", "alias": "dashed", "slot": "dotted"}


def dot(graph: Graph) -> str:
    """Return the digraph; in its strings only a backslash and a quote mean anything, and both are escaped."""
    lines = [
        "digraph checkpoint {",
        f"  label={_quoted([clean(graph.title), *map(clean, graph.notes)])};",
        "  labelloc=t; rankdir=LR; ranksep=0.8;",
        '  node [shape=box, style=rounded, fontname="monospace", fontsize=10];',
        '  edge [fontname="monospace", fontsize=9, arrowsize=0.6];',
    ]
    lines += [f"  n{at} [label={_quoted(_lines(node))}];" for at, node in enumerate(graph.nodes)]
    for edge in graph.edges:
        # A second name and an optimizer do not decide where a module stands.
        free = "" if edge.kind == "child" else ", constraint=false"
        label = f", label={_quoted([clean(edge.label)])}" if edge.label else ""
        lines.append(f"  n{edge.source} -> n{edge.target} [style={_STYLES[edge.kind]}{free}{label}];")
    return "\n".join([*lines, "}\n"])


def _lines(node: Node) -> list[str]:
    module = node.module
    lines = [clean(node.name) or "(root)", kind(module)]
    lines.append(f"{count(module.parameters, 'parameter')}, {size(module.nbytes)}")
    lines += [f"{clean(v.name)}  {v.dtype}{list(v.shape)}" for v in node.variables]
    lines += [f"and {node.left_out:,} more"] if node.left_out else []
    lines += [count(node.slots, "slot variable")] if node.slots else []
    lines += [f"{count(node.folded, 'tensor')} below"] if node.folded else []
    return [line for line in lines if line]


def _quoted(lines: list[str]) -> str:
    escaped = [line.replace("\\", "\\\\").replace('"', '\\"') for line in lines]
    # \l ends a line that stands at the left.
    return '"' + "".join(f"{line}\\l" for line in escaped) + '"' if len(lines) > 1 else f'"{escaped[0]}"'
