"""What TF-Agents tells of a policy besides its networks: the action's bounds, the observations' statistics.

Sources in github.com/tensorflow/agents: tf_agents/policies/policy_saver.py (`policy_specs.pbtxt`, a
StructuredValue of tensorflow/core/protobuf/struct.proto as text: tf_agents/specs/tensor_spec.py,
to_pbtxt_file); tf_agents/utils/tensor_normalizer.py (StreamingTensorNormalizer: `_m2` over `_count` is the
variance; EMATensorNormalizer: moving averages of both; `normalize`: epsilon 1e-3 inside the root, limited to
[-5, 5]).
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.layouts.canonical import Binding, Norm
from ckpttool.leaf import Leaf, Path, ValueLeaf, index, key
from ckpttool.tree import Tree

_FILE = "policy_specs.pbtxt"
_EPSILON, _CLIP = 1e-3, 5.0
# tensorflow/core/framework/tensor.proto: numbers stand in a field of their type, or all as bytes.
_TYPES = {"DT_FLOAT": ("f", "float_val"), "DT_DOUBLE": ("d", "double_val")}
_MOST = 10_000


@dataclass(frozen=True, slots=True)
class _Quotient:
    """One tensor over another of its shape, both float32, computed when it is read."""

    above: Leaf
    below: Leaf

    def read(self) -> bytes:
        """Return the quotient's bytes; 0 where nothing was counted."""
        import numpy as np

        above, below = self.above.array(), self.below.array()
        quotient = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
        data: bytes = quotient.astype("<f4").tobytes()
        return data


def statistics(found: Mapping[str, Leaf]) -> Norm | None:
    """Return what a normalizer's variables say, by the attributes that hold them; None if it is not known."""
    if {"_avg", "_m2", "_count"} <= found.keys():
        mean, above, below = (found[name] for name in ("_avg", "_m2", "_count"))
        if not mean.shape == above.shape == below.shape:
            return None
        if {leaf.dtype for leaf in (mean, above, below)} != {"float32"}:
            return None
        var = Leaf("float32", above.shape, _Quotient(above, below), "", "buffer")
        return Norm(mean, var, epsilon=_EPSILON, clip=_CLIP)
    if {"_mean_moving_avg", "_var_moving_avg"} <= found.keys():
        mean, var = found["_mean_moving_avg"], found["_var_moving_avg"]
        return Norm(mean, var, epsilon=_EPSILON, clip=_CLIP)
    return None


def companions(location: str) -> Sequence[str]:
    """Return where the specs may lie: in the folder, beside its graph, above its variables."""
    above = os.path.dirname(location)
    return tuple(os.path.join(folder, _FILE) for folder in (location, above, os.path.dirname(above)))


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the action's bounds, the same one if the specs do not tell them."""
    found = [bounds for place in _actions(tree) if (bounds := _bounds(tree, place)) is not None]
    if not found:
        return binding
    low, high = found[0]
    facts = binding.facts.without_lack("action bounds")
    name = os.path.basename(file)
    return replace(binding, facts=facts.read(name, action_low=low, action_high=high))


def _actions(tree: Tree) -> Iterator[Path]:
    """Go through the specs of what is called `action`."""
    for path, leaf in tree.items():
        if path[-2:] == (key("key"), index(0)) and isinstance(leaf, ValueLeaf) and leaf.value == "action":
            yield (*path[:-2], *_steps("value"), *_steps("bounded_tensor_spec_value"))


def _steps(field: str) -> Path:
    return (key(field), index(0))


def _bounds(tree: Tree, place: Path) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    sizes = list(_numbers(tree, place, "shape"))
    count = math.prod(sizes)
    if not 0 < count <= _MOST:
        return None
    low, high = (_tensor(tree, (*place, *_steps(name)), count) for name in ("minimum", "maximum"))
    return None if low is None or high is None else (low, high)


def _numbers(tree: Tree, place: Path, field: str) -> Iterator[int]:
    """Go through the sizes of a shape's dimensions."""
    number = 0
    while True:
        path = (*place, *_steps(field), key("dim"), index(number), *_steps("size"))
        leaf = tree.get(path)
        if not isinstance(leaf, ValueLeaf) or not isinstance(leaf.value, int):
            return
        yield leaf.value
        number += 1


def _tensor(tree: Tree, place: Path, count: int) -> tuple[float, ...] | None:
    """Return a tensor's numbers, one of them for all; None if they are of another type or number."""
    kind = tree.get((*place, *_steps("dtype")))
    if not isinstance(kind, ValueLeaf) or kind.value not in _TYPES:
        return None
    code, field = _TYPES[str(kind.value)]
    content = tree.get((*place, *_steps("tensor_content")))
    if isinstance(content, ValueLeaf) and isinstance(content.value, str):
        data = content.value.encode("latin-1", "replace")
        whole = len(data) % struct.calcsize(code) == 0
        found = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data)) if whole else []
    else:
        found = []
        while isinstance(leaf := tree.get((*place, key(field), index(len(found)))), ValueLeaf):
            if not isinstance(leaf.value, int | float):
                return None
            found.append(float(leaf.value))
    if len(found) == 1:
        found *= count
    return tuple(found) if len(found) == count and all(map(math.isfinite, found)) else None
