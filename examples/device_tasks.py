"""Two custom tasks for `ckpttool eval --engine device`: rollouts that stay on the device.

    cd examples
    ckpttool eval ../sample_ckpts/td3_pendulum_torch/ckpt-15000.pt --engine device --backend torch \
        --env device_tasks:heavy_pendulum --num-envs 1024 --episodes 1024
    ckpttool eval ../sample_ckpts/td3_pendulum_torch/ckpt-15000.pt --engine device --backend torch \
        --env device_tasks:learned_pendulum --num-envs 1024 --episodes 1024

`heavy_pendulum` is a stateful simulator, like Isaac Lab, Brax and MuJoCo Warp; it tests the robustness of an
agent in a task on which it was not trained. `learned_pendulum` is a tensor program: a model of the task,
fitted to recorded transitions, as in model-based agents.
"""

from __future__ import annotations

import math

import numpy as np
import torch

MAX_TORQUE, MAX_SPEED, DT, STEPS = 2.0, 8.0, 0.05, 200

Tensors = tuple[torch.Tensor, ...]


def observed(angle: torch.Tensor, speed: torch.Tensor) -> torch.Tensor:
    """Return the observations [rows, 3]."""
    return torch.stack([angle.cos(), angle.sin(), speed], 1)


def reward_of(angle: torch.Tensor, speed: torch.Tensor, torque: torch.Tensor) -> torch.Tensor:
    """Return the rewards [rows]."""
    upright = (angle + math.pi).remainder(2 * math.pi) - math.pi
    return -(upright.square() + 0.1 * speed.square() + 0.001 * torque.square())


class HeavyPendulum:
    """Pendulum with a rod of another mass; rows restart automatically."""

    obs_dim, action_low, action_high, max_episode_steps = 3, -MAX_TORQUE, MAX_TORQUE, STEPS
    # Nothing in `step` uses a value on the host, and its tensors stay where they are: a GPU may replay it.
    capturable = True

    def __init__(self, num_envs: int, device: torch.device, mass: float) -> None:
        self.versions = {"mass": str(mass)}
        self.mass = mass
        self.random = torch.Generator(device)
        self.angle, self.speed = (torch.zeros(num_envs, device=device) for _ in range(2))
        self.length = torch.zeros(num_envs, dtype=torch.int64, device=device)
        # All starts are drawn in `reset`: a graph that draws has to register its generator.
        self.starts = torch.zeros(64, 2, num_envs, device=device)
        self.number = torch.zeros(1, num_envs, dtype=torch.int64, device=device)

    def reset(self, seed: int) -> torch.Tensor:
        """Start an episode in every row."""
        self.random.manual_seed(seed)
        self.starts.uniform_(-1.0, 1.0, generator=self.random)
        self.starts[:, 0] *= math.pi
        self.length.zero_()
        self.number.zero_()
        self.angle.copy_(self.starts[0, 0])
        self.speed.copy_(self.starts[0, 1])
        return observed(self.angle, self.speed)

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Advance every row; a row that ends is at its next episode's start when this returns."""
        torque = actions[:, 0]
        rewards = reward_of(self.angle, self.speed, torque)
        change = 15 * self.angle.sin() + 3 / self.mass * torque
        self.speed.add_(change, alpha=DT).clamp_(-MAX_SPEED, MAX_SPEED)
        self.angle.add_(self.speed, alpha=DT)
        self.length.add_(1)
        truncated = self.length >= STEPS
        self.number.add_(truncated).remainder_(len(self.starts))
        for tensor, start in ((self.angle, self.starts[:, 0]), (self.speed, self.starts[:, 1])):
            tensor.copy_(torch.where(truncated, start.gather(0, self.number)[0], tensor))
        self.length.masked_fill_(truncated, 0)
        return observed(self.angle, self.speed), rewards, torch.zeros_like(truncated), truncated


class LearnedPendulum:
    """A model of Pendulum, linear in three features; a state is the angle and the speed, [rows] each."""

    obs_dim, action_low, action_high, max_episode_steps = 3, -MAX_TORQUE, MAX_TORQUE, STEPS

    def __init__(self, transitions: torch.Tensor) -> None:
        angle, speed, torque, change = transitions.T
        features = torch.stack([angle.sin(), torque, speed], 1)
        weights = torch.linalg.lstsq(features, change[:, None]).solution
        self.pull, self.push, self.drag = weights[:, 0].tolist()

    def starts(self, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the states in which the episodes of these seeds start."""
        drawn = np.array([np.random.default_rng(seed).uniform((-np.pi, -1), (np.pi, 1)) for seed in seeds])
        return drawn[:, 0].astype(np.float32), drawn[:, 1].astype(np.float32)

    def observe(self, state: Tensors) -> torch.Tensor:
        """Return the policy's observations."""
        return observed(*state)

    def step(self, state: Tensors, actions: torch.Tensor) -> tuple[Tensors, torch.Tensor, None]:
        """Return the next state and the rewards; nothing terminates."""
        (angle, speed), torque = state, actions[:, 0]
        change = self.pull * angle.sin() + self.push * torque + self.drag * speed
        faster = (speed + change).clamp(-MAX_SPEED, MAX_SPEED)
        return (angle + faster * DT, faster), reward_of(angle, speed, torque), None


def heavy_pendulum(num_envs: int, device: torch.device) -> HeavyPendulum:
    """Return a Pendulum of twice the mass."""
    return HeavyPendulum(num_envs, device, 2.0)


def learned_pendulum(_num_envs: int, _device: torch.device) -> LearnedPendulum:
    """Return a model that was fitted to 256 noisy transitions of Pendulum."""
    random = torch.Generator().manual_seed(0)
    angle, speed, torque, noise = torch.rand(4, 256, generator=random) * 2 - 1
    angle, speed, torque = angle * math.pi, speed * 6, torque * MAX_TORQUE
    change = (15 * angle.sin() + 3 * torque) * DT + 0.01 * noise
    return LearnedPendulum(torch.stack([angle, speed, torque, change], 1))
