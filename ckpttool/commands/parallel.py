"""Evaluation in processes and on Ray, and the program of those processes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np

from ckpttool.commands import evaluate
from ckpttool.commands.evaluate import (
    Evaluation,
    EvaluationEnvironment,
    PlayableAgent,
    Protocol,
    play_stacked,
)
from ckpttool.core import search_paths, sidecar, text
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.errors import CkpttoolError, MissingExtraError, UsageError, WorkerError
from ckpttool.evaluation.gymnasium_engine import VectorEnv
from ckpttool.evaluation.simulators import DEVICE_ENGINE
from ckpttool.networks import network
from ckpttool.networks.messages import Message, decode_error, encode_error, message_pipes, serve
from ckpttool.networks.worker import ChildProcess, module_arguments

# Entrants that are played together: how many, and what comes of each of them.

# Most of what stacking can gain is there with this many (docs/design.md has the figures), and smaller groups
# leave work for more processes.
ROWS = 320
MEMBERS = 16
# On a device, where weights stay for the whole play, nothing is gained by smaller groups.
DEVICE_ROWS = 1 << 18
DEVICE_MEMBERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationBatch:
    """One piece of work: entrants of one structure and one place, on shared seeds. It can be pickled."""

    number: int
    entrants: tuple[PlayableAgent, ...]
    how: Protocol


Outcome = dict[str, Evaluation | CkpttoolError]
"""What came of each entrant, by its checkpoint; those that Ctrl-C left without an episode are not in it."""

Spread = Callable[[Iterable[EvaluationBatch], Progress], Iterator[tuple[EvaluationBatch, Outcome]]]
"""Plays groups somewhere and yields them in any order, each once; it asks for a group when it has room.

Progress is of the group that is being played, where that can be known."""


def max_batch_policies(how: Protocol) -> int:
    """Return how many policies are played together: a function of the protocol alone.

    The batch's shape decides how products round, so it must not depend on who plays where.
    """
    members, rows = (DEVICE_MEMBERS, DEVICE_ROWS) if how.engine == DEVICE_ENGINE else (MEMBERS, ROWS)
    return max(1, min(members, rows // how.at_once))


def play_in_process(
    groups: Iterable[EvaluationBatch], progress: Progress
) -> Iterator[tuple[EvaluationBatch, Outcome]]:
    """Play one group after the other in this process."""
    with EnvironmentPool() as room:
        for group in groups:
            yield group, play_batch(group, room, progress)


class EnvironmentPool:
    """Environments that are kept from group to group; left by `with`."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[EvaluationEnvironment, int, str, str], VectorEnv] | None = None

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, _: type[BaseException] | None, __: object, ___: TracebackType | None) -> None:
        if self._kept is not None:
            self._kept[1].close()
            self._kept = None

    def of(self, place: EvaluationEnvironment, rows: int, engine: str, device: str = "cpu") -> VectorEnv:
        """Return that many environments: those of the last time if they are the same.

        What they had to say is said of every group that they play, so those that spoke are not kept.
        """
        wanted = (place, rows, engine, device)
        if self._kept is None or self._kept[0] != wanted or self._kept[1].notes:
            self.__exit__(None, None, None)
            self._kept = (wanted, place.make(rows, engine, device=device))
        return self._kept[1]


def play_batch(group: EvaluationBatch, room: EnvironmentPool, progress: Progress) -> Outcome:
    """Play a group; if that fails, one entrant after the other, so that only those at fault are lost."""
    try:
        return _play_together(group.entrants, group.how, room, progress)
    except CkpttoolError as error:
        if len(group.entrants) == 1:
            (only,) = group.entrants
            return {only.checkpoint: error.located(file=only.checkpoint)}
    found: Outcome = {}
    for entrant in group.entrants:
        alone = EvaluationBatch(group.number, (entrant,), group.how)
        found |= play_batch(alone, room, progress)
    return found


def _play_together(
    entrants: tuple[PlayableAgent, ...], how: Protocol, room: EnvironmentPool, progress: Progress
) -> Outcome:
    place = entrants[0].place
    vector = room.of(place, len(entrants) * how.at_once, how.engine, how.device)
    return {each.checkpoint: each for each in play_stacked(entrants, how, vector, progress)}


# Groups on their way to another process and outcomes on their way back: JSON and arrays, no pickles.

ARRAYS = "group.npz"


def write_batch(group: EvaluationBatch, folder: Path) -> Message:
    """Write a group's arrays into the folder; return the rest."""
    arrays: dict[str, np.ndarray] = {}
    entrants = [
        {
            "checkpoint": entrant.checkpoint,
            "place": dataclasses.asdict(entrant.place),
            "network": network.network_to_document(entrant.network, arrays, f"{number}/"),
            "ledger": sidecar.entries_to_json(entrant.ledger),
            "notes": entrant.notes,
        }
        for number, entrant in enumerate(group.entrants)
    ]
    np.savez(folder / ARRAYS, allow_pickle=False, **arrays)
    # The environment may be a module of the caller's own.
    return {
        "number": group.number,
        "entrants": entrants,
        "how": dataclasses.asdict(group.how),
        "sys_path": sys.path,
        "user_modules": search_paths.list_user_modules(),
    }


