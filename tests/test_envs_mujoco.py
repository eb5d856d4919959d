"""The mujoco engine gives what Gymnasium gives: observations, rewards and ends, to the last bit."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import UnsupportedError, UsageError
from ckpttool.evaluation import environments, fast_engines
from ckpttool.evaluation.fast_engines import TaskRules
from ckpttool.evaluation.gymnasium_engine import VectorEnv
from tests.conftest import in_process
from tests.golden_texts import Golden

pytestmark = [
    pytest.mark.environment,
    pytest.mark.skipif(
        importlib.util.find_spec("gymnasium") is None or importlib.util.find_spec("mujoco") is None,
        reason="gymnasium[mujoco] is not installed",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("mujoco") is not None and importlib.util.find_spec("mujoco.batch") is None,
        reason="this MuJoCo has no batches",
    ),
]

NAMES = [
    *("HalfCheetah", "Hopper", "Walker2d", "Swimmer", "Ant", "Humanoid"),
    *("InvertedPendulum", "InvertedDoublePendulum", "Reacher", "Pusher"),
]
# Pusher-v4 does not run on MuJoCo 3 and later.
IDS = [f"{name}-v{version}" for name in NAMES for version in (4, 5) if (name, version) != ("Pusher", 4)]


def both(env_id: str, num_envs: int, threads: int | None = None, **kwargs: Any) -> list[VectorEnv]:
    """Return the engine's environments and Gymnasium's, of equal arguments."""
    return [
        environments.make_vector_env(
            env_id, num_envs, engine=engine, threads=threads, trusted_arguments=True, kwargs=kwargs
        )
        for engine in ("mujoco", "gymnasium")
    ]


def actions_for(vector: VectorEnv, rng: np.random.Generator) -> np.ndarray:
    spec = vector.spec
    shape = (vector.num_envs, spec.action_dim)
    return rng.uniform(spec.action_low, spec.action_high, shape).astype(np.float32)


def played(vector: VectorEnv, steps: int) -> dict[str, np.ndarray]:
    """Play random actions; return what was seen after each step, and before and after each reset.

    A row begins its next episode when its own is over, and the first a few times in its midst; one step in
    ten moves some of the rows only.
    """
    rng, rows = np.random.default_rng(1), np.arange(vector.num_envs)
    outcomes = np.zeros((steps, 3, len(rows)))
    observed = [np.array(vector.obs)]
    vector.reset(rows, rows)
    seed = len(rows)
    for number in range(steps):
        observed.append(np.array(vector.obs))
        actions = actions_for(vector, rng)
        moved = rows if number % 10 else np.flatnonzero(rng.random(len(rows)) < 0.5)
        rewards, terminated, truncated = vector.step(actions, moved)
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (np.float64, np.bool_, np.bool_)
        outcomes[number][:, moved] = rewards, terminated, truncated
        over = moved[terminated | truncated]
        if number in (3, 40, 41):
            over = np.union1d(over, [0])
        if len(over):
            observed.append(np.array(vector.obs))
            vector.reset(over, np.arange(seed, seed + len(over)))
            seed += len(over)
    rewards, terminated, truncated = outcomes.transpose(1, 0, 2)
    return {
        "rewards": rewards,
        "terminated": terminated,
        "truncated": truncated,
        "observations": np.array(observed),
    }


def compare(engine: VectorEnv, reference: VectorEnv, steps: int) -> dict[str, np.ndarray]:
    """Play both with equal actions, and return what both gave: equal bits if the engine found equal bits."""
    outcome, expected = played(engine, steps), played(reference, steps)
    assert engine.agreement is not None
    if engine.agreement.exact:
        for name, values in expected.items():
            np.testing.assert_array_equal(outcome[name], values, err_msg=name)
    else:
        # A few steps: physics turn a last bit into another trajectory.
        np.testing.assert_allclose(outcome["rewards"][:3], expected["rewards"][:3], rtol=1e-5, atol=1e-5)
    return outcome


# Their episodes may last for the 1,000 steps that Gymnasium allows; those of the others end long before.
LONG = ("HalfCheetah", "Swimmer", "Ant")


# Tasks of many bodies take seconds: their older versions are played at night.
SLOW = ("Ant-v4", "HalfCheetah-v4", "Humanoid-v4", "Walker2d-v4")
WHOLE = [pytest.param(env_id, marks=pytest.mark.slow) if env_id in SLOW else env_id for env_id in IDS]


class TestEveryTask:
    @pytest.mark.parametrize("env_id", WHOLE)
    def test_whole_episodes_from_four_seeds_are_gymnasiums(self, env_id: str) -> None:
        # Where nothing else ends them, one version's episodes are as long as Gymnasium has them.
        long, cut = env_id.startswith(LONG), {"max_episode_steps": 300}
        own_env, reference_env = both(env_id, 4, threads=2, **(cut if long and env_id.endswith("v4") else {}))
        with own_env, reference_env:
            assert (own_env.engine, reference_env.engine) == ("mujoco", "gymnasium")
            # One step in ten moves half of the rows.
            outcome = compare(own_env, reference_env, 1112 if long and env_id.endswith("v5") else 412)
            assert own_env.spec.versions == reference_env.spec.versions
        # Episodes came to their ends, and more than one way: none of these falls.
        never_fall = env_id.startswith(("HalfCheetah", "Swimmer", "Reacher", "Pusher"))
        assert outcome["terminated"].any() != never_fall
        assert outcome["truncated"].sum() >= 3 * never_fall

    def test_every_task_is_known(self) -> None:
        gymnasium = importlib.import_module("gymnasium")
        assert {gymnasium.spec(env_id).entry_point for env_id in IDS} == set(fast_engines.TASKS)


CHANGED = [
    ("HalfCheetah-v5", {"frame_skip": 2, "ctrl_cost_weight": 0.3, "max_episode_steps": 40}),
    ("HalfCheetah-v4", {"exclude_current_positions_from_observation": False, "reset_noise_scale": 0.3}),
    ("Hopper-v4", {"terminate_when_unhealthy": False, "healthy_reward": 2}),
    ("Hopper-v5", {"terminate_when_unhealthy": False, "healthy_state_range": (-3.0, 3.0)}),
    ("Walker2d-v5", {"terminate_when_unhealthy": False, "forward_reward_weight": 0}),
    ("Ant-v4", {"use_contact_forces": True}),
    ("Ant-v5", {"include_cfrc_ext_in_observation": False, "main_body": "front_left_leg"}),
    ("Ant-v5", {"terminate_when_unhealthy": False, "contact_force_range": (-0.3, 0.4)}),
    ("Humanoid-v5", {"include_cvel_in_observation": False, "include_cfrc_ext_in_observation": False}),
    ("Humanoid-v5", {"terminate_when_unhealthy": False, "contact_cost_range": (0.5, 0.6)}),
    ("Reacher-v5", {"reward_dist_weight": 3, "max_episode_steps": 7}),
]


@pytest.mark.parametrize(("env_id", "kwargs"), CHANGED, ids=lambda value: str(value)[:24])
def test_arguments_that_a_person_typed_are_kept(env_id: str, kwargs: dict[str, Any]) -> None:
    own_env, reference_env = both(env_id, 2, **kwargs)
    with own_env, reference_env:
        compare(own_env, reference_env, 120)


@pytest.mark.parametrize("env_id", ["InvertedDoublePendulum-v5", "Pusher-v5", "Ant-v5"])
def test_starts_depend_on_the_seed_alone(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Start states are drawn ahead and kept: neither what was drawn before nor what was dropped may matter.
    monkeypatch.setattr(fast_engines, "MOST_STARTS", 4)
    own_env, reference_env = both(env_id, 3)
    with own_env, reference_env:
        for rows, seeds in (
            ([0, 1, 2], [7, 2, 7]),
            ([1], [1 << 40]),
            ([0, 2], [3, 9]),
            ([0, 1, 2], [9, 8, 2]),
        ):
            for vector in (own_env, reference_env):
                vector.reset(np.array(rows), np.array(seeds))
            np.testing.assert_array_equal(np.array(own_env.obs), np.array(reference_env.obs))
            for vector in (own_env, reference_env):
                vector.step(np.full((3, vector.spec.action_dim), 0.5, np.float32), np.arange(3))
            np.testing.assert_array_equal(np.array(own_env.obs), np.array(reference_env.obs))


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "Ant-v5"])
def test_threads_change_nothing(env_id: str) -> None:
    kept = []
    for threads in (1, 2, 7):
        with environments.make_vector_env(env_id, 5, engine="mujoco", threads=threads) as vector:
            rng, rows = np.random.default_rng(3), np.arange(5)
            vector.reset(rows, rows)
            rewards = [vector.step(actions_for(vector, rng), rows)[0] for _ in range(60)]
            kept.append((np.array(rewards), np.array(vector.obs)))
    for rewards, obs in kept[1:]:
        np.testing.assert_array_equal(rewards, kept[0][0])
        np.testing.assert_array_equal(obs, kept[0][1])


def test_what_physics_says_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes a log of its own
    with environments.make_vector_env("Hopper-v5", 3, engine="mujoco", threads=2) as vector:
        rows = np.arange(3)
        vector.reset(rows, rows)
        assert not vector.notes
        vector.step(np.full((3, 3), np.nan, np.float32), rows)
        assert any("unstable" in note for note in vector.notes)


class TestWhoPlays:
    def test_the_engine_is_chosen_by_what_it_knows(self) -> None:
        for env_id, engine in {
            "Swimmer-v5": "mujoco",
            "Swimmer": "mujoco",
            "HumanoidStandup-v5": "gymnasium",
            "MountainCarContinuous-v0": "classic.batch",
        }.items():
            with environments.make_vector_env(env_id) as vector:
                assert vector.engine == engine, env_id

    def test_what_it_does_not_know_is_refused_in_a_sentence(self, golden: Golden) -> None:
        with pytest.raises(UsageError) as refused:
            environments.make_vector_env("Pendulum-v1", engine="mujoco")
        golden(refused.value)
        assert refused.value.hint is not None
        assert all(name in refused.value.hint for name in NAMES)
        with pytest.raises(UsageError) as caught:
            environments.make_vector_env("Ant-v5", engine="mujco")
        golden(caught.value)

    def test_a_subclass_is_not_the_class(self) -> None:
        gymnasium = importlib.import_module("gymnasium")
        swimmer = importlib.import_module("gymnasium.envs.mujoco.swimmer_v5")

        class MySwimmer(swimmer.SwimmerEnv):
            pass

        gymnasium.register("MySwimmer-v0", entry_point=MySwimmer, max_episode_steps=10)
        try:
            with environments.make_vector_env("MySwimmer-v0") as vector:
                assert vector.engine == "gymnasium"
        finally:
            del gymnasium.registry["MySwimmer-v0"]

    def test_an_older_mujoco_plays_as_gymnasium_does(
        self, monkeypatch: pytest.MonkeyPatch, golden: Golden
    ) -> None:
        monkeypatch.setitem(sys.modules, "mujoco.batch", None)
        with environments.make_vector_env("Reacher-v5") as vector:
            assert vector.engine == "gymnasium"
        with pytest.raises(UsageError) as caught:
            environments.make_vector_env("Reacher-v5", engine="mujoco")
        golden(caught.value)

    def test_another_gymnasium_is_noticed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry_point = "gymnasium.envs.mujoco.swimmer_v5:SwimmerEnv"
        crawl, _ = fast_engines.TASKS[entry_point]

        # As if a later version paid otherwise than the rules here say.
        def generous(env: Any, version: int) -> TaskRules:
            env._ctrl_cost_weight /= 2
            rules = crawl(env, version)
            env._ctrl_cost_weight *= 2
            return rules

        monkeypatch.setitem(fast_engines.TASKS, entry_point, (generous, 5))
        with environments.make_vector_env("Swimmer-v5") as vector:
            assert vector.engine == "gymnasium"
        with pytest.raises(UsageError) as refused:
            environments.make_vector_env("Swimmer-v5", engine="mujoco")
        assert refused.value.expected == "rewards within 1e-06"

    def test_rounding_is_no_other_gymnasium(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry_point = "gymnasium.envs.mujoco.swimmer_v5:SwimmerEnv"
        crawl, _ = fast_engines.TASKS[entry_point]

        # As if the processor or the C library ended its numbers with other bits.
        def rounded(env: Any, version: int) -> TaskRules:
            rules = crawl(env, version)
            return replace(rules, judge=lambda *args: (np.nextafter(rules.judge(*args)[0], 9), args[1] > 99))

        monkeypatch.setitem(fast_engines.TASKS, entry_point, (rounded, 5))
        for engine in ("auto", "mujoco"):
            with environments.make_vector_env("Swimmer-v5", engine=engine) as vector:
                assert vector.engine == "mujoco"
                assert vector.agreement is not None
                assert not vector.agreement.exact

    def test_pictures_are_gymnasiums(self, golden: Golden) -> None:
        own_env, reference_env = both("Reacher-v5", 1)
        with own_env, reference_env, pytest.raises(UnsupportedError) as caught:
            own_env.frame(0)
        golden(caught.value)

    def test_no_environment_plays_nothing(self, golden: Golden) -> None:
        with pytest.raises(UsageError) as caught:
            environments.make_vector_env("Reacher-v5", 0)
        golden(caught.value)

    def test_help_lists_the_engines(self) -> None:
        text = " ".join(in_process("eval", "--help").out.replace("│", " ").split())
        assert all(name in text for name in environments.ENGINES)
