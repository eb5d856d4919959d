"""The vector protocol of environments, and what an agent must fit to play in one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ckpttool.agents.policy import Observation
from ckpttool.errors import UnsupportedError

OBS = "obs"
"""The name of the one input of an environment whose observations are one array."""

Outcome = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rewards (float64), terminated and truncated (bool), each [len(rows)]."""


@dataclass(frozen=True, slots=True, eq=False)
class EnvSpec:
    """What an agent must fit: action_low, action_high [action_dim] in the environment's own type.

    `observation` are the inputs by name, each with its shape and type: one called "obs", or those of a
    Dict space in their order.
    """

    id: str
    observation: tuple[tuple[str, tuple[int, ...], str], ...]
    action_low: np.ndarray
    action_high: np.ndarray
    max_episode_steps: int | None
    versions: Mapping[str, str]
    render_fps: float | None = None
    """pictures per second at which a film of every step runs as fast as the task"""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """what the environment was made with beyond its defaults: names, and values as Python writes them"""
    assumed: tuple[str, ...] = ()
    """what was assumed of the environment because only the number of observations speaks for it"""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every input by name, without the batch."""
        return {name: shape for name, shape, _ in self.observation}

    @property
    def obs_dim(self) -> int:
        """The number of values in one observation."""
        return sum(math.prod(shape) for _, shape, _ in self.observation)

    @property
    def action_dim(self) -> int:
        """The number of actions per step."""
        return int(self.action_low.size)

    def zeros(self, num_envs: int) -> Observation:
        """Return room for the observations of `num_envs` rows: [num_envs, ...], or a dict of such arrays."""
        room = {name: np.zeros((num_envs, *shape), dtype) for name, shape, dtype in self.observation}
        return room[OBS] if list(room) == [OBS] else room


@dataclass(frozen=True, slots=True)
class Deviation:
    """The largest error of one quantity, absolute below 1 and relative above, and how large it may be."""

    quantity: str
    largest: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How closely an engine reproduces Gymnasium's own steps, measured on this machine before it plays."""

    steps: int
    deviations: tuple[Deviation, ...]

    @property
    def exact(self) -> bool:
        """Whether every number was equal to the last bit."""
        return all(each.largest == 0 for each in self.deviations)

    def require(self, env_id: str, engine: str) -> Agreement:
        """Return itself; raise UnsupportedError where a difference is more than rounding."""
        for each in self.deviations:
            if not each.largest <= each.tolerance:
                raise UnsupportedError(
                    f"the {engine} engine differs from this Gymnasium's {env_id} by more than rounding",
                    expected=f"{each.quantity} within {each.tolerance:g}",
                    found=f"{each.largest:.2g}",
                    hint="--engine gymnasium steps Gymnasium's own objects",
                )
        return self

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        each = {d.quantity: {"largest": d.largest, "tolerance": d.tolerance} for d in self.deviations}
        return {"steps": self.steps, "deviations": each}

    @staticmethod
    def read(document: Mapping[str, Any] | None) -> Agreement | None:
        """Return what `document` wrote; None for results without it."""
        if document is None:
            return None
        each = document["deviations"].items()
        found = tuple(Deviation(name, float(d["largest"]), float(d["tolerance"])) for name, d in each)
        return Agreement(int(document["steps"]), found)

    def note(self, engine: str) -> tuple[str, ...]:
        """Return a sentence about differences, or nothing where there are none."""
        errors = ", ".join(
            f"{d.quantity} {d.largest:.1g} (tolerance {d.tolerance:g})" for d in self.deviations if d.largest
        )
        what = f"{engine} agrees with Gymnasium to rounding: over {self.steps} compared steps, largest errors"
        return () if self.exact else (f"{what}: {errors}",)


def deviation(quantity: str, found: Any, expected: Any, tolerance: float) -> Deviation:
    """Compare two arrays of equal shape; what is equal, or not a number in both, has no error."""
    ours, theirs = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if ours.shape != theirs.shape:
        return Deviation(quantity, math.inf, tolerance)
    same = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        errors = np.where(same, 0.0, np.abs(ours - theirs) / np.maximum(1.0, np.abs(theirs)))
    # An infinite or undefined difference is no rounding.
    return Deviation(
        quantity, float(np.nan_to_num(errors, nan=math.inf, posinf=math.inf).max(initial=0.0)), tolerance
    )


class VectorEnv(Protocol):
    """Several environments of one kind, addressed by row; an engine needs only these names."""

    spec: EnvSpec
    num_envs: int
    engine: str
    """what steps the environments: part of what a result is measured with"""

    @property
    def agreement(self) -> Agreement | None:
        """How closely the engine reproduces Gymnasium; None for Gymnasium itself, or without it."""
        ...

    @property
    def obs(self) -> Observation:
        """The latest observation of every row, written in place; zeros before a reset."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the environment's libraries had to say, each sentence once."""
        ...

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the episode of seeds[i] in rows[i]; what it starts from depends on the seed alone."""
        ...

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` (int [k], ascending) by `actions[row]`, actions [num_envs, action_dim]."""
        ...

    def frame(self, row: int) -> np.ndarray:
        """Return a picture of the row as it is now: uint8 [height, width, 3]; UnsupportedError if none."""
        ...

    def close(self) -> None:
        """Let go of what the environments hold."""
        ...

    def __enter__(self) -> VectorEnv: ...

    def __exit__(self, *_: object) -> None: ...
