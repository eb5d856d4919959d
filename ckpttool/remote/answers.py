"""What a web server's answer says, judged: sizes, parts and identities that fit together, or a sentence.

Numbers of sections are those of RFC 9110.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from typing import NoReturn

import aiohttp

from ckpttool.errors import ChangedError, NotFoundError, TruncatedError, UnsupportedError
from ckpttool.places import Seen
from ckpttool.remote.stores import PERMITS_NOT, tag_of

GONE, DENIED = (404, 410), (401, 403, 407)
PAGE = 4 << 20
PIECE = 1 << 20
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_NOTHING = re.compile(r"bytes \*/0")


def is_empty(answer: aiohttp.ClientResponse) -> bool:
    """Say whether the file has no bytes at all (14.4): no part of it can be given."""
    return answer.status == 416 and _NOTHING.fullmatch(answer.headers.get("Content-Range", "")) is not None


def require_ok(place: str, answer: aiohttp.ClientResponse) -> None:
    """Raise NotFoundError with the reason unless the answer is the file as a whole."""
    if answer.status in DENIED:
        raise NotFoundError(
            f"the server {PERMITS_NOT} ({answer.status})",
            file=place,
            hint="a signed URL is good for one file and a time; it goes in quotes, with all of its query",
        )
    if answer.status != 200:
        raise NotFoundError(f"the server answers {answer.status}", file=place)


def identity(answer: aiohttp.ClientResponse) -> tuple[int, int]:
    """Return a file's time and what changes with its bytes, as far as the server tells: its ETag."""
    told, changed = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
    try:
        mtime_ns = int(parsedate_to_datetime(changed).timestamp()) * 10**9
    except (ValueError, OverflowError):
        mtime_ns = 0
    return mtime_ns, tag_of(told or changed)


def told(place: str, answer: aiohttp.ClientResponse) -> tuple[int, int, int]:
    """Return the first byte, the last and the total that a partial answer tells (RFC 9110, 14.4)."""
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        raise UnsupportedError("the server does not tell which part of the file it gives", file=place)
    first, last, total = map(int, match.groups())
    if not first <= last < total:
        raise UnsupportedError("the server tells of a part that no file has", file=place)
    return first, last, total


async def exactly(place: str, answer: aiohttp.ClientResponse, length: int) -> bytes:
    """Return the answer's bytes, which must be so many; no more are taken than one too many."""
    data = await answer.content.readexactly(length)
    if await answer.content.read(1):
        raise UnsupportedError("the server sends more than it tells", file=place)
    return data


async def part_of(place: str, answer: aiohttp.ClientResponse, seen: Seen, offset: int, length: int) -> bytes:
    """Return the part; raise ChangedError if it is of another file, UnsupportedError if it is another."""
    if answer.status in (*GONE, 412, 416):
        raise ChangedError("the file changed after it was listed, or went away", file=place)
    if answer.status == 206:
        first, last, total = told(place, answer)
        if (total, *identity(answer)) != seen:
            raise ChangedError("the file changed after it was listed", file=place)
        if (first, last) != (offset, offset + length - 1):
            raise UnsupportedError("the server gives another part than was asked for", file=place)
        return await exactly(place, answer, length)
    require_ok(place, answer)
    raise UnsupportedError("the server gives no part of the file", file=place)


async def page(answer: aiohttp.ClientResponse) -> str:
    """Return an HTML page as text, no more of it than a listing has; nothing for what is no page."""
    if answer.status != 200 or not answer.content_type.startswith("text/html"):
        return ""
    data = bytearray()
    async for piece in answer.content.iter_chunked(PIECE):
        data += piece
        if len(data) > PAGE:
            break
    return data[:PAGE].decode("utf-8", "replace")


def short(place: str, told: int, found: int) -> NoReturn:
    """Raise TruncatedError for a file that came in part."""
    raise TruncatedError(
        "the server stopped before all bytes had come", file=place, expected=f"{told:,}", found=f"{found:,}"
    )
