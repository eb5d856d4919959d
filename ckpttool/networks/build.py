"""Build networks from an agent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np

from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import EnvironmentMismatchError, MappingError, UnsupportedError, UsageError
from ckpttool.core.kinds import ACTIVATIONS
from ckpttool.core.sidecar import parse_activation
from ckpttool.core.source import Shape, keep_open
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, Tree, attr
from ckpttool.libraries import recurrent_layers, schema
from ckpttool.libraries.schema import (
    ActionDistribution,
    AgentNetwork,
    Choices,
    EncoderInput,
    PolicyEncoder,
    Program,
    layer_widths,
)
from ckpttool.networks.network import (
    NOISE,
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
    DrawLaw,
    Exp,
    Flatten,
    Layer,
    LayerNorm,
    Multiply,
    Network,
    Node,
    QuantileMean,
    Repeat,
    Slice,
    Softmax,
    StateSlot,
    Transpose,
)


class NetworkBuilder:
    """Collects nodes; values are numbered after the inputs and states, `last` is the newest.

    `states` are the names and widths of the state slots, in order.
    """

    def __init__(
        self, inputs: Iterable[tuple[str, int | tuple[int, ...]]], states: Iterable[tuple[str, int]] = ()
    ) -> None:
        self.states = dict(states)
        self.inputs = (*inputs, *self.states.items())
        self.nodes: list[Node] = []
        self.last = 0
        self._next: dict[str, int] = {}
        self._drawn = 0

    def number(self, name: str) -> int:
        """Return the number of an input or a state."""
        return [name for name, _ in self.inputs].index(name)

    def add(self, layer: Layer, *inputs: int) -> int:
        """Add a layer on these values, or on the last one; return the number of its output."""
        self.nodes.append(Node(layer, inputs or (self.last,)))
        self.last = len(self.inputs) + len(self.nodes) - 1
        return self.last

    def draw(self, count: int) -> int:
        """Return the next columns of the input NOISE, [batch, count]."""
        self._drawn += count
        return self.add(Slice(self._drawn - count, self._drawn), self.number(NOISE))

    def carry(self, name: str, value: int) -> int:
        """Make a value the next state with that name, and the last value."""
        self._next[name] = self.last = value
        return value

    def done(self) -> Network:
        """Return the network; its output is the last value."""
        slots = tuple(StateSlot(name, (width,), self._next[name]) for name, width in self.states.items())
        return Network(self.inputs, tuple(self.nodes), self.last, slots)


def add_lstm(
    builder: NetworkBuilder,
    states: tuple[str, str],
    kernel: np.ndarray,
    recurrent: np.ndarray,
    bias: np.ndarray,
) -> int:
    """Add an LSTM cell on the last value; return its output, the next hidden state.

    Args:
        builder: the network.
        states: names of the slots of the hidden state and the cell state, `units` each.
        kernel: [in, 4 * units], gates in the order i, f, g, o of Keras and PyTorch.
        recurrent: [units, 4 * units].
        bias: [4 * units].
    """
    hidden, cell = states
    units = len(recurrent)
    joined = builder.add(Concat(), builder.last, builder.number(hidden))
    gates = builder.add(Dense(np.concatenate([kernel, recurrent]), bias), joined)
    i, f, g, o = (
        builder.add(Activation("tanh" if n == 2 else "sigmoid"), _add_columns(builder, gates, n, units))
        for n in range(4)
    )
    kept = builder.add(Multiply(), f, builder.number(cell))
    remembered = builder.add(Add(), kept, builder.add(Multiply(), i, g))
    builder.carry(cell, remembered)
    return builder.carry(hidden, builder.add(Multiply(), o, builder.add(Activation("tanh"), remembered)))


def add_gru(
    builder: NetworkBuilder,
    state: str,
    kernel: np.ndarray,
    recurrent: np.ndarray,
    biases: tuple[np.ndarray, np.ndarray],
    *,
    reset_after: bool = True,
) -> int:
    """Add a GRU cell on the last value; return its next state.

    Gates have Keras's order z, r, h (keras/src/layers/rnn/gru.py).

    Args:
        builder: the network.
        state: name of the slot of the state [units].
        kernel: [in, 3 * units].
        recurrent: [units, 3 * units].
        biases: [3 * units] each, of the input's product and of the state's.
        reset_after: the reset gate multiplies the recurrent product, as in PyTorch and cuDNN; otherwise it
            multiplies the state before the product.
    """
    units, before = len(recurrent), builder.number(state)
    gates = builder.add(Dense(kernel, biases[0]), builder.last)
    z, r = (_add_gate(builder, gates, before, (recurrent, biases[1]), n, units) for n in range(2))
    own = Dense(recurrent[:, 2 * units :], biases[1][2 * units :])
    if reset_after:
        turned = builder.add(Multiply(), r, builder.add(own, before))
    else:
        turned = builder.add(own, builder.add(Multiply(), r, before))
    fresh = builder.add(
        Activation("tanh"), builder.add(Add(), _add_columns(builder, gates, 2, units), turned)
    )
    one = np.ones(units, kernel.dtype)
    rest = builder.add(Affine(-one, one), z)
    kept = builder.add(Multiply(), z, before)
    return builder.carry(state, builder.add(Add(), kept, builder.add(Multiply(), rest, fresh)))


def _add_gate(
    builder: NetworkBuilder,
    gates: int,
    before: int,
    own: tuple[np.ndarray, np.ndarray],
    number: int,
    units: int,
) -> int:
    columns = slice(number * units, (number + 1) * units)
    turned = builder.add(Dense(own[0][:, columns], own[1][columns]), before)
    return builder.add(
        Activation("sigmoid"), builder.add(Add(), _add_columns(builder, gates, number, units), turned)
    )


def _add_columns(builder: NetworkBuilder, value: int, number: int, units: int) -> int:
    return builder.add(Slice(number * units, (number + 1) * units), value)


def add_program(builder: NetworkBuilder, program: Program) -> int:
    """Add the operations of a model's own graph on the last value; return their output's number."""
    values = [builder.last, *(builder.number(name) for name in program.states)]
    for operation in program.operations:
        builder.last = values[operation.inputs[0]]
        if operation.kind in ("lstm", "gru"):
            value = operation.value
            weights = [value[name] for name in ("kernel", "recurrent", "biases")]
            after = value["after"]
            values.append(_add_cell(builder, value["states"], weights, reset_after=after))
            continue
        layer = _LAYERS[operation.kind](operation.value)
        values.append(builder.add(layer, *(values[number] for number in operation.inputs)))
    builder.last = values[program.output]
    return builder.last


def _add_cell(
    builder: NetworkBuilder, states: Sequence[str], weights: Sequence[Any], *, reset_after: bool
) -> int:
    """Add an LSTM (two states) or a GRU; `weights` are kernel, recurrent kernel and a pair of biases."""
    kernel, recurrent, biases = weights
    if len(states) == 2:
        return add_lstm(builder, (states[0], states[1]), kernel, recurrent, biases[0] + biases[1])
    return add_gru(builder, states[0], kernel, recurrent, tuple(biases), reset_after=reset_after)


def _broadcast_float32(*arrays: np.ndarray) -> list[np.ndarray]:
    """Return arrays of equal size in float32."""
    return [np.array(array, np.float32) for array in np.broadcast_arrays(*arrays)]


# Table of the program operations (libraries/program_operators.py) that map to one layer.
_LAYERS: dict[str, Callable[[Mapping[str, Any]], Layer]] = {
    "dense": lambda v: Dense(v["kernel"], v["bias"]),
    "layer_norm": lambda v: LayerNorm(v["scale"], v["offset"], v["epsilon"]),
    "activation": lambda v: Activation(v["name"], v["slope"]),
    "affine": lambda v: Affine(*_broadcast_float32(v["scale"], v["shift"])),
    "clip": lambda v: Clip(*_broadcast_float32(v["low"], v["high"])),
    "slice": lambda v: Slice(v["start"], v["stop"]),
    "concat": lambda _v: Concat(),
    "flatten": lambda _v: Flatten(),
    "transpose": lambda v: Transpose(tuple(v["axes"])),
    "add": lambda _v: Add(),
    "multiply": lambda _v: Multiply(),
    "quantile_mean": lambda v: QuantileMean(v["quantiles"], last=v["last"]),
    "atom_mean": lambda v: AtomMean(v["support"], v["limit"]),
    "convolution": lambda v: Convolution(v["kernel"], v["bias"], tuple(v["strides"]), v["padding"]),
}


# Number of state slots of each kind of cell: its output, and an LSTM's cell state.
_STATES = {recurrent_layers.LSTM: 2, recurrent_layers.GRU: 1, recurrent_layers.GRU_BEFORE: 1}

Shapes = Mapping[str, Shape]
"""Shapes of observations by input name, without the batch."""


def fits_observations(front: PolicyEncoder, observed: Shapes) -> bool:
    """Return whether an encoder accepts observations of these shapes, images also with channels last."""
    return observed.keys() == {stream.name for stream in front.streams} and all(
        observed[stream.name] in (stream.shape, *([_channels_last(stream.shape)] if stream.image else []))
        for stream in front.streams
    )


def start_network(
    agent: Tree,
    component: str,
    front: PolicyEncoder,
    observed: Shapes | None = None,
    more: Iterable[tuple[str, int]] = (),
) -> NetworkBuilder:
    """Return a network of an encoder's inputs and states.

    Args:
        agent: the canonical tree.
        component: the network that the encoder belongs to, e.g. "actor".
        front: the encoder.
        observed: the environment's observation shapes, by input, where they differ from those of training.
        more: names and widths of further inputs.
    """
    inputs = [
        (s.name, _input_shape(s.shape if observed is None else observed[s.name])) for s in front.streams
    ]
    inputs += more
    places = [(*schema.recurrent_layer_path(component, n), schema.RECURRENT) for n in range(len(front.cells))]
    units = [cast(Leaf, agent[path]).shape[0] for path in places]
    slots = [_state_names(n)[: _STATES[kind]] for n, kind in enumerate(front.cells)]
    return NetworkBuilder(
        inputs, [(name, width) for own, width in zip(slots, units, strict=True) for name in own]
    )


def add_encoder(
    builder: NetworkBuilder,
    agent: Tree,
    component: str,
    front: PolicyEncoder,
    normalise: Callable[[EncoderInput], None],
) -> int:
    """Add an encoder on its inputs; return the number of its output, [batch, features].

    Args:
        builder: the network.
        agent: the canonical tree.
        component: the network that the encoder belongs to, e.g. "actor".
        front: the encoder.
        normalise: adds the statistics of an input that is not an image.
    """
    joined = []
    for number, stream in enumerate(front.streams):
        builder.last = number
        if stream.image:
            _add_image_layers(builder, agent, component, stream)
        elif len(stream.shape) > 1:
            builder.add(Flatten())
        if not stream.image:
            normalise(stream)
        joined.append(builder.last)
    if len(joined) > 1:
        builder.add(Concat(), *joined)
    for number, kind in enumerate(front.cells):
        _add_encoder_cell(builder, agent, schema.recurrent_layer_path(component, number), number, kind)
    return builder.last


def read_encoder_norms(agent: Tree, component: str, front: PolicyEncoder) -> dict[int, tuple[Affine, Affine]]:
    """Return an encoder's batch norms by the number of the dense layer after each.

    In two steps, like observation statistics: the mean first, to avoid cancellation.
    """
    norms = {}
    for number, epsilon in front.norms:
        path = schema.batch_norm_path(component, number)
        mean, var, scale, offset = (
            _read_array(agent, (*path, attr(name))) for name in ("mean", "var", "scale", "offset")
        )
        norms[number] = _batch_norm(mean, var, epsilon, scale, offset)
    return norms


def _batch_norm(
    mean: np.ndarray,
    variance: np.ndarray,
    epsilon: float,
    scale: np.ndarray | None = None,
    offset: np.ndarray | None = None,
) -> tuple[Affine, Affine]:
    """Return a batch norm in evaluation mode; a missing scale is 1, a missing offset 0."""
    factor = (1 if scale is None else scale) / np.sqrt(variance.astype(np.float64) + epsilon)
    shift = np.zeros_like(mean) if offset is None else offset
    return Affine(np.ones_like(mean), -mean), Affine(factor.astype(np.float32), shift)


def _input_shape(shape: Shape) -> int | Shape:
    return shape[0] if len(shape) == 1 else shape


def _channels_last(shape: Shape) -> Shape:
    """Return an image's shape with channels last."""
    return (*shape[1:], shape[0])


