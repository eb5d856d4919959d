"""check of folders and patterns: what would run code or cannot be read fails it, and nothing else does."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ckpttool.commands.check import CheckOptions, CheckResult, check
from ckpttool.commands.doctor import diagnose
from ckpttool.conversion.write import save
from ckpttool.core import File, code_references, filesystem
from ckpttool.encodings import Global, PickleObject, dumps, pickle_reader
from ckpttool.formats import (
    Probe,
    detect,
    find_pickle_format,
    keras_config,
    open_checkpoint,
    tf_operations,
)
from ckpttool.listing import candidates
from ckpttool.testing import build_tree
from tests.bundle_writer import field
from tests.conftest import ROOT, TORCH_SAMPLE, in_process, zipped
from tests.hostile import crafted_onnx
from tests.pickles import ACTING
from tests.sarif_schema import SCHEMA
from tests.test_format_pytorch import ONE, archive, tensor

SEEDS = ROOT / "tests" / "hostile" / "seed_files"
PROTOCOL_0 = b"cos\nsystem\n(S'true'\ntR."
PROTOCOL_1 = b"(dq\0U\x01acos\nsystem\n(U\x04truetRs."
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
LAMBDA = {"class_name": "Lambda", "config": {"name": "x", "function": ["4wEAAAA=", None, None]}}
MODEL = {"class_name": "Sequential", "config": {"name": "m", "layers": [LAMBDA]}}


class Acts:
    """What unpickling would call the system for."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


GRAPH = field(1, field(1, "a") + field(2, "WriteFile") + field(3, "b")) * 2
ACTS = pickle.dumps({"a": Acts()}, 2)


def more(archive: Path, members: dict[str, bytes]) -> bytes:
    """Return the archive with more members behind its own."""
    stream = io.BytesIO(archive.read_bytes())
    with zipfile.ZipFile(stream, "a") as opened:
        for name, data in members.items():
            opened.writestr(name, data)
    return stream.getvalue()


def replaced(archive: Path, name: str, data: bytes) -> bytes:
    with zipfile.ZipFile(archive) as opened:
        kept = {name: opened.read(name) for name in opened.namelist()}
    return zipped({**kept, name: data})


def tarred(members: dict[str, bytes], mode: str = "w") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def objects(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([value], object), allow_pickle=True)
    return stream.getvalue()


def numbers(*values: float) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array(values, np.float32))
    return stream.getvalue()


def hdf5(change: Callable[[Any], None]) -> bytes:
    """Return what Keras 2 writes for a model with one layer, changed."""
    h5py = pytest.importorskip("h5py")
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file.attrs["model_config"] = json.dumps(MODEL)
        group = file.create_group("model_weights")
        group.attrs["layer_names"] = np.array([b"x"])
        layer = group.create_group("x")
        layer.attrs["weight_names"] = np.array([b"x/w:0"])
        layer["x/w:0"] = np.ones(2, np.float32)
        change(file)
    return stream.getvalue()


def _no_group(file: Any) -> None:
    del file["model_weights"]


def _empty_group(file: Any) -> None:
    del file["model_weights"]
    file.create_group("model_weights")


def _no_attributes(file: Any) -> None:
    del file["model_weights"].attrs["layer_names"]


def _weights_only(file: Any) -> None:
    del file["model_weights"]
    file["layers/dense/vars/0"] = np.zeros(3, np.float32)


def _not_json(file: Any) -> None:
    file.attrs["model_config"] = "{'class_name': 'Lambda'"


def _number(file: Any) -> None:
    file.attrs["model_config"] = 7


def _loss(file: Any) -> None:
    del file.attrs["model_config"]
    loss = {"class_name": "function", "module": "os", "config": "system"}
    file.attrs["training_config"] = json.dumps({"loss": loss})


WITHOUT_WEIGHTS = [_no_group, _empty_group]
KERAS = [*WITHOUT_WEIGHTS, _no_attributes, _weights_only, _not_json, _number, _loss]


def metadata(config: Any) -> bytes:
    """Return keras_metadata.pb with one node (tf_keras/protobuf/saved_metadata.proto)."""
    return field(1, field(2, 1) + field(4, "_tf_keras_layer") + field(5, json.dumps(config)))


def good(folder: Path) -> dict[str, str]:
    """Put eleven checkpoints of different formats there; return their paths."""
    copied = {
        "agent.pt": TORCH_SAMPLE,
        "legacy.pth": SEEDS / "torch_legacy" / "model.pt",
        "arrays.npz": SEEDS / "npz_stored" / "model.npz",
        "model.safetensors": SEEDS / "safetensors" / "model.safetensors",
        "model.weights.h5": SEEDS / "h5_plain" / "model.weights.h5",
        "model.keras": SEEDS / "keras" / "model.keras",
        "agent.zip": SEEDS / "sb3" / "agent.zip",
        "agent.d3": SEEDS / "d3rlpy" / "agent.d3",
    }
    for name, source in copied.items():
        shutil.copy(source, folder / name)
    for source in (SEEDS / "bundle").iterdir():
        shutil.copy(source, folder / source.name)
    shutil.copytree(SEEDS / "saved_model", folder / "served")
    (folder / "net.onnx").write_bytes(crafted_onnx.agent())
    return {name: name for name in (*copied, "ckpt-1", "served", "net.onnx")}


def bad_files() -> dict[str, bytes]:
    """Return the content of each file that must fail the check, by its path."""
    safetensors = (SEEDS / "safetensors" / "model.safetensors").read_bytes()
    torch = SEEDS / "torch_zip" / "model.pt"
    damaged = bytearray(torch.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    index, data = (SEEDS / "bundle" / f"ckpt-1.{end}" for end in ("index", "data-00000-of-00001"))
    files = {
        "bad/protocol0.pt": PROTOCOL_0,
        "bad/protocol1.ckpt": PROTOCOL_1,
        "bad/no_suffix": PROTOCOL_0,
        "bad/notes.txt": PROTOCOL_0 + b" and more",
        "bad/.hidden/deep/weights.dat": ACTS,
        "bad/folder.pt/inner.th": PROTOCOL_0,
        "bad/packed.joblib": zlib.compress(ACTS),
        "bad/packed.pkl.gz": gzip.compress(b"") + gzip.compress(PROTOCOL_0),
        "bad/packed.bz2": bz2.compress(ACTS),
        "bad/packed.xz": lzma.compress(PROTOCOL_0),
        "bad/objects.npy": objects(Acts()),
        "bad/objects.npz": zipped({"a.npy": numbers(1), "b.npy": objects(Acts())}),
        "bad/code.pt": zipped({"x/data.pkl": ACTS, "x/version": b"3\n"}),
        "bad/extra.pt": more(torch, {"model/extra.pkl": PROTOCOL_0}),
        "bad/nested.zip": more(SEEDS / "sb3" / "agent.zip", {"sub/evil.pth": zipped({"x/data.pkl": ACTS})}),
        "bad/assets.keras": more(SEEDS / "keras" / "model.keras", {"assets/layer/table.pkl": ACTS}),
        "bad/lambda.keras": replaced(
            SEEDS / "keras" / "model.keras", "config.json", json.dumps(MODEL).encode()
        ),
        "bad/files.zip": zipped({"read.me": b"text", "runs/a.pkl": PROTOCOL_0}, zipfile.ZIP_DEFLATED),
        "bad/files.tar.gz": tarred({"read.me": b"text", "runs/a.pkl": PROTOCOL_0}, "w:gz"),
        "bad/pointer.safetensors": POINTER,
        "bad/pointer.bin": POINTER,
        "bad/page.pt": b"<!DOCTYPE html><html></html>",
        "bad/empty.h5": b"",
        "bad/random.pkl": bytes(range(200, 256)) * 9,
        "bad/random.msgpack": b"\x81\xa6params\x81\xa1w\xc4\x00",
        "bad/text.npz": b"not an archive\n",
        "bad/cut.safetensors": safetensors[:-3],
        "bad/damaged.pt": bytes(damaged),
        "bad/lonely.index": index.read_bytes(),
        "bad/shard.data-00000-of-00001": data.read_bytes(),
        "bad/nan.npy": numbers(1, float("nan")),
        "bad/graph.pb": GRAPH,
        "served/assets.extra/evil.pkl": PROTOCOL_0,
    }
    return files | {f"bad/keras{at}.h5": hdf5(change) for at, change in enumerate(KERAS)}


def put(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], set[str]]:
    """A folder with good and bad checkpoints and other files; the paths of the good, and of the bad."""
    folder = tmp_path_factory.mktemp("gate")
    fine, bad = set(good(folder)), bad_files()
    put(folder, bad)
    os.mkfifo(folder / "bad" / "pipe.pt")
    (folder / "bad" / "dangling.pt").symlink_to("nowhere.pt")
    (folder / "bad" / "loop").symlink_to("..")
    shutil.copytree(SEEDS / "saved_model", folder / "bad" / "revived")
    (folder / "bad" / "revived" / "keras_metadata.pb").write_bytes(metadata(LAMBDA))
    others = {
        "README.md": b"cos\nsin\ntan\n",
        "notes.p": b"set terminal png\n",
        "words.model": b"a b c\n",
        "data.csv": b"1,2\n",
        "photo.jpg": b"\xff\xd8\xff\xe0" + bytes(100),
        "fingerprint.pb": field(1, 5),
        "sources.zip": zipped({"a.py": b"import os\n", "b.txt": b"copyright\n"}),
        ".git/objects/ab/cd": zlib.compress(PROTOCOL_0),
    }
    put(folder, others)
    bad["bad/lonely"] = bad.pop("bad/lonely.index")  # a bundle goes by its prefix
    return folder, fine, {*bad, "bad/pipe.pt", "bad/dangling.pt", "bad/revived"}


