"""Architectures that people port, in PyTorch; ported_keras.py has the same ones in Keras.

Their options are faults in a model's code, which ported_faults.py lists.
"""

from __future__ import annotations

import math
from typing import Any

from tests.pair_models import _dense, _net


def mobile(act: str = "relu6", skip: bool = True, bottleneck: str = "", tail: str = "hardswish") -> Any:
    """An inverted residual block with a linear bottleneck."""
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"expand": nn.Conv2d(4, 8, 1, bias=False), "norm1": nn.BatchNorm2d(8)}
    layers |= {
        "depth": nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        "norm2": nn.BatchNorm2d(8),
    }
    layers |= {"project": nn.Conv2d(8, 4, 1, bias=False), "norm3": nn.BatchNorm2d(4)}
    layers |= {"tail": nn.Conv2d(4, 6, 1), "head": nn.Linear(6, 3)}

    def forward(m: Any, x: Any) -> Any:
        active = getattr(functional, act)
        y = active(m.norm2(m.depth(active(m.norm1(m.expand(x))))))
        y = m.norm3(m.project(y))
        y = getattr(functional, bottleneck)(y) if bottleneck else y
        return m.head(getattr(functional, tail)(m.tail(x + y if skip else y)).mean((2, 3)))

    return _net(layers, forward)


def channel_gates(gate: str = "sigmoid", use: str = "*") -> Any:
    """Gates of channels by a convolution over their means."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 6, 3), "gate": nn.Conv1d(1, 1, 3, padding=1)}
    layers["out"] = nn.Conv2d(6, 3, 1)

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.conv(x))
        g = m.gate(x.mean((2, 3))[:, None])[:, 0]
        g = torch.softmax(g, -1) if gate == "softmax" else torch.sigmoid(g)
        y = x * g[..., None, None]
        return m.out(x + y if use == "+" else y).mean((2, 3))

    return _net(layers, forward)


def spatial_gates(order: str = "mean max", mode: str = "zeros", use: str = "*") -> Any:
    """Gates of positions by a convolution of the mean and the maximum over channels."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 6, 3)}
    layers |= {"gate": nn.Conv2d(2, 1, 3, padding=1, padding_mode=mode), "out": nn.Conv2d(6, 3, 1)}

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.conv(x))
        parts = {"mean": x.mean(1, keepdim=True), "max": x.amax(1, keepdim=True), "min": x.amin(1, True)}
        g = torch.sigmoid(m.gate(torch.cat([parts[name] for name in order.split()], 1)))
        return m.out(x * (1 - g) if use == "1-" else x * g).mean((2, 3))

    return _net(layers, forward)


def attended(
    order: str = "context first",
    axis: int = -1,
    scaled: bool = False,
    state: str = "last",
    last: str = "tanh",
) -> Any:
    """A GRU decoder that attends to the states of a GRU encoder."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {
        name: nn.GRU(size, 6, batch_first=True) for name, size in (("encode", 4), ("decode", 3))
    }
    layers |= _dense(mix=(12, 5), head=(5, 2))

    def forward(m: Any, words: Any, others: Any) -> Any:
        memory, h = m.encode(words)
        y = m.decode(others, torch.zeros_like(h) if state == "zero" else h)[0]
        scores = y @ memory.transpose(1, 2)
        scores = scores / 6**0.5 if scaled else scores
        context = torch.softmax(scores, axis) @ memory
        y = m.mix(torch.cat([context, y] if order == "context first" else [y, context], -1))
        return m.head(torch.tanh(y) if last == "tanh" else y)

    return _net(layers, forward)


def recurrent_actor(size: float = 2.0, squash: str = "tanh", value: str = "output", step: int = -1) -> Any:
    """An actor and a critic on the last step of an LSTM."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {**_dense(body=(5, 6)), "rnn": nn.LSTM(6, 7, batch_first=True)}
    layers |= _dense(mean=(7, 3), value=(7, 1))

    def forward(m: Any, x: Any) -> Any:
        y, (_, c) = m.rnn(torch.tanh(m.body(x)))
        y, c = y[:, step], c[0]
        mean = m.mean(y)
        mean = torch.tanh(mean) if squash == "tanh" else mean.clamp(-1, 1)
        return size * mean, m.value(y if value == "output" else c)

    return _net(layers, forward)


