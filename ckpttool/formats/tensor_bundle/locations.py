"""Which TensorFlow checkpoint a path means: a prefix, its index, a shard, a state file, or a folder."""

from __future__ import annotations

import os
import re

from ckpttool.errors import FormatError, NotFoundError, TruncatedError, UnsupportedError, UsageError
from ckpttool.formats.probe import Probe
from ckpttool.wire import sstable

STATE = "checkpoint"
_SHARD = re.compile(r"(.+)\.data-\d{5}-of-\d{5}", re.DOTALL)
# tensorflow/python/training/checkpoint_state.proto in text form.
_LATEST = re.compile(
    rb"^\s*model_checkpoint_path\s*:\s*"
    rb"""(?:"((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)')""",
    re.MULTILINE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def prefix(probe: Probe) -> str | None:
    """Return the prefix that the path means; None when it means no tensor bundle."""
    if probe.kind == "missing":
        return _of_prefix(probe)
    if probe.kind == "folder":
        return _of_folder(probe)
    return _of_file(probe) if probe.kind == "file" else None


def _of_prefix(probe: Probe) -> str | None:
    if f"{probe.name}.index" in probe.names:
        return probe.path
    if any(_shards_of(name, probe.name) for name in probe.names):
        raise TruncatedError("the index is missing; there are only data shards", file=f"{probe.path}.index")
    return None


def _shards_of(name: str, base: str) -> bool:
    shard = _SHARD.fullmatch(name)
    return shard is not None and shard[1] == base


def _of_file(probe: Probe) -> str | None:
    shard = _SHARD.fullmatch(probe.path)
    if shard is not None:
        if not os.path.lexists(f"{shard[1]}.index"):
            raise TruncatedError("the shard's index is missing", file=f"{shard[1]}.index")
        return shard[1]
    if probe.name.endswith(".index"):
        base = probe.name[: -len(".index")]
        ours = probe.tail.endswith(sstable.MAGIC) or any(_shards_of(name, base) for name in probe.names)
        return probe.path[: -len(".index")] if ours and base else None
    if probe.tail.endswith(sstable.MAGIC):
        raise UnsupportedError(
            "this is a table without the suffix .index, such as a V1 checkpoint (one file, before "
            "TensorFlow 0.12), which this version cannot read",
            file=probe.path,
        )
    if _is_state(probe.head):
        return _of_state(probe.path, probe.folder, probe.names)
    return None


def _is_state(head: bytes) -> bool:
    return head.lstrip().startswith((b"model_checkpoint_path", b"all_model_checkpoint_paths"))


def _of_folder(probe: Probe) -> str | None:
    state = os.path.join(probe.path, STATE)
    if STATE in probe.names:
        inner = Probe(state)
        if inner.kind == "file" and _is_state(inner.head):
            return _of_state(state, probe.path, probe.names)
    bases = sorted(_bases(probe.names), key=_numbered)
    if len(bases) > 1:
        raise UsageError(
            f"the folder holds {len(bases)} checkpoints and no state file that names the latest: "
            + _listed(bases),
            file=probe.path,
            hint=f"did you mean {os.path.join(probe.path, bases[-1])}?",
        )
    if bases:
        return os.path.join(probe.path, bases[0])
    # A prefix may have a folder of the same name beside its index.
    beside = probe.path.rstrip("/")
    return beside if os.path.isfile(f"{beside}.index") else None


def _bases(names: frozenset[str]) -> set[str]:
    shards = {found[1] for found in map(_SHARD.fullmatch, names) if found is not None}
    return {base for base in shards if f"{base}.index" in names}


def _of_state(path: str, folder: str, names: frozenset[str]) -> str:
    with open(path, "rb") as stream:
        found = _LATEST.search(stream.read(1 << 20))
    if found is None:
        raise FormatError("the state file names no latest checkpoint", file=path)
    latest = os.fsdecode(_unescaped(found[1] if found[1] is not None else found[2]))
    within = os.path.normpath(latest)
    # What a state file says is followed inside its own folder only: absolute paths are stale after a
    # move, and no file may send the reader elsewhere.
    if not os.path.isabs(within) and within.split(os.sep)[0] != os.pardir:
        candidate = os.path.join(folder, within)
        if "\0" not in candidate and os.path.isfile(f"{candidate}.index"):
            return candidate
    base = os.path.basename(within)
    if f"{base}.index" in names:
        return os.path.join(folder, base)
    present = sorted(_bases(names))
    raise NotFoundError(
        f"the state file names {latest!r}, which is not in its folder",
        file=path,
        hint=f"did you mean {os.path.join(folder, present[-1])}?" if present else None,
    )


def _unescaped(data: bytes) -> bytes:
    def character(match: re.Match[bytes]) -> bytes:
        if match[1] or match[2]:
            return bytes([int(match[1] or match[2], 8 if match[1] else 16) & 255])
        return _LETTERS.get(match[3], match[3])

    return _ESCAPE.sub(character, data)


def _listed(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _numbered(base: str) -> tuple[str, int]:
    # ckpt-15000 after ckpt-7500.
    stem, _, number = base.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (base, -1)
