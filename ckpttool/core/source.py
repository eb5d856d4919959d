"""Sources of tensor bytes, and their checksums."""

from __future__ import annotations

import functools
import math
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import IO, Any, Protocol, cast

from ckpttool.core import dtypes, filesystem
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    ChangedError,
    ChecksumError,
    FormatError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
)

# tsl/lib/hash/crc32c.h: "it is problematic to compute the CRC of a string that contains embedded CRCs".
_DELTA = 0xA282EAD8
_BITS = 0xFFFFFFFF
_COPIED = 64 << 10


def crc32(data: bytes | bytearray | memoryview, running: int = 0) -> int:
    """Return the CRC-32 of `data`, continuing from the checksum `running`."""
    return (zlib.crc32 if len(data) < _COPIED else _large_crc32())(data, running)


@cache
def _large_crc32() -> Callable[[bytes | bytearray | memoryview, int], int]:
    """Return zlib-ng's function if installed, several times as fast as zlib's."""
    try:
        from zlib_ng import zlib_ng
    except ModuleNotFoundError:
        return zlib.crc32
    crc32: Callable[[bytes | bytearray | memoryview, int], int] = zlib_ng.crc32
    return crc32


def crc32c(data: bytes | bytearray | memoryview, running: int = 0) -> int:
    """Return the CRC-32C of `data`, continuing from the checksum `running`."""
    import google_crc32c

    if isinstance(data, bytes):
        buffer: Any = data
    elif len(data) < _COPIED:
        buffer = bytes(data)
    else:
        # The library rejects views, whose memory may be released during the call; it accepts arrays without a
        # copy.
        buffer = np.frombuffer(data, np.uint8)
    checksum: int = google_crc32c.extend(running, buffer)
    return checksum


def mask_crc(value: int) -> int:
    """Return the masked form of a checksum."""
    return ((value >> 15 | value << 17) + _DELTA) & _BITS


def unmask_crc(value: int) -> int:
    """Return the checksum of a masked form."""
    rotated = (value - _DELTA) & _BITS
    return (rotated >> 17 | rotated << 15) & _BITS


Buffer = bytes | bytearray | memoryview
Shape = tuple[int, ...]

LARGE = 4 << 20
_TICK_NS = 20_000_000
_PIECE = 1 << 20  # fits the last-level cache, with few enough iterations to limit GIL switches
_FETCHED = 64 << 20  # size of one request to a remote location, and of the memory that its data needs


class Source(Protocol):
    """Source of a leaf's bytes.

    `read()` of every source returns the contiguous, C-ordered, little-endian bytes of its leaf; reading is
    the only I/O, and no file stays open afterwards. Bytes with a checksum are verified when they are read.
    """

    def read(self) -> Buffer:
        """Return the leaf's contiguous little-endian bytes."""
        ...


