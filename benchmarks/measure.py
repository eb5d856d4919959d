"""Times whole commands in turn, round after round, so that a busy machine slows all of them alike.

Linux gives a process that starts a program the peak memory of whoever forked it: `ru_maxrss` never falls, not
even when another program is loaded (fs/exec.c, exec_mmap). So each command is started by a small shell, which
ends at once and leaves it to a launcher: this file, run as a program.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# prctl(2): orphaned descendants become children of this process, which can then wait for them.
_SET_CHILD_SUBREAPER = 36
# The shell forks, so that the command begins with the memory of the shell, less than 1 MiB. The fork waits
# for a line until the shell has ended, which would reap a command that is done sooner.
_START = 'exec 3<&0; { read -r _ <&3; exec "$@" 3<&-; } >/dev/null & echo $!'


class Run(NamedTuple):
    """One run of a command.

    `seconds` are by the clock, `processor` those of user and system together, of its children too;
    `mebibytes` is the peak memory of its largest process; the switches are those of all its threads:
    `waits` that it made to wait for something, `preemptions` because others had their turn.
    """

    seconds: float
    mebibytes: float
    processor: float
    waits: int
    preemptions: int


class Cost(NamedTuple):
    """One command: medians of wall seconds, peak memory in MiB and processor seconds, and every run."""

    seconds: float
    mebibytes: float
    processor: float
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Cost:
        """Return the cost of a command that ran several times."""
        seconds, mebibytes, processor, *_ = map(statistics.median, zip(*runs, strict=True))
        return cls(seconds, mebibytes, processor, tuple(runs))

    def ratio(self, other: Cost) -> float:
        """Return the median of the ratios round by round: what drifts with the machine cancels."""
        return statistics.median(a.seconds / b.seconds for a, b in zip(self.runs, other.runs, strict=True))

    def processor_ratio(self, other: Cost) -> float:
        """Return the same of processor seconds, which other work on the machine changes least."""
        pairs = zip(self.runs, other.runs, strict=True)
        return statistics.median(a.processor / b.processor for a, b in pairs)


def compare(commands: Mapping[str, Sequence[str]], rounds: int = 11) -> dict[str, Cost]:
    """Run every command once to warm the page cache, then in turn; each is a fresh process."""
    for command in commands.values():
        once(command)
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(once(command))
    return {name: Cost.of(run) for name, run in runs.items()}


def once(command: Sequence[str]) -> Run:
    """Run a command and return what it took; raise RuntimeError if it fails."""
    # A checkout without compiled files would be timed compiling.
    quiet = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    quiet |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    launcher = [sys.executable, "-I", "-S", __file__]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, env=quiet, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return Run(*json.loads(done.stdout))


def launch(command: Sequence[str]) -> int:
    """Run a command, print its Run as JSON and return its exit status."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    gate, opened = os.pipe()
    shell = subprocess.run(
        ["/bin/sh", "-c", _START, "sh", *command], stdin=gate, stdout=subprocess.PIPE, check=True
    )
    child = int(shell.stdout)
    try:
        start = time.perf_counter()
        os.write(opened, b"\n")
        _, status, usage = os.wait4(child, 0)
    except KeyboardInterrupt:
        # A shell has what it runs in the background ignore Ctrl-C.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        raise
    elapsed = time.perf_counter() - start
    processor = usage.ru_utime + usage.ru_stime
    run = Run(elapsed, usage.ru_maxrss / 1024, processor, usage.ru_nvcsw, usage.ru_nivcsw)
    print(json.dumps(run))
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def table(costs: Mapping[str, Cost], floor: str) -> str:
    """Return a row per command with its ratio to `floor`."""
    width = max(map(len, costs))
    rows = [f"{'command':<{width}}  seconds  processor   MiB  x {floor}"]
    for name, cost in costs.items():
        rows.append(
            f"{name:<{width}}  {cost.seconds:7.3f}  {cost.processor:9.3f}  {cost.mebibytes:4.0f}"
            f"  {cost.ratio(costs[floor]):6.2f}"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[1:]))
