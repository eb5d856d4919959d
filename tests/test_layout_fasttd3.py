"""FastTD3's files: built as its save_params does, acted as plain torch acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.verify import verify
from ckpttool.core import UnsupportedError, display
from ckpttool.core.sidecar import NO_BOUNDS, NO_STATISTICS
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree, td3
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from ckpttool.testing.layouts import same
from tests.golden_texts import Golden
from tests.torch_agents import actions, as_batch, close, mlp, observations, saved, values

OBS, ACT, ATOMS = 5, 2, 11


class Actor(nn.Module):
    """`Actor` of fast_td3/fast_td3.py, or with `gaussian` that of fast_sac/fast_sac.py."""

    def __init__(self, *, gaussian: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(*mlp(OBS, 16, 8, 4), nn.ReLU())
        self.fc_mu: nn.Module = nn.Sequential(nn.Linear(4, ACT), nn.Tanh())
        if gaussian:
            self.fc_mu, self.fc_logstd = nn.Linear(4, ACT), nn.Linear(4, ACT)
        else:
            self.register_buffer("noise_scales", torch.rand(3, 1))
            self.register_buffer("std_min", torch.as_tensor(0.05))
            self.register_buffer("std_max", torch.as_tensor(0.8))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        last = self.fc_mu(self.net(obs))
        return torch.tanh(last) if hasattr(self, "fc_logstd") else last  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = mlp(inputs, 16, 8, 4, outputs)


class Critic(nn.Module):
    def __init__(self, obs: int = OBS, atoms: int = ATOMS) -> None:
        super().__init__()
        self.qnet1, self.qnet2 = Net(obs + ACT, atoms), Net(obs + ACT, atoms)
        if atoms > 1:
            self.register_buffer("q_support", torch.linspace(-10, 10, atoms))


def statistics(size: int) -> dict[str, torch.Tensor]:
    """EmpiricalNormalization of fast_td3_utils.py: `_std` is not always the root of `_var`."""
    generator = torch.Generator().manual_seed(size)
    var = torch.rand(1, size, generator=generator) * 4
    var[0, 0] = 0
    std = torch.sqrt(torch.clamp(var, min=1e-4))
    mean = torch.randn(1, size, generator=generator)
    return {"_mean": mean, "_var": var, "_std": std, "count": torch.tensor(77)}


def agent(critic_obs: int = OBS, *, gaussian: bool = False, norm: bool = True, **args: Any) -> Any:
    torch.manual_seed(0)
    actor = Actor(gaussian=gaussian)
    critics = [Critic(critic_obs, 1 if gaussian else ATOMS) for _ in range(2)]
    file = {
        "actor_state_dict": dict(actor.state_dict()),
        "qnet_state_dict": dict(critics[0].state_dict()),
        "qnet_target_state_dict": dict(critics[1].state_dict()),
        "obs_normalizer_state": statistics(OBS) if norm else {},
        "critic_obs_normalizer_state": statistics(critic_obs) if norm else {},
        "args": {"env_name": "h1hand-stand-v0", "num_atoms": ATOMS, "checkpoint_path": None, **args},
        "global_step": 1000,
    }
    return file, actor, critics[0]


def observed() -> np.ndarray:
    """Return observations [120, OBS] whose first number varies as little as its statistics say."""
    return observations(OBS) * np.array([0.02, 1, 1, 1, 1], "f4")


def normalised(obs: np.ndarray) -> torch.Tensor:
    of = statistics(obs.shape[1])
    return (as_batch(obs) - of["_mean"]) / (of["_std"] + 1e-2)


@pytest.mark.parametrize("gaussian", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_it_acts_by_tanh_within_one(gaussian: bool, norm: bool, tmp_path: Path) -> None:
    file, actor, _ = agent(gaussian=gaussian, norm=norm)
    path = saved(tmp_path, "run_1000.pt", file)
    obs = observed()
    # Whatever an environment's bounds are: the file says that nothing scales.
    close(actions(path, obs, high=7.0), actor(normalised(obs) if norm else as_batch(obs)))
    result = restore_agent(path)
    assert (result.binding.layout, result.binding.facts.env) == ("fasttd3", "h1hand-stand-v0")
    assert not result.binding.facts.lacks


@pytest.mark.parametrize("stated", [False, True, None])
@pytest.mark.parametrize("norm", [False, True])
def test_the_arguments_state_whether_observations_are_normalised(
    norm: bool, stated: bool | None, tmp_path: Path
) -> None:
    file, actor, _ = agent(norm=norm, **({} if stated is None else {"obs_normalization": stated}))
    path = saved(tmp_path, "x.pt", file)
    obs = observed()
    close(actions(path, obs), actor(normalised(obs) if norm and stated is not False else as_batch(obs)))
    lacks = restore_agent(path).binding.facts.lacks
    assert (NO_STATISTICS in lacks) == (stated is True and not norm)


def test_in_isaac_lab_an_action_is_scaled(tmp_path: Path) -> None:
    file, actor, _ = agent(env_name="Isaac-Lift-Cube-Franka-v0", action_bounds=3.0)
    path = saved(tmp_path, "x.pt", file)
    obs = observed()
    close(actions(path, obs), 3.0 * actor(normalised(obs)), 3.0)
    assert restore_agent(path).binding.facts.env is None


def test_without_arguments_the_bounds_are_asked_for(tmp_path: Path) -> None:
    file, _, _ = agent()
    del file["args"]
    assert restore_agent(saved(tmp_path, "x.pt", file)).binding.facts.lacks == (NO_BOUNDS,)


def test_a_distribution_is_no_value_and_is_kept(tmp_path: Path, golden: Golden) -> None:
    file, _, critic = agent()
    path = saved(tmp_path, "x.pt", file)
    obs = observed()
    action = np.random.default_rng(1).uniform(-1, 1, (len(obs), ACT)).astype("f4")
    expected = critic.qnet2.net(torch.cat([normalised(obs), as_batch(action)], dim=1))
    assert expected.shape[1] == ATOMS
    close(values(path, "critic/q2", obs, action), expected)
    notes = restore_agent(path).binding.moves.notes
    golden("\n".join(notes))
    assert not restore_agent(saved(tmp_path, "sac.pt", agent(gaussian=True)[0])).binding.moves.notes


def test_every_tensor_goes_to_the_canonical_agent_and_back(tmp_path: Path) -> None:
    tree = open_checkpoint(saved(tmp_path, "x.pt", agent(critic_obs=9)[0])).tree
    binding = recognize_tree(tree, "x.pt")
    assert binding is not None
    moved = {move.source for move in binding.moves.moves}
    assert {tree.names[path] for path in tree if path not in moved | binding.consumed} == set()
    left = {tree.names[path] for path, _ in tree.tensors() if path not in moved}
    assert left == {f"actor_state_dict/{name}" for name in ("noise_scales", "std_min", "std_max")}
    canonical = canonical_tree(tree, binding.moves)
    written = apply_plan(canonical, td3.plan_torch(binding, canonical, {}))
    again = recognize_tree(written, "y.pt")
    assert again is not None
    back = canonical_tree(written, again.moves)
    for path, leaf in canonical.items():
        if len(path) > 1:
            assert same(back[path], leaf), display(path)


def test_a_wider_critic_does_not_keep_the_policy_from_being_compared(
    tmp_path: Path, shared_workers: None, golden: Golden
) -> None:
    path = saved(tmp_path, "x.pt", agent(critic_obs=9)[0])
    verification = verify(path, path)
    assert [parity.name for parity in verification.networks] == ["actor"]
    golden("\n".join(verification.notes))


def test_a_task_embedding_is_not_left_out(tmp_path: Path, golden: Golden) -> None:
    file, _, _ = agent()
    file["actor_state_dict"]["task_embedding.weight"] = torch.zeros(4, 2)
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(saved(tmp_path, "x.pt", file)).runnable("actor")
    golden(caught.value)
