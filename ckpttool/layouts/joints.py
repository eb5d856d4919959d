"""What stands between the layers of a chain, as far as names, a graph or a configuration record it.

A state_dict holds no activations, sums or norms without parameters. torch's Sequential numbers all of its
modules, so gaps between the numbers of layers show where something stands and where nothing does. A
SavedModel lists the operations of its functions, a .keras file the activation of each layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ckpttool import plugins
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import NotFoundError, UnsupportedError, some
from ckpttool.formats import keras_tree
from ckpttool.layouts import graph_steps
from ckpttool.layouts.canonical import NO_LAYOUT, Binding, Part, PartLayer
from ckpttool.ledger import Entry

_RESIDUAL = re.compile(
    r"(^|_)(res|residual|skip|shortcut|resnet|res_?blocks?|residual_?blocks?)(_?\d+)?(_|$)"
)
_BLOCK = re.compile(r"(^|_)blocks?(_?\d+)?(_|$)")
# Activations of a policy's deviation, which are in the same functions.
_OF_DEVIATIONS = frozenset(("softplus", "sigmoid"))


def joined(binding: Binding) -> Binding:
    """Return the binding with what the names of its layers show of how they are joined.

    Networks that are no chain of layer, norm and activation are refused; what the names leave open is
    assumed. Policies alone have been checked before (layouts/policy_alone.py).
    """
    assumed: dict[str, None] = {}
    table = None if binding.layout == NO_LAYOUT else plugins.find("layouts", binding.layout).load()
    framework = getattr(getattr(table, "TABLE", None), "framework", "")
    if framework == "torch" and binding.layout != NO_LAYOUT:
        for part in binding.parts:
            for refusal in _refusals(part):
                binding = binding.refused(part.component, refusal)
            assumed |= dict.fromkeys(_gaps(part))
    if binding.layout != NO_LAYOUT:
        assumed |= dict.fromkeys(_norms(binding, framework))
    moves = binding.moves
    binding = replace(binding, moves=replace(moves, assumed=(*moves.assumed, *assumed)))
    return binding.entered(*_sums(binding))


def _sums(binding: Binding) -> Iterator[Entry]:
    """Yield an entry where names of a policy's layers are those of residual connections."""
    layers = [layer for part in binding.parts if part.acts for layer in part.layers]
    named = dict.fromkeys("/".join(layer.name) for layer in layers if any(map(_RESIDUAL.search, layer.name)))
    if named:
        value = f"whether {some(list(named), 3)} add their input (a residual connection)"
        yield Entry("cannot be known", "architecture", value, decides=True)
        return
    blocks = dict.fromkeys("/".join(layer.name) for layer in layers if any(map(_BLOCK.search, layer.name)))
    if blocks:
        yield Entry("assumed", "architecture", f"no sums with an earlier layer in {some(list(blocks), 3)}")


def _number(layer: PartLayer) -> int | None:
    return int(layer.name[-1]) if layer.name and layer.name[-1].isdigit() else None


def _distances(part: Part) -> list[tuple[PartLayer, PartLayer, int]]:
    """Return the layers that follow one another in one Sequential, and how far apart their numbers are.

    Numbers without any gap are those of a ModuleList, between whose modules there is code.
    """
    found = []
    for one, two in pairwise(part.layers):
        first, second = _number(one), _number(two)
        if first is not None and second is not None and one.name[:-1] == two.name[:-1]:
            found.append((one, two, second - first))
    gapped = {one.name[:-1] for one, _, distance in found if distance > 1}
    return [each for each in found if each[0].name[:-1] in gapped]


def _refusals(part: Part) -> Iterator[str]:
    for one, two, distance in _distances(part):
        names = f"{'/'.join(one.name)} and {'/'.join(two.name)}"
        if one.kind == "dense" and two.kind == "dense" and distance == 1:
            yield f"no activation between {names}"
        elif one.kind == "dense" and two.kind == "layer_norm" and distance > 1:
            yield f"a layer norm behind the activation, between {names}"


def _gaps(part: Part) -> Iterator[str]:
    numbered = _distances(part)
    number = _number(part.layers[0]) if part.acts and numbered and numbered[0][0] is part.layers[0] else None
    if number:
        name = "/".join(part.layers[0].name)
        yield f"{number} modules without weights before {name}: nothing that acts in evaluation"
    for one, two, distance in numbered:
        most = 2 if one.kind == "dense" or two.kind == "dense" else 1
        if two.kind == "dense" and distance > most:
            names = f"{'/'.join(one.name)} and {'/'.join(two.name)}"
            yield (
                f"{distance - 1} modules without weights between {names}: "
                "one activation, and nothing else that acts in evaluation"
            )


def _norms(binding: Binding, framework: str) -> Iterator[str]:
    """Yield what is assumed of the place of layer norms whose names show none."""
    shown = (
        {two.name for part in binding.parts for _, two, _ in _distances(part)}
        if framework == "torch"
        else set()
    )
    unclear = any(
        two.kind == "layer_norm" and one.kind == "dense" and two.name not in shown
        for part in binding.parts
        for one, two in pairwise(part.layers)
    )
    if unclear:
        yield f"layer norms stand before the activations: habit of layout {binding.layout}"


# --- Activations that a graph or a configuration records ------------------------------------------------


def recorded(binding: Binding, checkpoint: Checkpoint) -> Binding:
    """Return the binding of a layout with the hidden activations that the checkpoint itself records."""
    if binding.layout == NO_LAYOUT or {"hidden", "activations"} & binding.facts.said.keys():
        return binding
    listed = _configured(binding, checkpoint)
    if listed is not None:
        facts = binding.facts.read("the model's configuration", activations=listed)
        return replace(binding, facts=facts)
    found = graph_steps.activations(checkpoint)
    # The action's map has a tanh of its own.
    hidden = found - {"tanh"} - _OF_DEVIATIONS or found & {"tanh"}
    if len(hidden) != 1:
        return binding
    facts = binding.facts.without_lack("activation")
    return replace(binding, facts=facts.read("the SavedModel's graph", hidden=next(iter(hidden))))


def _configured(binding: Binding, checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the activations of the policy's hidden layers by the configurations of layers of their names."""
    part = next((part for part in binding.parts if part.acts), None)
    try:
        document = keras_tree.config_document(checkpoint.format, checkpoint.path)
    except (UnsupportedError, NotFoundError):  # a file that is being written has another name
        return None
    if part is None or document is None:
        return None
    activations = dict(_dense_layers(document))
    hidden = [layer for layer in part.layers if layer.kind == "dense"][:-1]
    found = [activations.get(layer.name[-1]) for layer in hidden if layer.name]
    known = tuple(name for name in found if isinstance(name, str))
    return known if known and len(known) == len(hidden) else None


def _dense_layers(document: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the name and the activation of each dense layer anywhere in a configuration."""
    if depth > 40:
        return
    values: Sequence[Any] = ()
    if isinstance(document, Mapping):
        config = document.get("config")
        if document.get("class_name") == "Dense" and isinstance(config, Mapping):
            name, activation = config.get("name"), config.get("activation")
            if isinstance(name, str):
                yield (
                    name,
                    {"swish": "silu"}.get(activation, activation)
                    if isinstance(activation, str)
                    else activation,
                )
        values = tuple(document.values())
    elif isinstance(document, list):
        values = document
    for value in values:
        yield from _dense_layers(value, depth + 1)
