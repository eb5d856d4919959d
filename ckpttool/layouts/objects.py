"""The objects behind variables known by name: kept in a sidecar, so that the way back gives the same objects.

TensorFlow 1's form has no place for edges, keys and the kind of an optimizer. The receipt of a conversion
to it holds the object graph, as TensorFlow stores it, and each variable's key there.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping
from typing import Any

from ckpttool.errors import CkpttoolError
from ckpttool.formats.object_graph import write
from ckpttool.formats.object_graph.leaves import by_graph
from ckpttool.formats.variables import Tensor
from ckpttool.layouts.optimizers.tf1 import POWERS
from ckpttool.layouts.variables import is_graph
from ckpttool.leaf import Leaf, Path
from ckpttool.mapping.plan import Label, Plan
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.tree import Tree

# A sidecar may have 16 MB; a graph of 10,000 objects has about 1 MB.
_MOST_BYTES = 4 << 20


def remembered(tree: Tree, plan: Plan) -> dict[str, Any] | None:
    """Return what a sidecar says of the tree's objects after `plan` gave names to its variables.

    None if they cannot be stored as objects, are too many to be told in a sidecar, or changed on the way.
    """
    if any(move.rule != KEEP for move in plan.moves):
        return None  # the variables are others than the objects had
    with contextlib.suppress(CkpttoolError):
        found = write.plan(tree)
        graph = write.encode(found.graph)
        if len(graph) <= _MOST_BYTES:
            keys = {_name(move.target): found.keys[move.source] for move in plan.moves}
            return {"graph": base64.b64encode(graph).decode(), "keys": keys, "read": is_graph(tree)}
    return None


def again(tree: Tree, objects: Mapping[str, Any]) -> Plan | None:
    """Return the way of variables known by name into the objects that they were; None if it does not fit.

    The powers of Adam's betas that no object had are left out: the conversion computed them.
    """
    keys = objects["keys"]
    sources = {keys[_name(path)]: path for path in tree if _name(path) in keys}
    computed = tuple(path for path in tree if _name(path) not in keys)
    complete = sources.keys() == set(keys.values()) and len(sources) == len(keys)
    if not complete or not all(path[-1].value in POWERS for path in computed):
        return None
    try:
        tensors = {key: _tensor(tree, path) for key, path in sources.items()}
        graph = base64.b64decode(objects["graph"], validate=True)
        made, _ = by_graph(graph, tensors)
    except (CkpttoolError, binascii.Error, ValueError):
        return None
    if not graph:
        return None
    placed = {leaf.key: path for path, leaf in made.tensors()}
    return Plan(
        tuple(Move(sources[key], path, KEEP) for key, path in placed.items()),
        aliases={path: tuple(alias.path for alias in others) for path, others in made.aliases.items()},
        labels={
            path: Label(leaf.role, leaf.name, leaf.of, leaf.slot, leaf.key if objects["read"] else None)
            for path, leaf in made.tensors()
        },
        consumed=computed,
    )


def _name(path: Path) -> str:
    return "/".join(str(step.value) for step in path)


def _tensor(tree: Tree, path: Path) -> Tensor:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101  # `again` goes through tensors
    return Tensor(leaf.dtype, leaf.shape, leaf.source)
