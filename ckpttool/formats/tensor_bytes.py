"""All bytes of a tensor for a writer, with a check of their number."""

from __future__ import annotations

from collections.abc import Iterator

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import FormatError
from ckpttool.core.source import Buffer, is_streamed, iter_pieces
from ckpttool.core.tree import Leaf, Path, display


def read_exact(leaf: Leaf, path: Path) -> Buffer:
    """Return the tensor's bytes; raise FormatError unless their number matches its shape and type."""
    found = leaf.read()
    _require_exact(leaf, path, memoryview(found).nbytes)
    return found


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
