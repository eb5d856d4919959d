"""Strips: networks as rows of stages, as records and as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ckpttool.core.deferred import dataclass
from ckpttool.core.source import Shape
from ckpttool.core.text import format_count

StageKind = Literal["input", "normalizer", "layer", "activation", "join", "map", "output", "unknown"]


@dataclass(frozen=True, slots=True)
class FlowStage:
    """One step: its name, the shape of its output without the batch, the number of its parameters.

    The shape is None if unknown, which it never is for an agent's networks.
    `detail` is a short addition ("-2 to 2"), `note` one that has no place in the picture, e.g. all action
    bounds. `assumed` is the origin of an assumed fact ("default of layout td3"), empty for facts of the
    files.
    """

    kind: StageKind
    name: str
    shape: Shape | None
    parameters: int = 0
    detail: str = ""
    note: str = ""
    assumed: str = ""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "kind": self.kind,
            "name": self.name,
            "shape": None if self.shape is None else list(self.shape),
            "parameters": self.parameters,
            "detail": self.detail or None,
            "note": self.note or None,
            "assumed": self.assumed or None,
        }


@dataclass(frozen=True, slots=True)
class FlowStrip:
    """The stages of one network; `streams` are those of several inputs, which the first stage joins.

    `alike` are the titles of further networks of the same structure.
    """

    title: str
    stages: tuple[FlowStage, ...]
    streams: tuple[tuple[FlowStage, ...], ...] = ()
    notes: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()

    @property
    def every(self) -> tuple[FlowStage, ...]:
        """All stages, those of the streams first."""
        return (*(stage for stream in self.streams for stage in stream), *self.stages)

    @property
    def parameters(self) -> int:
        """The number of parameters of all stages."""
        return sum(stage.parameters for stage in self.every)

    @property
    def assumptions(self) -> dict[str, list[str]]:
        """The names of assumed stages by the origin of the assumption, each once."""
        stages: dict[str, dict[str, None]] = {}
        for stage in self.every:
            if stage.assumed:
                stages.setdefault(stage.assumed, {})[stage.name] = None
        return {origin: list(names) for origin, names in stages.items()}

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "title": self.title,
            "alike": list(self.alike),
            "parameters": self.parameters,
            "streams": [[stage.document() for stage in stream] for stream in self.streams],
            "stages": [stage.document() for stage in self.stages],
            "notes": list(self.notes),
        }


def strip_lines(strips: Sequence[FlowStrip], width: int) -> Iterator[str]:
    """Yield the strips as lines of at most `width` characters; assumed stages have an asterisk."""
    titles = [_format_title(strip) for strip in strips]
    indent = min(max(map(len, titles), default=0), 24) + 2
    for strip, title in zip(strips, titles, strict=True):
        streams = [_arrows(_words(stream)) for stream in strip.streams]
        for stream in streams:
            stream[-1] += " |"
        if streams:
            streams[0][0] = f"({streams[0][0]}"
            streams[-1][-1] = f"{streams[-1][-1][:-2]}) ->"
        pieces = [*(piece for stream in streams for piece in stream), *_arrows(_words(strip.stages))]
        pieces.append(f"({format_count(strip.parameters, 'parameter')})")
        yield from _wrap(title, pieces, indent, width)
        for note in strip.notes:
            yield f"{'':{indent}}note: {note}"
    for origin, names in _all_assumptions(strips).items():
        yield f"* assumed: {', '.join(names)} ({origin})"


def _arrows(words: Sequence[str]) -> list[str]:
    return [*(f"{word} ->" for word in words[:-1]), words[-1]]


def _format_title(strip: FlowStrip) -> str:
    return f"{strip.title} (+{len(strip.alike)} alike)" if strip.alike else strip.title


def _all_assumptions(strips: Sequence[FlowStrip]) -> dict[str, list[str]]:
    stages: dict[str, dict[str, None]] = {}
    for strip in strips:
        for origin, names in strip.assumptions.items():
            stages.setdefault(origin, {}).update(dict.fromkeys(names))
    return {origin: list(names) for origin, names in stages.items()}


def _words(stages: Sequence[FlowStage]) -> list[str]:
    """Return a word per stage; an activation follows its layer without an arrow."""
    titles: list[str] = []
    for stage in stages:
        mark = "*" if stage.assumed else ""
        if stage.kind == "activation" and titles:
            titles[-1] += f" {stage.name}{mark}"
        elif stage.kind in ("input", "join", "layer") and "norm" not in stage.name:
            titles.append(f"{stage.name} {format_shape(stage.shape)}")
        elif stage.kind == "output":
            titles.append(
                f"{stage.name} {format_shape(stage.shape)}" + f" in {stage.detail}" * bool(stage.detail)
            )
        else:
            titles.append(" ".join(filter(None, (f"{stage.name}{mark}", stage.detail))))
    return titles


def format_shape(shape: Shape | None) -> str:
    """Return a shape without the batch, e.g. `[3]` or `[4, 84, 84]`; empty if unknown."""
    return "" if shape is None else str(list(shape))


def _wrap(title: str, pieces: Sequence[str], indent: int, width: int) -> Iterator[str]:
    line = f"{title:<{indent - 1}}"
    for piece in pieces:
        if len(line) + 1 + len(piece) > max(width, indent + 20) and line.strip() != title:
            yield line
            line = " " * (indent - 1)
        line += f" {piece}"
    yield line
