"""Run fast engines: Pendulum and MountainCar in arrays and tensors, MuJoCo in batches."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError
from ckpttool.evaluation.gymnasium_engine import (
    Agreement,
    EnvSpec,
    Outcome,
    collect_warnings,
    describe_env,
    draw_starts,
    measure_deviation,
    redirect_mujoco_warnings,
)
from ckpttool.evaluation.simulators import DEVICE_ENGINE, Tensors

if TYPE_CHECKING:
    import torch


# Tasks without Gymnasium: everything in an environment except its steps.
#
# The bundled agents play with the core installation alone. Sources: gymnasium/envs/classic_control
# (constants, spaces, `reset`), gymnasium/envs/__init__.py (step limits) and gymnasium/utils/seeding.py
# (`np_random`).


class Box(NamedTuple):
    """Bounds of observations or actions: float32 [n] each."""

    low: np.ndarray
    high: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one value."""
        return self.low.shape

    @property
    def dtype(self) -> np.dtype:
        """Return the type of the values."""
        return self.low.dtype


class EnvRegistration(NamedTuple):
    """Entry of Gymnasium's registry."""

    id: str
    max_episode_steps: int
    kwargs: Mapping[str, Any] = MappingProxyType({})


class StandaloneEnvironment:
    """Task without steps, which an engine computes; draws the start states of episodes."""

    spec: EnvRegistration
    observation_space: Box
    action_space: Box
    metadata: Mapping[str, Any] = MappingProxyType({"render_fps": 30})

    def __init__(self) -> None:
        self.state = np.zeros(2)

    @property
    def unwrapped(self) -> StandaloneEnvironment:
        """Return the environment itself."""
        return self

    @property
    def note(self) -> str:
        """Return a note on the source of the constants."""
        known = "uses built-in constants and start states, as defined by Gymnasium 1.4"
        return f"gymnasium is not installed: {self.spec.id} {known}"

    def reset(self, *, seed: int) -> None:
        """Draw the start state [2] of the episode with that seed."""
        self.state = self.draw(np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))))

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Return a start state [2]."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: no resources are open."""


def _make_box(low: Sequence[float], high: Sequence[float]) -> Box:
    return Box(np.array(low, np.float32), np.array(high, np.float32))


def _missing_constant(env_id: str, engine: str, error: AttributeError) -> UnsupportedError:
    return UnsupportedError(
        f"the installed Gymnasium's {env_id} differs from the version that the {engine} engine reproduces",
        found=f"no attribute {error.name!r}",
    )


# Pendulum-v1 for many rows at once in arrays, with Gymnasium's arithmetic.
#
# The equations follow gymnasium/envs/classic_control/pendulum.py operation by operation, so that an episode
# is the same with every engine. Each instance compares single steps from many states with the environment
# that it replaces, which detects a changed library version.

PENDULUM_ID = "Pendulum-v1"
PENDULUM_ENGINE = "pendulum.batch"
STATE_TOLERANCE: Final = 1e-12
PENDULUM_OBSERVATION_TOLERANCE: Final = 1e-6
"""A few units in the last place of a float32: observations are rounded to it."""
REWARD_TOLERANCE: Final = 1e-9
"""Bound of the rounding error of the reward's torque term, which is computed in float32."""
_PENDULUM_COMPARED = 64


class StandalonePendulum(StandaloneEnvironment):
    """Pendulum-v1, for PendulumBatch."""

    spec = EnvRegistration(PENDULUM_ID, 200)
    g, m, l, dt, max_speed, max_torque = 10.0, 1.0, 1.0, 0.05, 8, 2.0  # noqa: E741  # Gymnasium's names
    observation_space = _make_box([-1.0, -1.0, -8.0], [1.0, 1.0, 8.0])
    action_space = _make_box([-2.0], [2.0])

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Return an angle and an angular velocity."""
        most = np.array([np.pi, 1.0])
        return generator.uniform(low=-most, high=most)


class PendulumConstants(NamedTuple):
    """Constants of the equations: gravity and torque factors, the time step and the bounds."""

    pull: float
    push: float
    dt: float
    max_speed: float
    max_torque: float


class PendulumSteps(NamedTuple):
    """Single reference steps: `states` [n, 2], `actions` [n, 1] and their results."""

    states: np.ndarray
    actions: np.ndarray
    after: np.ndarray
    """float64 [n, 2], angles and angular velocities"""
    observations: np.ndarray
    rewards: np.ndarray

    def agreement(self, after: np.ndarray, observations: np.ndarray, rewards: np.ndarray) -> Agreement:
        """Compare an engine's results for the same steps."""
        return Agreement(
            len(self.states),
            (
                measure_deviation("states", after, self.after, STATE_TOLERANCE),
                measure_deviation(
                    "observations", observations, self.observations, PENDULUM_OBSERVATION_TOLERANCE
                ),
                measure_deviation("rewards", rewards, self.rewards, REWARD_TOLERANCE),
            ),
        )


