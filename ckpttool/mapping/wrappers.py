"""Wrapper prefixes, weight norm and parts without parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    PathStep,
    Tree,
    ValueLeaf,
    display,
    key,
    path_to_json,
)
from ckpttool.mapping.layer_kinds import Name

if TYPE_CHECKING:
    pass


# torch/optim/swa_utils.py, AveragedModel: its own buffer is a sibling of the wrapped module.
_AVERAGED = "n_averaged"
_DEEPEST = 100

# Names as a tree of segments; the empty segment marks the end of a name.
_Node = dict[str, "_Node"]


class WrapperPrefix(NamedTuple):
    """The wrappers around one module: `at` is its plain name, `segments` the prefix of names under it.

    `averaged` is the number of segments before AveragedModel's `n_averaged`, if it exists.
    """

    at: Name
    segments: Name
    averaged: int | None = None


class PlainNames(NamedTuple):
    """The plain form of every name, and its wrappers."""

    names: Mapping[str, str]
    wrapped: tuple[WrapperPrefix, ...]


def unwrap_names(
    names: Sequence[str], wrappers: Collection[str], first: Collection[str] = ()
) -> PlainNames | None:
    """Return the plain form of each name; None if no wrapper encloses all names of a module.

    `first` are further segments that count as wrappers around the whole.
    """
    root: _Node = {}
    for name in names:
        node = root
        segments = name.split(".")
        if len(segments) > _DEEPEST or "" in segments:
            return None
        for segment in segments:
            node = node.setdefault(segment, {})
        node[""] = {}
    wrapped: list[WrapperPrefix] = []
    plain_names = dict(_iter_plain_names(root, (), (), wrappers, first, wrapped))
    if not wrapped or len(set(plain_names.values())) != len(plain_names):
        return None
    return PlainNames({".".join(old): ".".join(new) for old, new in plain_names.items()}, tuple(wrapped))


def _iter_plain_names(
    node: _Node,
    old: Name,
    new: Name,
    wrappers: Collection[str],
    first: Collection[str],
    wrapped: list[WrapperPrefix],
) -> Iterator[tuple[Name, Name]]:
    """Yield old and plain names under a node, recording the wrappers that are removed."""
    segments: list[str] = []
    averaged: int | None = None
    while (wrapper := _common_wrapper(node, wrappers if new else {*wrappers, *first})) is not None:
        if _AVERAGED in node:
            if averaged is not None or _AVERAGED in node[wrapper]:
                break
            averaged = len(segments)
            yield (*old, _AVERAGED), (*new, _AVERAGED)
        segments.append(wrapper)
        old, node = (*old, wrapper), node[wrapper]
    if segments:
        wrapped.append(WrapperPrefix(new, tuple(segments), averaged))
    for segment, below in node.items():
        if not segment:
            yield old, new
        else:
            yield from _iter_plain_names(below, (*old, segment), (*new, segment), wrappers, first, wrapped)


def _common_wrapper(node: _Node, wrappers: Collection[str]) -> str | None:
    """Return the wrapper around everything under the node; `n_averaged` may be a sibling of `module`."""
    inner = [segment for segment in node if segment != _AVERAGED or node[segment].keys() != {""}]
    if len(inner) != 1 or inner[0] not in wrappers or "" in node[inner[0]]:
        return None
    return inner[0] if len(node) == 1 or inner[0] == "module" else None


def wrap_name(name: str, wrapped: Sequence[WrapperPrefix]) -> str:
    """Return the original form of the plain name."""
    places = {wrapper.at: wrapper for wrapper in wrapped}
    segments = tuple(name.split("."))
    out: list[str] = []
    for depth, segment in enumerate(segments):
        if (wrapper := places.get(segments[:depth])) is not None:
            mine = segment == _AVERAGED and depth == len(segments) - 1
            out += wrapper.segments[: wrapper.averaged] if mine else wrapper.segments
        out.append(segment)
    return ".".join(out)


def unwrap_metadata(
    metadata: Mapping[str, object], wrapped: Sequence[WrapperPrefix]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return `_metadata` (by module) under plain names, and the wrappers' own entries separately."""
    places = {_wrapper_name(wrapper.at, wrapped): wrapper for wrapper in wrapped}
    kept: dict[str, object] = {}
    apart: dict[str, object] = {}
    for name, value in metadata.items():
        plain_name = _plain_module(tuple(name.split(".")) if name else (), places)
        if plain_name is None or plain_name in kept:
            apart[name] = value
        else:
            kept[plain_name] = value
    return kept, apart


