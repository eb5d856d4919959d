"""From a tree with objects of classes that nobody builds to one of plain containers: a state_dict of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool import dtypes
from ckpttool.leaf import Leaf, Path, Record, ValueLeaf, key
from ckpttool.mapping.modules import About, about_class
from ckpttool.mapping.plan import Plan
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.tree import Container, Tree

# Records that are data: their items can be written again.
_SETS = ("builtins.set", "builtins.frozenset")


def to_state_dicts(tree: Tree) -> Plan | None:
    """Return the way to a tree without objects, None when there are none.

    Below an object its tensors get one key each, their native name from there on (`l1.weight`); plain values
    of an object, records, and tensors stored in parts have no move: they are reported as unused.
    """
    objects = frozenset(path for path, held in tree.containers.items() if _is_object(held))
    if not objects and all(_is_plain(leaf) for leaf in tree.values()):
        return None
    parts = frozenset(path for path in objects if _is_in_parts(tree.containers[path]))
    places = {
        path: None if _is_within(path, parts) else _place(path, leaf, objects) for path, leaf in tree.items()
    }
    moves = tuple(Move(path, place, KEEP) for path, place in places.items() if place is not None)
    lost = {path[:-1] for path, place in places.items() if place is None}
    containers = {
        path: held
        for path, held in tree.containers.items()
        # A list that loses an item keeps its numbers as keys.
        if not _is_within(path, objects) and not (held.kind in ("list", "tuple") and path in lost)
    }
    aliases = _aliases(tree, places, objects)
    return Plan(moves, containers=containers, aliases=aliases)


def described(tree: Tree) -> dict[Path, About]:
    """Return for each tensor of whole modules and TorchScript what the file says of its module.

    Settings are the object's plain values, a tuple of numbers (`stride`) as a list.
    """
    settings: dict[Path, dict[str, Any]] = {}
    for path, leaf in tree.plain():
        if len(path) > 1 and path[-1].kind == "index":
            found = settings.setdefault(path[:-2], {}).setdefault(str(path[-2].value), [])
            if isinstance(found, list):
                found.append(leaf.value)
        elif path:
            settings.setdefault(path[:-1], {})[str(path[-1].value)] = leaf.value
    made: dict[Path, About] = {}
    for path, _ in tree.tensors():
        module = path[:-2] if path[-2:-1] and path[-2].value in _OWN else path[:-1]
        held = tree.containers.get(module)
        if held is not None and _is_object(held) and held.name:
            made[path] = about_class(held.name, settings.get(module, {}))
    return made


# Where a torch.nn.Module keeps its own tensors (torch/nn/modules/module.py).
_OWN = frozenset(("_parameters", "_buffers"))


def _is_object(held: Container) -> bool:
    return held.kind == "record" and held.name not in _SETS


def _is_in_parts(held: Container) -> bool:
    # A tensor that torch stores as several, under the name of its layout (`torch.sparse_coo`): half of it
    # would be another tensor.
    return (held.name or "").rpartition(".")[0] == "torch"


def _is_plain(leaf: Leaf | ValueLeaf) -> bool:
    if isinstance(leaf, Leaf) or not isinstance(leaf.value, Record):
        return True
    module, _, name = leaf.value.name.rpartition(".")
    return module == "torch" and name in dtypes.BY_TORCH and not leaf.value.summary


def _place(path: Path, leaf: Leaf | ValueLeaf, objects: frozenset[Path]) -> Path | None:
    if isinstance(leaf, Leaf):
        return _named(path, leaf.key, objects)
    return path if _is_plain(leaf) and not _is_within(path, objects) else None


def _is_within(path: Path, objects: frozenset[Path]) -> bool:
    return any(path[:depth] in objects for depth in range(len(path) + 1))


def _named(path: Path, native: str | None, objects: frozenset[Path]) -> Path:
    """Return the path up to the first object on it, and one key for the rest: what torch would call it."""
    depth = next((depth for depth in range(len(path)) if path[:depth] in objects), None)
    if depth is None:
        return path
    above = "".join(f"{step.value}." for step in path[:depth])
    name = native if native is not None else ".".join(str(step.value) for step in path)
    return (*path[:depth], key(name.removeprefix(above)))


def _aliases(
    tree: Tree, places: Mapping[Path, Path | None], objects: frozenset[Path]
) -> dict[Path, tuple[Path, ...]]:
    taken = set(places.values())
    found: dict[Path, tuple[Path, ...]] = {}
    for path, others in tree.aliases.items():
        place = places[path]
        for alias in others:
            second = _named(alias.path, alias.key, objects)
            # A list that an object keeps of its tensors (torch's `_flat_weights`) is in no state_dict.
            listed = second != alias.path and any(step.kind == "index" for step in alias.path)
            if place is not None and second not in taken and not listed:
                taken.add(second)
                found[place] = (*found.get(place, ()), second)
    return found