def masked_encoder(
    mask: str = "keys", waves: str = "halves", rate: float = 1.0, scale: str = "before"
) -> Any:
    """Attention with a mask of the keys, and positions of sines and cosines."""
    import torch
    from torch import nn

    angles = torch.arange(6.0)[:, None] / 100.0 ** (torch.arange(4.0) / 4)
    table = torch.cat([angles.sin(), angles.cos()], 1)
    table = torch.stack([angles.sin(), angles.cos()], 2).flatten(1) if waves == "next" else table
    layers = {**_dense(query=(8, 8), key=(8, 8), value=(8, 8), proj=(8, 8)), "norm": nn.LayerNorm(8)}

    def forward(m: Any, x: Any, keep: Any) -> Any:
        x = x + rate * table
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (m.query, m.key, m.value))
        scores = q @ k.transpose(2, 3)
        scores = scores / 2 if scale == "before" else scores
        hidden = keep > 0 if mask == "inverted" else keep <= 0
        hidden = hidden[:, None, :, None] if mask == "queries" else hidden[:, None, None]
        shares = torch.softmax(scores if mask == "none" else scores.masked_fill(hidden, -1e9), -1)
        shares = shares / 2 if scale == "after" else shares
        return m.norm(x + m.proj((shares @ v).transpose(1, 2).flatten(2)))

    return _net(layers, forward)


def cross_decoder(
    values: str = "memory", order: str = "self first", heads: int = 2, act: str = "relu"
) -> Any:
    """Attention to itself, then to a memory, then dense layers, each with a residual and a norm."""
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {
        name: nn.MultiheadAttention(8, size, batch_first=True)
        for name, size in (("own", 2), ("cross", heads))
    }
    layers |= {name: nn.LayerNorm(8) for name in ("norm1", "norm2", "norm3")}
    layers |= _dense(up=(8, 12), down=(12, 8))

    def forward(m: Any, x: Any, memory: Any) -> Any:
        for name in ("own", "cross") if order == "self first" else ("cross", "own"):
            if name == "own":
                x = m.norm1(x + m.own(x, x, x, need_weights=False)[0])
            else:
                keys = memory if values == "memory" else x
                x = m.norm2(x + m.cross(x, keys, keys, need_weights=False)[0])
        return m.norm3(x + m.down(getattr(functional, act)(m.up(x))))

    return _net(layers, forward)


