"""Learning curves beside checkpoints: which files are found, which tag is taken, what a torn file costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.encodings import protobuf
from ckpttool.evaluation import training_logs
from ckpttool.evaluation.training_logs import find_training_logs, thin_points
from tests.golden_texts import Golden


def log(folder: Path, values: dict[int, dict[str, float]], name: str = "1.host") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{protobuf.NAME}{name}"
    records = [protobuf.summary_record(0, step, tags) for step, tags in values.items()]
    path.write_bytes(b"".join([protobuf.event_file_header(0), *records]))
    return path


SB3 = {100: {"rollout/ep_rew_mean": 1.0}, 200: {"rollout/ep_rew_mean": 2.0, "eval/mean_reward": 5.0}}


@pytest.mark.parametrize(
    "checkpoint", ["agent.pt", "checkpoints/agent.pt", "a/b/agent.pt", "policy", "checkpoints/ckpt-7"]
)
def test_found_beside_and_above(tmp_path: Path, checkpoint: str) -> None:
    path = log(tmp_path / "run", SB3)
    (tmp_path / "run" / "policy").mkdir()
    (curve,) = find_training_logs([str(tmp_path / "run" / checkpoint)]).curves
    assert curve.files == (str(path),)


@pytest.mark.parametrize("checkpoint", ["a/b/c/agent.pt", "../other/agent.pt"])
def test_not_found_farther_away(tmp_path: Path, checkpoint: str) -> None:
    log(tmp_path / "run", SB3)
    assert find_training_logs([str(tmp_path / "run" / checkpoint)]).curves == ()


def test_found_in_folders_that_programs_use(tmp_path: Path) -> None:
    log(tmp_path / "eval", {10: {"Metrics/AverageReturn": 3.0}})
    (curve,) = find_training_logs([str(tmp_path / "policy" / "saved_model.pb")]).curves
    assert (curve.tag, curve.of) == ("Metrics/AverageReturn", "training")


def test_evaluations_are_preferred_to_training(tmp_path: Path) -> None:
    log(tmp_path, SB3)
    (curve,) = find_training_logs([str(tmp_path / "agent.zip")]).curves
    assert (curve.tag, curve.of, curve.steps.tolist(), curve.values.tolist()) == (
        "eval/mean_reward",
        "evaluation",
        [200],
        [5.0],
    )


def test_one_folder_is_read_once(tmp_path: Path, golden: Golden) -> None:
    log(tmp_path, SB3)
    logs = find_training_logs([str(tmp_path / "a.pt"), str(tmp_path / "b.pt")])
    assert len(logs.curves) == 1
    golden("\n".join(logs.notes))


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    tag = "charts/episodic_return"
    log(tmp_path, {step: {tag: 1.0} for step in (10, 20, 30)}, name="9.host")
    log(tmp_path, {step: {tag: 2.0} for step in (20, 30, 40)}, name="10.host")
    (curve,) = find_training_logs([str(tmp_path / "agent.pt")]).curves
    assert (curve.steps.tolist(), curve.values.tolist()) == ([10, 20, 30, 40], [1, 2, 2, 2])
    assert len(curve.files) == 2


def test_a_torn_end_is_dropped_and_said(tmp_path: Path, golden: Golden) -> None:
    path = log(tmp_path, {step: {"rollout/ep_rew_mean": step} for step in (1, 2, 3)})
    path.write_bytes(path.read_bytes()[:-5])
    logs = find_training_logs([str(tmp_path / "agent.zip")])
    assert logs.curves[0].steps.tolist() == [1, 2]
    golden("\n".join(logs.notes))


def test_damage_is_said_and_what_came_before_kept(tmp_path: Path) -> None:
    path = log(tmp_path, {step: {"rollout/ep_rew_mean": step} for step in (1, 2, 3)})
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    logs = find_training_logs([str(tmp_path / "agent.zip")])
    assert logs.curves[0].steps.tolist() == [1, 2]
    assert any("checksum" in note for note in logs.notes)


def test_files_without_returns_say_nothing(tmp_path: Path) -> None:
    log(tmp_path, {1: {"losses/actor_loss": 0.5}})
    logs = find_training_logs([str(tmp_path / "agent.pt")])
    assert (logs.curves, logs.notes) == ((), ())


def test_large_files_are_named_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    path = log(tmp_path, SB3)
    monkeypatch.setattr(training_logs, "MOST_BYTES", path.stat().st_size - 1)
    logs = find_training_logs([str(tmp_path / "agent.pt")])
    assert logs.curves == ()
    golden("\n".join(logs.notes))


def test_the_home_folder_is_nobodys_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path, SB3)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_training_logs([str(tmp_path / "agent.pt")]).curves == ()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60), st.integers(1, 20))
def test_thinning_keeps_the_mean_and_the_last_step(values: list[float], most: int) -> None:
    steps = np.arange(len(values)) * 5
    found_steps, means = thin_points(steps, np.array(values), most)
    assert len(means) == len(found_steps) == min(most, len(values))
    assert found_steps[-1] == steps[-1]
    assert (np.diff(found_steps) > 0).all()
    assert min(values) - 1e-9 <= means.min()
    assert means.max() <= max(values) + 1e-9
    if len(values) % len(means) == 0:
        assert means.mean() == pytest.approx(np.mean(values), abs=1e-9)
