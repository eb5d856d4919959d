"""Learning curves that training programs logged beside their checkpoints, as TensorBoard event files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from ckpttool.core import filesystem, urls
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import ChangedError, CkpttoolError, TruncatedError
from ckpttool.core.filesystem import list_names
from ckpttool.core.source import File
from ckpttool.core.text import format_count, natural_sort_key
from ckpttool.encodings import protobuf

Of = Literal["evaluation", "training"]

# Tags that are returns, with the program that logs each. Evaluation scores come first, then returns of
# training episodes (with exploration noise); if a folder has several tags, the first one is used.
TAGS: dict[str, Of] = {
    "eval/mean_reward": "evaluation",  # stable_baselines3/common/callbacks.py, EvalCallback
    "Common/average_test_return": "evaluation",  # tf2rl/experiments/trainer.py
    "loss/AverageTestReturn": "evaluation",  # tf2rl/experiments/trainer.py, for TensorFlow 1
    "test/returns_stat/mean": "evaluation",  # tianshou/utils/logger/base.py, `test/` and the statistic
    "test/reward": "evaluation",  # tianshou/utils/logger/base.py, before 1.0
    "ray/tune/evaluation/env_runners/episode_return_mean": "evaluation",  # rllib/utils/metrics/__init__.py
    "ray/tune/evaluation/episode_reward_mean": "evaluation",  # ray/tune/logger/tensorboardx.py, older results
    "rollout/ep_rew_mean": "training",  # stable_baselines3/common/off_policy_algorithm.py
    "charts/episodic_return": "training",  # cleanrl/td3_continuous_action.py
    "Common/training_return": "training",  # tf2rl/experiments/trainer.py
    "train/returns_stat/mean": "training",  # tianshou/utils/logger/base.py
    "ray/tune/env_runners/episode_return_mean": "training",  # rllib/utils/metrics/__init__.py
    "ray/tune/episode_reward_mean": "training",  # ray/tune/logger/tensorboardx.py, older results
    "Reward / Total reward (mean)": "training",  # skrl/agents/torch/base.py
    "Metrics/AverageReturn": "training",  # tf_agents/metrics/tf_metrics.py, AverageReturnMetric
    "Train/mean_reward": "training",  # rsl_rl/runners/on_policy_runner.py; its steps are iterations
    "episode_reward": "training",  # stable_baselines/common/tf_util.py, total_episode_reward_logger
}

# Where programs put event files relative to a checkpoint: beside it, up to two folders above, or in one of
# these subfolders (TF-Agents has train/ and eval/).
ABOVE = 2
BELOW = ("eval", "train", "tensorboard", "tb", "logs", "summaries")

# More than this takes a minute to read, only for the background of a plot; it is named and skipped.
MOST_BYTES = 64 << 20
MOST_POINTS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class TrainingCurve:
    """Logged returns over training steps, at most MOST_POINTS of them (see `thin_points`)."""

    files: tuple[str, ...]
    tag: str
    of: Of
    steps: np.ndarray
    """int64 [n], ascending; in the unit that the program counts, usually environment steps"""
    values: np.ndarray
    """float64 [n]"""
    logged: int
    """number of values in the files"""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "files": [urls.display_url(file) for file in self.files],
            "tag": self.tag,
            "of": self.of,
            "logged": self.logged,
            "steps": self.steps.tolist(),
            "values": self.values.tolist(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class TrainingLogs:
    """Training logs beside checkpoints: curves, and notes on files that could not be read completely."""

    curves: tuple[TrainingCurve, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON keys."""
        return {"training_curves": [curve.document() for curve in self.curves]}


def find_training_logs(paths: Sequence[str]) -> TrainingLogs:
    """Return the curves beside these checkpoints, once per folder; empty if there are none."""
    curves, notes = [], []
    with filesystem.read_session():
        folders = dict.fromkeys(f for path in paths if (f := _find_event_folder(path)) is not None)
    for folder in folders:
        curve, reason = _read_best_tag(folder)
        notes += reason
        if curve is not None:
            curves.append(curve)
            were = "was" if curve.logged == 1 else "were"
            values = format_count(curve.logged, "value")
            notes.append(f"{values} of {curve.tag} ({curve.of}) {were} logged in {urls.display_url(folder)}")
    return TrainingLogs(tuple(curves), tuple(notes))


