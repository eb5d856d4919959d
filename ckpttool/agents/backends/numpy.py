"""The numpy backend: no framework, least overhead per step, and the float64 reference of `verify`."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np

from ckpttool.agents.backends.numpy_chain import frugal, own
from ckpttool.agents.execute import Feeds, assemble, choose
from ckpttool.agents.network import (
    Activation,
    Add,
    Affine,
    Clip,
    Concat,
    Convolution,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Multiply,
    Network,
    Slice,
    Transpose,
)
from ckpttool.agents.policy import Observation, State
from ckpttool.agents.training.learner import Learner
from ckpttool.agents.training.td3 import Engine
from ckpttool.errors import UsageError

NAME = "numpy"

Function = Callable[..., np.ndarray]


def versions() -> dict[str, str]:
    """Return numpy's version."""
    return {"numpy": np.__version__}


def build(network: Network, device: str = "cpu") -> NumpyPolicy:
    """Copy the network's arrays and return its policy; raise UsageError for any device but the CPU."""
    if device not in {"cpu", "auto"}:
        raise UsageError(f"the numpy backend has no device {device!r}", hint="it computes on cpu")
    return NumpyPolicy(network)


def learn(learner: Learner) -> Engine:
    """Return the learner in training on the CPU."""
    from ckpttool.agents.backends.numpy_training import NumpyEngine

    return NumpyEngine(learner)


class NumpyPolicy:
    """A network as closures over numpy arrays."""

    device = "cpu"

    def __init__(self, network: Network) -> None:
        self._feeds = Feeds(network)
        self._run = frugal(network, _lower) or assemble(network, _lower)

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state."""
        action, *after = self._run(self._feeds(obs, state))
        return self._feeds.joined(action), tuple(after)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Multiply with that many threads inside the block, where numpy's BLAS is OpenBLAS.

        Its waiting threads take the environments' cores (rollouts on busy cores ran ten times slower), and
        the last bits of a product depend on how many threads share it.
        """
        found = _openblas()
        if found is None:
            yield
            return
        get, put = found
        before = get()
        put(count)
        try:
            yield
        finally:
            put(before)


def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """Return OpenBLAS's get and set of threads, under the names of numpy's wheels and of distributions."""
    for name in ("numpy._core._multiarray_umath", "numpy.core._multiarray_umath"):
        path = str(getattr(sys.modules.get(name), "__file__", None))
        if not path.endswith((".so", ".pyd", ".dylib")):
            continue
        core = ctypes.CDLL(path)  # looks names up in the libraries that numpy's core is linked with, too
        for form in (
            "scipy_openblas_{}_num_threads64_",
            "openblas_{}_num_threads64_",
            "openblas_{}_num_threads",
        ):
            if hasattr(core, form.format("set")):
                return getattr(core, form.format("get")), getattr(core, form.format("set"))
    return None


def _lower(layer: Layer) -> Function:
    return choose(LAYERS, type(layer), "numpy backend")(layer)


def _dense(layer: Dense) -> Function:
    kernel = own(layer.kernel)
    # np.dot costs less per call; np.matmul multiplies every member's block by its own kernel.
    product = np.dot if kernel.ndim == 2 else np.matmul
    if layer.bias is None:
        return lambda x: product(x, kernel)
    bias = own(layer.bias)

    def dense(x: np.ndarray) -> np.ndarray:
        y: np.ndarray = product(x, kernel)
        y += bias
        return y

    return dense


def _layer_norm(layer: LayerNorm) -> Function:
    scale, offset, epsilon = own(layer.scale), own(layer.offset), float(layer.epsilon)

    def layer_norm(x: np.ndarray) -> np.ndarray:
        centred: np.ndarray = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        scaled: np.ndarray = centred / np.sqrt(variance + epsilon) * scale + offset
        return scaled

    return layer_norm


def _affine(layer: Affine) -> Function:
    scale, shift = own(layer.scale), own(layer.shift)
    return lambda x: x * scale + shift


def _clip(layer: Clip) -> Function:
    low, high = own(layer.low), own(layer.high)
    return lambda x: np.minimum(np.maximum(x, low), high)


def _convolution(layer: Convolution) -> Function:
    height, width, taken, made = layer.kernel.shape
    down, right = layer.strides
    product = _dense(Dense(layer.kernel.reshape(-1, made), layer.bias))
    around = ((0, 0), *layer.padding, (0, 0))
    padded = any(map(any, layer.padding))

    def convolution(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, around) if padded else x
        windows = np.lib.stride_tricks.sliding_window_view(x, (height, width), axis=(1, 2))
        # [batch, height, width, in, kernel height, kernel width], with the channels moved to the end.
        strided = windows[:, ::down, ::right].transpose(0, 1, 2, 4, 5, 3)
        flat = product(strided.reshape(-1, height * width * taken))
        return flat.reshape(*strided.shape[:3], made)

    return convolution


def _transpose(layer: Transpose) -> Function:
    axes = (0, *(axis + 1 for axis in layer.axes))
    return lambda x: x.transpose(axes)


def _all_by(operation: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[Any], Function]:
    """Return the row of a layer that joins its inputs two by two."""
    return lambda _: lambda *xs: reduce(operation, xs)


def _activation(layer: Activation) -> Function:
    return choose(ACTIVATIONS, layer.name, "numpy backend")(layer)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return the logistic function of every element."""
    # Through tanh, which cannot overflow.
    return 0.5 * np.tanh(0.5 * x) + 0.5


# numpy has no error function; math.erf is right to the last bit, and gelu is rare in agents.
_erf = np.frompyfunc(math.erf, 1, 1)


def normal_below(x: np.ndarray) -> np.ndarray:
    """Return how much of the standard normal distribution lies below every element."""
    below: np.ndarray = 0.5 * (1.0 + np.asarray(_erf(x * math.sqrt(0.5)), x.dtype))
    return below


def _gelu(x: np.ndarray) -> np.ndarray:
    product: np.ndarray = x * normal_below(x)
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
}

LAYERS: dict[type[Layer], Callable[[Any], Function]] = {
    Dense: _dense,
    LayerNorm: _layer_norm,
    Activation: _activation,
    Concat: lambda _: lambda *xs: np.concatenate(xs, axis=-1),
    Flatten: lambda _: lambda x: x.reshape(len(x), math.prod(x.shape[1:])),
    Affine: _affine,
    Clip: _clip,
    Transpose: _transpose,
    Slice: lambda layer: lambda x: x[..., layer.start : layer.stop],
    Add: _all_by(np.add),
    Multiply: _all_by(np.multiply),
    Convolution: _convolution,
}
