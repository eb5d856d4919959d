"""Describe the layers of a model: classes, settings, order, output shapes, multiply-accumulate operations."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ckpttool.commands.inspect import is_script
from ckpttool.commands.outline import (
    INPUT,
    LISTS,
    Architecture,
    ArchitectureLayer,
    Extents,
    Flow,
    format_extents,
    walk_layers,
)
from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import (
    CkpttoolError,
    UnsupportedError,
    UsageError,
    is_system_error,
    suggest_choice,
)
from ckpttool.core.kinds import SETTINGS, LayerSetting, default_epsilon
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display, index
from ckpttool.formats.keras_config import (
    ATTENTION,
    CELLS,
    KerasConfig,
    class_from_name,
    config_of,
    has_foreign_class,
    list_references,
    snake_case,
)
from ckpttool.formats.tf_common import format_object
from ckpttool.graphs.graph import ShapeMismatchError, UnknownShapeError
from ckpttool.libraries.recognize import PICKLED_MODULES, TORCH_CLASSES

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.graphs.keras import KerasLayerShapes
    from ckpttool.graphs.shapes import TracedCall
    from ckpttool.graphs.torch_modules import TorchLayerShapes

# A layer is described from what the file records: its class and settings, the order in which layers are
# applied, and shapes by arithmetic. Nothing is executed. The code of a custom class is not in the file: the
# order of its parts and its output shape are unknown, unless the file records them elsewhere.

# A model with more layers is not described, and layers nested more deeply are not.
_MOST_LAYERS, _DEEPEST = 20_000, 64
# No framework supports tensors with more numbers or with more axes.
_MOST_NUMBERS, _MOST_AXES = 1 << 63, 32
# Extents of one to nine digits, none of them zero.
_SHAPE = deferred.compile(r"[1-9][0-9]{0,8}([,x][1-9][0-9]{0,8}){0,15}")


def describe_architecture(checkpoint: Checkpoint, shapes: Sequence[str] = ()) -> tuple[Architecture, ...]:
    """Return the models whose layers the checkpoint records; none for weights alone.

    Args:
        checkpoint: any checkpoint; no tensor is read.
        shapes: input shapes without the batch, "3,32,32" or "PATH=3,32,32" for the input of one layer.

    """
    wanted = _parse_shapes(shapes)
    found: tuple[Architecture, ...] = ()
    try:
        found = _describe(checkpoint, wanted)
    except UsageError:
        raise
    except CkpttoolError as error:
        # The listing does not depend on it; commands that run the model report the error.
        if is_system_error(error):
            raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        if wanted:
            raise UsageError(
                "the model's configuration has an unexpected structure", file=checkpoint.path
            ) from None
    if wanted and not found:
        raise UsageError(
            "--input-shape requires a file that describes its layers",
            file=checkpoint.path,
            hint="a pickled module, a Keras model, TorchScript, ONNX; weights alone list no layers",
        )
    return found


def _describe(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    if checkpoint.format in ("keras_zip", "keras_h5"):
        return _describe_keras(checkpoint, shapes)
    if checkpoint.format == "onnx":
        return _describe_onnx(checkpoint, shapes)
    if is_script(checkpoint):
        return _describe_script(checkpoint, shapes)
    return _describe_torch(checkpoint, shapes)


def _is_possible(shape: Extents) -> bool:
    """Return whether a tensor of this shape can exist; None stands for any length."""
    sizes = [extent for extent in shape if extent is not None]
    return len(shape) <= _MOST_AXES and all(n >= 0 for n in sizes) and math.prod(sizes) < _MOST_NUMBERS


def _parse_shapes(shapes: Sequence[str]) -> dict[str, Extents]:
    """Return the shapes by layer path, "" for the whole model."""
    found: dict[str, Extents] = {}
    for text in shapes:
        name, equals, numbers = text.rpartition("=")
        if not _SHAPE.fullmatch(numbers) or (equals and not name):
            raise UsageError(
                f"invalid input shape {text!r}", hint="use --input-shape N,N,... with whole numbers"
            )
        path = name.replace(".", "/")
        if path in found:
            raise UsageError(f"two input shapes for {name or 'the model'}")
        found[path] = tuple(map(int, re.split("[,x]", numbers)))
    return found


def _require_used(shapes: Mapping[str, Extents], used: set[str], known: Iterator[str]) -> None:
    """Raise UsageError for a shape whose layer does not exist."""
    for path in shapes:
        if path not in used:
            what = f"no layer {path!r}" if path else "the order of the layers is not in the file"
            names = [name for name in known if name]
            hint = suggest_choice(path, names[:_SUGGESTED]) if names else None
            if not path and names:
                hint = f"name the layer that receives the input: --input-shape {names[0]}=..."
            raise UsageError(what, hint=hint)


_SUGGESTED = 12


# Pickled torch modules: classes and settings are recorded, the code of `forward` is not. torch's own classes
# are those of torch/nn/modules (torch 2.x); a Sequential applies its parts in the order of `_modules`.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _describe_torch(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    tree = checkpoint.tree
    reader = _TorchReader(tree, shapes)
    if not reader.modules or len(reader.modules) > _MOST_LAYERS:
        return ()
    found = []
    for root in reader.roots():
        layer = reader.model(root)
        inputs, assumed, notes = tuple(reader.given), tuple(reader.assumed), tuple(reader.notes)
        found.append(Architecture("pickled module", layer, inputs, assumed=assumed, notes=notes))
    _require_used(shapes, reader.used, map(reader.name, reader.modules))
    return tuple(found)


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


class _LayerResult(NamedTuple):
    """The outputs of a layer, and its operations for one sample; None if an extent is unknown."""

    outputs: tuple[Extents, ...]
    macs: int | None = 0


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
    given: list[tuple[str, Extents]] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    assuming: bool = True
    contradicted: bool = False
    layer_shapes: TorchLayerShapes | None = None

    def __post_init__(self) -> None:
        """Find the modules: records with torch's dicts of parameters and modules."""
        held = self.tree.containers
        self.modules = {
            path: each.name
            for path, each in held.items()
            if each.kind == "record" and each.name and (*path, PICKLED_MODULES) in held
        }
        for path in self.modules:
            if self._is_part(path):
                self.children.setdefault(path[:-2], []).append(path)
        for path, leaf in self.tree.items():
            self._add_leaf(path, leaf)
        for path in held:
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
            self.assumed, self.given, self.notes = [], [], []
            self.assuming, self.contradicted = assuming, False
            found, _ = self.layer(root, None)
            if not self.contradicted:
                break
        return found

    def layer(self, path: Path, shape: Extents | None, depth: int = 0) -> tuple[ArchitectureLayer, Any]:
        """Return a module and the shape of its output with the batch, None if unknown."""
        cls, name = self.modules[path], self.name(path)
        if name in self.shapes:
            self._require_order(path)
            self.used.add(name)
            shape = (1, *self.shapes[name])
            self.given.append((name, shape[1:]))
        elif shape is None and not depth and self.assuming:
            shape = self._first_size(path)
        own = cls.startswith(TORCH_CLASSES)
        kind = cls.rpartition(".")[2]
        module = _TorchModule(self.tree, path, kind if own else "")
        result, below, flow = self._computed(module, shape, depth)
        if path in self.hooked:
            self.notes.append(f"{name or kind} has forward hooks, whose code is not in the file")
            result = None
        layer = ArchitectureLayer(
            path=name,
            kind=kind,
            cls=cls,
            known=own,
            detail=_torch_detail(module) if own else "",
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
    ) -> tuple[_LayerResult | None, tuple[ArchitectureLayer, ...], Flow]:
        """Return the output of a module, its parts, and how they relate."""
        parts = self.children.get(module.path, []) if depth < _DEEPEST else []
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
            given = inputs.get(str(part[-1].value))
            below.append(self.layer(part, given, depth + 1)[0])
        if result is not None and inputs:
            macs = [each.macs for each in below]
            total = None if None in macs else sum(each or 0 for each in macs)
            result = None if total is None else result._replace(macs=total)
        return result, tuple(below), "parts"

    def _sequence(
        self, module: _TorchModule, parts: Sequence[Path], shape: Extents | None, depth: int
    ) -> tuple[_LayerResult | None, tuple[ArchitectureLayer, ...], Flow]:
        below: list[ArchitectureLayer] = []
        value, total = shape, (0 if shape is not None else None)
        for part in parts:
            given = None if self.modules[part].rpartition(".")[2] in LISTS else value
            layer, value = self.layer(part, given, depth + 1)
            below.append(layer)
            total = None if total is None or layer.macs is None else total + layer.macs
        if value is None or total is None or len(parts) < len(self.children.get(module.path, ())):
            return None, tuple(below), "chain"
        return _LayerResult((value,), total), tuple(below), "chain"

    def _apply(
        self, module: _TorchModule, shape: Extents
    ) -> tuple[_LayerResult | None, Mapping[str, Extents]]:
        """Return a torch layer's output, and the inputs of its parts by name."""
        from ckpttool.graphs.torch_modules import TorchLayerShapes

        known = tuple(extent for extent in shape if extent is not None)
        self.layer_shapes = self.layer_shapes or TorchLayerShapes(self.tree)
        try:
            if module.cls in _ENCODERS:
                return _encode(self, module, known)
            output, macs = self.layer_shapes.infer(module.path, self.modules[module.path], known)
        except ShapeMismatchError:
            self.misfit(module, shape)
            return None, {}
        except UnknownShapeError:
            return None, {}
        return _LayerResult((output,), macs) if _is_possible(output) else None, {}

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
        self.given.append((self.name(path), (size,)))
        return (1, size)


