"""The zip reader refuses whatever two readers could understand differently; the writer is deterministic."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import time
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import (
    ChecksumError,
    CkpttoolError,
    File,
    FormatError,
    Span,
    TruncatedError,
    UnsupportedError,
)
from ckpttool.encodings import ZipWriter
from ckpttool.encodings import archives as wire
from tests.conftest import zipped

MEMBERS = {"a/one": b"first member", "a/two": bytes(1000), "a/three": b""}


def written(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    writer = ZipWriter(stream)
    for name, data in members.items():
        writer.add(name, data)
    writer.close()
    return stream.getvalue()


def opened(data: bytes, folder: Path) -> wire.ZipArchive:
    path = folder / "archive.zip"
    path.write_bytes(data)
    return wire.read_zip(File.stamp(str(path)))


def contents(data: bytes, folder: Path) -> dict[str, bytes]:
    archive = opened(data, folder)
    return {name: bytes(archive.source(name).read()) for name in archive.members}


def patched(data: bytes, at: int, layout: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(layout, changed, at, value)
    return bytes(changed)


def central(data: bytes, number: int = 0) -> int:
    """Return where the entry begins in the central directory."""
    at = data.index(b"PK\x01\x02")
    for _ in range(number):
        at = data.index(b"PK\x01\x02", at + 1)
    return at


@pytest.mark.parametrize("make", [written, zipped])
def test_members_come_back(make, tmp_path):
    assert contents(make(MEMBERS), tmp_path) == MEMBERS


def test_deflated_members_come_back(tmp_path):
    data = zipped(MEMBERS, zipfile.ZIP_DEFLATED)
    assert contents(data, tmp_path) == MEMBERS


def test_data_descriptors_are_legal(tmp_path):
    class Pipe(io.BytesIO):
        def seekable(self):
            return False

        def seek(self, *args):
            raise OSError

        def tell(self):
            raise OSError

    stream = Pipe()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a/one", b"streamed")
    assert contents(stream.getvalue(), tmp_path) == {"a/one": b"streamed"}


def test_standard_library_reads_what_is_written(tmp_path):
    with zipfile.ZipFile(io.BytesIO(written(MEMBERS))) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == MEMBERS


def test_payloads_are_aligned(tmp_path):
    members = {f"a/{'x' * n}": bytes(n) for n in range(150)}
    archive = opened(written(members), tmp_path)
    assert {member.offset % 64 for member in archive.members.values()} == {0}


def test_same_input_gives_same_bytes():
    assert written(MEMBERS) == written(MEMBERS)


# Names that stand for another place, or for a folder, are refused (tests/hostile/crafted_zip.py).
NAMES = st.text(
    st.characters(exclude_characters="\0./\\", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@given(st.dictionaries(NAMES, st.binary(max_size=200), max_size=8))
def test_round_trip(tmp_path_factory, members):
    assert contents(written(members), tmp_path_factory.mktemp("zip")) == members


def test_checksums_that_were_not_recorded_are_no_error(tmp_path):
    data = bytearray(zipped(MEMBERS))
    for mark, position in ((b"PK\x03\x04", 14), (b"PK\x01\x02", 16)):
        at = data.find(mark)
        while at >= 0:
            struct.pack_into("<I", data, at + position, 0)
            at = data.find(mark, at + 4)
    archive = opened(bytes(data), tmp_path)
    assert not archive.recorded
    source = archive.source("a/one")
    assert isinstance(source, Span)
    assert source.checksum is None
    assert source.read() == MEMBERS["a/one"]


def test_one_checksum_of_zero_is_checked(tmp_path):
    data = zipped(MEMBERS)
    data = patched(data, central(data) + 16, "<I", 0)
    data = patched(data, 14, "<I", 0)
    with pytest.raises(ChecksumError):
        opened(data, tmp_path).source("a/one").read()


def test_damaged_payload_is_a_checksum_error(tmp_path):
    data = bytearray(written(MEMBERS))
    data[data.index(b"first")] ^= 1
    with pytest.raises(ChecksumError):
        contents(bytes(data), tmp_path)


def duplicate(data: bytes) -> bytes:
    return data.replace(b"a/two", b"a/one")


def end(data: bytes) -> int:
    return data.rindex(b"PK\x05\x06")


def counted(data: bytes, count: int) -> bytes:
    return patched(patched(data, end(data) + 8, "<H", count), end(data) + 10, "<H", count)


def compressed_by(data: bytes, method: int) -> bytes:
    return patched(patched(data, 8, "<H", method), central(data) + 10, "<H", method)


HOSTILE = {
    "duplicate name": (duplicate, FormatError),
    "local name differs": (lambda d: d.replace(b"a/one", b"a/oNe", 1), FormatError),
    "central size differs": (lambda d: patched(d, central(d) + 24, "<I", 11), FormatError),
    "central crc differs": (lambda d: patched(d, central(d) + 16, "<I", 11), FormatError),
    "local method differs": (lambda d: patched(d, 8, "<H", 8), FormatError),
    "unknown method": (lambda d: compressed_by(d, 99), UnsupportedError),
    "encrypted in the directory": (lambda d: patched(d, central(d) + 8, "<H", 1), UnsupportedError),
    "encrypted in the local header": (lambda d: patched(d, 6, "<H", 1), UnsupportedError),
    "count too small": (lambda d: counted(d, 2), FormatError),
    "count too large": (lambda d: counted(d, 4), FormatError),
    "comment hides members": (lambda d: patched(d, central(d) + 32, "<H", 51), FormatError),
    "directory size": (lambda d: patched(d, end(d) + 12, "<I", 46), FormatError),
    "directory offset": (lambda d: patched(d, end(d) + 16, "<I", 1 << 31), FormatError),
    "several disks": (lambda d: patched(d, end(d) + 4, "<H", 1), FormatError),
    "offset beyond the end": (lambda d: patched(d, central(d) + 42, "<I", 1 << 30), FormatError),
    "overlap": (lambda d: patched(d, central(d, 1) + 42, "<I", 0), FormatError),
    "prefix": (lambda d: b"MZ" + d, FormatError),
    "suffix": (lambda d: d + b"\0", FormatError),
    "two end records": (lambda d: d[:-2] + b"\x16\0" + d[end(d) :], FormatError),
    "no end record": (lambda d: d[: end(d)], TruncatedError),
    "half": (lambda d: d[: len(d) // 2], TruncatedError),
    "empty": (lambda d: b"", TruncatedError),
    "one byte": (lambda d: b"P", TruncatedError),
    "zip64 locator to nowhere": (
        lambda d: d[: end(d)] + struct.pack("<IIQI", 0x07064B50, 0, 1 << 62, 1) + d[end(d) :], FormatError
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error"), HOSTILE.values(), ids=HOSTILE)
def test_ambiguous_archives_are_refused(change, error, tmp_path):
    with pytest.raises(error) as caught:
        contents(change(zipped(MEMBERS)), tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "nested", [written(MEMBERS), zipped(MEMBERS), written({"a": b"", "b": written(MEMBERS)})]
)
def test_an_archive_cut_behind_a_nested_one_is_truncated(nested: bytes, tmp_path: Path) -> None:
    whole = zipped({"policy.pth": nested, "settings": bytes(500)})
    with pytest.raises(FormatError) as followed:
        opened(whole + b"more", tmp_path)
    assert not isinstance(followed.value, TruncatedError)
    for size in range(whole.index(nested) + len(nested) + 1, len(whole), 7):
        with pytest.raises(TruncatedError) as caught:
            opened(whole[:size], tmp_path)
        assert caught.value.offset == size


def test_bomb_is_refused(tmp_path, golden):
    archive = opened(zipped({"a/bomb": bytes(1 << 20)}, zipfile.ZIP_DEFLATED), tmp_path)
    member = archive.members["a/bomb"]
    lying = wire.ZipArchive(archive.file, {"a/bomb": member._replace(size=1 << 40)}, True)
    with pytest.raises(FormatError) as caught:
        lying.source("a/bomb")
    golden(caught.value)
    assert len(archive.source("a/bomb").read()) == 1 << 20


def test_deflated_member_longer_than_declared_is_refused(tmp_path, golden):
    data = zipped({"a": bytes(5000)}, zipfile.ZIP_DEFLATED)
    data = patched(patched(data, 22, "<I", 100), central(data) + 24, "<I", 100)
    with pytest.raises(FormatError) as caught:
        contents(data, tmp_path)
    golden(caught.value)


def test_zip64_records_are_read_and_their_lies_refused(tmp_path):
    data = written({str(n): b"" for n in range(65_536)})
    assert len(opened(data, tmp_path).members) == 65_536
    at = data.rindex(b"PK\x06\x06")
    with pytest.raises(FormatError):
        opened(patched(data, at + 32, "<Q", 1 << 60), tmp_path)


@pytest.mark.long
def test_70001_members_are_listed_quickly(tmp_path):
    data = written({f"a/{n}": b"x" for n in range(70_001)})
    began = time.process_time()
    assert len(opened(data, tmp_path).members) == 70_001
    assert time.process_time() - began < 10


def test_single_bit_flips_are_refused_or_harmless(tmp_path):
    data = written(MEMBERS)
    choose = random.Random(1)
    for _ in range(400):
        bit = choose.randrange(8 * len(data))
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(CkpttoolError):
            assert contents(bytes(flipped), tmp_path) == MEMBERS, bit


def test_checksum_is_the_data_s(tmp_path):
    assert opened(written(MEMBERS), tmp_path).members["a/one"].crc == zlib.crc32(MEMBERS["a/one"])


def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Start with no archive kept, and collect the paths of those that are listed."""
    listed: list[str] = []
    read = wire._read_archive

    def counted(file: File, start: int, size: int) -> wire.ZipArchive:
        listed.append(file.path)
        return read(file, start, size)

    monkeypatch.setattr(wire, "_read_archive", counted)
    monkeypatch.setattr(wire, "_KEPT", wire._ArchiveCache())
    return listed


