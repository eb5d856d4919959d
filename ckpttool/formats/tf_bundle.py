"""TensorFlow tensor bundles."""

from __future__ import annotations

import math
import os
import re
import sys
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, Literal, cast

from ckpttool.core import deferred, dtypes, filesystem, limits, source
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    TruncatedError,
    UnsupportedError,
    abbreviate_list,
    locate_errors,
)
from ckpttool.core.source import (
    Buffer,
    ByteSwappedSource,
    Checksum,
    File,
    Inline,
    MissingShard,
    Shape,
    Source,
    Span,
    UnreadableSource,
)
from ckpttool.core.text import format_count
from ckpttool.core.tree import Alias, Container, Leaf, Path, PathStep, Role, Tree, attr, display
from ckpttool.encodings import protobuf, sstable
from ckpttool.encodings.protobuf import Message
from ckpttool.formats import tf_common, tf_object_graph
from ckpttool.formats.name_roles import role_by_name
from ckpttool.formats.probe import OutputFile, Probe, Shard, ShardPlan, shard_pieces
from ckpttool.formats.tensor_bytes import count_elements, iter_exact
from ckpttool.formats.tf_common import Extent, VariableInfo, assemble_slices, slice_box, tree_by_name
from ckpttool.formats.tf_object_graph import KEY, MARK, Graph

NAME = "tensor_bundle"
TITLE = "TensorFlow checkpoint (index and data shards)"
WRITES = True
FRAMEWORK = "tensorflow"


def claims(probe: Probe) -> str | None:
    """Return the checkpoint prefix for a path, or None if it is not a TensorFlow checkpoint."""
    if probe.kind == "missing":
        return _match_prefix(probe)
    if probe.kind == "folder":
        return _prefix_of_folder(probe)
    return _prefix_of_file(probe) if probe.kind == "file" else None


def redirected(probe: Probe, location: str) -> str | None:
    """Return a note if the location is not the place named in the state file at the path."""
    return tf_common.note_redirection(probe, location)


def read(location: str) -> Checkpoint:
    """List the checkpoint with prefix `location`; check every entry, but read no tensor."""
    index = _index_file(f"{location}.index")
    with locate_errors(file=index.path):
        entries = sstable.read_table(_index_bytes(index))
        listing = _BundleReader(location, entries)
        tensors = listing.tensors()
    tree, notes = _tree(tensors, index.path)
    writer = f"tensor bundle version {listing.header.producer}"
    files = (index, *listing.files())
    return Checkpoint(location, NAME, tree, files, writer, "crc32c", (*listing.notes(), *notes))


def _match_prefix(probe: Probe) -> str | None:
    # A web server may not list names.
    if f"{probe.name}.index" in probe.names or (not probe.names and filesystem.isfile(f"{probe.path}.index")):
        return probe.path
    if any(tf_common.v2_base(name) == probe.name for name in probe.names):
        raise TruncatedError("index file missing: only data shards found", file=f"{probe.path}.index")
    return None


def _prefix_of_file(probe: Probe) -> str | None:
    base = tf_common.v2_base(probe.path)
    if base is not None:
        if not filesystem.lexists(f"{base}.index"):
            raise TruncatedError("index file missing for this shard", file=f"{base}.index")
        return base
    if probe.name.endswith(".index"):
        base = probe.name[: -len(".index")]
        is_bundle = probe.tail.endswith(sstable.MAGIC) or any(
            tf_common.v2_base(name) == base for name in probe.names
        )
        return probe.path[: -len(".index")] if is_bundle and base else None
    return tf_common.location_by_state(probe, 2)


def _prefix_of_folder(probe: Probe) -> str | None:
    if not probe.names.isdisjoint(("saved_model.pb", "saved_model.pbtxt")):
        return None  # a SavedModel, whatever else is in its folder
    if tf_common.find_state(probe) is not None:
        return tf_common.location_by_state(probe, 2)
    mine = tf_common.v2_bases(probe.names)
    # Without a state file, nothing shows that the V2 checkpoints of a folder are newer than its V1 ones.
    others = tf_common.v1_bases(probe.path, probe.names) - mine if mine else set()
    bases = sorted(mine | others, key=tf_common.checkpoint_order)
    if len(bases) > 1:
        raise tf_common.several_checkpoints_error(bases, probe.path)
    if bases:
        return os.path.join(probe.path, bases[0])
    # A prefix may have a folder of the same name beside its index.
    beside = probe.path.rstrip("/")
    return beside if filesystem.isfile(f"{beside}.index") else None


# Version of TensorFlow's own reader and writer (tensor_bundle.cc, kTensorBundleVersion).
VERSION = 1

# num_shards, endianness, version; dtype, shape, shard_id, offset, size, crc32c, slices.
_HEADER = Message({1: protobuf.INT32, 2: protobuf.INT32, 3: protobuf.MESSAGE})
_ENTRY = Message(
    {
        1: protobuf.INT32,
        2: protobuf.MESSAGE,
        3: protobuf.INT32,
        4: protobuf.INT,
        5: protobuf.INT,
        6: protobuf.INT._replace(wires=protobuf.WORD),
        7: protobuf.MESSAGES,
    }
)


class BundleHeader(NamedTuple):
    """Header of a bundle: the entry with the empty key."""

    shards: int
    big_endian: bool
    producer: int
    min_consumer: int
    bad_consumers: tuple[int, ...]


class BundleEntry(NamedTuple):
    """Location of one tensor, or its slices; `dtype` is TensorFlow's number."""

    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    slices: tuple[tuple[Extent, ...], ...]


