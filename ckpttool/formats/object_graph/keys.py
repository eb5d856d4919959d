"""What each leaf of a tree is in an object graph that is to be written: key, slot or attribute, place."""

from __future__ import annotations

from ckpttool.formats import object_graph
from ckpttool.formats.object_graph import MARK, VALUE
from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.tree import Tree

Steps = tuple[str, ...]

# Attributes stored under longer keys than the graph has: lookup tables (tensorflow/python/ops/lookup_ops.py)
# and dataset iterators (tensorflow/python/data/ops/iterator_ops.py).
_PAIR = ("-keys", "-values")
_ITERATOR, _STATE = "ITERATOR", "_STATE"
_SLOT = ".OPTIMIZER_SLOT"  # tensorflow/python/trackable/trackable_utils.py


def edgeless(tree: Tree) -> dict[Path, Path]:
    """Return the optimizer's path of every slot that no edge leads to."""
    found = {}
    for path, leaf in tree.tensors():
        if leaf.role == "slot" and leaf.of is not None:
            for of in (leaf.of, *(alias.path for alias in tree.aliases.get(leaf.of, ()))):
                optimizer = path[: len(path) - len(of) - 2]
                if leaf.of in tree and path == slot_path(optimizer, leaf.slot or "", of):
                    found[path] = optimizer
                    break
    return {path: made for path, made in found.items() if _of(tree, path) not in found}


def _of(tree: Tree, path: Path) -> Path | None:
    leaf = tree[path]
    return leaf.of if isinstance(leaf, Leaf) else None


def keys_of(tree: Tree, slots: dict[Path, Path]) -> dict[Path, str]:
    """Return every leaf's key: its own if an object's value has it and it is free, else that of its path."""
    keys: dict[Path, str] = {}
    taken: set[str] = set()
    for path, leaf in tree.tensors():
        if MARK in leaf.key and leaf.key not in taken and not leaf.key.startswith("\0"):
            keys[path] = leaf.key
            taken.add(leaf.key)
    for path, leaf in tree.tensors():
        if path not in keys:
            keys[path] = _free(_object_name(path, leaf, slots), taken)
            taken.add(keys[path])
    return {path: keys[path] for path, _ in tree.tensors()}


def _object_name(path: Path, leaf: Leaf, slots: dict[Path, Path]) -> str:
    if path in slots and leaf.of is not None:
        parts = [*_escaped(leaf.of), _SLOT, *_escaped(slots[path]), object_graph.escaped(leaf.slot or "")]
        return "/".join(parts)
    return "/".join(_escaped(path))


def _escaped(path: Path) -> list[str]:
    return [object_graph.escaped(step) for step in steps_of(path)]


def _free(name: str, taken: set[str]) -> str:
    key, number = f"{name}{MARK}{VALUE}", 0
    while key in taken:
        number += 1
        key = f"{name}_{number}{MARK}{VALUE}"
    return key


def attribute(path: Path, key: str, keys: set[str]) -> tuple[str, str] | None:
    """Return the name and key of the attribute that holds a leaf; None if it is the value of a variable."""
    _, _, stored = key.partition(MARK)
    name = object_graph.unescaped(stored)
    if stored in ("", VALUE) or not path or object_graph.attribute_path(name) != path[-1:]:
        return None
    for own, other in (_PAIR, _PAIR[::-1]):
        whole = key.removesuffix(own)
        if name != own and whole != key and whole not in keys and whole + other in keys:
            return name.removesuffix(own), whole
    if name == _ITERATOR + _STATE:
        return _ITERATOR, key.removesuffix(_STATE)
    return name, key


def listed(tree: Tree, path: Path, leaf: Leaf) -> Path:
    """Return the place in a list of a variable that is known by its name (see of_lists), () if none."""
    for alias in tree.aliases.get(path, ()):
        items, place = alias.path[:-1], alias.path[-1:]
        name = tuple(attr(part) for part in (leaf.name or "").split("/") if part)
        # The root is no list: there an alias is another name of the variable, such as Keras's `_kernel`.
        if name and items and path in ((*items, *name), (*items, *name, *place)):
            return alias.path
    return ()


def steps_of(path: Path) -> Steps:
    """Return the path's edges; an edge is a text, whatever kind of step it was."""
    return tuple(str(step.value) for step in path)
