"""Run PyTorch programs: CUDA graphs and training steps."""

from __future__ import annotations

import gc
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch

from ckpttool.core.errors import UnsupportedError
from ckpttool.networks.model_training import change_torch_optimizer
from ckpttool.networks.network import TRAINED, Layer, Network, look_up
from ckpttool.networks.policy_training import (
    GradientEngine,
    Learner,
    OptimizerSetup,
    TableOptimizer,
    layer_arrays,
    without_values,
)
from ckpttool.networks.torch_backend import LAYERS, as_tensor, first_line, is_out_of_memory

Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
Result = TypeVar("Result")

# During the first calls libraries load kernels and allocate workspaces, which a capture forbids.
WARM_UPS = 3
# Up to this size the copies are part of the graph. Larger arrays are uploaded in pieces of this size: during
# one transfer, the host fills the buffer of the next.
PIECE_BYTES = 1 << 20
# Buffers and graphs are kept for this many batch shapes; an evaluation uses one or two.
MOST_SHAPES = 8

# PyTorch allows one capture at a time in a process.
_capture_lock = threading.Lock()
# Graphs of one device share cuBLAS's workspace, and a policy's calls share its buffers.
_device_locks: dict[torch.device, threading.RLock] = {}
# One stream per device for all captures: cuBLAS has a workspace per stream, 32 MiB on an H100.
_streams: dict[torch.device, torch.cuda.Stream] = {}
# PyTorch's allocators keep a pointer to a graph whose capture failed.
_failed_graphs: list[torch.cuda.CUDAGraph] = []


class CudaRunner:
    """Run a function of device tensors on host arrays, with one wait per call.

    The first call of a batch shape runs kernel by kernel, without buffers; the second captures a graph, which
    later calls replay. A shape whose capture fails keeps running kernel by kernel, with a RuntimeWarning.
    Launching a small network's kernels one by one takes longer than running them; a captured graph is one
    launch (https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA Graphs"). Imported only where there is
    a GPU.
    """

    def __init__(self, run: Run, device: torch.device, *, graphs: bool) -> None:
        self._run, self._device, self._graphs = run, device, graphs
        self._lock = _device_lock(device)
        # The most recently used shape is the last; None marks a shape that has run once.
        self._shapes: dict[tuple[tuple[int, ...], ...], _ShapeBuffers | None] = {}
        self._last: tuple[tuple[int, ...], ...] = ()

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the results as arrays owned by the caller."""
        key = tuple([array.shape for array in inputs])
        with self._lock:
            shape = self._shapes.get(key)
            if shape is not None and key == self._last:
                return shape(inputs)
            return self._other(key, inputs)

    def clear(self) -> None:
        """Free the buffers and the graphs of all shapes."""
        with self._lock:
            self._shapes.clear()

    @property
    def captured_shapes(self) -> int:
        """Return the number of shapes that have a graph."""
        return sum(shape is not None and shape.graph is not None for shape in self._shapes.values())

    def _other(self, key: tuple[tuple[int, ...], ...], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        captured = key in self._shapes
        shape = self._shapes.pop(key, None)
        if not captured:
            while len(self._shapes) >= MOST_SHAPES:
                self._shapes.pop(next(iter(self._shapes)))
            results = self._once(arrays)
            self._shapes[key] = None
            return results
        if shape is None:
            shape = _ShapeBuffers(self._run, arrays, self._device)
            if self._graphs:
                shape.capture(self._pool())
        self._shapes[key] = shape
        self._last = key
        return shape(arrays)

    def _once(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with torch.inference_mode(), torch.cuda.device(self._device):
            inputs = [as_tensor(array).to(self._device) for array in arrays]
            return [result.cpu().numpy() for result in self._run(inputs)]

    def _pool(self) -> Any:
        """Return the memory pool of another shape's graph, or None if there is none.

        Sharing is safe: graphs of one policy never run at the same time; every replay writes everything it
        reads except the inputs, which are outside the pool, and copies its results to the host before it
        ends.
        """
        shapes = self._shapes.values()
        return next((shape.pool for shape in shapes if shape is not None and shape.graph is not None), None)


class _ShapeBuffers:
    """Buffers of one batch shape, and its graph."""

    def __init__(self, run: Run, inputs: Sequence[np.ndarray], device: torch.device) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.pool: Any = None
        self._run, self._device = run, device
        small = sum(array.nbytes for array in inputs) <= PIECE_BYTES
        with torch.inference_mode(), torch.cuda.device(device):
            # C order for any array order: arrays of one shape share these buffers.
            self._inputs = [
                torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name), device=device)
                for array in inputs
            ]
            kind = _BufferedUpload if small else _ChunkedUpload
            self._uploads = [kind(tensor) for tensor in self._inputs]
            self._outputs = [_allocate_pinned(tuple(t.shape), t.dtype) for t in run(self._inputs)]
        self._arrays = [output.numpy() for output in self._outputs]
        # Transfers from and to pageable memory cannot be captured.
        self._locked = all(upload.locked for upload in self._uploads) and all(map(_is_locked, self._outputs))
        self._fast = False

    def __call__(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        if self._fast and self.graph is not None:
            # No PyTorch modes or current device are needed here: host memory, one launch, one wait.
            for upload, array in zip(self._uploads, inputs, strict=True):
                upload.fill(array)
            self.graph.replay()
        else:
            self._slow(inputs)
        torch.cuda.current_stream(self._device).synchronize()
        return [array.copy() for array in self._arrays]

    def capture(self, pool: Any) -> None:
        """Capture a graph; if impossible, warn and keep running kernel by kernel."""
        if not self._locked or not all(tensor.numel() for tensor in self._inputs):
            return
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        try:
            with torch.inference_mode():
                self.graph, _ = capture_graph(self._device_part, self._device, pool=pool, warm_ups=1)
        except (UnsupportedError, RuntimeError) as error:
            # If the device itself has failed, the next kernels raise the error.
            reason = "not enough memory" if is_out_of_memory(error) else first_line(error)
            warnings.warn(f"running without a CUDA graph: {reason}", RuntimeWarning, stacklevel=4)
            traceback.clear_frames(error.__traceback__)
            return
        self.pool = pool
        self._fast = all(isinstance(upload, _BufferedUpload) for upload in self._uploads)

    def _slow(self, arrays: Sequence[np.ndarray]) -> None:
        with torch.inference_mode(), torch.cuda.device(self._device):
            for upload, array in zip(self._uploads, arrays, strict=True):
                upload.fill(array)
            if self.graph is None:
                self._device_part()
            else:
                self.graph.replay()

    def _device_part(self) -> None:
        """Launch the body of a graph: uploads of small inputs, the network, downloads of its results."""
        for upload in self._uploads:
            upload.send()
        for output, result in zip(self._outputs, self._run(self._inputs), strict=True):
            output.copy_(result, non_blocking=True)


class _BufferedUpload:
    """Copies a small array to a tensor on a device through one page-locked buffer."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._buffer = _allocate_pinned(tuple(target.shape), target.dtype)
        self._array = self._buffer.numpy()
        self.locked = _is_locked(self._buffer)

    def fill(self, array: np.ndarray) -> None:
        """Copy to the buffer, which the device no longer reads: every call waits for its end."""
        np.copyto(self._array, array)

    def send(self) -> None:
        """Launch the copy to the device."""
        self._target.copy_(self._buffer, non_blocking=True)


