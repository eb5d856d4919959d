"""Policy without a library layout: one chain of dense layers.

The order of the layers comes from a model's own configuration (Keras, a pickled torch Sequential),
else from the sizes if only one order fits, else from the numbers in the layers' names. Facts that a
chain of weights does not contain (activations, the action map) stay unknown here: they are given on
the command line (evaluation/agent_facts.py).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from ckpttool.core import deferred, plugins, urls
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import (
    CkpttoolError,
    FormatError,
    MappingError,
    UnsupportedError,
    UsageError,
    abbreviate_list,
    suggest_networks,
)
from ckpttool.core.sidecar import NORMS_BEFORE, OUTPUT_RANGE, NotUnderstood, load_sidecar
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, attr, key
from ckpttool.formats.probe import Format
from ckpttool.libraries import layer_connections, schema
from ckpttool.libraries.recognize import (
    KERAS_FORMATS,
    ONNX_FORMAT,
    PICKLED_MODULES,
    SAVER_FORMATS,
    ComponentLayer,
    NamedLeaf,
    PickledModule,
    find_orders,
    has_saver_graph,
    is_script,
    read_pickled_module,
    remember,
)
from ckpttool.libraries.schema import (
    LOG_STD,
    NO_LAYOUT,
    RECORDED_ORDER,
    AgentLayer,
    AgentMetadata,
    AgentNetwork,
    RecognizedAgent,
)
from ckpttool.mapping import wrappers
from ckpttool.mapping.kind_table import SPELLING, candidate_kinds, recognize_kind
from ckpttool.mapping.layer_kinds import LayerKind, Name
from ckpttool.mapping.rules import KEEP, Move, MoveList

if TYPE_CHECKING:
    from ckpttool.graphs.graph import Graph
    from ckpttool.libraries.graph_programs import GraphComputation
    from ckpttool.libraries.model_steps import ChainStep

_CONFIGURATION = "the model's configuration"
_EPSILON = {"torch": 1e-5, "tensorflow": 1e-3}
_MAP = ("action_scale", "action_bias")
_POLICY = deferred.compile(r"(^|_)(actor|policy|pi|mu|actor_mean|policy_net|policy_network)(_|$)")
_CRITIC = deferred.compile(
    r"(^|_)(critics?|q|q?vf?\d*|qf?\d*|value|values|val|baseline|advantage|quantile)(_|\d*$)"
)
_MOST_NAMED = 8
_SLOW = deferred.compile(r"target|(^|_)(ema|old|slow)(_|$)")
_DEVIATION = deferred.compile(r"log_?(std|sigma|scale|var)|(^|_)(std|sigma|logstd)(_|$|\d)")
_LIMIT = deferred.compile(
    r"max_actions?|action_(max|limit|bound|scale|bias|low|high)|act_limit|action_?bounds"
)
_OBSERVED = deferred.compile(
    r"(^|[_/.])(obs|observations?|states?|inputs?|running|rms|norm|normali[sz]er)([_/.]|$)"
)
_TEMPERATURE = deferred.compile(r"^(log_?)?(alpha|temperature|ent_coef)$")
# Words in the names of tensors beside a network: its inputs and outputs, results of training, and tensors
# that may change inputs or outputs.
_OBSERVES = deferred.compile(r"obs|(^|[_/])(act(ion)?s?|inputs?|features?)([_/]|$)")
_OUTCOME = deferred.compile(
    r"(^|[_/ ])(loss(es)?|acc(uracy)?\d*|scores?|best|metrics?|rewards?|returns?|kth|lr|grads?)([_/ ]|$)"
)
_CHANGES = deferred.compile(
    r"norm|rms|filter|whiten|scal|mean|std|var|mu|loc|sigma|bias|offset|shift|bound|limit|low|high|clip|max|min"
    r"|temp|gain|mult|factor|weight|mask|quant"
)
_STATISTICS = deferred.compile(
    r"(obs|observation|state|input|feature)[a-z]*[_/]([a-z]+[_/])?(running_)?(mean|var|std|rms|variance)"
)
_UNNAMED = deferred.compile(r"(dense|fully_connected)(_\d+)?")
_TRUNK = deferred.compile(
    r"trunk|body|base|shared|encoder|features?|hidden|backbone|torso|net|mlp|head|out|output|last"
)
# Formats of RL libraries: what their layouts do not recognise is another algorithm, not a single policy.
_LIBRARIES = frozenset(("stable_baselines3", "stable_baselines2", "rllib", "d3rlpy", "keras_rl"))
_NUMBERS = deferred.compile(r"\d+")
_COUNTED = deferred.compile(r"_?\d+")
_MOST = 200  # layers; far more than any policy of dense layers has


class _TensorGroup(NamedTuple):
    """Tensors stored together under one module, and their layer kind, None if unsupported."""

    name: Name
    kind: LayerKind | None
    tensors: Mapping[str, NamedLeaf]

    @property
    def layer(self) -> ComponentLayer | None:
        """The layer, None if its kind is unsupported."""
        return None if self.kind is None else ComponentLayer(self.name, self.kind, self.tensors)


class _CandidateNetwork(NamedTuple):
    """One network of a checkpoint: the name of its module, and its tensors by module."""

    name: Name
    groups: tuple[_TensorGroup, ...]

    @property
    def title(self) -> str:
        return "/".join(self.name) or "the whole file"

    @property
    def dense(self) -> list[ComponentLayer]:
        """The dense layers."""
        return [group.layer for group in self.groups if _is_dense(group) and group.layer is not None]

    @property
    def streams(self) -> layer_connections.Streams | None:
        """The streams on shared layers, one of which gives the state's value."""
        own = [layer for layer in self.dense if layer.name[: len(self.name)] == self.name]
        widths = {layer.name: (layer.width_in or 0, layer.width_out or 0) for layer in own}
        return layer_connections.find_streams(widths, len(self.name))


def recognize_single_policy(checkpoint: Checkpoint, network: str = "actor") -> RecognizedAgent | None:
    """Return the policy that is the whole checkpoint, None if it has no dense layer.

    `network` selects one of several networks, by its module's name. Raise UsageError if several
    networks or layer orders are possible, and UnsupportedError for unsupported layers.
    """
    return remember(_recognize_policy, checkpoint.tree, network, checkpoint=checkpoint)


def _recognize_policy(tree: Tree, network: str, checkpoint: Checkpoint) -> RecognizedAgent | None:
    if checkpoint.format in _LIBRARIES:
        return None
    if has_saver_graph(checkpoint):
        return _recognize_by_saver(tree, network, checkpoint)
    if (graph := _read_graph(checkpoint)) is not None:
        hint = None
        if checkpoint.format == ONNX_FORMAT:
            command = urls.format_command("convert", checkpoint.path, "layers.pt")
            hint = f"to convert only its layers, without the graph: {command}"
        computation = _lower_policy(graph, network, checkpoint.path, hint=hint)
        return _bind_computation(computation, checkpoint)
    module = read_pickled_module(tree)
    if module is not None:
        from ckpttool.libraries import model_steps

        if model_steps.is_hooked(module):
            raise UnsupportedError(
                "a hook changes the module's output",
                file=checkpoint.path,
                hint="if the hook does not change the output, play the converted weights: ckpttool "
                f"convert {shlex.quote(checkpoint.path)} OUT.pt --to torch",
            )
        try:
            binding = _bind_policy(module.state, checkpoint, network, module)
        except UnsupportedError as refusal:
            return _bind_module_program(checkpoint, network, refusal)
        return None if binding is None else module.bound(binding)
    plain = wrappers.strip_to_plain_names(tree)
    if plain is None:
        return _bind_policy(tree, checkpoint, network)
    binding = _bind_policy(plain[0], checkpoint, network)
    return None if binding is None else binding.moved(lambda path: plain[1].get(path, path))


