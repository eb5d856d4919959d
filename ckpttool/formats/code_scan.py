"""Code in a file beside what its format lists: pickles in members, in arrays of objects, behind compression.

A format judges what its own library loads. Other loaders take other parts of the same bytes: `numpy.load` the
pickle of an array of objects, `joblib.load` what a compressor packed, a program any member of an archive, and
`pickle.load` whatever stands at the start of a file. Nothing is run here, and nothing is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from ckpttool import dtypes, limits, places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError
from ckpttool.formats.pickled import owner
from ckpttool.formats.probe import HEAD
from ckpttool.limits import Limits
from ckpttool.source import File, Part, Span, Storage
from ckpttool.wire import zip as archives
from ckpttool.wire.asked import CODE, Asked, merged, standing

_DEPTH = 4  # archives and compressors inside one another
_HEAD, _PIECE = 512, 4096
_SMALL = 16 << 10
_ZIP, _NPY, _TAR = b"PK\x03\x04", b"\x93NUMPY", b"ustar"
# Storages of torch.save: raw numbers, which no loader unpickles (torch/serialization.py, _save).
_STORAGE = re.compile(r"(?:[^/]+/)?(?:data|constants)/\d+")
# joblib/numpy_pickle_compat.py: `ZF`, the unpacked length in 19 characters, then zlib.
_OLD_JOBLIB, _OLD_JOBLIB_HEADER = b"ZF0x", 21

# Formats that judge the pickle at the start of their files by themselves.
_PICKLED = frozenset(
    (
        "d3rlpy",
        "pickle",
        "pytorch",
        "pytorch_dcp",
        "pytorch_legacy",
        "pytorch_set",
        "rllib",
        "stable_baselines2",
    )
)

# A shard is archives one after another, each judged by the format, and no archive itself.
_WHOLE = frozenset(("pytorch_dcp",))

_HDF5 = "keras_h5"
# APPNOTE.TXT 4.3.16: the end of a central directory, with its comment the last of the file.
_END, _COMMENT = b"PK\x05\x06", 22 + (1 << 16)

_Engine = Callable[[], Any]


class Scanned(NamedTuple):
    """The names that act, each with the member or layer it stands in, and what could not be looked into.

    `unread` has a sentence for each part that may hold code and could not be read.
    """

    asks: tuple[Asked, ...]
    unread: tuple[str, ...]


class _Content(NamedTuple):
    """Bytes that are read from their start, as far as needed; `size` is what may be read of them.

    With a `file` they lie in it as they are, from `offset` on.
    """

    size: int
    start: Callable[[int], bytes]
    file: File | None = None
    offset: int = 0


def beside(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the code that its files hold beside what its format judged."""
    if checkpoint.format in _WHOLE:
        return checkpoint
    asks, unjudged = [], list(checkpoint.unjudged)
    known = {each.name for each in checkpoint.asks if each.verdict == CODE}
    arrays = _arrays(checkpoint)
    for file in checkpoint.files:
        found = scan(file, pickle=checkpoint.format not in _PICKLED, arrays=arrays)
        name = "" if len(checkpoint.files) == 1 else os.path.basename(file.path)
        asks += [
            each for each in (standing(found.asks, name) if name else found.asks) if each.name not in known
        ]
        unjudged += [f"{name}: {each}" if name else each for each in found.unread]
    if checkpoint.format == _HDF5 and any(_is_zip(file) for file in checkpoint.files):
        unjudged.append("a zip archive stands behind the HDF5 file, and Keras may load that")
    if not asks and not unjudged:
        return checkpoint
    return replace(checkpoint, asks=merged(checkpoint.asks, asks), unjudged=tuple(unjudged))


def _arrays(checkpoint: Checkpoint) -> frozenset[Storage]:
    """Return the storages whose header the format has read as that of an array of numbers: no pickle."""
    sources = (leaf.source for _, leaf in checkpoint.tree.tensors() if leaf.dtype in dtypes.BY_NAME)
    return frozenset(source.base for source in sources if isinstance(source, Part))


def _is_zip(file: File) -> bool:
    """Say whether Python's zipfile, which looks for an archive's end only, opens the file."""
    if places.store(file.path) is not None or _END not in _tail(file):
        return False
    import zipfile

    try:
        with zipfile.ZipFile(file.path) as archive:
            return bool(archive.namelist())
    except (ValueError, zipfile.BadZipFile):
        return False


