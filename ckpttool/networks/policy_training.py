"""Train agents: updates of TD3, DDPG, SAC, PPO and A2C, with the state of a checkpoint's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.optimizers import FAMILIES, OptimizerFamily, epsilon_factor
from ckpttool.networks import network as serial
from ckpttool.networks.network import TRAINED, Dense, Layer, Network

Dtype = Literal["float32", "float64"]
Arrays = tuple[np.ndarray, ...]


def trained_arrays(network: Network) -> list[np.ndarray]:
    """Return a network's trained arrays: node by node, within a node in the order of TRAINED."""
    return [
        array for node in network.nodes for array, trained in layer_arrays(node.layer).values() if trained
    ]


def layer_arrays(layer: Layer) -> dict[str, tuple[np.ndarray, bool]]:
    """Return a layer's arrays by field, in the order in which backends take them; true for trained ones."""
    names = () if isinstance(layer, Dense) and layer.constant else TRAINED.get(type(layer), ())
    return {name: (array, name in names) for name, array in serial.field_arrays(layer).items()}


def without_values(network: Network) -> Network:
    """Return the network with empty arrays of the same shapes, for modules that hold the numbers."""
    return network.with_arrays(lambda _, array: np.broadcast_to(np.zeros((), array.dtype), array.shape))


# Constants of the TD3 authors' code (TD3.py and main.py); noise is in units of half the action range.
DISCOUNT = 0.99
TAU = 0.005
POLICY_NOISE = 0.2
NOISE_CLIP = 0.5
POLICY_DELAY = 2

Weights = dict[str, list[np.ndarray]]


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """Weights by title after each network's first update, at step `moved`, and after all `steps`.

    Updates count from 1. A network that was never updated is absent.
    """

    steps: int
    moved: dict[str, int]
    first: Weights
    last: Weights


SAC, PPO, A2C, TD3, DDPG = "SAC", "PPO", "A2C", "TD3", "DDPG"
TEMPERATURE, LOG_STD = "temperature", "actor/log_std"


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerSetup:
    """One optimizer: family, settings and state by canonical names (core/optimizers.py).

    `titles` are the networks and vectors that it trains, `slots` one array per trained array in that order,
    and `buffer` never includes the learning rate. `corrected` is Adam's place of epsilon (see
    `epsilon_factor`). Other optimizers add it where Keras does.
    `l2` is the factor of each array in the gradient (`+ l2 * w`).
    """

    family: str
    titles: tuple[str, ...]
    settings: Mapping[str, float]
    step: int
    slots: Mapping[str, Arrays]
    l2: tuple[float, ...]
    corrected: bool = True

    @property
    def row(self) -> OptimizerFamily:
        """The row of the table of optimizers."""
        return next(family for family in FAMILIES if family.name == self.family)

    @property
    def by_table(self) -> bool:
        """Whether PyTorch's class adds epsilon elsewhere, so that the table's rule is used instead of it."""
        return bool(self.row.epsilon) and self.family != "Adam"

    @property
    def choices(self) -> dict[str, float | bool]:
        """The settings, with those that the slots show."""
        return {**self.settings, **self.row.flags(self.slots)}

    def cast(self, dtype: Dtype) -> OptimizerSetup:
        """Return the same optimizer with its state in `dtype`."""
        slots = {name: tuple(array.astype(dtype) for array in arrays) for name, arrays in self.slots.items()}
        return replace(self, slots=slots)

    def epsilon_at(self, step: int, *, corrected: bool) -> float:
        """Return epsilon at the update number `step`, from 1, for Adam's root in that convention."""
        epsilon = self.settings.get("epsilon", 0.0)
        if self.family != "Adam" or self.corrected == corrected:
            return epsilon
        return epsilon * epsilon_factor(self.settings["beta_2"], step, corrected=corrected)


