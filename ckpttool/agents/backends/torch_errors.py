"""Errors of PyTorch and CUDA for devices that cannot be used or lack memory, as one sentence each."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from ckpttool.errors import DeviceError

if TYPE_CHECKING:
    import torch

# Texts of cudaGetErrorString and of PyTorch's checks, in lower case; they stayed the same from CUDA 11 to 13.
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
_CUDA = re.compile(
    r"^(cuda|cudnn|cublas|cusolver|nvrtc)\b.*error|cu(blas|dnn)_status|cuda error", re.IGNORECASE
)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without its prefix and control characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = re.sub(r"^(CUDA|CUDA driver) error: ", "", lines[0])
    return "".join(c if c.isprintable() else " " for c in text)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator, of the device or of the host, refused memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY)


def device_error(error: BaseException, device: str) -> DeviceError | None:
    """Return the sentence for an error of a device; None for any other error.

    PyTorch raises torch.AcceleratorError from 2.8 on and RuntimeError before, both with CUDA's text.
    """
    if isinstance(error, DeviceError):
        return error
    text = str(error).lower()

    def has(words: tuple[str, ...]) -> bool:
        return any(each in text for each in words)

    if is_out_of_memory(error):
        return DeviceError(f"{device} is out of memory", hint="use fewer rows (--num-envs N)")
    if not (_CUDA.search(str(error)) or has((*_OLD_DRIVER, *_NO_DRIVER[:1], *_NO_DEVICE))):
        return None
    if has(_BUSY):
        return DeviceError(
            f"{device} is busy or unavailable",
            hint="another process holds it exclusively (nvidia-smi lists them), or use --device cpu",
        )
    if has(_NO_CODE):
        return DeviceError(
            f"this PyTorch has no code for {_capability(device)}", found=_built_for(), hint="use --device cpu"
        )
    if reason := missing_device(error):
        return DeviceError(f"{device} cannot be used: {reason}", hint="use --device cpu")
    if has(_BROKEN):
        return DeviceError(
            f"{device} failed: {first_line(error)}",
            hint="restart the program: this process cannot use the GPU any more",
        )
    return DeviceError(f"{device} failed: {first_line(error)}", hint="use --device cpu")


def missing_device(error: BaseException) -> str | None:
    """Return why CUDA offers no device at all, from the error of torch.cuda.init; None for another error."""
    text = str(error).lower()
    if any(words in text for words in _OLD_DRIVER):
        version = re.search(r"found version (\d+)", text)
        supported = (
            f" (it supports CUDA {int(version[1]) // 1000}.{int(version[1]) % 1000 // 10})" if version else ""
        )
        return f"the NVIDIA driver is too old for this PyTorch{supported}"
    if any(words in text for words in _NO_DEVICE):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return "there is no GPU" if visible is None else f"CUDA_VISIBLE_DEVICES is {visible!r}"
    if any(words in text for words in _NO_DRIVER):
        return "there is no NVIDIA driver" if "found no" in text else first_line(error)
    return None


def _capability(device: str) -> str:
    import torch

    try:
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    except (RuntimeError, AssertionError, ValueError):
        return device


def _built_for() -> str | None:
    import torch

    return " ".join(torch.cuda.get_arch_list()) or None


def free_bytes(place: torch.device) -> int:
    """Return how much memory the device, or this process on the CPU, can still allocate."""
    import torch

    if place.type == "cuda":
        free, _ = torch.cuda.mem_get_info(place)
        reusable = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
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
