"""Follows an ONNX graph from its observation to its action; nothing of it is run by an ONNX runtime.

Sources: onnx/docs/Operators.md (every operator by version), and the patterns of small operators that
exporters write for layer norms, GELU and SiLU (torch/onnx/symbolic_opset9.py, agents/onnx_model.py).
Constants are computed where they are needed. An operator that is not known matters only on the way to the
action.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError, some
from ckpttool.formats import onnx
from ckpttool.formats.onnx import listing
from ckpttool.formats.onnx.model import Function, Model, Node, Tensor, Value
from ckpttool.layouts.canonical import Operation, Program
from ckpttool.layouts.model_steps import Step, Weights
from ckpttool.leaf import Leaf, Path, key
from ckpttool.source import Inline

if TYPE_CHECKING:
    import numpy as np

_ELEMENTS = 1 << 24  # of a constant that is computed from others
_DEEP, _NODES = 20, 100_000
_FLOATS = {1: "float32", 11: "float64"}
_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus"}
_SAME = frozenset(("Identity", "Dropout", "StopGradient"))
# Values on the way to a known layer, which nothing else may take.
_PARTIAL = frozenset(
    ("mean", "centred", "squared", "variance", "shifted", "deviation", "erf", "erf_1", "gelu_2", "cell")
)
# Names of outputs, the better ones first, and of those that are no action.
_ACTS = (
    re.compile(r"deterministic_continuous_actions?"),
    re.compile(r"(continuous_)?actions?(_?mean|_?mu)?|acts?|mean(_?actions?)?|mu|policy|pi|a"),
)
_ACTS_NOT = re.compile(
    r"val|std|sigma|log|prob|entropy|hidden|cell|state|version|memory|shape|^(v|h|c)$|[hc]_?out|q\d*$"
)


class _Unknown(NamedTuple):
    """What an operator that is not followed gives: its name, that of its node, and why."""

    op: str
    node: str


@dataclass(frozen=True, slots=True)
class _Const:
    """A constant; `path` is that of the tensor that it is, `turned` if with its two axes exchanged."""

    array: np.ndarray
    path: Path | None = None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class _Dims:
    """A shape, or part of one, as values; None is the number of observations."""

    values: tuple[int | None, ...]
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class _Flow:
    """A value that depends on the observation: its number in the program, and its shape without the batch.

    `ones` are the positions of axes of extent 1 that the graph has put between or before the others.
    """

    number: int
    shape: tuple[int, ...]
    ones: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return 1 + len(self.shape) + len(self.ones)


_Any = _Const | _Dims | _Flow | _Unknown


class Followed(NamedTuple):
    """What a graph computes: its steps where it is a chain of layers, and the whole program.

    `mean`, `std` and `clip` are how a chain normalises observations, `used` the paths of all constants.
    """

    steps: tuple[Step, ...] | None
    program: Program
    mean: Leaf | None
    std: Leaf | None
    clip: float | None
    used: tuple[Path, ...]
    notes: tuple[str, ...]


def of_onnx(checkpoint: Checkpoint, network: str = "actor") -> Followed | None:
    """Return what the policy of an ONNX model computes, None for another format.

    `network` may name the output that is the action. Raise UnsupportedError for an operator on the way to it
    that is not known, and UsageError where several outputs may be the action.
    """
    if checkpoint.format != onnx.NAME:
        return None
    model = listing.parsed(checkpoint.files[0])
    try:
        reader = _Reader(checkpoint, model)
        reader.run(model.graph.nodes, reader.scope, 0)
        return reader.followed(network)
    except RecursionError:
        raise UnsupportedError("the graph is too deep to be followed", file=checkpoint.path) from None


def flattened(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the shape (height, width, channels) of images that dense layers take flattened, by their weights.

    It is () where the channels are last already. Raise as `of_onnx` does for a graph that is not followed.
    """
    model = listing.parsed(checkpoint.files[0])
    reader = _Reader(checkpoint, model)
    reader.run(model.graph.nodes, reader.scope, 0)
    for operation in reader.operations:
        if operation.kind != "dense" or operation.value["source"][0] is None:
            continue
        before = reader.behind(operation.inputs[0])
        if before is not None and before.kind == "flatten":
            shape, channels = before.value["image"], reader.channels(before.inputs[0])
            if len(shape) == 3 and channels in (0, 2):
                image = (*shape[1:], shape[0]) if channels == 0 else ()
                yield operation.value["source"][0], image


