"""The verdict of `eval`: a mean beside random, the reward threshold and published means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.evaluation import environments
from ckpttool.evaluation.statistics import ReturnStatistics, judge_return, summarize
from tests.conftest import ROOT, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden

TABLE = json.loads((ROOT / "ckpttool/evaluation/reference_returns.json").read_text())
PLAIN: dict[str, Any] = {"arguments": {}}


def around(mean: float, half: float = 1.0, n: int = 20) -> ReturnStatistics:
    """Return statistics of n episodes with this mean, half above and half below it."""
    return summarize([mean + half * (-1) ** number for number in range(n)])


@pytest.mark.parametrize(
    ("env", "mean", "half", "verdict", "certain"),
    [
        ("HalfCheetah-v5", 9000.0, 10.0, "solved", True),
        ("HalfCheetah-v5", 4801.0, 500.0, "solved", False),
        ("HalfCheetah-v5", 2000.0, 10.0, "between", True),
        ("HalfCheetah-v5", -280.0, 50.0, "random", True),
        ("HalfCheetah-v5", -900.0, 10.0, "worse", True),
        ("Pendulum-v1", -140.0, 5.0, "published", True),
        ("Pendulum-v1", -160.0, 90.0, "published", False),
        ("Pendulum-v1", -600.0, 20.0, "between", True),
        ("HumanoidStandup-v5", 90000.0, 9.0, "better", True),
    ],
)
def test_verdicts(env: str, mean: float, half: float, verdict: str, certain: bool, golden: Golden) -> None:
    judgement = judge_return(env, around(mean, half), PLAIN)
    assert judgement is not None
    assert (judgement.verdict, judgement.certain) == (verdict, certain)
    golden(judgement.sentence)


def test_the_fraction_lies_between_random_and_the_goal() -> None:
    random, goal = TABLE["random"]["HalfCheetah-v5"]["mean"], TABLE["thresholds"]["HalfCheetah-v5"]
    judgement = judge_return("HalfCheetah-v5", around(random + 0.63 * (goal - random)), PLAIN)
    assert judgement is not None
    assert judgement.fraction == pytest.approx(0.63)


def test_an_infinite_mean_has_no_verdict() -> None:
    for value in (float("inf"), float("nan")):
        statistics = replace(around(0.0), mean=value)
        assert judge_return("Pendulum-v1", statistics, PLAIN) is None


def test_one_episode_has_no_verdict() -> None:
    judgement = judge_return("Pendulum-v1", summarize([-150.0]), PLAIN)
    assert judgement is not None
    assert (judgement.verdict, judgement.certain) == ("uncertain", None)


def test_without_a_random_return_the_threshold_counts() -> None:
    for mean, verdict in ((310.0, "solved"), (100.0, "below")):
        judgement = judge_return("Mine-v0", around(mean), PLAIN, 300.0)
        assert judgement is not None
        assert (judgement.verdict, judgement.random, judgement.fraction) == (verdict, None, None)


@pytest.mark.parametrize(
    ("env", "surroundings"),
    [
        ("Mine-v0", PLAIN),
        ("mine:Pendulum-v1", PLAIN),
        ("Pendulum-v1", {"arguments": {"g": "9.81"}}),
        ("Pendulum-v1", {"arguments": {}, "max_episode_steps": 100}),
        ("Ant-v4", {"arguments": {"use_contact_forces": "True"}}),
    ],
)
def test_other_rewards_have_no_references(env: str, surroundings: dict[str, Any]) -> None:
    assert judge_return(env, around(0.0), surroundings) is None


def test_arguments_of_the_observations_do_not_matter() -> None:
    args = {"exclude_current_positions_from_observation": "False", "wrappers": "TimeFeatureWrapper"}
    assert judge_return("Hopper-v5", around(0.0), {"arguments": args, "max_episode_steps": 1000}) is not None


def test_the_table_states_how_it_was_measured() -> None:
    for row in TABLE["random"].values():
        assert row["ci95"][0] < row["mean"] < row["ci95"][1]
        assert row["episodes"] == row["seeds"][1] - row["seeds"][0] + 1 >= 100
        assert {"ckpttool", "gymnasium", "numpy"} <= set(row["versions"])
    assert all(row["episodes"] > 1 and row["source"] for row in TABLE["published"])


def test_the_stored_thresholds_are_those_of_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    for env in TABLE["random"]:
        assert environments.find_reward_threshold(env) == TABLE["thresholds"].get(env), env


def test_eval_prints_and_records_the_verdict(golden: Golden) -> None:
    pytest.importorskip("gymnasium")
    ran = in_process("eval", str(TORCH_SAMPLE), "--env", "Pendulum-v1", "--episodes", "8", "--json")
    judged = json.loads(ran.out)["judgement"]
    assert judged["verdict"] in ("published", "between")
    assert judged["random"]["mean"] == TABLE["random"]["Pendulum-v1"]["mean"]
    assert judged["goal"]["kind"] == "published"
    lines = in_process("eval", str(TORCH_SAMPLE), "--env", "Pendulum-v1", "--episodes", "8").out.splitlines()
    golden("\n".join(line for line in lines if line.startswith(("random", "goal", "verdict"))))


def test_a_size_offers_ready_commands(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    sizes = (("0", 17, 32), ("2", 32, 32), ("4", 32, 6))
    state = {}
    for name, rows, columns in sizes:
        state |= {f"{name}.weight": torch.ones(columns, rows), f"{name}.bias": torch.ones(columns)}
    torch.save(state, tmp_path / "agent.pt")
    ran = in_process("eval", str(tmp_path / "agent.pt"), "--activation", "relu", "--head", "tanh")
    assert ran.status == 2
    golden(ran.err)
