"""Training runs scored by their last checkpoints, two algorithms compared, and scores as files."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import File, TargetExistsError, UsageError
from ckpttool.encodings import protobuf
from ckpttool.evaluation import algorithms, ranking, score_tables
from ckpttool.evaluation.algorithms import compare_algorithms, summarize_runs
from ckpttool.evaluation.protocol import Evaluation, Protocol, TrainingRun
from ckpttool.evaluation.ranking import ScoredCheckpoint
from ckpttool.evaluation.rollout import Rollout
from ckpttool.evaluation.statistics import Estimate, paired_interval, summarize
from ckpttool.listing.training_runs import find_runs
from tests.conftest import TORCH_SAMPLE
from tests.golden_texts import Golden


def played(
    checkpoint: str,
    returns: list[float],
    step: int | None = None,
    *,
    seeds: list[int] | None = None,
    env: str = "E-v1",
) -> ScoredCheckpoint:
    n = len(returns)
    numbers = np.array(seeds or range(10, 10 + n), np.int64)
    flags = np.zeros(n, np.bool_)
    rollout = Rollout(
        np.array(returns, np.float64), np.full(n, 7), flags, ~flags, numbers, n, n, 7 * n, 1.0, 0
    )
    record = Evaluation(checkpoint, env, Protocol(n), "cpu", {}, rollout, summarize(returns), (), ())
    return ScoredCheckpoint(record, step)


def test_a_run_is_the_mean_of_its_last_checkpoints() -> None:
    scored = [played("run/a", [1, 2, 3], 1), played("run/b", [5, 6, 10], 2)]
    summary = summarize_runs([TrainingRun("run", ("run/a", "run/b"))], scored, 2)
    assert summary is not None
    assert summary.over == "episodes"
    assert summary.runs[0].returns.tolist() == [3, 4, 6.5]
    assert summary.mean.value == pytest.approx(4.5)
    assert summary.mean.ci95 is not None
    assert summary.document()["runs"][0] == {
        "path": "run",
        "checkpoints": ["run/a", "run/b"],
        "steps": [1, 2],
        "mean": pytest.approx(4.5),
    }


def test_only_seeds_that_all_have_finished_count() -> None:
    scored = [played("a", [1, 2, 3]), played("b", [6, 7], seeds=[11, 12])]
    summary = summarize_runs([TrainingRun("run", ("a", "b"))], scored, 2)
    assert summary is not None
    assert summary.runs[0].returns.tolist() == [4, 5]


def test_several_runs_are_resampled_as_runs(golden: Golden) -> None:
    scored = [played(name, [value] * 3) for name, value in {"a": 1.0, "b": 3.0, "c": 8.0}.items()]
    summary = summarize_runs([TrainingRun(name, (name,)) for name in "abc"], scored, 1)
    assert summary is not None
    assert (summary.over, summary.mean.value) == ("training seeds", 4.0)
    # The chance of a resample of one run alone is 1/27 on each side: more than 2.5 %.
    assert summary.mean.ci95 == (1.0, 8.0)
    golden("\n".join(summary.notes))


def test_a_run_that_was_not_played_whole_is_left_out_and_said(golden: Golden) -> None:
    summary = summarize_runs(
        [TrainingRun("one", ("a",)), TrainingRun("two", ("b", "c"))], [played("a", [1]), played("b", [2])], 2
    )
    assert summary is not None
    assert [run.path for run in summary.runs] == ["one"]
    golden("\n".join(summary.notes))
    assert summarize_runs([TrainingRun("two", ("b", "c"))], [played("b", [2])], 2) is None


def test_a_single_run_against_several_has_its_score() -> None:
    """The IQM of its episodes would be another quantity than the IQM of the others' scores."""
    skewed = [-100.0, -100.0, -100.0, -900.0]
    scored = [played("a", skewed, 1), played("b", [5.0, 6.0], 1), played("a0", [0.0, 2.0], 0)]
    run = [TrainingRun("a", ("a",), ("a0",))]
    alone = summarize_runs(run, scored, 1)
    among = summarize_runs(run, scored, 1, over_runs=True)
    assert alone is not None
    assert among is not None
    assert (alone.over, alone.iqm.value) == ("episodes", -100.0)
    assert (among.over, among.mean, among.iqm) == (
        "training seeds",
        Estimate(-300, None),
        Estimate(-300, None),
    )
    assert [point.iqm.value for point in algorithms.curve_over_steps(among)] == [1.0, -300.0]
    assert [point.iqm.value for point in algorithms.curve_over_steps(alone)] == [1.0, -100.0]
    assert len(among.notes) == len(alone.notes) + 1


