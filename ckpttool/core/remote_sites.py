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
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote, unquote

import aiohttp
import fsspec
import yarl
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.helpers import get_env_proxy_for_url
from fsspec.implementations.http import HTTPFileSystem

from ckpttool.core import filesystem, limits, remote, text, urls
from ckpttool.core.errors import (
    ChangedError,
    CkpttoolError,
    MissingExtraError,
    NotFoundError,
    TruncatedError,
    UnsupportedError,
)
from ckpttool.core.filesystem import (
    FileStat,
    LocalCopyCache,
    ScratchFile,
    StoreEntry,
    require_fetchable,
)
from ckpttool.core.remote import (
    HEAD,
    PERMITS_NOT,
    CachingStore,
    version_tag,
)
from ckpttool.core.text import format_size

# Which addresses a server may send a reader to: its own host, and the public internet.
#
# The host that a person names may lie anywhere. What a server answers (a redirect, the next page of a
# listing) must not reach what only this machine can: services on it, its network, a cloud's metadata. The
# addresses of a name are judged where they are looked up for a connection, not in a look-up of their own.

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# RFC 6052, 2.1; RFC 4291, 2.5.5.1 (IPv4-compatible) and 2.5.7 (only 2000::/3 is given out).
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_GIVEN_OUT = ipaddress.IPv6Network("2000::/3")
# Of the IANA registries of special addresses, what Python's `is_global` does not know in every version.
_SPECIAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20")))
_ISATAP = (0x00005EFE, 0x02005EFE)  # RFC 5214, 6.1
_NUMERIC = socket.AI_NUMERICHOST


class PrivateAddressError(OSError):
    """A server leads to an address that is not public."""


def is_public(text: str) -> bool:
    """Say whether the address is one of the public internet, and embeds no other that is not."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    inner = list(_embedded_ipv4(address))
    if address in _NAT64 or address.ipv4_mapped is not None:
        return all(is_public(str(each)) for each in inner)
    return address in _GIVEN_OUT and address.is_global and all(is_public(str(each)) for each in inner)


def _embedded_ipv4(address: ipaddress.IPv6Address) -> Iterator[Address]:
    """Give the IPv4 addresses that a gateway would take out of the address."""
    number = int(address)
    last = ipaddress.IPv4Address(number & 0xFFFFFFFF)
    if address.ipv4_mapped is not None:
        yield address.ipv4_mapped
    elif address.sixtofour is not None:
        yield address.sixtofour
    elif address.teredo is not None:
        yield from address.teredo
    elif address in _NAT64 or address in _COMPATIBLE or (number >> 32) & 0xFFFFFFFF in _ISATAP:
        yield last


def same_host(one: yarl.URL, other: yarl.URL) -> bool:
    """Say whether both URLs name one host, by the same name or the same address."""
    return _normalized_host(one) == _normalized_host(other)


def is_cross_origin(here: yarl.URL, location: str) -> bool:
    """Say whether a link or redirect leads to another origin (scheme, host and port), or nowhere."""
    try:
        return here.join(yarl.URL(location)).origin() != here.origin()
    except ValueError:
        return True


def _normalized_host(url: yarl.URL) -> str:
    name = (url.host or "").rstrip(".").lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return name


def require_public_name(url: yarl.URL) -> None:
    """Raise PrivateAddressError if the host itself, without any look-up, is no public one.

    All that can be judged where a proxy makes the connection. Numbers are read as the C library reads them:
    `127.1`, `0x7f000001` and `2130706433` are one address.
    """
    host = _normalized_host(url)
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        raise PrivateAddressError(host)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=_NUMERIC)
    except (OSError, UnicodeError):
        return  # a name
    if not all(is_public(str(each[4][0])) for each in found):
        raise PrivateAddressError(host)


def find_proxy(url: yarl.URL) -> yarl.URL | None:
    """Return the proxy that the environment names for the URL, with its user and password; else None."""
    try:
        found, auth = get_env_proxy_for_url(url)
    except LookupError:
        return None
    return found if auth is None else found.with_user(auth.login).with_password(auth.password)


class AddressResolver(AbstractResolver):
    """Looks up the addresses that connections are made to.

    A host that has a public address has no other for us, from then on: whoever answers for the name could
    otherwise send the next connection to a private one (DNS rebinding).
    """

    def __init__(self, *, public: bool) -> None:
        """Let connections go to public addresses alone if `public`; else to what a person's host is."""
        self._public = public
        self._seen_public: set[str] = set()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses that may be connected to; raise PrivateAddressError if there are none."""
        found = await _look_up(host, port, family)
        name = host.rstrip(".").lower()
        public = [each for each in found if is_public(each["host"])]
        if public:
            self._seen_public.add(name)
            return public
        if self._public or name in self._seen_public:
            raise PrivateAddressError(host)
        return found

    async def close(self) -> None:
        """Hold nothing."""


async def _look_up(host: str, port: int, family: socket.AddressFamily) -> list[ResolveResult]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
    )
    return [
        ResolveResult(
            hostname=host,
            host=_address_text(address),
            port=port,
            family=kind,
            proto=proto,
            flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
        )
        for kind, _, proto, _, address in found
        if kind in (socket.AF_INET, socket.AF_INET6) and isinstance(address[0], str)
    ]


def _address_text(address: tuple[object, ...]) -> str:
    """Return a looked up address as text, an IPv6 one with its zone."""
    text = str(address[0])
    return f"{text}%{address[3]}" if len(address) == 4 and address[3] and "%" not in text else text


# What a web server's answer says, judged: sizes, parts and identities that fit together, or a sentence.
#
# Numbers of sections are those of RFC 9110.

GONE, DENIED = (404, 410), (401, 403, 407)
PAGE = 4 << 20
PIECE = 1 << 20
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_NOTHING = re.compile(r"bytes \*/0")


def is_empty_file(answer: aiohttp.ClientResponse) -> bool:
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


def file_identity(answer: aiohttp.ClientResponse) -> tuple[int, int]:
    """Return a file's time and what changes with its bytes, as far as the server tells: its ETag."""
    told, changed = answer.headers.get("ETag", ""), answer.headers.get("Last-Modified", "")
    try:
        mtime_ns = int(parsedate_to_datetime(changed).timestamp()) * 10**9
    except (ValueError, OverflowError):
        mtime_ns = 0
    return mtime_ns, version_tag(told or changed)


