"""The messages of an ONNX model as records: its graph, nodes, attributes and constants, bounded in number.

Field numbers are those of onnx/onnx.proto. The bytes of tensors are not decoded: records say where they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpttool import limits
from ckpttool.errors import FormatError
from ckpttool.wire import protobuf

_TEXT, _NUMBER, _WORD = protobuf.DELIMITED, protobuf.NUMBER, protobuf.WORD
# ModelProto: ir_version, producer_name, producer_version, domain, model_version, graph, opset_import,
# metadata_props, training_info, functions.
_MODEL = {1: _NUMBER, 2: _TEXT, 3: _TEXT, 4: _TEXT, 5: _NUMBER, 7: _TEXT, 8: _TEXT, 14: _TEXT, 20: _TEXT}
_MODEL[25] = _TEXT
# GraphProto: node, name, initializer, input, output, sparse_initializer.
_GRAPH = dict.fromkeys((1, 2, 5, 11, 12, 15), _TEXT)
# NodeProto: input, output, name, op_type, attribute, domain.
_NODE = dict.fromkeys((1, 2, 3, 4, 5, 7), _TEXT)
# AttributeProto: name, f, i, s, t, g, floats, ints, strings, tensors, graphs, type, ref_attr_name,
# sparse_tensor.
_ATTRIBUTE = {
    **dict.fromkeys((1, 4, 5, 6, 9, 10, 11, 21, 22), _TEXT),
    2: _WORD,
    3: _NUMBER,
    7: protobuf.WORDS,
    8: protobuf.NUMBERS,
    20: _NUMBER,
}
# TensorProto: dims, data_type, segment, float_data, int32_data, string_data, int64_data, name, raw_data,
# double_data, uint64_data, external_data, data_location.
_TENSOR = {
    1: protobuf.NUMBERS,
    2: _NUMBER,
    3: _TEXT,
    4: protobuf.WORDS,
    5: protobuf.NUMBERS,
    6: _TEXT,
    7: protobuf.NUMBERS,
    8: _TEXT,
    9: _TEXT,
    10: protobuf.LONGS,
    11: protobuf.NUMBERS,
    13: _TEXT,
    14: _NUMBER,
}
FLOATS, INT32S, STRINGS, INT64S, RAW, DOUBLES, UINT64S = 4, 5, 6, 7, 9, 10, 11
_DATA = frozenset((FLOATS, INT32S, STRINGS, INT64S, RAW, DOUBLES, UINT64S))
_WIDTHS = {FLOATS: 4, DOUBLES: 8}
_EXTERNAL = 1
# SparseTensorProto: values, dims. ValueInfoProto: name, type. TypeProto: tensor_type. TypeProto.Tensor:
# elem_type, shape. TensorShapeProto: dim. Dimension: dim_value, dim_param.
_SPARSE = {1: _TEXT, 3: protobuf.NUMBERS}
_VALUE, _TYPE, _SHAPED = {1: _TEXT, 2: _TEXT}, {1: _TEXT}, {1: _NUMBER, 2: _TEXT}
_SHAPE, _EXTENT = {1: _TEXT}, {1: _NUMBER, 2: _TEXT}
# FunctionProto: name, input, output, attribute, node, domain, attribute_proto.
_FUNCTION = dict.fromkeys((1, 4, 5, 6, 7, 10, 11), _TEXT)
_PAIR, _OPSET = {1: _TEXT, 2: _TEXT}, {1: _TEXT, 2: _NUMBER}
_FIELDS = 4  # that are looked at for each part that may be kept
_RANK = 1000  # dimensions that are listed; no array library has more than 64
# AttributeProto.AttributeType.
_KINDS = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8, 10: 9, 11: 10, 22: 11}
_HIGH = bytes(range(0x80, 0x100))
_OTHER_DOMAINS = ("", "ai.onnx")


class Tensor(NamedTuple):
    """A constant: its name, the number of its type, its shape, and where its elements are.

    `start` and `stop` enclose the message. `held` counts the elements (bytes of raw data) in each field of
    data, `run` is the place of raw data or of numbers of fixed width that stand in one run. `external` are
    the entries that name another file, None where the message itself holds the data.
    """

    name: str
    code: int
    dims: tuple[int, ...]
    start: int
    stop: int
    held: Mapping[int, int]
    run: tuple[int, int] | None
    external: Mapping[str, str] | None
    segmented: bool


class Sparse(NamedTuple):
    """A constant of few elements that are not zero: its values, and the shape of the whole."""

    values: Tensor | None
    dims: tuple[int, ...]


class Attribute(NamedTuple):
    """A setting of a node: a number, bytes, a Tensor, a Graph, or a tuple of these.

    `ref` is the name of the attribute of a function whose value it takes.
    """

    kind: int
    value: Any
    ref: str = ""

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of a repeated setting, or the one value."""
        plain = isinstance(self.value, tuple) and not isinstance(self.value, Tensor | Sparse | Graph)
        return tuple(self.value) if plain else (self.value,)


