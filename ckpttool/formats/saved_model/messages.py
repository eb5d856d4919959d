"""The messages of saved_model.pb as records: what is kept of each MetaGraph, bounded in number.

Field numbers are those of tensorflow/core/protobuf/saved_model.proto and meta_graph.proto, and of
tensorflow/core/framework/variable.proto.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckpttool import dtypes, limits
from ckpttool.errors import LimitError
from ckpttool.wire import protobuf

# Signatures that TensorFlow adds for itself (tensorflow/python/saved_model/constants.py).
_INTERNAL = frozenset(("__saved_model_init_op", "__saved_model_train_op"))
_COLLECTIONS = frozenset(("variables", "trainable_variables", "local_variables", "model_variables"))
# Where TensorFlow 1 lists its assets a second time.
_ASSET_COLLECTION = "saved_model_assets"
_SMALL = 4096
# A graph of 100,000 nodes has about a million fields, of which some 400,000 are kept.
_FIELDS = 4  # that are looked at for each part that may be kept
_REFERENCE = 100  # types.proto: DT_FLOAT_REF is DT_FLOAT + 100


class Meter:
    """Counts fields looked at and parts kept, so that no file can ask for more time or memory than that."""

    def __init__(self) -> None:
        """Begin with the limits that hold."""
        self._kept = limits.current().graph_parts
        self._seen = _FIELDS * self._kept

    def fields(self, data: memoryview) -> Iterable[tuple[int, int | memoryview]]:
        """Go through a message's fields; raise LimitError when the file has had too many."""
        if len(data) > _SMALL:
            return self._each(data)
        found = protobuf.fields(data)
        self._look(len(found))
        return found

    def keep(self, count: int = 1) -> None:
        """Count things that stay in memory; raise LimitError when there are too many."""
        self._kept -= count
        if self._kept < 0:
            raise _too_many("parts", 1, self._kept)

    def _each(self, data: memoryview) -> Iterable[tuple[int, int | memoryview]]:
        for field in protobuf.each(data):
            self._look(1)
            yield field

    def _look(self, count: int) -> None:
        self._seen -= count
        if self._seen < 0:
            raise _too_many("fields", _FIELDS, self._seen)


def _too_many(what: str, times: int, left: int) -> LimitError:
    found = times * limits.current().graph_parts - left
    return limits.exceeded("graph_parts", f"it has too many {what}", found)


class TensorInfo(NamedTuple):
    """An input or output of a signature: the graph's tensors behind it, its type, and its shape.

    An extent of -1 is not fixed; a shape of None has no fixed rank.
    """

    names: tuple[bytes, ...]
    dtype: str
    shape: tuple[int, ...] | None


class Signature(NamedTuple):
    """What can be asked of the model, by the names that the caller uses."""

    method: str
    inputs: dict[str, TensorInfo]
    outputs: dict[str, TensorInfo]


class Variable(NamedTuple):
    """A variable of TensorFlow 1: its own name and the node that initialises it.

    `whole` is the name of the partitioned variable that it is a slice of, or empty.
    """

    name: bytes
    initializer: bytes
    whole: bytes


class MetaGraph(NamedTuple):
    """One graph of a SavedModel. `nodes` and `objects` are messages that are not looked into yet.

    `trained` are the names in the collection of trained variables, or None if the graph has no collections.
    """

    tags: tuple[str, ...]
    version: str
    signatures: dict[str, Signature]
    variables: dict[bytes, Variable]
    trained: frozenset[bytes] | None
    assets: tuple[str, ...]
    nodes: tuple[memoryview, ...]
    objects: tuple[memoryview, ...]


def parse(data: memoryview, meter: Meter) -> list[MetaGraph]:
    """Decode a SavedModel; raise CkpttoolError when it is damaged or has too many parts."""
    return [_meta_graph(graph, meter) for graph in of_number(2, data, meter)]


def _meta_graph(data: memoryview, meter: Meter) -> MetaGraph:
    tags: tuple[str, ...] = ()
    version = ""
    signatures: dict[str, Signature] = {}
    collections: dict[str, list[memoryview]] = {}
    assets: list[str] = []
    nodes: list[memoryview] = []
    objects: list[memoryview] = []
    for number, value in meter.fields(data):
        if number == 1:
            tags, version = _info(protobuf.message(value), meter)
        elif number in (2, 7):
            meter.keep()
            (nodes if number == 2 else objects).append(protobuf.message(value))
        elif number == 4:
            name, inner = entry(value, meter)
            if name in _COLLECTIONS or name == _ASSET_COLLECTION:
                collections[name] = _collection(inner, meter)
        elif number == 5:
            name, inner = entry(value, meter)
            if name not in _INTERNAL:
                signatures[name] = _signature(inner, meter)
        elif number == 6:
            assets.append(_asset(protobuf.message(value), meter))
    assets += [_asset(_any(each, meter), meter) for each in collections.pop(_ASSET_COLLECTION, ())]
    by_collection = {
        name: [_variable(each, meter) for each in listed] for name, listed in collections.items()
    }
    return MetaGraph(
        tags,
        version,
        signatures,
        {variable.name: variable for listed in by_collection.values() for variable in listed},
        frozenset(v.name for v in by_collection.get("trainable_variables", ())) if by_collection else None,
        tuple(dict.fromkeys(filter(None, assets))),
        tuple(nodes),
        tuple(objects),
    )


