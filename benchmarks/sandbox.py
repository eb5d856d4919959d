"""The sandbox of a process that opens a file with a framework: milliseconds per process."""

from __future__ import annotations

import statistics
import sys
import tempfile

from benchmarks.measure import compare
from ckpttool.core import sandbox

ROUNDS = 11
# What the process imports, as its start and as the library that opens the file.
PROCESSES = {
    "interpreter alone": "pass",
    "ONNX Runtime": "import onnx, onnxruntime",
    "PyTorch": "import torch",
    "Keras, TensorFlow": "import keras, tensorflow",
}
BEGIN = "from ckpttool.core.sandbox import begin; begin(*sys.argv[1:])"
HDF5 = "import h5py; from ckpttool.core import sandbox"
MOST_MS = 100


def main() -> int:
    """Print medians with and without the sandbox; return 1 if one costs more than promised."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder, sandbox.settings((), 16 << 30, now=True)]

        def command(*lines: str) -> list[str]:
            return [sys.executable, "-P", "-c", "; ".join(("import sys", *lines)), *arguments]

        commands = {}
        for name, imports in PROCESSES.items():
            commands[name] = command("import ckpttool.core", imports)
            commands[f"{name}, sandbox"] = command("import ckpttool.core", BEGIN, imports)
        commands["HDF5"] = command(HDF5)
        commands["HDF5, sandbox"] = command(HDF5, "sandbox.restrict(())")
        costs = compare(commands, rounds=ROUNDS)
    most = 0.0
    print(f"{'process':<20}{'without':>10}{'with':>10}{'cost':>10}  ms, medians of {ROUNDS} rounds")
    for name in (*PROCESSES, "HDF5"):
        plain, restricted = costs[name], costs[f"{name}, sandbox"]
        rounds = zip(plain.runs, restricted.runs, strict=True)
        cost = 1000 * statistics.median(b.seconds - a.seconds for a, b in rounds)
        most = max(most, cost)
        print(f"{name:<20}{1000 * plain.seconds:>10.1f}{1000 * restricted.seconds:>10.1f}{cost:>10.1f}")
    kept = most <= MOST_MS
    print(f"{'kept' if kept else 'BROKEN'}: at most {most:.1f} ms per process, of {MOST_MS} ms")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
