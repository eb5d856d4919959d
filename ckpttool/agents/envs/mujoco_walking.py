"""The rules of MuJoCo's tasks that are about getting somewhere: the cheetah to the humanoid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ckpttool.agents.envs.mujoco_rules import (
    Fields,
    Judged,
    Rules,
    effort,
    never,
    positions,
    survival,
    within,
)

MOST_SPEED = 10
"""Hopper and Walker2d are shown velocities up to this."""


def half_cheetah(env: Any, _version: int) -> Rules:
    """Return `half_cheetah_v4.py`'s and `half_cheetah_v5.py`'s rules, which are the same."""
    return _crawling(env, 1)


def swimmer(env: Any, _version: int) -> Rules:
    """Return `swimmer_v4.py`'s and `swimmer_v5.py`'s rules, which are the same."""
    return _crawling(env, 2)


def hopper(env: Any, version: int) -> Rules:
    """Return `hopper_v4.py`'s or `hopper_v5.py`'s rules."""
    state, height, angle = env._healthy_state_range, env._healthy_z_range, env._healthy_angle_range

    def healthy(f: Fields) -> np.ndarray:
        qpos = f["qpos"]
        bent = within(qpos[:, 2:], state).all(axis=1) & within(f["qvel"], state).all(axis=1)
        upright: np.ndarray = bent & within(qpos[:, 1], height) & within(qpos[:, 2], angle)
        return upright

    return _standing(env, version, healthy)


def walker2d(env: Any, version: int) -> Rules:
    """Return `walker2d_v4.py`'s or `walker2d_v5.py`'s rules."""
    height, angle = env._healthy_z_range, env._healthy_angle_range

    def healthy(f: Fields) -> np.ndarray:
        upright: np.ndarray = within(f["qpos"][:, 1], height) & within(f["qpos"][:, 2], angle)
        return upright

    return _standing(env, version, healthy)


def ant(env: Any, version: int) -> Rules:
    """Return `ant_v4.py`'s or `ant_v5.py`'s rules; version 4 knows contact forces only if asked to."""
    feels = version > 4 or bool(env._use_contact_forces)
    shows = bool(env._include_cfrc_ext_in_observation) if version > 4 else feels
    hidden = version > 4  # the world's body, which is not part of version 5's observations
    body = env.data.body(env._main_body if version > 4 else "torso").id
    place, dt, survive = positions(env, 2), env.dt, survival(env, version)
    onward = env._forward_reward_weight if version > 4 else 1
    tiring, touching = env._ctrl_cost_weight, env._contact_cost_weight
    (least, most), (low, high) = env._contact_force_range, env._healthy_z_range

    def forces(f: Fields) -> np.ndarray:
        return np.clip(f["cfrc_ext"], least, most)

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        moving = (place(f), f["qvel"])
        return (*moving, _flat(forces(f)[:, hidden:])) if shows else moving

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["xpos"][:, body, 0] - before) / dt
        height = f["qpos"][:, 2]
        finite = np.isfinite(f["qpos"]).all(axis=1) & np.isfinite(f["qvel"]).all(axis=1)
        alive, terminated = survive(finite & (height >= low) & (height <= high))
        costs = tiring * effort(actions)
        if feels:
            costs = costs + touching * effort(_flat(forces(f)))
        return velocity * onward + alive - costs, terminated

    return Rules(observe, judge, lambda f: f["xpos"][:, body, 0].copy(), ("xpos",), contacts=feels)


def humanoid(env: Any, version: int) -> Rules:
    """Return `humanoid_v4.py`'s or `humanoid_v5.py`'s rules.

    Version 5 leaves the world's body and the actuators' forces on the free joint out of its observations.
    """
    place, dt, survive = positions(env, 2), env.dt, survival(env, version)
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight
    mass, limits = env.model.body_mass[:, None].copy(), env._healthy_z_range
    total = np.sum(mass)
    # field, and how many of its first entries version 5 leaves out
    shown = [("cinert", 1), ("cvel", 1), ("qfrc_actuator", 6), ("cfrc_ext", 1)]
    if version > 4:
        shown = [
            (name, first) for name, first in shown if getattr(env, f"_include_{name}_in_observation") is True
        ]
    else:
        shown = [(name, 0) for name, _ in shown]

    def along(f: Fields) -> np.ndarray:
        centre: np.ndarray = (mass * f["xipos"]).sum(axis=1) / total
        return centre[:, 0]

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        return (place(f), f["qvel"], *(_flat(f[name][:, first:]) for name, first in shown))

    def judge(f: Fields, before: np.ndarray, _actions: np.ndarray) -> Judged:
        velocity = (along(f) - before) / dt
        alive, terminated = survive(within(f["qpos"][:, 2], limits))
        costs = tiring * effort(f["ctrl"])
        if version > 4:
            touching = env._contact_cost_weight * effort(_flat(f["cfrc_ext"]))
            costs = costs + np.clip(touching, *env._contact_cost_range)
        return onward * velocity + alive - costs, terminated

    bound = ("xipos", *(name for name, _ in shown if name != "cfrc_ext"))
    return Rules(observe, judge, along, bound, contacts=True)


def _crawling(env: Any, skipped: int) -> Rules:
    place, dt = positions(env, skipped), env.dt
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["qpos"][:, 0] - before) / dt
        return onward * velocity - tiring * effort(actions), never(f)

    return Rules(lambda f: (place(f), f["qvel"]), judge)


def _standing(env: Any, version: int, healthy: Any) -> Rules:
    place, dt, survive = positions(env, 1), env.dt, survival(env, version)
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["qpos"][:, 0] - before) / dt
        alive, terminated = survive(healthy(f))
        return onward * velocity + alive - tiring * effort(actions), terminated

    return Rules(lambda f: (place(f), np.clip(f["qvel"], -MOST_SPEED, MOST_SPEED)), judge)


def _flat(values: np.ndarray) -> np.ndarray:
    """Return [n, ...] as contiguous [n, m]: the order in which Gymnasium adds a row up."""
    return values.reshape(len(values), math.prod(values.shape[1:]))
