"""The Checkpoint record: what one path on disk restores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpttool.source import File
from ckpttool.tree import Tree
from ckpttool.wire.asked import Asked

Integrity = Literal["crc32c", "crc32", "none"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What one path on disk restores.

    `path` is what was taken (a TensorFlow prefix rather than its `.index`), `files` everything that was
    read or that holds tensor bytes, `writer` what the file says about its writer, `integrity` the
    checksum that covers every tensor, `stored_nbytes` the size of the files, `notes` what a person
    should know. `details` is what only this format has to say (a SavedModel's signatures), as JSON values;
    docs/json.md describes it. `asks` is what loading by the format's own library would import, call or run.
    """

    path: str
    format: str
    tree: Tree
    files: tuple[File, ...]
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    asks: tuple[Asked, ...] = ()

    @property
    def stored_nbytes(self) -> int:
        """The number of bytes that the checkpoint takes on disk."""
        return sum(file.size for file in self.files)
