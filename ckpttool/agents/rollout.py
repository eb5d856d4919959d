"""Rolling a policy out: fixed seeds per episode index, one batch shape, undiscounted returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ckpttool.agents.envs import VectorEnv
from ckpttool.agents.policy import Policy, State
from ckpttool.errors import CkpttoolError, EnvironmentMismatchError, UsageError

Progress = Callable[[int, int, int], None]
PROGRESS_EVERY_S = 0.1

# An action this far outside its bounds, relative to them, is rounding: limited, but not worth a note.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Finished episodes in the order of their index; `seeds[i]` alone decides the start of episode i.

    Returns also depend on `num_envs`, because rounding depends on the batch's shape and physics amplify it.
    """

    returns: np.ndarray
    """float64 [n], undiscounted"""
    lengths: np.ndarray
    """int64 [n], steps"""
    terminated: np.ndarray
    truncated: np.ndarray
    seeds: np.ndarray
    episodes: int
    """how many were asked for; fewer are here only if `interrupted`"""
    num_envs: int
    steps: int
    """all steps taken, those of unfinished episodes too"""
    seconds: float
    clipped: int
    """actions that were outside the bounds by more than rounding, and were limited"""
    interrupted: bool = False
    observations: tuple[np.ndarray, ...] | None = None
    """per episode, float [length, obs_dim]: what the policy saw, if it was recorded"""

    @property
    def steps_per_s(self) -> float:
        """Steps of the environment per second, resets and the policy included."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


def rollout(
    policy: Policy,
    envs: VectorEnv,
    *,
    episodes: int,
    seed: int = 0,
    progress: Progress | None = None,
    record: bool = False,
) -> Rollout:
    """Play episodes 0 to n-1 with seeds seed+i; an environment takes the next index when it is free.

    The policy always sees [num_envs, obs_dim], idle rows as zeros. `progress` gets (done, total, steps).
    KeyboardInterrupt keeps the finished episodes and marks the result; with none finished it passes on.
    """
    if episodes < 1:
        raise UsageError(f"{episodes} episodes cannot be played")
    if seed < 0:
        raise UsageError(f"{seed} cannot be a seed: seeds are not negative")
    game = _Game(policy, envs, episodes, seed, record)
    start = time.perf_counter()
    interrupted = False
    with _one_thread(policy):
        try:
            game.play(progress or (lambda _done, _total, _steps: None))
        except KeyboardInterrupt:
            if not game.finished:
                raise
            interrupted = True
    return game.result(time.perf_counter() - start, interrupted)


class _Episode(NamedTuple):
    total: float
    length: int
    terminated: bool
    truncated: bool
    seen: list[np.ndarray]


@dataclass(slots=True, eq=False)
class _Row:
    """The episode that one environment plays now."""

    index: int
    total: float = 0.0
    length: int = 0
    seen: list[np.ndarray] = field(default_factory=list)


class _Game:
    """All rows of a rollout and what has been finished."""

    def __init__(self, policy: Policy, envs: VectorEnv, episodes: int, seed: int, record: bool) -> None:
        self.policy, self.envs = policy, envs
        self.episodes, self.seed, self.record = episodes, seed, record
        self.limits = _Limits(envs)
        self.finished: dict[int, _Episode] = {}
        self.rows: dict[int, _Row] = {}
        self.begun = 0
        self.steps = 0
        self.state: State = ()

    def play(self, progress: Progress) -> None:
        for row in range(self.envs.num_envs):
            self._begin(row)
        reported = time.perf_counter()
        while self.rows:
            done = len(self.finished)
            self._tick()
            now = time.perf_counter()
            if len(self.finished) > done or now - reported > PROGRESS_EVERY_S:
                progress(len(self.finished), self.episodes, self.steps)
                reported = now

    def _begin(self, row: int) -> None:
        """Give the row the next episode; without one, leave it idle with zeros for the policy."""
        self.rows.pop(row, None)
        if self.begun == self.episodes:
            self.envs.obs[row] = 0
            return
        self.envs.reset(row, self.seed + self.begun)
        self.rows[row] = _Row(self.begun)
        self.begun += 1
        for memory in self.state:
            memory[row] = 0

    def _tick(self) -> None:
        rows = tuple(self.rows)
        actions, state = self.policy.step(self.envs.obs, self.state)
        # A backend's arrays may be read-only, and new episodes must clear their rows.
        self.state = tuple(np.array(memory) for memory in state)
        if self.record:
            for row, playing in self.rows.items():
                playing.seen.append(self.envs.obs[row].copy())
        actions = self.limits.apply(actions, self.rows)
        outcomes = self.envs.step(actions, rows)
        self.steps += len(rows)
        for row, reward, terminated, truncated in zip(rows, *outcomes, strict=True):
            playing = self.rows[row]
            playing.total += reward
            playing.length += 1
            if terminated or truncated:
                self.finished[playing.index] = _Episode(
                    playing.total, playing.length, bool(terminated), bool(truncated), playing.seen
                )
                self._begin(row)

    def result(self, seconds: float, interrupted: bool) -> Rollout:
        indices = sorted(self.finished)
        episodes = [self.finished[index] for index in indices]
        return Rollout(
            returns=np.array([e.total for e in episodes], np.float64),
            lengths=np.array([e.length for e in episodes], np.int64),
            terminated=np.array([e.terminated for e in episodes], np.bool_),
            truncated=np.array([e.truncated for e in episodes], np.bool_),
            seeds=np.array([self.seed + index for index in indices], np.int64),
            episodes=self.episodes,
            num_envs=self.envs.num_envs,
            steps=self.steps,
            seconds=seconds,
            clipped=self.limits.clipped,
            interrupted=interrupted,
            observations=tuple(np.stack(e.seen) for e in episodes) if self.record else None,
        )


class _Limits:
    """Keeps actions within the environment's bounds and counts those that were not."""

    def __init__(self, envs: VectorEnv) -> None:
        spec = envs.spec
        self.shape = (envs.num_envs, spec.action_dim)
        self.dtype = spec.action_low.dtype
        most = np.finfo(self.dtype).max
        # Finite limits make an infinite action an error even where the environment sets none.
        self.low, self.high = np.maximum(spec.action_low, -most), np.minimum(spec.action_high, most)
        self.slack = ROUNDING * np.maximum(1, np.maximum(abs(self.low / 2), abs(self.high / 2)))
        self.clipped = 0

    def apply(self, actions: np.ndarray, rows: dict[int, _Row]) -> np.ndarray:
        """Return the actions within the bounds, in the environment's type: a new array."""
        if actions.shape != self.shape:
            raise EnvironmentMismatchError(
                "the policy's actions do not fit the environment",
                expected=str(list(self.shape)),
                found=str(list(actions.shape)),
            )
        limited: np.ndarray = np.minimum(np.maximum(actions, self.low), self.high)
        if not (limited == actions).all():
            self._examine(actions, limited, rows)
        return limited.astype(self.dtype, copy=False)

    def _examine(self, actions: np.ndarray, limited: np.ndarray, rows: dict[int, _Row]) -> None:
        for row, playing in rows.items():
            if not np.isfinite(actions[row]).all():
                raise CkpttoolError(
                    f"the policy's action is not finite in episode {playing.index}, step {playing.length}",
                    found=str(actions[row].tolist()),
                )
            self.clipped += bool((abs(actions[row] - limited[row]) > self.slack).any())


@contextmanager
def _one_thread(policy: Policy) -> Iterator[None]:
    """Let the policy compute with one thread, if it can be told: the environments own the cores."""
    limit: Callable[[int], AbstractContextManager[None]] | None = getattr(policy, "threads", None)
    with limit(1) if limit is not None else nullcontext():
        yield