_TUPLES = frozenset(("LSTM", "GRU", "RNN", "LSTMCell", "MultiheadAttention"))
_ENCODERS = frozenset(("TransformerEncoder", "TransformerEncoderLayer"))


def _encode(
    reader: _TorchReader, module: _TorchModule, shape: tuple[int, ...]
) -> tuple[_LayerResult, Mapping[str, Extents]]:
    """Return the output of a transformer encoder, and the inputs of its parts."""
    if len(shape) != 3:
        raise UnknownShapeError
    if module.cls == "TransformerEncoder":
        return _LayerResult((shape,)), {"layers": shape, "norm": shape}
    linear = next(
        (part for part in reader.children.get(module.path, ()) if part[-1].value == "linear1"), None
    )
    size = None if linear is None else _TorchModule(module.tree, linear, "Linear").value("out_features")
    if type(size) is not int:
        raise UnknownShapeError
    wide = (*shape[:-1], size)
    names = ("self_attn", "linear1", "norm1", "norm2", "dropout1", "dropout2")
    return _LayerResult((shape,)), {
        **dict.fromkeys(names, shape),
        "linear2": wide,
        "dropout": wide,
        "activation": wide,
    }


# Settings as text.

_SIZES = (
    ("in_features", "out_features"),
    ("in_channels", "out_channels"),
    ("input_size", "hidden_size"),
    ("num_embeddings", "embedding_dim"),
)