def parse_content_range(place: str, answer: aiohttp.ClientResponse) -> tuple[int, int, int]:
    """Return the first byte, the last and the total that a partial answer tells (RFC 9110, 14.4)."""
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        raise UnsupportedError("the server does not tell which part of the file it gives", file=place)
    first, last, total = map(int, match.groups())
    if not first <= last < total:
        raise UnsupportedError("the server tells of a part that no file has", file=place)
    return first, last, total


async def read_exactly(place: str, answer: aiohttp.ClientResponse, length: int) -> bytes:
    """Return the answer's bytes, which must be so many; no more are taken than one too many."""
    data = await answer.content.readexactly(length)
    if await answer.content.read(1):
        raise UnsupportedError("the server sends more than it tells", file=place)
    return data


async def read_part(
    place: str, answer: aiohttp.ClientResponse, seen: FileStat, offset: int, length: int
) -> bytes:
    """Return the part; raise ChangedError if it is of another file, UnsupportedError if it is another."""
    if answer.status in (*GONE, 412, 416):
        raise ChangedError("the file changed after it was listed, or went away", file=place)
    if answer.status == 206:
        first, last, total = parse_content_range(place, answer)
        if (total, *file_identity(answer)) != seen:
            raise ChangedError("the file changed after it was listed", file=place)
        if (first, last) != (offset, offset + length - 1):
            raise UnsupportedError("the server gives another part than was asked for", file=place)
        return await read_exactly(place, answer, length)
    require_ok(place, answer)
    raise UnsupportedError("the server gives no part of the file", file=place)


async def read_page(answer: aiohttp.ClientResponse) -> str:
    """Return an HTML page as text, no more of it than a listing has; nothing for what is no page."""
    if answer.status != 200 or not answer.content_type.startswith("text/html"):
        return ""
    data = bytearray()
    async for piece in answer.content.iter_chunked(PIECE):
        data += piece
        if len(data) > PAGE:
            break
    return data[:PAGE].decode("utf-8", "replace")


def raise_truncated(place: str, told: int, found: int) -> NoReturn:
    """Raise TruncatedError for a file that came in part."""
    raise TruncatedError(
        "the server stopped before all bytes had come", file=place, expected=f"{told:,}", found=f"{found:,}"
    )


# Object stores and other file systems of fsspec, read by ranges.
#
# What a store gives as a version of an object (an ETag, a hash, a generation) is its identity. S3
# (ckpttool.core.remote_sites) is asked for bytes of just that version, as are the stores of
# ckpttool.core.remote_sites; another is looked up again after every read.

# The first that an entry has. Sources: s3fs/core.py (_info), gcsfs/core.py (_process_object),
# huggingface_hub/hf_file_system.py (info), fsspec/implementations/memory.py (info).
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "oid", "md5Hash", "LastModified", "mtime", "created")
_TIMES = ("LastModified", "mtime", "created")
_ANY: tuple[type[Exception], ...] = (OSError, ValueError, NotImplementedError, RecursionError)


