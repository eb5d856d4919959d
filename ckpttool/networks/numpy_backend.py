"""Compute networks with NumPy."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from ckpttool.networks.layer_functions import Function, Put, Row, common_layers
from ckpttool.networks.network import (
    SELU_ALPHA,
    SELU_SCALE,
    Activation,
    Affine,
    ArgMax,
    AtomMean,
    Clip,
    Concat,
    ConstantRow,
    Convolution,
    Cosines,
    Dense,
    Flatten,
    InputAdapter,
    Layer,
    LayerNorm,
    Network,
    Observation,
    Repeat,
    Softmax,
    State,
    assemble,
    chain_calls,
    is_chain,
    look_up,
    require_cpu,
)
from ckpttool.networks.policy_training import (
    GradientEngine,
    Learner,
    TableOptimizer,
    layer_arrays,
    trained_arrays,
)

Run = Callable[[Sequence[np.ndarray]], list[np.ndarray]]

# Layers that can work in place, and cost less that way.
_IN_PLACE: dict[str, Function] = {
    "relu": lambda x: np.maximum(x, 0.0, out=x),
    "tanh": lambda x: np.tanh(x, x),
}


def build_chain(network: Network, lower: Callable[[Layer], Function]) -> Run | None:
    """Return a chain as one function of its input, using `lower` elsewhere; None for other graphs.

    The outputs of the last dense layer and the layers after it are new at every call: callers may keep them.
    The function is not thread-safe. The arithmetic is that of the separate layers, to the last bit; only the
    allocations are avoided. From 1,024 rows of 256 numbers on this reduced the time to a third, because the
    system reclaims blocks of that size.
    """
    if not is_chain(network):
        return None
    layers = [node.layer for node in network.nodes]
    last = max((number for number, layer in enumerate(layers) if isinstance(layer, Dense)), default=0)
    calls: list[Function] = []
    for number, layer in enumerate(layers):
        after_dense = number > 0 and isinstance(layers[number - 1], Dense)
        if isinstance(layer, Dense) and number < last:
            calls.append(_buffered_dense(layer))
        elif isinstance(layer, Activation) and after_dense and layer.name in _IN_PLACE:
            calls.append(_IN_PLACE[layer.name])
        else:
            calls.append(lower(layer))
    return chain_calls(calls)


def _buffered_dense(layer: Dense) -> Function:
    """Return a dense layer that reuses its output array while the number of rows is unchanged."""
    kernel = copy_native(layer.kernel)
    bias = None if layer.bias is None else copy_native(layer.bias)
    product: Any = np.dot if kernel.ndim == 2 else np.matmul
    *members, _, width = kernel.shape
    rows, room = -1, np.empty(0, kernel.dtype)

    def hidden(x: np.ndarray) -> np.ndarray:
        nonlocal rows, room
        if x.shape[-2] != rows:
            rows = x.shape[-2]
            room = np.empty((*members, rows, width), kernel.dtype)
        product(x, kernel, room)
        if bias is not None:
            np.add(room, bias, room)
        return room

    return hidden


def copy_native(array: np.ndarray) -> np.ndarray:
    """Copy to native byte order and C order, because files may change under a mapped array."""
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


NAME = "numpy"
_OWNER = "numpy backend"


def versions() -> dict[str, str]:
    """Return numpy's version."""
    return {"numpy": np.__version__}


def build(network: Network, device: str = "cpu") -> NumpyPolicy:
    """Copy the network's arrays and return its policy; raise UsageError for devices except the CPU."""
    require_cpu(NAME, device)
    return NumpyPolicy(network)


def learn(learner: Learner) -> GradientEngine:
    """Return the learner for training on the CPU."""
    return NumpyGradientEngine(learner)


class NumpyPolicy:
    """A network as closures over numpy arrays."""

    device = "cpu"

    def __init__(self, network: Network) -> None:
        self._feeds = InputAdapter(network)
        self._run = build_chain(network, _lower) or assemble(network, _lower)

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state."""
        action, *after = self._run(self._feeds(obs, state))
        return self._feeds.joined(action), tuple(after)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Limit the threads of matrix products in the block, if numpy's BLAS is OpenBLAS.

        Its waiting threads occupy the environments' cores (rollouts on busy cores ran ten times slower),
        and the last bits of a product depend on the number of threads.
        """
        library = _openblas()
        if library is None:
            yield
            return
        get, put = library
        before = get()
        put(count)
        try:
            yield
        finally:
            put(before)