def archives(folder: Path, number: int) -> list[Path]:
    paths = [folder / f"{n}.zip" for n in range(number)]
    for path in paths:
        path.write_bytes(written(MEMBERS))
    return paths


def test_archives_that_are_all_checked_first_are_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = listings(monkeypatch)
    paths = archives(tmp_path, 64)
    for path in [*paths, *paths]:
        assert wire.read_zip(File.stamp(str(path))).file.path == str(path)
    assert listed == [str(path) for path in paths]


def test_a_kept_archive_that_changed_is_listed_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = listings(monkeypatch)
    (path,) = archives(tmp_path, 1)
    before = wire.read_zip(File.stamp(str(path)))
    path.write_bytes(written({"b/one": b"other bytes"}))
    after = wire.read_zip(File.stamp(str(path)))
    assert (list(before.members), list(after.members)) == (list(MEMBERS), ["b/one"])
    assert len(listed) == 2


@pytest.mark.parametrize(("most", "value"), [("_MEMBERS", 9), ("_ARCHIVES", 3)])
def test_the_archives_kept_are_bounded_and_the_newest(
    most: str, value: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = listings(monkeypatch)
    monkeypatch.setattr(wire, most, value)
    paths = archives(tmp_path, 8)
    for path in paths:
        wire.read_zip(File.stamp(str(path)))
    listed.clear()
    for path in reversed(paths):
        wire.read_zip(File.stamp(str(path)))
    assert listed == [str(path) for path in reversed(paths[:-3])]


def test_two_archives_are_kept_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = listings(monkeypatch)
    monkeypatch.setattr(wire, "_MEMBERS", 1)
    paths = archives(tmp_path, 2)
    for path in [*paths, *paths]:
        wire.read_zip(File.stamp(str(path)))
    assert len(listed) == 2
