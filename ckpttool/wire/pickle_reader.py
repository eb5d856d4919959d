"""Reading pickles as data: every protocol; nothing imported, nothing called."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.errors import CkpttoolError
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
    "Set",
    "Stored",
    "read",
]

_NAMED = 300


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
