"""The networks, modules and checkpoint files that are checked and measured, all of random weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core.sidecar import ACTIVATIONS
from ckpttool.networks import (
    Activation,
    Add,
    Affine,
    ArgMax,
    AtomMean,
    Clip,
    Concat,
    ConstantRow,
    Convolution,
    Cosines,
    Dense,
    Exp,
    Flatten,
    Layer,
    LayerNorm,
    Multiply,
    Network,
    NetworkBuilder,
    Node,
    QuantileMean,
    Repeat,
    Slice,
    Softmax,
    Transpose,
    add_gru,
    add_lstm,
)

OBS_DIM, ACTION_DIM = 17, 6
HIDDEN = {"256x256": (256, 256), "400x300": (400, 300), "1024x1024": (1024, 1024)}


def random(seed: int) -> np.random.Generator:
    """Return a generator of that seed."""
    return np.random.default_rng(seed)


def normal(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Return float32 numbers of a standard normal distribution."""
    return generator.standard_normal(shape, np.float32)


def dense(generator: np.random.Generator, rows: int, columns: int) -> Dense:
    """Return a dense layer whose outputs are of the size of its inputs."""
    return Dense(
        normal(generator, rows, columns) / np.float32(rows**0.5), normal(generator, columns) * np.float32(0.1)
    )


def chain(shape: int | tuple[int, ...], *layers: Layer) -> Network:
    """Return a network of layers one after the other."""
    return Network((("obs", shape),), tuple(Node(layer, (n,)) for n, layer in enumerate(layers)), len(layers))


def actor(
    hidden: Sequence[int], seed: int = 0, obs_dim: int = OBS_DIM, action_dim: int = ACTION_DIM
) -> Network:
    """Return an actor with ReLU, and tanh at its end."""
    generator, sizes = random(seed), (obs_dim, *hidden, action_dim)
    layers: list[Layer] = []
    for rows, columns in itertools.pairwise(sizes):
        layers += [dense(generator, rows, columns), Activation("relu")]
    return chain(obs_dim, *layers[:-1], Activation("tanh"))


def normed(seed: int = 0) -> Network:
    """Return an actor with observation statistics, layer norms and bounds; it can be stacked."""
    r = random(seed)
    return chain(
        OBS_DIM,
        Affine(normal(r, OBS_DIM), normal(r, OBS_DIM)),
        dense(r, OBS_DIM, 64),
        LayerNorm(normal(r, 64), normal(r, 64), 1e-3),
        Activation("elu"),
        Dense(normal(r, 64, 48) / np.float32(8)),
        LayerNorm(normal(r, 48), normal(r, 48), 1e-5),
        Activation("relu"),
        dense(r, 48, ACTION_DIM),
        Activation("tanh"),
        Affine(normal(r, ACTION_DIM), normal(r, ACTION_DIM)),
        Clip(np.full(ACTION_DIM, -0.5, np.float32), np.full(ACTION_DIM, 0.5, np.float32)),
    )


def critic(seed: int = 0) -> Network:
    """Return a network of two inputs, the second of which joins after the first layer."""
    r = random(seed)
    nodes = (
        Node(dense(r, OBS_DIM, 64), (0,)),
        Node(Activation("silu"), (2,)),
        Node(Concat(), (3, 1)),
        Node(dense(r, 64 + ACTION_DIM, 1), (4,)),
    )
    return Network((("obs", OBS_DIM), ("action", ACTION_DIM)), nodes, 5)


def gated(seed: int = 0) -> Network:
    """Return half of a layer times the sigmoid of the other half, beside the way around it."""
    r = random(seed)
    nodes = (
        Node(dense(r, OBS_DIM, 2 * OBS_DIM), (0,)),
        Node(Slice(0, OBS_DIM), (1,)),
        Node(Slice(OBS_DIM, 2 * OBS_DIM), (1,)),
        Node(Activation("sigmoid"), (3,)),
        Node(Multiply(), (2, 4)),
        Node(Add(), (5, 0)),
    )
    return Network((("obs", OBS_DIM),), nodes, 6)


def recurrent(kind: str, seed: int = 0, units: int = 64) -> Network:
    """Return an actor with an LSTM ("lstm") or a GRU ("gru")."""
    r, count = random(seed), {"lstm": 4, "gru": 3}[kind]
    states = ("h", "c")[: count - 2]
    builder = NetworkBuilder([("obs", OBS_DIM)], [(name, units) for name in states])
    scale = np.float32(units**-0.5)
    kernel, cell = (normal(r, rows, count * units) * scale for rows in (OBS_DIM, units))
    biases = normal(r, count * units), normal(r, count * units)
    if kind == "lstm":
        add_lstm(builder, ("h", "c"), kernel, cell, biases[0])
    else:
        add_gru(builder, "h", kernel, cell, biases)
    builder.add(dense(r, units, ACTION_DIM))
    builder.add(Activation("tanh"))
    return builder.done()


def images(seed: int = 0) -> Network:
    """Return the convolutions of NatureCNN (Mnih et al. 2015) on 84 x 84 x 4, and an actor of 512 units."""
    r = random(seed)
    builder = NetworkBuilder([("obs", (84, 84, 4))])
    builder.add(Affine(np.full(1, 1 / 255, np.float32), np.zeros(1, np.float32)))
    below = 4
    for size, stride, filters in ((8, 4, 32), (4, 2, 64), (3, 1, 64)):
        kernel = normal(r, size, size, below, filters) / np.float32(size * below**0.5)
        builder.add(Convolution(kernel, normal(r, filters) * np.float32(0.1), (stride, stride)))
        builder.add(Activation("relu"))
        below = filters
    builder.add(Transpose((2, 0, 1)))
    builder.add(Flatten())
    builder.add(dense(r, 7 * 7 * 64, 512))
    builder.add(Activation("relu"))
    builder.add(dense(r, 512, ACTION_DIM))
    return builder.done()


