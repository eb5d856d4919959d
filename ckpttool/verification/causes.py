"""Pair the layers of two models, compare their activations, and find out why one differs."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import MappingError, abbreviate_list
from ckpttool.core.kinds import ACTIVATIONS, SETTINGS, find_family
from ckpttool.core.sidecar import DEFAULT_SLOPE, format_activation
from ckpttool.core.source import Inline
from ckpttool.core.tree import Leaf
from ckpttool.mapping.kind_table import candidate_kinds
from ckpttool.mapping.layer_kinds import LayerFacts
from ckpttool.mapping.rules import merge_parts
from ckpttool.networks import numpy_backend
from ckpttool.networks.network import Activation
from ckpttool.networks.tracing import ROOT

if TYPE_CHECKING:
    from ckpttool.networks.messages import CallRow, LayerRow, TensorRow
    from ckpttool.verification.two_models import ModelClient


# Families whose layers are compared as a whole: frameworks divide them differently.
COMPOSITE = ("recurrent", "attention")
# Base classes that do not show what a user's class computes.
_PLAIN = ("Module", "Layer", "Model", "Functional", "Sequential")


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """A layer's tensor: `values` is equal for equal numbers in any order."""

    name: str
    shape: tuple[int, ...]
    values: str
    constant: bool


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
        known = [tensor for tensor in self.tensors if not tensor.constant and tensor.shape]
        return frozenset(tensor.values for tensor in known if len(tensor.shape) > 1) or frozenset(
            tensor.values for tensor in known
        )


def called_layers(layers: Sequence[LayerRow], calls: Sequence[CallRow]) -> list[ModelLayer]:
    """Return the calls of layers with tensors, and of layers without parts, in the order of their ends."""
    known = {layer["path"]: layer for layer in layers}
    above = {path: frozenset(_parents(path)) for path in {call["path"] for call in calls}}
    families = {path: find_family(_class_of(known.get(path))) for path in above}
    inner = frozenset().union(*above.values())
    for path in [path for path, family in families.items() if family in COMPOSITE]:
        # A user's model may be named after a layer that is one of its parts.
        own = path in known and known[path]["class"] in _PLAIN
        parts = (other for other in families if is_inside(other, path))
        if own and (path == ROOT or any(families[other] == families[path] for other in parts)):
            families[path] = ""
    composite = {path for path, family in families.items() if family == "recurrent"}
    by_path: dict[str, tuple[LayerTensor, ...]] = {}
    called = []
    for call in calls:
        path, layer = call["path"], known.get(call["path"])
        if layer is None or not call.get("made") or above[path] & composite:
            continue
        if path not in by_path:
            whole = families[path] in COMPOSITE
            mine = [layer for layer in layers if whole and is_inside(layer["path"], path)]
            by_path[path] = tuple(_layer_tensor(row) for child in (layer, *mine) for row in child["tensors"])
        tensors = by_path[path]
        if not tensors and path in inner:
            continue
        shape = call["made"][0]["shape"]
        width = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        composed = path in inner and families[path] not in COMPOSITE
        settings = {**layer["settings"], **call.get("options", {})}
        called.append(ModelLayer(path, call["number"], _class_of(layer), tensors, settings, width, composed))
    return called


def _class_of(layer: LayerRow | None) -> str:
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


def _layer_tensor(row: TensorRow) -> LayerTensor:
    return LayerTensor(row["name"], tuple(row["shape"]), row["values"], row["constant"])


@dataclass(frozen=True, slots=True)
class LayerCallPair:
    """A layer of both sides; `by` is the evidence: weights, some weights, or order."""

    a: ModelLayer
    b: ModelLayer
    by: str


def pair_layers(a: Sequence[ModelLayer], b: Sequence[ModelLayer]) -> list[LayerCallPair]:
    """Return the pairs in the order of A's calls."""
    pairs = _equal_pairs(a, b)
    at_b = {id(layer): index for index, layer in enumerate(b)}
    anchors = _increasing([(index, at_b[id(pairs[index])]) for index in sorted(pairs)])
    paired = {id(layer) for layer in pairs.values()}
    evidence = dict.fromkeys(pairs, "weights")
    edges = [(-1, -1), *anchors, (len(a), len(b))]
    for (low_a, low_b), (high_a, high_b) in pairwise(edges):
        rest_a = [index for index in range(low_a + 1, high_a) if index not in pairs]
        rest_b = [b[index] for index in range(low_b + 1, high_b) if id(b[index]) not in paired]
        for index, other in _aligned([(n, a[n]) for n in rest_a], rest_b):
            pairs[index] = other
            evidence[index] = "order"
            paired.add(id(other))
    for index, layer in enumerate(a):
        # A layer without a neighbor in its place: sides may call parallel layers in other orders.
        rest = [
            other
            for other in b
            if id(other) not in paired and layer.tensors and _sizes(layer) == _sizes(other)
        ]
        best = max(rest, key=partial(_likeness, layer), default=None)
        if index not in pairs and best is not None and _likeness(layer, best):
            pairs[index], evidence[index] = best, "order"
            paired.add(id(best))
    return [LayerCallPair(a[index], pairs[index], evidence[index]) for index in sorted(pairs)]


