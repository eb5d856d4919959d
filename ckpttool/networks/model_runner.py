"""The process of a model: models and programs in files, and answers to the requests of the parent.

The syntax is Python 3.7's: interpreters of other environments run this code.
"""

# ruff: noqa: UP013  # the types of answers need a line each

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core import sandbox
from ckpttool.core.errors import UnsupportedError, UsageError, WorkerError
from ckpttool.core.graph_layers import GraphLayer, GraphOperation, LayerGrouping
from ckpttool.core.kinds import LAYER_TYPES, gate_order
from ckpttool.networks import model_training
from ckpttool.networks.messages import Message, end_process, list_handlers, message_pipes, serve
from ckpttool.networks.model_child import (
    KerasRunner,
    ModelRunner,
    TensorFlowRunner,
    TorchRunner,
    call_factory,
    is_missing,
    last_error_line,
    layer_row,
    refusals,
    require_model,
    submodule,
    wrap_model,
    zero_initializers,
)
from ckpttool.networks.tracing import (
    ROOT,
    CallRecorder,
    NumbersRecorder,
    OperationRecorder,
    list_tensors,
    paired,
    plain_settings,
    to_array,
    view_array,
)

if TYPE_CHECKING:  # typing.TypedDict is younger than Python 3.7
    from typing import NotRequired, TypedDict

    from ckpttool.networks.messages import (
        CallRow,
        InputRow,
        LayerRow,
        OperationRow,
        RecordedCallRow,
        TensorRow,
    )
    from ckpttool.networks.model_child import BuiltLayer

    Rows = list[Message]
    Names = list[str]
    Input = TypedDict("Input", {"name": str, "shape": list[int], "dtype": str | None})
    Built = TypedDict("Built", {"framework": str, "forms": Names})
    MadeExact = TypedDict("MadeExact", {"made": bool, "reason": str, "copied": NotRequired[bool]})
    Called = TypedDict("Called", {"outputs": Names, "calls": list[CallRow]})
    Repeated = TypedDict("Repeated", {"made": int, "reason": str})
    Opened = TypedDict(
        "Opened",
        {
            "framework": NotRequired[str],
            "inputs": list[InputRow],
            "versions": NotRequired[dict[str, str]],
            "channels": str,
            "observable": NotRequired[bool],
            "notes": NotRequired[Names],
        },
    )
    Limits = list[int | None]
    Prepared = TypedDict("Prepared", {"dtypes": Names, "below": Limits, "notes": Names, "size": int})
    Layers = TypedDict("Layers", {"layers": list[LayerRow]})
    Results = TypedDict("Results", {"outputs": Names})
    Outline = TypedDict("Outline", {"file": str, "whole": bool})
    Operations = TypedDict(
        "Operations",
        {
            "library": str,
            "operations": list[OperationRow],
            "calls": list[RecordedCallRow],
            "values": dict[str, str],
            "written": list[int],
        },
    )
    # What answers the requests of a comparison, whatever computes.
    Answer = Opened | Prepared | Called | Results | MadeExact | Layers

_BATCH = 2


class ScriptRunner(TorchRunner):
    """A TorchScript program, whose calls of modules are extra results of a copy of its graph.

    Hooks do not fire inside a program. A module called in a branch or a loop of the graph is not recorded.
    """

    observe = ModelRunner.observe

    def parameter_names(self) -> list[str]:
        """Return the names of what the program's call receives: its method has no Python signature."""
        return [argument.name for argument in self.model._c._get_method("forward").schema.arguments[1:]]

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs; with a recorder, those of the copy of the graph."""
        if self._recorder is None:
            return super().call(names, arrays, exact=exact)
        model = self.exact if exact else self.model
        tensors = [self.tensor(array, exact=exact) for array in arrays]
        with self._torch.no_grad():
            return self.styles(names, tensors)[self.style](
                lambda *args, **kwargs: self._record(model, "", "forward", _positional(model, args, kwargs))
            )

    def _record(self, module: Any, path: str, method: str, args: list[Any]) -> Any:
        """Call a method of a module and record it, and the calls inside it; return the result."""
        assert self._recorder is not None  # noqa: S101 - set while calls are recorded
        record = self._recorder.enter(path or ROOT, args, {}) if method.startswith("forward") else None
        observed, calls = _observed_method(self._torch, module._c._get_method(method))
        values: list[Any]
        result, *values = observed(module, *args) if calls else (getattr(module, method)(*args),)
        for name, inner, count in calls:
            arguments, values = list(values[:count]), values[count:]
            part = submodule(module, name)
            below = ".".join(filter(None, (path, name)))
            nodes = part._c._get_method(inner).graph.nodes()
            if any(node.kind() == "prim::CallMethod" for node in nodes):
                self._record(part, below, inner, arguments)
            elif inner.startswith("forward"):
                self._recorder.leave(self._recorder.enter(below, arguments, {}), values[0])
            values = values[1:]
        if method.startswith("forward"):
            self._recorder.leave(record, result)
        return result


def _positional(model: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of a program's forward method by position, defaults included."""
    rest = model._c._get_method("forward").schema.arguments[1 + len(args) :]
    arguments = [argument for argument in rest if argument.name in kwargs or argument.has_default_value()]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in arguments)]


def _module_path(value: Any) -> str:
    """Return the path of the module that a value of a graph is, from the graph's own module."""
    steps = []  # type: list[str]
    while value.node().kind() == "prim::GetAttr":
        steps.insert(0, value.node().s("name"))
        value = value.node().input()
    return ".".join(steps)


def _observed_method(torch: Any, method: Any) -> tuple[Any, list[tuple[str, str, int]]]:
    """Return a method that also returns inputs and results of the calls in it, and those calls in order.

    A call is the module's path, the method, and the number of inputs.
    """
    graph = method.graph.copy()
    calls = []
    for node in list(graph.nodes()):
        if node.kind() == "prim::CallMethod":
            module, *arguments = node.inputs()
            calls.append((_module_path(module), node.s("name"), len(arguments)))
            for value in (*arguments, node.output()):
                graph.registerOutput(value)
    if not calls:
        return None, []
    graph.makeMultiOutputIntoTuple()
    return torch._C._create_function_from_graph("observed", graph), calls