class ObjectStore:
    """A store that fsspec knows by its scheme."""

    def __init__(self, scheme: str) -> None:
        """Use the settings of the store's own library: its environment variables and files."""
        remote.prepare_loop()
        self.scheme = scheme
        self.system: Any = self.started()
        self._failures = (*_ANY, *self.failures())

    def started(self) -> Any:
        """Return the library's own file system."""
        return open_filesystem(self.scheme)

    def failures(self) -> tuple[type[Exception], ...]:
        """Return what the library raises besides OSError: these have no common base."""
        return ()

    @classmethod
    def mount(cls, url: str, outer: str) -> str:  # noqa: ARG003  # for members of archives
        """Mount the folder of a URL; return the place of what it names."""
        place = url.rstrip("/")
        scheme = place.partition("://")[0]
        store = _shared_store(cls, scheme, place)
        parent = place.rpartition("/")[0]
        filesystem.mount_store(place + "/" if parent.endswith("/") else parent + "/", store)
        return place

    def look(self, place: str) -> StoreEntry:
        """Return what is there now; raise NotFoundError if nobody can tell."""
        try:
            with self._explained(place):
                found = self.info(place)
        except FileNotFoundError as error:
            if "specified bucket does not exist" in str(error):  # a name may have the word
                raise NotFoundError("there is no such bucket", file=place) from error
            return None
        return "folder" if found.get("type") == "directory" else stat_from_info(found)

    def meant(self, error: Exception) -> type[Exception] | str | None:  # noqa: ARG002  # of no known library
        """Return what an error of the library means: one of Python's, a sentence, or None."""
        return None

    def info(self, place: str) -> Mapping[str, Any]:
        """Return what the library tells of a place now; raise FileNotFoundError if there is nothing."""
        found: Mapping[str, Any] = self.system.info(place)
        return found

    def names(self, place: str, most: int) -> list[str]:
        """Return the names in a folder; a store that gives pages is asked for `most` of them."""
        try:
            with self._explained(place):
                found = self.listed(place, most)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except NotFoundError as error:
            # Many a bucket lets files be read and not be listed: it cannot tell.
            if PERMITS_NOT in error.message:
                return []
            raise
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def listed(self, place: str, most: int) -> Iterable[str]:  # noqa: ARG002  # asked for all at once
        """Return full names of what is in a folder."""
        found: list[str] = self.system.ls(place, detail=False)
        return found

    def part(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if another version is there now."""
        try:
            with self._explained(place):
                data = self.bytes_of(place, seen, offset, length)
        except FileNotFoundError as error:
            raise ChangedError("the file changed after it was listed, or went away", file=place) from error
        if len(data) != length:
            raise TruncatedError(
                "the store gives another number of bytes than was asked for",
                file=place,
                offset=offset,
                expected=f"{length:,}",
                found=f"{len(data):,}",
            )
        return data

    def bytes_of(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return what the store gives for the range."""
        data: bytes = self.system.cat_file(place, start=offset, end=offset + length)
        require_same_version(place, seen, stat_from_info(self.info(place)))
        return data

    @contextlib.contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        """Turn what the library raises into a sentence; what is not there stays FileNotFoundError."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            raise
        except CkpttoolError as error:
            raise error.located(file=place) from error.__cause__
        except self._failures as error:
            means = self.meant(error) or type(error)
            if isinstance(means, str):
                raise NotFoundError(means, file=place) from error
            if issubclass(means, PermissionError):
                raise NotFoundError(f"the store {PERMITS_NOT}", file=place) from error
            if issubclass(means, TimeoutError):
                raise remote.deadline_error(place) from error
            if issubclass(means, EOFError):
                raise TruncatedError("the store stopped before all bytes had come", file=place) from error
            raise NotFoundError("the store cannot be read", file=place, found=means.__name__) from error


def open_filesystem(scheme: str, **options: Any) -> Any:
    """Return the library's file system for a scheme, which remembers nothing."""
    # What a listing said stays true for nobody; settings of the environment may have changed.
    return fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True, **options)


_STORES: dict[tuple[str, float], CachingStore] = {}


def _shared_store(cls: type[ObjectStore], scheme: str, place: str) -> CachingStore:
    """Return the one store of a scheme: its connections are shared, which wait as long as the limit says."""
    known = scheme, limits.current().fetch_seconds
    if known not in _STORES:
        # Libraries look for keys here already: at a cloud's metadata server, if need be.
        allowance = remote.WaitBudget()
        server = allowance.run(place, 0, functools.partial(cls, scheme))
        _STORES[known] = CachingStore(server, allowance=allowance)
    return _STORES[known]


def stat_from_info(found: Mapping[str, Any]) -> FileStat:
    """Return a file's identity of what a store tells of it."""
    told = next((found[name] for name in _VERSIONS if found.get(name)), "")
    said = told.isoformat() if isinstance(told, datetime.datetime) else str(told)
    changed = next((found[name] for name in _TIMES if isinstance(found.get(name), datetime.datetime)), None)
    mtime_ns = 0 if changed is None else int(changed.timestamp()) * 10**9
    return FileStat(int(found.get("size") or 0), mtime_ns, version_tag(said))


def require_same_version(place: str, seen: FileStat, now: FileStat) -> None:
    """Raise ChangedError unless both are one version."""
    if now != seen:
        raise ChangedError("the file changed after it was listed", file=place)


# Stores whose objects have versions that can be asked for by name; Google's buckets.
#
# What was listed is what is read, whatever is written meanwhile; no second look is needed.

_KEPT = 100_000


class VersionedStore(ObjectStore):
    """A store that is asked for the bytes of the version that was seen."""

    def __init__(self, scheme: str) -> None:
        """Remember no version yet."""
        super().__init__(scheme)
        self._versions: OrderedDict[tuple[str, FileStat], str] = OrderedDict()

    def remember(self, place: str, seen: FileStat, version: str) -> None:
        """Note which version was seen."""
        self._versions[place, seen] = version
        if len(self._versions) > _KEPT:
            self._versions.popitem(last=False)

    def version(self, place: str, seen: FileStat) -> str:
        """Return the version that was seen, by another process perhaps; raise ChangedError if it is gone."""
        if (place, seen) not in self._versions:
            require_same_version(place, seen, stat_from_info(self.info(place)))
        return self._versions[place, seen]


