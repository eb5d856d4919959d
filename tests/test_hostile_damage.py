"""Damaged files of every format are refused, or are what they were (tests/hostile/damage.py damages more)."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.errors import ChecksumError, CkpttoolError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.ops.digest import digest_of
from tests import warm
from tests.conftest import ROOT
from tests.hostile.damage import KINDS, damaged, resignable
from tests.hostile.seeds import BY_NAME, SEEDS, Seed

# Each is listed by a process of its own, and h5py's own crashes end it.
SLOW = tuple(seed.name for seed in SEEDS if "HDF5" in seed.name or seed.name == ".keras")


def rows(plan: list[tuple[str, str, int]], folder: Path) -> list[dict[str, Any]]:
    program = f"import json; from tests.hostile.damage import sample; print(json.dumps(sample({plan!r})))"
    status, output = warm.run(
        "tests.hostile.started", program, folder, {**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert status == 0, output
    names = ("seed", "reader", "kind", "counts", "failures")
    return [dict(zip(names, row, strict=True)) for row in json.loads(output)]


def plan(*, slow: bool) -> list[tuple[str, str, int]]:
    return [
        (seed.name, kind, 8 if slow else 30)
        for seed in SEEDS
        for kind in (KINDS if resignable(seed) else KINDS[:2])
        if (seed.name in SLOW) == slow
    ]


@pytest.mark.parametrize("slow", [False, True], ids=["others", "HDF5"])
def test_damage_is_refused_or_changes_nothing(slow: bool, tmp_path: Path) -> None:
    for row in rows(plan(slow=slow), tmp_path):
        wrong = [each for each in row["failures"] if each[1] != "WRONG"]
        assert not wrong, row
        # What is signed anew is believed, and where no checksum is, a changed number is a number.
        if BY_NAME[row["seed"]].covered and row["kind"] != "resigned":
            assert not row["failures"], row
        assert row["counts"].get("refused", 0) + row["counts"].get("same", 0) > 0


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_a_seed_says_whether_it_has_checksums(seed: Seed) -> None:
    found = digest_of(open_checkpoint(str(seed.home / seed.path)))
    # Checksums cover the tensors of these, and not all that is said of them.
    said = dict.fromkeys(("torch DCP", "SavedModel graph", "d3rlpy"), "verified")
    expected = "verified" if seed.covered else "none in this format"
    assert found.checksums == said.get(seed.name, expected)


# What 2,000 flips of each seed found: an array's type became one that is listed without its bytes being read.
@pytest.mark.parametrize(
    ("name", "number"), [("npz stored", 132), ("npz deflated", 209), ("npz deflated", 1040)]
)
def test_damage_that_was_once_believed(name: str, number: int, tmp_path: Path) -> None:
    for file, data in damaged(BY_NAME[name], "flips", number).items():
        (tmp_path / file).write_bytes(data)
    with pytest.raises(ChecksumError):
        digest_of(open_checkpoint(str(tmp_path / "model.npz")))


def test_the_same_damage_everywhere() -> None:
    seed = BY_NAME["npz stored"]
    assert damaged(seed, "mixed", 7) == damaged(seed, "mixed", 7) != damaged(seed, "mixed", 8)


@pytest.mark.parametrize(
    ("name", "times"), [("torch zip", 30), ("TF bundle, data", 30), ("npz stored", 60), ("TF V1 file", 30)]
)
def test_repaired_checksums_are_right(name: str, times: int, tmp_path: Path) -> None:
    # Some damage must get as far as the tensors, or the repair repairs nothing.
    (row,) = rows([(name, "resigned", times)], tmp_path)
    assert row["counts"].get("WRONG", 0) > 0, row


def archive_of_one(streamed: bool) -> bytes:
    """An .npz of one array whose CRC-32 is one bit: another flip away from "not recorded"."""
    array = io.BytesIO()
    np.save(array, np.arange(4.0, dtype="f4"))
    data = array.getvalue()[:-4]
    data += forged(zlib.crc32(data), 1 << 7)
    stream = io.BytesIO()
    with zipfile.ZipFile(Unseekable(stream) if streamed else stream, "w") as archive:
        archive.writestr("a.npy", data)
        assert archive.getinfo("a.npy").CRC == 1 << 7
    return stream.getvalue()


class Unseekable(io.RawIOBase):
    """A pipe: the checksum comes behind the data, the local header holds a zero."""

    def __init__(self, stream: io.BytesIO) -> None:
        self.stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self.stream.write(data)


def forged(crc: int, wanted: int) -> bytes:
    """Return four bytes after which a CRC-32 that was `crc` is `wanted`: the table's steps backwards."""
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0xEDB88320 if number & 1 else 0)
        table.append(number)
    state = wanted ^ 0xFFFFFFFF
    for _ in range(4):
        index = next(n for n, row in enumerate(table) if row >> 24 == state >> 24)
        state = (state ^ table[index]) << 8 & 0xFFFFFFFF | index
    return (state ^ crc ^ 0xFFFFFFFF).to_bytes(4, "little")


@pytest.mark.parametrize("streamed", [False, True])
def test_no_flip_turns_checksums_off_and_hides_behind_it(streamed: bool, tmp_path: Path) -> None:
    # All-zero checksums mean that none were recorded: one flip may say so, but not change a number besides.
    whole, path = archive_of_one(streamed), tmp_path / "one.npz"
    path.write_bytes(whole)
    truth = digest_of(open_checkpoint(str(path)))
    assert truth.checksums == "verified"
    # The spaces that fill an array's header up are as good as each other.
    for at in (bit for bit in range(8 * len(whole)) if whole[bit // 8] != 0x20 or bit % 64 == 5):
        flipped = bytes((whole[at // 8] ^ 1 << at % 8,))
        path.write_bytes(whole[: at // 8] + flipped + whole[at // 8 + 1 :])
        os.utime(path, ns=(at * 10_000, at * 10_000))
        try:
            found = digest_of(open_checkpoint(str(path)))
        except CkpttoolError:
            continue
        assert found.sha256 == truth.sha256, at
