"""Processor time and memory of every command as its input grows: by tensors, bytes, and files of a folder.

`python -m benchmarks.scaling [tensors=SIZE,...] [bytes=MEGABYTES,...] [folders=SIZE,...]` prints a table for
each kind of growth, with exponents, and peers in the same run; without arguments, of all kinds and sizes.
`--only EXPRESSION` chooses commands by title, `--jobs N` runs N at a time, `--out FILE` writes every run as
JSON. The largest sizes need 25 GB of disk in the temporary folder.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Run, once

# The largest exponent of the processor time beyond a start, over the two largest sizes, and its noise.
EXPONENT, NOISE = 1.1, 0.05
SAMPLE = Path(__file__).resolve().parent.parent / "sample_ckpts/td3_pendulum_torch/ckpt-15000.pt"
MATRIX = (1000, 625)

_TOOL = [sys.executable, "-m", "ckpttool"]
_TORCH = "import sys, torch; from safetensors.torch import load_file, save_file; "
_WRITE_TORCH = f"{_TORCH}torch.save(load_file(sys.argv[1]), sys.argv[1].replace('.safetensors', '.pt'))"
# `sweep` of agents that are restored and grouped, and not played.
_SWEEP = (
    "import sys, ckpttool; ckpttool.sweep(sys.argv[1:], 'Pendulum-v1', spread=lambda batches, _: "
    "((batch, batch.failed(ckpttool.CkpttoolError('not played'))) for batch in batches))"
)
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


def write_bytes(folder: Path, megabytes: int) -> str:
    """Write matrices of 2.5 MB, `megabytes` in all."""
    return write_safetensors(folder / f"{megabytes}.safetensors", [MATRIX] * max(1, megabytes * 2 // 5))


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
        "verify --all with .pt": [*_FINDING, "verify", path, torch_file, "--all"],
        "report": [*_TOOL, "report", path, "--out", f"{out}.html", "--force"],
        "convert to PyTorch": [*_TOOL, "convert", path, f"{out}.pt", *quick],
        "convert .pt to safetensors": [*_TOOL, "convert", torch_file, f"{out}.safetensors", *quick],
        "convert to npz": [*_TOOL, "convert", path, f"{out}.npz", *quick],
        **{f"peer: {name}": [sys.executable, "-c", code, path] for name, code in list_peers().items()},
        **_list_audit(torch_file),
    }


def _list_audit(path: str) -> Commands:
    """Return the command of ModelAudit, if it is installed."""
    audit = shutil.which("modelaudit")
    return {"peer: modelaudit scan": [*_FINDING[:4], audit, "scan", path]} if audit else {}


# The only program that reads what another one of the same size writes.
AFTER = "tf.train.load_checkpoint, every tensor"


def list_peers() -> dict[str, str]:
    """Return programs of installed libraries that do the same, with the path as argument, by name."""
    torch_file = "sys.argv[1].replace('.safetensors', '.pt')"
    load = f"torch.load({torch_file}, weights_only=True)"
    flat = "{key: value.numpy() for key, value in load_file(sys.argv[1]).items()}"
    peers = {
        "torch.load": f"{_TORCH}{load}",
        "load_file, torch.save": f"{_TORCH}torch.save(load_file(sys.argv[1]), sys.argv[1] + '.peer.pt')",
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
        peers[AFTER] = (
            "import sys, tensorflow as tf; reader = tf.train.load_checkpoint(sys.argv[1] + '.tf'); "
            "[reader.get_tensor(name) for name in reader.get_variable_to_shape_map()]"
        )
    return peers


def list_folder_commands(path: str) -> Commands:
    """Return the commands that are measured on a folder of checkpoints, and those of its peers."""
    load = (
        "import sys, torch, pathlib; "
        "[torch.load(file, weights_only=True) for file in pathlib.Path(sys.argv[1]).iterdir()]"
    )
    return {
        "inspect": [*_TOOL, "inspect", path],
        "check": [*_TOOL, "check", path],
        "check --jobs 1": [*_TOOL, "check", path, "--jobs", "1"],
        "report": [*_TOOL, "report", path, "--out", f"{path}.html", "--force"],
        "sweep without playing": [sys.executable, "-c", _SWEEP, path],
        "peer: torch.load of each": [sys.executable, "-c", load, path],
        **_list_audit(path),
    }


GROWTHS = {
    "tensors": Growth(
        "tensors", (10, 100, 1_000, 10_000, 100_000, 200_000), write_tensors, list_file_commands
    ),
    "bytes": Growth("MB", (10, 100, 1_000, 4_000), write_bytes, list_file_commands),
    "folders": Growth("checkpoints", (10, 100, 1_000, 2_000), write_folder, list_folder_commands),
}


def exponent(few: float, many: float, ratio: float) -> float:
    """Return the power of the size with which a time grows by a factor of sizes."""
    return math.log(many / few) / math.log(ratio)


def measure(growth: Growth, sizes: Sequence[int], only: str = "", jobs: int = 1) -> dict[str, dict[int, Run]]:
    """Return the runs by command and size, `jobs` at a time; what was written is removed.

    `only` is an expression that matches the titles of the commands to run.
    """
    runs: dict[str, dict[int, Run]] = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
            commands = growth.commands(growth.write(Path(name), size))
            commands = {title: command for title, command in commands.items() if re.search(only, title)}
            last = {title: commands.pop(title) for title in (f"peer: {AFTER}",) if title in commands}
            for some in (commands, last):
                for title, run in zip(some, pool.map(once, some.values()), strict=True):
                    runs.setdefault(title, {})[size] = run
                    print(
                        f"{growth.unit} {size:,} {title}: {run.processor:.2f} s", file=sys.stderr, flush=True
                    )
    return runs


def report(growth: Growth, runs: Mapping[str, Mapping[int, Run]], sizes: Sequence[int], start: float) -> bool:
    """Print a row per command; return whether the exponents of all of ours are kept."""
    kept = True
    print(f"\n| CPU s, {growth.unit} |", *(f"{size:,} |" for size in sizes), "exponent | MiB | seconds |")
    print("|---" * (len(sizes) + 4) + "|")
    for title, by_size in runs.items():
        power = math.nan  # of a single size
        if len(sizes) > 1:
            few, many = (max(by_size[size].processor - start, 1e-3) for size in sizes[-2:])
            power = exponent(few, many, sizes[-1] / sizes[-2])
        kept &= title.startswith("peer") or not power > EXPONENT + NOISE
        last = by_size[sizes[-1]]
        times = (f"{by_size[size].processor:.2f} |" for size in sizes)
        print(
            f"| {title} |", *times, f"{power:.2f} | {last.mebibytes:.0f} | {last.seconds:.1f} |", flush=True
        )
    return kept


def main(arguments: Sequence[str]) -> int:
    """Print the tables; return 1 if a command grows faster than promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("kinds", nargs="*", metavar="KIND=SIZE,...")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    chosen = dict.fromkeys(GROWTHS, "") if not options.kinds else {}
    chosen |= {kind: sizes for kind, _, sizes in (text.partition("=") for text in options.kinds)}
    start = once([*_TOOL, "--version"]).processor
    kept, results = True, {}
    for kind, text in chosen.items():
        growth = GROWTHS[kind]
        sizes = [int(size) for size in text.split(",") if size] or growth.sizes
        results[kind] = measure(growth, sizes, options.only, options.jobs)
        kept &= report(growth, results[kind], sizes, start)
    if options.out is not None:
        options.out.write_text(json.dumps({"start": start, **results}) + "\n")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
