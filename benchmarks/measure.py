"""Times whole commands in turn, round after round, so that a busy machine slows all of them alike."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Cost(NamedTuple):
    """One command: median wall seconds, median peak memory in MiB, and each round's seconds."""

    seconds: float
    mebibytes: float
    rounds: tuple[float, ...]

    def ratio(self, other: Cost) -> float:
        """Return the median of the ratios round by round: what drifts with the machine cancels."""
        return statistics.median(a / b for a, b in zip(self.rounds, other.rounds, strict=True))


def compare(commands: Mapping[str, Sequence[str]], rounds: int = 11) -> dict[str, Cost]:
    """Run every command once to warm the page cache, then in turn; each is a fresh process."""
    for command in commands.values():
        once(command)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    memory: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            elapsed, peak = once(command)
            seconds[name].append(elapsed)
            memory[name].append(peak)
    return {
        name: Cost(statistics.median(seconds[name]), statistics.median(memory[name]), tuple(seconds[name]))
        for name in commands
    }


def once(command: Sequence[str]) -> tuple[float, float]:
    """Run a command; return wall seconds and peak memory in MiB; raise if it fails."""
    # A checkout without compiled files would be timed compiling.
    quiet = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    quiet |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=quiet)
    _, status, usage = os.wait4(child.pid, 0)
    elapsed = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        said = child.stderr.read().decode() if child.stderr else ""
        raise RuntimeError(f"{' '.join(command)} failed: {said[-2000:]}")
    if child.stderr:
        child.stderr.close()
    return elapsed, usage.ru_maxrss / 1024


def table(costs: Mapping[str, Cost], floor: str) -> str:
    """Return a row per command with its ratio to `floor`."""
    width = max(map(len, costs))
    rows = [f"{'command':<{width}}  seconds   MiB  x {floor}"]
    for name, cost in costs.items():
        rows.append(
            f"{name:<{width}}  {cost.seconds:7.3f}  {cost.mebibytes:4.0f}  {cost.ratio(costs[floor]):6.2f}"
        )
    return "\n".join(rows)
