"""Both agents continue training on the same batches, and stay together: this verifies optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.evaluation.agent_networks import agent_network_settings
from ckpttool.evaluation.restore import Agent
from ckpttool.libraries import optimizer_settings
from ckpttool.networks import numpy_backend
from ckpttool.networks.policy_training import Dtype, Learner, TrainedWeights, TrainingBatch, train_learner
from ckpttool.networks.worker import Worker
from ckpttool.verification import policy_training
from ckpttool.verification.tolerances import BOUNDS, OWN_ERROR, relative_distance

# The bounds are relative to the length of A's own update, pooled over a network. A's own rounding may exceed
# them: B may then be OWN_ERROR times as far off as A, but at most a hundred bounds. Other mapping errors are
# far larger.
MOST = 100.0


@dataclass(frozen=True, slots=True)
class UpdateComparison:
    """How far one network moved: |update of A - update of B| / |update of A|, after `step` updates.

    `error_a` and `error_b` are the same for each side against the float64 reference, `tensors` of A
    and B for each trained tensor in order. An update of B where A makes none, or at another step, is
    infinitely wrong.
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
        return {**{name: getattr(self, name) for name in self.__slots__}, "tensors": list(self.tensors)}


@dataclass(frozen=True, slots=True)
class TrainStepComparison:
    """Both learners after equal updates: of every network the first update, and all of them."""

    algorithm: str
    steps: int
    moved: tuple[UpdateComparison, ...]
    missing: tuple[str, ...] = policy_training.MISSING
    differences: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Return whether every network moved as in A, and settings and state of the optimizers agree."""
        return all(update.within for update in self.moved) and not self.differences

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "algorithm": self.algorithm,
            "steps": self.steps,
            "batch": policy_training.BATCH,
            "bounds": dict(BOUNDS),
            "updates": [update.document() for update in self.moved],
            "differences": list(self.differences),
            "missing": list(self.missing),
        }


def compare_train_steps(
    learners: tuple[Learner, Learner], batches: Sequence[TrainingBatch], workers: Sequence[Worker]
) -> TrainStepComparison:
    """Train both sides on the batches, each in its worker and both float types, and A in float64."""
    first = learners[0]
    double = first.cast("float64")
    reference = train_learner(
        numpy_backend.learn(double), double, [batch.cast("float64") for batch in batches]
    )
    exact = _updates(first, reference)
    moved: list[UpdateComparison] = []
    for dtype in get_args(Dtype):
        typed = [batch.cast(dtype) for batch in batches]
        sides = zip(learners, workers, strict=True)
        a, b = (_updates(learner, worker.train(learner.cast(dtype), typed)) for learner, worker in sides)
        moved += [_compare_updates(key, dtype, (a, b, exact)) for key in sorted(a.keys() | b.keys())]
    slow = {*first.slow.values()}
    trained = [array for (title, _), arrays in exact.items() if title not in slow for array in arrays]
    if all(update.within for update in moved) and not any(array.any() for array in trained):
        raise UsageError(
            "the optimizers of A and B move no weight, so that their training steps show nothing",
            hint="compare checkpoints from before the learning rate reached 0",
        )
    different = policy_training.compare_states(*learners)
    return TrainStepComparison(first.algorithm, len(batches), tuple(moved), differences=different)


# By title and training step: how far each tensor of the network had moved, in float64.
_Updates = dict[tuple[str, int], list[np.ndarray]]


def _updates(learner: Learner, after: TrainedWeights) -> _Updates:
    updates: _Updates = {}
    for title, step in after.moved.items():
        start = learner.arrays(title)
        # With only one step, the first update is the last one.
        for number, weights in ((step, after.first[title]), (after.steps, after.last[title])):
            pairs = zip(weights, start, strict=True)
            updates[title, number] = [there.astype(np.float64) - here for there, here in pairs]
    return updates


def _compare_updates(
    key: tuple[str, int], dtype: Dtype, updates: tuple[_Updates, _Updates, _Updates]
) -> UpdateComparison:
    a, b, exact = (update.get(key) for update in updates)
    if a is None or b is None or exact is None or [x.shape for x in a] != [x.shape for x in b]:
        return UpdateComparison(key[0], dtype, key[1], np.inf, np.inf, np.inf, (), within=False)
    relative, error_a, error_b = (
        _relative_distance(a, b),
        _relative_distance(exact, a),
        _relative_distance(exact, b),
    )
    bound = BOUNDS[dtype]
    allowed = max(bound, min(OWN_ERROR * error_a, MOST * bound))
    tensors = tuple(_relative_distance([x], [y]) for x, y in zip(a, b, strict=True))
    return UpdateComparison(
        key[0], dtype, key[1], relative, error_a, error_b, tensors, within=relative <= allowed
    )


def _relative_distance(right: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Return |right - other| / |right| of all arrays; 0 if neither moved."""
    pair = (np.concatenate([np.zeros(0), *(x.reshape(-1) for x in arrays)]) for arrays in (right, other))
    return relative_distance(*pair)


def compare_training(
    a: Agent, b: Agent, steps: int, workers: list[Worker], assumed: list[str]
) -> tuple[TrainStepComparison, list[str]]:
    """Train both sides; return results and notes.

    Args:
        a: the source, with the optimizer options that its conversion to `b` stated.
        b: its conversion.
        steps: updates on the same batches.
        workers: one process for each side.
        assumed: gets the assumptions.
    """
    prepared, notes = [], []
    for side, agent, other in (("A", a, b), ("B", b, a)):
        settings, _ = agent_network_settings(agent, other)
        reader = policy_training.LearnerReader(agent, settings)
        prepared.append(reader.learner())
        assumed += [f"{side}: {sentence}" for sentence in reader.assumed]
        notes += [f"{side}: {note}" for note in reader.notes]
        if any(optimizer.family == "Adam" for optimizer in prepared[-1].optimizers.values()):
            notes += _epsilon_notes(side, agent)
    if prepared[0].algorithm != prepared[1].algorithm:
        raise UnsupportedError(
            "the two agents are trained by different algorithms",
            file=b.checkpoint.path,
            expected=prepared[0].algorithm,
            found=prepared[1].algorithm,
        )
    batches = policy_training.make_batches(prepared[0], steps, a.known.obs_norm)
    return compare_train_steps((prepared[0], prepared[1]), batches, workers), notes


def _epsilon_notes(side: str, agent: Agent) -> Iterator[str]:
    stands = optimizer_settings.epsilon_placement(agent.sidecar, agent.binding.layout)
    if stands != optimizer_settings.epsilon_placement(None, agent.binding.layout):
        yield (
            f"{side}: epsilon is added to the {stands} second moment, as in training; "
            f"{agent.framework} adds it elsewhere, so a different value was passed to it at every step"
        )
