"""The same small models in both frameworks, for `verify` of two models.

    python -m tests.pair_models FOLDER NAME ...

writes NAME.keras for each model, with the numbers of NAME.npz, the torch model's state_dict. A name such as
attention@epsilon plants a fault in the code.
"""

from __future__ import annotations

import sys
from pathlib import Path
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


RIGHT = ("mlp", "cnn", "lstm", "gru", "attention", "words")
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


# Keras: written out with the torch model's numbers.


def _keras(name: str, w: dict[str, np.ndarray], fault: str = "") -> Any:
    import keras
    from keras import layers

    epsilon = 1e-6 if fault == "epsilon" else 1e-5

    t = {key: value.T if value.ndim == 2 else value for key, value in w.items()}
    if name == "mlp":
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(8, activation="silu" if fault == "activation" else "relu", name="first"),
                layers.Dense(8, activation="tanh", name="second"),
                layers.Dense(3, name="third"),
            ]
        )
        for number, layer in zip((0, 2, 4), model.layers, strict=True):
            layer.set_weights([t[f"{number}.weight"], t[f"{number}.bias"]])
        return model
    if name == "cnn":
        inputs = layers.Input((8, 10, 3))
        x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
        x = layers.BatchNormalization(name="norm", epsilon=1e-5 if fault == "epsilon" else 1e-3)(x)
        x = layers.ReLU()(x)
        x = layers.Conv2D(5, 3, activation="relu", name="conv2")(layers.MaxPooling2D()(x))
        model = keras.Model(inputs, layers.Dense(4, name="head")(layers.Flatten()(x)))
        for at, layer in (("0", "conv"), ("4", "conv2")):
            model.get_layer(layer).set_weights([w[f"{at}.weight"].transpose(2, 3, 1, 0), w[f"{at}.bias"]])
        norm = [w[f"1.{each}"] for each in ("weight", "bias", "running_mean", "running_var")]
        model.get_layer("norm").set_weights(norm)
        head = w["7.weight"].reshape(4, 5, 2, 3).transpose(2, 3, 1, 0).reshape(30, 4)
        model.get_layer("head").set_weights([head, w["7.bias"]])
        return model
    if name in ("lstm", "gru"):
        cls = {"lstm": layers.LSTM, "gru": layers.GRU}[name]
        model = keras.Sequential([layers.Input((7, 3)), cls(5, name="rnn"), layers.Dense(2, name="head")])
        order = (1, 0, 2) if name == "gru" else (0, 1, 2, 3)
        gates = {
            key: np.concatenate([np.split(w[f"rnn.{key}_l0"], len(order))[place] for place in order])
            for key in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        }
        bias = gates["bias_ih"] + gates["bias_hh"]
        if name == "gru":
            bias = np.stack([gates["bias_ih"], gates["bias_hh"]])
        model.get_layer("rnn").set_weights([gates["weight_ih"].T, gates["weight_hh"].T, bias])
        model.get_layer("head").set_weights([t["head.weight"], t["head.bias"]])
        return model
    if name == "attention":
        inputs = layers.Input((6, 8))
        y = layers.LayerNormalization(epsilon=epsilon, name="norm")(inputs)
        mha = layers.MultiHeadAttention(2, 4, name="attention")
        x = layers.Add()([inputs, mha(y, y)])
        y = layers.LayerNormalization(epsilon=epsilon, name="norm2")(x)
        y = layers.Dense(16, name="up")(y)
        y = keras.activations.gelu(y, approximate=fault == "gelu")
        y = layers.Dense(8, name="down")(y)
        model = keras.Model(inputs, layers.Add()([x, y]))
        for each in ("norm", "norm2"):
            model.get_layer(each).set_weights([w[f"{each}.weight"], w[f"{each}.bias"]])
        for each in ("up", "down"):
            model.get_layer(each).set_weights([t[f"{each}.weight"], t[f"{each}.bias"]])
        held: list[np.ndarray] = []
        kernels, biases = (np.split(w[f"attention.in_proj_{each}"], 3) for each in ("weight", "bias"))
        for kernel, bias in zip(kernels, biases, strict=True):
            held += [kernel.T.reshape(8, 2, 4), bias.reshape(2, 4)]
        held += [t["attention.out_proj.weight"].reshape(2, 4, 8), w["attention.out_proj.bias"]]
        mha.set_weights(held)
        return model
    model = keras.Sequential(
        [
            layers.Input((5,)),
            layers.Embedding(11, 4, name="embed"),
            layers.Flatten(),
            layers.Dense(3, name="head"),
        ]
    )
    model.get_layer("embed").set_weights([w["0.weight"]])
    model.get_layer("head").set_weights([t["2.weight"], t["2.bias"]])
    return model


def write_keras(folder: str, names: list[str]) -> None:
    """Write the Keras models."""
    for name in names:
        with np.load(Path(folder, f"{name}.npz")) as held:
            model, _, fault = name.partition("@")
            _keras(model, dict(held), fault).save(Path(folder, f"{name}.keras"))


if __name__ == "__main__":
    write_keras(sys.argv[1], sys.argv[2:])