class ArrayOp(Protocol):
    """An array operation that a Transformed source applies when it is read (see mapping.rules)."""

    def output(self, dtype: str, shape: Shape) -> tuple[str, Shape]:
        """Return the dtype and shape of the result of `apply` for such an array."""
        ...

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Return the transformed array."""
        ...


class File(NamedTuple):
    """A file's name and its identity when it was listed: size in bytes, mtime, inode, ctime.

    The ctime differs after a change whose author restored the mtime, as `rsync --inplace --times`
    does. For a remote file (filesystem.find_store) the inode is the tag that its store gives to
    these bytes, and there is no ctime.
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int = 0

    @classmethod
    def stamp(cls, path: str) -> File:
        """Return the identity of the current file; raise NotFoundError when there is none."""
        if (elsewhere := filesystem.find_store(path)) is not None:
            return cls(path, *filesystem.require_file(elsewhere, path))
        try:
            status = os.stat(path)
        except OSError as error:
            raise NotFoundError(f"cannot be opened: {error.strerror}", file=path) from error
        if _wait_for_clock_tick(status):
            status = os.stat(path)
        return cls(path, *_stat_identity(status))

    @property
    def recorded_stat(self) -> filesystem.FileStat:
        """Entry of a remote file in its store."""
        return filesystem.FileStat(*self[1:4])

    def require_unchanged(self) -> None:
        """Raise ChangedError if the file changed after it was listed; call after reading all of it."""
        if (elsewhere := filesystem.find_store(self.path)) is not None:
            if elsewhere.look(self.path) != self.recorded_stat:
                raise ChangedError("the file changed while it was read", file=self.path)
            return
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise ChangedError("the file disappeared while it was read", file=self.path) from error
        if _stat_identity(now) != self[1:]:
            raise ChangedError("the file changed while it was read", file=self.path)

    @classmethod
    def beside(cls, path: str, owner: str) -> File:
        """Return the identity of a file that the checkpoint file `owner` names or has beside it.

        Raise UnsupportedError if a link leads from it out of the owner's folder, either as that was
        named or as the owner's own links lead: the cache of Hugging Face's hub keeps all files of a
        snapshot as links into one folder of blobs. A remote file must be in the folder, whatever name
        the owner contains.
        """
        if filesystem.find_store(path) is not None:
            if os.pardir in path.split("/") or not path.startswith(os.path.dirname(owner) + "/"):
                raise UnsupportedError("refused to read a file outside the checkpoint's folder", file=path)
            return cls.stamp(path)
        real = os.path.realpath(path)
        homes = {os.path.realpath(os.path.dirname(owner) or "."), os.path.dirname(os.path.realpath(owner))}
        if not any(filesystem.is_within(real, home) for home in homes):
            raise UnsupportedError("refused to follow a link out of the checkpoint's folder", file=path)
        return cls.stamp(path)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; raise ChangedError if the file changed after it was listed."""
        if (elsewhere := filesystem.find_store(self.path)) is not None:
            self.require(offset, length)
            data = elsewhere.read(self.path, self.recorded_stat, offset, length)
            return _require_complete(data, length, self.path, offset)
        with self.opened(offset, length) as descriptor:
            return _read_exactly(descriptor, offset, length, self.path)

    def together(self, parts: Iterable[tuple[int, int]]) -> Iterator[bytes]:
        """Yield the bytes at each (offset, length), in order; remote reads are requested in parallel."""
        if (elsewhere := filesystem.find_store(self.path)) is None:
            yield from (self.read(*part) for part in parts)
            return
        requested = list(parts)
        for part in requested:
            self.require(*part)
        pieces = elsewhere.together(self.path, self.recorded_stat, requested)
        for (offset, length), data in zip(requested, pieces, strict=True):
            yield _require_complete(data, length, self.path, offset)

    def read_large(self, offset: int, length: int, whole: memoryview | None = None) -> Iterator[memoryview]:
        """Yield the bytes in pieces that fit the processor's cache; each is valid until the next.

        With a buffer for the `whole` they are read into it, and stay valid.
        """
        if filesystem.find_store(self.path) is not None:
            yield from self._fetched(offset, length, whole)
            return
        with self.opened(offset, length) as descriptor:
            # A bytearray would be filled with zeros first.
            room = np.empty(min(_PIECE, length), np.uint8).data if whole is None else whole
            for at in range(0, length, _PIECE):
                start = 0 if whole is None else at
                piece = room[start : start + min(_PIECE, length - at)]
                if filesystem.read_into(descriptor, piece, offset + at) != len(piece):
                    raise ChangedError("the file was truncated while it was read", file=self.path)
                yield piece

    def _fetched(self, offset: int, length: int, whole: memoryview | None) -> Iterator[memoryview]:
        """Yield the bytes of a remote file, like `read_large`."""
        for at in range(0, length, _FETCHED):
            data = memoryview(self.read(offset + at, min(_FETCHED, length - at)))
            if whole is not None:
                whole[at : at + len(data)] = data
                data = whole[at : at + len(data)]
            for start in range(0, len(data), _PIECE):
                yield data[start : start + _PIECE]

    def require(self, offset: int, length: int) -> None:
        """Raise TruncatedError unless the file has these bytes."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise TruncatedError(
                "the file ends before the end of its data",
                file=self.path,
                offset=offset,
                expected=f"{length:,} bytes",
                found=f"{max(0, self.size - max(0, offset)):,}",
            )

    def opened(self, offset: int, length: int) -> _OpenFile:
        """Open the file in a `with` block for reading `length` bytes from `offset`; raise like `read`.

        For a remote file these bytes, and no others, are fetched into a nameless local file.
        """
        self.require(offset, length)
        return _OpenFile(self, offset, length)


# Descriptors of the files that a block of `keep_open` has read, and how many it keeps.
_KEPT: ContextVar[dict[File, int] | None] = ContextVar("kept", default=None)
_MOST_KEPT = 32


@contextmanager
def keep_open() -> Iterator[None]:
    """Open each local file once in the block; every read compares its identity all the same.

    A block inside another one shares its files. No file that is read inside is renamed there, which Windows
    refuses while it is open.
    """
    if _KEPT.get() is not None:
        yield
        return
    kept: dict[File, int] = {}
    token = _KEPT.set(kept)
    try:
        yield
    finally:
        _KEPT.reset(token)
        while kept:
            os.close(kept.popitem()[1])


