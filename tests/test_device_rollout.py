"""The device engine: a tensor program beside Gymnasium step by step, whole rollouts beside plain ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpttool import plugins
from ckpttool.agents import envs
from ckpttool.agents.actions import Noise
from ckpttool.agents.envs import EnvSpec
from ckpttool.agents.envs.tensors import DeviceVector
from ckpttool.agents.network import Activation, Affine, Dense, Network
from ckpttool.agents.rollout import Play, Rollout, rollouts
from ckpttool.agents.stacking import stack
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.ops.evaluate import evaluate
from ckpttool.ops.evaluation import Protocol
from tests.conftest import TORCH_SAMPLE, in_process, refused
from tests.test_backends import chain, cuda_is_missing, dense, normal

pytestmark = [
    pytest.mark.environment,
    pytest.mark.torch,
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None or importlib.util.find_spec("gymnasium") is None,
        reason="torch or gymnasium is not installed",
    ),
]

SWING = Dense(np.array([[-1.0], [0.5], [-0.4]], np.float32))
POLICY = chain(3, SWING, Activation("tanh"), Affine(np.full(1, 2, "f4"), np.zeros(1, "f4")))


def torch_policy(network: Network = POLICY, device: str = "cpu", **how: Any) -> Any:
    return plugins.find("backends", "torch").load().build(network, device, **how)


def play(
    network: Network, engine: str, num_envs: int, what: Play, members: int = 1, device: str = "cpu"
) -> tuple[Rollout, ...]:
    with envs.make("Pendulum-v1", num_envs, engine=engine) as vector:
        return rollouts(torch_policy(network, device), vector, what, members=members)


def test_every_step_is_gymnasiums_to_rounding() -> None:
    import gymnasium
    import torch

    with envs.make("Pendulum-v1", 1, engine="device") as vector:
        assert isinstance(vector, DeviceVector)
        seeds = np.array([0, 3, 12345, 2**32 - 1])
        starts = vector.program.starts(seeds)
        state = tuple(torch.from_numpy(start) for start in starts)
        singles: list[Any] = [gymnasium.make("Pendulum-v1") for _ in seeds]
        seen = np.stack([one.reset(seed=int(seed))[0] for one, seed in zip(singles, seeds, strict=True)])
        np.testing.assert_array_equal(np.stack(starts, 1), [one.unwrapped.state for one in singles])
        for number in range(200):
            np.testing.assert_allclose(vector.program.observe(state).numpy(), seen, rtol=0, atol=2e-7)
            actions = (3 * np.sin(number + np.arange(4)[:, None])).astype(np.float32)
            state, rewards, terminated = vector.program.step(state, torch.from_numpy(actions))
            theirs = [one.step(action) for one, action in zip(singles, actions, strict=True)]
            seen = np.stack([each[0] for each in theirs])
            # 200 steps grow the last bit of a float64, 2e-16, by a few hundred times and no more.
            states = [one.unwrapped.state for one in singles]
            np.testing.assert_allclose(torch.stack(state, 1).numpy(), states, rtol=1e-12, atol=1e-12)
            # The torque's square is a float32, and its share of the reward below 0.004.
            np.testing.assert_allclose(rewards.numpy(), [each[1] for each in theirs], rtol=1e-12, atol=1e-9)
            assert not terminated.any()
        for one in singles:
            one.close()


@pytest.mark.parametrize(("episodes", "num_envs"), [(5, 5), (7, 3), (2, 6)])
def test_a_rollout_is_the_plain_one(episodes: int, num_envs: int) -> None:
    what = Play(episodes, seed=40)
    (ours,), (plain,) = play(POLICY, "device", num_envs, what), play(POLICY, "gymnasium", num_envs, what)
    np.testing.assert_allclose(ours.returns, plain.returns, atol=1e-3)
    for name in ("lengths", "terminated", "truncated", "seeds"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(plain, name))
    assert (ours.steps, ours.num_envs, ours.clipped) == (plain.steps, plain.num_envs, 0)
    assert (ours.engine, ours.interrupted) == ("device", False)


def test_the_same_rollout_gives_the_same_bits() -> None:
    first, second = (play(POLICY, "device", 4, Play(9))[0].returns for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_members_play_the_same_seeds() -> None:
    members = [POLICY, chain(3, Dense(-SWING.kernel), *[node.layer for node in POLICY.nodes[1:]])]
    together = play(stack(members), "device", 2 * 2, Play(3, 7), members=2)
    for network, found in zip(members, together, strict=True):
        (alone,) = play(network, "device", 2, Play(3, 7))
        np.testing.assert_allclose(found.returns, alone.returns, atol=1e-3)
        assert found.seeds.tolist() == [7, 8, 9]
        assert (found.steps, found.num_envs) == (alone.steps, 2)


def test_actions_outside_the_bounds_are_counted() -> None:
    wide = chain(3, SWING, Affine(np.full(1, 50, "f4"), np.zeros(1, "f4")))
    (ours,), (plain,) = (play(wide, engine, 2, Play(2)) for engine in ("device", "gymnasium"))
    assert ours.clipped == plain.clipped > 0
    np.testing.assert_allclose(ours.returns, plain.returns, atol=1e-3)


def test_an_action_that_is_no_number_stops() -> None:
    broken = chain(3, Dense(np.full((3, 1), np.nan, np.float32)))
    with pytest.raises(CkpttoolError, match="not finite in episode 0, step 0"):
        play(broken, "device", 2, Play(3))


class Countdown:
    """A program whose episode of seed s lasts 1 + s % 4 steps and pays s for each; odd ones terminate."""

    notes = ()

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = replace(spec, max_episode_steps=4)

    def compare(self, _device: Any) -> None:
        return None

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        return seeds.astype(np.float64), (1 + seeds % 4).astype(np.float64)

    def observe(self, state: Any) -> Any:
        import torch

        return torch.stack([state[0], state[1], state[1]], 1).float()

    def step(self, state: Any, _actions: Any) -> Any:
        seed, left = state
        return (seed, left - 1), seed, left <= 1

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("episodes", "num_envs"), [(13, 4), (1, 3), (16, 16)])
def test_episodes_of_any_length_are_played_once_each(episodes: int, num_envs: int) -> None:
    with envs.make("Pendulum-v1", 1) as one:
        vector = DeviceVector(Countdown(one.spec), 2 * num_envs)
    for found in rollouts(torch_policy(stack([POLICY] * 2)), vector, Play(episodes, 5), members=2):
        seeds = 5 + np.arange(episodes)
        np.testing.assert_array_equal(found.seeds, seeds)
        np.testing.assert_array_equal(found.lengths, 1 + seeds % 4)
        np.testing.assert_array_equal(found.returns, seeds * (1 + seeds % 4))
        np.testing.assert_array_equal(found.truncated, seeds % 4 == 3)
        assert found.terminated.all()
        assert found.steps == found.lengths.sum()


def test_ctrl_c_keeps_what_is_finished() -> None:
    def stop(done: int, _total: int, _steps: int) -> None:
        if done:
            raise KeyboardInterrupt

    with envs.make("Pendulum-v1", 2, engine="device") as vector:
        (found,) = rollouts(torch_policy(), vector, Play(6), progress=stop)
        assert (len(found.returns), found.episodes, found.interrupted) == (2, 6, True)


def test_its_agreement_with_gymnasium_is_measured_where_it_plays() -> None:
    (played,) = play(POLICY, "device", 2, Play(2))
    assert played.agreement is not None
    assert {each.quantity for each in played.agreement.deviations} == {"states", "observations", "rewards"}


def test_another_task_is_refused_before_it_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    with envs.make("Pendulum-v1", 2, engine="device") as vector:
        assert isinstance(vector, DeviceVector)
        program: Any = vector.program
        monkeypatch.setattr(program, "_law", program._law._replace(pull=program._law.pull * 1.001))
        with pytest.raises(UnsupportedError) as refusal:
            rollouts(torch_policy(), vector, Play(2))
    assert refusal.value.expected == "states within 1e-12"


def test_auto_never_takes_it() -> None:
    with envs.make("Pendulum-v1", 2) as vector:
        assert vector.engine != "device"


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        (lambda: envs.make("CartPole-v1", 2, engine="device"), "device engine does not know CartPole-v1"),
        (lambda: play(POLICY, "device", 2, Play(2, noise=Noise(0.1))), "without exploration noise"),
        (lambda: envs.make("Pendulum-v1", 0, engine="device"), "0 environments"),
    ],
)
def test_what_it_does_not_do_is_one_sentence(refusal: Callable[[], object], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        refusal()


def test_the_command_plays_on_it_with_torch_alone() -> None:
    common = ("eval", TORCH_SAMPLE, "--episodes", "3", "--engine", "device")
    ran = in_process(*common, "--backend", "torch", "--json")
    assert ran.status == 0, ran.err
    protocol = ran.json()["protocol"]
    assert (protocol["engine"], protocol["backend"], protocol["dtype"]) == ("device", "torch", "float32")
    alone = in_process(*common)
    assert "needs a policy on tensors" in refused(alone)
    assert "--backend torch" in alone.err


def test_the_command_computes_in_float64() -> None:
    narrow = evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=2))
    wide = in_process("eval", TORCH_SAMPLE, "--episodes", "2", "--json", "--dtype", "float64")
    assert (wide.status, wide.json()["protocol"]["dtype"]) == (0, "float64")
    np.testing.assert_allclose(wide.json()["returns"], narrow.rollout.returns, atol=0.5)
    assert "float16" in refused(in_process("eval", TORCH_SAMPLE, "--dtype", "float16"))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_plays_what_the_cpu_plays(graphs: bool) -> None:
    if cuda_is_missing():
        pytest.skip("PyTorch sees no CUDA device")
    network = chain(3, dense(3, 32), Activation("relu"), Dense(normal(32, 1)), Activation("tanh"))
    with envs.make("Pendulum-v1", 64, engine="device") as vector:
        (gpu,) = rollouts(torch_policy(network, "cuda", graphs=graphs), vector, Play(100, 3))
        (cpu,) = rollouts(torch_policy(network), vector, Play(100, 3))
    np.testing.assert_array_equal(gpu.lengths, cpu.lengths)
    np.testing.assert_allclose(gpu.returns.mean(), cpu.returns.mean(), rtol=0.01)
