"""Draw the dataflow of networks as an SVG file: rows of boxes, wrapped as text is."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.text import clean, format_count, shorten
from ckpttool.listing.strips import FlowStage, FlowStrip, format_shape

# Lengths are in pixels, from the upper left corner; the widest common monospaced font has an advance of 0.602
# of its size.
FONT = 12
DESCENT = 4.0
ADVANCE = 0.61 * FONT
LINE, PADDING, GAP, MARGIN = 17.0, 10.0, 28.0, 24.0
BOX, PILL = 66.0, 28.0
"""Heights of a box with up to three lines, and of an activation."""
_ROW = BOX + 26.0
_NARROWEST, _LONGEST, _TITLE = 64.0, 26, 120
_WIDTH = 1160.0
_MOST = 120
"""Stages drawn of one network."""

_STYLE = f"""
text {{ font: {FONT}px ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; fill: #1f2328 }}
.paper {{ fill: #ffffff }} .strip-title {{ font-size: 14px; font-weight: bold }}
.stage {{ fill: #f6f8fa; stroke: #8c959f; stroke-width: 1.2 }} .stage-name {{ font-weight: bold }}
.stage-dim, .strip-dim {{ fill: #59636e }} .stage-m {{ text-anchor: middle }}
.stage.layer {{ fill: #ddf0ff; stroke: #0a5cad }} .stage.activation {{ fill: #fff3d1; stroke: #9a6700 }}
.stage.normalizer {{ fill: #e6f6ea; stroke: #1a7f37 }} .stage.output {{ fill: #f0e8fb; stroke: #6639ba }}
.stage.unknown {{ fill: #ffebe9; stroke: #cf222e }} .assumed {{ stroke-dasharray: 5 3 }}
.flow {{ fill: none; stroke: #59636e; stroke-width: 1.3 }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }} .paper {{ fill: #0d1117 }} .stage {{ fill: #161b22; stroke: #6e7681 }}
.stage-dim, .strip-dim {{ fill: #9198a1 }} .stage.layer {{ fill: #0c2d4a; stroke: #58a6ff }}
.stage.activation {{ fill: #332701; stroke: #d29922 }} .stage.normalizer {{ fill: #10281a; stroke: #3fb950 }}
.stage.output {{ fill: #271a42; stroke: #a371f7 }} .stage.unknown {{ fill: #3c1618; stroke: #f85149 }}
.flow {{ stroke: #9198a1 }}
}}
"""


@dataclass(slots=True)
class _Pen:
    """The elements drawn so far; `right` and `bottom` are the extent of the drawing."""

    parts: list[str] = field(default_factory=list)
    right: float = 0.0
    bottom: float = 0.0

    def text(self, x: float, y: float, text: str, style: str) -> None:
        shown = shorten(text, _TITLE)
        self.parts.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(shown)}</text>')
        # An underscore is below the line.
        self.bottom = max(self.bottom, y + DESCENT)
        if "stage-m" not in style:
            self.right = max(self.right, x + len(shown) * ADVANCE * (14 / FONT if "title" in style else 1))

    def arrow(self, path: str, x: float) -> None:
        """Draw a path that ends with a line to the right, and an arrow head at x."""
        self.parts.append(f'<path class="flow" d="{path}H{x:.1f}m-5 -4l5 4l-5 4"/>')

    def stage(self, stage: FlowStage, x: float, middle: float) -> None:
        """Draw the box of a stage, with its left end at x."""
        width, lines = stage_width(stage), _stage_lines(stage)
        height = PILL if stage.kind == "activation" else BOX
        style = f"stage {stage.kind}{' assumed' if stage.assumed else ''}"
        radius = PILL / 2 if stage.kind == "activation" else 6
        about = ", ".join(filter(None, (clean(stage.name), stage.detail, stage.note, _format_origin(stage))))
        self.parts.append(
            f'<g><title>{escape(about)}</title><rect class="{style}" x="{x:.1f}" '
            f'y="{middle - height / 2:.1f}" width="{width:.1f}" height="{height:.0f}" rx="{radius:.0f}"/>'
        )
        top = middle - LINE * (len(lines) - 1) / 2 + 4
        for number, line in enumerate(lines):
            name = "stage-m stage-name" if not number else "stage-m stage-dim"
            self.text(x + width / 2, top + number * LINE, line, name)
        self.parts.append("</g>")
        self.right = max(self.right, x + width)
        self.bottom = max(self.bottom, middle + height / 2)


def _format_origin(stage: FlowStage) -> str:
    return f"assumed: {stage.assumed}" if stage.assumed else ""


def _stage_lines(stage: FlowStage) -> list[str]:
    name = shorten(clean(stage.name), _LONGEST)
    if stage.kind == "activation":
        return [name]
    shape = "" if stage.kind in ("map", "normalizer", "unknown") else format_shape(stage.shape)
    size = f"{stage.parameters:,} params" if stage.parameters else ""
    return [name, *(shorten(line, _LONGEST) for line in (shape, size, stage.detail) if line)]


def stage_width(stage: FlowStage) -> float:
    """Return the width of a stage's box."""
    return max(_NARROWEST, *(len(line) * ADVANCE for line in _stage_lines(stage))) + 2 * PADDING


def render_dataflow(strips: Sequence[FlowStrip], title: str, *, width: float = _WIDTH) -> str:
    """Return the strips as one SVG document."""
    pen = _Pen()
    pen.text(MARGIN, MARGIN + FONT, clean(title), "strip-title")
    y = MARGIN + 2 * LINE
    for strip in strips:
        y = _draw_strip(pen, strip, y, width) + 1.5 * LINE
    wide, high = (f"{end + MARGIN:.0f}" for end in (pen.right, pen.bottom))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" '
        f'viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(_describe(strips))}">'
    )
    first = f"<title>{escape(clean(title))}</title><style>{_STYLE}</style>"
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return "\n".join([head, first, paper, *pen.parts, "</svg>\n"])


def _describe(strips: Sequence[FlowStrip]) -> str:
    return f"Dataflow of {', '.join(clean(strip.title) for strip in strips)}"


def _draw_strip(pen: _Pen, strip: FlowStrip, y: float, width: float) -> float:
    """Draw one network from y downwards; return its lower end."""
    pen.text(MARGIN, y + FONT, clean(strip.title), "strip-title")
    same = f"; alike: {', '.join(map(clean, strip.alike))}" if strip.alike else ""
    pen.text(MARGIN, y + FONT + LINE, f"{format_count(strip.parameters, 'parameter')}{same}", "strip-dim")
    y += FONT + LINE + 10
    stages = _limit(strip.stages)
    if strip.streams:
        x, middle = _draw_streams(pen, strip.streams, y, width)
        below = max(pen.bottom, middle + BOX / 2) + 26
        y = max(pen.bottom, _draw_rows(pen, stages, (x, middle), width, below))
    else:
        y = _draw_rows(pen, stages, (MARGIN, y + BOX / 2), width, y + _ROW)
    lines = [clean(note) for note in strip.notes]
    lines += [
        f"dashed: assumed {', '.join(map(clean, names))} ({clean(origin)})"
        for origin, names in strip.assumptions.items()
    ]
    y += 4 if lines else 0
    for line in lines:
        y += LINE
        pen.text(MARGIN, y, line, "strip-dim")
    return y


def _limit(stages: tuple[FlowStage, ...]) -> tuple[FlowStage, ...]:
    """Return the stages to draw: of a very deep network, the first and the last ones."""
    left = len(stages) - _MOST
    if left <= 0:
        return stages
    rest = FlowStage("map", f"{left:,} more", (), note="not drawn")
    return (*stages[: _MOST // 2], rest, *stages[len(stages) - _MOST // 2 :])


def _draw_streams(
    pen: _Pen, streams: Sequence[tuple[FlowStage, ...]], y: float, width: float
) -> tuple[float, float]:
    """Draw one row per input and the lines that join them; return where the next stage begins."""
    ends = []
    for number, stream in enumerate(streams):
        middle = y + BOX / 2 + number * _ROW
        ends.append((_draw_chain(pen, stream, MARGIN, middle), middle))
    bus = max(x for x, _ in ends) + GAP / 2
    centre = (ends[0][1] + ends[-1][1]) / 2
    lowest = ends[-1][1]
    for x, middle in ends:
        pen.parts.append(f'<path class="flow" d="M{x:.1f} {middle:.1f}H{bus:.1f}V{centre:.1f}"/>')
    pen.right = max(pen.right, bus)
    if bus < width / 2:
        pen.arrow(f"M{bus:.1f} {centre:.1f}", bus + GAP)
        return bus + GAP, centre
    lower = lowest + _ROW
    bend, left = lower - BOX / 2 - 13, MARGIN + 4
    pen.arrow(f"M{bus:.1f} {lowest:.1f}V{bend:.1f}H{left:.1f}V{lower:.1f}", MARGIN + GAP)
    return MARGIN + GAP, lower


def _draw_chain(pen: _Pen, stages: Sequence[FlowStage], x: float, middle: float) -> float:
    """Draw stages in one row from x; return the right end."""
    for number, stage in enumerate(stages):
        if number:
            pen.arrow(f"M{x:.1f} {middle:.1f}", x + GAP)
            x += GAP
        pen.stage(stage, x, middle)
        x += stage_width(stage)
    return x


def _draw_rows(
    pen: _Pen, stages: Sequence[FlowStage], start: tuple[float, float], width: float, below: float
) -> float:
    """Draw stages in as many rows as needed, the first from `start`, the others from `below` downwards."""
    x, middle = start
    rows = split_rows(stages, x, width)
    for row, following in pairwise([*rows, []]):
        x = _draw_chain(pen, row, x, middle)
        if following:
            lower = below + BOX / 2
            bend = lower - BOX / 2 - 13
            left = MARGIN + 4
            pen.arrow(f"M{x:.1f} {middle:.1f}h10V{bend:.1f}H{left:.1f}V{lower:.1f}", MARGIN + GAP)
            pen.right = max(pen.right, x + 10)
            x, middle, below = MARGIN + GAP, lower, below + _ROW
    return middle + BOX / 2


def split_rows(stages: Sequence[FlowStage], x: float, width: float) -> list[list[FlowStage]]:
    """Return the stages of each row; an activation stays in the row of its layer."""
    rows: list[list[FlowStage]] = [[]]
    for stage in stages:
        if rows[-1] and stage.kind != "activation" and x + stage_width(stage) > width:
            rows.append([])
            x = MARGIN + GAP
        rows[-1].append(stage)
        x += stage_width(stage) + GAP
    return rows
