"""Writes a tree as a checkpoint: beside the target, read back, compared, then renamed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import IO, Any, NamedTuple, cast

from ckpttool import plugins, sidecar
from ckpttool.behind import Lane
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import (
    CkpttoolError,
    FormatError,
    NotFoundError,
    TargetExistsError,
    TruncatedError,
    UsageError,
    choice,
)
from ckpttool.formats import checkpoint_state
from ckpttool.formats.probe import Piece, Probe, WritingFormat
from ckpttool.formats.resolve import Resolved, claims
from ckpttool.leaf import Path
from ckpttool.ops.digest import Digest
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.readback import Taken
from ckpttool.sidecar import Sidecar
from ckpttool.source import File
from ckpttool.tree import Tree
from ckpttool.writing import Output, require_new, sets, write_atomically


class TargetKind(NamedTuple):
    """What `--to` names: the format that writes it, and the layout that an agent gets there.

    `options` are what the format's `pieces` is told besides the tree. `prefix` says that the target is no
    file itself but what the names of several begin with, `state` that its folder has a state file, as
    TensorFlow's do. `agent` says that nothing but an agent can be written so: the layout is the point. An
    `ending` is that of a name which stands for several files (`NAME.h5f`), and not before what they add.
    `plan` is the layout's function, of which a library with several forms of file has several.
    """

    format: str
    layout: str
    options: Mapping[str, Any] = MappingProxyType({})
    prefix: bool = False
    state: bool = False
    agent: bool = False
    ending: str = ""
    plan: str = "plan"


TARGETS: dict[str, TargetKind] = {
    "torch": TargetKind("pytorch", "td3_torch"),
    "tf": TargetKind("tensor_bundle", "td3_tf", MappingProxyType({"graph": True}), prefix=True, state=True),
    "tf1": TargetKind("tensor_bundle", "td3_tf", MappingProxyType({"graph": False}), prefix=True, state=True),
    "fujimoto": TargetKind("pytorch_set", "fujimoto", prefix=True, agent=True),
    "cleanrl": TargetKind("pytorch", "cleanrl", agent=True),
    "tianshou": TargetKind("pytorch", "tianshou", agent=True),
    "spinningup": TargetKind("pytorch", "spinningup", agent=True),
    "rsl_rl": TargetKind("pytorch", "rsl_rl", agent=True),
    "fasttd3": TargetKind("pytorch", "fasttd3", agent=True),
    "skrl": TargetKind("pytorch", "skrl", agent=True),
    "elegantrl": TargetKind("pytorch", "elegantrl", agent=True),
    "d3rlpy": TargetKind("d3rlpy", "d3rlpy", agent=True, plan="plan_d3"),
    "d3rlpy_model": TargetKind("pytorch", "d3rlpy", agent=True),
    "keras": TargetKind("keras_h5", "td3_tf", MappingProxyType({"root": "policy"})),
    "sb3": TargetKind("stable_baselines3", "stable_baselines3", agent=True),
    "tf2rl": TargetKind(
        "tensor_bundle", "tf2rl", MappingProxyType({"graph": True}), prefix=True, state=True, agent=True
    ),
    "tf_agents": TargetKind(
        "tensor_bundle", "tf_agents", MappingProxyType({"graph": True}), prefix=True, state=True, agent=True
    ),
    "acme": TargetKind(
        "tensor_bundle", "acme", MappingProxyType({"graph": True}), prefix=True, state=True, agent=True
    ),
    "keras_rl": TargetKind("keras_rl", "keras_rl", prefix=True, agent=True, ending=".h5f"),
    "rllib": TargetKind("rllib", "rllib", agent=True),
    "sb2": TargetKind("stable_baselines2", "stable_baselines2", agent=True),
    "safetensors": TargetKind("safetensors", "td3_torch"),
    "npz": TargetKind("npz", "td3_torch"),
}
# What is made to run and holds no tree that could be read back (ops/export.py).
EXPORTS = ("onnx",)
_SUFFIXES = {
    ".pt": "torch",
    ".pth": "torch",
    ".index": "tf",
    ".h5": "keras",
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".cleanrl_model": "cleanrl",
    ".d3": "d3rlpy",
    ".onnx": "onnx",
}
_INDEX = ".index"


def word(target: str, to: str | None) -> str:
    """Return the word for what to write: `to`, else what the target's suffix means."""
    chosen, known = to or _SUFFIXES.get(os.path.splitext(target)[1]), (*TARGETS, *EXPORTS)
    if chosen is None:
        raise UsageError(
            "the target's name does not say what to write",
            file=target,
            hint=f"--to {' or --to '.join(known)}",
        )
    if chosen not in known:
        raise UsageError(f"{chosen} cannot be written", hint=choice(chosen, known))
    return chosen


def target_kind(target: str, to: str | None) -> TargetKind:
    """Return what to write: what `to` names, else what the target's suffix means."""
    chosen = word(target, to)
    if chosen in EXPORTS:
        raise UsageError(f"{chosen} holds a network that runs, not a tree", hint="ckpttool convert makes one")
    return TARGETS[chosen]


def stem(target: str, kind: TargetKind) -> str:
    """Return what the names of the target's files begin with: a prefix may be named by its index."""
    return target.removesuffix(_INDEX) if kind.state else target.removesuffix(kind.ending) + kind.ending


