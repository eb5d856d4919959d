"""Entries of listings: a tensor, a plain value, a checkpoint of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ckpttool.core import urls
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.text import describe_record
from ckpttool.core.tree import Leaf, Path, ValueLeaf, json_value, path_to_json
from ckpttool.listing.training_counters import step_columns


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor; `of` is the display path of the parameter that a slot belongs to."""

    __repr__ = describe_record

    path: str
    keys: Path
    leaf: Leaf
    of: str | None
    aliases: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "keys": path_to_json(self.keys),
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
        return {"path": self.path, "keys": path_to_json(self.keys), **json_value(self.leaf)}


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """One checkpoint of a folder.

    `path` is the path to inspect, `format` the format that reads it (None where a file needed to
    decide is missing). `step` is the number after the last `-` of its name, `counts` the counters
    stored in the latest checkpoints of a folder (count_training). `nbytes` is the size of its files,
    `time` seconds since 1970 from the state file, else the last change of the files. `complete` is
    false when files implied by the names are missing; no file is read to determine that.
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
        """The UTC time in whole seconds."""
        return datetime.fromtimestamp(int(self.time), UTC)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": urls.display_url(self.path),
            "format": self.format,
            "step": self.step,
            **step_columns(self.counts),
            "latest": self.latest,
            "nbytes": self.nbytes,
            "complete": self.complete,
            "time": f"{self.when:%Y-%m-%dT%H:%M:%SZ}",
        }
