"""List the HDF5 files that Keras writes without the HDF5 library; everything else is left to the library.

Keras writes with the library's oldest layout: superblock 0, object headers 1, groups as B-trees of symbol
tables, contiguous datasets of numbers. Starting the process that runs the library (hdf5_child.py) takes
longer than the rest of a listing. Whatever is not exactly of this form, damage included, gives None, and the
library lists or refuses the file.

Source: HDF5 File Format Specification 3.0, II.A (superblock), III.A.1 (B-trees), III.B to III.E (symbol
tables, heaps), IV.A.1.a (object headers), IV.A.2 (messages).
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

from ckpttool.core import limits
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import BY_NAME

if TYPE_CHECKING:
    from ckpttool.core.source import Shape

# Attributes that Keras writes (keras/src/legacy/saving/legacy_h5_format.py, keras/src/saving/saving_lib.py);
# all others are ignored.
NAME_ATTRIBUTES = ("layer_names", "weight_names")
TEXT_ATTRIBUTES = ("model_config", "training_config", "keras_version", "backend", "name")

_UNDEFINED = 0xFFFF_FFFF_FFFF_FFFF
# Signature, versions, sizes of an address and a length, entries of symbol tables and B-trees, no user block.
_SUPERBLOCK = b"\x89HDF\r\n\x1a\n" + struct.pack("<8BHHIQQ", 0, 0, 0, 0, 0, 8, 8, 0, 4, 16, 0, 0, _UNDEFINED)
_LEAF_ENTRIES, _TREE_ENTRIES, _TREE_DEPTH = 8, 32, 8
_NODE = 16 * _TREE_ENTRIES + 8  # bytes of keys and children
_SYMBOL = struct.Struct("<QQIIQQ")  # name, header, kind of cache, reserved, cached B-tree and heap
_PLAIN, _GROUP = 0, 1
_END_OF_FREE_LIST = 1
# Types of messages.
_NIL, _SPACE, _TYPE, _OLD_FILL, _FILL, _LAYOUT, _ATTRIBUTE, _CONTINUATION, _TABLE, _MODIFIED = (
    *(0x00, 0x01, 0x03, 0x04, 0x05),
    *(0x08, 0x0C, 0x10, 0x11, 0x12),
)
_IN_GROUPS = {_NIL, _ATTRIBUTE, _CONTINUATION, _TABLE, _MODIFIED}
_IN_DATASETS = {_NIL, _SPACE, _TYPE, _OLD_FILL, _FILL, _LAYOUT, _ATTRIBUTE, _CONTINUATION, _MODIFIED}
_FLAGS = (0x00, 0x01, 0x04)  # none, constant, not to be shared
_HIGHEST_RANK = 32
_COMPACT, _CONTIGUOUS = 0, 1
# Types of text: of variable length, in ASCII and UTF-8; the same of fixed length, padded with zeros.
_VARIABLE_TEXT = tuple(bytes.fromhex(f"1901{n:02x}0010000000 1000000001000000 00000800") for n in (0, 1))
_FIXED_TEXT = (b"\x13\x01\0\0", b"\x13\x11\0\0")


def _number_types() -> Iterator[tuple[bytes, str]]:
    """Yield the encodings of little-endian numbers and their names."""
    for size in (1, 2, 4, 8):
        for name, sign in (("int", 8), ("uint", 0)):
            yield struct.pack("<BBHIHH", 0x10, sign, 0, size, 0, 8 * size), f"{name}{8 * size}"
    for size, exponent, mantissa in ((2, 5, 10), (4, 8, 23), (8, 11, 52)):
        fields = (0, 8 * size, mantissa, exponent, 0, mantissa, 2 ** (exponent - 1) - 1)
        yield struct.pack("<BBBBIHHBBBBI", 0x11, 0x20, 8 * size - 1, 0, size, *fields), f"float{8 * size}"


_NUMBERS = dict(_number_types())


class OtherFormError(Exception):
    """The file is not of the form that this module lists."""


class _Message(NamedTuple):
    """A message of an object header: its type and its bytes."""

    type: int
    data: bytes


class Hdf5GroupRecord(TypedDict):
    """A group in the listing; `address` is the position of its header."""

    path: str
    address: int
    ordered: bool
    attributes: dict[str, Any]


class Hdf5DatasetRecord(TypedDict, total=False):
    """A dataset in the listing: all have the first four, and either `unreadable` or `dtype` and `big`.

    Its bytes are at `offset`, in `inline` or `chunks` (position, offset, size, filter mask of each), or
    nowhere: every element is `fill`. Both texts are base64. Sizes are in bytes.
    """

    path: str
    address: int
    shape: list[int]
    stored: int
    dtype: str
    big: bool
    unreadable: str
    offset: int
    inline: str
    fill: str
    chunk: list[int]
    chunks: list[tuple[list[int], int, int, int]]
    filters: list[tuple[int, list[int], str]]


class Hdf5Listing(TypedDict):
    """What a walk lists; `same` are further names with the first ones."""

    groups: list[Hdf5GroupRecord]
    datasets: list[Hdf5DatasetRecord]
    same: list[tuple[str, str]]
    notes: list[str]


def list_plain_file(read: Callable[[int, int], bytes], length: int) -> Hdf5Listing | None:
    """Return the listing of an HDF5 file as hdf5_child.py does, None for a file of another form.

    `read` returns up to so many bytes (second argument) from an offset (first); `length` is the file's.
    """
    try:
        return _PlainListing(read, length).document()
    except (OtherFormError, struct.error, UnicodeError):
        return None


def _require(condition: object) -> None:
    if not condition:
        raise OtherFormError


class _PlainListing:
    """One walk of a file, in the order of hdf5_child.Hdf5Walk."""

    def __init__(self, read: Callable[[int, int], bytes], length: int) -> None:
        self._read, self.end = read, length
        self.most = limits.current()
        self.links = self.total = 0
        self.groups: list[Hdf5GroupRecord] = []
        self.datasets: list[Hdf5DatasetRecord] = []
        self.same: list[tuple[str, str]] = []
        self.collections: dict[int, dict[int, bytes]] = {}
        self.extents: list[tuple[int, int]] = []

    def document(self) -> Hdf5Listing:
        head = self.extent(0, 96)
        end, driver = struct.unpack_from("<QQ", head, 40)
        _require(head.startswith(_SUPERBLOCK) and driver == _UNDEFINED and end <= self.end)
        self.end = end
        name, root, *rest = _SYMBOL.unpack_from(head, 56)
        _require(name == 0)
        names = {root: ""}
        stack = [("", root, self.messages(root), 0, tuple(rest))]
        while stack:
            path, address, messages, depth, cache = stack.pop()
            _require(depth <= self.most.hdf5_depth)
            _require({message.type for message in messages} <= _IN_GROUPS)
            table = _only(messages, _TABLE)
            attributes = self.attributes(messages)
            self.groups.append({"path": path, "address": address, "ordered": False, "attributes": attributes})
            below = []
            tree, heap = struct.unpack("<QQ", table[:16])
            for name, child, cached in self.members(tree, heap, cache):
                full = f"{path}/{name}" if path else name
                if child in names:
                    self.same.append((full, names[child]))
                    continue
                names[child] = full
                messages = self.messages(child)
                if any(message.type == _LAYOUT for message in messages):
                    _require(cached[0] == _PLAIN)
                    self.datasets.append(self.dataset(full, child, messages))
                else:
                    below.append((full, child, messages, depth + 1, cached))
            stack += reversed(below)
        ordered = sorted(self.extents)
        _require(all(stop <= start for (_, stop), (start, _) in pairwise(ordered)))
        return {"groups": self.groups, "datasets": self.datasets, "same": self.same, "notes": []}

    def extent(self, offset: int, length: int) -> bytes:
        """Return bytes of the file, all of them inside it; nothing else may occupy them."""
        self.total += length
        _require(offset + length <= self.end and self.total <= self.end)
        self.extents.append((offset, offset + length))
        data = self._read(offset, length)
        _require(len(data) == length)
        return data

    def messages(self, address: int) -> list[_Message]:
        """Return the messages of the object header at an address."""
        version, _, count, _, size, _ = struct.unpack("<BBHIII", self.extent(address, 16))
        _require(version == 1)
        blocks, messages = [(address + 16, size)], list[_Message]()
        for number, (start, length) in enumerate(blocks):
            _require(number <= count and 8 <= length <= self.most.json_bytes)
            data, at = self.extent(start, length), 0
            while at < length:
                kind, size, flags, zero, padding = struct.unpack_from("<HHBBH", data, at)
                _require(flags in _FLAGS and not (zero or padding or size % 8))
                _require(at + 8 + size <= length)
                messages.append(_Message(kind, data[at + 8 : at + 8 + size]))
                _require(kind != _MODIFIED or messages[-1].data[:4] == b"\1\0\0\0")
                if kind == _CONTINUATION:
                    blocks.append(struct.unpack("<QQ", messages[-1].data[:16]))
                at += 8 + size
        _require(len(messages) == count)
        return messages

    def members(
        self, tree: int, heap: int, cached: tuple[int, ...]
    ) -> list[tuple[str, int, tuple[int, ...]]]:
        """Return name, address and cache of a group's links, which are sorted by name."""
        _require(cached[0] == _PLAIN or (cached[0] == _GROUP and cached[2:] == (tree, heap)))
        names, links, last = self.heap(heap), list[tuple[str, int, tuple[int, ...]]](), b""
        for offset, address, *cache in self.symbols(tree):
            end = names.find(b"\0", offset)
            name = names[offset:end]
            _require(offset < end and last < name and b"/" not in name and name not in (b".", b".."))
            self.links += 1
            _require(self.links < self.most.hdf5_objects and cache[0] in (_PLAIN, _GROUP))
            links.append((name.decode(), address, tuple(cache)))
            last = name
        return links

    def heap(self, address: int) -> bytes:
        """Return the names in a local heap; check its list of free blocks, as the library does."""
        signature, version, size, free, start = struct.unpack("<4sIQQQ", self.extent(address, 32))
        _require(signature == b"HEAP" and version == 0 and size <= self.most.json_bytes)
        data, blocks = self.extent(start, size), 0
        _require(data[:1] == b"\0")  # the empty name, before all others
        while free != _END_OF_FREE_LIST:
            _require(0 < free <= size - 16 and free % 8 == 0 and blocks <= size // 16)
            after, length = struct.unpack_from("<QQ", data, free)
            _require(length <= size - free)
            free, blocks = after, blocks + 1
        return data

    def symbols(self, root: int) -> Iterator[tuple[int, ...]]:
        """Yield the entries of a group's B-tree.

        Its keys, by which the library searches, are the names that end each child, after the empty one.
        """
        level: int | None = None
        nodes, ends = [root], list[int | None]([None])
        while level != 0:
            children, keys, last = list[int](), list[int](), 0
            for address, end in zip(nodes, ends, strict=True):
                signature, kind, depth, count, left, right = struct.unpack(
                    "<4sBBHQQ", self.extent(address, 24)
                )
                _require(signature == b"TREE" and kind == 0 and count <= _TREE_ENTRIES)
                _require(depth == level - 1 if level is not None else left == right == _UNDEFINED)
                _require((count or address == root) and depth < _TREE_DEPTH)
                # The library reads the whole node, used or not.
                fields = struct.unpack(f"<{2 * _TREE_ENTRIES + 1}Q", self.extent(address + 24, _NODE))
                _require(fields[0] == last and end in (None, fields[2 * count]))
                children += fields[1 : 2 * count : 2]
                keys += fields[2 : 2 * count + 1 : 2]
                last = fields[2 * count]
                _require(len(children) < self.most.hdf5_objects)
            level, nodes, ends = depth, children, [*keys]
        for address, end in zip(nodes, ends, strict=True):
            data = self.extent(address, 8 + _LEAF_ENTRIES * _SYMBOL.size)
            signature, version, zero, count = struct.unpack_from("<4sBBH", data)
            _require(signature == b"SNOD" and version == 1 and not zero and 0 < count <= _LEAF_ENTRIES)
            symbols = [_SYMBOL.unpack_from(data, 8 + n * _SYMBOL.size) for n in range(count)]
            _require(symbols[-1][0] == end)
            yield from symbols

    def dataset(self, path: str, address: int, messages: list[_Message]) -> Hdf5DatasetRecord:
        """Return the entry of a dataset of numbers whose bytes are in one piece."""
        _require({message.type for message in messages} <= _IN_DATASETS)
        shape = _extents(_only(messages, _SPACE))
        dtype = _number_name(_only(messages, _TYPE))
        width = BY_NAME[dtype].itemsize
        nbytes = math.prod(shape) * width
        for message in messages:
            if message.type == _FILL:
                _require_fill(message.data, width)
            _require(message.type != _OLD_FILL or struct.unpack("<I", message.data[:4])[0] in (0, width))
        entry = Hdf5DatasetRecord(path=path, address=address, shape=list(shape), dtype=dtype, big=False)
        layout = _only(messages, _LAYOUT)
        version, kind = layout[:2]
        _require(version == 3 and kind in (_COMPACT, _CONTIGUOUS) and nbytes)
        if kind == _COMPACT:
            (stored,) = struct.unpack_from("<H", layout, 2)
            _require(stored == nbytes and len(layout) >= 4 + stored)
            inline = base64.b64encode(layout[4 : 4 + stored]).decode()
            return Hdf5DatasetRecord(**entry, stored=stored, inline=inline)
        offset, stored = struct.unpack_from("<QQ", layout, 2)
        _require(stored == nbytes and offset + stored <= self.end)
        self.extents.append((offset, offset + stored))
        return Hdf5DatasetRecord(**entry, stored=stored, offset=offset)

    def attributes(self, messages: list[_Message]) -> dict[str, Any]:
        """Return the attributes that Keras writes, as text or lists of text."""
        values = dict(self.attribute(message.data) for message in messages if message.type == _ATTRIBUTE)
        _require(len(values) == sum(message.type == _ATTRIBUTE for message in messages))
        names = [name for name in TEXT_ATTRIBUTES if name in values]
        for stem in NAME_ATTRIBUTES:
            names += [stem] if stem in values else []
            number = 0
            while f"{stem}{number}" in values:
                names.append(f"{stem}{number}")
                number += 1
        return {name: self.text(*values[name]) for name in names}

    def attribute(self, data: bytes) -> tuple[str, tuple[bytes, Shape, bytes]]:
        """Return an attribute's name, and its type, shape and bytes."""
        version, zero, *sizes = struct.unpack_from("<BBHHH", data)
        _require(version == 1 and not zero and all(sizes))
        parts, at = [], 8
        for size in sizes:
            parts.append(data[at : at + size])
            at += size + -size % 8
        _require(at <= len(data))
        name, kind, space = parts
        _require(name.find(b"\0") == len(name) - 1)
        _require(kind in _VARIABLE_TEXT or (kind[:4] in _FIXED_TEXT and len(kind) == 8) or _number_name(kind))
        shape = _extents(space)
        (width,) = struct.unpack_from("<I", kind, 4)
        nbytes = width * math.prod(shape)
        _require(nbytes <= len(data) - at)
        return name[:-1].decode(), (kind, shape, data[at : at + nbytes])

    def text(self, kind: bytes, shape: Shape, data: bytes) -> Any:
        """Return an attribute's text, or list of text."""
        _require(len(shape) <= 1 and (data or shape == (0,)))
        if shape == (0,):
            return []  # Keras's names of no weights are numbers
        width = len(data) // math.prod(shape)
        values = [data[at : at + width] for at in range(0, len(data), width)]
        if kind in _VARIABLE_TEXT:
            texts = [self.variable_text(*struct.unpack("<IQI", value)) for value in values]
        else:
            _require(kind[:4] in _FIXED_TEXT)
            texts = [value.rstrip(b"\0") for value in values]
        decoded = [text.decode() for text in texts]
        return decoded if shape else decoded[0]

    def variable_text(self, length: int, address: int, number: int) -> bytes:
        """Return the text of an object in a global heap."""
        if address not in self.collections:
            self.collections[address] = self.collection(address)
        data = self.collections[address].get(number, b"")
        _require(length == len(data) and length and b"\0" not in data)
        return data

    def collection(self, address: int) -> dict[int, bytes]:
        """Return the objects of a collection of the global heap by number."""
        signature, version, size = struct.unpack("<4sIQ", self.extent(address, 16))
        _require(signature == b"GCOL" and version == 1 and 4096 <= size <= self.most.json_bytes)
        size -= 16
        data, at, objects = self.extent(address + 16, size), 0, dict[int, bytes]()
        while at + 16 <= size:
            number, _, zero, length = struct.unpack_from("<HHIQ", data, at)
            if number == 0:  # free space, which includes its header
                _require(length == size - at)
                break
            _require(not zero and number not in objects and at + 16 + length <= size)
            objects[number] = data[at + 16 : at + 16 + length]
            at += 16 + length + -length % 8
        return objects


def _only(messages: list[_Message], kind: int) -> bytes:
    """Return the bytes of the one message of a type."""
    data = [message.data for message in messages if message.type == kind]
    _require(len(data) == 1)
    return data[0]


def _extents(data: bytes) -> Shape:
    """Return the shape of a dataspace that cannot grow."""
    version, rank, bounded, *zero = struct.unpack_from("<BBBBI", data)
    _require(version == 1 and rank <= _HIGHEST_RANK and bounded in (0, 1) and not any(zero))
    shape = struct.unpack_from(f"<{rank}Q", data, 8)
    if bounded:
        _require(struct.unpack_from(f"<{rank}Q", data, 8 + 8 * rank) == shape)
    _require(math.prod(extent or 1 for extent in shape) < 1 << 63)
    return shape


def _number_name(data: bytes) -> str:
    for encoding, name in _NUMBERS.items():
        if data.startswith(encoding):
            return name
    raise OtherFormError


def _require_fill(data: bytes, width: int) -> None:
    version, allocated, written, defined = data[:4]
    _require(version == 2 and 1 <= allocated <= 3 and written <= 2 and defined <= 1)
    if defined:
        (size,) = struct.unpack_from("<I", data, 4)
        _require(size in (0, width) and len(data) >= 8 + size)