def _state_names(number: int) -> tuple[str, str]:
    # The input names of an environment have no leading slash.
    return f"/hidden{number}", f"/cell{number}"


def _add_image_layers(builder: NetworkBuilder, agent: Tree, component: str, stream: EncoderInput) -> None:
    """Add convolutions on images with channels last, and the layers after them."""
    if builder.inputs[builder.last][1] == stream.shape:
        builder.add(Transpose((1, 2, 0)))
    if stream.scale != 1:
        builder.add(Affine(np.full(1, stream.scale, np.float32), np.zeros(1, np.float32)))
    places = [
        schema.stream_layer_path(component, stream.name, n) for n in range(len(stream.strides) + stream.dense)
    ]
    for path, stride in zip(places, stream.strides, strict=False):
        kernel, bias = (_read_array(agent, (*path, name)) for name in (schema.KERNEL, schema.BIAS))
        builder.add(Convolution(kernel, bias, (stride, stride)))
        builder.add(Activation("relu"))
    builder.add(Transpose((2, 0, 1)))
    builder.add(Flatten())
    for path in places[len(stream.strides) :]:
        kernel, bias = (_read_array(agent, (*path, name)) for name in (schema.KERNEL, schema.BIAS))
        builder.add(Dense(kernel, bias))
        builder.add(Activation("relu"))


