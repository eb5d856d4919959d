"""Which checkpoints are meant by files, prefixes, folders and patterns: each once, in order."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from ckpttool import limits, places, plugins, sidecar
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, NotACheckpointError, NotFoundError, UsageError
from ckpttool.formats.probe import Format
from ckpttool.formats.resolve import Resolved, open_checkpoint, read, resolve
from ckpttool.ops import folder, undo
from ckpttool.ops.rows import Listed, natural

BESIDE = (sidecar.SUFFIX, undo.SUFFIX)


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint to look at; `named` if a person pointed at this very one, not at a folder or pattern.

    `found` is who reads it, where that is known: a folder of them has asked every format already.
    """

    path: str
    named: bool
    found: Resolved | None = None

    def open(self) -> Checkpoint:
        """List it; raise what `open_checkpoint` raises."""
        return (
            open_checkpoint(self.path)
            if self.found is None
            else read(self.found._replace(location=self.path))
        )


def entries(paths: Sequence[str]) -> tuple[Entry, ...]:
    """Return what the paths stand for: one that several of them mean is there once, where it came first.

    A folder stands for all checkpoints in it, unless it is one itself; a pattern (`run/ckpt-*`) for what in
    it is a checkpoint. A shell expands patterns too, so that the parts of a bundle (`.index`, shards) count
    as the bundle, and our own files beside a checkpoint as nothing, if there are several paths. Raise
    NotFoundError for a pattern that nothing matches.
    """
    found: dict[str, Entry] = {}
    with places.visit():
        for path in paths:
            for entry in _meant(path, alone=len(paths) == 1):
                found.setdefault(places.realpath(entry.path), entry)
    return tuple(found.values())


def _meant(path: str, *, alone: bool) -> Iterator[Entry]:
    path = places.named(path)
    if places.isdir(path) and (inside := folder.checkpoints(path)):
        for each in inside:
            yield Entry(each.path, named=False, found=_reader(each))
    elif glob.has_magic(path) and not places.lexists(path):
        yield from _matches(path)
    elif alone or not path.endswith(BESIDE):
        yield _named(path)


def _reader(listed: Listed) -> Resolved | None:
    if listed.format is None:
        return None
    return Resolved(cast(Format, plugins.find("formats", listed.format).load()), listed.path)


def _matches(pattern: str) -> Iterator[Entry]:
    names = [name for name in matching(pattern) if not name.endswith(BESIDE)]
    if not names:
        raise NotFoundError("nothing matches the pattern", file=pattern)
    for name in sorted(names, key=natural):
        try:
            found = resolve(name)
            yield Entry(found.location, named=False, found=found)
        except NotACheckpointError:
            continue
        except CkpttoolError:
            yield Entry(name, named=False)  # a damaged one is told of when it is opened


def matching(pattern: str) -> list[str]:
    """Return what matches; elsewhere in one folder only, whose names are asked for."""
    if places.store(pattern) is None:
        most = limits.current().checked_files
        names = list(itertools.islice(glob.iglob(pattern, recursive=True), most + 1))
        if len(names) > most:
            raise limits.exceeded("checked_files", "the pattern matches too many names", None, file=pattern)
        return names
    folder, last = os.path.split(pattern)
    if glob.has_magic(folder.split("://", 1)[-1].partition("/")[2]):
        raise UsageError("elsewhere a pattern is for names in one folder: the last part", file=pattern)
    names = fnmatch.filter(places.listdir(folder), last)
    return [os.path.join(folder, name) for name in names if name[0] != "." or last[0] == "."]


def _named(path: str) -> Entry:
    try:
        found = resolve(path)
    except CkpttoolError:
        return Entry(path, named=True)  # opening it will say what is wrong
    return Entry(found.location, named=True, found=found)
