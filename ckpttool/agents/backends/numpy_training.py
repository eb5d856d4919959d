"""Training in numpy: the float64 reference of `verify --train-step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpttool.agents.backends.numpy_gradients import Values, gradients, values_of
from ckpttool.agents.network import Network
from ckpttool.agents.training.learner import TRAINED, Adam, Learner, trained


class NumpyEngine:
    """A learner as numpy arrays."""

    def __init__(self, learner: Learner) -> None:
        self._nets = dict(learner.networks)
        self._actor_adam = _Stepper(learner.actor_adam)
        self._critic_adam = _Stepper(learner.critic_adam)

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        net = self._nets[title]
        return values_of(net, inputs)[net.output]

    def regress(self, critics: Sequence[str], inputs: Sequence[np.ndarray], target: np.ndarray) -> None:
        """Make one step of the critics' optimizer on the sum of their mean squared errors."""
        found: list[np.ndarray] = []
        for title in critics:
            net = self._nets[title]
            values = values_of(net, inputs)
            error = values[net.output] - target
            found += gradients(net, values, error * (2 / error.size))[1]
        self._step(self._critic_adam, critics, found)

    def improve(self, actor: str, critic: str, obs: np.ndarray) -> None:
        """Make one step of the actor's optimizer towards actions of higher value."""
        policy, judge = self._nets[actor], self._nets[critic]
        acted = values_of(policy, [obs])
        judged = values_of(judge, [obs, acted[policy.output]])
        down = np.full_like(judged[judge.output], -1 / judged[judge.output].size)
        (_, of_action), _ = gradients(judge, judged, down)
        self._step(self._actor_adam, [actor], gradients(policy, acted, of_action)[1])

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the slow network the part `tau` of the way to the fast one."""
        pairs = zip(self.weights(slow), self.weights(fast), strict=True)
        self._nets[slow] = _with(self._nets[slow], [kept + tau * (value - kept) for kept, value in pairs])

    def weights(self, title: str) -> list[np.ndarray]:
        """Return a network's trained arrays."""
        return trained(self._nets[title])

    def _step(self, adam: _Stepper, titles: Sequence[str], found: list[np.ndarray]) -> None:
        counts = [len(self.weights(title)) for title in titles]
        stepped = adam.step([w for title in titles for w in self.weights(title)], found)
        for title, count in zip(titles, counts, strict=True):
            self._nets[title] = _with(self._nets[title], stepped[:count])
            del stepped[:count]


class _Stepper:
    """Adam as both frameworks' sources define it, epsilon where its convention puts it."""

    def __init__(self, adam: Adam) -> None:
        self._adam = adam
        self._count = adam.step
        self._m, self._v, self._vhat = list(adam.m), list(adam.v), list(adam.vhat)

    def step(self, weights: Values, found: Values) -> list[np.ndarray]:
        """Return the weights after one update by the gradients found."""
        adam = self._adam
        self._count += 1
        first, second = (1 - beta**self._count for beta in (adam.beta_1, adam.beta_2))
        epsilon = adam.epsilon_at(self._count, corrected=True)
        stepped = []
        for n, (weight, gradient) in enumerate(zip(weights, found, strict=True)):
            kept = weight * (1 - adam.learning_rate * adam.decoupled)
            g = gradient + adam.l2[n] * weight
            self._m[n] = self._m[n] + (g - self._m[n]) * (1 - adam.beta_1)
            self._v[n] = self._v[n] + (g * g - self._v[n]) * (1 - adam.beta_2)
            v = self._v[n]
            if self._vhat:
                v = self._vhat[n] = np.maximum(self._vhat[n], v)
            root = np.sqrt(v / second) + epsilon
            stepped.append(kept - adam.learning_rate * (self._m[n] / first) / root)
        return stepped


def _with(network: Network, weights: list[np.ndarray]) -> Network:
    """Return the network with other trained arrays."""
    left = iter(weights)
    nodes = []
    for node in network.nodes:
        names = TRAINED.get(type(node.layer), ())
        new: dict[str, Any] = {n: next(left) for n in names if getattr(node.layer, n) is not None}
        nodes.append(replace(node, layer=replace(node.layer, **new)) if new else node)
    return replace(network, nodes=tuple(nodes))
