"""Schedulers: this process, a pool of processes, and a Ray cluster."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache, partial
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, TracebackType
from typing import Any, TypeVar

from ckpttool.core import filesystem, limits, search_paths
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, UsageError, WorkerError
from ckpttool.core.installation import require_package
from ckpttool.evaluation.gymnasium_engine import VectorEnv
from ckpttool.evaluation.playing import play_stacked
from ckpttool.evaluation.protocol import Evaluation, EvaluationEnvironment, PlayableAgent, Protocol
from ckpttool.evaluation.simulators import DEVICE_ENGINE
from ckpttool.networks.worker import THREADS, ended_error
from ckpttool.version import __version__

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")

# Larger batches gain little (docs/decisions/0020-evaluation-batches.md), and smaller ones leave work for
# more processes.
ROWS = 320
MEMBERS = 16
# On a device, where weights stay for the whole evaluation, smaller batches gain nothing.
DEVICE_ROWS = 1 << 18
DEVICE_MEMBERS = 64


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationBatch:
    """Agents with equal structure and environment, played together on shared seeds. Picklable."""

    number: int
    agents: tuple[PlayableAgent, ...]
    protocol: Protocol

    def failed(self, error: CkpttoolError) -> BatchResult:
        """Return the result of a batch that an error prevented from being played."""
        return dict.fromkeys((agent.checkpoint for agent in self.agents), error)


BatchResult = dict[str, Evaluation | CkpttoolError]
"""The outcome for each agent, by checkpoint; agents interrupted before an episode are omitted."""

Spread = Callable[[Iterable[EvaluationBatch], Progress], Iterator[tuple[EvaluationBatch, BatchResult]]]
"""Plays batches and yields each once, in any order; fetches a batch when it can play one.

