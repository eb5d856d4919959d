"""NumPy's archives: numpy as referee both ways, hostile files, and the tree that we record in them."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ckpttool.commands.convert import convert
from ckpttool.conversion.write import save
from ckpttool.core import (
    CkpttoolError,
    FormatError,
    Inline,
    Leaf,
    Record,
    Tree,
    UnsupportedError,
    ValueLeaf,
    display,
    key,
)
from ckpttool.core.digests import digest_checkpoint
from ckpttool.encodings import npy
from ckpttool.formats import Probe, npz, open_checkpoint
from ckpttool.testing.formats import WritingContract
from tests import test_gate
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.recorded_trees import same, trees
from tests.test_wire_npy import BROKEN, ENTRY, header
from tests.trees import leaf
from tests.trees import leaf as tensor_leaf

FIXTURE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
NUMBERS = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?"),
    arrays.complex_number_dtypes(endianness="?", sizes=(64, 128)),
)
NAMES = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=8)


class TestNpz(WritingContract):
    module = npz

    def make(self, folder: Path) -> str:
        save(open_checkpoint(str(TORCH_SAMPLE)).tree, str(folder / "agent.npz"))
        return str(folder / "agent.npz")


# What numpy writes.


@FIXTURE
@given(
    st.dictionaries(NAMES, arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0))),
    st.data(),
)
def test_what_numpy_writes_is_read(tmp_path: Path, value: dict[str, np.ndarray], data: st.DataObject) -> None:
    names = {name.removesuffix(".npy") for name in value}
    if len(names) != len(value) or "file" in value:
        return
    turned = {name: np.array(a, order=data.draw(st.sampled_from("CF"))) for name, a in value.items()}
    file = tmp_path / "x.npz"
    (np.savez if data.draw(st.booleans()) else np.savez_compressed)(file, **turned)
    if not value:
        return
    checkpoint = open_checkpoint(str(file))
    assert (checkpoint.format, checkpoint.integrity) == ("npz", "crc32")
    named = {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}
    assert named.keys() == value.keys()
    for name, array in value.items():
        little = array.astype(array.dtype.newbyteorder("<"))
        assert named[name].dtype == array.dtype.name
        assert named[name].shape == array.shape
        assert bytes(named[name].read()) == little.tobytes()


def test_a_name_is_cut_at_slashes_and_keeps_its_dots(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"actor/l1.weight": np.ones((2, 3)), "a//b": np.ones(1)})
    tree = open_checkpoint(str(tmp_path / "x.npz")).tree
    assert list(tree) == [(key("actor"), key("l1.weight")), (key("a"), key(""), key("b"))]
    assert display(next(iter(tree))) == "actor/l1/weight"


def test_what_is_no_number_is_listed_and_never_decoded(tmp_path: Path) -> None:
    built = {
        "objects": np.array([None, {}], object),
        "structured": np.zeros(2, [("x", "f4"), ("y", "i8")]),
        "dates": np.array(["2020-01-01"], "M8[D]"),
        "texts": np.array(["a", "bc"]),
        "text": np.array("näme"),
        "bytes": np.array([b"ab"]),
        "void": np.zeros(2, "V3"),
        "long": np.zeros(2, np.longdouble),
    }
    np.savez(tmp_path / "x.npz", **built)
    values = dict(open_checkpoint(str(tmp_path / "x.npz")).tree.plain())
    assert {path[0].value: leaf.value for path, leaf in values.items()} == {
        "objects": Record("numpy.ndarray", "|O[2]"),
        "structured": Record("numpy.ndarray", "structured[2]"),
        "dates": Record("numpy.ndarray", "<M8[D][1]"),
        "texts": Record("numpy.ndarray", "<U2[2]"),
        "text": "näme",
        "bytes": Record("numpy.ndarray", "|S2[1]"),
        "void": Record("numpy.ndarray", "|V3[2]"),
        "long": Record("numpy.ndarray", "<f16[2]"),
    }


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_one_array_is_a_checkpoint(tmp_path: Path, version: tuple[int, int]) -> None:
    array = np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3))
    with open(tmp_path / "x.npy", "wb") as stream:
        np.lib.format.write_array(stream, array, version)
    checkpoint = open_checkpoint(str(tmp_path / "x.npy"))
    assert (checkpoint.format, checkpoint.integrity) == ("npz", "none")
    ((path, only),) = checkpoint.tree.tensors()
    # What numpy.savez calls an array without a name.
    assert (path, only.key) == ((key("arr_0"),), "arr_0")
    assert np.array_equal(only.array(), array)


def test_members_that_are_no_arrays_are_named(tmp_path: Path, golden: Golden) -> None:
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("readme.txt", "hello")
    checkpoint = open_checkpoint(str(tmp_path / "x.npz"))
    golden("\n".join(checkpoint.notes))
    assert len(checkpoint.tree) == 1
    # NumPy reads a member by its first bytes, whatever its name.
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as archive:
        archive.writestr("b.old", archive.read("a.npy"))
    os.utime(tmp_path / "x.npz", ns=(1, 1))
    assert np.load(tmp_path / "x.npz")["b.old"].tolist() == [1, 1]
    assert "b.old" in {leaf.key for _, leaf in open_checkpoint(str(tmp_path / "x.npz")).tree.tensors()}
    # Under another name it may be any program's archive.
    assert npz.claims(Probe(str((tmp_path / "x.npz").rename(tmp_path / "x.zip")))) is None


# Hostile files.


def zipped(folder: Path, members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> str:
    with zipfile.ZipFile(folder / "x.npz", "w", method) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return str(folder / "x.npz")


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_a_broken_array_is_refused_with_its_name(tmp_path: Path, data: bytes) -> None:
    file = zipped(tmp_path, [("good.npy", npy.encode_npy_header("|u1", (1,)) + b"x"), ("bad.npy", data)])
    with pytest.raises(FormatError) as caught:
        open_checkpoint(file)
    assert (caught.value.file, caught.value.path) == (file, "bad")
    alone = tmp_path / "x.npy"
    alone.write_bytes(data)
    with pytest.raises(CkpttoolError):
        open_checkpoint(str(alone))


def test_two_members_of_one_name(tmp_path: Path, golden: Golden) -> None:
    data = npy.encode_npy_header("|u1", (1,)) + b"x"
    with pytest.warns(UserWarning, match="Duplicate"):
        file = zipped(tmp_path, [("a.npy", data), ("a.npy", data)])
    golden(refused(in_process("inspect", file)))


def test_a_bomb_is_refused_and_not_unpacked(tmp_path: Path) -> None:
    size = 300 << 20
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w") as out,
    ):
        out.write(npy.encode_npy_header("|u1", (size,)))
        for _ in range(300):
            out.write(bytes(1 << 20))
    assert os.path.getsize(tmp_path / "x.npz") < 1 << 20
    refused(in_process("digest", tmp_path / "x.npz"))
    error = in_process("digest", tmp_path / "x.npz", "--json").json()["error"]
    assert error["kind"] == "limit"
    assert "unpacked_bytes" in error["hint"]
    assert f"{size + 128:,}" in error["message"]


def test_a_member_that_says_less_than_it_unpacks_to(tmp_path: Path) -> None:
    file = zipped(
        tmp_path, [("a.npy", npy.encode_npy_header("|u1", (4096,)) + bytes(4096))], zipfile.ZIP_DEFLATED
    )
    data = bytearray(Path(file).read_bytes())
    whole = len(npy.encode_npy_header("|u1", (4096,))) + 4096
    for at in (22, data.index(b"PK\x01\x02") + 24):
        assert struct.unpack_from("<I", data, at)[0] == whole
        struct.pack_into("<I", data, at, whole - 1)
    Path(file).write_bytes(data)
    with pytest.raises(FormatError):
        digest_checkpoint(open_checkpoint(file))


def test_a_single_array_with_bytes_behind_it(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x.npy").write_bytes(header(ENTRY % "(2,)") + bytes(9))
    golden(refused(in_process("inspect", tmp_path / "x.npy")))


# What we write.


@FIXTURE
@given(tree=trees(torch=False))
def test_any_tree_comes_back_and_numpy_reads_its_arrays(tmp_path: Path, tree: Tree) -> None:
    file = str(tmp_path / "x.npz")
    save(tree, file, force=True, sync=False)
    checkpoint = open_checkpoint(file)
    assert same(checkpoint.tree, tree)
    with np.load(file, allow_pickle=False) as loaded:
        for _, tensor in checkpoint.tree.tensors():
            array = loaded[tensor.key]
            assert (array.shape, array.tobytes()) == (tensor.shape, bytes(tensor.read()))


def test_values_are_arrays_for_others(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "n": 3,
        "x": 0.5,
        "b": True,
        "c": 1 + 2j,
        "s": "hé",
        "none": None,
        "raw": b"x",
        "big": 1 << 80,
    }
    tree = Tree({(key("hyper"), key(name)): ValueLeaf(value) for name, value in values.items()})
    save(tree, str(tmp_path / "x.npz"))
    assert same(open_checkpoint(str(tmp_path / "x.npz")).tree, tree)
    with np.load(tmp_path / "x.npz", allow_pickle=False) as loaded:
        assert sorted(loaded) == ["ckpttool.tree", *(f"hyper/{name}" for name in "bcnsx")]
        for name in "bcnsx":
            assert loaded[f"hyper/{name}"].shape == ()
            assert loaded[f"hyper/{name}"][()] == values[name]


def test_an_array_is_the_same_bytes_as_numpys(tmp_path: Path) -> None:
    built = {
        "a": np.arange(6, dtype="f4").reshape(2, 3), "s": np.float64(2), "e": np.zeros((0, 7), "i8"),
        "b": np.ones(3, bool), "c": np.ones(2, "c8"), "h": np.ones(2, ml_dtypes.bfloat16),
    }  # fmt: skip
    save(Tree({(key(n),): leaf(np.asarray(a), n) for n, a in built.items()}), str(tmp_path / "x.npz"))
    with zipfile.ZipFile(tmp_path / "x.npz") as archive:
        assert archive.testzip() is None
        for name, array in built.items():
            stream = io.BytesIO()
            np.save(stream, array)
            assert archive.read(f"{name}.npy") == stream.getvalue()


def test_plain_arrays_need_no_record(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"x/y": np.ones(3, "f4"), "n": np.arange(3)})
    assert convert(str(tmp_path / "a.npz"), str(tmp_path / "b.npz")).written
    with np.load(tmp_path / "b.npz") as loaded:
        assert loaded.files == ["x/y", "n"]


def test_types_without_a_name_in_numpy_come_back(tmp_path: Path) -> None:
    array = np.arange(3).astype(ml_dtypes.float8_e4m3fn)
    save(Tree({(key("a"),): leaf(array)}), str(tmp_path / "x.npz"))
    ((_, result),) = open_checkpoint(str(tmp_path / "x.npz")).tree.tensors()
    assert result.dtype == "float8_e4m3fn"
    with np.load(tmp_path / "x.npz", allow_pickle=False) as loaded:
        assert np.array_equal(loaded["a"].view(ml_dtypes.float8_e4m3fn), array)


@pytest.mark.parametrize("dtype", ["string", "qint8", "quint4x2", "unknown"])
def test_types_that_no_array_has_are_refused(tmp_path: Path, dtype: str, golden: Golden) -> None:
    tree = Tree({(key("a"), key("b")): Leaf(dtype, (0,), Inline(b""), "a.b")})
    with pytest.raises(UnsupportedError) as caught:
        save(tree, str(tmp_path / "x.npz"))
    golden(caught.value)
    assert not os.listdir(tmp_path)


def test_a_record_of_other_arrays_is_not_used(tmp_path: Path, golden: Golden) -> None:
    save(Tree({(key("a"),): ValueLeaf(1)}), str(tmp_path / "x.npz"))
    with np.load(tmp_path / "x.npz") as loaded:
        record = loaded["ckpttool.tree"]
    for text in (record, record[:-1], record.astype("i8"), record[None]):
        np.savez(tmp_path / "y.npz", **{"w": np.ones(2), "ckpttool.tree": text})
        checkpoint = open_checkpoint(str(tmp_path / "y.npz"))
        assert list(checkpoint.tree) == [(key("w"),)]
        golden("\n".join(checkpoint.notes))


def test_an_agent_of_tensorflow_there_and_back(tmp_path: Path) -> None:
    assert convert(str(TF_SAMPLE), str(tmp_path / "a.npz")).written
    one, other = open_checkpoint(str(TF_SAMPLE)), open_checkpoint(str(tmp_path / "a.npz"))
    assert same(other.tree, one.tree)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as loaded:
        assert loaded["policy/actor/l1/_kernel"].shape == (3, 64)
    # Its names say whose it is: on the way to PyTorch kernels are turned around.
    assert convert(str(tmp_path / "a.npz"), str(tmp_path / "a.pt")).written
    assert convert(str(TF_SAMPLE), str(tmp_path / "b.pt")).written
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_an_agent_of_torch_goes_to_tensorflow(tmp_path: Path) -> None:
    assert convert(str(TORCH_SAMPLE), str(tmp_path / "a.npz")).written
    assert convert(str(tmp_path / "a.npz"), str(tmp_path / "ckpt-1"), to="tf").written
    assert convert(str(TORCH_SAMPLE), str(tmp_path / "ckpt-2"), to="tf").written
    one, other = (digest_checkpoint(open_checkpoint(str(tmp_path / f"ckpt-{n}"))) for n in (1, 2))
    assert {(t.path, t.sha256) for t in one.tensors if "save_counter" not in t.path} == {
        (t.path, t.sha256) for t in other.tensors if "save_counter" not in t.path
    }


def test_arrays_of_nobody_go_to_torch_as_they_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", timesteps=np.arange(3), results=np.ones((3, 2)))
    assert convert(str(tmp_path / "a.npz"), str(tmp_path / "a.pt")).written
    tree = open_checkpoint(str(tmp_path / "a.pt")).tree
    assert {leaf.key: leaf.shape for _, leaf in tree.tensors()} == {"timesteps": (3,), "results": (3, 2)}


@pytest.mark.corpus
def test_real_files_are_read(corpus: Path) -> None:
    files = list((corpus / "torch").rglob("*.npz"))
    assert files
    for file in files:
        result = {leaf.key: leaf.array() for _, leaf in open_checkpoint(str(file)).tree.tensors()}
        with np.load(file, allow_pickle=False) as expected:
            assert result.keys() == set(expected)
            assert all(np.array_equal(result[name], expected[name]) for name in expected)


# --- Names of members ---------------------------------------------------------------------------------------

UNSAFE = [
    "../../evil",
    "/abs/x",
    "..",
    ".",
    "a/../b",
    "a//b",
    "a\\..\\b",
    "C:/x",
    "nul\0x",
    "x.npy",
    "a/x.npy",
    "\n",
]


def test_no_name_of_a_tensor_leads_out_of_the_archive(tmp_path: Path) -> None:
    names = [*UNSAFE, "x", "%2E%2E/%2E%2E/evil", "['../../evil']"]
    tree = Tree({(key(name),): tensor_leaf(np.full(2, n, np.float32)) for n, name in enumerate(names)})
    file = str(tmp_path / "x.npz")
    save(tree, file)
    with zipfile.ZipFile(file) as archive:
        members = archive.namelist()
    for member in members:
        parts = member.split("/")
        assert not {"", ".", ".."} & set(parts), member
        assert not {"\\", "\0"} & set(member), member
        assert member[1:2] != ":"
    assert len(set(members)) == len(names) + 1
    read = open_checkpoint(file).tree
    arrays = np.load(file)
    stored = {name: arrays[name] for name in arrays.files}
    for number, name in enumerate(names):
        assert (read[(key(name),)].array() == number).all()
        assert sum(bool((item == number).all()) for item in stored.values() if item.dtype == np.float32) == 1


def test_a_bare_array_is_measured(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(np.ones((2, 3), np.float32)))
    for words in (
        ["stats"],
        ["doctor"],
        ["report", "--out", str(tmp_path / "x.html")],
        ["check"],
        ["digest"],
    ):
        ran = in_process(words[0], tmp_path / "x.pkl", *words[1:])
        assert ran.status == 0, ran.err
    assert (
        in_process("convert", tmp_path / "x.pkl", tmp_path / "x.h5", "--json").json()["error"]["kind"]
        == "mapping"
    )


def _joblib(arrays: dict[str, np.ndarray]) -> bytes:
    """Return a dict of arrays as joblib writes it, in turn with and without alignment."""
    rows = []
    for at, (name, array) in enumerate(arrays.items()):
        shape = b"".join(b"K" + bytes([n]) for n in array.shape) + (b"\x85", b"\x86")[array.ndim - 1]
        padding = b"\xff" * 5 if at % 2 else None
        body = test_gate.joblib_array(array.tobytes(), "f4", shape, padding)
        rows.append(test_gate.text(name) + body)
    return b"\x80\x02}(" + b"".join(rows) + b"u."


def test_the_arrays_of_a_joblib_file_are_read_in_place(tmp_path: Path) -> None:
    shapes = {"q/fc/w:0": (4, 8), "q/fc/b:0": (8,), "q/out/w:0": (8, 2), "q/out/b:0": (2,)}
    moments = {
        f"dqn/{name.removesuffix(':0')}/{m}:0": s for name, s in shapes.items() for m in ("Adam", "Adam_1")
    }
    generator = np.random.default_rng(0)
    arrays = {name: generator.standard_normal(s).astype("<f4") for name, s in (shapes | moments).items()}
    (tmp_path / "vars.pkl").write_bytes(_joblib(arrays))
    tree = open_checkpoint(str(tmp_path / "vars.pkl")).tree
    leaves = {tree.names[path]: leaf for path, leaf in tree.tensors()}
    assert leaves.keys() == arrays.keys()
    for name, result in leaves.items():
        assert np.array_equal(result.array(), arrays[name])
        assert (result.role == "slot") == (name in moments)
    ran = in_process("convert", "vars.pkl", "vars.npz", "--to", "npz", cwd=tmp_path)
    assert ran.status == 0
    with np.load(tmp_path / "vars.npz") as copy:
        assert all(np.array_equal(copy[name], array) for name, array in arrays.items())
    assert in_process("convert", "vars.pkl", "vars.pt", cwd=tmp_path).status == 0


def test_a_joblib_file_that_ends_in_an_array_is_refused(tmp_path: Path) -> None:
    data = _joblib({"w": np.ones((4, 8), "<f4"), "b": np.ones(8, "<f4")})
    (tmp_path / "x.pkl").write_bytes(data[: data.index(b"\x80?\x00\x00\x80?") + 60])
    assert in_process("inspect", tmp_path / "x.pkl", "--json").json()["error"]["kind"] == "unsupported"


@pytest.mark.parametrize("kind", ["joblib", "zlib"])
def test_a_joblib_file_is_named_with_what_reads_it(kind: str, tmp_path: Path) -> None:
    head = b"\x80\x04}\x8c\x01a\x8c\x13joblib.numpy_pickle\x8c\x11NumpyArrayWrapper\x93)\x81}b"
    stored = head + b"\x01\xff" * 40 + b"us."
    (tmp_path / "x.joblib").write_bytes(stored if kind == "joblib" else zlib.compress(stored))
    error = in_process("inspect", tmp_path / "x.joblib", "--json").json()["error"]
    assert error["kind"] in ("unsupported", "not_a_checkpoint")
    assert "joblib" in error["hint"]