def _add_encoder_cell(builder: NetworkBuilder, agent: Tree, path: Path, number: int, kind: str) -> None:
    kernel, recurrent = (_read_array(agent, (*path, name)) for name in (schema.KERNEL, schema.RECURRENT))
    paths = [(*path, name) for name in schema.BIASES]
    zeros = np.zeros(kernel.shape[1], np.float32)
    biases = [_read_array(agent, path) if path in agent else zeros for path in paths]
    states = _state_names(number)[: _STATES[kind]]
    _add_cell(builder, states, (kernel, recurrent, biases), reset_after=kind == recurrent_layers.GRU)


def _read_array(agent: Tree, path: Path) -> np.ndarray:
    return cast(Leaf, agent[path]).array().astype(np.float32)


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Settings for building a network where the checkpoint does not specify them.

    `hidden` are the activations after the hidden layers (the last one repeats), `network_hidden` those of
    networks with other ones than the policy, by component without `_target`. `head` and the bounds
    define the action (see HEADS), or the `choices` among discrete actions; `obs_norm` contains mean, var,
    epsilon, clip of the observations. The `output` is an action, the scores that a discrete one is chosen by,
    an action drawn from the `distribution` with the input NOISE, or the action of its mean, its mean and its
    standard deviation [batch, 3 * actions].
    """

    hidden: tuple[str, ...]
    head: str
    epsilon: float
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    obs_norm: Mapping[str, Any] | None = None
    choices: Choices | None = None
    output: Literal["action", "scores", "sample", "distribution"] = "action"
    distribution: ActionDistribution | None = None
    network_hidden: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def scores(self) -> NetworkSettings:
        """The settings of the network that ends with the scores of discrete actions: Q-values or logits."""
        return replace(self, output="scores")


def _scale_unit(low: np.ndarray, high: np.ndarray) -> Affine:
    return Affine((high - low) / 2, (high + low) / 2)


def _clip_within(limit: float, high: np.ndarray) -> Clip:
    return Clip(np.full_like(high, -limit), np.full_like(high, limit))


# Maps from the last layer to an action: `tanh` times the first upper bound, `affine` from tanh's [-1, 1] to
# [low, high], `identity` unchanged, `clip` to the bounds, `clip_affine` clipped to [-1, 1] and then mapped to
# [low, high]; `unit_tanh` is tanh alone; `tanh_clip_affine` is `tanh` and then `clip_affine`, as in Tianshou;
# `clip_tanh_affine` is clipped to [-2, 2] and then `affine`.
HEADS: dict[str, Callable[[np.ndarray, np.ndarray], list[Layer]]] = {
    # The TD3 authors scale by one number: the upper bound of the first dimension (TD3 main.py, max_action).
    "tanh": lambda low, high: [Activation("tanh"), Affine(np.full_like(high, high[0]), np.zeros_like(low))],
    "affine": lambda low, high: [Activation("tanh"), _scale_unit(low, high)],
    "unit_tanh": lambda _low, _high: [Activation("tanh")],
    "identity": lambda _low, _high: [],
    "clip": lambda low, high: [Clip(low, high)],
    "clip_affine": lambda low, high: [_clip_within(1, high), _scale_unit(low, high)],
    "tanh_clip_affine": lambda low, high: [*HEADS["tanh"](low, high), *HEADS["clip_affine"](low, high)],
    # Default of Stable-Baselines3 for gSDE (stable_baselines3/sac/policies.py, clip_mean).
    "clip_tanh_affine": lambda low, high: [_clip_within(2, high), *HEADS["affine"](low, high)],
}
FRACTIONS = 32
"""Fractions that Tianshou's IQN draws in evaluation by default (algorithm/modelfree/iqn.py, sample_size)."""
_DRAWN_HINT = "use eval with --stochastic, or in Python deterministic=False, which draw them"
# Maps that do not depend on the bounds.
UNBOUNDED = frozenset({"identity", "unit_tanh", "argmax"})


