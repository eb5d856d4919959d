"""Values of TorchScript code in the place of tensors, numbers and lists that depend on tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpttool.core.deferred import NamedTuple, dataclass, field


class TensorMemory:
    """Memory that several tensors share: an operation that overwrites one changes the others.

    Parts of a tensor that do not overlap have storages of their own within `whole`. `version` counts all
    changes, `writes` those of the whole storage. `depth` is the number of conditions around its creation.
    """

    def __init__(self, depth: int, whole: TensorMemory | None = None) -> None:
        self.version, self.writes, self.depth, self.whole = 0, 0, depth, whole
        self.start = whole.writes if whole is not None else 0

    def overwrite(self) -> list[TensorMemory]:
        """Count a change and return all storages that contain this one."""
        self.writes += 1
        self.version += 1
        changed = [self]
        while (whole := changed[-1].whole) is not None:
            whole.version += 1
            changed.append(whole)
        return changed

    def is_current(self) -> bool:
        """Return whether the whole was not overwritten since this part of it was taken."""
        return self.whole is None or (self.whole.writes == self.start and self.whole.is_current())


@dataclass(eq=False, slots=True)
class TensorValue:
    """A tensor of the graph, by name; dtype and rank are None if unknown.

    `version` is that of the storage when the tensor got its values. `entry` is the input that it is.
    `wrapped` is true for a number that a traced archive stores as a tensor: as a number, it does not
    determine the type of results.
    """

    name: str
    dtype: str | None
    rank: int | None
    storage: TensorMemory
    version: int = 0
    entry: str | None = None
    wrapped: bool = False


@dataclass(eq=False, slots=True)
class NumberValue:
    """A number that depends on tensors or their shapes: a value of the graph without axes."""

    name: str
    dtype: str


class ShapeRange(NamedTuple):
    """The extents of a tensor from axis `start` to `end`."""

    tensor: TensorValue
    start: int = 0
    end: int | None = None


@dataclass(eq=False, slots=True)
class SizesValue:
    """A list of extents, of which some are those of a tensor with an unknown number of axes."""

    parts: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class PartsValue:
    """Parts of a tensor along an axis, whose number is that of the names to which they are assigned."""

    take: Callable[[int | None], list[TensorValue]]


@dataclass(eq=False, slots=True)
class InputMapping:
    """An input that is a dict: its entries become inputs when the code uses them."""

    name: str
    entries: dict[str, TensorValue] = field(default_factory=dict)


class UnknownValue(NamedTuple):
    """A variable that the branches of a condition set to different things."""

    reason: str


class IndexInputError(Exception):
    """An input contains positions: its type is int64."""


class InputShapeError(Exception):
    """The code cannot be applied to inputs of the given shapes."""


class RaisedError(Exception):
    """The code raises an exception."""