def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return OpenBLAS's get and set of threads, with symbol names of numpy's wheels or distributions."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        path = str(getattr(sys.modules.get(name), "__file__", None))
        if not path.endswith((".so", ".pyd", ".dylib")):
            continue
        core = ctypes.CDLL(path)  # also resolves names in libraries linked to numpy's core
        for form in (
            "scipy_openblas_{}_num_threads64_",
            "openblas_{}_num_threads64_",
            "openblas_{}_num_threads",
        ):
            if hasattr(core, form.format("set")):
                return getattr(core, form.format("get")), getattr(core, form.format("set"))
    return None


def _lower(layer: Layer) -> Function:
    return look_up(LAYERS, type(layer), _OWNER)(layer, copy_native)


def _dense(layer: Dense, put: Put) -> Function:
    kernel = put(layer.kernel)
    # np.dot costs less per call; np.matmul multiplies every member's block by its own kernel.
    product = np.dot if kernel.ndim == 2 else np.matmul
    if layer.bias is None:
        return lambda x: product(x, kernel)
    bias = put(layer.bias)

    def dense(x: np.ndarray) -> np.ndarray:
        y: np.ndarray = product(x, kernel)
        y += bias
        return y

    return dense


def _convolution(layer: Convolution, put: Put) -> Function:
    height, width, channels, filters = layer.kernel.shape
    down, right = layer.strides
    product = _dense(Dense(layer.kernel.reshape(-1, filters), layer.bias), put)
    around = ((0, 0), *layer.padding, (0, 0))
    padded = any(map(any, layer.padding))

    def convolution(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, around) if padded else x
        windows = np.lib.stride_tricks.sliding_window_view(x, (height, width), axis=(1, 2))
        # [batch, height, width, in, kernel height, kernel width], with the channels moved to the end.
        strided = windows[:, ::down, ::right].transpose(0, 1, 2, 4, 5, 3)
        flat: np.ndarray = product(strided.reshape(-1, height * width * channels))
        return flat.reshape(*strided.shape[:3], filters)

    return convolution


def _constant_row(layer: ConstantRow, put: Put) -> Function:
    row = put(layer.row)
    return lambda x: np.broadcast_to(row, (*x.shape[:-1], row.shape[-1]))


def _atom_mean(layer: AtomMean, put: Put) -> Function:
    support = put(layer.support)[..., None, :]
    atoms, limit = support.shape[-1], support.dtype.type(layer.limit)

    def atom_mean(x: np.ndarray) -> np.ndarray:
        logits = x.reshape(*x.shape[:-1], -1, atoms)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        total = weights.sum(axis=-1)
        if limit:
            weights, total = np.maximum(weights / total[..., None], limit), 1
        mean: np.ndarray = (weights * support).sum(axis=-1) / total
        return mean

    return atom_mean


def _softmax(_layer: Softmax, _put: Put) -> Function:
    def softmax(x: np.ndarray) -> np.ndarray:
        weights = np.exp(x - x.max(axis=-1, keepdims=True))
        shares: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
        return shares

    return softmax


def _cosines(layer: Cosines, _put: Put) -> Function:
    return lambda x: np.cos(x[..., None] * (np.pi * np.arange(1, layer.number + 1)).astype(x.dtype))


def _repeat(layer: Repeat, _put: Put) -> Function:
    return lambda x: np.broadcast_to(x[:, None], (len(x), layer.count, *x.shape[1:]))


