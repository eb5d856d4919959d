"""Two-stage detection: a signature decides which modules are imported, and misses nothing that they claim."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core import CkpttoolError, plugins
from ckpttool.formats import Format, Probe, detect
from tests.conftest import CORPUS, ROOT, SAMPLES

FORMATS = [(plugin, cast(Format, plugin.load())) for plugin in plugins.BUILT_IN["formats"]]


def claims(module: Format, probe: Probe) -> object:
    """Return what the module claims, or the kind of the error that it raises: both need the module."""
    try:
        return module.claims(probe)
    except CkpttoolError as error:
        return type(error)


def require_wide_signatures(path: str) -> int:
    """Assert that every format that claims the path has a signature that matches; return their number."""
    probe, count = Probe(path), 0
    for plugin, module in FORMATS:
        claimed = claims(module, probe)
        count += claimed is not None
        assert claimed is None or detect.may_claim(plugin, Probe(path)), (plugin.name, path, claimed)
    return count


def test_every_format_of_ours_has_a_signature() -> None:
    assert not [plugin.name for plugin, _ in FORMATS if plugin.signature is None]


@pytest.mark.parametrize("top", [SAMPLES, pytest.param(CORPUS, marks=pytest.mark.corpus)])
def test_no_real_path_is_missed(top: Path) -> None:
    claimed = 0
    for folder, _, names in os.walk(top):
        for name in ("", *names):
            stem = os.path.join(folder, name.partition(".data-")[0].removesuffix(".index"))
            for path in {os.path.join(folder, name), stem, stem.rpartition("_")[0] or folder}:
                claimed += require_wide_signatures(path)
    assert claimed


# ------------------------------------------------------------------ made files


def _zip(*names: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in names:
            archive.writestr(name, b"\x93NUMPY\1\0")
    return stream.getvalue()


def _tar(*names: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return stream.getvalue()


MAGIC = 0x1950A86A20F9469CFC6C
LONG = b"\x8a\n" + MAGIC.to_bytes(10, "little") + b"."
TABLE = bytes(40) + bytes.fromhex("57fb808b247547db")
HDF5 = b"\x89HDF\r\n\x1a\n"
STATE = b'model_checkpoint_path: "ckpt-1"\n'
DICT = b"\x80\x02}q\0."
DCP = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nq\0)\x81."
SAFE = b"\x02\0\0\0\0\0\0\0{}"
GRAPH = b"\x3a\x02\n\0"
# Files that a format claims by their bytes, their name or both.
FILES = [
    ("tensor_bundle", "a.index", TABLE),
    ("tensorflow_v1", "weights", TABLE),
    ("saved_model", "saved_model.pb", b""),
    ("saved_model", "saved_model.pbtxt", b"any"),
    ("keras_h5", "a", HDF5),
    *(
        ("keras_h5", f"A{end}", bytes(512) + HDF5)
        for end in (".H5", ".hdf5", ".h5f", ".hdf", ".he5", ".Keras")
    ),
    ("keras_h5", "a.weights.json", b" {}"),
    ("keras_zip", "a", _zip("config.json", "model.weights.h5")),
    ("keras_zip", "a", _zip("metadata.json", "config.json")[:80]),
    ("pytorch", "a", _zip("archive/data.pkl", "archive/data/0")),
    ("pytorch", "a", _zip("archive/data/0")[:60]),
    *(("pytorch_legacy", "a", b"\x80" + bytes((number,)) + LONG) for number in (2, 3, 4, 5)),
    ("pytorch_legacy", "a", b"\x80\x04\x95\x0d\0\0\0\0\0\0\0" + LONG),
    ("pytorch_legacy", "a", b"L%dL\n." % MAGIC),
    ("pytorch_legacy", "a", b"L%d\n." % MAGIC),
    ("pytorch_tar", "a", _tar("sys_info", "tensors")),
    ("pytorch_dcp", "__0_0.distcp", b"any"),
    ("pytorch_dcp", "a", DCP),
    ("stable_baselines2", "a", _zip("data", "parameters", "parameter_list")),
    ("stable_baselines2", "a", b"\x80\x02cstable_baselines.x\nY\nq\0."),
    ("stable_baselines3", "a", _zip("_stable_baselines3_version")),
    ("stable_baselines3", "a", _zip("data", "policy.pth")),
    ("rllib", "rllib_checkpoint.json", b"{}"),
    ("rllib", "checkpoint-7", DICT),
    ("rllib", "algorithm_state.pkl", DICT),
    ("rllib", "a", b"\x80\x02cray.rllib.x\nY\nq\0."),
    ("d3rlpy", "a", b"\x80\x04}(\x8c\x05torch\x94B\0\0\0\0"),
    ("safetensors", "a", SAFE),
    ("safetensors", "a.safetensors", b"\x02\0\0"),
    ("safetensors", "a.safetensors", b"\x02\0\0\0\0\0\0\0any"),
    ("npz", "a", b"\x93NUMPY\1\0"),
    ("npz", "a", _zip("x.npy")),
    ("npz", "a", _zip("x.npy")[:60]),
    ("npz", "a.npz", _zip("x.npy", "readme.txt")),
    ("npz", "a.npz", _zip("readme.txt")[:60]),
    ("onnx", "a", b"\x08\x07\x12\x05torch" + GRAPH),
    *(("onnx", "a", bytes((tag << 3 | 2, 1)) + b"x\x08\x07" + GRAPH) for tag in (2, 3, 4, 6, 8, 14, 20, 25)),
    ("onnx", "a.onnx", b"\x28"),
    ("onnx", "a.onnx", GRAPH),
    ("sharded", "a.index.json", b" {}"),
    ("pickle", "a", DICT),
    ("pickle", "a.p", b"(dp0\nS'a'\np1\nI1\ns."),
]
# Folders, or what is at a prefix: the path in them that is named, and their files.
FOLDERS: list[tuple[str, str, dict[str, bytes]]] = [
    ("tensor_bundle", "a", {"a.index": TABLE, "a.data-00000-of-00001": b""}),
    ("tensor_bundle", "a.data-00000-of-00001", {"a.index": TABLE, "a.data-00000-of-00001": b""}),
    ("tensor_bundle", "a", {"a.data-00000-of-00001": b""}),
    ("tensor_bundle", "", {"a.index": TABLE, "a.data-00000-of-00001": b""}),
    ("tensor_bundle", "", {"checkpoint": STATE, "ckpt-1.index": TABLE}),
    ("tensor_bundle", "checkpoint", {"checkpoint": b"# first\n " + STATE, "ckpt-1.index": TABLE}),
    ("tensorflow_v1", "", {"checkpoint": b"\n" + STATE, "ckpt-1": TABLE}),
    ("tensorflow_v1", "checkpoint", {"checkpoint": b"\t" + STATE, "ckpt-1": TABLE}),
    ("tensorflow_v1", "", {"model.ckpt": TABLE}),
    ("tensorflow_v1", "a", {"a-00000-of-00002": TABLE, "a-00001-of-00002": TABLE}),
    ("saved_model", "", {"saved_model.pb": b""}),
    ("saved_model", "", {"saved_model.pbtxt": b""}),
    ("saved_model", "keras_metadata.pb", {"keras_metadata.pb": b"", "saved_model.pb": b""}),
    ("saved_model", "", {"variables/variables.index": TABLE}),
    ("keras_rl", "a.h5f", {"a_actor.h5f": HDF5, "a_critic.h5f": HDF5}),
    ("keras_rl", "a", {"a_actor.h5f.index": TABLE, "a_critic.h5f.index": TABLE}),
    ("pytorch", "", {"data.pkl": DICT, "version": b"3"}),
    ("pytorch", "data.pkl", {"data.pkl": DICT, "version": b"3"}),
    ("pytorch", "", {"archive/data.pkl": DICT}),
    *(
        ("pytorch_set", "a", {f"a_actor{end}": b"", f"a_critic{end}": b""})
        for end in ("", ".pth", ".pt", ".pkl")
    ),
    ("pytorch_set", "", {"a_actor.pth": b"", "a_critic_1.pt": b""}),
    ("pytorch_dcp", "", {".metadata": DCP}),
    ("pytorch_dcp", "", {"__0.metadata": DCP}),
    ("stable_baselines3", "", {"_stable_baselines3_version": b""}),
    ("stable_baselines3", "", {"data": b"{}", "policy.pth": b""}),
    ("rllib", "", {"rllib_checkpoint.json": b""}),
    ("rllib", "", {"policy_state.pkl": b""}),
    ("rllib", "", {"checkpoint-3": DICT}),
    ("sharded", "", {"a.index.json": b"{}"}),
    ("sharded", "", {"model.safetensors": SAFE}),
    ("sharded", "", {"pytorch_model.bin": SAFE, "optimizer.bin": SAFE}),
]
NAMES = sorted(
    {name for _, name, _ in FILES} | {file for _, _, files in FOLDERS for file in files if "/" not in file}
)


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def damage(data: bytes, cut: int | None, flip: int | None) -> bytes:
    """Return the data cut short, or with one of its first bits turned over."""
    if flip is not None and data:
        at = flip // 8 % min(len(data), 64)
        data = data[:at] + bytes((data[at] ^ 1 << flip % 8,)) + data[at + 1 :]
    return data if cut is None else data[: cut % (len(data) + 1)]


@pytest.mark.parametrize("plugin", [plugin for plugin, _ in FORMATS], ids=lambda plugin: plugin.name)
def test_what_a_format_claims_matches_its_signature(tmp_path: Path, plugin: plugins.Plugin) -> None:
    module = cast(Format, plugin.load())
    cases = [(name, {name: content}) for owner, name, content in FILES if owner == plugin.name]
    cases += [(path, files) for owner, path, files in FOLDERS if owner == plugin.name]
    assert cases
    for number, (path, files) in enumerate(cases):
        put(tmp_path / str(number), files)
        location = str(tmp_path / str(number) / path)
        assert claims(module, Probe(location)) is not None, (path, files)
        assert detect.may_claim(plugin, Probe(location)), (path, files)


def test_no_file_under_another_name_is_missed(tmp_path: Path) -> None:
    for content in dict.fromkeys(content for _, _, content in FILES):
        for name in NAMES:
            (tmp_path / name).write_bytes(content)
            require_wide_signatures(str(tmp_path / name))
            (tmp_path / name).unlink()


cuts = st.none() | st.integers(0, 1 << 16)
flips = st.none() | st.integers(0, 511)
starts = st.sampled_from([content for _, _, content in FILES]) | st.binary(max_size=24)
contents = st.builds(damage, starts, cuts, flips)


@settings(max_examples=75)
@given(st.sampled_from(NAMES), contents)
def test_no_damaged_file_is_missed(name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        require_wide_signatures(str(path))


@settings(max_examples=75)
@given(st.sampled_from(FOLDERS), st.dictionaries(st.sampled_from(NAMES), contents, max_size=3), st.booleans())
def test_no_mixed_folder_or_prefix_is_missed(
    case: tuple[str, str, dict[str, bytes]], others: dict[str, bytes], late: bool
) -> None:
    _, path, files = case
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "inner")
        put(folder, {**files, **others} if late else {**others, **files})
        for file in (path, "", *files, *others):
            require_wide_signatures(str(folder / file))
        (folder.parent / "inner.index").write_bytes(TABLE)
        require_wide_signatures(str(folder))


# ------------------------------------------------------------------ imports

# The files of a format, and the formats that share their first bytes.
PROGRAM = """
import json, os, sys
from ckpttool.core import plugins
from ckpttool.formats import detect

