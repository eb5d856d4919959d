"""Compute networks with TensorFlow: one traced function for any batch, weights as constants."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core.deferred import DeferredModule
from ckpttool.core.errors import UsageError
from ckpttool.networks.layer_functions import Function, Put, Row, common_layers
from ckpttool.networks.network import (
    Activation,
    ArgMax,
    AtomMean,
    ConstantRow,
    Convolution,
    Cosines,
    Dense,
    Flatten,
    InputAdapter,
    Layer,
    Network,
    Observation,
    Repeat,
    Softmax,
    State,
    assemble,
    look_up,
)
from ckpttool.networks.policy_training import GradientEngine, Learner

if TYPE_CHECKING:
    import tensorflow as tf
else:
    tf = DeferredModule("tensorflow")

NAME = "tensorflow"
_OWNER = "tensorflow backend"

# TensorFlow has no type annotations.
Tensor = Any
Run = Callable[[Sequence[np.ndarray]], list[Tensor]]


def versions() -> dict[str, str]:
    """Return TensorFlow's version."""
    with quiet_start():
        import tensorflow as tf

    return {"tensorflow": str(tf.__version__)}


def build(network: Network, device: str = "cpu", *, xla: bool = False) -> TensorFlowPolicy:
    """Put the network on "cpu", "cuda", "cuda:N" or "auto" (a GPU if there is one).

    `xla` compiles the network for every new batch shape, which takes half a second each
    (docs/decisions/0014-network-backends.md lists the gain).
    """
    with quiet_start():
        _use_one_thread()
        return TensorFlowPolicy(network, _resolve_device(device), xla=xla)


@contextmanager
def quiet_start() -> Iterator[None]:
    """Buffer stderr while TensorFlow starts, and write it only if that fails.

    Its libraries print notes about the processor before any log level applies (absl, oneDNN).
    """
    try:
        stderr = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(stderr, 2)
            printed.seek(0)
            if sys.stderr is not None:
                sys.stderr.write(printed.read().decode("utf-8", "replace"))
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def learn(learner: Learner) -> GradientEngine:
    """Return a Gaussian policy's learner for training on the CPU."""
    with quiet_start():
        from ckpttool.networks.tensorflow_training import TensorFlowGradientEngine

        return TensorFlowGradientEngine(learner)


def module(network: Network, *, drawn: bool = False) -> Any:
    """Return a network as a keras.Model that can be trained; see tensorflow_training.NetworkModel."""
    with quiet_start():
        from ckpttool.networks.tensorflow_training import NetworkModel, require_keras

        require_keras("modules")
        return NetworkModel(network, drawn=drawn)


class TensorFlowPolicy:
    """A network as one concrete function over [None, width] tensors."""

    def __init__(self, network: Network, location: str, *, xla: bool = False) -> None:
        self.device = location
        self._feeds = InputAdapter(network)
        function = _on_device(network, location)
        self._run = _compile_xla(function) if xla else _trace(network, self._feeds, function)

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state, both in host memory."""
        with _disable_tf32():
            action, *after = [value.numpy() for value in self._run(self._feeds(obs, state))]
        return self._feeds.joined(action), tuple(after)


def _use_one_thread() -> None:
    """Use one thread if TensorFlow has not started and no thread count was set.

    The environments use the cores, and the last bits of a sum depend on the number of threads. Unlike
    in PyTorch and OpenBLAS, TensorFlow's number is fixed once it runs.
    """
    threading = tf.config.threading
    with suppress(RuntimeError):
        if threading.get_intra_op_parallelism_threads() == 0:
            threading.set_intra_op_parallelism_threads(1)


def _resolve_device(device: str) -> str:
    gpus = tf.config.list_physical_devices("GPU")
    offered = {"cpu": "cpu:0", "auto": "gpu:0" if gpus else "cpu:0"}
    offered |= {"cuda": "gpu:0"} if gpus else {}
    offered |= {f"cuda:{n}": f"gpu:{n}" for n in range(len(gpus))}
    if device not in offered:
        raise UsageError(
            f"device {device!r} is not available to tensorflow {tf.__version__}",
            hint=f"available devices: {', '.join(offered)}",
        )
    for gpu in gpus:
        # Otherwise TensorFlow reserves all GPU memory. Once it runs, the setting is the application's choice.
        with suppress(RuntimeError):
            tf.config.experimental.set_memory_growth(gpu, True)
    return offered[device]


@contextmanager
def _disable_tf32() -> Iterator[None]:
    """Disable TF32, TensorFlow's default, for float32 products; restore the caller's setting."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _on_device(network: Network, device: str) -> Function:
    with tf.device(device):
        run = assemble(network, _lower)

    def on_device(*inputs: Tensor) -> list[Tensor]:
        with tf.device(device):
            return run(inputs)

    return on_device


def _trace(network: Network, feeds: InputAdapter, function: Function) -> Run:
    """Return the function traced once, for any number of rows."""
    rows = [None] if network.members == 1 else [network.members, None]
    signature = [tf.TensorSpec([*rows, *shape], feeds.dtype) for shape in feeds.shapes]
    traced = tf.function(function, input_signature=signature, autograph=False).get_concrete_function()
    return lambda inputs: traced(*[tf.constant(array) for array in inputs])


