"""Environments behind one small vector protocol in which an episode is a function of its seed alone."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ckpttool.errors import MissingExtraError, UnsupportedError, UsageError

HINT = "pip install 'ckpttool[eval]'"

# Environments whose reset forgets the episode before: measured, with equal returns from used and from
# fresh objects. All others are made anew for every episode; BipedalWalker-v3 is one that remembers.
FORGETFUL = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.mujoco.",
    "gymnasium.envs.box2d.lunar_lander",
)
PHYSICS = {"mujoco": "mujoco", "box2d": "Box2D"}


@dataclass(frozen=True, slots=True, eq=False)
class EnvSpec:
    """What an agent must fit: action_low, action_high [action_dim] in the environment's own type."""

    id: str
    obs_dim: int
    action_low: np.ndarray
    action_high: np.ndarray
    max_episode_steps: int | None
    versions: Mapping[str, str]

    @property
    def action_dim(self) -> int:
        """The number of actions per step."""
        return int(self.action_low.size)


class VectorEnv(Protocol):
    """Several environments of one kind, addressed by row; another engine needs only these names."""

    spec: EnvSpec
    num_envs: int
    obs: np.ndarray
    """[num_envs, obs_dim]: the latest observation of every row, written in place; zeros before a reset."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the environment's libraries had to say, each sentence once."""
        ...

    def reset(self, row: int, seed: int) -> None:
        """Begin the episode of that seed in one row."""
        ...

    def step(
        self, actions: np.ndarray, rows: Sequence[int]
    ) -> tuple[Sequence[float], Sequence[bool], Sequence[bool]]:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        ...

    def close(self) -> None:
        """Let go of what the environments hold."""
        ...


def make(
    env_id: str, num_envs: int = 1, *, trusted: bool = False, kwargs: Mapping[str, Any] | None = None
) -> GymVector:
    """Return `num_envs` Gymnasium environments.

    `module:Env-v0` imports a module, and arguments can name files: both need `trusted`, which a caller may
    set for what a person typed, never for what a file says.
    """
    if (":" in env_id or kwargs) and not trusted:
        raise UsageError(
            f"environment {env_id!r} with a module or arguments can run code",
            hint="name it on the command line",
        )
    gymnasium = _gymnasium()

    def make_one() -> Any:
        with _sentences(gymnasium, env_id):
            return gymnasium.make(env_id, disable_env_checker=True, **(kwargs or {}))

    return GymVector(make_one, num_envs)


class GymVector:
    """Gymnasium-style environments in one process, from a function that makes one."""

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1) -> None:
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self.num_envs = num_envs
        self._make_one = make_one
        self._notes: dict[str, None] = {}
        self._restore = _redirect_mujoco(self._notes)
        try:
            with _heard(self._notes):
                first = make_one()
            self.spec = _describe(first)
        except BaseException:
            self._restore()
            raise
        self.obs = np.zeros((num_envs, self.spec.obs_dim), first.observation_space.dtype)
        # Rows without an episode never get an environment.
        self._envs: list[Any] = [first] + [None] * (num_envs - 1)
        self._forgetful = type(getattr(first, "unwrapped", first)).__module__.startswith(FORGETFUL)
        self._fresh = {0}

    @property
    def notes(self) -> tuple[str, ...]:
        """What Gymnasium and the physics said, each sentence once."""
        return tuple(self._notes)

    def reset(self, row: int, seed: int) -> None:
        """Begin the episode of that seed in one row, in a fresh environment unless reset forgets."""
        with _heard(self._notes):
            if self._envs[row] is None or not (self._forgetful or row in self._fresh):
                self._close(row)
                self._envs[row] = self._make_one()
            self._fresh.discard(row)
            self.obs[row] = self._envs[row].reset(seed=seed)[0]

    def step(self, actions: np.ndarray, rows: Sequence[int]) -> tuple[list[float], list[bool], list[bool]]:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        rewards, terminated, truncated = [], [], []
        for row in rows:
            self.obs[row], reward, end, cut, _ = self._envs[row].step(actions[row])
            rewards.append(float(reward))
            terminated.append(bool(end))
            truncated.append(bool(cut))
        return rewards, terminated, truncated

    def close(self) -> None:
        """Close every environment and give MuJoCo its own way of warning back."""
        for row in range(self.num_envs):
            self._close(row)
        self._restore()

    def __enter__(self) -> GymVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close(self, row: int) -> None:
        if self._envs[row] is not None:
            self._envs[row].close()
            self._envs[row] = None