def _recognize_by_saver(tree: Tree, network: str, checkpoint: Checkpoint) -> RecognizedAgent | None:
    """Return the policy that a Saver's graph computes, otherwise the one of the tensors' names."""
    from ckpttool.graphs import tensorflow_saver

    try:
        policy = tensorflow_saver.read_policy(checkpoint, network, _SLOW)
        if policy is not None:
            computation = _lower_policy(policy.graph, network, checkpoint.path)
            binding = _bind_computation(computation, checkpoint)
            return binding.assuming(policy.reason) if policy.reason else binding
        unused = layer_connections.describe_unused_graph("no network in it ends with values of one input")
    except (FormatError, UnsupportedError) as error:
        unused = layer_connections.describe_unused_graph(error.message)
    try:
        named = _bind_policy(tree, checkpoint, network)
    except (UnsupportedError, UsageError) as error:
        error.message += f"; {unused}"
        raise
    return named and named.assuming(unused)


HOOK = "a PyTorch hook"
_OLDEST = 7  # in older versions of ONNX, Add and others broadcast by attributes, and Dropout may be active


def _read_graph(checkpoint: Checkpoint) -> Graph | None:
    """Return the graph of a file whose format records all of a computation, None for other formats."""
    if checkpoint.format == ONNX_FORMAT:
        from ckpttool.formats import onnx

        opsets = onnx.read_model(checkpoint.files[0]).opsets
        version = max(opsets.get(domain, 0) for domain in ("", "ai.onnx"))
        if version < _OLDEST:
            raise UnsupportedError(
                "the opset version of the model is not supported",
                file=checkpoint.path,
                expected=f"opset {_OLDEST} or later",
                found=str(version or "none"),
            )
    elif checkpoint.format != "saved_model" and not _has_code(checkpoint):
        return None
    from ckpttool.graphs.graph import read_graph

    return read_graph(checkpoint)


def _has_code(checkpoint: Checkpoint) -> bool:
    """Return whether the file is a TorchScript archive whose code can be read."""
    if not is_script(checkpoint.tree):
        return False
    from ckpttool.graphs.torchscript_code import read_code

    return read_code(checkpoint) is not None


def _read_keras_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the configuration of a Keras model, None for weights alone and other formats."""
    if checkpoint.format not in KERAS_FORMATS:
        return None
    from ckpttool.formats.keras_tree import config_document

    return config_document(checkpoint.format, checkpoint.path)


class RecordedComputation(NamedTuple):
    """Computation of a model that a file records besides its weights.

    `origin` is the place of the record; `code` is the class or hook whose code is not in the file,
    empty if the file contains all of it.
    """

    origin: str
    code: str = ""


def read_computation(checkpoint: Checkpoint) -> RecordedComputation | None:
    """Return the computation recorded in the checkpoint, None for weights alone."""
    if checkpoint.format == ONNX_FORMAT:
        return RecordedComputation("the ONNX graph")
    if _has_code(checkpoint):
        return RecordedComputation("the TorchScript code")
    if (checkpoint.format == "saved_model" or has_saver_graph(checkpoint)) and _has_graph(checkpoint):
        return RecordedComputation(_ORIGINS[checkpoint.format][0])
    if (document := _read_keras_config(checkpoint)) is not None:
        from ckpttool.libraries import model_steps

        return RecordedComputation(_CONFIGURATION, model_steps.own_class(document) or "")
    module = read_pickled_module(checkpoint.tree)
    top = checkpoint.tree.containers.get(())
    cls = (top.name or "") if top is not None else ""
    if module is None or not cls:  # a conversion keeps a module's attributes, but not the classes
        return None
    from ckpttool.libraries import model_steps

    if model_steps.is_hooked(module):
        return RecordedComputation("the pickled module", HOOK)
    return RecordedComputation(
        "the pickled module", "" if model_steps.is_sequential(cls) else cls.rpartition(".")[2]
    )


def _has_graph(checkpoint: Checkpoint) -> bool:
    """Return whether the file records a computation, even a damaged one."""
    from ckpttool.graphs.graph import read_graph

    try:
        return read_graph(checkpoint) is not None
    except CkpttoolError:
        return True


def _bind_module_program(checkpoint: Checkpoint, network: str, refusal: UnsupportedError) -> RecognizedAgent:
    """Return the program of a pickled module that is no chain of layers; raise `refusal` if it has none."""
    from ckpttool.graphs.graph import read_graph

    with contextlib.suppress(UnsupportedError):
        if (graph := read_graph(checkpoint)) is not None:
            computation = _lower_policy(graph, network, checkpoint.path)
            return _bind_program(computation, checkpoint.tree, "the pickled module")
    raise refusal


def _bind_policy(
    tree: Tree, checkpoint: Checkpoint, network: str, module: PickledModule | None = None
) -> RecognizedAgent | None:
    """Return the policy of a Keras model from its configuration, otherwise from tensor names and sizes."""
    document = _read_keras_config(checkpoint)
    if document is None:
        return _bind_by_names(tree, checkpoint, network, module)
    from ckpttool.formats import keras_config
    from ckpttool.libraries import model_steps

    if not keras_config.is_described(document):
        binding = _bind_by_names(tree, checkpoint, network, module)
        own = model_steps.own_class(document)
        if binding is None or own is None:
            return binding
        sentence = f"the model's custom class {own} only applies its layers in sequence"
        return binding.assuming(sentence)
    computation = _lower_keras(document, checkpoint, tree, network)
    binding = None
    # Chain layers can be converted to other frameworks; a program can only be run.
    if computation.steps is not None and computation.norm is None:
        with contextlib.suppress(UnsupportedError, UsageError):
            binding = _bind_by_names(tree, checkpoint, network, module, computation)
    binding = binding or _bind_program(computation, tree, _CONFIGURATION)
    kinds = model_steps.list_precisions(document)
    if kinds:
        sentence = f"computed in float32: the model's own dtypes are {abbreviate_list([*kinds], 3)}"
        binding = binding.assuming(sentence)
    return binding


def _lower_policy(graph: Graph, network: str, file: str, **how: Any) -> GraphComputation:
    from ckpttool.libraries.graph_programs import lower_policy  # for files that record a graph

    return lower_policy(graph, network, file, **how)


def read_action_graph(checkpoint: Checkpoint, network: str = "actor") -> Graph | None:
    """Return what a file's own graph computes for the action alone, None without such a policy.

    Policies with states, whose graphs also compute these, are none. Raise UsageError if several outputs
    could be the action, and UnsupportedError for a graph that is no policy.
    """
    if has_saver_graph(checkpoint):
        from ckpttool.graphs import tensorflow_saver

        policy = tensorflow_saver.read_policy(checkpoint, network, _SLOW)
        graph = None if policy is None else policy.graph
    else:
        graph = _read_graph(checkpoint)
    computation = None if graph is None else _lower_policy(graph, network, checkpoint.path)
    return None if computation is None or computation.program.states else computation.graph


# What records a computation, and the framework of its layers, by format.
_ORIGINS = {
    ONNX_FORMAT: ("the ONNX graph", "torch"),
    "pytorch": ("the TorchScript code", "torch"),
    "saved_model": ("the SavedModel's graph", "tensorflow"),
    **dict.fromkeys(SAVER_FORMATS, ("the Saver's graph", "tensorflow")),
}


def _lower_keras(
    document: Mapping[str, Any], checkpoint: Checkpoint, tree: Tree, network: str
) -> GraphComputation:
    # Not top-level imports: shapes need NumPy.
    from ckpttool.formats import keras_tree
    from ckpttool.graphs.keras import read_document

    version = keras_tree.writer_version(checkpoint.details)
    graph = read_document(document, tree, checkpoint.path, version)
    return _lower_policy(graph, network, checkpoint.path, half=True)


def _bind_program(computation: GraphComputation, tree: Tree, origin: str) -> RecognizedAgent:
    """Return the binding of a policy that computes a model's own program, and then the choices."""
    if computation.refusal is not None:
        raise computation.refusal
    chooses = computation.choices is not None
    program, head = computation.program, "argmax" if chooses else "identity"
    number = program.output - len(program.inputs) - len(program.states)
    last = program.operations[number] if 0 <= number == len(program.operations) - 1 else None
    if not chooses and last is not None and last.value.get("name") == "tanh":
        # A final tanh stands for an action map.
        program = program._replace(operations=program.operations[:-1], output=last.inputs[0])
        head = "unit_tanh"
    read = ("head", "activations", *(("choices",) if chooses else ()))
    moves = tuple(
        Move(path, (attr("actor"), attr("graph"), attr(tree.names[path])), KEEP) for path in computation.used
    )
    return RecognizedAgent(
        layout=NO_LAYOUT,
        moves=MoveList(moves, (), computation.notes),
        parts=(AgentNetwork("actor", None, (), program=program),),
        facts=AgentMetadata(
            head=head,
            hidden="",
            epsilon=_EPSILON["torch"],
            choices=computation.choices,
            origins=dict.fromkeys(read, origin),
        ),
        evidence=f"a computation recorded in {origin}",
    )


