"""The PyTorch backend: weights stay on the device, each step runs without autograd and without TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.agents.execute import Feeds, assemble, choose
from ckpttool.agents.network import (
    Activation,
    Affine,
    Clip,
    Concat,
    Dense,
    Flatten,
    Layer,
    LayerNorm,
    Network,
)
from ckpttool.agents.policy import Observation, State
from ckpttool.agents.training.learner import Learner
from ckpttool.agents.training.td3 import Engine
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    import torch

NAME = "torch"

Put = Callable[[np.ndarray], "torch.Tensor"]
Function = Callable[..., "torch.Tensor"]


def versions() -> dict[str, str]:
    """Return PyTorch's version, and CUDA's where PyTorch was built with it."""
    import torch

    found = {"torch": str(torch.__version__)}
    return found | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})


def build(network: Network, device: str = "cpu") -> TorchPolicy:
    """Put the network on "cpu", "cuda", "cuda:N" or "auto" (CUDA if there is any)."""
    return TorchPolicy(network, _place(device))


def learn(learner: Learner) -> Engine:
    """Return the learner in training on the CPU: gradients by autograd, steps by torch.optim."""
    from ckpttool.agents.backends.torch_training import TorchEngine

    return TorchEngine(learner)


class TorchPolicy:
    """A network as closures over tensors that live on one device."""

    def __init__(self, network: Network, place: torch.device) -> None:
        self.device = str(place)
        self._feeds = Feeds(network)
        self._run = assemble(network, _lowering(place))
        self._up: Put = _pinned(place) if place.type == "cuda" else _share

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state, both in the host's memory."""
        import torch

        given = self._feeds(obs, state)
        with torch.inference_mode(), _full_precision():
            found = self._run([self._up(array) for array in given])
            action, *after = [value.cpu().numpy() for value in found]
        return action, tuple(after)

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Compute with that many threads inside the block.

        PyTorch's idle OpenMP threads spin, which halves the speed of an environment on the same cores.
        """
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _place(device: str) -> torch.device:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    offered = {"cpu": "cpu", "auto": "cuda:0" if count else "cpu"}
    offered |= {"cuda": "cuda:0"} if count else {}
    offered |= {f"cuda:{n}": f"cuda:{n}" for n in range(count)}
    if device not in offered:
        raise UsageError(
            f"torch {torch.__version__} has no device {device!r} here", hint=f"there are {', '.join(offered)}"
        )
    return torch.device(offered[device])


@contextmanager
def _full_precision() -> Iterator[None]:
    """Keep TF32 and bfloat16 out of float32 products, and leave the caller's own setting as it was."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _share(array: np.ndarray) -> torch.Tensor:
    import torch

    # PyTorch warns about memory that it may not write, and refuses negative strides.
    whole = np.ascontiguousarray(array)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy())


def _pinned(place: torch.device) -> Put:
    """Return what copies an array to a GPU: from page-locked memory the copy need not wait.

    PyTorch's host allocator keeps and reuses the locked blocks, and waits for the copies out of them.
    """
    return lambda array: _share(array).pin_memory().to(place, non_blocking=True)


def _lowering(place: torch.device) -> Callable[[Layer], Function]:
    import torch

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array.astype(array.dtype.newbyteorder("=")), device=place)

    return lambda layer: choose(LAYERS, type(layer), "torch backend")(layer, put)


def _dense(layer: Dense, put: Put) -> Function:
    import torch

    weight = put(layer.kernel.T)
    bias = None if layer.bias is None else put(layer.bias)
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _layer_norm(layer: LayerNorm, put: Put) -> Function:
    import torch

    scale, offset = put(layer.scale), put(layer.offset)
    return lambda x: torch.nn.functional.layer_norm(x, scale.shape, scale, offset, layer.epsilon)


def _affine(layer: Affine, put: Put) -> Function:
    scale, shift = put(layer.scale), put(layer.shift)
    return lambda x: x * scale + shift


def _clip(layer: Clip, put: Put) -> Function:
    import torch

    low, high = put(layer.low), put(layer.high)
    return lambda x: torch.minimum(torch.maximum(x, low), high)


def _concat(_layer: Concat, _put: Put) -> Function:
    import torch

    return lambda *xs: torch.cat(xs, dim=-1)


def _activation(layer: Activation, _put: Put) -> Function:
    return choose(ACTIVATIONS, layer.name, "torch backend")(layer)


def _named(name: str) -> Callable[[Activation], Function]:
    """Return the row of an activation that torch.nn.functional computes without parameters."""

    def make(_layer: Activation) -> Function:
        import torch

        function: Function = getattr(torch.nn.functional, name)
        return function

    return make


def _leaky_relu(layer: Activation) -> Function:
    import torch

    return lambda x: torch.nn.functional.leaky_relu(x, layer.slope)


ACTIVATIONS: dict[str, Callable[[Activation], Function]] = {
    **{name: _named(name) for name in ("relu", "tanh", "sigmoid", "elu", "gelu", "silu", "softplus")},
    "leaky_relu": _leaky_relu,
    "linear": lambda _layer: lambda x: x,
}

LAYERS: dict[type[Layer], Callable[[Any, Put], Function]] = {
    Dense: _dense,
    LayerNorm: _layer_norm,
    Activation: _activation,
    Concat: _concat,
    Flatten: lambda _layer, _put: lambda x: x.flatten(1),
    Affine: _affine,
    Clip: _clip,
}
