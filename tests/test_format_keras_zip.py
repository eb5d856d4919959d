"""`.keras` archives: stored or deflated, checked by their CRC, hostile configurations inert."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import ChecksumError, CkpttoolError, FormatError, UnsupportedError, attr, display
from ckpttool.core.digests import digest_checkpoint
from ckpttool.formats import Probe, keras_h5, open_checkpoint
from ckpttool.formats.keras_h5 import KERAS_ARCHIVE
from ckpttool.testing.formats import FormatContract
from tests.conftest import ROOT, in_process, refused
from tests.golden_texts import Golden
from tests.test_format_keras_h5 import keras3_file

h5py = pytest.importorskip("h5py")

METADATA = {"keras_version": "3.15.1", "date_saved": "2026-01-01@00:00:00"}


def dense(name: str, units: int, **more: Any) -> dict[str, Any]:
    settings = {"name": name, "units": units, "use_bias": True, "trainable": True, **more}
    return {"module": "keras.layers", "class_name": "Dense", "config": settings}


CONFIG: dict[str, Any] = {
    "class_name": "Functional",
    "config": {
        "name": "functional",
        "trainable": True,
        "layers": [
            dense("hidden", 8, activation="relu"),
            {"class_name": "Dropout", "config": {"name": "dropout", "rate": 0.5}},
            dense("out", 2, activation={"class_name": "function", "config": "tanh"}),
        ],
    },
    "compile_config": {"optimizer": {"class_name": "Adam", "config": {"name": "adam", "epsilon": 1e-7}}},
}


def archive(
    path: Path,
    config: Any = CONFIG,
    *,
    method: int = zipfile.ZIP_STORED,
    weights: bytes | None = None,
    **more: bytes,
) -> str:
    if weights is None:
        weights = Path(keras3_file(path.with_suffix(".inner"))).read_bytes()
        path.with_suffix(".inner").unlink()
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("metadata.json", json.dumps(METADATA))
        file.writestr("config.json", config if isinstance(config, str | bytes) else json.dumps(config))
        file.writestr("model.weights.h5", weights)
        for name, data in more.items():
            file.writestr(name, data)
    return str(path)


class TestKerasZip(FormatContract):
    module = KERAS_ARCHIVE

    def make(self, folder: Path) -> str:
        return archive(folder / "model.keras")


class TestDeflatedKerasZip(FormatContract):
    module = KERAS_ARCHIVE

    def make(self, folder: Path) -> str:
        return archive(folder / "model.keras", method=zipfile.ZIP_DEFLATED)


def test_configuration_names_layers_and_their_settings(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(archive(tmp_path / "m.keras"))
    assert [display(path) for path in checkpoint.tree][:4] == [
        "hidden/kernel",
        "hidden/bias",
        "out/kernel",
        "out/bias",
    ]
    hidden, out = checkpoint.tree.containers[(attr("hidden"),)], checkpoint.tree.containers[(attr("out"),)]
    assert hidden.name == "Dense"
    assert hidden.state["activation"] == "relu"  # type: ignore[index]
    assert out.state["activation"] == "tanh"  # type: ignore[index]
    assert checkpoint.tree.containers[(attr("optimizer"),)].state["epsilon"] == 1e-7  # type: ignore[index]
    assert checkpoint.integrity == "crc32"
    assert checkpoint.writer == "Keras 3.15.1"
    slots = [leaf for _, leaf in checkpoint.tree.tensors() if leaf.role == "slot"]
    assert [leaf.slot for leaf in slots] == ["m", "v"] * 4


def test_layers_are_listed_without_numpy(tmp_path: Path) -> None:
    first: list[tuple[str, dict[str, Any]]] = [
        ("InputLayer", {"name": "input", "batch_shape": [None, 2, 2]}),
        ("Permute", {"name": "turned", "dims": [2, 1]}),
        ("Flatten", {"name": "flat", "data_format": "channels_last"}),
    ]
    layers = [{"module": "keras.layers", "class_name": cls, "config": config} for cls, config in first]
    layers += [dense("hidden", 8, activation="relu"), dense("out", 2, activation="tanh")]
    config = {"class_name": "Sequential", "config": {"name": "m", "layers": layers}}
    command = [sys.executable, "-c", WITHOUT_NUMPY, archive(tmp_path / "m.keras", config)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    (model,) = json.loads(done.stdout)["architecture"]
    shapes = [(layer["output"], layer["macs"]) for layer in model["model"]["layers"]]
    assert shapes == [([2, 2], 0), ([2, 2], 0), ([4], 0), ([8], 32), ([2], 16)]


WITHOUT_NUMPY = """
import sys
from ckpttool.cli import main
class Refusing:
    def find_spec(self, name, path=None, target=None):
        assert name != "numpy"