def parse_header(data: bytes) -> BundleHeader:
    """Decode a BundleHeaderProto.

    Field numbers, also of entries: tensorflow/core/protobuf/tensor_bundle.proto.
    """
    shards, order, versions = protobuf.decode(data, _HEADER)
    if order not in (0, 1):
        raise FormatError("invalid endianness in the header", found=str(order))
    producer, least, refused = protobuf.decode(versions, tf_common.VERSIONS)
    return BundleHeader(shards, bool(order), producer, least, tuple(refused))


def parse_entry(data: bytes) -> BundleEntry:
    """Decode a BundleEntryProto; all numbers are as stored, including their sign, and not yet checked."""
    dtype, shape, shard, offset, size, checksum, slices = protobuf.decode(data, _ENTRY)
    cuts = tuple(map(tf_common.parse_slice, slices))
    return BundleEntry(
        dtype, tf_common.parse_shape(shape), shard, offset, size, source.unmask_crc(checksum), cuts
    )


Order = Literal["little", "big"]


class TensorFlowStrings(NamedTuple):
    """A string tensor: the lengths as varints, their own masked checksum, then all the bytes.

    The checksums are computed over the lengths as fixed-width numbers, not over the stored varints
    (tensor_bundle.cc, ReadStringTensor); `checksum` is the entry's, unmasked.
    """

    span: Span
    elements: int
    checksum: int
    big_endian: bool = False

    def read(self) -> bytes:
        """Return each element's length as u64 LE followed by its bytes."""
        if self.elements > limits.current().strings:
            raise limits.limit_error(
                "strings", "the tensor has too many strings", self.elements, file=self.span.file.path
            )
        data = bytes(self.span.read())
        lengths, at = array("Q"), 0
        for _ in range(self.elements):
            length, at = protobuf.read_varint(data, at, len(data))
            lengths.append(length)
        if len(data) - at - 4 != sum(lengths):
            raise _span_error(self.span, "the string lengths do not add up to the tensor's size")
        order: Order = "big" if self.big_endian else "little"
        running = source.crc32c(_lengths_as_words(lengths, order))
        stored = data[at : at + 4]
        _require(source.unmask_crc(int.from_bytes(stored, order)), running, self.span)
        _require(self.checksum, source.crc32c(data[at + 4 :], source.crc32c(stored, running)), self.span)
        at += 4
        output = bytearray()
        for length in lengths:
            output += length.to_bytes(8, "little")
            output += data[at : at + length]
            at += length
        return bytes(output)


class TensorFlowVariants(NamedTuple):
    """A variant tensor (state of a dataset iterator): opaque records, each with a running checksum.

    tensor_bundle.cc, ReadVariantTensor: a varint length, a VariantTensorDataProto, a masked checksum
    over everything so far, with lengths as u64.
    """

    span: Span
    elements: int
    checksum: int
    big_endian: bool = False

    def read(self) -> bytes:
        """Return the bytes as stored, after verifying their checksums."""
        data = bytes(self.span.read())
        order: Order = "big" if self.big_endian else "little"
        at = running = 0
        for _ in range(self.elements):
            length, at = protobuf.read_varint(data, at, len(data))
            if length > len(data) - at - 4:
                raise _span_error(self.span, "a variant extends past the end of its tensor")
            running = source.crc32c(data[at : at + length], source.crc32c(length.to_bytes(8, order), running))
            at += length
            stored = data[at : at + 4]
            _require(source.unmask_crc(int.from_bytes(stored, order)), running, self.span)
            running = source.crc32c(stored, running)
            at += 4
        if at != len(data):
            raise _span_error(self.span, "extra bytes after the last variant of a tensor")
        _require(self.checksum, running, self.span)
        return data


def _lengths_as_words(lengths: array[int], order: Order) -> bytes:
    """Return the lengths as the checksum requires them: u32, or u64 from 4 GiB on."""
    if max(lengths, default=0) >= 1 << 32:
        return b"".join(n.to_bytes(4 if n < 1 << 32 else 8, order) for n in lengths)
    small = array("I", lengths)
    if order != sys.byteorder:
        small.byteswap()
    return small.tobytes()


def _require(expected: int, checksum: int, span: Span) -> None:
    Checksum("crc32c", expected).require(checksum, span.length, span.file.path, span.offset)


def _span_error(span: Span, message: str) -> FormatError:
    return FormatError(message, file=span.file.path, offset=span.offset)


def _index_file(path: str) -> File:
    file = File.stamp(path)
    if not filesystem.isfile(path):
        raise FormatError("the index is not a regular file", file=path)
    if file.size > limits.current().index_bytes:
        raise limits.limit_error("index_bytes", "the index is too large", file.size, file=path)
    return file


def _index_bytes(file: File) -> bytes:
    data = file.read(0, file.size)
    if data.startswith(b"version https://git-lfs"):
        raise FormatError(
            "Git LFS pointer instead of the file itself",
            file=file.path,
            hint="run git lfs pull to fetch the file",
        )
    if not data:
        raise TruncatedError("the index is empty", file=file.path)
    return data


