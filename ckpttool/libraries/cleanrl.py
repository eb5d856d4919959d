"""CleanRL's files: a tuple of state_dicts (actor, qf1, qf2), or one state_dict of a PPO agent.

Source: github.com/vwxyzjn/cleanrl, cleanrl/td3_continuous_action.py, ddpg_continuous_action.py,
sac_continuous_action.py (classes Actor, QNetwork, SoftQNetwork; `torch.save((actor.state_dict(),
...))`): ReLU, and an action is tanh of the last layer times the buffer action_scale plus
action_bias. Targets and optimizers are not saved. cleanrl/ppo_continuous_action.py (class Agent):
tanh between layers, the mean itself clipped to the bounds by ClipAction; NormalizeObservation's
statistics are not saved.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.core.tree import Container, Tree, index, key
from ckpttool.libraries import optimizers_read, schema
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
    title="CleanRL's TD3, DDPG, SAC: a tuple of state_dicts; PPO: actor_mean, critic, actor_logstd",
    framework="torch",
    components={"0": "actor", "1": "critic/q1", "2": "critic/q2"},
    optimizers={},
    counters={},
    facts=AgentMetadata(head="affine", hidden="relu", epsilon=1e-5),
    optimizer=optimizers_read.from_torch,
    branches=schema.LOG_STD,
    tensors={f"0/{name}": f"actor/{name}" for name in _MAP},
)
_PPO = replace(
    TABLE,
    components={"actor_mean": "actor", "critic": "value"},
    facts=AgentMetadata(head="clip", hidden="tanh", epsilon=1e-5, lacks=schema.LEFT_OPEN["cleanrl ppo"]),
    branches={},
    tensors={"actor_logstd": "actor/log_std"},
)

# The last layer of an Actor: TD3's and DDPG's, SAC's.
_LAST = ("fc_mu.weight", "fc_mean.weight")


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # the file's name is no evidence
    """Return the recognised agent of a tuple that begins with CleanRL's Actor, or of PPO's dict."""
    if (key("actor_logstd"),) in tree and (key("actor_mean.0.weight"),) in tree:
        return bind(tree, _PPO)
    if not any((index(0), key(last)) in tree for last in _LAST):
        return None
    return bind(tree, TABLE)


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
