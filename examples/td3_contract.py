"""Interface of a TD3 agent, independent of the framework: settings, batches, methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, SupportsInt

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AgentSpec:
    """Sizes and constants of one TD3 agent; the names are those of Fujimoto et al. (2018).

    `policy_noise` and `noise_clip` are fractions of `max_action`.
    """

    obs_dim: int
    action_dim: int
    max_action: float
    hidden: tuple[int, int]
    learning_rate: float
    adam_epsilon: float
    discount: float = 0.99
    tau: float = 0.005
    policy_noise: float = 0.2
    noise_clip: float = 0.5
    policy_freq: int = 2


class Batch(NamedTuple):
    """Transitions drawn from the replay buffer, all float32."""

    obs: Float32  # [batch, obs_dim]
    action: Float32  # [batch, action_dim]
    next_obs: Float32  # [batch, obs_dim]
    reward: Float32  # [batch, 1]
    not_done: Float32  # [batch, 1]; 0 where the task ended, 1 where only the time limit cut


class Agent(Protocol):
    """Promise the methods that the training loop calls on either backend's TD3."""

    @property
    def total_it(self) -> SupportsInt:
        """Number of updates made so far."""
        ...

    def select_action(self, obs: Float32) -> Float32:
        """Return the deterministic action [action_dim] for one observation [obs_dim]."""
        ...

    def update(self, batch: Batch) -> None:
        """Make one step of both critics and, every `policy_freq` calls, of actor and targets."""
        ...

    def save(self, folder: Path, step: int, keep: int) -> Path:
        """Write checkpoint number `step`, drop all but the `keep` newest, return what to restore.

        One agent saves to one folder in its life.
        """
        ...

    def restore(self, path: Path) -> None:
        """Fill networks, optimizers and `total_it`; raise where the checkpoint does not fit."""
        ...


class Backend(Protocol):
    """Promise what each `td3_<framework>` module offers."""

    ADAM_EPSILON: float  # the framework's own default

    def prepare(self, seed: int) -> None:
        """Seed the framework and keep it to one thread."""
        ...

    def versions(self) -> dict[str, str]:
        """Name the framework's packages and their versions."""
        ...

    def checkpoint_files(self, path: Path) -> list[Path]:
        """List the files that together hold the checkpoint at `path`."""
        ...

    def TD3(self, spec: AgentSpec) -> Agent:  # noqa: N802 - a class in both modules
        """Build an untrained agent."""
        ...
