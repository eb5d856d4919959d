"""The learning curve that a training program logged beside its checkpoints, in TensorBoard's event files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ckpttool import places, urls
from ckpttool.errors import ChangedError, CkpttoolError, TruncatedError
from ckpttool.ops.rows import natural
from ckpttool.shown import count
from ckpttool.source import File
from ckpttool.wire import summary_events

Of = Literal["evaluation", "training"]

# What is a return, by the program that logs it. Scores of evaluations come first, then those of episodes that
# were played for training, with exploration noise; of several tags in one folder the first is taken.
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

# Where programs put event files, seen from a checkpoint: beside it, up to two folders above, or in one of
# these below such a folder (TF-Agents has train/ and eval/).
ABOVE = 2
BELOW = ("eval", "train", "tensorboard", "tb", "logs", "summaries")

# More than this is a minute's reading for a picture's background; it is named and left alone.
MOST_BYTES = 64 << 20
MOST_POINTS = 1000


@dataclass(frozen=True, slots=True, eq=False)
class TrainingCurve:
    """Returns over training steps as they were logged; at most MOST_POINTS of them (see `thinned`)."""

    files: tuple[str, ...]
    tag: str
    of: Of
    steps: np.ndarray
    """int64 [n], ascending; what the program counts, mostly steps of the environment"""
    values: np.ndarray
    """float64 [n]"""
    logged: int
    """how many values the files have"""

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "files": [urls.spelled(file) for file in self.files],
            "tag": self.tag,
            "of": self.of,
            "logged": self.logged,
            "steps": self.steps.tolist(),
            "values": self.values.tolist(),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What lies beside checkpoints: curves, and sentences on files that could not be read to their end."""

    curves: tuple[TrainingCurve, ...] = ()
    notes: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON keys."""
        return {"training_curves": [curve.document() for curve in self.curves]}


def beside(paths: Sequence[str]) -> Found:
    """Return the curves beside these checkpoints, each folder's once; nothing found is no error."""
    curves, notes = [], []
    with places.visit():
        folders = dict.fromkeys(f for path in paths if (f := _folder(path)) is not None)
    for folder in folders:
        curve, said = _read(folder)
        notes += said
        if curve is not None:
            curves.append(curve)
            were = "was" if curve.logged == 1 else "were"
            values = count(curve.logged, "value")
            notes.append(f"{values} of {curve.tag} ({curve.of}) {were} logged in {urls.spelled(folder)}")
    return Found(tuple(curves), tuple(notes))


def _folder(path: str) -> str | None:
    """Return the nearest folder with event files, None if there is none up to the run's folder.

    Elsewhere nothing is asked for above what a person named.
    """
    elsewhere = places.store(path) is not None
    place = places.abspath(path)
    place = place if places.isdir(place) else os.path.dirname(place)
    shared = {os.path.realpath(each) for each in (os.path.expanduser("~"), tempfile.gettempdir(), os.sep)}
    for _ in range(1 + ABOVE):
        if places.realpath(place) in shared or (elsewhere and places.store(place) is None):
            return None
        # A folder's names say which others are there, which elsewhere is a request for each.
        below = [name for name in BELOW if not elsewhere or name in _names(place)]
        for candidate in (place, *(os.path.join(place, name) for name in below)):
            if any(_events(candidate)):
                return candidate
        place = os.path.dirname(place)
    return None


def _events(folder: str) -> Iterator[str]:
    for name in _names(folder):
        if name.startswith(summary_events.NAME) and places.isfile(path := os.path.join(folder, name)):
            yield path


def _names(folder: str) -> list[str]:
    try:
        return places.listdir(folder)
    except (OSError, CkpttoolError):
        return []


def _read(folder: str) -> tuple[TrainingCurve | None, list[str]]:
    """Return the best tag's curve of a folder; a run that was resumed has several files, in time's order."""
    files, notes = [], []
    room = MOST_BYTES
    for path in sorted(_events(folder), key=natural):
        file = File.stamp(path)
        if file.size > room:
            whose = f"{urls.spelled(path)} was not read"
            notes.append(f"{whose}: event files of more than {MOST_BYTES >> 20} MiB in a folder")
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
    """Add a file's returns; say if it could not be read to its end. What came before is kept."""
    first: set[str] = set()
    try:
        for tag, step, value in summary_events.scalars(file, TAGS):
            held = points.setdefault(tag, [])
            if tag not in first:
                first.add(tag)
                used.setdefault(tag, []).append(file.path)
                # A resumed run plays what came after its checkpoint anew.
                held[:] = [point for point in held if point[0] < step]
            held.append((step, value))
    except TruncatedError as error:
        return [f"the last record was left out: {error}"]
    except ChangedError:
        return [f"{urls.spelled(file.path)} is being written: what it had so far was read"]
    except CkpttoolError as error:
        return [f"an event file is damaged, what came before was read: {error}"]
    return []


def _curve(tag: str, files: tuple[str, ...], points: list[tuple[int, float]]) -> TrainingCurve:
    steps = np.array([step for step, _ in points], np.int64)
    values = np.array([value for _, value in points])
    order = np.argsort(steps, kind="stable")
    thin_steps, thin_values = thinned(steps[order], values[order])
    return TrainingCurve(files, tag, TAGS[tag], thin_steps, thin_values, len(points))


def thinned(steps: np.ndarray, values: np.ndarray, most: int = MOST_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `most` points: means of neighbours, each at the last of their steps."""
    if len(steps) <= most:
        return steps, values
    ends = np.linspace(0, len(steps), most + 1).astype(np.int64)[1:]
    starts = np.concatenate(([0], ends[:-1]))
    sums = np.add.reduceat(values, starts)
    return steps[ends - 1], sums / (ends - starts)