def read_batch(document: Message, folder: Path) -> EvaluationBatch:
    """Return the group that was written."""
    with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
        entrants = tuple(
            PlayableAgent(
                each["checkpoint"],
                EvaluationEnvironment(**each["place"]),
                network.network_from_document(each["network"], arrays),
                sidecar.parse_entries(each["ledger"]),
                tuple(each["notes"]),
            )
            for each in document["entrants"]
        )
    return EvaluationBatch(document["number"], entrants, Protocol(**document["how"]))


def write_batch_outcome(outcome: Outcome) -> Message:
    """Return an outcome as a document for JSON."""
    return {checkpoint: _encode_result(result) for checkpoint, result in outcome.items()}


def read_batch_outcome(document: Message, group: EvaluationBatch) -> Outcome:
    """Return what came of a group."""
    return {
        checkpoint: decode_error(found["error"])
        if "error" in found
        else evaluate.parse_evaluation(found["evaluation"], group.how)
        for checkpoint, found in document.items()
    }


def _encode_result(result: Any) -> Message:
    if isinstance(result, CkpttoolError):
        return {"error": encode_error(result)}
    return {"evaluation": text.replace_nonfinite(result.document())}


# Groups are played by processes on this machine, each on cores of its own.

# A group may take hours, and a process that dies is noticed at once.
PATIENCE_S = 1e6
STARTS = 2
AGAIN_S = 0.2


def process_spread(jobs: int) -> Spread:
    """Return what plays groups in that many processes.

    A process that dies is started again once, with the group that it had: nothing of that was counted yet.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} processes cannot play")

    def spread(groups: Iterable[EvaluationBatch], _: Progress) -> Iterator[tuple[EvaluationBatch, Outcome]]:
        crew = _PlayerPool(jobs)
        with ThreadPoolExecutor(jobs) as threads:
            try:
                yield from _distribute_batches(groups, crew, threads, jobs)
            finally:
                crew.stop()  # first, so that no thread waits for an answer any more

    return spread


def _distribute_batches(
    groups: Iterable[EvaluationBatch], crew: _PlayerPool, threads: ThreadPoolExecutor, jobs: int
) -> Iterator[tuple[EvaluationBatch, Outcome]]:
    waiting: dict[Future[Outcome], EvaluationBatch] = {}
    for group in groups:
        waiting[threads.submit(crew.play, group)] = group
        # One more than can be played, so that a process that becomes free need not wait for a restore.
        while len(waiting) > jobs:
            yield from _finished_batches(waiting)
    while waiting:
        yield from _finished_batches(waiting)


def _finished_batches(
    waiting: dict[Future[Outcome], EvaluationBatch],
) -> Iterator[tuple[EvaluationBatch, Outcome]]:
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in done:
        yield waiting.pop(future), future.result()


class _PlayerPool:
    """The processes; each starts when it gets its first group."""

    def __init__(self, jobs: int) -> None:
        self._stopping = threading.Event()
        self._all = [_PlayerProcess(number, cores) for number, cores in enumerate(share_cores(jobs))]
        self._free: SimpleQueue[_PlayerProcess] = SimpleQueue()
        for player in self._all:
            self._free.put(player)

    def play(self, group: EvaluationBatch) -> Outcome:
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


class _PlayerProcess:
    """One process, started when it is needed."""

    def __init__(self, number: int, cores: tuple[int, ...]) -> None:
        self._cores = cores
        self._name = f"player {number + 1}"
        self._process: ChildProcess | None = None

    def play(self, group: EvaluationBatch) -> Outcome:
        process = self._process or self._started()
        document = write_batch(group, process.folder)
        return read_batch_outcome(process.request("play", {"group": document}), group)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def end(self) -> None:
        if self._process is not None:
            self._process.stop(None)
            self._process = None

    def _started(self) -> ChildProcess:
        self._process = ChildProcess(
            self._name,
            module_arguments("ckpttool.commands.parallel"),
            [",".join(map(str, self._cores))],
            python=sys.executable,
            timeout=PATIENCE_S,
            threads=len(self._cores),
        )
        self._process.start()
        return self._process


def share_cores(jobs: int) -> list[tuple[int, ...]]:
    """Return which of this process's cores each job gets: all of them once, or one each if they are few."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs >= len(cores):
        return [(cores[job % len(cores)],) for job in range(jobs)]
    return [tuple(cores[job::jobs]) for job in range(jobs)]


