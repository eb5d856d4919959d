"""Evaluations in files: the JSON document, a CSV table of episodes, scalars for TensorBoard."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from typing import IO

from ckpttool import urls
from ckpttool.errors import UsageError
from ckpttool.ops.ranking import Scored
from ckpttool.shown import clean
from ckpttool.wire import summary_events
from ckpttool.writing import Output, require_new, write_atomically

COLUMNS = ("checkpoint", "step", "env", "seed", "return", "length", "terminated", "truncated")
MEAN, STD, LENGTH = "eval/return_mean", "eval/return_std", "eval/length_mean"


def require_new_result(path: str) -> None:
    """Raise unless a result may be written to `path`: for asking before hours of playing."""
    require_new(path, hint="take another name")


def save_document(path: str, text: str) -> None:
    """Write a result's JSON document to a new file; raise TargetExistsError if it is there already."""
    _write(path, text.encode() + b"\n")


def table(scored: Sequence[Scored]) -> str:
    """Return one line per episode under COLUMNS; an unknown step is empty, returns have all their digits.

    Characters of names that do not print are escaped.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for each in scored:
        one, played = each.evaluation, each.evaluation.rollout
        checkpoint, env = clean(urls.spelled(one.checkpoint)), clean(one.env)
        for seed, value, length, terminated, truncated in zip(
            played.seeds.tolist() or [None] * len(played.returns),
            played.returns.tolist(),
            played.lengths.tolist(),
            played.terminated.tolist(),
            played.truncated.tolist(),
            strict=True,
        ):
            ends = (int(terminated), int(truncated))
            rows.writerow((checkpoint, each.step, env, seed, repr(value), length, *ends))
    return text.getvalue()


def save_table(path: str, scored: Sequence[Scored]) -> None:
    """Write the table to a new file; raise TargetExistsError if it is there already."""
    _write(path, table(scored).encode())


def scalars(scored: Sequence[Scored], wall_time: float) -> bytes:
    """Return an event file with mean, deviation and length of each checkpoint at its training step.

    Without a step for every checkpoint they are counted, from 0. `wall_time` is in seconds since 1970.
    """
    counted = any(each.step is None for each in scored)
    records = [summary_events.header(wall_time)]
    for number, each in enumerate(scored):
        result = each.evaluation.statistics
        values = {MEAN: result.mean, LENGTH: float(each.evaluation.rollout.lengths.mean())}
        if result.std is not None:
            values[STD] = result.std
        step = number if counted or each.step is None else each.step
        records.append(summary_events.summary(wall_time, step, values))
    return b"".join(records)


def require_folder(path: str) -> None:
    """Make a folder unless it is there; raise UsageError if it cannot be: for asking before playing."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder cannot be made: {error.strerror}", file=path) from error


def save_scalars(folder: str, scored: Sequence[Scored], wall_time: float) -> str:
    """Write an event file into a folder, which is made if it is not there; return the file's name."""
    require_folder(folder)
    path = os.path.join(folder, f"{summary_events.NAME}{wall_time:.6f}.ckpttool")
    _write(path, scalars(scored, wall_time))
    return path


def _write(path: str, data: bytes) -> None:
    def write(stream: IO[bytes]) -> None:
        stream.write(data)

    require_new_result(path)
    write_atomically((Output(path, write),))
