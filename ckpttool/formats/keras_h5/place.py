"""Gives every leaf of a tree its place in a `.weights.h5` file: the group of its object and its number there.

Source: keras/src/saving/saving_lib.py, _save_state and _save_container_state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.formats.keras_h5.optimizers import Slots
from ckpttool.formats.keras_tree.classes import PARTS, snake
from ckpttool.formats.keras_tree.optimizers import class_of
from ckpttool.leaf import Key, Leaf, Path, attr, display
from ckpttool.tree import Tree

# The order in which Keras layers create their variables; no layer has two that this order would swap.
_ORDER = (
    *("embeddings", "kernel", "depthwise_kernel", "pointwise_kernel", "recurrent_kernel", "gamma", "alpha"),
    *("scale", "bias", "beta", "mean", "moving_mean", "variance", "moving_variance", "count", "state"),
)
_RANK = {name: rank for rank, name in enumerate(_ORDER)}
# Layers that only these variables have, and recurrent ones by the gates of their cells.
_BY_NAMES = {
    frozenset(("embeddings",)): "embedding",
    frozenset(("alpha",)): "p_re_lu",
    frozenset(("mean", "variance", "count")): "normalization",
}
_CELL, _BY_GATES = "cell", {1: "simple_rnn", 3: "gru", 4: "lstm"}
_CONVOLUTIONS = {2: "dense", 3: "conv1d", 4: "conv2d", 5: "conv3d"}
# tf.train.Checkpoint's edges to a Keras model's layers (keras/src/models/sequential.py, functional.py).
_SEQUENCES = ("_operations", "_layers")
_INNER = "_functional"
# An attention's dense layers, which its checkpoints name by private attributes and its files by public ones.
_PROJECTIONS = frozenset(f"_{name}" for name in PARTS if name.endswith("_dense"))
COUNTER = "save_counter"
_OPTIMIZER = (attr("optimizer"),)
LAYERS = "layers"


class Placed(NamedTuple):
    """Where everything goes: datasets by their path in order, and each object's group with its name.

    An object has the group of its own attribute. Keras itself saves one whose attribute sorts behind `layers`
    as one of the model's layers, by class and number. It does not find it there, and looks under the
    attribute again (saving_lib.py, _load_state); a number that were wrong would load another layer's weights.
    `slots` says of an optimizer's group what each of its variables is (keras_tree.optimizers, listed_leaves).
    """

    datasets: dict[str, Leaf]
    groups: dict[str, str | None]
    slots: dict[str, list[str]]


def placed(tree: Tree, root: str | None = None) -> Placed:
    """Return the place of every leaf; raise UnsupportedError for the first that has none.

    A tree that was read from a `.weights.h5` keeps the places that it had. Of any other tree, modules become
    groups by their attributes, numbered modules the layers of a Sequential model. With `root`, the model is
    what stands below that attribute, and tf.train.Checkpoint's own count of saves is left out. Without such
    an attribute, a checkpoint of one network is that network's file, and its optimizer is `optimizer`: what
    `Checkpoint(net=model, opt=opt)` saved is what `model.load_weights` takes.
    """
    for path, value in tree.plain():
        raise UnsupportedError(
            f"a .weights.h5 file holds tensors only, not {type(value.value).__name__}", path=display(path)
        )
    for path, leaf in tree.tensors():
        if leaf.dtype == "string":
            raise UnsupportedError("Keras keeps no strings in a .weights.h5 file", path=display(path))
    top = tree.containers.get(())
    if top is not None and isinstance(top.state, dict) and top.state.get("group") == "":
        return _as_it_was(tree)
    return _Places(tree, root).placed()


def _as_it_was(tree: Tree) -> Placed:
    groups: dict[str, str | None] = {}
    for container in tree.containers.values():
        state = container.state if isinstance(container.state, dict) else {}
        group, name = state.get("group"), state.get("layer")
        if isinstance(group, str):
            groups[group] = name if isinstance(name, str) else None
    datasets: dict[str, Leaf] = {}
    for path, leaf in tree.tensors():
        if leaf.key in datasets:
            raise UnsupportedError("two tensors have the same place in the file", path=display(path))
        datasets[leaf.key] = leaf
        if leaf.role == "counter" and path not in tree.containers and leaf.key.endswith("/vars/0"):
            groups.setdefault(leaf.key.removesuffix("/vars/0"), str(path[-1].value))
    places = {path: leaf.key for path, leaf in tree.tensors()}
    return Placed(datasets, groups, _slots(datasets, places))


def _slots(datasets: dict[str, Leaf], places: Mapping[Path, str]) -> dict[str, list[str]]:
    """Return of every group that holds slots what its variables are; `places` are the leaves' datasets."""
    found: dict[str, dict[int, str]] = {}
    # Keras numbers them without gaps: a larger number than there are datasets is none of its own.
    numbers = {str(number): number for number in range(len(datasets))}
    for place, leaf in datasets.items():
        group, _, number = place.rpartition("/vars/")
        owner = places.get(leaf.of) if leaf.of is not None else None
        if leaf.role == "slot" and owner is not None and leaf.slot and number in numbers:
            found.setdefault(group, {})[numbers[number]] = f"{leaf.slot}/{owner}"
    return {
        group: [members.get(number, "") for number in range(max(members) + 1)]
        for group, members in found.items()
        if max(members) < len(datasets)
    }


