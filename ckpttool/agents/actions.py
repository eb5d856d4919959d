"""What happens to an action between the policy and the environment: exploration noise, then the bounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpttool.agents.envs.spec import VectorEnv
from ckpttool.errors import CkpttoolError, EnvironmentMismatchError, UsageError

# An action this far outside its bounds, relative to them, is rounding: limited, but not worth a note.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class Noise:
    """Gaussian exploration noise; `std` is in units of half the action range, as TD3 and DDPG train with.

    Its draws are a function of the episode's seed and the step, whoever else plays.
    """

    std: float

    def __post_init__(self) -> None:
        """Raise UsageError for what is no deviation."""
        if not (np.isfinite(self.std) and self.std > 0):
            raise UsageError(f"{self.std:g} cannot be a deviation of noise", hint="a positive number, as 0.1")


class Limits:
    """Keeps actions within the environment's bounds and counts, per row, those that were not."""

    def __init__(self, envs: VectorEnv, noise: Noise | None = None) -> None:
        """Take the bounds; raise UsageError where there is noise and they do not say how large."""
        spec = envs.spec
        self.shape = (envs.num_envs, spec.action_dim)
        self.dtype = spec.action_low.dtype
        most = np.finfo(self.dtype).max
        # Finite limits make an infinite action an error even where the environment sets none.
        self.low, self.high = np.maximum(spec.action_low, -most), np.minimum(spec.action_high, most)
        self.slack = ROUNDING * np.maximum(1, np.maximum(abs(self.low / 2), abs(self.high / 2)))
        self.clipped = np.zeros(envs.num_envs, np.int64)
        self._draws: dict[int, np.random.Generator] = {}
        self._reach: np.ndarray | None = None
        if noise is not None:
            reach = (spec.action_high.astype(np.float64) - spec.action_low) / 2
            if not np.isfinite(reach).all():
                raise UsageError(f"noise has no size in {spec.id}, whose actions are not bounded")
            self._reach = noise.std * reach

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Give the rows' new episodes generators of their own, if there is noise."""
        if self._reach is not None:
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                self._draws[row] = np.random.default_rng([seed, 1])

    def draws(self, seeds: np.ndarray, steps: int) -> np.ndarray:
        """Return the noise of the first steps of whole episodes: float64 [len(seeds), steps, action_dim]."""
        if self._reach is None:
            raise UsageError("there is no noise to draw")
        shape = (steps, len(self._reach))
        found = np.empty((len(seeds), *shape))
        for place, seed in enumerate(seeds.tolist()):
            np.random.default_rng([seed, 1]).standard_normal(out=found[place])
        return self._reach * found

    def apply(
        self, actions: np.ndarray, rows: np.ndarray, episodes: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Return the actions within the bounds, in the environment's type: a new array.

        `episodes` and `lengths` [num_envs] say where each row is, for the sentence about an action that is
        no number.
        """
        if actions.shape != self.shape:
            raise EnvironmentMismatchError(
                "the policy's actions do not fit the environment",
                expected=str(list(self.shape)),
                found=str(list(actions.shape)),
            )
        if self._reach is not None:
            actions = self._noisy(actions, rows, self._reach)
        limited = self._within(actions)
        if not (limited == actions).all():
            self._examine(actions, limited, rows, episodes, lengths)
        return limited.astype(self.dtype, copy=False)

    def _within(self, actions: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(np.maximum(actions, self.low), self.high))

    def _noisy(self, actions: np.ndarray, rows: np.ndarray, reach: np.ndarray) -> np.ndarray:
        draws = np.stack([self._draws[row].standard_normal(len(reach)) for row in rows.tolist()])
        # Noise is added to what the environment would have been given; what is no number stays none.
        noisy = actions.astype(np.float64)
        noisy[rows] = self._within(self._within(actions[rows]) + reach * draws)
        return np.where(np.isfinite(actions), noisy, actions)

    def _examine(
        self,
        actions: np.ndarray,
        limited: np.ndarray,
        rows: np.ndarray,
        episodes: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        played, within = actions[rows], limited[rows]
        finite = np.isfinite(played).all(axis=1)
        if not finite.all():
            row = int(rows[~finite][0])
            raise CkpttoolError(
                f"the policy's action is not finite in episode {episodes[row]}, step {lengths[row]}",
                found=str(actions[row].tolist()),
            )
        self.clipped[rows] += (abs(played - within) > self.slack).any(axis=1)
