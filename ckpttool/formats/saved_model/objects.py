"""The SavedObjectGraph of a TensorFlow 2 SavedModel: its objects, and which functions use which variables.

Field numbers are those of tensorflow/core/protobuf/saved_object_graph.proto and
trackable_object_graph.proto. Its numbers of objects are not those of the bundle's own object graph: the two
are joined along edges of equal names, as TensorFlow's loader does (tensorflow/python/saved_model/load.py).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool import limits
from ckpttool.errors import FormatError
from ckpttool.formats.saved_model.messages import Meter, entry, partial_shape, type_name
from ckpttool.leaf import Path
from ckpttool.wire import protobuf

_KINDS = {
    4: "user_object",
    5: "asset",
    6: "function",
    7: "variable",
    8: "bare_concrete_function",
    9: "constant",
    10: "resource",
    12: "captured_tensor",
}


# SavedObjectGraph: nodes, concrete_functions. SavedObject: children, slot_variables, kind, registered_name.
_GRAPH = {1: protobuf.DELIMITED, 2: protobuf.DELIMITED}
_OBJECT = dict.fromkeys((1, 3, 13, *range(4, 11), 12), protobuf.DELIMITED)
# ObjectReference: node_id, local_name. SlotVariableReference: variable, slot_name, slot variable.
_REFERENCE = {1: protobuf.NUMBER, 2: protobuf.DELIMITED, 3: protobuf.NUMBER}
# SavedVariable: dtype, shape, trainable, name.
_VARIABLE = {1: protobuf.NUMBER, 2: protobuf.DELIMITED, 3: protobuf.NUMBER, 6: protobuf.DELIMITED}


class Variable(NamedTuple):
    """A SavedVariable; `shape` is None where its rank is not known, -1 stands for an unknown extent."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    trainable: bool


class User(NamedTuple):
    """A SavedUserObject: its identifier, Keras's JSON about it, and its class if that was registered."""

    identifier: str
    metadata: bytes
    registered: str = ""


@dataclass(slots=True)
class Objects:
    """The graph by number of object; 0 is the root.

    `slots` are an optimizer's variables by optimizer, variable that they belong to, and kind; `captures` are
    objects by name of concrete function; `kinds` counts the objects.
    """

    children: list[dict[str, int]] = field(default_factory=list)
    variables: dict[int, Variable] = field(default_factory=dict)
    users: dict[int, User] = field(default_factory=dict)
    functions: dict[int, tuple[str, ...]] = field(default_factory=dict)
    slots: dict[tuple[int, int, str], int] = field(default_factory=dict)
    captures: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)


def parse(data: memoryview, meter: Meter) -> Objects:
    """Decode a SavedObjectGraph; raise FormatError when a number names no object."""
    found = Objects()
    for number, value in meter.fields(data, _GRAPH):
        if number == 1:
            meter.keep()
            _object(found, protobuf.message(value), meter)
        else:
            name, inner = entry(value, meter)
            found.captures[name] = tuple(_bound_inputs(inner, meter))
    _require_known(found)
    return found


def _object(found: Objects, data: memoryview, meter: Meter) -> None:
    at = len(found.children)
    children: dict[str, int] = {}
    found.children.append(children)
    registered, kind = "", 0
    parts: list[memoryview] = []
    for number, value in meter.fields(data, _OBJECT):
        if number == 1:
            meter.keep()
            target, name, _ = _reference(protobuf.message(value), meter)
            children.setdefault(name, target)
        elif number == 13:
            registered = protobuf.text(value)
        elif number == 3:
            meter.keep()
            of, name, variable = _reference(protobuf.message(value), meter)
            found.slots[at, of, name] = variable
        else:
            # An object is of one kind: the last one counts, and its parts are merged.
            kind, parts = number, [*(parts if number == kind else ()), protobuf.message(value)]
    if kind:
        _content(found, at, kind, protobuf.joined(parts, memoryview(b"")), meter)
    if at in found.users:
        found.users[at] = found.users[at]._replace(registered=registered)


