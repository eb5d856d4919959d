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
from dataclasses import fields, replace
from typing import Any

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import LimitError, UsageError, did_you_mean

# The user's limits for a process and its child processes: `name=value`, separated by commas.
VARIABLE = "CKPTTOOL_LIMITS"

_KB, _MB, _GB = 1 << 10, 1 << 20, 1 << 30
_UNITS = {"K": _KB, "M": _MB, "G": _GB, "T": 1 << 40}


_STEPS_ABOVE = 20


def _limit(value: int, meaning: str) -> Any:
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits, sizes in bytes; each field's metadata has its `meaning` for people."""

    json_bytes: int = _limit(64 * _MB, "JSON size")
    json_depth: int = _limit(200, "JSON nesting levels")
    json_values: int = _limit(4_000_000, "values in a JSON document")
    yaml_bytes: int = _limit(64 * _KB, "YAML size")
    text_bytes: int = _limit(64 * _KB, "text member size (version, pax header)")
    header_bytes: int = _limit(100_000_000, "safetensors header size")
    array_header_bytes: int = _limit(64 * _KB, "NumPy array header size")
    index_bytes: int = _limit(512 * _MB, "size of a TensorFlow index or archive directory")
    block_bytes: int = _limit(64 * _MB, "unpacked index block size")
    entries: int = _limit(100_000, "TensorFlow table entries, plus one per 32 bytes")
    strings: int = _limit(10_000_000, "strings in one tensor")
    graph_bytes: int = _limit(512 * _MB, "object graph or graph definition size")
    graph_parts: int = _limit(500_000, "objects, edges and names of a graph")
    value_entries: int = _limit(1 << 26, "entries of one value computed from a graph")
    graph_depth: int = _limit(100, "edges of a path in an object graph")
    message_depth: int = _limit(100, "protobuf nesting levels")
    state_bytes: int = _limit(16 * _MB, "TensorFlow state file size")
    sidecar_bytes: int = _limit(16 * _MB, "sidecar size")
    members: int = _limit(1_000_000, "members of an archive")
    unpacked_bytes: int = _limit(256 * _MB, "unpacked size of a compressed member")
    unpacked_ratio: int = _limit(100, "unpacked to stored size above unpacked_bytes")
    expanded_bytes: int = _limit(256 * _MB, "size of a tensor not stored in full (repeated, unset)")
    expanded_ratio: int = _limit(1000, "full to stored size above expanded_bytes")
    folder_depth: int = _limit(20, "nested folders in a checkpoint")
    folder_files: int = _limit(10_000, "files in a searched folder")
    worker_bytes: int = _limit(1 << 40, "memory of a process that writes shards")
    fetched_bytes: int = _limit(512 * _MB, "size of a remote file fetched as a whole")
    checked_files: int = _limit(200_000, "files that one check inspects")
    fetch_seconds: int = _limit(60, "seconds without progress from a server")
    fetch_rate: int = _limit(16 * _KB, "bytes per second that count as progress")
    path_depth: int = _limit(200, "steps in a tensor's path")
    list_gaps: int = _limit(4096, "missing list items that become None")
    pickle_depth: int = _limit(200, "pickle nesting levels")
    pickle_name: int = _limit(4096, "characters of a name in a pickle")
    pickle_integer: int = _limit(1024, "bytes of one pickled integer")
    pickle_key_items: int = _limit(64, "items of a tuple used as a dict key")
    pickle_hashed_keys: int = _limit(4096, "number and tuple dict keys")
    pickle_copies: int = _limit(1 * _MB, "bytes copied by calls, plus four times the pickle")
    pickle_revisits: int = _limit(1, "visits to shared values per pickle byte")
    hdf5_memory: int = _limit(1 * _GB, "memory of the HDF5 process")
    hdf5_seconds: int = _limit(8, "CPU seconds of the HDF5 process, plus one per MiB")
    hdf5_objects: int = _limit(500_000, "HDF5 groups, datasets and chunks")
    hdf5_depth: int = _limit(512, "HDF5 group nesting levels")
    model_memory: int = _limit(16 * _GB, "memory of a process that runs a model, plus 8 times the file")

    @property
    def deepest_path(self) -> int:
        """The steps that a path may have: `path_depth`, and more where `pickle_depth` is raised.

        A pickle may be an entry of another file, some steps below its root.
        """
        raised = self.pickle_depth - Limits().pickle_depth
        return self.path_depth + (raised + _STEPS_ABOVE if raised > 0 else 0)


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
            "name": limit.name,
            "value": getattr(here, limit.name),
            "default": limit.default,
            "meaning": limit.metadata["meaning"],
        }
        for limit in fields(Limits)
    ]


@functools.lru_cache(maxsize=8)
def _parse_limits(text: str) -> Limits:
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    return replace(Limits(), **dict(_parse_limit(pair) for pair in pairs)) if pairs else Limits()


def _parse_limit(pair: str) -> tuple[str, int]:
    name, equals, text = pair.partition("=")
    names = [limit.name for limit in fields(Limits)]
    if name not in names:
        import difflib

        close = difflib.get_close_matches(name, names, 1)
        meant = f"{did_you_mean(close[0])} " if close else ""
        raise UsageError(f"unknown limit {name!r}", hint=f"{meant}ckpttool limits lists all limits")
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
    name: str,
    what: str,
    found: int | None,
    *,
    file: str | None = None,
    offset: int | None = None,
    enough: bool = False,
) -> LimitError:
    """Return the error for exceeding a limit.

    Args:
        name: the limit's name, with which the hint raises it.
        what: a clause ("the header is too long").
        found: the amount that exceeds it; None if it is unknown.
        file: the file that requests it.
        offset: where in the file, in bytes.
        enough: whether `found` is all that the file needs, so that the hint can name it.
    """
    limit = str(-(-found // 100) * 100) if enough and found is not None else "N"
    return LimitError(
        what,
        file=file,
        offset=offset,
        expected=f"at most {getattr(current(), name):,}",
        found=None if found is None else f"{found:,}",
        hint=f"if you trust the file, raise the limit: ckpttool --limit {name}={limit} ...",
    )
