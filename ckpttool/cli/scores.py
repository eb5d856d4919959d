"""What people read of evaluations: one report, or a row per checkpoint."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpttool import ledger, urls
from ckpttool.agents.reference_scores import reference
from ckpttool.cli.columns import beside, wrapped
from ckpttool.cli.tables import listed
from ckpttool.ops import training_step
from ckpttool.ops.evaluation import Evaluation
from ckpttool.ops.ranking import Best, Ranked, Scored, episodes_needed
from ckpttool.ops.sweep import Sweep
from ckpttool.shown import clean, count

_STEPS = {
    "name": "steps of the curve are the numbers in the files' names",
    "total_it": "steps of the curve are the updates that the checkpoints count (total_it)",
    "num_timesteps": "steps of the curve are environment steps (num_timesteps)",
    "global_step": "steps of the curve are environment steps (global_step)",
    "iter": "steps of the curve are iterations of training (iter)",
}


def sweep(found: Sweep, *, quiet: bool) -> str:
    """Return one report, or a row per checkpoint when there are several, and which one is best."""
    every = found.evaluations
    if len(every) == 1:
        said = [*_said(every[0]), *listed("note", found.notes)]
        trained = _trained(training_step.columns(found.scored[0].counts))
        return "\n".join([*_report(every[0]), *trained, *([] if quiet else map(wrapped, said))])
    lines = _table(found) if every else []
    if found.best is not None:
        lines += map(wrapped, _verdict(found, found.best))
    return "\n".join([*lines, *([] if quiet else _remarks(found))])


def _trained(counts: Mapping[str, int | None]) -> list[str]:
    """Return a line with what the checkpoint counts, each count by its name; none if it counts nothing."""
    shown = [f"{training_step.TITLES[name]} {n:,}" for name, n in counts.items() if n is not None]
    return [f"trained  {', '.join(shown)}"] if shown else []


def _table(found: Sweep) -> list[str]:
    places = {place.checkpoint: place for place in found.ranking}
    counts = [training_step.columns(each.counts) for each in found.scored]
    shown = [name for name in training_step.TITLES if any(each[name] is not None for each in counts)]
    if len(shown) > 1:
        # The names stand in the rows.
        shown = [name for name in shown if name != "in_name"]
    rows = [("rank", *(training_step.TITLES[n] for n in shown), "mean", "95 % CI", "IQM", "behind")]
    rows += [
        _row(each, places.get(each.evaluation.checkpoint), [own[name] for name in shown])
        for each, own in zip(found.scored, counts, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    paths = [
        "checkpoint",
        *(f"{clean(urls.spelled(e.checkpoint))}{_cut_short(e)}" for e in found.evaluations),
    ]
    starts = [" ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"{start}  {beside(path, len(start) + 2)}" for start, path in zip(starts, paths, strict=True)]


def _row(each: Scored, place: Ranked | None, counts: Sequence[int | None]) -> tuple[str, ...]:
    result = each.evaluation.statistics
    return (
        "-" if place is None else str(place.rank),
        *("-" if number is None else str(number) for number in counts),
        f"{result.mean:.1f}",
        "-" if result.ci95 is None else f"{result.ci95[0]:.1f} to {result.ci95[1]:.1f}",
        f"{result.iqm:.1f}",
        "-" if place is None or place.behind is None else f"{0.0 - place.behind.value:.1f}",
    )


def _verdict(found: Sweep, best: Best) -> list[str]:
    name = clean(urls.spelled(best.checkpoint))
    if best.certain:
        return [f"best     {name}: all others are lower (paired by seed, 95 % over all comparisons)"]
    episodes = min(each.statistics.n for each in found.evaluations)
    needed = episodes_needed(len(found.ranking) - 1)
    if episodes < needed:
        return [
            f"best     {name}, by the mean; {episodes} episodes are too few to be certain among "
            f"{len(found.ranking)} ({needed} are needed)"
        ]
    tied = sum(place.tied for place in found.ranking) - 1
    return [
        f"best     {name}, but {tied} of {count(len(found.ranking) - 1, 'other')} cannot be told from it "
        "(paired by seed, 95 % over all comparisons)"
    ]


def _remarks(found: Sweep) -> list[str]:
    """Return what was assumed and noted: once where it is the same for all."""
    every = found.evaluations
    said = [(each, line) for each in every for line in _said(each)]
    common = [line for line, n in Counter(line for _, line in said).items() if n == len(every)]
    own = [f"{clean(urls.spelled(e.checkpoint))}: {line}" for e, line in said if line not in common]
    source = () if found.step_from is None else (_STEPS.get(found.step_from, f"steps are {found.step_from}"),)
    resumed = (f"{found.resumed} of them were there already",) if found.resumed else ()
    return [wrapped(line) for line in [*common, *own, *listed("note", (*source, *resumed, *found.notes))]]


# Assumptions on the places of layers, which change every action where they are wrong.
_PLACES = re.compile("layer norms (stand )?before|no sums with")


def _report(one: Evaluation) -> list[str]:
    played, result = one.rollout, one.statistics
    lines = [f"{clean(urls.spelled(one.checkpoint))} in {clean(one.env)}"]
    unused = sum(entry.open for entry in one.ledger)
    if unused:
        facts = count(unused, "fact that changes the actions is", "facts that change the actions are")
        lines.append(f"NOT the return of the trained agent: {facts} not used or unknown (below)")
    lines += _conditions(one)
    if result.std is None or result.ci95 is None:
        lines.append(f"return   {result.mean:.2f} (one episode)")
    else:
        low, high = result.ci95
        lines += [
            f"return   {result.mean:.2f} +- {result.std:.2f} (mean, std of {result.n} episodes)",
            f"         95 % of the mean {low:.2f} to {high:.2f} (bootstrap over episodes)",
            f"         median {result.median:.2f}, IQM {result.iqm:.2f}, "
            f"{result.min:.2f} to {result.max:.2f}",
        ]
    lines += [
        *_normalized(one),
        f"length   {played.lengths.mean():.1f} steps; {int(played.terminated.sum())} terminated, "
        f"{int(played.truncated.sum())} truncated",
        f"speed    {played.steps_per_s:,.0f} steps/s ({count(played.steps, 'step')}, "
        f"{one.protocol.backend} on {one.device}, {played.num_envs} at once)",
        f"seeds    {_seeds(one)}, {_played_how(one)}",
    ]
    return [*lines, cut.strip()] if (cut := _cut_short(one)) else lines


def _seeds(one: Evaluation) -> str:
    played = one.rollout.seeds
    if not len(played):
        return f"{one.protocol.seed} for the simulator, none for its episodes"
    return f"{played[0]} to {played[-1]}"


def _played_how(one: Evaluation) -> str:
    how = one.protocol
    if how.noise is None:
        return f"deterministic {how.network}"
    return f"{how.network} with noise of {how.noise:g} half action ranges: not deterministic"


def _normalized(one: Evaluation) -> list[str]:
    known = reference(one.env)
    if known is None:
        return []
    value = known.normalized(one.statistics.mean)
    return [
        f"score    {value:.1f} normalised (D4RL: random {known.random:.1f} is 0, expert {known.expert:.1f} "
        f"is 100, in {known.env})"
    ]


def _cut_short(one: Evaluation) -> str:
    played = one.rollout
    if not played.interrupted:
        return ""
    wanted = count(played.episodes, "episode was", "episodes were")
    return f" {len(played.returns):,} of {wanted} finished (interrupted)"


def _said(one: Evaluation) -> list[str]:
    return [
        *map(clean, ledger.lines(one.ledger)),
        *listed("assumed", one.assumed),
        *_options(one),
        *listed("note", one.notes),
    ]


def _conditions(one: Evaluation) -> list[str]:
    """Return a line with what decides the actions and stands in no file, and the options that state it."""
    assumed = [each for each in one.ledger if each.use == "assumed"]
    decisive = {
        each.value: each.hint
        for each in assumed
        if each.hint or each.what == "custom code" or _PLACES.match(each.value)
    }
    if not decisive:
        return []
    options = ", ".join(dict.fromkeys(hint for hint in decisive.values() if hint))
    stated = f"; state others with {options}" if options else ""
    return [clean(f"ASSUMES {', '.join(decisive)} (in no file){stated}")]


def _options(one: Evaluation) -> list[str]:
    """Return lines with the options that use what is not used."""
    return list(dict.fromkeys(f"hint: {clean(e.hint)}" for e in one.ledger if e.open and e.hint))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
