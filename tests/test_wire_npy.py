"""NumPy's headers are parsed as data, and arrays come out as NumPy reads them."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.core import ChecksumError, CkpttoolError, File, FormatError, Span, TruncatedError
from ckpttool.encodings import archives, npy

DTYPES = ["?", "i1", "<i2", ">i4", "<i8", "u1", ">u2", "<u4", "<u8", "<f2", ">f4", "<f8", "<c8", ">c16"]


def whole(path: Path) -> Span:
    file = File.stamp(str(path))
    return Span(file, 0, file.size)


def saved(array, version=None) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, version=version)
    return stream.getvalue()


def header(text: str | bytes, version: int = 1, length: int | None = None) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    size = len(raw) if length is None else length
    return npy.MAGIC + bytes((version, 0)) + struct.pack("<H" if version == 1 else "<I", size) + raw


def put(path: Path, data: bytes) -> Span:
    path.write_bytes(data)
    return whole(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=4),
    fortran=st.booleans(),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
)
def test_what_numpy_writes_is_read(dtype, shape, fortran, version, tmp_path):
    values = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    array = np.asfortranarray(values) if fortran else np.ascontiguousarray(values)
    read_back = npy.read_npy(put(tmp_path / "a.npy", saved(array.reshape(values.shape), version)))
    assert (read_back.shape, read_back.dtype) == (values.shape, values.dtype.newbyteorder("=").name)
    assert bytes(read_back.source.read()) == values.astype(values.dtype.newbyteorder("<")).tobytes()


@pytest.mark.parametrize("compressed", [False, True])
def test_members_of_an_npz(compressed, tmp_path):
    arrays = {
        "model/pi/fc0/kernel:0": np.arange(1200, dtype="f4").reshape(30, 40),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(2),
        "empty": np.zeros((0, 3), "i8"),
    }
    (np.savez_compressed if compressed else np.savez)(tmp_path / "a.npz", **arrays)
    listed = npy.list_npz(archives.read_zip(File.stamp(str(tmp_path / "a.npz"))))
    assert list(listed) == list(arrays)
    for name, array in arrays.items():
        assert bytes(listed[name].source.read()) == np.ascontiguousarray(array).tobytes(), name


def test_an_archive_inside_another(tmp_path):
    inner = io.BytesIO()
    np.savez(inner, a=np.arange(5))
    with zipfile.ZipFile(tmp_path / "outer.zip", "w") as outer:
        outer.writestr("first", b"x" * 100)
        outer.writestr("inner", inner.getvalue())
    file = File.stamp(str(tmp_path / "outer.zip"))
    member = archives.read_zip(file).source("inner")
    listed = npy.list_npz(archives.read_zip(file, member.offset, member.length))
    assert listed["a"].source.read() == np.arange(5).tobytes()
    with pytest.raises(FormatError):
        archives.read_zip(file, member.offset, member.length - 1)
    with pytest.raises(TruncatedError):
        archives.read_zip(file, member.offset, member.length - 40)


def test_a_member_is_checked_when_it_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.arange(100))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    at = data.index(np.arange(100).tobytes())
    data[at + 5] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    listed = npy.list_npz(archives.read_zip(File.stamp(str(tmp_path / "a.npz"))))
    with pytest.raises(ChecksumError):
        listed["a"].source.read()


@pytest.mark.parametrize(
    ("array", "descr"),
    [
        (np.array([None, {}]), "|O"),
        (np.array(["a", "bc"]), "<U2"),
        (np.array([b"a"]), "|S1"),
        (np.array(["2020"], "M8[D]"), "<M8[D]"),
        (np.zeros(2, [("x", "f4"), ("y", "i8", (2, 2))]), "structured"),
        (np.zeros(2, "f4,i8"), "structured"),
    ],
)
def test_other_types_are_listed_and_not_decoded(array, descr, tmp_path):
    listed = npy.read_npy(put(tmp_path / "a.npy", saved(array)))
    assert listed._replace(source=None) == npy.NpyArray(descr, array.shape, None, None)
    if descr[1] in "US":
        assert bytes(listed.source.read()) == array.tobytes()
    else:
        assert listed.source is None


def test_python_2_and_any_order_of_entries(tmp_path):
    text = "{'shape': (2L,), \"fortran_order\": False, 'descr': '<f4'}"
    listed = npy.read_npy(put(tmp_path / "a.npy", header(text) + bytes(8)))
    assert (listed.dtype, listed.shape) == ("float32", (2,))


ENTRY = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
BROKEN = {
    "no magic": b"\x93NUMPI" + bytes(100),
    "empty": b"",
    "magic alone": npy.MAGIC,
    "version 4": header(ENTRY % "(2,)", 4) + bytes(8),
    "header beyond the file": header(ENTRY % "(2,)", 1, 60_000) + bytes(8),
    "header of 4 GiB": header(ENTRY % "(2,)", 2, (1 << 32) - 1) + bytes(8),
    "9,000 brackets": header("(" * 9000, 2),
    "9,000 brackets in a value": header(ENTRY % ("(" * 9000), 2),
    "a call": header(ENTRY % "__import__('os').getcwd()") + bytes(8),
    "a lambda": header("(lambda: 0)()") + bytes(8),
    "a comprehension": header(ENTRY % "(2 for _ in ())") + bytes(8),
    "an expression": header(ENTRY % "(2**40,)") + bytes(8),
    "negative": header(ENTRY % "(-2,)") + bytes(8),
    "no tuple": header(ENTRY % "(2)") + bytes(8),
    "a list": header(ENTRY % "[2]") + bytes(8),
    "two commas": header(ENTRY % "(2,,)") + bytes(8),
    "text": header(ENTRY % "('2',)") + bytes(8),
    "2**36 over 8 bytes": header(ENTRY % "(68719476736,)") + bytes(8),
    "a product that wraps": header(ENTRY % "(4294967296, 4294967296, 4)") + bytes(8),
    "a zero that hides it": header(ENTRY % "(0, 4294967296, 4294967296, 4)"),
    "an integer of 30 digits": header(ENTRY % ("(" + "9" * 30 + ",)")) + bytes(8),
    "70 dimensions": header(ENTRY % ("(" + "1," * 70 + ")")) + bytes(4),
    "trailing bytes": header(ENTRY % "(2,)") + bytes(9),
    "too few bytes": header(ENTRY % "(2,)") + bytes(7),
    "an entry twice": header("{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': ()}"),
    "an entry too many": header("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), 'x': 1}") + bytes(8),
    "an entry missing": header("{'descr': '<f4', 'shape': (2,)}") + bytes(8),
    "an order of 1": header("{'descr': '<f4', 'fortran_order': 1, 'shape': (2,)}") + bytes(8),
    "no value": header("{'descr': , 'fortran_order': False, 'shape': (2,)}") + bytes(8),
    "brackets that cross": header("{'descr': [(], 'fortran_order': False, 'shape': (2,)}") + bytes(8),
    "a bracket left open": header("{'fortran_order': False, 'shape': (2,), 'descr': [ }") + bytes(8),
    "a number as a type": header("{'descr': 4, 'fortran_order': False, 'shape': (2,)}") + bytes(8),
    "a leading zero": header(ENTRY % "(02,)") + bytes(8),
    "a number of Python 2 in version 3": header(ENTRY % "(2L,)", 3) + bytes(8),
    "a vertical tab": header((ENTRY % "(2,)").replace(": ", "\v: ")) + bytes(8),
    "a wide space at the end": header((ENTRY % "(2,)").encode() + b"\xa0") + bytes(8),
    "a name in two quotes": header((ENTRY % "(2,)").replace("'descr'", "\"'descr'\"")) + bytes(8),
    "not UTF-8": header(b"\xff" + (ENTRY % "(2,)").encode(), 3) + bytes(8),
}  # fmt: skip


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_broken_headers_are_refused(data, tmp_path):
    with pytest.raises(FormatError) as caught:
        npy.read_npy(put(tmp_path / "a.npy", data))
    assert caught.value.file == str(tmp_path / "a.npy")
    assert len(str(caught.value)) < 400


def test_two_members_of_one_name(tmp_path, golden):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", saved(np.arange(2)))
        archive.writestr("a", saved(np.arange(2)))
    with pytest.raises(FormatError) as caught:
        npy.list_npz(archives.read_zip(File.stamp(str(tmp_path / "a.npz"))))
    golden(caught.value)


def test_a_member_that_is_no_array(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("readme.txt", b"hello")
    with pytest.raises(FormatError) as caught:
        npy.list_npz(archives.read_zip(File.stamp(str(tmp_path / "a.npz"))))
    assert caught.value.path == "readme.txt"


def test_damage_raises_only_our_errors(tmp_path):
    whole_file = saved(np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4)))
    choose = random.Random(3)
    for length in range(len(whole_file)):
        with pytest.raises(CkpttoolError):
            npy.read_npy(put(tmp_path / "a.npy", whole_file[:length]))
    for _ in range(500):
        damaged = bytearray(whole_file)
        damaged[choose.randrange(len(damaged))] ^= 1 << choose.randrange(8)
        with contextlib.suppress(CkpttoolError):
            listed = npy.read_npy(put(tmp_path / "a.npy", bytes(damaged)))
            if listed.source is not None:
                assert len(listed.source.read()) == 48
