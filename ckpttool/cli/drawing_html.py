"""A drawing as one page that needs nothing else: drag to move, the wheel to come nearer."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from ckpttool.cli.drawing_layout import Drawing
from ckpttool.cli.drawing_svg import svg

# Without it the page scrolls; the names in the drawing are text to it.
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
_STYLE = """
html, body { margin: 0; height: 100%; background: #ffffff }
body.moves { overflow: hidden } body.moves svg { width: 100vw; height: 100vh; cursor: grab }
p { position: fixed; right: 12px; bottom: 4px; margin: 0; display: none }
p { font: 12px sans-serif; color: #59636e }
body.moves p { display: block }
@media (prefers-color-scheme: dark) { html, body { background: #0d1117 } p { color: #9198a1 } }
"""


def page(drawing: Drawing) -> str:
    """Return the page; its policy lets no script run but ours, and nothing be fetched."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escape(drawing.texts[0].whole)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n{svg(drawing)}"
        f"<p>drag to move, wheel to zoom, double click for the whole</p>\n"
        f"<script>{_SCRIPT}</script>\n</body></html>\n"
    )
