"""Checkpoints found in folders."""

from __future__ import annotations

import errno
import fnmatch
import glob
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from ckpttool.commands import inspect, save
from ckpttool.commands.inspect import CheckpointRow, CheckpointSummary, natural_sort_key, summary
from ckpttool.core import filesystem, limits, plugins, sidecar, urls
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.errors import (
    CkpttoolError,
    DeadlineError,
    NotACheckpointError,
    NotFoundError,
    TruncatedError,
    UsageError,
    is_system_error,
)
from ckpttool.formats import tf_common
from ckpttool.formats.common import Format, Probe
from ckpttool.formats.detect import (
    CheckpointLocation,
    matching_formats,
    open_checkpoint,
    read_location,
    resolve,
)
from ckpttool.formats.tf_common import CheckpointState
from ckpttool.libraries.recognize import recognize_checkpoint

# A folder of checkpoints: which there are, how old and how large, and which one is the latest.

# More names than this are not looked at, and more files than this not added up.
MAX_NAMES = 20_000
# Of so many of the latest checkpoints the counters are read.
COUNTED = 20

_STEP = re.compile(r"-([0-9]+)(?:\.[A-Za-z]\w*)*")
# tensorflow/core/util/tensor_bundle/naming.cc; V1 (tensorflow/python/training/saver.py) leaves out `.data`.
_SHARD = re.compile(r"(.+?)(?:\.data)?-([0-9]{5})-of-([0-9]{5})", re.DOTALL)
# How TensorFlow spells all shards of a V1 checkpoint.
_PATTERN = re.compile(r"-\?{5}-of-[0-9]{5}\Z")


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A folder of checkpoints of which none is known to be the latest."""

    path: str
    checkpoints: tuple[CheckpointRow, ...]
    notes: tuple[str, ...]
    hint: str

    def document(self) -> dict[str, Any]:
        """Return the JSON document: that of `inspect`, about no checkpoint."""
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
    """List the checkpoint at the path; of a folder of checkpoints list these too, and what the latest holds.

    A folder of folders stands for its only checkpoint, or for its highest number (`MODEL/123`). A folder of
    several checkpoints that does not name the latest gives a Folder. Raise what `summary` raises.
    """
    path = filesystem.resolve_path(path)
    with filesystem.read_session():
        return _inspect_path(path, glob, layout) if filesystem.isdir(path) else summary(path, glob, layout)


def _inspect_path(path: str, glob: str | None, layout: str | None) -> CheckpointSummary | CheckpointFolder:
    try:
        latest = resolve(path).location
    except CkpttoolError as error:
        return _without_latest(path, error, glob, layout)
    found = summary(path, glob, layout)
    # A folder that is one checkpoint (a SavedModel) stands for itself, and holds no others.
    if not _is_directly_in(latest, path):
        return found
    state, notes = _read_state_file(path)
    listed = _list_by_step(path, state, latest)
    return replace(found, checkpoints=tuple(_add_training_counts(listed)), notes=(*found.notes, *notes))


def _add_training_counts(listed: list[CheckpointRow]) -> list[CheckpointRow]:
    """Return the list with what the latest of them count of their training; elsewhere nothing is fetched."""
    first = max(0, len(listed) - COUNTED)
    return [*listed[:first], *map(_with_counts, listed[first:])]


def _with_counts(listed: CheckpointRow) -> CheckpointRow:
    if listed.format is None or not listed.complete or filesystem.find_store(listed.path) is not None:
        return listed
    try:
        checkpoint = open_checkpoint(listed.path)
        return replace(listed, counts=inspect.count_training(checkpoint, recognize_checkpoint(checkpoint)))
    except CkpttoolError as error:
        if is_system_error(error):
            raise  # a list without counts would be taken for that of a checkpoint that has none
        return listed  # looking into it says what is wrong


def list_checkpoints(path: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints that lie in a folder, from first to last step; none if it is one itself."""
    path = filesystem.resolve_path(path)
    with filesystem.read_session():
        try:
            latest = resolve(path).location
        except CkpttoolError:
            latest = None
        if latest is not None and not _is_directly_in(latest, path):
            return ()
        state, _ = _read_state_file(path)
        return tuple(_list_by_step(path, state, latest))


