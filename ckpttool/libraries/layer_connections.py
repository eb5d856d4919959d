"""Operations between the layers of a chain, if names, a graph or a configuration record them.

A state_dict has no activations, sums or norms without parameters. torch's Sequential numbers all of its
modules, so gaps between the numbers of layers show where other modules are. A SavedModel lists the operations
of its functions, a .keras file the activation of each layer, a pickled module the classes of all its parts.
"""

from __future__ import annotations

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
from ckpttool.core.errors import CkpttoolError, NotFoundError, UnsupportedError, UsageError, abbreviate_list
from ckpttool.core.kinds import KERAS_ACTIVATIONS
from ckpttool.core.sidecar import NO_RESIDUALS, NORMS_BEFORE, LedgerEntry, Sidecar
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, index
from ckpttool.libraries.recognize import (
    PICKLED_MODULES,
    PICKLED_TENSORS,
    SAVER_FORMATS,
    TORCH_CLASSES,
    activation_of,
    find_orders,
    has_saver_graph,
)
from ckpttool.libraries.schema import (
    NO_LAYOUT,
    AgentLayer,
    AgentNetwork,
    RecognizedAgent,
    canonical_weight_path,
)
from ckpttool.mapping.layer_kinds import Name

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
# Names in two streams on shared layers: the state's value, and what chooses an action.
_VALUE_STREAM = deferred.compile(r"(^|_)(v|vf|val|values?|critic|baseline)\d*(_|$)")
_ADVANTAGE = deferred.compile(r"(^|_)adv(antages?)?\d*(_|$)")
_CHOICE_STREAM = deferred.compile(
    rf"{_ADVANTAGE.pattern}|(^|_)(a|pi|policy|actor|acts?|actions?|logits)\d*(_|$)"
)
# Modules of shared layers. Others beside a policy and a critic may be networks of their own (a world model).
_SHARED = deferred.compile(
    r"(trunk|body|base|shared|common|encoder|features?|hidden|backbone|torso|mlp|net|network|layers?|fc|linear)"
    r"(_(layers?|net|network|extractor|fc|body))?_?\d*"
)
# Activations of a policy's standard deviation, which are in the same functions.
_OF_DEVIATIONS = frozenset(("softplus", "sigmoid"))


class Streams(NamedTuple):
    """Layers of a network that gives a value of the state beside what chooses the action.

    `order` are the names of the shared layers and then of those that choose, `side` those of the value's;
    `by_size` is whether sizes alone decide the order, `dueling` whether advantages choose.
    """

    order: tuple[Name, ...]
    side: frozenset[Name]
    by_size: bool
    dueling: bool


def find_streams(widths: Mapping[Name, tuple[int, int]], prefix: int = 0) -> Streams | None:
    """Return the streams of dense layers with these names and [in, out] sizes, None if they are none.

    The one value is the same for all actions: it changes no choice, whether a dueling network subtracts the
    mean of the advantages or the largest. Both streams must start with what the shared layers return.

    Args:
        widths: the layers.
        prefix: the number of steps in their names that are not the network's own.
    """
    orders = {}
    for role in (None, True, False):
        part = [name for name in widths if find_stream(name[prefix:]) is role]
        chains, by_size = find_orders(part, [widths[name] for name in part])
        if len(chains) != 1:
            return None
        orders[role] = [part[n] for n in chains[0]], by_size
    shared, choice, value = (orders[role][0] for role in (None, True, False))
    start, actions = widths[shared[-1]][1], widths[choice[-1]][1]
    if widths[value[-1]][1] != 1 or {widths[choice[0]][0], widths[value[0]][0]} != {start}:
        return None
    dueling = any(_ADVANTAGE.search(to_snake_case(word)) for name in choice for word in name[prefix:])
    modules = {to_snake_case(name[prefix]) for name in shared if len(name) > prefix + 1}
    if (dueling and actions == 1) or (not dueling and not all(map(_SHARED.fullmatch, modules))):
        return None
    return Streams((*shared, *choice), frozenset(value), orders[None][1] and orders[True][1], dueling)


def find_stream(name: Sequence[str]) -> bool | None:
    """Return whether, by its innermost such word, a layer chooses actions; None of shared layers."""
    for word in map(to_snake_case, reversed(name)):
        chooses, values = _CHOICE_STREAM.search(word), _VALUE_STREAM.search(word)
        if bool(chooses) != bool(values):
            return bool(chooses)
    return None