def _bind_by_names(
    tree: Tree,
    checkpoint: Checkpoint,
    network: str,
    module: PickledModule | None,
    computation: GraphComputation | None = None,
) -> RecognizedAgent | None:
    file = checkpoint.path
    framework = _find_framework(checkpoint.format, tree)
    normalisers = schema.find_statistics(tree)
    within = frozenset(path for normalizer in normalisers for path in normalizer.paths)
    # A model that records its computation is read with its own batch norms, as a program.
    groups = _group_tensors(tree, framework, within, batch_norms=module is None and computation is None)
    if not any(group.kind is not None and group.kind.name == "dense" for group in groups):
        return None
    if len(groups) > _MOST:
        raise UsageError(
            "the checkpoint contains more layers than a policy has", file=file, found=str(len(groups))
        )
    networks = _find_networks(tuple(groups))
    values = "the network's name" if _are_q_networks(networks, network, checkpoint) else ""
    # A critic of one action ends with one value.
    if values and all(_find_ends(n)[1] == 1 for n in networks):
        raise UsageError(
            "the checkpoint has no policy: judging by their names, its networks are critics",
            file=file,
            found=abbreviate_list([n.title for n in networks], 8),
        )
    inside = {group.name for network in networks for group in network.groups}
    if values:
        networks = [n for n in networks if not _SLOW.search("_".join(n.name).lower())] or networks
    # Tensors outside all networks (a head, an observation normaliser) may belong to the policy.
    beside = tuple(group for group in groups if group.name not in inside)
    network_, assumed = _choose_policy(networks, network, file, beside, values=bool(values))
    network_ = network_._replace(groups=(*network_.groups, *beside))
    if module is not None:
        computation = _lower_sequential(checkpoint.tree, network_.name, file)
        values = _find_stored_actions(module, network_, file) or values
    surroundings = _SiblingTensors.of(network_, tree, module, within)
    layers, action_map, notes = _collect_policy(network_, file, surroundings)
    where = (file, surroundings.hint(file))
    limits = _find_bounds(tree)
    numbers = None if action_map else _merge_bounds(limits)
    if limits and numbers is None:
        assumed = (
            *assumed,
            f"{abbreviate_list([*limits], 3)} does not scale actions: pass --bounds to set the action bounds",
        )
    if computation is not None:
        lines = (assumed, notes, network_.title)
        steps = tuple(_name_steps(computation, layers, module, network_.name))
        binding = _bind_steps(steps, layers, action_map, (framework, file), lines)
        binding = _with_choices(binding, computation, _CONFIGURATION).noted(*computation.notes)
        bounded = _add_bounds(_as_q_network(binding, values) if values else binding, numbers, limits, layers)
        return _add_statistics(bounded, normalisers, layers, where)
    chain, evidence = _order_dense_layers(layers, file, network_.streams)
    try:
        _require_sequential(chain, file)
    except UnsupportedError:
        # Numbers from Keras count no activation that is an argument of a layer.
        if not _has_recorded_activations(chain, file):
            raise
    _require_no_branches(chain, file)
    facts = AgentMetadata(head="affine" if action_map else "", hidden="", epsilon=_EPSILON[framework])
    named = [AgentLayer(module.name, module.kind.name) for module in chain]
    more = layer_connections.note_gaps(named) if framework == "torch" else ()
    binding = _make_agent(chain, facts, action_map, (*assumed, *evidence, *more), notes, network_.title)
    bounded = _add_bounds(_as_q_network(binding, values) if values else binding, numbers, limits, chain)
    return _add_statistics(bounded, normalisers, chain, where)


def _lower_sequential(tree: Tree, name: Name, file: str) -> GraphComputation | None:
    """Return what the Sequential with this name in a pickled module computes, None for another class."""
    from ckpttool.graphs.torch_modules import read_sequential

    path = tuple(step for word in name for step in (PICKLED_MODULES, key(word)))
    graph = read_sequential(tree, path)
    computation = None if graph is None else _lower_policy(graph, "actor", file, half=True)
    if computation is not None and (computation.steps is None or computation.norm is not None):
        where = "/".join(name) or None
        raise UnsupportedError("the layers of the module are no chain", file=file, path=where)
    return computation


def _name_steps(
    computation: GraphComputation,
    layers: Sequence[ComponentLayer],
    module: PickledModule | None,
    name: Name,
) -> Iterator[ChainStep]:
    """Yield a chain's steps with the names of the layers whose tensors they have, () for those of no layer.

    Of a pickled module that has the layers in a part, `name`, the module's own code is a last step.
    """
    from ckpttool.libraries.model_steps import ChainStep, LayerTensors

    sources = {} if module is None else module.sources
    owners = {
        frozenset(sources.get(entry.path, entry.path) for entry in layer.tensors.values()): layer.name
        for layer in layers
    }
    for step in computation.steps or ():
        if isinstance(weights := step.value, LayerTensors):
            paths = frozenset(path for path in (weights.weight, weights.bias) if path is not None)
            yield ChainStep(step.kind, owners.get(paths, ()), weights.epsilon)
        else:
            yield step
    if module is not None and name:
        yield ChainStep("code", (module.title,), "forward")


def _find_stored_actions(module: PickledModule, network: _CandidateNetwork, file: str) -> str:
    """Return where a whole module has its Discrete action space; raise UnsupportedError for other outputs.

    The code of its class then computes the actions in another way, e.g. from quantiles.
    """
    count = module.tree.get((attr("action_space"), attr("n")))
    number = count.value if isinstance(count, ValueLeaf) else None
    outputs = _find_ends(network)[1]
    if type(number) is int and outputs not in (number, -1):
        raise UnsupportedError(
            "the network has not one output for each action, and the code of its class is not executed",
            file=file,
            expected=f"action_space: {number} actions",
            found=f"{outputs} outputs",
            hint=conversion_hint(file),
        )
    return "action_space" if type(number) is int and outputs == number else ""


