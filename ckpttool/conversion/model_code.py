"""Write the Python module that defines, loads and runs the networks of a converted agent.

The modules of the code have the names of the written file's tensors, so that it loads strictly. What they
compute is the network that every backend runs: the emitter writes one statement for each of its nodes. Which
tensor of the file is which array of a network: the network is built a second time from tensors that contain
their own numbers instead of weights, and the numbers that arrive in a layer name its tensors.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpttool.conversion.loading_code import is_word, python_literal
from ckpttool.conversion.targets import TARGETS, TargetKind, find_target_name
from ckpttool.core import sidecar
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATION_KINDS
from ckpttool.core.source import Inline
from ckpttool.core.text import clean
from ckpttool.core.tree import Leaf, Path, Tree, attr, display
from ckpttool.evaluation.agent_networks import (
    ActionBounds,
    build_part_network,
    derive_network_settings,
    require_even_bounds,
)
from ckpttool.evaluation.restore import Agent
from ckpttool.libraries.schema import NORMALIZER, AgentNetwork
from ckpttool.mapping.keras_names import SEQUENTIAL_EDGES
from ckpttool.mapping.rules import KEEP, Move, Permute, Rule
from ckpttool.networks.build import UNBOUNDED, NetworkSettings, policy_network
from ckpttool.networks.network import (
    Activation,
    Affine,
    AtomMean,
    Clip,
    Concat,
    Dense,
    Layer,
    LayerNorm,
    Network,
    QuantileMean,
    value_shapes,
)
from ckpttool.version import __version__

Names = tuple[str, ...]
"""Names of the modules above a tensor, and its own."""
_WRAPPER = "net"
# Attributes of torch.nn.Module, and those of tf.Module, keras.Layer and keras.Model, which no submodule may
# replace.
_IN_TORCH = """
    T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double
    dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
    get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules
    named_parameters parameters register_backward_hook register_buffer register_forward_hook
    register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module
    register_parameter register_state_dict_post_hook register_state_dict_pre_hook requires_grad_
    set_extra_state set_submodule share_memory state_dict to to_empty train training type xpu
    zero_grad
"""
_IN_KERAS = """
    build build_from_config call compiled compute_mask compute_metrics compute_output_shape
    compute_output_spec count_params dtype dtype_policy evaluate from_config get_compile_config
    get_config get_layer inbound_nodes input input_dtype input_spec layers load_own_variables
    load_weights losses metrics metrics_names metrics_variables name name_scope
    non_trainable_variables non_trainable_weights optimizer outbound_nodes output path predict
    quantization_mode quantize quantized_build remove_from_graph reset_metrics run_eagerly save
    save_own_variables save_weights set_state_tree set_weights stateless_call submodules summary
    supports_jit supports_masking symbolic_call to_json train_step trainable trainable_variables
    trainable_weights variable_dtype variables weights with_name_scope
"""
TORCH_ATTRIBUTES = frozenset(_IN_TORCH.split())
_RESERVED = TORCH_ATTRIBUTES | frozenset(_IN_KERAS.split())


def torch_function(activation: str) -> str:
    """Return the function of an activation: of torch itself, or of torch.nn.functional."""
    return (
        f"torch.{activation}" if activation in ("relu", "tanh", "sigmoid") else f"nn.functional.{activation}"
    )


class _StoredArray(NamedTuple):
    """An array of a layer: its field, its name in the framework's layer, and the rule from that layout."""

    field: str
    name: str
    rule: Rule = KEEP


class Framework(NamedTuple):
    """What differs between the code for PyTorch and that for Keras (in a tf.Module, or in a keras.Model).

    `stored` are the arrays of each layer class, `expressions` the templates of the operators.
    """

    torch: bool
    imports: tuple[str, ...]
    base: str
    root: str
    call: str
    stored: Mapping[type[Layer], tuple[_StoredArray, ...]]
    expressions: Mapping[str, str]


_KERAS = Framework(
    False,
    ("import keras", "import numpy as np"),
    "keras.layers.Layer",
    "keras.Model",
    "call",
    {
        Dense: (_StoredArray("kernel", "kernel"), _StoredArray("bias", "bias")),
        LayerNorm: (_StoredArray("scale", "gamma"), _StoredArray("offset", "beta")),
    },
    {
        "sqrt": "keras.ops.sqrt({x})",
        "concat": "keras.ops.concatenate([{xs}], axis=-1)",
        "flatten": "keras.ops.reshape({x}, (-1, {size}))",
        "clip": "keras.ops.clip({x}, {low}, {high})",
        "limit": "keras.ops.minimum(keras.ops.maximum({x}, {low}), {high})",
        "grouped": "keras.ops.reshape({x}, (-1, {rows}, {columns}))",
        "mean": "keras.ops.mean({x}, axis={axis})",
        "centred": "keras.ops.mean({x}, axis=1, keepdims=True)",
        "softmax": "keras.ops.softmax({x}, axis=-1)",
        "sum": "keras.ops.sum({x}, axis=-1)",
        "float": 'keras.ops.cast({x}, "float32")',
        "double": 'keras.ops.cast({x}, "float64")',
    },
)
_TENSORFLOW = _KERAS._replace(
    imports=("import keras", "import numpy as np", "import tensorflow as tf"),
    base="tf.Module",
    root="tf.Module",
    call="__call__",
)
_TORCH = Framework(
    True,
    ("import numpy as np", "import torch", "from torch import nn"),
    "nn.Module",
    "nn.Module",
    "forward",
    {
        Dense: (_StoredArray("kernel", "weight", Permute((1, 0))), _StoredArray("bias", "bias")),
        LayerNorm: (_StoredArray("scale", "weight"), _StoredArray("offset", "bias")),
    },
    {
        "sqrt": "torch.sqrt({x})",
        "concat": "torch.cat([{xs}], dim=-1)",
        "flatten": "{x}.flatten(1)",
        "clip": "torch.clamp({x}, {low}, {high})",
        "limit": "torch.minimum(torch.maximum({x}, {low}), {high})",
        "grouped": "{x}.unflatten(-1, ({rows}, {columns}))",
        "mean": "{x}.mean({axis})",
        "centred": "{x}.mean(1, keepdim=True)",
        "softmax": "{x}.softmax(-1)",
        "sum": "({x}).sum(-1)",
        "float": "({x}).float()",
        "double": "{x}.double()",
    },
)
# Targets whose files a custom program loads: the others belong to a library, which has its own code.
_FRAMEWORKS = {"torch": _TORCH, "tf": _TENSORFLOW, "keras": _KERAS, "safetensors": _TORCH, "npz": _TORCH}


def require_code_target(kind: TargetKind) -> None:
    """Raise UnsupportedError for a target whose loading code is a library's own."""
    if not any(kind is TARGETS[name] for name in _FRAMEWORKS):
        raise UnsupportedError(
            "--code does not apply to this target: its library or runtime has its own code",
            expected=", ".join(_FRAMEWORKS),
            hint="leave out --code, or use --to torch",
        )


