"""A file of torch.save of 2 GiB, and one of 10,000 small tensors: ckpttool beside torch.load."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Cost, compare, table
from benchmarks.reading import _MAPPED, _OURS, FLOOR, MEMORY, OURS, SIZE, TENSORS, Noise

STARTED = "import numpy"
LISTED, THEIRS_LISTED = "ckpttool.open", "torch.load(mmap=True), shapes"
MANY, THEIRS_MANY = "ckpttool.open, 10,000 tensors", "torch.load, 10,000 tensors"
LOADED, MAPPED = "torch.load", "torch.load(mmap=True), every tensor used"
# zlib's crc32, which the zip format asks for, takes as long as the copy; torch.load has to do it as well.
LISTING_LIMIT, READING_LIMIT, FASTER = 2.5, 3.5, 1.5
_MODULES = 1250  # of eight tensors each

_LIST = "import sys, ckpttool; [leaf.shape for _, leaf in ckpttool.open(sys.argv[1]).tree.tensors()]"
_THEIR_LIST = """
import sys, torch
[tensor.shape for tensor in torch.load(sys.argv[1], weights_only=True, mmap=True).values()]
"""
_LOAD = "import sys, torch; torch.load(sys.argv[1], weights_only=True)"
# A map of the file, of which nothing is read before it is used.
_USED = """
import sys, torch
for tensor in torch.load(sys.argv[1], weights_only=True, mmap=True).values():
    tensor.clone()
"""


def large(folder: Path) -> str:
    """Write a file of 2 GiB in 64 tensors and return its path."""
    from ckpttool import save
    from ckpttool.core import Leaf, Tree, key

    shape = (SIZE // 4,)
    leaves = {(key(f"w{n:02}"),): Leaf("float32", shape, Noise(n), f"w{n:02}") for n in range(TENSORS)}
    target = str(folder / "large.pt")
    save(Tree(leaves), target, sync=False)
    return target


def many(folder: Path) -> str:
    """Write a file of 10,000 tensors in nested dicts and return its path."""
    from ckpttool import save
    from ckpttool.core import Inline, Leaf, Tree, key

    leaves = {}
    for module in range(_MODULES):
        for name in ("q", "k", "v", "o", "up", "down", "norm", "bias"):
            path = (key("model"), key(f"layer{module}"), key(name))
            leaves[path] = Leaf("float32", (4, 4), Inline(bytes(64)), f"model.layer{module}.{name}")
    target = str(folder / "many.pt")
    save(Tree(leaves), target, sync=False)
    return target


def listing(file: str, nested: str) -> dict[str, list[str]]:
    """Return what is timed of looking; PyTorch is left out where it is not installed."""
    python = [sys.executable, "-c"]
    programs = {
        STARTED: [*python, "import numpy"],
        LISTED: [*python, _LIST, file],
        MANY: [*python, _LIST, nested],
    }
    if importlib.util.find_spec("torch"):
        programs[THEIRS_LISTED] = [*python, _THEIR_LIST, file]
        programs[THEIRS_MANY] = [*python, _LOAD, nested]
    return programs


def reading(file: str) -> dict[str, list[str]]:
    """Return what is timed of reading every tensor into memory of its own."""
    python = [sys.executable, "-c"]
    programs = {FLOOR: [*python, _MAPPED, file, str(SIZE)], OURS: [*python, _OURS, file]}
    if importlib.util.find_spec("torch"):
        programs[LOADED] = [*python, _LOAD, file]
        programs[MAPPED] = [*python, _USED, file]
    return programs


def main() -> int:
    """Print both tables and the verdicts; return 1 if a promise is broken."""
    with tempfile.TemporaryDirectory() as folder:
        file = large(Path(folder))
        looked = compare(listing(file, many(Path(folder))))
        read = compare(reading(file), rounds=5)
    print(table(looked, STARTED))
    print(table(read, FLOOR))
    return int(not all(verdicts(looked, read)))


def verdicts(looked: dict[str, Cost], read: dict[str, Cost]) -> list[bool]:
    """Print and return whether each promise holds."""
    listing_ratio = looked[LISTED].ratio(looked[STARTED])
    reading_ratio = read[OURS].ratio(read[FLOOR])
    print(f"{LISTED}: {listing_ratio:.2f}x {STARTED} (promised: at most {LISTING_LIMIT:g})")
    print(f"{OURS}: {reading_ratio:.2f}x {FLOOR} (promised: at most {READING_LIMIT:g})")
    print(f"{OURS}: {read[OURS].mebibytes:.0f} MiB at its peak (promised: at most {MEMORY:.0f})")
    for peer, own, costs in (
        (THEIRS_LISTED, LISTED, looked),
        (THEIRS_MANY, MANY, looked),
        (MAPPED, OURS, read),
    ):
        if peer in costs:
            print(f"{own}: {costs[peer].ratio(costs[own]):.2f}x as fast as {peer}")
    kept = [listing_ratio <= LISTING_LIMIT, reading_ratio <= READING_LIMIT, read[OURS].mebibytes <= MEMORY]
    if LOADED in read:
        faster = read[LOADED].ratio(read[OURS])
        print(f"{OURS}: {faster:.1f}x as fast as {LOADED} (promised: at least {FASTER:g})")
        kept.append(faster >= FASTER)
    return kept


if __name__ == "__main__":
    sys.exit(main())