def _equal_pairs(a: Sequence[ModelLayer], b: Sequence[ModelLayer]) -> dict[int, ModelLayer]:
    """Return the layers of B by the place of those of A with equal weights, in order of their calls."""
    by_weights: dict[tuple[frozenset[str], bool], list[ModelLayer]] = defaultdict(list)
    for layer in b:
        if layer.weights:
            by_weights[layer.weights, layer.composed].append(layer)
    return {
        index: by_weights[layer.weights, layer.composed].pop(0)
        for index, layer in enumerate(a)
        if layer.weights and by_weights[layer.weights, layer.composed]
    }


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest part of the pairs in which both numbers increase."""
    tails: list[int] = []
    at: list[int] = []
    before: list[int] = []
    for index, (_, number) in enumerate(pairs):
        where = bisect_left(tails, number)
        before.append(at[where - 1] if where else -1)
        if where == len(tails):
            tails.append(number)
            at.append(index)
        else:
            tails[where], at[where] = number, index
    chain = []
    index = at[-1] if at else -1
    while index >= 0:
        chain.append(pairs[index])
        index = before[index]
    return chain[::-1]


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
        (bool(a.tensors) != bool(b.tensors) and not a.family == b.family == "norm")
        or a.composed != b.composed
        or (a.family != b.family and a.family and b.family)
    ):
        return 0.0
    shared = len(
        {leaf.values for leaf in a.tensors if not leaf.constant} & {tensor.values for tensor in b.tensors}
    )
    alike = _sizes(a) == _sizes(b)
    if a.tensors and b.tensors and not (shared or alike):
        return 0.0
    if not (a.tensors and b.tensors) and (not a.family or a.family != b.family):
        return 0.0
    if a.family == b.family == "flatten" and a.width != b.width:
        return 0.0
    return 4.0 * shared + 2.0 * alike + (a.family == b.family) + 0.5 * (a.width == b.width)


def _sizes(layer: ModelLayer) -> Counter[int]:
    """Return the sizes of a layer's matrices."""
    matrices = (tensor for tensor in layer.tensors if sum(extent > 1 for extent in tensor.shape) > 1)
    return Counter(int(np.prod(matrix.shape)) for matrix in matrices if find_role(matrix.name) != "bias")


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """Arrays of one call: inputs, what the layer's activation receives, and outputs."""

    inputs: tuple[np.ndarray, ...]
    before: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]


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
        names = ("a", "b", "by", "inputs", "outputs", "within")
        classes = {"class_a": self.classes[0], "class_b": self.classes[1]}
        return {**classes, **{name: getattr(self, name) for name in names}}


LAYER, BETWEEN = "layer", "between"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where two models part: in a layer, or between a layer and the one before it.

    `inputs` is the error of the layer's inputs. A `cause` is `confirmed`: the difference disappears when only
    that is changed. `fix` is an option or command.
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
    if a.shape == b.shape[1:] or b.shape == a.shape[1:]:
        # What no input changes, e.g. embeddings of positions, may have no batch.
        a, b = np.broadcast_arrays(a, b)
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
    for order in orders:
        if order.shape == a.shape:
            yield order
        elif a.shape[:1] == order.shape[:1] and a.ndim != order.ndim:
            yield order.reshape(a.shape)
        elif a.ndim == 3 and order.ndim == 2 and a.shape[-1] == order.shape[-1]:
            # The rows of all sequences in one matrix, by batch or by step.
            yield order.reshape(a.shape)
            yield np.swapaxes(order.reshape(a.shape[1], a.shape[0], -1), 0, 1)


def input_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return the error of two inputs; one of them may have a constant border already, e.g. a padded image."""
    best = align_arrays(a, b)[0]
    if np.isfinite(best) or a.ndim != b.ndim or a.ndim < 3:
        return best
    for turned in (b, np.moveaxis(b, 1, -1), np.moveaxis(b, -1, 1)):
        sizes = np.array(a.shape) - np.array(turned.shape)
        if not sizes.any() or (sizes.min() < 0 < sizes.max()):
            continue
        large, small = (a, turned) if sizes.max() > 0 else (turned, a)
        for low in {tuple(abs(sizes) // 2), tuple((abs(sizes) + 1) // 2), tuple(abs(sizes)), (0,) * a.ndim}:
            region = tuple(
                slice(start, start + extent) for start, extent in zip(low, small.shape, strict=True)
            )
            border = np.ones(large.shape, bool)
            border[region] = False
            edge = large[border]
            if edge.size and (edge == edge[0]).all():
                best = min(best, align_arrays(small, large[region])[0])
    return best


def is_reordered(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether every row of B has A's numbers in another order, the same one in all rows."""
    if a.shape[:1] != b.shape[:1] or a.size != b.size or not a.size:
        return False
    one, other = (np.sort(np.asarray(array, np.float64).reshape(len(array), -1), axis=1) for array in (a, b))
    return bool(np.abs(one - other).max() <= bound * (float(np.abs(one).max()) or 1.0))


def compare_layer(pair: LayerCallPair, a: CapturedCall, b: CapturedCall, bound: float) -> LayerComparison:
    """Return the errors of a pair's first input and of its outputs."""
    inputs = input_error(a.inputs[0], b.inputs[0]) if a.inputs and b.inputs else 0.0
    if pair.a.family == pair.b.family == "attention" and len(a.inputs) > 1 < len(b.inputs):
        inputs = max(inputs, align_arrays(a.inputs[1], b.inputs[1])[0])
    if pair.a.family == pair.b.family == "recurrent" and len(a.inputs) == len(b.inputs):
        states = (align_arrays(*pair)[0] for pair in zip(a.inputs[1:], b.inputs[1:], strict=True))
        inputs = max(inputs, *(error for error in states if np.isfinite(error)), 0.0)
    outputs = output_error(a, b)
    if pair.a.family == "flatten" and outputs > bound and is_reordered(a.outputs[0], b.outputs[0], bound):
        outputs = 0.0  # each framework has its own order; the next layer's weights are in the same
    return LayerComparison(
        pair.a.title, pair.b.title, (pair.a.cls, pair.b.cls), pair.by, inputs, outputs, outputs <= bound
    )


def output_error(a: CapturedCall, b: CapturedCall) -> float:
    """Return the error of a call's outputs, before the activation if only one side includes it."""
    if a.before and b.before:
        return max(align_arrays(a.before[0], b.before[0])[0], align_arrays(a.outputs[0], b.outputs[0])[0])
    one, other = (call.before or call.outputs for call in (a, b))
    # A recurrent layer also returns its state, or only its last step.
    x, y = (*_steps(one), *_merged(one, other)), (*_steps(other), *_merged(other, one))
    error = min(align_arrays(*pair)[0] for pair in itertools.product(x, y))
    if a.before or b.before:
        # A module of an own class may include its activation without a name for it.
        error = min(error, align_arrays(a.outputs[0], b.outputs[0])[0])
    return error


