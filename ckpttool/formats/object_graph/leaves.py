"""The join of an object graph with the keys of a bundle: one name, role and owner for every tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpttool import limits
from ckpttool.errors import some
from ckpttool.formats import object_graph
from ckpttool.formats.object_graph import Graph
from ckpttool.formats.object_graph import aliases as graph_aliases
from ckpttool.formats.object_graph import names as graph_names
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
    aliases: dict[Path, list[Alias]]
    used: dict[str, Path]
    absent: list[tuple[int, Path, object_graph.Attribute]]
    crowded: Counter[Path]


def by_graph(data: bytes, tensors: Mapping[str, Tensor]) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree of a bundle whose object graph is `data`, and what a person should know about it."""
    graph = object_graph.parse(data)
    chosen = graph_paths.canonical(graph)
    valued = {number for number, node in enumerate(graph) if node.attributes}
    aliases = graph_aliases.find(graph, chosen, valued)
    roles = graph_roles.from_optimizers(graph)
    named = graph_names.of_lists(graph, chosen)
    others = aliases.paths | {
        number: (chosen.paths[number], *aliases.paths.get(number, ())) for number in named
    }
    naming = _Naming(graph, chosen.paths | named, others, roles, tensors, {}, {}, {}, [], Counter())
    for number, path in naming.canonical.items():
        if number in valued:
            _add(naming, number, path)
    _add_slots(naming)
    absent = _add_prefixed(naming)
    loose = _add_loose(naming)
    _own_slots(naming)
    savers = sorted({node.saver for node in graph if node.saver})
    tree = Tree(naming.leaves, {path: tuple(others) for path, others in naming.aliases.items()})
    return tree, tuple(_notes(savers, loose, absent, chosen, aliases))


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
    following = list(range(len(keys) + 1))  # where the next key is that nobody has taken
    absent, seen = [], set()
    for number, path, attribute in naming.absent:
        prefix, found = attribute.key, False
        if prefix and prefix not in seen and attribute.name != object_graph.VALUE:
            seen.add(prefix)
            at = _free(following, bisect_left(keys, prefix))
            while at < len(keys) and keys[at].startswith(prefix):
                found = True
                own = path + object_graph.attribute_path(attribute.name, keys[at][len(prefix) :])
                _put(naming, number, own, keys[at], attribute.full_name, (), role="other")
                following[at] = at + 1
                at = _free(following, at)
        if not found:
            absent.append(prefix)
    return absent


def _free(following: list[int], at: int) -> int:
    while following[at] != at:
        following[at] = following[following[at]]
        at = following[at]
    return at


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
        naming.aliases.setdefault(first, []).extend((Alias(path), *map(Alias, others)))
        return
    path = _unused(naming, path)
    naming.leaves[path] = _leaf(naming, number, path, key, full_name, role)
    naming.used[key] = path
    if others:
        naming.aliases[path] = [*map(Alias, others)]


def _unused(naming: _Naming, path: Path) -> Path:
    # Two values of one object by one name, or a value whose name is an edge: only strange files have them.
    if path not in naming.leaves:
        return path
    path = (*path, Key("attr", ".ATTRIBUTES"))
    while path in naming.leaves:
        naming.crowded[path] += 1
        path = (*path, Key("index", naming.crowded[path]))
    return path


def _leaf(naming: _Naming, number: int, path: Path, key: str, full_name: str, role: Role | None) -> Leaf:
    dtype, shape, source = naming.tensors[key]
    trainable = of = kind = None
    slot = naming.roles.slots.get(number)
    if slot is not None:
        role, kind = "slot", slot.kind or None
        of = naming.canonical.get(slot.of) if slot.of is not None else None
    elif number in naming.roles.trained:
        role, trainable = "parameter", True
    elif number in naming.roles.statistics:
        role = "buffer"
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
        path = _unused(naming, object_graph.path_of_key(key))
        tensor = naming.tensors[key]
        role = role_by_name(path, "", tensor.dtype, tensor.shape)
        naming.leaves[path] = Leaf(tensor.dtype, tensor.shape, tensor.source, key, role)
        naming.used[key] = path
    return loose


def _notes(
    savers: list[str],
    loose: list[str],
    absent: list[str],
    chosen: graph_paths.Tree,
    aliases: graph_aliases.Aliases,
) -> Iterator[str]:
    if savers:
        named = some(savers, SHOWN)
        yield f"some objects were saved by a registered saver ({named}) under keys of its own choice"
    if loose:
        yield f"{some(loose, SHOWN)}: named by no object of the graph, listed by key"
    if absent:
        yield f"{some(absent, SHOWN)}: named by the object graph, not in the index"
    if chosen.deep:
        most = limits.current().graph_depth
        yield f"what lies more than {most} edges deep in the object graph is listed by key"
    if aliases.capped or not aliases.complete:
        most = graph_aliases.MAX_ALIASES
        yield f"some variables have more paths than are listed (at most {most} besides the first)"