class _OpenFile:
    """The descriptor of an unchanged file in a `with` block; a function with `yield` takes twice as long."""

    __slots__ = ("_closes", "_descriptor", "_file", "_length", "_offset")

    def __init__(self, file: File, offset: int, length: int) -> None:
        self._file, self._offset, self._length = file, offset, length
        self._closes = True

    def __enter__(self) -> int:
        path, kept = self._file.path, _KEPT.get()
        if kept and (known := kept.get(self._file)) is not None:
            self._descriptor, self._closes = known, False
        elif (elsewhere := filesystem.find_store(path)) is not None:
            self._descriptor = elsewhere.local(path, self._file.recorded_stat, self._offset, self._length)
            return self._descriptor
        else:
            try:
                self._descriptor = os.open(path, os.O_RDONLY | filesystem.BINARY)
            except OSError as error:
                raise NotFoundError(f"cannot be opened: {error.strerror}", file=path) from error
        try:
            same = _stat_identity(os.fstat(self._descriptor)) == self._file[1:]
        except OSError as error:
            self.__exit__(None, error, None)
            raise
        if not same:
            self.__exit__(None, None, None)
            raise ChangedError("the file changed after it was listed", file=path)
        if kept is not None and self._closes and len(kept) < _MOST_KEPT:
            # Another thread of the block may have opened it meanwhile.
            self._closes = kept.setdefault(self._file, self._descriptor) != self._descriptor
        return self._descriptor

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._closes:
            os.close(self._descriptor)
        if isinstance(error, OSError) and filesystem.find_store(self._file.path) is None:
            message = f"cannot be read: {error.strerror}"
            raise FormatError(message, file=self._file.path, offset=self._offset) from error


def _stat_identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns


def _wait_for_clock_tick(status: os.stat_result) -> bool:
    """Wait until a change would get a new timestamp if a file was just written; return whether it was."""
    waited = False
    while filesystem.is_just_changed(status, _TICK_NS):
        time.sleep(0.001)
        waited = True
    return waited


def _require_complete(data: bytes, length: int, path: str, offset: int) -> bytes:
    """Return a store's data for a request; raise TruncatedError unless it is `length` bytes."""
    if len(data) != length:
        raise TruncatedError(
            "the response ended before all bytes arrived",
            file=path,
            offset=offset,
            expected=f"{length:,} bytes",
            found=f"{len(data):,}",
        )
    return data


def _read_exactly(descriptor: int, offset: int, length: int, path: str) -> bytes:
    data = filesystem.read_at(descriptor, length, offset)
    if len(data) == length:
        return data
    # One call returns at most 2 GiB on Linux; larger tensors arrive in pieces.
    pieces = [data]
    done = len(data)
    while done < length:
        piece = filesystem.read_at(descriptor, length - done, offset + done)
        if not piece:
            raise ChangedError("the file was truncated while it was read", file=path)
        pieces.append(piece)
        done += len(piece)
    return b"".join(pieces)


class Checksum(NamedTuple):
    """A stored checksum: `kind` is "crc32c" (TensorFlow, unmasked) or "crc32" (zip)."""

    kind: str
    value: int

    def check(self, data: Buffer, file: str, offset: int) -> None:
        """Raise ChecksumError unless `data` has this checksum."""
        self.require(self.extend(data, 0), len(data), file, offset)

    def extend(self, data: Buffer, running: int) -> int:
        """Return the checksum of `data`, continuing from the checksum `running`."""
        return crc32(data, running) if self.kind == "crc32" else crc32c(data, running)

    def require(self, found: int, nbytes: int, file: str, offset: int) -> None:
        """Raise ChecksumError unless `found`, computed over `nbytes` bytes at `offset`, is this checksum."""
        if found != self.value:
            raise ChecksumError(
                f"the {self.kind} checksum of {nbytes:,} bytes does not match: the file is damaged",
                file=file,
                offset=offset,
                expected=f"{self.value:08x}",
                found=f"{found:08x}",
            )


