"""Environments behind one small vector protocol in which an episode is a function of its seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpttool.agents.envs import registry
from ckpttool.agents.envs.gym_vector import GymVector
from ckpttool.agents.envs.spec import OBS, EnvSpec, Outcome, VectorEnv
from ckpttool.errors import UsageError

__all__ = ["ENGINES", "OBS", "EnvSpec", "GymVector", "Outcome", "VectorEnv", "make"]

ENGINES = ("auto", "gymnasium")


def make(
    env_id: str,
    num_envs: int = 1,
    *,
    trusted: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    obs_dim: int | None = None,  # noqa: ARG001
    engine: str = "auto",
    pictures: bool = False,
) -> VectorEnv:
    """Return `num_envs` environments of a Gymnasium id, stepped by the fastest engine that knows it.

    `obs_dim` is what the policy takes: another version's observations are adapted to it where that is known
    to be right, and a note says so. `pictures` makes frame() work. `module:Env-v0` imports a module, and
    arguments can name files: both need `trusted`, which a caller may set for what a person typed, never for
    what a file says.
    """
    if (":" in env_id or kwargs) and not trusted:
        raise UsageError(
            f"environment {env_id!r} with a module or arguments can run code",
            hint="name it on the command line",
        )
    if engine not in ENGINES:
        raise UsageError(f"no engine is called {engine!r}", hint=f"there are {', '.join(ENGINES)}")
    gymnasium = registry.gymnasium()
    given = {**(kwargs or {}), **({"render_mode": "rgb_array"} if pictures else {})}

    def make_one() -> Any:
        with registry.sentences(env_id):
            return gymnasium.make(env_id, disable_env_checker=True, **given)

    return GymVector(make_one, num_envs)
