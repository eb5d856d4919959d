"""safetensors files, and sharded Hugging Face models."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, NoReturn

from ckpttool.core import deferred, dtypes, filesystem, limits
from ckpttool.core import text as documents
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import merge_references, relocate_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
    locate_errors,
)
from ckpttool.core.source import File, MissingShard, Shape, Source, Span
from ckpttool.core.tree import Alias, Container, Leaf, Path, Record, Tree, ValueLeaf, display, key
from ckpttool.formats import embedded_tree, tensor_bytes, torch_roles
from ckpttool.formats.file_listing import FileListing, is_file_name, join_checkpoints
from ckpttool.formats.probe import (
    SHARD_BYTES,
    OutputFile,
    Probe,
    Shard,
    ShardPlan,
    WritingFormatDefinition,
    shard_pieces,
    split_by_size,
)

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
    return Leaf(dtype, shape, source, name, torch_roles.role_by_module_name((key(name),)) or "parameter")


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
_FRAMEWORK = "pt"
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
    names = _assign_names(tree)
    paths = [path for path, _ in tree.tensors()]
    return (
        OutputFile("", partial(_FileLayout.plan(tree, names, paths, _metadata(tree, names)).write, tree)),
    )


def _assign_names(tree: Tree) -> dict[Path, str]:
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


class _FileLayout(NamedTuple):
    """What a file contains: its header, and the tensors in the order of their bytes."""

    head: bytes
    order: tuple[Path, ...]
    names: tuple[str, ...]

    @classmethod
    def plan(
        cls, tree: Tree, names: Mapping[Path, str], paths: Sequence[Path], metadata: Mapping[str, str]
    ) -> _FileLayout:
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
    metadata = {FORMAT: _FRAMEWORK, **_tied_names(tree, names, tree)}
    record = _embedded_record(tree, names, metadata)
    return metadata if record is None else {**metadata, embedded_tree.KEY: record}


def _tied_names(tree: Tree, names: Mapping[Path, str], paths: Collection[Path]) -> dict[str, str]:
    """Return the other names of these tensors, each with the name under which its tensor is stored."""
    # Names of shared plain values are only in the embedded tree.
    return {
        names[alias.path]: names[path]
        for path, aliases in tree.aliases.items()
        for alias in aliases
        if path in names and path in paths
    }


def _embedded_record(tree: Tree, names: Mapping[Path, str], metadata: Mapping[str, str]) -> str | None:
    """Return the tree as text, None if names and metadata are read as the same tree."""
    arrays = {names[path]: tensor_leaf(names[path], n.dtype, n.shape, n.source) for path, n in tree.tensors()}
    record = embedded_tree.needs_record(tree, _unrecorded_tree(arrays, metadata))
    return embedded_tree.encode_tree(tree, names) if record else None


def _tensor(tree: Tree, path: Path) -> Leaf:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors have a code and a place
    return leaf


SHARDED_NAME = "sharded"
SHARDED_TITLE = "Hugging Face sharded checkpoint (index.json)"

_INDEX = ".index.json"
_MAP, _METADATA, _SIZE = "weight_map", "metadata", "total_size"
# WEIGHTS_NAME and SAFE_WEIGHTS_NAME (transformers/utils/__init__.py); if both exist, transformers loads the
# first.
_SAFE, _WEIGHTS = "model.safetensors", "pytorch_model.bin"
# Files that accelerate's `save_state` (.bin) and transformers' `Trainer` (.pt) write next to the weights.
# Additional models, optimizers and schedulers of accelerate are numbered: model_1.safetensors,
# optimizer_1.bin.
_MODELS = deferred.compile(r"model(?:_[1-9]\d*)?\.safetensors|pytorch_model(?:_[1-9]\d*)?\.bin")
_OPTIMIZERS = deferred.compile(r"(optimizer(?:_[1-9]\d*)?)\.(?:bin|pt)")
_SCHEDULERS = deferred.compile(r"(scheduler(?:_[1-9]\d*)?)\.(?:bin|pt)")
_LEFT = deferred.compile(
    r"(?:sampler|custom_checkpoint|random_states|rng_state|dl_state_dict).*\.(?:bin|pt|pkl|pth)"
    r"|training_args\.bin|scaler\.pt"
)
_TRAINER_STATE = "trainer_state.json"


def sharded_claims(probe: Probe) -> str | None:
    """Return the path of an index, of a folder with one, or of the only weights file in a folder.

    A folder with an optimizer next to the weights is read as one checkpoint.
    """
    if probe.kind == "file":
        return probe.path if _is_index(probe) else None
    if probe.kind != "folder" or not probe.names.isdisjoint(("saved_model.pb", "saved_model.pbtxt")):
        return None
    if _find_index(probe) is not None:
        return probe.path
    whole = [name for name in (_SAFE, _WEIGHTS) if _member_probe(probe, name).kind == "file"]
    if whole and _is_training(probe):
        return probe.path
    return os.path.join(probe.path, whole[0]) if whole else None


def _is_training(probe: Probe) -> bool:
    """Return whether a folder contains an optimizer or a second model next to its weights."""
    models = [name for name in probe.names if _MODELS.fullmatch(name)]
    optimizers = [name for name in probe.names if _OPTIMIZERS.fullmatch(name)]
    numbered = any("_1." in name for name in models)
    return (bool(optimizers) or numbered) and all(
        _member_probe(probe, name).kind == "file" for name in (*models, *optimizers)
    )


def _find_index(probe: Probe) -> str | None:
    """Return the only index in a folder; raise UsageError if several match."""
    names = sorted(n for n in probe.names if n.endswith(_INDEX) and _is_index(_member_probe(probe, n)))
    if len(names) > 1 and set(names) != {f"{_SAFE}{_INDEX}", f"{_WEIGHTS}{_INDEX}"}:
        raise UsageError(
            "the folder contains several sharded checkpoints",
            file=probe.path,
            found=abbreviate_list(names, 5),
            hint=f"point to one of them, e.g. {os.path.join(probe.path, names[0])}",
        )
    return os.path.join(probe.path, names[0]) if names else None


def _member_probe(probe: Probe, name: str) -> Probe:
    return Probe(os.path.join(probe.path, name)) if name in probe.names else Probe("")


def _is_index(probe: Probe) -> bool:
    return probe.kind == "file" and probe.name.endswith(_INDEX) and probe.head.lstrip().startswith(b"{")


def read_sharded(location: str) -> Checkpoint:
    """List the tensors of all shards; those of a missing shard are listed without type and shape.

    The checkpoint of a folder with a single file is the listing by that file's own format. Raise FormatError
    if the index and the shards do not match. Sources: github.com/huggingface/transformers,
    src/transformers/modeling_utils.py (`save_pretrained`), utils/__init__.py (the file names) and trainer.py
    (`_save_checkpoint`); github.com/huggingface/ huggingface_hub, src/huggingface_hub/serialization/_base.py
    (`StateDictSplit`) and _torch.py; github.com/huggingface/accelerate, src/accelerate/checkpointing.py
    (`save_accelerator_state`).
    """
    probe = Probe(location)
    if probe.kind == "folder" and _is_training(probe):
        return _list_training(probe)
    path = _find_index(probe) if probe.kind == "folder" else location
    if path is None or not path.endswith(_INDEX):
        if location.endswith(SUFFIX):
            return read(location)
        # Not a top-level import: listing a safetensors file does not need the PyTorch reader.
        from ckpttool.formats import torch_zip

        return torch_zip.read(location)
    file = File.stamp(path)
    shard_of, record = _read_index(file)
    folder = os.path.dirname(path)
    shards, missing = {}, []
    for name in sorted(set(shard_of.values())):
        shard = os.path.join(folder, name)
        if filesystem.lexists(shard):
            shards[name] = _stamp_shard(shard, path)
        else:
            missing.append(name)
    listed = {name: _list_shard(shard) for name, shard in shards.items()}
    tree, notes = _merge_shards(file, shard_of, listed)
    if missing:
        notes = (*notes, f"missing shards: {abbreviate_list(missing, 5)}")
    elif record is not None:
        try:
            tree = embedded_tree.decode_tree(record.encode(), {leaf.key: leaf for _, leaf in tree.tensors()})
        except embedded_tree.EmbeddedTreeError as error:
            notes = (*notes, f"ignoring the tree that ckpttool embedded: {error.message}")
    recorded = bool(listed) and all(one.integrity == "crc32" for one in listed.values())
    return Checkpoint(
        path=location,
        format=SHARDED_NAME,
        tree=tree,
        files=(file, *shards.values()),
        writer=next((one.writer for one in listed.values()), None),
        integrity="crc32" if recorded else "none",
        notes=(
            *notes,
            *_note_other_form(path),
            *dict.fromkeys(n for one in listed.values() for n in one.notes),
        ),
        code_references=merge_references(
            *(relocate_references(one.code_references, name) for name, one in listed.items())
        ),
    )


def _list_training(probe: Probe) -> Checkpoint:
    """List a folder of accelerate or of transformers' Trainer: models, optimizers and schedulers.

    Errors from a model or optimizer file are raised. A note names the files that are not read.
    """
    from ckpttool.formats.detect import open_checkpoint

    parts: dict[str, Checkpoint] = {}
    left = sorted(name for name in probe.names if _LEFT.fullmatch(name))
    for member, path in _members(probe).items():
        try:
            parts[member] = open_checkpoint(path)
        except CkpttoolError:
            if not member.startswith("scheduler"):
                raise
            left.append(os.path.basename(path))
    names = ", ".join(os.path.basename(one.path) for one in parts.values())
    notes = [f"the folder is read as one checkpoint: {names}"]
    settings: dict[str, Tree] = {}
    state = _trainer_state(probe)
    if state:
        settings["trainer_state"] = Tree({(key(name),): ValueLeaf(value) for name, value in state.items()})
    elif _TRAINER_STATE in probe.names:
        left.append(_TRAINER_STATE)
    if left:
        notes.append(f"not read (random number states, run settings): {abbreviate_list(left, 5)}")
    joined = join_checkpoints(probe.path, SHARDED_NAME, parts, settings)
    return replace(joined, notes=(*notes, *joined.notes))


def _members(probe: Probe) -> dict[str, str]:
    """Return the files of a training folder by the names of their entries; models come first."""
    members: dict[str, str] = {}
    names = sorted(probe.names)
    index_ = _find_index(probe)
    if index_ is not None:
        members["model"] = index_
    safe = [name for name in names if _MODELS.fullmatch(name) and name.endswith(SUFFIX)]
    # If both forms exist, the libraries load safetensors.
    models = safe or [name for name in names if _MODELS.fullmatch(name)]
    for name in models:
        members.setdefault(name.partition(".")[0].removeprefix("pytorch_"), os.path.join(probe.path, name))
    for pattern in (_OPTIMIZERS, _SCHEDULERS):
        for name in names:
            match = pattern.fullmatch(name)
            if match is None or _member_probe(probe, name).kind != "file":
                continue
            if match[1] in members:
                raise UsageError(
                    f"the folder contains two {match[1]} files",
                    file=probe.path,
                    found=", ".join((os.path.basename(members[match[1]]), name)),
                    hint=f"point to the weights file, e.g. {members['model']}",
                )
            members[match[1]] = os.path.join(probe.path, name)
    return members


def _trainer_state(probe: Probe) -> dict[str, int | float | str | bool | None]:
    """Return the top-level plain values of a Trainer's state; none if the file cannot be read."""
    if _member_probe(probe, _TRAINER_STATE).kind != "file":
        return {}
    file = File.stamp(os.path.join(probe.path, _TRAINER_STATE))
    try:
        documents.require_small(file.size, "the trainer state", file=file.path)
        values = documents.parse_strict_json(file.read(0, file.size), "the trainer state")
    except CkpttoolError:
        return {}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)}


