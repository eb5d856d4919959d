"""Shared parts of TensorFlow's formats: state file, saver paths, slices, variable names."""

from __future__ import annotations

import functools
import itertools
import math
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from ckpttool.core import deferred, dtypes, filesystem, limits
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import (
    FormatError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
    did_you_mean,
    locate_errors,
)
from ckpttool.core.source import LARGE, Buffer, File, Shape, Source, StreamedArray, combine_parts, cuts
from ckpttool.core.tree import Leaf, Path, PathStep, Role, Tree
from ckpttool.encodings import protobuf
from ckpttool.encodings.protobuf import Message
from ckpttool.formats.name_roles import role_by_name
from ckpttool.formats.probe import Probe

NAME = "checkpoint"

_GAP = rb"(?:[ \t\r\n\f\v]|#[^\n]*+)*+"
_STARTS = deferred.compile(rb"%b(?:all_)?model_checkpoint_paths?%b:" % (_GAP, _GAP))


class CheckpointState(NamedTuple):
    """Contents of a state file.

    `latest` and `every` are names as the file spells them, relative to its folder or absolute on the
    machine that wrote it; `every` is ordered from oldest to newest. `times` are seconds since 1970,
    one for each of `every`, or empty. `preserved` is the time of the last checkpoint that is kept
    permanently (keep_checkpoint_every_n_hours).
    """

    latest: str
    every: tuple[str, ...]
    times: tuple[float, ...] = ()
    preserved: float | None = None


def is_state_file(head: bytes) -> bool:
    """Return whether a file with this beginning is a state file."""
    return _STARTS.match(head) is not None


def read_state(path: str) -> CheckpointState:
    """Read the state file; raise FormatError if it is damaged, too large, or has no latest checkpoint.

    It is a CheckpointState message (tensorflow/python/training/checkpoint_state.proto) in protobuf's text
    form (https://protobuf.dev/reference/protobuf/textformat-spec/); TensorFlow writes and reads it in
    tensorflow/python/checkpoint/checkpoint_management.py.
    """
    fields = read(path)
    latest = [_name(value, path) for value in fields.get("model_checkpoint_path", ())]
    every = [_name(value, path) for value in fields.get("all_model_checkpoint_paths", ())]
    times = [_time(value, path) for value in fields.get("all_model_checkpoint_timestamps", ())]
    preserved = [_time(value, path) for value in fields.get("last_preserved_timestamp", ())]
    # If a field that is not repeated has several values, the last one counts.
    if not latest or not latest[-1]:
        raise FormatError("the state file does not name a latest checkpoint", file=path)
    kept = preserved[-1] if preserved else None
    return CheckpointState(latest[-1], tuple(every), tuple(times) if len(times) == len(every) else (), kept)


def encode_state(state: CheckpointState) -> bytes:
    """Return the state file's bytes as TensorFlow writes them; non-ASCII names are escaped."""
    lines = [f'model_checkpoint_path: "{_escaped(state.latest)}"']
    lines += [f'all_model_checkpoint_paths: "{_escaped(name)}"' for name in state.every]
    lines += [f"all_model_checkpoint_timestamps: {time!r}" for time in state.times]
    if state.preserved is not None:
        lines.append(f"last_preserved_timestamp: {state.preserved!r}")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def _name(value: object, path: str) -> str:
    if type(value) is not str:
        raise FormatError("the state file is damaged: expected a quoted name", file=path)
    return os.fsdecode(value.encode("latin-1"))


def _time(value: object, path: str) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise FormatError("the state file is damaged: invalid timestamp", file=path)
    return float(value)


def _escaped(name: str) -> str:
    return "".join(
        f"\\{character}"
        if character in '"\\'
        else character
        if character.isascii() and character.isprintable()
        else "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
        for character in name
    )


MAX_TEXT = 200  # characters; a Lambda layer's code is longer, and is not a readable fact
MAX_ITEMS = 64
_RATE = "learning_rate"
_REGULARIZER = "_regularizer"


def is_inside(name: str) -> bool:
    """Return whether an asset's name leads to a file in the folder of the assets."""
    parts = posixpath.normpath(name).split("/")
    return bool(name) and "\0" not in name and not name.startswith("/") and parts[0] != ".."


def class_name(name: object) -> str | None:
    """Return the class name (a registered one is spelled `Package>Class`), None if invalid."""
    if not isinstance(name, str) or len(name) > MAX_TEXT:
        return None
    return name.rpartition(">")[2]


