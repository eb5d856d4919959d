"""Rules on numbers: a tensor times a number, and an entry that stands for a number of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf, Plain, ValueLeaf
from ckpttool.mapping.rules import Keep, Rule, transformed
from ckpttool.source import Shape

if TYPE_CHECKING:
    import numpy as np


class Scaled(NamedTuple):
    """Multiply by `factor`, or divide by it; in float64, rounded once.

    The inverse gives the same numbers but for that rounding: a float32 divided by 0.001 and multiplied by it
    can end one unit in its last place away.
    """

    factor: float
    divide: bool = False

    @property
    def name(self) -> str:
        """Return what is done."""
        return f"divided by {self.factor:.9g}" if self.divide else f"times {self.factor:.9g}"

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype and shape."""
        return dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the scaled array in the same type."""
        wide = array.astype("float64")
        return (wide / self.factor if self.divide else wide * self.factor).astype(array.dtype)

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the scaled leaf; raise MappingError for what is no tensor of floating point."""
        if not isinstance(leaf, Leaf) or "float" not in leaf.dtype:
            raise MappingError(f"{self.name} needs floating point", found=getattr(leaf, "dtype", "a value"))
        return transformed(leaf, self)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:  # noqa: ARG002  # the same for every leaf
        """Return the rule that undoes this one, but for rounding."""
        return Scaled(self.factor, not self.divide)


class Given(NamedTuple):
    """Become a number that the leaf's place says, whatever the leaf itself holds."""

    value: Plain

    @property
    def name(self) -> str:
        """Return the number."""
        return f"is {self.value!r}"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:
        """Return the number as a value leaf."""
        return ValueLeaf(self.value, leaf.role)

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Return the rule that says what the source said."""
        return Given(source.value) if isinstance(source, ValueLeaf) else Keep()
