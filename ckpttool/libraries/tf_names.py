"""Variable names of TensorFlow libraries."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

from ckpttool.core import deferred, limits, plugins
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.dtypes import np
from ckpttool.core.errors import CkpttoolError, NotFoundError, UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.kinds import KERAS_ACTIVATIONS
from ckpttool.core.optimizers import ADAM, RMSPROP, SGD, UNCONVERTED, OptimizerFamily, find_class
from ckpttool.core.sidecar import NO_RESIDUALS, NORMS_BEFORE, LedgerEntry, Sidecar
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, display, index
from ckpttool.formats import tf_object_graph
from ckpttool.formats.tf_bundle import tree_from_graph
from ckpttool.formats.tf_common import VariableInfo, format_object
from ckpttool.formats.tf_object_graph import MARK, slot_optimizer, slot_path
from ckpttool.libraries.optimizers_read import (
    KERAS_SETTINGS,
    POWERS,
    keras_class,
    make_zero_tensor,
    path_texts,
)
from ckpttool.libraries.recognize import PICKLED_MODULES, PICKLED_TENSORS, TORCH_CLASSES, activation_of
from ckpttool.libraries.schema import (
    NO_LAYOUT,
    AgentLayer,
    AgentNetwork,
    RecognizedAgent,
    canonical_weight_path,
)
from ckpttool.mapping.rules import (
    KEEP,
    Label,
    Move,
    Plan,
    Rule,
    Scale,
    Settings,
    ToTensor,
    ToValue,
    object_graph_paths,
)

# Operations between the layers of a chain, if names, a graph or a configuration record them.
#
# A state_dict has no activations, sums or norms without parameters. torch's Sequential numbers all of its
# modules, so gaps between the numbers of layers show where other modules are. A SavedModel lists the
# operations of its functions, a .keras file the activation of each layer, a pickled module the classes of all
# its parts.

_RESIDUAL = deferred.compile(
    r"(^|_)(res|residual|skip|shortcut|resnet|res_?blocks?|residual_?blocks?)(_?\d+)?(_|$)"
)
# Names of layers whose output is multiplied or added to that of another.
_JOINING = deferred.compile(
    rf"{_RESIDUAL.pattern}|(^|_)(gate|gated|gates|gating|highway|bypass|film|glu|swiglu|geglu|attn|attention|carry)"
    r"(_?\d+)?(_|$)"
)
_PROJECTION = deferred.compile(r"(^|_)(proj|projection|branch|adapter|side)(_?\d+)?(_|$)")
_INDEX = deferred.compile(r"[0-9]{1,9}")
_BLOCK = deferred.compile(r"(^|_)blocks?(_?\d+)?(_|$)")
# Activations of a policy's standard deviation, which are in the same functions.
_OF_DEVIATIONS = frozenset(("softplus", "sigmoid"))


def check_connections(
    binding: RecognizedAgent, tree: Tree, recorded: Sidecar | None = None
) -> RecognizedAgent:
    """Return the binding of the checkpoint's tree with facts on how layers are connected, by their names.

    Networks that are not a chain of layer, norm and activation are refused; facts that neither the names nor
    the sidecar decide are assumed. Single policies have been checked before (libraries/single_networks.py).
    """
    assumed: dict[str, None] = {}
    table = None if binding.layout == NO_LAYOUT else plugins.find("layouts", binding.layout).load()
    framework = getattr(getattr(table, "TABLE", None), "framework", "")
    if framework == "torch" and binding.layout != NO_LAYOUT:
        for part in binding.parts:
            for refusal in _list_refusals(part):
                binding = binding.refused(part.component, refusal)
            # Modules of an encoder come before the first layer.
            first, numbered = part.layers[:1], _list_distances(part.layers)
            number = _number(first[0]) if part.acts and numbered and numbered[0][0] is first[0] else None
            if number and part.component not in binding.fronts:
                name = "/".join(first[0].name)
                assumed[f"{number} modules without weights before {name}: no effect in evaluation"] = None
            assumed |= dict.fromkeys(note_gaps(part.layers))
    if binding.layout != NO_LAYOUT:
        assumed |= dict.fromkeys(_note_norms(binding, framework))
    return binding.assuming(*assumed).entered(*_note_residuals(binding, tree, recorded))


def _is_named(pattern: re.Pattern[str], name: tuple[str, ...]) -> bool:
    """Return whether a part of a layer's name has a word of the pattern, in any spelling."""
    return any(pattern.search(word) for each in name for word in _split_words(each))


def find_joined_layers(layers: Sequence[tuple[str, ...]], widths: Sequence[tuple[int, int]]) -> list[str]:
    """Return the dense layers of a chain that names and widths suggest to be added to others, or multiplied.

    `widths` are their inputs and outputs. Layers of one width may be branches: a projection between two
    others, or a block of several layers that ends in the width it begins with.
    """
    found = {
        "/".join(name): None
        for number, (name, (inputs, outputs)) in enumerate(zip(layers, widths, strict=True))
        if _is_named(_JOINING, name)
        or (0 < number < len(layers) - 1 and inputs == outputs and _is_named(_PROJECTION, name))
    }
    blocks: dict[tuple[str, ...], list[int]] = {}
    for number, name in enumerate(layers):
        ends = [at for at, word in enumerate(name[:-1]) if _BLOCK.search(word.lower())]
        for end in ends[:1]:
            # blocks/0/fc1: the number belongs to the block's name.
            end += bool(name[end + 1 : end + 2] and name[end + 1].isdigit() and end + 2 < len(name))
            blocks.setdefault(name[: end + 1], []).append(number)
    for numbers in blocks.values():
        if len(numbers) > 1 and widths[numbers[0]][0] == widths[numbers[-1]][1]:
            found |= dict.fromkeys("/".join(layers[number]) for number in numbers)
    return list(found)