def _torch_detail(module: _TorchModule) -> str:
    """Return a module's sizes and its settings other than the defaults."""
    words = []
    for taken, made in _SIZES:
        sizes = [module.value(each) for each in (taken, made)]
        if all(type(each) is int for each in sizes):
            words.append(
                f"{sizes[0]} -> {sizes[1]}" if taken != "num_embeddings" else f"{sizes[0]} x {sizes[1]}"
            )
    kernel = module.value("kernel_size")
    if kernel is not None:
        rank = int(module.cls[-2]) if re.search(r"[123]d\Z", module.cls) else 1
        words.append(_window_text((kernel,) * rank if isinstance(kernel, int) else kernel))
    width = module.value("embed_dim")
    words += [f"{width} features"] if type(width) is int else []
    window = _axes(kernel) if "Pool" in module.cls else None
    shown = ((row, row.torch_default, module.value(row.torch)) for row in SETTINGS if row.torch)
    return ", ".join([*words, *_list_settings(shown, module.cls, "PyTorch", window)])


def _list_settings(
    settings: Iterable[tuple[LayerSetting, Any, Any]], cls: str, library: str, window: Any
) -> Iterator[str]:
    """Yield the settings other than the defaults, from their defaults and values.

    A pooling's stride is its `window` by default.
    """
    for row, default, value in settings:
        if row.name == "epsilon":
            default = default_epsilon(cls, library)
        elif row.name == "stride" and window is not None:
            default = window
        known = value is not None and value != () and not isinstance(value, dict)
        if known and row.text and (default is None or _axes(value) != default):
            yield row.text.format(_axes_text(value))


def _axes(value: Any) -> Any:
    """Return one number for a tuple of equal ones."""
    equal = isinstance(value, tuple) and value and all(each == value[0] for each in value)
    return value[0] if equal else value


def _axes_text(value: Any) -> str:
    value = _axes(value)
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return clean(text)[:_WORD]


def _window_text(value: Any) -> str:
    text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return clean(text)[:_WORD]


_WORD = 40
# Larger numbers of units are not listed.
_MOST_UNITS = 1 << 40


# Keras models: the configuration lists layers, settings, the graph, and often shapes (keras/src/models,
# keras/src/layers). Shapes have no batch axis; an extent of any length is None.

_MODELS = ("Sequential", "Functional", "Model")
_KerasReference = tuple[str, int, int]


