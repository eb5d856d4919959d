"""`eval` of many checkpoints: what paths mean, equal results wherever they are played, and nothing lost."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli import evaluate as scores
from ckpttool.commands.evaluate import evaluate
from ckpttool.commands.sweep import Sweep, sweep
from ckpttool.core import (
    ChecksumError,
    FormatError,
    NotACheckpointError,
    NotFoundError,
    TargetExistsError,
    UsageError,
    WorkerError,
)
from ckpttool.core.atomic_write import Progress
from ckpttool.evaluation import ranking, results_file, scheduling
from ckpttool.evaluation.protocol import Evaluation, Protocol
from ckpttool.evaluation.scheduling import BatchResult, EvaluationBatch
from ckpttool.evaluation.statistics import paired_interval
from ckpttool.listing import training_counters
from ckpttool.listing.paths import expand_paths
from tests import schemas
from tests.conftest import ROOT, SAMPLES, TF_SAMPLE, TORCH_SAMPLE, Terminal, ckpttool, in_process, refused
from tests.golden_texts import Golden
from tests.refusals import commands_of, hints_of

pytestmark = pytest.mark.environment

RUN = SAMPLES / "td3_pendulum_torch"
STEPS = (2500, 5000, 7500, 10000, 12500, 15000)
SHORT = Protocol(episodes=3)


@pytest.fixture(autouse=True, scope="module")
def _needs_gymnasium() -> None:
    pytest.importorskip("gymnasium")


@pytest.fixture(scope="module")
def whole() -> Sweep:
    return sweep([str(RUN)], protocol=SHORT)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups be of two, so that a few checkpoints make several."""
    monkeypatch.setattr(scheduling, "MEMBERS", 2)


def returns(result: Sweep) -> dict[str, list[float]]:
    return {os.path.basename(e.checkpoint): e.rollout.returns.tolist() for e in result.evaluations}


def require_alike(actual: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    """Compare returns: another size of group rounds otherwise, and physics amplify that."""
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=0.01)


def names(paths: Iterable[object]) -> list[str]:
    return [os.path.basename(path.path) for path in expand_paths([str(path) for path in paths])]


# What paths stand for.

CHECKPOINTS = [f"ckpt-{step}" for step in STEPS]


def test_one_path_is_a_list_of_one() -> None:
    one, listed = (sweep(paths, protocol=SHORT) for paths in (str(RUN), [str(RUN)]))
    assert [run.checkpoint for run in one.evaluations] == [result.checkpoint for result in listed.evaluations]
    assert one.evaluations


def test_a_folder_stands_for_its_checkpoints_in_their_order() -> None:
    assert names([TF_SAMPLE.parent]) == CHECKPOINTS
    assert names([f"{RUN}/"]) == [f"{name}.pt" for name in CHECKPOINTS]


def test_a_pattern_stands_for_what_in_it_is_a_checkpoint(golden: Golden) -> None:
    assert names([SAMPLES / "td3_pendulum_*" / "ckpt-*"]) == [*CHECKPOINTS, *(f"{n}.pt" for n in CHECKPOINTS)]
    with pytest.raises(NotFoundError) as caught:
        expand_paths([str(RUN / "nothing-*")])
    golden(caught.value)


def test_what_a_shell_makes_of_a_pattern_means_the_same() -> None:
    expanded = sorted(path for path in TF_SAMPLE.parent.iterdir() if path.name.startswith("ckpt-"))
    assert len(expanded) == 18, "shards, indexes and receipts"
    assert sorted(names(expanded)) == sorted(CHECKPOINTS)
    # The state file means the latest, which is there already.
    assert sorted(names([TF_SAMPLE.parent / "checkpoint", *expanded])) == sorted(CHECKPOINTS)


