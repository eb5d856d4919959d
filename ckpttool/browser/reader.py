"""The one thread that reads: what is looked at now before what is compared in the background."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Literal

# What a person waits for comes first; of each kind only the last that was asked for is wanted.
Kind = Literal["values", "numbers", "comparison"]
_ORDER: tuple[Kind, ...] = ("values", "numbers", "comparison")
# A job is done a step at a time; after each of them something more urgent may come first.
Job = Iterator[None]


class Reader:
    """A thread that ends with the program, whatever it is reading."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """Tell `failed`, in the thread, what no job expected."""
        self._failed = failed
        self._jobs: dict[Kind, Job] = {}
        self._changed = threading.Condition()
        self._busy = False
        # The limits that were chosen hold there too.
        work = contextvars.copy_context().run
        threading.Thread(target=work, args=(self._work,), daemon=True, name="reader").start()

    def ask(self, kind: Kind, job: Job) -> None:
        """Do the job as soon as may be; one of its kind that is not done yet is given up after its step."""
        with self._changed:
            self._jobs[kind] = job
            self._changed.notify()

    def idle(self) -> bool:
        """Say whether nothing is left to do."""
        with self._changed:
            return not self._jobs and not self._busy

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                while not self._jobs:
                    self._changed.wait()
                kind = next(kind for kind in _ORDER if kind in self._jobs)
                job = self._jobs[kind]
                self._busy = True
            try:
                ended = next(job, self) is self
            except Exception as error:  # noqa: BLE001  # a fault of ours: told, where a thread would be silent
                self._failed(error)
                ended = True
            if ended:
                with self._changed:
                    if self._jobs.get(kind) is job:
                        del self._jobs[kind]