def to_snake_case(word: str) -> str:
    """Return a name such as valueStream or DQNNet in lower case, its words joined by underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", word).lower()


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
    return any(pattern.search(word) for step in name for word in _split_words(step))


def find_joined_layers(layers: Sequence[tuple[str, ...]], widths: Sequence[tuple[int, int]]) -> list[str]:
    """Return the dense layers of a chain that names and widths suggest to be added to others, or multiplied.

    `widths` are their inputs and outputs. Layers of one width may be branches: a projection between two
    others, or a block of several layers that ends in the width it begins with.
    """
    joined = {
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
            joined |= dict.fromkeys("/".join(layers[number]) for number in numbers)
    return list(joined)


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
        (*owner, before, weight), (*own, number, name) = (("", *layer.stored) for layer in (other, self))
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
        stated = source is not None and recorded.is_given("activations")
        if not stated:
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
    distances = []
    for one, two in pairwise(layers):
        first, second = _number(one), _number(two)
        if first is not None and second is not None and one.name[:-1] == two.name[:-1]:
            distances.append((one, two, second - first))
    gapped = {one.name[:-1] for one, _, distance in distances if distance > 1}
    return [distance for distance in distances if distance[0].name[:-1] in gapped]


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
    if checkpoint.format in SAVER_FORMATS:
        return _with_saver_activations(binding, checkpoint)
    if checkpoint.format != "saved_model":
        return binding
    activations = _find_graph_activations(checkpoint)
    strange = sorted(name for name in activations if name in _OTHER_OPERATIONS)
    if strange:
        text, where = abbreviate_list(strange, 3), "the SavedModel's graph"
        facts = binding.facts.without_lack("activation").not_understood("activations", text, where)
        return replace(binding, facts=facts)
    # A continuous action map has its own tanh.
    mapped = frozenset() if binding.facts.head == "argmax" else {"tanh"}
    hidden = activations - mapped - _OF_DEVIATIONS or activations & {"tanh"}
    if len(hidden) != 1:
        return binding
    facts = binding.facts.without_lack("activation")
    return replace(binding, facts=facts.read("the SavedModel's graph", hidden=next(iter(hidden))))


_UNUSED_GRAPH = "the graph beside the checkpoint is not used: "


def describe_unused_graph(reason: str) -> str:
    """Return the sentence on the graph of a Saver that its checkpoint is read without."""
    return f"{_UNUSED_GRAPH}{reason}"


def unused_graph_sentences(binding: RecognizedAgent) -> tuple[str, ...]:
    """Return the sentences on a Saver's graph that the binding was made without."""
    return tuple(sentence for sentence in binding.moves.assumed if sentence.startswith(_UNUSED_GRAPH))


def _with_saver_activations(binding: RecognizedAgent, checkpoint: Checkpoint) -> RecognizedAgent:
    """Return the binding with the activations behind its layers in a Saver's graph, if there is one."""
    from ckpttool.graphs import tensorflow_saver

    part = binding.policy
    if part is None or part.program is not None or not has_saver_graph(checkpoint):
        return binding
    try:
        following = tensorflow_saver.read_activations(checkpoint)
    except CkpttoolError as error:
        return binding.assuming(describe_unused_graph(error.message))
    sources = {move.target: move.source for move in binding.moves.moves}
    kernels = [
        sources.get(canonical_weight_path(part, position, "kernel"))
        for position, layer in enumerate(part.layers)
        if layer.kind == "dense"
    ]
    operations = [
        following.get(kernel, frozenset()) if kernel is not None else frozenset() for kernel in kernels
    ]
    if len(operations) < 2 or any(len(names) != 1 for names in operations[:-1]):
        return binding
    facts, where = binding.facts.without_lack("activation"), "the Saver's graph"
    hidden = [next(iter(names)) for names in operations[:-1]]
    if strange := sorted({name for name in hidden if name not in _OPERATIONS}):
        return replace(binding, facts=facts.not_understood("activations", ", ".join(strange), where))
    facts = facts.read(where, activations=tuple(_OPERATIONS[name] for name in hidden))
    if facts.head == "tanh" and "head" not in facts.origins and "Tanh" not in operations[-1]:
        facts = facts.not_understood("head", "no tanh after the last layer", where)
    return replace(binding, facts=facts)


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
        libraries = [tf_functions.read_functions(graph, meter) for graph in read]
        # TensorFlow 1 has no functions: all operations are those of the graph.
        outside = [tf_saved_model_messages.parse_graph_def(graph, meter) for graph in read]
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
    pickled = [move for move in binding.moves.moves if {*move.source[-2:-1]} & {*PICKLED_TENSORS}]
    weights = [
        move.source[:-2]
        for number in range(len(part.layers))
        for move in pickled
        if move.target[: len(part.prefix) + 1] == (*part.prefix, index(number))
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
        [name for name in order[order.index(one) : order.index(two)] if name in functions]
        for one, two in pairwise(layers)
        if one in classes and two in classes
    ]
    facts = binding.facts.without_lack("activation")
    dense = sum(layer.kind == "dense" for layer in part.layers) - 1
    placed = [_find_activation(tree, names[0], functions[names[0]]) for names in between if len(names) == 1]
    names = tuple(name for name in placed if name is not None)
    if len(names) == dense and all(len(names) < 2 for names in between):
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
    from ckpttool.formats.tf_common import format_object

    activations = dict(_list_dense_layers(document))
    hidden = [layer for layer in part.layers if layer.kind == "dense"][:-1]
    functions = [activations.get(layer.name[-1]) for layer in hidden if layer.name]
    known = tuple(format_object(function) for function in functions if function is not None)
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