class _ChunkedUpload:
    """Copies a large array to a tensor on a device through two page-locked buffers in turn."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target, self._device = target.view(-1), target.device
        self._most = max(1, min(target.numel(), PIECE_BYTES // target.element_size()))
        self._buffers = [_allocate_pinned((self._most,), target.dtype) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]  # as Stream
        self.locked = all(map(_is_locked, self._buffers))

    def fill(self, array: np.ndarray) -> None:
        """Launch the copies of all pieces."""
        flat, stream = array.reshape(-1), torch.cuda.current_stream(self._device)
        for number, start in enumerate(range(0, flat.size, self._most)):
            piece = flat[start : start + self._most]
            buffer, sent = self._buffers[number % 2], self._sent[number % 2]
            sent.synchronize()  # the copy of the piece before the last; returns at once if there was none
            buffer[: piece.size].numpy()[:] = piece
            self._target[start : start + piece.size].copy_(buffer[: piece.size], non_blocking=True)
            sent.record(stream)

    def send(self) -> None:
        """Do nothing: all pieces are already in transfer."""


def _allocate_pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised host tensor, pageable if the system cannot lock more memory."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:
        return torch.empty(shape, dtype=dtype)


def _is_locked(tensor: torch.Tensor) -> bool:
    return tensor.is_pinned() or not tensor.numel()


def _device_lock(device: torch.device) -> threading.RLock:
    return _device_locks.setdefault(device, threading.RLock())


def capture_graph(
    body: Callable[[], Result], device: torch.device, *, pool: Any = None, warm_ups: int = WARM_UPS
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Return a graph that repeats the launches of `body`, and its result, overwritten by every replay.

    Raise UnsupportedError if an operation cannot be captured. Exceptions of `body` pass through; the
    device stays usable after either. The caller's current device and stream are preserved.

    Args:
        body: runs `warm_ups` times and once more for the capture; it may read no value on the host.
        device: the device.
        pool: memory pool to share with other graphs (torch.cuda.graph_pool_handle); None for a new one.
        warm_ups: calls before the capture.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with _device_lock(device), _capture_lock, torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # unannotated
        stream, here = _streams[device], torch.cuda.current_stream(device)
        stream.wait_stream(here)
        # This block restores the caller's stream; torch.cuda.graph does not if a capture fails.
        with torch.cuda.stream(stream):
            try:
                for _ in range(warm_ups):
                    body()
                graph, result = _capture_once(body, device, pool)
            finally:
                here.wait_stream(stream)
    return graph, result


def _capture_once(
    body: Callable[[], Result], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result]:
    # The steps of torch.cuda.graph, which does not report whether `body` or the end of the capture failed.
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    failure: BaseException | None = None
    # Garbage collection may free page-locked memory, which records an event on the capturing stream.
    collecting = gc.isenabled()
    gc.disable()
    try:
        # Operations of other threads neither enter the graph nor break it ("thread_local").
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = body()
        except BaseException as error:  # noqa: BLE001  # raised below, once the capture has ended
            failure = error
        graph.capture_end()
    except RuntimeError as error:
        _abort_capture(graph, device, pool)
        reason = first_line(failure or error)
        for cause in (failure, error):
            traceback.clear_frames(None if cause is None else cause.__traceback__)
        failure = None
        if is_out_of_memory(error):
            raise
    else:
        if failure is None:
            return graph, result
        try:
            raise failure
        finally:
            failure = None  # it references this frame
    finally:
        if collecting:
            gc.enable()
    raise UnsupportedError(
        f"cannot capture an operation in a CUDA graph: {reason}",
        hint="compute without reading values on the host, or build the policy with graphs=False",
    )


def _abort_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a failed capture in PyTorch's allocator; capture_end does not if cudaStreamEndCapture fails.

    Otherwise the allocator treats the capture as active for ever, and torch.cuda.empty_cache and every
    later capture fail (aten/src/ATen/cuda/CUDAGraph.cpp, c10/cuda/CUDACachingAllocator.cpp).
    """
    _failed_graphs.append(graph)
    index = torch.cuda.current_device() if device.index is None else device.index
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)  # from 2.8 on
    end = end or getattr(torch._C, "_cuda_endAllocateCurrentStreamToPool", None)
    if end is None:
        return
    try:
        end(index, pool)
    except RuntimeError:
        return  # capture_end got that far: destroying the graph releases the pool
    torch._C._cuda_releasePool(index, pool)


