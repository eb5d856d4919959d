"""ONNX models.

Source: github.com/onnx/onnx, onnx/onnx.proto and docs/ExternalData.md. The graph is read as data, never run.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttool.core import deferred, dtypes, filesystem, limits
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import CLASSES, CODE, CodeReference, merge_references
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    abbreviate_list,
    locate_errors,
)
from ckpttool.core.source import Buffer, File, Inline, Source, Span
from ckpttool.core.tree import Container, Leaf, Path, Record, Role, Tree, ValueLeaf, attr, key
from ckpttool.encodings import protobuf
from ckpttool.formats import name_roles, tensor_bytes
from ckpttool.formats.probe import Probe

NAME = "onnx"
TITLE = "ONNX model"
WRITES = False
FRAMEWORK = "numpy"

SUFFIX = ".onnx"
_GRAPH, _IR_VERSION = 7, 1
# ModelProto: the fields that may precede its graph, with their wire types.
_TEXTS, _NUMBERS = frozenset((2, 3, 4, 6, 8, 14, 20, 25)), frozenset((1, 5))
# GraphProto: node, name, initializer, doc_string, input, output, value_info, quantization_annotation,
# sparse_initializer, metadata_props, each with its wire type.
_PARTS = frozenset(number << 3 | protobuf.BYTES for number in (1, 2, 5, 10, 11, 12, 13, 14, 15, 16))


def claims(probe: Probe) -> str | None:
    """Return the path if the file begins with the fields of a model, up to its graph.

    The suffix is enough if the first byte begins a field of a model.
    """
    if probe.kind != "file" or not probe.head:
        return None
    number, wire = probe.head[0] >> 3, probe.head[0] & 7
    if number not in {protobuf.VARINT: _NUMBERS, protobuf.BYTES: _TEXTS | {_GRAPH}}.get(wire, ()):
        return None
    return probe.path if probe.name.endswith(SUFFIX) or _reaches_graph(probe.head) else None


def _reaches_graph(head: bytes) -> bool:
    """Return whether model fields, including its version, lead to a graph within the first bytes."""
    at, versioned = 0, False
    while at < len(head):
        number, wire, at = head[at] >> 3, head[at] & 7, at + 1
        value, width = 0, 0
        while at + width < len(head) and width < 10:
            byte = head[at + width]
            value |= (byte & 0x7F) << 7 * width
            width += 1
            if byte < 0x80:
                break
        at += width
        if number == _GRAPH and wire == protobuf.BYTES:
            return versioned and value > 0 and at < len(head) and head[at] in _PARTS
        if (wire, number) == (protobuf.VARINT, _IR_VERSION):
            versioned = 0 < value < 1000
        elif wire == protobuf.BYTES and number in _TEXTS:
            at += value
        elif wire != protobuf.VARINT or number not in _NUMBERS:
            return False
    return False


_TEXT, _NUMBER, _WORD = protobuf.DELIMITED, protobuf.NUMBER, protobuf.WORD
# ModelProto: ir_version, producer_name, producer_version, domain, model_version, graph, opset_import,
# metadata_props, training_info, functions.
_MODEL = {1: _NUMBER, 2: _TEXT, 3: _TEXT, 4: _TEXT, 5: _NUMBER, 7: _TEXT, 8: _TEXT, 14: _TEXT, 20: _TEXT}
_MODEL[25] = _TEXT
# GraphProto: node, name, initializer, input, output, sparse_initializer.
_GRAPH_FIELDS = dict.fromkeys((1, 2, 5, 11, 12, 15), _TEXT)
# NodeProto: input, output, name, op_type, attribute, domain, overload.
_NODE = dict.fromkeys((1, 2, 3, 4, 5, 7, 8), _TEXT)
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
# SparseTensorProto: values, indices, dims. ValueInfoProto: name, type. TypeProto: tensor_type.
# TypeProto.Tensor: elem_type, shape. TensorShapeProto: dim. Dimension: dim_value, dim_param.
_SPARSE = {1: _TEXT, 2: _TEXT, 3: protobuf.NUMBERS}
_VALUE, _TYPE, _SHAPED = {1: _TEXT, 2: _TEXT}, {1: _TEXT}, {1: _NUMBER, 2: _TEXT}
_SHAPE, _EXTENT = {1: _TEXT}, {1: _NUMBER, 2: _TEXT}
# FunctionProto: name, input, output, attribute, node, opset_import, domain, attribute_proto, overload.
_FUNCTION = dict.fromkeys((1, 4, 5, 6, 7, 9, 10, 11, 13), _TEXT)
# TrainingInfoProto: initialization, algorithm.
_TRAINING = {1: _TEXT, 2: _TEXT}
_PAIR, _OPSET = {1: _TEXT, 2: _TEXT}, {1: _TEXT, 2: _NUMBER}
_FIELDS = 4  # parts scanned for each part that may be kept
_RANK = 1000  # listed dimensions; no array library has more than 64
# AttributeProto.AttributeType.
_KINDS = {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8, 10: 9, 11: 10, 22: 11}
_LAST_KIND = 14  # TYPE_PROTOS; its values and those of TYPE_PROTO are not read
_HIGH = bytes(range(0x80, 0x100))
_OTHER_DOMAINS = ("", "ai.onnx")


# Domain, operator, overload.
OperatorKey = tuple[str, str, str]


class OnnxTensor(NamedTuple):
    """A constant: its name, type number, shape, and the positions of its elements.

    `start` and `stop` enclose the message. `element_counts` counts the elements (bytes of raw data) in each
    data field, `run` is the position of raw data or of contiguous fixed-width numbers. `external` are the
    entries that name another file, None if the message itself contains the data.
    """

    name: str
    code: int
    dims: tuple[int, ...]
    start: int
    stop: int
    element_counts: Mapping[int, int]
    run: tuple[int, int] | None
    external: Mapping[str, str] | None
    segmented: bool


class OnnxSparseTensor(NamedTuple):
    """A sparse constant: its nonzero values, and the shape of the whole."""

    values: OnnxTensor | None
    dims: tuple[int, ...]


class OnnxAttribute(NamedTuple):
    """An attribute of a node: a number, bytes, a Tensor, a Graph, or a tuple of these.

    `ref` is the name of the function attribute that supplies its value.
    """

    kind: int
    value: Any
    ref: str = ""

    @property
    def values(self) -> tuple[Any, ...]:
        """The values of a repeated attribute, or the single value."""
        plain = isinstance(self.value, tuple) and not isinstance(
            self.value, OnnxTensor | OnnxSparseTensor | OnnxGraph
        )
        return tuple(self.value) if plain else (self.value,)


class OnnxNode(NamedTuple):
    """One operator with the names of its inputs and outputs; "" for an omitted one."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, OnnxAttribute]
    overload: str = ""

    @property
    def title(self) -> str:
        """The operator's name, with its domain unless that is ONNX's own."""
        return self.op if self.domain in _OTHER_DOMAINS else f"{self.domain}.{self.op}"

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute's value."""
        attribute = self.attributes.get(name)
        return default if attribute is None else attribute.value