def outcome(result: CheckResult, folder: Path) -> tuple[set[str], set[str]]:
    """Return the paths below the folder that were found fine, and those that were not."""
    fine, bad = set(), set()
    for checkpoint in result.checkpoints:
        at, last = os.path.split(checkpoint.path.split("::")[-1])
        name = os.path.relpath(os.path.join(os.path.realpath(at), last), folder)
        (bad if checkpoint.findings or checkpoint.error else fine).add(name)
    return fine, bad


def test_a_folder_of_good_and_bad_files(checkpoint_folder: tuple[Path, set[str], set[str]]) -> None:
    folder, fine, bad = checkpoint_folder
    assert len(bad) >= 30
    result = check([str(folder)])
    assert outcome(result, folder) == (fine, bad)
    assert not result.clean
    skipped = {os.path.relpath(name, folder) for name in result.skipped}
    assert {"README.md", "notes.p", ".git", "sources.zip", "fingerprint.pb"} <= skipped
    assert len(result.checkpoints) == len({checkpoint.path for checkpoint in result.checkpoints})


def test_the_same_through_a_pattern(checkpoint_folder: tuple[Path, set[str], set[str]]) -> None:
    folder, fine, bad = checkpoint_folder
    assert outcome(check([str(folder / "**")]), folder) == (fine, bad)
    everything = [str(path) for path in folder.iterdir()]
    assert outcome(check(everything), folder)[1] >= bad


def test_only_good_files_pass(tmp_path: Path) -> None:
    names = good(tmp_path)
    ran = in_process("check", tmp_path, "--json")
    assert (ran.status, len(ran.json()["checkpoints"])) == (0, len(names))


@pytest.mark.parametrize("name", sorted(ACTING))
def test_a_pickle_is_known_by_its_opcodes(tmp_path: Path, name: str) -> None:
    data = ACTING[name][0]
    for suffix in (".pt", ".txt", ""):
        file = tmp_path / f"x{suffix}"
        # Unpickling calls it before it notices that the end is missing.
        for content in (data, data[:-1], data + b"rest"):
            file.write_bytes(content)
            result = check([str(tmp_path)])
            assert [one.topic for one in result.checkpoints[0].findings] == ["loading"]
        file.unlink()


@pytest.mark.parametrize(
    "text",
    [
        "cos\nsin\ntan\n",
        "(import\n(scheme base))\n",
        "I am\n",
        "Notes.",
        "(c) 2020\n",
        "copyright\n2020\n",
        "]",
    ],
)
def test_a_text_is_no_pickle(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_text(text)
    assert find_pickle_format(Probe(str(tmp_path / "x"))) is None


def test_documents_of_this_repository_are_no_pickles() -> None:
    texts = [path for end in ("*.md", "*.py", "*.toml", "*.yml") for path in ROOT.glob(f"[!.]*/**/{end}")]
    assert len(texts) > 100
    assert not [path for path in texts if find_pickle_format(Probe(str(path))) is not None]


# --- What a format does not list ----------------------------------------------------------------------


def scanned(tmp_path: Path, data: bytes) -> list[str]:
    (tmp_path / "x").write_bytes(data)
    return [name.name for name in detect.scan_for_code(File.stamp(str(tmp_path / "x"))).code_references]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("before", [0, 900, 1000, 1024, 16_000, 16_300, 16_384, 300_000])
@pytest.mark.parametrize("after", [0, 1024, 20_000])
def test_code_is_found_wherever_it_stands_in_a_pickle(
    tmp_path: Path, before: int, after: int, protocol: int
) -> None:
    value = ["x" * before, *range(40), Acts(), "y" * after]
    assert scanned(tmp_path, pickle.dumps(value, protocol)) == [f"{os.system.__module__}.system"]


def test_a_small_pickle_is_gone_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    scan = pickle_reader.scan_pickle
    monkeypatch.setattr(pickle_reader, "scan_pickle", lambda data: lengths.append(len(data)) or scan(data))
    detect._find_code.cache_clear()
    data = pickle.dumps({f"l{n}.weight": [float(n)] * 9 for n in range(99)}, 2)
    assert 1024 < len(data) < 1 << 14
    assert [scanned(tmp_path, data) for _ in range(3)] == [[]] * 3
    assert lengths == [len(data)]


_FX = PickleObject(Global("torch.fx.graph_module", "reduce_graph_module"), ({"_code": ""}, ""), 0)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        pytest.param(1, True, id="number"),
        pytest.param(Global("torch", "float32"), True, id="listed name"),
        pytest.param(Global("os", "system"), False, id="function"),
        pytest.param(PickleObject(Global("library", "Class"), (), 0), False, id="class"),
        pytest.param(_FX, False, id="what only the format makes data of"),
    ],
)
def test_torch_pickle_is_scanned_again_unless_it_is_data(tmp_path: Path, value: Any, plain: bool) -> None:
    pickled = dumps({"weight": tensor(), "more": value})
    (tmp_path / "file.pt").write_bytes(archive(pickled, {"0": ONE}))
    opened = open_checkpoint(tmp_path / "file.pt")
    assert [source.read() for source in opened.plain] == ([pickled] if plain else [])
    names = {reference.name for reference in code_references.unsafe_references(opened.code_references)}
    again = pickle_reader.scan_pickle(pickled).code_references
    assert names >= {reference.name for reference in code_references.unsafe_references(again)}
    assert plain != bool(names)


def test_small_pickles_that_differ_in_a_byte_are_told_apart(tmp_path: Path) -> None:
    system = f"{os.system.__module__}.system"
    acts, other = ACTS, ACTS.replace(b"system", b"tsyses")
    assert len(acts) == len(other)
    assert scanned(tmp_path, acts) == [system]
    assert system not in scanned(tmp_path, other)
    assert scanned(tmp_path, zipped({"one": acts, "two": acts})) == [system, system]


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "zlib": zlib.compress,
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, format=lzma.FORMAT_ALONE),
    "joblib of old": lambda data: b"ZF" + hex(len(data)).ljust(19).encode() + zlib.compress(data),
    "zip": lambda data: zipped({"a": b"text", "b": data}),
    "zip, deflated": lambda data: zipped({"b": data}, zipfile.ZIP_DEFLATED),
    "tar": lambda data: tarred({"a": b"text", "b": data}),
    "tar.xz": lambda data: tarred({"b": data}, "w:xz"),
    "cut gzip": lambda data: gzip.compress(data + np.random.default_rng(0).bytes(8192))[:-900],
}


@pytest.mark.parametrize("outer", PACKERS)
@pytest.mark.parametrize("inner", PACKERS)
def test_code_is_found_in_whatever_holds_it(tmp_path: Path, outer: str, inner: str) -> None:
    late = pickle.dumps({"weights": bytes(range(256)) * 200, "a": Acts()}, 4)
    for data in (PROTOCOL_0, ACTS, late):
        assert set(scanned(tmp_path, PACKERS[outer](PACKERS[inner](data)))) <= {"os.system", "posix.system"}
        assert scanned(tmp_path, PACKERS[outer](PACKERS[inner](data)))


def test_what_unpacks_to_too_much_is_bounded(tmp_path: Path) -> None:
    assert scanned(tmp_path, zlib.compress(bytes(300 << 20), 1)) == []


def test_storages_of_torch_are_numbers(tmp_path: Path) -> None:
    data = more(SEEDS / "torch_zip" / "model.pt", {"model/data/99": ACTS})
    assert scanned(tmp_path, data) == []