def _as_q_network(binding: RecognizedAgent, where: str) -> RecognizedAgent:
    """Return the binding of a network whose outputs are values of discrete actions, as `where` states."""
    parts = tuple(part._replace(chooses=True) for part in binding.parts)
    facts = binding.facts
    if not facts.head or facts.head == "identity":
        facts = facts.read(where, head="argmax")
    return replace(binding, parts=parts, facts=facts)


def _find_bounds(tree: Tree) -> dict[str, list[float] | None]:
    """Return numbers beside the network named like action bounds; None for other values."""
    bounds: dict[str, list[float] | None] = {}
    for path, leaf in tree.items():
        step = path[-2] if path[-1].kind == "index" and len(path) > 1 else path[-1]
        if not _LIMIT.fullmatch(str(step.value)):
            continue
        name = tree.names[path] if step is path[-1] else tree.names[path].rpartition("/")[0]
        if isinstance(leaf, ValueLeaf):
            plain = isinstance(leaf.value, int | float) and not isinstance(leaf.value, bool)
            row = [float(cast(float, leaf.value))] if plain else None
        elif leaf.role == "other" and leaf.size <= _MOST and leaf.dtype.startswith(("float", "int")):
            row = [float(number) for number in leaf.array().astype("float64").reshape(-1)]
        else:
            continue  # a parameter or a buffer: see `_sort_loose_tensors`
        before = bounds.get(name, [])
        bounds[name] = None if row is None or before is None else [*before, *row]
    return bounds