class OnnxValue(NamedTuple):
    """An input or output: its type number (0 if it is not a tensor) and its shape.

    An extent is a number, or the name of a variable one ("" if unnamed); a shape of None is unknown.
    """

    name: str
    code: int
    shape: tuple[int | str, ...] | None


class OnnxGraph(NamedTuple):
    """A graph: nodes in the order of computation, constants, inputs and outputs."""

    name: str
    nodes: tuple[OnnxNode, ...]
    initializers: tuple[OnnxTensor, ...]
    sparse: tuple[OnnxSparseTensor, ...]
    inputs: tuple[OnnxValue, ...]
    outputs: tuple[OnnxValue, ...]


class OnnxFunction(NamedTuple):
    """An operator defined by the model itself.

    `defaults` are attributes with a default value, `opsets` the operator versions of its body.
    """

    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    nodes: tuple[OnnxNode, ...]
    overload: str = ""
    defaults: Mapping[str, OnnxAttribute] = {}
    opsets: Mapping[str, int] = {}


class OnnxModel(NamedTuple):
    """A whole model; `opsets` are operator versions by domain, `training` counts training graphs.

    `operators` counts the nodes of the whole file by domain, operator and overload: those in subgraphs,
    functions, training graphs, and in fields that no reader uses. `external` are the entries of all
    tensors whose data are in another file.
    """

    ir_version: int
    producer: str
    opsets: Mapping[str, int]
    graph: OnnxGraph
    functions: tuple[OnnxFunction, ...]
    metadata: Mapping[str, str]
    training: int
    operators: Mapping[OperatorKey, int]
    external: tuple[Mapping[str, str], ...]


def parse_model(data: memoryview) -> OnnxModel:
    """Parse a model from a file's bytes; raise FormatError if they are not a model.

    Field numbers are those of onnx/onnx.proto. Tensor bytes are not decoded: records contain their positions.
    """
    return _OnnxParser(data).model()


