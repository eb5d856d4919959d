"""Hugging Face's checkpoints in several files: shards with an index, or weights beside their optimizer.

Sources: github.com/huggingface/transformers, src/transformers/modeling_utils.py (`save_pretrained`),
utils/__init__.py (the names of the files) and trainer.py (`_save_checkpoint`); github.com/huggingface/
huggingface_hub, src/huggingface_hub/serialization/_base.py (`StateDictSplit`) and _torch.py;
github.com/huggingface/accelerate, src/accelerate/checkpointing.py (`save_accelerator_state`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ckpttool import documents, limits, places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import CkpttoolError, FormatError, UsageError, some
from ckpttool.formats import pytorch, safetensors
from ckpttool.formats.listed import Listed, joined
from ckpttool.formats.probe import Probe
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.source import File, MissingShard
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.asked import merged, standing

NAME = "sharded"
TITLE = "Hugging Face checkpoint in shards (index.json)"
WRITES = False
FRAMEWORK = "torch"

_INDEX = ".index.json"
_MAP = "weight_map"
# WEIGHTS_NAME and SAFE_WEIGHTS_NAME (transformers/utils/__init__.py); of both, transformers takes the first.
_SAFE, _WEIGHTS = "model.safetensors", "pytorch_model.bin"
# What accelerate's `save_state` (.bin) and transformers' `Trainer` (.pt) write beside the weights. Further
# models, optimizers and schedulers of accelerate have numbers: model_1.safetensors, optimizer_1.bin.
_MODELS = re.compile(r"model(?:_[1-9]\d*)?\.safetensors|pytorch_model(?:_[1-9]\d*)?\.bin")
_OPTIMIZERS = re.compile(r"(optimizer(?:_[1-9]\d*)?)\.(?:bin|pt)")
_SCHEDULERS = re.compile(r"(scheduler(?:_[1-9]\d*)?)\.(?:bin|pt)")
_LEFT = re.compile(
    r"(?:sampler|custom_checkpoint|random_states|rng_state|dl_state_dict).*\.(?:bin|pt|pkl|pth)"
    r"|training_args\.bin|scaler\.pt"
)
_TRAINER_STATE = "trainer_state.json"


def claims(probe: Probe) -> str | None:
    """Return the path of an index, of a folder with one, or of the one file of weights in a folder.

    A folder with an optimizer beside the weights is a checkpoint as a whole.
    """
    if probe.kind == "file":
        return probe.path if _is_index(probe) else None
    if probe.kind != "folder" or not probe.names.isdisjoint(("saved_model.pb", "saved_model.pbtxt")):
        return None
    if _index(probe) is not None:
        return probe.path
    whole = [name for name in (_SAFE, _WEIGHTS) if _inside(probe, name).kind == "file"]
    if whole and _is_training(probe):
        return probe.path
    return os.path.join(probe.path, whole[0]) if whole else None


def _is_training(probe: Probe) -> bool:
    """Whether a folder holds an optimizer or a second model beside its weights."""
    models = [name for name in probe.names if _MODELS.fullmatch(name)]
    optimizers = [name for name in probe.names if _OPTIMIZERS.fullmatch(name)]
    numbered = any("_1." in name for name in models)
    return (bool(optimizers) or numbered) and all(
        _inside(probe, name).kind == "file" for name in (*models, *optimizers)
    )


def _index(probe: Probe) -> str | None:
    """Return the one index in a folder; raise UsageError where several could be meant."""
    found = sorted(n for n in probe.names if n.endswith(_INDEX) and _is_index(_inside(probe, n)))
    if len(found) > 1 and set(found) != {f"{_SAFE}{_INDEX}", f"{_WEIGHTS}{_INDEX}"}:
        raise UsageError(
            "the folder holds several checkpoints in shards",
            file=probe.path,
            found=some(found, 5),
            hint=f"name one, as in {os.path.join(probe.path, found[0])}",
        )
    return os.path.join(probe.path, found[0]) if found else None


def _inside(probe: Probe, name: str) -> Probe:
    return Probe(os.path.join(probe.path, name)) if name in probe.names else Probe("")


def _is_index(probe: Probe) -> bool:
    return probe.kind == "file" and probe.name.endswith(_INDEX) and probe.head.lstrip().startswith(b"{")


def read(location: str) -> Checkpoint:
    """List the tensors of all shards; one whose shard is missing is listed without type and shape.

    The checkpoint of a folder's only file is what that file's own format gives. Raise FormatError when the
    index and the shards do not fit together.
    """
    probe = Probe(location)
    if probe.kind == "folder" and _is_training(probe):
        return _training(probe)
    path = _index(probe) if probe.kind == "folder" else location
    if path is None or not path.endswith(_INDEX):
        return safetensors.read(location) if location.endswith(safetensors.SUFFIX) else pytorch.read(location)
    file = File.stamp(path)
    shard_of = _shard_of(file)
    folder = os.path.dirname(path)
    shards, missing = {}, []
    for name in sorted(set(shard_of.values())):
        shard = os.path.join(folder, name)
        if places.lexists(shard):
            shards[name] = _stamped(shard, path)
        else:
            missing.append(name)
    listed = {name: _shard(shard) for name, shard in shards.items()}
    tree, notes = _Joined(file, shard_of, listed).tree()
    if missing:
        notes = (*notes, f"shards that are missing: {some(missing, 5)}")
    recorded = bool(listed) and all(one.integrity == "crc32" for one in listed.values())
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=(file, *shards.values()),
        writer=next((one.writer for one in listed.values()), None),
        integrity="crc32" if recorded else "none",
        notes=(*notes, *_others(path), *dict.fromkeys(n for one in listed.values() for n in one.notes)),
        asks=merged(*(standing(one.asks, name) for name, one in listed.items())),
    )


def _training(probe: Probe) -> Checkpoint:
    """List a folder of accelerate or of transformers' Trainer: models, optimizers and schedulers.

    Raise what the file of a model or an optimizer raises. A note names the files that are not read.
    """
    from ckpttool.formats.resolve import open_checkpoint

    parts: dict[str, Checkpoint] = {}
    left = sorted(name for name in probe.names if _LEFT.fullmatch(name))
    for member, place in _members(probe).items():
        try:
            parts[member] = open_checkpoint(place)
        except CkpttoolError:
            if not member.startswith("scheduler"):
                raise
            left.append(os.path.basename(place))
    names = ", ".join(os.path.basename(one.path) for one in parts.values())
    notes = [f"the folder is one checkpoint: {names}"]
    trees = {key(member): one.tree for member, one in parts.items()}
    state = _trainer_state(probe)
    if state:
        trees[key("trainer_state")] = Tree({(key(name),): ValueLeaf(value) for name, value in state.items()})
    elif _TRAINER_STATE in probe.names:
        left.append(_TRAINER_STATE)
    if left:
        notes.append(f"not read (random states, settings of the run): {some(left, 5)}")
    read_parts = tuple(parts.values())
    return Checkpoint(
        path=probe.path,
        format=NAME,
        tree=joined(trees, lambda member, name: f"{member.value}:{name}", Container("dict")),
        files=tuple(file for one in read_parts for file in one.files),
        writer=read_parts[0].writer,
        integrity="crc32" if all(one.integrity == "crc32" for one in read_parts) else "none",
        notes=(*notes, *dict.fromkeys(note for one in read_parts for note in one.notes)),
        asks=merged(*(standing(one.asks, member) for member, one in parts.items())),
        unjudged=tuple(f"{member}: {each}" for member, one in parts.items() for each in one.unjudged),
    )


def _members(probe: Probe) -> dict[str, str]:
    """Return the files of a training folder by the names of their entries; models come first."""
    found: dict[str, str] = {}
    names = sorted(probe.names)
    index_ = _index(probe)
    if index_ is not None:
        found["model"] = index_
    safe = [name for name in names if _MODELS.fullmatch(name) and name.endswith(safetensors.SUFFIX)]
    # Of both forms the libraries take safetensors.
    models = safe or [name for name in names if _MODELS.fullmatch(name)]
    for name in models:
        found.setdefault(name.partition(".")[0].removeprefix("pytorch_"), os.path.join(probe.path, name))
    for pattern in (_OPTIMIZERS, _SCHEDULERS):
        for name in names:
            match = pattern.fullmatch(name)
            if match is None or _inside(probe, name).kind != "file":
                continue
            if match[1] in found:
                raise UsageError(
                    f"the folder holds two files of {match[1]}",
                    file=probe.path,
                    found=", ".join((os.path.basename(found[match[1]]), name)),
                    hint=f"name the file of weights, as in {found['model']}",
                )
            found[match[1]] = os.path.join(probe.path, name)
    return found


def _trainer_state(probe: Probe) -> dict[str, int | float | str | bool | None]:
    """Return the plain values at the top of a Trainer's state; none where the file cannot be read."""
    if _inside(probe, _TRAINER_STATE).kind != "file":
        return {}
    file = File.stamp(os.path.join(probe.path, _TRAINER_STATE))
    try:
        documents.require_small(file.size, "the trainer's state", file=file.path)
        values = documents.strict(file.read(0, file.size), "the trainer's state")
    except CkpttoolError:
        return {}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)}


