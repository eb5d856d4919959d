"""Where the bytes of HDF5 datasets come from, once it is known where they lie.

Layouts and filters are those of the HDF5 File Format Specification 3.0 (IV.A.2.i data layout, IV.A.2.l filter
pipeline) and of H5Zdeflate.c, H5Zshuffle.c, H5Zfletcher32.c.
"""

from __future__ import annotations

import functools
import hashlib
import math
import zlib
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from ckpttool import limits
from ckpttool.errors import ChecksumError, CkpttoolError, FormatError, TruncatedError, UnsupportedError
from ckpttool.formats import hdf5
from ckpttool.formats.hdf5 import process
from ckpttool.source import Buffer, Deflated, Shape, Source, Span, Storage

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
KNOWN = frozenset((DEFLATE, SHUFFLE, FLETCHER32))
_STEP = 1 << 20
_KEPT = 64 << 20
_WORDS = 1 << 20
# Starting the process that reads ahead costs as much as reading some 64 MiB.
_AHEAD, _FURTHEST = 64 << 20, 256 << 20


def place(base: Storage) -> Span:
    """Return the span of the file that the storage takes."""
    return base.base if isinstance(base, Deflated) else base


def unpacked(base: Storage) -> Iterator[bytes]:
    """Give the storage's bytes in order, a MiB at a time; raise FormatError unless all are there."""
    if isinstance(base, Span):
        for at in range(0, base.length, _STEP):
            yield base.file.read(base.offset + at, min(_STEP, base.length - at))
        return
    engine, left = zlib.decompressobj(-zlib.MAX_WBITS), base.length
    for packed in unpacked(base.base._replace(checksum=None)):
        rest = packed
        while rest and left >= 0:
            try:
                data = engine.decompress(rest, _STEP)
            except zlib.error as error:
                _damaged(base, f"a compressed member cannot be decompressed: {error}")
            left -= len(data)
            yield data
            rest = engine.unconsumed_tail
    if left:
        _damaged(base, "a compressed member is not as long as declared")


def _require_plausible(declared: int, stored: int, base: Storage) -> None:
    # Keras has the same rule with a floor of 4 GiB (keras/src/saving/saving_lib.py, safe_get_h5_dataset).
    most = limits.current()
    if declared > max(most.expanded_bytes, most.expanded_ratio * stored):
        raise _excess("a dataset declares", declared, stored, base)


def _excess(who: str, declared: int, stored: int, base: Storage) -> CkpttoolError:
    what = f"{who} {declared:,} bytes and store{'s' * who.startswith('a ')} {stored:,}"
    return limits.exceeded("expanded_bytes", what, declared, file=place(base).file.path)


def _damaged(base: Storage, sentence: str) -> NoReturn:
    where = place(base)
    raise FormatError(sentence, file=where.file.path, offset=where.offset)


@functools.lru_cache(maxsize=64)
def verify(base: Storage) -> None:
    """Check the checksum of a whole member; the answer is kept, so that it costs one pass for all."""
    if base.checksum is None:
        return
    found = total = 0
    for data in unpacked(base):
        found = zlib.crc32(data, found)
        total += len(data)
    where = place(base)
    base.checksum.require(found, total, where.file.path, where.offset)


def is_checked(source: Source) -> bool:
    """Say whether reading a dataset's source looks at the checksum of the member that it lies in."""
    raw = source.base if isinstance(source, Turned) else source
    return isinstance(raw, Within) or (isinstance(raw, Chunked) and bool(raw.chunks))


@functools.lru_cache(maxsize=1)
def _kept(base: Deflated) -> bytes:
    return b"".join(unpacked(base))


class Within(NamedTuple):
    """A run of bytes of an HDF5 file that is a member of an archive: checked as a whole, read in part."""

    base: Storage
    start: int
    length: int

    def read(self) -> bytes:
        """Return the bytes; raise ChecksumError if the member is damaged anywhere."""
        stop = self.start + self.length
        if self.start < 0 or stop > self.base.length:
            where = place(self.base)
            raise TruncatedError(
                "the HDF5 file ends before its data does",
                file=where.file.path,
                expected=f"{stop:,} bytes",
                found=f"{self.base.length:,}",
            )
        verify(self.base)
        if isinstance(self.base, Span):
            return self.base.file.read(self.base.offset + self.start, self.length)
        if self.base.length <= _KEPT:
            return _kept(self.base)[self.start : stop]
        return b"".join(self._parts(self.base, stop))

    def _parts(self, base: Deflated, stop: int) -> Iterator[bytes]:
        at = 0
        for data in unpacked(base):
            if at < stop and at + len(data) > self.start:
                yield data[max(0, self.start - at) : stop - at]
            at += len(data)
            if at >= stop:
                return


