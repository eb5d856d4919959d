"""Processor time of every command against the number of tensors: exponents, and peers in the same run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import Run, once

COUNTS = (1_000, 10_000, 100_000)
# The largest exponent of the time beyond a start from the last count but one to the last, and its noise.
EXPONENT, NOISE = 1.1, 0.05
SHAPES = ([16], [4, 4])

_TORCH = "import sys, torch; from safetensors.torch import load_file, save_file; "
PEERS = {
    "torch.load": f"{_TORCH}torch.load(sys.argv[1].replace('.safetensors', '.pt'), weights_only=True)",
    "torch.save of load_file": f"{_TORCH}torch.save(load_file(sys.argv[1]), sys.argv[1] + '.peer')",
    "safetensors, every tensor": (
        "import sys; from safetensors import safe_open; f = safe_open(sys.argv[1], 'numpy'); "
        "[f.get_tensor(key) for key in f.keys()]"
    ),
}
_WRITE_TORCH = f"{_TORCH}torch.save(load_file(sys.argv[1]), sys.argv[1].replace('.safetensors', '.pt'))"


def write(folder: Path, count: int) -> str:
    """Write `count` small tensors as safetensors, and beside it with PyTorch as .pt; return the first."""
    head: dict[str, object] = {}
    for n in range(count):
        name = f"layers.{n // 2}.{'weight' if n % 2 else 'bias'}"
        head[name] = {"dtype": "F32", "shape": SHAPES[n % 2], "data_offsets": [64 * n, 64 * n + 64]}
    text = json.dumps(head)
    text = text.ljust(-(-len(text) // 8) * 8)
    target = folder / f"{count}.safetensors"
    numbers = np.random.default_rng(0).standard_normal(16 * count).astype(np.float32)
    target.write_bytes(len(text).to_bytes(8, "little") + text.encode() + numbers.tobytes())
    subprocess.run([sys.executable, "-c", _WRITE_TORCH, str(target)], check=True)
    return str(target)


def list_commands(path: str) -> dict[str, list[str]]:
    """Return the commands that are measured on a checkpoint, and those of its peers."""
    tool, out = [sys.executable, "-m", "ckpttool"], f"{path}.out"
    torch_file = path.replace(".safetensors", ".pt")
    quick = ["--force", "--no-sync"]
    return {
        "inspect": [*tool, "inspect", path],
        "inspect --json": [*tool, "inspect", path, "--json"],
        "inspect, .pt": [*tool, "inspect", torch_file],
        "digest": [*tool, "digest", path],
        "digest, .pt": [*tool, "digest", torch_file],
        "check": [*tool, "check", path],
        "stats --json": [*tool, "stats", path, "--json"],
        "textconv": [*tool, "textconv", path],
        # A shell turns the status of a finding into success.
        "doctor": ["/bin/sh", "-c", '"$@" || [ $? = 1 ]', "sh", *tool, "doctor", path],
        "diff": [*tool, "diff", path, torch_file],
        "report": [*tool, "report", path, "--out", f"{out}.html", "--force"],
        "convert to PyTorch": [*tool, "convert", path, f"{out}.pt", *quick],
        "convert to safetensors": [*tool, "convert", torch_file, f"{out}.safetensors", *quick],
        "convert to npz": [*tool, "convert", path, f"{out}.npz", *quick],
        **{name: [sys.executable, "-c", code, path] for name, code in PEERS.items()},
    }


def exponent(few: float, many: float, ratio: float) -> float:
    """Return the power of the size with which a time grows by a factor of sizes."""
    return math.log(many / few) / math.log(ratio)


def measure(counts: Sequence[int]) -> dict[str, dict[int, Run]]:
    """Return the runs of every command by count, and of a start."""
    runs: dict[str, dict[int, Run]] = {}
    with tempfile.TemporaryDirectory() as name:
        for count in counts:
            for title, command in list_commands(write(Path(name), count)).items():
                runs.setdefault(title, {})[count] = once(command)
    return runs


def report(runs: Mapping[str, Mapping[int, Run]], counts: Sequence[int], start: float) -> bool:
    """Print a row per command; return whether the exponents of all of ours are kept."""
    kept = True
    print(f"{'CPU s, tensors':<28}", *(f"{count:>9,}" for count in counts), " exponent   MiB")
    for title, by_count in runs.items():
        few, many = (max(by_count[count].processor - start, 1e-3) for count in counts[-2:])
        power = exponent(few, many, counts[-1] / counts[-2])
        kept &= title in PEERS or power <= EXPONENT + NOISE
        times = (f"{by_count[count].processor:9.2f}" for count in counts)
        print(f"{title:<28}", *times, f"{power:9.2f}{by_count[counts[-1]].mebibytes:6.0f}", flush=True)
    return kept


def main(*counts: int) -> int:
    """Print the table; return 1 if a command grows faster than promised."""
    sizes = counts or COUNTS
    start = once([sys.executable, "-m", "ckpttool", "--version"]).processor
    return int(not report(measure(sizes), sizes, start))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
