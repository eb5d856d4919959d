"""The checkpoints that paths stand for: files, prefixes, folders and patterns, each once, in order."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from ckpttool.core import filesystem, limits, plugins, sidecar, urls
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import (
    CkpttoolError,
    NotACheckpointError,
    NotFoundError,
    UsageError,
    abbreviate_list,
)
from ckpttool.core.filesystem import list_names
from ckpttool.core.text import natural_sort_key
from ckpttool.formats.detect import CheckpointLocation, open_checkpoint, read_location, resolve
from ckpttool.formats.probe import Format
from ckpttool.listing.folder import (
    is_directly_in,
    list_by_step,
    list_checkpoints,
    match_last_step,
    read_state_file,
)
from ckpttool.listing.rows import CheckpointRow

# Names to examine in subfolders.
_MOST_BELOW = 2000
# Checkpoints of a folder that a message names.
NAMED = 5


@dataclass(frozen=True, slots=True)
class CheckpointChoice:
    """The checkpoint that a path stands for, or those of a folder from which the user must choose.

    `path` is the path to open, `location` the checkpoint that it leads to. With `candidates`, from
    `folders` training runs, both are the given path.
    """

    path: str
    location: str
    candidates: tuple[CheckpointRow, ...] = ()
    folders: int = 0
    deeper: bool = False  # whether there are deeper folders, which were not searched
    beside: tuple[str, ...] = ()  # other checkpoints in the folder, if no name has a step

    @property
    def problem(self) -> str:
        """Why there is no single checkpoint."""
        if self.folders > 1:
            return f"this folder contains {self.folders:,} training runs"
        return f"this folder contains {len(self.candidates):,} checkpoints, and no file names the latest"

    @property
    def hint(self) -> str:
        """How to choose one."""
        last = urls.display_url(self.candidates[-1].path)
        what = (
            "the folder contains several training runs"
            if self.folders > 1
            else "no checkpoint is marked as the latest"
        )
        return f"{what}; inspect {last}"

    def error(self, hint: str) -> NotACheckpointError:
        """Return the error that names the candidates, last first."""
        names = [os.path.relpath(candidate.path, self.path) for candidate in reversed(self.candidates)]
        return NotACheckpointError(
            self.problem, file=self.path, found=abbreviate_list(names, NAMED), hint=hint
        )


def open_path(path: str | os.PathLike[str]) -> Checkpoint:
    """List everything at the path without reading a tensor; a folder stands for one checkpoint in it.

    As on the command line, that is the latest that a file of the folder names, or the only one, also of
    subfolders. Raise NotACheckpointError with the candidates if there are several, NotFoundError,
    NotACheckpointError or UnsupportedError if there is nothing to list, and FormatError if the bytes are
    damaged.

    >>> import ckpttool
    >>> checkpoint = ckpttool.open("sample_ckpts/td3_pendulum_tf")
    >>> checkpoint.format, len(checkpoint.tree)
    ('tensor_bundle', 78)
    """
    choice = choose_checkpoint(os.fspath(path))
    if choice.candidates:
        raise choice.error(f"ckpttool.open({choice.candidates[-1].path!r})")
    return open_checkpoint(choice.path)


def choose_checkpoint(path: str) -> CheckpointChoice:
    """Return the checkpoint that a path stands for.

    A folder stands for the checkpoint that its files name as the latest, else for the only one in it or in
    the nearest folders below that contain any. A path that leads nowhere is returned as it is: opening it
    reports the error. Raise nothing.
    """
    unchanged = CheckpointChoice(path, path)
    if urls.is_url(path) or not filesystem.isdir(path):
        return unchanged
    try:
        location = resolve(path).location
        return replace(unchanged, location=location, beside=_components_beside(location, path))
    except NotACheckpointError:
        by_folder, deeper = _nearest_checkpoints(path)
    except (CkpttoolError, OSError):
        return unchanged
    if len(by_folder) == 1 and next(iter(by_folder)) != path:
        (folder,) = by_folder
        with suppress(CkpttoolError, OSError):
            location = resolve(folder).location
            return CheckpointChoice(location, location)
    if not by_folder:
        return unchanged
    if len(by_folder) > 1:
        latest = tuple(_latest_row(folder, rows) for folder, rows in by_folder.items())
        return CheckpointChoice(path, path, latest, len(by_folder), deeper)
    ((folder, rows),) = by_folder.items()
    row = rows[0] if len(rows) == 1 else _single_version(folder, rows)
    if row is not None:
        return CheckpointChoice(row.path, row.path)
    return CheckpointChoice(path, path, tuple(rows), 1, deeper)


def _components_beside(latest: str, folder: str) -> tuple[str, ...]:
    """Return the other TensorFlow checkpoints in the folder, if no name has a step: `actor` beside `critic`.

    They are parts of one agent rather than earlier checkpoints of the latest one.
    """
    if not is_directly_in(latest, folder) or match_last_step(os.path.basename(latest)) is not None:
        return ()
    stems = [name.removesuffix(".index") for name in sorted(list_names(folder)) if name.endswith(".index")]
    if os.path.basename(latest) not in stems:
        return ()
    return tuple(stem for stem in stems if stem != os.path.basename(latest) and match_last_step(stem) is None)


def _latest_row(folder: str, rows: list[CheckpointRow]) -> CheckpointRow:
    """Return the checkpoint of a run that its files name as the latest, else the one with the last name."""
    with suppress(CkpttoolError, OSError):
        latest = resolve(folder).location
        return next((row for row in rows if row.path == latest), rows[-1])
    return rows[-1]


def _nearest_checkpoints(top: str) -> tuple[dict[str, list[CheckpointRow]], bool]:
    """Return the complete checkpoints of the folder, else of the nearest level below it, by folder.

    The second result is whether folders of that level without checkpoints contain further folders.
    """
    level, left = [top], _MOST_BELOW
    while level and left > 0:
        by_folder: dict[str, list[CheckpointRow]] = {}
        below: list[str] = []
        for folder in level:
            names = sorted(list_names(folder))
            left -= len(names)
            with suppress(CkpttoolError, OSError):
                rows = list_by_step(folder, read_state_file(folder)[0], None)
                # What a subfolder leads to is by_folder in it, with the other checkpoints there.
                direct = [row for row in rows if is_directly_in(row.path, folder)]
                if complete := [row for row in direct if row.complete and row.format is not None]:
                    by_folder[folder] = complete
            inner = (os.path.join(folder, name) for name in names if not name.startswith("."))
            below += [inside for inside in inner if filesystem.isdir(inside) and not os.path.islink(inside)]
        if by_folder:
            return by_folder, any(os.path.dirname(inside) not in by_folder for inside in below)
        level = below
    return {}, False


def _single_version(folder: str, listed: list[CheckpointRow]) -> CheckpointRow | None:
    """Return the checkpoint that a folder of folders stands for: its only one, or its highest version.

    TensorFlow Serving loads `MODEL/123` with the highest number
    (tensorflow_serving/sources/storage_path/file_system_storage_path_source.proto).
    """
    if len(listed) == 1 and listed[0].complete:
        below = filesystem.isdir(listed[0].path) or not filesystem.samefile(
            os.path.dirname(listed[0].path), folder
        )
        return listed[0] if below else None
    if not all(row.complete and filesystem.isdir(row.path) for row in listed):
        return None
    names = [os.path.basename(row.path) for row in listed]
    if not all(name.isascii() and name.isdigit() for name in names):
        return None
    return max(listed, key=lambda row: int(os.path.basename(row.path)), default=None)


BESIDE = (sidecar.SUFFIX, sidecar.RESIDUE_SUFFIX)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint to read; `named` if it was given itself, not through a folder or a pattern.

    `location` is the matching format, if known: listing a folder has already tried every format.
    """

    path: str
    named: bool
    location: CheckpointLocation | None = None

    def open(self) -> Checkpoint:
        """Open the checkpoint; raise whatever `open_checkpoint` raises."""
        return (
            open_checkpoint(self.path)
            if self.location is None
            else read_location(self.location._replace(location=self.path))
        )