def _arg_max(layer: ArgMax, _put: Put) -> Function:
    ends = np.cumsum(layer.counts).tolist()
    spans = list(zip([0, *ends[:-1]], ends, layer.starts, strict=True))

    def arg_max(x: np.ndarray) -> np.ndarray:
        choices = [x[..., low:high].argmax(axis=-1) + start for low, high, start in spans]
        return np.stack(choices, axis=-1).astype(x.dtype)

    return arg_max


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function of every element."""
    # Through tanh, which cannot overflow.
    return 0.5 * np.tanh(0.5 * x) + 0.5


# numpy has no error function; math.erf is exact to the last bit, and gelu is rare in agents.
_erf = np.frompyfunc(math.erf, 1, 1)


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """Return the standard normal CDF of every element."""
    below: np.ndarray = 0.5 * (1.0 + np.asarray(_erf(x * math.sqrt(0.5)), x.dtype))
    return below


def _gelu(x: np.ndarray) -> np.ndarray:
    product: np.ndarray = x * normal_cdf(x)
    return product


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0.0)))


def _leaky_relu(layer: Activation) -> Function:
    slope = float(layer.slope)
    return lambda x: np.where(x > 0, x, x * slope)


ACTIVATIONS: dict[str, Callable[[Activation], Function]] = {
    "relu": lambda _: lambda x: np.maximum(x, 0.0),
    "tanh": lambda _: np.tanh,
    "sigmoid": lambda _: sigmoid,
    "elu": lambda _: _elu,
    "leaky_relu": _leaky_relu,
    "gelu": lambda _: _gelu,
    "silu": lambda _: lambda x: x * sigmoid(x),
    "softplus": lambda _: lambda x: np.logaddexp(x, 0.0),
    "linear": lambda _: lambda x: x,
    "mish": lambda _: lambda x: x * np.tanh(np.logaddexp(x, 0.0)),
    "selu": lambda _: lambda x: SELU_SCALE * np.where(x > 0, x, SELU_ALPHA * np.expm1(np.minimum(x, 0.0))),
    "relu6": lambda _: lambda x: np.clip(x, 0.0, 6.0),
    "hardtanh": lambda _: lambda x: np.clip(x, -1.0, 1.0),
    "hardswish": lambda _: lambda x: x * np.clip(x + 3.0, 0.0, 6.0) / 6.0,
}

LAYERS: dict[type[Layer], Row] = {
    **common_layers(
        np,
        _OWNER,
        ACTIVATIONS,
        concat=lambda xs: np.concatenate(xs, axis=-1),
        mean=lambda x, axis, keepdims=False: x.mean(axis, keepdims=keepdims),
        split=lambda x, shape: x.reshape(*x.shape[:-1], *shape),
        reorder=lambda x, axes: x.transpose(axes),
    ),
    Dense: _dense,
    ConstantRow: _constant_row,
    Flatten: lambda _layer, _put: lambda x: x.reshape(len(x), math.prod(x.shape[1:])),
    Convolution: _convolution,
    AtomMean: _atom_mean,
    Softmax: _softmax,
    Cosines: _cosines,
    Repeat: _repeat,
    ArgMax: _arg_max,
}


Values = Sequence[np.ndarray]
# Gradients of a layer's inputs and of its trained arrays, from its output's gradient.
Back = tuple[list[np.ndarray], list[np.ndarray]]


def forward_values(network: Network, inputs: Values) -> list[np.ndarray]:
    """Return every value of the graph: the inputs, then one for each node."""
    values = list(inputs)
    for node in network.nodes:
        values.append(_lower(node.layer)(*[values[i] for i in node.inputs]))
    return values


def backpropagate(network: Network, values: Values, gradient: np.ndarray) -> Back:
    """Return the gradients of the inputs and trained arrays from the output's gradient."""
    of_value: list[Any] = [0.0] * len(values)
    of_value[network.output] = gradient
    of_weights: list[list[np.ndarray]] = []
    first = len(network.inputs)
    for number, node in reversed(tuple(enumerate(network.nodes, first))):
        back = look_up(BACKWARD, type(node.layer), _OWNER)
        layer_inputs = [values[i] for i in node.inputs]
        # An unused value has no gradient.
        above = np.broadcast_to(of_value[number], values[number].shape)
        of_given, gradients = back(node.layer, layer_inputs, values[number], above)
        of_weights.append(gradients)
        for i, part in zip(node.inputs, of_given, strict=True):
            of_value[i] = of_value[i] + part
    inputs = [np.broadcast_to(of_value[i], values[i].shape) for i in range(first)]
    return inputs, [array for gradients in reversed(of_weights) for array in gradients]


def _dense_gradient(layer: Dense, inputs: Values, _: np.ndarray, g: np.ndarray) -> Back:
    gradients = [inputs[0].T @ g]
    return [g @ layer.kernel.T], gradients if layer.bias is None else [*gradients, g.sum(axis=0)]


def _layer_norm_gradient(layer: LayerNorm, inputs: Values, _: np.ndarray, g: np.ndarray) -> Back:
    x = inputs[0]
    centred = x - x.mean(axis=-1, keepdims=True)
    root = np.sqrt(np.square(centred).mean(axis=-1, keepdims=True) + layer.epsilon)
    unit, scaled = centred / root, g * layer.scale
    along = unit * (scaled * unit).mean(axis=-1, keepdims=True)
    of_x = (scaled - scaled.mean(axis=-1, keepdims=True) - along) / root
    return [of_x], [(g * unit).sum(axis=0), g.sum(axis=0)]


def _activation_gradient(layer: Activation, inputs: Values, y: np.ndarray, g: np.ndarray) -> Back:
    return [g * look_up(SLOPES, layer.name, _OWNER)(layer, inputs[0], y)], []


def _concat_gradient(_layer: Concat, inputs: Values, _: np.ndarray, g: np.ndarray) -> Back:
    return np.split(g, np.cumsum([x.shape[-1] for x in inputs])[:-1], axis=-1), []


def _clip_gradient(layer: Clip, inputs: Values, _: np.ndarray, g: np.ndarray) -> Back:
    return [g * ((inputs[0] >= layer.low) & (inputs[0] <= layer.high))], []


