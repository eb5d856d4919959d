"""PyTorch distributed checkpoints."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, NoReturn, cast

from ckpttool.core import deferred, dtypes, filesystem, limits
from ckpttool.core.checkpoint import Checkpoint, Integrity
from ckpttool.core.code_references import CodeReference, merge_references, relocate_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    FormatError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
    abbreviate_list,
    locate_errors,
)
from ckpttool.core.source import (
    LARGE,
    Buffer,
    File,
    Inline,
    MissingShard,
    Shape,
    Source,
    Span,
    UnreadableSource,
    iter_pieces,
)
from ckpttool.core.tree import Alias, Container, Leaf, Path, Record, Tree, ValueLeaf, display, index, key
from ckpttool.encodings import pickle_reader
from ckpttool.encodings.pickle_values import NEW, Global, PickleObject, dumps
from ckpttool.formats import name_roles, safetensors, torch_legacy, torch_tree, torch_zip
from ckpttool.formats.file_listing import FileListing, is_file_name
from ckpttool.formats.pickle_signatures import find_pickle_format
from ckpttool.formats.probe import (
    SHARD_BYTES,
    OutputFile,
    Probe,
    Shard,
    ShardPlan,
    shard_pieces,
    split_by_size,
)
from ckpttool.formats.tf_common import Box, IncompleteTensor, assemble_slices, slice_box
from ckpttool.formats.torch_tensors import BUILDERS, RANK

NAME = "pytorch_dcp"
TITLE = "PyTorch distributed checkpoint (folder of .metadata and .distcp)"
WRITES = True
FRAMEWORK = "torch"

# filesystem.py, _get_metadata_path: one for all ranks, or one for each rank saved without collectives.
_METADATA = deferred.compile(r"(__\d+)?\.metadata")
_MAIN, _SHARD = ".metadata", ".distcp"


def claims(probe: Probe) -> str | None:
    """Return the folder that contains the metadata, for its own path, the metadata's or a shard's."""
    if probe.kind == "file":
        known = probe.name.endswith(_SHARD) or find_pickle_format(probe) == NAME
        return probe.folder if known else None
    if probe.kind != "folder":
        return None
    marks = sorted(name for name in probe.names if _METADATA.fullmatch(name))
    return (
        probe.path
        if marks and find_pickle_format(Probe(os.path.join(probe.path, marks[0]))) == NAME
        else None
    )


def read(location: str) -> Checkpoint:
    """List every tensor from the metadata, and every other value; shards are not read in full.

    Raise NotFoundError without metadata, TruncatedError if an item extends past the end of its shard,
    FormatError if the metadata are invalid. A missing shard is a note, and an error on reading. Source:
    torch/distributed/checkpoint/filesystem.py (`_FileSystemWriter`), metadata.py and default_planner.py.
    """
    names = sorted(name for name in Probe(location).names if _METADATA.fullmatch(name))
    # A pipe with the name of a file is never opened.
    names = [name for name in names if Probe(os.path.join(location, name)).kind == "file"]
    # The file for all ranks has priority: torch writes it when it writes for all.
    chosen = [name for name in names if name == _MAIN] or names
    if not chosen:
        raise NotFoundError(".metadata is missing: the shards cannot be read without it", file=location)
    with locate_errors(file=location):
        files = [File.stamp(os.path.join(location, name)) for name in chosen]
        listing = _DcpTreeBuilder(files[0].path, _merge_rank_metadata([_metadata(file) for file in files]))
        owned = torch_tree.assign_slot_owners(listing.tree())
        notes = (*listing.notes(), *owned.notes)
    version, references = listing.metadata.version, listing.code_references
    writer = "torch distributed checkpoint" + (f" version {version}" if version else "")
    listed = FileListing(owned.tree, writer, listing.integrity(), notes, code_references=references)
    shards = (shard for shard in listing.shards.values() if shard is not None)
    return listed.checkpoint(location, NAME, *files, *shards)


_LARGEST = (1 << 63) - 1

# Steps of a name before they were joined with dots: dict keys (always as text) and list indices.
Steps = tuple[str | int, ...]


class DcpChunk(NamedTuple):
    """A box of a tensor: the position of its first element and its extent in each dimension."""

    offsets: Shape
    sizes: Shape


class DcpTensor(NamedTuple):
    """Description of a tensor; `dtype` is torch's name."""

    dtype: str
    shape: Shape
    chunks: tuple[DcpChunk, ...]