@dataclass(slots=True, eq=False)
class Module:
    """A module: its submodules, its own tensors, the layer that it is, the items if it is sequential."""

    children: dict[str, Module] = field(default_factory=dict)
    tensors: dict[str, Leaf] = field(default_factory=dict)
    layer: Layer | None = None
    sequential: bool = False
    items: tuple[_Item, ...] = ()

    def at(self, names: Names) -> Module:
        """Return the module of these names."""
        return self if not names else self.children[names[0]].at(names[1:])

    def add(self, names: Names, leaf: Leaf) -> None:
        """Add a tensor, with the modules above it."""
        if len(names) == 1:
            self.tensors[names[0]] = leaf
        else:
            self.children.setdefault(names[0], Module()).add(names[1:], leaf)

    def walk(self, names: Names = ()) -> Iterator[tuple[Names, Module]]:
        """Yield the module and all modules below it, with their names."""
        yield names, self
        for name, child in self.children.items():
            yield from child.walk((*names, name))

    @property
    def numbered(self) -> bool:
        """Return whether the submodules are numbered, without other content."""
        return bool(self.children) and not self.tensors and all(map(is_number, self.children))

    @property
    def counted(self) -> bool:
        """Return whether the submodules are numbered from 0 without a gap."""
        return self.numbered and sorted(map(int, self.children)) == [*range(len(self.children))]

    @property
    def safe(self) -> bool:
        """Return whether all names can be attributes."""
        return not self.sequential and all(map(is_safe, (*self.children, *self.tensors)))


class _Item(NamedTuple):
    """A layer of a sequential module by its name, and the activation after it."""

    name: str
    activation: Activation | None


def is_number(name: str) -> bool:
    """Return whether a module's name is the number of an item."""
    return name.isascii() and name.isdecimal() and len(name) < 5 and str(int(name)) == name


def is_safe(name: str) -> bool:
    """Return whether a module may have this attribute in every framework."""
    return is_word(name) and name.isascii() and name not in _RESERVED and not name.startswith("_")


class NumberedTree(NamedTuple):
    """The canonical tree with numbers instead of weights, and the move of each tensor by its first number."""

    tree: Tree
    moves: Mapping[int, Move]

    def move(self, array: np.ndarray) -> Move | None:
        """Return the move of the tensor that an array is, None if it is no tensor as a whole."""
        if array.dtype != np.float32 or not array.size:
            return None
        numbers = np.ascontiguousarray(array).view(np.int32)
        first = int(numbers.flat[0])
        move = self.moves.get(first)
        expected = np.arange(first, first + array.size, dtype=np.int32).reshape(array.shape)
        if move is None or self.leaf(move).shape != array.shape:
            return None
        return move if np.array_equal(numbers, expected) else None

    def leaf(self, move: Move) -> Leaf:
        """Return the tensor that a move makes."""
        leaf = self.tree[move.target]
        assert isinstance(leaf, Leaf)  # noqa: S101 - only tensors have numbers
        return leaf


def number_tensors(agent: Agent) -> NumberedTree:
    """Return the agent's tree with numbers: bits of float32, which are moved but never rounded."""
    moves = [*agent.binding.moves.moves, *(m for front in agent.binding.fronts.values() for m in front.moves)]
    by_target = {move.target: move for move in reversed(moves)}
    leaves = dict(agent.tree.items())
    owners: dict[int, Move] = {}
    firsts: dict[tuple[Path, str], int] = {}
    free = 1
    for path, leaf in agent.tree.tensors():
        move = by_target.get(path)
        if move is None:
            continue
        # Two networks that share a tensor share its numbers.
        first = firsts.setdefault((move.source, move.rule.name), free)
        free = max(free, first + leaf.size)
        owners.setdefault(first, move)
        data = np.arange(first, first + leaf.size, dtype=np.int32).tobytes()
        leaves[path] = replace(leaf, dtype="float32", source=Inline(data), of=None)
    return NumberedTree(Tree(leaves), owners)


class _StateDict(NamedTuple):
    """The tensors that one object loads: its path in the file, its modules' names, its keys' prefix."""

    path: Path
    names: Names
    prefix: str = ""


class _Statistics(NamedTuple):
    """Observation statistics in the file: the two tensors, and the deviation's expression of `{x}`."""

    mean: Names
    spread: Names
    deviation: str


class _Part(NamedTuple):
    """A network to write: its part of the agent, its nodes, and its layers' modules by node number.

    `runs` are the sequential modules that compute several nodes, with the number after their last one.
    """

    part: AgentNetwork
    network: Network
    modules: Mapping[int, Names]
    statistics: _Statistics | None
    runs: dict[int, tuple[Names, int]]

    @property
    def names(self) -> list[Names]:
        """The modules that it computes with."""
        own = self.statistics
        return [*self.modules.values(), *((own.mean[:-1], own.spread[:-1]) if own is not None else ())]

    def uses(self) -> Counter[int]:
        """Return how often each value is used."""
        used = Counter(number for node in self.network.nodes for number in node.inputs)
        used[self.network.output] += 1
        return used


def write_code(agent: Agent, kind: TargetKind, source: str, digests: tuple[str | None, str]) -> str:
    """Return the text of a Python module for the written agent: its classes, `load(path)` and `act`.

    Args:
        agent: the agent of the written file, with the facts of its sidecar.
        kind: the target's kind, see `require_code_target`.
        source: the path of the converted checkpoint.
        digests: the digests of the source, if it is known, and of the written file.

    Raise UnsupportedError for a network that cannot be written exactly, UsageError for a missing fact.
    The text imports only the framework, numpy, and safetensors for such files.
    """
    return _Writer(agent, kind).text(source, digests)


def derive_code_settings(agent: Agent) -> tuple[NetworkSettings, sidecar.LedgerEntries]:
    """Return the settings of the agent's networks; raise UsageError without a fact that an option gives."""
    try:
        settings, assumed = derive_network_settings(agent, ActionBounds((), (), None))
    except UnsupportedError as error:
        # The file states it in a form that is not understood.
        raise UsageError(error.message, file=error.file, found=error.found, hint=error.hint) from error
    if settings.choices is None and settings.action_low:
        require_even_bounds(agent, settings)
    elif settings.choices is None and settings.head not in UNBOUNDED:
        raise UsageError(
            "--code needs the action bounds, which no file contains",
            file=agent.checkpoint.path,
            hint="add --env ID, or --bounds LOW HIGH",
        )
    return settings, assumed


