"""The sandbox of a process that opens a file with a framework: milliseconds per process.

`python -m benchmarks.sandbox NAME ...` measures some rows only. A busy machine changes the clock's cost; the
processor's is steadier.
"""

from __future__ import annotations

import statistics
import sys
import tempfile

from benchmarks.measure import compare
from ckpttool.core import sandbox

ROUNDS = 11
# What the process imports, as its start and as the library that opens the file.
PROCESSES = {
    "interpreter": "pass",
    "onnxruntime": "import onnx, onnxruntime",
    "torch": "import torch",
    "keras": "import keras, tensorflow",
    "hdf5": "import h5py",
}
BEGIN = "from ckpttool.core.sandbox import begin; begin(*sys.argv[1:])"
# The process that lists HDF5 files is restricted after the import, and grants nothing.
AFTER = "from ckpttool.core import sandbox; sandbox.restrict(())"
# Of the processor: milliseconds, or a share of what the process takes without.
MOST_MS, MOST_SHARE = 100, 0.1


def main(*names: str) -> int:
    """Print medians with and without the sandbox; return 1 if one costs more than promised."""
    chosen = names or tuple(PROCESSES)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, sandbox.settings((), 16 << 30, now=True)]
        commands = {}
        for name in chosen:
            plain = ("import sys", "import ckpttool.core", PROCESSES[name])
            restricted = (*plain, AFTER) if name == "hdf5" else (*plain[:2], BEGIN, plain[2])
            for title, lines in ((name, plain), (f"{name}, sandbox", restricted)):
                commands[title] = [sys.executable, "-P", "-c", "; ".join(lines), *arguments]
        costs = compare(commands, rounds=ROUNDS)
    kept = True
    print(f"{'process':<14}{'without':>9}{'with':>9}{'cost':>9}{'processor':>11}  ms, medians of {ROUNDS}")
    for name in chosen:
        one, other = costs[name], costs[f"{name}, sandbox"]
        pairs = list(zip(one.runs, other.runs, strict=True))
        cost = 1000 * statistics.median(b.seconds - a.seconds for a, b in pairs)
        busy = 1000 * statistics.median(b.processor - a.processor for a, b in pairs)
        kept &= busy <= max(MOST_MS, MOST_SHARE * 1000 * one.processor)
        print(f"{name:<14}{1000 * one.seconds:>9.1f}{1000 * other.seconds:>9.1f}{cost:>9.1f}{busy:>11.1f}")
    print(f"{'kept' if kept else 'BROKEN'}: at most {MOST_MS} ms of the processor, or {MOST_SHARE:.0%}")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
