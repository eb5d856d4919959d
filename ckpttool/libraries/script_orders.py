"""Evaluate TorchScript code on numbered entries, to find the image orders of layers.

Sources: torch/csrc/jit/serialization/python_print.cpp (the language), torch/_refs and the
documentation of torch.* (arguments of operations), torch/csrc/jit/serialization/export_module.cpp
(`traced_inputs.pkl`).
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ckpttool.core.activations import UNKNOWN, AxisOrder, FeatureOrders, TrackingLimitError, framework_order
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Leaf, Path, attr
from ckpttool.graphs.torchscript_code import (
    ScriptModule,
    ScriptTensor,
    UnsupportedScriptError,
    read_code,
    traced_inputs,
)
from ckpttool.libraries.activation_orders import (
    OrderTracer,
    TracedActivation,
    UntraceableError,
    UntracedActivation,
    always_return,
    mark_orders_unknown,
    require_room,
    window_extents,
)
from ckpttool.libraries.model_steps import ScriptEvaluator

_CHANNEL = 1
_LOOPS = 10_000
# Sizes of square images to try if the archive does not record its inputs.
_SIDES = (28, 32, 64, 84, 96, 224, 48, 16, 8, 10, 128, 256, *range(1, 129))
_TRIES = 400
_ATTENTION = "__torch__.torch.nn.modules.activation"
# Operations that may reorder an image's axes, and assignments to a part of a tensor.
_REORDERS = re.compile(
    r"torch\.(?:permute|transpose|movedim|moveaxis|swapaxes|swapdims|einsum|numpy_T|t|flip|rot90|roll|unfold"
    r"|pixel_(?:un)?shuffle|copy_|index_put_|_index_put_impl_)\("
)
_FAILURES = (
    TrackingLimitError,
    UnsupportedScriptError,
    UntraceableError,
    CkpttoolError,
    ArithmeticError,
    LookupError,
    TypeError,
    ValueError,
)


class _TransposedWeight(NamedTuple):
    """A matrix that the code transposes before use."""

    path: Path


def read_script_orders(
    checkpoint: Checkpoint, shapes: Sequence[Shape]
) -> Mapping[Path, FeatureOrders] | None:
    """Return the orders in a TorchScript archive's forward, None if the checkpoint is not an archive.

    `shapes` are the inputs of the model to fill, images with their channels first or last. If forward
    cannot be evaluated for any inputs and may reorder axes, all orders are unknown.
    """
    texts = read_code(checkpoint)
    if texts is None:
        return None
    parsed: dict[str, ast.Module] = {}
    traced = tuple(leaf.shape for leaf in traced_inputs(checkpoint))
    for inputs in [traced] if traced else _candidates(checkpoint, shapes):
        try:
            _ScriptOrderEvaluator.of(checkpoint, texts, parsed, shapes_only=True).run(inputs)
        except _FAILURES:
            continue
        full = _ScriptOrderEvaluator.of(checkpoint, texts, parsed)
        try:
            full.run(inputs)
            found = full.evaluation.features()
            return found if traced else _keep_size_independent(found)
        except _FAILURES:
            break
    return mark_orders_unknown(checkpoint.tree) if any(map(_REORDERS.search, texts.values())) else {}


def _keep_size_independent(found: Mapping[Path, FeatureOrders]) -> dict[Path, FeatureOrders]:
    """Return the orders that also hold for images of other sizes: those with unchanged positions."""

    def kept(order: AxisOrder | None) -> AxisOrder | None:
        if order is None or order == UNKNOWN:
            return order
        forms = (framework_order(order.parts, each) for each in ("torch", "tensorflow"))
        return order if order in forms else UNKNOWN

    return {path: FeatureOrders(*map(kept, each)) for path, each in found.items()}


def _candidates(checkpoint: Checkpoint, shapes: Sequence[Shape]) -> Iterator[tuple[Shape, ...]]:
    if shapes:
        yield tuple((1, shape[-1], *shape[:-1]) if len(shape) > 1 else (1, *shape) for shape in shapes)
        yield tuple((1, *shape) for shape in shapes)
        yield tuple((1, *shape[:-3], shape[-1], *shape[-3:-1]) for shape in shapes)
    widths: dict[int, None] = {}
    images: dict[tuple[int, int], None] = {}
    for _, leaf in checkpoint.tree.tensors():
        if len(leaf.shape) == 2:
            widths[leaf.shape[1]] = None
        elif len(leaf.shape) > 2:
            images[len(leaf.shape) - 2, leaf.shape[1]] = None
    able: list[tuple[Shape, ...]] = []
    for rank, channels in [*images][:2]:
        sides = _SIDES if rank < 3 else _SIDES[:40]
        able += [((1, channels, *(side,) * rank),) for side in sides]
    vectors: list[tuple[Shape, ...]] = [((1, width),) for width in [*widths][:8]]
    yield from [*vectors, *able][:_TRIES]


@dataclass
class _ScriptOrderEvaluator(ScriptEvaluator):
    """Evaluates the code: modules, numbers and lists as they are, tensors as activations."""

    evaluation: OrderTracer = field(kw_only=True)
    loops: int = 0

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        texts: Mapping[str, str],
        parsed: dict[str, ast.Module],
        *,
        shapes_only: bool = False,
    ) -> _ScriptOrderEvaluator:
        """Return an evaluator of a checkpoint's code."""
        found = OrderTracer(checkpoint.tree, _CHANNEL, shapes_only)
        return cls(checkpoint.tree, texts, parsed=parsed, evaluation=found)

    def run(self, inputs: Sequence[Shape]) -> Any:
        """Return the output of `forward` for inputs of these shapes."""
        return self._method((), "forward", [self.evaluation.given(shape) for shape in inputs])

    # --- Language ---------------------------------------------------------------------------------------

    def _method(self, module: Path, name: str, given: Sequence[Any]) -> Any:
        container = self.tree.containers.get(module)
        where, _, cls = ((container.name if container is not None else None) or "").rpartition(".")
        if where.startswith(_ATTENTION) and cls == "MultiheadAttention" and len(given) > 2:
            # Its source code branches on values that shapes do not determine.
            query = given[0]
            weight = self._of(module, "in_proj_weight")
            self.evaluation.takes(weight.path, query)
            made = (
                UntracedActivation()
                if isinstance(query, UntracedActivation)
                else self.evaluation.fresh(query.shape)
            )
            return [made, None]
        return super()._method(module, name, given)

    def _cell(self, module: Path, kind: str, given: Sequence[Any]) -> Any:
        del kind
        first = (*module, attr("weight_ih_l0"))
        try:
            settings = [self._of(module, name) for name in ("hidden_size", "bidirectional")]
        except UnsupportedScriptError:
            return self._called(module, "forward", given)  # traced: its code consists of plain operations
        (hidden, both), x = settings, given[0]
        leaf = self.tree.get(first)
        if not isinstance(leaf, Leaf) or isinstance(x, UntracedActivation):
            return [UntracedActivation(), UntracedActivation()]
        if x.shape[-1:] != leaf.shape[1:]:
            raise UntraceableError
        for name in ("weight_ih_l0", "weight_ih_l0_reverse") if both else ("weight_ih_l0",):
            self.evaluation.takes((*module, attr(name)), x)
        projection = self.tree.get((*module, attr("weight_hr_l0")))
        hidden = projection.shape[0] if isinstance(projection, Leaf) else hidden
        made = self.evaluation.fresh((*x.shape[:-1], hidden * (2 if both else 1)))
        return [made, UntracedActivation()]

    def _block(  # noqa: C901 - a list of statements
        self, body: Sequence[ast.stmt], scope: dict[str, Any]
    ) -> tuple[bool, Any]:
        for node in body:
            if isinstance(node, ast.For):
                values = self._value(node.iter, scope)
                if not isinstance(values, list | range) or len(values) > _LOOPS:
                    raise UnsupportedScriptError
                for value in values:
                    self.loops += 1
                    if self.loops > _LOOPS:
                        raise UnsupportedScriptError
                    self._assign(node.target, value, scope)
                    done, found = self._block(node.body, scope)
                    if done:
                        return True, found
            elif isinstance(node, ast.While):
                while self._truth(node.test, scope):
                    self.loops += 1
                    if self.loops > _LOOPS:
                        raise UnsupportedScriptError
                    done, found = self._block(node.body, scope)
                    if done:
                        return True, found
            elif isinstance(node, ast.Expr):
                self._value(node.value, scope)
            elif isinstance(node, ast.If):
                branch = node.body if self._truth(node.test, scope) else node.orelse
                done, found = self._block(branch, scope)
                if done:
                    return True, found
            else:
                done, found = super()._block([node], scope)
                if done:
                    return True, found
        return False, None

    def _truth(self, node: ast.expr, scope: Mapping[str, Any]) -> bool:
        value = self._value(node, scope)
        if not isinstance(value, bool):
            raise UnsupportedScriptError
        return value

    def _assign(self, target: ast.expr, value: Any, scope: dict[str, Any]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, UntracedActivation):
            value = [value] * len(target.elts)
        if isinstance(target, ast.Attribute):
            return  # the next value of a buffer
        super()._assign(target, value, scope)

    def _value(self, node: ast.expr, scope: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Subscript):
            held, at = self._value(node.value, scope), self._value(node.slice, scope)
            if isinstance(held, list) and isinstance(at, int):
                return held[at]
            if isinstance(held, UntracedActivation):
                return UntracedActivation()
            raise UnsupportedScriptError
        if isinstance(node, ast.Dict):
            return {}
        return super()._value(node, scope)

    def _call(self, node: ast.Call, scope: Mapping[str, Any]) -> Any:
        self.evaluation.step()
        if not node.keywords:
            return super()._call(node, scope)
        named = {each.arg: each.value for each in node.keywords if each.arg}
        plain = ast.Call(node.func, node.args, [])
        if "keepdim" in named and len(node.args) == 2:
            # var and std with a correction, in the order of their other form: axes, unbiased, kept.
            plain.args = [*node.args, ast.Constant(None), named["keepdim"]]
        rounding = named.get("rounding_mode")
        if (
            rounding is not None
            and isinstance(rounding, ast.Constant)
            and rounding.value in ("trunc", "floor")
        ):
            made = super()._call(plain, scope)
            return int(made) if isinstance(made, int | float) else made
        return super()._call(plain, scope)

    def _applied(self, called: str, given: list[Any]) -> Any:
        if called == "getattr" and len(given) == 2 and isinstance(given[0], ScriptModule):
            return self._of(given[0].path, str(given[1]))
        if called == "unchecked_cast" and len(given) == 2:
            return given[1]
        if called.startswith("__torch__."):
            return self._function(called, given)
        if called.startswith("uninitialized"):
            return None
        name = called.removeprefix("torch.").removeprefix("ops.prim.")
        if name in _WRITES:
            raise UnsupportedScriptError(called)
        name = name if name in _OPERATIONS or not name.endswith("_") or name.startswith("__") else name[:-1]
        if name == "RaiseException":
            raise UnsupportedScriptError(called)
        operation = _OPERATIONS.get(name)
        tensors = [
            each for each in _iterate_flat(given) if isinstance(each, TracedActivation | UntracedActivation)
        ]
        if operation is None:
            if tensors or any(isinstance(each, ScriptTensor) for each in _iterate_flat(given)):
                return UntracedActivation()
            raise UnsupportedScriptError(called)
        if any(isinstance(each, UntracedActivation) for each in tensors) and name not in _ABLE:
            features = {each.features for each in tensors if isinstance(each, UntracedActivation)}
            return UntracedActivation(features.pop() if name in _ELEMENTWISE and len(features) == 1 else None)
        return operation(self, given)

    # --- Values -----------------------------------------------------------------------------------------

    def activation(self, value: Any) -> TracedActivation:
        """Return a tensor as an activation: weights and constants are never images."""
        if isinstance(value, TracedActivation):
            return value
        if isinstance(value, ScriptTensor):
            return self.evaluation.fresh(self.evaluation.shape_of(value.path))
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.evaluation.fresh(())
        raise UnsupportedScriptError

    def number(self, value: Any) -> Any:
        """Return a number that may be stored in a tensor."""
        return self.numbers(value)[0] if isinstance(value, ScriptTensor) else value

    def is_tensor(self, value: Any) -> bool:
        """Return whether a value is a tensor with more than one number."""
        if isinstance(value, ScriptTensor):
            leaf = self.tree.get(value.path)
            return not isinstance(leaf, Leaf) or leaf.shape != ()
        return isinstance(value, TracedActivation)