Progress covers the batch being played, if it can be determined.
"""


def max_batch_policies(protocol: Protocol) -> int:
    """Return how many policies are played together, which depends only on the protocol.

    The batch's shape decides how products round, so it must not depend on where it is played.
    """
    on_device = protocol.engine == DEVICE_ENGINE
    members, rows = (DEVICE_MEMBERS, DEVICE_ROWS) if on_device else (MEMBERS, ROWS)
    return max(1, min(members, rows // protocol.at_once))


def play_in_process(
    batches: Iterable[EvaluationBatch], progress: Progress
) -> Iterator[tuple[EvaluationBatch, BatchResult]]:
    """Play batches one after the other in this process."""
    with EnvironmentPool() as environments:
        for batch in batches:
            yield batch, play_batch(batch, environments, progress)


class EnvironmentPool:
    """Environments reused across batches; closed by `with`."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[EvaluationEnvironment, int, str, str], VectorEnv] | None = None

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, _: type[BaseException] | None, __: object, ___: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the cached environments."""
        if self._kept is not None:
            kept, self._kept = self._kept[1], None
            kept.close()

    def of(self, env: EvaluationEnvironment, rows: int, engine: str, device: str = "cpu") -> VectorEnv:
        """Return that many environments, reusing the previous ones if they match.

        An environment's notes belong to every batch that it plays, so one with notes is not reused.
        """
        key = (env, rows, engine, device)
        if self._kept is None or self._kept[0] != key or self._kept[1].notes:
            self.close()
            self._kept = (key, env.make(rows, engine, device=device))
        return self._kept[1]


def play_batch(batch: EvaluationBatch, environments: EnvironmentPool, progress: Progress) -> BatchResult:
    """Play a batch; if that fails, play the agents one by one, so that only failing ones are lost."""
    agents, how = batch.agents, batch.protocol
    try:
        vector = environments.of(agents[0].environment, len(agents) * how.at_once, how.engine, how.device)
        return {result.checkpoint: result for result in play_stacked(agents, how, vector, progress)}
    except CkpttoolError as error:
        if len(agents) == 1:
            return batch.failed(error.located(file=agents[0].checkpoint))
    results: BatchResult = {}
    for agent in agents:
        results |= play_batch(EvaluationBatch(batch.number, (agent,), how), environments, progress)
    return results


_ENVIRONMENTS = EnvironmentPool()
"""environments of a worker process"""


def play_job(batch: EvaluationBatch, user_modules: Sequence[tuple[str, str]]) -> BatchResult:
    """Play a batch in a worker process; an unexpected error fails every agent."""
    # The environment may be in a module of the caller.
    for name, folder in user_modules:
        search_paths.add_user_module(name, folder)
    try:
        return play_batch(batch, _ENVIRONMENTS, ignore_progress)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - an environment may raise anything
        with contextlib.suppress(Exception):
            _ENVIRONMENTS.close()
        return batch.failed(WorkerError(f"{type(error).__name__}: {error}"))


def _distribute(
    tasks: Iterable[_Task], submit: Callable[[_Task], Future[_Result]], ready: int, *, in_order: bool = False
) -> Iterator[tuple[_Task, Future[_Result]]]:
    """Yield each task when it is finished, or in order; `ready` tasks are submitted at a time."""
    waiting: dict[Future[_Result], _Task] = {}

    def take() -> Iterator[tuple[_Task, Future[_Result]]]:
        finished = [next(iter(waiting))] if in_order else wait(waiting, return_when=FIRST_COMPLETED).done
        for future in finished:
            yield waiting.pop(future), future

    for task in tasks:
        waiting[submit(task)] = task
        while len(waiting) >= ready:
            yield from take()
    while waiting:
        yield from take()


@contextlib.contextmanager
def _start_workers(jobs: int | None, ray: str | None) -> Iterator[tuple[Callable[..., Future[Any]], int]]:
    """Yield the function that submits `work(*arguments)` to a process or the cluster, and their number."""
    if ray is None:
        with ProcessPool(jobs or 1) as pool:
            yield pool.submit, jobs or 1
        return
    with _connect_cluster(ray, jobs) as cluster:
        remote = cache(cluster.remote(num_cpus=1, max_retries=RETRIES))

        def submit(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
            future: Future[Any] = remote(work).remote(*arguments).future()
            return future

        yield submit, int(cluster.cluster_resources().get("CPU", 1))


def _take_result(future: Future[_Result]) -> _Result | WorkerError:
    """Return the result, or the error of a worker that was lost; raise UsageError for an unfit machine."""
    try:
        return future.result()
    except Exception as error:
        ray = sys.modules.get("ray")
        if ray is None or not isinstance(error, ray.exceptions.RayError):
            if isinstance(error, WorkerError):
                return error
            raise
        if isinstance(cause := getattr(error, "cause", None), UsageError):
            raise cause from None
        lines = str(error).strip().splitlines()
        return WorkerError(f"ray lost a task: {lines[-1] if lines else type(error).__name__}")


@dataclass(frozen=True, slots=True)
class TaskContext:
    """What a task needs of the process that submits it; picklable.

    `urls` are the remote locations that it mounts, `folders` the inodes of those that all machines of a
    cluster must share, by path.
    """

    version: str
    limits: limits.Limits
    directory: str
    urls: tuple[str, ...]
    folders: tuple[tuple[str, int], ...]

    @classmethod
    def current(cls, paths: Iterable[str], *, shared: bool) -> TaskContext:
        """Return the context of tasks on these files, whose folders other machines must have if `shared`."""
        stores = {path: filesystem.find_store(path) for path in paths}
        urls = tuple(path for path, store in stores.items() if store is not None)
        local = {os.path.dirname(os.path.abspath(path)) for path, store in stores.items() if store is None}
        inodes = ((folder, os.stat(folder).st_ino) for folder in sorted({os.getcwd(), *local}) if shared)
        return cls(__version__, limits.current(), os.getcwd(), urls, tuple(inodes))

    def run(self, work: Callable[[_Task], _Result], task: _Task) -> _Result:
        """Return the result of the task; raise UsageError on a machine that differs from the first."""
        if self.version != __version__:
            raise UsageError(
                "a machine of the cluster has another version of ckpttool",
                expected=self.version,
                found=__version__,
            )
        for folder, inode in self.folders:
            if not os.path.isdir(folder) or os.stat(folder).st_ino != inode:
                raise UsageError(
                    f"the machine {socket.gethostname()} of the cluster does not see this folder",
                    file=folder,
                    hint="all machines need it under the same path, or use s3:// or gs:// URLs",
                )
        with search_paths.change_directory(self.directory), limits.using(self.limits):
            for url in self.urls:
                filesystem.resolve_path(url)
            return work(task)


def map_tasks(
    work: Callable[[_Task], _Result],
    tasks: Iterable[_Task],
    paths: Iterable[str] = (),
    *,
    jobs: int | None = None,
    ray: str | None = None,
) -> Iterator[_Result | WorkerError]:
    """Yield the result of each task in order, computed in other processes.

    A task whose process died too often yields the error. Raise UsageError for a machine that does not see the
    files.

    Args:
        work: a function of a module, called with each task; tasks and results are pickled.
        tasks: its arguments.
        paths: files that the tasks use.
        jobs: processes on this machine.
        ray: address of a Ray cluster, whose processes work instead.
    """
    run = partial(TaskContext.current(paths, shared=ray is not None).run, work)
    if ray is not None:
        require_package(*_RAY)
    with _start_workers(jobs, ray) as (submit, at_once):
        # A cluster starts machines for what waits.
        ready = AHEAD * at_once + 1 if ray is None else sys.maxsize
        for _, future in _distribute(tasks, partial(submit, _call, run), ready, in_order=True):
            yield _take_result(future)


def _call(work: Callable[[_Task], _Result], task: _Task) -> _Result:
    return work(task)  # Ray takes no partial functions


STARTS = 2


def process_spread(jobs: int) -> Spread:
    """Return a scheduler that plays batches in that many processes.

    A process that dies is restarted once with its batch: nothing of it was counted yet. See
    docs/decisions/0003-process-pool.md.
    """
    if jobs < 1:
        raise UsageError(f"cannot play with {jobs} processes")

    return _spread_batches(jobs, None)


def _spread_batches(jobs: int | None, ray: str | None) -> Spread:
    def spread(
        batches: Iterable[EvaluationBatch], _: Progress
    ) -> Iterator[tuple[EvaluationBatch, BatchResult]]:
        with _start_workers(jobs, ray) as (submit, at_once):

            def play(batch: EvaluationBatch) -> Future[BatchResult]:
                return submit(play_job, batch, search_paths.list_user_modules())

            # One more than can be played, so that a free worker need not wait for a restore.
            for batch, played in _distribute(batches, play, at_once + 1):
                result = _take_result(played)
                yield batch, batch.failed(result) if isinstance(result, WorkerError) else result

    return spread


# Tasks of one process at a time that are submitted ahead of the one whose result is taken.
AHEAD = 3


class ProcessPool:
    """Executors with one process each, so that a crash ends no other; closed by `with`."""

    def __init__(self, jobs: int) -> None:
        self._threads = ThreadPoolExecutor(jobs)
        self._players = [_Player(number, cores) for number, cores in enumerate(share_cores(jobs), 1)]
        self._free: SimpleQueue[_Player] = SimpleQueue()
        for player in self._players:
            self._free.put(player)

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, _: type[BaseException] | None, __: object, ___: TracebackType | None) -> None:
        for player in self._players:
            player.kill()
        self._threads.shutdown(cancel_futures=True)
        for player in self._players:
            player.end()

    def submit(self, work: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Call picklable `work` in the next free process; raises WorkerError if the process dies twice."""
        return self._threads.submit(self._run, partial(work, *arguments))

    def _run(self, work: Callable[[], _Result]) -> _Result:
        player = self._free.get()
        try:
            for _ in range(STARTS):
                try:
                    return player.run(work)
                except WorkerError as error:
                    failed = error
        finally:
            self._free.put(player)
        raise failed


