"""Messages of SavedModels: meta graphs, nodes, saved objects."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttool.core import dtypes, limits
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import FormatError, LimitError
from ckpttool.core.tree import Path
from ckpttool.encodings import protobuf
from ckpttool.encodings.protobuf import Message

# Signatures that TensorFlow adds for itself (tensorflow/python/saved_model/constants.py).
_INTERNAL = frozenset(("__saved_model_init_op", "__saved_model_train_op"))
_COLLECTIONS = frozenset(("variables", "trainable_variables", "local_variables", "model_variables"))
# Second list of assets in TensorFlow 1.
_ASSET_COLLECTION = "saved_model_assets"
_SMALL = 4096
# A graph of 100,000 nodes has about a million fields, of which some 400,000 are kept.
_FIELDS = 4  # fields examined for each part that may be kept
_REFERENCE = 100  # types.proto: DT_FLOAT_REF is DT_FLOAT + 100


# MetaGraphDef: meta_info_def, graph_def, collection_def, signature_def, asset_file_def, object_graph_def.
_META_GRAPH = Message(dict.fromkeys((1, 2, 4, 5, 6, 7), protobuf.MESSAGES))
_ENTRY = Message({1: protobuf.TEXT, 2: protobuf.MESSAGE})
# MetaInfoDef: tags, tensorflow_version. AssetFileDef: filename. google.protobuf.Any: value.
_INFO = Message({4: protobuf.TEXTS, 5: protobuf.TEXT})
_ASSET, _ANY = Message({2: protobuf.TEXT}), Message({2: protobuf.MESSAGE})
# SignatureDef: inputs, outputs, method_name.
_SIGNATURE = Message({1: protobuf.MESSAGES, 2: protobuf.MESSAGES, 3: protobuf.TEXT})
# TensorInfo: name, dtype, tensor_shape; one of name, coo_sparse, composite_tensor.
_TENSOR = Message({1: protobuf.BINARY, 2: protobuf.INT32, 3: protobuf.MESSAGE})
_ENCODING = dict.fromkeys((1, 4, 5), protobuf.DELIMITED)
# TensorShapeProto: dim, unknown_rank. Dim: size.
_SHAPE, _DIM = Message({2: protobuf.MESSAGES, 3: protobuf.INT}), Message({1: protobuf.INT})
# CollectionDef: node_list, bytes_list, int64_list, float_list, any_list.
_COLLECTION = dict.fromkeys((1, 2, 3, 4, 5), protobuf.DELIMITED)
# VariableDef: variable_name, initializer_name, save_slice_info_def. SaveSliceInfoDef: full_name.
_VARIABLE = Message({1: protobuf.BINARY, 2: protobuf.BINARY, 4: protobuf.MESSAGE})
_SLICE = Message({1: protobuf.BINARY})


class FieldMeter:
    """Count the fields examined and parts kept, to limit the time and memory a file can use."""

    def __init__(self) -> None:
        """Start with the current limits."""
        self._kept = limits.current().graph_parts
        self._field_count = _FIELDS * self._kept

    def fields(self, data: memoryview, schema: protobuf.Schema) -> Iterable[tuple[int, int | memoryview]]:
        """Yield the fields of a schema; raise LimitError if the file has too many."""
        if len(data) > _SMALL:
            return protobuf.iter_fields(data, schema, self._look)
        fields = protobuf.parse_fields(data, schema)
        self._look(len(fields))
        return fields

    def decode(self, data: memoryview, message: Message) -> list[Any]:
        """Return the values of a message's fields (protobuf.decode); count them."""
        return protobuf.decode(data, message, self.fields, self.keep)

    def keep(self, count: int = 1) -> None:
        """Count parts kept in memory; raise LimitError if there are too many."""
        self._kept -= count
        if self._kept < 0:
            raise _limit_error("parts", 1, self._kept)

    def _look(self, count: int) -> None:
        self._field_count -= count
        if self._field_count < 0:
            raise _limit_error("fields", _FIELDS, self._field_count)


