"""Tar archives as bytes: where every plain file lies; whatever is no plain file is refused.

The standard library's reader takes longer to import than a checkpoint takes to list, and it takes the last of
two members of one name where others take the first. Layouts follow POSIX.1-2017, pax, "ustar Interchange
Format" and "pax Header Block"; GNU's sizes in base 256 are those of GNU tar's manual, "Extensions".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from ckpttool import limits
from ckpttool.errors import FormatError, TruncatedError, UnsupportedError
from ckpttool.source import File, Span

BLOCK = 512
# Name, size, checksum, type, what it links to, magic, what stands before the name; modes, owners, times and
# devices are passed over.
_HEADER = struct.Struct("100s24x12s12x8sc100s6s82x155s12x")
_CHECKSUM = slice(148, 156)
_MAGIC = b"ustar"
_PLAIN, _PAX = (b"0", b"\0"), b"x"
_PIECE = 1 << 20


class _Header(NamedTuple):
    name: str
    size: int
    kind: bytes


def is_start(head: bytes) -> bool:
    """Say whether the bytes begin like a tar archive."""
    return len(head) >= BLOCK and _HEADER.unpack_from(head)[5].startswith(_MAGIC)


def is_header(block: bytes) -> bool:
    """Say whether Python's tarfile takes the bytes for a member's header: their checksum alone decides."""
    if len(block) < BLOCK:
        return False
    field = block[148:156]
    if field[0] in (0o200, 0o377):
        said = int.from_bytes(field[1:], "big") - (1 << 56 if field[0] == 0o377 else 0)
    else:
        text = field.partition(b"\0")[0].strip()
        if text.strip(b"01234567"):
            return False
        said = int(text or b"0", 8)
    rest = block[:148] + block[156:BLOCK]
    unsigned = 256 + sum(rest)
    return said in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest))


def first(file: File) -> str | None:
    """Return the name of the archive's first member, None when there is none."""
    return next((name for name, _ in _listed(file)), None)


def members(file: File) -> Mapping[str, Span]:
    """Return the archive's files by name; raise FormatError unless all are plain files of different names."""
    found: dict[str, Span] = {}
    for name, span in _listed(file):
        if name in found:
            raise FormatError(f"two members are called {name!r}", file=file.path, offset=span.offset)
        found[name] = span
    return found


def _listed(file: File) -> Iterator[tuple[str, Span]]:
    at, longer = 0, None
    while (block := _block(file, at)) != bytes(BLOCK):
        header = _header(file, block, at)
        at += BLOCK
        size = header.size if longer is None or header.kind == _PAX else longer
        span = Span(file, at, size)
        at += -(-size // BLOCK) * BLOCK
        if at > file.size:
            raise TruncatedError(f"member {header.name!r} is cut off", file=file.path, offset=span.offset)
        if header.kind == _PAX:
            longer = _pax_size(span)
        else:
            yield header.name, span
            longer = None
    if _block(file, at + BLOCK) != bytes(BLOCK) or file.size % BLOCK:
        raise TruncatedError("the archive does not end with empty blocks", file=file.path, offset=file.size)
    for place in range(at, file.size, _PIECE):
        if file.read(place, min(_PIECE, file.size - place)).strip(b"\0"):
            _fail(file, "bytes follow the archive's end", place)


def _block(file: File, at: int) -> bytes:
    if at + BLOCK > file.size:
        raise TruncatedError("the archive's end is missing", file=file.path, offset=file.size)
    return file.read(at, BLOCK)


def _header(file: File, block: bytes, at: int) -> _Header:
    name, size, checksum, kind, _, magic, before = _HEADER.unpack(block)
    bare = block[: _CHECKSUM.start] + b" " * 8 + block[_CHECKSUM.stop :]
    if not magic.startswith(_MAGIC) or _number(checksum, file, at) != sum(bare):
        _fail(file, "a header of the archive is damaged", at)
    text = _text(name)
    if kind not in (*_PLAIN, _PAX):
        raise UnsupportedError(
            f"member {text!r} is no plain file (type {kind.decode('latin-1')!r})", file=file.path, offset=at
        )
    if any(before):
        # GNU tar's own headers keep times there, which the library that torch used leaves empty.
        raise UnsupportedError(f"member {text!r} has a prefix to its name", file=file.path, offset=at)
    return _Header(text, _number(size, file, at), kind)


def _number(field: bytes, file: File, at: int) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.rstrip(b"\0 ").lstrip(b" ")
    if not digits or digits.strip(b"01234567"):
        _fail(file, "a number in the archive's header is not octal", at)
    return int(digits, 8)


def _pax_size(span: Span) -> int | None:
    """Return the size in bytes that a pax header gives the next member; times and owners are passed over.

    Raise FormatError when records and lengths contradict each other, UnsupportedError for what would make
    the member another one than its header says.
    """
    if span.length > limits.current().text_bytes:
        what, file, at = "a pax header is too long", span.file.path, span.offset
        raise limits.exceeded("text_bytes", what, span.length, file=file, offset=at)
    data, size = bytes(span.read()), None
    while data:
        length, _, rest = data.partition(b" ")
        if not length.isdigit() or len(length) > 7 or data[int(length) - 1 : int(length)] != b"\n":
            _fail(span.file, "a pax header is damaged", span.offset)
        keyword, _, value = rest[: int(length) - len(length) - 2].partition(b"=")
        if keyword in (b"path", b"linkpath") or keyword.startswith(b"GNU.sparse"):
            what = f"a pax header changes the {keyword.decode('latin-1')!r} of a member"
            raise UnsupportedError(what, file=span.file.path, offset=span.offset)
        if keyword == b"size":
            if not value.isdigit() or len(value) > 19:
                _fail(span.file, "a pax header's size is no number", span.offset)
            size = int(value)
        data = data[int(length) :]
    return size


def _text(name: bytes) -> str:
    return name.partition(b"\0")[0].decode("utf-8", "replace")


def _fail(file: File, message: str, offset: int) -> NoReturn:
    raise FormatError(message, file=file.path, offset=offset)