@dataclass
class _Reader:
    """Computes what every value of the graph is: a constant, a shape, or a step of a program."""

    checkpoint: Checkpoint
    model: Model
    scope: dict[str, _Any] = field(default_factory=dict)
    inputs: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    carried: dict[str, int] = field(default_factory=dict)
    functions: dict[tuple[str, str], Function] = field(default_factory=dict)
    calls: int = 0
    doubled: bool = False

    def __post_init__(self) -> None:
        """Take the constants and inputs of the graph."""
        graph = self.model.graph
        self.functions = {(each.domain, each.name): each for each in self.model.functions}
        known = {tensor.name for tensor in graph.initializers}
        for tensor in graph.initializers:
            self.scope[tensor.name] = self._constant(tensor.name)
        self._inputs([value for value in graph.inputs if value.name not in known])

    # Inputs and outputs.

    def _inputs(self, values: Sequence[Value]) -> None:
        cells = {
            name for node in self.model.graph.nodes if node.op in ("LSTM", "GRU") for name in node.inputs[5:7]
        }
        states = [value for value in values if value.name in cells]
        plain = [value for value in values if value.name not in cells]
        if len(plain) != 1:
            raise UnsupportedError(
                "the model does not take one observation",
                file=self.checkpoint.path,
                expected="one input",
                found=some([value.name for value in plain], 6) or "none",
            )
        only = plain[0]
        if only.code not in _FLOATS and only.code not in (2, 3, 6, 7):
            raise self._no_input(only, "numbers of type float32, float64, uint8 or integers")
        if only.shape is None or len(only.shape) < 2:
            raise self._no_input(only, "[batch, number of observations], or images")
        rest = tuple(self._width(only, axis) for axis in range(1, len(only.shape)))
        self.doubled = only.code == 11
        self.inputs = [("obs", rest)]
        self.scope[only.name] = _Flow(0, rest)
        for number, value in enumerate(states):
            shape = value.shape or ()
            if len(shape) != 3 or shape[0] not in (1, "") or not isinstance(shape[2], int):
                raise self._no_input(value, "the state of one recurrent layer, [1, batch, units]")
            self.states[value.name] = shape[2]
            self.scope[value.name] = _Flow(1 + number, (shape[2],), (0,))

    def _width(self, value: Value, axis: int) -> int:
        """Return an extent of the input: its own, or what the first layer takes where that is not fixed."""
        extent = value.shape[axis] if value.shape is not None else ""
        if isinstance(extent, int) and extent > 0:
            return extent
        if value.shape is not None and len(value.shape) == 2:
            for node in self.model.graph.nodes:
                if node.inputs[:1] == (value.name,) and len(node.inputs) > 1:
                    found = self.scope.get(node.inputs[1])
                    if isinstance(found, _Const) and found.array.ndim:
                        turned = node.op == "Gemm" and node.get("transB", 0)
                        extents, row = found.array.shape, found.array.ndim == 1
                        last = turned or (node.op != "Gemm" and row)
                        return int(extents[-1 if last else 0])
        raise self._no_input(value, "extents that are fixed, apart from the number of observations")

    def _no_input(self, value: Value, expected: str) -> CkpttoolError:
        return UnsupportedError(
            "an input of the model is not one that a policy is played with",
            file=self.checkpoint.path,
            path=value.name,
            expected=expected,
            found=str(list(value.shape or ())),
        )

    def followed(self, network: str) -> Followed:
        """Return the program up to the output that is the action."""
        name, left = self._output(network)
        value = self.scope.get(name)
        if not isinstance(value, _Flow):
            what = value if isinstance(value, _Unknown) else _Unknown("a constant", name)
            raise self._refused(what)
        if len(value.shape) != 1:
            raise self._refused(_Unknown(f"an output of shape {list(value.shape)}", name))
        taken = self._reachable(value.number)
        for number in taken:
            operation = self.operations[number - self._first]
            if operation.kind in _PARTIAL:
                raise self._refused(_Unknown(operation.value["op"], operation.value["node"]))
        self._carry(taken)
        program = self._pruned(value, taken)
        notes = [f"{', '.join(left)} left out: the policy is {name}"] if left else []
        if self.doubled:
            notes.append("the model computes in float64 and is run in float32")
        steps, norm = _chain(program)
        used = tuple(path for operation in program.operations for path in operation.value.get("paths", ()))
        return Followed(steps, program, *norm, tuple(dict.fromkeys(used)), tuple(notes))

    def _output(self, network: str) -> tuple[str, list[str]]:
        """Return the name of the output that is the action, and those of the others."""
        names = [value.name for value in self.model.graph.outputs]
        others = [
            n for n in names if not (isinstance(v := self.scope.get(n), _Flow) and v.ones == (0,))
        ] or names
        if network in names:
            return network, [name for name in others if name != network]
        if network != "actor":
            raise UsageError(
                f"the model has no output called {network}", file=self.checkpoint.path, found=some(names, 8)
            )
        if len(others) == 1:
            return others[0], []
        acting = [name for name in others if not _ACTS_NOT.search(name.lower())]
        for pattern in _ACTS:
            found = [name for name in acting if pattern.fullmatch(name.lower())]
            if len(found) == 1:
                return found[0], [name for name in others if name != found[0]]
        if len(acting) == 1 and len(others) > 1:
            return acting[0], [name for name in others if name != acting[0]]
        raise UsageError(
            "the model has several outputs, and nothing tells which one is the action",
            file=self.checkpoint.path,
            found=some(names, 8),
            hint=f"name it: --network {(acting or names)[0]}",
        )

    def _refused(self, what: _Unknown) -> CkpttoolError:
        return UnsupportedError(
            "the graph computes something on the way to the action that is not known here",
            file=self.checkpoint.path,
            path=what.node or None,
            found=what.op,
            hint="its layers alone, without the graph: ckpttool convert writes them, --to torch",
        )

    @property
    def _first(self) -> int:
        """The number of the first operation's value."""
        return len(self.inputs) + len(self.states)

    def _reachable(self, number: int) -> list[int]:
        """Return the numbers of the operations that a value, and the next states, depend on."""
        found: set[int] = set()
        waiting = [number]
        while waiting:
            each = waiting.pop()
            if each < self._first or each in found:
                continue
            found.add(each)
            operation = self.operations[each - self._first]
            waiting += operation.inputs
        return sorted(found)

    def _carry(self, taken: Sequence[int]) -> None:
        """Require that the model gives back every state that its cells take."""
        given = {value.name for value in self.model.graph.outputs}
        for number in taken:
            operation = self.operations[number - self._first]
            for name, output in operation.value.get("carried", {}).items():
                if output not in given and not any(
                    isinstance(value := self.scope.get(each), _Flow) and value == self.scope.get(output)
                    for each in given
                ):
                    raise self._refused(_Unknown(f"the next state of {name} is no output", output))
                self.carried[name] = number
        missing = [name for name in self.states if name not in self.carried]
        if missing:
            raise self._refused(_Unknown("a state that nothing gives back", missing[0]))

    def _pruned(self, output: _Flow, taken: Sequence[int]) -> Program:
        places = {number: number for number in range(self._first)}
        operations: list[Operation] = []
        for number in taken:
            operation = self.operations[number - self._first]
            places[number] = self._first + len(operations)
            operations.append(operation._replace(inputs=tuple(places[each] for each in operation.inputs)))
        return Program(
            tuple(self.inputs), dict(self.states), tuple(operations), places[output.number], output.shape[0]
        )

    # Values.

    def _constant(self, name: str) -> _Any:
        path = (key(name),)
        leaf = self.checkpoint.tree.get(path)
        if not isinstance(leaf, Leaf) or leaf.dtype == "string":
            return _Unknown(f"a constant of a type that is not read ({name})", name)
        try:
            array = leaf.array()
        except CkpttoolError as error:
            raise error.located(file=error.file or self.checkpoint.path, path=name) from error.__cause__
        if leaf.dtype not in ("float32", "float64", "int64", "int32", "bool", "uint8", "int8"):
            return _Unknown(f"{leaf.dtype} arithmetic", name)
        return _Const(array, path)

    def add(
        self, kind: str, shape: tuple[int, ...], *given: _Flow, ones: tuple[int, ...] = (), **value: Any
    ) -> _Flow:
        """Add an operation to the program and return its value."""
        self.operations.append(Operation(kind, tuple(flow.number for flow in given), value))
        return _Flow(self._first + len(self.operations) - 1, shape, ones)

    def operation(self, flow: _Flow) -> Operation | None:
        """Return the operation that gives a value, None for an input."""
        return self.operations[flow.number - self._first] if flow.number >= self._first else None

    def behind(self, number: int) -> Operation | None:
        """Return the operation behind functions of every element, None for the input."""
        while number >= self._first:
            operation = self.operations[number - self._first]
            if operation.kind not in ("activation", "clip"):
                return operation
            number = operation.inputs[0]
        return None

    def channels(self, number: int) -> int | None:
        """Return which axis behind the batch has the channels of a convolution's image, None without one."""
        axes = (0, 1, 2)
        while number >= self._first:
            operation = self.operations[number - self._first]
            if operation.kind == "convolution":
                return axes.index(2)
            if operation.kind == "transpose":
                axes = tuple(operation.value["axes"][axis] for axis in axes)
            elif operation.kind not in ("activation", "affine", "clip"):
                return None
            number = operation.inputs[0]
        return None

    def run(self, nodes: Sequence[Node], scope: dict[str, _Any], depth: int) -> None:
        """Compute the values of nodes in their order, which is that of computation."""
        for node in nodes:
            self.calls += 1
            if self.calls > _NODES:
                raise UnsupportedError(
                    "the graph has too many nodes to be followed", file=self.checkpoint.path
                )
            outputs = self._outputs(node, scope, depth)
            lost = _Unknown(node.title, node.name or next(iter(node.outputs), ""))
            outputs += [lost] * (len(node.outputs) - len(outputs))
            scope |= {name: value for name, value in zip(node.outputs, outputs, strict=False) if name}

    def _outputs(self, node: Node, scope: dict[str, _Any], depth: int) -> list[_Any]:
        title = _Unknown(node.title, node.name or next(iter(node.outputs), ""))
        function = self.functions.get((node.domain, node.op))
        if function is not None:
            return self._called(function, node, scope, depth, title)
        given = [scope.get(name) if name else None for name in node.inputs]
        if any(name and value is None for name, value in zip(node.inputs, given, strict=True)):
            return [title]
        if node.op == "Constant" and node.title == node.op:
            return [self._stated(node, title, outer=depth == 0)]
        unknown = next((value for value in given if isinstance(value, _Unknown)), None)
        if unknown is not None:
            return [unknown] * max(1, len(node.outputs))
        if any(attribute.ref for attribute in node.attributes.values()):
            return [title]
        try:
            if node.title != node.op:
                return [title]
            if all(value is None or isinstance(value, _Const) for value in given) and node.op in _FOLDED:
                arrays = [value.array if isinstance(value, _Const) else None for value in given]
                return [_folded(node, arrays, given[0] if given else None)]
            rule = _OPERATORS.get(node.op)
            found = rule(self, node, given) if rule is not None else None
        except (ValueError, TypeError, IndexError, OverflowError, AttributeError):
            found = None
        if found is None:
            return [title] * max(1, len(node.outputs))
        return found if isinstance(found, list) else [found]

    def _called(
        self, function: Function, node: Node, scope: dict[str, _Any], depth: int, title: _Unknown
    ) -> list[_Any]:
        if depth > _DEEP or function.attributes or len(node.inputs) > len(function.inputs):
            return [title]
        inner = {
            name: scope[given]
            for name, given in zip(function.inputs, node.inputs, strict=False)
            if given in scope
        }
        self.run(function.nodes, inner, depth + 1)
        return [inner.get(name, title) for name in function.outputs]

    def _stated(self, node: Node, title: _Unknown, *, outer: bool) -> _Any:
        """Return the value of a Constant."""
        import numpy as np

        if isinstance(node.get("value"), Tensor) and len(node.outputs) == 1:
            if outer and (key(node.outputs[0]),) in self.checkpoint.tree:
                return self._constant(node.outputs[0])
            return title
        for name, dtype in (
            ("value_float", "f4"),
            ("value_floats", "f4"),
            ("value_int", "i8"),
            ("value_ints", "i8"),
        ):
            if name in node.attributes:
                return _Const(np.asarray(node.get(name), dtype))
        return title