def _limit_error(what: str, times: int, left: int) -> LimitError:
    count = times * limits.current().graph_parts - left
    return limits.limit_error("graph_parts", f"it has too many {what}", count)


class TensorInfo(NamedTuple):
    """An input or output of a signature: its tensors in the graph, its type, and its shape.

    An extent of -1 is variable; a shape of None has no fixed rank.
    """

    names: tuple[bytes, ...]
    dtype: str
    shape: tuple[int, ...] | None


class Signature(NamedTuple):
    """A signature of the model, with inputs and outputs by the caller's names."""

    method: str
    inputs: dict[str, TensorInfo]
    outputs: dict[str, TensorInfo]


class VariableDef(NamedTuple):
    """A variable of TensorFlow 1: its own name and the node that initialises it.

    `whole` is the name of the partitioned variable that contains it as a slice, or empty.
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
    variables: dict[bytes, VariableDef]
    trained: frozenset[bytes] | None
    assets: tuple[str, ...]
    nodes: memoryview | None
    objects: memoryview | None


def parse_saved_model(data: memoryview, meter: FieldMeter) -> list[MetaGraph]:
    """Decode a SavedModel; raise CkpttoolError if it is damaged or has too many parts.

    Field numbers are from tensorflow/core/protobuf/saved_model.proto and meta_graph.proto, and from
    tensorflow/core/framework/variable.proto.
    """
    return [parse_meta_graph(graph, meter) for graph in iter_field(2, data, meter)]


def parse_meta_graph(data: memoryview, meter: FieldMeter) -> MetaGraph:
    """Decode a MetaGraphDef, of a SavedModel or a Saver; raise CkpttoolError if it is damaged."""
    information, graph, listed, signatures, assets, objects = meter.decode(data, _META_GRAPH)
    tags, version = meter.decode(_join_parts(information), _INFO)
    collections: dict[str, list[memoryview]] = {}
    for name, inner in (parse_map_entry(entry, meter) for entry in listed):
        if name in _COLLECTIONS or name == _ASSET_COLLECTION:
            collections[name] = list(_collection(inner, meter))
    assets += [meter.decode(asset, _ANY)[0] for asset in collections.pop(_ASSET_COLLECTION, ())]
    by_collection = {
        name: [_variable(value, meter) for value in variables] for name, variables in collections.items()
    }
    entries = (parse_map_entry(signature, meter) for signature in signatures)
    return MetaGraph(
        tuple(tags),
        version,
        {name: _signature(inner, meter) for name, inner in entries if name not in _INTERNAL},
        {variable.name: variable for variables in by_collection.values() for variable in variables},
        frozenset(v.name for v in by_collection.get("trainable_variables", ())) if by_collection else None,
        tuple(dict.fromkeys(filter(None, (meter.decode(asset, _ASSET)[0] for asset in assets)))),
        _join_parts(graph) if graph else None,
        _join_parts(objects) if objects else None,
    )


def _join_parts(parts: list[memoryview]) -> memoryview:
    return protobuf.merge_messages(parts, memoryview(b""))


def iter_field(number: int, data: memoryview, meter: FieldMeter) -> Iterator[memoryview]:
    """Yield a message's fields with one number, which are messages or strings; count them as kept."""
    for _, value in meter.fields(data, {number: protobuf.DELIMITED}):
        meter.keep()
        yield protobuf.as_message(value)


def last_oneof(data: memoryview, schema: protobuf.Schema, meter: FieldMeter) -> tuple[int, memoryview]:
    """Return the effective field of a oneof: the last one, with its parts merged. All fields are messages."""
    kind = 0
    parts: list[memoryview] = []
    for number, value in meter.fields(data, schema):
        kind, parts = number, [*(parts if number == kind else ()), protobuf.as_message(value)]
    return kind, _join_parts(parts)


def parse_map_entry(entry: memoryview, meter: FieldMeter) -> tuple[str, memoryview]:
    """Return the decoded entry of a map with message values."""
    name, inner = meter.decode(entry, _ENTRY)
    return name, inner


