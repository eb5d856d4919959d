"""safetensors files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import IO, Any, NoReturn

from ckpttool.core import deferred, dtypes, limits
from ckpttool.core import text as documents
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.core.source import File, Shape, Source, Span
from ckpttool.core.tree import Alias, Container, Leaf, Path, Record, Tree, ValueLeaf, display, key
from ckpttool.formats import embedded_tree, name_roles, tensor_bytes
from ckpttool.formats.file_listing import FileListing
from ckpttool.formats.probe import OutputFile, Probe

NAME = "safetensors"
TITLE = "safetensors file"
WRITES = True
FRAMEWORK = "torch"

SUFFIX = ".safetensors"
LENGTH = 8

# torch/distributed/checkpoint/_hf_utils.py: FILE_NAME (of whole tensors), CUSTOM_METADATA_KEY and
# SAVED_OFFSETS_KEY.
_WHOLE = deferred.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_SHARDING, _SAVED_OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def claims(probe: Probe) -> str | None:
    """Return the path of a file that begins with a header length and a `{`, or has the suffix.

    The suffix alone is enough only if the first bytes are neither text nor another format. Shards with
    metadata beside them (`.distcp`) belong to `torch_dcp`.
    """
    if probe.kind != "file" or not probe.size or probe.name.endswith(".distcp"):
        return None
    size = int.from_bytes(probe.head[:LENGTH], "little")
    opened = probe.head[LENGTH : LENGTH + 1] == b"{"
    if opened and 0 < size <= probe.size - LENGTH:
        return probe.path
    named = probe.name.endswith(SUFFIX)
    short = probe.size <= LENGTH or size <= limits.current().header_bytes
    return probe.path if named and (opened or short) else None


def read(location: str) -> Checkpoint:
    """List the tensors; raise FormatError if the header violates the format.

    Source: github.com/huggingface/safetensors, README.md ("Format") and safetensors/src/tensor.rs.
    """
    file = File.stamp(location)
    return list_file(file).checkpoint(location, NAME, file)


METADATA = "__metadata__"
# NumPy's limit, and more than in any framework.
RANK = 64
_LARGEST_COUNT = (1 << 63) - 1
_ONLY_INT = frozenset((int,))
_FIELDS = {"dtype", "shape", "data_offsets"}

# Elements smaller than a byte, which no array library supports (tensor.rs, Dtype::bitsize): bits.
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class SafetensorsEntry(NamedTuple):
    """One tensor: `code` is the format's name of its dtype, `offset` counts from the start of the file."""

    code: str
    shape: Shape
    offset: int
    nbytes: int


def read_header(file: File, at: int = 0) -> tuple[Mapping[str, SafetensorsEntry], Mapping[str, str]]:
    """Return a header's entries by name, in their order in the text, and its metadata.

    The format starts at byte `at` and ends with the file. Raise FormatError if the header violates the format
    or the data has gaps. Sources: github.com/huggingface/safetensors, README.md ("Format") and
    safetensors/src/tensor.rs (`SafeTensors::read_metadata`, `Metadata::validate`, `Dtype`).
    """
    text = _text(file, at)
    try:
        header = documents.parse_strict_json(text, "the header", "header_bytes")
    except CkpttoolError as error:
        error.offset = at + LENGTH
        raise error.located(file=file.path) from error.__cause__
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        _fail(file, "the metadata must map names to strings")
    start = at + LENGTH + len(text)
    entries = {name: _parse_entry(file, name, fields, start) for name, fields in header.items()}
    _require_dense(file, entries, start)
    return entries, metadata


def read_offsets(file: File, texts: Mapping[str, str]) -> Mapping[str, Shape]:
    """Return the position of each entry in the tensor that torch cut, if the file is from a rank.

    `texts` are a header's metadata. Raise FormatError if they do not have the form that torch writes.
    """
    offsets: dict[str, Shape] = {}
    stated = documents.parse_strict_json(texts.get(_SHARDING, "{}").encode(), _SHARDING, "header_bytes")
    for name, fields in stated.items():
        offset = fields.get(_SAVED_OFFSETS) if isinstance(fields, dict) else None
        if (
            not isinstance(offset, list)
            or not set(map(type, offset)) <= _ONLY_INT
            or min(offset, default=0) < 0
        ):
            _fail_tensor(file, name, f"has {_SAVED_OFFSETS} that are not a list of positions")
        offsets[name] = tuple(offset)
    return offsets


