"""MuJoCo's own batch of simulations behind the vector protocol, with the arithmetic of Gymnasium's tasks."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ckpttool.agents.envs.gym_vector import describe, heard, redirect_mujoco
from ckpttool.agents.envs.mujoco_rules import Fields
from ckpttool.agents.envs.mujoco_tasks import rules_of
from ckpttool.agents.envs.spec import Agreement, Outcome, deviation
from ckpttool.errors import CkpttoolError, UnsupportedError, UsageError

TRIED_STEPS = 5
OBSERVATION_TOLERANCE: Final = 1e-9
REWARD_TOLERANCE: Final = 1e-6
"""Gymnasium computes the costs of actions in float32."""


class MujocoVector:
    """One MuJoCo task in many simulations, stepped together on all cores.

    Gymnasium makes one object of the task: its model, its parameters and its draws at resets are used, and
    its first steps are compared. UnsupportedError says why a task cannot be played so.
    """

    engine = "mujoco"

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1, threads: int | None = None) -> None:
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self.num_envs = num_envs
        self._notes: dict[str, None] = {}
        self._restore = redirect_mujoco(self._notes)
        try:
            with heard(self._notes):
                made = make_one()
                self.spec = describe(made)
                self._prepare(made, min(threads or _cores(), num_envs))
                self.agreement: Agreement | None = self._compare(made).require(self.spec.id, self.engine)
        except BaseException:
            self._restore()
            raise

    def _prepare(self, made: Any, threads: int) -> None:
        self._env = env = made.unwrapped
        self._rules = rules_of(made)
        self._batch = _batch(env.model, self.num_envs, threads, self._rules.contacts)
        self._all = np.arange(self.num_envs)
        fields = ("qpos", "qvel", "ctrl", *self._rules.fields)
        self._fields = {name: self._batch.bind(name) for name in fields}
        if self._rules.contacts:
            self._fields["cfrc_ext"] = np.zeros((self.num_envs, env.model.nbody, 6))
            self._touching = self._batch.bind("ncon")
            self._mujoco = importlib.import_module("mujoco")
            self._one = self._mujoco.MjData(env.model)
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._limit = self.spec.max_episode_steps or np.iinfo(np.int64).max
        self.obs: np.ndarray = np.zeros((self.num_envs, self.spec.obs_dim))

    def _compare(self, made: Any) -> Agreement:
        """Compare a few steps with Gymnasium's, whose other versions may differ by more than rounding."""
        actions = np.random.default_rng(0).uniform(-1, 1, (TRIED_STEPS, self.num_envs, self.spec.action_dim))
        actions = actions.astype(self.spec.action_low.dtype)
        theirs = [(made.reset(seed=0)[0], 0.0, False), *(made.step(action[0])[:3] for action in actions)]
        # From here on Gymnasium draws what an episode starts from, and the batch takes it.
        self._env.set_state = self._start
        row = self._all[:1]
        self.reset(row, np.zeros(1, np.int64))
        ours = [(self.obs[0].copy(), 0.0, False)]
        for action in actions:
            reward, terminated, _ = self.step(action, row)
            ours.append((self.obs[0].copy(), float(reward[0]), bool(terminated[0])))
        self.obs[0] = 0
        tolerances = {"observations": OBSERVATION_TOLERANCE, "rewards": REWARD_TOLERANCE, "terminations": 0.0}
        return Agreement(
            TRIED_STEPS,
            tuple(
                deviation(name, [each[i] for each in ours], [each[i] for each in theirs], tolerance)
                for i, (name, tolerance) in enumerate(tolerances.items())
            ),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What Gymnasium and the physics said, each sentence once."""
        return tuple(self._notes)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the episode of seeds[i] in rows[i], with what Gymnasium's own reset draws from the seed."""
        with heard(self._notes):
            self._batch.reset(rows, stage=0)
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                self._row = row
                self._env.reset(seed=seed)
            self._batch.forward(rows)
        if self._rules.contacts:
            self._fields["cfrc_ext"][rows] = 0
        self._elapsed[rows] = 0
        self._observe(self._of(rows), rows)

    def _start(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Stand in for Gymnasium's `set_state`: give the row at hand what was drawn."""
        self._fields["qpos"][self._row], self._fields["qvel"][self._row] = qpos, qvel

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        # All rows, the usual case, need no index and no copies.
        whole = len(rows) == self.num_envs
        at = slice(None) if whole else rows
        actions = actions[at]
        self._fields["ctrl"][at] = actions
        before = self._rules.before(self._of(rows))
        self._advance(None if whole else rows)
        if self._rules.contacts:
            self._feel(rows)
        after = self._of(rows)
        rewards, terminated = self._rules.judge(after, before, actions)
        self._observe(after, rows)
        self._elapsed[at] += 1
        return rewards.astype(np.float64, copy=False), terminated, self._elapsed[at] >= self._limit

    def _advance(self, rows: np.ndarray | None) -> None:
        try:
            self._batch.step(rows, nstep=self._env.frame_skip)
        except RuntimeError as error:
            raise CkpttoolError(f"{self.spec.id}: {error}") from None

    def _feel(self, rows: np.ndarray) -> None:
        """Compute contact forces as Gymnasium does after a step; without a contact there are none."""
        forces, model = self._fields["cfrc_ext"], self._env.model
        compute = self._mujoco.mj_rnePostConstraint
        forces[rows] = 0
        touching = rows if model.neq else rows[self._touching[rows] > 0]
        for row in touching.tolist():
            compute(model, self._batch.get_data(row, self._one))
            forces[row] = self._one.cfrc_ext

    def _of(self, rows: np.ndarray) -> Fields:
        """Return the fields of rows that are in order: live ones if they are all."""
        if len(rows) == self.num_envs:
            return self._fields
        return {name: field[rows] for name, field in self._fields.items()}

    def _observe(self, fields: Fields, rows: np.ndarray) -> None:
        parts = self._rules.observe(fields)
        if len(rows) == self.num_envs:
            np.concatenate(parts, axis=1, out=self.obs)
        else:
            self.obs[rows] = np.concatenate(parts, axis=1)

    def frame(self, row: int) -> np.ndarray:  # noqa: ARG002
        """Raise UnsupportedError: Gymnasium's own environments draw, and play the same."""
        raise UnsupportedError(
            f"the mujoco engine draws no picture of {self.spec.id}",
            hint="make the environments with pictures",
        )

    def close(self) -> None:
        """Close Gymnasium's object and give MuJoCo its own way of warning back."""
        self._env.close()
        self._restore()

    def __enter__(self) -> MujocoVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _batch(model: Any, num_envs: int, threads: int, persistent: bool) -> Any:
    """Return a batch of simulations; raise UnsupportedError where MuJoCo has none, or not for this model."""
    if importlib.util.find_spec("mujoco.batch") is None:
        raise UnsupportedError("this MuJoCo has no batches: they came with 4.0")
    if not hasattr(np, "vecdot"):
        raise UnsupportedError("NumPy before 2.0 rounds a reward otherwise than the engine does")
    try:
        return importlib.import_module("mujoco.batch").Batch(model, num_envs, threads, persistent)
    except ValueError as error:
        raise UnsupportedError(f"MuJoCo makes no batch of this model: {error}") from None
