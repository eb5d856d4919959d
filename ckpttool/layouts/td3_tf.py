"""The TD3 authors' agent ported to TensorFlow: one object with networks and optimizers as attributes."""

from __future__ import annotations

from ckpttool.layouts import adam
from ckpttool.layouts.canonical import Binding, Facts
from ckpttool.layouts.table import Table, bind
from ckpttool.tree import Tree

TABLE = Table(
    name="td3_tf",
    title="TD3/DDPG agent object saved by tf.train.Checkpoint (TF-Eager port, tf2rl)",
    framework="tensorflow",
    components={
        "actor": "actor",
        "actor_target": "actor_target",
        "critic": "critic",
        "critic_target": "critic_target",
    },
    optimizers={"actor_optimizer": "actor_optimizer", "critic_optimizer": "critic_optimizer"},
    counters={"total_it": "total_it", "_it": "total_it", "save_counter": "save_counter"},
    facts=Facts(head="tanh", hidden="relu", epsilon=1e-3),
    optimizer=adam.from_keras,
    rooted=True,
    seen="sample_ckpts/td3_pendulum_tf",
)


def recognise(tree: Tree, name: str) -> Binding | None:  # noqa: ARG001  # a prefix's name says nothing
    """Return the tree's way to the canonical agent if its networks are named so."""
    return bind(tree, TABLE)
