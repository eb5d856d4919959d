"""Evaluate and rank many checkpoints."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, cast

from ckpttool.core import plugins
from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import (
    CkpttoolError,
    MissingExtraError,
    NotACheckpointError,
    UnsupportedError,
    UsageError,
)
from ckpttool.core.text import describe_record, format_count, render_record
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.gymnasium_engine import EnvSpec
from ckpttool.evaluation.playing import (
    EvaluationOptions,
    collect_versions,
    prepare_agent,
    repeat_statistics,
    require_backend,
)
from ckpttool.evaluation.protocol import Evaluation, EvaluationEnvironment, EvaluationFailure, Protocol
from ckpttool.evaluation.ranking import (
    BestCheckpoint,
    LearningCurvePoint,
    RankingRow,
    ScoredCheckpoint,
    build_learning_curve,
    find_best,
    rank_checkpoints,
)
from ckpttool.evaluation.restore import (
    Agent,
    build_agent,
    no_agent_error,
    read_verified_sidecar,
    recognize_playable_agent,
)
from ckpttool.evaluation.results_file import EvaluationJob, ResultsFile, evaluation_key, hash_policy
from ckpttool.evaluation.scheduling import (
    BatchResult,
    EvaluationBatch,
    Spread,
    max_batch_policies,
    play_in_process,
)
from ckpttool.libraries.recognize import recognize_checkpoint
from ckpttool.listing import training_counters
from ckpttool.listing.paths import CheckpointEntry, expand_paths
from ckpttool.networks.network import Backend


class RequestError(Exception):
    """Wraps an error that every checkpoint would cause, such as an unknown environment."""

    def __init__(self, error: CkpttoolError) -> None:
        super().__init__(str(error))
        self.error = error


class JobFactory:
    """Restores a request's checkpoints and caches what they share."""

    def __init__(self, options: EvaluationOptions) -> None:
        require_backend(options.protocol)
        self.options, self._how = options, options.protocol
        self._backend = cast(Backend, plugins.find("backends", self._how.backend).load())
        self._specs: dict[EvaluationEnvironment, EnvSpec] = {}
        self._layouts: dict[Hashable, str] = {}

    def job(self, number: int, entry: CheckpointEntry, *, alone: bool = False) -> EvaluationJob | None:
        """Return the entry's job; None if it contains no policy and was not named as one.

        `alone` also accepts a policy that no layout recognises, from an entry that is not named. Raise
        RequestError for an invalid request, CkpttoolError for an invalid checkpoint.
        """
        checkpoint = entry.open()
        agent = self._agent(checkpoint, named=entry.named, alone=alone)
        if agent is None and entry.named:
            raise no_agent_error(checkpoint)
        if agent is None or not (entry.named or agent.binding.policy):
            return None
        environment = self.options.environment(agent)
        spec = self._spec(environment)
        playable = prepare_agent(agent, environment, self._how, spec)
        versions = collect_versions(self._backend, spec)
        policy = hash_policy(playable.network)
        key = evaluation_key(policy, environment.identity, self._how, versions)
        return EvaluationJob(number, playable, key, training_counters.steps_by_source(agent), versions)

    def _agent(self, checkpoint: Checkpoint, *, named: bool, alone: bool) -> Agent | None:
        """Return the checkpoint as an agent; one similar to its predecessor has the same layout."""
        looks = tuple(
            (name, getattr(checkpoint.tree[path], "shape", None))
            for path, name in checkpoint.tree.names.items()
        )
        layout = self.options.layout or self._layouts.get(looks)
        binding = recognize_checkpoint(checkpoint, layout)
        # Among agents, a model that no layout recognises is used as a policy only on request.
        if binding is None and (named or alone or self.options.facts):
            with nullcontext() if named else suppress(UsageError, UnsupportedError):
                binding = recognize_playable_agent(checkpoint, layout, self._how.network)
        if binding is None:
            return None
        self._layouts[looks] = binding.layout
        agent = build_agent(checkpoint, binding, read_verified_sidecar(checkpoint), self.options.facts)
        return repeat_statistics(agent, self._how)

    def _spec(self, environment: EvaluationEnvironment) -> EnvSpec:
        """Return the environment constraints on an agent there."""
        if environment not in self._specs:
            try:
                with environment.make(1, self._how.engine, device=self._how.device) as one:
                    self._specs[environment] = one.spec
            except (UsageError, MissingExtraError) as error:
                if environment.trusted:
                    raise RequestError(error) from None
                raise
        return self._specs[environment]


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Results for several checkpoints, in the order in which they were named.

    `step_from` is the source of all training steps: a counter's canonical name, or "name" for the file
    names. `resumed` counts the results left by an earlier run, `notes` lists what was skipped.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    scored: tuple[ScoredCheckpoint, ...]
    failed: tuple[EvaluationFailure, ...]
    curve: tuple[LearningCurvePoint, ...]
    ranking: tuple[RankingRow, ...]
    best: BestCheckpoint | None
    step_from: str | None
    notes: tuple[str, ...]
    resumed: int = 0
    interrupted: bool = False
    alone: bool = False
    """whether a user named exactly one checkpoint; its evaluation is then the whole result"""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """The evaluations alone."""
        return tuple(checkpoint.evaluation for checkpoint in self.scored)

    @property
    def highest(self) -> Evaluation:
        """The evaluation with the highest mean that is a number, if any is."""
        known = [evaluation for evaluation in self.evaluations if not math.isnan(evaluation.statistics.mean)]
        return max(known or self.evaluations, key=lambda evaluation: evaluation.statistics.mean)

    @property
    def best_first(self) -> tuple[ScoredCheckpoint, ...]:
        """The scored checkpoints in the order of the ranking; as they were named, if nothing is ranked."""
        ranks = {row.checkpoint: row.rank for row in self.ranking}
        return tuple(sorted(self.scored, key=lambda saved: ranks.get(saved.evaluation.checkpoint, 0)))

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "evaluations": [
                {
                    **checkpoint.evaluation.document(),
                    "step": checkpoint.step,
                    **training_counters.step_columns(checkpoint.counts),
                }
                for checkpoint in self.scored
            ],
            "ranking": [row.document() for row in self.ranking],
            "best": None if self.best is None else self.best.document(),
            "curve": [point.document() for point in self.curve],
            "step_from": self.step_from,
            "failed": [failure.document() for failure in self.failed],
            "resumed": self.resumed,
            "interrupted": self.interrupted,
            "notes": list(self.notes),
        }


