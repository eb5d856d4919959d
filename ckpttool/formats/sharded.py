"""Hugging Face checkpoints of several files: shards with an index, and states of a training."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import IO, Any

from ckpttool.core import deferred, filesystem, limits
from ckpttool.core import text as documents
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.code_references import merge_references, relocate_references
from ckpttool.core.errors import CkpttoolError, FormatError, UsageError, abbreviate_list, locate_errors
from ckpttool.core.source import File, MissingShard
from ckpttool.core.tree import Alias, Container, Leaf, Path, Tree, ValueLeaf, key
from ckpttool.formats import embedded_tree, safetensors
from ckpttool.formats.file_listing import FileListing, is_file_name, join_checkpoints
from ckpttool.formats.probe import (
    SHARD_BYTES,
    OutputFile,
    Probe,
    Shard,
    ShardPlan,
    shard_pieces,
    split_by_size,
)
from ckpttool.formats.safetensors import (
    FORMAT,
    LENGTH,
    PT,
    SUFFIX,
    FileLayout,
    assign_tensor_names,
    embedded_record,
    tied_names,
)

NAME = "sharded"
TITLE = "Hugging Face sharded checkpoint (index.json)"
WRITES = True
FRAMEWORK = "torch"

_INDEX = ".index.json"
_MAP, _METADATA, _SIZE = "weight_map", "metadata", "total_size"
# WEIGHTS_NAME and SAFE_WEIGHTS_NAME (transformers/utils/__init__.py); if both exist, transformers loads the
# first.
_SAFE, _WEIGHTS = "model.safetensors", "pytorch_model.bin"
# Files that accelerate's `save_state` (.bin) and transformers' `Trainer` (.pt) write next to the weights.
# Additional models, optimizers and schedulers of accelerate are numbered: model_1.safetensors,
# optimizer_1.bin.
_MODELS = deferred.compile(r"model(?:_[1-9]\d*)?\.safetensors|pytorch_model(?:_[1-9]\d*)?\.bin")
_OPTIMIZERS = deferred.compile(r"(optimizer(?:_[1-9]\d*)?)\.(?:bin|pt)")
_SCHEDULERS = deferred.compile(r"(scheduler(?:_[1-9]\d*)?)\.(?:bin|pt)")
_LEFT = deferred.compile(
    r"(?:sampler|custom_checkpoint|random_states|rng_state|dl_state_dict).*\.(?:bin|pt|pkl|pth)"
    r"|training_args\.bin|scaler\.pt"
)
_TRAINER_STATE = "trainer_state.json"


def claims(probe: Probe) -> str | None:
    """Return the path of an index, of a folder with one, or of the only weights file in a folder.

    A folder with an optimizer next to the weights is read as one checkpoint.
    """
    if probe.kind == "file":
        return probe.path if _is_index(probe) else None
    if probe.kind != "folder" or not probe.names.isdisjoint(("saved_model.pb", "saved_model.pbtxt")):
        return None
    if _find_index(probe) is not None:
        return probe.path
    whole = [name for name in (_SAFE, _WEIGHTS) if _member_probe(probe, name).kind == "file"]
    if whole and _is_training(probe):
        return probe.path
    return os.path.join(probe.path, whole[0]) if whole else None


def _is_training(probe: Probe) -> bool:
    """Return whether a folder contains an optimizer or a second model next to its weights."""
    models = [name for name in probe.names if _MODELS.fullmatch(name)]
    optimizers = [name for name in probe.names if _OPTIMIZERS.fullmatch(name)]
    numbered = any("_1." in name for name in models)
    return (bool(optimizers) or numbered) and all(
        _member_probe(probe, name).kind == "file" for name in (*models, *optimizers)
    )


def _find_index(probe: Probe) -> str | None:
    """Return the only index in a folder; raise UsageError if several match."""
    names = sorted(n for n in probe.names if n.endswith(_INDEX) and _is_index(_member_probe(probe, n)))
    if len(names) > 1 and set(names) != {f"{_SAFE}{_INDEX}", f"{_WEIGHTS}{_INDEX}"}:
        raise UsageError(
            "the folder contains several sharded checkpoints",
            file=probe.path,
            found=abbreviate_list(names, 5),
            hint=f"point to one of them, e.g. {os.path.join(probe.path, names[0])}",
        )
    return os.path.join(probe.path, names[0]) if names else None


def _member_probe(probe: Probe, name: str) -> Probe:
    return Probe(os.path.join(probe.path, name)) if name in probe.names else Probe("")


def _is_index(probe: Probe) -> bool:
    return probe.kind == "file" and probe.name.endswith(_INDEX) and probe.head.lstrip().startswith(b"{")


def read(location: str) -> Checkpoint:
    """List the tensors of all shards; those of a missing shard are listed without type and shape.

    The checkpoint of a folder with a single file is the listing by that file's own format. Raise FormatError
    if the index and the shards do not match. Sources: github.com/huggingface/transformers,
    src/transformers/modeling_utils.py (`save_pretrained`), utils/__init__.py (the file names) and trainer.py
    (`_save_checkpoint`); github.com/huggingface/ huggingface_hub, src/huggingface_hub/serialization/_base.py
    (`StateDictSplit`) and _torch.py; github.com/huggingface/accelerate, src/accelerate/checkpointing.py
    (`save_accelerator_state`).
    """
    probe = Probe(location)
    if probe.kind == "folder" and _is_training(probe):
        return _list_training(probe)
    path = _find_index(probe) if probe.kind == "folder" else location
    if path is None or not path.endswith(_INDEX):
        if location.endswith(SUFFIX):
            return safetensors.read(location)
        # Not a top-level import: listing a safetensors file does not need the PyTorch reader.
        from ckpttool.formats import torch_zip

        return torch_zip.read(location)
    file = File.stamp(path)
    shard_of, record = _read_index(file)
    folder = os.path.dirname(path)
    shards, missing = {}, []
    for name in sorted(set(shard_of.values())):
        shard = os.path.join(folder, name)
        if filesystem.lexists(shard):
            shards[name] = _stamp_shard(shard, path)
        else:
            missing.append(name)
    listed = {name: _list_shard(shard) for name, shard in shards.items()}
    tree, notes = _merge_shards(file, shard_of, listed)
    if missing:
        notes = (*notes, f"missing shards: {abbreviate_list(missing, 5)}")
    elif record is not None:
        try:
            tree = embedded_tree.decode_tree(record.encode(), {leaf.key: leaf for _, leaf in tree.tensors()})
        except embedded_tree.EmbeddedTreeError as error:
            notes = (*notes, f"ignoring the tree that ckpttool embedded: {error.message}")
    recorded = bool(listed) and all(one.integrity == "crc32" for one in listed.values())
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=(file, *shards.values()),
        writer=next((one.writer for one in listed.values()), None),
        integrity="crc32" if recorded else "none",
        notes=(
            *notes,
            *_note_other_form(path),
            *dict.fromkeys(n for one in listed.values() for n in one.notes),
        ),
        code_references=merge_references(
            *(relocate_references(one.code_references, name) for name, one in listed.items())
        ),
    )


def _list_training(probe: Probe) -> Checkpoint:
    """List a folder of accelerate or of transformers' Trainer: models, optimizers and schedulers.

    Errors from a model or optimizer file are raised. A note names the files that are not read.
    """
    from ckpttool.formats.detect import open_checkpoint

    parts: dict[str, Checkpoint] = {}
    left = sorted(name for name in probe.names if _LEFT.fullmatch(name))
    for member, path in _members(probe).items():
        try:
            parts[member] = open_checkpoint(path)
        except CkpttoolError:
            if not member.startswith("scheduler"):
                raise
            left.append(os.path.basename(path))
    names = ", ".join(os.path.basename(one.path) for one in parts.values())
    notes = [f"the folder is read as one checkpoint: {names}"]
    settings: dict[str, Tree] = {}
    state = _trainer_state(probe)
    if state:
        settings["trainer_state"] = Tree({(key(name),): ValueLeaf(value) for name, value in state.items()})
    elif _TRAINER_STATE in probe.names:
        left.append(_TRAINER_STATE)
    if left:
        notes.append(f"not read (random number states, run settings): {abbreviate_list(left, 5)}")
    joined = join_checkpoints(probe.path, NAME, parts, settings)
    return replace(joined, notes=(*notes, *joined.notes))


def _members(probe: Probe) -> dict[str, str]:
    """Return the files of a training folder by the names of their entries; models come first."""
    members: dict[str, str] = {}
    names = sorted(probe.names)
    index_ = _find_index(probe)
    if index_ is not None:
        members["model"] = index_
    safe = [name for name in names if _MODELS.fullmatch(name) and name.endswith(SUFFIX)]
    # If both forms exist, the libraries load safetensors.
    models = safe or [name for name in names if _MODELS.fullmatch(name)]
    for name in models:
        members.setdefault(name.partition(".")[0].removeprefix("pytorch_"), os.path.join(probe.path, name))
    for pattern in (_OPTIMIZERS, _SCHEDULERS):
        for name in names:
            match = pattern.fullmatch(name)
            if match is None or _member_probe(probe, name).kind != "file":
                continue
            if match[1] in members:
                raise UsageError(
                    f"the folder contains two {match[1]} files",
                    file=probe.path,
                    found=", ".join((os.path.basename(members[match[1]]), name)),
                    hint=f"point to the weights file, e.g. {members['model']}",
                )
            members[match[1]] = os.path.join(probe.path, name)
    return members


def _trainer_state(probe: Probe) -> dict[str, int | float | str | bool | None]:
    """Return the top-level plain values of a Trainer's state; none if the file cannot be read."""
    if _member_probe(probe, _TRAINER_STATE).kind != "file":
        return {}
    file = File.stamp(os.path.join(probe.path, _TRAINER_STATE))
    try:
        documents.require_small(file.size, "the trainer state", file=file.path)
        values = documents.parse_strict_json(file.read(0, file.size), "the trainer state")
    except CkpttoolError:
        return {}
    return {name: value for name, value in values.items() if isinstance(value, int | float | str | None)}