class Span(NamedTuple):
    """A run of bytes in a file: the simplest source."""

    file: File
    offset: int
    length: int
    checksum: Checksum | None = None

    def read(self) -> Buffer:
        """Return the bytes, verified against their checksum if there is one."""
        if self.length >= LARGE:
            return self._read_large()
        data = self.file.read(self.offset, self.length)
        if self.checksum is not None:
            self.checksum.check(data, self.file.path, self.offset)
        return data

    def _read_large(self) -> memoryview:
        # In one piece, the kernel's write and the checksum's read would both go through main memory. An
        # array, because numpy requests huge pages, which cause five hundred times fewer page faults.
        self.file.require(self.offset, self.length)  # before there is room for a size that a header states
        whole = np.empty(self.length, np.uint8).data
        for _ in self.pieces(whole):
            pass
        return whole.toreadonly()

    def pieces(self, whole: memoryview | None = None, *, verify: bool = True) -> Iterator[memoryview]:
        """Yield the bytes like `File.read_large`; the checksum is verified after the last piece."""
        checksum, running = self.checksum if verify else None, 0
        for piece in self.file.read_large(self.offset, self.length, whole):
            if checksum is not None:
                running = checksum.extend(piece, running)
            yield piece
        if checksum is not None:
            checksum.require(running, self.length, self.file.path, self.offset)

    def fill_columns(self, part: np.ndarray, first: int, row: int) -> None:
        """Fill a uint8 array [height, width] with `width` bytes, from `first` on, of each `row` bytes.

        No checksum is verified. Raise ChangedError if the file has changed.
        """
        flat, width = part.reshape(-1).data, part.shape[1]
        with self.file.opened(self.offset, self.length) as descriptor:
            for number in range(len(part)):
                slot = flat[number * width : (number + 1) * width]
                if filesystem.read_into(descriptor, slot, self.offset + number * row + first) != width:
                    raise ChangedError("the file was truncated while it was read", file=self.file.path)

    def part(self, start: int, stop: int) -> Buffer:
        """Return bytes `start` to `stop` of the span; the whole span's checksum is verified once."""
        if (start, stop) == (0, self.length):
            return self.read()
        if self.checksum is not None and self not in _VERIFIED:
            # Thousands of views may share one storage; its checksum covers all of it and is verified once.
            data = memoryview(_read_verified(self))[start:stop]
            # A small part does not keep the whole in memory.
            return data if 2 * len(data) >= self.length else bytes(data)
        return self.file.read(self.offset + start, stop - start)


# The most recent spans with verified checksums; their files are identified by more than their names.
_VERIFIED: set[Span] = set()
_MOST_VERIFIED = 1 << 16


def _read_verified(span: Span) -> Buffer:
    """Return a span's verified bytes, and remember that they were verified."""
    data = span.read()
    if len(_VERIFIED) >= _MOST_VERIFIED:
        _VERIFIED.clear()
    _VERIFIED.add(span)
    return data


class MissingShard(NamedTuple):
    """A tensor, or a part of one, whose shard is missing; `checksum` is that of its bytes, if recorded."""

    path: str
    checksum: Checksum | None = None

    @property
    def missing_path(self) -> str:
        """Path of the missing shard."""
        return self.path

    def read(self) -> bytes:
        """Raise TruncatedError."""
        folder, name = os.path.split(self.path)
        raise TruncatedError(f"shard {name} is missing", file=self.path, hint=f"copy it to {folder or '.'}")


class UnreadableSource(NamedTuple):
    """Bytes that are only listed; `reason` is why."""

    file: str | None
    reason: str
    hint: str | None = None

    def read(self) -> Buffer:
        """Raise UnsupportedError."""
        raise UnsupportedError(self.reason, file=self.file, hint=self.hint)


class Inline(NamedTuple):
    """Bytes small enough to keep in memory."""

    data: bytes

    def read(self) -> bytes:
        """Return the bytes."""
        return self.data

    def part(self, start: int, stop: int) -> Buffer:
        """Return bytes `start` to `stop`."""
        return memoryview(self.data)[start:stop]


