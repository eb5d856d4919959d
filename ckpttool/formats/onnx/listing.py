"""What an ONNX file holds: the constants of its graphs as tensors by name, and facts of the graph.

Sources: onnx/onnx.proto (TensorProto, which field holds which type), onnx/numpy_helper.py (`to_array`) and
docs/ExternalData.md.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpttool import dtypes, limits, places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError, some
from ckpttool.formats import onnx, tensor_protos
from ckpttool.formats.onnx import model as messages
from ckpttool.formats.onnx.model import Function, Graph, Model, Node, Sparse, Tensor, Value
from ckpttool.formats.torch_pickle import roles
from ckpttool.leaf import Leaf, Path, Record, Role, ValueLeaf, attr, key
from ckpttool.source import Buffer, File, Inline, Source, Span
from ckpttool.tree import Container, Tree
from ckpttool.wire import protobuf

if TYPE_CHECKING:
    import numpy as np


class _Type(NamedTuple):
    """One element type of ONNX: our name ("" for one that is listed and not read), and its field of data."""

    title: str
    name: str
    data: int
    bits: int = 0


_F, _I, _L, _D, _U = messages.FLOATS, messages.INT32S, messages.INT64S, messages.DOUBLES, messages.UINT64S
# TensorProto.DataType. Types of fewer than 8 bits share a byte, the first element in the low bits.
TYPES = {
    1: _Type("FLOAT", "float32", _F),
    2: _Type("UINT8", "uint8", _I),
    3: _Type("INT8", "int8", _I),
    4: _Type("UINT16", "uint16", _I),
    5: _Type("INT16", "int16", _I),
    6: _Type("INT32", "int32", _I),
    7: _Type("INT64", "int64", _L),
    8: _Type("STRING", "string", messages.STRINGS),
    9: _Type("BOOL", "bool", _I),
    10: _Type("FLOAT16", "float16", _I),
    11: _Type("DOUBLE", "float64", _D),
    12: _Type("UINT32", "uint32", _U),
    13: _Type("UINT64", "uint64", _U),
    14: _Type("COMPLEX64", "complex64", _F),
    15: _Type("COMPLEX128", "complex128", _D),
    16: _Type("BFLOAT16", "bfloat16", _I),
    17: _Type("FLOAT8E4M3FN", "float8_e4m3fn", _I),
    18: _Type("FLOAT8E4M3FNUZ", "float8_e4m3fnuz", _I),
    19: _Type("FLOAT8E5M2", "float8_e5m2", _I),
    20: _Type("FLOAT8E5M2FNUZ", "float8_e5m2fnuz", _I),
    21: _Type("UINT4", "uint4", _I, 4),
    22: _Type("INT4", "int4", _I, 4),
    23: _Type("FLOAT4E2M1", "", _I, 4),
    24: _Type("FLOAT8E8M0", "float8_e8m0fnu", _I),
    25: _Type("UINT2", "uint2", _I, 2),
    26: _Type("INT2", "int2", _I, 2),
}
_RECORD, _SPARSE = "onnx.TensorProto", "onnx.SparseTensorProto"
_FACTS = 1000  # inputs, outputs, kinds of nodes and texts that are listed
_LFS = b"version https://git-lfs"
# Bounds for the product of a shape are those of tensor_protos; a text in the metadata is cut here.
_LONGEST = 1000


def read(location: str) -> Checkpoint:
    """List the model's constants; see onnx.read."""
    file = File.stamp(location)
    model = parsed(file)
    lister = _Lister(file)
    try:
        lister.graph(model.graph, ())
        for function in model.functions:
            lister.nodes(function.nodes, (key(f"{function.domain}.{function.name}"),))
    except CkpttoolError as error:
        raise error.located(file=error.file or file.path) from error.__cause__
    return Checkpoint(
        location,
        onnx.NAME,
        Tree(lister.leaves, {}, {(): Container("dict")}),
        (file, *lister.files.values()),
        model.producer or None,
        notes=tuple(_notes(model, lister)),
        details=_details(model),
    )


def parsed(file: File) -> Model:
    """Return the file's model; raise FormatError for bytes that are none, LimitError for a large file."""
    if file.size > limits.current().graph_bytes:
        raise limits.exceeded("graph_bytes", "the model is too large", file.size, file=file.path)
    data = file.read(0, file.size)
    if data.startswith(_LFS):
        raise FormatError("a Git LFS pointer, not the file itself", file=file.path, hint="git lfs pull")
    try:
        return messages.parse(memoryview(data))
    except CkpttoolError as error:
        raise error.located(file=file.path) from error.__cause__