class DcpItem(NamedTuple):
    """Location of one item: the name of a file in the folder, and its bytes there.

    `transforms` are the transforms applied to its bytes ("stream.zstd"), which are not undone here.
    """

    file: str
    offset: int
    length: int
    transforms: tuple[str, ...]


class DcpMetadata(NamedTuple):
    """Contents of the metadata. An entry of None is a value written by torch.save; `paths` may lack names.

    `asked` lists the imports and calls when unpickling the metadata (see pickle_reader.Read).
    """

    entries: Mapping[str, DcpTensor | None]
    paths: Mapping[str, Steps]
    items: Mapping[tuple[str, str], DcpItem]
    version: str | None
    code_references: tuple[CodeReference, ...] = ()


def read_metadata(file: File) -> DcpMetadata:
    """Return the contents of the file; raise FormatError if it is not metadata from torch.

    Source: torch/distributed/checkpoint/metadata.py (Metadata, TensorStorageMetadata, ChunkStorageMetadata,
    MetadataIndex), filesystem.py (_StorageInfo). The classes have kept their fields since torch 2.0; later
    versions added fields (`storage_meta`, `version`, `transform_descriptors`).
    """
    pickled = pickle_reader.parse_pickle(file.read(0, file.size), builders=BUILDERS, file=file.path)
    record = _object_fields(pickled.value, "Metadata")
    once = _EntryCache()
    entries = {_text(n): once.entry(v) for n, v in _dict(record.get("state_dict_metadata")).items()}
    planned = record.get("planner_data")
    paths = {_text(n): _steps(v) for n, v in planned.items()} if isinstance(planned, dict) else {}
    items = {_index(at): _parse_item(where) for at, where in _dict(record.get("storage_data")).items()}
    version = record.get("version")
    return DcpMetadata(
        entries, paths, items, version if isinstance(version, str) else None, pickled.code_references
    )


def _merge_rank_metadata(parts: list[DcpMetadata]) -> DcpMetadata:
    """Merge the records of several ranks, each about its own chunks (`use_collectives=False`)."""
    entries: dict[str, DcpTensor | None] = {}
    for part in parts:
        for name, entry in part.entries.items():
            entries[name] = _merge_tensors(name, entries.get(name), entry) if name in entries else entry
    paths = {name: steps for part in parts for name, steps in part.paths.items()}
    items = {at: item for part in reversed(parts) for at, item in part.items.items()}
    return DcpMetadata(
        entries, paths, items, parts[0].version, merge_references(*(part.code_references for part in parts))
    )


def _merge_tensors(name: str, one: DcpTensor | None, other: DcpTensor | None) -> DcpTensor | None:
    if one is None or other is None:
        if one is not other:
            _fail(f"{name!r} is a tensor in one rank but not in another")
        return None
    if one[:2] != other[:2]:
        _fail(f"the type or shape of {name!r} differs between ranks")
    return one._replace(chunks=_distinct_chunks((*one.chunks, *other.chunks)))


class _EntryCache:
    """Reader of entries and lists of chunks; one that a pickle references thousands of times is read once."""

    def __init__(self) -> None:
        self.entries: dict[int, DcpTensor | None] = {}
        self.chunks: dict[int, tuple[DcpChunk, ...]] = {}

    def entry(self, value: Any) -> DcpTensor | None:
        """Return the description of a tensor, None for another value."""
        if id(value) not in self.entries:
            self.entries[id(value)] = self._entry(value)
        return self.entries[id(value)]

    def _entry(self, value: Any) -> DcpTensor | None:
        if _is_torch_object(value, "BytesStorageMetadata"):
            return None
        record = _object_fields(value, "TensorStorageMetadata")
        properties = record.get("properties")
        # TensorProperties.__getstate__: a tuple starting with the element type.
        state = properties.state if isinstance(properties, PickleObject) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, Global) or dtype.module != "torch":
            _fail("a tensor's properties do not contain its element type")
        chunks = record.get("chunks")
        if not isinstance(chunks, list):
            _fail("a tensor's chunks are not a list")
        if id(chunks) not in self.chunks:
            # A rank without a part of the tensor stores an empty chunk.
            filled = (chunk for chunk in map(_parse_chunk, chunks) if 0 not in chunk.sizes)
            self.chunks[id(chunks)] = _distinct_chunks(filled)
        return DcpTensor(dtype.name, _shape(record.get("size")), self.chunks[id(chunks)])


