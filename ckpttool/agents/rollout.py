"""Rolling policies out: fixed seeds per episode index, one batch shape, undiscounted returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from ckpttool.agents.actions import Limits, Noise
from ckpttool.agents.envs import VectorEnv
from ckpttool.agents.envs.spec import Agreement
from ckpttool.agents.envs.tensors import HINT, DeviceVector
from ckpttool.agents.policy import Policy, State
from ckpttool.errors import UsageError

Progress = Callable[[int, int, int], None]
"""Gets how many episodes are done, of how many, and how many steps were taken."""

Watch = Callable[[int, int, float, bool], None]
"""Sees each playing row before its first step and after every one: row, number, return so far, ended.

The number is that of the episode; with several members member * episodes + episode."""

PROGRESS_EVERY_S = 0.1
IDLE = -1


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
    """rows of this policy in the batch; all members together make the batch"""
    steps: int
    """all steps taken, those of unfinished episodes too"""
    seconds: float
    clipped: int
    """actions that were outside the bounds by more than rounding, and were limited"""
    engine: str = "gymnasium"
    agreement: Agreement | None = None
    """how closely the engine reproduces Gymnasium, None for Gymnasium itself"""
    interrupted: bool = False
    observations: tuple[np.ndarray, ...] | None = None
    """per episode, float [length, obs_dim]: what the policy saw, if it was recorded"""

    @property
    def steps_per_s(self) -> float:
        """Steps of the environment per second, resets and the policy included."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Play:
    """What is played: episodes 0 to n-1 with seeds seed+i, by each member; what is added and what is kept."""

    episodes: int
    seed: int = 0
    noise: Noise | None = None
    record: bool = False
    watch: Watch | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for what cannot be played."""
        if self.episodes < 1:
            raise UsageError(f"{self.episodes} episodes cannot be played")
        if self.seed < 0:
            raise UsageError(f"{self.seed} cannot be a seed: seeds are not negative")


def rollout(
    policy: Policy,
    envs: VectorEnv,
    *,
    episodes: int,
    seed: int = 0,
    progress: Progress | None = None,
    record: bool = False,
) -> Rollout:
    """Play one policy; see `rollouts`."""
    return rollouts(policy, envs, Play(episodes, seed, record=record), progress=progress)[0]


def rollouts(
    policy: Policy, envs: VectorEnv, play: Play, *, members: int = 1, progress: Progress | None = None
) -> tuple[Rollout, ...]:
    """Play every member's episodes; a row takes its member's next index when it is free.

    The rows of `envs` are divided evenly: member m has rows m * n to (m + 1) * n - 1, and a policy of
    several members computes each block with that member's weights. The policy always sees all rows, idle
    ones as zeros. On the device engine row r of a member plays the indices r, r + n, r + 2n, ..., and idle
    rows play on uncounted. KeyboardInterrupt keeps the finished episodes and marks the results; with none
    finished it passes on.
    """
    if envs.num_envs % members:
        raise UsageError(f"{envs.num_envs} environments cannot be divided among {members} policies")
    progress = progress or (lambda _done, _total, _steps: None)
    if isinstance(envs, DeviceVector):
        return _on_device(policy, envs, play, members, progress)
    game = _Game(policy, envs, play, members)
    start = time.perf_counter()
    interrupted = False
    with _one_thread(policy):
        try:
            game.play(progress)
        except KeyboardInterrupt:
            if not game.finished:
                raise
            interrupted = True
    seconds = time.perf_counter() - start
    return tuple(game.result(member, seconds, interrupted) for member in range(members))


def _on_device(
    policy: Policy, envs: DeviceVector, play: Play, members: int, progress: Progress
) -> tuple[Rollout, ...]:
    """Hand a tensor program to a policy that plays it where it lives."""
    whole: Callable[..., tuple[Rollout, ...]] | None = getattr(policy, "play", None)
    if whole is None:
        raise UsageError(f"the {envs.engine} engine needs a policy on tensors", hint=HINT)
    return whole(envs, play, members, progress)


@dataclass(slots=True, eq=False)
class _Finished:
    """What every finished episode was, by its number: member * episodes + index."""

    returns: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    done: np.ndarray
    seen: dict[int, list[np.ndarray]] = field(default_factory=dict)


class _Game:
    """All rows of a rollout as arrays, and what has been finished."""

    def __init__(self, policy: Policy, envs: VectorEnv, play: Play, members: int) -> None:
        self.policy, self.envs, self.what, self.members = policy, envs, play, members
        self.limits = Limits(envs, play.noise)
        count, rows = members * play.episodes, envs.num_envs
        self.total = count
        kept = (np.zeros(count), np.zeros(count, np.int64), *np.zeros((3, count), np.bool_))
        self.ended = _Finished(*kept)
        self.finished = 0
        self.member = np.arange(rows) // (rows // members)
        self.begun = np.zeros(members, np.int64)
        # The number of the episode that each row plays, what it has paid and how long it has lasted.
        self.number = np.full(rows, IDLE)
        self.paid, self.length = np.zeros(rows), np.zeros(rows, np.int64)
        self.rows = np.arange(0)
        self.steps = np.zeros(members, np.int64)
        self.state: State = ()

    def play(self, progress: Progress) -> None:
        self._begin(np.arange(self.envs.num_envs))
        reported = time.perf_counter()
        while len(self.rows):
            done = self.finished
            self._tick()
            now = time.perf_counter()
            if self.finished > done or now - reported > PROGRESS_EVERY_S:
                progress(self.finished, self.total, int(self.steps.sum()))
                reported = now

    def _begin(self, rows: np.ndarray) -> None:
        """Give the rows their member's next episodes; without one, leave them idle with zeros to see."""
        episodes = self.what.episodes
        for row in rows.tolist():
            member = self.member[row]
            left = self.begun[member] < episodes
            self.number[row] = member * episodes + self.begun[member] if left else IDLE
            self.begun[member] += left
        idle, fresh = rows[self.number[rows] == IDLE], rows[self.number[rows] != IDLE]
        self.paid[rows] = self.length[rows] = 0
        for array in _arrays(self.envs.obs):
            array[idle] = 0
        for memory in self.state:
            memory[fresh] = 0
        if len(fresh):
            seeds = self.what.seed + self.number[fresh] % episodes
            self.envs.reset(fresh, seeds)
            self.limits.begin(fresh, seeds)
        self.rows = np.flatnonzero(self.number != IDLE)
        self._watched(fresh, np.zeros(len(fresh), np.bool_))

    def _tick(self) -> None:
        rows = self.rows
        actions, state = self.policy.step(self.envs.obs, self.state)
        # A backend's arrays may be read-only, and new episodes must clear their rows.
        self.state = tuple(np.array(memory) for memory in state)
        if self.what.record:
            self._record()
        actions = self.limits.apply(actions, rows, self.number % self.what.episodes, self.length)
        rewards, terminated, truncated = self.envs.step(actions, rows)
        self.paid[rows] += rewards
        self.length[rows] += 1
        over = terminated | truncated
        self._watched(rows, over)
        if self.members == 1:
            self.steps[0] += len(rows)
        else:
            self.steps += np.bincount(self.member[rows], minlength=self.members)
        if over.any():
            self._end(rows[over], terminated[over], truncated[over])

    def _end(self, rows: np.ndarray, terminated: np.ndarray, truncated: np.ndarray) -> None:
        numbers = self.number[rows]
        self.ended.returns[numbers], self.ended.lengths[numbers] = self.paid[rows], self.length[rows]
        self.ended.terminated[numbers], self.ended.truncated[numbers] = terminated, truncated
        self.ended.done[numbers] = True
        self.finished += len(rows)
        self._begin(rows)

    def _record(self) -> None:
        observed = self.envs.obs
        if isinstance(observed, Mapping):
            raise UsageError("observations of several inputs are not recorded")
        for row in self.rows.tolist():
            self.ended.seen.setdefault(int(self.number[row]), []).append(observed[row].copy())

    def _watched(self, rows: np.ndarray, over: np.ndarray) -> None:
        if self.what.watch is not None:
            for row, ended in zip(rows.tolist(), over.tolist(), strict=True):
                self.what.watch(row, int(self.number[row]), float(self.paid[row]), ended)

    def result(self, member: int, seconds: float, interrupted: bool) -> Rollout:
        episodes = self.what.episodes
        numbers = member * episodes + np.arange(episodes)
        numbers = numbers[self.ended.done[numbers]]
        return Rollout(
            returns=self.ended.returns[numbers],
            lengths=self.ended.lengths[numbers],
            terminated=self.ended.terminated[numbers],
            truncated=self.ended.truncated[numbers],
            seeds=self.what.seed + numbers % episodes,
            episodes=episodes,
            num_envs=self.envs.num_envs // self.members,
            steps=int(self.steps[member]),
            seconds=seconds,
            clipped=int(self.limits.clipped[self.member == member].sum()),
            engine=self.envs.engine,
            agreement=self.envs.agreement,
            interrupted=interrupted,
            observations=tuple(np.stack(self.ended.seen[n]) for n in numbers) if self.what.record else None,
        )


def _arrays(obs: np.ndarray | Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    yield from obs.values() if isinstance(obs, Mapping) else (obs,)


@contextmanager
def _one_thread(policy: Policy) -> Iterator[None]:
    """Let the policy compute with one thread, if it can be told: the environments own the cores."""
    limit: Callable[[int], AbstractContextManager[None]] | None = getattr(policy, "threads", None)
    with limit(1) if limit is not None else nullcontext():
        yield
