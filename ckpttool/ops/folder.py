"""A folder of checkpoints: which there are, how old and how large, and which one is the latest."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckpttool import places, plugins, urls
from ckpttool.errors import CkpttoolError, DeadlineError, NotFoundError, TruncatedError, is_of_system
from ckpttool.formats import checkpoint_state
from ckpttool.formats.checkpoint_state import State
from ckpttool.formats.probe import Probe
from ckpttool.formats.resolve import claims, open_checkpoint, resolve
from ckpttool.layouts.recognise import recognised
from ckpttool.ops import training_step
from ckpttool.ops.rows import Listed, natural
from ckpttool.ops.summary import Summary, summary
from ckpttool.writing import hidden

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
class Folder:
    """A folder of checkpoints of which none is known to be the latest."""

    path: str
    checkpoints: tuple[Listed, ...]
    notes: tuple[str, ...]
    hint: str

    def document(self) -> dict[str, Any]:
        """Return the JSON document: that of `inspect`, about no checkpoint."""
        return {
            "path": urls.spelled(self.path),
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


def look(path: str, glob: str | None = None, layout: str | None = None) -> Summary | Folder:
    """List the checkpoint at the path; of a folder of checkpoints list these too, and what the latest holds.

    A folder of folders stands for its only checkpoint, or for its highest number (`MODEL/123`). A folder of
    several checkpoints that does not name the latest gives a Folder. Raise what `summary` raises.
    """
    path = places.named(path)
    with places.visit():
        return _looked(path, glob, layout) if places.isdir(path) else summary(path, glob, layout)


def _looked(path: str, glob: str | None, layout: str | None) -> Summary | Folder:
    try:
        latest = resolve(path).location
    except CkpttoolError as error:
        return _without_latest(path, error, glob, layout)
    found = summary(path, glob, layout)
    # A folder that is one checkpoint (a SavedModel) stands for itself, and holds no others.
    if not _lies_in(latest, path):
        return found
    state, notes = _state(path)
    listed = _listed(path, state, latest)
    return replace(found, checkpoints=tuple(_counted(listed)), notes=(*found.notes, *notes))


def _counted(listed: list[Listed]) -> list[Listed]:
    """Return the list with what the latest of them count of their training; elsewhere nothing is fetched."""
    first = max(0, len(listed) - COUNTED)
    return [*listed[:first], *map(_with_counts, listed[first:])]


def _with_counts(listed: Listed) -> Listed:
    if listed.format is None or not listed.complete or places.store(listed.path) is not None:
        return listed
    try:
        checkpoint = open_checkpoint(listed.path)
        return replace(listed, counts=training_step.counted(checkpoint, recognised(checkpoint)))
    except CkpttoolError as error:
        if is_of_system(error):
            raise  # a list without counts would be taken for that of a checkpoint that has none
        return listed  # looking into it says what is wrong


def checkpoints(path: str) -> tuple[Listed, ...]:
    """Return the checkpoints that lie in a folder, from first to last step; none if it is one itself."""
    path = places.named(path)
    with places.visit():
        try:
            latest = resolve(path).location
        except CkpttoolError:
            latest = None
        if latest is not None and not _lies_in(latest, path):
            return ()
        state, _ = _state(path)
        return tuple(_listed(path, state, latest))


def _lies_in(location: str, path: str) -> bool:
    return os.path.normpath(os.path.dirname(location)) == os.path.normpath(path)


def _without_latest(
    path: str, error: CkpttoolError, glob: str | None, layout: str | None
) -> Summary | Folder:
    state, notes = _state(path)
    listed = _listed(path, state, None)
    whole = [each for each in listed if each.complete and each.format is not None]
    if state is None and (taken := _served(path, listed)) is not None:
        found = summary(taken.path, glob, layout)
        listed = [replace(each, latest=each is taken) for each in listed]
        return replace(found, checkpoints=tuple(_counted(listed)))
    if len(listed) < 2 or not whole:
        raise error
    if state is not None:
        notes = [*notes, error.message]
    return Folder(
        path,
        tuple(_counted(listed)),
        tuple(notes),
        f"none is named as the latest; look at {urls.spelled(whole[-1].path)}",
    )


def _served(folder: str, listed: list[Listed]) -> Listed | None:
    """Return what a folder of folders stands for: its only checkpoint, or its highest version.

    TensorFlow Serving loads `MODEL/123` of the highest number
    (tensorflow_serving/sources/storage_path/file_system_storage_path_source.proto).
    """
    if len(listed) == 1 and listed[0].complete:
        below = places.isdir(listed[0].path) or not places.samefile(os.path.dirname(listed[0].path), folder)
        return listed[0] if below else None
    if not all(each.complete and places.isdir(each.path) for each in listed):
        return None
    names = [os.path.basename(each.path) for each in listed]
    if not all(name.isascii() and name.isdigit() for name in names):
        return None
    return max(listed, key=lambda each: int(os.path.basename(each.path)), default=None)


def _state(folder: str) -> tuple[State | None, list[str]]:
    """Return what the folder's state file says, and what a person should know about it."""
    file = os.path.join(folder, checkpoint_state.NAME)
    probe = Probe(file)
    if probe.kind != "file" or not checkpoint_state.begins(probe.head):
        return None, []
    try:
        return checkpoint_state.read(file), []
    except (CkpttoolError, OSError) as error:
        return None, [str(error)]