def _distinct_chunks(chunks: Iterable[DcpChunk]) -> tuple[DcpChunk, ...]:
    # Compared as text, whose hash is randomised: a file could choose numbers that collide.
    return tuple({repr(chunk): chunk for chunk in chunks}.values())


def chunk_key(offset: Shape | None) -> str:
    """Return a chunk's offset as the key of its item (as text, for the same reason)."""
    return "" if offset is None else repr(offset)


def _parse_chunk(value: Any) -> DcpChunk:
    record = _object_fields(value, "ChunkStorageMetadata")
    return DcpChunk(_shape(record.get("offsets")), _shape(record.get("sizes")))


def _index(value: Any) -> tuple[str, str]:
    # `index` is only a hint for the lookup.
    record = _object_fields(value, "MetadataIndex")
    offset = record.get("offset")
    return _text(record.get("fqn")), chunk_key(None if offset is None else _shape(offset))


def _parse_item(value: Any) -> DcpItem:
    record = _object_fields(value, "_StorageInfo")
    name, offset, length = record.get("relative_path"), record.get("offset"), record.get("length")
    if not is_file_name(name):
        _fail("an item refers to a file outside the folder", description=repr(name)[:80])
    if not isinstance(offset, int) or not isinstance(length, int) or not _count(offset) or not _count(length):
        _fail("an item's offset or length is not a number of bytes")
    transforms = record.get("transform_descriptors") or ()
    if not isinstance(transforms, list | tuple) or not all(
        isinstance(transform, str) for transform in transforms
    ):
        _fail("an item's transforms are not a list of names")
    return DcpItem(name, offset, length, tuple(transforms))


def _steps(value: Any) -> Steps:
    if not isinstance(value, tuple) or not value or not all(type(s) is str or _count(s) for s in value):
        _fail("a name's path is not made of strings and list indices")
    if len(value) > limits.current().pickle_depth:
        raise limits.limit_error("pickle_depth", "values are nested too deeply", len(value))
    return value


def _object_fields(value: Any, kind: str) -> Mapping[str, Any]:
    if not _is_torch_object(value, kind) or not isinstance(value.state, dict):
        _fail(f"expected a {kind} object from torch")
    state: Mapping[str, Any] = value.state
    return state


def _is_torch_object(value: Any, kind: str) -> bool:
    return (
        isinstance(value, PickleObject)
        and value.name.startswith("torch.")
        and value.name.endswith(f".{kind}")
    )


