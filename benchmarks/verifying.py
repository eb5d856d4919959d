"""`verify` and `convert --like` of large models, beside importing both frameworks.

`--record` keeps the figures; `--document` writes verification.md from them, from `python -m
tests.planted_faults --record`, `python -m tests.replayed_faults --record` and `python -m tests.right_pairs
--record`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Cost, compare, table

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "benchmarks" / "verification.json"
DOCUMENT = ROOT / "benchmarks" / "results" / "verification.md"
WIDTH, DEPTH = 2048, 6
FLOOR = "import both frameworks"
VERIFY = "ckpttool verify (25 million parameters)"
SMALL = "ckpttool verify (25 thousand parameters)"
# Of the time to import both frameworks, one after the other.
LIMIT = 2.5
_WRITE = """
import sys, numpy as np
framework, folder, width, depth = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
draw = np.random.default_rng(0)
kernels = [(draw.standard_normal((width, width)) / width**0.5).astype("float32") for _ in range(depth)]
biases = [(draw.standard_normal(width) / 10).astype("float32") for _ in range(depth)]
if framework == "torch":
    import torch
    from benchmarks.verifying import linear
    model = linear(width, depth)
    rows = {}
    for number, (kernel, bias) in enumerate(zip(kernels, biases)):
        rows[f"{2 * number}.weight"] = torch.from_numpy(kernel.T.copy())
        rows[f"{2 * number}.bias"] = torch.from_numpy(bias)
    model.load_state_dict(rows)
    torch.save(model.state_dict(), f"{folder}/{width}.pt")
else:
    import keras
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    for layer, kernel, bias in zip(layers, kernels, biases):
        layer.set_weights([kernel, bias])
    model.save(f"{folder}/{width}.keras")
"""
# Models of applications: in Keras with random numbers; PyTorch's state_dict is converted from it.
LARGE = {"resnet50": "3,96,96", "transformer": "32"}
_WRITE_LARGE = """
import sys, numpy as np
from benchmarks import verifying
verifying.write_large(sys.argv[1], sys.argv[2])
"""
WORDS, WIDTH_OF_WORDS, BLOCKS = 20_000, 768, 12


def linear(width: int, depth: int) -> Any:
    """Return linear layers with a ReLU after each."""
    from torch import nn

    return nn.Sequential(
        *(layer for _ in range(depth) for layer in (nn.Linear(width, width, bias=True), nn.ReLU()))
    )


def resnet50() -> Any:
    """Return torchvision's ResNet50 with what keras.applications has: strides first, biases, epsilon."""
    import torch
    from torch import nn

    def norm(width: int) -> nn.Module:
        return nn.BatchNorm2d(width, eps=1.001e-5)

    class Bottleneck(nn.Module):
        def __init__(self, inputs: int, width: int, stride: int, projects: bool) -> None:
            super().__init__()
            if projects:
                self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride), norm(4 * width))
            self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, stride), norm(width)
            self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), norm(width)
            self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1), norm(4 * width)
            self.projects = projects

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            y = torch.relu(self.bn2(self.conv2(y)))
            return torch.relu(self.bn3(self.conv3(y)) + (self.downsample(x) if self.projects else x))

    rows: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(depth):
            rows.append(Bottleneck(inputs, width, 2 if stage and not block else 1, not block))
            inputs = 4 * width
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000), nn.Softmax(-1)
    return nn.Sequential(*rows, *head)


