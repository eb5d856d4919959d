"""TensorFlow's stored graph of trackable objects: what each object holds, and what its edges are called.

Field numbers are those of tensorflow/core/protobuf/trackable_object_graph.proto. Which paths the graph
gives its variables is in `paths`, what optimizers and names
say about them in `roles`, and the tree that comes of it in `leaves`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ckpttool import limits
from ckpttool.errors import FormatError
from ckpttool.leaf import Key
from ckpttool.wire import protobuf

KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE = "VARIABLE_VALUE"
MARK = "/.ATTRIBUTES/"

# TrackableObjectGraph: nodes. TrackableObject: children, attributes, slot_variables, registered_saver.
_GRAPH = {1: protobuf.DELIMITED}
_OBJECT = dict.fromkeys((1, 2, 3, 4), protobuf.DELIMITED)
_CHILD = {1: protobuf.NUMBER, 2: protobuf.DELIMITED}
_ATTRIBUTE = dict.fromkeys((1, 2, 3), protobuf.DELIMITED)
_SLOT = {1: protobuf.NUMBER, 2: protobuf.DELIMITED, 3: protobuf.NUMBER}


class Attribute(NamedTuple):
    """A value that an object saved: the attribute's name, the variable's own name, the bundle key."""

    name: str
    full_name: str
    key: str


class Slot(NamedTuple):
    """An optimizer's variable `variable` of kind `name` that belongs to the variable `of` (node numbers)."""

    of: int
    name: str
    variable: int


class Node(NamedTuple):
    """One object: its children by edge name in the order stored, its values, its slot variables.

    `listlike` says that every child's name is a decimal index, as a list's are. `saver` names the registered
    saver that wrote the object's tensors under keys of its own.
    """

    children: dict[str, int]
    attributes: tuple[Attribute, ...]
    slots: tuple[Slot, ...]
    listlike: bool
    saver: str = ""


_EMPTY = Node({}, (), (), listlike=False)

Graph = list[Node]


def parse(data: bytes) -> Graph:
    """Decode a TrackableObjectGraph; node 0 is the root.

    Raise FormatError when an id names no node, LimitError for more objects, edges and values than are kept.
    """
    left = limits.current().graph_parts
    messages = [protobuf.message(value) for _, value in _fields(data, left, _GRAPH)]
    left -= len(messages)
    graph = []
    for message in messages:
        node = _node(message, len(messages), left)
        left -= len(node.children) + len(node.attributes) + len(node.slots)
        graph.append(node)
    return graph


def _fields(data: bytes, most: int, schema: protobuf.Schema) -> Iterable[tuple[int, int | bytes]]:
    # A field takes two bytes at the least.
    return protobuf.fields(data, schema) if len(data) <= 2 * most else _first(data, most, schema)


def _first(data: bytes, most: int, schema: protobuf.Schema) -> Iterator[tuple[int, int | bytes]]:
    for count, field in enumerate(protobuf.each(data, schema)):
        if count > most:
            raise limits.exceeded("graph_parts", "the object graph has too many parts", None)
        yield field


def _node(data: bytes, count: int, left: int) -> Node:
    if not data:
        return _EMPTY
    children: dict[str, int] = {}
    saver: list[bytes] = []
    attributes: list[Attribute] = []
    slots: list[Slot] = []
    for number, value in _fields(data, left, _OBJECT):
        if number == 1:
            target, name = _child(protobuf.message(value), count)
            if name in children:
                raise FormatError(f"an object has two children called {name!r}", path=KEY)
            children[name] = target
        elif number == 2:
            attributes.append(_attribute(protobuf.message(value)))
        elif number == 3:
            slots.append(_slot(protobuf.message(value), count))
        else:
            saver.append(protobuf.message(value))
    called = _saver(protobuf.joined(saver, b"")) if saver else ""
    return Node(children, tuple(attributes), tuple(slots), is_listlike(children), called)


def _child(data: bytes, count: int) -> tuple[int, str]:
    # An absent id is 0, the root, and the graph that holds this child has one.
    target, name = 0, ""
    for number, value in protobuf.fields(data, _CHILD):
        if number == 1:
            target = protobuf.int32(value)
        else:
            name = protobuf.text(value)
    return _id(target, count), name


def _attribute(data: bytes) -> Attribute:
    found = ["", "", ""]
    for number, value in protobuf.fields(data, _ATTRIBUTE):
        found[number - 1] = protobuf.text(value)
    return Attribute(*found)


def _saver(data: bytes) -> str:
    # RegisteredSaver: name (1), object_name (2; what the saver calls the object).
    name = ""
    for _, value in protobuf.fields(data, {1: protobuf.DELIMITED}):
        name = protobuf.text(value)
    return name


def _slot(data: bytes, count: int) -> Slot:
    ids, name = {1: 0, 3: 0}, ""
    for number, value in protobuf.fields(data, _SLOT):
        if number in ids:
            ids[number] = protobuf.int32(value)
        else:
            name = protobuf.text(value)
    return Slot(_id(ids[1], count), name, _id(ids[3], count))


def _id(number: int, count: int) -> int:
    if not 0 <= number < count:
        raise FormatError(
            "the object graph names an object that it does not have",
            path=KEY,
            expected=f"a number below {count}",
            found=str(number),
        )
    return number


def is_listlike(children: Collection[str]) -> bool:
    """Say whether every child's name is a decimal index, and there is one."""
    return bool(children) and all(map(_is_index, children))


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and (name[0] != "0" or name == "0")


def step(node: Node, edge: str) -> Key:
    """Return the path's key for one of the node's edges."""
    return Key("index", int(edge)) if node.listlike else Key("attr", edge)


def path_of_key(key: str) -> tuple[Key, ...]:
    """Return the path that a bundle key spells, for what no object in the graph names.

    The key's edges are escaped by `.` -> `..` and `/` -> `.S`
    (tensorflow/python/trackable/trackable_utils.py). A key without the mark is not of this kind, and is
    taken as it stands: registered savers choose their own.
    """
    edges, mark, attribute = key.partition(MARK)
    if not mark:
        return tuple(Key("attr", part) for part in key.split("/"))
    steps = [Key("attr", unescaped(edge)) for edge in edges.split("/")]
    if attribute != VALUE:
        steps.append(Key("attr", unescaped(attribute)))
    return tuple(steps)


def unescaped(edge: str) -> str:
    """Return an edge or attribute as its object has it, from the form that keys have."""
    return edge.replace("..", "\0").replace(".S", "/").replace("\0", ".")


def escaped(edge: str) -> str:
    """Return an edge or attribute in the form that keys have; the inverse of `unescaped`."""
    return edge.replace(".", "..").replace("/", ".S")


def attribute_path(name: str, suffix: str = "") -> tuple[Key, ...]:
    """Return the steps from an object to its attribute: none to a variable's value.

    The proto holds a name as the object gives it, or escaped if the object serializes itself
    (`_serialize_to_tensors`; tensorflow/python/checkpoint/save_util.py), so that the key escapes it twice.
    `suffix` is what a bundle key has beyond it.
    """
    if name == VALUE and not suffix:
        return ()
    plain = unescaped(name)
    return (Key("attr", (plain if escaped(plain) == name else name) + suffix),)
