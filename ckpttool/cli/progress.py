"""Progress bars on stderr: only on a terminal, and only for work that takes more than a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpttool.cli.console import is_stderr_terminal, raw_stderr
from ckpttool.core import filesystem
from ckpttool.core.text import clean, format_size, shorten

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from ckpttool.core.atomic_write import Progress


_PATIENCE_S = 1.0
_NAME_LENGTH = 40
BYTES = "bytes"
"""unit of progress whose rate is shown"""


class _DelayedBar:
    """Progress bar that appears once the work takes longer than a moment."""

    def __init__(self, label: str, unit: str | None) -> None:
        self.label, self.unit = label, unit
        self.began = time.monotonic()
        self.bar: Bar | None = None
        # Measure the speed from the first report on, to exclude building the policy and the environments.
        self.first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, steps: int | None = None) -> None:
        now = time.monotonic()
        if self.bar is None and now - self.began > _PATIENCE_S and done < total:
            self._start(total)
        amount = done if self.unit == BYTES else steps
        speed = self._speed(now, amount) if amount is not None else ""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total, speed=speed)

    def _speed(self, now: float, amount: int) -> str:
        if self.first is None or amount < self.first[1]:
            self.first = (now, amount)
        since, before = self.first
        if now <= since:
            return ""
        rate = (amount - before) / (now - since)
        return f"{format_size(int(rate))}/s" if self.unit == BYTES else f"{rate:,.0f} steps/s"

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        # Show the count if its unit is known, else the percentage.
        counted = self.unit is not None and self.unit != BYTES
        amount = f"{{task.completed}}/{{task.total}} {self.unit}" if counted else "{task.percentage:>3.0f}%"
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn(amount),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(file=raw_stderr()),
            transient=True,
            # Other output in the meantime goes through the wrapped stderr.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.bar.add_task(self.label, total=total, speed="")
        self.bar.start()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def show_progress(label: str, *, quiet: bool, unit: str | None = None) -> Iterator[Progress]:
    """Yield a progress callback that draws a bar on a terminal; `unit` names what it counts."""
    if quiet or not is_stderr_terminal():
        from ckpttool.core.atomic_write import ignore_progress

        yield ignore_progress
        return
    shown = _DelayedBar(label, unit)
    try:
        yield shown
    finally:
        shown.stop()


@contextmanager
def show_fetch_progress(*, quiet: bool) -> Iterator[None]:
    """Draw a bar on a terminal for every remote file that must be downloaded whole."""
    if quiet or not is_stderr_terminal():
        yield
        return
    shown: dict[str, _DelayedBar] = {}

    def report(name: str, done: int, total: int) -> None:
        bar = shown.setdefault(name, _DelayedBar(f"fetch {shorten(clean(name), _NAME_LENGTH)}", None))
        bar(done, total)
        if done >= total:
            shown.pop(name).stop()

    token = filesystem.watch.set(report)
    try:
        yield
    finally:
        filesystem.watch.reset(token)
        for bar in shown.values():
            bar.stop()
