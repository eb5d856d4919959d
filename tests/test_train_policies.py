"""`verify --train-step` of Gaussian policies: SAC, PPO and A2C, with every optimizer, in every framework."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import UsageError
from ckpttool.networks import (
    Activation,
    Concat,
    Learner,
    Network,
    Node,
    Worker,
    numpy_backend,
    policy_training,
    train_learner,
    trained_arrays,
)
from ckpttool.networks.policy_training import (
    A2C,
    DDPG,
    LOG_STD,
    PPO,
    SAC,
    TD3,
    TEMPERATURE,
    OptimizerSetup,
    TrainingBatch,
)
from ckpttool.verification import update_comparison
from ckpttool.verification.policy_training import make_batches
from ckpttool.verification.update_comparison import compare_train_steps
from tests.test_train_step import InProcess, dense, engines

__all__ = ["engines"]  # the fixture

OBS, ACT, HIDDEN = 3, 2, 8
ADAM = {"learning_rate": 1e-3, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}


def network(generator: np.random.Generator, *, action: bool, width: int) -> Network:
    inputs = (("obs", OBS), ("action", ACT)) if action else (("obs", OBS),)
    nodes = [Node(Concat(), (0, 1))] if action else []
    for layer in (
        dense(generator, OBS + ACT * action, HIDDEN),
        Activation("tanh"),
        dense(generator, HIDDEN, width),
    ):
        nodes.append(Node(layer, (len(inputs) + len(nodes) - 1,)))
    return Network(inputs, tuple(nodes), len(inputs) + len(nodes) - 1)


def setup(
    family: str,
    titles: tuple[str, ...],
    learner: Learner,
    settings: dict[str, float],
    *names: str,
    **more: Any,
) -> OptimizerSetup:
    """Return an optimizer with the state that gradients of size one leave after 40 updates."""
    generator = np.random.default_rng(7)
    shapes = [array.shape for title in titles for array in learner.arrays(title)]
    positive = ("v", "vhat", "rms", "squares", "u", "mean_squares", "mean_deltas")
    slots = {
        name: tuple(
            generator.uniform(0.5, 1.5, shape) + (name == "vhat")
            if name in positive
            else generator.normal(size=shape) / 9
            for shape in shapes
        )
        for name in names
    }
    return OptimizerSetup(family, titles, settings, 40, slots, (0.0,) * len(shapes), **more)


def sac() -> Learner:
    generator = np.random.default_rng(1)
    networks = {"actor": network(generator, action=False, width=2 * ACT)}
    critics = ("critic/q1", "critic/q2")
    slow = {}
    for title in critics:
        networks[title] = network(generator, action=True, width=1)
        slow[title] = title.replace("critic", "critic_target")
        networks[slow[title]] = network(generator, action=True, width=1)
    low, high = np.full(ACT, -2.0), np.full(ACT, 1.0)
    agent = Learner(SAC, networks, {TEMPERATURE: np.array([-1.0])}, critics, slow, {}, low, high)
    decays = tuple(0.01 * (array.ndim == 2) for title in critics for array in agent.arrays(title))
    optimizers = {
        "actor_optimizer": setup(
            "Adam", ("actor",), agent, {**ADAM, "weight_decay": 0.01}, "m", "v", corrected=False
        ),
        "critic_optimizer": replace(setup("Adam", critics, agent, ADAM, "m", "v", "vhat"), l2=decays),
        "temperature_optimizer": setup("SGD", (TEMPERATURE,), agent, {"learning_rate": 0.01}),
    }
    return replace(agent, optimizers=optimizers)


def on_policy(algorithm: str, family: str, settings: dict[str, float], *slots: str) -> Learner:
    generator = np.random.default_rng(2)
    apart = algorithm == PPO
    networks = {
        "actor": network(generator, action=False, width=ACT * (1 if apart else 2)),
        "value": network(generator, action=False, width=1),
    }
    vectors = {LOG_STD: np.full(ACT, -0.5)} if apart else {}
    agent = Learner(algorithm, networks, vectors, (), {}, {}, np.zeros(ACT), np.zeros(ACT))
    titles = ("actor", *vectors, "value")
    return replace(agent, optimizers={"optimizer": setup(family, titles, agent, settings, *slots)})


def deterministic(algorithm: str, family: str, settings: dict[str, float], *slots: str) -> Learner:
    generator = np.random.default_rng(4)
    critics = ("critic/q1", "critic/q2") if algorithm == TD3 else ("critic/q1",)
    networks, slow = {}, {}
    for title in ("actor", *critics):
        component, _, head = title.partition("/")
        slow[title] = "/".join(filter(None, (f"{component}_target", head)))
        for name in (title, slow[title]):
            actor = component == "actor"
            networks[name] = network(generator, action=not actor, width=ACT if actor else 1)
    low, high = np.full(ACT, -2.0), np.full(ACT, 1.0)
    agent = Learner(algorithm, networks, {}, critics, slow, {}, low, high, updates=1)
    optimizers = {
        "actor_optimizer": setup(family, ("actor",), agent, settings, *slots),
        "critic_optimizer": setup(family, critics, agent, settings, *slots),
    }
    return replace(agent, optimizers=optimizers)


_MOMENTUM = {"learning_rate": 1e-3, "momentum": 0.9}
_ROOT = {"learning_rate": 1e-3, "rho": 0.99, "epsilon": 1e-5}
LEARNERS: dict[str, Callable[[], Learner]] = {
    "SAC, AdamW, AMSGrad with L2, SGD": sac,
    "PPO, Adam": lambda: on_policy(PPO, "Adam", ADAM, "m", "v"),
    "PPO, Nesterov": lambda: on_policy(PPO, "SGD", {**_MOMENTUM, "nesterov": 1.0}, "buffer"),
    "A2C, momentum": lambda: on_policy(A2C, "SGD", _MOMENTUM, "buffer"),
    "A2C, RMSprop": lambda: on_policy(A2C, "RMSprop", _ROOT, "rms"),
    "TD3, RMSprop": lambda: deterministic(TD3, "RMSprop", _ROOT, "rms"),
    "DDPG, momentum": lambda: deterministic(DDPG, "SGD", _MOMENTUM, "buffer"),
    "A2C, Adagrad": lambda: on_policy(
        A2C, "Adagrad", {"learning_rate": 1e-3, "epsilon": 1e-7, "initial_accumulator_value": 0.1}, "squares"
    ),
    "PPO, Adamax": lambda: on_policy(PPO, "Adamax", ADAM, "m", "u"),
    "TD3, Adadelta": lambda: deterministic(
        TD3, "Adadelta", {"learning_rate": 0.1, "rho": 0.95, "epsilon": 1e-7}, "mean_squares", "mean_deltas"
    ),
    "A2C, centered RMSprop with momentum": lambda: on_policy(
        A2C, "RMSprop", {**_ROOT, "momentum": 0.5}, "rms", "mg", "buffer"
    ),
}


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "steps"),
    [(name, 3) for name in LEARNERS] + [pytest.param(name, 100, marks=pytest.mark.slow) for name in LEARNERS],
)
def test_the_frameworks_make_the_reference_updates(engines: list[Worker], name: str, steps: int) -> None:
    agent = LEARNERS[name]()
    comparison = compare_train_steps((agent, agent), make_batches(agent, steps), engines)
    assert comparison.algorithm == agent.algorithm == name.partition(",")[0]
    assert comparison.within
    for moved in comparison.moved:
        if moved.dtype == "float64":
            assert max(moved.relative, moved.error_a, moved.error_b) <= update_comparison.BOUNDS["float64"], (
                moved
            )


def _loss(learner: Learner, batch: TrainingBatch, title: str) -> Callable[[], float]:
    """Return the loss of one network as the papers write it."""
    arrays = batch.arrays
    engine = numpy_backend.learn(learner)

    def normal(output: np.ndarray, value: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        vector = learner.vectors.get(LOG_STD)
        mean, log_std = (output, vector) if vector is not None else np.split(output, 2, axis=1)
        terms = -0.5 * ((value - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return mean, terms.sum(axis=1, keepdims=True)

    def of_policy() -> float:
        log_prob = normal(engine.forward("actor", arrays["obs"]), arrays["action"])[1]
        advantage = arrays["advantage"]
        if learner.algorithm == A2C:
            return -float((advantage * log_prob).mean())
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
        ratio = np.exp(log_prob - arrays["old_log_prob"])
        return -float(np.minimum(advantage * ratio, advantage * np.clip(ratio, 0.8, 1.2)).mean())

    def of_squashed() -> float:
        output = engine.forward("actor", arrays["obs"])
        mean, log_std = np.split(output, 2, axis=1)
        drawn = mean + np.exp(log_std) * arrays["noise"]
        log_prob = normal(output, drawn)[1]
        log_prob = log_prob - np.log(1 - np.tanh(drawn) ** 2 + 1e-6).sum(axis=1, keepdims=True)
        action = (learner.low + learner.high) / 2 + (learner.high - learner.low) / 2 * np.tanh(drawn)
        values = [engine.forward(q, arrays["obs"], action) for q in learner.critics]
        return float((np.exp(learner.vectors[TEMPERATURE]) * log_prob - np.minimum(*values)).mean())

    def of_value() -> float:
        return 0.5 * float(np.square(arrays["returns"] - engine.forward("value", arrays["obs"])).mean())

    if title == "value":
        return of_value
    return of_squashed if learner.algorithm == SAC else of_policy


class Recorder:
    """An engine that keeps the gradients of an update instead of making it."""

    def __init__(self, learner: Learner) -> None:
        self.inner: Any = numpy_backend.learn(learner)
        self.sums = self.inner._sums

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, optimizer: str, limit: float | None) -> None:
        """Keep the sums."""

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Keep the targets."""


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("SAC, AdamW, AMSGrad with L2, SGD", "actor"),
        ("PPO, Adam", "actor"),
        ("PPO, Adam", "value"),
        ("A2C, RMSprop", "actor"),
    ],
)
def test_gradients_are_those_of_differences(name: str, title: str) -> None:
    learner = LEARNERS[name]().cast("float64")
    batch = make_batches(learner, 1)[0].cast("float64")
    engine = Recorder(learner)
    policy_training.UPDATES[learner.algorithm](engine, learner, batch, 1)
    loss = _loss(learner, batch, title)
    arrays = trained_arrays(learner.networks[title])
    if title == "actor" and LOG_STD in learner.vectors:
        arrays, engine.sums[title] = (
            [*arrays, learner.vectors[LOG_STD]],
            [*engine.sums[title], *engine.sums[LOG_STD]],
        )
    for array, gradient in zip(arrays, engine.sums[title], strict=True):
        for at in (0, array.size // 2, array.size - 1):
            kept, step = array.flat[at], 1e-6
            array.flat[at] = kept + step
            up = loss()
            array.flat[at] = kept - step
            slope = (up - loss()) / (2 * step)
            array.flat[at] = kept
            assert np.isclose(gradient.flat[at], slope, rtol=1e-5, atol=1e-7)


def _with_optimizer(agent: Learner, name: str, **changes: Any) -> Learner:
    return replace(agent, optimizers={**agent.optimizers, name: replace(agent.optimizers[name], **changes)})


def _faults() -> dict[str, tuple[Learner, Learner, set[str]]]:
    first, second = sac(), LEARNERS["A2C, RMSprop"]()
    critic, joint = first.optimizers["critic_optimizer"], second.optimizers["optimizer"]
    faster = {**joint.settings, "learning_rate": 2e-3}
    return {
        "count": (first, _with_optimizer(first, "critic_optimizer", step=0), {"critic/q1", "critic/q2"}),
        "temperature": (
            first,
            _with_optimizer(first, "temperature_optimizer", settings={"learning_rate": 0.02}),
            {TEMPERATURE},
        ),
        "moment": (
            first,
            _with_optimizer(
                first,
                "critic_optimizer",
                slots={**critic.slots, "m": tuple(2 * moment for moment in critic.slots["m"])},
            ),
            {"critic/q1", "critic/q2"},
        ),
        "rate": (second, _with_optimizer(second, "optimizer", settings=faster), {"actor", "value"}),
    }


@pytest.mark.parametrize("name", ["count", "temperature", "moment", "rate"])
def test_a_fault_of_the_optimizer_is_found(name: str) -> None:
    a, b, expected = _faults()[name]
    comparison = compare_train_steps((a, b), make_batches(a, 1), [InProcess(), InProcess()])
    wrong = {update.name for update in comparison.moved if not update.within and update.step == 1}
    assert not comparison.within
    assert expected <= wrong


@pytest.mark.parametrize("make", [sac, LEARNERS["A2C, RMSprop"]])
def test_learning_rates_of_zero_show_nothing(make: Callable[[], Learner]) -> None:
    agent = make()
    for name, optimizer in agent.optimizers.items():
        agent = _with_optimizer(agent, name, settings={**optimizer.settings, "learning_rate": 0.0})
    batches = make_batches(agent, 1)
    with pytest.raises(UsageError):
        compare_train_steps((agent, agent), batches, [InProcess(), InProcess()])
    # One side that moves is a difference.
    assert not compare_train_steps((agent, make()), batches, [InProcess(), InProcess()]).within


def test_a_learner_survives_its_way_to_a_process(tmp_path: Path) -> None:
    agent = sac().cast("float64")
    batches = make_batches(agent, 2)
    file = tmp_path / "learner.npz"
    document = json.loads(json.dumps(policy_training.write_records([agent, *batches], file)))
    again, *read_batches = policy_training.read_records(document, file)
    results = [
        train_learner(numpy_backend.learn(agent), agent, [b.cast("float64") for b in rows])
        for agent, rows in ((agent, batches), (again, read_batches))
    ]
    for title, arrays in results[0].last.items():
        assert all(np.array_equal(x, y) for x, y in zip(arrays, results[1].last[title], strict=True))
