"""Find the entries of every optimizer in a tree, without a layout."""

from __future__ import annotations

import re

from ckpttool.core import optimizers
from ckpttool.core.tree import Leaf, Path, Tree, attr, key

# Suggestion in notes on optimizers without an equivalent.
WITHOUT = "use --optimizer none to convert without it"
POWERS = ("beta1_power", "beta2_power")
# Keras 3 and 2.11+ use a leading underscore, the legacy optimizers do not.
KERAS_SETTINGS = {
    **dict.fromkeys(("_iterations", "iterations", "iter"), "step"),
    "step": "step",  # Sonnet's (sonnet/src/optimizers/adam.py)
    **dict.fromkeys(("_learning_rate", "learning_rate"), "learning_rate"),
    # `decay` of the learning rate in the legacy optimizers: torch has no equivalent and keeps it unused.
    **{name: name for name in ("beta_1", "beta_2", "epsilon", "rho", "momentum", "decay")},
}
ITERATIONS, RATES = (
    frozenset(stored for stored, canonical in KERAS_SETTINGS.items() if canonical == name)
    for name in ("step", "learning_rate")
)
OPTIMIZER = "optimizer"


def is_scheduled(path: Path) -> bool:
    """Return whether a value of an optimizer's group belongs to a scheduler, not to the optimizer."""
    return len(path) > 2 and path[-3].value == "param_groups" and path[-1].value in optimizers.SCHEDULED


def list_torch_optimizers(tree: Tree) -> dict[Path, list[Path]]:
    """Return the leaves of every optimizer's state_dict, by its path."""
    groups_, states = key("param_groups"), key("state")
    tops = dict.fromkeys(
        path[: path.index(groups_)] for path in tree if groups_ in path and path[-2:-1] == (key("params"),)
    )
    depths = sorted({len(top) for top in tops})
    leaves: dict[Path, list[Path]] = {top: [] for top in tops}
    for path in tree:
        for depth in depths:
            if path[:depth] in leaves and path[depth : depth + 1] in ((groups_,), (states,)):
                leaves[path[:depth]].append(path)
                break
    return leaves


def list_keras_optimizers(tree: Tree) -> dict[Path, list[Path]]:
    """Return the leaves of every optimizer, by its path; the root has slots named as in TensorFlow 1."""
    tops: dict[Path, None] = {}
    named: list[Path] = []
    for path, leaf in tree.tensors():
        if leaf.role == "slot":
            if leaf.of is not None and path_texts(path[:-1])[-len(leaf.of) :] == path_texts(leaf.of):
                named.append(path)
            else:
                from ckpttool.formats.tf_object_graph import slot_optimizer  # for objects with slots only

                tops[slot_optimizer(path, leaf)] = None
        elif leaf.role == "counter" and str(path[-1].value) in ITERATIONS and has_rate(tree, path[:-1]):
            tops[path[:-1]] = None
    leaves: dict[Path, list[Path]] = {top: [] for top in tops if top}
    depths = sorted({len(top) for top in leaves}, reverse=True)
    for path, entry in tree.items():
        for depth in depths:
            weight = isinstance(entry, Leaf) and entry.role in ("parameter", "buffer")
            if path[:depth] in leaves and len(path) > depth and not weight:
                leaves[path[:depth]].append(path)
                break
    if named:
        powers = [path for path in tree if re.sub(r"_\d+$", "", str(path[-1].value)) in POWERS]
        leaves[()] = [*named, *powers]
    return leaves


def path_texts(path: Path) -> tuple[str, ...]:
    """Return the steps of a path as text."""
    return tuple(str(step.value) for step in path)


def has_rate(tree: Tree, top: Path) -> bool:
    """Return whether an optimizer has a variable for its learning rate."""
    return bool(top) and any((*top, attr(name)) in tree for name in RATES)


def list_optimizers(tree: Tree) -> dict[Path, list[Path]]:
    """Return the leaves of every optimizer, by its path."""
    leaves = list_torch_optimizers(tree)
    listed = {path for own in leaves.values() for path in own}
    objects = list_keras_optimizers(tree)
    return {**leaves, **{top: own for top, own in objects.items() if own and not listed.issuperset(own)}}
