"""Find checkpoints in folders."""

from __future__ import annotations

import errno
import fnmatch
import glob
import itertools
import math
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from ckpttool.commands import training_counters
from ckpttool.commands.inspect import CheckpointSummary, summary
from ckpttool.commands.rows import CheckpointRow
from ckpttool.conversion import reverse
from ckpttool.core import deferred, filesystem, limits, plugins, sidecar, urls
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import (
    CkpttoolError,
    DeadlineError,
    NotACheckpointError,
    NotFoundError,
    TruncatedError,
    UsageError,
    abbreviate_list,
    is_system_error,
)
from ckpttool.core.filesystem import list_names
from ckpttool.core.text import describe_record, natural_sort_key
from ckpttool.core.tree_views import render_record
from ckpttool.formats import tf_common, torch_zip
from ckpttool.formats.detect import (
    CheckpointLocation,
    matching_formats,
    open_checkpoint,
    read_location,
    resolve,
)
from ckpttool.formats.probe import Format, Probe
from ckpttool.formats.tf_common import CheckpointState
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.libraries.schema import NO_LAYOUT

# Checkpoints in a folder: names, times, sizes, and which one is the latest.

# Maximum number of names to examine, and of files to add up.
MAX_NAMES = 20_000
# Training counters are read from this many of the latest checkpoints.
COUNTED = 20

_STEP = deferred.compile(r"-([0-9]+)(?:\.[A-Za-z]\w*)*")
# tensorflow/core/util/tensor_bundle/naming.cc; V1 (tensorflow/python/training/saver.py) leaves out `.data`.
_SHARD = deferred.compile(r"(.+?)(?:\.data)?-([0-9]{5})-of-([0-9]{5})", re.DOTALL)
_EVALUATIONS = "evaluations.npz"  # returns: stable_baselines3/common/callbacks.py, EvalCallback
# How TensorFlow writes the names of all shards of a V1 checkpoint.
_PATTERN = deferred.compile(r"-\?{5}-of-[0-9]{5}\Z")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints of which none is marked as the latest."""

    __repr__ = describe_record
    _repr_html_ = render_record

    path: str
    checkpoints: tuple[CheckpointRow, ...]
    notes: tuple[str, ...]
    hint: str

    def document(self) -> dict[str, Any]:
        """Return the JSON document: that of `inspect`, without a checkpoint."""
        return {
            "path": urls.display_url(self.path),
            **dict.fromkeys(("format", "writer", "layout")),
            "tensors": [],
            "values": [],
            "totals": {**dict.fromkeys(("tensors", "parameters", "nbytes", "stored_nbytes"), 0), "roles": {}},
            "modules": [],
            "notes": [*self.notes, self.hint],
            "asks": None,
            "details": {},
            "checkpoints": [listed.document() for listed in self.checkpoints],
        }


def inspect_path(
    path: str, glob: str | None = None, layout: str | None = None
) -> CheckpointSummary | CheckpointFolder:
    """Inspect the checkpoint at the path; for a folder of checkpoints, list them and inspect the latest.

    A folder of folders stands for its only checkpoint, or for its highest number (`MODEL/123`). For a
    folder of several checkpoints without a marked latest one, return a CheckpointFolder. Raise whatever
    `summary` raises.
    """
    path = filesystem.resolve_path(path)
    if layout not in (None, NO_LAYOUT):
        plugins.find("layouts", layout)  # a list of checkpoints recognises none
    with filesystem.read_session():
        return _inspect_path(path, glob, layout) if filesystem.isdir(path) else summary(path, glob, layout)


def _inspect_path(path: str, glob: str | None, layout: str | None) -> CheckpointSummary | CheckpointFolder:
    try:
        latest = resolve(path).location
    except CkpttoolError as error:
        return _without_latest(path, error, glob, layout)
    found = summary(path, glob, layout)
    home = _run_folder(latest, path)
    if home is None:
        return found
    state, notes = _read_state_file(home)
    listed = _list_by_step(home, state, latest)
    return replace(found, checkpoints=tuple(_add_training_counts(listed)), notes=(*found.notes, *notes))


def _add_training_counts(listed: list[CheckpointRow]) -> list[CheckpointRow]:
    """Return the list with the training counters of the latest checkpoints; on remote sites, read none."""
    first = max(0, len(listed) - COUNTED)
    return [*listed[:first], *map(_with_counts, listed[first:])]


def _with_counts(listed: CheckpointRow) -> CheckpointRow:
    if listed.format is None or not listed.complete or filesystem.find_store(listed.path) is not None:
        return listed
    try:
        checkpoint = open_checkpoint(listed.path)
        return replace(
            listed, counts=training_counters.count_training(checkpoint, recognize_checkpoint(checkpoint))
        )
    except CkpttoolError as error:
        if is_system_error(error) or isinstance(error, NotFoundError):
            raise  # missing counts would look like a checkpoint without counters
        return listed  # opening it reports the problem


def list_checkpoints(path: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints in a folder, from first to last step; none if the folder is a checkpoint."""
    path = filesystem.resolve_path(path)
    with filesystem.read_session():
        try:
            latest = resolve(path).location
        except CkpttoolError:
            latest = None
        home = path if latest is None else _run_folder(latest, path)
        if home is None:
            return ()
        state, _ = _read_state_file(home)
        return tuple(_expand_run(_list_by_step(home, state, latest), home))