def _is_directly_in(location: str, path: str) -> bool:
    return os.path.normpath(os.path.dirname(location)) == os.path.normpath(path)


def _without_latest(
    path: str, error: CkpttoolError, glob: str | None, layout: str | None
) -> CheckpointSummary | CheckpointFolder:
    state, notes = _read_state_file(path)
    listed = _list_by_step(path, state, None)
    whole = [each for each in listed if each.complete and each.format is not None]
    if state is None and (taken := _single_version(path, listed)) is not None:
        found = summary(taken.path, glob, layout)
        listed = [replace(each, latest=each is taken) for each in listed]
        return replace(found, checkpoints=tuple(_add_training_counts(listed)))
    if len(listed) < 2 or not whole:
        raise error
    if state is not None:
        notes = [*notes, error.message]
    return CheckpointFolder(
        path,
        tuple(_add_training_counts(listed)),
        tuple(notes),
        f"none is named as the latest; look at {urls.display_url(whole[-1].path)}",
    )


def _single_version(folder: str, listed: list[CheckpointRow]) -> CheckpointRow | None:
    """Return what a folder of folders stands for: its only checkpoint, or its highest version.

    TensorFlow Serving loads `MODEL/123` of the highest number
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
    """Return what the folder's state file says, and what a person should know about it."""
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
    """The names in a folder, and those that each prefix has."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._files: dict[str, list[str]] = {}
        for name in names:
            for stem in _stems(name):
                self._files.setdefault(stem, []).append(name)

    def own(self, name: str) -> list[str]:
        """Return the files of a prefix, and what has the name itself."""
        return [*self._files.get(name, []), *({name} & self._names)]


def _list_by_step(folder: str, state: CheckpointState | None, latest: str | None) -> list[CheckpointRow]:
    """Return the checkpoints, from the first step to the last."""
    names = frozenset(filesystem.listdir(folder))
    homes = {folder: _FolderNames(names)}
    times = _times(state)
    found = []
    for place in _find_places(folder, names):
        # A folder of checkpoints may stand in the folder; then the files are there.
        within = os.path.dirname(place.path) or os.curdir
        name = _PATTERN.sub("", os.path.basename(place.path))
        if (home := folder if filesystem.samefile(within, folder) else within) not in homes:
            homes[home] = _FolderNames(frozenset(filesystem.listdir(home)))
        own = homes[home].own(name)
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
    """Return what the names in the folder stand for, each once."""
    found: dict[str, _CheckpointPath] = {}
    for name in sorted(names)[:MAX_NAMES]:
        inner = Probe(os.path.join(folder, name))
        if is_hidden_name(name) or name.startswith(".") or name == tf_common.NAME:
            continue
        if inner.kind == "file":
            inner.names = names  # what `names` would find, without a look at the folder for each file
        elif inner.kind != "folder":
            continue
        found |= {each.path: each for each in _claim_name(inner) if each.path not in found or each.format}
    return list(found.values())


def _claim_name(inner: Probe) -> Iterator[_CheckpointPath]:
    """Give what a name in a folder stands for; without a format where it is incomplete or cannot be read."""
    try:
        for claim in matching_formats(inner, plugins.BUILT_IN["formats"]):
            yield _CheckpointPath(claim.location, claim.format.NAME)
    except TruncatedError:
        if (shard := _SHARD.fullmatch(inner.name)) is not None:
            yield _CheckpointPath(os.path.join(inner.folder, shard[1]), None)
    except DeadlineError:
        raise  # a list without this file would be taken for the whole list
    except NotFoundError as error:
        if inner.kind == "file" and error.file == inner.path:
            yield _CheckpointPath(inner.path, None)
    except CkpttoolError:
        return
    if inner.refused is not None and not inner.head:
        # It may be a checkpoint, and whoever opens it is told why it cannot be read.
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
        # One file, or an index without any of its shards.
        return not any(name.endswith(".index") for name in names)
    totals = {int(shard[3]) for shard in shards}
    return any({int(s[2]) for s in shards if int(s[3]) == total} >= set(range(total)) for total in totals)


def _measure_paths(paths: list[str]) -> tuple[int, float]:
    """Return the bytes at the paths, those in folders with them, and the time of the last change."""
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
    # The years that a calendar of four digits has.
    return {name: time for name, time in pairs if 0 <= time < 2**37 and math.isfinite(time)}


def _last_step(name: str) -> re.Match[str] | None:
    _, dash, tail = name.rpartition("-")
    return _STEP.fullmatch(dash + tail)


# Which checkpoints are meant by files, prefixes, folders and patterns: each once, in order.

BESIDE = (sidecar.SUFFIX, save.SUFFIX)


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint to look at; `named` if a person pointed at this very one, not at a folder or pattern.

    `found` is who reads it, where that is known: a folder of them has asked every format already.
    """

    path: str
    named: bool
    found: CheckpointLocation | None = None

    def open(self) -> Checkpoint:
        """List it; raise what `open_checkpoint` raises."""
        return (
            open_checkpoint(self.path)
            if self.found is None
            else read_location(self.found._replace(location=self.path))
        )