def test_other_time_limits_of_one_environment_are_named() -> None:
    scored = [played("a", [1.0, 2.0]), played("b", [3.0, 4.0])]
    limits: list[dict[str, object]] = [
        {"max_episode_steps": 200, "arguments": {}},
        {"max_episode_steps": 100},
    ]
    others = [
        replace(checkpoint, evaluation=replace(checkpoint.evaluation, surroundings=facts))
        for checkpoint, facts in zip(scored, limits, strict=True)
    ]
    runs = [TrainingRun(name, (name,)) for name in "ab"]
    alike, unlike = (summarize_runs(runs, checkpoints, 1) for checkpoints in (scored, others))
    assert alike is not None
    assert unlike is not None
    (note,) = set(unlike.notes) - set(alike.notes)
    assert "100, 200" in note
    assert [*algorithms.surroundings_notes(unlike.runs[:1])] == []


def test_a_nan_is_never_the_best() -> None:
    scored = [
        played("broken", [np.nan, 9.0], 1),
        played("poor", [1.0, 2.0], 2),
        played("good", [3.0, 4.0], 3),
    ]
    places = ranking.rank_checkpoints(scored)
    assert [row.checkpoint for row in places] == ["good", "poor", "broken"]
    best = ranking.find_best(places)
    assert best is not None
    # Without a mean of its own, the broken one may be as good.
    assert (best.checkpoint, best.certain) == ("good", False)
    assert ranking.find_best(ranking.rank_checkpoints(scored[:1] * 2)) is None


def test_profiles_of_undefined_scores_have_finite_thresholds() -> None:
    runs = [
        summarize_runs([TrainingRun("a", ("a",))], [played("a", [1.0, value])], 1) for value in (2, np.nan)
    ]
    profiles = algorithms.performance_profiles([run for run in runs if run is not None])
    assert all(np.isfinite(profile.thresholds).all() for profile in profiles)
    assert np.isnan(profiles[1].share).all()
    assert not np.isnan(profiles[0].share).any()


def both(a: dict[str, list[float]], b: dict[str, list[float]]) -> algorithms.AlgorithmComparison:
    scored = [played(name, returns) for name, returns in {**a, **b}.items()]
    one = summarize_runs([TrainingRun(name, (name,)) for name in a], scored, 1)
    two = summarize_runs([TrainingRun(name, (name,)) for name in b], scored, 1)
    assert one is not None
    assert two is not None
    return compare_algorithms(one, two)


def test_checkpoints_of_one_run_are_not_taken_for_several_in_silence(golden: Golden) -> None:
    scored = [played("run/a-1", [1], 1), played("run/a-2", [2], 2), played("run/b", [2])]
    summary = summarize_runs(
        [TrainingRun(one.evaluation.checkpoint, (one.evaluation.checkpoint,)) for one in scored], scored, 1
    )
    assert summary is not None
    golden(summary.notes[0])


def curves(*runs: dict[int, float]) -> tuple[algorithms.AlgorithmCurvePoint, ...]:
    """Return the curve of runs with a score at each step."""
    names = {
        f"{number}/{step}": (step, score) for number, run in enumerate(runs) for step, score in run.items()
    }
    scored = [played(name, [score], step) for name, (step, score) in names.items()]
    paths = [TrainingRun(str(n), tuple(f"{n}/{step}" for step in run)) for n, run in enumerate(runs)]
    summary = summarize_runs(paths, scored, len(runs[0]))
    assert summary is not None
    return algorithms.curve_over_steps(summary)


def test_runs_are_averaged_at_equal_steps() -> None:
    points = curves({100: 0.0, 200: 10.0, 400: 30.0}, {150: 100.0, 200: 200.0, 300: 300.0})
    assert [(point.step, point.score.value) for point in points] == [
        (150, (5 + 100) / 2),
        (200, (10 + 200) / 2),
        (300, (20 + 300) / 2),
    ]
    assert all(point.score.ci95 is not None for point in points)
    # One curve that lies above the other at every step does so in the mean, wherever the checkpoints are.
    assert curves({100: 1.0, 200: 2.0}, {300: 3.0, 400: 4.0}) == ()
    assert [point.step for point in curves({100: 1.0, 200: 2.0})] == [100, 200]


def test_two_runs_are_compared_by_their_episodes() -> None:
    comparison = both({"a": [4, 5, 9]}, {"b": [1, 5, 2]})
    assert comparison.over == "episodes"
    assert comparison.difference == paired_interval([4, 5, 9], [1, 5, 2])
    assert comparison.probability.value == pytest.approx(7.5 / 9)