def _expand_run(listed: list[CheckpointRow], path: str) -> list[CheckpointRow]:
    """Return the rows; if the only one is the latest of a run in a subfolder, all checkpoints of that run."""
    home = _run_folder(listed[0].path, path) if len(listed) == 1 else None
    if home is None or home == path:
        return listed
    return _list_by_step(home, _read_state_file(home)[0], listed[0].path)


def _run_folder(latest: str, path: str) -> str | None:
    """Return the folder, the given one or one below it, of the run to which the latest checkpoint belongs.

    None if the given folder is one checkpoint (a SavedModel), which stands for itself and contains no others.
    """
    if _is_directly_in(latest, path):
        return path
    home = os.path.dirname(latest)
    below = os.path.normpath(home).startswith(os.path.join(os.path.normpath(path), ""))
    return home if below and _read_state_file(home)[0] is not None else None


def _is_directly_in(location: str, path: str) -> bool:
    return os.path.normpath(os.path.dirname(location)) == os.path.normpath(path)


def _without_latest(
    path: str, error: CkpttoolError, glob: str | None, layout: str | None
) -> CheckpointSummary | CheckpointFolder:
    state, notes = _read_state_file(path)
    listed = _list_by_step(path, state, None)
    whole = [each for each in listed if each.complete and each.format is not None]
    choice = choose_checkpoint(path) if state is None else CheckpointChoice(path, path)
    if choice.location != path:
        found = summary(choice.location, glob, layout)
        listed = _expand_run(listed, path)
        listed = [replace(each, latest=each.path == choice.location) for each in listed]
        return replace(found, checkpoints=tuple(_add_training_counts(listed)))
    if len(listed) < 2 and choice.candidates:
        notes = [f"deeper folders were not searched: ckpttool check {shlex.quote(path)} searches all"]
        return CheckpointFolder(
            path,
            tuple(_add_training_counts([*choice.candidates])),
            tuple(notes if choice.deeper else ()),
            choice.hint,
        )
    if len(listed) < 2 or not whole:
        raise error
    if state is not None:
        notes = [*notes, error.message]
    return CheckpointFolder(
        path,
        tuple(_add_training_counts(listed)),
        tuple(notes),
        choice.hint
        if choice.folders > 1
        else f"no checkpoint is marked as the latest; inspect {urls.display_url(whole[-1].path)}",
    )


# The checkpoint that a folder stands for, in every command that reads one.

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
        names = [os.path.relpath(each.path, self.path) for each in reversed(self.candidates)]
        return NotACheckpointError(
            self.problem, file=self.path, found=abbreviate_list(names, NAMED), hint=hint
        )


