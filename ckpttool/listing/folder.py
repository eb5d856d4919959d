"""Checkpoints in a folder: names, times, sizes, and which one is the latest."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core import deferred, filesystem, plugins
from ckpttool.core.atomic_write import is_hidden_name
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, DeadlineError, NotFoundError, TruncatedError, is_system_error
from ckpttool.core.text import natural_sort_key
from ckpttool.formats import tf_common, torch_zip
from ckpttool.formats.detect import find_location, matching_formats, open_checkpoint
from ckpttool.formats.probe import Probe
from ckpttool.formats.tf_common import CheckpointState
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.listing import training_counters
from ckpttool.listing.rows import CheckpointRow

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


def add_training_counts(listed: list[CheckpointRow]) -> list[CheckpointRow]:
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
            location = find_location(path)
        except CkpttoolError:
            location = None
        latest = None if location is None else location.location
        home = path if latest is None else run_folder(latest, path)
        if home is None:
            return ()
        state, _ = read_state_file(home)
        return tuple(expand_run(list_by_step(home, state, latest), home))


def expand_run(listed: list[CheckpointRow], path: str) -> list[CheckpointRow]:
    """Return the rows; if the only one is the latest of a run in a subfolder, all checkpoints of that run."""
    home = run_folder(listed[0].path, path) if len(listed) == 1 else None
    if home is None or home == path:
        return listed
    return list_by_step(home, read_state_file(home)[0], listed[0].path)


def run_folder(latest: str, path: str) -> str | None:
    """Return the folder, the given one or one below it, of the run to which the latest checkpoint belongs.

    None if the given folder is one checkpoint (a SavedModel), which stands for itself and contains no others.
    """
    if is_directly_in(latest, path):
        return path
    home = os.path.dirname(latest)
    below = os.path.normpath(home).startswith(os.path.join(os.path.normpath(path), ""))
    return home if below and read_state_file(home)[0] is not None else None


def is_directly_in(location: str, path: str) -> bool:
    """Return whether the folder contains the checkpoint itself, not in a subfolder."""
    return os.path.normpath(os.path.dirname(location)) == os.path.normpath(path)


def read_state_file(folder: str) -> tuple[CheckpointState | None, list[str]]:
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


def list_by_step(folder: str, state: CheckpointState | None, latest: str | None) -> list[CheckpointRow]:
    """Return the checkpoints, from the first step to the last."""
    names = frozenset(filesystem.listdir(folder))
    homes = {folder: _FolderNames(names)}
    times = _times(state)
    rows = []
    for location in _find_places(folder, names):
        # A name may be a folder of checkpoints; its files are then in that folder.
        within = os.path.dirname(location.path) or os.curdir
        name = _PATTERN.sub("", os.path.basename(location.path))
        if (home := folder if filesystem.samefile(within, folder) else within) not in homes:
            homes[home] = _FolderNames(frozenset(filesystem.listdir(home)))
        own = homes[home].own(name)
        if location.format == torch_zip.SET_NAME:
            own = [os.path.basename(file) for file in torch_zip.set_members(location.path)]
        nbytes, changed = _measure_paths([os.path.join(within, name) for name in own])
        rows.append(
            CheckpointRow(
                location.path,
                location.format,
                int(step[1]) if (step := match_last_step(name)) is not None else None,
                nbytes,
                location.format is not None and _has_all_shards(own),
                times.get(name, changed),
                location.path == latest,
            )
        )
    return sorted(rows, key=lambda row: natural_sort_key(row.path))


def _find_places(folder: str, names: frozenset[str]) -> list[_CheckpointPath]:
    """Return the checkpoints that the names in the folder stand for, each once."""
    checkpoints: dict[str, _CheckpointPath] = {}
    for name in sorted(names)[:MAX_NAMES]:
        inner = Probe(os.path.join(folder, name))
        if is_hidden_name(name) or name.startswith(".") or name in (tf_common.NAME, _EVALUATIONS):
            continue
        if inner.kind == "file":
            inner.names = names  # set here to avoid listing the folder for each file
        elif inner.kind != "folder":
            continue
        checkpoints |= {
            path.path: path for path in _claim_name(inner) if path.path not in checkpoints or path.format
        }
    return _join_sets(list(checkpoints.values()))


def _join_sets(places: list[_CheckpointPath]) -> list[_CheckpointPath]:
    """Return the places; files of one agent (`PREFIX_actor`, `PREFIX_critic`, ...) are one: the prefix."""
    joined: dict[str, _CheckpointPath] = {}
    for checkpoint in places:
        prefix = torch_zip.set_prefix(checkpoint.path)
        for file in () if prefix is None else torch_zip.set_members(prefix):
            joined[file] = _CheckpointPath(str(prefix), torch_zip.SET_NAME)
    return list(dict.fromkeys(joined.get(checkpoint.path, checkpoint) for checkpoint in places))


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
    shards = [match for match in map(_SHARD.fullmatch, names) if match is not None]
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
                status = filesystem.stat_file(file)
            except DeadlineError:
                raise
            except NotFoundError:
                continue
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
                    raise
                continue
            total += status.size
            newest = max(newest, status.mtime_ns / 1e9)
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


def match_last_step(name: str) -> re.Match[str] | None:
    """Match the number after the last `-` of a name, None if it has none."""
    _, dash, tail = name.rpartition("-")
    return _STEP.fullmatch(dash + tail)
