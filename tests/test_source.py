"""Large reads: the same bytes and the same errors as small ones, in pieces; checksums by any library."""

from __future__ import annotations

import math
import os
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool import diff, digest, save, stats
from ckpttool.commands.check import check
from ckpttool.commands.textconv import textconv
from ckpttool.core import (
    ChangedError,
    Checksum,
    ChecksumError,
    DeflatedSpan,
    File,
    FormatError,
    Inline,
    Leaf,
    Source,
    Span,
    StoragePart,
    StridedView,
    TransformedSource,
    TruncatedError,
    checkpoint,
    crc32,
    crc32c,
    dtypes,
    filesystem,
    iter_pieces,
    source,
)
from ckpttool.core import (
    tree as tree_module,
)
from ckpttool.core.source import LARGE, PIECE_ELEMENTS, StreamedArray, keep_open
from ckpttool.formats import tensor_bytes
from ckpttool.mapping import Cast, Permute
from tests.golden_texts import Golden
from tests.trees import torch_tree

BEFORE = 77


@pytest.fixture
def data() -> bytes:
    return np.random.default_rng(0).bytes(LARGE + 12_345)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> File:
    path = tmp_path / "large"
    path.write_bytes(b"x" * BEFORE + data)
    return File.stamp(str(path))


@pytest.mark.parametrize("kind", ["crc32", "crc32c"])
def test_a_large_span_is_read_and_checked(file: File, data: bytes, kind: str) -> None:
    right = zlib.crc32(data) if kind == "crc32" else crc32c(data)
    content = Span(file, BEFORE, len(data), Checksum(kind, right)).read()
    assert bytes(content) == data
    assert memoryview(content).readonly
    with pytest.raises(ChecksumError) as error:
        Span(file, BEFORE, len(data), Checksum(kind, right ^ 1)).read()
    assert (error.value.file, error.value.offset) == (file.path, BEFORE)


@pytest.mark.parametrize("short", [0, 1, 300_000])
def test_a_large_span_without_checksum(file: File, data: bytes, short: int) -> None:
    length = len(data) - short
    assert bytes(Span(file, BEFORE, length).read()) == data[:length]