@dataclass
class _Lister:
    """Collects the constants of graphs, those inside one another below the names of their nodes."""

    file: File
    leaves: dict[Path, Leaf | ValueLeaf] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    left: Counter[str] = field(default_factory=Counter)

    def graph(self, graph: Graph, above: Path) -> None:
        """Add a graph's constants."""
        for tensor in graph.initializers:
            self._add(above, tensor.name, tensor, constant=False)
        for sparse in graph.sparse:
            self._add(above, "" if sparse.values is None else sparse.values.name, sparse, constant=False)
        self.nodes(graph.nodes, above)

    def nodes(self, nodes: Iterable[Node], above: Path) -> None:
        """Add the constants that are nodes, and those of the graphs that nodes hold."""
        for node in nodes:
            if node.op == "Constant" and len(node.outputs) == 1:
                for name in ("value", "sparse_value"):
                    if isinstance(value := node.get(name), Tensor | Sparse):
                        self._add(above, node.outputs[0], value, constant=True)
                continue
            for name, attribute in node.attributes.items():
                values = attribute.values
                title = node.name or next(filter(None, node.outputs), node.op)
                for number, value in enumerate(values):
                    step = (key(title), attr(name if len(values) < 2 else f"{name}_{number}"))
                    if isinstance(value, Graph):
                        self.graph(value, (*above, *step))
                    elif isinstance(value, Tensor | Sparse):
                        self._add((*above, step[0]), str(step[1].value), value, constant=True)

    def _add(self, above: Path, name: str, found: Tensor | Sparse, *, constant: bool) -> None:
        if not name:
            raise FormatError("a constant of the graph has no name", offset=getattr(found, "start", None))
        path = (*above, key(name))
        if len(path) > limits.current().path_depth:
            raise limits.exceeded("path_depth", "the graphs are too deep inside one another", len(path))
        if path in self.leaves:
            raise FormatError("two constants of the graph have one name", path=repr(name[:200]))
        if isinstance(found, Sparse):
            code = 0 if found.values is None else found.values.code
            title = TYPES[code].title.lower() if code in TYPES else f"type {code}"
            self.left["sparse tensors"] += 1
            self.leaves[path] = ValueLeaf(Record(_SPARSE, f"{title}{list(found.dims)[:64]}"))
            return
        try:
            self.leaves[path] = self._leaf(path, found, constant=constant)
        except CkpttoolError as error:
            raise error.located(path=error.path or repr(name[:200])) from error.__cause__

    def _leaf(self, path: Path, tensor: Tensor, *, constant: bool) -> Leaf | ValueLeaf:
        row = TYPES.get(tensor.code)
        if row is None or not row.name:
            title = row.title if row is not None else f"type {tensor.code}"
            self.left[f"tensors of {title}"] += 1
            return ValueLeaf(Record(_RECORD, f"{title}{list(tensor.dims)[:64]}"))
        if tensor.segmented:
            raise UnsupportedError("a tensor in segments is not read", offset=tensor.start)
        count = tensor_protos.elements_of(tensor.dims)
        role = _role(path, row, tensor, count, constant=constant)
        native = "/".join(str(step.value) for step in path)
        return Leaf(row.name, tensor.dims, self._source(tensor, row, count), native, role)

    def _source(self, tensor: Tensor, row: _Type, count: int) -> Source:
        if tensor.external is not None:
            return self._external(tensor, row, count)
        if len(tensor.held) > 1:
            raise FormatError(
                "a tensor's elements stand in more than one place",
                offset=tensor.start,
                found=str(len(tensor.held)),
            )
        nbytes = _stored(row, count)
        if messages.RAW in tensor.held:
            if row.name == "string":
                raise FormatError("a tensor of strings has raw data", offset=tensor.start)
            _require(tensor, nbytes, tensor.held[messages.RAW], "bytes")
            base = Inline(b"") if tensor.run is None else Span(self.file, *tensor.run)
            return Packed(base, row.bits, count) if row.bits else base
        wanted = _elements(row, count)
        if tensor.held and row.data not in tensor.held:
            raise FormatError("a tensor's elements are of another type than its own", offset=tensor.start)
        _require(tensor, wanted, tensor.held.get(row.data, 0), "elements")
        if row.name == "string" and count > limits.current().strings:
            raise limits.exceeded("strings", "the tensor has too many strings", count)
        if tensor.run is not None and row.data in (_F, _D):
            return Span(self.file, *tensor.run)
        return Typed(
            Span(self.file, tensor.start, tensor.stop - tensor.start), row.data, row.name, row.bits, count
        )

    def _external(self, tensor: Tensor, row: _Type, count: int) -> Source:
        entries = dict(tensor.external or {})
        if tensor.held or row.name == "string":
            raise FormatError("a tensor in another file has elements of its own", offset=tensor.start)
        location = entries.get("location", "")
        file = self._beside(location, tensor)
        offset = _whole(entries.get("offset"), 0, tensor, "offset")
        nbytes = _stored(row, count)
        rest = max(0, file.size - offset)
        length = _whole(entries.get("length"), rest, tensor, "length")
        if offset + length > file.size or (length < nbytes):
            raise TruncatedError(
                "the file of a tensor ends before it does",
                file=file.path,
                offset=offset,
                expected=f"{max(nbytes, length):,} bytes",
                found=f"{min(length, rest):,}",
            )
        _require(tensor, nbytes, length, "bytes")
        base = Span(file, offset, nbytes)
        return Packed(base, row.bits, count) if row.bits else base

    def _beside(self, location: str, tensor: Tensor) -> File:
        """Return the file that a tensor lies in; raise UnsupportedError for one outside of the folder."""
        parts = location.replace("\\", "/").split("/")
        inside = location and not location.startswith(("/", "\\")) and os.pardir not in parts
        if not inside or "\0" in location or location[1:2] == ":" or "\\" in location:
            raise UnsupportedError(
                "a tensor lies in a file outside of the model's folder, which is not read",
                offset=tensor.start,
                found=repr(location[:200]),
            )
        if location not in self.files:
            folder = os.path.dirname(self.file.path)
            path = "/".join([folder, *parts]) if folder else "/".join(parts)
            if places.store(path) is None and places.lexists(path) and not places.isfile(path):
                raise FormatError("the file of a tensor is not a regular file", file=path)
            found = File.beside(path, self.file.path)
            if len(self.files) >= limits.current().folder_files:
                raise limits.exceeded("folder_files", "the model lies in too many files", len(self.files))
            self.files[location] = found
        return self.files[location]


