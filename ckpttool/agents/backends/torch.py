"""The PyTorch backend: weights stay on the device, each step runs without autograd and without TF32."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

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

if TYPE_CHECKING:
    import torch

    from ckpttool.agents.envs.tensors import DeviceVector
    from ckpttool.agents.rollout import Play, Progress, Rollout

NAME = "torch"

Put = Callable[[np.ndarray], "torch.Tensor"]
Function = Callable[..., "torch.Tensor"]
Run = Callable[[Sequence["torch.Tensor"]], list["torch.Tensor"]]
OnHost = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def versions() -> dict[str, str]:
    """Return PyTorch's version, and CUDA's where PyTorch was built with it."""
    import torch

    found = {"torch": str(torch.__version__)}
    return found | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})


def build(network: Network, device: str = "cpu", *, graphs: bool = True, tf32: bool = False) -> TorchPolicy:
    """Put the network on "cpu", "cuda", "cuda:N" or "auto" (CUDA if there is any).

    On a GPU, `graphs` False launches every kernel by itself, and `tf32` lets float32 products round their
    factors to 10 bits.
    """
    return TorchPolicy(network, _place(device), graphs=graphs, tf32=tf32)


def learn(learner: Learner) -> Engine:
    """Return the learner in training on the CPU: gradients by autograd, steps by torch.optim."""
    from ckpttool.agents.backends.torch_training import TorchEngine

    return TorchEngine(learner)


class TorchPolicy:
    """A network as closures over tensors that live on one device."""

    def __init__(
        self, network: Network, place: torch.device, *, graphs: bool = True, tf32: bool = False
    ) -> None:
        self.device = str(place)
        self._graphs = graphs
        self._feeds = Feeds(network)
        self._run = assemble(network, _lowering(place))
        self._precision = "high" if tf32 else "highest"
        self._on_host = _on_cuda(self._run, place, graphs) if place.type == "cuda" else _on_cpu(self._run)

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state, both in the host's memory."""
        import torch

        given = self._feeds(obs, state)
        with torch.inference_mode(), _products(self._precision):
            action, *after = self._on_host(given)
        return self._feeds.joined(action), tuple(after)

    def act(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the output [batch, n] for observations [batch, obs_dim], both on the policy's device.

        For networks of one input and without a state; nothing waits for the device.
        """
        import torch

        given = obs.to(getattr(torch, self._feeds.dtype.name))
        members = self._feeds.members
        with torch.inference_mode(), _products(self._precision):
            found = self._run([given if members == 1 else given.reshape(members, -1, given.shape[-1])])[0]
        return found if members == 1 else found.reshape(-1, found.shape[-1])

    def play(self, envs: DeviceVector, play: Play, members: int, progress: Progress) -> tuple[Rollout, ...]:
        """Play a tensor program on the policy's device; see agents.rollout.rollouts.

        On the CPU with one thread: a step is many small pieces, and on busy cores threads that wait for
        each other at every piece made it twenty times slower.
        """
        import torch

        from ckpttool.agents.backends.torch_rollout import play_all

        place = torch.device(self.device)
        with self.threads(1):
            return play_all(self.act, place, envs, play, members, progress, graphs=self._graphs)

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
        why = "no CUDA device is seen" if torch.version.cuda else "this PyTorch was built without CUDA"
        raise UsageError(
            f"torch {torch.__version__} has no device {device!r} here",
            hint=f"there are {', '.join(offered)}" + ("" if count else f"; {why}"),
        )
    return torch.device(offered[device])


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Multiply float32 in that precision ("highest": no TF32, no bfloat16); restore the caller's setting."""
    import torch

    before = torch.get_float32_matmul_precision()
    if before == precision:
        yield
        return
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _on_cuda(run: Run, place: torch.device, graphs: bool) -> OnHost:
    from ckpttool.agents.backends.torch_cuda import CudaRun

    return CudaRun(run, place, graphs=graphs)


def _on_cpu(run: Run) -> OnHost:
    return lambda given: [value.numpy() for value in run([_share(array) for array in given])]


def _share(array: np.ndarray) -> torch.Tensor:
    import torch

    # PyTorch warns about memory that it may not write, and refuses negative strides.
    whole = np.ascontiguousarray(array)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy())


def _lowering(place: torch.device) -> Callable[[Layer], Function]:
    import torch

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array.astype(array.dtype.newbyteorder("=")), device=place)

    return lambda layer: choose(LAYERS, type(layer), "torch backend")(layer, put)


def _dense(layer: Dense, put: Put) -> Function:
    import torch

    if layer.kernel.ndim == 3:
        return _dense_stacked(layer, put)
    weight = put(layer.kernel.T)
    bias = None if layer.bias is None else put(layer.bias)
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _dense_stacked(layer: Dense, put: Put) -> Function:
    import torch

    kernel = put(layer.kernel)
    if layer.bias is None:
        return lambda x: torch.bmm(x, kernel)
    bias = put(layer.bias)
    return lambda x: torch.baddbmm(bias, x, kernel)


def _layer_norm(layer: LayerNorm, put: Put) -> Function:
    import torch

    scale, offset = put(layer.scale), put(layer.offset)
    if scale.ndim == 3:
        size = scale.shape[-1:]
        return lambda x: torch.nn.functional.layer_norm(x, size, eps=layer.epsilon) * scale + offset
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


def _convolution(layer: Convolution, put: Put) -> Function:
    import torch

    weight = put(layer.kernel.transpose(3, 2, 0, 1))
    bias = None if layer.bias is None else put(layer.bias)
    (above, below), (left, right) = layer.padding

    def convolution(x: torch.Tensor) -> torch.Tensor:
        first = torch.nn.functional.pad(x.permute(0, 3, 1, 2), (left, right, above, below))
        # cuDNN has switches of its own: for TF32, and for kernels that add in any order.
        with torch.backends.cudnn.flags(allow_tf32=False, deterministic=True):
            found = torch.nn.functional.conv2d(first, weight, bias, layer.strides)
        return found.permute(0, 2, 3, 1)

    return convolution


def _transpose(layer: Transpose, _put: Put) -> Function:
    axes = (0, *(axis + 1 for axis in layer.axes))
    return lambda x: x.permute(axes)


def _all_by(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Put], Function]:
    """Return the row of a layer that joins its inputs two by two."""
    return lambda _layer, _put: lambda *xs: reduce(operation, xs)


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
    Transpose: _transpose,
    Slice: lambda layer, _put: lambda x: x[..., layer.start : layer.stop],
    Add: _all_by(operator.add),
    Multiply: _all_by(operator.mul),
    Convolution: _convolution,
}