def _merged(arrays: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield both directions of a recurrent layer in the forms in which the other side may merge them."""
    if arrays[0].ndim == 3 and arrays[0].shape == (*other[0].shape[:-1], 2 * other[0].shape[-1]):
        one, two = np.split(arrays[0], 2, -1)
        yield from (one + two, (one + two) / 2, one * two)


def _steps(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the outputs of a call; of a sequence with states, or by direction, the last steps, too."""
    first = arrays[0]
    if first.ndim == 4 and first.shape[1] in (1, 2):  # ONNX: steps, directions, batch, features
        whole = np.concatenate([*np.moveaxis(first, 1, 0)], -1)
        return [first, whole, whole[-1]]
    if len(arrays) == 1 or first.ndim != 3:
        return [first]
    return [first, first[:, -1], *arrays[1:]]


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause, and an option or change that mends it; `confirmed` by a test of it alone."""

    text: str
    fix: str | None = None
    confirmed: bool = False
    other_numbers: bool = False
    """whether B's numbers show no relation to A's"""


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    """A change of B's layer, and the cause that it would prove."""

    cause: Cause
    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: np.ndarray | None = None
    """another input of the layer"""


def _without(tensors: Mapping[str, np.ndarray], names: Sequence[str]) -> _Hypothesis:
    """Return a change of tensors to numbers without an effect: 1 for the scale of each feature, else 0."""
    scales = [name for name in names if tensors[name].ndim == 1 and find_role(name) in ("kernel", "variance")]
    return _Hypothesis(Cause(""), {name: np.full_like(tensors[name], name in scales) for name in names})


_MOST_TRANSPOSED = 1 << 24
_MOST_PADDED = 6
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
        sides: tuple[ModelClient, ModelClient],
        bound: float,
        *,
        exact: bool,
    ) -> None:
        self._pair, self._calls, self._sides = pair, calls, sides
        self._bound, self._exact = bound, exact
        self._a, self._b = (
            side.tensors(layer.path, parts=layer.family in COMPOSITE)
            for side, layer in zip(sides, (pair.a, pair.b), strict=True)
        )

    def find(self) -> Cause | None:
        """Return the first cause that is confirmed."""
        hypotheses = itertools.chain(
            self._different_settings(),
            self._different_tensors(),
            self._different_padding(),
            self._turned_tensors(),
            self._turned_inputs(),
        )
        sided = itertools.chain(
            ((1, hypothesis) for hypothesis in hypotheses), ((0, hypothesis) for hypothesis in self._of_b())
        )
        for side, hypothesis in sided:
            if self._error(side, hypothesis) > self._bound:
                continue
            if self._error(side, _Hypothesis(Cause(""))) <= self._bound:
                break  # the layers compute the same: what differs is behind them
            return replace(hypothesis.cause, confirmed=True)
        return self._missing_tensors() or self._activations() or self._norms()

    def _error(self, side: int, change: _Hypothesis) -> float:
        """Return the error of the outputs after the change of one side."""
        own, other = self._calls[side], self._calls[1 - side]
        outputs = self._repeat(side, change)
        if not outputs:
            return float("inf")
        changed = CapturedCall((), (), outputs)
        kept = CapturedCall((), (), other.outputs if own.before else other.before or other.outputs)
        return output_error(kept, changed) if side else output_error(changed, kept)

    def _repeat(self, side: int, change: _Hypothesis) -> tuple[np.ndarray, ...]:
        own, other = self._calls[side], self._calls[1 - side]
        plain = {"activation": "linear"} if own.before and not other.before else {}
        key, settings = (self._pair.a, self._pair.b)[side].key, {**plain, **change.settings}
        return self._sides[side].repeat(
            key, change.tensors, settings, exact=self._exact, inputs=change.inputs
        )

    def _different_settings(self) -> Iterator[_Hypothesis]:
        """Yield A's settings in the place of B's; and other paddings, which may be outside of the layer."""
        a, b = self._pair.a.settings, self._pair.b.settings
        for title, names in ((row.name, row.spellings) for row in SETTINGS if row.changes):
            one = next((a[name] for name in names if name in a), self._default(title))
            own = next((name for name in names if name in b), None)
            if own is None:
                continue
            padding = title == "padding"
            values = [] if one is None and not padding else [*_as_settings(title, one, self._b)]
            for value in values if padding or _as_plain(one) != _as_plain(b[own]) else ():
                if _as_plain(value) == _as_plain(b[own]):
                    continue
                setting, shown = (_as_plain(b[own]), _as_plain(one)) if padding else (b[own], one)
                if padding and (isinstance(shown, str | None) or shown == setting):
                    shown = _as_plain(value)  # A's own is outside of the layer, or no number
                title = own if own == "alpha" and "alpha" in a else title
                fix = f"set {own}={_as_text(shown)} in {self._pair.b.path} of B"
                if padding and isinstance(b[own], str):
                    fix = f"pad the input of {self._pair.b.path} in B by {_as_text(shown)}"
                text = f"{title} is {_as_text(shown)} in A and {_as_text(setting)} in B"
                yield _Hypothesis(Cause(text, fix), settings={own: value})

    def _of_b(self) -> Iterator[_Hypothesis]:
        """Yield B's settings in the place of A's: those of some layers of B cannot be changed alone."""
        a, b = self._pair.a.settings, self._pair.b.settings
        for row in SETTINGS:
            one, own = (next((name for name in row.spellings if name in spelling), "") for spelling in (a, b))
            if row.changes and one and own and _as_plain(a[one]) != _as_plain(b[own]):
                text = f"{row.name} is {_as_text(a[one])} in A and {_as_text(b[own])} in B"
                fix = f"set {own}={_as_text(a[one])} in {self._pair.b.path} of B"
                yield _Hypothesis(Cause(text, fix), settings={one: b[own]})

    def _default(self, title: str) -> Any:
        """Return the setting of A's layer that has no name in A's framework."""
        if title == "counting of padding" and self._calls[0].inputs and self._calls[1].inputs:
            # A border that is in the input counts; Keras's own does not.
            return self._calls[0].inputs[0].size > self._calls[1].inputs[0].size
        return "zeros" if title == "mode" and self._pair.a.family == "convolution" else None

    def _different_tensors(self) -> Iterator[_Hypothesis]:
        """Yield A's numbers in the place of each tensor of B, and of all of them."""
        whole = translate_tensors(self._a, self._b)
        every: dict[str, np.ndarray] = {}
        reasons: list[str] = []
        plain = True
        for name, own in self._b.items():
            known = [(name, whole[name])] if whole else [*_fitting(self._a, name, own, self._pair.a.family)]
            if own.dtype.kind != "f" or not known or any(np.array_equal(array, own) for _, array in known):
                continue
            every[name] = known[0][1]
            for title, array in known:
                cause = self._exchanged_tensor(name, whole) or tensor_cause(title, array, name, own)
                reasons.append(cause.text)
                plain = plain and cause.other_numbers
                yield _Hypothesis(cause, {name: array})
        if len(every) > 1:
            sorted_bytes = [
                sorted(np.sort(array, axis=None).tobytes() for array in side)
                for side in (every.values(), [self._b[name] for name in every])
            ]
            if sorted_bytes[0] == sorted_bytes[1] and not any(
                "numbers of A's" in reason for reason in reasons
            ):
                reasons = [f"B's {', '.join(every)} have the numbers of A in another order"]
            text = "; ".join(dict.fromkeys(reasons))
            yield _Hypothesis(Cause(text, other_numbers=plain), every)

    def _exchanged_tensor(self, name: str, whole: Mapping[str, np.ndarray]) -> Cause | None:
        """Return the other tensor of A's layer whose numbers B's tensor has."""
        own = self._b[name]
        for known, array in (whole or self._a).items():
            other = known != name if whole else find_role(known) != find_role(name)
            if other and array.shape == own.shape and array.size > 1 and np.array_equal(array, own):
                return Cause(f"B's {name} has the numbers of A's {known}: they are exchanged")
        return None

    def _missing_tensors(self) -> Cause | None:
        """Return the tensors of one side that are the difference: the other side has no such tensor."""
        sides = (("A", self._a, "B", self._b), ("B", self._b, "A", self._a))
        for side, (word, own, other, rest) in enumerate(sides):
            roles = {find_role(name) for name in rest} - {""}
            lone = [name for name in own if name not in rest and find_role(name) not in roles]
            if lone and self._error(side, _without(own, lone)) <= self._bound:
                text = f"{other}'s layer has no {', '.join(lone)}, which {word}'s has"
                fix = f"add {', '.join(lone)} to {self._pair.b.path} of B" if word == "A" else None
                return Cause(text, fix, confirmed=True)
        return None

    def _different_padding(self) -> Iterator[_Hypothesis]:
        """Yield convolutions of B whose input is padded at each side as A's may be, with A's other settings.

        Frameworks divide the padding of `same` differently, and code may pad the input before the layer.
        """
        a, b, path = self._pair.a.settings, self._pair.b.settings, self._pair.b.path
        kernel = next((array for array in self._b.values() if array.ndim > 2), None)
        if self._pair.b.family != "convolution" or kernel is None or "padding" not in b:
            return
        array = self._calls[1].inputs[0]
        if array.size > self._calls[0].inputs[0].size:
            array = without_border(array)
        last = b.get("data_format") == "channels_last"
        axes = range(1, array.ndim - 1) if last else range(2, array.ndim)
        changes, words = {}, []
        for name, own, other in _window_settings(b, a):
            if _as_plain(b[own]) != _as_plain(a[other]):
                changes[own] = a[other]
                words.append(f"{name} is {_as_text(a[other])} in A and {_as_text(b[own])} in B")
        settings = {**changes, "padding": "valid" if last else 0}
        shown = _as_text(_as_plain(b["padding"]))
        for low, high in _paddings(kernel.shape[: len(axes)] if last else kernel.shape[2:], settings, b):
            width = [(low, high) if axis in axes else (0, 0) for axis in range(array.ndim)]
            pads = (low, high) * len(axes)
            fix = f"torch.nn.functional.pad(x, {pads}) before {path} of B, with padding=0"
            if last:
                layer = f"ZeroPadding{len(axes)}D({tuple(pair for pair in width if any(pair))})"
                fix = f"{layer} before {path} of B, with padding='valid'"
            text = f"A pads by {low} before and {high} after, the padding of B's layer is {shown}"
            cause = Cause("; ".join([*words, text]), fix)
            yield _Hypothesis(cause, settings=settings, inputs=np.pad(array, width))

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
                        yield _Hypothesis(cause, {name: np.swapaxes(own, one, other)})
            for axis in [axis for axis, extent in enumerate(own.shape) if extent > 1]:
                cause = Cause(_reversed_text(f"B's {name}", (axis,), own))
                yield _Hypothesis(cause, {name: np.flip(own, axis)})

    def _turned_inputs(self) -> Iterator[_Hypothesis]:
        """Yield B's inputs with two axes exchanged, if they are A's then and are not now."""
        a, b = (np.asarray(call.inputs[0]) if call.inputs else np.empty(0) for call in self._calls)
        allowed = self._bound * (float(np.abs(a).max(initial=0.0)) or 1.0)
        for one, other in itertools.combinations(range(1, b.ndim), 2):
            turned = np.swapaxes(b, one, other)
            if (
                a.shape == b.shape == turned.shape
                and np.abs(a - turned).max() <= allowed < np.abs(a - b).max()
            ):
                text = f"axes {one} and {other} of the input of B's layer are exchanged"
                yield _Hypothesis(
                    Cause(text, f"exchange them before {self._pair.b.path} of B"), inputs=turned
                )

    def _norms(self) -> Cause | None:
        """Return what the two norms normalize, None unless both are known and differ."""
        if self._pair.a.family != "norm" and self._pair.b.family != "norm":
            return None
        names = []
        for layer, call in zip((self._pair.a, self._pair.b), self._calls, strict=True):
            spellings = next(row.spellings for row in SETTINGS if row.name == "epsilon")
            eps = next((float(layer.settings[name]) for name in spellings if name in layer.settings), 0.0)
            output = np.asarray(call.outputs[0], np.float64)
            allowed = self._bound * (float(np.abs(output).max()) or 1.0)
            names.append(
                next(
                    (
                        name
                        for name, x in _iter_normalized(call.inputs[0], eps)
                        for axis in {1, x.ndim - 1}
                        if _is_affine(np.moveaxis(output, axis, 0), np.moveaxis(x, axis, 0), allowed)
                    ),
                    None,
                )
            )
        if not all(names) or names[0] == names[1]:
            return None
        return Cause(f"A's layer divides by {names[0]}, B's by {names[1]}", confirmed=True)

    def _activations(self) -> Cause | None:
        """Return the two activations that the layers are, None if they are none or equal."""
        names = [
            name_activation(call.inputs[0], call.outputs[0], self._bound) if call.inputs else None
            for call in self._calls
        ]
        return _different_activations(names)


