"""The skeleton of a target model: its modules by class, their tensors, and where a file keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool.activations import UNKNOWN, Order
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr
from ckpttool.mapping.kinds import Told
from ckpttool.mapping.layers import Choice, Layer, layers
from ckpttool.source import Shape
from ckpttool.tree import Container, Tree

Name = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One module of the model: its name, its framework's class, plain settings, its own tensors' paths.

    `flatten` is the image (channels last) that the module takes as one axis; () says that it takes none, None
    that nobody knows. `orders` are those of the features that it takes ("in") and makes ("out"), None for
    what could not be followed. `call` is the number of the module's first call, -1 where no call was seen,
    and `after` has the bits of the calls whose results it takes.
    """

    name: Name
    cls: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Path]
    flatten: Shape | None = None
    orders: Mapping[str, Order | None] = field(default_factory=dict)
    call: int = -1
    after: int = 0


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model as its own framework saves it: `tree` is what it wrote, `parts` its modules in their order."""

    framework: str
    tree: Tree
    parts: Sequence[Part]

    def named(self) -> tuple[Tree, Mapping[Path, Path]]:
        """Return the tensors by module and own name, each with its class, and their paths in `tree`."""
        leaves: dict[Path, Leaf | ValueLeaf] = {}
        places: dict[Path, Path] = {}
        containers: dict[Path, Container] = {}
        for part in self.parts:
            above = tuple(map(attr, part.name))
            containers[above] = Container("module", part.cls, dict(part.settings))
            for name, place in part.tensors.items():
                leaves[(*above, attr(name))] = self.tree[place]
                places[(*above, attr(name))] = place
        return Tree(leaves, containers=containers), places

    def layers(
        self,
        tree: Tree,
        given: Sequence[Choice] = (),
        *,
        classes: bool = True,
        composed: Iterable[str] = (),
    ) -> tuple[Layer, ...]:
        """Return the layers of `named`'s tree with all that the model's classes tell of them.

        See layers.layers for `given`, `classes` and `composed`.
        """
        parts = {part.name: part for part in self.parts}
        found = layers(tree, self.framework, given, classes=classes, composed=composed)
        return tuple(_told(layer, tree, parts) for layer in found)


def _told(layer: Layer, tree: Tree, parts: Mapping[Name, Part]) -> Layer:
    part = parts.get(layer.name)
    heads = part.settings.get("num_heads") if part is not None else None
    shapes = {name: leaf.shape for name, leaf in layer.group(tree).items()}
    told = Told(heads if isinstance(heads, int) else None, None, shapes)
    if part is not None:
        takes, makes = (
            part.orders[side] or UNKNOWN if side in part.orders else None for side in ("in", "out")
        )
        told = told._replace(flatten=part.flatten, takes=takes, makes=makes)
    return layer._replace(told=told)
