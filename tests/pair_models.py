"""Small PyTorch models for `verify` of two models; pair_keras.py has the same ones in Keras."""

from __future__ import annotations

from typing import Any

import numpy as np


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4, eps=1e-3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 2 * 3, 4),
    )


def _recurrent(kind: str) -> Any:
    import torch
    from torch import nn

    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = getattr(nn, kind)(3, 5, batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    return Sequence()


def lstm() -> Any:
    return _recurrent("LSTM")


def gru() -> Any:
    return _recurrent("GRU")


def _block(eps: float = 1e-5, approximate: str = "none") -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8, eps=eps)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm2 = nn.LayerNorm(8, eps=eps)
            self.up = nn.Linear(8, 16)
            self.down = nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate=approximate))

    return Block()


def attention() -> Any:
    return _block()


def words() -> Any:
    from torch import nn

    return nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(5 * 4, 3))


def vocabulary() -> Any:
    """Words of a vocabulary that few inputs reach as a whole."""
    from torch import nn

    return nn.Sequential(nn.Embedding(3000, 4), nn.Flatten(), nn.Linear(5 * 4, 3))


# Models with options, for faults in a model's code: the options of one side differ from the other's.


def vision(**options: Any) -> Any:
    """Convolutions, a norm and a mean over all positions."""
    import torch
    from torch import nn

    settings = {
        "padding": 1,
        "dilation": 1,
        "stride": (2, 1),
        "mode": "zeros",
        "bias": True,
        "pool": False,
        **options,
    }

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if settings.get("mean") is not None:
                self.register_buffer("mean", torch.tensor(settings["mean"]).reshape(3, 1, 1))
            self.conv = nn.Conv2d(3, 4, 3, padding=settings["padding"], padding_mode=settings["mode"])
            self.conv2 = nn.Conv2d(
                4, 4, 3, stride=settings["stride"], dilation=settings["dilation"], bias=settings["bias"]
            )
            self.pool = nn.AvgPool2d(3, padding=1, stride=1, count_include_pad=settings["pool"])
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if settings.get("mean") is not None:
                x = (x - self.mean) / 0.3
            x = torch.relu(self.conv(x))
            return self.head(self.pool(torch.relu(self.conv2(x))).mean((2, 3)))

    return Vision()


def text(**options: Any) -> Any:
    """Words with positions, a low-rank adapter, dropout, a scale, and tied embeddings."""
    import torch
    from torch import nn
    from torch.nn import functional

    settings = {
        "position": True,
        "lora": True,
        "dropout": False,
        "scale": True,
        "tied": True,
        "axis": -1,
        **options,
    }

    class LoraLinear(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.lora_a, self.lora_b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(8, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x @ self.lora_a.T @ self.lora_b.T

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            if settings["position"]:
                self.position = nn.Parameter(torch.zeros(6, 8))
            self.query = nn.Linear(8, 8)
            self.key = nn.Linear(8, 8)
            self.mix = LoraLinear() if settings["lora"] else nn.Linear(8, 8)
            if settings["scale"]:
                self.scale = nn.Parameter(torch.ones(8))
            self.up = nn.Linear(8, 8)
            self.out = nn.Linear(8, 11, bias=False)
            if settings["tied"]:
                self.out.weight = self.embed.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            if settings["position"]:
                x = x + self.position
            x = x + torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1) @ x
            x = x - x.mean(settings["axis"], keepdim=True)
            x = self.mix(functional.dropout(x, 0.5, training=settings["dropout"]))
            return self.out(torch.tanh(self.up(x * self.scale if settings["scale"] else x)))

    return Text()


def several() -> Any:
    """Two inputs by name, and two outputs by name."""
    import torch
    from torch import nn

    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)
            self.mix = nn.Linear(4, 3)

        def forward(self, *, image: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
            x = self.mix(image + self.embed(words).sum(1))
            return {"action": x.tanh(), "value": x.sum(1)}

    return Several()


def policy() -> Any:
    """The actor of the sample agents."""
    import torch
    from torch import nn

    class Actor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.l2, self.l3 = nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return 2 * torch.tanh(self.l3(torch.relu(self.l2(torch.relu(self.l1(obs))))))

    return Actor()


def activated(**options: Any) -> Any:
    """Linear layers with an activation of the options' name."""
    from torch import nn

    cls = getattr(nn, options.get("activation", "ReLU"))
    return nn.Sequential(
        nn.Linear(6, 8), cls(), nn.Linear(8, 8), nn.LayerNorm(8, eps=options.get("eps", 1e-5))
    )


def block(**options: Any) -> Any:
    """An attention block."""
    return _block(**options)


# Further architectures. Their options are faults in a model's code, too.


def _net(layers: dict[str, Any], forward: Any) -> Any:
    """Return a module with these layers; `forward` gets the module and the inputs."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                if isinstance(layer, torch.Tensor) and not isinstance(layer, nn.Parameter):
                    self.register_buffer(name, layer)
                else:
                    setattr(self, name, layer)

        def forward(self, *inputs: torch.Tensor) -> Any:
            return forward(self, *inputs)

    return Net()


def residual(
    skip: bool = True, early: bool = False, end: bool = False, eps: float = 1e-5, pool: str = "mean"
) -> Any:
    """A residual block, a convolution with stride 2, and a mean over all positions."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.BatchNorm2d(4)}
    layers |= {"conv1": nn.Conv2d(4, 4, 3, padding=1), "norm1": nn.BatchNorm2d(4)}
    layers |= {"conv2": nn.Conv2d(4, 4, 3, padding=1), "norm2": nn.BatchNorm2d(4, eps=eps)}
    layers |= {"down": nn.Conv2d(4, 6, 3, stride=2, padding=0 if end else 1), "head": nn.Linear(6, 3)}

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.norm(m.conv(x)))
        y = m.norm2(m.conv2(torch.relu(m.norm1(m.conv1(x)))))
        y = torch.relu(y) + x if early else torch.relu(y + x if skip else y)
        y = torch.relu(m.down(functional.pad(y, (0, 1, 0, 1)) if end else y))
        return m.head(y.mean((2, 3)) if pool == "mean" else y.amax((2, 3)))

    return _net(layers, forward)