class _Place(NamedTuple):
    path: str
    format: str | None


class _Home:
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


def _listed(folder: str, state: State | None, latest: str | None) -> list[Listed]:
    """Return the checkpoints, from the first step to the last."""
    names = frozenset(places.listdir(folder))
    homes = {folder: _Home(names)}
    times = _times(state)
    found = []
    for place in _places(folder, names):
        # A folder of checkpoints may stand in the folder; then the files are there.
        within = os.path.dirname(place.path) or os.curdir
        name = _PATTERN.sub("", os.path.basename(place.path))
        if (home := folder if places.samefile(within, folder) else within) not in homes:
            homes[home] = _Home(frozenset(places.listdir(home)))
        own = homes[home].own(name)
        nbytes, changed = _measured([os.path.join(within, each) for each in own])
        found.append(
            Listed(
                place.path,
                place.format,
                int(step[1]) if (step := _last_step(name)) is not None else None,
                nbytes,
                place.format is not None and _complete(own),
                times.get(name, changed),
                place.path == latest,
            )
        )
    return sorted(found, key=lambda each: natural(each.path))


def _places(folder: str, names: frozenset[str]) -> list[_Place]:
    """Return what the names in the folder stand for, each once."""
    found: dict[str, _Place] = {}
    for name in sorted(names)[:MAX_NAMES]:
        inner = Probe(os.path.join(folder, name))
        if hidden(name) or name.startswith(".") or name == checkpoint_state.NAME:
            continue
        if inner.kind == "file":
            inner.names = names  # what `names` would find, without a look at the folder for each file
        elif inner.kind != "folder":
            continue
        found |= {each.path: each for each in _claimed(inner) if each.path not in found or each.format}
    return list(found.values())


def _claimed(inner: Probe) -> Iterator[_Place]:
    """Give what a name in a folder stands for; without a format where it is incomplete or cannot be read."""
    try:
        for claim in claims(inner, plugins.BUILT_IN["formats"]):
            yield _Place(claim.location, claim.format.NAME)
    except TruncatedError:
        if (shard := _SHARD.fullmatch(inner.name)) is not None:
            yield _Place(os.path.join(inner.folder, shard[1]), None)
    except DeadlineError:
        raise  # a list without this file would be taken for the whole list
    except NotFoundError as error:
        if inner.kind == "file" and error.file == inner.path:
            yield _Place(inner.path, None)
    except CkpttoolError:
        return
    if inner.refused is not None and not inner.head:
        # It may be a checkpoint, and whoever opens it is told why it cannot be read.
        yield _Place(inner.path, None)


def _stems(name: str) -> Iterator[str]:
    """Yield the prefixes that a file may belong to."""
    if (shard := _SHARD.fullmatch(name)) is not None:
        yield shard[1]
    for suffix in (".index", ".meta"):
        if name.endswith(suffix):
            yield name.removesuffix(suffix)


def _complete(names: list[str]) -> bool:
    shards = [found for found in map(_SHARD.fullmatch, names) if found is not None]
    if not shards:
        # One file, or an index without any of its shards.
        return not any(name.endswith(".index") for name in names)
    totals = {int(shard[3]) for shard in shards}
    return any({int(s[2]) for s in shards if int(s[3]) == total} >= set(range(total)) for total in totals)


def _measured(paths: list[str]) -> tuple[int, float]:
    """Return the bytes at the paths, those in folders with them, and the time of the last change."""
    total, newest = 0, 0.0
    for path in paths:
        files = [path] if places.isfile(path) else _below(path)
        for file in files:
            try:
                found = places.seen(file)
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


def _below(folder: str) -> list[str]:
    files: list[str] = []
    for at, names in places.walk(folder):
        files += [os.path.join(at, name) for name in names]
        if len(files) >= MAX_NAMES:
            break
    return files[:MAX_NAMES]


def _times(state: State | None) -> dict[str, float]:
    if state is None:
        return {}
    pairs = zip(map(os.path.basename, state.every), state.times, strict=False)
    # The years that a calendar of four digits has.
    return {name: time for name, time in pairs if 0 <= time < 2**37 and math.isfinite(time)}


def _last_step(name: str) -> re.Match[str] | None:
    _, dash, tail = name.rpartition("-")
    return _STEP.fullmatch(dash + tail)
