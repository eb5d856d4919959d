"""The device engine: a tensor program beside Gymnasium step by step, whole rollouts beside plain ones."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import CkpttoolError, UnsupportedError, UsageError, plugins
from ckpttool.evaluation import environments
from ckpttool.evaluation.gymnasium_engine import EnvSpec
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.rollout import ExplorationNoise, Rollout, RolloutSpec, rollouts
from ckpttool.evaluation.simulators import DeviceVector
from ckpttool.networks import Activation, Affine, Dense, Network, stack_networks
from ckpttool.testing.backends import chain, dense, normal
from tests.conftest import ROOT, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.test_backends import cuda_is_missing

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
    network: Network, engine: str, num_envs: int, what: RolloutSpec, members: int = 1, device: str = "cpu"
) -> tuple[Rollout, ...]:
    with environments.make_vector_env("Pendulum-v1", num_envs, engine=engine) as vector:
        return rollouts(torch_policy(network, device), vector, what, members=members)


def test_every_step_is_gymnasiums_to_rounding() -> None:
    import gymnasium
    import torch

    with environments.make_vector_env("Pendulum-v1", 1, engine="device") as vector:
        assert isinstance(vector, DeviceVector)
        seeds = np.array([0, 3, 12345, 2**32 - 1])
        starts = vector.task.starts(seeds)
        state = tuple(torch.from_numpy(start) for start in starts)
        singles: list[Any] = [gymnasium.make("Pendulum-v1") for _ in seeds]
        observed = np.stack([one.reset(seed=int(seed))[0] for one, seed in zip(singles, seeds, strict=True)])
        np.testing.assert_array_equal(np.stack(starts, 1), [one.unwrapped.state for one in singles])
        for number in range(200):
            np.testing.assert_allclose(vector.task.observe(state).numpy(), observed, rtol=0, atol=2e-7)
            actions = (3 * np.sin(number + np.arange(4)[:, None])).astype(np.float32)
            state, rewards, terminated = vector.task.step(state, torch.from_numpy(actions))
            expected = [one.step(action) for one, action in zip(singles, actions, strict=True)]
            observed = np.stack([step[0] for step in expected])
            # 200 steps grow the last bit of a float64, 2e-16, by a few hundred times and no more.
            states = [one.unwrapped.state for one in singles]
            np.testing.assert_allclose(torch.stack(state, 1).numpy(), states, rtol=1e-12, atol=1e-12)
            # The torque's square is a float32, and its share of the reward below 0.004.
            np.testing.assert_allclose(rewards.numpy(), [step[1] for step in expected], rtol=1e-12, atol=1e-9)
            assert terminated is None
        for one in singles:
            one.close()


@pytest.mark.parametrize(("episodes", "num_envs"), [(5, 5), (7, 3), (2, 6)])
def test_a_rollout_is_the_plain_one(episodes: int, num_envs: int) -> None:
    what = RolloutSpec(episodes, seed=40)
    (on_device,), (plain,) = play(POLICY, "device", num_envs, what), play(POLICY, "gymnasium", num_envs, what)
    np.testing.assert_allclose(on_device.returns, plain.returns, atol=1e-3)
    for name in ("lengths", "terminated", "truncated", "seeds"):
        np.testing.assert_array_equal(getattr(on_device, name), getattr(plain, name))
    assert (on_device.steps, on_device.num_envs, on_device.clipped) == (plain.steps, plain.num_envs, 0)
    assert (on_device.engine, on_device.interrupted) == ("device", False)


def test_the_same_rollout_gives_the_same_bits() -> None:
    first, second = (play(POLICY, "device", 4, RolloutSpec(9))[0].returns for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_members_play_the_same_seeds() -> None:
    members = [POLICY, chain(3, Dense(-SWING.kernel), *[node.layer for node in POLICY.nodes[1:]])]
    together = play(stack_networks(members), "device", 2 * 2, RolloutSpec(3, 7), members=2)
    for network, rollout in zip(members, together, strict=True):
        (alone,) = play(network, "device", 2, RolloutSpec(3, 7))
        np.testing.assert_allclose(rollout.returns, alone.returns, atol=1e-3)
        assert rollout.seeds.tolist() == [7, 8, 9]
        assert (rollout.steps, rollout.num_envs) == (alone.steps, 2)


def test_actions_outside_the_bounds_are_counted() -> None:
    wide = chain(3, SWING, Affine(np.full(1, 50, "f4"), np.zeros(1, "f4")))
    (on_device,), (plain,) = (play(wide, engine, 2, RolloutSpec(2)) for engine in ("device", "gymnasium"))
    assert on_device.clipped == plain.clipped > 0
    np.testing.assert_allclose(on_device.returns, plain.returns, atol=1e-3)


def test_an_action_that_is_no_number_stops(golden: Golden) -> None:
    broken = chain(3, Dense(np.full((3, 1), np.nan, np.float32)))
    with pytest.raises(CkpttoolError) as caught:
        play(broken, "device", 2, RolloutSpec(3))
    golden(caught.value)


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
    with environments.make_vector_env("Pendulum-v1", 1) as one:
        vector = DeviceVector(Countdown(one.spec), 2 * num_envs)
    for rollout in rollouts(
        torch_policy(stack_networks([POLICY] * 2)), vector, RolloutSpec(episodes, 5), members=2
    ):
        seeds = 5 + np.arange(episodes)
        np.testing.assert_array_equal(rollout.seeds, seeds)
        np.testing.assert_array_equal(rollout.lengths, 1 + seeds % 4)
        np.testing.assert_array_equal(rollout.returns, seeds * (1 + seeds % 4))
        np.testing.assert_array_equal(rollout.truncated, seeds % 4 == 3)
        assert rollout.terminated.all()
        assert rollout.steps == rollout.lengths.sum()


def test_ctrl_c_keeps_what_is_finished() -> None:
    def stop(done: int, _total: int, _steps: int) -> None:
        if done:
            raise KeyboardInterrupt

    with environments.make_vector_env("Pendulum-v1", 2, engine="device") as vector:
        (rollout,) = rollouts(torch_policy(), vector, RolloutSpec(6), progress=stop)
        assert (len(rollout.returns), rollout.episodes, rollout.interrupted) == (2, 6, True)


def test_its_agreement_with_gymnasium_is_measured_where_it_plays() -> None:
    (played,) = play(POLICY, "device", 2, RolloutSpec(2))
    assert played.agreement is not None
    compared = {deviation.quantity for deviation in played.agreement.deviations}
    assert compared == {"states", "observations", "rewards", "terminations"}


def test_another_task_is_refused_before_it_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    with environments.make_vector_env("Pendulum-v1", 2, engine="device") as vector:
        assert isinstance(vector, DeviceVector)
        program: Any = vector.task
        monkeypatch.setattr(program.task, "pull", program.task.pull * 1.001)
        with pytest.raises(UnsupportedError) as refusal:
            rollouts(torch_policy(), vector, RolloutSpec(2))
    assert refusal.value.expected == "states within 1e-12"


def test_auto_never_takes_it() -> None:
    with environments.make_vector_env("Pendulum-v1", 2) as vector:
        assert vector.engine != "device"


@pytest.mark.parametrize(
    "refusal",
    [
        lambda: environments.make_vector_env("Acrobot-v1", 2, engine="device"),
        lambda: play(POLICY, "device", 2, RolloutSpec(2, watch=lambda *_: None)),
        lambda: environments.make_vector_env("Pendulum-v1", 0, engine="device"),
    ],
    ids=["environment", "rendering", "number"],
)
def test_what_it_does_not_do_is_one_sentence(refusal: Callable[[], object], golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        refusal()
    golden(caught.value)


def test_the_command_plays_on_it_with_torch_alone(golden: Golden) -> None:
    common = ("eval", TORCH_SAMPLE, "--episodes", "3", "--engine", "device")
    ran = in_process(*common, "--backend", "torch", "--json")
    assert ran.status == 0, ran.err
    protocol = ran.json()["protocol"]
    assert (protocol["engine"], protocol["backend"], protocol["dtype"]) == ("device", "torch", "float32")
    alone = in_process(*common)
    refused(alone)
    golden(alone)


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
    with environments.make_vector_env("Pendulum-v1", 64, engine="device") as vector:
        (gpu,) = rollouts(torch_policy(network, "cuda", graphs=graphs), vector, RolloutSpec(100, 3))
        (cpu,) = rollouts(torch_policy(network), vector, RolloutSpec(100, 3))
    np.testing.assert_array_equal(gpu.lengths, cpu.lengths)
    np.testing.assert_allclose(gpu.returns.mean(), cpu.returns.mean(), rtol=0.01)


GOAL = chain(2, Dense(np.array([[0.0], [60.0]], np.float32)), Activation("tanh"))
"""Pushes the car in the direction in which it goes: it reaches the goal in about 100 steps."""
WALL = chain(2, Dense(np.zeros((2, 1), np.float32), np.array([-1.5], np.float32)))
"""Holds the car against the left wall, with a force beyond the bounds."""
WEAK = chain(2, Dense(np.array([[0.3], [5.0]], np.float32), np.array([-0.2], np.float32)), Activation("tanh"))
OTHER = chain(3, Dense(-SWING.kernel), *[node.layer for node in POLICY.nodes[1:]])


@pytest.mark.parametrize(
    ("env", "network", "reaches"),
    [
        ("Pendulum-v1", POLICY, 0),
        ("Pendulum-v1", OTHER, 0),
        ("MountainCarContinuous-v0", GOAL, 50),
        ("MountainCarContinuous-v0", WALL, 0),
        ("MountainCarContinuous-v0", WEAK, 0),
    ],
)
def test_fifty_episodes_have_gymnasiums_returns_lengths_and_ends(
    env: str, network: Network, reaches: int
) -> None:
    played = []
    for engine in ("device", "gymnasium"):
        with environments.make_vector_env(env, 50, engine=engine) as vector:
            played.append(rollouts(torch_policy(network), vector, RolloutSpec(50, 7))[0])
    on_device, expected = played
    assert on_device.terminated.sum() == reaches
    np.testing.assert_allclose(on_device.returns, expected.returns, rtol=0, atol=1e-6)
    for name in ("lengths", "terminated", "truncated", "seeds"):
        np.testing.assert_array_equal(getattr(on_device, name), getattr(expected, name))
    assert (on_device.steps, on_device.clipped) == (expected.steps, expected.clipped)


def test_every_step_of_the_car_is_gymnasiums() -> None:
    import gymnasium
    import torch

    with environments.make_vector_env("MountainCarContinuous-v0", 1, engine="device") as vector:
        assert isinstance(vector, DeviceVector)
        program: Any = vector.task
        seeds, random = np.array([0, 3, 12345, 2**32 - 1]), np.random.default_rng(1)
        state = tuple(map(torch.from_numpy, program.starts(seeds)))
        singles: list[Any] = [gymnasium.make("MountainCarContinuous-v0").unwrapped for _ in seeds]
        for one, seed in zip(singles, seeds.tolist(), strict=True):
            one.reset(seed=seed)
        stopped = 0
        # Force in the direction of the velocity leads to the wall and to the goal.
        for _ in range(300):
            velocity = np.array([one.state[1] for one in singles], np.float32)
            actions = np.where(velocity < 0, -1, 1) * random.uniform(0.5, 1, 4)
            actions[-1] = -1
            inputs = actions[:, None].astype(np.float32)
            state, rewards, terminated = program.step(state, torch.from_numpy(inputs))
            expected = [one.step(action) for one, action in zip(singles, inputs, strict=True)]
            observations = np.stack([step[0] for step in expected])
            np.testing.assert_allclose(program.observe(state).numpy(), observations, rtol=0, atol=3e-7)
            np.testing.assert_allclose(rewards.numpy(), [step[1] for step in expected], rtol=1e-12)
            np.testing.assert_array_equal(terminated.numpy(), [step[2] for step in expected])
            stopped += (observations == [np.float32(-1.2), 0]).all(1).sum()
        assert terminated.any()
        assert stopped


@pytest.mark.parametrize(("env", "network"), [("Pendulum-v1", POLICY), ("MountainCarContinuous-v0", GOAL)])
def test_without_gymnasium_the_device_plays_the_same(
    env: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, specs = [], []
    for present in (True, False):
        monkeypatch.setattr(environments, "is_gymnasium_installed", lambda present=present: present)
        with environments.make_vector_env(env, 4, engine="device") as vector:
            specs.append(vector.spec)
            played.append(rollouts(torch_policy(network), vector, RolloutSpec(6, 3))[0])
            assert bool(vector.notes) is not present
    for field in ("id", "observation", "action_low", "action_high", "max_episode_steps", "render_fps"):
        assert getattr(specs[0], field) == getattr(specs[1], field)
    np.testing.assert_array_equal(played[0].returns, played[1].returns)
    assert played[1].agreement is None


@pytest.mark.parametrize("name", ["power", "goal", "fastest"])
def test_another_car_is_refused_before_it_is_played(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with environments.make_vector_env("MountainCarContinuous-v0", 2, engine="device") as vector:
        assert isinstance(vector, DeviceVector)
        task: Any = vector.task
        monkeypatch.setattr(task.task, name, getattr(task.task, name) * 0.99)
        with pytest.raises(UnsupportedError):
            rollouts(torch_policy(GOAL), vector, RolloutSpec(2))


@pytest.mark.parametrize(("env", "network"), [("Pendulum-v1", POLICY), ("MountainCarContinuous-v0", GOAL)])
def test_noise_is_that_of_every_engine(env: str, network: Network) -> None:
    what, played = RolloutSpec(5, 11, noise=ExplorationNoise(0.3)), []
    for engine, rows in (("device", 2), ("gymnasium", 5)):
        with environments.make_vector_env(env, rows, engine=engine) as vector:
            played.append(rollouts(torch_policy(network), vector, what)[0])
    np.testing.assert_allclose(played[0].returns, played[1].returns, atol=1e-3)
    np.testing.assert_array_equal(played[0].lengths, played[1].lengths)
    assert played[0].clipped == played[1].clipped == 0


def test_noise_beyond_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.evaluation import torch_rollout

    monkeypatch.setattr(torch_rollout, "MOST_NOISE_BYTES", 1000)
    with pytest.raises(UsageError) as refusal:
        play(POLICY, "device", 2, RolloutSpec(9, noise=ExplorationNoise(0.1)))
    assert "--episodes" in str(refusal.value.hint)


class Exchange:
    """Exchanges its two tensors in every step, and pays the first."""

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = replace(spec, max_episode_steps=3)
        self.notes = ()

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        return seeds.astype(np.float64), 100.0 + seeds

    def observe(self, state: Any) -> Any:
        return state[0].float()[:, None].expand(-1, 3)

    def step(self, state: Any, _actions: Any) -> Any:
        return (state[1], state[0]), state[0], None

    def close(self) -> None:
        pass


def test_a_program_may_return_the_tensors_that_it_was_given() -> None:
    with environments.make_vector_env("Pendulum-v1", 1) as one:
        vector = DeviceVector(Exchange(one.spec), 2)  # type: ignore[arg-type]  # it compares nothing
    (rollout,) = rollouts(torch_policy(), vector, RolloutSpec(5, 1))
    np.testing.assert_array_equal(rollout.returns, [3 * seed + 100 for seed in range(1, 6)])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_action_that_is_not_finite_is_named(bad: float, golden: Golden) -> None:
    """The action of episode e is `bad` from step 7 - e of its row's second episode on."""
    import torch

    def act(obs: Any) -> Any:
        # Countdown shows the seed and the steps that are left.
        seed, left = obs[:, 0], obs[:, 1]
        return torch.where((seed == 7) & (left == 2), bad, 0.5)[:, None]

    with environments.make_vector_env("Pendulum-v1", 1) as one:
        vector = DeviceVector(Countdown(one.spec), 3)
    policy = torch_policy()
    policy.act = act
    with pytest.raises(CkpttoolError) as caught:
        rollouts(policy, vector, RolloutSpec(12))
    golden(caught.value)
    # An idle row's actions count for nothing.
    policy.act = lambda obs: torch.where(obs[:, 0] >= 5, bad, 0.5)[:, None]
    (rollout,) = rollouts(policy, vector, RolloutSpec(5))
    assert len(rollout.returns) == 5


