"""Play whole episodes on one device: task and policy in one loop, without transfers.

Row r of a member plays its episodes r, r + n, r + 2n, ... (n rows per member): every episode is
played once, whichever ends first. All tables have one column per row and one line per round of
episodes. The host reads one small tensor every hundred steps. On a GPU ten steps form one captured
graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
import torch

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError
from ckpttool.evaluation.rollout import ActionLimits, ActionSampler, Progress, Rollout, RolloutSpec
from ckpttool.evaluation.simulators import (
    DeviceVector,
    Simulator,
    TensorProgram,
    Tensors,
    UserProgram,
    UserSimulator,
)
from ckpttool.networks import torch_programs
from ckpttool.networks.network import InputAdapter
from ckpttool.networks.torch_backend import TorchPolicy, is_out_of_memory

Act = Callable[..., torch.Tensor]
"""From observations [batch, obs_dim], and the noise [batch, action_dim] of drawn actions, to actions."""

STEPS_BETWEEN_LOOKS = 100
STEPS_PER_GRAPH = 10
# The exploration noise of all episodes is drawn on the device before the first step.
MOST_NOISE_BYTES = 1 << 31
_NEVER = torch.iinfo(torch.int64).max


class RolloutStatus(NamedTuple):
    """Values that the host reads together: finished episodes, steps, and three error indicators."""

    finished: int
    steps: int
    unsound: int
    """rows that had a non-finite action (or observation)"""
    unpaid: int
    """non-finite returns"""
    longest: int
    """longest running episode, in steps"""


def play_on_device(
    policy: TorchPolicy, envs: DeviceVector, play: RolloutSpec, members: int, progress: Progress
) -> tuple[Rollout, ...]:
    """Play a task on the policy's device; see rollout.rollouts.

    On the CPU it uses one thread: a step consists of many small operations, and on busy cores threads that
    wait for each other at every operation made it twenty times slower.

    Args:
        policy: a policy of the PyTorch backend.
        envs: the task, with its number of rows.
        play: episodes, seeds, limits and noise.
        members: policies in the stack.
        progress: called with the episodes finished so far, all, and the steps.
    """
    _require_inputs(policy.inputs, envs)
    try:
        with policy.threads(1):
            return play_members(
                policy.act, policy.torch_device, envs, play, members, progress, graphs=policy.graphs
            )
    except (RuntimeError, MemoryError) as error:
        failure = policy.device_failure(error)
        if is_out_of_memory(error) and envs.num_envs > members:
            failure.message += f" for {envs.num_envs // members:,} environments"
            failure.hint = f"use --num-envs {max(1, envs.num_envs // members // 2)}"
    raise failure


def _require_inputs(inputs: InputAdapter, envs: DeviceVector) -> None:
    """Raise unless the policy has the task's observations as its only input, and no memory."""
    if inputs.is_joint:
        raise UsageError(
            "the device engine supports only policies with one input and no memory",
            hint="use --engine auto for other policies",
        )
    if inputs.shapes[:1] != [(envs.spec.obs_dim,)]:
        raise EnvironmentMismatchError(
            f"the policy's inputs do not match the observations of {envs.spec.id}",
            expected=f"[batch, {envs.spec.obs_dim}]",
            found=", ".join(str(["batch", *shape]) for shape in inputs.shapes).replace("'", ""),
        )


def play_members(
    act: Act,
    environment: torch.device,
    envs: DeviceVector,
    play: RolloutSpec,
    members: int,
    progress: Progress,
    *,
    graphs: bool,
) -> tuple[Rollout, ...]:
    """Play every member's episodes; results equal those of rollout.rollouts within rounding.

    Args:
        act: computes the actions of all rows, tensors on the device.
        environment: the device.
        envs: the task, with its number of rows.
        play: episodes, seeds, limits and noise.
        members: policies in the stack.
        progress: called with the episodes finished so far, all, and the steps.
        graphs: replay each step as one captured graph, on CUDA.
    """
    interrupted = False
    with _gradient_mode(envs):
        envs.require_agreement(environment)
        start = time.perf_counter()
        game = _DeviceRollout(act, environment, envs, play, members)
        advance = game.advance(graphs=graphs)
        finished, total = 0, members * play.episodes
        try:
            while finished < total:
                advance()
                finished, steps, *_ = game.look()
                progress(finished, total, steps)
        except KeyboardInterrupt:
            if not game.look().finished:
                raise
            interrupted = True
        seconds = time.perf_counter() - start
        return tuple(game.result(member, seconds, interrupted) for member in range(members))


