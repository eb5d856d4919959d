"""Checkpoints with something wrong in them: a torch file, written again after a change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpttool.formats.resolve import open_checkpoint
from ckpttool.leaf import Leaf, ValueLeaf
from ckpttool.leaf import Path as TreePath
from ckpttool.ops.save import save
from ckpttool.tree import Tree

Leaves = dict[TreePath, Leaf | ValueLeaf]
Change = Callable[[Leaves, dict[str, TreePath]], None]


def changed(source: Path, target: Path, change: Change) -> str:
    """Write the file's tree after `change(leaves, path by name)`; return where."""
    tree = open_checkpoint(str(source)).tree
    leaves = dict(tree.leaves)
    change(leaves, {name: path for path, name in tree.names.items()})
    save(Tree(leaves, tree.aliases, tree.containers), str(target))
    return str(target)
