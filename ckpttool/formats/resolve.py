"""The one resolver: from whatever a person points at to the checkpoint that it stands for."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple, cast

from ckpttool import places, plugins, urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, NotACheckpointError, NotFoundError, UsageError, some
from ckpttool.formats import sniff
from ckpttool.formats.probe import Format, Probe
from ckpttool.writing import hidden, sets

# Where a program keeps its model inside a run's folder, whatever lies beside it: Spinning Up's
# `_pytorch_simple_save` and `_tf_simple_save` (spinup/utils/logx.py).
_RUNS = (("pyt_save", "model.pt"), ("tf1_save",))
_SUGGESTIONS = 5
_LOOKED_AT = 200


class Resolved(NamedTuple):
    """A format and the location that it reads (a prefix where a person named its `.index`)."""

    format: Format
    location: str


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """List everything at the path without reading a tensor.

    Raise NotFoundError, NotACheckpointError or UnsupportedError when there is nothing to list, and
    FormatError when the bytes are damaged.
    """
    place = places.named(os.fspath(path))
    if places.store(place) is not None:
        with places.visit() as visit:
            checkpoint = _opened(place)
            return replace(checkpoint, notes=(*checkpoint.notes, *visit.notes))
    return _opened(place)


def _opened(path: str) -> Checkpoint:
    found = resolve(path)
    checkpoint = _told(path, found, read(found))
    if hidden(os.path.basename(path)) or not hidden(os.path.basename(found.location)):
        return checkpoint
    note = f"a conversion onto {path} was interrupted: reading the previous files, kept as {found.location}"
    return replace(checkpoint, notes=(note, *checkpoint.notes))


def _of_backup(path: str) -> Resolved | None:
    """Return the newest backup of a set of files whose replacement was interrupted, else None."""
    for prefix in sets.backups(path) if places.store(path) is None else ():
        for found in claims(Probe(prefix), plugins.BUILT_IN["formats"]):
            return found
    return None


def read(found: Resolved) -> Checkpoint:
    """List the checkpoint, with the code that its files hold beside what its format judges."""
    from ckpttool.formats import code_scan

    return code_scan.beside(found.format.read(found.location))


def _told(path: str, found: Resolved, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with what its format notes about the way from the path to it."""
    redirected = getattr(found.format, "redirected", None)
    note = redirected(Probe(path), found.location) if redirected is not None else None
    notes = [each for each in (note, other_shards(checkpoint)) if each]
    return replace(checkpoint, notes=(*notes, *checkpoint.notes)) if notes else checkpoint


def other_shards(checkpoint: Checkpoint) -> str | None:
    """Return a note that names the other shards, if the checkpoint is one file of a Hugging Face model's."""
    if len(checkpoint.files) != 1:
        return None
    folder, name = os.path.split(checkpoint.files[0].path)
    shard = _SHARD.fullmatch(name)
    if shard is None:
        return None
    total = int(shard["total"])
    if not 1 < total <= _MOST_SHARDS:
        return None
    numbers = (f"{number:05d}" for number in range(1, total + 1))
    others = [
        f"{shard['stem']}{n}-of-{shard['total']}{shard['suffix']}" for n in numbers if n != shard["number"]
    ]
    missing = [each for each in others if not places.isfile(os.path.join(folder, each))]
    rest = f"missing: {some(missing, 3)}" if missing else "open the index or the folder for all of them"
    return (
        f"shard {int(shard['number'])} of {total}: the tensors of the other shards are not included ({rest})"
    )


def resolve(path: str) -> Resolved:
    """Return who reads the path; raise an error that says what is there instead."""
    if "\0" in path or not path:
        raise UsageError("a path is not empty and has no NUL byte", file=path.replace("\0", "\\0"))
    path = places.named(path)
    probe = _of_run(Probe(path))
    if probe.kind == "special":
        raise NotACheckpointError("a device, socket or pipe is not opened", file=path)
    found = claims(probe, plugins.BUILT_IN["formats"])
    if not found:
        ours = {plugin.name for plugin in plugins.BUILT_IN["formats"]}
        found = claims(probe, (p for p in plugins.installed("formats") if p.name not in ours))
    if len(found) > 1:
        names = " and ".join(each.format.NAME for each in found)
        raise UsageError(f"formats {names} both claim the path", file=path)
    if found:
        return found[0]
    if probe.kind == "missing" and (backup := _of_backup(path)) is not None:
        return backup
    raise _nothing(probe)


# orbax/checkpoint/_src/metadata and tensorstore's OCDBT driver.
# transformers' and accelerate's names of shards.
_SHARD = re.compile(
    r"(?P<stem>.+-)(?P<number>\d{5})-of-(?P<total>\d{5})(?P<suffix>\.(safetensors|bin|pt|pth))"
)
_MOST_SHARDS = 10_000
_ORBAX = frozenset(("_CHECKPOINT_METADATA", "manifest.ocdbt", "_sharding"))


