"""Files of ordinary PyTorch models load into Keras models that are written by hand, one for each form.

The models here have the attributes that a user gives them; nothing of them is taken from the converted file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests import tensorflow_child
from tests.conftest import in_process


class Parts(nn.Module):
    """A PyTorch model with these parts, called by a function."""

    def __init__(self, call: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), act()]
    return nn.Sequential(*layers[:-1])


def block() -> nn.Module:
    return Parts(lambda m, x: x + m.fc2(torch.relu(m.fc1(x))), fc1=nn.Linear(8, 8), fc2=nn.Linear(8, 8))


def dueling(m: Any, x: Any) -> Any:
    h = m.features(x)
    advantage = m.advantage(h)
    return m.value(h) + advantage - advantage.mean(1, keepdim=True)


def conv_net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(4 * 2 * 2, 6), nn.ReLU(), nn.Linear(6, 2)),
    )


VECTOR, IMAGE, WORDS, SERIES = (5, 3), (5, 3, 10, 10), (5, 4), (5, 4, 3)
# The PyTorch model, the shape of its inputs and the options of the conversion.
FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "attributes": (
        lambda: Parts(lambda m, x: m.fc2(torch.relu(m.fc1(x))), fc1=nn.Linear(3, 8), fc2=nn.Linear(8, 2)),
        *(VECTOR, ()),
    ),
    "sequential": (lambda: mlp(3, 8, 8, 2), VECTOR, ()),
    "one_layer": (lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh()), VECTOR, ()),
    "no_activations": (lambda: nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), VECTOR, ()),
    "without_bias": (
        lambda: nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 2)),
        VECTOR,
        ("--kind", "0=dense"),
    ),
    "named": (lambda: Parts(lambda m, x: m.net(x), net=mlp(3, 8, 2)), VECTOR, ()),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 2)),
        VECTOR,
        (),
    ),
    "layer_norm": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8, 1e-3), nn.ReLU(), nn.Linear(8, 2)),
        *(VECTOR, ()),
    ),
    "batch_norm": (
        lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, 1e-3), nn.ReLU(), nn.Linear(8, 2)),
        *(VECTOR, ()),
    ),
    "flatten_first": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 2)),
        *(SERIES, ()),
    ),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 8), nn.ReLU()), mlp(8, 6, 2)),
        VECTOR,
        (),
    ),
    "parts": (
        lambda: Parts(
            lambda m, x: m.decoder.out(torch.tanh(m.encoder.fc(x))),
            encoder=Parts(lambda m, x: x, fc=nn.Linear(3, 8)),
            decoder=Parts(lambda m, x: x, out=nn.Linear(8, 2)),
        ),
        *(VECTOR, ()),
    ),
    "trunk_and_heads": (
        lambda: Parts(
            lambda m, x: torch.cat([m.mu(m.latent(x)), m.log_std(m.latent(x))], 1),
            latent=nn.Sequential(*mlp(3, 8, 8), nn.ReLU()),
            mu=nn.Linear(8, 2),
            log_std=nn.Linear(8, 2),
        ),
        *(VECTOR, ()),
    ),
    "dueling": (
        lambda: Parts(
            dueling,
            features=nn.Sequential(nn.Linear(3, 8), nn.ReLU()),
            value=mlp(8, 6, 1),
            advantage=mlp(8, 6, 4),
        ),
        *(VECTOR, ()),
    ),
    "twins": (
        lambda: Parts(lambda m, x: torch.min(m.q1(x), m.q2(x)), q1=mlp(3, 8, 1), q2=mlp(3, 8, 1)),
        *(VECTOR, ()),
    ),
    "own_parameter": (
        lambda: Parts(
            lambda m, x: m.net(x) * torch.exp(m.log_std),
            net=mlp(3, 8, 2),
            log_std=nn.Parameter(torch.ones(2)),
        ),
        *(VECTOR, ()),
    ),
    "list_of_heads": (
        lambda: Parts(
            lambda m, x: torch.cat([head(x) for head in m.heads], 1),
            heads=nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 4)]),
        ),
        *(VECTOR, ()),
    ),
    "list_of_blocks": (
        lambda: Parts(
            lambda m, x: m.blocks[1](m.blocks[0](m.fc(x))),
            fc=nn.Linear(3, 8),
            blocks=nn.ModuleList([block(), block()]),
        ),
        *(VECTOR, ()),
    ),
    "dict_of_heads": (
        lambda: Parts(
            lambda m, x: m.heads["left"](x) + m.heads["right"](x),
            heads=nn.ModuleDict({"left": nn.Linear(3, 2), "right": nn.Linear(3, 2)}),
        ),
        *(VECTOR, ()),
    ),
    "convolutions": (
        lambda: Parts(
            lambda m, x: m.conv2(torch.relu(m.conv1(x))).mean((2, 3)),
            conv1=nn.Conv2d(3, 8, 3),
            conv2=nn.Conv2d(8, 4, 3),
        ),
        *(IMAGE, ()),
    ),
    "conv_net": (conv_net, IMAGE, ("--flatten", "6=2,2,4")),
    "conv_norm": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, 1e-3), nn.ReLU()),
            *(nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        ),
        *(IMAGE, ()),
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 2), nn.ReLU(), nn.Conv1d(8, 2, 2), nn.Flatten()),
        *(SERIES, ()),
    ),
    "lstm": (
        lambda: Parts(
            lambda m, x: m.fc(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(3, 6, batch_first=True), fc=nn.Linear(6, 2)
        ),
        *(SERIES, ()),
    ),
    "gru": (
        lambda: Parts(
            lambda m, x: m.fc(m.gru(x)[0][:, -1]), gru=nn.GRU(3, 6, batch_first=True), fc=nn.Linear(6, 2)
        ),
        *(SERIES, ()),
    ),
    "embedding": (
        lambda: Parts(lambda m, x: m.fc(m.embed(x).mean(1)), embed=nn.Embedding(11, 6), fc=mlp(6, 4, 2)),
        WORDS,
        ("--kind", "embed=embedding"),
    ),
    "wrapped": (lambda: nn.DataParallel(mlp(3, 8, 2)), VECTOR, ()),
    "actor_critic": (
        lambda: Parts(lambda m, x: m.actor(x) + m.critic(x), actor=mlp(3, 8, 2), critic=mlp(3, 8, 1)),
        *(VECTOR, ()),
    ),
}
SAVED = ("adam", "sgd", "two_networks")


def load_all(folder: Path) -> dict[str, str]:
    """Load every file into the model of its form, and return what differs."""
    import keras
    import tensorflow as tf

    layers, sequential, relu = keras.layers, keras.Sequential, tf.nn.relu
    dense, norm = layers.Dense, {"epsilon": 1e-3}

    class Model(keras.Model):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return self.forward(x)

    class Attributes(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = dense(8, "relu"), dense(2)

        def forward(self, x: Any) -> Any:
            return self.fc2(self.fc1(x))

    class Named(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = sequential([dense(8, "relu"), dense(2)])

        def forward(self, x: Any) -> Any:
            return self.net(x)

    class Encoder(Model):
        def __init__(self) -> None:
            super().__init__()
            self.fc = dense(8, "tanh")

        def forward(self, x: Any) -> Any:
            return self.fc(x)

    class Decoder(Model):
        def __init__(self) -> None:
            super().__init__()
            self.out = dense(2)

        def forward(self, x: Any) -> Any:
            return self.out(x)

    class Both(Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Encoder(), Decoder()

        def forward(self, x: Any) -> Any:
            return self.decoder(self.encoder(x))

    class Gaussian(Model):
        def __init__(self) -> None:
            super().__init__()
            self.latent = sequential([dense(8, "relu"), dense(8, "relu")])
            self.mu, self.log_std = dense(2), dense(2)

        def forward(self, x: Any) -> Any:
            return tf.concat([self.mu(self.latent(x)), self.log_std(self.latent(x))], 1)

    class Dueling(Model):
        def __init__(self) -> None:
            super().__init__()
            self.features = sequential([dense(8, "relu")])
            self.value = sequential([dense(6, "relu"), dense(1)])
            self.advantage = sequential([dense(6, "relu"), dense(4)])

        def forward(self, x: Any) -> Any:
            h = self.features(x)
            advantage = self.advantage(h)
            return self.value(h) + advantage - tf.reduce_mean(advantage, 1, keepdims=True)

    class Twins(Model):
        def __init__(self) -> None:
            super().__init__()
            self.q1 = sequential([dense(8, "relu"), dense(1)])
            self.q2 = sequential([dense(8, "relu"), dense(1)])

        def forward(self, x: Any) -> Any:
            return tf.minimum(self.q1(x), self.q2(x))

    class Scaled(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = sequential([dense(8, "relu"), dense(2)])
            self.log_std = self.add_weight(shape=(2,), name="log_std")

        def forward(self, x: Any) -> Any:
            return self.net(x) * tf.exp(self.log_std)

    class Heads(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.heads = [dense(2), dense(4)]

        def __call__(self, x: Any) -> Any:
            return tf.concat([head(x) for head in self.heads], 1)

    class Block(layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = dense(8, "relu"), dense(8)

        def call(self, x: Any) -> Any:
            return x + self.fc2(self.fc1(x))

    class Blocks(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.blocks = dense(8), [Block(), Block()]

        def __call__(self, x: Any) -> Any:
            return self.blocks[1](self.blocks[0](self.fc(x)))

    class Sides(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = dense(2), dense(2)

    class Sided(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.heads = Sides()

        def __call__(self, x: Any) -> Any:
            return self.heads.left(x) + self.heads.right(x)

    class Convolutions(Model):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = layers.Conv2D(8, 3, activation="relu"), layers.Conv2D(4, 3)

        def forward(self, x: Any) -> Any:
            return tf.reduce_mean(self.conv2(self.conv1(x)), (1, 2))

    class Lstm(Model):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = layers.LSTM(6), dense(2)

        def forward(self, x: Any) -> Any:
            return self.fc(self.lstm(x))

    class Gru(Model):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.fc = layers.GRU(6), dense(2)

        def forward(self, x: Any) -> Any:
            return self.fc(self.gru(x))

    class Embedded(Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc = layers.Embedding(11, 6), sequential([dense(4, "relu"), dense(2)])

        def forward(self, x: Any) -> Any:
            return self.fc(tf.reduce_mean(self.embed(x), 1))

    class Agent(Model):
        def __init__(self) -> None:
            super().__init__()
            self.actor = sequential([dense(8, "relu"), dense(2)])
            self.critic = sequential([dense(8, "relu"), dense(1)])

        def forward(self, x: Any) -> Any:
            return self.actor(x) + self.critic(x)

    def mlp_of_keras() -> Any:
        return sequential([keras.Input((3,)), dense(8, "relu"), dense(2)])

    makers: dict[str, Callable[[], Any]] = {
        "attributes": Attributes,
        "sequential": lambda: sequential([keras.Input((3,)), dense(8, "relu"), dense(8, relu), dense(2)]),
        "one_layer": lambda: sequential([dense(2, "tanh")]),
        "no_activations": lambda: sequential([dense(8), dense(2)]),
        "without_bias": lambda: sequential([dense(8, "relu", use_bias=False), dense(2)]),
        "named": Named,
        "dropout": lambda: sequential([dense(8, "relu"), layers.Dropout(0.5), dense(2)]),
        "layer_norm": lambda: sequential(
            [dense(8), layers.LayerNormalization(**norm), layers.ReLU(), dense(2)]
        ),
        "batch_norm": lambda: sequential(
            [dense(8), layers.BatchNormalization(**norm), layers.Activation("relu"), dense(2)]
        ),
        "flatten_first": lambda: sequential([layers.Flatten(), dense(8, "relu"), dense(2)]),
        "nested": lambda: sequential(
            [sequential([dense(8, "relu")]), sequential([dense(6, "relu"), dense(2)])]
        ),
        "parts": Both,
        "trunk_and_heads": Gaussian,
        "dueling": Dueling,
        "twins": Twins,
        "own_parameter": Scaled,
        "list_of_heads": Heads,
        "list_of_blocks": Blocks,
        "dict_of_heads": Sided,
        "convolutions": Convolutions,
        "conv_net": lambda: sequential(
            [
                *(layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D()),
                *(layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), dense(6, "relu"), dense(2)),
            ]
        ),
        "conv_norm": lambda: sequential(
            [
                *(layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(**norm), layers.ReLU()),
                *(layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()),
            ]
        ),
        "conv1d": lambda: sequential(
            [
                layers.Conv1D(8, 2, activation="relu"),
                layers.Conv1D(2, 2),
                layers.Permute((2, 1)),
                layers.Flatten(),
            ]
        ),
        "lstm": Lstm,
        "gru": Gru,
        "embedding": Embedded,
        "wrapped": mlp_of_keras,
        "actor_critic": Agent,
        **dict.fromkeys(SAVED, mlp_of_keras),
    }
    result = {}
    cases = json.loads((folder / "cases.json").read_text())
    for name, lines in cases.items():
        with np.load(folder / f"{name}.npz") as file:
            x, expected = file["x"], file["y"]
        if x.ndim == 4 or name == "conv1d":
            x = np.moveaxis(x, 1, -1)
        model = makers[name]()
        model(x)
        objects = {"model": model, "actor": model, "critic": mlp_of_keras()}
        if name in SAVED:
            tool = keras.optimizers.SGD(momentum=0.9) if name == "sgd" else keras.optimizers.Adam()
            tool.build(model.trainable_variables)
            objects["optimizer"] = tool
        try:
            exec("\n".join(lines), {"tf": tf, **objects})
            error = float(np.abs(np.asarray(model(x)) - expected).max())
            if error > 1e-5:
                result[name] = f"outputs differ by {error}"
        except Exception as error:  # noqa: BLE001  # TensorFlow raises whatever it meets
            result[name] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return result


def saved(name: str, folder: Path) -> tuple[nn.Module, tuple[int, ...], tuple[str, ...]]:
    """Write the PyTorch file of a form; return its model, the shape of its inputs and the options."""
    torch.manual_seed(3)
    if name not in SAVED:
        make, shape, options = FORMS[name]
        model = make().eval()
        torch.save(model.state_dict(), folder / f"{name}.pt")
        return model, shape, options
    model, critic = mlp(3, 8, 2), mlp(3, 8, 2)
    if name == "two_networks":
        torch.save({"actor": model.state_dict(), "critic": critic.state_dict()}, folder / f"{name}.pt")
        return model, VECTOR, ("--layout", "none")
    make_tool = torch.optim.Adam if name == "adam" else torch.optim.SGD
    tool = make_tool(model.parameters(), **({} if name == "adam" else {"lr": 0.1, "momentum": 0.9}))
    model(torch.ones(VECTOR)).sum().backward()  # type: ignore[no-untyped-call]
    tool.step()
    contents = {"model": model.state_dict(), "optimizer": tool.state_dict()}
    torch.save(contents, folder / f"{name}.pt")
    return model, VECTOR, ()


@pytest.mark.tensorflow
def test_the_lines_load_into_models_written_by_hand(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    cases, failed = {}, {}
    for name in (*FORMS, *SAVED):
        model, shape, options = saved(name, tmp_path)
        draw = np.random.default_rng(1)
        x = draw.integers(0, 11, shape) if name == "embedding" else draw.normal(size=shape).astype(np.float32)
        with torch.no_grad():
            np.savez(tmp_path / f"{name}.npz", x=x, y=model(torch.from_numpy(x)).numpy())
        ran = in_process("convert", f"{name}.pt", f"{name}-1", "--to", "tf", *options, "--json", cwd=tmp_path)
        if ran.status:
            failed[name] = ran.out + ran.err
        else:
            cases[name] = json.loads(ran.out)["load"]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    assert failed | tensorflow_child.run(__file__, "load_all", tmp_path) == {}
    assert len(cases) >= 25
