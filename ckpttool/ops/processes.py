"""Groups are played by processes on this machine, each on cores of its own."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue

from ckpttool.agents.process import Process, module
from ckpttool.errors import CkpttoolError, UsageError, WorkerError
from ckpttool.ops import group_messages
from ckpttool.ops.groups import Group, Outcome, Spread
from ckpttool.ops.progress import Progress

# A group may take hours, and a process that dies is noticed at once.
PATIENCE_S = 1e6
STARTS = 2
AGAIN_S = 0.2


def on(jobs: int) -> Spread:
    """Return what plays groups in that many processes.

    A process that dies is started again once, with the group that it had: nothing of that was counted yet.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} processes cannot play")

    def spread(groups: Iterable[Group], _: Progress) -> Iterator[tuple[Group, Outcome]]:
        crew = _Crew(jobs)
        with ThreadPoolExecutor(jobs) as threads:
            try:
                yield from _spread(groups, crew, threads, jobs)
            finally:
                crew.stop()  # first, so that no thread waits for an answer any more

    return spread


def _spread(
    groups: Iterable[Group], crew: _Crew, threads: ThreadPoolExecutor, jobs: int
) -> Iterator[tuple[Group, Outcome]]:
    waiting: dict[Future[Outcome], Group] = {}
    for group in groups:
        waiting[threads.submit(crew.play, group)] = group
        # One more than can be played, so that a process that becomes free need not wait for a restore.
        while len(waiting) > jobs:
            yield from _finished(waiting)
    while waiting:
        yield from _finished(waiting)


def _finished(waiting: dict[Future[Outcome], Group]) -> Iterator[tuple[Group, Outcome]]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        yield waiting.pop(future), future.result()


class _Crew:
    """The processes; each starts when it gets its first group."""

    def __init__(self, jobs: int) -> None:
        self._stopping = threading.Event()
        self._all = [_Player(number, cores) for number, cores in enumerate(shares(jobs))]
        self._free: SimpleQueue[_Player] = SimpleQueue()
        for player in self._all:
            self._free.put(player)

    def play(self, group: Group) -> Outcome:
        """Let a process play the group; what kept it from doing so is every entrant's error."""
        player = self._free.get()
        try:
            for _ in range(STARTS):
                try:
                    return player.play(group)
                except WorkerError as error:
                    player.end()
                    failed: CkpttoolError = error
                if self._stopping.is_set():
                    break
        finally:
            self._free.put(player)
        return {entrant.checkpoint: failed for entrant in group.entrants}

    def stop(self) -> None:
        """End every process, whatever it does."""
        self._stopping.set()
        left = len(self._all)
        while left:
            for player in self._all:
                player.kill()  # again and again: one may just have been started
            with contextlib.suppress(Empty):
                self._free.get(timeout=AGAIN_S).end()
                left -= 1


class _Player:
    """One process, started when it is needed."""

    def __init__(self, number: int, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._name = f"player {number + 1}"
        self._process: Process | None = None

    def play(self, group: Group) -> Outcome:
        process = self._process or self._started()
        document = group_messages.write(group, process.folder)
        return group_messages.read_outcome(process.request("play", {"group": document}), group)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        if self._process is not None:
            self._process.stop(None)
            self._process = None

    def _started(self) -> Process:
        self._process = Process(
            self._name,
            module("ckpttool.ops.player"),
            [",".join(map(str, self._cores))],
            python=sys.executable,
            timeout=PATIENCE_S,
            threads=len(self._cores),
        )
        self._process.start()
        return self._process


def shares(jobs: int) -> list[tuple[int, ...]]:
    """Return which of this process's cores each job gets: all of them once, or one each if they are few."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs >= len(cores):
        return [(cores[job % len(cores)],) for job in range(jobs)]
    return [tuple(cores[job::jobs]) for job in range(jobs)]