class Node(NamedTuple):
    """One operator with the names of the values that it takes and gives; "" for one that is left out."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]

    @property
    def title(self) -> str:
        """The operator's name, with its domain where that is not ONNX's own."""
        return self.op if self.domain in _OTHER_DOMAINS else f"{self.domain}.{self.op}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value."""
        found = self.attributes.get(name)
        return default if found is None else found.value


class Value(NamedTuple):
    """An input or output: the number of its type (0 for what is no tensor) and its shape.

    An extent is a number, or the name of one that is not fixed ("" for none); a shape of None is not given.
    """

    name: str
    code: int
    shape: tuple[int | str, ...] | None


class Graph(NamedTuple):
    """A graph: nodes in the order of computation, constants, inputs and outputs."""

    name: str
    nodes: tuple[Node, ...]
    initializers: tuple[Tensor, ...]
    sparse: tuple[Sparse, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


class Function(NamedTuple):
    """An operator that the model defines itself."""

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    nodes: tuple[Node, ...]


class Model(NamedTuple):
    """A whole model; `opsets` are versions of operators by domain, `training` counts graphs of training."""

    ir_version: int
    producer: str
    opsets: Mapping[str, int]
    graph: Graph
    functions: tuple[Function, ...]
    metadata: Mapping[str, str]
    training: int


def parse(data: memoryview) -> Model:
    """Return the model that a file's bytes are; raise FormatError where they are none."""
    return _Parser(data).model()


@dataclass
class _Parser:
    """Reads messages between positions of the file's bytes, and counts what is looked at and kept."""

    data: memoryview
    seen: int = field(default_factory=lambda: _FIELDS * limits.current().graph_parts)
    kept: int = field(default_factory=lambda: limits.current().graph_parts)

    def model(self) -> Model:
        texts, graphs, training = {2: "", 3: ""}, list[tuple[int, int]](), 0
        version: int | None = None
        opsets: dict[str, int] = {}
        functions: list[Function] = []
        metadata: dict[str, str] = {}
        for number, value, start, stop in self._fields(0, len(self.data), _MODEL):
            if number == 1:
                version = protobuf.number(value)
            elif number in texts:
                texts[number] = protobuf.text(value)
            elif number == 7:
                graphs.append((start, stop))
            elif number == 8:
                domain, opset = self._opset(start, stop)
                opsets[domain] = opset
            elif number == 14:
                name, text = self._pair(start, stop)
                metadata[name] = text
            elif number == 25:
                functions.append(self._function(start, stop))
            training += number == 20
        if version is None or not opsets or not graphs:
            raise FormatError(
                "the model is not complete",
                expected="a version, a graph and versions of operators",
                found=", ".join(
                    word
                    for word, there in (
                        ("a version", version is not None),
                        ("a graph", graphs),
                        ("versions of operators", opsets),
                    )
                    if there
                )
                or "none of them",
            )
        if len(graphs) > 1:
            raise FormatError("the model has more than one graph", found=str(len(graphs)))
        graph = self._graph(*graphs[0], 0)
        producer = " ".join(text for text in texts.values() if text)
        return Model(version, producer, opsets, graph, tuple(functions), metadata, training)

    def _fields(
        self, start: int, stop: int, schema: protobuf.Schema
    ) -> Iterator[tuple[int, int | memoryview, int, int]]:
        """Go through the fields, each with the positions of its run of bytes."""
        for number, value, end in protobuf.located(self.data, start, stop, schema, self._look):
            yield number, value, end - (0 if isinstance(value, int) else len(value)), end

    def _look(self, count: int) -> None:
        self.seen -= count
        if self.seen < 0:
            raise self._too_many("fields")

    def _keep(self, count: int = 1) -> None:
        self.kept -= count
        if self.kept < 0:
            raise self._too_many("parts")

    @staticmethod
    def _too_many(what: str) -> Exception:
        return limits.exceeded("graph_parts", f"the model has too many {what}", None)

    def _pair(self, start: int, stop: int) -> tuple[str, str]:
        self._keep()
        found = {n: protobuf.text(value) for n, value, _, _ in self._fields(start, stop, _PAIR)}
        return found.get(1, ""), found.get(2, "")

    def _opset(self, start: int, stop: int) -> tuple[str, int]:
        self._keep()
        domain, version = "", 0
        for number, value, _, _ in self._fields(start, stop, _OPSET):
            if number == 1:
                domain = protobuf.text(value)
            else:
                version = protobuf.number(value)
        return domain, version

    def _graph(self, start: int, stop: int, depth: int) -> Graph:
        if depth > limits.current().message_depth:
            raise limits.exceeded("message_depth", "the model has too many graphs inside one another", depth)
        name = ""
        nodes: list[Node] = []
        tensors: list[Tensor] = []
        sparse: list[Sparse] = []
        values: dict[int, list[Value]] = {11: [], 12: []}
        for number, value, begin, end in self._fields(start, stop, _GRAPH):
            if number == 2:
                name = protobuf.text(value)
                continue
            self._keep()
            if number == 1:
                nodes.append(self._node(begin, end, depth))
            elif number == 5:
                tensors.append(self._tensor(begin, end))
            elif number == 15:
                sparse.append(self._sparse(begin, end))
            else:
                values[number].append(self._value(begin, end))
        inputs, outputs = tuple(values[11]), tuple(values[12])
        return Graph(name, tuple(nodes), tuple(tensors), tuple(sparse), inputs, outputs)

    def _node(self, start: int, stop: int, depth: int) -> Node:
        texts = {3: "", 4: "", 7: ""}
        names: dict[int, list[str]] = {1: [], 2: []}
        attributes: dict[str, Attribute] = {}
        for number, value, begin, end in self._fields(start, stop, _NODE):
            if number == 5:
                self._keep()
                name, attribute = self._attribute(begin, end, depth)
                if name in attributes:
                    raise FormatError("a node has one attribute twice", found=name[:80], offset=begin)
                attributes[name] = attribute
            elif number in texts:
                texts[number] = protobuf.text(value)
            else:
                self._keep()
                names[number].append(protobuf.text(value))
        return Node(texts[4], texts[7], texts[3], tuple(names[1]), tuple(names[2]), attributes)

    def _attribute(self, start: int, stop: int, depth: int) -> tuple[str, Attribute]:
        name = ref = ""
        kind = 0
        found: dict[int, Any] = {}
        for number, value, begin, end in self._fields(start, stop, _ATTRIBUTE):
            if number == 1:
                name = protobuf.text(value)
            elif number == 21:
                ref = protobuf.text(value)
            elif number == 20:
                kind = protobuf.int32(value)
            else:
                self._element(found, number, value, (begin, end), depth)
        of = {_KINDS[number]: each for number, each in found.items()}
        if not kind and len(of) == 1:
            (kind,) = of
        held = of.get(kind, _EMPTY.get(kind))
        return name, Attribute(kind, tuple(held) if isinstance(held, list) else held, ref)

    def _element(
        self, found: dict[int, Any], number: int, value: int | memoryview, at: tuple[int, int], depth: int
    ) -> None:
        """Add one field's value to those of an attribute."""
        if number == 2:
            found[number] = struct.unpack("<f", protobuf.number(value).to_bytes(4, "little"))[0]
        elif number == 3:
            found[number] = protobuf.number(value)
        elif number == 4:
            found[number] = bytes(protobuf.message(value))
        elif number == 5:
            found[number] = self._tensor(*at)
        elif number == 6:
            found[number] = self._graph(*at, depth + 1)
        elif number == 22:
            found[number] = self._sparse(*at)
        else:
            known = found.setdefault(number, [])
            self._keep(1 if isinstance(value, int) or number in (9, 10, 11) else max(1, len(value)))
            known += self._elements(number, value, at, depth)

    def _elements(
        self, number: int, value: int | memoryview, at: tuple[int, int], depth: int
    ) -> list[Any] | tuple[Any, ...]:
        if number == 7:
            data = value.to_bytes(4, "little") if isinstance(value, int) else bytes(value)
            if len(data) % 4:
                raise FormatError("a run of numbers ends within one", offset=at[0])
            return struct.unpack(f"<{len(data) // 4}f", data)
        if number == 8:
            return protobuf.numbers(value)
        if number == 9:
            return [bytes(protobuf.message(value))]
        return [self._tensor(*at) if number == 10 else self._graph(*at, depth + 1)]

    def _tensor(self, start: int, stop: int) -> Tensor:  # noqa: C901  # a branch for each field
        name, code, place, segmented = "", 0, 0, False
        dims: list[int] = []
        external: dict[str, str] = {}
        held: dict[int, int] = {}
        runs: dict[int, list[tuple[int, int]]] = {}
        for number, value, begin, end in self._fields(start, stop, _TENSOR):
            if number == 1:
                if not isinstance(value, int) and len(value) > 10 * _RANK:
                    raise FormatError("a tensor has too many dimensions", offset=begin)
                dims += protobuf.numbers(value)
            elif number == 2:
                code = protobuf.int32(value)
            elif number == 8:
                name = protobuf.text(value)
            elif number == 14:
                place = protobuf.int32(value)
            elif number == 13:
                key, text = self._pair(begin, end)
                external[key] = text
            elif number == RAW:
                held[RAW], runs[RAW] = end - begin, [(begin, end - begin)]
            elif number in _DATA:
                held[number] = held.get(number, 0) + _counted(number, value, begin)
                runs.setdefault(number, []).append((begin, end - begin))
            segmented = segmented or number == 3
        if len(dims) > _RANK or min(dims, default=0) < 0:
            raise FormatError(
                "a tensor has a shape that cannot be",
                path=repr(name[:200]),
                offset=start,
                found=str(dims[:8]),
            )
        held = {number: count for number, count in held.items() if count or number == RAW}
        whole = [runs[number] for number in held if number in (RAW, *_WIDTHS)]
        run = whole[0][0] if len(held) == 1 and len(whole) == 1 and len(whole[0]) == 1 else None
        return Tensor(
            name,
            code,
            tuple(dims),
            start,
            stop,
            held,
            run if run is not None and run[1] else None,
            external if place == _EXTERNAL else None,
            segmented,
        )

    def _sparse(self, start: int, stop: int) -> Sparse:
        values: Tensor | None = None
        dims: list[int] = []
        for number, value, begin, end in self._fields(start, stop, _SPARSE):
            if number == 1:
                values = self._tensor(begin, end)
            else:
                dims += protobuf.numbers(value)
                self._keep(len(dims))
        return Sparse(values, tuple(dims))

    def _value(self, start: int, stop: int) -> Value:
        name, code = "", 0
        shape: tuple[int | str, ...] | None = None
        for number, value, begin, end in self._fields(start, stop, _VALUE):
            if number == 1:
                name = protobuf.text(value)
                continue
            for _, _, inner, last in self._fields(begin, end, _TYPE):
                for part, what, first, past in self._fields(inner, last, _SHAPED):
                    if part == 1:
                        code = protobuf.int32(what)
                    else:
                        extents = self._fields(first, past, _SHAPE)
                        shape = tuple(self._extent(one, two) for _, _, one, two in extents)
        return Value(name, code, shape)

    def _extent(self, start: int, stop: int) -> int | str:
        found: int | str = ""
        self._keep()
        for number, value, _, _ in self._fields(start, stop, _EXTENT):
            found = protobuf.number(value) if number == 1 else protobuf.text(value)
        return found

    def _function(self, start: int, stop: int) -> Function:
        self._keep()
        texts = {1: "", 10: ""}
        names: dict[int, list[str]] = {4: [], 5: [], 6: []}
        nodes: list[Node] = []
        for number, value, begin, end in self._fields(start, stop, _FUNCTION):
            if number in texts:
                texts[number] = protobuf.text(value)
                continue
            self._keep()
            if number == 7:
                nodes.append(self._node(begin, end, 0))
            elif number == 11:
                names[6].append(self._attribute(begin, end, 0)[0])
            else:
                names[number].append(protobuf.text(value))
        inputs, outputs, attributes = (tuple(each) for each in names.values())
        return Function(texts[10], texts[1], inputs, outputs, attributes, tuple(nodes))


# What protobuf leaves out of a message because it is the default.
_EMPTY: dict[int, Any] = {1: 0.0, 2: 0, 3: b"", 6: (), 7: (), 8: (), 9: (), 10: ()}


def _counted(number: int, value: int | memoryview, offset: int) -> int:
    """Return how many elements one field of a tensor's data holds."""
    if isinstance(value, int) or number == STRINGS:
        return 1
    if number in _WIDTHS:
        if len(value) % _WIDTHS[number]:
            raise FormatError("a run of numbers ends within one", offset=offset)
        return len(value) // _WIDTHS[number]
    # Every number ends in a byte without the high bit.
    return len(bytes(value).translate(None, _HIGH))
