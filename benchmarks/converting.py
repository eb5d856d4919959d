"""Converting 2 GB of matrices from TensorFlow to PyTorch, every check included: ckpttool beside `cp`.

Beside it too: the least that anybody has to do for it (benchmarks/conversion_floor.py).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Cost, Run, once, table

MATRIX = 1024  # rows and columns: 4 MiB each
FEW, MANY, SPARSE = 125, 500, 5000
COPIED, COPIED_SYNCED = "cp", "cp, then fsync"
OURS, OURS_SYNCED = "ckpttool convert --no-sync", "ckpttool convert"
FLOOR, FLOOR_SYNCED = "the floor, without ckpttool", "the floor, then fsync"
SMALL = f"ckpttool convert --no-sync, {FEW} matrices"
BASE, HOLLOW = "ckpttool convert, 1 matrix", "ckpttool convert --no-sync, sparse source"
# For two idle cores. One core takes three times as long as `cp` for the SHA-256 of both files alone.
LIMIT, LIMIT_SYNCED, MEBIBYTES, SLACK = 4.0, 1.5, 150.0, 1.5


class Noise(NamedTuple):
    """A matrix's bytes, made when they are read and the same every time."""

    number: int

    def read(self) -> bytes:
        """Return the bytes."""
        return np.random.default_rng(self.number).bytes(4 * MATRIX * MATRIX)


class Zeros(NamedTuple):
    """A matrix of zeros."""

    def read(self) -> bytes:
        """Return the bytes."""
        return _ZEROS


_ZEROS = bytes(4 * MATRIX * MATRIX)


class Hollow:
    """A stream that only counts: the file gets its length and no blocks."""

    nbytes = 0

    def write(self, data: bytes | memoryview) -> int:
        """Take note of the length."""
        self.nbytes += len(data)
        return len(data)


def sources(folder: Path) -> None:
    """Write name-based checkpoints of one, few and many kernels, and of zeros that take no place on disk."""
    from ckpttool import save

    for count in (1, FEW, MANY):
        noise = {number: Noise(number) for number in range(count)}
        save(_tree(noise), str(folder / f"x{count}"), "tf1", sync=False)
    # Twice as much again must stay free: the target of the sparse source takes its place on the disk.
    free = shutil.disk_usage(folder).free - 3 * MANY * len(_ZEROS)
    _hollow(str(folder / "sparse"), min(SPARSE, free // len(_ZEROS)))
    # Else the first commands would share the disk with what was written here.
    os.sync()


def _hollow(target: str, count: int) -> None:
    from ckpttool.formats import tf_bundle

    tree = _tree(dict.fromkeys(range(count), Zeros()))
    *shards, index = tf_bundle.pieces(tree, graph=False)
    for shard in shards:
        stream = Hollow()
        shard.write(stream)  # type: ignore[arg-type]  # all that this writer uses
        Path(target + shard.suffix).touch()
        os.truncate(target + shard.suffix, stream.nbytes)
    with open(target + index.suffix, "wb") as file:
        index.write(file)


def _tree(sources: Mapping[int, Noise | Zeros]) -> object:
    from ckpttool.core import Leaf, Tree, attr

    shape = (MATRIX, MATRIX)
    names = {number: f"l{number:04}/kernel" for number in sources}
    return Tree(
        {
            (attr(f"l{number:04}"), attr("kernel")): Leaf("float32", shape, source, names[number])
            for number, source in sources.items()
        }
    )


def commands(folder: Path) -> dict[str, list[str]]:
    """Write the sources and return what is timed; every command makes `out.pt` in the folder."""
    out = str(folder / "out.pt")
    convert = [str(Path(sys.executable).with_name("ckpttool")), "convert", "--quiet"]
    sources(folder)
    one, few, many = (str(folder / f"x{count}") for count in (1, FEW, MANY))
    data = f"{many}.data-00000-of-00001"
    floor = [sys.executable, "-m", "benchmarks.conversion_floor"]
    return {
        COPIED: ["cp", data, out],
        FLOOR: [*floor, data, out],
        OURS: [*convert, "--no-sync", many, out],
        SMALL: [*convert, "--no-sync", few, out],
        BASE: [*convert, one, out],
        COPIED_SYNCED: ["sh", "-c", 'cp "$1" "$2" && sync "$2"', "sh", data, out],
        FLOOR_SYNCED: [*floor, data, out, "sync"],
        OURS_SYNCED: [*convert, many, out],
    }


def measured(folder: Path, result: Mapping[str, list[str]], rounds: int) -> dict[str, Cost]:
    """Run every command in turn, what it wrote removed before the next."""
    runs: dict[str, list[Run]] = {name: [] for name in result}
    for _ in range(rounds):
        for name, command in result.items():
            runs[name].append(once(command))
            for file in folder.glob("out.pt*"):
                file.unlink()
    return {name: Cost.of(run) for name, run in runs.items()}


def main() -> int:
    """Print the table and the verdicts; return 1 if a promise is broken."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = commands(folder)
        costs = measured(folder, rows, rounds=5)
        nbytes = sum(file.stat().st_size for file in folder.glob("sparse.data*"))
        for file in folder.glob("x*"):
            file.unlink()
        sparse = [*rows[OURS][:-2], str(folder / "sparse"), rows[OURS][-1]]
        costs |= measured(folder, {HOLLOW: sparse}, rounds=1)
    print(table({name: cost for name, cost in costs.items() if name != HOLLOW}, COPIED))
    print(f"{HOLLOW}: {nbytes / 1e9:.0f} GB, {costs[HOLLOW].seconds:.0f} s")
    return int(not all(verdicts(costs)))


def verdicts(costs: dict[str, Cost]) -> list[bool]:
    """Print and return whether each promise holds."""
    plain, synced = (
        _compared(costs, *names)
        for names in ((OURS, COPIED, FLOOR, LIMIT), (OURS_SYNCED, COPIED_SYNCED, FLOOR_SYNCED, LIMIT_SYNCED))
    )
    base = costs[BASE].mebibytes
    above = {name: _peak(costs[name]) - base for name in (OURS, OURS_SYNCED, HOLLOW)}
    for name, extra in above.items():
        print(f"{name}: {extra:.0f} MiB above {BASE} at its peak (promised: at most {MEBIBYTES:.0f})")
    few, many = (costs[name].seconds - costs[BASE].seconds for name in (SMALL, OURS))
    print(f"{many / few:.1f}x the time for {MANY / FEW:g}x the bytes")
    linear = many / few <= SLACK * MANY / FEW
    return [plain, synced, max(above.values()) <= MEBIBYTES, linear]


def _compared(costs: dict[str, Cost], name: str, copied: str, floor: str, limit: float) -> bool:
    ratio = costs[name].ratio(costs[copied])
    print(f"{name}: {ratio:.2f}x {copied} (promised: at most {limit:g})")
    least = costs[floor].ratio(costs[copied])
    clock, processor = (ratio(costs[floor]) for ratio in (costs[name].ratio, costs[name].processor_ratio))
    print(
        f"{floor}: {least:.2f}x {copied}; {name} takes {clock:.2f}x as long, {processor:.2f}x the processor"
    )
    return ratio <= limit


def _peak(cost: Cost) -> float:
    return max(run.mebibytes for run in cost.runs)


if __name__ == "__main__":
    sys.exit(main())
