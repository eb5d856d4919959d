"""Plain containers in tf.nest's order: items of lists by number, of dicts by sorted key, fields by name.

Source: tensorflow/python/util/nest_util.py (_tf_core_yield_sorted_items). Sets are no containers there. Two
differences: a dict whose keys cannot be sorted keeps its order, where TensorFlow raises an error, and a
`range` or a buffer of numbers is one value.
"""

from __future__ import annotations

import array
import functools
from collections.abc import Iterator, Mapping, MappingView, Sequence
from typing import Any

from ckpttool.leaf import Key, Path, attr, index, key

_ATOMS = (str, bytes, bytearray, memoryview, range, array.array)
Items = Iterator[tuple[Key, Any]]


def is_nested(value: Any) -> bool:
    """Say whether tf.nest would look inside."""
    # TensorFlow wraps dicts and tuples in proxies of one class, which say that they are what they hold.
    kind: Any = type(value)
    return _is_container(value.__class__) or _is_flattened(kind)


@functools.lru_cache(maxsize=4096)
def _is_container(kind: Any) -> bool:
    return issubclass(kind, Sequence | Mapping | MappingView) and not issubclass(kind, _ATOMS)


@functools.lru_cache(maxsize=4096)
def _is_flattened(kind: Any) -> bool:
    return hasattr(kind, "__attrs_attrs__") or (
        hasattr(kind, "__tf_flatten__") and hasattr(kind, "__tf_unflatten__")
    )


def items(value: Any) -> Items:
    """Go through a container's entries, each with its step."""
    if type(value) is list:
        yield from _numbered(value)
    elif isinstance(value, Mapping):
        yield from _entries(value)
    elif hasattr(type(value), "__attrs_attrs__"):
        yield from ((attr(field.name), getattr(value, field.name)) for field in type(value).__attrs_attrs__)
    elif isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
        names: tuple[str, ...] = getattr(value, "_fields")  # noqa: B009 - of a named tuple, unknown to the types
        yield from ((attr(name), getattr(value, name)) for name in names)
    elif hasattr(type(value), "__tf_flatten__"):
        yield from _numbered(value.__tf_flatten__()[1])
    else:
        yield from _numbered(value)


def _entries(value: Mapping[Any, Any]) -> Items:
    try:
        names = sorted(value)
    except TypeError:
        names = list(value)
    for number, name in enumerate(names):
        yield step(name, number), value[name]


def step(name: object, number: int) -> Key:
    """Return the step to a dict's entry; a name that is no plain value is told by class and number."""
    if name is None or isinstance(name, str | int | float | bool):
        return key(name)
    if isinstance(name, tuple) and all(part is None or isinstance(part, str | int | float) for part in name):
        return key(repr(name))
    return key(f"<{type(name).__name__} {number}>")


def _numbered(value: Any) -> Items:
    for number, item in enumerate(value):
        yield index(number), item


def leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Go through what lies in nested containers; a container inside itself is not entered again."""
    if not is_nested(value):
        yield path, value
        return
    open_: list[tuple[Path, int, Items]] = [(path, id(value), items(value))]
    inside = {id(value)}
    while open_:
        here, number, rest = open_[-1]
        found = next(rest, None)
        if found is None:
            open_.pop()
            inside.discard(number)
            continue
        place, item = (*here, found[0]), found[1]
        if not is_nested(item):
            yield place, item
        elif id(item) not in inside:
            inside.add(id(item))
            open_.append((place, id(item), items(item)))
