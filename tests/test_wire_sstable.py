"""Sorted string tables: laws over tables that a second writer makes, and every rule that can be broken."""

from __future__ import annotations

import contextlib
import random
import runpy
import tracemalloc
from pathlib import Path

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import (
    ChecksumError,
    CkpttoolError,
    FormatError,
    LimitError,
    TruncatedError,
    UnsupportedError,
    source,
)
from ckpttool.encodings import sstable
from tests.golden_texts import Golden

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))
block, framed, table, table_of, varint = (W[n] for n in ("block", "framed", "table", "table_of", "varint"))

ENTRIES = [(b"key%05d" % n, b"value %d" % n * (n % 5)) for n in range(200)]


@given(
    st.dictionaries(st.binary(max_size=40), st.binary(max_size=40), min_size=1), st.integers(1, 20), st.data()
)
def test_round_trip(entries, interval, data) -> None:
    ordered = sorted(entries.items())
    per_block = data.draw(st.integers(1, len(ordered)))
    assert sstable.read_table(table(ordered, per_block, interval)) == ordered


def test_empty_table() -> None:
    assert sstable.read_table(table([])) == []


def test_long_keys_and_values() -> None:
    entries = [(b"a" * 300, b"x" * 100_000), (b"a" * 300 + b"b" * 200, b"y" * 300)]
    assert sstable.read_table(table(entries)) == entries


def test_shortened_index_keys_need_not_exist() -> None:
    blocks = [block(ENTRIES[:100]), block(ENTRIES[100:])]
    assert sstable.read_table(table_of(blocks, [b"key00099zz", b"l"])) == ENTRIES


@pytest.mark.parametrize("cut", [0, 1, 47, 48, 100, -1, -8, -48])
def test_truncation(cut: int) -> None:
    data = table(ENTRIES)
    with pytest.raises(FormatError):
        sstable.read_table(data[:cut])


@pytest.mark.parametrize(
    ("contents", "error"),
    [
        pytest.param(block([(b"b", b""), (b"a", b"")]), FormatError, id="out-of-order"),
        pytest.param(block([(b"a", b""), (b"a", b"x")]), FormatError, id="twice"),
        pytest.param(block([(b"a", b"")], restarts=[]), FormatError, id="restart-points"),
        pytest.param(block([(b"a", b"")], restarts=[0, 1]), FormatError, id="restart-inside-a-key"),
        pytest.param(block([(b"a", b"")], restarts=[0, 0]), FormatError, id="out-of-order-2"),
        pytest.param(block([(b"a", b"")], restarts=[4]), FormatError, id="out-of-order-3"),
        pytest.param(block([(b"a", b"")], restarts=[0, 2**32 - 1]), FormatError, id="restart-inside-a-key-2"),
        pytest.param(b"\0" * 8 + (2**31 - 1).to_bytes(4, "little"), FormatError, id="restart-points-2"),
        pytest.param(b"\0" * 8 + b"\xff" * 4, FormatError, id="restart-points-3"),
        pytest.param(b"abc", TruncatedError, id="too-short"),
        pytest.param(b"\x01\x01\x00a" + b"\0" * 4 + b"\x01\0\0\0", FormatError, id="shared-prefix"),
        pytest.param(b"\x00\x01\x09a" + b"\0" * 4 + b"\x01\0\0\0", TruncatedError, id="beyond-the-block"),
        pytest.param(
            b"\x00" + varint(1 << 63) + b"\x00a" + b"\0" * 4 + b"\x01\0\0\0",
            TruncatedError,
            id="beyond-the-block-2",
        ),
        pytest.param(b"\x00\x80" + b"\0" * 4 + b"\x01\0\0\0", TruncatedError, id="cut-off"),
        pytest.param(b"\x80" * 12 + b"\0" * 4 + b"\x01\0\0\0", FormatError, id="long-varint"),
    ],
)
def test_broken_blocks(contents: bytes, error: type[Exception], golden: Golden) -> None:
    with pytest.raises(error) as caught:
        sstable.read_table(table_of([contents], [b"z"]))
    golden(caught.value)
    assert caught.value.offset is not None


def test_unknown_compression_is_named(golden: Golden) -> None:
    with pytest.raises(UnsupportedError) as caught:
        sstable.read_table(table_of([block(ENTRIES)], [b"z"], kind=9))
    golden(caught.value)


