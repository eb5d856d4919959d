"""A tree as the text that `read` restores."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckpttool.formats.recorded.values import encoded, steps
from ckpttool.leaf import Leaf, Path
from ckpttool.tree import Tree

VERSION = 1


def recorded(tree: Tree, names: Mapping[Path, str]) -> str:
    """Return the tree as JSON; `names` are those of its arrays and of its aliases in the file.

    A value may have a name too: that of an array which repeats it for other readers.
    """
    places = {path: number for number, path in enumerate(tree)}
    document = {
        "version": VERSION,
        "leaves": [_leaf(tree, path, names.get(path), places) for path in tree],
        "aliases": [
            [places[path], steps(alias.path), None if alias.key is None else names.get(alias.path)]
            for path, others in tree.aliases.items()
            for alias in others
        ],
        "containers": [
            [steps(path), kind.kind, encoded(kind.name), encoded(kind.state)]
            for path, kind in tree.containers.items()
        ],
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def _leaf(tree: Tree, path: Path, name: str | None, places: Mapping[Path, int]) -> list[Any]:
    leaf = tree[path]
    facts: dict[str, Any] = {} if leaf.role == "parameter" else {"role": leaf.role}
    if not isinstance(leaf, Leaf):
        facts["value"] = encoded(leaf.value)
        return [steps(path), name, facts]
    facts["dtype"] = leaf.dtype
    if leaf.of is not None and leaf.of in places:
        facts["of"] = places[leaf.of]
    for fact in ("slot", "trainable", "name"):
        value = getattr(leaf, fact)
        if value is not None:
            facts[fact] = encoded(value)
    return [steps(path), name, facts]


def needed(tree: Tree, bare: Tree) -> bool:
    """Say whether the file without the record (`bare`) would be read as another tree than this."""
    if list(tree) != list(bare) or tree.containers not in ({}, bare.containers):
        return True
    return _aliases(tree) != _aliases(bare) or any(_facts(tree, path) != _facts(bare, path) for path in tree)


def _facts(tree: Tree, path: Path) -> tuple[Any, ...]:
    leaf = tree[path]
    if not isinstance(leaf, Leaf):
        return (type(leaf.value).__name__, leaf.value, leaf.role)
    return (leaf.dtype, leaf.shape, leaf.role, leaf.of, leaf.slot, leaf.trainable, leaf.name)


def _aliases(tree: Tree) -> dict[Path, list[tuple[Path, bool]]]:
    return {
        path: [(a.path, a.key is None) for a in others] for path, others in tree.aliases.items() if others
    }
