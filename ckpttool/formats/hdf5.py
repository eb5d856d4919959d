"""HDF5 files, indexed once in a child process."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeVar

from ckpttool.core import dtypes, filesystem, limits
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    ChecksumError,
    CkpttoolError,
    FormatError,
    MissingExtraError,
    TruncatedError,
    UnsupportedError,
    WorkerError,
)
from ckpttool.core.source import (
    Buffer,
    ByteSwappedSource,
    DeflatedSpan,
    File,
    Inline,
    Shape,
    Source,
    Span,
    Storage,
    UnreadableSource,
    cuts,
    gather_bytes,
)
from ckpttool.formats import child_process

if TYPE_CHECKING:
    from ckpttool.formats.hdf5_listing import Hdf5Listing

_IN_MEMORY = 64 << 20


class Hdf5Dataset(NamedTuple):
    """One dataset: its path without a leading slash, ckpttool dtype, shape and unread bytes.

    `address` is the position of its header; older objects are closer to the start of the file.
    """

    path: str
    address: int
    dtype: str
    shape: Shape
    source: Source


class Hdf5Group(NamedTuple):
    """One group: its path ("" is the root) and the attributes that Keras writes, as (lists of) text.

    `ordered` means that members are listed in creation order, which few writers record.
    """

    path: str
    address: int
    ordered: bool
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hdf5Index:
    """A listed file: groups (each before its content) and datasets by path, in file order.

    `same` maps second names of datasets and groups to the first ones; `notes` describe omissions.
    """

    groups: Mapping[str, Hdf5Group]
    datasets: Mapping[str, Hdf5Dataset]
    same: Mapping[str, str]
    notes: tuple[str, ...]


def read_index(base: Storage) -> Hdf5Index:
    """List the HDF5 file in `base`: a whole file as a span, or an archive member.

    Raise FormatError if it is damaged, and UnsupportedError if it refers to other files (external storage,
    external links, virtual datasets), none of which is opened. docs/formats/keras_h5.md describes the layout
    of the file. Nothing here is a format by itself: keras_h5 and keras_zip interpret the datasets.
    """
    return _read_index(base, limits.current())


# A command that lists a file also reads the configuration among its attributes: one child serves both.
@functools.lru_cache(maxsize=1)
def _read_index(base: Storage, _limits: limits.Limits) -> Hdf5Index:
    index = index_from_records(base, _list_plain(base) or run_on_storage(base, LISTING))
    if not any(map(checks_member, (dataset.source for dataset in index.datasets.values()))):
        # Reading a leaf does not check the member's checksum, so it is checked here.
        verify_checksum(base)
    return index


def _list_plain(base: Storage) -> Hdf5Listing | None:
    """Return the listing of a file of the form that Keras writes, without a child process."""
    if not isinstance(base, Span):
        return None
    from ckpttool.formats.hdf5_listing import list_plain_file

    with base.file.opened(base.offset, base.length) as descriptor:
        return list_plain_file(
            lambda offset, length: filesystem.read_at(descriptor, length, base.offset + offset), base.length
        )


def run_on_storage(base: Storage, job: Hdf5Job) -> dict[str, Any]:
    """Return the listing of the HDF5 file in `base` from the child process."""
    span = file_span(base)
    with span.file.opened(span.offset, span.length) as descriptor:
        if isinstance(base, Span):
            return run_child(descriptor, base.offset, base.length, base.file.path, job)
        with _unnamed_file(base.length) as stream:
            for data in iter_unpacked(base):
                stream.write(data)
            stream.flush()
            return run_child(stream.fileno(), 0, base.length, span.file.path, job)


def _unnamed_file(length: int) -> IO[bytes]:
    """Return an unnamed temporary file, in memory if it is small, so that nothing is left behind."""
    if length <= _IN_MEMORY and hasattr(os, "memfd_create"):
        return open(os.memfd_create("unpacked"), "w+b")
    import tempfile

    return tempfile.TemporaryFile()


def whole_file(file: File) -> Span:
    """Return a file that is a plain HDF5 file as the storage that `index` takes."""
    return Span(file, 0, file.size)


_START = child_process.child_program("from ckpttool.formats.hdf5_child import main; main(sys.argv[2:])")
# Average limit per object in the child's output: bytes and JSON values.
_BYTES, _VALUES = 256, 16
_LONGEST = 120
# Wall-clock time may be longer, because other processes share the CPU.
_CLOCK = 8
_ERRORS: dict[str, type[CkpttoolError]] = {
    "format": FormatError,
    "truncated": TruncatedError,
    "unsupported": UnsupportedError,
    "missing": MissingExtraError,
}
# "::" disables the search for filter plugins, which would be code (HDF5 1.8.15 release notes, H5PLpkg.h
# H5PL_NO_PLUGIN); file locks fail on read-only filesystems.
_ENVIRONMENT = {
    "HDF5_PLUGIN_PRELOAD": "::",
    "HDF5_PLUGIN_PATH": "/nonexistent",
    "HDF5_USE_FILE_LOCKING": "FALSE",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


def cpu_seconds(length: int) -> int:
    """Return the CPU seconds that listing a file of `length` bytes may use."""
    base = limits.current().hdf5_seconds
    return min(max(_LONGEST, base), base + (length >> 20))


class Hdf5Job(NamedTuple):
    """The child's task: list the file, or compute digests of its datasets.

    `declared` is the size in bytes of the first of these datasets.
    """

    first: int | None = None
    most: int = 0
    declared: int = 0


LISTING = Hdf5Job()


def run_child(descriptor: int, offset: int, length: int, file: str, job: Hdf5Job = LISTING) -> dict[str, Any]:
    """Return the output of hdf5_child.py for a range of an open file.

    Raise FormatError if the library rejects the file or crashes, LimitError if it needs too much time or
    memory, and UnsupportedError if the file refers to other files.

    Args:
        descriptor: the open file.
        offset: where the range begins, in bytes.
        length: its length in bytes.
        file: the file's name, for errors.
        job: what the child does with it: list it, or compute digests.
    """
    allowed, most = cpu_seconds(length + max(job.most, job.declared)), limits.current()
    command = [sys.executable, "-I", "-B", "-c", _START, child_process.child_paths()]
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    number, passed = _pass_descriptor(descriptor)
    digests = () if job.first is None else (str(job.first), str(job.most))
    with subprocess.Popen(  # noqa: S603  # our own module, run by our own interpreter
        [*command, *map(str, (number, offset, length, allowed)), json.dumps(asdict(most)), *digests],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=kept | _ENVIRONMENT,
        **passed,
    ) as process:
        late = threading.Event()
        watch = threading.Timer(_CLOCK * allowed, _stop, (process, late))
        watch.start()
        try:
            answer = _read_output(process, _BYTES * most.hdf5_objects)
        finally:
            watch.cancel()
            process.kill()
    exhausted = hasattr(signal, "SIGXCPU") and process.returncode == -signal.SIGXCPU
    if late.is_set() or exhausted:
        raise limits.limit_error(
            "hdf5_seconds", f"the HDF5 library did not finish within {allowed} s", None, file=file
        )
    return _parse_output(answer, process.returncode, file)


def _pass_descriptor(descriptor: int) -> tuple[int, dict[str, Any]]:
    """Return the child's number of an open file, and the arguments of Popen that pass it."""
    if filesystem.WINDOWS:  # passes only the three standard streams by number
        return 0, {"stdin": descriptor}
    return descriptor, {"stdin": subprocess.DEVNULL, "pass_fds": (descriptor,)}


