"""The operations of two models where they part.

Both sides' operations are recorded with their values. From a value in which the models differ, both
computations are followed back while they execute the same operation on one differing value, down to values
that occur on both sides. What remains is the difference, whatever it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.networks.tracing import ROOT
from ckpttool.verification.causes import Cause, integer_cause, tensor_cause

if TYPE_CHECKING:
    from ckpttool.networks.messages import LayerRow
    from ckpttool.networks.model_runner import Operations

# Operations by their names in PyTorch (aten), TensorFlow and ONNX, where these are not words for a reader.
_SIGNS = {
    **dict.fromkeys(("add", "add_", "AddV2", "Add", "BiasAdd"), "+"),
    **dict.fromkeys(("sub", "Sub"), "-"),
    **dict.fromkeys(("mul", "Mul"), "*"),
    **dict.fromkeys(("div", "RealDiv", "Div"), "/"),
    **dict.fromkeys(("mm", "bmm", "matmul", "MatMul", "BatchMatMulV2", "BatchMatMulV3"), "@"),
    **dict.fromkeys(("pow", "Pow"), "**"),
    **dict.fromkeys(("gt", "Greater"), ">"),
    **dict.fromkeys(("ge", "GreaterEqual"), ">="),
    **dict.fromkeys(("lt", "Less"), "<"),
    **dict.fromkeys(("le", "LessEqual"), "<="),
    **dict.fromkeys(("eq", "Equal"), "=="),
    **dict.fromkeys(("ne", "NotEqual"), "!="),
}
_WORDS = {
    **dict.fromkeys(("_softmax", "Softmax"), "softmax"),
    **dict.fromkeys(("_log_softmax", "LogSoftmax"), "log_softmax"),
    **dict.fromkeys(("cat", "ConcatV2", "Concat"), "concatenation"),
    **dict.fromkeys(("stack", "Pack"), "stack"),
    **dict.fromkeys(("amax", "max", "Max", "ReduceMax"), "max"),
    **dict.fromkeys(("amin", "min", "Min", "ReduceMin"), "min"),
    **dict.fromkeys(("permute", "transpose", "t", "Transpose"), "transpose"),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "Reshape"), "reshape"),
    **dict.fromkeys(("flip", "ReverseV2"), "flip"),
    **dict.fromkeys(("embedding", "index_select", "gather", "GatherV2", "ResourceGather", "Gather"), "rows"),
    **dict.fromkeys(("where", "SelectV2", "Where"), "where"),
    **dict.fromkeys(("clamp", "ClipByValue", "Clip"), "clip"),
    **dict.fromkeys(("constant_pad_nd", "Pad", "PadV2"), "padding"),
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d", "MirrorPad"), "reflected borders"),
    **dict.fromkeys(("replication_pad1d", "replication_pad2d"), "copied borders"),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "MaxPool"), "maximum pooling"),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d", "AvgPool", "AveragePool"), "mean pooling"),
    **dict.fromkeys(("slice", "select", "StridedSlice"), "slice"),
    **dict.fromkeys(("split", "split_with_sizes", "Split", "SplitV"), "part"),
    **dict.fromkeys(("maximum", "Maximum"), "maximum"),
    **dict.fromkeys(("ReduceMean", "GlobalAveragePool"), "mean"),
    **dict.fromkeys(("ReduceSum",), "sum"),
    **dict.fromkeys(("linalg_vector_norm", "ReduceL2"), "norm"),
    **dict.fromkeys(("convolution", "Conv", "Conv2D"), "convolution"),
    **dict.fromkeys(("sgn", "Sign"), "sign"),
    **dict.fromkeys(("zeros_like", "ZerosLike"), "zeros"),
    **dict.fromkeys(("ones_like", "OnesLike"), "ones"),
}
# They move or choose numbers, and change none.
_MOVING = (
    "slice",
    "rows",
    "transpose",
    "reshape",
    "part",
    "flip",
    "unsqueeze",
    "squeeze",
    "roll",
    "concatenation",
)
# Their second argument is an axis.
_ALONG = ("softmax", "log_softmax", "sum", "mean", "max", "min", "prod", "cumsum")
# Their settings are numbers, no axes, borders or shapes.
_VALUED = ("clip", "where", "leaky_relu", "elu")
_COMMUTATIVE = ("+", "*", "maximum", "==", "!=")
_ACTIVATIONS = ("relu", "tanh", "sigmoid", "elu", "softplus", "softmax", "relu6", "selu", "leakyrelu")
# They repeat numbers, and change nothing else.
_REPEATED = ("expand", "BroadcastTo", "Tile", "repeat", "expand_as", "_to_copy", "Cast")
# Their results depend on the shape of what they receive, not on its numbers.
_SIZES = ("Shape", "Size", "Rank")
_EQUAL = "\N{HORIZONTAL ELLIPSIS}"  # for what is too deep in a formula, and equal on both sides
_FEWEST_MATCHED = 2  # a single number occurs by chance
_SMALL, _HIDING = 0.1, 1e5
_MOST_SHOWN, _MOST_TEXT, _DEEPEST, _DEEPEST_MATCHED = 4, 240, 7, 2


class _Step(NamedTuple):
    """An operation, or a call of a layer: the values that it receives, and its plain settings."""

    name: str
    inputs: tuple[Any, ...]
    part: int = 0

    @property
    def values(self) -> list[int]:
        """The values that it receives."""
        return [*_iter_values(self.inputs)]

    @property
    def settings(self) -> tuple[Any, ...]:
        """What else it receives, e.g. an axis."""
        return tuple(_plain(item) for item in self.inputs)


def _canonical_step(step: _Step, steps: Mapping[int, _Step], arrays: Mapping[int, np.ndarray]) -> _Step:
    """Return a step in the form that all libraries have: masks first, bounds of both sides in one step."""
    name, inputs = step.name.removesuffix("_"), step.inputs
    if name == "masked_fill":
        return _Step("where", (inputs[1], inputs[0 if len(inputs) < 3 else 2], inputs[0]), step.part)
    if name == "Slice" and len(step.values) > 4 and -1 in arrays.get(step.values[4], ()):
        return _Step("flip", (inputs[0], inputs[3]), step.part)
    bounds = {"Maximum": "Minimum", "maximum": "minimum", "Max": "Min"}
    lower = _split_bound(step, arrays) if name in bounds else None
    before = steps.get(lower[0]) if lower is not None else None
    upper = _split_bound(before, arrays) if before is not None and before.name == bounds[name] else None
    if lower is None or upper is None:
        return step
    return _Step("clip", ({"value": upper[0]}, lower[1], upper[1]), step.part)


def _split_bound(step: _Step, arrays: Mapping[int, np.ndarray]) -> tuple[int, Any] | None:
    """Return what a step compares with a single number, and that number; None if it does not."""
    sizes = [arrays[n].size if n in arrays else 0 for n in step.values]
    if len(sizes) != 2 or 1 not in sizes or max(sizes) < _FEWEST_MATCHED:
        return None
    bound = sizes.index(1)
    return step.values[1 - bound], {"value": step.values[bound]}


def _iter_values(inputs: Any) -> Iterator[int]:
    if isinstance(inputs, Mapping):
        yield inputs["value"]
    elif isinstance(inputs, list | tuple):
        for item in inputs:
            yield from _iter_values(item)


def _flattened(inputs: Any) -> Iterator[Any]:
    """Yield values and settings in order; a list without values is one setting."""
    for item in inputs:
        if isinstance(item, list) and next(_iter_values(item), None) is not None:
            yield from _flattened(item)
        else:
            yield _plain(item) if isinstance(item, list | tuple) else item


def _plain(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return None
    return tuple(map(_plain, inputs)) if isinstance(inputs, list | tuple) else inputs


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a model: its operations by the values that they make, and what these values are."""

    steps: Mapping[int, _Step]
    arrays: Mapping[int, np.ndarray]
    names: Mapping[int, str]
    """model inputs, outputs of layers and tensors of layers"""
    varying: frozenset[int]
    """the values that depend on the model's inputs"""
    calls: Mapping[tuple[str, int], tuple[Sequence[int], Sequence[int]]]
    """what each call of a layer receives and returns"""
    whole: Mapping[str, Sequence[range]]
    """the layers with tensors, with the numbers of the values inside each call"""
    library: str
    """what names the operations"""

    @classmethod
    def of(
        cls, answer: Operations, arrays: Mapping[int, np.ndarray], layers: Sequence[LayerRow]
    ) -> RecordedCall:
        """Return the call that a model's process recorded."""
        titles = {
            tensor["values"]: f"{tensor['name']} of {layer['path']}"
            for layer in reversed(layers)
            for tensor in layer["tensors"]
            if not tensor["constant"]
        }
        names = {int(n): titles[d] for n, d in answer["values"].items() if d in titles}
        steps: dict[int, _Step] = {}
        for row in answer["operations"]:
            for part, number in enumerate(row["made"]):
                inputs = tuple(row["given"])
                if row["name"] == "IdentityN":  # each of its results is one of its inputs
                    inputs = inputs[part : part + 1]
                steps[number] = _canonical_step(_Step(row["name"], inputs, part), steps, arrays)
                # Another order of a named tensor has the same digest.
                if not names.keys().isdisjoint(steps[number].values):
                    names.pop(number, None)
        calls = {(row["path"], row["number"]): (row["given"], row["made"]) for row in answer["calls"]}
        received = answer["calls"][-1]["given"] if answer["calls"] else []
        names.update((number, f"input {index}") for index, number in enumerate(received))
        varying = {*received, *answer["written"]}
        sources = {number: inputs for inputs, output in calls.values() for number in output}
        for number in sorted({*steps, *sources}):
            before = [*(steps[number].values if number in steps else ()), *sources.get(number, ())]
            if not varying.isdisjoint(before) and not (number in steps and steps[number].name in _SIZES):
                varying.add(number)
        stored = {layer["path"] for layer in layers if layer["tensors"]}
        whole: dict[str, list[range]] = defaultdict(list)
        for call in answer["calls"]:
            if call["path"] in stored:
                whole[call["path"]].append(range(call["start"], call["end"]))
        return cls(steps, arrays, names, frozenset(varying), calls, whole, answer["library"])

    def with_layers(self, layers: Collection[str], titles: Mapping[str, str]) -> RecordedCall:
        """Return the call with the outputs of these layers as what the layers make, under other titles."""
        steps, names = dict(self.steps), dict(self.names)
        for (path, count), (inputs, output) in self.calls.items():
            for part, number in enumerate(output if path in layers else ()):
                last = self.steps.get(number)
                if last is not None and last.name.lower() in _ACTIVATIONS and len(last.values) == 1:
                    number = last.values[0]
                name = titles.get(path, path)
                title = f"{name}#{count + 1}" if count else name
                steps[number] = _Step(f"layer {name}", tuple({"value": n} for n in inputs), part)
                names[number] = title if not part else f"state {part} of {title}"
        inside = {n for path in layers for item in self.whole.get(path, ()) for n in item}
        returned = {number for _, item in self.calls.values() for number in item}
        arrays = {n: x for n, x in self.arrays.items() if n not in inside or n in names or n in returned}
        return replace(self, steps=steps, names=names, arrays=arrays)