def wrap_metadata(
    metadata: Mapping[str, object], wrapped: Sequence[WrapperPrefix], apart: Mapping[str, object]
) -> dict[str, object]:
    """Return the original `_metadata`: each wrapper's entry before those of the modules in it."""
    wrapped_metadata: dict[str, object] = {}
    for name, value in metadata.items():
        segments = tuple(name.split(".")) if name else ()
        full = _wrapped_module_name(segments, wrapped)
        for depth in range(len(full)):
            outer = ".".join(full[:depth])
            if outer in apart:
                wrapped_metadata.setdefault(outer, apart[outer])
        wrapped_metadata[".".join(full)] = value
    return wrapped_metadata | {name: value for name, value in apart.items() if name not in wrapped_metadata}


def _wrapper_name(at: Name, wrapped: Sequence[WrapperPrefix]) -> Name:
    """Return the full name of the outermost wrapper around the module with that plain name."""
    return tuple(wrap_name(".".join(at), wrapped).split(".")) if at else ()


def _wrapped_module_name(module: Name, wrapped: Sequence[WrapperPrefix]) -> Name:
    """Return the full name of the module itself, inside its wrappers."""
    own = next((wrapper.segments for wrapper in wrapped if wrapper.at == module), ())
    return (*_wrapper_name(module, wrapped), *own)


def _plain_module(full: Name, places: Mapping[Name, WrapperPrefix]) -> str | None:
    """Return a module's plain name; None for a wrapper."""
    out: list[str] = []
    at = 0
    while True:
        wrapper = places.get(full[:at])
        if wrapper is not None:
            if full[at : at + len(wrapper.segments)] != wrapper.segments:
                return None
            at += len(wrapper.segments)
        if at == len(full):
            return ".".join(out)
        out.append(full[at])
        at += 1


WRAPPERS: Mapping[str, str] = {
    "module": "DataParallel, DistributedDataParallel or AveragedModel",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_fpw_module": "FSDP before torch 1.13",
    "_forward_module": "Lightning Fabric",
    "_checkpoint_wrapped_module": "activation checkpointing",
}
# lightning/pytorch/trainer/connectors/checkpoint_connector.py, dump_checkpoint; its `state_dict` is that of
# the LightningModule, which by convention stores the network in one of these attributes.
_LIGHTNING = "pytorch-lightning_version"
_ATTRIBUTES = frozenset(("model", "net"))
_WORD = deferred.compile(r"(?:^|\.)(?:" + "|".join(WRAPPERS) + r")\.")

Moves = Mapping[Path, Path]


class DictPrefixes(NamedTuple):
    """Prefixes in one dict: `where` is its path in the tree of plain names.

    `metadata` are the wrappers' own entries of the dict's `_metadata`, by their full names.
    """

    where: Path
    wrapped: tuple[WrapperPrefix, ...]
    metadata: Mapping[str, object]


class StripResult(NamedTuple):
    """A tree of plain names, each new path's old one, and the removed prefixes by place."""

    tree: Tree
    moves: Moves
    decorations: tuple[DictPrefixes, ...]


def find_prefixes(tree: Tree) -> tuple[DictPrefixes, ...]:
    """Return the prefixes in each dict; nothing is removed.

    Each wrapper stores its module in one attribute, which becomes part of every name under it. Sources:
    torch/nn/parallel/distributed.py and data_parallel.py, torch/optim/swa_utils.py (AveragedModel),
    torch/_dynamo/eval_frame.py (OptimizedModule), torch/distributed/fsdp/_common_utils.py,
    torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py, lightning/fabric/wrappers.py.
    """
    stripped = strip_prefixes(tree)
    return stripped.decorations if stripped is not None else ()


def strip_to_plain_names(tree: Tree) -> tuple[Tree, Moves] | None:
    """Return the tree with plain names, and the old path of each new one; None without prefixes."""
    stripped = strip_prefixes(tree)
    return None if stripped is None else (stripped.tree, stripped.moves)


def is_lightning_state(tree: Tree, part: str) -> bool:
    """Return whether the part, a display path, is the state_dict of a LightningModule."""
    return part.strip("/") == "state_dict" and (key(_LIGHTNING),) in tree