@dataclass
class _OnnxParser:
    """Read messages from ranges of the file's bytes, and limit the scanned and kept parts."""

    data: memoryview
    node_count: int = field(default_factory=lambda: _FIELDS * limits.current().graph_parts)
    kept: int = field(default_factory=lambda: limits.current().graph_parts)
    operators: Counter[OperatorKey] = field(default_factory=Counter)
    external: list[Mapping[str, str]] = field(default_factory=list)

    def model(self) -> OnnxModel:
        texts, graphs, training = {2: "", 3: ""}, list[tuple[int, int]](), 0
        version: int | None = None
        opsets: dict[str, int] = {}
        functions: list[OnnxFunction] = []
        metadata: dict[str, str] = {}
        for number, value, start, stop in self._fields(0, len(self.data), _MODEL):
            if number == 1:
                version = protobuf.as_int(value)
            elif number in texts:
                texts[number] = protobuf.as_text(value)
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
            elif number == 20:
                training += 1
                self._training(start, stop)
        parts = {"a version": version is not None, "a graph": graphs, "operator versions": opsets}
        if version is None or not all(parts.values()):
            raise FormatError(
                "the model is incomplete",
                expected="a version, a graph and operator versions",
                found=", ".join(word for word, there in parts.items() if there) or "none of them",
            )
        producer = " ".join(text for text in texts.values() if text)
        return OnnxModel(
            version,
            producer,
            opsets,
            self._only_graph(graphs),
            tuple(functions),
            metadata,
            training,
            self.operators,
            tuple(self.external),
        )

    def _fields(
        self, start: int, stop: int, schema: protobuf.Schema
    ) -> Iterator[tuple[int, int | memoryview, int, int]]:
        """Yield the fields, each with the position of its bytes."""
        for number, value, end in protobuf.iter_located_fields(self.data, start, stop, schema, self._look):
            yield number, value, end - (0 if isinstance(value, int) else len(value)), end

    def _look(self, count: int) -> None:
        self.node_count -= count
        if self.node_count < 0:
            raise self._too_many("fields")

    def _keep(self, count: int = 1) -> None:
        self.kept -= count
        if self.kept < 0:
            raise self._too_many("parts")

    @staticmethod
    def _too_many(what: str) -> Exception:
        return limits.limit_error("graph_parts", f"the model has too many {what}", None)

    def _pair(self, start: int, stop: int) -> tuple[str, str]:
        self._keep()
        texts = {n: protobuf.as_text(value) for n, value, _, _ in self._fields(start, stop, _PAIR)}
        return texts.get(1, ""), texts.get(2, "")

    def _opset(self, start: int, stop: int) -> tuple[str, int]:
        self._keep()
        domain, version = "", 0
        for number, value, _, _ in self._fields(start, stop, _OPSET):
            if number == 1:
                domain = protobuf.as_text(value)
            else:
                version = protobuf.as_int(value)
        return domain, version

    def _graph(self, start: int, stop: int, depth: int) -> OnnxGraph:
        if depth > limits.current().message_depth:
            raise limits.limit_error("message_depth", "the model's graphs are nested too deeply", depth)
        name = ""
        nodes: list[OnnxNode] = []
        tensors: list[OnnxTensor] = []
        sparse: list[OnnxSparseTensor] = []
        values: dict[int, list[OnnxValue]] = {11: [], 12: []}
        for number, value, begin, end in self._fields(start, stop, _GRAPH_FIELDS):
            if number == 2:
                name = protobuf.as_text(value)
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
        return OnnxGraph(name, tuple(nodes), tuple(tensors), tuple(sparse), inputs, outputs)

    def _only_graph(self, graphs: list[tuple[int, int]]) -> OnnxGraph:
        if len(graphs) > 1:
            raise FormatError("the model has more than one graph", found=str(len(graphs)))
        return self._graph(*graphs[0], 0)

    def _training(self, start: int, stop: int) -> None:
        """Parse the graphs of a training step for the audit alone."""
        for _, _, begin, end in self._fields(start, stop, _TRAINING):
            self._graph(begin, end, 0)

    def _node(self, start: int, stop: int, depth: int) -> OnnxNode:
        texts = {3: "", 4: "", 7: "", 8: ""}
        names: dict[int, list[str]] = {1: [], 2: []}
        attributes: dict[str, OnnxAttribute] = {}
        for number, value, begin, end in self._fields(start, stop, _NODE):
            if number == 5:
                self._keep()
                name, attribute = self._attribute(begin, end, depth)
                if name in attributes:
                    raise FormatError("a node has the same attribute twice", found=name[:80], offset=begin)
                attributes[name] = attribute
            elif number in texts:
                texts[number] = protobuf.as_text(value)
            else:
                self._keep()
                names[number].append(protobuf.as_text(value))
        self.operators[texts[7], texts[4], texts[8]] += 1
        return OnnxNode(texts[4], texts[7], texts[3], tuple(names[1]), tuple(names[2]), attributes, texts[8])

    def _attribute(self, start: int, stop: int, depth: int) -> tuple[str, OnnxAttribute]:
        name = ref = ""
        kind = 0
        values: dict[int, Any] = {}
        for number, value, begin, end in self._fields(start, stop, _ATTRIBUTE):
            if number == 1:
                name = protobuf.as_text(value)
            elif number == 21:
                ref = protobuf.as_text(value)
            elif number == 20:
                kind = protobuf.as_int32(value)
            else:
                self._element(values, number, value, (begin, end), depth)
        of = {_KINDS[number]: content for number, content in values.items()}
        if not kind and len(of) == 1:
            (kind,) = of
        if kind > _LAST_KIND:
            raise UnsupportedError("a node's attribute has an unknown type", offset=start, found=str(kind))
        # Some writers store the other fields with default values as well.
        if kind not in of and any(of.values()):
            raise FormatError("the value of a node's attribute does not match its type", offset=start)
        content = of.get(kind, _EMPTY.get(kind))
        return name, OnnxAttribute(kind, tuple(content) if isinstance(content, list) else content, ref)

    def _element(
        self, values: dict[int, Any], number: int, value: int | memoryview, at: tuple[int, int], depth: int
    ) -> None:
        """Add one field's value to those of an attribute."""
        if number == 2:
            values[number] = struct.unpack("<f", protobuf.as_int(value).to_bytes(4, "little"))[0]
        elif number == 3:
            values[number] = protobuf.as_int(value)
        elif number == 4:
            values[number] = bytes(protobuf.as_message(value))
        elif number == 5:
            values[number] = self._tensor(*at)
        elif number == 6:
            values[number] = self._graph(*at, depth + 1)
        elif number == 22:
            values[number] = self._sparse(*at)
        else:
            known = values.setdefault(number, [])
            self._keep(1 if isinstance(value, int) or number in (9, 10, 11) else max(1, len(value)))
            known += self._elements(number, value, at, depth)

    def _elements(
        self, number: int, value: int | memoryview, at: tuple[int, int], depth: int
    ) -> list[Any] | tuple[Any, ...]:
        if number == 7:
            data = value.to_bytes(4, "little") if isinstance(value, int) else bytes(value)
            if len(data) % 4:
                raise FormatError("a packed array ends in the middle of a number", offset=at[0])
            return struct.unpack(f"<{len(data) // 4}f", data)
        if number == 8:
            return protobuf.as_ints(value)
        if number == 9:
            return [bytes(protobuf.as_message(value))]
        return [self._tensor(*at) if number == 10 else self._graph(*at, depth + 1)]

    def _tensor(self, start: int, stop: int) -> OnnxTensor:  # noqa: C901  # a branch for each field
        name, code, storage, segmented = "", 0, 0, False
        dims: list[int] = []
        external: dict[str, str] = {}
        counts: dict[int, int] = {}
        runs: dict[int, list[tuple[int, int]]] = {}
        for number, value, begin, end in self._fields(start, stop, _TENSOR):
            if number == 1:
                if not isinstance(value, int) and len(value) > 10 * _RANK:
                    raise FormatError("a tensor has too many dimensions", offset=begin)
                dims += protobuf.as_ints(value)
            elif number == 2:
                code = protobuf.as_int32(value)
            elif number == 8:
                name = protobuf.as_text(value)
            elif number == 14:
                storage = protobuf.as_int32(value)
            elif number == 13:
                key, text = self._pair(begin, end)
                external[key] = text
            elif number == RAW:
                counts[RAW], runs[RAW] = end - begin, [(begin, end - begin)]
            elif number in _DATA:
                counts[number] = counts.get(number, 0) + _count_elements(number, value, begin)
                runs.setdefault(number, []).append((begin, end - begin))
            segmented = segmented or number == 3
        if storage == _EXTERNAL:
            self.external.append(external)
        if len(dims) > _RANK or min(dims, default=0) < 0:
            raise FormatError(
                "a tensor has an impossible shape",
                path=repr(name[:200]),
                offset=start,
                found=str(dims[:8]),
            )
        counts = {number: count for number, count in counts.items() if count or number == RAW}
        whole = [runs[number] for number in counts if number in (RAW, *_WIDTHS)]
        run = whole[0][0] if len(counts) == 1 and len(whole) == 1 and len(whole[0]) == 1 else None
        return OnnxTensor(
            name,
            code,
            tuple(dims),
            start,
            stop,
            counts,
            run if run is not None and run[1] else None,
            external if storage == _EXTERNAL else None,
            segmented,
        )

    def _sparse(self, start: int, stop: int) -> OnnxSparseTensor:
        values: OnnxTensor | None = None
        dims: list[int] = []
        for number, value, begin, end in self._fields(start, stop, _SPARSE):
            if number == 1:
                values = self._tensor(begin, end)
            elif number == 2:
                self._tensor(begin, end)  # the indices, which are not listed
            else:
                dims += protobuf.as_ints(value)
                self._keep(len(dims))
        return OnnxSparseTensor(values, tuple(dims))

    def _value(self, start: int, stop: int) -> OnnxValue:
        name, code = "", 0
        shape: tuple[int | str, ...] | None = None
        for number, value, begin, end in self._fields(start, stop, _VALUE):
            if number == 1:
                name = protobuf.as_text(value)
                continue
            for _, _, inner, last in self._fields(begin, end, _TYPE):
                for part, what, first, past in self._fields(inner, last, _SHAPED):
                    if part == 1:
                        code = protobuf.as_int32(what)
                    else:
                        extents = self._fields(first, past, _SHAPE)
                        shape = tuple(self._extent(one, two) for _, _, one, two in extents)
        return OnnxValue(name, code, shape)

    def _extent(self, start: int, stop: int) -> int | str:
        extent: int | str = ""
        self._keep()
        for number, value, _, _ in self._fields(start, stop, _EXTENT):
            extent = protobuf.as_int(value) if number == 1 else protobuf.as_text(value)
        return extent

    def _function(self, start: int, stop: int) -> OnnxFunction:
        self._keep()
        texts = {1: "", 10: "", 13: ""}
        names: dict[int, list[str]] = {4: [], 5: [], 6: []}
        nodes: list[OnnxNode] = []
        defaults: dict[str, OnnxAttribute] = {}
        opsets: dict[str, int] = {}
        for number, value, begin, end in self._fields(start, stop, _FUNCTION):
            if number in texts:
                texts[number] = protobuf.as_text(value)
                continue
            self._keep()
            if number == 7:
                nodes.append(self._node(begin, end, 0))
            elif number == 9:
                domain, opset = self._opset(begin, end)
                opsets[domain] = opset
            elif number == 11:
                name, default = self._attribute(begin, end, 0)
                names[6].append(name)
                defaults[name] = default
            else:
                names[number].append(protobuf.as_text(value))
        inputs, outputs, attributes = (tuple(name) for name in names.values())
        return OnnxFunction(
            *(texts[10], texts[1], inputs, outputs, attributes, tuple(nodes), texts[13]), defaults, opsets
        )


