"""Whole episodes on one device: a tensor program and a policy in one loop, with no transfer inside it.

Rows take their member's next episode by arithmetic, as agents.rollout's do, so that the host need not look;
every hundred steps it asks how many episodes are finished. On a GPU a step is one captured graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ckpttool.agents.actions import Limits
from ckpttool.agents.envs.tensors import DeviceVector, Tensors
from ckpttool.agents.rollout import Play, Progress, Rollout
from ckpttool.errors import CkpttoolError, UsageError

Act = Callable[[torch.Tensor], torch.Tensor]

STEPS_BETWEEN_LOOKS = 100
_NEVER = torch.iinfo(torch.int64).max
TERMINATED, TRUNCATED = 1, 2


class Board(NamedTuple):
    """All that changes from step to step; R rows are divided among M members, who have E episodes each."""

    number: torch.Tensor
    """[R], member * E + episode; M * E for an idle row"""
    length: torch.Tensor
    """[R], steps of the episode so far"""
    paid: torch.Tensor
    """float64 [R], its return so far"""
    begun: torch.Tensor
    """[M], how many episodes each member has begun"""
    steps: torch.Tensor
    """[M]"""
    clipped: torch.Tensor
    """[M]"""
    returns: torch.Tensor
    """float64 [M * E + 1], of finished episodes; the last place is for what is of none"""
    lengths: torch.Tensor
    """[M * E + 1]"""
    ended: torch.Tensor
    """[M * E + 1], 0 or a sum of TERMINATED and TRUNCATED"""
    strayed: torch.Tensor
    """[1], episode and step of the first action that was no number, as one number"""
    state: Tensors


def play_all(
    act: Act,
    place: torch.device,
    envs: DeviceVector,
    play: Play,
    members: int,
    progress: Progress,
    *,
    graphs: bool,
) -> tuple[Rollout, ...]:
    """Play every member's episodes; see agents.rollout.rollouts, whose results these are to rounding."""
    if play.noise is not None or play.record or play.watch is not None:
        raise UsageError(
            "the device engine plays without exploration noise, recordings and pictures",
            hint="--engine auto has them",
        )
    interrupted = False
    with torch.inference_mode():
        envs.require_agreement(place)
        start = time.perf_counter()
        game = _Game(act, place, envs, play, members)
        tick = game.graph() if place.type == "cuda" and graphs else game.tick
        try:
            while game.look() < members * play.episodes:
                for _ in range(STEPS_BETWEEN_LOOKS):
                    tick()
                progress(game.look(), members * play.episodes, int(game.board.steps.sum()))
        except KeyboardInterrupt:
            if not game.look():
                raise
            interrupted = True
        seconds = time.perf_counter() - start
        return tuple(game.result(member, seconds, interrupted) for member in range(members))