class _DeviceRollout:
    """One rollout: the task's rows, the played episodes, and one step of all rows."""

    def __init__(
        self, act: Act, environment: torch.device, envs: DeviceVector, play: RolloutSpec, members: int
    ) -> None:
        if play.watch is not None:
            raise UsageError("the device engine does not support rendering", hint="use --engine auto")
        if isinstance(play.sampling, ActionSampler) or (
            play.sampling is not None and play.sampling.law != "normal"
        ):
            raise UsageError("the device engine does not sample discrete actions", hint="use --engine auto")
        self.act, self.device, self.envs, self.play, self.members = act, environment, envs, play, members
        self.rows = envs.num_envs // members
        rounds = -(-play.episodes // self.rows)
        limits = ActionLimits(envs)
        self.shape = limits.shape
        self.low, self.high, self.slack = map(self._put, (limits.low, limits.high, limits.slack))
        order = np.tile(np.arange(self.rows), members)
        # Per row: its number of episodes, and the number of its first one.
        self.quota = self._put((play.episodes - order + self.rows - 1) // self.rows)
        self.first = self._put(order)
        self.counted = torch.arange(rounds + 1, device=environment)[:, None] < self.quota
        # Per row, updated in place: the round, the number of its episode, its steps and return so far; over
        # all rounds: clipped actions, and the steps before the first non-finite action, NaN afterwards.
        self.round, self.episode, self.length = (self._none(len(order)) for _ in range(3))
        self.rewards = self._none(len(order), dtype=torch.float64)
        self.clipped, self.sound = self._none(len(order)), self._none(len(order))
        self.stain = self._none(len(order), dtype=torch.float32)
        # Per round and row. An idle row plays on; its results go into the first uncounted line.
        table = (rounds + 1, len(order))
        self.returns = self._none(*table, dtype=torch.float64)
        self.lengths, self.limited = self._none(*table), self._none(*table)
        self.ended: dict[str, torch.Tensor] = {}
        simulator = is_simulator(envs)
        self.task: _ProgramRows | _SimulatorRows = (
            _SimulatorRows(self) if simulator else _ProgramRows(self, rounds)
        )
        for name in self.task.ends:
            self.ended[name] = self._none(*table, dtype=torch.bool)
        # A simulator ends its episodes itself.
        self.limit = (None if simulator else envs.spec.max_episode_steps) or _NEVER
        # User code may return non-finite observations.
        self.doubted = isinstance(envs.task, UserProgram | UserSimulator)
        self.seen_sound, self.seen_stain = self._none(len(order)), self._none(len(order), dtype=torch.float32)
        drawn = play.noise is not None or play.sampling is not None
        noise = self._draws(ActionLimits(envs, play.noise, play.sampling), rounds) if drawn else None
        # Noise that is added to actions, or that the policy draws them with.
        self.noise = noise if play.sampling is None else None
        self.normal = None if play.sampling is None else noise
        self.begin()

    def put_columns(self, arrays: tuple[np.ndarray, ...], rounds: int) -> Tensors:
        """Return arrays [episodes, ...] on the device, with lines for the rounds of idle rows."""
        lines = np.minimum(np.arange((rounds + 1) * self.rows), self.play.episodes - 1)
        return tuple(self._put(array[lines]) for array in arrays)

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array, device=self.device)

    def _none(self, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def _draws(self, limits: ActionLimits, rounds: int) -> torch.Tensor:
        """Return the noise of every episode and step: float64 [(rounds + 1) * rows, steps, action_dim]."""
        if is_simulator(self.envs) or self.limit == _NEVER:
            raise UsageError(
                "noise on the device requires episodes with known seeds and a step limit; "
                f"{self.envs.spec.id} has none",
                hint="the noise of an action depends on the episode's seed and step",
            )
        size = (rounds + 1) * self.rows * self.limit * self.envs.spec.action_dim * 8
        if size > MOST_NOISE_BYTES:
            raise UsageError(
                "the noise for this many episodes does not fit on the device",
                expected=f"at most {MOST_NOISE_BYTES >> 20:,} MiB",
                found=f"{size >> 20:,} MiB",
                hint="use fewer --episodes",
            )
        seeds = self.play.seed + np.arange(self.play.episodes)
        return self.put_columns((limits.draws(seeds, self.limit),), rounds)[0]

    def begin(self) -> None:
        """Reset everything to the state before the first step."""
        changed = (self.round, self.length, self.rewards, self.clipped, self.sound, self.stain)
        tables = (self.returns, self.lengths, self.limited, *self.ended.values())
        for tensor in (*changed, *tables, self.seen_sound, self.seen_stain):
            tensor.zero_()
        self.episode.copy_(self.first)
        self.task.state = self.task.begin()
        self.steps = 0

    def advance(self, *, graphs: bool) -> Callable[[], None]:
        """Return a function that plays STEPS_BETWEEN_LOOKS steps."""
        may = not is_simulator(self.envs) or cast(Simulator, self.envs.task).capturable
        if graphs and may and self.device.type == "cuda":
            tick, steps = self.graph(), STEPS_PER_GRAPH
        else:
            tick, steps = self.tick, 1

        def play() -> None:
            for _ in range(STEPS_BETWEEN_LOOKS // steps):
                tick()
                self.steps += steps

        return play

    def graph(self) -> Callable[[], None]:
        """Return a function that launches STEPS_PER_GRAPH steps."""
        expected = self._played(self.tick, 2 * STEPS_PER_GRAPH) if is_simulator(self.envs) else None
        state = self.task.state = tuple(tensor.clone() for tensor in self.task.state)

        def body() -> None:
            for _ in range(STEPS_PER_GRAPH):
                self.tick()
            # All are computed before the first is written, because a task may swap two of its tensors.
            for old, new in zip(state, self.task.state, strict=True):
                old.copy_(new)
            self.task.state = state

        with torch.cuda.device(self.device):
            replayed, _ = torch_programs.capture_graph(body, self.device)
        # The calls before the capture have advanced the episodes.
        self._begin_in(state)
        if expected is not None:
            self._require_replayed(expected, replayed.replay)
            self._begin_in(state)
        return replayed.replay

    def _begin_in(self, tensors: Tensors) -> None:
        """Reset everything to the first step, and copy the task's state into these tensors."""
        self.begin()
        for old, new in zip(tensors, self.task.state, strict=True):
            old.copy_(new)
        self.task.state = tensors

    def _played(self, tick: Callable[[], None], ticks: int) -> Tensors:
        """Return the observations, returns and lengths after the first ticks."""
        for _ in range(ticks):
            tick()
        tensors = (self.task.observe(), self.rewards, self.length, self.round)
        return tuple(tensor.clone() for tensor in tensors)

    def _require_replayed(self, expected: Tensors, replay: Callable[[], None]) -> None:
        """Raise UnsupportedError if two replays differ from the simulator without a graph."""
        first = self._played(replay, 2)
        alike = all(
            torch.allclose(one, other, 1e-3, 1e-3) for one, other in zip(first, expected, strict=True)
        )
        if not alike:
            raise UnsupportedError(
                f"a CUDA graph of {self.envs.spec.id} does not reproduce its step",
                hint="remove `capturable`, so that steps are not captured",
            )

    def tick(self) -> None:
        """Advance every row by one step, without a branch for rows that end: one captured graph for all.

        This takes 22 operators for one action and a state of two tensors, besides those of the policy and
        the task.
        """
        obs = self.task.observe()
        drawn = () if self.normal is None else (self.normal[self.episode, self.length],)
        actions = self.act(obs, *drawn)
        if actions.shape != self.shape:
            raise EnvironmentMismatchError(
                "the policy's actions do not match the environment",
                expected=str(list(self.shape)),
                found=str(list(actions.shape)),
            )
        if self.doubted:
            self.seen_sound.add_(self.seen_stain.add_((obs - obs).sum(1)).isfinite())
        limited = actions.clamp(self.low, self.high)
        excess = actions - limited
        # 0 times a non-finite value is NaN, which persists in the sum.
        self.stain.add_(_reduce_actions(excess, lambda tensor, axis: (tensor * 0).sum(axis)), alpha=0)
        self.sound.add_(self.stain == self.stain)
        if self.noise is None:
            self.clipped.add_(_reduce_actions(excess.abs() > self.slack, torch.any))
        else:
            limited = (limited + self.noise[self.episode, self.length]).clamp(self.low, self.high)
        rewards, terminated, truncated = self.task.step(limited.to(self.low.dtype))
        self.rewards.add_(rewards)
        self.length.add_(1)
        line = self.round[None]
        self.returns.scatter_(0, line, self.rewards[None])
        self.lengths.scatter_(0, line, self.length[None])
        self.limited.scatter_(0, line, self.clipped[None])
        over = self.length >= self.limit
        for name, flags in (("terminated", terminated), ("truncated", truncated)):
            if flags is not None:
                self.ended[name].scatter_(0, line, flags[None])
                over |= flags
        torch.minimum(self.round + over, self.quota, out=self.round)
        torch.add(self.first, self.round, alpha=self.rows, out=self.episode)
        self.rewards.masked_fill_(over, 0.0)
        self.length.masked_fill_(over, 0)
        self.task.restart(over, self.episode)

    def look(self) -> RolloutStatus:
        """Return the progress of the rollout in one transfer; raise for a non-finite number."""
        facts = torch.stack(
            [
                self.round.sum(),
                (self.lengths * self.counted).sum(),
                (self.sound < self.steps).sum(),
                (~self.returns.isfinite()).sum(),
                self.length.max(),
            ]
        )
        status = RolloutStatus(*map(int, facts.tolist()))
        if status.unsound or status.unpaid:
            self._require_finite()
        longest = self.envs.spec.max_episode_steps
        if longest is not None and status.longest > longest:
            raise UnsupportedError(
                f"{self.envs.spec.id} does not end an episode after max_episode_steps",
                expected=f"at most {longest} steps",
                found=str(status.longest),
            )
        return status

    def _require_finite(self) -> None:
        """Raise CkpttoolError for the first non-finite number of a counted episode."""
        lengths, counted = (t.cpu().numpy() for t in (self.lengths, self.counted))
        ends = (lengths * counted).cumsum(0)
        errors: list[tuple[int, int, int, str]] = []
        sources = [(self.sound, "the policy's action is")]
        if self.doubted:
            sources.insert(0, (self.seen_sound, f"an observation of {self.envs.spec.id} is"))
        for rank, (tensor, what) in enumerate(sources):
            sound = tensor.cpu().numpy()
            for row in np.flatnonzero(sound < ends[-1]).tolist():
                line = int(np.searchsorted(ends[:, row], sound[row], side="right"))
                step = int(sound[row] - (ends[line - 1, row] if line else 0))
                episode = line * self.rows + row % self.rows
                where = f"in episode {episode}, step {step}"
                errors.append((int(sound[row]), episode, rank, f"{what} not finite {where}"))
        if errors:
            raise CkpttoolError(min(errors)[-1])
        unpaid = counted & ~np.isfinite(self.returns.cpu().numpy())
        for line, row in np.argwhere(unpaid).tolist():
            episode = line * self.rows + row % self.rows
            raise CkpttoolError(f"a reward of {self.envs.spec.id} is not finite in episode {episode}")

    def result(self, member: int, seconds: float, interrupted: bool) -> Rollout:
        """Return a member's finished episodes in order of their numbers."""
        episodes = self.play.episodes
        mine = slice(member * self.rows, (member + 1) * self.rows)
        rounds = len(self.returns) - 1

        def flat(table: torch.Tensor) -> np.ndarray:
            return table[:rounds, mine].cpu().numpy().reshape(-1)[:episodes]

        lengths, counted = flat(self.lengths), self.counted[:, mine]
        done = np.arange(rounds)[:, None] < self.round[mine].cpu().numpy()
        done = done.reshape(-1)[:episodes]
        none = np.zeros(episodes, np.bool_)
        ends = {name: flat(table) for name, table in self.ended.items()}
        if self.limit != _NEVER:
            ends["truncated"] = lengths >= self.limit
        seeds = self.play.seed + np.arange(episodes)
        return Rollout(
            returns=flat(self.returns)[done],
            lengths=lengths[done],
            terminated=ends.get("terminated", none)[done],
            truncated=ends.get("truncated", none)[done],
            # A simulator chooses the start of its episodes.
            seeds=seeds[:0] if is_simulator(self.envs) else seeds[done],
            episodes=episodes,
            num_envs=self.rows,
            steps=int(lengths.sum()),
            seconds=seconds,
            # Counted over all rounds.
            clipped=int((self.limited[:, mine] * counted).amax(0).sum()),
            engine=self.envs.engine,
            agreement=self.envs.agreement,
            interrupted=interrupted,
        )


class _ProgramRows:
    """Rows of a tensor program, whose episodes start from seeds.

    `state` is advanced by every step, and kept at fixed addresses between graphs; `ends` are the flags that
    steps return. A step returns rewards, terminated and truncated, None for a flag that never occurs.
    """

    def __init__(self, game: _DeviceRollout, rounds: int) -> None:
        self._program = cast(TensorProgram, game.envs.task)
        self._first = game.first
        seeds = game.play.seed + np.arange(game.play.episodes)
        self._starts = game.put_columns(self._program.starts(seeds), rounds)
        self.state: Tensors = ()
        # A program has no internal state: an extra step changes nothing.
        actions = game.low.expand(len(game.first), -1)
        _, _, terminated = self._program.step(self.begin(), actions)
        self.ends: tuple[str, ...] = () if terminated is None else ("terminated",)

    def begin(self) -> Tensors:
        return tuple(table[self._first] for table in self._starts)

    def observe(self) -> torch.Tensor:
        return self._program.observe(self.state)

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        self.state, rewards, terminated = self._program.step(self.state, actions)
        return rewards, terminated, None

    def restart(self, over: torch.Tensor, episode: torch.Tensor) -> None:
        self.state = tuple(
            torch.where(over.view(-1, *[1] * (now.ndim - 1)), starts.index_select(0, episode), now)
            for now, starts in zip(self.state, self._starts, strict=True)
        )


class _SimulatorRows:
    """Rows of a simulator, which restarts them itself; the state is their observations."""

    ends: tuple[str, ...] = ("terminated", "truncated")

    def __init__(self, game: _DeviceRollout) -> None:
        self._simulator = cast(Simulator, game.envs.task)
        self._seed = game.play.seed
        if self._simulator.device != game.device:
            raise UsageError(
                f"{game.envs.spec.id} and the policy are on different devices",
                expected=str(game.device),
                found=str(self._simulator.device),
                hint="use --device to select one device for both",
            )
        self.state: Tensors = ()

    def begin(self) -> Tensors:
        return (self._simulator.reset(self._seed),)

    def observe(self) -> torch.Tensor:
        return self.state[0]

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        obs, rewards, terminated, truncated = self._simulator.step(actions)
        self.state = (obs,)
        return rewards, terminated, truncated

    def restart(self, over: torch.Tensor, episode: torch.Tensor) -> None:
        pass


def is_simulator(envs: DeviceVector) -> bool:
    """Return whether the task is a simulator with internal state, not a tensor program."""
    return not hasattr(envs.task, "starts")


def _gradient_mode(envs: DeviceVector) -> torch.no_grad | torch.inference_mode:
    """Return the context of a rollout without gradients.

    A simulator keeps tensors created in the context and may write them outside, which inference mode
    forbids.
    """
    return torch.no_grad() if is_simulator(envs) else torch.inference_mode()


def _reduce_actions(values: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return [rows] of [rows, action_dim]; one action needs no kernel."""
    return values[:, 0] if values.shape[1] == 1 else reduce(values, 1)
