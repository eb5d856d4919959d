"""What an environment was when a result came of it, and one number by which two such environments compare."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from typing import Any

from ckpttool.agents.envs import EnvSpec


def surroundings(spec: EnvSpec, engine: str) -> dict[str, Any]:
    """Return the facts that decide what an action does: the task, its limits, what steps it, and where.

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
    # Looked up among the installed packages, and wanted for every evaluation of a sweep.
    return importlib.metadata.version("numpy")


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return the sha256 of such facts: equal for results that were measured in the same surroundings."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