class NetworkModule(torch.nn.Module):
    """A network as a module: trained arrays are parameters, those of maps and statistics are buffers.

    `forward` takes the network's inputs in order (see `inputs`), or one mapping by name, and returns the
    output; of a policy with memory a tuple with the next states. Module `layers.N` computes node N, with the
    names and the orientation of torch.nn: weight [out, in]. With `drawn` the network's output is that of
    NetworkSettings "distribution", which `distribution` returns.
    """

    def __init__(self, network: Network, *, drawn: bool = False) -> None:
        super().__init__()
        pairs = zip(network.nodes, without_values(network).nodes, strict=True)
        self.layers = torch.nn.ModuleList([_LayerModule(node.layer, empty.layer) for node, empty in pairs])
        self.inputs = tuple(name for name, _ in network.inputs)
        self._sources = [node.inputs for node in network.nodes]
        self._results = [network.output, *(slot.value for slot in network.states)]
        self._drawn = drawn

    def forward(self, *inputs: Any) -> Any:
        """Return the output [batch, n], and the next states if there are any."""
        output, *states = self._run(inputs)
        output = output.chunk(3, -1)[0] if self._drawn else output
        return (output, *states) if states else output

    def distribution(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a Gaussian policy's mean, to which the noise is added, and its standard deviation."""
        if not self._drawn:
            raise UnsupportedError("the network is not a policy with a standard deviation")
        _, mean, deviation = self._run(inputs)[0].chunk(3, -1)
        return mean, deviation

    def _run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            inputs = [inputs[0][name] for name in self.inputs]
        dtype = next(chain(self.parameters(), self.buffers())).dtype
        values = [input_.to(dtype) for input_ in inputs]
        for layer, sources in zip(self.layers, self._sources, strict=True):
            values.append(layer(*[values[number] for number in sources]))
        return [values[number] for number in self._results]


class _LayerModule(torch.nn.Module):
    """One layer; what it computes is its row in the table of the backend."""

    def __init__(self, layer: Layer, empty: Layer) -> None:
        super().__init__()
        arrays, names = layer_arrays(layer), TRAINED.get(type(layer), {})
        self._names = [names.get(name, name) for name in arrays]
        left = iter(zip(self._names, arrays.values(), strict=True))

        def add(array: np.ndarray) -> torch.Tensor:
            name, (_, trained) = next(left)
            tensor = torch.tensor(array)
            if trained:
                self.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
            return tensor

        look_up(LAYERS, type(layer), "torch backend")(layer, add)
        self._layer = empty

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        # Built at every call, so that copies and moved modules compute with their own tensors.
        tensors = iter([getattr(self, name) for name in self._names])
        output: torch.Tensor = LAYERS[type(self._layer)](self._layer, lambda _: next(tensors))(*inputs)
        return output

    def extra_repr(self) -> str:
        """Return the layer's kind."""
        return type(self._layer).__name__


class TorchGradientEngine(GradientEngine):
    """A learner as PyTorch parameters on the CPU."""

    def __init__(self, learner: Learner) -> None:
        super().__init__(learner)
        self._nets = {title: NetworkModule(network) for title, network in learner.networks.items()}
        self._vectors = {
            title: torch.tensor(array, requires_grad=True) for title, array in learner.vectors.items()
        }
        self._rules = {
            name: _TorchRule(setup, [param for title in setup.titles for param in self._parameters(title)])
            for name, setup in learner.optimizers.items()
        }

    def _parameters(self, title: str) -> list[torch.Tensor]:
        return [self._vectors[title]] if title in self._vectors else [*self._nets[title].parameters()]

    def forward(self, title: str, *inputs: np.ndarray) -> np.ndarray:
        """Return a network's output [batch, n]."""
        with torch.no_grad():
            output: np.ndarray = self._nets[title](*map(torch.from_numpy, inputs)).numpy()
        return output

    def differentiate(
        self, title: str, inputs: Sequence[np.ndarray], gradient: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the gradients of a network's inputs and of its trained arrays."""
        tensors = [torch.tensor(array, requires_grad=True) for array in inputs]
        targets = [*tensors, *self._parameters(title)]
        output = self._nets[title](*tensors)
        gradients = torch.autograd.grad(output, targets, torch.tensor(gradient), materialize_grads=True)
        arrays = [tensor.numpy() for tensor in gradients]
        return arrays[: len(tensors)], [_transpose_kernel(array) for array in arrays[len(tensors) :]]

    @torch.no_grad()
    def follow(self, slow: str, fast: str, tau: float) -> None:
        """Move every weight of the target network by the fraction `tau` towards the online one."""
        for kept, value in zip(self._nets[slow].parameters(), self._nets[fast].parameters(), strict=True):
            kept.lerp_(value, tau)

    def weights(self, title: str) -> list[np.ndarray]:
        """Return copies of the trained arrays, kernels [in, out]."""
        return [_transpose_kernel(p.detach().numpy()).copy() for p in self._parameters(title)]


class _TorchRule:
    """One optimizer of torch.optim, or of the table, starting from a given state."""

    def __init__(self, setup: OptimizerSetup, parameters: list[torch.Tensor]) -> None:
        self._setup, self._count, self._parameters = setup, setup.step, parameters
        self._table = TableOptimizer(setup, torch) if setup.by_table else None
        name = "AdamW" if setup.family == "Adam" and setup.settings.get("weight_decay") else setup.family
        self._optimizer = getattr(torch.optim, name)(parameters, lr=0.01)
        change_torch_optimizer(setup.row, self._optimizer, setup.choices)
        names = {name: stored for stored, name in setup.row.torch_slots.items()}
        for number, parameter in enumerate(parameters):
            state = {
                names[slot]: torch.tensor(_transpose_kernel(arrays[number]))
                for slot, arrays in setup.slots.items()
            }
            self._optimizer.state[parameter] = {"step": torch.tensor(float(setup.step)), **state}

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        """Make one update."""
        self._count += 1
        if self._table is not None:
            weights = [_transpose_kernel(parameter.detach()) for parameter in self._parameters]
            updated = self._table.step(weights, [*map(torch.asarray, gradients)])
            for weight, value in zip(weights, updated, strict=True):
                weight.copy_(value)
            return
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = torch.tensor(_transpose_kernel(gradient))
        for group in self._optimizer.param_groups:
            if "eps" in group:
                group["eps"] = self._setup.epsilon_at(self._count, corrected=True)
        self._optimizer.step()


def _transpose_kernel(array: Any) -> Any:
    """Convert a kernel to a weight or back: all trained arrays with two axes are dense layers'."""
    return array.T if array.ndim == 2 else array
