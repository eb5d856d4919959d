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

    json_bytes: int = _limit(64 * _MB, "size of a JSON document: settings, configurations, shard lists")
    json_depth: int = _limit(200, "nesting levels of a JSON document")
    json_values: int = _limit(4_000_000, "values in a JSON document, about 100 bytes of memory each")
    yaml_bytes: int = _limit(64 * _KB, "size of a YAML document, whose parser is slow")
    text_bytes: int = _limit(64 * _KB, "size of a short text in an archive: a version, a pax header")
    header_bytes: int = _limit(100_000_000, "size of a safetensors header")
    array_header_bytes: int = _limit(64 * _KB, "size of a NumPy array header")
    index_bytes: int = _limit(
        512 * _MB, "size of the index of a TensorFlow checkpoint or archive, read as a whole"
    )
    block_bytes: int = _limit(64 * _MB, "size of one block of such an index after decompression")
    entries: int = _limit(100_000, "entries of a TensorFlow table, in addition to one per 32 bytes")
    strings: int = _limit(10_000_000, "strings in one tensor")
    graph_bytes: int = _limit(512 * _MB, "size of an object graph or a graph definition")
    graph_parts: int = _limit(500_000, "objects, edges and names kept from such a graph")
    graph_depth: int = _limit(100, "edges of a path through an object graph")
    message_depth: int = _limit(100, "nesting levels of Protocol Buffers messages")
    state_bytes: int = _limit(16 * _MB, "size of the file that names a folder's latest checkpoint")
    sidecar_bytes: int = _limit(16 * _MB, "size of a conversion receipt (sidecar)")
    members: int = _limit(1_000_000, "members of an archive")
    unpacked_bytes: int = _limit(
        256 * _MB, "unpacked size of a compressed member; unpacked_ratio allows more"
    )
    unpacked_ratio: int = _limit(100, "ratio of unpacked to stored size for a member above unpacked_bytes")
    expanded_bytes: int = _limit(
        256 * _MB, "size of a tensor that the file does not store in full (repeated, unset)"
    )
    expanded_ratio: int = _limit(1000, "ratio of full to stored size for a tensor above expanded_bytes")
    folder_depth: int = _limit(20, "nesting levels of folders in one checkpoint")
    folder_files: int = _limit(10_000, "files in a folder that is searched for a checkpoint's parts")
    fetched_bytes: int = _limit(
        512 * _MB, "size of a remote file that can only be fetched, or unpacked, as a whole"
    )
    checked_files: int = _limit(200_000, "files under the folders that one check inspects")
    fetch_seconds: int = _limit(60, "seconds a server may keep a command waiting without progress")
    fetch_rate: int = _limit(16 * _KB, "bytes per second below which a transfer counts as no progress")
    path_depth: int = _limit(200, "steps in a tensor's path")
    list_gaps: int = _limit(4096, "missing indices of a list that are filled with None")
    pickle_depth: int = _limit(200, "nesting levels of a pickled value")
    pickle_name: int = _limit(4096, "characters of a name in a pickle")
    pickle_integer: int = _limit(1024, "bytes of one pickled integer")
    pickle_key_items: int = _limit(64, "items of a tuple that is a dict key")
    pickle_hashed_keys: int = _limit(4096, "keys of one dict (numbers or tuples) that are hashed by value")
    pickle_copies: int = _limit(
        1 * _MB, "bytes that known calls may copy, in addition to four times the pickle"
    )
    pickle_revisits: int = _limit(1, "visits to shared values per byte of a pickle")
    hdf5_memory: int = _limit(1 * _GB, "memory of the process that lists an HDF5 file")
    hdf5_seconds: int = _limit(8, "CPU seconds of that process, in addition to one per MiB")
    hdf5_objects: int = _limit(500_000, "groups, datasets and chunks of an HDF5 file")
    hdf5_depth: int = _limit(512, "nesting levels of groups in an HDF5 file")


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
    text = ",".join([*([before] if before else []), *pairs])
    _parse_limits(text)
    os.environ[VARIABLE] = text
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
def _parse_limits(text: str) -> Limits:
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    return replace(Limits(), **dict(_parse_limit(pair) for pair in pairs)) if pairs else Limits()


def _parse_limit(pair: str) -> tuple[str, int]:
    name, equals, text = pair.partition("=")
    names = [each.name for each in fields(Limits)]
    if name not in names:
        raise UsageError(f"unknown limit {name!r}", hint=suggest_choice(name, names))
    number = text.upper().removesuffix("B").removesuffix("I")
    unit = _UNITS.get(number[-1:], 1)
    digits = number[:-1] if unit > 1 else number
    if not equals or not (digits.isascii() and digits.isdigit()) or len(digits) > 18 or not int(digits):
        raise UsageError(
            f"limit {name} must be a positive whole number, not {text!r}",
            hint="use a number, or a size such as 64K, 512M, 2G",
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
        hint=f"if you trust the file, raise the limit: ckpttool --limit {name}=N ...",
    )