def _tree(tensors: dict[str, VariableInfo], index: str) -> tuple[Tree, tuple[str, ...]]:
    graph = tensors.pop(KEY, None)
    if graph is None:
        return tree_by_name(tensors), ()
    if graph.dtype != "string" or graph.shape:
        raise FormatError("the object graph is not a single string", file=index, path=KEY)
    if isinstance(graph.source, MissingShard):
        return tree_by_name(tensors), (
            "the object graph is in a missing shard; tensors are listed by TensorFlow's own keys",
        )
    with locate_errors(file=index, path=KEY):
        tree, notes = tree_from_graph(_text(graph.source, "graph_bytes"), tensors)
    containers, refused = _modules(tree)
    containers = {**tree.containers, **containers}
    return replace(tree, containers=containers) if containers else tree, (*notes, *refused)


def _text(source: Source, limit: str) -> bytes:
    # A scalar's bytes are one length and the string itself (see leaf.Leaf.read).
    if isinstance(source, TensorFlowStrings) and source.span.length > getattr(limits.current(), limit):
        raise limits.limit_error(limit, "the text is too large", source.span.length)
    return bytes(source.read())[8:]


def _modules(tree: Tree) -> tuple[dict[Path, Container], list[str]]:
    """Return the stored configurations of objects, and a note on unusable ones."""
    modules: dict[Path, Container] = {}
    refused: list[str] = []
    for path, leaf in tree.tensors():
        if leaf.dtype != "string" or leaf.shape or not path or path[-1].value != tf_object_graph.ATTRIBUTE:
            continue
        try:
            container = tf_object_graph.module_container(_text(leaf.source, "json_bytes"))
        except CkpttoolError:
            refused.append(leaf.key)
            continue
        if container is not None:
            modules[path[:-1]] = container
    if not refused:
        return modules, []
    more = f" and {len(refused) - 1:,} more" if len(refused) > 1 else ""
    return modules, [f"{refused[0]}{more}: unreadable configuration, skipped"]


class _BundleReader:
    """Reader of one bundle: its header, its entries by key, and the shards examined so far.

    The format is defined in tensorflow/core/util/tensor_bundle/tensor_bundle.cc. The index is an sstable
    (encodings/sstable.py) of protobuf records.
    """

    def __init__(self, prefix: str, entries: list[sstable.TableEntry]) -> None:
        if not entries or entries[0][0]:
            raise FormatError("the index has no header entry; it is not a tensor bundle index")
        self.header = _header(entries[0][1])
        self._prefix = prefix
        self._raw = entries[1:]
        self._slices = {key: value for key, value in self._raw if key[:1] == b"\0"}
        self._used: set[bytes] = set()
        self._shards: dict[int, File | None] = {}
        # Tensors by shard: offset, size, and key.
        self._placed: dict[int, list[tuple[int, int, bytes]]] = {}

    def tensors(self) -> dict[str, VariableInfo]:
        """Return every tensor by key in index order, with slices merged into their tensors."""
        tensors = {}
        for key, value in self._raw:
            if key[:1] != b"\0":
                tensors[protobuf.as_text(key)] = self._named(key, value)
        # TensorFlow treats a slice that no tensor lists as a tensor with that name.
        for key, value in self._slices.items():
            if key not in self._used:
                tensors[protobuf.as_text(key)] = self._named(key, value)
        self._require_held()
        return tensors

    def _named(self, key: bytes, value: bytes) -> VariableInfo:
        try:
            return self._tensor(key, parse_entry(value))
        except CkpttoolError as error:
            raise error.located(path=protobuf.as_text(key)) from error.__cause__

    def files(self) -> list[File]:
        """Return the existing shards."""
        return [file for _, file in sorted(self._shards.items()) if file is not None]

    def notes(self) -> list[str]:
        """Return notes on missing shards, and on shards that differ from what TensorFlow writes."""
        missing = sorted(shard for shard, file in self._shards.items() if file is None)
        names = [os.path.basename(self._shard_path(shard)) for shard in missing]
        verb = "is" if len(names) == 1 else "are"
        notes = [
            f"shard {abbreviate_list(names, SHOWN)} {verb} missing: its tensors are listed but cannot be read"
        ]
        for shard, file in sorted(self._shards.items()):
            if file is not None:
                notes += self._odd(shard, file)
        return notes if missing else notes[1:]

    def _odd(self, shard: int, file: File) -> Iterator[str]:
        """Yield notes on overlaps and gaps, which BundleWriter (tensor_bundle.cc) never writes."""
        name = os.path.basename(file.path)
        reach, own, shared = 0, 0, []
        for offset, size, key in sorted(self._placed.get(shard, ())):
            if offset < reach:
                shared.append(protobuf.as_text(key))
            own += max(0, offset + size - max(offset, reach))
            reach = max(reach, offset + size)
        if shared:
            yield f"{abbreviate_list(shared, SHOWN)}: overlaps bytes of another tensor in {name}"
        if own < file.size:
            belong = "belongs" if file.size - own == 1 else "belong"
            yield f"{format_count(file.size - own, 'byte')} of {name} {belong} to no tensor"

    def _require_held(self) -> None:
        """Raise LimitError if overlapping tensors are together far larger than their shard."""
        most = limits.current().expanded_bytes
        for shard, placed in self._placed.items():
            file = self._shards[shard]
            beyond = 0 if file is None else sum(size for _, size, _ in placed) - file.size
            if file is not None and beyond > most:
                what = (
                    "the tensors of a shard overlap, and their total size exceeds the shard by "
                    "more than the limit"
                )
                raise limits.limit_error("expanded_bytes", what, beyond, file=file.path)

    def _tensor(self, key: bytes, entry: BundleEntry) -> VariableInfo:
        dtype = _dtype(entry.dtype)
        elements = count_elements(entry.shape)
        if entry.slices:
            return VariableInfo(dtype.name, entry.shape, self._sliced(key, entry, dtype))
        return VariableInfo(dtype.name, entry.shape, self._source(key, entry, dtype, elements))

    def _source(self, key: bytes, entry: BundleEntry, dtype: dtypes.DType, elements: int) -> Source:
        _check_size(entry, dtype, elements)
        file = self._shard(entry)
        if entry.size:
            self._placed.setdefault(entry.shard, []).append((entry.offset, entry.size, key))
        if file is None:
            return MissingShard(self._shard_path(entry.shard), Checksum("crc32c", entry.checksum))
        span = Span(file, entry.offset, entry.size, Checksum("crc32c", entry.checksum))
        return _stored_source(span, dtype.name, elements, big_endian=self.header.big_endian)

    def _sliced(self, key: bytes, whole: BundleEntry, dtype: dtypes.DType) -> Source:
        if not dtype.itemsize:
            return UnreadableSource(
                f"{self._prefix}.index", f"a tensor of type {dtype.name} is stored in slices"
            )
        parts = []
        for extents in whole.slices:
            slice_name = tf_common.slice_key(key, extents)
            self._used.add(slice_name)
            value = self._slices.get(slice_name)
            if value is None:
                raise FormatError("a slice of the tensor is missing from the index", found=str(extents))
            entry = parse_entry(value)
            box = slice_box(extents, whole.shape)
            shape = tuple(length for _, length in box)
            if entry.dtype != whole.dtype or entry.shape != shape or entry.slices:
                raise FormatError("a slice does not fit into its tensor", found=f"{entry.shape} at {box}")
            parts.append((box, self._source(key, entry, dtype, count_elements(shape))))
        return assemble_slices(dtype.name, whole.shape, parts, f"{self._prefix}.index")

    def _shard(self, entry: BundleEntry) -> File | None:
        number = entry.shard
        if not 0 <= number < self.header.shards:
            raise FormatError(
                "the tensor refers to a shard that the checkpoint does not have",
                expected=f"0 to {self.header.shards - 1}",
                found=str(number),
            )
        if number not in self._shards:
            self._shards[number] = self._stamp(number)
        file = self._shards[number]
        if file is not None and entry.offset + entry.size > file.size:
            raise TruncatedError(
                f"the tensor extends past the end of {os.path.basename(file.path)}",
                offset=entry.offset,
                expected=f"{entry.size:,} bytes",
                found=f"{max(0, file.size - entry.offset):,}",
                hint="the shard was truncated while it was written or copied, or belongs to another save",
            )
        return file

    def _stamp(self, number: int) -> File | None:
        path = self._shard_path(number)
        if not filesystem.lexists(path):
            return None
        if not filesystem.isfile(path):
            raise FormatError("the shard is not a regular file", file=path)
        return File.beside(path, f"{self._prefix}.index")

    def _shard_path(self, number: int) -> str:
        return f"{self._prefix}.data-{number:05d}-of-{self.header.shards:05d}"