def _iterate_flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple) and not isinstance(
        value, ScriptTensor | ScriptModule | _TransposedWeight
    ):
        for each in value:
            yield from _iterate_flat(each)
    else:
        yield value


# --- Operations ---------------------------------------------------------------------------------------

_Given = Sequence[Any]
_Operation = Callable[[_ScriptOrderEvaluator, _Given], Any]
_WRITES = frozenset(("copy_", "index_put_", "_index_put", "fill_", "zero_", "scatter_", "set_", "resize_"))
_ELEMENTWISE = frozenset(
    [
        *("relu", "relu6", "tanh", "sigmoid", "elu", "selu", "celu", "gelu", "silu", "mish", "leaky_relu"),
        *("softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid", "exp", "log", "sqrt", "rsqrt"),
        *("abs", "neg", "pow", "square", "sin", "cos", "clamp", "clamp_min", "clamp_max", "clip", "sign"),
        *("dropout", "feature_dropout", "alpha_dropout", "detach", "contiguous", "clone", "to", "copy"),
        *("softmax", "log_softmax", "type_as", "float", "double", "half", "alias", "reciprocal", "erf"),
        *("logsigmoid", "log_sigmoid", "rrelu", "threshold", "hardshrink", "softshrink", "tanhshrink"),
        *("instance_norm", "group_norm", "layer_norm", "batch_norm", "prelu", "rms_norm", "round", "floor"),
    ]
)
_ABLE = frozenset(
    ("linear", "addmm", "matmul", "mm", "size", "dim", "layer_norm", "batch_norm", "len", "__is__")
) | {"__isnot__", "isinstance", "append", "NumToTensor", "unchecked_cast", "lstm", "gru", "embedding"}


