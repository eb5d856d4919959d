"""Writes pickles of protocol 2 or 4 from the inert values that the reader gives: always the same bytes."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any, NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.wire.pickle_values import Dict, Global, Object, Set

# Protocol 2 is Python 2's: its readers know these modules by their old names (Lib/_compat_pickle.py), and it
# has no bytes. In protocol 4 nothing is read to the end of a line, which some streams cannot do.
_PROTOCOLS = (2, 4)
_OLD_NAMES = {"builtins": "__builtin__", "copyreg": "copy_reg"}
_DEPTH = 250
_ORDERED = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")


class Persistent(NamedTuple):
    """A reference to something outside the pickle, by its id."""

    pid: tuple[Any, ...]


def dumps(value: Any, protocol: int = _PROTOCOLS[0]) -> bytes:
    """Return the pickle of plain values, Globals, Objects (calls), Dicts, Sets and Persistent ids.

    Raise UnsupportedError for anything else.
    """
    writer = _Writer(protocol)
    writer.value(value, 0)
    return b"".join((b"\x80", bytes((protocol,)), *writer.parts, b"."))


class _Writer:
    """The opcodes so far; texts and names that come again are recalled from the memo."""

    def __init__(self, protocol: int) -> None:
        self.old = protocol == _PROTOCOLS[0]
        self.parts: list[bytes] = []
        self.memo: dict[object, int] = {}

    def value(self, value: Any, depth: int) -> None:
        if depth > _DEPTH:
            raise UnsupportedError(f"values nested more than {_DEPTH} deep are not written")
        write = _WRITERS.get(type(value))
        if write is None:
            raise UnsupportedError(f"a value of type {type(value).__name__} is not written to a pickle")
        write(self, value, depth + 1)

    def remembered(self, value: object) -> bool:
        """Recall the value and say True, if it was written before."""
        number = self.memo.get(value)
        if number is not None:
            self.parts.append(bytes((0x68, number)) if number < 256 else b"j" + number.to_bytes(4, "little"))
        return number is not None

    def remember(self, value: object) -> None:
        number = self.memo[value] = len(self.memo)
        self.parts.append(bytes((0x71, number)) if number < 256 else b"r" + number.to_bytes(4, "little"))

    def call(self, function: Any, args: tuple[Any, ...], depth: int) -> None:
        self.value(function, depth)
        self.value(args, depth)
        self.parts.append(b"R")

    def items(self, values: Any, end: bytes, depth: int) -> None:
        """Write the values between a mark and the opcode that takes them; nothing for none."""
        if values:
            self.parts.append(b"(")
            for value in values:
                self.value(value, depth)
            self.parts.append(end)


def _none(writer: _Writer, value: None, depth: int) -> None:  # noqa: ARG001
    writer.parts.append(b"N")


def _bool(writer: _Writer, value: bool, depth: int) -> None:  # noqa: ARG001
    writer.parts.append(b"\x88" if value else b"\x89")


def _int(writer: _Writer, value: int, depth: int) -> None:  # noqa: ARG001
    if 0 <= value < 1 << 8:
        writer.parts.append(b"K" + value.to_bytes(1, "little"))
    elif 0 <= value < 1 << 16:
        writer.parts.append(b"M" + value.to_bytes(2, "little"))
    elif -(1 << 31) <= value < 1 << 31:
        writer.parts.append(b"J" + value.to_bytes(4, "little", signed=True))
    else:
        raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(raw) > 255:
            raise UnsupportedError(f"an integer of {len(raw):,} bytes is not written")
        writer.parts.append(b"\x8a" + bytes((len(raw),)) + raw)


def _float(writer: _Writer, value: float, depth: int) -> None:  # noqa: ARG001
    writer.parts.append(b"G" + struct.pack(">d", value))


def _complex(writer: _Writer, value: complex, depth: int) -> None:
    writer.call(Global("builtins", "complex"), (value.real, value.imag), depth)


def _text(writer: _Writer, value: str, depth: int) -> None:  # noqa: ARG001
    if not writer.remembered(value):
        raw = value.encode("utf-8", "surrogatepass")
        writer.parts += (b"X", len(raw).to_bytes(4, "little"), raw)
        writer.remember(value)


def _bytes(writer: _Writer, value: bytes, depth: int) -> None:
    if not writer.old:
        if len(value) >= 1 << 32:
            raise UnsupportedError(f"bytes of {len(value):,} are not written to a pickle")
        writer.parts += (b"B", len(value).to_bytes(4, "little"), value)
        return
    # Lib/pickle.py, save_bytes; the text is not worth remembering.
    writer.value(_ENCODE, depth)
    raw = value.decode("latin-1").encode("utf-8")
    writer.parts += (b"X", len(raw).to_bytes(4, "little"), raw)
    writer.value("latin1", depth)
    writer.parts.append(b"\x86R")


def _global(writer: _Writer, value: Global, depth: int) -> None:
    if writer.remembered(value):
        return
    if writer.old:
        writer.parts.append(f"c{_OLD_NAMES.get(value.module, value.module)}\n{value.name}\n".encode())
    else:
        for text in value:
            _text(writer, text, depth)
        writer.parts.append(b"\x93")
    writer.remember(value)


def _tuple(writer: _Writer, value: tuple[Any, ...], depth: int) -> None:
    if not value:
        writer.parts.append(b")")
    elif len(value) <= 3:
        for item in value:
            writer.value(item, depth)
        writer.parts.append((b"\x85", b"\x86", b"\x87")[len(value) - 1])
    else:
        writer.items(value, b"t", depth)


def _list(writer: _Writer, value: list[Any], depth: int) -> None:
    writer.parts.append(b"]")
    writer.items(value, b"e", depth)


def _pairs(value: dict[Any, Any]) -> list[Any]:
    return [part for pair in value.items() for part in pair]


def _dict(writer: _Writer, value: dict[Any, Any], depth: int) -> None:
    writer.parts.append(b"}")
    writer.items(_pairs(value), b"u", depth)


def _ordered(writer: _Writer, value: OrderedDict[Any, Any], depth: int) -> None:
    writer.call(_ORDERED, (), depth)
    writer.items(_pairs(value), b"u", depth)


def _named_dict(writer: _Writer, value: Dict, depth: int) -> None:
    module, _, name = value.name.rpartition(".")
    writer.call(Global(module, name), (), depth)
    writer.items(_pairs(value), b"u", depth)
    if value.state is not None:
        writer.value(value.state, depth)
        writer.parts.append(b"b")


def _set(writer: _Writer, value: Set, depth: int) -> None:
    module, _, name = value.name.rpartition(".")
    writer.call(Global(module, name), (list(value),), depth)


def _object(writer: _Writer, value: Object, depth: int) -> None:
    if value.kwargs or value.items or value.entries:
        raise UnsupportedError(f"an object of class {value.name} is not written to a pickle")
    writer.call(value.function, value.args, depth)
    if value.state is not None:
        writer.value(value.state, depth)
        writer.parts.append(b"b")


def _persistent(writer: _Writer, value: Persistent, depth: int) -> None:
    writer.value(value.pid, depth)
    writer.parts.append(b"Q")


_WRITERS: dict[type, Any] = {
    type(None): _none,
    bool: _bool,
    int: _int,
    float: _float,
    complex: _complex,
    str: _text,
    bytes: _bytes,
    Global: _global,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    OrderedDict: _ordered,
    Dict: _named_dict,
    Set: _set,
    Object: _object,
    Persistent: _persistent,
}
