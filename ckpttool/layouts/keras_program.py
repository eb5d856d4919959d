"""Follows a Keras model's configuration to the program that it computes: branches, norms, shared layers.

Sources: keras/src/models/functional.py and keras/src/ops/function.py (`inbound_nodes`: the calls of a layer),
keras/src/layers/** and keras/src/activations/activations.py (the formulas). Both spellings are read, those
of Keras 2 and 3. A layer of another class is refused: its code is not in the file.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.errors import UnsupportedError, UsageError, some
from ckpttool.formats.keras_tree.config import config_of
from ckpttool.layouts import model_steps
from ckpttool.layouts.canonical import Operation, Program
from ckpttool.layouts.onnx_operators import Flow, Recorder
from ckpttool.layouts.onnx_steps import acting
from ckpttool.leaf import Leaf, Path
from ckpttool.tree import Tree

if TYPE_CHECKING:
    import numpy as np

Name = tuple[str, ...]
_DEEP, _CALLS, _NUMBERS = 20, 10_000, 1 << 20
_MOST = 3.4028234663852886e38  # of float32: no limit
_PLAIN = frozenset(("relu", "tanh", "sigmoid", "elu", "gelu", "silu", "softplus"))
_SELU = (1.0507009873554805, 1.6732632423543772)


class Followed(NamedTuple):
    """The program of a model's action, the paths of its tensors, and notes on what is left out."""

    program: Program
    used: tuple[Path, ...]
    notes: tuple[str, ...]


def of_keras(document: Mapping[str, Any], tree: Tree, file: str, network: str = "actor") -> Followed:
    """Return the program of a model of Keras's own class (see model_steps.is_described).

    `network` names one of several outputs. Raise UnsupportedError for a layer that is not computed here, and
    UsageError where several outputs may be the action.
    """
    try:
        return _followed(document, tree, file, network)
    except (TypeError, ValueError, LookupError, OverflowError, RecursionError) as error:
        raise UnsupportedError("the model's configuration is not one that Keras writes", file=file) from error


def _followed(document: Mapping[str, Any], tree: Tree, file: str, network: str) -> Followed:
    tensors = {tree.names[path].removesuffix(":0"): path for path, _ in tree.tensors()}
    reader = _Reader(tree=tree, file=file, tensors=tensors)
    shape = reader.observed(document)
    reader.inputs = [("obs", shape)]
    found = reader.model(document, (), [Flow(0, shape)])
    name, left = _chosen(list(found), network, file)
    action = found[name]
    if len(action.shape) != 1:
        raise reader.refused((name,), f"an output of shape {list(action.shape)}")
    program = reader.pruned(action)
    paths = [path for operation in program.operations for path in operation.value.get("paths", ())]
    notes = (f"{', '.join(left)} left out: the policy is {name}",) if left else ()
    return Followed(program, tuple(dict.fromkeys(paths)), notes)


def _chosen(names: Sequence[str], network: str, file: str) -> tuple[str, list[str]]:
    """Return the name of the output that is the action, and those of the others."""
    found: str | None = network if network in names else None
    if found is None and network != "actor":
        raise UsageError(f"the model has no output called {network}", file=file, found=some(names, 8))
    found = found or (names[0] if len(names) == 1 else acting(names))
    if found is None:
        raise UsageError(
            "the model has several outputs, and nothing tells which one is the action",
            file=file,
            found=some(names, 8),
            hint=" or ".join(f"--network {shlex.quote(name)}" for name in names[:8]),
        )
    return found, [name for name in names if name != found]


