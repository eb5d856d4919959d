"""How long servers may keep a command waiting: one allowance for each server, whatever library reads it.

Every request, from the look-up of the host's name to the last byte, with its redirects, retries and pages,
runs on a thread of its own while the caller watches the clock. So no stage and no library can hold a command,
and Ctrl-C ends it at once: nothing waits for that thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, Protocol, TypeVar

from ckpttool import behind, limits
from ckpttool.errors import DeadlineError

# Seconds given back by a finished request, so that many quick ones never add up to a slow server.
_REQUEST_S = 1.0
# Bytes beside those of the thing asked for that count as progress: listings, answers of an API.
_SPARE = 256 << 10
_TICK_S = 0.1
# What passes between two looks at the clock at most: more, and it was this process that stood still (Ctrl-Z).
_LONGEST_TICK_S = 1.0

Result = TypeVar("Result")


class Body(Protocol):
    """The body of an answer while it arrives (aiohttp.StreamReader)."""

    total_bytes: int


class Request:
    """One request under way: what it waits for, and what has arrived of it."""

    def __init__(self, nbytes: int) -> None:
        """Expect so many bytes of a file."""
        self._due = nbytes + _SPARE
        self._bodies: list[Body] = []
        self._counted = 0
        self._abandoned = False
        self._cancels: list[Callable[[], object]] = []

    def expect(self, nbytes: int) -> None:
        """Expect so many bytes more than was known when the request began."""
        self._due += nbytes

    def watch(self, body: Body) -> None:
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


_REQUEST: contextvars.ContextVar[Request | None] = contextvars.ContextVar("ckpttool_request", default=None)


def request() -> Request:
    """Return the request that this code runs for."""
    return _REQUEST.get() or Request(0)


class Allowance:
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
        running: deque[tuple[Request, Future[Result]]] = deque()
        try:
            for nbytes, job in jobs:
                if self._left(0) <= 0:
                    raise stalled(place)
                running.append(_started(nbytes, job))
                if len(running) == at_once:
                    yield self._result(place, running)
            while running:
                yield self._result(place, running)
        finally:
            for unfinished, _ in running:
                unfinished.abandon()

    def _result(self, place: str, running: deque[tuple[Request, Future[Result]]]) -> Result:
        """Return the result of the first request; what arrives for the others is progress too."""
        _, future = running[0]
        self._begin()
        try:
            while not future.done():
                left = self._left(sum(each.progress() for each, _ in running))
                if left <= 0:
                    raise stalled(place)
                if behind.abandoned():
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


def stalled(place: str) -> DeadlineError:
    """Return the error for a server that keeps the command waiting."""
    known = limits.current()
    return DeadlineError(
        "the server does not answer in time",
        file=place,
        expected=f"at most {known.fetch_seconds} s of waiting, {known.fetch_rate:,} bytes/s or more",
        hint="ckpttool --limit fetch_seconds=N ... waits longer",
    )


def _started(nbytes: int, job: Callable[[], Result]) -> tuple[Request, Future[Result]]:
    request = Request(nbytes)
    context = contextvars.copy_context()
    context.run(_REQUEST.set, request)
    return request, _on_own_thread(functools.partial(context.run, job))


def _on_own_thread(job: Callable[[], Result]) -> Future[Result]:
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


class _Daemons(ThreadPoolExecutor):
    """Threads for an event loop that do not hold the end of the program, as those of the library do."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the function on a thread of its own."""
        return _on_own_thread(functools.partial(fn, *args, **kwargs))


def prepare_loop() -> None:
    """Let fsspec's event loop, on which all stores send their requests, look up names on threads of ours.

    Python waits at its end for those of the loop's own executor, however long a look-up takes.
    """
    from fsspec.asyn import get_loop

    get_loop().set_default_executor(_Daemons(max_workers=1))