def translate_tensors(
    tensors: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return a layer's tensors in the other framework's form, with the names and shapes of `like`.

    The result is empty if the catalogue has no such pair of layers.
    """
    if {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in like.items()}:
        return dict(tensors)  # of one framework: the catalogue would transpose square matrices
    ways = {_is_backward(name) for name in tensors} & {_is_backward(name) for name in like}
    if len(ways) < 2:
        return _translate_layer(tensors, like)
    parts = [
        _translate_layer(
            *({name: x for name, x in side.items() if _is_backward(name) == way} for side in (tensors, like))
        )
        for way in (False, True)
    ]
    return {**parts[0], **parts[1]} if all(parts) else {}


def _is_backward(name: str) -> bool:
    return "_reverse" in name or "backward" in name


def _translate_layer(
    tensors: Mapping[str, np.ndarray], like: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    names = {_catalogue_name(name): name for name in like}
    groups = [
        {_catalogue_name(name): _as_leaf(array) for name, array in side.items()} for side in (tensors, like)
    ]
    facts = LayerFacts(target_shapes={name: leaf.shape for name, leaf in groups[1].items()})
    for own, other in (("torch", "tensorflow"), ("tensorflow", "torch")):
        kinds = itertools.product(candidate_kinds(groups[0], own), candidate_kinds(groups[1], other))
        for source, target in kinds:
            if source.name != target.name:
                continue
            try:
                reading = source.read(groups[0], facts)
                canonical = dict(reading.fills)
                for stored, name, rule in reading.rows:
                    _add_part(canonical, name, rule.leaf(groups[0][stored]))
                writing = target.write(canonical, facts)
                leaves = dict(writing.fills)
                for stored, name, rule in writing.rows:
                    _add_part(leaves, stored, rule.leaf(canonical[name]))
            except MappingError:
                continue
            if {name: leaf.shape for name, leaf in leaves.items()} == facts.target_shapes:
                return {names[name]: leaf.array() for name, leaf in leaves.items()}
    return {}


def _catalogue_name(name: str) -> str:
    """Return the name of a layer's tensor in the catalogue: without its cell, `_query_dense` as `query`."""
    part, _, last = name.rpartition("/")
    projection = re.fullmatch(r"_?(query|key|value|output)_dense", part)
    if projection is not None:
        return f"{projection[1]}/{last}"
    return name if part == "out_proj" else last.removesuffix("_reverse").removesuffix("_l0")


def _as_leaf(array: np.ndarray) -> Leaf:
    return Leaf(array.dtype.name, array.shape, Inline(np.ascontiguousarray(array).tobytes()), "")


def _add_part(tensors: dict[str, Leaf], name: str, part: Any) -> None:
    """Add a rule's result, which may be a part of a tensor."""
    whole = merge_parts(tensors[name], part) if name in tensors else part
    if isinstance(whole, Leaf):
        tensors[name] = whole


def find_role(name: str) -> str:
    """Return what a tensor is in its layer, by its name."""
    return next((role for role, words in _ROLES if re.search(words, name, re.IGNORECASE)), "")


def _window_settings(own: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield stride and dilation: what messages call them, and their names on both sides."""
    for row in SETTINGS:
        if row.name in ("stride", "dilation"):
            names = [
                next((name for name in row.spellings if name in settings), "") for settings in (own, other)
            ]
            if all(names):
                yield row.name, names[0], names[1]


def _paddings(
    sizes: Sequence[int], settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """Return the padding before and after an axis that a convolution may have, equal ones first."""
    spellings = next(row.spellings for row in SETTINGS if row.name == "dilation")
    dilation = next(
        (values[name] for values in (settings, defaults) for name in spellings if name in values), 1
    )
    reach = min((max(sizes) - 1) * int(np.max(dilation)), _MOST_PADDED)
    widths = [(low, high) for low in range(reach + 1) for high in range(reach + 1)]
    return sorted(widths, key=lambda pair: (pair[0] != pair[1], pair))


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
    if title == "padding":
        kernel = next((tensor for tensor in tensors.values() if tensor.ndim > 2), None)
        rank = 2 if kernel is None else kernel.ndim - 2
        yield from ([width] * rank for width in range(4))
        yield from (value, "same", "valid")
        return
    yield value
    if isinstance(value, list) and len({*value}) == 1:
        yield value[0]
    elif isinstance(value, int):
        kernel = next((tensor for tensor in tensors.values() if tensor.ndim > 2), None)
        if kernel is not None:
            yield [value] * (kernel.ndim - 2)


def _fitting(
    tensors: Mapping[str, np.ndarray], name: str, own: np.ndarray, family: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield A's tensors in the role of B's tensor `name`, in each order of axes that fits."""
    if name in tensors and tensors[name].shape == own.shape:
        yield name, tensors[name]
        return
    role = find_role(name)
    for known, tensor in tensors.items():
        if find_role(known) != role or tensor.size != own.size or tensor.ndim != own.ndim:
            continue
        if tensor.ndim < 5:
            orders = list(permutations(range(tensor.ndim)))
        else:
            orders = [_usual_order(tensor.ndim, family), tuple(range(tensor.ndim))]
        # Square matrices: first the order that frameworks differ in.
        orders.sort(key=lambda order: order != _usual_order(tensor.ndim, family))
        fitting = [order for order in orders if tuple(tensor.shape[axis] for axis in order) == own.shape]
        for order in fitting[:2]:
            yield known, np.transpose(tensor, order)


def _usual_order(ndim: int, family: str) -> tuple[int, ...]:
    if family == "convolution" and ndim > 2:
        return (ndim - 1, ndim - 2, *range(ndim - 2))
    return tuple(range(ndim)) if family == "embedding" else tuple(reversed(range(ndim)))


def tensor_cause(known: str, a: np.ndarray, name: str, b: np.ndarray) -> Cause:
    """Return how B's tensor differs from A's."""
    title = f"B's {name}"
    if not np.isfinite(b).all() and np.isfinite(a).all():
        return Cause(f"{title} has {np.count_nonzero(~np.isfinite(b)):,} numbers that are not finite")
    if find_role(name) in ("mean", "variance") and np.unique(b).size == 1:
        return Cause(
            f"{title} is {b.flat[0] + 0:g} everywhere: the statistics of A were not copied", "copy them"
        )
    rounding = _find_rounding(a, b)
    if rounding is not None:
        return Cause(f"{title} is A's {known} rounded to {rounding}", f"convert A again without {rounding}")
    if np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)):
        return _order_cause(title, known, a, b)
    if not b.any():
        return Cause(f"{title} is zero, A's {known} is not")
    if b.size > 1 and np.ptp(b) == 0:
        return Cause(f"{title} is {b.flat[0]:g} everywhere, A's {known} is not")
    return _other_numbers(title, known, a, b)