def _stored_source(span: Span, dtype: str, elements: int, *, big_endian: bool = False) -> Source:
    """Return the source of a tensor stored in this span, whose checksum is the entry's."""
    checksum = 0 if span.checksum is None else span.checksum.value
    if dtype == "string":
        return TensorFlowStrings(span._replace(checksum=None), elements, checksum, big_endian)
    if dtype == "variant":
        return TensorFlowVariants(span._replace(checksum=None), elements, checksum, big_endian)
    width = dtypes.component_size(dtype)
    return ByteSwappedSource(span, width) if big_endian and width > 1 else span


def _header(data: bytes) -> BundleHeader:
    header = parse_header(data)
    if header.shards < 1:
        raise FormatError("invalid number of shards in the header", found=str(header.shards))
    tf_common.require_version(*header[2:], VERSION)
    return header


def _dtype(number: int) -> dtypes.DType:
    dtype = dtypes.BY_TENSORFLOW.get(number)
    if dtype is None:
        raise FormatError("unknown TensorFlow data type", found=f"number {number}")
    if dtype.name == "resource":
        raise FormatError("the index lists a resource handle, which has no bytes to store")
    return dtype


def _check_size(entry: BundleEntry, dtype: dtypes.DType, elements: int) -> None:
    if entry.offset < 0 or entry.size < 0:
        raise FormatError(
            "negative offset or size of a tensor", found=f"{entry.size} bytes at {entry.offset}"
        )
    if dtype.itemsize:
        if entry.size != elements * dtype.itemsize:
            raise FormatError(
                "the tensor's size does not match its shape",
                expected=f"{elements * dtype.itemsize:,} bytes for {dtype.name}{list(entry.shape)}",
                found=f"{entry.size:,}",
            )
    elif elements > entry.size:
        # Every element takes at least one byte.
        raise FormatError(
            "the tensor has more elements than bytes", expected=f"{elements:,}", found=f"{entry.size:,}"
        )


SHOWN = 3  # names in a note


@dataclass(slots=True)
class _BundleTreeBuilder:
    """A tree under construction; `used` are the bundle keys that have a leaf, by path."""

    graph: Graph
    canonical: dict[int, Path]
    others: dict[int, tuple[Path, ...]]
    roles: tf_object_graph.VariableRoles
    tensors: Mapping[str, VariableInfo]
    leaves: dict[Path, Leaf]
    aliases: dict[Path, list[Alias]]
    used: dict[str, Path]
    absent: list[tuple[int, Path, tf_object_graph.ObjectAttribute]]
    crowded: Counter[Path]


