"""Writes a tree as safetensors: the library's order of bytes, the tree's own order in the header.

Source: safetensors/src/tensor.rs, `prepare`: tensors by decreasing alignment of their type, then by name,
and a header filled up with spaces to a multiple of eight bytes. Readers sort by offset, so that the header's
order is free to be the tree's (an optimizer counts parameters in it).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import IO, Any

from ckpttool import dtypes
from ckpttool.errors import UnsupportedError
from ckpttool.formats import recorded, whole
from ckpttool.formats.probe import Piece
from ckpttool.formats.safetensors import LENGTH, header
from ckpttool.formats.safetensors.listing import FORMAT, RESERVED, bare, tensor
from ckpttool.formats.torch_pickle.tree import native
from ckpttool.leaf import Leaf, Path, display
from ckpttool.tree import Tree

# What every reader takes (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
LARGEST = 100_000_000
# What transformers asks a file for before it loads it into a torch module.
_FRAMEWORK = "pt"
# The order in which tensor.rs lists types of one size, the last ones first in a file.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
)  # fmt: skip


def pieces(tree: Tree) -> tuple[Piece]:
    """Return the one file; raise UnsupportedError for a tensor of a type that the format lacks."""
    codes = {path: _code(leaf, path) for path, leaf in tree.tensors()}
    others = [alias.path for _, aliases in tree.aliases.items() for alias in aliases]
    names = recorded.named([*codes, *others], native, RESERVED)
    order = sorted(codes, key=lambda path: (-_ORDER.index(codes[path]), names[path]))
    head = _head(tree, names, codes, order)
    if len(head) > LARGEST:
        raise UnsupportedError(
            "the names and plain values do not fit into the header of a safetensors file",
            expected=f"at most {LARGEST:,} bytes",
            found=f"{len(head):,}",
        )
    return (Piece("", lambda stream: _write(stream, head, tree, order)),)


def _code(leaf: Leaf, path: Path) -> str:
    code = dtypes.BY_NAME[leaf.dtype].safetensors
    if code is None:
        raise UnsupportedError(
            f"a safetensors file cannot hold a tensor of type {leaf.dtype}",
            path=display(path),
            hint="--to torch and --to npz can hold complex numbers" if leaf.dtype.startswith("c") else None,
        )
    return code


def _head(tree: Tree, names: Mapping[Path, str], codes: Mapping[Path, str], order: list[Path]) -> bytes:
    offsets, at = {}, 0
    for path in order:
        nbytes = _tensor(tree, path).nbytes
        offsets[path] = [at, at + nbytes]
        at += nbytes
    document: dict[str, Any] = {header.METADATA: _metadata(tree, names)}
    for path, code in codes.items():
        document[names[path]] = {
            "dtype": code,
            "shape": list(_tensor(tree, path).shape),
            "data_offsets": offsets[path],
        }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def _metadata(tree: Tree, names: Mapping[Path, str]) -> dict[str, str]:
    metadata = {FORMAT: _FRAMEWORK}
    for path, aliases in tree.aliases.items():
        # Names of plain values that are shared stand in the record alone.
        metadata |= {names[alias.path]: names[path] for alias in aliases if path in names}
    arrays = {names[path]: tensor(names[path], n.dtype, n.shape, n.source) for path, n in tree.tensors()}
    if recorded.needed(tree, bare(arrays, metadata)):
        metadata[recorded.KEY] = recorded.recorded(tree, names)
    return metadata


def _tensor(tree: Tree, path: Path) -> Leaf:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors have a code and a place
    return leaf


def _write(stream: IO[bytes], head: bytes, tree: Tree, order: list[Path]) -> None:
    stream.write(len(head).to_bytes(LENGTH, "little"))
    stream.write(head)
    for path in order:
        stream.write(whole.data(_tensor(tree, path), path))
