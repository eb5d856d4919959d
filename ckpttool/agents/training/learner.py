"""What training goes on from: an actor, its critics, their slow copies and their optimizers, as arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from ckpttool.agents.network import Dense, LayerNorm, Network

# The trained arrays of a layer, in the order in which both frameworks list them.
TRAINED: Mapping[type, tuple[str, ...]] = {Dense: ("kernel", "bias"), LayerNorm: ("scale", "offset")}
Dtype = Literal["float32", "float64"]
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Adam:
    """Adam's settings, its count of updates and its moments, one for each trained array in their order.

    `corrected` says where epsilon stands: added to the root of the bias-corrected second moment
    (torch/optim/adam.py), or to that of the uncorrected one (keras/src/optimizers/adam.py). `vhat` is empty
    without AMSGrad. `l2` is what a gradient gets of each array (`+ l2 * w`, torch's weight_decay),
    `decoupled` AdamW's decay, which multiplies the learning rate.
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

    def cast(self, dtype: Dtype) -> Adam:
        """Return the same state with every moment in `dtype`."""
        m, v, vhat = (tuple(a.astype(dtype) for a in each) for each in (self.m, self.v, self.vhat))
        return replace(self, m=m, v=v, vhat=vhat)

    def epsilon_at(self, step: int, *, corrected: bool) -> float:
        """Return what to add to the root in that convention at the update number `step`, from 1.

        It changes from one update to the next if the convention is not the optimizer's own.
        """
        if self.corrected == corrected:
            return self.epsilon
        factor = math.sqrt(1 - self.beta_2**step)
        return self.epsilon / factor if corrected else self.epsilon * factor


@dataclass(frozen=True, slots=True, eq=False)
class Learner:
    """An agent in training: networks by title, the order of the critics the same online and slow.

    `low` and `high` [act_dim] bound the actions; `updates` counts those already made.
    """

    networks: Mapping[str, Network]
    critics: tuple[str, ...]
    slow: Mapping[str, str]
    actor_adam: Adam
    critic_adam: Adam
    low: np.ndarray
    high: np.ndarray
    updates: int

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


class Batch(NamedTuple):
    """Transitions, and the noise [batch, act_dim] that smooths the next actions; all in one float type."""

    obs: np.ndarray  # [batch, obs_dim]
    action: np.ndarray  # [batch, act_dim]
    next_obs: np.ndarray  # [batch, obs_dim]
    reward: np.ndarray  # [batch, 1]
    not_done: np.ndarray  # [batch, 1]
    noise: np.ndarray  # [batch, act_dim], standard normal

    def cast(self, dtype: Dtype) -> Batch:
        """Return the same batch with every array in `dtype`."""
        return Batch(*(array.astype(dtype) for array in self))


def trained(network: Network) -> list[np.ndarray]:
    """Return a network's trained arrays: node by node, in each in the order of TRAINED."""
    return [
        array
        for node in network.nodes
        for name in TRAINED.get(type(node.layer), ())
        if (array := getattr(node.layer, name)) is not None
    ]