class _AgentModules:
    """The modules of a written agent's file, and the networks that compute with them."""

    def __init__(self, agent: Agent, kind: TargetKind) -> None:
        self.agent, self.file = agent, agent.checkpoint.path
        self.target = find_target_name(kind)
        self.framework = _FRAMEWORKS[self.target]
        settings, assumed = derive_code_settings(agent)
        self.settings = settings
        # The target's layout assumes what the source's did.
        known = {entry.value for entry in agent.ledger}
        self.ledger = (*agent.ledger, *(entry for entry in assumed if entry.value not in known))
        self.skipped: list[str] = []
        self.numbered = number_tensors(agent)
        moved = [display(move.source).rpartition("/")[2] for move in self.numbered.moves.values()]
        self.arrays = self.target in ("safetensors", "npz")
        if self.arrays and any(name.rpartition(".")[2] in ("kernel", "_kernel") for name in moved):
            self.framework = _TENSORFLOW
        # Keras itself loads only files with this suffix.
        self.by_key = self.target == "keras" and not self.file.endswith(".weights.h5")
        self.root = Module()
        self.places = self._read_places()
        self.wrapper: Names = ()
        # Keras loads a file into a model, whose attributes may have any name; nothing else loads one.
        if not self.root.safe and (self.target != "keras" or self.root.sequential):
            self.wrapper = (_WRAPPER,)
            self.root = Module({_WRAPPER: self.root})
            self.places = [state._replace(names=(_WRAPPER, *state.names)) for state in self.places]
        self._require_names()
        self.parts = self._read_parts()
        for names, module in self.root.walk():
            sequential = module.sequential or (self.framework.torch and module.numbered)
            if names and sequential and not self._plan_sequence(names, module) and module.sequential:
                raise self.refuse("a Sequential whose layers are not used in order", "/".join(names))

    def refuse(self, what: str, found: str | None = None, hint: str | None = None) -> UnsupportedError:
        """Return the error for something that the code cannot express."""
        return UnsupportedError(f"--code cannot write {what}", file=self.file, found=found, hint=hint)

    def _read_places(self) -> list[_StateDict]:
        """Add the tensors of the networks' state_dicts, or objects, to the root; return these."""
        tree = self.agent.checkpoint.tree
        used = {move.source for move in self.numbered.moves.values()}
        paths = [path for path, _ in tree.tensors() if path in used]
        if not self.framework.torch:
            return [self._read_objects(paths)]
        tops = list(dict.fromkeys(path[:-1] for path in paths))
        common = _common_prefix(tops) if len(tops) > 1 else tops[0]
        dicts: list[_StateDict] = []
        for top in tops:
            # The program's own names for the objects that it loads are free.
            names = tuple(str(step.value) for step in top[len(common) :])
            if not all(map(is_safe, names)):
                names = (f"network_{len(dicts)}",)
            prefixes: set[str | None] = set()
            for path, leaf in tree.tensors():
                if path[:-1] == top and leaf.slot is None:
                    name = str(path[-1].value)
                    self.root.add((*names, *name.split(".")), leaf)
                    prefixes.add(leaf.key.removesuffix(name) if leaf.key.endswith(name) else None)
            if self.arrays and (len(prefixes) > 1 or None in prefixes):
                raise self.refuse("names that the file stores in another form", display(top))
            dicts.append(_StateDict(top, names, str(next(iter(prefixes)))))
        return dicts

    def _read_objects(self, paths: Sequence[Path]) -> _StateDict:
        """Add the variables of an object graph; the names of a Sequential's own edges are left out."""
        tree = self.agent.checkpoint.tree
        # The name of one object at the root, except in a Keras file, whose root is the model.
        common = () if self.target == "keras" else _common_prefix([path[:-2] for path in paths])[:1]
        if any(str(step.value) in (*SEQUENTIAL_EDGES, "layers") for step in common):
            common = ()
        for path in paths:
            leaf = tree[path]
            steps = [str(step.value) for step in path[len(common) :]]
            if not isinstance(leaf, Leaf) or leaf.dtype != "float32":
                raise self.refuse("variables of another type than float32 for Keras", tree.names[path])
            self.root.add(_without_edges(steps), leaf)
            self.by_key |= self.target == "keras" and not _loaded_by_keras(steps[:-1], leaf.key)
            above: list[str] = []
            for number, step in enumerate(steps):
                if step == "layers" or tuple(steps[number : number + 2]) == SEQUENTIAL_EDGES:
                    self.root.at(tuple(above)).sequential = True
                if step not in (*SEQUENTIAL_EDGES, "layers"):
                    above.append(step)
        containers = {names for names, module in self.root.walk() if module.children}
        for path, leaf in tree.tensors():
            # Variables beside the layers: an entropy coefficient, a deviation.
            names = tuple(str(step.value) for step in path[len(common) :])
            if len(names) > 1 and names[-2] == _OWN_VARIABLES:
                names = (*names[:-2], f"variable_{names[-1]}")
            beside = path[: len(common)] == common and names[:-1] in containers and leaf.slot is None
            if beside and leaf.dtype == "float32" and names[-1] not in self.root.at(names[:-1]).children:
                self.root.add(names, leaf)
                self.root.at(names[:-1]).children.pop(_OWN_VARIABLES, None)
        return _StateDict(common, ())

    def _require_names(self) -> None:
        """Raise UnsupportedError for names that no module can have."""
        for names, module in self.root.walk():
            for name in (*module.children, *module.tensors):
                if not name or name in _RESERVED or name in _DICT_METHODS or not name.isprintable():
                    raise self.refuse(
                        "a module or tensor of this name", python_literal("/".join((*names, name)))
                    )

    def names(self, move: Move) -> Names:
        """Return the names of the module and the tensor that a move reads."""
        path = move.source
        for state_dict in self.places:
            if self.framework.torch and path[:-1] == state_dict.path:
                return (*state_dict.names, *str(path[-1].value).split("."))
        steps = [str(step.value) for step in path[len(self.places[0].path) :]]
        return (*self.wrapper, *_without_edges(steps))

    def _read_parts(self) -> list[_Part]:
        numbered = replace(self.agent, tree=self.numbered.tree)
        parts = []
        # A dueling network is one with its state value.
        values = [part.state_value for part in self.agent.binding.parts]
        for part in self.agent.binding.parts:
            if part in values:
                continue
            try:
                build = self._network(part)
                network, twin = build(self.agent), build(numbered)
            except CkpttoolError as error:
                if part is self.agent.binding.policy:
                    raise
                self.skipped.append(f"{part.title}: {error.message}")
                continue
            parts.append(self._bind(part, network, twin))
        if not parts:
            raise self.refuse("a file without a network that can be run")
        return parts

    def _network(self, part: AgentNetwork) -> Callable[[Agent], Network]:
        """Return what builds a network from an agent's tree."""
        agent, settings = self.agent, self.settings
        if not part.acts:
            whole = agent.runnable(part.title) or part
            return lambda agent: build_part_network(agent, whole, settings)
        chosen = agent.playable(part.title) or part
        normed = any(layer.kind == "batch_norm" for layer in chosen.layers)
        if normed or chosen.program is not None or agent.front(part.title) is not None:
            what = "a policy with an encoder, memory, batch norms or a graph in the file"
            raise self.refuse(what, part.title, "use --to onnx, which runs the policy")
        scored = settings if settings.choices is None else settings.scores
        return lambda agent: policy_network(agent.tree, chosen, scored)

    def _bind(self, part: AgentNetwork, network: Network, numbered: Network) -> _Part:
        """Return the network with the module of each of its layers."""
        modules: dict[int, Names] = {}
        # Shared layers, which the builder finds by their values, are computed twice with numbers or not.
        if [type(n.layer) for n in network.nodes] != [type(n.layer) for n in numbered.nodes]:
            network = _with_constants(network, numbered)
        for number, (node, twin) in enumerate(zip(network.nodes, numbered.nodes, strict=True)):
            constant = isinstance(node.layer, Dense) and node.layer.constant
            if type(node.layer) in self.framework.stored and not constant:
                modules[number] = self._layer_module(part.title, node.layer, twin.layer)
        return _Part(part, network, modules, self._statistics(part, network), {})

    def _layer_module(self, title: str, layer: Layer, numbered: Layer) -> Names:
        """Return the names of the module that holds a layer's tensors, and note the layer there."""
        places, stored = set(), set()
        for array in self.framework.stored[type(layer)]:
            value = getattr(numbered, array.field)
            if value is None:
                continue
            move = self.numbered.move(value)
            names = () if move is None else self.names(move)
            if move is None or move.rule != array.rule or names[-1].removeprefix("_") != array.name:
                name = None if move is None else self.agent.checkpoint.tree.names[move.source]
                raise self.refuse(f"{title}: a layer in another form than the framework's own", name)
            stored.add(names[-1])
            places.add(names[:-1])
        names = places.pop()
        module = self.root.at(names)
        if places or {*module.tensors} != stored or module.children or not names:
            raise self.refuse(f"{title}: a layer with further tensors", "/".join(names))
        module.layer = layer
        return names

    def _statistics(self, part: AgentNetwork, network: Network) -> _Statistics | None:
        """Return the observation statistics in the file; those of the sidecar alone are constants."""
        norm, tree = self.settings.obs_norm, self.agent.tree
        paths = {name: (attr(NORMALIZER), attr(name)) for name in ("mean", "var", "std")}
        stored = {name: leaf for name in paths if isinstance(leaf := tree.get(paths[name]), Leaf)}
        first = network.nodes[0].layer if network.nodes else None
        if norm is None or "mean" not in stored or not isinstance(first, Affine):
            return None
        moves = {move.target: move for move in self.agent.binding.moves.moves}
        spread = "var" if "var" in stored else "std"
        if spread in stored and "parts" not in norm and all(paths[n] in moves for n in ("mean", spread)):
            used = [moves[paths[name]] for name in ("mean", spread)]
            mean, width = (stored[name].array().astype(np.float64).reshape(-1) for name in ("mean", spread))
            epsilon = float(norm.get("epsilon", 1e-8))
            deviation = np.sqrt(np.asarray(norm["var"]) + epsilon)
            form = _deviation_form(spread, width, deviation, epsilon)
            same = np.array_equal(mean, np.asarray(norm["mean"])) and form is not None
            if same and all(move.rule == KEEP for move in used):
                return _Statistics(self.names(used[0]), self.names(used[1]), str(form))
        raise self.refuse("observation statistics in the form in which the file stores them", part.title)

    def _plan_sequence(self, names: Names, module: Module) -> bool:
        """Note the items of a module if every network computes its layers one after the other."""
        runs: list[tuple[_Part, int, int, tuple[_Item, ...]]] = []
        for part in self.parts:
            numbers = [number for number, own in part.modules.items() if own[:-1] == names]
            if numbers:
                run = _find_run(part, numbers)
                if run is None:
                    return False
                runs.append((part, numbers[0], *run))
        items = {run[3] for run in runs}
        if len(items) != 1 or [i.name for i in runs[0][3]] != sorted(module.children, key=int):
            return False
        (kept,) = items
        if self.framework.torch and not _has_room(kept):
            return False
        # A Keras file names the layers by class and order, whatever their numbers.
        counted = [int(item.name) for item in kept] == [*range(1, len(kept) + 1)]
        if not self.framework.torch and self.target != "keras" and not counted:
            return False
        module.items = kept
        for part, start, stop, _ in runs:
            part.runs[start] = (names, stop)
        return True


