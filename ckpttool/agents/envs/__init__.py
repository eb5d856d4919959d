"""Environments behind one small vector protocol in which an episode is a function of its seed alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.agents.envs import engines, registry, simulators
from ckpttool.agents.envs.adapters import ADAPTERS, NO_EVIDENCE, Evidence, adapted
from ckpttool.agents.envs.engines import ENGINES
from ckpttool.agents.envs.gym_vector import GymVector
from ckpttool.agents.envs.mujoco_vector import MujocoVector
from ckpttool.agents.envs.pictures import drawable
from ckpttool.agents.envs.spec import OBS, EnvSpec, Outcome, VectorEnv
from ckpttool.agents.envs.tensors import ENGINE as DEVICE
from ckpttool.agents.envs.wrappers import WrapperSpec, changes_size, inner_size, wrapped
from ckpttool.errors import UsageError, choice
from ckpttool.sidecar import are_arguments

__all__ = [
    "ADAPTERS",
    "ENGINES",
    "OBS",
    "EnvSpec",
    "Evidence",
    "GymVector",
    "MujocoVector",
    "Outcome",
    "VectorEnv",
    "WrapperSpec",
    "make",
]


def make(
    env_id: str,
    num_envs: int = 1,
    *,
    trusted: bool = False,
    trusted_arguments: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    obs_dim: int | None = None,
    adapter: str | None = None,
    evidence: Evidence = NO_EVIDENCE,
    wrappers: Sequence[WrapperSpec] = (),
    engine: str = "auto",
    device: str = "cpu",
    pictures: bool = False,
    threads: int | None = None,
) -> VectorEnv:
    """Return `num_envs` environments of a Gymnasium id, stepped by the fastest engine that knows it.

    With the engine "device", `module:factory` is a user's simulator (see simulators), made on `device` with
    `kwargs`; its rows live there.

    `obs_dim` is what the policy takes: another version's observations are adapted to it where that is known
    to be right and `evidence` does not speak against it; what sizes cannot decide, `adapter` asks for.
    `wrappers` are those of training, the first innermost. `pictures` makes frame() work. `threads` is for
    engines that have them, None for all cores. `module:Env-v0` imports a module and needs `trusted`.
    Arguments that are not a few numbers, or not in the signature of the environment, need
    `trusted_arguments`. A caller may set each for what a person typed, never for what a file holds.
    """
    if ":" in env_id and not trusted:
        raise UsageError(
            f"environment {env_id!r} with a module can run code",
            hint="name it on the command line",
        )
    _require_names(engine, adapter)
    if kwargs and not trusted_arguments:
        _require_plain(env_id, kwargs)
        if not (engine == DEVICE and simulators.is_factory(env_id)):
            registry.require_arguments(env_id, kwargs)

    def outfit(vector: VectorEnv, again: Callable[[Mapping[str, Any]], VectorEnv]) -> VectorEnv:
        return _outfitted(vector, again, obs_dim, adapter, evidence, wrappers)

    if engine == DEVICE and simulators.is_factory(env_id):
        own = simulators.load(env_id, num_envs, device, kwargs)
        return outfit(own, lambda _: own)
    if env_id in engines.ALONE and not (kwargs or pictures or registry.installed()):
        make_alone, builders = engines.ALONE[env_id]
        if engine in builders:
            alone = builders[engine](make_alone, num_envs, threads)
            return outfit(alone, lambda _: alone)
    gymnasium = registry.gymnasium()
    given = {**(kwargs or {}), **({"render_mode": "rgb_array"} if pictures else {})}

    # Only Gymnasium's own environments draw.
    stepped = GymVector.engine if pictures and engine == engines.AUTO else engine

    def build(more: Mapping[str, Any]) -> VectorEnv:
        def make_one() -> Any:
            with registry.sentences(env_id):
                made = gymnasium.make(env_id, disable_env_checker=True, **{**more, **given})
            return drawable(made) if pictures else made

        return engines.build(stepped, env_id, make_one, num_envs, threads, gymnasium.registry)

    return outfit(build({}), build)


def _require_names(engine: str, adapter: str | None) -> None:
    if engine not in ENGINES:
        raise UsageError(f"no engine is called {engine!r}", hint=choice(engine, ENGINES))
    if adapter is not None and adapter not in ADAPTERS:
        raise UsageError(f"no adapter is called {adapter!r}", hint=choice(adapter, ADAPTERS))


def _outfitted(
    vector: VectorEnv,
    again: Callable[[Mapping[str, Any]], VectorEnv],
    obs_dim: int | None,
    adapter: str | None,
    evidence: Evidence,
    wrappers: Sequence[WrapperSpec],
) -> VectorEnv:
    """Return the environments as a policy of `obs_dim` values was trained in them: adapted, then wrapped."""
    try:
        size = obs_dim
        if size is not None and wrappers:
            size = inner_size(size, vector.spec.action_dim, wrappers)
        because = replace(evidence, wrapped=evidence.wrapped or changes_size(wrappers))
    except UsageError:
        vector.close()
        raise
    return wrapped(adapted(vector, size, adapter, again, because), wrappers)


def _require_plain(env_id: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that may name a file, cost much, or mean something to Gymnasium."""
    for name, value in kwargs.items():
        if not are_arguments({name: value}):
            raise UsageError(
                f"argument {name[:64]!r} of environment {env_id!r} is not taken from a file",
                expected="numbers, truth values, short lists of them",
                found=str(value)[:60],
            )
    if not are_arguments(dict(kwargs)):
        raise UsageError(f"too many arguments of environment {env_id!r}", found=str(len(kwargs)))
