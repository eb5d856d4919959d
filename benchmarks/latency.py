"""One call of a policy, by batch and by backend: one network, and 64 of them stacked, on CPU and GPU.

One thread computes, as in a rollout, where the environments have the cores.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np

SIZES = (17, 256, 256, 6)
BATCHES = (1, 64, 1024, 16384)
STACKED = 64
LEAST_S = 0.6
BACKENDS = ("numpy", "onnxruntime", "torch", "tensorflow")


def network(seed: int) -> object:
    """Return a random actor."""
    from ckpttool.agents.network import Activation, Dense, Network, Node

    random = np.random.default_rng(seed)
    nodes = []
    for rows, columns, name in zip(SIZES, SIZES[1:], ("relu", "relu", "tanh"), strict=False):
        kernel = (random.standard_normal((rows, columns)) / rows**0.5).astype(np.float32)
        for layer in (Dense(kernel, np.zeros(columns, np.float32)), Activation(name)):  # type: ignore[arg-type]
            nodes.append(Node(layer, (len(nodes),)))
    return Network((("obs", SIZES[0]),), tuple(nodes), len(nodes))


def timed(policy: Any, rows: int) -> float:
    """Return microseconds per call: the median of many."""
    obs = np.random.default_rng(1).standard_normal((rows, SIZES[0])).astype(np.float32)
    with policy.threads(1) if hasattr(policy, "threads") else nullcontext():
        for _ in range(5):
            policy.step(obs)
        rounds, begun = [], time.perf_counter()
        while len(rounds) < 5 or time.perf_counter() - begun < LEAST_S:
            start = time.perf_counter()
            policy.step(obs)
            rounds.append(time.perf_counter() - start)
    return float(np.median(rounds)) * 1e6


def latencies(backend: str, device: str, *, graphs: bool) -> Iterator[tuple[str, float]]:
    """Yield a title and microseconds for every batch, arrays in the host's memory on both ends."""
    from ckpttool import plugins
    from ckpttool.agents.stacking import stack

    build = plugins.find("backends", backend).load().build  # type: ignore[attr-defined]
    options = {} if graphs else {"graphs": False}
    alone = build(network(0), device, **options)
    for rows in BATCHES:
        yield f"batch {rows}", timed(alone, rows)
    if backend == "onnxruntime":
        return
    several = build(stack([network(n) for n in range(STACKED)]), device, **options)
    for rows in (1, 64):
        yield f"{STACKED} x {rows}", timed(several, rows * STACKED)


def child(backend: str, device: str, graphs: str) -> None:
    """Print what one backend takes on one device."""
    for title, took in latencies(backend, device, graphs=graphs == "graphs"):
        print(f"{title:<12} {took:12.1f}")


def ways() -> Iterator[tuple[str, str, str]]:
    """Yield backend, device and whether graphs are captured, for all that can run here."""
    for backend in BACKENDS:
        if importlib.util.find_spec(backend) is not None:
            yield backend, "cpu", "graphs"
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            yield "torch", "cuda", "graphs"
            yield "torch", "cuda", "no graphs"


def main() -> int:
    """Print microseconds per call; nothing is promised here."""
    print(f"actor {'-'.join(map(str, SIZES))}, float32, microseconds per call")
    for backend, device, graphs in ways():
        command = [sys.executable, "-W", "ignore", __file__, backend, device, graphs]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"{backend} failed: {ran.stderr[-2000:]}")
        print(f"\n{backend} on {device}{', ' + graphs if device != 'cpu' else ''}\n{ran.stdout.rstrip()}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 4:
        child(*sys.argv[1:])
    else:
        sys.exit(main())