def strip_prefixes(tree: Tree, *, lightning: bool = False) -> StripResult | None:
    """Return the tree without wrapper prefixes; None if there are none.

    A prefix is removed, in any nesting, if all names of a dict, or of a module in it, have it.
    `lightning` marks the tree as a LightningModule's state_dict, which its names do not show.
    """
    plain: dict[Path, PlainNames] = {}
    for top, names in _tensor_dicts(tree).items():
        attributes = _ATTRIBUTES if lightning and not top else _lightning_attributes(tree, top)
        if not attributes and not any(map(_WORD.search, names)):
            continue
        unwrapped_names = unwrap_names(names, WRAPPERS.keys(), attributes)
        if unwrapped_names is not None:
            plain[top] = unwrapped_names
    if not plain:
        return None
    names_of = _DictNames.of({top: unwrapped.names for top, unwrapped in plain.items()})
    new, moves = _rename_tree(tree, names_of)
    containers = dict(new.containers)
    decorations = []
    for top, unwrapped_names in plain.items():
        where = _rename_path(top, names_of)
        metadata: Mapping[str, object] = {}
        if (container := containers.get(where)) is not None and (
            kept := _state_metadata(container)
        ) is not None:
            unwrapped, metadata = unwrap_metadata(kept, unwrapped_names.wrapped)
            containers[where] = _with_metadata(container, unwrapped)
        decorations.append(DictPrefixes(where, unwrapped_names.wrapped, metadata))
    return StripResult(replace(new, containers=containers), moves, tuple(decorations))


def restore_prefixes(tree: Tree, decorations: tuple[DictPrefixes, ...]) -> tuple[Tree, Moves]:
    """Return the tree with the prefixes that `strip_prefixes` removed, and the old path of each new one."""
    by_place = {decoration.where: decoration for decoration in decorations}
    renamed = {
        top: {name: wrap_name(name, by_place[top].wrapped) for name in names}
        for top, names in _tensor_dicts(tree, by_place).items()
    }
    if len(renamed) != len(by_place):
        raise UsageError("the sidecar lists names that are not in the checkpoint")
    containers = dict(tree.containers)
    for where, prefixes in by_place.items():
        if (container := containers.get(where)) is not None and (
            kept := _state_metadata(container)
        ) is not None:
            wrapped = wrap_metadata(kept, prefixes.wrapped, prefixes.metadata)
            containers[where] = _with_metadata(container, wrapped)
    new, moves = _rename_tree(replace(tree, containers=containers), _DictNames.of(renamed))
    if len(moves) != len(tree):
        raise UsageError("with the names from the sidecar, two entries would have the same place")
    return new, moves


def wrapper_title(segment: str) -> str:
    """Return the wrapper that stores its module under that attribute."""
    return WRAPPERS.get(segment, "an attribute of a LightningModule")


def prefix_documents(prefixes: Iterable[DictPrefixes]) -> tuple[Mapping[str, object], ...]:
    """Return the prefixes as JSON objects for a sidecar, without parts of `_metadata` that are not JSON."""
    return tuple(
        {
            "where": path_to_json(prefixes.where),
            "wrapped": [
                {"at": ".".join(w.at), "segments": ".".join(w.segments), "averaged": w.averaged}
                for w in prefixes.wrapped
            ],
            "metadata": {name: value for name, value in prefixes.metadata.items() if _is_json(value)},
        }
        for prefixes in prefixes
    )


