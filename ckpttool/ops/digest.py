"""`digest`: the sha256 of every tensor and of the whole, with every checksum of the format verified."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpttool import documents
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError, NotFoundError
from ckpttool.formats.resolve import open_checkpoint
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf
from ckpttool.ops.progress import Progress, silent

_SAVED_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """One tensor's digest: sha256 over its contiguous little-endian bytes.

    A string tensor's bytes are, for each element, its length as u64 and the element.
    """

    path: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "key": self.key,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "sha256": self.sha256,
        }


@dataclass(frozen=True, slots=True)
class Digest:
    """All digests of a checkpoint.

    `sha256` covers every tensor's key, type, shape and bytes, and every plain value, whatever their order
    in the file.
    """

    path: str
    format: str
    checksums: str
    tensors: tuple[TensorDigest, ...]
    sha256: str

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "path": self.path,
            "format": self.format,
            "checksums": self.checksums,
            "tensors": [tensor.document() for tensor in self.tensors],
            "sha256": self.sha256,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """A digest beside a saved one: keys that differ, that only one side has, and whether all is equal."""

    digest: Digest
    different: tuple[str, ...]
    only_here: tuple[str, ...]
    only_saved: tuple[str, ...]
    equal: bool


def digest(path: str, progress: Progress = silent) -> Digest:
    """Read every tensor once; raise ChecksumError where the format's own checksum does not match."""
    return digest_of(open_checkpoint(path), progress)


def digest_of(checkpoint: Checkpoint, progress: Progress = silent) -> Digest:
    """Return the digest of a checkpoint that is already listed."""
    total = sum(leaf.nbytes for _, leaf in checkpoint.tree.tensors())
    done, found = 0, []
    for path, leaf in checkpoint.tree.tensors():
        sha256 = _sha256(checkpoint, path, leaf)
        for name, native in _named(checkpoint, path, leaf):
            found.append(TensorDigest(name, native, leaf.dtype, leaf.shape, sha256))
        done += leaf.nbytes
        progress(done, total)
    whole = hashlib.sha256()
    for line in sorted([*map(_line, found), *_values(checkpoint)]):
        whole.update(line)
    checksums = "none in this format" if checkpoint.integrity == "none" else "verified"
    return Digest(checkpoint.path, checkpoint.format, checksums, tuple(found), whole.hexdigest())


def _sha256(checkpoint: Checkpoint, path: Path, leaf: Leaf) -> str:
    try:
        return hashlib.sha256(leaf.read()).hexdigest()
    except CkpttoolError as error:
        raise error.located(file=checkpoint.path, path=checkpoint.tree.names[path]) from error


def _named(checkpoint: Checkpoint, path: Path, leaf: Leaf) -> Iterator[tuple[str, str]]:
    yield checkpoint.tree.names[path], leaf.key
    # A tensor that the owning framework lists under two keys is digested under both.
    for alias in checkpoint.tree.aliases.get(path, ()):
        if alias.key is not None:
            yield checkpoint.tree.alias_name(alias), alias.key


def _line(tensor: TensorDigest) -> bytes:
    facts = [tensor.key, tensor.dtype, list(tensor.shape), tensor.sha256]
    return json.dumps(facts).encode() + b"\n"


def _values(checkpoint: Checkpoint) -> Iterator[bytes]:
    for path, leaf in checkpoint.tree.plain():
        yield json.dumps([checkpoint.tree.names[path], *_plain(leaf)]).encode() + b"\n"


def _plain(leaf: ValueLeaf) -> tuple[str, str]:
    value = leaf.value
    if isinstance(value, Record):
        return value.name, value.summary
    return type(value).__name__, repr(value)


def compare(found: Digest, saved_file: str) -> Comparison:
    """Compare with a digest saved by `digest --json`, or with the target digest of a sidecar."""
    if not os.path.isfile(saved_file):
        raise NotFoundError("there is no such saved digest", file=saved_file)
    saved = documents.load(saved_file, "the saved digest", _SAVED_LIMIT)
    if "target_sha256" in saved:
        equal = saved["target_sha256"] == found.sha256
        return Comparison(found, () if equal else ("the whole checkpoint",), (), (), equal)
    try:
        theirs = {t["key"]: (t["dtype"], tuple(t["shape"]), t["sha256"]) for t in saved["tensors"]}
    except (KeyError, TypeError) as error:
        raise FormatError("this is neither a saved digest nor a sidecar", file=saved_file) from error
    ours = {t.key: (t.dtype, t.shape, t.sha256) for t in found.tensors}
    different = tuple(k for k in ours if k in theirs and ours[k] != theirs[k])
    only_here = tuple(k for k in ours if k not in theirs)
    only_saved = tuple(k for k in theirs if k not in ours)
    return Comparison(found, different, only_here, only_saved, saved.get("sha256") == found.sha256)
