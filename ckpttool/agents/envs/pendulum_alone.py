"""Pendulum-v1 where Gymnasium is not installed: what its environment is asked for besides its steps.

So the agents that come with the project play with nothing but the core. Sources of the facts:
gymnasium/envs/classic_control/pendulum.py (constants, spaces, `reset`), gymnasium/envs/__init__.py (how many
steps) and gymnasium/utils/seeding.py (`np_random`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

ID = "Pendulum-v1"
NOTE = f"gymnasium is not installed: {ID} has its constants and starts, as Gymnasium 1.4 states them"


class Box(NamedTuple):
    """The bounds of observations or actions: float32 [n] each."""

    low: np.ndarray
    high: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return self.low.shape

    @property
    def dtype(self) -> np.dtype:
        """The type of its numbers."""
        return self.low.dtype


class Registered(NamedTuple):
    """What Gymnasium's registry says."""

    id: str = ID
    max_episode_steps: int = 200
    kwargs: Mapping[str, Any] = MappingProxyType({})


class PendulumAlone:
    """The environment without its steps, which PendulumBatch computes; draws where episodes start."""

    spec = Registered()
    metadata: Mapping[str, Any] = MappingProxyType({"render_fps": 30})
    g, m, l, dt, max_speed, max_torque = 10.0, 1.0, 1.0, 0.05, 8, 2.0  # noqa: E741  # Gymnasium's names

    def __init__(self) -> None:
        most = np.array([1.0, 1.0, self.max_speed], np.float32)
        torque = np.array([self.max_torque], np.float32)
        self.observation_space, self.action_space = Box(-most, most), Box(-torque, torque)
        self.state = np.zeros(2)

    @property
    def unwrapped(self) -> PendulumAlone:
        """Itself."""
        return self

    def reset(self, *, seed: int) -> None:
        """Draw the angle and the speed with which the episode of that seed starts."""
        most = np.array([np.pi, 1.0])
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self.state = generator.uniform(low=-most, high=most)

    def close(self) -> None:
        """Do nothing: nothing is open."""
