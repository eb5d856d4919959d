"""Processor time and memory of every command as its input grows: by tensors, bytes, and files of a folder.

`python -m benchmarks.scaling [tensors|bytes|folders [SIZE ...]]` prints a table for each kind of growth, with
exponents, and peers in the same run. The largest sizes need several GB of disk in the temporary folder.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Run, once

# The largest exponent of the processor time beyond a start, over the two largest sizes, and its noise.
EXPONENT, NOISE = 1.1, 0.05
SAMPLE = Path(__file__).resolve().parent.parent / "sample_ckpts/td3_pendulum_torch/ckpt-15000.pt"
MATRIX = (1024, 1024)

_TOOL = [sys.executable, "-m", "ckpttool"]
_TORCH = "import sys, torch; from safetensors.torch import load_file, save_file; "
_WRITE_TORCH = f"{_TORCH}torch.save(load_file(sys.argv[1]), sys.argv[1].replace('.safetensors', '.pt'))"
# A shell turns the status of a finding into success.
_FINDING = ["/bin/sh", "-c", '"$@" || [ $? = 1 ]', "sh", *_TOOL]

Commands = dict[str, list[str]]


class Growth(NamedTuple):
    """A kind of growth: its unit, its sizes, what makes an input of a size, and what is run on it."""

    unit: str
    sizes: Sequence[int]
    write: Callable[[Path, int], str]
    commands: Callable[[str], Commands]


def write_safetensors(target: Path, shapes: Iterable[tuple[int, ...]]) -> str:
    """Write float32 tensors of layers as safetensors, and beside it with PyTorch as .pt; return the first."""
    head: dict[str, object] = {}
    end = 0
    for n, shape in enumerate(shapes):
        start, end = end, end + 4 * math.prod(shape)
        name = f"layers.{n // 2}.{'bias' if n % 2 else 'weight'}"
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(head)
    text = text.ljust(-(-len(text) // 8) * 8)
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32).tobytes()
    with target.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text.encode())
        for start in range(0, end, len(block)):
            stream.write(block[: end - start])
    subprocess.run([sys.executable, "-c", _WRITE_TORCH, str(target)], check=True)
    return str(target)


def write_tensors(folder: Path, count: int) -> str:
    """Write `count` tensors of 16 elements."""
    return write_safetensors(folder / f"{count}.safetensors", (((4, 4), (16,))[n % 2] for n in range(count)))


def write_bytes(folder: Path, mebibytes: int) -> str:
    """Write matrices of 4 MiB, `mebibytes` in all."""
    return write_safetensors(folder / f"{mebibytes}.safetensors", [MATRIX] * max(1, mebibytes // 4))


def write_folder(folder: Path, count: int) -> str:
    """Write a run: copies of a TD3 agent with its optimizers, by step."""
    run = folder / f"run{count}"
    run.mkdir()
    for step in range(1, count + 1):
        shutil.copy(SAMPLE, run / f"ckpt-{step * 1000}.pt")
    return str(run)


def list_file_commands(path: str) -> Commands:
    """Return the commands that are measured on a checkpoint, and those of its peers."""
    out = f"{path}.out"
    torch_file = path.replace(".safetensors", ".pt")
    quick = ["--force", "--no-sync"]
    return {
        "inspect": [*_TOOL, "inspect", path],
        "inspect --json": [*_TOOL, "inspect", path, "--json"],
        "inspect, .pt": [*_TOOL, "inspect", torch_file],
        "digest": [*_TOOL, "digest", path],
        "digest, .pt": [*_TOOL, "digest", torch_file],
        "check": [*_TOOL, "check", path],
        "stats --json": [*_TOOL, "stats", path, "--json"],
        "textconv": [*_TOOL, "textconv", path],
        "doctor": [*_FINDING, "doctor", path],
        "diff with .pt": [*_FINDING, "diff", path, torch_file],
        "report": [*_TOOL, "report", path, "--out", f"{out}.html", "--force"],
        "convert to PyTorch": [*_TOOL, "convert", path, f"{out}.pt", *quick],
        "convert .pt to safetensors": [*_TOOL, "convert", torch_file, f"{out}.safetensors", *quick],
        "convert to npz": [*_TOOL, "convert", path, f"{out}.npz", *quick],
        **{f"peer: {name}": [sys.executable, "-c", code, path] for name, code in list_peers().items()},
    }


def list_peers() -> dict[str, str]:
    """Return programs of installed libraries that do the same, with the path as argument, by name."""
    torch_file = "sys.argv[1].replace('.safetensors', '.pt')"
    load = f"torch.load({torch_file}, weights_only=True)"
    flat = "{key: value.numpy() for key, value in load_file(sys.argv[1]).items()}"
    peers = {
        "torch.load": f"{_TORCH}{load}",
        "load_file, torch.save": f"{_TORCH}torch.save(load_file(sys.argv[1]), sys.argv[1] + '.peer')",
        "torch.load, save_file": f"{_TORCH}save_file({load}, sys.argv[1] + '.peer')",
        "safe_open, every tensor": (
            "import sys; from safetensors import safe_open; f = safe_open(sys.argv[1], 'numpy'); "
            "[f.get_tensor(key) for key in f.keys()]"
        ),
        "load_file, numpy.savez": f"{_TORCH}import numpy; numpy.savez(sys.argv[1] + '.npz', **{flat})",
    }
    if importlib.util.find_spec("h5py"):
        peers["load_file, h5py"] = (
            f"{_TORCH}import h5py; f = h5py.File(sys.argv[1] + '.h5', 'w'); "
            "add = lambda key, value: f.create_dataset(key.replace('.', '/'), data=value); "
            f"[add(*item) for item in {flat}.items()]; f.close()"
        )
    if importlib.util.find_spec("tensorflow"):
        peers["load_file, tf.raw_ops.SaveV2"] = (
            f"{_TORCH}import tensorflow as tf; a = {flat}; tf.raw_ops.SaveV2(prefix=sys.argv[1] + '.tf', "
            "tensor_names=[*a], shape_and_slices=[''] * len(a), tensors=[*a.values()])"
        )
    return peers


def list_folder_commands(path: str) -> Commands:
    """Return the commands that are measured on a folder of checkpoints, and those of its peers."""
    modelaudit = shutil.which("modelaudit")
    load = (
        "import sys, torch, pathlib; "
        "[torch.load(file, weights_only=True) for file in pathlib.Path(sys.argv[1]).iterdir()]"
    )
    return {
        "inspect": [*_TOOL, "inspect", path],
        "check": [*_TOOL, "check", path],
        "check --jobs 1": [*_TOOL, "check", path, "--jobs", "1"],
        "report": [*_TOOL, "report", path, "--out", f"{path}.html", "--force"],
        "peer: torch.load of each": [sys.executable, "-c", load, path],
        **({"peer: modelaudit scan": [*_FINDING[:4], modelaudit, "scan", path]} if modelaudit else {}),
    }


GROWTHS = {
    "tensors": Growth("tensors", (10, 1_000, 10_000, 100_000, 200_000), write_tensors, list_file_commands),
    "bytes": Growth("MiB", (8, 64, 512, 4_096), write_bytes, list_file_commands),
    "folders": Growth("checkpoints", (10, 100, 1_000, 2_000), write_folder, list_folder_commands),
}


def exponent(few: float, many: float, ratio: float) -> float:
    """Return the power of the size with which a time grows by a factor of sizes."""
    return math.log(many / few) / math.log(ratio)


def measure(growth: Growth, sizes: Sequence[int]) -> dict[str, dict[int, Run]]:
    """Return the runs of every command by size; an input and what was written of it are removed."""
    runs: dict[str, dict[int, Run]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            for title, command in growth.commands(growth.write(Path(name), size)).items():
                runs.setdefault(title, {})[size] = once(command)
    return runs


def report(growth: Growth, runs: Mapping[str, Mapping[int, Run]], sizes: Sequence[int], start: float) -> bool:
    """Print a row per command; return whether the exponents of all of ours are kept."""
    kept = True
    print(f"\n| CPU s, {growth.unit} |", *(f"{size:,} |" for size in sizes), "exponent | MiB | seconds |")
    print("|---" * (len(sizes) + 4) + "|")
    for title, by_size in runs.items():
        few, many = (max(by_size[size].processor - start, 1e-3) for size in sizes[-2:])
        power = exponent(few, many, sizes[-1] / sizes[-2])
        kept &= title.startswith("peer") or power <= EXPONENT + NOISE
        last = by_size[sizes[-1]]
        times = (f"{by_size[size].processor:.2f} |" for size in sizes)
        print(
            f"| {title} |", *times, f"{power:.2f} | {last.mebibytes:.0f} | {last.seconds:.1f} |", flush=True
        )
    return kept


def main(kind: str | None = None, *sizes: str) -> int:
    """Print the tables; return 1 if a command grows faster than promised."""
    start = once([*_TOOL, "--version"]).processor
    kept = True
    for growth in [GROWTHS[kind]] if kind else GROWTHS.values():
        chosen = [int(size) for size in sizes] or growth.sizes
        kept &= report(growth, measure(growth, chosen), chosen, start)
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
