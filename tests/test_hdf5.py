"""HDF5 listed by a process of its own: filters, layouts, hostile and damaged files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    ChecksumError,
    CkpttoolError,
    File,
    FormatError,
    LimitError,
    TruncatedError,
    UnsupportedError,
)
from ckpttool.formats import hdf5
from tests.golden_texts import Golden

h5py = pytest.importorskip("h5py")


def index(path: Path) -> hdf5.Hdf5Index:
    return hdf5.read_index(hdf5.whole_file(File.stamp(str(path))))


def spent() -> float:
    """Return the processor's seconds that this process's children have used: others may be at work."""
    return sum(os.times()[2:4])


def little(array: np.ndarray) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


ARRAYS = {
    "f2": np.arange(6, dtype="<f2").reshape(2, 3),
    "f4": np.arange(6, dtype="<f4"),
    "f8_big": np.arange(6, dtype=">f8"),
    "f4_big": np.array(1.5, dtype=">f4"),
    "i1": np.array([-1, 2], "i1"),
    "u8": np.array([2**63], "<u8"),
    "i4_big": np.array([-7, 9], ">i4"),
    "bool": np.array([True, False, True]),
    "c8": np.array([1 + 2j], "<c8"),
    "c16_big": np.array([3 - 1j], ">c16"),
    "empty": np.zeros((0, 4), "f4"),
}


@pytest.mark.parametrize("block", [0, 512, 2048])
def test_every_type_is_what_h5py_reads(tmp_path: Path, block: int, golden: Golden) -> None:
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=block) as file:
        for name, array in ARRAYS.items():
            file[name] = array
        file["text"] = "grüß"
        file["texts"] = np.array([b"a", b"bc"])
        file["never"] = h5py.Empty("f4")
        file.create_dataset("unwritten", (5,), "f4", fillvalue=2.5)
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((3,))
        small = h5py.h5d.create(file.id, b"compact", h5py.h5t.NATIVE_INT16, space, compact)
        small.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array([1, 2, 3], "i2"))
    listing = index(tmp_path / "x.h5")
    for name, array in ARRAYS.items():
        dataset = listing.datasets[name]
        assert (dataset.dtype, dataset.shape) == (array.dtype.name, array.shape)
        assert bytes(dataset.source.read()) == little(array), name
    assert listing.datasets["text"].source.read() == (6).to_bytes(8, "little") + "grüß".encode()
    assert listing.datasets["texts"].shape == (2,)
    assert np.frombuffer(listing.datasets["unwritten"].source.read(), "<f4").tolist() == [2.5] * 5
    assert np.frombuffer(listing.datasets["compact"].source.read(), "<i2").tolist() == [1, 2, 3]
    golden("\n".join(listing.notes))


FILTERS: list[dict[str, Any]] = [
    {},
    {"compression": "gzip"},
    {"shuffle": True},
    {"fletcher32": True},
    {"compression": "gzip", "shuffle": True, "fletcher32": True},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", ["<f4", ">f8", "i1"])
def test_chunks_and_their_filters(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    generator = np.random.default_rng(3)
    array = (generator.standard_normal((37, 23)) * 50).astype(dtype)
    block = 1024 if dtype == "<f4" else 0
    with h5py.File(tmp_path / "x.h5", "w", libver="latest", userblock_size=block) as file:
        file.create_dataset("a", data=array, chunks=(10, 7), **options)
        part = file.create_dataset("part", (50, 50), dtype, chunks=(8, 8), fillvalue=3, **options)
        part[9:20, 30:] = 7
        grown = file.create_dataset("grown", (5,), dtype, chunks=(4,), maxshape=(None,), **options)
        grown[...] = np.arange(5)
        grown.resize((2,))
        expected = np.asarray(part), np.asarray(grown)
    datasets = index(tmp_path / "x.h5").datasets
    assert bytes(datasets["a"].source.read()) == little(array)
    assert bytes(datasets["part"].source.read()) == little(expected[0])
    assert bytes(datasets["grown"].source.read()) == little(expected[1])


def test_fletcher32_is_that_of_the_library(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for number, size in enumerate((1, 2, 3, 719, 720, 721, 3000, 100_001)):
        data = generator.integers(0, 256, size, np.uint8)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            dataset = file.create_dataset("a", data=data, chunks=(size,), fletcher32=True)
            stored = dataset.id.read_direct_chunk((0,))[1]
        assert int.from_bytes(stored[-4:], "little") == hdf5.fletcher32(data.tobytes()), size
    assert hdf5.fletcher32(bytes(10)) == 0


def test_a_flipped_bit_under_fletcher32_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=np.arange(100.0), chunks=(50,), fletcher32=True)
        at = file["a"].id.get_chunk_info(1).byte_offset
    data = bytearray(path.read_bytes())
    data[at + 9] ^= 4
    path.write_bytes(data)
    with pytest.raises(ChecksumError) as caught:
        index(path).datasets["a"].source.read()
    assert (caught.value.file, caught.value.offset) == (str(path), at)


@pytest.mark.usefixtures("own_hdf5_process")
def test_an_unknown_filter_is_listed_and_not_loaded(tmp_path: Path, golden: Golden) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", data=np.arange(100.0), compression="lzf")
        file["b"] = 1
    listing = index(tmp_path / "x.h5")
    assert listing.datasets["b"].source.read() == (1).to_bytes(8, "little")
    with pytest.raises(UnsupportedError) as caught:
        listing.datasets["a"].source.read()
    golden(caught.value)


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_an_index_out_of_order_is_refused(tmp_path: Path, compression: str | None) -> None:
    # The library searches the keys of a node by halves; the listing goes through them.
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("a", data=np.arange(1.0, 33), chunks=(4,), compression=compression)
        file.create_dataset("b", data=np.arange(1.0, 33), chunks=(4,), compression=compression)
    data = bytearray(path.read_bytes())
    # Each entry of the node: size, filter mask, two offsets and an address (III.A.1).
    first = data.index(b"TREE\x01") + 24
    one, other = (slice(first + 32 * number, first + 32 * number + 32) for number in (1, 6))
    data[one], data[other] = data[other], data[one]
    path.write_bytes(data)
    with h5py.File(path) as file:
        assert (file["a"][()] != np.arange(1.0, 33)).any()
    datasets = index(path).datasets
    with pytest.raises(FormatError):
        datasets["a"].source.read()
    assert np.frombuffer(datasets["b"].source.read(), "<f8").tolist() == list(range(1, 33))


def test_chunks_are_compared_in_few_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number in range(20):
            file.create_dataset(f"{number:02}", data=np.arange(50.0) + number, chunks=(20,))
    jobs: list[hdf5.Hdf5Job] = []
    run = hdf5.run_child
    monkeypatch.setattr(hdf5, "run_child", lambda *arguments: jobs.append(arguments[4]) or run(*arguments))
    for number, dataset in enumerate(index(tmp_path / "x.h5").datasets.values()):
        assert np.frombuffer(dataset.source.read(), "<f8").tolist() == (np.arange(50.0) + number).tolist()
    assert [job.first for job in jobs] == [None, 0]


def _changed(**changes: Any) -> Any:
    kind = h5py.h5t.IEEE_F32LE.copy()
    for name, value in changes.items():
        getattr(kind, f"set_{name}")(*value)
    return kind


OTHER_KINDS = {
    "bias": lambda: _changed(ebias=(126,)),
    "normalisation": lambda: _changed(norm=(h5py.h5t.NORM_NONE,)),
    "sign bit": lambda: _changed(fields=(0, 24, 8, 1, 23)),
    "mantissa": lambda: _changed(fields=(31, 22, 9, 0, 22)),
    "precision": lambda: _integer(set_precision=24),
    "bit offset": lambda: _integer(set_precision=24, set_offset=8),
    "bit field": lambda: h5py.h5t.STD_B32LE.copy(),
    "enum": lambda: h5py.h5t.py_create(h5py.enum_dtype({"x": 1, "y": 2}), logical=True),
    "bool of unsigned bytes": lambda: _bool(h5py.h5t.STD_U8LE),
}


def _integer(**changes: int) -> Any:
    kind = h5py.h5t.STD_I32LE.copy()
    for name, value in changes.items():
        getattr(kind, name)(value)
    return kind


def _bool(base: Any) -> Any:
    kind = h5py.h5t.enum_create(base)
    kind.enum_insert(b"FALSE", 0)
    kind.enum_insert(b"TRUE", 1)
    return kind


@pytest.mark.parametrize("make", OTHER_KINDS.values(), ids=OTHER_KINDS)
def test_numbers_of_another_form_are_listed_and_not_read(tmp_path: Path, make: Any) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        h5py.h5d.create(file.id, b"a", make(), h5py.h5s.create_simple((4,)))
        file["b"] = 1
    datasets = index(tmp_path / "x.h5").datasets
    assert (datasets["a"].dtype, datasets["a"].shape) == ("unknown", (4,))
    with pytest.raises(UnsupportedError):
        datasets["a"].source.read()
    assert datasets["b"].source.read() == (1).to_bytes(8, "little")


def test_padding_of_a_type_without_pad_bits_changes_nothing(tmp_path: Path) -> None:
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_inpad(h5py.h5t.PAD_ONE)
    kind.set_pad(h5py.h5t.PAD_ONE, h5py.h5t.PAD_ONE)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        built = h5py.h5d.create(file.id, b"a", kind, h5py.h5s.create_simple((4,)))
        built.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype="f4"))
    (dataset,) = index(tmp_path / "x.h5").datasets.values()
    assert np.frombuffer(dataset.source.read(), dataset.dtype).tolist() == [0, 1, 2, 3]


def test_numbers_that_are_never_filled_are_not_read(tmp_path: Path) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        h5py.h5d.create(file.id, b"a", h5py.h5t.IEEE_F32LE, h5py.h5s.create_simple((4,)), plist)
    (dataset,) = index(tmp_path / "x.h5").datasets.values()
    with pytest.raises(UnsupportedError):
        dataset.source.read()


def test_bfloat16_as_a_float_of_its_own(tmp_path: Path) -> None:
    kind = h5py.h5t.IEEE_F16LE.copy()
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, layout in (("a", h5py.h5d.CONTIGUOUS), ("b", h5py.h5d.COMPACT)):
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(layout)
            space = h5py.h5s.create_simple((3,))
            dataset = h5py.h5d.create(file.id, name.encode(), kind, space, plist)
            raw = np.array([0x3F80, 0xC000, 0x7FC0], "<u2").view("V2")
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, raw, kind)
    listing = index(tmp_path / "x.h5")
    for name in "ab":
        assert listing.datasets[name].dtype == "bfloat16", listing.notes
        assert bytes(listing.datasets[name].source.read()) == bytes.fromhex("803f00c0c07f")


def test_other_types_are_named(tmp_path: Path, golden: Golden) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["table"] = np.zeros(2, [("a", "i4"), ("b", "f4")])
        file.create_dataset("lists", (2,), h5py.vlen_dtype("i4"))
        file.create_dataset("refs", (1,), h5py.ref_dtype)
        file["named"] = np.dtype("f4")
    notes = index(tmp_path / "x.h5").notes
    golden("\n".join(notes))


def _external(file: Any, folder: Path) -> None:
    file.create_dataset("a", (8,), "u1", external=[(str(folder / "secret"), 0, 8)])


def _link(file: Any, folder: Path) -> None:
    file["a"] = h5py.ExternalLink(str(folder / "other.h5"), "/x")


def _virtual(file: Any, folder: Path) -> None:
    layout = h5py.VirtualLayout((4,), "f8")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "x", (4,))
    file.create_virtual_dataset("a", layout)


@pytest.mark.usefixtures("own_hdf5_process")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_external, id="external"),
        pytest.param(_link, id="link"),
        pytest.param(_virtual, id="virtual"),
    ],
)
def test_nothing_of_another_file_is_read(tmp_path: Path, make: Any, golden: Golden) -> None:
    (tmp_path / "secret").write_bytes(b"12345678")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(4.0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        make(file, tmp_path)
    with pytest.raises(UnsupportedError) as caught:
        index(tmp_path / "x.h5")
    golden(caught.value)


@pytest.mark.usefixtures("own_hdf5_process")
def test_links_that_go_round_end(tmp_path: Path, golden: Golden) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["loop"] = h5py.SoftLink("/loop")
        file["dangling"] = h5py.SoftLink("/nowhere")
        file["top"] = h5py.SoftLink("/")
        file["g/up"] = file["/"]
        file["a"] = 1
        file["b"] = file["a"]
        group = file
        for _ in range(29):  # 4^29 paths
            below = group.create_group("d0")
            for number in range(1, 4):
                group[f"d{number}"] = below
            group = below
        group["leaf"] = 2
    listing = index(tmp_path / "x.h5")
    assert set(listing.datasets) == {"a", "/".join(["d0"] * 29) + "/leaf"}
    assert listing.same["b"] == "a"
    golden("\n".join(listing.notes))


@pytest.mark.usefixtures("own_hdf5_process")
def test_deep_groups_are_refused(tmp_path: Path, golden: Golden) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file
        for _ in range(3000):
            group = group.create_group("g")
    with pytest.raises(FormatError) as caught:
        index(tmp_path / "x.h5")
    golden(caught.value)


@pytest.mark.usefixtures("own_hdf5_process")
def test_bombs_are_listed_and_not_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("nothing", (1 << 40,), "f4")
        file.create_dataset("chunked", (1 << 30,), "f4", chunks=(1 << 20,), compression="gzip")
        file["chunked"][:4] = 1
        one = file.create_dataset("one", (1 << 28,), "u1", chunks=((1 << 28) + 8,), maxshape=(None,))
        one.id.write_direct_chunk((0,), b"x" * 100)
    start = time.process_time()
    datasets = index(tmp_path / "x.h5").datasets
    assert datasets["nothing"].shape == (1 << 40,)
    for name, declared in (
        ("nothing", "4,398,046,511,104"),
        ("chunked", "4,294,967,296"),
        ("one", "268,435,464"),
    ):
        with pytest.raises(LimitError) as caught:
            datasets[name].source.read()
        assert (caught.value.file, caught.value.found) == (str(tmp_path / "x.h5"), declared)
    assert len(datasets) == 3
    assert time.process_time() - start < 10


def test_a_chunk_that_unpacks_to_more_is_refused(tmp_path: Path, golden: Golden) -> None:
    import zlib

    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, data in (("more", bytes(1 << 22)), ("less", bytes(10)), ("cut", None), ("junk", b"")):
            dataset = file.create_dataset(name, (256,), "u1", chunks=(256,), compression="gzip")
            packed = (
                zlib.compress(data)
                if data
                else b"junk"
                if data is not None
                else zlib.compress(bytes(256))[:-6]
            )
            dataset.id.write_direct_chunk((0,), packed)
    datasets = index(tmp_path / "x.h5").datasets
    for name, length in (("more", "257"), ("less", "10"), ("cut", None), ("junk", None)):
        with pytest.raises(FormatError) as caught:
            datasets[name].source.read()
        assert caught.value.found == length
        golden(caught.value.message.partition(":")[0])  # then zlib's own words


def test_names_are_never_raw(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        h5py.h5g.create(file.id, b"\xff\xfe")
        file.create_dataset(b"bad\x80name", data=1)
        file["x" * 60_000] = 1
    listing = index(tmp_path / "x.h5")
    assert "bad\\x80name" in listing.datasets
    assert len(listing.datasets) == 2


def test_what_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(1000.0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(TruncatedError) as caught:
        index(path)
    assert caught.value.file == str(path)
    path.write_bytes(whole[:30])
    with pytest.raises(FormatError) as caught:
        index(path)
    assert caught.value.file == str(path)


@pytest.mark.usefixtures("own_hdf5_process")
def test_a_child_that_dies_or_hangs_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["a"] = 1
    start = hdf5._START
    limited = "from ckpttool.formats import hdf5_child as child; child.limit_resources"
    for code, allowed in (
        ("import os; os.kill(os.getpid(), 11)", 10),
        ("import sys; sys.exit(3)", 10),
        ("print('{')", 10),
        ("print('[]')", 10),
        ("print('{}')", 10),
        ("import time; time.sleep(60)", 1),
        (f"{limited}(1)\nwhile True: pass", 10),
        (f"{limited}(5); bytearray(3 << 30)", 10),
    ):
        monkeypatch.setattr(hdf5, "_START", start.partition("from ckpttool")[0] + code)
        monkeypatch.setattr(hdf5, "_CLOCK", 1)
        monkeypatch.setattr(hdf5, "cpu_seconds", lambda length, seconds=allowed: seconds)
        before = spent()
        with pytest.raises(FormatError) as caught:
            index(path)
        golden(caught.value)
        assert spent() - before < 4


@pytest.mark.usefixtures("own_hdf5_process")
def test_the_child_may_not_write_and_has_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["a"] = 1
    monkeypatch.setenv("HDF5_PLUGIN_PATH", str(tmp_path))
    monkeypatch.setenv("SECRET", "x")
    code = """