def _stamp_shard(shard: str, index: str) -> File:
    if Probe(shard).kind != "file":
        raise FormatError("a shard is not a file", file=shard)
    return File.beside(shard, index)


def _note_other_form(location: str) -> tuple[str, ...]:
    """Return a note if the folder contains the same weights in the other form too."""
    folder, name = os.path.split(location)
    other = f"{_WEIGHTS if name.startswith(_SAFE) else _SAFE}{_INDEX}"
    there = other != name and filesystem.lexists(os.path.join(folder, other))
    return (f"{other} in the same folder is not read",) if there else ()


def _read_index(file: File) -> tuple[dict[str, str], str | None]:
    """Return each tensor's shard, and the tree that ckpttool embedded.

    Raise FormatError if a shard is not a file in the index's folder.
    """
    if file.size > limits.current().json_bytes:
        raise limits.limit_error("json_bytes", "the index is too large", file.size, file=file.path)
    with locate_errors(file=file.path):
        document = documents.parse_strict_json(file.read(0, file.size), "the index")
    metadata = document.get(_METADATA)
    record = metadata.get(embedded_tree.KEY) if isinstance(metadata, dict) else None
    shard_of: Any = document.get(_MAP)
    if not isinstance(shard_of, dict) or not shard_of:
        raise FormatError("the index has no weight_map", file=file.path)
    for tensor, name in shard_of.items():
        if not is_file_name(name) or not name.isprintable():
            raise FormatError(
                "a shard must be a file in the same folder as the index",
                file=file.path,
                path=repr(tensor[:200]),
                found=repr(name)[:200],
            )
    return shard_of, record if isinstance(record, str) else None


