"""Remote checkpoints: schemes, blocks, deadlines, local copies and archives."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, TypeVar
from urllib.parse import unquote

from ckpttool.core import atomic_write, filesystem, limits, urls
from ckpttool.core.errors import (
    DeadlineError,
    MissingExtraError,
    NotFoundError,
    UsageError,
    suggest_choice,
)
from ckpttool.core.filesystem import FileStat, LocalCopyCache, StoreEntry
from ckpttool.core.plugins import STORES
from ckpttool.core.text import format_size

# Places elsewhere that are read by parts: web servers and object stores.
#
# Nothing here is imported before somebody names a URL; a store's libraries are imported when it is mounted.


def mount(text: str) -> str:
    """Make the place that a URL names readable, with what lies beside and below it; return that place.

    No request is sent yet. Raise UsageError for a URL that names no place, MissingExtraError when a
    library is missing.
    """
    chain = urls.normalize_chain(text)
    if chain is None:
        raise UsageError(
            "the archive is not named", file=text, hint="zip://inner/ckpt-1::/path/archive.zip names both"
        )
    outermost, *inner = urls.split_chain(chain)
    place = _mount_link(outermost)
    for link in inner:
        place = _store_class(link)(link, place)
    return place


def _mount_link(link: str) -> str:
    """Return the place of a plain URL or of a local path."""
    scheme, colon, rest = link.partition("://")
    if not colon or not urls.is_url(link):
        return link
    scheme = scheme.lower()
    if scheme in ("file", "local"):
        return unquote(rest.removeprefix("localhost"))
    if scheme not in STORES or scheme in ("zip", "tar"):
        known = (*STORES, "file")
        raise UsageError(f"there is no scheme {scheme!r}", file=link, hint=suggest_choice(scheme, known))
    if not rest.strip("/"):
        raise UsageError("the URL names no place", file=link)
    return _store_class(link)(f"{scheme}://{rest}", "")


def _store_class(link: str) -> Callable[[str, str], str]:
    """Return what mounts a link; raise MissingExtraError if a library is missing."""
    try:
        store = STORES[link.partition("://")[0].lower()].load()
    except MissingExtraError as error:
        error.located(file=link)
        raise
    mount_link: Callable[[str, str], str] = store.mount
    return mount_link


# Small reads of files elsewhere, gathered into blocks: a header or an index costs few requests.
#
# A read that goes on where the last one ended fetches ever more ahead; any other fetches no more than its own
# blocks, so that a look at many places of a large file moves little.

BLOCK = 16 << 10
# What a file's beginning is asked for: most headers and indexes.
HEAD = 64 << 10
_LARGE = 1 << 20
_AHEAD = (4 << 20) // BLOCK
_KEPT = (32 << 20) // BLOCK

Fetch = Callable[[str, FileStat, int, int], bytes]


class BlockCache:
    """The blocks that were read last, of all files of a store."""

    def __init__(self, fetch: Fetch) -> None:
        """Get bytes that are not here by `fetch(place, seen, offset, length)`."""
        self._fetch = fetch
        self._kept: OrderedDict[tuple[str, FileStat, int], bytes] = OrderedDict()
        self._ahead: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def read(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes; large reads are fetched as they are and not kept."""
        if length > _LARGE:
            return self._fetch(place, seen, offset, length)
        first, last = offset // BLOCK, (offset + length - 1) // BLOCK
        found = [self._block(place, seen, number) for number in range(first, last + 1)]
        if None in found:
            start = first + found.index(None)
            data = self._fetched(place, seen, start, last + 1)
            found[start - first :] = [data]
        joined = b"".join(block for block in found if block is not None)
        return joined[offset - first * BLOCK :][:length]

    def keep(self, place: str, seen: FileStat, offset: int, data: bytes) -> None:
        """Keep bytes from the beginning of a block on; what is no whole block is dropped, but at the end."""
        with self._lock:
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                if len(block) == BLOCK or offset + at + len(block) == seen.size:
                    self._kept[place, seen, (offset + at) // BLOCK] = block
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def _block(self, place: str, seen: FileStat, number: int) -> bytes | None:
        with self._lock:
            found = self._kept.get((place, seen, number))
            if found is not None:
                self._kept.move_to_end((place, seen, number))
            return found

    def _fetched(self, place: str, seen: FileStat, start: int, stop: int) -> bytes:
        with self._lock:
            following, ahead = self._ahead.get(place, (-1, 0))
            ahead = min(2 * max(ahead, stop - start), _AHEAD) if start == following else 0
            stop = min(max(stop, start + ahead), -(-seen.size // BLOCK))
            self._ahead[place] = (stop, ahead)
        at = start * BLOCK
        data = self._fetch(place, seen, at, min(stop * BLOCK, seen.size) - at)
        self.keep(place, seen, at, data)
        return data


# How long servers may keep a command waiting: one budget for each server, whatever library reads it.
#
# Every request, from the look-up of the host's name to the last byte, with its redirects, retries and pages,
# is a task on fsspec's event loop while the caller watches the clock. So no stage and no library can hold a
# command, and Ctrl-C ends it at once: the loop and its look-ups run on daemon threads.

# Seconds given back by a finished request, so that many quick ones never add up to a slow server.
_REQUEST_S = 1.0
# Bytes beside those of the requested range that count as progress: listings, answers of an API.
_SPARE = 256 << 10
_TICK_S = 0.1
# Longest time between two looks at the clock: more, and this process was stopped (Ctrl-Z).
_LONGEST_TICK_S = 1.0

Result = TypeVar("Result")
Job = Callable[[], Coroutine[Any, Any, Result]]


class ResponseBody(Protocol):
    """The body of an answer while it arrives (aiohttp.StreamReader)."""

    total_bytes: int


class RemoteRequest:
    """The progress of one request: the bytes that are expected, and those that have arrived."""

    def __init__(self, nbytes: int) -> None:
        """Expect so many bytes of a file."""
        self._due = nbytes + _SPARE
        self._bodies: list[ResponseBody] = []
        self._counted = 0

    def expect(self, nbytes: int) -> None:
        """Expect so many bytes more than was known when the request began."""
        self._due += nbytes

    def watch(self, body: ResponseBody) -> None:
        """Count what arrives of this body."""
        self._bodies.append(body)

    def progress(self) -> int:
        """Return the expected bytes that arrived since the last call."""
        arrived = min(sum(body.total_bytes for body in self._bodies), self._due)
        new, self._counted = arrived - self._counted, arrived
        return new


_REQUEST: contextvars.ContextVar[RemoteRequest | None] = contextvars.ContextVar(
    "ckpttool_request", default=None
)


def current_request() -> RemoteRequest:
    """Return the request that this code runs for."""
    return _REQUEST.get() or RemoteRequest(0)


class WaitBudget:
    """The seconds for which a server may keep a command waiting (limit `fetch_seconds`).

    Waiting uses them up. Each finished request gives one back, each `fetch_rate` bytes another, and so does
    each second without a request. A server without seconds left fails every request at once.
    """

    def __init__(self) -> None:
        """Begin with nothing used."""
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._at = time.monotonic()
        self._waiting = 0

    def run(self, place: str, nbytes: int, job: Job[Result]) -> Result:
        """Return what the job returns, which fetches `nbytes` of `place`; raise DeadlineError."""
        return next(self.run_all(place, [(nbytes, job)], 1))

    def run_all(self, place: str, jobs: Iterable[tuple[int, Job[Result]]], at_once: int) -> Iterator[Result]:
        """Give the results of jobs in their order; `at_once` of them run side by side."""
        running: deque[tuple[RemoteRequest, Future[Result]]] = deque()
        try:
            for nbytes, job in jobs:
                if self._left(0) <= 0:
                    raise deadline_error(place)
                running.append(_start_request(nbytes, job))
                if len(running) == at_once:
                    yield self._result(place, running)
            while running:
                yield self._result(place, running)
        finally:
            for _, unfinished in running:
                unfinished.cancel()

    def _result(self, place: str, running: deque[tuple[RemoteRequest, Future[Result]]]) -> Result:
        """Return the result of the first request; what arrives for the others is progress too."""
        _, future = running[0]
        self._begin()
        try:
            while not future.done():
                left = self._left(sum(each.progress() for each, _ in running))
                if left <= 0:
                    raise deadline_error(place)
                if atomic_write.is_abandoned():
                    raise DeadlineError("the command ended before the server answered", file=place)
                wait_for([future], min(left, _TICK_S))
        finally:
            self._end(done=future.done())
        running.popleft()
        return future.result()

    def _begin(self) -> None:
        with self._lock:
            self._clock()
            self._waiting += 1

    def _end(self, *, done: bool) -> None:
        with self._lock:
            self._clock()
            self._waiting -= 1
            if done:
                self._used_s = max(0.0, self._used_s - _REQUEST_S)

    def _left(self, nbytes: int) -> float:
        """Return the seconds that are left, after so many bytes more."""
        known = limits.current()
        with self._lock:
            self._clock()
            self._used_s = max(0.0, self._used_s - nbytes / known.fetch_rate)
            return known.fetch_seconds - self._used_s

    def _clock(self) -> None:
        now = time.monotonic()
        passed, self._at = now - self._at, now
        if self._waiting:
            self._used_s += min(passed, _LONGEST_TICK_S)
        else:
            self._used_s = max(0.0, self._used_s - passed)


def deadline_error(place: str) -> DeadlineError:
    """Return the error for a server that keeps the command waiting."""
    known = limits.current()
    return DeadlineError(
        "the server does not answer in time",
        file=place,
        expected=f"at most {known.fetch_seconds} s of waiting, {known.fetch_rate:,} bytes/s or more",
        hint="ckpttool --limit fetch_seconds=N ... waits longer",
    )


def _start_request(nbytes: int, job: Job[Result]) -> tuple[RemoteRequest, Future[Result]]:
    """Start the job on the event loop, in the context of its caller; cancelling the future ends the task."""
    request = RemoteRequest(nbytes)
    token = _REQUEST.set(request)
    try:
        return request, asyncio.run_coroutine_threadsafe(job(), event_loop())
    finally:
        _REQUEST.reset(token)


class _DaemonExecutor(ThreadPoolExecutor):
    """Daemon threads for an event loop: the program does not wait for them when it ends."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on a thread of its own."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # raised again by whoever waits for the result
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name="ckpttool-look-up", daemon=True).start()
        return future


def event_loop() -> asyncio.AbstractEventLoop:
    """Return fsspec's event loop, on which all stores send their requests."""
    from fsspec.asyn import get_loop

    return _with_daemon_threads(get_loop())


@functools.lru_cache(maxsize=1)
def _with_daemon_threads(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    # Python waits at its end for threads of the loop's own executor, however long a name's look-up takes.
    loop.set_default_executor(_DaemonExecutor(max_workers=1))
    return loop


# What all stores have in common: each question is asked once, small reads are gathered, large ones are not.

_AT_ONCE = 16
# Part of the message where reading is forbidden: the same server may permit other files.
PERMITS_NOT = "permits no reading"


class RemoteServer(Protocol):
    """A server, without any memory of earlier answers."""

    async def look(self, place: str) -> StoreEntry:
        """Return what is there now; raise NotFoundError if the server does not tell."""
        ...

    async def names(self, place: str, most: int) -> list[str]:
        """Return the names in a folder; what is more than `most` may be left out."""
        ...

    async def part(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes, with one request; raise ChangedError if the file is another one."""
        ...


class CachingStore:
    """A store in front of a server (filesystem.Store)."""

    def __init__(
        self, server: RemoteServer, copies: LocalCopyCache | None = None, allowance: WaitBudget | None = None
    ) -> None:
        """Start with empty caches; a server that keeps files itself passes its `copies`."""
        self.allowance = allowance or WaitBudget()
        self.blocks = BlockCache(self._part)
        self.server = server
        self._copies = copies or LocalCopyCache()

    def look(self, place: str) -> StoreEntry:
        """Return what is there, as it was when this session asked first."""
        if _leads_out(place):
            return None
        known = filesystem.current_session()
        if place not in known.found:
            parent, _, name = place.rpartition("/")
            beside = known.names.get(parent)
            absent = beside is not None and beside != [] and name not in beside
            known.found[place] = None if absent else self._ask(place, known.refused)
        return known.found[place]

    def _ask(self, place: str, refused: dict[str, NotFoundError]) -> StoreEntry:
        if place in refused:  # trying again, as libraries do, takes many seconds
            raise refused[place]
        try:
            return self.allowance.run(place, 0, functools.partial(self.server.look, place))
        except DeadlineError:
            raise
        except NotFoundError as error:
            refused[place] = error
            raise

    def names(self, place: str) -> list[str]:
        """Return the names in a folder, as they were when this session asked first.

        Raise LimitError if there are too many.
        """
        if _leads_out(place):
            return []
        known, most = filesystem.current_session(), limits.current().folder_files
        if place not in known.names:
            for beside, error in known.refused.items():
                if os.path.dirname(beside) == place and PERMITS_NOT not in error.message:
                    raise error  # a server that cannot be reached is not asked once more
            found = self.allowance.run(place, 0, functools.partial(self.server.names, place, most + 1))
            known.names[place] = [name for name in found if _is_name(name)] if len(found) <= most else None
        names = known.names[place]
        if names is None:
            raise limits.limit_error("folder_files", "the folder has too many names", None, file=place)
        return names

    def read(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes."""
        if not length:
            return b""
        here = self._copies.read(place, seen, offset, length)
        return self.blocks.read(place, seen, offset, length) if here is None else here

    def together(self, place: str, seen: FileStat, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many parts; sixteen requests are on their way at a time."""
        if len(parts) < 2:
            return [self.read(place, seen, *part) for part in parts]
        jobs = ((part[1], functools.partial(self._one, place, seen, *part)) for part in parts)
        return list(self.allowance.run_all(place, jobs, _AT_ONCE))

    async def _one(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        here = self._copies.read(place, seen, offset, length)
        return await self.server.part(place, seen, offset, length) if here is None else here

    def _part(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        part = functools.partial(self.server.part, place, seen, offset, length)
        return self.allowance.run(place, length, part)

    def local(self, place: str, seen: FileStat, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        note = (
            f"{format_size(length)} of {urls.display_url(place)} were fetched into a temporary file: "
            "the format is read from a local one"
        )
        read = functools.partial(self._part, place, seen)
        return self._copies.descriptor(place, seen, (offset, length), read, note)


def version_tag(version: str) -> int:
    """Return the tag of a version that a server names: a number, as an inode is one."""
    return int.from_bytes(hashlib.sha256(version.encode("utf-8", "surrogateescape")).digest()[:7], "big")


def _leads_out(place: str) -> bool:
    """Return whether a name in the place leads upwards, as a server could understand it."""
    steps = unquote(place).split("://", 1)[-1].split("/")[1:]  # behind the host or the bucket
    return os.pardir in steps or os.curdir in steps or "\0" in place


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (os.curdir, os.pardir)
