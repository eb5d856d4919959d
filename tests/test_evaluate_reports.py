"""What `eval` tells besides a mean: repeats, noise, algorithms compared, files, logged curves, bad input."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli import evaluate as cli
from ckpttool.commands.evaluate import evaluate
from ckpttool.commands.sweep import Sweep, sweep
from ckpttool.core import File
from ckpttool.encodings import protobuf
from ckpttool.evaluation.algorithms import summarize_runs
from ckpttool.evaluation.protocol import Evaluation, Protocol, TrainingRun
from ckpttool.evaluation.ranking import ScoredCheckpoint
from ckpttool.evaluation.score_tables import LENGTH, MEAN, STD
from ckpttool.evaluation.surroundings import hash_surroundings
from ckpttool.listing.training_runs import find_runs
from tests.conftest import SAMPLES, TORCH_SAMPLE, ckpttool, in_process, refused
from tests.golden_texts import Golden

pytestmark = pytest.mark.environment

RUN = SAMPLES / "td3_pendulum_torch"
TIMES = ("seconds", "steps_per_s")


@pytest.fixture(autouse=True, scope="module")
def _needs_gymnasium() -> None:
    pytest.importorskip("gymnasium")


@pytest.fixture(scope="module")
def one() -> Evaluation:
    return evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=2, num_envs=2))


def test_two_processes_give_the_same_document() -> None:
    first, second = (ckpttool("eval", TORCH_SAMPLE, "--episodes", 4, "--json").json() for _ in range(2))
    for document in (first, second):
        for name in TIMES:
            del document[name]
    assert first == second


def test_noise_repeats_and_is_said(golden: Golden) -> None:
    noisy = [evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=2, noise=0.2)) for _ in range(2)]
    plain = evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=2))
    np.testing.assert_array_equal(noisy[0].rollout.returns, noisy[1].rollout.returns, strict=True)
    assert (noisy[0].rollout.returns != plain.rollout.returns).any()
    assert noisy[0].document()["protocol"]["deterministic"] is False
    text = in_process("eval", TORCH_SAMPLE, "--episodes", 1, "--noise", 0.2).out
    golden("\n".join(line for line in text.splitlines() if line.startswith("seeds")))
    golden(refused(in_process("eval", TORCH_SAMPLE, "--noise", -1)))


def test_the_fingerprint_is_of_the_environment_alone(one: Evaluation) -> None:
    other = evaluate(str(RUN / "ckpt-2500.pt"), protocol=Protocol(episodes=1, seed=5))
    assert other.document()["fingerprint"] == one.document()["fingerprint"]
    facts = one.document()["environment"]
    assert facts["id"] == "Pendulum-v1"
    assert facts["max_episode_steps"] == 200
    assert facts["action"] == {"low": ["-2.0"], "high": ["2.0"]}
    assert {"gymnasium", "numpy"} <= set(facts["versions"])
    slower = evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=1, engine="gymnasium"))
    for changed in ({**facts, "max_episode_steps": 100}, {**facts, "arguments": {"g": "2.0"}}):
        assert hash_surroundings(changed) != hash_surroundings(facts)
    assert (slower.document()["fingerprint"] == hash_surroundings(facts)) == (facts["engine"] == "gymnasium")


def test_an_interval_says_what_it_is_over(one: Evaluation) -> None:
    assert one.document()["interval_over"] == "episodes"
    assert one.normalized is None
    assert one.document()["normalized"] is None


def test_algorithms_are_compared_and_files_written(tmp_path: Path) -> None:
    """Two runs beside two others: late checkpoints beside early ones."""
    late, early = [RUN / f"ckpt-{n}.pt" for n in (12500, 15000)], [RUN / f"ckpt-{n}.pt" for n in (2500, 5000)]
    others = [part for path in early for part in ("--against", path)]
    ran = in_process(
        "eval",
        *late,
        *others,
        *("--episodes", 2, "--json", "--min-return", -400),
        *("--csv", tmp_path / "episodes.csv", "--tensorboard", tmp_path / "tb"),
    )
    assert ran.status == 0, ran.err  # the two late ones: those of --against may be as bad as they are
    document: dict[str, Any] = ran.json()
    means = {Path(result["checkpoint"]).name: result["mean"] for result in document["evaluations"]}
    own_means = [means["ckpt-12500.pt"], means["ckpt-15000.pt"]]
    reference_means = [means["ckpt-2500.pt"], means["ckpt-5000.pt"]]
    assert [run["mean"] for run in document["runs"]["runs"]] == pytest.approx(own_means)
    assert document["runs"]["interval_over"] == "training seeds"
    assert document["runs"]["mean"]["value"] == pytest.approx(np.mean(own_means))
    assert document["against"]["mean"]["value"] == pytest.approx(np.mean(reference_means))
    compared = document["comparison"]
    assert compared["difference"]["value"] == pytest.approx(np.mean(own_means) - np.mean(reference_means))
    assert compared["probability_of_improvement"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    with (tmp_path / "episodes.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["return"]) for row in rows[:2]] == document["evaluations"][0]["returns"]
    assert {row["seed"] for row in rows} == {"1000", "1001"}
    path = document["tensorboard"]
    scalars = list(protobuf.iter_scalars(File.stamp(path), [MEAN, STD, LENGTH]))
    steps = {scalar.step: scalar.value for scalar in scalars if scalar.tag == MEAN}
    expected = {evaluation["step"]: evaluation["mean"] for evaluation in document["evaluations"]}
    assert steps == pytest.approx(expected, rel=1e-6)
    assert len(scalars) == 12


def test_people_read_the_comparison_and_runs_decide_the_status(golden: Golden) -> None:
    ran = in_process(
        *("eval", RUN, "--last", 2, "--against", RUN / "ckpt-2500.pt", "--against", RUN / "ckpt-5000.pt"),
        *("--episodes", 2, "--min-return", -1),
    )
    golden(refused(ran))
    ran = in_process("eval", RUN, "--last", 2, "--episodes", 2, "--min-return", -1)
    assert ran.status == 1
    golden("\n".join(re.findall(r"last 2 .*|\(bootstrap .*", ran.out)))
    assert "ckpt-2500" not in ran.out, "only the last ones are played"


def test_the_curve_needs_all_checkpoints_and_the_score_the_last(tmp_path: Path) -> None:
    ran = in_process(
        *("eval", RUN, "--curve", "--episodes", 2, "--json", "--min-return", -400),
        *("--plot", tmp_path / "a.svg"),
    )
    assert ran.status == 0, ran.err
    document = ran.json()
    assert [Path(saved).name for saved in document["runs"]["runs"][0]["checkpoints"]] == ["ckpt-15000.pt"]
    means = {evaluation["step"]: evaluation["mean"] for evaluation in document["evaluations"]}
    assert len(means) == 6
    curve = document["runs"]["curve"]
    assert [point["step"] for point in curve] == sorted(means)
    assert [point["score"]["value"] for point in curve] == pytest.approx(
        [means[step] for step in sorted(means)]
    )
    assert document["runs"]["mean"]["value"] == pytest.approx(means[max(means)])
    # The goal of Pendulum is the best published mean, -149; a random policy's return is measured.
    scores = document["runs"]["normalized"]
    assert scores["kind"] == "published"
    (ends,) = scores["references"]
    assert ends["one"] == -149
    share = (means[max(means)] - ends["zero"]) / (ends["one"] - ends["zero"])
    assert scores["mean"]["value"] == pytest.approx(share)
    profile = document["profiles"]
    assert profile["runs"]["share"][0] == 1
    assert profile["runs"]["share"][-1] == 0
    assert len(profile["thresholds"]) == len(profile["runs"]["low"])


def test_runs_without_a_common_scale_keep_their_results(one: Evaluation) -> None:
    scored = [
        ScoredCheckpoint(dataclasses.replace(one, checkpoint=name, env=name), None)
        for name in ("E-v1", "F-v1")
    ]
    runs = tuple(TrainingRun(name, (name,)) for name in ("E-v1", "F-v1"))
    result = Sweep(tuple(scored), (), (), (), None, None, ())
    compared = cli.ComparedRuns(("E-v1", "F-v1"), runs)
    printed = cli.report_comparison(compared, cli.OutputOptions(), result)
    assert [error.kind for error in printed.failures] == ["usage"]
    assert (printed.document, printed.algorithms, printed.mean) == ({}, (), None)


def test_one_mean_below_the_least_decides_the_status() -> None:
    paths = [RUN / "ckpt-2500.pt", RUN / "ckpt-15000.pt"]
    assert in_process("eval", *paths, "--episodes", 1, "--min-return", -400).status == 1


def test_the_last_checkpoints_are_averaged() -> None:
    results = sweep([str(RUN)], protocol=Protocol(episodes=2))
    run = summarize_runs(find_runs([str(RUN)], 3), results.scored, 3)
    assert run is not None
    last = sorted(results.scored, key=lambda checkpoint: checkpoint.step or 0)[-3:]
    assert [checkpoint.step for checkpoint in run.runs[0].scored] == [checkpoint.step for checkpoint in last]
    assert run.mean.value == pytest.approx(np.mean([saved.evaluation.statistics.mean for saved in last]))


def test_logged_curves_are_found_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "a.pt").write_bytes(TORCH_SAMPLE.read_bytes())
    records = [protobuf.summary_record(0, step, {"charts/episodic_return": -step}) for step in (1, 2)]
    log = tmp_path / "run" / f"{protobuf.NAME}1.host"
    log.write_bytes(protobuf.event_file_header(0) + b"".join(records) + b"torn")
    ran = in_process("eval", folder / "a.pt", "--env", "Pendulum-v1", "--episodes", 1, "--json")
    (curve,) = ran.json()["training_curves"]
    assert curve == {
        "files": [str(log)],
        "tag": "charts/episodic_return",
        "of": "training",
        "logged": 2,
        "steps": [1, 2],
        "values": [-1.0, -2.0],
    }


def poisoned(target: Path) -> Path:
    """Write the sample with one weight of its actor that is no number."""
    import torch

    state = torch.load(TORCH_SAMPLE, weights_only=True)
    next(iter(state["actor"].values()))[0, 0] = float("nan")
    torch.save(state, target)
    return target


@pytest.mark.torch
def test_actions_that_are_no_numbers_stop_with_a_place(tmp_path: Path, golden: Golden) -> None:
    pytest.importorskip("torch")
    path = poisoned(tmp_path / "nan.pt")
    golden(refused(in_process("eval", path, "--env", "Pendulum-v1", "--episodes", 2)))


def test_what_cannot_be_written_is_said_before_playing(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "have.csv").write_text("mine")
    many = ("--episodes", 100_000_000)
    ran = in_process("eval", TORCH_SAMPLE, *many, "--csv", tmp_path / "have.csv")
    golden(refused(ran))
    assert (tmp_path / "have.csv").read_text() == "mine"


@pytest.mark.corpus
def test_scores_are_normalised_where_a_reference_is_known(corpus: Path) -> None:
    prefix = str(corpus / "torch/fujimoto/bmcnns/models/TD3_HalfCheetah-v3_0")
    ran = in_process("eval", prefix, "--env", "HalfCheetah-v5", "--episodes", 1, "--json")
    document = ran.json()
    score = document["normalized"]
    assert score["measured_in"] == "HalfCheetah-v2"
    assert score["mean"] == pytest.approx(100 * (document["mean"] + 280.178953) / (12135.0 + 280.178953))
    assert score["source"].startswith("D4RL")
