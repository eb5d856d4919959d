"""Spinning Up's agents: the whole actor-critic module of pyt_save/model.pt, or the SavedModel tf1_save.

Sources in github.com/openai/spinningup: spinup/utils/logx.py (`_pytorch_simple_save`,
`_tf_simple_save`); spinup/algos/pytorch/{ddpg,td3,sac}/core.py: an action is act_limit (the first
upper bound) times tanh, and the module contains its activations; ppo/core.py: the plain mean, or
logits of discrete actions, of which the library samples one. Targets and optimizers are not saved.
spinup/algos/tf1/{ddpg,td3,sac}/core.py: the same networks as variables under main/ and target/, all with
ReLU, SAC's two heads consecutive in `pi`; spinup/algos/tf1/{ppo,vpg,trpo}/core.py: `pi` and `v`, with tanh.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.sidecar import NO_BOUNDS
from ckpttool.core.tree import Leaf, Tree, key
from ckpttool.libraries import schema
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable, PickledModule, read_pickled_module
from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    has_value_network,
    is_gaussian,
    plan_torch_file,
)
from ckpttool.mapping.rules import Plan, Settings

_TITLE = "Spinning Up's pyt_save/model.pt (a whole module) or tf1_save (DDPG, TD3, SAC; PPO)"

TABLE = LayoutTable(
    name="spinningup",
    plays=("DDPG", "TD3", "SAC", "PPO"),
    writes=("DDPG", "TD3", "SAC", "continuous PPO"),
    title=_TITLE,
    framework="torch",
    components={"pi": "actor", "q": "critic/q1", "q1": "critic/q1", "q2": "critic/q2", "v": "value"},
    # {pytorch,tf1}/sac/core.py: LOG_STD_MIN, LOG_STD_MAX.
    facts=AgentMetadata(
        head="tanh",
        hidden="relu",
        epsilon=1e-5,
        distribution=schema.LIMITED_GAUSSIAN,
        lacks=schema.LEFT_OPEN["spinningup"],
    ),
    branches={"log_std_layer": "log_std"},
    tensors={"pi/log_std": "actor/log_std"},
)
_TF1 = replace(
    TABLE,
    framework="tensorflow",
    components={
        **{f"main/{stored}": canonical for stored, canonical in TABLE.components.items()},
        "target/pi": "actor_target",
        "target/q": "critic_target/q1",
        "target/q1": "critic_target/q1",
        "target/q2": "critic_target/q2",
        "target/v": "value_target",
    },
    facts=TABLE.facts.lacking(NO_BOUNDS),
    tensors={},
)
_TF1_ON_POLICY = replace(
    _TF1,
    components={"pi": "actor", "v": "value"},
    facts=_TF1.facts._replace(head="identity", hidden="tanh", distribution=schema.GAUSSIAN),
    tensors={"pi/log_std": "actor/log_std"},
)
_LARGEST = 1e30  # larger than any action bound
# The module under `pi` with the hidden layers, and the action map of its class.
_DISCRETE = "pi.logits_net"
_HIDDEN = {"pi.pi": "tanh", "pi.net": "tanh", "pi.mu_net": "identity", _DISCRETE: "identity"}
_CRITICS = ("q.q", "q1.q", "v.v_net")
# The policies of ppo/core.py: MLPGaussianActor, MLPCategoricalActor.
_DISTRIBUTIONS = {"pi.mu_net": schema.GAUSSIAN, _DISCRETE: schema.CATEGORICAL}
# Default hidden activation of MLPActorCritic, by action map.
_DEFAULTS = {"tanh": "relu", "identity": "tanh"}
# tensorflow/python/training/slot_creator.py: names of moments, for files that do not record roles.
_MOMENTS = ("/Adam", "/Adam_1")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # model.pt is no evidence
    """Return the recognised agent of a whole actor-critic, or of its variables by name."""
    names = frozenset(tree.names.values())
    if "main/pi/dense/kernel" in names:
        return _bind_saved_model(tree)
    if {"pi/dense/kernel", "v/dense/kernel"} <= names:
        return _bind_on_policy(tree)
    module = read_pickled_module(tree)
    if module is None:
        return _bind_state_dict(tree)
    hidden = next((name for name in _HIDDEN if f"{name}.0" in module.classes), None)
    if hidden is None or not {"q", "q1", "v"} & module.classes.keys():
        return None
    binding = bind(module.state, TABLE)
    return None if binding is None else _add_metadata(module.bound(binding), module, hidden)


def _bind_state_dict(tree: Tree) -> RecognizedAgent | None:
    """Bind the module's state_dict, which has no attributes or classes: core.py's defaults apply."""
    names = (name.partition("/0/") for name in tree.names.values())
    first = {module.replace("/", ".") for module, layer, _ in names if layer}
    hidden = next((name for name in _HIDDEN if name in first), None)
    if hidden is None or not first & {*_CRITICS}:
        return None
    binding = bind(tree, TABLE)
    if binding is None:
        return None
    head = _HIDDEN[hidden]
    drawn = _DISTRIBUTIONS.get(hidden, binding.facts.distribution)
    facts = binding.facts._replace(head=head, hidden=_DEFAULTS[head], distribution=drawn)
    binding = replace(binding, facts=facts)
    if hidden == _DISCRETE:
        return binding.choosing(tree)
    return replace(binding, facts=binding.facts.lacking(NO_BOUNDS))


def _add_metadata(binding: RecognizedAgent, module: PickledModule, hidden: str) -> RecognizedAgent:
    """Return the binding with the facts from the module's attributes and classes."""
    names = [module.activation(child) for child in module.children(hidden) if _is_function(module, child)]
    drawn = _DISTRIBUTIONS.get(hidden, binding.facts.distribution)
    facts = binding.facts._replace(head=_HIDDEN[hidden], distribution=drawn)
    if hidden != "pi.net":
        last = names.pop() if names else None
        if last != {"tanh": "tanh", "identity": "linear"}[facts.head]:
            names.append(None)  # another action map
    strange = () if None not in names else ("unknown activations",)
    known = tuple(name for name in names if name is not None)
    if known:
        facts = facts.read(hidden, activations=known)
    limit = module.value("pi", "act_limit")
    if isinstance(limit, int | float) and not isinstance(limit, bool) and 0 < limit < _LARGEST:
        bounds = (float(limit),) * _count_actions(binding, module.tree)
        facts = facts.read("act_limit", action_low=tuple(-bound for bound in bounds), action_high=bounds)
    elif hidden != _DISCRETE:
        facts = facts.lacking(NO_BOUNDS)
        strange = (
            (*strange, "an act_limit that is not a number") if module.has("pi", "act_limit") else strange
        )
    unplaced = dict(binding.unplaced)
    if strange:
        unplaced["actor"] = (*unplaced.get("actor", ()), *strange)
    binding = replace(binding, facts=facts, unplaced=unplaced)
    return binding.choosing(module.state) if hidden == _DISCRETE else binding


