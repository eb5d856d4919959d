"""MountainCarContinuous-v0 as a tensor program, with or without Gymnasium.

The arithmetic is that of gymnasium/envs/classic_control/continuous_mountain_car.py under NumPy 2, including
its types: a reset draws the position in float64, every step rounds position and velocity to float32, and the
slope below the car is a float64 cosine of a position in float32 (of one in float64 in the first step).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ckpttool.agents.envs import gym_draws
from ckpttool.agents.envs.gym_vector import describe, heard
from ckpttool.agents.envs.pendulum_alone import Box, Registered
from ckpttool.agents.envs.spec import Agreement, EnvSpec, deviation
from ckpttool.agents.envs.tensors import ENGINE, Tensors
from ckpttool.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

ID = "MountainCarContinuous-v0"
NOTE = f"gymnasium is not installed: {ID} has its constants and starts, as Gymnasium 1.4 states them"
POSITION_TOLERANCE: Final = 3e-7
"""Two of a float32's last bits: NumPy 1 rounds the steps of the arithmetic differently from NumPy 2."""
VELOCITY_TOLERANCE: Final = 2e-8
"""The same for velocities, which stay below 0.07."""
REWARD_TOLERANCE: Final = 1e-9
GRAVITY, STEEPNESS, GOAL_REWARD, EFFORT = 0.0025, 3, 100.0, 0.1
_COMPARED = 96


class Constants(NamedTuple):
    """The constants of the equations that Gymnasium's object holds."""

    min_action: float
    max_action: float
    min_position: float
    max_position: float
    max_speed: float
    goal_position: float
    goal_velocity: float
    power: float


class MountainCarAlone:
    """The environment without its steps, where Gymnasium is not installed."""

    spec = Registered(ID, 999)
    metadata: Mapping[str, Any] = MappingProxyType({"render_fps": 30})
    min_action, max_action, min_position, max_position = -1.0, 1.0, -1.2, 0.6
    max_speed, goal_position, goal_velocity, power = 0.07, 0.45, 0, 0.0015

    def __init__(self) -> None:
        low = np.array([self.min_position, -self.max_speed], np.float32)
        high = np.array([self.max_position, self.max_speed], np.float32)
        self.observation_space = Box(low, high)
        self.action_space = Box(np.array([-1], np.float32), np.array([1], np.float32))
        self.state = np.zeros(2)

    @property
    def unwrapped(self) -> MountainCarAlone:
        """Itself."""
        return self

    def reset(self, *, seed: int) -> None:
        """Draw the position in which the episode of that seed starts."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        self.state = np.array([generator.uniform(low=-0.6, high=-0.4), 0])

    def close(self) -> None:
        """Do nothing: nothing is open."""


class Steps(NamedTuple):
    """Single steps of Gymnasium's object, each from a state [2] by an action [1]."""

    states: np.ndarray
    first: np.ndarray
    """bool [n], whether the state is that of a reset, in float64"""
    actions: np.ndarray
    after: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray


class MountainCarTensors:
    """The state is the position (float64), the velocity and the pull of the slope (float32), [rows] each."""

    def __init__(self, make_one: Callable[[], Any]) -> None:
        """Raise UnsupportedError if the environment lacks a constant that these equations use."""
        self._notes: dict[str, None] = {}
        with heard(self._notes):
            self._one = make_one()
        try:
            self.spec: EnvSpec = describe(self._one)
            bare = self._one.unwrapped
            self.constants = Constants(*(getattr(bare, name) for name in Constants._fields))
        except AttributeError as error:
            self.close()
            raise UnsupportedError(
                f"this Gymnasium's {ID} is not the one that the {ENGINE} engine reproduces",
                found=f"no attribute {error.name!r}",
            ) from None
        except BaseException:
            self.close()
            raise
        if isinstance(self._one, MountainCarAlone):
            self._notes[NOTE] = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of Gymnasium, each once."""
        return tuple(self._notes)

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with Gymnasium's; None where that is not installed."""
        import torch

        if (steps := self._reference()) is None:
            return None
        state = tuple(torch.from_numpy(each).to(device) for each in _state(steps.states, steps.first))
        after, rewards, terminated = self.step(state, torch.from_numpy(steps.actions).to(device))
        seen = self.observe(after).cpu().numpy()
        return Agreement(
            len(steps.states),
            (
                deviation("positions", seen[:, 0], steps.after[:, 0], POSITION_TOLERANCE),
                deviation("velocities", seen[:, 1], steps.after[:, 1], VELOCITY_TOLERANCE),
                deviation("rewards", rewards.cpu().numpy(), steps.rewards, REWARD_TOLERANCE),
                deviation("terminations", terminated.cpu().numpy(), steps.terminated, 0.0),
            ),
        )

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the states in which Gymnasium's own generators start the episodes of these seeds."""

        def draw(seed: int) -> np.ndarray:
            self._one.reset(seed=seed)
            return np.array(self._one.unwrapped.state[:1], np.float64)

        positions = gym_draws.starts(seeds, np.array([-0.6]), np.array([-0.4]), draw)
        states = np.concatenate([positions, np.zeros_like(positions)], axis=1)
        return _state(states, np.ones(len(seeds), np.bool_))

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return position and velocity: float32 [rows, 2]."""
        position, velocity, _ = state
        seen = velocity.new_empty(len(velocity), 2)
        seen[:, 0], seen[:, 1] = position, velocity
        return seen

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """Return the next state, the rewards, and which cars have reached the goal."""
        (position, velocity, pull), of = state, self.constants
        force = actions[:, 0]
        # Separate products and sums: fused ones would round once where Gymnasium rounds twice.
        push = force.clamp(of.min_action, of.max_action) * of.power
        velocity = (velocity + (push - pull)).clamp(-of.max_speed, of.max_speed)
        # The sum of two float32 is exact enough in float64 to round to what float32 gives.
        reached = (position + velocity).float().clamp(of.min_position, of.max_position)
        velocity = velocity.masked_fill((reached == of.min_position) & (velocity < 0), 0.0)
        terminated = (reached >= of.goal_position) & (velocity >= of.goal_velocity)
        rewards = terminated * GOAL_REWARD - force.double().square() * EFFORT
        slope = (reached * STEEPNESS).double().cos() * GRAVITY
        return (reached.double(), velocity, slope.float()), rewards, terminated

    def close(self) -> None:
        """Close the one environment."""
        self._one.close()

    def _reference(self) -> Steps | None:
        """Return steps of Gymnasium's own object from many states; None where Gymnasium is not installed."""
        if isinstance(self._one, MountainCarAlone):
            return None
        random, of = np.random.default_rng(0), self.constants
        low, high = (of.min_position, -of.max_speed), (of.max_position, of.max_speed)
        states = random.uniform(low, high, (_COMPARED, 2))
        actions = random.uniform(of.min_action, of.max_action, (_COMPARED, 1))
        # Both walls at both speeds, and the goal's edge, with full force either way.
        states[:8] = [
            (p, v) for p in (of.min_position, of.max_position) for v in (low[1], -1e-4, 1e-4, high[1])
        ]
        states[8:16, 0], states[8:16, 1] = of.goal_position - 0.01, np.linspace(0.005, high[1], 8)
        actions[:16, 0] = np.tile([of.min_action, of.max_action], 8)
        first = np.zeros(_COMPARED, np.bool_)
        first[16:32], states[16:32, 0], states[16:32, 1] = True, random.uniform(-0.6, -0.4, 16), 0.0
        actions = actions.astype(self.spec.action_low.dtype)
        bare, after, rewards, ended = self._one.unwrapped, np.empty((_COMPARED, 2), np.float32), [], []
        limit = self.spec.max_episode_steps or _COMPARED
        for number, (state, is_first, action) in enumerate(zip(states, first, actions, strict=True)):
            if number % min(_COMPARED, limit) == 0:
                self._one.reset(seed=0)
            bare.state = state.copy() if is_first else state.astype(np.float32)
            after[number], reward, terminated, _, _ = self._one.step(action)
            rewards.append(reward)
            ended.append(terminated)
        return Steps(states, first, actions, after, np.array(rewards, np.float64), np.array(ended))


def _state(states: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return states [n, 2] as the arrays of the program; `first` [n] marks those of a reset, in float64."""
    rounded = states[:, 0].astype(np.float32)
    position = np.where(first, states[:, 0], rounded)
    # A position in float32 is multiplied in float32.
    angles = np.where(first, STEEPNESS * position, (STEEPNESS * rounded).astype(np.float64))
    # The C library's cosine, as math.cos in Gymnasium.
    slope = np.array([math.cos(angle) * GRAVITY for angle in angles.tolist()])
    return position, states[:, 1].astype(np.float32), slope.astype(np.float32)
