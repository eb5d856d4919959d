"""32 checkpoints of one run on Pendulum, together and one after the other, on one core."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import measure
from ckpttool.commands.evaluate import evaluate
from ckpttool.commands.sweep import sweep
from ckpttool.evaluation.protocol import Protocol

SAMPLES = Path("sample_ckpts/td3_pendulum_torch")
STEPS = (2500, 5000, 7500, 10000, 12500, 15000)
CHECKPOINTS = 32
ROUNDS = 3
COMMANDS = "32 commands / 1 command, 10 episodes"
MANY = "a loop / a sweep in Python, 100 episodes"
# Here most of the time goes into reading the checkpoints, which playing them together does not spare.
FEW = "a loop / a sweep in Python, 10 episodes"
PROMISES = {COMMANDS: 3.0, MANY: 3.0}


def make_run(folder: Path) -> list[Path]:
    """Fill a folder with 32 checkpoints and their receipts: the samples, several times."""
    paths = []
    for number in range(CHECKPOINTS):
        source, target = SAMPLES / f"ckpt-{STEPS[number % 6]}.pt", folder / f"ckpt-{number + 1}.pt"
        shutil.copy(source, target)
        shutil.copy(f"{source}.ckpttool.json", f"{target}.ckpttool.json")
        paths.append(target)
    return paths


def commands(folder: Path, paths: list[Path]) -> float:
    """Return how much longer 32 commands take than one, 10 episodes each."""
    one = [sys.executable, "-m", "ckpttool", "eval", "--quiet"]
    together = statistics.median(measure.once([*one, str(folder)]).seconds for _ in range(3))
    return sum(measure.once([*one, str(path)]).seconds for path in paths) / together


def in_one_process(folder: Path, paths: list[Path], episodes: int) -> float:
    """Return how much longer a loop over the checkpoints takes than a sweep, in one process."""
    how = Protocol(episodes=episodes)
    sweep([str(folder)], protocol=how)  # warm: imports, the page cache
    ratios = []
    for _ in range(ROUNDS):
        together = _seconds(lambda: sweep([str(folder)], protocol=how))
        apart = _seconds(lambda: [evaluate(str(path), protocol=how) for path in paths])
        ratios.append(apart / together)
    return statistics.median(ratios)


def _seconds(work: Callable[[], object]) -> float:
    # Of the one core: what others do on it meanwhile is not counted.
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> int:
    """Measure and print the ratios; return 1 if a promise is broken."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            paths = make_run(folder)
            costs_by_label = {
                COMMANDS: commands(folder, paths),
                MANY: in_one_process(folder, paths, 100),
                FEW: in_one_process(folder, paths, 10),
            }
    finally:
        os.sched_setaffinity(0, cores)
    for label, ratio in costs_by_label.items():
        promised = f"  (promised: {PROMISES[label]:g})" if label in PROMISES else ""
        print(f"{label:<46} {ratio:5.1f}{promised}")
    return int(any(costs_by_label[label] < least for label, least in PROMISES.items()))


if __name__ == "__main__":
    sys.exit(main())