def _stamp_shard(shard: str, index: str) -> File:
    if Probe(shard).kind != "file":
        raise FormatError("a shard is not a file", file=shard)
    return File.beside(shard, index)


def _note_other_form(location: str) -> tuple[str, ...]:
    """Return a note if the folder contains the same weights in the other form too."""
    folder, name = os.path.split(location)
    other = f"{_WEIGHTS if name.startswith(_SAFE) else _SAFE}{_INDEX}"
    there = other != name and filesystem.lexists(os.path.join(folder, other))
    return (f"{other} in the same folder is not read",) if there else ()


def _read_index(file: File) -> tuple[dict[str, str], str | None]:
    """Return each tensor's shard, and the tree that ckpttool embedded.

    Raise FormatError if a shard is not a file in the index's folder.
    """
    if file.size > limits.current().json_bytes:
        raise limits.limit_error("json_bytes", "the index is too large", file.size, file=file.path)
    with locate_errors(file=file.path):
        document = documents.parse_strict_json(file.read(0, file.size), "the index")
    metadata = document.get(_METADATA)
    record = metadata.get(embedded_tree.KEY) if isinstance(metadata, dict) else None
    shard_of: Any = document.get(_MAP)
    if not isinstance(shard_of, dict) or not shard_of:
        raise FormatError("the index has no weight_map", file=file.path)
    for tensor, name in shard_of.items():
        if not is_file_name(name) or not name.isprintable():
            raise FormatError(
                "a shard must be a file in the same folder as the index",
                file=file.path,
                path=repr(tensor[:200]),
                found=repr(name)[:200],
            )
    return shard_of, record if isinstance(record, str) else None


