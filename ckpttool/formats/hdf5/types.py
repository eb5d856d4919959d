"""What HDF5's types and values are to us; used by the process that lists a file (child.py)."""

from __future__ import annotations

import contextlib
from typing import Any


def text(raw: bytes) -> str:
    """Return a name; bytes that are not UTF-8 are spelled out."""
    return raw.decode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
    """Return an attribute as JSON: a text, a list of texts, or None for what Keras does not write."""
    if isinstance(value, bytes):
        return text(value)
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        items = value.tolist()
        if isinstance(items, bytes | str):
            return plain(items)
        if isinstance(items, list) and all(isinstance(item, bytes | str) for item in items):
            return [plain(item) for item in items]
    return None


# The floats that we name: bytes, sign bit, where the exponent begins, its bits, the mantissa's.
_FLOATS = {
    (2, 15, 10, 5, 10): "float16",
    (2, 15, 7, 8, 7): "bfloat16",
    (4, 31, 23, 8, 23): "float32",
    (8, 63, 52, 11, 52): "float64",
}


def dtype(h5py: Any, dataset: Any) -> tuple[str, bool] | None:
    """Return our name of the dataset's type and whether it is big-endian, None if we have no name."""
    kind, h5t = dataset.get_type(), h5py.h5t
    group, size = kind.get_class(), kind.get_size()
    if group == h5t.FLOAT:
        return _float(h5t, kind)
    if group == h5t.INTEGER and size in (1, 2, 4, 8) and kind.get_precision() == 8 * size:
        sign = "" if kind.get_sign() == h5t.SGN_2 else "u"
        return f"{sign}int{8 * size}", kind.get_order() == h5t.ORDER_BE
    if group == h5t.ENUM and size == 1 and kind.get_nmembers() == 2:
        names = {bytes(kind.get_member_name(n)): kind.get_member_value(n) for n in range(2)}
        # h5py's spelling of bool.
        return ("bool", False) if names == {b"FALSE": 0, b"TRUE": 1} else None
    if group == h5t.COMPOUND:
        return _complex(h5t, kind)
    if group == h5t.STRING:
        return "string", False
    if group == h5t.OPAQUE and size == 2 and h5py.h5a.exists(dataset, b"dtype"):
        # Keras 3 keeps bfloat16 as two opaque bytes and says so (keras/src/saving/saving_lib.py, H5IOStore).
        named = plain(h5py.Dataset(dataset).attrs["dtype"])
        return ("bfloat16", False) if named == "bfloat16" else None
    return None


def _float(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    sign, at, bits, low, mantissa = kind.get_fields()
    order = kind.get_order()
    name = _FLOATS.get((kind.get_size(), sign, at, bits, mantissa))
    if name is None or low or order not in (h5t.ORDER_LE, h5t.ORDER_BE):
        return None
    return name, order == h5t.ORDER_BE


def _complex(h5t: Any, kind: Any) -> tuple[str, bool] | None:
    if kind.get_nmembers() != 2 or [kind.get_member_name(n) for n in range(2)] != [b"r", b"i"]:
        return None
    parts = [kind.get_member_type(n) for n in range(2)]
    if (
        any(part.get_class() != h5t.FLOAT for part in parts)
        or kind.get_member_offset(1) * 2 != kind.get_size()
    ):
        return None
    names = {_float(h5t, part) for part in parts}
    name = names.pop() if len(names) == 1 else None
    known = {"float32": "complex64", "float64": "complex128"}
    return (known[name[0]], name[1]) if name is not None and name[0] in known else None


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
    values = np.empty(dataset.shape, np.dtype(("V", kind.get_size())))
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