def run(base: Storage, start: int, length: int) -> Span | Within:
    """Return `length` bytes from `start` of an HDF5 file: a plain span where nothing else is needed."""
    if isinstance(base, Span) and base.checksum is None and start + length <= base.length:
        return Span(base.file, base.offset + start, length)
    return Within(base, start, length)


class Filter(NamedTuple):
    """One step of the pipeline: its registered number, its values, and its name."""

    code: int
    values: tuple[int, ...]
    name: str


class Chunk(NamedTuple):
    """A stored chunk: the element it begins at, its bytes in the file, the filters that were left out."""

    at: Shape
    offset: int
    size: int
    skipped: int


class Chunked(NamedTuple):
    """A dataset in chunks of `chunk` elements; what is not stored has the value `fill` (one element).

    `number` is its place in the listing. The library finds a chunk by search, the listing goes through them
    all, and an index that contradicts itself gives each something else. So what is read here is compared with
    what the library reads.
    """

    base: Storage
    number: int
    shape: Shape
    chunk: Shape
    chunks: tuple[Chunk, ...]
    filters: tuple[Filter, ...]
    fill: bytes

    def read(self) -> Buffer:
        """Return the elements in C order; raise FormatError or ChecksumError for a damaged chunk."""
        import numpy as np

        element = np.dtype(f"V{len(self.fill)}")
        declared = math.prod(self.shape) * len(self.fill)
        _require_plausible(declared, sum(chunk.size for chunk in self.chunks), self.base)
        size = math.prod(self.chunk) * len(self.fill)
        large = size > limits.current().expanded_bytes
        # The listing has each place of the grid once at most.
        missing = math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True)) - len(
            self.chunks
        )
        array = np.zeros(self.shape, element)
        if missing:
            array[...] = np.frombuffer(self.fill, element)[0]
        for chunk in self.chunks:
            if large:
                _require_plausible(size, chunk.size, self.base)
            block = np.frombuffer(self._unfiltered(chunk, size), element).reshape(self.chunk)
            box = tuple(
                slice(at, min(at + c, n)) for at, c, n in zip(chunk.at, self.chunk, self.shape, strict=True)
            )
            array[box] = block[tuple(slice(0, part.stop - part.start) for part in box)]
        found = array.reshape(-1).view(np.uint8).data
        if hashlib.sha256(found).hexdigest() != _digest(self.base, self.number, declared):
            raise FormatError(
                "the index of a dataset's chunks contradicts itself: the HDF5 library reads other numbers",
                file=place(self.base).file.path,
            )
        return found

    def _unfiltered(self, chunk: Chunk, size: int) -> bytes:
        data = bytes(run(self.base, chunk.offset, chunk.size).read())
        checks = sum(4 for f in self.filters if f.code == FLETCHER32)
        for number in reversed(range(len(self.filters))):
            step = self.filters[number]
            if chunk.skipped >> number & 1:
                continue
            if step.code == DEFLATE:
                data = self._inflated(data, size + checks, chunk)
            elif step.code == SHUFFLE:
                data = _unshuffled(data, step.values[0] if step.values else 1)
            elif step.code == FLETCHER32:
                data = self._checked(data, chunk)
            else:
                raise UnsupportedError(f"a dataset is packed by filter {step.name or step.code}")
        if len(data) != size:
            self._fail(chunk, "a chunk is not as long as its shape says", f"{size:,}", f"{len(data):,}")
        return data

    def _inflated(self, data: bytes, most: int, chunk: Chunk) -> bytes:
        engine = zlib.decompressobj()
        try:
            found = engine.decompress(data, most + 1)
        except zlib.error as error:
            self._fail(chunk, f"a chunk cannot be decompressed: {error}")
        if not engine.eof and len(found) <= most:
            self._fail(chunk, "a compressed chunk is cut off")
        if engine.unused_data:
            self._fail(chunk, "a compressed chunk is followed by other bytes")
        return found

    def _checked(self, data: bytes, chunk: Chunk) -> bytes:
        stored = int.from_bytes(data[-4:], "little")
        found = fletcher32(data[:-4])
        # Libraries before 1.6.3 swapped the bytes of each half (H5Zfletcher32.c).
        swapped = (found & 0x00FF00FF) << 8 | (found & 0xFF00FF00) >> 8
        if len(data) < 4 or stored not in (found, swapped):
            raise ChecksumError(
                "the fletcher32 checksum of a chunk does not match: the file is damaged",
                file=place(self.base).file.path,
                offset=place(self.base).offset + chunk.offset,
                expected=f"{stored:08x}",
                found=f"{found:08x}",
            )
        return data[:-4]

    def _fail(
        self, chunk: Chunk, sentence: str, expected: str | None = None, found: str | None = None
    ) -> NoReturn:
        where = place(self.base)
        raise FormatError(
            sentence,
            file=where.file.path,
            offset=where.offset + chunk.offset,
            expected=expected,
            found=found,
        )


