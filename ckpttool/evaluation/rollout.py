"""Play episodes of a policy in environments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NoReturn

import numpy as np

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import CkpttoolError, EnvironmentMismatchError, UsageError
from ckpttool.core.text import describe_record
from ckpttool.evaluation.gymnasium_engine import OBS, Agreement, VectorEnv
from ckpttool.evaluation.simulators import HINT, DeviceVector
from ckpttool.networks.network import NOISE, DrawLaw, Observation, Policy, State

# Relative tolerance of the bounds: a smaller excess is rounding, clipped without a note.
ROUNDING = 1e-5


@dataclass(frozen=True, slots=True)
class ExplorationNoise:
    """Gaussian exploration noise; `std` is in units of half the action range, as in TD3 and DDPG.

    The noise depends only on the episode's seed and the step, not on the other rows.
    """

    std: float

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid standard deviation."""
        if not (np.isfinite(self.std) and self.std > 0):
            raise UsageError(
                f"invalid standard deviation of noise: {self.std:g}", hint="use a positive number, e.g. 0.1"
            )


@dataclass(frozen=True, slots=True)
class ActionSampler:
    """How discrete actions are drawn from a policy's scores [rows, sum(counts)].

    Without `epsilon` the scores are logits of the probabilities of each choice's values, whose first is
    `starts[i]`: the largest sum with Gumbel noise is taken, which has those probabilities. With `epsilon` an
    action is uniform with that probability, else the best.
    """

    counts: tuple[int, ...]
    starts: tuple[int, ...]
    epsilon: float | None = None

    @staticmethod
    def stream(seed: int) -> np.random.Generator:
        """Return the random numbers of the episode of that seed; a step uses as many as every other."""
        return np.random.default_rng([seed, 2])

    def choose(self, scores: np.ndarray, streams: Sequence[np.random.Generator]) -> np.ndarray:
        """Return actions [rows, choices] of scores [rows, sum(counts)], row i drawn from streams[i]."""
        values = scores.astype(np.float64)
        ends = np.cumsum(self.counts)[:-1]
        if self.epsilon is None:
            values = values + np.stack([stream.gumbel(size=values.shape[1]) for stream in streams])
        best = np.stack([part.argmax(axis=1) for part in np.split(values, ends, axis=1)], axis=1)
        if self.epsilon is not None:
            draws = np.stack([stream.random(1 + len(self.counts)) for stream in streams])
            uniform = np.floor(draws[:, 1:] * self.counts).astype(np.int64)
            best = np.where(draws[:, :1] < self.epsilon, uniform, best)
        return np.asarray(best + self.starts)


@dataclass(frozen=True, slots=True)
class NormalSampler:
    """Random numbers [rows, width] with which a network draws its actions, its input NOISE.

    They are standard normal, or uniform from 0 to 1, or the factors of a noisy layer's noise: the root of a
    normal number's size, with its sign.
    """

    width: int
    law: DrawLaw = "normal"

    def draw(self, streams: Sequence[np.random.Generator | None]) -> np.ndarray:
        """Return the numbers of one step: row i from streams[i], zeros for None."""
        return np.stack([np.zeros(self.width) if stream is None else self._row(stream) for stream in streams])

    def _row(self, stream: np.random.Generator) -> np.ndarray:
        if self.law == "uniform":
            return stream.random(self.width)
        numbers = stream.standard_normal(self.width)
        return numbers if self.law == "normal" else np.sign(numbers) * np.sqrt(abs(numbers))

    def with_noise(self, obs: Observation, streams: Sequence[np.random.Generator | None]) -> Observation:
        """Return the observations with the numbers of one step as a further input."""
        named = obs if isinstance(obs, Mapping) else {OBS: obs}
        return {**named, NOISE: self.draw(streams)}


Sampler = ActionSampler | NormalSampler