class SignatureRunner(TensorFlowRunner):
    """A signature of a SavedModel: its layers are groups of operations of its graph."""

    observe = ModelRunner.observe

    def __init__(self, loaded: Any, name: str) -> None:
        super().__init__(loaded.signatures[name])
        self._loaded = loaded  # the variables end with it
        self._graph: Any = None
        self._stored: dict[str, Any] = {}
        self._groups: dict[str, GraphLayer] = {}
        try:
            self._find_layers()
        except Exception:  # noqa: BLE001 - a graph that cannot be copied still runs as a whole
            self.observable = False
            self._groups = {}

    def _find_layers(self) -> None:
        """Copy the graph with all functions inlined, and group its operations."""
        convert = importlib.import_module("tensorflow.python.framework.convert_to_constants")
        names = {id(variable.handle): variable.name for variable in self.model.variables}
        titles = {
            inner.op.name: names[id(outer)]
            for outer, inner in self.model.graph.captures
            if id(outer) in names
        }
        self._graph = convert.convert_variables_to_constants_v2(self.model, lower_control_flow=False)
        operations, weights, constants = [], set(), set()
        for node in self._graph.graph.get_operations():
            if node.type == "Const":
                constants.add(node.outputs[0].name)
                several = node.outputs[0].shape.num_elements() > 1 or node.name in titles
                if node.outputs[0].dtype.is_floating and several:
                    weights.add(node.outputs[0].name)
            else:
                gives = [value.name for value in node.outputs]
                takes = [value.name for value in node.inputs]
                operations.append(
                    GraphOperation(node.name, node.type, takes, gives, _operation_settings(node))
                )
        outputs = [value.name for value in self._graph.outputs]
        grouped = LayerGrouping(operations, constants, weights, outputs).layers()
        self._groups = {layer.path: layer for layer in grouped}
        for name in dict.fromkeys(name for layer in grouped for name in layer.stored):
            title = titles.get(name.partition(":")[0], name).partition(":")[0].rpartition("/")[2]
            if title.startswith(("Variable", "unknown")):
                rank = len(self._graph.graph.get_tensor_by_name(name).shape)
                title = "kernel" if rank > 1 else "bias"
            self._stored[name] = title

    def inputs(self) -> list[InputRow]:
        """Return the signature's inputs."""
        specs = self.model.structured_input_signature[1].items()
        known = {name: spec.shape.as_list() for name, spec in specs if spec.shape.rank is not None}
        return [_declared_input(name, known.get(name), spec.dtype.name) for name, spec in specs]

    def styles(self, names: list[str], inputs: list[Any]) -> list[Callable[[Any], Any]]:
        """Return the only way: by name, in the dtypes of the signature."""
        tensorflow: Any = sys.modules["tensorflow"]
        specs = self.model.structured_input_signature[1]
        by_name = {name: tensorflow.cast(array, specs[name].dtype) for name, array in paired(names, inputs)}
        return [lambda f: f(**by_name)]

    def _named(self, layer: GraphLayer) -> dict[str, str]:
        """Return the constants of a layer by the names of their variables."""
        constants: dict[str, str] = {}
        for name in layer.stored:
            title = self._stored[name]
            constants[title if title not in constants else f"{title}_{len(constants)}"] = name
        return constants

    def layers(self) -> list[BuiltLayer]:
        """Return every group of operations with its weights."""
        values = {name: self._value(name) for name in self._stored}
        named = {
            path: {title: values[name] for title, name in self._named(group).items()}
            for path, group in self._groups.items()
        }
        return [
            layer_row(path, group.cls, group.settings, named[path]) for path, group in self._groups.items()
        ]

    def _value(self, name: str) -> Any:
        tensorflow: Any = sys.modules["tensorflow"]
        operation = self._graph.graph.get_operation_by_name(name.partition(":")[0])
        return tensorflow.make_ndarray(operation.get_attr("value"))

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the signature's outputs; with a recorder, the values between layers are computed, too."""
        if self._recorder is not None:
            self._record(self._recorder, names, arrays)
        outputs = super().call(names, arrays, exact=exact)
        # TensorFlow sorts them: output_10 before output_2.
        return dict(sorted(outputs.items(), key=lambda item: (len(item[0]), item[0])))

    def _values(self, names: list[str], arrays: list[Any], requested: Iterable[str]) -> dict[str, Any]:
        """Compute values of the graph by name; return those of its inputs, too."""
        feeds_by_name = dict(paired(names, arrays))
        specs = self.model.structured_input_signature[1]
        values = {specs[name].name + ":0": self.tensor(feeds_by_name[name], exact=False) for name in names}
        fetches = [name for name in dict.fromkeys(requested) if name and name not in values]
        graph, feeds = self._graph.graph, list(self._graph.inputs)
        run = self._graph.prune(feeds, [graph.get_tensor_by_name(name) for name in fetches])
        return dict(values, **dict(paired(fetches, run(*[values[feed.name] for feed in feeds]))))

    def record_operations(
        self, recorder: OperationRecorder, names: list[str], arrays: list[Any], *, exact: bool
    ) -> str:
        """Compute all values of the graph; record its operations and groups."""
        del exact
        if not self.observable:
            return ""
        nodes = [n for n in self._graph.graph.get_operations() if n.type not in ("Placeholder", "Const")]
        tensors = (tensor.name for node in nodes for tensor in (*node.inputs, *node.outputs))
        values = self._values(names, arrays, tensors)

        def read(tensors: Any) -> list[Any]:
            return [values[tensor.name] for tensor in tensors]

        rows = ((node.type, read(node.inputs), read(node.outputs)) for node in nodes)
        groups = (
            (path, [values[name] for name in x.inputs], values[x.gives]) for path, x in self._groups.items()
        )
        recorder.record_graph((read(self._graph.inputs), read(self._graph.outputs)), rows, groups)
        return "tensorflow"

    def _record(self, recorder: CallRecorder, names: list[str], arrays: list[Any]) -> None:
        """Compute the values between the layers."""
        groups = self._groups.values()
        requested = (name for group in groups for name in (*group.inputs, group.before, group.gives))
        values = self._values(names, arrays, requested)
        for path, group in self._groups.items():
            record = recorder.enter(path, tuple(values[name] for name in group.inputs), {})
            if record is not None and group.before:
                recorder.before_activation(record, values[group.before])
            recorder.leave(record, values[group.gives])

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return the value that a layer gives with other weights; its attributes are fixed."""
        del exact
        layer = self._groups[path]
        end = layer.gives
        if changes["settings"].get("activation") == "linear":
            end = layer.before or end
        elif changes["settings"]:
            raise UnsupportedError("operations of a graph have fixed attributes")
        names = self._named(layer)
        graph = self._graph.graph
        feeds = [*layer.inputs, *(names[title] for title in changes["tensors"])]
        arrays = [*call[0], *changes["tensors"].values()]
        run = self._graph.prune(
            [graph.get_tensor_by_name(feed) for feed in feeds], graph.get_tensor_by_name(end)
        )
        return run(*[self.tensor(np.asarray(array), exact=False) for array in arrays])

    def make_exact(self, names: list[str], arrays: list[Any], *, copied: bool) -> None:
        """Raise UnsupportedError: the graph has fixed dtypes."""
        del names, arrays, copied
        raise UnsupportedError("the operations of a SavedModel have the dtypes of its graph")

    def channels(self) -> str:
        """Return the data format of the first convolution in the graph."""
        definition = self.model.graph.as_graph_def()
        functions = [function.node_def for function in definition.library.function]
        for node in itertools.chain(definition.node, *functions):
            if node.op.startswith(("Conv", "DepthwiseConv")) and "data_format" in node.attr:
                return "last" if node.attr["data_format"].s.endswith(b"C") else "first"
        return ""


_ATTRIBUTES = {"strides": "strides", "dilations": "dilations", "ksize": "pool_size"}


def _operation_settings(operation: Any) -> dict[str, Any]:
    """Return the settings of a TensorFlow operation in the form of Keras's."""
    attributes = operation.node_def.attr
    settings: dict[str, Any] = {}
    if "padding" in attributes and attributes["padding"].s in (b"SAME", b"VALID"):
        settings["padding"] = attributes["padding"].s.decode().lower()
    if "epsilon" in attributes:
        settings["epsilon"] = attributes["epsilon"].f
    for name, title in _ATTRIBUTES.items():
        numbers = [int(number) for number in attributes[name].list.i] if name in attributes else []
        if len(numbers) > 2:
            settings[title] = numbers[2:] if attributes["data_format"].s.startswith(b"NC") else numbers[1:-1]
    return settings