def expand_paths(paths: Sequence[str]) -> tuple[CheckpointEntry, ...]:
    """Return the checkpoints of the paths; a repeated checkpoint is listed once, at its first position.

    A folder stands for all checkpoints in it, unless it is a checkpoint itself; a pattern
    (`run/ckpt-*`) for the matching checkpoints. Shells expand patterns too: with several paths, the
    parts of a bundle (`.index`, shards) count as the bundle, and ckpttool's own files beside a
    checkpoint are ignored. Raise NotFoundError for a pattern without a match.
    """
    entries: dict[str, CheckpointEntry] = {}
    with filesystem.read_session():
        for path in paths:
            for entry in _expand_path(path, alone=len(paths) == 1):
                entries.setdefault(filesystem.realpath(entry.path), entry)
    return tuple(entries.values())


def _expand_path(path: str, *, alone: bool) -> Iterator[CheckpointEntry]:
    path = filesystem.resolve_path(path)
    if filesystem.isdir(path) and (inside := _list_run(path)):
        for row in inside:
            yield CheckpointEntry(row.path, named=False, location=_resolve_listed(row))
    elif glob.has_magic(path) and not filesystem.lexists(path):
        yield from _expand_pattern(path)
    elif alone or not path.endswith(BESIDE):
        yield _resolve_named(path)


