"""Remote servers: HTTP, the Hugging Face Hub, S3 and Google Cloud Storage."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import datetime
import functools
import html
import inspect
import ipaddress
import logging
import netrc
import os
import re
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import aiohttp
import fsspec
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.helpers import get_env_proxy_for_url
from fsspec.implementations.http import HTTPFileSystem

from ckpttool.core import deferred, filesystem, limits, remote, text, urls
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    ChangedError,
    CkpttoolError,
    DeadlineError,
    MissingExtraError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
)
from ckpttool.core.filesystem import FileStat, LocalCopyCache, ScratchFile, StoreEntry, require_fetchable
from ckpttool.core.remote import HEAD, PERMITS_NOT, CachingStore, WaitBudget, version_tag
from ckpttool.core.remote_uploads import GSUpload, S3Upload
from ckpttool.core.text import format_size

# RFC 6052, 2.1; RFC 4291, 2.5.5.1 (IPv4-compatible) and 2.5.7 (only 2000::/3 is assigned).
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_ASSIGNED = ipaddress.IPv6Network("2000::/3")
# Special addresses in the IANA registries that `is_global` misses in some versions of Python.
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
_ISATAP = (0x00005EFE, 0x02005EFE)  # RFC 5214, 6.1


class PrivateAddressError(OSError):
    """A server redirects to an address that is not public."""


def is_public(address_text: str) -> bool:
    """Return whether the address is public and embeds no non-public address."""
    try:
        address = ipaddress.ip_address(address_text.partition("%")[0])
    except ValueError:
        return False
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    embedded = all(is_public(str(inner)) for inner in _embedded_ipv4(address))
    if address in _NAT64 or address.ipv4_mapped is not None:
        return embedded
    return address in _ASSIGNED and address.is_global and embedded


def _embedded_ipv4(address: ipaddress.IPv6Address) -> Iterator[ipaddress.IPv4Address]:
    """Yield the IPv4 addresses that a gateway would extract from the address."""
    number = int(address)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif address in _NAT64 or address in _COMPATIBLE or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        yield ipaddress.IPv4Address(number & 0xFFFFFFFF)


def _normalized_host(url: yarl.URL) -> str:
    name = (url.host or "").rstrip(".").lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def require_public_name(url: yarl.URL) -> None:
    """Raise PrivateAddressError if the host itself, without any look-up, is not public.

    Where a proxy makes the connection, no more can be checked. Numbers are read like the C library
    reads them: `127.1`, `0x7f000001` and `2130706433` are one address.
    """
    host = _normalized_host(url)
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        raise PrivateAddressError(host)
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return  # a host name
    if not all(is_public(str(info[4][0])) for info in infos):
        raise PrivateAddressError(host)


class AddressResolver(AbstractResolver):
    """Resolver for the addresses of connections.

    After a host had a public address, it is never connected to at a non-public one: its name server could
    otherwise send the next connection to a private address (DNS rebinding). A server's response (a redirect,
    the next page of a listing) must not reach what only this machine can: its services, its network, a
    cloud's metadata. Addresses are checked in the look-up for the connection itself, not in a separate
    look-up.
    """

    def __init__(self, *, public: bool) -> None:
        """Allow only public addresses if `public`; otherwise any address of a host without a public one."""
        self._lookup = aiohttp.ThreadedResolver()
        self._public = public
        self._seen_public: set[str] = set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the allowed addresses; raise PrivateAddressError if there are none."""
        results = await self._lookup.resolve(host, port, family)
        name = host.rstrip(".").lower()
        public = [result for result in results if is_public(result["host"])]
        if public:
            self._seen_public.add(name)
            return public
        if self._public or name in self._seen_public:
            raise PrivateAddressError(host)
        return results

    async def close(self) -> None:
        """Do nothing: the resolver has no resources."""


_LEGAL = "%:/?#[]@!$&'()*+,;=~"  # RFC 3986, 2.2 and 2.3; other characters are quoted
_REDIRECT_STATUSES, _REDIRECTS = (301, 302, 303, 307, 308), 5
# Headers that are sent to other origins too.
_FOR_ALL = ("accept-encoding", "range", "user-agent")
_BUSY, _PAUSES = (429, 500, 502, 503, 504), (0.2, 1.0)

Answer = TypeVar("Answer")
AnswerReader = Callable[[aiohttp.ClientResponse], Awaitable[Answer]]


class _ServerBusyError(Exception):  # causes a retry, and is an error only in the last attempt
    """The server is busy or closed the connection, so the request may be repeated."""


class HttpRequest(NamedTuple):
    """A request: POST with a `form`, otherwise GET; `stays` refuses redirects to another origin.

    Nothing is decompressed and no cookie is kept. The session is that of fsspec's HTTP file system, whose own
    requests download a whole file for a part, read endless responses and follow every redirect
    (docs/decisions/0002-remote.md).
    """

    location: str
    url: str
    headers: dict[str, str]
    form: dict[str, str] | None = None
    stays: bool = False


async def fetch(request: HttpRequest, read: AnswerReader[Answer]) -> Answer:
    """Return the result of `read` for the response; retry while the server is busy.

    Raise NotFoundError if there is no response, TruncatedError if it ends too early.
    """
    for pause in (*_PAUSES, None):
        try:
            with _translate_errors(request.location, last=pause is None):
                return await _fetch_once(request, read)
        except _ServerBusyError:
            await asyncio.sleep(pause or 0)
    raise NotFoundError("the server is busy", file=request.location)