def own_draws(agent: Tree, part: AgentNetwork, choices: Choices | None) -> tuple[int, DrawLaw] | None:
    """Return how many numbers a policy draws for each action in evaluation too, and their law; else None.

    They are the fractions of IQN's quantiles, or the factors of the noise of its noisy layers.
    """
    if choices is not None and choices.scores == "drawn_fractions":
        return FRACTIONS, "uniform"
    number = 0
    for chain in part.chains:
        for position in range(len(chain.layers)):
            leaf = agent.get(schema.canonical_weight_path(chain, position, schema.KERNEL_DEVIATION))
            number += sum(leaf.shape) if isinstance(leaf, Leaf) else 0
    return (number, "factors") if number else None


@keep_open()
def policy_network(
    agent: Tree,
    part: AgentNetwork,
    wiring: NetworkSettings,
    front: PolicyEncoder | None = None,
    observed: Shapes | None = None,
) -> Network:
    """Return the policy: obs [batch, obs_dim] to an environment's action [batch, act_dim], float32.

    Args:
        agent: the canonical tree.
        part: the policy's layers in it.
        wiring: activations, normalisation, distribution and action map.
        front: the encoder before its layers.
        observed: the environment's observation shapes where they differ from the policy's: images with
            channels last, rows as grids.
    """
    obs_dim, act_dim = layer_widths(agent, part)
    if wiring.choices is None:
        _require_action_map(wiring, act_dim)
    _require_rows(front, wiring, obs_dim)
    wiring = _with_linear_encoding(part, wiring)
    builder = _start_policy(agent, part, wiring, front, observed)
    norms = read_encoder_norms(agent, part.component, front) if front is not None else {}
    values = [builder.last]
    if part.program is None:
        encoded = range(_count_encoder_layers(part, wiring))
        values = _add_layers(builder, agent, part, wiring, None, norms, encoded)
    several = wiring.choices is not None and wiring.choices.of_several
    if len(part.chains) > 1 and not several:
        raise MappingError(f"{part.title} is one of several networks that give the scores of the actions")
    if several and wiring.choices is not None and wiring.choices.has_fractions:
        _add_fractions(builder, agent, part, wiring, wiring.choices)
    elif several:
        act_dim = _join_chains(builder, agent, part, wiring, values)
    if wiring.distribution is not None:
        _add_distribution(builder, agent, part, wiring, wiring.distribution)
        return builder.done()
    for layer in _final_layers(wiring, act_dim):
        builder.add(layer)
    return builder.done()


