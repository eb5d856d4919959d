"""The protobuf wire format and varints: laws, limits, and what damaged messages do."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import CkpttoolError, FormatError, TruncatedError
from ckpttool.wire import protobuf, varint

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))

NUMBERS = st.integers(1, (1 << 29) - 1)
VALUES = st.one_of(st.integers(0, (1 << 64) - 1), st.binary(max_size=300))


@given(st.integers(0, (1 << 64) - 1), st.binary(max_size=3))
def test_varint_round_trip(value: int, rest: bytes) -> None:
    data = varint.write(value)
    assert data == W["varint"](value)
    assert varint.read(data + rest, 0, len(data + rest)) == (value, len(data))


@pytest.mark.parametrize("data", [b"\x80" * 10, b"\x80" * 11, b"\xff" * 10 + b"\x01"])
def test_varint_too_long(data: bytes) -> None:
    with pytest.raises(FormatError, match="longer than 10 bytes"):
        varint.read(data, 0, len(data))


def test_varint_of_more_than_64_bits() -> None:
    with pytest.raises(FormatError, match="64 bits"):
        varint.read(b"\xff" * 9 + b"\x02", 0, 10)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9])
def test_varint_cut_off(data: bytes) -> None:
    with pytest.raises(TruncatedError):
        varint.read(data, 0, len(data))


def test_varint_respects_stop() -> None:
    with pytest.raises(TruncatedError):
        varint.read(b"\x80\x01", 0, 1)


@pytest.mark.parametrize(("stored", "value"), [((1 << 64) - 1, -1), (1 << 63, -(1 << 63)), (5, 5)])
def test_signed(stored: int, value: int) -> None:
    assert varint.signed(stored) == value


@given(st.lists(st.tuples(NUMBERS, VALUES), max_size=20))
def test_fields_round_trip(fields: list[tuple[int, int | bytes]]) -> None:
    data = b"".join(W["field"](number, value) for number, value in fields)
    assert protobuf.fields(data) == fields
    seen = [(n, bytes(v) if isinstance(v, memoryview) else v) for n, v in protobuf.fields(memoryview(data))]
    assert seen == fields


def test_fixed_widths() -> None:
    data = bytes([1 << 3 | 5, 1, 2, 0, 0, 2 << 3 | 1, 7, 0, 0, 0, 0, 0, 0, 1])
    assert protobuf.fields(data) == [(1, 0x201), (2, (1 << 56) + 7)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x01", "impossible number"),
        (b"\x0b\x0c", "wire type"),  # a group
        (b"\x0e\x00", "wire type"),
        (b"\x0f\x00", "wire type"),
        (b"\x0a\x05abc", "longer than its message"),
        (b"\x0d\x01", "longer than its message"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "longer than its message"),
        (b"\x08", "cut off"),
        (b"\x0a", "cut off"),
        (b"\x88", "cut off"),
        (b"\x88\x80\x80\x80\x80\x01\x00", "impossible number"),
    ],
)
def test_broken_messages(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        protobuf.fields(data)


def test_nesting_costs_nothing() -> None:
    data = b""
    for _ in range(5000):
        data = W["field"](1, data)
    assert len(protobuf.fields(data)) == 1
    with pytest.raises(FormatError, match="wire type"):
        protobuf.fields(b"\x0b" * 5000 + b"\x0c" * 5000)


def test_kinds_are_checked() -> None:
    assert protobuf.number((1 << 64) - 4) == -4
    assert protobuf.text(b"a\xffb") == "a\udcffb"
    for call, value in ((protobuf.number, b"x"), (protobuf.message, 1), (protobuf.text, 1)):
        with pytest.raises(FormatError):
            call(value)


@given(st.binary(max_size=200))
def test_any_bytes_give_fields_or_our_error(data: bytes) -> None:
    try:
        protobuf.fields(data)
    except CkpttoolError:
        return


def test_bit_flips_stay_inside_the_family() -> None:
    fields = [(1, 300), (2, b"x" * 200), (300, b"abc"), (4, (1 << 64) - 1)]
    seed = b"".join(W["field"](n, v) for n, v in fields)
    dice = random.Random(1)
    for _ in range(2000):
        data = bytearray(seed)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        test_any_bytes_give_fields_or_our_error.hypothesis.inner_test(bytes(data))