# Constants that are computed.


def _folded(node: Node, arrays: list[np.ndarray | None], first: _Any | None) -> _Const:
    """Return what an operator makes of constants; raise ValueError where it cannot."""
    import numpy as np

    whole = [array for array in arrays if array is not None]
    shape = (
        np.broadcast_shapes(*(array.shape for array in whole)) if node.op in _ELEMENTWISE else whole[0].shape
    )
    if math.prod(shape) > _ELEMENTS:
        raise ValueError
    if not isinstance(first, _Const):
        raise ValueError  # noqa: TRY004  # an input that is left out
    if node.op == "Identity":
        return first
    if node.op == "Transpose":
        axes = tuple(node.get("perm", tuple(reversed(range(whole[0].ndim)))))
        path = first.path if axes == (1, 0) else None
        return _Const(whole[0].transpose(axes), path, not first.turned and path is not None)
    with np.errstate(all="ignore"):
        made = _FOLDED[node.op](node, *arrays)
    if made is None:
        raise ValueError
    return _Const(np.asarray(made))


def _axes(node: Node, array: np.ndarray | None) -> tuple[int, ...] | None:
    found = node.get("axes")
    if found is not None:
        return tuple(int(each) for each in found)
    return None if array is None else tuple(int(each) for each in array.reshape(-1))


