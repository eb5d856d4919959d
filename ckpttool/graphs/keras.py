"""Graphs of Keras models, from the configuration in their file: layers, nested models, shared layers.

Sources: keras/src/models/functional.py and sequential.py, keras/src/ops/function.py (`inbound_nodes`: the
calls of a layer, in the notations of Keras 2 and 3), keras/src/saving/serialization_lib.py. A model whose
class is not Keras's own records no computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import MappingError, UnsupportedError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Path, Tree, attr
from ckpttool.formats.keras_config import MODELS, config_of, has_foreign_class, is_described
from ckpttool.formats.keras_tree import config_document, writer_version
from ckpttool.graphs.builder import GraphBuilder
from ckpttool.graphs.graph import FUNCTION, Graph, OpaqueError, OperatorNode, UnknownShapeError, Value
from ckpttool.graphs.keras_layers import (
    Flow,
    LayerCall,
    LayerOutput,
    find_rule,
    flatten_operand,
    is_masked,
    takes_two_operands,
)
from ckpttool.graphs.operators import UnknownValueError, is_known
from ckpttool.graphs.shapes import ShapeTracer, trace_nodes

# The stand-in for an open extent in shapes that are needed for their rank only.
_OPEN = 97
_MOST_CALLS, _DEEPEST = 100_000, 20
# Arguments of a call that Keras adds itself.
_FLAGS = frozenset(("name",))

# What settings and arguments of other types than Keras writes lead to.
_UNREADABLE = (TypeError, ValueError, LookupError, AttributeError, OverflowError, MappingError)

_Layers = Mapping[str, Mapping[str, Any]]


def read(checkpoint: Checkpoint) -> Graph | None:
    """Return the graph of a Keras model; None without a configuration of Keras's own model classes."""
    document = config_document(checkpoint.format, checkpoint.path)
    if document is None or not is_described(document):
        return None
    return read_document(document, checkpoint.tree, checkpoint.path, writer_version(checkpoint.details))


def read_document(
    document: Mapping[str, Any], tree: Tree, file: str = "", version: int | None = None
) -> Graph:
    """Return the graph of a configuration with the tensors of `tree`.

    `version` is the major version of Keras that wrote it. Raise UnsupportedError for a structure of
    layers that Keras does not write.
    """
    reader = _KerasGraphReader(tree, version)
    try:
        return reader.graph(document)
    except UnsupportedError as error:
        raise error.located(file=file or error.file) from error.__cause__
    except (*_UNREADABLE, RecursionError) as error:
        raise UnsupportedError(
            "the model's configuration does not have the structure that Keras writes", file=file or None
        ) from error


def _damaged(scope: tuple[str, ...], text: str) -> UnsupportedError:
    return UnsupportedError(
        "the model's configuration does not have the structure that Keras writes",
        path="/".join(scope) or None,
        found=text,
    )


