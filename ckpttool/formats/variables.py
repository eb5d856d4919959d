"""Variables known by name alone: what a file says of one, what its name tells, and the tree of a whole file.

Used by every TensorFlow format; object graphs say more (object_graph.leaves).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpttool.leaf import Key, Leaf, Path, Role
from ckpttool.source import Shape, Source
from ckpttool.tree import Tree

_STATISTICS = frozenset(("moving_mean", "moving_variance", "moving_mean_squared"))
_COUNTERS = frozenset(("_iterations", "iterations", "iter", "save_counter", "step_counter", "global_step"))
# Below these edges are metrics and the state of mixed-precision training.
_APART = frozenset(("keras_api", "loss_scale"))
_NO_NUMBERS = frozenset(("bool", "string", "variant"))
_INTEGERS = frozenset(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))


class Tensor(NamedTuple):
    """What a file itself says about one tensor."""

    dtype: str
    shape: Shape
    source: Source


def by_name(tensors: Mapping[str, Tensor]) -> Tree:
    """Return the tree of a file that stores variables by name: paths are variable names split at `/`."""
    leaves = {}
    for key, tensor in tensors.items():
        path = tuple(Key("attr", part) for part in key.split("/"))
        role = role_by_name(path, key, tensor.dtype, tensor.shape)
        leaves[path] = Leaf(tensor.dtype, tensor.shape, tensor.source, key, role, name=key)
    return Tree(leaves)


def role_by_name(
    path: Path, full_name: str, dtype: str, shape: tuple[int, ...], *, setting: bool = False
) -> Role:
    """Say what a variable is for that is no slot; `setting` tells that an optimizer holds it directly."""
    steps = [str(step.value) for step in path]
    last = steps[-1] if steps else ""
    if last in _COUNTERS and dtype in _INTEGERS:
        return "counter"
    if setting:
        return "other"
    if "replay" in f"{full_name} {'/'.join(steps)}".lower():
        return "replay"
    if last in _STATISTICS:
        return "buffer"
    if dtype in _INTEGERS and not shape and "seed" not in full_name:
        return "counter"
    if dtype in _INTEGERS or dtype in _NO_NUMBERS or not _APART.isdisjoint(steps):
        return "other"
    return "parameter"