class DeflatedSpan(NamedTuple):
    """A raw DEFLATE stream of known size (a compressed zip member); `base` is its compressed span."""

    base: Span
    length: int
    checksum: Checksum | None = None

    def read(self) -> bytes:
        """Return the decompressed bytes; raise FormatError unless there are exactly `length` of them."""
        return b"".join(map(bytes, self.pieces()))

    def streams(self) -> bool:
        """Return whether the data is so large that every reader unpacks it again, in pieces."""
        return cuts((self.length,), 1)

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the decompressed bytes; raise FormatError at the end unless they are as declared."""
        engine, size, running = zlib.decompressobj(-zlib.MAX_WBITS), 0, 0
        rest: Buffer = b""
        for packed in iter_pieces(self.base, verify=verify):
            rest = packed
            while not engine.eof:
                # One byte more than declared is enough to detect a wrong size.
                data = self._inflate(engine, rest, min(_PIECE, self.length + 1 - size))
                rest, size = engine.unconsumed_tail, size + len(data)
                if size > self.length:
                    raise self._wrong_size("more")
                if verify and self.checksum is not None:
                    running = self.checksum.extend(data, running)
                if not data and not len(rest):
                    break
                yield data
            if len(rest):
                break
        if size != self.length:
            raise self._wrong_size(f"{size:,}")
        if not engine.eof or engine.unused_data or len(rest):
            raise self._wrong("a member's compressed stream does not end at the member's end")
        if verify and self.checksum is not None:
            self.checksum.require(running, self.length, self.base.file.path, self.base.offset)

    def _inflate(self, engine: Any, packed: Buffer, most: int) -> bytes:
        try:
            return bytes(engine.decompress(packed, most))
        except zlib.error as error:
            raise self._wrong(f"a compressed member cannot be decompressed: {error}") from error

    def _wrong_size(self, description: str) -> FormatError:
        message = "a compressed member is not as long as declared"
        return self._wrong(message, expected=f"{self.length:,} bytes", found=description)

    def _wrong(self, message: str, **facts: str) -> FormatError:
        return FormatError(message, file=self.base.file.path, offset=self.base.offset, **facts)

    def part(self, start: int, stop: int) -> Buffer:
        """Return bytes `start` to `stop` of the decompressed data."""
        return memoryview(_decompress_cached(self))[start:stop]


@functools.lru_cache(maxsize=1)
def _decompress_cached(source: DeflatedSpan) -> bytes:
    # Thousands of views may share one storage, and mostly follow one another.
    return source.read()


Storage = Span | DeflatedSpan


class StoragePart(NamedTuple):
    """A run of bytes inside a storage with a larger checksummed range (an array after its header)."""

    base: Storage
    offset: int
    length: int

    def read(self) -> Buffer:
        """Return the bytes; the whole storage is read, and verified, once."""
        data = memoryview(self.base.read())[self.offset : self.offset + self.length]
        require_length(data, self.length)
        return data

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the bytes of a part of a storage in pieces, after which the whole storage is verified."""
        base, at, count = self.base, 0, 0
        if isinstance(base, Span) and (not verify or base.checksum is None):
            yield from Span(base.file, base.offset + self.offset, self.length).pieces()
            return
        for piece in base.pieces(verify=verify):
            part = piece[max(0, self.offset - at) : max(0, self.offset + self.length - at)]
            at, count = at + len(piece), count + len(part)
            if len(part):
                yield part
        if count != self.length:
            raise _length_error(self.length, count)

    def part(self, start: int, stop: int) -> Buffer:
        """Return bytes `start` to `stop` of the run."""
        return memoryview(self.read())[start:stop]


class NestedSource(NamedTuple):
    """A source inside a span with its own checksum: an archive that is a member of an archive."""

    base: Source
    cover: Span

    def read(self) -> Buffer:
        """Return the bytes, after verifying the span's checksum once for all sources inside."""
        if self.cover.checksum is not None and self.cover not in _VERIFIED:
            _read_verified(self.cover)
        return self.base.read()


@dataclass(slots=True, eq=False)
class KeptSource:
    """A source that caches its bytes for repeated reads."""

    base: Source
    _data: Buffer | None = field(default=None, repr=False)

    def __reduce__(self) -> tuple[type[KeptSource], tuple[Source]]:
        """Return the source without its bytes: another process reads them itself."""
        return KeptSource, (self.base,)

    def read(self) -> Buffer:
        """Return the base's bytes, which must not be modified."""
        if self._data is None:
            data = self.base.read()
            self._data = data if isinstance(data, bytes) else memoryview(data).toreadonly()
        return self._data


class ByteSwappedSource(NamedTuple):
    """Big-endian data: every `width` bytes of `base` are byte-swapped."""

    base: Source
    width: int

    def read(self) -> Buffer:
        """Return the bytes in little-endian order."""
        flat = np.frombuffer(self.base.read(), np.uint8).reshape(-1, self.width)[:, ::-1]
        return np.ascontiguousarray(flat).reshape(-1).data


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Return whether elements with these strides, in elements, are in C order without gaps."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