def _role(path: Path, row: _Type, tensor: Tensor, count: int, *, constant: bool) -> Role:
    """Return what a constant is for: shapes, axes and single numbers are settings of operators."""
    if not tensor.dims or row.name in ("int64", "bool", "string") or (constant and count < 2):
        return "other"
    return roles.by_name(path[-1:]) or "parameter"


def _stored(row: _Type, count: int) -> int:
    """Return how many bytes the elements take in a file."""
    return (count * row.bits + 7) // 8 if row.bits else count * dtypes.BY_NAME[row.name].itemsize


def _elements(row: _Type, count: int) -> int:
    """Return how many numbers of its field of data a tensor has."""
    if row.bits:
        return (count * row.bits + 7) // 8
    return 2 * count if row.name.startswith("complex") else count


def _require(tensor: Tensor, wanted: int, found: int, what: str) -> None:
    if wanted != found:
        raise (TruncatedError if found < wanted else FormatError)(
            "a tensor's elements are not as many as its shape needs",
            offset=tensor.start,
            expected=f"{wanted:,} {what}",
            found=f"{found:,}",
        )


def _whole(text: str | None, default: int, tensor: Tensor, what: str) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise FormatError(
            f"the {what} of a tensor in another file is no number", offset=tensor.start, found=repr(text[:40])
        )
    return int(text)


class Packed(NamedTuple):
    """Elements of fewer than 8 bits that share a byte, the first in the low bits; each becomes a byte."""

    base: Source
    bits: int
    size: int

    def read(self) -> Buffer:
        """Return one byte for each element."""
        import numpy as np

        return _unpacked(np.frombuffer(self.base.read(), np.uint8), self.bits, self.size)