@dataclass(frozen=True, slots=True, eq=False)
class Learner:
    """An agent in training: networks and vectors by title; critics and their targets in the same order.

    The actor's output is a mean [batch, act_dim], followed by its log standard deviation unless that is
    the vector LOG_STD; that of TD3 and DDPG is the action. `low` and `high` [act_dim] bound their actions and
    SAC's. `updates` is the number of updates so far, which delays TD3's actor.
    """

    algorithm: str
    networks: Mapping[str, Network]
    vectors: Mapping[str, np.ndarray]
    critics: tuple[str, ...]
    slow: Mapping[str, str]
    optimizers: Mapping[str, OptimizerSetup]
    low: np.ndarray
    high: np.ndarray
    alpha: float = 0.2
    updates: int = 0

    def cast(self, dtype: Dtype) -> Learner:
        """Return the same learner with every array in `dtype`."""
        return replace(
            self,
            networks={title: network.cast(dtype) for title, network in self.networks.items()},
            vectors={title: array.astype(dtype) for title, array in self.vectors.items()},
            optimizers={name: optimizer.cast(dtype) for name, optimizer in self.optimizers.items()},
            low=self.low.astype(dtype),
            high=self.high.astype(dtype),
        )

    def arrays(self, title: str) -> list[np.ndarray]:
        """Return the trained arrays of a network or vector."""
        return [self.vectors[title]] if title in self.vectors else trained_arrays(self.networks[title])


class TrainingBatch(NamedTuple):
    """Arrays of one update by name, [batch, n] each, all in one float type."""

    arrays: Mapping[str, np.ndarray]

    def cast(self, dtype: Dtype) -> TrainingBatch:
        """Return the same batch with every array in `dtype`."""
        return TrainingBatch({name: array.astype(dtype) for name, array in self.arrays.items()})