def test_a_file_that_two_loaders_read_differently_is_told(tmp_path: Path) -> None:
    # HDF5 lets anything stand in front: here a pickle, which torch.load and pickle.load would run.
    weights = (SEEDS / "h5_plain" / "model.weights.h5").read_bytes()
    (tmp_path / "x.h5").write_bytes(PROTOCOL_0.ljust(512, b"\0") + weights)
    checkpoint = check([str(tmp_path)])
    assert [finding.topic for finding in checkpoint.checkpoints[0].findings] == ["loading"]


def test_an_archive_behind_hdf5_is_told(tmp_path: Path) -> None:
    # Keras opens a name that ends in .keras as an archive if there is one at the end.
    data = [(SEEDS / name).read_bytes() for name in ("h5_plain/model.weights.h5", "keras/model.keras")]
    (tmp_path / "x.keras").write_bytes(b"".join(data))
    assert [finding.topic for finding in check([str(tmp_path)]).checkpoints[0].findings] == ["loading"]


def test_what_a_checkpoint_does_not_use_is_judged_by_itself(tmp_path: Path) -> None:
    shutil.copytree(SEEDS / "torch_dcp", tmp_path / "dcp")
    shutil.copytree(SEEDS / "saved_model", tmp_path / "served")
    shutil.copytree(SEEDS / "bundle", tmp_path / "run")
    with zipfile.ZipFile(SEEDS / "torch_zip" / "model.pt") as archive:
        archive.extractall(tmp_path / "unpacked")
    with zipfile.ZipFile(SEEDS / "sb3" / "agent.zip") as archive:
        archive.extractall(tmp_path / "agent")
    put(tmp_path / "rllib", {"algorithm_state.pkl": pickle.dumps({"a": 1}), "rllib_checkpoint.json": b"{}"})
    result = check([str(tmp_path)])
    assert result.clean
    assert {os.path.relpath(saved.path, tmp_path): saved.format for saved in result.checkpoints} == {
        "agent": "stable_baselines3",
        "dcp": "pytorch_dcp",
        "rllib": "rllib",
        "run/ckpt-1": "tensor_bundle",
        "served": "saved_model",
        "unpacked": "pytorch",
    }
    for name, bad in {
        "dcp/__9_9.distcp": b"garbage",
        "dcp/other.bin": PROTOCOL_0,
        "served/variables/variables.data-00000-of-00009": b"garbage",
        "run/ckpt-1.data-00001-of-00002": b"garbage",
        "run/checkpoint": PROTOCOL_0,
        "unpacked/model/evil": PROTOCOL_0,
        "agent/vecnormalize.pkl": ACTS,
        "rllib/class_and_ctor_args.pkl": ACTS,
        "rllib/policies/evil.pkl": ACTS,
    }.items():
        put(tmp_path, {name: bad})
        assert not check([str(tmp_path)]).clean, name
        (tmp_path / name).unlink()


def test_a_shard_that_is_missing_is_told_once(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "x.safetensors"}}
    put(tmp_path, {"model.safetensors.index.json": json.dumps(index).encode()})
    result = check([str(tmp_path)])
    assert [error.kind for one in result.checkpoints if (error := one.error)] == ["truncated"]


def test_a_storage_of_torch_within_a_pickle_is_judged() -> None:
    from ckpttool.encodings import pickle_reader

    def verdict(data: bytes) -> str:
        text = b"B" + struct.pack("<I", len(data)) + data
        contents = pickle_reader.parse_pickle(b"ctorch.storage\n_load_from_bytes\n(" + text + b"tR.")
        return code_references.worst_verdict(contents.code_references)

    plain = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {}, [], []))
    assert verdict(plain) == code_references.CLASSES
    assert verdict(ACTS) == code_references.CODE
    assert verdict(plain[:-2] + PROTOCOL_0) == code_references.CODE


# --- Programs in archives, what follows a pickle, files of two formats ----------------------------------

ELF = b"\x7fELF\2\1\1"
WINDOWS = (b"MZ".ljust(60, b"\0") + struct.pack("<I", 128)).ljust(128, b"\0") + b"PE\0\0"
MACH = bytes.fromhex("cffaedfe07000001")
PLAIN = pickle.dumps({"a": 1}, 2)


def seed(*names: str) -> bytes:
    return SEEDS.joinpath(*names).read_bytes()


def torch_with(members: dict[str, bytes]) -> bytes:
    return more(SEEDS / "torch_zip" / "model.pt", {f"model/{name}": data for name, data in members.items()})


def legacy_with(data: bytes) -> bytes:
    return seed("torch_legacy", "model.pt") + data


def d3_with(name: str, data: bytes) -> bytes:
    """Return a d3rlpy agent whose torch archive has one more member."""
    content = pickle.loads(seed("d3rlpy", "agent.d3"))
    stream = io.BytesIO(content["torch"])
    with zipfile.ZipFile(stream, "a") as archive:
        top = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{top}/{name}", data)
    return pickle.dumps({**content, "torch": stream.getvalue()}, 4)


def torch_tar(changed: dict[str, bytes]) -> bytes:
    """Return a tar archive of torch with bytes appended to its members."""
    with tarfile.open(fileobj=io.BytesIO(seed("torch_tar", "model.tar"))) as archive:
        members = {info.name: archive.extractfile(info).read() for info in archive}  # type: ignore[union-attr]
    names = {**members, **{name: b"" for name in changed if name not in members}}
    return tarred({name: data + changed.get(name, b"") for name, data in names.items()})


