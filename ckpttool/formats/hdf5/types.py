"""What HDF5's types and values are to us; used by the process that lists a file (child.py)."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from typing import Any

_SLAB = 16 << 20


def text(raw: bytes) -> str:
    """Return a name; bytes that are not UTF-8 are spelled out."""
    return raw.decode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
    """Return an attribute as JSON: a text, a list of texts, or None for what Keras does not write."""
    if isinstance(value, bytes):
        return text(value)
    if isinstance(value, str):
        # h5py keeps bytes that are not UTF-8 as surrogates.
        return text(value.encode("utf-8", "surrogateescape"))
    if hasattr(value, "tolist"):
        items = value.tolist()
        if isinstance(items, bytes | str):
            return plain(items)
        if isinstance(items, list) and all(isinstance(item, bytes | str) for item in items):
            return [plain(item) for item in items]
    return None


def is_utf8(value: Any) -> bool:
    """Say whether all texts of an attribute are UTF-8."""
    items = value.tolist() if hasattr(value, "tolist") else value
    try:
        for item in items if isinstance(items, list) else [items]:
            _ = item.decode() if isinstance(item, bytes) else item.encode() if isinstance(item, str) else None
    except UnicodeError:
        return False
    return True


# The floats that we name: bytes, sign bit, where the exponent begins, its bits, the mantissa's, the bias.
_FLOATS = {
    (2, 15, 10, 5, 10, 15): "float16",
    (2, 15, 7, 8, 7, 127): "bfloat16",
    (4, 31, 23, 8, 23, 127): "float32",
    (8, 63, 52, 11, 52, 1023): "float64",
}


def dtype(h5py: Any, dataset: Any) -> tuple[str, bool] | None:
    """Return our name of the dataset's type and whether it is big-endian, None if we have no name.

    Every property of the type is compared that changes a number. Padding does not: no element of these types
    has bits outside of its number.
    """
    kind, h5t = dataset.get_type(), h5py.h5t
    group, size = kind.get_class(), kind.get_size()
    if group == h5t.FLOAT:
        return _float(h5t, kind)
    if group == h5t.INTEGER:
        return _integer(h5t, kind)
    if group == h5t.ENUM and size == 1 and kind.get_nmembers() == 2:
        names = {bytes(kind.get_member_name(n)): kind.get_member_value(n) for n in range(2)}
        # h5py's spelling of bool.
        is_bool = names == {b"FALSE": 0, b"TRUE": 1} and _integer(h5t, kind.get_super()) == ("int8", False)
        return ("bool", False) if is_bool else None
    if group == h5t.COMPOUND:
        return _complex(h5t, kind)
    if group == h5t.STRING:
        return "string", False
    if group == h5t.OPAQUE and size == 2 and h5py.h5a.exists(dataset, b"dtype"):
        # Keras 3 keeps bfloat16 as two opaque bytes and says so (keras/src/saving/saving_lib.py, H5IOStore).
        named = plain(h5py.Dataset(dataset).attrs["dtype"])
        return ("bfloat16", False) if named == "bfloat16" else None
    return None


def _integer(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    size, order = kind.get_size(), kind.get_order()
    whole = kind.get_precision() == 8 * size and kind.get_offset() == 0
    if size not in (1, 2, 4, 8) or not whole or order not in (h5t.ORDER_LE, h5t.ORDER_BE):
        return None
    sign = "" if kind.get_sign() == h5t.SGN_2 else "u"
    return f"{sign}int{8 * size}", order == h5t.ORDER_BE and size > 1


def _float(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    sign, at, bits, low, mantissa = kind.get_fields()
    size, order = kind.get_size(), kind.get_order()
    name = _FLOATS.get((size, sign, at, bits, mantissa, kind.get_ebias()))
    whole = kind.get_precision() == 8 * size and kind.get_offset() == 0
    if name is None or low or not whole or kind.get_norm() != h5t.NORM_IMPLIED:
        return None
    return (name, order == h5t.ORDER_BE) if order in (h5t.ORDER_LE, h5t.ORDER_BE) else None


def _complex(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    if kind.get_nmembers() != 2 or [kind.get_member_name(n) for n in range(2)] != [b"r", b"i"]:
        return None
    parts = [kind.get_member_type(n) for n in range(2)]
    half = kind.get_size() // 2
    if (
        any(part.get_class() != h5t.FLOAT or part.get_size() != half for part in parts)
        or [kind.get_member_offset(n) for n in range(2)] != [0, half]
        or kind.get_size() % 2
    ):
        return None
    names = {_float(h5t, part) for part in parts}
    name = names.pop() if len(names) == 1 else None
    known = {"float32": "complex64", "float64": "complex128"}
    return (known[name[0]], name[1]) if name is not None and name[0] in known else None


def unreadable(h5py: Any, dataset: Any) -> str | None:
    """Return why the elements of a dataset cannot be read, if they are numbers of a type that we do not name.

    Other types that we do not name (tables, lists, references) hold no tensor.
    """
    h5t, kind = h5py.h5t, dataset.get_type()
    names = {
        h5t.INTEGER: "an integer",
        h5t.FLOAT: "a float",
        h5t.BITFIELD: "a bit field",
        h5t.TIME: "a time",
        h5t.OPAQUE: "an opaque type",
        h5t.ENUM: "an enumeration",
    }
    name = names.get(kind.get_class())
    if kind.get_class() == h5t.COMPOUND:
        members = [kind.get_member_name(n) for n in range(kind.get_nmembers())]
        name = "a complex number" if sorted(members) == [b"i", b"r"] else None
    return f"{name} of {8 * kind.get_size()} bits in a form that is not supported" if name else None


def described(dataset: Any) -> str:
    """Return a type that we have no name for as h5py spells it."""
    with contextlib.suppress(TypeError, ValueError, OSError):
        return str(dataset.dtype)[:80]
    return "unknown"


def raw(h5py: Any, dataset: Any) -> bytes:
    """Return the elements of a dataset as the file has them."""
    import numpy as np

    kind = dataset.get_type()
    # numpy may have no such type: what counts is its size.
    values = np.zeros(dataset.shape, np.dtype(("V", kind.get_size())))
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values, kind)
    return values.tobytes()


def fill(plist: Any, dataset: Any) -> bytes:
    """Return the element that stands for what is not stored, as the file has it; zero if it cannot be had."""
    import numpy as np

    size = int(dataset.get_type().get_size())
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        value = np.zeros((), dataset.dtype)
        plist.get_fill_value(value)
        if value.nbytes == size:
            return value.tobytes()
    return bytes(size)


def unset(h5py: Any, dataset: Any) -> bytes | None:
    """Return the element that the library reads where nothing is stored, None if it reads none.

    It leaves the memory as it is when the file says that nothing is ever filled in (H5D_FILL_TIME_NEVER).
    """
    import numpy as np

    h5s, kind = h5py.h5s, dataset.get_type()
    space = dataset.get_space()
    if dataset.shape:
        space.select_hyperslab((0,) * len(dataset.shape), (1,) * len(dataset.shape))
    found = []
    for before in (b"\x00", b"\xff"):
        room = np.frombuffer(bytearray(before * kind.get_size()), np.dtype(("V", kind.get_size())))
        dataset.read(h5s.create_simple((1,)), space, room, kind)
        found.append(room.tobytes())
    return found[0] if found[0] == found[1] else None


def digest(h5py: Any, dataset: Any, chunk: Sequence[int]) -> str:
    """Return the SHA-256 of a dataset's elements as the file has them; a slab is held at a time."""
    import numpy as np

    kind, shape = dataset.get_type(), dataset.shape
    size, height = kind.get_size(), max(1, math.prod(shape[1:]))
    # Whole chunks, so that each is unpacked once.
    rows = min(max(1, _SLAB // (height * size) // chunk[0]) * chunk[0], shape[0])
    room = np.zeros((rows, *shape[1:]), np.dtype(("V", size)))
    space, found = dataset.get_space(), hashlib.sha256()
    for start in range(0, shape[0], rows):
        part = room[: min(rows, shape[0] - start)]
        part.reshape(-1).view(np.uint8)[:] = 0
        space.select_hyperslab((start, *(0 for _ in shape[1:])), part.shape)
        dataset.read(h5py.h5s.create_simple(part.shape), space, part, kind)
        found.update(part.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
