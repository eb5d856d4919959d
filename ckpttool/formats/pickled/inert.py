"""How values that are not built are shown: keys of any kind, objects of unknown classes, code."""

from __future__ import annotations

from typing import Any

from ckpttool.leaf import Key, Record, key
from ckpttool.wire.pickle_numpy import Type
from ckpttool.wire.pickle_reader import Global, Object, Opaque, Stored
from ckpttool.wire.pickle_values import is_plain

PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))
KEYS = frozenset((str, int, float, bool, type(None)))
_SUMMARY = 200
_SHOWN = 32  # arguments of a call that are shown in its line


def step_of(name: Any, position: int) -> Key:
    """Return the step for a dict's key, the `position`-th; a label where a path cannot hold it."""
    if type(name) in KEYS:
        return key(name)
    if type(name) is Opaque and is_plain(name.value):
        # As text: the hashes of paths must not collide, either.
        return key(repr(name.value))
    if isinstance(name, Global):
        return key(name.full)
    if isinstance(name, bytes | tuple):
        text = repr(name[: _SUMMARY + 1])
        # Two long keys may begin alike.
        return key(text if len(text) <= _SUMMARY else f"{text[:_SUMMARY]}... {position}")
    inner = name.value if isinstance(name, Opaque) else name
    return key(f"<{record(inner).name} {position}>")


def is_leaf(value: Object) -> bool:
    """Say whether nothing of the object needs a line of its own."""
    if value.state or value.items or value.entries or value.kwargs:
        return False
    if len(value.args) > _SHOWN:
        return False
    return is_code(value) or all(type(arg) in PLAIN or isinstance(arg, Global) for arg in value.args)


def is_code(value: Object) -> bool:
    """Say whether the object is a function's code, as cloudpickle stores it (`_builtin_type("CodeType")`)."""
    kind = value.function
    return isinstance(kind, Object) and kind.args == ("CodeType",)


def record(value: Any) -> Record:
    """Return the class of a value that is not built, and what can be said of it in a line."""
    if isinstance(value, Global):
        return Record(value.full)
    if isinstance(value, Object) and is_code(value):
        texts = [arg for arg in value.args[:_SHOWN] if type(arg) is str]
        return Record("types.CodeType", ", ".join(text[:_SUMMARY] for text in reversed(texts[:2]))[:_SUMMARY])
    if isinstance(value, Object):
        return Record(value.name, ", ".join(_shown(arg) for arg in value.args[:_SHOWN])[:_SUMMARY])
    if isinstance(value, Type):
        return Record("numpy.dtype", value.code)
    if isinstance(value, Stored):
        return Record("bytes", f"{len(value):,} bytes")
    return Record(type(value).__name__)


def _shown(value: Any) -> str:
    if isinstance(value, Global):
        return value.full
    return repr(value[:_SUMMARY] if isinstance(value, str | bytes) else value)
