"""Parser limits: one frozen record, which the user may override by name.

Limits exist where the file size bounds nothing: what a few bytes can declare, repeat or unpack
to. All other memory and time of a reader is in proportion to the file. An error names its limit.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ckpttool.core.errors import LimitError, UsageError, suggest_choice

# The user's limits for a process and its child processes: `name=value`, separated by commas.
VARIABLE = "CKPTTOOL_LIMITS"

_KB, _MB, _GB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"K": _KB, "M": _MB, "G": _GB, "T": 1 << 40}


def _limit(value: int, meaning: str) -> Any:
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits, sizes in bytes; each field's metadata has its `meaning` for people."""

    json_bytes: int = _limit(64 * _MB, "a JSON document: settings, configurations, lists of shards")
    json_depth: int = _limit(200, "levels of a JSON document that is walked")
    json_values: int = _limit(4_000_000, "values of a JSON document, which take a hundred bytes each")
    yaml_bytes: int = _limit(64 * _KB, "a YAML document, whose parser is slow")
    text_bytes: int = _limit(64 * _KB, "a text of a few lines in an archive: a version, a header of pax")
    header_bytes: int = _limit(100_000_000, "the header of a safetensors file")
    array_header_bytes: int = _limit(64 * _KB, "the header of a NumPy array")
    index_bytes: int = _limit(512 * _MB, "the index of a TensorFlow checkpoint or of an archive, read whole")
    block_bytes: int = _limit(64 * _MB, "one block of such an index, as it is after unpacking")
    entries: int = _limit(100_000, "entries of a TensorFlow table, beside one for every 32 bytes of it")
    strings: int = _limit(10_000_000, "strings of one tensor")
    graph_bytes: int = _limit(512 * _MB, "an object graph or a graph definition")
    graph_parts: int = _limit(500_000, "objects, edges and names of such a graph that are kept")
    graph_depth: int = _limit(100, "edges of a path through an object graph")
    message_depth: int = _limit(100, "messages of Protocol Buffers inside one another")
    state_bytes: int = _limit(16 * _MB, "the file that names a folder's latest checkpoint")
    sidecar_bytes: int = _limit(16 * _MB, "a conversion's receipt beside its file")
    members: int = _limit(1_000_000, "members of an archive")
    unpacked_bytes: int = _limit(256 * _MB, "a compressed member; a larger one needs unpacked_ratio")
    unpacked_ratio: int = _limit(100, "times its stored size that a member above unpacked_bytes may have")
    expanded_bytes: int = _limit(256 * _MB, "a tensor that the file does not hold in full (repeated, unset)")
    expanded_ratio: int = _limit(1000, "times its stored size that a tensor above expanded_bytes may have")
    folder_depth: int = _limit(20, "folders inside one another that one checkpoint takes")
    folder_files: int = _limit(10_000, "files of a folder that is searched for a checkpoint's parts")
    fetched_bytes: int = _limit(512 * _MB, "a file elsewhere that can only be fetched, or unpacked, whole")
    checked_files: int = _limit(200_000, "files below the folders that one check looks at")
    fetch_seconds: int = _limit(60, "seconds that a server may keep a command waiting without progress")
    fetch_rate: int = _limit(16 * _KB, "bytes a second below which an arriving file is no progress")
    path_depth: int = _limit(200, "steps of a tensor's path")
    list_gaps: int = _limit(4096, "places of a list that its numbers leave open, filled with nothing")
    pickle_depth: int = _limit(200, "levels of a pickled value")
    pickle_name: int = _limit(4096, "characters of a name that a pickle refers to")
    pickle_integer: int = _limit(1024, "bytes of one pickled integer")
    pickle_key_items: int = _limit(64, "items of a tuple that is a dict's key")
    pickle_hashed_keys: int = _limit(4096, "keys of one dict, numbers or tuples, that are hashed by value")
    pickle_copies: int = _limit(1 * _MB, "bytes that known calls may copy, beside four times the pickle")
    pickle_revisits: int = _limit(1, "times per byte of a pickle that a shared value may be reached")
    hdf5_memory: int = _limit(1 * _GB, "memory of the process that lists an HDF5 file")
    hdf5_seconds: int = _limit(8, "CPU time of that process, beside a second for every MiB")
    hdf5_objects: int = _limit(500_000, "groups, datasets and chunks of an HDF5 file")
    hdf5_depth: int = _limit(512, "groups of an HDF5 file inside one another")


_CURRENT: ContextVar[Limits | None] = ContextVar("ckpttool_limits", default=None)


def current() -> Limits:
    """Return the current limits: those of `using`, otherwise those of the environment."""
    return _CURRENT.get() or _parse_limits(os.environ.get(VARIABLE, ""))


@contextlib.contextmanager
def using(limits: Limits) -> Iterator[None]:
    """Apply these limits to everything that this thread opens and reads in the block."""
    token = _CURRENT.set(limits)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def override_limits(pairs: Iterable[str]) -> Iterator[None]:
    """Apply `name=value` pairs to this process and its child processes; raise UsageError if invalid."""
    before = os.environ.get(VARIABLE)
    told = ",".join([*([before] if before else []), *pairs])
    _parse_limits(told)
    os.environ[VARIABLE] = told
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def document() -> list[dict[str, Any]]:
    """Return the current limits as JSON values: name, value, default and meaning of each."""
    here = current()
    return [
        {
            "name": each.name,
            "value": getattr(here, each.name),
            "default": each.default,
            "meaning": each.metadata["meaning"],
        }
        for each in fields(Limits)
    ]


@functools.lru_cache(maxsize=8)
def _parse_limits(told: str) -> Limits:
    pairs = [pair.strip() for pair in told.split(",") if pair.strip()]
    return replace(Limits(), **dict(_parse_limit(pair) for pair in pairs)) if pairs else Limits()


def _parse_limit(pair: str) -> tuple[str, int]:
    name, equals, text = pair.partition("=")
    names = [each.name for each in fields(Limits)]
    if name not in names:
        raise UsageError(f"there is no limit {name!r}", hint=suggest_choice(name, names))
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = _UNITS.get(number[-1:], 1)
    digits = number[:-1] if unit > 1 else number
    if not equals or not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or not int(digits):
        raise UsageError(
            f"limit {name} is not a positive whole number: {text!r}",
            hint="a number, or a size such as 64K, 512M, 2G",
        )
    return name, int(digits) * unit


def limit_error(
    name: str, what: str, found: int | None, *, file: str | None = None, offset: int | None = None
) -> LimitError:
    """Return the error for exceeding the limit `name`; `what` is a clause ("the header is too long")."""
    return LimitError(
        what,
        file=file,
        offset=offset,
        expected=f"at most {getattr(current(), name):,}",
        found=None if found is None else f"{found:,}",
        hint=f"ckpttool --limit {name}=N ... allows more, for a file that you trust",
    )
