"""Compute networks with PyTorch."""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.core import deferred, kinds
from ckpttool.core.deferred import DeferredModule
from ckpttool.core.errors import DeviceError, UsageError
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
    LayerNorm,
    Network,
    Observation,
    Repeat,
    Slice,
    Softmax,
    State,
    assemble,
    is_chain,
    look_up,
    value_shapes,
)
from ckpttool.networks.policy_training import GradientEngine, Learner

if TYPE_CHECKING:
    import torch
else:
    torch = DeferredModule("torch")


# Lower-case texts of cudaGetErrorString and of PyTorch's checks; unchanged from CUDA 11 to 13.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "status_alloc_failed")
_BUSY = ("busy or unavailable", "exclusive-process", "compute mode")
_NO_CODE = ("no kernel image is available", "device kernel image is invalid", "ptx was compiled")
_OLD_DRIVER = ("driver on your system is too old", "driver version is insufficient")
_NO_DRIVER = ("found no nvidia driver", "driver shutting down", "initialization error", "unknown error")
_NO_DEVICE = ("no cuda gpus are available", "no cuda-capable device")
_BROKEN = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "launch timed out",
    "uncorrectable",
    "unrecoverable",
    "hardware stack error",
    "fallen off the bus",
)
_CUDA = deferred.compile(
    r"^(cuda|cudnn|cublas|cusolver|nvrtc)\b.*error|cu(blas|dnn)_status|cuda error", re.IGNORECASE
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its prefix and control characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^(CUDA|CUDA driver) error: ", "", lines[0])
    return "".join(c if c.isprintable() else " " for c in text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator, of the device or of the host, ran out of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def device_error(error: BaseException, device: str) -> DeviceError | None:
    """Return the DeviceError for an error of a device; None for any other error.

    PyTorch raises torch.AcceleratorError from 2.8 on and RuntimeError before, both with CUDA's text.
    """
    if isinstance(error, DeviceError):
        return error
    text = str(error).lower()

    def has(words: tuple[str, ...]) -> bool:
        return any(word in text for word in words)

    if is_out_of_memory(error):
        return DeviceError(f"{device} is out of memory", hint="use fewer rows (--num-envs N)")
    if not (_CUDA.search(str(error)) or has((*_OLD_DRIVER, *_NO_DRIVER[:1], *_NO_DEVICE))):
        return None
    if has(_BUSY):
        return DeviceError(
            f"{device} is busy or unavailable",
            hint="end the process that holds it exclusively (see nvidia-smi), or use --device cpu",
        )
    if has(_NO_CODE):
        return DeviceError(
            f"this PyTorch build has no code for {_device_capability(device)}",
            found=_built_architectures(),
            hint="use --device cpu",
        )
    if reason := missing_device_reason(error):
        return DeviceError(f"cannot use {device}: {reason}", hint="use --device cpu")
    if has(_BROKEN):
        return DeviceError(
            f"{device} failed: {first_line(error)}",
            hint="restart the program: this process can no longer use the GPU",
        )
    return DeviceError(f"{device} failed: {first_line(error)}", hint="use --device cpu")


def missing_device_reason(error: BaseException) -> str | None:
    """Return why CUDA offers no device, from the error of torch.cuda.init; None for another error."""
    text = str(error).lower()
    if any(words in text for words in _OLD_DRIVER):
        version = re.search(r"found version (\d+)", text)
        supported = (
            f" (it supports CUDA {int(version[1]) // 1000}.{int(version[1]) % 1000 // 10})" if version else ""
        )
        return f"the NVIDIA driver is too old for this PyTorch{supported}"
    if any(words in text for words in _NO_DEVICE):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "no GPU found" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    if any(words in text for words in _NO_DRIVER):
        return "no NVIDIA driver found" if "found no" in text else first_line(error)
    return None


def _device_capability(device: str) -> str:
    try:
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    except (RuntimeError, AssertionError, ValueError):
        return device


def _built_architectures() -> str | None:
    return " ".join(torch.cuda.get_arch_list()) or None


def free_bytes(device: torch.device) -> int:
    """Return how much memory the device, or this process on the CPU, can still allocate."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free) + max(0, int(reusable))
    return _free_host_bytes()


def _free_host_bytes() -> int:
    import resource

    pages = os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as lines:
            free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        with open("/proc/self/statm") as sizes:
            used = int(sizes.read().split()[0]) * pages
    except (OSError, StopIteration):
        free, used = os.sysconf("SC_PHYS_PAGES") * pages, 0
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return free if limit == resource.RLIM_INFINITY else max(0, min(free, limit - used))


NAME = "torch"
_OWNER = "torch backend"

Run = Callable[[Sequence["torch.Tensor"]], list["torch.Tensor"]]
OnHost = Callable[[Sequence[np.ndarray]], list[np.ndarray]]


def versions() -> dict[str, str]:
    """Return the versions of PyTorch and, if it was built with CUDA, of CUDA."""
    names = {"torch": str(torch.__version__)}
    return names | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})


def build(network: Network, device: str = "cpu", *, graphs: bool = True, tf32: bool = False) -> TorchPolicy:
    """Put the network on "cpu", "cuda", "cuda:N" or "auto" (CUDA if there is any).

    On a GPU, `graphs` False launches every kernel separately, and `tf32` lets float32 products round
    their factors to 10 bits. PyTorch's precision settings are global to the process: while a step runs,
    they also apply to the caller's other threads.
    """
    return TorchPolicy(network, device_of(device), graphs=graphs, tf32=tf32)


def learn(learner: Learner) -> GradientEngine:
    """Return a Gaussian policy's learner for training on the CPU."""
    from ckpttool.networks.torch_programs import TorchGradientEngine

    return TorchGradientEngine(learner)


def module(network: Network, *, drawn: bool = False) -> Any:
    """Return a network as a torch.nn.Module that can be trained; see torch_programs.NetworkModule."""
    from ckpttool.networks.torch_programs import NetworkModule

    return NetworkModule(network, drawn=drawn)


class TorchPolicy:
    """A network as closures over tensors that live on one device."""

    def __init__(
        self, network: Network, device: torch.device, *, graphs: bool = True, tf32: bool = False
    ) -> None:
        self.device = str(device)
        self.torch_device, self.graphs = device, graphs
        self.inputs = InputAdapter(network)
        convolutions = any(isinstance(node.layer, Convolution) for node in network.nodes)
        self._products = Float32Precision(device.type, tf32=tf32, convolutions=convolutions)
        try:
            self._run = _with_precision(assemble(network, _layer_lowering(device)), self._products)
            self._on_host = (
                _on_cuda(self._run, device, graphs) if device.type == "cuda" else _on_cpu(self._run)
            )
        except (RuntimeError, MemoryError) as error:
            failure = self.device_failure(error)
            if is_out_of_memory(error):
                failure.message += " for the network's weights"
                failure.hint = "free memory, or use --device cpu"
        else:
            self._row_bytes = _row_bytes(network)
            return
        raise failure

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state, both in host memory."""
        inputs = self.inputs(obs, state)
        try:
            action, *after = self._on_host(inputs)
        except (RuntimeError, MemoryError) as error:
            failure = self.device_failure(error)
        else:
            return self.inputs.joined(action), tuple(after)
        action, *after = self._again(inputs, failure)
        return self.inputs.joined(action), tuple(after)

    def act(self, obs: torch.Tensor, *noise: torch.Tensor) -> torch.Tensor:
        """Return the output [batch, n] for observations [batch, obs_dim], both on the policy's device.

        For networks with one input, and NOISE if they draw actions, without state; the call does not wait for
        the device.
        """
        inputs = [array.to(getattr(torch, self.inputs.dtype.name)) for array in (obs, *noise)]
        members = self.inputs.members
        if members > 1:
            inputs = [tensor.reshape(members, -1, tensor.shape[-1]) for tensor in inputs]
        actions = self._run(inputs)[0]
        return actions if members == 1 else actions.reshape(-1, actions.shape[-1])

    def product_bits(self) -> int:
        """Measure the fraction bits that float32 products on the device keep of their factors.

        23: all; 10: TF32; 7: bfloat16.
        """
        # 256 rows of every width from 1 to 23 bits are enough for tensor cores; one times a row is the row.
        bits = torch.arange(256) % 23 + 1
        rows = (1 + torch.exp2(-bits.float()))[:, None].expand(256, 256).contiguous().to(self.torch_device)
        products = _with_precision(lambda factors: [factors[0] @ factors[1]], self._products)
        kept = (products([rows, torch.eye(256, device=self.torch_device)])[0] == rows).all(1).cpu()
        return int(next((bit - 1 for bit, exact in zip(bits[:23], kept[:23], strict=True) if not exact), 23))

    def device_failure(self, error: Exception) -> DeviceError:
        """Return the DeviceError that explains an error; raise the error itself if it is unrelated.

        This frees the memory of the failed call: its frames and tensors live as long as the error.
        """
        failure = device_error(error, self.device)
        if failure is None:
            raise error
        traceback.clear_frames(error.__traceback__)
        if is_out_of_memory(error):
            with suppress(RuntimeError):
                failure.found = f"{free_bytes(self.torch_device) / 2**20:,.0f} MiB free"
        return failure

    def _again(self, arrays: Sequence[np.ndarray], failure: DeviceError) -> list[np.ndarray]:
        """Return the step's results, retried once without the memory of other batch shapes.

        Otherwise raise the error, with the number of rows that fit.
        """
        if not is_out_of_memory(failure):
            raise failure
        rows = arrays[0].shape[0] * (arrays[0].shape[1] if self.inputs.members > 1 else 1)
        if self.torch_device.type == "cuda":
            self._on_host.clear()  # type: ignore[attr-defined]  # a CudaRun
            torch.cuda.empty_cache()
            try:
                return self._on_host(arrays)
            except (RuntimeError, MemoryError) as error:
                failure = self.device_failure(error)
            torch.cuda.empty_cache()
        most = self.fitting_rows(rows)
        failure.message += f" for {rows:,} rows"
        failure.expected = f"at most {most:,} rows" if most else None
        failure.hint = (
            f"use --num-envs {most // self.inputs.members}" if most else "free memory, or use --device cpu"
        )
        raise failure

    def fitting_rows(self, rows: int) -> int:
        """Return the largest number of rows, at most `rows` and a multiple of the members, that fits now.

        On a GPU it is measured: halving until a step succeeds, then four steps of bisection. On the CPU it
        is estimated from the free memory, because a system that overcommits memory kills the process.
        """
        members = self.inputs.members
        most = rows // members
        if self.torch_device.type != "cuda":
            return members * min(most // 2, free_bytes(self.torch_device) // 2 // self._row_bytes // members)
        low, high = 0, most
        while low == 0 and high > 1:
            middle = high // 2
            low, high = (middle, high) if self._fits(middle) else (0, middle)
        for _ in range(4):
            middle = (low + high) // 2
            if low < middle < high:
                low, high = (middle, high) if self._fits(middle) else (low, middle)
        return members * low

    def _fits(self, rows: int) -> bool:
        """Return whether a step of that many rows per member succeeds."""
        members = () if self.inputs.members == 1 else (self.inputs.members,)
        dtype = getattr(torch, self.inputs.dtype.name)
        fits = True
        try:
            with torch.inference_mode():
                inputs = [
                    torch.zeros((*members, rows, *shape), dtype=dtype, device=self.torch_device)
                    for shape in self.inputs.shapes
                ]
                self._run(inputs)
                torch.cuda.synchronize(self.torch_device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            fits = False
        inputs = []
        torch.cuda.empty_cache()
        return fits

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Limit the number of threads in the block.

        PyTorch's idle OpenMP threads spin, which halves the speed of an environment on the same cores.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def device_of(device: str) -> torch.device:
    """Return the device "cpu", "cuda", "cuda:N" or "auto"; raise UsageError if it does not exist."""
    with warnings.catch_warnings():
        # PyTorch warns about a driver that is too old, and about CUDA_VISIBLE_DEVICES; our error has both.
        warnings.simplefilter("ignore")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    offered = {"cpu": "cpu", "auto": "cuda:0" if count else "cpu"}
    offered |= {"cuda": "cuda:0"} if count else {}
    offered |= {f"cuda:{n}": f"cuda:{n}" for n in range(count)}
    if device not in offered:
        raise UsageError(
            f"device {device!r} is not available to torch {torch.__version__}",
            hint=f"available devices: {', '.join(offered)}"
            + ("" if count else f"; {_missing_cuda_reason()}"),
        )
    return torch.device(offered[device])


def _missing_cuda_reason() -> str:
    if not torch.version.cuda:
        return "this PyTorch was built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}, which hides every GPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return missing_device_reason(error) or "no CUDA device is available"
    return "no CUDA device is available"


class Float32Precision:
    """Set how float32 matrix products and convolutions are computed on a device; restore it afterwards.

    Without TF32 and bfloat16; GPU convolutions use cuDNN's deterministic algorithms. PyTorch has two
    sets of settings since 2.9, raises errors if they disagree, and warns if the older one is read.
    """

    def __init__(self, kind: str, *, tf32: bool = False, convolutions: bool = True) -> None:
        self._tf32 = tf32 and kind == "cuda"
        self._cudnn = convolutions and kind == "cuda"
        backend = "cuda" if kind == "cuda" else "mkldnn"
        self._requested = {(backend, "matmul"): "tf32" if self._tf32 else "ieee"}
        if convolutions:
            self._requested[backend, "conv"] = "ieee"

    def in_force(self) -> bool:
        """Return whether PyTorch's current settings already match."""
        if self._cudnn and (not torch.backends.cudnn.deterministic or torch.backends.cudnn.benchmark):
            return False
        return hasattr(torch._C, "_get_fp32_precision_getter") and not self._unlike()

    def _unlike(self) -> dict[tuple[str, str], str]:
        """Return the settings to change, from PyTorch 2.9 on."""
        get = torch._C._get_fp32_precision_getter
        # "none" inherits from settings that are "none" themselves: full precision.
        return {
            key: value
            for key, value in self._requested.items()
            if (now := get(*key)) != value and (value, now) != ("ieee", "none")
        }

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Enforce the settings inside the block."""
        cudnn = torch.backends.cudnn
        # Not torch.backends.cudnn.flags, which disables cuDNN by default and reads the older settings.
        before = cudnn.deterministic, cudnn.benchmark
        new = hasattr(torch._C, "_get_fp32_precision_getter")
        with _set_precisions(self._unlike()) if new else self._old():
            try:
                if self._cudnn:
                    cudnn.deterministic, cudnn.benchmark = True, False
                yield
            finally:
                if self._cudnn:
                    cudnn.deterministic, cudnn.benchmark = before

    @contextmanager
    def _old(self) -> Iterator[None]:
        """Enforce the settings in PyTorch before 2.9."""
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        torch.set_float32_matmul_precision("high" if self._tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before[0])
            torch.backends.cudnn.allow_tf32 = before[1]


@contextmanager
def _set_precisions(precisions: Mapping[tuple[str, str], str]) -> Iterator[None]:
    put = torch._C._set_fp32_precision_setter
    before = _read_precisions()
    for key, value in precisions.items():
        put(*key, value)
    products = [value for (_, operation), value in precisions.items() if operation == "matmul"]
    legacy = None
    if products:
        # The older setting must agree with the new one: parts of PyTorch compare them.
        legacy = _swap_legacy("high" if "tf32" in products else "highest")
        for key, value in precisions.items():
            put(*key, value)
    try:
        yield
    finally:
        if legacy is not None:
            _swap_legacy(legacy)
        for key, value in before.items():
            put(*key, value)


def _read_precisions() -> dict[tuple[str, str], str]:
    """Return the settings of single operations, "none" if inherited; reading one resolves that."""
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    above = dict.fromkeys((("generic", "all"), ("cuda", "all"), ("mkldnn", "all")), "none")
    try:
        for key in above:
            above[key] = get(*key)
            put(*key, "none")
        return {
            (backend, op): get(backend, op) for backend in ("cuda", "mkldnn") for op in ("matmul", "conv")
        }
    finally:
        for key, value in above.items():
            put(*key, value)


def _swap_legacy(precision: str) -> str | None:
    """Set the older setting of matrix products; return its value, None if no restore is needed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 to 2.12: "please use the new API"
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:
            return None  # the caller uses the new settings, which the older one cannot express
        if before == precision:
            return None
        torch.set_float32_matmul_precision(precision)
    return before


def _with_precision(run: Run, products: Float32Precision) -> Run:
    """Return the function computed without autograd and with the selected product settings."""

    def exact(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with torch.inference_mode():
            if products.in_force():
                return run(inputs)
            with products():
                return run(inputs)

    return exact


def _row_bytes(network: Network) -> int:
    """Return the memory of one row's values at the widest point of the network."""
    widths = [int(np.prod(shape, dtype=np.int64)) for shape in value_shapes(network)]
    pairs = [before + after for before, after in pairwise(widths)] or widths
    itemsize = InputAdapter(network).dtype.itemsize
    return max(1, (max(pairs) if is_chain(network) else sum(widths)) * itemsize)


def _on_cuda(run: Run, device: torch.device, graphs: bool) -> OnHost:
    from ckpttool.networks.torch_programs import CudaRunner

    return CudaRunner(run, device, graphs=graphs)


def _on_cpu(run: Run) -> OnHost:
    return lambda tensors: [value.numpy() for value in run([as_tensor(array) for array in tensors])]


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the array's memory if PyTorch allows it, else a C-order copy."""
    # PyTorch warns about read-only memory, and refuses negative strides.
    whole = np.ascontiguousarray(array)
    return torch.from_numpy(whole if whole.flags.writeable else whole.copy())


def _layer_lowering(device: torch.device) -> Callable[[Layer], Function]:
    def put(array: np.ndarray) -> torch.Tensor:
        return torch.tensor(array.astype(array.dtype.newbyteorder("=")), device=device)

    return lambda layer: look_up(LAYERS, type(layer), _OWNER)(layer, put)


def _dense(layer: Dense, put: Put) -> Function:
    if layer.kernel.ndim == 3:
        return _dense_stacked(layer, put)
    weight = put(layer.kernel.T)
    bias = None if layer.bias is None else put(layer.bias)
    return lambda x: torch.nn.functional.linear(x, weight, bias)


def _dense_stacked(layer: Dense, put: Put) -> Function:
    kernel = put(layer.kernel)
    if layer.bias is None:
        return lambda x: torch.bmm(x, kernel)
    bias = put(layer.bias)
    return lambda x: torch.baddbmm(bias, x, kernel)


def _layer_norm(layer: LayerNorm, put: Put) -> Function:
    scale, offset = put(layer.scale), put(layer.offset)
    if scale.ndim == 3:
        size = scale.shape[-1:]
        return lambda x: torch.nn.functional.layer_norm(x, size, eps=layer.epsilon) * scale + offset
    return lambda x: torch.nn.functional.layer_norm(x, scale.shape, scale, offset, layer.epsilon)


def _constant_row(layer: ConstantRow, put: Put) -> Function:
    row = put(layer.row)
    return lambda x: row.expand(*x.shape[:-1], row.shape[-1])


def _convolution(layer: Convolution, put: Put) -> Function:
    weight = put(layer.kernel.transpose(3, 2, 0, 1))
    bias = None if layer.bias is None else put(layer.bias)
    (above, below), (left, right) = layer.padding

    def convolution(x: torch.Tensor) -> torch.Tensor:
        first = torch.nn.functional.pad(x.permute(0, 3, 1, 2), (left, right, above, below))
        return torch.nn.functional.conv2d(first, weight, bias, layer.strides).permute(0, 2, 3, 1)

    return convolution


# The names are those of torch.nn.functional.
ACTIVATIONS: dict[str, Callable[[Activation], Function]] = {
    **dict.fromkeys(kinds.ACTIVATIONS, lambda layer: getattr(torch.nn.functional, layer.name)),
    "leaky_relu": lambda layer: lambda x: torch.nn.functional.leaky_relu(x, layer.slope),
    "linear": lambda _layer: lambda x: x,
}


def _atom_mean(layer: AtomMean, put: Put) -> Function:
    support = put(layer.support[..., None, :])
    shape, limit = (-1, support.shape[-1]), layer.limit
    if limit:
        return lambda x: (x.unflatten(-1, shape).softmax(-1).clamp(min=limit) * support).sum(-1)
    return lambda x: (x.unflatten(-1, shape).softmax(-1) * support).sum(-1)


def _cosines(layer: Cosines, _put: Put) -> Function:
    def cosines(x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(1, layer.number + 1, dtype=x.dtype, device=x.device)
        return torch.cos(x.unsqueeze(-1) * (torch.pi * steps))

    return cosines


def _repeat(layer: Repeat, _put: Put) -> Function:
    return lambda x: x.unsqueeze(1).expand(-1, layer.count, *x.shape[1:])


def _arg_max(layer: ArgMax, _put: Put) -> Function:
    def arg_max(x: torch.Tensor) -> torch.Tensor:
        parts = zip(torch.split(x, list(layer.counts), -1), layer.starts, strict=True)
        return torch.stack([part.argmax(-1) + start for part, start in parts], -1).to(x.dtype)

    return arg_max


LAYERS: dict[type[Layer], Row] = {
    **common_layers(
        torch,
        _OWNER,
        ACTIVATIONS,
        concat=lambda xs: torch.cat(xs, dim=-1),
        mean=lambda x, axis: x.mean(axis),
        split=lambda x, shape: x.unflatten(-1, shape),
        reorder=lambda x, axes: x.permute(axes),
    ),
    Dense: _dense,
    ConstantRow: _constant_row,
    LayerNorm: _layer_norm,
    # Python indexing of a tensor takes the guard of its device, narrow does not.
    Slice: lambda layer, _: lambda x: x.narrow(-1, layer.start, layer.stop - layer.start),
    Flatten: lambda _layer, _put: lambda x: x.flatten(1),
    Convolution: _convolution,
    AtomMean: _atom_mean,
    Softmax: lambda _layer, _put: lambda x: x.softmax(-1),
    Cosines: _cosines,
    Repeat: _repeat,
    ArgMax: _arg_max,
}
