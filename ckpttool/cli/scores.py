"""What people read of evaluations: one report, or a row per checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ckpttool.cli.output import clean
from ckpttool.cli.tables import listed
from ckpttool.ops.evaluation import Evaluation


def evaluations(found: Sequence[Evaluation], *, quiet: bool) -> str:
    """Return one report, or a row per checkpoint when there are several."""
    if len(found) == 1:
        return "\n".join([*_report(found[0]), *([] if quiet else _said(found[0]))])
    # The path comes last and whole: it is what people copy.
    lines = [f"{'mean':>10} {'std':>8} {'IQM':>10} {'episodes':>8}  checkpoint"]
    for each in found:
        result = each.statistics
        numbers = f"{result.mean:>10.1f} {_number(result.std):>8} {result.iqm:>10.1f} {result.n:>8}"
        lines.append(f"{numbers}  {clean(each.checkpoint)}{_cut_short(each)}")
    if not quiet:
        said = [(each, line) for each in found for line in _said(each)]
        common = [line for line, n in Counter(line for _, line in said).items() if n == len(found)]
        lines += common
        lines += [f"{clean(e.checkpoint)}: {line}" for e, line in said if line not in common]
    return "\n".join(lines)


def _report(one: Evaluation) -> list[str]:
    played, result = one.rollout, one.statistics
    lines = [f"{clean(one.checkpoint)} in {clean(one.env)}"]
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
        f"length   {played.lengths.mean():.1f} steps; {int(played.terminated.sum())} terminated, "
        f"{int(played.truncated.sum())} truncated",
        f"speed    {played.steps_per_s:,.0f} steps/s ({played.steps:,} steps, {one.protocol.backend} on "
        f"{one.device}, {played.num_envs} at once)",
        f"seeds    {played.seeds[0]} to {played.seeds[-1]}, deterministic {one.protocol.network}",
    ]
    return [*lines, cut.strip()] if (cut := _cut_short(one)) else lines


def _cut_short(one: Evaluation) -> str:
    played = one.rollout
    if not played.interrupted:
        return ""
    return f" {len(played.returns)} of {played.episodes} episodes were finished (interrupted)"


def _said(one: Evaluation) -> list[str]:
    return listed("assumed", one.assumed) + listed("note", one.notes)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