def windows(shift: int = 2, back: bool = True, bias: str = "added", apart: str = "near") -> Any:
    """Attention inside windows of turned positions, with a bias for each pair of positions."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {**_dense(qkv=(8, 24), proj=(8, 8)), "bias": nn.Parameter(torch.zeros(2, 4, 4))}
    layers["norm"] = nn.LayerNorm(8)

    def forward(m: Any, x: Any) -> Any:
        y = m.norm(x).roll(-shift, 1)
        y = y.unflatten(1, (2, 4)) if apart == "near" else y.unflatten(1, (4, 2)).transpose(1, 2)
        q, k, v = m.qkv(y).unflatten(-1, (3, 2, 4)).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(3, 4) / 2
        table = m.bias.transpose(1, 2) if bias == "turned" else m.bias
        y = torch.softmax(scores if bias == "none" else scores + table, -1) @ v
        y = y.transpose(2, 3).flatten(3)
        y = (y if apart == "near" else y.transpose(1, 2)).flatten(1, 2)
        return x + m.proj(y.roll(shift, 1) if back else y)

    return _net(layers, forward)


def capsules(squash: str = "squash", axis: int = -1, groups: str = "inner") -> Any:
    """Vectors whose lengths a function squashes; the lengths are the outputs."""

    def forward(m: Any, x: Any) -> Any:
        x = m.first(x)
        x = x.unflatten(-1, (4, 3)) if groups == "inner" else x.unflatten(-1, (3, 4)).transpose(1, 2)
        square = (x**2).sum(axis, keepdim=True)
        if squash == "squash":
            x = x * square / (1 + square) / (square + 1e-6).sqrt()
        elif squash == "unit":
            x = x / (square + 1e-6).sqrt()
        x = m.second(x)
        return (x**2).sum(-1).sqrt()

    return _net(_dense(first=(6, 12), second=(3, 5)), forward)


def rainbow(mean: int = 1, low: float = -10.0, turned: bool = False, shares: str = "joined") -> Any:
    """Values and advantages of atoms; the mean of the atoms is the output."""
    import torch

    support = torch.linspace(low, low + 20, 5)

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.body(x))
        v, a = m.value(x)[:, None], m.advantage(x)
        a = a.unflatten(-1, (5, 3)).transpose(1, 2) if turned else a.unflatten(-1, (3, 5))
        if shares == "apart":
            return ((torch.softmax(v, -1) + torch.softmax(a - a.mean(mean, keepdim=True), -1)) * support).sum(
                -1
            )
        y = a - a.mean(mean, keepdim=True) if shares == "no value" else v + a - a.mean(mean, keepdim=True)
        return (torch.softmax(y, -1) * support).sum(-1)

    return _net(_dense(body=(6, 8), value=(8, 5), advantage=(8, 15)), forward)


def dreamer_cell(
    order: str = "hx", late: float = -1.0, parts: str = "rcu", use: str = "update", reset: str = "inside"
) -> Any:
    """One step of a recurrent cell with a norm of its gates."""
    import torch
    from torch import nn

    layers = {**_dense(gates=(11, 18), head=(6, 2)), "norm": nn.LayerNorm(18, 1e-3)}

    def forward(m: Any, x: Any, h: Any) -> Any:
        y = m.norm(m.gates(torch.cat([h, x] if order == "hx" else [x, h], -1)))
        by_name = dict(zip(parts, y.chunk(3, -1), strict=True))
        r, u = torch.sigmoid(by_name["r"]), torch.sigmoid(by_name["u"] + late)
        c = torch.tanh(r * by_name["c"]) if reset == "inside" else r * torch.tanh(by_name["c"])
        h = u * c + (1 - u) * h if use == "update" else (1 - u) * c + u * h
        return m.head(h), h

    return _net(layers, forward)


def symlog_net(squash: str = "symlog", last: str = "symexp", late: bool = False) -> Any:
    """Inputs on a symmetric logarithmic scale, and outputs back from it."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers = {**_dense(first=(5, 8), head=(8, 3)), "norm": nn.LayerNorm(8, 1e-3)}

    def forward(m: Any, x: Any) -> Any:
        if squash != "none":
            size = torch.log1p(x.abs()) if squash == "symlog" else torch.log1p(x.abs()) / math.log(2)
            x = x.sign() * size
        x = m.norm(functional.silu(m.first(x))) if late else functional.silu(m.norm(m.first(x)))
        x = m.head(x)
        return x.sign() * torch.expm1(x.abs()) if last == "symexp" else x

    return _net(layers, forward)


