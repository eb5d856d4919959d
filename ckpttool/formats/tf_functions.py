"""Functions and nodes of TensorFlow graphs, decoded from a GraphDef.

Sources: tensorflow/core/framework/graph.proto, function.proto, node_def.proto, attr_value.proto and
tensor.proto.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import FormatError
from ckpttool.core.source import Shape
from ckpttool.encodings import protobuf
from ckpttool.encodings.protobuf import Message
from ckpttool.formats import tf_saved_model_messages
from ckpttool.formats.tf_saved_model_messages import FieldMeter

_TEXT = protobuf.DELIMITED
# FunctionDef: signature, node_def, ret, arg_attr. OpDef: name, input_arg, output_arg. NodeDef: name, op,
# input, attr.
_FUNCTION = {1: _TEXT, 3: _TEXT, 4: _TEXT, 7: _TEXT}
_SIGNATURE = {1: _TEXT, 2: _TEXT, 3: _TEXT}
_NODE = Message({1: protobuf.TEXT, 2: protobuf.TEXT, 3: protobuf.TEXTS, 5: protobuf.MESSAGES})
_PAIR = Message({1: protobuf.TEXT, 2: protobuf.TEXT})
# AttrValue: f, b, tensor, func.
_VALUE = {4: protobuf.WORD, 5: protobuf.NUMBER, 8: _TEXT, 10: _TEXT}
# TensorProto: dtype, tensor_shape, tensor_content; float_val, double_val, int_val, int64_val, bool_val,
# half_val, uint32_val, uint64_val.
_TENSOR = Message(
    {
        1: protobuf.INT32,
        2: protobuf.MESSAGES,
        4: protobuf.BINARY,
        5: protobuf.FLOATS,
        6: protobuf.DOUBLES,
        **dict.fromkeys((7, 10, 11, 13, 16, 17), protobuf.INTS),
    }
)
# AttrValue: list, s, i, f, b, type, shape, tensor. ListValue: i.
_ATTRIBUTE = {
    **dict.fromkeys((1, 2, 8), _TEXT),
    **dict.fromkeys((3, 5, 6), protobuf.NUMBER),
    4: protobuf.WORD,
}
_NUMERIC = frozenset(
    ("float16", "bfloat16", "float32", "float64", "bool", "uint8", "uint16", "uint32", "uint64")
)
_NUMERIC |= {"int8", "int16", "int32", "int64"}
_MOST_ENTRIES = 1 << 26
_LIST = Message({3: protobuf.INTS})
_NO_VALUE = memoryview(b"")


class FunctionNode(NamedTuple):
    """One operation: its inputs' names and its attributes, not decoded."""

    op: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, memoryview]


@dataclass(frozen=True, slots=True)
class GraphFunction:
    """A function in the graph's library."""

    arguments: tuple[str, ...]
    nodes: Mapping[str, FunctionNode]
    results: tuple[str, ...]
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """the arguments' shapes, if the graph records them; an extent of -1 is not fixed"""


def read_functions(graph: memoryview, meter: FieldMeter) -> dict[str, GraphFunction]:
    """Return the graph's functions by name: GraphDef.library (2), FunctionDefLibrary.function (1)."""
    functions = {}
    for library in tf_saved_model_messages.iter_field(2, graph, meter):
        for function in tf_saved_model_messages.iter_field(1, library, meter):
            name, parsed = _parse_function(function, meter)
            functions[name] = parsed
    return functions


def _parse_function(data: memoryview, meter: FieldMeter) -> tuple[str, GraphFunction]:
    name, arguments, outputs, nodes, results = "", list[str](), list[str](), {}, {}
    shapes: dict[int, tuple[int, ...]] = {}
    for number, value in meter.fields(data, _FUNCTION):
        inner = protobuf.as_message(value)
        if number == 1:
            for part, what in meter.fields(inner, _SIGNATURE):
                if part == 1:
                    name = protobuf.as_text(what)
                else:
                    listed = arguments if part == 2 else outputs
                    listed += [
                        protobuf.as_text(text)
                        for _, text in meter.fields(protobuf.as_message(what), {1: _TEXT})
                    ]
        elif number == 3:
            title, node = parse_node(inner, meter)
            nodes[title] = node
        elif number == 7:
            shapes |= _parse_argument(inner, meter)
        else:
            key, text = meter.decode(inner, _PAIR)
            results[key] = text
    order = [results[key] for key in outputs] if results.keys() == set(outputs) else [*results.values()]
    return name, GraphFunction(tuple(arguments), nodes, tuple(order), shapes)


