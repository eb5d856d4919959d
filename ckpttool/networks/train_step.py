"""Run one training step of TD3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from ckpttool.networks import network as serial
from ckpttool.networks.network import Dense, LayerNorm, Network

# Training state: an actor, its critics, their targets and their optimizers, as arrays.

# Trained arrays of a layer, in the order of both frameworks.
TRAINED: Mapping[type, tuple[str, ...]] = {Dense: ("kernel", "bias"), LayerNorm: ("scale", "offset")}
Dtype = Literal["float32", "float64"]
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AdamState:
    """Adam's settings, update count and moments, one per trained array in order.

    `corrected` is the position of epsilon: added to the root of the bias-corrected second moment
    (torch/optim/adam.py), or to that of the uncorrected one (keras/src/optimizers/adam.py). `vhat` is
    empty without AMSGrad. `l2` is the factor of each array in the gradient (`+ l2 * w`, torch's
    weight_decay), `decoupled` AdamW's decay, which multiplies the learning rate.
    """

    learning_rate: float
    beta_1: float
    beta_2: float
    epsilon: float
    corrected: bool
    step: int
    m: Arrays
    v: Arrays
    vhat: Arrays = ()
    l2: tuple[float, ...] = ()
    decoupled: float = 0.0

    def cast(self, dtype: Dtype) -> AdamState:
        """Return the same state with every moment in `dtype`."""
        m, v, vhat = (tuple(a.astype(dtype) for a in each) for each in (self.m, self.v, self.vhat))
        return replace(self, m=m, v=v, vhat=vhat)

    def epsilon_at(self, step: int, *, corrected: bool) -> float:
        """Return epsilon for the root in that convention at the update number `step`, from 1.

        It changes from one update to the next if the convention is not the optimizer's own.
        """
        if self.corrected == corrected:
            return self.epsilon
        factor = math.sqrt(1 - self.beta_2**step)
        return self.epsilon / factor if corrected else self.epsilon * factor


@dataclass(frozen=True, slots=True, eq=False)
class Learner:
    """An agent in training: networks by title; online and target critics are in the same order.

    `low` and `high` [act_dim] bound the actions; `updates` is the number of updates so far.
    """

    networks: Mapping[str, Network]
    critics: tuple[str, ...]
    slow: Mapping[str, str]
    actor_adam: AdamState
    critic_adam: AdamState
    low: np.ndarray
    high: np.ndarray
    updates: int

    def arrays(self, title: str) -> list[np.ndarray]:
        """Return a network's trained arrays."""
        return trained_arrays(self.networks[title])

    def cast(self, dtype: Dtype) -> Learner:
        """Return the same learner with every array in `dtype`."""
        return replace(
            self,
            networks={title: network.cast(dtype) for title, network in self.networks.items()},
            actor_adam=self.actor_adam.cast(dtype),
            critic_adam=self.critic_adam.cast(dtype),
            low=self.low.astype(dtype),
            high=self.high.astype(dtype),
        )


class TransitionBatch(NamedTuple):
    """Transitions and the smoothing noise [batch, act_dim] of next actions; all in one float type."""

    obs: np.ndarray  # [batch, obs_dim]
    action: np.ndarray  # [batch, act_dim]
    next_obs: np.ndarray  # [batch, obs_dim]
    reward: np.ndarray  # [batch, 1]
    not_done: np.ndarray  # [batch, 1]
    noise: np.ndarray  # [batch, act_dim], standard normal

    def cast(self, dtype: Dtype) -> TransitionBatch:
        """Return the same batch with every array in `dtype`."""
        return TransitionBatch(*(array.astype(dtype) for array in self))


def trained_arrays(network: Network) -> list[np.ndarray]:
    """Return a network's trained arrays: node by node, within a node in the order of TRAINED."""
    return [
        array
        for node in network.nodes
        for name in TRAINED.get(type(node.layer), ())
        if (array := getattr(node.layer, name)) is not None
    ]


# TD3's update (Fujimoto et al., 2018), and DDPG's, which is the same with one critic and no noise.
#
# The algorithm is implemented once, here. The parts that differ between frameworks are behind Engine: forward
# passes, losses, gradients and the optimizers' steps.

# Constants of the TD3 authors' code (TD3.py and main.py); noise is in units of half the action range.
DISCOUNT = 0.99
TAU = 0.005
POLICY_NOISE = 0.2
NOISE_CLIP = 0.5
POLICY_DELAY = 2

Weights = dict[str, list[np.ndarray]]


class TrainingEngine(Protocol):
    """A learner on a backend, by network title; arrays are exchanged in the learner's float type."""

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        ...

    def regress(self, critics: Sequence[str], inputs: Sequence[np.ndarray], target: np.ndarray) -> None:
        """Update the critics once on the sum of their mean squared errors."""
        ...

    def improve(self, actor: str, critic: str, obs: np.ndarray) -> None:
        """Update the actor once towards actions of higher value."""
        ...

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the target network by the fraction `tau` towards the online one."""
        ...

    def weights(self, title: str) -> list[np.ndarray]:
        """Return a network's trained arrays, in the order of `learner.trained`."""
        ...


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """Weights by title after each network's first update, at step `moved`, and after all `steps`.

    Updates count from 1. A network that was never updated is absent.
    """

    steps: int
    moved: dict[str, int]
    first: Weights
    last: Weights


def train_learner(
    engine: TrainingEngine, learner: Learner, batches: Sequence[TransitionBatch]
) -> TrainedWeights:
    """Make one update for each batch."""
    moved: dict[str, int] = {}
    first: Weights = {}
    for number, batch in enumerate(batches, 1):
        for title in update_networks(engine, learner, batch, learner.updates + number):
            if title not in moved:
                moved[title], first[title] = number, engine.weights(title)
    return TrainedWeights(len(batches), moved, first, {title: engine.weights(title) for title in moved})