def _unsqueezed(node: Node, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    import numpy as np

    return np.expand_dims(x, _axes(node, axes) or ())


def _squeezed(node: Node, x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return x.squeeze(_axes(node, axes))


def _reshaped(node: Node, x: np.ndarray, to: np.ndarray) -> np.ndarray:  # noqa: ARG001
    extents = [x.shape[n] if e == 0 else int(e) for n, e in enumerate(to.reshape(-1))]
    return x.reshape(extents)


def _cast(node: Node, x: np.ndarray) -> np.ndarray | None:
    names = {1: "float32", 11: "float64", 6: "int32", 7: "int64", 9: "bool"}
    name = names.get(node.get("to", 0))
    return None if name is None else x.astype(name)


def _expanded(node: Node, x: np.ndarray, to: np.ndarray) -> np.ndarray:  # noqa: ARG001
    import numpy as np

    shape = np.broadcast_shapes(x.shape, tuple(int(e) for e in to.reshape(-1)))
    if math.prod(shape) > _ELEMENTS:
        raise ValueError
    return np.broadcast_to(x, shape)


def _divided(_node: Node, a: np.ndarray, b: np.ndarray) -> Any:
    if a.dtype.kind == "f":
        return a / b
    # Of integers the operator leaves out the rest, whatever the sign.
    return (abs(a) // abs(b)) * ((a > 0) * 2 - 1) * ((b > 0) * 2 - 1) if (b != 0).all() else None


def _gathered(node: Node, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return x.take(indices, axis=node.get("axis", 0))


def _extents(_node: Node, x: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.asarray(x.shape, np.int64)


def _filled(node: Node, to: np.ndarray) -> np.ndarray:
    import numpy as np

    shape = tuple(int(extent) for extent in to.reshape(-1))
    if node.get("value") is not None or math.prod(shape) > _ELEMENTS:
        raise ValueError
    return np.zeros(shape, np.float32)


def _binary(name: str) -> Callable[..., Any]:
    def made(_node: Node, a: np.ndarray, b: np.ndarray) -> Any:
        import numpy as np

        return getattr(np, name)(a, b)

    return made


def _unary(name: str) -> Callable[..., Any]:
    def made(_node: Node, a: np.ndarray) -> Any:
        import numpy as np

        return getattr(np, name)(a)

    return made


_ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Pow"))
_FOLDED: dict[str, Callable[..., Any]] = {
    "Identity": lambda _node, x: x,
    "Transpose": lambda _node, x: x,
    "Cast": _cast,
    "Unsqueeze": _unsqueezed,
    "Squeeze": _squeezed,
    "Reshape": _reshaped,
    "Expand": _expanded,
    "Add": _binary("add"),
    "Sub": _binary("subtract"),
    "Mul": _binary("multiply"),
    "Div": _divided,
    "Sqrt": _unary("sqrt"),
    "Neg": _unary("negative"),
    "Exp": _unary("exp"),
    "Gather": _gathered,
    "Shape": _extents,
    "ConstantOfShape": _filled,
    "Reciprocal": lambda _node, x: 1 / x,
    "Concat": lambda node, *xs: __import__("numpy").concatenate(xs, node.get("axis", 0)),
}


# Operators on what depends on the observation.


def _plain(value: _Any | None) -> _Flow | None:
    return value if isinstance(value, _Flow) and not value.ones else None


def _last(flow: _Flow) -> bool:
    """Whether the last axis is one of the observation's own."""
    return bool(flow.shape) and flow.rank - 1 not in flow.ones


def _floats(array: np.ndarray) -> np.ndarray:
    return array.astype("float32")


def _same(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    if node.op == "Dropout" and len(given) > 2 and isinstance(given[2], _Const) and bool(given[2].array):
        return None
    return given[0]


def _cast_flow(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    to = node.get("to")
    if isinstance(given[0], _Dims):
        return given[0] if to in (6, 7) else None
    return given[0] if to in _FLOATS else None


def _activation(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow, slope, name = given[0], 0.01, _ACTIVATIONS.get(node.op)
    if node.op == "Elu":
        name = "elu" if node.get("alpha", 1.0) == 1.0 else None
    elif node.op == "Gelu":
        name = "gelu" if node.get("approximate", b"none") == b"none" else None
    elif node.op == "Swish":
        name = "silu" if node.get("alpha", 1.0) == 1.0 else None
    elif node.op == "LeakyRelu":
        name, slope = "leaky_relu", float(node.get("alpha", 0.01))
    elif node.op == "PRelu":
        slopes = given[1].array.reshape(-1)
        name, slope = "leaky_relu", float(slopes[0]) if (slopes == slopes[0]).all() else math.nan
    if name is None or not isinstance(flow, _Flow) or not math.isfinite(slope):
        return None
    return reader.add("activation", flow.shape, flow, ones=flow.ones, name=name, slope=slope)


def _gemm(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow, weight = _plain(given[0]), given[1]
    if flow is None or len(flow.shape) != 1 or not isinstance(weight, _Const) or node.get("transA", 0):
        return None
    kernel = weight.array.T if node.get("transB", 0) else weight.array
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    bias = given[2] if len(given) > 2 else None
    if kernel.ndim != 2 or kernel.shape[0] != flow.shape[0] or not (bias is None or isinstance(bias, _Const)):
        return None
    plain = alpha == 1.0 and (bias is None or beta == 1.0)
    if alpha != 1.0:
        kernel = kernel * alpha
    turned = weight.turned != bool(node.get("transB", 0))
    return _dense(reader, flow, (kernel, bias, beta), weight.path if plain else None, turned=turned)


def _dense(
    reader: _Reader,
    flow: _Flow,
    made: tuple[np.ndarray, _Const | None, float],
    path: Path | None,
    *,
    turned: bool,
) -> Any:
    """Add a dense layer; `path` is that of its weight where that is no computed one."""
    import numpy as np

    kernel, bias, beta = made
    width = kernel.shape[1]
    added = None
    if bias is not None:
        if bias.array.ndim > 2 or (bias.array.ndim == 2 and bias.array.shape[0] != 1):
            return None
        added = _floats(np.broadcast_to(bias.array.reshape(-1) * (beta if beta != 1.0 else 1), (width,)))
    whole = bias is None or (bias.path is not None and bias.array.shape == (width,) and beta == 1.0)
    weights = None
    if path is not None and whole:
        owner = "torch" if turned else "tensorflow"
        weights = Weights(path, None if bias is None else bias.path, None, owner)
    paths = tuple(p for p in (path, bias.path if bias is not None else None) if p is not None)
    ones = flow.ones
    return reader.add(
        "dense",
        (*flow.shape[:-1], width),
        flow,
        ones=ones,
        kernel=_floats(kernel),
        bias=added,
        weights=weights,
        paths=paths,
        source=(path, turned),
    )


def _matmul(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow, weight = given
    if not isinstance(flow, _Flow) or not isinstance(weight, _Const) or weight.array.ndim != 2:
        return None
    if len(flow.shape) != 1 or not _last(flow) or weight.array.shape[0] != flow.shape[0]:
        return None
    return _dense(reader, flow, (weight.array, None, 1.0), weight.path, turned=weight.turned)


def _wide(array: np.ndarray, flow: _Flow) -> np.ndarray | None:
    """Return a constant that is combined with a value by element, [n] or [1]; None for other shapes."""
    if array.size == 1 and array.ndim <= flow.rank:
        return array.reshape(1)
    if not _last(flow) or array.ndim > flow.rank or array.shape[-1] != flow.shape[-1]:
        return None
    if array.size != array.shape[-1]:
        return None
    return array.reshape(-1)


def _arithmetic(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    one, two = given
    if isinstance(one, _Flow) and isinstance(two, _Flow):
        return _of_two(reader, node, one, two)
    turned = isinstance(two, _Flow)
    flow, constant = (two, one) if turned else (one, two)
    if (
        not isinstance(flow, _Flow)
        or not isinstance(constant, _Const)
        or constant.array.dtype.kind not in "fiub"
    ):
        return None
    known = _part_of_pattern(reader, node, flow, constant, turned=turned)
    if known is not None:
        return known
    array = _wide(constant.array, flow)
    if array is None or (turned and node.op == "Div"):
        return None
    if node.op == "Add" and (found := _biased(reader, flow, constant)) is not None:
        return found
    return _affine(
        reader, node, flow, array, turned=turned, paths=() if constant.path is None else (constant.path,)
    )


def _biased(reader: _Reader, flow: _Flow, constant: _Const) -> _Flow | None:
    """Return a dense layer with the bias that is added to its product, None where it is none."""
    operation = reader.operation(flow)
    if operation is None or operation.kind != "dense" or operation.value["bias"] is not None:
        return None
    kernel = operation.value["kernel"]
    if constant.array.size != kernel.shape[1] or constant.array.ndim > 2:
        return None
    path, turned = operation.value["source"]
    before = _Flow(operation.inputs[0], (kernel.shape[0],), flow.ones)
    found = _dense(reader, before, (kernel, constant, 1.0), path, turned=turned)
    return found if isinstance(found, _Flow) else None


def _affine(
    reader: _Reader, node: Node, flow: _Flow, array: np.ndarray, *, turned: bool, paths: tuple[Path, ...]
) -> _Flow | None:
    import numpy as np

    wide = array.astype(np.float64)
    scale, shift = np.ones_like(wide), np.zeros_like(wide)
    if node.op == "Mul":
        scale = wide
    elif node.op == "Div":
        if (wide == 0).any():
            return None
        scale = 1 / wide
    elif node.op == "Sub":
        shift = wide if turned else -wide
        scale = -scale if turned else scale
    else:
        shift = wide
    return reader.add("affine", flow.shape, flow, ones=flow.ones, scale=scale, shift=shift, paths=paths)


def _of_two(reader: _Reader, node: Node, one: _Flow, two: _Flow) -> Any:  # noqa: C901  # patterns, one by one
    """Combine two values: a layer norm's or an activation's parts, or two layers' outputs."""
    a, b = reader.operation(one), reader.operation(two)
    if node.op == "Sub" and b is not None and b.kind == "mean" and b.inputs == (one.number,):
        return _partial(reader, node, "centred", one.shape, two, of=one.number)
    if node.op == "Mul":
        if one == two and a is not None and a.kind == "centred":
            return _partial(reader, node, "squared", one.shape, one)
        for x, y in ((one, two), (two, one)):
            found = reader.operation(y)
            if found is not None and found.inputs == (x.number,) and found.value.get("name") == "sigmoid":
                return reader.add("activation", x.shape, x, ones=x.ones, name="silu", slope=0.01)
            if found is not None and found.kind == "erf_1":
                gelu = _gelu(reader, node, x, found)
                if gelu is not None:
                    return gelu
    kinds = tuple(each.kind if each is not None else "" for each in (a, b))
    if node.op == "Div" and kinds == ("centred", "deviation") and a is not None and b is not None:
        return (
            _normed(reader, one, a.value["of"], b.value["epsilon"])
            if b.value["of"] == a.value["of"]
            else None
        )
    if one.shape != two.shape or one.ones != two.ones:
        return None
    if node.op == "Sub":
        two = reader.add("affine", two.shape, two, ones=two.ones, scale=_row(-1.0), shift=_row(0.0))
    elif node.op not in ("Add", "Mul"):
        return None
    return reader.add("multiply" if node.op == "Mul" else "add", one.shape, one, two, ones=one.ones)


def _row(value: float) -> np.ndarray:
    import numpy as np

    return np.full(1, value)


def _partial(
    reader: _Reader, node: Node, kind: str, shape: tuple[int, ...], flow: _Flow, **value: Any
) -> _Flow:
    """Add a value that has a meaning only as a part of a known layer."""
    where = node.name or next(iter(node.outputs), "")
    return reader.add(kind, shape, flow, ones=flow.ones, op=node.title, node=where, **value)


def _normed(reader: _Reader, centred: _Flow, of: int, epsilon: float) -> _Flow:
    import numpy as np

    width = centred.shape[-1]
    before = _Flow(of, centred.shape, centred.ones)
    scale, offset = np.ones(width, np.float32), np.zeros(width, np.float32)
    return reader.add(
        "layer_norm", centred.shape, before, ones=centred.ones, scale=scale, offset=offset, epsilon=epsilon,
        paths=(), weights=None, stage=0,
    )  # fmt: skip


def _part_of_pattern(reader: _Reader, node: Node, flow: _Flow, constant: _Const, *, turned: bool) -> Any:
    """Return the value where an operator with a constant is a part of a layer norm or of GELU, else None."""
    found = reader.operation(flow)
    if found is None:
        return None
    array = constant.array
    single = float(array.reshape(-1)[0]) if array.size == 1 else math.nan
    if node.op == "Pow" and found.kind == "centred" and not turned and single == 2.0:
        return _partial(reader, node, "squared", flow.shape, flow)
    if node.op == "Add" and found.kind == "variance" and single > 0:
        return _partial(reader, node, "shifted", flow.shape, flow, of=found.value["of"], epsilon=single)
    if node.op == "Add" and found.kind == "erf" and single == 1.0:
        return _partial(reader, node, "erf_1", flow.shape, flow, of=found.inputs[0])
    if node.op == "Mul" and found.kind == "gelu_2" and single == 0.5:
        return reader.add(
            "activation",
            flow.shape,
            _Flow(found.inputs[0], flow.shape),
            ones=flow.ones,
            name="gelu",
            slope=0.01,
        )
    if found.kind == "layer_norm" and found.value["stage"] < 2 and array.shape[-1:] == flow.shape[-1:]:
        return _scaled_norm(reader, node, flow, found, constant)
    return None


def _scaled_norm(reader: _Reader, node: Node, flow: _Flow, found: Operation, constant: _Const) -> Any:
    """Return a layer norm with the scale or the offset that follows it."""
    stage = {"Mul": 1, "Add": 2}.get(node.op, 0)
    if stage <= found.value["stage"] or constant.array.size != flow.shape[-1]:
        return None
    name = "scale" if stage == 1 else "offset"
    before = _Flow(found.inputs[0], flow.shape, flow.ones)
    value = {**found.value, name: _floats(constant.array.reshape(-1)), "stage": stage}
    at = {"Mul": 0, "Add": 1}[node.op]
    places = list(value.get("places", (None, None)))
    places[at] = constant.path if constant.array.ndim == 1 else None
    value["places"] = tuple(places)
    value["paths"] = tuple(p for p in places if p is not None)
    if None not in places:
        value["weights"] = Weights(places[0], places[1], value["epsilon"])
    return reader.add("layer_norm", flow.shape, before, ones=flow.ones, **value)


def _gelu(reader: _Reader, node: Node, x: _Flow, found: Operation) -> Any:
    """Return GELU where `x` (or half of it) meets 1 + erf(x / sqrt(2))."""
    inner = (
        reader.operations[found.value["of"] - reader._first] if found.value["of"] >= reader._first else None
    )
    if inner is None or inner.kind != "affine" or inner.value["shift"].any():
        return None
    if not math.isclose(float(inner.value["scale"].reshape(-1)[0]), 1 / math.sqrt(2), rel_tol=1e-6):
        return None
    if inner.inputs == (x.number,):
        return _partial(reader, node, "gelu_2", x.shape, x)
    own = reader.operation(x)
    halved = own is not None and own.kind == "affine" and own.inputs == inner.inputs
    if halved and own is not None and (own.value["scale"] == 0.5).all() and not own.value["shift"].any():
        return reader.add(
            "activation", x.shape, _Flow(own.inputs[0], x.shape), ones=x.ones, name="gelu", slope=0.01
        )
    return None


def _mean(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow = given[0]
    array = given[1].array if len(given) > 1 and isinstance(given[1], _Const) else None
    axes = _axes(node, array)
    if not isinstance(flow, _Flow) or axes not in ((-1,), (flow.rank - 1,)) or not node.get("keepdims", 1):
        return None
    if not _last(flow) or len(flow.shape) != 1:
        return None
    found = reader.operation(flow)
    if found is not None and found.kind == "squared":
        centred = reader.operations[found.inputs[0] - reader._first]
        return _partial(reader, node, "variance", flow.shape, flow, of=centred.value["of"])
    return _partial(reader, node, "mean", flow.shape, flow)


def _root(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    found = reader.operation(given[0]) if isinstance(given[0], _Flow) else None
    if found is None or found.kind != "shifted":
        return None
    return _partial(
        reader,
        node,
        "deviation",
        given[0].shape,
        given[0],
        of=found.value["of"],
        epsilon=found.value["epsilon"],
    )


def _erf(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    return _partial(reader, node, "erf", given[0].shape, given[0]) if isinstance(given[0], _Flow) else None


def _negative(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow = given[0]
    return reader.add("affine", flow.shape, flow, ones=flow.ones, scale=_row(-1.0), shift=_row(0.0))


def _layer_norm(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    import numpy as np

    flow, scale = given[0], given[1]
    offset = given[2] if len(given) > 2 and given[2] is not None else None
    axis = node.get("axis", -1)
    if not isinstance(flow, _Flow) or len(flow.shape) != 1 or axis not in (-1, flow.rank - 1):
        return None
    width = flow.shape[-1]
    if scale.array.size != width or (offset is not None and offset.array.size != width):
        return None
    added = np.zeros(width, np.float32) if offset is None else _floats(offset.array.reshape(-1))
    epsilon = float(node.get("epsilon", 1e-5))
    whole = offset is not None and all(c.path is not None and c.array.ndim == 1 for c in (scale, offset))
    return reader.add(
        "layer_norm",
        flow.shape,
        flow,
        ones=flow.ones,
        scale=_floats(scale.array.reshape(-1)),
        offset=added,
        epsilon=epsilon,
        weights=Weights(scale.path, offset.path, epsilon) if whole and offset is not None else None,
        paths=tuple(c.path for c in (scale, offset) if c is not None and c.path is not None),
        stage=2,
    )


def _batch_norm(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    import numpy as np

    flow = _plain(given[0])
    if flow is None or node.get("training_mode", 0) or len(flow.shape) not in (1, 3):
        return None
    scale, offset, mean, var = (each.array.astype(np.float64) for each in given[1:5])
    if any(each.shape != (flow.shape[0],) for each in (scale, offset, mean, var)):
        return None
    paths = tuple(each.path for each in given[1:5] if each.path is not None)
    image = len(flow.shape) == 3
    shape = flow.shape
    if image:
        shape = (*flow.shape[1:], flow.shape[0])
        flow = reader.add("transpose", shape, flow, axes=(1, 2, 0))
    factor = scale / np.sqrt(var + float(node.get("epsilon", 1e-5)))
    flow = reader.add("affine", shape, flow, scale=np.ones_like(mean), shift=-mean, paths=())
    flow = reader.add("affine", shape, flow, scale=factor, shift=offset, paths=paths)
    return reader.add("transpose", (shape[2], *shape[:2]), flow, axes=(2, 0, 1)) if image else flow


def _limited(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    """Limit a value: Clip, and Min or Max with a constant."""
    import numpy as np

    most = float(np.finfo(np.float32).max)
    if node.op == "Clip":
        flow = given[0]
        bounds = [node.get("min"), node.get("max")]
        for number, each in enumerate(given[1:3]):
            if each is not None:
                bounds[number] = float(each.array.reshape(-1)[0]) if each.array.size == 1 else math.nan
        low, high = (
            np.full(1, d if b is None else float(b)) for b, d in zip(bounds, (-most, most), strict=True)
        )
    else:
        if len(given) != 2:
            return None
        flow, constant = given if isinstance(given[0], _Flow) else (given[1], given[0])
        array = _wide(constant.array, flow) if isinstance(constant, _Const) else None
        if array is None:
            return None
        wide = array.astype(np.float64)
        low, high = (
            (np.full_like(wide, -most), wide) if node.op == "Min" else (wide, np.full_like(wide, most))
        )
    if not isinstance(flow, _Flow) or np.isnan(low).any() or np.isnan(high).any():
        return None
    return reader.add(
        "clip",
        flow.shape,
        flow,
        ones=flow.ones,
        low=np.clip(low, -most, most),
        high=np.clip(high, -most, most),
    )


def _columns(reader: _Reader, flow: _Flow, start: int, stop: int) -> _Any | None:
    if not 0 <= start < stop <= flow.shape[-1]:
        return None
    if (start, stop) == (0, flow.shape[-1]):
        return flow
    return reader.add("slice", (*flow.shape[:-1], stop - start), flow, ones=flow.ones, start=start, stop=stop)


def _split(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow = given[0]
    if not isinstance(flow, _Flow) or not _last(flow) or node.get("axis", 0) not in (-1, flow.rank - 1):
        return None
    width, number = flow.shape[-1], len(node.outputs)
    sizes = node.get("split")
    if sizes is None and len(given) > 1 and isinstance(given[1], _Const):
        sizes = given[1].array.reshape(-1)
    if sizes is None:
        each = -(-width // number)
        sizes = [each] * (number - 1) + [width - each * (number - 1)]
    stops = [0]
    for size in sizes:
        stops.append(stops[-1] + int(size))
    if stops[-1] != width or len(sizes) != number:
        return None
    return [_columns(reader, flow, a, b) for a, b in pairwise(stops)]


def _slice(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: C901  # versions
    value = given[0]
    lists = [node.get("starts"), node.get("ends"), node.get("axes"), node.get("steps")]
    for number, each in enumerate(given[1:5]):
        if isinstance(each, _Const):
            lists[number] = tuple(int(e) for e in each.array.reshape(-1))
        elif each is not None:
            return None
    starts, ends, axes, steps = lists
    if isinstance(value, _Dims):
        if axes not in (None, (0,)) or steps not in (None, (1,)):
            return None
        return _dims(value.values[starts[0] : ends[0]])
    axes = axes if axes is not None else tuple(range(len(starts)))
    if not isinstance(value, _Flow) or (steps is not None and any(step != 1 for step in steps)):
        return None
    for start, end, axis in zip(starts, ends, axes, strict=True):
        at = axis % value.rank
        if at == value.rank - 1 and _last(value):
            found = _columns(reader, value, *slice(start, end).indices(value.shape[-1])[:2])
            if not isinstance(found, _Flow):
                return None
            value = found
        elif start != 0 or end < (1 << 31) - 1:
            return None
    return value


def _gather(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    value, indices = given
    axis = node.get("axis", 0)
    if not isinstance(indices, _Const) or indices.array.ndim > 1:
        return None
    wanted = [int(each) for each in indices.array.reshape(-1)]
    if isinstance(value, _Dims):
        return _dims([value.values[each] for each in wanted], scalar=indices.array.ndim == 0)
    if not isinstance(value, _Flow):
        return None
    at = axis % value.rank
    if at in value.ones and indices.array.ndim == 0 and wanted in ([0], [-1]):
        return _without(value, (at,))
    if at != value.rank - 1 or not _last(value) or not wanted or indices.array.ndim == 0:
        return None
    start = wanted[0] % value.shape[-1]
    if [each % value.shape[-1] for each in wanted] != list(range(start, start + len(wanted))):
        return None
    return _columns(reader, value, start, start + len(wanted))


def _without(flow: _Flow, axes: Sequence[int]) -> _Flow | None:
    """Return a value without some of the axes of extent 1."""
    if not set(axes) <= set(flow.ones):
        return None
    kept = [each for each in flow.ones if each not in axes]
    return replace(flow, ones=tuple(each - sum(axis < each for axis in axes) for each in kept))


def _squeeze(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    value = given[0]
    axes = _axes(node, given[1].array if len(given) > 1 and given[1] is not None else None)
    if isinstance(value, _Dims):
        return _Dims(value.values, scalar=True) if len(value.values) == 1 else None
    if not isinstance(value, _Flow):
        return None
    return _without(value, value.ones if axes is None else [axis % value.rank for axis in axes])


def _unsqueeze(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    value = given[0]
    axes = _axes(node, given[1].array if len(given) > 1 and given[1] is not None else None)
    if isinstance(value, _Dims):
        return _Dims(value.values)
    if not isinstance(value, _Flow) or axes is None:
        return None
    for axis in sorted(axis % (value.rank + len(axes)) for axis in axes):
        value = replace(value, ones=tuple(sorted((*(o + (o >= axis) for o in value.ones), axis))))
    return value


def _transpose(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow = given[0]
    if not isinstance(flow, _Flow):
        return None
    perm = tuple(node.get("perm", tuple(reversed(range(flow.rank)))))
    if sorted(perm) != list(range(flow.rank)):
        return None
    own = [axis for axis in perm if axis not in flow.ones]
    if own == sorted(own):
        return replace(flow, ones=tuple(n for n, axis in enumerate(perm) if axis in flow.ones))
    if flow.ones or perm[0] != 0:
        return None
    axes = tuple(axis - 1 for axis in perm[1:])
    return reader.add("transpose", tuple(flow.shape[axis] for axis in axes), flow, axes=axes)


def _shape(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow = _plain(given[0])
    if flow is None or node.get("start", 0) or node.get("end") is not None:
        return None
    return _Dims((None, *flow.shape))


def _dims(values: Sequence[int | None], *, scalar: bool = False) -> _Const | _Dims:
    """Return extents of a shape: a constant where the number of observations is not among them."""
    import numpy as np

    if None in values:
        return _Dims(tuple(values), scalar)
    made = np.asarray(values, np.int64)
    return _Const(made.reshape(()) if scalar else made)


def _concat(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    if any(isinstance(each, _Dims) for each in given):
        values: list[int | None] = []
        for each in given:
            values += each.values if isinstance(each, _Dims) else [int(v) for v in each.array.reshape(-1)]
        return _Dims(tuple(values))
    if not all(isinstance(each, _Flow) and _last(each) for each in given):
        return None
    first = given[0]
    if node.get("axis", 0) not in (-1, first.rank - 1) or any(each.ones != first.ones for each in given):
        return None
    if any(each.shape[:-1] != first.shape[:-1] for each in given):
        return None
    if len(given) == 1:
        return first
    shape = (*first.shape[:-1], sum(each.shape[-1] for each in given))
    return reader.add("concat", shape, *given, ones=first.ones)


def _flatten(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow = _plain(given[0])
    if flow is None or node.get("axis", 1) not in (1, 1 - flow.rank):
        return None
    return _flat(reader, flow)


def _flat(reader: _Reader, flow: _Flow) -> _Flow:
    if len(flow.shape) == 1:
        return replace(flow, ones=())
    return reader.add("flatten", (math.prod(flow.shape),), replace(flow, ones=()), image=flow.shape)


def _reshape(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow, to = given
    if isinstance(flow, _Dims):
        return _Dims(flow.values)
    if not isinstance(flow, _Flow):
        return None
    target = list(to.values) if isinstance(to, _Dims) else [int(each) for each in to.array.reshape(-1)]
    size = math.prod(flow.shape)
    if not flow.ones and len(target) == 1 + len(flow.shape):
        rest = target[1:]
        if target[0] in (None, -1, 0, 1) and all(t in (0, n) for t, n in zip(rest, flow.shape, strict=True)):
            return flow
    if len(target) == 2 and (target[1] == size or (target[1] == -1 and target[0] != -1)):
        return _flat(reader, flow)
    if (
        len(target) == 3
        and len(flow.shape) == 1
        and (target[2] == size or (target[2] == -1 and -1 not in target[:2]))
    ):
        if target[0] == 1:
            return replace(flow, ones=(0,))
        if target[1] == 1:
            return replace(flow, ones=(1,))
    return None


def _convolution(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    flow, weight = _plain(given[0]), given[1]
    bias = given[2] if len(given) > 2 else None
    if flow is None or not isinstance(weight, _Const) or weight.array.ndim != 4 or len(flow.shape) != 3:
        return None
    made, taken, height, width = weight.array.shape
    plain = node.get("group", 1) == 1 and all(d == 1 for d in node.get("dilations", (1, 1)))
    if (
        not plain
        or taken != flow.shape[0]
        or node.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b"")
    ):
        return None
    strides = tuple(node.get("strides", (1, 1)))
    above, left, below, right = node.get("pads", (0, 0, 0, 0))
    size = [
        (n + sum(pad) - k) // stride + 1
        for n, pad, k, stride in zip(
            flow.shape[1:], ((above, below), (left, right)), (height, width), strides, strict=True
        )
    ]
    if min(size) < 1 or min(above, left, below, right) < 0:
        return None
    last = reader.add("transpose", (*flow.shape[1:], taken), flow, axes=(1, 2, 0))
    paths = tuple(c.path for c in (weight, bias) if c is not None and c.path is not None)
    found = reader.add(
        "convolution",
        (*size, made),
        last,
        kernel=_floats(weight.array.transpose(2, 3, 1, 0)),
        bias=None if bias is None else _floats(bias.array.reshape(-1)),
        strides=strides,
        padding=((above, below), (left, right)),
        paths=paths,
    )
    return reader.add("transpose", (made, *size), found, axes=(2, 0, 1))


def _cell(reader: _Reader, node: Node, given: Sequence[Any]) -> Any:
    """Add an LSTM or GRU that goes one step on from a state which the model takes and gives back."""
    import numpy as np

    given = [*given, *[None] * (8 - len(given))]
    flow, weight, recurrent, biases, lengths, hidden, cell, peephole = given[:8]
    lstm = node.op == "LSTM"
    settings = ("direction", "layout", "clip", "activations", "input_forget")
    plain = [node.get(name) in (None, 0, b"forward") for name in settings]
    if not isinstance(flow, _Flow) or flow.ones != (0,) or len(flow.shape) != 1 or not all(plain):
        return None
    if (
        lengths is not None
        or peephole is not None
        or not isinstance(hidden, _Flow)
        or weight.array.shape[0] != 1
    ):
        return None
    names = {
        flow_.number: name
        for name, flow_ in reader.scope.items()
        if isinstance(flow_, _Flow) and name in reader.states
    }
    states = [
        names.get(each.number) for each in (hidden, cell)[: 2 if lstm else 1] if isinstance(each, _Flow)
    ]
    if None in states or len(states) != (2 if lstm else 1):
        return None
    gates = 4 if lstm else 3
    units = recurrent.array.shape[2]
    if weight.array.shape != (1, gates * units, flow.shape[0]) or recurrent.array.shape != (
        1,
        gates * units,
        units,
    ):
        return None
    both = np.zeros((2, gates * units)) if biases is None else biases.array.reshape(2, gates * units)
    # The operator has gates i, o, f, c and z, r, h; here they stand as i, f, c, o and z, r, h.
    order = (0, 2, 3, 1) if lstm else (0, 1, 2)
    turn = np.concatenate([np.arange(g * units, (g + 1) * units) for g in order])
    carried = {states[0]: node.outputs[1] if len(node.outputs) > 1 else ""}
    if lstm:
        carried[states[1]] = node.outputs[2] if len(node.outputs) > 2 else ""
    found = reader.add(
        "lstm" if lstm else "gru",
        (units,),
        flow,
        ones=(0,),
        states=tuple(states),
        kernel=_floats(weight.array[0][turn].T),
        recurrent=_floats(recurrent.array[0][turn].T),
        biases=(_floats(both[0][turn]), _floats(both[1][turn])),
        after=bool(node.get("linear_before_reset", 0)),
        carried=carried,
        paths=tuple(c.path for c in (weight, recurrent, biases) if c is not None and c.path is not None),
    )
    # Y is [steps, directions, batch, units], of which the first two are 1; Y_h and Y_c lack the steps.
    return [replace(found, ones=(0, 1)), found, _partial(reader, node, "cell", (units,), found)]


_OPERATORS: dict[str, Callable[[_Reader, Node, Sequence[Any]], Any]] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys((*_ACTIVATIONS, "Elu", "Gelu", "Swish", "LeakyRelu", "PRelu"), _activation),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow"), _arithmetic),
    **dict.fromkeys(("Clip", "Min", "Max"), _limited),
    **dict.fromkeys(("LSTM", "GRU"), _cell),
    "Cast": _cast_flow,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "ReduceMean": _mean,
    "Sqrt": _root,
    "Erf": _erf,
    "Neg": _negative,
    "LayerNormalization": _layer_norm,
    "BatchNormalization": _batch_norm,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Transpose": _transpose,
    "Shape": _shape,
    "Concat": _concat,
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Conv": _convolution,
}


# Chains.


_Norm = tuple[Leaf | None, Leaf | None, float | None]


def _chain(program: Program) -> tuple[tuple[Step, ...] | None, _Norm]:
    """Return the program as the steps of a policy and statistics of observations; None for other programs."""
    none: _Norm = (None, None, None)
    line = all(op.inputs == (number,) for number, op in enumerate(program.operations))
    if program.states or not line or len(program.inputs[0][1]) != 1:
        return None, none
    operations = list(program.operations)
    first = next((n for n, op in enumerate(operations) if op.kind == "dense"), len(operations))
    norm = _normaliser(operations[:first], program.inputs[0][1][0])
    if norm is None:
        return None, none
    steps: list[Step] = []
    for number, op in enumerate(operations[first:]):
        name, value = (f"step {number}",), op.value
        if op.kind in ("dense", "layer_norm") and value["weights"] is not None:
            steps.append(Step(op.kind, name, value["weights"]))
        elif op.kind == "activation" and (
            value["name"] != "leaky_relu" or math.isclose(value["slope"], 0.01, rel_tol=1e-6)
        ):
            steps.append(Step("activation", name, value["name"]))
        elif op.kind == "affine":
            before = steps.pop().value if steps and steps[-1].kind == "affine" else (1.0, 0.0)
            scale, shift = value["scale"], value["shift"]
            both = (before[0] * scale, before[1] * scale + shift)
            steps.append(Step("affine", name, both))
        else:
            return None, none
    # What a policy's records take are lists.
    made = [s._replace(value=_lists(*s.value)) if s.kind == "affine" else s for s in steps]
    return tuple(made), norm


def _lists(scale: Any, offset: Any) -> tuple[list[float], list[float]]:
    import numpy as np

    wide = np.broadcast_arrays(np.asarray(scale, np.float64), np.asarray(offset, np.float64))
    one, two = ([float(number) for number in each.reshape(-1)] for each in wide)
    return one, two


def _normaliser(operations: Sequence[Operation], width: int) -> _Norm | None:
    """Return mean, deviation and limit of a normalisation of observations, None for anything else."""
    import numpy as np

    scale, shift, clip = np.ones(width), np.zeros(width), None
    for op in operations:
        if op.kind == "affine" and clip is None:
            scale, shift = scale * op.value["scale"], shift * op.value["scale"] + op.value["shift"]
        elif op.kind == "clip" and clip is None:
            low, high = op.value["low"], op.value["high"]
            if not ((high == high[0]).all() and (low == -high).all() and 0 < high[0] < 3e38):
                return None
            clip = float(high[0])
        else:
            return None
    if not operations:
        return None, None, None
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    mean, std = (0.0 - shift) / scale, 1 / scale
    return _leaf(mean, "mean"), _leaf(std, "std"), clip


def _leaf(array: np.ndarray, name: str) -> Leaf:
    return Leaf("float64", array.shape, Inline(array.astype("<f8").tobytes()), f"normalizer/{name}", "buffer")