async def _fetch_once(request: HttpRequest, read: AnswerReader[Answer]) -> Answer:
    """Follow redirects and return the result of `read` for the final response."""
    named = here = yarl.URL(request.url, encoded=True)
    # Compressed transfers have other bytes at other offsets.
    headers = {"Accept-Encoding": "identity", **_netrc_header(named, request.headers), **request.headers}
    for _ in range(_REDIRECTS + 1):
        async with await _send(request, named, here, headers) as answer:
            if answer.status not in _REDIRECT_STATUSES or "Location" not in answer.headers:
                return await _read_answer(request.location, answer, read)
            target = _redirect_target(request.location, here, answer.headers["Location"])
        if target.origin() != here.origin():
            if request.stays:
                raise UnsupportedError(
                    "refused to follow a redirect to another origin", file=request.location
                )
            headers = {name: value for name, value in headers.items() if name.lower() in _FOR_ALL}
        here = target
    raise NotFoundError("too many redirects", file=request.location)


async def _send(
    request: HttpRequest, named: yarl.URL, here: yarl.URL, headers: dict[str, str]
) -> aiohttp.ClientResponse:
    """Send one request to `here`; on another host than the named URL's, only to public addresses."""
    proxy, silence = _find_proxy(here), limits.current().fetch_seconds
    same = _normalized_host(here) == _normalized_host(named)
    if not same:
        try:
            require_public_name(here)
        except PrivateAddressError as error:
            raise _private_address_error(request.location, error) from error
    system = _http_filesystem(public=not same and proxy is None, process=os.getpid())
    session: aiohttp.ClientSession = await system.set_session()
    return await session.request(
        "GET" if request.form is None else "POST",
        here,
        data=request.form,
        headers=headers,
        proxy=proxy,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence),
        allow_redirects=False,
    )


async def _read_answer(location: str, answer: aiohttp.ClientResponse, read: AnswerReader[Answer]) -> Answer:
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise UnsupportedError(
            "the server sends the file compressed despite Accept-Encoding: identity", file=location
        )
    if answer.status in _BUSY:
        raise _ServerBusyError(str(answer.status))
    remote.current_request().watch(answer.content)
    return await read(answer)


def _redirect_target(file: str, here: yarl.URL, location: str) -> yarl.URL:
    """Return the target of a redirect; raise UnsupportedError or NotFoundError if it is refused."""
    there = yarl.URL(quote(location, _LEGAL), encoded=True)
    if there.raw_user is not None or there.raw_password is not None:
        raise UnsupportedError("refused to follow a redirect to a URL with a user name", file=file)
    target = here.join(there).with_fragment(None)
    if target.scheme not in ("http", "https") or not target.host:
        raise NotFoundError("the URL, or a redirect, is not a valid http address", file=file)
    if here.scheme == "https" and target.scheme != "https":
        raise UnsupportedError("refused to follow a redirect from https to http", file=file)
    if target.origin() == here.origin() and here.user is not None:
        target = target.with_user(here.user).with_password(here.password)
    return target


def is_cross_origin(here: yarl.URL, location: str) -> bool:
    """Return whether a link or redirect leads to another origin (scheme, host and port), or nowhere."""
    try:
        return here.join(yarl.URL(location)).origin() != here.origin()
    except ValueError:
        return True


def _find_proxy(url: yarl.URL) -> yarl.URL | None:
    """Return the environment's proxy for the URL, with its user and password, or None."""
    try:
        proxy, auth = get_env_proxy_for_url(url)
    except LookupError:
        return None
    return proxy if auth is None else proxy.with_user(auth.login).with_password(auth.password)


def _netrc_header(url: yarl.URL, headers: dict[str, str]) -> dict[str, str]:
    """Return the header with the user and password in ~/.netrc for the named host.

    aiohttp would use netrc's default entry for any host that a server redirects to.
    """
    if url.user is not None or any(name.lower() == "authorization" for name in headers):
        return {}
    try:
        entry = netrc.netrc(os.environ.get("NETRC") or None).authenticators(url.host or "")
    except (OSError, netrc.NetrcParseError):
        return {}
    if entry is None:
        return {}
    credentials = f"{entry[0] or ''}:{entry[2] or ''}".encode()
    return {"Authorization": f"Basic {base64.b64encode(credentials).decode()}"}


@functools.cache
def _http_filesystem(*, public: bool, process: int) -> HTTPFileSystem:  # noqa: ARG001  # one for each
    """Return the session of this process: shared connections, no cookies."""

    async def make_client(**settings: Any) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(resolver=AddressResolver(public=public))
        return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=connector, **settings)

    settings = {"auto_decompress": False}
    return HTTPFileSystem(skip_instance_cache=True, get_client=make_client, client_kwargs=settings)


@contextlib.contextmanager
def _translate_errors(location: str, *, last: bool) -> Iterator[None]:
    """Translate connection failures into errors, or into a retry where that may help."""
    try:
        yield
    except aiohttp.ClientConnectorDNSError as error:
        if isinstance(error.os_error, PrivateAddressError):
            raise _private_address_error(location, error.os_error) from error
        hint = "check the URL and the network connection"
        raise NotFoundError("unknown host", file=location, hint=hint) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise NotFoundError("the server's certificate is not valid", file=location) from error
    except (ValueError, aiohttp.NonHttpUrlClientError) as error:  # yarl's, and aiohttp.InvalidURL
        raise NotFoundError("the URL, or a redirect, is not a valid http address", file=location) from error
    except (aiohttp.ClientPayloadError, asyncio.IncompleteReadError) as error:
        raise TruncatedError("the response ended before all bytes arrived", file=location) from error
    except TimeoutError as error:
        raise remote.deadline_error(location) from error
    except (aiohttp.ClientError, OSError) as error:
        if not last and isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
            raise _ServerBusyError from error
        raise NotFoundError("cannot reach the server", file=location, found=type(error).__name__) from error