def sweep(
    paths: str | Sequence[str],
    env: str | None = None,
    protocol: Protocol | None = None,
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    out: str | None = None,
    spread: Spread = play_in_process,
    progress: Progress = ignore_progress,
) -> Sweep:
    """Play every checkpoint that the paths stand for (see expand_paths), and compare them.

    Checkpoints that cannot be played are reported, and the others are played. Ctrl-C keeps finished
    results; without any, it is passed on. Raise NotFoundError for a pattern without a match,
    NotACheckpointError if there is no agent, UsageError for an environment that cannot be created, and the
    errors of `ResultsFile`.

    Args:
        paths: checkpoints, folders and patterns; a text is one of them.
        env: a Gymnasium id; None for that of each checkpoint.
        protocol: episodes, seeds, device and how to play; None for the defaults.
        layout: the layout, if it is not to be recognised.
        facts: facts that none of the files contains.
        out: a JSON Lines file that gets each result as it finishes; results already in it are not played
            again.
        spread: where to play (play_in_process, process_spread, ray_spread): the returns are the same.
        progress: called with the finished and the total amount of work.

    >>> import ckpttool
    >>> protocol = ckpttool.Protocol(episodes=2)
    >>> played = ckpttool.sweep(["sample_ckpts/td3_pendulum_torch"], "Pendulum-v1", protocol)
    >>> len(played.evaluations), played.failed
    (6, ())
    """
    paths = [paths] if isinstance(paths, str) else paths
    options = EvaluationOptions(env, protocol or Protocol(), layout, facts)
    requested = expand_paths(paths)
    with ResultsFile(out) if out is not None else nullcontext() as kept:
        run = _SweepState(requested, JobFactory(options), options.protocol, kept, progress)
        interrupted = False
        try:
            for batch, result in spread(run.batches(), run.within):
                run.take(batch, result)
                if any(isinstance(e, Evaluation) and e.rollout.interrupted for e in result.values()):
                    interrupted = True
                    break
        except KeyboardInterrupt:
            if not run.results:
                raise
            interrupted = True
        if not (interrupted or run.results or run.failed):
            first = next((entry.path for entry in requested), None)
            if len(requested) == 1:  # restoring it as if it was named raises the reason
                run.jobs.job(0, replace(requested[0], named=True))
            raise NotACheckpointError(
                "no agent to play",
                file=", ".join(paths),
                hint=None
                if first is None
                else f"to see why, run it on one checkpoint: ckpttool eval {first}",
            )
        return run.result(interrupted=interrupted)


