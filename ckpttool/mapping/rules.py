"""Rules with inverses, the plan that lists them and its report."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from ckpttool.core import deferred, dtypes
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import MappingError
from ckpttool.core.source import (
    ArrayOp,
    Buffer,
    Inline,
    Shape,
    Source,
    TransformedSource,
    as_array,
    combine_parts,
)
from ckpttool.core.text import compile_glob, describe_record, format_count, no_match_error
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    Plain,
    Role,
    Tree,
    ValueLeaf,
    display,
)

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.core.activations import WeightUse


# A tile has as many rows as fill four cache lines of the result, and this many columns: 256 KiB.
_RUN = 256
_COLUMNS = 1024
_LINE = 64
# Below this size, NumPy's copy is faster than a second pass.
_SMALL = 256 << 10
_NARROW = 128


def permute_array(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return a new contiguous array whose axis i is axis `axes[i]` of the given one."""
    import numpy as np

    shape = tuple(array.shape[axis] for axis in axes)
    if array.nbytes < _SMALL:
        return np.ascontiguousarray(array.transpose(axes)).reshape(shape)
    extents, order = _merge_axes(array.shape, axes)
    # Unsigned integers of the same size are copied in the same way, faster than the types of ml_dtypes.
    words = np.ascontiguousarray(array).reshape(extents).view(_element_dtype(array.dtype))
    if len(order) > 1 and order[0] == len(order) - 1:
        # The last axis becomes the first: a transpose, once the others are in order (copied in runs of it).
        rest = np.ascontiguousarray(words.transpose(*order[1:], order[0]))
        matrix = _transpose_matrix(rest.reshape(-1, rest.shape[-1]))
    else:
        matrix = np.ascontiguousarray(words.transpose(order))
    return matrix.reshape(shape).view(array.dtype)


def _element_dtype(dtype: np.dtype) -> str:
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8"}.get(dtype.itemsize, f"V{dtype.itemsize}")


