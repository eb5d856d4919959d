"""What the rows of the libraries must not change: the layout of any tree, nested or wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckpttool.core import Leaf, Path, Tree, UsageError, index, key
from ckpttool.libraries import recognize, recognize_tree
from tests.trees import torch_tree

WRAPPERS = ("module.", "_orig_mod.", "module._orig_mod.")


def wrapped(tree: Tree, prefix: str) -> Tree:
    """The tree with a wrapper's prefix before every dotted name of a state_dict."""

    def named(path: Path) -> Path:
        last = path[-1]
        dotted = last.kind == "key" and isinstance(last.value, str) and "." in last.value
        return (*path[:-1], key(f"{prefix}{last.value}")) if dotted else path

    leaves = {
        named(path): replace(leaf, of=None) if isinstance(leaf, Leaf) else leaf for path, leaf in tree.items()
    }
    return Tree(leaves)


def variants(tree: Tree) -> Iterator[Tree]:
    """The tree as it is, inside other things, and as wrappers name it."""
    yield tree
    yield tree.under((key("model"),))
    yield Tree({**tree.under((key("agent"),)).leaves, **torch_tree({"epoch": 3}).leaves})
    yield tree.under((index(0), key("state")))
    for prefix in WRAPPERS:
        yield wrapped(tree, prefix)
        yield wrapped(tree, prefix).under((key("model"),))


def recognised(tree: Tree, name: str) -> str | None:
    """The layout of a tree, or the refusal of two."""
    try:
        binding = recognize_tree(tree, name)
    except UsageError as error:
        return str(error)
    return None if binding is None else binding.layout


def require_no_difference(tree: Tree, name: str, patch: pytest.MonkeyPatch) -> None:
    """Assert that what is recognised does not depend on the rows, for every variant of the tree."""
    for variant in variants(tree):
        recognized = recognised(variant, name)
        with patch.context() as every:
            every.setattr(recognize, "may_recognize", lambda *_: True)
            assert recognized == recognised(variant, name)
