"""ckpttool and the reference readers agree about mutants (tests/hostile/differential.py runs more)."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import random
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import ChecksumError, CkpttoolError
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import open_checkpoint
from tests.hostile.differential import BY_SLUG, FAULTS, Verdict, compare, difference, verdict
from tests.hostile.mutations import kinds, mutant
from tests.hostile.readers import LIBRARIES, OPAQUE, UNREADABLE, attempts
from tests.hostile.seeds import BY_NAME, SEEDS, Seed

# The readers disagree about some mutants of the other formats.
CLEAN = (
    *("tf-bundle-index", "tf-bundle-data", "tf-bundle-both", "tf-v1-file", "savedmodel-graph", "safetensors"),
    *("npz-stored", "npz-deflated", "npy", "sb2-pickle", "rllib-pickle", "d3rlpy"),
    *("torch-zip", "torch-legacy", "pickle"),
    *("hdf5-plain", "hdf5-gzip", "hdf5-fletcher32", "hdf5-latest", "hdf5-types", "hdf5-chunks"),
    *("hdf5-indexes", "keras-h5", "keras", "onnx", "torchscript", "msgpack"),
)
MUTANTS = 100
# The HDF5 library takes long to fail, up to its limit: some that are quick.
FEW, QUICK = 20, 1020


def require(reader: str | None) -> None:
    """Skip where the reference reader's library is not installed; nothing is imported."""
    library = LIBRARIES[reader].partition(".")[0] if reader else "numpy"
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize("name", CLEAN)
def test_readers_agree_about_mutants(name: str) -> None:
    require(BY_SLUG[name].peer)
    mutants, first = (FEW, QUICK) if name.startswith(("hdf5", "keras")) else (MUTANTS, 0)
    tally = compare(BY_SLUG[name], mutants, first, None)
    assert {word: tally.counts[word] for word in FAULTS if tally.counts[word]} == {}, tally.faults
    # Some are read, some refused, or nothing was compared.
    assert tally.counts["equal"] > mutants // 20 or not BY_SLUG[name].read
    assert tally.counts["refused"] > 0


@pytest.mark.parametrize("seed", [seed for seed in SEEDS if seed.read], ids=lambda seed: seed.name)
def test_a_seed_says_whether_it_has_checksums(seed: Seed) -> None:
    digest = digest_checkpoint(open_checkpoint(str(seed.home / seed.path)))
    # Checksums cover the tensors of these, and not all that they list.
    partly = ("torch DCP", "SavedModel graph", "d3rlpy", "HDF5 fletcher32")
    assert seed.name in partly or (digest.checksums == "verified") == seed.covered


def test_a_mutant_is_the_same_everywhere() -> None:
    seed = BY_NAME["npz stored"]
    for kind in kinds(seed):
        assert mutant(seed, kind, 7) == mutant(seed, kind, 7) != mutant(seed, kind, 8)


def test_more_seeds_leave_the_numbers_of_mutants() -> None:
    sums = hashlib.sha256()
    for number in range(200):
        sums.update(b"".join(mutant(BY_NAME["npy"], "spans", number).values()))
    assert sums.hexdigest()[:16] == "3e84aae0820d1664"


@pytest.mark.parametrize(
    ("mine", "other", "outcome"),
    [
        (("refused", "", {}), ("read", "", {"a": "1"}), "refused"),
        (("read", "", {"a": "1"}), ("read", "", {"a": "1"}), "equal"),
        (("read", "", {"a": "1"}), ("read", "", {"a": "2"}), "different"),
        (("read", "", {"a": "1"}), ("read", "", {"a": "1", "b": "2"}), "different"),
        (("read", "", {"a": "1", "b": "2"}), ("read", "", {"a": "1"}), "different"),
        (("read", "", {"a": OPAQUE}), ("read", "", {"a": "2", "a.b": "3"}), "equal"),
        (("read", "", {"a": "1"}), ("read", "", {"a": f"{UNREADABLE}no"}), "unexplained"),
        (("read", "", {"a": "1"}), ("refused", "no", {}), "unexplained"),
        (("read", "", {"a": OPAQUE}), ("refused", "no", {}), "explained"),
        (("read", "", {"a": "1"}), ("crash", "SIGABRT", {}), "explained"),
        (("untyped", "KeyError", {}), ("refused", "", {}), "failed"),
        (("hang", "", {}), ("refused", "", {}), "failed"),
    ],
)
def test_verdicts(mine: Any, other: Any, outcome: str) -> None:
    assert verdict("numpy", mine, other).outcome == outcome