_MOST_EXACT = 1 << 22
# Operators whose result is another form of a weight, or a part; whose result is a size; and that weigh.
_FORMS = ("Cast", "DequantizeLinear", "Identity", "Reshape", "Transpose")
_PARTS = ("Concat", "Gather", "Slice", "Split", "Squeeze", "Unsqueeze")
_SIZES = ("Shape", "Size")
# The weights of recurrent operators by their inputs, as PyTorch calls them, and the ends of both directions.
_CELL_TENSORS, _WAYS = (("weight_ih",), ("weight_hh",), ("bias_ih", "bias_hh")), ("", "_reverse")
# Those of queries, keys and values in one, of the scores, of the values, and of the results.
_FEWEST_PRODUCTS = 4
_WEIGHED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Attributes of ONNX that are yes or no.
_FLAGS = ("keepdims", "allowzero", "noop_with_empty_axes", "transA", "transB", "ceil_mode", "exclusive")


class OnnxRunner(ModelRunner):
    """An ONNX model, run by onnxruntime, or by the onnx library's reference evaluator."""

    framework = "onnx"
    libraries = ("onnxruntime", "onnx")

    def __init__(self, file: str) -> None:
        try:
            import onnx
        except ImportError:
            raise UsageError(
                "the onnx library is not installed in this environment", hint="pip install onnx onnxruntime"
            ) from None
        super().__init__(onnx.load(file))
        self._onnx = onnx
        array = onnx.numpy_helper.to_array
        self._stored = {constant.name: array(constant) for constant in self.model.graph.initializer}
        self._run = self._session(self.model)
        self._feeds: dict[str, Any] = {}
        self._computed: dict[str, Any] = {}
        self._cells = {
            op: row.name
            for row in LAYER_TYPES.values()
            if row.family == "recurrent"
            for op in row.onnx
            if row.name != "gru_reset_before"
        }
        self._nodes = list(self._layer_nodes())

    def _session(self, model: Any) -> Any:
        try:
            import onnxruntime
        except ImportError:
            return self._evaluator(model)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        data = model.SerializeToString()
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run

    @staticmethod
    def _evaluator(model: Any) -> Any:
        """Return what runs a model in the dtypes of its inputs: onnx's own evaluator, in NumPy."""
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model).run

    def make_exact(self, names: list[str], arrays: list[Any], *, copied: bool) -> None:
        """Create a copy with constants and casts in float64 for onnx's own evaluator, which is slow."""
        del names, arrays, copied
        if sum(constant.size for constant in self._stored.values()) > _MOST_EXACT:
            raise UnsupportedError("the model is too large for the float64 evaluator of onnx")
        exact = copy.deepcopy(self.model)
        for constant in exact.graph.initializer:
            constant.CopyFrom(self._in_float64(constant))
        for node in exact.graph.node:
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i == 1:
                    attribute.i = 11
                elif attribute.name == "value" and attribute.t.data_type == 1:
                    attribute.t.CopyFrom(self._in_float64(attribute.t))
        self.exact = exact

    def _in_float64(self, tensor: Any) -> Any:
        numbers = self._onnx.numpy_helper
        if tensor.data_type != 1:
            return tensor
        return numbers.from_array(numbers.to_array(tensor).astype(np.float64), tensor.name)

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return the results of a node with other constants or attributes."""
        row = next(node for node in self._nodes if node["path"] == path)
        make, layer_inputs = self._onnx.helper, dict(paired(row["takes"], call[0]))
        whole = (self.exact if exact else self.model).graph.node  # in float64 with other casts and constants
        first = {id(part): number for number, part in enumerate(self.model.graph.node)}
        nodes = [copy.deepcopy(whole[first[id(part)]]) for part in row["parts"]]
        for name, value in changes["settings"].items():
            kept = [attribute for attribute in nodes[0].attribute if attribute.name != name]
            del nodes[0].attribute[:]
            nodes[0].attribute.extend([*kept, make.make_attribute(name, value)])
        float_type = call[0][0].dtype
        inside = {name for part in row["parts"] for name in part.output}
        outside = {name for part in row["parts"] for name in part.input if name} - inside - {*row["takes"]}
        constants = dict(self._constants(outside), **self._packed(row, changes["tensors"]))
        initializers = []
        for name, value in constants.items():
            array = np.asarray(value)
            array = array.astype(float_type) if array.dtype.kind == "f" else array
            initializers.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        takes = [
            make.make_tensor_value_info(name, make.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in layer_inputs.items()
        ]
        gives = [self._onnx.ValueInfoProto(name=name) for name in row["gives"]]
        graph = make.make_graph(nodes, "layer", takes, gives, initializers)
        model = make.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        run = self._evaluator(model) if exact else self._session(model)
        return run(None, layer_inputs)

    def inputs(self) -> list[InputRow]:
        """Return the graph's inputs without initializers."""
        rows = []
        for value in self.model.graph.input:
            if value.name in self._stored:
                continue
            kind = value.type.tensor_type
            shape = [int(d.dim_value) if d.dim_value else None for d in kind.shape.dim]
            known = shape if kind.HasField("shape") else None
            dtype = "string"
            if kind.elem_type != self._onnx.TensorProto.STRING:
                dtype = str(self._onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name)
            rows.append(_declared_input(value.name, known, dtype))
        return rows

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs; with a recorder, every layer's inputs and output, too."""
        feeds = dict(paired(names, [self.tensor(array, exact=exact) for array in arrays]))
        outputs = [output.name for output in self.model.graph.output]
        self._feeds = (
            feeds if not exact else dict(paired(names, [self.tensor(x, exact=False) for x in arrays]))
        )
        if self._recorder is None:
            run = self._evaluator(self.exact) if exact else self._run
            return dict(paired(outputs, run(None, feeds)))
        requested = (name for row in self._nodes for name in (*row["takes"], *row["gives"]))
        known = self._values(feeds, requested, exact=exact)
        for row in self._nodes:
            inputs, results = ([known.get(name) for name in row[side]] for side in ("takes", "gives"))
            if not any(value is None for value in (*inputs, *results)):
                self._recorder.leave(self._recorder.enter(row["path"], tuple(inputs), {}), results)
        # A session of its own would begin again with the seeds of random operations.
        return (
            {name: known[name] for name in outputs}
            if exact
            else dict(paired(outputs, self._run(None, feeds)))
        )

    def _values(self, feeds: dict[str, Any], requested: Iterable[str], *, exact: bool) -> dict[str, Any]:
        """Compute values of the graph by name; return its inputs and outputs, too."""
        observed = copy.deepcopy(self.exact if exact else self.model)
        outputs = [output.name for output in observed.graph.output]
        fetches = [n for n in dict.fromkeys(requested) if n and n not in feeds and n not in outputs]
        observed.graph.output.extend(self._onnx.ValueInfoProto(name=name) for name in fetches)
        run = self._evaluator(observed) if exact else self._session(observed)
        return dict(feeds, **dict(paired([*outputs, *fetches], run(None, feeds))))

    def record_operations(
        self, recorder: OperationRecorder, names: list[str], arrays: list[Any], *, exact: bool
    ) -> str:
        """Compute all values of the graph; record its nodes with their attributes."""
        value, graph = self._onnx.helper.get_attribute_value, self.model.graph
        feeds = dict(paired(names, [self.tensor(array, exact=exact) for array in arrays]))
        requested = (name for node in graph.node for name in node.output)
        values = dict(self._stored, **self._values(feeds, requested, exact=exact))
        nodes = []
        for node in graph.node:
            settings = plain_settings({item.name: value(item) for item in node.attribute})
            shown = [bool(item) if name in _FLAGS else item for name, item in settings.items()]
            inputs, outputs = ([values.get(name) for name in part] for part in (node.input, node.output))
            if node.op_type != "Constant":
                nodes.append((node.op_type, [*inputs, *shown], outputs))
        ends = list(feeds.values()), [values[output.name] for output in graph.output]
        layers = (
            (row["path"], [values[name] for name in row["takes"]], [values[name] for name in row["gives"]])
            for row in self._nodes
        )
        recorder.record_graph(ends, nodes, layers)
        return "onnx"

    def _layer_nodes(self) -> Iterator[dict[str, Any]]:
        nodes = list(self.model.graph.node)
        users: dict[str, list[Any]] = {}
        for node in nodes:
            for name in node.input:
                users.setdefault(name, []).append(node)
        merged: set[int] = set()
        # Values that no input's numbers change, and the initializers of which they are forms or parts.
        fixed = dict({name: [name] for name in self._stored}, **{"": []})
        blocks = self._attention_blocks()
        inner = {number: scope for scope, numbers in blocks.items() for number in numbers}
        for number, node in enumerate(nodes):
            cell = self._cells.get(node.op_type, "")
            parts, takes = [node], [name for name in dict.fromkeys(node.input) if name not in fixed]
            if node.op_type in _SIZES or not takes:
                whole = node.op_type in (*_FORMS, *_PARTS)
                sources = [source for name in node.input for source in fixed.get(name, ())] if whole else []
                fixed.update((name, sources) for name in node.output)
            scope = inner.get(number, "")
            if scope and number == blocks[scope][-1]:
                yield self._attention_row(scope, [nodes[n] for n in blocks[scope]], fixed, users)
            if scope or number in merged or not node.output or node.output[0] in fixed:
                continue
            gives = [name for name in node.output if name] if cell else [node.output[0]]
            own = {} if cell else self._titles(node.input, fixed, forms=node.op_type in _WEIGHED)
            after = users.get(gives[0], [])
            if node.op_type == "MatMul" and len(after) == 1 and after[0].op_type == "Add":
                biases = [name for name in after[0].input if name in fixed]
                if own and biases:
                    own.update(self._titles(biases, fixed, forms=True))
                    gives = [after[0].output[0]]
                    merged.add(nodes.index(after[0]))
                    parts.append(after[0])
            path = node.name or f"{node.op_type}_{number}"
            yield {
                "path": path,
                "class": node.op_type,
                "node": node,
                "parts": parts,
                "held": own,
                "cell": cell,
                # Of other operators the first input is compared, and of cells the states, too.
                "takes": takes if cell else takes[:1] or [""],
                "gives": gives,
            }

    def _attention_blocks(self) -> dict[str, list[int]]:
        """Return the nodes of each attention that a module computes by itself, by the module's scope.

        PyTorch exports a module's nodes under its path: weighed products, and a softmax between two others.
        """
        scopes: dict[str, list[Any]] = {}
        nodes = list(self.model.graph.node)
        for node in nodes:
            scopes.setdefault(node.name.rpartition("/")[0], []).append(node)
        blocks: dict[str, list[int]] = {}
        for scope, own in scopes.items():
            kinds = [node.op_type for node in own]
            products = sum(kind in ("MatMul", "Gemm") for kind in kinds)
            if scope and "Softmax" in kinds and products >= _FEWEST_PRODUCTS:
                inside = (n for n, node in enumerate(nodes) if node.name.startswith(scope + "/"))
                blocks[scope] = list(inside)
        return blocks

    def _attention_row(
        self, scope: str, parts: list[Any], fixed: dict[str, list[str]], users: Any
    ) -> Message:
        """Return the row of an attention; its tensors have the names and the form of PyTorch's module."""
        module = scope.rpartition("/")[2] + "."
        inside = {name for part in parts for name in part.output}
        inputs = [name for name in dict.fromkeys(name for part in parts for name in part.input) if name]
        results = {output.name for output in self.model.graph.output}
        members = {id(part) for part in parts}
        gives = [
            name
            for part in parts
            for name in part.output
            if name not in fixed
            and (name in results or any(id(user) not in members for user in users.get(name, ())))
        ]
        own, turned = {}, []
        for name in inputs:
            array = self._stored.get(name)
            if array is None or array.dtype.kind != "f" or array.size < 2:
                continue
            title = name.rpartition(module)[2].replace(".", "/")
            if module not in name and array.ndim == 2 and array.shape[1] == 3 * array.shape[0]:
                title = "in_proj_weight"  # the exporter has transposed it
                turned.append(title)
            own[title] = name
        return {
            "path": scope,
            "class": "Attention",
            "node": None,
            "parts": parts,
            "held": own,
            "turned": turned,
            "cell": "",
            "takes": [name for name in inputs if name not in fixed and name not in inside],
            "gives": gives,
        }

    def _titles(self, inputs: Any, fixed: dict[str, list[str]], *, forms: bool) -> dict[str, str]:
        """Return a node's constants that are tensors: names of initializers, and those of their forms."""
        titles: dict[str, str] = {}
        for name in inputs:
            sources = [source for source in fixed.get(name, ()) if self._stored[source].dtype.kind == "f"]
            if name in self._stored:
                titles[name] = name
            elif forms and len(sources) == 1:
                titles[sources[0]] = name
            elif sources and not forms:
                titles.update((source, source) for source in sources)
        return titles

    def _constants(self, names: Iterable[str]) -> dict[str, Any]:
        """Return values that no input's numbers change.

        Those that the graph computes, e.g. from sizes, are those of the last call, and missing before it.
        """
        requested = list(names)
        computed = [name for name in requested if name not in self._stored and name not in self._computed]
        values = self._values(self._feeds, computed, exact=False) if computed and self._feeds else {}
        known = dict(self._stored, **dict(self._computed, **values))
        return {name: known[name] for name in requested if name in known}

    def _tensor_inputs(self, row: Message) -> list[str]:
        """Return the values of a graph that are the tensors of a layer."""
        return (
            [name for name in row["node"].input[1:4] if name] if row["cell"] else list(row["held"].values())
        )

    def _tensors(self, row: Message) -> dict[str, Any]:
        """Return the tensors of a layer; those of a cell have PyTorch's names and order of gates."""
        names = self._tensor_inputs(row)
        values = self._constants(names)
        if not row["cell"]:
            turned = row.get("turned", ())
            return {
                title: values[name].T if title in turned else values[name]
                for title, name in row["held"].items()
                if name in values
            }
        if len(values) < len(names):
            return {}
        order = gate_order(row["cell"], "onnx", "torch")
        tensors: dict[str, Any] = {}
        for name, titles in paired(names, _CELL_TENSORS):
            for way, array in paired(_WAYS, values[name]):
                for title, half in paired(titles, np.split(array, len(titles))):
                    blocks = np.split(half, len(order))
                    tensors[f"{title}_l0{way}"] = np.concatenate([blocks[index] for index in order])
        return tensors

    def _packed(self, row: Message, changes: dict[str, Any]) -> dict[str, Any]:
        """Return changed tensors of a layer by the names of the node's inputs."""
        if not row["cell"]:
            turned = row.get("turned", ())
            return {
                row["held"].get(title, title): array.T if title in turned else array
                for title, array in changes.items()
            }
        tensors = dict(self._tensors(row), **changes)
        order, packed = gate_order(row["cell"], "torch", "onnx"), {}
        names = self._tensor_inputs(row)
        for name, titles in paired(names, _CELL_TENSORS):
            ways = [way for way in _WAYS if f"{titles[0]}_l0{way}" in tensors]
            rows = [[np.split(tensors[f"{title}_l0{way}"], len(order)) for title in titles] for way in ways]
            packed[name] = np.stack(
                [np.concatenate([half[n] for half in own for n in order]) for own in rows]
            )
        return packed

    def layers(self) -> list[BuiltLayer]:
        """Return every node with its constants and attributes."""
        value, rows = self._onnx.helper.get_attribute_value, []
        self._computed = self._constants({name for row in self._nodes for name in self._tensor_inputs(row)})
        for node in self._nodes:
            attributes = node["node"].attribute if node["node"] is not None else ()
            settings = plain_settings({one.name: value(one) for one in attributes})
            rows.append(layer_row(node["path"], node["class"], settings, self._tensors(node)))
        return rows


