"""tf2rl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.errors import UnsupportedError
from ckpttool.core.tree import Tree, ValueLeaf, attr, key
from ckpttool.libraries.binding import bind
from ckpttool.libraries.recognize import LayoutTable
from ckpttool.libraries.schema import LEFT_OPEN, AgentMetadata, RecognizedAgent, plain_id
from ckpttool.mapping.rules import Plan, Settings

if TYPE_CHECKING:
    from ckpttool.libraries.write import WritingTable


_NAME = "args.txt"
_KEYS = ("env_name", "env_id", "env")


def companions(location: str) -> Sequence[str]:
    """Return the arguments file in the checkpoint's folder."""
    return (os.path.join(os.path.dirname(location), _NAME),)


def read_companion(binding: RecognizedAgent, file: str, tree: Tree) -> RecognizedAgent:
    """Return the binding with the environment from the arguments, unchanged if there is none.

    Source: github.com/keiohta/tf2rl, tf2rl/misc/prepare_output_dir.py: the command's arguments as JSON. Its
    examples call the environment `env_name`.
    """
    for name in _KEYS:
        leaf = tree.get((key(name),))
        env = plain_id(leaf.value) if isinstance(leaf, ValueLeaf) else None
        if env is not None:
            return replace(binding, facts=binding.facts.read(os.path.basename(file), env=env))
    return binding


TABLE = LayoutTable(
    name="tf2rl",
    plays=("SAC",),
    writes=("TD3", "DDPG", "SAC"),
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
    facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-3, lacks=LEFT_OPEN["tf2rl"]),
    rooted=True,
    seen="SAC trained and saved by 0.2.0, 1.0.0 and 1.1.5 under TensorFlow 2.21 with Keras 2",
    branches={"out_logstd": "log_std", "out_log_std": "log_std"},
    tensors={"log_alpha": "temperature/log_alpha"},
)


def recognise(tree: Tree, name: str) -> RecognizedAgent | None:  # noqa: ARG001  # a prefix's name is no evidence
    """Return the recognised agent if the policy's last layer and the critics have these names.

    Sources in github.com/keiohta/tf2rl: tf2rl/experiments/trainer.py (`tf.train.Checkpoint(policy=...)`);
    tf2rl/algos/sac.py (CriticQ; until 1.0 also a state value, CriticV); tf2rl/policies/tfp_gaussian_actor.py,
    GaussianActor: an action without noise is max_action times tanh of `out_mean`. Hidden layers are ReLU:
    `base_layers`, in older versions `l1` and `l2`.
    """
    ends = {tuple(name.split("/")[-3:-1]) for name in tree.names.values()}
    if ("actor", "out_mean") not in ends or not any("qf1" in name.split("/") for name in tree.names.values()):
        return None
    binding = bind(tree, TABLE)
    if binding is None:
        return None
    # 1.0 and earlier also store exp(log_alpha) in a variable.
    logs = [move.source for move in binding.moves.moves if move.target[-1] == attr("log_alpha")]
    alpha = {(*path[:-1], attr("alpha")) for path in logs} & tree.leaves.keys()
    return replace(binding, consumed=binding.consumed | alpha)


_WHOSE = "tf2rl"
_DEPTH = 3


def plan(binding: RecognizedAgent, agent: Tree, settings: Settings) -> Plan:
    """Plan the checkpoint that the trainer's `tf.train.Checkpoint(policy=agent)` restores.

    A Gaussian policy becomes a SAC of 1.1; others become a TD3, or with one Q-function a DDPG, whose
    classes have three layers each. Optimizers are those of Keras 2 up to 2.10, which tf2rl uses. Raise
    UnsupportedError for networks that its classes cannot represent.
    """
    from ckpttool.libraries.optimizers_write import LEGACY
    from ckpttool.libraries.write import (
        KERAS,
        LayerNames,
        NetworkRow,
        WritingTable,
        count_critics,
        is_gaussian,
        make_edge_path,
        parse_edge_path,
        plan_object_graph,
    )

    if is_gaussian(binding):
        return plan_object_graph(_sac(), binding, agent, settings, LEGACY)
    deep = [
        part.title for part in binding.parts if len(part.layers) != _DEPTH and part.component in TABLE_TD3
    ]
    if deep:
        raise UnsupportedError(
            "tf2rl's TD3 and DDPG require networks with three layers", found=", ".join(deep)
        )
    twin = count_critics(binding) > 1
    layers = LayerNames("l{n}")
    # tf2rl/algos/td3.py, Critic: both Q-functions in one module.
    second = layers._replace(first=4)
    rows = [NetworkRow(name, parse_edge_path(f"policy/{name}"), layers) for name in ("actor", "actor_target")]
    for name in ("critic", "critic_target"):
        rows.append(NetworkRow(f"{name}/q1", parse_edge_path(f"policy/{name}"), layers))
        rows += [NetworkRow(f"{name}/q2", parse_edge_path(f"policy/{name}"), second)] if twin else []
    table = WritingTable(
        _WHOSE,
        rows,
        "tanh",
        optimizers={
            name: parse_edge_path(f"policy/{name}") for name in ("actor_optimizer", "critic_optimizer")
        },
        counters={"save_counter": parse_edge_path("save_counter")}
        | ({"total_it": parse_edge_path("policy/_it")} if twin else {}),
        needs=("actor", "critic"),
        kinds=KERAS,
        path=make_edge_path,
    )
    return plan_object_graph(table, binding, agent, settings, LEGACY, "int32")


TABLE_TD3 = frozenset(("actor", "actor_target", "critic", "critic_target"))


def _sac() -> WritingTable:
    from ckpttool.libraries.write import (
        KERAS,
        LayerNames,
        NetworkRow,
        SingleTensorRow,
        WritingTable,
        make_edge_path,
        parse_edge_path,
    )

    actor = LayerNames("base_layers/{i}", "out_mean", {"log_std": "out_logstd"})
    critic = LayerNames("base_layers/{i}", "out_layer")
    return WritingTable(
        _WHOSE,
        [
            NetworkRow("actor", parse_edge_path("policy/actor"), actor),
            *(NetworkRow(name, parse_edge_path(f"policy/{stored}"), critic) for stored, name in _QS.items()),
            SingleTensorRow("temperature/log_alpha", parse_edge_path("policy/log_alpha"), (), optional=True),
        ],
        "tanh",
        optimizers={
            canonical: parse_edge_path(f"policy/{stored}")
            for stored, canonical in TABLE.optimizers.items()
            if canonical != "value_optimizer"
        },
        counters={"save_counter": parse_edge_path("save_counter")},
        needs=("actor", "critic"),
        kinds=KERAS,
        path=make_edge_path,
    )


_QS = {stored: canonical for stored, canonical in TABLE.components.items() if stored.startswith("qf")}
