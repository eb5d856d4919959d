"""Writes a tree as a checkpoint: beside the target, read back, compared, then renamed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, cast

from ckpttool import plugins, sidecar
from ckpttool.behind import Lane
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import (
    CkpttoolError,
    NotFoundError,
    TargetExistsError,
    TruncatedError,
    UsageError,
)
from ckpttool.formats.probe import Piece, Probe, WritingFormat
from ckpttool.formats.resolve import Resolved, claims
from ckpttool.leaf import Path
from ckpttool.ops import state_file, targets
from ckpttool.ops.digest import Digest
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.readback import Taken
from ckpttool.ops.targets import TargetKind
from ckpttool.sidecar import Sidecar
from ckpttool.source import File
from ckpttool.tree import Tree
from ckpttool.writing import Output, require_new, write_atomically


def require_free(
    target: str, kind: TargetKind, sources: tuple[File, ...] = (), *, force: bool = False
) -> None:
    """Raise unless `target` may be written; the prefix of a checkpoint that exists is taken too."""
    if kind.prefix:
        _require_prefix(target)
    if target.endswith(sidecar.SUFFIX):
        raise UsageError(
            "the target has the name of another checkpoint's sidecar", file=target, hint="take another name"
        )
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


def _require_prefix(target: str) -> None:
    """Raise if the target is there as something: the prefix of a checkpoint is the name of no file."""
    if os.path.isdir(target) or not os.path.basename(target):
        raise TargetExistsError(
            "the target is a folder, not the prefix that the checkpoint's files have in common",
            file=target,
            hint=f"take {os.path.join(target, 'ckpt-1')}",
        )
    if os.path.lexists(target):
        raise TargetExistsError(
            "the target is a file, and would stand for two checkpoints", file=target, hint="take another name"
        )


def _require_other(claim: Resolved, sources: tuple[File, ...]) -> None:
    """Raise if the checkpoint that would be replaced is the one that is converted."""
    if _identities(claim.format.read(claim.location).files) & _identities(sources):
        raise UsageError("source and target are the same checkpoint", file=claim.location)


def _require_no_rest(target: str, writer: WritingFormat, outputs: list[Output]) -> None:
    """Raise if a file that is there already would become part of the new set without being replaced."""
    replaced = {os.path.abspath(output.file) for output in outputs}
    members = getattr(writer, "members", None)
    for file in members(target) if members is not None else ():
        if os.path.abspath(file) not in replaced:
            raise TargetExistsError(
                "the file would belong to the new checkpoint too", file=file, hint="remove it first"
            )


def _identities(files: tuple[File, ...]) -> set[tuple[int, int]]:
    """Return what tells files apart however their paths are spelled: device and inode."""
    found = [os.stat(file.path) for file in files if os.path.exists(file.path)]
    return {(known.st_dev, known.st_ino) for known in found}


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
    kind = targets.target_kind(target, to)
    require_free(targets.stem(target, kind), kind, force=force)
    return write(tree, target, kind, force=force, sync=sync, progress=progress)


def write(
    tree: Tree,
    target: str,
    kind: TargetKind,
    *,
    receipt: Callable[[Digest, Checkpoint], Sidecar] | None = None,
    others: Callable[[Mapping[Path, Path], Lane], Sequence[Output]] | None = None,
    sources: tuple[File, ...] = (),
    force: bool = False,
    sync: bool = True,
    progress: Progress = silent,
) -> Digest:
    """Write the tree, and beside it `others` and the sidecar that `receipt` makes of the file read back.

    `receipt` is given the digest as well; if it raises, nothing is written. `others` is given the paths by
    which the tensors will be read back, by those that they have, and the lane that compares files with trees.
    `sources` are the files that the tree is read from: ChangedError is raised if they are other ones by then.
    A checkpoint that is found by its prefix becomes the latest one in its folder's state file.
    """
    writer = cast(WritingFormat, plugins.find("formats", kind.format).load())
    target = targets.stem(target, kind)
    options = targets.options(target, kind)
    stored = as_stored(writer, tree, options)
    result: list[tuple[Digest, Checkpoint]] = []
    with Lane() as lane:
        taken = Taken(lane)

        def check(temporary: str) -> None:
            location = writer.claims(Probe(temporary))
            found = writer.read(temporary if location is None else location)
            result.append((taken.compared(found), found))

        between = {"between": target} if kind.state else {}
        pieces = writer.pieces(taken.watch(stored, progress), **options, **between)
        outputs = _outputs(target.removesuffix(kind.ending), pieces, stored, check)
        for output in outputs if kind.prefix else ():
            if not output.extra:
                require_new(output.file, sources, force=force)
        if kind.prefix and not kind.state:
            _require_no_rest(target, writer, outputs)
        if others is not None:
            outputs += others(places(tree, stored), lane)
        if receipt is not None:
            make = receipt
            put = partial(_put_receipt, make, result)
            outputs.append(Output(sidecar.beside(target), put, follows=True))
        if kind.state:
            outputs.append(state_file.brought_up_to_date(target))
        replaced = partial(_files, writer, target) if kind.state else tuple
        write_atomically(outputs, force=force, sync=sync, sources=sources, replaced=replaced)
    return result[0][0]


def _outputs(base: str, pieces: Sequence[Piece], stored: Tree, check: Callable[[str], None]) -> list[Output]:
    """Return the files of the checkpoint, of which the last one is checked with all of them."""
    outputs = [
        Output(
            base,
            piece.write,
            suffix=piece.suffix,
            indexes=piece.indexes,
            meanwhile=piece.meanwhile,
            extra=piece.extra,
        )
        for piece in pieces
    ]
    outputs[0] = outputs[0]._replace(nbytes=sum(leaf.nbytes for _, leaf in stored.tensors()))
    outputs[-1] = outputs[-1]._replace(check=check)
    return outputs


def _files(writer: WritingFormat, target: str) -> tuple[str, ...]:
    """Return the files of the checkpoint that is at the target now, none if there is none that is whole.

    They are removed when the new ones stand, so only files that begin with the target's name are returned.
    """
    begin = os.path.abspath(target) + "."
    with contextlib.suppress(CkpttoolError):
        if writer.claims(Probe(target)) is not None:
            paths = (file.path for file in writer.read(target).files)
            return tuple(path for path in paths if os.path.abspath(path).startswith(begin))
    return ()


def places(tree: Tree, stored: Tree) -> dict[Path, Path]:
    """Return the paths of a tree's tensors as they are stored, by those that they have in it."""
    # A format that changes paths leaves the sources alone.
    there = {id(leaf.source): path for path, leaf in stored.tensors()}
    return {path: there[id(leaf.source)] for path, leaf in tree.tensors() if id(leaf.source) in there}


def as_stored(writer: WritingFormat, tree: Tree, options: Mapping[str, Any]) -> Tree:
    """Return the tree with the paths that its leaves will be read back by, if the format changes any."""
    change = getattr(writer, "stored", None)
    return tree if change is None else cast(Tree, change(tree, **options))


def _put_receipt(
    make: Callable[[Digest, Checkpoint], Sidecar], result: list[tuple[Digest, Checkpoint]], stream: IO[bytes]
) -> None:
    stream.write(make(*result[0]).encode())