def _text(file: File, at: int) -> bytes:
    room = file.size - at - LENGTH
    if room < 0:
        raise TruncatedError(
            "the file ends within the header length",
            file=file.path,
            expected=f"{LENGTH} bytes",
            found=f"{file.size - at}",
        )
    size = int.from_bytes(file.read(at, LENGTH), "little")
    if not 2 <= size <= room:
        raise (FormatError if size < 2 else TruncatedError)(
            "invalid header length",
            file=file.path,
            offset=at,
            expected=f"2 to {room:,} bytes",
            found=f"{size:,}",
        )
    if size > limits.current().header_bytes:
        raise limits.limit_error("header_bytes", "the header is too long", size, file=file.path, offset=at)
    text = file.read(at + LENGTH, size)
    if text[:1] != b"{":
        _fail(file, "the header does not begin with {", repr(text[:8]))
    return text


def _fail(file: File, message: str, description: str | None = None) -> NoReturn:
    raise FormatError(message, file=file.path, offset=LENGTH, found=description)


def _parse_entry(file: File, name: str, fields: Any, start: int) -> SafetensorsEntry:
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
        _fail_tensor(file, name, "needs the fields dtype, shape and data_offsets")
    code, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(code, str):
        _fail_tensor(file, name, "has a dtype that is not a string")
    if not isinstance(shape, list) or not set(map(type, shape)) <= _ONLY_INT or (shape and min(shape) < 0):
        _fail_tensor(file, name, "has a shape that is not a list of sizes")
    if len(shape) > RANK:
        _fail_tensor(file, name, f"has too many dimensions: {len(shape):,}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not set(map(type, offsets)) <= _ONLY_INT:
        _fail_tensor(file, name, "has data_offsets that are not a pair of offsets")
    begin, end = offsets
    if not 0 <= begin <= end <= file.size - start:
        if 0 <= begin <= end <= _LARGEST_COUNT:
            raise TruncatedError(
                "the file ends within a tensor",
                file=file.path,
                path=repr(name[:200]),
                offset=start + begin,
                expected=f"{end - begin:,} bytes",
                found=f"{max(0, file.size - start - begin):,}",
            )
        _fail_tensor(file, name, "has invalid data_offsets")
    _require_size(file, name, code, shape, end - begin)
    return SafetensorsEntry(code, tuple(shape), start + begin, end - begin)


def _require_size(file: File, name: str, code: str, shape: list[int], nbytes: int) -> None:
    count, zero = 1, False
    for extent in shape:
        # Zeros are excluded: a zero must not hide an impossible size.
        zero = zero or not extent
        count *= extent or 1
    bits = PACKED.get(code) or (
        8 * dtypes.BY_SAFETENSORS[code].itemsize if code in dtypes.BY_SAFETENSORS else 0
    )
    if count > _LARGEST_COUNT or count * bits > 8 * _LARGEST_COUNT:
        _fail_tensor(file, name, "has too many elements")
    needed = 0 if zero else count * bits
    if bits and needed != 8 * nbytes:
        raise FormatError(
            "the tensor's bytes do not match its shape",
            file=file.path,
            path=repr(name[:200]),
            expected=f"{needed / 8:,g} bytes" if needed % 8 else f"{needed // 8:,} bytes",
            found=f"{nbytes:,}",
        )


def _fail_tensor(file: File, name: str, what: str) -> NoReturn:
    _fail(file, f"tensor {name[:200]!r} {what}")


def _require_dense(file: File, entries: Mapping[str, SafetensorsEntry], start: int) -> None:
    """Raise unless the tensors are contiguous, without gap or overlap, up to the end of the file."""
    free = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != free:
            what = (
                "overlaps another tensor"
                if entry.offset < free
                else "is preceded by bytes that belong to no tensor"
            )
            raise FormatError(f"a tensor {what}", file=file.path, path=repr(name[:200]), offset=entry.offset)
        free += entry.nbytes
    if free != file.size:
        raise FormatError(
            "the last tensor is followed by bytes that belong to no tensor", file=file.path, offset=free
        )


# Metadata that identifies the writer's framework, not a tensor's second name.
FORMAT = "format"
RECORD = "safetensors.Tensor"
RESERVED = frozenset((embedded_tree.KEY, FORMAT, METADATA))


def list_file(file: File) -> FileListing:
    """Return the file's tree, notes and metadata; raise FormatError if the header violates the format."""
    stored, texts = read_header(file)
    offsets = read_offsets(file, texts)
    if any(map(any, offsets.values())) or (offsets and not _WHOLE.fullmatch(os.path.basename(file.path))):
        raise UnsupportedError(
            "the file has tensors as one rank saved them, which may be slices: it states no number of ranks",
            file=file.path,
            hint="load all shards with torch.distributed.checkpoint.HuggingFaceStorageReader; files of whole "
            "tensors have the name that torch gave them (model-00001-of-00001.safetensors)",
        )
    metadata = {name: text for name, text in texts.items() if name != embedded_tree.KEY}
    entries = {name: _entry_leaf(file, name, entry) for name, entry in stored.items()}
    tree = _unrecorded_tree(entries, metadata)
    notes = _notes(tree, stored)
    text = texts.get(embedded_tree.KEY)
    if text is not None:
        try:
            arrays = {name: leaf for name, leaf in entries.items() if isinstance(leaf, Leaf)}
            if len(arrays) != len(entries):
                raise embedded_tree.EmbeddedTreeError(
                    "the embedded tree does not match the tensors in this file"
                )
            tree = embedded_tree.decode_tree(text.encode(), arrays)
        except embedded_tree.EmbeddedTreeError as error:
            notes = (*notes, f"ignoring the tree that ckpttool embedded: {error.message}")
    kept = {name: text for name, text in metadata.items() if not _is_tied(name, text, entries)}
    details: dict[str, Any] = {"metadata": kept} if kept else {}
    return FileListing(tree, _writer(metadata), notes=notes, details=details)


def _unrecorded_tree(entries: Mapping[str, Leaf | ValueLeaf], metadata: Mapping[str, str]) -> Tree:
    """Return the tree of a file without an embedded tree: tensors by name, tied names as aliases.

    safetensors/torch.py, save_model: of tensors with shared storage only one is stored, and the
    metadata maps each omitted name to the name of the stored tensor.
    """
    aliases: dict[Path, tuple[Alias, ...]] = {}
    for name, kept in metadata.items():
        if _is_tied(name, kept, entries):
            aliases[key(kept),] = (*aliases.get((key(kept),), ()), Alias((key(name),), name))
    return Tree({(key(name),): leaf for name, leaf in entries.items()}, aliases, {(): Container("dict")})


def _is_tied(name: str, kept: str, entries: Mapping[str, Leaf | ValueLeaf]) -> bool:
    return name not in RESERVED and name not in entries and isinstance(entries.get(kept), Leaf)


def _entry_leaf(file: File, name: str, entry: SafetensorsEntry) -> Leaf | ValueLeaf:
    row = dtypes.BY_SAFETENSORS.get(entry.code)
    if row is None:
        shape = ", ".join(map(str, entry.shape))
        return ValueLeaf(Record(RECORD, f"{entry.code[:40]}[{shape}]"))
    return tensor_leaf(name, row.name, entry.shape, Span(file, entry.offset, entry.nbytes))


def tensor_leaf(name: str, dtype: str, shape: Shape, source: Source) -> Leaf:
    """Return a tensor for which the file records nothing more than this."""
    return Leaf(dtype, shape, source, name, name_roles.role_by_module_name((key(name),)) or "parameter")


def _notes(tree: Tree, entries: Mapping[str, SafetensorsEntry]) -> tuple[str, ...]:
    notes = []
    tied = sum(map(len, tree.aliases.values()))
    if tied:
        notes.append(f"names tied to the tensor of another name in the metadata: {tied:,}")
    other = sorted({e.code[:40] for e in entries.values() if e.code not in dtypes.BY_SAFETENSORS})
    if other:
        notes.append(f"tensors listed but not read because of their type: {', '.join(other)}")
    return tuple(notes)


def _writer(metadata: Mapping[str, str]) -> str | None:
    # transformers and safetensors.torch record the framework: "pt", "tf", "flax", "mlx", "np".
    writer = metadata.get(FORMAT, "")
    return f"metadata format {writer}" if writer.isalnum() and len(writer) < 16 else None


# The largest header that every reader accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
LARGEST = 100_000_000
# The metadata that transformers requires before it loads a file into a torch module.
PT = "pt"
# The order in which tensor.rs lists types of one size; the last ones are first in a file.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip


def pieces(tree: Tree) -> tuple[OutputFile]:
    """Return the single file for the tree.

    Raise UnsupportedError, before anything is written, for a tensor type that the format lacks. Source:
    safetensors/src/tensor.rs, `prepare`: tensors by decreasing alignment of their type, then by name, and a
    header padded with spaces to a multiple of eight bytes. Readers sort by offset, so the header's order is
    free to be the tree's (an optimizer counts parameters in it).
    """
    names = assign_tensor_names(tree)
    paths = [path for path, _ in tree.tensors()]
    return (OutputFile("", partial(FileLayout.plan(tree, names, paths, _metadata(tree, names)).write, tree)),)


def assign_tensor_names(tree: Tree) -> dict[Path, str]:
    """Return the names of tensors and aliases; raise UnsupportedError for a type that the format lacks."""
    from ckpttool.formats.torch_tree import native_name

    tensors = [path for path, leaf in tree.tensors() if _dtype_code(leaf, path)]
    others = [alias.path for _, aliases in tree.aliases.items() for alias in aliases]
    return embedded_tree.assign_names([*tensors, *others], native_name, RESERVED)


def _dtype_code(leaf: Leaf, path: Path) -> str:
    code = dtypes.BY_NAME[leaf.dtype].safetensors
    if code is None:
        raise UnsupportedError(
            f"a safetensors file cannot hold a tensor of type {leaf.dtype}",
            path=display(path),
            hint="use --to torch or --to npz, which support complex numbers"
            if leaf.dtype.startswith("c")
            else None,
        )
    return code


class FileLayout(NamedTuple):
    """What a file contains: its header, and the tensors in the order of their bytes."""

    head: bytes
    order: tuple[Path, ...]
    names: tuple[str, ...]

    @classmethod
    def plan(
        cls, tree: Tree, names: Mapping[Path, str], paths: Sequence[Path], metadata: Mapping[str, str]
    ) -> FileLayout:
        """Return the layout of a file of these tensors; raise UnsupportedError if the header is too long."""
        leaves = {path: _tensor(tree, path) for path in paths}
        codes = {path: _dtype_code(leaf, path) for path, leaf in leaves.items()}
        order = sorted(paths, key=lambda path: (-_ORDER.index(codes[path]), names[path]))
        offsets, at = {}, 0
        for path in order:
            offsets[path] = [at, at + leaves[path].nbytes]
            at += leaves[path].nbytes
        document: dict[str, Any] = {METADATA: metadata}
        for path, leaf in leaves.items():
            document[names[path]] = {
                "dtype": codes[path],
                "shape": list(leaf.shape),
                "data_offsets": offsets[path],
            }
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        head = text + b" " * (-len(text) % 8)
        if len(head) > LARGEST:
            raise UnsupportedError(
                "the names and plain values do not fit into a safetensors header",
                expected=f"at most {LARGEST:,} bytes",
                found=f"{len(head):,}",
            )
        return cls(head, tuple(order), tuple(names[path] for path in order))

    def write(self, tree: Tree, stream: IO[bytes]) -> None:
        """Write the header and the tensors, which the tree has."""
        stream.write(len(self.head).to_bytes(LENGTH, "little"))
        stream.write(self.head)
        for path in self.order:
            for piece in tensor_bytes.iter_exact(_tensor(tree, path), path):
                stream.write(piece)


def _metadata(tree: Tree, names: Mapping[Path, str]) -> dict[str, str]:
    metadata = {FORMAT: PT, **tied_names(tree, names, tree)}
    record = embedded_record(tree, names, metadata)
    return metadata if record is None else {**metadata, embedded_tree.KEY: record}


def tied_names(tree: Tree, names: Mapping[Path, str], paths: Collection[Path]) -> dict[str, str]:
    """Return the other names of these tensors, each with the name under which its tensor is stored."""
    # Names of shared plain values are only in the embedded tree.
    return {
        names[alias.path]: names[path]
        for path, aliases in tree.aliases.items()
        for alias in aliases
        if path in names and path in paths
    }


def embedded_record(tree: Tree, names: Mapping[Path, str], metadata: Mapping[str, str]) -> str | None:
    """Return the tree as text, None if names and metadata are read as the same tree."""
    arrays = {names[path]: tensor_leaf(names[path], n.dtype, n.shape, n.source) for path, n in tree.tensors()}
    record = embedded_tree.needs_record(tree, _unrecorded_tree(arrays, metadata))
    return embedded_tree.encode_tree(tree, names) if record else None


def _tensor(tree: Tree, path: Path) -> Leaf:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors have a code and a place
    return leaf
