"""Checkpoints of a folder, divided among processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, TypeVar

from ckpttool.core.errors import WorkerError

# Starting processes takes about as long as reading this many checkpoints of an agent.
MANY = 64

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
