"""Builds trees from arrays, for tests of what works on trees whatever file they came from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpttool.core import Path, Tree, attr, index, key
from ckpttool.testing.formats import build_leaf as leaf
from ckpttool.testing.formats import build_tree as torch_tree

__all__ = ["attributes", "dense", "keys", "leaf", "tensorflow_tree", "torch_dense", "torch_tree"]


def attributes(name: str) -> Path:
    """`policy/actor/l1/kernel` as TensorFlow's object graph gives it."""
    return tuple(index(int(part)) if part.isdigit() else attr(part) for part in name.split("/"))


def keys(name: str) -> Path:
    """`actor/l1.weight` as a torch file nests it: `/` between dicts, dots inside a key."""
    return tuple(key(part) for part in name.split("/"))


def tensorflow_tree(arrays: Mapping[str, np.ndarray]) -> Tree:
    return Tree({attributes(name): leaf(array, name) for name, array in arrays.items()})


def dense(generator: np.random.Generator, name: str, n_in: int, n_out: int) -> dict[str, np.ndarray]:
    return {
        f"{name}/kernel": generator.standard_normal((n_in, n_out)).astype(np.float32),
        f"{name}/bias": generator.standard_normal(n_out).astype(np.float32),
    }


def torch_dense(generator: np.random.Generator, name: str, n_in: int, n_out: int) -> dict[str, np.ndarray]:
    return {
        f"{name}.weight": generator.standard_normal((n_out, n_in)).astype(np.float32),
        f"{name}.bias": generator.standard_normal(n_out).astype(np.float32),
    }