def tree_from_graph(data: bytes, tensors: Mapping[str, VariableInfo]) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree of a bundle with the object graph `data`, and notes for the user."""
    graph = tf_object_graph.parse_graph(data)
    chosen = tf_object_graph.choose_paths(graph)
    valued = {number for number, node in enumerate(graph) if node.attributes}
    aliases = tf_object_graph.find_aliases(graph, chosen, valued)
    roles = tf_object_graph.find_roles(graph)
    named = tf_object_graph.paths_in_lists(graph, chosen)
    others = aliases.paths | {
        number: (chosen.paths[number], *aliases.paths.get(number, ())) for number in named
    }
    naming = _BundleTreeBuilder(
        graph, chosen.paths | named, others, roles, tensors, {}, {}, {}, [], Counter()
    )
    for number, path in naming.canonical.items():
        if number in valued:
            _add(naming, number, path)
    _add_slots(naming)
    absent = _add_prefixed(naming)
    loose = _add_loose(naming)
    _fix_slot_owners(naming)
    savers = sorted({node.saver for node in graph if node.saver})
    inputs = {
        path: Container("list")
        for path in chosen.paths.values()
        if path and path[-1].value in tf_common.INPUT_LAYERS
    }
    tree = Tree(naming.leaves, {path: tuple(others) for path, others in naming.aliases.items()}, inputs)
    return tree, tuple(_notes(savers, loose, absent, chosen, aliases))


def _add(naming: _BundleTreeBuilder, number: int, path: Path) -> None:
    for attribute in naming.graph[number].attributes:
        if attribute.key not in naming.tensors:
            naming.absent.append((number, path, attribute))
            continue
        tail = tf_object_graph.attribute_path(attribute.name)
        others = naming.others.get(number, ())
        if tail and others:
            others = tuple(alias + tail for alias in others)
        _put_leaf(naming, number, path + tail, attribute.key, attribute.full_name, others)


def _add_prefixed(naming: _BundleTreeBuilder) -> list[str]:
    """Add tensors stored under longer keys than the graph lists; return the keys without a stored tensor.

    Lookup tables and iterators save `KEY-keys`, `KEY-values` and `KEY_STATE`.
    """
    keys = sorted(naming.tensors.keys() - naming.used.keys())
    following = list(range(len(keys) + 1))  # next candidate for an unused key
    absent, above = [], set()
    for number, path, attribute in naming.absent:
        prefix, matched = attribute.key, False
        if prefix and prefix not in above and attribute.name != tf_object_graph.VALUE:
            above.add(prefix)
            at = _next_free(following, bisect_left(keys, prefix))
            while at < len(keys) and keys[at].startswith(prefix):
                matched = True
                own = path + tf_object_graph.attribute_path(attribute.name, keys[at][len(prefix) :])
                _put_leaf(naming, number, own, keys[at], attribute.full_name, (), role="other")
                following[at] = at + 1
                at = _next_free(following, at)
        if not matched:
            absent.append(prefix)
    return absent


def _next_free(following: list[int], at: int) -> int:
    while following[at] != at:
        following[at] = following[following[at]]
        at = following[at]
    return at


def _put_leaf(
    naming: _BundleTreeBuilder,
    number: int,
    path: Path,
    key: str,
    full_name: str,
    others: tuple[Path, ...],
    role: Role | None = None,
) -> None:
    if key in naming.used:
        # Two objects that share an entry are one tensor with two names.
        first = naming.used[key]
        naming.aliases.setdefault(first, []).extend((Alias(path), *map(Alias, others)))
        return
    path = _unused_path(naming, path)
    naming.leaves[path] = _leaf(naming, number, path, key, full_name, role)
    naming.used[key] = path
    if others:
        naming.aliases[path] = [*map(Alias, others)]


def _unused_path(naming: _BundleTreeBuilder, path: Path) -> Path:
    # Two values of one object with the same name, or a value named like an edge: only in unusual files.
    if path not in naming.leaves:
        return path
    path = (*path, PathStep("attr", ".ATTRIBUTES"))
    while path in naming.leaves:
        naming.crowded[path] += 1
        path = (*path, PathStep("index", naming.crowded[path]))
    return path


def _leaf(
    naming: _BundleTreeBuilder, number: int, path: Path, key: str, full_name: str, role: Role | None
) -> Leaf:
    dtype, shape, source = naming.tensors[key]
    trainable = of = kind = None
    slot = naming.roles.slots.get(number)
    if slot is not None:
        role, kind = "slot", slot.kind or None
        of = naming.canonical.get(slot.of) if slot.of is not None else None
    elif number in naming.roles.trained:
        role, trainable = "parameter", True
    elif number in naming.roles.statistics:
        role = "buffer"
    elif role is None:
        setting = number in naming.roles.settings
        role = role_by_name(path, full_name, dtype, shape, setting=setting)
    return Leaf(dtype, shape, source, key, role, of, kind, trainable, full_name or None)


def _add_slots(naming: _BundleTreeBuilder) -> None:
    # Older optimizers have no edges to their slots; the graph lists them beside their variables.
    canonical = naming.canonical
    for number, slot in naming.roles.slots.items():
        if number in canonical or slot.of not in canonical or slot.optimizer not in canonical:
            continue
        path = tf_object_graph.slot_path(canonical[slot.optimizer], slot.kind, canonical[slot.of])
        _add(naming, number, path)


def _fix_slot_owners(naming: _BundleTreeBuilder) -> None:
    # An owner is identified by its canonical path, which is not the path of its leaf if two objects share an
    # entry.
    for number, slot in naming.roles.slots.items():
        for attribute in naming.graph[number].attributes:
            path = naming.used.get(attribute.key)
            leaf = None if path is None else naming.leaves[path]
            if path is not None and leaf is not None and leaf.of not in naming.leaves:
                naming.leaves[path] = replace(leaf, of=_owner_path(naming, slot.of))


def _owner_path(naming: _BundleTreeBuilder, number: int | None) -> Path | None:
    if number is None or not naming.graph[number].attributes:
        return None
    return naming.used.get(naming.graph[number].attributes[0].key)


def _add_loose(naming: _BundleTreeBuilder) -> list[str]:
    loose = [key for key in naming.tensors if key not in naming.used]
    for key in loose:
        path = _unused_path(naming, tf_object_graph.path_of_key(key))
        tensor = naming.tensors[key]
        role = role_by_name(path, "", tensor.dtype, tensor.shape)
        naming.leaves[path] = Leaf(tensor.dtype, tensor.shape, tensor.source, key, role)
        naming.used[key] = path
    return loose


def _notes(
    savers: list[str],
    loose: list[str],
    absent: list[str],
    chosen: tf_object_graph.ObjectTree,
    aliases: tf_object_graph.ObjectAliases,
) -> Iterator[str]:
    if savers:
        named = abbreviate_list(savers, SHOWN)
        yield f"some objects were saved by a registered saver ({named}), which chooses its own keys"
    if loose:
        yield f"{abbreviate_list(loose, SHOWN)}: not in the object graph, listed by key"
    if absent:
        yield f"{abbreviate_list(absent, SHOWN)}: in the object graph, but missing from the index"
    if chosen.deep:
        most = limits.current().graph_depth
        yield f"objects more than {most} edges deep in the object graph are listed by key"
    if aliases.capped or not aliases.complete:
        most = tf_object_graph.MAX_ALIASES
        yield f"some variables have more paths than are listed (at most {most} besides the first)"


# tensorflow/python/framework/ops.py, _VALID_OP_NAME_REGEX: valid variable names.
_LEGAL = deferred.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
# tensorflow/python/training/adam.py: both slots use the optimizer's name, the second one with a number.
_ADAM = {"m": "Adam", "v": "Adam_1"}


def tensor_names(tree: Tree) -> Mapping[Path, str]:
    """Return every tensor's name: its own if it was read by name, otherwise its displayed path.

    Adam's moments are stored beside their variables, as `VARIABLE/Adam` and `VARIABLE/Adam_1`. Raise
    UnsupportedError for two tensors with the same name, and for names that TensorFlow does not
    accept.
    """
    names: dict[Path, str] = {}
    owners: dict[str, Path] = {}
    for path, leaf in tree.tensors():
        name = _tensor_name(tree, path, leaf)
        if name in owners:
            raise UnsupportedError(
                "two tensors would have the same name in a TensorFlow 1 checkpoint",
                path=display(path),
                found=f"{name}, the name of {display(owners[name])}",
            )
        names[path] = name
        owners[name] = path
    return names


def _tensor_name(tree: Tree, path: Path, leaf: Leaf) -> str:
    own = "/".join(str(step.value) for step in path)
    if own == leaf.key and own != KEY and own and own[0] != "\0":
        return own
    owner = tree.get(leaf.of) if leaf.of is not None else None
    if leaf.slot in _ADAM and leaf.of is not None and isinstance(owner, Leaf) and owner.of is None:
        name = f"{_tensor_name(tree, leaf.of, owner)}/{_ADAM[leaf.slot]}"
    else:
        name = display(path)
    if name == KEY or not _LEGAL.fullmatch(name):
        raise UnsupportedError(
            "a tensor's path is not a valid TensorFlow 1 variable name",
            path=display(path),
            expected="letters, digits and _ . - /, not starting with _",
            found=repr(name),
        )
    return name


# Larger than nearly every agent's checkpoint, and small enough for any file system.
SHARD_BYTES = 2 << 30
MAX_SHARDS = 99_999  # a shard's name has five digits
_COUNTER: Path = (attr("save_counter"),)
_CHUNK = 1 << 20
_INDEX = ".index"


class _BundleItem(NamedTuple):
    """A tensor to store; `path` is for error messages."""

    key: str
    leaf: Leaf
    path: Path


def pieces(tree: Tree, **options: Any) -> tuple[OutputFile, ...]:
    """Return the shards and the index of a tree, with the options of `plan_shards`."""
    return shard_pieces(tree, plan_shards(tree, **options))


def plan_shards(
    tree: Tree,
    *,
    graph: bool = True,
    shards: int | None = None,
    shard_bytes: int | None = None,
    counter: int | None = None,
    between: str | None = None,
) -> ShardPlan:
    """Return the shards and the index of a tree; the shards must be filled before the index.

    Raise UnsupportedError, before anything is written, for values that are not tensors, for types that
    TensorFlow lacks, and for two tensors with the same name. Sources:
    tensorflow/core/util/tensor_bundle/tensor_bundle.cc (BundleWriter, WriteStringTensor, WriteVariantTensor)
    and tensorflow/core/protobuf/tensor_bundle.proto.

    Args:
        tree: the tensors.
        graph: store objects as tf.train.Checkpoint does (see tf_object_graph.plan_graph), else variables by
            name as TensorFlow 1 does.
        shards: number of shards of about equal size.
        shard_bytes: size before which a shard is closed (default: 2 GiB); a tensor is never split.
        counter: the `save_counter` for a tree that has none and does not come from TensorFlow's objects.
        between: the prefix of a checkpoint that may already exist: empty shards are added, and an index that
            lists the shards under names of a larger, unused count, so that a set with the same names can be
            replaced by way of it (see atomic_write.write_atomically).
    """
    items = _list_items(_add_save_counter(tree, counter if graph else None), graph=graph)
    dealt = [
        tuple(_BundleRow.of(item, tree) for item in part)
        for part in _split_into_shards(items, shards, shard_bytes or SHARD_BYTES)
    ]
    count = len(dealt)
    larger = count + 1 if between is None else _free_count(between, count + 1)
    parts = [
        Shard(
            _shard_suffix(number, count),
            tuple(row.path for row in rows if row.added is None),
            partial(_write_shard, rows),
            _shard_suffix(number, larger),
        )
        for number, rows in enumerate(dealt)
    ]
    empty = [_shard_suffix(number, larger) for number in range(count, larger)]

    def finish(recorded: Sequence[Any]) -> tuple[OutputFile, ...]:
        extra = (
            *(OutputFile(suffix, _write_nothing, meanwhile=suffix, extra=True) for suffix in empty),
            OutputFile(_INDEX, partial(_write_index, dealt, recorded, larger), meanwhile=_INDEX, extra=True),
        )
        index = OutputFile(_INDEX, partial(_write_index, dealt, recorded, count), indexes=True)
        return (*(extra if between is not None else ()), index)

    return ShardPlan(tuple(parts), _INDEX, finish, _read_shard)


def stored(tree: Tree, *, graph: bool = True, counter: int | None = None) -> Tree:
    """Return the tree as the reader will list it: the same leaves under their stored paths and keys.

    Raise UnsupportedError as `pieces` does.
    """
    items = _list_items(_add_save_counter(tree, counter if graph else None), graph=graph)
    tensors = {key: VariableInfo(leaf.dtype, leaf.shape, leaf.source) for key, leaf, _ in items}
    if not graph:
        return tree_by_name(tensors)
    message = bytes(tensors.pop(KEY).source.read())[8:]
    return tree_from_graph(message, tensors)[0]


def _add_save_counter(tree: Tree, counter: int | None) -> Tree:
    known = any(MARK in leaf.key for _, leaf in tree.tensors())
    if counter is None or known or any(path[:1] == _COUNTER for path in tree):
        return tree
    leaf = Leaf("int64", (), Inline(counter.to_bytes(8, "little", signed=True)), "", "counter")
    return Tree({**tree.leaves, _COUNTER: leaf}, tree.aliases, tree.containers)


def _list_items(tree: Tree, *, graph: bool) -> list[_BundleItem]:
    """Return the tensors to store, in TensorFlow's order: by object with the graph last, or by name."""
    for path, _ in tree.plain():
        raise UnsupportedError(
            "a TensorFlow checkpoint can only store tensors, and this value is not a tensor",
            path=display(path),
            hint="drop it, or store it as a tensor",
        )
    for path, leaf in tree.tensors():
        row = dtypes.BY_NAME.get(leaf.dtype)
        if row is None or row.tensorflow is None or row.name == "resource":
            raise UnsupportedError(
                f"tensors of type {leaf.dtype} cannot be stored in a TensorFlow checkpoint",
                path=display(path),
            )
    if not graph:
        return _items_by_key(tree, dict(sorted(tensor_names(tree).items(), key=lambda item: _bytes(item[1]))))
    objects, keys = tf_object_graph.plan_graph(tree)
    message = tf_object_graph.encode_graph(objects)
    source = Inline(len(message).to_bytes(8, "little") + message)
    return [*_items_by_key(tree, keys), _BundleItem(KEY, Leaf("string", (), source, KEY), ())]


