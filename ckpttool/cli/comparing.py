"""What `eval` says of algorithms: training runs put together, two compared, and scores as files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool.agents.statistics import Estimate
from ckpttool.cli.tables import listed, with_joined_defaults
from ckpttool.ops import algorithms, score_files
from ckpttool.shown import clean

if TYPE_CHECKING:
    from ckpttool.ops.algorithms import Algorithm, Asked, Comparison
    from ckpttool.ops.sweep import Sweep


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options say: training runs of one algorithm, those of another, and files to write."""

    paths: tuple[str, ...]
    runs: tuple[Asked, ...] = ()
    against: tuple[Asked, ...] = ()
    last: int = 1
    csv: str | None = None
    tensorboard: str | None = None


@dataclass(slots=True)
class Told:
    """Keys for the JSON document, lines for people, and the mean that `--min-return` is compared with.

    `algorithms` are what a plot shows: ours, and the one that it is compared with.
    """

    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    mean: float | None = None
    algorithms: tuple[Algorithm, ...] = ()
    comparison: Comparison | None = None


def wanted(
    paths: Sequence[str],
    layout: str | None,
    *,
    runs: bool,
    last: int | None,
    against: Sequence[str],
    csv: str | None,
    tensorboard: str | None,
) -> Wanted:
    """Return what is to be played and told; raise before hours of playing, not after."""
    if csv is not None:
        score_files.require_new_result(csv)
    if tensorboard is not None:
        score_files.require_folder(tensorboard)
    if not (runs or last is not None or against):
        return Wanted(tuple(paths), csv=csv, tensorboard=tensorboard)
    count = last or 1
    ours, theirs = (algorithms.asked(side, count, layout) for side in (paths, against))
    played = tuple(path for each in (*ours, *theirs) for path in each.checkpoints)
    return Wanted(played, ours, theirs, count, csv, tensorboard)


def tell(wanted: Wanted, found: Sweep) -> Told:
    """Return what the finished evaluations say, and write the files that are wanted."""
    told = Told()
    _algorithms(wanted, found, told)
    if wanted.csv is not None and found.scored:
        score_files.save_table(wanted.csv, found.scored)
        told.lines.append(f"wrote {clean(wanted.csv)}")
    if wanted.tensorboard is not None and found.scored:
        path = score_files.save_scalars(wanted.tensorboard, found.scored, time.time())
        told.document["tensorboard"] = path
        told.lines.append(f"wrote {clean(path)}")
    return told


def _algorithms(wanted: Wanted, found: Sweep, told: Told) -> None:
    ours = algorithms.algorithm(wanted.runs, found.scored, wanted.last)
    if ours is None:
        return
    told.mean, told.algorithms = ours.mean.value, (ours,)
    told.document["runs"] = ours.document()
    told.lines += _described("runs", ours)
    theirs = algorithms.algorithm(wanted.against, found.scored, wanted.last)
    if theirs is None:
        return
    compared = algorithms.compare(ours, theirs)
    told.algorithms, told.comparison = (ours, theirs), compared
    told.document |= {"against": theirs.document(), "comparison": compared.document()}
    told.lines += [*_described("against", theirs), *_compared(compared)]


def _described(title: str, one: Algorithm) -> list[str]:
    count = len(one.runs)
    what = f"{count} training runs" if count > 1 else clean(one.runs[0].path)
    what += f", last {one.last} checkpoints of each" if one.last > 1 else ""
    lines = [
        f"{title:<8} {what}",
        f"         mean {_estimate(one.mean)} (bootstrap over {one.over})",
        f"         IQM {_estimate(one.iqm)}",
    ]
    if count > 1:
        lines += [f"         {run.score:>10.2f}  {clean(run.path)}" for run in one.runs]
    return lines + listed("note", with_joined_defaults(one.notes))


def _compared(found: Comparison) -> list[str]:
    alone = found.over == algorithms.EPISODES
    unit = "an episode" if alone else "a run"
    return [
        f"difference of means {_estimate(found.difference)} (bootstrap over {found.over})",
        f"probability of improvement {_estimate(found.probability)} (of {unit})",
        *(["note: one training run each: other runs may differ otherwise"] if alone else []),
    ]


def _estimate(one: Estimate) -> str:
    if one.ci95 is None:
        return f"{one.value:.2f}"
    return f"{one.value:.2f}, 95 % {one.ci95[0]:.2f} to {one.ci95[1]:.2f}"
