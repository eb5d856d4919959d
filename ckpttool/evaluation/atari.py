"""Preprocess Atari games one environment at a time, inside the wrappers of vector environments.

Sources: stable_baselines3/common/atari_wrappers.py (all classes of the same names; AtariWrapper has their
order); CleanRL's scripts (dqn_atari.py, `make_env`) use the same classes from cleanrl_utils/atari_wrappers.py
and gymnasium 0.28's wrappers/resize_observation.py and gray_scale_observation.py. A lost life does not end an
episode, and rewards are the game's own, those of the reset's steps included: the library's Monitor, inside
all of these, sums the same.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from ckpttool.core.errors import MissingExtraError, UnsupportedError, UsageError

HINT = "pip install 'ckpttool[atari]'"
SIDE = 84
"""height and width of the images in Mnih et al. 2015, the default of every library"""


class GameWrapper:
    """Wrapper around one environment with Gymnasium's functions; the base class changes nothing."""

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
        """Return the space of images of this shape."""
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
    """Sum the game's rewards since its reset, until they are read."""

    total = 0.0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start at zero."""
        self.total = 0.0
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
        reward, self._rewards.total = self._rewards.total, 0.0
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
        if noop_max < 1 or self._actions()[0] != "NOOP":
            raise UsageError("NoopResetEnv requires a positive noop_max and a game whose action 0 is NOOP")
        self._most = noop_max

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode and wait."""
        self.env.reset(**options)
        obs, info = np.zeros(0), {}
        for _ in range(int(self.env.unwrapped.np_random.integers(1, self._most + 1))):
            obs, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
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
            if terminated or truncated:
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
            if terminated or truncated:
                self.env.reset(**options)
        return obs, info


class WarpFrame(GameWrapper):
    """Turn images to grey and then resize them: uint8 [height, width, 1]."""

    def __init__(self, env: Any, width: int = SIDE, height: int = SIDE) -> None:
        super().__init__(env)
        self._size = width, height
        self.observation_space = self._bytes_of_shape(height, width, 1)

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the grey image."""
        cv2 = _import_opencv()
        grey = cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY)
        return np.asarray(cv2.resize(grey, self._size, interpolation=cv2.INTER_AREA))[:, :, None]


class ResizeObservation(GameWrapper):
    """Resize images: uint8 [height, width, channels]."""

    def __init__(self, env: Any, shape: int | Sequence[int]) -> None:
        super().__init__(env)
        height, width = (shape, shape) if isinstance(shape, int) else shape
        self._size = width, height
        self.observation_space = self._bytes_of_shape(height, width, *env.observation_space.shape[2:])

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the resized image."""
        cv2 = _import_opencv()
        resized = cv2.resize(obs, self._size, interpolation=cv2.INTER_AREA)
        return np.asarray(resized).reshape(self.observation_space.shape)


class GrayScaleObservation(GameWrapper):
    """Turn images to grey: uint8 [height, width], or with `keep_dim` [height, width, 1]."""

    def __init__(self, env: Any, *, keep_dim: bool = False) -> None:
        super().__init__(env)
        more = (1,) if keep_dim else ()
        self.observation_space = self._bytes_of_shape(*env.observation_space.shape[:2], *more)

    def image(self, obs: np.ndarray) -> np.ndarray:
        """Return the grey image."""
        cv2 = _import_opencv()
        return np.asarray(cv2.cvtColor(obs, cv2.COLOR_RGB2GRAY)).reshape(self.observation_space.shape)


class AtariWrapper(GameWrapper):
    """Apply Stable-Baselines3's chain; `terminal_on_life_loss` and `clip_reward` only affect training."""

    def __init__(
        self,
        env: Any,
        noop_max: int = 30,
        frame_skip: int = 4,
        screen_size: int = SIDE,
        *,
        terminal_on_life_loss: bool = True,  # noqa: ARG002
        clip_reward: bool = True,  # noqa: ARG002
        action_repeat_probability: float = 0.0,
    ) -> None:
        if action_repeat_probability > 0:
            env = StickyActionEnv(env, action_repeat_probability)
        if noop_max > 0:
            env = NoopResetEnv(env, noop_max)
        if frame_skip > 1:
            env = MaxAndSkipEnv(env, frame_skip)
        super().__init__(WarpFrame(FireResetEnv(env), screen_size, screen_size))


def wrap_game(env: Any, wrappers: Sequence[tuple[type[GameWrapper], dict[str, Any]]]) -> Any:
    """Return one environment inside these wrappers, with their arguments, the innermost first."""
    if not wrappers:
        return env
    _import_opencv()  # before a game starts
    rewards = wrapped = _RewardSum(env)
    for kind, arguments in wrappers:
        wrapped = kind(wrapped, **arguments)  # type: ignore[assignment]
    return _OwnRewards(wrapped, rewards)


def _import_opencv() -> Any:
    if importlib.util.find_spec("cv2") is None:
        raise MissingExtraError("the preprocessing of Atari games needs OpenCV", hint=HINT)
    return importlib.import_module("cv2")


# Atari games in Gymnasium's registry.

_ENTRY_POINT = "ale_py.env:AtariEnv"


def is_installed() -> bool:
    """Return whether the library of the games is installed, without importing it."""
    return importlib.util.find_spec("ale_py") is not None


def may_be_game(env_id: str) -> bool:
    """Return whether an id has a form that only Atari games have."""
    return env_id.startswith("ALE/") or "NoFrameskip-v" in env_id


def register_games(env_id: str, registry: Collection[str]) -> None:
    """Add the games to Gymnasium's registry for an id that it lacks, without the library's banner."""
    if env_id not in registry and ":" not in env_id and is_installed():
        library = importlib.import_module("ale_py")
        library.ALEInterface.setLoggerMode(library.LoggerMode.Error)


def read_frame_skip(spec: Any) -> int | Sequence[int] | None:
    """Return the frames per action of a game in the registry, None for other environments."""
    if spec is None or spec.entry_point != _ENTRY_POINT:
        return None
    found: int | Sequence[int] = spec.kwargs.get("frameskip", 1)
    return found
