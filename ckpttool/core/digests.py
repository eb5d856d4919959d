"""The sha256 of each tensor and of a whole checkpoint, with all checksums of the format verified."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ckpttool.core import urls
from ckpttool.core.atomic_write import Progress, WorkerThread, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.source import Buffer, Source, iter_pieces, keep_open
from ckpttool.core.text import describe_record, render_record
from ckpttool.core.tree import Leaf, Path, Record, Tree, ValueLeaf

# Smaller tensors are hashed faster than they are handed to another thread.
SHARED = 64 << 10


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Digest of one tensor: sha256 of its contiguous little-endian bytes.

    The bytes of a string tensor are, for each element, its length as u64 and the element.
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

    `sha256` covers the key, type, shape and bytes of every tensor, and every plain value, independent
    of their order in the file.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

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


def digest_checkpoint(checkpoint: Checkpoint, progress: Progress = ignore_progress) -> Digest:
    """Return the digest of an opened checkpoint."""
    with WorkerThread() as lane:
        return combine_digests(
            checkpoint, map_tensors(checkpoint, lane, lambda _, leaf: hash_tensor(leaf), progress)
        )


def map_tensors(
    checkpoint: Checkpoint,
    lane: WorkerThread,
    work: Callable[[Path, Leaf], str],
    progress: Progress = ignore_progress,
) -> dict[Path, str]:
    """Apply `work` to every tensor, here and in the worker thread; raise the error of the first tensor."""
    total = sum(leaf.nbytes for _, leaf in checkpoint.tree.tensors())
    done = 0
    results: dict[Path, str] = {}
    errors: dict[Path, CkpttoolError] = {}

    def take(path: Path, leaf: Leaf) -> None:
        try:
            results[path] = work(path, leaf)
        except CkpttoolError as error:
            errors[path] = error.located(file=checkpoint.path, path=checkpoint.tree.names[path])

    with keep_open():
        for path, leaf in checkpoint.tree.tensors():
            if errors:
                break
            if leaf.nbytes >= SHARED and lane.idle:
                lane.do(partial(take, path, leaf))
            else:
                take(path, leaf)
            done += leaf.nbytes
            progress(done, total)
        lane.wait()
    for path in checkpoint.tree:
        if path in errors:
            raise errors[path]
    return results


class DigestRecorder:
    """Computes a checkpoint's digest while other code reads its tensors; a worker thread hashes the data.

    Tensors that no other code has read are read for the digest.
    """

    def __init__(self, checkpoint: Checkpoint, lane: WorkerThread) -> None:
        """Create a copy of the checkpoint whose leaves report the data read from them."""
        self._silent, self._lane = checkpoint, lane
        self._received: set[Path] = set()
        self._started: set[Path] = set()
        self._digests: dict[Path, str] = {}
        tree = checkpoint.tree
        leaves = {
            path: replace(leaf, source=TeeSource(leaf.source, path, self)) if isinstance(leaf, Leaf) else leaf
            for path, leaf in tree.items()
        }
        self.checkpoint = replace(checkpoint, tree=Tree(leaves, tree.aliases, tree.containers))

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty recorder's state: another process records what it reads itself (see `attach`)."""
        return {"_received": set(), "_digests": {}, "_started": set()}

    def attach(self, lane: WorkerThread) -> None:
        """Set the worker thread that hashes, in a process that got this recorder with its tensors."""
        self._lane = lane

    def take(self) -> dict[Path, str]:
        """Return the digests of the tensors that were read since the last call."""
        self._lane.wait()
        fresh = {path: sha256 for path, sha256 in self._digests.items() if path not in self._started}
        self._started.update(fresh)
        return fresh

    def learn(self, digests: Mapping[Path, str]) -> None:
        """Record digests of tensors that another process read."""
        self._lane.wait()
        self._received.update(digests)
        self._digests.update(digests)

    def hear(self, path: Path, data: Buffer) -> None:
        """Record the bytes of a tensor, which must not change afterwards."""
        if path in self._received:
            return
        self._received.add(path)
        if len(data) < SHARED:
            self._note(path, data)
        else:
            self._lane.do(partial(self._note, path, data), len(data))

    def hear_pieces(self, path: Path, pieces: Iterator[Buffer]) -> Iterator[Buffer]:
        """Yield the pieces of a tensor, and record their bytes."""
        running = hashlib.sha256()
        for piece in pieces:
            if path not in self._received:
                self._lane.do(partial(running.update, bytes(piece)), len(piece))
            yield piece
        if path not in self._received:
            self._received.add(path)
            self._lane.do(lambda: self._digests.update({path: running.hexdigest()}))

    def sha256(self, path: Path) -> str:
        """Return the digest of a tensor that was read, waiting for the worker thread."""
        if path not in self._digests:
            self._lane.wait()
        return self._digests[path]

    def digest(self) -> Digest:
        """Read the remaining tensors and return the digest; raise the error of the first tensor."""
        self._lane.wait()
        return combine_digests(self._silent, map_tensors(self._silent, self._lane, self._known))

    def _known(self, path: Path, leaf: Leaf) -> str:
        return self._digests[path] if path in self._digests else hash_tensor(leaf)

    def _note(self, path: Path, data: Buffer) -> None:
        self._digests[path] = hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class TeeSource:
    """A source that reports the data read from it."""

    base: Source
    path: Path
    recorder: DigestRecorder = field(repr=False)

    def read(self) -> Buffer:
        """Return the base's bytes."""
        data = self.base.read()
        self.recorder.hear(self.path, data)
        return data

    def pieces(self, *, verify: bool = True) -> Iterator[Buffer]:
        """Yield the base's pieces; the first complete pass is hashed."""
        pieces = iter_pieces(self.base, verify=verify)
        return self.recorder.hear_pieces(self.path, pieces) if verify else pieces

    def sha256(self) -> str:
        """Return the digest of the data read."""
        return self.recorder.sha256(self.path)


