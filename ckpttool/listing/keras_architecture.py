"""Layers of Keras models: the configuration lists layers, settings, the graph, and in part shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.kinds import SETTINGS
from ckpttool.core.text import clean
from ckpttool.core.tree import Tree
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
from ckpttool.listing.input_shapes import is_possible, require_shapes_used
from ckpttool.listing.layer_settings import LONGEST_WORD, MOST_UNITS, fold_axes, format_axes, list_settings
from ckpttool.listing.layers import (
    DEEPEST,
    INPUT,
    MOST_LAYERS,
    Architecture,
    ArchitectureLayer,
    Extents,
    LayerResult,
    format_extents,
    sum_macs,
    walk_layers,
)

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint
    from ckpttool.graphs.keras import KerasLayerShapes


_MODELS = ("Sequential", "Functional", "Model")
_KerasReference = tuple[str, int, int]


def describe_keras(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    """Return the models of the file with their layers; `shapes` are input shapes by layer path."""
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
    require_shapes_used(shapes, reader.used, (layer.path for layer in walk_layers(root)))
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
        self, document: Mapping[str, Any], path: str, inputs: Sequence[Extents | None], depth: int
    ) -> tuple[ArchitectureLayer, tuple[Extents | None, ...]]:
        """Return a layer or model, and the shapes of its outputs; None for unknown ones."""
        config = config_of(dict(document))
        cls, settings = str(config.cls or "?"), config.settings
        standard = not has_foreign_class(document) and (
            _is_listed(document) or class_from_name(snake_case(cls)) == cls
        )
        self.count += 1
        if self.count > MOST_LAYERS:
            raise UnsupportedError(f"a model with more than {MOST_LAYERS} calls of layers")
        if path in self.shapes and path:
            if len(inputs) > 1:
                raise UsageError(f"the layer receives {len(inputs)} inputs", path=path, hint=_NAME_INPUT)
            self.used.add(path)
            inputs = [self.shapes[path]]
            self.inputs.append((path, self.shapes[path]))
        if standard and cls in _MODELS and isinstance(settings.get("layers"), list) and depth < DEEPEST:
            return self._model(document, path, inputs, depth)
        applied = standard and _is_layer(document, cls)
        result = self._apply(document, inputs, path) if applied else None
        layer = ArchitectureLayer(
            path=path,
            kind=cls,
            cls=_full_class(document, cls),
            known=standard,
            detail=_keras_detail(cls, settings),
            activation=_keras_activation(cls, settings),
            parameters=self.sums.get(path, 0),
            output=None if result is None else result.outputs[0],
            macs=None if result is None else result.macs,
        )
        return layer, () if result is None else result.outputs

    def _apply(
        self, document: Mapping[str, Any], inputs: Sequence[Extents | None], path: str
    ) -> LayerResult | None:
        from ckpttool.graphs.keras import KerasLayerShapes

        cls, settings, _ = config_of(dict(document))
        if cls == INPUT:
            shape = inputs[0] if inputs else _input_shape(settings)
            return None if shape is None else LayerResult((shape,))
        shapes = tuple(extents for extents in inputs if extents is not None)
        shapes = shapes or tuple(extents for extents in [_input_shape(settings)] if extents is not None)
        if not shapes or len(shapes) < len(inputs):
            return None
        self.layer_shapes = self.layer_shapes or KerasLayerShapes(self.tree)
        try:
            outputs, macs = self.layer_shapes.infer(document, tuple(path.split("/"))[:-1], shapes)
        except ShapeMismatchError:
            if self.shapes:
                shown = " and ".join(map(format_extents, shapes))
                raise UsageError(
                    f"{cls} cannot be applied to {shown}", path=path or None, hint="check --input-shape"
                ) from None
            return None
        except UnknownShapeError:
            return None
        return LayerResult(outputs, macs) if all(map(is_possible, outputs)) else None

    def _model(
        self, document: Mapping[str, Any], path: str, inputs: Sequence[Extents | None], depth: int
    ) -> tuple[ArchitectureLayer, tuple[Extents | None, ...]]:
        config = config_of(dict(document))
        entries = [layer for layer in config.settings["layers"] if isinstance(layer, dict)]
        chain = config.cls == "Sequential"
        reading = _KerasModelReader(self, path, depth)
        outputs = (
            reading.sequence(config, entries, inputs) if chain else reading.graph(config, entries, inputs)
        )
        layer = ArchitectureLayer(
            path=path,
            kind=str(config.cls),
            cls=_full_class(document, str(config.cls)),
            parameters=self.sums.get(path, 0),
            output=outputs[0] if len(outputs) == 1 else None,
            macs=sum_macs(layer.macs for layer in reading.layers),
            flow="graph" if any(layer.inputs for layer in reading.layers) else "chain",
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
    layers: list[ArchitectureLayer] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Return whether every call is evaluated."""
        return len(self.layers) == max(len(self.calls), 1)


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
        self, config: KerasConfig, entries: Sequence[dict[str, Any]], inputs: Sequence[Extents | None]
    ) -> tuple[Extents | None, ...]:
        """Add the layers of a Sequential model; return its output."""
        value = inputs[0] if inputs else _batch_shape(config.settings.get("build_input_shape"))
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
        self, config: KerasConfig, entries: Sequence[dict[str, Any]], shapes: Sequence[Extents | None]
    ) -> tuple[Extents | None, ...]:
        """Add the layers of a functional model in the order of their use; return its outputs."""
        inputs = [reference[0] for reference in list_references(config.settings.get("input_layers"))]
        if len(inputs) > 1 and not self.depth and shapes:
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
            outer = shapes[inputs.index(name)] if name in inputs[: len(shapes)] else None
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
            if before == (before := sum(len(node.layers) for node in waiting) + len(self.layers)):
                self._unconnected(waiting)
                break
        ends = list_references(config.settings.get("output_layers"))
        return tuple(self.values.get(ref) for ref in ends)

    def _unconnected(self, later: Sequence[_KerasNode]) -> None:
        """Add layers with an input that is not listed."""
        for node in later:
            layer, _ = self.reader.call(node.entry, self.below(node.name), [None], self.depth + 1)
            self.layers.append(replace(layer, macs=None))

    def _call(self, node: _KerasNode) -> None:
        """Evaluate the shapes of a layer's next calls, as far as their inputs are known."""
        for number, refs in enumerate(node.calls or [()]):
            if number < len(node.layers):
                continue
            if not all(ref in self.values for ref in refs):
                return
            inputs = [self.values.get(ref) for ref in refs]
            inputs = inputs if refs else [node.outer] if node.outer else []
            layer, outputs = self.reader.call(node.entry, self.below(node.name), inputs, self.depth + 1)
            if not node.calls and not self.depth and outputs:
                self.reader.inputs.append((node.name, outputs[0] or ()))
            values = outputs or (None,)
            if not self.reader.shapes:
                values = tuple(self._checked((node.name, number, n), value) for n, value in enumerate(values))
                if layer.output is not None and values[0] != layer.output:
                    layer = replace(layer, output=None, macs=None)
            for position, value in enumerate(values):
                self.values[node.name, number, position] = value
            node.layers.append(layer if layer.output is not None else replace(layer, output=values[0]))

    def _add(self, node: _KerasNode) -> None:
        """Add one layer with the operations of all its calls."""
        sources = list(dict.fromkeys(ref[0] for refs in node.calls for ref in refs if ref[0] != node.name))
        last = self.layers[-1].name if self.layers else ""
        listed = () if sources in ([], [last]) else tuple(map(self.below, sources))
        detail = f"called {len(node.calls)} times" if len(node.calls) > 1 else ""
        total = sum_macs(layer.macs for layer in node.layers)
        words = ", ".join(filter(None, (node.layers[0].detail, detail)))
        self.layers.append(replace(node.layers[0], inputs=listed, macs=total, detail=words))

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
    waiting, count = [value], 0
    while waiting and count < MOST_LAYERS:
        item, count = waiting.pop(), count + 1
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
    references = {}
    for name, value in zip(_ATTENTION_INPUTS, args if isinstance(args, list) else (), strict=False):
        references[name] = list_references(value)
    for name in _ATTENTION_INPUTS:
        if isinstance(named, dict) and name in named:
            references[name] = list_references(named[name])
    return [ref for name in _ATTENTION_INPUTS for ref in references.get(name, [])[:1]]


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
    if not all(extent is None or (type(extent) is int and extent > 0) for extent in shape[1:]):
        return None
    extents = tuple(shape[1:])
    return extents if is_possible(extents) else None


