"""Remote checkpoints: schemes, blocks, deadlines, local copies and archives."""

from __future__ import annotations

import asyncio
import contextlib
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
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.parse import unquote

from ckpttool.core import atomic_write, filesystem, limits, urls
from ckpttool.core.errors import DeadlineError, MissingExtraError, NotFoundError, UsageError, suggest_choice
from ckpttool.core.filesystem import FileStat, LocalCopyCache, StoreEntry
from ckpttool.core.plugins import STORES
from ckpttool.core.text import format_size

if TYPE_CHECKING:
    from ckpttool.core.remote_uploads import Upload, UploadStream


def mount(text: str) -> str:
    """Mount a URL, with everything beside and under it; return its location.

    No request is sent yet. Raise UsageError for a URL without a location, MissingExtraError when a library is
    missing; a store's libraries are imported here.
    """
    chain = urls.normalize_chain(text)
    if chain is None:
        raise UsageError(
            "the URL does not name the archive",
            file=text,
            hint="name both, e.g. zip://inner/ckpt-1::/path/archive.zip",
        )
    outermost, *inner = urls.split_chain(chain)
    location = _mount_link(outermost)
    for link in inner:
        location = _store_class(link)(link, location)
    return location


def _mount_link(link: str) -> str:
    """Return the location of a plain URL or of a local path."""
    scheme, colon, rest = link.partition("://")
    if not colon or not urls.is_url(link):
        return link
    scheme = scheme.lower()
    if scheme in ("file", "local"):
        return unquote(rest.removeprefix("localhost"))
    if scheme not in STORES or scheme in ("zip", "tar"):
        known = (*STORES, "file")
        raise UsageError(f"unknown URL scheme {scheme!r}", file=link, hint=suggest_choice(scheme, known))
    if not rest.strip("/"):
        raise UsageError(
            "the URL has no location after its scheme", file=link, hint=f"e.g. {scheme}://PLACE/agent.pt"
        )
    return _store_class(link)(f"{scheme}://{rest}", "")


def _store_class(link: str) -> Callable[[str, str], str]:
    """Return the store class for a link; raise MissingExtraError if a library is missing."""
    try:
        store = STORES[link.partition("://")[0].lower()].load()
    except MissingExtraError as error:
        error.located(file=link)
        raise
    mount_link: Callable[[str, str], str] = store.mount
    return mount_link


BLOCK = 16 << 10
# Size of the first request of a file: it covers most headers and indexes.
HEAD = 64 << 10
_LARGE = 1 << 20
_AHEAD = (4 << 20) // BLOCK
_KEPT = (32 << 20) // BLOCK

Fetch = Callable[[str, FileStat, int, int], bytes]