class StridedView(NamedTuple):
    """A view of a storage: `offset` and `strides` count elements of `itemsize` bytes, as torch does.

    `width` is the unit of a byte swap for storages of big-endian machines, 0 for little-endian ones.
    """

    storage: Storage | StoragePart | Inline
    itemsize: int
    shape: Shape
    strides: Shape
    offset: int
    width: int = 0

    def reach(self) -> tuple[int, int]:
        """Return the first byte and the byte after the last one that the view touches."""
        if 0 in self.shape:
            return 0, 0
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset * self.itemsize, (last + 1) * self.itemsize

    def contiguous(self) -> bool:
        """Return whether the view's elements are in C order without gaps."""
        return is_contiguous(self.shape, self.strides)

    def plain(self) -> bool:
        """Return whether the view's bytes are the storage's bytes in order."""
        return self.contiguous() and self.width <= 1

    def streams(self) -> bool:
        """Return whether the view is read in pieces: it is large, and covers a run of the storage."""
        if self.plain():
            whole = self.storage
            covered = self.reach() == (0, getattr(whole, "length", None))
            return _streamed_span(self) is not None or (covered and is_streamed(whole))
        if self.width > 1 or not cuts(self.shape, self.itemsize):
            return False
        base, _ = self._ordered()
        return base.plain() and base.streams()

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the elements in C order in pieces."""
        if self.plain():
            yield from iter_pieces(_streamed_span(self) or self.storage, verify=verify)
            return
        base, axes = self._ordered()
        element = np.dtype(f"V{self.itemsize}")
        yield from cut_array(base, base.shape, element, axes[0], lambda array: array.transpose(axes), verify)

    def _ordered(self) -> tuple[StridedView, tuple[int, ...]]:
        """Return the elements by descending strides, and the order of their axes that gives this view."""
        order = sorted(range(len(self.shape)), key=lambda axis: -self.strides[axis])
        base = self._replace(
            shape=tuple(self.shape[axis] for axis in order),
            strides=tuple(self.strides[axis] for axis in order),
        )
        return base, tuple(order.index(axis) for axis in range(len(order)))

    def read(self) -> Buffer:
        """Return the view's elements in C order, reading only the range of the storage that it spans."""
        first, stop = self.reach()
        if first < 0 or min(self.strides, default=0) < 0:
            raise FormatError("a view of a storage has a negative offset or stride")
        data = self.storage.part(first, stop)
        # A view of fewer bytes would expose the memory after them.
        require_length(data, stop - first)
        if self.plain():
            return data
        flat = np.frombuffer(data, dtype=np.uint8)
        if self.width > 1:
            flat = np.ascontiguousarray(flat.reshape(-1, self.width)[:, ::-1]).reshape(-1)
        elements = flat.view(np.dtype(f"V{self.itemsize}"))
        steps = tuple(stride * self.itemsize for stride in self.strides)
        view = np.lib.stride_tricks.as_strided(elements, self.shape, steps, writeable=False)
        return np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


class TransformedSource(NamedTuple):
    """Another source's array (of `dtype` and `shape`) after one operation."""

    base: Source
    dtype: str
    shape: Shape
    op: ArrayOp

    def read(self) -> Buffer:
        """Return the bytes of the transformed array."""
        array = as_array(self.base.read(), self.dtype, self.shape)
        dtype, _ = self.op.output(self.dtype, self.shape)
        changed = np.ascontiguousarray(self.op.apply(array), dtype=dtypes.numpy_dtype(dtype))
        return changed.reshape(-1).view(np.uint8).data

    def streams(self) -> bool:
        """Return whether the array is so large that the operation is applied to parts of it."""
        known, size = _cut_axis(self.op) is not None, dtypes.BY_NAME[self.dtype].itemsize
        return known and cuts(self.shape, size) and is_streamed(self.base)

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the bytes of the transformed array in pieces."""
        axis, kind = cast(int, _cut_axis(self.op)), dtypes.numpy_dtype(self.dtype)
        shape = self.shape if axis >= 0 else (math.prod(self.shape),)
        yield from cut_array(self.base, shape, kind, max(axis, 0), self.op.apply, verify)


_CUT = 32 << 20
"""bytes of a part of an array that is transposed"""
_SLICE = 512
"""bytes of a row from which on the rows of a part are read one by one, not by a pass over the array"""


def _cut_axis(op: ArrayOp) -> int | None:
    """Return the axis along which an operation may be applied to parts of an array; -1 for its elements."""
    axis: int | None = getattr(op, "cut_axis", None)
    return axis


def cuts(shape: Shape, itemsize: int) -> bool:
    """Return whether an array is so large that it is transposed, converted or unpacked in parts."""
    return math.prod(shape) * itemsize > 2 * _CUT


def cut_array(
    source: Source,
    shape: Shape,
    kind: np.dtype,
    axis: int,
    apply: Callable[[np.ndarray], np.ndarray],
    verify: bool,
) -> Iterator[Buffer]:
    """Yield the bytes of `apply` to parts of a source's array along an axis, one after the other.

    Unless the axis is the first, each part takes a slice of every row. What has to be unpacked or fetched is
    so once, into an unnamed temporary file.

    Args:
        source: the array's bytes, C-ordered and little-endian.
        shape: the array's shape.
        kind: the type of its elements.
        axis: the axis along which the result may be computed in parts.
        apply: a function of such a part.
        verify: let the first pass verify the source.
    """
    outer, extent = math.prod(shape[:axis]), shape[axis]
    if outer > 1 and _file_run(source) is None:
        with tempfile.TemporaryFile() as copy:
            for piece in iter_pieces(source, verify=verify):
                copy.write(piece)
            yield from cut_array(_TemporaryCopy(copy, copy.tell()), shape, kind, axis, apply, verify=False)
        return
    width = math.prod(shape[axis + 1 :]) * kind.itemsize
    rows = max(1, _CUT // max(1, outer * width))
    parts = (
        _regroup_pieces(iter_pieces(source, verify=verify), rows * width, extent * width)
        if outer == 1
        else _iter_columns(source, outer, extent * width, rows * width, verify=verify)
    )
    for part in parts:
        array = part.reshape(-1).view(kind).reshape(*shape[:axis], -1, *shape[axis + 1 :])
        buffer = np.ascontiguousarray(apply(array)).reshape(-1).view(np.uint8).data
        for at in range(0, len(buffer), _PIECE):
            yield buffer[at : at + _PIECE]


def _iter_columns(source: Source, height: int, row: int, width: int, *, verify: bool) -> Iterator[np.ndarray]:
    """Yield a matrix of bytes, its rows of `row` bytes, in parts of `width` columns."""
    run = _file_run(source)
    for start in range(0, row, width):
        part = np.empty((height, min(width, row - start)), np.uint8)
        # The first part goes with a pass over all bytes, which reports and verifies them.
        if start and isinstance(run, Span) and part.shape[1] >= _SLICE:
            run.fill_columns(part, start, row)
        else:
            _copy_columns(part, iter_pieces(source, verify=verify and not start), start, row)
        yield part


def _file_run(source: Source) -> Span | _TemporaryCopy | None:
    """Return the run of a local file that a source's bytes are; None if reading them again costs more."""
    while not isinstance(source, Span) and not hasattr(source, "streams"):
        source = cast(Any, source).base
    if isinstance(source, _TemporaryCopy):
        return source
    span = _streamed_span(source)
    return None if span is None or filesystem.find_store(span.file.path) is not None else span