def _digest(base: Storage, number: int, declared: int) -> str:
    """Return the SHA-256 of chunked dataset `number` of the listing as the HDF5 library reads it.

    The process that reads it goes on with those that follow, which are mostly read next; it reads further
    ahead where they were.
    """
    known = _digests(base)
    if number not in known:
        ahead = _FURTHEST if known and number > max(known) else _AHEAD
        try:
            found = hdf5.run(base, process.Job(number, ahead, declared))
        except FormatError:
            # One of the others may have ended it.
            found = hdf5.run(base, process.Job(number, 0, declared))
        try:
            known.update((int(at), str(digest)) for at, digest in found["digests"])
            return known[number]
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                "the HDF5 library gave no answer that can be read", file=place(base).file.path
            ) from error
    return known[number]


@functools.lru_cache(maxsize=8)
def _digests(base: Storage) -> dict[int, str]:  # noqa: ARG001  # the key
    return {}


def _unshuffled(data: bytes, width: int) -> bytes:
    """Undo H5Zshuffle.c: all first bytes of the elements, then all second ones; a rest is left as it is."""
    import numpy as np

    count = len(data) // width if width > 1 else 0
    if count < 2:
        return data
    whole = np.frombuffer(data, np.uint8, count * width).reshape(width, count)
    return whole.T.tobytes() + data[count * width :]


def fletcher32(data: bytes) -> int:
    """Return the checksum of H5checksum.c, H5_checksum_fletcher32: two sums of big-endian 16-bit words."""
    import numpy as np

    padded = data + bytes(len(data) % 2)
    first = second = 0
    seen = False
    words = np.frombuffer(padded, ">u2")
    for at in range(0, len(words), _WORDS):
        block = words[at : at + _WORDS].astype(np.uint64)
        count = len(block)
        total = int(block.sum())
        # Every word is in the second sum once for each word from it to the end of the block.
        second += first * count + int((block * np.arange(count, 0, -1, dtype=np.uint64)).sum())
        first += total
        seen = seen or total > 0
    return (_folded(second) << 16 | _folded(first)) if seen else 0


def _folded(total: int) -> int:
    # Adding the carries leaves 65535, not 0, for a multiple of 65535.
    return total % 65535 or 65535


class Filled(NamedTuple):
    """A dataset of which nothing is stored: the fill value (one element) repeated to `length` bytes."""

    base: Storage
    fill: bytes
    length: int

    def read(self) -> bytes:
        """Return the elements; raise LimitError if they would be implausibly many."""
        _require_plausible(self.length, 0, self.base)
        return self.fill * (self.length // len(self.fill))


class Excess(NamedTuple):
    """A dataset of a file whose datasets together declare far more (`declared` bytes) than it holds."""

    base: Storage
    declared: int

    def read(self) -> NoReturn:
        """Raise LimitError."""
        raise _excess("the file's datasets declare", self.declared, self.base.length, self.base)


class Turned(NamedTuple):
    """Big-endian data: every `width` bytes of `base` are turned around."""

    base: Source
    width: int

    def read(self) -> Buffer:
        """Return the bytes in little-endian order."""
        import numpy as np

        flat = np.frombuffer(self.base.read(), np.uint8).reshape(-1, self.width)[:, ::-1]
        return np.ascontiguousarray(flat).reshape(-1).data


class Unreadable(NamedTuple):
    """A dataset that is listed and cannot be read; `reason` says why."""

    base: Storage
    reason: str

    def read(self) -> NoReturn:
        """Raise UnsupportedError."""
        raise UnsupportedError(self.reason, file=place(self.base).file.path)
