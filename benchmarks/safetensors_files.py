"""A safetensors file of 1 GiB listed and read: ckpttool beside the format's own library."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Cost, compare, table
from benchmarks.reading import _MAPPED, _OURS, FLOOR, MEMORY, OURS, SIZE, Noise

TENSORS = 32
STARTED = "import numpy"
LISTED, THEIRS_LISTED = "ckpttool.open", "safe_open, shapes"
OURS_READ = OURS.replace(", checksums verified", ", every tensor")
NUMPY, TORCH = "safetensors.numpy.load_file", "safetensors.torch.load_file"
LISTING_LIMIT, READING_LIMIT = 2.5, 2.0

_LIST = "import sys, ckpttool; [leaf.shape for _, leaf in ckpttool.open(sys.argv[1]).tree.tensors()]"
_THEIR_LIST = """
import sys, safetensors
with safetensors.safe_open(sys.argv[1], "numpy") as file:
    [file.get_slice(name).get_shape() for name in file.keys()]
"""
_LOAD = "import sys; from safetensors.{} import load_file; load_file(sys.argv[1])"
# What load_file gives PyTorch is a map of the file, of which nothing is read before it is used.
_USED = """
import sys
from safetensors.torch import load_file
for tensor in load_file(sys.argv[1]).values():
    tensor.clone()
"""


def write_file(folder: Path) -> str:
    """Write a file of 1 GiB in 32 tensors and return its path."""
    from ckpttool import save
    from ckpttool.core import Leaf, Tree, key

    shape = (SIZE // 4,)
    leaves = {(key(f"w{n:02}"),): Leaf("float32", shape, Noise(n), f"w{n:02}") for n in range(TENSORS)}
    target = str(folder / "large.safetensors")
    save(Tree(leaves), target, sync=False)
    return target


def listing(file: str) -> dict[str, list[str]]:
    """Return what is timed of looking; the library is left out where it is not installed."""
    python = [sys.executable, "-c"]
    programs = {STARTED: [*python, "import numpy"], LISTED: [*python, _LIST, file]}
    if importlib.util.find_spec("safetensors"):
        programs[THEIRS_LISTED] = [*python, _THEIR_LIST, file]
    return programs


def reading(file: str) -> dict[str, list[str]]:
    """Return what is timed of reading every tensor into memory of its own."""
    python = [sys.executable, "-c"]
    programs = {FLOOR: [*python, _MAPPED, file, str(SIZE)], OURS_READ: [*python, _OURS, file]}
    if importlib.util.find_spec("safetensors"):
        programs[NUMPY] = [*python, _LOAD.format("numpy"), file]
        if importlib.util.find_spec("torch"):
            programs[TORCH] = [*python, _USED, file]
    return programs


def main() -> int:
    """Print both tables and the verdicts; return 1 if a promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_file(Path(folder))
        looked = compare(listing(file))
        read = compare(reading(file), rounds=5)
    print(table(looked, STARTED))
    print(table(read, FLOOR))
    return int(not all(verdicts(looked, read)))


def verdicts(looked: dict[str, Cost], read: dict[str, Cost]) -> list[bool]:
    """Print and return whether each promise holds."""
    listing_ratio = looked[LISTED].ratio(looked[STARTED])
    used = read[OURS_READ].ratio(read[FLOOR])
    print(f"{LISTED}: {listing_ratio:.2f}x {STARTED} (promised: at most {LISTING_LIMIT:g})")
    print(f"{OURS_READ}: {used:.2f}x {FLOOR} (promised: at most {READING_LIMIT:g})")
    print(f"{OURS_READ}: {read[OURS_READ].mebibytes:.0f} MiB at its peak (promised: at most {MEMORY:.0f})")
    for peer, own, costs in (
        (THEIRS_LISTED, LISTED, looked),
        (NUMPY, OURS_READ, read),
        (TORCH, OURS_READ, read),
    ):
        if peer in costs:
            print(f"{own}: {costs[peer].ratio(costs[own]):.2f}x as fast as {peer}")
    return [listing_ratio <= LISTING_LIMIT, used <= READING_LIMIT, read[OURS_READ].mebibytes <= MEMORY]


if __name__ == "__main__":
    sys.exit(main())
