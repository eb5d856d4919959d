"""The number of a tensor's elements, and all of its bytes for a writer."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import FormatError, UnsupportedError
from ckpttool.core.source import Buffer, is_streamed, iter_pieces
from ckpttool.core.tree import Leaf, Path, display


def read_exact(leaf: Leaf, path: Path) -> Buffer:
    """Return the tensor's bytes; raise FormatError unless their number matches its shape and type."""
    data = leaf.read()
    _require_exact(leaf, path, memoryview(data).nbytes)
    return data


class ExactPieces(NamedTuple):
    """The bytes of a large tensor for a writer, read in pieces in every pass."""

    leaf: Leaf
    path: Path

    def pieces(self, *, verify: bool = True) -> Iterator[bytes]:
        """Yield the bytes; raise FormatError at the end unless their number matches shape and type."""
        nbytes = 0
        for piece in iter_pieces(self.leaf.source, verify=verify):
            nbytes += len(piece)
            yield bytes(piece)  # the writer's thread keeps it
        _require_exact(self.leaf, self.path, nbytes)


def exact_part(leaf: Leaf, path: Path) -> Buffer | ExactPieces:
    """Return the tensor's bytes for a writer, a large one in pieces; raises like `read_exact`."""
    return ExactPieces(leaf, path) if is_streamed(leaf.source) else read_exact(leaf, path)


def iter_exact(leaf: Leaf, path: Path) -> Iterator[Buffer]:
    """Yield the tensor's bytes, those of a large one in pieces; raises like `read_exact`."""
    part = exact_part(leaf, path)
    yield from part.pieces() if isinstance(part, ExactPieces) else (part,)


def _require_exact(leaf: Leaf, path: Path, nbytes: int) -> None:
    if nbytes != leaf.nbytes:
        raise FormatError(
            "the tensor's bytes do not match its shape",
            path=display(path),
            expected=f"{leaf.nbytes:,} bytes",
            found=f"{nbytes:,}",
        )


# numpy's limit.
READABLE_RANK = 64
MAX_ELEMENTS = 1 << 58  # of 16 bytes at most, so that sizes in bytes stay below 2^63


@functools.lru_cache(maxsize=1024)
def count_elements(dims: tuple[int, ...]) -> int:
    """Return the number of elements of a shape; reject more dimensions or elements than an array can have."""
    if len(dims) > READABLE_RANK:
        raise UnsupportedError(
            "the tensor has too many dimensions", expected=f"at most {READABLE_RANK}", found=str(len(dims))
        )
    # An extent of 0 must not hide an overflow: [2^62, 2^62, 0] fits no array either.
    if math.prod(extent or 1 for extent in dims) >= MAX_ELEMENTS:
        raise FormatError("the tensor has more elements than a file can hold", found=f"shape {list(dims)}")
    return math.prod(dims)