@dataclass
class _Reader(Recorder):
    """Computes what each call of a layer gives."""

    tree: Tree = field(kw_only=True)
    file: str = field(kw_only=True)
    tensors: Mapping[str, Path] = field(kw_only=True)
    calls: int = 0

    def refused(self, name: Name, found: str) -> UnsupportedError:
        """Return the error for a layer."""
        return UnsupportedError(
            "the model has a layer that is not computed here",
            file=self.file,
            path="/".join(name) or None,
            found=found,
        )

    def observed(self, document: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the model's one input."""
        layers = _layers(document)
        inputs = [layer for layer in layers if layer.get("class_name") == "InputLayer"]
        if len(inputs) > 1:
            names = [str(config_of(layer).name) for layer in inputs]
            raise UnsupportedError("the model takes several inputs", file=self.file, found=some(names, 6))
        settings = [config_of(each).settings for each in (*inputs, *layers[:1], document)]
        keys = ("batch_shape", "batch_input_shape", "build_input_shape")
        shapes = [one[key] for one in settings for key in keys if isinstance(one.get(key), list)]
        if not shapes and layers and not inputs:
            return self.observed(layers[0])
        shape = shapes[0][1:] if shapes else ()
        if not shape or not all(isinstance(extent, int) and extent > 0 for extent in shape):
            raise UnsupportedError(
                "the shape of the model's input is not fixed", file=self.file, found=str(shape or "none")
            )
        return tuple(shape)

    # Models.

    def model(self, document: Mapping[str, Any], above: Name, given: list[Flow]) -> dict[str, Flow]:
        """Return what a model gives, by the names of its outputs."""
        if len(above) > _DEEP:
            raise self.refused(above, "models within models")
        config, layers = config_of(dict(document)), _layers(document)
        if config.cls == "Sequential":
            if len(given) != 1:
                raise self.refused(above, "a Sequential of several inputs")
            flow = given[0]
            for layer in layers:
                flow = self.called(layer, above, [flow])[0]
            return {str(layers[-1].get("name") or config_of(layers[-1]).name): flow}
        by_name = {str(layer.get("name") or config_of(layer).name): layer for layer in layers}
        starts = [place for _, place in _places(config.settings.get("input_layers"))]
        ends = list(_places(config.settings.get("output_layers")))
        if len(by_name) != len(layers) or len(starts) != len(given) or not ends:
            raise self.refused(above, "a model whose inputs or outputs are not listed")
        known = {(place[0], 0, 0): flow for place, flow in zip(starts, given, strict=True)}
        for _, place in ends:
            self._until(place, by_name, above, known)
        # A dict of outputs has names of its own.
        return {title or place[0]: known[place] for title, place in ends}

    def _until(
        self, wanted: _Place, layers: Mapping[str, dict[str, Any]], above: Name, known: dict[_Place, Flow]
    ) -> None:
        """Compute the calls up to one; a long chain needs no recursion."""
        waiting = [wanted]
        while waiting:
            place = waiting[-1]
            if place in known:
                waiting.pop()
                continue
            self.calls += 1
            layer = layers.get(place[0])
            nodes = layer.get("inbound_nodes") if layer is not None else None
            if layer is None or not isinstance(nodes, list) or self.calls > _CALLS:
                raise self.refused((*above, place[0]), "a call that is not listed")
            if len(waiting) > len(layers) * 8 or not 0 <= place[1] < len(nodes):
                raise self.refused((*above, place[0]), "calls in a circle")
            taken = _operands(nodes[place[1]])
            missing = [each for each in taken if _is_place(each) and each not in known]
            if missing:
                waiting += missing
                continue
            operands = [known[each] if _is_place(each) else each for each in taken]
            for number, flow in enumerate(self.called(layer, above, operands)):
                known[place[0], place[1], number] = flow
            if place not in known:
                raise self.refused((*above, place[0]), "an output that the layer does not have")

    def called(self, layer: dict[str, Any], above: Name, given: list[Any]) -> list[Flow]:
        """Return what a layer gives of flows and numbers."""
        inner = config_of(layer)
        name = (*above, str(inner.name or layer.get("name") or "?"))
        cls, settings = str(inner.cls), inner.settings
        if model_steps.is_foreign(layer):
            raise self.refused(name, f"{cls}, a class of another package")
        flows = [each for each in given if isinstance(each, Flow)]
        if cls in model_steps.MODELS:
            return list(self.model(layer, name, flows).values())
        if settings.get("quantization_config") is not None or settings.get("data_format") == "channels_first":
            raise self.refused(name, f"a {cls} of another form")
        if cls in _SKIPPED and len(flows) == 1:
            return flows
        call = _Call(self, name, settings)
        if cls in _OF_MANY:
            return [_OF_MANY[cls](call, given)]
        if cls in _OF_ONE and len(flows) == 1 and len(given) == 1:
            return [_OF_ONE[cls](call, flows[0])]
        raise self.refused(name, "a Lambda, whose code is not run" if cls == "Lambda" else cls)

    # Operations.

    def affine(self, flow: Flow, scale: Any, shift: Any, paths: Sequence[Path] = ()) -> Flow:
        """Return `flow * scale + shift`."""
        import numpy as np

        wide = [np.atleast_1d(np.asarray(each, np.float64)) for each in (scale, shift)]
        scale, shift = np.broadcast_arrays(*wide)
        return self.add("affine", flow.shape, flow, scale=scale, shift=shift, paths=tuple(paths))

    def activation(self, flow: Flow, name: str, slope: float = 0.01) -> Flow:
        """Return an elementary activation of a value."""
        return self.add("activation", flow.shape, flow, name=name, slope=slope)

    def clip(self, flow: Flow, low: float, high: float) -> Flow:
        """Return a value within limits."""
        import numpy as np

        return self.add("clip", flow.shape, flow, low=np.full(1, low), high=np.full(1, high))

    def both(self, kind: str, one: Flow, two: Flow) -> Flow:
        """Return the sum or the product (`add`, `multiply`) of two values of one shape."""
        return self.add(kind, one.shape, one, two)

    def pruned(self, action: Flow) -> Program:
        """Return the operations that the action depends on."""
        needed, waiting = set[int](), [action.number]
        while waiting:
            number = waiting.pop()
            if number >= self.first and number not in needed:
                needed.add(number)
                waiting += self.operations[number - self.first].inputs
        places = {number: number for number in range(self.first)}
        operations: list[Operation] = []
        for number in sorted(needed):
            operation = self.operations[number - self.first]
            places[number] = self.first + len(operations)
            operations.append(operation._replace(inputs=tuple(places[each] for each in operation.inputs)))
        return Program(tuple(self.inputs), {}, tuple(operations), places[action.number], action.shape[0])


class _Call(NamedTuple):
    """A layer that is called: its reader, its name and its settings."""

    reader: _Reader
    name: Name
    settings: Mapping[str, Any]

    def refused(self, found: str) -> UnsupportedError:
        """Return the error for the layer."""
        return self.reader.refused(self.name, found)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, Path] | None:
        """Return one of the layer's tensors and its path, None without it."""
        path = self.reader.tensors.get("/".join((*self.name, name)))
        leaf = self.reader.tree.get(path) if path is not None else None
        if path is None or not isinstance(leaf, Leaf):
            return None
        if (shape is not None and leaf.shape != shape) or leaf.dtype not in _FLOATS:
            raise self.refused(f"{name} {leaf.dtype} {list(leaf.shape)}")
        return leaf.array(), path

    def needed(self, name: str, shape: tuple[int, ...] | None = None) -> tuple[np.ndarray, Path]:
        """Return one of the layer's tensors and its path; raise UnsupportedError without it."""
        found = self.tensor(name, shape)
        if found is None:
            raise self.refused(f"no {name} of the layer")
        return found

    def number(self, name: str, default: float) -> float:
        """Return a number among the settings."""
        value = self.settings.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refused(f"{name} {value}")
        return float(value)

    def row(self, name: str, flow: Flow, default: float | None = None) -> np.ndarray | None:
        """Return numbers among the settings, one or one for each entry; None where they are left out."""
        import numpy as np

        value = self.settings.get(name, default)
        if isinstance(value, dict) and isinstance(value.get("config"), dict):
            value = value["config"].get("value")  # __numpy__ or __tensor__
        if value is None:
            return None
        found = np.asarray(_flat(value), np.float64)
        if found.size not in (1, math.prod(flow.shape)) or not np.isfinite(found).all():
            raise self.refused(f"{name} of {found.size} numbers")
        return found

    def last_axis(self, flow: Flow, default: int = -1) -> None:
        """Raise UnsupportedError unless the layer is for the one axis of a vector."""
        axis = self.settings.get("axis", default)
        if len(flow.shape) != 1 or axis not in (-1, 1, [-1], [1]):
            raise self.refused(f"axis {axis} of {list(flow.shape)}")

    def activated(self, flow: Flow) -> Flow:
        """Return the layer's activation of a value."""
        given = self.settings.get("activation", "linear")
        name = (
            {"swish": "silu", "hard_swish": "hard_silu"}.get(given, given) if isinstance(given, str) else ""
        )
        return self.function(flow, "linear" if given is None else name)

    def function(self, flow: Flow, name: str) -> Flow:
        """Return a function of Keras by its name."""
        reader = self.reader
        if name in ("linear", "identity"):
            return flow
        if name in _PLAIN:
            return reader.activation(flow, name)
        if name == "leaky_relu":
            return reader.activation(flow, "leaky_relu", 0.2)
        if name in ("selu", "celu"):
            scale, alpha = _SELU if name == "selu" else (1.0, 1.0)
            return self.elu(flow, alpha, scale)
        if name == "relu6":
            return reader.clip(flow, 0, 6)
        if name == "mish":
            inner = reader.activation(reader.activation(flow, "softplus"), "tanh")
            return reader.both("multiply", flow, inner)
        if name == "hard_silu":
            gate = reader.clip(reader.affine(flow, 1 / 6, 0.5), 0, 1)
            return reader.both("multiply", flow, gate)
        raise self.refused(f"the activation {name}" if name else "an activation of the program's own")

    def elu(self, flow: Flow, alpha: float, scale: float = 1.0) -> Flow:
        """Return ELU with a coefficient, times a scale."""
        reader = self.reader
        found = reader.activation(flow, "elu")
        if alpha == 1.0 and scale == 1.0:
            return found
        above = reader.affine(reader.activation(flow, "relu"), scale * (1 - alpha), 0)
        return reader.both("add", reader.affine(found, scale * alpha, 0), above)


