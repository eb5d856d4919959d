"""Hugging Face's safetensors: a length, a JSON header, the tensors' bytes; its library is not needed.

Source: github.com/huggingface/safetensors, README.md ("Format") and safetensors/src/tensor.rs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool import limits
from ckpttool.formats.probe import Piece, Probe

if TYPE_CHECKING:
    from ckpttool.checkpoint import Checkpoint
    from ckpttool.formats.listed import Listed
    from ckpttool.source import File
    from ckpttool.tree import Tree

__all__ = ["FRAMEWORK", "NAME", "SUFFIX", "TITLE", "WRITES", "claims", "listed", "pieces", "read"]

NAME = "safetensors"
TITLE = "safetensors file"
WRITES = True
FRAMEWORK = "torch"

SUFFIX = ".safetensors"
LENGTH = 8


def claims(probe: Probe) -> str | None:
    """Return the path of a file that begins with a header's length and a `{`, or whose name says so.

    A suffix alone is enough only where the first bytes are no text and no other format's.
    """
    if probe.kind != "file" or not probe.size:
        return None
    size = int.from_bytes(probe.head[:LENGTH], "little")
    opened = probe.head[LENGTH : LENGTH + 1] == b"{"
    if opened and 0 < size <= probe.size - LENGTH:
        return probe.path
    named = probe.name.endswith(SUFFIX)
    short = probe.size <= LENGTH or size <= limits.current().header_bytes
    return probe.path if named and (opened or short) else None


def read(location: str) -> Checkpoint:
    """List the tensors; raise FormatError when the header breaks a rule of the format."""
    from ckpttool.source import File

    file = File.stamp(location)
    return listed(file).checkpoint(location, NAME, file)


def listed(file: File) -> Listed:
    """List a file that may be a part of a checkpoint; raise FormatError as `read` does."""
    from ckpttool.formats.safetensors import listing

    return listing.listed(file)


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file that holds the tree.

    Raise UnsupportedError, before anything is written, for a tensor of a type that the format lacks.
    """
    from ckpttool.formats.safetensors import write

    return write.pieces(tree)