class _Places:
    """The places of a tree that never was a Keras file."""

    def __init__(self, tree: Tree, root: str | None) -> None:
        self.tree = tree
        self.paths = {path: path for path, _ in tree.tensors()}
        if () in self.paths:
            raise UnsupportedError("a tensor without a name has no place in a file of Keras")
        self.alone = False
        if root is not None:
            alone = None if any(path[0].value == root for path in self.paths) else self._alone()
            self.alone, root = alone is not None, alone or root
            self.paths = {
                path: path[1:] if path[0].value == root else path
                for path in self.paths
                if path[-1].value != COUNTER
            }
        self.names = {path: _cleaned(moved) for path, moved in self.paths.items()}
        self.slots = Slots({path: self._leaf(path) for path in self.paths}, self.names)
        self.modules: dict[Path, dict[str, Leaf]] = {}
        self.groups: dict[Path, str] = {(): ""}

    def _alone(self) -> str | None:
        """Return the attribute of a tf.train.Checkpoint that holds its one network."""
        if not any(len(path) == 1 and path[0].value == COUNTER for path in self.paths):
            return None
        weights = [path for path in self.paths if self._leaf(path).role in ("parameter", "buffer")]
        tops = {str(path[0].value) for path in weights}
        # A layer that is itself an attribute of the model has its variables right below.
        return tops.pop() if len(tops) == 1 and all(len(path) > 2 for path in weights) else None

    def _leaf(self, path: Path) -> Leaf:
        leaf = self.tree[path]
        assert isinstance(leaf, Leaf)  # noqa: S101  # `paths` are the tensors' paths
        return leaf

    def placed(self) -> Placed:
        """Return the places; optimizers come last, as they are not part of the model's variables."""
        below: dict[Path, dict[Key, None]] = {}
        for path, name in self.names.items():
            leaf = self._leaf(path)
            if self.slots.owns(path):
                continue
            if leaf.role == "slot":
                raise UnsupportedError(
                    "this slot belongs to no optimizer that is complete", path=display(path)
                )
            module = name if leaf.role == "counter" else name[:-1]
            self.modules.setdefault(module, {})[str(name[-1].value)] = leaf
            for depth in range(len(module)):
                below.setdefault(module[:depth], {})[module[depth]] = None
        self._name_groups(below)
        datasets: dict[str, Leaf] = {}
        groups: dict[str, str | None] = {"": None}
        for module, members in self.modules.items():
            group = self.groups[module]
            groups[group] = str(module[-1].value) if module else "model"
            for number, leaf in enumerate(_ordered(members)):
                datasets[f"{group}/vars/{number}".lstrip("/")] = leaf
        # The file's order, not the tree's: a bias may come before its kernel there.
        position = {id(leaf): number for number, leaf in enumerate(datasets.values())}
        for at, leaves in self.slots.complete(position):
            at = _OPTIMIZER if self.alone and len(self.slots.slots) == 1 else at
            group = "/".join(_word(step) for step in at)
            groups[group] = self._optimizer_name(at, leaves[0]) or "optimizer"
            for number, leaf in enumerate(leaves):
                datasets[f"{group}/vars/{number}"] = leaf
        where = {id(leaf): place for place, leaf in datasets.items()}
        places = {path: where[id(self._leaf(path))] for path in self.paths if id(self._leaf(path)) in where}
        return Placed(datasets, groups, _slots(datasets, places))

    @staticmethod
    def _optimizer_name(at: Path, counter: Leaf) -> str | None:
        """Return what Keras calls the optimizer, as in its counter's name (`adam_1/iteration`)."""
        name = (counter.name or "").partition("/")[0]
        return name if class_of(name) is not None else str(at[-1].value) if at else None

    def _name_groups(self, below: dict[Path, dict[Key, None]]) -> None:
        for parent, steps in below.items():
            self._name_below(parent, list(steps), below)

    def _name_below(self, parent: Path, steps: list[Key], below: dict[Path, dict[Key, None]]) -> None:
        # A parent is met before what is below it: its own group has its name.
        base = self.groups[parent]
        numbered = all(_is_number(step) for step in steps)
        counts: dict[str, int] = {}
        for step in steps:
            path = (*parent, step)
            word = _word(step)
            if numbered:
                stem = self._class(path, below)
                if stem is None:
                    raise UnsupportedError(
                        "a .weights.h5 file names what a list holds by its class, and the source has none",
                        path=display(path),
                        hint="--to tf keeps the numbers of lists",
                    )
                number = counts.get(stem, 0)
                counts[stem] = number + 1
                word = f"{stem}_{number}" if number else stem
                container = self.tree.containers.get(parent)
                listed = container is not None and container.kind in ("list", "tuple")
                word = word if listed else f"{LAYERS}/{word}"
            self.groups[path] = f"{base}/{word}" if base else word

    def _class(self, path: Path, below: dict[Path, dict[Key, None]]) -> str | None:
        """Return the class of a module in snake case: what the tree says, or its variables do."""
        container = self.tree.containers.get(path)
        if container is not None and container.kind == "module" and container.name:
            return snake(container.name)
        members = self.modules.get(path, {})
        names = {name.removeprefix("_") for name in members}
        if "kernel" in names and names <= {"kernel", "bias"}:
            rank = next(len(leaf.shape) for name, leaf in members.items() if name.endswith("kernel"))
            if rank in _CONVOLUTIONS:
                return _CONVOLUTIONS[rank]
        if {"moving_mean", "moving_variance"} <= names:
            return "batch_normalization"
        if names and names <= {"gamma", "beta"}:
            return "layer_normalization"
        if not members and below.get(path) and all(_is_number(step) for step in below[path]):
            return "sequential"
        if not members:
            return self._recurrent((*path, attr(_CELL)))
        return _BY_NAMES.get(frozenset(names))

    def _recurrent(self, cell: Path) -> str | None:
        """Return the class of a recurrent layer, which the gates of its cell tell."""
        members = {name.removeprefix("_"): leaf for name, leaf in self.modules.get(cell, {}).items()}
        if not {"kernel", "recurrent_kernel"} <= members.keys() <= {"kernel", "recurrent_kernel", "bias"}:
            return None
        shape = members["recurrent_kernel"].shape
        gates = [number for number in _BY_GATES if len(shape) == 2 and shape[1] == number * shape[0] > 0]
        return _BY_GATES[gates[0]] if gates else None


def _cleaned(path: Path) -> Path:
    """Return the path without tf.train.Checkpoint's private edges between a model and its layers."""
    return tuple(
        step._replace(value=str(step.value)[1:]) if step.value in _PROJECTIONS else step
        for step in path
        if step.value != _INNER and step.value not in _SEQUENCES
    )


def _is_number(step: Key) -> bool:
    return isinstance(step.value, int) or (isinstance(step.value, str) and step.value.isdecimal())


def _word(step: Key) -> str:
    word = str(step.value)
    if not word or word == "." or "/" in word or "\0" in word:
        raise UnsupportedError("a group of an HDF5 file cannot have this name", path=word[:200])
    return word


def _ordered(members: dict[str, Leaf]) -> Iterable[Leaf]:
    names = [name.removeprefix("_") for name in members]
    if all(name in _RANK for name in names):
        return [
            leaf for _, leaf in sorted(zip(names, members.values(), strict=True), key=lambda m: _RANK[m[0]])
        ]
    # keras/src/layers/layer.py, save_own_variables: trainable variables first.
    return sorted(members.values(), key=lambda leaf: leaf.role != "parameter")