def every_layer(seed: int = 0) -> dict[str, Network]:
    """Return a small network for every kind of layer and every activation."""
    r = random(seed)
    networks = {
        "Dense": chain(9, dense(r, 9, 7)),
        "Dense without a bias": chain(9, Dense(normal(r, 9, 7))),
        "LayerNorm": chain(9, LayerNorm(normal(r, 9), normal(r, 9), 1e-5)),
        "Affine": chain(9, Affine(normal(r, 9), normal(r, 9))),
        "Clip": chain(9, Clip(np.full(9, -0.3, np.float32), np.full(9, 0.2, np.float32))),
        "Flatten": chain((3, 3, 2), Flatten(), dense(r, 18, 5)),
        "Transpose": chain((3, 4, 2), Transpose((2, 0, 1)), Flatten(), dense(r, 24, 5)),
        "Convolution": chain(
            (9, 11, 3),
            Convolution(normal(r, 3, 5, 3, 8) / np.float32(6), normal(r, 8), (2, 1), ((1, 0), (2, 2))),
            Flatten(),
        ),
        "Concat, Slice, Add, Multiply": gated(seed),
        "two inputs": critic(seed),
        "ArgMax": chain(9, dense(r, 9, 7), ArgMax((3, 4), (0, -1))),
        "QuantileMean": chain(9, dense(r, 9, 20), QuantileMean(5)),
        "AtomMean": chain(9, dense(r, 9, 22), AtomMean(np.linspace(-1, 1, 11, dtype=np.float32))),
        "Softmax": chain(9, dense(r, 9, 7), Softmax()),
        "Cosines": chain(2, dense(r, 2, 3), Cosines(4), Flatten(), dense(r, 12, 2)),
        "Repeat": chain(9, dense(r, 9, 4), Repeat(3), Flatten(), dense(r, 12, 2)),
    }
    # The type of a network is that of its arrays: an activation alone would compute in float32 only.
    same = Affine(np.ones(9, np.float32), np.zeros(9, np.float32))
    networks["Exp"] = chain(9, same, Exp())
    networks["ConstantRow"] = chain(9, ConstantRow(np.linspace(-1, 1, 4, dtype=np.float32)))
    return networks | {name: chain(9, same, Activation(name, 0.25)) for name in ACTIVATIONS}


def observations(network: Network, rows: int, seed: int = 1) -> Any:
    """Return observations for a network's inputs; states are not among them."""
    generator, slots = random(seed), {slot.name for slot in network.states}
    inputs = {
        name: normal(generator, rows, *shape)
        for name, shape in network.input_shapes.items()
        if name not in slots
    }
    return inputs if len(inputs) > 1 else next(iter(inputs.values()))


def task_actor(obs_dim: int, limit: float, seed: int = 0) -> Network:
    """Return an actor obs-64-64-1 with actions up to `limit`."""
    scale = Affine(np.full(1, limit, np.float32), np.zeros(1, np.float32))
    layers = [node.layer for node in actor((64, 64), seed, obs_dim, 1).nodes]
    return chain(obs_dim, *layers, scale)


def module(network: Network) -> Any:
    """Return the same actor as the torch.nn.Module that a user of PyTorch would write."""
    import torch

    built: list[torch.nn.Module] = []
    for node in network.nodes:
        match node.layer:
            case Dense(kernel, bias):
                linear = torch.nn.Linear(*kernel.shape)
                linear.weight.data = torch.from_numpy(np.ascontiguousarray(kernel.T))
                if bias is not None:
                    linear.bias.data = torch.from_numpy(bias.copy())
                built.append(linear)
            case Activation("relu"):
                built.append(torch.nn.ReLU())
            case Activation("tanh"):
                built.append(torch.nn.Tanh())
            case Affine(scale, shift) if not shift.any() and len(scale) == 1:
                built.append(_Scaled(float(scale[0])))
            case other:
                raise TypeError(f"no module for {other}")
    return torch.nn.Sequential(*built).eval()


def _Scaled(factor: float) -> Any:  # noqa: N802 - makes a module; torch may not be imported above
    import torch

    class Scaled(torch.nn.Module):
        """`x * factor`."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Scale the actions to their bounds."""
            return x * factor

    return Scaled()


def flops(network: Network) -> int:
    """Return the floating-point operations of the products for one row."""
    return sum(2 * node.layer.kernel.size for node in network.nodes if isinstance(node.layer, Dense))


def write_agents(folder: str | Path, count: int) -> list[str]:
    """Write TD3 agents for Pendulum-v1 as the TD3 authors' code names their tensors; return the paths."""
    import torch

    paths = []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)

        def part(
            sizes: Sequence[int], names: Sequence[str], generator: torch.Generator = generator
        ) -> dict[str, torch.Tensor]:
            tensors = {}
            for name, rows, columns in zip(names, sizes, sizes[1:], strict=False):
                tensors[f"{name}.weight"] = torch.randn(columns, rows, generator=generator) * rows**-0.5
                tensors[f"{name}.bias"] = torch.randn(columns, generator=generator) * 0.1
            return tensors

        actor_, q1, q2 = ("l1", "l2", "l3"), ("l1", "l2", "l3"), ("l4", "l5", "l6")
        both = part((4, 64, 64, 1), q1) | part((4, 64, 64, 1), q2)
        acting = part((3, 64, 64, 1), actor_)
        path = str(Path(folder) / f"agent-{number + 1}.pt")
        torch.save({"actor": acting, "critic": both}, path)
        paths.append(path)
    return paths
