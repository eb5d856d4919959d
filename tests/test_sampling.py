"""Sampled actions: their probabilities, one stream per episode, and who refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import CkpttoolError, UnsupportedError, UsageError, plugins
from ckpttool.evaluation import environments
from ckpttool.evaluation.rollout import ActionSampler, NormalSampler, RolloutSpec, rollouts
from ckpttool.networks import NOISE, Add, Clip, Dense, Exp, Multiply, Network, Node, stack_networks
from ckpttool.testing.backends import chain
from tests.conftest import TORCH_SAMPLE, in_process, refused
from tests.test_layout_cleanrl import discrete

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")
pytestmark = [pytest.mark.environment, pytest.mark.torch]

CARTPOLE = "CartPole-v1"
# The 0.999 quantile of chi-square with 8 degrees of freedom (Abramowitz and Stegun, table 26.8).
MOST_CHI_SQUARE = 26.12


def test_frequencies_are_the_softmax_of_the_logits() -> None:
    scores = np.random.default_rng(3).normal(scale=1.5, size=9)
    count, stream = 40_000, ActionSampler.stream(7)
    drawn = ActionSampler((9,), (5,)).choose(np.tile(scores, (count, 1)), [stream] * count)
    expected = np.exp(scores) / np.exp(scores).sum()
    frequencies = np.bincount(drawn[:, 0] - 5, minlength=9) / count
    assert count * ((frequencies - expected) ** 2 / expected).sum() < MOST_CHI_SQUARE


def test_each_choice_of_several_has_its_own_probabilities() -> None:
    scores, count = np.array([0.0, 2.0, -1.0, 0.5, 0.0]), 20_000
    drawn = ActionSampler((2, 3), (0, 10)).choose(
        np.tile(scores, (count, 1)), [ActionSampler.stream(1)] * count
    )
    for column, part, start in zip(drawn.T, (scores[:2], scores[2:]), (0, 10), strict=True):
        expected = np.exp(part) / np.exp(part).sum()
        frequencies = np.bincount(column - start, minlength=len(part)) / count
        np.testing.assert_allclose(frequencies, expected, atol=0.015)
    # The two are independent.
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_is_the_share_of_uniform_actions(epsilon: float) -> None:
    scores, count = np.array([0.0, 3.0, 1.0, 2.0]), 20_000
    drawn = ActionSampler((4,), (0,), epsilon).choose(
        np.tile(scores, (count, 1)), [ActionSampler.stream(1)] * count
    )
    expected = np.full(4, epsilon / 4) + (1 - epsilon) * np.eye(4)[1]
    np.testing.assert_allclose(np.bincount(drawn[:, 0], minlength=4) / count, expected, atol=0.015)


def played(num_envs: int, backend: str = "numpy", engine: str = "auto", epsilon: float | None = None) -> Any:
    kernel = np.array([[-0.05, 0.05], [-0.2, 0.2], [-1.0, 1.0], [-0.5, 0.5]], np.float32)
    policy = plugins.find("backends", backend).load().build(chain(4, Dense(4 * kernel)), "cpu")
    with environments.make_vector_env(CARTPOLE, num_envs, engine=engine) as vector:
        what = RolloutSpec(7, 50, sampling=ActionSampler((2,), (0,), epsilon))
        return rollouts(policy, vector, what)[0]


@pytest.mark.parametrize("epsilon", [None, 0.9])
def test_an_episode_depends_on_its_seed_alone(epsilon: float | None) -> None:
    first = played(1, epsilon=epsilon)
    assert len(set(first.lengths.tolist())) > 1
    for other in (
        played(3, epsilon=epsilon),
        played(7, "torch", epsilon=epsilon),
        played(2, engine="gymnasium", epsilon=epsilon),
    ):
        np.testing.assert_array_equal(other.lengths, first.lengths)
        np.testing.assert_array_equal(other.returns, first.returns)


def gaussian(scale: float = 1.0) -> Network:
    """Return a policy of Pendulum whose mean and deviation depend on the observation."""
    kernels = (np.array([[0.5], [-2.0], [-0.4]]), np.array([[0.3], [0.1], [-0.2]]))
    nodes = (
        *(Node(Dense((scale * kernel).astype(np.float32)), (0,)) for kernel in kernels),
        Node(Exp(), (3,)),
        Node(Multiply(), (4, 1)),
        Node(Add(), (2, 5)),
        Node(Clip(np.full(1, -2, np.float32), np.full(1, 2, np.float32)), (6,)),
    )
    return Network((("obs", 3), (NOISE, 1)), nodes, 7)


def drawn(num_envs: int, backend: str = "numpy", engine: str = "auto", networks: Any = None) -> Any:
    networks = networks or [gaussian()]
    policy = plugins.find("backends", backend).load().build(stack_networks(networks), "cpu")
    rows = num_envs * len(networks)
    with environments.make_vector_env("Pendulum-v1", rows, engine=engine) as vector:
        return rollouts(policy, vector, RolloutSpec(5, 50, sampling=NormalSampler(1)), members=len(networks))


def test_a_gaussian_episode_depends_on_its_seed_alone() -> None:
    (first,) = drawn(1)
    assert len(set(first.returns.tolist())) > 1
    for other in (
        drawn(3)[0],
        drawn(4, "torch")[0],
        drawn(2, engine="gymnasium")[0],
        drawn(2, "torch", "device")[0],
        drawn(2, "onnxruntime")[0],
        drawn(2, networks=[gaussian(), gaussian(0.5)])[0],
        drawn(2, "torch", "device", networks=[gaussian(0.5), gaussian()])[1],
    ):
        np.testing.assert_allclose(other.returns, first.returns, rtol=1e-3)
        np.testing.assert_array_equal(other.lengths, first.lengths)


def test_the_device_engine_does_not_sample() -> None:
    with pytest.raises(UsageError):
        played(2, "torch", "device")


def test_scores_that_are_no_numbers_stop() -> None:
    broken = chain(4, Dense(np.full((4, 2), np.nan, np.float32)))
    policy = plugins.find("backends", "numpy").load().build(broken, "cpu")
    with environments.make_vector_env(CARTPOLE, 2) as vector, pytest.raises(CkpttoolError):
        rollouts(policy, vector, RolloutSpec(3, sampling=ActionSampler((2,), (0,))))


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("agents"), "ppo")


@pytest.fixture(scope="module")
def q_network(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("agents"), "dqn")


def saved(folder: Path, name: str) -> str:
    """Write an agent of CleanRL with random weights."""
    torch.save(discrete(name)[0].state_dict(), folder / f"{name}.cleanrl_model")
    return str(folder / f"{name}.cleanrl_model")


def test_the_result_says_how_actions_were_drawn(actor: str) -> None:
    words = ("eval", actor, "--env", CARTPOLE, "--episodes", "4")
    plain, drawn, spread = (
        in_process(*words, "--json", *more)
        for more in ((), ("--stochastic",), ("--stochastic", "--num-envs", "2", "--backend", "torch"))
    )
    documents = [process.json() for process in (plain, drawn, spread)]
    protocols = [document["protocol"] for document in documents]
    assert [(p["deterministic"], p["stochastic"], p["epsilon"]) for p in protocols] == [
        (True, False, None),
        (False, True, None),
        (False, True, None),
    ]
    assert documents[0]["returns"] != documents[1]["returns"] == documents[2]["returns"]
    assert "drawn" in in_process(*words, "--stochastic").out


def test_an_agent_draws_what_eval_draws(actor: str) -> None:
    import gymnasium

    how = ckpttool.Protocol(episodes=1, seed=31, stochastic=True)
    (length,) = ckpttool.evaluate(actor, CARTPOLE, how).rollout.lengths
    agent = ckpttool.load_agent(actor, CARTPOLE)
    agent.seed(31)
    env = gymnasium.make(CARTPOLE)
    obs, _ = env.reset(seed=31)
    steps, over = 0, False
    while not over:
        action, _ = agent.predict(obs, deterministic=False)
        obs, _, terminated, truncated, _ = env.step(int(action))
        steps, over = steps + 1, terminated or truncated
    env.close()
    assert steps == length
    batch = np.random.default_rng(0).normal(size=(50, 4)).astype("f4")
    agent.seed(4)
    first = agent.act(batch, deterministic=False)
    agent.seed(4)
    tensor = agent.act(torch.from_numpy(batch), deterministic=False)
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), first)
    assert (first != agent.act(batch)).any()
    with pytest.raises(UnsupportedError):
        agent.act(batch, epsilon=0.1)


def test_a_q_network_explores_by_epsilon(q_network: str) -> None:
    words = ("eval", q_network, "--env", CARTPOLE, "--episodes", "3", "--json")
    plain, never = in_process(*words), in_process(*words, "--epsilon", "0")
    assert plain.json()["returns"] == never.json()["returns"]
    sometimes = in_process(*words, "--epsilon", "0.5").json()
    assert sometimes["protocol"]["epsilon"] == 0.5
    assert sometimes["protocol"]["deterministic"] is False
    refused(in_process(*words[:-1], "--stochastic"))


@pytest.mark.parametrize(
    "more",
    [("--stochastic",), ("--epsilon", "0.1"), ("--stochastic", "--epsilon", "0.1"), ("--epsilon", "2")],
)
def test_a_policy_without_that_form_refuses(more: tuple[str, ...]) -> None:
    refused(in_process("eval", TORCH_SAMPLE, "--episodes", "1", *more))
