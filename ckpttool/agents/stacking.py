"""Several networks of one structure as one: every array gets a member axis, and rows belong to members.

A stacked policy takes the members' rows one block after the other, obs [K * n, obs_dim], and computes block m
with member m's weights: one batched product instead of K small ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from ckpttool.agents.network import (
    Activation,
    Add,
    Affine,
    Clip,
    Concat,
    Dense,
    Layer,
    LayerNorm,
    Multiply,
    Network,
    Slice,
)
from ckpttool.errors import UsageError

# The kinds that act on the last axis alone: a member axis before the batch changes nothing for them.
STACKABLE: frozenset[type[Layer]] = frozenset(
    {Dense, LayerNorm, Activation, Concat, Slice, Add, Multiply, Affine, Clip}
)
# The one field of theirs that has two axes; all others have one and are the same for every row.
MATRIX = "kernel"


def structure(network: Network) -> Hashable | None:
    """Return what networks must share to be stacked; None for one that cannot be.

    That is the graph, the layers' kinds, shapes and types, activations and epsilons: all but the weights.
    """
    if network.states or not all(_stackable(node.layer) for node in network.nodes):
        return None
    layers = tuple((type(node.layer), node.inputs, _facts(node.layer)) for node in network.nodes)
    return network.members, network.inputs, network.output, layers


def stack(networks: Sequence[Network]) -> Network:
    """Return the networks as one of `members=K`: kernels [K, in, out], all other arrays [K, 1, n].

    One network is its own stack. Raise UsageError where structures differ.
    """
    first, *others = networks
    if not others:
        return first
    found = structure(first)
    if found is None or first.members > 1 or any(structure(other) != found for other in others):
        raise UsageError("networks of different structures are not stacked")
    nodes = tuple(
        replace(node, layer=_joined([network.nodes[number].layer for network in networks]))
        for number, node in enumerate(first.nodes)
    )
    return replace(first, nodes=nodes, members=len(networks))


def member(network: Network, number: int) -> Network:
    """Return one network of a stack."""
    if network.members == 1:
        return network
    alone = network.with_arrays(lambda name, array: array[number] if name == MATRIX else array[number, 0])
    return replace(alone, members=1)


def _stackable(layer: Layer) -> bool:
    held = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return type(layer) in STACKABLE and all(
        value.ndim == (2 if name == MATRIX else 1)
        for name, value in held.items()
        if isinstance(value, np.ndarray)
    )


def _facts(layer: Layer) -> Hashable:
    values = [getattr(layer, field.name) for field in fields(layer)]
    return tuple((v.shape, v.dtype.name) if isinstance(v, np.ndarray) else v for v in values)


def _joined(layers: Sequence[Layer]) -> Layer:
    held = {field.name: [getattr(layer, field.name) for layer in layers] for field in fields(layers[0])}
    arrays: dict[str, Any] = {
        name: np.stack(values) if name == MATRIX else np.stack(values)[:, None]
        for name, values in held.items()
        if isinstance(values[0], np.ndarray)
    }
    return replace(layers[0], **arrays) if arrays else layers[0]