def _list_shard(file: File) -> FileListing:
    from ckpttool.formats import torch_legacy

    with locate_errors(file=file.path):
        if claims(Probe(file.path)) is not None:
            return list_file(file)
        return torch_legacy.list_embedded(file, 0, file.size)


def _merge_shards(
    index: File, shard_of: Mapping[str, str], shards: Mapping[str, FileListing]
) -> tuple[Tree, tuple[str, ...]]:
    """Merge the shards' tensors into one tree, in the order of the index; return notes for the user too."""
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases: dict[Path, tuple[Alias, ...]] = {}

    def add(path: Path, tree: Tree) -> None:
        """Add a tensor together with all its other names in the same shard."""
        if path not in leaves:
            leaves[path] = tree[path]
            if path in tree.aliases:
                aliases[path] = tree.aliases[path]

    paths = {shard: _paths(listed.tree) for shard, listed in shards.items()}
    for name, shard in shard_of.items():
        if shard not in shards:
            missing = MissingShard(os.path.join(os.path.dirname(index.path), shard))
            leaves[key(name),] = Leaf("unknown", (), missing, name)
        elif name not in paths[shard]:
            what = f"a tensor is missing from shard {shard!r}"
            raise FormatError(what, file=index.path, path=repr(name[:200]))
        else:
            add(paths[shard][name], shards[shard].tree)
    added: list[str] = []
    twice: list[str] = []
    rows = ((shard, name, path) for shard, names in paths.items() for name, path in names.items())
    for shard, name, path in (row for row in rows if shard_of.get(row[1]) != row[0]):
        if name in shard_of or path in leaves:
            twice.append(name)
        else:
            added.append(name)
            add(path, shards[shard].tree)
    notes = {"not listed in the index": added, "also present in a second shard, not read from it": twice}
    sentences = (f"tensors {what}: {abbreviate_list(names, 3)}" for what, names in notes.items() if names)
    return Tree(leaves, aliases, {(): Container("dict")}), tuple(sentences)


