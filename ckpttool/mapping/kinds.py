"""Layer kinds: what each framework calls a layer's tensors, and which rule takes them to the canonical form.

Canonical names and orientations are TensorFlow's where it has one: dense kernel [in, out]. A kind is
recognised by the names and ranks that stand together under one module, never by a shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckpttool.leaf import Leaf
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Rule


class Weight(NamedTuple):
    """One tensor of a layer: its name here and its name there, its rank, the rule to the canonical form."""

    name: str
    canonical: str
    rank: int
    to_canonical: Rule = KEEP
    optional: bool = False


class Kind(NamedTuple):
    """One way in which a framework stores one kind of layer."""

    name: str
    framework: str
    weights: tuple[Weight, ...]

    def fits(self, group: Mapping[str, Leaf]) -> bool:
        """Say whether these tensors, and no others, make such a layer."""
        names = {weight.name: weight for weight in self.weights}
        return (
            group.keys() <= names.keys()
            and all(w.name in group or w.optional for w in self.weights)
            and all(len(leaf.shape) == names[name].rank for name, leaf in group.items())
        )


KINDS: tuple[Kind, ...] = (
    Kind("dense", "tensorflow", (Weight("kernel", "kernel", 2), Weight("bias", "bias", 1, optional=True))),
    # Sonnet's Linear.
    Kind("dense", "tensorflow", (Weight("w", "kernel", 2), Weight("b", "bias", 1, optional=True))),
    # A torch matrix without a bias may be an embedding, which is not transposed: a layout must say.
    Kind("dense", "torch", (Weight("weight", "kernel", 2, TRANSPOSE), Weight("bias", "bias", 1))),
    Kind("layer_norm", "tensorflow", (Weight("gamma", "scale", 1), Weight("beta", "offset", 1))),
    # Sonnet's LayerNorm.
    Kind("layer_norm", "tensorflow", (Weight("scale", "scale", 1), Weight("offset", "offset", 1))),
    Kind("layer_norm", "torch", (Weight("weight", "scale", 1), Weight("bias", "offset", 1))),
)

# How a kind is spelled when it is written; the first row of a framework that fits.
SPELLING: dict[tuple[str, str], Kind] = {}
for _kind in KINDS:
    SPELLING.setdefault((_kind.framework, _kind.name), _kind)


def recognise(group: Mapping[str, Leaf], framework: str) -> Kind | None:
    """Return the kind of layer that these tensors of one module make, or None."""
    for kind in KINDS:
        if kind.framework == framework and kind.fits(group):
            return kind
    return None
