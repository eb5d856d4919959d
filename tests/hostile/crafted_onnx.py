"""ONNX models that break a rule of the format, point out of their folder, or ask for much."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bundle_writer import field
from tests.hostile.case import BAIT, Case
from tests.hostile.crafted_any import written

_LINE = "onnx"
_NAME = "model.onnx"
Make = Callable[[Path], Path]
FLOAT, INT8, INT64, STRING = 1, 3, 7, 8


def packed(values: Sequence[int]) -> bytes:
    """Return numbers as a packed field has them."""
    return b"".join(field(1, value)[1:] for value in values)


def tensor(
    name: str = "w", shape: Sequence[int] = (2,), code: int = FLOAT, *more: bytes, raw: bytes | None = None
) -> bytes:
    """Return a TensorProto; without other data it holds zeros as raw bytes of 32 bits."""
    count = 1
    for extent in shape:
        count *= extent
    data = (b"" if more else field(9, bytes(4 * count))) if raw is None else field(9, raw)
    dims = b"".join(field(1, extent) for extent in shape)
    return dims + field(2, code) + field(8, name) + data + b"".join(more)


def external(**entries: str) -> bytes:
    """Return the fields of a tensor that lies in another file."""
    pairs = (field(13, field(1, name) + field(2, value)) for name, value in entries.items())
    return b"".join(pairs) + field(14, 1)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], *attributes: bytes) -> bytes:
    """Return a NodeProto."""
    names = b"".join(field(1, name) for name in inputs) + b"".join(field(2, name) for name in outputs)
    return names + field(3, f"{op}_{outputs[0]}" if outputs else op) + field(4, op) + b"".join(attributes)


def graph(*tensors: bytes, nodes: Sequence[bytes] = (), more: bytes = b"") -> bytes:
    """Return a GraphProto of these constants and nodes."""
    content = b"".join(field(1, node) for node in nodes) + field(2, "g")
    return content + b"".join(field(5, tensor) for tensor in tensors) + more


def model(whole: bytes, opset: bytes | None = None) -> bytes:
    """Return a ModelProto of one graph."""
    versions = field(8, field(2, 13)) if opset is None else opset
    return field(1, 8) + field(2, "hostile") + field(7, whole) + versions


def agent() -> bytes:
    """Return a model of two dense layers, as exporters write them."""
    nodes = [
        node("Gemm", ("obs", "a.weight", "a.bias"), ("1",)),
        node("Relu", ("1",), ("2",)),
        node("Gemm", ("2", "b.weight", "b.bias"), ("3",)),
        node("Constant", (), ("c",), field(5, field(1, "value") + field(5, tensor("", (1,))) + field(20, 4))),
        node("Mul", ("3", "c"), ("action",)),
    ]
    layers = {"a.weight": (3, 4), "a.bias": (4,), "b.weight": (4, 1), "b.bias": (1,)}
    constants = [tensor(name, shape) for name, shape in layers.items()]
    steps = tensor("steps", (2,), INT64, field(7, packed((5, 1 << 63))))
    return model(graph(*constants, steps, nodes=nodes))


def _holding(*args: Any, **data: Any) -> Make:
    """Return the maker of a model of one tensor."""
    return written(_NAME, model(graph(tensor(*args, **data))))


def _outside(**entries: str) -> Make:
    """Return the maker of a model of one tensor that lies elsewhere."""
    return _holding("w", (2,), FLOAT, external(**entries))


def _beside(data: bytes, **entries: str) -> Make:
    def make(folder: Path) -> Path:
        (folder / "w").write_bytes(data)
        return _outside(location="w", **entries)(folder)

    return make


def _linked(folder: Path) -> Path:
    (folder / "w").symlink_to(f"../{BAIT}")
    return _outside(location="w")(folder)


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "w")
    return _outside(location="w")(folder)


def _nested(depth: int) -> bytes:
    inner = graph(tensor())
    for number in range(depth):
        attribute = field(5, field(1, "body") + field(6, inner) + field(20, 5))
        inner = graph(nodes=[node("Loop", (), (f"l{number}",), attribute)])
    return model(inner)


def _attributed(*fields: bytes) -> bytes:
    """Return a model of one constant, a node whose attribute has these fields besides its name."""
    return model(graph(nodes=[node("Constant", (), ("c",), field(5, field(1, "value") + b"".join(fields)))]))


def _numbers(count: int) -> bytes:
    return model(graph(nodes=[node("X", (), ("y",), field(5, field(1, "a") + field(8, bytes(count))))]))


_WHOLE = agent()
# Makers of files that must be refused.
WRONG: dict[str, Make] = {
    "no-opset": written(_NAME, model(graph(tensor()), b"")),
    "no-graph": written(_NAME, field(1, 8) + field(2, "x") + field(8, field(2, 13))),
    "two-graphs": written(_NAME, model(graph(tensor())) + field(7, graph())),
    "two-names": written(_NAME, model(graph(tensor(), tensor()))),
    "no-name": _holding(""),
    "negative-extent": _holding("w", (), FLOAT, field(1, (1 << 64) - 1)),
    "huge-shape-with-zero": _holding("w", (1 << 62, 1 << 62, 0), raw=b""),
    "many-axes": _holding("w", (1,) * 65),
    "more-axes": _holding("w", (1,) * 1001),
    "short": _holding("w", (3,), raw=bytes(8)),
    "long": _holding("w", (1,), raw=bytes(8)),
    "nothing": _holding("w", (4,), raw=b""),
    "two-places": _holding("w", (1,), FLOAT, field(4, bytes(4)), raw=bytes(4)),
    "other-field": _holding("w", (1,), FLOAT, field(7, packed((1,)))),
    "half-a-float": _holding("w", (1,), FLOAT, field(4, bytes(3))),
    "open-varint": _holding("w", (1,), INT8, field(5, b"\x01\xff")),
    "segment": _holding("w", (2,), FLOAT, field(3, field(1, 0)), raw=bytes(8)),
    "raw-strings": _holding("w", (1,), STRING, raw=b"text"),
    "wrong-wire": written(_NAME, model(field(5, 3))),
    "many-numbers": written(_NAME, _numbers(600_000)),
    "parent-inside": _outside(location="a/../w"),
    "backslash": _outside(location=f"..\\{BAIT}"),
    "drive": _outside(location="C:w"),
    "no-location": _outside(),
    "short-file": _beside(bytes(7), length="8"),
    "offset": _beside(bytes(8), offset="4", length="8"),
    "far-offset": _beside(bytes(8), offset="9" * 18),
    "rest-of-the-file": _beside(bytes(12)),
    "negative-offset": _beside(bytes(8), offset="-4"),
    "length-in-words": _beside(bytes(8), length="eight"),
    "attribute-of-unknown-type": written(_NAME, _attributed(field(5, tensor("")), field(20, 99))),
    "attribute-of-other-type": written(_NAME, _attributed(field(5, tensor("")), field(20, 2))),
    "attribute-of-two-types": written(_NAME, _attributed(field(5, tensor("")), field(3, 7))),
    "own-elements-too": _holding("w", (1,), FLOAT, external(location="w"), raw=bytes(4)),
}


def custom(op: str = "Run", domain: str = "my.ops", *attributes: bytes) -> bytes:
    """Return a node of an operator in another domain."""
    return node(op, ("x",), ("y",), field(7, domain), *attributes)


def _attribute(name: str, number: int, value: bytes, kind: int | None = None) -> bytes:
    """Return a node's field with an attribute; without `kind` its type is not stated."""
    return field(5, field(1, name) + field(number, value) + (b"" if kind is None else field(20, kind)))