class GS(VersionedStore):
    """Google Cloud Storage: an object's generation is its version."""

    def started(self) -> Any:
        """Return gcsfs's system for all buckets.

        Its own choice (`gcsfs.GCSFileSystem`) asks another service for each bucket's kind first, which wants
        credentials where a public bucket needs none (gcsfs/extended_gcsfs.py).
        """
        from aiohttp import ClientTimeout, TraceConfig
        from gcsfs.core import GCSFileSystem

        silence, trace = limits.current().fetch_seconds, TraceConfig()
        trace.on_request_start.append(_on_request)
        trace.on_request_redirect.append(_on_redirect)
        trace.on_request_end.append(_on_response)

        # It prints the traceback of what it raises too, unless somebody listens.
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())
        return GCSFileSystem(
            use_listings_cache=False,
            skip_instance_cache=True,
            version_aware=True,
            requests_timeout=ClientTimeout(sock_connect=silence, sock_read=silence),
            session_kwargs={"trace_configs": [trace]},
        )

    def failures(self) -> tuple[type[Exception], ...]:
        """Return gcsfs's, and those of the connection and of the credentials."""
        from aiohttp import ClientError
        from gcsfs.retry import HttpError
        from google.auth.exceptions import GoogleAuthError

        return HttpError, ClientError, GoogleAuthError

    def meant(self, error: Exception) -> type[Exception] | str | None:
        """Tell an answer that broke off, and one that permits nothing (gcsfs/retry.py, validate_response)."""
        from aiohttp import ClientPayloadError

        if isinstance(error, ClientPayloadError):
            return EOFError
        return PermissionError if str(error).startswith("Forbidden") else None

    def info(self, place: str) -> Mapping[str, Any]:
        """Return what is told of the object, and remember its generation."""
        found = super().info(place)
        if found.get("generation"):
            self.remember(place, stat_from_info(found), str(found["generation"]))
        return found

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return full names, as many as asked for."""
        found: list[str] = self.system.ls(place, detail=False, max_results=most)
        return found

    def bytes_of(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes of the generation that was seen."""
        exact = f"{place}#{self.version(place, seen)}"
        data: bytes = self.system.cat_file(exact, start=offset, end=offset + length)
        return data


async def _on_request(_: object, __: object, ___: object) -> None:
    """Let the deadline end the request, and the library's other tries."""
    remote.current_request().hold()


async def _on_redirect(_: object, __: object, found: Any) -> None:
    """Raise UnsupportedError for a redirect to another host: Google's interface has none."""
    if is_cross_origin(found.url, found.response.headers.get("Location", "")):
        raise UnsupportedError("the store leads to another server, which is not followed")


async def _on_response(_: object, __: object, found: Any) -> None:
    """Count what arrives of the answer."""
    remote.current_request().watch(found.response.content)


# Repositories of the Hugging Face hub, read as of any web server.
#
# The hub's own client makes the addresses and knows the token. It does not send the requests: it would follow
# a redirect, or the link to a listing's next page, to any server, and wait for any time.

# Of a file that is given as a whole: the hub may do so with what git itself keeps, which is at most 10 MB
# (https://huggingface.co/docs/hub/repositories-getting-started).
_SMALL = 16 << 20
_LARGEST = 16 << 20  # of an answer of the interface: a page has a thousand entries
_REASONS = {
    "GatedRepo": "the repository's owner has not let you in",
    "RepoNotFound": "there is no such repository, or it is private and HF_TOKEN does not open it",
    "RevisionNotFound": "there is no such revision",
}


class _HubPage(NamedTuple):
    """An answer of the interface, and the URL of the one that follows."""

    value: Any
    following: str | None


class _HubPath(NamedTuple):
    """A path in a repository of the hub; `revision` is a branch, a tag or a commit."""

    kind: str
    repository: str
    revision: str
    path: str


