"""Run fast engines: classic control in arrays and tensors, MuJoCo in batches."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, UnsupportedError
from ckpttool.evaluation.gymnasium_engine import (
    Agreement,
    Outcome,
    VectorEnv,
    collect_warnings,
    describe_env,
    draw_starts,
    measure_deviation,
    redirect_mujoco_warnings,
)
from ckpttool.evaluation.simulators import DEVICE_ENGINE, Tensors

if TYPE_CHECKING:
    import torch


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

    @classmethod
    def of(cls, low: Sequence[float], high: Sequence[float]) -> Box:
        """Return the bounds of these numbers."""
        return cls(np.array(low, np.float32), np.array(high, np.float32))


class EnvRegistration(NamedTuple):
    """Entry of Gymnasium's registry."""

    id: str
    max_episode_steps: int
    kwargs: Mapping[str, Any] = MappingProxyType({})


class StandaloneEnvironment:
    """Task without steps, which an engine computes; draws the start states of episodes.

    The bundled agents play with the core installation alone. Sources: gymnasium/envs/classic_control
    (constants, spaces, `reset`), gymnasium/envs/__init__.py (step limits) and gymnasium/utils/seeding.py
    (`np_random`).
    """

    spec: EnvRegistration
    observation_space: Box
    action_space: Box
    limits: tuple[Sequence[float], Sequence[float]]
    """bounds of the uniform start states; the other numbers are 0"""
    metadata: Mapping[str, Any] = MappingProxyType({"render_fps": 30})

    def __init__(self) -> None:
        self.unwrapped, self.state = self, np.zeros(2)

    @property
    def note(self) -> str:
        """Return a note on the source of the constants."""
        known = "uses built-in constants and start states, as defined by Gymnasium 1.4"
        return f"gymnasium is not installed: {self.spec.id} {known}"

    def reset(self, *, seed: int) -> None:
        """Draw the start state [2] of the episode with that seed."""
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
        drawn = generator.uniform(*self.limits)
        self.state = np.append(drawn, np.zeros(2 - len(drawn)))

    def close(self) -> None:
        """Do nothing: no resources are open."""


PENDULUM_ID = "Pendulum-v1"
MOUNTAIN_CAR_ID = "MountainCarContinuous-v0"
PENDULUM_ENGINE = "pendulum.batch"
CLASSIC_ENGINE = "classic.batch"
STATE_TOLERANCE: Final = 1e-12
ROUNDED_TOLERANCE: Final = 1e-6
"""A few units in the last place of a float32: observations are rounded to it."""
REWARD_TOLERANCE: Final = 1e-9
"""Bound of the rounding error of rewards that are computed in float32."""
POSITION_TOLERANCE: Final = 3e-7
"""Two units in the last place of a float32: NumPy 1 rounds the arithmetic differently from NumPy 2."""
VELOCITY_TOLERANCE: Final = 2e-8
"""Tolerance of velocities, which stay below 0.07."""

Columns = tuple[np.ndarray, ...]
"""Arrays [rows], one per number of a state or an observation."""
Advanced = tuple[Columns, np.ndarray, np.ndarray | None]
"""The next state, rewards and terminated (None if no episode terminates), each [rows]."""


