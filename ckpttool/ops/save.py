"""Writes a tree as a checkpoint: beside the target, read back, compared, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

from ckpttool import plugins, sidecar
from ckpttool.checkpoint import Output, require_new, write_atomically
from ckpttool.errors import (
    CkpttoolError,
    FormatError,
    NotFoundError,
    TargetExistsError,
    TruncatedError,
    UsageError,
)
from ckpttool.formats.probe import Probe, WritingFormat
from ckpttool.formats.resolve import Resolved, claims
from ckpttool.leaf import Leaf, Path, display
from ckpttool.ops.digest import Digest, digest_of
from ckpttool.ops.progress import Progress, silent
from ckpttool.sidecar import Sidecar
from ckpttool.source import Buffer, File, Source
from ckpttool.tree import Tree
from ckpttool.wire.crc import crc32c


class TargetKind(NamedTuple):
    """What `--to` names: the format that writes it, and the layout that an agent gets there.

    `options` are what the format's `pieces` is told besides the tree.
    """

    format: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})


TARGETS: dict[str, TargetKind] = {"torch": TargetKind("pytorch", "td3_torch")}
_SUFFIXES = {".pt": "torch", ".pth": "torch"}


def target_kind(target: str, to: str | None) -> TargetKind:
    """Return what to write: what `to` names, else what the target's suffix means."""
    chosen = to or _SUFFIXES.get(os.path.splitext(target)[1])
    if chosen is None:
        raise UsageError(
            "the target's name does not say what to write",
            file=target,
            hint=f"--to {' or --to '.join(TARGETS)}",
        )
    if chosen not in TARGETS:
        raise UsageError(f"{chosen} cannot be written", hint=f"--to takes {', '.join(TARGETS)}")
    return TARGETS[chosen]


def require_free(
    target: str, kind: TargetKind, sources: tuple[File, ...] = (), *, force: bool = False
) -> None:
    """Raise unless `target` may be written; the prefix of a checkpoint that exists is taken too."""
    require_new(target, sources, force=force)
    probe = Probe(target)
    if probe.kind == "missing":
        with contextlib.suppress(NotFoundError, TruncatedError):
            for claim in claims(probe, plugins.BUILT_IN["formats"]):
                if force and kind.format == claim.format.NAME:
                    _require_other(claim, sources)
                    continue
                raise TargetExistsError(
                    f"the name stands for a checkpoint that exists ({claim.format.NAME})",
                    file=target,
                    hint="--force replaces it" if kind.format == claim.format.NAME else "take another name",
                )


def _require_other(claim: Resolved, sources: tuple[File, ...]) -> None:
    """Raise if the checkpoint that would be replaced is the one that is converted."""
    theirs = claim.format.read(claim.location).files
    if {(file.path, file.inode) for file in theirs} & {(file.path, file.inode) for file in sources}:
        raise UsageError("source and target are the same checkpoint", file=claim.location)


def save(
    tree: Tree,
    target: str,
    to: str | None = None,
    *,
    force: bool = False,
    sync: bool = True,
    progress: Progress = silent,
) -> Digest:
    """Write a tree as it is into a new file and return the digest of what was read back."""
    kind = target_kind(target, to)
    require_free(target, kind, force=force)
    return write(tree, target, kind, force=force, sync=sync, progress=progress)


def write(
    tree: Tree,
    target: str,
    kind: TargetKind,
    *,
    receipt: Callable[[Digest], Sidecar] | None = None,
    force: bool = False,
    sync: bool = True,
    progress: Progress = silent,
) -> Digest:
    """Write the tree, and beside it the sidecar that `receipt` makes from the written file's digest."""
    writer = cast(WritingFormat, plugins.find("formats", kind.format).load())
    taken = _Checksums()
    result: list[Digest] = []

    def check(temporary: str) -> None:
        location = writer.claims(Probe(temporary))
        written, found = writer.read(temporary if location is None else location), _Checksums()
        result.append(digest_of(replace(written, tree=found.watch(written.tree))))
        taken.require(found)

    pieces = writer.pieces(taken.watch(tree, progress), **kind.options)
    outputs = [Output(target, piece.write, suffix=piece.suffix) for piece in pieces]
    outputs[-1] = outputs[-1]._replace(check=check)
    if receipt is not None:
        make = receipt
        outputs.append(Output(sidecar.beside(target), lambda stream: _put(stream, make(result[0]))))
    write_atomically(outputs, force=force, sync=sync)
    return result[0]


def _put(stream: IO[bytes], receipt: Sidecar) -> None:
    stream.write(receipt.encode())


class _Checksums(dict[Path, int]):
    """The CRC-32C of every leaf's bytes, noted as somebody else reads them."""

    def watch(self, tree: Tree, progress: Progress = silent) -> Tree:
        """Return the same tree whose leaves report what is read from them."""
        total = sum(leaf.nbytes for _, leaf in tree.tensors())
        done = 0

        def seen(path: Path, data: Buffer) -> None:
            nonlocal done
            self[path] = crc32c(data)
            done += len(data)
            progress(done, total)

        watched = {
            path: replace(leaf, source=_Watched(leaf.source, path, seen)) if isinstance(leaf, Leaf) else leaf
            for path, leaf in tree.items()
        }
        return Tree(watched, tree.aliases, tree.containers)

    def require(self, found: Mapping[Path, int]) -> None:
        """Raise FormatError unless what was found has all that was taken, byte for byte."""
        for path, checksum in self.items():
            if found.get(path) != checksum:
                raise FormatError("what was written is not what was read", path=display(path))


@dataclass(frozen=True, slots=True)
class _Watched:
    """A source that tells `seen` what was read from it."""

    base: Source
    path: Path
    seen: Callable[[Path, Buffer], None]

    def read(self) -> Buffer:
        """Return the base's bytes."""
        try:
            data = self.base.read()
        except CkpttoolError as error:
            raise error.located(path=display(self.path)) from error
        self.seen(self.path, data)
        return data
