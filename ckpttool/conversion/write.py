"""Write checkpoints, verify them by reading back, and record how to reverse a conversion."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, cast

from ckpttool.conversion import targets
from ckpttool.conversion.readback import LeafChecksums
from ckpttool.conversion.targets import TargetKind
from ckpttool.core import plugins, sidecar, urls
from ckpttool.core.atomic_write import (
    Output,
    Progress,
    WorkerThread,
    ignore_progress,
    require_new,
    write_atomically,
)
from ckpttool.core.checkpoint import Checkpoint, keep_network_reads
from ckpttool.core.deferred import dataclass
from ckpttool.core.digests import Digest, DigestRecorder, combine_digests
from ckpttool.core.errors import CkpttoolError, NotFoundError, TargetExistsError, TruncatedError, UsageError
from ckpttool.core.sidecar import Sidecar
from ckpttool.core.source import File
from ckpttool.core.tree import Path, Tree
from ckpttool.formats.detect import CheckpointLocation, matching_formats
from ckpttool.formats.probe import OutputFile, Probe, WritingFormat


def require_writable_target(
    target: str, kind: TargetKind, sources: tuple[File, ...] = (), *, force: bool = False
) -> None:
    """Raise unless `target` may be written; the prefix of an existing checkpoint counts as taken."""
    if urls.is_url(target):
        require_new(target, force=force, in_store=True)
        if kind.sharded is None:
            name = f"{os.path.splitext(target)[0]}.safetensors"
            hint = "add --shards 1" if kind.state else f"use {name} --to safetensors --shard-size 5GB"
            raise UsageError("objects are written in shards", file=target, hint=hint)
        return  # what exists is compared with the journal of an interrupted conversion
    if kind.prefix:
        _require_prefix(target)
    if kind.folder and os.path.lexists(target):
        raise TargetExistsError(
            "the target already exists, but must be a new folder", file=target, hint="choose another name"
        )
    if target.endswith(sidecar.SUFFIX):
        raise UsageError(
            "the target has the name of another checkpoint's sidecar",
            file=target,
            hint="choose another name",
        )
    require_new(target, sources, force=force)
    probe = Probe(target)
    # A prefix has no file of its own name; its files begin with the same word.
    stem = probe.name.partition("-")[0]
    if probe.kind == "missing" and any(name.startswith(stem) for name in probe.names):
        with contextlib.suppress(NotFoundError, TruncatedError):
            for claim in matching_formats(probe, plugins.BUILT_IN["formats"]):
                if force and kind.format == claim.format.NAME:
                    _require_other(claim, sources)
                    continue
                raise TargetExistsError(
                    f"a checkpoint with this name already exists ({claim.format.NAME})",
                    file=target,
                    hint="use --force to replace it"
                    if kind.format == claim.format.NAME
                    else "choose another name",
                )


def require_new_target(target: str, kind: TargetKind, checkpoint: Checkpoint, *, force: bool) -> None:
    """Raise unless a conversion's target and its sidecar may be written."""
    require_writable_target(target, kind, checkpoint.files, force=force)
    require_new(sidecar.sidecar_path(target), checkpoint.files, force=force, in_store=True)


def _require_prefix(target: str) -> None:
    """Raise if the target exists: a checkpoint's prefix is not a file name."""
    if os.path.isdir(target) or not os.path.basename(target):
        raise TargetExistsError(
            "the target is a folder, but must be the common prefix of the checkpoint's files",
            file=target,
            hint=f"use {os.path.join(target, 'ckpt-1')}",
        )
    if os.path.lexists(target):
        raise TargetExistsError(
            "the target is an existing file, so the name would denote two checkpoints",
            file=target,
            hint="choose another name",
        )


def _require_other(claim: CheckpointLocation, sources: tuple[File, ...]) -> None:
    """Raise if the checkpoint to be replaced is the one being converted."""
    if _file_identities(claim.format.read(claim.location).files) & _file_identities(sources):
        raise UsageError("source and target are the same checkpoint", file=claim.location)