class PendulumBatch:
    """Rows' angles and velocities as two arrays; one Gymnasium environment draws start states.

    Without Gymnasium, StandalonePendulum draws them.
    """

    engine = PENDULUM_ENGINE

    def __init__(
        self, make_one: Callable[[], Any], num_envs: int = 1, *, engine: str = PENDULUM_ENGINE
    ) -> None:
        """Raise UnsupportedError if the environment does not match these Pendulum equations."""
        if num_envs < 1:
            raise UsageError(f"number of environments must be at least 1, not {num_envs}")
        self.engine = engine
        self._notes: dict[str, None] = {}
        with collect_warnings(self._notes):
            self._one = make_one()
        self.spec: EnvSpec = describe_env(self._one)
        self.num_envs = num_envs
        self._limit = self.spec.max_episode_steps or np.inf
        self.obs: np.ndarray = np.zeros((num_envs, 3), np.float32)
        self._angle, self._speed = np.zeros(num_envs), np.zeros(num_envs)
        self._length = np.zeros(num_envs, np.int64)
        self.agreement: Agreement | None = None
        try:
            self.law = _read_pendulum_constants(self._one.unwrapped, engine)
            if isinstance(self._one, StandaloneEnvironment):
                self._notes[self._one.note] = None
            if (steps := self.reference()) is not None:
                self.agreement = self._compare(steps).require(self.spec.id, engine)
        except BaseException:
            self.close()
            raise

    @property
    def notes(self) -> tuple[str, ...]:
        """Return Gymnasium's warnings, each once."""
        return tuple(self._notes)

    def starts(self, seeds: np.ndarray) -> np.ndarray:
        """Return the start angle and velocity of the episode of each seed: [len(seeds), 2]."""

        def draw(seed: int) -> np.ndarray:
            self._one.reset(seed=seed)
            return np.array(self._one.unwrapped.state, np.float64)

        most = np.array([np.pi, 1.0])
        return draw_starts(seeds, -most, most, draw)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i]; rows with the same seed share the draw."""
        self._angle[rows], self._speed[rows] = self.starts(seeds).T
        self._length[rows] = 0
        self._see(rows)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return rewards, terminated and truncated, each [len(rows)]."""
        # Whole arrays need no index, and most steps advance every row.
        at = slice(None) if len(rows) == self.num_envs else rows
        angle, speed, costs = _advance_pendulum(self.law, self._angle[at], self._speed[at], actions[at, 0])
        self._angle[at], self._speed[at] = angle, speed
        self._length[at] += 1
        self._see(at)
        return -costs, np.zeros(len(rows), np.bool_), self._length[at] >= self._limit

    def frame(self, row: int) -> np.ndarray:  # noqa: ARG002 - the protocol's
        """Raise UnsupportedError: the rows of an array cannot render."""
        raise UnsupportedError(
            f"the {self.engine} engine cannot render", hint="to render, use --engine gymnasium"
        )

    def close(self) -> None:
        """Close the one environment."""
        self._one.close()

    def __enter__(self) -> PendulumBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, at: np.ndarray | slice) -> None:
        angle = self._angle[at]
        self.obs[at, 0], self.obs[at, 1], self.obs[at, 2] = np.cos(angle), np.sin(angle), self._speed[at]

    def reference(self) -> PendulumSteps | None:
        """Return reference steps of Gymnasium's object from many states; None without Gymnasium."""
        if isinstance(self._one, StandaloneEnvironment):
            return None
        random = np.random.default_rng(0)
        # Several turns, all velocities, and torques beyond the bounds.
        states = random.uniform((-4 * np.pi, -1.0), (4 * np.pi, 1.0), (_PENDULUM_COMPARED, 2))
        states[:, 1] *= self.law.max_speed
        actions = random.uniform(-1.5, 1.5, (_PENDULUM_COMPARED, 1)) * self.law.max_torque
        # Corner cases: upright and hanging, at rest and at full velocity, with full torque either way.
        states[:8] = [(angle, speed * self.law.max_speed) for angle in (0, np.pi) for speed in (-1, 0, 0, 1)]
        actions[:8, 0] = np.array([-1, -1, 0, 1] * 2) * self.law.max_torque
        actions = actions.astype(self.spec.action_low.dtype)
        bare, after, seen, rewards = self._one.unwrapped, np.empty_like(states), [], []
        for number, (state, action) in enumerate(zip(states, actions, strict=True)):
            if number % min(_PENDULUM_COMPARED, self._limit) == 0:
                self._one.reset(seed=0)
            bare.state = state.copy()
            observation, reward, terminated, _, _ = self._one.step(action)
            # Pendulum never terminates: an environment that does is another task.
            after[number] = np.nan if terminated else bare.state
            seen.append(observation)
            rewards.append(reward)
        return PendulumSteps(states, actions, after, np.array(seen), np.array(rewards))

    def _compare(self, steps: PendulumSteps) -> Agreement:
        """Run the same steps as one batch."""
        before = steps.states
        angle, speed, costs = _advance_pendulum(self.law, before[:, 0], before[:, 1], steps.actions[:, 0])
        seen = np.stack([np.cos(angle), np.sin(angle), speed], 1).astype(np.float32)
        return steps.agreement(np.stack([angle, speed], 1), seen, -costs)


def _read_pendulum_constants(bare: Any, engine: str) -> PendulumConstants:
    """Return the constants of Gymnasium's object; raise UnsupportedError if they differ."""
    try:
        pull, push = 3 * bare.g / (2 * bare.l), 3.0 / (bare.m * bare.l**2)
        return PendulumConstants(pull, push, bare.dt, bare.max_speed, bare.max_torque)
    except AttributeError as error:
        raise _missing_constant(PENDULUM_ID, engine, error) from None


