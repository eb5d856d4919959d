"""PyTorch models whose outputs hide a fault from a careless comparison; `wrong` switches the fault on.

Each class has the shapes of its inputs in `SHAPES`. Both versions load the same state_dict.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Masked(nn.Module):
    """Attention whose mask is a layer: its numbers are far larger than those of all others."""

    SHAPES = ("x=5,8",)

    class Mask(nn.Module):
        """Large negative numbers above the diagonal."""

        def __init__(self, number: float) -> None:
            super().__init__()
            self.number = number

        def forward(self, scores: Any) -> Any:
            """Return masked scores."""
            above = torch.ones_like(scores, dtype=torch.bool).triu(1)
            return scores.masked_fill(above, self.number)

    def __init__(self, wrong: bool = False, number: float = -1e9) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.mask, self.wrong = Masked.Mask(number), wrong

    def forward(self, x: Any) -> Any:
        """Return what the positions attend to."""
        scores = self.query(x) @ self.key(x).transpose(1, 2) / (2.0 if self.wrong else 3.0)
        return torch.softmax(self.mask(scores), -1) @ self.value(x)


class Infinite(Masked):
    """A mask of minus infinity."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__(wrong, float("-inf"))


class Saturated(nn.Module):
    """Large numbers before a tanh in the wrong model only."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.wrong = nn.Linear(6, 16), nn.Linear(16, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return bounded numbers."""
        return torch.tanh(self.last(torch.relu(self.first(x))) * (1e9 if self.wrong else 1.0))


class Scaled(nn.Module):
    """One column is a million times larger than the others, which are wrong."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 4), wrong

    def forward(self, x: Any) -> Any:
        """Return a large and three small columns."""
        y = self.inner(x)
        small = y[:, 1:].flip(1) if self.wrong else y[:, 1:]
        return torch.cat([1e7 * y[:, :1], small], 1)


class Branched(nn.Module):
    """A second output a million times larger than the first, which is wrong."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.policy, self.value, self.wrong = nn.Linear(6, 4), nn.Linear(6, 1), wrong
        self.large = nn.Hardtanh(-1e12, 1e12)

    def forward(self, x: Any) -> Any:
        """Return both."""
        y = self.policy(x)
        return {"policy": y.flip(1) if self.wrong else y, "value": self.large(1e8 * self.value(x))}


class Offset(nn.Module):
    """Differences far smaller than the bias of the outputs."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return numbers near a large one."""
        y = self.inner(x)
        return 1e5 + 1e-3 * (y.flip(1) if self.wrong else y)


class Complex(nn.Module):
    """The imaginary parts differ only."""

    SHAPES = ("x=8",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(8, 8), wrong

    def forward(self, x: Any) -> Any:
        """Return a spectrum."""
        y = torch.fft.rfft(self.inner(x))
        return y.conj() if self.wrong else y


class Large(nn.Module):
    """Large integers, which differ by less than the rounding of a float."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 8), wrong

    def forward(self, x: Any) -> Any:
        """Return a hash of the largest column."""
        return 100_000_007 + self.inner(x).argmax(1) * (1 if not self.wrong else 2)


class Dead(nn.Module):
    """Outputs that are zero for every input."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return zeros."""
        y = self.inner(x)
        return torch.relu((y.flip(1) if self.wrong else y) - 1e3)


class Undefined(nn.Module):
    """Outputs that are NaN for every input."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return NaN."""
        y = self.inner(x)
        return torch.log(-1e3 - (y.flip(1) if self.wrong else y))


class Excluded(nn.Module):
    """Impossible actions have minus infinity."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 4), wrong

    def forward(self, x: Any) -> Any:
        """Return logits."""
        y = self.inner(x) * (1.0001 if self.wrong else 1.0)
        return torch.cat([y[:, :2], torch.full_like(y[:, :1], float("-inf")), y[:, 2:]], 1)


class Random(nn.Module):
    """Dropout that evaluation does not switch off, with one state of random numbers on both sides."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 64)

    def forward(self, x: Any) -> Any:
        """Return other numbers at every call."""
        return torch.dropout(self.inner(x), 0.5, train=True)


class Table(nn.Module):
    """Rows of a parameter by number: no class named Embedding."""

    SHAPES = ("ids=5",)

    def __init__(self, wrong: bool = False, rows: int = 50) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(rows, 4))
        self.wrong = wrong

    def forward(self, ids: Any) -> Any:
        """Return the rows; the wrong model has others from row 20."""
        rows = torch.cat([self.rows[:20], self.rows[20:].flip(0)]) if self.wrong else self.rows
        return nn.functional.embedding(ids, rows)


class Words(nn.Module):
    """Three inputs of one shape: words, kinds and a mask."""

    SHAPES = ("ids=6", "kinds=6", "mask=6")

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.words, self.kinds = nn.Embedding(40, 8), nn.Embedding(2, 8)
        self.wrong = wrong

    def forward(self, ids: Any, kinds: Any, mask: Any) -> Any:
        """Return the mean of what is not masked."""
        x = self.words(torch.where(ids > 30, 31, ids) if self.wrong else ids) + self.kinds(kinds)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


