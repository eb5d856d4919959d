"""Turns a canonical agent's leaves into finished networks: the policy with its action map, the critics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import numpy as np

from ckpttool.agents import encoders
from ckpttool.agents.building import Builder, add_program
from ckpttool.agents.network import (
    Activation,
    ActivationName,
    Affine,
    Clip,
    Concat,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Network,
    Transpose,
)
from ckpttool.errors import EnvironmentMismatchError, MappingError, UnsupportedError, UsageError
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Part, Program
from ckpttool.layouts.fronts import Front
from ckpttool.leaf import Leaf
from ckpttool.shown import count
from ckpttool.tree import Tree


@dataclass(frozen=True, slots=True)
class Wiring:
    """What turns layers into a network where the checkpoint does not say.

    `hidden` are the activations after the hidden layers (one repeats), `head` and the bounds make the
    action (see HEADS), `obs_norm` holds mean, var, epsilon, clip of the observations.
    """

    hidden: tuple[str, ...]
    head: str
    epsilon: float
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    obs_norm: Mapping[str, Any] | None = None


def _tanh(low: np.ndarray, high: np.ndarray) -> list[Layer]:
    # The TD3 authors scale by one number, the first dimension's upper bound (TD3 main.py, max_action).
    return [Activation("tanh"), Affine(np.full_like(high, high[0]), np.zeros_like(low))]


def _unit_tanh(low: np.ndarray, high: np.ndarray) -> list[Layer]:  # noqa: ARG001
    return [Activation("tanh")]


def _affine(low: np.ndarray, high: np.ndarray) -> list[Layer]:
    return [Activation("tanh"), Affine((high - low) / 2, (high + low) / 2)]


def _identity(low: np.ndarray, high: np.ndarray) -> list[Layer]:  # noqa: ARG001
    return []


def _clip(low: np.ndarray, high: np.ndarray) -> list[Layer]:
    return [Clip(low, high)]


def _tanh_clip(low: np.ndarray, high: np.ndarray) -> list[Layer]:
    return [*_tanh(low, high), *_clip_affine(low, high)]


def _clip_affine(low: np.ndarray, high: np.ndarray) -> list[Layer]:
    one = np.ones_like(high)
    return [Clip(-one, one), Affine((high - low) / 2, (high + low) / 2)]


def _clip_tanh(low: np.ndarray, high: np.ndarray) -> list[Layer]:
    # Stable-Baselines3's default for gSDE (stable_baselines3/sac/policies.py, clip_mean).
    two = np.full_like(high, 2)
    return [Clip(-two, two), *_affine(low, high)]


# How the last layer becomes an action: `tanh` times the first upper bound, `affine` from tanh's [-1, 1]
# to [low, high], `identity` as it is, `clip` to the bounds, `clip_affine` limited to [-1, 1] and then from
# there to [low, high]; `unit_tanh` is tanh alone; `tanh_clip_affine` is `tanh` and then `clip_affine`, as
# Tianshou does; `clip_tanh_affine` is limited to [-2, 2] and then `affine`.
HEADS = {
    "tanh": _tanh,
    "affine": _affine,
    "unit_tanh": _unit_tanh,
    "identity": _identity,
    "clip": _clip,
    "clip_affine": _clip_affine,
    "tanh_clip_affine": _tanh_clip,
    "clip_tanh_affine": _clip_tanh,
}


# The maps that are the same whatever the bounds are.
UNBOUNDED = frozenset({"identity", "unit_tanh"})


def widths(agent: Tree, part: Part) -> tuple[int, int]:
    """Return the number of inputs of a network's first dense layer and of outputs of its last."""
    if part.program is not None:
        return math.prod(part.program.inputs[0][1]), part.program.width
    shapes = [
        leaf.shape
        for position, layer in enumerate(part.layers)
        if layer.kind == "dense"
        and isinstance(leaf := agent.get(canonical.weight(part, position, "kernel")), Leaf)
    ]
    return shapes[0][0], shapes[-1][1]


def policy_network(
    agent: Tree,
    part: Part,
    wiring: Wiring,
    front: Front | None = None,
    seen: encoders.Shapes | None = None,
) -> Network:
    """Return the policy: obs [batch, obs_dim] to an environment's action [batch, act_dim], float32.

    `front` is what it computes before its layers; `seen` are the shapes of an environment's observations,
    where they differ from what the policy saw: images with the channels last, rows as grids.
    """
    obs_dim, act_dim = widths(agent, part)
    if len(wiring.action_low) != act_dim or len(wiring.action_high) != act_dim:
        raise EnvironmentMismatchError(
            "the policy and the action bounds have different sizes",
            expected=count(act_dim, "action"),
            found=count(len(wiring.action_high), "bound"),
        )
    if wiring.head not in HEADS:
        raise UsageError(f"no action map is called {wiring.head!r}", hint=f"there are {', '.join(HEADS)}")
    if part.program is not None:
        builder = _of_program(part.program, wiring, seen)
    elif front is not None:
        _require_rows(front, wiring)
        builder = encoders.begun(agent, part.component, front, seen)
        encoders.encode(
            builder, agent, part.component, front, lambda width: _normalise(builder, wiring, width)
        )
    else:
        builder = Builder([("obs", obs_dim if seen is None else seen["obs"])])
        if seen is not None and len(seen["obs"]) > 1:
            builder.add(Flatten())
        _normalise(builder, wiring, obs_dim)
    norms = encoders.norms(agent, part.component, front) if front is not None else {}
    if part.program is None:
        _layers(builder, agent, part, wiring, None, norms)
    low, high = (np.asarray(bound, np.float32) for bound in (wiring.action_low, wiring.action_high))
    for layer in HEADS[wiring.head](low, high):
        builder.add(layer)
    return builder.done()


