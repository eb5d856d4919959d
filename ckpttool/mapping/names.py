"""What a layer's tensors are called in the other framework, where nothing but its own name says so.

Keras keeps a recurrent layer's variables in its cell, the two directions of a Bidirectional in layers of
their own, and the projections of an attention in four dense layers; torch has one module each, and one for
several recurrent layers. Sources: keras/src/layers/rnn/bidirectional.py,
keras/src/layers/attention/multi_head_attention.py, torch/nn/modules/rnn.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ckpttool.mapping.layers import Layer
from ckpttool.mapping.modules import Name

_RECURRENT = frozenset(("lstm", "gru", "simple_rnn"))
_DIRECTIONS = re.compile(r"(forward|backward)_(?:layer|lstm|gru|simple_rnn|rnn)(?:_\d+)?")
_REVERSE = "_reverse"

Naming = Callable[[Layer, str], Name]


def _kind(layer: Layer) -> str:
    return layer.kinds[0].name


def torch_names(found: tuple[Layer, ...]) -> Naming:
    """Return how tensors of Keras's layers are called in a state_dict."""
    directions: dict[Name, set[str]] = {}
    for layer in found:
        match = _DIRECTIONS.fullmatch(layer.name[-1]) if layer.name else None
        if match and _kind(layer) in _RECURRENT:
            directions.setdefault(layer.name[:-1], set()).add(match[1])

    def named(layer: Layer, stored: str) -> Name:
        if _kind(layer) not in _RECURRENT:
            return (*layer.name, *stored.split("/"))
        if layer.name and len(directions.get(layer.name[:-1], ())) == 2:
            back = layer.name[-1].startswith("backward")
            return (*layer.name[:-1], f"{stored}_l0{_REVERSE if back else ''}")
        return (*layer.name, f"{stored}_l0")

    return named


def tensorflow_names(found: tuple[Layer, ...]) -> Naming:
    """Return how tensors of torch's layers are called below Keras's objects."""
    parts: dict[Name, set[str]] = {}
    for layer in found:
        if layer.part:
            parts.setdefault(layer.name, set()).add(layer.part)

    def named(layer: Layer, stored: str) -> Name:
        if _kind(layer) == "attention":
            projection, name = stored.split("/")
            return (*layer.name, f"_{projection}_dense", name)
        if not layer.part:
            return (*layer.name, *stored.split("/"))
        own = parts[layer.name]
        number = layer.part.removesuffix(_REVERSE)
        owner = layer.name
        if len({part.removesuffix(_REVERSE) for part in own}) > 1:
            owner = (*owner[:-1], f"{owner[-1]}_{number}") if owner else (number,)
        if number + _REVERSE in own:
            owner = (*owner, "backward_layer" if layer.part.endswith(_REVERSE) else "forward_layer")
        return (*owner, "cell", stored)

    return named
