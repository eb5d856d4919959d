"""Returns logged beside the checkpoints: event files, else tables of common libraries."""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from ckpttool.core import filesystem, urls
from ckpttool.core.errors import CkpttoolError
from ckpttool.core.filesystem import list_names
from ckpttool.core.source import File
from ckpttool.core.text import describe_error, format_count, natural_sort_key, shorten
from ckpttool.evaluation import training_logs
from ckpttool.evaluation.training_logs import BELOW, MOST_BYTES, Of, TrainingCurve, TrainingLogs, thin_points
from ckpttool.formats.detect import open_checkpoint

# Columns of a table: training steps, and returns with what they measure; the first one present is used.
_STEPS = (
    "time/total_timesteps",  # stable_baselines3/common/logger.py, progress.csv
    "total_timesteps",  # stable_baselines (version 2), progress.csv
    "TotalEnvInteracts",  # spinup/utils/logx.py, progress.txt
    "num_env_steps_sampled_lifetime",  # rllib, progress.csv
    "timesteps_total",  # rllib, older results
)
_RETURNS: tuple[tuple[str, Of], ...] = (
    ("eval/mean_reward", "evaluation"),
    ("AverageTestEpRet", "evaluation"),
    ("evaluation/env_runners/episode_return_mean", "evaluation"),
    ("evaluation/episode_reward_mean", "evaluation"),
    ("rollout/ep_rew_mean", "training"),
    ("ep_reward_mean", "training"),
    ("AverageEpRet", "training"),
    ("env_runners/episode_return_mean", "training"),
    ("episode_reward_mean", "training"),
)
_TABLES = {"progress.csv": ",", "progress.txt": "\t"}
_EVALUATIONS = "evaluations.npz"  # stable_baselines3/common/callbacks.py, EvalCallback
_MONITOR = "monitor.csv"  # stable_baselines3/common/monitor.py; `0.monitor.csv` for each environment
_Points = list[tuple[int, float]]
# Errors of reading files of any content as such tables.
_UNREADABLE = (
    CkpttoolError,
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    csv.Error,
)
# Most characters of a reason.
_REASON = 200


def find_logs(path: str) -> TrainingLogs:
    """Return the returns that training logged beside a checkpoint, empty if there are none.

    Event files come first, then evaluations, tables and episodes, in the checkpoint's folder, in a
    subfolder for logs and in the folder above.
    """
    logs = training_logs.find_training_logs([path])
    if logs.curves or urls.is_url(path):
        return logs
    own = os.path.dirname(filesystem.abspath(path))
    notes = list(logs.notes)
    for folder in (own, *(os.path.join(own, name) for name in BELOW), os.path.dirname(own)):
        for read, name in _READERS:
            try:
                curve = read(folder)
            except _UNREADABLE as error:
                reason = describe_error(error) if isinstance(error, CkpttoolError) else repr(error)
                where = urls.display_url(os.path.join(folder, name))
                notes.append(f"{where} contains no readable returns: {shorten(reason, _REASON)}")
                continue
            if curve is not None:
                many = format_count(curve.logged, "value")
                note = f"{many} of {curve.tag} ({curve.of}) in {urls.display_url(curve.files[0])}"
                return replace(logs, curves=(curve,), notes=(*notes, note))
    return replace(logs, notes=tuple(notes))


def _read_evaluations(folder: str) -> TrainingCurve | None:
    """Return the means of an EvalCallback's episodes."""
    file = os.path.join(folder, _EVALUATIONS)
    if not filesystem.isfile(file):
        return None
    tree = open_checkpoint(file).tree
    leaves = {tree.names[at]: leaf for at, leaf in tree.tensors()}
    if not {"timesteps", "results"} <= leaves.keys():
        return None
    steps, results = leaves["timesteps"].array(), leaves["results"].array()
    if results.ndim != 2 or steps.shape != results.shape[:1] or not results.size:
        return None
    means = results.mean(axis=1, dtype=np.float64)
    return _table_curve(
        [file], "results", "evaluation", list(zip(map(int, steps), map(float, means), strict=True))
    )


def _read_tables(folder: str) -> TrainingCurve | None:
    """Return a curve of the best column of a `progress` table."""
    for name, separator in _TABLES.items():
        file = os.path.join(folder, name)
        if filesystem.isfile(file):
            rows = list(csv.DictReader(_read_lines(file), delimiter=separator))
            columns = {column for row in rows[:1] for column in row}
            steps = next((column for column in _STEPS if column in columns), None)
            for column, of in _RETURNS:
                if steps is not None and column in columns:
                    pairs = ((row.get(steps), row.get(column)) for row in rows)
                    return _table_curve([file], column, of, list(_parse_points(pairs)))
    return None


def _read_monitors(folder: str) -> TrainingCurve | None:
    """Return the returns of training episodes, those of parallel environments in order of time."""
    names = [name for name in list_names(folder) if name == _MONITOR or name.endswith(f".{_MONITOR}")]
    files = [os.path.join(folder, name) for name in sorted(names, key=natural_sort_key)]
    episodes: list[tuple[float, int, float]] = []
    for file in files:
        lines = _read_lines(file)
        head = json.loads(lines[0].removeprefix("#")) if lines and lines[0].startswith("#") else {}
        begin = float(head.get("t_start", 0.0))
        for row in csv.DictReader(lines[1:] if head else lines):
            with suppress(TypeError, ValueError, OverflowError):
                episodes.append((begin + float(row["t"]), int(float(row["l"])), float(row["r"])))
    episodes.sort(key=lambda row: row[0])
    steps = np.cumsum([length for _, length, _ in episodes], dtype=np.int64)
    points = [(int(step), value) for step, (_, _, value) in zip(steps, episodes, strict=True)]
    return _table_curve(files, "r", "training", points)


_READERS = (
    (_read_evaluations, _EVALUATIONS),
    (_read_tables, "progress.csv or progress.txt"),
    (_read_monitors, _MONITOR),
)


def _read_lines(file: str) -> list[str]:
    """Return the lines of a text file; none if it is too large to be read for a plot."""
    stamp = File.stamp(file)
    if stamp.size > MOST_BYTES:
        return []
    return stamp.read(0, stamp.size).decode("utf-8", "replace").splitlines()


def _parse_points(pairs: Iterable[tuple[str | None, str | None]]) -> Iterator[tuple[int, float]]:
    for step, value in pairs:
        with suppress(TypeError, ValueError, OverflowError):
            yield int(float(step or "")), float(value or "")


def _table_curve(files: Sequence[str], tag: str, of: Of, points: _Points) -> TrainingCurve | None:
    known = sorted((step, value) for step, value in points if math.isfinite(value) and 0 <= step < 2**63)
    if not known:
        return None
    steps, values = np.array([step for step, _ in known]), np.array([value for _, value in known])
    return TrainingCurve(tuple(files), tag, of, *thin_points(steps, values), len(known))
