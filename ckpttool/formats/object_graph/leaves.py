"""The join of an object graph with the keys of a bundle: one name, role and owner for every tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpttool.formats import object_graph
from ckpttool.formats.object_graph import Graph
from ckpttool.formats.object_graph import aliases as graph_aliases
from ckpttool.formats.object_graph import paths as graph_paths
from ckpttool.formats.object_graph import roles as graph_roles
from ckpttool.formats.variables import Tensor, role_by_name
from ckpttool.leaf import Key, Leaf, Path, Role
from ckpttool.tree import Alias, Tree

SHOWN = 3  # names in a note


@dataclass(slots=True)
class _Naming:
    """The tree while it is being made; `used` are the bundle keys that have a leaf, by path."""

    graph: Graph
    canonical: dict[int, Path]
    others: dict[int, tuple[Path, ...]]
    roles: graph_roles.Roles
    tensors: Mapping[str, Tensor]
    leaves: dict[Path, Leaf]
    aliases: dict[Path, tuple[Alias, ...]]
    used: dict[str, Path]
    absent: list[tuple[int, Path, object_graph.Attribute]]


def by_graph(data: bytes, tensors: Mapping[str, Tensor]) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree of a bundle whose object graph is `data`, and what a person should know about it."""
    graph = object_graph.parse(data)
    chosen = graph_paths.canonical(graph)
    valued = {number for number, node in enumerate(graph) if node.attributes}
    aliases = graph_aliases.find(graph, chosen, valued)
    roles = graph_roles.from_optimizers(graph)
    naming = _Naming(graph, chosen.paths, aliases.paths, roles, tensors, {}, {}, {}, [])
    for number, path in chosen.paths.items():
        if number in valued:
            _add(naming, number, path)
    _add_slots(naming)
    absent = _add_prefixed(naming)
    loose = _add_loose(naming)
    _own_slots(naming)
    return Tree(naming.leaves, naming.aliases), tuple(_notes(loose, absent, chosen, aliases))


def _add(naming: _Naming, number: int, path: Path) -> None:
    for attribute in naming.graph[number].attributes:
        if attribute.key not in naming.tensors:
            naming.absent.append((number, path, attribute))
            continue
        tail = object_graph.attribute_path(attribute.name)
        others = naming.others.get(number, ())
        if tail and others:
            others = tuple(alias + tail for alias in others)
        _put(naming, number, path + tail, attribute.key, attribute.full_name, others)


def _add_prefixed(naming: _Naming) -> list[str]:
    """Add what is stored under longer keys than the graph says; return the keys that nothing is stored under.

    Lookup tables and iterators save `KEY-keys`, `KEY-values` and `KEY_STATE`.
    """
    keys = sorted(naming.tensors.keys() - naming.used.keys())
    absent, seen = [], set()
    for number, path, attribute in naming.absent:
        prefix, found = attribute.key, False
        if prefix and prefix not in seen and attribute.name != object_graph.VALUE:
            seen.add(prefix)
            for key in keys[bisect_left(keys, prefix) :]:
                if not key.startswith(prefix):
                    break
                found = True
                own = path + object_graph.attribute_path(attribute.name, key[len(prefix) :])
                _put(naming, number, own, key, attribute.full_name, (), role="other")
        if not found:
            absent.append(prefix)
    return absent


def _put(
    naming: _Naming,
    number: int,
    path: Path,
    key: str,
    full_name: str,
    others: tuple[Path, ...],
    role: Role | None = None,
) -> None:
    if key in naming.used:
        # Two objects that share one entry are one tensor under two names.
        first = naming.used[key]
        naming.aliases[first] = (*naming.aliases.get(first, ()), Alias(path), *map(Alias, others))
        return
    if path in naming.leaves:
        path = (*path, Key("attr", ".ATTRIBUTES"))
    naming.leaves[path] = _leaf(naming, number, path, key, full_name, role)
    naming.used[key] = path
    if others:
        naming.aliases[path] = tuple(map(Alias, others))


def _leaf(naming: _Naming, number: int, path: Path, key: str, full_name: str, role: Role | None) -> Leaf:
    dtype, shape, source = naming.tensors[key]
    trainable = of = kind = None
    slot = naming.roles.slots.get(number)
    if slot is not None:
        role, kind = "slot", slot.kind or None
        of = naming.canonical.get(slot.of) if slot.of is not None else None
    elif number in naming.roles.trained:
        role, trainable = "parameter", True
    elif role is None:
        setting = number in naming.roles.settings
        role = role_by_name(path, full_name, dtype, shape, setting=setting)
    return Leaf(dtype, shape, source, key, role, of, kind, trainable, full_name or None)


def _add_slots(naming: _Naming) -> None:
    # Older optimizers hold their slots by no edge; the graph lists them beside the variable that they serve.
    canonical = naming.canonical
    for number, slot in naming.roles.slots.items():
        if number in canonical or slot.of not in canonical or slot.optimizer not in canonical:
            continue
        path = graph_roles.slot_path(canonical[slot.optimizer], slot.kind, canonical[slot.of])
        _add(naming, number, path)


def _own_slots(naming: _Naming) -> None:
    # An owner is known by its canonical path, which is not where its leaf is if two objects share an entry.
    for number, slot in naming.roles.slots.items():
        for attribute in naming.graph[number].attributes:
            path = naming.used.get(attribute.key)
            leaf = None if path is None else naming.leaves[path]
            if path is not None and leaf is not None and leaf.of not in naming.leaves:
                naming.leaves[path] = replace(leaf, of=_elsewhere(naming, slot.of))


def _elsewhere(naming: _Naming, number: int | None) -> Path | None:
    if number is None or not naming.graph[number].attributes:
        return None
    return naming.used.get(naming.graph[number].attributes[0].key)


def _add_loose(naming: _Naming) -> list[str]:
    loose = [key for key in naming.tensors if key not in naming.used]
    for key in loose:
        path = object_graph.path_of_key(key)
        while path in naming.leaves:
            path = (*path, Key("attr", ".ATTRIBUTES"))
        tensor = naming.tensors[key]
        role = role_by_name(path, "", tensor.dtype, tensor.shape)
        naming.leaves[path] = Leaf(tensor.dtype, tensor.shape, tensor.source, key, role)
        naming.used[key] = path
    return loose


def _notes(
    loose: list[str], absent: list[str], chosen: graph_paths.Tree, aliases: graph_aliases.Aliases
) -> Iterator[str]:
    if loose:
        yield f"{_some(loose)}: named by no object of the graph, listed by key"
    if absent:
        yield f"{_some(absent)}: named by the object graph, not in the index"
    if chosen.deep:
        yield f"what lies more than {graph_paths.MAX_DEPTH} edges deep in the object graph is listed by key"
    if aliases.capped or not aliases.complete:
        most = graph_aliases.MAX_ALIASES
        yield f"some variables have more paths than are listed (at most {most} besides the first)"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN:,} more"