def test_a_change_under_a_checksum_is_a_fault() -> None:
    read = ("read", "", {"a": "2"})
    assert verdict("numpy", read, read, {"a": "1"}).outcome == "unverified"
    assert verdict("numpy", read, read, {"a": "2"}) == Verdict("equal")
    assert difference({"a": "2"}, {"a": "1"})[0].startswith("a:")


def test_a_reader_that_dies_is_replaced(tmp_path: Path) -> None:
    # An index that TensorFlow aborts on, between two sound ones.
    seed = BY_NAME["TF bundle, index"]
    require("tensorflow")
    for number in range(3):
        (tmp_path / f"{number}").mkdir()
        for name, data in seed.contents().items():
            whole = data.replace(b"\x08\x01\x12", b"\x08\x63\x12") if number == 1 else data
            (tmp_path / f"{number}" / name).write_bytes(whole)
    paths = [str(tmp_path / f"{number}" / seed.path) for number in range(3)]
    words = [word for word, _, _ in attempts("tensorflow", paths, tmp_path)]
    assert words[0] == words[2] == "read"
    assert words[1] != "read"


# What 2,000 flips of each seed found: an array's type became one that is listed without its bytes being read.
@pytest.mark.parametrize(
    ("name", "number"), [("npz stored", 132), ("npz deflated", 209), ("npz deflated", 1040)]
)
def test_damage_that_was_once_believed(name: str, number: int, tmp_path: Path) -> None:
    (tmp_path / "model.npz").write_bytes(flipped(BY_NAME[name], number))
    with pytest.raises(ChecksumError):
        digest_checkpoint(open_checkpoint(str(tmp_path / "model.npz")))


def flipped(seed: Seed, number: int) -> bytes:
    """Return the only file of a seed with one flipped bit."""
    choose = random.Random(f"{seed.name}/flips/{number}")
    (data,) = seed.contents().values()
    at = choose.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << choose.randrange(8),)) + data[at + 1 :]


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


def forged(crc: int, checksum: int) -> bytes:
    """Return four bytes after which a CRC-32 that was `crc` is `wanted`: the table's steps backwards."""
    table = []
    for number in range(256):
        for _ in range(8):
            number = number >> 1 ^ (0xEDB88320 if number & 1 else 0)
        table.append(number)
    state = checksum ^ 0xFFFFFFFF
    for _ in range(4):
        index = next(n for n, row in enumerate(table) if row >> 24 == state >> 24)
        state = (state ^ table[index]) << 8 & 0xFFFFFFFF | index
    return (state ^ crc ^ 0xFFFFFFFF).to_bytes(4, "little")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flip_turns_checksums_off_and_hides_behind_it(every: int, streamed: bool, tmp_path: Path) -> None:
    # All-zero checksums mean that none were recorded: one flip may say so, but not change a number besides.
    whole, path = archive_of_one(streamed), tmp_path / "one.npz"
    path.write_bytes(whole)
    truth = digest_checkpoint(open_checkpoint(str(path)))
    assert truth.checksums == "verified"
    # The spaces that fill an array's header up are as good as each other.
    for at in (bit for bit in range(0, 8 * len(whole), every) if whole[bit // 8] != 0x20 or bit % 64 == 5):
        flipped = bytes((whole[at // 8] ^ 1 << at % 8,))
        path.write_bytes(whole[: at // 8] + flipped + whole[at // 8 + 1 :])
        os.utime(path, ns=(at * 10_000, at * 10_000))
        try:
            digest = digest_checkpoint(open_checkpoint(str(path)))
        except CkpttoolError:
            continue
        assert digest.sha256 == truth.sha256, at