class Equations:
    """One task's equations for all rows at once, with the constants of Gymnasium's object.

    They follow gymnasium/envs/classic_control operation by operation and type by type, so that an episode is
    the same with every engine. Each instance compares single steps from many states with the environment that
    it replaces, which detects a changed library version. Sines and squares of NumPy scalars equal those of
    arrays, but Python's `math.cos` and `**` on a scalar call the C library.
    """

    env_id: str
    engine = CLASSIC_ENGINE
    start: tuple[Sequence[float], Sequence[float]]
    """bounds of the uniform start states"""
    tolerances: tuple[tuple[str, slice, float], ...] = (("states", slice(None), STATE_TOLERANCE),)
    """the compared numbers of a state: name, place and tolerance"""

    def __init__(self, bare: Any) -> None:
        """Read the constants; raise AttributeError where one is missing."""
        raise NotImplementedError

    def begin(self, drawn: np.ndarray) -> Columns:
        """Return the start states of draws [rows, numbers], float64."""
        return tuple(drawn.T)

    def observe(self, state: Columns) -> Columns:
        """Return the observations of states after a step."""
        return state

    def observe_start(self, state: Columns) -> Columns:
        """Return the observations of start states."""
        return self.observe(state)

    def advance(self, state: Columns, actions: np.ndarray) -> Advanced:
        """Advance states by actions [rows]."""
        raise NotImplementedError

    def samples(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return states [n, numbers] and actions [n] whose steps are compared, with the corner cases."""
        raise NotImplementedError

    def put(self, bare: Any, state: np.ndarray) -> None:
        """Set the state of Gymnasium's object."""
        bare.state = state.copy()


class StepSamples(NamedTuple):
    """Single reference steps of Gymnasium's object: `states` [n, numbers], `actions` [n, 1], results."""

    states: np.ndarray
    actions: np.ndarray
    after: np.ndarray
    """float64 [n, numbers of Gymnasium's state]"""
    observations: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    tolerances: tuple[tuple[str, slice, float], ...]

    def agreement(
        self, after: np.ndarray, observations: np.ndarray, rewards: np.ndarray, terminated: np.ndarray | None
    ) -> Agreement:
        """Compare an engine's results for the same steps."""
        ended = np.zeros(len(self.states), np.bool_) if terminated is None else terminated
        kept = after[:, : self.after.shape[1]]
        return Agreement(
            len(self.states),
            (
                *(
                    measure_deviation(name, kept[:, at], self.after[:, at], tolerance)
                    for name, at, tolerance in self.tolerances
                ),
                measure_deviation("observations", observations, self.observations, ROUNDED_TOLERANCE),
                measure_deviation("rewards", rewards, self.rewards, REWARD_TOLERANCE),
                measure_deviation("terminations", ended, self.terminated, 0.0),
            ),
        )


class BatchVector(VectorEnv):
    """Rows that are stepped together, like one Gymnasium environment, which draws their start states."""

    def _describe(self, env: Any) -> None:
        self.spec = describe_env(env)
        self._limit = self.spec.max_episode_steps or np.inf
        self._length = np.zeros(self.num_envs, np.int64)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return rewards, terminated and truncated, each [len(rows)]."""
        # All rows, the usual case, need no index and no copies.
        at = slice(None) if len(rows) == self.num_envs else rows
        rewards, terminated = self._advance(actions[at], rows, at)
        self._length[at] += 1
        return rewards, terminated, self._length[at] >= self._limit

    def _advance(
        self, actions: np.ndarray, rows: np.ndarray, at: np.ndarray | slice
    ) -> tuple[np.ndarray, np.ndarray]:
        """Advance `rows`, which `at` selects, and their observations; return rewards and terminated."""
        raise NotImplementedError


class ArrayVector(BatchVector):
    """Rows' states as arrays.

    Without Gymnasium, a StandaloneEnvironment draws the start states.
    """

    def __init__(
        self, task: type[Equations], make_one: Callable[[], Any], num_envs: int = 1, engine: str | None = None
    ) -> None:
        """Raise UnsupportedError if the environment does not match these equations."""
        super().__init__(num_envs)
        with collect_warnings(self._notes):
            self._one = make_one()
        self.engine = engine or task.engine
        try:
            self._describe(self._one)
            self._rows = np.zeros((num_envs, self.spec.obs_dim), np.float32)
            self.obs = self._rows
            self.task = _read_equations(task, self._one.unwrapped, self.engine)
            self._state = tuple(map(np.array, self.task.begin(np.zeros((num_envs, len(task.start[0]))))))
            if isinstance(self._one, StandaloneEnvironment):
                self._notes[self._one.note] = None
            if (steps := self.reference()) is not None:
                self.agreement = self._compare(steps).require(self.spec.id, self.engine)
        except BaseException:
            self.close()
            raise

    def starts(self, seeds: np.ndarray) -> Columns:
        """Return the start states of the episodes of these seeds, [len(seeds)] each."""
        low, high = (np.array(end) for end in self.task.start)

        def draw(seed: int) -> np.ndarray:
            self._one.reset(seed=seed)
            return np.asarray(self._one.unwrapped.state)[: len(low)]

        return self.task.begin(draw_starts(seeds, low, high, draw))

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i]; rows with the same seed share the draw."""
        state = self.starts(seeds)
        self._keep(rows, state, self.task.observe_start(state))
        self._length[rows] = 0

    def _advance(
        self, actions: np.ndarray, rows: np.ndarray, at: np.ndarray | slice
    ) -> tuple[np.ndarray, np.ndarray]:
        state, rewards, terminated = self.task.advance(
            tuple(column[at] for column in self._state), actions[:, 0]
        )
        self._keep(at, state, self.task.observe(state))
        return rewards, np.zeros(len(rows), np.bool_) if terminated is None else terminated

    def close(self) -> None:
        """Close the one environment."""
        self._one.close()

    def _keep(self, at: np.ndarray | slice, state: Columns, observed: Columns) -> None:
        for column, values in zip(self._state, state, strict=True):
            column[at] = values
        for number, values in enumerate(observed):
            self._rows[at, number] = values

    def reference(self) -> StepSamples | None:
        """Return reference steps of Gymnasium's object from many states; None without Gymnasium."""
        if isinstance(self._one, StandaloneEnvironment):
            return None
        states, actions = self.task.samples(np.random.default_rng(0))
        actions = actions.astype(self.spec.action_low.dtype)[:, None]
        bare, choices = self._one.unwrapped, self.spec.choices
        after, observations, rewards, ended = [], [], [], []
        for state, action in zip(states, actions, strict=True):
            # A reset also begins the time limit anew, and forgets an earlier end.
            self._one.reset(seed=0)
            self.task.put(bare, state)
            observation, reward, terminated, _, _ = self._one.step(int(action[0]) if choices else action)
            after.append(np.array(bare.state, np.float64))
            observations.append(observation)
            rewards.append(reward)
            ended.append(terminated)
        results = (np.array(after), np.array(observations), np.array(rewards, np.float64), np.array(ended))
        return StepSamples(states, actions, *results, self.task.tolerances)

    def _compare(self, steps: StepSamples) -> Agreement:
        """Run the same steps as one batch."""
        before = tuple(np.ascontiguousarray(column) for column in steps.states.T)
        state, rewards, terminated = self.task.advance(before, steps.actions[:, 0])
        observed = np.stack(self.task.observe(state), 1).astype(np.float32)
        return steps.agreement(np.stack(state, 1), observed, rewards, terminated)


def _read_equations(task: type[Equations], bare: Any, engine: str) -> Equations:
    """Return the equations with the object's constants; raise UnsupportedError where one is missing."""
    try:
        return task(bare)
    except AttributeError as error:
        raise UnsupportedError(
            f"the installed Gymnasium's {task.env_id} differs from the version that the {engine} engine "
            "reproduces",
            found=f"no attribute {error.name!r}",
        ) from None


class Pendulum(Equations):
    """Pendulum-v1: angle and angular velocity (pendulum.py)."""

    env_id, engine = PENDULUM_ID, PENDULUM_ENGINE
    start = ((-np.pi, -1.0), (np.pi, 1.0))

    def __init__(self, bare: Any) -> None:
        """Read gravity, mass, length, the time step and the bounds."""
        self.pull, self.push = 3 * bare.g / (2 * bare.l), 3.0 / (bare.m * bare.l**2)
        self.dt, self.max_speed, self.max_torque = bare.dt, bare.max_speed, bare.max_torque

    def observe(self, state: Columns) -> Columns:
        """Return cosine, sine and angular velocity."""
        angle, speed = state
        return np.cos(angle), np.sin(angle), speed

    def advance(self, state: Columns, actions: np.ndarray) -> Advanced:
        """Advance by torques; no episode terminates."""
        angle, speed = state
        torque = np.clip(actions, -self.max_torque, self.max_torque)
        upright = ((angle + np.pi) % (2 * np.pi)) - np.pi
        costs = _square_by_pow(upright) + 0.1 * _square_by_pow(speed) + 0.001 * _square_by_pow(torque)
        faster = speed + (self.pull * np.sin(angle) + self.push * torque) * self.dt
        faster = np.clip(faster, -self.max_speed, self.max_speed)
        return (angle + faster * self.dt, faster), -costs, None

    def samples(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return several turns, all velocities, and torques beyond the bounds."""
        states = random.uniform((-4 * np.pi, -1.0), (4 * np.pi, 1.0), (64, 2))
        states[:, 1] *= self.max_speed
        actions = random.uniform(-1.5, 1.5, 64) * self.max_torque
        # Upright and hanging, at rest and at full velocity, with full torque either way.
        states[:8] = [(angle, speed * self.max_speed) for angle in (0, np.pi) for speed in (-1, 0, 0, 1)]
        actions[:8] = np.array([-1, -1, 0, 1] * 2) * self.max_torque
        return states, actions


class CartPole(Equations):
    """CartPole-v0 and v1: position, velocity, angle and angular velocity (cartpole.py)."""

    env_id = "CartPole-v1"
    start = ((-0.05,) * 4, (0.05,) * 4)

    def __init__(self, bare: Any) -> None:
        """Read masses, lengths, the force, the time step and the ends of an episode."""
        self.gravity, self.total_mass, self.masspole = bare.gravity, bare.total_mass, bare.masspole
        self.length, self.polemass_length, self.tau = bare.length, bare.polemass_length, bare.tau
        self.forces = np.array([-bare.force_mag, bare.force_mag])
        self.farthest, self.steepest = bare.x_threshold, bare.theta_threshold_radians
        # gymnasium before 1.0 has no other reward.
        self.rewards = (0.0, -1.0) if getattr(bare, "_sutton_barto_reward", False) else (1.0, 1.0)

    def advance(self, state: Columns, actions: np.ndarray) -> Advanced:
        """Push the cart left (0) or right (1)."""
        x, x_dot, theta, theta_dot = state
        cosine, sine = np.cos(theta), np.sin(theta)
        force = self.forces[actions.astype(np.int64)]
        temp = (force + self.polemass_length * np.square(theta_dot) * sine) / self.total_mass
        turn = (self.gravity * sine - cosine * temp) / (
            self.length * (4.0 / 3.0 - self.masspole * np.square(cosine) / self.total_mass)
        )
        push = temp - self.polemass_length * turn * cosine / self.total_mass
        x, theta = x + self.tau * x_dot, theta + self.tau * theta_dot
        terminated = (np.abs(x) > self.farthest) | (np.abs(theta) > self.steepest)
        going, over = self.rewards
        after = (x, x_dot + self.tau * push, theta, theta_dot + self.tau * turn)
        return after, np.where(terminated, over, going), terminated

    def samples(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return states inside and at the ends of an episode, with fast poles."""
        reach = np.array([self.farthest, 3.0, self.steepest, 4.0])
        states = random.uniform(-1.05 * reach, 1.05 * reach, (64, 4))
        # At rest in the middle and at each end.
        states[:6] = 0.0
        states[2:4, 0] = states[4:6, 2] = (-1, 1)
        states[:6] *= reach
        return states, np.arange(64.0) % 2


class Acrobot(Equations):
    """Acrobot-v1: two angles and their velocities, by Runge-Kutta's method (acrobot.py)."""

    env_id = "Acrobot-v1"
    start = ((-0.1,) * 4, (0.1,) * 4)

    def __init__(self, bare: Any) -> None:
        """Read masses, lengths, torques and the time step; refuse the paper's equations and noise."""
        self.m1, self.m2, self.l1, self.inertia = (
            bare.LINK_MASS_1,
            bare.LINK_MASS_2,
            bare.LINK_LENGTH_1,
            bare.LINK_MOI,
        )
        self.lc1, self.lc2, self.dt = bare.LINK_COM_POS_1, bare.LINK_COM_POS_2, bare.dt
        self.torques, self.fastest = np.array(bare.AVAIL_TORQUE), (bare.MAX_VEL_1, bare.MAX_VEL_2)
        if bare.book_or_nips != "book" or bare.torque_noise_max > 0:
            raise UnsupportedError(f"the {CLASSIC_ENGINE} engine supports only Acrobot's default equations")

    def observe(self, state: Columns) -> Columns:
        """Return cosines and sines of the angles, and the velocities."""
        one, two, *speeds = state
        return np.cos(one), np.sin(one), np.cos(two), np.sin(two), *speeds

    def observe_start(self, state: Columns) -> Columns:
        """Return the observations of start states, whose cosines Gymnasium computes in float32."""
        return self.observe(tuple(column.astype(np.float32) for column in state))

    def advance(self, state: Columns, actions: np.ndarray) -> Advanced:
        """Turn the second joint; an episode terminates at the target height."""
        torque, start = self.torques[actions.astype(np.int64)], np.stack(state)
        half = self.dt / 2.0
        k1 = self._slope(start, torque)
        k2 = self._slope(start + half * k1, torque)
        k3 = self._slope(start + half * k2, torque)
        k4 = self._slope(start + self.dt * k3, torque)
        one, two, *speeds = start + self.dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        one, two = _wrap_angles(one), _wrap_angles(two)
        speeds = [np.clip(speed, -most, most) for speed, most in zip(speeds, self.fastest, strict=True)]
        terminated = -np.cos(one) - np.cos(two + one) > 1.0
        return (one, two, *speeds), np.where(terminated, 0.0, -1.0), terminated

    def _slope(self, state: np.ndarray, torque: np.ndarray) -> np.ndarray:
        """Return the time derivatives of states [4, rows]."""
        one, two, speed_one, speed_two = state
        m1, m2, l1, lc1, lc2, inertia, g = self.m1, self.m2, self.l1, self.lc1, self.lc2, self.inertia, 9.8
        cosine, sine = np.cos(two), np.sin(two)
        d1 = m1 * lc1**2 + m2 * (l1**2 + lc2**2 + 2 * l1 * lc2 * cosine) + inertia + inertia
        d2 = m2 * (lc2**2 + l1 * lc2 * cosine) + inertia
        phi2 = m2 * lc2 * g * np.cos(one + two - np.pi / 2.0)
        phi1 = (
            -m2 * l1 * lc2 * _square_by_pow(speed_two) * sine
            - 2 * m2 * l1 * lc2 * speed_two * speed_one * sine
            + (m1 * lc1 + m2 * l1) * g * np.cos(one - np.pi / 2)
            + phi2
        )
        faster_two = (torque + d2 / d1 * phi1 - m2 * l1 * lc2 * _square_by_pow(speed_one) * sine - phi2) / (
            m2 * lc2**2 + inertia - _square_by_pow(d2) / d1
        )
        return np.stack([speed_one, speed_two, -(d2 * faster_two + phi1) / d1, faster_two])

    def samples(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return all angles, and velocities that exceed their bounds in a step."""
        reach = np.array([np.pi, np.pi, *self.fastest])
        states = random.uniform(-reach, reach, (66, 4))
        states[:33, 2:] /= 8
        return states, np.arange(66.0) % 3


class MountainCar(Equations):
    """MountainCar-v0: position and velocity, float64 (mountain_car.py)."""

    env_id = "MountainCar-v0"
    start = ((-0.6,), (-0.4,))

    def __init__(self, bare: Any) -> None:
        """Read the bounds, the goal and the forces."""
        self.low, self.high, self.fastest = bare.min_position, bare.max_position, bare.max_speed
        self.goal, self.goal_speed = bare.goal_position, bare.goal_velocity
        self.pushes = np.array([(action - 1) * bare.force for action in range(3)])
        self.gravity = bare.gravity

    def begin(self, drawn: np.ndarray) -> Columns:
        """Start at rest."""
        return drawn[:, 0], np.zeros(len(drawn))

    def advance(self, state: Columns, actions: np.ndarray) -> Advanced:
        """Push left (0), not (1) or right (2)."""
        position, speed = state
        speed = speed + (self.pushes[actions.astype(np.int64)] + _cosine(3 * position) * (-self.gravity))
        speed = np.clip(speed, -self.fastest, self.fastest)
        position = np.clip(position + speed, self.low, self.high)
        speed = np.where((position == self.low) & (speed < 0), 0.0, speed)
        terminated = (position >= self.goal) & (speed >= self.goal_speed)
        return (position, speed), np.full(len(speed), -1.0), terminated

    def samples(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return all positions and velocities, both walls, and the edge of the goal."""
        ends = (self.low, -self.fastest), (self.high, self.fastest)
        states = random.uniform(*ends, (96, 2))
        states[:8] = [
            (p, v) for p in (self.low, self.high) for v in (-self.fastest, -1e-4, 1e-4, self.fastest)
        ]
        states[8:16, 0], states[8:16, 1] = self.goal - 0.01, np.linspace(0.005, self.fastest, 8)
        return states, np.arange(96.0) % 3


class MountainCarContinuous(MountainCar):
    """MountainCarContinuous-v0 (continuous_mountain_car.py), with the types of NumPy 2.

    A reset draws the position in float64, every step rounds position and velocity to float32, and the slope
    is the C library's cosine of a float32 position. The third number of a state is 1 after a reset.
    """

    env_id = MOUNTAIN_CAR_ID
    tolerances = (
        ("positions", slice(0, 1), POSITION_TOLERANCE),
        ("velocities", slice(1, 2), VELOCITY_TOLERANCE),
    )
    steepness, gravity, goal_reward, effort = 3, 0.0025, 100.0, 0.1

    def __init__(self, bare: Any) -> None:
        """Read the bounds, the goal and the power."""
        self.low, self.high, self.fastest = bare.min_position, bare.max_position, bare.max_speed
        self.goal, self.goal_speed = bare.goal_position, bare.goal_velocity
        self.least, self.most, self.power = bare.min_action, bare.max_action, bare.power

    def begin(self, drawn: np.ndarray) -> Columns:
        """Start at rest, in float64."""
        return drawn[:, 0], np.zeros(len(drawn)), np.ones(len(drawn))

    def observe(self, state: Columns) -> Columns:
        """Return position and velocity."""
        return state[:2]

    def advance(self, state: Columns, actions: np.ndarray) -> Advanced:
        """Push by a force; its square costs."""
        position, speed, first = state
        exact = first == 1

        def rounded(values: np.ndarray | float) -> np.ndarray:
            """Round to float32, except in the first step; the float64 sum of two float32 rounds as theirs."""
            return np.where(exact, values, np.float32(values))

        force = np.clip(actions, self.least, self.most)
        pull = self.gravity * _cosine(rounded(self.steepness * position))
        push = (force * np.float32(self.power) - np.float32(pull)).astype(np.float64)
        # `min(max(...))` gives a Python number beyond the bounds, and so a float64 product.
        push = np.where(force == actions, push, force.astype(np.float64) * self.power - pull)
        fastest, low, high = map(rounded, (self.fastest, self.low, self.high))
        speed = np.clip(rounded(speed + rounded(push)), -fastest, fastest)
        position = np.clip(rounded(position + speed), low, high)
        speed = np.where((position == low) & (speed < 0), 0.0, speed)
        terminated = (position >= rounded(self.goal)) & (speed >= rounded(self.goal_speed))
        rewards = terminated * self.goal_reward - _square_by_pow(actions.astype(np.float64)) * self.effort
        return (_in_float32(position), _in_float32(speed), np.zeros(len(speed))), rewards, terminated

    def samples(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return MountainCar's states in float32, some from a reset, and forces beyond the bounds."""
        states, _ = super().samples(random)
        actions = random.uniform(1.5 * self.least, 1.5 * self.most, len(states))
        actions[:16] = np.tile([self.least, self.most], 8)
        first = np.zeros(len(states))
        first[16:32], states[16:32, 0], states[16:32, 1] = 1, random.uniform(-0.6, -0.4, 16), 0.0
        states = np.where(first[:, None] == 1, states, _in_float32(states))
        return np.column_stack([states, first]), actions

    def put(self, bare: Any, state: np.ndarray) -> None:
        """Set position and velocity in the type that they have at this time."""
        bare.state = state[:2].copy() if state[2] else state[:2].astype(np.float32)


def _in_float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(np.float64)


def _wrap_angles(angles: np.ndarray) -> np.ndarray:
    """Return angles in [-pi, pi], by turns as acrobot.py's `wrap` subtracts them."""
    turn = np.pi - -np.pi
    while (over := angles > np.pi).any():
        angles = np.where(over, angles - turn, angles)
    while (under := angles < -np.pi).any():
        angles = np.where(under, angles + turn, angles)
    return angles


def _cosine(values: np.ndarray) -> np.ndarray:
    """Return the cosines [n] as computed by the C library, which `math.cos` calls; np.cos need not."""
    return np.array([math.cos(value) for value in values.tolist()])


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


class StandalonePendulum(StandaloneEnvironment):
    """Pendulum-v1, for ArrayVector."""

    spec, limits = EnvRegistration(PENDULUM_ID, 200), Pendulum.start
    g, m, l, dt, max_speed, max_torque = 10.0, 1.0, 1.0, 0.05, 8, 2.0  # noqa: E741  # Gymnasium's names
    observation_space = Box.of([-1.0, -1.0, -8.0], [1.0, 1.0, 8.0])
    action_space = Box.of([-2.0], [2.0])


class StandaloneMountainCar(StandaloneEnvironment):
    """MountainCarContinuous-v0, for ArrayVector."""

    spec, limits = EnvRegistration(MOUNTAIN_CAR_ID, 999), MountainCar.start
    min_action, max_action, min_position, max_position = -1.0, 1.0, -1.2, 0.6
    max_speed, goal_position, goal_velocity, power = 0.07, 0.45, 0, 0.0015
    observation_space = Box.of([-1.2, -0.07], [0.6, 0.07])
    action_space = Box.of([-1.0], [1.0])


class ClassicTensors:
    """A task of classic control; start states, constants and reference are ArrayVector's.

    They match Gymnasium within rounding: a tensor library's sine and cosine differ from NumPy's in the last
    bit, and it squares by multiplication where Gymnasium calls the C library's pow. The error is measured on
    each device.
    """

    equations: type[Equations]

    def __init__(self, make_one: Callable[[], Any]) -> None:
        """Raise UnsupportedError if the environment does not match the equations."""
        self._arrays = ArrayVector(self.equations, make_one, engine=DEVICE_ENGINE)
        self.spec = self._arrays.spec
        self.task: Any = self._arrays.task

    @property
    def notes(self) -> tuple[str, ...]:
        """Return Gymnasium's warnings, each once."""
        return self._arrays.notes

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with Gymnasium's; None without Gymnasium."""
        import torch

        if (steps := self._arrays.reference()) is None:
            return None
        columns = self._columns(tuple(np.ascontiguousarray(column) for column in steps.states.T))
        state = tuple(torch.from_numpy(column).to(device) for column in columns)
        after, rewards, terminated = self.step(state, torch.from_numpy(steps.actions).to(device))
        states = torch.stack([column.double() for column in after], 1)
        ended = None if terminated is None else terminated.cpu().numpy()
        observations = self.observe(after).cpu().numpy()
        return steps.agreement(states.cpu().numpy(), observations, rewards.cpu().numpy(), ended)

    def starts(self, seeds: np.ndarray) -> Columns:
        """Return the start states, drawn by Gymnasium's own generators."""
        return self._columns(tuple(np.ascontiguousarray(column) for column in self._arrays.starts(seeds)))

    def _columns(self, state: Columns) -> Columns:
        """Return the program's state of an array engine's."""
        return state

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return the observations: float32 [rows, obs_dim]."""
        raise NotImplementedError

    def step(
        self, state: Tensors, actions: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, torch.Tensor | None]:
        """Return the next state, the rewards, and terminated (None if no episode terminates)."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the one environment."""
        self._arrays.close()


class PendulumTensors(ClassicTensors):
    """Angles and velocities, float64 [rows]."""

    equations = Pendulum

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return cosine, sine and angular velocity: float32 [rows, 3]."""
        import torch

        angle, speed = state
        observations = angle.new_empty(len(angle), 3, dtype=torch.float32)
        # On a GPU each of these is one kernel that computes in float64 and rounds its output.
        torch.cos(angle, out=observations[:, 0])
        torch.sin(angle, out=observations[:, 1])
        observations[:, 2] = speed
        return observations

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, None]:
        """Return the next angles and velocities, and the rewards; no episode terminates."""
        (angle, speed), law = state, self.task
        torque = actions[:, 0].clamp(-law.max_torque, law.max_torque)
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        costs = upright.square().addcmul(speed, speed, value=0.1) + 0.001 * torque.square()
        # Gymnasium computes the torque's product in float32; the others may be fused with their sums.
        faster = speed.add(angle.sin(), alpha=law.pull * law.dt).add(law.push * torque, alpha=law.dt)
        faster = faster.clamp(-law.max_speed, law.max_speed)
        return (angle.add(faster, alpha=law.dt), faster), -costs, None


class CartPoleTensors(ClassicTensors):
    """Position, velocity, angle and angular velocity, float64 [rows] each."""

    equations = CartPole

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return the state: float32 [rows, 4]."""
        import torch

        return torch.stack(state, 1).float()

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """Return the next state, the rewards, and which poles or carts have left their bounds."""
        (x, x_dot, theta, theta_dot), law = state, self.task
        cosine, sine = theta.cos(), theta.sin()
        left, right = law.forces
        force = (actions[:, 0] == 1).double() * (right - left) + left
        temp = (force + law.polemass_length * theta_dot.square() * sine) / law.total_mass
        turn = (law.gravity * sine - cosine * temp) / (
            law.length * (4.0 / 3.0 - law.masspole * cosine.square() / law.total_mass)
        )
        push = temp - law.polemass_length * turn * cosine / law.total_mass
        x, theta = x + law.tau * x_dot, theta + law.tau * theta_dot
        terminated = (x.abs() > law.farthest) | (theta.abs() > law.steepest)
        going, over = law.rewards
        rewards = terminated.double() * (over - going) + going
        return (x, x_dot + law.tau * push, theta, theta_dot + law.tau * turn), rewards, terminated


class MountainCarTensors(ClassicTensors):
    """MountainCarContinuous: position (float64), velocity and slope term (float32), [rows] each."""

    equations = MountainCarContinuous

    def _columns(self, state: Columns) -> Columns:
        position, speed, first = state
        law = self.task
        # A float32 position is multiplied in float32.
        angles = np.where(first == 1, law.steepness * position, _in_float32(law.steepness * position))
        return position, speed.astype(np.float32), (_cosine(angles) * law.gravity).astype(np.float32)

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return position and velocity: float32 [rows, 2]."""
        position, velocity, _ = state
        observations = velocity.new_empty(len(velocity), 2)
        observations[:, 0], observations[:, 1] = position, velocity
        return observations

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """Return the next state, the rewards, and which cars have reached the goal."""
        (position, velocity, pull), law = state, self.task
        force = actions[:, 0]
        # Separate products and sums: fused ones would round once where Gymnasium rounds twice.
        push = force.clamp(law.least, law.most) * law.power
        velocity = (velocity + (push - pull)).clamp(-law.fastest, law.fastest)
        # The float64 sum of two float32 is exact enough to round to the float32 result.
        reached = (position + velocity).float().clamp(law.low, law.high)
        velocity = velocity.masked_fill((reached == law.low) & (velocity < 0), 0.0)
        terminated = (reached >= law.goal) & (velocity >= law.goal_speed)
        rewards = terminated * law.goal_reward - force.double().square() * law.effort
        slope = (reached * law.steepness).double().cos() * law.gravity
        return (reached.double(), velocity, slope.float()), rewards, terminated


Fields = Mapping[str, np.ndarray]
"""MjData's fields by name, each [n, ...] float64: qpos, qvel, ctrl and the task's own."""

Judged = tuple[np.ndarray, np.ndarray]
"""Rewards (float64 or narrower) and terminated (bool), each [n]."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskRules:
    """One task's rules; `before` is state from before a step that `judge` needs, [n].

    `fields` are the derived ones that the rules read. `contacts` means that they read `cfrc_ext`, which
    MuJoCo computes only on request (`mj_rnePostConstraint`). Every rule follows Gymnasium's arithmetic
    (`gymnasium/envs/mujoco/*_v4.py`, `*_v5.py`) in the same order and types, so that results are equal to the
    last bit: actions and costs computed from them alone are float32; sums run along contiguous rows, which
    numpy adds like a single array.
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
        reward = np.ones_like(healthy) if version == 4 and ends else healthy
        return reward * float(worth), ~healthy if ends else np.zeros_like(healthy)

    return judged


def is_between(values: np.ndarray, limits: tuple[float, float]) -> np.ndarray:
    """Return whether values lie strictly between two limits."""
    least, most = limits
    inside: np.ndarray = (values > least) & (values < most)
    return inside


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

    return TaskRules(observe, judge, _no_state)


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

    return TaskRules(observe, judge, _no_state, ("site_xpos", "qfrc_constraint"))


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

    return TaskRules(observe, judge, distance if version == 4 else _no_state, ("xpos",))


def pusher(env: Any, _version: int) -> TaskRules:
    """Return the rules of `pusher_v5.py`; version 4 does not run on MuJoCo 3 and later."""
    tip, object_, goal = (env.data.body(name).id for name in ("tips_arm", "object", "goal"))
    close, there, tiring = env._reward_near_weight, env._reward_dist_weight, env._reward_control_weight

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        bodies = (f["xpos"][:, body] for body in (tip, object_, goal))
        return f["qpos"][:, :7], f["qvel"][:, :7], *bodies

    def judge(f: Fields, _before: np.ndarray, actions: np.ndarray) -> Judged:
        near = -_vector_norms(f["xpos"][:, object_] - f["xpos"][:, tip]) * close
        far = -_vector_norms(f["xpos"][:, object_] - f["xpos"][:, goal]) * there
        return far + -squared_effort(actions) * tiring + near, never_terminated(f)

    return TaskRules(observe, judge, _no_state, ("xpos",))


def _no_state(f: Fields) -> np.ndarray:
    """Return any view, for rules that need no state from before the step."""
    return f["ctrl"]


def _vector_norms(vectors: np.ndarray) -> np.ndarray:
    """Return the norms of [n, 3] as computed by `np.linalg.norm`: the root of a dot product."""
    norms: np.ndarray = np.sqrt(np.vecdot(vectors, vectors))
    return norms


MOST_SPEED = 10
"""Limit of the velocities in the observations of Hopper and Walker2d."""


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
    positions, dt, survive = observed_positions(env, 2), env.dt, survival_reward(env, version)
    onward = env._forward_reward_weight if version > 4 else 1
    tiring, touching = env._ctrl_cost_weight, env._contact_cost_weight
    (least, most), (low, high) = env._contact_force_range, env._healthy_z_range

    def forces(f: Fields) -> np.ndarray:
        return np.clip(f["cfrc_ext"], least, most)

    def observe(f: Fields) -> tuple[np.ndarray, ...]:
        moving = (positions(f), f["qvel"])
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
    positions, dt, survive = observed_positions(env, 2), env.dt, survival_reward(env, version)
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
        return (positions(f), f["qvel"], *(_flatten_rows(f[name][:, first:]) for name, first in shown))

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
    """Return the rules of HalfCheetah and Swimmer, in both versions."""
    positions, dt = observed_positions(env, skipped), env.dt
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["qpos"][:, 0] - before) / dt
        return onward * velocity - tiring * squared_effort(actions), never_terminated(f)

    return TaskRules(lambda f: (positions(f), f["qvel"]), judge)


def _upright_rules(env: Any, version: int, healthy: Any) -> TaskRules:
    positions, dt, survive = observed_positions(env, 1), env.dt, survival_reward(env, version)
    onward, tiring = env._forward_reward_weight, env._ctrl_cost_weight

    def judge(f: Fields, before: np.ndarray, actions: np.ndarray) -> Judged:
        velocity = (f["qpos"][:, 0] - before) / dt
        alive, terminated = survive(healthy(f))
        return onward * velocity + alive - tiring * squared_effort(actions), terminated

    return TaskRules(lambda f: (positions(f), np.clip(f["qvel"], -MOST_SPEED, MOST_SPEED)), judge)


def _flatten_rows(values: np.ndarray) -> np.ndarray:
    """Return [n, ...] as contiguous [n, m]: the order in which Gymnasium sums a row."""
    return values.reshape(len(values), math.prod(values.shape[1:]))


_HERE = "gymnasium.envs.mujoco."
TASKS: dict[str, tuple[Callable[[Any, int], TaskRules], int]] = {
    f"{_HERE}{module}_v{version}:{name}Env": (rules, version)
    for name, module, rules, versions in (
        ("HalfCheetah", "half_cheetah", lambda env, _: _crawler_rules(env, 1), (4, 5)),
        ("Hopper", "hopper", hopper, (4, 5)),
        ("Walker2d", "walker2d", walker2d, (4, 5)),
        ("Swimmer", "swimmer", lambda env, _: _crawler_rules(env, 2), (4, 5)),
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


def find_rules(environment: Any) -> TaskRules:
    """Return the rules for a Gymnasium environment; raise UnsupportedError if there are none."""
    env, layer = environment.unwrapped, environment
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


TRIED_STEPS = 5
MOST_STARTS = 4096
"""Start states of episodes to come that are kept; a wide vector exceeds it by its width."""
OBSERVATION_TOLERANCE: Final = 1e-9
MUJOCO_REWARD_TOLERANCE: Final = 1e-6
"""Gymnasium computes action costs in float32."""


class MujocoVector(BatchVector):
    """One MuJoCo task in many simulations, stepped together on all cores.

    One Gymnasium environment provides the model, the parameters and the draws at resets; its first
    steps are compared with the batch. Raise UnsupportedError if the task cannot be played this way.
    """

    engine = "mujoco"

    def __init__(self, make_one: Callable[[], Any], num_envs: int = 1, threads: int | None = None) -> None:
        super().__init__(num_envs)
        self._restore = redirect_mujoco_warnings(self._notes)
        try:
            with collect_warnings(self._notes):
                env = make_one()
                self._describe(env)
                cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
                self._prepare(env, min(threads or cores or 1, num_envs))
                self.agreement = self._compare(env).require(self.spec.id, self.engine)
        except BaseException:
            self._restore()
            raise

    def _prepare(self, gym_env: Any, threads: int) -> None:
        self._env = env = gym_env.unwrapped
        self._rules = find_rules(gym_env)
        self._batch = _make_batch(env.model, self.num_envs, threads, self._rules.contacts)
        # A simulation that is not persistent is its row of the state: writing it is a reset in one copy.
        self._fresh = self._batch.state[0].copy()
        self._starts: dict[int, np.ndarray] = {}
        fields = ("qpos", "qvel", "ctrl", *self._rules.fields)
        self._fields = {name: self._batch.bind(name) for name in fields}
        if self._rules.contacts:
            self._fields["cfrc_ext"] = np.zeros((self.num_envs, env.model.nbody, 6))
            self._touching = self._batch.bind("ncon")
            self._mujoco = importlib.import_module("mujoco")
            self._one = self._mujoco.MjData(env.model)
        self._rows = np.zeros((self.num_envs, self.spec.obs_dim))
        self.obs = self._rows

    def _compare(self, env: Any) -> Agreement:
        """Compare a few steps with Gymnasium's, whose other versions may differ by more than rounding."""
        actions = np.random.default_rng(0).uniform(-1, 1, (TRIED_STEPS, self.num_envs, self.spec.action_dim))
        actions = actions.astype(self.spec.action_low.dtype)
        expected = [(env.reset(seed=0)[0], 0.0, False), *(env.step(action[0])[:3] for action in actions)]
        # From here on Gymnasium only draws the start states.
        self._env.set_state, self._env._get_obs = self._keep_start, lambda: None
        row = np.arange(1)
        self.reset(row, np.zeros(1, np.int64))
        steps = [(self._rows[0].copy(), 0.0, False)]
        for action in actions:
            reward, terminated, _ = self.step(action, row)
            steps.append((self._rows[0].copy(), float(reward[0]), bool(terminated[0])))
        self._rows[0] = 0
        tolerances = (OBSERVATION_TOLERANCE, MUJOCO_REWARD_TOLERANCE, 0.0)
        rows = zip(
            ("observations", "rewards", "terminations"),
            zip(*steps, strict=True),
            zip(*expected, strict=True),
            tolerances,
            strict=True,
        )
        return Agreement(TRIED_STEPS, tuple(measure_deviation(*row) for row in rows))

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Start the episode of seeds[i] in rows[i], with the draws of Gymnasium's own reset."""
        starts = np.array([self._start_of(seed) for seed in seeds.tolist()])
        if self._rules.contacts:
            self._batch.reset(rows, stage=0)
            self._fields["cfrc_ext"][rows] = 0
        else:
            self._batch.state[rows] = self._fresh
        positions = self._fields["qpos"].shape[1]
        self._fields["qpos"][rows], self._fields["qvel"][rows] = starts[:, :positions], starts[:, positions:]
        self._batch.forward(rows)
        self._length[rows] = 0
        self._observe(self._of(rows), rows)

    def _start_of(self, seed: int) -> np.ndarray:
        """Return the positions and velocities [nq + nv] of the episode of that seed."""
        if seed not in self._starts:
            if len(self._starts) > MOST_STARTS:
                self._starts.clear()
            # Seeds ascend, and a draw between two steps of the engine takes twice as long as one in a loop.
            with collect_warnings(self._notes):
                for ahead in range(seed, seed + self.num_envs):
                    # Gymnasium's own reset also sets its simulation and observes it.
                    self._env.np_random = np.random.Generator(np.random.PCG64(ahead))
                    self._env.reset_model()
                    self._starts[ahead] = self._drawn
        return self._starts[seed]

    def _keep_start(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """Replace Gymnasium's `set_state`: keep the drawn state."""
        self._drawn = np.concatenate((qpos, qvel))

    def _advance(
        self, actions: np.ndarray, rows: np.ndarray, at: np.ndarray | slice
    ) -> tuple[np.ndarray, np.ndarray]:
        self._fields["ctrl"][at] = actions
        before = self._rules.before(self._of(rows))
        try:
            self._batch.step(None if isinstance(at, slice) else rows, nstep=self._env.frame_skip)
        except RuntimeError as error:
            raise CkpttoolError(f"{self.spec.id}: {error}") from None
        if self._rules.contacts:
            self._feel(rows)
        after = self._of(rows)
        rewards, terminated = self._rules.judge(after, before, actions)
        self._observe(after, rows)
        return rewards.astype(np.float64, copy=False), terminated

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
            np.concatenate(parts, axis=1, out=self._rows)
        else:
            self._rows[rows] = np.concatenate(parts, axis=1)

    def close(self) -> None:
        """Close Gymnasium's object and restore MuJoCo's warning handler."""
        self._env.close()
        self._restore()


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