# Where a Keras file keeps the variables of an object that is no layer, by number.
_OWN_VARIABLES = "vars"
_DICT_METHODS = frozenset(("clear", "items", "keys", "pop", "update", "values"))


def _loaded_by_keras(steps: Sequence[str], key: str) -> bool:
    """Return whether Keras, which names layers by attributes, or by class and order, finds a layer's key."""
    stored = key.rpartition("/vars/")[0].split("/")
    own = [*steps[:-1], *(step for step in steps[-1:] if step != _OWN_VARIABLES)]
    listed = own[-2:-1] == ["layers"]
    if listed and not re.fullmatch(r"(dense|layer_normalization)(_\d+)?", stored[-1]):
        return False
    pairs = enumerate(zip(own, stored, strict=False))
    return len(own) == len(stored) and all(a == b or (n and own[n - 1] == "layers") for n, (a, b) in pairs)


def _without_edges(steps: Sequence[str]) -> Names:
    """Return the names on an object's path without the edges between a Sequential and its layers."""
    return tuple(step for step in steps if step not in (*SEQUENTIAL_EDGES, "layers"))


def _common_prefix(paths: Sequence[Path]) -> Path:
    common = paths[0]
    for path in paths:
        while path[: len(common)] != common:
            common = common[:-1]
    return common


def _with_constants(network: Network, numbered: Network) -> Network:
    """Return the numbered network, whose layers without tensors have the values of the other.

    Raise UnsupportedError if it has other such layers.
    """
    kinds = (Dense, LayerNorm, Activation)
    free = iter([n.layer for n in network.nodes if not isinstance(n.layer, kinds)])
    nodes = []
    for node in numbered.nodes:
        if not isinstance(node.layer, kinds):
            twin = next(free, None)
            if type(twin) is not type(node.layer):
                raise UnsupportedError("--code cannot write a network whose layers depend on its weights")
            node = replace(node, layer=twin)
        nodes.append(node)
    return replace(numbered, nodes=tuple(nodes))


def _deviation_form(name: str, width: np.ndarray, deviation: np.ndarray, epsilon: float) -> str | None:
    """Return the expression of the standard deviation of the tensor `{x}`, None if it is another one."""
    root = width if name == "std" else np.sqrt(width)
    outside = float(f"{np.median(deviation - root):.6g}") if width.shape == deviation.shape else np.nan
    if name == "var" and epsilon and np.allclose(np.sqrt(width + epsilon), deviation, rtol=1e-9, atol=0):
        return f"{{sqrt}}({{x}} + {epsilon!r})"
    if np.allclose(root + outside, deviation, rtol=1e-7, atol=0):
        return f"({'{x}' if name == 'std' else '{sqrt}({x})'} + {outside!r})"
    return None


def _find_run(part: _Part, numbers: Sequence[int]) -> tuple[int, tuple[_Item, ...]] | None:
    """Return the number after the last node of a chain of layers and activations, and its items."""
    nodes, uses, shift = part.network.nodes, part.uses(), len(part.network.inputs)
    items, number = [], numbers[0]
    for expected in numbers:
        if number != expected or (number > numbers[0] and nodes[number].inputs != (shift + number - 1,)):
            return None
        activation, layer = None, part.modules[number][-1]
        after = nodes[number + 1] if number + 1 < len(nodes) else None
        follows = after is not None and after.inputs == (shift + number,) and uses[shift + number] == 1
        if after is not None and follows and isinstance(after.layer, Activation):
            activation, number = None if after.layer.name == "linear" else after.layer, number + 1
        if uses[shift + number] != 1 and expected != numbers[-1]:
            return None
        items.append(_Item(layer, activation))
        number += 1
    return number, tuple(items)


def _has_room(items: Sequence[_Item]) -> bool:
    """Return whether the numbers of the layers leave room for the activations between them."""
    pairs = itertools.pairwise(items)
    return all(int(b.name) - int(a.name) > (a.activation is not None) for a, b in pairs)


class _Class(NamedTuple):
    """A class of the code: the modules below its own, and the networks that are its methods."""

    names: Names
    parts: tuple[_Part, ...]


class _Expression(NamedTuple):
    """Code of a value; `compound` needs brackets inside another operator."""

    text: str
    compound: bool = False

    @property
    def inner(self) -> str:
        """The code as an operand."""
        return f"({self.text})" if self.compound else self.text