def upsampler(
    mode: str = "bilinear", align: bool = False, swapped: bool = False, last: str = "Sigmoid"
) -> Any:
    """Convolutions, an image of twice the size beside a skipped one, and a transposed convolution."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers = {"conv": nn.Conv2d(3, 4, 3, padding=1), "low": nn.Conv2d(4, 4, 3, padding=1)}
    layers |= {"mix": nn.Conv2d(8, 4, 3, padding=1), "up": nn.ConvTranspose2d(4, 4, 2, stride=2)}
    layers["out"] = nn.Conv2d(4, 2, 1)
    activation = getattr(nn, last)()

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.conv(x))
        y = torch.relu(m.low(functional.max_pool2d(x, 2)))
        options = {} if mode == "nearest" else {"align_corners": align}
        y = functional.interpolate(y, scale_factor=2, mode=mode, **options)
        y = torch.relu(m.mix(torch.cat([x, y] if swapped else [y, x], 1)))
        return activation(m.out(torch.relu(m.up(y))))

    return _net(layers, forward)


def separable(dilation: int = 2, after: str = "relu") -> Any:
    """A depthwise convolution with two outputs for each channel, a pointwise and a grouped one."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers = {"depth": nn.Conv2d(4, 8, 3, groups=4), "point": nn.Conv2d(8, 6, 1)}
    layers |= {"group": nn.Conv2d(6, 6, 3, groups=2, padding=dilation, dilation=dilation)}
    layers["head"] = nn.Linear(6, 3)

    def forward(m: Any, x: Any) -> Any:
        x = getattr(functional, after)(m.point(m.depth(x)))
        return m.head(torch.relu(m.group(x)).mean((2, 3)))

    return _net(layers, forward)


