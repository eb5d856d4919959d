"""RLgraph's SAC: variables by name, whose layers a file sorts by the alphabet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import Tree, UnsupportedError, display
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import tf_bundle
from ckpttool.libraries import recognize_tree, rlgraph
from ckpttool.mapping.rules import canonical_tree
from tests.golden_texts import Golden
from tests.restored import (
    HIGH,
    LOW,
    actions,
    chosen,
    observations,
    q_values,
    recognised,
    same,
    unknown,
    without_a_way,
)
from tests.tensorflow_agents import Arrays, layers, run, tensorflow_tree
from tests.test_layouts import LayoutContract

ACTION = "policy/action-adapter-0/action-network/action-layer/dense"
NETWORKS = (
    "sac-value-network",
    "sac-value-network-1",
    "target-sac-value-network",
    "target-sac-value-network-1",
)


def policy(hidden: tuple[str, str]) -> list[str]:
    return [*(f"policy/neural-network/{name}/dense" for name in hidden), ACTION]


def stack(name: str) -> list[str]:
    layers = ("vf-hidden1", "vf-hidden2", "value-function-output")
    return [f"{name}/dense-stack/{layer}/dense" for layer in layers]


def sac(hidden: tuple[str, str] = ("hidden2", "hidden10")) -> Arrays:
    """Return a SAC agent's variables in the order of a file."""
    arrays = layers(policy(hidden), (3, 16, 12, 4))
    for name in NETWORKS:
        arrays |= layers(stack(name), (5, 8, 6, 1))
    return dict(sorted({**arrays, "log_alpha": np.zeros((), "f4")}.items()))


def written(arrays: Arrays, prefix: Path) -> str:
    """Write a bundle without an object graph, as tf.train.Saver does."""
    for piece in tf_bundle.pieces(tensorflow_tree(arrays), graph=False):
        with open(f"{prefix}{piece.suffix}", "wb") as stream:
            piece.write(stream)
    return str(prefix)


class TestRlgraph(LayoutContract):
    name = "rlgraph"

    @pytest.fixture
    def tree(self) -> Tree:
        return tensorflow_tree(sac())


def test_actions_and_values_are_its_networks(tmp_path: Path, golden: Golden) -> None:
    arrays = sac()
    path = written(arrays, tmp_path / "sac")
    mean = run(arrays, policy(("hidden2", "hidden10")), observations())[:, :2]
    low, high = np.array(LOW, "f4"), np.array(HIGH, "f4")
    same(actions(path), (np.tanh(mean) + 1) / 2 * (high - low) + low)
    inputs = np.concatenate([observations(), chosen()], 1)
    for title, name in (
        ("critic/q1", NETWORKS[0]),
        ("critic/q2", NETWORKS[1]),
        ("critic_target/q1", NETWORKS[2]),
    ):
        same(q_values(path, title), run(arrays, stack(name), inputs))
    assert without_a_way(path) == []
    golden("\n".join(unknown(restore_agent(path))))


def test_the_deviation_is_the_second_half() -> None:
    arrays = sac()
    tree = tensorflow_tree(arrays)
    binding = rlgraph.recognise(tree, "sac")
    assert binding is not None
    agent = {display(path): leaf for path, leaf in canonical_tree(tree, binding.moves).items()}
    assert np.array_equal(agent["actor/log_std/kernel"].array(), arrays[f"{ACTION}/kernel"][:, 2:])  # type: ignore[union-attr]
    assert "temperature/log_alpha" in agent


def test_layers_whose_names_are_in_another_order_are_not_run(tmp_path: Path) -> None:
    path = written(sac(("second", "first")), tmp_path / "sac")
    assert [part.title for part in recognised(path).parts if part.acts] == []
    with pytest.raises(UnsupportedError, match="policy/"):
        restore_agent(path).runnable("actor")


def test_agents_without_such_critics_are_others() -> None:
    arrays = {name: array for name, array in sac().items() if "value-network" not in name}
    assert recognize_tree(tensorflow_tree(arrays), "dqn") is None
