"""Settings as JSON spells them, as a tree of plain values."""

from __future__ import annotations

from typing import Any

from ckpttool import limits
from ckpttool.leaf import Leaf, Path, ValueLeaf, index, key
from ckpttool.tree import Container, Tree


def tree(settings: dict[str, Any], what: str) -> Tree:
    """Return an object of JSON as a tree: a leaf for every text, number, true, false and null.

    `what` names it in the error: LimitError for more levels than the limit allows.
    """
    most = limits.current().json_depth
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    containers: dict[Path, Container] = {}

    def add(value: Any, path: Path) -> None:
        if len(path) > most:
            raise limits.exceeded("json_depth", f"{what} is nested too deeply", len(path))
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
