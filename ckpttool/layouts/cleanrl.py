"""CleanRL's files: a tuple of state_dicts (actor, qf1, qf2), or one state_dict of a PPO agent.

Source: github.com/vwxyzjn/cleanrl, cleanrl/td3_continuous_action.py, ddpg_continuous_action.py,
sac_continuous_action.py (classes Actor, QNetwork, SoftQNetwork; `torch.save((actor.state_dict(), ...))`):
ReLU, and an action is tanh of the last layer times the buffer action_scale plus action_bias. Neither targets
nor optimizers are saved. cleanrl/ppo_continuous_action.py (class Agent): tanh between layers, the mean itself
limited to the bounds by ClipAction; NormalizeObservation's statistics are not saved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import adam, canonical
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.renamed import dense_parts, named, one_number_each, scaled_tanh
from ckpttool.layouts.table import Table, bind
from ckpttool.leaf import attr, index, key
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import KEEP
from ckpttool.tree import Container, Tree

if TYPE_CHECKING:
    from ckpttool.leaf import Path

_MAP = ("action_scale", "action_bias")

TABLE = Table(
    name="cleanrl",
    title="CleanRL's TD3, DDPG, SAC: a tuple of state_dicts; PPO: actor_mean, critic, actor_logstd",
    framework="torch",
    components={"0": "actor", "1": "critic/q1", "2": "critic/q2"},
    optimizers={},
    counters={},
    facts=Facts(head="affine", hidden="relu", epsilon=1e-5),
    optimizer=adam.from_torch,
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
        lacks=("the action bounds", "the observation statistics of NormalizeObservation"),
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


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:  # noqa: ARG001  # no optimizer is saved
    """Return where a canonical agent goes: the tuple that CleanRL's Actor and QNetwork load strictly.

    Without known bounds the two buffers are missing. Raise UnsupportedError for networks or an action map
    that CleanRL's classes cannot be.
    """
    actors, critics = (dense_parts(binding, c, "CleanRL") for c in canonical.OPTIMIZED.values())
    if len(actors) != 1 or len(critics) not in (1, 2):
        raise UnsupportedError(
            "CleanRL saves one actor and one or two Q-functions",
            found=", ".join(part.title for part in (*actors, *critics)),
        )
    one_number_each(critics, agent, "CleanRL")
    scale, bias = ((attr("actor"), attr(name)) for name in _MAP)
    if scaled_tanh(binding.facts, agent) is False:
        raise UnsupportedError(
            "CleanRL's Actor maps tanh to the action bounds, and this agent's actions are made otherwise",
            found=binding.facts.head,
        )
    moves = [Move(path, (index(0), key(str(path[1].value))), KEEP) for path in (scale, bias) if path in agent]
    gaussian = dict(actors[0].branches).get("log_std")
    last = "fc_mu" if gaussian is None else "fc_mean"
    moves += named(actors[0], agent, index(0), [*_hidden(len(actors[0].layers)), last])
    if gaussian is not None:
        moves += named(actors[0], agent, index(0), ["fc_logstd"], branch="log_std")
    for number, part in enumerate(critics, start=1):
        depth = len(part.layers)
        moves += named(part, agent, index(number), [*_hidden(depth), f"fc{depth}"])
    containers: dict[Path, Container] = {(): Container("tuple")}
    containers |= {(index(number),): Container("OrderedDict") for number in range(len(critics) + 1)}
    missing = tuple(f"0/{name}" for name in _MAP if (attr("actor"), attr(name)) not in agent)
    return Plan(tuple(moves), containers=containers, missing=missing, notes=_notes(binding, missing))


def _hidden(depth: int) -> list[str]:
    return [f"fc{number}" for number in range(1, depth)]


def _notes(binding: Binding, missing: tuple[str, ...]) -> tuple[str, ...]:
    notes = []
    if {part.component for part in binding.parts} & {"actor_target", "critic_target"}:
        notes.append("targets are not saved by CleanRL")
    if missing:
        notes.append("nothing says the action bounds: a sidecar's action_low and action_high would")
    if any(name != "relu" for name in binding.facts.activations or (binding.facts.hidden,)):
        notes.append("CleanRL's classes have ReLU after hidden layers, this agent has not")
    if any(
        len(part.layers) != len(("fc1", "fc2", "fc3")) for part in binding.parts if part.component in _BOTH
    ):
        notes.append("CleanRL's classes have three layers, this agent's networks have another number")
    return tuple(notes)


_BOTH = tuple(canonical.OPTIMIZED.values())
