"""Evaluate an agent in its environment."""

from __future__ import annotations

from ckpttool.core.atomic_write import Progress, ignore_progress
from ckpttool.evaluation.evidence import NO_FACTS, AgentFacts
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
    """Restore the agent at `path` and play it in `env` (a Gymnasium id; None: the sidecar's).

    `facts` are facts that no file contains, e.g. the activations of a state_dict. Raise UsageError if
    no environment is given or recorded, and EnvironmentMismatchError if the policy's sizes do not match
    the environment's.
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