_FLOATS = ("float32", "float64", "float16", "bfloat16")


def _dense(call: _Call, flow: Flow) -> Flow:
    import numpy as np

    if len(flow.shape) != 1:
        raise call.refused(f"a Dense on {list(flow.shape)}")
    kernel, path = call.needed("kernel")
    turned = False
    if "equation" in call.settings:
        left, _, right = str(call.settings["equation"]).replace(" ", "").partition("->")
        one, _, two = left.partition(",")
        kinds = {f"{one[0]}{one[1:]}{right}": two} if len(one) == len(right) == len(two) == 2 else {}
        turned = bool(kinds) and two == right[1] + one[1]
        straight = bool(kinds) and two == one[1] + right[1]
        if one[:1] != right[:1] or not (turned or straight) or one[1:] == right[1:]:
            raise call.refused(f"the equation {call.settings['equation']}")
    kernel = kernel.T if turned else kernel
    if kernel.ndim != 2 or kernel.shape[0] != flow.shape[0]:
        raise call.refused(f"a kernel {list(kernel.shape)} on {flow.shape[0]} entries")
    added = call.tensor("bias", (kernel.shape[1],))
    if added is None and (call.settings.get("use_bias", "equation" not in call.settings)):
        raise call.refused("no bias of the layer")
    bias = None if added is None else added[0].astype(np.float32)
    paths = (path,) if added is None else (path, added[1])
    found = call.reader.add(
        "dense", (kernel.shape[1],), flow, kernel=kernel.astype(np.float32), bias=bias, weights=None,
        paths=paths, source=(path, turned),
    )  # fmt: skip
    return call.activated(found)


