"""What a backend makes of a network: one function from observations to actions, on its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ckpttool.agents.network import Network

Observation = np.ndarray | Mapping[str, np.ndarray]
State = tuple[np.ndarray, ...]


class Policy(Protocol):
    """A network on a device; the weights stay there between steps."""

    device: str

    def step(self, obs: Observation, state: State = ()) -> tuple[np.ndarray, State]:
        """Return the output [batch, n] and the next state.

        `obs` is an array [batch, obs_dim] for a network of one input, else a mapping from input name to
        array; `state` is empty for networks without memory.
        """
        ...


class Backend(Protocol):
    """What every backend module offers; its names are module-level."""

    NAME: str

    def build(self, network: Network, device: str = "cpu") -> Policy:
        """Put the network on the device ("cpu", "cuda", "auto"); raise UsageError if there is none."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that compute."""
        ...