class _Game:
    """The board, what does not change, and one step of all rows."""

    def __init__(self, act: Act, place: torch.device, envs: DeviceVector, play: Play, members: int) -> None:
        self.act, self.place, self.envs, self.play, self.members = act, place, envs, play, members
        self.rows, self.idle = envs.num_envs // members, members * play.episodes
        spec, limits = envs.spec, Limits(envs)
        self.low, self.high, self.slack = map(self._put, (limits.low, limits.high, limits.slack))
        self.limit = spec.max_episode_steps or _NEVER
        self.first = self._put(np.arange(members)[:, None] * play.episodes)
        self.seeds = play.seed + np.arange(play.episodes)
        self.starts = tuple(map(self._put, envs.program.starts(self.seeds)))
        self.board = self._opening()

    def _put(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.place)

    def _opening(self) -> Board:
        episodes, rows = self.play.episodes, self.rows
        order = torch.arange(rows, device=self.place).repeat(self.members)
        number = (self.first + order[:rows]).view(-1).masked_fill(order >= episodes, self.idle)

        def none(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.place)

        all_rows, places = len(number), self.idle + 1
        return Board(
            number,
            none(all_rows),
            none(all_rows, dtype=torch.float64),
            none(self.members) + min(rows, episodes),
            none(self.members),
            none(self.members),
            none(places, dtype=torch.float64),
            none(places),
            none(places),
            none(1) + _NEVER,
            tuple(table[order.clamp(max=episodes - 1)] for table in self.starts),
        )

    def tick(self) -> None:
        """Advance every row by one step."""
        self.board = self._next(self.board)

    def graph(self) -> Callable[[], None]:
        """Return what advances every row in one launch."""
        from ckpttool.agents.backends.torch_cuda import captured

        held = self.board

        def body() -> None:
            for old, new in zip(_flat(held), _flat(self._next(held)), strict=True):
                old.copy_(new)

        opening = [tensor.clone() for tensor in _flat(held)]
        with torch.cuda.device(self.place):
            replayed, _ = captured(body, self.place)
        for old, first in zip(_flat(held), opening, strict=True):
            old.copy_(first)  # the calls before the capture have played
        return replayed.replay

    def _next(self, at: Board) -> Board:
        playing = at.number < self.idle
        actions = self.act(self.envs.program.observe(at.state))
        limited = torch.minimum(torch.maximum(actions, self.low), self.high)
        outside = playing & ((actions - limited).abs() > self.slack).any(1)
        sound = ~playing | actions.isfinite().all(1)
        # Numbers of Python are arguments of masked_fill's kernel; torch.where copies them to the device, and
        # a capture may not wait for a copy (aten/src/ATen/native/TensorCompare.cpp).
        strayed = (at.length * (self.idle + 1) + at.number).masked_fill(sound, _NEVER).min()
        state, rewards, terminated = self.envs.program.step(at.state, limited.to(self.low.dtype))
        length = at.length + playing
        paid = torch.where(playing, at.paid + rewards, at.paid)
        truncated = length >= self.limit
        over = playing & (terminated | truncated)
        place = at.number.masked_fill(~over, self.idle)
        how = (terminated * TERMINATED + truncated * TRUNCATED).masked_fill(~over, 0)
        # A row that is done takes its member's next episode: rows that end together take them in order.
        by_member = over.view(self.members, -1)
        order = by_member.cumsum(1) - 1 + at.begun[:, None]
        fresh = (self.first + order).masked_fill(order >= self.play.episodes, self.idle).view(-1)
        start = order.clamp(0, self.play.episodes - 1).view(-1)
        return Board(
            torch.where(over, fresh, at.number),
            length.masked_fill(over, 0),
            paid.masked_fill(over, 0.0),
            at.begun + by_member.sum(1),
            at.steps + playing.view(self.members, -1).sum(1),
            at.clipped + outside.view(self.members, -1).sum(1),
            at.returns.scatter(0, place, paid),
            at.lengths.scatter(0, place, length),
            at.ended.scatter(0, place, how),
            torch.where(at.strayed == _NEVER, strayed, at.strayed),
            tuple(
                torch.where(over.view(-1, *[1] * (new.ndim - 1)), table[start], new)
                for new, table in zip(state, self.starts, strict=True)
            ),
        )

    def look(self) -> int:
        """Return how many episodes are finished; raise if an action was no number."""
        if (strayed := int(self.board.strayed)) != _NEVER:
            step, number = divmod(strayed, self.idle + 1)
            raise CkpttoolError(
                f"the policy's action is not finite in episode {number % self.play.episodes}, step {step}"
            )
        return int((self.board.ended[: self.idle] > 0).sum())

    def result(self, member: int, seconds: float, interrupted: bool) -> Rollout:
        board, episodes = self.board, self.play.episodes
        mine = slice(member * episodes, (member + 1) * episodes)
        ended, returns, lengths = (t[mine].cpu().numpy() for t in (board.ended, board.returns, board.lengths))
        done = ended > 0
        return Rollout(
            returns=returns[done],
            lengths=lengths[done],
            terminated=(ended[done] & TERMINATED) > 0,
            truncated=(ended[done] & TRUNCATED) > 0,
            seeds=self.seeds[done],
            episodes=episodes,
            num_envs=self.rows,
            steps=int(board.steps[member]),
            seconds=seconds,
            clipped=int(board.clipped[member]),
            engine=self.envs.engine,
            agreement=self.envs.agreement,
            interrupted=interrupted,
        )


def _flat(board: Board) -> list[torch.Tensor]:
    return [*board[:-1], *board.state]