def _list_run(path: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints of a folder; none if they are of one subfolder, and others contain some, too."""
    inside = list_checkpoints(path) or _list_below(path)
    homes = {os.path.normpath(os.path.dirname(row.path)) for row in inside}
    below = len(homes) == 1 and os.path.normpath(path) not in homes
    return () if below and choose_checkpoint(path).folders > 1 else inside


def _list_below(path: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints of the only folder below that contains any; none if the path is a checkpoint."""
    if urls.is_url(path):
        return ()
    try:
        resolve(path)
    except NotACheckpointError:
        by_folder, _ = _nearest_checkpoints(path)
        return tuple(next(iter(by_folder.values()))) if len(by_folder) == 1 else ()
    except (CkpttoolError, OSError):
        return ()
    return ()


def _resolve_listed(listed: CheckpointRow) -> CheckpointLocation | None:
    if listed.format is None:
        return None
    return CheckpointLocation(cast(Format, plugins.find("formats", listed.format).load()), listed.path)


def _expand_pattern(pattern: str) -> Iterator[CheckpointEntry]:
    names = [name for name in match_paths(pattern) if not name.endswith(BESIDE)]
    if not names:
        raise NotFoundError("no file or folder matches the pattern", file=pattern)
    for name in sorted(names, key=natural_sort_key):
        try:
            location = resolve(name)
            yield CheckpointEntry(location.location, named=False, location=location)
        except NotACheckpointError:
            continue
        except CkpttoolError:
            yield CheckpointEntry(name, named=False)  # opening a damaged checkpoint reports the error


def match_paths(pattern: str) -> list[str]:
    """Return the matching paths; on remote sites, only the names of one folder are listed."""
    if filesystem.find_store(pattern) is None:
        most = limits.current().checked_files
        names = list(itertools.islice(glob.iglob(pattern, recursive=True), most + 1))
        if len(names) > most:
            raise limits.limit_error(
                "checked_files", "the pattern matches too many names", None, file=pattern
            )
        return names
    folder, last = os.path.split(pattern)
    if glob.has_magic(folder.split("://", 1)[-1].partition("/")[2]):
        raise UsageError("for remote paths, only the last path component can be a pattern", file=pattern)
    names = fnmatch.filter(filesystem.listdir(folder), last)
    return [os.path.join(folder, name) for name in names if name[0] != "." or last[0] == "."]


def _resolve_named(path: str) -> CheckpointEntry:
    try:
        location = resolve(path)
    except CkpttoolError:
        return CheckpointEntry(path, named=True)  # opening it reports the error
    return CheckpointEntry(location.location, named=True, location=location)