def _require_action_map(wiring: NetworkSettings, width: int) -> None:
    """Raise EnvironmentMismatchError for bounds of another number of actions, UsageError for unknown maps."""
    sizes = {len(wiring.action_low), len(wiring.action_high)}
    if sizes != {width} and (sizes != {0} or wiring.head not in UNBOUNDED):
        raise EnvironmentMismatchError(
            "the policy and the action bounds have different sizes",
            expected=format_count(width, "action"),
            found=format_count(len(wiring.action_high), "bound"),
        )
    if wiring.head not in HEADS:
        raise UsageError(f"unknown action map {wiring.head!r}", hint=f"choose from {', '.join(HEADS)}")


def _start_policy(
    agent: Tree,
    part: AgentNetwork,
    wiring: NetworkSettings,
    front: PolicyEncoder | None,
    observed: Shapes | None,
) -> NetworkBuilder:
    """Return a builder whose last value is what a policy's layers receive, or a program's output."""
    obs_dim, act_dim = layer_widths(agent, part)
    own = own_draws(agent, part, wiring.choices)
    more = [(NOISE, act_dim if own is None else own[0])] if wiring.output == "sample" else []
    if part.program is not None:
        if wiring.distribution is not None:
            raise UnsupportedError("actions are not drawn by a policy that is a model's own graph")
        return _start_from_program(part.program, wiring, observed)
    if front is None:
        builder = NetworkBuilder([("obs", obs_dim if observed is None else observed["obs"]), *more])
        if observed is not None and len(observed["obs"]) > 1:
            builder.add(Flatten())
        _add_normalization(builder, wiring, obs_dim)
        return builder
    builder = start_network(agent, part.component, front, observed, more)
    add_encoder(
        builder,
        agent,
        part.component,
        front,
        lambda part: _add_normalization(builder, wiring, part.size, part),
    )
    return builder


def _add_distribution(
    builder: NetworkBuilder,
    agent: Tree,
    part: AgentNetwork,
    wiring: NetworkSettings,
    drawn: ActionDistribution,
) -> None:
    """Turn a Gaussian policy's outputs into a drawn action, or into the mean and the standard deviation."""
    output = builder.last
    deviation = _add_deviation(builder, agent, part, drawn)
    low, high = (np.asarray(bound, np.float32) for bound in (wiring.action_low, wiring.action_high))
    head = HEADS[wiring.head](low, high)
    if drawn.place == "unit" and wiring.head != "affine":
        raise UnsupportedError("actions are drawn within [-1, 1], but the action map is another one")
    maps: dict[str, tuple[list[Layer], list[Layer]]] = {
        "mean": ([], head),
        "action": (head, []),
        "unit": ([Activation("tanh")], HEADS["clip_affine"](low, high)),
    }
    before, after = maps[drawn.place]
    builder.last = output
    for layer in before:
        builder.add(layer)
    mean = builder.last
    builder.last = mean
    if wiring.output == "sample":
        builder.add(Add(), mean, builder.add(Multiply(), deviation, builder.number(NOISE)))
    for layer in after:
        builder.add(layer)
    if wiring.output == "distribution":
        builder.add(Concat(), builder.last, mean, deviation)


def deviation_path(agent: Tree, part: AgentNetwork) -> Path | None:
    """Return the canonical path of a policy's standard deviation: of its head's kernel, or of a vector."""
    head = schema.canonical_weight_path(part, "log_std", "kernel")
    return next((path for path in (head, head[:-1], (*part.prefix, attr("std"))) if path in agent), None)


def _add_deviation(
    builder: NetworkBuilder, agent: Tree, part: AgentNetwork, drawn: ActionDistribution
) -> int:
    """Add the standard deviation [batch, actions] of the policy whose last layer is the last value."""
    path, width = deviation_path(agent, part), layer_widths(agent, part)[1]
    if path is None:
        raise UnsupportedError("the policy is deterministic: no file contains a standard deviation")
    array = _read_array(agent, path)
    if path[-1] == schema.KERNEL:
        bias = (*path[:-1], schema.BIAS)
        last = next(node for node in reversed(builder.nodes) if isinstance(node.layer, Dense))
        layer = Dense(array, _read_array(agent, bias) if bias in agent else None)
        builder.add(layer, *last.inputs)
    elif array.size == width:
        builder.add(ConstantRow(array.reshape(-1)), builder.last)
    else:
        raise MappingError(
            "the standard deviations do not match the actions",
            expected=str(width),
            found=str(list(array.shape)),
        )
    stored = path[-1] == attr("std")
    if drawn.limits is not None:
        limits = np.exp(drawn.limits) if stored else np.asarray(drawn.limits)
        low, high = (np.full(width, limit, np.float32) for limit in limits)
        ranges: dict[str, list[Layer]] = {
            "clip": [Clip(low, high)],
            "tanh": [Activation("tanh"), Affine((high - low) / 2, (high + low) / 2)],
            "sigmoid": [Activation("sigmoid"), Affine(high - low, low)],
        }
        for range_ in ranges[drawn.limited]:
            builder.add(range_)
    return builder.last if stored else builder.add(Exp())