def of_number(wanted: int, data: memoryview, meter: Meter) -> Iterator[memoryview]:
    """Go through a message's fields of one number, which are messages or strings; count them as kept."""
    for number, value in meter.fields(data):
        if number == wanted:
            meter.keep()
            yield protobuf.message(value)


def entry(value: int | memoryview, meter: Meter) -> tuple[str, memoryview]:
    """Decode an entry of a map whose values are messages; count it as kept."""
    meter.keep()
    name, inner = "", memoryview(b"")
    for number, part in meter.fields(protobuf.message(value)):
        if number == 1:
            name = protobuf.text(part)
        elif number == 2:
            inner = protobuf.message(part)
    return name, inner


def _info(data: memoryview, meter: Meter) -> tuple[tuple[str, ...], str]:
    tags, version = [], ""
    for number, value in meter.fields(data):
        if number == 4:
            meter.keep()
            tags.append(protobuf.text(value))
        elif number == 5:
            version = protobuf.text(value)
    return tuple(tags), version


def _signature(data: memoryview, meter: Meter) -> Signature:
    found = Signature("", {}, {})
    for number, value in meter.fields(data):
        if number in (1, 2):
            name, inner = entry(value, meter)
            (found.inputs if number == 1 else found.outputs)[name] = _tensor(inner, meter)
        elif number == 3:
            found = found._replace(method=protobuf.text(value))
    return found


def _tensor(data: memoryview, meter: Meter) -> TensorInfo:
    names: list[bytes] = []
    components: list[memoryview] = []
    kind = 0
    shape: tuple[int, ...] | None = ()
    for number, value in meter.fields(data):
        if number == 1:
            names.append(bytes(protobuf.message(value)))
        elif number == 2:
            kind = protobuf.number(value)
        elif number == 3:
            shape = partial_shape(protobuf.message(value), meter)
        elif number == 4:
            # A sparse tensor: the names of its values, indices and shape.
            names += [bytes(n) for part in (1, 2, 3) for n in of_number(part, protobuf.message(value), meter)]
        elif number == 5:
            # A composite tensor (ragged, ...): its components are such messages again, one level deep.
            components += of_number(2, protobuf.message(value), meter)
    names += [bytes(name) for component in components for name in of_number(1, component, meter)]
    return TensorInfo(tuple(names), type_name(kind), shape)


def type_name(number: int) -> str:
    """Return our name of a type in types.proto; a reference's type is that of what it refers to."""
    row = dtypes.BY_TENSORFLOW.get(number - _REFERENCE if number > _REFERENCE else number)
    return row.name if row is not None else f"type {number}"


def partial_shape(data: memoryview, meter: Meter) -> tuple[int, ...] | None:
    """Decode a TensorShapeProto that need not be complete: an unknown extent is -1, an unknown rank None."""
    dims = []
    for number, value in meter.fields(data):
        if number == 3 and value:
            return None
        if number == 2:
            size = 0
            for part, what in meter.fields(protobuf.message(value)):
                size = protobuf.number(what) if part == 1 else size
            dims.append(size)
    meter.keep(len(dims))
    return tuple(dims)


def _collection(data: memoryview, meter: Meter) -> list[memoryview]:
    # A bytes_list (2) holds VariableDefs, an any_list (5) messages with their type's name.
    lists = [protobuf.message(value) for number, value in meter.fields(data) if number in (2, 5)]
    return [each for listed in lists for each in of_number(1, listed, meter)]


def _any(data: memoryview, meter: Meter) -> memoryview:
    inner = memoryview(b"")
    for number, value in meter.fields(data):
        inner = protobuf.message(value) if number == 2 else inner
    return inner


def _asset(data: memoryview, meter: Meter) -> str:
    meter.keep()
    name = ""
    for number, value in meter.fields(data):
        name = protobuf.text(value) if number == 2 else name
    return name


def _variable(data: memoryview, meter: Meter) -> Variable:
    name = initializer = whole = b""
    for number, value in meter.fields(data):
        if number == 1:
            name = node_name(bytes(protobuf.message(value)))
        elif number == 2:
            initializer = node_name(bytes(protobuf.message(value)))
        elif number == 4:
            for part, what in meter.fields(protobuf.message(value)):
                whole = bytes(protobuf.message(what)) if part == 1 else whole
    return Variable(name, initializer, whole)


def node_name(tensor: bytes) -> bytes:
    """Return the node of a tensor's or an input's name: `^a` and `a:1` are of node `a`."""
    return tensor.removeprefix(b"^").split(b":", 1)[0]