# onnx/defs/schema.h, OpSchemaRegistry::DomainToVersionRange: the domains whose operators ONNX defines.
_STANDARD = frozenset(
    ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview", "ai.onnx.preview.training")
)
# onnxruntime/docs/ContribOperators.md: operators that only compute. Not listed: EPContext and Snpe, which
# load compiled programs, and PythonOp, which calls Python.
_MICROSOFT = """
Attention AttnLSTM BeamSearch BiasAdd BiasDropout BiasGelu BiasSoftmax BiasSplitGelu BifurcationDetector
BitmaskBiasDropout BitmaskDropout BranchwiseRMSNorm CDist CausalConvWithState ComplexMul ComplexMulConj
ConvTransposeWithDynamicPads CropAndResize DecoderAttention DecoderMaskedMultiHeadAttention
DecoderMaskedSelfAttention DequantizeBFP DequantizeLinear DequantizeWithOrder DynamicQuantizeLSTM
DynamicQuantizeMatMul DynamicSparseAttention DynamicTimeWarping EmbedLayerNormalization EngramGate
ExpandDims FastGelu FusedConv FusedGemm FusedMatMul FusedMatMulActivation GatedAdd GatedDeltaNet
GatedRMSNorm GatedRelativePositionBias GatherBlockQuantized GatherND Gelu GemmFastGelu GemmFloat8
GemmaRotaryEmbedding GreedySearch GridSample GroupNorm GroupQueryAttention HyperConnectionPostMix
HyperConnectionPreMix Inverse Irfft IsAllFinite LinearAttention LinearAttentionGate LongformerAttention
MRotaryEmbedding MatMulBlockQuantizedFp4Weight MatMulBlockQuantizedFp8Weight MatMulBnb4 MatMulFpQ4
MatMulInteger16 MatMulIntegerToFloat MatMulNBits MatMulNBitsMlp MatMulNBitsQkv MaxpoolWithMask MoE
MulInteger MultiHeadAttention MurmurHash3 NGramHashMapping NGramRepeatBlock NhwcConv NhwcFusedConv
NhwcMaxPool PackedAttention PackedMultiHeadAttention PackedSparseAttentionIndexer Pad PagedAttention
QAttention QEmbedLayerNormalization QGemm QLinearAdd QLinearAveragePool QLinearConcat QLinearConv
QLinearGlobalAveragePool QLinearLeakyRelu QLinearMul QLinearReduceMean QLinearSigmoid QLinearSoftmax
QLinearWhere QMoE QOrderedAttention QOrderedGelu QOrderedLayerNormalization QOrderedLongformerAttention
QOrderedMatMul QuantizeBFP QuantizeLinear QuantizeWithOrder QuickGelu Range ReduceSumInteger
RelativePositionBias RemovePadding RestorePadding Rfft RotaryEmbedding Sampling ScaledSiLU SkipGroupNorm
SkipLayerNormalization SkipSimplifiedLayerNormalization SparseAttention SparseAttentionIndexer
SparsePagedAttention SparseToDenseMatMul Tokenizer TorchEmbedding TransposeMatMul Trilu UnfoldTensor
Unique VarlenCausalConvWithState VarlenNGramHashMapping WhisperBeamSearch WordConvEmbedding
"""
# onnxruntime/core/graph/contrib_ops/nchwc_schema_defs.cc and internal_nhwc_onnx_schemas.cc: standard
# operators in another order of axes, in models that onnxruntime has optimized.
_NCHWC = "AveragePool Conv GlobalAveragePool GlobalMaxPool MaxPool ReorderInput ReorderOutput Upsample"
_NHWC = """
AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool
GridSample InstanceNormalization LRN LpPool MaxPool MaxUnpool QLinearAveragePool QLinearConv
QLinearConvTranspose Resize SpaceToDepth
"""
_CONTRIBUTED: Mapping[str, frozenset[str]] = {
    "com.microsoft": frozenset(_MICROSOFT.split()),
    "com.microsoft.nchwc": frozenset(_NCHWC.split()),
    "com.ms.internal.nhwc": frozenset(_NHWC.split()),
}
# Operators that are a program by definition, whatever domain a model gives them.
_PROGRAMS = frozenset(("EPContext", "PyOp", "PythonOp"))
# Domains that onnxruntime imports into every model that it writes (onnxruntime/core/graph/constants.h).
_IMPORTED = frozenset(
    (
        "com.microsoft.experimental",
        "com.microsoft.dml",
        "com.microsoft.internal.nhwc",
        "org.pytorch.aten",
        *_CONTRIBUTED,
    )
)
# onnx/external_data_helper.py, ExternalDataInfo; onnxruntime/core/framework/tensor_external_data_info.h. The
# helper of older versions sets an attribute for every other entry.
_ENTRIES = deferred.compile(r"location|offset|length|checksum|basepath|prepacked_\d+")
# onnxruntime/core/framework/tensorprotoutils.h, kTensorProtoMemoryAddressTag: the offset is an address.
_MEMORY = "/_ORT_MEM_ADDR_/"


