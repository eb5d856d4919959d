"""Reading 2 GiB of tensors with every checksum verified: ckpttool beside a memory map and TensorFlow."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Cost, compare, table

MIB = 1 << 20
TENSORS, SIZE = 64, 32 * MIB
FLOOR = "copy out of a memory map"
OURS = "ckpttool, checksums verified"
PEER = "tf.train.load_checkpoint"
LIMIT = 2.0
# One tensor as read, one as handed over, and a start of Python with numpy.
MEMORY = 2 * SIZE / MIB + 96

_MAPPED = """
import sys, numpy as np
data = np.memmap(sys.argv[1], "u1", "r")
for at in range(0, len(data), int(sys.argv[2])):
    np.array(data[at : at + int(sys.argv[2])])
"""
_OURS = """
import sys, ckpttool
for _, leaf in ckpttool.open(sys.argv[1]).tree.tensors():
    leaf.array()
"""
_PEER = """
import sys, tensorflow as tf
reader = tf.train.load_checkpoint(sys.argv[1])
for key in reader.get_variable_to_shape_map():
    reader.get_tensor(key)
"""


class Noise(NamedTuple):
    """A tensor's bytes, made when they are read and the same every time."""

    number: int

    def read(self) -> bytes:
        """Return the bytes."""
        return np.random.default_rng(self.number).bytes(SIZE)


def bundle(folder: Path) -> str:
    """Write a name-based checkpoint of 2 GiB and return its prefix."""
    from ckpttool import save
    from ckpttool.core import Leaf, Tree, attr

    shape = (SIZE // 4,)
    leaves = {(attr(f"w{n:02}"),): Leaf("float32", shape, Noise(n), f"w{n:02}") for n in range(TENSORS)}
    target = str(folder / "large")
    save(Tree(leaves), target, "tf1", sync=False)
    return target


def commands(prefix: str) -> dict[str, list[str]]:
    """Return what is timed; TensorFlow is left out where it is not installed."""
    python = [sys.executable, "-c"]
    programs = {
        FLOOR: [*python, _MAPPED, f"{prefix}.data-00000-of-00001", str(SIZE)],
        OURS: [*python, _OURS, prefix],
    }
    if importlib.util.find_spec("tensorflow"):
        programs[PEER] = [*python, _PEER, prefix]
    return programs


def main() -> int:
    """Print the table and the verdicts; return 1 if a promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        costs = compare(commands(bundle(Path(folder))), rounds=5)
    print(table(costs, FLOOR))
    return int(not all(verdicts(costs)))


def verdicts(costs: dict[str, Cost]) -> list[bool]:
    """Print and return whether each promise holds."""
    cost = costs[OURS]
    ratio = cost.ratio(costs[FLOOR])
    print(f"{OURS}: {ratio:.2f}x {FLOOR} (promised: at most {LIMIT:g})")
    print(f"{OURS}: {cost.mebibytes:.0f} MiB at its peak (promised: at most {MEMORY:.0f})")
    if PEER in costs:
        print(f"{OURS}: {costs[PEER].ratio(cost):.1f}x as fast as {PEER}")
    return [ratio <= LIMIT, cost.mebibytes <= MEMORY]


if __name__ == "__main__":
    sys.exit(main())