sys.meta_path.insert(0, Refusing())
sys.argv = ["ckpttool", "inspect", "--json", *sys.argv[1:]]
main()
"""


def test_leaves_point_into_the_archive(tmp_path: Path) -> None:
    path = archive(tmp_path / "m.keras")
    checkpoint = open_checkpoint(path)
    plain = open_checkpoint(keras3_file(tmp_path / "plain.weights.h5"))
    assert digest_checkpoint(checkpoint).sha256 == digest_checkpoint(plain).sha256
    deflated = open_checkpoint(archive(tmp_path / "d.keras", method=zipfile.ZIP_DEFLATED))
    assert digest_checkpoint(deflated).sha256 == digest_checkpoint(plain).sha256


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_anywhere_in_the_weights_is_seen_at_the_first_read(tmp_path: Path, method: int) -> None:
    path = Path(archive(tmp_path / "m.keras", method=method))
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        member = file.getinfo("model.weights.h5")
    start = member.header_offset + 30 + len("model.weights.h5")
    # The last byte of the member is nobody's data; flip it in the stored one, the checksum in the other.
    at = start + member.compress_size - 1 if method == zipfile.ZIP_STORED else start + 2000
    damaged = bytearray(whole)
    damaged[at] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ChecksumError if method == zipfile.ZIP_STORED else FormatError):
        first_leaf(path)


def first_leaf(path: Path) -> bytes:
    checkpoint = open_checkpoint(str(path))
    return bytes(next(leaf for _, leaf in checkpoint.tree.tensors()).read())


HOSTILE = {
    "lambda": {
        "class_name": "Sequential",
        "config": {"layers": [{"class_name": "Lambda", "config": {"name": "x"}}]},
    },
    "module": {"module": "os", "class_name": "system", "config": {"command": "touch /tmp/ckpttool_was_here"}},
    "vocabulary": {
        "class_name": "Sequential",
        "config": {"layers": [{"class_name": "StringLookup", "config": {"vocabulary": "/etc/passwd"}}]},
    },
    "tfsm": {
        "class_name": "Sequential",
        "config": {"layers": [{"class_name": "TFSMLayer", "config": {"filepath": "/etc"}}]},
    },
    "types": {"class_name": ["x"], "config": 7, "compile_config": [1]},
    "layers": {"class_name": "Sequential", "config": {"layers": {"a": 1}, "name": 4, "trainable": "x"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_a_configuration_names_happens(tmp_path: Path, name: str, golden: Golden) -> None:
    checkpoint = open_checkpoint(archive(tmp_path / "m.keras", HOSTILE[name]))
    assert sum(leaf.role == "parameter" for _, leaf in checkpoint.tree.tensors()) == 4
    assert not os.path.exists("/tmp/ckpttool_was_here")
    golden("\n".join(checkpoint.notes))


@pytest.mark.parametrize("config", [b"\xff\xfe{", b"[1]"], ids=["no JSON", "list"])
def test_a_configuration_that_cannot_be_read_is_a_note(tmp_path: Path, config: bytes, golden: Golden) -> None:
    checkpoint = open_checkpoint(archive(tmp_path / "m.keras", config, method=zipfile.ZIP_DEFLATED))
    golden("\n".join(checkpoint.notes))
    assert next(display(path) for path in checkpoint.tree) == "hidden/kernel"


def test_other_members_and_forms(tmp_path: Path, golden: Golden) -> None:
    more = {"assets/vocabulary.txt": b"x", "../../evil": b"x"}
    checkpoint = open_checkpoint(archive(tmp_path / "m.keras", **more))
    golden("\n".join(checkpoint.notes))
    assert not (tmp_path.parent.parent / "evil").exists()
    with zipfile.ZipFile(tmp_path / "n.keras", "w") as file:
        file.writestr("metadata.json", "{}")
        file.writestr("config.json", "{}")
        file.writestr("model.weights.npz", b"")
    with pytest.raises(UnsupportedError) as caught:
        open_checkpoint(str(tmp_path / "n.keras"))
    golden(caught.value)
    bad = archive(tmp_path / "b.keras", weights=b"not HDF5")
    with pytest.raises(FormatError) as caught:
        open_checkpoint(bad)
    assert caught.value.file == bad


def test_the_inner_file_leads_nowhere(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "secret").write_bytes(b"s" * 64)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("vars/0", (64,), "u1", external=[(str(tmp_path / "secret"), 0, 64)])
    path = archive(tmp_path / "m.keras", weights=(tmp_path / "x.h5").read_bytes())
    golden(refused(in_process("digest", path)))


def test_a_fuzz_of_archives(tmp_path: Path) -> None:
    path = Path(archive(tmp_path / "m.keras"))
    right = digest_checkpoint(open_checkpoint(str(path))).sha256
    whole = path.read_bytes()
    generator = np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(whole)
        for at in generator.integers(len(whole), size=4):
            damaged[at] = generator.integers(256)
        path.write_bytes(damaged)
        try:
            assert digest_checkpoint(open_checkpoint(str(path))).sha256 == right
        except CkpttoolError as error:
            assert str(error).isprintable()  # noqa: PT017  # both outcomes are right


def test_a_member_where_a_user_block_would_end_makes_no_second_format(tmp_path: Path) -> None:
    path = tmp_path / "x.keras"
    # The member's data begin at 512 bytes, where HDF5 would look behind a user block.
    name = "model.weights.h5"
    filler = 512 - 2 * 30 - len("a") - len(name)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", bytes(filler))
        archive.writestr(name, keras_h5.MAGIC + bytes(100))
        archive.writestr("config.json", "{}")
        archive.writestr("metadata.json", "{}")
    assert path.read_bytes()[512:].startswith(keras_h5.MAGIC)
    assert keras_h5.claims(Probe(str(path))) is None
    assert keras_h5.archive_claims(Probe(str(path))) is not None