def test_algorithms_are_compared_by_their_runs() -> None:
    comparison = both({"a": [9, 11], "b": [20, 20]}, {"c": [1, 3], "d": [2, 2]})
    assert comparison.over == "training seeds"
    assert comparison.difference.value == 13
    assert comparison.difference.ci95 == (8, 18)
    assert comparison.probability == Estimate(1.0, (1.0, 1.0))
    assert both({"a": [9]}, {"c": [1], "d": [2]}).difference == Estimate(7.5, None)


def several(scores: dict[str, list[float]], name: str = "a") -> algorithms.Algorithm:
    """Return an algorithm with a run per score in each environment."""
    runs = {
        f"{name}/{env}/{n}": (env, value) for env, values in scores.items() for n, value in enumerate(values)
    }
    scored = [played(path, [value] * 2, env=env) for path, (env, value) in runs.items()]
    algorithm = summarize_runs([TrainingRun(path, (path,)) for path in runs], scored, 1)
    assert algorithm is not None
    return algorithm


def test_runs_of_several_environments_are_normalised() -> None:
    # D4RL's pairs: random -20.27 and expert 3234.3 in Hopper, 1.63 and 4592.3 in Walker2d.
    ends = {"Hopper-v5": (-20.272305, 3234.3), "Walker2d-v5": (1.629008, 4592.3)}
    shares = {"Hopper-v5": [0.0, 0.5, 1.0], "Walker2d-v5": [1.0, 1.2, 0.8]}
    scores = {env: [low + share * (high - low) for share in shares[env]] for env, (low, high) in ends.items()}
    algorithm = several(scores)
    assert algorithm.normalized is not None
    assert algorithm.normalized.scale.kind == "D4RL"
    values = {name: aggregate.value for name, aggregate in algorithm.normalized.aggregates.items()}
    assert values == pytest.approx(
        {"mean": 0.75, "median": 0.75, "iqm": (0.5 + 0.8 + 1 + 1) / 4, "optimality_gap": 1 - 4.3 / 6}
    )
    assert (algorithm.mean, algorithm.iqm) == (
        algorithm.normalized.aggregates["mean"],
        algorithm.normalized.aggregates["iqm"],
    )
    document = algorithm.document()
    assert document["unit"] == "normalised score"
    assert document["environments"] == ["Hopper-v5", "Walker2d-v5"]
    assert document["normalized"]["references"][1] == {"env": "Walker2d-v5", "zero": 1.629008, "one": 4592.3}
    worse = several({env: [value - 3000 for value in values] for env, values in scores.items()}, "b")
    compared = compare_algorithms(algorithm, worse)
    lost = np.mean([3000 / (high - low) for low, high in ends.values()])
    assert compared.difference.value == pytest.approx(lost)
    # In Hopper the worst run, 0, does not beat 1 - 3000 / 3254.6; in Walker2d all pairs are won.
    assert compared.probability.value == pytest.approx((8 / 9 + 1) / 2)


def test_one_environment_keeps_its_returns() -> None:
    algorithm = several({"Swimmer-v5": [100.0, 200.0, 300.0]})
    assert (algorithm.mean.value, algorithm.document()["unit"], algorithm.scale) == (200.0, "return", None)
    # Gymnasium's reward threshold is 360; a random policy's return is measured.
    assert algorithm.normalized is not None
    assert algorithm.normalized.scale.kind == "threshold"
    zero, one = algorithm.normalized.scale.ends["Swimmer-v5"]
    assert (one, zero) == (360, pytest.approx(0, abs=1))
    assert algorithm.normalized.aggregates["mean"].value == pytest.approx((200 - zero) / (one - zero))
    assert several({"E-v1": [1.0, 2.0]}).normalized is None