def plain_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain facts among an object's settings, starting with its name as `layer`.

    Every TensorFlow and Keras format that stores configurations uses JSON of the form `{"class_name": CLASS,
    "config": SETTINGS}` (keras/src/saving/serialization_lib.py, keras/src/legacy/saving/serialization.py). No
    class is looked up.
    """
    name = settings.get("name")
    facts: dict[str, Any] = {"layer": name} if isinstance(name, str) and len(name) <= MAX_TEXT else {}
    for key, value in settings.items():
        fact = format_object(value) if key.endswith("activation") and value else _plain_fact(value)
        if fact is not None and key not in ("name", "layers") and len(key) <= MAX_TEXT:
            facts[key] = fact
            if key.endswith(_REGULARIZER) and (factor := _l2_factor(value)) is not None:
                facts[f"{key}_l2"] = factor
            if key == _RATE and (first := _initial_rate(value)) is not None:
                facts[f"{key}_initial"] = first
    return facts


# Lists of layers that act on a network's inputs, also of layers without variables, which no tensor shows
# (tf_agents/networks/encoding_network.py).
INPUT_LAYERS = frozenset(("_flat_preprocessing_layers",))
# Settings of serialized objects that do not affect what they compute.
_NAMING = frozenset(("name", "trainable", "dtype"))


def format_object(value: Any) -> str:
    """Return a serialized object or function of Keras as text: `LeakyReLU(negative_slope=0.5)`, `sin`.

    An object's name is no evidence of what it computes: a user may name a LeakyReLU "relu".
    """
    if not isinstance(value, Mapping):
        return str(value)[:MAX_TEXT]
    cls, config = class_name(value.get("class_name")), value.get("config")
    if not isinstance(config, Mapping):
        return str(config if isinstance(config, str) else cls)[:MAX_TEXT]
    arguments = (f"{name}={value}" for name, value in config.items() if name not in _NAMING)
    return f"{cls}({', '.join(arguments)})"[:MAX_TEXT]


def _l2_factor(value: Any) -> float | None:
    """Return the factor of an L2 penalty, else None (keras/src/regularizers/regularizers.py)."""
    config = value.get("config") if isinstance(value, dict) else None
    factors = config if isinstance(config, dict) else {}
    factor = _plain_scalar(factors.get("l2"))
    return factor if isinstance(factor, float) and not factors.get("l1") else None


def _initial_rate(value: Any) -> float | None:
    """Return the initial rate of a schedule (keras/src/optimizers/schedules/learning_rate_schedule.py)."""
    config = value.get("config") if isinstance(value, dict) else None
    first = _plain_scalar(config.get("initial_learning_rate")) if isinstance(config, dict) else None
    return first if isinstance(first, float) else None


def _plain_fact(value: Any) -> Any:
    if isinstance(value, dict):
        return _object_fact(value)
    if isinstance(value, list):
        items = [_plain_scalar(item) for item in value[: MAX_ITEMS + 1]]
        known = all(item is not None or was is None for item, was in zip(items, value, strict=False))
        return items if known and len(items) <= MAX_ITEMS else None
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinities, but Python accepts them.
        return value if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else None
    return value if isinstance(value, bool | int) else None


def _object_fact(value: Mapping[str, Any]) -> Any:
    cls, inner = value.get("class_name"), value.get("config")
    if cls == "__tuple__":
        items = value.get("items")
        return _plain_fact(items) if isinstance(items, list) else None
    # A dtype policy or an activation by name, an initializer by class.
    name = inner.get("name") if isinstance(inner, dict) else inner
    return _plain_scalar(name) if isinstance(name, str) else class_name(cls)


_V2_SHARD = deferred.compile(r"(.+)\.data-\d{5}-of-\d{5}", re.DOTALL)
_V1_SHARD = deferred.compile(r"(.+)-(\d{5}|\?{5})-of-(\d{5})", re.DOTALL)
# Limit on files examined in a folder without a state file.
_LOOKED_AT = 1000


class SaverCheckpoint(NamedTuple):
    """A checkpoint: its format version, and its V2 prefix, V1 file, or pattern of V1 shards."""

    version: Literal[1, 2]
    location: str


def v2_base(name: str) -> str | None:
    """Return the prefix in a V2 shard's name."""
    shard = _V2_SHARD.fullmatch(name)
    return shard[1] if shard is not None else None


def v1_pattern(name: str) -> str | None:
    """Return a V1 shard's name as TensorFlow's pattern: `PREFIX-?????-of-00002`."""
    shard = _V1_SHARD.fullmatch(name)
    if shard is None or v2_base(name) is not None:
        return None
    return f"{shard[1]}-?????-of-{shard[3]}"


def v1_shards(pattern: str) -> tuple[str, ...] | None:
    """Return the paths of all shards of such a pattern; None if it is not a pattern."""
    shard = _V1_SHARD.fullmatch(pattern)
    if shard is None or not shard[2].startswith("?"):
        return None
    return tuple(f"{shard[1]}-{number:05d}-of-{shard[3]}" for number in range(int(shard[3])))


def saver_graph_file(path: str) -> str:
    """Return where TensorFlow 1's Saver stores its program's graph, beside the checkpoint at a path."""
    return (path if v1_shards(path) is None else path.partition("-?????-of-")[0]) + ".meta"


def is_v1_file(path: str) -> bool:
    """Return whether a file is a table without the suffix `.index`, as V1 checkpoints are."""
    from ckpttool.encodings import sstable

    probe = Probe(path)
    return probe.kind == "file" and not path.endswith(".index") and probe.tail.endswith(sstable.MAGIC)