def _parse_argument(data: memoryview, meter: FieldMeter) -> dict[int, tuple[int, ...]]:
    """Return an argument's shape by its number, from its attribute `_output_shapes`, a list of one."""
    position, sizes = 0, list[tuple[int, ...] | None]()
    for number, value in meter.fields(data, {1: protobuf.NUMBER, 2: _TEXT}):
        if number == 1:
            position = protobuf.as_int32(value)
            continue
        for _, entry in meter.fields(protobuf.as_message(value), {1: _TEXT}):
            name, inner = tf_saved_model_messages.parse_map_entry(protobuf.as_message(entry), meter)
            for _, listed in meter.fields(inner, {1: _TEXT}) if name == "_output_shapes" else ():
                shapes = meter.fields(protobuf.as_message(listed), {7: _TEXT})
                sizes += [
                    tf_saved_model_messages.partial_shape(protobuf.as_message(data), meter)
                    for _, data in shapes
                ]
    return {position: sizes[0]} if len(sizes) == 1 and sizes[0] is not None else {}


def parse_node(data: memoryview, meter: FieldMeter) -> tuple[str, FunctionNode]:
    """Return a NodeDef's name, and the node."""
    name, op, inputs, listed = meter.decode(data, _NODE)
    attributes = dict(tf_saved_model_messages.parse_map_entry(attribute, meter) for attribute in listed)
    return name, FunctionNode(op, tuple(value for value in inputs if not value.startswith("^")), attributes)


def get_function_name(value: memoryview) -> str:
    """Return the function name in an attribute."""
    for number, inner in protobuf.parse_fields(value, _VALUE):
        if number == 10:
            for _, text in protobuf.parse_fields(protobuf.as_message(inner), {1: _TEXT}):
                return protobuf.as_text(text)
    return ""


class ConstantFields(NamedTuple):
    """The fields of a constant tensor: numbers are in `content` or listed, ints for integer dtypes."""

    dtype: int
    shape: Shape | None
    content: bytes
    numbers: list[float]


def read_constant_fields(value: memoryview, most: int) -> ConstantFields | None:
    """Return an attribute's tensor (AttrValue.tensor), None if missing or larger than `most` bytes."""
    tensor = next((protobuf.as_message(v) for n, v in protobuf.parse_fields(value, _VALUE) if n == 8), None)
    if tensor is None or len(tensor) > most:
        return None
    dtype, shapes, content, *numbers = protobuf.decode(tensor, _TENSOR)
    merged = protobuf.merge_messages(shapes, memoryview(b""))
    shape = tf_saved_model_messages.partial_shape(merged, FieldMeter()) if shapes else None
    return ConstantFields(dtype, shape, content, [*itertools.chain(*numbers)])


def get_attribute(node: FunctionNode, name: str) -> Any:
    """Return an attribute: a number, a text, or a list of numbers; None if the node lacks it."""
    value = node.attributes.get(name)
    for number, inner in protobuf.parse_fields(value, _ATTRIBUTE) if value is not None else ():
        if number == 2:
            return bytes(protobuf.as_message(inner)).decode("latin-1")
        if number in (3, 5, 6):
            return protobuf.as_int(inner)
        if number == 4 and isinstance(inner, int):
            return struct.unpack("<f", inner.to_bytes(4, "little"))[0]
        if number == 1:
            return protobuf.decode(protobuf.as_message(inner), _LIST)[0]
    return None


def output_shape(node: FunctionNode, meter: FieldMeter) -> tuple[int, ...] | None:
    """Return the shape of a node's first output as Python records it (`_output_shapes`), else as it is set.

    An extent of -1 is not fixed; None is an unknown rank, as which versions before 24 of a graph set no
    extents (array_ops.cc, Placeholder). AttrValue: list (1), shape (7); ListValue: shape (7).
    """
    listed = tf_saved_model_messages.iter_field(1, node.attributes.get("_output_shapes", _NO_VALUE), meter)
    shapes = [shape for values in listed for shape in tf_saved_model_messages.iter_field(7, values, meter)]
    if shapes:
        return tf_saved_model_messages.partial_shape(shapes[0], meter)
    shapes += tf_saved_model_messages.iter_field(7, node.attributes.get("shape", _NO_VALUE), meter)
    return (tf_saved_model_messages.partial_shape(shapes[0], meter) or None) if shapes else None


def constant_array(fields: ConstantFields) -> np.ndarray | None:
    """Return a constant tensor; None for strings and other types without numbers.

    The last number is repeated for entries without one. Raise FormatError if the values do not fit the shape.
    """
    name = tf_saved_model_messages.type_name(fields.dtype)
    if name not in _NUMERIC:
        return None
    shape, dtype = fields.shape or (), dtypes.numpy_dtype(name)
    count = math.prod(shape)
    if fields.content:
        if len(fields.content) != count * dtype.itemsize:
            raise FormatError("the values of a constant do not fit its shape", found=str(shape))
        return np.frombuffer(fields.content, dtype).reshape(shape)
    if len(fields.numbers) > count or count > _MOST_ENTRIES:
        raise FormatError("the values of a constant do not fit its shape", found=str(shape))
    numbers = [
        *fields.numbers,
        *[fields.numbers[-1] if fields.numbers else 0] * (count - len(fields.numbers)),
    ]
    if name in ("float16", "bfloat16"):
        return np.array(numbers, np.uint16).view(dtype).reshape(shape)
    return np.array(numbers).astype(dtype).reshape(shape)