import os
from ckpttool.formats import hdf5_child as child
child.limit_resources(5)
assert "SECRET" not in os.environ and os.environ["HDF5_PLUGIN_PATH"] == "/nonexistent"
# The listing itself takes one more.
assert len(set(os.listdir("/proc/self/fd")) - {"0", "1", "2", sys.argv[2]}) == 1
import h5py

def fails(attempt):
    try:
        attempt()
    except OSError:
        return True

def write():
    with open("written", "wb") as stream:
        stream.write(b"x")
        stream.flush()

refused = fails(write)
child.preload_modules()
child.forbid_opening()
if refused and fails(lambda: open(os.devnull)) and fails(lambda: h5py.File("x.h5")):
    print('{"refused": ["unsupported", "refused"]}')
"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hdf5, "_START", hdf5._START.partition("from ckpttool")[0] + code)
    with pytest.raises(UnsupportedError) as caught:
        index(path)
    golden(caught.value)
    assert not (tmp_path / "written").exists() or not (tmp_path / "written").stat().st_size


def test_damage_never_gets_past_a_ckpttool_error(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.arange(50.0)
        file.create_dataset("c", data=np.arange(500.0), chunks=(60,), compression="gzip", fletcher32=True)
        file["layers"].attrs["layer_names"] = np.array([b"dense"])
    assert len(index(path).datasets) == 2
    whole = path.read_bytes()
    generator = np.random.default_rng(5)
    edges = (0, 1, 0x7F, 0x80, 0xFF)
    slowest = 0.0
    for number in range(42):
        damaged = bytearray(whole)
        if number % 3 == 0:
            damaged = damaged[: int(generator.integers(len(whole)))]
        elif number % 3 == 1:
            damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
        else:
            at = int(generator.integers(len(whole) - 8))
            damaged[at : at + 8] = bytes([edges[generator.integers(5)]]) * 8
        path.write_bytes(damaged)
        before = spent()
        try:
            for dataset in index(path).datasets.values():
                dataset.source.read()
        except CkpttoolError as error:
            assert str(error).isprintable()  # noqa: PT017  # both outcomes are right
        slowest = max(slowest, spent() - before)
    assert slowest < 10


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(20.0)
    assert len(index(path).datasets) == 1
    whole = path.read_bytes()
    for length in range(8, len(whole), 211):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            index(path)
    assert os.listdir(tmp_path) == ["x.h5"]


def test_chunked_datasets_that_are_read_in_order_take_few_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"d{number:02}": np.arange(256, dtype="<f4") + number for number in range(12)}
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, chunks=(100,), compression="gzip")
    datasets = index(tmp_path / "x.h5").datasets
    jobs: list[hdf5.Hdf5Job] = []
    start = hdf5.run_child

    def counted(descriptor: int, offset: int, length: int, file: str, job: hdf5.Hdf5Job) -> dict[str, Any]:
        jobs.append(job)
        return start(descriptor, offset, length, file, job)

    monkeypatch.setattr(hdf5, "run_child", counted)
    monkeypatch.setattr(hdf5, "_AHEAD", 2048)
    monkeypatch.setattr(hdf5, "_FURTHEST", 8192)
    for name, array in arrays.items():
        assert bytes(datasets[name].source.read()) == array.tobytes()
    assert [job.first for job in jobs] == [0, 2, 10]
    jobs.clear()
    hdf5._digests.cache_clear()
    for name in reversed(arrays):
        assert bytes(datasets[name].source.read()) == arrays[name].tobytes()
    # Nobody reads forwards: nothing more is read ahead.
    assert {job.most for job in jobs} == {2048}