class ActionLimits:
    """Clip actions to the environment's bounds and count the clipped ones per row."""

    def __init__(
        self, envs: VectorEnv, noise: ExplorationNoise | None = None, sampling: Sampler | None = None
    ) -> None:
        """Store the bounds; raise UsageError for noise with unbounded actions."""
        spec = envs.spec
        self.shape = (envs.num_envs, spec.action_dim)
        self.dtype = spec.action_low.dtype
        most = np.finfo(self.dtype).max
        # Finite limits make an infinite action an error even if the environment has no bounds.
        self.low, self.high = np.maximum(spec.action_low, -most), np.minimum(spec.action_high, most)
        self.slack = ROUNDING * np.maximum(1, np.maximum(abs(self.low / 2), abs(self.high / 2)))
        self.clipped = np.zeros(envs.num_envs, np.int64)
        self._draws: dict[int, np.random.Generator] = {}
        self._sampling = sampling if isinstance(sampling, ActionSampler) else None
        self._normal = sampling if isinstance(sampling, NormalSampler) else None
        self._width = spec.action_dim if self._sampling is None else sum(self._sampling.counts)
        self._reach: np.ndarray | None = None
        if noise is not None:
            if spec.choices:
                raise UsageError(f"the actions of {spec.id} are discrete: noise cannot be added to them")
            reach = (spec.action_high.astype(np.float64) - spec.action_low) / 2
            if not np.isfinite(reach).all():
                raise UsageError(f"cannot scale the noise for {spec.id}: its actions are unbounded")
            self._reach = noise.std * reach

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Create separate generators for the rows' new episodes, if there is noise or sampling."""
        if self._reach is None and self._sampling is None and self._normal is None:
            return
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self._draws[row] = self._stream(seed)

    def _stream(self, seed: int) -> np.random.Generator:
        return np.random.default_rng([seed, 1]) if self._reach is not None else ActionSampler.stream(seed)

    def draws(self, seeds: np.ndarray, steps: int) -> np.ndarray:
        """Return the noise of the first steps of whole episodes: float64 [len(seeds), steps, action_dim]."""
        draws = np.empty((len(seeds), steps, self.shape[1]))
        for index, seed in enumerate(seeds.tolist()):
            self._stream(seed).standard_normal(out=draws[index])
        return draws if self._reach is None else self._reach * draws

    def with_noise(self, obs: Observation, rows: np.ndarray) -> Observation:
        """Return the observations with the numbers that a network draws the rows' actions with, if any."""
        if self._normal is None:
            return obs
        playing = set(rows.tolist())
        streams = [self._draws[row] if row in playing else None for row in range(self.shape[0])]
        return self._normal.with_noise(obs, streams)

    def apply(
        self, actions: np.ndarray, rows: np.ndarray, episodes: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Return the actions within the bounds, in the environment's type: a new array.

        `episodes` and `lengths` [num_envs] locate each row, for the message about an action that is not
        finite.
        """
        expected = (self.shape[0], self._width)
        if actions.shape != expected:
            raise EnvironmentMismatchError(
                "the policy's actions do not match the environment",
                expected=str(list(expected)),
                found=str(list(actions.shape)),
            )
        if self._sampling is not None:
            return self._sampled(actions, self._sampling, rows, episodes, lengths)
        if self._reach is not None:
            actions = self._noisy(actions, rows, self._reach)
        limited = self._within(actions)
        if not (limited == actions).all():
            self._examine(actions, limited, rows, episodes, lengths)
        return limited.astype(self.dtype, copy=False)

    def _sampled(
        self,
        scores: np.ndarray,
        sampling: ActionSampler,
        rows: np.ndarray,
        episodes: np.ndarray,
        lengths: np.ndarray,
    ) -> np.ndarray:
        """Return drawn actions; raise CkpttoolError for a score that is not finite."""
        finite = np.isfinite(scores[rows]).all(axis=1)
        if not finite.all():
            self._refuse_row(scores, int(rows[~finite][0]), "scores are", episodes, lengths)
        actions = np.tile(self.low, (self.shape[0], 1))
        actions[rows] = sampling.choose(scores[rows], [self._draws[row] for row in rows.tolist()])
        return actions

    def _refuse_row(
        self, values: np.ndarray, row: int, what: str, episodes: np.ndarray, lengths: np.ndarray
    ) -> NoReturn:
        raise CkpttoolError(
            f"the policy's {what} not finite in episode {episodes[row]}, step {lengths[row]}",
            found=str(values[row].tolist()),
        )

    def _within(self, actions: np.ndarray) -> np.ndarray:
        return np.asarray(np.minimum(np.maximum(actions, self.low), self.high))

    def _noisy(self, actions: np.ndarray, rows: np.ndarray, reach: np.ndarray) -> np.ndarray:
        draws = np.stack([self._draws[row].standard_normal(len(reach)) for row in rows.tolist()])
        # Noise is added to the clipped action; NaN stays NaN.
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
            self._refuse_row(actions, int(rows[~finite][0]), "action is", episodes, lengths)
        self.clipped[rows] += (abs(played - within) > self.slack).any(axis=1)


Progress = Callable[[int, int, int], None]
"""Callback with the number of finished episodes, their total, and the number of steps."""

Watch = Callable[[int, int, float, bool], None]
"""Callback for each playing row before its first step and after every step.

Arguments: row, number, return so far, ended. The number is that of the episode; with several
members it is member * episodes + episode.
"""

PROGRESS_EVERY_S = 0.1
IDLE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """Finished episodes in order of their index; the start of episode i depends on `seeds[i]` alone.

    Returns also depend on `num_envs`, because rounding depends on the batch shape and physics amplify
    it.
    """

    __repr__ = describe_record

    returns: np.ndarray
    """float64 [n], undiscounted"""
    lengths: np.ndarray
    """int64 [n], steps"""
    terminated: np.ndarray
    truncated: np.ndarray
    seeds: np.ndarray
    episodes: int
    """the requested number; fewer results only if `interrupted`"""
    num_envs: int
    """rows of this policy in the batch; the rows of all members form the batch"""
    steps: int
    """all steps, including those of unfinished episodes"""
    seconds: float
    clipped: int
    """actions outside the bounds by more than rounding, which were clipped"""
    engine: str = "gymnasium"
    agreement: Agreement | None = None
    """agreement of the engine with Gymnasium, None for Gymnasium itself"""
    interrupted: bool = False

    @property
    def steps_per_s(self) -> float:
        """Return steps of the environment per second, including resets and the policy."""
        return self.steps / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Specification of a rollout: episodes 0 to n-1 with seeds seed+i for each member, and options."""

    episodes: int
    seed: int = 0
    noise: ExplorationNoise | None = None
    sampling: Sampler | None = None
    """for a policy that gives the scores of discrete actions, or has the input NOISE; else None"""
    watch: Watch | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for invalid values."""
        if self.episodes < 1:
            raise UsageError(f"number of episodes must be at least 1, not {self.episodes}")
        if self.seed < 0:
            raise UsageError(f"seed must not be negative: {self.seed}")


def rollouts(
    policy: Policy, envs: VectorEnv, play: RolloutSpec, *, members: int = 1, progress: Progress | None = None
) -> tuple[Rollout, ...]:
    """Play every member's episodes; a free row starts its member's next episode.

    On the device engine row r of a member plays the indices r, r + n, r + 2n, ..., and idle rows play on
    uncounted. KeyboardInterrupt keeps the finished episodes and marks the results; if none is finished it
    propagates.

    Args:
        policy: computes the actions of all rows, with each block's own member. It always receives all rows,
            idle ones as zeros.
        envs: environments whose rows are divided evenly: member m has rows m * n to (m + 1) * n - 1.
        play: episodes, seeds, limits and noise.
        members: policies in the stack.
        progress: called with the episodes finished so far, all, and the steps.
    """
    if envs.num_envs % members:
        raise UsageError(f"cannot divide {envs.num_envs} environments evenly among {members} policies")
    progress = progress or (lambda _done, _total, _steps: None)
    if isinstance(envs, DeviceVector):
        return _play_on_device(policy, envs, play, members, progress)
    game = _RolloutLoop(policy, envs, play, members)
    start = time.perf_counter()
    interrupted = False
    with _limit_threads(policy):
        try:
            game.play(progress)
        except KeyboardInterrupt:
            if not game.finished:
                raise
            interrupted = True
    seconds = time.perf_counter() - start
    return tuple(game.result(member, seconds, interrupted) for member in range(members))


def _play_on_device(
    policy: Policy, envs: DeviceVector, play: RolloutSpec, members: int, progress: Progress
) -> tuple[Rollout, ...]:
    """Play a task on the device of a policy of the PyTorch backend."""
    from ckpttool.networks.torch_backend import TorchPolicy  # here, because others play without either

    if not isinstance(policy, TorchPolicy):
        raise UsageError(f"the {envs.engine} engine requires a policy of the torch backend", hint=HINT)
    from ckpttool.evaluation.torch_rollout import play_on_device

    return play_on_device(policy, envs, play, members, progress)


@dataclass(slots=True, eq=False)
class _EpisodeRecords:
    """Results of the finished episodes, by number: member * episodes + index."""

    returns: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    done: np.ndarray


class _RolloutLoop:
    """Rows of a rollout as arrays, and the finished episodes."""

    def __init__(self, policy: Policy, envs: VectorEnv, play: RolloutSpec, members: int) -> None:
        self.policy, self.envs, self.what, self.members = policy, envs, play, members
        self.limits = ActionLimits(envs, play.noise, play.sampling)
        count, rows = members * play.episodes, envs.num_envs
        self.total = count
        kept = (np.zeros(count), np.zeros(count, np.int64), *np.zeros((3, count), np.bool_))
        self.ended = _EpisodeRecords(*kept)
        self.finished = 0
        self.member = np.arange(rows) // (rows // members)
        self.started = np.zeros(members, np.int64)
        # Per row: the number of its episode, the return so far and the length so far.
        self.number = np.full(rows, IDLE)
        self.rewards, self.length = np.zeros(rows), np.zeros(rows, np.int64)
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
        """Start each member's next episodes in the rows; idle rows observe zeros."""
        episodes = self.what.episodes
        member = self.member[rows]
        # Rows ascend, and so do their members: each row takes the episode after that of the row before.
        episode = self.started[member] + np.arange(len(rows)) - np.searchsorted(member, member)
        plays = episode < episodes
        self.number[rows] = np.where(plays, member * episodes + episode, IDLE)
        self.started = np.minimum(self.started + np.bincount(member, minlength=self.members), episodes)
        idle, fresh = rows[~plays], rows[plays]
        self.rewards[rows] = self.length[rows] = 0
        obs = self.envs.obs
        for array in obs.values() if isinstance(obs, Mapping) else (obs,):
            array[idle] = 0
        for memory in self.state:
            memory[fresh] = 0
        if len(fresh):
            seeds = self.what.seed + episode[plays]
            self.envs.reset(fresh, seeds)
            self.limits.begin(fresh, seeds)
        self.rows = np.flatnonzero(self.number != IDLE)
        self._watched(fresh, np.zeros(len(fresh), np.bool_))

    def _tick(self) -> None:
        rows = self.rows
        actions, state = self.policy.step(self.limits.with_noise(self.envs.obs, rows), self.state)
        # A backend's arrays may be read-only, and new episodes clear their rows.
        self.state = tuple(np.array(memory) for memory in state)
        actions = self.limits.apply(actions, rows, self.number % self.what.episodes, self.length)
        rewards, terminated, truncated = self.envs.step(actions, rows)
        at = slice(None) if len(rows) == len(self.number) else rows
        self.rewards[at] += rewards
        self.length[at] += 1
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
        self.ended.returns[numbers], self.ended.lengths[numbers] = self.rewards[rows], self.length[rows]
        self.ended.terminated[numbers], self.ended.truncated[numbers] = terminated, truncated
        self.ended.done[numbers] = True
        self.finished += len(rows)
        self._begin(rows)

    def _watched(self, rows: np.ndarray, over: np.ndarray) -> None:
        if self.what.watch is not None:
            for row, ended in zip(rows.tolist(), over.tolist(), strict=True):
                self.what.watch(row, int(self.number[row]), float(self.rewards[row]), ended)

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
        )


@contextmanager
def _limit_threads(policy: Policy) -> Iterator[None]:
    """Limit the policy to one thread where possible: the environments use the cores."""
    limit: Callable[[int], AbstractContextManager[None]] | None = getattr(policy, "threads", None)
    with limit(1) if limit is not None else nullcontext():
        yield