def _merge_bounds(limits: Mapping[str, list[float] | None]) -> tuple[list[float], list[float]] | None:
    """Return the lowest and highest action from all bounds; None if they are inconsistent."""
    rows = {name.rpartition("/")[2]: row for name, row in limits.items() if row is not None}
    if len(rows) != len(limits):
        return None
    largest = [row for name, row in rows.items() if _LARGEST.fullmatch(name)]
    if rows.keys() == {"action_low", "action_high"}:
        low, high = rows["action_low"], rows["action_high"]
    elif len(largest) == 1 and rows.keys() - {"action_bias"} == {n for n in rows if _LARGEST.fullmatch(n)}:
        scale, bias = largest[0], rows.get("action_bias", [0.0])
        size = max(len(scale), len(bias))
        if any(len(row) not in (1, size) for row in (scale, bias)):
            return None
        scale, bias = (row * (size // len(row)) for row in (scale, bias))
        low = [b - s for s, b in zip(scale, bias, strict=True)]
        high = [b + s for s, b in zip(scale, bias, strict=True)]
    else:
        return None
    finite = all(map(math.isfinite, (*low, *high)))
    ordered = len(low) == len(high) and all(a < b for a, b in zip(low, high, strict=False))
    return (low, high) if finite and ordered else None


_LARGEST = deferred.compile(r"max_actions?|action_(max|limit|bound|scale)|act_limit|action_?bounds?")


def _add_bounds(
    binding: RecognizedAgent,
    numbers: tuple[list[float], list[float]] | None,
    limits: Collection[str],
    layers: Sequence[ComponentLayer],
) -> RecognizedAgent:
    """Return the binding with the action bounds stored beside the network, unless it has others."""
    if numbers is None or binding.facts.action_low is not None:
        return binding
    width = next((layer.width_out for layer in reversed(layers) if _is_dense(layer)), None) or 1
    low, high = (tuple(row) * (width if len(row) == 1 else 1) for row in numbers)
    if len(low) != width:
        sentence = (
            f"{abbreviate_list([*limits], 3)} does not scale actions: pass --bounds to set the action bounds"
        )
        return binding.assuming(sentence)
    facts = binding.facts.read(abbreviate_list([*limits], 3), action_low=low, action_high=high)
    return replace(binding, facts=facts)


def _add_statistics(
    binding: RecognizedAgent,
    groups: Sequence[schema.StoredStatistics],
    layers: Sequence[ComponentLayer],
    where: tuple[str, str | None],
) -> RecognizedAgent:
    """Return the policy with its observation statistics.

    `where` is the file and a hint. Raise UnsupportedError if several fit, or none.
    """
    if not groups:
        return binding
    first = next(layer for layer in layers if _is_dense(layer))
    fitting = [group for group in groups if group.size == first.width_in]
    parts = [group for group in groups if group not in fitting]
    split = len(parts) > 1 and sum(part.size for part in parts) == first.width_in
    if len(fitting) > 1 or (not fitting and split):
        raise UnsupportedError(
            "several observation statistics, and it is unknown which the policy uses"
            if fitting
            else "separate statistics for several parts of an observation, whose order is not stored",
            file=where[0],
            found=abbreviate_list([part.where for part in fitting or parts], 4),
            hint=where[1],
        )
    if not fitting:
        raise UnsupportedError(
            "observation statistics of a different size than the policy's input",
            file=where[0],
            expected=f"{first.width_in} values",
            found=abbreviate_list([f"{group.where} {group.size}" for group in groups], 4),
            hint=where[1],
        )
    return schema.set_statistics(binding, fitting[0])


def _find_framework(format_: str, tree: Tree) -> str:
    """Return the framework of the layer names; for plain arrays, based on the name of a matrix."""
    named = cast(Format, plugins.find("formats", format_).load()).FRAMEWORK
    if named in _EPSILON:
        return named
    lasts = {name.rpartition("/")[2].removesuffix(":0") for name in tree.names.values()}
    return "torch" if "weight" in lasts else "tensorflow"


def _group_tensors(
    tree: Tree, framework: str, without: Collection[Path] = (), *, batch_norms: bool = False
) -> list[_TensorGroup]:
    """Return the tensors under each module as groups, except the entries in `without`.

    A batch norm has a scale or an offset, or a count of batches: two rows alone may be anything's statistics.
    """
    groups: dict[Name, dict[str, NamedLeaf]] = {}
    counted: set[Name] = set()
    for path, leaf in tree.tensors():
        segments = tuple(tree.names[path].removesuffix(":0").split("/"))
        if segments[-1] == "num_batches_tracked":
            counted.add(segments[:-1])
        if leaf.role not in ("parameter", "buffer") or leaf.dtype in ("string", "bool") or path in without:
            continue
        if not leaf.shape and "int" in leaf.dtype:
            continue  # a count: no layer computes with such a tensor
        # model.export() of Keras 3 saves every variable a second time, under this name.
        if segments[0] == "_all_variables" and framework == "tensorflow":
            continue
        groups.setdefault(segments[:-1], {})[segments[-1]] = NamedLeaf(path, segments, leaf)
    result = []
    for name, tensors in groups.items():
        leaves = {n: e.leaf for n, e in tensors.items()}
        kind = recognize_kind(leaves, framework)
        norm = next((k for k in candidate_kinds(leaves, framework) if k.name == "batch_norm"), None)
        if batch_norms and norm is not None and (len(tensors) > 2 or name in counted):
            kind = norm
        embeds = any("emb" in segment.lower() for segment in name)
        if kind is None and framework == "torch" and tensors.keys() == {"weight"} and not embeds:
            # A single matrix may also be an embedding, which no policy with numeric observations has.
            kind = next((k for k in candidate_kinds(leaves, framework) if k.name == "dense"), None)
        result.append(_TensorGroup(name, kind, tensors))
    return result


def _find_networks(groups: tuple[_TensorGroup, ...], prefix: Name = ()) -> list[_CandidateNetwork]:
    """Return the networks among the modules: the outermost modules that contain a chain each."""
    cut = len(prefix)
    children: dict[str, list[_TensorGroup]] = {}
    for module in groups:
        children.setdefault(module.name[cut] if len(module.name) > cut else "", []).append(module)
    many = {name: child for name, child in children.items() if sum(map(_is_dense, child)) > 1}
    rest = [m for name, child in children.items() if name not in many for m in child]
    whole = _CandidateNetwork(prefix, groups)
    if len(children) > 2 and whole.streams is not None:
        return [whole]
    if len(many) == 1 and not any(map(_is_dense, rest)):
        ((name, members),) = many.items()
        return _find_networks(tuple(members), (*prefix, name))
    roles = any(_CRITIC.search(name) or _POLICY.search(name) or _SLOW.search(name) for name in many)
    # Without roles, equal numbered names, or those of a trunk and a head, are one network.
    alike = len({_NUMBERS.sub("#", name) for name in many}) == 1 or all(map(_TRUNK.search, many))
    if len(many) < 2 or (alike and not roles):
        return [whole]
    return [
        network
        for name, members in many.items()
        for network in _find_networks(tuple(members), (*prefix, name))
    ]


def _is_dense(module: _TensorGroup | ComponentLayer) -> bool:
    return module.kind is not None and module.kind.name == "dense"


# Names of networks that output a value for each discrete action: classes, files and modules.
_VALUES_OF_ACTIONS = deferred.compile(
    r"(^|[\W_])((dueling|double|noisy|quantile|target)?_?q_?(net|network|function)|d?dqn|qr_?dqn|c51|rainbow)([\W_\d]|$)"
)


def _are_q_networks(networks: Sequence[_CandidateNetwork], role: str, checkpoint: Checkpoint) -> bool:
    """Return whether, by their names, all networks are Q-networks of discrete actions."""
    if any(role in (n.title, *n.name[-1:]) or _is_policy(n) for n in networks):
        return False
    root = checkpoint.tree.containers.get(())
    cls = (root.name or "").rpartition(".")[2] if root is not None else ""
    around = (
        layer_connections.to_snake_case(cls),
        os.path.basename(checkpoint.path).lower().partition(".")[0],
    )
    for network in networks:
        if len(networks) > 1 and _SLOW.search("_".join(network.name).lower()):
            continue
        if (streams := network.streams) is not None and streams.dueling:
            continue
        words = [layer_connections.to_snake_case(word) for word in network.name] or [*around]
        if not any(map(_VALUES_OF_ACTIONS.search, words)) and not (
            network.name and any(map(_VALUES_OF_ACTIONS.search, around))
        ):
            return False
    return True


def conversion_hint(path: str) -> str:
    """Return the command for networks that are not played, but can be converted."""
    name = f"{os.path.splitext(os.path.basename(path.rstrip('/')))[0]}-networks.pt"
    command = shlex.join(("ckpttool", "convert", urls.display_url(path), name))
    return f"{command} writes the networks for your own program"


def _choose_policy(
    networks: list[_CandidateNetwork],
    requested_role: str,
    file: str,
    beside: Sequence[_TensorGroup],
    *,
    values: bool = False,
) -> tuple[_CandidateNetwork, tuple[str, ...]]:
    """Return the one network that is the policy, by the requested name or by its own name.

    `beside` are the tensors outside all networks. `values` is true of Q-networks: the only one is the policy.
    Raise UnsupportedError for several networks that a layer of another kind may join.
    """
    requested = [n for n in networks if requested_role in (n.title, *n.name[-1:])]
    if len(requested) == 1:
        return requested[0], ()
    acting = [n for n in networks if _is_policy(n)]
    others = [n for n in networks if n not in acting]
    if len(networks) == 1:
        only = networks[0]
        # As in TD3_critic.pth.
        stem = os.path.basename(file).lower().partition(".")[0]
        role = ("critic",) if "critic" in stem and "actor" not in stem else ()
        critic = not values and _is_critic((*only.name, *role))
        if requested_role in ("actor", only.title) and not critic:
            return only, ()
    elif len(acting) == 1 and all(_is_critic(n.name) or _SLOW.search("_".join(n.name)) for n in others):
        titles = ", ".join(n.title for n in others)
        return acting[0], (f"the policy is {acting[0].title}, judging by its name; other networks: {titles}",)
    names = [n.title for n in networks]
    # A network with the input or output width of a sibling may be a part of it: a trunk and its heads.
    ends = [(network, *_find_ends(network)) for network in networks]
    pieces = {
        one.title
        for one, first, last in ends
        for other, its_first, its_last in ends
        if one is not other and one.name[:1] == other.name[:1] and (first == its_last or last == its_first)
    }
    whole = [title for title in names if title not in pieces]
    if len(networks) == 1:
        absent = f"the checkpoint has no policy named {requested_role}"
        raise UsageError(
            "the checkpoint contains only a critic" if requested_role == "actor" else absent,
            file=file,
            found=names[0],
            hint=suggest_networks(names if networks[0].name else ()),
        )
    if all(_is_critic(n.name) for n in networks):
        raise UsageError(
            "the checkpoint has no policy: judging by their names, its networks are critics",
            file=file,
            found=abbreviate_list(names, 8),
        )
    joining = [group for group in beside if not _is_dense(group)]
    entries = [entry for group in joining for entry in group.tensors.values() if len(entry.leaf.shape) > 1]
    if entries:
        raise UnsupportedError(
            "several networks, and layers of other kinds beside them (memory, convolutions)",
            file=file,
            found=abbreviate_list(["/".join(entry.segments) for entry in entries], 4),
        )
    raise UsageError(
        "several networks, and it is unknown which one is the policy",
        file=file,
        found=abbreviate_list(names, 8),
        hint=suggest_networks(whole[:_MOST_NAMED]),
    )


def _find_ends(network: _CandidateNetwork) -> tuple[int | None, int | None]:
    """Return the number of inputs and of outputs of a network's dense layers, if only one is possible."""
    inputs = {layer.width_in for layer in network.dense}
    outputs = {layer.width_out for layer in network.dense}
    first, last = inputs - outputs, outputs - inputs
    return (first.pop() if len(first) == 1 else None), (last.pop() if len(last) == 1 else -1)


def _is_policy(network: _CandidateNetwork) -> bool:
    return _find_role(network.name) is _POLICY and not _SLOW.search("_".join(network.name).lower())


def _is_critic(words: Sequence[str]) -> bool:
    return _find_role(words) is _CRITIC


def _find_role(words: Sequence[str]) -> re.Pattern[str] | None:
    """Return the role of the innermost role word: `actor` in actor_critic/actor, `q` in policy/q_net."""
    for word in reversed(words):
        roles = [role for role in (_POLICY, _CRITIC) if role.search(word.lower())]
        if len(roles) == 1:
            return roles[0]
    return None


class _SiblingTensors(NamedTuple):
    """Distinguishes a network's own tensors from those that a program saved beside its state_dict.

    `own` is the path of the dict with dotted names that contains the network, None if that is the whole
    file or has another form; `sizes` are the input and output sizes of its layers.
    """

    own: Path | None
    sizes: frozenset[int]
    statistics: tuple[str, ...]

    @classmethod
    def of(
        cls,
        network: _CandidateNetwork,
        tree: Tree,
        module: PickledModule | None,
        known: Collection[Path] = (),
    ) -> _SiblingTensors:
        """Return the surroundings of a network in the tree; a pickled module has none."""
        layers = [layer for group in network.groups if (layer := group.layer) is not None]
        paths = [entry.path for layer in layers for entry in layer.tensors.values()]
        own = paths[0][:-1] if paths else ()
        alike = all(path[:-1] == own and "." in str(path[-1].value) for path in paths)
        if module is not None or not alike or not own or any(step.kind != "key" for step in own):
            return cls(None, frozenset(), ())
        sizes = {size for layer in layers if _is_dense(layer) for size in (layer.width_in, layer.width_out)}
        widths = frozenset(size for size in sizes if size is not None)
        return cls(own, widths, tuple(_list_sibling_statistics(tree, own, widths, known)))

    def may_act(self, entry: NamedLeaf) -> bool:
        """Return whether the tensor may affect the policy's actions.

        A tensor outside the network's dict is assumed not to if it is an integer, one number, or of a size
        that no layer has, unless its name suggests otherwise.
        """
        if self.own is None or entry.path[: len(self.own)] == self.own:
            return True
        name, leaf = "/".join(entry.segments).lower(), entry.leaf
        if _OBSERVES.search(name):
            return True
        if "int" in leaf.dtype:
            return False
        size = math.prod(leaf.shape)
        if size == 1 and _OUTCOME.search(name):
            return False
        return bool(_CHANGES.search(name)) or (size != 1 and not self.sizes.isdisjoint(leaf.shape))

    @property
    def prefix(self) -> str:
        """The dict's name followed by a slash; empty if there is none."""
        return "".join(f"{step.value}/" for step in self.own or ())

    def hint(self, file: str) -> str | None:
        """Return the command that converts only the network, None if there is none."""
        part = self.prefix.removesuffix("/")
        words = f"ckpttool convert {shlex.quote(file)} OUT.pt --to torch --part {shlex.quote(part)}"
        return (
            f"if the policy does not use them, play only the network, written by: {words}" if part else None
        )


def _list_sibling_statistics(
    tree: Tree, own: Path, sizes: frozenset[int], known: Collection[Path]
) -> Iterator[str]:
    """Yield the names of observation statistics that are NumPy arrays or lists of numbers."""
    rows: dict[Path, int] = {}
    for path, leaf in tree.items():
        if path[: len(own)] == own or path in known:
            continue
        if isinstance(leaf, Leaf):
            listed = leaf.role == "other" and math.prod(leaf.shape) in sizes
            if listed and _STATISTICS.search(tree.names[path].lower()):
                yield tree.names[path]
        elif path[-1].kind == "index" and isinstance(leaf.value, float):
            rows[path[:-1]] = rows.get(path[:-1], 0) + 1
    for path, count in rows.items():
        name = "/".join(str(step.value) for step in path)
        if count in sizes and _STATISTICS.search(name.lower()):
            yield name


def _collect_policy(
    network: _CandidateNetwork, file: str, surroundings: _SiblingTensors
) -> tuple[tuple[ComponentLayer, ...], dict[str, NamedLeaf], tuple[str, ...]]:
    """Return the layers that compute the action, its action map buffers, and notes on omitted tensors.

    Raise UnsupportedError for a tensor outside supported layers: it might change every action.
    """
    layers: list[ComponentLayer] = []
    notes: list[str] = []
    known = [layer for group in network.groups if (layer := group.layer) is not None]
    dense = [layer for layer in known if _is_dense(layer)]
    streams = network.streams
    side = frozenset() if streams is None else streams.side
    if side:
        left = abbreviate_list(["/".join(layer.name) for layer in dense if layer.name in side], 4)
        notes.append(f"left out: {left}, judging by the names the state's value, the same for all actions")
    for layer in known:
        name = "/".join(layer.name)
        if layer.name in side:
            continue
        if _is_dense(layer) and len(dense) > 1 and _is_deviation(layer, dense):
            notes.append(f"{name} is left out: the policy is deterministic")
        elif _is_dense(layer) and len(dense) > 1 and _is_side_head(layer, dense):
            notes.append(f"{name} is left out: judging by its name, it is a value head")
        else:
            layers.append(layer)
    action_map, more = _sort_loose_tensors(network, layers, file, surroundings)
    return tuple(layers), action_map, (*notes, *more)


def _sort_loose_tensors(
    network: _CandidateNetwork, layers: Sequence[ComponentLayer], file: str, surroundings: _SiblingTensors
) -> tuple[dict[str, NamedLeaf], tuple[str, ...]]:
    """Return the action map buffers, and notes on the other tensors outside layers."""
    action_map: dict[str, NamedLeaf] = {}
    notes: list[str] = []
    beside: list[str] = []
    strange = list(surroundings.statistics)
    for group in network.groups:
        for name, entry in group.tensors.items() if group.kind is None else ():
            if name in _MAP:
                action_map[name] = entry
            elif name in LOG_STD or _is_of_actions(name, entry, layers) or _TEMPERATURE.search(name):
                notes.append(f"{'/'.join(entry.segments)} is left out: the policy is deterministic")
            elif surroundings.may_act(entry):
                strange.append("/".join(entry.segments))
            else:
                beside.append("/".join(entry.segments))
    if strange:
        outside = not any(name.startswith(surroundings.prefix) for name in strange)
        raise UnsupportedError(
            "the policy contains tensors that belong to no dense layer or norm",
            file=file,
            found=abbreviate_list(strange, 4),
            hint=surroundings.hint(file) if outside else None,
        )
    if beside:
        notes.append(f"not part of the policy: {abbreviate_list(beside, 4)}")
    return action_map, tuple(notes)


def _is_of_actions(name: str, entry: NamedLeaf, layers: Sequence[ComponentLayer]) -> bool:
    """Return whether name and size mark a tensor as the actions' spread, not the observations'."""
    widths = {layer.width_out for layer in layers if _is_dense(layer)}
    widths -= {layer.width_in for layer in layers if _is_dense(layer)}
    size = entry.leaf.size
    observed = _OBSERVED.search("/".join(entry.segments).lower())
    return _DEVIATION.search(name) is not None and not observed and (size == 1 or size in widths)


def _is_deviation(layer: ComponentLayer, dense: Sequence[ComponentLayer]) -> bool:
    # tf.layers.dense in the scope of its head is named pi/log_std/dense.
    named = [step for step in layer.name if not _UNNAMED.fullmatch(step)]
    last = named[-1] if named else ""
    if last not in LOG_STD and not _DEVIATION.search(last.lower()):
        return False
    sizes = [(other.width_in, other.width_out) for other in dense if other is not layer]
    return (layer.width_in, layer.width_out) in sizes


def _is_side_head(layer: ComponentLayer, dense: Sequence[ComponentLayer]) -> bool:
    """Return whether, by their names, a layer is a value head beside a policy head.

    A name of actions may also be an input's: such a head has the value's input.
    """
    if not _is_critic(layer.name[-1:]):
        return False
    names = [(other.name[-1].lower(), other.width_in == layer.width_in) for other in dense if other.name]
    return any(
        _POLICY.search(name) or _MEAN.search(name) or (beside and _ACTION_HEAD.search(name))
        for name, beside in names
    )


_ACTION_HEAD = deferred.compile(r"(^|_)(action|actions|logits|probs?)(_|$)")
_MEAN = deferred.compile(r"(^|_)(mean|mu|loc)(_|$)")


def _order_dense_layers(
    layers: Sequence[ComponentLayer], file: str, streams: layer_connections.Streams | None
) -> tuple[tuple[ComponentLayer, ...], tuple[str, ...]]:
    """Return the dense layers as the only chain that sizes, and then numbers in names, allow, and why."""
    dense = [module for module in layers if _is_dense(module)]
    names = [module.name for module in dense]
    if streams is not None and {*streams.order} == {*names}:
        orders, by_size = [tuple(map(names.index, streams.order))], streams.by_size
    else:
        orders, by_size = find_orders(names, [(m.width_in or 0, m.width_out or 0) for m in dense])
    if not orders:
        raise UsageError(
            "the dense layers do not form a chain",
            file=file,
            expected="each layer's input size equal to another layer's output size",
            found=abbreviate_list([_describe_layer(module) for module in dense], 8),
            hint=conversion_hint(file),
        )
    if len(orders) > 1:
        raise UsageError(
            "several layer orders fit, and it is unknown which one is right",
            file=file,
            found="; ".join(" ".join("/".join(names[n]) for n in indices) for indices in orders),
            hint=RECORDED_ORDER,
        )
    chain = [dense[n] for n in orders[0]]
    why = "the only order that their sizes allow" if by_size else "the order of their names and numbers"
    order = ", ".join("/".join(module.name) for module in chain)
    # A weights file does not show whether anything else is between them (a sum, a product).
    sentence = (
        f"the layers are applied in {why}, with exactly one activation and nothing else between: {order}"
    )
    assumed = (sentence,) if len(chain) > 1 else ()
    norms = [module for module in layers if not _is_dense(module)]
    placed, more = _insert_norms(chain, norms, file)
    return placed, (*assumed, *more)


def _describe_layer(module: ComponentLayer) -> str:
    return f"{'/'.join(module.name)} {module.width_in} -> {module.width_out}"


def _insert_norms(
    chain: list[ComponentLayer], norms: Sequence[ComponentLayer], file: str
) -> tuple[tuple[ComponentLayer, ...], tuple[str, ...]]:
    """Return the chain with each norm after the dense layer with its number, or its width.

    A batch norm may also come before the first layer, or after the last, which is not supported.
    """
    if not norms:
        return tuple(chain), ()
    kinds = {norm.kind.name for norm in norms}
    if len(kinds) > 1:
        raise UnsupportedError(
            "norms of different kinds in one chain",
            file=file,
            found=abbreviate_list(["/".join(norm.name) for norm in norms], 4),
        )
    word = kinds.pop().partition("_")[0]
    owners = [_find_owners(chain, norm) for norm in norms]
    placed: dict[int, ComponentLayer] = {}
    for norm, own in zip(norms, _choose_by_names(chain, norms, owners), strict=True):
        if len(own) != 1 or own[0] in placed or own[0] == len(chain) - 1:
            raise UsageError(
                f"it is unknown which layer a {word} norm follows",
                file=file,
                path="/".join(norm.name),
                found=abbreviate_list([_describe_layer(chain[n]) for n in own or range(len(chain))], 4),
            )
        placed[own[0]] = norm
    titles = [
        f"{'/'.join(norm.name)} {'after' if n >= 0 else 'before'} {'/'.join(chain[max(n, 0)].name)}"
        for n, norm in sorted(placed.items())
    ]
    layers = [item for n, dense in enumerate([None, *chain], -1) for item in (dense, placed.get(n))]
    return tuple(item for item in layers if item is not None), (
        f"{word} {NORMS_BEFORE}: {', '.join(titles)}",
    )


def _find_owners(chain: Sequence[ComponentLayer], norm: ComponentLayer) -> list[int]:
    """Return the positions of the dense layers that a norm may follow, -1 if it may be the first layer."""
    batch, last = norm.kind.name == "batch_norm", len(chain) - 1
    owners = [
        n for n, dense in enumerate(chain) if dense.width_out == norm.width_norm and (batch or n < last)
    ]
    if batch and chain[0].width_in == norm.width_norm:
        owners.append(-1)
    beside = (norm, *chain)
    if not all(map(_is_numbered, beside)) or len({layer.name[:-1] for layer in beside}) > 1:
        return owners
    before = sum(int(dense.name[-1]) < int(norm.name[-1]) for dense in chain) - 1
    return [n for n in owners if n == before]


def _choose_by_names(
    chain: Sequence[ComponentLayer], norms: Sequence[ComponentLayer], owners: Sequence[list[int]]
) -> list[list[int]]:
    """Return the positions that numbers in the names leave of those that widths allow.

    One norm for each hidden layer is in the order of the numbers; with a norm of the inputs these may differ
    from the layers' own, as in `bn1` before `fc1`.
    """
    hidden = [norm.name for norm, own in zip(norms, owners, strict=True) if -1 not in own]
    if any(-1 in own and len(own) > 1 for own in owners):
        return [*owners]
    if len(hidden) == len(chain) - 1 and len({_COUNTED.sub("", "/".join(name)) for name in hidden}) == 1:
        order = sorted(hidden, key=lambda name: [int(n) for n in _NUMBERS.findall("/".join(name))])
        return [
            [n for n in own if n == order.index(norm.name)] if norm.name in order else own
            for norm, own in zip(norms, owners, strict=True)
        ]
    if len(hidden) < len(norms):
        return [*owners]
    return [
        [n for n in own if _norm_follows(chain[n], norm)] or own
        for norm, own in zip(norms, owners, strict=True)
    ]


def _norm_follows(dense: ComponentLayer, norm: ComponentLayer) -> bool:
    dense_numbers, norm_numbers = (_NUMBERS.findall("/".join(m.name)) for m in (dense, norm))
    if not dense_numbers or not norm_numbers or dense_numbers[:-1] != norm_numbers[:-1]:
        return False
    if all(m.name and m.name[-1].isdigit() for m in (dense, norm)):
        return dense.name[:-1] == norm.name[:-1] and int(norm_numbers[-1]) == int(dense_numbers[-1]) + 1
    return bool(dense_numbers[-1] == norm_numbers[-1])


def _require_sequential(chain: Sequence[ComponentLayer], file: str) -> None:
    """Raise UnsupportedError if a Sequential has a norm after an activation, or none between layers.

    Layers numbered without any gap belong to a ModuleList, whose activations are in its code.
    """
    for one, two in pairwise(chain):
        if _is_numbered(one) and _is_numbered(two) and not _is_dense(two) and not _norm_follows(one, two):
            raise UnsupportedError(
                f"a {two.kind.name.replace('_', ' ')} comes after an activation",
                file=file,
                path="/".join(two.name),
                found=f"{'/'.join(one.name)} before it",
            )
    start = next(n for n, layer in enumerate(chain) if _is_dense(layer))
    pairs = [(one, two) for one, two in pairwise(chain[start:]) if _is_numbered(one) and _is_numbered(two)]
    gaps = {
        (one.name, two.name): int(two.name[-1]) - int(one.name[-1])
        for one, two in pairs
        if one.name[:-1] == two.name[:-1] and _is_dense(two)
    }
    for (before, name), gap in gaps.items():
        apart = [other for (_, other_name), other in gaps.items() if other_name[:-1] == name[:-1]]
        if gap == 1 and max(apart) > 1:
            raise UnsupportedError(
                "a Sequential has no activation between two layers",
                file=file,
                path="/".join(name),
                found=f"{'/'.join(before)} before it",
            )


def _has_recorded_activations(chain: Sequence[ComponentLayer], file: str) -> bool:
    """Return whether the file's sidecar has an activation, read from the source, for each hidden layer."""
    with contextlib.suppress(CkpttoolError):
        known = load_sidecar(file)
        hidden = sum(map(_is_dense, chain)) - 1
        return known is not None and known.is_read("activations") and len(known.activations or ()) == hidden
    return False


def _require_no_branches(chain: Sequence[ComponentLayer], file: str) -> None:
    """Raise UnsupportedError for layers that are no chain by their names, where no file records the order."""
    dense = [layer for layer in chain if _is_dense(layer)]
    widths = [(layer.width_in or 0, layer.width_out or 0) for layer in dense]
    if joined := layer_connections.find_joined_layers([layer.name for layer in dense], widths):
        raise UnsupportedError(
            "the names suggest layers that are added to others, or multiplied (residual connections, gates), "
            "and no file records the computation",
            file=file,
            expected="a chain of layers",
            found=abbreviate_list(joined, 4),
            hint=RECORDED_ORDER,
        )


def _is_numbered(layer: ComponentLayer) -> bool:
    """Return whether the layer is named like a part of torch's Sequential."""
    return bool(layer.name) and layer.name[-1].isdigit() and layer.kind.framework == "torch"


def _bind_steps(
    steps: Sequence[ChainStep],
    layers: Sequence[ComponentLayer],
    action_map: Mapping[str, NamedLeaf],
    where: tuple[str, str],
    lines: tuple[tuple[str, ...], tuple[str, ...], str],
    origin: str = _CONFIGURATION,
) -> RecognizedAgent:
    """Return the binding of a model whose own configuration lists its computation step by step."""
    from ckpttool.libraries import model_steps

    framework, file = where
    by_name = {module.name: module for module in layers}
    listed = model_steps.read_chain_facts(steps, file, origin)
    if sorted(listed.layers) != sorted(by_name):
        raise UsageError(
            "the model's configuration lists different layers than its weights",
            file=file,
            expected=abbreviate_list(["/".join(name) for name in listed.layers], 6),
            found=abbreviate_list(["/".join(module.name) for module in layers], 6),
        )
    chain = tuple(by_name[name] for name in listed.layers)
    width: int | None = None
    for module in chain:
        inputs = module.width_in if _is_dense(module) else module.width_norm
        if width is not None and inputs != width:
            raise UsageError("the dense layers do not form a chain", file=file, found=_describe_layer(module))
        width = module.width_out if _is_dense(module) else width
    facts = AgentMetadata(
        head="affine" if action_map else "",
        hidden="",
        epsilon=listed.epsilon if listed.epsilon is not None else _EPSILON[framework],
    )
    if isinstance(listed.activations, NotUnderstood):
        facts = facts.not_understood("activations", *astuple(listed.activations))
    elif listed.activations is not None:
        facts = facts._replace(activations=listed.activations)
        facts = facts.read(origin, activations=listed.activations) if listed.activations else facts
    if isinstance(listed.head, NotUnderstood):
        facts = facts.not_understood("head", *astuple(listed.head))
    elif listed.head:
        facts = facts.read(origin, head=listed.head)
    if listed.epsilon is not None:
        facts = facts.read(origin, epsilon=listed.epsilon)
    if listed.scale is not None:
        width_ = chain[-1].width_out if _is_dense(chain[-1]) else None
        low, high = listed.bounds(width_ or 1)
        facts = facts.read(f"{listed.origin} {OUTPUT_RANGE}", action_low=low, action_high=high)
    assumed, notes, title = lines
    return _make_agent(chain, facts, action_map, (*assumed, *listed.assumed), notes, title)


def _bind_traced(
    steps: Sequence[ChainStep], tree: Tree, file: str, framework: str, origin: str
) -> RecognizedAgent:
    """Return the binding of a model whose code or graph was traced to its layers' tensors."""
    from ckpttool.libraries.model_steps import ChainStep, LayerTensors

    listed: list[ChainStep] = []
    layers: list[ComponentLayer] = []
    for number, step in enumerate(steps):
        weights = step.value
        if not isinstance(weights, LayerTensors):
            listed.append(step)
            continue
        kind = SPELLING[weights.framework or framework, step.kind]
        paths = (weights.weight, weights.bias)
        # Dense layers and norms of both frameworks have two tensors: a factor and an offset.
        tensors = {
            weight.name: NamedLeaf(path, tuple(tree.names[path].split("/")), cast(Leaf, tree[path]))
            for weight, path in zip(kind.weights, paths, strict=True)
            if path is not None
        }
        if not kind.fits({name: entry.leaf for name, entry in tensors.items()}):
            raise UnsupportedError("a layer's tensors have the wrong shapes for its kind", file=file)
        name = tuple(tree.names[weights.weight].split("/")[:-1])
        if not name or name == ("CONSTANTS",) or any(name == layer.name for layer in layers):
            name = (f"l{number}",)
        layers.append(ComponentLayer(name, kind, tensors))
        listed.append(ChainStep(step.kind, name, weights.epsilon))
    return _bind_steps(listed, layers, {}, (framework, file), ((), (), "its output"), origin)


def _bind_computation(computation: GraphComputation, checkpoint: Checkpoint) -> RecognizedAgent:
    """Return the binding of a recorded computation: a chain of layers, else a program."""
    origin, framework = _ORIGINS[checkpoint.format]
    if computation.steps is not None:
        with contextlib.suppress(MappingError, UnsupportedError, UsageError):
            binding = _bind_traced(computation.steps, checkpoint.tree, checkpoint.path, framework, origin)
            facts = (
                binding.facts
                if computation.norm is None
                else binding.facts.read(origin, norm=computation.norm)
            )
            consumed = binding.consumed | frozenset(computation.used)
            binding = replace(binding, facts=facts, consumed=consumed).noted(*computation.notes)
            return _with_choices(binding, computation, origin)
    return _bind_program(computation, checkpoint.tree, origin)


def _with_choices(binding: RecognizedAgent, computation: GraphComputation, origin: str) -> RecognizedAgent:
    """Return the binding of a chain with the choice of discrete actions behind it, if nothing else is."""
    if computation.choices is None or not binding.facts.head:
        return binding
    if binding.facts.head != "identity":
        raise UnsupportedError("the scores of the actions are not the last layer")
    return replace(binding, facts=binding.facts.read(origin, head="argmax", choices=computation.choices))


def _make_agent(
    chain: Sequence[ComponentLayer],
    facts: AgentMetadata,
    action_map: Mapping[str, NamedLeaf],
    assumed: Sequence[str],
    notes: Sequence[str],
    title: str,
) -> RecognizedAgent:
    layers = tuple(AgentLayer(module.name or ("layer",), module.kind.name) for module in chain)
    policy = AgentNetwork("actor", None, layers)
    moves = [
        Move(
            module.tensors[w.name].path, schema.canonical_weight_path(policy, n, w.canonical), w.to_canonical
        )
        for n, module in enumerate(chain)
        for w in module.kind.weights
        if w.name in module.tensors
    ]
    moves += [Move(entry.path, (attr("actor"), attr(name)), KEEP) for name, entry in action_map.items()]
    if action_map and "head" not in facts.origins:
        assumed = (*assumed, "the action is tanh(last layer) * action_scale + action_bias")
    return RecognizedAgent(
        layout=NO_LAYOUT,
        moves=MoveList(tuple(moves), tuple(assumed), tuple(notes)),
        parts=(policy,),
        facts=facts,
        evidence=f"a chain of layers: {title}",
    )
