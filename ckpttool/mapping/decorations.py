"""What wrappers of torch modules put into the names of a state_dict, and the way to plain names and back.

Each wrapper holds the module that it wraps under one attribute, which every name below it then carries.
Sources: torch/nn/parallel/distributed.py and data_parallel.py, torch/optim/swa_utils.py (AveragedModel),
torch/_dynamo/eval_frame.py (OptimizedModule), torch/distributed/fsdp/_common_utils.py,
torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, lightning/fabric/wrappers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ckpttool.errors import UsageError
from ckpttool.leaf import Key, Leaf, Path, ValueLeaf, key, typed
from ckpttool.mapping import module_names
from ckpttool.mapping.module_names import Wrapped
from ckpttool.tree import Alias, Container, Tree

WRAPPERS: Mapping[str, str] = {
    "module": "DataParallel, DistributedDataParallel or AveragedModel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FSDP before torch 1.13",
    "_forward_module": "Lightning Fabric",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
# lightning/pytorch/trainer/connectors/checkpoint_connector.py, dump_checkpoint; its `state_dict` is that of
# the LightningModule, which by habit holds the network under one of these attributes.
_LIGHTNING = "pytorch-lightning_version"
_ATTRIBUTES = frozenset(("model", "net"))
_WORD = re.compile(r"(?:^|\.)(?:" + "|".join(WRAPPERS) + r")\.")

Moves = Mapping[Path, Path]


class Decoration(NamedTuple):
    """What the names of one dict carry: `where` it stands in the tree of plain names, and its wrappers.

    `metadata` are the wrappers' own entries of the dict's `_metadata`, by their full names.
    """

    where: Path
    wrapped: tuple[Wrapped, ...]
    metadata: Mapping[str, object]


class Stripped(NamedTuple):
    """A tree of plain names, each new path's old one, and what was removed where."""

    tree: Tree
    moves: Moves
    decorations: tuple[Decoration, ...]


def decorated(tree: Tree) -> tuple[Decoration, ...]:
    """Return what each dict's names carry; nothing is removed."""
    found = stripped(tree)
    return found.decorations if found is not None else ()


def undecorated(tree: Tree) -> tuple[Tree, Moves] | None:
    """Return the tree with plain names, and for each new path the old one; None when nothing is decorated."""
    found = stripped(tree)
    return None if found is None else (found.tree, found.moves)


def lightnings(tree: Tree, part: str) -> bool:
    """Say whether the part, a path as people read it, is the state_dict of a LightningModule."""
    return part.strip("/") == "state_dict" and (key(_LIGHTNING),) in tree


def stripped(tree: Tree, *, lightning: bool = False) -> Stripped | None:
    """Return the tree without what wrappers put into its names; None when there is nothing to remove.

    A prefix is removed, in any nesting, where all names of a dict, or of a module in it, have it. `lightning`
    says that the tree is a LightningModule's state_dict, which nothing in it tells any more.
    """
    plain: dict[Path, module_names.Plain] = {}
    for top, names in _dicts(tree).items():
        attributes = _ATTRIBUTES if lightning and not top else _attributes(tree, top)
        if not attributes and not any(map(_WORD.search, names)):
            continue
        found = module_names.plain(names, WRAPPERS.keys(), attributes)
        if found is not None:
            plain[top] = found
    if not plain:
        return None
    names_of = _Names.of({top: found.names for top, found in plain.items()})
    new, moves = _renamed(tree, names_of)
    containers = dict(new.containers)
    decorations = []
    for top, found in plain.items():
        where = _moved(top, names_of)
        metadata: Mapping[str, object] = {}
        if (container := containers.get(where)) is not None and (kept := _metadata(container)) is not None:
            told, metadata = module_names.without(kept, found.wrapped)
            containers[where] = _with_metadata(container, told)
        decorations.append(Decoration(where, found.wrapped, metadata))
    return Stripped(replace(new, containers=containers), moves, tuple(decorations))


def restored(tree: Tree, decorations: tuple[Decoration, ...]) -> tuple[Tree, Moves]:
    """Return the tree with the names that `stripped` took away, and for each new path the old one."""
    by_place = {each.where: each for each in decorations}
    found = {
        top: {name: module_names.decorated(name, by_place[top].wrapped) for name in names}
        for top, names in _dicts(tree, by_place).items()
    }
    if len(found) != len(by_place):
        raise UsageError("the sidecar tells of names that the checkpoint does not have")
    containers = dict(tree.containers)
    for where, each in by_place.items():
        if (container := containers.get(where)) is not None and (kept := _metadata(container)) is not None:
            told = module_names.within(kept, each.wrapped, each.metadata)
            containers[where] = _with_metadata(container, told)
    new, moves = _renamed(replace(tree, containers=containers), _Names.of(found))
    if len(moves) != len(tree):
        raise UsageError("with the names that the sidecar tells two entries would have one place")
    return new, moves


def whose(segment: str) -> str:
    """Return which wrapper has its module under that attribute."""
    return WRAPPERS.get(segment, "an attribute of a LightningModule")