class OperationDifference:
    """The difference of two recorded calls."""

    def __init__(self, a: RecordedCall, b: RecordedCall, bound: float) -> None:
        self._sides, self._bound = (a, b), bound
        self._named = tuple(map(_named_values, self._sides))
        self.receiver: str | None = None
        self._deepest_match = _DEEPEST_MATCHED
        self._bare = False
        # Libraries that name operations differently may also have other axes for the channels of an image.
        self._layouts = a.library != b.library
        self._moved_axes = self._layouts and "tensorflow" in (a.library, b.library)
        self._match: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._match_values()

    def _match_values(self) -> None:
        """Note the values that occur on both sides, in any order of axes that frameworks use."""
        known: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for number, array in self._sides[0].arrays.items():
            if _is_telling(array):
                known[array.size].append((_size(array), number))
        for number, array in self._sides[1].arrays.items():
            if not _is_telling(array):
                continue
            size = _size(array)
            for other, candidate in known.get(array.size, ()):
                if abs(size - other) > self._bound * max(size, other):
                    continue
                if self._is_same(self._sides[0].arrays[candidate], array):
                    self._match[1].setdefault(number, candidate)
                    self._match[0].setdefault(candidate, number)
                    if candidate in self._sides[0].names:
                        self._match[1][number] = candidate

    def is_computed(self, number: int, of: int) -> bool:
        """Return whether B computes a value of one that A has, e.g. of what a whole layer of A receives."""
        call, waiting, visited = self._sides[1], [number], set[int]()
        while waiting:
            number = waiting.pop()
            same = self._sides[0].arrays.get(self._match[1].get(number, -1))
            if visited and same is not None and self._is_same(self._sides[0].arrays[of], same):
                return True
            if number not in visited and number in call.steps and number in call.varying:
                visited.add(number)
                waiting += call.steps[number].values
        return False

    def find(self, pairs: Sequence[tuple[int, int]]) -> Cause | None:
        """Return what A and B compute for the first of these pairs of values that differs."""
        for a, b in pairs:
            if a in self._sides[0].arrays and b in self._sides[1].arrays and not self._agree(a, b):
                # Equal values may be computed several times.
                apart = {self._bytes(*pair): pair for pair in [*self._iter_differences(a, b)][::-1]}
                earliest = min(apart.values(), key=lambda pair: pair[1])
                a, b = earliest if len(apart) == 1 else (a, b)
                self.receiver = None if b in self._match[1] else self._receiver(b)
                cause = self._describe(a, b)
                if cause is None or (len(apart) > 1 and len(cause.text) > _MOST_TEXT):
                    cause = self._describe(*earliest)
                return cause
        return None

    def _bytes(self, a: int, b: int) -> tuple[bytes, bytes]:
        return self._sides[0].arrays[a].tobytes(), self._sides[1].arrays[b].tobytes()

    def _receiver(self, number: int) -> str | None:
        """Return the first layer of B that receives a value; of a layer's own tensor that layer."""
        call = self._sides[1]
        if number not in call.varying and number in call.names:
            return call.names[number].partition(" of ")[2] or None
        for (path, _), (inputs, _) in call.calls.items():
            if (
                path in call.whole
                and path != ROOT
                and any(number in (item, self._origin(1, item)) for item in inputs)
            ):
                return path
        return None

    def _agree(self, a: int, b: int) -> bool:
        one, other = self._sides[0].arrays.get(a), self._sides[1].arrays.get(b)
        return one is not None and other is not None and self._is_same(one, other)

    def _is_same(self, a: np.ndarray, b: np.ndarray) -> bool:
        """Return whether two arrays have the same numbers in the same order."""
        if _are_equal(a, b, self._bound):
            return True
        orders = (np.moveaxis(b, 1, -1), np.moveaxis(b, -1, 1)) if self._moved_axes and b.ndim > 2 else ()
        return any(item.shape == a.shape and _are_equal(a, item, self._bound) for item in orders)

    def _step(self, side: int, number: int, *, beyond: bool = False) -> _Step | None:
        """Return what makes a value, None for one that occurs on the other side, too, unless `beyond`."""
        call = self._sides[side]
        if (number in self._match[side] and not beyond) or number not in call.steps:
            return None
        step = call.steps[number]
        name = step.name.removesuffix("_") if step.name.endswith("_") and len(step.name) > 3 else step.name
        if name.startswith("layer "):
            return step
        name = _SIGNS.get(name, _WORDS.get(name, name.lower()))
        if name == "rows" and call.varying.isdisjoint(step.values[1:]):
            name = "slice"
        return step._replace(name=name)

    def _origin(self, side: int, number: int, *, beyond: bool = False, moved: bool = False) -> int:
        """Return the value before operations that only repeat it or give it another shape.

        With `beyond` also one before a value that occurs on both sides, with `moved` before another order of
        its axes.
        """
        call = self._sides[side]
        while (
            (beyond or number not in self._match[side]) and number in call.steps and number not in call.names
        ):
            step = call.steps[number]
            array = call.arrays.get(number)
            before = call.arrays.get(step.values[0]) if step.values else None
            if array is None or before is None or not call.varying.isdisjoint(step.values[1:]):
                return number
            if moved and (step.name in _REPEATED or _WORDS.get(step.name) == "transpose"):
                number = step.values[0]
                continue
            # On one side, another order of axes is another value.
            if not _are_equal(before, array, self._bound):
                return number
            number = step.values[0]
        return number

    def _iter_differences(self, a: int, b: int) -> Iterator[tuple[int, int]]:
        """Yield the first values that differ of those from which both sides compute two values alike."""
        waiting, visited = [(a, b)], set[tuple[int, int]]()
        while waiting:
            a, b = waiting.pop()
            pair = a, b = self._origin(0, a), self._origin(1, b)
            if pair in visited:  # both sides use it several times
                continue
            visited.add(pair)
            before = self._values_before(a, b)
            apart = [values for values in before or () if not self._agree(*values)]
            if not apart or any(
                n not in call.arrays for values in apart for n, call in zip(values, self._sides, strict=True)
            ):
                yield pair
            waiting += apart[::-1]

    def _values_before(self, a: int, b: int) -> list[tuple[int, int]] | None:
        """Return the values that both sides' operations receive, in pairs; None for other operations."""
        one, other = self._step(0, a), self._step(1, b)
        if one is None or other is None:
            return None
        sources = self._source(0, a), self._source(1, b)
        if sources != (a, b) and self._moves_alike((sources[0], a), (sources[1], b)):
            return [sources]
        if (one.name, one.part) != (other.name, other.part):
            return None
        values = [self._content(side, step) for side, step in enumerate((one, other))]
        rest = [
            [n for n in step.values if n not in known]
            for step, known in zip((one, other), values, strict=True)
        ]
        fixed = self._only_constant(0, rest[0]), self._only_constant(1, rest[1])
        alike = all(self._agree(*pair) for pair in zip(*values, strict=False))
        if fixed[0] is not None and fixed[1] is not None and alike:
            values = [[*values[0], fixed[0]], [*values[1], fixed[1]]]
        if (one.settings != other.settings and not self._layouts) or len(values[0]) != len(values[1]):
            return None
        if (
            one.name in _COMMUTATIVE
            and len(values[0]) == 2
            and any(self._agree(*pair) for pair in zip(values[0], values[1][::-1], strict=True))
        ):
            values[1].reverse()
        pairs = list(zip(*values, strict=True))
        if self._are_exchanged(pairs):
            return None
        # What an axis or a single number changes is that of the operation.
        whole = one.name in _SIGNS.values()
        settings = (self._is_setting(*pair, single=whole) and not self._agree(*pair) for pair in pairs)
        return None if any(settings) else pairs

    def _are_exchanged(self, pairs: Sequence[tuple[int, int]]) -> bool:
        """Return whether both sides receive the same values, each in another place; axes stay in theirs."""
        pairs = [(a, b) for a, b in pairs if a in self._sides[0].varying or a in self._named[0]]
        if len(pairs) < 2 or any(self._agree(*pair) for pair in pairs):
            return False
        return all(any(self._agree(a, other) for _, other in pairs) for a, _ in pairs)

    def _is_setting(self, a: int, b: int, *, single: bool) -> bool:
        """Return whether two values are single numbers of the code, or axes, borders or shapes."""
        for side, number in ((0, a), (1, b)):
            array = self._sides[side].arrays.get(number)
            if array is None or number in self._sides[side].varying or number in self._named[side]:
                return False
            few = not single and array.dtype.kind == "i" and array.size <= 2 * _MOST_SHOWN
            if array.size >= _FEWEST_MATCHED and not few:
                return False
        return True

    def _only_constant(self, side: int, numbers: Sequence[int]) -> int | None:
        """Return the one of some values that has several floats, None if there are more or none."""
        arrays = self._sides[side].arrays
        floats = [
            n for n in numbers if n in arrays and arrays[n].dtype.kind == "f" and _is_telling(arrays[n])
        ]
        return floats[0] if len(floats) == 1 else None

    def _source(self, side: int, number: int, *, beyond: bool = False) -> int:
        """Return the value of which a value has a part, or all numbers in another order."""
        step = self._step(side, number, beyond=beyond)
        if step is None or step.name not in _MOVING or number in self._sides[side].names:
            return number
        content = {n for n in step.values if n in self._sides[side].varying or n in self._named[side]}
        sources = {self._source(side, n) for n in content}
        return sources.pop() if len(sources) == 1 else number

    def _moves_alike(self, a: tuple[int, int], b: tuple[int, int]) -> bool:
        """Return whether both sides choose the same numbers of a value in the same order."""
        arrays = [call.arrays.get(n) for call, side in zip(self._sides, (a, b), strict=True) for n in side]
        if any(array is None for array in arrays):
            return False
        before, after, source, moved = (np.asarray(array) for array in arrays)
        if before.size != source.size or after.size != moved.size:
            return False
        order = np.argsort(before, axis=None, kind="stable")
        index = np.searchsorted(before.reshape(-1)[order], after).clip(0, order.size - 1)
        chosen = order[index]
        alike = np.array_equal(before.reshape(-1)[chosen], after)
        return alike and _are_equal(source.reshape(-1)[chosen], moved, self._bound)

    def _content(self, side: int, step: _Step) -> list[int]:
        """Return the values that a step receives; axes and shapes are values in TensorFlow only."""
        call = self._sides[side]
        if not self._layouts:
            return step.values
        return [n for n in step.values if n in call.varying or n in self._named[side]]

    def _describe(self, a: int, b: int) -> Cause | None:
        if a not in self._sides[0].varying and b not in self._sides[1].varying:
            cause = self._describe_constants(a, b)
            if cause is not None:
                return replace(cause, confirmed=True)
        texts = self._texts(a, b)
        if texts[0] == texts[1] and not self._layouts:  # frameworks have other orders of axes
            details = [self._details(*side) for side in ((0, a), (1, b))]
            texts = (f"{texts[0]} {details[0]}", f"{texts[1]} {details[1]}")
        one, other = self._sides[0].arrays[a], self._sides[1].arrays[b]
        if texts[0] == texts[1] and one.shape[1:] != other.shape[1:]:
            texts = (f"{texts[0]} as {[*one.shape[1:]]}", f"{texts[1]} as {[*other.shape[1:]]}")
        if texts[0] == texts[1] or not {"...", _EQUAL}.isdisjoint(texts) or max(map(len, texts)) > _MOST_TEXT:
            return None
        # Of equal shapes that an image's other layout would change, the axes have the same numbers.
        alike = one.shape == other.shape and one.ndim > 2 and np.moveaxis(one, 1, -1).shape != one.shape
        # Where B's value is another one of A, both formulas are A's.
        if self._layouts and b not in self._match[1] and not self._receives_the_same(a, b):
            bare = self._bare_texts(a, b, every=self._moved_axes and not alike)
            if bare[0] == bare[1] or any(map(_is_cut, texts)):
                return None  # what differs is not in the formulas
        if one.size != other.size:
            texts = (f"{texts[0]} of shape {[*one.shape[1:]]}", f"{texts[1]} of shape {[*other.shape[1:]]}")
        text = f"A computes {texts[0]}, B computes {texts[1]}"
        return Cause(text.replace(_EQUAL, "..."), confirmed=True)

    def _receives_the_same(self, a: int, b: int) -> bool:
        """Return whether both sides move or choose numbers of one value: then their settings differ."""
        sources = self._source(0, a, beyond=True), self._source(1, b, beyond=True)
        shapes = [
            call.arrays[n].shape for call, n in zip(self._sides, sources, strict=True) if n in call.arrays
        ]
        return a != sources[0] and b != sources[1] and len({*shapes}) == 1 and self._agree(*sources)

    def _bare_texts(self, a: int, b: int, *, every: bool) -> list[str]:
        """Return both formulas without axes, borders and shapes, which frameworks state in different ways.

        `every`: also without the axes of sums and the like, whose numbers libraries with the same layouts
        share.
        """
        self._bare = True
        texts = [text.replace("1 * ", "") for text in self._texts(a, b)]
        self._bare = False
        return [_AXES.sub("", text) for text in texts] if every else texts

    def _texts(self, a: int, b: int) -> tuple[str, str]:
        """Return both formulas as deep as fits; equal parts are abbreviated, but not in the middle."""
        texts = longer = ("", "")
        for self._deepest_match in (_DEEPEST_MATCHED, 2 * _DEEPEST_MATCHED):
            for deepest in range(_DEEPEST, 0, -1):
                longer = self._text(0, a, deepest), self._text(1, b, deepest)
                if max(map(len, longer)) <= _MOST_TEXT:
                    break
            if not texts[0] or max(map(len, longer)) <= _MOST_TEXT:
                texts = longer
            if not any(map(_is_cut, texts)):
                break
        return texts

    def _describe_constants(self, a: int, b: int) -> Cause | None:
        """Return how two arrays differ that depend on no input, None if they are computed of tensors."""
        arrays = self._sides[0].arrays[a], self._sides[1].arrays[b]
        # A single one may be an axis.
        if arrays[0].size >= _FEWEST_MATCHED and (cause := integer_cause(*arrays)) is not None:
            return cause
        # An export may have what a named layer computes of constants, e.g. rows of a table, as a constant.
        computed = any(
            n in call.steps and n in named and n not in call.names
            for call, named, n in zip(self._sides, self._named, (a, b), strict=True)
        )
        if arrays[0].shape != arrays[1].shape or arrays[0].size < _FEWEST_MATCHED or computed:
            return None
        titles = [self._text(0, a, _DEEPEST), self._text(1, b, _DEEPEST)]
        titles = [f"constant {title}" if title.endswith("]") else title for title in titles]
        if arrays[0].dtype.kind == arrays[1].dtype.kind == "b":
            arrays = arrays[0].astype(np.float32), arrays[1].astype(np.float32)
            titles = [f"mask {title}" for title in titles]
        return tensor_cause(titles[0], arrays[0], titles[1], arrays[1])

    def _details(self, side: int, number: int) -> str:
        """Return the shapes of the values of which a value is computed, without the batch, and settings."""
        call = self._sides[side]
        step = call.steps.get(number, _Step("", ()))
        arrays = [call.arrays[item] for item in step.values if item in call.arrays]
        shapes = " and ".join(str([*array.shape[1:]]) for array in arrays if array.ndim > 1)
        return f"of shapes {shapes}, settings {[*step.settings[1:]]}"

    def _text(self, side: int, number: int, deepest: int, *, inner: bool = False, moved: bool = False) -> str:
        """Return the formula of a value; one that occurs on both sides has A's words."""
        number = self._origin(side, number, beyond=True)
        if number in self._match[side]:
            deepest, moved = min(deepest, self._deepest_match), True
            side, number = 0, self._match[1][number] if side else number
        number = self._origin(side, number, beyond=True, moved=moved)
        call = self._sides[side]
        if number in call.names:
            return call.names[number]
        array, step = call.arrays.get(number), call.steps.get(number)
        if array is not None and (array == array.flat[0]).all():
            return f"{array.flat[0]:g}"
        if number not in call.varying and (step is None or number not in self._named[side]):
            return _constant_text(array)
        if step is None or deepest <= 0 or step.name.endswith("While"):
            return _EQUAL if moved else "..."
        return self._step_text(side, number, step, deepest, moved=moved, inner=inner)

    def _step_text(
        self, side: int, number: int, step: _Step, deepest: int, *, inner: bool, moved: bool
    ) -> str:
        """Return the formula of a value's operation."""
        call = self._sides[side]
        reverse = step.name == "rsub"
        shown = "-" if reverse else _SIGNS.get(step.name.rstrip("_"), "")
        name = _WORDS.get(step.name, step.name)
        bare = self._bare and not shown and name not in (*_VALUED, *_ALONG)
        parts, plain, ordered = [], [], []
        for item in _flattened(step.inputs):
            if isinstance(item, Mapping):
                if not shown and not self._is_shown(side, item["value"], bare=bare):
                    continue
                parts.append(self._text(side, item["value"], deepest - 1, inner=bool(shown), moved=moved))
                ordered.append(parts[-1])
            elif (text := _setting_text(item)) and (not bare or isinstance(item, float | str)):
                plain.append(text)
                ordered.append(text)
        if name in _VALUED:
            return f"{name}({', '.join(ordered)})"
        if shown and len(parts) + len(plain) >= 2:
            operands = [*parts, *plain][:2]
            return _infix_text(shown, operands[::-1] if reverse else operands, inner=inner)
        return self._call_text(step, parts, plain, call, number)

    def _is_shown(self, side: int, value: int, *, bare: bool) -> bool:
        """Return whether a formula states a value: no long constants but masks, if `bare` no integers."""
        call, array = self._sides[side], self._sides[side].arrays.get(value)
        if value in call.varying or value in self._named[side] or _is_mask(array):
            return True
        if array is None or (bare and array.dtype.kind in "iu"):
            return False
        return array.size <= _MOST_SHOWN * (2 if array.dtype.kind in "iu" else 1)

    @staticmethod
    def _call_text(step: _Step, parts: list[str], plain: list[str], call: RecordedCall, number: int) -> str:
        """Return the formula of an operation that has no sign."""
        name = _WORDS.get(step.name, step.name.lower().strip("_").replace("layer ", ""))
        if name == "part":
            sizes = [call.arrays[item].size for item in (step.values[0], number) if item in call.arrays]
            halves = len(sizes) == 2 and sizes[0] == 2 * sizes[1]
            what = f"{('first', 'second')[step.part]} half" if halves else f"part {step.part + 1}"
            return f"{what} of {', '.join(parts)}"
        if step.name == "slice" and len(step.settings) > 1 and plain:  # in PyTorch: axis, start, end, step
            axis, start, end, *every = (*step.settings[1:], None, None)[:4]
            borders = f"{start or ''}:{_setting_text(end)}" + "".join(
                f":{n}" for n in every if n not in (None, 1)
            )
            return f"{name}({', '.join(parts)}, {borders} along axis {axis})"
        if name == "gelu":
            name = "tanh gelu" if "tanh" in plain else "exact gelu"
            plain = []
        if name in _ALONG and len(parts) + len(plain) == 2:
            (*parts, axis), plain = [*parts, *plain], []
            array = call.arrays.get(step.values[0])
            axis = axis if array is None or not array.ndim else _axis_text(axis, array.ndim)
            return f"{name}({', '.join(parts)}) over axis {axis}"
        return f"{name}({', '.join([*parts, *plain])})"


