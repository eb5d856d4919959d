"""Pendulum-v1 as a tensor program: the arithmetic of gymnasium/envs/classic_control/pendulum.py in float64.

It is Gymnasium's to rounding: a tensor library has a sine and a cosine of its own, which differ from NumPy's
in the last bit, and squares by multiplying where Gymnasium calls the C library's pow. How much that is on a
device is measured there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpttool.agents.envs.pendulum_batch import PendulumBatch
from ckpttool.agents.envs.spec import Agreement
from ckpttool.agents.envs.tensors import ENGINE, Tensors

if TYPE_CHECKING:
    import torch


class PendulumTensors:
    """Angles and speeds, float64 [rows]; starts, constants and the referee are those of PendulumBatch."""

    def __init__(self, make_one: Callable[[], Any]) -> None:
        """Raise UnsupportedError if the environment is not the Pendulum that these equations are of."""
        self._arrays = PendulumBatch(make_one, engine=ENGINE)
        self.spec = self._arrays.spec
        self._law = self._arrays.law

    @property
    def notes(self) -> tuple[str, ...]:
        """What Gymnasium had to say, each sentence once."""
        return self._arrays.notes

    def compare(self, device: torch.device) -> Agreement | None:
        """Compare steps on the device with Gymnasium's; None where that is not installed."""
        import torch

        if (steps := self._arrays.reference()) is None:
            return None
        state = tuple(torch.from_numpy(column.copy()).to(device) for column in steps.states.T)
        after, rewards, _ = self.step(state, torch.from_numpy(steps.actions).to(device))
        found = (torch.stack(after, 1), self.observe(after), rewards)
        return steps.agreement(*(tensor.cpu().numpy() for tensor in found))

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the angles and the speeds that Gymnasium's own generators draw."""
        return tuple(np.ascontiguousarray(column) for column in self._arrays.starts(seeds).T)

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return cosine, sine and speed: float32 [rows, 3]."""
        import torch

        angle, speed = state
        seen = angle.new_empty(len(angle), 3, dtype=torch.float32)
        # On a GPU each of these is one kernel, which computes in float64 and rounds what it writes.
        torch.cos(angle, out=seen[:, 0])
        torch.sin(angle, out=seen[:, 1])
        seen[:, 2] = speed
        return seen

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, None]:
        """Return the next angles and speeds, and the rewards; nothing terminates."""
        (angle, speed), law = state, self._law
        torque = actions[:, 0].clamp(-law.max_torque, law.max_torque)
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        costs = upright.square().addcmul(speed, speed, value=0.1) + 0.001 * torque.square()
        # The torque's product is a float32 in Gymnasium; the others may be fused with their sums.
        faster = speed.add(angle.sin(), alpha=law.pull * law.dt).add(law.push * torque, alpha=law.dt)
        faster = faster.clamp(-law.max_speed, law.max_speed)
        return (angle.add(faster, alpha=law.dt), faster), -costs, None

    def close(self) -> None:
        """Let go of the one environment."""
        self._arrays.close()
