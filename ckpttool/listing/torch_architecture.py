"""Layers of pickled torch modules: classes and settings are recorded, the code of `forward` is not.

torch's own classes are those of torch/nn/modules (torch 2.x); a Sequential applies its parts in the order of
`_modules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import UsageError
from ckpttool.core.kinds import SETTINGS
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display, index
from ckpttool.graphs.graph import ShapeMismatchError, UnknownShapeError
from ckpttool.libraries.recognize import PICKLED_MODULES, TORCH_CLASSES
from ckpttool.listing.input_shapes import is_possible, require_shapes_used
from ckpttool.listing.layer_settings import fold_axes, format_axes, list_settings
from ckpttool.listing.layers import (
    DEEPEST,
    LISTS,
    MOST_LAYERS,
    Architecture,
    ArchitectureLayer,
    Extents,
    Flow,
    LayerResult,
    format_extents,
    sum_macs,
)

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.graphs.torch_modules import TorchLayerShapes


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def describe_modules(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    """Return the models of the file with their layers; `shapes` are input shapes by layer path."""
    tree = checkpoint.tree
    reader = _TorchReader(tree, shapes)
    if not reader.modules or len(reader.modules) > MOST_LAYERS:
        return ()
    models = []
    for root in reader.roots():
        layer = reader.model(root)
        inputs, assumed, notes = tuple(reader.input_shapes), tuple(reader.assumed), tuple(reader.notes)
        models.append(Architecture("pickled module", layer, inputs, assumed=assumed, notes=notes))
    require_shapes_used(shapes, reader.used, map(reader.name, reader.modules))
    return tuple(models)


class _TorchModule(NamedTuple):
    """A module of the file, with its settings."""

    tree: Tree
    path: Path
    cls: str

    def value(self, name: str, default: Any = None) -> Any:
        """Return a plain setting; a tuple of them for a tuple or list."""
        path = (*self.path, attr(name))
        leaf = self.tree.get(path)
        if isinstance(leaf, ValueLeaf):
            return leaf.value
        if path not in self.tree.containers:
            return default
        items: list[Any] = []
        while isinstance(item := self.tree.get((*path, index(len(items)))), ValueLeaf):
            items.append(item.value)
        return tuple(items)


@dataclass
class _TorchReader:
    """Reads the modules of one file; `shapes` are input shapes by module name."""

    tree: Tree
    shapes: Mapping[str, Extents]
    modules: dict[Path, str] = field(init=False)
    children: dict[Path, list[Path]] = field(default_factory=dict)
    opaque: set[Path] = field(default_factory=set)
    hooked: set[Path] = field(default_factory=set)
    parameters: dict[Path, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    input_shapes: list[tuple[str, Extents]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assuming: bool = True
    contradicted: bool = False
    layer_shapes: TorchLayerShapes | None = None

    def __post_init__(self) -> None:
        """Find the modules: records with torch's dicts of parameters and modules."""
        containers = self.tree.containers
        self.modules = {
            path: container.name
            for path, container in containers.items()
            if container.kind == "record" and container.name and (*path, PICKLED_MODULES) in containers
        }
        for path in self.modules:
            if self._is_part(path):
                self.children.setdefault(path[:-2], []).append(path)
        for path, leaf in self.tree.items():
            self._add_leaf(path, leaf)
        for path in containers:
            self._add_hooks(path)

    def _is_part(self, path: Path) -> bool:
        return len(path) > 1 and path[-2] == PICKLED_MODULES and path[:-2] in self.modules

    def _add_leaf(self, path: Path, leaf: Leaf | ValueLeaf) -> None:
        self._add_hooks(path)
        if isinstance(leaf, ValueLeaf):
            # A part that is not a separate module: the same object as another one, a scripted module.
            if leaf.value is not None and self._is_part(path):
                self.opaque.add(path[:-2])
        elif leaf.role == "parameter":
            for end in range(len(path)):
                if path[:end] in self.modules:
                    self.parameters[path[:end]] = self.parameters.get(path[:end], 0) + leaf.size

    def _add_hooks(self, path: Path) -> None:
        for end, step in enumerate(path[:-1]):
            if step.value in _HOOKS and path[:end] in self.modules:
                self.hooked.add(path[:end])

    def roots(self) -> list[Path]:
        """Return the modules that are not a part of another one."""
        return [path for path in self.modules if not self._is_part(path)]

    def name(self, path: Path) -> str:
        """Return a module's name: its path without the dicts of modules."""
        return display(tuple(step for step in path if step != PICKLED_MODULES))

    def model(self, root: Path) -> ArchitectureLayer:
        """Return a module with its parts; without shapes if the assumed input does not fit all of them."""
        for assuming in (True, False):
            self.assumed, self.input_shapes, self.notes = [], [], []
            self.assuming, self.contradicted = assuming, False
            layer, _ = self.layer(root, None)
            if not self.contradicted:
                break
        return layer

    def layer(self, path: Path, shape: Extents | None, depth: int = 0) -> tuple[ArchitectureLayer, Any]:
        """Return a module and the shape of its output with the batch, None if unknown."""
        cls, name = self.modules[path], self.name(path)
        if name in self.shapes:
            self._require_order(path)
            self.used.add(name)
            shape = (1, *self.shapes[name])
            self.input_shapes.append((name, shape[1:]))
        elif shape is None and not depth and self.assuming:
            shape = self._first_size(path)
        from_torch = cls.startswith(TORCH_CLASSES)
        kind = cls.rpartition(".")[2]
        module = _TorchModule(self.tree, path, kind if from_torch else "")
        result, below, flow = self._computed(module, shape, depth)
        if path in self.hooked:
            self.notes.append(f"{name or kind} has forward hooks, whose code is not in the file")
            result = None
        layer = ArchitectureLayer(
            path=name,
            kind=kind,
            cls=cls,
            known=from_torch,
            detail=_torch_detail(module) if from_torch else "",
            parameters=self.parameters.get(path, 0),
            output=None if result is None else result.outputs[0][1:],
            macs=None if result is None else result.macs,
            flow=flow,
            below=below,
        )
        return layer, None if result is None or kind in _TUPLES else result.outputs[0]

    def _require_order(self, path: Path) -> None:
        """Raise UsageError for the input shape of a list of modules, which is not a module that is called."""
        kind, parts = self.modules[path].rpartition(".")[2], self.children.get(path)
        if kind in LISTS and self.modules[path].startswith(TORCH_CLASSES):
            hint = f"name one of its layers: --input-shape {self.name(parts[0])}=..." if parts else None
            what = f"the order in which the layers of a {kind} are applied is not in the file"
            raise UsageError(what, path=self.name(path) or None, hint=hint)

    def _computed(
        self, module: _TorchModule, shape: Extents | None, depth: int
    ) -> tuple[LayerResult | None, tuple[ArchitectureLayer, ...], Flow]:
        """Return the output of a module, its parts, and how they relate."""
        parts = self.children.get(module.path, []) if depth < DEEPEST else []
        # A list has an input only where a torch class applies its parts in order (TransformerEncoder).
        applied = module.cls == "Sequential" or (module.cls == "ModuleList" and shape is not None)
        if applied and module.path not in self.opaque:
            return self._sequence(module, parts, shape, depth)
        inputs: Mapping[str, Extents] = {}
        result = None
        if shape is not None and module.cls:
            result, inputs = self._apply(module, shape)
        below = []
        for part in parts:
            shape_in = inputs.get(str(part[-1].value))
            below.append(self.layer(part, shape_in, depth + 1)[0])
        if result is not None and inputs:
            total = sum_macs(layer.macs for layer in below)
            result = None if total is None else result._replace(macs=total)
        return result, tuple(below), "parts"

    def _sequence(
        self, module: _TorchModule, parts: Sequence[Path], shape: Extents | None, depth: int
    ) -> tuple[LayerResult | None, tuple[ArchitectureLayer, ...], Flow]:
        below: list[ArchitectureLayer] = []
        value, total = shape, (0 if shape is not None else None)
        for part in parts:
            shape_in = None if self.modules[part].rpartition(".")[2] in LISTS else value
            layer, value = self.layer(part, shape_in, depth + 1)
            below.append(layer)
            total = None if total is None or layer.macs is None else total + layer.macs
        if value is None or total is None or len(parts) < len(self.children.get(module.path, ())):
            return None, tuple(below), "chain"
        return LayerResult((value,), total), tuple(below), "chain"

    def _apply(
        self, module: _TorchModule, shape: Extents
    ) -> tuple[LayerResult | None, Mapping[str, Extents]]:
        """Return a torch layer's output, and the inputs of its parts by name."""
        from ckpttool.graphs.torch_modules import TorchLayerShapes

        extents = tuple(extent for extent in shape if extent is not None)
        self.layer_shapes = self.layer_shapes or TorchLayerShapes(self.tree)
        try:
            if module.cls in _ENCODERS:
                return _encode(self, module, extents)
            output, macs = self.layer_shapes.infer(module.path, self.modules[module.path], extents)
        except ShapeMismatchError:
            self.misfit(module, shape)
            return None, {}
        except UnknownShapeError:
            return None, {}
        return LayerResult((output,), macs) if is_possible(output) else None, {}

    def misfit(self, module: _TorchModule, shape: Extents) -> None:
        """Raise UsageError if the shapes are the user's and do not fit; drop an assumed input otherwise."""
        name, what = self.name(module.path), f"{module.cls} {_torch_detail(module)}".strip()
        if self.shapes:
            sentence = f"{what} cannot be applied to {format_extents(shape[1:])}"
            raise UsageError(sentence, path=name or None, hint="check --input-shape")
        self.contradicted = True

    def _first_size(self, path: Path) -> Extents | None:
        """Return the input of a chain that begins with a dense layer: as many features as it has inputs."""
        here = path
        while self.modules[here] == f"{TORCH_CLASSES}container.Sequential" and self.children.get(here):
            here = self.children[here][0]
        if here == path or self.modules[here] != f"{TORCH_CLASSES}linear.Linear":
            return None
        size = _TorchModule(self.tree, here, "Linear").value("in_features")
        if type(size) is not int:
            return None
        self.assumed.append(f"input [{size}], the size of {self.name(here)}")
        self.input_shapes.append((self.name(path), (size,)))
        return (1, size)


