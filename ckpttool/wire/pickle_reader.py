"""Reading pickles as data: every protocol; nothing imported, nothing called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.errors import CkpttoolError
from ckpttool.wire.pickle_machine import Machine, Persistent
from ckpttool.wire.pickle_opcodes import TABLE
from ckpttool.wire.pickle_values import (
    CONTAINERS,
    Builder,
    Dict,
    Global,
    Limits,
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
    "Limits",
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

    `calls` names what unpickling it would call of the standard library that can act (os.system, ...), in the
    order of the file, each with the position of its first call. In `value` these are Objects like others.
    """

    value: Any
    end: int
    calls: Mapping[str, int]


def read(
    data: bytes,
    *,
    persistent: Persistent | None = None,
    builders: Mapping[str, Builder] = CONTAINERS,
    limits: Limits | None = None,
    file: str | None = None,
    base: int = 0,
    trailing: bool = False,
) -> Read:
    """Return what the pickle says; raise FormatError with the offset (`base` added) where it makes no sense.

    `persistent` gives the value of a persistent id; `builders` the values of known calls, by dotted name.
    Bytes after the pickle's end are refused unless `trailing`. Unknown calls become Objects.
    """
    machine = Machine(data, persistent, builders, limits or Limits(), file, base)
    try:
        value = machine.run(TABLE)
        if not trailing and machine.position != len(data):
            machine.fail("bytes follow the pickle's end", machine.position)
    except CkpttoolError as error:
        # Unpickling would have come as far as these calls: that the rest is damaged does not undo them.
        if machine.calls:
            error.message += f"; before that the pickle asks to call {', '.join(machine.calls)[:_NAMED]}"
            error.message += "; nothing was run"
        raise
    return Read(value, machine.position, machine.calls)
