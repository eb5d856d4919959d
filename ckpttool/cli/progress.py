"""Progress on stderr: only on a terminal, only for work that takes more than a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpttool import places
from ckpttool.cli import output
from ckpttool.ops.progress import Progress, silent
from ckpttool.shown import clean, shortened

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

_PATIENCE_S = 1.0
_NAME = 40


class _Shown:
    """Starts a bar when the work has taken longer than a moment."""

    def __init__(self, label: str, unit: str | None) -> None:
        self.label, self.unit = label, unit
        self.began = time.monotonic()
        self.bar: Bar | None = None
        # Steps are timed from the first report on: before it a policy is built and environments are made.
        self.first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, steps: int | None = None) -> None:
        now = time.monotonic()
        if self.bar is None and now - self.began > _PATIENCE_S and done < total:
            self._start(total)
        speed = self._speed(now, steps) if steps is not None else ""
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, total=total, speed=speed)

    def _speed(self, now: float, steps: int) -> str:
        if self.first is None or steps < self.first[1]:
            self.first = (now, steps)
        since, before = self.first
        return f"{(steps - before) / (now - since):,.0f} steps/s" if now > since else ""

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        # How many of them, where there is a word for what is counted: else the part that is done.
        amount = f"{{task.completed}}/{{task.total}} {self.unit}" if self.unit else "{task.percentage:>3.0f}%"
        self.bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn(amount),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(file=output.stderr()),
            transient=True,
            # What else is printed meanwhile goes through the guard of stderr.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.bar.add_task(self.label, total=total, speed="")
        self.bar.start()

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def progress(label: str, *, quiet: bool, unit: str | None = None) -> Iterator[Progress]:
    """Give a progress callback that draws a bar where a person watches; `unit` names what it counts."""
    if quiet or not output.watched():
        yield silent
        return
    shown = _Shown(label, unit)
    try:
        yield shown
    finally:
        shown.stop()


@contextmanager
def fetching(*, quiet: bool) -> Iterator[None]:
    """Draw a bar for every file elsewhere that has to be fetched whole, where a person watches."""
    if quiet or not output.watched():
        yield
        return
    shown: dict[str, _Shown] = {}

    def told(name: str, done: int, total: int) -> None:
        bar = shown.setdefault(name, _Shown(f"fetch {shortened(clean(name), _NAME)}", None))
        bar(done, total)
        if done >= total:
            shown.pop(name).stop()

    token = places.watch.set(told)
    try:
        yield
    finally:
        places.watch.reset(token)
        for bar in shown.values():
            bar.stop()
