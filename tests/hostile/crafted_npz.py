"""NumPy's arrays, alone and in archives (numpy/lib/_format_impl.py, numpy/lib/_npyio_impl.py)."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.crafted_any import written
from tests.hostile.zips import Made, archive, deflated

_LINE = "npz"
_NAME = "model.npz"
Make = Callable[[Path], Path]


def npy(shape: str, data: bytes = b"", descr: str = "'<f4'", order: str = "False") -> bytes:
    """Return an array of this header's literals and bytes."""
    return headed(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n", data)


def headed(text: str | bytes, data: bytes = b"", version: int = 1, size: int | None = None) -> bytes:
    """Return an array whose header is this text, and claims `size` bytes instead of its own."""
    raw = text.encode() if isinstance(text, str) else text
    length = struct.pack("<H" if version == 1 else "<I", len(raw) if size is None else size)
    return b"\x93NUMPY" + bytes((version, 0)) + length + raw + data


def _zipped(*arrays: bytes) -> Make:
    return written(_NAME, archive([Made(f"{chr(97 + n)}.npy", data) for n, data in enumerate(arrays)]))


def _refused(name: str, data: bytes) -> Case:
    return Case(f"npz-{name}", _LINE, _zipped(data), digest=None, convert=None)


def _whole(
    name: str, make: Make, inspect: int = 2, digest: int = 2, convert: int = 2, shows: str = ""
) -> Case:
    return Case(f"npz-{name}", _LINE, make, inspect, digest, convert, shows=shows)


def _bomb(folder: Path) -> Path:
    """Write an array of 256 MiB of zeros, which takes a thousandth of that."""
    whole = npy("(67108864,)", bytes(1 << 28))
    return written(_NAME, archive([deflated("a.npy", whole)]))(folder)


class _Touch:
    """What a pickle would make: the working folder's name."""

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.getcwd, ()


_ONE = npy("(1,)", bytes(4))
_OBJECTS = npy("(1,)", pickle.dumps([_Touch()]), "'|O'")
CASES = (
    _whole("objects", _zipped(_OBJECTS, _ONE), 0, 0, 0, shows="numpy.ndarray |O[1]"),
    _whole("objects-alone", written("model.npy", _OBJECTS), 0, 0, 0, shows="numpy.ndarray |O[1]"),
    _whole("objects-crc", written(_NAME, archive([Made("a.npy", _OBJECTS, crc=7)]))),
    _whole("no-elements-crc", written(_NAME, archive([Made("a.npy", npy("(0,)"), crc=7)]))),
    _whole("shape-2-36", _zipped(npy("(68719476736,)", bytes(16)))),
    _whole("shape-2-36-alone", written("model.npy", npy("(68719476736,)", bytes(16)))),
    _refused("shape-2-62", npy("(4611686018427387904, 4)", bytes(16))),
    _refused("shape-behind-0", npy("(0, 4611686018427387904, 4)")),
    _refused("shape-negative", npy("(-1,)", bytes(4))),
    _refused("shape-negative-twice", npy("(-1, -1)", bytes(4))),
    _refused("shape-float", npy("(1.0,)", bytes(4))),
    _refused("shape-true", npy("(True,)", bytes(4))),
    _refused("shape-no-tuple", npy("1", bytes(4))),
    _refused("shape-5000-digits", npy(f"({'1' * 5000},)", bytes(4))),
    _refused("rank-65", npy(f"({'1,' * 65})", bytes(4))),
    _refused("rank-20000", npy(f"({'1,' * 20_000})", bytes(4))),
    _refused("9000-brackets", headed("(" * 9000)),
    _refused("9000-brackets-in-the-shape", npy("(" * 9000)),
    _refused("9000-lists-closed", npy("[" * 9000 + "]" * 9000, bytes(4))),
    _refused("header-1-MB", headed(" " * (1 << 20), version=2)),
    _refused("header-4-GB", headed("{", version=2, size=(1 << 32) - 1)),
    _refused("header-beyond-end", headed("{}", size=60_000)),
    _refused("header-not-utf-8", headed(b"{'\xff': 1}", version=3)),
    _refused("header-calls", headed("__import__('os').getcwd()")),
    _refused("header-twice-one-entry", headed("{'descr': '<f4', 'descr': '<f8'}")),
    _refused("header-more-entries", npy("(1,), 'x': (1,)", bytes(4))),
    _refused("version-9", headed("{}", version=9)),
    _refused("order-1", npy("(1,)", bytes(4), order="1")),
    _refused("no-magic", b"\x93NUMPI" + bytes(100)),
    _refused("member-empty", b""),
    _refused("bytes-missing", npy("(2,)", bytes(4))),
    _refused("bytes-trailing", npy("(1,)", bytes(5))),
    _refused("width-overflow", npy("(1,)", bytes(4), "'|V999999999'")),
    _whole(
        "sub-dtype-overflow",
        _zipped(npy("(1,)", bytes(4), "[('a', '<f4', (4294967296, 4294967296))]")),
        *(0, 0, 0),
    ),
    _whole("type-unknown", _zipped(npy("(1,)", bytes(4), "'<q99'"), _ONE), 0, 0, 0, shows="q99"),
    _whole("structured", _zipped(npy("(1,)", bytes(8), "[('a', '<f4'), ('b', '<i4')]")), 0, 0, 0),
    _whole("dates", _zipped(npy("(1,)", bytes(8), "'<M8[ns]'")), 0, 0, 0, shows="M8[ns]"),
    _whole("text", _zipped(npy("()", "a\x1bb".encode("utf-32-le"), "'<U3'")), 0, 0, 0),
    _whole("text-is-none", _zipped(npy("()", b"\xff" * 4, "'<U1'")), 0, 0, 0, shows="U1"),
    Case("npz-two-members", _LINE, written(_NAME, archive([Made("a.npy", _ONE)] * 2))),
    _whole(
        "name-and-npy-twice",
        written(_NAME, archive([Made("a.npy.npy", _ONE), Made("a.npy", _ONE)])),
        0,
        0,
        0,
    ),
    _whole(
        "other-member",
        written(_NAME, archive([Made("a.npy", _ONE), Made("../x.sh", b"x")])),
        0,
        0,
        0,
        shows="x.sh",
    ),
    _whole("traversal", written(_NAME, archive([Made("../../a.npy", _ONE), Made("/b.npy", _ONE)])), 0, 0, 0),
    _whole("deflate-bomb-small", _bomb),
    _whole(
        "deflate-short",
        written(_NAME, archive([deflated("a.npy", _ONE, size=len(_ONE) + 4)])),
    ),
    _whole("crc", written(_NAME, archive([Made("a.npy", _ONE, crc=7)])), inspect=0),
)
