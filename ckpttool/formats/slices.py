"""Tensors stored in slices, and tensors that can only be listed: what TensorFlow's V1 and V2 share."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import NamedTuple

from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.tensor_protos import Extent
from ckpttool.source import Shape, Source, combined

# Each doubles the work of seeing that slices cover their tensor; partitioners cut one axis.
MAX_CUT_AXES = 4

Box = tuple[tuple[int, int], ...]  # start and length in each dimension


class Unreadable(NamedTuple):
    """A tensor that can be listed only; `message` says why."""

    path: str
    message: str

    def read(self) -> bytes:
        """Raise UnsupportedError."""
        raise UnsupportedError(self.message, file=self.path)


class Incomplete(NamedTuple):
    """A tensor of which some slices were never stored.

    TensorFlow writes such ones: with a variable scope around the optimizer, the slots of a partitioned
    variable get a name for each part (slot_creator.py cuts the name at the wrong place). It restores part by
    part.
    """

    path: str

    def read(self) -> bytes:
        """Raise FormatError."""
        raise FormatError("the slices of the tensor do not cover it", file=self.path)


class Assembled(NamedTuple):
    """A tensor put together from slices that cover it exactly, each a source with its place."""

    dtype: str
    shape: Shape
    parts: tuple[tuple[Box, Source], ...]

    def read(self) -> memoryview:
        """Return the whole tensor's bytes."""
        parts = (
            (tuple(slice(start, start + length) for start, length in box), part) for box, part in self.parts
        )
        return combined(self.dtype, self.shape, parts)


def assembled(dtype: str, shape: Shape, parts: list[tuple[Box, Source]], path: str) -> Assembled | Incomplete:
    """Return the source of a sliced tensor of the file `path`; raise FormatError when slices overlap."""
    whole = tuple((0, extent) for extent in shape)
    boxes = [box for box, _ in parts]
    cut = [axis for axis in range(len(shape)) if any(box[axis] != whole[axis] for box in boxes)]
    if len(cut) > MAX_CUT_AXES:
        raise UnsupportedError(
            "a tensor is sliced along too many axes", expected=f"at most {MAX_CUT_AXES}", found=str(len(cut))
        )
    if not _tiles([[box[axis] for axis in cut] for box in boxes], [whole[axis] for axis in cut]):
        stored = sum(math.prod(length for _, length in box) for box in boxes)
        if stored < math.prod(shape):
            return Incomplete(path)
        raise FormatError("the slices of the tensor do not cover it exactly once")
    return Assembled(dtype, shape, tuple(parts))


def _tiles(boxes: list[list[tuple[int, int]]], whole: list[tuple[int, int]]) -> bool:
    # Boxes tile the whole if and only if their corners, counted with alternating signs, add up to those of
    # the whole: they are the derivative of "how often is this element covered" along every axis.
    # As text, whose hash is randomised: a file could choose numbers that collide.
    corners: Counter[str] = Counter()
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        edges = [((start, 1), (start + length, -1)) for start, length in box]
        for corner in itertools.product(*edges):
            corners[",".join(str(at) for at, _ in corner)] += weight * math.prod(sign for _, sign in corner)
    return not any(corners.values())


def box_of(extents: tuple[Extent, ...], shape: Shape) -> Box:
    """Return where a slice lies in its tensor; raise FormatError for another rank or a reach beyond it."""
    if len(extents) != len(shape):
        raise FormatError("a slice has another rank than its tensor", found=str(len(extents)))
    box = []
    for (start, length), size in zip(extents, shape, strict=True):
        length = size - start if length == -1 else length
        if start < 0 or length < 0 or start + length > size:
            raise FormatError("a slice reaches beyond its tensor", found=f"{start} + {length} of {size}")
        box.append((start, length))
    return tuple(box)