def audit_model(model: OnnxModel, file: File) -> tuple[CodeReference, ...]:
    """Return what running the model needs besides ONNX's operators and files beside `file`.

    Operators of other libraries, programs for accelerators, and external data elsewhere are code;
    imported domains without a node are classes.
    """
    own = {(function.domain, function.name, function.overload) for function in model.functions}
    references = [
        CodeReference(f"{domain}.{op}" if domain else op, CODE, by="onnx")
        for domain, op, overload in model.operators
        if op in _PROGRAMS or ((domain, op, overload) not in own and not _is_pure(domain, op))
    ]
    for entries in model.external:
        location = entries.get("location", "")
        if not _is_inside(location) or _leads_outside(location, file):
            references.append(CodeReference(f"external data {location[:_LONGEST]!r}", CODE, by="onnx"))
        references += (
            CodeReference(f"external data entry {name[:_LONGEST]!r}", CODE, by="onnx")
            for name in entries
            if not _ENTRIES.fullmatch(name)
        )
    used = {domain for domain, _, _ in (*model.operators, *own)}
    unused = model.opsets.keys() - used - _STANDARD - _IMPORTED
    references += (
        CodeReference(f"domain {domain[:_LONGEST]!r}", CLASSES, by="onnx") for domain in sorted(unused)
    )
    return merge_references(references)


def audit_file(file: File) -> tuple[CodeReference, ...]:
    """Return the code of a model whose tensors cannot be listed; nothing for another file."""
    try:
        return audit_model(read_model(file), file)
    except CkpttoolError:
        return ()


def _is_pure(domain: str, op: str) -> bool:
    return domain in _STANDARD or op in _CONTRIBUTED.get(domain, ())


def _is_inside(location: str) -> bool:
    """Return whether the name of an external data file is a path below the model's folder."""
    parts = location.replace("\\", "/").split("/")
    inside = location and not location.startswith(("/", "\\")) and os.pardir not in parts
    strange = "\0" in location or location[1:2] == ":" or "\\" in location or _MEMORY in f"/{location}/"
    return bool(inside) and not strange


def _leads_outside(location: str, file: File) -> bool:
    path = _external_path(location, file)
    try:
        File.beside(path, file.path)
    except UnsupportedError:
        return True
    except CkpttoolError:
        return False
    return False


def _external_path(location: str, file: File) -> str:
    folder = os.path.dirname(file.path)
    return f"{folder}/{location}" if folder else location


# Default values, which protobuf omits from a message.
_EMPTY: dict[int, Any] = {1: 0.0, 2: 0, 3: b"", 6: (), 7: (), 8: (), 9: (), 10: ()}


def _count_elements(number: int, value: int | memoryview, offset: int) -> int:
    """Return the number of elements in one data field of a tensor."""
    if isinstance(value, int) or number == STRINGS:
        return 1
    if number in _WIDTHS:
        if len(value) % _WIDTHS[number]:
            raise FormatError("a packed array ends in the middle of a number", offset=offset)
        return len(value) // _WIDTHS[number]
    # The last byte of every number has its high bit clear.
    return len(bytes(value).translate(None, _HIGH))