def _private_address_error(location: str, error: BaseException) -> UnsupportedError:
    return UnsupportedError(
        "refused to follow a redirect to a non-public address",
        file=location,
        found=str(error)[:120],
        hint="if you trust it, pass the URL that it redirects to",
    )


_GONE, _DENIED = (404, 410), (401, 403, 407)
_PAGE, _PIECE = 4 << 20, 1 << 20
_RANGE = deferred.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_LINK = deferred.compile(r"<a\s[^>]*?href\s*=\s*[\"']([^\"'<>]*)[\"']", re.IGNORECASE)


def _require_ok(location: str, answer: aiohttp.ClientResponse) -> None:
    """Raise NotFoundError with the reason unless the response is the whole file."""
    if answer.status in _DENIED:
        raise NotFoundError(
            f"the server {PERMITS_NOT} ({answer.status})",
            file=location,
            hint=(
                "put a signed URL in quotes with its whole query; it is valid for one file and a limited time"
            ),
        )
    if answer.status != 200:
        raise NotFoundError(f"the server returned HTTP status {answer.status}", file=location)


def _file_stat(size: int, answer: aiohttp.ClientResponse) -> FileStat:
    """Return a file's identity: its size, its time, and a tag from its ETag (or from the time)."""
    changed = answer.headers.get("Last-Modified", "")
    try:
        mtime_ns = int(parsedate_to_datetime(changed).timestamp()) * 10**9
    except (ValueError, OverflowError):
        mtime_ns = 0
    return FileStat(size, mtime_ns, version_tag(answer.headers.get("ETag") or changed))


def _parse_range(location: str, answer: aiohttp.ClientResponse) -> tuple[int, int, int]:
    """Return the first byte, the last byte and the total of a partial response (14.4).

    Section numbers refer to RFC 9110.
    """
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        raise UnsupportedError("missing or invalid Content-Range in the server's response", file=location)
    first, last, total = map(int, match.groups())
    if not first <= last < total:
        raise UnsupportedError("impossible Content-Range in the server's response", file=location)
    return first, last, total


async def _read_exactly(location: str, answer: aiohttp.ClientResponse, length: int) -> bytes:
    """Return the response's bytes, exactly `length` of them; read at most one byte more."""
    data = await answer.content.readexactly(length)
    if await answer.content.read(1):
        raise UnsupportedError("the server sent more bytes than it announced", file=location)
    return data


async def _read_range(
    location: str, answer: aiohttp.ClientResponse, offset: int, length: int, *, same: bool
) -> bytes:
    """Return the bytes of a partial response; raise ChangedError unless it is of the `same` file."""
    first, last, _ = _parse_range(location, answer)
    if not same:
        raise ChangedError("the file changed after it was listed", file=location)
    if (first, last) != (offset, offset + length - 1):
        raise UnsupportedError("the server returned a different byte range than requested", file=location)
    return await _read_exactly(location, answer, length)


async def _read_page(answer: aiohttp.ClientResponse) -> str:
    """Return an HTML page as text, up to the length of a listing; "" for other content."""
    if answer.status != 200 or not answer.content_type.startswith("text/html"):
        return ""
    return (await _read_up_to(answer, _PAGE)).decode("utf-8", "replace")