def bottleneck(strided: str = "middle", shortcut: str = "conv", end: bool = False, last: str = "relu") -> Any:
    """A residual bottleneck with a strided shortcut."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"conv1": nn.Conv2d(4, 3, 1, stride=2 if strided == "first" else 1)}
    layers["conv2"] = nn.Conv2d(3, 3, 3, stride=1 if strided == "first" else 2, padding=0 if end else 1)
    layers |= {"conv3": nn.Conv2d(3, 6, 1), "side": nn.Conv2d(4, 6, 1, stride=1 if shortcut == "mean" else 2)}
    layers |= {"norm1": nn.BatchNorm2d(3), "norm2": nn.BatchNorm2d(3), "norm3": nn.BatchNorm2d(6)}
    layers |= {"norm": nn.BatchNorm2d(6), "head": nn.Linear(6, 2)}

    def forward(m: Any, x: Any) -> Any:
        y = torch.relu(m.norm1(m.conv1(x)))
        y = functional.pad(y, (0, 1, 0, 1)) if end else y
        y = m.norm3(m.conv3(torch.relu(m.norm2(m.conv2(y)))))
        x = functional.avg_pool2d(x, 2) if shortcut == "mean" else x
        y = y + (m.side(x) if shortcut == "no norm" else m.norm(m.side(x)))
        return m.head((torch.relu(y) if last == "relu" else y).mean((2, 3)))

    return _net(layers, forward)


def tcn_block(fill: str = "zeros", dilation: int = 2, last: str = "relu", skip: str = "side") -> Any:
    """Two dilated causal convolutions with a residual."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"conv1": nn.Conv1d(3, 6, 2), "conv2": nn.Conv1d(6, 6, 2, dilation=dilation)}
    layers |= {"side": nn.Conv1d(3, 6, 1), "head": nn.Linear(6, 2)}

    def forward(m: Any, x: Any) -> Any:
        y = x
        for layer, width in ((m.conv1, 1), (m.conv2, dilation)):
            y = functional.pad(y, (width, 0), "constant" if fill == "zeros" else fill)
            y = torch.relu(layer(y))
        y = y + m.side(x) if skip == "side" else y
        return m.head((torch.relu(y) if last == "relu" else y)[:, :, -1])

    return _net(layers, forward)


def impala(
    divisor: float = 255.0, pool: str = "both", first: bool = True, keep: str = "x", last: bool = True
) -> Any:
    """A pooled convolution, a residual block of activations before convolutions, and dense layers."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 4, 3, padding=1)}
    layers |= {name: nn.Conv2d(4, 4, 3, padding=1) for name in ("res1", "res2")}
    layers |= _dense(hidden=(64, 6), head=(6, 2))

    def forward(m: Any, x: Any) -> Any:
        x = m.conv(x / divisor)
        end = functional.pad(x, (0, 1, 0, 1), value=-1e9)
        x = functional.max_pool2d(x, 3, 2, 1) if pool == "both" else functional.max_pool2d(end, 3, 2)
        y = torch.relu(x)
        z = m.res2(torch.relu(m.res1(y if first else x)))
        x = z + (y if keep == "relu" else x)
        x = (torch.relu(x) if last else x).flatten(1)
        return m.head(torch.relu(m.hidden(x)))

    return _net(layers, forward)


def bag(mask: str = "words", over: str = "count") -> Any:
    """The mean of the embeddings of the words that are no padding."""
    import torch
    from torch import nn

    def forward(m: Any, words: Any) -> Any:
        x = m.embed(words)
        keep = (words == 0 if mask == "inverted" else words != 0).float()[..., None]
        keep = torch.ones_like(keep) if mask == "none" else keep
        x = (x * keep).sum(1)
        count = keep.sum(1).clamp(min=1.0)
        x = {"count": x / count, "length": x / 7, "root": x / count.sqrt(), "sum": x}[over]
        return m.out(torch.relu(m.hidden(x)))

    return _net({"embed": nn.Embedding(4, 6), **_dense(hidden=(6, 8), out=(8, 2))}, forward)


def siamese(difference: str = "abs", order: str = "dp", last: str = "sigmoid", active: str = "relu") -> Any:
    """Two inputs through the same layers; their distance and their product are compared."""
    import torch

    def forward(m: Any, one: Any, two: Any) -> Any:
        a, b = (m.second(getattr(torch, active)(m.first(x))) for x in (one, two))
        d = {"abs": lambda: (a - b).abs(), "square": lambda: (a - b) ** 2, "none": lambda: a - b}[
            difference
        ]()
        by_name = {"d": d, "p": a * b}
        y = m.head(torch.cat([by_name[name] for name in order], -1))
        return torch.sigmoid(y) if last == "sigmoid" else y

    return _net(_dense(first=(5, 8), second=(8, 4), head=(8, 2)), forward)


def deep_sets(pool: str = "sum", late: bool = False, centred: bool = True) -> Any:
    """Features of a set's members around their mean, summed."""
    import torch

    def forward(m: Any, x: Any) -> Any:
        x = x - x.mean(1, keepdim=True) if centred else x
        x = torch.relu(m.second(torch.relu(m.first(x)))) if not late else m.second(torch.relu(m.first(x)))
        x = {"sum": x.sum, "mean": x.mean, "max": x.amax}[pool](1)
        return m.out(torch.relu(x) if late else x)

    return _net(_dense(first=(4, 6), second=(6, 6), out=(6, 2)), forward)


