"""Checkpoints of a folder, and tensors of a checkpoint, divided among processes."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Protocol, Self, TypeVar

from ckpttool.core import filesystem, source
from ckpttool.core.atomic_write import Progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import CkpttoolError, WorkerError
from ckpttool.libraries import binding
from ckpttool.libraries.repeated_structures import compute_once

# Starting processes takes about as long as reading this many checkpoints of an agent.
MANY = 64

# Parts of a checkpoint for each process, so that none waits long for the others, and for a cluster.
_PARTS, _CLUSTER_PARTS = 4, 64

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
def one_checkpoint() -> Iterator[None]:
    """Open each file once meanwhile, bind agents of one structure once, and collect no garbage.

    A checkpoint has none, and is dropped whole.
    """
    enabled = gc.isenabled()
    gc.disable()
    token = binding.BINDER.set(compute_once)
    try:
        with source.keep_open():
            yield
    finally:
        binding.BINDER.reset(token)
        if enabled:
            gc.enable()


def count_jobs(checkpoints: int, jobs: int | None) -> int:
    """Return the number of processes for that many checkpoints; 1 means this one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(checkpoints, jobs or (cores if checkpoints >= MANY else 1))


def run_tasks(
    tasks: Sequence[FolderTask[_Result]], paths: Iterable[str], jobs: int | None, ray: str | None = None
) -> Iterator[list[_Result]]:
    """Yield the results of each task in order; after the end of a process, of its checkpoints one by one.

    The tasks read checkpoints at `paths`.
    """
    from ckpttool.evaluation import scheduling

    run: Any = type(tasks[0]).run if tasks else None
    results = scheduling.map_tasks(run, tasks, paths, jobs=jobs, ray=ray)
    for task, result in zip(tasks, results, strict=True):
        if isinstance(result, list):
            yield result
        elif len(alone := task.single()) == 1:
            yield task.failed(result)
        else:
            yield [result for results in run_tasks(alone, paths, 1, ray) for result in results]


def is_spread(jobs: int | None, ray: str | None) -> bool:
    """Return whether other processes than this one read the tensors of a checkpoint."""
    return ray is not None or (jobs or 1) > 1


def map_entries(
    work: Callable[[_Entry], _Result],
    entries: Sequence[tuple[_Entry, str, int]],
    checkpoints: Sequence[Checkpoint],
    progress: Progress,
    *,
    jobs: int | None,
    ray: str | None,
) -> Iterator[_Result]:
    """Yield the result of each entry in order; raise its error with its name.

    Args:
        work: a function of a module, called with each entry.
        entries: each with its name and its size in bytes.
        checkpoints: what the entries belong to; the processes read them themselves.
        progress: called with the bytes of the entries that are done, and of all.
        jobs: processes on this machine.
        ray: address of a Ray cluster, whose processes work instead.
    """
    from ckpttool.evaluation import scheduling

    starts = list(accumulate((nbytes for *_, nbytes in entries), initial=0))
    share = max(1, starts[-1] // (_CLUSTER_PARTS if ray is not None else _PARTS * (jobs or 1)))
    groups = groupby(zip(entries, starts, strict=False), key=lambda row: row[1] // share)
    parts = [[entry for entry, _ in rows] for _, rows in groups]
    tasks = [[entry for entry, *_ in part] for part in parts]
    files = dict.fromkeys(file.path for checkpoint in checkpoints for file in checkpoint.files)
    results_by_part = scheduling.map_tasks(partial(_work_on, work), tasks, files, jobs=jobs, ray=ray)
    own = checkpoints[0].path if len(checkpoints) == 1 else None
    done = 0
    for part, results in zip(parts, results_by_part, strict=True):
        if isinstance(results, WorkerError):
            raise results.located(file=checkpoints[0].path)
        for (_, name, nbytes), result in zip(part, results, strict=False):
            if isinstance(result, CkpttoolError):
                raise result.located(file=own, path=name)
            yield result
            done += nbytes
        progress(done, starts[-1])


def _work_on(work: Callable[[_Entry], _Result], entries: Sequence[_Entry]) -> list[_Result | CkpttoolError]:
    """Return the result of each entry, up to the first error."""
    results: list[_Result | CkpttoolError] = []
    with filesystem.read_session():
        for entry in entries:
            try:
                results.append(work(entry))
            except CkpttoolError as error:
                return [*results, error]
    return results
