"""The seam of tasks written as tensor programs: episodes that run where the policy lives, start to end.

An engine of this kind gives a program instead of rows to step: the torch backend plays it without a transfer
between policy and environment. Physics on a GPU joins as one more program.
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
    """A task as functions of tensors, on whatever device these are; a state is several tensors [rows, ...].

    Nothing in `observe` and `step` may depend on a value on the host: a GPU replays them as one graph.
    """

    spec: EnvSpec

    @property
    def notes(self) -> tuple[str, ...]:
        """What the task's library had to say, each sentence once."""
        ...

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with the task's library; None where that is not installed."""
        ...

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the states in which the episodes of these seeds start, in the host's memory."""
        ...

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return what the policy sees: [rows, obs_dim] in the type of the task's observations."""
        ...

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """Return the next state, the rewards (float64) and which rows terminated, each [rows]."""
        ...

    def close(self) -> None:
        """Let go of what the task's library holds."""
        ...


class DeviceVector:
    """A program and a number of rows, to be played as a whole (see agents.rollout.rollouts)."""

    engine = ENGINE

    def __init__(self, program: TensorProgram, num_envs: int) -> None:
        if num_envs < 1:
            raise UsageError(f"{num_envs} environments cannot play")
        self.program, self.num_envs = program, num_envs
        self.spec = program.spec
        self.obs: Observation = self.spec.zeros(num_envs)
        self.agreement: Agreement | None = None
        self._compared: set[torch.device] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the task's library had to say, each sentence once."""
        return self.program.notes

    def require_agreement(self, device: torch.device) -> None:
        """Compare the program's steps on the device once; raise UnsupportedError beyond its tolerance."""
        if device not in self._compared:
            self.agreement = self.program.compare(device)
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
        """Let go of what the task's library holds."""
        self.program.close()

    def __enter__(self) -> DeviceVector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse(self) -> NoReturn:
        raise UnsupportedError(f"the {ENGINE} engine is not stepped from outside", hint=HINT)
