"""Normalised scores: D4RL's pairs, and nothing for environments that it has none for."""

from __future__ import annotations

import pytest

from ckpttool.evaluation.statistics import find_reference_scores


@pytest.mark.parametrize(
    ("env", "value", "expected"),
    [
        ("HalfCheetah-v5", -280.178953, 0),
        ("HalfCheetah-v4", 12135.0, 100),
        ("Hopper-v5", (3234.3 - 20.272305) / 2, 50),
        ("Walker2d-v4", 2 * 4592.3 - 1.629008, 200),
        ("Ant-v5", -325.6 - 4205.3, -100),
    ],
)
def test_random_is_nought_and_the_expert_a_hundred(env: str, value: float, expected: float) -> None:
    scores = find_reference_scores(env)
    assert scores is not None
    assert scores.normalized(value) == pytest.approx(expected)
    assert scores.env.endswith("-v2")


@pytest.mark.parametrize(
    "env", ["Pendulum-v1", "Humanoid-v5", "HalfCheetah", "mine:Ant-v5", "AntMaze_UMaze-v5"]
)
def test_nothing_is_invented(env: str) -> None:
    assert find_reference_scores(env) is None
