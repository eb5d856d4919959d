"""Modules that a file stores as objects: their state_dicts, and the facts about each module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.core import dtypes
from ckpttool.core.tree import Container, Leaf, Path, Record, Tree, ValueLeaf, key
from ckpttool.mapping.rules import KEEP, Move, Plan

if TYPE_CHECKING:
    from ckpttool.mapping.layers import ModuleInfo


# Records that are data: their items can be written again.
_SETS = ("builtins.set", "builtins.frozenset")


def plan_state_dicts(tree: Tree) -> Plan | None:
    """Return the conversion to a tree without objects, None if there are none.

    Each tensor under an object gets one key, its native name from there on (`l1.weight`); plain
    values of an object, records, and tensors stored in parts have no move and are reported as unused.
    """
    objects = frozenset(path for path, container in tree.containers.items() if _is_object(container))
    if not objects and all(_is_plain(leaf) for leaf in tree.values()):
        return None
    parts = frozenset(path for path in objects if _is_in_parts(tree.containers[path]))
    places = {
        path: None if _is_within(path, parts) else _leaf_path(path, leaf, objects)
        for path, leaf in tree.items()
    }
    moves = tuple(Move(path, target, KEEP) for path, target in places.items() if target is not None)
    lost = {path[:-1] for path, target in places.items() if target is None}
    containers = {
        path: container
        for path, container in tree.containers.items()
        # A list that loses an item keeps its numbers as keys.
        if not _is_within(path, objects) and not (container.kind in ("list", "tuple") and path in lost)
    }
    aliases = _map_aliases(tree, places, objects)
    return Plan(moves, containers=containers, aliases=aliases)


def describe_modules(tree: Tree) -> dict[Path, ModuleInfo]:
    """Return for each tensor of whole modules and TorchScript the facts in the file about its module.

    Settings are the object's plain values, with a tuple of numbers (`stride`) as a list.
    """
    from ckpttool.mapping.layers import class_info

    settings: dict[Path, dict[str, Any]] = {}
    for path, leaf in tree.plain():
        if len(path) > 1 and path[-1].kind == "index":
            values = settings.setdefault(path[:-2], {}).setdefault(str(path[-2].value), [])
            if isinstance(values, list):
                values.append(leaf.value)
        elif path:
            settings.setdefault(path[:-1], {})[str(path[-1].value)] = leaf.value
    modules: dict[Path, ModuleInfo] = {}
    for path, _ in tree.tensors():
        module = path[:-2] if path[-2:-1] and path[-2].value in _OWN else path[:-1]
        container = tree.containers.get(module)
        if container is not None and _is_object(container) and container.name:
            modules[path] = class_info(container.name, settings.get(module, {}))
    return modules


# Attributes in which a torch.nn.Module stores its own tensors (torch/nn/modules/module.py).
_OWN = frozenset(("_parameters", "_buffers"))


def _is_object(container: Container) -> bool:
    return container.kind == "record" and container.name not in _SETS


def _is_in_parts(container: Container) -> bool:
    # A tensor that torch stores as several, with the name of its layout (`torch.sparse_coo`): half of it
    # would be another tensor.
    return (container.name or "").rpartition(".")[0] == "torch"


def _is_plain(leaf: Leaf | ValueLeaf) -> bool:
    if isinstance(leaf, Leaf) or not isinstance(leaf.value, Record):
        return True
    module, _, name = leaf.value.name.rpartition(".")
    return module == "torch" and name in dtypes.BY_TORCH and not leaf.value.summary


def _leaf_path(path: Path, leaf: Leaf | ValueLeaf, objects: frozenset[Path]) -> Path | None:
    if isinstance(leaf, Leaf):
        return _torch_path(path, leaf.key, objects)
    return path if _is_plain(leaf) and not _is_within(path, objects) else None


def _is_within(path: Path, objects: frozenset[Path]) -> bool:
    return any(path[:depth] in objects for depth in range(len(path) + 1))


def _torch_path(path: Path, native: str | None, objects: frozenset[Path]) -> Path:
    """Return the path up to the first object, and one key for the rest, which is torch's name."""
    depth = next((depth for depth in range(len(path)) if path[:depth] in objects), None)
    if depth is None:
        return path
    above = "".join(f"{step.value}." for step in path[:depth])
    name = native if native is not None else ".".join(str(step.value) for step in path)
    return (*path[:depth], key(name.removeprefix(above)))


def _map_aliases(
    tree: Tree, places: Mapping[Path, Path | None], objects: frozenset[Path]
) -> dict[Path, tuple[Path, ...]]:
    targets = set(places.values())
    aliases: dict[Path, tuple[Path, ...]] = {}
    for path, others in tree.aliases.items():
        target = places[path]
        for alias in others:
            second = _torch_path(alias.path, alias.key, objects)
            # A list of an object's tensors (torch's `_flat_weights`) is not part of a state_dict.
            listed = second != alias.path and any(step.kind == "index" for step in alias.path)
            if target is not None and second not in targets and not listed:
                targets.add(second)
                aliases[target] = (*aliases.get(target, ()), second)
    return aliases
