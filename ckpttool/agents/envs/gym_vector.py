"""Gymnasium environments behind the vector protocol, in which an episode is a function of its seed alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from ckpttool.agents.envs.pictures import picture
from ckpttool.agents.envs.spec import OBS, Agreement, EnvSpec, Outcome
from ckpttool.agents.policy import Observation
from ckpttool.errors import UnsupportedError, UsageError

# Environments whose reset forgets the episode before: measured, with equal returns from used and from
# fresh objects. All others are made anew for every episode; BipedalWalker-v3 is one that remembers.
FORGETFUL = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.mujoco.",
    "gymnasium.envs.box2d.lunar_lander",
)
# What SWIG's bindings (Box2D's) make Python say of themselves: nothing about the environment.
BINDINGS = "builtin type "
PHYSICS = {"mujoco": "mujoco", "box2d": "Box2D"}


class GymVector:
    """Gymnasium-style environments in one process, from a function that makes one."""

    engine = "gymnasium"
    agreement: Agreement | None = None

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1) -> None:
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self.num_envs = num_envs
        self._make_one = make_one
        self._notes: dict[str, None] = {}
        self._restore = redirect_mujoco(self._notes)
        try:
            with heard(self._notes):
                first = make_one()
            self.spec = describe(first)
        except BaseException:
            self._restore()
            raise
        self.obs: Observation = self.spec.zeros(num_envs)
        self._put = self._put_many if isinstance(self.obs, Mapping) else self._put_one
        # Rows without an episode never get an environment.
        self._envs: list[Any] = [first] + [None] * (num_envs - 1)
        self._forgetful = type(getattr(first, "unwrapped", first)).__module__.startswith(FORGETFUL)
        self._fresh = {0}

    @property
    def notes(self) -> tuple[str, ...]:
        """What Gymnasium and the physics said, each sentence once."""
        return tuple(self._notes)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the episode of seeds[i] in rows[i], in a fresh environment unless reset forgets."""
        with heard(self._notes):
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                if self._envs[row] is None or not (self._forgetful or row in self._fresh):
                    self._close(row)
                    self._envs[row] = self._make_one()
                self._fresh.discard(row)
                self._put(row, self._envs[row].reset(seed=seed)[0])

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        rewards, ends, cuts = (
            np.empty(len(rows)),
            np.empty(len(rows), np.bool_),
            np.empty(len(rows), np.bool_),
        )
        for place, row in enumerate(rows.tolist()):
            obs, rewards[place], ends[place], cuts[place], _ = self._envs[row].step(actions[row])
            self._put(row, obs)
        return rewards, ends, cuts

    def frame(self, row: int) -> np.ndarray:
        """Return a picture of the row as it is now: uint8 [height, width, 3]."""
        return picture(self._envs[row], self.spec.id)

    def close(self) -> None:
        """Close every environment and give MuJoCo its own way of warning back."""
        for row in range(self.num_envs):
            self._close(row)
        self._restore()

    def __enter__(self) -> GymVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put_one(self, row: int, obs: Any) -> None:
        self.obs[row] = obs  # type: ignore[index]  # chosen where obs is one array

    def _put_many(self, row: int, obs: Any) -> None:
        for name, room in self.obs.items():  # type: ignore[union-attr]  # chosen where obs is a dict
            room[row] = obs[name]

    def _close(self, row: int) -> None:
        if self._envs[row] is not None:
            self._envs[row].close()
            self._envs[row] = None


def describe(env: Any) -> EnvSpec:
    """Return what an agent must fit; raise UnsupportedError for spaces that no policy here can have."""
    name = str(env.spec.id if getattr(env, "spec", None) is not None else type(env).__name__)
    obs, action = env.observation_space, env.action_space
    if type(action).__name__ != "Box" or len(action.shape) != 1:
        raise UnsupportedError(
            f"{name}: the action space must be a Box of one axis", expected="Box (n,)", found=str(action)
        )
    if action.dtype.kind != "f":
        raise UnsupportedError(f"{name}: actions are whole numbers", expected="floats", found=str(action))
    spaces = dict(obs.spaces) if type(obs).__name__ == "Dict" else {OBS: obs}
    if any(type(space).__name__ != "Box" or not space.shape for space in spaces.values()):
        raise UnsupportedError(
            f"{name}: the observation space must be a Box, or a Dict of them", expected="Box", found=str(obs)
        )
    inputs = tuple((str(key), tuple(space.shape), space.dtype.name) for key, space in spaces.items())
    limit = env.spec.max_episode_steps if getattr(env, "spec", None) is not None else None
    fps = getattr(env, "metadata", {}).get("render_fps")
    return EnvSpec(
        name,
        inputs,
        action.low.copy(),
        action.high.copy(),
        limit,
        _versions(env),
        float(fps) if fps else None,
        _arguments(env),
    )


def _arguments(env: Any) -> dict[str, str]:
    """Return what the registry and the caller gave the environment, except how it is drawn."""
    given = getattr(getattr(env, "spec", None), "kwargs", {})
    return {name: repr(value) for name, value in sorted(given.items()) if name != "render_mode"}


def _versions(env: Any) -> dict[str, str]:
    """Return Gymnasium's version and that of the physics that the environment's class comes from."""
    modules = ".".join(cls.__module__ for cls in type(getattr(env, "unwrapped", env)).__mro__)
    names = ["gymnasium", *(package for word, package in PHYSICS.items() if word in modules)]
    from importlib import metadata  # commands that play nothing do without it

    return {name: metadata.version(name) for name in names if importlib.util.find_spec(name)}


@contextmanager
def heard(notes: dict[str, None]) -> Iterator[None]:
    """Keep what Python code warns of as notes: such as `out of date`, `using the latest version`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [plain(str(warning.message)) for warning in caught]
    notes.update({each: None for each in said if not each.startswith(BINDINGS)})


def redirect_mujoco(notes: dict[str, None]) -> Callable[[], None]:
    """Turn MuJoCo's warnings into notes; return what undoes it.

    Left alone, MuJoCo prints them and writes MUJOCO_LOG.TXT into the folder that the user is in.
    """
    if importlib.util.find_spec("mujoco") is None:
        return lambda: None
    try:
        mujoco = importlib.import_module("mujoco")
    except (ImportError, AttributeError, RuntimeError) as error:
        # It loads the OpenGL that MUJOCO_GL asks for, drawn with or not.
        asked = os.environ.get("MUJOCO_GL")
        raise UnsupportedError(
            f"mujoco cannot be imported: {plain(str(error))}",
            hint=f"MUJOCO_GL is {asked!r}: unset it" if asked else None,
        ) from None
    before = mujoco.get_mju_user_warning()

    def hear(message: str) -> None:
        # The words that Gymnasium's models are written with are a matter between those two.
        if "is deprecated" not in message:
            notes[plain(message)] = None

    mujoco.set_mju_user_warning(hear)
    return lambda: mujoco.set_mju_user_warning(before)


def plain(message: str) -> str:
    """Return a warning without colours and without the word that says it is one."""
    return re.sub(r"\x1b\[[0-9;]*m|^WARN: ", "", message).removeprefix("WARN: ").strip()
