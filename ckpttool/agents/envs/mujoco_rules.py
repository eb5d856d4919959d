"""What an engine must know of a MuJoCo task: what it shows, what it pays, when it ends; for all rows at once.

Every rule does Gymnasium's arithmetic (`gymnasium/envs/mujoco/*_v4.py`, `*_v5.py`) in the same order and the
same types, so that results are equal to the last bit: actions are float32, and so are costs made of them
alone; sums run along contiguous rows, which numpy adds up as it does one array.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Fields = Mapping[str, np.ndarray]
"""MjData's fields by name, each [n, ...] float64: qpos, qvel, ctrl and what a task's rules name."""

Judged = tuple[np.ndarray, np.ndarray]
"""Rewards (float64 or narrower) and terminated (bool), each [n]."""


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """One task's rules; `before` is what `judge` must remember of the state before a step, [n].

    `fields` are the derived ones that the rules read. `contacts` says that they read `cfrc_ext`, which
    MuJoCo computes only when it is asked to (`mj_rnePostConstraint`).
    """

    observe: Callable[[Fields], tuple[np.ndarray, ...]]
    """the parts of the observations, each [n, ...], in their order"""
    judge: Callable[[Fields, np.ndarray, np.ndarray], Judged]
    """from the fields after a step, what was remembered, and the actions [n, nu]"""
    before: Callable[[Fields], np.ndarray] = lambda f: f["qpos"][:, 0].copy()
    """of most tasks: the position along x"""
    fields: tuple[str, ...] = ()
    contacts: bool = False


def effort(actions: np.ndarray) -> np.ndarray:
    """Return the sum of the squared actions [n], in the actions' own type."""
    total: np.ndarray = np.add.reduce(np.square(actions, order="C"), axis=1)
    return total


def never(f: Fields) -> np.ndarray:
    """Return terminated [n] of a task that only the time limit ends."""
    return np.zeros(len(f["qpos"]), np.bool_)


def positions(env: Any, skipped: int) -> Callable[[Fields], np.ndarray]:
    """Return what takes qpos as it is observed: without where the body is, unless `env` shows that."""
    start = skipped if env._exclude_current_positions_from_observation else 0
    return lambda f: f["qpos"][:, start:]


def survival(env: Any, version: int) -> Callable[[np.ndarray], Judged]:
    """Return what turns `healthy` [n] into the reward for it and terminated.

    Version 4 pays it in the last step too, if being unhealthy ends the episode.
    """
    worth, ends = env._healthy_reward, bool(env._terminate_when_unhealthy)

    def judged(healthy: np.ndarray) -> Judged:
        paid = np.ones_like(healthy) if version == 4 and ends else healthy
        return paid * float(worth), ~healthy if ends else np.zeros_like(healthy)

    return judged


def within(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Return where values lie strictly between two limits."""
    least, most = limits
    inside: np.ndarray = (values > least) & (values < most)
    return inside