def _other_numbers(title: str, known: str, a: np.ndarray, b: np.ndarray) -> Cause:
    """Return a relation of all numbers or of some rows, a grid of numbers, or the size of the difference."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    scale, apart = float(np.abs(a).max()) or 1.0, np.abs(a - b)
    if (relation := _relation(a, b, scale)) is not None:
        return Cause(f"{title} is {relation} A's {known}")
    for axis in range(a.ndim) if a.ndim > 1 else ():
        rows = np.flatnonzero(np.moveaxis(apart, axis, 0).reshape(a.shape[axis], -1).any(1))
        if len(rows) < a.shape[axis]:
            word = "rows" if not axis else f"rows of axis {axis}"
            shown = abbreviate_list([str(row) for row in rows], 3)
            zero = f"{title} is zero, A's {known} is not"
            filled = np.take(b, rows, axis).any()
            what = _size_text(title, known, float(apart.max()) / scale) if filled else zero
            return Cause(f"{what}, in {len(rows):,} of {a.shape[axis]:,} {word}: {shown}")
    for axis in range(a.ndim) if a.ndim > 1 else ():
        one, other = np.moveaxis(b, axis, 0), np.moveaxis(a, axis, 0)
        if _is_affine(one, other, _SAME * scale, shifted=False):
            return Cause(f"each row of {title} is that of A's {known} times a number: a norm of the weights")
    for bits in range(3, 9) if b.size > 4 else ():
        most = 2 ** (bits - 1) - 1
        steps = b * (most / float(np.abs(b).max()))
        if np.abs(steps - steps.round()).max() < _ON_STEP and 2 * apart.max() <= 1.01 * scale / most:
            return Cause(f"{title} is A's {known} rounded to {2 * most + 1} steps: {bits} bits")
    return Cause(_size_text(title, known, float(apart.max()) / scale), other_numbers=True)


def _relation(a: np.ndarray, b: np.ndarray, scale: float) -> str | None:
    """Return the number or the function that gives all of B's numbers from A's."""
    factor = float((a * b).sum() / ((a * a).sum() or 1.0))
    if factor and float(np.abs(b - factor * a).max()) <= _SAME * scale:
        return f"{factor:.6g} times"
    if b.size > 1 and np.ptp(b - a) <= _SAME * scale:
        return f"{float((b - a).flat[0]):.6g} plus"
    with np.errstate(all="ignore"):
        allowed = _SAME * float(np.abs(b).max())
        fits = (name for name, f in _FUNCTIONS.items() if np.allclose(b, f(a), _SAME, allowed))
        name = next(fits, None) if b.size > 1 else None
    return name and f"the {name} of"


def _size_text(title: str, known: str, share: float) -> str:
    return f"{title} differs from A's {known} by up to {share:.1e} of its largest number"


def _order_cause(title: str, known: str, a: np.ndarray, b: np.ndarray) -> Cause:
    """Return how B's tensor has A's numbers in another order."""
    for one, other in itertools.combinations(range(a.ndim), 2):
        if np.array_equal(np.swapaxes(a, one, other), b):
            axes = "" if a.ndim == 2 else f" in axes {one} and {other}"
            return Cause(f"{title} {list(b.shape)} is transposed{axes}", "convert A again with --kind")
    for count in range(1, a.ndim + 1):
        for reverse in itertools.combinations(range(a.ndim), count):
            if np.array_equal(np.flip(a, reverse), b):
                return Cause(_reversed_text(title, reverse, b))
    for axis in range(a.ndim):
        if (text := _blocks_text(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0))) is not None:
            return Cause(f"{title} has the numbers of A's {known} in another order: {text}")
    for axis in range(a.ndim) if a.ndim > 1 else ():
        rows = [np.moveaxis(tensor, axis, 0).reshape(tensor.shape[axis], -1) for tensor in (a, b)]
        order = find_order(rows[0].T, rows[1].T, 0.0)
        if order is not None:
            what = describe_order(order)[0]
            return Cause(f"{title} has the numbers of A's {known} in another order along axis {axis}: {what}")
    return Cause(f"{title} has the numbers of A's {known} in another order")


_BLOCKS = (2, 3, 4, 6)


def _blocks_text(a: np.ndarray, b: np.ndarray) -> str | None:
    """Return the order of B's parts along the first axis, or that each of them is transposed."""
    for count in _BLOCKS:
        if len(a) % count or len(a) == count:
            continue
        parts = [np.split(tensor, count) for tensor in (a, b)]
        order = [
            next((n for n, one in enumerate(parts[0]) if np.array_equal(one, part)), -1) for part in parts[1]
        ]
        if sorted(order) == list(range(count)):
            return f"its {count} parts of axis length {len(a) // count} are those of A numbered {order}"
        square = a.ndim == 2 and len(a) // count == a.shape[1]
        if square and all(np.array_equal(one.T, other) for one, other in zip(*parts, strict=True)):
            return f"each of its {count} parts is transposed"
    return None


