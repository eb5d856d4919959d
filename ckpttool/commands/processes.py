"""Checkpoints of a folder, and tensors of a checkpoint, divided among processes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, Generic, Protocol, Self, TypeVar

from ckpttool.core import filesystem, limits
from ckpttool.core.atomic_write import Progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, WorkerError
from ckpttool.core.search_paths import change_directory

# Starting processes takes about as long as reading this many checkpoints of an agent.
MANY = 64

# Parts of a checkpoint for each process, so that none waits long for the others.
_PARTS = 4

_Entry = TypeVar("_Entry")
_Result = TypeVar("_Result")


class FolderTask(Protocol[_Result]):
    """A picklable task on some checkpoints of a folder."""

    def run(self) -> list[_Result]:
        """Return a result for each checkpoint."""
        ...

    def single(self) -> Sequence[Self]:
        """Return a task for each checkpoint."""
        ...

    def failed(self, error: WorkerError) -> list[_Result]:
        """Return the result for the only checkpoint of a task that ended its process."""
        ...


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: a checkpoint is many objects but no garbage, and is dropped whole."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def count_jobs(checkpoints: int, jobs: int | None) -> int:
    """Return the number of processes for that many checkpoints; 1 means this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(checkpoints, jobs or (cores if checkpoints >= MANY else 1))


def run_tasks(tasks: Sequence[FolderTask[_Result]], jobs: int) -> Iterator[list[_Result]]:
    """Yield the results of each task in order; after the end of a process, of its checkpoints one by one."""
    from ckpttool.evaluation import scheduling

    run: Any = type(tasks[0]).run if tasks else None
    for task, result in zip(tasks, scheduling.map_in_processes(run, tasks, jobs), strict=True):
        if isinstance(result, list):
            yield result
        elif len(alone := task.single()) == 1:
            yield task.failed(result)
        else:
            yield [each for results in run_tasks(alone, 1) for each in results]


@dataclass(frozen=True, slots=True)
class EntriesTask(Generic[_Entry, _Result]):
    """Entries for one process: `work`, a function of a module, is called with each; all are picklable."""

    work: Callable[[_Entry], _Result]
    entries: Sequence[_Entry]
    limits: limits.Limits
    directory: str
    urls: tuple[str, ...]

    def run(self) -> list[_Result | CkpttoolError]:
        """Return the result of each entry, up to the first error."""
        results: list[_Result | CkpttoolError] = []
        with change_directory(self.directory), limits.using(self.limits), filesystem.read_session():
            for url in self.urls:
                filesystem.resolve_path(url)
            for entry in self.entries:
                try:
                    results.append(self.work(entry))
                except CkpttoolError as error:
                    return [*results, error]
        return results


def map_entries(
    work: Callable[[_Entry], _Result],
    entries: Sequence[tuple[_Entry, str, int]],
    checkpoints: Sequence[Checkpoint],
    jobs: int,
    progress: Progress,
) -> Iterator[_Result]:
    """Yield the result of each entry, given with its name and bytes, in order; raise its error with its name.

    The entries are of `checkpoints`, which the processes read themselves.
    """
    from ckpttool.evaluation import scheduling

    starts = list(accumulate((nbytes for *_, nbytes in entries), initial=0))
    share = max(1, starts[-1] // (_PARTS * jobs))
    groups = groupby(zip(entries, starts, strict=False), key=lambda row: row[1] // share)
    parts = [[entry for entry, _ in rows] for _, rows in groups]
    files = {file.path for each in checkpoints for file in each.files}
    urls = tuple(path for path in files if filesystem.find_store(path) is not None)
    context = limits.current(), os.getcwd(), urls
    tasks = [EntriesTask(work, [entry for entry, *_ in part], *context) for part in parts]
    run: Any = EntriesTask.run
    own = checkpoints[0].path if len(checkpoints) == 1 else None
    done = 0
    for part, results in zip(parts, scheduling.map_in_processes(run, tasks, jobs), strict=True):
        if isinstance(results, WorkerError):
            raise results.located(file=checkpoints[0].path)
        for (_, name, nbytes), result in zip(part, results, strict=False):
            if isinstance(result, CkpttoolError):
                raise result.located(file=own, path=name)
            yield result
            done += nbytes
        progress(done, starts[-1])
