"""Rollouts: equality with a plain loop, seeds per episode, order, limits, interruption."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import (
    CkpttoolError,
    EnvironmentMismatchError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
)
from ckpttool.evaluation import environments
from ckpttool.evaluation.gymnasium_engine import GymVector, VectorEnv
from ckpttool.evaluation.rollout import ExplorationNoise, Rollout, RolloutSpec, rollouts
from ckpttool.networks import Observation, State
from tests.golden_texts import Golden

pytestmark = [
    pytest.mark.environment,
    pytest.mark.skipif(importlib.util.find_spec("gymnasium") is None, reason="gymnasium is not installed"),
]
needs_box2d = pytest.mark.skipif(importlib.util.find_spec("Box2D") is None, reason="Box2D is not installed")
needs_mujoco = pytest.mark.skipif(
    importlib.util.find_spec("mujoco") is None, reason="mujoco is not installed"
)


class Linear:
    """action = obs @ gain, summed column by column so that no row depends on the batch's shape."""

    device = "cpu"

    def __init__(self, *gain: float, actions: int = 1) -> None:
        self.gain = np.array(gain, np.float32)
        self.actions = actions
        self.shapes: set[tuple[int, ...]] = set()

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        assert isinstance(obs, np.ndarray)
        self.shapes.add(obs.shape)
        total = np.zeros(len(obs), np.float32)
        for column, gain in zip(obs.T, self.gain, strict=False):
            total = total + column.astype(np.float32) * gain
        return np.repeat(total[:, None], self.actions, axis=1), state


def rollout(policy: Any, envs: VectorEnv, *, episodes: int, seed: int = 0, progress: Any = None) -> Rollout:
    """Play one policy."""
    return rollouts(policy, envs, RolloutSpec(episodes, seed), progress=progress)[0]


PENDULUM = Linear(-1.0, 0.5, -0.4)


def plain_loop(env_id: str, policy: Any, seeds: list[int]) -> list[tuple[float, int, bool, bool]]:
    """Play as a few lines of Gymnasium would: a fresh environment for every episode."""
    import gymnasium

    outcomes = []
    for seed in seeds:
        env = gymnasium.make(env_id)
        obs, _ = env.reset(seed=seed)
        total, length, terminated, truncated = 0.0, 0, False, False
        while not (terminated or truncated):
            space: Any = env.action_space
            action = np.clip(policy.step(obs[None])[0][0], space.low, space.high)
            obs, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            length += 1
        outcomes.append((total, length, bool(terminated), bool(truncated)))
        env.close()
    return outcomes


def outcomes(result: Rollout) -> list[tuple[float, int, bool, bool]]:
    columns = (result.returns, result.lengths, result.terminated, result.truncated)
    return list(zip(*(column.tolist() for column in columns), strict=True))


