"""What tests of RL libraries' layouts have in common: Adam's state, observations, the actions we make."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import Agent, restore_agent
from ckpttool.libraries import layer_widths
from ckpttool.networks import numpy_backend, policy_network, q_network, value_network


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with the activation between them."""
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    return nn.Sequential(*layers[:-1])


def run(module: Any, *inputs: np.ndarray) -> Any:
    """Return what a module computes of arrays."""
    with torch.no_grad():
        return module(*map(torch.as_tensor, inputs))


def whole(networks: dict[str, Any]) -> Any:
    """Return a module with these modules; dots lead into modules."""
    top = nn.Module()
    for name, network in networks.items():
        *above, last = name.split(".")
        owner = top
        for part in above:
            if not hasattr(owner, part):
                setattr(owner, part, nn.Module())
            owner = getattr(owner, part)
        setattr(owner, last, network)
    return top


def adam(parameters: Iterable[torch.Tensor], step: int = 7) -> dict[str, Any]:
    """Return the state_dict of an Adam over the parameters, as torch.optim.Adam writes it."""
    mine = list(parameters)
    state = {
        number: {
            "step": torch.tensor(float(step)),
            "exp_avg": torch.full_like(tensor, number),
            "exp_avg_sq": torch.full_like(tensor, number + 0.5),
        }
        for number, tensor in enumerate(mine)
    }
    settings = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False}
    return {"state": state, "param_groups": [{**settings, "params": list(range(len(mine)))}]}


def saved(folder: Path, name: str, value: Any) -> str:
    """Save with torch and return the path."""
    folder.mkdir(exist_ok=True, parents=True)
    torch.save(value, folder / name)
    return str(folder / name)


def observations(size: int) -> np.ndarray:
    """Return 120 observations [120, size]: ordinary, large, zero."""
    generator = np.random.default_rng(5)
    ordinary, large = generator.normal(size=(100, size)), 10 * generator.normal(size=(19, size))
    return np.concatenate([ordinary, large, np.zeros((1, size))]).astype("f4")


def as_batch(obs: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(obs)


def opened(path: str, high: float = 1.0) -> tuple[Agent, Any]:
    """Return the agent and its wiring, with an environment's bounds of +-high."""
    agent = restore_agent(path)
    part = agent.part("actor") or agent.binding.parts[0]
    size = layer_widths(agent.tree, part)[1]
    return agent, derive_network_settings(agent, ActionBounds([-high] * size, [high] * size, "the test's"))[0]


def actions(path: str, obs: np.ndarray, high: float = 1.0) -> np.ndarray:
    """Return the actions that the checkpoint's policy takes."""
    agent, wiring = opened(path, high)
    part = agent.runnable("actor")
    assert part is not None
    return np.asarray(numpy_backend.build(policy_network(agent.tree, part, wiring)).step(obs)[0])


def values(path: str, title: str, obs: np.ndarray, action: np.ndarray | None = None) -> np.ndarray:
    """Return what a critic or a value gives."""
    agent, wiring = opened(path)
    part = agent.runnable(title)
    assert part is not None
    if action is None:
        return np.asarray(numpy_backend.build(value_network(agent.tree, part, wiring)).step(obs)[0])
    network = q_network(agent.tree, part, wiring, obs.shape[1], action.shape[1])
    return np.asarray(numpy_backend.build(network).step({"obs": obs, "action": action})[0])


def close(actual: np.ndarray, requested: torch.Tensor, scale: float = 1.0) -> None:
    """Demand equality to 1e-6 of the scale (that of the actions; of the outputs where they are larger)."""
    expected = requested.detach().numpy()
    bound = 1e-6 * max(scale, float(np.abs(expected).max()))
    assert np.abs(actual.reshape(expected.shape) - expected).max() < bound


class Policy(nn.Module):
    """A policy of three layers, with `gaussian` one whose deviation is a head of its own."""

    def __init__(
        self, obs: int, act: int, hidden: tuple[int, int] = (16, 8), *, gaussian: bool = False
    ) -> None:
        super().__init__()
        self.l1, self.l2 = nn.Linear(obs, hidden[0]), nn.Linear(*hidden)
        self.l3 = nn.Linear(hidden[1], act)
        if gaussian:
            self.log_std = nn.Linear(hidden[1], act)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Return tanh of the last layer."""
        last = self.l3(torch.relu(self.l2(torch.relu(self.l1(obs)))))
        return torch.tanh(last)


class Twins(nn.Module):
    """Q-functions of three layers, called q1, q2, ..."""

    def __init__(self, inputs: int, count: int, hidden: tuple[int, int] = (16, 8)) -> None:
        super().__init__()
        for number in range(1, count + 1):
            setattr(self, f"q{number}", mlp(inputs, *hidden, 1))


def agent(
    folder: Path, obs: int, act: int, *, gaussian: bool = False, critics: int = 2, targets: bool = True
) -> tuple[str, Policy, Twins, dict[str, Any]]:
    """Save an agent as one dict of state_dicts; return its path, its networks and the dict."""
    torch.manual_seed(0)
    policy, twins = Policy(obs, act, gaussian=gaussian), Twins(obs + act, critics)
    file: dict[str, Any] = {"actor": policy.state_dict(), "critic": twins.state_dict()}
    if targets:
        file["critic_target"] = Twins(obs + act, critics).state_dict()
        file |= {} if gaussian else {"actor_target": Policy(obs, act).state_dict()}
    file |= {"actor_optimizer": adam(policy.parameters()), "critic_optimizer": adam(twins.parameters())}
    file["total_it"] = 7
    if gaussian:
        file["log_alpha"] = torch.full((1,), -1.5)
    return saved(folder, "source.pt", file), policy, twins, file
