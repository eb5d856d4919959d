"""Which engine steps an environment: the fastest that knows it, or the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.agents.envs import pendulum_batch, tensors
from ckpttool.agents.envs.gym_vector import GymVector, heard, redirect_mujoco
from ckpttool.agents.envs.mujoco_tasks import TASKS
from ckpttool.agents.envs.mujoco_vector import MujocoVector
from ckpttool.agents.envs.pendulum_tensors import PendulumTensors
from ckpttool.agents.envs.spec import VectorEnv
from ckpttool.errors import UnsupportedError, UsageError

AUTO = "auto"
MakeOne = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that plays some of Gymnasium's environments as Gymnasium does, only faster.

    `build` gets what makes one environment, how many are wanted and how many threads may be used (None:
    all cores), and raises UnsupportedError where this environment is not as the engine knows it.
    """

    name: str
    entry_points: frozenset[str]
    """of the classes in Gymnasium's registry"""
    build: Callable[[MakeOne, int, int | None], VectorEnv]
    on_request: bool = False
    """only for who names it: `auto` leaves it out"""

    @property
    def answers_to(self) -> tuple[str, ...]:
        """The names under which it can be asked for."""
        return (self.name,) if self.on_request else (AUTO, self.name)

    @property
    def plays(self) -> str:
        """The names of the environments, for a sentence."""
        names = {entry.partition(":")[2].removesuffix("Env") for entry in self.entry_points}
        return ", ".join(sorted(names))


_PENDULUM = frozenset({"gymnasium.envs.classic_control.pendulum:PendulumEnv"})
FAST = (
    Engine(MujocoVector.engine, frozenset(TASKS), MujocoVector),
    Engine(
        pendulum_batch.ENGINE,
        _PENDULUM,
        lambda make_one, num_envs, _: pendulum_batch.PendulumBatch(make_one, num_envs),
    ),
    Engine(
        tensors.ENGINE,
        _PENDULUM,
        lambda make_one, num_envs, _: tensors.DeviceVector(PendulumTensors(make_one), num_envs),
        on_request=True,
    ),
)
ENGINES = (AUTO, GymVector.engine, *(engine.name for engine in FAST))


def build(
    asked: str, env_id: str, make_one: MakeOne, num_envs: int, threads: int | None, known: Mapping[str, Any]
) -> VectorEnv:
    """Return environments of what `make_one` makes; `known` is Gymnasium's registry.

    An engine that was asked for and cannot play raises UsageError; otherwise Gymnasium plays.
    """
    if asked != GymVector.engine:
        entry_point = _entry_point(env_id, make_one, known)
        for engine in FAST:
            if asked in engine.answers_to and entry_point in engine.entry_points:
                try:
                    return engine.build(make_one, num_envs, threads)
                except UnsupportedError as error:
                    if asked != AUTO:
                        raise UsageError(
                            f"{env_id}: {error.message}",
                            expected=error.expected,
                            found=error.found,
                            hint=error.hint,
                        ) from None
            elif asked == engine.name:
                raise UsageError(
                    f"the {asked} engine does not know {env_id}", hint=f"it plays {engine.plays}"
                )
    return GymVector(make_one, num_envs)


def _entry_point(env_id: str, make_one: MakeOne, known: Mapping[str, Any]) -> str:
    """Return where the environment's class is; a name without a version is known once one is made."""
    if env_id in known:
        return str(known[env_id].entry_point)
    # What is said here is said again when it is made to be played.
    restore = redirect_mujoco({})
    try:
        with heard({}):
            made = make_one()
    finally:
        restore()
    made.close()
    return str(made.spec.entry_point) if made.spec is not None else ""