def checkpoint_at(location: str, names: frozenset[str]) -> SaverCheckpoint | None:
    """Return the checkpoint with exactly this prefix; `names` are the names in its folder.

    Raise UsageError if shards of two V1 checkpoints have the prefix. Two formats use this, so that exactly
    one of them claims a path. Sources: tensorflow/python/checkpoint/checkpoint_management.py
    (checkpoint_exists, latest_checkpoint) and tensorflow/python/training/saver.py (names of shards).
    """
    base = os.path.basename(location)
    if f"{base}.index" in names:
        return SaverCheckpoint(2, location)
    if base in names and is_v1_file(location):
        return SaverCheckpoint(1, location)
    folder = location[: len(location) - len(base)]
    own = v1_pattern(base)
    patterns = sorted({p for p in map(v1_pattern, names) if p is not None})
    fits = [p for p in patterns if p == own or p.rpartition("-?????-of-")[0] == base]
    fits = [p for p in fits if any(v1_pattern(n) == p and is_v1_file(folder + n) for n in names)]
    if len(fits) > 1:
        raise UsageError(
            f"the prefix matches {len(fits)} checkpoints with several shards: {', '.join(fits[:8])}",
            file=location,
            hint=did_you_mean(f"{folder}{fits[-1]}"),
        )
    return SaverCheckpoint(1, folder + fits[0]) if fits else None


def find_state(probe: Probe) -> Probe | None:
    """Return the state file at the path, or in the folder there; None without one."""
    if probe.kind == "folder" and NAME not in probe.names:
        return None
    state = Probe(os.path.join(probe.path, NAME)) if probe.kind == "folder" else probe
    return state if state.kind == "file" and is_state_file(state.head) else None


def location_by_state(probe: Probe, version: int) -> str | None:
    """Return the checkpoint of this version that the state file found by `find_state` names as the latest."""
    state = find_state(probe)
    latest = None if state is None else _latest_of_state(state.path, probe.folder, probe.names)
    return latest.location if latest is not None and latest.version == version else None


def _latest_of_state(path: str, folder: str, names: frozenset[str]) -> SaverCheckpoint:
    """Return the latest checkpoint that the state file names.

    Only names inside its own folder are followed: absolute paths are stale after a move, and a file
    must not redirect the reader elsewhere. Raise NotFoundError if nothing with that name exists,
    FormatError if the file is damaged.
    """
    latest = read_state(path).latest
    within = os.path.normpath(latest)
    if not os.path.isabs(within) and within.split(os.sep)[0] != os.pardir and "\0" not in within:
        candidate = os.path.join(folder, within)
        checkpoint = checkpoint_at(candidate, Probe(os.path.dirname(candidate) or ".").names)
        if checkpoint is not None:
            return _require_inside(checkpoint, path)
    base = os.path.basename(within)
    checkpoint = checkpoint_at(os.path.join(folder, base), names)
    if checkpoint is not None:
        return _require_inside(checkpoint, path)
    if base in names and filesystem.isfile(os.path.join(folder, base)):
        raise FormatError(
            "the state file names this file as a checkpoint, but it is not one",
            file=os.path.join(folder, base),
            hint="check whether it was truncated while it was written or copied",
        )
    present = sorted(v2_bases(names))
    raise NotFoundError(
        f"the state file names {latest!r}, which is not in the same folder",
        file=path,
        hint=did_you_mean(os.path.join(folder, present[-1])) if present else None,
    )


def _require_inside(checkpoint: SaverCheckpoint, state: str) -> SaverCheckpoint:
    """Raise UnsupportedError if the checkpoint's files are links out of the state file's folder."""
    shards = v1_shards(checkpoint.location) if checkpoint.version == 1 else (f"{checkpoint.location}.index",)
    for file in shards if shards is not None else (checkpoint.location,):
        if filesystem.lexists(file):
            File.beside(file, state)
    return checkpoint


def note_redirection(probe: Probe, location: str) -> str | None:
    """Return a note if a state file led to the location but names a place outside its folder."""
    state = find_state(probe)
    if state is None:
        return None
    latest = read_state(state.path).latest
    # No disk access: the name may be anything.
    named = os.path.dirname(filesystem.abspath(os.path.join(state.folder, latest)))
    folder = os.path.dirname(location) or "."
    if named in (filesystem.abspath(folder), filesystem.realpath(folder)):
        return None
    return (
        f"the state file names {latest} in another folder; the checkpoint of that name in its own "
        "folder was used"
    )


def v2_bases(names: frozenset[str]) -> set[str]:
    """Return the prefixes in a folder that have an index and a shard."""
    bases = {base for base in map(v2_base, names) if base is not None}
    return {base for base in bases if f"{base}.index" in names}


def v1_bases(folder: str, names: frozenset[str]) -> set[str]:
    """Return the V1 files and shard patterns in a folder; only likely candidates are opened.

    These have a graph (`.meta`) beside them, `ckpt` in their names, or names of shards.
    """
    bases = set()
    for name in sorted(names)[:_LOOKED_AT]:
        pattern = v1_pattern(name)
        likely = pattern is not None or f"{name}.meta" in names or "ckpt" in name
        if likely and is_v1_file(os.path.join(folder, name)):
            bases.add(pattern or name)
    return bases


def several_checkpoints_error(bases: list[str], folder: str) -> UsageError:
    """Return the error for a folder of several checkpoints, ordered by age, without a state file."""
    listed = abbreviate_list(bases, 8)
    return UsageError(
        f"the folder contains {len(bases)} checkpoints, but no state file that names the latest: {listed}",
        file=folder,
        hint=did_you_mean(os.path.join(folder, bases[-1])),
    )


def checkpoint_order(base: str) -> tuple[str, int]:
    """Return the sort key of a checkpoint: `ckpt-15000` comes after `ckpt-7500`."""
    base = base.partition("-?????-of-")[0]
    stem, _, number = base.rpartition("-")
    return (stem, int(number)) if number.isdecimal() else (base, -1)