class _SweepState:
    """State of a running sweep."""

    def __init__(
        self,
        requested: Sequence[CheckpointEntry],
        jobs: JobFactory,
        how: Protocol,
        kept: ResultsFile | None,
        progress: Progress,
    ) -> None:
        self.requested, self.how, self.kept, self.progress = requested, how, kept, progress
        self.jobs = jobs
        self.results: dict[int, Evaluation] = {}
        self.steps: dict[int, Mapping[str, int]] = {}
        self.failed: dict[int, CkpttoolError] = {}
        self.passed: list[str] = []
        self.resumed = 0
        self._pending: dict[int, list[EvaluationJob]] = {}
        self._played = 0

    def batches(self) -> Iterator[EvaluationBatch]:
        """Yield remaining work, each batch as soon as its checkpoints are restored."""
        waiting: dict[Hashable, list[EvaluationJob]] = {}
        for job in self._agent_jobs():
            together = waiting.setdefault(job.alike, [])
            together.append(job)
            if len(together) == max_batch_policies(self.how):
                yield from self._batch(together)
                together.clear()
        for together in waiting.values():
            if together:
                yield from self._batch(together)

    def _agent_jobs(self) -> Iterator[EvaluationJob]:
        """Yield jobs of agents; if there are none, jobs of policies that no layout recognises."""
        agents = False
        for job in self._restored_jobs(alone=False):
            agents = True
            yield job
        if not (agents or self.failed):
            self.passed.clear()
            yield from self._restored_jobs(alone=True)

    def _restored_jobs(self, *, alone: bool) -> Iterator[EvaluationJob]:
        """Yield jobs of restorable entries, and record the others."""
        for number, entry in enumerate(self.requested):
            try:
                job = self.jobs.job(number, entry, alone=alone)
            except RequestError as error:
                raise error.error from None
            except CkpttoolError as error:
                self.failed[number] = error.located(file=entry.path)
                continue
            if job is None:
                self.passed.append(f"{entry.path} contains no policy and was skipped")
                continue
            self.steps[number] = job.steps
            yield job

    def within(self, done: int, total: int, steps: int | None = None) -> None:  # noqa: ARG002 - Progress's
        """Report overall progress, from the progress of the batch being played."""
        every = len(self.requested) * self.how.episodes
        before = (len(self.results) + len(self.failed) + len(self.passed)) * self.how.episodes
        self.progress(min(before + done, every), every, None if steps is None else self._played + steps)

    def take(self, batch: EvaluationBatch, results: BatchResult) -> None:
        """Record a batch's results."""
        finished = []
        for job in self._pending.pop(batch.number):
            result = results.get(job.agent.checkpoint)
            if isinstance(result, Evaluation) and result.versions != job.versions:
                result = job.version_error(result)
            if isinstance(result, CkpttoolError):
                self.failed[job.number] = result
            elif result is not None and job.number not in self.results:
                self.results[job.number] = result
                self._played += result.rollout.steps
                if not result.rollout.interrupted:
                    finished.append((job.key, job.steps, result))
        if self.kept is not None:
            self.kept.add(finished)
        self.within(0, 0, 0)

    def result(self, *, interrupted: bool) -> Sweep:
        """Return the record of all results."""
        numbers = sorted(self.results)
        source = training_counters.most_common_source([self.steps[number] for number in numbers])
        scored = tuple(
            ScoredCheckpoint(
                replace(self.results[n], options=self.jobs.options),
                self.steps[n].get(source) if source is not None else None,
                self.steps[n],
            )
            for n in numbers
        )
        failed = tuple(EvaluationFailure(self.requested[n].path, self.failed[n]) for n in sorted(self.failed))
        places = rank_checkpoints(scored)
        alone = len(self.requested) == 1 and self.requested[0].named and bool(scored)
        if interrupted and not alone:
            requested = format_count(len(self.requested), "checkpoint was", "checkpoints were")
            self.passed.append(f"interrupted: {len(scored):,} of {requested} played")
        return Sweep(
            scored,
            failed,
            build_learning_curve(scored),
            places,
            find_best(places),
            source,
            tuple(self.passed),
            self.resumed,
            interrupted,
            alone=alone,
        )

    def _batch(self, jobs: Sequence[EvaluationJob]) -> Iterator[EvaluationBatch]:
        """Yield the batch of these jobs, unless an earlier run finished all of it.

        A batch is always played completely: its size affects rounding. Existing results of a batch that is
        played again stay unchanged.
        """
        missing = 0
        for job in jobs:
            known = None if self.kept is None else self.kept.find(job.key, self.how)
            if known is None:
                missing += 1
                continue
            self.results[job.number] = replace(
                known, checkpoint=job.agent.checkpoint, ledger=job.agent.ledger
            )
            self.resumed += 1
        if missing:
            number = jobs[0].number
            self._pending[number] = list(jobs)
            yield EvaluationBatch(number, tuple(job.agent for job in jobs), self.how)
