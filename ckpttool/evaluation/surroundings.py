"""The environment of a result, and a hash by which two environments are compared."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

from ckpttool.evaluation.gymnasium_engine import EnvSpec


def collect_surroundings(spec: EnvSpec, engine: str) -> dict[str, Any]:
    """Return the facts that decide the effect of an action: task, limits, simulator, versions and machine.

    Numbers are text, so that infinite bounds are the same in every document.
    """
    bounds = {"low": spec.action_low, "high": spec.action_high}
    return {
        "id": spec.id,
        "arguments": dict(spec.arguments),
        "max_episode_steps": spec.max_episode_steps,
        "observation": [[name, list(shape), dtype] for name, shape, dtype in spec.observation],
        "action": {name: [str(value) for value in bound.tolist()] for name, bound in bounds.items()},
        "engine": engine,
        "versions": {**spec.versions, "numpy": _numpy_version()},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@functools.cache
def _numpy_version() -> str:
    # Cached: the lookup among installed packages would be repeated for every evaluation of a sweep.
    return importlib.metadata.version("numpy")


def hash_surroundings(facts: Mapping[str, Any]) -> str:
    """Return the sha256 of these facts: equal for results measured in the same surroundings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
