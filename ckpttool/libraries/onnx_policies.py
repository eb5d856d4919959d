"""ONNX graphs as networks."""

from __future__ import annotations

import contextlib
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    LimitError,
    MappingError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.source import Inline
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, key
from ckpttool.formats import onnx
from ckpttool.formats.onnx import OnnxFunction, OnnxModel, OnnxNode, OnnxTensor, OnnxValue, OperatorKey
from ckpttool.graphs.onnx import evaluate_node, module_of_node, split_scope
from ckpttool.libraries.activation_orders import read_orders, with_orders
from ckpttool.libraries.model_steps import ChainStep
from ckpttool.libraries.onnx_operators import (
    FLOATS,
    OPERATORS,
    PARTIAL,
    AnyValue,
    ProgramConstant,
    ProgramRecorder,
    ProgramValue,
    UnsupportedOperator,
)
from ckpttool.libraries.schema import Choices, Program, ProgramOperation
from ckpttool.mapping.layer_kinds import LayerFacts
from ckpttool.mapping.layers import LayerOption
from ckpttool.mapping.rules import (
    KEEP,
    TRANSPOSE,
    BlockOrder,
    Label,
    Move,
    Plan,
    Reshape,
    Rule,
    apply_plan,
    chain_rules,
    slice_rule,
)

if TYPE_CHECKING:
    import numpy as np


# Traces an ONNX graph from its observation to its action, without an ONNX runtime.
#
# Operators are defined in onnx_operators.py. Constants are computed when needed. An unsupported operator only
# matters if the action depends on it.

# float16 values are stored and cast before use: a graph that computes in float16 casts its input, too.
_TYPES = frozenset(("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool", "uint8", "int8"))
_DEEP, _NODES = 20, 100_000
_OLDEST = 7  # in older versions, Add and others broadcast by attributes, and Dropout is active by default
# Output names, preferred ones first, and names of outputs that are not the action.
_ACTS = (
    re.compile(r"deterministic_continuous_actions?"),
    re.compile(r"(continuous_)?actions?(_?mean|_?mu)?|acts?|actor|mean(_?actions?)?|mu|policy|pi|a"),
)
_ACTS_NOT = re.compile(
    r"val|critic|std|sigma|log|prob|entropy|hidden|cell|state|version|memory|shape|^(v|h|c)$|[hc]_?out|q\d*$"
)


# onnxruntime multiplies such weights with observations that it quantizes, too: errors of 1e-3 and more.
_QUANTIZED = frozenset(("DequantizeLinear", "QuantizeLinear", "DynamicQuantizeLinear"))
# A constant that cannot be computed: the node is named if the action depends on it.
_UNCOMPUTED = (FormatError, UnsupportedError, LimitError)


class OnnxComputation(NamedTuple):
    """Computation of a graph: its steps if it is a chain of layers, and the whole program.

    `mean`, `std` and `clip` are a chain's observation normalisation, `used` the paths of all constants.
    Of a graph that chooses discrete actions, both end with the values that the `choices` are made by.
    """

    steps: tuple[ChainStep, ...] | None
    program: Program
    mean: Leaf | None
    std: Leaf | None
    clip: float | None
    used: tuple[Path, ...]
    notes: tuple[str, ...]
    choices: Choices | None = None


def read_onnx_policy(checkpoint: Checkpoint, network: str = "actor") -> OnnxComputation | None:
    """Return the computation of an ONNX policy, None for another format.

    `network` may name the output that is the action. Raise UnsupportedError for an unsupported operator
    before that output, and UsageError if several outputs could be the action.
    """
    if checkpoint.format != onnx.NAME:
        return None
    model = onnx.read_model(checkpoint.files[0])
    version = max(model.opsets.get(domain, 0) for domain in ("", "ai.onnx"))
    if version < _OLDEST:
        raise UnsupportedError(
            "the opset version of the model is not supported",
            file=checkpoint.path,
            expected=f"opset {_OLDEST} or later",
            found=str(version or "none"),
        )
    try:
        reader = _OnnxProgramReader(checkpoint=checkpoint, model=model)
        reader.run(model.graph.nodes, reader.scope, 0)
        return reader.followed(network)
    except RecursionError:
        raise UnsupportedError("the graph is too deep", file=checkpoint.path) from None


