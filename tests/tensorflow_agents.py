"""Files of TensorFlow agents with the names that libraries give, and the same networks in numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from ckpttool.core import Alias, Tree
from ckpttool.core import Path as TreePath
from ckpttool.formats import tf_bundle
from tests.trees import attributes, leaf, tensorflow_tree

Arrays = dict[str, np.ndarray]


def layers(
    names: Sequence[str], widths: Sequence[int], spelled: Sequence[str] = ("kernel", "bias")
) -> Arrays:
    """Return a chain of dense layers of random numbers; `spelled` is how the library calls their tensors."""
    generator = np.random.default_rng(len(names) + sum(map(ord, names[0])))
    arrays: Arrays = {}
    for name, (n_in, n_out) in zip(names, pairwise(widths), strict=True):
        arrays[f"{name}/{spelled[0]}"] = (generator.normal(size=(n_in, n_out)) / np.sqrt(n_in)).astype("f4")
        arrays[f"{name}/{spelled[1]}"] = (generator.normal(size=n_out) / 2).astype("f4")
    return arrays


def run(
    arrays: Arrays, names: Sequence[str], x: np.ndarray, spelled: Sequence[str] = ("kernel", "bias")
) -> np.ndarray:
    """Return the chain's last layer on `x`, with ReLU between."""
    for number, name in enumerate(names):
        x = np.maximum(x, 0) if number else x
        x = x @ arrays[f"{name}/{spelled[0]}"] + arrays[f"{name}/{spelled[1]}"]
    return x


def aliased(tree: Tree, places: Mapping[str, str]) -> Tree:
    """Add to every path below a prefix the same path below another one."""
    aliases: dict[TreePath, tuple[Alias, ...]] = {}
    for path in tree:
        for prefix, replacement in places.items():
            if tree.names[path].startswith(f"{prefix}/"):
                other = replacement + tree.names[path].removeprefix(prefix)
                aliases[path] = (*aliases.get(path, ()), Alias(attributes(other), None))
    return Tree(tree.leaves, aliases)


def optimized(tree: Tree, optimizers: Mapping[str, Sequence[str]], step: int = 5) -> Tree:
    """Add Keras's Adams as 2.0 to 2.10 store them: of each the prefixes of its variables."""
    leaves = dict(tree.leaves)
    for top, prefixes in optimizers.items():
        leaves[attributes(f"{top}/iter")] = leaf(np.array(step, np.int64), f"{top}/iter", role="counter")
        for path, result in tree.tensors():
            if any(tree.names[path].startswith(prefix) for prefix in prefixes):
                for slot in "mv":
                    name = f"{top}/slots/{slot}/{tree.names[path]}"
                    array = np.arange(result.size, dtype="f4").reshape(result.shape)
                    leaves[attributes(name)] = replace(leaf(array, name), role="slot", slot=slot, of=path)
    return Tree(leaves, tree.aliases)


def written(tree: Tree, prefix: Path) -> str:
    """Write a bundle with an object graph and return its prefix."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for piece in tf_bundle.pieces(tree, graph=True):
        with open(f"{prefix}{piece.suffix}", "wb") as stream:
            piece.write(stream)
    return str(prefix)


__all__ = ["Arrays", "aliased", "layers", "optimized", "run", "tensorflow_tree", "written"]