def _read_output(process: subprocess.Popen[bytes], most: int) -> bytes:
    """Return the child's output, one byte more than `most` if it is longer."""
    stream: IO[bytes] | None = process.stdout
    data = stream.read(most + 1) if stream is not None else b""
    if len(data) <= most:
        process.wait()
    return data


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _parse_output(answer: bytes, status: int, file: str) -> dict[str, Any]:
    most = limits.current().hdf5_objects
    if len(answer) > _BYTES * most or sum(map(answer.count, (b",", b"[", b"{"))) > _VALUES * most:
        raise limits.limit_error(
            "hdf5_objects", "the list of the file's datasets is too long", None, file=file
        )
    if hasattr(signal, "SIGKILL") and status == -signal.SIGKILL:
        # No error of a program raises this signal: the system sends it when it has no memory left.
        hint = "close other programs, or raise the memory limit of the container"
        raise WorkerError("the HDF5 reader process was killed from outside", file=file, hint=hint)
    if status:
        what = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        raise FormatError(f"the HDF5 reader process {what}: the file is damaged", file=file)
    try:
        record = json.loads(answer)
        refused = record.get("refused")
        if refused is not None:
            raise _refusal_error(file, *refused)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError("cannot parse the output of the HDF5 reader process", file=file) from error
    return dict(record)