class _ElementType(NamedTuple):
    """One ONNX element type: its ckpttool name ("" if listed but not read), and its data field."""

    title: str
    name: str
    data: int
    bits: int = 0


_F, _I, _L, _D, _U = FLOATS, INT32S, INT64S, DOUBLES, UINT64S
# TensorProto.DataType. Types of fewer than 8 bits share a byte, the first element in the low bits.
TYPES = {
    1: _ElementType("FLOAT", "float32", _F),
    2: _ElementType("UINT8", "uint8", _I),
    3: _ElementType("INT8", "int8", _I),
    4: _ElementType("UINT16", "uint16", _I),
    5: _ElementType("INT16", "int16", _I),
    6: _ElementType("INT32", "int32", _I),
    7: _ElementType("INT64", "int64", _L),
    8: _ElementType("STRING", "string", STRINGS),
    9: _ElementType("BOOL", "bool", _I),
    10: _ElementType("FLOAT16", "float16", _I),
    11: _ElementType("DOUBLE", "float64", _D),
    12: _ElementType("UINT32", "uint32", _U),
    13: _ElementType("UINT64", "uint64", _U),
    14: _ElementType("COMPLEX64", "complex64", _F),
    15: _ElementType("COMPLEX128", "complex128", _D),
    16: _ElementType("BFLOAT16", "bfloat16", _I),
    17: _ElementType("FLOAT8E4M3FN", "float8_e4m3fn", _I),
    18: _ElementType("FLOAT8E4M3FNUZ", "float8_e4m3fnuz", _I),
    19: _ElementType("FLOAT8E5M2", "float8_e5m2", _I),
    20: _ElementType("FLOAT8E5M2FNUZ", "float8_e5m2fnuz", _I),
    21: _ElementType("UINT4", "uint4", _I, 4),
    22: _ElementType("INT4", "int4", _I, 4),
    23: _ElementType("FLOAT4E2M1", "", _I, 4),
    24: _ElementType("FLOAT8E8M0", "float8_e8m0fnu", _I),
    25: _ElementType("UINT2", "uint2", _I, 2),
    26: _ElementType("INT2", "int2", _I, 2),
}
_RECORD, _SPARSE_RECORD = "onnx.TensorProto", "onnx.SparseTensorProto"
_FACTS = 1000  # limit on listed inputs, outputs, node kinds and strings
_LFS = b"version https://git-lfs"
# The limits for the product of a shape are those of tensor_protos; strings in the metadata are cut here.
_LONGEST = 1000


def read(location: str) -> Checkpoint:
    """List the constants of the model's graph; raise FormatError if the bytes violate the format.

    Sources: onnx/onnx.proto (TensorProto: which field stores which type), onnx/numpy_helper.py (`to_array`)
    and docs/ExternalData.md.
    """
    file = File.stamp(location)
    model = read_model(file)
    lister = _ConstantLister(file)
    with locate_errors(file=file.path):
        lister.graph(model.graph, ())
        for function in model.functions:
            lister.nodes(function.nodes, (key(f"{function.domain}.{function.name}"),))
    return Checkpoint(
        location,
        NAME,
        Tree(lister.leaves, {}, {(): Container("dict")}),
        (file, *lister.files.values()),
        model.producer or None,
        notes=tuple(_notes(model, lister)),
        details=_details(model),
        code_references=audit_model(model, file),
    )


def read_model(file: File) -> OnnxModel:
    """Return the file's model; raise FormatError if it is not one, LimitError if it is too large."""
    if file.size > limits.current().graph_bytes:
        raise limits.limit_error("graph_bytes", "the model is too large", file.size, file=file.path)
    data = file.read(0, file.size)
    if data.startswith(_LFS):
        raise FormatError("a Git LFS pointer, not the file itself", file=file.path, hint="git lfs pull")
    with locate_errors(file=file.path):
        return parse_model(memoryview(data))


def node_path(above: Path, node: OnnxNode) -> Path:
    """Return the path of the tensors and graphs that are attributes of a node.

    A tensor is below it at the key, a graph at the attribute with its name.
    """
    return (*above, key(node.name or next(filter(None, node.outputs), node.op)))