class _Writer(_AgentModules):
    """Writes the code of an agent's modules and networks."""

    def __init__(self, agent: Agent, kind: TargetKind) -> None:
        super().__init__(agent, kind)
        self.constants: dict[str, np.ndarray] = {}
        self.helpers: set[str] = set()
        self.class_names: dict[Names, str] = {}
        self.unbuilt: dict[Names, int] = {}

    def text(self, source: str, digests: tuple[str | None, str]) -> str:
        """Return the whole module."""
        classes = self._classes()
        policy = self.agent.binding.policy
        acting = next((part for part in self.parts if part.part is policy), None)
        load = self._load()
        act = [] if acting is None else self._act(acting)
        helpers = [_HELPERS[name] for name in sorted(self.helpers)]
        constants = [f"{name} = {array_code(array)}" for name, array in self.constants.items()]
        blocks = ["\n".join(self._comment(source, digests)), "\n".join(self._imports()), *constants]
        functions = [*helpers, *classes, "\n".join(load), *(["\n".join(act)] if act else [])]
        return "\n\n".join(blocks) + "\n\n\n" + "\n\n\n".join(functions) + "\n"

    def _comment(self, source: str, digests: tuple[str | None, str]) -> Iterator[str]:
        """Yield the lines about the file and the facts that are used and assumed."""
        yield '"""Networks of a checkpoint: `load(path)` returns them with their weights."""'
        yield ""
        yield from _comment_lines(f"Written by ckpttool {__version__} from {source}" + _digest(digests[0]))
        yield from _comment_lines(f"for {self.file}{_digest(digests[1])}.")
        for line in sidecar.describe_decisions(self.ledger):
            yield from _comment_lines(line)
        for skipped in self.skipped:
            yield from _comment_lines(f"not computed here: {skipped}")

    def _imports(self) -> list[str]:
        lines = [*self.framework.imports]
        if self.target == "safetensors":
            kind = "torch" if self.framework.torch else "numpy"
            lines.append(f"from safetensors.{kind} import load_file")
        return ["import h5py", *lines] if self.by_key else lines

    # Classes.

    def _classes(self) -> list[str]:
        """Return the text of the classes; those of equal text are one."""
        owners = self._owners()
        root = _Class((), () if owners else tuple(self.parts))
        classes: dict[str, str] = {}
        for owner in owners:
            (last,) = owner.names
            body = self._class_body(owner)
            if body not in classes:
                name = "".join(word.capitalize() for word in last.split("_"))
                used_names = (*classes.values(), "Agent", "Group", "Tensors")
                classes[body] = (
                    name if is_word(name) and name not in used_names else f"{name}Network{len(classes)}"
                )
            self.class_names[owner.names] = classes[body]
        texts = [f"class {name}({self.framework.base}):\n{body}" for body, name in classes.items()]
        return [*texts, f"class Agent({self.framework.root}):\n{self._class_body(root)}"]

    def _owners(self) -> list[_Class]:
        """Return the modules at the top with a separate class: each network is inside one of them."""
        tops: dict[str, list[_Part]] = {}
        for part in self.parts:
            names = {name[:1] for name in part.names}
            if len(names) != 1 or () in names:
                return []
            tops.setdefault(names.pop()[0], []).append(part)
        modules = [self.root.children[name] for name in tops]
        if len(tops) < 2 or not all(module.safe and module.layer is None for module in modules):
            return []
        return [_Class((name,), tuple(parts)) for name, parts in tops.items()]

    def _class_body(self, owner: _Class) -> str:
        module = self.root.at(owner.names)
        used: dict[str, None] = {}
        methods = [self._method(part, owner, used) for part in owner.parts]
        title = owner.names[0] if owner.names else "agent"
        lines = [f'    """The networks of {title.replace("_target", "")}."""', "", "    def __init__(self):"]
        lines.append("        super().__init__()")
        for name, child in module.children.items():
            call = self._construct((*owner.names, name), child, 8)
            target = f"self.{name} = {call}" if is_safe(name) else f"setattr(self, {name!a}, {call})"
            lines += [f"        {target}"] * bool(call)
        for name, leaf in module.tensors.items():
            lines.append(f"        {self._tensor_statement(name, leaf)}")
        if self.framework.torch:
            for name in used:
                value = f"torch.tensor({name})"
                lines.append(f'        self.register_buffer("{name.lower()}", {value}, persistent=False)')
        if len(lines) == 4 and not methods:
            lines.append("        pass")
        return "\n".join([*lines, *methods])

    def _tensor_statement(self, name: str, leaf: Leaf) -> str:
        """Return the statement that makes a tensor of the class itself."""
        if not is_safe(name):
            raise self.refuse("a tensor of this name beside the layers", python_literal(name))
        if self.framework.base == "tf.Module":
            return f"self.{name} = tf.Variable(tf.zeros({leaf.shape!r}))"
        if not self.framework.torch:
            return f'self.{name} = self.add_weight(shape={leaf.shape!r}, name="{name}")'
        if leaf.role == "parameter" and leaf.dtype.startswith(("float", "bfloat")):
            return f"self.{name} = nn.Parameter({self._zeros(leaf)})"
        return f"self.register_buffer({python_literal(name)}, {self._zeros(leaf)})"

    def _zeros(self, leaf: Leaf) -> str:
        if leaf.dtype not in _TORCH_TYPES:
            raise self.refuse(f"a tensor of {leaf.dtype}", leaf.key)
        dtype = "" if leaf.dtype == "float32" else f", dtype=torch.{leaf.dtype}"
        return f"torch.zeros({leaf.shape!r}{dtype})"

    def _construct(self, names: Names, module: Module, indent: int) -> str:
        """Return the expression that makes a module, "" for one that the framework does not load."""
        if names in self.class_names:
            return f"{self.class_names[names]}()"
        if module.layer is not None:
            return self._layer(module.layer)
        if module.items:
            return self._sequential(module, indent)
        if module.tensors and module.children and self.framework.torch:
            raise self.refuse("a module with both layers and tensors beside these", "/".join(names))
        if module.tensors and not module.children:
            return self._unused(names, module)
        inner = {n: self._construct((*names, n), child, indent + 4) for n, child in module.children.items()}
        inner = {n: text for n, text in inner.items() if text}
        space, end = " " * (indent + 4), " " * indent
        if not self.framework.torch:
            self.helpers.add(self.framework.base)
            rows = [f"    {python_literal(name)}: {text}," for name, text in inner.items()]
            shapes = {name: leaf.shape for name, leaf in module.tensors.items()}
            more = f", {{{', '.join(f'{python_literal(n)}: {shape}' for n, shape in shapes.items())}}}"
            return "\n".join(["Group({", *(end + row for row in rows), f"{end}}}{more})"])
        if module.counted:
            rows = [inner[str(number)] for number in range(len(inner))]
            return "nn.ModuleList([\n" + "".join(f"{space}{row},\n" for row in rows) + f"{end}])"
        rows = [f"{python_literal(name)}: {text}" for name, text in inner.items()]
        return "nn.ModuleDict({\n" + "".join(f"{space}{row},\n" for row in rows) + f"{end}}})"

    def _layer(self, layer: Layer, activation: Activation | None = None) -> str:
        """Return the expression that makes a layer; Keras's also has its activation."""
        torch = self.framework.torch
        after = "" if activation is None else f", activation={self.activation(activation)[0]}"
        if isinstance(layer, LayerNorm):
            size = layer.scale.size
            if torch:
                return f"nn.LayerNorm({size}, eps={layer.epsilon!r})"
            return f"keras.layers.LayerNormalization(epsilon={layer.epsilon!r})"
        assert isinstance(layer, Dense)  # noqa: S101 - the classes of Framework.stored
        bare = "" if layer.bias is not None else (", bias=False" if torch else ", use_bias=False")
        width, out = layer.kernel.shape
        return f"nn.Linear({width}, {out}{bare})" if torch else f"keras.layers.Dense({out}{bare}{after})"

    def _sequential(self, module: Module, indent: int) -> str:
        space, end = " " * (indent + 4), " " * indent
        rows: list[str] = []
        if not self.framework.torch:
            first = module.children[module.items[0].name].layer
            assert isinstance(first, Dense | LayerNorm)  # noqa: S101 - the classes of Framework.stored
            width = first.scale.size if isinstance(first, LayerNorm) else len(first.kernel)
            rows.append(f"keras.Input(({width},))")
        for item in module.items:
            layer = module.children[item.name].layer
            assert layer is not None  # noqa: S101 - only layers are planned
            if not self.framework.torch:
                activated = not isinstance(layer, LayerNorm)
                rows.append(self._layer(layer, item.activation if activated else None))
                if item.activation is not None and not activated:
                    raise self.refuse("an activation after a layer norm in a Sequential")
                continue
            rows += ["nn.Identity()"] * (int(item.name) - len(rows))
            rows.append(self._layer(layer))
            if item.activation is not None:
                rows.append(self.activation(item.activation)[0])
        name = "nn.Sequential(" if self.framework.torch else "keras.Sequential(["
        close = ")" if self.framework.torch else "])"
        return f"{name}\n" + "".join(f"{space}{row},\n" for row in rows) + f"{end}{close}"

    def _unused(self, names: Names, module: Module) -> str:
        """Return the expression for tensors that no network here uses; they are loaded all the same."""
        kernel, bias = ("weight", "bias") if self.framework.torch else ("kernel", "bias")
        shapes = {name: leaf.shape for name, leaf in module.tensors.items()}
        matrix = shapes.get(kernel, ())
        dense = {*shapes} <= {kernel, bias} and len(matrix) == 2
        floats = all(leaf.dtype == "float32" for leaf in module.tensors.values())
        if self.framework.torch:
            out = matrix[0] if dense else 0
            if dense and floats and shapes.get(bias, (out,)) == (out,):
                return f"nn.Linear({matrix[1]}, {out}{'' if bias in shapes else ', bias=False'})"
            self.helpers.add("Tensors")
            rows = [f"{python_literal(name)}: {self._zeros(leaf)}" for name, leaf in module.tensors.items()]
            return f"Tensors({{{', '.join(rows)}}})"
        if dense and shapes.get(bias, matrix[1:]) == matrix[1:]:
            self.unbuilt[names] = matrix[0]
            return f"keras.layers.Dense({matrix[1]}{'' if bias in shapes else ', use_bias=False'})"
        self.skipped.append(f"{'/'.join(names)}: no network here uses it, so that it is not loaded")
        return ""

    def activation(self, layer: Activation) -> tuple[str, str]:
        """Return the module or argument of an activation, and its expression with `{x}` left open."""
        kind, slope = ACTIVATION_KINDS[layer.name], repr(float(layer.slope))
        argument = slope if layer.name == "leaky_relu" else ""
        more = f", {argument}" if argument else ""
        if self.framework.torch:
            return f"nn.{kind.torch}({argument})", f"{torch_function(layer.name)}({{x}}{more})"
        call = f"keras.activations.{kind.keras[0]}({{x}}{more})"
        return f"lambda x: {call.format(x='x')}" if more else f'"{kind.keras[0]}"', call

    # Methods.

    def _method_name(self, part: _Part, owner: _Class) -> str:
        """Return the method of a network: the call of a class's policy or only network, else its own."""
        first = next((part for part in owner.parts if part.part is self.agent.binding.policy), owner.parts[0])
        if part is first and (part.part.acts or len(owner.parts) == 1):
            return self.framework.call
        name = re.sub(r"\W", "_", f"{part.part.head or part.part.component}_output", flags=re.ASCII)
        return name if name not in self.root.at(owner.names).children else f"compute_{name}"

    def _method(self, part: _Part, owner: _Class, used: dict[str, None]) -> str:
        network = part.network
        inputs = [name for name, _ in network.inputs]
        shapes = value_shapes(network)
        forms = [
            f"{name} [batch, {', '.join(map(str, shape))}]"
            for name, shape in zip(inputs, shapes, strict=False)
        ]
        what = "value" if part.part.component != "actor" and not part.part.acts else "action"
        if self.settings.choices is not None and part.part.acts:
            what = "score of every action"
        lines = ["", f"    def {self._method_name(part, owner)}(self, {', '.join(inputs)}):"]
        out = ", ".join(map(str, shapes[network.output]))
        lines.append(f'        """Return the {what} [batch, {out}] of {", ".join(forms)}."""')
        lines += [f"        {line}" for line in _Statements(self, part, owner, inputs, used).lines()]
        return "\n".join(lines)

    def access(self, base: str, owner: Names, names: Names) -> str:
        """Return the expression of a module below `base`, the object of the class of `owner`."""
        text, module = base, self.root.at(owner)
        for number, name in enumerate(names[len(owner) :], len(owner)):
            inside = names[:number]
            attribute = is_safe(name) and inside in ((), *self.class_names, owner)
            if attribute or (not self.framework.torch and is_safe(name)):
                text = f"{text}.{name}"
            elif not self.framework.torch:
                text = f"getattr({text}, {python_literal(name)})"
            elif module.items or module.counted:
                text = f"{text}[{name}]"
            else:
                text = f"{text}[{python_literal(name)}]"
            module = module.children.get(name, Module())
        return text

    def tensor(self, owner: Names, names: Names) -> str:
        """Return the expression of a tensor of the file."""
        above = self.access("self", owner, names[:-1])
        return f"{above}.{names[-1]}" if is_safe(names[-1]) else f"getattr({above}, {names[-1]!r})"

    # Functions.

    def _owner(self, part: _Part) -> _Class:
        names = (part.names[0][0],) if self.class_names else ()
        inside = [part for part in self.parts if not names or part.names[0][:1] == names]
        return _Class(names, tuple(inside))

    def _call(self, part: _Part) -> str:
        owner = self._owner(part)
        name = self._method_name(part, owner)
        base = self.access("model", (), owner.names)
        return base if name == self.framework.call else f"{base}.{name}"

    def _load(self) -> list[str]:
        """Return the function that loads the file."""
        lines = [
            "def load(path):",
            '    """Return the networks with the weights of the file at `path`, loaded strictly."""',
            "    model = Agent()",
        ]
        if self.framework.torch:
            return [*lines, *(f"    {line}" for line in self._load_torch()), "    return model.eval()"]
        for part in self.parts:
            shapes = [
                shape for _, shape in zip(part.network.inputs, value_shapes(part.network), strict=False)
            ]
            zeros = ", ".join(f'np.zeros({(1, *shape)}, "float32")' for shape in shapes)
            lines.append(f"    {self._call(part)}({zeros})  # makes the variables")
        for names, width in self.unbuilt.items():
            lines.append(f"    {self.access('model', (), names)}.build((None, {width}))")
        return [*lines, *(f"    {line}" for line in self._load_variables()), "    return model"]

    def _load_torch(self) -> Iterator[str]:
        if self.target == "torch":
            yield 'checkpoint = torch.load(path, map_location="cpu", weights_only=True)'
        elif self.target == "safetensors":
            yield "tensors = load_file(path)"
        else:
            yield "tensors = np.load(path)"
        tree = self.agent.checkpoint.tree
        for state_dict in self.places:
            model = self.access("model", (), state_dict.names)
            leaves = {path: tree[path] for path in tree if path[: len(state_dict.path)] == state_dict.path}
            own = [
                path
                for path, leaf in leaves.items()
                if path[:-1] == state_dict.path and isinstance(leaf, Leaf) and leaf.slot is None
            ]
            inside = any(
                other.names[: len(state_dict.names)] == state_dict.names
                for other in self.places
                if other != state_dict
            )
            names = f"{model}.state_dict()"
            if inside:
                # The other objects of the file are modules below this one.
                names = f"[{', '.join(python_literal(path[-1].value) for path in own)}]"
            if self.target == "torch":
                state = "checkpoint" + "".join(f"[{python_literal(step.value)}]" for step in state_dict.path)
                if inside or len(own) < len(leaves):
                    state = f"{{name: {state}[name] for name in {names}}}"
            else:
                key = f"{python_literal(state_dict.prefix)} + name" if state_dict.prefix else "name"
                value = f"tensors[{key}]"
                if self.target == "npz":
                    kinds = {leaf.dtype for leaf in leaves.values() if isinstance(leaf, Leaf)}
                    value = (_NPZ_BFLOAT16 if "bfloat16" in kinds else "torch.from_numpy({0})").format(value)
                state = f"{{name: {value} for name in {names}}}"
            yield f"{model}.load_state_dict({state}{', strict=False' if inside else ''})"

    def _load_variables(self) -> Iterator[str]:
        if self.arrays or self.by_key:
            opened = "load_file(path)" if self.target == "safetensors" else "np.load(path)"
            yield "with h5py.File(path) as tensors:" if self.by_key else f"tensors = {opened}"
            value = "np.asarray({})" if self.by_key else "{}"
            for names, module in self.root.walk():
                layer = module.layer is not None or names in self.unbuilt
                parent = self.root.at(names[:-1])
                at = self.access("model", (), names)
                if layer and names and parent.items:
                    position = [item.name for item in parent.items].index(names[-1])
                    at = f"{self.access('model', (), names[:-1])}.layers[{position}]"
                for own, leaf in module.tensors.items() if layer or module.children else ():
                    tensor = value.format(f"tensors[{python_literal(leaf.key)}]")
                    own = own.removeprefix("_") if layer else own
                    variable = f"{at}.{own}" if is_safe(own) else f"getattr({at}, {python_literal(own)})"
                    yield f"{'    ' * self.by_key}{variable}.assign({tensor})"
            return
        model = self.access("model", (), self.wrapper)
        if self.target == "keras":
            if not self.wrapper:
                yield "model.built = True  # its layers are"
            yield f"{model}.load_weights(path)"
            return
        (state_dict,) = self.places
        name = str(state_dict.path[0].value) if state_dict.path else None
        objects = f"{name}={model}" if name is not None and is_word(name) and name.isascii() else model
        if name is not None and objects == model:
            objects = f"**{{{python_literal(name)}: {model}}}"
        yield f"checkpoint = tf.train.Checkpoint({objects})"
        yield "checkpoint.read(path).assert_existing_objects_matched().expect_partial()"

    def _act(self, part: _Part) -> list[str]:
        """Return the function from observations to the environment's actions."""
        network, choices = part.network, self.settings.choices
        width = value_shapes(network)[0][0]
        shown = f"[batch, {value_shapes(network)[network.output][-1]}]"
        if choices is not None:
            shown = f"[batch{'' if choices.single else f', {len(choices.counts)}'}], whole numbers"
        lines = [
            "def act(model, observations):",
            f'    """Return the actions {shown}, for observations [batch, {width}]."""',
        ]
        torch, call = self.framework.torch, self._call(part)
        if torch:
            tensor = "torch.as_tensor(observations, dtype=torch.float32)"
            lines += ["    with torch.no_grad():", f"        output = {call}({tensor}).numpy()"]
        else:
            lines.append(f'    output = np.asarray({call}(np.asarray(observations, "float32")))')
        if choices is None:
            return [*lines, "    return output"]
        if choices.scores == "bernoulli":
            return [*lines, "    return (output > 0).astype(np.int64)"]
        start = f" + {choices.starts[0]}" if choices.starts[0] else ""
        if choices.single:
            return [*lines, f"    return output.argmax(-1){start}"]
        ends = np.cumsum(choices.counts)[:-1].tolist()
        lines.append(f"    scores = np.split(output, {ends}, -1)")
        shift = f" + np.array({list(choices.starts)})" if any(choices.starts) else ""
        return [*lines, f"    return np.stack([each.argmax(-1) for each in scores], -1){shift}"]


