"""Comparison of the spaces that an agent was trained on with those of an environment."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import numpy as np

from ckpttool.core import sidecar
from ckpttool.core.errors import EnvironmentMismatchError
from ckpttool.core.sidecar import LedgerEntry
from ckpttool.core.urls import format_command
from ckpttool.evaluation import restore, wrappers
from ckpttool.evaluation.gymnasium_engine import OBS, EnvSpec
from ckpttool.evaluation.protocol import EvaluationEnvironment, Protocol
from ckpttool.evaluation.restore import Agent
from ckpttool.evaluation.simulators import DEVICE_ENGINE
from ckpttool.evaluation.wrappers import Bounds, WrapperSpec
from ckpttool.libraries import schema

# Two bounds are equal within float32 rounding.
_ROUNDED, _NEAR_ZERO = 1e-5, 1e-6
# Observation bounds that a task had in older versions, with the same observations: gymnasium 0.29,
# envs/box2d/lunar_lander.py, whose bounds 1.0 doubled, but for those of the position.
_OLDER = {"LunarLander": ((-1.5, -1.5, -5, -5, -np.pi, -5, 0, 0), (1.5, 1.5, 5, 5, np.pi, 5, 1, 1))}


class SpaceComparison:
    """The stored action and observation bounds that contradict those of the environment.

    They mean that training used a wrapper which is not played, or another version of the task. That
    `--wrapper none` is given states that training used no wrapper.

    Sources: stable_baselines3/common/utils.py, check_for_correct_spaces (which refuses other spaces);
    gymnasium/wrappers/{transform_action,transform_observation,stateful_observation}.py.
    """

    def __init__(self, agent: Agent, env: EvaluationEnvironment, how: Protocol, spec: EnvSpec) -> None:
        self.agent, self.environment, self.how, self.spec = agent, env, how, spec
        self._own = spec.action_low, spec.action_high
        self._stored = self._contradicting_actions()
        known = agent.known
        trained = known.env.get("id") if known.env and known.is_read("env") else None
        # Whether the user or the files explain other bounds: without wrappers, or in another version or
        # library of the task.
        self._no_wrapper = how.wrappers is not None and all(row == wrappers.NONE for row in how.wrappers)
        library = (known.observation_space or {}).get("library")
        self._explained = self._no_wrapper or library == "gym" or trained not in (None, spec.id)

    def _contradicting_actions(self) -> Bounds | None:
        """Return the stored action bounds if they contradict the environment's."""
        known = self.agent.known
        low, high = known.action_low, known.action_high
        origin = known.origin("action_low")
        if low is None or high is None or not known.is_read("action_low"):
            return None
        stored = (np.asarray(low), np.asarray(high))
        if _are_close(stored, self._own) or origin.endswith(sidecar.OUTPUT_RANGE):
            return None
        # Programs that scale by one number take the first upper bound (Spinning Up, TD3).
        one = "action_space" not in origin and np.all(stored[1] == high[0]) and np.all(stored[0] == -high[0])
        return None if one and np.isclose(high[0], self._own[1][0], _ROUNDED, _NEAR_ZERO) else stored

    def _observations(self) -> Iterator[tuple[str, Bounds, Bounds]]:
        """Yield each input whose stored bounds contradict the environment's: its name, stored, own."""
        known = self.agent.known
        if not known.is_read("observation_space"):
            return
        for name, ends in schema.observation_bounds(known.observation_space).items():
            own, sizes = self.spec.observation_bounds.get(name), {*map(len, ends)}
            # The axes of images may have another order: only one bound for all values can be compared.
            if own is None or not sizes <= {1, own[0].size if own[0].ndim == 1 else 1}:
                continue
            low, high = (_to_infinite(bound.reshape(-1)) for bound in own)
            stored = np.array(ends[0]), np.array(ends[1])
            # Statistics in use explain unbounded observations: NormalizeObservation's space has no bounds.
            explained = known.obs_norm is not None and bool(
                np.isinf(stored[0]).all() and np.isinf(stored[1]).all()
            )
            if not explained and not _are_close(stored, (low, high)):
                yield name, stored, (low, high)

    def _is_older(self, name: str, stored: Bounds) -> bool:
        """Return whether these are the bounds of the observations in an older version of the task."""
        older = _OLDER.get(self.spec.id.rpartition("/")[2].partition("-v")[0].removesuffix("Continuous"))
        if older is None or name != OBS or len(stored[0]) != len(older[0]):
            return False
        return _are_close(stored, (np.array(older[0]), np.array(older[1])))

    def require_same_actions(self) -> None:
        """Raise EnvironmentMismatchError if the stored action bounds contradict the environment's."""
        stored = self._stored
        if stored is None or self._no_wrapper:
            return
        wrapper = WrapperSpec(
            "RescaleAction", {"min_action": _short(stored[0]), "max_action": _short(stored[1])}
        )
        possible = np.isfinite(self._own).all() and self.how.engine != DEVICE_ENGINE
        raise EnvironmentMismatchError(
            f"the action bounds of {self.spec.id} are not those of training",
            file=self.agent.checkpoint.path,
            expected=_format_range(self._own),
            found=f"{_format_range(stored)} ({self.agent.known.origin('action_low')})",
            hint=self._hint(wrapper) if possible else _NO_WRAPPER,
        )

    def observation_entries(self) -> Iterator[LedgerEntry]:
        """Yield an entry for each input whose stored bounds no wrapper explains.

        Raise EnvironmentMismatchError if RescaleObservation explains them.
        """
        if self._explained:
            return
        origin = self.agent.known.origin("observation_space")
        for name, stored, own in self._observations():
            if self._is_older(name, stored):
                continue
            low, high = _short(stored[0]), _short(stored[1])
            rescaled = self._hint(WrapperSpec("RescaleObservation", {"min_obs": low, "max_obs": high}))
            finite = np.isfinite([*stored[0], *stored[1], *own[0], *own[1]]).all()
            if finite and len(stored[0]) == len(stored[1]) == 1 and list(self.spec.shapes) == [OBS]:
                raise EnvironmentMismatchError(
                    f"the observation bounds of {self.spec.id} are not those of training",
                    file=self.agent.checkpoint.path,
                    expected=_format_range(own),
                    found=f"{_format_range(stored)} ({origin})",
                    hint=rescaled,
                )
            cause = "RescaleObservation" if finite else "NormalizeObservation"
            value = (
                f"why {name} had bounds {_format_range(stored)} in training, and has {_format_range(own)} in "
                f"{self.spec.id}: a wrapper ({cause}), or another version of the task"
            )
            first = rescaled if finite else "--obs-norm FILE (the wrapper's statistics)"
            hint = f"{first}; {_NO_WRAPPER}"
            yield LedgerEntry("cannot be known", "wrapper", value, origin, decides=True, hint=hint)

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each contradiction that the user or the files explain."""
        if self._stored is not None:
            own = _format_range(self._own)
            yield f"action bounds {_format_range(self._stored)} as stored; those of {self.spec.id} are {own}"
        for name, bounds, other in self._observations():
            if self._explained or self._is_older(name, bounds):
                ranges = f"{_format_range(bounds)} in training, {_format_range(other)} in {self.spec.id}"
                yield f"bounds of {name}: {ranges}"

    def _hint(self, wrapper: WrapperSpec) -> str:
        """Return the command that plays inside one more wrapper; its option alone beside given statistics."""
        around = (*wrappers.deserialize_wrappers(self.environment.wrappers), wrapper)
        options = [word for outer in around for word in ("--wrapper", wrappers.format_wrapper(outer))]
        known = self.agent.known
        if known.is_given("obs_norm"):  # from a file whose name is not recorded
            return shlex.join(("add", *options))
        if known.is_given("activations"):
            options += ["--activation", ",".join(known.activations or ())]
        if known.is_given("head"):
            options += ["--head", str(known.head)]
        if known.is_given("action_low"):
            ends = (known.action_low or (), known.action_high or ())
            options += ["--bounds", *(",".join(f"{number:g}" for number in end) for end in ends)]
        if self.how.network != "actor":
            options += ["--network", self.how.network]
        if self.how.adapter is not None:
            options += ["--adapter", self.how.adapter]
        return format_command("eval", self.agent.checkpoint.path, "--env", self.environment.env, *options)


_NO_WRAPPER = "--wrapper none if training used no wrapper"


def _to_infinite(bound: np.ndarray) -> np.ndarray:
    wide = np.asarray(bound, np.float64)
    return np.where(np.abs(wide) < schema.INFINITE, wide, np.copysign(np.inf, wide))


def _are_close(ones: Bounds, others: Bounds) -> bool:
    return all(np.allclose(a, b, _ROUNDED, _NEAR_ZERO) for a, b in zip(ones, others, strict=True))


def _short(bound: np.ndarray) -> float | list[float]:
    """Return one number if all are equal, as short as float32 permits."""
    row = [
        int(value) if value.is_integer() else value for value in (float(f"{n:.7g}") for n in bound.tolist())
    ]
    return row[0] if len(set(row)) == 1 else row


def _format_range(bounds: Bounds) -> str:
    ends = (bound[:1] if len(set(bound.tolist())) == 1 else bound for bound in bounds)
    return " to ".join(restore.format_numbers([f"{number:g}" for number in end]) for end in ends)