def test_one_path_is_taken_as_it_is() -> None:
    (receipt,) = expand_paths([f"{TORCH_SAMPLE}.ckpttool.json"])
    assert receipt.named
    (one,) = expand_paths([str(TORCH_SAMPLE)])
    assert one.named
    assert not expand_paths([str(RUN)])[0].named


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("ckpt-2500", 2500),
        ("rl_model_10000_steps.zip", 10000),
        ("model_1500.pt", 1500),
        ("checkpoint_000010", 10),
        ("step=400.pt", 400),
        ("agent-7.safetensors", 7),
        ("TD3_HalfCheetah-v2_0", None),
        ("best_model.zip", None),
    ],
)
def test_the_step_in_a_name(name: str, step: int | None) -> None:
    assert training_counters.step_in_name(name) == step


def test_all_steps_are_of_one_source() -> None:
    counters = [{"total_it": 5, "name": 1}, {"total_it": 9, "name": 2}, {"name": 3}]
    assert training_counters.most_common_source(counters) == "name"
    assert training_counters.most_common_source(counters[:2]) == "total_it"
    assert (
        training_counters.most_common_source([{"total_it": 5, "name": 1}, {"total_it": 5, "name": 2}])
        == "name"
    )
    assert training_counters.most_common_source([{}, {}]) is None
    assert training_counters.most_common_source([{"total_it": 5}, {"total_it": 5}]) == "total_it"


def test_a_count_of_saves_is_no_step() -> None:
    assert training_counters.most_common_source([{"save_counter": 5}, {"save_counter": 6}]) is None
    counters = [{"total_it": 9, "save_counter": number} for number in (1, 2)]
    assert training_counters.most_common_source(counters) == "total_it"
    assert training_counters.step_columns(counters[0]) == {
        "environment_steps": None,
        "updates": 9,
        "saves": 1,
        "in_name": None,
    }


def test_inspect_and_eval_have_one_definition_of_steps() -> None:
    listed = in_process("inspect", TF_SAMPLE.parent, "--json").json()["checkpoints"]
    played = in_process("eval", TF_SAMPLE, "--env", "Pendulum-v1", "--episodes", "1", "--json").json()
    (latest,) = (row for row in listed if row["latest"])
    names = ("environment_steps", "updates", "saves", "in_name")
    assert [latest[name] for name in names] == [played[name] for name in names] == [None, 14000, 6, 15000]


# What comes of them.


def test_together_each_scores_what_it_scores_alone(whole: Sweep) -> None:
    assert [e.stacked for e in whole.evaluations] == [6] * 6
    for result in whole.evaluations:
        alone = evaluate(result.checkpoint, protocol=SHORT)
        np.testing.assert_allclose(result.rollout.returns, alone.rollout.returns, atol=0.01)
        assert (result.assumed, result.notes, result.env) == (alone.assumed, alone.notes, alone.env)


def test_the_curve_the_ranking_and_the_best(whole: Sweep) -> None:
    means = {e.checkpoint: e.statistics.mean for e in whole.evaluations}
    assert [point.step for point in whole.curve] == sorted(point.step for point in whole.curve)
    assert {point.checkpoint: point.mean for point in whole.curve} == means
    assert {point.run for point in whole.curve} == {str(RUN)}
    assert whole.step_from == "total_it"
    ranked = [row.mean for row in whole.ranking]
    assert ranked == sorted(means.values(), reverse=True)
    assert [row.rank for row in whole.ranking] == [1, 2, 3, 4, 5, 6]
    assert whole.best is not None
    assert whole.best.mean == max(means.values())
    best = next(e for e in whole.evaluations if e.checkpoint == whole.best.checkpoint)
    for row in whole.ranking[1:]:
        one = next(e for e in whole.evaluations if e.checkpoint == row.checkpoint)
        assert row.behind == paired_interval(one.rollout.returns, best.rollout.returns)
        assert row.behind.value <= 0
    assert whole.best.certain == (not any(row.tied for row in whole.ranking[1:]))