def bytes_tensor(data: bytes) -> bytes:
    """Return a safetensors file with one tensor of these bytes."""
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    header = json.dumps({"w": entry}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def tensor_at(position: int, data: bytes) -> bytes:
    """Return a safetensors file with these bytes at a place of the file, which is behind the header."""
    padding = next(n for n in range(position) if bytes_tensor(bytes(n) + data).find(data) == position)
    return bytes_tensor(bytes(padding) + data)


def pickle_and_tar() -> bytes:
    """Return a pickle of text whose first block has the checksum of a tar header."""
    text = bytearray(b"x" * 600)
    block = bytearray(b"\x80\x02X" + struct.pack("<I", len(text)) + text + b".")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    return bytes(block)


# Files that a format lists; the name in the finding, or "" for a part that cannot be judged.
LISTED: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "bytecode": ("x.pt", lambda: torch_with({"bytecode.pkl": PLAIN}), "bytecode.pkl"),
    "code of 1.0": ("x.pt", lambda: torch_with({"model.json": b"{}"}), "model.json"),
    "so": ("x.pt", lambda: torch_with({"libhook.so.1.2": b""}), "model/libhook.so.1.2"),
    "dll": ("x.pt", lambda: torch_with({"a/HOOK.DLL": b""}), "model/a/HOOK.DLL"),
    "dylib": ("x.pt", lambda: torch_with({"hook.dylib": b""}), "model/hook.dylib"),
    "pyd": ("x.pt", lambda: torch_with({"hook.pyd": b""}), "model/hook.pyd"),
    "py": ("x.pt", lambda: torch_with({"code/hook.py": b""}), "model/code/hook.py"),
    "pyc": ("x.pt", lambda: torch_with({"hook.pyc": b""}), "model/hook.pyc"),
    "py of extra files": ("x.pt", lambda: torch_with({"extra/hook.py": b""}), "model/extra/hook.py"),
    "sh": ("x.pt", lambda: torch_with({"hook.sh": b""}), "model/hook.sh"),
    "ELF": ("x.pt", lambda: torch_with({"README": ELF}), "model/README"),
    "ELF as storage": ("x.pt", lambda: torch_with({"data/99": ELF}), "model/data/99"),
    "Windows": ("x.pt", lambda: torch_with({"README": WINDOWS}), "model/README"),
    "Mach-O": ("x.pt", lambda: torch_with({"README": MACH}), "model/README"),
    "interpreter": ("x.pt", lambda: torch_with({"README": b"#!/bin/sh\n"}), "model/README"),
    "compiled": ("x.pt", lambda: torch_with({"data/aotinductor/m/k": b""}), "model/data/aotinductor/m/k"),
    "package": ("x.pt", lambda: torch_with({".data/extern_modules": b"os\n"}), "model/.data/extern_modules"),
    "nested archive": ("x.pt", lambda: torch_with({"x": zipped({"a.so": b""})}), "model/x/a.so"),
    "keras": ("x.keras", lambda: more(SEEDS / "keras" / "model.keras", {"assets/a.py": b""}), "assets/a.py"),
    "sb3": ("x.zip", lambda: more(SEEDS / "sb3" / "agent.zip", {"hook.py": b""}), "hook.py"),
    "npz": ("x.npz", lambda: more(SEEDS / "npz_stored" / "model.npz", {"a.so": b""}), "a.so"),
    "tar": ("x.pt", lambda: torch_tar({"a.so": b""}), "a.so"),
    "d3rlpy": ("x.d3", lambda: d3_with("a.so", ELF), "archive/a.so"),
    "d3rlpy bytecode": ("x.d3", lambda: d3_with("bytecode.pkl", PLAIN), "bytecode.pkl"),
    "d3rlpy pickle": ("x.d3", lambda: d3_with("a.pkl", ACTS), f"{os.system.__module__}.system"),
    "stream, code": ("x.pt", lambda: legacy_with(ACTS), f"{os.system.__module__}.system"),
    "stream, two more": ("x.pt", lambda: legacy_with(PLAIN + ACTS), f"{os.system.__module__}.system"),
    "stream, protocol 0": ("x.pt", lambda: legacy_with(PROTOCOL_0), "os.system"),
    "stream, plain": ("x.pt", lambda: legacy_with(PLAIN), ""),
    "stream, archive": ("x.pt", lambda: legacy_with(seed("torch_zip", "model.pt")), ""),
    "stream, HDF5": (
        "x.pt",
        lambda: legacy_with(b"").ljust(2048, b"\0") + seed("h5_plain", "model.weights.h5"),
        "",
    ),
    "stream in a member": (
        "x.pt",
        lambda: torch_with(
            {"a": legacy_with(b"").replace(b"ctorch._utils\n_rebuild_tensor_v2", b"cos\nsystem")}
        ),
        "os.system",
    ),
    "pickle of a tar": ("x.pt", lambda: torch_tar({"pickle": ACTS}), f"{os.system.__module__}.system"),
    "storages of a tar": ("x.pt", lambda: torch_tar({"storages": PLAIN}), ""),
    "array, code": ("x.npy", lambda: objects(1) + ACTS, f"{os.system.__module__}.system"),
    "array, plain": ("x.npy", lambda: objects(1) + PLAIN, ""),
    "array, archive": ("x.npy", lambda: objects(1) + zipped({"a": b""}), ""),
    "member with two pickles": (
        "x.pt",
        lambda: torch_with({"a.pkl": PLAIN + ACTS}),
        f"{os.system.__module__}.system",
    ),
    "program and HDF5": (
        "x.h5",
        lambda: ELF.ljust(512, b"\0") + seed("h5_plain", "model.weights.h5"),
        "x.h5",
    ),
    "script and HDF5": (
        "x.h5",
        lambda: b"#!/bin/sh\n".ljust(1024, b"\0") + seed("h5_plain", "model.weights.h5"),
        "x.h5",
    ),
    "tensor and archive": ("x.safetensors", lambda: bytes_tensor(zipped({"a": b"x"})), ""),
    "tensor and HDF5": (
        "x.safetensors",
        lambda: tensor_at(512, seed("h5_plain", "model.weights.h5")),
        "",
    ),
    "pickle and tar": ("x.pkl", pickle_and_tar, ""),
    "onnx, archive": ("x.onnx", lambda: crafted_onnx.agent() + field(99, zipped({"a": b""})), ""),
}


@pytest.mark.parametrize("name", LISTED)
def test_what_another_loader_would_run_is_told_everywhere(tmp_path: Path, name: str) -> None:
    file, make, reference = LISTED[name]
    path = tmp_path / file
    path.write_bytes(make())
    (checked,) = check([str(tmp_path)], CheckOptions(numbers=False)).checkpoints
    assert checked.error is None
    topics = [finding.topic for finding in checked.findings]
    assert topics
    assert set(topics) == {"loading"}
    assert "loading" in [finding.topic for finding in diagnose(str(path)).findings]
    checkpoint = detect.open_checkpoint(str(path))
    names = {name.name for name in checkpoint.code_references if name.verdict == code_references.CODE}
    assert reference in names if reference else checkpoint.unjudged
    assert in_process("inspect", path).out.startswith(("RUNS CODE: ", "NEEDS CLASSES: ", "NOT CHECKED: "))
    assert in_process("inspect", path, "--strict").status == 1


@pytest.mark.parametrize("shards", [1, 2])
def test_code_is_located_in_its_file(shards: int, tmp_path: Path) -> None:
    """The last tensor of the last file is an archive with a pickle that runs code."""
    files = [f"model-{number:05}-of-{shards:05}.safetensors" for number in range(1, shards + 1)]
    contents = [*[bytes(8)] * (shards - 1), zipped({"x.pkl": CALL + b"."})]
    for number, (file, content) in enumerate(zip(files, contents, strict=True)):
        save(build_tree({f"w{number}": np.frombuffer(content, "u1")}), str(tmp_path / file), "safetensors")
    path = tmp_path / files[0]
    if shards > 1:
        path = tmp_path / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {f"w{number}": file for number, file in enumerate(files)}}))
    references = detect.open_checkpoint(str(path)).code_references
    locations = {reference.where for reference in references if reference.verdict == code_references.CODE}
    assert locations == {f"{files[-1]}/x.pkl" if shards > 1 else "x.pkl"}


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def joblib_array(
    raw: bytes, kind: str = "u1", shape: bytes = b"K\x09\x85", padding: bytes | None = None
) -> bytes:
    """Return the opcodes of joblib for an array, and its bytes (joblib/numpy_pickle.py)."""
    state = [
        (text("subclass"), b"cnumpy\nndarray\n"),
        (text("shape"), shape),
        (text("order"), text("C")),
        (text("dtype"), b"cnumpy\ndtype\n(" + text(kind) + b"\x89\x88tR"),
        (text("allow_mmap"), b"\x89"),
        *([] if padding is None else [(text("numpy_array_alignment_bytes"), b"K\x10")]),
    ]
    entries = b"".join(name + value for name, value in state)
    between = b"" if padding is None else bytes([len(padding)]) + padding
    return b"cjoblib.numpy_pickle\nNumpyArrayWrapper\n)\x81}(" + entries + b"ub" + between + raw


RAW = bytes(range(200, 209))
CALL = b"cos\nsystem\n(S'true'\ntR"


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"\x80\x02](" + joblib_array(RAW) + b"e.", []),
        (b"\x80\x02](" + joblib_array(RAW) + CALL + b"e.", ["os.system"]),
        (b"\x80\x02](" + joblib_array(RAW, padding=b"\xff" * 7) + CALL + b"e.", ["os.system"]),
        (b"\x80\x02](" + joblib_array(RAW * 8, "f8") + CALL + b"e.", ["os.system"]),
        (b"\x80\x02](" + joblib_array(PROTOCOL_0, "O8") + b"e.", ["os.system"]),
        (b"\x80\x02](" + joblib_array(PLAIN, "O8") + CALL + b"e.", ["os.system"]),
        (b"\x80\x02](" + joblib_array(RAW) + b"e." + PROTOCOL_0, ["os.system"]),
        (b"\x80\x02](" + joblib_array(RAW, shape=b"J\xff\xff\xff\xff\x85") + CALL + b"e.", []),
        (b"\x80\x02](" + joblib_array(RAW, shape=text("9") + b"\x85") + CALL + b"e.", []),
        (b"\x80\x02](" + joblib_array(RAW, shape=b"\x8a\x08" + bytes(7) + b"\x7f\x85") + b"e.", []),
    ],
)
def test_code_behind_the_arrays_of_joblib_is_found(tmp_path: Path, data: bytes, names: list[str]) -> None:
    assert scanned(tmp_path, data) == names
    (tmp_path / "x.joblib").write_bytes(data)
    (checked,) = check([str(tmp_path / "x.joblib")]).checkpoints
    assert ("loading" in {finding.topic for finding in checked.findings}) == bool(names)


