"""Gathers what the page shows: one listing, one look at every tensor, and what lies beside the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpttool import places, sidecar
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.leaf import Leaf, Path
from ckpttool.ops.diff import difference
from ckpttool.ops.digest import digest_of
from ckpttool.ops.doctor import Diagnosis, examined
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.side_by_side import Side, laid, side
from ckpttool.ops.stats import stats_of
from ckpttool.ops.summary import Summary, summary
from ckpttool.report import conversion as conversions
from ckpttool.report import results
from ckpttool.report.comparison import PICTURED, Comparison, comparison
from ckpttool.report.conversion import Conversion
from ckpttool.report.pictures import Picture, Pictures, budget
from ckpttool.report.results import Results
from ckpttool.report.rows import Known, rows
from ckpttool.source import File

if TYPE_CHECKING:
    import numpy as np

# Pictures of one change: each side, and what lies between them.
_OF_A_CHANGE = 3


@dataclass(frozen=True, slots=True)
class Beside:
    """Files that say more of a checkpoint: evaluations, and the report of the conversion that made it."""

    evaluations: Sequence[str] = ()
    conversion: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """All that is on the page; `rows` are those of the tree, `pictures` the cells of all heat maps in base64.

    `signs` counts the tensors with one, `files` are all that was read.
    """

    summary: Summary
    sha256: str
    diagnosis: Diagnosis
    conversion: Conversion | None
    results: Results
    comparison: Comparison | None
    rows: list[dict[str, Any]]
    pictures: str
    signs: int
    files: tuple[File, ...]


def gather(
    path: str,
    other: str | None = None,
    *,
    beside: Beside,
    glob: str | None = None,
    layout: str | None = None,
    progress: Progress = silent,
) -> Contents:
    """Read what is at the path, and how `other` differs from it; raise what opening and reading raise.

    One tensor is in memory at a time, of two checkpoints one of each.
    """
    found = results.read(beside.evaluations)
    listed = summary(path, glob, layout)
    files = (*listed.checkpoint.files, *_beside(listed.checkpoint.path, beside))
    stages = 2 if other is None else 3
    sha256 = digest_of(listed.checkpoint, _stage(progress, 0, stages)).sha256
    told = _conversion(listed.checkpoint.path, sha256, beside.conversion)
    changes = None
    if other is not None:
        sides = Side(listed.checkpoint, listed.binding), side(open_checkpoint(other))
        files += sides[1].checkpoint.files
        changes = difference(laid(*sides, glob=glob), progress=_stage(progress, 1, stages))
    pictured = 0 if changes is None else min(PICTURED, len(changes.changed))
    pictures = Pictures(budget(len(listed.tensors) + _OF_A_CHANGE * pictured))
    shown: dict[str, Picture] = {}
    names = listed.checkpoint.tree.names

    def look(at: Path, _: Leaf, array: np.ndarray) -> None:
        if (made := pictures.add(names[at], array)) is not None:
            shown[names[at]] = made

    moving = _stage(progress, stages - 1, stages)
    numbers = stats_of(listed.checkpoint, listed.binding, glob, moving, seen=look)
    known = Known({each.path: each for each in numbers.tensors}, shown)
    compared = None if changes is None else comparison(changes, listed, pictures)
    return Contents(
        listed,
        sha256,
        examined(listed.checkpoint, listed.binding, numbers, sha256),
        told,
        found,
        compared,
        list(rows(listed, known, {} if compared is None else compared.marks)),
        pictures.encoded(),
        sum(1 for each in numbers.tensors if each.signs),
        files,
    )


def _beside(path: str, beside: Beside) -> tuple[File, ...]:
    """Return the documents that are read with the checkpoint, its own sidecar among them."""
    given = (*beside.evaluations, beside.conversion or sidecar.beside(path))
    return tuple(File.stamp(file) for file in given if places.isfile(file))


def _stage(progress: Progress, number: int, stages: int) -> Progress:
    """Return what reports one of several readings of the same bytes as its part of the whole."""

    def moving(done: int, total: int, steps: int | None = None) -> None:  # noqa: ARG001
        progress(number * total + done, stages * total)

    return moving


def _conversion(path: str, sha256: str, file: str | None) -> Conversion | None:
    if file is not None:
        return conversions.given(file, sha256)
    found = sidecar.load(path)
    return None if found is None else conversions.of_sidecar(found, sha256)