def documents(found: Iterable[Decoration]) -> tuple[Mapping[str, object], ...]:
    """Return the decorations as JSON objects, for a sidecar, without what JSON cannot hold of `_metadata`."""
    return tuple(
        {
            "where": typed(each.where),
            "wrapped": [
                {"at": ".".join(w.at), "segments": ".".join(w.segments), "averaged": w.averaged}
                for w in each.wrapped
            ],
            "metadata": {name: said for name, said in each.metadata.items() if _is_json(said)},
        }
        for each in found
    )


def remembered(documents: Iterable[Mapping[str, Any]]) -> tuple[Decoration, ...]:
    """Return the decorations of JSON objects that `documents` made; raise UsageError for others."""
    try:
        return tuple(
            Decoration(
                tuple(_step(**step) for step in each["where"]),
                tuple(_wrapped(**w) for w in each["wrapped"]),
                dict(each["metadata"]),
            )
            for each in documents
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError("what the sidecar says of removed names makes no sense") from error


def _step(key: str | None = None, index: int | None = None) -> Key:
    if isinstance(key, str) == isinstance(index, int):
        raise TypeError
    return Key("key", key) if isinstance(key, str) else Key("index", index)


def _wrapped(at: str, segments: str, averaged: int | None) -> Wrapped:
    return Wrapped(tuple(at.split(".")) if at else (), tuple(segments.split(".")), averaged)


def _is_json(said: object) -> bool:
    # Of a module's version nothing but numbers and texts is written (torch/nn/modules/module.py).
    return isinstance(said, dict) and all(
        isinstance(name, str) and isinstance(value, str | int | None) for name, value in said.items()
    )


def _dicts(tree: Tree, wanted: Mapping[Path, object] | None = None) -> dict[Path, list[str]]:
    """Return the names in every dict that holds tensors by name, or in those wanted."""
    tops = set(wanted) if wanted is not None else set(_with_tensors(tree))
    found: dict[Path, dict[str, None]] = {}
    depths = sorted({len(top) for top in tops})
    for path in _every_path(tree) if tops else ():
        for depth in depths:
            if depth < len(path) and path[:depth] in tops:
                # A name that is no text makes a dict that is no state_dict.
                step = path[depth]
                name = step.value if step.kind == "key" and isinstance(step.value, str) else ""
                found.setdefault(path[:depth], {})[name] = None
    return {top: list(names) for top, names in found.items() if "" not in names}


def _with_tensors(tree: Tree) -> Iterator[Path]:
    for path, leaf in tree.tensors():
        for depth, step in enumerate(path):
            # Last comes a parameter's name; before it, of distributed optimizers, the name of a slot's owner.
            last = depth == len(path) - 1 or (leaf.slot is not None and depth == len(path) - 2)
            if last and isinstance(step.value, str) and step.kind == "key" and "." in step.value:
                yield path[:depth]


def _every_path(tree: Tree) -> Iterator[Path]:
    yield from tree
    for others in tree.aliases.values():
        yield from (alias.path for alias in others)


def _attributes(tree: Tree, top: Path) -> frozenset[str]:
    """Return which attributes of a module of one's own count as wrappers too: those of Lightning's habit."""
    whole = bool(top) and top[-1].value == "state_dict" and (*top[:-1], key(_LIGHTNING)) in tree
    return _ATTRIBUTES if whole else frozenset()


class _Names(NamedTuple):
    """New names by old ones in some dicts, and how deep these stand: most paths are nowhere near them."""

    by_dict: Mapping[Path, Mapping[str, str]]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, by_dict: Mapping[Path, Mapping[str, str]]) -> _Names:
        """Note the depths."""
        return cls(by_dict, tuple(sorted({len(top) for top in by_dict})))


def _renamed(tree: Tree, names_of: _Names) -> tuple[Tree, Moves]:
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    moves: dict[Path, Path] = {}
    for path, leaf in tree.items():
        new = _moved(path, names_of)
        if isinstance(leaf, Leaf) and leaf.of is not None:
            leaf = replace(leaf, of=_moved(leaf.of, names_of))
        leaves[new], moves[new] = leaf, path
    aliases = {
        _moved(path, names_of): tuple(Alias(_moved(a.path, names_of), a.key) for a in others)
        for path, others in tree.aliases.items()
    }
    containers = {_moved(path, names_of): container for path, container in tree.containers.items()}
    return Tree(leaves, aliases, containers), moves


def _moved(path: Path, names_of: _Names) -> Path:
    new = list(path)
    for depth in names_of.depths:
        if depth < len(path) and (names := names_of.by_dict.get(path[:depth])) is not None:
            new[depth] = key(names[str(path[depth].value)])
    return tuple(new)


def _metadata(container: Container) -> Mapping[str, object] | None:
    # torch/nn/modules/module.py, state_dict: versions by module, as an attribute of the OrderedDict.
    kept = container.state.get("_metadata") if isinstance(container.state, dict) else None
    return kept if isinstance(kept, dict) and all(isinstance(name, str) for name in kept) else None


def _with_metadata(container: Container, told: Mapping[str, object]) -> Container:
    state = container.state
    if not isinstance(state, dict):
        return container
    kind = type(state["_metadata"])
    return container._replace(state={**state, "_metadata": kind(told)})