def open_path(path: str | os.PathLike[str]) -> Checkpoint:
    """List everything at the path without reading a tensor; a folder stands for one checkpoint in it.

    As on the command line, that is the latest that a file of the folder names, or the only one, also of
    subfolders. Raise NotACheckpointError with the candidates if there are several, NotFoundError,
    NotACheckpointError or UnsupportedError if there is nothing to list, and FormatError if the bytes are
    damaged.
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
    given = CheckpointChoice(path, path)
    if urls.is_url(path) or not filesystem.isdir(path):
        return given
    try:
        location = resolve(path).location
        return replace(given, location=location, beside=_components_beside(location, path))
    except NotACheckpointError:
        found, deeper = _nearest_checkpoints(path)
    except (CkpttoolError, OSError):
        return given
    if len(found) == 1 and next(iter(found)) != path:
        (folder,) = found
        with suppress(CkpttoolError, OSError):
            location = resolve(folder).location
            return CheckpointChoice(location, location)
    if not found:
        return given
    if len(found) > 1:
        latest = tuple(_latest_row(folder, rows) for folder, rows in found.items())
        return CheckpointChoice(path, path, latest, len(found), deeper)
    ((folder, rows),) = found.items()
    taken = rows[0] if len(rows) == 1 else _single_version(folder, rows)
    if taken is not None:
        return CheckpointChoice(taken.path, taken.path)
    return CheckpointChoice(path, path, tuple(rows), 1, deeper)


def _components_beside(latest: str, folder: str) -> tuple[str, ...]:
    """Return the other TensorFlow checkpoints in the folder, if no name has a step: `actor` beside `critic`.

    They are parts of one agent rather than earlier checkpoints of the latest one.
    """
    if not _is_directly_in(latest, folder) or _last_step(os.path.basename(latest)) is not None:
        return ()
    stems = [name.removesuffix(".index") for name in sorted(list_names(folder)) if name.endswith(".index")]
    if os.path.basename(latest) not in stems:
        return ()
    return tuple(stem for stem in stems if stem != os.path.basename(latest) and _last_step(stem) is None)


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
        found: dict[str, list[CheckpointRow]] = {}
        below: list[str] = []
        for folder in level:
            names = sorted(list_names(folder))
            left -= len(names)
            with suppress(CkpttoolError, OSError):
                rows = _list_by_step(folder, _read_state_file(folder)[0], None)
                # What a subfolder leads to is found in it, with the other checkpoints there.
                direct = [row for row in rows if _is_directly_in(row.path, folder)]
                if complete := [row for row in direct if row.complete and row.format is not None]:
                    found[folder] = complete
            inner = (os.path.join(folder, name) for name in names if not name.startswith("."))
            below += [each for each in inner if filesystem.isdir(each) and not os.path.islink(each)]
        if found:
            return found, any(os.path.dirname(each) not in found for each in below)
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
    if not all(each.complete and filesystem.isdir(each.path) for each in listed):
        return None
    names = [os.path.basename(each.path) for each in listed]
    if not all(name.isascii() and name.isdigit() for name in names):
        return None
    return max(listed, key=lambda each: int(os.path.basename(each.path)), default=None)


def _read_state_file(folder: str) -> tuple[CheckpointState | None, list[str]]:
    """Return the contents of the folder's state file, and notes on it."""
    file = os.path.join(folder, tf_common.NAME)
    probe = Probe(file)
    if probe.kind != "file" or not tf_common.is_state_file(probe.head):
        return None, []
    try:
        return tf_common.read_state(file), []
    except (CkpttoolError, OSError) as error:
        return None, [str(error)]


class _CheckpointPath(NamedTuple):
    path: str
    format: str | None