def test_a_file_that_changed_is_not_read(file: File, data: bytes, golden: Golden) -> None:
    with pytest.raises(TruncatedError):
        Span(file, BEFORE + 1, len(data)).read()
    pieces = file.read_large(BEFORE, len(data))
    next(pieces)
    os.truncate(file.path, BEFORE + LARGE // 2)
    with pytest.raises(ChangedError) as caught:
        list(pieces)
    golden(caught.value)
    with pytest.raises(ChangedError) as caught:
        Span(file, BEFORE, len(data)).read()
    golden(caught.value)


@pytest.mark.parametrize("location", ["local", "elsewhere"])
def test_bytes_beyond_the_end_are_given_no_room(
    file: File, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if location == "elsewhere":
        monkeypatch.setitem(filesystem._MOUNTED, file.path, object())
    with pytest.raises(TruncatedError):
        Span(file, 0, 1 << 62).read()
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(TruncatedError):
        next(file.read_large(0, 1 << 62))


@pytest.mark.parametrize("size", [10, 70_000, LARGE])
def test_a_checksum_does_not_depend_on_who_holds_the_bytes(data: bytes, size: int) -> None:
    right = crc32c(data[:size])
    assert crc32c(memoryview(data)[:size]) == right
    assert crc32c(bytearray(data[:size])) == right
    assert crc32c(memoryview(bytearray(data[:size]))[size // 3 :], crc32c(data[: size // 3])) == right


@pytest.mark.parametrize("installed", [True, False])
def test_the_zip_checksum_is_the_same_with_and_without_the_faster_library(
    data: bytes, installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source._large_crc32.cache_clear()
    if not installed:
        monkeypatch.setitem(sys.modules, "zlib_ng", None)
    else:
        pytest.importorskip("zlib_ng")
    for size in (0, 1, 65_535, 65_536, LARGE):
        assert crc32(memoryview(data)[:size]) == zlib.crc32(data[:size])
        assert crc32(memoryview(data)[size // 3 : size], crc32(data[: size // 3])) == zlib.crc32(data[:size])
    source._large_crc32.cache_clear()


def test_pieces_of_any_source_are_its_bytes(file: File, data: bytes) -> None:
    span = Span(file, BEFORE, len(data), Checksum("crc32", zlib.crc32(data)))
    cut = Span(file, BEFORE, LARGE)
    for source_ in (
        span,
        Inline(data),
        Span(file, BEFORE, 100),
        StridedView(cut, 4, (LARGE // 4,), (1,), 0),
        StridedView(cut, 4, (LARGE // 4 - 1,), (1,), 1),
        StridedView(cut, 4, (1024, LARGE // 4096), (1, 1024), 0),
        StridedView(cut, 4, (LARGE // 4,), (1,), 0, 4),
    ):
        assert b"".join(map(bytes, iter_pieces(source_))) == bytes(source_.read())


def test_the_end_of_the_pieces_checks_them(file: File, data: bytes) -> None:
    wrong = Span(file, BEFORE, LARGE, Checksum("crc32c", crc32c(data[:LARGE]) ^ 1))
    whole: Source = StridedView(wrong, 4, (LARGE // 4,), (1,), 0)
    for source_ in (wrong, whole):
        pieces = iter_pieces(source_)
        assert bytes(next(pieces)) == data[: 1 << 20]
        with pytest.raises(ChecksumError):
            list(pieces)


# Values of large tensors, in pieces: the elements of the array, verified, in commands that never hold it.

FORMATS = {"torch": "a.pt", "safetensors": "a.safetensors", "npz": "a.npz", "tf": "a"}


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("offset", [0, 3, 128])
def test_streamed_values_are_those_of_the_array(tmp_path: Path, dtype: str, offset: int) -> None:
    content = np.random.default_rng(1).bytes(LARGE + 16 * 4099)
    (tmp_path / "x").write_bytes(bytes(offset) + content)
    checksum = Checksum("crc32", crc32(bytes(offset) + content))
    base = Span(File.stamp(str(tmp_path / "x")), 0, offset + len(content), checksum)
    kind = dtypes.numpy_dtype(dtype)

    def streamed(storage: Span, more: int = 0) -> Any:
        shape = (len(content) // kind.itemsize + more,)
        return Leaf(dtype, shape, StoragePart(storage, offset, len(content)), "x").values()

    values = streamed(base)
    assert isinstance(values, StreamedArray)
    for _ in range(2):
        pieces = [piece.copy() for piece in values]
        assert all(piece.size == PIECE_ELEMENTS for piece in pieces[:-1])
        assert np.concatenate(pieces).tobytes() == content
    with pytest.raises(ChecksumError):
        list(streamed(base._replace(checksum=Checksum("crc32", 1))))
    with pytest.raises(FormatError):
        list(streamed(base, 1))


def _parts(shape: tuple[int, ...], axes: tuple[int, ...], file: File, nbytes: int) -> list[Source]:
    """Return the permuted array of a file: by a rule, as a view, and of a compressed member."""
    span = Span(file, 0, nbytes, Checksum("crc32", crc32(file.read(0, nbytes))))
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    view = StridedView(span, 4, tuple(shape[a] for a in axes), tuple(strides[a] for a in axes), 0)
    packed = Span(file, nbytes, file.size - nbytes)
    deflated = DeflatedSpan(packed, nbytes, span.checksum)
    rules = [TransformedSource(base, "float32", shape, Permute(axes)) for base in (span, deflated)]
    return [*rules, view, TransformedSource(deflated, "float32", shape, Cast("float64"))]


@pytest.mark.parametrize(
    ("shape", "axes"),
    [((1500, 1024), (1, 0)), ((3, 5, 1024, 100), (3, 2, 0, 1)), ((2, 1200, 640), (1, 0, 2))],
)
def test_parts_of_a_transposed_tensor_are_those_of_the_whole(
    shape: tuple[int, ...], axes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(3).standard_normal(shape, dtype=np.float32).tobytes()
    engine = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    (tmp_path / "x").write_bytes(data + engine.compress(data) + engine.flush())
    file = File.stamp(str(tmp_path / "x"))
    sources = _parts(shape, axes, file, len(data))
    whole = [bytes(item.read()) for item in sources]
    assert not any(map(source.is_streamed, sources))
    monkeypatch.setattr(source, "_CUT", 300_000)
    for item, expected in zip(sources, whole, strict=True):
        assert source.is_streamed(item)
        assert b"".join(map(bytes, iter_pieces(item))) == expected
        tracemalloc.start()
        for _ in iter_pieces(item):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < len(data)
    changed = bytearray((tmp_path / "x").read_bytes())
    changed[len(data) - 3] ^= 1  # the last element, and a byte in the middle of the compressed ones
    changed[(len(data) + len(changed)) // 2] ^= 1
    (tmp_path / "x").write_bytes(changed)
    damaged = File.stamp(str(tmp_path / "x"))
    for item in sources:
        with pytest.raises((ChecksumError, FormatError)):
            list(iter_pieces(_moved(item, damaged)))


@pytest.mark.parametrize(("shape", "passes"), [((2, 1200, 640), 2), ((400, 4096), 2), ((20_000, 100), 40)])
def test_the_rows_of_a_part_are_read_alone_where_they_are_long(
    shape: tuple[int, ...], passes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes read do not grow with the number of parts, but for short rows, which take a pass for each."""
    data = np.random.default_rng(3).standard_normal(shape, dtype=np.float32)
    (tmp_path / "x").write_bytes(data.tobytes())
    span = Span(File.stamp(str(tmp_path / "x")), 0, data.nbytes)
    turned = TransformedSource(span, "float32", shape, Permute((1, 0, *range(2, data.ndim))))
    monkeypatch.setattr(source, "_CUT", 300_000)
    count = 0

    def counting(descriptor: int, buffer: memoryview, offset: int) -> int:
        nonlocal count
        count += len(buffer)
        return os.preadv(descriptor, [buffer], offset)

    monkeypatch.setattr(filesystem, "read_into", counting)
    assert b"".join(map(bytes, iter_pieces(turned))) == data.swapaxes(0, 1).tobytes()
    assert data.nbytes < count <= passes * data.nbytes


def _moved(item: Any, file: File) -> Any:
    """Return a source of another file."""
    if isinstance(item, TransformedSource | DeflatedSpan):
        return item._replace(base=_moved(item.base, file))
    if isinstance(item, StridedView):
        return item._replace(storage=_moved(item.storage, file))
    return item._replace(file=file)


@pytest.mark.parametrize("length", [1, LARGE - 1, LARGE + 5])
def test_a_compressed_member_in_pieces_has_its_declared_length(length: int, tmp_path: Path) -> None:
    data = bytes(length)
    engine = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = engine.compress(data) + engine.flush()
    (tmp_path / "x").write_bytes(packed + b"more")
    file = File.stamp(str(tmp_path / "x"))
    right = DeflatedSpan(Span(file, 0, len(packed)), length, Checksum("crc32", crc32(data)))
    assert right.read() == b"".join(map(bytes, iter_pieces(right))) == data
    for wrong in (
        right._replace(length=length + 1),
        right._replace(length=length - 1),
        right._replace(base=Span(file, 0, len(packed) - 1)),
        right._replace(base=Span(file, 0, len(packed) + 4)),
    ):
        with pytest.raises(FormatError):
            wrong.read()
    with pytest.raises(ChecksumError):
        right._replace(checksum=Checksum("crc32", 1)).read()


@pytest.mark.long
@pytest.mark.parametrize("to", FORMATS)
def test_no_command_holds_a_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """Every command gives what it gives for the same tensor read whole, and never reads it whole."""
    array = np.random.default_rng(2).standard_normal((1100, 1024), dtype=np.float32)
    array[:, 3], array[7], array[9, 9] = 0, 0, np.inf
    tree = torch_tree({"l1/weight": array, "l2/weight": array + np.float32(1e-3)})
    first, second = str(tmp_path / FORMATS[to]), str(tmp_path / "other.npz")
    save(tree, first, to)
    save(torch_tree({"l1/weight": array * np.float32(2), "l2/weight": array + np.float32(1e-3)}), second)

    def run(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir()
        targets = {kind: str(tmp_path / name / FORMATS[kind]) for kind in (to, "npz")}
        for kind, target in targets.items():
            save(ckpttool.open(first).tree, target, kind)
        return {
            "digest": digest(first).document(),
            "stats": stats(first).document(),
            "check": check([first]).document(),
            "diff": diff(first, second, by="path").document(),
            "textconv": textconv(first) if to != "tf" else (),
            "written": [digest(target).sha256 for target in targets.values()],
        }

    pieces = run("pieces")
    with monkeypatch.context() as patched:
        patched.setattr(source, "is_streamed", lambda _: False)
        patched.setattr(tree_module, "is_streamed", lambda _: False)
        patched.setattr(tensor_bytes, "is_streamed", lambda _: False)
        patched.setattr(source, "_streamed_span", lambda _: None)
        whole = run("whole")
    assert pieces == whole
    different = np.count_nonzero(array != 2 * array)
    assert [change["values"]["different"] for change in pieces["diff"]["changed"]] == [different]
    assert any("dead" in sign for tensor in pieces["stats"]["tensors"][:1] for sign in tensor["signs"])

    def refuse(span: Span) -> memoryview:
        raise AssertionError(f"{span.length} bytes are read whole")

    monkeypatch.setattr(Span, "_read_large", refuse)
    monkeypatch.setattr(checkpoint, "_KEPT_NBYTES", 0)  # small files are kept between their readers
    assert run("again") == pieces


@pytest.mark.parametrize("change", ["replace", "append"])
def test_a_file_that_is_kept_open_is_compared_at_every_read(change: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"first")
    os.utime(path, ns=(1, 1))
    file = File.stamp(str(path))
    with keep_open():
        assert file.read(0, 5) == b"first"
        assert file.read(1, 3) == b"irs"
        if change == "append":
            path.write_bytes(b"first and more")
        else:
            (tmp_path / "other").write_bytes(b"other")
            os.replace(tmp_path / "other", path)
        with pytest.raises(ChangedError):
            file.read(0, 5)
