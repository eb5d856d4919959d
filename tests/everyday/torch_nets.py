"""The networks of the matrix in PyTorch, as a user would write them, and their optimizers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tests.everyday.cases import INPUTS, NAMES

STEPS = 2


class Net(nn.Module):
    """A network whose layers carry the given names."""

    def __init__(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.names = tuple(names)
        for name, layer in zip(names, layers, strict=True):
            self.add_module(name, layer)

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(self.names[index])


class Mlp(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self[2](torch.relu(self[1](torch.relu(self[0](x))))))


class Gaussian(Net):
    """The mean of a Gaussian policy: tanh in the hidden layers, no bound of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self[2](torch.tanh(self[1](torch.tanh(self[0](x)))))


class LayerNormed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self[2](torch.relu(self[1](self[0](x))))


class Cnn(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self[2](torch.relu(self[1](self[0](x)))))
        return self[4](torch.relu(self[3](torch.flatten(x, 1))))


class Recurrent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x)[0][:, -1])


class Block(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        scores = self[1](h) @ self[2](h).transpose(1, 2) / 8**0.5
        x = x + self[4](torch.softmax(scores, -1) @ self[3](h))
        x = x + self[7](torch.relu(self[6](self[5](x))))
        return self[8](x)


class Encoder(nn.TransformerEncoderLayer):
    pass


class Embedded(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).mean(1))


class Tied(Net):
    def __init__(self, names: Sequence[str], layers: Sequence[nn.Module]) -> None:
        super().__init__(names, layers)
        self[2].weight = self[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self[2](torch.relu(self[1](self[0](x).mean(1))))


def build(kind: str, names: Sequence[str] = (), epsilon: float = 1e-5) -> nn.Module:
    """Return a new network; `epsilon` is that of its norms."""
    names = names or NAMES[kind]
    if kind == "encoder":
        return Encoder(8, 2, 16, dropout=0.0, batch_first=True, layer_norm_eps=epsilon)
    make, layers = {
        "mlp": lambda: (Mlp, [nn.Linear(3, 24), nn.Linear(24, 24), nn.Linear(24, 1)]),
        "gaussian": lambda: (Gaussian, [nn.Linear(3, 24), nn.Linear(24, 24), nn.Linear(24, 1)]),
        "layernorm": lambda: (
            LayerNormed,
            [nn.Linear(5, 8), nn.LayerNorm(8, eps=epsilon), nn.Linear(8, 3)],
        ),
        "cnn": lambda: (
            Cnn,
            [
                nn.Conv2d(3, 4, 3),
                nn.BatchNorm2d(4, eps=epsilon),
                nn.Conv2d(4, 5, 3),
                nn.Linear(60, 7),
                nn.Linear(7, 3),
            ],
        ),
        "lstm": lambda: (Recurrent, [nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 2)]),
        "gru": lambda: (Recurrent, [nn.GRU(5, 6, batch_first=True), nn.Linear(6, 2)]),
        "block": lambda: (
            Block,
            [
                nn.LayerNorm(8, eps=epsilon),
                *(nn.Linear(8, 8) for _ in range(4)),
                nn.LayerNorm(8, eps=epsilon),
                nn.Linear(8, 16),
                nn.Linear(16, 8),
                nn.Linear(8, 3),
            ],
        ),
        "embedding": lambda: (Embedded, [nn.Embedding(11, 6), nn.Linear(6, 4)]),
        "tied": lambda: (Tied, [nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)]),
    }[kind]()
    if kind == "mlp" and tuple(names) == ("0", "2", "4"):
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.Tanh())
    return make(names, layers)


def optimizer(kind: str, parameters: object) -> torch.optim.Optimizer:
    """Return a new optimizer of the matrix."""
    optim = torch.optim
    return {
        "adam": lambda p: optim.Adam(p, 1e-2),
        "adam_v1": lambda p: optim.Adam(p, 1e-2),
        "amsgrad": lambda p: optim.Adam(p, 1e-2, amsgrad=True),
        "adamw": lambda p: optim.AdamW(p, 1e-2, weight_decay=0.02),
        "sgd": lambda p: optim.SGD(p, 1e-3, momentum=0.9),
        "sgd_plain": lambda p: optim.SGD(p, 1e-3),
        "rmsprop": lambda p: optim.RMSprop(p, 1e-2, alpha=0.9),
        "adagrad": lambda p: optim.Adagrad(p, 1e-2),
    }[kind](parameters)


def inputs(kind: str, seed: int, rows: int = 5) -> np.ndarray:
    """Return inputs as PyTorch takes them."""
    shape, classes = INPUTS[kind]
    draw = np.random.default_rng(seed)
    if classes:
        return draw.integers(0, classes, (rows, *shape))
    return draw.standard_normal((rows, *shape)).astype(np.float32)


def outputs(net: nn.Module, kind: str) -> np.ndarray:
    """Return what a network computes of the matrix's inputs, in float32, without training it."""
    net.eval()
    with torch.no_grad():
        return net(torch.from_numpy(inputs(kind, 1))).float().numpy()


def step(net: nn.Module, kind: str, tool: torch.optim.Optimizer, seed: int = 2) -> None:
    """Make one update towards random targets; nothing else in the network changes if it is in `eval` mode."""
    tool.zero_grad()
    y = net(torch.from_numpy(inputs(kind, seed, 8)))
    targets = torch.from_numpy(np.random.default_rng(seed + 100).standard_normal(tuple(y.shape))).float()
    ((y - 3 * targets) ** 2).sum().backward()
    tool.step()


def train(net: nn.Module, kind: str, tool: torch.optim.Optimizer | None) -> None:
    """Train a few steps, so that moments and running statistics are numbers of their own."""
    net.train()
    used = tool or torch.optim.SGD(net.parameters(), 1e-3)
    for index in range(3):
        step(net, kind, used, 10 + index)


def continued(net: nn.Module, kind: str, tool: torch.optim.Optimizer) -> np.ndarray:
    """Return what the network computes after two more updates."""
    net.eval()
    for index in range(STEPS):
        step(net, kind, tool, 20 + index)
    return outputs(net, kind)


def returns(net: nn.Module, kind: str) -> np.ndarray:
    """Return the returns of two episodes of Pendulum that a policy plays."""
    import gymnasium

    totals = []
    scale = 1 if kind == "gaussian" else 2
    for seed in (1000, 1001):
        env = gymnasium.make("Pendulum-v1")
        observation, _ = env.reset(seed=seed)
        total, over = 0.0, False
        while not over:
            with torch.no_grad():
                action = scale * net(torch.from_numpy(observation.astype(np.float32))[None])[0].numpy()
            observation, reward, ended, cut, _ = env.step(action)
            total, over = total + float(reward), ended or cut
        totals.append(total)
    return np.array(totals)