class _PlayerContext(SpawnContext):
    """Context of a one-process executor that keeps the process: an executor cannot end it."""

    process: SpawnProcess | None = None

    def __init__(self) -> None:
        super().__init__()
        self.Process = self._make_process  # type: ignore[assignment,misc]

    def _make_process(self, *args: Any, **kwargs: Any) -> SpawnProcess:
        self.process = SpawnProcess(*args, **kwargs)
        return self.process


class _Player:
    """A one-process executor, started with its first work and restarted after a crash."""

    _starting = threading.Lock()
    """shared by all players: inherited state belongs to the whole program"""

    def __init__(self, number: int, cores: tuple[int, ...]) -> None:
        self._name, self._cores = f"process {number}", cores
        self._stopped = False
        self._executor: ProcessPoolExecutor | None = None

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Return the result of the work; raise WorkerError if the process dies."""
        try:
            executor = self._executor or self._start()
            return executor.submit(work).result()
        except BrokenProcessPool:
            with self._log as log:
                raise ended_error(self._name, self.end(), Path(log.name)) from None

    def kill(self) -> None:
        """Kill the process permanently, whatever it is doing."""
        with self._starting:
            self._stopped = True
            if self._executor is not None and self._context.process is not None:
                self._context.process.kill()

    def end(self) -> int:
        """Wait until the process has ended; return its status."""
        if self._executor is None:
            return 0
        self._executor.shutdown()
        self._executor = None
        return getattr(self._context.process, "exitcode", None) or 0

    def _start(self) -> ProcessPoolExecutor:
        with self._starting, _inherited_variables(len(self._cores)):
            if self._stopped:
                raise WorkerError(f"{self._name} was stopped")
            self._context = _PlayerContext()
            self._log = tempfile.NamedTemporaryFile(prefix="ckpttool-")  # noqa: SIM115 - lives with the process
            executor = ProcessPoolExecutor(1, self._context, _prepare_player, (self._cores, self._log.name))
            with _blocked_interrupts(), _hidden_main_module():
                executor.submit(int)  # the first job starts the process
            self._executor = executor
        return executor


@contextlib.contextmanager
def _inherited_variables(threads: int) -> Iterator[None]:
    """Set environment variables of a starting process: its threads, no path to the working directory."""
    limits = dict.fromkeys(THREADS, str(threads))
    variables = {
        **search_paths.child_environment(),
        "PYTHONSAFEPATH": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **limits,
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C in the terminal, which is meant for this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _hidden_main_module() -> Iterator[None]:
    """Start processes that do not import the caller's main module, which may lack a `__main__` guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _prepare_player(cores: Sequence[int], log: str) -> None:
    """Prepare a new process: its cores, its output, and its exit with the parent."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # Environments and backends use as many threads as there are cores.
    os.sched_setaffinity(0, cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def share_cores(jobs: int) -> list[tuple[int, ...]]:
    """Return the cores of each job: all of this process's cores once, or one each if there are few."""
    cores = sorted(os.sched_getaffinity(0))
    if jobs >= len(cores):
        return [(cores[job % len(cores)],) for job in range(jobs)]
    return [tuple(cores[job::jobs]) for job in range(jobs)]