def test_two_of_the_same_weights_cannot_be_told_apart(tmp_path: Path) -> None:
    for name in ("ckpt-1.pt", "ckpt-2.pt"):
        shutil.copy(TORCH_SAMPLE, tmp_path / name)
    result = sweep([str(tmp_path)], "Pendulum-v1", Protocol(episodes=5))
    assert result.best is not None
    assert not result.best.certain
    assert result.ranking[1].tied
    assert result.ranking[1].behind is not None
    assert result.ranking[1].behind.ci95 == (0, 0)
    assert [point.step for point in result.curve] == [1, 2], "their counters say the same"


def test_samples_without_seeds_are_independent(whole: Sweep) -> None:
    """The same returns twice are two samples: their difference has the spread of both."""
    from ckpttool.evaluation import ranking

    one = whole.scored[0].evaluation
    sample = replace(one, rollout=replace(one.rollout, seeds=np.empty(0, np.int64)))
    difference, significant, needed = ranking._paired_difference(sample, sample, 1)
    assert difference is not None
    assert difference.ci95 is not None
    assert difference.ci95[0] < difference.value == 0 < difference.ci95[1]
    assert (significant, needed) == (False, None)
    paired, _, _ = ranking._paired_difference(one, one, 1)
    assert paired is not None
    assert paired.ci95 == (0, 0)


def test_few_episodes_are_never_certain(golden: Golden) -> None:
    paths = [str(RUN / "ckpt-2500.pt"), str(TORCH_SAMPLE)]
    few, enough = (sweep(paths, protocol=Protocol(episodes=n)) for n in (5, 6))
    assert few.best is not None
    assert enough.best is not None
    assert (few.best.certain, enough.best.certain) == (False, True)
    for result in (few, enough):
        lines = scores.render_sweep(result, quiet=True).splitlines()
        golden(next(line for line in lines if line.startswith("best")))


def test_different_environments_are_not_ranked(whole: Sweep) -> None:
    from ckpttool.evaluation import ranking

    first, second, *_ = whole.scored
    other = replace(second, evaluation=replace(second.evaluation, env="Other-v0"))
    assert ranking.rank_checkpoints([first, other]) == ()
    assert ranking.find_best(()) is None


def test_one_that_fails_loses_only_itself(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    for step in STEPS[:3]:
        shutil.copy(RUN / f"ckpt-{step}.pt", tmp_path)
    broken = torch.load(TORCH_SAMPLE, weights_only=True)
    next(iter(broken["actor"].values())).fill_(float("nan"))
    torch.save(broken, tmp_path / "ckpt-6000.pt")
    (tmp_path / "ckpt-9000.pt").write_bytes(TORCH_SAMPLE.read_bytes()[:5000])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "notes.pt")
    paths = [*map(str, sorted(tmp_path.glob("*.pt"))), str(tmp_path / "nosuch.pt")]
    result = sweep(paths, "Pendulum-v1", SHORT)
    assert returns(result).keys() == {f"ckpt-{step}.pt" for step in STEPS[:3]}
    failed = {os.path.basename(failure.checkpoint): str(failure.error) for failure in result.failed}
    assert set(failed) == {"ckpt-6000.pt", "ckpt-9000.pt", "notes.pt", "nosuch.pt"}
    golden(failed["ckpt-6000.pt"])
    # A folder may hold other files than agents.
    in_folder = sweep([str(tmp_path)], "Pendulum-v1", SHORT)
    assert [note for note in in_folder.notes if "notes.pt" in note]
    assert [os.path.basename(failure.checkpoint) for failure in in_folder.failed] == [
        "ckpt-6000.pt",
        "ckpt-9000.pt",
    ]
    assert returns(in_folder) == returns(result)


def test_where_there_is_no_agent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("no")
    with pytest.raises(NotACheckpointError):
        sweep([str(tmp_path / "*")])
    with pytest.raises(UsageError, match="Pendulumm"):
        sweep([str(RUN)], "Pendulumm-v1")