async def _read_up_to(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the start of the response's body."""
    data = bytearray()
    async for piece in answer.content.iter_chunked(_PIECE):
        data += piece
        if len(data) >= most:
            break
    return bytes(data[:most])


class Web:
    """A folder of a web server.

    A named file is requested by exactly the given URL, files beside it by their names. The query and the user
    of the URL stay in this class and never enter a location. The first request for a file requests its first
    bytes and returns everything: its size, its ETag, and whether the server supports ranges. A HEAD request
    would return less, and a URL signed for GET rejects it.
    """

    def __init__(self, start: str, prefix: str, query: str) -> None:
        """Request `start` + NAME by `prefix` + the quoted name + `query`."""
        self.exact: dict[str, str] = {}
        self.copies = LocalCopyCache()
        self.store = CachingStore(self, self.copies, _server_budget(_origin(prefix)))
        self._start, self._prefix, self._query = start, prefix, query

    @classmethod
    def mount(cls, url: str, outer: str) -> str:  # noqa: ARG003  # for members of archives
        """Mount the folder of a URL; return the location of the file."""
        url = quote(url, _LEGAL)
        address = re.split(r"[?#]", url, maxsplit=1)[0]
        query = re.split("#", url[len(address) :])[0]
        location = urls.display_url(address).rstrip("/")
        folder, _, _ = address.rstrip("/").rpartition("/")
        if folder.endswith("/"):  # a host without a path
            folder, start = address.rstrip("/"), location + "/"
        else:
            start = location.rpartition("/")[0] + "/"
        server = cls(start, folder + "/", query)
        known = filesystem.find_store(location)
        if isinstance(known, CachingStore) and isinstance(known.server, Web):
            server.exact |= known.server.exact
        server.exact[location] = address + query
        filesystem.mount_store(start, server.store)
        return location

    async def look(self, location: str) -> StoreEntry:
        """Return the entry by requesting its first bytes; raise NotFoundError if it cannot be determined."""
        headers = {"Range": f"bytes=0-{HEAD - 1}"}
        return await fetch(
            HttpRequest(location, self._url(location), headers), functools.partial(self._read_head, location)
        )

    async def names(self, path: str, most: int) -> list[str]:  # noqa: ARG002  # a page's length is its limit
        """Return the links of the folder's page that lead into the folder; none without a page."""
        address, mark, query = self._url(path).partition("?")
        try:
            page = await fetch(HttpRequest(path, address.rstrip("/") + "/" + mark + query, {}), _read_page)
        except NotFoundError:
            return []
        links = (unquote(html.unescape(link).removeprefix("./")).rstrip("/") for link in _LINK.findall(page))
        return [name for name in dict.fromkeys(links) if not name.startswith(("?", "#"))]

    async def part(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if the server's file changed."""
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}
        read = functools.partial(self._read_part, location, stat, offset, length)
        return await fetch(HttpRequest(location, self._url(location), headers), read)

    async def _read_head(self, location: str, answer: aiohttp.ClientResponse) -> StoreEntry:
        if answer.status in _GONE:
            return None
        if str(answer.url.path).endswith("/") and answer.status in (200, 206):
            return "folder"
        if answer.status == 416 and answer.headers.get("Content-Range") == "bytes */0":
            return _file_stat(0, answer)  # 14.4: an empty file has no part
        if answer.status == 206:
            first, _, total = _parse_range(location, answer)
            data = await _read_exactly(location, answer, min(HEAD, total))
            if first:
                raise UnsupportedError(
                    "the server returned a different byte range than requested", file=location
                )
        else:
            _require_ok(location, answer)
            if answer.content_length is None:
                return await self._keep_whole(location, answer)
            total = answer.content_length
            data = await answer.content.readexactly(min(HEAD, total))
        stat = _file_stat(total, answer)
        self.store.blocks.keep(location, stat, 0, data)
        return stat

    async def _read_part(
        self, location: str, stat: FileStat, offset: int, length: int, answer: aiohttp.ClientResponse
    ) -> bytes:
        if answer.status in (*_GONE, 412, 416):
            raise ChangedError("the file changed or disappeared after it was listed", file=location)
        if answer.status == 206:
            same = _file_stat(_parse_range(location, answer)[2], answer) == stat
            return await _read_range(location, answer, offset, length, same=same)
        _require_ok(location, answer)
        size = answer.content_length
        if _file_stat(stat.size if size is None else size, answer) != stat:
            raise ChangedError("the file changed after it was listed", file=location)
        whole = self.copies.read(location, await self._keep_whole(location, answer), offset, length)
        if whole is None or len(whole) != length:
            raise ChangedError("the file changed after it was listed", file=location)
        return whole

    async def _keep_whole(self, location: str, answer: aiohttp.ClientResponse) -> FileStat:
        """Keep a file that arrived whole because the server does not support range requests."""
        size, why = answer.content_length, "the server does not support range requests"
        require_fetchable(location, size or 0, why)
        remote.current_request().expect(size or limits.current().fetched_bytes)
        copy, done, watch = ScratchFile(), 0, filesystem.watch.get()
        async for piece in answer.content.iter_chunked(_PIECE):
            require_fetchable(location, done + len(piece), why)
            copy.put(done, piece)
            done += len(piece)
            if watch is not None:
                watch(urls.display_url(location), done, size or done)
        if size is not None and size != done:
            raise TruncatedError(
                "the response ended before all bytes arrived",
                file=location,
                expected=f"{size:,}",
                found=f"{done:,}",
            )
        stat = _file_stat(done, answer)
        self.copies.keep(location, stat, 0, done, copy)
        if done > HEAD:
            filesystem.add_note(f"{why}: fetched all {format_size(done)} of {urls.display_url(location)}")
        return stat

    def _url(self, path: str) -> str:
        # A typed URL is already quoted where necessary.
        return self.exact.get(path) or self._prefix + quote(path[len(self._start) :], "/%") + self._query


@functools.cache
def _server_budget(origin: str) -> WaitBudget:  # noqa: ARG001  # one for each server
    return WaitBudget()


def _origin(url: str) -> str:
    try:
        return str(yarl.URL(url, encoded=True).origin())
    except ValueError:
        return ""  # not even a server's name: the first request reports it


# The first field that an entry has. Sources: s3fs/core.py (_info), gcsfs/core.py (_process_object),
# fsspec/implementations/memory.py (info).
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "oid", "md5Hash", "LastModified", "mtime", "created")
_TIMES = ("LastModified", "mtime", "created")
_KEPT_VERSIONS = 100_000
_CONNECT_S = 5
_STORES: dict[tuple[str, float], CachingStore] = {}


