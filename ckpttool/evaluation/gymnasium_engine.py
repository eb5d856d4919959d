"""Run vector environments of Gymnasium."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from ckpttool.core import search_paths
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import EnvironmentMismatchError, MissingExtraError, UnsupportedError, UsageError
from ckpttool.core.installation import install_command, require_package
from ckpttool.libraries.schema import Choices
from ckpttool.networks.network import Observation

HINT = "apt-get install libegl1 libgl1-mesa-dri (or libosmesa6); MUJOCO_GL selects the one to use"

# Gymnasium reads the OpenGL library from this variable (gymnasium/envs/mujoco/mujoco_rendering.py); if unset,
# it tries GLFW first, which needs a display.
_CHOICE = "MUJOCO_GL"
_TIMEOUT_S = 60
# An installed library without a driver can abort the process, so it is tried in a subprocess.
_TRIAL = """
import importlib, sys
import mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(64, 64)
context.make_current()
mujoco.MjrContext(mujoco.MjModel.from_xml_string("<mujoco/>"), mujoco.mjtFontScale.mjFONTSCALE_100)
"""
# Name of the tracking camera in Gymnasium's models.
_CAMERA = "track"
_PLANE = 0  # mjtGeom.mjGEOM_PLANE in mujoco/mjmodel.h
# These models request shadow maps of 4096 points, which are invisible at 480 x 480; this halves the time of
# software rendering.
_SHADOW = 2048


def prepare_rendering(env: Any) -> Any:
    """Return a Gymnasium environment created with `rgb_array`, after checking that it can render.

    Raise UnsupportedError where MuJoCo finds no OpenGL. Only environment variables that the user left
    unset are set here.
    """
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    inner = getattr(env, "unwrapped", env)
    if hasattr(inner, "mujoco_renderer"):
        os.environ[_CHOICE] = _choose_opengl()
        quality = inner.model.vis.quality
        quality.shadowsize = min(quality.shadowsize, _SHADOW)
        _use_tracking_camera(inner)
    return env


def _use_tracking_camera(inner: Any) -> None:
    """Use the model's own camera, which follows the agent, over an infinite floor.

    Gymnasium 1.4 uses a fixed camera (MujocoRenderer in gymnasium/envs/mujoco/mujoco_rendering.py): a
    HalfCheetah leaves its view after a hundred steps, and the floor after two hundred.
    """
    model = inner.model
    try:
        inner.mujoco_renderer.camera_id = model.camera(_CAMERA).id
    except KeyError:
        return
    for floor in np.flatnonzero(model.geom_type == _PLANE):
        # A plane is infinite for collisions: its size affects rendering only, and 0 is drawn as infinite
        # (MuJoCo's XML reference, geom, size). Its texture then repeats per metre.
        size, material = model.geom_size[floor, :2].copy(), model.geom_matid[floor]
        if size.all() and material >= 0:
            model.geom_size[floor, :2] = 0
            model.mat_texrepeat[material] /= size


def render_frame(env: Any, name: str) -> np.ndarray:
    """Return an image of the environment now, uint8 [height, width, 3]; `name` is for messages."""
    gymnasium = importlib.import_module("gymnasium")
    try:
        drawn = env.render() if hasattr(env, "render") else None
    except NotImplementedError:
        drawn = None
    except gymnasium.error.DependencyNotInstalled as error:
        reason = str(error).partition("\n")[0]
        raise MissingExtraError(
            f"cannot render {name}: {reason}", hint=install_command("pygame-ce")
        ) from None
    frame = np.asarray(drawn)
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
        raise UnsupportedError(f"{name} does not render an RGB image", expected="uint8[height, width, 3]")
    return frame


def _choose_opengl() -> str:
    """Return the OpenGL library that renders without a display: the requested or first working one."""
    requested = os.environ.get(_CHOICE)
    failed = {}
    for name in (requested,) if requested else _opengl_candidates():
        failed[name] = _opengl_failure(name)
        if not failed[name]:
            return name
    sentence = "; ".join(f"{name}: {why}" for name, why in failed.items())
    raise UnsupportedError(f"MuJoCo finds no working OpenGL for rendering ({sentence})", hint=HINT)


def _opengl_candidates() -> tuple[str, ...]:
    if not sys.platform.startswith("linux"):
        return ("glfw",)
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return ("egl", "osmesa", *(["glfw"] if display else []))


@functools.cache
def _opengl_failure(name: str) -> str:
    """Return why this OpenGL library does not work, in one line, or an empty string if it works."""
    command = [sys.executable, "-P", "-c", _TRIAL, name]
    environment = {**search_paths.child_environment(), _CHOICE: name}
    try:
        done = subprocess.run(  # noqa: S603  # our own interpreter and our own words
            command, capture_output=True, env=environment, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    error_lines = done.stderr.decode(errors="replace").strip().splitlines()
    return error_lines[-1][:160] if error_lines else f"exited with status {done.returncode}"


OBS = "obs"
"""Input name for environments whose observations are a single array."""

Outcome = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rewards (float64), terminated and truncated (bool), each [len(rows)]."""