def _stamped(shard: str, index: str) -> File:
    if Probe(shard).kind != "file":
        raise FormatError("a shard is not a file", file=shard)
    return File.beside(shard, index)


def _others(location: str) -> tuple[str, ...]:
    """Return a note if the folder holds the same weights in the other form too."""
    folder, name = os.path.split(location)
    other = f"{_WEIGHTS if name.startswith(_SAFE) else _SAFE}{_INDEX}"
    there = other != name and places.lexists(os.path.join(folder, other))
    return (f"{other} lies in the same folder and is not read",) if there else ()


def _shard_of(file: File) -> dict[str, str]:
    """Return each tensor's shard; raise FormatError for one that is not a file beside the index."""
    if file.size > limits.current().json_bytes:
        raise limits.exceeded("json_bytes", "the index is too large", file.size, file=file.path)
    try:
        found = documents.strict(file.read(0, file.size), "the index")
    except CkpttoolError as error:
        raise error.located(file=file.path) from error.__cause__
    shard_of: Any = found.get(_MAP)
    if not isinstance(shard_of, dict) or not shard_of:
        raise FormatError("the index has no weight_map", file=file.path)
    for tensor, name in shard_of.items():
        if (
            not isinstance(name, str)
            or os.path.basename(name) != name
            or name in ("", ".", "..")
            or not name.isprintable()
        ):
            raise FormatError(
                "a shard's name is not that of a file beside the index",
                file=file.path,
                path=repr(tensor[:200]),
                found=repr(name)[:200],
            )
    return shard_of


