"""The proof of an optimizer's state: both checkpoints go on training on the same batches, and stay together.

What is compared is how far the weights moved, not where they are: an update is small beside a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ckpttool.agents.backends import numpy as reference
from ckpttool.agents.training.learner import Batch, Dtype, Learner, trained
from ckpttool.agents.training.td3 import DISCOUNT, Trained, train
from ckpttool.agents.worker import Worker

STEPS = 100
BATCH = 100
# Of the length of A's own update, pooled over a network.
BOUNDS: Mapping[Dtype, float] = {"float32": 1e-4, "float64": 1e-10}
# A's own rounding may cost A itself more than that: B may then be as far off as A, give or take, and a
# hundred bounds at most. The rest of a mapping's errors is larger by far.
OWN_ERROR = 2.0
MOST = 100.0


@dataclass(frozen=True, slots=True)
class Moved:
    """How one network moved: |update of A - update of B| / |update of A|, after `step` of the updates.

    `error_a` and `error_b` are the same of each side against the float64 reference, `tensors` of A and B for
    each trained tensor in order. An update of B where A makes none, or at another step, is infinitely wrong.
    """

    name: str
    dtype: Dtype
    step: int
    relative: float
    error_a: float
    error_b: float
    tensors: tuple[float, ...]
    within: bool

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "step": self.step,
            "relative": self.relative,
            "error_a": self.error_a,
            "error_b": self.error_b,
            "tensors": list(self.tensors),
            "within": self.within,
        }


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Both learners after the same updates: of every network its first, and all of them."""

    algorithm: str
    steps: int
    moved: tuple[Moved, ...]

    @property
    def within(self) -> bool:
        """Say whether every network moved as A's did."""
        return all(each.within for each in self.moved)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "algorithm": self.algorithm,
            "steps": self.steps,
            "batch": BATCH,
            "bounds": dict(BOUNDS),
            "updates": [each.document() for each in self.moved],
        }


def train_step(
    learners: tuple[Learner, Learner], batches: Sequence[Batch], workers: Sequence[Worker]
) -> TrainStep:
    """Train both on the batches, each by its worker, in both float types, beside A's float64 reference."""
    first = learners[0]
    exact = _updates(first, _reference(first, batches))
    found: list[Moved] = []
    for dtype, bound in BOUNDS.items():
        given = [batch.cast(dtype) for batch in batches]
        a, b = (
            _updates(learner, worker.train(learner.cast(dtype), given))
            for learner, worker in zip(learners, workers, strict=True)
        )
        found += [_moved(key, dtype, bound, (a, b, exact)) for key in sorted(a.keys() | b.keys())]
    return TrainStep("TD3" if len(first.critics) > 1 else "DDPG", len(batches), tuple(found))


# By title and step of the training: how far each tensor of the network had moved then, in float64.
_Updates = dict[tuple[str, int], list[np.ndarray]]


def _reference(learner: Learner, batches: Sequence[Batch]) -> Trained:
    double = learner.cast("float64")
    return train(reference.learn(double), double, [batch.cast("float64") for batch in batches])


def _updates(learner: Learner, after: Trained) -> _Updates:
    found: _Updates = {}
    for title, step in after.moved.items():
        start = trained(learner.networks[title])
        # Of one step alone the first update is the last one.
        for number, weights in ((step, after.first[title]), (after.steps, after.last[title])):
            pairs = zip(weights, start, strict=True)
            found[title, number] = [there.astype(np.float64) - here for there, here in pairs]
    return found


def _moved(
    key: tuple[str, int], dtype: Dtype, bound: float, updates: tuple[_Updates, _Updates, _Updates]
) -> Moved:
    a, b, exact = (each.get(key) for each in updates)
    if a is None or b is None or exact is None or [x.shape for x in a] != [x.shape for x in b]:
        return Moved(key[0], dtype, key[1], np.inf, np.inf, np.inf, (), within=False)
    relative, error_a, error_b = _relative(a, b), _relative(exact, a), _relative(exact, b)
    allowed = max(bound, min(OWN_ERROR * error_a, MOST * bound))
    tensors = tuple(_relative([x], [y]) for x, y in zip(a, b, strict=True))
    return Moved(key[0], dtype, key[1], relative, error_a, error_b, tensors, within=relative <= allowed)


def _relative(right: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return |right - other| / |right|; 0 where neither moved."""
    apart, length = (
        float(np.sqrt(sum(np.square(array).sum() for array in arrays)))
        for arrays in ([x - y for x, y in zip(right, other, strict=True)], right)
    )
    return apart / length if length else (np.inf if apart else 0.0)


def batches(learner: Learner, steps: int = STEPS, statistics: Mapping[str, Any] | None = None) -> list[Batch]:
    """Return the fixed transitions, always the same for an agent: float32, in the scales that it knows.

    Observations are normal, with the mean and variance of its statistics if it has any; actions are uniform
    within the bounds. Rewards are normal, of the size whose discounted sum is as large as its first critic's
    values, so that errors, and with them gradients, are as small as an agent of small values has them.
    """
    generator = np.random.default_rng(0)
    obs_dim, act_dim = learner.networks["actor"].input_shapes["obs"][0], len(learner.low)
    mean, deviation = np.zeros(obs_dim), np.ones(obs_dim)
    if statistics is not None:
        mean, deviation = np.asarray(statistics["mean"]), np.sqrt(np.asarray(statistics["var"]))

    def draw() -> Batch:
        obs, next_obs = (mean + deviation * generator.standard_normal((BATCH, obs_dim)) for _ in range(2))
        return Batch(
            obs,
            generator.uniform(learner.low, learner.high, (BATCH, act_dim)),
            next_obs,
            generator.standard_normal((BATCH, 1)),
            (generator.random((BATCH, 1)) < 0.95).astype(np.float64),
            generator.standard_normal((BATCH, act_dim)),
        )

    drawn = [draw() for _ in range(steps)]
    double = learner.cast("float64")
    values = reference.learn(double).forward(learner.critics[0], drawn[0].obs, drawn[0].action)
    scale = (1 - DISCOUNT) * float(np.sqrt(np.square(values).mean())) or 1.0
    return [batch._replace(reward=batch.reward * scale).cast("float32") for batch in drawn]