LOCAL = "local"
# How often a batch is retried on another worker after its worker was lost.
RETRIES = 3
ANSWER_S = 5.0


def ray_spread(address: str = LOCAL, workers: int | None = None) -> Spread:
    """Return a scheduler that plays batches on a cluster, one core per batch.

    `address` is that of a running cluster (`host:6379`, `ray://host:10001`), whose machines need
    ckpttool and its libraries in the same versions, or "local": a cluster of `workers` (None: all
    cores) is started here and ended afterwards. A lost worker's batch is played again by another;
    each batch is counted once, when its result arrives.
    """
    require_package(*_RAY)
    return _spread_batches(workers, address)


_RAY = ("ray", "a cluster needs ray", "ray")


@contextlib.contextmanager
def _connect_cluster(address: str, workers: int | None) -> Iterator[Any]:
    """Connect to the cluster, or start one; an existing connection of the program is reused."""
    if address not in (LOCAL, "auto"):
        _require_listener(address)
    # Ray sends usage statistics to its makers unless this is disabled.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = importlib.import_module("ray")
    logging.getLogger("ray").setLevel(logging.ERROR)  # our errors report problems with the work
    if ray.is_initialized():
        yield ray
        return
    # A local cluster's logs and sockets are deleted with it; unix sockets allow only short paths. Ray prints
    # messages about dead workers on stdout, where the document goes.
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
            # Ray puts the working directory first on its workers' search path.
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
    """Raise UsageError if nothing listens there: Ray would wait for minutes, then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"invalid cluster address {address!r}", hint="use local, auto, HOST:PORT or ray://HOST:PORT"
        )
    try:
        socket.create_connection((host, int(port)), ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no cluster answers at {address}: {error}") from None
