"""Folds the statistics of observations into the layers that take observations: `convert --fold-normalizer`.

`W ((x - mean) / s) + b` is `(W / s) x + (b - W (mean / s))`. A limit of the normalised observations is no
linear function, so statistics that have one are refused. The moments of an optimizer belong to the weights as
they were: for the layers that change they cannot be computed (a second moment of a sum is not that of its
terms), so optimizers stay behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ckpttool.agents.components import widths
from ckpttool.errors import MappingError, UnsupportedError, UsageError
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import NORMALIZER, OPTIMIZERS, Binding, Part
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr
from ckpttool.mapping.parts import is_cut
from ckpttool.mapping.rules import Rule
from ckpttool.sidecar import Sidecar
from ckpttool.source import Inline
from ckpttool.tree import Tree


class Fold(NamedTuple):
    """The rule of a tensor that has become another one by its layer's share of the statistics."""

    made: Leaf
    name: str = "fold statistics"

    def leaf(self, leaf: Leaf | ValueLeaf) -> Leaf | ValueLeaf:  # noqa: ARG002  # it was computed before
        """Return the new tensor."""
        return self.made

    def inverse(self, source: Leaf | ValueLeaf) -> Rule:
        """Raise MappingError: the statistics are in no other place of the target."""
        raise MappingError("folded statistics cannot be taken out again", path=getattr(source, "key", None))


@dataclass(frozen=True, slots=True)
class Folded:
    """An agent without statistics that computes what the one with them did.

    `taken` are the canonical paths of the statistics, `added` biases that the layers did not have.
    """

    binding: Binding
    agent: Tree
    added: Mapping[Path, Leaf | ValueLeaf]
    taken: frozenset[Path]
    note: str


def folded(binding: Binding, agent: Tree, facts: Sidecar) -> Folded:
    """Return the canonical agent with its statistics in the layers that take observations.

    Raise UsageError without statistics, UnsupportedError where they cannot be folded exactly.
    """
    norm = facts.obs_norm
    if norm is None:
        raise UsageError("there are no statistics of observations to fold", hint="--obs-norm FILE gives some")
    if norm.get("clip") is not None:
        raise UnsupportedError(
            "the normalised observations are limited, which no layer does",
            found=f"a limit of {norm['clip']:g}",
            hint="--obs-norm with statistics that have no `clip`, if no observation reaches the limit",
        )
    if binding.fronts:
        raise UnsupportedError("statistics are folded into dense layers alone, and an encoder is before them")
    mean, var = (np.asarray(norm[name], np.float64) for name in ("mean", "var"))
    spread = np.sqrt(var + float(norm.get("epsilon", 1e-8)))
    made: dict[Path, Leaf] = {}
    for part in binding.parts:
        made |= _first_layer(part, agent, mean, spread)
    gone = {path for path in agent if path[0].value in (*OPTIMIZERS, NORMALIZER)}
    states = any(path[0].value in OPTIMIZERS for path in gone)
    taken = frozenset(path for path in gone if path[0] == attr(NORMALIZER))
    if any(move.target in made and is_cut(move.rule) for move in binding.moves.moves):
        raise UnsupportedError("the first layer is stored in one tensor with others: it cannot be folded")
    kept = tuple(
        replace(move, rule=Fold(made[move.target])) if move.target in made else move
        for move in binding.moves.moves
        if move.target not in gone
    )
    added = {path: leaf for path, leaf in made.items() if path not in agent}
    bare = replace(
        binding,
        moves=replace(binding.moves, moves=kept),
        facts=binding.facts._replace(norm=None),
    )
    leaves = {path: leaf for path, leaf in agent.items() if path not in gone}
    note = f"the statistics of {len(mean)} observations are part of the first layers"
    more = "; optimizers stay behind, because their moments belong to the former weights" if states else ""
    return Folded(bare, Tree({**leaves, **made}), added, taken, note + more)


def _first_layer(part: Part, agent: Tree, mean: np.ndarray, spread: np.ndarray) -> dict[Path, Leaf]:
    """Return the kernel and bias that take observations as they are, none for a network of another input."""
    if part.layers[0].kind != "dense":
        raise UnsupportedError(f"{part.title} begins with a norm, into which nothing is folded")
    inputs, _ = widths(agent, part)
    if inputs < len(mean) or (inputs != len(mean) and part.component.partition("_")[0] != "critic"):
        raise UnsupportedError(
            f"{part.title} takes something else than the observations",
            expected=f"{len(mean)} inputs",
            found=str(inputs),
        )
    paths = [canonical.weight(part, 0, name) for name in ("kernel", "bias")]
    kernel, bias = (agent.get(path) for path in paths)
    if not isinstance(kernel, Leaf):
        raise UnsupportedError(f"{part.title} has no kernel to fold statistics into")
    weights = kernel.array().astype(np.float64)
    start = bias.array().astype(np.float64) if isinstance(bias, Leaf) else np.zeros(weights.shape[1])
    # Actions that a critic takes come after the observations, and are not normalised.
    rows = weights[: len(mean)] / spread[:, None]
    found = {
        paths[0]: (kernel, np.concatenate([rows, weights[len(mean) :]])),
        paths[1]: (bias if isinstance(bias, Leaf) else kernel, start - mean @ rows),
    }
    return {path: _leaf(leaf, numbers) for path, (leaf, numbers) in found.items()}


def _leaf(leaf: Leaf, numbers: np.ndarray) -> Leaf:
    if leaf.dtype not in ("float32", "float64"):
        raise UnsupportedError(f"statistics are not folded into weights of type {leaf.dtype}", path=leaf.key)
    data = np.ascontiguousarray(numbers, leaf.dtype).tobytes()
    return replace(leaf, shape=numbers.shape, source=Inline(data))
