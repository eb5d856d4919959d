"""What stands between the layers of a chain, as far as names, a graph or a configuration record it.

A state_dict holds no activations, sums or norms without parameters. torch's Sequential numbers all of its
modules, so gaps between the numbers of layers show where something stands and where nothing does. A
SavedModel lists the operations of its functions, a .keras file the activation of each layer, a pickled module
the classes of all its parts.
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
from ckpttool.layouts.whole_module import activation_of
from ckpttool.leaf import Path, ValueLeaf, attr, index
from ckpttool.ledger import Entry, unknown
from ckpttool.tree import Tree

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
    if binding.layout == NO_LAYOUT:
        return binding
    binding = _pickled(binding, checkpoint.tree)
    if {"hidden", "activations"} & binding.facts.said.keys():
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


_TORCH = "torch.nn.modules."
_ACTIVATION = f"{_TORCH}activation."
# Parts of a pickled module without an effect on what is played, and those whose weights are layers'.
_NEUTRAL = re.compile(
    re.escape(_TORCH)
    + r"(container\.\w+|linear\.(Linear|Identity)|normalization\.LayerNorm|dropout\.\w+|flatten\.\w+)"
)
_MODULES = attr("_modules")
_TENSORS = (attr("_parameters"), attr("_buffers"))


def _pickled(binding: Binding, tree: Tree) -> Binding:
    """Return the binding with the activations that are parts of a policy that was pickled as a module.

    An activation between two layers of one Sequential is in its place by the order of the file. Of other
    modules only the classes are known: one kind is that of all hidden layers, several are of unknown places.
    """
    part = next((part for part in binding.parts if part.acts), None)
    if part is None or part.program is not None:
        return binding
    weights = [
        move.source[:-2]
        for number in range(len(part.layers))
        for move in binding.moves.moves
        if move.target[: len(part.prefix) + 1] == (*part.prefix, index(number))
        and move.source[-2:-1]
        and move.source[-2] in _TENSORS
    ]
    layers = list(dict.fromkeys(weights))
    if len(layers) < 2:
        return binding
    module = layers[0]
    while any(layer[: len(module)] != module for layer in layers) or module in layers:
        module = module[:-2]
    classes = {
        path: container.name
        for path, container in tree.containers.items()
        if container.name
        and len(path) > len(module)
        and len(path) % 2 == len(module) % 2
        and path[: len(module)] == module
        and all(step == _MODULES for step in path[len(module) :: 2])
    }
    if not classes:
        return binding
    functions = {path: name for path, name in classes.items() if name.startswith(_ACTIVATION)}
    binding = binding.entered(*_own_parts(classes, part.component))
    strange = sorted({name for path, name in functions.items() if _function(tree, path, name) is None})
    if strange:
        return binding.refused(part.component, *strange)
    if not functions or {"hidden", "activations"} & binding.facts.said.keys():
        return binding
    where = "/".join(str(step.value) for step in module if step != _MODULES) or "the pickled module"
    order = list(classes)
    between = [
        [each for each in order[order.index(one) : order.index(two)] if each in functions]
        for one, two in pairwise(layers)
        if one in classes and two in classes
    ]
    facts = binding.facts.without_lack("activation")
    dense = sum(layer.kind == "dense" for layer in part.layers) - 1
    placed = [_function(tree, each[0], functions[each[0]]) for each in between if len(each) == 1]
    names = tuple(name for name in placed if name is not None)
    if len(names) == dense and all(len(each) < 2 for each in between):
        return replace(binding, facts=facts.read(where, activations=names))
    kinds = {_function(tree, path, name) for path, name in functions.items()}
    # A last tanh is the action's map.
    hidden = kinds - {"tanh"} or kinds
    if len(hidden) == 1 and (name := next(iter(hidden))) is not None:
        return replace(binding, facts=facts.read(where, hidden=name, activations=None))
    listed = ", ".join(sorted(map(str, kinds)))
    several = unknown("activation", f"the activations: {where} has {listed}", decides=True)
    return replace(binding, facts=facts.lacking(several))


def _function(tree: Tree, path: Path, name: str) -> str | None:
    """Return the canonical name of an activation by its class, None for one with another slope or of none."""

    def value(attribute: str) -> object:
        leaf = tree.get((*path, attr(attribute)))
        return leaf.value if isinstance(leaf, ValueLeaf) else None

    return activation_of(name, value)


def _own_parts(classes: Mapping[Path, str], component: str) -> Iterator[Entry]:
    """Yield an entry where a part of a pickled policy is of a class whose code the file does not hold."""
    own = sorted(
        {
            name
            for path, name in classes.items()
            if not _NEUTRAL.fullmatch(name) and not name.startswith((_ACTIVATION, "tianshou.", "torch.nn."))
        }
    )
    joined = [name for name in own if any(map(_RESIDUAL.search, _words(name))) or "Gat" in name]
    if joined:
        value = f"what {some(joined, 3)} computes with its layers"
        yield Entry("cannot be known", "custom code", value, component, decides=True)
    rest = [name for name in own if name not in joined]
    if rest:
        yield Entry("assumed", "custom code", f"{some(rest, 3)} applies its layers one after another")


def _words(name: str) -> tuple[str, ...]:
    """Return the last part of a class's name as words with underscores: ResBlock as res_block."""
    return (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).lower(),)


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