def _signature(data: memoryview, meter: FieldMeter) -> Signature:
    inputs, outputs, method = meter.decode(data, _SIGNATURE)
    return Signature(method, _tensors_by_name(inputs, meter), _tensors_by_name(outputs, meter))


def _tensors_by_name(entries: list[memoryview], meter: FieldMeter) -> dict[str, TensorInfo]:
    named = (parse_map_entry(entry, meter) for entry in entries)
    return {name: _parse_tensor_info(inner, meter) for name, inner in named}


def _parse_tensor_info(data: memoryview, meter: FieldMeter) -> TensorInfo:
    name, kind, shape = meter.decode(data, _TENSOR)
    number, encoding = last_oneof(data, _ENCODING, meter)
    names = [name] if number == 1 else []
    if number == 4:
        # A sparse tensor: the names of its values, indices and shape.
        names = [bytes(n) for part in (1, 2, 3) for n in [*iter_field(part, encoding, meter)][-1:]]
    elif number == 5:
        # A composite tensor (ragged, ...): its components are messages of the same type, one level deep.
        components = iter_field(2, encoding, meter)
        names = [bytes(n) for component in components for n in [*iter_field(1, component, meter)][-1:]]
    return TensorInfo(tuple(names), type_name(kind), partial_shape(shape, meter))


def type_name(number: int) -> str:
    """Return the name of a type in types.proto; a reference has the type of its target."""
    row = dtypes.BY_TENSORFLOW.get(number - _REFERENCE if number > _REFERENCE else number)
    return row.name if row is not None else f"type {number}"


def partial_shape(data: memoryview, meter: FieldMeter) -> tuple[int, ...] | None:
    """Decode a TensorShapeProto that may be incomplete: an unknown extent is -1, an unknown rank None."""
    dims, unknown = meter.decode(data, _SHAPE)
    sizes = tuple(meter.decode(dim, _DIM)[0] for dim in dims)
    return None if unknown else sizes


def _collection(data: memoryview, meter: FieldMeter) -> Iterator[memoryview]:
    # A bytes_list (2) contains VariableDefs, an any_list (5) messages with their type's name.
    kind, listed = last_oneof(data, _COLLECTION, meter)
    return iter_field(1, listed, meter) if kind in (2, 5) else iter(())


def _variable(data: memoryview, meter: FieldMeter) -> VariableDef:
    name, initializer, part = meter.decode(data, _VARIABLE)
    return VariableDef(node_name(name), node_name(initializer), meter.decode(part, _SLICE)[0])


def node_name(tensor: bytes) -> bytes:
    """Return the node of a tensor's or an input's name: `^a` and `a:1` both refer to node `a`."""
    return tensor.removeprefix(b"^").split(b":", 1)[0]


_VARIABLES = frozenset((b"Variable", b"VariableV2", b"VarHandleOp", b"AutoReloadVariable"))
# Operations between a variable and the one that saves it, or between its initial value and the source.
_READS = frozenset((b"Identity", b"ReadVariableOp"))
_ARITHMETIC = _READS | frozenset(
    (b"Add", b"AddV2", b"Sub", b"Mul", b"Cast", b"Reshape", b"Snapshot", b"StopGradient", b"Transpose")
)
# GraphDef: node, library. FunctionDefLibrary: function. NodeDef: name, op, input.
_GRAPH = {1: protobuf.DELIMITED, 2: protobuf.DELIMITED}
_LIBRARY = {1: protobuf.DELIMITED}
_NODE = Message({1: protobuf.BINARY, 2: protobuf.BINARY, 3: protobuf.BINARIES})
_MAX_CONE = 64  # limit on nodes examined to find a variable's initial value


class GraphNode(NamedTuple):
    """An operation: its kind, and the names of its inputs as stored."""

    op: bytes
    inputs: tuple[bytes, ...]


