"""tf2rl's SAC agents; its TD3 and DDPG have the names of layout td3_tf.

Sources in github.com/keiohta/tf2rl: tf2rl/experiments/trainer.py (`tf.train.Checkpoint(policy=...)`);
tf2rl/algos/sac.py (CriticQ, until 1.0 a value of the state too: CriticV);
tf2rl/policies/tfp_gaussian_actor.py, GaussianActor: an action without noise is max_action times tanh of
`out_mean`. Hidden layers are ReLU: `base_layers`, in older versions `l1` and `l2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpttool.errors import UnsupportedError
from ckpttool.layouts import arguments, optimizers
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.optimizers.keras_older import ToSlots
from ckpttool.layouts.table import Table, bind
from ckpttool.layouts.writing import Lone, Names, Network, Writing, critics, gaussian
from ckpttool.layouts.writing_graph import KERAS, edge, graph, place
from ckpttool.leaf import attr
from ckpttool.ledger import NO_BOUNDS
from ckpttool.mapping.plan import Plan, Settings
from ckpttool.tree import Tree

TABLE = Table(
    name="tf2rl",
    title="tf2rl's SAC: actor with out_mean and out_logstd, qf1, qf2 (its TD3 and DDPG are td3_tf)",
    framework="tensorflow",
    components={
        "actor": "actor",
        "qf1": "critic/q1",
        "qf2": "critic/q2",
        "qf1_target": "critic_target/q1",
        "qf2_target": "critic_target/q2",
        "vf": "value",
        "vf_target": "value_target",
    },
    optimizers={
        "actor_optimizer": "actor_optimizer",
        "qf1_optimizer": "critic_optimizer/q1",
        "qf2_optimizer": "critic_optimizer/q2",
        "vf_optimizer": "value_optimizer",
        "alpha_optimizer": "temperature_optimizer",
    },
    counters={"save_counter": "save_counter"},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-3, lacks=(NO_BOUNDS,)),
    optimizer=optimizers.from_keras,
    rooted=True,
    seen="SAC trained and saved by 0.2.0, 1.0.0 and 1.1.5 under TensorFlow 2.21 with Keras 2",
    branches={"out_logstd": "log_std", "out_log_std": "log_std"},
    tensors={"log_alpha": "temperature/log_alpha"},
)


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # a prefix's name says nothing
    """Return the way to the canonical agent if the policy's last layer and the critics are called so."""
    ends = {tuple(each.split("/")[-3:-1]) for each in tree.names.values()}
    if ("actor", "out_mean") not in ends or not any("qf1" in each.split("/") for each in tree.names.values()):
        return None
    binding = bind(tree, TABLE)
    return None if binding is None else _without_alpha(binding, tree)


def _without_alpha(binding: Binding, tree: Tree) -> Binding:
    """Return the binding without the variable in which 1.0 and before keep exp(log_alpha) as well."""
    logs = [move.source for move in binding.moves.moves if move.target[-1] == attr("log_alpha")]
    alpha = {(*path[:-1], attr("alpha")) for path in logs} & tree.leaves.keys()
    return replace(binding, consumed=binding.consumed | alpha)


def companions(location: str) -> Sequence[str]:
    """Return the file of arguments that the trainer writes beside its checkpoints."""
    return arguments.companions(location)


def told_by(binding: Binding, file: str, tree: Tree) -> Binding:
    """Return the binding with the environment that the arguments name."""
    return arguments.told_by(binding, file, tree)


_WHOSE = "tf2rl"
_MLP = Names("l{n}", "l{n}")
# tf2rl/algos/td3.py, Critic: both Q-functions in one module.
_SECOND = _MLP._replace(first=4)
_DEPTH = 3
_SAC = Names("base_layers/{i}", "out_mean", {"log_std": "out_logstd"})
_Q = Names("base_layers/{i}", "out_layer")


def plan(binding: Binding, agent: Tree, told: Settings) -> Plan:
    """Return where a canonical agent goes: what the trainer's `tf.train.Checkpoint(policy=agent)` restores.

    A Gaussian policy is a SAC of 1.1, another a TD3 or with one Q-function a DDPG, whose classes have three
    layers each. Optimizers are those of Keras 2 up to 2.10, which tf2rl has. Raise UnsupportedError for
    networks that its classes cannot be.
    """
    if gaussian(binding):
        return graph(_sac(), binding, agent, told, ToSlots)
    deep = [
        part.title for part in binding.parts if len(part.layers) != _DEPTH and part.component in TABLE_TD3
    ]
    if deep:
        raise UnsupportedError("tf2rl's TD3 and DDPG have networks of three layers", found=", ".join(deep))
    twin = critics(binding) > 1
    rows = [Network(name, place(f"policy/{name}"), _MLP) for name in ("actor", "actor_target")]
    for name in ("critic", "critic_target"):
        rows.append(Network(f"{name}/q1", place(f"policy/{name}"), _MLP))
        rows += [Network(f"{name}/q2", place(f"policy/{name}"), _SECOND)] if twin else []
    made = Writing(
        _WHOSE,
        rows,
        "tanh",
        optimizers={name: place(f"policy/{name}") for name in ("actor_optimizer", "critic_optimizer")},
        counters={"save_counter": place("save_counter")}
        | ({"total_it": place("policy/_it")} if twin else {}),
        needs=("actor", "critic"),
        kinds=KERAS,
        path=edge,
    )
    return graph(made, binding, agent, told, ToSlots, "int32")


TABLE_TD3 = frozenset(("actor", "actor_target", "critic", "critic_target"))


def _sac() -> Writing:
    return Writing(
        _WHOSE,
        [
            Network("actor", place("policy/actor"), _SAC),
            *(Network(ours, place(f"policy/{theirs}"), _Q) for theirs, ours in _QS.items()),
            Lone("temperature/log_alpha", place("policy/log_alpha"), (), optional=True),
        ],
        "tanh",
        optimizers={
            ours: place(f"policy/{theirs}")
            for theirs, ours in TABLE.optimizers.items()
            if ours != "value_optimizer"
        },
        counters={"save_counter": place("save_counter")},
        needs=("actor", "critic"),
        kinds=KERAS,
        path=edge,
    )


_QS = {theirs: ours for theirs, ours in TABLE.components.items() if theirs.startswith("qf")}
