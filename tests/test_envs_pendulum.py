"""Pendulum in arrays: Gymnasium's bits, whatever rows move, and no more than Pendulum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpttool.agents import envs
from ckpttool.agents.envs import pendulum_alone, pendulum_batch
from ckpttool.errors import MissingExtraError, UnsupportedError, UsageError

gymnasium = pytest.importorskip("gymnasium")
pytestmark = pytest.mark.environment

SEEDS = (0, 1, 1000, 2**32 - 1)


def test_it_is_taken_of_itself_where_nothing_else_is_asked() -> None:
    assert envs.make("Pendulum-v1", 2).engine == pendulum_batch.ENGINE
    assert envs.make("Pendulum-v1", 2, engine="gymnasium").engine == "gymnasium"
    assert envs.make("MountainCarContinuous-v0").engine == "gymnasium"
    with pytest.raises(UsageError, match="MountainCarContinuous-v0"):
        envs.make("MountainCarContinuous-v0", engine=pendulum_batch.ENGINE)


@pytest.mark.parametrize("kwargs", [{}, {"g": 9.81}])
def test_every_bit_is_gymnasiums(kwargs: dict[str, float]) -> None:
    """1,000 steps of each seed: five whole episodes, random torques, some beyond the bounds."""
    random = np.random.default_rng(0)
    rows = np.arange(len(SEEDS))
    with (
        envs.make("Pendulum-v1", 4, trusted=True, kwargs=kwargs, engine="gymnasium") as theirs,
        envs.make("Pendulum-v1", 4, trusted=True, kwargs=kwargs, engine=pendulum_batch.ENGINE) as ours,
    ):
        assert ours.spec.observation == theirs.spec.observation
        assert ours.spec.versions == theirs.spec.versions
        for episode in range(5):
            seeds = (np.array(SEEDS) + episode) % 2**32
            for env in (ours, theirs):
                env.reset(rows, seeds)
            for step in range(200):
                # Rows need not move together.
                moving = rows if step < 150 else rows[step % 2 :: 2]
                actions = random.uniform(-3, 3, (len(rows), 1)).astype(np.float32)
                found, expected = ours.step(actions, moving), theirs.step(actions, moving)
                for mine, its in zip(found, expected, strict=True):
                    assert mine.dtype == its.dtype
                    np.testing.assert_array_equal(mine, its)
                np.testing.assert_array_equal(np.asarray(ours.obs), np.asarray(theirs.obs))
            for env in (ours, theirs):
                ended = [env.step(actions, rows)[2].tolist() for _ in range(30)]
                assert ended[-1] == [True] * len(rows)


def test_another_pendulum_is_not_taken_for_this_one() -> None:
    def heavier() -> Any:
        made = gymnasium.make("Pendulum-v1", disable_env_checker=True)
        made.unwrapped.dynamics = made.unwrapped.step
        made.unwrapped.step = lambda action: made.unwrapped.dynamics(action * np.float32(0.999))
        return made

    with pytest.raises(UnsupportedError, match="computes otherwise"):
        pendulum_batch.PendulumBatch(heavier, 2)


def test_rows_of_one_seed_begin_alike_and_nothing_is_drawn() -> None:
    with envs.make("Pendulum-v1", 3, engine=pendulum_batch.ENGINE) as env:
        assert not np.any(env.obs)
        env.reset(np.array([0, 2]), np.array([7, 7]))
        obs = np.asarray(env.obs)
        np.testing.assert_array_equal(obs[0], obs[2])
        assert not obs[1].any()
        with pytest.raises(UnsupportedError, match="no picture"):
            env.frame(0)
    with pytest.raises(UsageError):
        pendulum_batch.PendulumBatch(lambda: None, 0)


def test_without_gymnasium_every_bit_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = envs.make("Pendulum-v1", len(SEEDS))
    monkeypatch.setattr(envs.registry, "installed", lambda: False)
    ours = envs.make("Pendulum-v1", len(SEEDS), obs_dim=3)
    assert ours.notes == (pendulum_alone.NOTE,)
    for field in (
        "id",
        "observation",
        "action_low",
        "action_high",
        "max_episode_steps",
        "render_fps",
        "arguments",
    ):
        assert getattr(ours.spec, field) == getattr(theirs.spec, field)
    rows, random = np.arange(len(SEEDS)), np.random.default_rng(0)
    for env in (ours, theirs):
        env.reset(rows, np.array(SEEDS))
    for _ in range(200):
        actions = random.uniform(-3, 3, (len(rows), 1)).astype(np.float32)
        found, expected = ours.step(actions, rows), theirs.step(actions, rows)
        assert all((mine == its).all() for mine, its in zip(found, expected, strict=True))
        np.testing.assert_array_equal(np.asarray(ours.obs), np.asarray(theirs.obs))
    assert found[2].all()
    for refused in ({"engine": "gymnasium"}, {"pictures": True}, {"kwargs": {"g": 9.81}, "trusted": True}):
        with pytest.raises(MissingExtraError, match="environments need gymnasium"):
            envs.make("Pendulum-v1", **refused)
