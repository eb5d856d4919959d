"""Members of tar archives, as torch.load reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, cast

from ckpttool.core.errors import FormatError, TruncatedError, UnsupportedError
from ckpttool.core.source import File, Span
from ckpttool.encodings.archives import BLOCK, FileStream

if TYPE_CHECKING:
    import tarfile


_PLAIN = (b"0", b"\0")
_PIECE = 1 << 20
# Records of a pax header (POSIX.1-2017, "pax Header Block") that change what a member is.
_CHANGING = ("path", "linkpath", "GNU.sparse")


def is_tar_start(head: bytes) -> bool:
    """Return whether the bytes begin like a tar archive."""
    return len(head) >= BLOCK and head[257:262] == b"ustar"


def first_tar_member(file: File) -> str | None:
    """Return the name of the archive's first member, None when there is none."""
    return next((name for name, _ in _iter_tar_members(file)), None)


def read_tar(file: File) -> Mapping[str, Span]:
    """Return the files of an archive by name; raise FormatError unless all are plain and unique.

    The standard library finds them, as for torch.load; but of two members with one name it uses the last,
    and it takes a damaged header for the end of the archive.
    """
    members: dict[str, Span] = {}
    for name, span in _iter_tar_members(file):
        if name in members:
            raise FormatError(f"two members are named {name!r}", file=file.path, offset=span.offset)
        members[name] = span
    return members


def _iter_tar_members(file: File) -> Iterator[tuple[str, Span]]:
    import tarfile

    try:
        with tarfile.open(fileobj=cast(IO[bytes], FileStream(file)), mode="r:", errors="replace") as archive:
            for member in archive:
                if archive.offset > file.size or member.size < 0:
                    what = f"member {member.name!r} is truncated"
                    raise TruncatedError(what, file=file.path, offset=member.offset_data)
                _require_plain_member(file, member)
                yield member.name, Span(file, member.offset_data, member.size)
            end = archive.offset
    except (tarfile.TarError, ValueError) as error:
        raise FormatError("the archive is damaged", file=file.path, found=str(error)[:120]) from error
    for position in range(end, file.size, _PIECE):
        if file.read(position, min(_PIECE, file.size - position)).strip(b"\0"):
            what = "a header is damaged, or extra bytes follow the end of the archive"
            raise FormatError(what, file=file.path, offset=position)
    if file.size < end + 2 * BLOCK or file.size % BLOCK:
        raise TruncatedError("the archive does not end with empty blocks", file=file.path, offset=file.size)


def _require_plain_member(file: File, member: tarfile.TarInfo) -> None:
    """Raise unless the member is a plain file, and its pax header valid and about times and owners only."""
    headers = member.pax_headers
    changed = next((name for name in headers if name.startswith(_CHANGING)), None)
    if changed is not None:
        what = f"a pax header changes the {changed!r} of a member"
        raise UnsupportedError(what, file=file.path, offset=member.offset)
    if member.type not in _PLAIN:
        what = f"member {member.name!r} is not a regular file (type {member.type.decode('latin-1')!r})"
        raise UnsupportedError(what, file=file.path, offset=member.offset)
    # Some versions of the library leave out the rest of a header from the first record that is damaged.
    extended = member.offset_data - member.offset > BLOCK
    if (extended and not headers) or not all(map(str.isprintable, headers.values())):
        raise FormatError("a pax header is damaged", file=file.path, offset=member.offset)