def _note_residuals(binding: RecognizedAgent, tree: Tree, recorded: Sidecar | None) -> Iterator[LedgerEntry]:
    """Yield an entry if a policy's layers may be added to others: by their names, or by their sizes alone."""
    layers = [layer for part in binding.parts if part.acts for layer in part.layers]
    named = dict.fromkeys("/".join(layer.name) for layer in layers if _is_named(_JOINING, layer.name))
    if binding.layout != NO_LAYOUT:
        for dense in (_list_dense(part, binding, tree) for part in binding.parts if part.acts):
            names, widths = [layer.name for layer in dense], [layer.widths for layer in dense]
            named |= dict.fromkeys(find_joined_layers(names, widths))
    if named:
        value = (
            f"whether the output of {abbreviate_list(list(named), 3)} is added to another, or multiplied "
            "(residual connections, gates)"
        )
        yield LedgerEntry("cannot be known", "architecture", value, decides=True)
        return
    blocks = dict.fromkeys("/".join(layer.name) for layer in layers if any(map(_BLOCK.search, layer.name)))
    if not blocks and _is_user_written(binding, recorded):
        parts = (part for part in binding.parts if part.acts)
        blocks = dict.fromkeys(name for part in parts for name in _list_summable(part, binding, tree))
    if blocks:
        yield LedgerEntry("assumed", "architecture", f"{NO_RESIDUALS} in {abbreviate_list(list(blocks), 3)}")


class _DenseLayer(NamedTuple):
    """A dense layer of a policy: its name, its name in the file with its tensor's, its inputs and outputs."""

    name: tuple[str, ...]
    stored: tuple[str, ...]
    widths: tuple[int, int]

    def follows_in_sequential(self, other: _DenseLayer) -> bool:
        """Return whether both are parts of one torch Sequential, whose other parts are between them."""
        (*owner, before, weight), (*own, number, name) = (("", *each.stored) for each in (other, self))
        numbered = weight == name == "weight" and all(map(_INDEX.fullmatch, (before, number)))
        return numbered and owner == own and int(number) - int(before) > 1


def _list_dense(part: AgentNetwork, binding: RecognizedAgent, tree: Tree) -> list[_DenseLayer]:
    moves = {move.target: move for move in binding.moves.moves}
    dense = []
    for position, layer in enumerate(part.layers):
        move = moves.get(canonical_weight_path(part, position, "kernel"))
        leaf = None if move is None else move.rule.leaf(tree[move.source])
        if isinstance(leaf, Leaf) and move is not None:
            stored = tuple(tree.names[move.source].split("/"))
            dense.append(_DenseLayer(layer.name, stored, (leaf.shape[0], leaf.shape[-1])))
    return dense


def _is_user_written(binding: RecognizedAgent, recorded: Sidecar | None) -> bool:
    """Return whether only code that no file contains connects the layers.

    A configuration, a graph and the modules of a Sequential record what follows a layer. So does a sidecar
    that a training program wrote, and one of a conversion for a source whose library or file decides it.
    """
    if {"activations", "hidden"} & binding.facts.origins.keys():
        return False
    source = None if recorded is None else recorded.source
    if recorded is not None and recorded.activations and not recorded.is_assumed("activations"):
        given = source is not None and recorded.is_given("activations")
        if not given:
            return False
    layout = binding.layout if source is None else str(source.get("layout") or NO_LAYOUT)
    if layout == NO_LAYOUT:
        return True
    with contextlib.suppress(UsageError):  # the layout of a package that is not installed here
        table = getattr(plugins.find("layouts", layout).load(), "TABLE", None)
        return bool(getattr(table, "user_written", False))
    return True


def _list_summable(part: AgentNetwork, binding: RecognizedAgent, tree: Tree) -> Iterator[str]:
    """Yield the layers between two of the same width: their output may be added to their input."""
    dense = _list_dense(part, binding, tree)
    widths = [layer.widths[0] for layer in dense[:1]] + [layer.widths[1] for layer in dense]
    for first, last in combinations(range(len(widths)), 2):
        steps = pairwise(dense[first - 1 : last]) if first else ()
        joined = first > 0 and all(two.follows_in_sequential(one) for one, two in steps)
        if widths[first] == widths[last] and not joined:
            yield from ("/".join(layer.name) for layer in dense[first:last])


def _number(layer: AgentLayer) -> int | None:
    return int(layer.name[-1]) if layer.name and layer.name[-1].isdigit() else None


