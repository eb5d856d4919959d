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


_MESSAGE = protobuf.DELIMITED
# MetaGraphDef: meta_info_def, graph_def, collection_def, signature_def, asset_file_def, object_graph_def.
_META_GRAPH = dict.fromkeys((1, 2, 4, 5, 6, 7), _MESSAGE)
_ENTRY = {1: _MESSAGE, 2: _MESSAGE}
# MetaInfoDef: tags, tensorflow_version.
_INFO = {4: _MESSAGE, 5: _MESSAGE}
# SignatureDef: inputs, outputs, method_name.
_SIGNATURE = dict.fromkeys((1, 2, 3), _MESSAGE)
# TensorInfo: name, dtype, tensor_shape, coo_sparse, composite_tensor. TensorShapeProto: dim, unknown_rank.
_TENSOR = {**dict.fromkeys((1, 3, 4, 5), _MESSAGE), 2: protobuf.NUMBER}
_SHAPE = {2: _MESSAGE, 3: protobuf.NUMBER}
# CollectionDef: node_list, bytes_list, int64_list, float_list, any_list.
_COLLECTION = dict.fromkeys((1, 2, 3, 4, 5), _MESSAGE)
# VariableDef: variable_name, initializer_name, save_slice_info_def.
_VARIABLE = dict.fromkeys((1, 2, 4), _MESSAGE)


class Meter:
    """Counts fields looked at and parts kept, so that no file can ask for more time or memory than that."""

    def __init__(self) -> None:
        """Begin with the limits that hold."""
        self._kept = limits.current().graph_parts
        self._seen = _FIELDS * self._kept

    def fields(self, data: memoryview, schema: protobuf.Schema) -> Iterable[tuple[int, int | memoryview]]:
        """Go through the fields that a schema has; raise LimitError when the file has had too many."""
        if len(data) > _SMALL:
            return protobuf.each(data, schema, self._look)
        found = protobuf.fields(data, schema)
        self._look(len(found))
        return found

    def keep(self, count: int = 1) -> None:
        """Count things that stay in memory; raise LimitError when there are too many."""
        self._kept -= count
        if self._kept < 0:
            raise _too_many("parts", 1, self._kept)

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
    """One graph of a SavedModel. `nodes` and `objects` are messages that are not decoded yet.

    `trained` are the names in the collection of trained variables, or None if the graph has no collections.
    """

    tags: tuple[str, ...]
    version: str
    signatures: dict[str, Signature]
    variables: dict[bytes, Variable]
    trained: frozenset[bytes] | None
    assets: tuple[str, ...]
    nodes: memoryview | None
    objects: memoryview | None


def parse(data: memoryview, meter: Meter) -> list[MetaGraph]:
    """Decode a SavedModel; raise CkpttoolError when it is damaged or has too many parts."""
    return [_meta_graph(graph, meter) for graph in of_number(2, data, meter)]


def _meta_graph(data: memoryview, meter: Meter) -> MetaGraph:
    signatures: dict[str, Signature] = {}
    collections: dict[str, list[memoryview]] = {}
    assets: list[str] = []
    # What is no list may come in several parts: its information, its graph, its objects.
    parts: dict[int, list[memoryview]] = {1: [], 2: [], 7: []}
    for number, value in meter.fields(data, _META_GRAPH):
        if number in parts:
            meter.keep()
            parts[number].append(protobuf.message(value))
        elif number == 4:
            name, inner = entry(value, meter)
            if name in _COLLECTIONS or name == _ASSET_COLLECTION:
                collections[name] = list(_collection(inner, meter))
        elif number == 5:
            name, inner = entry(value, meter)
            if name not in _INTERNAL:
                signatures[name] = _signature(inner, meter)
        else:
            assets.append(_asset(protobuf.message(value), meter))
    information, graph, objects = (_joined(parts[number]) for number in (1, 2, 7))
    tags, version = _info(information, meter)
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
        graph if parts[2] else None,
        objects if parts[7] else None,
    )


def _joined(parts: list[memoryview]) -> memoryview:
    return protobuf.joined(parts, memoryview(b""))


def of_number(wanted: int, data: memoryview, meter: Meter) -> Iterator[memoryview]:
    """Go through a message's fields of one number, which are messages or strings; count them as kept."""
    for _, value in meter.fields(data, {wanted: protobuf.DELIMITED}):
        meter.keep()
        yield protobuf.message(value)


def last_of(data: memoryview, schema: protobuf.Schema, meter: Meter) -> tuple[int, memoryview]:
    """Return the field of a oneof that counts: the last one, its parts merged. All fields are messages."""
    kind = 0
    parts: list[memoryview] = []
    for number, value in meter.fields(data, schema):
        kind, parts = number, [*(parts if number == kind else ()), protobuf.message(value)]
    return kind, _joined(parts)