def snappy(contents: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(contents))


def test_snappy_blocks() -> None:
    blocks = [block(ENTRIES[:100]), block(ENTRIES[100:])]
    compressed = [snappy(contents) for contents in blocks]
    assert sum(map(len, compressed)) < sum(map(len, blocks))
    assert sstable.read_table(table_of(compressed, [b"key00099", b"z"], kind=1)) == ENTRIES


def test_a_snappy_block_of_literals_and_copies() -> None:
    # Byte by byte from format_description.txt of github.com/google/snappy: the length; a literal of 5 bytes
    # (tag 4 << 2); a copy with an offset of one byte (tag 1, length 4 + 4) that overlaps what it writes; a
    # literal of 8 bytes.
    contents = varint(0) + varint(1) + varint(9) + b"k" + b"a" * 9 + b"\0" * 4 + b"\x01\0\0\0"
    assert len(contents) == 21
    raw = varint(21) + b"\x10" + contents[:5] + bytes([1 | 4 << 2, 1]) + b"\x1c" + contents[13:]
    assert sstable.read_table(table_of([raw], [b"z"], kind=1)) == [(b"k", b"a" * 9)]


@pytest.mark.parametrize(
    ("stored", "error"),
    [
        pytest.param(b"", TruncatedError, id="varint"),
        pytest.param(b"\xff" * 11, FormatError, id="varint-2"),
        pytest.param(b"\x80" * 3, TruncatedError, id="varint-3"),
        pytest.param(varint(100) + b"\0" * 8, FormatError, id="damaged"),
        pytest.param(snappy(block(ENTRIES))[:-1], FormatError, id="damaged-2"),
        pytest.param(snappy(block(ENTRIES)) + b"\0", FormatError, id="damaged-3"),
        pytest.param(varint(7) + snappy(block(ENTRIES))[2:], FormatError, id="damaged-4"),
        pytest.param(varint(1 << 40) + snappy(block(ENTRIES))[2:], FormatError, id="declared-too-large"),
        pytest.param(varint((1 << 64) - 1) + b"\0" * 20, FormatError, id="declared-too-large-2"),
        pytest.param(block(ENTRIES), FormatError, id="compressed"),
        pytest.param(b"\0", TruncatedError, id="too-short"),
        pytest.param(snappy(b"\0" * 8 + b"\xff" * 4), FormatError, id="restart-points"),
        pytest.param(snappy(b"\0" * (65 << 20)), LimitError, id="too-large"),
    ],
)
def test_broken_snappy_blocks(stored: bytes, error: type[Exception], golden: Golden) -> None:
    with pytest.raises(error) as caught:
        sstable.read_table(_mixed(stored))
    golden(caught.value)
    assert caught.value.offset == len(framed(block(ENTRIES[:1])))


def _mixed(stored: bytes) -> bytes:
    """A table of a plain block and one with this compressed content."""
    first, second = framed(block(ENTRIES[:1])), framed(stored, 1)
    index = block(
        [
            (b"key00000", varint(0) + varint(len(first) - 5)),
            (b"z", varint(len(first)) + varint(len(second) - 5)),
        ],
        interval=1,
    )
    data = first + second
    handles = varint(len(data)) + varint(8)
    data += framed(block([]))
    handles += varint(len(data)) + varint(len(index))
    return data + framed(index) + handles.ljust(40, b"\0") + W["MAGIC"]


def test_what_a_snappy_block_says_is_judged_before_memory_is_taken(golden: Golden) -> None:
    tracemalloc.start()
    with pytest.raises(LimitError) as caught:
        sstable.read_table(_mixed(varint(1 << 30) + b"\0" * (50 << 20)))
    golden(caught.value)
    with pytest.raises(FormatError) as caught:
        sstable.read_table(_mixed(varint(1 << 62) + b"\0" * 1000))
    golden(caught.value)
    assert tracemalloc.get_traced_memory()[1] < 300 << 20
    tracemalloc.stop()


def test_damage_to_snappy_with_its_checksum_repaired() -> None:
    contents = snappy(block(ENTRIES[:20]))
    dice = random.Random(5)
    for _ in range(1000):
        damaged = bytearray(contents)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        with contextlib.suppress(CkpttoolError):
            sstable.read_table(table_of([bytes(damaged)], [b"\xff" * 20], kind=1))
    for cut in range(len(contents)):
        with pytest.raises(CkpttoolError):
            sstable.read_table(table_of([contents[:cut]], [b"\xff" * 20], kind=1))


