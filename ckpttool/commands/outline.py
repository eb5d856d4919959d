"""Outline of a listing and of a model's layers: groups of alike siblings, fitting depth, counters, shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ckpttool.commands.dataflow import FlowStage, FlowStrip, StageKind
from ckpttool.commands.modules import (
    ModuleSummary,
    Sort,
    describe_module_kind,
    module_activation,
    module_entries,
    skip_wrapping_modules,
)
from ckpttool.commands.rows import TensorRow, ValueRow
from ckpttool.commands.training_counters import read_number
from ckpttool.core import deferred, filesystem
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.kinds import ACTIVATION_CLASSES
from ckpttool.core.tree import Leaf, json_value
from ckpttool.formats.detect import find_other_shards

# A shape; None is an extent of any length.
Extents = tuple[int | None, ...]
# Fewer alike siblings than this are listed one by one.
_FEWEST_ALIKE = 3
# Modules with more than _MANY plain values show only the first ones.
_MANY_VALUES, _FIRST_VALUES = 100, 20
# Scalars that one listing reads to show their values.
MOST_SCALARS = 64
_SCALAR_ROLES = ("counter", "other")
_DIGITS = deferred.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class SiblingGroup:
    """Consecutive siblings that differ only in the numbers of their names; `first` stands for all.

    They have equal subtrees: names, classes, types, shapes and roles of tensors, and plain values.
    """

    first: ModuleSummary | TensorRow | ValueRow
    entries: tuple[ModuleSummary | TensorRow | ValueRow, ...]

    @property
    def count(self) -> int:
        """The number of siblings."""
        return len(self.entries)


@dataclass(frozen=True, slots=True)
class OmittedValues:
    """Values of a module that are counted, not listed."""

    values: int


OutlineEntry = ModuleSummary | TensorRow | ValueRow | SiblingGroup | OmittedValues


class ListingOutline:
    """The visible entries of a listing's modules in one order.

    `whole` lists every entry by itself: no groups of alike siblings, no omitted values.
    """

    def __init__(self, modules: Sequence[ModuleSummary], sort: Sort = "file", *, whole: bool = False) -> None:
        self.root = modules[0] if modules else None
        self.sort: Sort = sort
        self.whole = whole
        self._shapes = {} if whole else _structures(modules)

    def entries(self, module: ModuleSummary) -> list[tuple[str, OutlineEntry]]:
        """Return the rows of a module by name."""
        found = module_entries(module, self.sort)
        if self.whole:
            return list(found)
        return _omit_values(self._group(found))

    def children(self, entry: OutlineEntry) -> list[tuple[str, OutlineEntry]]:
        """Return the rows below an entry; for a group, those of its first member."""
        if isinstance(entry, SiblingGroup):
            entry = entry.first
        if not isinstance(entry, ModuleSummary):
            return []
        return self.entries(skip_wrapping_modules("", entry)[1])

    def level_counts(self, most: int) -> Iterator[int]:
        """Yield the number of rows of each level; end after the level that brings the sum above `most`."""
        level = self.entries(self.root) if self.root is not None else []
        total = 0
        while level:
            yield len(level)
            total += len(level)
            if total > most:
                return
            level = [row for _, entry in level for row in self.children(entry)]

    def fitting_depth(self, rows: int) -> int | None:
        """Return the deepest level with which everything fits into the rows, at least 1; None if all does."""
        total = 0
        for depth, count in enumerate(self.level_counts(rows)):
            total += count
            if total > rows:
                return max(depth, 1)
        return None

    def _group(
        self, entries: list[tuple[str, TensorRow | ValueRow | ModuleSummary]]
    ) -> list[tuple[str, OutlineEntry]]:
        """Return the entries with each run of alike siblings as one."""
        found: list[tuple[str, OutlineEntry]] = []
        start = 0
        while start < len(entries):
            name, first = entries[start]
            end = start + 1
            if _DIGITS.search(name):
                stem, structure = _DIGITS.sub("#", name), self._structure(first)
                while end < len(entries) and self._is_alike(entries[end], stem, structure):
                    end += 1
            if end - start < _FEWEST_ALIKE:
                found += entries[start:end]
            else:
                group = SiblingGroup(first, tuple(entry for _, entry in entries[start:end]))
                found.append((f"{name}...{entries[end - 1][0]}", group))
            start = end
        return found

    def _is_alike(
        self, named: tuple[str, TensorRow | ValueRow | ModuleSummary], stem: str, structure: object
    ) -> bool:
        name, entry = named
        return _DIGITS.sub("#", name) == stem and self._structure(entry) == structure

    def _structure(self, entry: TensorRow | ValueRow | ModuleSummary) -> object:
        return self._shapes[entry] if isinstance(entry, ModuleSummary) else _row_structure(entry)


def _structures(modules: Sequence[ModuleSummary]) -> dict[ModuleSummary, int]:
    """Return a number for each module; equal numbers for equal subtrees."""
    found: dict[ModuleSummary, int] = {}
    numbers: dict[object, int] = {}
    # Children come after their parents.
    for module in reversed(modules):
        rows = tuple((name, _row_structure(row)) for name, row in module.rows)
        below = tuple((name, found[each]) for name, each in module.below.items())
        shape = ("module", _DIGITS.sub("#", describe_module_kind(module)), module.built, rows, below)
        found[module] = numbers.setdefault(shape, len(numbers))
    return found


def _row_structure(row: TensorRow | ValueRow) -> object:
    leaf = row.leaf
    if isinstance(leaf, Leaf):
        return leaf.dtype, leaf.shape, leaf.role, leaf.slot, leaf.trainable
    shown = json_value(leaf)
    return "value", shown["type"], repr(shown["value"])


def _omit_values(entries: list[tuple[str, OutlineEntry]]) -> list[tuple[str, OutlineEntry]]:
    """Return the entries; of very many plain values, the first ones and the number left out."""
    values = sum(isinstance(entry, ValueRow) for _, entry in entries)
    if values <= _MANY_VALUES:
        return entries
    kept: list[tuple[str, OutlineEntry]] = []
    listed = 0
    for name, entry in entries:
        listed += isinstance(entry, ValueRow)
        if listed <= _FIRST_VALUES or not isinstance(entry, ValueRow):
            kept.append((name, entry))
    return [*kept, ("", OmittedValues(values - _FIRST_VALUES))]


def describe_group(group: SiblingGroup) -> str:
    """Return what the members of a group have in common: class, or type and shape."""
    first = group.first
    if isinstance(first, TensorRow):
        return f"{first.leaf.dtype}{list(first.leaf.shape)}"
    if isinstance(first, ValueRow):
        return f"= {json_value(first.leaf)['value']}"
    kinds = {describe_module_kind(each) for each in group.entries if isinstance(each, ModuleSummary)}
    if len(kinds) == 1:
        return kinds.pop()
    # Their names differ, their class does not.
    return " ".join(word for word in (first.kind or "", module_activation(first.facts)) if word)


# Values of counters and other scalars, and shards that are missing.


class ScalarReader:
    """Reads a few scalars of one checkpoint, so that a listing shows their values; none of a remote one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._left = 0 if filesystem.find_store(checkpoint.path) is not None else MOST_SCALARS

    def read(self, leaf: Leaf) -> str:
        """Return the value as text; empty for another tensor, and for a damaged value."""
        if leaf.role not in _SCALAR_ROLES or leaf.shape not in ((), (1,)) or not self._left:
            return ""
        self._left -= 1
        # A damaged value gives None: a listing needs no value, and commands that do report the error. A call
        # that the system refuses is an error here as well.
        number = read_number(leaf)
        if number is None:
            return ""
        return f"{number:.7g}" if leaf.dtype == "float32" else f"{number}"