def _refusal_error(
    file: str, kind: str, sentence: str, limit: str = "", value: int | None = None
) -> CkpttoolError:
    shown = _printable(sentence)
    if kind == "limit" and hasattr(limits.current(), limit):
        return limits.limit_error(limit, shown, value, file=file)
    return _ERRORS.get(kind, FormatError)(shown, file=file)


def _printable(sentence: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(sentence))[:400]


DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
KNOWN = frozenset((DEFLATE, SHUFFLE, FLETCHER32))
_STEP = 1 << 20
_KEPT = 64 << 20
_WORDS = 1 << 20
# Starting the read-ahead process costs as much as reading some 64 MiB.
_AHEAD, _FURTHEST = 64 << 20, 256 << 20


def file_span(base: Storage) -> Span:
    """Return the span of the file that the storage occupies."""
    return base.base if isinstance(base, DeflatedSpan) else base


def iter_unpacked(base: Storage) -> Iterator[bytes]:
    """Yield the storage's bytes in order, 1 MiB at a time; raise FormatError unless all are there.

    Layouts and filters are those of the HDF5 File Format Specification 3.0 (IV.A.2.i data layout, IV.A.2.l
    filter pipeline) and of H5Zdeflate.c, H5Zshuffle.c, H5Zfletcher32.c.
    """
    if isinstance(base, Span):
        for at in range(0, base.length, _STEP):
            yield base.file.read(base.offset + at, min(_STEP, base.length - at))
        return
    engine, left = zlib.decompressobj(-zlib.MAX_WBITS), base.length
    for packed in iter_unpacked(base.base._replace(checksum=None)):
        rest = packed
        while rest and left >= 0:
            try:
                data = engine.decompress(rest, _STEP)
            except zlib.error as error:
                _raise_damage(base, f"cannot decompress a compressed member: {error}")
            left -= len(data)
            yield data
            rest = engine.unconsumed_tail
    if left:
        _raise_damage(base, "a compressed member does not have its declared length")


def _require_plausible(declared: int, stored: int, base: Storage) -> None:
    # Keras has the same rule with a minimum of 4 GiB (keras/src/saving/saving_lib.py, safe_get_h5_dataset).
    most = limits.current()
    if declared > max(most.expanded_bytes, most.expanded_ratio * stored):
        raise _size_limit_error("a dataset declares", declared, stored, base)


def _size_limit_error(who: str, declared: int, stored: int, base: Storage) -> CkpttoolError:
    what = f"{who} {declared:,} bytes and store{'s' * who.startswith('a ')} {stored:,}"
    return limits.limit_error("expanded_bytes", what, declared, file=file_span(base).file.path)


def _raise_damage(base: Storage, sentence: str) -> NoReturn:
    where = file_span(base)
    raise FormatError(sentence, file=where.file.path, offset=where.offset)


@functools.lru_cache(maxsize=64)
def verify_checksum(base: Storage) -> None:
    """Verify the checksum of a whole member; the result is cached, so it costs one pass in all."""
    if base.checksum is None:
        return
    checksum = total = 0
    for data in iter_unpacked(base):
        checksum = zlib.crc32(data, checksum)
        total += len(data)
    where = file_span(base)
    base.checksum.require(checksum, total, where.file.path, where.offset)


def checks_member(source: Source) -> bool:
    """Return whether reading a dataset's source verifies the checksum of its archive member."""
    raw = source.base if isinstance(source, ByteSwappedSource) else source
    return isinstance(raw, MemberRange) or (isinstance(raw, ChunkedSource) and bool(raw.chunks))


@functools.lru_cache(maxsize=1)
def _unpack_all(base: DeflatedSpan) -> bytes:
    return b"".join(iter_unpacked(base))


