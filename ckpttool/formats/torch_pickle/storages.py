"""The storages that a torch pickle names: one record for each key, and never two that differ.

Source: torch/serialization.py (persistent_id, _load, _legacy_load).
"""

from __future__ import annotations

from collections.abc import Callable

from ckpttool import dtypes
from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.torch_pickle.tensors import Storage
from ckpttool.source import Storage as Bytes
from ckpttool.wire.pickle_reader import Global

_SHOWN = 200
_UNTYPED = frozenset(
    f"{module}.{name}"
    for module in ("torch", "torch.cuda", "torch.storage")
    for name in ("UntypedStorage", "_UntypedStorage")
)

# Says where the storage of a key and a size in bytes lies; raises where there is none of that size.
Place = Callable[[str, int], Bytes]


class Storages:
    """The storages of one pickle by their keys."""

    def __init__(self, place: Place) -> None:
        """Ask `place` once for each key."""
        self.place = place
        self.known: dict[str, Storage] = {}

    def persistent(self, pid: object, length: int = 5) -> Storage:
        """Return the storage of a persistent id; raise FormatError unless it is one that torch writes.

        `length` is how many items the id has in this form of file.
        """
        if not isinstance(pid, tuple) or len(pid) != length or pid[0] not in ("storage", b"storage"):
            raise FormatError("a persistent id does not name a storage")
        kind, key, count = pid[1], pid[2], pid[4]
        check_location(pid[3])
        if not isinstance(kind, Global) or type(key) is not str or type(count) is not int or count < 0:
            raise FormatError("a storage's persistent id is not of the form that torch writes")
        dtype = storage_dtype(kind)
        nbytes = count * itemsize(dtype)
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = Storage(key, dtype, nbytes, self.place(key, nbytes))
        elif (known.dtype or "uint8", known.nbytes) != (dtype or "uint8", nbytes):
            # An untyped storage counts bytes: torch writes both for a tensor of bytes and a view of it.
            raise FormatError(f"storage {key!r} is used with two types or sizes")
        return known


def check_location(location: object) -> None:
    """Raise unless a storage was on a device with memory: torch reads no bytes for one on `meta`."""
    if location in ("meta", b"meta"):
        raise UnsupportedError("a storage is on the meta device: torch reads no bytes for it")
    if not isinstance(location, str | bytes):
        raise FormatError("a storage's location is no text")


def storage_dtype(kind: Global) -> str | None:
    """Return the element type of a storage class, None for an untyped one; raise UnsupportedError."""
    # Typed classes live in torch and torch.cuda; untyped ones have had a leading underscore.
    if kind.full in _UNTYPED:
        return None
    row = dtypes.BY_STORAGE.get(kind.name)
    if row is None or kind.module.partition(".")[0] != "torch":
        raise UnsupportedError(f"storages of class {kind.full[:_SHOWN]!r} are not known")
    return row.name


def itemsize(dtype: str | None) -> int:
    """Return the size in bytes of what a storage's count counts."""
    return dtypes.BY_NAME[dtype].itemsize if dtype else 1
