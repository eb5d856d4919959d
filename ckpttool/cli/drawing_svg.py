"""A drawing as SVG: text and lines only, no script, nothing that is fetched, readable in light and dark."""

from __future__ import annotations

from html import escape

from ckpttool.cli.drawing_layout import FONT, Box, Drawing, Text, advance

_STYLE = f"""
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


def svg(drawing: Drawing) -> str:
    """Return the SVG document, without an XML declaration so that a page can hold it."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    title = drawing.texts[0]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title.whole)}</title><style>{_STYLE}</style><defs>{_ARROWS}</defs>",
        '<rect class="paper" width="100%" height="100%"/>',
        *(
            f'<path class="edge {kind}" d="M{x:.1f} {y:.1f}h32"{_arrow(kind)}/>'
            for kind, x, y in drawing.legend
        ),
        *(_text(text) for text in drawing.texts),
        *(
            f'<path class="edge {curve.kind}" d="{curve.path}"{_arrow(curve.kind)}/>'
            for curve in drawing.curves
        ),
        *(_box(box) for box in drawing.boxes),
        *(_label(curve.label) for curve in drawing.curves if curve.label is not None),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _arrow(kind: str) -> str:
    return "" if kind == "child" else f' marker-end="url(#end-{kind})"'


def _box(box: Box) -> str:
    style = "box optimizer" if box.optimizer else "box"
    rule = ""
    if box.rule is not None:
        rule = f'<path class="rule" d="M{box.x:.1f} {box.rule:.1f}h{box.width:.1f}"/>'
    return (
        f'<g><rect class="{style}" x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" '
        f'height="{box.height:.1f}" rx="6"/>{rule}{"".join(map(_text, box.texts))}</g>'
    )


def _label(text: Text) -> str:
    # The lines below it would cross it out.
    width = advance(text.text) + 6
    return (
        f'<rect class="paper" x="{text.left - 3:.1f}" y="{text.y - FONT:.1f}" width="{width:.1f}" '
        f'height="{FONT + 4}"/>{_text(text)}'
    )


def _text(text: Text) -> str:
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    # A tooltip with what was too long for the drawing.
    whole = f"<title>{escape(text.whole)}</title>" if text.whole and text.whole != text.text else ""
    return (
        f'<text class="{text.style}" x="{text.x:.1f}" y="{text.y:.1f}"{anchor} '
        f'xml:space="preserve">{whole}{escape(text.text)}</text>'
    )
