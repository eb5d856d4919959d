"""Returns of checkpoints as a table of episodes, and as scalars of an event file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence

from ckpttool.core import urls
from ckpttool.core.atomic_write import write_file
from ckpttool.core.errors import UsageError
from ckpttool.core.text import clean
from ckpttool.encodings import protobuf
from ckpttool.evaluation.ranking import ScoredCheckpoint

COLUMNS = ("checkpoint", "step", "env", "seed", "return", "length", "terminated", "truncated")
MEAN, STD, LENGTH = "eval/return_mean", "eval/return_std", "eval/length_mean"


def save_document(path: str, text: str, *, force: bool = False) -> None:
    """Write a result's JSON document to a file; raise TargetExistsError if it exists, unless `force`."""
    write_file(path, text.encode() + b"\n", force=force)


def format_episode_table(scored: Sequence[ScoredCheckpoint]) -> str:
    """Return one line per episode under COLUMNS; an unknown step is empty, returns have full precision.

    Non-printable characters in names are escaped.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for scored_checkpoint in scored:
        one, played = scored_checkpoint.evaluation, scored_checkpoint.evaluation.rollout
        checkpoint, env = clean(urls.display_url(one.checkpoint)), clean(one.env)
        for seed, value, length, terminated, truncated in zip(
            played.seeds.tolist() or [None] * len(played.returns),
            played.returns.tolist(),
            played.lengths.tolist(),
            played.terminated.tolist(),
            played.truncated.tolist(),
            strict=True,
        ):
            ends = (int(terminated), int(truncated))
            rows.writerow((checkpoint, scored_checkpoint.step, env, seed, repr(value), length, *ends))
    return text.getvalue()


def save_table(path: str, scored: Sequence[ScoredCheckpoint], *, force: bool = False) -> None:
    """Write the table to a file; raise TargetExistsError if it exists, unless `force`."""
    write_file(path, format_episode_table(scored).encode(), force=force)


def encode_scalars(scored: Sequence[ScoredCheckpoint], wall_time: float) -> bytes:
    """Return an event file with each checkpoint's mean, deviation and length at its training step.

    If a checkpoint has no step, all are numbered from 0. `wall_time` is in seconds since 1970.
    """
    counted = any(score.step is None for score in scored)
    records = [protobuf.event_file_header(wall_time)]
    for number, score in enumerate(scored):
        result = score.evaluation.statistics
        values = {MEAN: result.mean, LENGTH: float(score.evaluation.rollout.lengths.mean())}
        if result.std is not None:
            values[STD] = result.std
        step = number if counted or score.step is None else score.step
        records.append(protobuf.summary_record(wall_time, step, values))
    return b"".join(records)


def require_folder(path: str) -> None:
    """Create a folder if missing; raise UsageError if it fails, to check before evaluation."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot create the folder: {error.strerror}", file=path) from error


def save_scalars(folder: str, scored: Sequence[ScoredCheckpoint], wall_time: float) -> str:
    """Write an event file into a folder, creating it if needed; return the file's name."""
    require_folder(folder)
    path = os.path.join(folder, f"{protobuf.NAME}{wall_time:.6f}.ckpttool")
    write_file(path, encode_scalars(scored, wall_time))
    return path