def transformer() -> Any:
    """Return an encoder of words with 100 million parameters."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.norm2 = (nn.LayerNorm(WIDTH_OF_WORDS, eps=1e-5) for _ in range(2))
            self.attention = nn.MultiheadAttention(WIDTH_OF_WORDS, 12, batch_first=True)
            self.up = nn.Linear(WIDTH_OF_WORDS, 4 * WIDTH_OF_WORDS)
            self.down = nn.Linear(4 * WIDTH_OF_WORDS, WIDTH_OF_WORDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            x = x + self.attention(y, y, y, need_weights=False)[0]
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(WORDS, WIDTH_OF_WORDS)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.norm, self.head = nn.LayerNorm(WIDTH_OF_WORDS, eps=1e-5), nn.Linear(WIDTH_OF_WORDS, 16)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Encoder()


def _keras_transformer() -> Any:
    from keras import Model, activations, layers

    def norm(name: str) -> Any:
        return layers.LayerNormalization(epsilon=1e-5, name=name)

    words = layers.Input((32,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH_OF_WORDS, name="embed")(words)
    for number in range(BLOCKS):
        name = f"blocks_{number}"
        y = norm(f"{name}_norm")(x)
        x = x + layers.MultiHeadAttention(12, WIDTH_OF_WORDS // 12, name=f"{name}_attention")(y, y)
        y = layers.Dense(4 * WIDTH_OF_WORDS, name=f"{name}_up")(norm(f"{name}_norm2")(x))
        x = x + layers.Dense(WIDTH_OF_WORDS, name=f"{name}_down")(activations.gelu(y))
    return Model(words, layers.Dense(16, name="head")(norm("norm")(x)))


def write_large(name: str, folder: str) -> None:
    """Write a model of `LARGE` in Keras, with random numbers in every vector too."""
    import keras
    import numpy as np

    shape = (96, 96, 3)
    model = (
        keras.applications.ResNet50(weights=None, input_shape=shape, pooling="avg", include_top=True)
        if name == "resnet50"
        else _keras_transformer()
    )
    draw = np.random.default_rng(0)
    for weight in model.weights:
        if len(weight.shape) < 2:
            # A variance is positive, and sums over 50 layers stay finite.
            weight.assign(draw.uniform(0.5, 1.0, weight.shape).astype("float32"))
    model.save(f"{folder}/{name}.keras")


def commands(folder: str) -> dict[str, list[str]]:
    """Write the models, and return what is timed."""
    programs = {
        FLOOR: [
            sys.executable,
            "-c",
            "import subprocess, sys\nfor name in ('tensorflow', 'torch'):\n"
            "    subprocess.run([sys.executable, '-c', f'import {name}'], check=True)",
        ]
    }
    for title, width in ((SMALL, WIDTH // 32), (VERIFY, WIDTH)):
        for framework in ("torch", "keras"):
            arguments = [framework, folder, str(width), str(DEPTH)]
            subprocess.run([sys.executable, "-c", _WRITE, *arguments], check=True, cwd=ROOT)
        tool = [*_TOOL, "verify", f"{folder}/{width}.keras", f"{folder}/{width}.pt"]
        settings = json.dumps({"width": width, "depth": DEPTH})
        programs[title] = [*tool, "--like-b", "benchmarks.verifying:linear", "--like-args-b", settings, "-q"]
    for name, shape in LARGE.items():
        programs |= large_commands(folder, name, shape)
    return programs


_TOOL = [sys.executable, "-m", "ckpttool"]


def large_commands(folder: str, name: str, shape: str) -> dict[str, list[str]]:
    """Write a large model in Keras and convert it; return the conversion and the comparison."""
    subprocess.run([sys.executable, "-c", _WRITE_LARGE, name, folder], check=True, cwd=ROOT)
    files, factory = [f"{folder}/{name}.{end}" for end in ("keras", "pt")], f"benchmarks.verifying:{name}"
    convert = [*_TOOL, "convert", *files, "--like", factory, "--input-shape", shape, "--force"]
    subprocess.run([*convert, "-q"], check=True, cwd=ROOT)
    verify = [*_TOOL, "verify", *files, "--like-b", factory, "-q"]
    return {f"ckpttool convert --like ({name})": [*convert, "-q"], f"ckpttool verify ({name})": verify}


def figures() -> dict[str, Any]:
    """Return what is recorded: `cost`, `faults` and `pairs`."""
    figures: dict[str, Any] = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    return figures


def record(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Replace one part of the record; how the costs were measured goes with them."""
    kept = {key: value for key, value in figures().items() if (name, key) != ("cost", "once")}
    text = json.dumps({**kept, name: list(rows)}, indent=1, ensure_ascii=False)
    FIGURES.write_text(text + "\n", encoding="utf-8")


def cost_rows(costs: dict[str, Cost]) -> list[dict[str, Any]]:
    """Return the medians, and ratios to the floor."""
    floor = costs[FLOOR]
    return [
        {
            "name": name,
            "seconds": round(cost.seconds, 2),
            "processor": round(cost.processor, 2),
            "mebibytes": round(cost.mebibytes),
            "ratio": round(cost.ratio(floor), 2),
            "processor_ratio": round(cost.processor_ratio(floor), 2),
        }
        for name, cost in costs.items()
    ]


# The document.

_HEAD = """# Results of `verify` for two models

`python -m benchmarks.verifying --document` writes this page from `benchmarks/verification.json`.
[Verify a conversion](../../docs/howto/prove_a_conversion.md) describes the command.

## Planted faults

`python -m tests.planted_faults --record` plants each fault in B, in both directions: A is the right model of
one framework, B its conversion to the other. Faults from "shortcut before the norm" on are planted in one
direction each, in turn. *Layer*: the first difference is named in that layer or directly
before it. *Cause*: the fault is named. *Proved*: the difference disappears when only that is changed.

"""
_REPLAYS = """
## Errors of the mapping that `convert --like` refuses

`python -m tests.replayed_faults --record` converts Keras models to PyTorch with one rule of the mapping
switched off, or with what a mapping without it would write. *Refused*: nothing is written, exit status 1.

"""
_PAIRS = """
## Pairs of equal models

`python -m tests.right_pairs --record`. *Relative* is the largest difference of the outputs, relative to their
size. A's and B's errors are those from the float64 run, or from A's own outputs where a model has none.
Models share one process per framework, so seconds do not include its start; machine loads differed.

"""
_COST = """
## Time and memory

`python -m benchmarks.verifying --record`: `verify` of {depth} dense layers of width {width} and of {small},
in Keras and in PyTorch, each in a new process, with a float64 run of each and the comparison of all layers.
Memory is that of the largest process. Ratios are medians of those of each round. `resnet50` is the ResNet50
of keras.applications at 96 pixels (file: 98 MiB), `transformer` an encoder with 100 million parameters
(file: 383 MiB), both with random weights; {once}

"""


