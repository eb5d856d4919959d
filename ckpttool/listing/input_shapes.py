"""Input shapes that users give for models and layers, and shapes that tensors can have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from ckpttool.core import deferred
from ckpttool.core.errors import UsageError, suggest_choice
from ckpttool.listing.layers import Extents

# No framework supports tensors with more numbers or with more axes.
_MOST_NUMBERS, _MOST_AXES = 1 << 63, 32
_SUGGESTED = 12
# Extents of one to nine digits, none of them zero.
_SHAPE = deferred.compile(r"[1-9][0-9]{0,8}([,x][1-9][0-9]{0,8}){0,15}")


def is_possible(shape: Extents) -> bool:
    """Return whether a tensor of this shape can exist; None stands for any length."""
    sizes = [extent for extent in shape if extent is not None]
    return len(shape) <= _MOST_AXES and all(n >= 0 for n in sizes) and math.prod(sizes) < _MOST_NUMBERS


def parse_shapes(shapes: Sequence[str]) -> dict[str, Extents]:
    """Return the shapes by layer path, "" for the whole model."""
    by_path: dict[str, Extents] = {}
    for text in shapes:
        name, equals, numbers = text.rpartition("=")
        if not _SHAPE.fullmatch(numbers) or (equals and not name):
            raise UsageError(
                f"invalid input shape {text!r}", hint="use --input-shape N,N,... with whole numbers"
            )
        path = name.replace(".", "/")
        if path in by_path:
            raise UsageError(f"two input shapes for {name or 'the model'}")
        by_path[path] = tuple(map(int, re.split("[,x]", numbers)))
    return by_path


def require_shapes_used(shapes: Mapping[str, Extents], used: set[str], known: Iterator[str]) -> None:
    """Raise UsageError for a shape whose layer does not exist."""
    for path, shape in shapes.items():
        if path not in used:
            what = f"no layer {path!r}" if path else "the order of the layers is not in the file"
            names = [name for name in known if name]
            hint = suggest_choice(path, names[:_SUGGESTED]) if names else None
            if not path and names:
                numbers = ",".join(map(str, shape))
                hint = f"name the layer that receives the input: --input-shape '{names[0]}={numbers}'"
            raise UsageError(what, hint=hint)


def with_batch(shapes: Mapping[str, Extents]) -> dict[str, tuple[int, ...]]:
    """Return the user's shapes with a batch of 1."""
    return {name: (1, *(extent or 1 for extent in shape)) for name, shape in shapes.items()}