def squeeze(gate: str = "sigmoid", use: str = "multiply", pool: str = "mean") -> Any:
    """Squeeze and excitation."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers = {"conv": nn.Conv2d(3, 6, 3), "fc1": nn.Linear(6, 4), "fc2": nn.Linear(4, 6)}
    layers["mix"] = nn.Conv2d(6, 3, 1)

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.conv(x))
        y = x.mean((2, 3)) if pool == "mean" else x.amax((2, 3))
        y = getattr(functional, gate)(m.fc2(torch.relu(m.fc1(y))))[..., None, None]
        x = {"multiply": lambda: x * y, "add": lambda: x + y, "": lambda: x}[use]()
        return m.mix(x).mean((2, 3))

    return _net(layers, forward)


def temporal(causal: bool = True, dilation: int = 2, step: int = -1) -> Any:
    """Causal convolutions over time."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers = {"conv1": nn.Conv1d(4, 6, 3, dilation=dilation), "conv2": nn.Conv1d(6, 5, 3)}
    layers["head"] = nn.Linear(5, 2)

    def forward(m: Any, x: Any) -> Any:
        for layer, width in ((m.conv1, 2 * dilation), (m.conv2, 2)):
            x = torch.relu(layer(functional.pad(x, (width, 0) if causal else (width // 2, width // 2))))
        return m.head(x[:, :, step])

    return _net(layers, forward)


def volume(pool: str = "max", last: bool = False) -> Any:
    """A convolution over three axes, pooled and flattened."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers = {"conv": nn.Conv3d(2, 3, 2), "head": nn.Linear(3 * 2 * 2 * 3, 4)}

    def forward(m: Any, x: Any) -> Any:
        x = getattr(functional, f"{pool}_pool3d")(torch.relu(m.conv(x)), 2)
        return m.head((x.movedim(1, -1) if last else x).flatten(1))

    return _net(layers, forward)


def decoder(
    causal: bool = True,
    scale: bool = True,
    heads: int = 2,
    axis: int = -1,
    embed: float = 8**0.5,
    post: bool = False,
    eps: float = 1e-5,
    skip: bool = True,
) -> Any:
    """A language model of one block with attention by hand."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"embed": nn.Embedding(17, 8), "position": nn.Parameter(torch.zeros(6, 8))}
    layers |= {name: nn.Linear(8, 8) for name in ("query", "key", "value", "proj")}
    layers |= {name: nn.LayerNorm(8, eps=eps) for name in ("norm", "norm2")}
    layers |= {"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "out": nn.Linear(8, 17)}

    def split(x: Any) -> Any:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def forward(m: Any, words: Any) -> Any:
        x = m.embed(words) * embed + m.position
        y = x if post else m.norm(x)
        q, k, v = (split(layer(y)) for layer in (m.query, m.key, m.value))
        scores = q @ k.transpose(2, 3)
        scores = scores / q.shape[-1] ** 0.5 if scale else scores
        if causal:
            scores = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
        y = m.proj((torch.softmax(scores, axis) @ v).transpose(1, 2).flatten(2))
        x = m.norm(x + y) if post else x + y
        y = m.down(functional.gelu(m.up(m.norm2(x))))
        return m.out(x + y if skip else y)

    return _net(layers, forward)


def fused(order: str = "qkv", inner: bool = False) -> Any:
    """Attention with one matrix for queries, keys and values; `inner`: those of each head together."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        y = m.qkv(x)
        parts = (
            y.unflatten(-1, (2, 3, 4)).movedim(-2, 0) if inner else y.unflatten(-1, (3, 2, 4)).movedim(-3, 0)
        )
        by_name = dict(zip(order, (part.transpose(1, 2) for part in parts), strict=True))
        scores = torch.softmax(by_name["q"] @ by_name["k"].transpose(2, 3) / 2, -1)
        return m.proj((scores @ by_name["v"]).transpose(1, 2).flatten(2))

    return _net({"qkv": nn.Linear(8, 24), "proj": nn.Linear(8, 5)}, forward)


def gated(first: bool = True, activation: str = "silu", eps: float = 1e-6) -> Any:
    """A gated linear unit after a root-mean-square norm."""
    import torch
    from torch import nn
    from torch.nn import functional

    def forward(m: Any, x: Any) -> Any:
        a, b = m.up(m.norm(x)).chunk(2, -1)
        act = getattr(functional, activation)
        return torch.tanh(m.down(act(a) * b if first else a * act(b)))

    layers = {"norm": nn.RMSNorm(8, eps=eps), "up": nn.Linear(8, 12), "down": nn.Linear(6, 4)}
    return _net(layers, forward)


def vae(half: bool = True, swapped: bool = False) -> Any:
    """An encoder with a mean and the logarithm of a variance, of equal shapes."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.conv(x)).flatten(1)
        mean, spread = m.mean(x), m.spread(x)
        z = mean + torch.exp(spread * 0.5 if half else spread)
        outputs = m.decode(z), spread
        return outputs[::-1] if swapped else outputs

    layers = {"conv": nn.Conv2d(3, 4, 3, stride=2), "decode": nn.Linear(5, 5)}
    layers |= {name: nn.Linear(4 * 3 * 3, 5) for name in ("mean", "spread")}
    return _net(layers, forward)


def critic(swapped: bool = False, difference: bool = False) -> Any:
    """A critic of states and actions of one width, with two values."""
    import torch
    from torch import nn

    def forward(m: Any, obs: Any, action: Any) -> Any:
        h = torch.relu(m.obs(obs))
        x = torch.cat([action, h] if swapped else [h, action], -1)
        x = torch.relu(m.hidden(x))
        q1, q2 = m.q1(x), m.q2(x)
        return torch.maximum(q1, q2) if difference else torch.minimum(q1, q2)

    layers = {"obs": nn.Linear(5, 4), "hidden": nn.Linear(8, 8), "q1": nn.Linear(8, 1), "q2": nn.Linear(8, 1)}
    return _net(layers, forward)


def dueling(mean: str = "mean", axis: int = 1) -> Any:
    """A value and advantages around their mean."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.trunk(x))
        value, advantage = m.value(x), m.advantage(x)
        centre = {
            "mean": lambda: advantage.mean(axis, keepdim=True),
            "max": lambda: advantage.amax(axis, keepdim=True),
            "": lambda: 0,
        }[mean]()
        return value + advantage - centre

    layers = {"trunk": nn.Linear(6, 8), "value": nn.Linear(8, 1), "advantage": nn.Linear(8, 4)}
    return _net(layers, forward)


def mixture(gate: str = "softmax") -> Any:
    """Three experts, weighed by a gate."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        y = m.gate(x)
        y = torch.softmax(y, -1) if gate == "softmax" else torch.sigmoid(y)
        experts = torch.stack([torch.tanh(expert(x)) for expert in (m.one, m.two, m.three)], -1)
        return m.out((experts * y[:, None]).sum(-1))

    layers = {name: nn.Linear(6, 6) for name in ("one", "two", "three")}
    return _net({"gate": nn.Linear(6, 3), **layers, "out": nn.Linear(6, 2)}, forward)


def normalized(root: bool = True, clip: float = 1.5) -> Any:
    """Observations in units of their deviation, clipped."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = (x - m.centre) / (m.variance.sqrt() if root else m.variance)
        return m.out(torch.tanh(m.hidden(x.clamp(-clip, clip) if clip else x)))

    layers: dict[str, Any] = {"hidden": nn.Linear(6, 8), "out": nn.Linear(8, 2)}
    layers |= {
        "centre": torch.tensor([0.1, -0.3, 0.5, 0.0, 1.0, 0.2]),
        "variance": torch.tensor([0.5, 2.0, 1.5, 3.0, 0.7, 1.2]),
    }
    return _net(layers, forward)


def slopes(slope: float = 0.01, alpha: float = 1.0, last: str = "Tanh") -> Any:
    """Dense layers, each with another activation."""
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = m.leak(m.second(m.prelu(m.first(x))))
        return m.end(m.fourth(m.elu(m.third(x))))

    layers = {"first": nn.Linear(6, 8), "prelu": nn.PReLU(8), "second": nn.Linear(8, 8)}
    layers |= {"leak": nn.LeakyReLU(slope), "third": nn.Linear(8, 8), "elu": nn.ELU(alpha)}
    layers |= {"fourth": nn.Linear(8, 3), "end": getattr(nn, last)()}
    return _net(layers, forward)


def groups(groups: int = 2, eps: float = 1e-3) -> Any:
    """A convolution and a group norm."""
    import torch
    from torch import nn

    layers = {"conv": nn.Conv2d(3, 8, 3), "norm": nn.GroupNorm(groups, 8, eps=eps), "head": nn.Linear(8, 2)}
    return _net(layers, lambda m, x: m.head(torch.relu(m.norm(m.conv(x))).mean((2, 3))))


def stacked(last: str = "step", activation: str = "tanh") -> Any:
    """A bidirectional LSTM, then a GRU."""
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = m.gru(m.both(x)[0])[0]
        return m.head(x[:, -1] if last == "step" else x.mean(1))

    del activation
    layers = {"both": nn.LSTM(4, 5, batch_first=True, bidirectional=True)}
    layers |= {"gru": nn.GRU(10, 6, batch_first=True), "head": nn.Linear(6, 2)}
    return _net(layers, forward)


def recommender(use: str = "multiply") -> Any:
    """Two tables of one shape, and a dense layer."""
    import torch
    from torch import nn

    def forward(m: Any, user: Any, item: Any) -> Any:
        a, b = m.user(user), m.item(item)
        return m.out(torch.relu(m.hidden(a * b if use == "multiply" else a + b)))

    layers = {"user": nn.Embedding(12, 6), "item": nn.Embedding(12, 6)}
    return _net({**layers, "hidden": nn.Linear(6, 6), "out": nn.Linear(6, 1)}, forward)


def pixels(scale: float = 255.0, reverse: bool = False, offset: float = 0.0) -> Any:
    """Convolutions of an image in units of its largest number."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = (x.flip(1) if reverse else x) / scale - offset
        return m.head(torch.relu(m.conv2(torch.relu(m.conv(x)))).mean((2, 3)))

    layers = {"conv": nn.Conv2d(3, 4, 3, stride=2), "conv2": nn.Conv2d(4, 5, 2), "head": nn.Linear(5, 3)}
    return _net(layers, forward)


# Further architectures: what their options change is listed in planted_faults.py.


def _dense(**sizes: tuple[int, int]) -> dict[str, Any]:
    """Return dense layers by name."""
    from torch import nn

    return {name: nn.Linear(*size) for name, size in sizes.items()}


def preactivated(shared: bool = True, normed: bool = True, shortcut: bool = True, eps: float = 1e-3) -> Any:
    """A residual block that starts with its norm, with a convolution as its shortcut."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 6, 3, padding=1), "norm": nn.BatchNorm2d(6, eps=eps)}
    layers |= {"conv1": nn.Conv2d(6, 8, 3, stride=2, padding=1), "norm1": nn.BatchNorm2d(8, eps=eps)}
    layers |= {"conv2": nn.Conv2d(8, 8, 3, padding=1), "side": nn.Conv2d(6, 8, 1, stride=2)}
    layers["head"] = nn.Linear(8, 3)

    def forward(m: Any, x: Any) -> Any:
        x = m.conv(x)
        y = torch.relu(m.norm(x) if normed else x)
        side = m.side(y if shared else x)
        y = m.conv2(torch.relu(m.norm1(m.conv1(y))))
        return m.head((y + side if shortcut else y).mean((2, 3)))

    return _net(layers, forward)


def branches(order: str = "1 3 5 pool", pool: str = "max", dilation: int = 1) -> Any:
    """Parallel convolutions of several sizes, and a pooled branch."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"one": nn.Conv2d(4, 3, 1), "pooled": nn.Conv2d(4, 3, 1)}
    layers["three"] = nn.Conv2d(4, 4, 3, padding=dilation, dilation=dilation)
    layers |= {"five": nn.Conv2d(4, 3, 5, padding=2), "mix": nn.Conv2d(13, 5, 3), "head": nn.Linear(5, 2)}

    def forward(m: Any, x: Any) -> Any:
        pool2d = functional.max_pool2d(x, 3, 1, 1)
        if pool == "avg":
            pool2d = functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        parts = {"1": m.one(x), "3": m.three(x), "5": m.five(x), "pool": m.pooled(pool2d)}
        x = torch.relu(torch.cat([parts[name] for name in order.split()], 1))
        return m.head(torch.relu(m.mix(x)).mean((2, 3)))

    return _net(layers, forward)


def dense_block(new_first: bool = False, active: bool = True) -> Any:
    """Convolutions whose outputs are appended to their inputs."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = m.conv(x)
        for layer in (m.grow1, m.grow2):
            y = layer(x)
            y = torch.relu(y) if active else y
            x = torch.cat([y, x] if new_first and layer is m.grow1 else [x, y], 1)
        return m.head(torch.relu(m.norm(x)).mean((2, 3)))

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 4, 3, padding=1), "norm": nn.BatchNorm2d(12, eps=1e-3)}
    layers |= {"grow1": nn.Conv2d(4, 4, 3, padding=1), "grow2": nn.Conv2d(8, 4, 3, padding=1)}
    return _net({**layers, "head": nn.Linear(12, 3)}, forward)


def unet(pool: str = "max", early: bool = False, shift: int = 0) -> Any:
    """Convolutions at two sizes with a skipped image."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"wide": nn.Conv2d(2, 4, 3, padding=1), "deep": nn.Conv2d(4, 8, 3, padding=1)}
    layers |= {"up": nn.ConvTranspose2d(8, 4, 2, stride=2), "mix": nn.Conv2d(8, 4, 3, padding=1)}
    layers["out"] = nn.Conv2d(4, 1, 1)

    def forward(m: Any, x: Any) -> Any:
        skip = m.wide(x)
        x = torch.relu(skip)
        y = functional.max_pool2d(x, 2) if pool == "max" else functional.avg_pool2d(x, 2)
        y = torch.relu(m.deep(y))
        skip = torch.roll(skip if early else x, shift, 3)
        return torch.sigmoid(m.out(torch.relu(m.mix(torch.cat([m.up(y), skip], 1)))))

    return _net(layers, forward)


def convnext(
    eps: float = 1e-6, gelu: str = "none", scaled: bool = True, skip: bool = True, whole: bool = False
) -> Any:
    """A wide depthwise convolution, dense layers on channels, and a scale for each."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"depth": nn.Conv2d(6, 6, 7, padding=3, groups=6)}
    layers |= {"norm": nn.GroupNorm(1, 6, eps) if whole else nn.LayerNorm(6, eps)}
    layers |= {**_dense(up=(6, 24), down=(24, 6), head=(6, 3)), "scale": nn.Parameter(torch.ones(6))}

    def forward(m: Any, x: Any) -> Any:
        y = m.depth(x)
        y = m.norm(y).permute(0, 2, 3, 1) if whole else m.norm(y.permute(0, 2, 3, 1))
        y = m.down(functional.gelu(m.up(y), approximate=gelu))
        y = (y * m.scale if scaled else y).permute(0, 3, 1, 2)
        return m.head((x + y if skip else y).mean((2, 3)))

    return _net(layers, forward)


def mixer(turned: bool = True, skip: bool = True, pool: str = "mean", activation: str = "gelu") -> Any:
    """Dense layers over positions, then over features, of a square sequence."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"norm": nn.LayerNorm(8, 1e-3), "norm2": nn.LayerNorm(8, 1e-3)}
    layers |= _dense(rows1=(8, 12), rows2=(12, 8), up=(8, 12), down=(12, 8), head=(8, 3))

    def forward(m: Any, x: Any) -> Any:
        y = m.norm(x)
        y = y.transpose(1, 2) if turned else y
        y = m.rows2(getattr(functional, activation)(m.rows1(y)))
        y = y.transpose(1, 2) if turned else y
        x = x + y if skip else y
        x = x + m.down(functional.gelu(m.up(m.norm2(x))))
        return m.head(x.mean(1) if pool == "mean" else torch.amax(x, 1))

    return _net(layers, forward)


def patches(token: str = "first", use: str = "token", turned: bool = False, heads: int = 2) -> Any:
    """Patches of an image and a token of their class through attention."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"patch": nn.Conv2d(3, 8, 4, stride=4)}
    layers |= {"token": nn.Parameter(torch.zeros(1, 8)), "position": nn.Parameter(torch.zeros(7, 8))}
    layers |= {"attention": nn.MultiheadAttention(8, heads, batch_first=True)}
    layers |= {"norm": nn.LayerNorm(8, 1e-3), **_dense(head=(8, 3))}

    def forward(m: Any, x: Any) -> Any:
        x = m.patch(x)
        x = (x.transpose(2, 3) if turned else x).flatten(2).transpose(1, 2)
        token = m.token.expand(len(x), 1, 8)
        x = torch.cat([token, x] if token_first else [x, token], 1) + m.position
        y = m.norm(x)
        x = x + m.attention(y, y, y, need_weights=False)[0]
        return m.head(x[:, 0] if use == "token" else x.mean(1))

    token_first = token == "first"
    return _net(layers, forward)


def cross_attention(keys: str = "memory", width: int = 4, active: str = "softmax") -> Any:
    """Attention of one sequence on another one."""
    import torch

    def split(x: Any) -> Any:
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    def forward(m: Any, x: Any, memory: Any) -> Any:
        k = m.key(memory if keys == "memory" else memory.flip(1))
        scores = split(m.query(x)) @ split(k).transpose(2, 3) / width**0.5
        shares = torch.softmax(scores, -1) if active == "softmax" else torch.sigmoid(scores)
        return m.proj((shares @ split(m.value(memory))).transpose(1, 2).flatten(2))

    return _net(_dense(query=(8, 8), key=(8, 8), value=(8, 8), proj=(8, 4)), forward)


def rotary(pairs: str = "halves", base: float = 1e4, values: bool = False, reverse: bool = False) -> Any:
    """Attention of queries and keys that are turned by their positions."""
    import torch

    angles = torch.arange(6.0)[:, None] / base ** (torch.arange(4.0) / 4)

    def turn(x: Any) -> Any:
        cos, sin = torch.cos(angles), torch.sin(-angles if reverse else angles)
        if pairs == "halves":
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    def forward(m: Any, x: Any) -> Any:
        q, k, v = turn(m.query(x)), turn(m.key(x)), m.value(x)
        shares = torch.softmax(q @ k.transpose(1, 2) / 8**0.5, -1)
        return m.proj(shares @ (turn(v) if values else v))

    return _net(_dense(query=(8, 8), key=(8, 8), value=(8, 8), proj=(8, 4)), forward)


def shared_heads(tiled: bool = False, heads: int = 4, scaled: bool = True) -> Any:
    """Attention with fewer heads of keys and values than of queries."""
    import torch

    def forward(m: Any, x: Any) -> Any:
        q = m.query(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        width = q.shape[-1]
        k, v = (layer(x).unflatten(-1, (-1, width)).transpose(1, 2) for layer in (m.key, m.value))
        times = heads // k.shape[1]
        k, v = (item.repeat(1, times, 1, 1) if tiled else item.repeat_interleave(times, 1) for item in (k, v))
        scores = q @ k.transpose(2, 3)
        shares = torch.softmax(scores / width**0.5 if scaled else scores, -1)
        return m.proj((shares @ v).transpose(1, 2).flatten(2))

    return _net(_dense(query=(8, 16), key=(8, 8), value=(8, 8), proj=(16, 4)), forward)


def swiglu(norm: str = "rms", activation: str = "silu", on: str = "gate", use: str = "*") -> Any:
    """A gated block of two dense layers after a root-mean-square norm."""
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"norm": nn.RMSNorm(8, eps=1e-5)}
    layers = layers if norm == "rms" else {"norm": nn.LayerNorm(8, 1e-5, bias=False)}
    layers |= _dense(gate=(8, 12), up=(8, 12), down=(12, 8), head=(8, 3))

    def forward(m: Any, x: Any) -> Any:
        y = m.norm(x)
        act = getattr(functional, activation)
        a, b = m.gate(y), m.up(y)
        a, b = (act(a), b) if on == "gate" else (a, act(b))
        return m.head(x + m.down(a * b if use == "*" else a + b))

    return _net(layers, forward)


def wavenet(gate: str = "sigmoid", late: bool = False, skip: str = "gated", dilation: int = 2) -> Any:
    """A dilated causal convolution with a gate, a residual and a skipped output."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"start": nn.Conv1d(3, 6, 1), "keep": nn.Conv1d(6, 6, 1)}
    layers |= {name: nn.Conv1d(6, 6, 2, dilation=dilation) for name in ("filter", "gate")}
    layers |= {"skip": nn.Conv1d(6, 4, 1), "last": nn.Conv1d(6, 4, 1), "out": nn.Conv1d(4, 2, 1)}

    def forward(m: Any, x: Any) -> Any:
        x = m.start(x)
        padded = functional.pad(x, (0, dilation) if late else (dilation, 0))
        z = torch.tanh(m.filter(padded)) * getattr(torch, gate)(m.gate(padded))
        y = m.skip(z if skip == "gated" else x)
        return m.out(torch.relu(y + m.last(x + m.keep(z))))

    return _net(layers, forward)


def translator(state: str = "both", reverse: bool = False, exchanged: bool = False) -> Any:
    """An LSTM whose last state starts another one."""
    import torch
    from torch import nn

    def forward(m: Any, words: Any, others: Any) -> Any:
        _, (h, c) = m.encode(words.flip(1) if reverse else words)
        h, c = (c, h) if exchanged else (h, c)
        h, c = (torch.zeros_like(item) if state == "zero" else item for item in (h, c))
        return m.head(m.decode(others, (h, c))[0])

    layers: dict[str, Any] = {"encode": nn.LSTM(4, 6, batch_first=True)}
    return _net({**layers, "decode": nn.LSTM(3, 6, batch_first=True), **_dense(head=(6, 2))}, forward)


def pooled_steps(weigh: str = "softmax", active: str = "tanh") -> Any:
    """A GRU whose steps are summed with learned shares."""
    import torch
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        x = m.rnn(x)[0]
        scores = m.score(torch.tanh(m.hidden(x)) if active == "tanh" else m.hidden(x))
        if weigh == "mean":
            return m.head(x.mean(1))
        shares = torch.softmax(scores, 1) if weigh == "softmax" else torch.sigmoid(scores)
        return m.head((x * shares).sum(1))

    return _net(
        {"rnn": nn.GRU(4, 6, batch_first=True), **_dense(hidden=(6, 5), score=(5, 1), head=(6, 2))}, forward
    )


def both_ways(merge: str = "sum", turned: bool = False, step: int = -1) -> Any:
    """The sum of a forward and a backward GRU, and a dense layer on one step."""
    from torch import nn

    def forward(m: Any, x: Any) -> Any:
        a, b = m.both(x)[0].chunk(2, -1)
        x = a + (b.flip(1) if turned else b)
        return m.head((x / 2 if merge == "ave" else a * b if merge == "mul" else x)[:, step])

    return _net({"both": nn.GRU(4, 5, batch_first=True, bidirectional=True), **_dense(head=(5, 2))}, forward)


def conditioned(one: bool = True, exchanged: bool = False, late: bool = False, sign: float = 1.0) -> Any:
    """Channels of an image that are scaled and shifted as a vector says."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 6, 3), "conv2": nn.Conv2d(6, 4, 3)}
    layers |= _dense(condition=(5, 12), head=(4, 2))

    def forward(m: Any, image: Any, task: Any) -> Any:
        x = m.conv(image)
        g, b = m.condition(task)[:, :, None, None].chunk(2, 1)
        g, b = (b, g) if exchanged else (g, b)
        x = torch.relu(x) if late else x
        x = x * (1 + g if one else g) + sign * b
        return m.head(torch.relu(m.conv2(x if late else torch.relu(x))).mean((2, 3)))

    return _net(layers, forward)


def atoms(axis: int = -1, low: float = -10.0, turned: bool = False, shares: str = "softmax") -> Any:
    """The mean of a distribution over returns for each action."""
    import torch

    support = torch.linspace(low, low + 20, 5)

    def forward(m: Any, x: Any) -> Any:
        y = m.values(torch.relu(m.trunk(x)))
        y = y.unflatten(-1, (5, 3)).transpose(1, 2) if turned else y.unflatten(-1, (3, 5))
        y = torch.softmax(y, axis) if shares == "softmax" else torch.sigmoid(y)
        return (y * support).sum(-1)

    return _net(_dense(trunk=(6, 8), values=(8, 15)), forward)


def gaussian(squash: str = "tanh", high: float = 1.0, spread: str = "exp", size: float = 2.0) -> Any:
    """The mean action and the deviation of a policy."""
    import torch
    from torch.nn import functional

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.body(x))
        mean, log = m.mean(x), m.log(x).clamp(-1.0, high)
        mean = torch.tanh(mean) if squash == "tanh" else mean.clamp(-1, 1)
        return mean * size, torch.exp(log) if spread == "exp" else functional.softplus(log)

    return _net(_dense(body=(6, 8), mean=(8, 3), log=(8, 3)), forward)


def encoder(divisor: float = 255.0, late: bool = False, last: str = "tanh", flat: str = "first") -> Any:
    """Convolutions of an image in 0 to 255, flattened, then a dense layer and its norm."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"conv": nn.Conv2d(3, 4, 3, stride=2), "conv2": nn.Conv2d(4, 4, 3)}
    layers |= {**_dense(trunk=(16, 6), head=(6, 2)), "norm": nn.LayerNorm(6, 1e-3)}

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.conv2(torch.relu(m.conv(x / divisor - 0.5))))
        x = m.trunk((x if flat == "first" else x.permute(0, 2, 3, 1)).flatten(1))
        x = m.norm(torch.tanh(x)) if late else m.norm(x)
        return m.head(torch.tanh(x) if last == "tanh" and not late else x)

    return _net(layers, forward)


def quantiles(start: int = 1, use: str = "*", active: bool = True) -> Any:
    """Values at quantiles, which cosines describe."""
    import torch

    waves = torch.pi * torch.arange(start, start + 8.0)

    def forward(m: Any, x: Any, tau: Any) -> Any:
        y = m.wave(torch.cos(tau * waves))
        y = torch.relu(y) if active else y
        x = torch.relu(m.body(x))
        return m.out(torch.relu(m.hidden(x * y if use == "*" else x + y)))

    return _net(_dense(body=(6, 8), wave=(8, 8), hidden=(8, 8), out=(8, 3)), forward)


def graph_net(turned: bool = False, second: bool = True, loops: bool = False) -> Any:
    """Dense layers whose outputs are summed along the edges of a graph."""
    import torch

    def forward(m: Any, nodes: Any, edges: Any) -> Any:
        edges = edges.transpose(1, 2) if turned else edges
        edges = edges + torch.eye(5) if loops else edges
        x = torch.relu(edges @ m.first(nodes))
        x = m.second(x)
        return m.head((edges @ x if second else x).mean(1))

    return _net(_dense(first=(4, 6), second=(6, 6), head=(6, 2)), forward)


def factors(shift: int = 0, half: float = 0.5, order: int = 1) -> Any:
    """Products of all pairs of four embeddings."""
    import torch
    from torch import nn

    def forward(m: Any, words: Any) -> Any:
        x = m.embed((words + shift) % 11)
        whole, parts = x.sum(1) ** 2, (x**2).sum(1)
        y = half * (whole - parts if order > 0 else parts - whole)
        return m.out(torch.relu(m.hidden(y)))

    return _net({"embed": nn.Embedding(11, 6), **_dense(hidden=(6, 8), out=(8, 2))}, forward)


def highway(carry: str = "gated", gate: str = "sigmoid", active: str = "relu") -> Any:
    """A layer whose output is mixed with its input as a gate says."""
    import torch

    def forward(m: Any, x: Any) -> Any:
        x = m.start(x)
        t = torch.sigmoid(m.gate(x)) if gate == "sigmoid" else torch.tanh(m.gate(x))
        h = getattr(torch, active)(m.change(x))
        mixed = {"gated": lambda: t * h + (1 - t) * x, "exchanged": lambda: (1 - t) * h + t * x}
        return m.head(mixed.get(carry, lambda: t * h + x)())

    return _net(_dense(start=(6, 6), gate=(6, 6), change=(6, 6), head=(6, 2)), forward)


def maxout(pieces: str = "inner", use: str = "max") -> Any:
    """The largest of two features, several times."""

    def forward(m: Any, x: Any) -> Any:
        x = m.first(x)
        x = x.unflatten(-1, (6, 2)) if pieces == "inner" else x.unflatten(-1, (2, 6)).transpose(1, 2)
        return m.out(x.amax(-1) if use == "max" else x.mean(-1))

    return _net(_dense(first=(6, 12), out=(6, 3)), forward)


def waves(rate: float = 3.0, form: str = "sin", again: bool = True) -> Any:
    """Dense layers with sines."""
    import torch

    def forward(m: Any, x: Any) -> Any:
        x = getattr(torch, form)(rate * m.first(x))
        x = m.second(x)
        return m.out(torch.sin(x) if again else x)

    return _net(_dense(first=(3, 8), second=(8, 8), out=(8, 2)), forward)


def shuffled(shuffle: bool = True, groups: int = 2, space: str = "depth first") -> Any:
    """Grouped convolutions with their channels shuffled, and channels spread out in space."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {"group1": nn.Conv2d(4, 8, 3, padding=1, groups=2)}
    layers |= {"group2": nn.Conv2d(8, 8, 1, groups=groups), "last": nn.Conv2d(2, 2, 3)}

    def forward(m: Any, x: Any) -> Any:
        x = torch.relu(m.group1(x))
        x = x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2) if shuffle else x
        x = torch.relu(m.group2(x))
        n, _, h, w = x.shape
        x = x.reshape(n, 2, 2, 2, h, w)
        x = x.transpose(2, 3) if space == "width first" else x
        return m.last(x.permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 2 * h, 2 * w))

    return _net(layers, forward)


def ngrams(pool: str = "max", order: str = "23", active: str = "relu") -> Any:
    """Convolutions of two lengths over words, and the largest value of each."""
    import torch
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"embed": nn.Embedding(11, 6), "two": nn.Conv1d(6, 4, 2)}
    layers |= {"three": nn.Conv1d(6, 4, 3), "out": nn.Linear(8, 2)}

    def forward(m: Any, words: Any) -> Any:
        x = m.embed(words).transpose(1, 2)
        act = getattr(functional, active)
        parts = {"2": act(m.two(x)), "3": act(m.three(x))}
        output = [item.amax(2) if pool == "max" else item.mean(2) for item in map(parts.get, order)]
        return m.out(torch.cat(output, 1))

    return _net(layers, forward)


def styled(eps: float = 1e-3, active: str = "leaky", affine: bool = True) -> Any:
    """A transposed convolution, a norm of each channel of each image, and a leaky activation."""
    from torch import nn
    from torch.nn import functional

    layers: dict[str, Any] = {"up": nn.ConvTranspose2d(3, 6, 4, stride=2, padding=1)}
    layers |= {"norm": nn.GroupNorm(6, 6, eps=eps, affine=affine), "out": nn.Conv2d(6, 2, 3, padding=1)}
    slopes = {"leaky": 0.2, "less leaky": 0.01, "linear": 1.0}

    def forward(m: Any, x: Any) -> Any:
        return m.out(functional.leaky_relu(m.norm(m.up(x)), slopes[active])).tanh()

    return _net(layers, forward)


def tied_decoder(tied: bool = True, bias: bool = True, active: str = "sigmoid") -> Any:
    """An autoencoder whose decoder has the transposed weights of its encoder."""
    import torch
    from torch import nn

    layers: dict[str, Any] = {**_dense(encode=(8, 5), latent=(5, 5))}
    layers |= {"shift": nn.Parameter(torch.zeros(8))}
    layers |= {} if tied else {"other": nn.Linear(5, 8, bias=False)}

    def forward(m: Any, x: Any) -> Any:
        x = m.latent(getattr(torch, active)(m.encode(x)))
        x = x @ m.encode.weight if tied else m.other(x)
        return x + m.shift if bias else x

    return _net(layers, forward)


def cross_network(first: bool = True, skip: bool = True, use: str = "*") -> Any:
    """Products of the input with a layer's outputs, twice."""

    def forward(m: Any, x: Any) -> Any:
        x0 = m.start(x)
        x = x0
        for layer in (m.cross1, m.cross2):
            y = layer(x)
            y = (x0 if first else x) * y if use == "*" else x0 + y
            x = y + x if skip else y
        return m.out(x)

    return _net(_dense(start=(5, 6), cross1=(6, 6), cross2=(6, 6), out=(6, 2)), forward)


RIGHT = ("mlp", "cnn", "lstm", "gru", "block", "words")
SHAPES = {
    "mlp": "6",
    "cnn": "3,8,10",
    "lstm": "7,3",
    "gru": "7,3",
    "attention": "6,8",
    "words": "5",
    "vision": "3,9,9",
    "text": "6",
    "activated": "6",
    "block": "6,8",
    "residual": "3,10,10",
    "upsampler": "3,6,8",
    "separable": "4,9,9",
    "squeeze": "3,7,8",
    "temporal": "4,9",
    "volume": "2,5,6,7",
    "decoder": "6",
    "fused": "7,8",
    "gated": "8",
    "vae": "3,8,8",
    "critic": "obs=5;action=4",
    "dueling": "6",
    "mixture": "6",
    "normalized": "6",
    "slopes": "6",
    "groups": "3,7,7",
    "stacked": "7,4",
    "recommender": "user=;item=",
    "pixels": "3,9,9",
    "preactivated": "3,9,9",
    "branches": "4,8,8",
    "dense_block": "3,8,8",
    "unet": "2,8,8",
    "convnext": "6,8,8",
    "mixer": "8,8",
    "patches": "3,8,12",
    "cross_attention": "x=3,8;memory=5,8",
    "rotary": "6,8",
    "shared_heads": "6,8",
    "swiglu": "8",
    "wavenet": "3,9",
    "translator": "words=5,4;others=6,3",
    "pooled_steps": "7,4",
    "both_ways": "7,4",
    "conditioned": "image=3,8,8;task=5",
    "atoms": "6",
    "gaussian": "6",
    "encoder": "3,9,9",
    "quantiles": "x=6;tau=1",
    "graph_net": "nodes=5,4;edges=5,5",
    "factors": "4",
    "highway": "6",
    "maxout": "6",
    "waves": "3",
    "shuffled": "4,6,6",
    "ngrams": "7",
    "styled": "3,5,5",
    "tied_decoder": "8",
    "cross_network": "5",
}


def torch_state(model: Any, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return random numbers for the tensors of a model, or of one of the models above by its name."""
    import torch

    generator = np.random.default_rng(seed)
    model = globals()[model](**options) if isinstance(model, str) else model
    state = model.state_dict()
    for key, value in state.items():
        if value.dtype.is_floating_point:
            drawn = generator.standard_normal(tuple(value.shape)) * 0.5
            drawn = np.abs(drawn) + 0.5 if key.endswith(("running_var", "variance")) else drawn
            state[key] = torch.from_numpy(np.asarray(drawn, np.float32))
    model.load_state_dict(state)
    return dict(model.state_dict())