def _merge_axes(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and order of the same permutation with the fewest axes, merging adjacent axes."""
    order = [axis for axis in axes if shape[axis] != 1] or [0]
    kept = sorted(order)
    order = [kept.index(axis) for axis in order]
    runs = [[axis for _, axis in run] for _, run in groupby(enumerate(order), lambda at: at[1] - at[0])]
    ranked = sorted(runs)
    extents = []
    for run in ranked:
        extent = 1
        for axis in run:
            extent *= shape[kept[axis]]
        extents.append(extent)
    return tuple(extents), tuple(ranked.index(run) for run in runs)


def _transpose_matrix(matrix: np.ndarray) -> np.ndarray:
    """Return the transposed matrix, contiguous.

    A tile is copied through a small buffer whose rows are a cache line longer, so that the elements
    of a column do not share one set of the cache, as they do in a matrix of 1024 columns.
    """
    import numpy as np

    rows, columns = matrix.shape
    if min(rows, columns) < _NARROW:
        return np.ascontiguousarray(matrix.T)
    transposed = np.empty((columns, rows), matrix.dtype)
    height = max(1, _RUN // matrix.itemsize)
    width = min(columns, _COLUMNS)
    tile = np.empty((height, width + max(1, _LINE // matrix.itemsize)), matrix.dtype)
    for left in range(0, columns, width):
        for top in range(0, rows, height):
            block = matrix[top : top + height, left : left + width]
            view = tile[: block.shape[0], : block.shape[1]]
            view[...] = block
            transposed[left : left + width, top : top + height] = view.T
    return transposed


class Rule(Protocol):
    """One invertible change of a leaf.

    A rule changes an unread leaf into another unread leaf; the only values read are scalars that become plain
    numbers (an optimizer's learning rate is a tensor in TensorFlow and a float in PyTorch).
    """

    @property
    def name(self) -> str:
        """The rule's name in reports."""
        ...

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the changed leaf; raise MappingError if the rule does not fit it."""
        ...

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the rule that reverses this one on its result for `source`."""
        ...


class Keep(NamedTuple):
    """Change nothing."""

    name: str = "keep"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf itself."""
        return leaf

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return itself."""
        return self


class Permute(NamedTuple):
    """Reorder the axes: axis i of the result is axis `axes[i]` of the source."""

    axes: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return "transpose" for matrices, otherwise the order of the axes."""
        return "transpose" if self.axes == (1, 0) else f"permute {','.join(map(str, self.axes))}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and the permuted shape."""
        return dtype, tuple(shape[axis] for axis in self.axes)

    @property
    def cut_axis(self) -> int:
        """The axis along which parts of an array are permuted one by one."""
        return self.axes[0]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the permuted array, several times faster than NumPy's own copy for large arrays."""
        return permute_array(array, self.axes)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf with permuted axes; if this undoes an earlier permutation, return its source."""
        if not isinstance(leaf, Leaf) or len(leaf.shape) != len(self.axes):
            shape = leaf.shape if isinstance(leaf, Leaf) else "no tensor"
            raise MappingError(
                f"{self.name} requires {format_count(len(self.axes), 'axis', 'axes')}", found=str(shape)
            )
        before = leaf.source
        if isinstance(before, TransformedSource) and before.op == Permute(self.inverse_axes):
            return replace(leaf, shape=before.shape, source=before.base, use=use_after(leaf.use, self))
        return transform_leaf(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the permutation that restores the order."""
        return Permute(self.inverse_axes)

    @property
    def inverse_axes(self) -> tuple[int, ...]:
        """The order of axes that undoes this one."""
        return tuple(self.axes.index(axis) for axis in range(len(self.axes)))


class Reshape(NamedTuple):
    """Reshape without changing the elements."""

    shape: Shape

    @property
    def name(self) -> str:
        """Return the new shape."""
        return f"reshape {list(self.shape)}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:  # noqa: ARG002
        """Return the same dtype and the new shape."""
        return dtype, self.shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the reshaped array."""
        return array.reshape(self.shape)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf in the new shape; raise MappingError unless the sizes match."""
        if not isinstance(leaf, Leaf) or replace(leaf, shape=self.shape).size != leaf.size:
            raise MappingError(
                f"{self.name} does not match the shape", found=str(getattr(leaf, "shape", "a value"))
            )
        return transform_leaf(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the reshape to the source's shape."""
        return Reshape(source.shape) if isinstance(source, Leaf) else Keep()


class Cast(NamedTuple):
    """Convert the elements to another type, exactly; with `rounded`, rounding is allowed."""

    dtype: str
    rounded: bool = False

    @property
    def name(self) -> str:
        """Return the new type."""
        return f"{'round' if self.rounded else 'cast'} to {self.dtype}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:  # noqa: ARG002
        """Return the new dtype and the same shape."""
        return self.dtype, shape

    @property
    def cut_axis(self) -> int:
        """The axis of an array's elements in order: each is converted by itself."""
        return -1

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the converted array; raise MappingError if a value would change."""
        converted = array.astype(dtypes.numpy_dtype(self.dtype))
        back = converted.astype(array.dtype)
        if not self.rounded and not ((back == array) | ((back != back) & (array != array))).all():
            raise MappingError(f"{self.name} would change a value", found=str(array.reshape(-1)[:1]))
        return converted

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf in the new type."""
        if not isinstance(leaf, Leaf):
            raise MappingError(f"{self.name} requires a tensor")
        return leaf if leaf.dtype == self.dtype else transform_leaf(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the cast to the source's type."""
        return Cast(source.dtype) if isinstance(source, Leaf) else Keep()


class ToValue(NamedTuple):
    """Convert a tensor of one element to a plain number.

    `exact` is the number that the tensor may be rounded from: it is returned if it rounds to the
    element.
    """

    name: str = "as a number"
    exact: float | bool | None = None

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the value leaf; this reads the only element."""
        if isinstance(leaf, ValueLeaf):
            return leaf
        if leaf.size != 1:
            raise MappingError("only a tensor with one element can become a number", found=str(leaf.shape))
        if leaf.dtype == "string":
            return ValueLeaf(_decode_text(leaf.strings()[0]), leaf.role)
        value: Plain = leaf.array().reshape(-1)[0].item()
        if isinstance(self.exact, float) and leaf.dtype == "float32" and _round_float32(self.exact) == value:
            value = self.exact
        return ValueLeaf(value, leaf.role)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the conversion to a tensor of the source's type and shape."""
        return ToTensor(source.dtype, source.shape) if isinstance(source, Leaf) else Keep()


class ToTensor(NamedTuple):
    """Convert a plain number to a tensor of one element."""

    dtype: str
    shape: Shape = ()

    @property
    def name(self) -> str:
        """Return the type of the tensor."""
        return f"as {self.dtype}"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the tensor leaf; raise MappingError if the number does not fit its type."""
        if isinstance(leaf, Leaf):
            return Cast(self.dtype).leaf(leaf)
        if isinstance(leaf.value, bool) or not isinstance(leaf.value, int | float):
            raise MappingError("only a number can become a tensor", found=repr(leaf.value)[:40])
        return Leaf(self.dtype, self.shape, Inline(_pack_number(leaf.value, self.dtype)), "", leaf.role)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the conversion to a number."""
        return ToValue() if isinstance(source, ValueLeaf) else Keep()


def _decode_text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _round_float32(value: float) -> float | None:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return None
    return rounded


_CODES = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def _pack_number(value: float, dtype: str) -> bytes:
    try:
        return struct.pack(_CODES[dtype], value if dtype.startswith("float") else int(value))
    except (KeyError, struct.error, OverflowError) as error:
        raise MappingError(f"{value} is not a valid {dtype}") from error


_TURNED_ROLES = {"in_out": "out_in", "out_in": "in_out"}


def use_after(use: WeightUse | None, op: ArrayOp) -> WeightUse | None:
    """Return what is recorded of a weight after an operation; its role in a product follows its axes."""
    if use is None or not use.role or isinstance(op, Cast | Scale):
        return use
    return use._replace(role=_TURNED_ROLES.get(use.role, "") if op == Permute((1, 0)) else "")


def transform_leaf(leaf: Leaf, op: ArrayOp) -> Leaf:
    """Return the leaf after one operation, which is executed when the leaf is read."""
    dtype, shape = op.output(leaf.dtype, leaf.shape)
    source = TransformedSource(leaf.source, leaf.dtype, leaf.shape, op)
    return replace(leaf, dtype=dtype, shape=shape, source=source, use=use_after(leaf.use, op))


@dataclass(frozen=True, slots=True)
class Chain:
    """A sequence of rules."""

    rules: tuple[Rule, ...]

    @property
    def name(self) -> str:
        """Return the names of the rules, except those that change nothing."""
        return ", ".join(r.name for r in self.rules if not isinstance(r, Keep)) or "keep"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf after all rules, in order."""
        for rule in self.rules:
            leaf = rule.leaf(leaf)
        return leaf

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the inverses in reverse order."""
        undo: list[Rule] = []
        for rule in self.rules:
            undo.append(rule.inverse(source))
            source = rule.leaf(source)
        return Chain(tuple(reversed(undo)))


def compose_rules(first: Rule, second: Rule) -> Rule:
    """Return one rule for two; a permutation and its inverse cancel out, as a part and its slice do.

    A permutation comes before the place of a part in a whole tensor.
    """
    steps = list(rule_steps(first))
    for step in rule_steps(second):
        last = steps[-1] if steps else None
        if isinstance(last, Permute) and isinstance(step, Permute) and last.inverse_axes == step.axes:
            steps.pop()
        elif isinstance(last, ConcatPart) and isinstance(step, Permute):
            moved = last._replace(axis=step.axes.index(last.axis))
            steps = [*rule_steps(compose_rules(chain_rules(*steps[:-1]), step)), moved]
        elif isinstance(last, ConcatPart) and isinstance(step, AxisSlice) and tuple(last) == tuple(step):
            steps.pop()
        else:
            steps.append(step)
    return steps[0] if len(steps) == 1 else Chain(tuple(steps)) if steps else KEEP


def rule_steps(rule: Rule) -> tuple[Rule, ...]:
    """Return the steps of a rule in order, except those that change nothing."""
    if isinstance(rule, Chain):
        return tuple(step for rule in rule.rules for step in rule_steps(rule))
    return () if isinstance(rule, Keep) else (rule,)


def chain_rules(*rules: Rule) -> Rule:
    """Return one rule for any number of rules, in order."""
    chain: Rule = KEEP
    for rule in rules:
        chain = compose_rules(chain, rule)
    return chain


KEEP = Keep()
TRANSPOSE = Permute((1, 0))


class Scale(NamedTuple):
    """Multiply by `factor`, or divide by it; in float64, rounded once.

    The inverse restores the numbers except for this rounding: a float32 divided by 0.001 and
    multiplied by it can differ by one unit in the last place.
    """

    factor: float
    divide: bool = False

    @property
    def name(self) -> str:
        """Return the operation and its factor."""
        return f"divided by {self.factor:.9g}" if self.divide else f"times {self.factor:.9g}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the scaled array in the same type."""
        wide = array.astype("float64")
        return (wide / self.factor if self.divide else wide * self.factor).astype(array.dtype)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the scaled leaf; raise MappingError unless it is a floating-point tensor."""
        if not isinstance(leaf, Leaf) or "float" not in leaf.dtype:
            raise MappingError(
                f"{self.name} requires a floating-point tensor", found=getattr(leaf, "dtype", "a value")
            )
        return transform_leaf(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the inverse, exact except for rounding."""
        return Scale(self.factor, not self.divide)


class FixedValue(NamedTuple):
    """Replace the leaf with a number determined by its place, whatever the leaf contains."""

    value: Plain

    @property
    def name(self) -> str:
        """Return the number."""
        return f"is {self.value!r}"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the number as a value leaf."""
        return ValueLeaf(self.value, leaf.role)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the rule that restores the source's number."""
        return FixedValue(source.value) if isinstance(source, ValueLeaf) else Keep()


class Fill(NamedTuple):
    """Become a tensor of the same shape with one number: a parameter that the source's program implies."""

    value: float

    @property
    def name(self) -> str:
        """Return the number."""
        return f"filled with {self.value:g}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return an array of the number."""
        import numpy as np

        return np.full_like(array, self.value)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the filled leaf; raise MappingError for a number, which has no shape."""
        if not isinstance(leaf, Leaf):
            raise MappingError(f"{self.name} requires a tensor")
        return transform_leaf(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Raise MappingError: the source's numbers are gone."""
        raise MappingError("a filled tensor is not reversible")


class AxisSlice(NamedTuple):
    """Take the entries `start` to `stop` of an axis of `whole` entries: several tensors are stored as one."""

    axis: int
    start: int
    stop: int
    whole: int

    @property
    def name(self) -> str:
        """Return the range of entries."""
        return f"take {self.start}:{self.stop} of {self.whole} on axis {self.axis}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and the narrower shape."""
        return dtype, (*shape[: self.axis], self.stop - self.start, *shape[self.axis + 1 :])

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the taken part."""
        return array[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the part as a leaf; raise MappingError unless the axis is as long as the rule requires."""
        return transform_leaf(_require_length(self, leaf, self.axis, self.whole), self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that puts the part back in its place."""
        return ConcatPart(*self)


class ConcatPart(NamedTuple):
    """Become the entries `start` to `stop` of an axis of `whole` entries; other parts add the rest.

    The result is unfinished until all parts are present (see apply_plan).
    """

    axis: int
    start: int
    stop: int
    whole: int

    @property
    def name(self) -> str:
        """Return the range of entries in the whole tensor."""
        return f"into {self.start}:{self.stop} of {self.whole} on axis {self.axis}"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the unfinished whole; raise MappingError unless the part is as long as its place."""
        part = _require_length(self, leaf, self.axis, self.stop - self.start)
        shape = (*part.shape[: self.axis], self.whole, *part.shape[self.axis + 1 :])
        position = (self.start, self.stop, part.source)
        return replace(part, shape=shape, source=ConcatSource(part.dtype, shape, self.axis, (position,)))

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that extracts the part again."""
        return AxisSlice(*self)


class BlockOrder(NamedTuple):
    """Reorder the equal blocks of an axis: block i of the result is `order[i]`."""

    axis: int
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        """Return the order of the blocks."""
        return f"blocks {','.join(map(str, self.order))} on axis {self.axis}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the array with its blocks in the new order."""
        import numpy as np

        if len(self.order) == array.shape[self.axis]:
            return np.take(array, self.order, self.axis)
        blocks = np.split(array, len(self.order), self.axis)
        return np.concatenate([blocks[n] for n in self.order], self.axis)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the reordered leaf; raise MappingError unless the axis divides into that many blocks."""
        if (
            not isinstance(leaf, Leaf)
            or len(leaf.shape) <= self.axis
            or leaf.shape[self.axis] % len(self.order)
        ):
            raise MappingError(
                f"{self.name} does not match the shape", found=str(getattr(leaf, "shape", "a value"))
            )
        return transform_leaf(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that restores the order of the blocks."""
        return BlockOrder(self.axis, tuple(self.order.index(n) for n in range(len(self.order))))


class ChannelOrder(NamedTuple):
    """Reorder an axis of flattened images, part by part, to channels "first" or "last".

    `parts` are (places, channels) of each image; (1, n) stays unchanged.
    """

    axis: int
    to: str
    parts: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """Return the parts and the new position of their channels."""
        spelled = ",".join(f"{places}x{channels}" for places, channels in self.parts)
        return f"channels {self.to} {spelled} on axis {self.axis}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the array with each part in the other order."""
        import numpy as np

        done, start = [], 0
        for places, channels in self.parts:
            stop = start + places * channels
            part = array[(slice(None),) * self.axis + (slice(start, stop),)]
            if places > 1 and channels > 1:
                sizes = (places, channels) if self.to == "first" else (channels, places)
                split = part.reshape((*part.shape[: self.axis], *sizes, *part.shape[self.axis + 1 :]))
                part = split.swapaxes(self.axis, self.axis + 1).reshape(part.shape)
            done.append(part)
            start = stop
        return done[0] if len(done) == 1 else np.concatenate(done, self.axis)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the reordered leaf; raise MappingError unless the parts are as long as the axis."""
        whole = sum(places * channels for places, channels in self.parts)
        return transform_leaf(_require_length(self, leaf, self.axis, whole), self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that restores the other order."""
        return self._replace(to="last" if self.to == "first" else "first")


class SumTerm(NamedTuple):
    """Become one of `of` terms that the target is the sum of, such as the two biases of a torch cell.

    A floating-point sum cannot be split into its terms again: they are kept with the other data
    without a place in the target.
    """

    of: int

    @property
    def name(self) -> str:
        """Return the number of terms in the sum."""
        return f"one of {self.of} terms"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the unfinished sum."""
        if not isinstance(leaf, Leaf):
            raise MappingError("only tensors can be added")
        return replace(leaf, source=SumSource(leaf.dtype, leaf.shape, self.of, (leaf.source,)))

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Raise MappingError: a sum does not record its terms."""
        raise MappingError("a sum alone is not reversible")


class ConcatSource(NamedTuple):
    """The source of a concatenated tensor: each part is the entries `start` to `stop` of one axis."""

    dtype: str
    shape: Shape
    axis: int
    parts: tuple[tuple[int, int, Source], ...]

    @property
    def finished(self) -> bool:
        """Return whether the parts cover the axis, each entry once."""
        ends = [0, *(stop for _, stop, _ in self.parts)]
        return [start for start, _, _ in self.parts] == ends[:-1] and ends[-1] == self.shape[self.axis]

    def merged(self, other: object) -> ConcatSource | None:
        """Return the source merged with the parts of another one of the same tensor, otherwise None."""
        if not isinstance(other, ConcatSource) or self[:3] != other[:3]:
            return None
        return self._replace(parts=tuple(sorted((*self.parts, *other.parts), key=lambda part: part[:2])))

    def read(self) -> Buffer:
        """Return the whole tensor's bytes; raise MappingError while parts are missing."""
        if not self.finished:
            raise MappingError("the parts do not cover the whole tensor")
        before = (slice(None),) * self.axis
        parts = (((*before, slice(start, stop)), part) for start, stop, part in self.parts)
        return combine_parts(self.dtype, self.shape, parts)


class SumSource(NamedTuple):
    """The source of a tensor that is a sum of `needed` terms."""

    dtype: str
    shape: Shape
    needed: int
    terms: tuple[Source, ...]

    @property
    def finished(self) -> bool:
        """Return whether all terms are present."""
        return len(self.terms) == self.needed

    def merged(self, other: object) -> SumSource | None:
        """Return the source merged with the terms of another one of the same tensor, otherwise None."""
        if not isinstance(other, SumSource) or self[:3] != other[:3]:
            return None
        return self._replace(terms=(*self.terms, *other.terms))

    def read(self) -> Buffer:
        """Return the sum's bytes; raise MappingError while terms are missing."""
        import numpy as np

        if not self.finished:
            raise MappingError("terms of a sum are missing")
        # Last term first: a constant after the terms of a file may cancel one of them exactly.
        last = reversed(self.terms)
        first, *others = (as_array(term.read(), self.dtype, self.shape) for term in last)
        total = np.array(first)
        for term in others:
            total += term
        return total.reshape(-1).view(np.uint8).data


Unfinished = ConcatSource | SumSource


def unfinished_source(leaf: Leaf | ValueLeaf) -> Unfinished | None:
    """Return the unfinished source of a concatenated or summed tensor, None for any other leaf."""
    source = leaf.source if isinstance(leaf, Leaf) else None
    return source if isinstance(source, ConcatSource | SumSource) else None


def merge_parts(one: Leaf | ValueLeaf, other: Leaf | ValueLeaf) -> Leaf | None:
    """Return the leaf merged from two unfinished ones, None if they belong to different tensors."""
    first, second = unfinished_source(one), unfinished_source(other)
    source = first.merged(second) if first is not None else None
    return replace(one, source=source) if source is not None and isinstance(one, Leaf) else None


def is_part(rule: Rule) -> bool:
    """Return whether the rule's result needs other parts to be complete."""
    return isinstance((KEEP, *rule_steps(rule))[-1], ConcatPart | SumTerm)


def is_cut(rule: Rule) -> bool:
    """Return whether the rule extracts a part of a tensor whose rest goes elsewhere."""
    return any(isinstance(step, AxisSlice) for step in rule_steps(rule))


def constant_tensor(dtype: str, shape: Shape, value: float, name: str = "", role: Role = "parameter") -> Leaf:
    """Return a tensor filled with one number: a value that one framework stores and the other implies.

    Args:
        dtype: the element type.
        shape: the shape.
        value: the number.
        name: the stored name.
        role: what the tensor is in the model.
    """
    import numpy as np

    return Leaf(dtype, shape, Inline(np.full(shape, value, dtypes.numpy_dtype(dtype)).tobytes()), name, role)


def slice_rule(start: int, stop: int, whole: int, axis: int = 0) -> Rule:
    """Return the rule that takes these entries of an axis, or an empty rule for the whole axis."""
    return KEEP if (start, stop) == (0, whole) else AxisSlice(axis, start, stop, whole)


def _require_length(rule: Rule, leaf: Leaf | ValueLeaf, axis: int, length: int) -> Leaf:
    if not isinstance(leaf, Leaf) or len(leaf.shape) <= axis or leaf.shape[axis] != length:
        raise MappingError(
            f"{rule.name} does not match the shape", found=str(getattr(leaf, "shape", "a value"))
        )
    return leaf


@dataclass(frozen=True, slots=True)
class Move:
    """The conversion of one leaf: source path, target path, rule. A source may have several targets."""

    source: Path
    target: Path
    rule: Rule


@dataclass(frozen=True, slots=True)
class MoveList:
    """A whole mapping: its moves in target order, and its assumptions."""

    __repr__ = describe_record

    moves: tuple[Move, ...]
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MappingEntry:
    """One line of the report: display paths, the rule's name, shapes before and after.

    `by` is the evidence for the pair, None if the target uses the source's own names.
    """

    source: str
    target: str
    rule: str
    shape_in: tuple[int, ...]
    shape_out: tuple[int, ...]
    by: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "source": self.source,
            "target": self.target,
            "rule": self.rule,
            "shape_in": list(self.shape_in),
            "shape_out": list(self.shape_out),
            **({} if self.by is None else {"by": self.by}),
        }


@dataclass(frozen=True, slots=True)
class MappingReport:
    """All sources and their targets; `unused` sources and `missing` targets make a conversion fail.

    `remedy` is the option with which what is mapped is written.
    """

    __repr__ = describe_record

    mapped: tuple[MappingEntry, ...]
    unused: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    remedy: str = "--allow-missing"

    @property
    def complete(self) -> bool:
        """Return whether nothing is left over on either side."""
        return not self.unused and not self.missing

    def shown(self, glob: str | None) -> MappingReport:
        """Return the report with only the moves that have a matching path; raise UsageError without any."""
        keep = compile_glob(glob)
        kept = tuple(move for move in self.mapped if keep(move.source) or keep(move.target))
        if glob is not None and not kept:
            raise no_match_error(glob, [path for move in self.mapped for path in (move.source, move.target)])
        return replace(self, mapped=kept)


Settings = Mapping[str, Mapping[str, float | bool | str | None]]


class Label(NamedTuple):
    """Name and role of a leaf in the new tree; the fields are those of Leaf.

    Without a `key` the leaf is identified by its name.
    """

    role: Role
    name: str | None = None
    of: Path | None = None
    slot: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The conversion of one tree to another: moves in the target's order, and additional data for the target.

    `added` are leaves without a source leaf (an index list, a default); those that matter for
    training are listed in `assumed`. `missing` are targets without a source; `consumed` are source
    leaves that the target implies without an entry, or that have no effect there. `aliases` are
    further paths of a target, `labels` its role and owner where they differ from the source's. `told`
    are settings by optimizer that the target cannot store and its sidecar records, `partly` source
    leaves of which a part has no place in it. `kept` are source leaves that belong neither to a
    network nor to an optimizer and have no place in the target: the sidecar, and the file beside it,
    keep them.
    """

    moves: tuple[Move, ...]
    added: Mapping[Path, Leaf | ValueLeaf] = field(default_factory=dict)
    containers: Mapping[Path, Container] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    consumed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    aliases: Mapping[Path, tuple[Path, ...]] = field(default_factory=dict)
    labels: Mapping[Path, Label] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    partly: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()


def apply_plan(tree: Tree, plan: Plan) -> Tree:
    """Return the tree that the plan makes of `tree`; its leaves are unread.

    Raise MappingError if two leaves have the same target path, so that one would be lost, unless they
    are parts of one tensor; and if parts are missing.
    """
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases = {path: tuple(map(Alias, others)) for path, others in plan.aliases.items()}
    first: dict[tuple[Path, str], Path] = {}
    for move in plan.moves:
        changed = move.rule.leaf(tree[move.source])
        if unfinished_source(changed) is not None:
            label = plan.labels.get(move.target)
            leaves[move.target] = _merge_part(leaves.get(move.target), changed, label, move.target)
            continue
        before = first.setdefault((move.source, move.rule.name), move.target)
        # Parameters with shared storage stay shared; torch's per-parameter step does not, whatever role a
        # format without optimizers assigned to it.
        weight = isinstance(changed, Leaf) and changed.role == "parameter" and changed.shape
        if before is not move.target and weight:
            more = aliases.pop(move.target, ())
            shared = Alias(move.target, display(move.target))
            aliases[before] = (*aliases.get(before, ()), shared, *more)
        elif move.target in leaves:
            raise MappingError("two entries have the same place in the target", path=display(move.target))
        else:
            leaves[move.target] = _apply_label(changed, plan.labels.get(move.target))
    for path, leaf in plan.added.items():
        if unfinished_source(leaf) is not None:
            leaves[path] = _merge_part(leaves.get(path), leaf, plan.labels.get(path), path)
            continue
        if path in leaves:
            raise MappingError("two entries have the same place in the target", path=display(path))
        leaves[path] = _apply_label(leaf, plan.labels.get(path))
    _require_finished(leaves)
    return Tree(leaves, aliases, plan.containers)


def _merge_part(
    before: Leaf | ValueLeaf | None, part: Leaf | ValueLeaf, label: Label | None, target: Path
) -> Leaf | ValueLeaf:
    if before is None:
        return _apply_label(part, label)
    whole = merge_parts(before, part)
    if whole is None:
        raise MappingError("the parts of a tensor do not fit together", path=display(target))
    return whole


def _require_finished(leaves: Mapping[Path, Leaf | ValueLeaf]) -> None:
    for path, leaf in leaves.items():
        source = unfinished_source(leaf)
        if source is not None and not source.finished:
            raise MappingError("a part of the tensor has no source", path=display(path))


def _apply_label(leaf: Leaf | ValueLeaf, label: Label | None) -> Leaf | ValueLeaf:
    if not isinstance(leaf, Leaf):
        return leaf
    if label is None:
        # A state_dict contains plain tensors: whether one is a trained parameter is recorded only in the
        # module.
        return replace(leaf, of=None, trainable=None)
    name = leaf.name if label.name is None else label.name
    key = label.key or name or leaf.key
    return replace(leaf, key=key, role=label.role, of=label.of, slot=label.slot, trainable=None, name=name)


def compose_plans(first: Plan, second: Plan) -> Plan:
    """Return the composition of two plans: `second` maps the result of `first`."""
    ways: dict[Path, list[Move]] = {}
    for move in first.moves:
        ways.setdefault(move.target, []).append(move)
    moves = [
        Move(way.source, m.target, compose_rules(way.rule, m.rule))
        for m in second.moves
        for way in _follow_moves(m, ways)
    ]
    added = {m.target: m.rule.leaf(first.added[m.source]) for m in second.moves if m.source in first.added}
    consumed = [move.source for path in second.consumed for move in ways.get(path, ())]
    used = {move.source for move in second.moves} | set(second.consumed)
    lost = [move.source for move in first.moves if is_cut(move.rule) and move.target not in used]
    return Plan(
        tuple(moves),
        added | dict(second.added),
        second.containers,
        (*first.assumed, *second.assumed),
        (*first.missing, *second.missing),
        (*first.consumed, *consumed),
        (*first.notes, *second.notes),
        second.aliases,
        second.labels,
        {**first.settings, **second.settings},
        (*first.partly, *dict.fromkeys(lost)),
        (*first.kept, *(move.source for path in second.kept for move in ways.get(path, ()))),
    )


def relocate_sources(plan: Plan, sources: Mapping[Path, Path]) -> Plan:
    """Return the plan for a tree whose leaves are at `sources` of their paths in this plan's tree."""
    return replace(
        plan,
        moves=tuple(replace(move, source=sources[move.source]) for move in plan.moves),
        consumed=tuple(sources[path] for path in plan.consumed),
        partly=tuple(sources[path] for path in plan.partly),
        kept=tuple(sources[path] for path in plan.kept),
    )


def _follow_moves(move: Move, ways: Mapping[Path, list[Move]]) -> list[Move]:
    """Return a plan's targets by the source paths of another plan."""
    earlier = ways.get(move.source, [])
    # The parts of one tensor are moved together, or one to its own place; of several equal records, the first
    # is used.
    if not any(is_part(way.rule) for way in earlier):
        return earlier[:1]
    composed = [(way, rule_steps(compose_rules(way.rule, move.rule))[:-1]) for way in earlier]
    whole = [
        way for way, steps in composed if not any(isinstance(step, ConcatPart | SumTerm) for step in steps)
    ]
    return whole or earlier[:1]  # a part that is left alone cannot be read


_NUMBERS = r"(\d{1,18}(?:,\d{1,18})*)"
_SIZES = r"(\d{1,18}(?:, ?\d{1,18})*)"
_PLACE = r"(\d{1,18}):(\d{1,18}) of (\d{1,18}) on axis (\d{1,2})"
# Separator between two rules of a chain; a shape has its commas in brackets.
_NEXT = deferred.compile(r", (?![^\[]*\])")


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


_SPELLINGS: tuple[tuple[str, Callable[..., Rule | None]], ...] = (
    ("keep", lambda: KEEP),
    ("transpose", lambda: TRANSPOSE),
    (f"permute {_NUMBERS}", lambda axes: _parse_permutation(_parse_numbers(axes))),
    (rf"reshape \[(?:{_SIZES})?\]", lambda shape: Reshape(_parse_numbers(shape or ""))),
    (
        f"take {_PLACE}",
        lambda start, stop, whole, axis: AxisSlice(int(axis), int(start), int(stop), int(whole)),
    ),
    (
        f"into {_PLACE}",
        lambda start, stop, whole, axis: ConcatPart(int(axis), int(start), int(stop), int(whole)),
    ),
    (
        f"blocks {_NUMBERS} on axis (\\d{{1,2}})",
        lambda order, axis: _parse_blocks(_parse_numbers(order), int(axis)),
    ),
    (
        r"channels (first|last) (\d{1,9}x\d{1,9}(?:,\d{1,9}x\d{1,9})*) on axis (\d{1,2})",
        lambda to, parts, axis: ChannelOrder(int(axis), to, _parse_image_parts(parts)),
    ),
    (r"cast to (\w+)", lambda dtype: Cast(dtype) if dtype in dtypes.BY_NAME else None),
)


def parse_rule(text: str) -> Rule | None:
    """Return the rule with this name; None if the text is not the complete name of a rule."""
    steps = [_parse_step(step) for step in _NEXT.split(text)]
    known = [step for step in steps if step is not None]
    return chain_rules(*known) if len(known) == len(steps) else None


def _parse_step(text: str) -> Rule | None:
    for pattern, constructor in _SPELLINGS:
        match = re.fullmatch(pattern, text, re.ASCII)
        if match is not None:
            return constructor(*match.groups())
    return None


def _parse_image_parts(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (part.split("x") for part in text.split(","))
    return tuple((int(places), int(channels)) for places, channels in pairs)


def _parse_permutation(axes: tuple[int, ...]) -> Rule | None:
    return Permute(axes) if sorted(axes) == list(range(len(axes))) else None


def _parse_blocks(order: tuple[int, ...], axis: int) -> Rule | None:
    return BlockOrder(axis, order) if sorted(order) == list(range(len(order))) else None


def canonical_tree(tree: Tree, moves: MoveList) -> Tree:
    """Return the canonical agent: every bound leaf under its canonical path, unread.

    Several leaves with one target are its parts, or a repeated number (an update count per parameter); raise
    MappingError if the numbers differ.
    """
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    for move in moves.moves:
        leaf = move.rule.leaf(tree[move.source])
        whole = merge_parts(leaves[move.target], leaf) if move.target in leaves else None
        if whole is not None:
            leaves[move.target] = whole
        elif move.target in leaves:
            _require_equal(leaves[move.target], leaf, display(move.target), tree.names[move.source])
        else:
            leaves[move.target] = (
                replace(leaf, of=None) if isinstance(leaf, Leaf) and leaf.of is not None else leaf
            )
    return Tree(leaves)


def _require_equal(one: Leaf | ValueLeaf, other: Leaf | ValueLeaf, target: str, source: str) -> None:
    first, second = (ToValue().leaf(leaf) for leaf in (one, other))
    if first != second:
        raise MappingError(
            f"{target} must be a single number, but the checkpoint contains several",
            path=source,
            expected=str(getattr(first, "value", first)),
            found=str(getattr(second, "value", second)),
            hint="convert with --optimizer none to leave optimizers out",
        )
