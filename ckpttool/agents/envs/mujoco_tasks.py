"""The MuJoCo tasks whose rules are known, by Gymnasium's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpttool.agents.envs import mujoco_reaching as reaching
from ckpttool.agents.envs import mujoco_walking as walking
from ckpttool.agents.envs.mujoco_rules import Rules
from ckpttool.errors import UnsupportedError

_HERE = "gymnasium.envs.mujoco."
TASKS: dict[str, tuple[Callable[[Any, int], Rules], int]] = {
    f"{_HERE}{module}_v{version}:{name}Env": (rules, version)
    for name, module, rules, versions in (
        ("HalfCheetah", "half_cheetah", walking.half_cheetah, (4, 5)),
        ("Hopper", "hopper", walking.hopper, (4, 5)),
        ("Walker2d", "walker2d", walking.walker2d, (4, 5)),
        ("Swimmer", "swimmer", walking.swimmer, (4, 5)),
        ("Ant", "ant", walking.ant, (4, 5)),
        ("Humanoid", "humanoid", walking.humanoid, (4, 5)),
        ("InvertedPendulum", "inverted_pendulum", reaching.inverted_pendulum, (4, 5)),
        ("InvertedDoublePendulum", "inverted_double_pendulum", reaching.inverted_double_pendulum, (4, 5)),
        ("Reacher", "reacher", reaching.reacher, (4, 5)),
        ("Pusher", "pusher", reaching.pusher, (5,)),
    )
    for version in versions
}
"""Entry point of Gymnasium's class: what makes its rules from an object of it, and its version."""

WRAPPERS = {"TimeLimit", "OrderEnforcing", "PassiveEnvChecker"}


def rules_of(made: Any) -> Rules:
    """Return the rules of what Gymnasium made; raise UnsupportedError for what they do not cover."""
    env, layer = made.unwrapped, made
    while layer is not env:
        if type(layer).__name__ not in WRAPPERS:
            raise UnsupportedError(f"the mujoco engine knows no {type(layer).__name__}")
        layer = layer.env
    name = f"{type(env).__module__}:{type(env).__name__}"
    if name not in TASKS:
        raise UnsupportedError(f"the mujoco engine does not know {type(env).__name__}")
    if env.render_mode is not None:
        raise UnsupportedError("the mujoco engine draws no pictures")
    rules, version = TASKS[name]
    return rules(env, version)