class BlockCache:
    """Cache of the most recently read blocks of all files of a store.

    A sequential read fetches increasing amounts ahead; any other read fetches only its own blocks, so random
    access to a large file transfers little.
    """

    def __init__(self, fetch: Fetch) -> None:
        """Fetch missing bytes by `fetch(place, seen, offset, length)`."""
        self._fetch = fetch
        self._kept: OrderedDict[tuple[str, FileStat, int], bytes] = OrderedDict()
        self._ahead: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    def read(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return the bytes; large reads are fetched directly and not cached."""
        if length > _LARGE:
            return self._fetch(location, stat, offset, length)
        first, last = offset // BLOCK, (offset + length - 1) // BLOCK
        blocks = [self._block(location, stat, number) for number in range(first, last + 1)]
        if None in blocks:
            start = first + blocks.index(None)
            data = self._fetched(location, stat, start, last + 1)
            blocks[start - first :] = [data]
        joined = b"".join(block for block in blocks if block is not None)
        return joined[offset - first * BLOCK :][:length]

    def keep(self, location: str, stat: FileStat, offset: int, data: bytes) -> None:
        """Cache bytes from the start of a block; drop an incomplete block, except at the end of the file."""
        with self._lock:
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                if len(block) == BLOCK or offset + at + len(block) == stat.size:
                    self._kept[location, stat, (offset + at) // BLOCK] = block
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)

    def _block(self, location: str, stat: FileStat, number: int) -> bytes | None:
        with self._lock:
            block = self._kept.get((location, stat, number))
            if block is not None:
                self._kept.move_to_end((location, stat, number))
            return block

    def _fetched(self, location: str, stat: FileStat, start: int, stop: int) -> bytes:
        with self._lock:
            following, ahead = self._ahead.get(location, (-1, 0))
            ahead = min(2 * max(ahead, stop - start), _AHEAD) if start == following else 0
            stop = min(max(stop, start + ahead), -(-stat.size // BLOCK))
            self._ahead[location] = (stop, ahead)
        at = start * BLOCK
        data = self._fetch(location, stat, at, min(stop * BLOCK, stat.size) - at)
        self.keep(location, stat, at, data)
        return data


# Seconds returned by a finished request, so that many quick ones never add up to a slow server.
_REQUEST_S = 1.0
# Bytes beyond the requested range that count as progress: listings, API responses.
_SPARE = 256 << 10
_TICK_S = 0.1
# Longest time between two clock checks: a longer one means that this process was stopped (Ctrl-Z).
_LONGEST_TICK_S = 1.0

Result = TypeVar("Result")
Job = Callable[[], Coroutine[Any, Any, Result]]


class ResponseBody(Protocol):
    """The body of a response while it arrives (aiohttp.StreamReader)."""

    total_bytes: int


class RemoteRequest:
    """Progress of one request: the bytes expected and received."""

    def __init__(self, nbytes: int) -> None:
        """Expect this many bytes of a file."""
        self._due = nbytes + _SPARE
        self._bodies: list[ResponseBody] = []
        self._counted = 0
        # Set to fail now, however often a library would try again.
        self.failure: NotFoundError | None = None

    def expect(self, nbytes: int) -> None:
        """Expect more bytes than were known when the request began."""
        self._due += nbytes

    def watch(self, body: ResponseBody) -> None:
        """Count the bytes received for this body."""
        self._bodies.append(body)

    def progress(self) -> int:
        """Return the number of expected bytes that arrived since the last call."""
        arrived = min(sum(body.total_bytes for body in self._bodies), self._due)
        new, self._counted = arrived - self._counted, arrived
        return new


_REQUEST: contextvars.ContextVar[RemoteRequest | None] = contextvars.ContextVar(
    "ckpttool_request", default=None
)


def current_request() -> RemoteRequest:
    """Return the current request."""
    return _REQUEST.get() or RemoteRequest(0)


class WaitBudget:
    """Seconds for which a server may keep a command waiting (limit `fetch_seconds`).

    Waiting uses them up. Each finished request gives one second back, as does every `fetch_rate` bytes and
    each second without a request. A server without remaining seconds fails every request at once. Every
    request, from the DNS look-up to the last byte, with its redirects, retries and pages, is a task on
    fsspec's event loop while the caller watches the clock. So no stage and no library can block a command,
    and Ctrl-C ends it at once: the loop and its look-ups run on daemon threads.
    """

    def __init__(self) -> None:
        """Start with a full budget."""
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._at = time.monotonic()
        self._waiting = 0

    def run(self, location: str, nbytes: int, job: Job[Result]) -> Result:
        """Run the job, which fetches `nbytes` of `location`, and return its result; raise DeadlineError."""
        return next(self.run_all(location, [(nbytes, job)], 1))

    def run_all(self, path: str, jobs: Iterable[tuple[int, Job[Result]]], at_once: int) -> Iterator[Result]:
        """Yield results of jobs in their order, running `at_once` of them in parallel."""
        running: deque[tuple[RemoteRequest, Future[Result]]] = deque()
        try:
            for nbytes, job in jobs:
                if self._left(0) <= 0:
                    raise deadline_error(path)
                running.append(_start_request(nbytes, job))
                if len(running) == at_once:
                    yield self._result(path, running)
            while running:
                yield self._result(path, running)
        finally:
            for _, unfinished in running:
                unfinished.cancel()

    def _result(self, location: str, running: deque[tuple[RemoteRequest, Future[Result]]]) -> Result:
        """Return the result of the first request; bytes for the other requests count as progress too."""
        request, future = running[0]
        self._begin()
        try:
            while not future.done():
                left = self._left(sum(task.progress() for task, _ in running))
                if left <= 0:
                    raise deadline_error(location)
                if request.failure is not None:
                    raise request.failure.located(file=location)
                if atomic_write.is_abandoned():
                    raise DeadlineError("the command ended before the server responded", file=location)
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
        """Return the remaining seconds, after that many more bytes."""
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


def deadline_error(location: str) -> DeadlineError:
    """Return the error for a server that exceeds the waiting time."""
    known = limits.current()
    return DeadlineError(
        "the server did not respond in time",
        file=location,
        expected=f"at most {known.fetch_seconds} s of waiting, at least {known.fetch_rate:,} bytes/s",
        hint="to wait longer: ckpttool --limit fetch_seconds=N ...",
    )


def _start_request(nbytes: int, job: Job[Result]) -> tuple[RemoteRequest, Future[Result]]:
    """Start the job on the event loop, in the caller's context; cancelling the future ends the task."""
    request = RemoteRequest(nbytes)
    token = _REQUEST.set(request)
    try:
        return request, asyncio.run_coroutine_threadsafe(job(), event_loop())
    finally:
        _REQUEST.reset(token)


class _DaemonExecutor(ThreadPoolExecutor):
    """Daemon threads for an event loop: the program does not wait for them at exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on a new thread."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  # raised again where the result is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=work, name="ckpttool-look-up", daemon=True).start()
        return future


def event_loop() -> asyncio.AbstractEventLoop:
    """Return fsspec's event loop, which sends the requests of all stores."""
    from fsspec.asyn import get_loop

    return _with_daemon_threads(get_loop())


@functools.lru_cache(maxsize=1)
def _with_daemon_threads(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    # At exit, Python waits for threads of the loop's own executor, however long a DNS look-up takes.
    loop.set_default_executor(_DaemonExecutor(max_workers=1))
    return loop


_AT_ONCE = 16
# Part of the message where reading is forbidden: the same server may allow other files.
PERMITS_NOT = "denies read access"


class RemoteServer(Protocol):
    """A server, without any cache."""

    async def look(self, location: str) -> StoreEntry:
        """Return the current entry; raise NotFoundError if the server does not report it."""
        ...

    async def names(self, location: str, most: int) -> list[str]:
        """Return the names in a folder; names beyond `most` may be omitted."""
        ...

    async def part(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes, with one request; raise ChangedError if the file changed."""
        ...


class WritableServer(RemoteServer, Protocol):
    """A server to which objects can be written."""

    def upload(self, location: str) -> Upload:
        """Return a new upload of an object; no request is sent yet."""
        ...

    async def remove(self, location: str) -> None:
        """Remove an object, which may be missing."""
        ...

    def explain_write(self, location: str) -> AbstractContextManager[None]:
        """Translate the library's exceptions while it writes."""
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

    def look(self, location: str) -> StoreEntry:
        """Return the entry as it was at the first request of this session."""
        if _leads_out(location):
            return None
        known = filesystem.current_session()
        if location not in known.entries:
            parent, _, name = location.rpartition("/")
            beside = known.names.get(parent)
            absent = beside is not None and beside != [] and name not in beside
            known.entries[location] = None if absent else self._ask(location, known.refused)
        return known.entries[location]

    def _ask(self, location: str, refused: dict[str, NotFoundError]) -> StoreEntry:
        if location in refused:  # a retry, as in the libraries, takes many seconds
            raise refused[location]
        try:
            return self.allowance.run(location, 0, functools.partial(self.server.look, location))
        except DeadlineError:
            raise
        except NotFoundError as error:
            refused[location] = error
            raise

    def names(self, path: str) -> list[str]:
        """Return the names in a folder as they were at the first request of this session.

        Raise LimitError if there are too many.
        """
        if _leads_out(path):
            return []
        known, most = filesystem.current_session(), limits.current().folder_files
        if path not in known.names:
            for beside, error in known.refused.items():
                if os.path.dirname(beside) == path and PERMITS_NOT not in error.message:
                    raise error  # an unreachable server is not contacted again
            listed = self.allowance.run(path, 0, functools.partial(self.server.names, path, most + 1))
            known.names[path] = [name for name in listed if _is_name(name)] if len(listed) <= most else None
        names = known.names[path]
        if names is None:
            raise limits.limit_error("folder_files", "the folder has too many entries", None, file=path)
        return names

    def read(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes."""
        if not length:
            return b""
        here = self._copies.read(location, stat, offset, length)
        return self.blocks.read(location, stat, offset, length) if here is None else here

    def together(self, location: str, stat: FileStat, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many parts, with sixteen parallel requests."""
        if len(parts) < 2:
            return [self.read(location, stat, *part) for part in parts]
        jobs = ((part[1], functools.partial(self._one, location, stat, *part)) for part in parts)
        return list(self.allowance.run_all(location, jobs, _AT_ONCE))

    async def _one(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        here = self._copies.read(location, stat, offset, length)
        return await self.server.part(location, stat, offset, length) if here is None else here

    def _part(self, location: str, stat: FileStat, offset: int, length: int) -> bytes:
        part = functools.partial(self.server.part, location, stat, offset, length)
        return self.allowance.run(location, length, part)

    def local(self, location: str, stat: FileStat, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        note = (
            f"fetched {format_size(length)} of {urls.display_url(location)} into a temporary file: this "
            "format can be read only from a local file"
        )
        read = functools.partial(self._part, location, stat)
        return self._copies.descriptor(location, stat, (offset, length), read, note)

    @contextlib.contextmanager
    def upload(self, location: str, nbytes: int) -> Iterator[UploadStream]:
        """Yield a stream that fills an object, which is visible when the block ends without an error."""
        from ckpttool.core.remote_uploads import open_upload

        server = cast(WritableServer, self.server)
        run = functools.partial(self._write, server, location)
        with open_upload(server.upload(location), location, nbytes, run) as stream:
            yield stream
        self._forget(location)

    def remove(self, location: str) -> None:
        """Remove an object, which may be missing."""
        server = cast(WritableServer, self.server)
        self._write(server, location, functools.partial(server.remove, location))
        self._forget(location)

    def _write(self, server: WritableServer, location: str, job: Job[Result]) -> Result:
        async def translated() -> Result:
            with server.explain_write(location):
                return await job()

        return self.allowance.run(location, 0, translated)

    def _forget(self, location: str) -> None:
        """Look anew at an object that this session has written, and at the folders that it is in."""
        known, folder = filesystem.current_session(), location
        while folder.count("/") > 2:
            for answers in (known.entries, known.refused, known.names):
                answers.pop(folder, None)
            folder = os.path.dirname(folder)


def version_tag(version: str) -> int:
    """Return the tag of a server's version string, as a number like an inode."""
    return int.from_bytes(hashlib.sha256(version.encode("utf-8", "surrogateescape")).digest()[:7], "big")


def _leads_out(location: str) -> bool:
    """Return whether a name in the location leads upwards, as a server could interpret it."""
    steps = unquote(location).split("://", 1)[-1].split("/")[1:]  # after the host or the bucket
    return os.pardir in steps or os.curdir in steps or "\0" in location


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (os.curdir, os.pardir)
