"""Memory and processor time of every command on one large tensor: no command may hold it whole."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.measure import compare

# Promises: peak memory in MiB whatever the size, and processor time of `stats` relative to `digest`.
MEMORY, STATS = 300, 3.0
COLUMNS = 4096


def write(target: Path, mebibytes: int, other: float = 0.0) -> str:
    """Write a float32 tensor of that size with NumPy, piece by piece, as safetensors; one element differs."""
    rows = mebibytes * (1 << 20) // (4 * COLUMNS)
    entry = {"dtype": "F32", "shape": [rows, COLUMNS], "data_offsets": [0, rows * COLUMNS * 4]}
    head = json.dumps({"w.weight": entry})
    head = head.ljust(-(-len(head) // 8) * 8)
    piece = np.random.default_rng(0).standard_normal((1024, COLUMNS), dtype=np.float32)
    with target.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head.encode())
        for start in range(0, rows, len(piece)):
            changed = piece.copy()
            changed[0, 0] += other
            stream.write(changed[: rows - start].tobytes())
    return str(target)


def main(mebibytes: int = 2048, rounds: int = 1) -> int:
    """Print a row per command; return 1 if a promise is broken."""
    tool = [sys.executable, "-m", "ckpttool"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = write(folder / "a.safetensors", mebibytes)
        second = write(folder / "b.safetensors", mebibytes, 1)
        targets = {"torch": "x.pt", "safetensors": "x.safetensors", "npz": "x.npz"}
        # A shell turns the status of a finding into success.
        finding = ["/bin/sh", "-c", '"$@" || [ $? = 1 ]', "sh", *tool]
        commands = {
            "digest": [*tool, "digest", first],
            "inspect": [*tool, "inspect", first],
            "stats": [*tool, "stats", first],
            "textconv": [*tool, "textconv", first],
            "check": [*tool, "check", first],
            "doctor": [*finding, "doctor", first],
            "report": [*tool, "report", first, "--out", str(folder / "x.html"), "--force"],
            "diff": [*finding, "diff", first, second],
            "verify --all": [*finding, "verify", first, second, "--all"],
            **{
                f"convert to {to}": [*tool, "convert", first, str(folder / file), "--force", "--no-sync"]
                for to, file in targets.items()
            },
        }
        costs = compare(commands, rounds)
    kept = costs["stats"].processor_ratio(costs["digest"]) <= STATS
    print(f"{'one tensor of ' + str(mebibytes) + ' MiB':<24}{'MiB':>6}{'CPU s':>8}{'x digest':>10}")
    for name, cost in costs.items():
        kept &= cost.mebibytes <= MEMORY
        print(
            f"{name:<24}{cost.mebibytes:6.0f}{cost.processor:8.2f}{cost.processor_ratio(costs['digest']):10.2f}"
        )
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