# hf://[TYPE/]USER/NAME[@REVISION][/PATH] (https://huggingface.co/docs/huggingface_hub/guides/hf_file_system).
_ADDRESS = re.compile(
    r"hf://(?:(models|datasets|spaces)/)?([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)


class _HubApi:
    """The hub's interface, with the token of the hub's own settings."""

    def __init__(self) -> None:
        from huggingface_hub import constants, get_token
        from huggingface_hub.utils import validate_repo_id

        self.endpoint = constants.ENDPOINT.rstrip("/")
        self._offline, self._valid = constants.HF_HUB_OFFLINE, validate_repo_id
        # Not by the library's build_hf_headers, which asks the hub for a list of programs first.
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self.headers = {"User-Agent": "ckpttool", **({"Authorization": f"Bearer {token}"} if token else {})}

    def asked(self, place: str, file: _HubPath, rest: str, form: dict[str, str] | None = None) -> _HubPage:
        """Return what the hub answers about a repository: JSON, and where the next page is."""
        self._valid(file.repository)
        url = f"{self.endpoint}/api/{file.kind}s/{file.repository}/{rest}"
        return self.page(place, url, form)

    def page(self, place: str, url: str, form: dict[str, str] | None = None) -> _HubPage:
        """Return what the hub answers at one of its URLs."""
        if self._offline:
            raise NotFoundError("HF_HUB_OFFLINE is set, so the hub is not asked", file=place)
        take = functools.partial(_read_hub_page, place)
        return _hub_server().asked(place, self.headers, take, url, form, stays=True)


class HF(VersionedStore):
    """The Hugging Face hub: the commit that a branch names when a visit first asks is read, and no other."""

    def started(self) -> Any:
        """Return the hub's interface."""
        return _HubApi()

    def info(self, place: str) -> Mapping[str, Any]:
        """Return the file's size and its blob, of the commit that this visit reads."""
        file = _parse_hub_url(place)
        commit = self._commit(place, file)
        if not file.path:
            return {"type": "directory"}
        found = self.system.asked(place, file, f"paths-info/{quote(commit, '')}", {"paths": file.path}).value
        entries = _require_entries(place, found)
        if not entries:
            raise FileNotFoundError(place)
        if entries[0].get("type") != "file":
            return {"type": "directory"}
        size, blob = entries[0].get("size"), entries[0].get("oid")
        if not isinstance(size, int) or not isinstance(blob, str) or size < 0:
            raise UnsupportedError("the hub tells neither the size nor the version of the file", file=place)
        told = {"size": size, "blob_id": blob}
        self.remember(place, stat_from_info(told), commit)
        return told

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return the names, a page for every request."""
        file = _parse_hub_url(place)
        where = f"tree/{quote(self._commit(place, file), '')}" + (file.path and f"/{quote(file.path, '')}")
        page = self.system.asked(place, file, where)
        found = _require_entries(place, page.value)
        while page.following is not None and len(found) < most:
            page = self.system.page(place, page.following)
            found += _require_entries(place, page.value)
        return [str(each.get("path", "")) for each in found[:most]]

    def bytes_of(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes of the commit that was seen: asked for, and judged, as of any web server."""
        from huggingface_hub import hf_hub_url

        file, commit = _parse_hub_url(place), self.version(place, seen)
        url = hf_hub_url(
            file.repository, file.path, repo_type=file.kind, revision=commit, endpoint=self.system.endpoint
        )
        headers = {**self.system.headers, "Range": f"bytes={offset}-{offset + length - 1}"}
        take = functools.partial(_read_hub_part, place, seen, offset, length)
        return _hub_server().asked(place, headers, take, url)

    def _commit(self, place: str, file: _HubPath) -> str:
        known = filesystem.current_session().versions
        name = f"{file.kind}:{file.repository}@{file.revision}"
        if name not in known:
            # Not what else is told of a repository: a list of all of its files.
            found = self.system.asked(place, file, f"revision/{quote(file.revision, '')}?expand=sha").value
            commit = found.get("sha") if isinstance(found, dict) else None
            if not isinstance(commit, str) or not commit:
                raise UnsupportedError("the hub does not tell the commit of the revision", file=place)
            known[name] = commit
        return known[name]


async def _read_hub_page(place: str, answer: aiohttp.ClientResponse) -> _HubPage:
    """Return an answer of the interface as JSON; raise NotFoundError with the reason that it gives."""
    # huggingface_hub/utils/_http.py, hf_raise_for_status
    reason = answer.headers.get("X-Error-Code", "")
    if reason == "EntryNotFound" or (answer.status == 404 and not reason):
        raise FileNotFoundError(place)
    if reason in _REASONS:
        raise NotFoundError(_REASONS[reason], file=place)
    require_ok(place, answer)
    data = bytearray()
    async for piece in answer.content.iter_chunked(PIECE):
        data += piece
        if len(data) > _LARGEST:
            raise UnsupportedError("the hub answers with very much", file=place, found=f"{len(data):,} bytes")
    value = text.parse_json_value(bytes(data), "the hub's answer")
    following = answer.links.get("next")
    if following is None:
        return _HubPage(value, None)
    link = str(following.get("url", ""))
    if is_cross_origin(answer.url, link):
        raise UnsupportedError("the hub's list goes on at another server, which is not followed", file=place)
    return _HubPage(value, link)


def _require_entries(place: str, value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise UnsupportedError("the hub answers with something that is no list of files", file=place)
    return value


async def _read_hub_part(
    place: str, seen: FileStat, offset: int, length: int, answer: aiohttp.ClientResponse
) -> bytes:
    if answer.status == 206:
        first, last, total = parse_content_range(place, answer)
        if total != seen.size:
            raise ChangedError("the file changed after it was listed", file=place)
        if (first, last) != (offset, offset + length - 1):
            raise UnsupportedError("the server gives another part than was asked for", file=place)
        return await read_exactly(place, answer, length)
    require_ok(place, answer)
    if seen.size > _SMALL:
        raise UnsupportedError("the server gives no part of the file", file=place)
    return (await read_exactly(place, answer, seen.size))[offset : offset + length]


def _parse_hub_url(place: str) -> _HubPath:
    match = _ADDRESS.fullmatch(place)
    if place.startswith("hf://buckets/"):
        raise UnsupportedError("of the hub repositories are read, buckets are not", file=place)
    if match is None:
        raise FileNotFoundError(place)
    kind, repository, revision, path = match.groups()
    return _HubPath((kind or "models").removesuffix("s"), repository, unquote(revision or "main"), path or "")


@functools.cache
def _hub_server() -> Web:

    return Web("", "", "")


# Amazon's S3 and whatever speaks its language, by s3fs: ranges of the version that was seen (`If-Match`).

_OPEN = 64
_S3_REDIRECT_STATUSES, _REGION = (301, 302, 303, 307, 308), "x-amz-bucket-region"
_PAGE = 1000  # keys of a listing: ListObjectsV2 gives no more (docs.aws.amazon.com/AmazonS3/latest/API)


class S3(ObjectStore):
    """S3 and whatever speaks its language; a bucket of which no key is known is read as the public does."""

    def __init__(self, scheme: str) -> None:
        """Take keys from where AWS's own tools take them, else none."""
        super().__init__(scheme)
        self._open: OrderedDict[str, Any] = OrderedDict()
        from botocore.exceptions import NoCredentialsError

        self._no_credentials = NoCredentialsError

    def started(self) -> Any:
        """Return s3fs's file system, with the keys of the environment."""
        return _open_s3()

    def failures(self) -> tuple[type[Exception], ...]:
        """Return botocore's, and those of the connection, which come through where an answer breaks off."""
        from aiohttp import ClientError as ConnectionFailure
        from botocore.exceptions import BotoCoreError, ClientError

        return BotoCoreError, ClientError, ConnectionFailure

    def meant(self, error: Exception) -> type[Exception] | str | None:
        """Tell an answer that broke off, one that did not come, and a redirect."""
        from aiohttp import ClientPayloadError
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        if isinstance(error, ConnectTimeoutError | ReadTimeoutError):
            return TimeoutError
        inner = getattr(error, "kwargs", {}).get("error")  # of a botocore.exceptions.HTTPClientError
        if isinstance(inner, UnsupportedError):
            return inner.message
        return EOFError if isinstance(error, ClientPayloadError) else None

    def listed(self, place: str, most: int) -> Iterable[str]:
        """Return full names, a page for every request."""
        bucket, key, _ = self.system.split_path(place)
        prefix = f"{key.rstrip('/')}/" if key else ""
        found: list[str] = []
        more: dict[str, str] = {}
        while len(found) < most:
            page = self.system.call_s3(
                "list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", MaxKeys=_PAGE, **more
            )
            keys = [each["Key"] for each in page.get("Contents", ())]
            keys += [each["Prefix"] for each in page.get("CommonPrefixes", ())]
            found += [f"{bucket}/{each}" for each in keys if each != prefix]
            if not page.get("NextContinuationToken"):
                break
            more = {"ContinuationToken": page["NextContinuationToken"]}
        return found

    def look(self, place: str) -> StoreEntry:
        """Return what is there now; the first look finds out whether there are keys."""
        try:
            return super().look(place)
        except NotFoundError as error:
            if not isinstance(error.__cause__, self._no_credentials):
                raise
        self.system = _open_s3(anon=True)
        return super().look(place)

    def bytes_of(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes of the version that was seen: an open file of s3fs asks for no other."""
        # s3fs/core.py, S3File: it keeps the ETag that it found, and sends it with each range.
        file = self._open.get(place)
        if file is None or stat_from_info(file.details) != seen:
            file = self.system.open(place, "rb", cache_type="none")
            require_same_version(place, seen, stat_from_info(file.details))
            self._open[place] = file
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        return _read_s3_range(file, place, offset, length)


def _read_s3_range(file: Any, place: str, offset: int, length: int) -> bytes:
    from s3fs.utils import FileExpired

    try:
        # Not by seek and read: a position is no thread's own.
        data: bytes = file.cache.fetcher(offset, offset + length)
    except FileExpired as error:
        raise ChangedError("the file changed after it was listed", file=place) from error
    return data


def _open_s3(**options: Any) -> Any:
    if "http_session_cls" not in inspect.signature(AioConfig).parameters:
        raise MissingExtraError(
            "s3:// needs a newer aiobotocore", hint="pip install --upgrade 'ckpttool[s3]' aiobotocore"
        )
    silence = limits.current().fetch_seconds
    settings = {
        "connect_timeout": silence,
        "read_timeout": silence,
        "retries": {"max_attempts": 3},
        "http_session_cls": _S3HttpSession,
    }
    return open_filesystem("s3", config_kwargs=settings, **options)


class _S3HttpSession(AIOHTTPSession):  # type: ignore[misc]  # without types
    """The connections of a client, which follow no redirect.

    Nor do those of botocore: where a bucket's region is another one, it makes a request of its own. aiohttp
    would go wherever the answer leads.
    """

    async def _get_session(self, proxy_url: str | None) -> Any:
        return _S3ClientSession(await super()._get_session(proxy_url))


class _S3ClientSession:
    """A session of aiohttp, as far as aiobotocore uses it."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, *arguments: Any, **options: Any) -> Any:
        """Return the answer itself; what arrives of its body is progress.

        Raise UnsupportedError for a redirect that names no region: botocore would ask for that region, and be
        redirected, without end.
        """
        remote.current_request().hold()
        answer = await self._session.request(*arguments, allow_redirects=False, **options)
        if answer.status in _S3_REDIRECT_STATUSES and _REGION not in answer.headers:
            answer.release()
            raise UnsupportedError("the store leads to another server, which is not followed")
        remote.current_request().watch(answer.content)
        return answer


# Files of web servers, by ranged requests (RFC 9110, 14) through fsspec's session of aiohttp.
#
# The first request for a file asks for its beginning and tells all: its size, its ETag, and whether the
# server gives parts. A HEAD would tell less, and a URL that is signed for GET refuses it.

_LINK = re.compile(r"<a\s[^>]*?href\s*=\s*[\"']([^\"'<>]*)[\"']", re.IGNORECASE)
_LEGAL = "%:/?#[]@!$&'()*+,;=~"  # RFC 3986, 2.2 and 2.3; other characters are quoted
_REDIRECT_STATUSES, _REDIRECTS = (301, 302, 303, 307, 308), 5
# Headers that another server gets too.
_FOR_ALL = ("accept-encoding", "range", "user-agent")
_BUSY, _PAUSES = (429, 500, 502, 503, 504), (0.2, 1.0)

Answer = TypeVar("Answer")
AnswerReader = Callable[[aiohttp.ClientResponse], Awaitable[Answer]]


class _ServerBusyError(Exception):  # asks for another try, and is no error before the last one
    """The server asks to be asked later, or let go of the connection."""


class Web:
    """A folder of a web server.

    What a person named is asked for by the very URL, what lies beside it by its name. The query and the user
    of the URL stay here: no place has them.
    """

    def __init__(self, start: str, prefix: str, query: str) -> None:
        """Ask for `start` + NAME by `prefix` + the quoted name + `query`."""
        self.exact: dict[str, str] = {}
        self.copies = LocalCopyCache()
        self.store = CachingStore(self, self.copies, _server_budget(_origin(prefix)))
        self._start, self._prefix, self._query = start, prefix, query

    @classmethod
    def mount(cls, url: str, outer: str) -> str:  # noqa: ARG003  # for members of archives
        """Mount the folder of a URL; return the place of what it names."""
        url = quote(url, _LEGAL)
        address = re.split(r"[?#]", url, maxsplit=1)[0]
        query = re.split("#", url[len(address) :])[0]
        exact = address + query
        place = urls.display_url(address).rstrip("/")
        folder, _, _ = address.rstrip("/").rpartition("/")
        if folder.endswith("/"):  # a host alone
            folder, start = address.rstrip("/"), place + "/"
        else:
            start = place.rpartition("/")[0] + "/"
        server = cls(start, folder + "/", query)
        server.exact[place] = exact
        known = filesystem.find_store(place)
        if isinstance(known, CachingStore) and isinstance(known.server, Web):
            server.exact = {**known.server.exact, **server.exact}
        filesystem.mount_store(start, server.store)
        return place

    def look(self, place: str) -> StoreEntry:
        """Return what is there by asking for its beginning; raise NotFoundError if nobody can tell."""
        return self.asked(place, {"Range": f"bytes=0-{HEAD - 1}"}, lambda answer: self._looked(place, answer))

    def names(self, place: str, most: int) -> list[str]:  # noqa: ARG002  # a page's length is its limit
        """Return the links of the folder's page that lead into the folder; none where there is no page."""
        url = self._url(place)
        try:
            address, mark, query = url.partition("?")
            page = self.asked(place, {}, read_page, address.rstrip("/") + "/" + mark + query)
        except NotFoundError:
            return []
        links = (unquote(html.unescape(link).removeprefix("./")).rstrip("/") for link in _LINK.findall(page))
        return [name for name in dict.fromkeys(links) if not name.startswith(("?", "#"))]

    def part(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes; raise ChangedError if the server has another file there now."""
        return self.asked(
            place,
            {"Range": f"bytes={offset}-{offset + length - 1}"},
            lambda answer: self._part(place, answer, seen, offset, length),
        )

    async def _looked(self, place: str, answer: aiohttp.ClientResponse) -> StoreEntry:
        if answer.status in GONE:
            return None
        if str(answer.url.path).endswith("/") and answer.status in (200, 206):
            return "folder"
        if is_empty_file(answer):
            return FileStat(0, *file_identity(answer))
        if answer.status == 206:
            first, _, total = parse_content_range(place, answer)
            seen = FileStat(total, *file_identity(answer))
            data = await read_exactly(place, answer, min(HEAD, total))
            if first:
                raise UnsupportedError("the server gives another part than was asked for", file=place)
            self.store.blocks.keep(place, seen, 0, data)
            return seen
        require_ok(place, answer)
        told = answer.content_length
        if told is None:
            return await self._whole(place, answer)
        seen = FileStat(told, *file_identity(answer))
        self.store.blocks.keep(place, seen, 0, await answer.content.readexactly(min(HEAD, told)))
        return seen

    async def _part(
        self, place: str, answer: aiohttp.ClientResponse, seen: FileStat, offset: int, length: int
    ) -> bytes:
        if answer.status != 200:
            return await read_part(place, answer, seen, offset, length)
        told = answer.content_length
        if file_identity(answer) != seen[1:] or told not in (None, seen.size):
            raise ChangedError("the file changed after it was listed", file=place)
        whole = self.copies.read(place, await self._whole(place, answer), offset, length)
        if whole is None or len(whole) != length:
            raise ChangedError("the file changed after it was listed", file=place)
        return whole

    async def _whole(self, place: str, answer: aiohttp.ClientResponse) -> FileStat:
        """Keep a file that came as a whole because the server gives no parts."""
        told = answer.content_length
        why = "the server gives no parts of files"
        require_fetchable(place, told or 0, why)
        remote.current_request().expect(told or limits.current().fetched_bytes)
        room, done, watch = ScratchFile(), 0, filesystem.watch.get()
        async for piece in answer.content.iter_chunked(PIECE):
            require_fetchable(place, done + len(piece), why)
            room.put(done, piece)
            done += len(piece)
            if watch is not None:
                watch(urls.display_url(place), done, told or done)
        if told is not None and told != done:
            raise_truncated(place, told, done)
        seen = FileStat(done, *file_identity(answer))
        self.copies.keep(place, seen, 0, done, room)
        if done > HEAD:
            filesystem.add_note(f"{why}: all {format_size(done)} of {urls.display_url(place)} were fetched")
        return seen

    def _url(self, place: str) -> str:
        # What was typed is quoted already where it has to be.
        return self.exact.get(place) or self._prefix + quote(place[len(self._start) :], "/%") + self._query

    def asked(
        self,
        place: str,
        headers: dict[str, str],
        take: AnswerReader[Answer],
        url: str | None = None,
        form: dict[str, str] | None = None,
        *,
        stays: bool = False,
    ) -> Answer:
        """Return what `take` makes of the answer, which is asked for again where that may help.

        With a `form` it is sent (POST); with `stays` no redirect to another origin is followed. Raise
        NotFoundError if there is none, TruncatedError if it ends too early.
        """
        request, loop = remote.current_request(), _http_filesystem(public=False).loop
        for pause in (*_PAUSES, None):
            try:
                with _translate_errors(place, last=pause is None):
                    address = yarl.URL(url or self._url(place), encoded=True)
                    return request.answer(_fetch_answer(place, address, headers, take, form, stays), loop)
            except _ServerBusyError:
                time.sleep(pause or 0)
        raise NotFoundError("the server is busy", file=place)


async def _fetch_answer(
    place: str,
    url: yarl.URL,
    headers: dict[str, str],
    take: AnswerReader[Answer],
    form: dict[str, str] | None,
    stays: bool,
) -> Answer:
    """Return what `take` makes of the answer, at the end of the server's redirects."""
    here, silence = url, limits.current().fetch_seconds
    patience = aiohttp.ClientTimeout(total=None, sock_connect=silence, sock_read=silence)
    # What is compressed for the way has other bytes at other places.
    wanted = {"Accept-Encoding": "identity", **_netrc_header(url, headers), **headers}
    for _ in range(_REDIRECTS + 1):
        proxy = find_proxy(here)
        guarded = _is_public_only(place, here, url)
        session = await _http_filesystem(public=guarded and proxy is None).set_session()
        async with session.request(
            "GET" if form is None else "POST",
            here,
            data=form,
            headers=wanted,
            proxy=proxy,
            timeout=patience,
            allow_redirects=False,
        ) as answer:
            if answer.status not in _REDIRECT_STATUSES or "Location" not in answer.headers:
                return await _handle_answer(place, answer, take)
            before, here = here, _redirect_target(place, here, answer.headers["Location"])
        if here.origin() != before.origin():
            if stays:
                raise UnsupportedError("the server leads elsewhere, which is not followed", file=place)
            wanted = {name: text for name, text in wanted.items() if name.lower() in _FOR_ALL}
    raise NotFoundError("the server leads in circles", file=place)


async def _handle_answer(place: str, answer: aiohttp.ClientResponse, take: AnswerReader[Answer]) -> Answer:
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise UnsupportedError("the server sends the file compressed, whoever asks", file=place)
    if answer.status in _BUSY:
        raise _ServerBusyError(str(answer.status))
    remote.current_request().watch(answer.content)
    return await take(answer)


def _redirect_target(place: str, here: yarl.URL, location: str) -> yarl.URL:
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


def _is_public_only(place: str, here: yarl.URL, named: yarl.URL) -> bool:
    """Say whether the connection may go to public addresses alone: it is not to the host that a person named.

    Raise UnsupportedError if the host is, as it is written, no public one.
    """
    if same_host(here, named):
        return False
    try:
        require_public_name(here)
    except PrivateAddressError as error:
        raise _private_address_error(place, error) from error
    return True


def _netrc_header(url: yarl.URL, headers: dict[str, str]) -> dict[str, str]:
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


def _private_address_error(place: str, error: BaseException) -> UnsupportedError:
    return UnsupportedError(
        "the server leads to an address that is not public, which is not followed",
        file=place,
        found=str(error)[:120],
        hint="name the URL that it leads to yourself, if you trust it",
    )


@functools.cache
def _server_budget(origin: str) -> remote.WaitBudget:  # noqa: ARG001  # one for each server
    return remote.WaitBudget()


def _origin(url: str) -> str:
    try:
        return str(yarl.URL(url, encoded=True).origin())
    except ValueError:
        return ""  # not even a server's name: the first request says so


@functools.cache
def _http_filesystem(*, public: bool) -> HTTPFileSystem:
    """Return a session of this process: its connections serve all servers, and it keeps no cookies."""
    remote.prepare_loop()
    settings = {"auto_decompress": False}
    client = functools.partial(_make_client, public)
    return HTTPFileSystem(skip_instance_cache=True, get_client=client, client_kwargs=settings)


async def _make_client(public: bool, **settings: Any) -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(resolver=AddressResolver(public=public))
    return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), connector=connector, **settings)


@contextlib.contextmanager
def _translate_errors(place: str, *, last: bool) -> Iterator[None]:
    """Turn what goes wrong on the way into a sentence, or into another try where that may help."""
    try:
        yield
    except aiohttp.ClientConnectorDNSError as error:
        if isinstance(error.os_error, PrivateAddressError):
            raise _private_address_error(place, error.os_error) from error
        raise NotFoundError("the host is not known", file=place) from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise NotFoundError("the server's certificate is not valid", file=place) from error
    except (ValueError, aiohttp.NonHttpUrlClientError) as error:  # yarl's, and aiohttp.InvalidURL
        raise NotFoundError("the server, or the URL, leads to no http address", file=place) from error
    except (aiohttp.ClientPayloadError, asyncio.IncompleteReadError) as error:
        raise TruncatedError("the server stopped before all bytes had come", file=place) from error
    except TimeoutError as error:
        raise remote.deadline_error(place) from error
    except (aiohttp.ClientError, OSError) as error:
        if not last and isinstance(error, aiohttp.ServerDisconnectedError | ConnectionResetError):
            raise _ServerBusyError from error
        raise NotFoundError("the server cannot be reached", file=place, found=type(error).__name__) from error
