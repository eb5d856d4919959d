"""The device: what it is, and what it can do at best (launches, copies, products, memory)."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Absent, Check, Context, Figure, Part, float32_products, require

# One round of calls lasts at least this long, so that the clock's own time does not count.
ROUND_S = 2e-3
LIBRARIES = (
    *("numpy", "torch", "gymnasium", "mujoco", "tensorflow", "jax", "onnxruntime", "pytest", "hypothesis"),
    *("matplotlib",),
)
# Compute capability of Hopper: the goals are for this class of devices and later ones.
HOPPER = (9, 0)

Seconds = dict[str, list[float]]


def in_turn(
    calls: Mapping[str, Callable[[], object]],
    wait: Callable[[], None],
    budget_s: float,
    rounds: int = 15,
) -> Seconds:
    """Return seconds per call, round by round, each way in turn; `wait` returns when the device is idle.

    A round of one way is as many calls as fill ROUND_S, and one wait. There are at least three rounds, and
    no more than about `budget_s` for each way.
    """
    counts, spent = {}, 0.0
    for name, call in calls.items():
        call()
        wait()
        call()
        wait()
        start = time.perf_counter()
        call()
        wait()
        once = max(time.perf_counter() - start, 1e-7)
        counts[name] = max(1, int(ROUND_S / once))
        spent += once * counts[name]
    fitting = int(budget_s * len(calls) / spent)
    seconds: Seconds = {name: [] for name in calls}
    for _ in range(max(3, min(rounds, fitting))):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            wait()
            seconds[name].append((time.perf_counter() - start) / counts[name])
    return seconds


def ratio(slower: Sequence[float], faster: Sequence[float]) -> float:
    """Return the median of the ratios round by round: what drifts with the machine cancels."""
    return statistics.median(a / b for a, b in zip(slower, faster, strict=True))


def facts(context: Context) -> dict[str, Any]:
    """Return what the device and its software are; nothing names the machine or its user."""
    require("torch")
    import torch

    if context.cuda and not 0 <= (context.workspace.index or 0) < torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise Absent(
            f"PyTorch {torch.__version__} has no device {context.device!r}: it finds {count} CUDA devices; "
            "--device cpu runs the same on the CPU (make gpu GPU_ARGS='--device cpu')"
        )
    versions, absent = {}, {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent[name] = "not installed"
    if "tensorflow" in absent and (other := _version("tensorflow-cpu")):
        versions["tensorflow"] = absent.pop("tensorflow") and f"{other} (CPU)"
    versions["python"] = platform.python_version()
    device: dict[str, Any] = {
        "kind": "cuda" if context.cuda else "cpu",
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "driver": _driver(),
    }
    if context.cuda:
        properties = torch.cuda.get_device_properties(context.workspace)
        versions["cuda"] = str(torch.version.cuda)
        device |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
            "devices": torch.cuda.device_count(),
            "hopper": (properties.major, properties.minor) >= HOPPER,
        }
    else:
        device |= {"name": _processor(), "hopper": False, "threads": torch.get_num_threads()}
    if shutil.which("compute-sanitizer") is None:
        absent["compute-sanitizer"] = "not installed"
    return {"device": device, "versions": versions, "absent": absent}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        match = re.search(
            r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text("utf-8")
        )
    except OSError:
        return None
    return match[1] if match else None


def launches(context: Context) -> list[Check | Figure]:
    """Measure one kernel on one number: in a queue, waited for, and as a captured graph."""
    require("torch")
    import torch

    one = torch.zeros(1, device=context.workspace)

    def waited() -> None:
        one.zero_()
        context.wait()

    calls = {"kernel launches in a queue": lambda: one.zero_(), "kernel launch and wait": waited}
    if context.cuda:
        graph = torch.cuda.CUDAGraph()
        context.wait()
        with torch.cuda.graph(graph):
            one.zero_()

        def replayed() -> None:
            graph.replay()
            context.wait()

        calls |= {"graph launches in a queue": graph.replay, "graph launch and wait": replayed}
    with torch.inference_mode():
        times = in_turn(calls, context.wait, context.budget_s)
    return [Figure(name, 1e6 * statistics.median(durations), "us") for name, durations in times.items()]


def copies(context: Context) -> list[Check | Figure]:
    """Measure copies between host and device from page-locked memory: one observation, and 64 MiB."""
    require("torch")
    import torch

    figures: list[Check | Figure] = []
    for size in (68, (16 if context.quick else 64) << 20):
        room = torch.empty(size, dtype=torch.uint8, pin_memory=context.cuda)
        there = torch.empty(size, dtype=torch.uint8, device=context.workspace)

        def both(room: Any = room, there: Any = there) -> None:
            there.copy_(room, non_blocking=True)
            room.copy_(there, non_blocking=True)
            context.wait()

        calls = {
            "up": lambda room=room, there=there: there.copy_(room, non_blocking=True),
            "down": lambda room=room, there=there: room.copy_(there, non_blocking=True),
            "up and down, waited for": both,
        }
        times = in_turn(calls, context.wait, context.budget_s)
        for way, durations in times.items():
            middle, settings = statistics.median(durations), {"bytes": size}
            if size < 1024:
                figures.append(Figure(f"copy {way}", 1e6 * middle, "us", settings))
            elif way != "up and down, waited for":
                figures.append(Figure(f"copy {way}", size / middle / 1e9, "GB/s", settings))
    return figures


def products(context: Context) -> list[Check | Figure]:
    """Measure float32 products without TF32: a batch of rows times the square of a hidden layer."""
    require("torch")
    import torch

    figures: list[Check | Figure] = []
    for rows in (1, 1024, 2048 if context.quick else 16384):
        for units in (256, 1024):
            x, kernel = (torch.randn(n, units, device=context.workspace) for n in (rows, units))
            out = torch.empty(rows, units, device=context.workspace)
            with torch.inference_mode(), float32_products("ieee"):
                times = in_turn(
                    {"mm": lambda x=x, kernel=kernel, out=out: torch.mm(x, kernel, out=out)},
                    context.wait,
                    context.budget_s,
                )
            rate = 2 * rows * units * units / statistics.median(times["mm"])
            figures.append(Figure("float32 product", rate / 1e9, "GFLOP/s", {"rows": rows, "units": units}))
    return figures


def memory(context: Context) -> list[Check | Figure]:
    """Measure the bandwidth of the device's memory: bytes read and written by a copy within it."""
    require("torch")
    import torch

    size = (1 << 30) if context.cuda and not context.quick else (128 << 20)
    one, other = (torch.zeros(size // 4, device=context.workspace) for _ in range(2))
    times = in_turn({"copy": lambda: other.copy_(one)}, context.wait, context.budget_s)
    rate = 2 * size / statistics.median(times["copy"])
    return [Figure("copy within the device's memory", rate / 1e9, "GB/s", {"bytes": size})]


PARTS = (
    # By itself: where there is no such device, nothing may be done on it before.
    Part("device", facts, 90, fresh=True),
    Part("launch latency", launches),
    Part("copies between host and device", copies),
    Part("float32 products", products),
    Part("memory bandwidth", memory),
)
