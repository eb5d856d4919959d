"""Paths and leaves: what one entry of a tree is called, and what it holds before it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttool import dtypes
from ckpttool.activations import Features
from ckpttool.source import Buffer, Shape, Source, as_array, require_length

if TYPE_CHECKING:
    import numpy as np


class Key(NamedTuple):
    """One step of a path, exactly as stored: an attribute's name, a dict's key, or a list's index."""

    kind: Literal["attr", "key", "index"]
    value: str | int | float | bool | None


Path = tuple[Key, ...]
Role = Literal["parameter", "buffer", "slot", "counter", "replay", "other"]

# Keras 3 keeps some weights under private attributes; people know them by the public property.
_PUBLIC = {"_kernel": "kernel", "_embeddings": "embeddings"}


def attr(name: str) -> Key:
    """Return the step to an attribute."""
    return Key("attr", name)


def key(value: str | int | float | bool | None) -> Key:
    """Return the step to a dict's entry."""
    return Key("key", value)


def index(position: int) -> Key:
    """Return the step to a list's item."""
    return Key("index", position)


def display(path: Path) -> str:
    """Return the path as people read it: dotted keys split, Keras's private names public, joined by `/`."""
    return "/".join(_shown(step) for step in path)


def _shown(step: Key) -> str:
    if step.kind == "attr":
        return _PUBLIC.get(str(step.value), str(step.value))
    if step.kind == "key" and isinstance(step.value, str):
        return step.value.replace(".", "/")
    return str(step.value)


def exact(path: Path) -> str:
    """Return an unambiguous spelling of the path, for the rare trees where display paths collide."""
    return "".join(f".{s.value}" if s.kind == "attr" else f"[{s.value!r}]" for s in path)


def typed(path: Path) -> list[dict[str, object]]:
    """Return the path as JSON shows it: `[{"attr": "actor"}, {"index": 0}, {"key": "a/b.c"}]`."""
    return [{step.kind: step.value} for step in path]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor: shape, element type and where its bytes are.

    `key` is the name that the owning framework lists. A slot variable names its parameter by `of` and
    its kind by `slot` ("m", "v", ...). `name` is a second name that the format keeps (a variable's name).
    `features` are the orders of what its layer takes and makes, where the file's own computation records them
    (layouts/recorded_orders.py).
    """

    dtype: str
    shape: Shape
    source: Source
    key: str
    role: Role = "parameter"
    of: Path | None = None
    slot: str | None = None
    trainable: bool | None = None
    name: str | None = None
    features: Features | None = field(default=None, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """The number of bytes that `read` returns (0 for types without a fixed size)."""
        return self.size * dtypes.BY_NAME[self.dtype].itemsize

    def read(self) -> Buffer:
        """Return the contiguous little-endian bytes; strings as u64 lengths, each before its bytes."""
        return self.source.read()

    def array(self) -> np.ndarray:
        """Return the value as a numpy array of `shape` (read-only; bfloat16 and float8 via ml_dtypes)."""
        return as_array(self.read(), self.dtype, self.shape)

    def strings(self) -> list[bytes]:
        """Return the elements of a string tensor in C order; raise FormatError if there are fewer."""
        data, found, at = bytes(self.read()), [], 0
        for _ in range(self.size):
            length = int.from_bytes(data[at : at + 8], "little")
            found.append(data[at + 8 : at + 8 + length])
            at += 8 + length
            if at > len(data):
                require_length(data, at)
        return found


@dataclass(frozen=True, slots=True)
class Record:
    """An object of a class that we do not load: its name and what the file says about it, inert."""

    name: str
    summary: str = ""


Plain = None | bool | int | float | complex | str | bytes | Record


@dataclass(frozen=True, slots=True)
class ValueLeaf:
    """A value that is not a tensor: a number, a string, None, or an inert record."""

    value: Plain
    role: Role = "other"
