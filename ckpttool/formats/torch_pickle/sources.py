"""Where the bytes of a pickled tensor or array are, and what becomes of them when they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpttool import dtypes, limits
from ckpttool.errors import UnsupportedError
from ckpttool.formats.torch_pickle.views import Tensor
from ckpttool.source import Buffer, Deflated, Inline, Shape, Source, Span, Strided, Swapped, Transformed
from ckpttool.wire import pickle_numpy

if TYPE_CHECKING:
    import numpy as np


class Change(NamedTuple):
    """What a stored array becomes when it is read: one numpy operation that keeps the element type.

    "conj halves" and "neg halves" take complex32, which numpy lacks, as pairs of float16.
    """

    kind: Literal["conj", "neg", "conj halves", "neg halves", "byteswap", "reverse"]

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype; only "reverse" (Fortran order) turns the shape around."""
        return dtype, shape[::-1] if self.kind == "reverse" else shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the changed array."""
        if self.kind == "reverse":
            return array.T
        if self.kind == "byteswap":
            return array.byteswap()
        if self.kind == "conj halves":
            turned = array.copy()
            turned[..., 1] *= -1
            return turned
        return array.conj() if self.kind == "conj" else -array


class Cast(NamedTuple):
    """The same numbers in another element type: what `Tensor.to(dtype)` does when torch rebuilds a tensor."""

    dtype: str

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:  # noqa: ARG002 - the contract's
        """Return the new dtype."""
        return self.dtype, shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the converted array."""
        return array.astype(dtypes.numpy_dtype(self.dtype))


class Unreadable(NamedTuple):
    """The source of a tensor that is listed and not read; `read` says why."""

    file: str | None
    reason: str
    hint: str | None = None

    def read(self) -> Buffer:
        """Raise UnsupportedError."""
        raise UnsupportedError(self.reason, file=self.file, hint=self.hint)


class Budget:
    """What the tensors of one pickle may be expanded to when all are read, by what is stored for them.

    Views may show a few bytes many times, each less often than the limit on one tensor allows; and a
    compressed storage is unpacked again for a view of a part of it, unless the one before was of the same.
    """

    def __init__(self) -> None:
        """Nothing is stored and nothing shown yet."""
        self.allowed = limits.current()
        self.stored = self.shown = 0
        self.last: object = None

    def source(self, tensor: Tensor, nbytes: int, *, big: bool, first: bool) -> Source:
        """Return where the tensor's `nbytes` bytes are; `first` says that its storage is a new one.

        `big` says that the writer's machine was big-endian.
        """
        data, whole = tensor.storage.bytes, tensor.storage.nbytes
        if first and not tensor.storage.part:
            self.stored += data.base.length if isinstance(data, Deflated) else whole
        again = isinstance(data, Deflated) and self.last is not data
        self.shown += max(nbytes, whole if again else 0)
        self.last = data
        if self._beyond(self.shown, self.stored):
            return _unreadable(tensor, f"tensors would expand {self.stored:,} stored bytes to {self.shown:,}")
        if self._beyond(nbytes, whole):
            return _unreadable(tensor, f"a view would expand {whole:,} stored bytes to {nbytes:,}")
        return _source(tensor, nbytes, big=big)

    def _beyond(self, nbytes: int, stored: int) -> bool:
        return nbytes > self.allowed.expanded_bytes and nbytes > self.allowed.expanded_ratio * stored


def _unreadable(tensor: Tensor, reason: str) -> Unreadable:
    data = tensor.storage.bytes
    base = data.base if isinstance(data, Deflated) else data
    hint = "ckpttool --limit expanded_bytes=N ... allows more, for a file that you trust"
    return Unreadable(None if isinstance(base, Inline) else base.file.path, reason, hint)


def _source(tensor: Tensor, nbytes: int, *, big: bool) -> Source:
    width = dtypes.component_size(tensor.dtype)
    if big and width != dtypes.component_size(tensor.storage.dtype or "uint8"):
        # torch turns bytes around by the storage's type, not the tensor's (serialization.py, load_tensor).
        where = tensor.storage.bytes
        file = where.file.path if isinstance(where, Span) else None
        return Unreadable(file, f"torch misreads {tensor.dtype} in an untyped storage that is big-endian")
    found = _stored(tensor, nbytes, width if big else 0)
    dtype, shape = tensor.dtype, tensor.shape
    halves = dtype == "complex32"
    if halves:
        dtype, shape = "float16", (*shape, 2)
    if tensor.conj:
        found = Transformed(found, dtype, shape, Change("conj halves" if halves else "conj"))
    if tensor.neg:
        found = Transformed(found, dtype, shape, Change("neg halves" if halves else "neg"))
    return found


def _stored(tensor: Tensor, nbytes: int, width: int) -> Source:
    data, itemsize = tensor.storage.bytes, dtypes.BY_NAME[tensor.dtype].itemsize
    if not nbytes:
        return Inline(b"")
    view = Strided(data, itemsize, tensor.shape, tensor.strides, tensor.offset, width if width > 1 else 0)
    if nbytes == tensor.storage.nbytes and not tensor.offset and view.contiguous():
        if width <= 1:
            return data
        return Swapped(data, width) if isinstance(data, Span) else view
    return view


def array_source(parts: pickle_numpy.Parts) -> Source:
    """Return a pickled numpy array's bytes in C order, little-endian."""
    name = parts.type.name or ""
    found: Source = Inline(bytes(parts.data))
    if parts.type.big and dtypes.BY_NAME[name].itemsize > 1:
        found = Transformed(found, name, parts.shape, Change("byteswap"))
    if parts.fortran and len(parts.shape) > 1:
        found = Transformed(found, name, parts.shape[::-1], Change("reverse"))
    return found


def cast(found: Source, stored: str, shape: Shape, dtype: str) -> Source:
    """Return the source of the same numbers as `dtype`."""
    return found if stored == dtype else Transformed(found, stored, shape, Cast(dtype))