def _list_distances(layers: Sequence[AgentLayer]) -> list[tuple[AgentLayer, AgentLayer, int]]:
    """Return consecutive layers of one Sequential, with the distance of their numbers.

    Numbers without any gap belong to a ModuleList, whose modules are connected by code.
    """
    found = []
    for one, two in pairwise(layers):
        first, second = _number(one), _number(two)
        if first is not None and second is not None and one.name[:-1] == two.name[:-1]:
            found.append((one, two, second - first))
    gapped = {one.name[:-1] for one, _, distance in found if distance > 1}
    return [each for each in found if each[0].name[:-1] in gapped]


def _list_refusals(part: AgentNetwork) -> Iterator[str]:
    for one, two, distance in _list_distances(part.layers):
        names = f"{'/'.join(one.name)} and {'/'.join(two.name)}"
        if one.kind == "dense" and two.kind == "dense" and distance == 1:
            yield f"no activation between {names}"
        elif one.kind == "dense" and two.kind == "layer_norm" and distance > 1:
            yield f"a layer norm after the activation, between {names}"


def note_gaps(layers: Sequence[AgentLayer]) -> Iterator[str]:
    """Yield an assumption for each gap between the numbers of a torch Sequential's layers, in their order."""
    for one, two, distance in _list_distances(layers):
        if distance > 2:
            yield (
                f"{distance - 1} modules without weights between {'/'.join(one.name)} and "
                f"{'/'.join(two.name)}: one activation, the others without effect in evaluation"
            )


def _note_norms(binding: RecognizedAgent, framework: str) -> Iterator[str]:
    """Yield assumptions on the position of layer norms whose names do not show it."""
    shown = (
        {two.name for part in binding.parts for _, two, _ in _list_distances(part.layers)}
        if framework == "torch"
        else set()
    )
    unclear = any(
        two.kind == "layer_norm" and one.kind == "dense" and two.name not in shown
        for part in binding.parts
        for one, two in pairwise(part.layers)
    )
    if unclear:
        yield f"layer {NORMS_BEFORE}: default of library {binding.layout}"


def read_hidden_activations(binding: RecognizedAgent, checkpoint: Checkpoint) -> RecognizedAgent:
    """Return the binding of a layout with the hidden activations that the checkpoint itself records."""
    if binding.layout == NO_LAYOUT:
        return binding
    binding = _read_pickled_policy(binding, checkpoint.tree)
    if {"hidden", "activations"} & binding.facts.origins.keys():
        return binding
    listed = _read_configuration(binding, checkpoint)
    if listed is not None:
        unknown = list(dict.fromkeys(name for name in listed if name not in KERAS_ACTIVATIONS))
        where = "the model's configuration"
        if unknown:
            facts = binding.facts.not_understood("activations", ", ".join(unknown), where)
        else:
            facts = binding.facts.read(where, activations=tuple(KERAS_ACTIVATIONS[name] for name in listed))
        return replace(binding, facts=facts.without_lack("activation"))
    if checkpoint.format != "saved_model":
        return binding
    found = _find_graph_activations(checkpoint)
    strange = sorted(name for name in found if name in _OTHER_OPERATIONS)
    if strange:
        text, where = abbreviate_list(strange, 3), "the SavedModel's graph"
        facts = binding.facts.without_lack("activation").not_understood("activations", text, where)
        return replace(binding, facts=facts)
    # A continuous action map has its own tanh.
    mapped = frozenset() if binding.facts.head == "argmax" else {"tanh"}
    hidden = found - mapped - _OF_DEVIATIONS or found & {"tanh"}
    if len(hidden) != 1:
        return binding
    facts = binding.facts.without_lack("activation")
    return replace(binding, facts=facts.read("the SavedModel's graph", hidden=next(iter(hidden))))


_OPERATIONS = {
    "Relu": "relu",
    "Tanh": "tanh",
    "Sigmoid": "sigmoid",
    "Elu": "elu",
    "Softplus": "softplus",
}
# Further activations that a graph may have, which an agent of a layout does not support.
_OTHER_OPERATIONS = frozenset(("LeakyRelu", "Relu6", "Selu", "Softsign", "Erf", "Sin", "Cos"))