def _declared_input(name: str, shape: Any, dtype: str) -> InputRow:
    """Return an input of a graph; raise UnsupportedError for one that cannot get rows of numbers."""
    if dtype == "string":
        raise UnsupportedError("an input of strings has no random values", path=name, found=dtype)
    if not shape:
        text = "no number of axes" if shape is None else "a single number"
        raise UnsupportedError("every input must have a batch as its first axis", path=name, found=text)
    # NumPy has no bfloat16: the framework rounds.
    known = "float32" if dtype == "bfloat16" else dtype
    return {"name": name, "shape": list(shape[1:]), "dtype": known, "batch": shape[0]}


def open_keras(file: str, version: str, *, run_code: bool) -> KerasRunner:
    """Open a `.keras` or `.h5` model that a version of Keras wrote.

    The caller has audited the configuration: without `run_code` it names plain classes of Keras only.
    """
    keras = _import_keras(version)
    options: dict[str, Any] = {"compile": False}
    # Keras 2 before 2.13 runs any code of a file: the audit is the only protection there.
    if "safe_mode" in inspect.signature(keras.models.load_model).parameters:
        options["safe_mode"] = not run_code
    # Own classes may leave variables out of the file, and own initializers may count on drawn numbers.
    drawing = contextlib.nullcontext() if run_code else zero_initializers(keras)
    with refusals("Keras cannot open the model", file), drawing:
        return KerasRunner(keras.models.load_model(file, **options))