class _TemporaryCopy(NamedTuple):
    """The bytes of another source in a temporary file."""

    stream: IO[bytes]
    length: int

    def read(self) -> Buffer:
        """Return the bytes."""
        return gather_bytes(self.pieces(), self.length).data

    def streams(self) -> bool:
        """Return that the bytes are read in pieces."""
        return True

    def pieces(self, *, verify: bool = False) -> Iterator[Buffer]:  # noqa: ARG002  # a copy has no checksum
        """Yield the bytes in pieces."""
        self.stream.seek(0)
        while piece := self.stream.read(_PIECE):
            yield piece


def _copy_columns(part: np.ndarray, pieces: Iterator[Buffer], first: int, row: int) -> None:
    """Copy some columns of a matrix of bytes, whose rows have `row` bytes, from the column `first` on."""
    stop, at = first + part.shape[1], 0
    for piece in pieces:
        data = np.frombuffer(piece, np.uint8)
        while len(data):
            number, inside = divmod(at, row)
            if number >= len(part):
                raise _length_error(len(part) * row, at + len(data))
            whole = len(data) // row if not inside else 0
            count = whole * row or min(row - inside, len(data))
            if whole:
                part[number : number + whole] = data[:count].reshape(whole, row)[:, first:stop]
            elif (low := max(inside, first)) < (high := min(inside + count, stop)):
                part[number, low - first : high - first] = data[low - inside : high - inside]
            data, at = data[count:], at + count
    if at != len(part) * row:
        raise _length_error(len(part) * row, at)


class PiecewiseSource(Protocol):
    """A source that yields its bytes in pieces, if its `base` does or `streams` returns that it does."""

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the bytes, each piece valid until the next; without `verify`, again after a complete pass."""
        ...


def _streamed_span(source: Source) -> Span | None:
    """Return the run of a file that a source's bytes are, if it is so large that it is read in pieces."""
    span: object = source
    whole = source.storage if isinstance(source, StridedView) else None
    if isinstance(source, StridedView) and isinstance(whole, Span):
        if whole.length < LARGE or not source.plain():
            return None
        first, stop = source.reach()
        if (first, stop) == (0, whole.length):
            span = whole
        elif (whole.checksum is None or whole in _VERIFIED) and 0 <= first <= stop <= whole.length:
            span = Span(whole.file, whole.offset + first, stop - first)
    return span if isinstance(span, Span) and span.length >= LARGE else None


def is_streamed(source: Source) -> bool:
    """Return whether `iter_pieces` yields the bytes of a source in pieces, never whole."""
    if (own := getattr(source, "streams", None)) is not None:
        return bool(own())
    if hasattr(source, "pieces") and hasattr(source, "base"):
        return is_streamed(source.base)
    return _streamed_span(source) is not None