def branch(inner: bytes, kind: int | None = 5) -> bytes:
    """Return an If whose branch is a graph of one node."""
    return node("If", ("c",), ("y",), _attribute("then_branch", 6, graph(nodes=[inner]), kind))


def function(inner: bytes, name: str = "F", domain: str = "pkg") -> bytes:
    return field(25, field(1, name) + field(7, inner) + field(10, domain))


def with_nodes(*nodes: bytes, more: bytes = b"") -> bytes:
    return model(graph(tensor(), nodes=nodes)) + more


_ELSEWHERE = tensor("", (2,), FLOAT, external(location=f"../{BAIT}", length="8"))
# Models with an operator or a file that is not ONNX's.
CODE: dict[str, bytes] = {
    "custom": with_nodes(custom()),
    "compiled-context": with_nodes(custom("EPContext", "com.microsoft")),
    "compiled-context-elsewhere": with_nodes(
        custom("EPContext", "local"), more=function(custom("Relu", ""), "EPContext", "local")
    ),
    "snpe": with_nodes(custom("Snpe", "com.microsoft")),
    "python": with_nodes(custom("PyOp", "ai.onnx.contrib")),
    "python-of-onnx": with_nodes(custom("PyOp", "")),
    "unknown-of-microsoft": with_nodes(custom("PythonOp", "com.microsoft")),
    "aten": with_nodes(custom("ATen", "org.pytorch.aten")),
    "domain-like-onnx": with_nodes(custom("Relu", "ai.onnx.contrib")),
    "in-a-branch": with_nodes(branch(custom())),
    "in-a-branch-of-a-branch": with_nodes(branch(branch(custom()))),
    "in-graphs": with_nodes(
        node("Scan", ("c",), ("y",), _attribute("bodies", 11, graph(nodes=[custom()]), 10))
    ),
    "in-a-field-of-no-type": with_nodes(branch(custom(), None)),
    "in-a-function": with_nodes(custom("F", "pkg"), more=function(custom())),
    "in-an-unused-function": with_nodes(more=function(custom())),
    "of-another-function": with_nodes(custom("G", "pkg"), more=function(node("Relu", ("x",), ("y",)))),
    "of-another-overload": with_nodes(
        custom("F", "pkg", field(8, "two")), more=function(node("Relu", ("x",), ("y",)))
    ),
    "in-training": with_nodes(more=field(20, field(2, graph(nodes=[custom()])))),
    "in-the-start-of-training": with_nodes(more=field(20, field(1, graph(nodes=[custom()])))),
}


