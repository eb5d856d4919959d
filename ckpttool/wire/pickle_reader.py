"""Reading pickles as data: every protocol; nothing imported, nothing called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

__all__ = ["CONTAINERS", "Builder", "Dict", "Global", "Limits", "Object", "Opaque", "Set", "Stored", "load"]


def load(
    data: bytes,
    *,
    persistent: Persistent | None = None,
    builders: Mapping[str, Builder] = CONTAINERS,
    limits: Limits | None = None,
    file: str | None = None,
    base: int = 0,
    trailing: bool = False,
) -> Any:
    """Return what the pickle says; raise FormatError with the offset (`base` added) where it makes no sense.

    `persistent` gives the value of a persistent id; `builders` the values of known calls, by dotted name.
    Bytes after the pickle's end are refused unless `trailing`. Unknown calls become Objects.
    """
    machine = Machine(data, persistent, builders, limits or Limits(), file, base)
    value = machine.run(TABLE)
    if not trailing and machine.position != len(data):
        machine.fail("bytes follow the pickle's end", machine.position)
    return value
