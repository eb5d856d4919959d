"""CleanRL's files: a tuple of state_dicts (actor, qf1, qf2), or one state_dict of a PPO agent.

Source: github.com/vwxyzjn/cleanrl, cleanrl/td3_continuous_action.py, ddpg_continuous_action.py,
sac_continuous_action.py (classes Actor, QNetwork, SoftQNetwork; `torch.save((actor.state_dict(), ...))`):
ReLU, and an action is tanh of the last layer times the buffer action_scale plus action_bias. Neither targets
nor optimizers are saved. cleanrl/ppo_continuous_action.py (class Agent): tanh between layers, the mean itself
limited to the bounds by ClipAction; NormalizeObservation's statistics are not saved.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.layouts import canonical, optimizers
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.table import Table, bind
from ckpttool.layouts.writing import Lone, Names, Network, Writing, critics, gaussian, written
from ckpttool.leaf import attr, index, key
from ckpttool.ledger import NO_BOUNDS, unknown
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.tree import Container, Tree

_MAP = ("action_scale", "action_bias")

TABLE = Table(
    name="cleanrl",
    title="CleanRL's TD3, DDPG, SAC: a tuple of state_dicts; PPO: actor_mean, critic, actor_logstd",
    framework="torch",
    components={"0": "actor", "1": "critic/q1", "2": "critic/q2"},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5),
    optimizer=optimizers.from_torch,
    branches=canonical.LOG_STD,
    tensors={f"0/{name}": f"actor/{name}" for name in _MAP},
)
_PPO = replace(
    TABLE,
    components={"actor_mean": "actor", "critic": "value"},
    facts=Facts(
        head="clip",
        hidden="tanh",
        epsilon=1e-5,
        lacks=(
            NO_BOUNDS,
            unknown(
                "observation statistics", "the observation statistics of NormalizeObservation", decides=True
            ),
        ),
    ),
    branches={},
    tensors={"actor_logstd": "actor/log_std"},
)

# The last layer of an Actor: TD3's and DDPG's, SAC's.
_LAST = ("fc_mu.weight", "fc_mean.weight")


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # the file's name says nothing
    """Return the way to the canonical agent of a tuple that begins with CleanRL's Actor, or of PPO's dict."""
    if (key("actor_logstd"),) in tree and (key("actor_mean.0.weight"),) in tree:
        return bind(tree, _PPO)
    if not any((index(0), key(last)) in tree for last in _LAST):
        return None
    return bind(tree, TABLE)


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: the tuple that CleanRL's Actor and QNetwork load strictly.

    Without known bounds the two buffers are missing. Raise UnsupportedError for networks or an action map
    that CleanRL's classes cannot be.
    """
    soft = gaussian(binding)
    names = Names("fc{n}", "fc_mean", {"log_std": "fc_logstd"}) if soft else Names("fc{n}", "fc_mu")
    rows: list[Network | Lone] = [Lone(f"actor/{name}", (index(0), key(name))) for name in _MAP]
    rows.append(Network("actor", (index(0),), names))
    rows += [Network(f"critic/q{n}", (index(n),), _Q) for n in (1, 2)[: critics(binding)]]
    known = all((attr("actor"), attr(name)) in agent for name in _MAP)
    writing = Writing(
        "CleanRL",
        rows,
        "affine",
        depth=3,
        needs=("actor", "critic"),
        containers={(): Container("tuple")},
        notes=() if known else ("unknown action bounds: --bounds LOW HIGH",),
    )
    return written(writing, binding, agent, told)


_Q = Names("fc{n}", "fc{n}")
_UNKNOWN = "unknown action bounds: --bounds LOW HIGH"