def _compile_xla(function: Function) -> Run:
    """Return the function, compiled by XLA for every new batch shape."""
    general = tf.function(function, autograph=False, jit_compile=True)
    known: dict[tuple[tuple[int, ...], ...], Function] = {}

    def run(arrays: Sequence[np.ndarray]) -> list[Tensor]:
        shapes = tuple(array.shape for array in arrays)
        if shapes not in known:
            specs = [tf.TensorSpec(array.shape, array.dtype) for array in arrays]
            known[shapes] = general.get_concrete_function(*specs)
        outputs: list[Tensor] = known[shapes](*[tf.constant(array) for array in arrays])
        return outputs

    return run


def _lower(layer: Layer) -> Function:
    return look_up(LAYERS, type(layer), _OWNER)(layer, _constant)


def _constant(array: np.ndarray) -> Tensor:
    """Copy to a constant on the device of the enclosing tf.device block."""
    return tf.constant(array.astype(array.dtype.newbyteorder("=")))


def _dense(layer: Dense, put: Put) -> Function:
    kernel = put(layer.kernel)
    if layer.bias is None:
        return lambda x: tf.matmul(x, kernel)
    bias = put(layer.bias)
    if len(bias.shape) == 3:
        return lambda x: tf.matmul(x, kernel) + bias
    return lambda x: tf.nn.bias_add(tf.matmul(x, kernel), bias)


def _constant_row(layer: ConstantRow, put: Put) -> Function:
    row = put(layer.row)
    return lambda x: tf.broadcast_to(row, tf.concat([tf.shape(x)[:-1], row.shape[-1:]], 0))


def _flatten(_layer: Flatten, _put: Put) -> Function:
    return lambda x: tf.reshape(x, [-1, math.prod(x.shape[1:])])


def _convolution(layer: Convolution, put: Put) -> Function:
    kernel = put(layer.kernel)
    bias = None if layer.bias is None else put(layer.bias)
    around = [[0, 0], *map(list, layer.padding), [0, 0]]

    def convolution(x: Tensor) -> Tensor:
        convolved = tf.nn.conv2d(tf.pad(x, around), kernel, layer.strides, "VALID")
        return convolved if bias is None else tf.nn.bias_add(convolved, bias)

    return convolution


_IN_NN = ("relu", "tanh", "sigmoid", "elu", "silu", "softplus", "selu", "relu6")
ACTIVATIONS: dict[str, Callable[[Activation], Function]] = {
    **dict.fromkeys(_IN_NN, lambda layer: getattr(tf.nn, layer.name)),
    "mish": lambda _layer: lambda x: x * tf.tanh(tf.nn.softplus(x)),
    "hardtanh": lambda _layer: lambda x: tf.clip_by_value(x, -1.0, 1.0),
    "hardswish": lambda _layer: lambda x: x * tf.nn.relu6(x + 3.0) / 6.0,
    "leaky_relu": lambda layer: lambda x: tf.nn.leaky_relu(x, alpha=layer.slope),
    "gelu": lambda _layer: lambda x: tf.nn.gelu(x, approximate=False),
    "linear": lambda _layer: lambda x: x,
}


def _grouped(x: Tensor, *shape: int) -> Tensor:
    """Return the last axis as two axes of this shape."""
    return tf.reshape(x, tf.concat([tf.shape(x)[:-1], shape], 0))


def _atom_mean(layer: AtomMean, put: Put) -> Function:
    support = put(layer.support[..., None, :])
    atoms = layer.support.shape[-1]

    def atom_mean(x: Tensor) -> Tensor:
        weights = tf.nn.softmax(_grouped(x, -1, atoms))
        return tf.reduce_sum((tf.maximum(weights, layer.limit) if layer.limit else weights) * support, -1)

    return atom_mean


def _cosines(layer: Cosines, _put: Put) -> Function:
    def cosines(x: Tensor) -> Tensor:
        return tf.cos(x[..., None] * (math.pi * tf.range(1, layer.number + 1, dtype=x.dtype)))

    return cosines


def _repeat(layer: Repeat, _put: Put) -> Function:
    return lambda x: tf.repeat(x[:, None], layer.count, axis=1)


def _arg_max(layer: ArgMax, _put: Put) -> Function:
    def arg_max(x: Tensor) -> Tensor:
        choices = []
        for part, start in zip(tf.split(x, layer.counts, -1), layer.starts, strict=True):
            # tf.argmax leaves open which of equal values it takes.
            largest = part == tf.reduce_max(part, -1, keepdims=True)
            numbers = tf.range(part.shape[-1], dtype=x.dtype)
            others = tf.cast(part.shape[-1], x.dtype)
            choices.append(tf.reduce_min(tf.where(largest, numbers, others), -1) + start)
        return tf.stack(choices, -1)

    return arg_max


LAYERS: dict[type[Layer], Row] = {
    **common_layers(
        tf,
        _OWNER,
        ACTIVATIONS,
        concat=lambda xs: tf.concat(xs, axis=-1),
        mean=lambda x, axis, keepdims=False: tf.reduce_mean(x, axis, keepdims),
        split=lambda x, shape: _grouped(x, *shape),
        reorder=lambda x, axes: tf.transpose(x, axes),
    ),
    Dense: _dense,
    ConstantRow: _constant_row,
    Flatten: _flatten,
    Convolution: _convolution,
    AtomMean: _atom_mean,
    Softmax: lambda _layer, _put: lambda x: tf.nn.softmax(x),
    Cosines: _cosines,
    Repeat: _repeat,
    ArgMax: _arg_max,
}