def test_environments_without_references_are_not_averaged(golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        several({"Hopper-v5": [1.0, 2.0], "E-v1": [1.0, 2.0]})
    golden(caught.value)
    mixed = [played("run/a", [1.0], 1), played("run/b", [1.0], 2, env="F-v1")]
    with pytest.raises(UsageError) as caught:
        summarize_runs([TrainingRun("run", ("run/a", "run/b"))], mixed, 2)
    golden(caught.value)


def test_profiles_share_the_thresholds_at_which_they_change() -> None:
    one, two = several({"E-v1": [1.0, 2.0, 4.0]}), several({"E-v1": [2.0, 8.0]}, "b")
    first, second = algorithms.performance_profiles((one, two))
    assert first.thresholds.tolist() == pytest.approx([0.65, 1, 2, 4, 8, 8.35])
    assert first.share.tolist() == pytest.approx([1, 2 / 3, 1 / 3, 0, 0, 0])
    assert second.share.tolist() == pytest.approx([1, 1, 0.5, 0.5, 0, 0])


def test_the_curve_includes_earlier_checkpoints(tmp_path: Path) -> None:
    names = [tmp_path / f"a-{step}.pt" for step in (1, 2, 3)]
    for name in names:
        name.write_bytes(TORCH_SAMPLE.read_bytes())
    (run,) = find_runs([str(tmp_path)], 1, curve=True)
    assert run.checkpoints == (str(names[2]),)
    assert run.earlier == tuple(map(str, names[:2]))
    scored = [played(str(name), [float(step)] * 3, step) for step, name in zip((1, 2, 3), names, strict=True)]
    result = summarize_runs([run], scored, 1)
    assert result is not None
    assert result.mean.value == 3.0, "only the last one is scored"
    points = algorithms.curve_over_steps(result)
    assert [(point.step, point.score.value, point.iqm.value) for point in points] == [
        (1, 1, 1),
        (2, 2, 2),
        (3, 3, 3),
    ]


def test_other_environments_are_not_compared(golden: Golden) -> None:
    scored = [played("a", [1]), played("b", [2], env="F-v1")]
    one, two = (summarize_runs([TrainingRun(name, (name,))], scored, 1) for name in "ab")
    assert one is not None
    assert two is not None
    with pytest.raises(UsageError) as caught:
        compare_algorithms(one, two)
    golden(caught.value)


def test_a_folder_is_one_run_and_gives_its_last(golden: Golden) -> None:
    (run,) = find_runs([str(TORCH_SAMPLE.parent)], 2)
    assert [Path(path).name for path in run.checkpoints] == ["ckpt-12500.pt", "ckpt-15000.pt"]
    with pytest.raises(UsageError) as caught:
        find_runs([str(TORCH_SAMPLE)], 2)
    golden(caught.value)


def test_what_holds_no_agent_is_no_checkpoint_of_a_run(tmp_path: Path) -> None:
    for name in ("a-1.pt", "a-2.pt"):
        (tmp_path / name).write_bytes(TORCH_SAMPLE.read_bytes())
    np.savez(tmp_path / "buffer_3.npz", observations=np.zeros((5, 3)))
    (run,) = find_runs([str(tmp_path)], 2)
    assert [Path(path).name for path in run.checkpoints] == ["a-1.pt", "a-2.pt"]
    # What a shell makes of a pattern: a receipt is nothing, the same file twice is one run.
    (tmp_path / "a-1.pt.ckpttool.json").write_text("{}")
    names = ["a-1.pt", "a-1.pt.ckpttool.json", "a-2.pt", "a-1.pt"]
    assert len(find_runs([str(tmp_path / name) for name in names], 1)) == 2


def test_the_table_has_a_line_per_episode(tmp_path: Path) -> None:
    scored = [played("x, y.pt", [0.1 + 0.2, -1.5], 500), played("b", [3])]
    path = tmp_path / "episodes.csv"
    score_tables.save_table(str(path), scored)
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    assert list(rows[0]) == list(score_tables.COLUMNS)
    assert [float(row["return"]) for row in rows] == [0.1 + 0.2, -1.5, 3]
    assert rows[0] == {
        "checkpoint": "x, y.pt",
        "step": "500",
        "env": "E-v1",
        "seed": "10",
        "return": "0.30000000000000004",
        "length": "7",
        "terminated": "0",
        "truncated": "1",
    }
    assert rows[2]["step"] == ""
    with pytest.raises(TargetExistsError):
        score_tables.save_table(str(path), scored)


def test_scalars_are_at_the_training_steps(tmp_path: Path) -> None:
    scored = [played("a", [1, 3], 500), played("b", [5, 5], 1000), played("c", [2], 1500)]
    path = score_tables.save_scalars(str(tmp_path / "tb"), scored, 12.0)
    tags = (score_tables.MEAN, score_tables.STD, score_tables.LENGTH)
    scalars = {(s.tag, s.step): s.value for s in protobuf.iter_scalars(File.stamp(path), tags)}
    assert scalars == {
        ("eval/return_mean", 500): 2,
        ("eval/return_std", 500): pytest.approx(2**0.5),
        ("eval/length_mean", 500): 7,
        ("eval/return_mean", 1000): 5,
        ("eval/return_std", 1000): 0,
        ("eval/length_mean", 1000): 7,
        ("eval/return_mean", 1500): 2,
        ("eval/length_mean", 1500): 7,
    }


def test_without_steps_checkpoints_are_counted(tmp_path: Path) -> None:
    path = score_tables.save_scalars(str(tmp_path), [played("a", [1], 500), played("b", [5])], 12.0)
    steps = [s.step for s in protobuf.iter_scalars(File.stamp(path), [score_tables.MEAN])]
    assert steps == [0, 1]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError) as caught:
        score_tables.require_folder(str(tmp_path / "file" / "tb"))
    golden(caught.value)
