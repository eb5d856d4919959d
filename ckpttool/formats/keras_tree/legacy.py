"""The h5 files of Keras 1 and 2 (and Keras 3's `model.save("x.h5")`): layers and weights named by attributes.

Source: keras/src/legacy/saving/legacy_h5_format.py, save_weights_to_hdf5_group,
load_attributes_from_hdf5_group, save_optimizer_weights_to_hdf5_group; in tf_keras
tf_keras/src/saving/legacy/hdf5_format.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from ckpttool.errors import FormatError
from ckpttool.formats.hdf5 import Dataset, Group, Index
from ckpttool.formats.keras_tree.config import NOTHING, Config
from ckpttool.leaf import Path, Role, attr

TOP = "top_level_model_weights"
# Keras 1 names of what is not trained and of a dense or convolutional layer's two weights.
_BUFFERS = frozenset(("moving_mean", "moving_variance", "running_mean", "running_std", "mean", "variance"))
_OTHER = frozenset(("count", "seed_generator_state", "seed"))
_KERAS1 = {"W": "kernel", "b": "bias"}


class Weight(NamedTuple):
    """One named weight: its layer, its name as saved, its dataset."""

    layer: str
    name: str
    dataset: Dataset


def is_legacy(index: Index) -> bool:
    """Say whether the file's root, or its group of weights, names its layers."""
    return _named(index.groups[""]) or (
        "model_weights" in index.groups and _named(index.groups["model_weights"])
    )


def _named(group: Group) -> bool:
    return "layer_names" in group.attributes or "layer_names0" in group.attributes


def names(group: Group, attribute: str) -> list[str]:
    """Return a list of names; one longer than an HDF5 attribute may be is in pieces numbered from 0.

    Raise FormatError for an attribute that is something else: Keras would make other names of it.
    """
    if attribute in group.attributes:
        return _list(group, attribute)
    found: list[str] = []
    number = 0
    while f"{attribute}{number}" in group.attributes:
        found += _list(group, f"{attribute}{number}")
        number += 1
    return found


def _list(group: Group, attribute: str) -> list[str]:
    found = group.attributes[attribute]
    if not isinstance(found, list):
        raise FormatError(f"attribute {attribute} of group /{group.path[:200]} is not a list of names")
    return found


def top(index: Index) -> str:
    """Return the path of the group that holds the layers ("" is the root), as Keras chooses it."""
    below = "layer_names" not in index.groups[""].attributes and "model_weights" in index.groups
    return "model_weights" if below else ""


def weights(index: Index) -> Iterator[Weight]:
    """Go through the model's weights in the attributes' order; raise FormatError for one that is absent."""
    group = index.groups[top(index)]
    prefix = f"{group.path}/" if group.path else ""
    listed = list(dict.fromkeys(names(group, "layer_names")))
    if TOP not in listed and prefix + TOP in index.groups:
        listed.append(TOP)
    for layer in listed:
        inside = index.groups.get(prefix + layer)
        if inside is None:
            raise FormatError(f"layer {layer[:200]} is named but not in the file")
        for name in dict.fromkeys(names(inside, "weight_names")):
            yield Weight(layer, name, _dataset(index, f"{prefix}{layer}/{name}"))


def optimizer(index: Index) -> list[tuple[str, Dataset]]:
    """Return the optimizer's variables by name in their order."""
    group = index.groups.get("optimizer_weights")
    if group is None:
        return []
    return [
        (n, _dataset(index, f"optimizer_weights/{n}")) for n in dict.fromkeys(names(group, "weight_names"))
    ]


def _dataset(index: Index, path: str) -> Dataset:
    path = index.same.get(path, path)
    found = index.datasets.get(path)
    if found is None:
        raise FormatError(f"weight {path[:200]} is named but not in the file")
    return found


def path_of(weight: Weight, siblings: Set[str]) -> Path:
    """Return a weight's path: the layer, then its name without the layer's own and without `:0`.

    `siblings` are the names of the layer's weights.
    """
    parts = weight.name.removesuffix(":0").split("/")
    if weight.layer in parts[:-1]:
        # A subclassed model's own name comes first: agent/dense_2/kernel in layer dense_2.
        parts = parts[parts.index(weight.layer) + 1 :]
    elif parts[-1].startswith(f"{weight.layer}_"):
        parts[-1] = parts[-1][len(weight.layer) + 1 :]
        # Keras 1 wrote the two names with Theano, where nothing is put behind them.
        old = {f"{weight.layer}_{name}" for name in _KERAS1}
        both = {name.removesuffix(":0") for name in siblings} == old
        parts[-1] = _KERAS1.get(parts[-1], parts[-1]) if both else parts[-1]
    return tuple(map(attr, parts if weight.layer == TOP else (weight.layer, *parts)))


def role_of(path: Path) -> Role:
    """Return what a weight is for, by its name."""
    last = str(path[-1].value)
    return "buffer" if last in _BUFFERS else "other" if last in _OTHER else "parameter"


class Settings:
    """A model's configuration, asked by the paths of its weights."""

    def __init__(self, root: Config) -> None:
        """Know the model; its layers are looked up as they are asked for."""
        self._known: dict[Path, Config] = {(): root}
        self._below: dict[Path, dict[str | None, Config]] = {}

    def down_to(self, path: Path) -> Iterator[tuple[Path, Config]]:
        """Go from the model to the layer that holds a weight, as far as the configuration names them."""
        for depth in range(len(path)):
            at = path[:depth]
            if at not in self._known:
                self._known[at] = self._layer(path[: depth - 1], str(path[depth - 1].value))
            if self._known[at].cls is None:
                return
            yield at, self._known[at]

    def _layer(self, parent: Path, name: str) -> Config:
        if parent not in self._below:
            self._below[parent] = {each.name: each for each in self._known[parent].layers()}
        return self._below[parent].get(name, NOTHING)