def _gelu_slope(_layer: Activation, x: np.ndarray, _y: np.ndarray) -> np.ndarray:
    slope: np.ndarray = normal_cdf(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return slope


def _silu_slope(_layer: Activation, x: np.ndarray, _y: np.ndarray) -> np.ndarray:
    s = sigmoid(x)
    slope: np.ndarray = s * (1 + x * (1 - s))
    return slope


def _mish_slope(_layer: Activation, x: np.ndarray, _y: np.ndarray) -> np.ndarray:
    t = np.tanh(np.logaddexp(x, 0.0))
    slope: np.ndarray = t + x * (1 - t * t) * sigmoid(x)
    return slope


# Derivative of every activation, from its input x and output y.
SLOPES: dict[str, Callable[[Activation, np.ndarray, np.ndarray], np.ndarray]] = {
    "relu": lambda _layer, x, _y: (x > 0).astype(x.dtype),
    "tanh": lambda _layer, _x, y: 1 - y * y,
    "sigmoid": lambda _layer, _x, y: y * (1 - y),
    "elu": lambda _layer, x, _y: np.exp(np.minimum(x, 0.0)),
    "leaky_relu": lambda layer, x, _y: np.where(x > 0, 1.0, layer.slope).astype(x.dtype),
    "gelu": _gelu_slope,
    "silu": _silu_slope,
    "softplus": lambda _layer, x, _y: sigmoid(x),
    "linear": lambda _layer, x, _y: np.ones_like(x),
    "mish": _mish_slope,
    "selu": lambda _layer, x, _y: (
        SELU_SCALE * np.where(x > 0, 1.0, SELU_ALPHA * np.exp(np.minimum(x, 0.0)))
    ).astype(x.dtype),
    "relu6": lambda _layer, x, _y: ((x > 0) & (x < 6)).astype(x.dtype),
    "hardtanh": lambda _layer, x, _y: ((x > -1) & (x < 1)).astype(x.dtype),
    "hardswish": lambda _layer, x, _y: np.where(np.abs(x) < 3, x / 3 + 0.5, (x >= 3).astype(x.dtype)).astype(
        x.dtype
    ),
}

BACKWARD: dict[type[Layer], Callable[[Any, Values, np.ndarray, np.ndarray], Back]] = {
    Dense: _dense_gradient,
    LayerNorm: _layer_norm_gradient,
    Activation: _activation_gradient,
    Concat: _concat_gradient,
    Flatten: lambda _layer, inputs, _y, g: ([g.reshape(inputs[0].shape)], []),
    Affine: lambda layer, _inputs, _y, g: ([g * layer.scale], []),
    Clip: _clip_gradient,
}


class NumpyGradientEngine(GradientEngine):
    """A learner as numpy arrays."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._nets, self._vectors = dict(learner.networks), dict(learner.vectors)
        self._rules = {name: TableOptimizer(setup) for name, setup in learner.optimizers.items()}

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        net = self._nets[title]
        return forward_values(net, inputs)[net.output]

    def differentiate(
        self, title: str, inputs: Values, gradient: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the gradients of a network's inputs and of its trained arrays."""
        net = self._nets[title]
        return backpropagate(net, forward_values(net, inputs), gradient)

    def apply(self, optimizer: str, gradients: Values) -> None:
        """Make one update of an optimizer's arrays."""
        titles = self._optimizers[optimizer].titles
        weights = [weight for title in titles for weight in self.weights(title)]
        stepped = self._rules[optimizer].step(weights, gradients)
        for title in titles:
            count = len(self.weights(title))
            if title in self._vectors:
                self._vectors[title] = stepped[0]
            else:
                self._nets[title] = _with_weights(self._nets[title], stepped[:count])
            del stepped[:count]

    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the target network by the fraction `tau` towards the online one."""
        pairs = zip(self.weights(slow), self.weights(fast), strict=True)
        moved = [kept + tau * (value - kept) for kept, value in pairs]
        self._nets[slow] = _with_weights(self._nets[slow], moved)

    def weights(self, title: str) -> list[np.ndarray]:
        """Return the trained arrays of a network or vector."""
        return [self._vectors[title]] if title in self._vectors else trained_arrays(self._nets[title])


def _with_weights(network: Network, weights: list[np.ndarray]) -> Network:
    """Return the network with other trained arrays."""
    left = iter(weights)
    nodes = []
    for node in network.nodes:
        arrays = layer_arrays(node.layer).items()
        new: dict[str, Any] = {name: next(left) for name, (_, trained) in arrays if trained}
        nodes.append(replace(node, layer=replace(node.layer, **new)) if new else node)
    return replace(network, nodes=tuple(nodes))
