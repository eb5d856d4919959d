"""The tar archives of torch's first releases: written here as those did, read by PyTorch as referee."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import (
    Checkpoint,
    CkpttoolError,
    File,
    FormatError,
    Span,
    TruncatedError,
    UnsupportedError,
    key,
)
from ckpttool.encodings import Dict, Global, PersistentId, PickleObject, dumps, tar_members
from ckpttool.formats import Probe, open_checkpoint, torch_legacy
from ckpttool.formats.torch_legacy import PYTORCH_TAR
from tests import truths
from tests.conftest import CORPUS
from tests.golden_texts import Golden
from tests.test_format_pytorch import floats
from tests.test_format_pytorch_containers import WithoutChecksums, tree_contents
from tests.torch_forms import SYS_INFO, packed, plain, tar

FLOATS = Global("torch", "FloatStorage")
TENSORS = Global("torch", "FloatTensor")
ONE = floats(1, 2, 3, 4)


def storages(*entries: tuple[Any, bytes], views: Any = ()) -> bytes:
    """Return the member `storages`: a description and the bytes for each, 4 bytes an element."""
    data = pickle.dumps(len(entries), 2)
    for description, content in entries:
        data += dumps(description) + struct.pack("<q", len(content) // 4) + content
    return data + pickle.dumps(list(views), 2)


def tensors(*entries: tuple[Any, int, tuple[int, ...]]) -> bytes:
    """Return the member `tensors`: a description, the rank, and sizes, strides and offset for each."""
    data = pickle.dumps(len(entries), 2)
    for description, rank, numbers in entries:
        data += dumps(description) + struct.pack(f"<i4x{len(numbers)}q", rank, *numbers)
    return data


def members(**changed: bytes | None) -> dict[str, bytes]:
    """Return the members of a good archive of one tensor, with some changed or (None) left out."""
    contents: dict[str, bytes | None] = {
        "sys_info": pickle.dumps(SYS_INFO, 2),
        "pickle": dumps({"a": PersistentId("2000")}),
        "tensors": tensors(((2000, 1000, TENSORS), 1, (4, 1, 0))),
        "storages": storages(((1000, "cpu", FLOATS), ONE)),
        **changed,
    }
    return {name: data for name, data in contents.items() if data is not None}


def read(folder: Path, **changed: bytes | None) -> Checkpoint:
    (folder / "x.tar").write_bytes(packed(members(**changed)))
    return torch_legacy.read_tar(str(folder / "x.tar"))


class TestTar(WithoutChecksums):
    module, damages = PYTORCH_TAR, 30

    def make(self, folder: Path) -> str:
        names = range(6)
        changed = {
            "pickle": dumps({"step": 3, **{f"w{n}": PersistentId(str(100 + n)) for n in names}}),
            "tensors": tensors(*(((100 + n, n, TENSORS), 2, (5, 10, 10, 1, 0)) for n in names)),
            "storages": storages(*(((n, "cpu", FLOATS), bytes(range(200)) * 10) for n in names)),
        }
        (folder / "x").write_bytes(packed(members(**changed)))
        return str(folder / "x")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


# ------------------------------------------------------------------ reading


def test_a_tensor_is_a_span_in_the_archive(tmp_path: Path) -> None:
    checkpoint = read(tmp_path)
    leaf = checkpoint.tree[key("a"),]
    assert isinstance(leaf.source, Span)
    assert (leaf.key, leaf.array().tolist()) == ("a", [1, 2, 3, 4])
    assert (str(checkpoint.writer).split()[-1], checkpoint.integrity) == ("1000", "none")


def test_parts_of_a_storage_and_one_tensor_at_two_places(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        pickle=dumps({"whole": PersistentId("1"), "part": PersistentId("2"), "again": PersistentId("2")}),
        tensors=tensors(((1, 1000, TENSORS), 2, (2, 2, 1, 2, 0)), ((2, 1001, TENSORS), 1, (2, 1, 0))),
        storages=storages(((1000, "cpu", FLOATS), ONE), views=[(1001, 1000, 1, 2)]),
    ).tree
    assert [leaf.array().tolist() for _, leaf in tree.tensors()] == [[[1, 3], [2, 4]], [2, 3]]
    assert [alias.key for alias in tree.aliases[key("part"),]] == ["again"]


def test_tensors_without_memory_and_storages_alone(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        pickle=dumps([PersistentId("2000"), PersistentId("1000")]),
        tensors=tensors(((2000, None, Global("torch", "DoubleTensor")), 1, (0, 1, 0))),
    ).tree
    assert [(leaf.dtype, leaf.shape) for _, leaf in tree.tensors()] == [("float64", (0,)), ("float32", (4,))]


def test_files_before_the_first_release_had_no_locations(tmp_path: Path) -> None:
    data = storages(((1000, FLOATS), ONE))
    without_views = data[: -len(pickle.dumps([], 2))]
    tree = read(tmp_path, tensors=tensors(((2000, TENSORS, 1000), 1, (4, 1, 0))), storages=without_views).tree
    assert tree[key("a"),].array().tolist() == [1, 2, 3, 4]


def test_the_source_code_of_classes_is_listed(tmp_path: Path) -> None:
    net = PickleObject(PersistentId((Global("nets", "Net"), "nets.py", "class Net: ...")), (), 0)
    net.state = {"w": PersistentId("2000")}
    checkpoint = read(tmp_path, pickle=dumps(net))
    assert checkpoint.details["sources"]["nets.Net"]["source"] == "class Net: ..."
    assert [leaf.key for _, leaf in checkpoint.tree.tensors()] == ["w"]


def test_a_storage_that_is_named_in_the_call(tmp_path: Path) -> None:
    where = ("storage", FLOATS, "1000", "cpu", 4)
    args = (where, 1, (3,), (1,), False, Dict("collections.OrderedDict"))
    call = PickleObject(Global("torch._utils", "_rebuild_tensor_v2"), args, 0)
    tree = read(tmp_path, pickle=dumps({"w": call}), tensors=None).tree
    assert tree[key("w"),].array().tolist() == [2, 3, 4]


# ------------------------------------------------------------------ refusing

STORAGE = pickle.dumps(1, 2) + dumps((1, "cpu", FLOATS))
WRONG: dict[str, dict[str, bytes | None]] = {
    "no pickle": {"pickle": None},
    "no storages": {"storages": None},
    "sys_info is none": {"sys_info": pickle.dumps(None, 2)},
    "another protocol": {"sys_info": pickle.dumps({**SYS_INFO, "protocol_version": 1001}, 2)},
    "no tensors": {"tensors": tensors()},
    "the storage is not there": {"tensors": tensors(((2000, 1, TENSORS), 1, (4, 1, 0)))},
    "beyond the storage": {"tensors": tensors(((2000, 1000, TENSORS), 1, (4, 1, 1)))},
    "65 dimensions": {"tensors": tensors(((2000, 1000, TENSORS), 65, (1,) * 131))},
    "2^31 - 1 dimensions": {"tensors": tensors(((2000, 1000, TENSORS), 0x7FFFFFFF, ()))},
    "minus one dimension": {"tensors": tensors(((2000, 1000, TENSORS), -1, (0,)))},
    "numbers are missing": {"tensors": tensors(((2000, 1000, TENSORS), 1, (4, 1)))},
    "a key twice": {"tensors": tensors(*[((2000, 1000, TENSORS), 1, (4, 1, 0))] * 2)},
    "the key of a storage": {"tensors": tensors(((1000, 1000, TENSORS), 1, (4, 1, 0)))},
    "a million tensors": {"tensors": pickle.dumps(1_000_000, 2)},
    "a storage twice": {"storages": storages(*[((1000, "cpu", FLOATS), ONE)] * 2)},
    "a storage without a class": {"storages": storages(((1000, "cpu", "float"), ONE))},
    "a storage described otherwise": {"storages": storages(((1000,), ONE))},
    "a key that is a tuple": {"storages": storages((((1,), "cpu", FLOATS), ONE))},
    "2^36 elements": {"storages": STORAGE + struct.pack("<q", 1 << 36)},
    "-1 elements": {"storages": STORAGE + struct.pack("<q", -1)},
    "a part beyond": {"storages": storages(((1000, "cpu", FLOATS), ONE), views=[(1, 1000, 3, 2)])},
    "a part before": {"storages": storages(((1000, "cpu", FLOATS), ONE), views=[(1, 1000, -1, 2)])},
    "a part of nothing": {"storages": storages(((1000, "cpu", FLOATS), ONE), views=[(1, 999, 0, 2)])},
    "a part that is none": {"storages": storages(((1000, "cpu", FLOATS), ONE), views=[7])},
    "another name in the pickle": {"pickle": dumps(PersistentId("2001"))},
    "a name that is none": {"pickle": dumps(PersistentId(1.5))},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused(name: str, tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((FormatError, UnsupportedError)) as caught:
            read(tmp_path, **WRONG[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.file == str(tmp_path / "x.tar")
    assert peak < 1 << 20


def test_a_big_endian_machine_is_not_known(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read(tmp_path, sys_info=pickle.dumps({**SYS_INFO, "little_endian": False}, 2))
    golden(caught.value)


# ------------------------------------------------------------------ the archive


def named(kind: bytes, name: str = "storages", target: str = "pickle") -> bytes:
    """Return an archive with a member of another type before the others."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for item, data in members().items():
            info = tarfile.TarInfo(item)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        archive.addfile(info)
    return stream.getvalue()


