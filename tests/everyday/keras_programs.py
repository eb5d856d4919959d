"""Programs of TensorFlow users that restore what the conversions of the matrix wrote, written by hand.

Nothing here is derived from a file: each model has the attributes that its author gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tests.everyday import keras_nets as nets
from tests.everyday.cases import Case

keras = nets.keras
k = keras.layers


class Program(NamedTuple):
    """The names that a program has, and the network and optimizer that are judged."""

    names: dict[str, Any]
    net: Any
    tool: Any


class Net(keras.Model):  # type: ignore[misc]
    """A model whose `order` lists its layers in the order in which the matrix calls them."""

    kind = "mlp"

    def call(self, x: Any, training: bool = False) -> Any:
        return nets.forward(self.kind, self.order(), x)


class Mlp(Net):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.fc1 = k.Dense(24, "relu", dtype=dtype)
        self.fc2 = k.Dense(24, "relu", dtype=dtype)
        self.fc3 = k.Dense(1, "tanh", dtype=dtype)

    def order(self) -> list[Any]:
        return [self.fc1, self.fc2, self.fc3]


class LayerNormed(Net):
    kind = "layernorm"

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = k.Dense(8), k.LayerNormalization(epsilon=epsilon), k.Dense(3)

    def order(self) -> list[Any]:
        return [self.fc1, self.norm, self.fc2]


class Cnn(Net):
    kind = "cnn"

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = k.Conv2D(4, 3), k.BatchNormalization(epsilon=epsilon)
        self.conv2 = k.Conv2D(5, 3, activation="relu")
        self.fc1, self.fc2 = k.Dense(7, "relu"), k.Dense(3)

    def order(self) -> list[Any]:
        return [self.conv1, self.bn1, self.conv2, self.fc1, self.fc2]


class Lstm(Net):
    kind = "lstm"

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = k.LSTM(6), k.Dense(2)

    def order(self) -> list[Any]:
        return [self.lstm, self.fc]


class Gru(Net):
    kind = "gru"

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = k.GRU(6), k.Dense(2)

    def order(self) -> list[Any]:
        return [self.gru, self.fc]


class Block(Net):
    kind = "block"

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.norm1 = k.LayerNormalization(epsilon=epsilon)
        self.query, self.key, self.value, self.proj = k.Dense(8), k.Dense(8), k.Dense(8), k.Dense(8)
        self.norm2 = k.LayerNormalization(epsilon=epsilon)
        self.linear1, self.linear2, self.head = k.Dense(16, "relu"), k.Dense(8), k.Dense(3)

    def order(self) -> list[Any]:
        attention = [self.norm1, self.query, self.key, self.value, self.proj]
        return [*attention, self.norm2, self.linear1, self.linear2, self.head]


class Encoder(Net):
    kind = "encoder"

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.self_attn = k.MultiHeadAttention(2, 4)
        self.linear1, self.linear2 = k.Dense(16, "relu"), k.Dense(8)
        self.norm1 = k.LayerNormalization(epsilon=epsilon)
        self.norm2 = k.LayerNormalization(epsilon=epsilon)

    def order(self) -> list[Any]:
        return [self.self_attn, self.linear1, self.linear2, self.norm1, self.norm2]


class Embedded(Net):
    kind = "embedding"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = k.Embedding(11, 6), k.Dense(4)

    def order(self) -> list[Any]:
        return [self.embed, self.fc]


class Tied(Net):
    kind = "tied"

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1 = k.Embedding(11, 6), k.Dense(6, "relu")

    def order(self) -> list[Any]:
        return [self.embed, self.fc1, None]


class AuthorsActor(Net):
    """The actor of the TD3 authors."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = k.Dense(24, "relu"), k.Dense(24, "relu"), k.Dense(1, "tanh")

    def order(self) -> list[Any]:
        return [self.l1, self.l2, self.l3]


class CleanActor(Net):
    """CleanRL's actor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc_mu = k.Dense(24, "relu"), k.Dense(24, "relu"), k.Dense(1, "tanh")

    def order(self) -> list[Any]:
        return [self.fc1, self.fc2, self.fc_mu]


class Td3Actor(Net):
    """The actor of Stable-Baselines3's TD3."""

    def __init__(self) -> None:
        super().__init__()
        self.mu = keras.Sequential([k.Dense(24, "relu"), k.Dense(24, "relu"), k.Dense(1, "tanh")])

    def order(self) -> list[Any]:
        return [self.mu]


class SacActor(Net):
    """The actor of Stable-Baselines3's SAC."""

    def __init__(self) -> None:
        super().__init__()
        self.latent_pi = keras.Sequential([k.Dense(24, "relu"), k.Dense(24, "relu")])
        self.mu = k.Dense(1, "tanh")

    def order(self) -> list[Any]:
        return [self.latent_pi, self.mu]


class Extractor(k.Layer):  # type: ignore[misc]
    """The part of a PPO policy below its head."""

    def __init__(self) -> None:
        super().__init__()
        self.policy_net = keras.Sequential([k.Dense(24, "tanh"), k.Dense(24, "tanh")])

    def call(self, x: Any) -> Any:
        return self.policy_net(x)