class MemberRange(NamedTuple):
    """A range of bytes of an HDF5 file in an archive: verified as a whole, read in part."""

    base: Storage
    start: int
    length: int

    def read(self) -> bytes:
        """Return the bytes; raise ChecksumError if the member is damaged anywhere."""
        stop = self.start + self.length
        if self.start < 0 or stop > self.base.length:
            where = file_span(self.base)
            raise TruncatedError(
                "the HDF5 file ends before the end of its data",
                file=where.file.path,
                expected=f"{stop:,} bytes",
                found=f"{self.base.length:,}",
            )
        verify_checksum(self.base)
        if isinstance(self.base, Span):
            return self.base.file.read(self.base.offset + self.start, self.length)
        if self.base.length <= _KEPT:
            return _unpack_all(self.base)[self.start : stop]
        return b"".join(self._parts(self.base, stop))

    def _parts(self, base: DeflatedSpan, stop: int) -> Iterator[bytes]:
        at = 0
        for data in iter_unpacked(base):
            if at < stop and at + len(data) > self.start:
                yield data[max(0, self.start - at) : stop - at]
            at += len(data)
            if at >= stop:
                return


def range_source(base: Storage, start: int, length: int) -> Span | MemberRange:
    """Return `length` bytes from `start` of an HDF5 file, as a plain span if possible."""
    if isinstance(base, Span) and base.checksum is None and start + length <= base.length:
        return Span(base.file, base.offset + start, length)
    return MemberRange(base, start, length)


class Hdf5Filter(NamedTuple):
    """One step of the filter pipeline: its registered number, its values, and its name."""

    code: int
    values: tuple[int, ...]
    name: str


class Hdf5Chunk(NamedTuple):
    """A stored chunk: its first element, its bytes in the file, the filters that were skipped."""

    at: Shape
    offset: int
    size: int
    skipped: int