class Steps(nn.Module):
    """A number of a step without a limit, as diffusion models have."""

    SHAPES = ("x=4", "step=")

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(4, 4), wrong

    def forward(self, x: Any, step: Any) -> Any:
        """Return numbers that depend on the step."""
        if step.is_floating_point():
            raise TypeError("a step is an integer")
        step = step.clamp(max=5) if self.wrong else step
        return self.inner(x) * torch.cos(step[:, None] / 10)


class Padded(nn.Module):
    """The wrong model does not ignore the padding."""

    SHAPES = ("ids=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.words, self.wrong = nn.Embedding(30000, 4), wrong

    def forward(self, ids: Any) -> Any:
        """Return the mean of the words."""
        used = torch.ones_like(ids) if self.wrong else (ids != 0).long()
        return (self.words(ids) * used[..., None]).sum(1) / used.sum(1, keepdim=True).clamp(min=1)


class Clipped(nn.Module):
    """The wrong model does not clip observations to 10, as a normaliser does."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return linear numbers."""
        return self.inner(x if self.wrong else x.clamp(-10, 10))


class Twice(nn.Module):
    """Equal names of several outputs: the first is wrong."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return two outputs called 1."""
        y = self.inner(x)
        return {1: y.flip(1) if self.wrong else y, "1": y + 1}


class Fixed(nn.Module):
    """Half precision inside, in a float64 run, too."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.inner, self.wrong = nn.Linear(6, 3), wrong

    def forward(self, x: Any) -> Any:
        """Return rounded numbers."""
        y = self.inner(x).to(torch.bfloat16).to(x.dtype)
        return y * (1.001 if self.wrong else 1.0)


class Attended(nn.Module):
    """Attention with a mask among the inputs: other numbers than 0 and 1 there outweigh all scores."""

    SHAPES = ("x=5,8", "attention_mask=5")

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.wrong = wrong

    def forward(self, x: Any, attention_mask: Any) -> Any:
        """Return what the positions attend to."""
        q, k = self.query(x), self.key(x)
        q, k = (k, q) if self.wrong else (q, k)
        scores = q @ k.transpose(1, 2) / 3.0 + (1 - attention_mask[:, None].to(x.dtype)) * -1e4
        return torch.softmax(scores, -1) @ self.value(x)


class GRUReader(nn.Module):
    """A model whose class is named after one of its layers."""

    SHAPES = ("x=5,4",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.rnn, self.mix, self.out = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 6), nn.Linear(6, 2)
        self.wrong = wrong

    def forward(self, x: Any) -> Any:
        """Return numbers of the last step."""
        y = self.mix(self.rnn(x)[0][:, -1])
        return self.out(torch.tanh(y) if self.wrong else torch.relu(y))


class Twins(nn.Module):
    """A layer called on two inputs, in either order."""

    SHAPES = ("left=6", "right=6")

    def __init__(self, wrong: bool = False, reverse: bool = False) -> None:
        super().__init__()
        self.encode, self.out = nn.Linear(6, 8), nn.Linear(16, 2)
        self.wrong, self.reverse = wrong, reverse

    def forward(self, left: Any, right: Any) -> Any:
        """Return numbers of both codes."""
        if self.reverse:
            b, a = self.encode(right), self.encode(left)
        else:
            a, b = self.encode(left), self.encode(right)
        return self.out(torch.cat([a * b, (a - b) ** 2 if self.wrong else (a - b).abs()], -1))


class Gated(nn.Module):
    """A class of its own, each of whose many operations uses a value twice, and a scale from its weights."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.start, self.out = nn.Linear(6, 6), nn.Linear(6, 2)
        self.wrong, self.scale = wrong, nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Any) -> Any:
        """Return numbers after forty gates."""
        scale = self.scale
        for _ in range(40):
            scale = scale / scale.norm()
        x = self.start(x) * scale
        x = torch.tanh(x) if self.wrong else torch.sin(x)
        for _ in range(40):
            x = x * torch.sigmoid(x) + 0.5
        return self.out(x)


class Bordered(nn.Module):
    """A convolution that pads, or receives a padded image."""

    SHAPES = ("x=3,8,8",)

    def __init__(self, wrong: bool = False, outside: bool = False, width: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=0 if outside else width)
        self.out = nn.Conv2d(4, 2, 1)
        self.wrong, self.width = wrong, width if outside else 0

    def forward(self, x: Any) -> Any:
        """Return an image."""
        y = self.conv(nn.functional.pad(x, [self.width] * 4))
        return self.out(y * 1.5 if self.wrong else y)


class Exchanged(nn.Module):
    """Two layers in a row with equal shapes, in either order."""

    SHAPES = ("x=6",)

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(6)])
        self.wrong = wrong

    def forward(self, x: Any) -> Any:
        """Return numbers after both layers."""
        first, second = (self.second, self.first) if self.wrong else (self.first, self.second)
        return self.out(self.norms[1](second(torch.relu(self.norms[0](first(x))))))
