"""Progress on stderr: only on a terminal, only for work that takes more than a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpttool.ops.progress import Progress, silent

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_PATIENCE_S = 1.0


class _Shown:
    """Starts a bar when the work has taken longer than a moment."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.began = time.monotonic()
        self.bar: Bar | None = None

    def __call__(self, done: int, total: int) -> None:
        if self.bar is None and time.monotonic() - self.began > _PATIENCE_S and done < total:
            self._start(total)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total)

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self.bar.add_task(self.label, total=total)
        self.bar.start()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def progress(label: str, *, quiet: bool) -> Iterator[Progress]:
    """Give a progress callback that draws a bar where a person watches."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    shown = _Shown(label)
    try:
        yield shown
    finally:
        shown.stop()