def _import_keras(version: str) -> Any:
    """Return the Keras that wrote the file, by its version; else the installed one."""
    names = ["keras", "tf_keras"]
    if version.startswith(("0.", "1.", "2.")):
        names.reverse()
    first: ImportError | None = None
    for name in names:
        try:
            return _import_without_pictures(name)
        except ImportError as error:
            first = first or error
    assert first is not None  # noqa: S101 - both imports failed
    raise UsageError(
        f"Keras cannot be imported in this environment: {last_error_line(first)}",
        hint="use --python-a or --python-b INTERPRETER to select that of another environment",
    ) from first


def _import_without_pictures(name: str) -> Any:
    """Import Keras without what it imports for pictures of data sets only, in a sixth of its own time."""
    known = name in sys.modules
    with _without_collector(), contextlib.ExitStack() as undo:
        for module in ("matplotlib", "cv2"):
            if module not in sys.modules:
                sys.modules[module] = None  # type: ignore[assignment]
                undo.callback(sys.modules.pop, module)
        keras = importlib.import_module(name)
        if not known:
            gc.freeze()  # later collections leave out what was imported
    return keras


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Collect no cycles of objects in the block: importing a framework leaves few among a million objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def open_saved_model(file: str) -> SignatureRunner:
    """Open a SavedModel's serving signature, or its only one."""
    import tensorflow

    loaded = tensorflow.saved_model.load(file)
    names = list(loaded.signatures)
    usual = [name for name in ("serving_default", "serve") if name in names]
    if not names:
        raise UsageError(
            "the SavedModel has no signature, which names its inputs and outputs",
            file=file,
            hint="save it with one: tf.saved_model.save(model, folder, signatures=function), or compare its "
            "checkpoint in your own model with --like-a or --like-b",
        )
    chosen = (usual or names)[0]
    runner = SignatureRunner(loaded, chosen)
    left = [name for name in names if name != chosen]
    if left:
        runner.notes.append(f"signature {chosen} is compared, not {', '.join(left)}")
    return runner