def _content(found: Objects, at: int, number: int, data: memoryview, meter: Meter) -> None:
    kind = _KINDS.get(number, "")
    if number == 4:
        found.users[at] = _user(data, meter)
        kind = found.users[at].identifier
    elif number == 7:
        found.variables[at] = _variable(data, meter)
    elif number in (6, 8):
        found.functions[at] = tuple(_functions(data, meter))
    if kind:
        found.kinds[kind] += 1


def _reference(data: memoryview, meter: Meter) -> tuple[int, str, int]:
    # A child has number and name; a slot has a third field. Absent numbers are 0.
    numbers, name = {1: 0, 3: 0}, ""
    for number, value in meter.fields(data, _REFERENCE):
        if number in numbers:
            numbers[number] = protobuf.int32(value)
        else:
            name = protobuf.text(value)
    return numbers[1], name, numbers[3]


def _user(data: memoryview, meter: Meter) -> User:
    identifier, metadata = "", b""
    for number, value in meter.fields(data, {1: protobuf.DELIMITED, 3: protobuf.DELIMITED}):
        if number == 1:
            identifier = protobuf.text(value)
        else:
            metadata = bytes(protobuf.message(value))
    return User(identifier, metadata)


def _variable(data: memoryview, meter: Meter) -> Variable:
    name, kind, trainable = "", 0, False
    shapes: list[memoryview] = []
    for number, value in meter.fields(data, _VARIABLE):
        if number == 1:
            kind = protobuf.int32(value)
        elif number == 2:
            shapes.append(protobuf.message(value))
        elif number == 3:
            trainable = bool(protobuf.number(value))
        else:
            name = protobuf.text(value)
    shape = partial_shape(protobuf.joined(shapes, memoryview(b"")), meter)
    return Variable(name, type_name(kind), shape, trainable)


def _functions(data: memoryview, meter: Meter) -> Iterator[str]:
    # A SavedFunction lists its concrete functions in field 1; a bare one has its only name there.
    for _, value in meter.fields(data, {1: protobuf.DELIMITED}):
        meter.keep()
        yield protobuf.text(value)


def _bound_inputs(data: memoryview, meter: Meter) -> Iterator[int]:
    for _, value in meter.fields(data, {2: protobuf.NUMBERS}):
        # A packed number takes one byte at the least.
        meter.keep(1 if isinstance(value, int) else len(value))
        yield from map(protobuf.int32, protobuf.numbers(value))


def _require_known(found: Objects) -> None:
    count = len(found.children)
    for named in _named(found):
        for number in named:
            if not 0 <= number < count:
                raise FormatError(
                    "the graph names an object that it does not have",
                    expected=f"a number below {count}",
                    found=str(number),
                )


def _named(found: Objects) -> Iterator[Iterable[int]]:
    for children in found.children:
        yield children.values()
    yield from found.captures.values()
    for (_, of, _), variable in found.slots.items():
        yield of, variable


def walk(graph: Objects, path: Path) -> Iterator[int]:
    """Go from the root along edges that are called like the path's steps, as far as there are any."""
    at = 0
    if graph.children:
        yield at
        for step in path:
            child = graph.children[at].get(str(step.value))
            if child is None:
                return
            yield (at := child)


def find(graph: Objects, path: Path) -> int | None:
    """Return the object at the end of the path, or None if an edge is not there."""
    visited = list(walk(graph, path))
    return visited[-1] if len(visited) == len(path) + 1 else None


def spell(graph: Objects) -> dict[int, tuple[int, str]]:
    """Return every reachable object's parent and edge on a shortest way from the root."""
    parents: dict[int, tuple[int, str]] = {0: (-1, "")} if graph.children else {}
    waiting = deque(parents)
    while waiting:
        at = waiting.popleft()
        for edge, child in graph.children[at].items():
            if child not in parents:
                parents[child] = (at, edge)
                waiting.append(child)
    return parents


def steps(parents: Mapping[int, tuple[int, str]], number: int) -> tuple[str, ...] | None:
    """Return the edges from the root to an object; None if there is no way, or one that is too long."""
    found: list[str] = []
    most = limits.current().graph_depth
    while number in parents:
        parent, edge = parents[number]
        if parent < 0:
            return tuple(reversed(found))
        if len(found) == most:
            return None
        found.append(edge)
        number = parent
    return None