class _FolderNames:
    """The names in a folder, grouped by prefix."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._files: dict[str, list[str]] = {}
        for name in names:
            for stem in _stems(name):
                self._files.setdefault(stem, []).append(name)

    def own(self, name: str) -> list[str]:
        """Return the files of a prefix, and the entry with that exact name."""
        return [*self._files.get(name, []), *({name} & self._names)]


def _list_by_step(folder: str, state: CheckpointState | None, latest: str | None) -> list[CheckpointRow]:
    """Return the checkpoints, from the first step to the last."""
    names = frozenset(filesystem.listdir(folder))
    homes = {folder: _FolderNames(names)}
    times = _times(state)
    found = []
    for place in _find_places(folder, names):
        # A name may be a folder of checkpoints; its files are then in that folder.
        within = os.path.dirname(place.path) or os.curdir
        name = _PATTERN.sub("", os.path.basename(place.path))
        if (home := folder if filesystem.samefile(within, folder) else within) not in homes:
            homes[home] = _FolderNames(frozenset(filesystem.listdir(home)))
        own = homes[home].own(name)
        if place.format == torch_zip.SET_NAME:
            own = [os.path.basename(file) for file in torch_zip.set_members(place.path)]
        nbytes, changed = _measure_paths([os.path.join(within, each) for each in own])
        found.append(
            CheckpointRow(
                place.path,
                place.format,
                int(step[1]) if (step := _last_step(name)) is not None else None,
                nbytes,
                place.format is not None and _has_all_shards(own),
                times.get(name, changed),
                place.path == latest,
            )
        )
    return sorted(found, key=lambda each: natural_sort_key(each.path))


def _find_places(folder: str, names: frozenset[str]) -> list[_CheckpointPath]:
    """Return the checkpoints that the names in the folder stand for, each once."""
    found: dict[str, _CheckpointPath] = {}
    for name in sorted(names)[:MAX_NAMES]:
        inner = Probe(os.path.join(folder, name))
        if is_hidden_name(name) or name.startswith(".") or name in (tf_common.NAME, _EVALUATIONS):
            continue
        if inner.kind == "file":
            inner.names = names  # set here to avoid listing the folder for each file
        elif inner.kind != "folder":
            continue
        found |= {each.path: each for each in _claim_name(inner) if each.path not in found or each.format}
    return _join_sets(list(found.values()))


def _join_sets(places: list[_CheckpointPath]) -> list[_CheckpointPath]:
    """Return the places; files of one agent (`PREFIX_actor`, `PREFIX_critic`, ...) are one: the prefix."""
    joined: dict[str, _CheckpointPath] = {}
    for place in places:
        prefix = torch_zip.set_prefix(place.path)
        for file in () if prefix is None else torch_zip.set_members(prefix):
            joined[file] = _CheckpointPath(str(prefix), torch_zip.SET_NAME)
    return list(dict.fromkeys(joined.get(place.path, place) for place in places))


def _claim_name(inner: Probe) -> Iterator[_CheckpointPath]:
    """Yield the checkpoints of a name in a folder; without a format if incomplete or unreadable."""
    try:
        for claim in matching_formats(inner, plugins.BUILT_IN["formats"]):
            yield _CheckpointPath(claim.location, claim.format.NAME)
    except TruncatedError:
        if (shard := _SHARD.fullmatch(inner.name)) is not None:
            yield _CheckpointPath(os.path.join(inner.folder, shard[1]), None)
    except DeadlineError:
        raise  # a list without this file would look complete
    except NotFoundError as error:
        if inner.kind == "file" and error.file == inner.path:
            yield _CheckpointPath(inner.path, None)
    except CkpttoolError:
        return
    if inner.refused is not None and not inner.head:
        # It may be a checkpoint; opening it reports why it cannot be read.
        yield _CheckpointPath(inner.path, None)


def _stems(name: str) -> Iterator[str]:
    """Yield the prefixes that a file may belong to."""
    if (shard := _SHARD.fullmatch(name)) is not None:
        yield shard[1]
    for suffix in (".index", ".meta"):
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def _has_all_shards(names: list[str]) -> bool:
    shards = [found for found in map(_SHARD.fullmatch, names) if found is not None]
    if not shards:
        # A single file, or an index without any of its shards.
        return not any(name.endswith(".index") for name in names)
    totals = {int(shard[3]) for shard in shards}
    return any({int(s[2]) for s in shards if int(s[3]) == total} >= set(range(total)) for total in totals)


def _measure_paths(paths: list[str]) -> tuple[int, float]:
    """Return the total bytes at the paths, including folders, and the time of the last change."""
    total, newest = 0, 0.0
    for path in paths:
        files = [path] if filesystem.isfile(path) else _walk_files(path)
        for file in files:
            try:
                found = filesystem.stat_file(file)
            except DeadlineError:
                raise
            except NotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                    raise
                continue
            total += found.size
            newest = max(newest, found.mtime_ns / 1e9)
    return total, newest


def _walk_files(folder: str) -> list[str]:
    files: list[str] = []
    for at, names in filesystem.walk(folder):
        files += [os.path.join(at, name) for name in names]
        if len(files) >= MAX_NAMES:
            break
    return files[:MAX_NAMES]


def _times(state: CheckpointState | None) -> dict[str, float]:
    if state is None:
        return {}
    pairs = zip(map(os.path.basename, state.every), state.times, strict=False)
    # Years with four digits.
    return {name: time for name, time in pairs if 0 <= time < 2**37 and math.isfinite(time)}


def _last_step(name: str) -> re.Match[str] | None:
    _, dash, tail = name.rpartition("-")
    return _STEP.fullmatch(dash + tail)


# Checkpoints given by files, prefixes, folders and patterns: each once, in order.

BESIDE = (sidecar.SUFFIX, reverse.SUFFIX)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint to read; `named` if it was given itself, not through a folder or a pattern.

    `found` is the matching format, if known: listing a folder has already tried every format.
    """

    path: str
    named: bool
    found: CheckpointLocation | None = None

    def open(self) -> Checkpoint:
        """Open the checkpoint; raise whatever `open_checkpoint` raises."""
        return (
            open_checkpoint(self.path)
            if self.found is None
            else read_location(self.found._replace(location=self.path))
        )