def _dict(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        _fail("the metadata contain no entries, or no locations for them")
    return value


def _shape(value: Any) -> Shape:
    if not isinstance(value, tuple | list) or len(value) > RANK or not all(map(_count, value)):
        _fail("a tensor's size or offset is not made of integers")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _fail("an entry's name is not a string")
    return value


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _fail(message: str, *, description: str | None = None) -> NoReturn:
    raise FormatError(message, found=description)


def nested_paths(names: Iterable[str], planned: Mapping[str, Steps]) -> dict[str, Path]:
    """Return every name's path; a name without recorded nesting stays at the top, unchanged.

    Raise FormatError if two names have the same path, or one is nested inside another. Source:
    torch/distributed/checkpoint/_nested_dict.py (flatten_state_dict) and _traverse.py (set_element).
    """
    paths = {name: _nested_path(planned.get(name, (name,))) for name in names}
    used_paths = set(paths.values())
    if len(used_paths) != len(paths):
        raise FormatError("two entries have the same place in the nesting")
    for path in used_paths:
        if any(path[:depth] in used_paths for depth in range(1, len(path))):
            raise FormatError(
                f"an entry is nested inside another entry: {abbreviate_list([str(s.value) for s in path], 6)}"
            )
    return paths


def _nested_path(steps: Steps) -> Path:
    return tuple(key(step) if isinstance(step, str) else index(step) for step in steps)


def nested_containers(paths: Iterable[Path]) -> tuple[dict[Path, Container], tuple[Path, ...]]:
    """Return the dicts and lists on the paths, and the list positions without an entry."""
    kinds: dict[Path, str] = {(): "key"}
    items: dict[Path, set[int]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            if kinds.setdefault(path[:depth], step.kind) != step.kind:
                raise FormatError("a container is both a dict and a list")
            if isinstance(step.value, int):
                items.setdefault(path[:depth], set()).add(step.value)
    # set_element fills gaps in a list (empty items, which have no name) with None.
    gaps: list[Path] = []
    most = limits.current().list_gaps
    for top, numbers in items.items():
        missing = max(numbers) + 1 - len(numbers)
        if missing + len(gaps) > most:
            raise limits.limit_error("list_gaps", "a list has too many missing items", missing + len(gaps))
        gaps += [(*top, index(n)) for n in range(max(numbers) if missing else 0) if n not in numbers]
    containers = {top: Container("dict" if kind == "key" else "list") for top, kind in kinds.items()}
    return containers, tuple(gaps)


class DcpSafetensors(NamedTuple):
    """What the shard of a rank has as safetensors: where it starts, its header, and each entry's position.

    Source: filesystem.py, `_write_files_from_queue`: values saved by torch.save come first. The metadata
    state the start for every tensor. A name is written once, even if the rank has several of its chunks.
    """

    file: File
    start: int
    entries: Mapping[str, safetensors.SafetensorsEntry]
    offsets: Mapping[str, Shape]

    @classmethod
    def parse(cls, file: File, start: int) -> DcpSafetensors | None:
        """Return the header at byte `start`; None if something else is there."""
        brace = start + safetensors.LENGTH
        if brace >= file.size or file.read(brace, 1) != b"{":
            return None
        entries, texts = safetensors.read_header(file, start)
        return cls(file, start, entries, safetensors.read_offsets(file, texts))

    def source(self, name: str, chunk: DcpChunk, row: dtypes.DType) -> Source:
        """Return a chunk's bytes; raise FormatError if the entry is of another type or shape."""
        entry = self.entries.get(name)
        if entry is None or self.offsets.get(name) != chunk.offsets:
            return UnreadableSource(
                self.file.path, f"the shard lacks the part of {name[:80]!r} at {list(chunk.offsets)}"
            )
        if (entry.code, entry.shape) != (row.safetensors, chunk.sizes):
            expected = f"{row.safetensors}{list(chunk.sizes)}"
            raise _other_tensor(self.file, entry.offset, expected, f"{entry.code}{list(entry.shape)}")
        return Span(self.file, entry.offset, entry.nbytes)


class DcpSavedTensor(NamedTuple):
    """One tensor written by torch.save inside a shard; it must match its description in the metadata."""

    file: File
    offset: int
    length: int
    dtype: str
    shape: Shape

    def read(self) -> Buffer:
        """Return the tensor's bytes; raise FormatError if the item contains something else."""
        return self._saved().read()

    @property
    def base(self) -> Source:
        """The source of a large tensor's bytes in the item; a small one is only opened to be read."""
        large = math.prod(self.shape) * dtypes.BY_NAME[self.dtype].itemsize >= LARGE
        return self._saved().source if large else Inline(b"")

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the bytes of a large tensor in pieces."""
        return iter_pieces(self.base, verify=verify)

    def _saved(self) -> Leaf:
        saved = torch_legacy.list_embedded(self.file, self.offset, self.length).tree.get(())
        if not isinstance(saved, Leaf) or (saved.dtype, saved.shape) != (self.dtype, self.shape):
            description = f"{saved.dtype}{list(saved.shape)}" if isinstance(saved, Leaf) else "no tensor"
            raise _other_tensor(self.file, self.offset, f"{self.dtype}{list(self.shape)}", description)
        return saved


def _other_tensor(file: File, offset: int, expected: str, description: str) -> FormatError:
    message = "an item is not the tensor described in the metadata"
    return FormatError(message, file=file.path, offset=offset, expected=expected, found=description)


def _metadata(file: File) -> DcpMetadata:
    with locate_errors(file=file.path):
        return read_metadata(file)


class _DcpTreeBuilder:
    """Builder of the tree; each shard is checked once for existence and length."""

    def __init__(self, index: str, metadata: DcpMetadata) -> None:
        self.index = index
        self.folder = os.path.dirname(index)
        self.metadata = metadata
        self.shards: dict[str, File | None] = {}
        self._items: dict[str, list[tuple[int, int, str]]] = {}
        for (name, _), item in metadata.items.items():
            self._items.setdefault(item.file, []).append((item.offset, item.length, name))
        self._safetensors: dict[str, DcpSafetensors] = {}
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.aliases: dict[Path, tuple[Alias, ...]] = {}
        self.containers: dict[Path, Container] = {}
        self.code_references = relocate_references(metadata.code_references, ".metadata")
        self._is_noted: dict[str, None] = {}
        self._recorded: dict[str, Integrity] = {}

    def tree(self) -> Tree:
        """Return the tree of all entries, in the order of the metadata."""
        places = nested_paths(self.metadata.entries, self.metadata.paths)
        self.containers, gaps = nested_containers(places.values())
        optimizers = name_roles.find_optimizers(places.values())
        for name, entry in self.metadata.entries.items():
            with locate_errors(path=name):
                if entry is None:
                    self._value(name, places[name])
                else:
                    use = name_roles.tensor_role(places[name], optimizers)
                    self._tensor(name, places[name], entry, use)
        self.leaves |= {path: ValueLeaf(None) for path in gaps}
        return Tree(self.leaves, self.aliases, self.containers)

    def notes(self) -> tuple[str, ...]:
        """Return notes for the user: missing shards, and notes on single values."""
        lost = [name for name, file in self.shards.items() if file is None]
        missing = f"missing shards, whose tensors cannot be read: {abbreviate_list(sorted(lost), 5)}"
        return (*((missing,) if lost else ()), *self._is_noted)

    def integrity(self) -> Integrity:
        """Return the checksum that covers the tensors, according to one item of each shard."""
        there = [name for name, shard in self.shards.items() if shard is not None]
        covered = there and all(self._recorded.get(name) == "crc32" for name in there)
        return "crc32" if covered else "none"

    def _tensor(self, name: str, path: Path, entry: DcpTensor, use: name_roles.TensorRole) -> None:
        row = dtypes.BY_TORCH.get(entry.dtype)
        if row is None or row.name not in dtypes.BY_NAME:
            shown = f"{entry.dtype}[{', '.join(map(str, entry.shape))}]"
            self.leaves[path] = ValueLeaf(Record("torch.Tensor", shown))
            return
        source = self._source(name, entry, row)
        self.leaves[path] = Leaf(row.name, entry.shape, source, name, use.role, slot=use.slot)

    def _source(self, name: str, entry: DcpTensor, row: dtypes.DType) -> Source:
        parts: list[tuple[Box, Source]] = []
        files: dict[str, int] = {}
        for chunk in entry.chunks:
            if len(chunk.offsets) != len(chunk.sizes):
                raise FormatError("a chunk's offset and size have different ranks")
            box = slice_box(tuple(zip(chunk.offsets, chunk.sizes, strict=True)), entry.shape)
            item = self._item(name, chunk.offsets, single=len(entry.chunks) == 1)
            shard = self._shard(item)
            files[item.file] = shard.size if shard else 0
            parts.append((box, self._part(name, chunk, item, shard, row)))
        if 0 in entry.shape:
            return Inline(b"")
        source = assemble_slices(row.name, entry.shape, parts, self.index)
        lost = next((part for _, part in parts if isinstance(part, MissingShard | UnreadableSource)), None)
        nbytes = math.prod(entry.shape) * row.itemsize
        if lost is None and nbytes > sum(files.values()):
            raise FormatError(
                "a tensor is larger than the shards that contain it", expected=f"{nbytes:,} bytes"
            )
        if lost is not None:
            return lost
        return parts[0][1] if len(parts) == 1 and not isinstance(source, IncompleteTensor) else source

    def _part(
        self, name: str, chunk: DcpChunk, item: DcpItem, shard: File | None, row: dtypes.DType
    ) -> Source:
        if shard is None:
            return MissingShard(os.path.join(self.folder, item.file))
        if item.transforms:
            return UnreadableSource(
                shard.path, f"items with transforms ({abbreviate_list(item.transforms, 3)}) are not supported"
            )
        # Each item contains its own tensor, uncompressed (filesystem.py, _SerialCpuLoader).
        nbytes = math.prod(chunk.sizes) * row.itemsize
        if nbytes > item.length:
            raise FormatError(
                "an item is shorter than its tensor",
                file=shard.path,
                offset=item.offset,
                expected=f"{nbytes:,} bytes",
                found=f"{item.length:,}",
            )
        if item.file in self._safetensors:
            return self._safetensors[item.file].source(name, chunk, row)
        return DcpSavedTensor(shard, item.offset, item.length, row.name, chunk.sizes)

    def _value(self, name: str, path: Path) -> None:
        item = self._item(name, None, single=True)
        shard = self._shard(item)
        if shard is None or item.transforms:
            why = f"in {item.file}, which is missing" if shard is None else "stored with a transform"
            self.leaves[path] = ValueLeaf(Record("value", why))
            return
        listing = torch_legacy.list_embedded(shard, item.offset, item.length)
        self._is_noted |= dict.fromkeys(listing.notes)
        self.code_references = merge_references(
            self.code_references, relocate_references(listing.code_references, item.file)
        )
        for at, leaf in listing.tree.items():
            full = _name(name, at)
            of = (*path, *leaf.of) if isinstance(leaf, Leaf) and leaf.of is not None else None
            self.leaves[*path, *at] = replace(leaf, key=full, of=of) if isinstance(leaf, Leaf) else leaf
        for at, others in listing.tree.aliases.items():
            self.aliases[*path, *at] = tuple(Alias((*path, *a.path), _name(name, a.path)) for a in others)
        self.containers |= {(*path, *at): kind for at, kind in listing.tree.containers.items()}

    def _item(self, name: str, offset: tuple[int, ...] | None, *, single: bool) -> DcpItem:
        item = self.metadata.items.get((name, chunk_key(offset)))
        if item is None and single:
            item = self.metadata.items.get((name, chunk_key(None)))
        if item is None:
            raise FormatError("an entry has no location in the metadata")
        return item

    def _shard(self, item: DcpItem) -> File | None:
        if item.file not in self.shards:
            self.shards[item.file] = self._look(item.file)
        shard = self.shards[item.file]
        if shard is not None and item.offset + item.length > shard.size:
            raise TruncatedError(
                "an item extends past the end of its shard",
                file=shard.path,
                offset=item.offset,
                expected=f"{item.length:,} bytes",
                found=f"{max(0, shard.size - item.offset):,}",
            )
        if shard is not None and item.file not in self._recorded and not item.transforms:
            self._recorded[item.file] = torch_legacy.list_embedded(shard, item.offset, item.length).integrity
        return shard

    def _look(self, name: str) -> File | None:
        path = os.path.join(self.folder, name)
        kind = filesystem.path_kind(path)
        if kind == "missing":
            return None
        if kind != "file":
            raise FormatError("a shard is not a file", file=path)
        file = File.beside(path, self.index)
        self._require_apart(name, file)
        return file

    def _require_apart(self, name: str, file: File) -> None:
        """Find safetensors in a shard; raise FormatError if two items overlap outside of them."""
        tensors = [item for item in self._items[name] if self.metadata.entries.get(item[2]) is not None]
        starts = {offset for offset, *_ in tensors}
        saved = DcpSafetensors.parse(file, *starts) if len(starts) == 1 else None
        items = self._items[name]
        if saved is not None:
            self._safetensors[name], self._recorded[name] = saved, "none"
            whole = (saved.start, file.size - saved.start, tensors[0][2])
            items = [whole, *(item for item in items if self.metadata.entries.get(item[2]) is None)]
        for one, other in itertools.pairwise(sorted(item for item in items if item[1])):
            if one[0] + one[1] > other[0]:
                names = f"{one[2][:80]!r} and {other[2][:80]!r}"
                raise FormatError(f"two items overlap in a shard: {names}", file=file.path, offset=other[0])


def _name(name: str, below: Path) -> str:
    return ".".join((name, *(str(step.value) for step in below)))


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
# The version that torch writes since 2.5 (`CURRENT_DCP_VERSION`).
_VERSION = "1.0.0"


class _DcpEntry(NamedTuple):
    """One entry to write: its name, the steps of its path, and the entries of the tree below them.

    `below` has the path of each, relative to the entry, with its path in the tree or its value.
    """

    name: str
    steps: Steps
    below: tuple[tuple[Path, Path | ValueLeaf], ...]
    containers: Mapping[Path, Container]

    @property
    def tensor(self) -> Path | None:
        """Path in the tree if the entry is a tensor, None for another value."""
        (relative, entry), *_ = self.below or (((), ValueLeaf(None)),)
        return None if relative or isinstance(entry, ValueLeaf) else entry

    @property
    def path(self) -> Path:
        """Path of the entry when it is read back."""
        return _nested_path(self.steps)

    def tree(self, tree: Tree) -> Tree:
        """Return what torch.save stores, with the tensors of the tree."""
        leaves = {
            relative: entry if isinstance(entry, ValueLeaf) else tree[entry] for relative, entry in self.below
        }
        return Tree(leaves, {}, self.containers)


def pieces(tree: Tree, **options: Any) -> tuple[OutputFile, ...]:
    """Return the shards and the metadata of a tree; raise UnsupportedError as `plan_shards` does."""
    return shard_pieces(tree, plan_shards(tree, **options))


def stored(tree: Tree) -> Tree:
    """Return the tree as it is read back: dicts with text as keys, and each name of a shared tensor alone."""
    entries, leaves = _list_entries(tree), dict[Path, Leaf | ValueLeaf]()
    containers, _ = nested_containers(entry.path for entry in entries)
    for entry in entries:
        containers |= {(*entry.path, *path): container for path, container in entry.containers.items()}
        for path, leaf in torch_zip.stored(entry.tree(tree)).items():
            name = _name(entry.name, path)
            leaves[*entry.path, *path] = replace(leaf, key=name) if isinstance(leaf, Leaf) else leaf
    return Tree(leaves, {}, containers)


def plan_shards(tree: Tree, *, shard_bytes: int = SHARD_BYTES) -> ShardPlan:
    """Return the shards `__N_0.distcp`, one for each rank, and `.metadata`.

    Raise UnsupportedError, before anything is written, for a tree that is no dict, for two entries with the
    same name, and for values that a torch pickle cannot contain. Sources:
    torch/distributed/checkpoint/filesystem.py (`_write_item`), metadata.py and _traverse.py
    (`traverse_state_dict`: a list without tensors and dicts is one value, as is any tuple).
    """
    entries = _list_entries(tree)
    sizes = ((entry, sum(leaf.nbytes for _, leaf in entry.tree(tree).tensors())) for entry in entries)
    # The first shard creates the folder.
    dealt = [tuple(part) for part in split_by_size(sizes, shard_bytes)] or [()]
    shards = [
        Shard(
            f"/{_shard_name(number)}",
            tuple(path for entry in part for _, path in entry.below if not isinstance(path, ValueLeaf)),
            partial(_write_shard, part),
        )
        for number, part in enumerate(dealt)
    ]
    facts = {path: (leaf.dtype, leaf.shape) for path, leaf in tree.tensors()}

    def finish(recorded: Sequence[Any]) -> tuple[OutputFile, ...]:
        put = partial(_write_metadata, dealt, facts, recorded)
        return (OutputFile(f"/{_MAIN}", put, indexes=True),)

    return ShardPlan(tuple(shards), f"/{_MAIN}", finish, _read_shard)


def _shard_name(number: int) -> str:
    return f"__{number}_0{_SHARD}"


def _list_entries(tree: Tree) -> list[_DcpEntry]:
    """Return the entries of a tree in order; raise UnsupportedError for two with the same name."""
    plan = torch_zip.PicklePlan(tree)
    entries: dict[str, _DcpEntry] = {}

    def visit(node: torch_zip.NestedNode, steps: Steps) -> None:
        container = plan.containers.get(node.path) or torch_zip.infer_container(node)
        named = container.kind in ("dict", "OrderedDict")
        if not steps and (node.leaf is not None or not named):
            raise UnsupportedError(
                "a distributed checkpoint contains a dict of names",
                hint="use --to torch, which stores any value",
            )
        if node.leaf is None and named:
            for step, child in node.children.items():
                visit(child, (*steps, str(step.value)))
        elif node.leaf is None and container.kind == "list" and _is_nested(plan, node):
            for number, child in enumerate(torch_zip.order_entries(node)):
                visit(child, (*steps, number))
        else:
            name = ".".join(map(str, steps))
            if name in entries:
                raise UnsupportedError(
                    "two entries would have the same name in a distributed checkpoint",
                    path=display(node.path),
                    found=name,
                )
            below = tuple(_list_below(node, len(node.path)))
            inside = {
                path[len(node.path) :]: container
                for path, container in plan.containers.items()
                if path[: len(node.path)] == node.path
            }
            entries[name] = _DcpEntry(name, steps, below, inside)

    visit(plan.root, ())
    return list(entries.values())


def _is_nested(plan: torch_zip.PicklePlan, node: torch_zip.NestedNode) -> bool:
    """Return whether a list contains a tensor or a dict, also in lists of it."""
    for child in node.children.values():
        container = plan.containers.get(child.path) or torch_zip.infer_container(child)
        if isinstance(child.leaf, Leaf):
            return True
        if child.leaf is None and (
            container.kind in ("dict", "OrderedDict")
            or (container.kind == "list" and _is_nested(plan, child))
        ):
            return True
    return False


def _list_below(node: torch_zip.NestedNode, depth: int) -> Iterator[tuple[Path, Path | ValueLeaf]]:
    if node.leaf is not None:
        yield node.path[depth:], node.leaf if isinstance(node.leaf, ValueLeaf) else node.canonical
    for child in node.children.values():
        yield from _list_below(child, depth)


class _CountedStream:
    """A stream that counts what is written to it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self.nbytes = stream, 0

    def write(self, data: Buffer) -> int:
        self.nbytes += memoryview(data).nbytes
        return self._stream.write(data)


def _write_shard(entries: Sequence[_DcpEntry], tree: Tree, stream: IO[bytes]) -> list[tuple[int, int]]:
    """Write the entries; return the offset and length of each."""
    counted, recorded = _CountedStream(stream), []
    for entry in entries:
        at = counted.nbytes
        (piece,) = torch_zip.pieces(entry.tree(tree))
        piece.write(cast(IO[bytes], counted))
        recorded.append((at, counted.nbytes - at))
    return recorded


def _read_shard(file: File, shard: Shard, recorded: Any) -> Mapping[Path, Leaf]:
    """Return the tensors of a written shard."""
    leaves: dict[Path, Leaf] = {}
    for entry, (at, length) in zip(shard.write.args[0], recorded, strict=True):  # type: ignore[attr-defined]
        saved = torch_legacy.list_embedded(file, at, length).tree
        for path, leaf in saved.tensors():
            source = leaf.source
            if entry.tensor is not None:
                source = DcpSavedTensor(file, at, length, leaf.dtype, leaf.shape)
                source = Inline(b"") if 0 in leaf.shape else source
            leaves[*entry.path, *path] = replace(leaf, source=source)
    return leaves


def _write_metadata(
    dealt: Sequence[Sequence[_DcpEntry]],
    facts: Mapping[Path, tuple[str, Shape]],
    recorded: Sequence[Any],
    stream: IO[bytes],
) -> None:
    entries: dict[str, Any] = {}
    storage: dict[PickleObject, PickleObject] = {}
    for number, (part, places) in enumerate(zip(dealt, recorded, strict=True)):
        for entry, (offset, length) in zip(part, places, strict=True):
            at: dict[str, Any] = {"fqn": entry.name, "index": None}
            if entry.tensor is None:
                entries[entry.name] = _object("BytesStorageMetadata", None)
            else:
                dtype, shape = facts[entry.tensor]
                entries[entry.name] = _describe_tensor(dtype, shape)
                at |= {"offset": _size((0,) * len(shape)), "index": 0}
            where = {"relative_path": _shard_name(number), "offset": offset, "length": length}
            storage[_object("MetadataIndex", at)] = _object("_StorageInfo", where, _STORAGE_MODULE)
    state = {
        "state_dict_metadata": entries,
        "planner_data": {entry.name: entry.steps for part in dealt for entry in part},
        "storage_data": storage,
        "version": _VERSION,
    }
    stream.write(dumps(_object("Metadata", state)))


def _describe_tensor(dtype: str, shape: Shape) -> PickleObject:
    # TensorProperties.__getstate__: type, layout, requires_grad, memory format, pinned.
    layout = PickleObject(Global("torch.serialization", "_get_layout"), ("torch.strided",), 0)
    memory = PickleObject(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,), 0)
    kind = Global("torch", str(dtypes.BY_NAME[dtype].torch))
    chunk = _object("ChunkStorageMetadata", {"offsets": _size((0,) * len(shape)), "sizes": _size(shape)})
    state = {
        "properties": _object("TensorProperties", (kind, layout, False, memory, False)),
        "size": _size(shape),
        "chunks": [chunk],
    }
    return _object("TensorStorageMetadata", state)


def _object(name: str, state: object, module: str = _METADATA_MODULE) -> PickleObject:
    return PickleObject(NEW, (Global(module, name),), 0, state=state)


def _size(shape: Shape) -> PickleObject:
    return PickleObject(Global("torch", "Size"), (shape,), 0)