def _sizes(value: Any, count: int) -> tuple[int, ...]:
    """Return a window setting for each axis: a list, or one number for all axes."""
    found = [value] if isinstance(value, int) else list(value)
    if not all(type(each) is int for each in found):
        raise UnsupportedScriptError
    return tuple(found * count if len(found) == 1 else found)


def _unary(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return run.activation(given[0])


def _broadcast(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    """Return the result of an elementwise operation on all tensors among its arguments."""
    values = [run.activation(each) for each in given if run.is_tensor(each)]
    return run.evaluation.together(values) if values else run.activation(given[0])


def _binary(compute: Callable[[Any, Any], Any]) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        if any(run.is_tensor(each) for each in given[:2]):
            return _broadcast(run, given[:2])
        numbers = [run.number(each) for each in given[:2]]
        lists = [each for each in numbers if isinstance(each, list | str)]
        if lists and (len(lists) < len(numbers) or sum(map(len, lists)) > _LOOPS):
            raise UnsupportedScriptError
        made = compute(*numbers)
        if isinstance(made, int) and abs(made) > _MOST_NUMBER:
            raise UnsupportedScriptError
        return made

    return read


# Integers of TorchScript have 64 bits.
_MOST_NUMBER = 1 << 63


def _logical(compute: Callable[[Any, Any], Any]) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        if any(isinstance(each, TracedActivation | ScriptTensor) for each in given[:2]):
            return _broadcast(run, given[:2])
        if not all(isinstance(each, int) for each in given[:2]):
            raise UnsupportedScriptError
        return compute(*given[:2])

    return read


def _truth(run: _ScriptOrderEvaluator, given: _Given) -> bool:
    """Return the truth of a number; that of a tensor depends on its values."""
    value = run.number(given[0])
    if not isinstance(value, int | float):
        raise UnsupportedScriptError
    return bool(value)


def _where(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return run.evaluation.together([run.activation(each) for each in given[1:] if run.is_tensor(each)])


def _conv(rank: int, *, turned: bool = False) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        rest = [*given[3:], *[None] * 6]
        stride, padding, third = (rest[0] or 1), rest[1] or 0, rest[2]
        groups, dilation = (rest[3] or 1, rest[4] or 1) if turned else (rest[3] or 1, third or 1)
        more = (third or 0) if turned else 0
        how = _ConvolutionArguments(stride, padding, dilation, more, groups, turned)
        return _convolution(run, given[0], given[1], how, rank)

    return read


def _convolution_of_any_rank(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x, weight, _, stride, padding, dilation, turned, more, groups = given[:9]
    rank = len(run.evaluation.shape_of(weight.path)) - 2
    how = _ConvolutionArguments(stride, padding, dilation, more, groups, bool(turned))
    return _convolution(run, x, weight, how, rank)


class _ConvolutionArguments(NamedTuple):
    """Arguments of a convolution; `more` is the output padding of a transposed one (`turned`)."""

    stride: Any
    padding: Any
    dilation: Any
    more: Any
    groups: Any
    turned: bool


def _convolution(
    run: _ScriptOrderEvaluator, x: Any, weight: Any, how: _ConvolutionArguments, rank: int
) -> TracedActivation:
    stride, padding, dilation, more, groups, turned = how
    x, shape = run.activation(x), run.evaluation.shape_of(weight.path)
    if len(shape) != rank + 2 or len(x.shape) != rank + 2:
        raise UntraceableError
    kernel, stride, dilation = shape[2:], _sizes(stride, rank), _sizes(dilation, rank)
    if x.shape[1] != (shape[0] if turned else shape[1] * groups):
        raise UntraceableError
    if turned:
        pads, extra = _sizes(padding, rank), _sizes(more, rank)
        sizes = tuple(
            (size - 1) * step - 2 * pad + wide * (window - 1) + add + 1
            for size, step, pad, wide, window, add in zip(
                x.shape[2:], stride, pads, dilation, kernel, extra, strict=True
            )
        )
        return run.evaluation.convolved(
            x, (x.shape[0], shape[1] * groups, *sizes), weight.path, grouped=groups != 1
        )
    if padding == "same":
        sizes = x.shape[2:]
    else:
        pads = _sizes(0 if padding == "valid" else padding, rank)
        sizes = window_extents(x.shape[2:], kernel, strides=stride, pads=pads * 2, dilations=dilation)
    return run.evaluation.convolved(x, (x.shape[0], shape[0], *sizes), weight.path, grouped=groups != 1)


def _pool(rank: int, *, dilated: bool, indices: bool = False) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x = run.activation(given[0])
        if len(x.shape) != rank + 2:
            raise UntraceableError
        rest = [*given[1:], *[None] * 5]
        kernel = _sizes(rest[0], rank)
        stride = _sizes(rest[1], rank) if rest[1] else kernel
        padding = _sizes(rest[2] or 0, rank)
        dilation = _sizes(rest[3] or 1, rank) if dilated else (1,) * rank
        ceil = bool(rest[4] if dilated else rest[3])
        window = {"strides": stride, "pads": padding * 2, "dilations": dilation}
        sizes = window_extents(x.shape[2:], kernel, ceil=ceil, **window)
        made = run.evaluation.convolved(x, (*x.shape[:2], *sizes))
        return [made, UntracedActivation()] if indices else made

    return read


def _adaptive_pool(rank: int, *, indices: bool = False) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x = run.activation(given[0])
        wanted = [given[1]] * rank if isinstance(given[1], int) else list(given[1])
        sizes = [own if each is None else each for own, each in zip(x.shape[2:], wanted, strict=True)]
        made = run.evaluation.convolved(x, (*x.shape[:2], *sizes))
        return [made, UntracedActivation()] if indices else made

    return read


def _upsample(rank: int) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x, size = run.activation(given[0]), given[1]
        if isinstance(size, list) and size:
            return run.evaluation.convolved(x, (*x.shape[:2], *_sizes(size, rank)))
        scales = next((each for each in given[2:] if isinstance(each, list) and each), None)
        if scales is None:
            raise UnsupportedScriptError
        sizes = [math.floor(own * scale) for own, scale in zip(x.shape[2:], scales, strict=True)]
        return run.evaluation.convolved(x, (*x.shape[:2], *sizes))

    return read


def _linear(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x, weight = given[0], given[1]
    if not isinstance(weight, ScriptTensor):
        return _product(run, given)
    shape = run.evaluation.shape_of(weight.path)
    if len(shape) != 2:
        raise UntraceableError
    x = x if isinstance(x, UntracedActivation) else run.activation(x)
    return run.evaluation.dense(x, weight.path, (shape[1], shape[0]))


def _addmm(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return _product(run, given[1:3])


def _product(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x, weight = given[0], given[1]
    if isinstance(weight, _TransposedWeight | ScriptTensor) and isinstance(
        x, TracedActivation | UntracedActivation
    ):
        shape = run.evaluation.shape_of(weight.path)
        if len(shape) == 2:
            sizes = (shape[1], shape[0]) if isinstance(weight, _TransposedWeight) else (shape[0], shape[1])
            return run.evaluation.dense(x, weight.path, sizes)
    if (
        isinstance(x, UntracedActivation)
        or isinstance(weight, UntracedActivation | _TransposedWeight)
        or isinstance(x, _TransposedWeight)
    ):
        return UntracedActivation()
    x, other = run.activation(x), run.activation(weight)
    if len(x.shape) < 2 or len(other.shape) < 2 or x.shape[-1] != other.shape[-2]:
        raise UntraceableError
    lead = np.broadcast_shapes(x.shape[:-2], other.shape[:-2])
    return run.evaluation.fresh((*lead, x.shape[-2], other.shape[-1]))


def _einsum(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    values = [each for each in _iterate_flat(given[1:]) if isinstance(each, TracedActivation | ScriptTensor)]
    return run.evaluation.einsum(str(given[0]), [run.activation(each) for each in values])


def _attention(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    query, value = run.activation(given[0]), run.activation(given[2])
    return run.evaluation.fresh((*query.shape[:-1], value.shape[-1]))


def _matrix_transpose(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    if isinstance(given[0], ScriptTensor) and len(run.evaluation.shape_of(given[0].path)) == 2:
        return _TransposedWeight(given[0].path)
    return run.evaluation.moved(run.activation(given[0]), lambda a: np.swapaxes(a, 0, 1) if a.ndim > 1 else a)


def _transpose(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    if isinstance(given[0], ScriptTensor) and sorted(each % 2 for each in given[1:3]) == [0, 1]:
        return _matrix_transpose(run, given)
    return _rearrangement(lambda a, one, two: np.swapaxes(a, one, two))(run, given)


def _rearrangement(move: Callable[..., Any]) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        rest = [list(each) if isinstance(each, tuple) else each for each in given[1:]]
        if any(isinstance(each, TracedActivation | ScriptTensor) for each in rest):
            return UntracedActivation()
        return run.evaluation.moved(run.activation(given[0]), lambda entries: move(entries, *rest))

    return read


def _splitting(split: Callable[..., Sequence[Any]]) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x = run.activation(given[0])
        parts = split(x.entries, *given[1:])
        return [run.evaluation.moved(x, always_return(part)) for part in parts]

    return read


def _split(entries: Any, size: Any, axis: int = 0) -> Sequence[Any]:
    extent = entries.shape[axis]
    ends = list(range(size, extent, size)) if isinstance(size, int) else list(np.cumsum(size)[:-1])
    return np.split(entries, ends, axis)


def _chunk(entries: Any, count: int, axis: int = 0) -> Sequence[Any]:
    return _split(entries, -(-entries.shape[axis] // count), axis)


def _slice(entries: Any, axis: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    at: list[Any] = [slice(None)] * entries.ndim
    at[axis] = slice(start, end, step)
    return entries[tuple(at)]


def _expand(entries: Any, sizes: Sequence[int], *_: Any) -> Any:
    lead = len(sizes) - entries.ndim
    wanted = [entries.shape[n - lead] if each == -1 and n >= lead else each for n, each in enumerate(sizes)]
    return np.broadcast_to(entries, wanted)


def _tile(entries: Any, counts: Sequence[int]) -> Any:
    require_room((*entries.shape, *counts))
    return np.tile(entries, counts)


def _pixel_shuffle(entries: Any, factor: int) -> Any:
    count, channels, *sizes = entries.shape
    made = entries.reshape(count, channels // factor**2, factor, factor, *sizes)
    return made.transpose(0, 1, 4, 2, 5, 3).reshape(
        count, channels // factor**2, *(s * factor for s in sizes)
    )


def _pixel_unshuffle(entries: Any, factor: int) -> Any:
    count, channels, high, wide = entries.shape
    made = entries.reshape(count, channels, high // factor, factor, wide // factor, factor)
    return made.transpose(0, 1, 3, 5, 2, 4).reshape(count, -1, high // factor, wide // factor)


def _shuffle(move: Callable[[Any, int], Any], *, up: bool) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x = run.activation(given[0])
        return run.evaluation.shuffled(x, lambda entries: move(entries, given[1]), up=up)

    return read


def _pad(entries: Any, pads: Sequence[int], *_: Any) -> Any:
    widths = [(0, 0)] * entries.ndim
    for n in range(len(pads) // 2):
        widths[-1 - n] = (pads[2 * n], pads[2 * n + 1])
    if any(min(each) < 0 for each in widths):
        raise UntraceableError
    require_room([size + sum(each) for size, each in zip(entries.shape, widths, strict=True)])
    return np.pad(entries, widths, constant_values=-1)


def _flatten(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x = run.activation(given[0])
    start, end = (*given[1:], *(0, -1)[len(given) - 1 :]) if len(given) < 3 else given[1:3]
    start, end = start % max(1, len(x.shape)), end % max(1, len(x.shape))
    shape = (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :])
    return run.evaluation.reshaped(x, shape)


def _unflatten(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x, axis, sizes = run.activation(given[0]), given[1], list(given[2])
    axis %= len(x.shape)
    if -1 in sizes:
        known = math.prod(each for each in sizes if each != -1)
        sizes[sizes.index(-1)] = x.shape[axis] // known
    return run.evaluation.reshaped(x, (*x.shape[:axis], *sizes, *x.shape[axis + 1 :]))


def _reshape(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    sizes = given[1] if isinstance(given[1], list) else list(given[1:])
    if not all(type(each) is int for each in sizes):
        raise UnsupportedScriptError
    return run.evaluation.reshaped(run.activation(given[0]), sizes)


def _squeeze(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x = run.activation(given[0])
    rank = len(x.shape)
    if len(given) > 1:
        axes = {each % rank for each in (given[1] if isinstance(given[1], list) else [given[1]])}
    else:
        axes = set(range(rank))
    shape = [extent for n, extent in enumerate(x.shape) if n not in axes or extent != 1]
    return run.evaluation.reshaped(x, shape)


def _unsqueeze(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x = run.activation(given[0])
    at = given[1] % (len(x.shape) + 1)
    return run.evaluation.reshaped(x, (*x.shape[:at], 1, *x.shape[at:]))


def _cat(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    values = [run.activation(each) for each in given[0]]
    return run.evaluation.joined(values, given[1] if len(given) > 1 else 0)


def _stack(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    axis = given[1] if len(given) > 1 else 0
    values = [_unsqueeze(run, (each, axis)) for each in given[0]]
    return run.evaluation.joined(values, axis)


def _reduce(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    x, rest = run.activation(given[0]), list(given[1:])
    axes = rest[0] if rest else None
    axes = [axes] if type(axes) is int else axes
    if not isinstance(axes, list):
        return run.evaluation.fresh(())
    keep = len(rest) > 1 and rest[1] is True
    gone = {each % len(x.shape) for each in axes}
    shape = [1 if n in gone else each for n, each in enumerate(x.shape) if keep or n not in gone]
    return run.evaluation.fresh(shape)


def _deviation(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    # Arguments: axes, whether it is unbiased, whether the axes are kept.
    return _reduce(run, (given[0], given[1], given[3]) if len(given) > 3 else given[:2])


def _vector_norm(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return _reduce(run, (given[0], *given[2:]))


def _max_or_min(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    if len(given) > 1 and all(isinstance(each, int | float) for each in given):
        raise UnsupportedScriptError
    if len(given) > 1 and run.is_tensor(given[1]):
        return _broadcast(run, given)
    return [_reduce(run, given), UntracedActivation()] if len(given) > 1 else run.evaluation.fresh(())


def _size(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    if isinstance(given[0], UntracedActivation):
        return UntracedActivation()
    shape = run.activation(given[0]).shape
    return shape[given[1]] if len(given) > 1 else list(shape)


def _dim(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    if isinstance(given[0], UntracedActivation):
        return UntracedActivation()
    return len(run.activation(given[0]).shape)


def _norm(weight: int, axis: int) -> _Operation:
    """Return the handler of a norm whose weight is this argument, for features along this axis."""

    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x = given[0] if isinstance(given[0], UntracedActivation) else run.activation(given[0])
        own = given[weight] if len(given) > weight else None
        if isinstance(own, ScriptTensor):
            shape = run.evaluation.shape_of(own.path)
            if len(shape) == 1 and isinstance(x, TracedActivation):
                if len(x.shape) <= abs(axis) - (axis < 0) or x.shape[axis] not in (shape[0], 1):
                    if shape[0] != 1:
                        raise UntraceableError
                elif shape[0] > 1:
                    run.evaluation.normed(x, own.path, axis)
        return x

    return read


def _embedding(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    if isinstance(given[1], UntracedActivation):
        return UntracedActivation()
    x, width = run.activation(given[1]), run.evaluation.shape_of(given[0].path)[-1]
    made = run.evaluation.fresh((*x.shape, width))
    run.evaluation.makes(given[0].path, made)
    return made


def _recurrent(states: int) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        x, _, weights, biased, layers, _, _, both, _ = given[:9]
        count = len(weights) // max(1, layers * (2 if both else 1))
        for n in range(0, count * (2 if both else 1), max(1, count)):
            run.evaluation.takes(weights[n].path, x)
        del biased
        if isinstance(x, UntracedActivation):
            return [UntracedActivation()] * (1 + states)
        if x.shape[-1:] != run.evaluation.shape_of(weights[0].path)[1:]:
            raise UntraceableError
        hidden = run.evaluation.shape_of(weights[1].path)[1]
        made = run.evaluation.fresh((*x.shape[:-1], hidden * (2 if both else 1)))
        return [made, *[UntracedActivation()] * states]

    return read


def _identity(_: _ScriptOrderEvaluator, given: _Given) -> Any:
    return given[0]


def _integer(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return int(run.number(given[0]))


def _float(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return float(run.number(given[0]))


def _length(_: _ScriptOrderEvaluator, given: _Given) -> Any:
    if not isinstance(given[0], list):
        raise UnsupportedScriptError
    return len(given[0])


def _list(_: _ScriptOrderEvaluator, given: _Given) -> Any:
    if not isinstance(given[0], list | range) or len(given[0]) > _LOOPS:
        raise UnsupportedScriptError
    return list(given[0])


def _append(_: _ScriptOrderEvaluator, given: _Given) -> Any:
    given[0].append(given[1])
    return given[0]


def _item(_: _ScriptOrderEvaluator, given: _Given) -> Any:
    if not isinstance(given[0], list):
        raise UnsupportedScriptError
    return given[0][given[1]]


def _new_tensor(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    sizes = given[0]
    if not isinstance(sizes, list) or not all(type(each) is int for each in sizes):
        return UntracedActivation()
    return run.evaluation.fresh(sizes)


def _new_tensor_like(run: _ScriptOrderEvaluator, given: _Given) -> Any:
    return run.evaluation.fresh(run.activation(given[0]).shape)


def _is_identical(_: _ScriptOrderEvaluator, given: _Given) -> bool:
    return given[0] is None if given[1] is None else given[0] is given[1]


def _comparison_reader(compare: Callable[[Any, Any], bool]) -> _Operation:
    def read(run: _ScriptOrderEvaluator, given: _Given) -> Any:
        if any(run.is_tensor(each) for each in given[:2]):
            return _broadcast(run, given[:2])
        return bool(compare(*(run.number(each) for each in given[:2])))

    return read


_OPERATIONS: dict[str, _Operation] = {
    **dict.fromkeys(_ELEMENTWISE, _unary),
    "add": _binary(operator.add),
    "sub": _binary(operator.sub),
    "rsub": _binary(lambda a, b: b - a),
    "mul": _binary(operator.mul),
    "div": _binary(operator.truediv),
    "true_divide": _binary(operator.truediv),
    "floordiv": _binary(operator.floordiv),
    "floor_divide": _binary(operator.floordiv),
    "remainder": _binary(operator.mod),
    "maximum": _binary(max),
    "minimum": _binary(min),
    "where": _where,
    **{name: _comparison_reader(getattr(operator, name)) for name in ("lt", "gt", "le", "ge", "eq", "ne")},
    "__is__": _is_identical,
    "__isnot__": lambda run, given: not _is_identical(run, given),
    "__not__": lambda run, given: not _truth(run, given),
    "__and__": _logical(operator.and_),
    "__or__": _logical(operator.or_),
    **dict.fromkeys(("pow", "clamp", "clamp_min", "clamp_max", "clip"), _broadcast),
    "__contains__": lambda _, given: given[1] in given[0],
    "__getitem__": _item,
    "NumToTensor": _identity,
    "tensor": _identity,
    "int": _integer,
    "Int": _integer,
    "float": lambda run, given: _unary(run, given) if run.is_tensor(given[0]) else _float(run, given),
    "bool": _truth,
    "device": lambda *_: None,
    "range": lambda _, given: range(*given),
    "len": _length,
    "list": _list,
    "append": _append,
    "size": _size,
    "dim": _dim,
    "numel": lambda run, given: math.prod(run.activation(given[0]).shape),
    "is_floating_point": lambda *_: True,
    **{f"conv{n}d": _conv(n) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _conv(n, turned=True) for n in (1, 2, 3)},
    "_convolution": _convolution_of_any_rank,
    "convolution": _convolution_of_any_rank,
    **{f"max_pool{n}d": _pool(n, dilated=True) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": _pool(n, dilated=True, indices=True) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _pool(n, dilated=False) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": _adaptive_pool(n) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": _adaptive_pool(n, indices=True) for n in (1, 2, 3)},
    **{f"upsample_{how}{n}d": _upsample(n) for how in ("nearest", "nearest_exact") for n in (1, 2, 3)},
    "upsample_bilinear2d": _upsample(2),
    "upsample_linear1d": _upsample(1),
    "upsample_trilinear3d": _upsample(3),
    "upsample_bicubic2d": _upsample(2),
    "linear": _linear,
    "addmm": _addmm,
    "matmul": _product,
    "mm": _product,
    "bmm": _product,
    "scaled_dot_product_attention": _attention,
    "einsum": _einsum,
    "t": _matrix_transpose,
    "numpy_T": _matrix_transpose,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "swapdims": _transpose,
    "permute": _rearrangement(lambda a, axes: np.transpose(a, axes)),
    "movedim": _rearrangement(lambda a, one, two: np.moveaxis(a, one, two)),
    "moveaxis": _rearrangement(lambda a, one, two: np.moveaxis(a, one, two)),
    "flip": _rearrangement(lambda a, axes: np.flip(a, tuple(axes))),
    "roll": _rearrangement(lambda a, by, axes: np.roll(a, by, axes)),
    "select": _rearrangement(lambda a, axis, at: np.take(a, at, axis)),
    "narrow": _rearrangement(lambda a, axis, at, count: _slice(a, axis, at, at + count)),
    "slice": _rearrangement(_slice),
    "expand": _rearrangement(_expand),
    "repeat": _rearrangement(_tile),
    "tile": _rearrangement(_tile),
    "pixel_shuffle": _shuffle(_pixel_shuffle, up=True),
    "pixel_unshuffle": _shuffle(_pixel_unshuffle, up=False),
    "constant_pad_nd": _rearrangement(_pad),
    "pad": _rearrangement(_pad),
    "split": _splitting(_split),
    "split_with_sizes": _splitting(_split),
    "chunk": _splitting(_chunk),
    "unbind": _splitting(lambda a, axis=0: [np.take(a, n, axis) for n in range(a.shape[axis])]),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "view": _reshape,
    "reshape": _reshape,
    "_unsafe_view": _reshape,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    **dict.fromkeys(("mean", "sum", "amax", "amin", "logsumexp", "prod"), _reduce),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _vector_norm),
    "max": _max_or_min,
    "min": _max_or_min,
    **dict.fromkeys(("var", "std"), _deviation),
    "layer_norm": _norm(2, -1),
    "batch_norm": _norm(1, 1),
    "prelu": _norm(1, 1),
    "embedding": _embedding,
    "lstm": _recurrent(2),
    "gru": _recurrent(1),
    "rnn_tanh": _recurrent(1),
    "rnn_relu": _recurrent(1),
    **dict.fromkeys(("zeros", "ones", "empty", "randn", "rand", "full"), _new_tensor),
    **dict.fromkeys(
        ("zeros_like", "ones_like", "randn_like", "empty_like", "rand_like", "full_like"), _new_tensor_like
    ),
}


# The modules that an archive's code calls, in order, for pictures of its layers.

_TORCH_MODULES = f"{_ATTENTION.rpartition('.')[0]}."
# Results that are no values of the model's own: sizes, copies, casts.
_SILENT = frozenset(("size", "dim", "contiguous", "detach", "to", "type_as", "clone", "alias", "numel"))
_SILENT |= {
    "__getitem__",
    "len",
    "NumToTensor",
    "tensor",
    "int",
    "Int",
    "append",
    "list",
    "__is__",
    "__isnot__",
}


@dataclass
class ScriptCall:
    """A call of a module, or of a function in the code of one; as TracedCall, with the calls inside."""

    path: Path
    kind: str
    cls: str
    output: Shape | None = None
    macs: int | None = 0
    inputs: tuple[int, ...] = ()
    below: list[ScriptCall] = field(default_factory=list)
    makers: dict[int, int] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)


def trace_script(
    checkpoint: Checkpoint, shapes: Sequence[Shape]
) -> tuple[tuple[Shape, ...], ScriptCall] | None:
    """Return the input shapes and the calls of a TorchScript archive's `forward`; None if not evaluated.

    `shapes` replace the input shapes with which the archive was traced.
    """
    texts = read_code(checkpoint)
    if texts is None:
        return None
    inputs = tuple(shapes) or tuple(leaf.shape for leaf in traced_inputs(checkpoint))
    if not inputs:
        return None
    tracer = OrderTracer(checkpoint.tree, _CHANNEL, shapes_only=True)
    run = _ScriptCallRecorder(checkpoint.tree, texts, evaluation=tracer)
    try:
        run.run(inputs)
    except _FAILURES:
        return None
    return inputs, run.stack[0].below[0]


@dataclass
class _ScriptCallRecorder(_ScriptOrderEvaluator):
    """Evaluates the code and records the calls of modules and functions."""

    stack: list[ScriptCall] = field(default_factory=lambda: [ScriptCall((), "", "")])

    def _method(self, module: Path, name: str, given: Sequence[Any]) -> Any:
        container = self.tree.containers.get(module)
        cls = (container.name if container is not None else None) or ""
        if not name.startswith("forward") and cls.startswith(_TORCH_MODULES):
            return super()._method(module, name, given)
        call = self._begin(ScriptCall(module, _short(cls), cls), given)
        try:
            made = super()._method(module, name, given)
            if not call.below and _short(cls) in _WITH_PRODUCTS:
                self._count(self._recurrent(module, given))
        finally:
            self.stack.pop()
        return self._end(call, made)

    def _count(self, macs: int | None) -> None:
        """Add operations to all calls that are not finished."""
        for outer in self.stack:
            outer.macs = None if outer.macs is None or macs is None else outer.macs + macs

    def _recurrent(self, module: Path, given: Sequence[Any]) -> int | None:
        """Return the operations of a recurrent layer that is not evaluated, None for another module."""
        matrices = [
            leaf.size
            for path, leaf in self.tree.tensors()
            if path[:-1] == module and str(path[-1].value).startswith("weight_")
        ]
        first = given[0] if given else None
        if not matrices or not isinstance(first, TracedActivation):
            return None
        return math.prod(first.shape[:-1]) * sum(matrices)

    def _applied(self, called: str, given: list[Any]) -> Any:
        made = super()._applied(called, given)
        name = called.removeprefix("torch.").removeprefix("ops.prim.").removesuffix("_")
        taken = [
            each for each in _iterate_flat(given) if isinstance(each, TracedActivation | UntracedActivation)
        ]
        if not taken or name in _SILENT or called.startswith("__torch__."):
            return made
        if not isinstance(made, TracedActivation | UntracedActivation | list):
            return made
        macs = self._products(name, given, made)
        self._count(macs)
        call = self._begin(ScriptCall((), name, called, macs=macs), given)
        self.stack.pop()
        return self._end(call, made)

    def _begin(self, call: ScriptCall, given: Sequence[Any]) -> ScriptCall:
        """Enter a call; the values given to it are its own inputs."""
        here = self.stack[-1]
        taken = [each for each in _iterate_flat(given) if id(each) in here.makers]
        call.inputs = tuple(dict.fromkeys(here.makers[id(each)] for each in taken))
        for each in _iterate_flat(given):
            if isinstance(each, TracedActivation | UntracedActivation):
                call.makers[id(each)] = -1
        self.stack.append(call)
        return call

    def _end(self, call: ScriptCall, made: Any) -> Any:
        """Record a call with its result, which is another object than its inputs."""
        values = made if isinstance(made, list) else [made]
        values = [self._renewed(each) if id(each) in call.makers else each for each in values]
        first = values[0] if values else None
        call.output = first.shape if isinstance(first, TracedActivation) else None
        here = self.stack[-1]
        for each in values:
            here.makers[id(each)] = len(here.below)
        here.values += values  # kept, so that no other object gets the identity of one
        here.below.append(call)
        return values if isinstance(made, list) else values[0]

    def _renewed(self, value: Any) -> Any:
        if isinstance(value, TracedActivation):
            return TracedActivation(value.shape, lambda: value.entries, is_image=value.is_image)
        return UntracedActivation(value.features) if isinstance(value, UntracedActivation) else value

    def _products(self, name: str, given: Sequence[Any], made: Any) -> int | None:
        """Return the multiply-accumulate operations of a function, None if unknown."""
        if name not in _PRODUCTS:
            return 0 if name in _OPERATIONS and name not in _CELLS_OF_CODE else None
        try:
            first, second = (self.activation(each).shape for each in _operands(name, given))
        except _FAILURES:
            return None
        if not isinstance(made, TracedActivation):
            return None
        if name == "scaled_dot_product_attention":
            return math.prod(first[:-1]) * second[-2] * (first[-1] + made.shape[-1])
        if "conv" in name:
            turned = "transpose" in name or (name.endswith("convolution") and bool(given[6]))
            return math.prod(first if turned else made.shape) * math.prod(second[1:])
        return math.prod(made.shape) * first[-1]


# Modules and functions with products that the evaluation leaves out.
_WITH_PRODUCTS = frozenset(("MultiheadAttention", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell"))
_CELLS_OF_CODE = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"))
_PRODUCTS = frozenset(
    (*(f"conv{how}{n}d" for how in ("", "_transpose") for n in (1, 2, 3)), "_convolution", "convolution")
) | {"linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "einsum", "scaled_dot_product_attention"}


def _operands(name: str, given: Sequence[Any]) -> Sequence[Any]:
    """Return the two factors of a product; a transposed weight has its own shape."""
    if name == "einsum":
        raise UnsupportedScriptError
    first, second = given[1:3] if name in ("addmm", "baddbmm") else given[:2]
    if isinstance(second, _TransposedWeight):
        second = ScriptTensor(second.path)
    return first, second


def _short(cls: str) -> str:
    return cls.rpartition(".")[2]


def is_own_module(cls: str) -> bool:
    """Return whether a class of an archive is one of torch's modules."""
    return cls.startswith(_TORCH_MODULES)