def _paths(tree: Tree) -> dict[str, Path]:
    """Return the path of every tensor by each of its native names."""
    paths = {alias.key: path for path, others in tree.aliases.items() for alias in others if alias.key}
    return paths | {leaf.key: path for path, leaf in tree.tensors()}


def plan_shards(tree: Tree, *, stem: str = "model", shard_bytes: int = SHARD_BYTES) -> ShardPlan:
    """Return the shards `STEM-00001-of-0000N.safetensors` and the index `STEM.safetensors.index.json`.

    `stem` is the common beginning of the files' names, `shard_bytes` the size of a shard's tensors. Raise
    UnsupportedError, before anything is written, for a tensor type that the format lacks. Sources:
    huggingface_hub, src/huggingface_hub/serialization/_torch.py (`save_torch_state_dict`) and _base.py (the
    shards' names).
    """
    names = _assign_names(tree)
    parts = split_by_size(((path, leaf.nbytes) for path, leaf in tree.tensors()), shard_bytes)
    files = [f"-{number:05d}-of-{len(parts):05d}" for number in range(1, len(parts) + 1)]
    shards = []
    for end, part in zip(files, parts, strict=True):
        tied = {FORMAT: _FRAMEWORK, **_tied_names(tree, names, frozenset(part))}
        layout = _FileLayout.plan(tree, names, part, tied)
        shards.append(Shard(end + SUFFIX, tuple(part), layout.write, f"{end}{_INTERIM}{SUFFIX}"))
    tied = {FORMAT: _FRAMEWORK, **_tied_names(tree, names, tree)}
    record = _embedded_record(tree, names, tied)
    total = sum(leaf.nbytes for _, leaf in tree.tensors())
    metadata: dict[str, Any] = {_SIZE: total, **({} if record is None else {embedded_tree.KEY: record})}

    def index(interim: str) -> OutputFile:
        shard_of = {
            path: f"{stem}{end}{interim}{SUFFIX}"
            for end, part in zip(files, parts, strict=True)
            for path in part
        }
        document = {_METADATA: metadata, _MAP: {names[path]: shard_of[path] for path, _ in tree.tensors()}}
        text = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
        put = partial(_put, text)
        if not interim:
            return OutputFile(_INDEX_SUFFIX, put, indexes=True)
        return OutputFile(_INDEX_SUFFIX, put, meanwhile=_INDEX_SUFFIX, extra=True)

    return ShardPlan(tuple(shards), _INDEX_SUFFIX, lambda _: (index(_INTERIM), index("")), _read_shard)


