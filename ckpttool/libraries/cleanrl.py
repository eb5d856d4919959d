"""CleanRL's files: a tuple of state_dicts (actor, qf1, qf2), or one state_dict of a PPO, DQN or C51 agent.

Source: github.com/vwxyzjn/cleanrl, cleanrl/td3_continuous_action.py, ddpg_continuous_action.py,
sac_continuous_action.py (classes Actor, QNetwork, SoftQNetwork; `torch.save((actor.state_dict(),
...))`): ReLU, and an action is tanh of the last layer times the buffer action_scale plus
action_bias. Targets and optimizers are not saved. cleanrl/ppo_continuous_action.py (class Agent):
tanh between layers, the mean itself clipped to the bounds by ClipAction; NormalizeObservation's
statistics are not saved. cleanrl/dqn.py (`q_network.state_dict()`), c51.py (`{"model_weights":
q_network.state_dict(), "args": vars(args)}`; the buffer `atoms` has the values of the atoms, the last layer
the atoms of each action together) and ppo.py (class Agent): networks in `network`, or `actor` and `critic`.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.tree import Container, Tree, ValueLeaf, index, key
from ckpttool.libraries import optimizers_read, schema, tf2rl
from ckpttool.libraries.recognize import LayoutTable, bind
from ckpttool.libraries.schema import AgentMetadata, RecognizedAgent, require_action_bounds
from ckpttool.libraries.write import (
    LayerNames,
    NetworkRow,
    SingleTensorRow,
    WritingTable,
    count_critics,
    is_gaussian,
    plan_torch_file,
)
from ckpttool.mapping.rules import Plan, Settings

_MAP = ("action_scale", "action_bias")

TABLE = LayoutTable(
    name="cleanrl",
    title="CleanRL's TD3, DDPG, SAC: a tuple of state_dicts; PPO, DQN, C51: one of them",
    framework="torch",
    components={"0": "actor", "1": "critic/q1", "2": "critic/q2"},
    optimizers={},
    counters={},
    # sac_continuous_action.py: LOG_STD_MIN, LOG_STD_MAX, the range of a tanh.
    facts=AgentMetadata(
        head="affine",
        hidden="relu",
        epsilon=1e-5,
        distribution=schema.GAUSSIAN._replace(limits=(-5.0, 2.0), limited="tanh"),
    ),
    optimizer=optimizers_read.from_torch,
    branches=schema.LOG_STD,
    tensors={f"0/{name}": f"actor/{name}" for name in _MAP},
)
_PPO = replace(
    TABLE,
    components={"actor_mean": "actor", "critic": "value"},
    facts=AgentMetadata(
        head="clip",
        hidden="tanh",
        epsilon=1e-5,
        lacks=schema.LEFT_OPEN["cleanrl ppo"],
        distribution=schema.GAUSSIAN,
    ),
    branches={},
    tensors={"actor_logstd": "actor/log_std"},
)

# Agents with discrete actions; the suffix of the library's files is the evidence for these names.
_SUFFIX = ".cleanrl_model"
_DISCRETE = replace(
    TABLE, facts=AgentMetadata(head="argmax", hidden="relu", epsilon=1e-5), branches={}, tensors={}
)
_DQN = replace(_DISCRETE, components={"network": "critic/q1"})
_C51 = replace(
    _DISCRETE,
    components={"model_weights/network": "critic/q1"},
    tensors={"model_weights/atoms": "critic/q_support"},
)
_CATEGORICAL = replace(
    _DISCRETE,
    components={"actor": "actor", "critic": "value"},
    facts=AgentMetadata(head="argmax", hidden="tanh", epsilon=1e-5, distribution=schema.CATEGORICAL),
)
_ARGUMENTS, _WEIGHTS = key("args"), key("model_weights")

# The last layer of an Actor: TD3's and DDPG's, SAC's.
_LAST = ("fc_mu.weight", "fc_mean.weight")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:
    """Return the recognised agent of a tuple that begins with CleanRL's Actor, or of another agent's dict."""
    if (_WEIGHTS, key("atoms")) in tree and (_WEIGHTS, key("network.0.weight")) in tree:
        return _bind_c51(tree)
    if name.endswith(_SUFFIX) and (key("network.0.weight"),) in tree:
        binding = bind(tree, _DQN)
        return None if binding is None else binding.choosing(tree)
    if name.endswith(_SUFFIX) and {(key("actor.0.weight"),), (key("critic.0.weight"),)} <= tree.keys():
        return bind(tree, _CATEGORICAL)
    if (key("actor_logstd"),) in tree and (key("actor_mean.0.weight"),) in tree:
        return bind(tree, _PPO)
    if not any((index(0), key(last)) in tree for last in _LAST):
        return None
    return bind(tree, TABLE)


def _bind_c51(tree: Tree) -> RecognizedAgent | None:
    """Return the recognised agent of C51: as many actions as the last layer has groups of atoms."""
    binding = bind(tree, _C51)
    atoms = schema.read_numbers(tree[_WEIGHTS, key("atoms")])
    if binding is None or not atoms:
        return None
    binding = binding.choosing(tree, "atoms", atoms, len(atoms), "model_weights/atoms")
    facts = binding.facts
    env = tree.get((_ARGUMENTS, key("env_id")))
    if isinstance(env, ValueLeaf) and (plain := tf2rl.plain_id(env.value)) is not None:
        facts = facts.read("args", env=plain)
    rest_of = frozenset(path for path in tree if path[0] == _ARGUMENTS)
    return replace(binding, facts=facts, consumed=binding.consumed | rest_of)


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the tuple that CleanRL's Actor and QNetwork load strictly.

    Raise UsageError if the action bounds are unknown, which are two of the actor's buffers, and
    UnsupportedError for networks or an action map that CleanRL's classes cannot represent.
    """
    soft = is_gaussian(binding)
    names = LayerNames("fc{n}", "fc_mean", {"log_std": "fc_logstd"}) if soft else LayerNames("fc{n}", "fc_mu")
    rows: list[NetworkRow | SingleTensorRow] = [
        SingleTensorRow(f"actor/{name}", (index(0), key(name))) for name in _MAP
    ]
    rows.append(NetworkRow("actor", (index(0),), names))
    rows += [NetworkRow(f"critic/q{n}", (index(n),), _Q) for n in (1, 2)[: count_critics(binding)]]
    writing = WritingTable(
        "CleanRL",
        rows,
        "affine",
        depth=3,
        needs=("actor", "critic"),
        containers={(): Container("tuple")},
    )
    made = plan_torch_file(writing, binding, agent, settings)
    require_action_bounds(binding.facts, agent, "CleanRL's actor")
    return made


_Q = LayerNames("fc{n}", "fc{n}")