# Groups are played by a Ray cluster: one that is started on this machine for them, or one at an address.

LOCAL = "local"
HINT = "pip install 'ckpttool[ray]'"
# How often a group is given to another worker after the one that had it was lost.
RETRIES = 3
# More groups than can be played at once are held ready, so that no worker waits for a restore.
READY = 2
ANSWER_S = 5.0


def ray_spread(address: str = LOCAL, workers: int | None = None) -> Spread:
    """Return what plays groups on a cluster, one core a group.

    `address` is that of a running cluster (`host:6379`, `ray://host:10001`), whose machines have ckpttool and
    its libraries in the same versions, or "local": a cluster of `workers` (None: all cores) is started here
    and ended after. What a lost worker had is played again by another; each group is counted once, when its
    result is here.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("a cluster needs ray, which is not installed", hint=HINT)

    def spread(groups: Iterable[EvaluationBatch], _: Progress) -> Iterator[tuple[EvaluationBatch, Outcome]]:
        with _connect_cluster(address, workers) as ray:
            yield from _distribute_on_ray(ray, groups)

    return spread


def _distribute_on_ray(
    ray: Any, groups: Iterable[EvaluationBatch]
) -> Iterator[tuple[EvaluationBatch, Outcome]]:
    remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_play_on_ray)
    most = READY + int(ray.cluster_resources().get("CPU", 1))
    waiting: dict[Any, EvaluationBatch] = {}
    for group in groups:
        waiting[remote.remote(group, search_paths.list_user_modules())] = group
        while len(waiting) >= most:
            yield _finished_ray_batch(ray, waiting)
    while waiting:
        yield _finished_ray_batch(ray, waiting)


def _finished_ray_batch(ray: Any, waiting: dict[Any, EvaluationBatch]) -> tuple[EvaluationBatch, Outcome]:
    (reference, *_), _ = ray.wait(list(waiting), num_returns=1)
    group = waiting.pop(reference)
    try:
        return group, ray.get(reference)
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines()
        lost = WorkerError(f"ray lost the group: {said[-1] if said else type(error).__name__}")
        return group, {entrant.checkpoint: lost for entrant in group.entrants}


def _play_on_ray(group: EvaluationBatch, user_modules: Sequence[tuple[str, str]]) -> Outcome:
    """Play a group in a worker of the cluster."""
    for name, folder in user_modules:
        search_paths.add_user_module(name, folder)
    with EnvironmentPool() as room:
        return play_batch(group, room, ignore_progress)


@contextlib.contextmanager
def _connect_cluster(address: str, workers: int | None) -> Iterator[Any]:
    """Connect to the cluster, or start one; a cluster that the program is connected to already is used."""
    if address not in (LOCAL, "auto"):
        _require_listener(address)
    # Ray reports its use to its makers unless it is told otherwise.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    logging.getLogger("ray").setLevel(logging.ERROR)  # what is wrong with the work is said by our errors
    if ray.is_initialized():
        yield ray
        return
    # A local cluster's logs and sockets go with it; unix sockets bear only short paths.
    # What Ray tells of workers that died it prints on stdout, where a document is to be.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        own = {
            "num_cpus": workers or len(os.sched_getaffinity(0)),
            "include_dashboard": False,
            "_temp_dir": folder,
        }
        try:
            # Ray puts the working directory first on the search path of its workers.
            with search_paths.change_directory(folder):
                ray.init(
                    address=address,
                    log_to_driver=False,
                    configure_logging=False,
                    **(own if address == LOCAL else {}),
                )
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            first = str(error).strip().partition("\n")[0]
            raise UsageError(f"no cluster answers at {address}: {first}") from None
        try:
            yield ray
        finally:
            ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise UsageError if nothing listens there: Ray would wait for minutes, and then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"{address!r} is no cluster's address", hint="local, auto, HOST:PORT or ray://HOST:PORT"
        )
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no cluster answers at {address}: {error}") from None


# The program of a process that plays groups: told what over a pipe, on the cores that it is given.


@dataclass(slots=True)
class EvaluationSession:
    """The folder that is shared with the parent, and the environments that are kept."""

    folder: Path
    room: EnvironmentPool = field(default_factory=EnvironmentPool)


def _handle_play(session: EvaluationSession, message: Message) -> Message:
    document = message["group"]
    sys.path[:] = dict.fromkeys([*sys.path, *document["sys_path"]])
    for name, folder in document["user_modules"]:
        search_paths.add_user_module(name, folder)
    group = read_batch(document, session.folder)
    return write_batch_outcome(play_batch(group, session.room, ignore_progress))


def main(folder: str, cores: str) -> None:
    """Play what is asked until the parent is gone."""
    # Environments and backends take as many threads as there are cores.
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    with message_pipes() as (requests, answers):
        serve(EvaluationSession(Path(folder)), {"play": _handle_play}, requests, answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
