"""TD3's update (Fujimoto et al., 2018), and DDPG's, which is the same with one critic and no noise.

The algorithm stands here once. What differs between frameworks is behind Engine: forward passes, losses,
gradients and the optimizers' steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckpttool.agents.training.learner import Batch, Learner

# The constants of the TD3 authors' code (TD3.py and main.py); noise is in halves of the action's range.
DISCOUNT = 0.99
TAU = 0.005
POLICY_NOISE = 0.2
NOISE_CLIP = 0.5
POLICY_DELAY = 2

Weights = dict[str, list[np.ndarray]]


class Engine(Protocol):
    """A learner on a backend, by its networks' titles; arrays come and go in the learner's float type."""

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        ...

    def regress(self, critics: Sequence[str], inputs: Sequence[np.ndarray], target: np.ndarray) -> None:
        """Make one step of the critics' optimizer on the sum of their mean squared errors."""
        ...

    def improve(self, actor: str, critic: str, obs: np.ndarray) -> None:
        """Make one step of the actor's optimizer towards actions of higher value."""
        ...

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the slow network the part `tau` of the way to the fast one."""
        ...

    def weights(self, title: str) -> list[np.ndarray]:
        """Return a network's trained arrays, as `learner.trained` orders them."""
        ...


@dataclass(frozen=True, slots=True)
class Trained:
    """The weights by title after each network's first update, made at `moved`, and after all `steps`.

    Updates count from 1. A network that never moved is nowhere here.
    """

    steps: int
    moved: dict[str, int]
    first: Weights
    last: Weights


def train(engine: Engine, learner: Learner, batches: Sequence[Batch]) -> Trained:
    """Make one update for each batch."""
    moved: dict[str, int] = {}
    first: Weights = {}
    for number, batch in enumerate(batches, 1):
        for title in update(engine, learner, batch, learner.updates + number):
            if title not in moved:
                moved[title], first[title] = number, engine.weights(title)
    return Trained(len(batches), moved, first, {title: engine.weights(title) for title in moved})


def update(engine: Engine, learner: Learner, batch: Batch, number: int) -> tuple[str, ...]:
    """Make the update with that number; return the titles of the networks that moved."""
    twin = len(learner.critics) > 1
    action = smoothed(learner, engine.forward(learner.slow["actor"], batch.next_obs), batch, twin=twin)
    values = [engine.forward(learner.slow[q], batch.next_obs, action) for q in learner.critics]
    least = np.minimum.reduce(values)
    target = batch.reward + batch.not_done * least.dtype.type(DISCOUNT) * least
    engine.regress(learner.critics, (batch.obs, batch.action), target)
    if twin and number % POLICY_DELAY:
        return learner.critics
    engine.improve("actor", learner.critics[0], batch.obs)
    fast = ("actor", *learner.critics)
    for title in fast:
        engine.follow(learner.slow[title], title, TAU)
    return (*fast, *(learner.slow[title] for title in fast))


def smoothed(learner: Learner, action: np.ndarray, batch: Batch, *, twin: bool) -> np.ndarray:
    """Return the slow policy's next action [batch, act_dim], with TD3's clipped noise if there are twins."""
    if not twin:
        return action
    half = (learner.high - learner.low) / 2
    noise = np.clip(batch.noise * POLICY_NOISE, -NOISE_CLIP, NOISE_CLIP).astype(action.dtype) * half
    found: np.ndarray = np.clip(action + noise, learner.low, learner.high)
    return found
