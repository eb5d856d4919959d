"""Remote checkpoints: schemes, blocks, deadlines, local copies and archives."""

from __future__ import annotations

import asyncio
import bz2
import contextvars
import functools
import gzip
import hashlib
import importlib
import importlib.util
import io
import lzma
import os
import posixpath
import tarfile
import tempfile
import threading
import time
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import IO, Any, NamedTuple, Protocol, TypeVar, cast
from urllib.parse import unquote

from ckpttool.core import atomic_write, filesystem, limits, urls
from ckpttool.core.errors import (
    ChangedError,
    DeadlineError,
    FormatError,
    MissingExtraError,
    NotFoundError,
    TruncatedError,
    UsageError,
    suggest_choice,
)
from ckpttool.core.filesystem import FileStat, StoreEntry
from ckpttool.core.source import DeflatedSpan, File, Span
from ckpttool.core.text import format_size
from ckpttool.core.urls import display_url
from ckpttool.encodings import archives

# Places elsewhere that are read by parts: web servers, object stores, and members of archives.
#
# The only home of fsspec. Nothing here is imported before somebody names a URL; what each store needs is
# imported when it is mounted.


class _Scheme(NamedTuple):
    """The module and class of a store, the libraries that it needs, and the extra that installs them."""

    module: str
    store: str
    requires: tuple[str, ...]
    extra: str


_WEB = _Scheme("ckpttool.core.remote_sites", "Web", ("fsspec", "aiohttp"), "remote")
_S3 = _Scheme("ckpttool.core.remote_sites", "S3", ("fsspec", "s3fs"), "s3")
_GS = _Scheme("ckpttool.core.remote_sites", "GS", ("fsspec", "gcsfs"), "gs")
_HF = _Scheme("ckpttool.core.remote_sites", "HF", ("fsspec", "aiohttp", "huggingface_hub"), "hf")
_MEMORY = _Scheme("ckpttool.core.remote_sites", "ObjectStore", ("fsspec",), "remote")
_SCHEMES = {
    "http": _WEB,
    "https": _WEB,
    "s3": _S3,
    "s3a": _S3,
    "gs": _GS,
    "gcs": _GS,
    "hf": _HF,
    "memory": _MEMORY,
}
_ARCHIVES = ("zip", "tar")


def mount(text: str) -> str:
    """Make what a URL means readable, with what lies beside and below it; return the place of it.

    Nothing is asked of a server yet. Raise UsageError for a URL that says no place, MissingExtraError when a
    library is missing.
    """
    turned = urls.normalize_chain(text)
    if turned is None:
        raise UsageError(
            "the archive is not named", file=text, hint="zip://inner/ckpt-1::/path/archive.zip names both"
        )
    outermost, *inner = urls.split_chain(turned)
    place = _mount_link(outermost)
    for link in inner:
        place = _mount_archive(place, link)
    return place


def _mount_link(link: str) -> str:
    """Return the place of a plain URL or of a local path."""
    scheme, colon, rest = link.partition("://")
    if not colon or not urls.is_url(link):
        return link
    scheme = scheme.lower()
    if scheme in ("file", "local"):
        return unquote(rest.removeprefix("localhost"))
    known = _SCHEMES.get(scheme)
    if known is None:
        every = (*_SCHEMES, *_ARCHIVES, "file")
        raise UsageError(f"there is no scheme {scheme!r}", file=link, hint=suggest_choice(scheme, every))
    if not rest.strip("/"):
        raise UsageError("the URL names no place", file=link)
    missing = [name for name in known.requires if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{scheme}:// needs {', '.join(missing)}, which is not installed",
            file=link,
            hint=f"pip install 'ckpttool[{known.extra}]'",
        )
    store = getattr(importlib.import_module(known.module), known.store)
    place: str = store.mount(f"{scheme}://{rest}")
    return place


def _mount_archive(outer: str, link: str) -> str:
    """Return the place of an archive's member; the archive may lie anywhere itself."""
    kind, _, inner = link.partition("://")
    start = f"{outer}::{kind}://{urls.TOP}"
    known = filesystem.find_store(start)
    if not (isinstance(known, ArchiveStore) and known.start == start):  # what was listed, or unpacked, stays
        filesystem.mount_store(start + "/", ArchiveStore(outer, kind))
    inner = inner.removeprefix(urls.TOP + "/").strip("/")
    return f"{start}/{inner}" if inner not in ("", urls.TOP) else start