def _normalization(call: _Call, flow: Flow) -> Flow:
    import numpy as np

    axis = call.settings.get("axis", -1)
    if len(flow.shape) != 1 or axis not in (-1, 1, [-1], [1], None, []):
        raise call.refused(f"axis {axis} of {list(flow.shape)}")
    mean, variance = call.row("mean", flow), call.row("variance", flow)
    paths: tuple[Path, ...] = ()
    if mean is None or variance is None:
        (mean, one), (variance, two) = call.needed("mean"), call.needed("variance")
        mean, variance, paths = mean.reshape(-1), variance.reshape(-1), (one, two)
    if any(each.size not in (1, flow.shape[0]) for each in (mean, variance)):
        raise call.refused(f"statistics of {mean.size} values")
    # keras/src/layers/preprocessing/normalization.py: epsilon limits the deviation itself.
    std = np.maximum(np.sqrt(variance.astype(np.float64)), 1e-7)
    if call.settings.get("invert"):
        return call.reader.affine(flow, std, mean, paths)
    return call.reader.affine(call.reader.affine(flow, 1.0, -mean.astype(np.float64)), 1 / std, 0, paths)


def _batch_norm(call: _Call, flow: Flow) -> Flow:
    import numpy as np

    call.last_axis(flow)
    shape = (flow.shape[0],)
    mean, variance = (call.needed(f"moving_{name}", shape) for name in ("mean", "variance"))
    scale, offset = call.tensor("gamma", shape), call.tensor("beta", shape)
    held = [each for each in (mean, variance, scale, offset) if each is not None]
    for name, tensor in (("scale", scale), ("center", offset)):
        if bool(call.settings.get(name, True)) != (tensor is not None):
            raise call.refused(f"{name} without its tensor")
    factor = 1 / np.sqrt(variance[0].astype(np.float64) + call.number("epsilon", 1e-3))
    factor = factor if scale is None else factor * scale[0]
    shift = np.zeros(shape) if offset is None else offset[0]
    centred = call.reader.affine(flow, 1.0, -mean[0].astype(np.float64))
    return call.reader.affine(centred, factor, shift, [path for _, path in held])