def bilinear(matrix: str = "", unit: bool = True, heat: float = 0.1, against: str = "two") -> Any:
    """The similarity of two inputs by a matrix."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {**_dense(one=(5, 6), two=(4, 6)), "matrix": nn.Parameter(torch.zeros(6, 6))}

    def forward(m: Any, x: Any, y: Any) -> Any:
        a, b = m.one(x), m.two(y)
        a, b = (functional.normalize(item, dim=-1) if unit else item for item in (a, b))
        a = a @ (m.matrix.T if matrix == "turned" else m.matrix)
        return (a * b).sum(-1, keepdim=True) / heat

    return _net(layers, forward)


def mixture_density(spread: str = "elu", axis: int = -1, turned: bool = False, weigh: str = "softmax") -> Any:
    """The mean of a mixture of distributions, and their deviations."""
    import torch
    from torch.nn import functional

    def forward(m: Any, x: Any) -> Any:
        x = torch.tanh(m.body(x))
        mu = m.mu(x)
        mu = mu.unflatten(-1, (2, 3)).transpose(1, 2) if turned else mu.unflatten(-1, (3, 2))
        shares = torch.sigmoid(m.pi(x)) if weigh == "sigmoid" else getattr(torch, weigh)(m.pi(x), axis)
        s = m.sigma(x)
        s = functional.elu(s) + 1 if spread == "elu" else torch.exp(s)
        return (shares[..., None] * mu).sum(1), s

    return _net(_dense(body=(5, 8), pi=(8, 3), mu=(8, 6), sigma=(8, 3)), forward)


def fourier(turn: float = 2 * math.pi, order: str = "sc") -> Any:
    """Sines and cosines of random projections."""
    import torch

    layers: dict[str, Any] = {**_dense(hidden=(12, 8), out=(8, 2)), "project": torch.zeros(3, 6)}

    def forward(m: Any, x: Any) -> Any:
        z = turn * (x @ m.project)
        parts = {"s": z.sin(), "c": z.cos()}
        y = torch.stack([parts["s"], parts["c"]], -1).flatten(-2) if order == "next" else None
        y = torch.cat([parts[name] for name in order], -1) if y is None else y
        return m.out(torch.relu(m.hidden(y)))

    return _net(layers, forward)


def diffusion(
    order: str = "cs", period: float = 1e4, groups: int = 2, skip: float = 1.0, active: bool = True
) -> Any:
    """A residual block of an image whose channels a time shifts."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {**_dense(time1=(8, 8), time2=(8, 4))}
    layers |= {name: nn.Conv2d(4, 4, 3, padding=1) for name in ("conv1", "conv2")}
    layers |= {"norm1": nn.GroupNorm(2, 4), "norm2": nn.GroupNorm(groups, 4)}

    def forward(m: Any, x: Any, t: Any) -> Any:
        z = t * torch.exp(-math.log(period) * torch.arange(4.0) / 4)
        parts = {"s": z.sin(), "c": z.cos()}
        e = m.time1(torch.cat([parts[name] for name in order], -1))
        e = m.time2(functional.silu(e) if active else e)
        y = m.conv1(functional.silu(m.norm1(x))) + e[..., None, None]
        y = m.conv2(functional.silu(m.norm2(y)))
        return (x + y) * skip if skip else y

    return _net(layers, forward)