def _list_shard(file: File) -> FileListing:
    from ckpttool.formats import torch_legacy

    with locate_errors(file=file.path):
        if safetensors.claims(Probe(file.path)) is not None:
            return safetensors.list_file(file)
        return torch_legacy.list_embedded(file, 0, file.size)


def _merge_shards(
    index: File, shard_of: Mapping[str, str], shards: Mapping[str, FileListing]
) -> tuple[Tree, tuple[str, ...]]:
    """Merge the shards' tensors into one tree, in the order of the index; return notes for the user too."""
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases: dict[Path, tuple[Alias, ...]] = {}

    def add(path: Path, tree: Tree) -> None:
        """Add a tensor together with all its other names in the same shard."""
        if path not in leaves:
            leaves[path] = tree[path]
            if path in tree.aliases:
                aliases[path] = tree.aliases[path]

    paths = {shard: _paths(listed.tree) for shard, listed in shards.items()}
    for name, shard in shard_of.items():
        if shard not in shards:
            missing = MissingShard(os.path.join(os.path.dirname(index.path), shard))
            leaves[key(name),] = Leaf("unknown", (), missing, name)
        elif name not in paths[shard]:
            what = f"a tensor is missing from shard {shard!r}"
            raise FormatError(what, file=index.path, path=repr(name[:200]))
        else:
            add(paths[shard][name], shards[shard].tree)
    added: list[str] = []
    twice: list[str] = []
    rows = ((shard, name, path) for shard, names in paths.items() for name, path in names.items())
    for shard, name, path in (row for row in rows if shard_of.get(row[1]) != row[0]):
        if name in shard_of or path in leaves:
            twice.append(name)
        else:
            added.append(name)
            add(path, shards[shard].tree)
    notes = {"not listed in the index": added, "also present in a second shard, not read from it": twice}
    sentences = (f"tensors {what}: {abbreviate_list(names, 3)}" for what, names in notes.items() if names)
    return Tree(leaves, aliases, {(): Container("dict")}), tuple(sentences)


