"""Pair the layers of two models, compare their activations, and find out why one differs."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from typing import Any, Protocol

import numpy as np

from ckpttool.commands.layer_operations import common_activations
from ckpttool.networks.model_runner import ROOT

# Layers and their families, whatever the framework calls them.

_FAMILIES = (
    ("attention", r"attention"),
    ("recurrent", r"lstm|gru|rnn|bidirectional"),
    ("convolution", r"conv"),
    ("batch_norm", r"batch_?norm"),
    ("norm", r"layer_?norm|group_?norm|rms_?norm|instance_?norm|layernormalization"),
    ("embedding", r"embed|gather"),
    ("dense", r"dense|linear|gemm|matmul"),
    ("dropout", r"dropout"),
    ("pool", r"pool"),
    ("flatten", r"flatten|reshape"),
    ("activation", r"relu|gelu|elu|tanh|sigmoid|softmax|silu|swish|softplus|activation|mish"),
)
# Families whose layers are compared as a whole: frameworks divide them differently.
_COMPOSITE = ("recurrent", "attention")
# Base classes that do not show what a user's class computes.
_PLAIN = ("Module", "Layer", "Model", "Functional", "Sequential")


def find_family(cls: str) -> str:
    """Return the kind of layer that a class name names, "" if none."""
    return next((name for name, words in _FAMILIES if re.search(words, cls, re.IGNORECASE)), "")


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A layer's tensor: `values` is equal for equal numbers in any order."""

    name: str
    shape: tuple[int, ...]
    values: str
    constant: bool
    quantiles: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One call of a layer: its path, the number of the call, and its tensors with those of its parts.

    A `composed` layer calls other layers that are compared themselves.
    """

    path: str
    number: int
    cls: str
    tensors: tuple[LayerTensor, ...]
    settings: Mapping[str, Any]
    width: int = 0
    composed: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """The call's identity."""
        return self.path, self.number

    @property
    def title(self) -> str:
        """The path, with the number of a repeated call."""
        return f"{self.path}#{self.number + 1}" if self.number else self.path

    @property
    def family(self) -> str:
        """The kind of layer."""
        return find_family(self.cls)

    @property
    def weights(self) -> frozenset[str]:
        """The values of matrices; of vectors if there is no matrix."""
        known = [each for each in self.tensors if not each.constant and each.shape]
        return frozenset(each.values for each in known if len(each.shape) > 1) or frozenset(
            each.values for each in known
        )


def called_layers(
    layers: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> list[ModelLayer]:
    """Return the calls of layers with tensors, and of layers without parts, in the order of their ends."""
    known = {each["path"]: each for each in layers}
    above = {path: frozenset(_parents(path)) for path in {each["path"] for each in calls}}
    families = {path: find_family(_class_of(known.get(path))) for path in above}
    inner = frozenset().union(*above.values())
    for path in [path for path, family in families.items() if family in _COMPOSITE]:
        # A user's model may be named after a layer that is one of its parts.
        own = path in known and known[path]["class"] in _PLAIN
        parts = (other for other in families if is_inside(other, path))
        if own and (path == ROOT or any(families[other] == families[path] for other in parts)):
            families[path] = ""
    composite = {path for path, family in families.items() if family == "recurrent"}
    held: dict[str, tuple[LayerTensor, ...]] = {}
    found = []
    for call in calls:
        path, layer = call["path"], known.get(call["path"])
        if layer is None or not call.get("made") or above[path] & composite:
            continue
        if path not in held:
            whole = families[path] in _COMPOSITE
            mine = [each for each in layers if whole and is_inside(each["path"], path)]
            held[path] = tuple(_layer_tensor(row) for each in (layer, *mine) for row in each["tensors"])
        tensors = held[path]
        if not tensors and path in inner:
            continue
        shape = call["made"][0]["shape"]
        width = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        composed = path in inner and families[path] not in _COMPOSITE
        settings = {**layer["settings"], **call.get("options", {})}
        found.append(ModelLayer(path, call["number"], _class_of(layer), tensors, settings, width, composed))
    return found


def _class_of(layer: Mapping[str, Any] | None) -> str:
    if layer is None:
        return ""
    return str(layer["name"] if layer["class"] in _PLAIN else layer["class"])


def is_inside(path: str, other: str) -> bool:
    """Return whether a layer is a part of another one, by their paths."""
    return path != other and (other == ROOT or path.startswith((other + ".", other + "/")))


def _parents(path: str) -> Iterator[str]:
    """Yield the paths of the layers that may contain a layer."""
    if path != ROOT:
        yield ROOT
    yield from (path[:end] for end, letter in enumerate(path) if letter in "./" and end)


def _layer_tensor(row: Mapping[str, Any]) -> LayerTensor:
    return LayerTensor(
        row["name"], tuple(row["shape"]), row["values"], row["constant"], tuple(row["quantiles"])
    )


# Pairs: by equal weights, then by order between paired neighbours.


@dataclass(frozen=True, slots=True)
class LayerCallPair:
    """A layer of both sides; `by` is the evidence: weights, some weights, or order."""

    a: ModelLayer
    b: ModelLayer
    by: str


def pair_layers(a: Sequence[ModelLayer], b: Sequence[ModelLayer]) -> list[LayerCallPair]:
    """Return the pairs in the order of A's calls."""
    found = _equal_pairs(a, b)
    at_b = {id(layer): place for place, layer in enumerate(b)}
    anchors = _increasing([(place, at_b[id(found[place])]) for place in sorted(found)])
    taken = {id(each) for each in found.values()}
    evidence = dict.fromkeys(found, "weights")
    edges = [(-1, -1), *anchors, (len(a), len(b))]
    for (low_a, low_b), (high_a, high_b) in pairwise(edges):
        rest_a = [place for place in range(low_a + 1, high_a) if place not in found]
        rest_b = [b[place] for place in range(low_b + 1, high_b) if id(b[place]) not in taken]
        for place, other in _aligned([(n, a[n]) for n in rest_a], rest_b):
            found[place] = other
            evidence[place] = "order"
            taken.add(id(other))
    return [LayerCallPair(a[place], found[place], evidence[place]) for place in sorted(found)]


def _equal_pairs(a: Sequence[ModelLayer], b: Sequence[ModelLayer]) -> dict[int, ModelLayer]:
    """Return the layers of B by the place of those of A with equal weights, in order of their calls."""
    by_weights: dict[tuple[frozenset[str], bool], list[ModelLayer]] = defaultdict(list)
    for layer in b:
        if layer.weights:
            by_weights[layer.weights, layer.composed].append(layer)
    return {
        place: by_weights[layer.weights, layer.composed].pop(0)
        for place, layer in enumerate(a)
        if layer.weights and by_weights[layer.weights, layer.composed]
    }


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest part of the pairs in which both numbers increase."""
    tails: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for place, (_, number) in enumerate(pairs):
        where = bisect_left(tails, number)
        before.append(at[where - 1] if where else -1)
        if where == len(tails):
            tails.append(number)
            at.append(place)
        else:
            tails[where], at[where] = number, place
    found = []
    place = at[-1] if at else -1
    while place >= 0:
        found.append(pairs[place])
        place = before[place]
    return found[::-1]


_MOST_ALIGNED = 400


def _aligned(
    a: Sequence[tuple[int, ModelLayer]], b: Sequence[ModelLayer]
) -> Iterator[tuple[int, ModelLayer]]:
    """Yield the pairs of the best alignment in order."""
    a, b = a[:_MOST_ALIGNED], b[:_MOST_ALIGNED]
    best = np.zeros((len(a) + 1, len(b) + 1))
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            score = _likeness(a[i][1], b[j])
            here = best[i + 1, j + 1] + score if score else 0.0
            best[i, j] = max(here, best[i + 1, j], best[i, j + 1])
    i = j = 0
    while i < len(a) and j < len(b):
        score = _likeness(a[i][1], b[j])
        if score and best[i, j] == best[i + 1, j + 1] + score:
            yield a[i][0], b[j]
            i, j = i + 1, j + 1
        elif best[i, j] == best[i + 1, j]:
            i += 1
        else:
            j += 1


def _likeness(a: ModelLayer, b: ModelLayer) -> float:
    """Return how alike two layers are, 0 if they cannot be a pair."""
    if (
        bool(a.tensors) != bool(b.tensors)
        or a.composed != b.composed
        or (a.family != b.family and a.family and b.family)
    ):
        return 0.0
    shared = len(
        {each.values for each in a.tensors if not each.constant} & {each.values for each in b.tensors}
    )
    sizes = [
        Counter(_size(each) for each in layer.tensors if sum(extent > 1 for extent in each.shape) > 1)
        for layer in (a, b)
    ]
    alike = sizes[0] == sizes[1]
    if a.tensors and not (shared or alike):
        return 0.0
    if not a.tensors and (not a.family or a.family != b.family):
        return 0.0
    return 4.0 * shared + 2.0 * alike + (a.family == b.family) + 0.5 * (a.width == b.width)


def _size(tensor: LayerTensor) -> int:
    return int(np.prod(tensor.shape))


# Comparison of the captured inputs and outputs of a pair.


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """Arrays of one call: inputs, what the layer's activation receives, and outputs."""

    given: tuple[np.ndarray, ...]
    before: tuple[np.ndarray, ...]
    made: tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """Errors of one pair, relative to A's largest number: of the inputs and of the outputs."""

    a: str
    b: str
    classes: tuple[str, str]
    by: str
    inputs: float
    outputs: float
    within: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "a": self.a,
            "b": self.b,
            "class_a": self.classes[0],
            "class_b": self.classes[1],
            "by": self.by,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "within": self.within,
        }


