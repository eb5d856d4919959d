"""Observations of one version of a task, given to a policy in the places where another version has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ckpttool.agents.envs import drift
from ckpttool.agents.envs.spec import OBS, Agreement, EnvSpec, Outcome, VectorEnv
from ckpttool.errors import UsageError
from ckpttool.shown import count

ZERO_FORCES = "zero_contact_forces"
POSITIONS = "current_positions"
ADAPTERS = {
    ZERO_FORCES: "contact forces are zeros, as they were before simulators reported them",
    POSITIONS: "the positions that are left out by default are shown",
}
"""Those that no size can decide: the name that asks for one, and what it does."""

_NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Where each value that the policy takes comes from: a column of the observations, or -1 for a zero."""

    columns: np.ndarray
    """int [obs_dim of the policy]"""
    says: str
    assumed: bool
    """whether the policy's size decided"""


class AdaptedVector:
    """Environments whose observations are put into the places that a policy expects; all else is theirs."""

    def __init__(self, inner: VectorEnv, adapter: Adapter) -> None:
        self._inner = inner
        self._says = adapter.says
        self._columns = adapter.columns
        self._blank = adapter.columns == _NOWHERE
        self.num_envs, self.engine = inner.num_envs, inner.engine
        ((_, _, dtype),) = inner.spec.observation
        assumed = (adapter.says,) if adapter.assumed else ()
        self.spec = replace(inner.spec, observation=((OBS, adapter.columns.shape, dtype),), assumed=assumed)
        self.obs: np.ndarray = np.zeros((self.num_envs, len(adapter.columns)), dtype)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was adapted, and what the environments' libraries had to say."""
        return self._inner.notes if self.spec.assumed else (self._says, *self._inner.notes)

    @property
    def agreement(self) -> Agreement | None:
        """How closely the engine reproduces Gymnasium, before anything is adapted."""
        return self._inner.agreement

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:
        """Begin the episode of seeds[i] in rows[i]."""
        self._inner.reset(rows, seeds)
        self._see(rows)

    def step(self, actions: np.ndarray, rows: np.ndarray) -> Outcome:
        """Advance `rows` by `actions[row]`; return reward, terminated and truncated of each of `rows`."""
        outcome = self._inner.step(actions, rows)
        self._see(rows)
        return outcome

    def frame(self, row: int) -> np.ndarray:
        """Return a picture of the row as it is now: uint8 [height, width, 3]."""
        return self._inner.frame(row)

    def close(self) -> None:
        """Close the environments."""
        self._inner.close()

    def __enter__(self) -> AdaptedVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _see(self, rows: np.ndarray) -> None:
        shown = np.asarray(self._inner.obs)
        if len(rows) == self.num_envs:
            shown.take(self._columns, axis=1, out=self.obs, mode="wrap")
        else:
            self.obs[rows] = shown[rows[:, None], self._columns]
        self.obs[:, self._blank] = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """What supports another version's observations besides their number."""

    trained: str | None = None
    """the id of the environment that the agent was trained in, None where no file names one"""
    wrapped: bool = False
    """whether wrappers of the training change the number of values"""

    def supports(self, played: str, wanted: int) -> bool:
        """Return whether a version of the environment that is played may show `wanted` values.

        A number alone supports the layouts of whole versions where nothing else explains it.
        """
        if self.trained is None:
            return not self.wrapped
        return drift.shown_by(self.trained, played, wanted)


NO_EVIDENCE = Evidence()


def adapted(
    vector: VectorEnv,
    obs_dim: int | None,
    asked: str | None,
    again: Callable[[Mapping[str, Any]], VectorEnv],
    evidence: Evidence = NO_EVIDENCE,
) -> VectorEnv:
    """Return environments that show `obs_dim` values (None: their own), if another version's are known.

    `asked` is one of ADAPTERS; `again` makes the environments with more arguments. What cannot be adapted,
    or what the evidence speaks against, is returned as it is, unless an adapter was asked for: then
    UsageError says what it is for.
    """
    own = vector.spec.obs_dim
    wanted = obs_dim or own
    if (wanted == own and asked is None) or (asked is None and not evidence.supports(vector.spec.id, wanted)):
        return vector
    given: Mapping[str, Any] = {}
    columns = _columns(vector.spec, wanted, asked) if asked != POSITIONS else None
    if columns is None and (given := drift.arguments(vector.spec.id, own, wanted, asked == POSITIONS)):
        vector.close()
        vector = again(given)
        columns = _columns(vector.spec, wanted, None if asked == POSITIONS else asked)
    if columns is not None:
        sentence = _sentence(vector.spec, columns, asked, given)
        return AdaptedVector(vector, Adapter(columns, sentence, asked is None))
    if asked is not None:
        vector.close()
        raise UsageError(
            f"{vector.spec.id} has no {asked} for a policy of {wanted} observations",
            hint=drift.with_forces(vector.spec.id) if asked == ZERO_FORCES else None,
        )
    return vector


def _columns(spec: EnvSpec, wanted: int, asked: str | None) -> np.ndarray | None:
    """Return where each of `wanted` values comes from in `spec`'s observations; None if that is not known."""
    own, layouts = spec.obs_dim, drift.LAYOUTS.get(drift.family(spec.id), {})
    if [key for key, _, _ in spec.observation] != [OBS]:
        return None
    if own == wanted and asked is None:
        return np.arange(own)
    zeros = {drift.EMPTY} | ({drift.FORCES} if asked == ZERO_FORCES else set())
    if own not in layouts or wanted not in layouts or (asked and drift.FORCES not in dict(layouts[wanted])):
        return None
    places, start = {}, 0
    for part, size in layouts[own]:
        places[part] = start
        start += size
    columns: list[int] = []
    for part, size in layouts[wanted]:
        if part not in zeros and part not in places:
            return None
        columns += [_NOWHERE] * size if part in zeros else range(places[part], places[part] + size)
    return np.array(columns)


def _sentence(spec: EnvSpec, columns: np.ndarray, asked: str | None, given: Mapping[str, Any]) -> str:
    """Say what was done to the observations, and to the environment."""
    done = [f"made with {name}={value}" for name, value in given.items()]
    if "use_contact_forces" in given:
        done.append(f"contact forces cost, and {ZERO_FORCES} is for policies from before they were reported")
    if len(columns) != spec.obs_dim or asked:
        zeros = int((columns == _NOWHERE).sum())
        shown = len(columns) - zeros
        done.append(f"{shown} of its {spec.obs_dim} are shown" + (f" and {zeros} zeros" if zeros else ""))
    if asked:
        done.append(ADAPTERS[asked])
    return f"the policy takes {count(len(columns), 'observation')}: {spec.id}, " + "; ".join(done)