@dataclass
class _ConstantLister:
    """Collect the constants of graphs; nested graphs are under the names of their nodes."""

    file: File
    leaves: dict[Path, Leaf | ValueLeaf] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)

    def graph(self, graph: OnnxGraph, above: Path) -> None:
        """Add a graph's constants."""
        for tensor in graph.initializers:
            self._add(above, tensor.name, tensor, constant=False)
        for sparse in graph.sparse:
            self._add(above, "" if sparse.values is None else sparse.values.name, sparse, constant=False)
        self.nodes(graph.nodes, above)

    def nodes(self, nodes: Iterable[OnnxNode], above: Path) -> None:
        """Add the constants stored as nodes, and those of the graphs nested in nodes."""
        for node in nodes:
            if node.op == "Constant" and len(node.outputs) == 1:
                for name in ("value", "sparse_value"):
                    if isinstance(value := node.get(name), OnnxTensor | OnnxSparseTensor):
                        self._add(above, node.outputs[0], value, constant=True)
                continue
            inside = node_path(above, node)
            for name, attribute in node.attributes.items():
                values = attribute.values
                for number, value in enumerate(values):
                    own = name if len(values) < 2 else f"{name}_{number}"
                    if isinstance(value, OnnxGraph):
                        self.graph(value, (*inside, attr(own)))
                    elif isinstance(value, OnnxTensor | OnnxSparseTensor):
                        self._add(inside, own, value, constant=True)

    def _add(self, above: Path, name: str, tensor: OnnxTensor | OnnxSparseTensor, *, constant: bool) -> None:
        if not name:
            raise FormatError("a constant of the graph has no name", offset=getattr(tensor, "start", None))
        path = (*above, key(name))
        if len(path) > limits.current().path_depth:
            raise limits.limit_error("path_depth", "the graphs are nested too deeply", len(path))
        if path in self.leaves:
            raise FormatError("two constants of the graph have the same name", path=repr(name[:200]))
        if isinstance(tensor, OnnxSparseTensor):
            code = 0 if tensor.values is None else tensor.values.code
            title = TYPES[code].title.lower() if code in TYPES else f"type {code}"
            self.left["sparse tensors"] += 1
            self.leaves[path] = ValueLeaf(Record(_SPARSE_RECORD, f"{title}{list(tensor.dims)[:64]}"))
            return
        with locate_errors(path=repr(name[:200])):
            self.leaves[path] = self._leaf(path, tensor, constant=constant)

    def _leaf(self, path: Path, tensor: OnnxTensor, *, constant: bool) -> Leaf | ValueLeaf:
        row = TYPES.get(tensor.code)
        if row is None or not row.name:
            title = row.title if row is not None else f"type {tensor.code}"
            self.left[f"tensors of {title}"] += 1
            return ValueLeaf(Record(_RECORD, f"{title}{list(tensor.dims)[:64]}"))
        if tensor.segmented:
            raise UnsupportedError("segmented tensors are not supported", offset=tensor.start)
        count = tensor_bytes.count_elements(tensor.dims)
        role = _role(path, row, tensor, count, constant=constant)
        native = "/".join(str(step.value) for step in path)
        return Leaf(row.name, tensor.dims, self._source(tensor, row, count), native, role)

    def _source(self, tensor: OnnxTensor, row: _ElementType, count: int) -> Source:
        if tensor.external is not None:
            return self._external(tensor, row, count)
        if len(tensor.element_counts) > 1:
            raise FormatError(
                "a tensor stores its elements in more than one field",
                offset=tensor.start,
                found=str(len(tensor.element_counts)),
            )
        nbytes = _stored_size(row, count)
        if RAW in tensor.element_counts:
            if row.name == "string":
                raise FormatError("a string tensor has raw data", offset=tensor.start)
            _require(tensor, nbytes, tensor.element_counts[RAW], "bytes")
            base = Inline(b"") if tensor.run is None else Span(self.file, *tensor.run)
            return PackedElements(base, row.bits, count) if row.bits else base
        expected = _count_numbers(row, count)
        if tensor.element_counts and row.data not in tensor.element_counts:
            raise FormatError("the data field of a tensor does not match its type", offset=tensor.start)
        _require(tensor, expected, tensor.element_counts.get(row.data, 0), "elements")
        if row.name == "string" and count > limits.current().strings:
            raise limits.limit_error("strings", "the tensor has too many strings", count)
        if tensor.run is not None and row.data in (_F, _D):
            return Span(self.file, *tensor.run)
        return TypedElements(
            Span(self.file, tensor.start, tensor.stop - tensor.start), row.data, row.name, row.bits, count
        )

    def _external(self, tensor: OnnxTensor, row: _ElementType, count: int) -> Source:
        entries = dict(tensor.external or {})
        if tensor.element_counts or row.name == "string":
            raise FormatError("a tensor with external data also contains elements", offset=tensor.start)
        location = entries.get("location", "")
        file = self._beside(location, tensor)
        offset = _parse_number(entries.get("offset"), 0, tensor, "offset")
        nbytes = _stored_size(row, count)
        rest = max(0, file.size - offset)
        length = _parse_number(entries.get("length"), rest, tensor, "length")
        if offset + length > file.size or (length < nbytes):
            raise TruncatedError(
                "the external data file ends before the tensor does",
                file=file.path,
                offset=offset,
                expected=f"{max(nbytes, length):,} bytes",
                found=f"{min(length, rest):,}",
            )
        _require(tensor, nbytes, length, "bytes")
        base = Span(file, offset, nbytes)
        return PackedElements(base, row.bits, count) if row.bits else base

    def _beside(self, location: str, tensor: OnnxTensor) -> File:
        """Return the file that contains a tensor; raise UnsupportedError if it is outside the folder."""
        if not _is_inside(location):
            raise UnsupportedError(
                "a tensor's external data file is outside the model's folder and is not read",
                offset=tensor.start,
                found=repr(location[:200]),
            )
        if location not in self.files:
            path = _external_path(location, self.file)
            if (
                filesystem.find_store(path) is None
                and filesystem.lexists(path)
                and not filesystem.isfile(path)
            ):
                raise FormatError("a tensor's external data file is not a regular file", file=path)
            file = File.beside(path, self.file.path)
            if len(self.files) >= limits.current().folder_files:
                raise limits.limit_error(
                    "folder_files", "the model has too many external data files", len(self.files)
                )
            self.files[location] = file
        return self.files[location]


def _role(path: Path, row: _ElementType, tensor: OnnxTensor, count: int, *, constant: bool) -> Role:
    """Return the role of a constant: shapes, axes and single numbers are operator settings."""
    if not tensor.dims or row.name in ("int64", "bool", "string") or (constant and count < 2):
        return "other"
    return name_roles.role_by_module_name(path[-1:]) or "parameter"


def _stored_size(row: _ElementType, count: int) -> int:
    """Return the size of the elements in a file, in bytes."""
    return (count * row.bits + 7) // 8 if row.bits else count * dtypes.BY_NAME[row.name].itemsize


def _count_numbers(row: _ElementType, count: int) -> int:
    """Return how many numbers a tensor has in its data field."""
    if row.bits:
        return (count * row.bits + 7) // 8
    return 2 * count if row.name.startswith("complex") else count


