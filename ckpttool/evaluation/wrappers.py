"""Apply training's environment wrappers to observations, actions and the end of an episode.

Sources: github.com/DLR-RM/rl-baselines3-zoo, rl_zoo3/wrappers.py (HistoryWrapper,
MaskVelocityWrapper, ActionNoiseWrapper, ActionSmoothingWrapper, DelayedRewardWrapper, FrameSkip);
rl_zoo3/utils.py, `get_wrapper_class` (a name, or a mapping of one name to its arguments; a list is
applied in its order) and `create_test_env` (vector wrappers, then VecNormalize, then
`frame_stack`); github.com/Stable-Baselines-Team/stable-baselines3-contrib,
sb3_contrib/common/wrappers/time_feature.py;
stable_baselines3/common/vec_env/stacked_observations.py (zeros at the start, the newest
observation last); gymnasium/wrappers/{common,transform_action,stateful_observation}.py. Returns
are sums of the environment's own rewards, as recorded by the Monitor that make_vec_env puts inside
all of these.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UnsupportedError, UsageError, suggest_choice
from ckpttool.evaluation import gymnasium_engine
from ckpttool.evaluation.gymnasium_engine import OBS, EnvSpec, GameWrapper, Outcome, OuterVector, VectorEnv
from ckpttool.evaluation.simulators import DeviceVector
from ckpttool.networks.network import Observation

LIBRARIES: Final = (
    "sb3_contrib.",
    "rl_zoo3.",
    "utils.wrappers.",
    "stable_baselines3.",
    "stable_baselines.",
    "gymnasium.",
    "gym.",
    "cleanrl_utils.",
)
"""Packages with supported wrappers; a class of the same name in another package is different."""

NONE: Final = "none"
"""Placeholder for "no wrapper" in a list of wrappers."""

FLATTENING: Final = "FlattenObservation"
"""Wrapper that joins several inputs, or several axes, to one row."""

Bounds = tuple[np.ndarray, np.ndarray]
"""The lowest and the highest observation, [n] each."""

_MOST: Final = {
    "horizon": 1000,
    "n_stack": 1000,
    "skip": 1000,
    "max_steps": 10**9,
    "max_episode_steps": 10**9,
    "frame_skip": 1000,
    "screen_size": 1000,
    "width": 1000,
    "height": 1000,
}


@dataclass(frozen=True, slots=True)
class WrapperSpec:
    """Wrapper name as in a file, and its arguments: plain numbers, booleans, text."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def title(self) -> str:
        """Return the class name without its module."""
        return self.name.rpartition(".")[2]