@dataclass(frozen=True, slots=True, eq=False)
class EnvSpec:
    """Sizes and bounds that an agent must match: action_low, action_high [action_dim].

    The bounds have the environment's own type. `choices` has the number of values and the first one of each
    discrete action, whose bounds are its first and last value. `observation` lists the inputs by name,
    each with shape and type: one called "obs", or those of a Dict space in order.
    """

    id: str
    observation: tuple[tuple[str, tuple[int, ...], str], ...]
    action_low: np.ndarray
    action_high: np.ndarray
    max_episode_steps: int | None
    versions: Mapping[str, str]
    render_fps: float | None = None
    """images per second at which a video of every step runs in real time"""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """non-default arguments of the environment: names, and values in Python syntax"""
    assumed: tuple[str, ...] = ()
    """assumptions about the environment that rest on the number of observations alone"""
    choices: tuple[tuple[int, int], ...] = ()
    observation_bounds: Mapping[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """low and high of each input, in its shape; empty if they are unknown"""
    binary: bool = False
    """whether the choices are those of a MultiBinary space"""
    one_hot: Mapping[str, Choices] = field(default_factory=dict)
    """the discrete observations of inputs that are one-hot rows of them"""
    encoded: Mapping[str, str] = field(default_factory=dict)
    """the spaces of inputs that are rows of discrete observations, or of the parts of a Tuple"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every input by name, without the batch."""
        return {name: shape for name, shape, _ in self.observation}

    @property
    def obs_dim(self) -> int:
        """Return the number of values in one observation."""
        return sum(math.prod(shape) for _, shape, _ in self.observation)

    @property
    def action_dim(self) -> int:
        """Return the number of actions per step."""
        return int(self.action_low.size)

    def zeros(self, num_envs: int) -> Observation:
        """Return an array for the observations of `num_envs` rows: [num_envs, ...], or a dict of arrays."""
        room = {name: np.zeros((num_envs, *shape), dtype) for name, shape, dtype in self.observation}
        return room[OBS] if list(room) == [OBS] else room


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest error of one quantity, absolute below 1 and relative above, and its tolerance."""

    quantity: str
    largest: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of an engine with Gymnasium's own steps, measured on this machine before playing."""

    steps: int
    deviations: tuple[Deviation, ...]

    @property
    def exact(self) -> bool:
        """Return whether every number is equal to the last bit."""
        return all(deviation.largest == 0 for deviation in self.deviations)

    def require(self, env_id: str, engine: str) -> Agreement:
        """Return self; raise UnsupportedError if a difference exceeds rounding."""
        for deviation in self.deviations:
            if not deviation.largest <= deviation.tolerance:
                raise UnsupportedError(
                    f"the {engine} engine differs from the installed Gymnasium's {env_id} by more than "
                    "rounding",
                    expected=f"{deviation.quantity} within {deviation.tolerance:g}",
                    found=f"{deviation.largest:.2g}",
                    hint="use --engine gymnasium, which steps Gymnasium's own environments",
                )
        return self

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        deviations = {d.quantity: {"largest": d.largest, "tolerance": d.tolerance} for d in self.deviations}
        return {"steps": self.steps, "deviations": deviations}

    @staticmethod
    def read(document: Mapping[str, Any] | None) -> Agreement | None:
        """Restore an object from the JSON document; None for results without one."""
        if document is None:
            return None
        rows = document["deviations"].items()
        deviations = tuple(Deviation(name, float(d["largest"]), float(d["tolerance"])) for name, d in rows)
        return Agreement(int(document["steps"]), deviations)

    def note(self, engine: str) -> tuple[str, ...]:
        """Return a note on the differences, or nothing if there are none."""
        errors = ", ".join(
            f"{d.quantity} {d.largest:.1g} (tolerance {d.tolerance:g})" for d in self.deviations if d.largest
        )
        what = f"{engine} matches Gymnasium within rounding; largest errors over {self.steps} compared steps"
        return () if self.exact else (f"{what}: {errors}",)


def measure_deviation(quantity: str, values: Any, expected: Any, tolerance: float) -> Deviation:
    """Compare two arrays of equal shape; equal values, or NaN in both, count as no error."""
    numbers, reference = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    if numbers.shape != reference.shape:
        return Deviation(quantity, math.inf, tolerance)
    same = (numbers == reference) | (np.isnan(numbers) & np.isnan(reference))
    with np.errstate(invalid="ignore"):
        errors = np.where(same, 0.0, np.abs(numbers - reference) / np.maximum(1.0, np.abs(reference)))
    # An infinite or undefined difference is not rounding.
    return Deviation(
        quantity, float(np.nan_to_num(errors, nan=math.inf, posinf=math.inf).max(initial=0.0)), tolerance
    )


class VectorEnv:
    """Vector of environments of one kind, addressed by row: the base class of all engines."""

    spec: EnvSpec
    engine: str
    """name of the engine: recorded with every result"""
    obs: Observation
    """the latest observation of every row, updated in place; zeros before a reset"""
    agreement: Agreement | None = None
    """agreement with Gymnasium; None for Gymnasium itself, or if it was not measured"""
    restarted: np.ndarray | None = None
    """bool [num_envs], rows whose wrappers of a game began anew in the last step; None where none do"""

    def __init__(self, num_envs: int) -> None:
        """Raise UsageError for an invalid number of environments."""
        if num_envs < 1:
            raise UsageError(f"number of environments must be at least 1, not {num_envs}")
        self.num_envs = num_envs
        self._notes: dict[str, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings of the environments' libraries, each once."""
        return tuple(self._notes)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i]; its start state depends on the seed alone."""
        raise NotImplementedError

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` (int [k], ascending) by `actions[row]`, actions [num_envs, action_dim]."""
        raise NotImplementedError

    def frame(self, row: int) -> np.ndarray:  # noqa: ARG002
        """Return an image of the row: uint8 [height, width, 3]; raise UnsupportedError if impossible."""
        raise UnsupportedError(
            f"the {self.engine} engine cannot render {self.spec.id}",
            hint="to render, use --engine gymnasium",
        )

    def close(self) -> None:
        """Release the resources of the environments."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OuterVector(VectorEnv):
    """Environments around others: the base class leaves everything but steps and resets to these."""

    def __init__(self, inner: VectorEnv) -> None:
        super().__init__(inner.num_envs)
        self._inner, self.engine, self.agreement = inner, inner.engine, inner.agreement

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings of the inner environments' libraries."""
        return self._inner.notes

    def frame(self, row: int) -> np.ndarray:
        """Return an image of the row's current state: uint8 [height, width, 3]."""
        return self._inner.frame(row)

    def close(self) -> None:
        """Close the inner environments."""
        self._inner.close()


# Environments whose reset clears all state: measured, with equal returns from used and new objects. All
# others are created anew for every episode; e.g. BipedalWalker-v3 keeps state.
FORGETFUL = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.mujoco.",
    "gymnasium.envs.box2d.lunar_lander",
)
# Warnings about types of SWIG's bindings (Box2D's), unrelated to the environment.
BINDINGS = "builtin type "
PHYSICS = {"mujoco": "mujoco", "box2d": "Box2D", "ale_py": "ale_py"}


