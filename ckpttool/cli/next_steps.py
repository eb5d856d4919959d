"""Suggested next commands with the paths just used, printed where `console.suggests_commands` permits it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.cli.console import print_text
from ckpttool.cli.panels import given_options
from ckpttool.cli.styles import dim, wrap_command
from ckpttool.core import sidecar, urls
from ckpttool.core.errors import CkpttoolError, MissingExtraError

if TYPE_CHECKING:
    from ckpttool.cli.evaluate import PlayOptions
    from ckpttool.commands.diff import Diff
    from ckpttool.commands.doctor import Diagnosis
    from ckpttool.commands.inspect import CheckpointFolder
    from ckpttool.commands.stats import Stats
    from ckpttool.commands.sweep import Sweep
    from ckpttool.commands.verify import Verification
    from ckpttool.conversion.plan import ConversionResult
    from ckpttool.listing.contents import CheckpointSummary


# Arguments of a few commands, without the program's name.
Steps = list[tuple[str, ...]]
# Checkpoints of one framework are most often converted to the other one.
_TENSORFLOW = ("tensor_bundle", "tensorflow_v1", "saved_model", "keras_h5", "keras_zip", "keras_rl")


def print_next_steps(steps: Steps) -> None:
    """Print suggested commands."""
    for command in format_next_steps(steps):
        print_text(command)


def format_next_steps(steps: Steps) -> list[str]:
    """Return suggested commands in the terminal's lines."""
    from ckpttool.core.installation import program_words

    return [dim(wrap_command("next: ", (*program_words(), *words))) for words in steps]


def after_inspect(listing: CheckpointSummary | CheckpointFolder) -> Steps:
    """Suggest commands for an agent, or for a model that is not one."""
    from ckpttool.listing.contents import CheckpointSummary

    if not isinstance(listing, CheckpointSummary):
        return []
    path = urls.display_url(listing.checkpoint.path)
    if urls.is_copy(listing.checkpoint.path):
        return []
    if listing.layout is None:
        return [
            *_audit_command(listing, path),
            *([("stats", path), ("doctor", path)] if listing.tensors else []),
        ]
    tensorflow = listing.checkpoint.format in _TENSORFLOW
    other = (urls.unused_name("agent.pt"),) if tensorflow else (urls.unused_name("ckpt-1"), "--to", "tf")
    return [("convert", path, *other), *([_eval_command(path, listing)] if _may_play(listing) else [])]


def _may_play(summary: CheckpointSummary) -> bool:
    """Return whether the agent has a policy that is played."""
    if summary.binding is None:
        return True
    discrete = any("discrete" in sentence for sentence in summary.binding.unplaced.get("actor", ()))
    return not discrete and any(part.acts for part in summary.binding.parts)


def _audit_command(summary: CheckpointSummary, path: str) -> Steps:
    """Suggest the list of what loading would run, unless it is shown already."""
    from ckpttool.core.code_references import UNSAFE, worst_verdict

    runs = worst_verdict(summary.checkpoint.code_references) in UNSAFE
    return [("inspect", path, "--names")] if runs and "--names" not in sys.argv else []


def after_overview(listing: CheckpointSummary | CheckpointFolder, diagnosis: Diagnosis) -> Steps:
    """Suggest what `inspect` suggests, except `doctor`, which has run, and `eval` where it was refused."""
    refused = any(finding.topic == "environment" and finding.fix for finding in diagnosis.findings)
    steps = [step for step in after_inspect(listing) if not (refused and step[0] == "eval")]
    return [("report", *step[1:]) if step[0] == "doctor" else step for step in steps]


def after_stats(path: str, statistics: Stats) -> Steps:
    """Suggest `doctor` if the values look unhealthy."""
    bad = not statistics.finite or any(tensor.signs for tensor in statistics.tensors)
    return [("doctor", path)] if bad else []


def after_diff(left: str, right: str, diff: Diff) -> Steps:
    """Suggest checking whether two different agents still act alike."""
    agents = None not in diff.layouts
    return [("verify", left, right)] if agents and not diff.identical and not diff.resized else []


