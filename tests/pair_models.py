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

    given = {
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
            if given.get("mean") is not None:
                self.register_buffer("mean", torch.tensor(given["mean"]).reshape(3, 1, 1))
            self.conv = nn.Conv2d(3, 4, 3, padding=given["padding"], padding_mode=given["mode"])
            self.conv2 = nn.Conv2d(
                4, 4, 3, stride=given["stride"], dilation=given["dilation"], bias=given["bias"]
            )
            self.pool = nn.AvgPool2d(3, padding=1, stride=1, count_include_pad=given["pool"])
            self.head = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if given.get("mean") is not None:
                x = (x - self.mean) / 0.3
            x = torch.relu(self.conv(x))
            return self.head(self.pool(torch.relu(self.conv2(x))).mean((2, 3)))

    return Vision()


def text(**options: Any) -> Any:
    """Words with positions, a low-rank adapter, dropout, a scale, and tied embeddings."""
    import torch
    from torch import nn
    from torch.nn import functional

    given = {
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
            if given["position"]:
                self.position = nn.Parameter(torch.zeros(6, 8))
            self.query = nn.Linear(8, 8)
            self.key = nn.Linear(8, 8)
            self.mix = LoraLinear() if given["lora"] else nn.Linear(8, 8)
            if given["scale"]:
                self.scale = nn.Parameter(torch.ones(8))
            self.up = nn.Linear(8, 8)
            self.out = nn.Linear(8, 11, bias=False)
            if given["tied"]:
                self.out.weight = self.embed.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            if given["position"]:
                x = x + self.position
            x = x + torch.softmax(self.query(x) @ self.key(x).transpose(1, 2), -1) @ x
            x = x - x.mean(given["axis"], keepdim=True)
            x = self.mix(functional.dropout(x, 0.5, training=given["dropout"]))
            return self.out(torch.tanh(self.up(x * self.scale if given["scale"] else x)))

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
        by_name = dict(zip(order, (each.transpose(1, 2) for each in parts), strict=True))
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
        made = m.decode(z), spread
        return made[::-1] if swapped else made

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
        experts = torch.stack([torch.tanh(each(x)) for each in (m.one, m.two, m.three)], -1)
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
}


def torch_state(name: str, seed: int = 0, **options: Any) -> dict[str, Any]:
    """Return random numbers for the model's tensors."""
    import torch

    generator = np.random.default_rng(seed)
    model = globals()[name](**options)
    state = model.state_dict()
    for key, value in state.items():
        if value.dtype.is_floating_point:
            drawn = generator.standard_normal(tuple(value.shape)) * 0.5
            drawn = np.abs(drawn) + 0.5 if key.endswith(("running_var", "variance")) else drawn
            state[key] = torch.from_numpy(np.asarray(drawn, np.float32))
    model.load_state_dict(state)
    return dict(model.state_dict())