@dataclass(slots=True)
class GraphNodes:
    """A graph by node name.

    `saved` maps each checkpoint key to the variables (node names) saved under it; `count` is the
    number of nodes, `functions` the number of functions in the library.
    """

    nodes: dict[bytes, GraphNode] = field(default_factory=dict)
    saved: dict[bytes, list[bytes]] = field(default_factory=dict)
    count: int = 0
    functions: int = 0


def parse_graph_def(data: memoryview, meter: FieldMeter, *, count_only: bool = False) -> GraphNodes:
    """Decode a GraphDef; `count_only` keeps no node. Functions of the library are counted but not read.

    Field numbers are from tensorflow/core/framework/graph.proto, node_def.proto, attr_value.proto and
    tensor.proto. No operation is run: nodes are names, kinds of operation and inputs.
    """
    nodes = GraphNodes()
    lists: dict[bytes, memoryview] = {}
    for number, value in meter.fields(data, _GRAPH):
        if number == 1:
            nodes.count += 1
            if not count_only:
                _node(nodes.nodes, lists, protobuf.as_message(value), meter)
        else:
            nodes.functions += sum(1 for _ in meter.fields(protobuf.as_message(value), _LIBRARY))
    _find_saved(nodes, lists, meter)
    return nodes


def _node(
    nodes: dict[bytes, GraphNode], lists: dict[bytes, memoryview], data: memoryview, meter: FieldMeter
) -> None:
    name, op, inputs = meter.decode(data, _NODE)
    meter.keep()
    nodes[name] = GraphNode(op, tuple(inputs))
    if op == b"Const" and name.endswith(b"/tensor_names"):
        lists[name] = data


def _find_saved(graph: GraphNodes, lists: dict[bytes, memoryview], meter: FieldMeter) -> None:
    """Fill `saved` from the save operations.

    SaveV2 and the older SaveSlices have a prefix, the keys, their slices, and then one tensor for each key
    (tensorflow/core/ops/io_ops.cc). A partitioned variable has several under one key.
    """
    for node in graph.nodes.values():
        if node.op not in (b"SaveV2", b"SaveSlices") or len(node.inputs) < 3:
            continue
        names = lists.get(node_name(node.inputs[1]))
        for key, tensor in zip(_strings(names, meter) if names else (), node.inputs[3:], strict=False):
            variable = _variable_node(graph, node_name(tensor))
            if variable is not None:
                meter.keep()
                graph.saved.setdefault(key, []).append(variable)


def _variable_node(graph: GraphNodes, name: bytes) -> bytes | None:
    # A variable is saved directly, or through an operation that reads it.
    for _ in range(4):
        node = graph.nodes.get(name)
        if node is None:
            return None
        if node.op in _VARIABLES:
            return name
        if node.op not in _READS or not node.inputs:
            return None
        name = node_name(node.inputs[0])
    return None


def _strings(node: memoryview, meter: FieldMeter) -> Iterator[bytes]:
    # NodeDef.attr (5) is a map; a Const's "value" is AttrValue.tensor (8), whose string_val is 8 as well.
    content = memoryview(b"")
    for attribute in iter_field(5, node, meter):
        name, value = parse_map_entry(attribute, meter)
        content = value if name == "value" else content
    tensor = _join_parts(list(iter_field(8, content, meter)))
    for text in iter_field(8, tensor, meter):
        yield bytes(text)


def used_variables(graph: GraphNodes, outputs: Iterable[bytes], inputs: Iterable[bytes]) -> dict[bytes, None]:
    """Return the variables that the outputs depend on, without going back beyond the inputs that are fed."""
    fed = {node_name(name) for name in inputs}
    waiting = [node_name(name) for name in outputs]
    visited = set(waiting)
    variables: dict[bytes, None] = {}
    while waiting:
        name = waiting.pop()
        node = graph.nodes.get(name)
        if node is None or name in fed:
            continue
        if node.op in _VARIABLES:
            variables[name] = None
            continue
        for input_name in map(node_name, node.inputs):
            if input_name not in visited:
                visited.add(input_name)
                waiting.append(input_name)
    return variables


