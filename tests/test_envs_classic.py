"""CartPole, Acrobot and MountainCar in arrays: Gymnasium's bits over whole episodes, else no engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ckpttool.core import UnsupportedError, UsageError
from ckpttool.evaluation import environments, fast_engines
from ckpttool.evaluation.gymnasium_engine import VectorEnv
from ckpttool.evaluation.rollout import RolloutSpec, rollouts
from ckpttool.testing.backends import chain

gymnasium = pytest.importorskip("gymnasium")
pytestmark = pytest.mark.environment

TASKS = ("CartPole-v0", "CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0")
SEEDS = np.array([0, 1, 1000, 2**32 - 1, *range(5, 41)])
Control = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def at_random(obs: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return random.random(len(obs))


def by_policy(obs: np.ndarray, _: np.random.Generator) -> np.ndarray:
    """Swing up or balance: push along the last velocities, of the pole also by its angle."""
    if obs.shape[1] == 4:
        return (obs @ [0.05, 0.2, 1.0, 0.5] > 0).astype(np.float64)
    # Swinging along the velocity reaches the goals.
    return (obs[:, -2 if obs.shape[1] == 6 else -1] * (-1 if obs.shape[1] == 6 else 1) >= 0).astype(float)


def to_actions(numbers: np.ndarray, vector: VectorEnv) -> np.ndarray:
    """Return numbers from 0 to 1 as actions [rows, 1]; continuous ones partly beyond the bounds."""
    if vector.spec.choices:
        ((count, start),) = vector.spec.choices
        return (start + np.minimum(numbers * count, count - 1) // 1).astype(np.float32)[:, None]
    return (3 * numbers - 1.5).astype(np.float32)[:, None]


def bits(*arrays: Any) -> list[bytes]:
    return [np.asarray(array).dtype.str.encode() + np.asarray(array).tobytes() for array in arrays]


@pytest.mark.parametrize("control", [at_random, by_policy])
@pytest.mark.parametrize("env", TASKS)
def test_every_number_of_whole_episodes_is_gymnasiums(env: str, control: Control) -> None:
    """Rows that end restart with the next seed, so rows do not move together."""
    random, rows = np.random.default_rng(0), np.arange(6)
    with (
        environments.make_vector_env(env, 6) as own_env,
        environments.make_vector_env(env, 6, engine="gymnasium") as reference_env,
    ):
        assert own_env.engine == fast_engines.CLASSIC_ENGINE
        assert own_env.agreement is not None
        assert own_env.agreement.exact
        assert vars_of(own_env.spec) == vars_of(reference_env.spec)
        seeds = iter(SEEDS.tolist())
        started = np.array([next(seeds) for _ in rows])
        for vector in (own_env, reference_env):
            vector.reset(rows, started)
        ends = [0, 0]
        for step in range(1200):
            assert bits(own_env.obs) == bits(reference_env.obs), step
            moving = rows if step % 7 else rows[step % 2 :: 2]
            actions = to_actions(control(np.asarray(reference_env.obs), random), reference_env)
            outcome, expected = own_env.step(actions, moving), reference_env.step(actions, moving)
            assert bits(*outcome) == bits(*expected), step
            ends = [ends[0] + int(expected[1].sum()), ends[1] + int(expected[2].sum())]
            over = moving[expected[1] | expected[2]]
            started = np.array([next(seeds, 7) for _ in over], np.int64)
            for vector in (own_env, reference_env) if len(over) else ():
                vector.reset(over, started)
        assert sum(ends) > 0
        # The policy reaches every goal; CartPole falls at random and reaches its time limit by policy.
        assert ends[1 if env.startswith("CartPole") else 0] > 0 or control is at_random


def vars_of(spec: Any) -> dict[str, Any]:
    return {name: str(getattr(spec, name)) for name in type(spec).__dataclass_fields__}


@pytest.mark.parametrize("env", TASKS)
def test_many_starts_are_those_of_resets(env: str) -> None:
    """More seeds than are compared with resets, which then are computed in arrays."""
    seeds = np.arange(500, 600)
    with environments.make_vector_env(env, 100) as own_env:
        own_env.reset(np.arange(100), seeds)
        one = gymnasium.make(env.replace("Pole-v0", "Pole-v1"))
        assert bits(own_env.obs) == bits(np.stack([one.reset(seed=int(seed))[0] for seed in seeds]))
        one.close()


@pytest.mark.parametrize(
    ("env", "kwargs"),
    [
        ("CartPole-v1", {"sutton_barto_reward": True}),
        ("MountainCar-v0", {"goal_velocity": 0.02}),
        ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
    ],
)
def test_arguments_count(env: str, kwargs: dict[str, Any]) -> None:
    from tests.test_rollout import Linear

    policy = Linear(*([1.0, 2.0, 10.0, 5.0] if env.startswith("Cart") else [0.0, 80.0]))
    results = []
    for engine in ("auto", "gymnasium"):
        with environments.make_vector_env(
            env, 3, engine=engine, kwargs=kwargs, trusted_arguments=True
        ) as vector:
            results.append(rollouts(policy, vector, RolloutSpec(4, 3))[0])
    own, reference = results
    assert (own.engine, reference.engine) == (fast_engines.CLASSIC_ENGINE, "gymnasium")
    for name in ("returns", "lengths", "terminated", "truncated"):
        assert bits(getattr(own, name)) == bits(getattr(reference, name))


def altered(env: str, **attributes: Any) -> Callable[[], Any]:
    def make() -> Any:
        altered_env = gymnasium.make(env, disable_env_checker=True)
        for name, value in attributes.items():
            setattr(altered_env.unwrapped, name, value)
        return altered_env

    return make


@pytest.mark.parametrize(
    ("task", "make"),
    [
        (fast_engines.CartPole, altered("CartPole-v1", kinematics_integrator="semi-implicit euler")),
        (fast_engines.Acrobot, altered("Acrobot-v1", book_or_nips="nips")),
        (fast_engines.Acrobot, altered("Acrobot-v1", torque_noise_max=0.1)),
        (
            fast_engines.MountainCarContinuous,
            lambda: gymnasium.make("MountainCarContinuous-v0", goal_velocity=0),
        ),
    ],
)
def test_other_equations_are_refused(task: type[fast_engines.Equations], make: Callable[[], Any]) -> None:
    if task is fast_engines.MountainCarContinuous:
        task = type("Stronger", (task,), {"gravity": 0.0026})
    with pytest.raises(UnsupportedError):
        fast_engines.ArrayVector(task, make)


@pytest.mark.parametrize(
    ("task", "env", "factor"),
    [
        (fast_engines.CartPole, "CartPole-v1", "gravity"),
        (fast_engines.Acrobot, "Acrobot-v1", "LINK_MASS_2"),
        (fast_engines.MountainCar, "MountainCar-v0", "force"),
        (fast_engines.MountainCarContinuous, "MountainCarContinuous-v0", "power"),
    ],
)
def test_changed_constants_are_followed_and_missing_ones_refused(
    task: type[fast_engines.Equations], env: str, factor: str
) -> None:
    value = getattr(gymnasium.make(env).unwrapped, factor)
    with fast_engines.ArrayVector(task, altered(env, **{factor: 1.25 * value})) as vector:
        assert vector.agreement is not None
        assert vector.agreement.exact

    class Other(task):  # type: ignore[misc, valid-type]
        def __init__(self, bare: Any) -> None:
            super().__init__(bare)
            _ = bare.no_such_constant

    with pytest.raises(UnsupportedError) as caught:
        fast_engines.ArrayVector(Other, altered(env))
    assert caught.value.found == "no attribute 'no_such_constant'"


def test_a_requested_engine_refuses_other_tasks() -> None:
    with pytest.raises(UsageError):
        environments.make_vector_env("Pendulum-v1", engine=fast_engines.CLASSIC_ENGINE)


@pytest.mark.torch
def test_cartpole_on_the_device_is_gymnasiums_to_rounding() -> None:
    pytest.importorskip("torch")
    from ckpttool.core import plugins
    from ckpttool.networks import ArgMax, Dense

    kernel = np.array([[-0.05, 0.05], [-0.2, 0.2], [-1.0, 1.0], [-0.5, 0.5]], np.float32)
    policy = chain(4, Dense(kernel), ArgMax((2,), (0,)))
    results = []
    for engine, backend in (("device", "torch"), ("auto", "numpy")):
        with environments.make_vector_env("CartPole-v1", 3, engine=engine) as vector:
            built = plugins.find("backends", backend).load().build(policy, "cpu")
            results.append(rollouts(built, vector, RolloutSpec(5, 11))[0])
    on_device, reference = results
    assert (on_device.engine, reference.engine) == ("device", fast_engines.CLASSIC_ENGINE)
    for name in ("returns", "lengths", "terminated", "truncated"):
        np.testing.assert_array_equal(getattr(on_device, name), getattr(reference, name))
    assert on_device.agreement is not None
