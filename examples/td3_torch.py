"""TD3 in PyTorch: networks, one update, and a checkpoint that is one dict in one file."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from td3_contract import AgentSpec, Batch, Float32
from torch import Tensor, nn
from torch.nn import functional

ADAM_EPSILON = 1e-8

# The components whose state_dict makes up the checkpoint, under the agent's attribute names.
COMPONENTS = (
    "actor",
    "actor_target",
    "critic",
    "critic_target",
    "actor_optimizer",
    "critic_optimizer",
)


def prepare(seed: int) -> None:
    """Seed PyTorch; one thread, because these networks are too small to share out."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def versions() -> dict[str, str]:
    """Name PyTorch's version."""
    return {"torch": str(torch.__version__)}


def checkpoint_files(path: Path) -> list[Path]:
    """List the one file of a checkpoint."""
    return [path]


class Actor(nn.Module):
    """Policy: obs [batch, obs_dim] to action [batch, action_dim] within +-max_action."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.l1 = nn.Linear(spec.obs_dim, spec.hidden[0])
        self.l2 = nn.Linear(spec.hidden[0], spec.hidden[1])
        self.l3 = nn.Linear(spec.hidden[1], spec.action_dim)
        self.max_action = spec.max_action

    def forward(self, obs: Tensor) -> Tensor:
        """Return the action of the policy."""
        hidden = functional.relu(self.l1(obs))
        hidden = functional.relu(self.l2(hidden))
        return self.max_action * torch.tanh(self.l3(hidden))


class QFunction(nn.Module):
    """Value of an action: obs [batch, obs_dim] and action [batch, action_dim] to [batch, 1]."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.l1 = nn.Linear(spec.obs_dim + spec.action_dim, spec.hidden[0])
        self.l2 = nn.Linear(spec.hidden[0], spec.hidden[1])
        self.l3 = nn.Linear(spec.hidden[1], 1)

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        """Return the estimated return."""
        hidden = functional.relu(self.l1(torch.cat([obs, action], dim=1)))
        hidden = functional.relu(self.l2(hidden))
        value: Tensor = self.l3(hidden)
        return value


class Critic(nn.Module):
    """Twin value functions, learned side by side."""

    def __init__(self, spec: AgentSpec) -> None:
        super().__init__()
        self.q1 = QFunction(spec)
        self.q2 = QFunction(spec)

    def forward(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return both estimates, [batch, 1] each."""
        return self.q1(obs, action), self.q2(obs, action)


class TD3:
    """Twin delayed deep deterministic policy gradient agent."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.actor = Actor(spec)
        self.actor_target = copy.deepcopy(self.actor)
        self.critic = Critic(spec)
        self.critic_target = copy.deepcopy(self.critic)
        self.actor_optimizer = _adam(self.actor, spec)
        self.critic_optimizer = _adam(self.critic, spec)
        self.total_it = 0

    def select_action(self, obs: Float32) -> Float32:
        """Return the deterministic action [action_dim] for one observation [obs_dim]."""
        with torch.no_grad():
            action: Float32 = self.actor(torch.from_numpy(obs[None]))[0].numpy()
        return action

    def update(self, batch: Batch) -> None:
        """Make one step of both critics and, every `policy_freq` calls, of actor and targets."""
        self.total_it += 1
        obs, action, next_obs, reward, not_done = (torch.from_numpy(array) for array in batch)
        target = self._target_value(next_obs, reward, not_done)
        q1, q2 = self.critic(obs, action)
        loss = functional.mse_loss(q1, target) + functional.mse_loss(q2, target)
        _step(self.critic_optimizer, loss)
        if self.total_it % self.spec.policy_freq == 0:
            _step(self.actor_optimizer, -self.critic.q1(obs, self.actor(obs)).mean())
            self._track_targets()

    @torch.no_grad()
    def _target_value(self, next_obs: Tensor, reward: Tensor, not_done: Tensor) -> Tensor:
        """Return the value [batch, 1] that both critics are pulled to, with a smoothed action."""
        spec = self.spec
        next_action: Tensor = self.actor_target(next_obs)
        limit = spec.noise_clip * spec.max_action
        noise = torch.randn_like(next_action) * (spec.policy_noise * spec.max_action)
        next_action = next_action + noise.clamp(-limit, limit)
        next_action = next_action.clamp(-spec.max_action, spec.max_action)
        q1, q2 = self.critic_target(next_obs, next_action)
        value: Tensor = reward + not_done * spec.discount * torch.min(q1, q2)
        return value

    @torch.no_grad()
    def _track_targets(self) -> None:
        """Move each target a fraction tau towards its network."""
        for network, slow in (self.actor, self.actor_target), (self.critic, self.critic_target):
            for value, kept in zip(network.parameters(), slow.parameters(), strict=True):
                kept.lerp_(value, self.spec.tau)

    def save(self, folder: Path, step: int, keep: int) -> Path:
        """Write `ckpt-<step>.pt`, drop all but the `keep` newest, return the file."""
        contents: dict[str, Any] = {name: getattr(self, name).state_dict() for name in COMPONENTS}
        contents["total_it"] = self.total_it
        path = folder / f"ckpt-{step}.pt"
        torch.save(contents, path)
        by_step = sorted(folder.glob("ckpt-*.pt"), key=lambda file: int(file.stem[len("ckpt-") :]))
        for stale in by_step[:-keep]:
            stale.unlink()
        return path

    def restore(self, path: Path) -> None:
        """Fill networks, optimizers and `total_it` from a file; nothing in it is executed."""
        contents = torch.load(path, weights_only=True)
        for name in COMPONENTS:
            getattr(self, name).load_state_dict(contents[name])
        self.total_it = int(contents["total_it"])


def _adam(network: nn.Module, spec: AgentSpec) -> torch.optim.Adam:
    return torch.optim.Adam(network.parameters(), lr=spec.learning_rate, eps=spec.adam_epsilon)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # PyTorch leaves it unannotated
    optimizer.step()