def _external_of(inner: bytes) -> bytes:
    """Return a model whose training graph has the tensor, which is not listed."""
    return with_nodes(more=field(20, field(1, graph(inner))))


# Models with data elsewhere, in places that are not listed.
ELSEWHERE: dict[str, bytes] = {
    "in-training": _external_of(tensor("w", (2,), FLOAT, external(location=f"../{BAIT}", length="8"))),
    "as-indices": _external_of(b"") + b"",
    "memory": _external_of(tensor("w", (2,), FLOAT, external(location="*/_ORT_MEM_ADDR_/*", offset="4096"))),
    "device": _external_of(tensor("w", (2,), FLOAT, external(location="/dev/mem"))),
    "in-a-field-of-no-type": with_nodes(node("Constant", (), ("c",), _attribute("value", 5, _ELSEWHERE))),
    "entries": _external_of(tensor("w", (2,), FLOAT, external(location="w", __class__="x"))),
}
ELSEWHERE["as-indices"] = model(
    graph(more=field(15, field(1, tensor("w", (2,))) + field(2, _ELSEWHERE) + field(3, 9)))
)


def _refused(name: str, data: bytes | Make) -> Case:
    return Case(f"onnx-{name}", _LINE, data if callable(data) else written(_NAME, data))


def _listed(name: str, make: Make, convert: int | None = None, shows: str = "") -> Case:
    return Case(f"onnx-{name}", _LINE, make, 0, 0, convert, shows=shows)


CASES = (
    _listed("agent", written(_NAME, _WHOLE), convert=0),
    _listed("terminal-name", _holding("\x1b[31mred\x07"), convert=2),
    _listed("external", _beside(bytes(8), length="8")),
    _listed("float4", _holding("w", (2,), 23, raw=b"\x21"), shows="FLOAT4E2M1"),
    _listed("unknown-type", _holding("w", (2,), 99), shows="type 99"),
    _refused("cut-in-graph", _WHOLE[: len(_WHOLE) // 2]),
    _refused("huge-shape", _holding("w", (1 << 40, 1 << 40), raw=b"")),
    _refused("deep-graphs", _nested(150)),
    Case(
        "onnx-many-fields",
        _LINE,
        written(_NAME, field(1, 8) + field(2, "x") * 5_000 + field(7, graph(tensor()))),
        options=("--limit", "graph_parts=1000"),
    ),
    _refused("absolute", _outside(location="/etc/passwd")),
    _refused("parent", _outside(location=f"../{BAIT}")),
    _refused("link", _linked),
    _refused("pipe", _pipe),
    _refused("missing", _outside(location="w")),
    *(
        Case(f"onnx-code-{name}", _LINE, written(_NAME, data), 0, None, None, 1)
        for name, data in (CODE | ELSEWHERE).items()
        if name in ("custom", "compiled-context", "in-a-branch", "memory")
    ),
)
