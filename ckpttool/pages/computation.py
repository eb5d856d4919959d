"""The drawing of a computation: boxes and the edges between them; dagre places them in the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ckpttool.core import kinds
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, is_system_error
from ckpttool.core.text import clean, describe_record, format_count, shorten
from ckpttool.graphs.graph import Graph, OpaqueError, Value, read_graph
from ckpttool.graphs.operators import list_operators
from ckpttool.graphs.shapes import TracedCall, trace_graph
from ckpttool.libraries.recognize import is_script
from ckpttool.libraries.schema import RecognizedAgent
from ckpttool.listing.contents import may_describe_layers
from ckpttool.listing.layers import walk_layers
from ckpttool.listing.strips import FlowStage, FlowStrip, format_shape

if TYPE_CHECKING:
    from ckpttool.listing.layers import Architecture

# With more boxes a drawing is slow and no longer readable: operations of one module share a box.
MOST_BOXES = 300
# The longest line in a box, and the longest text and list of its panel.
_LINE, _TEXT, _LISTED = 30, 300, 12
_TITLE = 22  # of a line below the title of a network, whose panel lists what is alike
# Activations by their operator, for the color of their boxes.
_ACTIVATIONS = frozenset(kind.onnx for kind in kinds.ACTIVATION_KINDS.values() if kind.onnx) - {"Identity"}


class DrawnBox(NamedTuple):
    """One box: its kind (color), its lines, the boxes that it receives, and what its panel lists."""

    kind: str
    lines: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    assumed: bool = False

    def document(self) -> dict[str, Any]:
        """Return the JSON object of the page."""
        lines = [shorten(clean(line), _LINE) for line in self.lines if line]
        facts = [[name, shorten(clean(text), _TEXT)] for name, text in self.facts if text]
        flag = {"assumed": True} if self.assumed else {}
        return {"kind": self.kind, "lines": lines, "inputs": list(self.inputs), "facts": facts, **flag}


@dataclass(frozen=True, slots=True)
class Computation:
    """What a checkpoint computes, as boxes after those that they receive; `notes` are sentences below."""

    __repr__ = describe_record

    boxes: tuple[DrawnBox, ...]
    notes: tuple[str, ...] = ()

    @property
    def edges(self) -> int:
        """Number of edges; the one from the title of a network is not drawn."""
        return sum(self.boxes[number].kind != "title" for box in self.boxes for number in box.inputs)

    def lines(self) -> list[str]:
        """Return the boxes as text: a line per chain, which begins with what it receives."""
        words = [" ".join(filter(None, map(clean, box.lines))) for box in self.boxes]
        chains: list[list[str]] = []
        for at, box in enumerate(self.boxes):
            if at and box.inputs == (at - 1,):
                chains[-1].append(words[at])
            else:
                sources = ", ".join(words[number] for number in box.inputs)
                chains.append([*([f"({sources})"] if sources else []), words[at]])
        return [" -> ".join(chain) for chain in chains]

    def document(self) -> dict[str, Any]:
        """Return the JSON object of the page."""
        return {"boxes": [box.document() for box in self.boxes]}


def find_computation(
    checkpoint: Checkpoint, binding: RecognizedAgent | None, sha256: str | None
) -> Computation | None:
    """Return the networks of an agent, the operations of a recorded graph, or the described layers.

    None if no file records what is computed. `sha256` is the checkpoint's digest, computed if needed.
    """
    from ckpttool.listing.dataflow import find_strips

    if binding is None and (traced := _trace(checkpoint)) is not None:
        return traced
    strips: Sequence[FlowStrip] = ()
    if binding is None and may_describe_layers(checkpoint):
        from ckpttool.listing.architecture import describe_architecture
        from ckpttool.listing.layers import architecture_strips

        strips = architecture_strips(describe_architecture(checkpoint))
    strips = strips or find_strips(checkpoint, binding, sha256)
    return draw_strips(strips) if strips else None


def draw_strips(strips: Sequence[FlowStrip]) -> Computation:
    """Return the boxes of strips, each below its title; of many and of deep ones, the first and the last."""
    drawn = strips[: MOST_BOXES // 6]
    most = max(4, MOST_BOXES // len(drawn) - 1)
    boxes: list[DrawnBox] = []
    notes = [f"{format_count(len(strips) - len(drawn), 'more network')} not drawn"] * (
        len(drawn) < len(strips)
    )
    for strip in drawn:
        title = len(boxes)
        size = format_count(strip.parameters, "parameter") if strip.parameters else ""
        alike = f"alike: {', '.join(strip.alike)}" if strip.alike else ""
        if len(alike) > _TITLE:
            alike = f"alike: {len(strip.alike)} more"
        facts = (("alike", ", ".join(strip.alike)), *(("note", note) for note in strip.notes))
        boxes.append(DrawnBox("title", (strip.title, size, alike), (), (("network", strip.title), *facts)))
        ends = [_add_chain(boxes, stream, (title,), most) for stream in strip.streams]
        _add_chain(boxes, strip.stages, tuple(ends) or (title,), most)
        notes += [f"{clean(strip.title)}: {clean(note)}" for note in strip.notes]
    for origin in dict.fromkeys(origin for strip in drawn for origin in strip.assumptions):
        names = (name for strip in drawn for name in strip.assumptions.get(origin, ()))
        notes.append(f"dashed: assumed {', '.join(map(clean, dict.fromkeys(names)))} ({clean(origin)})")
    return Computation(tuple(boxes), tuple(notes))


def _add_chain(boxes: list[DrawnBox], stages: Sequence[FlowStage], before: tuple[int, ...], most: int) -> int:
    """Add stages that each receive the one before; return the position of the last."""
    left = len(stages) - most
    if left > 0:
        rest = FlowStage("map", f"{left:,} more", (), note="not drawn")
        stages = [*stages[: most // 2], rest, *stages[len(stages) - most // 2 :]]
    for stage in stages:
        boxes.append(_draw_stage(stage, before))
        before = (len(boxes) - 1,)
    return before[0]


def _draw_stage(stage: FlowStage, inputs: tuple[int, ...]) -> DrawnBox:
    shape = format_shape(stage.shape)
    size = f"{stage.parameters:,} params" if stage.parameters else ""
    plain = stage.kind in ("activation", "map", "normalizer", "unknown")
    facts = (
        ("output", shape),
        ("parameters", f"{stage.parameters:,}" if stage.parameters else ""),
        ("details", stage.detail),
        ("note", stage.note),
        ("assumed", stage.assumed),
    )
    lines = (stage.name, "" if plain else shape, size, stage.detail if stage.kind != "activation" else "")
    return DrawnBox(stage.kind, lines, inputs, (("stage", stage.name), *facts), bool(stage.assumed))


def _trace(checkpoint: Checkpoint) -> Computation | None:
    """Return the operations that a file records; None if it records none, or one that cannot be listed."""
    try:
        graph = _read_shaped_graph(checkpoint)
        traced = None if graph is None else trace_graph(graph, {}, open_inputs=True)
    except CkpttoolError as error:
        # The drawing of modules does not depend on it; commands that run the model report the error.
        if is_system_error(error):
            raise
        return None
    except (OpaqueError, RecursionError):
        return None
    if graph is None or traced is None or not traced.calls:
        return None
    boxes = [_draw_input(value, number) for number, value in enumerate(graph.inputs)]
    runs = _fold_calls(traced.calls, MOST_BOXES - len(boxes))
    owners = {at: number for number, run in enumerate(runs, len(boxes)) for at in run}
    # An input of the graph has the position -1, the next one -2.
    owners.update({-1 - number: number for number in range(len(boxes))})
    drawer = _CallDrawer(checkpoint, Counter(call.scope for call in traced.calls))
    for number, run in enumerate(runs, len(boxes)):
        calls = [traced.calls[at] for at in run]
        sources = dict.fromkeys(owners[at] for call in calls for at in call.inputs if owners[at] != number)
        boxes.append(drawer.draw(calls, tuple(sources)))
    notes = []
    if len(runs) < len(traced.calls):
        notes.append(
            f"{len(traced.calls):,} operations in {len(runs):,} boxes: those of one module share a box"
        )
    if traced.assumed:
        notes.append("extents that are not fixed are shown as 1")
    return Computation(tuple(boxes), tuple(notes))


def _read_shaped_graph(checkpoint: Checkpoint) -> Graph | None:
    """Return the graph; that of a traced script for the shapes with which it was traced."""
    if is_script(checkpoint.tree):
        from ckpttool.graphs.torchscript import read_for_shapes
        from ckpttool.graphs.torchscript_code import traced_inputs

        shapes = [leaf.shape for leaf in traced_inputs(checkpoint)]
        if shapes and (graph := read_for_shapes(checkpoint, [shapes])) is not None:
            return graph
    return read_graph(checkpoint)


def _draw_input(value: Value, number: int) -> DrawnBox:
    shape = "" if value.shape is None else f"[{', '.join(str(extent or '?') for extent in value.shape)}]"
    facts = (("input", value.name), ("type", value.dtype or ""), ("shape", shape))
    return DrawnBox("input", (value.name or f"input {number}", shape), (), facts)


def _fold_calls(calls: Sequence[TracedCall], most: int) -> list[list[int]]:
    """Return the operations of each box: neighbors in one module, at the deepest level that fits."""
    deepest = max(len(call.scope) for call in calls)
    for depth in range(deepest + 1, 0, -1):
        runs = [list(run) for _, run in groupby(range(len(calls)), lambda at: _module_at(calls, at, depth))]  # noqa: B023
        if len(runs) <= most:
            return runs
    size = -(-len(calls) // max(1, most))
    return [list(range(at, min(at + size, len(calls)))) for at in range(0, len(calls), size)]


def _module_at(calls: Sequence[TracedCall], at: int, depth: int) -> object:
    scope = calls[at].scope
    return scope[:depth] if len(scope) >= depth else at


class _CallDrawer:
    """Draws operations with the sizes of their weights, and the classes of their layers where known.

    `scopes` counts the operations of each module.
    """

    def __init__(self, checkpoint: Checkpoint, scopes: Mapping[tuple[str, ...], int]) -> None:
        tree = checkpoint.tree
        self.sizes = {path: leaf.size for path, leaf in tree.tensors() if leaf.role == "parameter"}
        self.names, self.scopes = tree.names, scopes
        # Operations of ONNX and TensorFlow have no classes of layers.
        models: Sequence[Architecture] = ()
        if checkpoint.format not in ("onnx", "saved_model", "tensor_bundle", "tensorflow_v1"):
            from ckpttool.listing.architecture import describe_architecture

            models = describe_architecture(checkpoint)
        self.layers = {layer.path: layer for model in models for layer in walk_layers(model.root)}

    def draw(self, calls: Sequence[TracedCall], inputs: tuple[int, ...]) -> DrawnBox:
        """Return the box of one operation, or of several."""
        last = calls[-1]
        module = "/".join(last.scope)
        weights = [path for call in calls for path in call.weights]
        parameters = sum(self.sizes.get(path, 0) for path in weights)
        macs = [call.macs for call in calls]
        layer = self.layers.get(module) if len(calls) == 1 and self.scopes[last.scope] == 1 else None
        size = f"{parameters:,} params" if parameters else ""
        shape = format_shape(last.output)
        facts = (
            ("class", "" if layer is None else layer.cls),
            ("settings", "" if layer is None else layer.detail),
            ("operations" if len(calls) > 1 else "operation", _list_names([call.kind for call in calls])),
            ("name", last.name if len(calls) == 1 else ""),
            ("module", module),
            ("output", shape or "unknown"),
            ("parameters", f"{parameters:,}" if parameters else ""),
            ("MACs", "" if None in macs or not any(macs) else f"{sum(mac or 0 for mac in macs):,}"),
            ("weights", _list_names([self.names.get(path, "") for path in weights])),
        )
        if len(calls) > 1:
            title = last.scope[-1] if last.scope else f"{calls[0].kind} ... {last.kind}"
            return DrawnBox(
                "layer", (title, format_count(len(calls), "operation"), shape, size), inputs, facts
            )
        kind = "activation" if last.kind in _ACTIVATIONS else "layer" if parameters else "map"
        kind = kind if last.kind in list_operators() else "unknown"
        if last.kind == "Identity" and not last.scope:
            return DrawnBox("output", ("output", shape), inputs, facts)
        if layer is None:
            return DrawnBox(kind, (last.kind, shape, size), inputs, facts)
        return DrawnBox(kind, (layer.title, layer.name, shape, size), inputs, facts)


def _list_names(names: Sequence[str]) -> str:
    """Return the names, each with the number of its repetitions; of many, the first."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    texts = [f"{name} (x{count})" if count > 1 else name for name, count in runs]
    return ", ".join(
        [*texts[:_LISTED], *([f"and {len(texts) - _LISTED:,} more"] if len(texts) > _LISTED else [])]
    )
