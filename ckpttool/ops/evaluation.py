"""What an evaluation is: how agents are played, and what came of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from ckpttool import ledger as ledgers
from ckpttool import urls
from ckpttool.agents.execute import Dtype
from ckpttool.agents.reference_scores import SOURCE, reference
from ckpttool.agents.rollout import Rollout
from ckpttool.agents.statistics import Summary
from ckpttool.errors import UsageError
from ckpttool.ledger import Entries
from ckpttool.ops.fingerprint import fingerprint

_AT_ONCE = 16


def float_type(name: str) -> Dtype:
    """Return the type that a policy computes in by its name; raise UsageError if it is none."""
    if name not in get_args(Dtype):
        raise UsageError("no policy computes in that type", expected=" or ".join(get_args(Dtype)), found=name)
    return cast(Dtype, name)


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to play: episode i is reset with `seed + i`; the policy always sees `num_envs` observations.

    `num_envs` None means as many as there are episodes, up to 16. `engine` is what steps the environments,
    `noise` the deviation of exploration noise in half action ranges, None for the deterministic policy.
    `adapter` is one of agents.envs.ADAPTERS, None for what the policy's size decides. `wrappers` are the
    training's environment wrappers, as `TimeLimit:max_episode_steps=100`, the first one innermost; None for
    those that the agent's own files name.
    """

    episodes: int = 10
    seed: int = 1000
    num_envs: int | None = None
    device: str = "cpu"
    backend: str = "numpy"
    network: str = "actor"
    dtype: Dtype = "float32"
    engine: str = "auto"
    noise: float | None = None
    adapter: str | None = None
    wrappers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Hold the wrappers as a tuple, which a document in JSON does not."""
        if self.wrappers is not None:
            object.__setattr__(self, "wrappers", tuple(self.wrappers))

    @property
    def at_once(self) -> int:
        """The number of environments that are played at once."""
        return self.num_envs or min(self.episodes, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One checkpoint's result; `versions` and `device` are those that computed it.

    `stacked` is the number of checkpoints whose actions were computed together, 1 for one alone.
    """

    checkpoint: str
    env: str
    protocol: Protocol
    device: str
    versions: dict[str, str]
    rollout: Rollout
    statistics: Summary
    ledger: Entries
    notes: tuple[str, ...]
    stacked: int = 1
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    """what the environment was (see ops.fingerprint)"""

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences of what was assumed."""
        return ledgers.assumptions(self.ledger)

    @property
    def normalized(self) -> float | None:
        """The mean as a normalised score, None where no reference is known (agents.reference_scores)."""
        known = reference(self.env)
        return None if known is None else known.normalized(self.statistics.mean)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        played, result = self.rollout, self.statistics
        return {
            "checkpoint": urls.spelled(self.checkpoint),
            "env": self.env,
            "versions": self.versions,
            "environment": dict(self.surroundings),
            "fingerprint": fingerprint(self.surroundings),
            "protocol": {
                "episodes": played.episodes,
                "seeds": played.seeds.tolist(),
                "num_envs": played.num_envs,
                "stacked": self.stacked,
                "deterministic": self.protocol.noise is None,
                "noise": self.protocol.noise,
                "device": self.device,
                "backend": self.protocol.backend,
                "engine": played.engine,
                "adapter": self.protocol.adapter,
                "wrappers": None if self.protocol.wrappers is None else list(self.protocol.wrappers),
                "network": self.protocol.network,
                "dtype": self.protocol.dtype,
            },
            "agreement": None if played.agreement is None else played.agreement.document(),
            "returns": played.returns.tolist(),
            "lengths": played.lengths.tolist(),
            "terminated": played.terminated.tolist(),
            "truncated": played.truncated.tolist(),
            "mean": result.mean,
            "std": result.std,
            "median": result.median,
            "iqm": result.iqm,
            "min": result.min,
            "max": result.max,
            "ci95": list(result.ci95) if result.ci95 is not None else None,
            "interval_over": "episodes",
            "normalized": self._normalized(),
            "steps": played.steps,
            "seconds": played.seconds,
            "steps_per_s": played.steps_per_s,
            "clipped_actions": played.clipped,
            "interrupted": played.interrupted,
            "assumed": list(self.assumed),
            "ledger": ledgers.documents(self.ledger),
            "notes": list(self.notes),
        }

    def _normalized(self) -> dict[str, Any] | None:
        known = reference(self.env)
        if known is None:
            return None
        return {
            "mean": self.normalized,
            "random": known.random,
            "expert": known.expert,
            "measured_in": known.env,
            "source": SOURCE,
        }