def loaded(run):
    read, write = os.pipe()
    if not os.fork():
        before = set(sys.modules)
        run()
        found = [name for name in set(sys.modules) - before if name.startswith("ckpttool.")]
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    with open(read) as stream:
        return set(json.load(stream))

for path, names in json.loads(sys.argv[1]).items():
    own = loaded(lambda: [plugins.find("formats", name).load() for name in names])
    print(json.dumps([path, sorted(loaded(lambda: detect.resolve(path)) - own)]))
"""


def test_finding_a_format_imports_its_modules_only(tmp_path: Path) -> None:
    files = {
        "a.npz": (_zip("x.npy"), ["npz"]),
        "a.pt": (_zip("archive/data.pkl"), ["pytorch"]),
        "a.keras": (_zip("config.json", "model.weights.h5"), ["keras_zip"]),
        "a.zip": (_zip("_stable_baselines3_version"), ["stable_baselines3"]),
        "a.safetensors": (b"\x02\0\0\0\0\0\0\0{}", ["safetensors"]),
        "a.h5": (b"\x89HDF\r\n\x1a\n", ["keras_h5"]),
        "a.onnx": (b"\x08\x07\x3a\x02\n\0", ["onnx"]),
        "a.pkl": (b"\x80\x02}q\0.", ["pickle"]),
        "b.index": (TABLE, ["tensor_bundle", "tensorflow_v1"]),
        "weights": (TABLE, ["tensorflow_v1"]),
        # A prefix may be that of either version, and of the files of an agent whose names are beside it.
        "b": (None, ["tensor_bundle", "tensorflow_v1"]),
    }
    for name, (content, _) in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint").write_bytes(STATE)
    (tmp_path / "run" / "ckpt-1.index").write_bytes(TABLE)
    files["run"] = (None, ["tensor_bundle", "tensorflow_v1"])
    request = json.dumps({str(tmp_path / name): formats for name, (_, formats) in files.items()})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, request], capture_output=True, text=True, cwd=ROOT, check=True
    )
    imported = {Path(path).name: more for path, more in map(json.loads, done.stdout.splitlines())}
    assert imported == {name: [] for name in files}


def test_a_format_of_another_package_is_asked_about_every_path(tmp_path: Path) -> None:
    foreign = plugins.Plugin("theirs", "theirs.format", owner="theirs")
    (tmp_path / "x").write_bytes(b"any")
    assert all(detect.may_claim(foreign, Probe(str(tmp_path / name))) for name in ("x", "absent", ""))