def _reversed_text(title: str, axes: Sequence[int], tensor: np.ndarray) -> str:
    example = ", e.g. BGR for RGB" if [tensor.shape[axis] for axis in axes] == [3] and tensor.ndim > 1 else ""
    words = " and ".join(map(str, axes))
    return f"{title} has {'axis' if len(axes) == 1 else 'axes'} {words} in reverse order{example}"


_SAME = 1e-6
_ON_STEP = 1e-3
_FUNCTIONS: Mapping[str, Any] = {
    "square root": np.sqrt,
    "square": np.square,
    "inverse": np.reciprocal,
    "exponential": np.exp,
    "logarithm": np.log,
    "absolute value": np.abs,
}


def _find_rounding(a: np.ndarray, b: np.ndarray) -> str | None:
    import ml_dtypes

    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return None
    with np.errstate(all="ignore"):
        for name, kind in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
            if np.array_equal(a.astype(kind).astype(np.float64), b.astype(np.float64)):
                return name
    return None


_MOST_TESTED = 1 << 20


NO_ACTIVATION = "no activation"
_SLOPES = (0.01, 0.1, 0.2, 0.3)


def iter_activations(x: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the results of the known activations by name."""
    for name in ACTIVATIONS:
        for slope in _SLOPES if name == "leaky_relu" else (DEFAULT_SLOPE,):
            title = {"linear": NO_ACTIVATION, "gelu": "exact gelu"}.get(name)
            result = numpy_backend.ACTIVATIONS[name](Activation(name, slope))(x)
            yield title or format_activation(name, slope), np.asarray(result, np.float64)
    yield "tanh gelu", 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    yield "softsign", x / (1 + np.abs(x))
    yield "hard sigmoid", np.clip(x / 6 + 0.5, 0, 1)


def name_activation(before: np.ndarray, after: np.ndarray, bound: float) -> str | None:
    """Return the activation that maps one array to the other, None if none of the known ones does."""
    before, after = (np.asarray(array, np.float64) for array in (before, after))
    if before.size != after.size or before.size > _MOST_TESTED:
        return None
    with np.errstate(all="ignore"):
        return next(
            (name for name, x in iter_activations(before) if align_arrays(after, x)[0] <= bound), None
        )


def _different_activations(names: Sequence[str | None]) -> Cause | None:
    if not all(names) or names[0] == names[1]:
        return None
    return Cause(f"A applies {names[0]}, B applies {names[1]}", confirmed=True)


def integer_cause(a: np.ndarray, b: np.ndarray) -> Cause | None:
    """Return the number that is added to integers, e.g. indices of a table; some may begin again at 0."""
    if a.shape != b.shape or not a.size or a.dtype.kind not in "iu" or b.dtype.kind not in "iu":
        return None
    steps, counts = np.unique(b.astype(np.int64) - a.astype(np.int64), return_counts=True)
    step = int(steps[counts.argmax()])
    if not step or len(steps) > 2:
        return None
    wrapped = "" if len(steps) == 1 else f", modulo {abs(int(steps[1] - steps[0]))}"
    return Cause(f"B's integers are A's plus {step}{wrapped}: indices of another table", confirmed=True)


def relate_arrays(a: np.ndarray, b: np.ndarray, bound: float) -> Cause | None:
    """Return the scale or the normalisation that only A has: its numbers are B's, scaled and shifted."""
    scale = float(np.abs(a).max()) or 1.0
    if float(np.abs(a - b).max()) <= bound * scale:
        return None  # every relation fits numbers that differ so little
    length = float((b * b).sum())
    factor = float((a * b).sum()) / length if length else 0.0
    if factor and float(np.abs(a - factor * b).max()) <= bound * scale:
        return Cause(f"A's numbers are {factor:.6g} times B's", confirmed=True)
    if (cause := _function_of(a, b, bound)) is not None:
        return cause
    for axis in {a.ndim - 1, 1} if a.ndim > 1 else ():
        if _is_affine(np.moveaxis(a, axis, 0), np.moveaxis(b, axis, 0), bound * scale):
            return Cause(
                "each feature of A is B's with a scale and a shift, e.g. of a normalizer",
                confirmed=True,
            )
    return None


def _function_of(a: np.ndarray, b: np.ndarray, bound: float) -> Cause | None:
    """Return the activation, or the clipping, that one side applies to the other side's numbers."""
    for one, x, other, y in (("A", a, "B", b), ("B", b, "A", a)):
        name = name_activation(y, x, bound)
        if name is not None and name != NO_ACTIVATION:
            return Cause(f"{one}'s numbers are {name} of {other}'s", confirmed=True)
        low, high = float(x.min()), float(x.max())
        if low < high and float(np.abs(np.clip(y, low, high) - x).max()) <= bound * max(-low, high):
            return Cause(
                f"{one} clips to the range from {low:g} to {high:g}, {other} does not", confirmed=True
            )
    return None


def _iter_normalized(x: np.ndarray, eps: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yield an input [batch, ...] as the known norms make it, before their scales and shifts."""
    x = np.asarray(x, np.float64)
    for channels in dict.fromkeys((x.ndim - 1, 1)):
        places = tuple(axis for axis in range(1, x.ndim) if axis != channels)
        for axes, of in (
            ((channels,), "each position's features"),
            (tuple(range(1, x.ndim)), "each input as a whole"),
            (places, "each channel of an input"),
            ((0, *places), "each channel of the batch"),
        ):
            if axes:
                root = np.sqrt((x * x).mean(axes, keepdims=True) + eps)
                yield f"the root mean square of {of}", x / root
                root = np.sqrt(x.var(axes, keepdims=True) + eps)
                yield f"the deviation from the mean of {of}", (x - x.mean(axes, keepdims=True)) / root
    yield "stored numbers", x


def _is_affine(a: np.ndarray, b: np.ndarray, allowed: float, *, shifted: bool = True) -> bool:
    """Return whether each row of A is a factor times B's row, plus a number if `shifted`."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    inside = _is_inside_range(a) & _is_inside_range(b)
    count = inside.sum(1, keepdims=True)
    if count.min() < 4:
        return False
    means = [np.where(inside, array, 0).sum(1, keepdims=True) / count if shifted else 0.0 for array in (b, a)]
    x, y = (np.where(inside, array - mean, 0) for array, mean in zip((b, a), means, strict=True))
    length = (x * x).sum(1, keepdims=True)
    factor = np.divide((x * y).sum(1, keepdims=True), length, out=np.zeros_like(length), where=length > 0)
    return bool(np.abs(y - factor * x).max() <= allowed)


def _is_inside_range(array: np.ndarray) -> np.ndarray:
    """Return which numbers are not at an end of the range that others have too, e.g. clipped ones."""
    inside = np.ones(array.shape, bool)
    for end in (array.min(), array.max()):
        at = array == end
        if np.count_nonzero(at) > 2:
            inside &= ~at
    return inside


def activation_cause(
    before: tuple[CapturedCall, CapturedCall], after: tuple[np.ndarray, np.ndarray], bound: float
) -> Cause | None:
    """Return the two activations that map a layer's outputs to `after`, None if they are equal or unknown."""
    names = []
    for call, y in zip(before, after, strict=True):
        candidates = (name_activation(x, y, bound) for x in (*call.before, *call.outputs[:1]))
        name = next(filter(None, candidates), None)
        # A layer's output is its own activation's, which may be an unknown one.
        names.append(None if call.before and name == NO_ACTIVATION and not _is_plain(call) else name)
    return _different_activations(names)


def _is_plain(call: CapturedCall) -> bool:
    """Return whether a layer outputs what it computes before its activation."""
    return any(np.array_equal(x, call.outputs[0]) for x in call.before)


def between_cause(after: tuple[np.ndarray, np.ndarray], bound: float) -> Cause | None:
    """Return how arrays between two layers differ: by a normalisation, or in their order."""
    if (cause := integer_cause(*after)) is not None:
        return cause
    a, b = (np.asarray(array, np.float64) for array in after)
    error, other = align_arrays(a, b)
    cause = None
    if other is not None:
        x, y = (np.where(np.isfinite(array), array, 0.0) for array in (a, other))
        cause = relate_arrays(x, y, bound)
    if cause is None and error > bound and is_reordered(a, b, bound):
        text = _name_border(a, b, bound) or _name_order(a, b, bound)
        cause = Cause(text or "B has the numbers of A in another order", confirmed=True)
    return cause


def _name_border(a: np.ndarray, b: np.ndarray, bound: float) -> str | None:
    """Return how two sides pad the same numbers with zeros."""
    for other in _turned(a, b) if a.ndim > 2 else ():
        inner = [without_border(array) for array in (a, other)]
        if inner[0].shape == a.shape or align_arrays(*inner)[0] > bound:
            continue
        for axis in range(1, a.ndim) if a.shape == other.shape else ():
            widths = []
            for array in (a, other):
                there = np.flatnonzero(np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).any(1))
                widths.append((int(there[0]), int(array.shape[axis] - 1 - there[-1])))
            if widths[0] != widths[1]:
                pads = [f"{low} before and {high} after" for low, high in widths]
                return f"the padding of axis {axis} is {pads[0]} in A, {pads[1]} in B"
    return None


def _name_order(a: np.ndarray, b: np.ndarray, bound: float) -> str | None:
    """Return the order of B's features along one axis."""
    for turned, axis in itertools.product(_turned(a, b), {1, a.ndim - 1}):
        rows = [np.moveaxis(array, axis, -1).reshape(-1, a.shape[axis]) for array in (a, turned)]
        if turned.shape == a.shape and (order := find_order(rows[0], rows[1], bound)) is not None:
            return f"B has the numbers of A in another order along axis {axis}: {describe_order(order)[0]}"
    return None


def without_border(array: np.ndarray) -> np.ndarray:
    """Return an image without planes of zeros at its sides, e.g. one that is padded already."""
    for axis in range(1, array.ndim) if array.ndim > 2 else ():
        there: Any = np.flatnonzero(np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1).any(1))
        if there.size:
            array = np.take(array, range(there[0], there[-1] + 1), axis)
    return array