class PpoActor(Net):
    """The actor of Stable-Baselines3's PPO."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp_extractor, self.action_net = Extractor(), k.Dense(1)

    def order(self) -> list[Any]:
        return [self.mlp_extractor, self.action_net]


class Agent(tf.Module):  # type: ignore[misc]
    """An agent that has its actor, which is all that the program needs, and maybe its optimizer."""

    def __init__(self, actor: Any, tool: Any) -> None:
        super().__init__()
        self.actor = actor
        if tool is not None:
            self.actor_optimizer = tool


MODELS: dict[str, Callable[[Case, float], Any]] = {
    "mlp": lambda case, _: Mlp(case.dtype),
    "gaussian": lambda _, __: PpoActor(),
    "layernorm": lambda _, epsilon: LayerNormed(epsilon),
    "cnn": lambda _, epsilon: Cnn(epsilon),
    "lstm": lambda _, __: Lstm(),
    "gru": lambda _, __: Gru(),
    "block": lambda _, epsilon: Block(epsilon),
    "encoder": lambda _, epsilon: Encoder(epsilon),
    "embedding": lambda _, __: Embedded(),
    "tied": lambda _, __: Tied(),
}
AGENTS: dict[str, Callable[[], Any]] = {
    "authors_td3": AuthorsActor,
    "authors_actor": AuthorsActor,
    "cleanrl_td3": CleanActor,
    "sb3_td3": Td3Actor,
    "sb3_sac": SacActor,
    "sb3_ppo": PpoActor,
}
# Models that their authors wrote as a Sequential.
SEQUENTIAL = frozenset(
    (
        *("sequential", "whole_sequential", "whole_hooked", "keras_sequential", "h5_sequential"),
        *("saved_model", "exported", "cnn_keras", "h5_compiled", "keras_2_saved_model"),
    )
)
# How programs call the network and its optimizer; others call them model and optimizer.
CALLED = {
    "history": ("model", "opt"),
    "two_networks": ("pi", "pi_opt"),
    "pi_qf": ("pi", "pi_opt"),
    "actor_opt_step": ("actor", "opt"),
    "estimator": ("dnn", "optimizer"),
    "saver_adam": ("actor", "optimizer"),
    "saver_momentum": ("actor", "optimizer"),
}
# The optimizer is that of the compiled model, not an object beside it.
COMPILED = frozenset(
    (
        *("net_compiled", "weights_h5_compiled", "model_checkpoint", "keras_sequential", "keras_functional"),
        *("h5_sequential", "cnn_keras", "lstm_weights", "saved_model", "keras_2_saved_model"),
        *("h5_compiled", "tf_weights"),
    )
)


def program(case: Case, epsilon: float, make_tool: Callable[[], Any] | None) -> Program:
    """Return a new program for a case; `make_tool` returns its optimizer, if it has one."""
    if case.name in {"tf_module", "saver_momentum"} or case.optimizer == "adam_v1":
        return _of_variables(case, make_tool)
    if case.name in AGENTS:
        net = AGENTS[case.name]()
    elif case.name in SEQUENTIAL:
        net = nets.sequential(case.net, epsilon)
    else:
        net = MODELS[case.net](case, epsilon)
    net(tf.constant(nets.inputs(case.net, 0)))
    tool = None if make_tool is None else make_tool()
    if tool is not None:
        tool.build(net.trainable_variables)
    if case.name in AGENTS:
        return Program({"policy": Agent(net, tool)}, net, tool)
    if case.name in COMPILED and tool is not None:
        net.compile(tool, "mse")
    model, optimizer = CALLED.get(case.name, ("model", "optimizer"))
    return Program({model: net, optimizer: tool, **_others(case)}, net, tool)


def _of_variables(case: Case, make_tool: Callable[[], Any] | None) -> Program:
    """Return a program without Keras: optimizers of TensorFlow 1 take no variables of Keras 3."""
    from tests.everyday.tensorflow_files import Module

    net = Module(("w", "b") if case.name == "tf_module" else ("kernel", "bias"))
    if case.name == "tf_module":
        assert make_tool is not None
        tool = make_tool()
        tool.build(net.trainable_variables)
    elif case.name == "saver_momentum":
        tool = tf.compat.v1.train.MomentumOptimizer(1e-3, 0.9)
    else:
        tool = tf.compat.v1.train.AdamOptimizer(1e-2)
    model, optimizer = CALLED.get(case.name, ("model", "optimizer"))
    return Program({model: net, optimizer: tool}, net, tool)


def _others(case: Case) -> dict[str, Any]:
    """Return the other networks of a program with several, and their optimizers."""
    if case.name in {"two_networks", "pi_qf"}:
        qf = keras.Sequential([keras.Input((4,)), k.Dense(24, "relu"), k.Dense(1)])
        tool = keras.optimizers.Adam(1e-3)
        tool.build(qf.trainable_variables)
        return {"qf": qf, "qf_opt": tool}
    if case.name == "averaged":
        ema = Mlp(case.dtype)
        ema(tf.constant(nets.inputs("mlp", 0)))
        return {"ema": ema}
    if case.name == "timm":
        ema = Cnn(1e-5)
        ema(tf.constant(nets.inputs("cnn", 0)))
        return {"state_dict_ema": ema}
    return {}