def list_flattened_images(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the shape (height, width, channels) of images flattened before dense layers, by weight.

    It is () where the channels are already last. Raise UnsupportedError for a graph that cannot be
    traced.
    """
    model = onnx.read_model(checkpoint.files[0])
    reader = _OnnxProgramReader(checkpoint=checkpoint, model=model)
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


def choose_action_output(names: Sequence[str]) -> str | None:
    """Return the name of the output that is the action, None if the names do not decide."""
    likely = [name for name in names if not _ACTS_NOT.search(name.lower())]
    for pattern in _ACTS:
        found = [name for name in likely if pattern.fullmatch(name.lower())]
        if len(found) == 1:
            return found[0]
    return likely[0] if len(likely) == 1 and len(names) > 1 else None


@dataclass
class _OnnxProgramReader(ProgramRecorder):
    """Classifies every value of the graph: a constant, a shape, or a program step."""

    checkpoint: Checkpoint = field(kw_only=True)
    model: OnnxModel = field(kw_only=True)
    carried: dict[str, int] = field(default_factory=dict)
    functions: dict[OperatorKey, OnnxFunction] = field(default_factory=dict)
    calls: int = 0
    doubled: bool = False

    def __post_init__(self) -> None:
        """Store the constants and inputs of the graph."""
        graph = self.model.graph
        self.functions = {(each.domain, each.name, each.overload): each for each in self.model.functions}
        known = {tensor.name for tensor in graph.initializers}
        for tensor in graph.initializers:
            self.scope[tensor.name] = self._constant(tensor.name)
        self._inputs([value for value in graph.inputs if value.name not in known])

    # Inputs and outputs.

    def _inputs(self, values: Sequence[OnnxValue]) -> None:
        cells = {
            name for node in self.model.graph.nodes if node.op in ("LSTM", "GRU") for name in node.inputs[5:7]
        }
        states = [value for value in values if value.name in cells]
        plain = [value for value in values if value.name not in cells]
        if len(plain) != 1:
            raise UnsupportedError(
                "the model must have exactly one observation input",
                file=self.checkpoint.path,
                expected="one input",
                found=abbreviate_list([value.name for value in plain], 6) or "none",
            )
        only = plain[0]
        if only.code not in FLOATS and only.code not in (2, 3, 6, 7):
            raise self._no_input(only, "numbers of type float32, float64, uint8 or another integer type")
        if only.shape is None or len(only.shape) < 2:
            raise self._no_input(only, "[batch, number of observations], or images")
        rest = tuple(self._width(only, axis) for axis in range(1, len(only.shape)))
        self.doubled = only.code == 11
        self.inputs = [("obs", rest)]
        self.scope[only.name] = ProgramValue(0, rest)
        for number, value in enumerate(states):
            shape = value.shape or ()
            if len(shape) != 3 or shape[0] not in (1, "") or not isinstance(shape[2], int):
                raise self._no_input(value, "the state of one recurrent layer, [1, batch, units]")
            self.states[value.name] = shape[2]
            self.scope[value.name] = ProgramValue(1 + number, (shape[2],), (0,))

    def _width(self, value: OnnxValue, axis: int) -> int:
        """Return an extent of the input; if it is not fixed, the input size of the first layer."""
        extent = value.shape[axis] if value.shape is not None else ""
        if isinstance(extent, int) and extent > 0:
            return extent
        if value.shape is not None and len(value.shape) == 2:
            for node in self.model.graph.nodes:
                if node.inputs[:1] == (value.name,) and len(node.inputs) > 1:
                    found = self.scope.get(node.inputs[1])
                    if isinstance(found, ProgramConstant) and found.array.ndim:
                        turned = node.op == "Gemm" and node.get("transB", 0)
                        extents, row = found.array.shape, found.array.ndim == 1
                        last = turned or (node.op != "Gemm" and row)
                        return int(extents[-1 if last else 0])
        raise self._no_input(value, "fixed extents, except the number of observations")

    def _no_input(self, value: OnnxValue, expected: str) -> CkpttoolError:
        return UnsupportedError(
            "an input of the model is neither an observation nor a recurrent state",
            file=self.checkpoint.path,
            path=value.name,
            expected=expected,
            found=str(list(value.shape or ())),
        )

    def followed(self, network: str) -> OnnxComputation:
        """Return the program up to the output that is the action."""
        name, left = self._output(network)
        value = self.scope.get(name)
        if not isinstance(value, ProgramValue):
            what = (
                value if isinstance(value, UnsupportedOperator) else UnsupportedOperator("a constant", name)
            )
            raise self._refused(what)
        found = self._find_choices(value)
        value, choices = (value, None) if found is None else found
        if len(value.shape) != 1:
            raise self._refused(UnsupportedOperator(f"an output of shape {list(value.shape)}", name))
        taken = self._reachable(value.number)
        for number in taken:
            operation = self.operations[number - self.first]
            if operation.kind in PARTIAL:
                raise self._refused(UnsupportedOperator(operation.value["op"], operation.value["node"]))
        self._carry(taken)
        program = self._pruned(value, taken)
        notes = [f"{', '.join(left)} left out: {name} is the policy"] if left else []
        if self.doubled:
            notes.append("the model computes in float64 but is run in float32")
        steps, norm = _match_chain(program)
        used = tuple(path for operation in program.operations for path in operation.value.get("paths", ()))
        return OnnxComputation(steps, program, *norm, tuple(dict.fromkeys(used)), tuple(notes), choices)

    def _find_choices(self, output: ProgramValue) -> tuple[ProgramValue, Choices] | None:
        """Return the scores of discrete actions and the choices; None if the output is no such choice.

        Each action is the number of the largest score, or of the largest in one of consecutive slices of the
        scores, plus its first value.
        """
        last = self.operation(output)
        numbers = last.inputs if last is not None and last.kind == "concat" else (output.number,)
        counts, starts, stop, sources = [], [], 0, set()
        for number in numbers:
            operation, start = self._at(number), 0.0
            if operation is not None and operation.kind == "affine" and (operation.value["scale"] == 1).all():
                start = float(operation.value["shift"].reshape(-1)[0])
                operation = self._at(operation.inputs[0])
            if operation is None or operation.kind != "arg_max" or not start.is_integer():
                return None
            counts.append(operation.value["count"])
            starts.append(int(start))
            source, before = operation.inputs[0], self._at(operation.inputs[0])
            if len(numbers) > 1:
                if before is None or before.kind != "slice" or before.value["start"] != stop:
                    return None
                source, stop = before.inputs[0], before.value["stop"]
            sources.add(source)
        values = (value for value in self.scope.values() if isinstance(value, ProgramValue))
        scores = next((each for each in values if {each.number} == sources and not each.ones), None)
        if scores is None or scores.shape != (sum(counts),):
            return None
        return scores, Choices(tuple(counts), tuple(starts), single=len(counts) == 1)

    def _at(self, number: int) -> ProgramOperation | None:
        return self.operation(ProgramValue(number, ()))

    def _output(self, network: str) -> tuple[str, list[str]]:
        """Return the name of the output that is the action, and the names of the others."""
        names = [value.name for value in self.model.graph.outputs]
        if not names:
            raise UnsupportedError("the model has no output", file=self.checkpoint.path)
        others = [
            n for n in names if not (isinstance(v := self.scope.get(n), ProgramValue) and v.ones == (0,))
        ] or names
        if network in names:
            return network, [name for name in others if name != network]
        if network != "actor":
            raise UsageError(
                f"the model has no output named {network}",
                file=self.checkpoint.path,
                found=abbreviate_list(names, 8),
            )
        if len(others) == 1:
            return others[0], []
        best = choose_action_output(others)
        if best is not None:
            return best, [name for name in others if name != best]
        likely = [name for name in others if not _ACTS_NOT.search(name.lower())]
        raise UsageError(
            "the model has several outputs, and it is unknown which one is the action",
            file=self.checkpoint.path,
            found=abbreviate_list(names, 8),
            hint=" or ".join(f"--network {shlex.quote(name)}" for name in (likely or names)[:8]),
        )

    def _refused(self, what: UnsupportedOperator) -> CkpttoolError:
        return UnsupportedError(
            "the graph computes the action with an unsupported operation",
            file=self.checkpoint.path,
            path=what.node or None,
            found=what.op,
            hint="to convert only its layers, without the graph, use ckpttool convert --to torch",
        )

    def _reachable(self, number: int) -> list[int]:
        """Return the numbers of the operations that a value and the next states depend on."""
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
        """Require that the model outputs every state of its recurrent layers."""
        given = {value.name for value in self.model.graph.outputs}
        for number in taken:
            operation = self.operations[number - self.first]
            for name, output in operation.value.get("carried", {}).items():
                if output not in given and not any(
                    isinstance(value := self.scope.get(each), ProgramValue)
                    and value == self.scope.get(output)
                    for each in given
                ):
                    raise self._refused(
                        UnsupportedOperator(f"the next state of {name} is not a model output", output)
                    )
                self.carried[name] = number
        missing = [name for name in self.states if name not in self.carried]
        if missing:
            raise self._refused(UnsupportedOperator("a state that the model does not output", missing[0]))

    def _pruned(self, output: ProgramValue, taken: Sequence[int]) -> Program:
        places = {number: number for number in range(self.first)}
        operations: list[ProgramOperation] = []
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
            return UnsupportedOperator(f"a constant of an unsupported type ({name})", name)
        try:
            array = leaf.array()
        except CkpttoolError as error:
            raise error.located(file=error.file or self.checkpoint.path, path=name) from error.__cause__
        if leaf.dtype not in _TYPES:
            return UnsupportedOperator(f"{leaf.dtype} arithmetic", name)
        return ProgramConstant(array, path)

    def behind(self, number: int) -> ProgramOperation | None:
        """Return the operation before elementwise functions, None for the input."""
        while number >= self.first:
            operation = self.operations[number - self.first]
            if operation.kind not in ("activation", "clip"):
                return operation
            number = operation.inputs[0]
        return None

    def channels(self, number: int) -> int | None:
        """Return the position of a convolution's channel axis after the batch, None without one."""
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

    def run(self, nodes: Sequence[OnnxNode], scope: dict[str, AnyValue], depth: int) -> None:
        """Compute the values of nodes in graph order, which is the order of computation."""
        for node in nodes:
            self.calls += 1
            if self.calls > _NODES:
                raise UnsupportedError("the graph has too many nodes", file=self.checkpoint.path)
            if any(name in scope for name in node.outputs if name):
                raise UnsupportedError(
                    "two values in the graph have the same name",
                    file=self.checkpoint.path,
                    path=node.name or None,
                )
            outputs = self._outputs(node, scope, depth)
            lost = UnsupportedOperator(node.title, node.name or next(iter(node.outputs), ""))
            outputs += [lost] * (len(node.outputs) - len(outputs))
            scope |= {name: value for name, value in zip(node.outputs, outputs, strict=False) if name}

    def _outputs(self, node: OnnxNode, scope: dict[str, AnyValue], depth: int) -> list[AnyValue]:
        title = UnsupportedOperator(node.title, node.name or next(iter(node.outputs), ""))
        function = self.functions.get((node.domain, node.op, node.overload))
        if function is not None:
            return self._called(function, node, scope, depth, title)
        given = [scope.get(name) if name else None for name in node.inputs]
        if any(name and value is None for name, value in zip(node.inputs, given, strict=True)):
            return [title]
        if node.op == "Constant" and node.title == node.op:
            return [self._stated(node, title, outer=depth == 0)]
        unknown = next((value for value in given if isinstance(value, UnsupportedOperator)), None)
        if unknown is not None:
            return [unknown] * max(1, len(node.outputs))
        if any(attribute.ref for attribute in node.attributes.values()):
            return [title]
        try:
            if node.title != node.op:
                return [title]
            if given and all(value is None or isinstance(value, ProgramConstant) for value in given):
                return self._folded(node, given)
            rule = OPERATORS.get(node.op)
            found = rule(self, node, given) if rule is not None else None
        except (ValueError, TypeError, IndexError, OverflowError, AttributeError, *_UNCOMPUTED):
            found = None
        if found is None:
            return [title] * max(1, len(node.outputs))
        return found if isinstance(found, list) else [found]

    def _folded(self, node: OnnxNode, given: Sequence[AnyValue | None]) -> list[AnyValue]:
        """Return the results of an operator on constants; a transposed tensor keeps its path."""
        first = given[0]
        if node.op == "Identity" and isinstance(first, ProgramConstant):
            return [first]
        if node.op in _QUANTIZED:
            raise UnsupportedError("a quantized weight", found=node.title)
        arrays = [value.array if isinstance(value, ProgramConstant) else None for value in given]
        outputs = evaluate_node(node, arrays, self.model.opsets, self.checkpoint.tree)
        if any(array.dtype.name not in _TYPES for array in outputs):
            raise UnsupportedError("a computed constant of an unsupported type", found=node.title)
        if node.op == "Transpose" and isinstance(first, ProgramConstant) and first.array.ndim == 2:
            turned = tuple(node.get("perm", (1, 0))) == (1, 0)
            path = first.path if turned else None
            return [ProgramConstant(outputs[0], path, path is not None and not first.turned)]
        return [ProgramConstant(array) for array in outputs]

    def _called(
        self,
        function: OnnxFunction,
        node: OnnxNode,
        scope: dict[str, AnyValue],
        depth: int,
        title: UnsupportedOperator,
    ) -> list[AnyValue]:
        if depth > _DEEP or function.attributes or len(node.inputs) > len(function.inputs):
            return [title]
        if any(function.opsets.get(name, opset) != opset for name, opset in self.model.opsets.items()):
            return [title]
        inner = {
            name: scope[given]
            for name, given in zip(function.inputs, node.inputs, strict=False)
            if given in scope
        }
        self.run(function.nodes, inner, depth + 1)
        return [inner.get(name, title) for name in function.outputs]

    def _stated(self, node: OnnxNode, title: UnsupportedOperator, *, outer: bool) -> AnyValue:
        """Return the value of a Constant."""
        import numpy as np

        if isinstance(node.get("value"), OnnxTensor) and len(node.outputs) == 1:
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
                return ProgramConstant(np.asarray(node.get(name), dtype))
        return title


# Chains.


_Norm = tuple[Leaf | None, Leaf | None, float | None]


def _match_chain(program: Program) -> tuple[tuple[ChainStep, ...] | None, _Norm]:
    """Return the program as policy steps and observation statistics; None for other programs."""
    none: _Norm = (None, None, None)
    line = all(op.inputs == (number,) for number, op in enumerate(program.operations))
    if program.states or not line or len(program.inputs[0][1]) != 1:
        return None, none
    operations = list(program.operations)
    first = next((n for n, op in enumerate(operations) if op.kind == "dense"), len(operations))
    norm = _match_normalizer(operations[:first], program.inputs[0][1][0])
    if norm is None:
        return None, none
    steps: list[ChainStep] = []
    for number, op in enumerate(operations[first:]):
        name, value = (f"step {number}",), op.value
        if op.kind in ("dense", "layer_norm") and value["weights"] is not None:
            steps.append(ChainStep(op.kind, name, value["weights"]))
        elif op.kind == "activation" and (
            value["name"] != "leaky_relu" or math.isclose(value["slope"], 0.01, rel_tol=1e-6)
        ):
            steps.append(ChainStep("activation", name, value["name"]))
        elif op.kind == "affine":
            before = steps.pop().value if steps and steps[-1].kind == "affine" else (1.0, 0.0)
            scale, shift = value["scale"], value["shift"]
            both = (before[0] * scale, before[1] * scale + shift)
            steps.append(ChainStep("affine", name, both))
        else:
            return None, none
    # The policy's records require lists.
    made = [s._replace(value=_broadcast_lists(*s.value)) if s.kind == "affine" else s for s in steps]
    return tuple(made), norm


def _broadcast_lists(scale: Any, offset: Any) -> tuple[list[float], list[float]]:
    import numpy as np

    wide = np.broadcast_arrays(np.asarray(scale, np.float64), np.asarray(offset, np.float64))
    one, two = ([float(number) for number in each.reshape(-1)] for each in wide)
    return one, two


def _match_normalizer(operations: Sequence[ProgramOperation], width: int) -> _Norm | None:
    """Return mean, standard deviation and clipping of an observation normalisation, None otherwise."""
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
    return _make_leaf(mean, "mean"), _make_leaf(std, "std"), clip


def _make_leaf(array: np.ndarray, name: str) -> Leaf:
    return Leaf("float64", array.shape, Inline(array.astype("<f8").tobytes()), f"normalizer/{name}", "buffer")


# The layers of an ONNX graph as a PyTorch state_dict: operators identify the weights among constants.
#
# Sources: onnx/docs/Operators.md (the inputs of each operator); torch/onnx/utils.py and torch/onnx/_internal
# (names of nodes are paths of modules: `/actor/actor.0/Gemm`), tf2onnx (names of TensorFlow's operations).
# Exporters may transpose, rename or concatenate weights, so the operator, not the name, determines a weight's
# orientation.

_TORCH = re.compile(
    r"(?:(.*)[./])?(weight|bias|running_mean|running_var|(?:weight|bias)_[ih]h_l\d+(?:_reverse)?)"
)
_PARTS = re.compile(
    r"(?:(.*?)/)?(?:(?:Cast|BiasAdd|MatMul|Add|Conv2D|batchnorm)(?:_\d+)?/)?(?:ReadVariableOp(?:_\d+)?(?::0)?|kernel|bias)"
)
# Operators whose constants are settings and scalar factors, which no state_dict module contains.
_ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Clip", "Where", "Equal", "Less"))
_ELEMENTWISE |= {
    "Greater",
    "Reshape",
    "Expand",
    "Concat",
    "Slice",
    "Gather",
    "Pad",
    "Split",
    "Tile",
    "Unsqueeze",
}
_RECURRENT = {"LSTM": (4, (0, 2, 3, 1)), "GRU": (3, (1, 0, 2)), "RNN": (1, (0,))}
_SAME = frozenset(("Identity", "Cast", "Dropout"))
_STATES = frozenset(("Expand", "Concat", "Slice", *_RECURRENT))
_SHAPED = frozenset(("Unsqueeze", "Squeeze", "Reshape"))
# Operators on a recurrent layer's tensors in graphs from exporters without constant folding.
_CUT = frozenset(("Slice", "Concat", "Unsqueeze", "Gather"))
_CELL = re.compile(r"(.+)[./]((?:weight|bias)_[ih]h_l\d+(?:_reverse)?)")


class _OnnxLayerTensor(NamedTuple):
    """One tensor of a layer: its name in the layer, the source constant, and the rule to convert it."""

    name: str
    path: Path
    rule: Rule = KEEP


@dataclass(slots=True)
class _OnnxLayer:
    """One layer: the node that computes it, its kind, its tensors."""

    node: OnnxNode
    kind: str
    uses: list[_OnnxLayerTensor]
    facts: LayerFacts = field(default_factory=LayerFacts)


class OnnxStateDictPlan(NamedTuple):
    """Plan of the state_dict, and layer kinds that the graph shows but the tensors do not."""

    plan: Plan
    choices: tuple[LayerOption, ...]


def plan_state_dict(checkpoint: Checkpoint) -> OnnxStateDictPlan:
    """Return the plan from a model's constants to a state_dict; raise MappingError if it has no layers."""
    model = onnx.read_model(checkpoint.files[0])
    reader = _OnnxLayerFinder(checkpoint.tree, model)
    layers = reader.layers()
    if not layers:
        raise MappingError(
            "the graph has no layer of a supported kind",
            file=checkpoint.path,
            found=abbreviate_list(sorted({node.title for node in model.graph.nodes}), 6),
            hint="run ckpttool inspect to list its constants and operators",
        )
    names, assumed = _name_layers(layers, checkpoint.tree)
    moves: list[Move] = []
    labels: dict[Path, Label] = {}
    placed: dict[tuple[Path, str], Path] = {}
    known = read_orders(checkpoint)
    flattened = {path: shape for path, shape in _list_flattened(checkpoint) if path not in known}
    choices: list[LayerOption] = []
    for layer, name in zip(layers, names, strict=True):
        for use in layer.uses:
            place = (key(".".join((*name, use.name))),)
            if (use.path, use.rule.name) in placed:
                continue  # a layer that is used twice
            placed[use.path, use.rule.name] = place
            moves.append(Move(use.path, place, use.rule))
            labels[place] = Label(
                "buffer" if use.name.startswith("running_") else "parameter", key=str(place[0].value)
            )
        choices.append(_make_choice(layer, name, flattened))
    used = {move.source for move in moves}
    rest = _sort_unused(checkpoint.tree, reader, used)
    consumed = tuple(
        path for path, leaf in checkpoint.tree.tensors() if leaf.role == "other" and path not in used
    )
    plan = Plan(
        tuple(moves),
        containers={(): Container("OrderedDict")},
        assumed=tuple(assumed),
        consumed=tuple(path for path in (*consumed, *rest.zeros) if path not in rest.lost),
        notes=(*rest.notes, *_note_arithmetic(model, layers)),
        labels=labels,
        kept=rest.kept,
    )
    return OnnxStateDictPlan(
        plan, tuple(choice for choice in choices if choice.kind or choice.facts.flatten is not None)
    )


def read_as_state_dict(checkpoint: Checkpoint) -> Checkpoint:
    """Return the state_dict of a model's layers as a checkpoint."""
    plan = plan_state_dict(checkpoint).plan
    notes = (*checkpoint.notes, *plan.assumed, *plan.notes)
    tree = with_orders(apply_plan(checkpoint.tree, plan), checkpoint, sources=map_weight_constants(plan))
    return replace(checkpoint, format="pytorch", tree=tree, notes=notes)


def list_unread_constants(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Return the names of constants that no layer reads: those that may be weights, and the others."""
    plan, tree = plan_state_dict(checkpoint).plan, checkpoint.tree
    used, other = {move.source for move in plan.moves}, {*plan.consumed, *plan.kept}
    names = [(path, tree.names[path]) for path, _ in tree.tensors() if path not in used]
    lost = [name for path, name in names if path not in other]
    return lost, [name for path, name in names if path in other]


def map_weight_constants(plan: Plan) -> dict[Path, Path]:
    """Return, for each weight stored as one whole constant, that constant."""
    return {move.target: move.source for move in plan.moves}


def _make_choice(
    layer: _OnnxLayer, name: tuple[str, ...], flattened: Mapping[Path, tuple[int, ...]]
) -> LayerOption:
    title = "/".join(".".join(name).split("."))
    facts = layer.facts
    shape = next((flattened[use.path] for use in layer.uses if use.path in flattened), None)
    kind = {"batch_norm": None, "layer_norm": None}.get(layer.kind, layer.kind)
    if layer.kind == "dense" and shape is not None:
        facts = facts._replace(flatten=shape)
    ambiguous = kind if layer.kind in ("embedding", "depthwise", "dense", "convolution", "prelu") else None
    return LayerOption(title, lambda other: other == title, ambiguous, facts)


class _OnnxLayerFinder:
    """Finds the layers among the nodes of a graph."""

    def __init__(self, tree: Tree, model: OnnxModel) -> None:
        self.tree, self.model = tree, model
        self.nodes = list(model.graph.nodes)
        self.source: dict[str, tuple[Path, bool]] = {}
        for path, _ in tree.tensors():
            if len(path) == 1:
                self.source[str(path[0].value)] = (path, False)
        self.by_output = {name: node for node in self.nodes for name in node.outputs if name}
        self.users: dict[str, list[OnnxNode]] = {}
        for node in self.nodes:
            self._follow(node)
            for name in node.inputs:
                self.users.setdefault(name, []).append(node)
        self.refused: list[str] = []

    def _follow(self, node: OnnxNode) -> None:
        """Treat the output of a node as the constant it copies, if the node changes no number."""
        if len(node.inputs) < 1 or node.inputs[0] not in self.source or len(node.outputs) < 1:
            return
        path, turned = self.source[node.inputs[0]]
        leaf = self.tree[path]
        if node.op in _SAME and not (node.op == "Cast" and node.get("to") != 1):
            self.source[node.outputs[0]] = (path, turned)
        elif node.op == "Transpose" and isinstance(leaf, Leaf) and len(leaf.shape) == 2:
            exchanged = tuple(node.get("perm", (1, 0))) == (1, 0)
            self.source[node.outputs[0]] = (path, turned != exchanged)
        elif node.op in _SHAPED and isinstance(leaf, Leaf) and leaf.size == max(leaf.shape, default=0):
            # Axes of extent 1 do not change a row.
            self.source[node.outputs[0]] = (path, turned)

    def constant(self, node: OnnxNode, number: int) -> tuple[Path, bool, Leaf] | None:
        """Return the constant input of a node, whether it is transposed first, and its leaf."""
        name = node.inputs[number] if len(node.inputs) > number else ""
        found = self.source.get(name)
        leaf = self.tree[found[0]] if found is not None else None
        return (*found, leaf) if found is not None and isinstance(leaf, Leaf) else None

    def layers(self) -> list[_OnnxLayer]:
        """Return the layers in the order of computation."""
        found: list[_OnnxLayer] = []
        for node in self.nodes:
            rule = _RULES.get(node.op) if node.title == node.op else None
            made = rule(self, node) if rule is not None else None
            found += made or []
        return [*found, *self._cells({use.path for layer in found for use in layer.uses})]

    def _cells(self, used: set[Path]) -> Iterator[_OnnxLayer]:
        """Yield recurrent layers under PyTorch's own names; the graph slices and joins their tensors."""
        nodes = [node for node in self.nodes if node.op in _RECURRENT and node.title == node.op]
        groups: dict[str, list[_OnnxLayerTensor]] = {}
        for path in self.tree if nodes else ():
            name = _CELL.fullmatch(str(path[0].value)) if len(path) == 1 and path not in used else None
            users = {node.op for node in self.users.get(str(path[0].value), ())}
            if name is not None and users and users <= _CUT:
                groups.setdefault(name[1], []).append(_OnnxLayerTensor(name[2], path))
        for uses in groups.values():
            yield _OnnxLayer(nodes[0], nodes[0].op.lower(), uses)

    def weight(self, node: OnnxNode, number: int, *, stored: bool) -> _OnnxLayerTensor | None:
        """Return a matrix in state_dict layout, [out, in]; `stored` means that the operator uses it as is."""
        found = self.constant(node, number)
        if found is None or len(found[2].shape) != 2:
            return None
        path, turned, _ = found
        return _OnnxLayerTensor("weight", path, KEEP if stored != turned else TRANSPOSE)

    def row(
        self, node: OnnxNode, number: int, name: str, width: int | None = None
    ) -> _OnnxLayerTensor | None:
        """Return a row of numbers, without axes of extent 1 before it."""
        found = self.constant(node, number)
        if found is None or found[1] or (width is not None and found[2].size != width):
            return None
        path, _, leaf = found
        if leaf.size != max(leaf.shape, default=0) or not leaf.shape:
            return None
        return _OnnxLayerTensor(name, path, KEEP if len(leaf.shape) == 1 else Reshape((leaf.size,)))

    def follower(self, node: OnnxNode, op: str) -> tuple[OnnxNode, int] | None:
        """Return the only consumer of a value if it has a constant operand, and that operand's position."""
        users = self.users.get(node.outputs[0], []) if node.outputs else []
        if len(users) != 1 or users[0].op != op or len(users[0].inputs) != 2:
            return None
        other = 1 - users[0].inputs.index(node.outputs[0])
        return (users[0], other) if users[0].inputs[other] in self.source else None


def _gemm(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
    weight = reader.weight(node, 1, stored=bool(node.get("transB", 0)))
    if weight is None or node.get("transA", 0):
        return []
    if node.get("alpha", 1.0) != 1.0 or node.get("beta", 1.0) != 1.0:
        reader.refused.append(f"{node.name or node.outputs[0]} (Gemm with alpha or beta)")
        return []
    bias = reader.row(node, 2, "bias")
    return [_OnnxLayer(node, "dense", [weight, *([bias] if bias is not None else [])])]


def _matmul(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
    weight = reader.weight(node, 1, stored=False)
    if weight is None:
        return []
    leaf = reader.tree[weight.path]
    width = leaf.shape[1 if weight.rule is TRANSPOSE else 0] if isinstance(leaf, Leaf) else None
    after = reader.follower(node, "Add")
    bias = reader.row(*after, "bias", width) if after is not None else None
    return [_OnnxLayer(node, "dense", [weight, *([bias] if bias is not None else [])])]


def _convolution(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
    found = reader.constant(node, 1)
    if found is None or found[1]:
        return []
    kind, group = "convolution", node.get("group", 1)
    if group > 1:
        if found[2].shape[1] != 1 or node.op == "ConvTranspose":
            reader.refused.append(f"{node.name or node.outputs[0]} ({node.op} in {group} groups)")
            return []
        kind = "depthwise"
    bias = reader.row(node, 2, "bias")
    layer = _OnnxLayer(
        node, kind, [_OnnxLayerTensor("weight", found[0]), *([bias] if bias is not None else [])]
    )
    if kind == "depthwise":
        layer.facts = LayerFacts(number=found[2].shape[0] // group)
    return [layer]


def _row_reader(kind: str, *names: str) -> Callable[[_OnnxLayerFinder, OnnxNode], list[_OnnxLayer]]:
    """Return the handler of an operator whose inputs after the first are rows with these names."""

    def read(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
        found = [reader.row(node, number + 1, name) for number, name in enumerate(names)]
        uses = [use for use in found if use is not None]
        return [_OnnxLayer(node, kind, uses)] if uses and found[0] is not None else []

    return read


def _match_layer_norm(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
    """Return a layer norm built from small operators: a quotient by a root, a product, a sum."""
    root = reader.by_output.get(node.inputs[1]) if len(node.inputs) > 1 else None
    scaled = reader.follower(node, "Mul")
    if root is None or root.op != "Sqrt" or scaled is None:
        return []
    weight = reader.row(*scaled, "weight")
    shifted = reader.follower(scaled[0], "Add")
    bias = reader.row(*shifted, "bias") if shifted is not None else None
    return [_OnnxLayer(node, "layer_norm", [weight, bias])] if weight is not None and bias is not None else []


def _embedding(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
    found = reader.constant(node, 0)
    taken_ = node.inputs[1] in reader.source if len(node.inputs) > 1 else True
    if found is None or found[1] or taken_ or len(found[2].shape) != 2 or node.get("axis", 0):
        return []
    return [_OnnxLayer(node, "embedding", [_OnnxLayerTensor("weight", found[0])])]


def _recurrent(reader: _OnnxLayerFinder, node: OnnxNode) -> list[_OnnxLayer]:
    """Return a recurrent layer, whose tensors contain both directions and both biases."""
    gates, order = _RECURRENT[node.op]
    weights = [reader.constant(node, number) for number in (1, 2)]
    biases = reader.constant(node, 3)
    if any(each is None or each[1] or len(each[2].shape) != 3 for each in weights):
        return []
    title = node.name or node.outputs[0]
    if node.op == "GRU" and not node.get("linear_before_reset", 0):
        reader.refused.append(f"{title} (a GRU with linear_before_reset = 0)")
        return []
    if node.get("activations") is not None or (len(node.inputs) > 7 and node.inputs[7]):
        reader.refused.append(f"{title} ({node.op} with non-default activations or peepholes)")
        return []
    uses: list[_OnnxLayerTensor] = []
    for name, each in zip(("weight_ih", "weight_hh"), weights, strict=True):
        if each is None:
            return []
        directions, rows, columns = each[2].shape
        for number in range(directions):
            turn = _direction_rule(order, number, directions, (rows, columns))
            uses.append(_OnnxLayerTensor(f"{name}_l0{'_reverse' * number}", each[0], turn))
    if biases is not None:
        directions, both = biases[2].shape
        for number in range(directions):
            for half, name in enumerate(("bias_ih", "bias_hh")):
                cut = slice_rule(half * both // 2, (half + 1) * both // 2, both, 1)
                turn = chain_rules(cut, _direction_rule(order, number, directions, (both // 2,)))
                uses.append(_OnnxLayerTensor(f"{name}_l0{'_reverse' * number}", biases[0], turn))
    return [_OnnxLayer(node, node.op.lower(), uses)] if gates else []


def _direction_rule(order: tuple[int, ...], number: int, directions: int, shape: tuple[int, ...]) -> Rule:
    blocks = BlockOrder(0, order) if len(order) > 1 else KEEP
    return chain_rules(slice_rule(number, number + 1, directions), Reshape(shape), blocks)


_RULES: dict[str, Callable[[_OnnxLayerFinder, OnnxNode], list[_OnnxLayer]]] = {
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Conv": _convolution,
    "ConvTranspose": _convolution,
    "BatchNormalization": _row_reader("batch_norm", "weight", "bias", "running_mean", "running_var"),
    "LayerNormalization": _row_reader("layer_norm", "weight", "bias"),
    "InstanceNormalization": _row_reader("layer_norm", "weight", "bias"),
    "PRelu": _row_reader("prelu", "weight"),
    "Div": _match_layer_norm,
    "Gather": _embedding,
    **dict.fromkeys(_RECURRENT, _recurrent),
}


# Names.


def _name_layers(layers: Sequence[_OnnxLayer], tree: Tree) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return a name for each layer, and a sentence if names do not come from the tensors."""
    taken_: Counter[tuple[str, ...]] = Counter()
    first: dict[Path, tuple[str, ...]] = {}
    found: list[tuple[str, ...]] = []
    given: list[str] = []
    for number, layer in enumerate(layers):
        shared = first.get(layer.uses[0].path)
        if shared is not None:
            found.append(shared)
            continue
        stored = [_module_of_tensor(str(use.path[0].value)) for use in layer.uses]
        name = next((each for each in stored if each), None)
        if name is None:
            name = module_of_node(layer.node.name) or ("layers", str(number))
            given.append(f"{tree.names[layer.uses[0].path]} is {'.'.join((*name, layer.uses[0].name))}")
        taken_[name] += 1
        if taken_[name] > 1:
            name = (*name[:-1], f"{name[-1]}_{taken_[name]}")
        first[layer.uses[0].path] = name
        found.append(name)
    assumed = [f"names taken from the graph's nodes: {abbreviate_list(given, 3)}"] if given else []
    return found, assumed


def _module_of_tensor(stored: str) -> tuple[str, ...] | None:
    """Return the module in a constant's own name, None for an exporter's number."""
    if "::" in stored:
        return None
    found = _TORCH.fullmatch(stored) or _PARTS.fullmatch(stored)
    if found is None or not found[1]:
        return None
    return split_scope(found[1])


# Constants outside layers.


class _UnusedConstants(NamedTuple):
    """Constants outside layers: kept in the sidecar, unneeded zeros, lost ones, and notes."""

    kept: tuple[Path, ...]
    zeros: tuple[Path, ...]
    lost: frozenset[Path]
    notes: tuple[str, ...]


def _sort_unused(tree: Tree, reader: _OnnxLayerFinder, used: set[Path]) -> _UnusedConstants:
    """Sort the constants that belong to no layer."""
    kept: list[Path] = []
    lost: list[str] = []
    zeros: list[Path] = []
    gone: set[Path] = set()
    by_path: dict[Path, set[str]] = {}
    for name, (path, _) in reader.source.items():
        by_path.setdefault(path, set()).update(node.title for node in reader.users.get(name, ()))
    for path, leaf in tree.items():
        if path in used or (isinstance(leaf, Leaf) and leaf.role == "other"):
            continue
        operators = by_path.get(path, set()) - _SAME - {"Transpose"}
        plain = isinstance(leaf, Leaf) and leaf.size == max(leaf.shape, default=1)
        if isinstance(leaf, Leaf) and operators <= _STATES and not plain and not leaf.array().any():
            zeros.append(path)  # the initial state of a recurrent layer
        elif isinstance(leaf, ValueLeaf) or not plain or not operators <= _ELEMENTWISE or len(path) > 1:
            gone.add(path)
            lost.append(f"{tree.names[path]} ({', '.join(sorted(operators)) or 'no operator of the graph'})")
        else:
            kept.append(path)
    notes = []
    if reader.refused:
        notes.append(f"not converted: {abbreviate_list(reader.refused, 4)}")
    if lost:
        notes.append(f"constants not used by a supported layer: {abbreviate_list(lost, 4)}")
    return _UnusedConstants(tuple(kept), tuple(zeros), frozenset(gone), tuple(notes))


def _note_arithmetic(model: OnnxModel, layers: Sequence[_OnnxLayer]) -> Iterator[str]:
    """Yield a note on operators outside the layers, which a weights file cannot represent."""
    own = {id(layer.node) for layer in layers}
    shapes = _SAME | {"Constant", "Shape", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
    operators = Counter(
        node.title for node in model.graph.nodes if id(node) not in own and node.op not in shapes
    )
    if operators:
        words = abbreviate_list([name for name, _ in operators.most_common()], 6)
        yield f"the graph also computes {words}, which a weights file cannot represent"


def _list_flattened(checkpoint: Checkpoint) -> Iterator[tuple[Path, tuple[int, ...]]]:
    """Yield the shape (height, width, channels) of each dense layer's flattened input, by weight.

    A layer whose image has the channels last needs no change: its shape is ().
    """
    with contextlib.suppress(MappingError, UnsupportedError, UsageError):
        yield from list_flattened_images(checkpoint)