def _describe_keras(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    from ckpttool.formats.keras_tree import config_document

    document = config_document(checkpoint.format, checkpoint.path)
    if document is None:
        return ()
    reader = _KerasReader(checkpoint.tree, shapes)
    outputs = (shapes[""],) if "" in shapes else ()
    reader.used |= {""} & set(shapes)
    if outputs:
        reader.inputs.append(("", outputs[0]))
    root, _ = reader.call(document, "", [*outputs], 0)
    _require_used(shapes, reader.used, (layer.path for layer in walk_layers(root)))
    return (Architecture("Keras configuration", root, tuple(reader.inputs), notes=tuple(reader.notes)),)


_NAME_INPUT = "name an input layer: --input-shape LAYER=..."


@dataclass
class _KerasReader:
    """Reads one configuration; `shapes` are input shapes by layer path."""

    tree: Tree
    shapes: Mapping[str, Extents]
    sums: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    inputs: list[tuple[str, Extents]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    count: int = 0
    layer_shapes: KerasLayerShapes | None = None

    def __post_init__(self) -> None:
        """Count the parameters under each path."""
        for path, leaf in self.tree.tensors():
            if leaf.role == "parameter":
                steps = self.tree.names[path].split("/")
                for end in range(len(steps)):
                    name = "/".join(steps[:end])
                    self.sums[name] = self.sums.get(name, 0) + leaf.size

    def call(
        self, document: Mapping[str, Any], path: str, given: Sequence[Extents | None], depth: int
    ) -> tuple[ArchitectureLayer, tuple[Extents | None, ...]]:
        """Return a layer or model, and the shapes of its outputs; None for unknown ones."""
        config = config_of(dict(document))
        cls, settings = str(config.cls or "?"), config.settings
        own = not has_foreign_class(document) and (
            _is_listed(document) or class_from_name(snake_case(cls)) == cls
        )
        self.count += 1
        if self.count > _MOST_LAYERS:
            raise UnsupportedError(f"a model with more than {_MOST_LAYERS} calls of layers")
        if path in self.shapes and path:
            if len(given) > 1:
                raise UsageError(f"the layer receives {len(given)} inputs", path=path, hint=_NAME_INPUT)
            self.used.add(path)
            given = [self.shapes[path]]
            self.inputs.append((path, self.shapes[path]))
        if own and cls in _MODELS and isinstance(settings.get("layers"), list) and depth < _DEEPEST:
            return self._model(document, path, given, depth)
        applied = own and _is_layer(document, cls)
        result = self._apply(document, given, path) if applied else None
        layer = ArchitectureLayer(
            path=path,
            kind=cls,
            cls=_full_class(document, cls),
            known=own,
            detail=_keras_detail(cls, settings),
            activation=_keras_activation(cls, settings),
            parameters=self.sums.get(path, 0),
            output=None if result is None else result.outputs[0],
            macs=None if result is None else result.macs,
        )
        return layer, () if result is None else result.outputs

    def _apply(
        self, document: Mapping[str, Any], given: Sequence[Extents | None], path: str
    ) -> _LayerResult | None:
        from ckpttool.graphs.keras import KerasLayerShapes

        cls, settings, _ = config_of(dict(document))
        if cls == INPUT:
            shape = given[0] if given else _input_shape(settings)
            return None if shape is None else _LayerResult((shape,))
        known = tuple(each for each in given if each is not None)
        known = known or tuple(each for each in [_input_shape(settings)] if each is not None)
        if not known or len(known) < len(given):
            return None
        self.layer_shapes = self.layer_shapes or KerasLayerShapes(self.tree)
        try:
            outputs, macs = self.layer_shapes.infer(document, tuple(path.split("/"))[:-1], known)
        except ShapeMismatchError:
            if self.shapes:
                shown = " and ".join(map(format_extents, known))
                raise UsageError(
                    f"{cls} cannot be applied to {shown}", path=path or None, hint="check --input-shape"
                ) from None
            return None
        except UnknownShapeError:
            return None
        return _LayerResult(outputs, macs) if all(map(_is_possible, outputs)) else None

    def _model(
        self, document: Mapping[str, Any], path: str, given: Sequence[Extents | None], depth: int
    ) -> tuple[ArchitectureLayer, tuple[Extents | None, ...]]:
        config = config_of(dict(document))
        entries = [each for each in config.settings["layers"] if isinstance(each, dict)]
        chain = config.cls == "Sequential"
        reading = _KerasModelReader(self, path, depth)
        outputs = reading.sequence(config, entries, given) if chain else reading.graph(config, entries, given)
        macs = [layer.macs for layer in reading.layers]
        layer = ArchitectureLayer(
            path=path,
            kind=str(config.cls),
            cls=_full_class(document, str(config.cls)),
            parameters=self.sums.get(path, 0),
            output=outputs[0] if len(outputs) == 1 else None,
            macs=None if None in macs else sum(each or 0 for each in macs),
            flow="graph" if any(each.inputs for each in reading.layers) else "chain",
            below=tuple(reading.layers),
        )
        return layer, outputs


@dataclass
class _KerasNode:
    """A layer of a functional model, its calls with their inputs, and the result of each evaluated call.

    `outer` is the shape that a model around this one gives an input layer.
    """

    entry: dict[str, Any]
    name: str
    calls: Sequence[Sequence[_KerasReference]]
    outer: Extents | None
    made: list[ArchitectureLayer] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Return whether every call is evaluated."""
        return len(self.made) == max(len(self.calls), 1)


@dataclass
class _KerasModelReader:
    """Reads the layers of one Sequential or functional model."""

    reader: _KerasReader
    path: str
    depth: int
    layers: list[ArchitectureLayer] = field(default_factory=list)
    values: dict[_KerasReference, Extents | None] = field(default_factory=dict)
    recorded: dict[_KerasReference, Extents] = field(default_factory=dict)

    def below(self, name: str) -> str:
        """Return the path of a layer."""
        return f"{self.path}/{name}" if self.path else name

    def sequence(
        self, config: KerasConfig, entries: Sequence[dict[str, Any]], given: Sequence[Extents | None]
    ) -> tuple[Extents | None, ...]:
        """Add the layers of a Sequential model; return its output."""
        value = given[0] if given else _batch_shape(config.settings.get("build_input_shape"))
        for number, entry in enumerate(entries):
            inner = config_of(entry)
            recorded = entry.get("build_config")
            if value is None and isinstance(recorded, dict):
                value = _batch_shape(recorded.get("input_shape"))
                if value is not None and self.layers and self.layers[-1].output is None:
                    self.layers[-1] = replace(self.layers[-1], output=value)
            self._note_input(number, inner, value)
            layer, outputs = self.reader.call(
                entry, self.below(_layer_name(entry)), [] if value is None else [value], self.depth + 1
            )
            if layer.kind == INPUT and outputs and not self.depth:
                self.reader.inputs.append((layer.name, outputs[0] or ()))
            self.layers.append(layer)
            value = outputs[0] if outputs else None
        return (value,)

    def _note_input(self, number: int, inner: KerasConfig, value: Extents | None) -> None:
        """Record the input of a model without an input layer, which its first layer or its build states."""
        shape = value if value is not None else _input_shape(inner.settings)
        if number or self.depth or inner.cls == INPUT or shape is None:
            return
        if not any(name == "" for name, _ in self.reader.inputs):
            self.reader.inputs.append(("", shape))

    def graph(
        self, config: KerasConfig, entries: Sequence[dict[str, Any]], given: Sequence[Extents | None]
    ) -> tuple[Extents | None, ...]:
        """Add the layers of a functional model in the order of their use; return its outputs."""
        inputs = [each[0] for each in list_references(config.settings.get("input_layers"))]
        if len(inputs) > 1 and not self.depth and given:
            hint = f"name the input: --input-shape {inputs[0]}=..."
            raise UsageError(f"the model has {len(inputs)} inputs", hint=hint)
        waiting = []
        for entry in entries:
            nodes = entry.get("inbound_nodes")
            cls = str(config_of(entry).cls)
            calls = [_call_inputs(cls, node) for node in nodes] if isinstance(nodes, list) else []
            for node in nodes if isinstance(nodes, list) else []:
                self.recorded.update(_recorded_shapes(node))
            name = _layer_name(entry)
            outer = given[inputs.index(name)] if name in inputs[: len(given)] else None
            waiting.append(_KerasNode(entry, name, calls, outer))
        steps, before = 0, -1
        while waiting:
            steps += len(waiting)
            if steps > _MOST_STEPS:
                raise UnsupportedError("layers in reverse order")
            # A layer may be called on its own output, so that its calls become ready one after the other.
            for node in waiting:
                self._call(node)
                if node.done:
                    self._add(node)
            waiting = [node for node in waiting if not node.done]
            if before == (before := sum(len(node.made) for node in waiting) + len(self.layers)):
                self._unconnected(waiting)
                break
        ends = list_references(config.settings.get("output_layers"))
        return tuple(self.values.get(ref) for ref in ends)

    def _unconnected(self, later: Sequence[_KerasNode]) -> None:
        """Add layers with an input that is not listed."""
        for node in later:
            made, _ = self.reader.call(node.entry, self.below(node.name), [None], self.depth + 1)
            self.layers.append(replace(made, macs=None))

    def _call(self, node: _KerasNode) -> None:
        """Evaluate the shapes of a layer's next calls, as far as their inputs are known."""
        for number, refs in enumerate(node.calls or [()]):
            if number < len(node.made):
                continue
            if not all(ref in self.values for ref in refs):
                return
            given = [self.values.get(ref) for ref in refs]
            given = given if refs else [node.outer] if node.outer else []
            made, outputs = self.reader.call(node.entry, self.below(node.name), given, self.depth + 1)
            if not node.calls and not self.depth and outputs:
                self.reader.inputs.append((node.name, outputs[0] or ()))
            known = outputs or (None,)
            if not self.reader.shapes:
                known = tuple(self._checked((node.name, number, n), value) for n, value in enumerate(known))
                if made.output is not None and known[0] != made.output:
                    made = replace(made, output=None, macs=None)
            for place, value in enumerate(known):
                self.values[node.name, number, place] = value
            node.made.append(made if made.output is not None else replace(made, output=known[0]))

    def _add(self, node: _KerasNode) -> None:
        """Add one layer with the operations of all its calls."""
        macs = [made.macs for made in node.made]
        sources = list(dict.fromkeys(ref[0] for refs in node.calls for ref in refs if ref[0] != node.name))
        last = self.layers[-1].name if self.layers else ""
        listed = () if sources in ([], [last]) else tuple(map(self.below, sources))
        detail = f"called {len(node.calls)} times" if len(node.calls) > 1 else ""
        total = None if None in macs else sum(each or 0 for each in macs)
        words = ", ".join(filter(None, (node.made[0].detail, detail)))
        self.layers.append(replace(node.made[0], inputs=listed, macs=total, detail=words))

    def _checked(self, at: _KerasReference, shape: Extents | None) -> Extents | None:
        """Return an output's shape; the recorded one if there is none, or if it is another one."""
        recorded = self.recorded.get(at)
        if shape is None or recorded is None or len(shape) != len(recorded):
            return recorded if recorded is not None else shape
        fits = all(None in pair or pair[0] == pair[1] for pair in zip(shape, recorded, strict=True))
        return shape if fits else recorded


# Layers that are visited while a graph is put in order.
_MOST_STEPS = 1 << 18
# Functions of keras.ops that compute what the layer of the same name does.
_SAME_OPERATIONS = frozenset(("Add", "Subtract", "Multiply", "Maximum", "Minimum", "Concatenate", "Softmax"))


def _is_layer(document: Mapping[str, Any], cls: str) -> bool:
    """Return whether a class of Keras is a layer, not a function of keras.ops with the name of one."""
    module = document.get("module")
    if not isinstance(module, str) or "ops" not in module.split("."):
        return True
    return cls in _SAME_OPERATIONS and not _holds_array(document.get("inbound_nodes"))


def _holds_array(value: Any) -> bool:
    """Return whether a node has a constant array among its inputs, whose shape is not evaluated."""
    waiting, seen = [value], 0
    while waiting and seen < _MOST_LAYERS:
        item, seen = waiting.pop(), seen + 1
        if isinstance(item, dict):
            if item.get("class_name") in ("__numpy__", "__tensor__"):
                return True
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return bool(waiting)


def _call_inputs(cls: str, node: Any) -> list[_KerasReference]:
    """Return the inputs of one call in the order of the layer's arguments.

    Those of attention are query, value and key: masks are left out, whatever the order of keywords.
    """
    if cls not in ATTENTION:
        return list_references(node)
    args, named = (node.get("args"), node.get("kwargs")) if isinstance(node, dict) else _arguments(node)
    found = {}
    for name, value in zip(_ATTENTION_INPUTS, args if isinstance(args, list) else (), strict=False):
        found[name] = list_references(value)
    for name in _ATTENTION_INPUTS:
        if isinstance(named, dict) and name in named:
            found[name] = list_references(named[name])
    return [ref for name in _ATTENTION_INPUTS for ref in found.get(name, [])[:1]]


def _arguments(node: Any) -> tuple[list[Any], Any]:
    """Return the arguments of a call in Keras 2: [[layer, node, place, keywords]]."""
    first = node[0] if isinstance(node, list) and node else None
    return [node], first[3] if isinstance(first, list) and len(first) > 3 else {}


_ATTENTION_INPUTS = ("query", "value", "key")


def _layer_name(entry: Mapping[str, Any]) -> str:
    config = config_of(dict(entry))
    return str(entry.get("name") or config.name or snake_case(str(config.cls)))


def _is_listed(document: Mapping[str, Any]) -> bool:
    """Return whether the configuration names the module of the class (Keras 3)."""
    return isinstance(document.get("module"), str)


def _full_class(document: Mapping[str, Any], cls: str) -> str:
    module, registered = document.get("module"), document.get("registered_name")
    if isinstance(registered, str) and ">" in registered:
        return registered
    return f"{module}.{cls}" if isinstance(module, str) and module else cls


def _batch_shape(shape: Any) -> Extents | None:
    """Return a recorded shape without its first axis, the batch."""
    if not isinstance(shape, list) or not shape:
        return None
    if not all(each is None or (type(each) is int and each > 0) for each in shape[1:]):
        return None
    found = tuple(shape[1:])
    return found if _is_possible(found) else None


def _input_shape(settings: Mapping[str, Any]) -> Extents | None:
    return _batch_shape(settings.get("batch_shape") or settings.get("batch_input_shape"))


def _recorded_shapes(node: Any) -> dict[_KerasReference, Extents]:
    """Return the shapes of a node's inputs that Keras 3 writes beside their origin."""
    found: dict[_KerasReference, Extents] = {}
    waiting = [node]
    while waiting and len(found) < _MOST_LAYERS:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            history, shape = value.get("keras_history"), _batch_shape(value.get("shape"))
            if isinstance(history, list) and shape is not None:
                found.update(dict.fromkeys(list_references(value), shape))
            else:
                waiting += value.values()
    return found


def _keras_detail(cls: str, settings: Mapping[str, Any]) -> str:
    """Return a layer's sizes and its settings other than the defaults."""
    words = []
    for name, text in (("units", "{} units"), ("filters", "{} filters")):
        if type(value := settings.get(name)) is int and abs(value) < _MOST_UNITS:
            words.append(text.format(value))
    windows = (settings.get(name) for name in ("kernel_size", "pool_size"))
    words += [_window_text(tuple(value)) for value in windows if isinstance(value, list)]
    values = {name: tuple(each) if isinstance(each, list) else each for name, each in settings.items()}
    shown = ((row, row.keras_default, values.get(row.keras)) for row in SETTINGS if row.keras)
    words += _list_settings(shown, cls, "Keras", _axes(values.get("pool_size")))
    inner = settings.get("layer")
    if isinstance(inner, dict):
        own = config_of(inner)
        words.append(f"{own.cls} {_keras_detail(str(own.cls), own.settings)}".strip())
    return ", ".join(words)


def _keras_activation(cls: str, settings: Mapping[str, Any]) -> str:
    """Return a layer's activation; empty for the default of its class."""
    activation = settings.get("activation")
    default = "tanh" if cls in CELLS else "linear"
    if activation is None or activation == default:
        return ""
    return clean(format_object(activation))[:_WORD]


# Recorded computations: the code of a TorchScript archive and the graph of an ONNX model are read as a graph,
# whose shapes are traced (ckpttool.graphs). Shapes include the batch.

_TORCH_MODULES = "torch.nn.modules."
_INPUT = "input"
# A part of a class name that distinguishes copies of a class.
_MANGLED = deferred.compile(r"\.___torch_mangle_[0-9]+")


def _whole_shapes(shapes: Mapping[str, Extents]) -> dict[str, tuple[int, ...]]:
    """Return the user's shapes with a batch of 1."""
    return {name: (1, *(extent or 1 for extent in shape)) for name, shape in shapes.items()}


def _describe_script(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    from ckpttool.graphs.shapes import trace_graph
    from ckpttool.graphs.torchscript import read_for_shapes
    from ckpttool.graphs.torchscript_code import traced_inputs

    given = _whole_shapes(shapes)
    # The inputs of a script have no names, only an order.
    names = [""] if "" in given else [f"input {number}" for number in range(len(given))]
    if given.keys() - set(names):
        hint = "name the inputs in their order: --input-shape 'input 0=N,N,...'"
        raise UsageError(f"no input {next(iter(given.keys() - set(names)))!r}", hint=hint)
    inputs = [given[name] for name in names if name in given]
    inputs = inputs or [leaf.shape for leaf in traced_inputs(checkpoint)]
    graph = read_for_shapes(checkpoint, [inputs] if inputs else [])
    found = None if graph is None else trace_graph(graph, {})
    if found is None:
        if shapes:
            raise UsageError(
                "the TorchScript code cannot be evaluated for this input",
                file=checkpoint.path,
                hint="check --input-shape; code that depends on values cannot be evaluated",
            )
        return ()
    tree = checkpoint.tree
    modules = {
        "/".join(str(step.value) for step in path): _MANGLED.sub("", each.name).removeprefix("__torch__.")
        for path, each in tree.containers.items()
        if each.kind == "record" and each.name
    }
    root = _GraphLayers(tree, found.calls, modules).root("", found.outputs[0] if found.outputs else None)
    named = tuple((f"input {number}", shape) for number, shape in enumerate(inputs))
    return (Architecture("TorchScript code", root, named, batch=True),)


def _describe_onnx(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    from ckpttool.graphs.graph import read_graph
    from ckpttool.graphs.shapes import trace_graph

    details = checkpoint.details.get("inputs")
    names = list(details) if isinstance(details, Mapping) else []
    given = _whole_shapes(shapes)
    if "" in given and len(names) == 1:
        given[names[0]] = given.pop("")
    graph = read_graph(checkpoint)
    found = None if graph is None else trace_graph(graph, given)
    _require_used(given, {*names}, iter(names))
    if found is None:
        return ()
    kind = str(checkpoint.details.get("name") or "graph")
    output = found.outputs[0] if len(found.outputs) == 1 else None
    root = _GraphLayers(checkpoint.tree, found.calls, {}).root(kind, output)
    assumed = ("extents that are not fixed are 1",) if found.assumed else ()
    return (Architecture("ONNX graph", root, found.inputs, batch=True, assumed=assumed),)


class _GraphLayers:
    """The operations of a graph as layers, grouped by their modules.

    `modules` are the classes of modules by path; without them, the folders in the names of operations are
    modules of an unknown class (`/layer1/conv1/Conv`).
    """

    def __init__(self, tree: Tree, calls: Sequence[TracedCall], modules: Mapping[str, str]) -> None:
        self.calls, self.modules = calls, modules
        self.sizes = {
            "/".join(str(step.value) for step in path): leaf.size
            for path, leaf in tree.tensors()
            if leaf.role == "parameter"
        }
        # Sums by module: a search among all tensors for each of them would be quadratic.
        self.totals: Counter[str] = Counter()
        for name, size in self.sizes.items():
            for end, character in enumerate(f"/{name}"):
                if character == "/":
                    self.totals[name[: max(end - 1, 0)]] += size
        self.steps: list[tuple[str, ...]] = []
        for number, call in enumerate(calls):
            title = f"{call.kind}_{number}"
            steps = (call.name.strip("/") or title).split("/")
            steps = [*self._called(call.scope), title] if modules else [step for step in steps if step]
            self.steps.append(tuple(steps[:_DEEPEST]))

    def _called(self, scope: Sequence[str]) -> Iterator[str]:
        """Yield the steps of a scope; a list of modules is not called itself, only its entries are."""
        start = 0
        for end in range(1, len(scope) + 1):
            if self.modules.get("/".join(scope[:end]), "").rpartition(".")[2] not in LISTS:
                yield "/".join(scope[start:end])
                start = end

    def root(self, kind: str, output: Extents | None) -> ArchitectureLayer:
        """Return the whole model; `kind` is its class if that is not listed."""
        return replace(self._group((), range(len(self.calls)), kind), output=output)

    def _layers(self, numbers: Sequence[int], depth: int) -> Iterator[ArchitectureLayer]:
        """Yield the operations with these positions as layers and groups of layers."""
        runs = [list(run) for _, run in groupby(numbers, lambda number: self._step(number, depth))]
        names = {number: "/".join(self._path(run, depth)) for run in runs for number in run}
        before = _INPUT
        for run in runs:
            sources = (each for number in run for each in self.calls[number].inputs if each not in run)
            listed = tuple(dict.fromkeys(names.get(each, _INPUT) for each in sources))
            layer = self._layer(run, self._path(run, depth))
            yield replace(layer, inputs=() if listed in ((), (before,)) else listed)
            before = layer.path

    def _step(self, number: int, depth: int) -> Any:
        """Return what operations of one module have in common at a level."""
        steps = self.steps[number]
        return steps[: depth + 1] if len(steps) > depth + 1 else number

    def _path(self, run: Sequence[int], depth: int) -> tuple[str, ...]:
        return self.steps[run[0]][: depth + 1]

    def _layer(self, run: Sequence[int], path: tuple[str, ...]) -> ArchitectureLayer:
        call = self.calls[run[0]]
        if "/".join(path) in self.modules or len(run) > 1:
            return self._group(path, run, "block")
        held = ("/".join(str(step.value) for step in weight) for weight in call.weights)
        return ArchitectureLayer(
            path="/".join(path),
            kind=call.kind,
            cls=call.kind,
            parameters=0 if self.modules else sum(self.sizes.get(each, 0) for each in held),
            output=call.output,
            macs=call.macs,
        )

    def _group(self, path: tuple[str, ...], run: Sequence[int], kind: str) -> ArchitectureLayer:
        """Return a module with its parts; those of torch's own modules are not listed."""
        name = "/".join(path)
        cls = self.modules.get(name, "")
        below = tuple(self._layers(run, len(path)))
        macs = [layer.macs for layer in below]
        linked = any(layer.inputs or layer.flow == "graph" for layer in below)
        inside = not cls.startswith(_TORCH_MODULES) or cls.endswith(".Sequential")
        size = self.totals[name] if self.modules else sum(layer.parameters for layer in below)
        return ArchitectureLayer(
            path=name,
            kind=cls.rpartition(".")[2] or kind,
            cls=cls,
            parameters=size,
            output=below[-1].output if below else None,
            macs=None if None in macs else sum(each or 0 for each in macs),
            flow="graph" if linked else "chain",
            below=below if inside else (),
        )