class GradientEngine:
    """A learner on a backend; arrays are exchanged in the learner's float type, kernels [in, out]."""

    _rules: Mapping[str, Any]

    def __init__(self, learner: Learner) -> None:
        self._optimizers, self._dtype = learner.optimizers, learner.low.dtype
        self._sums: dict[str, list[np.ndarray]] = {}

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        raise NotImplementedError

    def differentiate(
        self, title: str, inputs: Sequence[np.ndarray], gradient: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the gradients of a network's inputs and of its trained arrays, for one of its output."""
        raise NotImplementedError

    def apply(self, optimizer: str, gradients: Sequence[np.ndarray]) -> None:
        """Make one update of an optimizer's arrays."""
        self._rules[optimizer].step(gradients)

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the target network by the fraction `tau` towards the online one."""
        raise NotImplementedError

    def weights(self, title: str) -> list[np.ndarray]:
        """Return copies of the trained arrays of a network or vector."""
        raise NotImplementedError

    def backward(
        self, title: str, inputs: Sequence[np.ndarray], gradient: np.ndarray, *, train: bool = True
    ) -> list[np.ndarray]:
        """Return the gradients of the inputs; with `train`, add those of the weights to the network's."""
        of_inputs, of_weights = self.differentiate(title, inputs, gradient)
        if train:
            self.push(title, *of_weights)
        return of_inputs

    def push(self, title: str, *gradients: np.ndarray) -> None:
        """Add to the gradients of a network or vector."""
        kept = self._sums.get(title, [0.0] * len(gradients))
        pairs = zip(kept, gradients, strict=True)
        self._sums[title] = [np.asarray(x + y, self._dtype) for x, y in pairs]

    def step(self, optimizer: str, limit: float | None) -> None:
        """Update the weights by the sums of gradients, whose norm `limit` bounds, and clear them."""
        setup, number = self._optimizers[optimizer], self._dtype.type
        gradients = [gradient for title in setup.titles for gradient in self._sums.pop(title)]
        weights = [weight for title in setup.titles for weight in self.weights(title)]
        factor = number(clip_factor(gradients, limit))
        rows = zip(gradients, weights, setup.l2, strict=True)
        self.apply(optimizer, [g * factor + number(decay) * weight for g, weight, decay in rows])


_MOST_LOG_STD, _LEAST_LOG_STD = 2.0, -20.0
_SQUASH = 1e-6
_CLIP = 0.2
_VALUE_FACTOR = 0.5
MAX_NORM = 0.5
_LOG_TWO_PI = math.log(2 * math.pi)


class _SquashedSample(NamedTuple):
    """Actions of a squashed Gaussian: before bounds, log probability [batch, 1], and what made them."""

    tanh: np.ndarray
    log_prob: np.ndarray
    std: np.ndarray
    free: np.ndarray
    noise: np.ndarray


def _sample(output: np.ndarray, noise: np.ndarray) -> _SquashedSample:
    mean, raw = np.split(output, 2, axis=1)
    log_std = np.clip(raw, _LEAST_LOG_STD, _MOST_LOG_STD)
    std = np.exp(log_std)
    tanh = np.tanh(mean + std * noise)
    terms = -0.5 * noise**2 - log_std - 0.5 * _LOG_TWO_PI - np.log(1 - tanh**2 + _SQUASH)
    return _SquashedSample(tanh, terms.sum(axis=1, keepdims=True), std, raw == log_std, noise)


def _smooth_next_action(learner: Learner, action: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return the target policy's next action [batch, act_dim], with TD3's clipped noise for twin critics.

    `drawn` [batch, act_dim] is standard normal.
    """
    if len(learner.critics) < 2:
        return action
    half = (learner.high - learner.low) / 2
    noise = np.clip(drawn * POLICY_NOISE, -NOISE_CLIP, NOISE_CLIP).astype(action.dtype) * half
    next_action: np.ndarray = np.clip(action + noise, learner.low, learner.high)
    return next_action


def update_td3(
    engine: GradientEngine, learner: Learner, batch: TrainingBatch, number: int
) -> tuple[str, ...]:
    """Make the update of TD3, or of DDPG (one critic, no noise) with that number; return what moved."""
    arrays, twin, rows = batch.arrays, len(learner.critics) > 1, len(batch.arrays["obs"])
    output = engine.forward(learner.slow["actor"], arrays["next_obs"])
    action = _smooth_next_action(learner, output, arrays["next_noise"])
    values = [engine.forward(learner.slow[title], arrays["next_obs"], action) for title in learner.critics]
    least = np.minimum.reduce(values)
    target = arrays["reward"] + arrays["not_done"] * least.dtype.type(DISCOUNT) * least
    inputs = (arrays["obs"], arrays["action"])
    for title in learner.critics:
        error = engine.forward(title, *inputs) - target
        engine.backward(title, inputs, error * error.dtype.type(2 / rows))
    engine.step("critic_optimizer", None)
    if twin and number % POLICY_DELAY:
        return learner.critics
    chosen = engine.forward("actor", arrays["obs"])
    better = np.full((rows, 1), -1 / rows, chosen.dtype)
    of_action = engine.backward(learner.critics[0], (arrays["obs"], chosen), better, train=False)[1]
    engine.backward("actor", (arrays["obs"],), of_action)
    engine.step("actor_optimizer", None)
    fast = ("actor", *learner.critics)
    for title in fast:
        engine.follow(learner.slow[title], title, TAU)
    return (*fast, *(learner.slow[title] for title in fast))


def update_sac(engine: GradientEngine, learner: Learner, batch: TrainingBatch, _: int) -> tuple[str, ...]:
    """Update temperature, critics, actor and targets; return the titles of what moved."""
    arrays = batch.arrays
    half, middle = (learner.high - learner.low) / 2, (learner.high + learner.low) / 2
    output = engine.forward("actor", arrays["obs"])
    drawn = _sample(output, arrays["noise"])
    learned = TEMPERATURE in learner.vectors
    alpha = np.exp(engine.weights(TEMPERATURE)[0]) if learned else output.dtype.type(learner.alpha)
    moved = ["actor", *learner.critics, *(learner.slow[title] for title in learner.critics)]
    if learned:
        engine.push(TEMPERATURE, -(drawn.log_prob - len(half)).mean(axis=0))
        engine.step("temperature_optimizer", None)
        moved.append(TEMPERATURE)
    after = _sample(engine.forward("actor", arrays["next_obs"]), arrays["next_noise"])
    action = middle + half * after.tanh
    values = [engine.forward(learner.slow[title], arrays["next_obs"], action) for title in learner.critics]
    least = np.minimum.reduce(values) - alpha * after.log_prob
    target = arrays["reward"] + arrays["not_done"] * output.dtype.type(DISCOUNT) * least
    inputs = (arrays["obs"], arrays["action"])
    for title in learner.critics:
        error = engine.forward(title, *inputs) - target
        engine.backward(title, inputs, error / len(error))
    engine.step("critic_optimizer", None)
    _update_squashed_actor(engine, learner, arrays["obs"], drawn, (middle, half, alpha))
    for title in learner.critics:
        engine.follow(learner.slow[title], title, TAU)
    return tuple(moved)


def _update_squashed_actor(
    engine: GradientEngine,
    learner: Learner,
    obs: np.ndarray,
    drawn: _SquashedSample,
    scales: tuple[np.ndarray, np.ndarray, Any],
) -> None:
    """Update the actor on the mean of alpha * log probability - least value."""
    middle, half, alpha = scales
    inputs = (obs, middle + half * drawn.tanh)
    values = [engine.forward(title, *inputs) for title in learner.critics]
    least = np.argmin(np.stack(values), axis=0)
    of_action = np.zeros_like(drawn.tanh)
    for number, title in enumerate(learner.critics):
        chosen = -(least == number).astype(of_action.dtype) / len(obs)
        of_action = of_action + engine.backward(title, inputs, chosen, train=False)[1]
    of_log_prob = alpha / len(obs)
    squash = 1 - drawn.tanh**2
    of_tanh = half * of_action + of_log_prob * 2 * drawn.tanh / (squash + _SQUASH)
    of_sum = of_tanh * squash
    of_log_std = (of_sum * drawn.std * drawn.noise - of_log_prob) * drawn.free
    gradient = np.concatenate([of_sum, of_log_std], axis=1).astype(obs.dtype)
    engine.backward("actor", (obs,), gradient)
    engine.step("actor_optimizer", None)


def update_actor_critic(
    engine: GradientEngine, learner: Learner, batch: TrainingBatch, _: int
) -> tuple[str, ...]:
    """Update policy and value by PPO's or A2C's loss; return the titles of what moved."""
    arrays, rows = batch.arrays, len(batch.arrays["obs"])
    output = engine.forward("actor", arrays["obs"])
    apart = LOG_STD in learner.vectors
    mean, log_std = (output, engine.weights(LOG_STD)[0]) if apart else np.split(output, 2, axis=1)
    unit = (arrays["action"] - mean) / np.exp(log_std)
    advantage = arrays["advantage"]
    if learner.algorithm == PPO:
        terms = -0.5 * unit**2 - log_std - 0.5 * _LOG_TWO_PI
        ratio = np.exp(terms.sum(axis=1, keepdims=True) - arrays["old_log_prob"])
        advantage = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
        clipped = advantage * np.clip(ratio, 1 - _CLIP, 1 + _CLIP)
        of_log_prob = -advantage * ratio * (advantage * ratio <= clipped) / rows
    else:
        of_log_prob = -advantage / rows
    of_mean, of_log_std = of_log_prob * unit / np.exp(log_std), of_log_prob * (unit**2 - 1)
    if apart:
        engine.push(LOG_STD, of_log_std.sum(axis=0))
    gradient = of_mean if apart else np.concatenate([of_mean, of_log_std], axis=1)
    engine.backward("actor", (arrays["obs"],), gradient.astype(output.dtype))
    error = engine.forward("value", arrays["obs"]) - arrays["returns"]
    engine.backward("value", (arrays["obs"],), error * output.dtype.type(2 * _VALUE_FACTOR / rows))
    for name in learner.optimizers:
        engine.step(name, MAX_NORM)
    return ("actor", "value", *learner.vectors)


UPDATES: Mapping[str, Callable[[GradientEngine, Learner, TrainingBatch, int], tuple[str, ...]]] = {
    TD3: update_td3,
    DDPG: update_td3,
    SAC: update_sac,
    PPO: update_actor_critic,
    A2C: update_actor_critic,
}


def train_learner(
    engine: GradientEngine, learner: Learner, batches: Sequence[TrainingBatch]
) -> TrainedWeights:
    """Make one update for each batch.

    Sources: TD3: Fujimoto et al., 2018; stable_baselines3 2.9: sac/sac.py, ppo/ppo.py, a2c/a2c.py (`train`),
    common/distributions.py; SAC: Haarnoja et al., 2018; PPO: Schulman et al., 2017; A2C: Mnih et al., 2016.
    """
    moved: dict[str, int] = {}
    first: Weights = {}
    for number, batch in enumerate(batches, 1):
        for title in UPDATES[learner.algorithm](engine, learner, batch, learner.updates + number):
            if title not in moved:
                moved[title], first[title] = number, engine.weights(title)
    return TrainedWeights(len(batches), moved, first, {title: engine.weights(title) for title in moved})


def clip_factor(gradients: Sequence[np.ndarray], limit: float | None) -> float:
    """Return the factor that bounds the gradients' norm (torch/nn/utils/clip_grad.py)."""
    if limit is None:
        return 1.0
    norm = math.sqrt(sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients))
    return min(1.0, limit / (norm + 1e-6))


class TableOptimizer:
    """One optimizer's update rule from the table (core/optimizers.py), and its state.

    `xp` is a module of array functions, numpy or torch.
    """

    def __init__(self, setup: OptimizerSetup, xp: Any = np) -> None:
        self._setup, self._count, self._xp = setup, setup.step, xp
        self._slots = {name: [*map(xp.asarray, arrays)] for name, arrays in setup.slots.items()}

    def step(self, weights: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """Return the weights after one update."""
        self._count += 1
        rule, known = self._setup.row.update, self._setup.settings
        known = {**known, "epsilon": self._setup.epsilon_at(self._count, corrected=True)}
        decay = known["learning_rate"] * known.get("weight_decay", 0.0)
        updated = []
        for number, (weight, g) in enumerate(zip(weights, gradients, strict=True)):
            slots = {name: arrays[number] for name, arrays in self._slots.items()}
            if rule is None:
                raise UnsupportedError("an optimizer without an update rule", found=self._setup.family)
            updated.append(weight - (decay * weight + rule(self._xp, known, self._count, g, slots)))
            for name, array in slots.items():
                self._slots[name][number] = array
        return updated


def write_records(value: Any, file: Path) -> dict[str, Any]:
    """Write the arrays of records, e.g. a learner and its batches, to an npz; return the rest for JSON."""
    arrays: dict[str, np.ndarray] = {}
    document = {"value": _pack(value, arrays)}
    np.savez(file, allow_pickle=False, **arrays)
    return document


def read_records(document: dict[str, Any], file: Path) -> Any:
    """Return the records passed to `write_records`; lists become tuples."""
    with np.load(file, allow_pickle=False) as arrays:
        return _unpack(document["value"], arrays)


_RECORDS = {kind.__name__: kind for kind in (Learner, OptimizerSetup, TrainingBatch, TrainedWeights)}


def _pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as a JSON document, records and arrays as pairs; add the arrays by number."""
    kind, name = type(value).__name__, str(len(arrays))
    if isinstance(value, np.ndarray):
        arrays[name] = value
        return {"array": name}
    if isinstance(value, Network):
        return {"network": serial.network_to_document(value, arrays, f"{name}/")}
    if kind in _RECORDS:
        # Of dataclasses and NamedTuples: the names of the fields.
        return {kind: [_pack(getattr(value, name), arrays) for name in type(value).__match_args__]}
    if isinstance(value, Mapping):
        return {"mapping": [[key, _pack(item, arrays)] for key, item in value.items()]}
    return [_pack(item, arrays) for item in value] if isinstance(value, list | tuple) else value


def _unpack(document: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the value of a document; lists become tuples."""
    match document:
        case {"array": name}:
            return arrays[name]
        case {"network": network}:
            return serial.network_from_document(network, arrays)
        case {"mapping": items}:
            return {key: _unpack(item, arrays) for key, item in items}
        case dict():
            ((kind, values),) = document.items()
            return _RECORDS[kind](*(_unpack(value, arrays) for value in values))
        case list():
            return tuple(_unpack(item, arrays) for item in document)
    return document
