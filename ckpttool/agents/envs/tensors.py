"""Tasks that run on the policy's device: the interface of tensor programs and of batched simulators.

The torch backend plays both without a transfer between policy and task (backends/torch_rollout.py). Users
plug in their own with `module:factory` (simulators.py, docs/howto/plug_in_a_simulator.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from ckpttool.agents.envs.spec import Agreement, EnvSpec
from ckpttool.agents.policy import Observation
from ckpttool.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    import torch

ENGINE = "device"
HINT = "--backend torch plays on it"

Tensors = tuple["torch.Tensor", ...]


class TensorProgram(Protocol):
    """A task as pure functions of tensors on any device; a state is several tensors [rows, ...].

    `observe` and `step` use no value on the host: a GPU replays them as one graph. Actions are within the
    bounds of `spec`. The rollout starts rows from seeds and cuts episodes at `spec.max_episode_steps`.
    """

    spec: EnvSpec

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of the task's library, each once."""
        ...

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with the task's library; None where that is not installed."""
        ...

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the states in which the episodes of these seeds start, in the host's memory."""
        ...

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return the policy's observations: [rows, obs_dim] in the type of the task's observations."""
        ...

    def step(
        self, state: Tensors, actions: torch.Tensor
    ) -> tuple[Tensors, torch.Tensor, torch.Tensor | None]:
        """Return the next state, and rewards and terminations (bool; None if there are none) [rows]."""
        ...

    def close(self) -> None:
        """Release what the task's library holds."""
        ...


class Simulator(Protocol):
    """A batch of environments with a state of their own, whose rows restart by themselves."""

    spec: EnvSpec
    device: torch.device
    capturable: bool
    """whether `step` may be captured in a CUDA graph: it uses no value on the host and keeps its memory"""

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of the simulator, each once."""
        ...

    def reset(self, seed: int) -> torch.Tensor:
        """Start an episode in every row; return the observations [rows, obs_dim]."""
        ...

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return observations, rewards, terminated and truncated.

        The observation of a row that ended is the first one of its next episode.
        """
        ...

    def close(self) -> None:
        """Release what the simulator holds."""
        ...


class DeviceVector:
    """A task and a number of rows, to be played as a whole (see agents.rollout.rollouts)."""

    engine = ENGINE

    def __init__(self, task: TensorProgram | Simulator, num_envs: int) -> None:
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self.task, self.num_envs = task, num_envs
        self.spec = task.spec
        self.obs: Observation = self.spec.zeros(num_envs)
        self.agreement: Agreement | None = None
        self._compared: set[torch.device] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings of the task's library, each once."""
        return self.task.notes

    def require_agreement(self, device: torch.device) -> None:
        """Compare a program's steps on the device once; raise UnsupportedError beyond its tolerance."""
        if device not in self._compared and (compare := getattr(self.task, "compare", None)) is not None:
            self.agreement = compare(device)
            if self.agreement is not None:
                self.agreement.require(self.spec.id, self.engine)
            self._compared.add(device)

    def reset(self, rows: np.ndarray, seeds: np.ndarray) -> None:  # noqa: ARG002 - the protocol's
        """Raise UnsupportedError: the episodes are on the device."""
        self._refuse()

    def step(self, actions: np.ndarray, rows: np.ndarray) -> NoReturn:  # noqa: ARG002 - the protocol's
        """Raise UnsupportedError: the episodes are on the device."""
        self._refuse()

    def frame(self, row: int) -> NoReturn:  # noqa: ARG002 - the protocol's
        """Raise UnsupportedError: nothing is drawn on the device."""
        raise UnsupportedError(f"the {ENGINE} engine draws no picture", hint="--engine gymnasium does")

    def close(self) -> None:
        """Release what the task's library holds."""
        self.task.close()

    def __enter__(self) -> DeviceVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(f"the {ENGINE} engine is not stepped from outside", hint=HINT)