def _input_shape(settings: Mapping[str, Any]) -> Extents | None:
    return _batch_shape(settings.get("batch_shape") or settings.get("batch_input_shape"))


def _recorded_shapes(node: Any) -> dict[_KerasReference, Extents]:
    """Return the shapes of a node's inputs that Keras 3 writes beside their origin."""
    shapes: dict[_KerasReference, Extents] = {}
    waiting = [node]
    while waiting and len(shapes) < MOST_LAYERS:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            history, shape = value.get("keras_history"), _batch_shape(value.get("shape"))
            if isinstance(history, list) and shape is not None:
                shapes.update(dict.fromkeys(list_references(value), shape))
            else:
                waiting += value.values()
    return shapes


def _keras_detail(cls: str, settings: Mapping[str, Any]) -> str:
    """Return a layer's sizes and its settings other than the defaults."""
    words = []
    for name, text in (("units", "{} units"), ("filters", "{} filters")):
        if type(value := settings.get(name)) is int and abs(value) < MOST_UNITS:
            words.append(text.format(value))
    windows = (settings.get(name) for name in ("kernel_size", "pool_size"))
    words += [format_axes(tuple(value)) for value in windows if isinstance(value, list)]
    values = {
        name: tuple(setting) if isinstance(setting, list) else setting for name, setting in settings.items()
    }
    shown = ((row, row.keras_default, values.get(row.keras)) for row in SETTINGS if row.keras)
    words += list_settings(shown, cls, "Keras", fold_axes(values.get("pool_size")))
    inner = settings.get("layer")
    if isinstance(inner, dict):
        config = config_of(inner)
        words.append(f"{config.cls} {_keras_detail(str(config.cls), config.settings)}".strip())
    return ", ".join(words)


def _keras_activation(cls: str, settings: Mapping[str, Any]) -> str:
    """Return a layer's activation; empty for the default of its class."""
    activation = settings.get("activation")
    default = "tanh" if cls in CELLS else "linear"
    if activation is None or activation == default:
        return ""
    return clean(format_object(activation))[:LONGEST_WORD]