def after_doctor(path: str, diagnosis: Diagnosis) -> Steps:
    """Suggest evaluating a healthy agent."""
    if diagnosis.layout is None or diagnosis.findings:
        return []
    if any(entry.what == "environment" and entry.use == "used" and entry.where for entry in diagnosis.ledger):
        return [("eval", path)]
    return [_eval_command(path)]


def after_convert(result: ConversionResult) -> Steps:
    """Suggest the same command without --dry-run, or verifying and evaluating the written agent."""
    if result.written:
        played = [("verify", result.source, result.target), _eval_command(result.target)]
        return (
            played if result.parity and not result.target.endswith(".onnx") else [("inspect", result.target)]
        )
    words = sys.argv[1:]
    if "--dry-run" not in words or not result.report.complete:
        return []
    if "--glob" in words:
        at = words.index("--glob")
        del words[at : at + 2]
    return [tuple(word for word in words if word != "--dry-run" and not word.startswith("--glob="))]


def after_verify(second: str, verification: Verification) -> Steps:
    """Suggest evaluating the verified agent."""
    return [_eval_command(second)] if verification.within and verification.models is None else []


def after_eval(
    sweep: Sweep, paths: Sequence[str], options: Sequence[str], play: PlayOptions, filmed: bool
) -> Steps:
    """Suggest playing the best of several and its rivals longer, the best alone, or recording a video.

    New seeds do not favor the best of these episodes.

    Args:
        sweep: the results.
        paths: the checkpoints as the user named them.
        options: the options of the environment and the agent, to repeat.
        play: how they were played.
        filmed: whether a video was recorded.
    """
    from ckpttool.evaluation.ranking import decisive_episodes

    if sweep.best is None:
        played = replace(play, episodes=type(play).episodes)
        return [
            (
                "eval",
                urls.display_url(evaluation.checkpoint),
                *options,
                *given_options(played),
                "--video",
                urls.unused_name("agent.mp4"),
            )
            for evaluation in sweep.evaluations[:1]
            if not filmed and _can_film()
        ]
    rivals = [row for row in sweep.ranking if row.tied]
    episodes = decisive_episodes(rivals)
    if episodes is None:
        rivals, episodes = rivals[:1], 100
    names = [urls.display_url(rival.checkpoint) for rival in rivals]
    if len(rivals) == len(sweep.ranking) and not sweep.failed:
        names = [*paths]
    played = replace(play, episodes=episodes, seed=(play.seed + play.episodes) % 2**32)
    return [("eval", *names, *options, *given_options(played))]


def _can_film() -> bool:
    """Return whether what encodes a video is installed."""
    from ckpttool.evaluation.video import require_encoder

    with contextlib.suppress(MissingExtraError):
        require_encoder()
        return True
    return False


def _eval_command(path: str, summary: CheckpointSummary | None = None) -> tuple[str, ...]:
    """Return the command that plays an agent, with its environment if neither file nor sidecar names it."""
    if summary is not None and summary.binding is not None and summary.binding.facts.env:
        return "eval", path
    # Do not download anything for a suggestion.
    recorded = None
    if not urls.is_url(path):
        with contextlib.suppress(CkpttoolError):
            recorded = sidecar.load_sidecar(path)
    if recorded is not None and recorded.env:
        return "eval", path
    if summary is not None and summary.layout == "stable_baselines3" and not urls.is_elsewhere(path):
        from ckpttool.libraries.sb3 import names_environment

        if names_environment(path):
            return "eval", path
    return "eval", path, "--env", _infer_environment(summary) or "ID"


def _infer_environment(summary: CheckpointSummary | None) -> str | None:
    """Return the only environment that fits the path and the sizes of an agent; None for none or several."""
    from ckpttool.listing.dataflow import build_listed_strips, find_policy_sizes

    if summary is None:
        return None
    sizes = find_policy_sizes(build_listed_strips(summary.binding, summary.checkpoint.tree))
    if sizes is None or summary.binding is None:
        return None
    from ckpttool.evaluation.environments import candidate_environments, is_listed

    words = "/".join(summary.checkpoint.path.rstrip("/").split("/")[-3:])
    high = summary.binding.facts.action_high
    fitting = candidate_environments(words, *sizes[:2], max(high) if high else None, discrete=sizes[2])
    return fitting[0] if len(fitting) == 1 and is_listed(fitting[0]) else None
