"""Pickles that ask for more than data, or are none: alone in a file, and as the pickle of a torch archive.

Every name in them is harmless if it were called after all, and beside it stands one array (or tensor): what a
person wanted to read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.encodings import dumps, pickle_array
from tests.hostile.case import Case
from tests.hostile.crafted_any import written
from tests.pickles import ACTING, short
from tests.test_format_pytorch import archive, floats, tensor

_LINE = "pickle"
_ARRAY = dumps(pickle_array("f4", (2,), struct.pack("<2f", 1, 2)), 2)[2:-1]
_TENSOR = dumps(tensor(), 2)[2:-1]


def beside(payload: bytes, value: bytes = _ARRAY) -> bytes:
    """Return the pickle of a dict that holds the payload's value as `x`, and an array as `w`."""
    # The payload comes first: the memo is its own.
    return b"\x80\x02}(" + short("x") + payload + short("w") + value + b"u."


def pickled(payload: bytes) -> Callable[[Path], Path]:
    """Return the maker of a file that is one pickle."""
    return written("agent.pkl", beside(payload))


def in_archive(payload: bytes) -> Callable[[Path], Path]:
    """Return the maker of a torch archive."""
    return written("agent.pt", archive(beside(payload, _TENSOR), {"0": floats(1, 2, 3, 4)}))


def bare(data: bytes) -> Callable[[Path], Path]:
    """Return the maker of a file of these bytes, which need not be a pickle."""
    return written("agent.pkl", data)


def listed(name: str, make: Callable[[Path], Path], strict: int = 1, **more: Any) -> Case:
    """Return a case that is listed, whose array is read and converted, and that is not plain data."""
    return Case(name, _LINE, make, 0, 0, 0, strict, **more)


def refused(name: str, data: bytes) -> Case:
    """Return a case that is refused by every command."""
    return Case(name, _LINE, bare(data), 2, None, 2)


# By which opcode, and by which detour, something of the standard library is reached.
_WAYS = (
    *(
        "GLOBAL + REDUCE",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "dotted name",
        "names in the memo",
    ),
    *("getattr of a module", "partial", "attrgetter", "result dropped", "result of a result"),
)
_ACTING = {
    **ACTING,
    "result of a result": (b"cmy.net\nmake\n)R)R)R.", "my.net.make"),
}
_DOUBLED = b"".join(b"0](h%ch%ch%ch%ceq%c" % (n, n, n, n, n + 1) for n in range(30))
_BOMB = b"K\x01q\x00" + b"".join(b"0(" + b"h%c" % n * 4 + b"tq%c" % (n + 1) for n in range(30))

CASES = (
    *(listed(f"pickle-{way.replace(' ', '-')}", pickled(_ACTING[way][0][:-1])) for way in _WAYS),
    *(
        listed(f"pickle-torch-{way}", in_archive(ACTING[way][0][:-1]))
        for way in ("STACK_GLOBAL", "NEWOBJ", "OBJ")
    ),
    listed("pickle-named-only", pickled(b"cos\ngetcwd\n")),
    listed(
        "pickle-uuid-of-a-data-module",
        pickled(b"cuuid\ngetnode\n)R"),
    ),
    listed(
        "pickle-classes", pickled(b"cmy.net\nPolicy\n)\x81}" + short("a") + b"K\x01sb"), shows="my.net.Policy"
    ),
    listed(
        "pickle-walk-of-a-library",
        pickled(short("torch") + short("os.getcwd") + b"\x93)R"),
        shows="torch.os.getcwd",
    ),
    listed(
        "pickle-build-shadows",
        pickled(b"cargparse\nNamespace\n)\x81}" + short("__setstate__") + b"cos\ngetcwd\nsb}b"),
    ),
    listed(
        "pickle-build-with-slots",
        pickled(b"cmy.net\nPolicy\n)\x81N}" + short("lr") + b"K\x05s\x86b"),
        shows="lr",
    ),
    listed(
        "pickle-bytearray-2-36",
        pickled(b"cbuiltins\nbytearray\n(\x8a\x05\0\0\0\0\x10tR"),
    ),
    listed("pickle-in-bytes", pickled(b"C\x11\x80\x04cos\ngetcwd\n)R.."), strict=0, shows="x"),
    listed("pickle-dup-pop", pickled(b"K\x07K\x01020"), strict=0, shows="= 7"),
    refused("pickle-memo-4e9", b"\x80\x02K\x07r\x00\x28\x6b\xee0j\x00\x28\x6b\xee."),
    listed("pickle-self-reference", pickled(b"]q\x00h\x00a"), strict=0, table=True),
    listed("pickle-shared-lists-4-30", pickled(b"]q\x00" + _DOUBLED), strict=0, shows="x.0.0"),
    listed("pickle-tuple-4-30-as-a-key", pickled(b"}" + _BOMB + b"Ns"), strict=0, shows="<tuple"),
    listed("pickle-torch-tuple-4-30-as-a-key", in_archive(b"}" + _BOMB + b"Ns"), strict=0, shows="<tuple"),
    refused(
        "pickle-build-of-a-class",
        b"\x80\x02cmy.net\nPolicy\nN}" + short("f") + b"Ns\x86b.",
    ),
    refused("pickle-ext", b"\x80\x02\x83\x39\x05."),
    refused("pickle-persid", b"\x80\x02Pos.getcwd\n."),
    refused("pickle-next-buffer", b"\x80\x05\x97."),
    refused("pickle-get-never-put", b"\x80\x02h\x07."),
    refused("pickle-underflow", b"\x80\x02N(\x85."),
    refused("pickle-no-stop", b"\x80\x02]q\x00"),
    refused("pickle-bytes-after-stop", b"\x80\x02N.N"),
    refused(
        "pickle-acts-then-breaks",
        b"\x80\x02cos\ngetcwd\n)R0h\x07.",
    ),
    refused("pickle-protocol-99", b"\x80\x02\x80\x63N."),
    refused("pickle-unicode-2-gib", b"\x80\x02X\xff\xff\xff\x7fa."),
    refused("pickle-bytes-4-eib", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"a."),
    refused("pickle-long4-negative", b"\x80\x02\x8b\xff\xff\xff\xff."),
    refused(
        "pickle-long-24-mbit",
        b"\x80\x02\x8b" + struct.pack("<i", 3 << 20) + bytes(3 << 20) + b".",
    ),
    refused("pickle-across-a-frame", b"\x80\x04\x95" + struct.pack("<Q", 2) + b"X\x01\0\0\0a."),
    refused("pickle-200,000-deep", b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
    refused("pickle-controls", b"\x80\x02c\x1b[2J\n\xe2\x80\xaex\n)R0h\x07."),
    refused(
        "pickle-copies",
        b"\x80\x02X"
        + struct.pack("<I", 1 << 20)
        + b"a" * (1 << 20)
        + b"q\x00"
        + short("latin1")
        + b"q\x01"
        + b"c_codecs\nencode\n(h\x00h\x01tR0" * 2000
        + b"N.",
    ),
)
