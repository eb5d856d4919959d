"""Many checkpoints at once: all on shared seeds, stacked where they fit, ranked, and resumed by a rerun."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from ckpttool import urls
from ckpttool.errors import CkpttoolError, NotACheckpointError, WorkerError
from ckpttool.ops import ranking, training_step
from ckpttool.ops.agent_facts import NO_FACTS, AgentFacts
from ckpttool.ops.entries import Entry, entries
from ckpttool.ops.evaluation import Evaluation, Protocol
from ckpttool.ops.groups import Group, Outcome, Spread, here, size
from ckpttool.ops.progress import Progress, silent
from ckpttool.ops.ranking import Best, Point, Ranked, Scored
from ckpttool.ops.results import Results
from ckpttool.ops.seating import RequestError, Seat, Seating
from ckpttool.shown import count


@dataclass(frozen=True, slots=True)
class Failed:
    """A checkpoint that could not be played, and why."""

    checkpoint: str
    error: CkpttoolError

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "checkpoint": urls.spelled(self.checkpoint),
            "kind": self.error.kind,
            "message": str(self.error),
            "hint": self.error.hint,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """What came of several checkpoints, in the order in which they were named.

    `step_from` is what all training steps were read from: a counter's canonical name, or "name" for the
    files' names. `resumed` counts the results that an earlier run had left, `notes` tells of what was passed
    over.
    """

    scored: tuple[Scored, ...]
    failed: tuple[Failed, ...]
    curve: tuple[Point, ...]
    ranking: tuple[Ranked, ...]
    best: Best | None
    step_from: str | None
    notes: tuple[str, ...]
    resumed: int = 0
    interrupted: bool = False
    alone: bool = False
    """whether a person named one checkpoint and no more: then its evaluation is all there is to say"""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The evaluations alone."""
        return tuple(each.evaluation for each in self.scored)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "evaluations": [
                {**each.evaluation.document(), "step": each.step, **training_step.columns(each.counts)}
                for each in self.scored
            ],
            "ranking": [each.document() for each in self.ranking],
            "best": None if self.best is None else self.best.document(),
            "curve": [point.document() for point in self.curve],
            "step_from": self.step_from,
            "failed": [each.document() for each in self.failed],
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
        }


def sweep(
    paths: Sequence[str],
    env: str | None = None,
    protocol: Protocol | None = None,
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    out: str | None = None,
    spread: Spread = here,
    progress: Progress = silent,
) -> Sweep:
    """Play every checkpoint that the paths stand for (see entries.entries), and compare them.

    `facts` are what no file of theirs holds. `out` is a file of lines that gets every result when it is
    there; what it has already is not played again. `spread` says who plays (groups.here, processes.on,
    ray_cluster.on): the returns are the same. Checkpoints that cannot be played are reported, and the
    others are played. Ctrl-C keeps what is finished; with nothing finished it passes on. Raise
    NotFoundError for a pattern without a match, NotACheckpointError if there is no agent anywhere,
    UsageError for an environment that cannot be made, and what `Results` raises.
    """
    asked = entries(paths)
    with Results(out) if out is not None else nullcontext() as kept:
        run = _Run(
            asked, Seating(env, protocol or Protocol(), layout, facts), protocol or Protocol(), kept, progress
        )
        interrupted = False
        try:
            for group, outcome in spread(run.groups(), run.within):
                run.take(group, outcome)
                if any(isinstance(e, Evaluation) and e.rollout.interrupted for e in outcome.values()):
                    interrupted = True
                    break
        except KeyboardInterrupt:
            if not run.found:
                raise
            interrupted = True
        if not (interrupted or run.found or run.failed):
            first = next((entry.path for entry in asked), None)
            raise NotACheckpointError(
                "there is no agent to play",
                file=", ".join(paths),
                hint=None if first is None else f"for the reason, name one checkpoint: ckpttool eval {first}",
            )
        return run.result(interrupted=interrupted)


