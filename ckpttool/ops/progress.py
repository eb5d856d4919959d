"""How a long operation tells its caller how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then from the working thread; `done` and `total` count the same unit.

    Who plays also says how many steps the environments have taken.
    """

    def __call__(self, done: int, total: int, steps: int | None = None) -> None:
        """Take note."""
        ...


def silent(done: int, total: int, steps: int | None = None) -> None:
    """Say nothing."""