def initializer_op(graph: GraphNodes, name: bytes, assign: bytes) -> str | None:
    """Return the operation that provides a variable's initial value, such as `TruncatedNormal` or `Const`.

    `assign` is the node in its VariableDef (`NAME/Assign` without one). Sums, products and reshapes
    on the way are skipped; any other operation has priority over a constant.
    """
    node = graph.nodes.get(assign or name + b"/Assign")
    if node is None or len(node.inputs) < 2 or not node.op.startswith(b"Assign"):
        return None
    waiting, count = [node_name(node.inputs[1])], 0
    constant: str | None = None
    while waiting and count < _MAX_CONE:
        count += 1
        value = graph.nodes.get(waiting.pop(0))
        if value is None:
            continue
        if value.op in _ARITHMETIC:
            waiting += map(node_name, value.inputs[:_MAX_CONE])
        elif value.op == b"Const":
            constant = "Const"
        else:
            return value.op.decode("utf-8", "surrogateescape")
    return constant


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
_OBJECT = dict.fromkeys((1, 3, 13, *range(4, 11), 12), protobuf.DELIMITED)
# ObjectReference: node_id, local_name. SlotVariableReference: variable, slot_name, slot variable.
_OBJECT_REFERENCE = Message({1: protobuf.INT32, 2: protobuf.TEXT, 3: protobuf.INT32})
# SavedVariable: dtype, shape, trainable, name. SavedUserObject: identifier, metadata.
_OBJECT_VARIABLE = Message({1: protobuf.INT32, 2: protobuf.MESSAGE, 3: protobuf.INT, 6: protobuf.TEXT})
_USER = Message({1: protobuf.TEXT, 3: protobuf.BINARY})


class SavedVariable(NamedTuple):
    """A SavedVariable; `shape` is None if its rank is unknown, -1 is an unknown extent."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    trainable: bool


class SavedUserObject(NamedTuple):
    """A SavedUserObject: its identifier, Keras's JSON, and its class if it was registered."""

    identifier: str
    metadata: bytes
    registered: str = ""


@dataclass(slots=True)
class SavedObjects:
    """The graph by object number; 0 is the root.

    `slots` are an optimizer's variables by optimizer, owner variable and kind; `captures` are objects
    by name of concrete function; `constants` are nodes of the graph; `kinds` counts the objects.
    """

    children: list[dict[str, int]] = field(default_factory=list)
    variables: dict[int, SavedVariable] = field(default_factory=dict)
    users: dict[int, SavedUserObject] = field(default_factory=dict)
    functions: dict[int, tuple[str, ...]] = field(default_factory=dict)
    slots: dict[tuple[int, int, str], int] = field(default_factory=dict)
    captures: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[int, str] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)


def parse_object_graph(data: memoryview, meter: FieldMeter) -> SavedObjects:
    """Decode a SavedObjectGraph; raise FormatError for a number without an object.

    Field numbers are from tensorflow/core/protobuf/saved_object_graph.proto and trackable_object_graph.proto.
    Its object numbers differ from those in the bundle's own object graph: the two are joined along edges of
    equal names, as TensorFlow's loader does (tensorflow/python/saved_model/load.py).
    """
    objects = SavedObjects()
    for number, value in meter.fields(data, _GRAPH):
        if number == 1:
            meter.keep()
            _parse_object(objects, protobuf.as_message(value), meter)
        else:
            meter.keep()
            name, inner = parse_map_entry(protobuf.as_message(value), meter)
            objects.captures[name] = tuple(_bound_inputs(inner, meter))
    _require_known(objects)
    return objects