class GymVector(VectorEnv):
    """Gymnasium-style environments in one process, from a function that creates one."""

    engine = "gymnasium"

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1) -> None:
        super().__init__(num_envs)
        self._make_one = make_one
        self._restore = redirect_mujoco_warnings(self._notes)
        try:
            with collect_warnings(self._notes):
                first = make_one()
            self.spec = describe_env(first)
            self._rows = {name: rows.read for name, rows in _observation_rows(first).items()}
            self._to_action = _action_reader(first.action_space)
        except BaseException:
            self._restore()
            raise
        self.obs = self.spec.zeros(num_envs)
        self.restarted: np.ndarray = np.zeros(num_envs, np.bool_)
        # Rows without an episode never get an environment.
        self._envs: list[Any] = [first] + [None] * (num_envs - 1)
        self._forgetful = type(getattr(first, "unwrapped", first)).__module__.startswith(FORGETFUL)
        self._fresh = {0}

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i], in a new environment unless reset clears all state."""
        with collect_warnings(self._notes):
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                if self._envs[row] is None or not (self._forgetful or row in self._fresh):
                    self._close(row)
                    self._envs[row] = self._make_one()
                self._fresh.discard(row)
                self._put(row, self._envs[row].reset(seed=seed)[0])

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return rewards, terminated and truncated, each [len(rows)]."""
        rewards, ends, cuts = (
            np.empty(len(rows)),
            np.empty(len(rows), np.bool_),
            np.empty(len(rows), np.bool_),
        )
        for index, row in enumerate(rows.tolist()):
            obs, rewards[index], ends[index], cuts[index], info = self._envs[row].step(
                self._to_action(actions[row])
            )
            self._put(row, obs)
            self.restarted[row] = info.get(RESTARTED, False)
        return rewards, ends, cuts

    def frame(self, row: int) -> np.ndarray:
        """Return an image of the row's current state: uint8 [height, width, 3]."""
        return render_frame(self._envs[row], self.spec.id)

    def close(self) -> None:
        """Close every environment and restore MuJoCo's warning handler."""
        for row in range(self.num_envs):
            self._close(row)
        self._restore()

    def _put(self, row: int, obs: Any) -> None:
        if isinstance(self.obs, np.ndarray):
            self.obs[row] = self._rows[OBS](obs)
            return
        for name, room in self.obs.items():
            room[row] = self._rows[name](obs[name])

    def _close(self, row: int) -> None:
        if self._envs[row] is not None:
            self._envs[row].close()
            self._envs[row] = None


def describe_env(env: Any) -> EnvSpec:
    """Return the specification for agents; raise UnsupportedError for unsupported spaces."""
    name = str(env.spec.id if getattr(env, "spec", None) is not None else type(env).__name__)
    action = env.action_space
    choices = _read_choices(action)
    if not choices and (type(action).__name__ != "Box" or len(action.shape) != 1 or action.dtype.kind != "f"):
        raise UnsupportedError(
            f"{name}: this action space is not supported",
            expected="Box (n,) of floats, Discrete, MultiDiscrete (n,) or MultiBinary (n,)",
            found=str(action),
        )
    low, high = (
        (np.array([first for _, first in choices], np.float32) for _ in range(2))
        if choices
        else (action.low.copy(), action.high.copy())
    )
    if choices:
        high += [count - 1 for count, _ in choices]
    rows = _observation_rows(env)
    inputs = tuple((key, row.low.shape, row.low.dtype.name) for key, row in rows.items())
    limit = env.spec.max_episode_steps if getattr(env, "spec", None) is not None else None
    fps = getattr(env, "metadata", {}).get("render_fps")
    arguments = getattr(getattr(env, "spec", None), "kwargs", {})
    return EnvSpec(
        name,
        inputs,
        low,
        high,
        limit,
        _library_versions(env),
        float(fps) if fps else None,
        {name: repr(value) for name, value in sorted(arguments.items()) if name != "render_mode"},
        choices=choices,
        observation_bounds={key: (row.low, row.high) for key, row in rows.items()},
        binary=type(action).__name__ == "MultiBinary",
        one_hot={key: row.one_hot for key, row in rows.items() if row.one_hot},
        encoded={key: row.encoded for key, row in rows.items() if row.encoded},
    )