def stepper(states: str = "hc", returns: str = "hc", out: str = "h") -> Any:
    """One step of an LSTM with the states as inputs and outputs."""
    from torch import nn

    def forward(m: Any, x: Any, h: Any, c: Any) -> Any:
        by_name = {"h": h[None], "c": c[None]}
        y, (h2, c2) = m.rnn(x[:, None], tuple(by_name[name] for name in states))
        new = {"h": h2[0], "c": c2[0], "old": h}
        last = m.head(y[:, 0] if out == "h" else new["c"])
        return (last, *(new[name] for name in (returns if returns != "old" else ("old", "c"))))

    return _net({"rnn": nn.LSTM(4, 6, batch_first=True), **_dense(head=(6, 2))}, forward)


def observations(
    eps: str = "inside", root: bool = True, high: float = 2.0, early: bool = False, centre: bool = True
) -> Any:
    """Clipped inputs with mean 0 and deviation 1, and bounded actions."""
    import torch

    layers: dict[str, Any] = {"mean": torch.zeros(6), "variance": torch.ones(6)}
    layers |= _dense(hidden=(6, 8), out=(8, 3))

    def forward(m: Any, x: Any) -> Any:
        x = x.clamp(-high, high) if early else x
        x = x - m.mean if centre else x
        scale = (m.variance + 0.01).sqrt() if eps == "inside" else m.variance.sqrt() + 0.01
        x = x / (scale if root else m.variance)
        x = x if early else x.clamp(-high, high)
        return torch.tanh(m.out(torch.relu(m.hidden(x))))

    return _net(layers, forward)


def xception(early: bool = True, pool: str = "max", skip: str = "+", location: str = "after") -> Any:
    """A separable convolution, a norm and a pooling beside a strided convolution."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"depth": nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)}
    layers |= {"point": nn.Conv2d(4, 6, 1), "norm": nn.BatchNorm2d(6)}
    layers |= {"side": nn.Conv2d(4, 6, 1, stride=2), "head": nn.Linear(6, 3)}

    def forward(m: Any, x: Any) -> Any:
        y = torch.relu(x) if early else x
        y = m.norm(m.point(m.depth(y)))
        y = functional.max_pool2d(y, 2) if pool == "max" else functional.avg_pool2d(y, 2)
        z = m.side(x)
        y = {"+": y + z, "-": y - z, "": y}[skip]
        return m.head(y.mean((2, 3)))

    return _net(layers, forward)


def sentence(states: str = "last", halves: str = "fb", active: str = "tanh") -> Any:
    """The last states of both directions of a GRU over words."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"embed": nn.Embedding(11, 4)}
    layers |= {"both": nn.GRU(4, 5, batch_first=True, bidirectional=True), **_dense(mix=(10, 6), head=(6, 2))}

    def forward(m: Any, words: Any) -> Any:
        y, h = m.both(m.embed(words))
        by_name = {"f": h[0], "b": h[1]}
        x = torch.cat([by_name[name] for name in halves], -1)
        x = y[:, -1] if states == "last step" else y.mean(1) if states == "mean" else x
        return m.head(getattr(torch, active)(m.mix(x)))

    return _net(layers, forward)


