"""Small tensor bundles with one thing about them that is odd (tests/bundle_writer.py writes the bytes)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.bundle_writer import MAGIC, entry, graph, header, masked, shape, strings, table, varint

FLOATS = bytes.fromhex("00000000 0000803f 00000040 00004040")  # 0, 1, 2, 3 as float32
CRC = masked(FLOATS)
GOOD = entry(1, shape(4), 0, 16, CRC)
SHARD = "x.data-00000-of-00001"
GRAPH = b"_CHECKPOINTABLE_OBJECT_GRAPH"

Make = Callable[[Path], Path]


def index_of(entries: Mapping[bytes, bytes], head: bytes | None = None) -> bytes:
    """An index with these entries behind the header."""
    return table(sorted({b"": header() if head is None else head, **entries}.items()))


def file(index: bytes, data: bytes = FLOATS, name: str = "x.index") -> Make:
    """Return the maker of a bundle from an index and a shard; `name` is what the commands get of it."""

    def make(folder: Path) -> Path:
        (folder / SHARD).write_bytes(data)
        (folder / "x.index").write_bytes(index)
        return folder / name

    return make


def listed(bad: bytes, data: bytes = FLOATS) -> Make:
    """Return the maker of a bundle whose only tensor `w` has this entry."""
    return file(index_of({b"w": bad}), data)


def footed(meta: bytes, index: bytes) -> bytes:
    """A sound index with other handles in its footer."""
    return index_of({b"w": GOOD})[:-48] + (meta + index).ljust(40, b"\0") + MAGIC


def handle(offset: int, size: int) -> bytes:
    """The place of a block."""
    return varint(offset) + varint(size)


def texts(count: int, stored: bytes) -> Make:
    """Return the maker of a bundle whose only tensor is `count` strings in these bytes."""
    return listed(entry(7, shape(count), 0, len(stored), masked(stored)), stored)


def linked(*nodes: bytes, values: Mapping[str, bytes] | None = None) -> Make:
    """Return the maker of a bundle with an object graph of these nodes, and float32 vectors by key."""
    return stored(graph(*nodes), values or {})


def stored(message: bytes, values: Mapping[str, bytes]) -> Make:
    """Return the maker of a bundle with this text for an object graph."""
    data = bytearray()
    entries = {}
    for key, value in values.items():
        entries[key.encode()] = entry(1, shape(len(value) // 4), len(data), len(value), masked(value))
        data += value
    text, crc = strings(message)
    entries[GRAPH] = entry(7, b"", len(data), len(text), crc)
    return file(index_of(entries), bytes(data + text))
