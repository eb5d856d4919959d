"""ONNX operators: their program steps for observations.

Sources: onnx/docs/Operators.md (every operator by version), and the patterns of small operators
that exporters write for layer norms, GELU and SiLU (torch/onnx/symbolic_opset9.py,
networks/onnx_export.py). A rule returns None for unsupported inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool.core.tree import Path
from ckpttool.formats.onnx import OnnxNode
from ckpttool.libraries.model_steps import LayerTensors
from ckpttool.libraries.schema import ProgramOperation

if TYPE_CHECKING:
    import numpy as np


FLOATS = {1: "float32", 11: "float64"}
_ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softplus": "softplus"}
_SAME = frozenset(("Identity", "Dropout", "StopGradient"))
# Intermediate values of a supported layer, which no other operator may use.
PARTIAL = frozenset(
    (
        *("mean", "centred", "squared", "variance", "shifted", "deviation", "erf", "erf_1", "gelu_2", "cell"),
        *("grouped", "probabilities", "weighted", "arg_max"),
    )
)


class UnsupportedOperator(NamedTuple):
    """Result of an unsupported operator: the operator's name, its node's name, and a reason."""

    op: str
    node: str


@dataclass(frozen=True, slots=True)
class ProgramConstant:
    """A constant; `path` is the path of its tensor, `turned` whether its two axes are swapped."""

    array: np.ndarray
    path: Path | None = None
    turned: bool = False


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """A shape, or part of one, as values; None is the number of observations."""

    values: tuple[int | None, ...]
    scalar: bool = False


@dataclass(frozen=True, slots=True)
class ProgramValue:
    """A value that depends on the observation: its number in the program, and its shape without the batch.

    `ones` are the positions of axes of extent 1 that the graph inserted.
    """

    number: int
    shape: tuple[int, ...]
    ones: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        """The number of axes in the graph, including the batch and those of extent 1."""
        return 1 + len(self.shape) + len(self.ones)


AnyValue = ProgramConstant | ProgramShape | ProgramValue | UnsupportedOperator


@dataclass
class ProgramRecorder:
    """A program under construction: its inputs, states and operations, and the graph's values by name."""

    scope: dict[str, AnyValue] = field(default_factory=dict)
    inputs: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    operations: list[ProgramOperation] = field(default_factory=list)

    @property
    def first(self) -> int:
        """The number of the first operation's value."""
        return len(self.inputs) + len(self.states)

    def add(
        self,
        kind: str,
        shape: tuple[int, ...],
        *given: ProgramValue,
        ones: tuple[int, ...] = (),
        **value: Any,
    ) -> ProgramValue:
        """Add an operation to the program and return its value."""
        self.operations.append(ProgramOperation(kind, tuple(flow.number for flow in given), value))
        return ProgramValue(self.first + len(self.operations) - 1, shape, ones)

    def operation(self, flow: ProgramValue) -> ProgramOperation | None:
        """Return the operation that computes a value, None for an input."""
        return self.operations[flow.number - self.first] if flow.number >= self.first else None


def _axes(node: OnnxNode, array: np.ndarray | None) -> tuple[int, ...] | None:
    found = node.get("axes")
    if found is not None:
        return tuple(int(each) for each in found)
    return None if array is None else tuple(int(each) for each in array.reshape(-1))


# Operators on values that depend on the observation.


def _plain_value(value: AnyValue | None) -> ProgramValue | None:
    return value if isinstance(value, ProgramValue) and not value.ones else None


def _has_feature_axis(flow: ProgramValue) -> bool:
    """Whether the last axis belongs to the observation."""
    return bool(flow.shape) and flow.rank - 1 not in flow.ones


def _floats(array: np.ndarray) -> np.ndarray:
    return array.astype("float32")


