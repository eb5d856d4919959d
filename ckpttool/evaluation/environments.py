"""Create environments by id, and adapt observations between task versions."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ckpttool.core import deferred
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import MissingExtraError, UnsupportedError, UsageError, suggest_choice
from ckpttool.core.installation import install_extra
from ckpttool.core.sidecar_parsing import are_arguments
from ckpttool.core.text import format_count
from ckpttool.evaluation import fast_engines, simulators
from ckpttool.evaluation.fast_engines import MOUNTAIN_CAR_ID, TASKS, MujocoVector
from ckpttool.evaluation.gymnasium_engine import (
    OBS,
    EnvSpec,
    GymVector,
    Outcome,
    OuterVector,
    VectorEnv,
    clean_warning,
    collect_warnings,
    is_atari_installed,
    may_be_game,
    prepare_rendering,
    read_frame_skip,
    redirect_mujoco_warnings,
    register_games,
    wrap_game,
)
from ckpttool.evaluation.simulators import DEVICE_ENGINE
from ckpttool.evaluation.wrappers import (
    WrapperSpec,
    changes_size,
    inner_obs_dim,
    split_game_wrappers,
    wrap_environments,
)

# Source: Gymnasium's `gymnasium/envs/mujoco/*_v4.py` and `*_v5.py` (`observation_structure`).
FORCES = "contact forces"
EMPTY = "zeros"
"""A part that is always zero: forces on the world body, and joints without an actuator."""

Layout = tuple[tuple[str, int], ...]
"""Parts of an observation in order, each with its length."""

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
"""Layouts by task name and observation size."""

UNSEEN = {"HalfCheetah": 1, "Hopper": 1, "Walker2d": 1, "Swimmer": 2, "Ant": 2, "Humanoid": 2}
"""Number of position coordinates excluded by default, per task."""

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
"""Observation and action sizes of the tasks that published agents use."""


_BOUNDS = {"Pendulum": 2.0, "Humanoid": 0.4, "HumanoidStandup": 0.4, "InvertedPendulum": 3.0, "Pusher": 2.0}
"""Action bounds of tasks that do not have -1 to 1."""


_DISCRETE = {
    "CartPole-v1": (4, 2),
    "Acrobot-v1": (6, 3),
    "MountainCar-v0": (2, 3),
    "LunarLander-v3": (8, 4),
    "FrozenLake-v1": (16, 4),
    "CliffWalking-v1": (48, 4),
}
"""Observations (one-hot, where they are discrete) and choices of tasks with one discrete action."""

_OLD_VERSIONS = frozenset(("CartPole-v0",))
"""Versions of these tasks that Gymnasium still has beside the newest."""


def task_family(env_id: str) -> str:
    """Return the name of a MuJoCo task of version 4 or 5, or an empty string."""
    match = re.fullmatch(r"(\w+)-v[45]", env_id)
    return match[1] if match else ""


_VERSIONS: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "Ant": {2: (111,), 3: (111,), 4: (27, 111), 5: (27, 105)},
    "Humanoid": {1: (376,), 2: (376,), 3: (376,), 4: (376,), 5: (348,)},
    "HumanoidStandup": {1: (376,), 2: (376,), 4: (376,), 5: (348,)},
    "InvertedDoublePendulum": {1: (11,), 2: (11,), 4: (11,), 5: (9,)},
    "Reacher": {1: (11,), 2: (11,), 4: (11,), 5: (10,)},
}
"""Observation sizes of each version of a task (gym/envs/mujoco/*.py before version 4)."""


def has_observation_size(trained: str, played: str, size: int) -> bool:
    """Return whether the training version of the environment has `size` observation values."""
    match = re.fullmatch(r"(\w+)-v(\d+)", trained)
    if match is None or match[1] != task_family(played):
        return False
    return size in _VERSIONS.get(match[1], {}).get(int(match[2]), ())


def observation_arguments(env_id: str, own: int, size: int, positions: bool = False) -> dict[str, bool]:
    """Return arguments that make the environment show more values, if they give the wanted size.

    `positions` requests the coordinates counted in UNSEEN: a size alone is no evidence of them, because
    training wrappers (a time feature) add as many values.
    """
    name = task_family(env_id)
    if positions:
        hidden = name in UNSEEN and size == own + UNSEEN[name]
        return {"exclude_current_positions_from_observation": False} if hidden else {}
    # ant_v4.py computes contact forces only on request, and then they add a cost.
    if env_id == "Ant-v4" and own == 27 and size in LAYOUTS["Ant"]:
        return {"use_contact_forces": True}
    return {}


def contact_force_slice(env_id: str, size: int) -> slice | None:
    """Return the slice of the contact forces in an observation of `size` values, or None."""
    start = 0
    for part, width in LAYOUTS.get(task_family(env_id), {}).get(size, ()):
        if part == FORCES:
            return slice(start, start + width)
        start += width
    return None


# pusher_v4.py requires a mujoco older than version 3.
_KEPT_BY_V4 = {*LAYOUTS, *(name.removesuffix("-v5") for name in SIZES if name.endswith("-v5"))} - {"Pusher"}


def _successor(name: str, version: int, newest: int) -> int:
    """Return the version of a task that continues an older one.

    Version 4 of the MuJoCo tasks has the rewards and observations of versions 2 and 3; version 5 changes them
    (gymnasium/envs/mujoco, "Version History").
    """
    return 4 if version <= 4 <= newest and name in _KEPT_BY_V4 else newest


_NAMED = deferred.compile(r"(?<![A-Za-z0-9])([A-Z][A-Za-z0-9]*)[-_]v(\d+)(?![0-9])")


def candidate_environments(
    words: str, obs_dim: int, action_dim: int, bound: float | None = None, *, discrete: bool = False
) -> tuple[str, ...]:
    """Return the environments that an agent of these sizes may have been trained in.

    A named task of other sizes is not a candidate.

    Args:
        words: text that may name an environment, e.g. the last parts of a path; if it names a fitting one,
            only that is returned, in the version that continues the named one.
        obs_dim: numbers in an observation.
        action_dim: numbers in an action, or with `discrete` the number of choices of one action.
        bound: the largest action that the agent's files record, None without a record.
        discrete: actions are choices.
    """
    tasks = _DISCRETE if discrete else SIZES
    fitting = [
        name
        for name, sizes in tasks.items()
        if sizes == (obs_dim, action_dim)
        and (
            bound is None
            or discrete
            or math.isclose(bound, _BOUNDS.get(name.rpartition("-v")[0], 1.0), rel_tol=1e-5)
        )
    ]
    for name, version in reversed(_NAMED.findall(words)):
        versions = {env: sizes for env, sizes in tasks.items() if env.rpartition("-v")[0] == name}
        own = [version for version in versions if version in fitting]
        older = obs_dim in LAYOUTS.get(name, {}) and any(acts == action_dim for _, acts in versions.values())
        if not versions or (own and f"{name}-v{version}" in _OLD_VERSIONS):
            return (f"{name}-v{version}",)
        if own or older:
            newest = int((own or list(versions))[-1].rpartition("-v")[2])
            fits = obs_dim in _VERSIONS.get(name, {}).get(4, (obs_dim,))
            return (f"{name}-v{_successor(name, int(version), newest) if fits else newest}",)
    return tuple(fitting)


def is_listed(env_id: str) -> bool:
    """Return whether Gymnasium's newest version certainly has the task: one of the tables above lists it."""
    return env_id in {*SIZES, *_DISCRETE, *_OLD_VERSIONS} or task_family(env_id) in _KEPT_BY_V4


def suggest_tasks(env_id: str, obs_dim: int, action_dim: int) -> str | None:
    """Return an error hint that lists the tasks with these sizes."""
    fits = [name for name, sizes in SIZES.items() if sizes == (obs_dim, action_dim)]
    if fits:
        sizes_here = f"{format_count(obs_dim, 'observation')} and {format_count(action_dim, 'action')}"
        return f"{sizes_here} match {' and '.join(fits)}"
    sizes = LAYOUTS.get(task_family(env_id), {})
    return _list_sizes(task_family(env_id), sizes) if sizes else None


def suggest_contact_force_sizes(env_id: str) -> str:
    """Return an error hint that lists the policy sizes with contact forces."""
    seeing = {
        task: [size for size, layout in layouts.items() if FORCES in dict(layout)]
        for task, layouts in LAYOUTS.items()
    }
    name = task_family(env_id)
    tasks = [name] if seeing.get(name) else [task for task in seeing if seeing[task]]
    return "; ".join(_list_sizes(task, seeing[task]) for task in tasks)


def _list_sizes(name: str, sizes: Iterable[int]) -> str:
    return f"{name} policies have {' or '.join(map(str, sorted(sizes)))} observations"


ZERO_FORCES = "zero_contact_forces"
POSITIONS = "current_positions"
ADAPTERS = {
    ZERO_FORCES: "contact forces set to zero, as before simulators reported them",
    POSITIONS: "positions that are excluded by default are included",
}
"""Adapters that a size cannot select: name and effect."""

_NOWHERE = -1


class AdaptedVector(OuterVector):
    """Vector environment that rearranges observations for a policy.

    `columns`, int [obs_dim of the policy], has the column of the observations for each policy input, or -1
    for a zero; `assumed` is whether the policy's size selected this adapter.
    """

    def __init__(self, inner: VectorEnv, columns: np.ndarray, sentence: str, *, assumed: bool) -> None:
        super().__init__(inner)
        self._columns, self._blank = columns, columns == _NOWHERE
        self._sentences = () if assumed else (sentence,)
        ((_, _, dtype),) = inner.spec.observation
        observation = ((OBS, columns.shape, dtype),)
        entries = (sentence,) if assumed else ()
        self.spec = replace(inner.spec, observation=observation, assumed=entries, observation_bounds={})
        self.obs = self._observed = np.zeros((self.num_envs, len(columns)), dtype)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on the adaptation and from the environments' libraries."""
        return (*self._sentences, *self._inner.notes)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i]."""
        self._inner.reset(rows, seeds)
        self._see(rows)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return rewards, terminated and truncated, each [len(rows)]."""
        outcome = self._inner.step(actions, rows)
        self._see(rows)
        return outcome

    def _see(self, rows: np.ndarray) -> None:
        shown = np.asarray(self._inner.obs)
        if len(rows) == self.num_envs:
            shown.take(self._columns, axis=1, out=self._observed, mode="wrap")
        else:
            self._observed[rows] = shown[rows[:, None], self._columns]
        self._observed[:, self._blank] = 0


def adapt_observations(
    vector: VectorEnv,
    obs_dim: int | None,
    requested: str | None,
    again: Callable[[Mapping[str, Any]], VectorEnv],
    *,
    trained: str | None = None,
    wrapped: bool = False,
) -> VectorEnv:
    """Return environments with `obs_dim` observation values (None: unchanged), if a mapping is known.

    Args:
        vector: the environments.
        obs_dim: the policy's observation size.
        requested: one of ADAPTERS.
        again: creates the environments with extra arguments.
        trained: the id of the environment used in training, None where no file names one.
        wrapped: whether training wrappers change the observation size.

    Without a requested adapter, environments that cannot be adapted are returned unchanged, and so are those
    whose version in training had another size; without a known version, a size supports the layout of a whole
    version if nothing else explains it. Raise UsageError if a requested adapter does not apply.
    """
    own = vector.spec.obs_dim
    known = obs_dim or own
    if requested is None:
        supported = not wrapped if trained is None else has_observation_size(trained, vector.spec.id, known)
        if known == own or not supported:
            return vector
    arguments: Mapping[str, Any] = {}
    columns = _observation_columns(vector.spec, known, requested) if requested != POSITIONS else None
    if columns is None and (
        arguments := observation_arguments(vector.spec.id, own, known, requested == POSITIONS)
    ):
        vector.close()
        vector = again(arguments)
        columns = _observation_columns(vector.spec, known, None if requested == POSITIONS else requested)
    if columns is not None:
        sentence = _describe_adapter(vector.spec, columns, requested, arguments)
        return AdaptedVector(vector, columns, sentence, assumed=requested is None)
    if requested is not None:
        vector.close()
        raise UsageError(
            f"{vector.spec.id}: adapter {requested} does not apply to a policy with {known} observations",
            hint=suggest_contact_force_sizes(vector.spec.id) if requested == ZERO_FORCES else None,
        )
    return vector


def _observation_columns(spec: EnvSpec, target: int, requested: str | None) -> np.ndarray | None:
    """Return the source column of each of `wanted` values in `spec`'s observations; None if unknown."""
    own, layouts = spec.obs_dim, LAYOUTS.get(task_family(spec.id), {})
    if [key for key, _, _ in spec.observation] != [OBS]:
        return None
    if own == target and requested is None:
        return np.arange(own)
    zeros = {EMPTY} | ({FORCES} if requested == ZERO_FORCES else set())
    if own not in layouts or target not in layouts or (requested and FORCES not in dict(layouts[target])):
        return None
    places, start = {}, 0
    for part, size in layouts[own]:
        places[part] = start
        start += size
    columns: list[int] = []
    for part, size in layouts[target]:
        if part not in zeros and part not in places:
            return None
        columns += [_NOWHERE] * size if part in zeros else range(places[part], places[part] + size)
    return np.array(columns)


def _describe_adapter(
    spec: EnvSpec, columns: np.ndarray, requested: str | None, arguments: Mapping[str, Any]
) -> str:
    """Describe the changes to the observations and the environment."""
    done = [f"made with {name}={value}" for name, value in arguments.items()]
    if "use_contact_forces" in arguments:
        done.append(
            f"contact forces add a cost to the reward; {ZERO_FORCES} is for policies trained "
            "before simulators reported them"
        )
    if len(columns) != spec.obs_dim or requested:
        zeros = int((columns == _NOWHERE).sum())
        shown = len(columns) - zeros
        done.append(
            f"{shown} of its {spec.obs_dim} values are used" + (f", plus {zeros} zeros" if zeros else "")
        )
    if requested:
        done.append(ADAPTERS[requested])
    return (
        f"the policy expects {format_count(len(columns), 'observation')}, so {spec.id} is adapted: "
        + "; ".join(done)
    )


AUTO = "auto"
MakeOne = Callable[[], Any]
Build = Callable[[MakeOne, int, int | None], VectorEnv]


@dataclass(frozen=True, slots=True)
class FastEngine:
    """Engine that reproduces some of Gymnasium's environments, only faster.

    A task's builder receives a function that creates one environment, the number of environments and
    the number of threads (None: all cores). It raises UnsupportedError for an environment that differs
    from the one that the engine reproduces.
    """

    name: str
    tasks: Mapping[str, Build]
    """by the entry point of the environment class in Gymnasium's registry"""
    on_request: bool = False
    """used only on request: `auto` skips it"""

    @property
    def answers_to(self) -> tuple[str, ...]:
        """Names that select this engine."""
        return (self.name,) if self.on_request else (AUTO, self.name)

    @property
    def plays(self) -> str:
        """Environment names, joined for a message."""
        names = {entry.partition(":")[2].removesuffix("Env") for entry in self.tasks}
        return ", ".join(sorted(_TITLES.get(name, name) for name in names))


_TITLES = {"Continuous_MountainCar": MOUNTAIN_CAR_ID.partition("-")[0]}
_CLASSIC = "gymnasium.envs.classic_control."
_PENDULUM = f"{_CLASSIC}pendulum:PendulumEnv"
_CART_POLE = f"{_CLASSIC}cartpole:CartPoleEnv"
_MOUNTAIN_CAR = f"{_CLASSIC}continuous_mountain_car:Continuous_MountainCarEnv"


def _arrays(task: type[fast_engines.Equations]) -> Build:
    return lambda make_one, num_envs, _: fast_engines.ArrayVector(task, make_one, num_envs)


def _tensors(task: type[fast_engines.ClassicTensors]) -> Build:
    return lambda make_one, num_envs, _: simulators.DeviceVector(task(make_one), num_envs)


FAST = (
    FastEngine(MujocoVector.engine, dict.fromkeys(TASKS, MujocoVector)),
    FastEngine(fast_engines.PENDULUM_ENGINE, {_PENDULUM: _arrays(fast_engines.Pendulum)}),
    FastEngine(
        fast_engines.CLASSIC_ENGINE,
        {
            _CART_POLE: _arrays(fast_engines.CartPole),
            f"{_CLASSIC}acrobot:AcrobotEnv": _arrays(fast_engines.Acrobot),
            f"{_CLASSIC}mountain_car:MountainCarEnv": _arrays(fast_engines.MountainCar),
            _MOUNTAIN_CAR: _arrays(fast_engines.MountainCarContinuous),
        },
    ),
    FastEngine(
        simulators.DEVICE_ENGINE,
        {
            _PENDULUM: _tensors(fast_engines.PendulumTensors),
            _CART_POLE: _tensors(fast_engines.CartPoleTensors),
            _MOUNTAIN_CAR: _tensors(fast_engines.MountainCarTensors),
        },
        on_request=True,
    ),
)
STANDALONE: Mapping[str, tuple[MakeOne, str]] = {
    fast_engines.PENDULUM_ID: (fast_engines.StandalonePendulum, _PENDULUM),
    MOUNTAIN_CAR_ID: (fast_engines.StandaloneMountainCar, _MOUNTAIN_CAR),
}
"""Environments that need no Gymnasium: constructor, and entry point of the environment class."""

ENGINES = (AUTO, GymVector.engine, *(engine.name for engine in FAST))


def build_vector_env(
    requested: str,
    env_id: str,
    make_one: MakeOne,
    num_envs: int,
    threads: int | None,
    known: Mapping[str, Any],
) -> VectorEnv:
    """Return environments created by `make_one`.

    Raise UsageError if a requested engine does not support them; otherwise fall back to Gymnasium.

    Args:
        requested: the engine's name, or "auto".
        env_id: the environment's id.
        make_one: creates one environment of Gymnasium.
        num_envs: environments that are stepped together.
        threads: threads of the engine; None for its default.
        known: Gymnasium's registry.
    """
    if requested != GymVector.engine:
        entry_point = _entry_point(env_id, make_one, known)
        for engine in FAST:
            if requested in engine.answers_to and entry_point in engine.tasks:
                try:
                    return engine.tasks[entry_point](make_one, num_envs, threads)
                except UnsupportedError as error:
                    if requested != AUTO:
                        raise UsageError(
                            f"{env_id}: {error.message}",
                            expected=error.expected,
                            found=error.found,
                            hint=error.hint,
                        ) from None
            elif requested == engine.name:
                own = (
                    ", and your own simulators: --env MODULE:FACTORY"
                    if requested == simulators.DEVICE_ENGINE
                    else ""
                )
                raise UsageError(
                    f"the {requested} engine does not support {env_id}",
                    hint=f"it supports {engine.plays}{own}",
                )
    return GymVector(make_one, num_envs)


def _entry_point(env_id: str, make_one: MakeOne, known: Mapping[str, Any]) -> str:
    """Return the entry point of the environment; an id without a version requires creating one."""
    if env_id in known:
        return str(known[env_id].entry_point)
    # Warnings are repeated when the environment is created for playing.
    restore = redirect_mujoco_warnings({})
    try:
        with collect_warnings({}):
            env = make_one()
    finally:
        restore()
    env.close()
    return str(env.spec.entry_point) if env.spec is not None else ""


# Arguments that control rendering.
_DRAWN = frozenset(("render_mode", "width", "height", "camera_id", "camera_name", "default_camera_config"))


def is_gymnasium_installed() -> bool:
    """Return whether the library is installed, without importing it."""
    return importlib.util.find_spec("gymnasium") is not None


def import_gymnasium() -> Any:
    """Return the library; raise MissingExtraError if it is not installed."""
    if not is_gymnasium_installed():
        raise MissingExtraError(
            "environments need gymnasium, which is not installed", hint=install_extra("eval")
        )
    return importlib.import_module("gymnasium")


def _import_with_games(env_id: str) -> Any:
    """Return the library, with the Atari games registered if the id may be one of them."""
    library = import_gymnasium()
    register_games(env_id, library.registry)
    return library


def find_game_frame_skip(env_id: str) -> int | Sequence[int] | None:
    """Return the frames per action of an Atari game, None for other environments or without the libraries."""
    if not is_gymnasium_installed():
        return None
    return read_frame_skip(_import_with_games(env_id).registry.get(env_id))


def find_reward_threshold(env_id: str) -> float | None:
    """Return the reward threshold that Gymnasium registers for an environment, None without Gymnasium."""
    if not is_gymnasium_installed():
        return None
    spec = import_gymnasium().registry.get(env_id)
    return None if spec is None or spec.reward_threshold is None else float(spec.reward_threshold)


def require_constructor_arguments(env_id: str, names: Iterable[str]) -> None:
    """Raise UsageError for an argument that is not in the signature of the environment class.

    Gymnasium's own arguments of `make` are rejected too: a file must not change time limits or
    wrappers.
    """
    library = _import_with_games(env_id)
    with translate_gymnasium_errors(env_id):
        entry = library.spec(env_id).entry_point
        kind = library.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    allowed = set()
    for owner in getattr(kind, "__mro__", (kind,)):
        constructor = owner.__dict__.get("__init__") if isinstance(owner, type) else owner
        parameters = (
            inspect.signature(constructor).parameters.values() if inspect.isroutine(constructor) else ()
        )
        allowed |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if constructor is not None and not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break  # unlisted arguments cannot reach a base class
    for name in names:
        if name not in allowed - {"self"} - _DRAWN:
            raise UsageError(
                f"{env_id} does not accept argument {name!r} from a file",
                hint=suggest_choice(name, sorted(allowed - {"self"} - _DRAWN)),
            )


def suggest_package(env_id: str) -> str | None:
    """Return a hint for an environment that neither Gymnasium nor an installed library of games registers."""
    named = re.fullmatch(r"([\w-]+/)?[A-Za-z][\w.-]*-v\d+", env_id) is not None and not is_listed(env_id)
    if not named or (is_gymnasium_installed() and env_id in _import_with_games(env_id).registry):
        return None
    return f"install the package that registers {env_id}, and name its module: --env MODULE:ID"


@contextmanager
def translate_gymnasium_errors(env_id: str) -> Iterator[None]:
    """Translate Gymnasium's errors into ckpttool errors, with a suggested name."""
    library = import_gymnasium()
    if may_be_game(env_id) and not is_atari_installed():
        raise MissingExtraError(
            f"{env_id!r} needs ale-py, which is not installed", hint=install_extra("atari")
        )
    sentence = f"gymnasium {library.__version__} cannot create {env_id!r}"
    near = _close_names(env_id, library.registry)
    others = f" (or {', '.join(near[1:])})" if len(near) > 1 else ""
    hint = f"use --env {near[0]}{others}" if near else None
    is_factory = hint is None and simulators.is_factory(env_id)
    if hint is None and ":" in env_id:
        hint = f"install the package with the module {env_id.partition(':')[0]}, or name another environment"
    hint = hint or suggest_package(env_id)
    try:
        yield
    except library.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"{sentence}: {_first_line(error)}", hint=install_extra("eval")) from None
    except (library.error.Error, ImportError) as error:
        if is_factory and not isinstance(error, ImportError):
            hint = _factory_hint(*env_id.split(":"))
        raise UsageError(f"{sentence}: {_first_line(error)}", hint=hint) from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{sentence} with these arguments: {_first_line(error)}") from None


def _factory_hint(module: str, name: str) -> str:
    """Return how to play what a module names: a simulator is called with rows and a device."""
    target = getattr(sys.modules.get(module), name, None)
    with suppress(TypeError, ValueError):
        inspect.signature(target).bind(1, "cpu")  # type: ignore[arg-type]
        if not (isinstance(target, type) and issubclass(target, import_gymnasium().Env)):
            return "to play a simulator factory, use --engine device --backend torch"
    if target is None:
        return f"pass {module}:NAME-v0 to --env, an environment that the module registers"
    line = f"gymnasium.register('NAME-v0', {name})"
    return f"add {line} to the module {module}, then pass {module}:NAME-v0 to --env"


def _first_line(error: Exception) -> str:
    return clean_warning(str(error)).partition("\n")[0]


def _close_names(env_id: str, registry: Sequence[str]) -> list[str]:
    """Return each environment with a similar name: what continues the version, else the newest."""
    newest: dict[str, int] = {}
    for known in registry:
        if match := re.fullmatch(r"(.+)-v(\d+)", known):
            newest[match[1]] = max(int(match[2]), newest.get(match[1], 0))
    stem, _, version = env_id.rpartition("-v") if re.search(r"-v\d+$", env_id) else (env_id, "", "")
    if stem in newest and version:
        return [f"{stem}-v{_successor(stem, int(version), newest[stem])}"]
    names = [stem] if stem in newest else difflib.get_close_matches(stem, newest, n=3)
    return [f"{name}-v{newest[name]}" for name in names]


@dataclass(frozen=True, slots=True)
class VectorEnvOptions:
    """Options for creating environments for a policy; the defaults follow the id alone.

    Set `trusted` and `trusted_arguments` only for user input, never for values from a file.
    """

    trusted: bool = False
    """whether the id may import a module (`module:Env-v0`)"""
    trusted_arguments: bool = False
    """whether `kwargs` may contain more than a few numbers named in the environment's signature"""
    kwargs: Mapping[str, Any] | None = None
    """arguments of the environment, or of a user's simulator"""
    obs_dim: int | None = None
    """the policy's observation size; other versions' observations are adapted to it where valid"""
    adapter: str | None = None
    """one of ADAPTERS, for cases that sizes cannot decide"""
    trained: str | None = None
    """id of the environment used in training, which may rule out adapting observations"""
    wrappers: Sequence[WrapperSpec] = ()
    """training wrappers, innermost first"""
    engine: str = AUTO
    """one of ENGINES; with "device", an id `module:factory` is a user's simulator (see simulators)"""
    device: str = "cpu"
    """device of a user's simulator and its rows"""
    pictures: bool = False
    """whether frame() works"""
    threads: int | None = None
    """for engines with threads; None for all cores"""


def make_vector_env(
    env_id: str, num_envs: int = 1, options: VectorEnvOptions | None = None, **keywords: Any
) -> VectorEnv:
    """Return `num_envs` environments of a Gymnasium id, stepped by the fastest engine that supports it.

    `keywords` are fields of VectorEnvOptions that override `options`.
    """
    options = replace(options or VectorEnvOptions(), **keywords)
    _require_allowed(env_id, options)
    own = _make_without_gymnasium(env_id, num_envs, options)
    if own is not None:
        return _adapt_and_wrap(own, lambda _: own, options)
    build = _gymnasium_builder(env_id, num_envs, options)
    return _adapt_and_wrap(build({}), build, options)


def _require_allowed(env_id: str, options: VectorEnvOptions) -> None:
    """Raise UsageError for unknown names, and for code or arguments from untrusted input."""
    if ":" in env_id and not options.trusted:
        raise UsageError(
            f"environment {env_id!r} imports a module, which can run code",
            hint="pass it on the command line if you trust it",
        )
    _require_names(options.engine, options.adapter)
    if options.kwargs and not options.trusted_arguments:
        _require_plain(env_id, options.kwargs)
        if not _is_users_simulator(env_id, options):
            require_constructor_arguments(env_id, options.kwargs)


def _is_users_simulator(env_id: str, options: VectorEnvOptions) -> bool:
    return options.engine == DEVICE_ENGINE and simulators.is_factory(env_id)


def _make_without_gymnasium(env_id: str, num_envs: int, options: VectorEnvOptions) -> VectorEnv | None:
    """Return a user's simulator or a task playable without Gymnasium; else None."""
    if _is_users_simulator(env_id, options):
        return simulators.load_simulator(env_id, num_envs, options.device, options.kwargs)
    if env_id not in STANDALONE or options.kwargs or options.pictures or is_gymnasium_installed():
        return None
    make_alone, entry_point = STANDALONE[env_id]
    for engine in FAST:
        if options.engine in engine.answers_to and entry_point in engine.tasks:
            return engine.tasks[entry_point](make_alone, num_envs, options.threads)
    return None


def _gymnasium_builder(
    env_id: str, num_envs: int, options: VectorEnvOptions
) -> Callable[[Mapping[str, Any]], VectorEnv]:
    """Return a function that creates Gymnasium environments with arguments added to the options."""
    gymnasium = _import_with_games(env_id)
    arguments = {**(options.kwargs or {}), **({"render_mode": "rgb_array"} if options.pictures else {})}
    games, _ = split_game_wrappers(options.wrappers)
    # Only Gymnasium's own environments can render.
    engine = GymVector.engine if (options.pictures or games) and options.engine == AUTO else options.engine

    def build(more: Mapping[str, Any]) -> VectorEnv:
        def make_one() -> Any:
            with translate_gymnasium_errors(env_id):
                env = gymnasium.make(env_id, disable_env_checker=True, **{**more, **arguments})
            return wrap_game(prepare_rendering(env) if options.pictures else env, games)

        return build_vector_env(engine, env_id, make_one, num_envs, options.threads, gymnasium.registry)

    return build


def _require_names(engine: str, adapter: str | None) -> None:
    if engine not in ENGINES:
        # "fast" is what people call the engines that "auto" prefers.
        meant = AUTO if difflib.get_close_matches(engine, ("fast", "fastest"), 1) else engine
        raise UsageError(f"unknown engine {engine!r}", hint=suggest_choice(meant, ENGINES))
    if adapter is not None and adapter not in ADAPTERS:
        raise UsageError(f"unknown adapter {adapter!r}", hint=suggest_choice(adapter, ADAPTERS))


def _adapt_and_wrap(
    vector: VectorEnv, again: Callable[[Mapping[str, Any]], VectorEnv], options: VectorEnvOptions
) -> VectorEnv:
    """Return the environments as in training: adapted to the policy's observations, then wrapped."""
    size = options.obs_dim
    try:
        if size is not None and options.wrappers:
            size = inner_obs_dim(size, vector.spec.action_dim, options.wrappers)
        wrapped = changes_size(options.wrappers)
    except UsageError:
        vector.close()
        raise
    adapted = adapt_observations(
        vector, size, options.adapter, again, trained=options.trained, wrapped=wrapped
    )
    return wrap_environments(adapted, options.wrappers)


def _require_plain(env_id: str, kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError for arguments that may name a file, be expensive or control Gymnasium itself."""
    for name, value in kwargs.items():
        if not are_arguments({name: value}):
            raise UsageError(
                f"argument {name[:64]!r} of environment {env_id!r} cannot be set from a file",
                expected="numbers, booleans or short lists of them",
                found=str(value)[:60],
            )
    if not are_arguments(dict(kwargs)):
        raise UsageError(f"too many arguments for environment {env_id!r}", found=str(len(kwargs)))