class _Statements:
    """Writes the statements of one network, node by node."""

    def __init__(
        self, writer: _Writer, part: _Part, owner: _Class, inputs: Sequence[str], used: dict[str, None]
    ) -> None:
        self.writer, self.part, self.owner, self.used = writer, part, owner, used
        self.code, self.torch = writer.framework.expressions, writer.framework.torch
        self.nodes, self.shift = part.network.nodes, len(inputs)
        self.uses, self.shapes = part.uses(), value_shapes(part.network)
        self.values = {number: _Expression(name) for number, name in enumerate(inputs)}
        self.written: list[str] = []
        self.variables: dict[str, int] = {}
        # Advantages and state values are joined for a constant matrix, which is written as what it computes.
        self.joined = {
            node.inputs[0] - self.shift: number
            for number, node in enumerate(self.nodes)
            if isinstance(node.layer, Dense) and node.layer.constant and self._is_join(node.inputs[0])
        }

    def _is_join(self, value: int) -> bool:
        node = self.nodes[value - self.shift] if value >= self.shift else None
        return node is not None and isinstance(node.layer, Concat) and self.uses[value] == 1

    def lines(self) -> list[str]:
        """Return the statements, the last of which returns the output."""
        number = 0
        while number < len(self.nodes):
            if number in self.joined:
                number += 1
                continue
            expression, after = self._step(number)
            value, number = self.shift + after - 1, after
            follows = number < len(self.nodes) and self.nodes[number].inputs == (value,)
            inline = follows and self.uses[value] == 1 and isinstance(self.nodes[number].layer, _INLINE)
            short = len(expression.text) < _LONGEST
            if value == self.part.network.output or (inline and short):
                self.values[value] = expression
            else:
                name = self._variable(after)
                self.variables[name] = value
                self.written.append(f"{name} = {expression.text}")
                self.values[value] = _Expression(name)
        output = self.values[self.part.network.output]
        return [*self.written, f"return {output.text}"]

    def _variable(self, after: int) -> str:
        """Return a variable that no node from `after` on uses."""
        rest = [*self.nodes[after:], *(self.nodes[n] for n, last in self.joined.items() if last >= after)]
        needed = {self.part.network.output, *(number for node in rest for number in node.inputs)}
        names = ("x", *(f"x{number}" for number in range(1, len(self.nodes) + 1)))
        return next(name for name in names if self.variables.get(name) not in needed)

    def _template(self, name: str, x: _Expression, **more: object) -> _Expression:
        text = self.code[name]
        outside = text.startswith("{x}")
        return _Expression(text.format(x=x.inner if outside else x.text, **more))

    def _step(self, number: int) -> tuple[_Expression, int]:
        """Return the expression of a node, or of the nodes of a sequential module, and the next number."""
        node = self.nodes[number]
        layer, after = node.layer, number + 1
        names = self.part.modules.get(number)
        if number in self.part.runs:
            names, after = self.part.runs[number]
        if names is not None:
            module = self.writer.access("self", self.owner.names, names)
            return _Expression(f"{module}({self.values[node.inputs[0]].text})"), after
        if number == 0 and self.part.statistics is not None:
            return self._normalized(self.part.statistics), 2
        if isinstance(layer, Dense):
            return self._constant_matrix(number, layer), after
        return self._operator(number, layer, self.values[node.inputs[0]]), after

    def _normalized(self, own: _Statistics) -> _Expression:
        """Return the observations less their mean, over their deviation, in the precision of the file."""
        mean, spread = (self.writer.tensor(self.owner.names, tensor) for tensor in (own.mean, own.spread))
        root = self.code["sqrt"].removesuffix("({x})")
        deviation = own.deviation.format(sqrt=root, x=spread)
        x = self._template("double", self.values[0])
        return self._template("float", _Expression(f"({x.text} - {mean}) / {deviation}", compound=True))

    def _operator(self, number: int, layer: Layer, x: _Expression) -> _Expression:
        """Return the expression of a layer without a module."""
        if isinstance(layer, Activation):
            code = "{x}" if layer.name == "linear" else self.writer.activation(layer)[1]
            return _Expression(code.format(x=x.text))
        if isinstance(layer, Affine):
            return self._affine(number, layer, x)
        if isinstance(layer, Clip):
            ends = {name: self._number(number, name, getattr(layer, name)) for name in ("low", "high")}
            plain = not any(end.isidentifier() or end.startswith("self.") for end in ends.values())
            if not plain:
                ends = {name: self._constant(number, name, getattr(layer, name)) for name in ends}
            return self._template("clip" if plain else "limit", x, **ends)
        if isinstance(layer, Concat):
            values = ", ".join(self.values[source].text for source in self.nodes[number].inputs)
            return _Expression(self.code["concat"].format(xs=values))
        if isinstance(layer, QuantileMean):
            rows, axis = (-1, -1) if layer.last else (layer.quantiles, 1)
            grouped = self._grouped(x, number, rows, layer.quantiles if layer.last else -1)
            return self._template("mean", grouped, axis=axis)
        if isinstance(layer, AtomMean) and not layer.limit:
            support = self._constant(number, "support", layer.support)
            weights = self._template("softmax", self._grouped(x, number, -1, layer.support.size))
            return self._template("sum", _Expression(f"{weights.text} * {support}", compound=True))
        raise self.writer.refuse(f"a layer {type(layer).__name__}", self.part.part.title)

    def _constant_matrix(self, number: int, layer: Dense) -> _Expression:
        """Return what a matrix without weights computes: a dueling network's values, or binary choices."""
        choices = self.writer.settings.choices
        if choices is not None and choices.scores == "bernoulli":
            return self.values[self.nodes[number].inputs[0]]
        if number in self.joined.values() and not self.part.part.members:
            return self._dueling(number, layer)
        raise self.writer.refuse("a constant matrix", self.part.part.title)

    def _grouped(self, x: _Expression, number: int, rows: int, columns: int) -> _Expression:
        width = self.shapes[self.nodes[number].inputs[0]][0]
        rows, columns = (width // columns, columns) if rows < 0 else (rows, width // rows)
        return self._template("grouped", x, rows=rows, columns=columns)

    def _dueling(self, number: int, layer: Dense) -> _Expression:
        """Return advantages, less their mean over the actions, plus the state's value."""
        joined = self.nodes[self.nodes[number].inputs[0] - self.shift]
        out = layer.kernel.shape[1]
        atoms = layer.kernel.shape[0] - out
        advantages, value = (self.values[number] for number in joined.inputs)
        if atoms == 1:
            mean = self._template("centred", advantages)
            return _Expression(f"{value.inner} + {advantages.inner} - {mean.text}", compound=True)
        grouped = self._template("grouped", advantages, rows=out // atoms, columns=atoms)
        state = self._template("grouped", value, rows=1, columns=atoms)
        mean = self._template("centred", grouped)
        total = _Expression(f"{state.text} + {grouped.text} - {mean.text}", compound=True)
        return self._template("flatten", total._replace(text=total.text), size=out)

    def _affine(self, number: int, layer: Affine, x: _Expression) -> _Expression:
        after = self.nodes[number + 1].layer if number + 1 < len(self.nodes) else None
        if (layer.scale == 1).all() and isinstance(after, Affine) and (layer.shift != 0).any():
            return _Expression(f"{x.inner} - {self._number(number, 'mean', -layer.shift)}", compound=True)
        text = x.inner
        if (layer.scale != 1).any():
            text = f"{self._number(number, 'scale', layer.scale)} * {text}"
        if (layer.shift != 0).any():
            text = f"{text} + {self._number(number, 'shift', layer.shift)}"
        return _Expression(text, compound=text != x.inner)

    def _number(self, number: int, name: str, array: np.ndarray) -> str:
        """Return one number where all are equal, else the name of a constant."""
        row = array.astype(np.float32).ravel()
        if row.size and (row == row[0]).all():
            return number_code(row[0])
        return self._constant(number, name, array)

    def _constant(self, number: int, name: str, array: np.ndarray) -> str:
        """Return the name of a constant array; equal arrays share it."""
        earlier = any(isinstance(node.layer, Dense) for node in self.nodes[:number])
        stem = f"{'ACTION' if earlier else 'OBS'}_{name.upper()}"
        known = self.writer.constants
        for count in range(1, len(known) + 2):
            title = stem if count == 1 else f"{stem}_{count}"
            if known.setdefault(title, array) is array or np.array_equal(known[title], array):
                break
        self.used[title] = None
        return f"self.{title.lower()}" if self.torch else title


_INLINE = (Activation, Affine, Clip)
# NumPy has no bfloat16.
_NPZ_BFLOAT16 = (
    "torch.from_numpy({0}.view(np.int16)).view(torch.bfloat16) "
    'if {0}.dtype.kind == "V" else torch.from_numpy({0})'
)
_LONGEST = 72
_TORCH_TYPES = frozenset(
    ("bfloat16", "bool", "float16", "float32", "float64", "int16", "int32", "int64", "int8", "uint8")
)
_GROUP = '''class Group({base}):
    """Modules, and variables of these shapes, by name."""

    def __init__(self, members, shapes):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        for name, shape in shapes.items():
            setattr(self, name, {variable})'''
_VARIABLES = {
    "keras.layers.Layer": "self.add_weight(shape=shape, name=name)",
    "tf.Module": "tf.Variable(tf.zeros(shape))",
}
_HELPERS = {
    "Tensors": '''class Tensors(nn.Module):
    """Tensors of the file that are not those of a layer."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)''',
    **{base: _GROUP.format(base=base, variable=template) for base, template in _VARIABLES.items()},
}


def number_code(value: np.floating[Any]) -> str:
    """Return a float32 as the shortest literal that is read as the same float32."""
    number = np.float32(value)
    if not np.isfinite(number):
        return f'float("{number}")'
    text = str(number)
    return text if "e" in text or "." in text else f"{text}.0"


def array_code(array: np.ndarray) -> str:
    """Return the code of the entries of a float32 array, without its shape."""
    numbers = [number_code(value) for value in array.astype(np.float32).ravel()]
    rows = [", ".join(numbers[start : start + 8]) for start in range(0, len(numbers), 8)]
    inner = ",\n    ".join(rows)
    return f"np.array([\n    {inner},\n], np.float32)"


def _comment_lines(text: str) -> Iterator[str]:
    """Yield a comment of one line, without characters that end it."""
    yield "# " + clean(text).encode("ascii", "backslashreplace").decode()


def _digest(sha256: str | None) -> str:
    return "" if sha256 is None else f" (sha256 {sha256})"