class _ObservationRows(NamedTuple):
    """How observations of a space become rows: their bounds in the row's shape and type, and the function."""

    low: np.ndarray
    high: np.ndarray
    read: Callable[[Any], Any]
    encoded: str = ""
    one_hot: Choices | None = None


def _observation_rows(env: Any) -> dict[str, _ObservationRows]:
    """Return how each input is read; raise UnsupportedError for unsupported spaces."""
    space = env.observation_space
    parts = dict(space.spaces) if type(space).__name__ == "Dict" else {OBS: space}
    rows_by_name = {str(key): _rows_of_space(part) for key, part in parts.items()}
    rows = {key: row for key, row in rows_by_name.items() if row is not None}
    if len(rows) < len(rows_by_name):
        name = env.spec.id if getattr(env, "spec", None) is not None else type(env).__name__
        raise UnsupportedError(
            f"{name}: this observation space is not supported",
            expected="Box, Discrete, MultiDiscrete (n,), MultiBinary, a Tuple of them, or a Dict of any",
            found=str(space),
        )
    return rows


def _rows_of_space(space: Any) -> _ObservationRows | None:
    """Return how a space's observations become rows, None if it is not supported.

    Discrete ones are one-hot, and the parts of a Tuple are joined (gymnasium/spaces/utils.py, `flatten`;
    stable_baselines3/common/preprocessing.py, `preprocess_obs`).
    """
    kind = type(space).__name__
    if kind in ("Box", "MultiBinary"):
        if not space.shape:
            return None
        zeros = np.zeros(space.shape, space.dtype)
        low, high = (space.low.copy(), space.high.copy()) if kind == "Box" else (zeros, zeros + 1)
        return _ObservationRows(low, high, lambda obs: obs)
    if pairs := _read_choices(space):
        counts, starts = zip(*pairs, strict=True)
        choices, zeros = Choices(counts, starts, single=kind == "Discrete"), np.zeros(sum(counts), np.float32)
        return _ObservationRows(
            zeros, zeros + 1, lambda obs: encode_one_hot(obs, choices), str(space), choices
        )
    parts = [_rows_of_space(part) for part in space.spaces] if kind == "Tuple" else []
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    low, high = (np.concatenate([np.ravel(getattr(part, end)) for part in known]) for end in ("low", "high"))

    def join(obs: Any) -> np.ndarray:
        return np.concatenate([np.ravel(part.read(value)) for part, value in zip(known, obs, strict=True)])

    return _ObservationRows(low, high, join, str(space))


def encode_one_hot(obs: Any, choices: Choices) -> np.ndarray:
    """Return one-hot rows, float32 [..., sum(counts)], of discrete observations, integers [..., choices].

    Those of a Discrete space have no last axis. Raise EnvironmentMismatchError for one outside the space.
    """
    numbers = np.asarray(obs)
    numbers = numbers[..., None] if choices.single else numbers
    rows = []
    for column, (count, first) in enumerate(zip(choices.counts, choices.starts, strict=True)):
        places = numbers[..., column] - first
        if np.any((places < 0) | (places >= count)):
            raise EnvironmentMismatchError(
                "a discrete observation is outside its space",
                expected=f"{first} to {first + count - 1}",
                found=str(numbers[..., column].tolist()),
            )
        rows.append(np.eye(count, dtype=np.float32)[places])
    return np.concatenate(rows, axis=-1)


def _read_choices(action: Any) -> tuple[tuple[int, int], ...]:
    """Return the number of values and the first value of each discrete action; nothing for other spaces."""
    kind = type(action).__name__
    if kind == "Discrete":
        return ((int(action.n), int(action.start)),)
    if kind == "MultiBinary" and len(action.shape) == 1:
        return ((2, 0),) * int(action.n)
    if kind != "MultiDiscrete" or np.ndim(action.nvec) != 1:
        return ()
    starts = getattr(action, "start", np.zeros(len(action.nvec), np.int64))
    return tuple((int(count), int(first)) for count, first in zip(action.nvec, starts, strict=True))


def _action_reader(action: Any) -> Callable[[np.ndarray], Any]:
    """Return the function from a row of actions to the environment's own form."""
    if type(action).__name__ == "Discrete":
        return lambda row: int(row[0])
    if type(action).__name__ in ("MultiDiscrete", "MultiBinary"):
        return lambda row: row.astype(action.dtype)
    return lambda row: row


