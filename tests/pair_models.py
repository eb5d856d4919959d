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
            drawn = np.abs(drawn) + 0.5 if key.endswith("running_var") else drawn
            state[key] = torch.from_numpy(np.asarray(drawn, np.float32))
    model.load_state_dict(state)
    return dict(model.state_dict())
