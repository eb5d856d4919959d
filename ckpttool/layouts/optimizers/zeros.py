"""Moments that have not begun: tensors of zeros that are made when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpttool import dtypes
from ckpttool.leaf import Leaf


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A source of so many bytes of zero."""

    nbytes: int

    def read(self) -> bytes:
        return bytes(self.nbytes)


def zeros(like: Leaf) -> Leaf:
    """Return a tensor of zeros of the type and shape of another."""
    nbytes = math.prod(like.shape) * dtypes.BY_NAME[like.dtype].itemsize
    return Leaf(like.dtype, like.shape, _Zeros(nbytes), "")
