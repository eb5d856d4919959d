"""Runs a checkpoint's networks with numpy, to be compared with the code of whoever wrote it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from ckpttool.core import Tree
from ckpttool.evaluation import restore
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import Agent, restore_agent, select_network_leaves
from ckpttool.evaluation.statistics import ReturnStatistics
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import RecognizedAgent, recognize_tree
from ckpttool.networks import NetworkSettings, numpy_backend, policy_network, q_network

LOW, HIGH = (-2.0, -1.0), (2.0, 3.0)


def unknown(agent: Agent) -> list[str]:
    """Return what the agent's ledger lists as unknown."""
    return [entry.value for entry in agent.ledger if entry.use == "cannot be known"]


def observations(width: int = 3) -> np.ndarray:
    """Zeros, ordinary and large observations, float32 [120, width]."""
    generator = np.random.default_rng(0)
    rows = [
        np.zeros((1, width)),
        generator.standard_normal((99, width)),
        30 * generator.standard_normal((20, width)),
    ]
    return np.concatenate(rows).astype(np.float32)


def wiring(agent: Agent, low: Sequence[float] = LOW, high: Sequence[float] = HIGH) -> NetworkSettings:
    return derive_network_settings(agent, ActionBounds(low, high, "the test"))[0]


def actions(
    path: object, low: Sequence[float] = LOW, high: Sequence[float] = HIGH, width: int = 3
) -> np.ndarray:
    """Return the restored policy's actions on the observations; the bounds count if no file tells any."""
    agent = restore_agent(str(path))
    part = agent.runnable("actor")
    assert part is not None
    return np.asarray(
        numpy_backend.build(policy_network(agent.tree, part, wiring(agent, low, high))).step(
            observations(width)
        )[0]
    )


def q_values(path: object, title: str = "critic/q1", width: int = 2) -> np.ndarray:
    """Return the restored Q-function's values on the observations and on `chosen` actions, [120]."""
    agent = restore_agent(str(path))
    part = agent.runnable(title)
    assert part is not None
    network = q_network(agent.tree, part, wiring(agent), 3, width)
    values, _ = numpy_backend.build(network).step({"obs": observations(), "action": chosen(width)})
    return np.asarray(values).reshape(-1)


def chosen(width: int = 2) -> np.ndarray:
    """Actions for Q-functions, float32 [120, width]."""
    return np.random.default_rng(1).uniform(-1, 1, (120, width)).astype(np.float32)


def same(one: np.ndarray, other: object) -> None:
    """Assert that two results agree to 1e-6 of their scale."""
    expected = np.asarray(other)
    np.testing.assert_allclose(
        one, expected.reshape(one.shape), rtol=0, atol=1e-6 * max(1.0, float(np.abs(expected).max()))
    )


def agree(statistics: ReturnStatistics, mean: float, std: float, n: int) -> bool:
    """Say whether two means differ by no more than three standard errors, each with its own deviation."""
    assert statistics.std is not None
    return bool(abs(statistics.mean - mean) <= 3 * (statistics.std**2 / statistics.n + std**2 / n) ** 0.5)


def recognised(path: object) -> RecognizedAgent:
    checkpoint = open_checkpoint(str(path))
    binding = recognize_tree(checkpoint.tree, os.path.basename(checkpoint.path))
    assert binding is not None
    return binding


def without_a_way(path: object) -> list[str]:
    """Return the names of the leaves that the layout neither maps nor knows as saying nothing more."""
    tree = open_checkpoint(str(path)).tree
    binding = recognised(path)
    used = {move.source for move in binding.moves.moves} | binding.consumed
    return [tree.names[path] for path in tree if path not in used]


def bound(tree: Tree, name: str = "folder") -> RecognizedAgent:
    binding = recognize_tree(tree, name)
    assert binding is not None
    return binding


def played(
    tree: Tree, obs: np.ndarray, low: Sequence[float] | None = None, high: Sequence[float] | None = None
) -> np.ndarray:
    """Return the actions of a tree's policy by what the tree says alone; bounds may be given instead."""
    binding = bound(tree)
    agent = select_network_leaves(tree, binding)
    known = restore.read_metadata(binding, agent)
    low, high = low or known.action_low, high or known.action_high
    assert known.activations is not None
    assert low is not None
    assert high is not None
    wiring = NetworkSettings(
        tuple(known.activations), str(known.head), 1e-5, tuple(low), tuple(high), known.obs_norm
    )
    part = next(part for part in binding.parts if part.acts)
    return np.asarray(numpy_backend.build(policy_network(agent, part, wiring)).step(obs)[0])
