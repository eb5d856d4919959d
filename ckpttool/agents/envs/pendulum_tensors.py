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
        angle, speed = state
        seen = angle.new_empty(len(angle), 3)
        seen[:, 0], seen[:, 1], seen[:, 2] = angle.cos(), angle.sin(), speed
        return seen.float()

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        """Return the next angles and speeds, the rewards, and that nothing terminates."""
        (angle, speed), law = state, self._law
        torque = actions[:, 0].clamp(-law.max_torque, law.max_torque)
        upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
        costs = upright.square() + 0.1 * speed.square() + 0.001 * torque.square()
        faster = speed + (law.pull * angle.sin() + law.push * torque) * law.dt
        faster = faster.clamp(-law.max_speed, law.max_speed)
        return (angle + faster * law.dt, faster), -costs, costs.new_zeros(len(costs)).bool()

    def close(self) -> None:
        """Let go of the one environment."""
        self._arrays.close()
