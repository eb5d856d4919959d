"""Protocol of an evaluation: how agents are played, and the record of the results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

from ckpttool.core import sidecar, urls
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import CkpttoolError, UsageError, suggest_choice
from ckpttool.core.sidecar import LedgerEntries
from ckpttool.core.text import describe_record, render_record
from ckpttool.evaluation import environments, wrappers
from ckpttool.evaluation.gymnasium_engine import VectorEnv
from ckpttool.evaluation.rollout import Rollout, Sampler
from ckpttool.evaluation.statistics import (
    SOURCE,
    Judgement,
    ReturnStatistics,
    find_reference_scores,
    judge_return,
)
from ckpttool.evaluation.surroundings import hash_surroundings
from ckpttool.networks.build import NetworkSettings
from ckpttool.networks.network import Dtype, Network

if TYPE_CHECKING:
    from ckpttool.evaluation.playing import EvaluationOptions


_AT_ONCE = 16


def parse_float_type(name: str) -> Dtype:
    """Return the policy dtype with this name; raise UsageError for an unknown one."""
    if name not in get_args(Dtype):
        known = get_args(Dtype)
        expected, hint = " or ".join(known), suggest_choice(name, known)
        raise UsageError("unsupported policy dtype", expected=expected, found=name, hint=hint)
    return cast(Dtype, name)


@dataclass(frozen=True, slots=True)
class Protocol:
    """How to play: episode i is reset with `seed + i`; the policy always receives `num_envs` observations.

    `num_envs` None means one environment per episode, up to 16. `engine` selects the simulator engine.
    `noise` is the standard deviation of exploration noise, in units of half the action range; None for
    the deterministic policy. `stochastic` draws actions as training did, by the policy's probabilities or
    its standard deviation; with the probability `epsilon` those of a Q-network are uniform. `adapter` is
    one of environments.ADAPTERS; None chooses by the policy's size. `wrappers` are the environment wrappers
    of training, e.g. `TimeLimit:max_episode_steps=100`, innermost first; None for those listed in the
    agent's own files.
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
    stochastic: bool = False
    epsilon: float | None = None

    def __post_init__(self) -> None:
        """Convert the wrappers to a tuple, because JSON documents contain a list.

        Raise UsageError for invalid `episodes`, `dtype` or `epsilon`, and for two ways to draw actions.
        """
        parse_float_type(self.dtype)
        if self.wrappers is not None:
            object.__setattr__(self, "wrappers", tuple(self.wrappers))
        if self.episodes < 1:
            raise UsageError(f"number of episodes must be at least 1, not {self.episodes}")
        if self.epsilon is not None and not 0 <= self.epsilon <= 1:
            raise UsageError(f"invalid epsilon: {self.epsilon:g}", hint="use a probability from 0 to 1")
        drawn = {
            "noise": self.noise is not None,
            "stochastic": self.stochastic,
            "epsilon": self.epsilon is not None,
        }
        if sum(drawn.values()) > 1:
            names = " and ".join(name for name, used in drawn.items() if used)
            raise UsageError(f"{names} exclude each other")

    @property
    def samples(self) -> bool:
        """Whether actions are drawn from the policy's own distribution, or uniformly."""
        return self.stochastic or self.epsilon is not None

    @property
    def at_once(self) -> int:
        """The number of environments that are stepped together."""
        return self.num_envs or min(self.episodes, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of one checkpoint; `versions` and `device` are those used to compute it.

    `stacked` is the number of checkpoints whose actions were computed together, 1 for a single
    checkpoint.
    """

    __repr__ = describe_record
    _repr_html_ = render_record

    checkpoint: str
    env: str
    protocol: Protocol
    device: str
    versions: dict[str, str]
    rollout: Rollout
    statistics: ReturnStatistics
    ledger: LedgerEntries
    notes: tuple[str, ...]
    stacked: int = 1
    surroundings: Mapping[str, Any] = field(default_factory=dict)
    """description of the environment (see `collect_surroundings`)"""
    options: EvaluationOptions | None = field(default=None, repr=False, compare=False)
    """how the agent was restored, to replay its episodes; None if not known"""

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions, as sentences."""
        return sidecar.assumption_sentences(self.ledger)

    @property
    def normalized(self) -> float | None:
        """The mean as a normalised score, None without reference scores for the environment."""
        known = find_reference_scores(self.env)
        return None if known is None else known.normalized(self.statistics.mean)

    @property
    def judgement(self) -> Judgement | None:
        """The comparison with random and good policies, None without references for the environment."""
        threshold = environments.find_reward_threshold(self.env)
        return judge_return(self.env, self.statistics, self.surroundings, threshold)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        played, result = self.rollout, self.statistics
        judged = self.judgement
        return {
            "checkpoint": urls.display_url(self.checkpoint),
            "env": self.env,
            "versions": self.versions,
            "environment": dict(self.surroundings),
            "fingerprint": hash_surroundings(self.surroundings),
            "protocol": {
                "episodes": played.episodes,
                "seeds": played.seeds.tolist(),
                "num_envs": played.num_envs,
                "stacked": self.stacked,
                "deterministic": self.protocol.noise is None and not self.protocol.samples,
                "noise": self.protocol.noise,
                "stochastic": self.protocol.stochastic,
                "epsilon": self.protocol.epsilon,
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
            "judgement": None if judged is None else judged.document(),
            "steps": played.steps,
            "seconds": played.seconds,
            "steps_per_s": played.steps_per_s,
            "clipped_actions": played.clipped,
            "interrupted": played.interrupted,
            "assumed": list(self.assumed),
            "ledger": sidecar.entries_to_json(self.ledger),
            "notes": list(self.notes),
        }

    def _normalized(self) -> dict[str, Any] | None:
        known = find_reference_scores(self.env)
        if known is None:
            return None
        return {
            "mean": self.normalized,
            "random": known.random,
            "expert": known.expert,
            "measured_in": known.env,
            "source": SOURCE,
        }


@dataclass(frozen=True, slots=True)
class EvaluationEnvironment:
    """Environment of an agent: its id, whether a person typed it, and the policy's observation size."""

    env: str
    trusted: bool
    obs_dim: int
    adapter: str | None = None
    trained: str | None = None
    """the environment recorded in the agent's own files"""
    wrappers: str = ""
    """in the form of wrappers.serialize_wrappers"""
    wrappers_origin: str = ""
    """the library whose preprocessing of Atari games is assumed, because nothing states wrappers"""
    arguments: str = ""
    """arguments that create the environment, as JSON"""

    @property
    def identity(self) -> str:
        """The environment id with the arguments and wrappers: equal for equal environments."""
        more = [part for part in (self.arguments, self.wrappers) if part not in ("", "[]")]
        return " ".join((self.env, *more))

    def make(
        self, num_envs: int, engine: str = "auto", *, device: str = "cpu", pictures: bool = False
    ) -> VectorEnv:
        """Create `num_envs` environments; an id from a file must not import a module."""
        options = environments.VectorEnvOptions(
            trusted=self.trusted,
            kwargs=json.loads(self.arguments) if self.arguments else None,
            obs_dim=self.obs_dim,
            adapter=self.adapter,
            trained=self.trained,
            wrappers=wrappers.deserialize_wrappers(self.wrappers),
            engine=engine,
            device=device,
            pictures=pictures,
        )
        return environments.make_vector_env(self.env, num_envs, options)


@dataclass(frozen=True, slots=True, eq=False)
class PlayableAgent:
    """An agent ready to play: its policy network and settings, and the ledger of what was and was not used.

    It holds no open file and can be pickled, so that another process can play it.
    """

    checkpoint: str
    environment: EvaluationEnvironment
    network: Network
    settings: NetworkSettings
    ledger: LedgerEntries
    notes: tuple[str, ...]
    sampling: Sampler | None = None
    """how the network's scores become actions, or its noise is drawn; None if it needs neither"""

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions, as sentences."""
        return sidecar.assumption_sentences(self.ledger)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training run to evaluate: its path as given, and its last checkpoints in training order."""

    path: str
    checkpoints: tuple[str, ...]
    earlier: tuple[str, ...] = ()
    """checkpoints before those, which only the learning curve needs"""

    @property
    def played(self) -> tuple[str, ...]:
        """All checkpoints to play."""
        return (*self.earlier, *self.checkpoints)


@dataclass(frozen=True, slots=True)
class EvaluationFailure:
    """A checkpoint that could not be played, and the reason."""

    checkpoint: str
    error: CkpttoolError

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"checkpoint": urls.display_url(self.checkpoint), **self.error.document()}