def _items_by_key(tree: Tree, keys: Mapping[Path, str]) -> list[_BundleItem]:
    leaves = dict(tree.tensors())
    return [_BundleItem(name, leaves[path], path) for path, name in keys.items()]


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def _split_into_shards(
    items: list[_BundleItem], shards: int | None, shard_bytes: int
) -> list[list[_BundleItem]]:
    """Assign the tensors to shards."""
    if shards is not None:
        _require_count(shards)
        total = sum(item.leaf.nbytes for item in items) or 1
        parts: list[list[_BundleItem]] = [[] for _ in range(shards)]
        before = 0
        for item in items:
            parts[min(shards - 1, before * shards // total)].append(item)
            before += item.leaf.nbytes
    else:
        parts, room = [[]], shard_bytes
        for item in items:
            if parts[-1] and item.leaf.nbytes > room:
                parts.append([])
                room = shard_bytes
            parts[-1].append(item)
            room -= item.leaf.nbytes
    _require_count(len(parts))
    return parts


def _require_count(shards: int) -> None:
    if not 0 < shards <= MAX_SHARDS:
        raise UnsupportedError(
            "invalid number of shards for a checkpoint", expected=f"1 to {MAX_SHARDS:,}", found=f"{shards:,}"
        )


class _BundleRow(NamedTuple):
    """A tensor of a shard; `added` is one that the tree lacks (the object graph, a counter)."""

    key: str
    path: Path
    dtype: str
    shape: Shape
    added: Leaf | None

    @classmethod
    def of(cls, item: _BundleItem, tree: Tree) -> _BundleRow:
        """Return the row of a tensor."""
        key, leaf, path = item
        return cls(key, path, leaf.dtype, leaf.shape, None if tree.get(path) is leaf else leaf)


def _write_shard(rows: Sequence[_BundleRow], tree: Tree, stream: IO[bytes]) -> list[tuple[int, int, int]]:
    """Write the tensors; return the offset, length and checksum of each."""
    at, recorded = 0, []
    for row in rows:
        leaf = row.added or tree[row.path]
        try:
            size, checksum = _write_tensor(cast(Leaf, leaf), stream)
        except CkpttoolError as error:
            raise error.located(path=display(row.path)) from error
        recorded.append((at, size, checksum))
        at += size
    return recorded


def _read_shard(file: File, shard: Shard, recorded: Any) -> Mapping[Path, Leaf]:
    """Return the tensors of a written shard, but for those that the tree lacked."""
    rows: Sequence[_BundleRow] = shard.write.args[0]  # type: ignore[attr-defined]
    leaves = {}
    for row, (at, size, checksum) in zip(rows, recorded, strict=True):
        if row.added is None:
            span = Span(file, at, size, Checksum("crc32c", checksum))
            stored = _stored_source(span, row.dtype, math.prod(row.shape))
            leaves[row.path] = Leaf(row.dtype, row.shape, stored, row.key)
    return leaves


def _shard_suffix(number: int, count: int) -> str:
    return f".data-{number:05d}-of-{count:05d}"


def _free_count(prefix: str, least: int) -> int:
    """Return the smallest number of shards, at least `least`, that no file at the prefix uses."""
    folder, name = os.path.split(os.path.abspath(prefix))
    shard = re.compile(re.escape(name) + r"\.data-\d{5}-of-(\d{5})")
    numbers = {int(match[1]) for name in os.listdir(folder) if (match := shard.fullmatch(name)) is not None}
    return next(count for count in range(least, 10 * MAX_SHARDS) if count not in numbers)


def _write_nothing(stream: IO[bytes]) -> None:
    stream.write(b"")


def _write_index(
    dealt: Sequence[Sequence[_BundleRow]], recorded: Sequence[Any], count: int, stream: IO[bytes]
) -> None:
    header = protobuf.encode_int(1, count) + protobuf.encode_message(3, protobuf.encode_int(1, VERSION))
    entries = [
        (_bytes(row.key), _encode_entry(row, number, *facts))
        for number, (rows, places) in enumerate(zip(dealt, recorded, strict=True))
        for row, facts in zip(rows, places, strict=True)
    ]
    sstable.write_table([(b"", header), *sorted(entries)], stream)


def _encode_entry(row: _BundleRow, shard: int, offset: int, size: int, checksum: int) -> bytes:
    """Return a BundleEntryProto; a dimension of size 0 is stored, with an empty value."""
    shape = b"".join(protobuf.encode_message(2, protobuf.encode_int(1, extent)) for extent in row.shape)
    return (
        protobuf.encode_int(1, dtypes.BY_NAME[row.dtype].tensorflow or 0)
        + protobuf.encode_message(2, shape)
        + protobuf.encode_int(3, shard)
        + protobuf.encode_int(4, offset)
        + protobuf.encode_int(5, size)
        + protobuf.encode_fixed32(6, source.mask_crc(checksum))
    )


def _write_tensor(leaf: Leaf, stream: IO[bytes]) -> tuple[int, int]:
    """Write one tensor's bytes; return their length and the checksum for its entry."""
    if leaf.dtype == "string":
        return _write_strings(leaf.strings(), stream)
    if leaf.dtype == "variant":
        return _write_variants(leaf.read(), leaf.size, stream)
    running = 0
    for piece in iter_exact(leaf, ()):
        running = _write_bytes(piece, stream, running)
    return leaf.nbytes, running


def _write_bytes(data: Buffer, stream: IO[bytes], running: int = 0) -> int:
    view = memoryview(data).cast("B")
    for at in range(0, len(view), _CHUNK):
        running = source.crc32c(view[at : at + _CHUNK], running)
        stream.write(view[at : at + _CHUNK])
    return running


def _write_strings(values: list[bytes], stream: IO[bytes]) -> tuple[int, int]:
    # The checksums cover the lengths as fixed-width numbers, not as the stored varints.
    fixed = b"".join(len(value).to_bytes(4 if len(value) < 1 << 32 else 8, "little") for value in values)
    running = source.crc32c(fixed)
    own = source.mask_crc(running).to_bytes(4, "little")
    head = b"".join(protobuf.encode_varint(len(value)) for value in values) + own
    stream.write(head)
    running = source.crc32c(own, running)
    for value in values:
        running = _write_bytes(value, stream, running)
    return len(head) + sum(map(len, values)), running


def _write_variants(data: Buffer, elements: int, stream: IO[bytes]) -> tuple[int, int]:
    """Write records as they were stored, if their own checksums match a little-endian bundle."""
    at = running = 0
    data = bytes(data)
    for _ in range(elements):
        length, at = protobuf.read_varint(data, at, len(data))
        record, stored = data[at : at + length], data[at + length : at + length + 4]
        running = source.crc32c(record, source.crc32c(length.to_bytes(8, "little"), running))
        if source.mask_crc(running).to_bytes(4, "little") != stored:
            raise UnsupportedError("a variant tensor is not encoded as by a little-endian TensorFlow")
        running = source.crc32c(stored, running)
        at += length + 4
    if at != len(data):
        raise FormatError("extra bytes after the last variant of a tensor")
    _write_bytes(data, stream)
    return at, running