def _find_graph_activations(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the activations among a SavedModel's operations, those of `_OTHER_OPERATIONS` by their names."""
    from ckpttool.formats import (
        tf_functions,
        tf_saved_model,
        tf_saved_model_messages,
    )  # not for other formats

    file = next((f for f in checkpoint.files if f.path.endswith(f"/{tf_saved_model.GRAPH}")), None)
    if file is None or file.size > limits.current().graph_bytes:
        return frozenset()
    meter = tf_saved_model_messages.FieldMeter()
    try:
        graphs = tf_saved_model_messages.parse_saved_model(memoryview(file.read(0, file.size)), meter)
        read = [graph.nodes for graph in graphs if graph.nodes is not None]
        libraries = [tf_functions.read_functions(each, meter) for each in read]
        # TensorFlow 1 has no functions: all operations are those of the graph.
        outside = [tf_saved_model_messages.parse_graph_def(each, meter) for each in read]
    except (CkpttoolError, RecursionError, struct.error):
        return frozenset()
    nodes = (n for library in libraries for function in library.values() for n in function.nodes.values())
    operations = {node.op for node in nodes}
    operations |= {node.op.decode("utf-8", "replace") for graph in outside for node in graph.nodes.values()}
    known = {name for op, name in _OPERATIONS.items() if op in operations}
    return frozenset(known | (operations & _OTHER_OPERATIONS))


_ACTIVATION = f"{TORCH_CLASSES}activation."
_SOFTMAX = frozenset((f"{_ACTIVATION}Softmax", f"{_ACTIVATION}LogSoftmax"))
# Parts of a pickled module that do not affect evaluation, and those whose weights belong to layers.
_NEUTRAL = deferred.compile(
    re.escape(TORCH_CLASSES)
    + r"(container\.\w+|linear\.(Linear|Identity)|normalization\.LayerNorm|dropout\.\w+|flatten\.\w+)"
)


def _read_pickled_policy(binding: RecognizedAgent, tree: Tree) -> RecognizedAgent:
    """Return the binding with the activations inside a policy that was pickled as a module.

    The position of an activation between two layers of one Sequential follows from file order. For
    other modules only the classes are known: one kind applies to all hidden layers, several have
    unknown positions.
    """
    part = binding.policy
    if part is None or part.program is not None:
        return binding
    weights = [
        move.source[:-2]
        for number in range(len(part.layers))
        for move in binding.moves.moves
        if move.target[: len(part.prefix) + 1] == (*part.prefix, index(number))
        and move.source[-2:-1]
        and move.source[-2] in PICKLED_TENSORS
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
        and all(step == PICKLED_MODULES for step in path[len(module) :: 2])
    }
    if not classes:
        return binding
    functions = {path: name for path, name in classes.items() if name.startswith(_ACTIVATION)}
    binding = binding.entered(*_note_custom_classes(classes, part.component))
    order = list(classes)
    ends = max((order.index(layer) for layer in layers if layer in classes), default=len(order))
    unknown = {path: name for path, name in functions.items() if _find_activation(tree, path, name) is None}
    # A softmax after the last layer does not change which output is the largest.
    kept = _SOFTMAX if binding.facts.head == "argmax" else frozenset()
    strange = sorted({name for path, name in unknown.items() if name not in kept or order.index(path) < ends})
    functions = {path: name for path, name in functions.items() if path not in unknown}
    if strange:
        return binding.refused(part.component, *strange)
    if not functions or {"hidden", "activations"} & binding.facts.origins.keys():
        return binding
    where = "/".join(str(step.value) for step in module if step != PICKLED_MODULES) or "the pickled module"
    between = [
        [each for each in order[order.index(one) : order.index(two)] if each in functions]
        for one, two in pairwise(layers)
        if one in classes and two in classes
    ]
    facts = binding.facts.without_lack("activation")
    dense = sum(layer.kind == "dense" for layer in part.layers) - 1
    placed = [_find_activation(tree, each[0], functions[each[0]]) for each in between if len(each) == 1]
    names = tuple(name for name in placed if name is not None)
    if len(names) == dense and all(len(each) < 2 for each in between):
        return replace(binding, facts=facts.read(where, activations=names))
    kinds = {_find_activation(tree, path, name) for path, name in functions.items()}
    # A final tanh is the action map.
    hidden = kinds - {"tanh"} or kinds
    if len(hidden) == 1 and (name := next(iter(hidden))) is not None:
        return replace(binding, facts=facts.read(where, hidden=name, activations=None))
    listed = ", ".join(sorted(map(str, kinds)))
    return replace(binding, facts=facts.not_understood("activations", f"{listed} in unknown places", where))


def _find_activation(tree: Tree, path: Path, name: str) -> str | None:
    """Return an activation's canonical name by class, None for a non-default slope or another class."""

    def value(attribute: str) -> object:
        leaf = tree.get((*path, attr(attribute)))
        return leaf.value if isinstance(leaf, ValueLeaf) else None

    return activation_of(name, value)


def _note_custom_classes(classes: Mapping[Path, str], component: str) -> Iterator[LedgerEntry]:
    """Yield an entry if part of a pickled policy has a class whose code is not in the file."""
    own = sorted(
        {
            name
            for path, name in classes.items()
            if not _NEUTRAL.fullmatch(name) and not name.startswith((_ACTIVATION, "tianshou.", "torch.nn."))
        }
    )
    joined = [name for name in own if any(map(_RESIDUAL.search, _split_words(name))) or "Gat" in name]
    if joined:
        value = f"how {abbreviate_list(joined, 3)} combines its layers"
        yield LedgerEntry("cannot be known", "custom code", value, component, decides=True)
    rest = [name for name in own if name not in joined]
    if rest:
        yield LedgerEntry(
            "assumed", "custom code", f"{abbreviate_list(rest, 3)} applies its layers one after another"
        )


def _split_words(name: str) -> tuple[str, ...]:
    """Return the last part of a class name in snake case: ResBlock as res_block."""
    return (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition(".")[2]).lower(),)