def document() -> str:
    """Return the page."""
    recorded = figures()
    return "".join(
        (
            _HEAD,
            *_fault_lines(recorded["faults"]),
            *_replay_lines(recorded.get("replays", ())),
            _PAIRS,
            *_pair_lines(recorded["pairs"]),
            *_cost(recorded),
        )
    )


def _fault_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    faults: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        faults.setdefault(row["fault"], {})[row["direction"]] = row
    total = len(rows)
    counts = [
        sum(row[name] for row in rows) for name in ("detected", "layer_right", "cause_right", "confirmed")
    ]
    yield (
        f"Of {total} cases {counts[0]} are found, {counts[1]} in the right layer, {counts[2]} with the right "
        f"cause, {counts[3]} proved.\n\n"
    )
    yield "| fault | PyTorch to Keras: found, layer, cause, proved | Keras to PyTorch "
    yield "| cause (Keras to PyTorch) |\n"
    yield "|---|---|---|---|\n"
    for fault, outcomes in faults.items():
        cells = [_marks(outcomes.get(direction)) for direction in ("torch-keras", "keras-torch")]
        cause = (outcomes.get("keras-torch") or outcomes["torch-keras"])["cause"].partition(";")[0]
        yield f"| {fault} | {cells[0]} | {cells[1]} | {cause.replace('|', '/')} |\n"


def _marks(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not planted"
    names = ("detected", "layer_right", "cause_right", "confirmed")
    return ", ".join("yes" if row[name] else "no" for name in names)


def _replay_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    refused, right = (sum(row[name] for row in rows) for name in ("refused", "layer_right"))
    yield f"{_REPLAYS}Of {len(rows)} errors {refused} are refused, {right} with the right layer.\n\n"
    yield "| error | refused | layer | cause |\n|---|---|---|---|\n"
    for row in rows:
        marks = " | ".join("yes" if row[name] else "no" for name in ("refused", "layer_right"))
        yield f"| {row['fault']} | {marks} | {(row['cause'] or '').partition(';')[0].replace('|', '/')} |\n"


def _pair_lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    wrong = [row for row in rows if not row["within"]]
    yield f"{len(rows)} pairs, {len(wrong)} false alarms.\n\n"
    yield "| pair | kind | layers | relative | A's error | B's error | float64 | seconds |\n"
    yield "|---|---|---:|---:|---:|---:|---|---:|\n"
    for row in sorted(rows, key=lambda row: (row["kind"], row["name"])):
        errors = " | ".join(f"{row[name]:.1e}" for name in ("difference", "error_a", "error_b"))
        exact = "yes" if row["float64"] or row["kind"] == "agent" else "no"
        layers = row["layers"] or "-"
        yield f"| {row['name']} | {row['kind']} | {layers} | {errors} | {exact} | {row['seconds']:.1f} |\n"


def _cost(recorded: dict[str, Any]) -> Iterator[str]:
    if "cost" not in recorded:
        return
    once = "all rows are of one run." if not recorded.get("once") else recorded["once"]
    yield _COST.format(depth=DEPTH, width=WIDTH, small=WIDTH // 32, once=once)
    yield "| command | seconds | processor seconds | MiB | times the imports | in processor time |\n"
    yield "|---|---:|---:|---:|---:|---:|\n"
    for row in recorded["cost"]:
        numbers = f"{row['seconds']:.1f} | {row['processor']:.1f} | {row['mebibytes']:,}"
        yield f"| {row['name']} | {numbers} | {row['ratio']:.2f} | {row['processor_ratio']:.2f} |\n"


def main() -> int:
    """Print the table; return 1 if the promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help=f"keep the figures in {FIGURES.name}")
    parser.add_argument("--document", action="store_true", help=f"write {DOCUMENT.name}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.document:
        DOCUMENT.write_text(document(), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        costs = compare(commands(folder), options.rounds)
    print(table(costs, FLOOR))
    if options.record:
        record("cost", cost_rows(costs))
    ratio = costs[VERIFY].processor_ratio(costs[FLOOR])
    print(f"{VERIFY}: {ratio:.2f}x the processor time of {FLOOR} (promised: at most {LIMIT:g})")
    return int(ratio > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
