"""Small PyTorch models that test_like.py fills."""

from __future__ import annotations

import torch
from torch import nn


class Pair(nn.Module):
    """Two layers of one shape, which no name of the sources has."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)


class Critics(nn.Module):
    """Two networks of the same shapes, made in an order of one's own."""

    def __init__(self, first: str = "q1", second: str = "q2") -> None:
        super().__init__()
        for name in (first, second):
            setattr(self, name, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))


class CriticsTurned(Critics):
    def __init__(self) -> None:
        super().__init__("q2", "q1")


class Named(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2 * 2 * 3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
