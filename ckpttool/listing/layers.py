"""Layers of models, as records, in one line of text and as strips of a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.kinds import ACTIVATION_CLASSES
from ckpttool.listing.outline import DIGITS, FEWEST_ALIKE
from ckpttool.listing.strips import FlowStage, FlowStrip, StageKind

# A shape; None is an extent of any length.
Extents = tuple[int | None, ...]

# How the parts of a layer relate: applied in order, as a recorded graph, or by code outside the file.
Flow = Literal["chain", "graph", "parts"]

INPUT = "InputLayer"
# A model with more layers is not described, and layers nested more deeply are not.
MOST_LAYERS, DEEPEST = 20_000, 64
LISTS = frozenset(("ModuleList", "ModuleDict", "ParameterList", "ParameterDict"))


@dataclass(frozen=True, slots=True)
class ArchitectureLayer:
    """One layer; `output` and `macs` are None if unknown, `macs` and `parameters` include the parts.

    `known` means that the class is one of the framework itself. `inputs` are the paths of the layers whose
    outputs it receives, if these are not only that of the layer before it.
    """

    path: str
    kind: str
    cls: str
    known: bool = True
    detail: str = ""
    activation: str = ""
    parameters: int = 0
    output: Extents | None = None
    macs: int | None = None
    inputs: tuple[str, ...] = ()
    flow: Flow = "chain"
    below: tuple[ArchitectureLayer, ...] = ()

    @property
    def name(self) -> str:
        """The last step of the path."""
        return self.path.rpartition("/")[2]

    @property
    def title(self) -> str:
        """The class with its activation, marked if its code is not in the file."""
        return f"{self.kind} {self.activation}".rstrip() if self.known else f"{self.kind} (unknown class)"

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "kind": self.kind,
            "class": self.cls,
            "known": self.known,
            "detail": self.detail or None,
            "activation": self.activation or None,
            "parameters": self.parameters,
            "output": None if self.output is None else list(self.output),
            "macs": self.macs,
            "inputs": list(self.inputs),
            "flow": self.flow if self.below else None,
            "layers": [layer.document() for layer in self.below],
        }


@dataclass(frozen=True, slots=True)
class Architecture:
    """The layers of one model, and what describes them in the file (`source`).

    `inputs` are shapes by name. Shapes omit the batch axis unless `batch`; operations are counted for one
    sample, or for the whole input if the shapes include the batch.
    """

    source: str
    root: ArchitectureLayer
    inputs: tuple[tuple[str, Extents], ...] = ()
    batch: bool = False
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "source": self.source,
            "inputs": [{"name": name, "shape": list(shape)} for name, shape in self.inputs],
            "batch": self.batch,
            "parameters": self.root.parameters,
            "macs": self.root.macs,
            "model": self.root.document(),
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }


class LayerResult(NamedTuple):
    """The outputs of a layer, and its operations for one sample; None if an extent is unknown."""

    outputs: tuple[Extents, ...]
    macs: int | None = 0


def sum_macs(counts: Iterable[int | None]) -> int | None:
    """Return the operations of several layers, None if those of one are unknown."""
    numbers = list(counts)
    return None if None in numbers else sum(count or 0 for count in numbers)


class LayerGroup(NamedTuple):
    """Consecutive layers that differ only in the numbers of their names; `first` stands for all."""

    first: ArchitectureLayer
    number: int
    last: ArchitectureLayer


def walk_layers(layer: ArchitectureLayer) -> Iterator[ArchitectureLayer]:
    """Yield a layer and its parts at any depth."""
    yield layer
    for part in layer.below:
        yield from walk_layers(part)


def fold_alike(layers: Sequence[ArchitectureLayer]) -> list[ArchitectureLayer | LayerGroup]:
    """Return the layers with each run of at least three alike ones as a group."""
    folded: list[ArchitectureLayer | LayerGroup] = []
    start = 0
    while start < len(layers):
        end = start + 1
        form = _form(layers[start])
        while end < len(layers) and _form(layers[end]) == form:
            end += 1
        if end - start < FEWEST_ALIKE or not DIGITS.search(layers[start].name):
            folded += layers[start:end]
        else:
            folded.append(LayerGroup(layers[start], end - start, layers[end - 1]))
        start = end
    return folded


def _form(layer: ArchitectureLayer) -> object:
    """Return a layer without the numbers in its names; equal for layers that are listed together."""
    below = tuple(map(_form, layer.below))
    inputs = tuple(DIGITS.sub("#", name_of_input) for name_of_input in layer.inputs)
    name = DIGITS.sub("#", layer.name)
    form = (layer.cls, layer.detail, layer.activation, layer.parameters, layer.output, layer.macs, layer.flow)
    return name, form, inputs, below


def outline_layers(root: ArchitectureLayer) -> str:
    """Return the classes of a model's layers in one line: `Conv2d -> ReLU -> Block (x12)`.

    Layers that the file does not order are in braces, each after its name; a graph is one line of arrows
    per chain.
    """
    if not root.below or (root.flow == "parts" and root.known and root.kind not in LISTS):
        return root.title
    if root.flow == "parts" and root.kind in LISTS:
        return f"[{', '.join(map(_outline_entry, fold_alike(root.below)))}]"
    if root.flow == "parts":
        parts = [f"{_group_name(layer)}: {_outline_entry(layer)}" for layer in fold_alike(root.below)]
        return f"{{{'; '.join(parts)}}}"
    return "; ".join(" -> ".join(map(_outline_entry, fold_alike(run))) for run in _runs(root))


def _outline_entry(entry: ArchitectureLayer | LayerGroup) -> str:
    layer = entry.first if isinstance(entry, LayerGroup) else entry
    unknown = layer.flow == "parts" and not layer.known
    text = layer.title if unknown else outline_layers(layer)
    if not isinstance(entry, LayerGroup):
        return text
    return f"({text}) (x{entry.number})" if "->" in text else f"{text} (x{entry.number})"


def _group_name(entry: ArchitectureLayer | LayerGroup) -> str:
    return f"{entry.first.name}...{entry.last.name}" if isinstance(entry, LayerGroup) else entry.name


def format_extents(shape: Extents) -> str:
    """Return a shape as text; an unknown extent is a question mark."""
    return "[" + ", ".join("?" if extent is None else str(extent) for extent in shape) + "]"


def architecture_strips(architectures: Sequence[Architecture]) -> tuple[FlowStrip, ...]:
    """Return the models as strips; layers in unrecorded order have a strip each."""
    return tuple(
        strip for model in architectures for strip in _strips(model.root, _first_input(model), model.notes)
    )


def _first_input(model: Architecture) -> Extents | None:
    return model.inputs[0][1] if len(model.inputs) == 1 else None


def _strips(root: ArchitectureLayer, shape: Extents | None, notes: Sequence[str] = ()) -> Iterator[FlowStrip]:
    stages = [] if shape is None else [_stage("input", "input", shape)]
    title = root.path or root.title
    if root.flow != "parts" or not root.below:
        for run in _runs(root):
            first, joined = run[0], ", ".join(run[0].inputs)
            name = title if first is (root.below or (root,))[0] else f"{title}: {first.name} <- {joined}"
            own = tuple(stage for layer in run for stage in _stages(layer))
            yield FlowStrip(name, (*stages, *own), notes=tuple(notes))
            stages, notes = [], ()
        return
    note = f"the code of {root.kind} is not in the file: the order of its parts is unknown"
    for number, entry in enumerate(fold_alike(root.below)):
        layer = entry.first if isinstance(entry, LayerGroup) else entry
        for strip in _strips(layer, None, (note, *notes) if not number else ()):
            alike = (f"{entry.number - 1} more",) if isinstance(entry, LayerGroup) else ()
            yield replace(strip, alike=alike)


def _runs(root: ArchitectureLayer) -> list[list[ArchitectureLayer]]:
    """Return the layers as runs in which each receives only the output of the one before it."""
    runs: list[list[ArchitectureLayer]] = []
    for layer in root.below or (root,):
        if layer.kind == INPUT:
            continue
        if not runs or layer.inputs:
            runs.append([])
        runs[-1].append(layer)
    return runs


def _stages(layer: ArchitectureLayer) -> Iterator[FlowStage]:
    if layer.known and layer.flow == "chain" and layer.below:
        for entry in fold_alike(layer.below):
            if isinstance(entry, LayerGroup):
                first = replace(entry.first, kind=f"{entry.first.kind} x{entry.number}", below=())
                size = entry.first.parameters * entry.number
                yield from _stages(replace(first, parameters=size, output=entry.last.output))
            else:
                yield from _stages(entry)
        return
    kind: StageKind = "layer" if layer.parameters else "map"
    if not layer.known:
        kind = "unknown"
    elif layer.kind in ACTIVATION_CLASSES or layer.kind == "Activation":
        kind = "activation"
    yield _stage(kind, layer.title, layer.output, layer.parameters, layer.detail)


def _stage(
    kind: StageKind, name: str, shape: Extents | None, parameters: int = 0, detail: str = ""
) -> FlowStage:
    extents = None if shape is None or None in shape else tuple(extent or 0 for extent in shape)
    text = "" if shape is None or extents is not None else format_extents(shape)
    return FlowStage(kind, name, extents, parameters, ", ".join(filter(None, (detail, text))))
