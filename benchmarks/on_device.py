"""Pendulum's steps per second where the policy lives, beside rows in arrays and Gymnasium's own objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from ckpttool.ops.evaluate import evaluate
from ckpttool.ops.evaluation import Protocol

AGENT = Path(__file__).parents[1] / "sample_ckpts" / "td3_pendulum_torch" / "ckpt-15000.pt"
ROWS = (1024, 16384)
# Gymnasium's objects take minutes for more.
GYMNASIUM_ROWS = 1024


def ways(rows: int) -> Iterator[tuple[str, str, str]]:
    """Yield engine, backend and device of all that can play so many rows here."""
    import torch

    if torch.cuda.is_available():
        yield "device", "torch", "cuda"
    yield "device", "torch", "cpu"
    yield "pendulum.batch", "numpy", "cpu"
    if rows <= GYMNASIUM_ROWS:
        yield "gymnasium", "numpy", "cpu"


def main() -> int:
    """Print one episode per row for every way; nothing is promised here."""
    for rows in ROWS:
        for engine, backend, device in ways(rows):
            how = Protocol(rows, num_envs=rows, device=device, backend=backend, engine=engine)
            played = max(
                (evaluate(str(AGENT), protocol=how).rollout for _ in range(2)), key=lambda r: r.steps_per_s
            )
            print(
                f"{rows:>6} rows  {engine:<15} {backend} on {device:<5} {played.steps_per_s:>12,.0f} steps/s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