KINDS = [
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE),
    *(tarfile.GNUTYPE_SPARSE, tarfile.XGLTYPE),
]


@pytest.mark.parametrize("kind", KINDS)
def test_links_devices_and_folders_are_refused(kind: bytes, tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x").write_bytes(named(kind))
    with pytest.raises(CkpttoolError) as caught:
        open_checkpoint(str(tmp_path / "x"))
    golden(caught.value)


def test_two_members_of_one_name_are_refused(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x").write_bytes(named(tarfile.REGTYPE))
    with pytest.raises(FormatError) as caught:
        open_checkpoint(str(tmp_path / "x"))
    golden(caught.value)


PAX: dict[str, bytes] = {
    "another path": b"15 path=pickle\n",
    "a sparse file": b"22 GNU.sparse.major=1\n",
    "a length that is none": b"xx mtime=1\n",
    "a length of nothing": b"0 mtime=1\n",
    "a length beyond": b"99 mtime=1\n",
    "a size that is none": b"11 size=-1\n",
    "a size beyond the file": b"21 size=999999999999\n",
}


@pytest.mark.parametrize("name", PAX)
def test_pax_headers_that_change_a_member_are_refused(name: str, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for item, data in {"sys_info": b"", "././@PaxHeader": PAX[name], "pickle": b""}.items():
            info = tarfile.TarInfo(item)
            info.size, info.type = len(data), b"x" if item.startswith(".") else b"0"
            archive.addfile(info, io.BytesIO(data))
    (tmp_path / "x").write_bytes(stream.getvalue())
    with pytest.raises((FormatError, UnsupportedError)):
        tar_members.read_tar(File.stamp(str(tmp_path / "x")))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 5000])
def test_members_lie_where_the_standard_library_finds_them(form: int, size: int, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x", "w", format=form) as archive:
        for name in ("sys_info", "größe", "b"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uid = size, 1.5 if form == tarfile.PAX_FORMAT else 1, 1000
            if form == tarfile.PAX_FORMAT and name == "größe":
                info.name = "g"
            archive.addfile(info, io.BytesIO(name.encode()[:1] * size))
    result = tar_members.read_tar(File.stamp(str(tmp_path / "x")))
    with tarfile.open(tmp_path / "x") as archive:
        expected = {info.name: (info.offset_data, info.size) for info in archive}
    assert {name: (span.offset, span.length) for name, span in result.items()} == expected


def test_sizes_in_base_256_and_in_pax_headers(tmp_path: Path) -> None:
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        info = tarfile.TarInfo("sys_info")
        info.size = 9 << 30
        header = info.tobuf(form, "utf-8", "strict")
        with open(tmp_path / "x", "wb") as file:
            file.write(header)
            file.truncate(len(header) + info.size + 1024)
        span = tar_members.read_tar(File.stamp(str(tmp_path / "x")))["sys_info"]
        assert (span.offset, span.length) == (len(header), info.size)


def test_an_archive_that_ends_early(tmp_path: Path) -> None:
    data = packed(members())
    whole = data.rstrip(b"\0")
    end = -(-len(whole) // 512) * 512
    (tmp_path / "x").write_bytes(data[: end + 1024])
    assert len(open_checkpoint(str(tmp_path / "x")).tree) == 1
    for length in (512, 513, 1024, end - 512, end, end + 512, end + 1023):
        (tmp_path / "x").write_bytes(data[:length])
        with pytest.raises(TruncatedError):
            open_checkpoint(str(tmp_path / "x"))


def test_other_tar_archives_are_not_claimed(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "x").write_bytes(packed({"model.pt": b"", "sys_info": b""}))
    assert torch_legacy.tar_claims(Probe(str(tmp_path / "x"))) is None
    with pytest.raises(CkpttoolError) as caught:
        open_checkpoint(str(tmp_path / "x"))
    golden(caught.value)
    (tmp_path / "x").write_bytes(packed({"model.pt": b"", "sys_info": b""}, pax=True))
    assert torch_legacy.tar_claims(Probe(str(tmp_path / "x"))) is None
    (tmp_path / "x").write_bytes(packed(members(), pax=True))
    assert torch_legacy.tar_claims(Probe(str(tmp_path / "x"))) == str(tmp_path / "x")


# ------------------------------------------------------------------ PyTorch as referee

NAMES = ["float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8"]


@pytest.mark.torch
@pytest.mark.parametrize("pax", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_the_tree_is_that_of_a_zip_file(torch: Any, first: bool, pax: bool, tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    value = {
        "views": [base, base[1], base.transpose(0, 2), base[:, ::2]],
        "types": {name: torch.arange(5).to(getattr(torch, name)) for name in NAMES},
        "again": base,
        "empty": torch.empty(0, 3),
        "number": torch.tensor(3.5),
        "step": 3,
    }
    path = tar(torch, value, tmp_path / "x", first=first, pax=pax)
    assert tree_contents(open_checkpoint(str(path)).tree) == tree_contents(
        open_checkpoint(str(plain(torch, value, tmp_path))).tree
    )
    if not first:
        back = torch.load(path, weights_only=False)
        assert torch.equal(back["views"][2], value["views"][2])
        assert all(torch.equal(back["types"][name], value["types"][name]) for name in NAMES)


# ------------------------------------------------------------------ other people's files


@pytest.mark.corpus
def test_corpus_is_read_as_its_truth_says() -> None:
    files = sorted((CORPUS / "torch").rglob("tar_*.tar"))
    assert len(files) >= 6
    for path in files:
        truths.require(PYTORCH_TAR, path)