def _is_function(module: PickledModule, name: str) -> bool:
    return module.classes[name] != "torch.nn.modules.linear.Linear"


def _count_actions(binding: RecognizedAgent, tree: Tree) -> int:
    """Return the number of actions: the outputs of the policy's last layer."""
    shapes = [
        leaf.shape
        for move in binding.moves.moves
        if move.target[0].value == "actor"
        and move.target[-1].value == "kernel"
        and isinstance(leaf := tree[move.source], Leaf)
    ]
    return shapes[-1][0] if shapes else 0


def _without_moments(tree: Tree) -> Tree:
    return Tree({path: leaf for path, leaf in tree.items() if not tree.names[path].endswith(_MOMENTS)})


def _bind_on_policy(tree: Tree) -> RecognizedAgent | None:
    """Bind the named variables of PPO, VPG or TRPO, whose continuous policies have a deviation."""
    tree = _without_moments(tree)
    binding = bind(tree, _TF1_ON_POLICY)
    if binding is None or "pi/log_std" in tree.names.values():
        return binding
    facts = binding.facts._replace(distribution=schema.CATEGORICAL)
    return replace(binding, facts=facts).choosing(tree)


def _bind_saved_model(tree: Tree) -> RecognizedAgent | None:
    """Bind named variables, without moments; the second head of SAC's policy outputs the deviations."""
    tree = _without_moments(tree)
    branches: dict[str, str] = {}
    shapes = _policy(tree)
    if len(shapes) > 2:
        (_, before), (last, shape) = shapes[-2:]
        if before == shape and shapes[-3][1][1] == shape[0] != before[1]:
            branches[last] = "log_std"
    return bind(tree, replace(_TF1, branches=branches))


def _policy(tree: Tree) -> list[tuple[str, tuple[int, ...]]]:
    """Return the policy's layers with their kernel shapes [in, out], in numeric order."""
    layers: list[tuple[str, tuple[int, ...]]] = []
    for path, leaf in tree.tensors():
        names = tree.names[path].split("/")
        if names[:2] == ["main", "pi"] and names[3:] == ["kernel"] and len(leaf.shape) == 2:
            layers.append((names[2], leaf.shape))
    return sorted(layers, key=lambda layer: (len(layer[0]), layer[0]))


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the state_dict that an MLPActorCritic loads strictly.

    Raise UnsupportedError for networks or an action map that its classes cannot represent.
    """
    return plan_torch_file(_make_table(binding), binding, agent, settings)


_WHOSE = "Spinning Up"
_NOTE = "the output is the state_dict of the MLPActorCritic; Spinning Up itself pickles the whole module"


def _chain(component: str, stored: str, last: str | None = None, **branches: str) -> NetworkRow:
    return NetworkRow(component, (), LayerNames(f"{stored}.{{s}}", last, branches))


def _make_table(binding: RecognizedAgent) -> WritingTable:
    if has_value_network(binding):
        rows = (
            SingleTensorRow("actor/log_std", (key("pi.log_std"),), (-1,)),
            _chain("actor", "pi.mu_net"),
            _chain("value", "v.v_net"),
        )
        return WritingTable(
            _WHOSE, rows, "identity", hidden="tanh", alike=True, needs=("actor", "value"), notes=(_NOTE,)
        )
    policy = _chain("actor", "pi.pi")
    if is_gaussian(binding):
        policy = _chain("actor", "pi.net", "pi.mu_layer", log_std="pi.log_std_layer")
    two = count_critics(binding) > 1 or is_gaussian(binding)
    qs = [_chain("critic/q1", "q1.q"), _chain("critic/q2", "q2.q")] if two else [_chain("critic/q1", "q.q")]
    return WritingTable(_WHOSE, (policy, *qs), "tanh", alike=True, needs=("actor", "critic"), notes=(_NOTE,))