# Files that no format lists: an error, and code in them is a finding besides.
REFUSED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "two pickles": ("x.pkl", lambda: PLAIN + ACTS),
    "two plain pickles": ("x.pkl", lambda: PLAIN + PLAIN),
    "pickle and archive": ("x.pkl", lambda: PLAIN + zipped({"a": b"x"})),
    "array and archive": ("x.npy", lambda: numbers(1) + zipped({"a": b"x"})),
    "tensors and archive": (
        "x.safetensors",
        lambda: seed("safetensors", "model.safetensors") + zipped({"a": b"x"}),
    ),
    "agent and pickle": ("x.d3", lambda: seed("d3rlpy", "agent.d3") + ACTS),
    "package": ("x.pt", lambda: zipped({"p/.data/extern_modules": b"os\n", "p/a.py": b""})),
    "bytecode by another case": ("x.pt", lambda: torch_with({"Bytecode.pkl": PLAIN, "a.so": b""})),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_another_loader_would_run_of_a_refused_file_is_told(tmp_path: Path, name: str) -> None:
    file, make = REFUSED[name]
    (tmp_path / file).write_bytes(make())
    (checked,) = check([str(tmp_path)]).checkpoints
    assert checked.error is not None
    assert {finding.topic for finding in checked.findings} == {"loading"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch_with({"README.txt": b"text", "note.json": b"{}", "assets/logo.png": b"\x89PNG"}),
        lambda: torch_with({"config.json": b"{}", "MZ": b"MZ and more text" * 9}),
        lambda: legacy_with(bytes(64)),
        lambda: objects(1) + bytes(64),
        lambda: torch_tar({"README": b"text"}),
        lambda: more(SEEDS / "keras" / "model.keras", {"README.txt": b"text"}),
    ],
)
def test_inert_members_and_padding_are_fine(tmp_path: Path, make: Callable[[], bytes]) -> None:
    (tmp_path / "x").write_bytes(make())
    (checked,) = check([str(tmp_path / "x")]).checkpoints
    assert (checked.findings, checked.error) == ((), None)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.pt", lambda: torch_with({"README.txt": b"text", ".data/note.txt": b"text"})),
        ("x.keras", lambda: more(SEEDS / "keras" / "model.keras", {"README.txt": b"text"})),
        ("x.npz", lambda: more(SEEDS / "npz_stored" / "model.npz", {"README.txt": b"text"})),
        ("x.zip", lambda: more(SEEDS / "sb3" / "agent.zip", {"README.txt": b"text"})),
        ("x.tar", lambda: torch_tar({"README.txt": b"text"})),
    ],
)
def test_members_that_a_format_does_not_define_are_named(
    tmp_path: Path, name: str, data: Callable[[], bytes]
) -> None:
    (tmp_path / name).write_bytes(data())
    checkpoint = detect.open_checkpoint(str(tmp_path / name))
    assert [note for note in checkpoint.notes if "README.txt" in note]
    assert ".data/note.txt" in " ".join(checkpoint.notes) or name != "x.pt"


def test_sources_in_an_ordinary_archive_are_files(tmp_path: Path) -> None:
    put(tmp_path, {"run.zip": zipped({"train.py": b"import os\n", "lib.so": ELF, "w.npy": numbers(1)})})
    result = check([str(tmp_path)])
    assert result.clean
    assert len(result.checkpoints) == 1


# --- Models of other programs -------------------------------------------------------------------------

FOREIGN: dict[str, bytes] = {
    "m.gguf": b"GGUF\3\0\0\0" + bytes(20),
    "m.tflite": b"\x1c\0\0\0TFL3" + bytes(20),
    "m.mlmodel": b"\x08\1\x12\x10\n\5input" + bytes(9),
    "m.engine": b"ftrt" + bytes(9),
    "m.plan": b"ftrt" + bytes(9),
    "m.trt": b"ftrt" + bytes(9),
    "m.nnef": b"version 1.0;\n",
    "m.pdmodel": b"\x0a\x04\x08\x00" + bytes(9),
    "m.pdiparams": bytes(40),
    "m.pte": b"\x1c\0\0\0ET12" + bytes(20),
    "m.ptl": b"\x1c\0\0\0PTMF" + bytes(20),
    "m.ort": b"\x1c\0\0\0ORTM" + bytes(20),
    "m.caffemodel": b"\n\5LeNet\xa2\6\x10\n\4conv",
    "m.llamafile": b"MZqFpD" + bytes(20),
    "m-0000.params": b"\x12\1" + bytes(40),
    "m.bin": b"\xff\xfe\1\2" * 9,
    "m.pt2": zipped({"m/archive_format": b"pt2", "m/models/model.json": b"{}"}),
    "weights": b"GGUF\3\0\0\0" + bytes(20),
    "m.mlpackage": b"",
    "empty.gguf": b"",
}


def put_foreign(folder: Path) -> None:
    put(folder, {name: data for name, data in FOREIGN.items() if name != "m.mlpackage"})
    inner = {"Manifest.json": b"{}", "Data/model.mlmodel": FOREIGN["m.mlmodel"], "Data/weight.bin": bytes(40)}
    put(folder / "m.mlpackage", inner)


def test_models_of_other_programs_are_not_checked(tmp_path: Path) -> None:
    names = good(tmp_path)
    put_foreign(tmp_path)
    put(tmp_path, {"text.bin": b"words\n", "list.plan": b"1. train\n", "readme.txt": b"text"})
    result = check([str(tmp_path)])
    assert len(result.checkpoints) == len(names)
    assert {os.path.relpath(path, tmp_path) for path, _ in result.unchecked} == set(FOREIGN)
    assert not result.failed
    assert (result.clean, result.status) == (False, 2)
    skipped = {os.path.relpath(name, tmp_path) for name in result.skipped}
    assert {"text.bin", "list.plan", "readme.txt"} <= skipped
    ran = in_process("check", tmp_path, "--json")
    assert ran.status == 2
    assert {os.path.relpath(row["path"], tmp_path) for row in ran.json()["not_checked"]} == set(FOREIGN)
    assert {path for path, _ in check([str(tmp_path / "**")]).unchecked} == {
        path for path, _ in result.unchecked
    }


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_a_named_model_of_another_program_is_not_checked(tmp_path: Path, name: str) -> None:
    put_foreign(tmp_path)
    result = check([str(tmp_path / name)])
    assert [os.path.basename(path) for path, _ in result.unchecked] == [name]
    assert (result.checkpoints, result.status) == ((), 2)
    assert in_process("check", tmp_path / name).status == 2


def test_code_in_a_model_of_another_program_is_told(tmp_path: Path) -> None:
    model = {"m/archive_format": b"pt2", "m/models/model.json": b"{}"}
    files = {
        "a.pt2": zipped({**model, "m/data/aotinductor/model/a.wrapper.so": ELF}),
        "b.pt2": zipped({**model, "m/data/weights/weight_0": ACTS}),
        "c.pt2": zipped({**model, "m/data/sample_inputs/model.pt": zipped({"x/data.pkl": ACTS})}),
        "d.params": PROTOCOL_0 + b"and more",
        "e.mlpackage/Data/weight.bin": PROTOCOL_0 + b"and more",
    }
    put(tmp_path, files)
    result = check([str(tmp_path)])
    paths = {os.path.relpath(saved.path, tmp_path) for saved in result.checkpoints if saved.findings}
    assert paths == set(files)
    assert result.status == 2