def combine_digests(checkpoint: Checkpoint, hashes: Mapping[Path, str]) -> Digest:
    """Return the digest of a checkpoint from the sha256 of every tensor.

    Raise ChangedError if a file has changed since it was listed.
    """
    for file in checkpoint.files:
        file.require_unchanged()
    digests = [
        TensorDigest(name, native, leaf.dtype, leaf.shape, hashes[path])
        for path, leaf in checkpoint.tree.tensors()
        for name, native in _tensor_keys(checkpoint, path, leaf)
    ]
    whole = hashlib.sha256()
    for line in sorted([*map(_line, digests), *_value_lines(checkpoint)]):
        whole.update(line)
    checksums = "none in this format" if checkpoint.integrity == "none" else "verified"
    return Digest(
        urls.display_url(checkpoint.path), checkpoint.format, checksums, tuple(digests), whole.hexdigest()
    )


def hash_tensor(leaf: Leaf) -> str:
    """Return the digest of one tensor's bytes."""
    hasher = hashlib.sha256()
    for piece in iter_pieces(leaf.source):
        hasher.update(piece)
    return hasher.hexdigest()


def _tensor_keys(checkpoint: Checkpoint, path: Path, leaf: Leaf) -> Iterator[tuple[str, str]]:
    yield checkpoint.tree.names[path], leaf.key
    # A tensor that its framework lists under two keys has a digest for each.
    for alias in checkpoint.tree.aliases.get(path, ()):
        if alias.key is not None:
            yield checkpoint.tree.alias_name(alias), alias.key


def _line(tensor: TensorDigest) -> bytes:
    facts = [tensor.key, tensor.dtype, list(tensor.shape), tensor.sha256]
    return json.dumps(facts).encode() + b"\n"


def _value_lines(checkpoint: Checkpoint) -> Iterator[bytes]:
    for path, leaf in checkpoint.tree.plain():
        yield json.dumps([checkpoint.tree.names[path], *_value_texts(leaf)]).encode() + b"\n"


def _value_texts(leaf: ValueLeaf) -> tuple[str, str]:
    value = leaf.value
    if isinstance(value, Record):
        return value.name, value.summary
    return type(value).__name__, repr(value)