# tensorflow/core/framework/tensor_shape.h: TensorShape::MaxDimensions.
MAX_RANK = 254

# TensorShapeProto: dim, unknown_rank; Dim: size; TensorSliceProto: extent; Extent: start, length.
_SHAPE, _DIM = Message({2: protobuf.MESSAGES, 3: protobuf.INT}), Message({1: protobuf.INT})
# `length` is a oneof: if absent, the slice covers the whole dimension.
_SLICE = Message({1: protobuf.MESSAGES})
_EXTENT = Message({1: protobuf.INT, 2: protobuf.INT._replace(absent=-1)})
# VersionDef (tensorflow/core/framework/versions.proto): producer, min_consumer, bad_consumers.
VERSIONS = Message(
    {1: protobuf.INT32, 2: protobuf.INT32, 3: protobuf.INTS._replace(convert=protobuf.as_int32s)}
)

Extent = tuple[int, int]  # start and length; length -1 is the whole dimension


def require_version(producer: int, least: int, refused: Collection[int], own: int) -> None:
    """Raise unless a reader of version `own` may read what the fields of a VersionDef describe."""
    if producer < 0:
        raise FormatError("negative version of the checkpoint", expected="0 or more", found=str(producer))
    if least > own or own in refused:
        raise UnsupportedError(
            "the checkpoint requires a newer reader", expected=f"version {own}", found=f"version {least}"
        )


@functools.lru_cache(maxsize=1024)  # thousands of tensors share a few dozen shapes
def parse_shape(data: bytes) -> tuple[int, ...]:
    """Decode a TensorShapeProto; raise FormatError for an unknown rank or a negative dimension.

    Field numbers are from tensorflow/core/framework/tensor_shape.proto and tensor_slice.proto.
    """
    messages, unknown = protobuf.decode(data, _SHAPE)
    dims = tuple(protobuf.decode(dim, _DIM)[0] for dim in messages)
    if min(dims, default=0) < 0:
        raise FormatError("a tensor has a negative dimension", found=str(min(dims)))
    if unknown:
        raise FormatError("the tensor's rank is unknown")
    if len(dims) > MAX_RANK:
        raise FormatError(
            "the tensor has too many dimensions", expected=f"at most {MAX_RANK}", found=str(len(dims))
        )
    return dims


def parse_slice(data: bytes) -> tuple[Extent, ...]:
    """Decode a TensorSliceProto: start and length in each dimension."""
    (extents,) = protobuf.decode(data, _SLICE)
    return tuple(
        (start, length) for start, length in (protobuf.decode(extent, _EXTENT) for extent in extents)
    )


def slice_key(name: bytes, extents: tuple[Extent, ...]) -> bytes:
    """Return the key of a slice's own entry.

    An order-preserving code (tensorflow/core/util/saved_tensor_slice_util.cc and
    tensorflow/core/lib/strings/ordered_code.cc): 0, the name, the rank, then start and length of each
    extent.
    """
    escaped = re.sub(rb"[\x00\xff]", lambda byte: byte[0] + bytes([255 - byte[0][0]]), name)
    numbers = b"".join(_signed(start) + _signed(length) for start, length in extents)
    return _unsigned(0) + escaped + b"\x00\x01" + _unsigned(len(extents)) + numbers


def _unsigned(value: int) -> bytes:
    digits = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(digits)]) + digits


def _signed(value: int) -> bytes:
    magnitude = ~value if value < 0 else value
    length = 1
    while magnitude >= 1 << (7 * length - 1):
        length += 1
    # The leading one bits count the bytes; a negative number is the bitwise mirror image.
    bits = 8 * length
    code = magnitude | ((1 << length) - 1) << (bits - length)
    return (code ^ (1 << bits) - 1 if value < 0 else code).to_bytes(length, "big")


# Each axis doubles the work of checking that slices cover their tensor; partitioners cut one axis.
MAX_CUT_AXES = 4

Box = tuple[tuple[int, int], ...]  # start and length in each dimension


class IncompleteTensor(NamedTuple):
    """A tensor with missing slices.

    TensorFlow writes these: with a variable scope around the optimizer, each part of a partitioned
    variable has its own slot names (slot_creator.py cuts the name at the wrong place). TensorFlow
    restores them part by part.
    """

    path: str

    def read(self) -> bytes:
        """Raise FormatError."""
        raise FormatError("the slices do not cover the tensor", file=self.path)