def _library_versions(env: Any) -> dict[str, str]:
    """Return the versions of Gymnasium and of the environment's physics library."""
    modules = ".".join(cls.__module__ for cls in type(getattr(env, "unwrapped", env)).__mro__)
    names = ["gymnasium", *(package for word, package in PHYSICS.items() if word in modules)]
    from importlib import metadata  # other commands run without it

    return {name: metadata.version(name) for name in names if importlib.util.find_spec(name)}


@contextmanager
def collect_warnings(notes: dict[str, None]) -> Iterator[None]:
    """Collect Python warnings as notes, e.g. `out of date`, `using the latest version`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    lines = [clean_warning(str(warning.message)) for warning in caught]
    notes.update({line: None for line in lines if not line.startswith(BINDINGS)})


def redirect_mujoco_warnings(notes: dict[str, None]) -> Callable[[], None]:
    """Turn MuJoCo's warnings into notes; return a function that restores the handler.

    By default MuJoCo prints them and writes MUJOCO_LOG.TXT into the user's current folder.
    """
    if importlib.util.find_spec("mujoco") is None:
        return lambda: None
    try:
        mujoco = importlib.import_module("mujoco")
    except (ImportError, AttributeError, RuntimeError) as error:
        # It loads the OpenGL library that MUJOCO_GL selects, with or without rendering.
        requested = os.environ.get("MUJOCO_GL")
        raise UnsupportedError(
            f"cannot import mujoco: {clean_warning(str(error))}",
            hint=f"unset MUJOCO_GL (now {requested!r})" if requested else None,
        ) from None
    before = mujoco.get_mju_user_warning()

    def hear(message: str) -> None:
        # Deprecated syntax in Gymnasium's models is not the user's concern.
        if "is deprecated" not in message:
            notes[clean_warning(message)] = None

    mujoco.set_mju_user_warning(hear)
    return lambda: mujoco.set_mju_user_warning(before)


def clean_warning(message: str) -> str:
    """Return a warning without colour codes and without the prefix `WARN: `."""
    return re.sub(r"\x1b\[[0-9;]*m|^WARN: ", "", message).removeprefix("WARN: ").strip()


_POOL = 4
_INIT_A, _MULT_A, _INIT_B, _MULT_B = 0x43B0D7E5, 0x931E8875, 0x8B51F9DD, 0x58F38DED
_MIX_L, _MIX_R, _SHIFT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715), np.uint32(16)
_PCG_HIGH, _PCG_LOW = np.uint64(0x2360ED051FC65DA4), np.uint64(0x4385DF649FCCF645)
_HALF, _LOW_WORD = np.uint64(32), np.uint64(0xFFFFFFFF)
# Number of seeds whose draws are compared with those of the environment itself.
_COMPARED = 32

Wide = tuple[np.ndarray, np.ndarray]
"""128-bit integers: the high and the low halves, uint64 [n]."""


def draw_starts(
    seeds: np.ndarray, low: np.ndarray, high: np.ndarray, draw: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Return the first `generator.uniform(low, high)` of each seed: [len(seeds), len(low)].

    `draw` returns the same for one seed, by a reset of the environment, in the type of its state. It is
    called for a sample of the seeds, and for all of them if the sample differs from the values computed here.
    A reset draws from `Generator(PCG64(SeedSequence(seed)))`, which takes 20 us per seed, longer than the
    episode takes on a GPU. The arithmetic is that of numpy/random: bit_generator.pyx (SeedSequence) and
    src/pcg64/pcg64.h.
    """
    unique, inverse = np.unique(seeds, return_inverse=True)
    sample = np.unique(np.linspace(0, len(unique) - 1, _COMPARED).astype(np.int64))
    if len(sample) < len(unique) and int(unique[0]) >= 0 and int(unique[-1]) < 1 << 32:
        with np.errstate(over="ignore"):
            starts = low + (high - low) * draw_uniforms(unique.astype(np.uint32), len(low))
        drawn = np.stack([draw(int(unique[index])) for index in sample.tolist()])
        starts = starts.astype(drawn.dtype)
        if np.array_equal(starts[sample], drawn):
            return np.asarray(starts[inverse])
    return np.stack([draw(seed) for seed in unique.tolist()])[inverse]


def draw_uniforms(seeds: np.ndarray, count: int) -> np.ndarray:
    """Return the first numbers in [0, 1) of each seed's generator: uint32 [n] to float64 [n, count]."""
    words = _seed_words(seeds)
    halves = [words[2 * k].astype(np.uint64) | words[2 * k + 1].astype(np.uint64) << _HALF for k in range(4)]
    start, increment = (halves[0], halves[1]), (halves[2], halves[3])
    one = np.uint64(1)
    odd = (increment[0] << one | increment[1] >> np.uint64(63), increment[1] << one | one)
    state = _advance_generator(_add_wide(odd, start), odd)
    uniforms = np.empty((len(seeds), count))
    for column in range(count):
        state = _advance_generator(state, odd)
        mixed, turn = state[0] ^ state[1], state[0] >> np.uint64(58)
        bits = mixed >> turn | mixed << (np.uint64(64) - turn & np.uint64(63))
        uniforms[:, column] = (bits >> np.uint64(11)) * 2.0**-53
    return uniforms