class Wrapper:
    """Wrapper around environments of one kind, all rows at once; the base class changes nothing."""

    def __init__(self, spec: EnvSpec, rows: int) -> None:
        self.inner = self.spec = spec
        self._steps = np.zeros(rows, np.int64)
        """steps of each row's episode"""

    @staticmethod
    def size(obs: int, act: int, **_: Any) -> int:  # noqa: ARG004
        """Return the observation size after wrapping an environment of `obs` values and `act` actions."""
        return obs

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Prepare new episodes, before their first observations."""

    def restart(self, rows: np.ndarray, obs: np.ndarray) -> None:
        """Forget earlier observations of rows whose game goes on after a lost life; `obs` follow it."""

    def action(self, actions: np.ndarray, rows: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Return the actions for the wrapped environments; actions [num_envs, action_dim]."""
        return actions

    def observe(self, obs: np.ndarray, rows: np.ndarray, actions: np.ndarray | None) -> np.ndarray:  # noqa: ARG002
        """Return the observations [len(rows), n]; outer `actions` are None at the start of episodes."""
        return obs

    def truncate(self, rows: np.ndarray, truncated: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Return which rows' episodes are truncated."""
        return truncated

    def reset(self, obs: np.ndarray, rows: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        """Return the first observations of new episodes."""
        self._steps[rows] = 0
        self.begin(rows, seeds)
        return self.observe(obs, rows, None)

    def step(
        self, obs: np.ndarray, actions: np.ndarray, rows: np.ndarray, outcome: Outcome
    ) -> tuple[np.ndarray, Outcome]:
        """Return the observations [len(rows), n] and outcome of a step; `actions` came from outside."""
        self._steps[rows] += 1
        rewards, terminated, truncated = outcome
        return self.observe(obs, rows, actions), (rewards, terminated, self.truncate(rows, truncated))

    def _sized(self, obs: int, bounds: Bounds | None = None) -> None:
        """Set the size of observations and their bounds, None if those are unknown."""
        ((name, _, dtype),) = self.spec.observation
        known = {} if bounds is None else {name: bounds}
        self.spec = replace(self.spec, observation=((name, (obs,), dtype),), observation_bounds=known)


class TimeFeature(Wrapper):
    """Append the remaining share of the episode to the observation; always 1 in test mode."""

    def __init__(self, spec: EnvSpec, rows: int, max_steps: int = 1000, *, test_mode: bool = False) -> None:
        super().__init__(spec, rows)
        self._limit = spec.max_episode_steps or max_steps
        self._test_mode = test_mode
        bounds_ = spec.observation_bounds.get(OBS)
        bounds = None if bounds_ is None else (np.append(bounds_[0], 0.0), np.append(bounds_[1], 1.0))
        self._sized(spec.obs_dim + 1, bounds)

    @staticmethod
    def size(obs: int, act: int, **_: Any) -> int:  # noqa: ARG004
        """Return the size with one more value."""
        return obs + 1

    def observe(self, obs: np.ndarray, rows: np.ndarray, actions: np.ndarray | None) -> np.ndarray:  # noqa: ARG002
        """Append the remaining share."""
        left = np.ones(len(rows)) if self._test_mode else self._time(self._steps[rows])
        return np.concatenate([obs, left[:, None].astype(obs.dtype)], axis=1)

    def _time(self, steps: np.ndarray) -> np.ndarray:
        return np.asarray(1 - steps / self._limit)


class TimeAware(TimeFeature):
    """Append Gymnasium's step count to the observation, as a share of the limit if normalised."""

    def __init__(
        self,
        spec: EnvSpec,
        rows: int,
        flatten: bool = True,  # Gymnasium's order of the arguments.
        *,
        normalize_time: bool = False,
    ) -> None:
        super().__init__(spec, rows)
        if not flatten or (normalize_time and spec.max_episode_steps is None):
            raise UnsupportedError(
                "TimeAwareObservation is supported only flattened, in environments with a step limit"
            )
        self._share = normalize_time
        self._sized(spec.obs_dim + 1)  # the bounds differ between versions

    def _time(self, steps: np.ndarray) -> np.ndarray:
        return np.asarray((steps / self._limit).astype(np.float32) if self._share else steps)


class HistoryWrapper(Wrapper):
    """Concatenate the last observations and actions, oldest first; zeros before the episode."""

    def __init__(self, spec: EnvSpec, rows: int, horizon: int = 2) -> None:
        super().__init__(spec, rows)
        self._obs = np.zeros((rows, horizon * spec.obs_dim))
        self._actions = np.zeros((rows, horizon * spec.action_dim), spec.action_low.dtype)
        bounds = None
        if (source_bounds := spec.observation_bounds.get(OBS)) is not None:
            low, high = (
                np.concatenate([np.tile(end, horizon), np.tile(action, horizon)])
                for end, action in zip(source_bounds, (spec.action_low, spec.action_high), strict=True)
            )
            bounds = low, high
        self._sized(self.size(spec.obs_dim, spec.action_dim, horizon=horizon), bounds)

    @staticmethod
    def size(obs: int, act: int, horizon: int = 2, **_: Any) -> int:
        """Return the size of that many observations and actions."""
        return horizon * (obs + act)

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:  # noqa: ARG002
        """Clear the histories."""
        self._obs[rows] = self._actions[rows] = 0

    def observe(self, obs: np.ndarray, rows: np.ndarray, actions: np.ndarray | None) -> np.ndarray:
        """Append the observation and the action."""
        self._obs[rows] = _shift_rows(self._obs[rows], obs)
        if actions is not None:
            self._actions[rows] = _shift_rows(self._actions[rows], actions[rows])
        return np.concatenate([self._obs[rows], self._actions[rows]], axis=1)


def _shift_rows(rows: np.ndarray, newest: np.ndarray) -> np.ndarray:
    """Return arrays with the newest values at the end of the second axis, without the oldest ones."""
    return np.concatenate([rows[:, newest.shape[1] :], newest], axis=1)


class FrameStack(Wrapper):
    """Stack the last observations, newest last; zeros or `padding` before the first.

    Those of one axis are joined to one. Of several axes, VecFrameStack (`repeat_bounds`) joins the channels,
    which are the first axis of a space of images if that is the shortest one
    (stable_baselines3/common/preprocessing.py, is_image_space_channels_first), else the last axis;
    Gymnasium's FrameStack adds a first axis.
    """

    def __init__(
        self,
        spec: EnvSpec,
        rows: int,
        n_stack: int,
        *,
        padding: Sequence[float] | None = None,
        repeat_first: bool = False,
        repeat_bounds: bool = False,
    ) -> None:
        super().__init__(spec, rows)
        ((name, shape, dtype),) = spec.observation
        flat = len(shape) == 1
        if not flat and padding is not None:
            raise UnsupportedError("normalised observations of several axes are not stacked")
        self._blank = np.zeros(shape) if padding is None else np.asarray(padding, np.float64)
        if self._blank.shape != shape:
            raise UsageError(
                "the observation statistics and one observation of the stack have different sizes",
                expected=str(spec.obs_dim),
                found=str(len(self._blank)),
            )
        bounds = spec.observation_bounds.get(name)
        joins = flat or repeat_bounds
        images = len(shape) == 3 and dtype == "uint8" and int(np.argmin(shape)) == 0
        if images and bounds is not None:
            images = bool((bounds[0] == 0).all() and (bounds[1] == 255).all())
        axis = 0 if flat or not joins or (images and bounds is not None) else -1
        stacked = [*shape] if joins else [1, *shape]
        stacked[axis] *= n_stack
        self._shape, self._repeat = tuple(stacked), repeat_first
        self._channels_last = axis == -1
        # Wrappers inside compute observations of one axis in float64.
        self._frames: np.ndarray = np.zeros((rows, n_stack, *shape), np.float64 if flat else dtype)
        known: dict[str, Bounds] = {}
        if bounds is not None:
            low, high = (
                np.repeat(end, n_stack, axis) if repeat_bounds else np.stack([end] * n_stack).reshape(stacked)
                for end in bounds
            )
            known = {name: (low, high)}
        self.spec = replace(spec, observation=((name, self._shape, dtype),), observation_bounds=known)

    @staticmethod
    def size(obs: int, act: int, n_stack: int = 1, **_: Any) -> int:  # noqa: ARG004
        """Return the size of that many observations."""
        return n_stack * obs

    def restart(self, rows: np.ndarray, obs: np.ndarray) -> None:
        """Empty the stacks of the rows."""
        self._frames[rows] = obs[:, None] if self._repeat else self._blank

    def observe(self, obs: np.ndarray, rows: np.ndarray, actions: np.ndarray | None) -> np.ndarray:
        """Append the observation; return the stacks of the rows in the shape of the policy's observations."""
        if actions is None:
            self.restart(rows, obs)
        self._frames[rows] = frames = _shift_rows(self._frames[rows], obs[:, None])
        frames = np.moveaxis(frames, 1, -2) if self._channels_last else frames
        return frames.reshape(len(rows), *self._shape)


class MaskVelocity(Wrapper):
    """Set velocities to zero; their indices are listed per environment."""

    _AT: Final[Mapping[str, tuple[int, ...]]] = {
        "CartPole": (1, 3),
        "MountainCar": (1,),
        "MountainCarContinuous": (1,),
        "Pendulum": (2,),
        "LunarLander": (2, 3, 5),
        "LunarLanderContinuous": (2, 3, 5),
    }

    def __init__(self, spec: EnvSpec, rows: int) -> None:
        super().__init__(spec, rows)
        masked = self._AT.get(spec.id.partition("-v")[0])
        if masked is None:
            raise UnsupportedError(f"MaskVelocityWrapper does not define the velocities of {spec.id}")
        self._mask = np.ones(spec.obs_dim)
        self._mask[list(masked)] = 0

    def observe(self, obs: np.ndarray, rows: np.ndarray, actions: np.ndarray | None) -> np.ndarray:  # noqa: ARG002
        """Mask the observations."""
        return np.asarray(obs * self._mask.astype(obs.dtype))


class RescaleAction(Wrapper):
    """Rescale actions from [min_action, max_action] to the environment's bounds."""

    def __init__(
        self,
        spec: EnvSpec,
        rows: int,
        min_action: float | Sequence[float] | None = None,
        max_action: float | Sequence[float] | None = None,
        *,
        a: float | None = None,
        b: float | None = None,
    ) -> None:
        super().__init__(spec, rows)
        ends: tuple[Any, ...] = (min_action if a is None else a, max_action if b is None else b)
        if any(end is None for end in ends):
            raise UsageError("RescaleAction requires min_action and max_action")
        dtype = spec.action_low.dtype
        if any(np.shape(end) not in ((), spec.action_low.shape) for end in ends):
            raise UsageError(
                "RescaleAction has a different number of bounds than the environment has actions"
            )
        self._low, self._high = (np.full(spec.action_low.shape, end, dtype) for end in ends)
        inner = np.isfinite([spec.action_low, spec.action_high]).all()
        if not inner or not (self._low < self._high).all() or not np.isfinite([self._low, self._high]).all():
            raise UsageError(
                "RescaleAction requires finite bounds, its own and the environment's, with "
                "the lower one first"
            )
        self.spec = replace(spec, action_low=self._low, action_high=self._high)

    def action(self, actions: np.ndarray, rows: np.ndarray) -> np.ndarray:  # noqa: ARG002
        """Rescale the actions to the environment's bounds."""
        low, high = self.inner.action_low, self.inner.action_high
        moved = low + (high - low) * ((actions - self._low) / (self._high - self._low))
        return np.asarray(np.clip(moved, low, high), low.dtype)


class RescaleObservation(Wrapper):
    """Rescale observations from the environment's bounds to [min_obs, max_obs]; infinite ones stay."""

    def __init__(
        self,
        spec: EnvSpec,
        rows: int,
        min_obs: float | Sequence[float],
        max_obs: float | Sequence[float],
    ) -> None:
        super().__init__(spec, rows)
        source_bounds = spec.observation_bounds.get(OBS)
        shape = (spec.obs_dim,)
        if source_bounds is None or any(np.shape(end) not in ((), shape) for end in (min_obs, max_obs)):
            raise UsageError(
                "RescaleObservation requires an environment with observation bounds, and one bound of its "
                "own for all observations or one each"
            )
        low, high = (np.full(shape, end, np.float64) for end in (min_obs, max_obs))
        if (
            not np.isfinite([*source_bounds, low, high]).all()
            or not (low <= high).all()
            or (source_bounds[0] == source_bounds[1]).any()
        ):
            raise UsageError(
                "RescaleObservation requires finite bounds, its own and the environment's, with the "
                "lower one first"
            )
        ((_, _, dtype),) = spec.observation
        # gymnasium/wrappers/utils.py, rescale_box: quotients in long double, then the environment's type.
        span = np.asarray(source_bounds[1], np.longdouble) - np.asarray(source_bounds[0], np.longdouble)
        self._slope = ((high - low) / span).astype(dtype)
        self._offset = (self._slope * -source_bounds[0] + low).astype(dtype)
        self._sized(spec.obs_dim, (low.astype(dtype), high.astype(dtype)))

    def observe(self, obs: np.ndarray, rows: np.ndarray, actions: np.ndarray | None) -> np.ndarray:  # noqa: ARG002
        """Rescale the observations."""
        return np.asarray(self._slope * obs + self._offset)


class ActionNoise(Wrapper):
    """Add Gaussian noise to every action within the bounds; draws depend on the episode's seed."""

    def __init__(self, spec: EnvSpec, rows: int, noise_std: float = 0.1) -> None:
        super().__init__(spec, rows)
        self._std = float(noise_std)
        if self._std < 0:
            raise UsageError("noise_std of ActionNoiseWrapper must not be negative", found=f"{self._std:g}")
        self._draws: dict[int, np.random.Generator] = {}

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Seed the noise of new episodes."""
        for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
            self._draws[row] = np.random.default_rng([seed, 2])

    def action(self, actions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Add the noise."""
        noisy = actions.copy()
        for row in rows.tolist():
            noise = self._draws[row].normal(0.0, self._std, actions.shape[1])
            noisy[row] = np.clip(actions[row] + noise, self.spec.action_low, self.spec.action_high)
        return noisy


class ActionSmoothing(Wrapper):
    """Apply an exponential moving average to the actions, starting from zeros."""

    def __init__(self, spec: EnvSpec, rows: int, smoothing_coef: float = 0.0) -> None:
        super().__init__(spec, rows)
        self._share = float(smoothing_coef)
        self._smoothed = np.zeros((rows, spec.action_dim), spec.action_low.dtype)

    def begin(self, rows: np.ndarray, seeds: np.ndarray) -> None:  # noqa: ARG002
        """Clear the previous actions."""
        self._smoothed[rows] = 0

    def action(self, actions: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Average the actions."""
        self._smoothed[rows] = self._share * self._smoothed[rows] + (1 - self._share) * actions[rows]
        return self._smoothed.copy()


class TimeLimit(Wrapper):
    """Truncate episodes after `max_episode_steps`."""

    def __init__(self, spec: EnvSpec, rows: int, max_episode_steps: int) -> None:
        super().__init__(spec, rows)
        self.spec = replace(spec, max_episode_steps=max_episode_steps)

    def truncate(self, rows: np.ndarray, truncated: np.ndarray) -> np.ndarray:
        """Truncate episodes that reach the limit."""
        limit: int = self.spec.max_episode_steps  # type: ignore[assignment]  # set above
        return np.asarray(truncated | (self._steps[rows] >= limit))


class FrameSkip(Wrapper):
    """Repeat every action `skip` times, or until the episode ends; WrappedVector sums the rewards."""

    def __init__(self, spec: EnvSpec, rows: int, skip: int = 4) -> None:
        super().__init__(spec, rows)
        self.skip = skip


_PLAYED: Final[Mapping[str, tuple[type[Wrapper | GameWrapper], Mapping[str, str], Mapping[str, Any]]]] = {
    "TimeFeatureWrapper": (TimeFeature, {}, {}),
    "TimeAwareObservation": (TimeAware, {}, {}),
    "HistoryWrapper": (HistoryWrapper, {}, {}),
    "FrameStack": (FrameStack, {"num_stack": "n_stack"}, {"repeat_first": True}),
    "FrameStackObservation": (FrameStack, {"stack_size": "n_stack"}, {"repeat_first": True}),
    # stacked_observations.py repeats each bound, although it stacks whole observations.
    "VecFrameStack": (FrameStack, {}, {"repeat_bounds": True}),
    "MaskVelocityWrapper": (MaskVelocity, {}, {}),
    "RescaleAction": (RescaleAction, {}, {}),
    "RescaleObservation": (RescaleObservation, {}, {}),
    "ActionNoiseWrapper": (ActionNoise, {}, {}),
    "ActionSmoothingWrapper": (ActionSmoothing, {}, {}),
    "TimeLimit": (TimeLimit, {}, {}),
    "FrameSkip": (FrameSkip, {}, {}),
    "AtariWrapper": (gymnasium_engine.AtariWrapper, {}, {}),
    "AtariPreprocessing": (gymnasium_engine.AtariPreprocessing, {}, {}),
    "EpisodicLifeEnv": (gymnasium_engine.EpisodicLifeEnv, {}, {}),
    "StickyActionEnv": (gymnasium_engine.StickyActionEnv, {}, {}),
    "NoopResetEnv": (gymnasium_engine.NoopResetEnv, {}, {}),
    "MaxAndSkipEnv": (gymnasium_engine.MaxAndSkipEnv, {}, {}),
    "FireResetEnv": (gymnasium_engine.FireResetEnv, {}, {}),
    "WarpFrame": (gymnasium_engine.WarpFrame, {}, {}),
    "ResizeObservation": (gymnasium_engine.ResizeObservation, {}, {}),
    "GrayScaleObservation": (gymnasium_engine.GrayScaleObservation, {}, {}),
}
"""By class name: the wrapper that reproduces it, other argument names, and fixed arguments."""

ATARI_PREPROCESSING: Final[Mapping[str, tuple[str, ...]]] = {
    # stable_baselines3/common/env_util.py, make_atari_env, and VecFrameStack of the documentation's examples.
    "stable_baselines3": ("AtariWrapper", "VecFrameStack:n_stack={frames}"),
    # cleanrl/dqn_atari.py, c51_atari.py and ppo_atari.py, make_env.
    "cleanrl": (
        "NoopResetEnv:noop_max=30",
        "MaxAndSkipEnv:skip=4",
        "EpisodicLifeEnv",
        "FireResetEnv",
        "ClipRewardEnv",
        "ResizeObservation:shape=84",
        "GrayScaleObservation",
        "FrameStack:num_stack={frames}",
    ),
}
"""By library: the wrappers of its examples around Atari games, as text of the command line."""

_CONTINUOUS: Final = frozenset(
    {"HistoryWrapper", "RescaleAction", "ActionNoiseWrapper", "ActionSmoothingWrapper"}
)
"""Wrappers that compute with actions, or put them into observations, as continuous numbers."""
HARMLESS: Final = frozenset(
    {
        "Monitor",
        "ResultsWriter",
        "VecMonitor",
        "VecCheckNan",
        "VecVideoRecorder",
        "RecordEpisodeStatistics",
        "RecordVideo",
        "HumanRendering",
        "OrderEnforcing",
        "PassiveEnvChecker",
        "Autoreset",
        "AutoResetWrapper",
        "EnvCompatibility",
        "StepAPICompatibility",
        "ClipAction",
        FLATTENING,
        "PlotActionWrapper",
    }
)
"""Wrappers that affect neither one-axis observations nor actions."""
_ON_IMAGES: Final = frozenset(
    {"VecFrameStack", "FrameStack", "FrameStackObservation", "TimeLimit", "FrameSkip"}
)
"""Wrappers that are also played around observations of several axes."""
_AROUND_ACTIONS: Final = frozenset(
    {"TimeLimit", "FrameSkip", "RescaleAction", "ActionNoiseWrapper", "ActionSmoothingWrapper"}
)
"""Wrappers that do not change observations."""
REWARDS: Final = frozenset(
    {"NormalizeReward", "ClipReward", "ClipRewardEnv", "TransformReward", "DelayedRewardWrapper"}
)
"""Wrappers that change only rewards, which a trained policy does not use."""
NORMALIZERS: Final = frozenset({"VecNormalize", "NormalizeObservation"})
"""Wrappers whose running statistics are in another file, or in none."""


def is_known_wrapper(wrapper: WrapperSpec) -> bool:
    """Return whether the wrapper's effect on an agent is known."""
    recognized = "." not in wrapper.name or wrapper.name.startswith(LIBRARIES)
    return recognized and wrapper.title in {*_PLAYED, *HARMLESS, *REWARDS, *NORMALIZERS}


def with_frame_skip(wrapper: WrapperSpec, count: int) -> WrapperSpec:
    """Return the wrapper with another number of frames per action, if it is one that repeats actions."""
    name = {
        "MaxAndSkipEnv": "skip",
        **dict.fromkeys(("AtariWrapper", "AtariPreprocessing"), "frame_skip"),
    }.get(wrapper.title)
    return wrapper if name is None else replace(wrapper, arguments={**wrapper.arguments, name: count})


def ends_with_life(wrapper: WrapperSpec) -> bool:
    """Return whether an episode of training ended when a life was lost, and another game began."""
    return wrapper.title == "AtariPreprocessing" and bool(wrapper.arguments.get("terminal_on_life_loss"))


def list_wrapper_names() -> list[str]:
    """Return the names of all wrappers with a known effect on an agent."""
    return sorted({*_PLAYED, *HARMLESS, *REWARDS})


def changes_size(wrappers: Iterable[WrapperSpec]) -> bool:
    """Return whether any of the wrappers changes the observation size."""
    played = (wrapper for wrapper in wrappers if wrapper.title in _PLAYED)
    return any(_PLAYED[wrapper.title][0].size(2, 1, **wrapper_arguments(wrapper)) != 2 for wrapper in played)


def parse_wrapper(text: str) -> WrapperSpec:
    """Return the wrapper of `NAME` or `NAME:argument=number,...`; raise UsageError for other text."""
    name, _, rest = text.partition(":")
    arguments: dict[str, Any] = {}
    # A comma inside a list separates its numbers.
    for pair in filter(None, re.split(r",(?![^\[]*\])", rest)):
        argument, equals, value = pair.partition("=")
        try:
            arguments[argument.strip()] = json.loads(value.lower()) if equals else None
        except json.JSONDecodeError:
            arguments[argument.strip()] = value.strip()
        if not equals or not argument.strip().isidentifier():
            raise UsageError(
                f"an argument of environment wrapper {name} has no value",
                found=pair,
                hint=f"--wrapper {name}:name=1,other=2",
            )
    return WrapperSpec(name.strip(), arguments)


def format_wrapper(wrapper: WrapperSpec) -> str:
    """Return the text of the command line that `parse_wrapper` reads."""
    pairs = [
        f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in wrapper.arguments.items()
    ]
    return f"{wrapper.name}:{','.join(pairs)}" if pairs else wrapper.name


def serialize_wrappers(wrappers: Iterable[WrapperSpec]) -> str:
    """Format wrappers as text: equal wrappers give equal text."""
    return json.dumps([[wrapper.name, dict(wrapper.arguments)] for wrapper in wrappers], sort_keys=True)


def deserialize_wrappers(text: str) -> tuple[WrapperSpec, ...]:
    """Parse wrappers from their text form."""
    return tuple(WrapperSpec(str(name), arguments) for name, arguments in (json.loads(text) if text else ()))


def wrapper_arguments(wrapper: WrapperSpec) -> dict[str, Any]:
    """Return a wrapper's arguments under ckpttool's names; raise UsageError for an unknown one."""
    kind, names, fixed = _PLAYED[wrapper.title]
    arguments = dict(wrapper.arguments)
    if kind is FrameStack and wrapper.title == "FrameStackObservation":
        padding = arguments.pop("padding_type", "reset")
        if padding not in ("reset", "zero"):
            raise UsageError(
                f"{wrapper.title} does not support padding {padding!r}", expected="reset or zero"
            )
        fixed = {"repeat_first": padding == "reset"}
    if kind is gymnasium_engine.AtariPreprocessing:
        # Of training only: the library starts another game after a lost life.
        arguments.pop("terminal_on_life_loss", None)
    if kind is FrameStack and wrapper.title == "VecFrameStack" and arguments.pop("channels_order", None):
        raise UnsupportedError("a stated channels_order is not supported yet", found=wrapper.title)
    renamed = {names.get(name, name): value for name, value in arguments.items()}
    parameters = inspect.signature(kind).parameters
    allowed = {name: param for name, param in parameters.items() if name not in ("spec", "rows", "env")}
    missing = [
        name
        for name, parameter in allowed.items()
        if parameter.default is parameter.empty and name not in renamed
    ]
    if missing:
        raise UsageError(
            f"environment wrapper {wrapper.name} requires the argument {missing[0]}",
            hint=f"--wrapper {wrapper.name}:{missing[0]}=N",
        )
    for name in renamed:
        if name not in allowed:
            raise UsageError(
                f"unknown argument {name!r} of environment wrapper {wrapper.name}",
                hint=suggest_choice(name, allowed) if allowed else None,
            )
        if not _is_valid_argument(name, renamed[name]):
            raise UsageError(
                f"invalid {name} of environment wrapper {wrapper.name}",
                expected=f"an integer from 1 to {_MOST[name]:,}" if name in _MOST else "finite numbers",
                found=repr(renamed[name])[:40],
            )
    return {**renamed, **fixed}


def _is_valid_argument(name: str, value: object) -> bool:
    if name in _MOST:
        return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST[name]
    if isinstance(value, list):
        return all(_is_valid_argument("", item) for item in value)
    return isinstance(value, bool | int | float) and bool(np.isfinite(value))


def inner_obs_dim(outer: int, act: int, wrappers: Sequence[WrapperSpec]) -> int | None:
    """Return the inner observation size that gives `outer` after wrapping; None if there is none."""
    played = [wrapper for wrapper in wrappers if wrapper.title in _PLAYED]

    def outside(size: int) -> int:
        for wrapper in played:
            size = _PLAYED[wrapper.title][0].size(size, act, **wrapper_arguments(wrapper))
        return size

    # Each wrapped size is a multiple of the inner one plus a constant.
    zero, one = outside(0), outside(1)
    quotient, rest = divmod(outer - zero, one - zero)
    return quotient if rest == 0 and quotient > 0 else None


class WrappedVector(OuterVector):
    """Environments inside training wrappers, innermost first."""

    def __init__(self, inner: VectorEnv, wrappers: Sequence[WrapperSpec]) -> None:
        spec = inner.spec
        if isinstance(inner, DeviceVector):
            raise UsageError(
                "the device engine does not support environment wrappers",
                found=", ".join(wrapper.title for wrapper in wrappers),
                hint="use --engine gymnasium",
            )
        _, outer = split_game_wrappers(wrappers)
        played = [wrapper for wrapper in outer if wrapper.title in _PLAYED]
        self._joins = _joins_inputs(spec, wrappers)
        if self._joins:
            before = outer[: [wrapper.title for wrapper in outer].index(FLATTENING)]
            if moved := [e.title for e in before if e.title in _PLAYED and e.title not in _AROUND_ACTIONS]:
                raise UnsupportedError(
                    f"{FLATTENING} is supported only inside wrappers that change observations",
                    found=f"{FLATTENING} around {', '.join(moved)}",
                )
            spec = _join_inputs(spec)
            ((_, _, self._joined_type),) = spec.observation
        images = list(spec.shapes) == [OBS] and len(spec.shapes[OBS]) > 1
        flat = [wrapper.title for wrapper in played if not images or wrapper.title not in _ON_IMAGES]
        if flat and (list(spec.shapes) != [OBS] or images):
            raise UnsupportedError(
                f"{', '.join(flat)}: supported only for one-dimensional observations",
                expected="Box (n,)",
                found=f"{spec.id}: {dict(spec.shapes)}",
            )
        moving = [wrapper.title for wrapper in wrappers if spec.choices and wrapper.title in _CONTINUOUS]
        if moving:
            raise UnsupportedError(
                "these environment wrappers are supported only for continuous actions",
                expected="Box (n,)",
                found=f"{', '.join(moving)} around discrete actions",
            )
        super().__init__(inner)
        self._chain: list[Wrapper] = []
        for wrapper in played:
            kind = cast(type[Wrapper], _PLAYED[wrapper.title][0])
            self._chain.append(kind(spec, inner.num_envs, **wrapper_arguments(wrapper)))
            spec = self._chain[-1].spec
        titles = ", ".join(f"{wrapper.title}{format_arguments(wrapper.arguments)}" for wrapper in wrappers)
        self.spec = spec = replace(spec, arguments={**spec.arguments, "wrappers": titles})
        self.obs: Observation = spec.zeros(self.num_envs)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i]."""
        self._inner.reset(rows, seeds)
        if not self._chain and not self._joins:
            self.obs = self._inner.obs
            return
        obs = self._inner_rows(rows)
        for link in self._chain:
            obs = link.reset(obs, rows, seeds)
        cast(np.ndarray, self.obs)[rows] = obs

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return rewards, terminated and truncated, each [len(rows)]."""
        if not self._chain and not self._joins:
            return self._inner.step(actions, rows)
        obs, outcome = self._through(len(self._chain), actions, rows)
        cast(np.ndarray, self.obs)[rows] = obs
        return outcome

    def _inner_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the wrapped environments' observations of some rows; joined ones are [len(rows), n]."""
        inner = self._inner.obs
        if not self._joins:
            return np.asarray(np.array(inner)[rows])
        inputs = inner.values() if isinstance(inner, Mapping) else [inner]
        dtype = np.dtype(self._joined_type)
        return np.concatenate([value[rows].reshape(len(rows), -1).astype(dtype) for value in inputs], axis=1)

    def _through(self, depth: int, actions: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, Outcome]:
        """Step through the wrapper with that number: from the outside in, then back out."""
        if not depth:
            outcome = self._inner.step(actions, rows)
            obs = self._inner_rows(rows)
            if self._inner.restarted is not None and (lost := self._inner.restarted[rows]).any():
                for link in self._chain:
                    link.restart(rows[lost], obs[lost])
            return obs, outcome
        wrapper = self._chain[depth - 1]
        if isinstance(wrapper, FrameSkip):
            return self._repeated(wrapper.skip, depth - 1, actions, rows)
        inner_actions = wrapper.action(actions, rows)
        obs, outcome = self._through(depth - 1, inner_actions, rows)
        return wrapper.step(obs, actions, rows, outcome)

    def _repeated(
        self, skip: int, depth: int, actions: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, Outcome]:
        obs, (rewards, terminated, truncated) = self._through(depth, actions, rows)
        obs, rewards = np.array(obs), np.array(rewards)
        terminated, truncated = np.array(terminated), np.array(truncated)
        for _ in range(skip - 1):
            going = np.flatnonzero(~(terminated | truncated))
            if not len(going):
                break
            obs[going], (more, terminated[going], truncated[going]) = self._through(
                depth, actions, rows[going]
            )
            rewards[going] += more
        return obs, (rewards, terminated, truncated)


def _joins_inputs(spec: EnvSpec, wrappers: Iterable[WrapperSpec]) -> bool:
    """Return whether a wrapper joins the environment's inputs or axes to one row."""
    several = list(spec.shapes) != [OBS] or len(spec.shapes[OBS]) > 1
    return several and any(wrapper.title == FLATTENING for wrapper in wrappers)


def _join_inputs(spec: EnvSpec) -> EnvSpec:
    """Return the sizes and bounds of one row of all inputs, in the order of the space.

    gymnasium/spaces/utils.py, `flatten` and `flatten_space`.
    """
    dtype = np.result_type(*(dtype for _, _, dtype in spec.observation)).name
    known: dict[str, Bounds] = {}
    if spec.observation_bounds.keys() == spec.shapes.keys():
        lows, highs = zip(*(spec.observation_bounds[name] for name in spec.shapes), strict=True)
        low, high = (np.concatenate([np.ravel(end) for end in ends]) for ends in (lows, highs))
        known = {OBS: (low, high)}
    row = (OBS, (spec.obs_dim,), dtype)
    return replace(spec, observation=(row,), observation_bounds=known, one_hot={}, encoded={})


def split_game_wrappers(
    wrappers: Sequence[WrapperSpec],
) -> tuple[list[tuple[type[GameWrapper], dict[str, Any]]], list[WrapperSpec]]:
    """Return the wrappers of single Atari games with their arguments, and those of all rows at once.

    Raise UnsupportedError if the former are not the inner ones.
    """
    games: list[tuple[type[GameWrapper], dict[str, Any]]] = []
    outer: list[WrapperSpec] = []
    for wrapper in wrappers:
        kind = _PLAYED[wrapper.title][0] if wrapper.title in _PLAYED else None
        if kind is None or not issubclass(kind, GameWrapper):
            outer.append(wrapper)
        elif any(other.title in _PLAYED for other in outer):
            raise UnsupportedError(
                f"{wrapper.title} is supported only inside wrappers that are not Atari's",
                found=f"{wrapper.title} around {outer[-1].title}",
            )
        else:
            games.append((kind, wrapper_arguments(wrapper)))
    return games, outer


def wrap_environments(vector: VectorEnv, wrappers: Sequence[WrapperSpec]) -> VectorEnv:
    """Return the wrapped environments; close the inner ones if wrapping fails."""
    if not any(row.title in _PLAYED or row.title in REWARDS for row in wrappers) and not _joins_inputs(
        vector.spec, wrappers
    ):
        return vector
    try:
        return WrappedVector(vector, wrappers)
    except (UsageError, UnsupportedError):
        vector.close()
        raise


def format_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments formatted for display."""
    plain = {name: value for name, value in arguments.items() if not isinstance(value, list)}
    return f" ({', '.join(f'{name}={value}' for name, value in plain.items())})" if plain else ""