def entry(value: int | memoryview, meter: Meter) -> tuple[str, memoryview]:
    """Decode an entry of a map whose values are messages; count it as kept."""
    meter.keep()
    name, inner = "", []
    for number, part in meter.fields(protobuf.message(value), _ENTRY):
        if number == 1:
            name = protobuf.text(part)
        else:
            inner.append(protobuf.message(part))
    return name, _joined(inner)


def _info(data: memoryview, meter: Meter) -> tuple[tuple[str, ...], str]:
    tags, version = [], ""
    for number, value in meter.fields(data, _INFO):
        if number == 4:
            meter.keep()
            tags.append(protobuf.text(value))
        else:
            version = protobuf.text(value)
    return tuple(tags), version


def _signature(data: memoryview, meter: Meter) -> Signature:
    found = Signature("", {}, {})
    for number, value in meter.fields(data, _SIGNATURE):
        if number in (1, 2):
            name, inner = entry(value, meter)
            (found.inputs if number == 1 else found.outputs)[name] = _tensor(inner, meter)
        else:
            found = found._replace(method=protobuf.text(value))
    return found


def _tensor(data: memoryview, meter: Meter) -> TensorInfo:
    kind = number = 0
    parts: list[memoryview] = []
    shapes: list[memoryview] = []
    for field, value in meter.fields(data, _TENSOR):
        if field == 2:
            kind = protobuf.int32(value)
        elif field == 3:
            shapes.append(protobuf.message(value))
        else:
            # A name, a sparse or a composite tensor: the last one counts.
            merged = parts if field == number != 1 else ()
            number, parts = field, [*merged, protobuf.message(value)]
    encoding, names = _joined(parts), []
    if number == 1:
        names = [bytes(encoding)]
    elif number == 4:
        # A sparse tensor: the names of its values, indices and shape.
        names = [bytes(n) for part in (1, 2, 3) for n in [*of_number(part, encoding, meter)][-1:]]
    elif number == 5:
        # A composite tensor (ragged, ...): its components are such messages again, one level deep.
        components = of_number(2, encoding, meter)
        names = [bytes(n) for each in components for n in [*of_number(1, each, meter)][-1:]]
    return TensorInfo(tuple(names), type_name(kind), partial_shape(_joined(shapes), meter))


def type_name(number: int) -> str:
    """Return our name of a type in types.proto; a reference's type is that of what it refers to."""
    row = dtypes.BY_TENSORFLOW.get(number - _REFERENCE if number > _REFERENCE else number)
    return row.name if row is not None else f"type {number}"


def partial_shape(data: memoryview, meter: Meter) -> tuple[int, ...] | None:
    """Decode a TensorShapeProto that need not be complete: an unknown extent is -1, an unknown rank None."""
    dims, unknown = [], 0
    for number, value in meter.fields(data, _SHAPE):
        if number == 3:
            unknown = protobuf.number(value)
            continue
        size = 0
        for _, what in meter.fields(protobuf.message(value), {1: protobuf.NUMBER}):
            size = protobuf.number(what)
        dims.append(size)
    meter.keep(len(dims))
    return None if unknown else tuple(dims)


def _collection(data: memoryview, meter: Meter) -> Iterator[memoryview]:
    # A bytes_list (2) holds VariableDefs, an any_list (5) messages with their type's name.
    kind, listed = last_of(data, _COLLECTION, meter)
    return of_number(1, listed, meter) if kind in (2, 5) else iter(())


def _any(data: memoryview, meter: Meter) -> memoryview:
    return _last(2, data, meter)


def _last(wanted: int, data: memoryview, meter: Meter) -> memoryview:
    """Return a string or bytes field of which the last occurrence counts."""
    found = memoryview(b"")
    for _, value in meter.fields(data, {wanted: protobuf.DELIMITED}):
        found = protobuf.message(value)
    return found


def _asset(data: memoryview, meter: Meter) -> str:
    meter.keep()
    return protobuf.text(_last(2, data, meter))


def _variable(data: memoryview, meter: Meter) -> Variable:
    name = initializer = b""
    slices = []
    for number, value in meter.fields(data, _VARIABLE):
        if number == 1:
            name = node_name(bytes(protobuf.message(value)))
        elif number == 2:
            initializer = node_name(bytes(protobuf.message(value)))
        else:
            slices.append(protobuf.message(value))
    return Variable(name, initializer, bytes(_last(1, _joined(slices), meter)))


def node_name(tensor: bytes) -> bytes:
    """Return the node of a tensor's or an input's name: `^a` and `a:1` are of node `a`."""
    return tensor.removeprefix(b"^").split(b":", 1)[0]