def list_layers(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layers of a model's configuration."""
    layers = config_of(dict(document)).settings.get("layers")
    return [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []


def _layer_name(layer: Mapping[str, Any]) -> str:
    return str(layer.get("name") or config_of(dict(layer)).name or "?")


def _is_place(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) in (3, 4)
        and isinstance(value[0], str)
        and all(type(number) is int for number in value[1:3])
    )


def list_places(value: Any) -> Iterator[tuple[str, LayerOutput]]:
    """Yield a model's inputs or outputs, with the keys of a dict of them; "" without a key.

    One place, or a list or dict of places; Keras numbers those of a dict in the order of their keys.
    """
    if isinstance(value, dict):
        for name in sorted(value):
            yield from ((str(name), output) for _, output in list_places(value[name]))
    elif _is_place(value):
        yield "", LayerOutput(*value[:3])
    elif isinstance(value, list):
        for item in value:
            yield from list_places(item)


def _operand(value: Any) -> Any:
    """Return an argument of a call: a LayerOutput, a number or text, a slice, or a list of these."""
    if isinstance(value, dict):
        config, cls = value.get("config"), value.get("class_name")
        if isinstance(config, dict):
            history = config.get("keras_history")
            if isinstance(history, list) and len(history) == 3:
                return LayerOutput(str(history[0]), int(history[1]), int(history[2]))
            if cls == "__slice__":
                return slice(*(config.get(name) for name in ("start", "stop", "step")))
            if cls in ("__numpy__", "__tensor__"):
                return config.get("value")
        if cls == "__tuple__":
            return [_operand(item) for item in value.get("items") or ()]
        if cls == "__ellipsis__":
            return Ellipsis
        if cls is None:
            return {name: _operand(item) for name, item in value.items()}
        return value
    if isinstance(value, list):
        return [_operand(item) for item in value]
    return value


def _read_call(node: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and the keyword arguments of one call of a layer."""
    if isinstance(node, dict) and "args" in node:
        arguments, named = [_operand(item) for item in node["args"]], node.get("kwargs") or {}
        return arguments, {name: _operand(item) for name, item in named.items() if name not in _FLAGS}
    items = [node] if _is_place(node) else list(node)
    if not all(_is_place(item) for item in items):
        raise ValueError(node)
    places = [LayerOutput(*item[:3]) for item in items]
    named = {}
    for item in items:
        named |= item[3] if len(item) > 3 and isinstance(item[3], dict) else {}
    # An argument that is a tensor is written as its place.
    resolved = {
        name: LayerOutput(*item[:3]) if _is_place(item) else _operand(item)
        for name, item in named.items()
        if name not in _FLAGS
    }
    return [places[0] if len(places) == 1 else places], resolved


def _resolve(value: Any, flows: Mapping[LayerOutput, Flow]) -> Any:
    """Return an argument with the values of its places."""
    if isinstance(value, LayerOutput):
        return flows[value]
    if isinstance(value, list):
        return [_resolve(item, flows) for item in value]
    if isinstance(value, dict):
        return {name: _resolve(item, flows) for name, item in value.items()}
    return value


# Two numbers for an open extent: what differs between them is open.
_TRIALS = (101, 103)
_Extents = tuple[int | None, ...]


class KerasLayerShapes:
    """Output shapes and operations of single layers of a model; shapes have no batch, None is open."""

    def __init__(self, tree: Tree) -> None:
        """Read the tensors of layers from a tree."""
        # The version decides on numbers, not on shapes.
        self._reader = _KerasGraphReader(tree, 3)

    def infer(
        self, layer: Mapping[str, Any], scope: tuple[str, ...], shapes: Sequence[_Extents]
    ) -> tuple[tuple[_Extents, ...], int | None]:
        """Return the shapes of a layer's outputs and its operations for one sample, None if unknown.

        Raise ShapeMismatchError if the inputs do not fit the layer, UnknownShapeError if it is not
        understood.
        """
        if config_of(dict(layer)).cls in MODELS:
            raise UnknownShapeError
        trials = _TRIALS if any(None in shape for shape in shapes) else _TRIALS[:1]
        results = [
            self._trace(layer, scope, [tuple(n or trial for n in shape) for shape in shapes])
            for trial in trials
        ]
        (outputs, macs), (others, other_macs) = results[0], results[-1]
        if list(map(len, outputs)) != list(map(len, others)):
            raise UnknownShapeError
        merged = tuple(
            tuple(a if a == b else None for a, b in zip(one, other, strict=True))
            for one, other in zip(outputs, others, strict=True)
        )
        return merged, macs if macs == other_macs else None

    def _trace(
        self, layer: Mapping[str, Any], scope: tuple[str, ...], shapes: Sequence[Shape]
    ) -> tuple[list[Shape], int | None]:
        reader = self._reader
        reader.build.nodes.clear()
        reader.build.count = 0
        names = {reader.build.unique_name("input"): (1, *shape) for shape in shapes}
        reader.tracer.shapes.update(names)
        arguments: list[Any] = [Flow(name, "float32") for name in names]
        if len(arguments) == 1 and takes_two_operands(layer):
            arguments.append(1)  # The other operand is a number.
        flows = reader.call(layer, scope, arguments, {}, 1)
        tracer, macs = trace_nodes(reader.build.nodes, reader.build.constants, names)
        outputs = [tracer.shape(flow.name) for flow in flows]
        if not all(shape and shape[0] == 1 for shape in outputs):
            raise UnknownShapeError
        return [shape[1:] for shape in outputs if shape], macs


@dataclass
class _KerasGraphReader:
    """Translates models and the calls of their layers to nodes."""

    tree: Tree
    version: int | None
    build: GraphBuilder = field(default_factory=GraphBuilder)
    inputs: list[Value] = field(default_factory=list)
    calls: int = 0
    # The names below each path of the tree, listed when they are first needed.
    children: dict[Path, dict[str, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Trace shapes with the constants as they are added."""
        self.tracer = ShapeTracer(Graph((), (), (), self.build.constants), {})
        self.build.inspect = self.tracer.add

    def graph(self, document: Mapping[str, Any]) -> Graph:
        """Return the graph of the whole model."""
        results = self.model(document, (), self.list_inputs(document))
        outputs = []
        for name, flow in results:
            title = self.build.unique_name(name)
            self.build.nodes.append(OperatorNode("Identity", (flow.name,), (title,), {}, name, (), "outputs"))
            shape = self.tracer.shape(flow.name)
            extents = None if shape is None else tuple("" if n == _OPEN else n for n in shape)
            outputs.append(Value(title, flow.dtype, extents))
        title = config_of(dict(document)).name or ""
        return Graph(tuple(self.build.nodes), tuple(self.inputs), tuple(outputs), self.build.constants, title)

    # Inputs.

    def list_inputs(self, document: Mapping[str, Any]) -> list[Flow]:
        """Return the inputs of the whole model."""
        layers, settings = list_layers(document), config_of(dict(document)).settings
        if config_of(dict(document)).cls == "Sequential":
            return [self._first_input(document, layers)]
        by_name = {_layer_name(layer): layer for layer in layers}
        flows = []
        for _, output in list_places(settings.get("input_layers")):
            layer = by_name.get(output.layer)
            if layer is None:
                raise _damaged((output.layer,), "an input that is not a layer")
            flows.append(self._input(output.layer, config_of(layer).settings))
        return flows

    def _first_input(self, document: Mapping[str, Any], layers: Sequence[dict[str, Any]]) -> Flow:
        """Return the input of a Sequential: its first layer may be the input, or state its shape."""
        keys = ("batch_shape", "batch_input_shape")
        first: Mapping[str, Any] = document
        while (inner := list_layers(first)) and config_of(dict(first)).cls in MODELS:
            if config_of(dict(first)).cls != "Sequential":
                return self.list_inputs(first)[0]
            first = inner[0]
        settings = config_of(dict(first)).settings
        merged = {**config_of(dict(document)).settings, **settings}
        built = merged.get("build_input_shape")
        shape = next((merged[name] for name in keys if isinstance(merged.get(name), list)), built)
        name = _layer_name(layers[0]) if layers and config_of(layers[0]).cls == "InputLayer" else "input"
        is_input = config_of(dict(first)).cls == "InputLayer"
        dtype = settings.get("dtype") if is_input else None
        return self._input(name, {**(settings if is_input else {}), "dtype": dtype, "batch_shape": shape})

    def _input(self, name: str, settings: Mapping[str, Any]) -> Flow:
        shape = settings.get("batch_shape", settings.get("batch_input_shape"))
        dtype = settings.get("dtype") or "float32"
        dtype = config_of(dtype).name if isinstance(dtype, dict) else dtype
        if settings.get("sparse") or settings.get("ragged") or not isinstance(dtype, str):
            raise UnsupportedError("the model has an input that is not a dense tensor", path=name)
        title = self.build.unique_name(name)
        extents = None
        if isinstance(shape, list):
            if not all(extent is None or (type(extent) is int and extent > 0) for extent in shape):
                raise _damaged((name,), f"an input shape {shape}")
            extents = tuple("" if extent is None else extent for extent in shape)
            self.tracer.shapes[title] = tuple(extent or _OPEN for extent in shape)
        self.inputs.append(Value(title, dtype, extents))
        return Flow(title, dtype)

    # Models.

    def model(
        self, document: Mapping[str, Any], scope: tuple[str, ...], inputs: Sequence[Flow]
    ) -> list[tuple[str, Flow]]:
        """Return the results of a model for its inputs, with their names."""
        if len(scope) > _DEEPEST:
            raise _damaged(scope, "too many nested models")
        config, layers = config_of(dict(document)), list_layers(document)
        if config.cls == "Sequential":
            return self._sequential(layers, scope, inputs)
        by_name = {_layer_name(layer): layer for layer in layers}
        starts = [output for _, output in list_places(config.settings.get("input_layers"))]
        ends = list(list_places(config.settings.get("output_layers")))
        if len(by_name) != len(layers) or len(set(starts)) != len(inputs) or not ends:
            raise _damaged(scope, "a model whose inputs or outputs are not listed")
        flows = dict(zip(starts, inputs, strict=True))
        counts = _count_outputs(layers, [output for _, output in ends])
        for _, output in ends:
            self._until(output, by_name, scope, flows, counts)
        # A dict of outputs has its own names.
        return [(name or output.layer, flows[output]) for name, output in ends]

    def _sequential(
        self, layers: Sequence[dict[str, Any]], scope: tuple[str, ...], inputs: Sequence[Flow]
    ) -> list[tuple[str, Flow]]:
        if len(inputs) != 1 or not layers:
            raise _damaged(scope, f"a Sequential with {len(inputs)} inputs and {len(layers)} layers")
        arguments = [inputs[0]]
        for layer in layers:
            arguments = self.call(layer, scope, [arguments[0]], {}, 1)
        return [(_layer_name(layers[-1]), arguments[0])]

    def _until(
        self,
        target: LayerOutput,
        layers: _Layers,
        scope: tuple[str, ...],
        flows: dict[LayerOutput, Flow],
        counts: Mapping[tuple[str, int], int],
    ) -> None:
        """Translate the calls up to one, iteratively, because chains may be long."""
        waiting = [target]
        while waiting:
            output = waiting[-1]
            if output in flows:
                waiting.pop()
                continue
            self.calls += 1
            layer = layers.get(output.layer)
            nodes = layer.get("inbound_nodes") if layer is not None else None
            if layer is None or not isinstance(nodes, list) or not 0 <= output.call < len(nodes):
                raise _damaged((*scope, output.layer), f"call {output.call} is not listed")
            if len(waiting) > len(layers) * 8 or self.calls > _MOST_CALLS:
                raise _damaged((*scope, output.layer), "a cycle of calls, or too many calls")
            arguments, named = _read_call(nodes[output.call])
            missing = [
                item
                for item in flatten_operand([arguments, named])
                if isinstance(item, LayerOutput) and item not in flows
            ]
            if missing:
                waiting += missing
                continue
            results = self.call(
                layer,
                scope,
                _resolve(arguments, flows),
                _resolve(named, flows),
                counts.get((output.layer, output.call), 1),
            )
            for number, flow in enumerate(results):
                flows[LayerOutput(output.layer, output.call, number)] = flow
            if output not in flows:
                raise _damaged((*scope, output.layer), f"output {output.output} does not exist")

    # Calls of layers.

    def call(
        self,
        layer: Mapping[str, Any],
        scope: tuple[str, ...],
        arguments: list[Any],
        named: dict[str, Any],
        count: int,
    ) -> list[Flow]:
        """Return the results of a layer; `count` is the number of its outputs that the model uses."""
        config = config_of(dict(layer))
        cls, inner = str(config.cls), (*scope, _layer_name(layer))
        flows = [item for item in flatten_operand([arguments, named]) if isinstance(item, Flow)]
        foreign = has_foreign_class(layer)
        if cls in MODELS and not foreign and list_layers(layer) and not any(named.values()):
            nested = self._inputs_of_model(config.settings, arguments, inner)
            return [flow for _, flow in self.model(layer, inner, nested)]
        call, count_before = LayerCall(self, layer, inner, arguments, named), len(self.build.nodes)
        self.build.scope, self.build.title = inner, "/".join(inner)
        self.build.location = f"layer {self.build.title}"
        missing = None
        try:
            if foreign:
                raise OpaqueError("custom class")
            results = find_rule(layer)(call)
            call.require_understood()
        except OpaqueError as error:
            missing = str(error)
        except (UnknownValueError, *_UNREADABLE):
            missing = ""
        if missing is not None:
            del self.build.nodes[count_before:]
            return self._opaque(call, flows, count, missing)
        masked = is_masked(cls, config.settings) or any(flow.masked for flow in flows)
        return [flow._replace(masked=masked) for flow in results]

    def _inputs_of_model(
        self, settings: Mapping[str, Any], arguments: list[Any], scope: tuple[str, ...]
    ) -> list[Flow]:
        """Return the values that a nested model is called with, in the order of its inputs."""
        inputs = arguments[0] if len(arguments) == 1 else arguments
        listed = settings.get("input_layers")
        if isinstance(inputs, dict):
            names = [name or output.layer for name, output in list_places(listed)] if listed else []
            if not inputs.keys() <= set(names):
                raise _damaged(scope, "inputs by names that the model does not have")
            inputs = [inputs[name] for name in names]
        return [item for item in flatten_operand(inputs) if isinstance(item, Flow)]

    def _opaque(self, call: LayerCall, flows: Sequence[Flow], count: int, missing: str = "") -> list[Flow]:
        """Add a node that is listed by its class and settings, and return its outputs.

        Its attribute `not_understood` names the setting, tensor or argument that is not understood.
        """
        plain = {
            name: value
            for name, value in call.settings.items()
            if isinstance(value, str | int | float | bool) and name not in ("name", "trainable")
        }
        if missing:
            plain["not_understood"] = missing
        if call.cls == "Lambda":
            plain[FUNCTION] = "a Lambda, whose code is not executed"
        # A class of the same name as an operator is not that operator.
        op = f"keras.{call.cls}" if is_known(call.cls) else call.cls
        names = self.build.add(op, [flow.name for flow in flows], count, **plain)
        dtype = next((flow.dtype for flow in flows), "float32")
        return [Flow(name, dtype, masked=any(flow.masked for flow in flows)) for name in names]

    def list_children(self, scope: Sequence[str]) -> list[str]:
        """Return the names below a module of the tree, in the tree's order."""
        if not self.children:
            for path in (*(path for path, _ in self.tree.tensors()), *self.tree.shared):
                for depth, step in enumerate(path):
                    self.children.setdefault(path[:depth], {})[str(step.value)] = None
        return list(self.children.get(tuple(map(attr, scope)), ()))


def _count_outputs(
    layers: Sequence[Mapping[str, Any]], ends: Sequence[LayerOutput]
) -> Mapping[tuple[str, int], int]:
    """Return how many outputs of each call the model uses at least, by layer and number of the call."""
    counts: dict[tuple[str, int], int] = {}
    places = list(ends)
    for layer in layers:
        nodes = layer.get("inbound_nodes")
        for node in nodes if isinstance(nodes, list) else ():
            places += [
                item for item in flatten_operand(list(_read_call(node))) if isinstance(item, LayerOutput)
            ]
    for output in places:
        key = (output.layer, output.call)
        if output.output >= 64:
            raise ValueError(output)
        counts[key] = max(counts.get(key, 1), output.output + 1)
    return counts