def _parse_object(objects: SavedObjects, data: memoryview, meter: FieldMeter) -> None:
    at = len(objects.children)
    children: dict[str, int] = {}
    objects.children.append(children)
    registered, kind = "", 0
    parts: list[memoryview] = []
    for number, value in meter.fields(data, _OBJECT):
        if number == 1:
            meter.keep()
            target, name, _ = meter.decode(protobuf.as_message(value), _OBJECT_REFERENCE)
            children.setdefault(name, target)
        elif number == 13:
            registered = protobuf.as_text(value)
        elif number == 3:
            meter.keep()
            of, name, variable = meter.decode(protobuf.as_message(value), _OBJECT_REFERENCE)
            objects.slots[at, of, name] = variable
        else:
            # An object has a single kind: the last one counts, with its parts merged.
            kind, parts = number, [*(parts if number == kind else ()), protobuf.as_message(value)]
    if kind:
        _content(objects, at, kind, _join_parts(parts), meter)
    if at in objects.users:
        objects.users[at] = objects.users[at]._replace(registered=registered)


def _content(objects: SavedObjects, at: int, number: int, data: memoryview, meter: FieldMeter) -> None:
    kind = _KINDS.get(number, "")
    if number == 4:
        objects.users[at] = SavedUserObject(*meter.decode(data, _USER))
        kind = objects.users[at].identifier
    elif number == 7:
        dtype, shape, trainable, name = meter.decode(data, _OBJECT_VARIABLE)
        objects.variables[at] = SavedVariable(
            name, type_name(dtype), partial_shape(shape, meter), bool(trainable)
        )
    elif number == 9:
        parts = iter_field(1, data, meter)
        objects.constants[at] = next((protobuf.as_text(part) for part in parts), "")
    elif number in (6, 8):
        # A SavedFunction lists its concrete functions in field 1; a bare one has only one name there.
        objects.functions[at] = tuple(map(protobuf.as_text, iter_field(1, data, meter)))
    if kind:
        objects.kinds[kind] += 1


def _bound_inputs(data: memoryview, meter: FieldMeter) -> Iterator[int]:
    for _, value in meter.fields(data, {2: protobuf.NUMBERS}):
        # A packed number takes at least one byte.
        meter.keep(1 if isinstance(value, int) else len(value))
        yield from map(protobuf.as_int32, protobuf.as_ints(value))


def _require_known(objects: SavedObjects) -> None:
    count = len(objects.children)
    for named in _iter_references(objects):
        for number in named:
            if not 0 <= number < count:
                raise FormatError(
                    "the graph refers to an object that does not exist",
                    expected=f"a number below {count}",
                    found=str(number),
                )


def _iter_references(objects: SavedObjects) -> Iterator[Iterable[int]]:
    for children in objects.children:
        yield children.values()
    yield from objects.captures.values()
    for (_, of, _), variable in objects.slots.items():
        yield of, variable


def follow_path(graph: SavedObjects, path: Path) -> Iterator[int]:
    """Follow edges from the root with the names of the path's steps, as far as they exist."""
    at = 0
    if graph.children:
        yield at
        for step in path:
            child = graph.children[at].get(str(step.value))
            if child is None:
                return
            yield (at := child)


def find_object(graph: SavedObjects, path: Path) -> int | None:
    """Return the object at the end of the path, or None if an edge is missing."""
    visited = list(follow_path(graph, path))
    return visited[-1] if len(visited) == len(path) + 1 else None


def parent_edges(graph: SavedObjects) -> dict[int, tuple[int, str]]:
    """Return the parent and edge of every reachable object on a shortest route from the root."""
    parents: dict[int, tuple[int, str]] = {0: (-1, "")} if graph.children else {}
    waiting = deque(parents)
    while waiting:
        at = waiting.popleft()
        for edge, child in graph.children[at].items():
            if child not in parents:
                parents[child] = (at, edge)
                waiting.append(child)
    return parents


def path_to_object(parents: Mapping[int, tuple[int, str]], number: int) -> tuple[str, ...] | None:
    """Return the edges from the root to an object; None without a route that is short enough."""
    edges: list[str] = []
    most = limits.current().graph_depth
    while number in parents:
        parent, edge = parents[number]
        if parent < 0:
            return tuple(reversed(edges))
        if len(edges) == most:
            return None
        edges.append(edge)
        number = parent
    return None
