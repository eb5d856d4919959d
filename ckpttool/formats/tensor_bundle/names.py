"""The names under which a tree's tensors are stored without an object graph, as TensorFlow 1 does."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ckpttool.errors import UnsupportedError
from ckpttool.formats.object_graph import KEY as GRAPH
from ckpttool.leaf import Leaf, Path, display
from ckpttool.tree import Tree

# tensorflow/python/framework/ops.py, _VALID_OP_NAME_REGEX: what a variable may be called.
_LEGAL = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")
# tensorflow/python/training/adam.py: both slots are made under the optimizer's name, the second one numbered.
_ADAM = {"m": "Adam", "v": "Adam_1"}


def names(tree: Tree) -> Mapping[Path, str]:
    """Return every tensor's name: its own if it was read by name, else its path as people read it.

    Adam's moments go beside their variables, as `VARIABLE/Adam` and `VARIABLE/Adam_1`. Raise UnsupportedError
    for two tensors of one name, and for what TensorFlow accepts as no name.
    """
    found: dict[Path, str] = {}
    taken: dict[str, Path] = {}
    for path, leaf in tree.tensors():
        name = _name(tree, path, leaf)
        if name in taken:
            raise UnsupportedError(
                "two tensors would have one name in TensorFlow 1's form",
                path=display(path),
                found=f"{name}, the name of {display(taken[name])}",
            )
        found[path] = name
        taken[name] = path
    return found


def _name(tree: Tree, path: Path, leaf: Leaf) -> str:
    own = "/".join(str(step.value) for step in path)
    if own == leaf.key and own != GRAPH and own and own[0] != "\0":
        return own
    owner = tree.get(leaf.of) if leaf.of is not None else None
    if leaf.slot in _ADAM and leaf.of is not None and isinstance(owner, Leaf) and owner.of is None:
        name = f"{_name(tree, leaf.of, owner)}/{_ADAM[leaf.slot]}"
    else:
        name = display(path)
    if name == GRAPH or not _LEGAL.fullmatch(name):
        raise UnsupportedError(
            "a tensor's path is no legal name of a variable in TensorFlow 1",
            path=display(path),
            expected="letters, digits and _ . - /, and no _ at the beginning",
            found=repr(name),
        )
    return name
