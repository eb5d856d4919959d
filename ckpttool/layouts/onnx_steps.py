"""Follows an ONNX graph from its observation to its action; nothing of it is run by an ONNX runtime.

What each operator is stands in onnx_operators.py. Constants are computed where they are needed. An operator
that is not known matters only on the way to the action.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError, some
from ckpttool.formats import onnx
from ckpttool.formats.onnx import listing
from ckpttool.formats.onnx.model import Function, Model, Node, Tensor, Value
from ckpttool.layouts.canonical import Operation, Program
from ckpttool.layouts.model_steps import Step
from ckpttool.layouts.onnx_operators import (
    FLOATS,
    FOLDED,
    OPERATORS,
    PARTIAL,
    AnyValue,
    Const,
    Flow,
    Recorder,
    Unknown,
    folded,
)
from ckpttool.leaf import Leaf, Path, key
from ckpttool.source import Inline

if TYPE_CHECKING:
    import numpy as np

# Halves are stored and cast before they are used: a graph that computes with them casts its input, too.
_TYPES = frozenset(("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool", "uint8", "int8"))
_DEEP, _NODES = 20, 100_000
_OLDEST = 7  # before it, Add and others broadcast by attributes, and Dropout acts unless it is told not to
# Names of outputs, the better ones first, and of those that are no action.
_ACTS = (
    re.compile(r"deterministic_continuous_actions?"),
    re.compile(r"(continuous_)?actions?(_?mean|_?mu)?|acts?|mean(_?actions?)?|mu|policy|pi|a"),
)
_ACTS_NOT = re.compile(
    r"val|std|sigma|log|prob|entropy|hidden|cell|state|version|memory|shape|^(v|h|c)$|[hc]_?out|q\d*$"
)


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
    version = max(model.opsets.get(domain, 0) for domain in ("", "ai.onnx"))
    if version < _OLDEST:
        raise UnsupportedError(
            "the operators of the model are of a version that is not followed",
            file=checkpoint.path,
            expected=f"opset {_OLDEST} or later",
            found=str(version or "none"),
        )
    try:
        reader = _Reader(checkpoint=checkpoint, model=model)
        reader.run(model.graph.nodes, reader.scope, 0)
        return reader.followed(network)
    except RecursionError:
        raise UnsupportedError("the graph is too deep to be followed", file=checkpoint.path) from None


def flattened(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the shape (height, width, channels) of images that dense layers take flattened, by their weights.

    It is () where the channels are last already. Raise as `of_onnx` does for a graph that is not followed.
    """
    model = listing.parsed(checkpoint.files[0])
    reader = _Reader(checkpoint=checkpoint, model=model)
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
class _Reader(Recorder):
    """Computes what every value of the graph is: a constant, a shape, or a step of a program."""

    checkpoint: Checkpoint = field(kw_only=True)
    model: Model = field(kw_only=True)
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
        if only.code not in FLOATS and only.code not in (2, 3, 6, 7):
            raise self._no_input(only, "numbers of type float32, float64, uint8 or integers")
        if only.shape is None or len(only.shape) < 2:
            raise self._no_input(only, "[batch, number of observations], or images")
        rest = tuple(self._width(only, axis) for axis in range(1, len(only.shape)))
        self.doubled = only.code == 11
        self.inputs = [("obs", rest)]
        self.scope[only.name] = Flow(0, rest)
        for number, value in enumerate(states):
            shape = value.shape or ()
            if len(shape) != 3 or shape[0] not in (1, "") or not isinstance(shape[2], int):
                raise self._no_input(value, "the state of one recurrent layer, [1, batch, units]")
            self.states[value.name] = shape[2]
            self.scope[value.name] = Flow(1 + number, (shape[2],), (0,))

    def _width(self, value: Value, axis: int) -> int:
        """Return an extent of the input: its own, or what the first layer takes where that is not fixed."""
        extent = value.shape[axis] if value.shape is not None else ""
        if isinstance(extent, int) and extent > 0:
            return extent
        if value.shape is not None and len(value.shape) == 2:
            for node in self.model.graph.nodes:
                if node.inputs[:1] == (value.name,) and len(node.inputs) > 1:
                    found = self.scope.get(node.inputs[1])
                    if isinstance(found, Const) and found.array.ndim:
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
        if not isinstance(value, Flow):
            what = value if isinstance(value, Unknown) else Unknown("a constant", name)
            raise self._refused(what)
        if len(value.shape) != 1:
            raise self._refused(Unknown(f"an output of shape {list(value.shape)}", name))
        taken = self._reachable(value.number)
        for number in taken:
            operation = self.operations[number - self.first]
            if operation.kind in PARTIAL:
                raise self._refused(Unknown(operation.value["op"], operation.value["node"]))
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
        if not names:
            raise UnsupportedError("the model has no output", file=self.checkpoint.path)
        others = [
            n for n in names if not (isinstance(v := self.scope.get(n), Flow) and v.ones == (0,))
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
            hint=" or ".join(f"--network {shlex.quote(name)}" for name in (acting or names)[:8]),
        )

    def _refused(self, what: Unknown) -> CkpttoolError:
        return UnsupportedError(
            "the graph computes something on the way to the action that is not known here",
            file=self.checkpoint.path,
            path=what.node or None,
            found=what.op,
            hint="its layers alone, without the graph: ckpttool convert writes them, --to torch",
        )

    def _reachable(self, number: int) -> list[int]:
        """Return the numbers of the operations that a value, and the next states, depend on."""
        found: set[int] = set()
        waiting = [number]
        while waiting:
            each = waiting.pop()
            if each < self.first or each in found:
                continue
            found.add(each)
            operation = self.operations[each - self.first]
            waiting += operation.inputs
        return sorted(found)

    def _carry(self, taken: Sequence[int]) -> None:
        """Require that the model gives back every state that its cells take."""
        given = {value.name for value in self.model.graph.outputs}
        for number in taken:
            operation = self.operations[number - self.first]
            for name, output in operation.value.get("carried", {}).items():
                if output not in given and not any(
                    isinstance(value := self.scope.get(each), Flow) and value == self.scope.get(output)
                    for each in given
                ):
                    raise self._refused(Unknown(f"the next state of {name} is no output", output))
                self.carried[name] = number
        missing = [name for name in self.states if name not in self.carried]
        if missing:
            raise self._refused(Unknown("a state that nothing gives back", missing[0]))

    def _pruned(self, output: Flow, taken: Sequence[int]) -> Program:
        places = {number: number for number in range(self.first)}
        operations: list[Operation] = []
        for number in taken:
            operation = self.operations[number - self.first]
            places[number] = self.first + len(operations)
            operations.append(operation._replace(inputs=tuple(places[each] for each in operation.inputs)))
        return Program(
            tuple(self.inputs), dict(self.states), tuple(operations), places[output.number], output.shape[0]
        )

    # Values.

    def _constant(self, name: str) -> AnyValue:
        path = (key(name),)
        leaf = self.checkpoint.tree.get(path)
        if not isinstance(leaf, Leaf) or leaf.dtype == "string":
            return Unknown(f"a constant of a type that is not read ({name})", name)
        try:
            array = leaf.array()
        except CkpttoolError as error:
            raise error.located(file=error.file or self.checkpoint.path, path=name) from error.__cause__
        if leaf.dtype not in _TYPES:
            return Unknown(f"{leaf.dtype} arithmetic", name)
        return Const(array, path)

    def behind(self, number: int) -> Operation | None:
        """Return the operation behind functions of every element, None for the input."""
        while number >= self.first:
            operation = self.operations[number - self.first]
            if operation.kind not in ("activation", "clip"):
                return operation
            number = operation.inputs[0]
        return None

    def channels(self, number: int) -> int | None:
        """Return which axis behind the batch has the channels of a convolution's image, None without one."""
        axes = (0, 1, 2)
        while number >= self.first:
            operation = self.operations[number - self.first]
            if operation.kind == "convolution":
                return axes.index(2)
            if operation.kind == "transpose":
                axes = tuple(operation.value["axes"][axis] for axis in axes)
            elif operation.kind not in ("activation", "affine", "clip"):
                return None
            number = operation.inputs[0]
        return None

    def run(self, nodes: Sequence[Node], scope: dict[str, AnyValue], depth: int) -> None:
        """Compute the values of nodes in their order, which is that of computation."""
        for node in nodes:
            self.calls += 1
            if self.calls > _NODES:
                raise UnsupportedError(
                    "the graph has too many nodes to be followed", file=self.checkpoint.path
                )
            if any(name in scope for name in node.outputs if name):
                raise UnsupportedError(
                    "two values of the graph have one name", file=self.checkpoint.path, path=node.name or None
                )
            outputs = self._outputs(node, scope, depth)
            lost = Unknown(node.title, node.name or next(iter(node.outputs), ""))
            outputs += [lost] * (len(node.outputs) - len(outputs))
            scope |= {name: value for name, value in zip(node.outputs, outputs, strict=False) if name}

    def _outputs(self, node: Node, scope: dict[str, AnyValue], depth: int) -> list[AnyValue]:
        title = Unknown(node.title, node.name or next(iter(node.outputs), ""))
        function = self.functions.get((node.domain, node.op))
        if function is not None:
            return self._called(function, node, scope, depth, title)
        given = [scope.get(name) if name else None for name in node.inputs]
        if any(name and value is None for name, value in zip(node.inputs, given, strict=True)):
            return [title]
        if node.op == "Constant" and node.title == node.op:
            return [self._stated(node, title, outer=depth == 0)]
        unknown = next((value for value in given if isinstance(value, Unknown)), None)
        if unknown is not None:
            return [unknown] * max(1, len(node.outputs))
        if any(attribute.ref for attribute in node.attributes.values()):
            return [title]
        try:
            if node.title != node.op:
                return [title]
            if all(value is None or isinstance(value, Const) for value in given) and node.op in FOLDED:
                arrays = [value.array if isinstance(value, Const) else None for value in given]
                return [folded(node, arrays, given[0] if given else None)]
            rule = OPERATORS.get(node.op)
            found = rule(self, node, given) if rule is not None else None
        except (ValueError, TypeError, IndexError, OverflowError, AttributeError):
            found = None
        if found is None:
            return [title] * max(1, len(node.outputs))
        return found if isinstance(found, list) else [found]

    def _called(
        self, function: Function, node: Node, scope: dict[str, AnyValue], depth: int, title: Unknown
    ) -> list[AnyValue]:
        if depth > _DEEP or function.attributes or len(node.inputs) > len(function.inputs):
            return [title]
        inner = {
            name: scope[given]
            for name, given in zip(function.inputs, node.inputs, strict=False)
            if given in scope
        }
        self.run(function.nodes, inner, depth + 1)
        return [inner.get(name, title) for name in function.outputs]

    def _stated(self, node: Node, title: Unknown, *, outer: bool) -> AnyValue:
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
                return Const(np.asarray(node.get(name), dtype))
        return title


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