# Nameless local files for what cannot be read by parts: they are gone when the program is.

_MOST = 16
_PIECE = 8 << 20

Range = tuple[str, FileStat, int, int]


class ScratchFile:
    """A local file without a name, which goes when nobody has this."""

    def __init__(self) -> None:
        """Make it, where temporary files are made."""
        with tempfile.TemporaryFile() as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)

    def put(self, offset: int, data: bytes) -> None:
        """Write all of the bytes at the offset."""
        left = memoryview(data)
        while left:
            done = os.pwrite(self.descriptor, left, offset)
            left, offset = left[done:], offset + done


class LocalCopyCache:
    """The last few files that were fetched, each with the range of its original that it holds."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._kept: OrderedDict[Range, ScratchFile] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, place: str, seen: FileStat, offset: int, length: int) -> ScratchFile | None:
        """Return a file that holds these bytes at their offset, None if there is none."""
        with self._lock:
            for (name, one, start, held), room in self._kept.items():
                if name == place and one == seen and start <= offset and offset + length <= start + held:
                    return room
        return None

    def read(self, place: str, seen: FileStat, offset: int, length: int) -> bytes | None:
        """Return the bytes if they are here."""
        room = self.find(place, seen, offset, length)
        return None if room is None else os.pread(room.descriptor, length, offset)

    def add(self, place: str, seen: FileStat, offset: int, length: int, data: Iterable[bytes]) -> ScratchFile:
        """Write what arrives into a new file, at its offset, and return it.

        Raise TruncatedError unless there are exactly `length` bytes.
        """
        room = ScratchFile()
        done, watch = 0, filesystem.watch.get()
        for piece in data:
            if done + len(piece) <= length:
                room.put(offset + done, piece)
            done += len(piece)
            if done > length:
                break
            if watch is not None:
                watch(display_url(place), done, length)
        if done != length:
            found = "more" if done > length else f"{done:,}"
            raise TruncatedError(
                "not as many bytes came as were told", file=place, expected=f"{length:,}", found=found
            )
        self.keep(place, seen, offset, length, room)
        return room

    def keep(self, place: str, seen: FileStat, offset: int, length: int, room: ScratchFile) -> None:
        """Keep a file that holds these bytes at their offset."""
        with self._lock:
            self._kept[place, seen, offset, length] = room
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)


def require_fetchable(place: str, length: int, why: str) -> None:
    """Raise LimitError if so many bytes are not fetched without being asked for; `why` is a clause."""
    if length > limits.current().fetched_bytes:
        raise limits.limit_error(
            "fetched_bytes", f"{why}: all of it would have to be fetched", length, file=place
        )


def split_range(length: int) -> Iterable[tuple[int, int]]:
    """Give the parts (offset, length) in which so many bytes are fetched."""
    return ((at, min(_PIECE, length - at)) for at in range(0, length, _PIECE))


# Members of zip and tar archives as files, wherever the archive lies.
#
# What is stored as it is gets read in its place, by parts; what is compressed is unpacked once, as far as the
# limits allow. Nothing is ever extracted under a name that an archive tells.


class UnpackedSpan(NamedTuple):
    """Bytes of a local file that holds what the archive `of` was unpacked to."""

    of: File
    room: ScratchFile
    offset: int
    length: int


class ArchiveMember(NamedTuple):
    """A plain file of an archive: its unpacked size in bytes, and where these are."""

    size: int
    source: Span | DeflatedSpan | UnpackedSpan


class ArchiveStore:
    """The files of one archive by their paths in it (places.Store)."""

    def __init__(self, outer: str, kind: str) -> None:
        """Read the archive at the place `outer`, a "zip" or a "tar", once something is asked."""
        self._outer, self._kind = outer, kind
        self.start = f"{outer}::{kind}://{urls.TOP}"
        self._listed: tuple[File, dict[str, ArchiveMember]] | None = None
        self._copies = LocalCopyCache()

    def look(self, place: str) -> StoreEntry:
        """Return what is there; raise NotFoundError or FormatError if the archive cannot be listed."""
        members = self._members(self._file())
        name = self._name(place)
        if name in members:
            return self._seen(members[name])
        below = f"{name}/" if name else ""
        return "folder" if any(each.startswith(below) for each in members) else None

    def names(self, place: str) -> list[str]:
        """Return the names in a folder of the archive: as many as the archive may have members."""
        name = self._name(place)
        below = f"{name}/" if name else ""
        members = self._members(self._file())
        return sorted({each[len(below) :].partition("/")[0] for each in members if each.startswith(below)})

    def read(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return these bytes; raise ChangedError if the archive is not the one that was listed."""
        source = self._same(place, seen).source
        if isinstance(source, Span):
            return source.file.read(source.offset + offset, length)
        if isinstance(source, UnpackedSpan):
            if filesystem.find_store(source.of.path) is None:
                source.of.require_unchanged()
            return os.pread(source.room.descriptor, length, source.offset + offset)
        found = self._copies.read(place, seen, offset, length)
        if found is None:
            data = source.read()
            self._copies.add(place, seen, 0, len(data), [data])
            found = data[offset : offset + length]
        return found

    def together(self, place: str, seen: FileStat, parts: list[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of many parts."""
        source = self._same(place, seen).source
        if isinstance(source, Span):
            return list(source.file.together((source.offset + at, length) for at, length in parts))
        return [self.read(place, seen, *part) for part in parts]

    def local(self, place: str, seen: FileStat, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        found = self._copies.find(place, seen, offset, length)
        return os.dup((found or self._copied(place, seen, offset, length)).descriptor)

    def _copied(self, place: str, seen: FileStat, offset: int, length: int) -> ScratchFile:
        if filesystem.find_store(self._outer) is not None:
            why = "the format is read from a local file"
            require_fetchable(place, length, why)
            filesystem.add_note(f"{format_size(length)} of {urls.display_url(place)} were fetched: {why}")
        data = (self.read(place, seen, offset + at, part) for at, part in split_range(length))
        return self._copies.add(place, seen, offset, length, data)

    def _same(self, place: str, seen: FileStat) -> ArchiveMember:
        if self._listed is None:
            self._members(self._file())
        members = self._listed[1] if self._listed is not None else {}
        member = members.get(self._name(place))
        if member is None or self._seen(member) != seen:
            raise ChangedError("the archive changed after it was listed", file=place)
        return member

    def _file(self) -> File:
        if filesystem.path_kind(self._outer) == "special":
            raise NotFoundError("a device, socket or pipe is not opened", file=self._outer)
        return File.stamp(self._outer)

    def _name(self, place: str) -> str:
        return place[len(self.start) :].strip("/")

    def _seen(self, member: ArchiveMember) -> FileStat:
        source = member.source.base if isinstance(member.source, DeflatedSpan) else member.source
        file = source.of if isinstance(source, UnpackedSpan) else source.file
        # Whole numbers have the same hash in every process.
        return FileStat(member.size, file.mtime_ns, hash((*file[1:], source.offset, member.size)))

    def _members(self, file: File) -> dict[str, ArchiveMember]:
        if self._listed is None or self._listed[0] != file:
            self._listed = (file, _list_zip_members(file) if self._kind == "zip" else _list_tar_members(file))
        return self._listed[1]


def _list_zip_members(file: File) -> dict[str, ArchiveMember]:
    archive = archives.read_zip(file)
    found: dict[str, ArchiveMember] = {}
    for name, member in archive.members.items():
        if not name.endswith("/") and (path := normalize_member(name)) is not None:
            found[path] = ArchiveMember(member.size, archive.source(name))
    return found


def _list_tar_members(file: File) -> dict[str, ArchiveMember]:

    found: dict[str, ArchiveMember] = {}
    listed = list_tarball(file)
    for name, offset, length in listed.members:
        if (path := normalize_member(name)) is None:
            continue
        if path in found:
            raise FormatError(f"two members are called {name[:200]!r}", file=file.path, offset=offset)
        if listed.unpacked is None:
            found[path] = ArchiveMember(length, Span(file, offset, length))
        else:
            found[path] = ArchiveMember(length, UnpackedSpan(file, listed.unpacked, offset, length))
    return found


def normalize_member(name: str) -> str | None:
    """Return a member's path from the archive's top; None for one that leads out of it."""
    path = posixpath.normpath(name)
    return None if path.startswith(("/", "../")) or path in (".", "..") or "\0" in path else path


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


# How long servers may keep a command waiting: one allowance for each server, whatever library reads it.
#
# Every request, from the look-up of the host's name to the last byte, with its redirects, retries and pages,
# runs on a thread of its own while the caller watches the clock. So no stage and no library can hold a
# command, and Ctrl-C ends it at once: nothing waits for that thread.

# Seconds given back by a finished request, so that many quick ones never add up to a slow server.
_REQUEST_S = 1.0
# Bytes beside those of the thing asked for that count as progress: listings, answers of an API.
_SPARE = 256 << 10
_TICK_S = 0.1
# What passes between two looks at the clock at most: more, and it was this process that stood still (Ctrl-Z).
_LONGEST_TICK_S = 1.0

Result = TypeVar("Result")


class ResponseBody(Protocol):
    """The body of an answer while it arrives (aiohttp.StreamReader)."""

    total_bytes: int


class RemoteRequest:
    """One request under way: what it waits for, and what has arrived of it."""

    def __init__(self, nbytes: int) -> None:
        """Expect so many bytes of a file."""
        self._due = nbytes + _SPARE
        self._bodies: list[ResponseBody] = []
        self._counted = 0
        self._abandoned = False
        self._cancels: list[Callable[[], object]] = []

    def expect(self, nbytes: int) -> None:
        """Expect so many bytes more than was known when the request began."""
        self._due += nbytes

    def watch(self, body: ResponseBody) -> None:
        """Count what arrives of this body."""
        self._bodies.append(body)

    def answer(self, coroutine: Coroutine[Any, Any, Result], loop: asyncio.AbstractEventLoop) -> Result:
        """Return what the coroutine returns on the loop; `abandon` ends it."""
        task = asyncio.run_coroutine_threadsafe(coroutine, loop)
        self._hold(task.cancel)
        return task.result()

    def hold(self) -> None:
        """Let `abandon` end the task that this runs in, which a library began: with its retries."""
        task = asyncio.current_task()
        if task is not None:
            self._hold(functools.partial(task.get_loop().call_soon_threadsafe, task.cancel))

    def _hold(self, cancel: Callable[[], object]) -> None:
        self._cancels.append(cancel)
        if self._abandoned:
            cancel()

    def abandon(self) -> None:
        """End what is still under way, as far as it can be."""
        self._abandoned = True
        for cancel in self._cancels:
            cancel()

    def progress(self) -> int:
        """Return the bytes that arrived since the last call, and were due."""
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
    each second in which nothing is waited for. After a server has used up all of them, a request to it fails
    at once until some are back.
    """

    def __init__(self) -> None:
        """Begin with nothing used."""
        self._lock = threading.Lock()
        self._used_s = 0.0
        self._at = time.monotonic()
        self._waiting = 0

    def run(self, place: str, nbytes: int, job: Callable[[], Result]) -> Result:
        """Return what the job returns, which fetches `nbytes` of `place`; raise DeadlineError."""
        return next(self.run_all(place, [(nbytes, job)], 1))

    def run_all(
        self, place: str, jobs: Iterable[tuple[int, Callable[[], Result]]], at_once: int
    ) -> Iterator[Result]:
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
            for unfinished, _ in running:
                unfinished.abandon()

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


def _start_request(nbytes: int, job: Callable[[], Result]) -> tuple[RemoteRequest, Future[Result]]:
    request = RemoteRequest(nbytes)
    context = contextvars.copy_context()
    context.run(_REQUEST.set, request)
    return request, _run_on_thread(functools.partial(context.run, job))


def _run_on_thread(job: Callable[[], Result]) -> Future[Result]:
    """Run the job on a thread that nothing waits for, neither a block's end nor the program's."""
    future: Future[Result] = Future()

    def work() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = job()
        except BaseException as error:  # noqa: BLE001  # raised again by whoever waits for the result
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=work, name="ckpttool-request", daemon=True).start()
    return future


class _DaemonExecutor(ThreadPoolExecutor):
    """Threads for an event loop that do not hold the end of the program, as those of the library do."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on a thread of its own."""
        return _run_on_thread(functools.partial(fn, *args, **kwargs))


def prepare_loop() -> None:
    """Let fsspec's event loop, on which all stores send their requests, look up names on threads of ours.

    Python waits at its end for those of the loop's own executor, however long a look-up takes.
    """
    from fsspec.asyn import get_loop

    get_loop().set_default_executor(_DaemonExecutor(max_workers=1))


# What all stores have in common: each thing is asked once, small reads are gathered, large ones are not.

_AT_ONCE = 16
# In what is said where somebody may not look: the same server may let others be seen.
PERMITS_NOT = "permits no reading"


class RemoteServer(Protocol):
    """Whoever answers: asked without any memory of earlier answers."""

    def look(self, place: str) -> StoreEntry:
        """Return what is there now; raise NotFoundError if nobody can tell."""
        ...

    def names(self, place: str, most: int) -> list[str]:
        """Return the names in a folder; what is more than `most` may be left out."""
        ...

    def part(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        """Return exactly these bytes, with one request; raise ChangedError if the file is another one."""
        ...


class CachingStore:
    """A store in front of a server (places.Store)."""

    def __init__(
        self, server: RemoteServer, copies: LocalCopyCache | None = None, allowance: WaitBudget | None = None
    ) -> None:
        """Remember nothing yet; a server that keeps files itself gives its `copies`."""
        self.allowance = allowance or WaitBudget()
        self.blocks = BlockCache(self._part)
        self.server = server
        self._copies = copies or LocalCopyCache()

    def look(self, place: str) -> StoreEntry:
        """Return what is there, as it was when this visit asked first."""
        if _leads_out(place):
            return None
        known = filesystem.current_session()
        if place not in known.found:
            parent, _, name = place.rpartition("/")
            beside = known.names.get(parent)
            absent = beside is not None and beside != [] and name not in beside
            known.found[place] = None if absent else self._looked(place, known.refused)
        return known.found[place]

    def _looked(self, place: str, refused: dict[str, NotFoundError]) -> StoreEntry:
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
        """Return the names in a folder, as they were when this visit asked first.

        Raise LimitError if there are too many.
        """
        if _leads_out(place):
            return []
        known, most = filesystem.current_session(), limits.current().folder_files
        if place not in known.names:
            for beside, error in known.refused.items():
                if os.path.dirname(beside) == place and PERMITS_NOT not in error.message:
                    raise error  # who cannot be reached is not asked once more
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

    def _one(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        here = self._copies.read(place, seen, offset, length)
        return self.server.part(place, seen, offset, length) if here is None else here

    def _part(self, place: str, seen: FileStat, offset: int, length: int) -> bytes:
        part = functools.partial(self.server.part, place, seen, offset, length)
        return self.allowance.run(place, length, part)

    def local(self, place: str, seen: FileStat, offset: int, length: int) -> int:
        """Return a descriptor of a local file with these bytes at their offset."""
        found = self._copies.find(place, seen, offset, length)
        return os.dup((found or self._fetched(place, seen, offset, length)).descriptor)

    def _fetched(self, place: str, seen: FileStat, offset: int, length: int) -> ScratchFile:
        require_fetchable(place, length, "the format is read from a local file")
        filesystem.add_note(
            f"{format_size(length)} of {urls.display_url(place)} were fetched into a temporary file: the format is read "  # noqa: E501
            "from a local one"
        )
        data = (self._part(place, seen, offset + at, part) for at, part in split_range(length))
        return self._copies.add(place, seen, offset, length, data)


def version_tag(told: str) -> int:
    """Return the tag of what a server tells about a version: a number, as an inode is one."""
    return int.from_bytes(hashlib.sha256(told.encode("utf-8", "surrogateescape")).digest()[:7], "big")


def _leads_out(place: str) -> bool:
    """Say whether a name in the place leads upwards, as a server could understand it."""
    steps = unquote(place).split("://", 1)[-1].split("/")[1:]  # behind the host or the bucket
    return os.pardir in steps or os.curdir in steps or "\0" in place


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and "\0" not in name and name not in (os.curdir, os.pardir)


# Where the plain files of a tar archive lie; one that is compressed is unpacked first, as a whole.
#
# The standard library's reader knows all the forms of long names; encodings/archives.py, which reads what
# PyTorch wrote before 2018, refuses them.

_Opener = Callable[[IO[bytes]], IO[bytes]]
# The first bytes of RFC 1952, of bzip2's and of xz's own documentation.
_COMPRESSED: dict[bytes, _Opener] = {
    b"\x1f\x8b": lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)),
    b"BZh": lambda raw: cast(IO[bytes], bz2.BZ2File(raw)),
    b"\xfd7zXZ\0": lambda raw: cast(IO[bytes], lzma.LZMAFile(raw)),  # noqa: SIM115  # closed by who opens it
}
_UNPACK_CHUNK = 4 << 20
_BROKEN = (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)


class TarListing(NamedTuple):
    """The names, offsets and lengths of plain files: in the archive, or in what it was unpacked to."""

    members: tuple[tuple[str, int, int], ...]
    unpacked: ScratchFile | None


def list_tarball(file: File) -> TarListing:
    """List the archive; raise FormatError if it is damaged, LimitError if it unpacks to too much."""
    start = file.read(0, min(8, file.size))
    opener = next((each for mark, each in _COMPRESSED.items() if start.startswith(mark)), None)
    try:
        unpacked = None if opener is None else _unpack_tarball(file, opener)
        if unpacked is None:
            return TarListing(tuple(_iter_tar_members(cast(IO[bytes], _RemoteFileStream(file)), file)), None)
        with open(os.dup(unpacked.descriptor), "rb") as stream:
            return TarListing(tuple(_iter_tar_members(stream, file)), unpacked)
    except _BROKEN as error:
        raise FormatError("the archive is damaged", file=file.path, found=str(error)[:120] or None) from error


def _iter_tar_members(stream: IO[bytes], file: File) -> Iterator[tuple[str, int, int]]:
    most = limits.current().members
    with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
        for number, member in enumerate(archive):
            if number >= most:
                raise limits.limit_error("members", "the archive has too many members", None, file=file.path)
            # Links are not followed, and nobody stores a checkpoint's file with holes.
            if member.isreg() and not member.issparse():
                yield member.name, member.offset_data, member.size


def _unpack_tarball(file: File, opener: _Opener) -> ScratchFile:
    """Return a nameless file with what the archive holds."""
    why = "the archive is compressed as a whole"
    if filesystem.find_store(file.path) is not None:
        require_fetchable(file.path, file.size, why)
        filesystem.add_note(
            f"{why}: all {format_size(file.size)} of {display_url(file.path)} were fetched and unpacked"
        )
    made = ScratchFile()
    done, watch = 0, filesystem.watch.get()
    raw = io.BufferedReader(_RemoteFileStream(file), _UNPACK_CHUNK)
    with opener(cast(IO[bytes], raw)) as stream:
        while piece := stream.read(_UNPACK_CHUNK):
            made.put(done, piece)
            done += len(piece)
            require_fetchable(file.path, done, f"{why}, and unpacks to very much")
            if watch is not None:
                watch(display_url(file.path), raw.tell(), file.size)
    return made


class _RemoteFileStream(io.RawIOBase):
    """A file as a stream."""

    def __init__(self, file: File) -> None:
        super().__init__()
        self._file, self._at = file, 0

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move."""
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        """Return where it is."""
        return self._at

    def read(self, length: int = -1) -> bytes:
        """Return up to `length` bytes; raise LimitError for more than a header of an archive has."""
        most = limits.current().text_bytes
        if not 0 <= length <= most:
            raise limits.limit_error(
                "text_bytes", "a header of the archive is too long", length, file=self._file.path
            )
        room = bytearray(length)
        return bytes(room[: self.readinto(room)])

    def readinto(self, room: Any) -> int:
        """Fill the room as far as the file goes."""
        length = max(0, min(len(room), self._file.size - self._at))
        if length:
            room[:length] = self._file.read(self._at, length)
        self._at += length
        return length
