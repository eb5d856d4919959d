"""Pendulum-v1 for many rows at once in arrays, equal to Gymnasium's bit for bit.

The equations are those of gymnasium/envs/classic_control/pendulum.py, operation by operation: an episode is
the same whichever engine steps it. Each instance plays a few steps beside the environment that it replaces,
so that another version of the library cannot make it wrong unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ckpttool.agents.envs.gym_vector import describe, heard
from ckpttool.agents.envs.pendulum_alone import ID, NOTE, PendulumAlone
from ckpttool.agents.envs.spec import EnvSpec, Outcome
from ckpttool.errors import UnsupportedError, UsageError

ENGINE = "pendulum.batch"
_STEPS_BESIDE = 5


class Law(NamedTuple):
    """The constants of the equations: of gravity and of the torque, per second; the step and the bounds."""

    pull: float
    push: float
    dt: float
    max_speed: float
    max_torque: float


class PendulumBatch:
    """The rows' angles and speeds as two arrays; one Gymnasium environment draws where episodes start.

    Where there is no Gymnasium, `pendulum_alone` does.
    """

    engine = ENGINE

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1) -> None:
        """Raise UnsupportedError if the environment is not the Pendulum that these equations are of."""
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self._notes: dict[str, None] = {}
        with heard(self._notes):
            self._one = make_one()
        self.spec: EnvSpec = describe(self._one)
        self.num_envs = num_envs
        bare = self._one.unwrapped
        pull, push = 3 * bare.g / (2 * bare.l), 3.0 / (bare.m * bare.l**2)
        self.law = Law(pull, push, bare.dt, bare.max_speed, bare.max_torque)
        self._limit = self.spec.max_episode_steps or np.inf
        # Gymnasium squares scalars with the C library's pow. NumPy multiplies where the exponent is one
        # number, and calls pow where it is an array: in a thousandth of the cases the last bits differ.
        self._twos, self._small_twos = np.full(num_envs, 2.0), np.full(num_envs, 2.0, np.float32)
        self.obs: np.ndarray = np.zeros((num_envs, 3), np.float32)
        self._angle, self._speed = np.zeros(num_envs), np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        if isinstance(self._one, PendulumAlone):
            self._notes[NOTE] = None
        elif not self._agrees():
            self.close()
            raise UnsupportedError(f"this gymnasium's {ID} computes otherwise than {ENGINE}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What Gymnasium had to say, each sentence once."""
        return tuple(self._notes)

    def starts(self, seeds: np.ndarray) -> np.ndarray:
        """Return the angle and the speed with which the episode of each seed starts: [len(seeds), 2]."""
        unlike, of = np.unique(seeds, return_inverse=True)
        states = np.empty((len(unlike), 2))
        for place, seed in enumerate(unlike.tolist()):
            self._one.reset(seed=seed)
            states[place] = self._one.unwrapped.state
        return states[of]

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the episode of seeds[i] in rows[i]; rows of one seed share the draw."""
        self._angle[rows], self._speed[rows] = self.starts(seeds).T
        self._length[rows] = 0
        self._see(rows)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        # Whole arrays need no index, and most steps move every row.
        at = slice(None) if len(rows) == self.num_envs else rows
        angle, speed, law = self._angle[at], self._speed[at], self.law
        torque = np.clip(actions[at, 0], -law.max_torque, law.max_torque)
        two, small = self._twos[: len(rows)], self._small_twos[: len(rows)]
        upright = ((angle + np.pi) % (2 * np.pi)) - np.pi
        costs = np.power(upright, two) + 0.1 * np.power(speed, two) + 0.001 * np.power(torque, small)
        faster = speed + (law.pull * np.sin(angle) + law.push * torque) * law.dt
        faster = np.clip(faster, -law.max_speed, law.max_speed)
        self._angle[at], self._speed[at] = angle + faster * law.dt, faster
        self._length[at] += 1
        self._see(at)
        return -costs, np.zeros(len(rows), np.bool_), self._length[at] >= self._limit

    def frame(self, row: int) -> np.ndarray:  # noqa: ARG002 - the protocol's
        """Raise UnsupportedError: rows of an array draw nothing."""
        raise UnsupportedError(f"{ENGINE} draws no picture", hint="--engine gymnasium does")

    def close(self) -> None:
        """Let go of the one environment."""
        self._one.close()

    def __enter__(self) -> PendulumBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, at: np.ndarray | slice) -> None:
        angle = self._angle[at]
        self.obs[at, 0], self.obs[at, 1], self.obs[at, 2] = np.cos(angle), np.sin(angle), self._speed[at]

    def _agrees(self) -> bool:
        """Say whether the first row moves as the environment does, bit for bit."""
        row = np.zeros(1, np.int64)
        self.reset(row, row)
        actions = np.zeros((self.num_envs, 1), np.float32)
        for number in range(_STEPS_BESIDE):
            actions[0] = 2.5 * np.cos(number)
            reward, terminated, truncated = self.step(actions, row)
            seen = self._one.step(actions[0])
            if not (self.obs[0] == seen[0]).all() or (reward[0], terminated[0], truncated[0]) != seen[1:4]:
                return False
        self.obs[0] = 0
        return True