def test_a_block_that_is_named_again_and_again(golden: Golden) -> None:
    # An empty block is between any two keys; without a rule of its own it would be read a thousand times.
    empty = framed(block([], restarts=list(range(1000))))
    index = block([(b"%04d" % n, varint(0) + varint(len(empty) - 5)) for n in range(1000)], interval=1)
    data = empty
    handles = varint(len(data)) + varint(8)
    data += framed(block([]))
    handles += varint(len(data)) + varint(len(index))
    with pytest.raises(FormatError) as caught:
        sstable.read_table(data + framed(index) + handles.ljust(40, b"\0") + W["MAGIC"])
    golden(caught.value)


def test_blocks_out_of_order_or_twice(golden: Golden) -> None:
    first, second = block(ENTRIES[:100]), block(ENTRIES[100:])
    for blocks, bounds in (
        ([second, first], [b"key00099", b"z"]),
        ([first, first], [b"key00099", b"z"]),
        ([first, second], [b"key00050", b"z"]),
    ):
        with pytest.raises(FormatError) as caught:
            sstable.read_table(table_of(blocks, bounds))
        golden(caught.value)


def test_offsets_count_from_the_file() -> None:
    good = block(ENTRIES[:100])
    with pytest.raises(FormatError) as caught:
        sstable.read_table(table_of([good, block([(b"z", b""), (b"y", b"")])], [b"k~", b"z"]))
    assert caught.value.offset == len(good) + 5 + 4


@pytest.mark.parametrize(
    "handles",
    [
        varint(0) + varint(1 << 62),
        varint(1 << 63) + varint(8),
        varint((1 << 64) - 8) + varint(16),
        varint(64 << 30) + varint(64 << 30),
        b"\x80" * 20,
    ],
)
def test_handles_beyond_the_file(handles: bytes) -> None:
    footer = (handles + handles).ljust(40, b"\0")[:40] + W["MAGIC"]
    with pytest.raises(FormatError):
        sstable.read_table(framed(block([])) + footer)


def test_prefix_bomb_is_refused(golden: Golden) -> None:
    # 200,000 entries of 6 bytes, each of which stands for a key of more than 50,000.
    out = bytearray(varint(0) + varint(50_000) + varint(0) + b"a" * 50_000)
    for number in range(200_000):
        out += varint(50_000 + number) + b"\x01\x00" + b"b"
    with pytest.raises(FormatError) as caught:
        sstable.read_table(table_of([bytes(out) + b"\0" * 4 + b"\x01\0\0\0"], [b"z"]))
    golden(caught.value)


def test_every_single_bit_flip() -> None:
    data = table(ENTRIES[:20], per_block=7)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read = sstable.read_table(bytes(damaged))
        except CkpttoolError:
            continue
        assert read == ENTRIES[:20]  # the footer's padding is the only place that nothing guards
        assert len(data) - 48 <= bit // 8 < len(data) - 8


def test_damage_with_its_checksum_repaired() -> None:
    contents = block(ENTRIES[:20])
    dice = random.Random(2)
    for _ in range(2000):
        damaged = bytearray(contents)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.choice([0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)])
        try:
            sstable.read_table(table_of([bytes(damaged)], [b"\xff" * 20]))
        except CkpttoolError:
            continue


def test_checksum_names_the_block() -> None:
    data = bytearray(table(ENTRIES, per_block=100))
    data[-200] ^= 1
    with pytest.raises(ChecksumError) as caught:
        sstable.read_table(bytes(data))
    assert caught.value.offset


@given(st.integers(0, 2**32 - 1))
def test_mask_is_undone(value: int) -> None:
    assert source.unmask_crc(source.mask_crc(value)) == value


def test_known_checksums() -> None:
    # RFC 3720 B.4: 32 bytes of zeros; and the value that TensorFlow stores for no bytes at all.
    assert source.crc32c(b"\0" * 32) == 0x8A9136AA
    assert source.mask_crc(source.crc32c(b"")) == 0xA282EAD8
    assert source.crc32c(b"56789", source.crc32c(b"1234")) == 0xE3069283