_TUPLES = frozenset(("LSTM", "GRU", "RNN", "LSTMCell", "MultiheadAttention"))
_ENCODERS = frozenset(("TransformerEncoder", "TransformerEncoderLayer"))


def _encode(
    reader: _TorchReader, module: _TorchModule, shape: tuple[int, ...]
) -> tuple[LayerResult, Mapping[str, Extents]]:
    """Return the output of a transformer encoder, and the inputs of its parts."""
    if len(shape) != 3:
        raise UnknownShapeError
    if module.cls == "TransformerEncoder":
        return LayerResult((shape,)), {"layers": shape, "norm": shape}
    linear = next(
        (part for part in reader.children.get(module.path, ()) if part[-1].value == "linear1"), None
    )
    size = None if linear is None else _TorchModule(module.tree, linear, "Linear").value("out_features")
    if type(size) is not int:
        raise UnknownShapeError
    wide = (*shape[:-1], size)
    names = ("self_attn", "linear1", "norm1", "norm2", "dropout1", "dropout2")
    return LayerResult((shape,)), {
        **dict.fromkeys(names, shape),
        "linear2": wide,
        "dropout": wide,
        "activation": wide,
    }


_SIZES = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "hidden_size"),
    ("num_embeddings", "embedding_dim"),
)


def _torch_detail(module: _TorchModule) -> str:
    """Return a module's sizes and its settings other than the defaults."""
    words = []
    for inputs, outputs in _SIZES:
        sizes = [module.value(size) for size in (inputs, outputs)]
        if all(type(size) is int for size in sizes):
            words.append(
                f"{sizes[0]} -> {sizes[1]}" if inputs != "num_embeddings" else f"{sizes[0]} x {sizes[1]}"
            )
    kernel = module.value("kernel_size")
    if kernel is not None:
        rank = int(module.cls[-2]) if re.search(r"[123]d\Z", module.cls) else 1
        words.append(format_axes((kernel,) * rank if isinstance(kernel, int) else kernel))
    width = module.value("embed_dim")
    words += [f"{width} features"] if type(width) is int else []
    window = fold_axes(kernel) if "Pool" in module.cls else None
    shown = ((row, row.torch_default, module.value(row.torch)) for row in SETTINGS if row.torch)
    return ", ".join([*words, *list_settings(shown, module.cls, "PyTorch", window)])