def _layer_norm(call: _Call, flow: Flow) -> Flow:
    import numpy as np

    call.last_axis(flow)
    if call.settings.get("rms_scaling"):
        raise call.refused("rms_scaling")
    shape = (flow.shape[0],)
    scale, offset = call.tensor("gamma", shape), call.tensor("beta", shape)
    for name, tensor in (("scale", scale), ("center", offset)):
        if bool(call.settings.get(name, True)) != (tensor is not None):
            raise call.refused(f"{name} without its tensor")
    return call.reader.add(
        "layer_norm", shape, flow,
        scale=np.ones(shape, np.float32) if scale is None else scale[0].astype(np.float32),
        offset=np.zeros(shape, np.float32) if offset is None else offset[0].astype(np.float32),
        epsilon=call.number("epsilon", 1e-3), weights=None, stage=2,
        paths=tuple(each[1] for each in (scale, offset) if each is not None),
    )  # fmt: skip


def _rescaling(call: _Call, flow: Flow) -> Flow:
    scale, offset = call.row("scale", flow, 1.0), call.row("offset", flow, 0.0)
    if len(flow.shape) != 1 or scale is None or offset is None:
        raise call.refused(f"a Rescaling of {list(flow.shape)}")
    return call.reader.affine(flow, scale, offset)


def _relu(call: _Call, flow: Flow) -> Flow:
    slope, most = call.number("negative_slope", 0.0), call.settings.get("max_value")
    if call.number("threshold", 0.0) != 0 or (slope and most is not None):
        raise call.refused("a ReLU with a threshold, or with a slope and a limit")
    if slope:
        return call.reader.activation(flow, "leaky_relu", slope)
    if most is None:
        return call.reader.activation(flow, "relu")
    return call.reader.clip(flow, 0, call.number("max_value", 0.0))


def _leaky_relu(call: _Call, flow: Flow) -> Flow:
    slope = call.number("negative_slope", call.number("alpha", 0.3))
    return call.reader.activation(flow, "leaky_relu", slope)


