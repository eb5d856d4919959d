"""Settings as JSON spells them, as a tree of plain values."""

from __future__ import annotations

from typing import Any

from ckpttool.errors import FormatError
from ckpttool.leaf import Leaf, Path, ValueLeaf, index, key
from ckpttool.tree import Container, Tree

_LEVELS = 100


def tree(settings: dict[str, Any], what: str) -> Tree:
    """Return an object of JSON as a tree: a leaf for every text, number, true, false and null.

    `what` names it in the error: FormatError for more than 100 levels.
    """
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    containers: dict[Path, Container] = {}

    def add(value: Any, path: Path) -> None:
        if len(path) > _LEVELS:
            raise FormatError(f"{what} is nested too deeply", expected=f"at most {_LEVELS} levels")
        if isinstance(value, dict):
            containers[path] = Container("dict")
            for name, inner in value.items():
                add(inner, (*path, key(name)))
        elif isinstance(value, list):
            containers[path] = Container("list")
            for number, inner in enumerate(value):
                add(inner, (*path, index(number)))
        else:
            leaves[path] = ValueLeaf(value)

    add(settings, ())
    return Tree(leaves, {}, containers)
