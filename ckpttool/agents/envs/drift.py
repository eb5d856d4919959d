"""How the observations of one MuJoCo task differ between its versions: what each is made of, and how long.

From Gymnasium's `gymnasium/envs/mujoco/*_v4.py` and `*_v5.py` (there: `observation_structure`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckpttool.shown import count

FORCES = "contact forces"
EMPTY = "zeros"
"""A part that is always zero: what the world's body feels, what no actuator moves."""

Layout = tuple[tuple[str, int], ...]
"""The parts of an observation in their order, each with its length."""

_MOVING = ("positions and velocities", 27)
_STATE = ("positions and velocities", 45)
_HUMANOID: Mapping[int, Layout] = {
    348: (_STATE, ("cinert", 130), ("cvel", 78), ("actuators", 17), (FORCES, 78)),
    376: (
        *(_STATE, (EMPTY, 10), ("cinert", 130), (EMPTY, 6), ("cvel", 78)),
        *((EMPTY, 6), ("actuators", 17), (EMPTY, 6), (FORCES, 78)),
    ),
}
LAYOUTS: Mapping[str, Mapping[int, Layout]] = {
    "Ant": {
        27: (_MOVING,),
        105: (_MOVING, (FORCES, 78)),
        111: (_MOVING, (EMPTY, 6), (FORCES, 78)),
    },
    "Humanoid": _HUMANOID,
    "HumanoidStandup": _HUMANOID,
    "InvertedDoublePendulum": {9: (("state", 9),), 11: (("state", 9), (EMPTY, 2))},
    "Reacher": {10: (("state", 10),), 11: (("state", 10), (EMPTY, 1))},
}
"""By the task's name and the number of values."""

UNSEEN = {"HalfCheetah": 1, "Hopper": 1, "Walker2d": 1, "Swimmer": 2, "Ant": 2, "Humanoid": 2}
"""How many coordinates of where the body is are left out unless they are asked for."""

SIZES = {
    "HalfCheetah-v5": (17, 6),
    "Hopper-v5": (11, 3),
    "Walker2d-v5": (17, 6),
    "Swimmer-v5": (8, 2),
    "Ant-v4": (27, 8),
    "Ant-v5": (105, 8),
    "Humanoid-v4": (376, 17),
    "Humanoid-v5": (348, 17),
    "InvertedPendulum-v5": (4, 1),
    "InvertedDoublePendulum-v4": (11, 1),
    "InvertedDoublePendulum-v5": (9, 1),
    "Reacher-v4": (11, 2),
    "Reacher-v5": (10, 2),
    "Pusher-v5": (23, 7),
    "Pendulum-v1": (3, 1),
    "MountainCarContinuous-v0": (2, 1),
    "LunarLanderContinuous-v3": (8, 2),
    "BipedalWalker-v3": (24, 4),
}
"""Observations and actions of the tasks that agents are published for."""


def family(env_id: str) -> str:
    """Return the name of a MuJoCo task of version 4 or 5, or nothing."""
    found = re.fullmatch(r"(\w+)-v[45]", env_id)
    return found[1] if found else ""


_VERSIONS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "Ant": {2: (111,), 3: (111,), 4: (27, 111), 5: (27, 105)},
    "Humanoid": {1: (376,), 2: (376,), 3: (376,), 4: (376,), 5: (348,)},
    "HumanoidStandup": {1: (376,), 2: (376,), 4: (376,), 5: (348,)},
    "InvertedDoublePendulum": {1: (11,), 2: (11,), 4: (11,), 5: (9,)},
    "Reacher": {1: (11,), 2: (11,), 4: (11,), 5: (10,)},
}
"""How many values each version of a task shows (gym/envs/mujoco/*.py before version 4)."""


def shown_by(trained: str, played: str, size: int) -> bool:
    """Return whether the version that an agent was trained in shows `size` values of the task played."""
    found = re.fullmatch(r"(\w+)-v(\d+)", trained)
    if found is None or found[1] != family(played):
        return False
    return size in _VERSIONS.get(found[1], {}).get(int(found[2]), ())


def arguments(env_id: str, own: int, wanted: int, positions: bool = False) -> dict[str, bool]:
    """Return what to make the environment with so that it shows more of what there is, if that helps.

    `positions` asks for the coordinates that UNSEEN counts: no number of values is evidence of them, because
    wrappers of training (a time feature) add as many.
    """
    name = family(env_id)
    if positions:
        hidden = name in UNSEEN and wanted == own + UNSEEN[name]
        return {"exclude_current_positions_from_observation": False} if hidden else {}
    # ant_v4.py computes no contact forces unless it is asked to, and then they cost.
    if env_id == "Ant-v4" and own == 27 and wanted in LAYOUTS["Ant"]:
        return {"use_contact_forces": True}
    return {}


def forces_at(env_id: str, size: int) -> slice | None:
    """Return where contact forces lie among `size` values of the task, None where it shows none."""
    start = 0
    for part, width in LAYOUTS.get(family(env_id), {}).get(size, ()):
        if part == FORCES:
            return slice(start, start + width)
        start += width
    return None


def with_positions(env_id: str, own: int, wanted: int) -> bool:
    """Return whether the coordinates that are left out would explain the policy's size."""
    return bool(arguments(env_id, own, wanted, positions=True))


_NAMED = re.compile(r"(?<![A-Za-z0-9])([A-Z][A-Za-z0-9]*)[-_]v(\d+)(?![0-9])")


def candidates(words: str, obs_dim: int, action_dim: int) -> tuple[str, ...]:
    """Return the environments that an agent of these sizes may have been trained in, the one named alone.

    `words` is the text that may name one, such as the last parts of a path. A named task that takes other
    sizes is no candidate; the version is the newest one that takes these.
    """
    fitting = [name for name, sizes in SIZES.items() if sizes == (obs_dim, action_dim)]
    for name, version in reversed(_NAMED.findall(words)):
        versions = {each: sizes for each, sizes in SIZES.items() if each.rpartition("-v")[0] == name}
        own = [each for each in versions if each in fitting]
        older = obs_dim in LAYOUTS.get(name, {}) and any(acts == action_dim for _, acts in versions.values())
        if own or older:
            return ((own or list(versions))[-1],)
        if not versions:
            return (f"{name}-v{version}",)
    return tuple(fitting)


def suggestion(env_id: str, obs_dim: int, action_dim: int) -> str | None:
    """Return which tasks a policy of these sizes plays, for the hint of an error."""
    fits = [name for name, sizes in SIZES.items() if sizes == (obs_dim, action_dim)]
    if fits:
        sizes_here = f"{count(obs_dim, 'observation')} and {count(action_dim, 'action')}"
        return f"{sizes_here} are those of {' and '.join(fits)}"
    sizes = LAYOUTS.get(family(env_id), {})
    return _listed(family(env_id), sizes) if sizes else None


def with_forces(env_id: str) -> str:
    """Return which policies see contact forces, for the hint of an error."""
    seeing = {
        task: [size for size, layout in layouts.items() if FORCES in dict(layout)]
        for task, layouts in LAYOUTS.items()
    }
    name = family(env_id)
    tasks = [name] if seeing.get(name) else [task for task in seeing if seeing[task]]
    return "; ".join(_listed(task, seeing[task]) for task in tasks)


def _listed(name: str, sizes: Iterable[int]) -> str:
    return f"{name} is played with {' or '.join(map(str, sorted(sizes)))} observations"
