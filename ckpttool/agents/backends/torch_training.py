"""Training in PyTorch: gradients by autograd, steps by torch.optim.Adam with the state handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from ckpttool.agents.backends.torch import LAYERS
from ckpttool.agents.execute import assemble, choose
from ckpttool.agents.network import Layer, Network
from ckpttool.agents.training.learner import TRAINED, Adam, Learner


class TorchEngine:
    """A learner as parameters of PyTorch on the CPU."""

    def __init__(self, learner: Learner) -> None:
        self._nets = {title: _Net(network) for title, network in learner.networks.items()}
        self._actor_adam = _Stepper(learner.actor_adam, self._nets["actor"].parameters)
        critics = chain.from_iterable(self._nets[title].parameters for title in learner.critics)
        self._critic_adam = _Stepper(learner.critic_adam, list(critics))

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        with torch.no_grad():
            found: np.ndarray = self._nets[title](*map(torch.from_numpy, inputs)).numpy()
        return found

    def regress(self, critics: Sequence[str], inputs: Sequence[np.ndarray], target: np.ndarray) -> None:
        """Make one step of the critics' optimizer on the sum of their mean squared errors."""
        given, wanted = [torch.from_numpy(array) for array in inputs], torch.from_numpy(target)
        losses = [torch.nn.functional.mse_loss(self._nets[title](*given), wanted) for title in critics]
        self._critic_adam.step(torch.stack(losses).sum())

    def improve(self, actor: str, critic: str, obs: np.ndarray) -> None:
        """Make one step of the actor's optimizer towards actions of higher value."""
        given = torch.from_numpy(obs)
        self._actor_adam.step(-self._nets[critic](given, self._nets[actor](given)).mean())

    @torch.no_grad()
    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the slow network the part `tau` of the way to the fast one."""
        for kept, value in zip(self._nets[slow].parameters, self._nets[fast].parameters, strict=True):
            kept.lerp_(value, tau)

    def weights(self, title: str) -> list[np.ndarray]:
        """Return copies of a network's trained arrays, kernels [in, out]."""
        return [_turned(p.detach().numpy()).copy() for p in self._nets[title].parameters]


class _Net:
    """A network whose trained arrays are parameters, as `nn.Linear` has them: weight [out, in]."""

    def __init__(self, network: Network) -> None:
        self.parameters: list[torch.Tensor] = []
        self._run = assemble(network, self._lower)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self._run(inputs)[0]

    def _lower(self, layer: Layer) -> Callable[..., torch.Tensor]:
        put = self._parameter if type(layer) in TRAINED else torch.tensor
        return choose(LAYERS, type(layer), "torch backend")(layer, put)

    def _parameter(self, array: np.ndarray) -> torch.Tensor:
        self.parameters.append(torch.tensor(array, requires_grad=True))
        return self.parameters[-1]


class _Stepper:
    """One torch.optim.Adam; a group of parameters for each weight decay among them."""

    def __init__(self, adam: Adam, parameters: Sequence[torch.Tensor]) -> None:
        self._adam = adam
        self._count = adam.step
        groups = [
            {"params": [p for p, l2 in zip(parameters, adam.l2, strict=True) if l2 == decay]}
            | {"weight_decay": decay or adam.decoupled}
            for decay in dict.fromkeys(adam.l2)
        ]
        kind = torch.optim.AdamW if adam.decoupled else torch.optim.Adam
        self._optimizer = kind(
            groups,
            lr=adam.learning_rate,
            betas=(adam.beta_1, adam.beta_2),
            eps=adam.epsilon,
            amsgrad=bool(adam.vhat),
        )
        moments = {"exp_avg": adam.m, "exp_avg_sq": adam.v, "max_exp_avg_sq": adam.vhat}
        for number, parameter in enumerate(parameters):
            state = {name: torch.tensor(_turned(held[number])) for name, held in moments.items() if held}
            self._optimizer.state[parameter] = {"step": torch.tensor(float(adam.step)), **state}

    def step(self, loss: torch.Tensor) -> None:
        """Make one update against the gradient of the loss."""
        self._count += 1
        for group in self._optimizer.param_groups:
            # torch adds one number at every step: another convention's needs another number each time.
            group["eps"] = self._adam.epsilon_at(self._count, corrected=True)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
        self._optimizer.step()


def _turned(array: np.ndarray) -> np.ndarray:
    """Return a kernel as a weight, or back: all trained arrays of two axes are of dense layers."""
    return array.T if array.ndim == 2 else array