def _prelu(call: _Call, flow: Flow) -> Flow:
    alpha, path = call.needed("alpha", flow.shape)
    if len(flow.shape) != 1:
        raise call.refused(f"a PReLU of {list(flow.shape)}")
    reader = call.reader
    below = reader.activation(reader.affine(flow, -1.0, 0), "relu")
    return reader.both("add", reader.activation(flow, "relu"), reader.affine(below, -alpha, 0, (path,)))


def _flat_shape(call: _Call, flow: Flow) -> Flow:
    if len(flow.shape) == 1:
        return flow
    return call.reader.add("flatten", (math.prod(flow.shape),), flow, image=flow.shape)


def _reshape(call: _Call, flow: Flow) -> Flow:
    shape = call.settings.get("target_shape")
    size = math.prod(flow.shape)
    if shape not in ([size], [-1], list(flow.shape)):
        raise call.refused(f"a Reshape to {shape}")
    return flow if shape == list(flow.shape) else _flat_shape(call, flow)


def _clip(call: _Call, flow: Flow) -> Flow:
    return call.reader.clip(flow, call.number("x_min", -_MOST), call.number("x_max", _MOST))


def _named(name: str) -> Callable[[_Call, Flow], Flow]:
    return lambda call, flow: call.function(flow, name)


_SKIPPED = frozenset(
    (
        "Identity",
        "InputLayer",
        "Dropout",
        "GaussianNoise",
        "GaussianDropout",
        "AlphaDropout",
        "ActivityRegularization",
    )
)
_OF_ONE: Mapping[str, Callable[[_Call, Flow], Flow]] = {
    "Dense": _dense,
    "EinsumDense": _dense,
    "Activation": lambda call, flow: call.activated(flow),
    "Normalization": _normalization,
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "Rescaling": _rescaling,
    "ReLU": _relu,
    "LeakyReLU": _leaky_relu,
    "PReLU": _prelu,
    "ELU": lambda call, flow: call.elu(flow, call.number("alpha", 1.0)),
    "Flatten": _flat_shape,
    "Reshape": _reshape,
    # keras/src/ops: functions that were applied to a model's values.
    "Relu": _named("relu"),
    "Tanh": _named("tanh"),
    "Sigmoid": _named("sigmoid"),
    "Softplus": _named("softplus"),
    "Silu": _named("silu"),
    "Negative": lambda call, flow: call.reader.affine(flow, -1.0, 0),
    "Clip": _clip,
}


def _arithmetic(op: str) -> Callable[[_Call, list[Any]], Flow]:
    """Return what a layer or an operator computes of values and numbers: a sum, a product or the like."""

    def made(call: _Call, given: list[Any]) -> Flow:
        if not given or (op in ("Subtract", "TrueDivide", "Divide") and len(given) != 2):
            raise call.refused(f"{op} of {len(given)}")
        total: Any = given[0]
        for each in given[1:]:
            total = _combined(call, op, total, each)
        if not isinstance(total, Flow):
            raise call.refused(op)
        return call.reader.affine(total, 1 / len(given), 0) if op == "Average" else total

    return made


def _combined(call: _Call, op: str, one: Any, two: Any) -> Flow:
    """Return what an operator makes of two values, or of one and numbers."""
    import numpy as np

    reader = call.reader
    if isinstance(one, Flow) and isinstance(two, Flow):
        if one.shape != two.shape or op in ("TrueDivide", "Divide"):
            raise call.refused(f"{op} of {list(one.shape)} and {list(two.shape)}")
        other = reader.affine(two, -1.0, 0) if op == "Subtract" else two
        return reader.both("multiply" if op == "Multiply" else "add", one, other)
    turned = isinstance(two, Flow)
    flow, row = (two, one) if turned else (one, two)
    row = np.asarray(_flat(row), np.float64)
    if not isinstance(flow, Flow) or len(flow.shape) != 1 or row.size not in (1, flow.shape[0]):
        raise call.refused(f"{op} with {row.size} numbers")
    if op in ("TrueDivide", "Divide"):
        if turned or not row.all():
            raise call.refused("a division by what the model computes, or by 0")
        return reader.affine(flow, 1 / row, 0)
    if op == "Subtract":
        return reader.affine(flow, -1.0, row) if turned else reader.affine(flow, 1.0, -row)
    return reader.affine(flow, row, 0) if op == "Multiply" else reader.affine(flow, 1.0, row)


