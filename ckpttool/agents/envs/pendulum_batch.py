"""Pendulum-v1 for many rows at once in arrays, with the arithmetic of Gymnasium.

The equations are those of gymnasium/envs/classic_control/pendulum.py, operation by operation: an episode is
the same whichever engine steps it. Each instance compares single steps from many states with the environment
that it replaces, so that another version of the library cannot make it wrong unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from ckpttool.agents.envs import gym_draws
from ckpttool.agents.envs.gym_vector import describe, heard
from ckpttool.agents.envs.pendulum_alone import ID, NOTE, PendulumAlone
from ckpttool.agents.envs.spec import Agreement, EnvSpec, Outcome, deviation
from ckpttool.errors import UnsupportedError, UsageError

ENGINE = "pendulum.batch"
STATE_TOLERANCE: Final = 1e-12
OBSERVATION_TOLERANCE: Final = 1e-6
"""A few of a float32's last bits: observations are rounded to it."""
REWARD_TOLERANCE: Final = 1e-9
"""The torque's share of a reward is computed in float32; its last bit is below this."""
_COMPARED = 64


class Law(NamedTuple):
    """The constants of the equations: of gravity and of the torque, per second; the step and the bounds."""

    pull: float
    push: float
    dt: float
    max_speed: float
    max_torque: float


class Steps(NamedTuple):
    """Single steps of the environment: from `states` [n, 2] by `actions` [n, 1] to what came of them."""

    states: np.ndarray
    actions: np.ndarray
    after: np.ndarray
    """float64 [n, 2], angles and speeds"""
    observations: np.ndarray
    rewards: np.ndarray

    def agreement(self, after: np.ndarray, observations: np.ndarray, rewards: np.ndarray) -> Agreement:
        """Compare an engine's results of the same steps."""
        return Agreement(
            len(self.states),
            (
                deviation("states", after, self.after, STATE_TOLERANCE),
                deviation("observations", observations, self.observations, OBSERVATION_TOLERANCE),
                deviation("rewards", rewards, self.rewards, REWARD_TOLERANCE),
            ),
        )