def find_order(a: np.ndarray, b: np.ndarray, bound: float) -> np.ndarray | None:
    """Return the columns of B in the order of A's, None if they are not the same columns."""
    if a.ndim != 2 or a.shape != b.shape:
        return None
    digits = max(0, int(-np.log10(bound * (float(np.abs(a).max()) or 1.0))) - 1) if bound else 12
    at_a, at_b = (np.lexsort(np.round(np.asarray(array, np.float64), digits)) for array in (a, b))
    order = np.empty(a.shape[1], int)
    order[at_a] = at_b
    fits = float(np.abs(a - b[:, order]).max()) <= bound * (float(np.abs(a).max()) or 1.0)
    return order if fits else None


def describe_order(order: np.ndarray) -> tuple[str, str | None]:
    """Return what an order of features is, and an image whose flattening it is: positions and channels."""
    size = len(order)
    for channels in range(2, size):
        if size % channels == 0:
            whole = np.arange(size).reshape(-1, channels)
            for matrix in (whole, whole.reshape(channels, -1)):
                if np.array_equal(matrix.T.reshape(-1), order):
                    return f"a flattened image of {channels} channels", f"{size // channels},{channels}"
    if np.array_equal(order, np.arange(size)[::-1]):
        return "in reverse", None
    starts = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), size]
    lengths = [end - start for start, end in pairwise(starts)]
    if len(lengths) <= 4 and min(lengths) > 1:
        return f"parts of {', '.join(map(str, lengths))} features are exchanged", None
    moved = np.flatnonzero(order != np.arange(size))
    shown = abbreviate_list([str(row) for row in moved], 4)
    return f"{len(moved):,} of {size:,} rows, {shown}", None