def _of_program(program: Program, wiring: Wiring, seen: encoders.Shapes | None) -> Builder:
    """Return a builder with a program's operations, on observations of the shape that is seen."""
    ((name, shape),) = program.inputs
    given = shape if seen is None else tuple(seen[name])
    builder = Builder([(name, given[0] if len(given) == 1 else given)], program.states.items())
    if given != shape and len(shape) == 3 and given == (*shape[1:], shape[0]):
        builder.add(Transpose((2, 0, 1)))
    elif given != shape and len(shape) == 1 and math.prod(given) == shape[0]:
        builder.add(Flatten())
    elif given != shape:
        raise EnvironmentMismatchError(
            "the policy does not take observations of this shape",
            expected=str(list(shape)),
            found=str(list(given)),
        )
    if wiring.obs_norm is not None and len(shape) > 1:
        raise UnsupportedError("statistics of images, or of several inputs, are not applied yet")
    _normalise(builder, wiring, shape[0])
    add_program(builder, program)
    return builder


def q_network(agent: Tree, part: Part, wiring: Wiring, obs_dim: int, act_dim: int) -> Network:
    """Return a Q-function: obs and action to its value [batch, 1]; raise MappingError if neither fits.

    The action joins the observation, or, in the older DDPG form, what the first layer gives.
    """
    builder = Builder([("obs", obs_dim), ("action", act_dim)])
    first, _ = widths(agent, part)
    if first not in (obs_dim, obs_dim + act_dim):
        raise MappingError(
            f"{part.title} does not take this agent's observations and actions",
            expected=f"{obs_dim + act_dim} or {obs_dim} inputs",
            found=str(first),
        )
    _normalise(builder, wiring, obs_dim)
    if first == obs_dim + act_dim:
        builder.add(Concat(), builder.last, 1)
    _layers(builder, agent, part, wiring, act_dim)
    return builder.done()


def value_network(agent: Tree, part: Part, wiring: Wiring) -> Network:
    """Return a value of the state: obs [batch, obs_dim] to [batch, 1]."""
    obs_dim, _ = widths(agent, part)
    builder = Builder([("obs", obs_dim)])
    # A critic may see more than the policy: the policy's statistics are none of that.
    if wiring.obs_norm is None or len(wiring.obs_norm["mean"]) == obs_dim:
        _normalise(builder, wiring, obs_dim)
    _layers(builder, agent, part, wiring, None)
    return builder.done()


def _require_rows(front: Front, wiring: Wiring) -> None:
    """Raise UnsupportedError for statistics of images, or of several inputs."""
    if wiring.obs_norm is not None and (len(front.streams) > 1 or front.streams[0].image):
        raise UnsupportedError("statistics of images, or of several inputs, are not applied yet")


def _normalise(builder: Builder, wiring: Wiring, width: int) -> None:
    norm = wiring.obs_norm
    if norm is None:
        return
    mean, var = (np.asarray(norm[name], np.float64) for name in ("mean", "var"))
    if len(mean) != width or len(var) != len(mean):
        raise EnvironmentMismatchError(
            "the observation statistics have another size than the network",
            expected=str(width),
            found=str(len(mean)),
        )
    scale = 1 / np.sqrt(var + float(norm.get("epsilon", 1e-8)))
    # In two steps: x * scale - mean * scale would cancel where a mean is large beside its deviation.
    builder.add(Affine(np.ones(len(mean), np.float32), (-mean).astype(np.float32)))
    builder.add(Affine(scale.astype(np.float32), np.zeros(len(mean), np.float32)))
    if norm.get("clip") is not None:
        limit = np.full(len(mean), float(norm["clip"]), np.float32)
        builder.add(Clip(-limit, limit))


def _layers(
    builder: Builder,
    agent: Tree,
    part: Part,
    wiring: Wiring,
    act_dim: int | None,
    norms: Mapping[int, tuple[Affine, ...]] | None = None,
) -> None:
    """Add a part's layers; `norms` stand before the dense layers of their numbers."""
    dense = [position for position, layer in enumerate(part.layers) if layer.kind == "dense"]
    width: int | None = None
    for position, layer in enumerate(part.layers):
        tensors = _tensors(agent, part, position)
        if layer.kind == "dense":
            kernel = tensors["kernel"]
            if width is not None and act_dim is not None and kernel.shape[0] == width + act_dim:
                builder.add(Concat(), builder.last, 1)
            for norm in (norms or {}).get(dense.index(position), ()):
                builder.add(norm)
            builder.add(Dense(kernel, tensors.get("bias")))
            width = kernel.shape[1]
        else:
            builder.add(LayerNorm(tensors["scale"], tensors["offset"], wiring.epsilon))
        before_norm = position + 1 < len(part.layers) and part.layers[position + 1].kind == "layer_norm"
        if position < dense[-1] and not before_norm:
            done = sum(1 for p in dense if p <= position) - 1
            builder.add(_activation(wiring.hidden, done))


def _activation(hidden: tuple[str, ...], number: int) -> Activation:
    name = hidden[min(number, len(hidden) - 1)] if hidden else "linear"
    if name not in get_args(ActivationName):
        known = ", ".join(get_args(ActivationName))
        raise UsageError(f"no activation is called {name!r}", hint=f"there are {known}")
    return Activation(cast(ActivationName, name))


def _tensors(agent: Tree, part: Part, position: int) -> dict[str, np.ndarray]:
    found = {}
    for name in ("kernel", "bias", "scale", "offset"):
        leaf = agent.get(canonical.weight(part, position, name))
        if isinstance(leaf, Leaf):
            found[name] = leaf.array().astype(np.float32)
    return found