LAYER, BETWEEN = "layer", "between"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two models part: in a layer, or between a layer and the one before it.

    `inputs` is the error of the layer's inputs, `cause` the suspected reason; it is `confirmed` if the
    difference disappears when only that is changed. `fix` is an option or command.
    """

    a: str
    b: str
    where: str
    inputs: float | None
    cause: str | None
    confirmed: bool = False
    fix: str | None = None
    after: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            name: getattr(self, name)
            for name in ("a", "b", "where", "inputs", "cause", "confirmed", "fix", "after")
        }


def align_arrays(a: np.ndarray, b: np.ndarray) -> tuple[float, np.ndarray | None]:
    """Return the smallest relative error over the orders of axes that frameworks use, and B in A's order."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    best: tuple[float, np.ndarray | None] = (float("inf"), None)
    if a.size != b.size or not a.size:
        return best
    there = np.isfinite(a)
    scale = float(np.abs(a[there]).max(initial=0.0)) or 1.0
    for turned in _turned(a, b):
        error = float("inf")
        if np.array_equal(a[~there], turned[~there], equal_nan=True) and np.isfinite(turned[there]).all():
            error = float(np.abs(a[there] - turned[there]).max(initial=0.0)) / scale
        if error < best[0] or best[1] is None:
            best = error, turned
    return best


def _turned(a: np.ndarray, b: np.ndarray) -> Iterator[np.ndarray]:
    """Yield B with axes in each usual order that gives A's shape."""
    orders = [b]
    if b.ndim > 2:
        orders += [np.moveaxis(b, 1, -1), np.moveaxis(b, -1, 1), np.swapaxes(b, 0, 1)]
    if b.ndim == 4:
        orders.append(np.swapaxes(b, 1, 2))
    for each in orders:
        if each.shape == a.shape:
            yield each
        elif a.shape[:1] == each.shape[:1] and a.ndim != each.ndim:
            yield each.reshape(a.shape)
        elif a.ndim == 3 and each.ndim == 2 and a.shape[-1] == each.shape[-1]:
            # The rows of all sequences in one matrix, by batch or by step.
            yield each.reshape(a.shape)
            yield np.swapaxes(each.reshape(a.shape[1], a.shape[0], -1), 0, 1)


