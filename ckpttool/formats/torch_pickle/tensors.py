"""What torch's pickles say about tensors: storages found in the archive, views checked against them.

Sources: torch/serialization.py (persistent_id, _load), torch/_utils.py (the _rebuild functions),
torch/_tensor.py (_rebuild_from_type_v2), torch/jit/_pickle.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from ckpttool import dtypes
from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.source import Buffer, Deflated, Inline, Shape, Source, Span, Strided, Swapped, Transformed
from ckpttool.source import Storage as Bytes
from ckpttool.wire import pickle_numpy
from ckpttool.wire.pickle_reader import CONTAINERS, Builder, Global
from ckpttool.wire.zip import BOMB_BYTES, BOMB_RATIO, Archive

if TYPE_CHECKING:
    import numpy as np

RANK = 64  # numpy reads no more dimensions than that
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A flat buffer; `dtype` is None for an untyped one."""

    key: str
    dtype: str | None
    nbytes: int
    bytes: Bytes


@dataclass(frozen=True, eq=False)
class Tensor:
    """A view of a storage; offset and strides count elements. `attributes` says that it carries more."""

    storage: Storage
    dtype: str
    offset: int
    shape: Shape
    strides: Shape
    requires_grad: bool = False
    parameter: bool = False
    conj: bool = False
    neg: bool = False
    attributes: bool = False

    @property
    def view(self) -> tuple[object, ...]:
        """What two tensors have in common when they are the same memory, read the same way."""
        return (
            self.storage.key, self.dtype, self.offset, self.shape, self.strides, self.conj, self.neg
        )  # fmt: skip

    @property
    def count(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


class Size(tuple[Any, ...]):
    """A torch.Size."""

    __slots__ = ()


class Storages:
    """The storages of one archive by their persistent ids."""

    def __init__(self, archive: Archive, top: str) -> None:
        """Look under the archive's folder `top`."""
        self.archive = archive
        self.top = top
        self.known: dict[str, Storage] = {}

    def persistent(self, pid: object) -> Storage:
        """Return the storage of a persistent id; raise FormatError unless the archive holds just that."""
        if not isinstance(pid, tuple) or len(pid) not in (5, 6) or pid[0] != "storage":
            raise FormatError("a persistent id does not name a storage")
        kind, key, count = pid[1], pid[2], pid[4]
        if not isinstance(kind, Global) or type(key) is not str or type(count) is not int:
            raise FormatError("a storage's persistent id is not of the form that torch writes")
        dtype = _storage_dtype(kind)
        nbytes = count * (dtypes.BY_NAME[dtype].itemsize if dtype else 1)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = self._found(key, dtype, nbytes)
        elif (known.dtype, known.nbytes) != (dtype, nbytes):
            raise FormatError(f"storage {key!r} is used with two types or sizes")
        return known

    def _found(self, key: str, dtype: str | None, nbytes: int) -> Storage:
        name = f"{self.top}/data/{key}"
        if name not in self.archive.members:
            raise FormatError(f"storage {key!r} is not in the archive")
        source = self.archive.source(name)
        if source.length != nbytes:
            raise FormatError(
                f"storage {key!r} does not have the size that the pickle says",
                expected=f"{nbytes:,} bytes",
                found=f"{source.length:,}",
            )
        return Storage(key, dtype, nbytes, source)


def _storage_dtype(kind: Global) -> str | None:
    # Typed classes live in torch and torch.cuda; untyped ones have had a leading underscore.
    if kind.name.lstrip("_") == "UntypedStorage":
        return None
    row = dtypes.BY_STORAGE.get(kind.name)
    if row is None or kind.module.partition(".")[0] != "torch":
        raise UnsupportedError(f"storages of class {kind.full} are not known")
    return row.name


def _bad(message: str, *, expected: str | None = None, found: str | None = None) -> NoReturn:
    raise FormatError(message, expected=expected, found=found)


def _view(storage: Any, dtype: str, offset: Any, shape: Any, strides: Any, requires_grad: Any) -> Tensor:
    if (
        type(offset) is not int
        or not isinstance(shape, tuple | list)
        or not isinstance(strides, tuple | list)
    ):
        _bad("a tensor's offset, size and stride are not an integer and two tuples")
    if len(shape) != len(strides):
        _bad("a tensor has not as many strides as dimensions")
    if len(shape) > RANK:
        raise UnsupportedError(f"a tensor of {len(shape):,} dimensions")
    if any(type(n) is not int or n < 0 for n in (offset, *shape, *strides)):
        _bad("a tensor's offset, size or stride is negative or no integer")
    tensor = Tensor(storage, dtype, offset, tuple(shape), tuple(strides), requires_grad is True)
    _fits(tensor)
    return tensor


def _fits(tensor: Tensor) -> None:
    row = dtypes.BY_NAME.get(tensor.dtype)
    if row is None or not row.itemsize:
        return
    count = tensor.count
    if count * row.itemsize > _LARGEST:
        _bad("a tensor has more elements than can be counted")
    last = tensor.offset
    for extent, stride in zip(tensor.shape, tensor.strides, strict=True):
        last += (extent - 1) * stride
    if count and (last + 1) * row.itemsize > tensor.storage.nbytes:
        _bad(
            f"a tensor reaches beyond its storage {tensor.storage.key!r}",
            expected=f"at most {tensor.storage.nbytes:,} bytes",
            found=f"{(last + 1) * row.itemsize:,}",
        )


def _with_bits(tensor: Tensor, metadata: object) -> Tensor:
    # torch/_utils.py, set_tensor_metadata: the stored bytes are those before conj and neg were applied.
    if metadata is None or metadata == {}:
        return tensor
    if not isinstance(metadata, dict) or not metadata.keys() <= {"conj", "neg"}:
        raise UnsupportedError("a tensor carries metadata other than conj and neg")
    conj = metadata.get("conj") is True and tensor.dtype.startswith("complex")
    return replace(tensor, conj=conj, neg=metadata.get("neg") is True)


def _tensor_v2(args: tuple[Any, ...]) -> object:
    if len(args) not in (4, 6, 7) or not isinstance(args[0], Storage):
        _bad("a tensor is rebuilt from arguments that torch does not write")
    storage = args[0]
    dtype = storage.dtype or "uint8"
    tensor = _view(storage, dtype, args[1], args[2], args[3], args[4] if len(args) > 4 else False)
    return _with_bits(tensor, args[6] if len(args) > 6 else None)


def _tensor_v3(args: tuple[Any, ...]) -> object:
    if len(args) not in (7, 8) or not isinstance(args[0], Storage) or not isinstance(args[6], Global):
        _bad("a tensor is rebuilt from arguments that torch does not write")
    row = dtypes.BY_TORCH.get(args[6].name)
    tensor = _view(args[0], row.name if row else args[6].name, args[1], args[2], args[3], args[4])
    return _with_bits(tensor, args[7] if len(args) > 7 else None)


def _parameter(args: tuple[Any, ...]) -> object:
    if len(args) not in (3, 4) or not isinstance(args[0], Tensor):
        return NotImplemented
    more = args[0].attributes or (len(args) > 3 and bool(args[3]))
    return replace(args[0], parameter=True, requires_grad=args[1] is True, attributes=more)


def _from_type(args: tuple[Any, ...]) -> object:
    if len(args) != 4 or not isinstance(args[0], Global) or not isinstance(args[2], tuple):
        return NotImplemented
    build = BUILDERS.get(args[0].full)
    if build is None or build not in (_tensor_v2, _tensor_v3, _parameter):
        return NotImplemented
    tensor = build(args[2])
    if not isinstance(tensor, Tensor):
        return NotImplemented
    kind = args[1].full if isinstance(args[1], Global) else ""
    parameter = tensor.parameter or kind == "torch.nn.parameter.Parameter"
    return replace(tensor, parameter=parameter, attributes=bool(args[3]))


def _size(args: tuple[Any, ...]) -> object:
    return Size(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else NotImplemented


def _first(args: tuple[Any, ...]) -> object:
    return args[0] if args else NotImplemented


BUILDERS: Mapping[str, Builder] = {
    **CONTAINERS,
    **pickle_numpy.BUILDERS,
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    # TorchScript tags its lists and dicts with their types.
    "torch.jit._pickle.build_intlist": _first,
    "torch.jit._pickle.build_doublelist": _first,
    "torch.jit._pickle.build_boollist": _first,
    "torch.jit._pickle.build_tensorlist": _first,
    "torch.jit._pickle.restore_type_tag": _first,
}


class Change(NamedTuple):
    """What a stored array becomes when it is read: one numpy operation that keeps the element type."""

    kind: Literal["conj", "neg", "byteswap", "reverse"]

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the same dtype; only "reverse" (Fortran order) turns the shape around."""
        return dtype, shape[::-1] if self.kind == "reverse" else shape

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the changed array."""
        if self.kind == "reverse":
            return array.T
        if self.kind == "byteswap":
            return array.byteswap()
        return array.conj() if self.kind == "conj" else -array


class Unreadable(NamedTuple):
    """The source of a tensor that is listed and not read; `read` says why."""

    file: str
    reason: str

    def read(self) -> Buffer:
        """Raise UnsupportedError."""
        raise UnsupportedError(self.reason, file=self.file)


def source(tensor: Tensor, *, big: bool) -> Source:
    """Return where the tensor's bytes are; `big` says that the writer's machine was big-endian."""
    found = _stored(tensor, dtypes.component_size(tensor.dtype) if big else 0)
    for kind, wanted in (("conj", tensor.conj), ("neg", tensor.neg)):
        if wanted:
            change = Change("conj" if kind == "conj" else "neg")
            found = Transformed(found, tensor.dtype, tensor.shape, change)
    return found


def _stored(tensor: Tensor, width: int) -> Source:
    data, itemsize = tensor.storage.bytes, dtypes.BY_NAME[tensor.dtype].itemsize
    nbytes = tensor.count * itemsize
    if not nbytes:
        return Inline(b"")
    view = Strided(data, itemsize, tensor.shape, tensor.strides, tensor.offset, width if width > 1 else 0)
    if nbytes == tensor.storage.nbytes and not tensor.offset and view.contiguous():
        if width <= 1:
            return data
        return Swapped(data, width) if isinstance(data, Span) else view
    if nbytes > BOMB_BYTES and nbytes > BOMB_RATIO * tensor.storage.nbytes:
        base = data.base if isinstance(data, Deflated) else data
        what = f"a view would expand {tensor.storage.nbytes:,} stored bytes to {nbytes:,}"
        return Unreadable(base.file.path, what)
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