def require_free(
    target: str, kind: TargetKind, sources: tuple[File, ...] = (), *, force: bool = False
) -> None:
    """Raise unless `target` may be written; the prefix of a checkpoint that exists is taken too."""
    if kind.prefix:
        _require_prefix(target)
    sets.restore(target.removesuffix(kind.ending))
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
    """Raise if a file of the set that is replaced would go on being one of the new set's."""
    if writer.claims(Probe(target)) is None:
        return
    replaced = {os.path.abspath(output.file) for output in outputs}
    for file in writer.read(target).files:
        if os.path.abspath(file.path) not in replaced:
            raise TargetExistsError(
                "the file would belong to the new checkpoint too", file=file.path, hint="remove it first"
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
    kind = target_kind(target, to)
    require_free(stem(target, kind), kind, force=force)
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
    target = stem(target, kind)
    options = _options(target, kind)
    stored = _as_stored(writer, tree, options)
    result: list[tuple[Digest, Checkpoint]] = []
    with Lane() as lane:
        taken = Taken(lane)

        def check(temporary: str) -> None:
            location = writer.claims(Probe(temporary))
            found = writer.read(temporary if location is None else location)
            result.append((taken.compared(found), found))

        between = {"between": True} if kind.state else {}
        pieces = writer.pieces(taken.watch(stored, progress), **options, **between)
        outputs = _outputs(target.removesuffix(kind.ending), pieces, stored, check)
        for output in outputs if kind.prefix else ():
            if not output.extra:
                require_new(output.file, sources, force=force)
        if kind.prefix and not kind.state:
            _require_no_rest(target, writer, outputs)
        if others is not None:
            outputs += others(_places(tree, stored), lane)
        if receipt is not None:
            make = receipt
            put = partial(_put_receipt, make, result)
            outputs.append(Output(sidecar.beside(target), put, follows=True))
        if kind.state:
            outputs.append(_state(target))
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
    """Return the files of the checkpoint that is at the target now, none if there is none that is whole."""
    with contextlib.suppress(CkpttoolError):
        if writer.claims(Probe(target)) is not None:
            return tuple(file.path for file in writer.read(target).files)
    return ()


def _places(tree: Tree, stored: Tree) -> dict[Path, Path]:
    """Return the paths of a tree's tensors as they are stored, by those that they have in it."""
    # A format that changes paths leaves the sources alone.
    there = {id(leaf.source): path for path, leaf in stored.tensors()}
    return {path: there[id(leaf.source)] for path, leaf in tree.tensors() if id(leaf.source) in there}


def _options(target: str, kind: TargetKind) -> dict[str, Any]:
    """Return the options of the format; TensorFlow counts saves, and a prefix ends with that count."""
    options = dict(kind.options)
    if options.get("graph"):
        number = re.search(r"-(\d{1,18})$", target, re.ASCII)
        options["counter"] = int(number[1]) if number else 1
    return options


def _as_stored(writer: WritingFormat, tree: Tree, options: Mapping[str, Any]) -> Tree:
    """Return the tree with the paths that its leaves will be read back by, if the format changes any."""
    change = getattr(writer, "stored", None)
    return tree if change is None else cast(Tree, change(tree, **options))


def _state(target: str) -> Output:
    """Return the state file beside the target, brought up to date: ours is the latest of those it names.

    It is read once more when it is written, because another program may have saved in the meantime. Raise
    UsageError at once if it is damaged.
    """
    folder, name = os.path.split(target)
    path = os.path.join(folder, checkpoint_state.NAME)
    _known_state(path)
    return Output(
        path, lambda stream: _write(stream, _with_ours(_known_state(path), folder, name)), replaces=True
    )


def _with_ours(known: checkpoint_state.State, folder: str, name: str) -> bytes:
    whole = os.path.abspath(os.path.join(folder, name))
    kept = [at for at, one in enumerate(known.every) if os.path.abspath(os.path.join(folder, one)) != whole]
    # Without times TensorFlow takes none for any; with them it needs one for each.
    times = (*(known.times[at] for at in kept), time.time()) if known.times else ()
    every = (*(known.every[at] for at in kept), name)
    return checkpoint_state.encode(checkpoint_state.State(name, every, times, known.preserved))


def _known_state(path: str) -> checkpoint_state.State:
    """Return what the state file says, its latest checkpoint among all; an empty state if there is none."""
    if not os.path.lexists(path):
        return checkpoint_state.State("", ())
    if not os.path.isfile(path):
        raise UsageError("the folder's state file is not a file", file=path)
    try:
        known = checkpoint_state.read(path)
    except (FormatError, OSError) as error:
        reason = error.message if isinstance(error, FormatError) else error.strerror
        raise UsageError(
            f"the folder's state file cannot be brought up to date: {reason}",
            file=path,
            hint="mend it, remove it, or write into another folder",
        ) from error
    return (
        known if known.latest in known.every else known._replace(every=(*known.every, known.latest), times=())
    )


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)


def _put_receipt(
    make: Callable[[Digest, Checkpoint], Sidecar], result: list[tuple[Digest, Checkpoint]], stream: IO[bytes]
) -> None:
    stream.write(make(*result[0]).encode())