def _shard(file: File) -> Listed:
    from ckpttool.formats.torch_pickle import embedded

    try:
        if safetensors.claims(Probe(file.path)) is not None:
            return safetensors.listed(file)
        return embedded.listed(file, 0, file.size)
    except CkpttoolError as error:
        raise error.located(file=file.path) from error.__cause__


class _Joined:
    """The shards' tensors as one tree, in the order of the index."""

    def __init__(self, index: File, shard_of: Mapping[str, str], shards: Mapping[str, Listed]) -> None:
        self.index = index
        self.shard_of = shard_of
        self.shards = shards
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.aliases: dict[Path, tuple[Alias, ...]] = {}

    def tree(self) -> tuple[Tree, tuple[str, ...]]:
        """Return the tree and what a person should know of it."""
        paths = {shard: _paths(listed.tree) for shard, listed in self.shards.items()}
        for name, shard in self.shard_of.items():
            if shard not in self.shards:
                self.leaves[key(name),] = Leaf("unknown", (), self._missing(shard), name)
            elif name not in paths[shard]:
                raise FormatError(
                    f"shard {shard!r} lacks a tensor", file=self.index.path, path=repr(name[:200])
                )
            else:
                self._add(paths[shard][name], self.shards[shard].tree)
        notes = self._unlisted(paths)
        return Tree(self.leaves, self.aliases, {(): Container("dict")}), notes

    def _missing(self, shard: str) -> MissingShard:
        return MissingShard(os.path.join(os.path.dirname(self.index.path), shard))

    def _add(self, path: Path, tree: Tree) -> None:
        """Add a tensor and, with it, all its other names in the same shard."""
        if path in self.leaves:
            return
        self.leaves[path] = tree[path]
        if path in tree.aliases:
            self.aliases[path] = tree.aliases[path]

    def _unlisted(self, paths: Mapping[str, Mapping[str, Path]]) -> tuple[str, ...]:
        """Add what the shards hold and the index does not name; return notes of it."""
        added, twice = [], []
        for shard, names in paths.items():
            for name, path in names.items():
                if self.shard_of.get(name) == shard:
                    continue
                if name in self.shard_of or path in self.leaves:
                    twice.append(name)
                else:
                    added.append(name)
                    self._add(path, self.shards[shard].tree)
        notes = [f"tensors that the index does not name: {some(added, 3)}"] if added else []
        if twice:
            notes.append(f"tensors that a second shard holds too, not read from it: {some(twice, 3)}")
        return tuple(notes)


def _paths(tree: Tree) -> dict[str, Path]:
    """Return the path of every tensor by each native name that it has."""
    found = {alias.key: path for path, others in tree.aliases.items() for alias in others if alias.key}
    return found | {leaf.key: path for path, leaf in tree.tensors()}