def input_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return the error of two inputs, one of which may be padded already."""
    error = align_arrays(a, b)[0]
    return error if np.isfinite(error) or a.ndim != b.ndim or a.ndim < 3 else find_padding(a, b)[0]


def find_padding(a: np.ndarray, b: np.ndarray) -> tuple[float, tuple[int, int]]:
    """Return the error of two inputs inside a constant border, and its width before each side's numbers.

    The widths of A and B are those on the low side; the larger array has the border.
    """
    best: tuple[float, tuple[int, int]] = (float("inf"), (0, 0))
    for turned in (b, np.moveaxis(b, 1, -1), np.moveaxis(b, -1, 1)):
        sizes = np.array(a.shape) - np.array(turned.shape)
        if not sizes.any() or (sizes.min() < 0 < sizes.max()):
            continue
        large, small = (a, turned) if sizes.max() > 0 else (turned, a)
        for low in {tuple(abs(sizes) // 2), tuple((abs(sizes) + 1) // 2), tuple(abs(sizes)), (0,) * a.ndim}:
            place = tuple(
                slice(start, start + extent) for start, extent in zip(low, small.shape, strict=True)
            )
            border = np.ones(large.shape, bool)
            border[place] = False
            edge = large[border]
            error = align_arrays(small, large[place])[0]
            if edge.size and (edge == edge[0]).all() and error < best[0]:
                width = int(max(low))
                best = error, (width, 0) if large is a else (0, width)
    return best


def is_reordered(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether every row of B has A's numbers in another order, the same one in all rows."""
    if a.shape[:1] != b.shape[:1] or a.size != b.size or not a.size:
        return False
    one, other = (np.sort(np.asarray(each, np.float64).reshape(len(each), -1), axis=1) for each in (a, b))
    return bool(np.abs(one - other).max() <= bound * (float(np.abs(one).max()) or 1.0))


def compare_layer(pair: LayerCallPair, a: CapturedCall, b: CapturedCall, bound: float) -> LayerComparison:
    """Return the errors of a pair's first input and of its outputs."""
    inputs = input_error(a.given[0], b.given[0]) if a.given and b.given else 0.0
    if pair.a.family == pair.b.family == "attention" and len(a.given) > 1 < len(b.given):
        inputs = max(inputs, align_arrays(a.given[1], b.given[1])[0])
    outputs = output_error(a, b)
    if pair.a.family == "flatten" and outputs > bound and is_reordered(a.made[0], b.made[0], bound):
        outputs = 0.0  # each framework has its own order; the next layer's weights are in the same
    return LayerComparison(
        pair.a.title, pair.b.title, (pair.a.cls, pair.b.cls), pair.by, inputs, outputs, outputs <= bound
    )


def output_error(a: CapturedCall, b: CapturedCall) -> float:
    """Return the error of a call's outputs, before the activation if only one side includes it."""
    if a.before and b.before:
        return max(align_arrays(a.before[0], b.before[0])[0], align_arrays(a.made[0], b.made[0])[0])
    one, other = (each.before or each.made for each in (a, b))
    # A recurrent layer also returns its state, or only its last step.
    error = min(align_arrays(x, y)[0] for x in _steps(one) for y in _steps(other))
    if a.before or b.before:
        # A module of an own class may include its activation without a name for it.
        error = min(error, align_arrays(a.made[0], b.made[0])[0])
    return error