def _require(tensor: OnnxTensor, expected: int, count: int, what: str) -> None:
    if expected != count:
        raise (TruncatedError if count < expected else FormatError)(
            "the number of elements of a tensor does not match its shape",
            offset=tensor.start,
            expected=f"{expected:,} {what}",
            found=f"{count:,}",
        )


def _parse_number(text: str | None, default: int, tensor: OnnxTensor, what: str) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise FormatError(
            f"the {what} of a tensor with external data is not a number",
            offset=tensor.start,
            found=repr(text[:40]),
        )
    return int(text)


class PackedElements(NamedTuple):
    """Elements of fewer than 8 bits packed in bytes, the first in the low bits; unpacked to bytes."""

    base: Source
    bits: int
    size: int

    def read(self) -> Buffer:
        """Return one byte for each element."""
        return _unpack_bits(np.frombuffer(self.base.read(), np.uint8), self.bits, self.size)


def _unpack_bits(packed: np.ndarray, bits: int, count: int) -> bytes:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    values = ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]
    return values.astype(np.uint8).tobytes()


class TypedElements(NamedTuple):
    """Elements of a tensor in a data field that does not contain their bytes: numbers, strings."""

    base: Span
    number: int
    dtype: str
    bits: int
    size: int

    def read(self) -> Buffer:
        """Return the elements' bytes in the same form as any tensor's."""
        data = bytes(self.base.read())
        if self.number == STRINGS:
            texts = [bytes(protobuf.as_message(v)) for n, v in protobuf.iter_fields(data) if n == self.number]
            return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        numbers = self._numbers(data)
        if len(numbers) != _count_numbers(_ElementType("", self.dtype, self.number, self.bits), self.size):
            raise FormatError(
                "the number of elements of a tensor does not match its shape", file=self.base.file.path
            )
        if self.bits:
            return _unpack_bits(numbers.astype(np.uint8), self.bits, self.size)
        if (
            self.dtype == "bool"
            and ((numbers.astype(np.uint8) == 0) & (numbers.astype(np.uint32) != 0)).any()
        ):
            # The onnx library takes the low byte, ONNX Runtime the whole number.
            raise FormatError("a truth value is outside the range of a byte", file=self.base.file.path)
        if self.number in (_F, _D):
            return numbers.tobytes()
        # The low bits of each number are the element, including halves and 8-bit floats.
        width = dtypes.BY_NAME[self.dtype].itemsize
        return numbers.astype(np.dtype(f"<u{width}")).tobytes()

    def _numbers(self, data: bytes) -> np.ndarray:
        runs: list[np.ndarray] = []
        width = {_F: 4, _D: 8}.get(self.number)
        for number, value in protobuf.iter_fields(data):
            if number != self.number:
                continue
            if isinstance(value, int):
                unit = np.dtype(f"<u{width or 8}")
                runs.append(np.array([value], unit))
            elif width is not None:
                runs.append(np.frombuffer(value, np.dtype(f"<u{width}")))
            else:
                runs.append(_varints(value))
        return np.concatenate(runs) if runs else np.zeros(0, np.uint64)


def _varints(data: bytes) -> np.ndarray:
    """Return the numbers of a packed field, unsigned: uint64 [n]."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise FormatError("a packed array ends in the middle of a number")
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if len(lengths) and (lengths.max() > 10 or (raw[ends[lengths == 10]] > 1).any()):
        raise FormatError("a number is longer than 64 bits")
    values = np.zeros(len(ends), np.uint64)
    for step in range(int(lengths.max()) if len(lengths) else 0):
        longer = lengths > step
        part = (raw[starts[longer] + step] & 0x7F).astype(np.uint64)
        values[longer] |= part << np.uint64(7 * step)
    return values


def _notes(model: OnnxModel, lister: _ConstantLister) -> Iterator[str]:
    if lister.left:
        yield f"listed but not read: {', '.join(sorted(lister.left))}"
    if model.training:
        yield "the model contains training graphs, which are not read"
    custom = sorted(
        {node.domain for node in _iter_nodes(model) if node.domain not in ("", "ai.onnx")}
        - {function.domain for function in model.functions}
    )
    if custom:
        yield f"operators not defined by ONNX: {abbreviate_list(custom, 4)}"


def _iter_nodes(model: OnnxModel) -> Iterator[OnnxNode]:
    """Yield all nodes, including those inside other nodes and functions."""
    waiting = [model.graph.nodes, *(function.nodes for function in model.functions)]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attributes.values():
                waiting += [value.nodes for value in attribute.values if isinstance(value, OnnxGraph)]


def _details(model: OnnxModel) -> dict[str, Any]:
    """Return the facts of the graph as JSON values."""
    constants = {tensor.name for tensor in model.graph.initializers}
    # Up to version 3 of the format, constants are listed among the inputs as well.
    inputs = [value for value in model.graph.inputs if value.name not in constants]
    operators = Counter(node.title for node in _iter_nodes(model))
    details: dict[str, Any] = {
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in list(model.opsets.items())[:_FACTS]},
        "name": model.graph.name,
        "inputs": _values(inputs),
        "outputs": _values(model.graph.outputs),
        "operators": dict(operators.most_common(_FACTS)),
    }
    if model.functions:
        details["own_operators"] = [_title(function) for function in model.functions[:_FACTS]]
    if model.metadata:
        kept = list(model.metadata.items())[:_FACTS]
        details["metadata"] = {name[:_LONGEST]: text[:_LONGEST] for name, text in kept}
    return details


def _title(function: OnnxFunction) -> str:
    return f"{function.domain}.{function.name}" if function.domain else function.name


def _values(values: Iterable[OnnxValue]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for value in list(values)[:_FACTS]:
        row = TYPES.get(value.code)
        entries[value.name] = {
            "dtype": None if row is None else row.name or row.title.lower(),
            "shape": None
            if value.shape is None
            else [extent if extent != "" else None for extent in value.shape],
        }
    return entries
