"""Large reads: the same bytes and the same errors as small ones, in pieces; checksums by any library."""

from __future__ import annotations

import os
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import (
    ChangedError,
    Checksum,
    ChecksumError,
    File,
    Inline,
    Source,
    Span,
    StridedView,
    TruncatedError,
    crc32,
    crc32c,
    filesystem,
    iter_pieces,
    source,
)
from ckpttool.core.source import LARGE
from tests.golden_texts import Golden

BEFORE = 77


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(0).bytes(LARGE + 12_345)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> File:
    path = tmp_path / "large"
    path.write_bytes(b"x" * BEFORE + data)
    return File.stamp(str(path))


@pytest.mark.parametrize("kind", ["crc32", "crc32c"])
def test_a_large_span_is_read_and_checked(file: File, data: bytes, kind: str) -> None:
    right = zlib.crc32(data) if kind == "crc32" else crc32c(data)
    found = Span(file, BEFORE, len(data), Checksum(kind, right)).read()
    assert bytes(found) == data
    assert memoryview(found).readonly
    with pytest.raises(ChecksumError) as error:
        Span(file, BEFORE, len(data), Checksum(kind, right ^ 1)).read()
    assert (error.value.file, error.value.offset) == (file.path, BEFORE)


@pytest.mark.parametrize("short", [0, 1, 300_000])
def test_a_large_span_without_checksum(file: File, data: bytes, short: int) -> None:
    length = len(data) - short
    assert bytes(Span(file, BEFORE, length).read()) == data[:length]


def test_a_file_that_changed_is_not_read(file: File, data: bytes, golden: Golden) -> None:
    with pytest.raises(TruncatedError):
        Span(file, BEFORE + 1, len(data)).read()
    pieces = file.read_large(BEFORE, len(data))
    next(pieces)
    os.truncate(file.path, BEFORE + LARGE // 2)
    with pytest.raises(ChangedError) as caught:
        list(pieces)
    golden(caught.value)
    with pytest.raises(ChangedError) as caught:
        Span(file, BEFORE, len(data)).read()
    golden(caught.value)


@pytest.mark.parametrize("place", ["local", "elsewhere"])
def test_bytes_beyond_the_end_are_given_no_room(
    file: File, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "elsewhere":
        monkeypatch.setitem(filesystem._MOUNTED, file.path, object())
    with pytest.raises(TruncatedError):
        Span(file, 0, 1 << 62).read()
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(TruncatedError):
        next(file.read_large(0, 1 << 62))


@pytest.mark.parametrize("size", [10, 70_000, LARGE])
def test_a_checksum_does_not_depend_on_who_holds_the_bytes(data: bytes, size: int) -> None:
    right = crc32c(data[:size])
    assert crc32c(memoryview(data)[:size]) == right
    assert crc32c(bytearray(data[:size])) == right
    assert crc32c(memoryview(bytearray(data[:size]))[size // 3 :], crc32c(data[: size // 3])) == right


@pytest.mark.parametrize("installed", [True, False])
def test_the_zip_checksum_is_the_same_with_and_without_the_faster_library(
    data: bytes, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source._large_crc32.cache_clear()
    if not installed:
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
    else:
        pytest.importorskip("zlib_ng")
    for size in (0, 1, 65_535, 65_536, LARGE):
        assert crc32(memoryview(data)[:size]) == zlib.crc32(data[:size])
        assert crc32(memoryview(data)[size // 3 : size], crc32(data[: size // 3])) == zlib.crc32(data[:size])
    source._large_crc32.cache_clear()


def test_pieces_of_any_source_are_its_bytes(file: File, data: bytes) -> None:
    span = Span(file, BEFORE, len(data), Checksum("crc32", zlib.crc32(data)))
    cut = Span(file, BEFORE, LARGE)
    for source_ in (
        span,
        Inline(data),
        Span(file, BEFORE, 100),
        StridedView(cut, 4, (LARGE // 4,), (1,), 0),
        StridedView(cut, 4, (LARGE // 4 - 1,), (1,), 1),
        StridedView(cut, 4, (1024, LARGE // 4096), (1, 1024), 0),
        StridedView(cut, 4, (LARGE // 4,), (1,), 0, 4),
    ):
        assert b"".join(map(bytes, iter_pieces(source_))) == bytes(source_.read())


def test_the_end_of_the_pieces_checks_them(file: File, data: bytes) -> None:
    wrong = Span(file, BEFORE, LARGE, Checksum("crc32c", crc32c(data[:LARGE]) ^ 1))
    whole: Source = StridedView(wrong, 4, (LARGE // 4,), (1,), 0)
    for source_ in (wrong, whole):
        found = iter_pieces(source_)
        assert bytes(next(found)) == data[: 1 << 20]
        with pytest.raises(ChecksumError):
            list(found)