def _require_no_rest(target: str, writer: WritingFormat, outputs: list[Output]) -> None:
    """Raise if an existing file would become part of the new set without being replaced."""
    replaced = {os.path.abspath(output.file) for output in outputs}
    members = getattr(writer, "members", None)
    for file in members(target) if members is not None else ():
        if os.path.abspath(file) not in replaced:
            raise TargetExistsError(
                "an existing file would become part of the new checkpoint", file=file, hint="remove it first"
            )


def _file_identities(files: tuple[File, ...]) -> set[tuple[int, int]]:
    """Return the device and inode, which identify files independently of path spelling."""
    stats = [os.stat(file.path) for file in files if os.path.exists(file.path)]
    return {(known.st_dev, known.st_ino) for known in stats}


def save(
    tree: Tree,
    target: str,
    to: str | None = None,
    *,
    force: bool = False,
    sync: bool = True,
    progress: Progress = ignore_progress,
) -> Digest:
    """Write a tree unchanged to a new file and return the digest of the data read back.

    Args:
        tree: tensors and values, e.g. of an open checkpoint.
        target: the path to write; its suffix selects the format unless `to` does.
        to: the format.
        force: replace an existing file.
        sync: wait until the file is on the disk.
        progress: called with the finished and the total amount of work.

    >>> import ckpttool, os, tempfile
    >>> tree = ckpttool.open("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt").tree
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     digest = ckpttool.save(tree, os.path.join(folder, "copy.safetensors"))
    >>> digest.sha256 == ckpttool.digest("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt").sha256
    True
    """
    if not isinstance(cast(object, tree), Tree):
        what = "the .tree of an open checkpoint, or what flatten_with_path(model) returns"
        raise UsageError("this is no tree of tensors and values", expected=what, found=type(tree).__name__)
    kind = targets.parse_target_kind(target, to)
    require_writable_target(targets.target_stem(target, kind), kind, force=force)
    return replace(write_checkpoint(tree, target, kind, WriteOptions((), force, sync, progress)), path=target)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How files are written.

    Args:
        sources: files that the tree is read from; ChangedError is raised if they changed meanwhile.
        force: replace what exists.
        sync: flush to disk before the rename.
        progress: called with the bytes written and the total.
        jobs: number of processes that write shards; None for this one.
        ray: address of the Ray cluster that writes them, None for processes of this machine.
        recorder: computes the digest of the sources as they are read, also by these processes.
    """

    sources: tuple[File, ...] = ()
    force: bool = False
    sync: bool = True
    progress: Progress = ignore_progress
    jobs: int | None = None
    ray: str | None = None
    recorder: DigestRecorder | None = None


def write_checkpoint(
    tree: Tree,
    target: str,
    kind: TargetKind,
    how: WriteOptions,
    *,
    receipt: Callable[[Digest, Checkpoint], Sidecar] | None = None,
    others: Callable[[Mapping[Path, Path], WorkerThread], Sequence[Output]] | None = None,
) -> Digest:
    """Write the tree with `others` and the sidecar that `receipt` builds from the file read back.

    A checkpoint identified by a prefix becomes the latest in its folder's state file.

    Args:
        tree: what is written.
        target: the file, prefix or folder.
        kind: its format.
        how: whether to replace and to flush files, and what reports progress.
        receipt: returns the sidecar for the digest and the checkpoint read back; if it raises, nothing is
            written.
        others: returns further files. It gets a mapping from the tensors' paths to those read back, and the
            worker that compares files with trees.
    """
    writer = cast(WritingFormat, plugins.find("formats", kind.format).load())
    target = targets.target_stem(target, kind)
    options = targets.writer_options(target, kind)
    stored = with_stored_paths(writer, tree, options)
    # Nothing in a store is replaced: neither a set of the same names, nor the state file.
    between = {"between": target} if kind.state and not urls.is_url(target) else {}
    result: list[tuple[Digest, Checkpoint]] = []
    with WorkerThread() as lane, contextlib.ExitStack() as opened:
        if kind.sharded is not None:
            from ckpttool.conversion import shards  # most targets have none

            base = target.removesuffix(kind.ending)
            plan = shards.plan_shards(writer, stored, base, {**options, **between, **kind.sharded})
            write = shards.ShardedWrite(writer, plan, stored, target, base, how)
            if urls.is_url(target):
                beside = [] if others is None else others(stored_paths(tree, stored), lane)

                return shards.write_objects(write, lane, beside, receipt)
            folder = opened.enter_context(shards.working_folder(write))
            checkpoint, hashes, outputs = shards.complete_shards(write, folder, lane)
            result.append((combine_digests(checkpoint, hashes), keep_network_reads(checkpoint)))
        else:
            checksums = LeafChecksums(lane)

            def check(temporary: str) -> None:
                location = writer.claims(Probe(temporary))
                reads = keep_network_reads(writer.read(temporary if location is None else location))
                result.append((checksums.compared(reads), reads))

            pieces = writer.pieces(checksums.watch(stored, how.progress), **options, **between)
            outputs = _target_outputs(target.removesuffix(kind.ending), pieces, stored, check)
            _require_free_names(target, kind, writer, outputs, how)
        beside = [] if others is None else list(others(stored_paths(tree, stored), lane))
        if receipt is not None:
            make = receipt

            def put(stream: IO[bytes]) -> None:
                stream.write(make(*result[0]).encode())

            beside.append(Output(sidecar.sidecar_path(target), put, follows=True))
        if kind.state:
            from ckpttool.conversion.state_file import state_file_output  # for targets of TensorFlow only

            beside.append(state_file_output(target))
        # A complete file gets another name when it is its turn, which changes its status: the receipt, which
        # reads it, is written before.
        outputs = [*beside, *outputs] if kind.sharded is not None else [*outputs, *beside]
        replaced = (
            partial(_existing_files, writer, target, kind)
            if kind.state or kind.sharded is not None
            else tuple
        )
        write_atomically(outputs, force=how.force, sync=how.sync, sources=how.sources, replaced=replaced)
    return result[0][0]


def _require_free_names(
    target: str, kind: TargetKind, writer: WritingFormat, outputs: list[Output], how: WriteOptions
) -> None:
    """Raise an error if a file of a set has the name of an existing one, or would join the set."""
    for output in outputs if kind.prefix else ():
        if not output.extra:
            require_new(output.file, how.sources, force=how.force)
    if kind.prefix and not kind.state:
        _require_no_rest(target, writer, outputs)


def _target_outputs(
    base: str, pieces: Sequence[OutputFile], stored: Tree, check: Callable[[str], None]
) -> list[Output]:
    """Return the checkpoint's files; the last one is checked together with all of them."""
    outputs = [Output(base, **piece._asdict()) for piece in pieces]
    outputs[0] = outputs[0]._replace(nbytes=sum(leaf.nbytes for _, leaf in stored.tensors()))
    outputs[-1] = outputs[-1]._replace(check=check)
    return outputs


def _existing_files(writer: WritingFormat, target: str, kind: TargetKind) -> tuple[str, ...]:
    """Return the files of the existing checkpoint at the target, none if none is complete.

    They are removed when the new files are in place, so only files starting with the target's name
    count.
    """
    begin = os.path.abspath(target.removesuffix(kind.ending))
    with contextlib.suppress(CkpttoolError):
        if writer.claims(Probe(target)) is not None:
            paths = (file.path for file in writer.read(target).files)
            return tuple(
                path for path in paths if os.path.abspath(path).startswith((f"{begin}.", f"{begin}-"))
            )
    return ()


def stored_paths(tree: Tree, stored: Tree) -> dict[Path, Path]:
    """Return the stored paths of a tree's tensors, by their paths in it."""
    # A format that changes paths keeps the same source objects.
    there = {id(leaf.source): path for path, leaf in stored.tensors()}
    return {path: there[id(leaf.source)] for path, leaf in tree.tensors() if id(leaf.source) in there}


def with_stored_paths(writer: WritingFormat, tree: Tree, options: Mapping[str, Any]) -> Tree:
    """Return the tree with read-back paths, if the format changes any."""
    change = getattr(writer, "stored", None)
    return tree if change is None else cast(Tree, change(tree, **options))