def _find_event_folder(path: str) -> str | None:
    """Return the nearest folder with event files, None if there is none up to the run's folder.

    On remote sites, nothing above the given path is requested.
    """
    elsewhere = filesystem.find_store(path) is not None
    location = filesystem.abspath(path)
    location = location if filesystem.isdir(location) else os.path.dirname(location)
    shared = {os.path.realpath(folder) for folder in (os.path.expanduser("~"), tempfile.gettempdir(), os.sep)}
    for _ in range(1 + ABOVE):
        if filesystem.realpath(location) in shared or (elsewhere and filesystem.find_store(location) is None):
            return None
        # List the names first: on remote sites, each check of a folder is a request.
        below = [name for name in BELOW if not elsewhere or name in list_names(location)]
        for candidate in (location, *(os.path.join(location, name) for name in below)):
            if any(_event_files(candidate)):
                return candidate
        location = os.path.dirname(location)
    return None


def _event_files(folder: str) -> Iterator[str]:
    for name in list_names(folder):
        if name.startswith(protobuf.NAME) and filesystem.isfile(path := os.path.join(folder, name)):
            yield path


def _read_best_tag(folder: str) -> tuple[TrainingCurve | None, list[str]]:
    """Return the curve of a folder's best tag; a resumed run has several files, in order of time."""
    files, notes = [], []
    room = MOST_BYTES
    for path in sorted(_event_files(folder), key=natural_sort_key):
        file = File.stamp(path)
        if file.size > room:
            owner = f"{urls.display_url(path)} was not read"
            notes.append(f"{owner}: the folder contains more than {MOST_BYTES >> 20} MiB of event files")
            continue
        room -= file.size
        files.append(file)
    points: dict[str, list[tuple[int, float]]] = {}
    used: dict[str, list[str]] = {}
    for file in files:
        notes += _collect(file, points, used)
    tag = next((tag for tag in TAGS if tag in points), None)
    if tag is None:
        return None, notes
    return _curve(tag, tuple(used[tag]), points[tag]), notes


def _collect(file: File, points: dict[str, list[tuple[int, float]]], used: dict[str, list[str]]) -> list[str]:
    """Add the returns of a file, and return a note if it could not be read to its end.

    Values before the damage are kept.
    """
    first: set[str] = set()
    try:
        for tag, step, value in protobuf.iter_scalars(file, TAGS):
            series = points.setdefault(tag, [])
            if tag not in first:
                first.add(tag)
                used.setdefault(tag, []).append(file.path)
                # A resumed run repeats the steps after its checkpoint.
                series[:] = [point for point in series if point[0] < step]
            series.append((step, value))
    except TruncatedError as error:
        return [f"the incomplete last record was skipped: {error}"]
    except ChangedError:
        return [f"{urls.display_url(file.path)} is still being written; read up to its current end"]
    except CkpttoolError as error:
        return [f"damaged event file; only the records before the damage were read: {error}"]
    return []


def _curve(tag: str, files: tuple[str, ...], points: list[tuple[int, float]]) -> TrainingCurve:
    steps = np.array([step for step, _ in points], np.int64)
    values = np.array([value for _, value in points])
    order = np.argsort(steps, kind="stable")
    thin_steps, thin_values = thin_points(steps[order], values[order])
    return TrainingCurve(files, tag, TAGS[tag], thin_steps, thin_values, len(points))


def thin_points(
    steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS
) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `most` points: means of neighbours, each at the last of their steps."""
    if len(steps) <= most:
        return steps, values
    ends = np.linspace(0, len(steps), most + 1).astype(np.int64)[1:]
    starts = np.concatenate(([0], ends[:-1]))
    sums = np.add.reduceat(values, starts)
    return steps[ends - 1], sums / (ends - starts)
