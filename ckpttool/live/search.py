"""Every tensor that a live object can reach: through containers, closures and objects of any class."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

from ckpttool.leaf import Key, Path, attr, index, key
from ckpttool.live import kinds, nest
from ckpttool.live.walk import properties

_OPEN = ("SimpleNamespace", "Namespace")


class Reached(NamedTuple):
    """A tensor, the first path to it, and the chain's first step that leaves what is saved, in words."""

    path: Path
    value: Any
    reason: str


def unsaved(root: Any, roots: set[int], saved: set[int]) -> Iterator[Reached]:
    """Go through the tensors below `root` whose numbers are not in `saved`, each once.

    `roots` are the numbers of the objects that are saved as wholes.
    """
    seen = {id(root)}
    kept: list[Any] = []  # the number of an object that is gone may be given to another
    waiting: list[tuple[Path, Any, str]] = [((), root, "")]
    while waiting:
        path, value, lost = waiting.pop()
        below = []
        for step, held in held_by(value):
            if held is None or isinstance(held, _ATOMS) or id(held) in seen:
                continue
            seen.add(id(held))
            kept.append(held)
            within = id(held) in saved or id(held) in roots
            reason = "" if within else lost or _reason(value, held, step)
            if is_numeric(held, step):
                if id(held) not in saved and id(kinds.plain_value(held)) not in saved:
                    yield Reached((*path, step), held, reason)
            else:
                below.append(((*path, step), held, reason))
        waiting += reversed(below)


def is_numeric(value: Any, step: Key) -> bool:
    """Say whether the value is a tensor, or an array that is held by name."""
    if kinds.is_array(value):
        return step.kind != "index" and not value.dtype.hasobject and bool(value.size)
    return kinds.is_tensor(value)


def held_by(value: Any) -> Iterator[tuple[Key, Any]]:
    """Go through everything that an object holds; nothing for what cannot hold a tensor of interest."""
    if isinstance(value, _ATOMS) or kinds.is_tensor(value):
        return
    if nest.is_nested(value):
        yield from nest.items(value)
    elif isinstance(value, Set):
        yield from ((index(number), item) for number, item in enumerate(value))
    elif isinstance(value, _FUNCTIONS):
        yield from _function(value)
    elif kinds.holds_variables(value):
        yield from properties(value)
    else:
        yield from _object(value)


_ATOMS = (str, bytes, bytearray, int, float, complex, type, types.ModuleType)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _function(value: Any) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, types.FunctionType):
        yield from _closure(value)
        return
    names = ("__self__",) if isinstance(value, types.MethodType) else ("func", "args", "keywords")
    yield from ((attr(name), getattr(value, name)) for name in names)


def _closure(function: types.FunctionType) -> Iterator[tuple[Key, Any]]:
    if (function.__module__ or "").partition(".")[0] in kinds.FRAMEWORKS:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield key(name), cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for number, default in enumerate(function.__defaults__ or ()):
        yield index(number), default


def _is_open(value: Any) -> bool:
    """Say whether an object of this class may be the user's: of no framework, not of Python's own library."""
    name = kinds.top(value)
    if name in kinds.FRAMEWORKS:
        return False
    known = name in sys.stdlib_module_names and name != "__main__"
    return not known or type(value).__name__ in _OPEN


def _object(value: Any) -> Iterator[tuple[Key, Any]]:
    held = kinds.attributes(value) | _slotted(value)
    # Of a framework's objects: a tf.function's Python, and what `Variable.ref()` refers to.
    names = sorted(held) if _is_open(value) else ("_python_function", "_wrapped")
    yield from ((attr(name), held[name]) for name in names if name in held)


def _slotted(value: Any) -> dict[str, Any]:
    """Return what lies in the `__slots__` of an object's class."""
    found: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not assigned yet
                    found[name] = member.__get__(value)
    return found


def _reason(holder: Any, held: Any, step: Key) -> str:
    """Say why the step from the holder to what it holds is none that is saved."""
    if isinstance(held, _FUNCTIONS) or "_python_function" in kinds.attributes(held):
        return "held by a function"
    if isinstance(holder, Set) or isinstance(held, Set):
        return "in a set"
    if kinds.is_tensor(held) or kinds.is_array(held):
        return _loose(holder, held, step)
    if nest.is_nested(held):
        return f"in a {_class(held)} that is not tracked"
    if kinds.holds_variables(held):
        return f"in a {_class(held)} that the {_class(holder)} does not track"
    return f"in a {_class(held)}, which is no {'Module' if _is_torch(holder) else 'Trackable'}"


def _loose(holder: Any, held: Any, step: Key) -> str:
    if kinds.is_array(held):
        return "an array of NumPy, which no framework saves"
    if not kinds.is_torch_module(holder):
        return f"not tracked by the {_class(holder)} that holds it"
    without = kinds.attributes(holder).get("_non_persistent_buffers_set") or ()
    if step.value in without:
        return "a buffer registered with persistent=False"
    return "a plain attribute: neither a Parameter nor a registered buffer"


def _is_torch(value: Any) -> bool:
    return kinds.is_torch_module(value) or kinds.is_torch_optimizer(value)


def _class(value: Any) -> str:
    return type(value).__name__