def update_networks(
    engine: TrainingEngine, learner: Learner, batch: TransitionBatch, number: int
) -> tuple[str, ...]:
    """Make the update with that number; return the titles of the updated networks."""
    twin = len(learner.critics) > 1
    action = smooth_next_action(
        learner, engine.forward(learner.slow["actor"], batch.next_obs), batch, twin=twin
    )
    values = [engine.forward(learner.slow[q], batch.next_obs, action) for q in learner.critics]
    least = np.minimum.reduce(values)
    target = batch.reward + batch.not_done * least.dtype.type(DISCOUNT) * least
    engine.regress(learner.critics, (batch.obs, batch.action), target)
    if twin and number % POLICY_DELAY:
        return learner.critics
    engine.improve("actor", learner.critics[0], batch.obs)
    fast = ("actor", *learner.critics)
    for title in fast:
        engine.follow(learner.slow[title], title, TAU)
    return (*fast, *(learner.slow[title] for title in fast))


def smooth_next_action(
    learner: Learner, action: np.ndarray, batch: TransitionBatch, *, twin: bool
) -> np.ndarray:
    """Return the target policy's next action [batch, act_dim], with TD3's clipped noise for twin critics."""
    if not twin:
        return action
    half = (learner.high - learner.low) / 2
    noise = np.clip(batch.noise * POLICY_NOISE, -NOISE_CLIP, NOISE_CLIP).astype(action.dtype) * half
    found: np.ndarray = np.clip(action + noise, learner.low, learner.high)
    return found


# Serialisation of a learner, its batches and results between processes: JSON and npz, no pickles.

_LEARNER, _BATCHES, _TRAINED = "learner.npz", "batches.npz", "trained.npz"
_MOMENTS = ("m", "v", "vhat")


def write_learner(learner: Learner, batches: Sequence[TransitionBatch], folder: Path) -> dict[str, Any]:
    """Write the arrays into the folder; return the rest as a JSON document."""
    arrays: dict[str, np.ndarray] = {"low": learner.low, "high": learner.high}
    document = {
        "networks": {
            title: serial.network_to_document(network, arrays, f"{number}/")
            for number, (title, network) in enumerate(learner.networks.items())
        },
        "critics": list(learner.critics),
        "slow": dict(learner.slow),
        "updates": learner.updates,
        "actor_adam": _write_adam("actor", learner.actor_adam, arrays),
        "critic_adam": _write_adam("critic", learner.critic_adam, arrays),
    }
    np.savez(folder / _LEARNER, allow_pickle=False, **arrays)
    stacked = {name: np.stack([getattr(b, name) for b in batches]) for name in TransitionBatch._fields}
    np.savez(folder / _BATCHES, allow_pickle=False, **stacked)
    return document


def read_learner(document: dict[str, Any], folder: Path) -> tuple[Learner, list[TransitionBatch]]:
    """Return the objects passed to `write`."""
    with np.load(folder / _LEARNER, allow_pickle=False) as arrays:
        learner = Learner(
            networks={
                t: serial.network_from_document(each, arrays) for t, each in document["networks"].items()
            },
            critics=tuple(document["critics"]),
            slow=document["slow"],
            actor_adam=_read_adam("actor", document["actor_adam"], arrays),
            critic_adam=_read_adam("critic", document["critic_adam"], arrays),
            low=arrays["low"],
            high=arrays["high"],
            updates=document["updates"],
        )
    with np.load(folder / _BATCHES, allow_pickle=False) as stacked:
        rows = zip(*(stacked[name] for name in TransitionBatch._fields), strict=True)
        return learner, [TransitionBatch(*row) for row in rows]


def write_trained(trained: TrainedWeights, folder: Path) -> dict[str, Any]:
    """Write the weights into the folder; return the rest as a JSON document."""
    held = {"first": trained.first, "last": trained.last}
    named = {
        f"{when}/{t}/{n}": a for when, by in held.items() for t, w in by.items() for n, a in enumerate(w)
    }
    np.savez(folder / _TRAINED, allow_pickle=False, **named)
    return {"steps": trained.steps, "moved": trained.moved}


def read_trained(document: dict[str, Any], folder: Path) -> TrainedWeights:
    """Return the objects passed to `write_trained`."""
    first: Weights = {title: [] for title in document["moved"]}
    last: Weights = {title: [] for title in document["moved"]}
    with np.load(folder / _TRAINED, allow_pickle=False) as arrays:
        for name in arrays.files:  # in writing order
            when, _, rest = name.partition("/")
            (first if when == "first" else last)[rest.rpartition("/")[0]].append(arrays[name])
    return TrainedWeights(document["steps"], document["moved"], first, last)


def _write_adam(name: str, adam: AdamState, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    held = {moment: getattr(adam, moment) for moment in _MOMENTS}
    arrays |= {f"{name}/{moment}/{n}": a for moment, each in held.items() for n, a in enumerate(each)}
    plain = {field.name: getattr(adam, field.name) for field in fields(adam) if field.name not in held}
    return {**plain, **{moment: len(each) for moment, each in held.items()}}


def _read_adam(name: str, document: dict[str, Any], arrays: Any) -> AdamState:
    held = {m: tuple(arrays[f"{name}/{m}/{n}"] for n in range(document[m])) for m in _MOMENTS}
    return AdamState(**{**document, **held, "l2": tuple(document["l2"])})
