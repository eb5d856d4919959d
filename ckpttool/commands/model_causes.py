"""Pair the layers of two models, compare their activations, and find out why one differs."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

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
# What a user's class above a framework class, e.g. Module or Layer, says nothing about.
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
    """One call of a layer: its path, the number of the call, and its tensors with those of its parts."""

    path: str
    number: int
    cls: str
    tensors: tuple[LayerTensor, ...]
    settings: Mapping[str, Any]
    width: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """The call's identity."""
        return self.path, self.number

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
    paths = {each["path"] for each in calls}
    composite = [path for path in paths if find_family(_class_of(known.get(path))) == "recurrent"]
    found = []
    for call in calls:
        path, layer = call["path"], known.get(call["path"])
        if layer is None or not call.get("made") or any(_is_below(path, each) for each in composite):
            continue
        whole = find_family(_class_of(layer)) in ("recurrent", "attention")
        held = [each for each in layers if each["path"] == path or (whole and _is_below(each["path"], path))]
        tensors = tuple(_layer_tensor(row) for each in held for row in each["tensors"])
        if not tensors and any(_is_below(each, path) for each in paths):
            continue
        shape = call["made"][0]["shape"]
        width = int(np.prod(shape[1:])) if len(shape) > 1 else 1
        found.append(ModelLayer(path, call["number"], _class_of(layer), tensors, layer["settings"], width))
    return found


def _class_of(layer: Mapping[str, Any] | None) -> str:
    if layer is None:
        return ""
    return str(layer["name"] if layer["class"] in _PLAIN else layer["class"])


def _is_below(path: str, other: str) -> bool:
    if other == "(model)":
        return path != other
    return path.startswith((other + ".", other + "/"))


def _layer_tensor(row: Mapping[str, Any]) -> LayerTensor:
    return LayerTensor(
        row["name"], tuple(row["shape"]), row["values"], row["constant"], tuple(row["quantiles"])
    )


# Pairs: by equal weights, then by order between paired neighbours.


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer of both sides; `by` is the evidence: weights, some weights, or order."""

    a: ModelLayer
    b: ModelLayer
    by: str


def pair_layers(a: Sequence[ModelLayer], b: Sequence[ModelLayer]) -> list[LayerPair]:
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
    return [LayerPair(a[place], found[place], evidence[place]) for place in sorted(found)]


def _equal_pairs(a: Sequence[ModelLayer], b: Sequence[ModelLayer]) -> dict[int, ModelLayer]:
    """Return the layers of B by the place of those of A with equal weights, in order of their calls."""
    by_weights: dict[frozenset[str], list[ModelLayer]] = defaultdict(list)
    for layer in b:
        if layer.weights:
            by_weights[layer.weights].append(layer)
    return {
        place: by_weights[layer.weights].pop(0)
        for place, layer in enumerate(a)
        if layer.weights and by_weights[layer.weights]
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
    if bool(a.tensors) != bool(b.tensors) or (a.family != b.family and a.family and b.family):
        return 0.0
    shared = len(
        {each.values for each in a.tensors if not each.constant} & {each.values for each in b.tensors}
    )
    sizes = [Counter(_size(each) for each in layer.tensors if len(each.shape) > 1) for layer in (a, b)]
    alike = sizes[0] == sizes[1]
    if a.tensors and not (shared or alike):
        return 0.0
    if not a.tensors and not a.family:
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
    scale = float(np.abs(a).max()) or 1.0
    for turned in _turned(a, b):
        error = float(np.abs(a - turned).max()) / scale
        if np.isnan(error):
            error = 0.0 if np.array_equal(a, turned, equal_nan=True) else float("inf")
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


def is_reordered(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether every row of B has A's numbers in another order, the same one in all rows."""
    if a.shape[:1] != b.shape[:1] or a.size != b.size or not a.size:
        return False
    one, other = (np.sort(np.asarray(each, np.float64).reshape(len(each), -1), axis=1) for each in (a, b))
    return bool(np.abs(one - other).max() <= bound * (float(np.abs(one).max()) or 1.0))


def compare_layer(pair: LayerPair, a: CapturedCall, b: CapturedCall, bound: float) -> LayerComparison:
    """Return the errors of a pair's first input and of its outputs."""
    inputs = align_arrays(a.given[0], b.given[0])[0] if a.given and b.given else 0.0
    outputs = output_error(a, b)
    if pair.a.family == "flatten" and outputs > bound and is_reordered(a.made[0], b.made[0], bound):
        outputs = 0.0  # each framework has its own order; the next layer's weights are in the same
    return LayerComparison(
        _title(pair.a), _title(pair.b), (pair.a.cls, pair.b.cls), pair.by, inputs, outputs, outputs <= bound
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
    """Return the outputs of a call, the first one's last steps, too, if there are several."""
    first = made[0]
    if len(made) == 1 or first.ndim != 3:
        return [first]
    return [first, first[:, -1], *made[1:]]


def _title(layer: ModelLayer) -> str:
    return f"{layer.path}#{layer.number + 1}" if layer.number else layer.path
