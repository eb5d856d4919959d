"""Train TD3 in TensorFlow, continue in PyTorch, and back, including the optimizers; verify each conversion.

Every leg runs in a separate process, because the two frameworks conflict in one. Stop at the first command
that fails.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

TRAIN = Path(__file__).resolve().parent.parent / "train_td3.py"


class Leg(NamedTuple):
    """One leg of training: its folder, and the suffix of its checkpoints."""

    backend: str
    folder: str
    suffix: str


# TensorFlow's checkpoints are prefixes, PyTorch's are files.
LEGS = (
    Leg("tensorflow", "1_tensorflow", ""),
    Leg("torch", "2_torch", ".pt"),
    Leg("tensorflow", "3_tensorflow", ""),
)


def commands(out: Path, steps: int, updates: int, options: Sequence[str]) -> Iterator[list[str]]:
    """Yield the arguments of every step, in order."""
    start: str | None = None
    for number, leg in enumerate(LEGS, 1):
        folder = out / leg.folder
        train = [str(TRAIN), "--backend", leg.backend, "--steps", str(steps), "--save-every", str(steps)]
        resumed = [] if start is None else ["--resume", start]
        yield [*train, "--out", str(folder), *resumed, *options]
        if number == len(LEGS):
            return
        written, next_leg = f"{folder}/ckpt-{number * steps}{leg.suffix}", LEGS[number]
        start = f"{out}/converted_{number}/ckpt-{number * steps}{next_leg.suffix}"
        Path(start).parent.mkdir(parents=True, exist_ok=True)
        to = "torch" if next_leg.suffix else "tf"
        yield ["-m", "ckpttool", "convert", written, start, "--to", to]
        if updates:
            yield ["-m", "ckpttool", "verify", written, start, "--train-step", "--steps", str(updates)]


def scores(out: Path) -> Iterator[str]:
    """Yield the last score of every leg."""
    for leg in LEGS:
        last = json.loads((out / leg.folder / "CERTIFICATE.json").read_text())["checkpoints"][-1]
        yield f"{leg.folder}: step {last['step']:,}, mean return {last['mean']:.1f}"


def main() -> int:
    """Run every step, then print the score of each leg."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/resume"), help="a new folder")
    parser.add_argument("--steps", type=int, default=5_000, help="environment steps of each leg")
    parser.add_argument(
        "--updates", type=int, default=100, help="updates that each conversion is proven with"
    )
    settings, options = parser.parse_known_args()  # the rest is for train_td3.py: --env, --hidden, ...
    for arguments in commands(settings.out, settings.steps, settings.updates, options):
        print(f"\n$ {shlex.join(['python', *arguments])}\n", flush=True)
        done = subprocess.run([sys.executable, *arguments], check=False)  # noqa: S603  # our own commands
        if done.returncode != 0:
            return done.returncode
    print("\n" + "\n".join(scores(settings.out)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
