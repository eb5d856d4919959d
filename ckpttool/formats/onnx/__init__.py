"""ONNX models: a protobuf message with a graph of operators and constants; the onnx library is not needed.

Source: github.com/onnx/onnx, onnx/onnx.proto and docs/ExternalData.md. The graph is read as data, never run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.wire import protobuf

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.formats.probe import Probe

__all__ = ["FRAMEWORK", "NAME", "SUFFIX", "TITLE", "WRITES", "claims", "read"]

NAME = "onnx"
TITLE = "ONNX model"
WRITES = False
FRAMEWORK = "numpy"

SUFFIX = ".onnx"
_GRAPH, _IR_VERSION = 7, 1
# ModelProto: the fields that may stand before its graph, with their wire types.
_TEXTS, _NUMBERS = frozenset((2, 3, 4, 6, 8, 14, 20, 25)), frozenset((1, 5))
# GraphProto: node, name, initializer, doc_string, input, output, value_info, quantization_annotation,
# sparse_initializer, metadata_props, each with its wire type.
_PARTS = frozenset(number << 3 | protobuf.BYTES for number in (1, 2, 5, 10, 11, 12, 13, 14, 15, 16))


def claims(probe: Probe) -> str | None:
    """Return the path of a file whose first fields are those of a model, up to its graph.

    A suffix alone is enough where the first byte begins a field of a model.
    """
    if probe.kind != "file" or not probe.head:
        return None
    tag = probe.head[0]
    begins = tag & 7 in (protobuf.VARINT, protobuf.BYTES) and tag >> 3 in _TEXTS | _NUMBERS | {_GRAPH}
    if not begins:
        return None
    return probe.path if probe.name.endswith(SUFFIX) or _reaches_graph(probe.head) else None


def _reaches_graph(head: bytes) -> bool:
    """Return whether fields of a model, its version among them, lead to a graph within the first bytes."""
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


def read(location: str) -> Checkpoint:
    """List the constants of the model's graph; raise FormatError when the bytes break the format's rules."""
    # Every command asks every format what it claims; only this one's own reader needs the rest.
    from ckpttool.formats.onnx.listing import read as listed

    return listed(location)