def test_sarif_notifies_of_models_that_are_not_checked(tmp_path: Path) -> None:
    good(tmp_path)
    put(tmp_path, {"a.gguf": FOREIGN["m.gguf"]})
    status, run = sarif(".", cwd=tmp_path)
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    descriptors = run["tool"]["driver"]["notifications"]
    assert (status, run["invocations"][0]["executionSuccessful"]) == (2, False)
    assert (
        descriptors[note["descriptor"]["index"]]["id"] == note["descriptor"]["id"] == "ckpttool/not-checked"
    )
    assert note["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a.gguf"
    assert run["results"] == []


# --- Keras --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", KERAS)
def test_a_configuration_is_judged_on_every_branch(tmp_path: Path, change: Callable[[Any], None]) -> None:
    topics = ["loading", "model"] if change in WITHOUT_WEIGHTS else ["loading"]
    for name in ("x.h5", "x.weights.h5"):
        file = tmp_path / name
        file.write_bytes(hdf5(change))
        assert [finding.topic for finding in check([str(file)]).checkpoints[0].findings] == topics
    assert [finding.topic for finding in diagnose(str(file)).findings] == topics
    assert in_process("inspect", file, "--strict").status == 1


def test_what_keras_never_calls_is_fine(tmp_path: Path) -> None:
    def plain(file: Any) -> None:
        layers = [{"class_name": "Dense", "config": {"name": "d", "units": 3, "activation": "relu"}}]
        file.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": {"layers": layers}})

    (tmp_path / "x.h5").write_bytes(hdf5(plain))
    assert check([str(tmp_path)]).clean


def nested(cls: str, inner: Any) -> dict[str, Any]:
    return {"class_name": cls, "config": {"name": "outer", "layer": inner}}


def function(module: str, name: str) -> dict[str, Any]:
    return {"class_name": "function", "module": module, "config": name, "registered_name": name}


def calls(symbol: object, cls: str = "TFOpLambda") -> dict[str, Any]:
    """Return a layer of tf_keras that calls a function of TensorFlow."""
    return {"class_name": cls, "config": {"name": "w", "function": symbol}}


def of(module: str | None, cls: str, registered: str | None = None, /, **config: Any) -> dict[str, Any]:
    return {"module": module, "class_name": cls, "config": config, "registered_name": registered}


def dense(activation: Any) -> dict[str, Any]:
    return {"class_name": "Dense", "config": {"name": "d", "units": 1, "activation": activation}}


def operation(op: str) -> dict[str, Any]:
    node = {"name": "x", "op": op, "input": ["a"]}
    return {"class_name": "TensorFlowOpLayer", "config": {"name": "x", "node_def": node, "constants": {}}}


def typed(module: str, name: str, config: Any = ()) -> dict[str, Any]:
    result = {"class_name": "__typespec__", "spec_name": name, "module": module, "registered_name": None}
    return {**result, "config": list(config)}


# By what each does: the function or class that is called, the file that is read.
SYMBOLS = (
    *("io.write_file", "io.read_file", "io.gfile.remove", "io.matching_files", "io.decode_csv"),
    *("raw_ops.WriteFile", "raw_ops.AddV2", "compat.v1.write_file", "compat.v1.io.write_file"),
    *("compat.v1.py_func", "py_function", "numpy_function", "compat.v1.numpy_function"),
    *("load_op_library", "load_library", "compat.v1.load_op_library", "compat.v1.load_file_system_library"),
    *("function", "import_graph_def", "graph_util.import_graph_def", "print", "compat.v1.Print"),
    *(
        "compat.v1.gfile.Copy",
        "compat.v1.gfile.DeleteRecursively",
        "compat.v1.wrap_function",
        "vectorized_map",
    ),
    *("compat.v1.summary.FileWriter", "summary.create_file_writer", "summary.experimental.write_raw_pb"),
    *("saved_model.load", "compat.v1.saved_model.load", "__internal__.saved_model.load_partial"),
    *("debugging.experimental.enable_dump_debug_info", "debugging.Assert", "profiler.experimental.start"),
    *(
        "data.TextLineDataset",
        "data.Dataset.from_generator",
        "train.load_checkpoint",
        "train.latest_checkpoint",
    ),
    *(
        "compat.v1.train.import_meta_graph",
        "compat.v1.train.NewCheckpointReader",
        "lookup.TextFileInitializer",
    ),
    *(
        "keras.utils.get_file",
        "keras.models.load_model",
        "keras.saving.load_model",
        "keras.losses.deserialize",
    ),
    *("keras.activations.get", "keras.backend.function", "keras.backend.map_fn", "keras.backend.set_floatx"),
    *(
        "keras.preprocessing.image.load_img",
        "lite.experimental.load_delegate",
        "config.experimental_connect_to_host",
    ),
    *("distribute.experimental.ParameterServerStrategy", "random.fixed_unigram_candidate_sampler"),
    *(
        "map_fn",
        "while_loop",
        "cond",
        "case",
        "scan",
        "foldl",
        "xla_custom_call",
        "rpc_client",
        "math.load_library",
    ),
    *(
        "math.nn.function",
        "experimental.numpy.load",
        "ragged.map_flat_values",
        "sysconfig.get_lib",
        "",
        "math.",
    ),
    *("nosuch", "nn.nosuch", "math.add ", "Math.add", "compat.v1.compat.v1.add", "compat.v2.io.write_file"),
    *(None, 7, ["math.add"], {"class_name": "x"}),
)
IMPORTED = (
    *(
        ("os", "system"),
        ("builtins", "eval"),
        ("builtins", "exec"),
        ("builtins", "__import__"),
        ("sys", "exit"),
    ),
    *(
        ("keras.utils", "get_file"),
        ("keras.models", "load_model"),
        ("keras", "load_model"),
        ("numpy", "load"),
    ),
    *(("keras.saving", "load_weights"), ("keras.src.utils.file_utils", "get_file"), ("torch", "load")),
    *(("keras.config", "enable_unsafe_deserialization"), ("keras.losses", "deserialize"), ("joblib", "load")),
    *(
        ("keras.src.utils.python_utils", "func_load"),
        ("keras.ops", "vectorize"),
        ("keras.activations", "get"),
    ),
    *(("keras.applications", "ResNet50"), ("keras.datasets.mnist", "load_data"), ("my.own", "square")),
    *(("tensorflow.python.ops.gen_io_ops", "write_file"), ("tensorflow.python.ops.math_ops", "py_func")),
    *(("tensorflow.python.framework.load_library", "load_op_library"), ("tensorflow", "load_op_library")),
)
ACTING_CONFIGS: dict[str, Any] = {
    "Lambda": LAMBDA,
    "Lambda of a package": {"class_name": "Package>Lambda", "config": {}},
    "Lambda of Keras 3": of("keras.layers", "Lambda", function={"class_name": "__lambda__"}),
    "Lambda elsewhere": of("other.layers", "Lambda"),
    "Lambda in a wrapper": nested("TimeDistributed", LAMBDA),
    "Lambda in a cell": nested("Bidirectional", {"class_name": "RNN", "config": {"cell": LAMBDA}}),
    "Lambda in a model": {
        "class_name": "Functional",
        "config": {"layers": [{"class_name": "Model", "config": MODEL}]},
    },
    "Lambda in a list": [[{"a": [LAMBDA]}]],
    "Lambda in a build_config": {**of("keras.layers", "Dense"), "build_config": {"x": LAMBDA}},
    "lambda of a loss": {
        "compile_config": {"loss": {"class_name": "__lambda__", "config": {"value": ["4wE="]}}}
    },
    "lambda of an input": {"class_name": "Add", "inbound_nodes": [{"args": [{"class_name": "__lambda__"}]}]},
    "SavedModel": of("keras.layers", "TFSMLayer", filepath="x"),
    "SavedModel without a module": {"class_name": "TFSMLayer", "config": {"filepath": "x"}},
    "pickled module": of("keras.layers", "TorchModuleWrapper", module="UEs="),
    "Jax": of("keras.layers", "JaxLayer"),
    "Flax": of("keras.src.utils.jax_layer", "FlaxLayer"),
    "vocabulary of a file": {"class_name": "StringLookup", "config": {"vocabulary": "/etc/passwd"}},
    "vocabulary of Keras 3": of("keras.layers", "IntegerLookup", "IntegerLookup", vocabulary="/etc/passwd"),
    "vocabulary in bytes": of(
        "keras.layers", "StringLookup", vocabulary={"class_name": "__bytes__", "config": {"value": "/etc/x"}}
    ),
    "vocabulary in a list": of("keras.layers", "StringLookup", vocabulary=[["/etc/passwd"]]),
    "vocabulary in an object": of("keras.layers", "StringLookup", vocabulary={"path": "/etc/passwd"}),
    "vocabulary of IndexLookup": of(
        "keras.src.layers.preprocessing.index_lookup", "IndexLookup", vocabulary="x"
    ),
    "weights of words": {"class_name": "TextVectorization", "config": {"idf_weights": "x.txt"}},
    "vocabulary of a column": {
        "class_name": "VocabularyFileCategoricalColumn",
        "config": {"vocabulary_file": "x"},
    },
    "checkpoint of a column": {"class_name": "EmbeddingColumn", "config": {"ckpt_to_load_from": "x"}},
    "residual code": {
        "class_name": "ResidualWrapper",
        "config": {"residual_fn": ["4wE=", None, None], "residual_fn_type": "lambda"},
    },
    "dropout code": {
        "class_name": "DropoutWrapper",
        "config": {"dropout_fn": ["4wE="], "dropout_fn_type": "lambda"},
    },
    "dropout of a module": {
        "class_name": "DropoutWrapper",
        "config": {"dropout_fn": "system", "dropout_fn_type": "function", "dropout_fn_module": "os"},
    },
    "Merge of Keras 1": {"class_name": "Merge", "config": {"mode": "4wE=", "mode_type": "lambda"}},
    "class of the system": {"module": "posix", "class_name": "system", "config": {}},
    "class of a process": of("subprocess", "Popen"),
    "class that is a function": of("torch", "load"),
    "class of Keras that is unknown": of("keras.layers", "Unheard"),
    "class of a callback": of("keras.callbacks", "ModelCheckpoint", filepath="x"),
    "class of a data set": of("tensorflow.python.data.ops.readers", "TextLineDataset", filenames="x"),
    "class under another name": of("keras.src.utils.file_utils", "Dense", "get_file"),
    "class in a class": of("keras.src.utils.file_utils", "file_utils.get_file"),
    "class by a number": {"class_name": 7, "config": {}},
    "registered in a list": {
        "class_name": "Dense",
        "module": "keras.layers",
        "registered_name": [],
        "config": {},
    },
    "function registered in a list": {**function("keras.losses", "mse"), "registered_name": []},
    "class in a list": {"class_name": ["Dense"], "config": {}},
    "module in a list": {"class_name": "Dense", "module": ["keras.layers"], "config": {}},
    "map": of("keras.src.ops.core", "Map"),
    "scan": of("keras.src.ops.core", "Scan"),
    "function without a name": {"class_name": "function", "module": "keras.ops", "config": {"a": 1}},
    "function under another name": {**function("keras.losses", "mse"), "registered_name": "deserialize"},
    "function in a loss table": {"class_name": "deserialize_keras_object", "config": {"identifier": "x"}},
    "dataset": {"class_name": "ClassMethod", "config": {"cls_symbol": "data.TFRecordDataset"}},
    "class method": {
        "class_name": "ClassMethod",
        "config": {"cls_symbol": "RaggedTensor", "method_name": "__init__"},
    },
    "class method of a file": {"class_name": "ClassMethod", "config": {"cls_symbol": "io.gfile.GFile"}},
    "attribute": {"class_name": "InstanceProperty", "config": {"attr_name": "__class__"}},
    "method": {"class_name": "InstanceMethod", "config": {"attr_name": "__getitem__"}},
    "method of a module": {"class_name": "InstanceMethod", "config": {"attr_name": "system"}},
    "operation that writes": operation("WriteFile"),
    "operation that calls": operation("PyFunc"),
    "operation of a function": operation("StatefulPartitionedCall"),
    "operation in bytes": {"class_name": "TensorFlowOpLayer", "config": {"node_def": "\n\u0001a"}},
    "type of a module": typed("os", "system"),
    "type of a data set": typed("tensorflow.python.data.ops.readers", "TextLineDataset"),
    **{f"function {module}.{name}": dense(function(module, name)) for module, name in IMPORTED},
    **{f"symbol {symbol}": calls(symbol) for symbol in SYMBOLS},
    "slice": calls("io.write_file", "SlicingOpLambda"),
    "symbol with a module": {**of("keras.layers", "TFOpLambda", "TFOpLambda", function="io.write_file")},
}


def verdict(config: Any) -> str:
    audit = keras_config.audit_json(json.dumps(config), "model_config")
    assert audit.unjudged == ()
    return code_references.worst_verdict(audit.code_references)


@pytest.mark.parametrize("name", ACTING_CONFIGS)
def test_configurations_that_act(name: str) -> None:
    assert verdict(ACTING_CONFIGS[name]) == code_references.CODE


@pytest.mark.parametrize(
    "config",
    [
        {"class_name": "MyLayer", "config": {"units": 3}},
        {"class_name": "Package>MyLayer", "config": {}},
        {"class_name": "Custom>Dense", "config": {}},
        of(None, "MyLayer", "Package>MyLayer"),
        of("__main__", "MyLayer", "MyLayer"),
        of("my.layers", "MyLayer", "MyLayer"),
        of("keras_hub.src.layers", "Backbone", "keras_hub>Backbone"),
        of("keras.layers", "Dense", "Package>MyDense"),
        of("evil", "TFOpLambda", function="math.add"),
        of("evil", "TensorShape"),
        dense(function("builtins", "my_activation")),
        dense({**function("builtins", "Package>my_activation"), "registered_name": "function"}),
        dense(function("__main__", "my_activation")),
    ],
)
def test_configurations_that_need_classes(config: Any) -> None:
    assert verdict(config) == code_references.CLASSES


@pytest.mark.parametrize(
    "config",
    [
        dense("relu"),
        {"class_name": "Dense", "config": {"kernel_initializer": {"class_name": "Zeros"}}},
        calls("math.add"),
        calls("concat"),
        calls("compat.v1.transpose"),
        calls("compat.v1.nn.softmax"),
        calls("keras.backend.sum"),
        calls("__operators__.getitem", "SlicingOpLambda"),
        operation("AddV2"),
        {"class_name": "InstanceProperty", "config": {"attr_name": "flat_values"}},
        {"class_name": "InstanceMethod", "config": {"attr_name": "to_tensor"}},
        {
            "class_name": "ClassMethod",
            "config": {"cls_symbol": "RaggedTensor", "method_name": "from_row_splits"},
        },
        {"class_name": "StringLookup", "config": {"vocabulary": ["a", "b"]}},
        of("keras.layers", "StringLookup", vocabulary={"class_name": "__tuple__", "items": ["a", "b"]}),
        of("keras.layers", "IntegerLookup", vocabulary=[3, 4], idf_weights=None),
        of("keras.models", "Functional"),
        of("keras.src.models.functional", "Functional"),
        of("tf_keras.src.engine.functional", "Functional"),
        of("keras.src.ops.numpy", "Sin", "Sin", name="sin"),
        of("keras.optimizers", "Adam", "Custom>Adam"),
        {"class_name": "Custom>Adam", "config": {"learning_rate": 0.1}},
        {"class_name": "adam", "config": {}},
        of("keras", "DTypePolicy", name="float32"),
        dense(function("keras.activations", "relu")),
        dense(function("keras.src.activations.activations", "relu")),
        dense(function("keras.ops", "sin")),
        dense(function("builtins", "relu")),
        dense({**function("builtins", "mish"), "registered_name": "function"}),
        dense(function("tensorflow.python.ops.gen_nn_ops", "relu")),
        dense(function("tensorflow.python.ops.nn_ops", "softmax_v2")),
        {
            "class_name": "DropoutWrapper",
            "config": {
                "dropout_fn": "_default_dropout_state_filter_visitor",
                "dropout_fn_type": "function",
                "dropout_fn_module": "tf_keras.src.layers.rnn.cell_wrappers",
            },
        },
        {"class_name": "Merge", "config": {"mode": "concat", "mode_type": "raw"}},
        typed("tensorflow.python.framework.tensor", "TensorSpec"),
        {"class_name": "TypeSpec", "type_spec": "tf.TensorSpec", "serialized": []},
        {"class_name": "__tuple__", "items": [1, 2]},
        {"class_name": "__numpy__", "config": {"value": [1], "dtype": "int32"}},
    ],
)
def test_configurations_of_keras_alone(config: Any) -> None:
    assert keras_config.audit_json(json.dumps(config), "model_config") == keras_config.ConfigAudit()


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe\x00", None, 7, ["{}"], "[" * 100_000])
def test_what_is_no_configuration_is_not_judged(text: object) -> None:
    audit = keras_config.audit_json(text, "model_config")
    assert audit.code_references == ()
    assert len(audit.unjudged) == 1


def test_a_model_in_json_is_judged_and_other_json_is_not(tmp_path: Path) -> None:
    good(tmp_path)
    fine = {"class_name": "Sequential", "config": {"layers": [dense("relu")]}}
    others = {"a.json": fine, "b.json": {"list": [LAMBDA]}, "c.json": {"class_name": "MyModel", "config": {}}}
    put(tmp_path, {name: json.dumps(content).encode() for name, content in others.items()})
    put(tmp_path, {"d.json": b"{not json", "e.json": b"[1]"})
    assert check([str(tmp_path)]).clean
    text = json.dumps(MODEL)
    for name in ("model.json", "unpacked.keras/config.json", "architecture", "x.txt"):
        for data in (text, f"\n  {text}", text.replace('"class_name"', '"\\u0063lass_name"')):
            put(tmp_path, {name: data.encode()})
            (row,) = [checkpoint for checkpoint in check([str(tmp_path)]).checkpoints if checkpoint.findings]
            assert (row.path, [item.topic for item in row.findings]) == (str(tmp_path / name), ["loading"])
        (tmp_path / name).unlink()


# --- SavedModels --------------------------------------------------------------------------------------


def saved_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SEEDS / "saved_model", tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("keras_metadata.pb", metadata(LAMBDA)),
        ("keras_metadata.pb", metadata(MODEL)),
        ("keras_metadata.pb", b"\xff\xff\xff"),
        ("saved_model.pb", b"\xff\xff\xff"),
        ("saved_model.cpb", b""),
        ("variables/evil.pkl", PROTOCOL_0),
        ("assets/words.txt", PROTOCOL_0),
        ("evil", PROTOCOL_0),
    ],
)
def test_nothing_hides_in_a_saved_model(tmp_path: Path, name: str, data: bytes) -> None:
    folder = saved_model(tmp_path)
    assert check([str(folder)]).clean
    put(folder, {name: data})
    assert not check([str(folder)]).clean
    assert not check([str(tmp_path)]).clean


