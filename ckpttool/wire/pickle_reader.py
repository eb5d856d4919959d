"""Reading pickles as data: every protocol; nothing imported, nothing called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.errors import CkpttoolError, TruncatedError
from ckpttool.wire.asked import Asked, called
from ckpttool.wire.pickle_machine import Machine, Persistent
from ckpttool.wire.pickle_opcodes import TABLE
from ckpttool.wire.pickle_values import (
    CONTAINERS,
    Builder,
    Dict,
    Global,
    Object,
    Opaque,
    Set,
    Stored,
)

__all__ = [
    "CONTAINERS",
    "Builder",
    "Dict",
    "Global",
    "Object",
    "Opaque",
    "Read",
    "Scan",
    "Set",
    "Stored",
    "read",
    "scan",
]

_NAMED = 300
_ARGUMENT = 9  # bytes of the longest opcode with an argument of fixed size


class Read(NamedTuple):
    """What a pickle says, and the position after its end.

    `asked` are the names that it refers to and calls, in the order of the file (see asked). In `value` names
    are Globals, and calls of what is not known as data are Objects.
    """

    value: Any
    end: int
    asked: tuple[Asked, ...]


def read(
    data: bytes,
    *,
    persistent: Persistent | None = None,
    builders: Mapping[str, Builder] = CONTAINERS,
    inline: int = sys.maxsize,
    file: str | None = None,
    base: int = 0,
    trailing: bool = False,
) -> Read:
    """Return what the pickle says; raise FormatError with the offset (`base` added) where it makes no sense.

    `persistent` gives the value of a persistent id; `builders` the values of known calls, by dotted name.
    Bytes longer than `inline` are not copied out of the pickle but given as Stored. Bytes after the pickle's
    end are refused unless `trailing`. Unknown calls become Objects.
    """
    machine = Machine(data, persistent, builders, inline, file, base)
    try:
        value = machine.run(TABLE)
        if not trailing and machine.position != len(data):
            machine.fail("bytes follow the pickle's end", machine.position)
    except CkpttoolError as error:
        # Unpickling would have come as far as these calls: that the rest is damaged does not undo them.
        names = called(machine.asked())
        if names:
            error.message += f"; before that the pickle asks to call {', '.join(names)[:_NAMED]}"
            error.message += "; nothing was run"
        raise
    return Read(value, machine.position, machine.asked())


class Scan(NamedTuple):
    """How far bytes make sense as opcodes of a pickle.

    `end` is the position after STOP, None if the opcodes fail before it; `value` is then None too. `cut` says
    that more bytes could make a difference. `asked` is what unpickling would import and call up to there.
    """

    value: Any
    end: int | None
    asked: tuple[Asked, ...]
    cut: bool


def scan(data: bytes) -> Scan:
    """Run the opcodes at the start of `data` for as long as they make sense; never raise."""
    machine = Machine(data, Opaque, CONTAINERS, sys.maxsize, None, 0)
    try:
        value = machine.run(TABLE)
    except CkpttoolError as error:
        # An argument that the end of the bytes cuts may also look like a wrong one.
        cut = isinstance(error, TruncatedError) or machine.position > len(data) - _ARGUMENT
        return Scan(None, None, machine.asked(), cut)
    return Scan(value, machine.position, machine.asked(), cut=False)
