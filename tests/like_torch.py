"""The PyTorch twins of like_keras.py: what somebody would write who moves these models."""

from __future__ import annotations

import torch
from torch import nn


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6, eps=1e-3),
            nn.ReLU(),
            nn.Conv2d(6, 5, 3, bias=False),
            nn.BatchNorm2d(5, eps=1e-3),
        )
        self.hidden = nn.Linear(6 * 8 * 5, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.features(x.permute(0, 3, 1, 2)).flatten(1))))


class StackedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


class Grus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 6, batch_first=True)
        self.rnn = nn.RNN(6, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.gru(x)[0])[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.norm1 = nn.LayerNorm(16)
        self.inner = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.norm2 = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm2(x + self.inner(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.logits = nn.Linear(16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.body = nn.Sequential(nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 12))
        self.out = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.body(torch.tanh(self.second(torch.relu(self.first(x))))))


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            *(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
        )


class _Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.convs = _Double(16, 8)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.convs(torch.cat([skip, self.widen(x)], dim=1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_Double(3, 8), *(_Double(8, 8) for _ in range(3))])
        self.bottom = _Double(8, 8)
        self.up = nn.ModuleList([_Up() for _ in range(4)])
        self.mask = nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = x.permute(0, 3, 1, 2), []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, skip in zip(self.up, reversed(skips), strict=True):
            x = up(x, skip)
        return self.mask(x).permute(0, 2, 3, 1)


class Square(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())))


def _q() -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 1))


class TwinCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = _q(), _q()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q1(x), self.q2(x)], dim=-1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.words(x))))


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4)
        self.act = nn.PReLU(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.norm = nn.GroupNorm(4, 8)
        self.widen = nn.ConvTranspose2d(8, 6, 4)
        self.hidden1 = nn.Linear(6, 6)
        self.hidden2 = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.grouped(self.act(self.depthwise(x.permute(0, 3, 1, 2)))))
        return self.hidden2(torch.tanh(self.hidden1(self.widen(x).mean(dim=(2, 3)))))


class FlatNorm(nn.Module):
    """A norm over a flattened image: each of its numbers has a place, not only a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm1d(144)
        self.fc = nn.Linear(144, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.bn(self.conv(x).flatten(1)))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.log_std = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * torch.exp(self.log_std)


TWINS = {
    "conv_net": ConvNet,
    "old_conv_net": ConvNet,
    "stacked_lstm": StackedLSTM,
    "old_stacked_lstm": StackedLSTM,
    "grus": Grus,
    "transformer": Transformer,
    "Subclassed": Subclassed,
    "u_net": UNet,
    "square": Square,
    "TwinCritic": TwinCritic,
    "Tied": Tied,
    "kinds": Kinds,
    "Module": Module,
}
# Those whose dense layer takes a flattened image: the shape that shows it.
SHAPES = {"conv_net": ((8, 10, 3),), "old_conv_net": ((8, 10, 3),)}
# Those whose numbers and words leave equal layers to the order of their calls.
SHAPES |= {"transformer": ((9,),), "u_net": ((32, 32, 3),), "kinds": ((12, 12, 4),)}