def _tail(file: File) -> bytes:
    length = min(file.size, _COMMENT)
    return file.read(file.size - length, length)


def scan(file: File, *, pickle: bool = True, arrays: Set[Storage] = frozenset()) -> Scanned:
    """Look for code in the file; without `pickle` not in one that stands at its start, nor in `arrays`."""
    found = _Scan(arrays)
    with found.reasons("the file"):
        found.content(_within(file, 0, file.size), "", 0, pickle=pickle)
    return Scanned(tuple(found.asks), tuple(dict.fromkeys(found.unread)))


class _Scan:
    """One walk through a file; `room` is how many bytes may still be held in memory."""

    def __init__(self, arrays: Set[Storage]) -> None:
        self.arrays = arrays
        self.asks: list[Asked] = []
        self.unread: list[str] = []
        self.room = limits.current().unpacked_bytes

    @contextlib.contextmanager
    def reasons(self, where: str) -> Iterator[None]:
        """Turn what reading `where` raises into a line of `unread`; failures of the system are raised."""
        try:
            yield
        except CkpttoolError as error:
            if isinstance(error.__cause__, OSError):
                raise
            self.unread.append(f"{where}: {error.message}")
        except MemoryError:
            raise
        except Exception as error:  # Python's readers of archives raise errors of many kinds
            if isinstance(error, OSError) and error.errno is not None:
                raise
            self.unread.append(f"{where}: {str(error) or type(error).__name__}")

    def content(self, content: _Content, where: str, depth: int, *, pickle: bool = True) -> None:
        """Look at bytes as a pickle, and as whatever may hold one."""
        head = content.start(_HEAD)
        if pickle:
            self._pickle(head, content, where)
        if head.startswith(_NPY):
            self._array(head, content, where)
        elif head.startswith(_ZIP) or head[257:262] == _TAR or _engine(head) is not None:
            if depth >= _DEPTH:
                self.unread.append(f"{where}: archives are nested too deeply")
                return
            with self.reasons(where or "the file"):
                self._archive(head, content, where, depth + 1)

    def _pickle(self, head: bytes, content: _Content, where: str) -> None:
        marked = head.startswith(b"\x80")
        if not marked and not owner.may_begin(head, content.size):
            return
        # What begins as a pickle is one: a whole small one takes a single run.
        if marked and content.size <= _SMALL:
            acting = _acting(content.start(content.size), limits.current())
        else:
            found, data = owner.grown(content.start, content.size, _SMALL if marked else HEAD)
            if not marked and not owner.is_pickle(found, data, content.size):
                return
            acting = _only_code(found.asked)
        self.asks += standing(acting, where) if where else acting

    def _array(self, head: bytes, content: _Content, where: str) -> None:
        """Look at the pickle behind the header of an array of objects (numpy/lib/_format_impl.py)."""
        layout, at = ("<H", 10) if head[6:7] == b"\1" else ("<I", 12)
        if len(head) < at:
            return
        stop = at + int(struct.unpack_from(layout, head, 8)[0])
        if stop > limits.current().array_header_bytes:
            self.unread.append(f"{where or 'the file'}: an array's header is too long")
        elif b"O" in content.start(stop)[at:]:
            rest = _after(content, stop)
            self._pickle(rest.start(_HEAD), rest, where)

    def _archive(self, head: bytes, content: _Content, where: str, depth: int) -> None:
        engine = _engine(head)
        if engine is not None:
            self._packed(engine, content, where, depth)
        elif not head.startswith(_ZIP):
            self._tar(content, where, depth)
        elif content.file is not None:
            self._zip(archives.read(content.file, content.offset, content.size), where, depth)
        else:
            self._held_zip(content, where, depth)

    def _zip(self, archive: archives.Archive, where: str, depth: int) -> None:
        torch = any(name.endswith("/data.pkl") for name in archive.members)
        for name in archive.members:
            if name.endswith("/") or (torch and _STORAGE.fullmatch(name)):
                continue
            source = archive.source(name)
            if source in self.arrays:
                continue
            at = _inside(where, name)
            with self.reasons(at):
                self.content(_stored(source), at, depth)

    def _held_zip(self, content: _Content, where: str, depth: int) -> None:
        import zipfile

        with zipfile.ZipFile(io.BytesIO(self._all(content))) as archive:
            for info in archive.infolist():
                at = _inside(where, info.filename)
                with self.reasons(at), archive.open(info) as stream:
                    self._part(_Content(info.file_size, _start_of(stream)), at, depth)

    def _tar(self, content: _Content, where: str, depth: int) -> None:
        import tarfile

        with self._stream(content) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            for info in archive:
                held = archive.extractfile(info) if info.isreg() else None
                if held is not None:
                    self._part(_Content(info.size, _start_of(held)), _inside(where, info.name), depth)

    def _part(self, content: _Content, where: str, depth: int) -> None:
        with self.reasons(where):
            self.content(content, where, depth)

    def _packed(self, engine: _Engine, content: _Content, where: str, depth: int) -> None:
        if content.start(len(_OLD_JOBLIB)) == _OLD_JOBLIB:
            content = _after(content, _OLD_JOBLIB_HEADER)
        inner = _Content(self.room, lambda length: _unpacked(engine, content, length))
        self.content(inner, f"{where} (unpacked)".lstrip(), depth)

    def _stream(self, content: _Content) -> Any:
        if content.file is not None and not content.offset and places.store(content.file.path) is None:
            return open(content.file.path, "rb")
        return io.BytesIO(self._all(content))

    def _all(self, content: _Content) -> bytes:
        data = content.start(min(content.size, self.room + 1))
        if len(data) > self.room:
            raise limits.exceeded("unpacked_bytes", "it unpacks to too much", None)
        self.room -= len(data)
        return data