class Countdown:
    """An environment whose episode of seed s lasts `lengths[s]` steps and pays 1 + s / 10 for each."""

    lengths = (7, 1, 4, 2, 9, 3, 5, 1)
    created = 0

    def __init__(self, low: float = -1, high: float = 1, dtype: type = np.float32) -> None:
        from gymnasium.spaces import Box

        self.observation_space = Box(-100, 100, (2,), np.float32)
        self.action_space = Box(low, high, (1,), dtype)
        self.actions: list[np.ndarray] = []
        type(self).created += 1

    def reset(self, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        self.seed, self.left = seed, self.lengths[seed]
        return np.array([seed, self.left], np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.left -= 1
        done = self.left == 0
        odd = bool(self.seed % 2)
        return (
            np.array([self.seed, self.left], np.float32),
            1 + self.seed / 10,
            done and odd,
            done and not odd,
            {},
        )

    def close(self) -> None:
        pass


class TestAgainstAPlainLoop:
    @pytest.mark.parametrize("num_envs", [1, 4, 7])
    def test_pendulum_is_gymnasiums(self, num_envs: int) -> None:
        with environments.make_vector_env("Pendulum-v1", num_envs) as pendulum:
            result = rollout(PENDULUM, pendulum, episodes=5, seed=100)
        expected = plain_loop("Pendulum-v1", PENDULUM, [100, 101, 102, 103, 104])
        assert [outcome[1:] for outcome in outcomes(result)] == [item[1:] for item in expected]
        np.testing.assert_allclose(result.returns, [item[0] for item in expected], atol=1e-3)
        assert result.seeds.tolist() == [100, 101, 102, 103, 104]
        assert (result.steps, result.num_envs, result.interrupted) == (1000, num_envs, False)

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_episodes_that_end_by_themselves(self, num_envs: int) -> None:
        policy = Linear(0.0, 50.0)  # push the way the car moves: the flag is reached, sooner or later
        with environments.make_vector_env("MountainCarContinuous-v0", num_envs) as cars:
            result = rollout(policy, cars, episodes=4)
        assert outcomes(result) == plain_loop("MountainCarContinuous-v0", policy, [0, 1, 2, 3])
        assert result.terminated.all()
        assert len(set(result.lengths.tolist())) > 1

    @needs_box2d
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_an_environment_that_remembers_is_made_anew(self) -> None:
        policy = Linear(0.3, -0.2, 0.5, 0.1, actions=4)
        with environments.make_vector_env("BipedalWalker-v3", 2) as walkers:
            result = rollout(policy, walkers, episodes=5)
        assert outcomes(result) == plain_loop("BipedalWalker-v3", policy, [0, 1, 2, 3, 4])
        assert set(walkers.spec.versions) == {"gymnasium", "Box2D"}

    @needs_mujoco
    def test_mujoco_leaves_no_log_behind(self, tmp_path: Path) -> None:
        program = (
            "from ckpttool.evaluation import environments as envs\n"
            "with envs.make_vector_env('HalfCheetah-v5') as e:\n"
            "    print(sorted(e.spec.versions), e.spec.obs_dim, e.notes)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(environments.__file__).parents[2]), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith("['gymnasium', 'mujoco'] 17")
        assert done.stderr == ""
        assert list(tmp_path.iterdir()) == []


class TestOrder:
    @pytest.mark.parametrize("num_envs", [1, 2, 3, 8, 20])
    def test_every_index_once_whoever_finishes_first(self, num_envs: int) -> None:
        result = rollout(Linear(0, 0), GymVector(Countdown, num_envs), episodes=8)
        assert result.lengths.tolist() == list(Countdown.lengths)
        assert result.returns.tolist() == pytest.approx(
            [n * (1 + s / 10) for s, n in enumerate(Countdown.lengths)]
        )
        assert result.terminated.tolist() == [False, True] * 4
        assert result.truncated.tolist() == [True, False] * 4
        assert result.steps == sum(Countdown.lengths)

    def test_the_batch_shape_never_changes(self) -> None:
        policy = Linear(0, 0)
        rollout(policy, GymVector(Countdown, 5), episodes=7)
        assert policy.shapes == {(5, 2)}

    def test_idle_rows_get_no_environment(self) -> None:
        before = Countdown.created
        rollout(Linear(0, 0), GymVector(Countdown, 50), episodes=2)
        assert Countdown.created - before == 2

    def test_the_policy_sees_every_observation(self) -> None:
        observations: list[list[float]] = []

        class Seeing(Linear):
            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                observations.append(np.asarray(obs)[0].tolist())
                return super().step(obs, state)

        rollout(Seeing(0, 0), GymVector(Countdown, 1), episodes=4)
        assert observations == [[s, left] for s in range(4) for left in range(Countdown.lengths[s], 0, -1)]

    def test_progress_ends_with_all(self) -> None:
        calls: list[tuple[int, int, int]] = []
        rollout(Linear(0, 0), GymVector(Countdown, 2), episodes=5, progress=lambda *c: calls.append(c))
        assert calls[-1] == (5, 5, sum(Countdown.lengths[:5]))
        assert calls == sorted(calls)

    def test_memory_begins_anew_with_every_episode(self) -> None:
        class Counter:
            device = "cpu"
            observations: list[list[float]] = []  # noqa: RUF012

            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                memory = state[0] if state else np.zeros((len(obs), 1), np.float32)
                self.observations.append(memory[:, 0].tolist())
                after = memory + 1
                after.flags.writeable = False
                return np.zeros((len(obs), 1), np.float32), (after,)

        rollout(Counter(), GymVector(Countdown, 2), episodes=3)
        # Row 0 plays episode 0 (7 steps); row 1 plays episode 1 (1 step), then episode 2 (4 steps).
        assert [memory[0] for memory in Counter.observations] == [0, 1, 2, 3, 4, 5, 6]
        assert [memory[1] for memory in Counter.observations][:5] == [0, 0, 1, 2, 3]


class TestLimits:
    def test_actions_are_limited_and_counted(self) -> None:
        vector = GymVector(Countdown)
        shared = vector._envs[0]
        result = rollout(Linear(0, 1), vector, episodes=1)  # the action is the number of steps left
        assert [a.tolist() for a in shared.actions] == [[1]] * 7
        assert result.clipped == 6

    def test_rounding_is_limited_without_a_word(self) -> None:
        class Almost(Linear):
            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                return np.full((len(obs), 1), 1 + 1e-7), state

        assert rollout(Almost(), GymVector(Countdown), episodes=1).clipped == 0

    def test_actions_reach_the_environment_in_its_type(self) -> None:
        class Wide(Linear):
            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                return np.zeros((len(obs), 1), np.float64), state

        vector = GymVector(Countdown)
        env = vector._envs[0]
        rollout(Wide(), vector, episodes=1)
        assert {a.dtype.name for a in env.actions} == {"float32"}

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("bound", [1, np.inf])
    def test_an_action_that_is_no_number_is_an_error(self, bad: float, bound: float, golden: Golden) -> None:
        class Broken(Linear):
            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                assert isinstance(obs, np.ndarray)
                late = (obs[:, :1] == 2) & (obs[:, 1:] == 3)  # episode 2, its second step
                return np.where(late, np.float32(bad), np.float32(0)), state

        vector = GymVector(lambda: Countdown(-bound, bound), 2)
        with pytest.raises(CkpttoolError) as caught:
            rollout(Broken(), vector, episodes=4)
        golden(caught.value)

    def test_idle_rows_may_be_anything(self) -> None:
        class Odd(Linear):
            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                assert isinstance(obs, np.ndarray)
                idle = ~obs.any(axis=1, keepdims=True)
                return np.where(idle, np.float32(np.nan), np.float32(0)), state

        result = rollout(Odd(), GymVector(Countdown, 12), episodes=8)
        assert (len(result.returns), result.clipped) == (8, 0)

    def test_a_wrong_number_of_actions_says_both(self, golden: Golden) -> None:
        with pytest.raises(EnvironmentMismatchError) as caught:
            rollout(Linear(0, 0, actions=2), GymVector(Countdown, 3), episodes=1)
        golden(caught.value)

    @pytest.mark.parametrize(("episodes", "num_envs", "seed"), [(0, 1, 0), (-1, 1, 0), (1, 0, 0), (1, 1, -1)])
    def test_what_cannot_be_played_is_refused(
        self, episodes: int, num_envs: int, seed: int, golden: Golden
    ) -> None:
        with pytest.raises(UsageError) as caught:
            rollout(Linear(0, 0), GymVector(Countdown, num_envs), episodes=episodes, seed=seed)
        golden(caught.value)


class TestInterruption:
    @staticmethod
    def interrupt_after(steps: int) -> Linear:
        class Interrupted(Linear):
            left = steps

            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
                return super().step(obs, state)

        return Interrupted(0, 0)

    def test_finished_episodes_are_kept_and_marked(self) -> None:
        result = rollout(self.interrupt_after(6), GymVector(Countdown, 2), episodes=8)
        # Row 1 finished episodes 1 (1 step) and 2 (4 steps); episodes 0 and 3 were under way.
        assert (result.interrupted, result.episodes) == (True, 8)
        assert result.seeds.tolist() == [1, 2]
        assert result.lengths.tolist() == [1, 4]
        assert result.steps == 12

    def test_nothing_finished_is_an_interruption(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            rollout(self.interrupt_after(3), GymVector(Countdown), episodes=8)


def test_the_policy_gets_one_thread_while_environments_play() -> None:
    from contextlib import contextmanager

    class Limited(Linear):
        log: list[Any] = []  # noqa: RUF012

        @contextmanager
        def threads(self, count: int) -> Any:
            self.log.append(count)
            yield
            self.log.append("restored")

    rollout(Limited(0, 0), GymVector(Countdown), episodes=1)
    assert Limited.log == [1, "restored"]


class TestMake:
    def test_spec(self) -> None:
        with environments.make_vector_env("Pendulum-v1", 3) as vector:
            spec = vector.spec
            assert (spec.id, spec.obs_dim, spec.action_dim, spec.max_episode_steps) == (
                "Pendulum-v1",
                3,
                1,
                200,
            )
            assert (spec.action_low.tolist(), spec.action_high.tolist()) == ([-2], [2])
            assert list(spec.versions) == ["gymnasium"]
            assert vector.obs.shape == (3, 3)

    @needs_box2d
    def test_what_bindings_say_of_themselves_is_no_note(self) -> None:
        program = (
            "from ckpttool.evaluation import environments as envs\n"
            "with envs.make_vector_env('LunarLanderContinuous-v3') as e: print(e.notes)"
        )
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert ran.stdout == "()\n"

    def test_a_name_without_version_is_noted(self) -> None:
        with environments.make_vector_env("Pendulum") as vector:
            assert vector.spec.id == "Pendulum-v1"
            (note,) = vector.notes
        assert note.startswith("Using the latest versioned environment `Pendulum-v1`")

    @pytest.mark.parametrize(
        ("name", "near"),
        [("Pendulm-v1", "Pendulum-v1"), ("Pendulum-v7", "Pendulum-v1"), ("HalfCheetah-v2", "HalfCheetah-v4")],
    )
    def test_an_unknown_name_gets_a_near_one(self, name: str, near: str) -> None:
        with pytest.raises(UsageError, match=name) as caught:
            environments.make_vector_env(name)
        assert near in str(caught.value.hint)

    def test_other_spaces_are_refused(self) -> None:
        import gymnasium
        from gymnasium import spaces

        for space in (
            spaces.Text(4),
            spaces.Sequence(spaces.Discrete(3)),
            spaces.Tuple((spaces.Discrete(2), spaces.Text(3))),
            spaces.Dict({"text": spaces.Text(3)}),
            spaces.MultiDiscrete([[2, 3], [4, 5]]),
        ):
            env = gymnasium.make("Pendulum-v1").unwrapped
            env.observation_space = space
            with pytest.raises(UnsupportedError) as caught:
                GymVector(lambda env=env: env)  # type: ignore[misc]
            assert caught.value.found == str(space)

    def test_a_module_in_the_name_needs_trust(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        (tmp_path / "stranger_env.py").write_text("imported = True")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(UsageError) as caught:
            environments.make_vector_env("stranger_env:Pendulum-v1")
        golden(caught.value)
        assert "stranger_env" not in sys.modules
        with environments.make_vector_env("stranger_env:Pendulum-v1", trusted=True):
            assert sys.modules.pop("stranger_env").imported

    def test_arguments_need_trust(self) -> None:
        deep: Any = 1.0
        for _ in range(9):
            deep = [deep]
        refused: tuple[Any, ...] = ("file.xml", ["file.xml"], print, 10**9, [0.0] * 2_000, deep, {"a": 1})
        for value in refused:
            # A person who types the id has not typed the arguments.
            with pytest.raises(UsageError):
                environments.make_vector_env("Pendulum-v1", trusted=True, kwargs={"g": value})
        # Numbers name no file: those that a checkpoint's settings hold are used.
        with environments.make_vector_env("Pendulum-v1", kwargs={"g": 9.81}) as vector:
            assert vector.spec.obs_dim == 3
        with pytest.raises(UsageError, match="colour"):
            environments.make_vector_env("Pendulum-v1", trusted_arguments=True, kwargs={"colour": "red"})

    @pytest.mark.parametrize(
        "name", ["colour", "max_episode_steps", "render_mode", "vectorization_mode", "self"]
    )
    def test_a_file_names_arguments_of_the_signature_alone(self, name: str) -> None:
        with pytest.raises(UsageError) as caught:
            environments.make_vector_env("Pendulum-v1", kwargs={name: 1})
        assert name in caught.value.message

    def test_without_gymnasium_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
        with pytest.raises(MissingExtraError) as caught:
            environments.make_vector_env("HalfCheetah-v5")
        assert "ckpttool[eval]" in str(caught.value.hint)


class TestNoise:
    def test_draws_depend_on_the_seed_alone(self) -> None:
        noisy = [
            rollouts(
                PENDULUM,
                environments.make_vector_env("Pendulum-v1", n),
                RolloutSpec(4, 100, ExplorationNoise(0.3)),
            )[0]
            for n in (1, 3)
        ]
        assert noisy[0].returns.tolist() == noisy[1].returns.tolist()
        calm = rollout(PENDULUM, environments.make_vector_env("Pendulum-v1", 3), episodes=4, seed=100)
        assert (calm.returns != noisy[0].returns).all()

    def test_the_deviation_is_in_half_ranges_and_bounds_hold(self) -> None:
        vector = GymVector(lambda: Countdown(-4, 4))
        env = vector._envs[0]
        (rollout,) = rollouts(Linear(0, 0), vector, RolloutSpec(1, 0, ExplorationNoise(0.25)))
        draws = np.random.default_rng([0, 1]).standard_normal((7, 1))
        np.testing.assert_array_equal(np.stack(env.actions), np.clip(draws, -4, 4).astype(np.float32))
        assert rollout.clipped == 0

    @pytest.mark.parametrize("std", [0.0, -1.0, float("nan"), float("inf")])
    def test_no_deviation_is_refused(self, std: float, golden: Golden) -> None:
        with pytest.raises(UsageError) as caught:
            ExplorationNoise(std)
        golden(caught.value)

    def test_an_action_that_is_no_number_stays_an_error(self, golden: Golden) -> None:
        with pytest.raises(CkpttoolError) as caught:
            rollouts(Linear(np.nan, 0), GymVector(Countdown), RolloutSpec(1, 1, ExplorationNoise(0.1)))
        golden(caught.value)


class TestMembers:
    def test_each_block_of_rows_plays_all_episodes_for_its_member(self) -> None:
        class Two(Linear):
            def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
                actions, state = super().step(obs, state)
                actions[len(obs) // 2 :] *= 2
                return actions, state

        double = Linear(-2.0, 1.0, -0.8)
        both = rollouts(
            Two(-1.0, 0.5, -0.4),
            environments.make_vector_env("Pendulum-v1", 6),
            RolloutSpec(5, 100),
            members=2,
        )
        alone = [
            rollout(p, environments.make_vector_env("Pendulum-v1", 3), episodes=5, seed=100)
            for p in (PENDULUM, double)
        ]
        for result, expected in zip(both, alone, strict=True):
            assert outcomes(result) == outcomes(expected)
            assert (result.steps, result.num_envs) == (expected.steps, 3)
            assert result.seeds.tolist() == expected.seeds.tolist()

    def test_rows_that_cannot_be_divided_are_refused(self, golden: Golden) -> None:
        with pytest.raises(UsageError) as caught:
            rollouts(Linear(0, 0), GymVector(Countdown, 3), RolloutSpec(1), members=2)
        golden(caught.value)


def test_a_watcher_sees_every_step_of_every_episode() -> None:
    steps: dict[int, list[tuple[float, bool]]] = {}

    def watch(_row: int, number: int, reward: float, ended: bool) -> None:
        steps.setdefault(number, []).append((reward, ended))

    (rollout,) = rollouts(Linear(0, 0), GymVector(Countdown, 3), RolloutSpec(5, watch=watch))
    for number, length in enumerate(rollout.lengths.tolist()):
        assert [ended for _, ended in steps[number]] == [False] * length + [True]
        assert steps[number][-1][0] == rollout.returns[number]
