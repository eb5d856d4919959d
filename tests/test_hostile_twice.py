"""What is read does not depend on what was in memory before (tests/hostile/twice.py reads more files)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import (
    DeflatedSpan,
    File,
    FormatError,
    Inline,
    Leaf,
    Span,
    StoragePart,
    StridedView,
    as_array,
    combine_parts,
    gather_bytes,
    read_writable,
)
from tests.conftest import ROOT
from tests.hostile.repair import lookup3, lookup3_prefixes


@pytest.mark.parametrize(("every", "least"), [(45, 16), pytest.param(1, 501, marks=pytest.mark.slow)])
def test_two_processes_read_the_same(every: int, least: int) -> None:
    options = ["--times", "1", "--quick", "--every", str(every)]
    command = [sys.executable, "-m", "tests.hostile.twice", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert int(done.stdout.split(" files")[0].replace(",", "")) >= least


class Fewer:
    """A source that gives another number of bytes than its tensor has."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self) -> bytes:
        return self.data


@pytest.mark.parametrize("data", [b"", bytes(15), bytes(17)])
def test_a_source_of_another_length_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_writable(Leaf("float32", (4,), Fewer(data), "x"))
    with pytest.raises(FormatError):
        as_array(data, "float32", (4,))
    with pytest.raises(FormatError):
        gather_bytes([data[:3], data[3:]], 16)
    with pytest.raises(FormatError):
        combine_parts("float32", (2, 4), [((slice(1, 2),), Fewer(data))])


def test_parts_that_leave_gaps_are_refused() -> None:
    part = Inline(np.arange(4, dtype="<f4").tobytes())
    with pytest.raises(FormatError):
        combine_parts("float32", (2, 4), [((slice(1, 2),), part)])
    both = combine_parts("float32", (2, 4), [((slice(1, 2),), part), ((slice(0, 1),), part)])
    assert np.frombuffer(both, "<f4").tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert bytes(combine_parts("float32", (), [((), Inline(b"\x00\x00\x80?"))])) == b"\x00\x00\x80?"


def test_strings_that_end_early_are_refused() -> None:
    data = (3).to_bytes(8, "little") + b"abc"
    assert Leaf("string", (1,), Inline(data), "x").strings() == [b"abc"]
    for cut in (b"", data[:-1], data[:4]):
        with pytest.raises(FormatError):
            Leaf("string", (1,), Inline(cut), "x").strings()


def test_a_view_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    import zlib

    engine = zlib.compressobj(wbits=-15)
    packed = engine.compress(bytes(32)) + engine.flush()
    (tmp_path / "x").write_bytes(packed)
    file = File.stamp(str(tmp_path / "x"))
    stores = (
        Inline(bytes(32)),
        DeflatedSpan(Span(file, 0, len(packed)), 32),
        StoragePart(Inline(bytes(40)), 8, 32),  # type: ignore[arg-type]
    )
    for storage in stores:
        assert bytes(StridedView(storage, 4, (4,), (2,), 1).read()) == bytes(16)
        for shape, strides, offset in (((5,), (2,), 0), ((4,), (-1,), 0), ((2, 2), (1, 1), 6)):
            with pytest.raises(FormatError):
                StridedView(storage, 4, shape, strides, offset).read()


@pytest.mark.parametrize("size", [4, 5, 12, 13, 14, 25, 100])
def test_checksums_of_all_prefixes_are_those_of_each(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    for shortest in (4, 5, 13):
        assert lookup3_prefixes(data, shortest) == [lookup3(data[:n]) for n in range(shortest, size)]