def _advance_pendulum(
    law: PendulumConstants, angle: np.ndarray, speed: np.ndarray, action: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the angles and velocities after a step, and its costs, each [rows]."""
    torque = np.clip(action, -law.max_torque, law.max_torque)
    upright = ((angle + np.pi) % (2 * np.pi)) - np.pi
    costs = _square_by_pow(upright) + 0.1 * _square_by_pow(speed) + 0.001 * _square_by_pow(torque)
    faster = speed + (law.pull * np.sin(angle) + law.push * torque) * law.dt
    faster = np.clip(faster, -law.max_speed, law.max_speed)
    return angle + faster * law.dt, faster, costs


def _square_by_pow(values: np.ndarray) -> np.ndarray:
    """Return the squares [n] as computed by the C library's `pow`.

    Gymnasium squares NumPy scalars, which call `pow`. On an array, `** 2` and `np.square` multiply, and
    `np.power` calls vector code on processors with AVX-512: the last bits differ in a few of a thousand
    cases. `np.float_power` calls `pow` on every processor, for float64 alone.
    """
    squares: np.ndarray = (
        np.float_power(values, 2.0)
        if values.dtype == np.float64
        else np.fromiter((value**2 for value in values), values.dtype, len(values))
    )
    return squares


# Pendulum-v1 as a tensor program: the arithmetic of gymnasium/envs/classic_control/pendulum.py in float64.
#
# It matches Gymnasium within rounding: a tensor library's sine and cosine differ from NumPy's in the last
# bit, and it squares by multiplication where Gymnasium calls the C library's pow. The error is measured on
# each device.


class PendulumTensors:
    """Angles and velocities, float64 [rows]; start states, constants and reference are PendulumBatch's."""

    def __init__(self, make_one: Callable[[], Any]) -> None:
        """Raise UnsupportedError if the environment does not match these Pendulum equations."""
        self._arrays = PendulumBatch(make_one, engine=DEVICE_ENGINE)
        self.spec = self._arrays.spec
        self._law = self._arrays.law

    @property
    def notes(self) -> tuple[str, ...]:
        """Return Gymnasium's warnings, each once."""
        return self._arrays.notes

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with Gymnasium's; None without Gymnasium."""
        import torch

        if (steps := self._arrays.reference()) is None:
            return None
        state = tuple(torch.from_numpy(column.copy()).to(device) for column in steps.states.T)
        after, rewards, _ = self.step(state, torch.from_numpy(steps.actions).to(device))
        found = (torch.stack(after, 1), self.observe(after), rewards)
        return steps.agreement(*(tensor.cpu().numpy() for tensor in found))

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the start angles and velocities, drawn by Gymnasium's own generators."""
        return tuple(np.ascontiguousarray(column) for column in self._arrays.starts(seeds).T)

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return cosine, sine and angular velocity: float32 [rows, 3]."""
        import torch

        angle, speed = state
        seen = angle.new_empty(len(angle), 3, dtype=torch.float32)
        # On a GPU each of these is one kernel that computes in float64 and rounds its output.
        torch.cos(angle, out=seen[:, 0])
        torch.sin(angle, out=seen[:, 1])
        seen[:, 2] = speed
        return seen

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, None]:
        """Return the next angles and velocities, and the rewards; no episode terminates."""
        (angle, speed), law = state, self._law
        torque = actions[:, 0].clamp(-law.max_torque, law.max_torque)
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        costs = upright.square().addcmul(speed, speed, value=0.1) + 0.001 * torque.square()
        # Gymnasium computes the torque's product in float32; the others may be fused with their sums.
        faster = speed.add(angle.sin(), alpha=law.pull * law.dt).add(law.push * torque, alpha=law.dt)
        faster = faster.clamp(-law.max_speed, law.max_speed)
        return (angle.add(faster, alpha=law.dt), faster), -costs, None

    def close(self) -> None:
        """Close the one environment."""
        self._arrays.close()


# MountainCarContinuous-v0 as a tensor program, with or without Gymnasium.
#
# It follows gymnasium/envs/classic_control/continuous_mountain_car.py under NumPy 2, including the types: a
# reset draws the position in float64, every step rounds position and velocity to float32, and the slope term
# is a float64 cosine of a float32 position (float64 in the first step).

MOUNTAIN_CAR_ID = "MountainCarContinuous-v0"
POSITION_TOLERANCE: Final = 3e-7
"""Two units in the last place of a float32: NumPy 1 rounds the arithmetic differently from NumPy 2."""
VELOCITY_TOLERANCE: Final = 2e-8
"""Tolerance of velocities, which stay below 0.07."""
GRAVITY, STEEPNESS, GOAL_REWARD, EFFORT = 0.0025, 3, 100.0, 0.1
_MOUNTAIN_CAR_COMPARED = 96


class MountainCarConstants(NamedTuple):
    """Constants of the equations, read from Gymnasium's object."""

    min_action: float
    max_action: float
    min_position: float
    max_position: float
    max_speed: float
    goal_position: float
    goal_velocity: float
    power: float


class StandaloneMountainCar(StandaloneEnvironment):
    """MountainCarContinuous-v0, for MountainCarTensors."""

    spec = EnvRegistration(MOUNTAIN_CAR_ID, 999)
    min_action, max_action, min_position, max_position = -1.0, 1.0, -1.2, 0.6
    max_speed, goal_position, goal_velocity, power = 0.07, 0.45, 0, 0.0015
    observation_space = _make_box([-1.2, -0.07], [0.6, 0.07])
    action_space = _make_box([-1.0], [1.0])

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Return a position and zero velocity."""
        return np.array([generator.uniform(low=-0.6, high=-0.4), 0])


class MountainCarSteps(NamedTuple):
    """Single steps of Gymnasium's object, each from a state [2] by an action [1]."""

    states: np.ndarray
    first: np.ndarray
    """bool [n], whether the state comes from a reset, in float64"""
    actions: np.ndarray
    after: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray


class MountainCarTensors:
    """State: position (float64), velocity and slope term (float32), [rows] each."""

    def __init__(self, make_one: Callable[[], Any]) -> None:
        """Raise UnsupportedError if the environment lacks a constant of these equations."""
        self._notes: dict[str, None] = {}
        with collect_warnings(self._notes):
            self._one = make_one()
        try:
            self.spec: EnvSpec = describe_env(self._one)
            bare = self._one.unwrapped
            self.constants = MountainCarConstants(
                *(getattr(bare, name) for name in MountainCarConstants._fields)
            )
        except AttributeError as error:
            self.close()
            raise _missing_constant(MOUNTAIN_CAR_ID, DEVICE_ENGINE, error) from None
        except BaseException:
            self.close()
            raise
        if isinstance(self._one, StandaloneEnvironment):
            self._notes[self._one.note] = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return Gymnasium's warnings, each once."""
        return tuple(self._notes)

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with Gymnasium's; None without Gymnasium."""
        import torch

        if (steps := self._reference()) is None:
            return None
        state = tuple(
            torch.from_numpy(each).to(device) for each in _mountain_car_arrays(steps.states, steps.first)
        )
        after, rewards, terminated = self.step(state, torch.from_numpy(steps.actions).to(device))
        seen = self.observe(after).cpu().numpy()
        return Agreement(
            len(steps.states),
            (
                measure_deviation("positions", seen[:, 0], steps.after[:, 0], POSITION_TOLERANCE),
                measure_deviation("velocities", seen[:, 1], steps.after[:, 1], VELOCITY_TOLERANCE),
                measure_deviation("rewards", rewards.cpu().numpy(), steps.rewards, REWARD_TOLERANCE),
                measure_deviation("terminations", terminated.cpu().numpy(), steps.terminated, 0.0),
            ),
        )

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the start states of these seeds' episodes, drawn by Gymnasium's own generators."""

        def draw(seed: int) -> np.ndarray:
            self._one.reset(seed=seed)
            return np.array(self._one.unwrapped.state[:1], np.float64)

        positions = draw_starts(seeds, np.array([-0.6]), np.array([-0.4]), draw)
        states = np.concatenate([positions, np.zeros_like(positions)], axis=1)
        return _mountain_car_arrays(states, np.ones(len(seeds), np.bool_))

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
        # The float64 sum of two float32 is exact enough to round to the float32 result.
        reached = (position + velocity).float().clamp(of.min_position, of.max_position)
        velocity = velocity.masked_fill((reached == of.min_position) & (velocity < 0), 0.0)
        terminated = (reached >= of.goal_position) & (velocity >= of.goal_velocity)
        rewards = terminated * GOAL_REWARD - force.double().square() * EFFORT
        slope = (reached * STEEPNESS).double().cos() * GRAVITY
        return (reached.double(), velocity, slope.float()), rewards, terminated

    def close(self) -> None:
        """Close the one environment."""
        self._one.close()

    def _reference(self) -> MountainCarSteps | None:
        """Return reference steps of Gymnasium's object from many states; None without Gymnasium."""
        if isinstance(self._one, StandaloneEnvironment):
            return None
        random, of = np.random.default_rng(0), self.constants
        low, high = (of.min_position, -of.max_speed), (of.max_position, of.max_speed)
        states = random.uniform(low, high, (_MOUNTAIN_CAR_COMPARED, 2))
        actions = random.uniform(of.min_action, of.max_action, (_MOUNTAIN_CAR_COMPARED, 1))
        # Both walls at full velocity either way, and the edge of the goal, with full force either way.
        states[:8] = [
            (p, v) for p in (of.min_position, of.max_position) for v in (low[1], -1e-4, 1e-4, high[1])
        ]
        states[8:16, 0], states[8:16, 1] = of.goal_position - 0.01, np.linspace(0.005, high[1], 8)
        actions[:16, 0] = np.tile([of.min_action, of.max_action], 8)
        first = np.zeros(_MOUNTAIN_CAR_COMPARED, np.bool_)
        first[16:32], states[16:32, 0], states[16:32, 1] = True, random.uniform(-0.6, -0.4, 16), 0.0
        actions = actions.astype(self.spec.action_low.dtype)
        bare, after = self._one.unwrapped, np.empty((_MOUNTAIN_CAR_COMPARED, 2), np.float32)
        rewards, ended = [], []
        limit = self.spec.max_episode_steps or _MOUNTAIN_CAR_COMPARED
        for number, (state, is_first, action) in enumerate(zip(states, first, actions, strict=True)):
            if number % min(_MOUNTAIN_CAR_COMPARED, limit) == 0:
                self._one.reset(seed=0)
            bare.state = state.copy() if is_first else state.astype(np.float32)
            after[number], reward, terminated, _, _ = self._one.step(action)
            rewards.append(reward)
            ended.append(terminated)
        return MountainCarSteps(states, first, actions, after, np.array(rewards, np.float64), np.array(ended))


def _mountain_car_arrays(states: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return states [n, 2] as the program's arrays; `first` [n] marks reset states, in float64."""
    rounded = states[:, 0].astype(np.float32)
    position = np.where(first, states[:, 0], rounded)
    # A float32 position is multiplied in float32.
    angles = np.where(first, STEEPNESS * position, (STEEPNESS * rounded).astype(np.float64))
    # Use the C library's cosine, as Gymnasium does through math.cos.
    slope = np.array([math.cos(angle) * GRAVITY for angle in angles.tolist()])
    return position, states[:, 1].astype(np.float32), slope.astype(np.float32)


# Rules of the MuJoCo tasks: observations, rewards and episode ends, for all rows at once.
#
# Every rule follows Gymnasium's arithmetic (`gymnasium/envs/mujoco/*_v4.py`, `*_v5.py`) in the same order and
# types, so that results are equal to the last bit: actions and costs computed from them alone are float32;
# sums run along contiguous rows, which numpy adds like a single array.

Fields = Mapping[str, np.ndarray]
"""MjData's fields by name, each [n, ...] float64: qpos, qvel, ctrl and the task's own."""

Judged = tuple[np.ndarray, np.ndarray]
"""Rewards (float64 or narrower) and terminated (bool), each [n]."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskRules:
    """One task's rules; `before` is state from before a step that `judge` needs, [n].

    `fields` are the derived ones that the rules read. `contacts` means that they read `cfrc_ext`, which
    MuJoCo computes only on request (`mj_rnePostConstraint`).
    """

    observe: Callable[[Fields], tuple[np.ndarray, ...]]
    """the parts of the observations, each [n, ...], in order"""
    judge: Callable[[Fields, np.ndarray, np.ndarray], Judged]
    """from the fields after a step, the value of `before`, and the actions [n, nu]"""
    before: Callable[[Fields], np.ndarray] = lambda f: f["qpos"][:, 0].copy()
    """for most tasks: the position along x"""
    fields: tuple[str, ...] = ()
    contacts: bool = False


def squared_effort(actions: np.ndarray) -> np.ndarray:
    """Return the sum of the squared actions [n], in the actions' own type."""
    total: np.ndarray = np.add.reduce(np.square(actions, order="C"), axis=1)
    return total


def never_terminated(f: Fields) -> np.ndarray:
    """Return terminated [n] of a task that ends only by its time limit."""
    return np.zeros(len(f["qpos"]), np.bool_)


def observed_positions(env: Any, skipped: int) -> Callable[[Fields], np.ndarray]:
    """Return a function that selects the observed part of qpos: no root position unless `env` shows it."""
    start = skipped if env._exclude_current_positions_from_observation else 0
    return lambda f: f["qpos"][:, start:]


def survival_reward(env: Any, version: int) -> Callable[[np.ndarray], Judged]:
    """Return a function from `healthy` [n] to its reward and terminated.

    Version 4 also pays the reward in the last step if being unhealthy ends the episode.
    """
    worth, ends = env._healthy_reward, bool(env._terminate_when_unhealthy)

    def judged(healthy: np.ndarray) -> Judged:
        paid = np.ones_like(healthy) if version == 4 and ends else healthy
        return paid * float(worth), ~healthy if ends else np.zeros_like(healthy)

    return judged


def is_between(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Return whether values lie strictly between two limits."""
    least, most = limits
    inside: np.ndarray = (values > least) & (values < most)
    return inside


# Rules of the balancing and reaching tasks.

MOST_ANGLE = 0.2
MOST_SEEN = 10
LEAST_HEIGHT = 1


def inverted_pendulum(_env: Any, version: int) -> TaskRules:
    """Return the rules of `inverted_pendulum_v4.py` or `_v5.py`: version 4 also rewards the last step."""

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        return f["qpos"], f["qvel"]

    def judge(f: Fields, _before: np.ndarray, _actions: np.ndarray) -> Judged:
        finite = np.isfinite(f["qpos"]).all(axis=1) & np.isfinite(f["qvel"]).all(axis=1)
        fallen = ~finite | (np.abs(f["qpos"][:, 1]) > MOST_ANGLE)
        return np.ones(len(fallen)) if version == 4 else ~fallen, fallen

    return TaskRules(observe, judge)


def inverted_double_pendulum(env: Any, version: int) -> TaskRules:
    """Return the rules of `inverted_double_pendulum_v4.py` or `_v5.py`.

    Version 4 also rewards the last step, and shows the hinges' constraint forces, which are zero.
    """
    worth = env._healthy_reward if version > 4 else 10
    forces = 1 if version > 4 else None

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        angles = np.ascontiguousarray(f["qpos"][:, 1:])
        speeds = np.clip(f["qvel"], -MOST_SEEN, MOST_SEEN)
        pushed = np.clip(f["qfrc_constraint"][:, :forces], -MOST_SEEN, MOST_SEEN)
        return f["qpos"][:, :1], np.sin(angles), np.cos(angles), speeds, pushed

    def judge(f: Fields, _before: np.ndarray, _actions: np.ndarray) -> Judged:
        # The C library's pow, as for one environment's scalars: ** 2 on an array multiplies and differs in
        # the last bit of one value in a thousand.
        x, y = f["site_xpos"][:, 0, 0], f["site_xpos"][:, 0, 2]
        fallen = y <= LEAST_HEIGHT
        far = 0.01 * np.float_power(x, 2) + np.float_power(y - 2, 2)
        fast = np.float_power(f["qvel"][:, 1:3], 2)
        alive = worth * ~fallen if version > 4 else worth
        return alive - far - (1e-3 * fast[:, 0] + 5e-3 * fast[:, 1]), fallen

    return TaskRules(observe, judge, fields=("site_xpos", "qfrc_constraint"))


def reacher(env: Any, version: int) -> TaskRules:
    """Return the rules of `reacher_v4.py` or `_v5.py`: version 4 uses the distance before the step."""
    tip, target = (env.data.body(name).id for name in ("fingertip", "target"))
    near = env._reward_dist_weight if version > 4 else 1
    tiring = env._reward_control_weight if version > 4 else 1
    axes = 2 if version > 4 else 3

    def apart(f: Fields) -> np.ndarray:
        return f["xpos"][:, tip] - f["xpos"][:, target]

    def distance(f: Fields) -> np.ndarray:
        return _vector_norms(apart(f))

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        angles = np.ascontiguousarray(f["qpos"][:, :2])
        return np.cos(angles), np.sin(angles), f["qpos"][:, 2:], f["qvel"][:, :2], apart(f)[:, :axes]

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        far = before if version == 4 else distance(f)
        return -far * near + -squared_effort(actions) * tiring, never_terminated(f)

    return TaskRules(observe, judge, distance, ("xpos",))


def pusher(env: Any, _version: int) -> TaskRules:
    """Return the rules of `pusher_v5.py`; version 4 does not run on MuJoCo 3 and later."""
    tip, thing, goal = (env.data.body(name).id for name in ("tips_arm", "object", "goal"))
    close, there, tiring = env._reward_near_weight, env._reward_dist_weight, env._reward_control_weight

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        bodies = (f["xpos"][:, body] for body in (tip, thing, goal))
        return f["qpos"][:, :7], f["qvel"][:, :7], *bodies

    def judge(f: Fields, _before: np.ndarray, actions: np.ndarray) -> Judged:
        near = -_vector_norms(f["xpos"][:, thing] - f["xpos"][:, tip]) * close
        far = -_vector_norms(f["xpos"][:, thing] - f["xpos"][:, goal]) * there
        return far + -squared_effort(actions) * tiring + near, never_terminated(f)

    return TaskRules(observe, judge, fields=("xpos",))


def _vector_norms(vectors: np.ndarray) -> np.ndarray:
    """Return the norms of [n, 3] as computed by `np.linalg.norm`: the root of a dot product."""
    norms: np.ndarray = np.sqrt(np.vecdot(vectors, vectors))
    return norms


# Rules of the locomotion tasks, from HalfCheetah to Humanoid.

MOST_SPEED = 10
"""Limit of the velocities in the observations of Hopper and Walker2d."""


def half_cheetah(env: Any, _version: int) -> TaskRules:
    """Return the rules of `half_cheetah_v4.py` and `half_cheetah_v5.py`, which are the same."""
    return _crawler_rules(env, 1)


def swimmer(env: Any, _version: int) -> TaskRules:
    """Return the rules of `swimmer_v4.py` and `swimmer_v5.py`, which are the same."""
    return _crawler_rules(env, 2)


def hopper(env: Any, version: int) -> TaskRules:
    """Return the rules of `hopper_v4.py` or `hopper_v5.py`."""
    state, height, angle = env._healthy_state_range, env._healthy_z_range, env._healthy_angle_range

    def healthy(f: Fields) -> np.ndarray:
        qpos = f["qpos"]
        bent = is_between(qpos[:, 2:], state).all(axis=1) & is_between(f["qvel"], state).all(axis=1)
        upright: np.ndarray = bent & is_between(qpos[:, 1], height) & is_between(qpos[:, 2], angle)
        return upright

    return _upright_rules(env, version, healthy)


def walker2d(env: Any, version: int) -> TaskRules:
    """Return the rules of `walker2d_v4.py` or `walker2d_v5.py`."""
    height, angle = env._healthy_z_range, env._healthy_angle_range

    def healthy(f: Fields) -> np.ndarray:
        upright: np.ndarray = is_between(f["qpos"][:, 1], height) & is_between(f["qpos"][:, 2], angle)
        return upright

    return _upright_rules(env, version, healthy)


def ant(env: Any, version: int) -> TaskRules:
    """Return the rules of `ant_v4.py` or `ant_v5.py`; version 4 has contact forces only on request."""
    feels = version > 4 or bool(env._use_contact_forces)
    shows = bool(env._include_cfrc_ext_in_observation) if version > 4 else feels
    hidden = version > 4  # the world body, which is not part of version 5's observations
    body = env.data.body(env._main_body if version > 4 else "torso").id
    place, dt, survive = observed_positions(env, 2), env.dt, survival_reward(env, version)
    onward = env._forward_reward_weight if version > 4 else 1
    tiring, touching = env._ctrl_cost_weight, env._contact_cost_weight
    (least, most), (low, high) = env._contact_force_range, env._healthy_z_range

    def forces(f: Fields) -> np.ndarray:
        return np.clip(f["cfrc_ext"], least, most)

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        moving = (place(f), f["qvel"])
        return (*moving, _flatten_rows(forces(f)[:, hidden:])) if shows else moving

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["xpos"][:, body, 0] - before) / dt
        height = f["qpos"][:, 2]
        finite = np.isfinite(f["qpos"]).all(axis=1) & np.isfinite(f["qvel"]).all(axis=1)
        alive, terminated = survive(finite & (height >= low) & (height <= high))
        costs = tiring * squared_effort(actions)
        if feels:
            costs = costs + touching * squared_effort(_flatten_rows(forces(f)))
        return velocity * onward + alive - costs, terminated

    return TaskRules(observe, judge, lambda f: f["xpos"][:, body, 0].copy(), ("xpos",), contacts=feels)


def humanoid(env: Any, version: int) -> TaskRules:
    """Return the rules of `humanoid_v4.py` or `humanoid_v5.py`.

    Version 5 omits the world body and the actuator forces on the free joint from its observations.
    """
    place, dt, survive = observed_positions(env, 2), env.dt, survival_reward(env, version)
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight
    mass, limits = env.model.body_mass[:, None].copy(), env._healthy_z_range
    total = np.sum(mass)
    # field, and how many of its first entries version 5 omits
    shown = [("cinert", 1), ("cvel", 1), ("qfrc_actuator", 6), ("cfrc_ext", 1)]
    if version > 4:
        shown = [
            (name, first) for name, first in shown if getattr(env, f"_include_{name}_in_observation") is True
        ]
    else:
        shown = [(name, 0) for name, _ in shown]

    def along(f: Fields) -> np.ndarray:
        centre: np.ndarray = (mass * f["xipos"]).sum(axis=1) / total
        return centre[:, 0]

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        return (place(f), f["qvel"], *(_flatten_rows(f[name][:, first:]) for name, first in shown))

    def judge(f: Fields, before: np.ndarray, _actions: np.ndarray) -> Judged:
        velocity = (along(f) - before) / dt
        alive, terminated = survive(is_between(f["qpos"][:, 2], limits))
        costs = tiring * squared_effort(f["ctrl"])
        if version > 4:
            touching = env._contact_cost_weight * squared_effort(_flatten_rows(f["cfrc_ext"]))
            costs = costs + np.clip(touching, *env._contact_cost_range)
        return onward * velocity + alive - costs, terminated

    bound = ("xipos", *(name for name, _ in shown if name != "cfrc_ext"))
    return TaskRules(observe, judge, along, bound, contacts=True)


def _crawler_rules(env: Any, skipped: int) -> TaskRules:
    place, dt = observed_positions(env, skipped), env.dt
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["qpos"][:, 0] - before) / dt
        return onward * velocity - tiring * squared_effort(actions), never_terminated(f)

    return TaskRules(lambda f: (place(f), f["qvel"]), judge)


def _upright_rules(env: Any, version: int, healthy: Any) -> TaskRules:
    place, dt, survive = observed_positions(env, 1), env.dt, survival_reward(env, version)
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["qpos"][:, 0] - before) / dt
        alive, terminated = survive(healthy(f))
        return onward * velocity + alive - tiring * squared_effort(actions), terminated

    return TaskRules(lambda f: (place(f), np.clip(f["qvel"], -MOST_SPEED, MOST_SPEED)), judge)


def _flatten_rows(values: np.ndarray) -> np.ndarray:
    """Return [n, ...] as contiguous [n, m]: the order in which Gymnasium sums a row."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


# MuJoCo tasks with known rules, by Gymnasium class.

_HERE = "gymnasium.envs.mujoco."
TASKS: dict[str, tuple[Callable[[Any, int], TaskRules], int]] = {
    f"{_HERE}{module}_v{version}:{name}Env": (rules, version)
    for name, module, rules, versions in (
        ("HalfCheetah", "half_cheetah", half_cheetah, (4, 5)),
        ("Hopper", "hopper", hopper, (4, 5)),
        ("Walker2d", "walker2d", walker2d, (4, 5)),
        ("Swimmer", "swimmer", swimmer, (4, 5)),
        ("Ant", "ant", ant, (4, 5)),
        ("Humanoid", "humanoid", humanoid, (4, 5)),
        ("InvertedPendulum", "inverted_pendulum", inverted_pendulum, (4, 5)),
        ("InvertedDoublePendulum", "inverted_double_pendulum", inverted_double_pendulum, (4, 5)),
        ("Reacher", "reacher", reacher, (4, 5)),
        ("Pusher", "pusher", pusher, (5,)),
    )
    for version in versions
}
"""Entry point of Gymnasium's class: the builder of its rules and its version."""

WRAPPERS = {"TimeLimit", "OrderEnforcing", "PassiveEnvChecker"}


def find_rules(made: Any) -> TaskRules:
    """Return the rules for a Gymnasium environment; raise UnsupportedError if there are none."""
    env, layer = made.unwrapped, made
    while layer is not env:
        if type(layer).__name__ not in WRAPPERS:
            raise UnsupportedError(f"the mujoco engine does not support the wrapper {type(layer).__name__}")
        layer = layer.env
    name = f"{type(env).__module__}:{type(env).__name__}"
    if name not in TASKS:
        raise UnsupportedError(f"the mujoco engine does not support {type(env).__name__}")
    if env.render_mode is not None:
        raise UnsupportedError("the mujoco engine cannot render")
    rules, version = TASKS[name]
    return rules(env, version)


# MuJoCo's own batch simulation as a vector environment, with the arithmetic of Gymnasium's tasks.

TRIED_STEPS = 5
OBSERVATION_TOLERANCE: Final = 1e-9
MUJOCO_REWARD_TOLERANCE: Final = 1e-6
"""Gymnasium computes action costs in float32."""


class MujocoVector:
    """One MuJoCo task in many simulations, stepped together on all cores.

    One Gymnasium environment provides the model, the parameters and the draws at resets; its first
    steps are compared with the batch. Raise UnsupportedError if the task cannot be played this way.
    """

    engine = "mujoco"

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1, threads: int | None = None) -> None:
        if num_envs < 1:
            raise UsageError(f"number of environments must be at least 1, not {num_envs}")
        self.num_envs = num_envs
        self._notes: dict[str, None] = {}
        self._restore = redirect_mujoco_warnings(self._notes)
        try:
            with collect_warnings(self._notes):
                made = make_one()
                self.spec = describe_env(made)
                self._prepare(made, min(threads or _count_cores(), num_envs))
                self.agreement: Agreement | None = self._compare(made).require(self.spec.id, self.engine)
        except BaseException:
            self._restore()
            raise

    def _prepare(self, made: Any, threads: int) -> None:
        self._env = env = made.unwrapped
        self._rules = find_rules(made)
        self._batch = _make_batch(env.model, self.num_envs, threads, self._rules.contacts)
        self._all = np.arange(self.num_envs)
        fields = ("qpos", "qvel", "ctrl", *self._rules.fields)
        self._fields = {name: self._batch.bind(name) for name in fields}
        if self._rules.contacts:
            self._fields["cfrc_ext"] = np.zeros((self.num_envs, env.model.nbody, 6))
            self._touching = self._batch.bind("ncon")
            self._mujoco = importlib.import_module("mujoco")
            self._one = self._mujoco.MjData(env.model)
        self._elapsed = np.zeros(self.num_envs, np.int64)
        self._limit = self.spec.max_episode_steps or np.iinfo(np.int64).max
        self.obs: np.ndarray = np.zeros((self.num_envs, self.spec.obs_dim))

    def _compare(self, made: Any) -> Agreement:
        """Compare a few steps with Gymnasium's, whose other versions may differ by more than rounding."""
        actions = np.random.default_rng(0).uniform(-1, 1, (TRIED_STEPS, self.num_envs, self.spec.action_dim))
        actions = actions.astype(self.spec.action_low.dtype)
        theirs = [(made.reset(seed=0)[0], 0.0, False), *(made.step(action[0])[:3] for action in actions)]
        # From here on Gymnasium draws the start states, and the batch receives them.
        self._env.set_state = self._start
        row = self._all[:1]
        self.reset(row, np.zeros(1, np.int64))
        ours = [(self.obs[0].copy(), 0.0, False)]
        for action in actions:
            reward, terminated, _ = self.step(action, row)
            ours.append((self.obs[0].copy(), float(reward[0]), bool(terminated[0])))
        self.obs[0] = 0
        tolerances = {
            "observations": OBSERVATION_TOLERANCE,
            "rewards": MUJOCO_REWARD_TOLERANCE,
            "terminations": 0.0,
        }
        return Agreement(
            TRIED_STEPS,
            tuple(
                measure_deviation(name, [each[i] for each in ours], [each[i] for each in theirs], tolerance)
                for i, (name, tolerance) in enumerate(tolerances.items())
            ),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings of Gymnasium and the physics library, each once."""
        return tuple(self._notes)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i], with the draws of Gymnasium's own reset."""
        with collect_warnings(self._notes):
            self._batch.reset(rows, stage=0)
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                self._row = row
                self._env.reset(seed=seed)
            self._batch.forward(rows)
        if self._rules.contacts:
            self._fields["cfrc_ext"][rows] = 0
        self._elapsed[rows] = 0
        self._observe(self._of(rows), rows)

    def _start(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Replace Gymnasium's `set_state`: copy the drawn state to the current row."""
        self._fields["qpos"][self._row], self._fields["qvel"][self._row] = qpos, qvel

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return rewards, terminated and truncated, each [len(rows)]."""
        # All rows, the usual case, need no index and no copies.
        whole = len(rows) == self.num_envs
        at = slice(None) if whole else rows
        actions = actions[at]
        self._fields["ctrl"][at] = actions
        before = self._rules.before(self._of(rows))
        self._advance(None if whole else rows)
        if self._rules.contacts:
            self._feel(rows)
        after = self._of(rows)
        rewards, terminated = self._rules.judge(after, before, actions)
        self._observe(after, rows)
        self._elapsed[at] += 1
        return rewards.astype(np.float64, copy=False), terminated, self._elapsed[at] >= self._limit

    def _advance(self, rows: np.ndarray | None) -> None:
        try:
            self._batch.step(rows, nstep=self._env.frame_skip)
        except RuntimeError as error:
            raise CkpttoolError(f"{self.spec.id}: {error}") from None

    def _feel(self, rows: np.ndarray) -> None:
        """Compute contact forces as Gymnasium does after a step; they are zero without a contact."""
        forces, model = self._fields["cfrc_ext"], self._env.model
        compute = self._mujoco.mj_rnePostConstraint
        forces[rows] = 0
        touching = rows if model.neq else rows[self._touching[rows] > 0]
        for row in touching.tolist():
            compute(model, self._batch.get_data(row, self._one))
            forces[row] = self._one.cfrc_ext

    def _of(self, rows: np.ndarray) -> Fields:
        """Return the fields of ascending rows: views if all rows are selected."""
        if len(rows) == self.num_envs:
            return self._fields
        return {name: field[rows] for name, field in self._fields.items()}

    def _observe(self, fields: Fields, rows: np.ndarray) -> None:
        parts = self._rules.observe(fields)
        if len(rows) == self.num_envs:
            np.concatenate(parts, axis=1, out=self.obs)
        else:
            self.obs[rows] = np.concatenate(parts, axis=1)

    def frame(self, row: int) -> np.ndarray:  # noqa: ARG002
        """Raise UnsupportedError: only Gymnasium's own environments render, with identical episodes."""
        raise UnsupportedError(
            f"the mujoco engine cannot render {self.spec.id}",
            hint="create the environments with rendering enabled",
        )

    def close(self) -> None:
        """Close Gymnasium's object and restore MuJoCo's warning handler."""
        self._env.close()
        self._restore()

    def __enter__(self) -> MujocoVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _count_cores() -> int:
    """Return the number of cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_batch(model: Any, num_envs: int, threads: int, persistent: bool) -> Any:
    """Return a batch of simulations; raise UnsupportedError if MuJoCo cannot create one for this model."""
    if importlib.util.find_spec("mujoco.batch") is None:
        raise UnsupportedError("the installed MuJoCo has no batch simulation, which was added in 4.0")
    if not hasattr(np, "vecdot"):
        raise UnsupportedError("NumPy before 2.0 rounds a reward differently from the engine")
    try:
        return importlib.import_module("mujoco.batch").Batch(model, num_envs, threads, persistent)
    except ValueError as error:
        raise UnsupportedError(f"MuJoCo cannot create a batch of this model: {error}") from None