class ModelSession:
    """The model of a process, which may be filled before it runs. `kept` calls may be repeated."""

    def __init__(self, folder: Path, model: Any = None) -> None:
        self.folder = folder
        self.runner = ModelRunner(None) if model is None else wrap_model(model)
        self.kept: dict[tuple[str, int], tuple[Any, Any]] = {}
        self.trainer: Any = None
        self._layers: list[BuiltLayer] | None = None

    def list_layers(self) -> list[BuiltLayer]:
        """Return the layers of the prepared model: the first call may create some."""
        if self._layers is None:
            self._layers = self.runner.layers()
        return self._layers

    def inputs(self, count: int) -> list[Any]:
        """Return the inputs that the parent wrote."""
        return [np.load(self.folder / f"input-{index}.npy", allow_pickle=False) for index in range(count)]


def _build(session: ModelSession, factory: str, arguments: Any) -> Built:
    """Create the user's model; raise UsageError if the factory does not return one."""
    with _without_collector():
        model = call_factory(factory, arguments)
    require_model(
        model,
        f"{factory} does not return a model",
        "name the class of the model, or a function that returns it: MODULE:NAME",
    )
    session.runner = wrap_model(model, lambda: call_factory(factory, arguments))
    return {"framework": session.runner.framework, "forms": list(session.runner.forms)}


def _describe(session: ModelSession, shapes: list[list[int]], guessed: list[list[int]]) -> dict[str, Rows]:
    """Return every module, with the facts of a call if one was made."""
    called = session.runner.build(shapes, guessed)
    return {"modules": session.runner.describe(called)}


def _outline(session: ModelSession, file: str, form: str) -> Outline:
    path, whole = session.runner.outline(file, form)
    return {"file": path, "whole": whole}


def _load(session: ModelSession, file: str, form: str, optimizers: list[dict[str, Any]]) -> Message:
    try:
        session.runner.fill(file, form, optimizers)
    except Exception as error:
        raise WorkerError("the model cannot load the written file: " + last_error_line(error)) from error
    return {}


def _open(
    session: ModelSession,
    kind: str,
    file: str = "",
    version: str | None = None,
    factory: str | None = None,
    arguments: Any = None,
    *,
    run_code: bool = False,
) -> Opened:
    runner = session.runner
    if kind == "factory":
        if runner.model is None:
            _build(session, str(factory), arguments)
            runner = session.runner
    elif kind == "keras":
        runner = open_keras(file, version or "", run_code=run_code)
    elif kind == "torchscript":
        torch: Any = importlib.import_module("torch")
        runner = ScriptRunner(torch.jit.load(file, map_location="cpu"))
    elif kind == "saved_model":
        runner = open_saved_model(file)
    else:
        runner = OnnxRunner(file)
    session.runner = runner
    return {
        "framework": runner.framework,
        "inputs": runner.inputs(),
        "versions": runner.versions(),
        "channels": runner.channels() if runner.framework != "keras" or runner.model.built else "",
        "observable": runner.observable,
        "notes": runner.notes,
    }


def _prepare(
    session: ModelSession,
    inputs: list[Input],
    batch: int | None,
    file: str | None,
    part: str | None,
    rounded: str | None,
    *,
    run_code: bool,
) -> Prepared:
    """Find how the model is called and which inputs are integers; load the file strictly."""
    runner = session.runner
    lazy = runner.framework != "torch" or any(
        is_missing(tensor) for tensor in itertools.chain(runner.model.parameters(), runner.model.buffers())
    )

    def load() -> list[str]:
        sandbox.confine()
        return runner.load(str(file), part, run_code=run_code)

    notes = [] if lazy or not file else load()
    chosen, ids = _first_call(runner, inputs, batch or _BATCH)
    if lazy and file:
        notes = load()
    if rounded is not None:
        _round(runner, rounded)
    tensors = (tensor for row in session.list_layers() for tensor in row["tensors"].values())
    size = sum(int(np.prod(tensor.shape)) for tensor in tensors)
    protections = sandbox.protections()
    missing = sandbox.describe_missing("its process", protections.missing if protections else {})
    notes += [missing] if missing else []
    return {"dtypes": chosen, "below": ids, "notes": notes, "size": size}


