"""What listings are made of: a tensor, a plain value, a checkpoint of a folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ckpttool import urls
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, typed
from ckpttool.ops import training_step
from ckpttool.shown import count


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor; `of` is the display path of the parameter that a slot belongs to."""

    path: str
    keys: Path
    leaf: Leaf
    of: str | None
    aliases: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "keys": typed(self.keys),
            "key": self.leaf.key,
            "dtype": self.leaf.dtype,
            "shape": list(self.leaf.shape),
            "nbytes": self.leaf.nbytes,
            "role": self.leaf.role,
            "of": self.of,
            "slot": self.leaf.slot,
            "aliases": list(self.aliases),
            "trainable": self.leaf.trainable,
        }


@dataclass(frozen=True, slots=True)
class ValueRow:
    """One plain value."""

    path: str
    keys: Path
    leaf: ValueLeaf

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"path": self.path, "keys": typed(self.keys), **shown_value(self.leaf)}


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint of a folder.

    `path` is what to inspect, `format` who reads it (None where a part is missing that would tell). `step` is
    the number after the last `-` of its name, `counts` what the latest checkpoints of a folder count
    themselves (training_step.counted). `nbytes` is the size of its files, `time` seconds since 1970 as the
    state file says it, else when the files were last changed. `complete` is false when files that the names
    ask for are missing; nothing was read to find that out.
    """

    path: str
    format: str | None
    step: int | None
    nbytes: int
    complete: bool
    time: float
    latest: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def when(self) -> datetime:
        """The time in UTC, in whole seconds."""
        return datetime.fromtimestamp(int(self.time), UTC)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": urls.spelled(self.path),
            "format": self.format,
            "step": self.step,
            **training_step.columns(self.counts),
            "latest": self.latest,
            "nbytes": self.nbytes,
            "complete": self.complete,
            "time": f"{self.when:%Y-%m-%dT%H:%M:%SZ}",
        }


def shown_value(leaf: ValueLeaf) -> dict[str, Any]:
    """Return a plain value as JSON can hold it: bytes by their length, records by their class."""
    value = leaf.value
    if isinstance(value, Record):
        return {"type": value.name, "value": value.summary}
    if isinstance(value, bytes):
        return {"type": "bytes", "value": count(len(value), "byte")}
    if isinstance(value, complex):
        return {"type": "complex", "value": str(value)}
    return {"type": type(value).__name__, "value": value}


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sorting key in which l10 comes after l2, and ckpt-15000 after ckpt-7500."""
    parts = re.split(r"([0-9]+)", name)
    return [_counted(part) if number % 2 else (0, part) for number, part in enumerate(parts)]


def _counted(digits: str) -> tuple[int, str]:
    # Not int(): it takes no more than 4,300 digits, and a name in a file has as many as it likes.
    number = digits.lstrip("0")
    return len(number), number + digits
