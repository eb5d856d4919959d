"""The rules of MuJoCo's tasks that are about staying upright or reaching for something."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpttool.agents.envs.mujoco_rules import Fields, Judged, Rules, effort, never

MOST_ANGLE = 0.2
MOST_SEEN = 10
LEAST_HEIGHT = 1


def inverted_pendulum(_env: Any, version: int) -> Rules:
    """Return `inverted_pendulum_v4.py`'s or `inverted_pendulum_v5.py`'s rules: 4 pays the last step too."""

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        return f["qpos"], f["qvel"]

    def judge(f: Fields, _before: np.ndarray, _actions: np.ndarray) -> Judged:
        finite = np.isfinite(f["qpos"]).all(axis=1) & np.isfinite(f["qvel"]).all(axis=1)
        fallen = ~finite | (np.abs(f["qpos"][:, 1]) > MOST_ANGLE)
        return np.ones(len(fallen)) if version == 4 else ~fallen, fallen

    return Rules(observe, judge)


def inverted_double_pendulum(env: Any, version: int) -> Rules:
    """Return `inverted_double_pendulum_v4.py`'s or `_v5.py`'s rules.

    Version 4 pays the last step too, and shows the forces on the hinges, which are none.
    """
    worth = env._healthy_reward if version > 4 else 10
    forces = 1 if version > 4 else None

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        angles = np.ascontiguousarray(f["qpos"][:, 1:])
        speeds = np.clip(f["qvel"], -MOST_SEEN, MOST_SEEN)
        pushed = np.clip(f["qfrc_constraint"][:, :forces], -MOST_SEEN, MOST_SEEN)
        return f["qpos"][:, :1], np.sin(angles), np.cos(angles), speeds, pushed

    def judge(f: Fields, _before: np.ndarray, _actions: np.ndarray) -> Judged:
        # The C library's pow, which the scalars of one environment are raised with: an array's ** 2
        # multiplies, and differs in the last bit of one value in a thousand.
        x, y = f["site_xpos"][:, 0, 0], f["site_xpos"][:, 0, 2]
        fallen = y <= LEAST_HEIGHT
        far = 0.01 * np.float_power(x, 2) + np.float_power(y - 2, 2)
        fast = np.float_power(f["qvel"][:, 1:3], 2)
        alive = worth * ~fallen if version > 4 else worth
        return alive - far - (1e-3 * fast[:, 0] + 5e-3 * fast[:, 1]), fallen

    return Rules(observe, judge, fields=("site_xpos", "qfrc_constraint"))


def reacher(env: Any, version: int) -> Rules:
    """Return `reacher_v4.py`'s or `reacher_v5.py`'s rules: 4 pays for the distance before the step."""
    tip, target = (env.data.body(name).id for name in ("fingertip", "target"))
    near = env._reward_dist_weight if version > 4 else 1
    tiring = env._reward_control_weight if version > 4 else 1
    axes = 2 if version > 4 else 3

    def apart(f: Fields) -> np.ndarray:
        return f["xpos"][:, tip] - f["xpos"][:, target]

    def distance(f: Fields) -> np.ndarray:
        return _length(apart(f))

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        angles = np.ascontiguousarray(f["qpos"][:, :2])
        return np.cos(angles), np.sin(angles), f["qpos"][:, 2:], f["qvel"][:, :2], apart(f)[:, :axes]

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        far = before if version == 4 else distance(f)
        return -far * near + -effort(actions) * tiring, never(f)

    return Rules(observe, judge, distance, ("xpos",))


def pusher(env: Any, _version: int) -> Rules:
    """Return `pusher_v5.py`'s rules; version 4 does not run on MuJoCo 3 and later."""
    tip, thing, goal = (env.data.body(name).id for name in ("tips_arm", "object", "goal"))
    close, there, tiring = env._reward_near_weight, env._reward_dist_weight, env._reward_control_weight

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        bodies = (f["xpos"][:, body] for body in (tip, thing, goal))
        return f["qpos"][:, :7], f["qvel"][:, :7], *bodies

    def judge(f: Fields, _before: np.ndarray, actions: np.ndarray) -> Judged:
        near = -_length(f["xpos"][:, thing] - f["xpos"][:, tip]) * close
        far = -_length(f["xpos"][:, thing] - f["xpos"][:, goal]) * there
        return far + -effort(actions) * tiring + near, never(f)

    return Rules(observe, judge, fields=("xpos",))


def _length(vectors: np.ndarray) -> np.ndarray:
    """Return the norms of [n, 3] as `np.linalg.norm` computes one: the root of a dot product."""
    norms: np.ndarray = np.sqrt(np.vecdot(vectors, vectors))
    return norms