def _unpacked(packed: np.ndarray, bits: int, count: int) -> bytes:
    import numpy as np

    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = ((packed[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)[:count]
    return found.astype(np.uint8).tobytes()


class Typed(NamedTuple):
    """The elements of a tensor's message in a field of data that is not their bytes: numbers, strings."""

    base: Span
    number: int
    dtype: str
    bits: int
    size: int

    def read(self) -> Buffer:
        """Return the elements' bytes as those of any tensor."""
        data = bytes(self.base.read())
        if self.number == messages.STRINGS:
            texts = [bytes(protobuf.message(v)) for n, v in protobuf.each(data) if n == self.number]
            return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        import numpy as np

        found = self._numbers(data)
        if len(found) != _elements(_Type("", self.dtype, self.number, self.bits), self.size):
            raise FormatError(
                "a tensor's elements are not as many as its shape needs", file=self.base.file.path
            )
        if self.bits:
            return _unpacked(found.astype(np.uint8), self.bits, self.size)
        if self.dtype == "bool":
            return found.astype(np.uint32).astype(bool).tobytes()
        if self.number in (_F, _D):
            return found.tobytes()
        # The low bits of each number are the element's, also of halves and floats of 8 bits.
        width = dtypes.BY_NAME[self.dtype].itemsize
        return found.astype(np.dtype(f"<u{width}")).tobytes()

    def _numbers(self, data: bytes) -> np.ndarray:
        import numpy as np

        runs: list[np.ndarray] = []
        width = {_F: 4, _D: 8}.get(self.number)
        for number, value in protobuf.each(data):
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
    """Return the numbers of a packed run, unsigned: uint64 [n]."""
    import numpy as np

    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 0x80)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise FormatError("a run of numbers ends within one")
    starts = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if len(lengths) and (lengths.max() > 10 or (raw[ends[lengths == 10]] > 1).any()):
        raise FormatError("a number takes more than 64 bits")
    found = np.zeros(len(ends), np.uint64)
    for step in range(int(lengths.max()) if len(lengths) else 0):
        longer = lengths > step
        part = (raw[starts[longer] + step] & 0x7F).astype(np.uint64)
        found[longer] |= part << np.uint64(7 * step)
    return found


def _notes(model: Model, lister: _Lister) -> Iterator[str]:
    if lister.left:
        yield f"listed and not read: {', '.join(sorted(lister.left))}"
    if model.training:
        yield "the model has graphs of training, which are not read"
    custom = sorted(
        {node.domain for node in _all(model) if node.domain not in ("", "ai.onnx")}
        - {function.domain for function in model.functions}
    )
    if custom:
        yield f"operators outside of ONNX: {some(custom, 4)}"


def _all(model: Model) -> Iterator[Node]:
    """Go through all nodes, those inside of other nodes and of functions among them."""
    waiting = [model.graph.nodes, *(function.nodes for function in model.functions)]
    while waiting:
        for node in waiting.pop():
            yield node
            for attribute in node.attributes.values():
                waiting += [value.nodes for value in attribute.values if isinstance(value, Graph)]


def _details(model: Model) -> dict[str, Any]:
    """Return the facts of the graph, as JSON values."""
    constants = {tensor.name for tensor in model.graph.initializers}
    # Up to version 3 of the format every constant is listed among the inputs, too.
    inputs = [value for value in model.graph.inputs if value.name not in constants]
    operators = Counter(node.title for node in _all(model))
    found: dict[str, Any] = {
        "ir_version": model.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in list(model.opsets.items())[:_FACTS]},
        "name": model.graph.name,
        "inputs": _values(inputs),
        "outputs": _values(model.graph.outputs),
        "operators": dict(operators.most_common(_FACTS)),
    }
    if model.functions:
        found["own_operators"] = [_title(function) for function in model.functions[:_FACTS]]
    if model.metadata:
        kept = list(model.metadata.items())[:_FACTS]
        found["metadata"] = {name[:_LONGEST]: text[:_LONGEST] for name, text in kept}
    return found


def _title(function: Function) -> str:
    return f"{function.domain}.{function.name}" if function.domain else function.name


def _values(values: Iterable[Value]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for value in list(values)[:_FACTS]:
        row = TYPES.get(value.code)
        found[value.name] = {
            "dtype": None if row is None else row.name or row.title.lower(),
            "shape": None
            if value.shape is None
            else [extent if extent != "" else None for extent in value.shape],
        }
    return found