def _paths(tree: Tree) -> dict[str, Path]:
    """Return the path of every tensor by each of its native names."""
    paths = {alias.key: path for path, others in tree.aliases.items() for alias in others if alias.key}
    return paths | {leaf.key: path for path, leaf in tree.tensors()}


def plan_shards(tree: Tree, *, stem: str = "model", shard_bytes: int = SHARD_BYTES) -> ShardPlan:
    """Return the shards `STEM-00001-of-0000N.safetensors` and the index `STEM.safetensors.index.json`.

    `stem` is the common beginning of the files' names, `shard_bytes` the size of a shard's tensors. Raise
    UnsupportedError, before anything is written, for a tensor type that the format lacks. Sources:
    huggingface_hub, src/huggingface_hub/serialization/_torch.py (`save_torch_state_dict`) and _base.py (the
    shards' names).
    """
    names = assign_tensor_names(tree)
    parts = split_by_size(((path, leaf.nbytes) for path, leaf in tree.tensors()), shard_bytes)
    files = [f"-{number:05d}-of-{len(parts):05d}" for number in range(1, len(parts) + 1)]
    shards = []
    for end, part in zip(files, parts, strict=True):
        tied = {FORMAT: PT, **tied_names(tree, names, frozenset(part))}
        layout = FileLayout.plan(tree, names, part, tied)
        shards.append(Shard(end + SUFFIX, tuple(part), layout.write, f"{end}{_INTERIM}{SUFFIX}"))
    tied = {FORMAT: PT, **tied_names(tree, names, tree)}
    record = embedded_record(tree, names, tied)
    total = sum(leaf.nbytes for _, leaf in tree.tensors())
    metadata: dict[str, Any] = {_SIZE: total, **({} if record is None else {embedded_tree.KEY: record})}

    def index(interim: str) -> OutputFile:
        shard_of = {
            path: f"{stem}{end}{interim}{SUFFIX}"
            for end, part in zip(files, parts, strict=True)
            for path in part
        }
        document = {_METADATA: metadata, _MAP: {names[path]: shard_of[path] for path, _ in tree.tensors()}}
        text = json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
        put = partial(_put, text)
        if not interim:
            return OutputFile(_INDEX_SUFFIX, put, indexes=True)
        return OutputFile(_INDEX_SUFFIX, put, meanwhile=_INDEX_SUFFIX, extra=True)

    return ShardPlan(tuple(shards), _INDEX_SUFFIX, lambda _: (index(_INTERIM), index("")), _read_shard)


_INDEX_SUFFIX = SUFFIX + _INDEX
# In the names of shards that replace others of the same names, until these are removed.
_INTERIM = ".new"


def _put(data: bytes, stream: IO[bytes]) -> None:
    stream.write(data)


def _read_shard(file: File, shard: Shard, _: Any) -> Mapping[Path, Leaf]:
    """Return the tensors of a written shard; raise FormatError if its header is not the planned one."""
    layout: FileLayout = shard.write.__self__  # type: ignore[attr-defined]
    if file.read(LENGTH, len(layout.head)) != layout.head:
        raise FormatError("the header of a shard differs from the one that was written", file=file.path)
    by_name = dict(_list_shard(file).tree.tensors())
    return dict(zip(layout.order, (by_name[key(name),] for name in layout.names), strict=True))


def pieces(tree: Tree, **options: Any) -> tuple[OutputFile, ...]:
    """Return the shards and the index of a tree."""
    return shard_pieces(tree, plan_shards(tree, **options))