def _gymnasium() -> Any:
    if importlib.util.find_spec("gymnasium") is None:
        raise MissingExtraError("environments need gymnasium, which is not installed", hint=HINT)
    return importlib.import_module("gymnasium")


def _describe(env: Any) -> EnvSpec:
    name = str(env.spec.id if getattr(env, "spec", None) is not None else type(env).__name__)
    obs, action = env.observation_space, env.action_space
    for what, space in (("observation", obs), ("action", action)):
        if type(space).__name__ != "Box" or len(space.shape) != 1:
            raise UnsupportedError(
                f"{name}: the {what} space must be a Box of one axis", expected="Box (n,)", found=str(space)
            )
    if action.dtype.kind != "f":
        raise UnsupportedError(f"{name}: actions are whole numbers", expected="floats", found=str(action))
    limit = env.spec.max_episode_steps if getattr(env, "spec", None) is not None else None
    return EnvSpec(name, int(obs.shape[0]), action.low.copy(), action.high.copy(), limit, _versions(env))


def _versions(env: Any) -> dict[str, str]:
    """Return Gymnasium's version and that of the physics that the environment's class comes from."""
    modules = ".".join(cls.__module__ for cls in type(getattr(env, "unwrapped", env)).__mro__)
    names = ["gymnasium", *(package for word, package in PHYSICS.items() if word in modules)]
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


@contextmanager
def _heard(notes: dict[str, None]) -> Iterator[None]:
    """Keep what Python code warns of as notes: such as `out of date`, `using the latest version`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    notes.update({_plain(str(warning.message)): None for warning in caught})


def _redirect_mujoco(notes: dict[str, None]) -> Callable[[], None]:
    """Turn MuJoCo's warnings into notes; return what undoes it.

    Left alone, MuJoCo prints them and writes MUJOCO_LOG.TXT into the folder that the user is in.
    """
    if importlib.util.find_spec("mujoco") is None:
        return lambda: None
    mujoco = importlib.import_module("mujoco")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda message: notes.update({_plain(message): None}))
    return lambda: mujoco.set_mju_user_warning(before)


def _plain(message: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m|^WARN: ", "", message).removeprefix("WARN: ").strip()


@contextmanager
def _sentences(gymnasium: Any, env_id: str) -> Iterator[None]:
    """Turn Gymnasium's refusals into ours, with the name that was probably meant."""
    said = f"gymnasium {gymnasium.__version__} cannot make {env_id!r}"
    near = _near(env_id, gymnasium.registry)
    hint = f"there is {', '.join(near)}" if near else None
    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"{said}: {_first(error)}", hint=HINT) from None
    except (gymnasium.error.Error, ImportError) as error:
        raise UsageError(f"{said}: {_first(error)}", hint=hint) from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{said} with these arguments: {_first(error)}") from None


def _first(error: Exception) -> str:
    return _plain(str(error)).partition("\n")[0]


def _near(env_id: str, registry: Sequence[str]) -> list[str]:
    """Return the newest version of each environment whose name is close."""
    newest: dict[str, int] = {}
    for known in registry:
        if found := re.fullmatch(r"(.+)-v(\d+)", known):
            newest[found[1]] = max(int(found[2]), newest.get(found[1], 0))
    wanted = re.sub(r"-v\d+$", "", env_id)
    names = [wanted] if wanted in newest else difflib.get_close_matches(wanted, newest, n=3)
    return [f"{name}-v{newest[name]}" for name in names]