class _Run:
    """What is known while a sweep goes on."""

    def __init__(
        self,
        asked: Sequence[Entry],
        seating: Seating,
        how: Protocol,
        kept: Results | None,
        progress: Progress,
    ) -> None:
        self.asked, self.how, self.kept, self.progress = asked, how, kept, progress
        self.seating = seating
        self.found: dict[int, Evaluation] = {}
        self.steps: dict[int, Mapping[str, int]] = {}
        self.failed: dict[int, CkpttoolError] = {}
        self.passed: list[str] = []
        self.resumed = 0
        self._seats: dict[int, list[Seat]] = {}
        self._played = 0

    def groups(self) -> Iterator[Group]:
        """Yield the work that is left, each group as soon as its checkpoints have been restored."""
        waiting: dict[Hashable, list[Seat]] = {}
        for seat in self._restored():
            together = waiting.setdefault(seat.alike, [])
            together.append(seat)
            if len(together) == size(self.how):
                yield from self._group(together)
                together.clear()
        for together in waiting.values():
            if together:
                yield from self._group(together)

    def _restored(self) -> Iterator[Seat]:
        """Yield the seats of agents; where there is none, those of policies that no layout names."""
        agents = False
        for seat in self._seated(alone=False):
            agents = True
            yield seat
        if not (agents or self.failed):
            self.passed.clear()
            yield from self._seated(alone=True)

    def _seated(self, *, alone: bool) -> Iterator[Seat]:
        """Yield the seats of those that can be restored, and write down the others."""
        for number, entry in enumerate(self.asked):
            try:
                seat = self.seating.seat(number, entry, alone=alone)
            except RequestError as error:
                raise error.error from None
            except CkpttoolError as error:
                self.failed[number] = error.located(file=entry.path)
                continue
            if seat is None:
                self.passed.append(f"{entry.path} holds no policy and was passed over")
                continue
            self.steps[number] = seat.steps
            yield seat

    def within(self, done: int, total: int, steps: int | None = None) -> None:  # noqa: ARG002 - Progress's
        """Tell how far the whole is, from how far the group is that is being played."""
        every = len(self.asked) * self.how.episodes
        before = (len(self.found) + len(self.failed) + len(self.passed)) * self.how.episodes
        self.progress(min(before + done, every), every, None if steps is None else self._played + steps)

    def take(self, group: Group, outcome: Outcome) -> None:
        """Keep what came of a group, and write it down."""
        finished = []
        for seat in self._seats.pop(group.number):
            result = outcome.get(seat.entrant.checkpoint)
            if isinstance(result, Evaluation) and result.versions != seat.versions:
                result = _other_versions(seat, result)
            if isinstance(result, CkpttoolError):
                self.failed[seat.number] = result
            elif result is not None and seat.number not in self.found:
                self.found[seat.number] = result
                self._played += result.rollout.steps
                if not result.rollout.interrupted:
                    finished.append((seat.key, seat.steps, result))
        if self.kept is not None:
            self.kept.add(finished)
        self.within(0, 0, 0)

    def result(self, *, interrupted: bool) -> Sweep:
        """Return the record of all that was found."""
        numbers = sorted(self.found)
        source = training_step.common([self.steps[number] for number in numbers])
        scored = tuple(
            Scored(self.found[n], self.steps[n].get(source) if source is not None else None, self.steps[n])
            for n in numbers
        )
        failed = tuple(Failed(self.asked[n].path, self.failed[n]) for n in sorted(self.failed))
        places = ranking.ranking(scored)
        alone = len(self.asked) == 1 and self.asked[0].named and bool(scored)
        if interrupted and not alone:
            asked = count(len(self.asked), "checkpoint was", "checkpoints were")
            self.passed.append(f"interrupted: {len(scored):,} of {asked} played")
        return Sweep(
            scored,
            failed,
            ranking.curve(scored),
            places,
            ranking.best(places),
            source,
            tuple(self.passed),
            self.resumed,
            interrupted,
            alone=alone,
        )

    def _group(self, seats: Sequence[Seat]) -> Iterator[Group]:
        """Yield the seats' group, unless an earlier run has finished all of it.

        A group is played as a whole or not at all: its size is part of how its products round. What is known
        of a group that is played again stays as it is.
        """
        missing = 0
        for seat in seats:
            known = None if self.kept is None else self.kept.find(seat.key, self.how)
            if known is None:
                missing += 1
                continue
            self.found[seat.number] = replace(
                known, checkpoint=seat.entrant.checkpoint, ledger=seat.entrant.ledger
            )
            self.resumed += 1
        if missing:
            number = seats[0].number
            self._seats[number] = list(seats)
            yield Group(number, tuple(seat.entrant for seat in seats), self.how)


def _other_versions(seat: Seat, result: Evaluation) -> WorkerError:
    """Return the error that a machine of a cluster computes with something else than this one."""
    differ = [name for name, version in seat.versions.items() if result.versions.get(name) != version]
    return WorkerError(
        "it was played with other versions than are here",
        file=seat.entrant.checkpoint,
        expected=", ".join(f"{name} {seat.versions[name]}" for name in differ),
        found=", ".join(f"{name} {result.versions.get(name)}" for name in differ),
    )
