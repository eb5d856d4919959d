"""What layers of a source and of a target have in common: their names' steps, and what each could be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf, Path
from ckpttool.mapping.cautions import settings
from ckpttool.mapping.kinds import Kind
from ckpttool.mapping.layer_names import counted_by_framework, numbers, steps_of_part
from ckpttool.mapping.layers import Layer, canonical
from ckpttool.mapping.modules import TITLE
from ckpttool.mapping.scopes import Candidate, Signature
from ckpttool.tree import Tree

BARE = "tensor"
STATES = ("parameter", "buffer")
# Their lengths follow from the others', or one framework does without them.
_SMALL = frozenset(("bias", "bias_input", "bias_recurrent"))
_NORMS = frozenset(("batch_norm", "layer_norm", "rms_norm"))


class Side(NamedTuple):
    """One side's layers, then its tensors that are in no layer; `candidates` are both in that order."""

    tree: Tree
    layers: tuple[Layer, ...]
    bare: tuple[Path, ...]
    candidates: tuple[Candidate, ...]

    def title(self, number: int) -> str:
        """Return the name of a layer or tensor as people read it."""
        if number < len(self.layers):
            return self.layers[number].title
        return self.tree.names[self.bare[number - len(self.layers)]]

    def spelled(self, number: int) -> str:
        """Return what a layer could be, in words."""
        said = self.candidates[number].signatures
        if not said and number < len(self.layers):
            why = next((kind.refused for kind in self.layers[number].kinds if kind.refused), None)
            return f"no known kind: {why.replace(TITLE, self.title(number))}" if why else "no known kind"
        return " or ".join(sorted(" ".join(map(_word, signature)) for signature in said))


def _word(part: object) -> str:
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
        return f"{part[0]} {list(part[1])}"
    return str(list(part)) if isinstance(part, tuple) else str(part)


def side(tree: Tree, found: tuple[Layer, ...], *, in_order: bool = True) -> Side:
    """Return a tree's layers and other tensors as candidates for a match; slots and counters are none.

    `in_order` says that the tree lists its layers in the order of its model.
    """
    ranks = {n: n for n in range(len(found))} if in_order else _ranks(tree, found)
    within = {path for layer in found for path in layer.tensors.values()}
    bare = tuple(p for p, leaf in tree.tensors() if leaf.role in STATES and p not in within)
    directions: dict[tuple[str, ...], set[bool]] = {}
    for layer in found:
        if layer.part:
            directions.setdefault(layer.name, set()).add(layer.part.endswith("_reverse"))
    keys = [leaf.key for _, leaf in tree.tensors() if "/vars/" in leaf.key]
    candidates = [
        Candidate(
            (*layer.name, *steps_of_part(layer.part, both=len(directions.get(layer.name, ())) > 1)),
            frozenset(s for kind in layer.kinds if (s := signature(tree, layer, kind)) is not None),
            layer.title,
            ranks.get(number, -1),
            *_call(layer),
            settings=_telling(layer),
            listed=_is_saved_by_place(tree, layer, keys),
        )
        for number, layer in enumerate(found)
    ]
    for path in bare:
        leaf = tree[path]
        shape = leaf.shape if isinstance(leaf, Leaf) else ()
        candidates.append(Candidate(tuple(tree.names[path].split("/")), frozenset({(BARE, shape)})))
    return Side(tree, found, bare, tuple(candidates))


def _call(layer: Layer) -> tuple[int, int]:
    """Return the number of the layer's call and the calls before it as a file's configuration lists them."""
    number, after = (layer.about.settings.get(name) for name in ("call_number", "called_after"))
    try:
        return (number, int(str(after), 16)) if isinstance(number, int) and not layer.part else (-1, 0)
    except ValueError:
        return -1, 0


def _telling(layer: Layer) -> frozenset[tuple[str, object]]:
    """Return the settings that two layers have in common if they are one; epsilons are often changed."""
    return frozenset(
        (name, value) for name, value in settings(layer).items() if name not in ("epsilon", "norm")
    )


def _is_saved_by_place(tree: Tree, layer: Layer, keys: Sequence[str]) -> bool:
    """Say whether a `.keras` or `.weights.h5` file holds the layer under its place in a list of its model.

    An attribute's name is no place. Where some layers of a model have such names, its own list has the others
    in the order in which the program made them (keras/src/saving/saving_lib.py, _walk_saveable).
    """
    own = {leaf.key for path in layer.tensors.values() if isinstance(leaf := tree[path], Leaf)}
    for holder in {key.rpartition("/vars/")[0] for key in own}:
        outer, _, step = holder.rpartition("/")
        if not counted_by_framework(step):
            return False
        model = outer.removesuffix("layers")
        if model != outer and any(k.startswith(model) and not k.startswith(outer) for k in keys):
            return False
    return all("/vars/" in key for key in own)


def _ranks(tree: Tree, found: tuple[Layer, ...]) -> dict[int, int]:
    """Return the order of layers that a `.weights.h5` of Keras counts by class, as its model lists them.

    The groups of the file are numbered in that order, the layers' own names as they were made
    (keras/src/saving/saving_lib.py, _save_container_state).
    """
    stored: list[tuple[tuple[tuple[int, ...], ...], int]] = []
    for number, layer in enumerate(found):
        leaf = tree[next(iter(layer.tensors.values()))]
        if not isinstance(leaf, Leaf) or "/vars/" not in leaf.key:
            return {}
        stored.append((numbers(tuple(leaf.key.rpartition("/vars/")[0].split("/"))), number))
    return {number: rank for rank, (_, number) in enumerate(sorted(stored))}


def signature(tree: Tree, layer: Layer, kind: Kind) -> Signature | None:
    """Return what two layers that may be one have in common: the kind and the shapes of its large tensors."""
    if kind.refused is not None:
        return None
    try:
        found = canonical(tree, layer, kind)
    except MappingError:
        return None
    shapes = {n: leaf.shape for n, leaf in found.items() if n not in _SMALL and not n.endswith("_bias")}
    if kind.name == "depthwise" and "kernel" in shapes:
        # Channels times multiplier: how they divide only one framework tells.
        *space, channels, multiplier = shapes["kernel"]
        return kind.name, (*space, channels * multiplier)
    if kind.name in _NORMS:
        # A norm may lack its scale or its offset, and is known by either.
        return kind.name, next((leaf.shape for leaf in found.values()), ())
    return kind.name, *sorted(shapes.items())