def _of_run(probe: Probe) -> Probe:
    """Return the one model of a run's folder, or of the folder in it that holds it; else what was asked."""
    if probe.kind != "folder":
        return probe
    for parts in _RUNS:
        for inner in (parts, parts[1:] if probe.name == parts[0] else ()):
            if inner and inner[0] in probe.names:
                found = Probe(os.path.join(probe.path, *inner))
                if found.kind == ("file" if len(parts) > 1 else "folder"):
                    return found
    return probe


def claims(probe: Probe, asked: Iterable[plugins.Plugin]) -> list[Resolved]:
    """Return which of the formats take the path, and the location that each would read."""
    formats = (cast(Format, plugin.load()) for plugin in asked)
    return [Resolved(f, location) for f in formats if (location := f.claims(probe)) is not None]


def _nothing(probe: Probe) -> CkpttoolError:
    if probe.kind == "missing":
        if (error := places.explained(probe.path)) is not None:
            return error
        if places.lexists(probe.path):
            return NotFoundError("the link leads nowhere", file=probe.path)
        return NotFoundError("there is no such checkpoint", file=probe.path, hint=_near(probe))
    if probe.kind == "folder":
        names = sorted(probe.names)
        if _ORBAX & set(names):
            return NotACheckpointError(
                "this is an Orbax checkpoint (JAX), which is not read",
                file=probe.path,
                hint="restore it with orbax.checkpoint and save its arrays with numpy.savez",
            )
        here = _latest_first(_readable(probe.path, names[:_LOOKED_AT]))
        if len(here) > 1 and places.store(probe.path) is None:
            # Files with numbers are those of one run, which go on.
            message = f"this folder contains {len(here)} checkpoints, and no file names the latest"
            return NotACheckpointError(message, file=probe.path, hint=_did_you_mean(here))
        message = f"no checkpoint found in this folder{'' if names else ': it is empty'}"
        found = some(names, _SUGGESTIONS) if names else None
        return NotACheckpointError(message, file=probe.path, found=found, hint=_inside(probe))
    if places.store(probe.path) is None and not os.access(probe.path, os.R_OK):
        return NotFoundError("the file may not be read", file=probe.path)
    return sniff.explain(probe)


def _latest_first(locations: list[str]) -> list[str]:
    """Sort by name; among names that differ in numbers only, the highest number comes first."""

    def numbers(location: str) -> list[tuple[int, str]]:
        # No int(): it takes at most 4,300 digits.
        found = (each.lstrip("0") for each in re.findall(r"[0-9]+", os.path.basename(location)))
        return [(len(each), each) for each in found]

    found = sorted(locations, key=numbers, reverse=True)
    return sorted(found, key=lambda each: re.sub(r"[0-9]+", "0", os.path.basename(each)))


def _near(probe: Probe) -> str | None:
    import difflib

    close = difflib.get_close_matches(probe.name, sorted(probe.names), 4 * _SUGGESTIONS)
    return _did_you_mean(_readable(os.path.dirname(probe.path), close))


def _inside(probe: Probe) -> str | None:
    """Name checkpoints of the folder, else of those folders below that are nearest to it."""
    level, left = [probe], _LOOKED_AT
    while level and left > 0:
        found, below = [], []
        for each in level:
            names = sorted(each.names)[: max(left, 0)]
            left -= len(names)
            found += _readable(each.path, names)
            below += _folders(each, names)
        if found:
            return _did_you_mean(found)
        level = below
    return None


def _folders(probe: Probe, names: Iterable[str]) -> list[Probe]:
    """Return what of the names are local folders: no links, which may lead back, and nothing hidden."""
    if places.store(probe.path) is not None:
        return []
    inner = (Probe(os.path.join(probe.path, name)) for name in names if not name.startswith("."))
    return [each for each in inner if each.kind == "folder" and not os.path.islink(each.path)]


def _readable(folder: str, names: Iterable[str]) -> list[str]:
    """Return the locations that the named files stand for, each once; elsewhere the names alone."""
    if places.store(folder) is not None:
        return [os.path.join(folder, name) for name in names]
    locations: dict[str, None] = {}
    for name in names:
        inner = Probe(os.path.join(folder, name))
        if hidden(name) or name.startswith(".") or inner.kind not in ("file", "folder"):
            continue
        with contextlib.suppress(CkpttoolError):
            for each in claims(inner, plugins.BUILT_IN["formats"]):
                locations.setdefault(each.location)
    return list(locations)


def _did_you_mean(locations: list[str]) -> str | None:
    if not locations:
        return None
    more = f" (and {len(locations) - _SUGGESTIONS} more)" if len(locations) > _SUGGESTIONS else ""
    return f"did you mean {', '.join(map(urls.spelled, locations[:_SUGGESTIONS]))}{more}"