def _join_chains(
    builder: NetworkBuilder, agent: Tree, part: AgentNetwork, wiring: NetworkSettings, values: Sequence[int]
) -> int:
    """Join the outputs of a policy's networks to its last value, and return the width of that.

    `values` are those before and after each layer of the first network: first layers that another network
    shares with it are computed once.
    """
    outputs, widths = [builder.last], [layer_widths(agent, chain)[1] for chain in part.chains]
    for chain in part.chains[1:]:
        shared = schema.count_shared_layers(agent, part, chain)
        builder.last = values[shared]
        outputs.append(
            _add_layers(builder, agent, chain, wiring, None, positions=range(shared, len(chain.layers)))[-1]
        )
    if part.state_value is None:
        if len({*widths}) > 1 or part.members == ():
            raise MappingError(f"{part.title} is one of several networks, whose outputs have no mean")
        builder.add(Add(), *outputs)
        share = np.full(1, 1 / len(outputs), np.float32)
        builder.add(Affine(share, np.zeros_like(share)))
        return widths[0]
    # One value per action, or one for each of its atoms, whose means over the actions are separate.
    *widths, number = widths
    builder.add(Concat(), *outputs)
    if any(width % number for width in widths):
        raise MappingError(f"{part.title} has {widths} advantages for a state value of {number}")
    centred = np.zeros((sum(widths), sum(widths)))
    for width, start in zip(widths, np.cumsum([0, *widths]), strict=False):
        actions, span = width // number, slice(start, start + width)
        centred[span, span] = np.kron(np.eye(actions) - 1 / actions, np.eye(number))
    value = np.tile(np.eye(number), sum(widths) // number)
    builder.add(Dense(np.concatenate([centred, value]).astype(np.float32), constant=True))
    return len(centred)


def _count_encoder_layers(part: AgentNetwork, wiring: NetworkSettings) -> int:
    """Return how many layers encode the observation, before fractions join them: all of other networks."""
    if wiring.choices is None or not wiring.choices.has_fractions:
        return len(part.layers)
    if not 0 < part.encoder < len(part.layers) or not part.members:
        raise UnsupportedError(f"no name shows which layers of {part.title} come before its fractions")
    return part.encoder


def _with_linear_encoding(part: AgentNetwork, wiring: NetworkSettings) -> NetworkSettings:
    """Return the settings without an activation before fractions join, if one name is that of all others."""
    last = _count_encoder_layers(part, wiring) - 1
    if last == len(part.layers) - 1 or len(wiring.hidden) > 1:
        return wiring
    names = ("linear" if number == last else wiring.hidden[0] for number in range(len(part.layers) - 1))
    return replace(wiring, hidden=tuple(names))


def _add_fractions(
    builder: NetworkBuilder, agent: Tree, part: AgentNetwork, wiring: NetworkSettings, choices: Choices
) -> None:
    """Add the mean [batch, actions] of quantiles at fractions, after the encoder's layers.

    The cosines of each fraction are embedded and multiply the encoded observation (tianshou/utils/net/
    discrete.py, ImplicitQuantileNetwork, FullQuantileFunction). Proposed fractions are the midpoints of
    intervals, whose lengths weigh the quantiles; drawn ones are the input NOISE and have equal weights.
    """
    encoded, (actions,) = builder.last, choices.counts
    embedding, *proposals = part.members
    if choices.scores == "drawn_fractions":
        if wiring.output != "sample":
            raise UnsupportedError(
                "the library draws the fractions of IQN's quantiles at random, also in evaluation",
                hint=_DRAWN_HINT,
            )
        shares, fractions, number = None, builder.number(NOISE), FRACTIONS
    else:
        if len(proposals) != 1:
            raise MappingError(f"the fractions of {part.title} are those that the online network proposes")
        tensors = schema.read_layer_arrays(agent, proposals[0], 0)
        builder.add(Dense(tensors["kernel"], tensors.get("bias")))
        shares, number = builder.add(Softmax()), tensors["kernel"].shape[1]
        fractions = builder.add(_constant(np.triu(np.ones((number, number)), 1) + np.eye(number) / 2))
    tensors = schema.read_layer_arrays(agent, embedding, 0)
    builder.add(Cosines(tensors["kernel"].shape[0]), fractions)
    builder.add(Dense(tensors["kernel"], tensors.get("bias")))
    embedded = builder.add(Activation("relu"))
    builder.add(Multiply(), embedded, builder.add(Repeat(number), encoded))
    rest = range(_count_encoder_layers(part, wiring), len(part.layers))
    _add_layers(builder, agent, part, wiring, None, positions=rest)
    quantiles = builder.add(Transpose((1, 0)))
    if shares is not None:
        builder.add(Multiply(), quantiles, builder.add(Repeat(actions), shares))
    builder.add(Flatten())
    builder.add(QuantileMean(number, last=True))
    if shares is not None:
        whole = np.full(actions, number, np.float32)
        builder.add(Affine(whole, np.zeros_like(whole)))


def _constant(kernel: np.ndarray) -> Dense:
    """Return a linear map without weights."""
    return Dense(kernel.astype(np.float32), constant=True)


def _final_layers(wiring: NetworkSettings, width: int) -> list[Layer]:
    """Return the layers that turn the last layer's `width` outputs into an action."""
    choices = wiring.choices
    if choices is None:
        low, high = (np.asarray(bound, np.float32) for bound in (wiring.action_low, wiring.action_high))
        return HEADS[wiring.head](low, high)
    try:
        number = choices.values_per_action(width)
    except ValueError:
        raise EnvironmentMismatchError(
            "the network's outputs do not match its discrete actions",
            expected=f"outputs for {choices.title}",
            found=str(width),
        ) from None
    if choices.scores.endswith("atoms") and number != len(choices.support):
        raise EnvironmentMismatchError(
            "the network's outputs do not match the values of its atoms",
            expected=f"{len(choices.support)} per action",
            found=str(number),
        )
    support = np.asarray(choices.support, np.float32)
    scored: dict[str, Callable[[], Layer]] = {
        "quantiles": lambda: QuantileMean(number),
        **dict.fromkeys(
            ("quantiles_last", "dueling_quantiles", "mean_quantiles"),
            lambda: QuantileMean(number, last=True),
        ),
        **dict.fromkeys(("atoms", "dueling_atoms"), lambda: AtomMean(support)),
        "dueling_limited_atoms": lambda: AtomMean(support, schema.PROBABILITY_LIMIT),
        # The mean of the advantages is subtracted, and the first output added.
        "value_first": lambda: _constant(
            np.concatenate([np.ones((1, width - 1)), np.eye(width - 1) - 1 / (width - 1)])
        ),
        # The logit of 0 is 0, so that 1 is chosen above it.
        "bernoulli": lambda: _constant(np.kron(np.eye(width), [[0, 1]])),
    }
    before = [scored[choices.scores]()] if choices.scores in scored else []
    return [*before, *([] if wiring.output == "scores" else [ArgMax(choices.counts, choices.starts)])]


def _start_from_program(program: Program, wiring: NetworkSettings, observed: Shapes | None) -> NetworkBuilder:
    """Return a builder with a program's operations, for observations of the environment's shape."""
    ((name, shape),) = program.inputs
    size = shape if observed is None else tuple(observed[name])
    builder = NetworkBuilder([(name, size[0] if len(size) == 1 else size)], program.states.items())
    if size != shape and len(shape) == 3 and size == _channels_last(shape):
        builder.add(Transpose((2, 0, 1)))
    elif size != shape and len(shape) == 1 and math.prod(size) == shape[0]:
        builder.add(Flatten())
    elif size != shape:
        raise EnvironmentMismatchError(
            "the policy does not accept observations of this shape",
            expected=str(list(shape)),
            found=str(list(size)),
        )
    if wiring.obs_norm is not None and len(shape) > 1:
        raise UnsupportedError(
            "normalisation statistics of images or of several inputs are not supported yet"
        )
    _add_normalization(builder, wiring, shape[0])
    add_program(builder, program)
    return builder


def q_network(
    agent: Tree, part: AgentNetwork, wiring: NetworkSettings, obs_dim: int, act_dim: int
) -> Network:
    """Return a Q-function: obs and action to its value [batch, 1]; raise MappingError on a mismatch.

    The action is joined to the observation, in the older DDPG form to the first layer's output, or both are
    joined after separate layers.

    Args:
        agent: the canonical tree.
        part: the Q-function's layers in it.
        wiring: activations and normalisation.
        obs_dim: numbers in an observation.
        act_dim: numbers in an action.
    """
    builder = NetworkBuilder([("obs", obs_dim), ("action", act_dim)])
    first, _ = layer_widths(agent, part)
    if first not in (obs_dim, obs_dim + act_dim):
        raise MappingError(
            f"{part.title} does not accept this agent's observations and actions",
            expected=f"{obs_dim + act_dim} or {obs_dim} inputs",
            found=str(first),
        )
    _add_normalization(builder, wiring, obs_dim)
    late, rest, ends = (1, act_dim), 0, []
    inputs = {"obs": builder.last, "action": 1}
    for name, count in part.streams:
        builder.last = inputs[name]
        _add_layers(builder, agent, part, wiring, None, positions=range(rest, rest + count))
        ends.append(builder.last)
        rest += count
    if ends:
        late = (builder.add(Concat(), *ends), schema.read_layer_arrays(agent, part, rest)["kernel"].shape[0])
    elif first == obs_dim + act_dim:
        builder.add(Concat(), builder.last, 1)
    _add_layers(builder, agent, part, wiring, late, positions=range(rest, len(part.layers)))
    return builder.done()


def value_network(agent: Tree, part: AgentNetwork, wiring: NetworkSettings) -> Network:
    """Return a state-value function: obs [batch, obs_dim] to [batch, 1]."""
    obs_dim, _ = layer_widths(agent, part)
    builder = NetworkBuilder([("obs", obs_dim)])
    # A critic may have more inputs than the policy; the policy's statistics do not apply to those.
    if wiring.obs_norm is None or len(wiring.obs_norm["mean"]) == obs_dim:
        _add_normalization(builder, wiring, obs_dim)
    _add_layers(builder, agent, part, wiring, None)
    return builder.done()


def _require_rows(front: PolicyEncoder | None, wiring: NetworkSettings, obs_dim: int) -> None:
    """Raise UnsupportedError for statistics of images, and for those of inputs that the policy lacks.

    Without an encoder a policy has all inputs as one row of `obs_dim` numbers, in the order of the
    statistics.
    """
    if wiring.obs_norm is None:
        return
    parts = wiring.obs_norm.get("parts")
    streams = () if front is None else front.streams
    rows = {stream.name: stream.size for stream in streams if not stream.image}
    if parts is None and (front is None or (len(streams) == 1 and rows)):
        return
    if parts is not None and front is None and sum(parts.values()) == obs_dim:
        return
    if parts is None or any(rows.get(name) != size for name, size in parts.items()):
        raise UnsupportedError(
            "the observation statistics are not those of the policy's inputs, or normalise images",
            expected=", ".join(f"{name} [{size}]" for name, size in rows.items()) or None,
            found=", ".join(f"{name} [{size}]" for name, size in (parts or {}).items()) or None,
        )


def _add_normalization(
    builder: NetworkBuilder, wiring: NetworkSettings, width: int, stream: EncoderInput | None = None
) -> None:
    """Add the observation statistics; of several inputs those of `stream`, if it has some."""
    norm = wiring.obs_norm
    if norm is None:
        return
    mean, var = (np.asarray(norm[name], np.float64) for name in ("mean", "var"))
    if stream is not None and (parts := norm.get("parts")):
        if stream.name not in parts:
            return
        names = [*parts]
        start = sum(parts[name] for name in names[: names.index(stream.name)])
        mean, var = mean[start : start + width], var[start : start + width]
    if len(mean) != width or len(var) != len(mean):
        raise EnvironmentMismatchError(
            "the observation statistics and the network have different sizes",
            expected=str(width),
            found=str(len(mean)),
            hint=f"pass statistics of {format_count(width, 'observation')}, those of the policy's inputs",
        )
    scale = 1 / np.sqrt(var + float(norm.get("epsilon", 1e-8)))
    # In two steps, because x * scale - mean * scale would cancel where a mean is large relative to its
    # deviation.
    builder.add(Affine(np.ones(len(mean), np.float32), (-mean).astype(np.float32)))
    builder.add(Affine(scale.astype(np.float32), np.zeros(len(mean), np.float32)))
    if norm.get("clip") is not None:
        limit = np.full(len(mean), float(norm["clip"]), np.float32)
        builder.add(Clip(-limit, limit))


def _add_layers(
    builder: NetworkBuilder,
    agent: Tree,
    part: AgentNetwork,
    wiring: NetworkSettings,
    late: tuple[int, int] | None,
    norms: Mapping[int, tuple[Affine, ...]] | None = None,
    positions: range | None = None,
) -> list[int]:
    """Add a network's layers, or those at `positions`; return the values before and after each.

    `late` are the number and the width of a value that layers with so many more inputs receive after the
    output before them. `norms` go before the dense layers with their numbers.
    """
    values = [builder.last]
    dense = [position for position, layer in enumerate(part.layers) if layer.kind == "dense"]
    width: int | None = None
    for position in range(len(part.layers)) if positions is None else positions:
        layer = part.layers[position]
        tensors = schema.read_layer_arrays(agent, part, position)
        if layer.kind == "dense":
            kernel = tensors["kernel"]
            if width is not None and late is not None and kernel.shape[0] == width + late[1]:
                builder.add(Concat(), builder.last, late[0])
            for norm in (norms or {}).get(dense.index(position), ()):
                builder.add(norm)
            if schema.KERNEL_DEVIATION in tensors:
                _add_noisy(builder, tensors, part.title, wiring)
            else:
                builder.add(Dense(kernel, tensors.get("bias")))
            width = kernel.shape[1]
        elif layer.kind == "batch_norm":
            for step in _batch_norm(epsilon=wiring.epsilon, **tensors):
                builder.add(step)
        else:
            builder.add(LayerNorm(tensors["scale"], tensors["offset"], wiring.epsilon))
        number = part.activation_numbers[position]
        if number is not None:
            hidden = wiring.network_hidden.get(part.component.removesuffix("_target"), wiring.hidden)
            builder.add(_make_activation(hidden, number))
        values.append(builder.last)
    return values


def _add_noisy(
    builder: NetworkBuilder, tensors: Mapping[str, np.ndarray], title: str, wiring: NetworkSettings
) -> None:
    """Add a dense layer with noise: deviations times one factor for each input and one for each output.

    Of RLlib (rllib/models/torch/modules/noisy_layer.py), which also draws it in evaluation.
    """
    if wiring.output != "sample":
        raise UnsupportedError(
            f"the library draws the noise of {title}'s layers at random, also in evaluation", hint=_DRAWN_HINT
        )
    inputs, (rows, columns) = builder.last, tensors["kernel"].shape
    mean = builder.add(Dense(tensors["kernel"], tensors["bias"]), inputs)
    of_inputs, of_outputs = builder.draw(rows), builder.draw(columns)
    builder.add(Multiply(), inputs, of_inputs)
    builder.add(Dense(tensors[schema.KERNEL_DEVIATION], tensors[schema.BIAS_DEVIATION]))
    builder.add(Add(), mean, builder.add(Multiply(), of_outputs, builder.last))


def _make_activation(hidden: tuple[str, ...], number: int) -> Activation:
    name = hidden[min(number, len(hidden) - 1)] if hidden else "linear"
    known = parse_activation(name)
    if known is None:
        raise UsageError(
            f"unknown activation {name!r}", hint=f"networks with {', '.join(ACTIVATIONS)} can be run"
        )
    return Activation(*known)