class SlicedTensor(NamedTuple):
    """A tensor assembled from slices that cover it exactly, each a source with its position."""

    dtype: str
    shape: Shape
    parts: tuple[tuple[Box, Source], ...]

    def read(self) -> memoryview:
        """Return the whole tensor's bytes."""
        parts = (
            (tuple(slice(start, start + length) for start, length in box), part) for box, part in self.parts
        )
        return combine_parts(self.dtype, self.shape, parts)

    def streams(self) -> bool:
        """Return whether the tensor is large, and its slices stand in rows of equal height."""
        row = dtypes.BY_NAME.get(self.dtype)
        return row is not None and cuts(self.shape, row.itemsize) and bool(self._bands())

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:  # noqa: ARG002  # every pass verifies
        """Yield the bytes in strips across the slices that stand side by side."""
        kind = dtypes.numpy_dtype(self.dtype)
        rows = max(1, LARGE // (math.prod(self.shape[1:]) * kind.itemsize))
        for (_, height), band in self._bands().items():
            columns = [tuple(slice(start, start + length) for start, length in box[1:]) for box, _ in band]
            readers = [
                StreamedArray(part, self.dtype, tuple(length for _, length in box)).blocks(
                    rows * math.prod(length for _, length in box[1:])
                )
                for box, part in band
            ]
            # All readers end together, which verifies them.
            for at, *blocks in zip(range(0, height, rows), *readers, strict=True):
                if len(band) == 1:
                    yield blocks[0].view(np.uint8).data
                    continue
                strip = np.empty((min(rows, height - at), *self.shape[1:]), kind)
                for index, block in zip(columns, blocks, strict=True):
                    target = strip[:, *index]
                    target[...] = block.reshape(target.shape)
                yield strip.reshape(-1).view(np.uint8).data

    def _bands(self) -> dict[tuple[int, int], list[tuple[Box, Source]]]:
        """Return the slices by their first and their number of rows; {} if two overlap in some rows only."""
        bands: dict[tuple[int, int], list[tuple[Box, Source]]] = {}
        for box, part in self.parts:
            if 0 not in (length for _, length in box):
                bands.setdefault(box[0], []).append((box, part))
        at, ordered = 0, sorted(bands)
        for start, height in ordered:
            if start != at:
                return {}
            at += height
        return {rows: bands[rows] for rows in ordered}


def assemble_slices(
    dtype: str, shape: Shape, parts: list[tuple[Box, Source]], path: str
) -> SlicedTensor | IncompleteTensor:
    """Return the source of a sliced tensor in the file `path`; raise FormatError if slices overlap."""
    whole = tuple((0, extent) for extent in shape)
    boxes = [box for box, _ in parts]
    cut = [axis for axis in range(len(shape)) if any(box[axis] != whole[axis] for box in boxes)]
    if len(cut) > MAX_CUT_AXES:
        raise UnsupportedError(
            "the tensor is sliced along too many axes",
            expected=f"at most {MAX_CUT_AXES}",
            found=str(len(cut)),
        )
    if not _tiles_exactly([[box[axis] for axis in cut] for box in boxes], [whole[axis] for axis in cut]):
        stored = sum(math.prod(length for _, length in box) for box in boxes)
        if stored < math.prod(shape):
            return IncompleteTensor(path)
        raise FormatError("the slices do not cover the tensor exactly once")
    return SlicedTensor(dtype, shape, tuple(parts))


def _tiles_exactly(boxes: list[list[tuple[int, int]]], whole: list[tuple[int, int]]) -> bool:
    # Boxes tile the whole if and only if their corners, counted with alternating signs, add up to those of
    # the whole: they are the derivative of "how often is this element covered" along every axis.
    # As text, whose hash is randomised: a file could choose numbers that collide.
    corners: Counter[str] = Counter()
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        edges = [((start, 1), (start + length, -1)) for start, length in box]
        for corner in itertools.product(*edges):
            corners[",".join(str(at) for at, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def slice_box(extents: tuple[Extent, ...], shape: Shape) -> Box:
    """Return the position of a slice in its tensor; raise FormatError if rank or bounds do not match."""
    if len(extents) != len(shape):
        raise FormatError("a slice and its tensor have different ranks", found=str(len(extents)))
    box = []
    for (start, length), size in zip(extents, shape, strict=True):
        length = size - start if length == -1 else length
        if start < 0 or length < 0 or start + length > size:
            raise FormatError(
                "a slice extends past the end of its tensor", found=f"{start} + {length} of {size}"
            )
        box.append((start, length))
    return tuple(box)


# Slots in the order in which each optimizer creates them (`_create_slots` in tensorflow/python/training/*.py
# and, in TensorFlow 1.15, tensorflow/contrib/opt/python/training/*.py). RMSProp creates two, or three if
# centered.
_ADAM = ("m", "v")
_BY_OPTIMIZER = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "AdamOptimizer": _ADAM,
    "AdaMax": _ADAM,
    "Nadam": _ADAM,
    "LazyAdam": _ADAM,
    "RMSProp": ("rms", "momentum"),
    "Momentum": ("momentum",),
    "MomentumW": ("momentum",),
    "Adagrad": ("accumulator",),
    "ProximalAdagrad": ("accumulator",),
    "AdagradDA": ("gradient_accumulator", "gradient_squared_accumulator"),
    "Adadelta": ("accum", "accum_update"),
    "Ftrl": ("accum", "linear"),
    "ExponentialMovingAverage": ("average",),
}
_CENTERED = ("rms", "mg", "momentum")
# Last name parts that are the kind itself: Keras's optimizers, and the one of google-research/bert.
_KINDS = {
    **{
        kind: kind for kind in ("m", "v", "vhat", "momentum", "rms", "mg", "accumulator", "linear", "average")
    },
    **{kind: kind for kind in ("accum_grad", "accum_var")},
    "adam_m": "m",
    "adam_v": "v",
}
# State of a zero-debiased moving average (moving_averages.py, _zero_debias).
_HELPER = deferred.compile(r"(?:biased|local_step)(?:_\d+)?")
_NUMBERED = deferred.compile(r"(.+)_([1-9]\d{0,8})", re.DOTALL)
_POWER = deferred.compile(r"(?:.*/)?beta1_power(?:_\d+)?", re.DOTALL)
# Remainder of `part_0` after slot_creator.py removes a partitioned variable's name from a slot's name with a
# scope before it: `w/art_0/Adam` for part 0 of `w`.
_CUT_PART = deferred.compile(r"(?:.*/)?p?a?r?t?_\d+", re.DOTALL)
# Limit on scopes around an optimizer.
_DEEPEST = 32


class NamedSlot(NamedTuple):
    """A slot: the name of its variable, its kind, and the scope in which it was created."""

    of: str
    kind: str
    scope: str


class _SlotReading(NamedTuple):
    """One way to split a name: a scope, an existing variable, and the slot's own part."""

    scope: str
    of: str
    tail: str


def find_slots(shapes: Mapping[str, Shape]) -> dict[str, NamedSlot]:
    """Return the slots among the variables, by name; `shapes` are the shapes of all variables.

    The variable of a slot exists and has the same shape (a scalar slot can belong to any variable). It may
    itself be a slot, as in the moving average of a moment. If a name can be split in two ways, the scope of
    the optimizer's other slots decides; otherwise the longer variable name. A slot is named
    `[SCOPE/]VARIABLE/NAME[_N]`: SCOPE is the variable scope around the call that created it, NAME the
    optimizer's name, and _N counts the variable's slots with that name in the order of creation
    (tensorflow/python/training/slot_creator.py, create_slot; optimizer.py, _zeros_slot). Keras's optimizers
    of TensorFlow 2 write `SCOPE/OPTIMIZER/VARIABLE/KIND` (keras/optimizers/optimizer_v2/optimizer_v2.py,
    add_slot).
    """
    chosen: dict[str, _SlotReading] = {}
    open_ones: dict[str, list[_SlotReading]] = {}
    scopes: dict[str, set[str]] = defaultdict(set)
    for name, shape in shapes.items():
        readings = list(_readings(name, shape, shapes))
        if len(readings) == 1:
            chosen[name] = readings[0]
            scopes[readings[0].tail].add(readings[0].scope)
        elif readings:
            open_ones[name] = readings
    for name, readings in open_ones.items():
        known = [reading for reading in readings if reading.scope in scopes[reading.tail]]
        chosen[name] = (known or readings)[0]
    kinds = dict(_iter_kinds(chosen, shapes))
    return {
        name: NamedSlot(chosen[name].of, kinds[name], chosen[name].scope) for name in shapes if name in chosen
    }


def _readings(name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Iterable[_SlotReading]:
    """Yield the ways to split a name into those of a slot, longest variable first."""
    owner, slash, tail = name.rpartition("/")
    if not slash or _HELPER.fullmatch(tail):
        return
    named = _is_known(tail)
    start = 0
    for _ in range(_DEEPEST):
        variable = owner[start:]
        # Under a scope, an unknown part needs more evidence than a variable called `w` somewhere.
        sure = named or not start or "/" in variable
        if sure and variable in shapes and (shapes[variable] == shape or (named and not shape)):
            yield _SlotReading(owner[: max(0, start - 1)], variable, tail)
        start = owner.find("/", start) + 1
        if not start:
            break
    if named:
        yield from _cut_parts(owner, tail, shape, shapes)


def _cut_parts(owner: str, tail: str, shape: Shape, shapes: Mapping[str, Shape]) -> Iterable[_SlotReading]:
    variable = owner
    for _ in range(_DEEPEST):
        variable = variable.rpartition("/")[0]
        part = owner[len(variable) + 1 :]
        if not variable or _CUT_PART.fullmatch(part) is None:
            return
        if shapes.get(variable) == shape:
            # Every part has its own slots; they count as if they were in a separate scope.
            yield _SlotReading(part, variable, tail)


def _is_known(tail: str) -> bool:
    numbered = _NUMBERED.fullmatch(tail)
    return tail in _KINDS or tail in _BY_OPTIMIZER or (numbered is not None and numbered[1] in _BY_OPTIMIZER)


def _iter_kinds(mine: Mapping[str, _SlotReading], shapes: Mapping[str, Shape]) -> Iterable[tuple[str, str]]:
    """Yield the slots with their kinds."""
    families: dict[tuple[str, str, str], dict[int, str]] = defaultdict(dict)
    siblings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for reading in mine.values():
        siblings[reading.scope, reading.of].add(reading.tail)
    for name, reading in mine.items():
        base, number = _split_member(reading.tail, siblings[reading.scope, reading.of])
        families[reading.scope, reading.of, base][number] = name
    custom_adam = _custom_is_adam(families, shapes)
    for (_, _, base), members in families.items():
        for number, name in members.items():
            yield name, _slot_kind(mine[name].tail, base, number, len(members), custom_adam=custom_adam)


def _split_member(tail: str, siblings: set[str]) -> tuple[str, int]:
    """Split a slot's own part into the optimizer's name and the slot number."""
    numbered = _NUMBERED.fullmatch(tail)
    if numbered is not None and (numbered[1] in siblings or numbered[1] in _BY_OPTIMIZER):
        return numbered[1], int(numbered[2])
    return tail, 0


def _custom_is_adam(
    families: Mapping[tuple[str, str, str], Mapping[int, str]], shapes: Mapping[str, Shape]
) -> bool:
    """Return whether optimizers with custom names are Adams: these also have powers of beta."""
    powers = sum(1 for name, shape in shapes.items() if not shape and _POWER.fullmatch(name))
    pairs: dict[tuple[str, str], int] = {}
    for (scope, _, base), members in families.items():
        if _BY_OPTIMIZER.get(base, _ADAM) is _ADAM and base not in _KINDS and len(members) % 2 == 0:
            pairs[scope, base] = max(pairs.get((scope, base), 0), len(members) // 2)
    return powers > 0 and powers >= sum(pairs.values())


def _slot_kind(tail: str, base: str, number: int, count: int, *, custom_adam: bool) -> str:
    if tail in _KINDS:
        return _KINDS[tail]
    kinds = _BY_OPTIMIZER.get(base)
    if kinds is None:
        return _ADAM[number % 2] if custom_adam and count % 2 == 0 else tail
    if base == "RMSProp" and count % 2:
        # Two or three slots each: an odd number that is not a multiple of three is a mixture.
        return _CENTERED[number % 3] if count % 3 == 0 else tail
    return kinds[number % len(kinds)]


# Possessive repeats (*+, ++) never backtrack, so that no text takes more than linear time.
_SPACE = _GAP.decode()
_STRING = r"""(?:"(?:[^"\\\n]|\\.)*+"|'(?:[^'\\\n]|\\.)*+')"""
# Adjacent strings are one string.
_TOKEN = deferred.compile(
    rf"(?P<text>{_STRING}(?:{_SPACE}{_STRING})*+)|(?P<word>[A-Za-z_0-9.+-]++)|(?P<mark>[{{}}<>\[\]:])"
    r"|[ \t\r\n\f\v,;]++|#[^\n]*+",
    re.DOTALL,
)
_PART = deferred.compile(_SPACE + r"""(["'])(?P<inner>(?:(?!\1)[^\\\n]|\\.)*+)\1""", re.DOTALL)
_ESCAPE = deferred.compile(
    r"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_OPEN, _CLOSE = "{<", "}>"

Fields = dict[str, list[Any]]


def read(file: str) -> Fields:
    """Return the message in a file: the values of each field in order, text byte for byte (latin-1).

    Raise FormatError if it is larger or nested deeper than the limits, or not text of this kind. Source:
    protobuf.dev/reference/protobuf/textformat-spec. A field is `name: value` or `name { ... }` (a colon
    before the brace is allowed), fields end at white space, a comma or a semicolon; bytes use C's escapes.
    """
    most = limits.current().state_bytes
    data = filesystem.read_bytes(file, 0, most + 1)
    if len(data) > most:
        size = filesystem.getsize(file)
        raise limits.limit_error("state_bytes", "the protocol buffer text is too large", size, file=file)
    with locate_errors(file=file):
        return _parse_message(_tokens(data.decode("latin-1")))


class EnumName(str):
    """A value without quotes that is no number: an enum's name, true or false."""

    __slots__ = ()


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _damage_error("a name, a value or a mark", at)
        if match.lastgroup is not None:
            yield match.lastgroup, match[0], at
        at = match.end()


def _damage_error(expected: str, at: int) -> FormatError:
    return FormatError("invalid protocol buffer text", offset=at, expected=expected)


def _parse_message(tokens: Iterator[tuple[str, str, int]]) -> Fields:
    """Return the fields of the whole text."""
    open_ones: list[Fields] = [{}]  # the last one is the message being read
    most = limits.current().message_depth
    for kind, name, at in tokens:
        if kind == "mark" and name in _CLOSE and len(open_ones) > 1:
            open_ones.pop()
            continue
        if kind != "word" or not name.isidentifier():
            raise _damage_error("a field name", at)
        kind, token, at = next(tokens, ("", "", at))
        colon = (kind, token) == ("mark", ":")
        if colon:
            kind, token, at = next(tokens, ("", "", at))
        values = open_ones[-1].setdefault(name, [])
        if kind == "mark" and token in _OPEN:
            if len(open_ones) > most:
                raise limits.limit_error("message_depth", "the text is nested too deeply", len(open_ones))
            inner: Fields = {}
            values.append(inner)
            open_ones.append(inner)
        else:
            values.append(_parse_value(kind if colon else "", token, at))
    if len(open_ones) > 1:
        raise FormatError("invalid protocol buffer text: a message has no end")
    return open_ones[0]


def _parse_value(kind: str, token: str, at: int) -> Any:
    if kind == "text":
        try:
            return "".join(_ESCAPE.sub(_unescape, part["inner"]) for part in _PART.finditer(token))
        except (ValueError, OverflowError) as error:
            raise _damage_error("valid escape sequences", at) from error
    if kind != "word":
        raise _damage_error("a field with a value", at)
    try:
        return int(token) if token.lstrip("+-").isdigit() else float(token)
    except ValueError:
        return EnumName(token)


def _unescape(match: re.Match[str]) -> str:
    octal, digits, short, long, letter = match.groups()
    if octal or digits:
        return chr(int(octal or digits, 8 if octal else 16) & 0xFF)
    if short or long:
        return chr(int(short or long, 16)).encode().decode("latin-1")
    return _LETTERS.get(letter, letter)


# Adam's own variables in TensorFlow 1 (tensorflow/python/training/adam.py).
_BETA_POWER = deferred.compile(r"beta[12]_power(?:_\d+)?")
# State of a zero-debiased moving average (tensorflow/python/training/moving_averages.py). Variables that
# Keras's optimizers store beside their slots (keras/optimizers/optimizer_v2/*.py, _set_hyper).
_SETTINGS = frozenset(
    ("learning_rate", "decay", "beta_1", "beta_2", "rho", "momentum", "beta", "learning_rate_power")
) | {"l1_regularization_strength", "l2_regularization_strength"}


class VariableInfo(NamedTuple):
    """Facts that a file itself contains about one tensor."""

    dtype: str
    shape: Shape
    source: Source


def tree_by_name(tensors: Mapping[str, VariableInfo]) -> Tree:
    """Return the tree of a file that stores variables by name: paths are names split at `/`.

    Paths keep every part as stored (including empty ones and a final `:0`) and the order of the file.
    The path of a slot is under that of its variable, or under a scope; `Leaf.of` is the path of the
    variable (formats.slot_names).
    """
    names = _variable_names(tensors)
    slots = find_slots({name: tensors[key].shape for name, key in names.items()})
    scopes = {slot.scope for slot in slots.values() if slot.scope}
    parts: dict[str, PathStep] = {}  # thousands of names share a few hundred parts
    paths = {name: _path(key, parts) for name, key in names.items()}
    leaves = {}
    for name, key in names.items():
        dtype, shape, source = tensors[key]
        slot = slots.get(name)
        if slot is None:
            role = _role(paths[name], name, tensors[key], scopes)
            leaves[paths[name]] = Leaf(dtype, shape, source, key, role, name=name)
        else:
            leaves[paths[name]] = Leaf(
                dtype, shape, source, key, "slot", of=paths[slot.of], slot=slot.kind, name=name
            )
    return Tree(leaves)


def split_variable_names(tree: Tree) -> Tree:
    """Return the tree by name of a dict whose keys are TensorFlow's names of variables (`scope/w:0`).

    OpenAI Baselines, baselines/common/tf_util.py, `save_variables`: a dict of all values by variable name.
    """
    named = {str(path[0].value): leaf for path, leaf in tree.items() if len(path) == 1}
    stored = {name: leaf for name, leaf in named.items() if isinstance(leaf, Leaf)}
    if len(stored) != len(tree) or not stored or not all(name.endswith(":0") for name in stored):
        return tree
    return tree_by_name({n: VariableInfo(leaf.dtype, leaf.shape, leaf.source) for n, leaf in stored.items()})


def _variable_names(tensors: Mapping[str, VariableInfo]) -> dict[str, str]:
    """Return keys by variable name: some programs store a variable under its output's name, `w:0`."""
    names: dict[str, str] = {}
    for key in tensors:
        name = key.removesuffix(":0")
        names[key if name in tensors else name] = key
    return names


def _path(key: str, parts: dict[str, PathStep]) -> Path:
    return tuple(
        [parts.get(part) or parts.setdefault(part, PathStep("attr", part)) for part in key.split("/")]
    )


def _role(path: Path, name: str, tensor: VariableInfo, scopes: set[str]) -> Role:
    scope, _, last = name.rpartition("/")
    if not tensor.shape and (_BETA_POWER.fullmatch(last) or (last in _SETTINGS and scope in scopes)):
        return "other"
    if _HELPER.fullmatch(last):
        return "other"
    return role_by_name(path, name, tensor.dtype, tensor.shape)


def count_adam_steps(
    beta1_power: float, beta2_power: float, beta1: float = 0.9, beta2: float = 0.999
) -> int | None:
    """Return the number of updates that a TensorFlow 1 Adam has made; None if it cannot be computed.

    `beta1_power` and `beta2_power` are the values of the variables with those names. Both start as
    beta and are multiplied by it after each update, in the variable's own type
    (tensorflow/python/training/adam.py, _finish), so that after t updates they are beta^(t+1),
    rounded t times. The multiplications are repeated here, in float32 or float64, and the result is a
    count only if it gives exactly the stored numbers: other betas give None.

    In float32, 0.9^(t+1) is below the smallest normal number from t = 828 on. The remainder (often 0,
    because TensorFlow flushes such numbers) carries no information, so that beta2_power alone
    decides. With 0.999 it becomes as small after 87,000 updates; from then on the count is unknown.
    """
    for kind in (np.float32, np.float64):
        if any(float(kind(power)) != power for power in (beta1_power, beta2_power)):
            continue
        first, second = _count_updates(beta1_power, beta1, kind), _count_updates(beta2_power, beta2, kind)
        if second is None or (first is None and beta1_power >= np.finfo(kind).tiny):
            continue
        small = beta1 ** (second + 1) < 1.01 * np.finfo(kind).tiny
        if first == second or (small and 0 <= beta1_power < np.finfo(kind).tiny):
            return second
    return None


# Limit on updates counted by repeated multiplication.
_MOST_UPDATES = 10_000_000


def _count_updates(power: float, beta: float, kind: type[np.floating]) -> int | None:
    """Return the t for which beta^(t+1), multiplied step by step, is exactly `power`."""
    if not (0 < beta < 1 and np.finfo(kind).tiny <= power <= beta * 1.001):
        return None
    about = math.log(power) / math.log(beta)
    if about > _MOST_UPDATES:
        return None
    # Rounding changes the count by less than this.
    powers = np.multiply.accumulate(np.full(int(about * 1.01) + 8, beta, kind))
    updates = np.flatnonzero(powers == kind(power))
    return int(updates[0]) if len(updates) == 1 else None
