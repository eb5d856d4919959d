"""Listing time against the number of tensors: it must grow linearly to 8,000."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import Cost, compare

COUNTS = (500, 1000, 2000, 4000, 8000)
# The time beyond a start may grow by the ratio of the counts and half as much again.
SLACK = 1.5

PEER = "tf.train.list_variables"
_PEER = "import sys, tensorflow as tf; print(tf.train.list_variables(sys.argv[1]))"

_BUNDLE = """
import sys, tensorflow as tf
count, target = int(sys.argv[1]), sys.argv[2]
module = tf.Module()
module.layers = [tf.Module() for _ in range(count // 2)]
for layer in module.layers:
    layer.kernel, layer.bias = tf.Variable(tf.zeros([4, 4])), tf.Variable(tf.zeros([4]))
tf.train.Checkpoint(model=module).write(target)
"""


def torch_file(folder: Path, count: int) -> str:
    """Write a PyTorch file of `count` small tensors with our own writer."""
    from ckpttool import save
    from ckpttool.core import Inline, Leaf, Tree, key

    data = np.zeros(16, np.float32).tobytes()
    names = [f"layers.{n // 2}.{'weight' if n % 2 else 'bias'}" for n in range(count)]
    leaves = {(key(name),): Leaf("float32", (16,), Inline(data), name) for name in names}
    target = str(folder / f"{count}.pt")
    save(Tree(leaves), target)
    return target


def bundle(folder: Path, count: int) -> str:
    """Let TensorFlow write an object-graph checkpoint of `count` variables."""
    target = str(folder / f"bundle-{count}")
    subprocess.run([sys.executable, "-c", _BUNDLE, str(count), target], check=True, capture_output=True)
    return target


def main() -> int:
    """Print seconds per count and format; return 1 if the growth is more than linear."""
    tool = str(Path(sys.executable).with_name("ckpttool"))
    kept = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        writers = {"PyTorch": torch_file}
        if importlib.util.find_spec("tensorflow"):
            writers["TensorFlow"] = bundle
        for title, write in writers.items():
            paths = {n: write(folder, n) for n in COUNTS}
            commands = {str(n): [tool, "inspect", path, "--json"] for n, path in paths.items()}
            commands["start"] = [sys.executable, "-m", "ckpttool", "--version"]
            if title == "TensorFlow":
                commands[PEER] = [sys.executable, "-c", _PEER, paths[COUNTS[-1]]]
            costs = compare(commands, rounds=5)
            kept &= report(title, costs, COUNTS)
            if PEER in costs:
                faster = costs[PEER].ratio(costs[str(COUNTS[-1])])
                print(f"{title}: {faster:.1f}x as fast as {PEER} on {COUNTS[-1]:,} variables")
                kept &= faster > 1
    return int(not kept)


def report(title: str, costs: dict[str, Cost], counts: Sequence[int]) -> bool:
    """Print a row per count and say whether the growth is linear."""
    floor = costs["start"].seconds
    for count in counts:
        beyond = costs[str(count)].seconds - floor
        print(
            f"{title:<10} {count:>5} tensors  {costs[str(count)].seconds:.3f} s, {beyond:.3f} beyond a start"
        )
    few, many = (costs[str(count)].seconds - floor for count in (counts[1], counts[-1]))
    growth, fair = many / few, counts[-1] / counts[1]
    print(f"{title}: {growth:.1f}x the time for {fair:g}x the tensors")
    return growth <= SLACK * fair


if __name__ == "__main__":
    sys.exit(main())