def _read_configuration(binding: RecognizedAgent, checkpoint: Checkpoint) -> tuple[str, ...] | None:
    """Return the policy's hidden activations as stated, from configurations of layers with the same names."""
    if not checkpoint.format.startswith("keras_"):
        return None
    from ckpttool.formats import keras_tree

    part = binding.policy
    try:
        document = keras_tree.config_document(checkpoint.format, checkpoint.path)
    except (UnsupportedError, NotFoundError):  # a file that is being written has a temporary name
        return None
    if part is None or document is None:
        return None
    activations = dict(_list_dense_layers(document))
    hidden = [layer for layer in part.layers if layer.kind == "dense"][:-1]
    found = [activations.get(layer.name[-1]) for layer in hidden if layer.name]
    known = tuple(format_object(each) for each in found if each is not None)
    return known if known and len(known) == len(hidden) else None


def _list_dense_layers(document: object, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the name and the activation of each dense layer anywhere in a configuration."""
    if depth > 40:
        return
    values: Sequence[Any] = ()
    if isinstance(document, Mapping):
        config = document.get("config")
        if document.get("class_name") == "Dense" and isinstance(config, Mapping):
            name, activation = config.get("name"), config.get("activation")
            if isinstance(name, str):
                yield name, activation
        values = tuple(document.values())
    elif isinstance(document, list):
        values = document
    for value in values:
        yield from _list_dense_layers(value, depth + 1)


# From objects to names: plan an object graph's variables as TensorFlow 1's.
#
# Adam's moments are stored beside their variables, and the powers of its betas are computed from its update
# count. RMSProp's and Momentum's slots are stored there too; Momentum's do not include the learning rate in
# TensorFlow 1 (sources: tensorflow/python/training/{adam,rmsprop,momentum}.py, slot_creator.py).

_BETAS = dict(zip(POWERS, ("beta_1", "beta_2"), strict=True))
_MOST_STEPS = 10_000_000  # by then, a usual beta's power is 0 in float32
_STEPS = tuple(name for name, ours in KERAS_SETTINGS.items() if ours == "step")
_RATES = ("_learning_rate", "learning_rate")
# Possible slot kinds by optimizer, in the order in which TensorFlow 1 creates them.
_KINDS = ((ADAM, ("m", "v")), (RMSPROP, ("rms", "mg", "momentum")), (SGD, ("momentum",)))


class _GraphOptimizer(NamedTuple):
    """An optimizer object: its family, its path, its slots, and its own variables used here."""

    family: OptimizerFamily
    path: Path
    slots: list[Path]
    powers: Mapping[str, Path]
    steps: Path | None
    rate: Path | None

    @property
    def title(self) -> str:
        """Its display name."""
        return display(self.path)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its slot kinds in TensorFlow 1's order."""
        return next(kinds for family, kinds in _KINDS if family is self.family)


def plan_variable_names(tree: Tree, settings: Settings) -> Plan:
    """Return the plan from an object graph to variables known by name, with readable paths.

    `settings` are optimizer settings from a sidecar. State of other optimizers keeps its path. Each of
    several optimizers has its own scope, as if created there
    (tensorflow/python/training/slot_creator.py): powers at `SCOPE/beta1_power`, moments at
    `SCOPE/VARIABLE/Adam`, so that the names identify their optimizer.
    """
    found = list(_list_optimizers(tree))
    names = {path: tree.names[path] for path, _ in tree.tensors()}
    rules: dict[Path, Rule] = {}
    added: dict[Path, Leaf | ValueLeaf] = {}
    assumed: list[str] = []
    missing: list[str] = []
    notes: list[str] = []
    taken = set(names.values())
    for each in found:
        alone = len(found) == 1 and (each.powers or not taken & set(POWERS))
        scope = "" if alone else f"{each.title}/"
        if each.family is SGD and each.steps is not None:
            rate = _read_number(tree, each.rate)
            rate = _find_setting(each, settings, "learning_rate") if rate is None else rate
            if not rate:
                notes.append(f"{each.title}: the learning rate included in its momentum is unknown")
                continue
            rules |= dict.fromkeys(each.slots, Scale(SGD.folded * rate, divide=True))
            notes.append(f"{each.title}: momentum is divided by the learning rate, with rounding")
        added |= _name_slots(tree, each, scope, names, taken)
        for power in POWERS if each.family is ADAM else ():
            if power in each.powers:
                names[each.powers[power]] = scope + power
            elif each.steps is None:
                missing.append(scope + power)
            else:
                value, whence = _make_power(tree, each, power, settings)
                assumed += whence
                added[_parse_name(scope + power)] = ToTensor("float32").leaf(ValueLeaf(value))
    moves = tuple(Move(path, _parse_name(name), rules.get(path, KEEP)) for path, name in names.items())
    labels: dict[Path, Label] = {}
    for path, leaf in tree.tensors():
        of = _parse_name(names[leaf.of]) if leaf.of is not None and leaf.of in names else None
        labels[_parse_name(names[path])] = Label(leaf.role, names[path], of, leaf.slot)
    labels |= {path: Label("other", display(path)) for path in added}
    return Plan(
        moves,
        added,
        labels=labels,
        assumed=tuple(dict.fromkeys(assumed)),
        missing=tuple(missing),
        notes=tuple(notes),
        settings=settings,
    )


def _parse_name(name: str) -> Path:
    return tuple(attr(part) for part in name.split("/"))


def _list_optimizers(tree: Tree) -> Iterator[_GraphOptimizer]:
    """Yield the optimizers that also exist in TensorFlow 1, in the order of their first moments."""
    slots: dict[Path, list[Path]] = {}
    children: dict[Path, dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        children.setdefault(path[:-1], {})[str(path[-1].value) if path else ""] = path
        if leaf.role == "slot" and is_trained(tree, leaf):
            slots.setdefault(slot_optimizer(path, leaf), []).append(path)
    for top, moments in slots.items():
        mine = children.get(top, {})
        leaves = [tree[path] for path in (*mine.values(), *moments)]
        kinds = {found.slot for path in moments if isinstance(found := tree[path], Leaf)}
        cls = keras_class(leaves)
        if cls in UNCONVERTED:
            continue
        for family, wanted in _KINDS:
            if (find_class(cls) or family) is family and set(family.always) <= kinds <= set(wanted):
                powers = {power: mine[power] for power in POWERS if power in mine}
                yield _GraphOptimizer(
                    family, top, moments, powers, _find_first(mine, _STEPS), _find_first(mine, _RATES)
                )
                break


def _find_first(mine: Mapping[str, Path], names: tuple[str, ...]) -> Path | None:
    return next((mine[name] for name in names if name in mine), None)


def is_trained(tree: Tree, slot: Leaf) -> bool:
    """Return whether a slot is known to belong to a variable, and not to another slot."""
    owner = tree.get(slot.of) if slot.of is not None else None
    return isinstance(owner, Leaf) and owner.role != "slot"


def _name_slots(
    tree: Tree, optimizer: _GraphOptimizer, scope: str, names: dict[Path, str], taken: set[str]
) -> dict[Path, Leaf]:
    """Name the slots, and return those that TensorFlow 1's RMSProp always has and this one lacks."""
    by_owner: dict[Path, dict[str, Path]] = {}
    for path in optimizer.slots:
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            by_owner.setdefault(leaf.of, {})[str(leaf.slot)] = path
            taken.discard(names[path])
    added: dict[Path, Leaf] = {}
    for owner, moments in by_owner.items():
        wanted = [kind for kind in optimizer.kinds if kind in moments or kind == "momentum"]
        # An optimizer whose names are taken adds a counter to them.
        number, name = 0, f"{scope}{names[owner]}/{optimizer.family.tf1}"
        while taken & {_number_name(name, number + position) for position in range(len(wanted))}:
            number += len(wanted)
        for position, kind in enumerate(wanted):
            own = _number_name(name, number + position)
            taken.add(own)
            weight = tree[owner]
            if kind in moments:
                names[moments[kind]] = own
            elif isinstance(weight, Leaf):
                added[_parse_name(own)] = make_zero_tensor(weight)
    return added


def _number_name(name: str, number: int) -> str:
    return f"{name}_{number}" if number else name


def _make_power(tree: Tree, adam: _GraphOptimizer, power: str, settings: Settings) -> tuple[float, list[str]]:
    """Return a power of a beta and the assumptions: it starts at beta and is multiplied by it per update."""
    count = _read_number(tree, adam.steps)
    steps = max(0, count) if isinstance(count, int) else 0
    name = _BETAS[power]
    beta = _read_number(tree, (*adam.path, attr(name)))
    if beta is None:
        beta = _find_setting(adam, settings, name)
    if isinstance(beta, float) and 0 <= beta < 1:
        return _multiply_float32(beta, steps), []
    default = ADAM.defaults[name]
    sentence = f"{adam.title} {name} = {default.value} (default of {default.library}; "
    return _multiply_float32(default.value or 0, steps), [f"{sentence}the checkpoint does not hold it)"]


def _find_setting(optimizer: _GraphOptimizer, settings: Settings, name: str) -> float | None:
    value = settings.get(str(optimizer.path[-1].value) if optimizer.path else "", {}).get(name)
    return value if isinstance(value, float) else None


def _multiply_float32(beta: float, steps: int) -> float:
    """Return beta in float32 after this many multiplications by itself, rounded each time."""
    factors = np.full(min(steps, _MOST_STEPS) + 1, beta, np.float32)
    with np.errstate(under="ignore"):
        return float(np.multiply.accumulate(factors)[-1])


def _read_number(tree: Tree, path: Path | None) -> float | None:
    leaf = tree.get(path) if path is not None else None
    if not isinstance(leaf, Leaf) or leaf.size != 1:
        return None
    value = ToValue().leaf(leaf)
    found = value.value if isinstance(value, ValueLeaf) else None
    return found if isinstance(found, int | float) else None


# TensorFlow's two ways of storing the same variables: by name (TensorFlow 1), as objects (TensorFlow 2).
#
# Variables keep their paths; the section above plans objects as names. Adam differs: by name its moments are
# `VARIABLE/Adam` and `VARIABLE/Adam_1` beside two powers of its betas; as an object it owns them. Adam's
# object here is the one that tf.train.Checkpoint saves for a tf.compat.v1.train.AdamOptimizer: children
# beta1_power and beta2_power, slot variables m and v (tensorflow/python/training/adam.py,
# tensorflow/python/training/optimizer.py).

_ADAM = ("m", "v")
# Slots of optimizers without their own variables, as named by `_create_slots`
# (tensorflow/python/training/{momentum,rmsprop,adagrad,adadelta,ftrl}.py).
_SLOTS_ALONE = frozenset(("momentum", "rms", "mg", "accumulator", "accum", "accum_update", "linear"))
_POWER = deferred.compile(r"beta[12]_power(_\d+)?")
_PLAIN = "optimizer"  # the object's name if the variables' names contain none


def is_object_graph(tree: Tree) -> bool:
    """Return whether the tree is an object graph, which its keys show."""
    return any(MARK in leaf.key for _, leaf in tree.tensors())


def has_named_variables(tree: Tree) -> bool:
    """Return whether the tree's variables are identified only by name."""
    return all("/".join(path_texts(path)) == leaf.key for path, leaf in tree.tensors())


class _BetaPowers(NamedTuple):
    """The powers of one Adam's betas: their scope and their paths.

    An optimizer of another class has the scope of its slots and no powers.
    """

    scope: tuple[str, ...]
    powers: Mapping[str, Path]


def plan_variable_objects(tree: Tree) -> Plan:
    """Return the plan from variables known by name to an object graph: each keeps its path.

    Adam's moments become slot variables of an optimizer, named after the scope of its beta powers, or
    `optimizer` if they have none. Moments that cannot be assigned to one pair of powers stay where they
    are. The slots of other optimizers become slot variables of one named after the scope around them.
    """
    pairs, notes = _pair_powers(tree)
    leaves = dict(tree.tensors())
    moments = ((path, leaf) for path, leaf in leaves.items() if leaf.role == "slot" and leaf.slot in _ADAM)
    slots = {path: leaf.of for path, leaf in moments if leaf.of and is_trained(tree, leaf)}
    owners = _find_owners(leaves, slots, pairs)
    if not owners:
        pairs = []
    others = _list_other_slots(tree)
    first = len(pairs)
    scopes = list(dict.fromkeys(scope for scope, _ in others.values()))
    pairs += [_BetaPowers(scope, {}) for scope in scopes]
    owners |= {path: first + scopes.index(scope) for path, (scope, _) in others.items()}
    slots_of = slots | {path: of for path, (_, of) in others.items()}
    names = {path: _variable(path, leaf) for path, leaf in leaves.items() if path not in owners}
    tops = _list_optimizer_paths(pairs, names)
    for number, pair in enumerate(pairs):
        names |= {path: (*tops[number], power) for power, path in pair.powers.items()}
    if slots and not slots.keys() & owners.keys():
        notes = (
            *notes,
            f"{format_count(len(slots), 'moment of Adam is', 'moments of Adam are')} kept as plain "
            "variables: it is unknown which optimizer they belong to",
        )
    paths = object_graph_paths(names.values())
    placed = {path: paths[name] for path, name in names.items()}
    for path, number in owners.items():
        powers = pairs[number].powers
        top = placed[powers[POWERS[0]]][:-1] if powers else tuple(map(attr, tops[number]))
        placed[path] = slot_path(top, leaves[path].slot or "", placed[slots_of[path]])
    moves = tuple(Move(path, placed[path], KEEP) for path in leaves)
    assumed = [
        (
            f"Adam in scope {'/'.join(pair.scope) or '(none)'} trains the variables in that scope: it is "
            f"{'/'.join(top)}"
        )
        for pair, top in zip(pairs[:first], tops, strict=False)
        if first > 1
    ]
    labels = {placed[path]: _label(path, leaf, placed, held=path in owners) for path, leaf in leaves.items()}
    return Plan(moves, labels=labels, assumed=tuple(assumed), notes=notes)


def _list_other_slots(tree: Tree) -> dict[Path, tuple[tuple[str, ...], Path]]:
    """Return the scope and the variable of every slot `[SCOPE/]VARIABLE/NAME` except Adam's.

    Return nothing if two slots in one scope have the same name and variable.
    """
    found: dict[Path, tuple[tuple[str, ...], Path]] = {}
    seen = set()
    for path, leaf in tree.tensors():
        if leaf.role != "slot" or leaf.slot not in _SLOTS_ALONE or leaf.of is None:
            continue
        name, of = path_texts(path)[:-1], path_texts(leaf.of)
        if not is_trained(tree, leaf) or name[len(name) - len(of) :] != of:
            continue
        scope = name[: len(name) - len(of)]
        if (scope, leaf.slot, of) in seen:
            return {}
        seen.add((scope, leaf.slot, of))
        found[path] = scope, leaf.of
    return found


def _variable(path: Path, leaf: Leaf) -> tuple[str, ...]:
    # Some programs store a variable under its output's name, `w:0`.
    if leaf.name and leaf.key == f"{leaf.name}:0" == "/".join(path_texts(path)):
        return tuple(leaf.name.split("/"))
    return path_texts(path)


def _label(path: Path, leaf: Leaf, placed: Mapping[Path, Path], *, held: bool) -> Label:
    name = leaf.name or leaf.key or display(path)
    if leaf.of is None or leaf.of not in placed:
        return Label(leaf.role, name)
    return Label(leaf.role, name, placed[leaf.of] if held else None, leaf.slot if held else None)


def _pair_powers(tree: Tree) -> tuple[list[_BetaPowers], tuple[str, ...]]:
    found: dict[tuple[tuple[str, ...], str], dict[str, Path]] = {}
    for path, leaf in tree.tensors():
        match = _POWER.fullmatch(str(path[-1].value)) if path and leaf.size == 1 else None
        if match:
            power = match[0][: len(POWERS[0])]
            found.setdefault((path_texts(path[:-1]), match[1] or ""), {})[power] = path
    pairs = [_BetaPowers(scope, powers) for (scope, _), powers in found.items() if len(powers) == len(POWERS)]
    scopes = [pair.scope for pair in pairs]
    if len(set(scopes)) == len(scopes):
        return pairs, ()
    # TensorFlow numbers several optimizers' powers without recording which optimizer they belong to.
    return [], (f"{len(pairs)} Adam optimizers share one scope: their state is kept as plain variables",)


def _find_owners(
    leaves: Mapping[Path, Leaf], slots: Mapping[Path, Path], pairs: list[_BetaPowers]
) -> dict[Path, int]:
    """Return the number of every moment's optimizer: the only one, or the one with the moment's scope.

    Return nothing if a moment has no optimizer, or if two moments have the same optimizer, slot and
    variable.
    """
    numbers = {pair.scope: number for number, pair in enumerate(pairs)}
    found: dict[Path, int] = {}
    seen = set()
    for path, of in slots.items():
        name = path_texts(path)
        scopes = (name[:depth] for depth in range(len(name), -1, -1))
        scope = next((scope for scope in scopes if scope in numbers), None)
        number = 0 if len(pairs) == 1 else numbers.get(scope) if scope is not None else None
        if number is None or (number, leaves[path].slot, of) in seen:
            return {}
        seen.add((number, leaves[path].slot, of))
        found[path] = number
    return found


def _list_optimizer_paths(
    pairs: list[_BetaPowers], names: Mapping[Path, tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Return each optimizer's path, chosen so that no other entries are under it."""
    powers = {path for pair in pairs for path in pair.powers.values()}
    scopes = {pair.scope for pair in pairs}
    taken = {
        name[:depth]
        for path, name in names.items()
        if path not in powers and not (name[:-1] in scopes and name[-1] in KERAS_SETTINGS)
        for depth in range(1, len(name) + 1)
    }
    tops = []
    for pair in pairs:
        top, number = pair.scope, 0
        while not top or top in taken:
            top = (*pair.scope, f"{_PLAIN}_{number}" if number else _PLAIN)
            number += 1
        taken.add(top)
        tops.append(top)
    return tops


# Object graph of variables known by name: kept in a sidecar, so that the reverse conversion restores the same
# objects.
#
# TensorFlow 1's format cannot store edges, keys and an optimizer's kind. The sidecar of a conversion to it
# contains the object graph, as TensorFlow stores it, and each variable's key in it.

# A sidecar may have 16 MB; a graph of 10,000 objects has about 1 MB.
_MOST_BYTES = 4 << 20


def record_objects(tree: Tree, plan: Plan) -> dict[str, Any] | None:
    """Return the sidecar's record of the tree's objects after `plan` named its variables.

    None if they cannot be stored as objects, are too many for a sidecar, or changed during conversion.
    """
    if any(move.rule != KEEP for move in plan.moves):
        return None  # the variables differ from those of the objects
    with contextlib.suppress(CkpttoolError):
        objects, stored = tf_object_graph.plan_graph(tree)
        graph = tf_object_graph.encode_graph(objects)
        if len(graph) <= _MOST_BYTES:
            keys = {"/".join(path_texts(move.target)): stored[move.source] for move in plan.moves}
            return {"graph": base64.b64encode(graph).decode(), "keys": keys, "read": is_object_graph(tree)}
    return None


def restore_objects(tree: Tree, objects: Mapping[str, Any]) -> Plan | None:
    """Return the plan from variables known by name back to their objects; None if it does not fit.

    Powers of Adam's betas that no object had are omitted: the conversion computed them.
    """
    keys = objects["keys"]
    sources = {keys["/".join(path_texts(path))]: path for path in tree if "/".join(path_texts(path)) in keys}
    computed = tuple(path for path in tree if "/".join(path_texts(path)) not in keys)
    complete = sources.keys() == set(keys.values()) and len(sources) == len(keys)
    if not complete or not all(path[-1].value in POWERS for path in computed):
        return None
    try:
        tensors = {key: _tensor(tree, path) for key, path in sources.items()}
        graph = base64.b64decode(objects["graph"], validate=True)
        made, _ = tree_from_graph(graph, tensors)
    except (CkpttoolError, binascii.Error, ValueError):
        return None
    if not graph:
        return None
    placed = {leaf.key: path for path, leaf in made.tensors()}
    return Plan(
        tuple(Move(sources[key], path, KEEP) for key, path in placed.items()),
        aliases={path: tuple(alias.path for alias in others) for path, others in made.aliases.items()},
        labels={
            path: Label(leaf.role, leaf.name, leaf.of, leaf.slot, leaf.key if objects["read"] else None)
            for path, leaf in made.tensors()
        },
        consumed=computed,
    )


def _tensor(tree: Tree, path: Path) -> VariableInfo:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101  # `again` goes through tensors
    return VariableInfo(leaf.dtype, leaf.shape, leaf.source)
