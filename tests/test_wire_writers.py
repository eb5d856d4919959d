"""Sorted tables and protobuf fields as they are written: read back, and compared with TensorFlow's own."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.encodings import protobuf, sstable, write_table
from ckpttool.encodings.sstable import BLOCK_BYTES
from tests.conftest import CORPUS, SAMPLES

# One of the corpus has compressed blocks, which TensorFlow wrote for a while.
INDEXES = [
    path
    for path in sorted([*SAMPLES.rglob("*.index"), *CORPUS.glob("tf/**/*.index")])
    if "half_plus_two_tf2_cpu" not in str(path)
]

# Few letters, so that keys share beginnings; the highest byte has no successor.
keys = st.lists(st.sampled_from([b"a", b"b", b"/", b"\0", b"\xff"]), max_size=12).map(b"".join)
tables = st.dictionaries(keys, st.binary(max_size=200), max_size=80)


def table(entries: list[tuple[bytes, bytes]], block_bytes: int = BLOCK_BYTES) -> bytes:
    stream = io.BytesIO()
    assert write_table(entries, stream, block_bytes) == len(stream.getvalue())
    return stream.getvalue()


def bounds_of(data: bytes) -> list[bytes]:
    """The keys of the index block, in which no entry shares anything with the one before."""
    _, (at, size) = sstable.parse_footer(data)
    stop = at + size
    stop -= 4 + 4 * int.from_bytes(data[stop - 4 : stop], "little")
    bounds = []
    while at < stop:
        shared, unshared, length = data[at : at + 3]
        assert not shared
        bounds.append(data[at + 3 : at + 3 + unshared])
        at += 3 + unshared + length
    return bounds


@given(tables, st.sampled_from([16, 64, 1000, BLOCK_BYTES]))
def test_what_is_written_is_read(entries: dict[bytes, bytes], block_bytes: int) -> None:
    ascending = sorted(entries.items())
    assert sstable.read_table(table(ascending, block_bytes)) == ascending


def test_an_empty_table() -> None:
    # The metaindex and the index block have no entry and one restart point each.
    data = table([])
    block = bytes.fromhex("0000000001000000 00 c0f2a1b0")
    assert data == block + block + bytes([0, 8, 13, 8]).ljust(40, b"\0") + sstable.MAGIC
    assert sstable.read_table(data) == []


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        ([b"abc", b"abq"], [b"abd", b"b"]),  # a byte between the two
        ([b"abc", b"abd"], [b"abc", b"b"]),  # none between
        ([b"ab", b"abc"], [b"ab", b"b"]),  # one begins the other
        ([b"\xff\xff", b"\xff\xff\xff"], [b"\xff\xff", b"\xff\xff\xff"]),  # no successor
        ([b"", b"b"], [b"", b"c"]),
    ],
)
def test_the_index_has_short_keys_between_the_blocks(keys: list[bytes], bounds: list[bytes]) -> None:
    data = table([(key, b"v" * 100) for key in keys], block_bytes=64)
    assert bounds_of(data) == bounds


def test_a_large_entry_has_a_block_of_its_own() -> None:
    entries = [(b"a", b"1"), (b"b", b"2" * 200), (b"c", b"3")]
    data = table(entries, block_bytes=100)
    assert len(bounds_of(data)) == 3
    assert sstable.read_table(data) == entries


@pytest.mark.parametrize("index", INDEXES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_tensorflows_own_indexes_come_out_byte_for_byte(index: Path) -> None:
    data = index.read_bytes()
    assert table(sstable.read_table(data)) == data


def test_a_table_of_several_blocks() -> None:
    entries = sorted((f"layer/{n}/kernel".encode(), bytes(60)) for n in range(10_000))
    data = table(entries)
    assert len(bounds_of(data)) == 3
    assert sstable.read_table(data) == entries


@given(st.integers(1, (1 << 29) - 1), st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=300))
def test_fields(field: int, number: int, data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    message = (
        protobuf.encode_int(field, number)
        + protobuf.encode_message(field, data)
        + protobuf.encode_text(field, text)
    )
    fields = protobuf.parse_fields(message)
    expected = ([number] if number else []) + [data] + ([data] if data else [])
    assert [number for number, _ in fields] == [field] * len(expected)
    values = [protobuf.as_int(value) if isinstance(value, int) else value for _, value in fields]
    assert values == expected


def test_defaults_are_left_out_and_messages_are_not() -> None:
    assert protobuf.encode_int(1, 0) + protobuf.encode_text(2, "") + protobuf.encode_fixed32(3, 0) == b""
    assert protobuf.encode_message(4, b"") == b"\x22\x00"
    assert protobuf.encode_fixed32(6, 0xA282EAD8) == bytes.fromhex("35d8ea82a2")
