"""How far the results of two sides may differ, and how a difference is measured."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

OWN_ERROR = 2.0
"""How many times A's own error B's may be."""
BOUNDS = {"float32": 1e-4, "float64": 1e-10}
"""Relative distance of updates, by the type in which they are computed."""
STATE_BOUND = 1e-3
"""Relative distance of optimizers' state."""


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two settings are equal up to the rounding of float32."""
    if any(not isinstance(value, int | float) or isinstance(value, bool) for value in (one, other)):
        return bool(one == other) or (not one and not other)
    return math.isclose(float(one), float(other), rel_tol=2e-7, abs_tol=0)


def relative_distance(right: np.ndarray, other: np.ndarray) -> float:
    """Return |right - other| / |right|; 0 if both are zero, infinity if one is not finite."""
    apart = float(np.linalg.norm((right - other).reshape(-1)))
    length = float(np.linalg.norm(right.reshape(-1)))
    if not math.isfinite(apart):
        return math.inf
    return apart / length if length else (math.inf if apart else 0.0)
