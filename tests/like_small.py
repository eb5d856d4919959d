"""Small PyTorch models that test_like.py fills."""

from __future__ import annotations

from collections.abc import Sequence

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


class Attention(nn.Module):
    """PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x)[0]


class _Own(nn.Module):
    def attended(self, *inputs: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.reshape(*one.shape[:2], 2, 4).transpose(1, 2) for one in inputs)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        return attended.transpose(1, 2).flatten(2)


class _SeparateLayers(_Own):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.attended(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class _FusedLayers(_Own):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.attended(*self.qkv(x).split(8, -1)))


class AttentionSeparate(nn.Module):
    """The same of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = _SeparateLayers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


class AttentionFused(nn.Module):
    """The same of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = _FusedLayers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x)


class ChannelsDense(nn.Module):
    """A dense layer over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class ChannelsConvolution(nn.Module):
    """The same as a convolution of one place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv1d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.transpose(1, 2)).transpose(1, 2)


class Tokens(nn.Module):
    """A table, and two layers of the names of GPT-2's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(4, 12), "c_proj": nn.Linear(4, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn["c_proj"](self.attn["c_attn"](self.words(x))[..., :4])


class Square(nn.Module):
    """A table of as many rows as columns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4)


class Halves(Named):
    """A model of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.half()


class BrainFloats(Named):
    """A model of a type that NumPy does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()


class Gated(nn.Module):
    """Two layers of one shape that take the same input, and a norm before and after them."""

    def __init__(self, names: Sequence[str], *, halves: bool = False, alike: bool = False) -> None:
        super().__init__()
        self.names, self.halves, self.alike = names, halves, alike
        for name in names:
            layer = nn.LayerNorm(6) if "n" in name else nn.Linear(6, 6)
            for tensor in layer.parameters():
                nn.init.normal_(tensor)
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, gate, value, last = (self.get_submodule(name) for name in self.names)
        x = first(x)
        if self.alike:
            return last(gate(x) + value(x))
        joined = torch.sigmoid(gate(x)) * value(x)
        return last(torch.flip(joined, (-1,)) if self.halves else joined)