def missing_shards(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of the checkpoint's missing files, as far as names and index list them."""
    found: dict[str, None] = {}
    for _, leaf in checkpoint.tree.tensors():
        if (path := getattr(leaf.source, "missing_path", None)) is not None:
            found.setdefault(os.path.basename(path))
    others = find_other_shards(checkpoint)
    return (*found, *(others[2] if others is not None else ()))


# Layers of models, as records, in one line of text and as strips of a picture.

# How the parts of a layer relate: applied in order, as a recorded graph, or by code outside the file.
Flow = Literal["chain", "graph", "parts"]

INPUT = "InputLayer"
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


class LayerGroup(NamedTuple):
    """Consecutive layers that differ only in the numbers of their names; `first` stands for all."""

    first: ArchitectureLayer
    number: int
    last: ArchitectureLayer


def walk_layers(layer: ArchitectureLayer) -> Iterator[ArchitectureLayer]:
    """Yield a layer and its parts at any depth."""
    yield layer
    for each in layer.below:
        yield from walk_layers(each)


def fold_alike(layers: Sequence[ArchitectureLayer]) -> list[ArchitectureLayer | LayerGroup]:
    """Return the layers with each run of at least three alike ones as a group."""
    found: list[ArchitectureLayer | LayerGroup] = []
    start = 0
    while start < len(layers):
        end = start + 1
        form = _form(layers[start])
        while end < len(layers) and _form(layers[end]) == form:
            end += 1
        if end - start < _FEWEST_ALIKE or not _DIGITS.search(layers[start].name):
            found += layers[start:end]
        else:
            found.append(LayerGroup(layers[start], end - start, layers[end - 1]))
        start = end
    return found


def _form(layer: ArchitectureLayer) -> object:
    """Return a layer without the numbers in its names; equal for layers that are listed together."""
    below = tuple(map(_form, layer.below))
    inputs = tuple(_DIGITS.sub("#", each) for each in layer.inputs)
    name = _DIGITS.sub("#", layer.name)
    own = (layer.cls, layer.detail, layer.activation, layer.parameters, layer.output, layer.macs, layer.flow)
    return name, own, inputs, below


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
        parts = [f"{_group_name(each)}: {_outline_entry(each)}" for each in fold_alike(root.below)]
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


# The picture: one strip per chain of layers.


def architecture_strips(found: Sequence[Architecture]) -> tuple[FlowStrip, ...]:
    """Return the models as strips; layers in unrecorded order have a strip each."""
    return tuple(strip for each in found for strip in _strips(each.root, _first_input(each), each.notes))


def _first_input(found: Architecture) -> Extents | None:
    return found.inputs[0][1] if len(found.inputs) == 1 else None


def _strips(root: ArchitectureLayer, given: Extents | None, notes: Sequence[str] = ()) -> Iterator[FlowStrip]:
    stages = [] if given is None else [_stage("input", "input", given)]
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
    known = None if shape is None or None in shape else tuple(extent or 0 for extent in shape)
    text = "" if shape is None or known is not None else format_extents(shape)
    return FlowStage(kind, name, known, parameters, ", ".join(filter(None, (detail, text))))
