"""What TensorFlow's checkpoints are called: V1 files and shards, V2 prefixes, and what a state file names.

Two formats ask here, so that exactly one of them takes a path. Sources:
tensorflow/python/checkpoint/checkpoint_management.py (checkpoint_exists, latest_checkpoint) and
tensorflow/python/training/saver.py (names of shards).
"""

from __future__ import annotations

import os
import re
from typing import Literal, NamedTuple

from ckpttool import places
from ckpttool.errors import FormatError, NotFoundError, UsageError, some
from ckpttool.formats import checkpoint_state
from ckpttool.formats.probe import Probe
from ckpttool.source import File
from ckpttool.wire import sstable

_V2_SHARD = re.compile(r"(.+)\.data-\d{5}-of-\d{5}", re.DOTALL)
_V1_SHARD = re.compile(r"(.+)-(\d{5}|\?{5})-of-(\d{5})", re.DOTALL)
# A folder without a state file: no more of its files are looked into.
_LOOKED_AT = 1000


class Found(NamedTuple):
    """A checkpoint: the version of its form, and its V2 prefix, V1 file, or pattern of V1 shards."""

    version: Literal[1, 2]
    location: str


def v2_base(name: str) -> str | None:
    """Return the prefix that a V2 shard's name begins with."""
    shard = _V2_SHARD.fullmatch(name)
    return shard[1] if shard is not None else None


def v1_pattern(name: str) -> str | None:
    """Return the pattern of a V1 shard's name as TensorFlow spells it: `PREFIX-?????-of-00002`."""
    shard = _V1_SHARD.fullmatch(name)
    if shard is None or v2_base(name) is not None:
        return None
    return f"{shard[1]}-?????-of-{shard[3]}"


def v1_shards(pattern: str) -> tuple[str, ...] | None:
    """Return the paths of all shards of such a pattern; None when it is none."""
    shard = _V1_SHARD.fullmatch(pattern)
    if shard is None or not shard[2].startswith("?"):
        return None
    return tuple(f"{shard[1]}-{number:05d}-of-{shard[3]}" for number in range(int(shard[3])))


def is_v1_file(path: str) -> bool:
    """Say whether a file is a table that is not called `.index`, as V1 checkpoints are."""
    probe = Probe(path)
    return probe.kind == "file" and not path.endswith(".index") and probe.tail.endswith(sstable.MAGIC)


def at(location: str, names: frozenset[str]) -> Found | None:
    """Return the checkpoint that has exactly this prefix; `names` are those in its folder.

    Raise UsageError when shards of two V1 checkpoints have it.
    """
    base = os.path.basename(location)
    if f"{base}.index" in names:
        return Found(2, location)
    if base in names and is_v1_file(location):
        return Found(1, location)
    folder = location[: len(location) - len(base)]
    own = v1_pattern(base)
    patterns = sorted({p for p in map(v1_pattern, names) if p is not None})
    fits = [p for p in patterns if p == own or p.rpartition("-?????-of-")[0] == base]
    fits = [p for p in fits if any(v1_pattern(n) == p and is_v1_file(folder + n) for n in names)]
    if len(fits) > 1:
        raise UsageError(
            f"the prefix has {len(fits)} checkpoints of several shards: {', '.join(fits[:8])}",
            file=location,
            hint=f"did you mean {folder}{fits[-1]}?",
        )
    return Found(1, folder + fits[0]) if fits else None


def of_state(path: str, folder: str, names: frozenset[str]) -> Found:
    """Return the latest checkpoint that the state file names.

    What it says is followed inside its own folder only: absolute paths are stale after a move, and no file
    may send the reader elsewhere. Raise NotFoundError when nothing of that name is there, FormatError when
    the file is damaged.
    """
    latest = checkpoint_state.read(path).latest
    within = os.path.normpath(latest)
    if not os.path.isabs(within) and within.split(os.sep)[0] != os.pardir and "\0" not in within:
        candidate = os.path.join(folder, within)
        found = at(candidate, Probe(os.path.dirname(candidate) or ".").names)
        if found is not None:
            return _inside(found, path)
    base = os.path.basename(within)
    found = at(os.path.join(folder, base), names)
    if found is not None:
        return _inside(found, path)
    if base in names and places.isfile(os.path.join(folder, base)):
        raise FormatError(
            "the state file names this as a checkpoint, and it is none",
            file=os.path.join(folder, base),
            hint="it may have been cut off while it was written or copied",
        )
    present = sorted(v2_bases(names))
    raise NotFoundError(
        f"the state file names {latest!r}, which is not in its folder",
        file=path,
        hint=f"did you mean {os.path.join(folder, present[-1])}?" if present else None,
    )


def _inside(found: Found, state: str) -> Found:
    """Raise UnsupportedError if the checkpoint's files are links out of the state file's folder."""
    shards = v1_shards(found.location) if found.version == 1 else (f"{found.location}.index",)
    for file in shards if shards is not None else (found.location,):
        if places.lexists(file):
            File.beside(file, state)
    return found


def redirected(probe: Probe, location: str) -> str | None:
    """Return a note where a state file led to the location and names a place outside of its folder."""
    state = os.path.join(probe.path, checkpoint_state.NAME) if probe.kind == "folder" else probe.path
    inner = Probe(state)
    if inner.kind != "file" or not checkpoint_state.begins(inner.head):
        return None
    latest = checkpoint_state.read(state).latest
    # No look at the disk: the name may be anything.
    named = os.path.dirname(places.abspath(os.path.join(inner.folder, latest)))
    taken = os.path.dirname(location) or "."
    if named in (places.abspath(taken), places.realpath(taken)):
        return None
    return f"the state file names {latest}: what has this name in its own folder was taken"


def v2_bases(names: frozenset[str]) -> set[str]:
    """Return the prefixes among a folder's names that have an index and a shard."""
    bases = {base for base in map(v2_base, names) if base is not None}
    return {base for base in bases if f"{base}.index" in names}


def v1_bases(folder: str, names: frozenset[str]) -> set[str]:
    """Return the V1 files and patterns of shards in a folder; only files that could be one are opened.

    Those have a graph (`.meta`) beside them, `ckpt` in their names, or the names of shards.
    """
    found = set()
    for name in sorted(names)[:_LOOKED_AT]:
        pattern = v1_pattern(name)
        likely = pattern is not None or f"{name}.meta" in names or "ckpt" in name
        if likely and is_v1_file(os.path.join(folder, name)):
            found.add(pattern or name)
    return found


def several(bases: list[str], folder: str) -> UsageError:
    """Return the error for a folder of several checkpoints, in order of age, without a state file."""
    listed = some(bases, 8)
    return UsageError(
        f"the folder holds {len(bases)} checkpoints and no state file that names the latest: {listed}",
        file=folder,
        hint=f"did you mean {os.path.join(folder, bases[-1])}?",
    )


def numbered(base: str) -> tuple[str, int]:
    """Return what checkpoints are sorted by: `ckpt-15000` comes after `ckpt-7500`."""
    base = base.partition("-?????-of-")[0]
    stem, _, number = base.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (base, -1)
