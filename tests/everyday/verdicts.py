"""What a referee can find, and with which tolerance it compares; imports no framework."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Outputs: float32's rounding through a few layers. Updates: epsilon stands elsewhere in each framework.
OUTPUTS = 1e-5
UPDATES = 1e-2


class LoadingError(Exception):
    """The framework does not load what was written, the way a user would."""


class DifferenceError(Exception):
    """What was written loads, and is not what the source was."""


def compare_outputs(actual: np.ndarray, expected: np.ndarray) -> None:
    """Raise DifferenceError where outputs differ by more than rounding."""
    largest = float(np.max(np.abs(actual.reshape(expected.shape) - expected))) / max(
        1.0, float(np.max(np.abs(expected)))
    )
    if not largest <= OUTPUTS:
        raise DifferenceError(f"outputs differ by {largest:.1e}")


def compare_steps(actual: np.ndarray, reference: dict[str, np.ndarray]) -> None:
    """Raise DifferenceError where two more updates move the outputs elsewhere."""
    moved = float(np.max(np.abs(reference["continued"] - reference["outputs"])))
    off = float(np.max(np.abs(actual - reference["continued"])))
    if not off <= UPDATES * moved:
        raise DifferenceError(f"the next updates differ by {off / moved:.1%} of their size")


def by_name(result: Sequence[tuple[str, Any]], network: str) -> list[tuple[str, Any]]:
    """Put first what belongs to a network by its name: `pi_opt` to `pi`."""
    last = network.rpartition("/")[2].rpartition(".")[2]
    others = ("qf", "critic", "alpha")
    return sorted(result, key=lambda f: (not (last and last in f[0]), any(word in f[0] for word in others)))