@lru_cache(maxsize=8)
def _acting(pickle: bytes, _: Limits) -> tuple[Asked, ...]:
    """Return the names in a pickle that act. Checkpoints of one run often have the same small pickle."""
    # Not at the top: most files that are looked into are no pickles.
    from ckpttool.wire.pickle_reader import scan

    return _only_code(scan(pickle).asked)


def _only_code(asked: Iterable[Asked]) -> tuple[Asked, ...]:
    return tuple(each for each in asked if each.verdict == CODE)


def _inside(where: str, name: str) -> str:
    return f"{where}/{name}" if where else name


def _within(file: File, offset: int, size: int) -> _Content:
    return _Content(size, lambda length: file.read(offset, min(length, size)), file, offset)


def _after(content: _Content, at: int) -> _Content:
    return _Content(max(0, content.size - at), lambda length: content.start(at + length)[at:])


def _stored(source: Storage) -> _Content:
    if isinstance(source, Span):
        return _within(source.file, source.offset, source.length)
    packed = _within(source.base.file, source.base.offset, source.base.length)
    bare: _Engine = lambda: zlib.decompressobj(-zlib.MAX_WBITS)  # noqa: E731
    return _Content(source.length, lambda length: _unpacked(bare, packed, min(length, source.length)))


def _start_of(stream: Any) -> Callable[[int], bytes]:
    def start(length: int) -> bytes:
        stream.seek(0)
        return bytes(stream.read(length))

    return start


def _engine(head: bytes) -> _Engine | None:
    """Return what unpacks bytes that begin so: those of gzip, bz2, lzma, zlib and old joblib."""
    if head.startswith(b"\x1f\x8b"):
        return lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)
    if head.startswith(b"BZh"):
        import bz2

        return bz2.BZ2Decompressor
    if head.startswith((b"\xfd7zXZ\0", b"\x5d\0\0")):
        import lzma

        return lzma.LZMADecompressor
    # RFC 1950: method 8 with a window, and the two bytes together a multiple of 31.
    bare = len(head) > 2 and head[0] & 0x8F == 0x08 and int.from_bytes(head[:2]) % 31 == 0
    return zlib.decompressobj if bare or head.startswith(_OLD_JOBLIB) else None


def _unpacked(make: _Engine, content: _Content, length: int) -> bytes:
    """Return the first `length` bytes of what is packed; of damaged bytes what comes before the damage."""
    window = 4 * _PIECE
    while True:
        packed = content.start(window)
        made = _made(make, packed, length)
        if len(made) >= length or len(packed) >= content.size or len(packed) < window:
            return made
        window *= 8


def _made(make: _Engine, packed: bytes, length: int) -> bytes:
    made, engine, at = bytearray(), make(), 0
    while at < len(packed) and len(made) < length:
        piece = packed[at : at + _PIECE]
        try:
            made += engine.decompress(piece, length - len(made))
        except Exception:  # noqa: BLE001  # three libraries, each with errors of its own: what came before counts
            break
        at += len(piece)
        if engine.eof:
            # Several packed streams, one after another, are one to the readers of gzip, bz2 and xz.
            at -= len(engine.unused_data)
            engine = make()
    return bytes(made)