def _identity(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: ARG001
    if (
        node.op == "Dropout"
        and len(given) > 2
        and isinstance(given[2], ProgramConstant)
        and bool(given[2].array)
    ):
        return None
    return given[0]


def _cast_value(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    to = node.get("to")
    if isinstance(given[0], ProgramShape):
        return given[0] if to in (6, 7) else None
    found = reader.operation(given[0]) if isinstance(given[0], ProgramValue) else None
    # The number of a discrete action is whole in every type.
    whole = found is not None and found.kind == "arg_max"
    return given[0] if to in FLOATS or (whole and to in (6, 7)) else None


def _activation(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
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
    if name is None or not isinstance(flow, ProgramValue) or not math.isfinite(slope):
        return None
    return reader.add("activation", flow.shape, flow, ones=flow.ones, name=name, slope=slope)


def _gemm(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow, weight = _plain_value(given[0]), given[1]
    if (
        flow is None
        or len(flow.shape) != 1
        or not isinstance(weight, ProgramConstant)
        or node.get("transA", 0)
    ):
        return None
    kernel = weight.array.T if node.get("transB", 0) else weight.array
    alpha, beta = float(node.get("alpha", 1.0)), float(node.get("beta", 1.0))
    bias = given[2] if len(given) > 2 else None
    if (
        kernel.ndim != 2
        or kernel.shape[0] != flow.shape[0]
        or not (bias is None or isinstance(bias, ProgramConstant))
    ):
        return None
    plain = alpha == 1.0 and (bias is None or beta == 1.0)
    if alpha != 1.0:
        kernel = kernel * alpha
    turned = weight.turned != bool(node.get("transB", 0))
    return _add_dense(reader, flow, (kernel, bias, beta), weight.path if plain else None, turned=turned)


def _add_dense(
    reader: ProgramRecorder,
    flow: ProgramValue,
    made: tuple[np.ndarray, ProgramConstant | None, float],
    path: Path | None,
    *,
    turned: bool,
) -> Any:
    """Add a dense layer; `path` is the path of its weight, unless the weight is computed."""
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
        weights = LayerTensors(path, None if bias is None else bias.path, None, owner)
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


def _matmul(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow, weight = given
    if (
        not isinstance(flow, ProgramValue)
        or not isinstance(weight, ProgramConstant)
        or weight.array.ndim != 2
    ):
        return None
    if len(flow.shape) != 1 or not _has_feature_axis(flow) or weight.array.shape[0] != flow.shape[0]:
        return None
    return _add_dense(reader, flow, (weight.array, None, 1.0), weight.path, turned=weight.turned)


def _broadcast_constant(array: np.ndarray, flow: ProgramValue) -> np.ndarray | None:
    """Return a constant combined elementwise with a value, [n] or [1]; None for other shapes."""
    if array.size == 1 and array.ndim <= flow.rank:
        return array.reshape(1)
    if not _has_feature_axis(flow) or array.ndim > flow.rank or array.shape[-1] != flow.shape[-1]:
        return None
    if array.size != array.shape[-1]:
        return None
    return array.reshape(-1)


def _arithmetic(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    one, two = given
    if isinstance(one, ProgramValue) and isinstance(two, ProgramValue):
        return _combine_values(reader, node, one, two)
    turned = isinstance(two, ProgramValue)
    flow, constant = (two, one) if turned else (one, two)
    if (
        not isinstance(flow, ProgramValue)
        or not isinstance(constant, ProgramConstant)
        or constant.array.dtype.kind not in "fiub"
    ):
        return None
    known = _match_pattern_part(reader, node, flow, constant, turned=turned)
    if known is not None:
        return known
    array = _broadcast_constant(constant.array, flow)
    if array is None or node.op == "Pow" or (turned and node.op == "Div"):
        return None
    if node.op == "Add" and (found := _add_bias(reader, flow, constant)) is not None:
        return found
    return _affine(
        reader, node, flow, array, turned=turned, paths=() if constant.path is None else (constant.path,)
    )


def _add_bias(reader: ProgramRecorder, flow: ProgramValue, constant: ProgramConstant) -> ProgramValue | None:
    """Return a dense layer with the bias added to its product, None if the constant is not a bias."""
    operation = reader.operation(flow)
    if operation is None or operation.kind != "dense" or operation.value["bias"] is not None:
        return None
    kernel = operation.value["kernel"]
    if constant.array.size != kernel.shape[1] or constant.array.ndim > 2:
        return None
    path, turned = operation.value["source"]
    before = ProgramValue(operation.inputs[0], (kernel.shape[0],), flow.ones)
    found = _add_dense(reader, before, (kernel, constant, 1.0), path, turned=turned)
    return found if isinstance(found, ProgramValue) else None


def _affine(
    reader: ProgramRecorder,
    node: OnnxNode,
    flow: ProgramValue,
    array: np.ndarray,
    *,
    turned: bool,
    paths: tuple[Path, ...],
) -> ProgramValue | None:
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


def _combine_values(reader: ProgramRecorder, node: OnnxNode, one: ProgramValue, two: ProgramValue) -> Any:  # noqa: C901  # patterns, one by one
    """Combine two values: parts of a layer norm or an activation, or two layers' outputs."""
    a, b = reader.operation(one), reader.operation(two)
    if node.op == "Sub" and b is not None and b.kind == "mean" and b.inputs == (one.number,):
        return _add_partial(reader, node, "centred", one.shape, two, of=one.number)
    if node.op == "Mul":
        if one == two and a is not None and a.kind == "centred":
            return _add_partial(reader, node, "squared", one.shape, one)
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
            _add_layer_norm(reader, one, a.value["of"], b.value["epsilon"])
            if b.value["of"] == a.value["of"]
            else None
        )
    if one.shape != two.shape or one.ones != two.ones:
        return None
    if node.op == "Sub":
        two = reader.add("affine", two.shape, two, ones=two.ones, scale=_to_row(-1.0), shift=_to_row(0.0))
    elif node.op not in ("Add", "Mul"):
        return None
    return reader.add("multiply" if node.op == "Mul" else "add", one.shape, one, two, ones=one.ones)


def _to_row(value: float) -> np.ndarray:
    import numpy as np

    return np.full(1, value)


def _add_partial(
    reader: ProgramRecorder,
    node: OnnxNode,
    kind: str,
    shape: tuple[int, ...],
    flow: ProgramValue,
    **value: Any,
) -> ProgramValue:
    """Add a value that is only meaningful as part of a supported layer."""
    where = node.name or next(iter(node.outputs), "")
    return reader.add(kind, shape, flow, ones=flow.ones, op=node.title, node=where, **value)


def _add_layer_norm(reader: ProgramRecorder, centred: ProgramValue, of: int, epsilon: float) -> ProgramValue:
    import numpy as np

    width = centred.shape[-1]
    before = ProgramValue(of, centred.shape, centred.ones)
    scale, offset = np.ones(width, np.float32), np.zeros(width, np.float32)
    return reader.add(
        "layer_norm", centred.shape, before, ones=centred.ones, scale=scale, offset=offset, epsilon=epsilon,
        paths=(), weights=None, stage=0,
    )  # fmt: skip


def _match_pattern_part(
    reader: ProgramRecorder, node: OnnxNode, flow: ProgramValue, constant: ProgramConstant, *, turned: bool
) -> Any:
    """Return the value if operator and constant are part of a layer norm or of GELU, else None."""
    found = reader.operation(flow)
    if found is None:
        return None
    array = constant.array
    single = float(array.reshape(-1)[0]) if array.size == 1 else math.nan
    if node.op == "Pow" and found.kind == "centred" and not turned and single == 2.0:
        return _add_partial(reader, node, "squared", flow.shape, flow)
    if node.op == "Add" and found.kind == "variance" and single > 0:
        return _add_partial(reader, node, "shifted", flow.shape, flow, of=found.value["of"], epsilon=single)
    if node.op == "Add" and found.kind == "erf" and single == 1.0:
        return _add_partial(reader, node, "erf_1", flow.shape, flow, of=found.inputs[0])
    if node.op == "Mul" and found.kind == "gelu_2" and single == 0.5:
        return reader.add(
            "activation",
            flow.shape,
            ProgramValue(found.inputs[0], flow.shape),
            ones=flow.ones,
            name="gelu",
            slope=0.01,
        )
    if node.op == "Mul" and found.kind == "probabilities" and array.size == array.shape[-1] == flow.shape[-1]:
        paths = () if constant.path is None else (constant.path,)
        return _add_partial(
            reader, node, "weighted", flow.shape, flow, of=found.value["of"], support=array, paths=paths
        )
    if found.kind == "layer_norm" and found.value["stage"] < 2 and array.shape[-1:] == flow.shape[-1:]:
        return _merge_norm_scale(reader, node, flow, found, constant)
    return None


def _merge_norm_scale(
    reader: ProgramRecorder,
    node: OnnxNode,
    flow: ProgramValue,
    found: ProgramOperation,
    constant: ProgramConstant,
) -> Any:
    """Return a layer norm with the scale or the offset applied after it."""
    stage = {"Mul": 1, "Add": 2}.get(node.op, 0)
    if stage <= found.value["stage"] or constant.array.size != flow.shape[-1]:
        return None
    name = "scale" if stage == 1 else "offset"
    before = ProgramValue(found.inputs[0], flow.shape, flow.ones)
    value = {**found.value, name: _floats(constant.array.reshape(-1)), "stage": stage}
    at = {"Mul": 0, "Add": 1}[node.op]
    places = list(value.get("places", (None, None)))
    places[at] = constant.path if constant.array.ndim == 1 else None
    value["places"] = tuple(places)
    value["paths"] = tuple(p for p in places if p is not None)
    if None not in places:
        value["weights"] = LayerTensors(places[0], places[1], value["epsilon"])
    return reader.add("layer_norm", flow.shape, before, ones=flow.ones, **value)


def _gelu(reader: ProgramRecorder, node: OnnxNode, x: ProgramValue, found: ProgramOperation) -> Any:
    """Return GELU if `x` (or half of it) is multiplied by 1 + erf(x / sqrt(2))."""
    inner = reader.operations[found.value["of"] - reader.first] if found.value["of"] >= reader.first else None
    if inner is None or inner.kind != "affine" or inner.value["shift"].any():
        return None
    if not math.isclose(float(inner.value["scale"].reshape(-1)[0]), 1 / math.sqrt(2), rel_tol=1e-6):
        return None
    if inner.inputs == (x.number,):
        return _add_partial(reader, node, "gelu_2", x.shape, x)
    own = reader.operation(x)
    halved = own is not None and own.kind == "affine" and own.inputs == inner.inputs
    if halved and own is not None and (own.value["scale"] == 0.5).all() and not own.value["shift"].any():
        return reader.add(
            "activation", x.shape, ProgramValue(own.inputs[0], x.shape), ones=x.ones, name="gelu", slope=0.01
        )
    return None


def _mean(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow = given[0]
    array = given[1].array if len(given) > 1 and isinstance(given[1], ProgramConstant) else None
    axes = _axes(node, array)
    found = reader.operation(flow) if isinstance(flow, ProgramValue) else None
    if found is not None and found.kind == "grouped":
        return _mean_of_group(reader, node, found, axes)
    if (
        not isinstance(flow, ProgramValue)
        or axes not in ((-1,), (flow.rank - 1,))
        or not node.get("keepdims", 1)
    ):
        return None
    if not _has_feature_axis(flow) or len(flow.shape) != 1:
        return None
    if found is not None and found.kind == "squared":
        centred = reader.operations[found.inputs[0] - reader.first]
        return _add_partial(reader, node, "variance", flow.shape, flow, of=centred.value["of"])
    return _add_partial(reader, node, "mean", flow.shape, flow)


def _mean_of_group(
    reader: ProgramRecorder, node: OnnxNode, grouped: ProgramOperation, axes: tuple[int, ...] | None
) -> ProgramValue | None:
    """Return the mean of each action's quantiles: one of the two axes of its outputs."""
    rows, columns = grouped.value["sizes"]
    ends: dict[tuple[int, ...] | None, bool] = {(-1,): True, (2,): True, (-2,): False, (1,): False}
    last = ends.get(axes)
    if last is None or node.get("keepdims", 1):
        return None
    number, width = (columns, rows) if last else (rows, columns)
    before = ProgramValue(grouped.inputs[0], (rows * columns,))
    return reader.add("quantile_mean", (width,), before, quantiles=number, last=last)


def _softmax(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    found = reader.operation(given[0]) if isinstance(given[0], ProgramValue) else None
    if found is None or found.kind != "grouped" or node.get("axis", -1) not in (-1, 2):
        return None
    return _add_partial(reader, node, "probabilities", given[0].shape, given[0], of=found.inputs[0])


def _sum(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    """Return the expected value of each action, whose probabilities are weighted with atoms."""
    flow = given[0]
    found = reader.operation(flow) if isinstance(flow, ProgramValue) else None
    array = given[1].array if len(given) > 1 and isinstance(given[1], ProgramConstant) else None
    if found is None or found.kind != "weighted" or node.get("keepdims", 1):
        return None
    if _axes(node, array) not in ((-1,), (2,)):
        return None
    before = ProgramValue(found.value["of"], (math.prod(flow.shape),))
    support, paths = _floats(found.value["support"].reshape(-1)), found.value["paths"]
    return reader.add("atom_mean", flow.shape[:1], before, support=support, paths=paths)


def _arg_max(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    """Return the number of the largest value; of equal ones the first."""
    flow = _plain_value(given[0])
    if flow is None or len(flow.shape) != 1 or node.get("axis", 0) not in (-1, 1):
        return None
    if node.get("select_last_index", 0):
        return None
    shape = (1,) if node.get("keepdims", 1) else ()
    return _add_partial(reader, node, "arg_max", shape, flow, count=flow.shape[0])


def _root(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    found = reader.operation(given[0]) if isinstance(given[0], ProgramValue) else None
    if found is None or found.kind != "shifted":
        return None
    return _add_partial(
        reader,
        node,
        "deviation",
        given[0].shape,
        given[0],
        of=found.value["of"],
        epsilon=found.value["epsilon"],
    )


def _erf(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    return (
        _add_partial(reader, node, "erf", given[0].shape, given[0])
        if isinstance(given[0], ProgramValue)
        else None
    )


def _negative(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow = given[0]
    return reader.add("affine", flow.shape, flow, ones=flow.ones, scale=_to_row(-1.0), shift=_to_row(0.0))


def _layer_norm(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    import numpy as np

    flow, scale = given[0], given[1]
    offset = given[2] if len(given) > 2 and given[2] is not None else None
    axis = node.get("axis", -1)
    if not isinstance(flow, ProgramValue) or len(flow.shape) != 1 or axis not in (-1, flow.rank - 1):
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
        weights=LayerTensors(scale.path, offset.path, epsilon) if whole and offset is not None else None,
        paths=tuple(c.path for c in (scale, offset) if c is not None and c.path is not None),
        stage=2,
    )


def _batch_norm(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    import numpy as np

    flow = _plain_value(given[0])
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


def _add_limits(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    """Clip a value: Clip, and Min or Max with a constant."""
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
        flow, constant = given if isinstance(given[0], ProgramValue) else (given[1], given[0])
        array = _broadcast_constant(constant.array, flow) if isinstance(constant, ProgramConstant) else None
        if array is None:
            return None
        wide = array.astype(np.float64)
        low, high = (
            (np.full_like(wide, -most), wide) if node.op == "Min" else (wide, np.full_like(wide, most))
        )
    if not isinstance(flow, ProgramValue) or np.isnan(low).any() or np.isnan(high).any():
        return None
    return reader.add(
        "clip",
        flow.shape,
        flow,
        ones=flow.ones,
        low=np.clip(low, -most, most),
        high=np.clip(high, -most, most),
    )


def _slice_columns(reader: ProgramRecorder, flow: ProgramValue, start: int, stop: int) -> AnyValue | None:
    if not 0 <= start < stop <= flow.shape[-1]:
        return None
    if (start, stop) == (0, flow.shape[-1]):
        return flow
    return reader.add("slice", (*flow.shape[:-1], stop - start), flow, ones=flow.ones, start=start, stop=stop)


def _split(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow = given[0]
    if (
        not isinstance(flow, ProgramValue)
        or not _has_feature_axis(flow)
        or node.get("axis", 0) not in (-1, flow.rank - 1)
    ):
        return None
    width, number = flow.shape[-1], len(node.outputs)
    sizes = node.get("split")
    if sizes is None and len(given) > 1 and isinstance(given[1], ProgramConstant):
        sizes = given[1].array.reshape(-1)
    if sizes is None:
        each = -(-width // number)
        sizes = [each] * (number - 1) + [width - each * (number - 1)]
    stops = [0]
    for size in sizes:
        stops.append(stops[-1] + int(size))
    if stops[-1] != width or len(sizes) != number:
        return None
    return [_slice_columns(reader, flow, a, b) for a, b in pairwise(stops)]


def _slice(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: C901  # versions
    value = given[0]
    lists = [node.get("starts"), node.get("ends"), node.get("axes"), node.get("steps")]
    for number, each in enumerate(given[1:5]):
        if isinstance(each, ProgramConstant):
            lists[number] = tuple(int(e) for e in each.array.reshape(-1))
        elif each is not None:
            return None
    starts, ends, axes, steps = lists
    if isinstance(value, ProgramShape):
        if axes not in (None, (0,)) or steps not in (None, (1,)):
            return None
        return _make_shape(value.values[starts[0] : ends[0]])
    axes = axes if axes is not None else tuple(range(len(starts)))
    if not isinstance(value, ProgramValue) or (steps is not None and any(step != 1 for step in steps)):
        return None
    for start, end, axis in zip(starts, ends, axes, strict=True):
        at = axis % value.rank
        if at == value.rank - 1 and _has_feature_axis(value):
            found = _slice_columns(reader, value, *slice(start, end).indices(value.shape[-1])[:2])
            if not isinstance(found, ProgramValue):
                return None
            value = found
        elif start != 0 or end < (1 << 31) - 1:
            return None
    return value


def _gather(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    value, indices = given
    axis = node.get("axis", 0)
    if not isinstance(indices, ProgramConstant) or indices.array.ndim > 1:
        return None
    wanted = [int(each) for each in indices.array.reshape(-1)]
    if isinstance(value, ProgramShape):
        return _make_shape([value.values[each] for each in wanted], scalar=indices.array.ndim == 0)
    if not isinstance(value, ProgramValue):
        return None
    at = axis % value.rank
    if at in value.ones and indices.array.ndim == 0 and wanted in ([0], [-1]):
        return _drop_axes(value, (at,))
    if at != value.rank - 1 or not _has_feature_axis(value) or not wanted or indices.array.ndim == 0:
        return None
    start = wanted[0] % value.shape[-1]
    if [each % value.shape[-1] for each in wanted] != list(range(start, start + len(wanted))):
        return None
    return _slice_columns(reader, value, start, start + len(wanted))


def _drop_axes(flow: ProgramValue, axes: Sequence[int]) -> ProgramValue | None:
    """Return a value without some of its axes of extent 1."""
    if not set(axes) <= set(flow.ones):
        return None
    kept = [each for each in flow.ones if each not in axes]
    return replace(flow, ones=tuple(each - sum(axis < each for axis in axes) for each in kept))


def _squeeze(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: ARG001
    value = given[0]
    axes = _axes(node, given[1].array if len(given) > 1 and given[1] is not None else None)
    if isinstance(value, ProgramShape):
        return ProgramShape(value.values, scalar=True) if len(value.values) == 1 else None
    if not isinstance(value, ProgramValue):
        return None
    return _drop_axes(value, value.ones if axes is None else [axis % value.rank for axis in axes])


def _unsqueeze(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: ARG001
    value = given[0]
    axes = _axes(node, given[1].array if len(given) > 1 and given[1] is not None else None)
    if isinstance(value, ProgramShape):
        return ProgramShape(value.values)
    if not isinstance(value, ProgramValue) or axes is None:
        return None
    for axis in sorted(axis % (value.rank + len(axes)) for axis in axes):
        value = replace(value, ones=tuple(sorted((*(o + (o >= axis) for o in value.ones), axis))))
    return value


def _transpose(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow = given[0]
    if not isinstance(flow, ProgramValue):
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


def _shape(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:  # noqa: ARG001
    flow = _plain_value(given[0])
    if flow is None or node.get("start", 0) or node.get("end") is not None:
        return None
    return ProgramShape((None, *flow.shape))


def _make_shape(values: Sequence[int | None], *, scalar: bool = False) -> ProgramConstant | ProgramShape:
    """Return extents of a shape: a constant unless the number of observations is among them."""
    import numpy as np

    if None in values:
        return ProgramShape(tuple(values), scalar)
    made = np.asarray(values, np.int64)
    return ProgramConstant(made.reshape(()) if scalar else made)


def _concat(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    if any(isinstance(each, ProgramShape) for each in given):
        values: list[int | None] = []
        for each in given:
            values += (
                each.values if isinstance(each, ProgramShape) else [int(v) for v in each.array.reshape(-1)]
            )
        return ProgramShape(tuple(values))
    if not all(isinstance(each, ProgramValue) and _has_feature_axis(each) for each in given):
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


def _flatten(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow = _plain_value(given[0])
    if flow is None or node.get("axis", 1) not in (1, 1 - flow.rank):
        return None
    return _add_flatten(reader, flow)


def _add_flatten(reader: ProgramRecorder, flow: ProgramValue) -> ProgramValue:
    if len(flow.shape) == 1:
        return replace(flow, ones=())
    return reader.add("flatten", (math.prod(flow.shape),), replace(flow, ones=()), image=flow.shape)


def _reshape(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow, to = given
    if isinstance(flow, ProgramShape):
        return ProgramShape(flow.values)
    if not isinstance(flow, ProgramValue):
        return None
    target = list(to.values) if isinstance(to, ProgramShape) else [int(each) for each in to.array.reshape(-1)]
    size = math.prod(flow.shape)
    if not flow.ones and len(target) == 1 + len(flow.shape):
        rest = target[1:]
        if target[0] in (None, -1, 0, 1) and all(t in (0, n) for t, n in zip(rest, flow.shape, strict=True)):
            return flow
    if len(target) == 2 and (target[1] == size or (target[1] == -1 and target[0] != -1)):
        return _add_flatten(reader, flow)
    if (
        len(target) == 3
        and len(flow.shape) == 1
        and (target[2] == size or (target[2] == -1 and -1 not in target[:2]))
    ):
        if target[0] == 1:
            return replace(flow, ones=(0,))
        if target[1] == 1:
            return replace(flow, ones=(1,))
    return _group(reader, node, flow, target) if len(target) == 3 and len(flow.shape) == 1 else None


def _group(
    reader: ProgramRecorder, node: OnnxNode, flow: ProgramValue, target: Sequence[int | None]
) -> ProgramValue | None:
    """Return an observation's values as rows and columns."""
    (size,), (batch, *rest) = flow.shape, target
    sizes = [each for each in rest if each is not None and each > 0]
    if flow.ones or batch not in (None, 0, -1) or [*target].count(-1) > 1 or None in rest or 0 in rest:
        return None
    if len(sizes) == 1 and size % sizes[0] == 0:
        sizes.insert(rest.index(-1), size // sizes[0])
    if len(sizes) != 2 or math.prod(sizes) != size:
        return None
    shape = (sizes[0], sizes[1])
    return replace(_add_partial(reader, node, "grouped", shape, flow, sizes=shape), ones=())


def _convolution(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    flow, weight = _plain_value(given[0]), given[1]
    bias = given[2] if len(given) > 2 else None
    if (
        flow is None
        or not isinstance(weight, ProgramConstant)
        or weight.array.ndim != 4
        or len(flow.shape) != 3
    ):
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


def _add_cell(reader: ProgramRecorder, node: OnnxNode, given: Sequence[Any]) -> Any:
    """Add one step of an LSTM or GRU whose state is a model input and output."""
    import numpy as np

    given = [*given, *[None] * (8 - len(given))]
    flow, weight, recurrent, biases, lengths, hidden, cell, peephole = given[:8]
    lstm = node.op == "LSTM"
    settings = ("direction", "layout", "clip", "activations", "input_forget")
    plain = [node.get(name) in (None, 0, b"forward") for name in settings]
    if not isinstance(flow, ProgramValue) or flow.ones != (0,) or len(flow.shape) != 1 or not all(plain):
        return None
    if (
        lengths is not None
        or peephole is not None
        or not isinstance(hidden, ProgramValue)
        or weight.array.shape[0] != 1
    ):
        return None
    names = {
        flow_.number: name
        for name, flow_ in reader.scope.items()
        if isinstance(flow_, ProgramValue) and name in reader.states
    }
    states = [
        names.get(each.number)
        for each in (hidden, cell)[: 2 if lstm else 1]
        if isinstance(each, ProgramValue)
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
    # The operator orders gates i, o, f, c and z, r, h; here they are i, f, c, o and z, r, h.
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
    # Y is [steps, directions, batch, units], where the first two are 1; Y_h and Y_c have no steps axis.
    return [replace(found, ones=(0, 1)), found, _add_partial(reader, node, "cell", (units,), found)]


OPERATORS: dict[str, Callable[[ProgramRecorder, OnnxNode, Sequence[Any]], Any]] = {
    **dict.fromkeys(_SAME, _identity),
    **dict.fromkeys((*_ACTIVATIONS, "Elu", "Gelu", "Swish", "LeakyRelu", "PRelu"), _activation),
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Pow"), _arithmetic),
    **dict.fromkeys(("Clip", "Min", "Max"), _add_limits),
    **dict.fromkeys(("LSTM", "GRU"), _add_cell),
    "Cast": _cast_value,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "ReduceMean": _mean,
    "ReduceSum": _sum,
    "Softmax": _softmax,
    "ArgMax": _arg_max,
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