def test_a_graph_in_text_alone_is_not_judged(tmp_path: Path) -> None:
    folder = saved_model(tmp_path)
    (folder / "saved_model.pb").rename(folder / "saved_model.pbtxt")
    assert not check([str(folder)]).clean


@pytest.mark.parametrize("length", [b"\x09", b"\x89\x00", b"\x89\x80\x00"])
@pytest.mark.parametrize("tag", [b"\x12", b"\x92\x00"])
def test_an_operation_is_found_however_its_length_is_written(tag: bytes, length: bytes) -> None:
    data = field(1, field(1, "a") + tag + length + b"WriteFile" + field(3, "b"))
    assert [name.name for name in tf_operations.audit_graph(memoryview(data), "x") or ()] == ["WriteFile"]


def test_a_graph_without_such_operations_is_no_checkpoint(tmp_path: Path) -> None:
    good(tmp_path)
    (tmp_path / "x.pb").write_bytes(GRAPH.replace(b"WriteFile", b"Transpose"))
    assert check([str(tmp_path)]).clean
    (tmp_path / "x.pb").write_bytes(GRAPH)
    assert not check([str(tmp_path)]).clean


# --- Files that cannot be read ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.pt", "x.bin", "x.npz", "x.keras"])
def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    good(tmp_path)
    (tmp_path / name).write_bytes(b"x" * 100)
    real = filesystem.read_bytes

    def content(path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(f"/{name}"):
            raise PermissionError(13, "Permission denied")
        return real(path, offset, length)

    monkeypatch.setattr(filesystem, "read_bytes", content)
    result = check([str(tmp_path)])
    assert [checkpoint.path for checkpoint in result.failed] == [str(tmp_path / name)]


def test_a_folder_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good(tmp_path)
    real = filesystem.listdir

    def listdir(path: str) -> list[str]:
        if path.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(filesystem, "listdir", listdir)
    assert [checkpoint.path for checkpoint in check([str(tmp_path)]).failed] == [str(tmp_path / "closed")]


def test_a_file_that_vanishes_and_one_that_breaks_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = good(tmp_path)
    real = candidates.collect_candidates

    def collect(paths: Any) -> candidates.CandidateCollector:
        collector = real(paths)
        (tmp_path / "agent.pt").unlink()
        return collector

    monkeypatch.setattr("ckpttool.commands.check.collect_candidates", collect)
    monkeypatch.setattr("ckpttool.formats.npz.read", lambda _: [][0])
    result = check([str(tmp_path)])
    assert len(result.checkpoints) == len(names)
    assert {Path(checkpoint.path).name for checkpoint in result.failed} == {"agent.pt", "arrays.npz"}


def test_too_many_files_are_an_error(tmp_path: Path) -> None:
    good(tmp_path)
    ran = in_process("--limit", "checked_files=5", "check", tmp_path)
    assert ran.status == 2


def test_an_archive_by_its_name_stands_for_its_members(tmp_path: Path) -> None:
    put(
        tmp_path,
        {"text.zip": zipped({"a.txt": b"text"}), "x.tar": tarred({"a.npy": numbers(1), "b.pt": b""})},
    )
    assert in_process("check", tmp_path / "text.zip").status == 2
    ran = in_process("check", tmp_path / "x.tar", "--json")
    assert (ran.status, [bool(row["error"]) for row in ran.json()["checkpoints"]]) == (2, [False, True])


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    assert in_process("check", tmp_path).status == 2
    (tmp_path / "README.md").write_text("text")
    assert in_process("check", tmp_path).status == 2


# --- SARIF --------------------------------------------------------------------------------------------


def sarif(*arguments: object, cwd: Path) -> tuple[int, dict[str, Any]]:
    jsonschema = pytest.importorskip("jsonschema")
    ran = in_process("check", *arguments, "--sarif", "found.sarif", "--force", cwd=cwd)
    log = json.loads((cwd / "found.sarif").read_text())
    jsonschema.validate(log, SCHEMA)
    return ran.status, log["runs"][0]


def test_sarif(tmp_path: Path) -> None:
    good(tmp_path)
    put(tmp_path, {"a b#ü.pkl": PROTOCOL_0, "sub/nan.npy": numbers(float("nan")), "empty.pt": b""})
    status, run = sarif(".", cwd=tmp_path)
    assert status == run["invocations"][0]["exitCode"] == 2
    assert run["invocations"][0]["executionSuccessful"] is False
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["properties"]["kind"] == "not_a_checkpoint"
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    results = {
        item["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]: item for item in run["results"]
    }
    assert {uri: (result["ruleId"], result["level"]) for uri, result in results.items()} == {
        "a%20b%23%C3%BC.pkl": ("ckpttool/loading", "error"),
        "sub/nan.npy": ("ckpttool/numbers", "warning"),
        "empty.pt": ("ckpttool/unreadable", "error"),
    }
    for result in results.values():
        location = result["locations"][0]["physicalLocation"]["artifactLocation"]
        assert location["uriBaseId"] in run["originalUriBaseIds"]
        assert rules[result["ruleIndex"]] == result["ruleId"]
    prints = [result["partialFingerprints"] for result in run["results"]]
    assert len({json.dumps(item) for item in prints}) == len(prints)
    assert sarif(".", cwd=tmp_path)[1]["results"] == run["results"]


def test_sarif_of_good_files_of_folders_and_of_what_cannot_run(tmp_path: Path) -> None:
    put(tmp_path, {"x/evil.pkl": PROTOCOL_0})
    (tmp_path / "x" / "y").mkdir()
    status, run = sarif("x", cwd=tmp_path)
    assert (status, run["invocations"][0]["executionSuccessful"]) == (1, True)
    status, run = sarif(TORCH_SAMPLE, cwd=tmp_path)
    assert (status, run["results"]) == (0, [])
    put(tmp_path, {"two.zip": zipped({"a.pkl": PROTOCOL_0, "b.pkl": PROTOCOL_0})})
    status, run = sarif("two.zip", ".", cwd=tmp_path)
    assert status == 1
    assert len({json.dumps(item["partialFingerprints"]) for item in run["results"]}) == len(run["results"])
    status, run = sarif("none*", cwd=tmp_path)
    assert (status, len(run["invocations"][0]["toolExecutionNotifications"])) == (2, 1)


def test_sarif_replaces_no_checkpoint(tmp_path: Path) -> None:
    shutil.copy(TORCH_SAMPLE, tmp_path / "agent.pt")
    ran = in_process("check", "agent.pt", "--sarif", "agent.pt", "--force", cwd=tmp_path)
    assert ran.status == 2
    assert (tmp_path / "agent.pt").read_bytes() == TORCH_SAMPLE.read_bytes()


# What stops the check, too, is written only to a file that may be replaced.
@pytest.mark.parametrize("path", [str(TORCH_SAMPLE), "none.pt"])
def test_sarif_replaces_a_file_only_by_force(path: str, tmp_path: Path) -> None:
    sarif(TORCH_SAMPLE, cwd=tmp_path)
    before = (tmp_path / "found.sarif").read_bytes()
    ran = in_process("check", path, "--sarif", "found.sarif", "--json", cwd=tmp_path)
    assert (ran.status, ran.json()["error"]["kind"]) == (2, "target_exists")
    assert (tmp_path / "found.sarif").read_bytes() == before


# --- How pre-commit calls it --------------------------------------------------------------------------


def hooks() -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def test_the_hook_fails_on_findings_and_on_what_cannot_be_read(tmp_path: Path) -> None:
    """pre-commit calls the entry in the repository's root, with the names of changed files as arguments."""
    fine = good(tmp_path)
    put(tmp_path, {"evil.pt": PROTOCOL_0, "pointer.pt": POINTER})
    files = [str(path.relative_to(tmp_path)) for path in (tmp_path / "served").rglob("*") if path.is_file()]
    files += [name for name in fine if (tmp_path / name).is_file()]
    hook = next(hook for hook in hooks() if hook["id"] == "ckpttool-pickles")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    entry = [sys.executable, "-m", *shlex.split(hook["entry"]), *hook.get("args", [])]
    command = [*entry, *files, "evil.pt", "pointer.pt"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 2

    def status(*names: str) -> int:
        return in_process(*entry[3:], *names, cwd=tmp_path).status

    assert status(*files) == 0
    assert status(*files, "evil.pt") == 1
    assert status(*files, "pointer.pt") == 2
