"""Files of web servers, by ranged requests (RFC 9110, 14) through fsspec's session of aiohttp.

The first request for a file asks for its beginning and tells all: its size, its ETag, and whether the server
gives parts. A HEAD would tell less, and a URL that is signed for GET refuses it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import html
import netrc
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import aiohttp
import yarl
from fsspec.implementations.http import HTTPFileSystem

from ckpttool import limits, places, urls
from ckpttool.errors import ChangedError, NotFoundError, TruncatedError, UnsupportedError
from ckpttool.places import Found, Seen
from ckpttool.remote import addresses, answers, deadlines
from ckpttool.remote.blocks import HEAD
from ckpttool.remote.copies import Copies, Room, require_few
from ckpttool.remote.stores import Remembering
from ckpttool.shown import size

_LINK = re.compile(r"<a\s[^>]*?href\s*=\s*[\"']([^\"'<>]*)[\"']", re.IGNORECASE)
_LEGAL = "%:/?#[]@!$&'()*+,;=~"  # RFC 3986, 2.2 and 2.3; other characters are quoted
_MOVED, _REDIRECTS = (301, 302, 303, 307, 308), 5
# Headers that another server gets too.
_FOR_ALL = ("accept-encoding", "range", "user-agent")
_BUSY, _PAUSES = (429, 500, 502, 503, 504), (0.2, 1.0)

Answer = TypeVar("Answer")
Take = Callable[[aiohttp.ClientResponse], Awaitable[Answer]]


class _Busy(Exception):  # noqa: N818  # asks for another try, and is no error before the last one
    """The server asks to be asked later, or let go of the connection."""


class Web:
    """A folder of a web server.

    What a person named is asked for by the very URL, what lies beside it by its name. The query and the user
    of the URL stay here: no place has them.
    """

    def __init__(self, start: str, prefix: str, query: str) -> None:
        """Ask for `start` + NAME by `prefix` + the quoted name + `query`."""
        self.exact: dict[str, str] = {}
        self.copies = Copies()
        self.store = Remembering(self, self.copies, _allowance(_origin(prefix)))
        self._start, self._prefix, self._query = start, prefix, query

    @classmethod
    def mount(cls, url: str) -> str:
        """Mount the folder of a URL; return the place of what it names."""
        url = quote(url, _LEGAL)
        address = re.split(r"[?#]", url, maxsplit=1)[0]
        query = re.split("#", url[len(address) :])[0]
        exact = address + query
        place = urls.spelled(address).rstrip("/")
        folder, _, _ = address.rstrip("/").rpartition("/")
        if folder.endswith("/"):  # a host alone
            folder, start = address.rstrip("/"), place + "/"
        else:
            start = place.rpartition("/")[0] + "/"
        server = cls(start, folder + "/", query)
        server.exact[place] = exact
        known = places.store(place)
        if isinstance(known, Remembering) and isinstance(known.server, Web):
            server.exact = {**known.server.exact, **server.exact}
        places.mount(start, server.store)
        return place

    def look(self, place: str) -> Found:
        """Return what is there by asking for its beginning; raise NotFoundError if nobody can tell."""
        return self.asked(place, {"Range": f"bytes=0-{HEAD - 1}"}, lambda answer: self._looked(place, answer))

    def names(self, place: str, most: int) -> list[str]:  # noqa: ARG002  # a page's length is its limit
        """Return the links of the folder's page that lead into the folder; none where there is no page."""
        url = self._url(place)
        try:
            address, mark, query = url.partition("?")
            page = self.asked(place, {}, answers.page, address.rstrip("/") + "/" + mark + query)
        except NotFoundError:
            return []
        links = (unquote(html.unescape(link).removeprefix("./")).rstrip("/") for link in _LINK.findall(page))
        return [name for name in dict.fromkeys(links) if not name.startswith(("?", "#"))]

    def part(self, place: str, seen: Seen, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if the server has another file there now."""
        return self.asked(
            place,
            {"Range": f"bytes={offset}-{offset + length - 1}"},
            lambda answer: self._part(place, answer, seen, offset, length),
        )

    async def _looked(self, place: str, answer: aiohttp.ClientResponse) -> Found:
        if answer.status in answers.GONE:
            return None
        if str(answer.url.path).endswith("/") and answer.status in (200, 206):
            return "folder"
        if answers.is_empty(answer):
            return Seen(0, *answers.identity(answer))
        if answer.status == 206:
            first, _, total = answers.told(place, answer)
            seen = Seen(total, *answers.identity(answer))
            data = await answers.exactly(place, answer, min(HEAD, total))
            if first:
                raise UnsupportedError("the server gives another part than was asked for", file=place)
            self.store.blocks.keep(place, seen, 0, data)
            return seen
        answers.require_ok(place, answer)
        told = answer.content_length
        if told is None:
            return await self._whole(place, answer)
        seen = Seen(told, *answers.identity(answer))
        self.store.blocks.keep(place, seen, 0, await answer.content.readexactly(min(HEAD, told)))
        return seen

    async def _part(
        self, place: str, answer: aiohttp.ClientResponse, seen: Seen, offset: int, length: int
    ) -> bytes:
        if answer.status != 200:
            return await answers.part_of(place, answer, seen, offset, length)
        told = answer.content_length
        if answers.identity(answer) != seen[1:] or told not in (None, seen.size):
            raise ChangedError("the file changed after it was listed", file=place)
        whole = self.copies.read(place, await self._whole(place, answer), offset, length)
        if whole is None or len(whole) != length:
            raise ChangedError("the file changed after it was listed", file=place)
        return whole

    async def _whole(self, place: str, answer: aiohttp.ClientResponse) -> Seen:
        """Keep a file that came as a whole because the server gives no parts."""
        told = answer.content_length
        why = "the server gives no parts of files"
        require_few(place, told or 0, why)
        deadlines.request().expect(told or limits.current().fetched_bytes)
        room, done, watch = Room(), 0, places.watch.get()
        async for piece in answer.content.iter_chunked(answers.PIECE):
            require_few(place, done + len(piece), why)
            room.put(done, piece)
            done += len(piece)
            if watch is not None:
                watch(urls.spelled(place), done, told or done)
        if told is not None and told != done:
            answers.short(place, told, done)
        seen = Seen(done, *answers.identity(answer))
        self.copies.keep(place, seen, 0, done, room)
        if done > HEAD:
            places.note(f"{why}: all {size(done)} of {urls.spelled(place)} were fetched")
        return seen

    def _url(self, place: str) -> str:
        # What was typed is quoted already where it has to be.
        return self.exact.get(place) or self._prefix + quote(place[len(self._start) :], "/%") + self._query

    def asked(
        self,
        place: str,
        headers: dict[str, str],
        take: Take[Answer],
        url: str | None = None,
        form: dict[str, str] | None = None,
        *,
        stays: bool = False,
    ) -> Answer:
        """Return what `take` makes of the answer, which is asked for again where that may help.

        With a `form` it is sent (POST); with `stays` no redirect to another origin is followed. Raise
        NotFoundError if there is none, TruncatedError if it ends too early.
        """
        request, loop = deadlines.request(), _system(public=False).loop
        for pause in (*_PAUSES, None):
            try:
                with _explained(place, last=pause is None):
                    address = yarl.URL(url or self._url(place), encoded=True)
                    return request.answer(_ask(place, address, headers, take, form, stays), loop)
            except _Busy:
                time.sleep(pause or 0)
        raise NotFoundError("the server is busy", file=place)


async def _ask(
    place: str,
    url: yarl.URL,
    headers: dict[str, str],
    take: Take[Answer],
    form: dict[str, str] | None,
    stays: bool,
) -> Answer:
    """Return what `take` makes of the answer, at the end of the server's redirects."""
    here, silence = url, limits.current().fetch_seconds
    patience = aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
    # What is compressed for the way has other bytes at other places.
    wanted = {"Accept-Encoding": "identity", **_password(url, headers), **headers}
    for _ in range(_REDIRECTS + 1):
        proxy = addresses.proxy(here)
        guarded = _is_guarded(place, here, url)
        session = await _system(public=guarded and proxy is None).set_session()
        async with session.request(
            "GET" if form is None else "POST",
            here,
            data=form,
            headers=wanted,
            proxy=proxy,
            timeout=patience,
            allow_redirects=False,
        ) as answer:
            if answer.status not in _MOVED or "Location" not in answer.headers:
                return await _taken(place, answer, take)
            before, here = here, _moved(place, here, answer.headers["Location"])
        if here.origin() != before.origin():
            if stays:
                raise UnsupportedError("the server leads elsewhere, which is not followed", file=place)
            wanted = {name: text for name, text in wanted.items() if name.lower() in _FOR_ALL}
    raise NotFoundError("the server leads in circles", file=place)


async def _taken(place: str, answer: aiohttp.ClientResponse, take: Take[Answer]) -> Answer:
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise UnsupportedError("the server sends the file compressed, whoever asks", file=place)
    if answer.status in _BUSY:
        raise _Busy(str(answer.status))
    deadlines.request().watch(answer.content)
    return await take(answer)


def _moved(place: str, here: yarl.URL, location: str) -> yarl.URL:
    """Return where a redirect leads; raise UnsupportedError where it is not followed to."""
    there = yarl.URL(quote(location, _LEGAL), encoded=True)
    if there.raw_user is not None or there.raw_password is not None:
        raise UnsupportedError(
            "the server leads to a URL with a user's name, which is not followed", file=place
        )
    found = here.join(there).with_fragment(None)
    if found.scheme not in ("http", "https") or not found.host:
        raise NotFoundError("the server, or the URL, leads to no http address", file=place)
    if here.scheme == "https" and found.scheme != "https":
        raise UnsupportedError("the server leads from https to http, which is not followed", file=place)
    if found.origin() == here.origin() and here.user is not None:
        found = found.with_user(here.user).with_password(here.password)
    return found


def _is_guarded(place: str, here: yarl.URL, named: yarl.URL) -> bool:
    """Say whether the connection may go to public addresses alone: it is not to the host that a person named.

    Raise UnsupportedError if the host is, as it is written, no public one.
    """
    if addresses.same_host(here, named):
        return False
    try:
        addresses.require_public_name(here)
    except addresses.PrivateAddressError as error:
        raise _private(place, error) from error
    return True


def _password(url: yarl.URL, headers: dict[str, str]) -> dict[str, str]:
    """Return the header with the user and password that ~/.netrc has for the host a person named.

    Not left to aiohttp, which would use netrc's default entry for any host that a server leads to.
    """
    if url.user is not None or any(name.lower() == "authorization" for name in headers):
        return {}
    try:
        found = netrc.netrc(os.environ.get("NETRC") or None).authenticators(url.host or "")
    except (OSError, netrc.NetrcParseError):
        return {}
    if found is None:
        return {}
    text = f"{found[0] or ''}:{found[2] or ''}".encode()
    return {"Authorization": f"Basic {base64.b64encode(text).decode()}"}


def _private(place: str, error: BaseException) -> UnsupportedError:
    return UnsupportedError(
        "the server leads to an address that is not public, which is not followed",
        file=place,
        found=str(error)[:120],
        hint="name the URL that it leads to yourself, if you trust it",
    )


@functools.cache
def _allowance(origin: str) -> deadlines.Allowance:  # noqa: ARG001  # one for each server
    return deadlines.Allowance()


def _origin(url: str) -> str:
    try:
        return str(yarl.URL(url, encoded=True).origin())
    except ValueError:
        return ""  # not even a server's name: the first request says so


@functools.cache
def _system(*, public: bool) -> HTTPFileSystem:
    """Return a session of this process: its connections serve all servers, and it keeps no cookies."""
    deadlines.prepare_loop()
    settings = {"auto_decompress": False}
    client = functools.partial(_client, public)
    return HTTPFileSystem(skip_instance_cache=True, get_client=client, client_kwargs=settings)


async def _client(public: bool, **settings: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(resolver=addresses.Resolver(public=public))
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=connector, **settings)


@contextlib.contextmanager
def _explained(place: str, *, last: bool) -> Iterator[None]:
    """Turn what goes wrong on the way into a sentence, or into another try where that may help."""
    try:
        yield
    except aiohttp.ClientConnectorDNSError as error:
        if isinstance(error.os_error, addresses.PrivateAddressError):
            raise _private(place, error.os_error) from error
        raise NotFoundError("the host is not known", file=place) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise NotFoundError("the server's certificate is not valid", file=place) from error
    except (ValueError, aiohttp.NonHttpUrlClientError) as error:  # yarl's, and aiohttp.InvalidURL
        raise NotFoundError("the server, or the URL, leads to no http address", file=place) from error
    except (aiohttp.ClientPayloadError, asyncio.IncompleteReadError) as error:
        raise TruncatedError("the server stopped before all bytes had come", file=place) from error
    except TimeoutError as error:
        raise deadlines.stalled(place) from error
    except (aiohttp.ClientError, OSError) as error:
        if not last and isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
            raise _Busy from error
        raise NotFoundError("the server cannot be reached", file=place, found=type(error).__name__) from error
