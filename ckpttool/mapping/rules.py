"""Rules: what one leaf goes through on its way to another tree, each with its inverse.

A rule changes an unread leaf into another unread leaf; nothing is read except the scalars that turn
into plain numbers (an optimizer's learning rate is a tensor in TensorFlow and a float in PyTorch).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ckpttool import dtypes
from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf, Plain, ValueLeaf
from ckpttool.mapping.strips import permuted
from ckpttool.shown import count
from ckpttool.source import Inline, Op, Shape, Transformed

if TYPE_CHECKING:
    import numpy as np


class Rule(Protocol):
    """One invertible change of a leaf."""

    @property
    def name(self) -> str:
        """What a report calls the rule."""
        ...

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the changed leaf; raise MappingError if the rule does not fit it."""
        ...

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the rule that undoes this one on what it made of `source`."""
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
        """Return "transpose" for matrices, else the order of the axes."""
        return "transpose" if self.axes == (1, 0) else f"permute {','.join(map(str, self.axes))}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and the permuted shape."""
        return dtype, tuple(shape[axis] for axis in self.axes)

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the permuted array, several times faster than NumPy's own copy where it is large."""
        return permuted(array, self.axes)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf with permuted axes; undoing an earlier permutation gives its source back."""
        if not isinstance(leaf, Leaf) or len(leaf.shape) != len(self.axes):
            shape = leaf.shape if isinstance(leaf, Leaf) else "no tensor"
            raise MappingError(f"{self.name} needs {count(len(self.axes), 'axis', 'axes')}", found=str(shape))
        before = leaf.source
        if isinstance(before, Transformed) and before.op == Permute(self.inverse_axes):
            return replace(leaf, shape=before.shape, source=before.base)
        return transformed(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the permutation that restores the order."""
        return Permute(self.inverse_axes)

    @property
    def inverse_axes(self) -> tuple[int, ...]:
        """The order of axes that undoes this one."""
        return tuple(self.axes.index(axis) for axis in range(len(self.axes)))


class Reshape(NamedTuple):
    """Give the same elements another shape."""

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
        """Return the leaf in the new shape; raise MappingError unless the counts agree."""
        if not isinstance(leaf, Leaf) or replace(leaf, shape=self.shape).size != leaf.size:
            raise MappingError(f"{self.name} does not fit", found=str(getattr(leaf, "shape", "a value")))
        return transformed(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the way back to the source's shape."""
        return Reshape(source.shape) if isinstance(source, Leaf) else Keep()


class Cast(NamedTuple):
    """Convert the elements, which both types hold exactly; with `rounded` the new type need not."""

    dtype: str
    rounded: bool = False

    @property
    def name(self) -> str:
        """Return the new type."""
        return f"{'round' if self.rounded else 'cast'} to {self.dtype}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:  # noqa: ARG002
        """Return the new dtype and the same shape."""
        return self.dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the converted array; raise MappingError if a number would change."""
        converted = array.astype(dtypes.numpy_dtype(self.dtype))
        back = converted.astype(array.dtype)
        if not self.rounded and not ((back == array) | ((back != back) & (array != array))).all():
            raise MappingError(f"{self.name} would change a number", found=str(array.reshape(-1)[:1]))
        return converted

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the leaf in the new type."""
        if not isinstance(leaf, Leaf):
            raise MappingError(f"{self.name} needs a tensor")
        return leaf if leaf.dtype == self.dtype else transformed(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the cast back to the source's type."""
        return Cast(source.dtype) if isinstance(source, Leaf) else Keep()


class ToValue(NamedTuple):
    """Turn a tensor of one element into a plain number.

    `exact` is the number that the tensor may have been rounded from: it is given if it rounds to that.
    """

    name: str = "as a number"
    exact: float | bool | None = None

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the value leaf; this reads the one element."""
        if isinstance(leaf, ValueLeaf):
            return leaf
        if leaf.size != 1:
            raise MappingError("only a tensor of one element is a number", found=str(leaf.shape))
        if leaf.dtype == "string":
            return ValueLeaf(_text(leaf.strings()[0]), leaf.role)
        value: Plain = leaf.array().reshape(-1)[0].item()
        if isinstance(self.exact, float) and leaf.dtype == "float32" and _rounded(self.exact) == value:
            value = self.exact
        return ValueLeaf(value, leaf.role)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the way back to a tensor of the source's type and shape."""
        return ToTensor(source.dtype, source.shape) if isinstance(source, Leaf) else Keep()


class ToTensor(NamedTuple):
    """Turn a plain number into a tensor of one element."""

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
            raise MappingError("only a number becomes a tensor", found=repr(leaf.value)[:40])
        return Leaf(self.dtype, self.shape, Inline(_packed(leaf.value, self.dtype)), "", leaf.role)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the way back to a number."""
        return ToValue() if isinstance(source, ValueLeaf) else Keep()


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _rounded(value: float) -> float | None:
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return None
    return rounded


_CODES = {"float32": "<f", "float64": "<d", "int32": "<i", "int64": "<q"}


def _packed(value: float, dtype: str) -> bytes:
    try:
        return struct.pack(_CODES[dtype], value if dtype.startswith("float") else int(value))
    except (KeyError, struct.error, OverflowError) as error:
        raise MappingError(f"{value} is no {dtype}") from error


def transformed(leaf: Leaf, op: Op) -> Leaf:
    """Return the leaf after one operation, which is done when it is read."""
    dtype, shape = op.output(leaf.dtype, leaf.shape)
    source = Transformed(leaf.source, leaf.dtype, leaf.shape, op)
    return replace(leaf, dtype=dtype, shape=shape, source=source)


@dataclass(frozen=True, slots=True)
class Chain:
    """Several rules one after the other."""

    rules: tuple[Rule, ...]

    @property
    def name(self) -> str:
        """Return the names of the rules that change something."""
        return ", ".join(r.name for r in self.rules if not isinstance(r, Keep)) or "keep"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return what the rules make of the leaf, in order."""
        for rule in self.rules:
            leaf = rule.leaf(leaf)
        return leaf

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the inverses in the opposite order."""
        undo: list[Rule] = []
        for rule in self.rules:
            undo.append(rule.inverse(source))
            source = rule.leaf(source)
        return Chain(tuple(reversed(undo)))


def chain(first: Rule, second: Rule) -> Rule:
    """Return one rule for two; a permutation and its undoing are no rule at all."""
    made = list(steps(first))
    for step in steps(second):
        last = made[-1] if made else None
        if isinstance(last, Permute) and isinstance(step, Permute) and last.inverse_axes == step.axes:
            made.pop()
        else:
            made.append(step)
    return made[0] if len(made) == 1 else Chain(tuple(made)) if made else KEEP


def steps(rule: Rule) -> tuple[Rule, ...]:
    """Return the rules that a rule is made of and that change something, in their order."""
    if isinstance(rule, Chain):
        return tuple(step for each in rule.rules for step in steps(each))
    return () if isinstance(rule, Keep) else (rule,)


def chained(*rules: Rule) -> Rule:
    """Return one rule for any number of them, in their order."""
    found: Rule = KEEP
    for rule in rules:
        found = chain(found, rule)
    return found


KEEP = Keep()
TRANSPOSE = Permute((1, 0))