@pytest.mark.parametrize("env", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_a_rollout_is_read_once_in_a_hundred_steps(env: str) -> None:
    import torch

    from ckpttool.evaluation.torch_rollout import STEPS_BETWEEN_LOOKS
    from tests.transfers import count_transfers

    network = chain(3 if env == "Pendulum-v1" else 2, dense(3 if env == "Pendulum-v1" else 2, 1))
    with environments.make_vector_env(env, 8, engine="device") as vector:
        transfers = count_transfers(
            torch_policy(network).act, torch.device("cpu"), vector, RolloutSpec(99), looks=3
        )
    assert (transfers.steps, transfers.host_reads, transfers.uploads) == (3 * STEPS_BETWEEN_LOOKS, 3, 0)
    # The device's share of a step: a number that a change should not raise unnoticed.
    assert transfers.launches_per_step < 55


def test_a_step_that_reads_the_device_is_counted() -> None:
    import torch

    from tests.transfers import count_transfers

    def act(obs: Any) -> Any:
        return obs[:, :1] * float(obs[0, 0])

    with environments.make_vector_env("Pendulum-v1", 2, engine="device") as vector:
        transfers = count_transfers(act, torch.device("cpu"), vector, RolloutSpec(9), looks=1)
    assert transfers.host_reads == 101


def test_cuda_is_read_once_in_a_hundred_steps() -> None:
    if cuda_is_missing():
        pytest.skip("PyTorch sees no CUDA device")
    import torch

    from tests.transfers import count_transfers

    policy = torch_policy(device="cuda")
    with environments.make_vector_env("Pendulum-v1", 64, engine="device") as vector:
        result = count_transfers(policy.act, torch.device(policy.device), vector, RolloutSpec(999), looks=3)
    assert (result.host_reads, result.uploads) == (3, 0)


class Fakes:
    """Counts what crosses devices, and indexes fake tensors of CUDA as a PyTorch without CUDA cannot."""

    def __init__(self) -> None:
        import torch
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        crossed = self.crossed = []

        def indexed(tensor: Any, index: Any) -> Any:
            dim = 0
            for position in index if isinstance(index, tuple) else (index,):
                if position is None:
                    tensor = tensor.unsqueeze(dim)
                elif isinstance(position, slice):
                    tensor = torch.ops.aten.slice(tensor, dim, position.start, position.stop)
                elif isinstance(position, int):
                    tensor, dim = tensor.select(dim, position), dim - 1
                else:
                    return torch.ops.aten.index(tensor, list(index) if isinstance(index, tuple) else [index])
                dim += 1
            return tensor

        class Indexing(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is torch.Tensor.__getitem__:
                    return indexed(*args)
                if func is torch.Tensor.__setitem__:
                    return torch.ops.aten.copy_(indexed(*args[:2]), args[2])
                if func is torch.Tensor.copy_:
                    return torch.ops.aten.copy_(*args)
                return func(*args, **(kwargs or {}))

        class Crossing(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                tensors = [item for item in (*args, result) if isinstance(item, torch.Tensor)]
                if len({tensor.device.type for tensor in tensors}) > 1:
                    crossed.append(str(func))
                return result

        self.modes = (Indexing(), Crossing())  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("env", ["Pendulum-v1", "MountainCarContinuous-v0", "device_tasks:learned_pendulum"])
@pytest.mark.parametrize(("members", "noise"), [(1, None), (3, None), (1, ExplorationNoise(0.1))])
def test_a_step_on_fake_cuda_stays_there(
    env: str, members: int, noise: ExplorationNoise | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors raise for devices that are mixed and for values that the host would read."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ckpttool.evaluation.torch_rollout import _DeviceRollout
    from ckpttool.networks import TorchPolicy

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    width = 2 if env == "MountainCarContinuous-v0" else 3
    network = chain(width, dense(width, 8), Activation("relu"), Dense(normal(8, 1)), Activation("tanh"))
    position, fakes = torch.device("cuda:0"), Fakes()
    indexing, crossing = fakes.modes
    with (
        environments.make_vector_env(env, 4 * members, engine="device", trusted=True) as vector,
        FakeTensorMode(),
        torch.no_grad(),
        indexing,
    ):
        assert isinstance(vector, DeviceVector)
        # Without what PyTorch's inference mode does to constants, which fake tensors do not know.
        policy = TorchPolicy(stack_networks([network] * members), position)
        game = _DeviceRollout(
            lambda obs: policy._run([obs.reshape(*([members] * (members > 1)), -1, width)])[0].reshape(-1, 1),
            position,
            vector,
            RolloutSpec(10, noise=noise),
            members,
        )
        with crossing:
            for _ in range(3):
                game.tick()
        stored = [value for value in vars(game).values() if isinstance(value, torch.Tensor)]
        assert stored
        assert {item.device for item in (*stored, *game.task.state, *game.ended.values())} == {position}
    assert not fakes.crossed


def test_the_weights_of_a_sweep_are_uploaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpttool.commands import sweep
    from ckpttool.networks import torch_backend

    folder = tmp_path / "run"
    folder.mkdir()
    for number in range(20):
        shutil.copy(TORCH_SAMPLE, folder / f"ckpt-{number}.pt")
    built, build = [], torch_backend.build
    monkeypatch.setattr(torch_backend, "build", lambda *a, **k: (built.append(1), build(*a, **k))[1])
    how = Protocol(2, num_envs=2, backend="torch", engine="device")
    results = sweep.sweep([str(folder)], "Pendulum-v1", how)
    assert [evaluation.stacked for evaluation in results.evaluations] == [20] * 20
    assert len(built) == 1


def test_the_starts_of_many_seeds_are_those_of_one_by_one() -> None:
    from ckpttool.evaluation import gymnasium_engine

    random = np.random.default_rng(0)
    seeds = np.concatenate([random.integers(0, 2**32, 500), np.arange(200), [2**32 - 1], np.arange(3)])
    low, high = np.array([-1.5, 0.0, 2.0]), np.array([1.5, 7.0, 2.5])
    drawn: list[int] = []

    def draw(seed: int) -> np.ndarray:
        drawn.append(seed)
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).uniform(low, high)

    starts = gymnasium_engine.draw_starts(seeds, low, high, draw)
    assert len(drawn) < 50
    np.testing.assert_array_equal(starts, [draw(int(seed)) for seed in seeds])
    # What draws otherwise is asked for every seed; so is what NumPy seeds with two words.
    other = gymnasium_engine.draw_starts(seeds, low, high, lambda seed: np.array([seed, 0.0, 1.0]))
    np.testing.assert_array_equal(other[:, 0], seeds)
    wide = seeds + 2**32
    np.testing.assert_array_equal(
        gymnasium_engine.draw_starts(wide, low, high, draw), [draw(int(seed)) for seed in wide]
    )


@pytest.mark.parametrize("value", [3e38, -3e38])
def test_large_actions_are_finite_and_limited(value: float) -> None:
    import torch

    with environments.make_vector_env("Pendulum-v1", 1) as one:
        bounds = np.full(4, -2, np.float32), np.full(4, 2, np.float32)
        spec = replace(one.spec, action_low=bounds[0], action_high=bounds[1])
        vector = DeviceVector(Countdown(spec), 2)
    policy = torch_policy()
    policy.act = lambda obs: torch.full((len(obs), 4), value)
    (rollout,) = rollouts(policy, vector, RolloutSpec(5))
    assert rollout.clipped == rollout.steps == rollout.lengths.sum()
