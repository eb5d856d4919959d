"""Checkpoints with something wrong in them: a torch file, written again after a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpttool.conversion.write import save
from ckpttool.core import Leaf, Tree, ValueLeaf
from ckpttool.core import Path as TreePath
from ckpttool.formats import open_checkpoint

Leaves = dict[TreePath, Leaf | ValueLeaf]
Change = Callable[[Leaves, dict[str, TreePath]], None]


def changed(source: Path, target: Path, change: Change) -> str:
    """Write the file's tree after `change(leaves, path by name)`; return where."""
    tree = open_checkpoint(str(source)).tree
    leaves = dict(tree.leaves)
    change(leaves, {name: path for path, name in tree.names.items()})
    save(Tree(leaves, tree.aliases, tree.containers), str(target))
    return str(target)
