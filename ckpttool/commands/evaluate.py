"""Evaluate an agent in its environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.core.errors import UsageError
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.episode_videos import EpisodeVideo, record_video, require_video_support
from ckpttool.evaluation.playing import EvaluationOptions, play_stacked, prepare_agent, require_backend
from ckpttool.evaluation.protocol import Evaluation, Protocol

if TYPE_CHECKING:
    from ckpttool.commands.sweep import Sweep


def evaluate(
    path: str,
    env: str | None = None,
    protocol: Protocol | None = None,
    *,
    layout: str | None = None,
    facts: AgentFacts = NO_FACTS,
    progress: Progress = ignore_progress,
) -> Evaluation:
    """Restore the agent at `path` and play it.

    Raise UsageError if no environment is given or recorded, and EnvironmentMismatchError if the policy's
    sizes do not match the environment's.

    Args:
        path: the checkpoint: a file, prefix or folder.
        env: a Gymnasium id; None for the sidecar's.
        protocol: episodes, seeds, device and how to play; None for the defaults.
        layout: the layout, if it is not to be recognised.
        facts: facts that no file contains, e.g. the activations of a state_dict.
        progress: called with the finished and the total amount of work.

    >>> import ckpttool
    >>> protocol = ckpttool.Protocol(episodes=2)
    >>> played = ckpttool.evaluate("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt", "Pendulum-v1", protocol)
    >>> len(played.rollout.returns), bool(played.rollout.returns.min() > -500)
    (2, True)
    """
    how = protocol or Protocol()
    options = EvaluationOptions(env, how, layout, facts)
    require_backend(how)
    agent = options.restore(path)
    environment = options.environment(agent)
    with environment.make(how.at_once, how.engine, device=how.device) as vector:
        entrant = prepare_agent(agent, environment, how, vector.spec)
        return replace(play_stacked((entrant,), how, vector, progress)[0], options=options)


def require_played(played: object) -> None:
    """Raise UsageError for anything but what `evaluate` or `sweep` returned, with a score."""
    from ckpttool.commands.sweep import Sweep

    if not isinstance(played, Evaluation | Sweep):
        what = "what ckpttool.evaluate or ckpttool.sweep returned"
        raise UsageError("this was not played", expected=what, found=type(played).__name__)
    if isinstance(played, Sweep) and not played.scored:
        raise UsageError("none of the checkpoints was played")


def video(
    played: Evaluation | Sweep | str,
    file: str | None = None,
    episodes: Sequence[str] = ("best",),
    *,
    width: int | None = None,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> EpisodeVideo:
    """Replay episodes that `evaluate` or `sweep` played, and film them, as `eval --video` does.

    A path is played by `evaluate` first. Of several checkpoints, the one with the highest mean is filmed.
    Raise UsageError for another kind of file or episode, TargetExistsError if the file exists, unless
    `force`, MissingExtraError and UnsupportedError if frames cannot be rendered or encoded.

    Args:
        played: what `evaluate` or `sweep` returned, or the path of a checkpoint.
        file: the file to write, .mp4 or .gif; None for the checkpoint's name and .gif in the current folder.
        episodes: numbers from 0, or best, worst and median.
        width: of the images in pixels; None for the environment's.
        force: replace the file if it exists.
        progress: called with the finished and the total number of images.

    >>> import ckpttool, os, tempfile
    >>> protocol = ckpttool.Protocol(episodes=2)
    >>> played = ckpttool.evaluate("sample_ckpts/td3_pendulum_torch/ckpt-15000.pt", "Pendulum-v1", protocol)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     film = ckpttool.video(played, os.path.join(folder, "play.gif"), width=64)
    >>> film.frames, film.takes[0].equal
    (101, True)
    """
    scored: Evaluation | None = None
    if not isinstance(played, str):
        require_played(played)
        scored = played if isinstance(played, Evaluation) else played.highest
    path = str(played) if scored is None else scored.checkpoint
    options = EvaluationOptions() if scored is None else scored.options
    if options is None:
        raise UsageError("only what evaluate or sweep returned can be filmed", file=path)
    file = file or f"{os.path.basename(os.path.abspath(path))}.gif"
    require_video_support([path], options, file, episodes, force=force)
    scored = scored or evaluate(path, progress=progress)
    return record_video(scored, file, episodes, options=options, width=width, force=force, progress=progress)
