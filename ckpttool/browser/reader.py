"""Reader thread: requests from the current view come before the background comparison."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Literal

# In order of urgency; only the latest request of each kind is kept.
Kind = Literal["values", "numbers", "comparison"]
_ORDER: tuple[Kind, ...] = ("values", "numbers", "comparison")
# A job runs one step at a time, so that a more urgent one can run in between.
Job = Iterator[None]


class ReaderThread:
    """Daemon thread for reading, which ends with the program."""

    def __init__(self, failed: Callable[[Exception], None]) -> None:
        """Start the thread; it calls `failed` with unexpected errors."""
        self._failed = failed
        self._jobs: dict[Kind, Job] = {}
        self._changed = threading.Condition()
        self._busy = False
        # Keep the user's limits in the thread.
        work = contextvars.copy_context().run
        threading.Thread(target=work, args=(self._work,), daemon=True, name="reader").start()

    def request(self, kind: Kind, job: Job) -> None:
        """Schedule the job; an unfinished job of the same kind is dropped after its current step."""
        with self._changed:
            self._jobs[kind] = job
            self._changed.notify()

    def idle(self) -> bool:
        """Return whether no job is left."""
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
            except Exception as error:  # noqa: BLE001  # our bug: displayed, because a thread fails silently
                self._failed(error)
                ended = True
            if ended:
                with self._changed:
                    if self._jobs.get(kind) is job:
                        del self._jobs[kind]
