"""What is no checkpoint at all, or is not given as a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import Case


def written(name: str, data: bytes) -> Callable[[Path], Path]:
    """Return the maker of one file of these bytes."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    return make


def _fifo(folder: Path) -> Path:
    os.mkfifo(folder / "model.pt")
    return folder / "model.pt"


_LINE = "any file"
CASES = (
    Case("any-0-bytes", _LINE, written("model.pt", b""), says="empty"),
    Case("any-fifo", _LINE, _fifo, says="pipe"),
)