def expand_paths(paths: Sequence[str]) -> tuple[CheckpointEntry, ...]:
    """Return what the paths stand for: one that several of them mean is there once, where it came first.

    A folder stands for all checkpoints in it, unless it is one itself; a pattern (`run/ckpt-*`) for what in
    it is a checkpoint. A shell expands patterns too, so that the parts of a bundle (`.index`, shards) count
    as the bundle, and our own files beside a checkpoint as nothing, if there are several paths. Raise
    NotFoundError for a pattern that nothing matches.
    """
    found: dict[str, CheckpointEntry] = {}
    with filesystem.read_session():
        for path in paths:
            for entry in _expand_path(path, alone=len(paths) == 1):
                found.setdefault(filesystem.realpath(entry.path), entry)
    return tuple(found.values())


def _expand_path(path: str, *, alone: bool) -> Iterator[CheckpointEntry]:
    path = filesystem.resolve_path(path)
    if filesystem.isdir(path) and (inside := list_checkpoints(path)):
        for each in inside:
            yield CheckpointEntry(each.path, named=False, found=_resolve_listed(each))
    elif glob.has_magic(path) and not filesystem.lexists(path):
        yield from _expand_pattern(path)
    elif alone or not path.endswith(BESIDE):
        yield _resolve_named(path)


def _resolve_listed(listed: CheckpointRow) -> CheckpointLocation | None:
    if listed.format is None:
        return None
    return CheckpointLocation(cast(Format, plugins.find("formats", listed.format).load()), listed.path)


def _expand_pattern(pattern: str) -> Iterator[CheckpointEntry]:
    names = [name for name in match_paths(pattern) if not name.endswith(BESIDE)]
    if not names:
        raise NotFoundError("nothing matches the pattern", file=pattern)
    for name in sorted(names, key=natural_sort_key):
        try:
            found = resolve(name)
            yield CheckpointEntry(found.location, named=False, found=found)
        except NotACheckpointError:
            continue
        except CkpttoolError:
            yield CheckpointEntry(name, named=False)  # a damaged one is told of when it is opened


def match_paths(pattern: str) -> list[str]:
    """Return what matches; elsewhere in one folder only, whose names are asked for."""
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
        raise UsageError("elsewhere a pattern is for names in one folder: the last part", file=pattern)
    names = fnmatch.filter(filesystem.listdir(folder), last)
    return [os.path.join(folder, name) for name in names if name[0] != "." or last[0] == "."]


def _resolve_named(path: str) -> CheckpointEntry:
    try:
        found = resolve(path)
    except CkpttoolError:
        return CheckpointEntry(path, named=True)  # opening it will say what is wrong
    return CheckpointEntry(found.location, named=True, found=found)


def list_names(folder: str) -> list[str]:
    """Return the names in a folder; none of one that cannot be listed."""
    try:
        return filesystem.listdir(folder)
    except (OSError, CkpttoolError):
        return []