def expand_paths(paths: Sequence[str]) -> tuple[CheckpointEntry, ...]:
    """Return the checkpoints of the paths; a repeated checkpoint is listed once, at its first position.

    A folder stands for all checkpoints in it, unless it is a checkpoint itself; a pattern
    (`run/ckpt-*`) for the matching checkpoints. Shells expand patterns too: with several paths, the
    parts of a bundle (`.index`, shards) count as the bundle, and ckpttool's own files beside a
    checkpoint are ignored. Raise NotFoundError for a pattern without a match.
    """
    found: dict[str, CheckpointEntry] = {}
    with filesystem.read_session():
        for path in paths:
            for entry in _expand_path(path, alone=len(paths) == 1):
                found.setdefault(filesystem.realpath(entry.path), entry)
    return tuple(found.values())


def _expand_path(path: str, *, alone: bool) -> Iterator[CheckpointEntry]:
    path = filesystem.resolve_path(path)
    if filesystem.isdir(path) and (inside := list_checkpoints(path) or _list_below(path)):
        for each in inside:
            yield CheckpointEntry(each.path, named=False, found=_resolve_listed(each))
    elif glob.has_magic(path) and not filesystem.lexists(path):
        yield from _expand_pattern(path)
    elif alone or not path.endswith(BESIDE):
        yield _resolve_named(path)


def _list_below(path: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints of the only folder below that contains any; none if the path is a checkpoint."""
    if urls.is_url(path):
        return ()
    try:
        resolve(path)
    except NotACheckpointError:
        found, _ = _nearest_checkpoints(path)
        return tuple(next(iter(found.values()))) if len(found) == 1 else ()
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
            found = resolve(name)
            yield CheckpointEntry(found.location, named=False, found=found)
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
        found = resolve(path)
    except CkpttoolError:
        return CheckpointEntry(path, named=True)  # opening it reports the error
    return CheckpointEntry(found.location, named=True, found=found)