def test_one_reason_of_a_whole_run_has_one_hint(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    for path in RUN.glob("*.pt"):  # without the sidecars, which name the environment
        shutil.copy(path, run)
    refused = in_process("eval", run.name, "--episodes", 1, cwd=tmp_path)
    (hint,) = hints_of(refused.err)
    (words,) = commands_of(hint)
    assert refused.status == 2
    assert words == ["eval", run.name, "--episodes", "1", "--env", "Pendulum-v1"]
    followed = in_process(*words, "--json", cwd=tmp_path)
    assert (followed.status, len(followed.json()["evaluations"])) == (1, 6)


# Wherever they are played.


@pytest.mark.usefixtures("pairs")
def test_groups_do_not_depend_on_who_plays(whole: Sweep) -> None:
    sizes: list[int] = []

    def counting(
        work: Iterable[EvaluationBatch], progress: Progress
    ) -> Iterator[tuple[EvaluationBatch, BatchResult]]:
        for batch, result in scheduling.play_in_process(work, progress):
            sizes.append(len(batch.agents))
            yield batch, result

    require_alike(returns(sweep([str(RUN)], protocol=SHORT, spread=counting)), returns(whole))
    assert sizes == [2, 2, 2]
    there = sweep([str(RUN)], protocol=SHORT, spread=scheduling.process_spread(2))
    require_alike(returns(there), returns(whole))
    assert {e.stacked for e in there.evaluations} == {2}


@pytest.mark.usefixtures("pairs")
def test_a_process_that_is_killed_loses_nothing(
    whole: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    start = scheduling._Player._start
    killed: list[str] = []

    def short_lived(player: scheduling._Player) -> Any:
        executor = start(player)
        if not killed and player._context.process is not None:
            killed.append(player._name)
            threading.Timer(0.2, player._context.process.kill).start()
        return executor

    monkeypatch.setattr(scheduling._Player, "_start", short_lived)
    out = tmp_path / "lines.jsonl"
    result = sweep([str(RUN)], protocol=SHORT, out=str(out), spread=scheduling.process_spread(2))
    assert len(killed) == 1
    require_alike(returns(result), returns(whole))
    assert len(out.read_text().splitlines()) == 6


def _die(*_: object) -> None:
    os._exit(3)


def test_a_process_that_cannot_live_is_an_error(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    monkeypatch.setattr(scheduling, "_prepare_player", _die)
    result = sweep([str(RUN)], protocol=SHORT, spread=scheduling.process_spread(1))
    assert not result.scored
    assert len(result.failed) == 6
    assert all(isinstance(failure.error, WorkerError) for failure in result.failed)
    golden(str(result.failed[0].error))


def test_cores_are_divided() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert sorted(core for share in scheduling.share_cores(1) for core in share) == cores
    assert [len(share) for share in scheduling.share_cores(len(cores) + 1)] == [1] * (len(cores) + 1)
    with pytest.raises(UsageError):
        scheduling.process_spread(0)


# What is written as it comes.


def refuse(_: Iterable[EvaluationBatch], __: Progress) -> Iterator[tuple[EvaluationBatch, BatchResult]]:
    """Play nothing, and fail if there is anything to play."""
    assert not list(_)
    return iter(())


def test_a_rerun_plays_only_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    run = tmp_path / "run"
    shutil.copytree(RUN, run)
    first = sweep([str(run)], protocol=SHORT, out=str(out))
    lines = out.read_bytes()
    assert len(lines.splitlines()) == 6
    # Where it lies is no matter; what it is decides.
    moved = run.rename(tmp_path / "moved")
    again = sweep([str(moved)], protocol=SHORT, out=str(out), spread=refuse)
    assert again.resumed == 6
    assert returns(again) == returns(first)
    assert {os.path.dirname(e.checkpoint) for e in again.evaluations} == {str(moved)}
    assert again.curve == tuple(
        replace(p, run=str(moved), checkpoint=p.checkpoint.replace(str(run), str(moved))) for p in first.curve
    )
    assert out.read_bytes() == lines
    other = sweep([str(moved)], protocol=replace(SHORT, seed=7), out=str(out))
    assert other.resumed == 0
    assert out.read_bytes().startswith(lines)
    assert len(out.read_bytes().splitlines()) == 12


@pytest.mark.usefixtures("pairs")
def test_a_line_that_was_cut_is_played_again_and_counted_once(tmp_path: Path, whole: Sweep) -> None:
    out = tmp_path / "lines.jsonl"
    sweep([str(RUN)], protocol=SHORT, out=str(out))
    lines = out.read_bytes()
    cut = lines.splitlines(keepends=True)
    out.write_bytes(b"".join(cut[:3]) + cut[3][:100])
    result = sweep([str(RUN)], protocol=SHORT, out=str(out))
    assert result.resumed == 3
    require_alike(returns(result), returns(whole))
    documents = [json.loads(line) for line in out.read_bytes().splitlines()]
    for document in documents:
        schemas.require("result", document)
    assert len({document["key"] for document in documents}) == len(documents) == 6
    # The whole group is played again, so that a result does not depend on where a run was interrupted.
    assert {document["protocol"]["stacked"] for document in documents} == {2}


def test_a_line_that_was_edited_is_not_believed(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    first = sweep([str(TF_SAMPLE)], protocol=SHORT, out=str(out))
    document = json.loads(out.read_bytes())
    edited = {**document, "returns": [0.0] * len(document["returns"])}
    out.write_text(json.dumps(edited) + "\n")
    with pytest.raises(ChecksumError):
        sweep([str(TF_SAMPLE)], protocol=SHORT, out=str(out), spread=refuse)
    out.write_text(json.dumps({name: value for name, value in edited.items() if name != "sha256"}) + "\n")
    again = sweep([str(TF_SAMPLE)], protocol=SHORT, out=str(out))
    assert again.resumed == 0
    assert returns(again) == returns(first)
    assert sweep([str(TF_SAMPLE)], protocol=SHORT, out=str(out), spread=refuse).resumed == 1


@pytest.mark.parametrize("content", [b'{"mine": 1}\n', b"a,b\n1,2\n", b"half a line", b'{"schema": 1}\n'])
def test_another_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_bytes(content)
    with pytest.raises(FormatError):
        sweep([str(RUN)], protocol=SHORT, out=str(out), spread=refuse)
    assert out.read_bytes() == content


@pytest.mark.parametrize("kept", [True, False], ids=["the digest kept", "the digest removed"])
def test_an_edited_result_is_not_believed(tmp_path: Path, kept: bool) -> None:
    out = tmp_path / "lines.jsonl"
    one = str(RUN / "ckpt-2500.pt")
    sweep([one], protocol=SHORT, out=str(out))
    document = json.loads(out.read_bytes())
    true = list(document["returns"])
    document["returns"] = [0.0] * len(true)
    if not kept:
        del document["sha256"]
    out.write_text(json.dumps(document) + "\n")
    if kept:
        with pytest.raises(FormatError) as caught:
            sweep([one], protocol=SHORT, out=str(out))
        assert caught.value.file == str(out)
        return
    result = sweep([one], protocol=SHORT, out=str(out))
    assert result.resumed == 0
    assert result.evaluations[0].rollout.returns.tolist() == true


def test_two_do_not_write_one_file(tmp_path: Path, golden: Golden) -> None:
    out = str(tmp_path / "lines.jsonl")
    with results_file.ResultsFile(out), pytest.raises(UsageError) as caught:
        results_file.ResultsFile(out)
    golden(caught.value)


@pytest.mark.filterwarnings("ignore:invalid value")  # NumPy's, of statistics of infinite returns
@pytest.mark.parametrize("strange", [0.1 + 0.2, float("inf"), float("nan"), -0.0])
def test_a_result_is_read_as_it_was_written(whole: Sweep, strange: float, tmp_path: Path) -> None:
    one = whole.evaluations[0]
    played = replace(one.rollout, returns=np.array([strange, *one.rollout.returns[1:]]))
    written = replace(one, rollout=played)
    out = str(tmp_path / "lines.jsonl")
    with results_file.ResultsFile(out) as kept:
        kept.add([("k", {}, written)])
        assert kept.find("other", SHORT) is None
    with results_file.ResultsFile(out) as kept:
        stored = kept.find("k", SHORT)
    assert isinstance(stored, Evaluation)
    np.testing.assert_array_equal(stored.rollout.returns, played.returns)
    read, wrote = stored.document(), written.document()
    derived = ("returns", "mean", "std", "median", "iqm", "min", "max", "ci95", "normalized", "judgement")
    derived += ("steps_per_s",)
    assert {k: v for k, v in read.items() if k not in derived} == {
        k: v for k, v in wrote.items() if k not in derived
    }


# The command.


def test_the_document_and_the_table(tmp_path: Path) -> None:
    for step in STEPS[:3]:
        for suffix in ("pt", "pt.ckpttool.json"):
            shutil.copy(RUN / f"ckpt-{step}.{suffix}", tmp_path)
    ran = in_process("eval", ".", "--episodes", 2, "--json", cwd=tmp_path)
    document = ran.json()
    assert [evaluation["step"] for evaluation in document["evaluations"]] == [1500, 4000, 6500]
    assert [row["rank"] for row in document["ranking"]] == [1, 2, 3]
    assert document["best"]["checkpoint"] == document["ranking"][0]["checkpoint"]
    assert [point["step"] for point in document["curve"]] == [1500, 4000, 6500]
    assert (document["failed"], document["resumed"], document["interrupted"]) == ([], 0, False)
    (tmp_path / "ckpt-9.pt").write_bytes(b"PK\x03\x04")
    table = in_process("eval", ".", "ckpt-*.pt", "--episodes", 2, "--jobs", 1, "--out", ".", cwd=tmp_path)
    assert table.status == 2
    assert "ckpt-9.pt" in table.err.splitlines()[0]
    assert max(map(len, table.out.splitlines()[:4])) <= 80
    assert len((tmp_path / "evaluations.jsonl").read_text().splitlines()) == 3
    again = in_process("eval", "ckpt-[257]*.pt", "--episodes", 2, "--out", ".", "--json", cwd=tmp_path)
    assert again.json()["resumed"] == 3


def ranks(text: str) -> list[int]:
    return [
        int(line[:4]) for line in text.splitlines() if line.startswith("   ") and line[:4].strip().isdigit()
    ]


def test_the_table_is_best_first_and_top_shortens_it(whole: Sweep, tmp_path: Path) -> None:
    assert ranks(scores.render_sweep(whole, quiet=True)) == [1, 2, 3, 4, 5, 6]
    words = ("eval", RUN, "--episodes", 3, "--top", 2)
    table = in_process(*words, "--csv", "a.csv", "--tensorboard", "logs", cwd=tmp_path)
    assert ranks(table.out) == [1, 2]
    (hidden,) = (line for line in table.out.splitlines() if "--top 2" in line)
    assert hidden.startswith("4 of 6 checkpoints")
    rows = [line.partition(",")[0] for line in (tmp_path / "a.csv").read_text().splitlines()[1:]]
    assert rows == [row.checkpoint for row in whole.ranking[:2] for _ in range(3)]
    document = in_process(*words, "--json").json()
    assert (len(document["evaluations"]), len(document["ranking"])) == (6, 6)
    assert "--top" not in in_process(*words[:4], "--top", 9).out


@pytest.mark.parametrize(("height", "listed", "plotted"), [(18, 3, False), (24, 6, False), (60, 6, True)])
def test_a_sweep_fits_a_terminal(height: int, listed: int, plotted: bool) -> None:
    words = ("eval", RUN, "--episodes", 1)
    window = {"LINES": str(height), "NO_COLOR": "1"}
    text = in_process(*words, kind=Terminal, env=window).out
    assert ranks(text) == list(range(1, listed + 1))
    assert ("┌" in text) == plotted
    assert ("--chart" in text) != plotted
    if listed == 6:
        assert text.count("\n") < height - 1  # a line for the progress, one for the prompt
        return
    (option,) = re.findall(r"(--top \d+) lists all", text)
    assert ranks(in_process(*words, *option.split(), kind=Terminal, env=window).out) == [1, 2, 3, 4, 5, 6]


def test_top_lists_all_where_nothing_is_ranked(whole: Sweep) -> None:
    other = replace(whole.scored[0], evaluation=replace(whole.evaluations[0], env="Other-v0"))
    result = replace(whole, scored=(other, *whole.scored[1:]), ranking=(), best=None)
    lines = scores.render_sweep(result, quiet=True, top=1).splitlines()
    assert len([line for line in lines if line.startswith("   -")]) == 6
    assert "--top" in lines[-1]


def next_command(*words: object, cwd: Path | None = None) -> list[str]:
    process = in_process(*words, "--no-chart", cwd=cwd, kind=Terminal, env={"NO_COLOR": "1"})
    (command,) = process.suggested()
    return command


def test_the_next_command_plays_the_rivals_long_enough() -> None:
    first = in_process("eval", RUN, "--episodes", 5, "--json").json()
    assert [row["tied"] for row in first["ranking"]] == [True] * 6
    needed = max(row["episodes_needed"] for row in first["ranking"][1:])
    command = next_command("eval", RUN, "--episodes", 5, "--bounds", "-2", "2", "--jobs", 1)
    play = ["--episodes", str(needed), "--seed", "1005", "--jobs", "1"]
    assert command == ["eval", str(RUN), "--bounds", "-2", "2", *play]
    followed = in_process(*command, "--json")
    assert followed.status == 0, followed.err
    tied = [row for row in followed.json()["ranking"] if row["tied"]]
    assert len(tied) == 2
    # The two are as good, and the best is scored alone.
    assert tied[1]["episodes_needed"] > ranking.MOST_EPISODES
    best = next_command(*command)
    assert best[:2] == ["eval", tied[0]["checkpoint"]]
    alone = in_process(*best, "--json")
    assert alone.status == 0, alone.err
    assert len(alone.json()["returns"]) == 100


def test_after_one_episode_the_fewest_are_offered() -> None:
    command = next_command("eval", RUN, "--episodes", 1, "--top", 1)
    assert command == ["eval", str(RUN), "--episodes", str(ranking.fewest_episodes(5)), "--seed", "1001"]


def test_only_rivals_are_played_again(tmp_path: Path) -> None:
    """No number of episodes distinguishes two of equal weights."""
    for step in (2500, 5000, 10000, 12500):
        for suffix in ("pt", "pt.ckpttool.json"):
            shutil.copy(RUN / f"ckpt-{step}.{suffix}", tmp_path)
    words = ("eval", "ckpt-*.pt", "--seed", 50)
    rows = in_process(*words, "--json", cwd=tmp_path).json()["ranking"]
    tied = [row["checkpoint"] for row in rows if row["tied"]]
    assert [row["tied"] for row in rows] == [True, True, False, False]
    number = str(rows[1]["episodes_needed"])
    expected = ["eval", *tied, "--episodes", number, "--seed", "60"]
    assert next_command(*words, cwd=tmp_path) == expected
    shutil.copy(tmp_path / "ckpt-10000.pt", tmp_path / "ckpt-12500.pt")
    shutil.copy(tmp_path / "ckpt-10000.pt.ckpttool.json", tmp_path / "ckpt-12500.pt.ckpttool.json")
    command = next_command(*words, cwd=tmp_path)
    assert command == ["eval", "ckpt-10000.pt", "--episodes", "100", "--seed", "60"]


def test_what_is_wrong_with_all_is_said_once(golden: Golden) -> None:
    ran = in_process("eval", RUN, "--episodes", 1, "--env", "MountainCarContinuous-v0")
    golden(refused(ran).partition(": [")[0])


def test_a_file_too_large_to_read_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "lines.jsonl"
    out.write_bytes(b"{}\n" * 10)
    monkeypatch.setattr(results_file, "LIMIT", 10)
    with pytest.raises(UsageError) as caught:
        results_file.ResultsFile(str(out))
    assert caught.value.file == str(out)
    assert out.stat().st_size == 30


def test_results_do_not_go_to_a_device() -> None:
    with pytest.raises(TargetExistsError):
        results_file.ResultsFile("/dev/null")


# After the first results it waits, so that an interrupt meets the others.
WAITING = """
import sys, time
from ckpttool.commands import sweep
from ckpttool.evaluation import ranking
from ckpttool.evaluation import results_file
def add(self, finished, own=results_file.ResultsFile.add):
    own(self, finished)
    time.sleep(600)
results_file.ResultsFile.add = add
from ckpttool.cli import main
main()
"""


def test_ctrl_c_keeps_the_results_that_are_there(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    arguments = ["eval", str(RUN), "--episodes", "160", "--num-envs", "160", "--out", str(out), "--json"]
    command = [sys.executable, "-c", WAITING, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        try:
            for _ in range(3000):
                if out.exists() and out.stat().st_size:
                    break
                time.sleep(0.02)
            child.send_signal(signal.SIGINT)
            printed, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    document = json.loads(printed)
    whole = [e for e in document["evaluations"] if not e["interrupted"]]
    assert child.returncode == 130
    assert document["interrupted"]
    assert 0 < len(whole) < 6
    assert len(out.read_text().splitlines()) == len(whole)


# On a cluster.

CLUSTER = """
import glob, json, os, signal, sys, threading, time
from ckpttool.evaluation import scheduling as groups, scheduling as ray_cluster
from ckpttool.evaluation.protocol import Protocol
from ckpttool.commands.sweep import sweep

groups.MEMBERS = 1
killed = []

def workers():
    for file in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            name = open(file, "rb").read()
        except OSError:
            continue
        if name.startswith(b"ray::play_job") and b"IDLE" not in name:
            yield int(file.split("/")[2])

def reaper():
    while not killed:
        found = [pid for pid in workers() if pid not in before]
        if found and os.path.getsize(sys.argv[2]):
            os.kill(found[0], signal.SIGKILL)
            killed.append(found[0])
        time.sleep(0.01)

before = set(workers())
threading.Thread(target=reaper, daemon=True).start()
how, there = Protocol(episodes=60), ray_cluster.ray_spread("local", 2)
found = sweep([sys.argv[1]], protocol=how, out=sys.argv[2], spread=there)
print(json.dumps({"killed": killed, "document": found.document()}))
"""


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
def test_a_cluster_that_loses_a_worker_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-c", CLUSTER, str(RUN), str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert len(record["killed"]) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(record["killed"][0], 0)
    assert not record["document"]["failed"]
    here = sweep([str(RUN)], protocol=Protocol(episodes=60))
    for there, e in zip(record["document"]["evaluations"], here.evaluations, strict=True):
        np.testing.assert_allclose(there["returns"], e.rollout.returns, atol=0.01)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) == 6


@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
def test_a_cluster_that_is_not_there_is_said(golden: Golden) -> None:
    ran = ckpttool("eval", TORCH_SAMPLE, "--episodes", 1, "--ray", "127.0.0.1:1")
    golden(refused(ran).partition(": [")[0])
