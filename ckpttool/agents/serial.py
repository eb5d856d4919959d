"""A network on its way to another process: a JSON document and an npz of its arrays, nothing pickled."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, BinaryIO

import numpy as np

from ckpttool.agents import network as kinds
from ckpttool.agents.network import Layer, Network, Node, StateSlot
from ckpttool.errors import FormatError

LAYERS: dict[str, type[Layer]] = {
    kind.__name__: kind
    for kind in (
        kinds.Dense,
        kinds.LayerNorm,
        kinds.Activation,
        kinds.Concat,
        kinds.Flatten,
        kinds.Affine,
        kinds.Clip,
        kinds.Transpose,
        kinds.Slice,
        kinds.Add,
        kinds.Multiply,
        kinds.Convolution,
    )
}


def write(network: Network, file: BinaryIO) -> dict[str, Any]:
    """Write the arrays to `file` as an npz; return the rest as a document for JSON."""
    arrays: dict[str, np.ndarray] = {}
    document = taken_apart(network, arrays)
    np.savez(file, allow_pickle=False, **arrays)
    return document


def taken_apart(network: Network, arrays: dict[str, np.ndarray], prefix: str = "") -> dict[str, Any]:
    """Put the arrays into `arrays` under names that begin with `prefix`; return the rest for JSON."""
    nodes = [_node(f"{prefix}{number}.", node, arrays) for number, node in enumerate(network.nodes)]
    return {
        "inputs": [list(given) for given in network.inputs],
        "nodes": nodes,
        "output": network.output,
        "states": [[slot.name, list(slot.shape), slot.value] for slot in network.states],
        "members": network.members,
    }


def read(document: dict[str, Any], file: BinaryIO) -> Network:
    """Return the network of a document and its npz; raise FormatError if they are no network."""
    with np.load(file, allow_pickle=False) as arrays:
        return put_together(document, arrays)


def put_together(document: dict[str, Any], arrays: Any) -> Network:
    """Return the network of a document and arrays by name; raise FormatError if they are no network."""
    try:
        return Network(
            inputs=tuple((str(name), _frozen(width)) for name, width in document["inputs"]),
            nodes=tuple(Node(_layer(node, arrays), tuple(node["inputs"])) for node in document["nodes"]),
            output=int(document["output"]),
            states=tuple(StateSlot(name, tuple(shape), value) for name, shape, value in document["states"]),
            members=int(document["members"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"a network's document is incomplete: {error!r}") from None


def _node(prefix: str, node: Node, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    values = {field.name: getattr(node.layer, field.name) for field in fields(node.layer)}
    held = {prefix + name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    arrays.update(held)
    plain = {name: _plain(value) for name, value in values.items() if prefix + name not in held}
    return {
        "layer": type(node.layer).__name__,
        "inputs": list(node.inputs),
        "plain": plain,
        "arrays": {name.removeprefix(prefix): name for name in held},
    }


def _plain(value: Any) -> Any:
    """Return a number of numpy's as Python's, which JSON knows."""
    return value.item() if isinstance(value, np.generic) else value


def _layer(node: dict[str, Any], arrays: Any) -> Layer:
    held = {name: arrays[key] for name, key in node["arrays"].items()}
    plain = {name: _frozen(value) for name, value in node["plain"].items()}
    return LAYERS[node["layer"]](**plain, **held)


def _frozen(value: Any) -> Any:
    """Return JSON's lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