_INDEX_SUFFIX = SUFFIX + _INDEX
# In the names of shards that replace others of the same names, until these are removed.
_INTERIM = ".new"


def _put(data: bytes, stream: IO[bytes]) -> None:
    stream.write(data)


def _read_shard(file: File, shard: Shard, _: Any) -> Mapping[Path, Leaf]:
    """Return the tensors of a written shard; raise FormatError if its header is not the planned one."""
    layout: _FileLayout = shard.write.__self__  # type: ignore[attr-defined]
    if file.read(LENGTH, len(layout.head)) != layout.head:
        raise FormatError("the header of a shard differs from the one that was written", file=file.path)
    by_name = dict(_list_shard(file).tree.tensors())
    return dict(zip(layout.order, (by_name[key(name),] for name in layout.names), strict=True))


def _sharded_pieces(tree: Tree, **options: Any) -> tuple[OutputFile, ...]:
    """Return the shards and the index of a tree."""
    return shard_pieces(tree, plan_shards(tree, **options))


SHARDED_SAFETENSORS = WritingFormatDefinition(
    NAME=SHARDED_NAME,
    TITLE=SHARDED_TITLE,
    FRAMEWORK=FRAMEWORK,
    claims=sharded_claims,
    read=read_sharded,
    pieces=_sharded_pieces,
    plan_shards=plan_shards,
)