def _steps(made: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a call; of a sequence with states, or by direction, the last steps, too."""
    first = made[0]
    if first.ndim == 4 and first.shape[1] == 1:  # ONNX: steps, directions, batch, features
        return [first, first[:, 0], first[-1, 0]]
    if len(made) == 1 or first.ndim != 3:
        return [first]
    return [first, first[:, -1], *made[1:]]


# Causes of a difference in one layer: a change of B's layer that makes the difference disappear.


class LayerProgram(Protocol):
    """A model's process, as far as the search for causes needs it."""

    def tensors(self, path: str, *, parts: bool = False) -> dict[str, np.ndarray]:
        """Return the tensors of one layer, on request with those of its parts as `part/name`."""
        ...

    def repeat(
        self,
        call: tuple[str, int],
        tensors: Mapping[str, np.ndarray],
        settings: Mapping[str, Any],
        *,
        exact: bool,
    ) -> tuple[np.ndarray, ...]:
        """Return the outputs of a captured call with other tensors or settings; nothing if it fails."""
        ...


@dataclass(frozen=True, slots=True)
class Cause:
    """A suspected cause, and an option or change that mends it."""

    text: str
    fix: str | None = None
    confirmed: bool = False


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """A change of B's layer, and the cause that it would prove."""

    cause: Cause
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


# One setting, by the names that frameworks give it.
_SETTINGS = (
    ("epsilon", "eps", "epsilon", "layer_norm_eps"),
    ("padding", "padding", "pads"),
    ("stride", "stride", "strides"),
    ("dilation", "dilation", "dilation_rate", "dilations"),
    ("groups", "num_groups", "groups", "group"),
    ("axis", "axis", "dim", "normalized_shape"),
    ("activation", "activation", "nonlinearity"),
    ("form of gelu", "approximate"),
    ("slope", "negative_slope", "alpha"),
    ("pool size", "kernel_size", "pool_size"),
    ("number of heads", "num_heads"),
    ("mode", "padding_mode", "mode"),
    ("rounding of the output size", "ceil_mode"),
    ("counting of padding", "count_include_pad"),
    ("scale", "scale", "factor", "temperature"),
)


def padding_amounts(layer: ModelLayer, shape: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the padding of a convolution or pooling layer at both ends of each axis, None if unknown."""
    held = layer.settings
    kernel = next((held[name] for name in ("kernel_size", "pool_size") if name in held), None)
    last = held.get("data_format") == "channels_last"
    sizes = list(shape[1:-1] if last else shape[2:])
    if kernel is None or layer.family not in ("convolution", "pool"):
        return None
    rows = [kernel]
    for names, default in ((("stride", "strides"), 1), (("dilation", "dilation_rate"), 1), (("padding",), 0)):
        rows.append(next((held[name] for name in names if name in held), default))
    kernels, strides, dilations, padding = (
        [each] * len(sizes) if isinstance(each, int) else each for each in rows
    )
    if isinstance(padding, str) and padding not in ("same", "valid"):
        return None
    if padding == "valid":
        return [(0, 0)] * len(sizes)
    if not all(len(each) == len(sizes) for each in (kernels, strides, dilations)):
        return None
    if padding != "same":
        return [(each, each) for each in padding] if len(padding) == len(sizes) else None
    found: list[tuple[int, int]] = []
    for extent, width, step, dilation in zip(sizes, kernels, strides, dilations, strict=True):
        reach = dilation * (width - 1) + 1
        total = max((-(-extent // step) - 1) * step + reach - extent, 0)
        if "transpose" in layer.cls.lower():
            total = max(width - step, 0)
        found.append((total // 2, total - total // 2))
    return found


_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)
_MOST_TRANSPOSED = 1 << 24
_ROLES = (
    ("mean", r"mean"),
    ("variance", r"var"),
    ("bias", r"bias|beta|offset|(^|/)b$"),
    ("recurrent", r"weight_hh|recurrent"),
    ("kernel", r"kernel|weight|embeddings|gamma|scale|alpha|(^|/)w$"),
)


class LayerCauses:
    """Searches the cause of a difference in a pair of layers whose inputs agree."""

    def __init__(
        self,
        pair: LayerCallPair,
        calls: tuple[CapturedCall, CapturedCall],
        sides: tuple[LayerProgram, LayerProgram],
        bound: float,
        *,
        exact: bool,
    ) -> None:
        self._pair, self._calls, self._program = pair, calls, sides[1]
        self._bound, self._exact = bound, exact
        self._a, self._b = (
            side.tensors(layer.path, parts=layer.family in _COMPOSITE)
            for side, layer in zip(sides, (pair.a, pair.b), strict=True)
        )
        a, b = calls
        self._extra = {"activation": "linear"} if b.before and not a.before else {}

    def find(self) -> Cause | None:
        """Return the first confirmed cause, else the first suspected one."""
        suspected = self._masks() if self._pair.b.family == "attention" else None
        for each in self._hypotheses():
            if self._error(each) <= self._bound or self._is_added(each):
                return replace(each.cause, confirmed=True)
            if suspected is None and not isinstance(each, _Trial):
                suspected = each.cause
        return self._by_outputs() or suspected

    def _masks(self) -> Cause | None:
        """Return the mask that only one side's attention receives."""
        masks = []
        for layer, call in zip((self._pair.a, self._pair.b), self._calls, strict=True):
            causal = any(layer.settings.get(name) is True for name in _CAUSAL)
            masks.append(
                "causal" if causal else next((_describe_mask(x) for x in call.given[1:] if _is_mask(x)), "")
            )
        if masks[0] == masks[1]:
            return None
        one, other = (f"a {each} mask".replace("  ", " ") if each else "no mask" for each in masks)
        return Cause(
            f"attention has {one} in A and {other} in B", f"pass A's mask to {self._pair.b.path} of B"
        )

    def _error(self, each: _Hypothesis) -> float:
        """Return the error of the outputs after the change."""
        made = self._program.repeat(
            self._pair.b.key, each.tensors, {**self._extra, **each.settings}, exact=self._exact
        )
        a, b = self._calls
        if not made:
            return float("inf")
        before = a.before if not b.before else ()
        return output_error(CapturedCall((), (), before or a.made), CapturedCall((), (), made))

    def _is_added(self, each: _Hypothesis) -> bool:
        """Return whether A's outputs are B's plus a bias that B's layer has no place for."""
        bias = each.tensors.get("bias") if "bias" not in self._b and not each.settings else None
        one, other = (call.before or call.made for call in self._calls)
        apart = align_arrays(one[0], other[0])[1]
        if bias is None or apart is None:
            return False
        apart = np.asarray(one[0], np.float64) - apart
        allowed = self._bound * (float(np.abs(one[0]).max()) or 1.0)
        return any(
            apart.shape[axis] == bias.size
            and float(np.abs(np.moveaxis(apart, axis, -1) - bias).max()) <= allowed
            for axis in range(1, apart.ndim)
        )

    def _hypotheses(self) -> Iterator[_Hypothesis]:
        yield from self._different_settings()
        yield from self._different_tensors()
        yield from self._turned_tensors()
        yield from self._other_blocks()
        yield from self._other_epsilons()

    def _different_settings(self) -> Iterator[_Hypothesis]:
        a, b = self._pair.a.settings, self._pair.b.settings
        for title, *names in _SETTINGS:
            one = next((a[name] for name in names if name in a), self._default(title))
            own = next((name for name in names if name in b), None)
            if title == "padding" and own is not None and (amounts := self._paddings()) is not None:
                yield from self._different_padding(own, *amounts)
                continue
            if title == "counting of padding" and own is None:
                yield from self._different_counting()
            if one is None or own is None or _as_plain(one) == _as_plain(b[own]):
                continue
            cause = Cause(
                f"{title} is {_as_text(one)} in A and {_as_text(b[own])} in B",
                f"set {own}={_as_text(one)} in {self._pair.b.path} of B",
            )
            for value in _as_settings(title, one, self._b):
                yield _Hypothesis(cause, settings={own: value})

    def _paddings(self) -> tuple[list[int], list[int]] | None:
        """Return by how much each side pads, in the layer or before it; None if unknown."""
        rows = [
            padding_amounts(layer, call.given[0].shape) if call.given else None
            for layer, call in zip((self._pair.a, self._pair.b), self._calls, strict=True)
        ]
        a, b = rows
        if a is None or b is None or len(a) != len(b):
            return None
        if self._calls[0].given[0].size == self._calls[1].given[0].size:
            return list(itertools.chain(*a)), list(itertools.chain(*b))
        _, before = find_padding(self._calls[0].given[0], self._calls[1].given[0])
        one, other = ([low + width for low, _ in side] for side, width in zip((a, b), before, strict=True))
        return one, other

    def _different_padding(self, own: str, one: list[int], other: list[int]) -> Iterator[_Hypothesis]:
        if one == other:
            return
        path, held = self._pair.b.path, self._pair.b.settings[own]
        shown = [value[0] if len({*value}) == 1 else value for value in (one, other)]
        fix = f"set {own}={shown[0]} in {path} of B"
        if isinstance(held, str):
            fix = f"pad the input of {path} in B by {shown[0]} with a layer, and set {own}='valid' there"
        cause = Cause(f"padding is {shown[0]} in A and {shown[1]} in B", fix)
        for value in _as_settings("padding", self._pair.a.settings.get("padding", shown[0]), self._b):
            yield _Hypothesis(cause, settings={own: value})

    def _different_counting(self) -> Iterator[_Hypothesis]:
        """Yield that B's mean counts a border of its input, which A's layer adds and does not count."""
        counts, amounts = self._pair.a.settings.get("count_include_pad"), self._paddings()
        if counts is not False or amounts is None or not any(amounts[0]):
            return
        if self._calls[1].given[0].size > self._calls[0].given[0].size:
            path = self._pair.b.path
            fix = f"set padding='same' in {path} of B, without a padding layer before it"
            yield _Hypothesis(Cause("counting of padding is False in A and True in B", fix))

    def _default(self, title: str) -> Any:
        """Return the setting of A's layer that has no name in A's framework."""
        if title == "counting of padding" and self._calls[0].given and self._calls[1].given:
            # A border that is in the input counts; Keras's own does not.
            return self._calls[0].given[0].size > self._calls[1].given[0].size
        return "zeros" if title == "mode" and self._pair.a.family == "convolution" else None

    def _different_tensors(self) -> Iterator[_Hypothesis]:
        """Yield A's numbers in the place of each tensor of B, of all of them, and of missing ones."""
        made = translate_tensors(self._pair.a.family, self._a, self._b)
        if made:
            yield _Hypothesis(self._block_cause(made), made)
            return
        every: dict[str, np.ndarray] = {}
        reasons: list[str] = []
        for name, own in self._b.items():
            options = list(_fitting(self._a, name, own, self._pair.a.family))
            if not options or any(np.array_equal(each, own) for _, each in options):
                continue
            for known, each in options:
                cause = _tensor_cause(known, each, name, own)
                every.setdefault(name, each)
                reasons.append(cause.text)
                yield _Hypothesis(cause, {name: each})
        for name, own in self._b.items():
            for known, each in self._a.items():
                if find_role(known) == find_role(name) != "" and each.size != own.size:
                    text = f"B's {name} has shape {list(own.shape)}, A's {known} has {list(each.shape)}"
                    yield _Hypothesis(Cause(text))
        for known, each in self._missing():
            text = f"B's layer has no {known}, which A's has"
            yield _Hypothesis(Cause(text, f"add {known} to {self._pair.b.path} of B"), {"bias": each})
        if len(every) > 1:
            yield _Hypothesis(Cause("; ".join(dict.fromkeys(reasons))), every)

    def _block_cause(self, right: Mapping[str, np.ndarray]) -> Cause:
        """Return how B's blocks differ from A's numbers in B's form."""
        family = self._pair.b.family
        heads = self._pair.b.settings.get("num_heads", self._pair.a.settings.get("num_heads", 1))
        one, own = (split_blocks(family, each, int(heads)) for each in (right, self._b))
        if one and {*one} == {*own}:
            for what, rows in _block_rows(family, one):
                if [own[name] for name in rows] != [one[name] for name in rows] and sorted(
                    own[name] for name in rows
                ) == sorted(one[name] for name in rows):
                    return Cause(f"B has the {what} in another order than A")
        texts = [
            _tensor_cause(name, each, name, self._b[name]).text
            for name, each in right.items()
            if not np.array_equal(each, self._b[name])
        ]
        return Cause("; ".join(dict.fromkeys(texts)))

    def _missing(self) -> Iterator[tuple[str, np.ndarray]]:
        roles = {find_role(name) for name in self._b}
        for name, each in self._a.items():
            if find_role(name) == "bias" and "bias" not in roles:
                yield name, each.reshape(-1) if each.ndim > 1 else each

    def _turned_tensors(self) -> Iterator[_Hypothesis]:
        """Yield B's own matrices transposed or reversed."""
        for name, own in self._b.items():
            if own.ndim < 2 or own.size > _MOST_TRANSPOSED:
                continue
            for one in range(own.ndim):
                for other in range(one + 1, own.ndim):
                    if own.shape[one] == own.shape[other]:
                        cause = Cause(
                            f"B's {name} {list(own.shape)} is transposed", "convert A again with --kind"
                        )
                        yield _Trial(cause, {name: np.swapaxes(own, one, other)})
            for axis in range(own.ndim):
                cause = Cause(f"B's {name} has axis {axis} in reverse order, e.g. BGR for RGB")
                yield _Trial(cause, {name: np.flip(own, axis)})

    def _other_blocks(self) -> Iterator[_Hypothesis]:
        """Yield B's gates, or queries, keys and values, in other orders."""
        family = self._pair.b.family
        if family not in ("recurrent", "attention"):
            return
        what = "gates" if family == "recurrent" else "queries, keys and values"
        for count in (4, 3):
            blocks = {
                name: axis for name, each in self._b.items() if (axis := _block_axis(each, count)) is not None
            }
            for order in permutations(range(count)):
                if order == tuple(range(count)) or not blocks:
                    continue
                tensors = {
                    name: np.concatenate([np.split(self._b[name], count, axis)[n] for n in order], axis)
                    for name, axis in blocks.items()
                }
                yield _Trial(Cause(f"B has the {what} in another order than A"), tensors)

    def _other_epsilons(self) -> Iterator[_Hypothesis]:
        settings = self._pair.b.settings
        for own in [name for name in ("eps", "epsilon") if name in settings]:
            for value in _EPSILONS:
                cause = Cause(
                    f"epsilon is {value:g} in A and {_as_text(settings[own])} in B",
                    f"set {own}={value:g} in {self._pair.b.path} of B",
                )
                yield _Trial(cause, settings={own: value})

    def _by_outputs(self) -> Cause | None:
        """Return what the outputs alone show: a constant, a factor, or a product of tensors of A."""
        names = [
            name_activation(call.given[0], call.made[0], self._bound) if call.given else None
            for call in self._calls
        ]
        if all(names) and names[0] != names[1]:
            return Cause(f"A applies {names[0]}, B applies {names[1]}", confirmed=True)
        a, b = (each.before or each.made for each in self._calls)
        _, other = align_arrays(a[0], b[0])
        if other is None:
            return None
        extra = [name for name in self._a if find_role(name) != "bias" and "lora" in name.lower()]
        if extra:
            return Cause(
                f"A's layer has tensors that B's lacks: {', '.join(extra)}", "merge them into the weight"
            )
        return relate_arrays(np.asarray(a[0], np.float64), other, self._bound)


_CAUSAL = ("use_causal_mask", "is_causal")


def _is_mask(x: np.ndarray) -> bool:
    """Return whether an input of attention is a mask: switches, or zeros and large negative numbers."""
    return x.dtype.kind == "b" or (
        x.dtype.kind == "f" and x.ndim > 1 and bool(((x == 0) | (x < -1e3)).all()) and bool((x != 0).any())
    )


def _describe_mask(x: np.ndarray) -> str:
    steps = x.reshape(-1, *x.shape[-2:])[0] if x.ndim > 1 else x
    if steps.ndim == 2 and steps.shape[0] == steps.shape[1] > 1:
        kept = steps if x.dtype.kind == "b" and steps[0, 0] else steps == 0
        if np.array_equal(kept, np.tril(np.ones(kept.shape, bool))):
            return "causal"
    return f"{list(x.shape)}"


# Layers of several matrices, in the form of either framework.

_QKV = ("query", "key", "value")


def translate_tensors(
    family: str, tensors: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a layer's tensors in the other framework's form, with the names and shapes of `like`."""
    found: dict[str, np.ndarray] = {}
    if family == "recurrent":
        found = _translate_recurrent(tensors, like)
    elif family == "attention":
        found = _translate_attention(tensors, like)
    fits = {*found} == {*like} and all(found[name].shape == like[name].shape for name in like)
    return found if fits else {}


def _by_end(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the full name of each tensor by its last part: Keras's recurrent layers have a cell."""
    return {name.rpartition("/")[2]: name for name in tensors}


def _turned_gates(tensor: np.ndarray, gates: int, axis: int) -> np.ndarray:
    """Return a tensor with the gates of a GRU in the other framework's order: reset and update exchanged."""
    parts = np.split(tensor, gates, axis)
    return np.concatenate([parts[1], parts[0], parts[2]], axis) if gates == 3 else tensor


def _translate_recurrent(
    tensors: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    ends, target = _by_end(tensors), _by_end(like)
    if "weight_hh_l0" in ends and "recurrent_kernel" in target:
        kernels = [tensors[ends[f"weight_{each}_l0"]] for each in ("ih", "hh")]
        gates = len(kernels[1]) // kernels[1].shape[1]
        found = {
            target[name]: _turned_gates(each.T, gates, 1)
            for name, each in zip(("kernel", "recurrent_kernel"), kernels, strict=True)
        }
        if "bias" in target and "bias_ih_l0" in ends:
            pair = np.stack([tensors[ends[f"bias_{each}_l0"]] for each in ("ih", "hh")])
            bias = pair if like[target["bias"]].ndim > 1 else pair.sum(0)
            found[target["bias"]] = _turned_gates(bias, gates, -1)
        return found
    if "recurrent_kernel" in ends and "weight_hh_l0" in target:
        kernels = [tensors[ends[each]] for each in ("kernel", "recurrent_kernel")]
        gates = kernels[1].shape[1] // len(kernels[1])
        found = {
            target[name]: _turned_gates(each.T, gates, 0)
            for name, each in zip(("weight_ih_l0", "weight_hh_l0"), kernels, strict=True)
        }
        if "bias" in ends and "bias_ih_l0" in target:
            held = tensors[ends["bias"]]
            pair = held if held.ndim > 1 else np.stack([held, np.zeros_like(held)])
            for name, each in zip(("bias_ih_l0", "bias_hh_l0"), pair, strict=True):
                found[target[name]] = _turned_gates(each, gates, 0)
        return found
    return {}


def _projections(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the full names of an attention layer's tensors in Keras by what they are: query kernel."""
    found = {}
    for name in tensors:
        part, _, last = name.rpartition("/")
        for what in (*_QKV, "output"):
            if what in part and last in ("kernel", "bias"):
                found[f"{what} {last}"] = name
    return found


def _translate_attention(
    tensors: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    target, own = _projections(like), _projections(tensors)
    found = {}
    if "in_proj_weight" in tensors and "query kernel" in target:
        for what, matrix in zip(_QKV, np.split(tensors["in_proj_weight"], 3), strict=True):
            found[f"{what} kernel"] = matrix.T
        if "in_proj_bias" in tensors:
            for what, bias in zip(_QKV, np.split(tensors["in_proj_bias"], 3), strict=True):
                found[f"{what} bias"] = bias
        found["output kernel"] = tensors["out_proj/weight"].T
        if "out_proj/bias" in tensors:
            found["output bias"] = tensors["out_proj/bias"]
        known = {name: each for name, each in found.items() if name in target}
        sizes = all(each.size == like[target[name]].size for name, each in known.items())
        return {target[name]: each.reshape(like[target[name]].shape) for name, each in known.items() if sizes}
    if "query kernel" in own and "in_proj_weight" in like:
        kernels = [tensors[own[f"{what} kernel"]] for what in _QKV]
        found["in_proj_weight"] = np.concatenate([each.reshape(len(each), -1).T for each in kernels])
        if "in_proj_bias" in like and "query bias" in own:
            found["in_proj_bias"] = np.concatenate([tensors[own[f"{w} bias"]].reshape(-1) for w in _QKV])
        last = tensors[own["output kernel"]]
        found["out_proj/weight"] = last.reshape(-1, last.shape[-1]).T
        if "output bias" in own:
            found["out_proj/bias"] = tensors[own["output bias"]]
    return found


def split_blocks(family: str, tensors: Mapping[str, np.ndarray], heads: int) -> dict[str, bytes]:
    """Return the numbers of each gate, or of each head of queries, keys and values, by its title."""
    if family == "recurrent":
        return _split_gates({name: each for name, each in tensors.items() if "bias" not in name})
    named = _projections(tensors)
    if "query kernel" in named:
        rows = {what: np.moveaxis(tensors[named[f"{what} kernel"]], 0, -1) for what in _QKV}
    elif "in_proj_weight" in tensors:
        rows = dict(zip(_QKV, np.split(tensors["in_proj_weight"], 3), strict=True))
    else:
        return {}
    blocks = {what: each.reshape(heads, -1) for what, each in rows.items()}
    return {
        f"{what} {place}": block.tobytes()
        for what, each in blocks.items()
        for place, block in enumerate(each)
    }


def _split_gates(matrices: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Return the gates of a recurrent layer's matrices: the recurrent one shows how many there are."""
    square = next((each for name, each in matrices.items() if find_role(name) == "recurrent"), None)
    if square is None:
        return {}
    gates = max(square.shape) // min(square.shape)
    axis = int(square.shape[1] > square.shape[0])
    return {
        f"{name} {place}": block.tobytes()
        for name, each in matrices.items()
        for place, block in enumerate(np.split(each, gates, axis))
    }


def _block_rows(family: str, blocks: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Yield what a set of blocks is, with the blocks that may be exchanged for each other."""
    if family == "recurrent":
        tensors = dict.fromkeys(name.rpartition(" ")[0] for name in blocks)
        yield from (
            ("gates", [name for name in blocks if name.rpartition(" ")[0] == each]) for each in tensors
        )
        return
    for what in _QKV:
        yield "heads", [name for name in blocks if name.startswith(what)]
    places = dict.fromkeys(name.rpartition(" ")[2] for name in blocks)
    for place in places:
        yield "queries, keys and values", [name for name in blocks if name.rpartition(" ")[2] == place]
    yield "queries, keys, values and heads", list(blocks)


class _Trial(_Hypothesis):
    """A change that nothing in the settings or tensors suggests: reported only if it is the cause."""


def find_role(name: str) -> str:
    """Return what a tensor is in its layer, by its name."""
    return next((role for role, words in _ROLES if re.search(words, name, re.IGNORECASE)), "")


def _as_plain(value: Any) -> Any:
    """Return a setting in a form in which both frameworks' values are equal."""
    if isinstance(value, list) and value and len({*map(str, value)}) == 1:
        return value[0]
    return (
        {"valid": 0, "none": None, "linear": None, "identity": None}.get(value, value)
        if isinstance(value, str)
        else value
    )


def _as_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_settings(title: str, value: Any, tensors: Mapping[str, np.ndarray]) -> Iterator[Any]:
    """Yield the values that a setting of A may have in B's framework."""
    yield value
    if title == "padding":
        kernel = next((each for each in tensors.values() if each.ndim > 2), None)
        rank = 2 if kernel is None else kernel.ndim - 2
        for width in range(4):
            yield [width] * rank
        yield "same"
        yield "valid"
    elif isinstance(value, list) and len({*value}) == 1:
        yield value[0]
    elif isinstance(value, int):
        kernel = next((each for each in tensors.values() if each.ndim > 2), None)
        if kernel is not None:
            yield [value] * (kernel.ndim - 2)


def _fitting(
    tensors: Mapping[str, np.ndarray], name: str, own: np.ndarray, family: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield A's tensors in the role of B's tensor `name`, in each order of axes that fits."""
    role = find_role(name)
    for known, each in tensors.items():
        if (find_role(known) != role and known != name) or each.size != own.size or each.ndim != own.ndim:
            continue
        if known == name and each.shape == own.shape:
            yield known, each
            continue
        if each.ndim < 5:
            orders = list(permutations(range(each.ndim)))
        else:
            orders = [_usual_order(each.ndim, family), tuple(range(each.ndim))]
        # Square matrices: first the order that frameworks differ in.
        orders.sort(key=lambda order: order != _usual_order(each.ndim, family))
        fitting = [order for order in orders if tuple(each.shape[axis] for axis in order) == own.shape]
        for order in fitting[:2]:
            yield known, np.transpose(each, order)
        if not fitting and family == "convolution" and each.ndim > 2:
            yield from ((known, turned) for turned in _as_depthwise(each, own.shape))


def _as_depthwise(kernel: np.ndarray, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
    """Yield a depthwise kernel with several outputs for each channel in the other framework's form."""
    if shape[1] == 1:  # [..., channels, multiplier] to [channels * multiplier, 1, ...]
        yield np.moveaxis(kernel.reshape(*kernel.shape[:-2], -1), -1, 0)[:, None]
    elif kernel.shape[1] == 1 and kernel.shape[0] % shape[-2] == 0:
        yield np.moveaxis(kernel[:, 0], 0, -1).reshape(shape)


def _usual_order(ndim: int, family: str) -> tuple[int, ...]:
    if family == "convolution" and ndim > 2:
        return (ndim - 1, ndim - 2, *range(ndim - 2))
    return tuple(range(ndim)) if family == "embedding" else tuple(reversed(range(ndim)))


def _tensor_cause(known: str, a: np.ndarray, name: str, b: np.ndarray) -> Cause:
    """Return how B's tensor differs from A's."""
    title = f"B's {name}"
    if find_role(name) in ("mean", "variance") and np.unique(b).size == 1:
        return Cause(
            f"{title} is {b.flat[0] + 0:g} everywhere: the statistics of A were not copied", "copy them"
        )
    rounding = _find_rounding(a, b)
    if rounding is not None:
        return Cause(f"{title} is A's {known} rounded to {rounding}", f"convert A again without {rounding}")
    if np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)):
        if a.ndim == 2 and a.shape[0] == a.shape[1] and np.array_equal(a, b.T):
            return Cause(f"{title} {list(b.shape)} is transposed", "convert A again with --kind")
        for axis in range(a.ndim):
            if np.array_equal(np.flip(a, axis), b):
                return Cause(f"{title} has axis {axis} in reverse order, e.g. BGR for RGB")
        return Cause(
            f"{title} has the numbers of A's {known} in another order",
            "convert A again; --flatten states the image that a layer receives flattened",
        )
    if not b.any():
        return Cause(f"{title} is zero, A's {known} is not")
    share = float(np.abs(a.astype(np.float64) - b).max() / (np.abs(a).max() or 1.0))
    like = ""
    if a.size > 2 and a.std() and b.std() and np.corrcoef(a.ravel(), b.ravel())[0, 1] > _CORRELATED:
        like = "; the two are similar, e.g. averaged (EMA) and raw weights"
    return Cause(f"{title} differs from A's {known} by up to {share:.1e} of its largest number{like}")


_CORRELATED = 0.9


def _find_rounding(a: np.ndarray, b: np.ndarray) -> str | None:
    import ml_dtypes

    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):
        for name, kind in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
            if np.array_equal(a.astype(kind).astype(np.float64), b.astype(np.float64)):
                return name
    return None


def _block_axis(tensor: np.ndarray, count: int) -> int | None:
    """Return the axis of a recurrent layer's or attention's tensor that consists of blocks."""
    for axis in (0, tensor.ndim - 1):
        if tensor.ndim and tensor.shape[axis] % count == 0 and tensor.shape[axis] == max(tensor.shape):
            return axis
    return None


# Causes between two layers: what the inputs of the second show, whose predecessor agrees.


_MOST_TESTED = 1 << 20


def name_activation(before: np.ndarray, after: np.ndarray, bound: float) -> str | None:
    """Return the activation that maps one array to the other, None if none of the common ones does."""
    before, after = (np.asarray(each, np.float64) for each in (before, after))
    if before.size != after.size or before.size > _MOST_TESTED:
        return None
    with np.errstate(all="ignore"):
        for name, made in common_activations(before):
            if align_arrays(after, made)[0] <= bound:
                return name
    return None


def relate_arrays(a: np.ndarray, b: np.ndarray, bound: float) -> Cause | None:
    """Return a simple relation of A's numbers to B's: a constant, a factor, a scale for each feature."""
    scale = float(np.abs(a).max()) or 1.0
    apart = a - b
    if float(np.abs(apart).max()) <= bound * scale:
        return None  # every relation fits numbers that differ so little
    if float(apart.max() - apart.min()) <= bound * scale:
        word = "plus" if apart.flat[0] > 0 else "minus"
        return Cause(f"A's numbers are B's {word} {abs(apart.flat[0]):g}", confirmed=True)
    if len(a) > 1 and float(np.abs(apart - apart[:1]).max()) <= bound * scale:
        shape = list(apart.shape[1:])
        return Cause(f"A adds the same numbers {shape} to every row, B does not", confirmed=True)
    length = float((b * b).sum())
    factor = float((a * b).sum()) / length if length else 0.0
    if factor and float(np.abs(a - factor * b).max()) <= bound * scale:
        return Cause(f"A's numbers are {factor:.6g} times B's", confirmed=True)
    for axis in {a.ndim - 1, 1} if a.ndim > 1 else ():
        if _is_affine(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0), bound * scale):
            return Cause("A scales and shifts each feature, B does not: a normaliser", confirmed=True)
    return None


def _is_affine(a: np.ndarray, b: np.ndarray, allowed: float) -> bool:
    """Return whether each row of A is a factor times B's row plus a number."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    if a.shape[1] < 4:
        return False
    x, y = (each - each.mean(1, keepdims=True) for each in (b, a))
    length = (x * x).sum(1, keepdims=True)
    factor = np.divide((x * y).sum(1, keepdims=True), length, out=np.zeros_like(length), where=length > 0)
    return bool(np.abs(y - factor * x).max() <= allowed)


def activation_cause(
    before: tuple[CapturedCall, CapturedCall], after: tuple[np.ndarray, np.ndarray], bound: float
) -> Cause | None:
    """Return the two activations that map a layer's outputs to `after`, None if they are equal or unknown."""
    names = [
        next((n for x in (*call.before, *call.made[:1]) if (n := name_activation(x, y, bound))), None)
        for call, y in zip(before, after, strict=True)
    ]
    if not all(names) or names[0] == names[1]:
        return None
    return Cause(f"A applies {names[0]}, B applies {names[1]}", confirmed=True)


def between_cause(
    before: tuple[CapturedCall, CapturedCall] | None, after: tuple[np.ndarray, np.ndarray], bound: float
) -> Cause | None:
    """Return what happens between two layers: `before` are the calls that agree, `after` differs."""
    a, b = (np.asarray(each, np.float64) for each in after)
    if before is not None and (cause := activation_cause(before, after, bound)) is not None:
        return cause
    _, other = align_arrays(a, b)
    if other is not None:
        x, y = (np.where(np.isfinite(each), each, 0.0) for each in (a, other))
        found = relate_arrays(x, y, bound)
        if found is not None:
            return found
    if is_reordered(a, b, bound):
        return Cause("B has the numbers of A in another order")
    axes = [_centred_axes(each, bound) for each in (a, b)]
    if a.shape == b.shape and axes[0] != axes[1] and all(axes):
        one, two = (" and ".join(map(str, each)) for each in axes)
        return Cause(f"means over axis {one} are subtracted in A, over axis {two} in B")
    return None


def divided_cause(a: Sequence[np.ndarray], b: Sequence[np.ndarray], bound: float) -> Cause | None:
    """Return how one matrix of a side differs from several of the other side, None if it does not."""
    one, other = (np.concatenate([each.reshape(-1, each.shape[-1]) for each in side], -1) for side in (a, b))
    if one.shape != other.shape or align_arrays(one, other)[0] <= bound:
        return None
    order = find_order(one, other, bound)
    if order is None:  # a bias may have its order still
        order = find_order(one - one.mean(0), other - other.mean(0), bound)
        order = None if order is None or (np.diff(order) == 1).all() else order
    count = max(len(a), len(b))
    if order is not None:
        whole = len(order) % count == 0 and (np.diff(order.reshape(count, -1), axis=1) == 1).all()
        what = "whole matrices, e.g. queries and keys" if whole else "columns, e.g. heads"
        return Cause(f"B has {what} in another order than A", confirmed=True)
    apart = one - other
    if float(np.abs(apart - apart[:1]).max()) <= bound * (float(np.abs(one).max()) or 1.0):
        return Cause("A adds a bias that B does not", confirmed=True)
    columns = np.flatnonzero(np.abs(apart).max(0) > bound * (float(np.abs(one).max()) or 1.0))
    return Cause(f"columns {columns[0]} to {columns[-1]} of B's outputs differ from A's")


def _centred_axes(x: np.ndarray, bound: float) -> list[int]:
    """Return the axes, without the batch, over which every mean is zero."""
    allowed = bound * (float(np.abs(x).max(initial=0.0)) or 1.0)
    return [axis for axis in range(1, x.ndim) if float(np.abs(x.mean(axis)).max()) <= allowed]


def find_order(a: np.ndarray, b: np.ndarray, bound: float) -> np.ndarray | None:
    """Return the columns of B in the order of A's, None if they are not the same columns."""
    if a.ndim != 2 or a.shape != b.shape:
        return None
    digits = max(0, int(-np.log10(bound * (float(np.abs(a).max()) or 1.0))) - 1)
    at_a, at_b = (np.lexsort(np.round(np.asarray(each, np.float64), digits)) for each in (a, b))
    order = np.empty(a.shape[1], int)
    order[at_a] = at_b
    fits = float(np.abs(a - b[:, order]).max()) <= bound * (float(np.abs(a).max()) or 1.0)
    return order if fits else None