def iter_pieces(source: Source, *, verify: bool = True) -> Iterator[Buffer]:
    """Yield a source's bytes, each piece valid until the next; large plain ones are never held whole.

    The bytes are verified only at the end of the iteration, which raises ChecksumError; without `verify`
    they are those of a streamed source whose verification is complete.
    """
    span = _streamed_span(source)
    if span is not None:
        yield from span.pieces(verify=verify)
    elif is_streamed(source):
        yield from cast(PiecewiseSource, source).pieces(verify=verify)
    else:
        yield source.read()


PIECE_ELEMENTS = 1 << 18
"""elements processed together: their float64 copies fit a cache"""


class StreamedArray:
    """The elements of a large tensor in C order, read from the file in every pass, never held whole."""

    def __init__(self, source: Source, dtype: str, shape: Shape) -> None:
        self.dtype, self.shape, self.size = dtypes.numpy_dtype(dtype), shape, math.prod(shape)
        self.ndim = len(shape)
        self._source, self._verify = source, True

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield flat arrays of PIECE_ELEMENTS elements, the last with the rest; each is valid until the next.

        Checksums are verified at the end of the first complete pass.
        """
        return self.blocks(PIECE_ELEMENTS)

    def blocks(self, elements: int) -> Iterator[np.ndarray]:
        """Yield flat arrays of that many elements, like the iteration."""
        pieces = iter_pieces(self._source, verify=self._verify)
        whole = self.size * self.dtype.itemsize
        for block in _regroup_pieces(pieces, elements * self.dtype.itemsize, whole):
            yield block.view(self.dtype)
        self._verify = False


def _regroup_pieces(pieces: Iterable[Buffer], nbytes: int, whole: int) -> Iterator[np.ndarray]:
    """Yield blocks of `nbytes` bytes, the last with the rest; each is valid until the next.

    Raise FormatError at the end unless there are `whole` bytes.
    """
    count, size, room = 0, 0, np.empty(nbytes, np.uint8)
    for data in pieces:
        piece = np.frombuffer(data, np.uint8)
        size += len(piece)
        while len(piece):
            if not count and len(piece) >= nbytes:
                yield piece[:nbytes]
                piece = piece[nbytes:]
                continue
            more = piece[: nbytes - count]
            room[count : count + len(more)] = more
            piece, count = piece[len(more) :], count + len(more)
            if count == nbytes:
                yield room
                count = 0
    if size != whole:
        raise _length_error(whole, size)
    if count:
        yield room[:count]


def as_array(data: Buffer, dtype: str, shape: Shape) -> np.ndarray:
    """Return the bytes as a numpy array of our type `dtype`, without a copy.

    Raise FormatError unless their number matches the shape.
    """
    kind = dtypes.numpy_dtype(dtype)
    require_length(data, math.prod(shape) * kind.itemsize)
    return np.frombuffer(data, dtype=kind).reshape(shape)


def require_length(data: Buffer, nbytes: int) -> None:
    """Raise FormatError unless the number of bytes matches the tensor."""
    if (length := memoryview(data).nbytes) != nbytes:
        raise _length_error(nbytes, length)


def _length_error(expected: int, length: int) -> FormatError:
    message = "a tensor's size in bytes does not match its shape"
    return FormatError(message, expected=f"{expected:,} bytes", found=f"{length:,}")


def gather_bytes(parts: Iterable[Buffer], nbytes: int) -> np.ndarray:
    """Return parts of one run of bytes in new memory: uint8 [nbytes].

    Raise FormatError unless they fill it exactly: a returned array never contains uninitialised
    memory.
    """
    whole, at = np.empty(nbytes, np.uint8), 0
    for source in parts:
        part = np.frombuffer(source, np.uint8)
        if at + len(part) > nbytes:
            require_length(source, nbytes - at)
        whole[at : at + len(part)] = part
        at += len(part)
    require_length(whole[:at].data, nbytes)
    return whole


def combine_parts(dtype: str, shape: Shape, parts: Iterable[tuple[tuple[slice, ...], Source]]) -> memoryview:
    """Return the bytes of a tensor assembled from parts, each a source with its place.

    Raise FormatError unless the parts have as many elements as the tensor. The caller ensures that
    they do not overlap. Elements outside all parts are zero.
    """
    whole, count = np.zeros(shape, dtypes.numpy_dtype(dtype)), 0
    for position, source in parts:
        # The ellipsis makes an array without axes a view, too.
        index: Any = (*position, ...)
        selected = whole[index]
        selected[...] = as_array(source.read(), dtype, selected.shape)
        count += selected.size
    if count != whole.size:
        raise FormatError(
            "the parts do not cover the whole tensor",
            expected=f"{whole.size:,} elements",
            found=f"{count:,}",
        )
    return whole.reshape(-1).view(np.uint8).data
