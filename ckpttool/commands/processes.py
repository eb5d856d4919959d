"""Checkpoints of a folder, and tensors of a checkpoint, divided among processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
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
    entries: Sequence[tuple[_Entry, int]],
    checkpoints: Sequence[Checkpoint],
    jobs: int,
    progress: Progress,
) -> Iterator[_Result | CkpttoolError]:
    """Yield the result of each entry (given with its bytes) in order; after an error there may be none.

    The entries are of `checkpoints`, which the processes read themselves.
    """
    from ckpttool.evaluation import scheduling

    total = sum(nbytes for _, nbytes in entries)
    parts: list[list[_Entry]] = [[]]
    ends, done = [0], 0
    for entry, nbytes in entries:
        if done - (ends[-2] if len(ends) > 1 else 0) >= max(1, total // (_PARTS * jobs)):
            parts.append([])
            ends.append(done)
        parts[-1].append(entry)
        done += nbytes
        ends[-1] = done
    files = {file.path for each in checkpoints for file in each.files}
    urls = tuple(path for path in files if filesystem.find_store(path) is not None)
    tasks = [EntriesTask(work, part, limits.current(), os.getcwd(), urls) for part in parts]
    run: Any = EntriesTask.run
    for end, results in zip(ends, scheduling.map_in_processes(run, tasks, jobs), strict=True):
        if isinstance(results, WorkerError):
            raise results.located(file=checkpoints[0].path)
        yield from results
        progress(end, total)