def _round(runner: ModelRunner, dtype: str) -> None:
    try:
        runner.round_weights(dtype)
    except Exception as error:
        raise UnsupportedError(
            f"the model's weights cannot be rounded to {dtype}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, UnsupportedError) else last_error_line(error)


def _first_call(runner: ModelRunner, inputs: list[Input], batch: int) -> tuple[list[str], list[int | None]]:
    """Call the model in the first way that works; return the inputs' dtypes, and the limits of integers."""

    def attempt(names: list[str], inputs: list[Any]) -> tuple[list[str], list[int | None]]:
        return [array.dtype.name for array in inputs], _embedding_rows(runner, names, inputs)

    result: tuple[list[str], list[int | None]] = runner.call_first(
        attempt,
        [row["shape"] for row in inputs],
        {row["name"]: row["dtype"] for row in inputs},
        lambda shape, dtype, index: _pattern([batch, *shape], dtype, index),
        "pass the shape of each input without the batch: --input-shape N,N,... or NAME=N,N,...",
    )
    return result


def _pattern(shape: list[int], dtype: str, index: int) -> Any:
    """Return zeros and ones, valid for every embedding with two rows; others for every input."""
    return np.random.RandomState(index).randint(0, 2, shape).astype(dtype)


_ROWS = ("num_embeddings", "input_dim")
_MOST_ROWS = 1 << 18


def _embedding_rows(runner: ModelRunner, names: list[str], inputs: list[Any]) -> list[int | None]:
    """Call the model; return per input how many integers it accepts, None if there is no limit.

    That is the number of rows of the embedding that receives the input. Where none does, the model itself is
    called with larger and larger integers.
    """
    recorder = _EmbeddingRecorder(inputs)
    with runner.observe(recorder):
        runner.call(names, inputs)
    sizes: list[int | None] = [None] * len(inputs)
    embeddings = (
        layer for layer in runner.layers() if "Embedding" in layer["class"] or layer["class"] == "Gather"
    )
    rows = {embedding["path"]: _row_count(embedding) for embedding in embeddings}
    for path, index in recorder.hits:
        size = rows.get(path)
        if size is not None:
            sizes[index] = min(size, sizes[index] or size)
    return [
        _accepted_integers(runner, names, inputs, index)
        if size is None and array.dtype.kind in "iu"
        else size
        for index, (size, array) in enumerate(paired(sizes, inputs))
    ]


def _accepted_integers(runner: ModelRunner, names: list[str], inputs: list[Any], index: int) -> int | None:
    """Return the number below which the model accepts integers for an input, None without a limit."""

    def accepts(value: int) -> bool:
        changed = inputs[index].copy()
        changed.reshape(-1)[-1:] = value
        try:
            runner.call(names, [*inputs[:index], changed, *inputs[index + 1 :]])
        except Exception:  # noqa: BLE001 - whatever a look-up out of range raises
            return False
        return True

    low, high = 1, 2
    while high <= min(_MOST_ROWS, int(np.iinfo(inputs[index].dtype).max)):
        if not accepts(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if accepts(middle) else (low, middle)
            return high
        low, high = high, 2 * high
    return None


def _row_count(layer: BuiltLayer) -> int | None:
    stated = [layer["settings"].get(name) for name in _ROWS]
    tables = [int(tensor.shape[0]) for tensor in layer["tensors"].values() if len(tensor.shape) == 2]
    return next((number for number in (*stated, *tables) if isinstance(number, int)), None)


class _EmbeddingRecorder(CallRecorder):
    """Records which layers receive a model's inputs unchanged."""

    def __init__(self, inputs: list[Any]) -> None:
        super().__init__()
        self._inputs = inputs
        self.hits: list[tuple[str, int]] = []

    def enter(self, path: str, args: Any, kwargs: Any, module: Any = None) -> None:
        """Compare the layer's first tensor with the model's inputs."""
        del module
        for tensor in list_tensors((args, kwargs))[:1]:
            with contextlib.suppress(Exception):
                array = to_array(tensor)
                places = [
                    index
                    for index, input_ in enumerate(self._inputs)
                    if array.shape == input_.shape and np.array_equal(array, input_)
                ]
                # Inputs of few numbers may be equal: which one it is remains open.
                self.hits += [(path, index) for index in places[:1] if len(places) == 1]


def _exact(session: ModelSession, names: list[str], *, copied: bool) -> MadeExact:
    """Create the float64 form of the model and return whether it exists."""
    try:
        session.runner.make_exact(names, session.inputs(len(names)), copied=copied)
    except Exception as error:  # noqa: BLE001 - a model without such a form is compared in float32
        return {"made": False, "reason": _reason(error)}
    return {"made": True, "reason": "", "copied": session.runner.exact is not session.runner.model}


def _run(session: ModelSession, names: list[str], *, exact: bool, observe: bool) -> Called:
    """Call the model; write its outputs, and return the calls of its layers."""
    runner, inputs = session.runner, session.inputs(len(names))
    recorder = CallRecorder()
    with _model_errors():
        if observe:
            with runner.observe(recorder, exact=exact):
                result = runner.call(names, inputs, exact=exact)
        else:
            result = runner.call(names, inputs, exact=exact)
        outputs = _write_outputs(session, result)
    return {"outputs": outputs, "calls": recorder.calls}


_PIECE = 1 << 20  # bytes


def _put(session: ModelSession, keys: list[str | int]) -> Message:
    """Give the values that the parent wrote to the model's tensors."""
    names = {key: session.folder / f"value-{index}.npy" for index, key in enumerate(keys)}
    session.runner.put({key: np.load(file, allow_pickle=False) for key, file in names.items()})
    return {}


def _differing(
    session: ModelSession, parts: list[tuple[str | int, str, int, int]]
) -> dict[str, list[str | int]]:
    """Return the keys of tensors whose bytes are not those of a part of a file: path, offset, length."""
    stored, keys = session.runner.stored(), []
    for key, file, offset, length in parts:
        array = np.ascontiguousarray(view_array(stored[key])).reshape(-1).view(np.uint8)
        part = np.memmap(file, np.uint8, "r", offset, (length,)) if length else array[:0]
        pieces = (slice(start, start + _PIECE) for start in range(0, length, _PIECE))
        if len(array) != length or not all(np.array_equal(array[piece], part[piece]) for piece in pieces):
            keys.append(key)
    return {"keys": keys}


def _results(session: ModelSession, names: list[str]) -> Results:
    """Call the model; write its outputs, and descriptions of the results of its layers (see tracing)."""
    runner = session.runner
    recorder = NumbersRecorder()
    with _model_errors():
        with runner.observe(recorder):
            result = runner.call(names, session.inputs(len(names)))
        outputs = _write_outputs(session, result)
    np.save(session.folder / "results.npy", np.array(recorder.results).reshape(-1, 6), allow_pickle=False)
    return {"outputs": outputs}


@contextlib.contextmanager
def _model_errors() -> Iterator[None]:
    """Raise WorkerError for whatever the model's own code raises in the block."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        raise WorkerError(f"calling the model raises {last_error_line(error)}") from error


def _write_outputs(session: ModelSession, result: Any) -> list[str]:
    """Write the outputs of a call; return their names."""
    outputs = session.runner.outputs(result)
    for index, (name, array) in enumerate(outputs):
        if array.dtype.kind not in "biuf":
            raise UnsupportedError("an output is no tensor of numbers", path=name, found=str(array.dtype))
        np.save(session.folder / f"output-{index}.npy", array, allow_pickle=False)
    return _distinct_names([name for name, _ in outputs])


def _distinct_names(names: list[str]) -> list[str]:
    """Return the names, each one that occurred before with its number."""
    distinct = []  # type: list[str]
    for index, name in enumerate(names):
        distinct.append(name if name not in distinct else f"{name} ({index})")
    return distinct


def _describe_tensor(name: str, tensor: Any) -> TensorRow:
    """Return the shape of a tensor, and a description of its values that no reordering changes."""
    array = view_array(tensor)
    return {
        "name": name,
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "values": _digest_numbers(array),
        "constant": bool(array.size == 0 or array.min() == array.max()),
    }


def _digest_numbers(array: Any) -> str:
    """Return a digest of the numbers in float32 that no reordering changes.

    It is the sum of a mix of each number's bits, and that of the squares: sorting takes far longer.
    """
    flat = array.reshape(-1)
    total, squares = np.uint64(0), np.uint64(0)
    with np.errstate(over="ignore"):
        for start in range(0, flat.size, _CHUNK):
            numbers = flat[start : start + _CHUNK].astype(np.float32)
            numbers += np.float32(0)  # the two zeros are one number
            mixed = numbers.view(np.uint32).astype(np.uint64)
            for factor in _FACTORS:
                mixed *= np.uint64(factor)
                mixed ^= mixed >> np.uint64(31)
            total += mixed.sum(dtype=np.uint64)
            mixed *= mixed
            squares += mixed.sum(dtype=np.uint64)
    return f"{flat.size}-{int(total):016x}{int(squares):016x}"


_CHUNK = 1 << 16
# The factors of splitmix64 (Steele, Lea, Flood 2014) and its increment.
_FACTORS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _layers(session: ModelSession) -> Layers:
    """Return every layer with a description of its tensors."""
    return {
        "layers": [
            {
                **layer,
                "tensors": [_describe_tensor(name, tensor) for name, tensor in layer["tensors"].items()],
            }
            for layer in session.list_layers()
        ]
    }


def _capture(
    session: ModelSession, names: list[str], selected: list[tuple[str, int]], *, exact: bool, outputs: bool
) -> Called:
    """Call the model; write its outputs, and inputs and outputs of the wanted calls of layers."""
    runner, folder = session.runner, session.folder / "calls"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    recorder = CallRecorder({(path, number) for path, number in selected}, folder)
    with _model_errors():
        with runner.observe(recorder, exact=exact):
            result = runner.call(names, session.inputs(len(names)), exact=exact)
        session.kept = recorder.kept
        written = _write_outputs(session, result) if outputs else []
    return {"calls": recorder.calls, "outputs": written}


_NO_OPERATIONS: Operations = {"library": "", "operations": [], "calls": [], "values": {}, "written": []}


def _operations(session: ModelSession, names: list[str], *, exact: bool) -> Operations:
    """Call the model; write the values of all its operations, and return these and the calls of layers."""
    recorder = OperationRecorder()
    with _model_errors():
        inputs = session.inputs(len(names))
        library = session.runner.record_operations(recorder, names, inputs, exact=exact)
    if not (library and recorder.whole):
        return _NO_OPERATIONS
    numbers = [array is not None and array.dtype.kind in "biuf" for array in recorder.values]
    stored = {str(n): array for n, (array, known) in enumerate(paired(recorder.values, numbers)) if known}
    np.savez(session.folder / "operations.npz", **stored)
    digests = [_digest_numbers(array) if array.dtype.kind == "f" else "" for array in stored.values()]
    rows = dict(paired(stored, digests))
    return {
        "library": library,
        "operations": recorder.operations,
        "calls": recorder.recorded,
        "values": rows,
        "written": recorder.written,
    }


def _read_tensors(session: ModelSession, path: str, *, parts: bool) -> dict[str, Names]:
    """Write the tensors of one layer, and of its parts if they are requested."""
    tensors = dict(next(layer["tensors"] for layer in session.list_layers() if layer["path"] == path))
    for layer in session.list_layers() if parts else ():
        part = layer["path"][len(path) + 1 :].replace(".", "/")
        if part and layer["path"].startswith((path + ".", path + "/")):
            tensors.update((part + "/" + name, tensor) for name, tensor in layer["tensors"].items())
    for index, tensor in enumerate(tensors.values()):
        np.save(session.folder / f"tensor-{index}.npy", view_array(tensor), allow_pickle=False)
    return {"names": list(tensors)}


def _repeat(
    session: ModelSession,
    path: str,
    number: int,
    tensors: dict[str, str],
    settings: Message,
    changed_input: str | None,
    *,
    exact: bool,
) -> Repeated:
    """Repeat a recorded call of one layer with other tensors, settings or input; write the result."""
    arrays = {name: np.load(session.folder / file, allow_pickle=False) for name, file in tensors.items()}
    changes = {"tensors": arrays, "settings": settings}
    call = session.kept[path, number]
    try:
        if changed_input is not None:
            layer_input = np.load(session.folder / changed_input, allow_pickle=False)
            call = ((session.runner.tensor(layer_input, exact=exact), *call[0][1:]), call[1])
        result = session.runner.call_layer(path, call, changes, exact=exact)
    except Exception as error:  # noqa: BLE001 - this change does not fit the layer
        return {"made": -1, "reason": last_error_line(error)}
    outputs = [to_array(tensor) for tensor in list_tensors(result)]
    for index, array in enumerate(outputs):
        np.save(session.folder / f"repeated-{index}.npy", array, allow_pickle=False)
    return {"made": len(outputs), "reason": ""}


class ModelRequests(ModelSession):
    """What the parent may request of the process of a model."""

    build = _build
    describe = _describe
    outline = _outline
    load = _load
    open = _open
    prepare = _prepare
    exact = _exact
    run = _run
    put = _put
    differing = _differing
    results = _results
    layers = _layers
    capture = _capture
    operations = _operations
    tensors = _read_tensors
    repeat = _repeat
    optimizer = model_training.prepare_optimizer
    optimizer_config = model_training.read_optimizer_config
    slots = model_training.read_slots
    train = model_training.train_model
    close = end_process

    def save(self, file: str, form: str) -> dict[str, str]:
        """Write the model to a file."""
        return {"file": self.runner.save(file, form)}

    def number(self) -> dict[str, bool]:
        """Give each variable its number as values."""
        return {"done": self.runner.number()}


HANDLERS = list_handlers(ModelRequests)


def main(folder: str) -> None:
    """Run the process that fills or runs a model for its parent."""
    with message_pipes() as (requests, answers):
        serve(ModelSession(Path(folder)), HANDLERS, requests, answers)