class PendulumBatch:
    """The rows' angles and speeds as two arrays; one Gymnasium environment draws where episodes start.

    Where there is no Gymnasium, `pendulum_alone` does.
    """

    engine = ENGINE

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1, *, engine: str = ENGINE) -> None:
        """Raise UnsupportedError if the environment is not the Pendulum that these equations are of."""
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self.engine = engine
        self._notes: dict[str, None] = {}
        with heard(self._notes):
            self._one = make_one()
        self.spec: EnvSpec = describe(self._one)
        self.num_envs = num_envs
        self._limit = self.spec.max_episode_steps or np.inf
        self.obs: np.ndarray = np.zeros((num_envs, 3), np.float32)
        self._angle, self._speed = np.zeros(num_envs), np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self.agreement: Agreement | None = None
        try:
            self.law = _law(self._one.unwrapped, engine)
            if isinstance(self._one, PendulumAlone):
                self._notes[NOTE] = None
            if (steps := self.reference()) is not None:
                self.agreement = self._compare(steps).require(self.spec.id, engine)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """What Gymnasium had to say, each sentence once."""
        return tuple(self._notes)

    def starts(self, seeds: np.ndarray) -> np.ndarray:
        """Return the angle and the speed with which the episode of each seed starts: [len(seeds), 2]."""

        def draw(seed: int) -> np.ndarray:
            self._one.reset(seed=seed)
            return np.array(self._one.unwrapped.state, np.float64)

        most = np.array([np.pi, 1.0])
        return gym_draws.starts(seeds, -most, most, draw)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the episode of seeds[i] in rows[i]; rows of one seed share the draw."""
        self._angle[rows], self._speed[rows] = self.starts(seeds).T
        self._length[rows] = 0
        self._see(rows)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        # Whole arrays need no index, and most steps move every row.
        at = slice(None) if len(rows) == self.num_envs else rows
        angle, speed, costs = _advanced(self.law, self._angle[at], self._speed[at], actions[at, 0])
        self._angle[at], self._speed[at] = angle, speed
        self._length[at] += 1
        self._see(at)
        return -costs, np.zeros(len(rows), np.bool_), self._length[at] >= self._limit

    def frame(self, row: int) -> np.ndarray:  # noqa: ARG002 - the protocol's
        """Raise UnsupportedError: rows of an array draw nothing."""
        raise UnsupportedError(f"{self.engine} draws no picture", hint="--engine gymnasium does")

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

    def reference(self) -> Steps | None:
        """Return steps of Gymnasium's own object from many states; None where Gymnasium is not installed."""
        if isinstance(self._one, PendulumAlone):
            return None
        random = np.random.default_rng(0)
        # Several turns, all speeds, and torques beyond the bounds.
        states = random.uniform((-4 * np.pi, -1.0), (4 * np.pi, 1.0), (_COMPARED, 2))
        states[:, 1] *= self.law.max_speed
        actions = random.uniform(-1.5, 1.5, (_COMPARED, 1)) * self.law.max_torque
        # The corners: upright and hanging, at rest and at full speed, with full torque either way.
        states[:8] = [(angle, speed * self.law.max_speed) for angle in (0, np.pi) for speed in (-1, 0, 0, 1)]
        actions[:8, 0] = np.array([-1, -1, 0, 1] * 2) * self.law.max_torque
        actions = actions.astype(self.spec.action_low.dtype)
        bare, after, seen, rewards = self._one.unwrapped, np.empty_like(states), [], []
        for number, (state, action) in enumerate(zip(states, actions, strict=True)):
            if number % min(_COMPARED, self._limit) == 0:
                self._one.reset(seed=0)
            bare.state = state.copy()
            observation, reward, terminated, _, _ = self._one.step(action)
            # Nothing terminates here: what does is another task.
            after[number] = np.nan if terminated else bare.state
            seen.append(observation)
            rewards.append(reward)
        return Steps(states, actions, after, np.array(seen), np.array(rewards))

    def _compare(self, steps: Steps) -> Agreement:
        """Take the same steps, all at once."""
        before = steps.states
        angle, speed, costs = _advanced(self.law, before[:, 0], before[:, 1], steps.actions[:, 0])
        seen = np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)
        return steps.agreement(np.stack([angle, speed], 1), seen, -costs)


def _law(bare: Any, engine: str) -> Law:
    """Return the constants of Gymnasium's object; raise UnsupportedError if it has others."""
    try:
        pull, push = 3 * bare.g / (2 * bare.l), 3.0 / (bare.m * bare.l**2)
        return Law(pull, push, bare.dt, bare.max_speed, bare.max_torque)
    except AttributeError as error:
        raise UnsupportedError(
            f"this Gymnasium's {ID} is not the one that the {engine} engine reproduces",
            found=f"no attribute {error.name!r}",
        ) from None


def _advanced(
    law: Law, angle: np.ndarray, speed: np.ndarray, action: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the angles and speeds after a step, and its costs, each [rows]."""
    torque = np.clip(action, -law.max_torque, law.max_torque)
    upright = ((angle + np.pi) % (2 * np.pi)) - np.pi
    costs = _squared(upright) + 0.1 * _squared(speed) + 0.001 * _squared(torque)
    faster = speed + (law.pull * np.sin(angle) + law.push * torque) * law.dt
    faster = np.clip(faster, -law.max_speed, law.max_speed)
    return angle + faster * law.dt, faster, costs


def _squared(values: np.ndarray) -> np.ndarray:
    """Return the squares [n] as the C library's `pow` computes them.

    Gymnasium squares NumPy's scalars, which call `pow`. Of an array, `** 2` and `np.square` multiply, and
    `np.power` calls vector code where the processor has AVX-512: in some of a thousand cases the last bits
    differ. `np.float_power` calls `pow` on every processor, for float64 alone.
    """
    squares: np.ndarray = (
        np.float_power(values, 2.0)
        if values.dtype == np.float64
        else np.fromiter((value**2 for value in values), values.dtype, len(values))
    )
    return squares