class ChunkedSource(NamedTuple):
    """A dataset in chunks of `chunk` elements; missing chunks have the value `fill` (one element).

    `number` is its position in the listing. The library finds a chunk by search, while the listing
    visits all chunks; with an inconsistent index the two differ. So the data read here is compared with
    the data that the library reads.
    """

    base: Storage
    number: int
    shape: Shape
    chunk: Shape
    chunks: tuple[Hdf5Chunk, ...]
    filters: tuple[Hdf5Filter, ...]
    fill: bytes

    def read(self) -> Buffer:
        """Return the elements in C order; raise FormatError or ChecksumError for a damaged chunk."""
        return gather_bytes(self.pieces(), math.prod(self.shape) * len(self.fill)).data

    def streams(self) -> bool:
        """Return whether the dataset is so large that it is read in rows of chunks."""
        return cuts(self.shape, len(self.fill))

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the rows of chunks in C order; they are compared with the library's data at the end."""
        element = np.dtype(f"V{len(self.fill)}")
        declared = math.prod(self.shape) * len(self.fill)
        _require_plausible(declared, sum(chunk.size for chunk in self.chunks), self.base)
        size = math.prod(self.chunk) * len(self.fill)
        large = size > limits.current().expanded_bytes
        by_row: dict[int, list[Hdf5Chunk]] = {}
        for chunk in self.chunks:
            by_row.setdefault(chunk.at[0], []).append(chunk)
        # The listing has each grid position at most once.
        whole = math.prod(-(-n // c) for n, c in zip(self.shape[1:], self.chunk[1:], strict=True))
        running = hashlib.sha256()
        for row in range(0, self.shape[0], self.chunk[0]):
            array = np.zeros((min(self.chunk[0], self.shape[0] - row), *self.shape[1:]), element)
            chunks = by_row.get(row, [])
            if len(chunks) < whole:
                array[...] = np.frombuffer(self.fill, element)[0]
            for chunk in chunks:
                if large:
                    _require_plausible(size, chunk.size, self.base)
                block = np.frombuffer(self._unfiltered(chunk, size), element).reshape(self.chunk)
                at = (0, *chunk.at[1:])
                box = tuple(
                    slice(a, min(a + c, n)) for a, c, n in zip(at, self.chunk, array.shape, strict=True)
                )
                array[box] = block[tuple(slice(0, part.stop - part.start) for part in box)]
            piece = array.reshape(-1).view(np.uint8).data
            running.update(piece)
            yield piece
        if verify and running.hexdigest() != _digest(self.base, self.number, declared):
            raise FormatError(
                "the chunk index of a dataset is inconsistent: the HDF5 library reads different values",
                file=file_span(self.base).file.path,
            )

    def _unfiltered(self, chunk: Hdf5Chunk, size: int) -> bytes:
        data = bytes(range_source(self.base, chunk.offset, chunk.size).read())
        checks = sum(4 for f in self.filters if f.code == FLETCHER32)
        for number in reversed(range(len(self.filters))):
            step = self.filters[number]
            if chunk.skipped >> number & 1:
                continue
            if step.code == DEFLATE:
                data = self._inflated(data, size + checks, chunk)
            elif step.code == SHUFFLE:
                data = _unshuffle(data, step.values[0] if step.values else 1)
            elif step.code == FLETCHER32:
                data = self._checked(data, chunk)
            else:
                raise UnsupportedError(f"a dataset uses an unsupported filter: {step.name or step.code}")
        if len(data) != size:
            self._fail(chunk, "the length of a chunk does not match its shape", f"{size:,}", f"{len(data):,}")
        return data

    def _inflated(self, data: bytes, most: int, chunk: Hdf5Chunk) -> bytes:
        engine = zlib.decompressobj()
        try:
            inflated = engine.decompress(data, most + 1)
        except zlib.error as error:
            self._fail(chunk, f"cannot decompress a chunk: {error}")
        if not engine.eof and len(inflated) <= most:
            self._fail(chunk, "a compressed chunk is truncated")
        if engine.unused_data:
            self._fail(chunk, "extra bytes after a compressed chunk")
        return inflated

    def _checked(self, data: bytes, chunk: Hdf5Chunk) -> bytes:
        stored = int.from_bytes(data[-4:], "little")
        checksum = fletcher32(data[:-4])
        # Libraries before 1.6.3 swapped the bytes of each half (H5Zfletcher32.c).
        swapped = (checksum & 0x00FF00FF) << 8 | (checksum & 0xFF00FF00) >> 8
        if len(data) < 4 or stored not in (checksum, swapped):
            raise ChecksumError(
                "the fletcher32 checksum of a chunk does not match: the file is damaged",
                file=file_span(self.base).file.path,
                offset=file_span(self.base).offset + chunk.offset,
                expected=f"{stored:08x}",
                found=f"{checksum:08x}",
            )
        return data[:-4]

    def _fail(
        self, chunk: Hdf5Chunk, sentence: str, expected: str | None = None, value: str | None = None
    ) -> NoReturn:
        where = file_span(self.base)
        raise FormatError(
            sentence,
            file=where.file.path,
            offset=where.offset + chunk.offset,
            expected=expected,
            found=value,
        )


def _digest(base: Storage, number: int, declared: int) -> str:
    """Return the SHA-256 of chunked dataset `number` of the listing as the HDF5 library reads it.

    The child process continues with the following datasets, which are usually read next; it reads
    further ahead once they have been.
    """
    known = _digests(base)
    if number not in known:
        ahead = _FURTHEST if known and number > max(known) else _AHEAD
        try:
            record = run_on_storage(base, Hdf5Job(number, ahead, declared))
        except FormatError:
            # Another dataset may have ended the process.
            record = run_on_storage(base, Hdf5Job(number, 0, declared))
        try:
            known.update((int(at), str(digest)) for at, digest in record["digests"])
            return known[number]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "cannot parse the output of the HDF5 reader process", file=file_span(base).file.path
            ) from error
    return known[number]


@functools.lru_cache(maxsize=8)
def _digests(base: Storage) -> dict[int, str]:  # noqa: ARG001  # the key
    return {}


def _unshuffle(data: bytes, width: int) -> bytes:
    """Undo H5Zshuffle.c: all first bytes of the elements, then all second ones; a rest is unchanged."""
    count = len(data) // width if width > 1 else 0
    if count < 2:
        return data
    whole = np.frombuffer(data, np.uint8, count * width).reshape(width, count)
    return whole.T.tobytes() + data[count * width :]


def fletcher32(data: bytes) -> int:
    """Return the checksum of H5checksum.c, H5_checksum_fletcher32: two sums of big-endian 16-bit words."""
    padded = data + bytes(len(data) % 2)
    first = second = 0
    nonzero = False
    words = np.frombuffer(padded, ">u2")
    for at in range(0, len(words), _WORDS):
        block = words[at : at + _WORDS].astype(np.uint64)
        count = len(block)
        total = int(block.sum())
        # Every word is in the second sum once for each word from it to the end of the block.
        second += first * count + int((block * np.arange(count, 0, -1, dtype=np.uint64)).sum())
        first += total
        nonzero = nonzero or total > 0
    return (_fold_sum(second) << 16 | _fold_sum(first)) if nonzero else 0


def _fold_sum(total: int) -> int:
    # Adding the carries leaves 65535, not 0, for a multiple of 65535.
    return total % 65535 or 65535


class FillValueSource(NamedTuple):
    """A dataset without stored data: the fill value (one element) repeated to `length` bytes."""

    base: Storage
    fill: bytes
    length: int

    def read(self) -> bytes:
        """Return the elements; raise LimitError if their number is implausibly large."""
        _require_plausible(self.length, 0, self.base)
        return self.fill * (self.length // len(self.fill))


class OversizedSource(NamedTuple):
    """A dataset in a file whose datasets declare far more (`declared` bytes) than it contains."""

    base: Storage
    declared: int

    def read(self) -> NoReturn:
        """Raise LimitError."""
        raise _size_limit_error("the file's datasets declare", self.declared, self.base.length, self.base)


_MOST = (1 << 63) - 1

_Entry = TypeVar("_Entry", Hdf5Group, Hdf5Dataset)


def index_from_records(base: Storage, records: Mapping[str, Any]) -> Hdf5Index:
    """Return the listing of the HDF5 file in `base` as records.

    Raise FormatError for invalid values, for data outside the file, and for bytes that are shared by
    two datasets or contain the start of an object header.
    """
    judge = _EntryValidator(base)
    try:
        groups = _index_by_path([judge.group(entry) for entry in records["groups"]])
        datasets = _index_by_path([judge.dataset(*row) for row in enumerate(records["datasets"])])
        if "" not in groups or groups.keys() & datasets.keys():
            raise ValueError("a group and a dataset have the same name")
        same = {_require_text(name): _require_text(first) for name, first in records["same"]}
        notes = tuple(_require_text(note) for note in records["notes"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FormatError("the list of the file's datasets is invalid", file=judge.file) from error
    judge.require_apart()
    return Hdf5Index(groups, judge.bounded(datasets), same, notes)


def _index_by_path(entries: Iterable[_Entry]) -> dict[str, _Entry]:
    index: dict[str, _Entry] = {}
    for entry in entries:
        if index.setdefault(entry.path, entry) is not entry:
            raise ValueError("two entries have the same name")
    return index


class _EntryValidator:
    """Validate the entries; `extents` are the byte ranges of the data, with the dataset of each."""

    def __init__(self, base: Storage) -> None:
        self.base = base
        self.most = limits.current()
        self.file = file_span(base).file.path
        self.extents: list[tuple[int, int, str]] = []
        self.addresses: list[int] = []
        self.expanded = 0

    def group(self, entry: Mapping[str, Any]) -> Hdf5Group:
        """Return a group; raise ValueError or TypeError if it is invalid."""
        attributes = dict(entry["attributes"])
        for name, value in attributes.items():
            for text in [name, *(value if isinstance(value, list) else [] if value is None else [value])]:
                _require_text(text)
        return Hdf5Group(
            _require_text(entry["path"]), self._address(entry), entry["ordered"] is True, attributes
        )

    def dataset(self, number: int, entry: Mapping[str, Any]) -> Hdf5Dataset:
        """Return dataset `number` of the list; raise ValueError or TypeError if it is invalid."""
        path, dtype = _require_text(entry["path"]), _require_text(entry["dtype"])
        shape = _require_sizes(entry["shape"])
        # Zeros are excluded: a zero must not hide an impossible size.
        if dtype not in dtypes.BY_NAME or math.prod(n or 1 for n in shape) > _MOST:
            raise ValueError(dtype)
        if (dtype == "unknown") != ("unreadable" in entry):
            raise ValueError(dtype)
        address = self._address(entry)
        if "unreadable" in entry:
            why = f"dataset {path} contains {_require_text(entry['unreadable'])}"
            return Hdf5Dataset(path, address, dtype, shape, UnreadableSource(self.file, why))
        return Hdf5Dataset(path, address, dtype, shape, self._source(number, entry, dtype, shape))

    def _address(self, entry: Mapping[str, Any]) -> int:
        self.addresses.append(_require_size(entry["address"]))
        return self.addresses[-1]

    def _source(self, number: int, entry: Mapping[str, Any], dtype: str, shape: Shape) -> Source:
        path = entry["path"]
        itemsize = dtypes.BY_NAME[dtype].itemsize
        nbytes = math.prod(shape) * itemsize
        if dtype == "string":
            return Inline(_require_texts(base64.b64decode(entry["inline"]), math.prod(shape)))
        if not nbytes:
            return Inline(b"")
        if "inline" in entry:
            raw: Source = Inline(_require_exactly(base64.b64decode(entry["inline"]), nbytes))
        elif "fill" in entry:
            fill = _require_exactly(base64.b64decode(entry["fill"]), itemsize)
            chunked = "chunks" in entry
            raw = (
                self._chunked(number, entry, shape, fill)
                if chunked
                else FillValueSource(self.base, fill, nbytes)
            )
            # A larger one is checked separately.
            self.expanded += nbytes if nbytes <= self.most.expanded_bytes else 0
        else:
            offset, stored = _require_size(entry["offset"]), _require_size(entry["stored"])
            if stored != nbytes:
                self._fail(f"dataset {path} stores {stored:,} bytes, but its shape needs {nbytes:,}", offset)
            self._claim(offset, nbytes, path)
            raw = range_source(self.base, offset, nbytes)
        width = dtypes.component_size(dtype)
        return ByteSwappedSource(raw, width) if entry["big"] is True and width > 1 else raw

    def _chunked(self, number: int, entry: Mapping[str, Any], shape: Shape, fill: bytes) -> Source:
        path = entry["path"]
        filters = tuple(
            Hdf5Filter(_require_size(code), _require_sizes(values), _require_text(name))
            for code, values, name in entry["filters"]
        )
        chunk = _require_sizes(entry["chunk"])
        chunks = tuple(
            Hdf5Chunk(_require_sizes(at), *map(_require_size, rest)) for at, *rest in entry["chunks"]
        )
        if len(chunk) != len(shape) or min(chunk) < 1 or len({one.at for one in chunks}) < len(chunks):
            raise ValueError(chunk)
        for one in chunks:
            if len(one.at) != len(shape) or any(at % step for at, step in zip(one.at, chunk, strict=True)):
                raise ValueError(one.at)
            if any(at >= extent for at, extent in zip(one.at, shape, strict=True)):
                self._fail(f"dataset {path} has a chunk outside its shape", one.offset)
            self._claim(one.offset, one.size, path)
        unknown = [filter_.name or str(filter_.code) for filter_ in filters if filter_.code not in KNOWN]
        if unknown:
            named = ", ".join(unknown)
            return UnreadableSource(self.file, f"dataset {path} uses an unsupported filter: {named}")
        return ChunkedSource(self.base, number, shape, chunk, chunks, filters, fill)

    def _claim(self, offset: int, length: int, path: str) -> None:
        if offset + length > self.base.length:
            self._fail(f"the data of dataset {path} extends beyond the end of the file", offset)
        self.extents.append((offset, offset + length, path))

    def require_apart(self) -> None:
        """Raise FormatError if two ranges overlap; an object header occupies at least its first byte."""
        runs = sorted(
            [run for run in self.extents if run[0] < run[1]] + [(at, at + 1, "") for at in self.addresses]
        )
        for (start, stop, path), (following, _, other) in pairwise(runs):
            if following < stop:
                names = " and ".join(
                    f"dataset {name}" if name else "another object" for name in (path, other)
                )
                self._fail(f"{names} overlap in the file", max(start, following))

    def bounded(self, datasets: dict[str, Hdf5Dataset]) -> dict[str, Hdf5Dataset]:
        """Return the datasets; if they declare too much, those not stored in the file are unreadable."""
        if self.expanded <= max(self.most.expanded_bytes, self.most.expanded_ratio * self.base.length):
            return datasets
        excess = OversizedSource(self.base, self.expanded)
        return {
            path: one._replace(source=excess)
            if isinstance(_raw_source(one.source), FillValueSource | ChunkedSource)
            else one
            for path, one in datasets.items()
        }

    def _fail(self, sentence: str, offset: int) -> None:
        raise FormatError(sentence, file=self.file, offset=file_span(self.base).offset + offset)


def _raw_source(source: Source) -> Source:
    return source.base if isinstance(source, ByteSwappedSource) else source


def _require_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return value


def _require_size(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(value)
    return value


def _require_sizes(sizes: object) -> Shape:
    if not isinstance(sizes, list):
        raise TypeError(sizes)
    return tuple(_require_size(size) for size in sizes)


def _require_exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError(len(data))
    return data


def _require_texts(data: bytes, count: int) -> bytes:
    """Return strings, each after its length in eight bytes; check that there are `count` of them."""
    at = 0
    for _ in range(count):
        at += 8 + int.from_bytes(data[at : at + 8], "little")
        if at > len(data):
            raise ValueError(at)
    return _require_exactly(data, at)
