"""Counts of what a rollout on a device copies and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ckpttool.evaluation import torch_rollout
from ckpttool.evaluation.rollout import RolloutSpec
from ckpttool.evaluation.simulators import DeviceVector
from ckpttool.evaluation.torch_rollout import STEPS_BETWEEN_LOOKS


@dataclass(frozen=True, slots=True)
class TransferCounts:
    """Copies between host and device in a part of a rollout, and the kernels or operators of a step."""

    steps: int
    looks: int
    host_reads: int
    """reads of device memory by the host"""
    uploads: int
    """copies from the host to the device"""
    launches_per_step: float
    """kernels on CUDA, operators of PyTorch on the CPU"""


def count_transfers(
    act: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
    envs: DeviceVector,
    play: RolloutSpec,
    members: int = 1,
    *,
    graphs: bool = True,
    looks: int = 2,
) -> TransferCounts:
    """Play `looks` times STEPS_BETWEEN_LOOKS steps with a look after each; count transfers and launches.

    On CUDA the profiler counts copies between host and device; on the CPU, where nothing is copied, the calls
    that would read a tensor on the host are counted. What precedes the loop (uploads, the capture of the
    graph, the first hundred steps) is left out.
    """
    with torch_rollout._gradient_mode(envs):
        envs.require_agreement(device)
        game = torch_rollout._DeviceRollout(act, device, envs, play, members)
        advance = game.advance(graphs=graphs)
        advance()
        game.look()
        steps = looks * STEPS_BETWEEN_LOOKS

        def part() -> None:
            for _ in range(looks):
                advance()
                game.look()

        if device.type != "cuda":
            with HostReadCounter() as reads, OperatorCounter() as operators:
                part()
            return TransferCounts(steps, looks, reads.count, 0, operators.count / steps)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            part()
            torch.cuda.synchronize(device)
        events = profile.events() or ()
        on_device = [e.name for e in events if str(e.device_type).endswith("CUDA")]
        to_host = sum("DtoH" in name for name in on_device)
        to_device = sum("HtoD" in name for name in on_device)
        kernels = sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)
        return TransferCounts(steps, looks, to_host, to_device, kernels / steps)


class HostReadCounter(TorchFunctionMode):
    """Counts the calls by which a program reads a tensor's values on the host."""

    READS = ("item", "tolist", "cpu", "numpy", "nonzero")
    CASTS = ("__bool__", "__int__", "__float__", "__index__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in (*self.READS, *self.CASTS)
        return func(*args, **(kwargs or {}))


class OperatorCounter(TorchDispatchMode):
    """Counts PyTorch's operators that compute, each of which is about one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        self.count += not (is_view or "empty" in func.__name__)
        return func(*args, **(kwargs or {}))
