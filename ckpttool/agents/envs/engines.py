"""Which engine steps an environment: the fastest that knows it, or the one that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.agents.envs import pendulum_alone, pendulum_batch, tensors
from ckpttool.agents.envs.gym_vector import GymVector, heard, redirect_mujoco
from ckpttool.agents.envs.mountain_car_tensors import ID as MOUNTAIN_CAR
from ckpttool.agents.envs.mountain_car_tensors import MountainCarAlone, MountainCarTensors
from ckpttool.agents.envs.mujoco_tasks import TASKS
from ckpttool.agents.envs.mujoco_vector import MujocoVector
from ckpttool.agents.envs.pendulum_tensors import PendulumTensors
from ckpttool.agents.envs.spec import VectorEnv
from ckpttool.errors import UnsupportedError, UsageError

AUTO = "auto"
MakeOne = Callable[[], Any]
Build = Callable[[MakeOne, int, int | None], VectorEnv]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that plays some of Gymnasium's environments as Gymnasium does, only faster.

    A task's builder gets what makes one environment, how many are wanted and how many threads may be used
    (None: all cores), and raises UnsupportedError where this environment is not as the engine knows it.
    """

    name: str
    tasks: Mapping[str, Build]
    """by the entry point of the environment's class in Gymnasium's registry"""
    on_request: bool = False
    """only for who names it: `auto` leaves it out"""

    @property
    def answers_to(self) -> tuple[str, ...]:
        """The names under which it can be asked for."""
        return (self.name,) if self.on_request else (AUTO, self.name)

    @property
    def plays(self) -> str:
        """The names of the environments, for a sentence."""
        names = {entry.partition(":")[2].removesuffix("Env") for entry in self.tasks}
        return ", ".join(sorted(_TITLES.get(name, name) for name in names))


_TITLES = {"Continuous_MountainCar": MOUNTAIN_CAR.partition("-")[0]}
_PENDULUM = "gymnasium.envs.classic_control.pendulum:PendulumEnv"
_MOUNTAIN_CAR = "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv"


def _pendulum_batch(make_one: MakeOne, num_envs: int, _: int | None) -> VectorEnv:
    return pendulum_batch.PendulumBatch(make_one, num_envs)


def _pendulum_tensors(make_one: MakeOne, num_envs: int, _: int | None) -> VectorEnv:
    return tensors.DeviceVector(PendulumTensors(make_one), num_envs)


def _mountain_car_tensors(make_one: MakeOne, num_envs: int, _: int | None) -> VectorEnv:
    return tensors.DeviceVector(MountainCarTensors(make_one), num_envs)


FAST = (
    Engine(MujocoVector.engine, dict.fromkeys(TASKS, MujocoVector)),
    Engine(pendulum_batch.ENGINE, {_PENDULUM: _pendulum_batch}),
    Engine(
        tensors.ENGINE,
        {_PENDULUM: _pendulum_tensors, _MOUNTAIN_CAR: _mountain_car_tensors},
        on_request=True,
    ),
)
ALONE: Mapping[str, tuple[MakeOne, Mapping[str, Build]]] = {
    pendulum_alone.ID: (
        pendulum_alone.PendulumAlone,
        {
            AUTO: _pendulum_batch,
            pendulum_batch.ENGINE: _pendulum_batch,
            tensors.ENGINE: _pendulum_tensors,
        },
    ),
    MOUNTAIN_CAR: (MountainCarAlone, {tensors.ENGINE: _mountain_car_tensors}),
}
"""The environments that are played where Gymnasium is not installed: what makes one, and its engines."""

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
            if asked in engine.answers_to and entry_point in engine.tasks:
                try:
                    return engine.tasks[entry_point](make_one, num_envs, threads)
                except UnsupportedError as error:
                    if asked != AUTO:
                        raise UsageError(
                            f"{env_id}: {error.message}",
                            expected=error.expected,
                            found=error.found,
                            hint=error.hint,
                        ) from None
            elif asked == engine.name:
                own = ", and simulators of yours: --env module:factory" if asked == tensors.ENGINE else ""
                raise UsageError(
                    f"the {asked} engine does not know {env_id}", hint=f"it plays {engine.plays}{own}"
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
