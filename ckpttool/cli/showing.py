"""What `eval` shows besides numbers: a film, a plot in a file, a small plot in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpttool import urls
from ckpttool.cli import output, plots
from ckpttool.cli.progress import progress
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.film import Film
from ckpttool.ops.sweep import Sweep
from ckpttool.shown import clean


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be shown: files to write, episodes to film, and whether to draw in the terminal.

    `chart` None means where a person reads.
    """

    video: str | None = None
    episodes: tuple[str, ...] = ("0",)
    plot: str | None = None
    chart: bool | None = None


@dataclass(slots=True)
class Shown:
    """What was written: keys for the JSON document, lines for people, and why something is missing."""

    document: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    failures: list[CkpttoolError] = field(default_factory=list)
    interrupted: bool = False


def wanted(video: str | None, episodes: str, plot: str | None, *, chart: bool | None) -> Wanted:
    """Return what the options say; `episodes` is a list with commas."""
    words = tuple(word.strip() for word in episodes.split(",") if word.strip())
    if not words:
        raise UsageError("--video-episodes names none", hint="best,worst or numbers from 0")
    if words != ("0",) and video is None:
        raise UsageError("--video-episodes is for --video alone")
    return Wanted(video, words, plot, chart)


def require(
    wanted: Wanted,
    paths: Sequence[str],
    env: str | None,
    how: Protocol,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
) -> None:
    """Raise unless all of it can be shown: before hours of playing, not after."""
    if wanted.plot is not None:
        plots.require(wanted.plot)
    if wanted.video is not None:
        from ckpttool.ops import film

        film.require(paths, env, how, wanted.video, wanted.episodes, layout=layout, facts=facts)


def show(
    wanted: Wanted,
    found: Sweep,
    env: str | None,
    layout: str | None,
    drawn: plots.Drawn,
    *,
    facts: AgentFacts = NO_FACTS,
    quiet: bool,
    as_json: bool,
) -> Shown:
    """Draw in the terminal, then write the files that are wanted.

    What fails is in the answer and is not raised: the numbers are there already.
    """
    shown = Shown()
    if not found.scored:
        return shown
    if not as_json and (wanted.chart or (wanted.chart is None and sys.stdout.isatty() and not quiet)):
        from ckpttool.cli import terminal_plots

        # Points of different runs make no one curve.
        curve = () if drawn.algorithms else found.curve
        if lines := terminal_plots.chart(found.evaluations, curve, drawn.unit):
            output.write("\n".join(lines))
    try:
        if wanted.plot is not None:
            plots.write(wanted.plot, *drawn)
            shown.document["plot"] = wanted.plot
            shown.lines.append(f"wrote {clean(wanted.plot)}")
        if wanted.video is not None and found.interrupted:
            shown.lines.append("note: nothing is filmed of a play that was interrupted")
        elif wanted.video is not None:
            filmed = _film(
                wanted.video, wanted.episodes, found, env, layout, facts=facts, quiet=quiet or as_json
            )
            shown.document["video"] = filmed.document()
            shown.lines += _said(filmed, alone=len(found.scored) == 1, quiet=quiet)
    except CkpttoolError as error:
        shown.failures.append(error)
    except KeyboardInterrupt:
        shown.interrupted = True
    return shown


def _film(
    target: str,
    episodes: tuple[str, ...],
    found: Sweep,
    env: str | None,
    layout: str | None,
    *,
    facts: AgentFacts,
    quiet: bool,
) -> Film:
    """Film the checkpoint of the highest mean."""
    from ckpttool.ops import film

    best: Evaluation = max(found.evaluations, key=lambda each: each.statistics.mean)
    with progress("video", quiet=quiet, unit="pictures") as moving:
        return film.film(best, target, episodes, env=env, layout=layout, facts=facts, progress=moving)


def _said(filmed: Film, *, alone: bool, quiet: bool) -> list[str]:
    of = "" if alone else f" of {clean(urls.spelled(filmed.checkpoint))}"
    lines = []
    for take in filmed.takes:
        words = f" ({', '.join(take.wanted)})" if take.wanted else ""
        lines.append(
            f"filmed   episode {take.episode}{words}{of}: return {take.paid:.2f}, {take.steps} steps"
        )
        if not (take.equal or quiet):
            lines.append(
                f"note: its return was {take.scored:.2f} where it was scored, stacked or by another engine"
            )
    return [*lines, f"wrote {clean(filmed.file)} ({filmed.frames} pictures, {filmed.fps:g} per second)"]