def gemma_block(
    one: bool = True, approximate: str = "tanh", cap: float = 3.0, scale: float = 8**0.5, eps: float = 1e-6
) -> Any:
    """A gated block after a root-mean-square norm with 1 added to its weight; capped outputs."""
    import torch
    from torch import nn
    from torch.nn import functional

    def normal(m: Any, x: Any) -> Any:
        x = x * torch.rsqrt((x**2).mean(-1, keepdim=True) + eps)
        return x * (1 + m.weight) if one else x * m.weight

    layers: dict[str, Any] = {"embed": nn.Embedding(11, 8)}
    layers |= {"norm": _net({"weight": nn.Parameter(torch.zeros(8))}, normal)}
    layers |= _dense(gate=(8, 12), up=(8, 12), down=(12, 8), out=(8, 5))

    def forward(m: Any, words: Any) -> Any:
        x = m.embed(words) * scale
        y = m.norm(x)
        x = x + m.down(functional.gelu(m.gate(y), approximate=approximate) * m.up(y))
        x = m.out(x)
        return cap * torch.tanh(x / cap) if cap else x

    return _net(layers, forward)


def alibi(
    slopes: tuple[float, ...] = (0.5, 0.25),
    diagonal: int = 1,
    sign: float = -1.0,
    joined: str = "heads first",
) -> Any:
    """Causal attention whose scores fall with the distance, with a slope for each head."""
    import torch

    steps = torch.arange(6.0)
    distance = (steps[:, None] - steps).clamp(min=0)
    bias = sign * torch.tensor(slopes)[:, None, None] * distance
    hidden = torch.ones(6, 6).triu(diagonal).bool()

    def forward(m: Any, x: Any) -> Any:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (m.query, m.key, m.value))
        scores = (q @ k.transpose(2, 3) / 2 + bias).masked_fill(hidden, -1e9)
        y = torch.softmax(scores, -1) @ v
        y = y.transpose(1, 2) if joined == "heads first" else y.permute(0, 2, 3, 1)
        return m.proj(y.flatten(2))

    return _net(_dense(query=(8, 8), key=(8, 8), value=(8, 8), proj=(8, 4)), forward)


def positions(
    offset: int = 2, kinds: bool = True, eps: float = 1e-12, use: str = "first", last: str = "tanh"
) -> Any:
    """Words, positions from the third row of a table, and a kind of text; a dense layer on the first word."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"words": nn.Embedding(11, 8), "places": nn.Embedding(9, 8)}
    layers |= {"kinds": nn.Embedding(2, 8), "norm": nn.LayerNorm(8, eps), **_dense(mix=(8, 8), head=(8, 3))}

    def forward(m: Any, words: Any) -> Any:
        x = m.words(words) + m.places(torch.arange(6) + offset)
        x = x + m.kinds(torch.zeros(6, dtype=torch.long)) if kinds else x
        x = m.norm(x)
        x = {"first": x[:, 0], "last": x[:, -1], "mean": x.mean(1)}[use]
        x = m.mix(x)
        return m.head(torch.tanh(x) if last == "tanh" else torch.relu(x))

    return _net(layers, forward)


# Models with layers of their own in Keras.
OWN = ("windows", "bilinear", "fourier", "observations", "gemma_block")
SHAPES = {
    "mobile": "4,8,8",
    "channel_gates": "3,7,7",
    "spatial_gates": "3,7,7",
    "attended": "words=5,4;others=3,3",
    "recurrent_actor": "5,5",
    "masked_encoder": "x=6,8;keep=6",
    "cross_decoder": "x=4,8;memory=5,8",
    "windows": "8,8",
    "capsules": "6",
    "rainbow": "6",
    "dreamer_cell": "x=5;h=6",
    "symlog_net": "5",
    "bottleneck": "4,8,8",
    "tcn_block": "3,9",
    "impala": "3,8,8",
    "bag": "7",
    "siamese": "one=5;two=5",
    "deep_sets": "5,4",
    "bilinear": "x=5;y=4",
    "mixture_density": "5",
    "fourier": "3",
    "diffusion": "x=4,6,6;t=1",
    "stepper": "x=4;h=6;c=6",
    "observations": "6",
    "xception": "4,8,8",
    "sentence": "6",
    "gemma_block": "4",
    "alibi": "6,8",
    "positions": "6",
}