def parse_prefixes(documents: Iterable[Mapping[str, Any]]) -> tuple[DictPrefixes, ...]:
    """Return the prefixes in JSON objects made by `prefix_documents`; raise UsageError for other objects."""
    try:
        return tuple(
            DictPrefixes(
                tuple(_parse_key(**step) for step in document["where"]),
                tuple(_parse_prefix(**w) for w in document["wrapped"]),
                dict(document["metadata"]),
            )
            for document in documents
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError("invalid record of stripped names in the sidecar") from error


def _parse_key(key: str | None = None, index: int | None = None) -> PathStep:
    if isinstance(key, str) == isinstance(index, int):
        raise TypeError
    return PathStep("key", key) if isinstance(key, str) else PathStep("index", index)


def _parse_prefix(at: str, segments: str, averaged: int | None) -> WrapperPrefix:
    return WrapperPrefix(tuple(at.split(".")) if at else (), tuple(segments.split(".")), averaged)


def _is_json(candidate: object) -> bool:
    # From a module's version, only numbers and strings are written (torch/nn/modules/module.py).
    return isinstance(candidate, dict) and all(
        isinstance(name, str) and isinstance(value, str | int | None) for name, value in candidate.items()
    )


def _tensor_dicts(tree: Tree, selected: Mapping[Path, object] | None = None) -> dict[Path, list[str]]:
    """Return the names in every dict that contains tensors by name, or in the selected dicts."""
    tops = set(selected) if selected is not None else set(_with_tensors(tree))
    names_by_dict: dict[Path, dict[str, None]] = {}
    depths = sorted({len(top) for top in tops})
    for path in _every_path(tree) if tops else ():
        for depth in depths:
            if depth < len(path) and path[:depth] in tops:
                # A dict with a name that is not a string is not a state_dict.
                step = path[depth]
                name = step.value if step.kind == "key" and isinstance(step.value, str) else ""
                names_by_dict.setdefault(path[:depth], {})[name] = None
    return {top: list(names) for top, names in names_by_dict.items() if "" not in names}


def _with_tensors(tree: Tree) -> Iterator[Path]:
    for path, leaf in tree.tensors():
        # Last is a parameter's name; in distributed optimizers, the name of a slot's owner precedes it.
        start = max(0, len(path) - (1 if leaf.slot is None else 2))
        for depth, step in enumerate(path[start:], start):
            if step.kind == "key" and isinstance(step.value, str) and "." in step.value:
                yield path[:depth]


def _every_path(tree: Tree) -> Iterator[Path]:
    yield from tree
    for others in tree.aliases.values():
        yield from (alias.path for alias in others)


def _lightning_attributes(tree: Tree, top: Path) -> frozenset[str]:
    """Return the attributes of a user-defined module that also count as wrappers (Lightning's convention)."""
    whole = bool(top) and top[-1].value == "state_dict" and (*top[:-1], key(_LIGHTNING)) in tree
    return _ATTRIBUTES if whole else frozenset()


class _DictNames(NamedTuple):
    """New names by old ones in some dicts, and the depths of these: most paths are elsewhere."""

    by_dict: Mapping[Path, Mapping[str, str]]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, by_dict: Mapping[Path, Mapping[str, str]]) -> _DictNames:
        """Record the depths."""
        return cls(by_dict, tuple(sorted({len(top) for top in by_dict})))


def _rename_tree(tree: Tree, names_of: _DictNames) -> tuple[Tree, Moves]:
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    moves: dict[Path, Path] = {}
    for path, leaf in tree.items():
        new = _rename_path(path, names_of)
        if isinstance(leaf, Leaf) and leaf.of is not None:
            leaf = replace(leaf, of=_rename_path(leaf.of, names_of))
        leaves[new], moves[new] = leaf, path
    aliases = {
        _rename_path(path, names_of): tuple(Alias(_rename_path(a.path, names_of), a.key) for a in others)
        for path, others in tree.aliases.items()
    }
    containers = {_rename_path(path, names_of): container for path, container in tree.containers.items()}
    return Tree(leaves, aliases, containers), moves


def _rename_path(path: Path, names_of: _DictNames) -> Path:
    new = list(path)
    for depth in names_of.depths:
        if depth < len(path) and (names := names_of.by_dict.get(path[:depth])) is not None:
            # A container without entries has no new name.
            new[depth] = key(names.get(name := str(path[depth].value), name))
    return tuple(new)


def _state_metadata(container: Container) -> Mapping[str, object] | None:
    # torch/nn/modules/module.py, state_dict: versions by module, as an attribute of the OrderedDict.
    kept = container.state.get("_metadata") if isinstance(container.state, dict) else None
    return kept if isinstance(kept, dict) and all(isinstance(name, str) for name in kept) else None


def _with_metadata(container: Container, metadata: Mapping[str, object]) -> Container:
    state = container.state
    if not isinstance(state, dict):
        return container
    kind = type(state["_metadata"])
    return container._replace(state={**state, "_metadata": kind(metadata)})


_PLACES = 3


def describe_prefixes(result: tuple[DictPrefixes, ...]) -> Iterator[str]:
    """Yield each prefix with its places: `prefix module. in names under model`."""
    by_segments: dict[tuple[str, ...], list[str]] = {}
    for prefixes in result:
        for wrapped in prefixes.wrapped:
            location = "/".join((*([display(prefixes.where)] if prefixes.where else []), *wrapped.at))
            by_segments.setdefault(wrapped.segments, []).append(location)
    for segments, places in by_segments.items():
        below = f" under {abbreviate_list(places, _PLACES)}" if any(places) else ""
        owner = ", then ".join(dict.fromkeys(wrapper_title(segment) for segment in segments))
        yield f"prefix {'.'.join(segments)}. in names{below} ({owner})"
