"""Evaluate an agent in its environment."""

from __future__ import annotations

from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.playing import EvaluationOptions, play_stacked, prepare_agent, require_backend
from ckpttool.evaluation.protocol import Evaluation, Protocol


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
    place = options.environment(agent)
    with place.make(how.at_once, how.engine, device=how.device) as vector:
        entrant = prepare_agent(agent, place, how, vector.spec)
        return play_stacked((entrant,), how, vector, progress)[0]


"""Width of one image of a film strip, in pixels."""