def _named_values(call: RecordedCall) -> set[int]:
    """Return the values with names, and those that are computed of them: an operation follows its inputs."""
    named = set(call.names)
    for number in sorted(call.steps):
        if not named.isdisjoint(call.steps[number].values):
            named.add(number)
    return named


def _are_equal(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether two arrays have the same numbers in order; one may be that of every row."""
    if a.shape == b.shape[1:] or b.shape == a.shape[1:]:
        a, b = np.broadcast_arrays(a, b)
    return a.size == b.size and _are_close(a.reshape(-1), b.reshape(-1), bound)


def _are_close(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether numbers are equal; those that hide others, such as -1e9, are no measure of the rest."""
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        return bool((a == b).all())
    sizes = np.abs(a[np.isfinite(a) & (a != 0)])
    usual = float(np.quantile(sizes, _SMALL)) if sizes.size else 1.0
    shown = sizes[sizes < _HIDING]
    # The ends of an activation are as small as it likes.
    usual = max(usual, float(np.median(shown))) if shown.size else usual
    return bool(np.isclose(a, b, rtol=bound, atol=bound * usual, equal_nan=True).all())


def _is_telling(array: np.ndarray) -> bool:
    return (
        array.size >= _FEWEST_MATCHED and array.dtype.kind in "fiub" and bool((array != array.flat[0]).any())
    )


def _size(array: np.ndarray) -> float:
    return float(np.sqrt(np.square(array.astype(np.float64)).sum()))


def _infix_text(sign: str, operands: Sequence[str], *, inner: bool) -> str:
    for x, y in (operands, operands[::-1]) if sign == "*" else ():
        if y in (f"sigmoid({x})", f"sigmoid(1 * {x})"):
            return f"silu({x})"
    text = f" {sign} ".join(operands)
    return f"({text})" if inner else text


def _is_mask(array: np.ndarray | None) -> bool:
    return array is not None and array.dtype.kind == "b" and array.ndim > 1


def _constant_text(array: np.ndarray | None) -> str:
    """Return fixed numbers, the first ones of many."""
    if array is None:
        return "..."
    if array.ndim > 1 and array.shape[-1] == array.shape[-2] > 1:
        hidden = np.broadcast_to(np.triu(np.ones(array.shape[-2:], bool), 1), array.shape)
        if np.array_equal(array != 0, hidden) or np.array_equal(array == 0, hidden):
            return "the causal mask"
    shown = [f"{number:.4g}" for number in array.reshape(-1)[: 2 * _MOST_SHOWN].astype(np.float64)]
    return f"[{', '.join(shown)}{', ...' if array.size > 2 * _MOST_SHOWN else ''}]"


_AXES = deferred.compile(r" over axis (?!\[?0\b)(\[[^\]]*\]|-?\d+)")  # that of the batch is the first one


def _is_cut(text: str) -> bool:
    """Return whether a formula leaves out a part, other than the rest of fixed numbers."""
    return "..." in text.replace(", ...]", "")


def _axis_text(axis: str, rank: int) -> str:
    """Return an axis, or several, counted from the first one."""
    numbers = [int(number) % rank for number in axis.strip("[]").split(", ")]
    return str(numbers if len(numbers) > 1 else numbers[0])


def _setting_text(value: Any) -> str:
    if value is None or isinstance(value, bool) or value == () or value == 9223372036854775807:
        return ""
    if isinstance(value, tuple):
        shown = [str(item) for item in value if item is not None]
        return f"[{', '.join(shown)}]" if shown else ""
    return f"{value:g}" if isinstance(value, float) else str(value)