def _concatenate(call: _Call, given: list[Any]) -> Flow:
    flows = [each for each in given if isinstance(each, Flow)]
    if len(flows) != len(given) or any(len(flow.shape) != 1 for flow in flows):
        raise call.refused("a Concatenate of other values than vectors")
    if call.settings.get("axis", -1) not in (-1, 1):
        raise call.refused(f"axis {call.settings.get('axis')}")
    if len(flows) == 1:
        return flows[0]
    return call.reader.add("concat", (sum(flow.shape[0] for flow in flows),), *flows)


_OF_MANY: Mapping[str, Callable[[_Call, list[Any]], Flow]] = {
    **{
        name: _arithmetic(name) for name in ("Add", "Subtract", "Multiply", "Average", "TrueDivide", "Divide")
    },
    "Concatenate": _concatenate,
}

# The call of a layer: its name, which of its calls, which of its outputs.
_Place = tuple[str, int, int]


def _is_place(value: Any) -> bool:
    return isinstance(value, tuple)


def _layers(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    layers = config_of(dict(document)).settings.get("layers")
    return [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []


def _places(value: Any) -> Iterator[tuple[str, _Place]]:
    """Yield a model's inputs or outputs: one place, a list or a dict of places, with the dict's keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ((str(key), place) for _, place in _places(inner))
    elif isinstance(value, list) and value:
        if isinstance(value[0], str) and len(value) > 2 and all(isinstance(n, int) for n in value[1:3]):
            yield "", (value[0], value[1], value[2])
        else:
            for inner in value:
                yield from _places(inner)


def _operands(node: Any) -> list[Any]:
    """Return what a call takes: places and numbers, in their order; None of Keras's own settings."""
    if isinstance(node, dict) and "args" in node:
        found = [each for given in node["args"] for each in _operand(given)]
        kwargs = node.get("kwargs") or {}
        keep = [name for name, value in kwargs.items() if name not in _FLAGS and value is not None]
        return [*found, *(each for name in keep for each in _operand(kwargs[name]))]
    found = []
    for each in node if isinstance(node, list) else [node]:
        found += list(_operand(each))
        more = each[3] if isinstance(each, list) and len(each) > 3 and isinstance(each[3], dict) else {}
        keep = [name for name, value in more.items() if name not in _FLAGS and value is not None]
        found += [inner for name in keep for inner in _operand(more[name])]
    return found


_FLAGS = frozenset(("training", "mask", "name"))


def _operand(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        config = value.get("config")
        history = config.get("keras_history") if isinstance(config, dict) else None
        if isinstance(history, list) and len(history) == 3:
            yield (str(history[0]), int(history[1]), int(history[2]))
        elif value.get("class_name") in ("__numpy__", "__tensor__") and isinstance(config, dict):
            yield config.get("value")
        else:
            yield None
    elif isinstance(value, list) and len(value) >= 3 and isinstance(value[0], str):
        yield (value[0], value[1], value[2]) if all(isinstance(n, int) for n in value[1:3]) else None
    elif isinstance(value, list) and any(isinstance(each, list | dict) for each in value):
        for each in value:
            yield from _operand(each)
    else:
        yield value


def _flat(value: Any) -> list[float]:
    """Return numbers as one row; of anything else none."""
    found: list[float] = []
    waiting = [value]
    while waiting and len(found) <= _NUMBERS:
        each = waiting.pop()
        if isinstance(each, list | tuple):
            waiting += reversed(each)
        elif isinstance(each, int | float) and not isinstance(each, bool):
            found.append(float(each))
        else:
            return []
    return found