def _seed_words(seeds: np.ndarray) -> list[np.ndarray]:
    """Return the eight words that SeedSequence generates from each seed: uint32 [n] each."""
    constant = _INIT_A

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal constant
        first = value ^ np.uint32(constant)
        constant = constant * _MULT_A & 0xFFFFFFFF
        product: np.ndarray = first * np.uint32(constant)
        return np.asarray(product ^ product >> _SHIFT)

    pool = [hashed(seeds if word == 0 else np.zeros_like(seeds)) for word in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                mixed: np.ndarray = _MIX_L * pool[target] - _MIX_R * hashed(pool[source])
                pool[target] = mixed ^ mixed >> _SHIFT
    words, constant = [], _INIT_B
    for word in range(2 * _POOL):
        first = pool[word % _POOL] ^ np.uint32(constant)
        constant = constant * _MULT_B & 0xFFFFFFFF
        product: np.ndarray = first * np.uint32(constant)
        words.append(product ^ product >> _SHIFT)
    return words


def _advance_generator(state: Wide, increment: Wide) -> Wide:
    """Return the generator's next state, state * multiplier + increment modulo 2^128."""
    (high, low), a = state, state[1]
    a_low, a_high = a & _LOW_WORD, a >> _HALF
    b_low, b_high = _PCG_LOW & _LOW_WORD, _PCG_LOW >> _HALF
    middle = a_high * b_low + (a_low * b_low >> _HALF)
    other = a_low * b_high + (middle & _LOW_WORD)
    carried = a_high * b_high + (middle >> _HALF) + (other >> _HALF)
    return _add_wide((carried + high * _PCG_LOW + low * _PCG_HIGH, low * _PCG_LOW), increment)


def _add_wide(one: Wide, other: Wide) -> Wide:
    low = one[1] + other[1]
    return one[0] + other[0] + (low < one[1]), low


RESTARTED = "/restarted"
"""Key of a step's info: the wrappers began anew because a life was lost."""
_LOST = "/life lost"
ATARI_SIDE = 84
"""Height and width of images in Mnih et al. 2015, the default of every library."""


class GameWrapper:
    """Wrapper around one environment with Gymnasium's functions; the base class changes nothing.

    Sources: stable_baselines3/common/atari_wrappers.py (all classes of the same names; AtariWrapper has their
    order); CleanRL's scripts (dqn_atari.py, `make_env`) use the same classes from its atari_wrappers.py, and
    gymnasium 0.28's wrappers/resize_observation.py and gray_scale_observation.py; gymnasium's
    wrappers/atari_preprocessing.py. A lost life does not end an episode, and rewards are the game's own,
    those of the reset's steps too: the library's Monitor, inside all of these, sums the same. With
    EpisodicLifeEnv a lost life ends the library's episode, also in evaluation (rl_zoo3/enjoy.py makes the
    training environment): its vector environment resets the wrappers around it, which press FIRE and empty
    their stacks, and the game goes on.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = env.observation_space

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    @staticmethod
    def size(obs: int, act: int, **_: Any) -> int:  # noqa: ARG004
        """Return the observation size for wrappers around these: that of their result."""
        return obs

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; return the first image."""
        obs, info = self.env.reset(**options)
        return self.image(obs), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance by an action; return image, reward, terminated, truncated, info."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.image(obs), reward, terminated, truncated, info

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the preprocessed image of an observation."""
        return obs

    def _bytes_of_shape(self, *shape: int) -> Any:
        """Return the space of images of this shape; raise UnsupportedError around other environments."""
        self._actions()
        return importlib.import_module("gymnasium").spaces.Box(0, 255, shape, np.uint8)

    def _actions(self) -> Sequence[str]:
        """Return the names of the game's actions; raise UnsupportedError for other environments."""
        unwrapped = self.env.unwrapped
        if not hasattr(unwrapped, "get_action_meanings"):
            raise UnsupportedError(
                f"Atari's wrapper {type(self).__name__} is supported only around Atari games",
                expected="an environment of ale_py",
                found=str(getattr(self.env.spec, "id", type(unwrapped).__name__)),
            )
        names: Sequence[str] = unwrapped.get_action_meanings()
        return names


class _RewardSum(GameWrapper):
    """Sum the game's rewards since its reset, until they are read; count the games."""

    total = last = 0.0
    games = 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start at zero; `last` is what was not read of the game before."""
        self.last, self.total = self.total, 0.0
        self.games += 1
        return super().reset(**options)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Add the step's reward."""
        result = super().step(action)
        self.total += float(result[1])
        return result


class _OwnRewards(GameWrapper):
    """Return the sums of the innermost wrapper as rewards."""

    def __init__(self, env: Any, rewards: _RewardSum) -> None:
        super().__init__(env)
        self._rewards = rewards

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Return the game's rewards since the last step; the first ones include those of the reset."""
        obs, _, terminated, truncated, info = super().step(action)
        if info.get(_LOST) and not (terminated or truncated):
            games = self._rewards.games
            obs, _ = self.env.reset()
            if self._rewards.games > games:
                # The game ended while its wrappers pressed buttons.
                return obs, self._rewards.last, True, False, info
            info = {**info, RESTARTED: True}
        reward, self._rewards.total = self._rewards.total, 0.0
        return obs, reward, terminated, truncated, info


def _ended(terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
    """Return whether the library's episode ended in a step: with the game, or with a life."""
    return bool(terminated or truncated or info.get(_LOST))


class EpisodicLifeEnv(GameWrapper):
    """Mark the step in which a life is lost; a reset after it advances the game by one step."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._actions()
        self._lives, self._going = 0, False

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Go on after a lost life; else, and with a seed, start a game."""
        obs, info = np.zeros(0), dict[str, Any]()
        going = self._going and options.get("seed") is None
        if going:
            obs, _, terminated, truncated, info = self.env.step(0)
            going = not (terminated or truncated)
        if not going:
            obs, info = self.env.reset(**options)
        self._lives = self.env.unwrapped.ale.lives()
        return obs, info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance by the action."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._going = not (terminated or truncated)
        lives = self.env.unwrapped.ale.lives()
        if 0 < lives < self._lives:
            info = {**info, _LOST: True}
        self._lives = lives
        return obs, reward, terminated, truncated, info


class StickyActionEnv(GameWrapper):
    """Repeat the last action with a probability."""

    def __init__(self, env: Any, action_repeat_probability: float) -> None:
        super().__init__(env)
        self._probability, self._last = action_repeat_probability, 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start from no operation."""
        self._last = 0
        return super().reset(**options)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance by the action or the last one."""
        if self.env.unwrapped.np_random.random() >= self._probability:
            self._last = action
        return super().step(self._last)


class NoopResetEnv(GameWrapper):
    """Start with 1 to `noop_max` steps without operation, a number from the environment's generator."""

    def __init__(self, env: Any, noop_max: int = 30) -> None:
        super().__init__(env)
        if not isinstance(noop_max, int) or noop_max < 1 or self._actions()[0] != "NOOP":
            raise UsageError("NoopResetEnv requires a positive integer and a game whose action 0 is NOOP")
        self._most = noop_max

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode and wait."""
        self.env.reset(**options)
        obs, info = np.zeros(0), {}
        for _ in range(int(self.env.unwrapped.np_random.integers(1, self._most + 1))):
            obs, _, terminated, truncated, info = self.env.step(0)
            if _ended(terminated, truncated, info):
                obs, info = self.env.reset(**options)
        return obs, info


class MaxAndSkipEnv(GameWrapper):
    """Repeat every action `skip` times; the observation is the maximum of the last two images."""

    def __init__(self, env: Any, skip: int = 4) -> None:
        super().__init__(env)
        self._actions()
        self._images = np.zeros((2, *env.observation_space.shape), env.observation_space.dtype)
        self._skip = skip

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance by the repeated action, or to the end of the episode."""
        rewards, terminated, truncated, info = 0.0, False, False, {}
        for number in range(self._skip):
            obs, reward, terminated, truncated, info = self.env.step(action)
            if number >= self._skip - 2:
                self._images[number - self._skip] = obs
            rewards += float(reward)
            if _ended(terminated, truncated, info):
                break
        return self._images.max(axis=0), rewards, terminated, truncated, info


class FireResetEnv(GameWrapper):
    """Press FIRE after the reset, and the action after it; games without FIRE start as they are."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._fires = "FIRE" in self._actions()

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode and press FIRE."""
        obs, info = self.env.reset(**options)
        for action in (1, 2) if self._fires else ():
            obs, _, terminated, truncated, info = self.env.step(action)
            if _ended(terminated, truncated, info):
                self.env.reset(**options)
        return obs, info


class WarpFrame(GameWrapper):
    """Turn images to grey and then resize them: uint8 [height, width, 1]."""

    def __init__(self, env: Any, width: int = ATARI_SIDE, height: int = ATARI_SIDE) -> None:
        super().__init__(env)
        self._opencv, self._size = _import_opencv(), (width, height)
        self.observation_space = self._bytes_of_shape(height, width, 1)

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the grey image."""
        cv2 = self._opencv
        grey = cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY)
        return np.asarray(cv2.resize(grey, self._size, interpolation=cv2.INTER_AREA))[:, :, None]


class ResizeObservation(GameWrapper):
    """Resize images: uint8 [height, width, channels]."""

    def __init__(self, env: Any, shape: int | Sequence[int]) -> None:
        super().__init__(env)
        sides = [shape, shape] if isinstance(shape, int) else shape
        if not isinstance(sides, list) or len(sides) != 2 or not all(type(side) is int for side in sides):
            raise UsageError("ResizeObservation requires a height and a width", found=str(shape)[:40])
        height, width = sides
        if min(sides) < 1:
            raise UsageError("ResizeObservation requires positive sizes", found=str(shape)[:40])
        self._opencv, self._size = _import_opencv(), (width, height)
        self.observation_space = self._bytes_of_shape(height, width, *env.observation_space.shape[2:])

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the resized image."""
        cv2 = self._opencv
        resized = cv2.resize(obs, self._size, interpolation=cv2.INTER_AREA)
        return np.asarray(resized).reshape(self.observation_space.shape)


class GrayScaleObservation(GameWrapper):
    """Turn images to grey: uint8 [height, width], or with `keep_dim` [height, width, 1]."""

    def __init__(self, env: Any, *, keep_dim: bool = False) -> None:
        super().__init__(env)
        self._opencv = _import_opencv()
        more = (1,) if keep_dim else ()
        self.observation_space = self._bytes_of_shape(*env.observation_space.shape[:2], *more)

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the grey image."""
        cv2 = self._opencv
        return np.asarray(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY)).reshape(self.observation_space.shape)


class AtariWrapper(GameWrapper):
    """Apply Stable-Baselines3's chain; `clip_reward` only affects training."""

    def __init__(
        self,
        env: Any,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = ATARI_SIDE,
        *,
        terminal_on_life_loss: bool = True,
        clip_reward: bool = True,  # noqa: ARG002
        action_repeat_probability: float = 0.0,
    ) -> None:
        if action_repeat_probability > 0:
            env = StickyActionEnv(env, action_repeat_probability)
        if noop_max > 0:
            env = NoopResetEnv(env, noop_max)
        if frame_skip > 1:
            env = MaxAndSkipEnv(env, frame_skip)
        if terminal_on_life_loss:
            env = EpisodicLifeEnv(env)
        super().__init__(WarpFrame(FireResetEnv(env), screen_size, screen_size))


class AtariPreprocessing(GameWrapper):
    """Apply Gymnasium's preprocessing: the game's own grey screens, the maximum of two, resized."""

    def __init__(
        self,
        env: Any,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = ATARI_SIDE,
        *,
        grayscale_obs: bool = True,
        grayscale_newaxis: bool = False,
        scale_obs: bool = False,
    ) -> None:
        super().__init__(env if noop_max == 0 else NoopResetEnv(env, noop_max))
        self._actions()
        if scale_obs:
            raise UnsupportedError("AtariPreprocessing with scale_obs, images of fractions")
        own = getattr(env.unwrapped, "_frameskip", None)
        if frame_skip > 1 and own != 1:
            raise UsageError(
                "AtariPreprocessing repeats actions, and the game does it itself",
                expected="a NoFrameskip game, or one with frameskip=1",
                found=f"frameskip {own}",
                hint="--wrapper AtariPreprocessing:frame_skip=1",
            )
        self._opencv, self._size = _import_opencv(), (screen_size, screen_size)
        self._skip, self._grey = frame_skip, grayscale_obs
        channels = (3,) if not grayscale_obs else (1,) if grayscale_newaxis else ()
        self.observation_space = self._bytes_of_shape(*self._size, *channels)
        shape = env.observation_space.shape
        self._screens = np.zeros((2, *(shape[:2] if grayscale_obs else shape)), np.uint8)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode, wait, and return its screen."""
        _, info = self.env.reset(**options)
        self._read_screen(0)
        self._screens[1] = 0
        return self._image(), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance by the repeated action, or to the end of the episode."""
        rewards, terminated, truncated, info = 0.0, False, False, {}
        for number in range(self._skip):
            _, reward, terminated, truncated, info = self.env.step(action)
            rewards += float(reward)
            if terminated or truncated:
                break
            if number >= self._skip - 2:
                self._read_screen(self._skip - 1 - number)
        return self._image(), rewards, terminated, truncated, info

    def _read_screen(self, number: int) -> None:
        ale, screen = self.env.unwrapped.ale, self._screens[number]
        (ale.getScreenGrayscale if self._grey else ale.getScreenRGB)(screen)

    def _image(self) -> np.ndarray:
        if self._skip > 1:
            np.maximum(self._screens[0], self._screens[1], out=self._screens[0])
        cv2 = self._opencv
        image = cv2.resize(self._screens[0], self._size, interpolation=cv2.INTER_AREA)
        return np.asarray(image).reshape(self.observation_space.shape)


def wrap_game(env: Any, wrappers: Sequence[tuple[type[GameWrapper], dict[str, Any]]]) -> Any:
    """Return one environment inside these wrappers, with their arguments, the innermost first."""
    if not wrappers:
        return env
    rewards = wrapped = _RewardSum(env)
    for kind, arguments in wrappers:
        wrapped = kind(wrapped, **arguments)  # type: ignore[assignment]
    return _OwnRewards(wrapped, rewards)


def _import_opencv() -> Any:
    require_package("cv2", "the preprocessing of Atari games needs OpenCV", "atari")
    return importlib.import_module("cv2")


_ATARI_ENTRY_POINT = "ale_py.env:AtariEnv"


def is_atari_installed() -> bool:
    """Return whether the library of the games is installed, without importing it."""
    return importlib.util.find_spec("ale_py") is not None


def may_be_game(env_id: str) -> bool:
    """Return whether an id has a form that only Atari games have."""
    return env_id.startswith("ALE/") or "NoFrameskip-v" in env_id


def register_games(env_id: str, registry: Collection[str]) -> None:
    """Add the games to Gymnasium's registry for an id that it lacks, without the library's banner."""
    if env_id not in registry and ":" not in env_id and is_atari_installed():
        library = importlib.import_module("ale_py")
        library.ALEInterface.setLoggerMode(library.LoggerMode.Error)


def read_frame_skip(spec: Any) -> int | Sequence[int] | None:
    """Return the frames per action of a game in the registry, None for other environments."""
    if spec is None or spec.entry_point != _ATARI_ENTRY_POINT:
        return None
    skip: int | Sequence[int] = spec.kwargs.get("frameskip", 1)
    return skip