class ObjectStore:
    """A store for one of fsspec's schemes.

    An object's version in the store (an ETag, a hash, a generation) is its identity. A versioned store
    returns the bytes of exactly that version; in other stores the version is checked after every read.
    """

    # Exceptions of the libraries, which have no common base class.
    failures: tuple[type[Exception], ...] = (
        OSError,
        ValueError,
        NotImplementedError,
        RecursionError,
        aiohttp.ClientError,
    )
    # The variable that names the address of another service, and whether the service has answered.
    variable = ""
    reached = False

    def __init__(self, scheme: str) -> None:
        """Use the settings of the store's own library: its environment variables and files."""
        self.system: Any = self.open_system(scheme)

    def lose(self, error: BaseException) -> None:
        """Give up a request to a service that has never answered: libraries try again for half a minute."""
        if self.reached or not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ServerTimeoutError):
            return
        host = f"{error.host}:{error.port}" if isinstance(error, aiohttp.ClientConnectorError) else ""
        remote.current_request().failure = NotFoundError(
            "cannot reach the store",
            found=f"no connection to {host}" if host else f"no answer for {_CONNECT_S} s",
            hint=f"check the network connection, or set {self.variable} to the address of the service",
        )

    @classmethod
    def mount(cls, url: str, outer: str) -> str:  # noqa: ARG003  # for members of archives
        """Mount the folder of a URL; return the location of the file."""
        location = url.rstrip("/")
        store = cls._shared_store(location)
        parent = location.rpartition("/")[0]
        filesystem.mount_store(location + "/" if parent.endswith("/") else parent + "/", store)
        return location

    @classmethod
    def _shared_store(cls, location: str) -> CachingStore:
        """Return the store of a scheme, with shared connections that wait as long as the limit allows."""
        scheme = location.partition("://")[0]
        known = scheme, limits.current().fetch_seconds
        if known not in _STORES:
            # The libraries already look for keys here, if necessary at a cloud's metadata server.
            budget = WaitBudget()
            server = budget.run(location, 0, functools.partial(asyncio.to_thread, cls, scheme))
            _STORES[known] = CachingStore(server, allowance=budget)
        return _STORES[known]

    def open_system(self, scheme: str, **options: Any) -> Any:
        """Return the library's file system, without its cache of listings."""
        return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)

    async def look(self, location: str) -> StoreEntry:
        """Return the current entry; raise NotFoundError if it cannot be determined."""
        try:
            with self._explained(location):
                record = await self.info(location)
        except FileNotFoundError as error:
            if "specified bucket does not exist" in str(error):  # a name may contain the phrase
                raise NotFoundError("no such bucket", file=location) from error
            return None
        return "folder" if record.get("type") == "directory" else stat_from_info(record)

    async def names(self, location: str, most: int) -> list[str]:
        """Return the names in a folder; a store with pages is queried for `most` of them."""
        try:
            with self._explained(location):
                names = await self.listed(location, most)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except NotFoundError as error:
            # Many buckets allow reads but not listings, so existence is unknown.
            if PERMITS_NOT in error.message:
                return []
            raise
        return sorted({name.rstrip("/").rpartition("/")[2] for name in names})

    async def part(self, path: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if another version exists now."""
        try:
            with self._explained(path):
                data = await self.bytes_of(path, stat, offset, length)
        except FileNotFoundError as error:
            raise ChangedError("the file changed or disappeared after it was listed", file=path) from error
        if len(data) != length:
            raise TruncatedError(
                "the store returned a different number of bytes than requested",
                file=path,
                offset=offset,
                expected=f"{length:,}",
                found=f"{len(data):,}",
            )
        return data

    async def info(self, location: str) -> Mapping[str, Any]:
        """Return the library's current information; raise FileNotFoundError if there is nothing."""
        record: Mapping[str, Any] = await self.call("info", location)
        return record

    async def listed(self, location: str, most: int) -> Iterable[str]:
        """Return full names of the entries of a folder."""
        names: list[str] = await self.call("ls", location, detail=False)
        return names[:most]

    async def bytes_of(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return the store's data for the range."""
        data: bytes = await self.call("cat_file", location, start=offset, end=offset + length)
        require_same_version(location, stat, stat_from_info(await self.info(location)))
        return data

    async def remove(self, location: str) -> None:
        """Remove an object, which may be missing."""
        with contextlib.suppress(FileNotFoundError):
            await self.call("rm_file", location)

    @contextlib.contextmanager
    def explain_write(self, location: str) -> Iterator[None]:
        """Translate a library's exceptions while it writes."""
        try:
            with self._explained(location):
                yield
        except (FileNotFoundError, NotADirectoryError) as error:
            reason = "no such bucket, or another program has ended the upload"
            raise NotFoundError(reason, file=location) from error
        except NotFoundError as error:
            cause = error.__cause__
            denied = isinstance(cause, PermissionError) or "Credentials" in type(cause).__name__
            words = "the store denies write access" if denied else "cannot write to the store"
            if cause is None or isinstance(error, DeadlineError):
                raise
            raise NotFoundError(words, file=location, found=type(cause).__name__) from cause

    async def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the library, which has an underscore prefix where it is a coroutine."""
        if self.system.async_impl:
            return await getattr(self.system, f"_{name}")(*arguments, **options)
        return getattr(self.system, name)(*arguments, **options)

    def explain(self, error: Exception, location: str) -> CkpttoolError:
        """Return the error for a library's exception."""
        if isinstance(error, PermissionError):
            return NotFoundError(f"the store {PERMITS_NOT}", file=location)
        if isinstance(error, TimeoutError):
            return remote.deadline_error(location)
        if isinstance(error, aiohttp.ClientPayloadError):
            return TruncatedError("the store's response ended before all bytes arrived", file=location)
        return NotFoundError("cannot read from the store", file=location, found=type(error).__name__)

    @contextlib.contextmanager
    def _explained(self, location: str) -> Iterator[None]:
        """Translate a library's exceptions; a missing file stays FileNotFoundError."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except CkpttoolError as error:
            raise error.located(file=location) from error.__cause__
        except self.failures as error:
            raise self.explain(error, location) from error


def stat_from_info(info: Mapping[str, Any]) -> FileStat:
    """Return a file's identity from the store's information."""
    version = next((info[name] for name in _VERSIONS if info.get(name)), "")
    named = version.isoformat() if isinstance(version, datetime.datetime) else str(version)
    changed = next((info[name] for name in _TIMES if isinstance(info.get(name), datetime.datetime)), None)
    mtime_ns = 0 if changed is None else int(changed.timestamp()) * 10**9
    return FileStat(int(info.get("size") or 0), mtime_ns, version_tag(named))


def require_same_version(location: str, stat: FileStat, now: FileStat) -> None:
    """Raise ChangedError unless both versions are the same."""
    if now != stat:
        raise ChangedError("the file changed after it was listed", file=location)


class VersionedStore(ObjectStore):
    """A store that reads the bytes of the listed version.

    The listed version is read even if the file is overwritten meanwhile; no second look-up is
    needed.
    """

    # Field of `info` that contains the version.
    version_key: str

    def __init__(self, scheme: str) -> None:
        """Start without versions."""
        super().__init__(scheme)
        self._versions: OrderedDict[tuple[str, FileStat], str] = OrderedDict()

    async def info(self, location: str) -> Mapping[str, Any]:
        """Return the object's information, and remember its version."""
        record = await super().info(location)
        if record.get(self.version_key):
            self.remember(location, stat_from_info(record), str(record[self.version_key]))
        return record

    def remember(self, location: str, stat: FileStat, version: str) -> None:
        """Record the listed version."""
        self._versions[location, stat] = version
        if len(self._versions) > _KEPT_VERSIONS:
            self._versions.popitem(last=False)

    async def version(self, location: str, stat: FileStat) -> str | None:
        """Return the listed version, possibly listed by another process; None if the store has none.

        Raise ChangedError if another version exists now.
        """
        if (location, stat) not in self._versions:
            require_same_version(location, stat, stat_from_info(await self.info(location)))
        return self._versions.get((location, stat))


class GS(VersionedStore):
    """Google Cloud Storage."""

    version_key, variable = "generation", "STORAGE_EMULATOR_HOST"

    def open_system(self, scheme: str, **options: Any) -> Any:  # noqa: ARG002  # one system for both schemes
        """Return gcsfs's file system for all buckets.

        The default (`gcsfs.GCSFileSystem`) first queries another service for each bucket's kind, which
        needs credentials where a public bucket needs none (gcsfs/extended_gcsfs.py).
        """
        from gcsfs.core import GCSFileSystem
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        self.failures = (*self.failures, HttpError, GoogleAuthError)
        silence, trace = limits.current().fetch_seconds, aiohttp.TraceConfig()
        trace.on_request_redirect.append(_on_redirect)
        trace.on_request_end.append(self._on_response)
        trace.on_request_exception.append(self._on_exception)
        # gcsfs also prints the traceback of what it raises, unless its logger has a handler.
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())
        settings: dict[str, Any] = {
            "use_listings_cache": False,
            "skip_instance_cache": True,
            "version_aware": True,
            "requests_timeout": aiohttp.ClientTimeout(
                sock_connect=min(_CONNECT_S, silence), sock_read=silence
            ),
            "session_kwargs": {"trace_configs": [trace]},
        }
        # Without a token, gcsfs tries the metadata server of a cloud again after the default credentials did,
        # which takes 14 s where there is none.
        for token in ("google_default", "cache"):
            with contextlib.suppress(GoogleAuthError, ValueError):
                return GCSFileSystem(token=token, **settings)
        return GCSFileSystem(token="anon", **settings)  # noqa: S106  # the name of a method

    async def _on_response(self, _: object, __: object, event: Any) -> None:
        """Count the bytes received for the response."""
        self.reached = True
        remote.current_request().watch(event.response.content)

    async def _on_exception(self, _: object, __: object, event: Any) -> None:
        self.lose(event.exception)

    def explain(self, error: Exception, location: str) -> CkpttoolError:
        """Return the error; a Forbidden response is denied access (gcsfs/retry.py, validate_response)."""
        return super().explain(PermissionError() if str(error).startswith("Forbidden") else error, location)

    def upload(self, location: str) -> GSUpload:
        """Return a resumable upload."""
        return GSUpload(self.system, location)

    async def listed(self, location: str, most: int) -> Iterable[str]:
        """Return full names, at most the requested number."""
        names: list[str] = await self.call("ls", location, detail=False, max_results=most)
        return names

    async def bytes_of(self, path: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes of the listed generation."""
        generation = await self.version(path, stat)
        if generation is None:
            return await super().bytes_of(path, stat, offset, length)
        data: bytes = await self.call("cat_file", f"{path}#{generation}", start=offset, end=offset + length)
        return data


async def _on_redirect(_: object, __: object, event: Any) -> None:
    """Raise UnsupportedError for a redirect to another host: Google's API has none."""
    if is_cross_origin(event.url, event.response.headers.get("Location", "")):
        raise UnsupportedError("refused to follow a redirect of the store to another server")


_REGION = "x-amz-bucket-region"


class S3(VersionedStore):
    """S3 and compatible services; without keys, buckets are read anonymously."""

    version_key, variable = "ETag", "AWS_ENDPOINT_URL"
    _anonymous = False

    def open_system(self, scheme: str, **options: Any) -> Any:  # noqa: ARG002  # one system for both schemes
        """Return s3fs's file system, with the keys of the environment or anonymously."""
        from aiobotocore.config import AioConfig
        from aiobotocore.httpsession import AIOHTTPSession
        from botocore.exceptions import BotoCoreError, ClientError

        if "http_session_cls" not in inspect.signature(AioConfig).parameters:
            from ckpttool.core.installation import install_command

            raise MissingExtraError(
                "s3:// needs a newer aiobotocore",
                hint=install_command("--upgrade", "ckpttool[s3]", "aiobotocore"),
            )

        class S3HttpSession(AIOHTTPSession):  # type: ignore[misc]  # without types
            async def _get_session(self, proxy_url: str | None) -> Any:
                session = await super()._get_session(proxy_url)
                return SimpleNamespace(request=functools.partial(_send_s3, store, session))

        store, self.failures = self, (*ObjectStore.failures, BotoCoreError, ClientError)
        silence = limits.current().fetch_seconds
        settings = {
            "connect_timeout": min(_CONNECT_S, silence),
            "read_timeout": silence,
            "retries": {"max_attempts": 3},
            "http_session_cls": S3HttpSession,
        }
        public = {"anon": True} if self._anonymous else {}
        return super().open_system("s3", config_kwargs=settings, **public)

    def explain(self, error: Exception, location: str) -> CkpttoolError:
        """Return the error; recognise another version, a missing response and a redirect."""
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        response = getattr(error.__cause__, "response", None) or {}
        if response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
            return ChangedError("the file changed after it was listed", file=location)
        inner = getattr(error, "kwargs", {}).get("error")  # of a botocore.exceptions.HTTPClientError
        if isinstance(inner, UnsupportedError):
            return NotFoundError(inner.message, file=location)
        timeout = isinstance(error, ConnectTimeoutError | ReadTimeoutError)
        return super().explain(TimeoutError() if timeout else error, location)

    async def look(self, location: str) -> StoreEntry:
        """Return the current entry; the first call finds out whether there are keys."""
        from botocore.exceptions import NoCredentialsError

        try:
            return await super().look(location)
        except NotFoundError as error:
            if not isinstance(error.__cause__, NoCredentialsError):
                raise
        self._anonymous = True
        self.system = self.open_system("s3")
        return await super().look(location)

    def upload(self, location: str) -> S3Upload:
        """Return a multipart upload."""
        return S3Upload(self.system, location)

    async def listed(self, location: str, most: int) -> Iterable[str]:
        """Return full names, one page per request."""
        bucket, key, _ = self.system.split_path(location)
        prefix, names = f"{key.rstrip('/')}/" if key else "", list[str]()
        async for entry in self.system._iterdir(bucket, prefix=prefix):
            if entry["name"] != f"{bucket}/{prefix}":
                names.append(entry["name"])
            if len(names) >= most:
                break
        return names

    async def bytes_of(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes of the listed ETag, which `cat_file` of s3fs cannot request."""
        from s3fs.core import _error_wrapper

        version = await self.version(location, stat)
        if version is None:
            return await super().bytes_of(location, stat, offset, length)
        bucket, key, _ = self.system.split_path(location)
        conditions = {"Range": f"bytes={offset}-{offset + length - 1}", "IfMatch": version}

        async def read() -> bytes:
            answer = await self.system._call_s3(
                "get_object", self.system.req_kw, Bucket=bucket, Key=key, **conditions
            )
            async with answer["Body"] as body:
                data: bytes = await body.read()
            return data

        data: bytes = await _error_wrapper(read, retries=self.system.retries)
        return data


async def _send_s3(store: S3, session: Any, *arguments: Any, **options: Any) -> Any:
    """Return the response itself; received bytes of its body count as progress.

    Redirects are not followed, and botocore follows none either: where a bucket is in another
    region, it sends a new request. Raise UnsupportedError for a redirect that names no region:
    botocore would request that region, and be redirected, without end.
    """
    try:
        answer = await session.request(*arguments, allow_redirects=False, **options)
    except aiohttp.ClientError as error:
        store.lose(error)
        raise
    store.reached = True
    if answer.status in _REDIRECT_STATUSES and _REGION not in answer.headers:
        answer.release()
        raise UnsupportedError("refused to follow a redirect of the store to another server")
    remote.current_request().watch(answer.content)
    return answer


# Limit for a file returned whole: the hub may do so for files stored in git itself, which are at most 10 MB
# (https://huggingface.co/docs/hub/repositories-getting-started).
_SMALL = 16 << 20
_LARGEST = 16 << 20  # of an API response: a page has a thousand entries
_REASONS = {
    "GatedRepo": "the repository is gated, and its owner has not granted you access",
    "RepoNotFound": "no such repository, or it is private and HF_TOKEN does not grant access",
    "RevisionNotFound": "no such revision",
}
# hf://[TYPE/]USER/NAME[@REVISION][/PATH] (https://huggingface.co/docs/huggingface_hub/guides/hf_file_system).
_ADDRESS = deferred.compile(
    r"hf://(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)


class _HubPath(NamedTuple):
    """A path in a repository of the hub; `revision` is a branch, a tag or a commit."""

    kind: str
    repository: str
    revision: str
    path: str


class HF(VersionedStore):
    """The Hugging Face Hub: reads the commit that a branch named when the session began.

    The hub's own client builds the URLs and provides the token. It does not send the requests: it would
    follow a redirect, or the link to a listing's next page, to any server, and wait without limit.
    """

    def open_system(self, scheme: str, **options: Any) -> Any:  # noqa: ARG002  # the hub has one
        """Read the hub's settings and its token."""
        from huggingface_hub import constants, get_token

        # Not by the library's build_hf_headers, which first requests a list of programs from the hub.
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self._headers = {"User-Agent": "ckpttool", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._endpoint = constants.ENDPOINT.rstrip("/")
        return constants

    async def info(self, location: str) -> Mapping[str, Any]:
        """Return the file's size and blob in the commit that this session reads."""
        file = _parse_hub_url(location)
        commit = await self._commit(location, file)
        if not file.path:
            return {"type": "directory"}
        form = {"paths": file.path}
        value, _ = await self._ask(location, self._api(file, f"paths-info/{quote(commit, '')}"), form)
        entries = _require_entries(location, value)
        if not entries:
            raise FileNotFoundError(location)
        if entries[0].get("type") != "file":
            return {"type": "directory"}
        size, blob = entries[0].get("size"), entries[0].get("oid")
        if not isinstance(size, int) or not isinstance(blob, str) or size < 0:
            raise UnsupportedError(
                "the hub returned neither the size nor the version of the file", file=location
            )
        fields = {"size": size, "blob_id": blob}
        self.remember(location, stat_from_info(fields), commit)
        return fields

    async def listed(self, location: str, most: int) -> Iterable[str]:
        """Return the names, one page per request."""
        file = _parse_hub_url(location)
        where = f"tree/{quote(await self._commit(location, file), '')}"
        following: str | None = self._api(file, where + (file.path and f"/{quote(file.path, '')}"))
        rows: list[dict[str, Any]] = []
        while following is not None and len(rows) < most:
            value, following = await self._ask(location, following)
            rows += _require_entries(location, value)
        return [str(row.get("path", "")) for row in rows[:most]]

    async def bytes_of(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes of the file in a commit, requested and checked like any web server's."""
        from huggingface_hub import hf_hub_url

        file, commit = _parse_hub_url(location), await self.version(location, stat)
        url = hf_hub_url(
            file.repository, file.path, repo_type=file.kind, revision=commit, endpoint=self._endpoint
        )
        headers = {**self._headers, "Range": f"bytes={offset}-{offset + length - 1}"}
        read = functools.partial(_read_hub_part, location, stat, offset, length)
        return await fetch(HttpRequest(location, url, headers), read)

    def _api(self, file: _HubPath, rest: str) -> str:
        """Return the URL of the hub's API for a query about a repository."""
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(file.repository)
        return f"{self._endpoint}/api/{file.kind}s/{file.repository}/{rest}"

    async def _ask(self, path: str, url: str, form: dict[str, str] | None = None) -> tuple[Any, str | None]:
        """Return the hub's response for one of its URLs: JSON, and the URL of the next page."""
        if self.system.HF_HUB_OFFLINE:
            raise NotFoundError("HF_HUB_OFFLINE is set, so no request is sent to the hub", file=path)
        request = HttpRequest(path, url, self._headers, form, stays=True)
        return await fetch(request, functools.partial(_read_hub_page, path))

    async def _commit(self, location: str, file: _HubPath) -> str:
        known = filesystem.current_session().versions
        name = f"{file.kind}:{file.repository}@{file.revision}"
        if name not in known:
            # `expand` omits the rest of the repository's information: a list of all of its files.
            record, _ = await self._ask(
                location, self._api(file, f"revision/{quote(file.revision, '')}?expand=sha")
            )
            commit = record.get("sha") if isinstance(record, dict) else None
            if not isinstance(commit, str) or not commit:
                raise UnsupportedError("the hub did not return the commit of the revision", file=location)
            known[name] = commit
        return known[name]


async def _read_hub_page(location: str, answer: aiohttp.ClientResponse) -> tuple[Any, str | None]:
    """Return an API response as JSON, and the next page; raise NotFoundError with its reason."""
    # huggingface_hub/utils/_http.py, hf_raise_for_status
    reason = answer.headers.get("X-Error-Code", "")
    if reason == "EntryNotFound" or (answer.status == 404 and not reason):
        raise FileNotFoundError(location)
    if reason in _REASONS:
        raise NotFoundError(_REASONS[reason], file=location)
    _require_ok(location, answer)
    data = await _read_up_to(answer, _LARGEST + 1)
    if len(data) > _LARGEST:
        raise UnsupportedError("the hub's response is too large", file=location, found=f"{len(data):,} bytes")
    value = text.parse_json_value(data, "the hub's response")
    following = answer.links.get("next")
    if following is None:
        return value, None
    link = str(following.get("url", ""))
    if is_cross_origin(answer.url, link):
        raise UnsupportedError("refused to follow the hub's listing to another server", file=location)
    return value, link


def _require_entries(location: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise UnsupportedError("the hub's response is not a list of files", file=location)
    return value


async def _read_hub_part(
    location: str, stat: FileStat, offset: int, length: int, answer: aiohttp.ClientResponse
) -> bytes:
    if answer.status == 206:
        same = _parse_range(location, answer)[2] == stat.size
        return await _read_range(location, answer, offset, length, same=same)
    _require_ok(location, answer)
    if stat.size > _SMALL:
        raise UnsupportedError("the server does not support range requests for this file", file=location)
    return (await _read_exactly(location, answer, stat.size))[offset : offset + length]


def _parse_hub_url(location: str) -> _HubPath:
    match = _ADDRESS.fullmatch(location)
    if location.startswith("hf://buckets/"):
        raise UnsupportedError("only repositories of the hub are supported, not buckets", file=location)
    if match is None:
        raise FileNotFoundError(location)
    kind, repository, revision, path = match.groups()
    return _HubPath((kind or "models").removesuffix("s"), repository, unquote(revision or "main"), path or "")
