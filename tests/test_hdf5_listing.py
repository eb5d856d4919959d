"""Our own listing of plain HDF5 files beside the library's: the same, or left to the library."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import File
from ckpttool.formats import hdf5
from ckpttool.formats.hdf5_listing import list_plain_file
from tests.conftest import CORPUS

h5py = pytest.importorskip("h5py")


def our_listing(data: bytes) -> dict[str, Any] | None:
    return list_plain_file(lambda offset, length: data[offset : offset + length], len(data))


def library(path: Path) -> dict[str, Any]:
    """Return the library's listing, made in a process of its own; raise what it is refused with."""
    listed = hdf5.run_on_storage(hdf5.whole_file(File.stamp(str(path))), hdf5.LISTING)
    return {**listed, "notes": [note for note in listed["notes"] if "ran without protection" not in note]}


def write_weights(path: Path, members: int = 3) -> None:
    """Write groups, attributes and datasets as Keras does."""
    with h5py.File(path, "w") as file:
        file.attrs["backend"] = "größer"
        file.attrs["layer_names"] = np.array([b"dense", b"a_longer_name"])
        file.attrs["keras_version"] = np.bytes_("3.1")
        for number in range(members):
            weights = file.create_group(f"layers/dense_{number}/vars")
            weights.attrs["name"] = f"dense_{number}"
            weights.attrs["weight_names"] = []
            weights.attrs["weight_names0"] = ["a", "bc"]
            weights["0"] = np.arange(12, dtype="<f4").reshape(3, 4) + number
            weights["1"] = np.float64(number)
        for dtype in ("<f2", "<f8", "i1", "u1", "<i2", "<u4", "<i8", "<u8"):
            file[f"types/{dtype[-2:]}"] = np.array([1, 2], dtype)
        file["again"] = file["types/f2"]
        file["up"] = file["types"]
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3,))
        small = h5py.h5d.create(file.id, b"compact", h5py.h5t.STD_I16LE, space, compact)
        small.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, 2, 3], "i2"))


@pytest.mark.parametrize("members", [0, 3, 250])
def test_a_listing_is_that_of_the_library(tmp_path: Path, members: int) -> None:
    path = tmp_path / "x.weights.h5"
    write_weights(path, members)
    listed = our_listing(path.read_bytes())
    assert listed is not None
    assert len(listed["datasets"]) == 2 * members + 9
    assert json.loads(json.dumps(listed)) == library(path)


@pytest.mark.corpus
def test_keras_own_files_are_listed_without_the_library() -> None:
    files = sorted((CORPUS / "tf").rglob("*.h5f"))
    assert files
    for path in files:
        listed = our_listing(path.read_bytes())
        assert listed is not None, path
        assert json.loads(json.dumps(listed)) == library(path)


def test_a_plain_file_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_weights(tmp_path / "x.h5")
    monkeypatch.delattr(hdf5, "run_child")
    index = hdf5.read_index(hdf5.whole_file(File.stamp(str(tmp_path / "x.h5"))))
    assert (
        bytes(index.datasets["layers/dense_2/vars/0"].source.read())
        == (np.arange(12, dtype="<f4") + 2).tobytes()
    )


def _damage(data: bytes, at: list[int], draw: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.choice((1, 1, 2))):
        position = draw.choice(at)
        new = draw.choice(
            (
                bytes([damaged[position] ^ 1 << draw.randrange(8)]),
                draw.choice((b"\0", b"\1", b"\xff")),
                draw.choice(at).to_bytes(8, "little"),
                draw.choice((bytes(8), b"\xff" * 8)),
            )
        )
        damaged[position : position + len(new)] = new
    return bytes(damaged[: len(data)])


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
def test_damage_is_left_to_the_library_or_changes_both_listings(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "x.h5"
    write_weights(path, 1)
    whole, draw, compared = path.read_bytes(), random.Random(seed), 0
    listed = our_listing(whole)
    assert listed is not None
    values = [(d["offset"], d["offset"] + d["stored"]) for d in listed["datasets"] if "offset" in d]
    at = [
        n
        for n in range(len(whole))
        if not any(start <= n < stop for start, stop in values) and any(whole[max(0, n - 16) : n + 16])
    ]
    for _ in range(40):
        damaged = _damage(whole, at, draw)
        listed = our_listing(damaged)
        if listed is None:
            continue
        path.write_bytes(damaged)
        compared += 1
        assert json.loads(json.dumps(listed)) == library(path)
    assert compared


OTHER_FORMS: dict[str, Callable[[Any], Any]] = {
    "chunks": lambda file: file.create_dataset("a", data=np.arange(9.0), chunks=(4,)),
    "big-endian": lambda file: file.create_dataset("a", data=np.arange(3, dtype=">f4")),
    "text": lambda file: file.create_dataset("a", data="text"),
    "bool": lambda file: file.create_dataset("a", data=np.array([True])),
    "unwritten": lambda file: file.create_dataset("a", (3,), "f4"),
    "soft link": lambda file: file.__setitem__("a", h5py.SoftLink("/b")),
    "external link": lambda file: file.__setitem__("a", h5py.ExternalLink("x.h5", "/b")),
    "order of creation": lambda file: file.create_group("a", track_order=True),
    "numbers as attribute": lambda file: file.attrs.__setitem__("name", 1.5),
    "empty": lambda file: file.create_dataset("a", data=h5py.Empty("f4")),
    "named type": lambda file: file.__setitem__("a", np.dtype("f4")),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_are_left_to_the_library(tmp_path: Path, form: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        OTHER_FORMS[form](file)
    assert our_listing((tmp_path / "x.h5").read_bytes()) is None


@pytest.mark.parametrize("options", [{"libver": "latest"}, {"userblock_size": 512}], ids=str)
def test_other_versions_are_left_to_the_library(tmp_path: Path, options: dict[str, Any]) -> None:
    with h5py.File(tmp_path / "x.h5", "w", **options) as file:
        file["a"] = np.arange(3.0)
    assert our_listing((tmp_path / "x.h5").read_bytes()) is None


def test_every_truncation_is_left_to_the_library(tmp_path: Path) -> None:
    write_weights(tmp_path / "x.h5", 1)
    whole = (tmp_path / "x.h5").read_bytes()
    assert all(our_listing(whole[:length]) is None for length in range(0, len(whole), 97))
