"""rsl_rl's PPO agents of all versions: files built as its runners save them, acted as plain torch acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.core import UnsupportedError, display
from ckpttool.core.sidecar import NO_ACTIVATIONS
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree
from tests.golden_texts import Golden
from tests.torch_agents import actions, adam, as_batch, close, mlp, observations, opened, saved, values

OBS, PRIVILEGED, ACT = 6, 9, 3


def statistics(size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    var = torch.rand(1, size, generator=generator) * 4
    return {
        "_mean": torch.randn(1, size, generator=generator),
        "_var": var,
        "_std": torch.sqrt(var),
        "count": torch.tensor(960),
    }


def normalised(obs: np.ndarray) -> torch.Tensor:
    """EmpiricalNormalization.forward of rsl_rl/modules/normalizer.py."""
    of = statistics(obs.shape[1])
    return (as_batch(obs) - of["_mean"]) / (of["_std"] + 1e-2)


def under(prefix: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def networks(activation: type[nn.Module] = nn.ELU) -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    return (
        mlp(OBS, 16, 8, ACT, activation=activation),
        mlp(PRIVILEGED, 12, 1, activation=activation),
    )


def file(version: int, actor: nn.Module, critic: nn.Module, *, norm: bool, log: bool) -> dict[str, Any]:
    """Return what `OnPolicyRunner.save` of a major version writes."""
    deviation = torch.full((ACT,), 0.7)
    std = {"log_std" if log else "std": deviation}
    more: dict[str, Any] = {"iter": 250, "infos": None, "optimizer_state_dict": adam(actor.parameters())}
    own, others = statistics(OBS), statistics(PRIVILEGED)
    if version < 4:
        model = {**std, **under("actor", actor.state_dict()), **under("critic", critic.state_dict())}
        if norm and version == 3:
            model |= under("actor_obs_normalizer", own) | under("critic_obs_normalizer", others)
        if norm and version < 3:
            more |= {"obs_norm_state_dict": own, "critic_obs_norm_state_dict": others}
        return {"model_state_dict": model, **more}
    policy = under("mlp", actor.state_dict())
    value = under("mlp", critic.state_dict())
    if norm:
        policy, value = under("obs_normalizer", own) | policy, under("obs_normalizer", others) | value
    policy |= std if version == 4 else {f"distribution.{name}_param": param for name, param in std.items()}
    return {"actor_state_dict": policy, "critic_state_dict": value, **more}


@pytest.mark.parametrize("version", [1, 3, 4, 5])
@pytest.mark.parametrize("norm", [False, True])
def test_every_version_acts_by_its_mean(version: int, norm: bool, tmp_path: Path) -> None:
    actor, critic = networks()
    path = saved(tmp_path, "model_250.pt", file(version, actor, critic, norm=norm, log=version == 3))
    assert recognize_tree(open_checkpoint(path).tree, "model_250.pt") is not None
    obs = observations(OBS)
    close(actions(path, obs), actor(normalised(obs) if norm else as_batch(obs)))
    agent = restore_agent(path)
    assert (agent.binding.layout, agent.known.head) == ("rsl_rl", "identity")
    assert agent.binding.facts.lacks == (NO_ACTIVATIONS,)


@pytest.mark.parametrize("version", [2, 5])
def test_what_the_critic_saw_has_places_of_its_own(version: int, tmp_path: Path) -> None:
    actor, critic = networks()
    path = saved(tmp_path, "model_0.pt", file(version, actor, critic, norm=True, log=False))
    agent, wiring = opened(path)
    names = {display(move.target) for move in agent.binding.moves.moves}
    both = [
        f"normalizer/{whose}{name}" for whose in ("", "critic_") for name in ("mean", "std", "var", "count")
    ]
    assert names >= {*both, "actor/std", "iter"}
    assert wiring.obs_norm is not None
    assert len(wiring.obs_norm["mean"]) == OBS
    # The policy's statistics are not those of what the critic sees, which is wider here.
    obs = observations(PRIVILEGED)
    close(values(path, "value", obs), critic(as_batch(obs)))


def test_another_activation_is_nowhere_said(tmp_path: Path) -> None:
    actor, critic = networks(nn.Tanh)
    path = saved(tmp_path, "model_0.pt", file(5, actor, critic, norm=False, log=False))
    obs = observations(OBS)
    assert np.abs(actions(path, obs) - actor(as_batch(obs)).detach().numpy()).max() > 0.01
    assert str(restore_agent(path).known.provenance["activations"]).startswith("assumed")


@pytest.mark.parametrize(
    "settings",
    ["policy:\n  activation: tanh\n", "actor: {activation: tanh}\ncritic: {activation: tanh}\n"],
    ids=["policy", "actor and critic"],
)
def test_the_settings_of_a_training_say_the_activation(settings: str, tmp_path: Path, golden: Golden) -> None:
    actor, critic = networks(nn.Tanh)
    path = saved(tmp_path, "model_0.pt", file(5, actor, critic, norm=False, log=False))
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "agent.yaml").write_text(settings)
    obs = observations(OBS)
    close(actions(path, obs), actor(as_batch(obs)))
    agent = restore_agent(path)
    assert agent.known.is_read("activations")
    assert agent.known.origin("activations") == "params/agent.yaml"
    assert not agent.binding.facts.lacks
    (tmp_path / "params" / "agent.yaml").write_text("actor: {activation: tanh}\ncritic: {activation: elu}\n")
    of_critic = networks(nn.ELU)[1]
    of_critic.load_state_dict(critic.state_dict())
    close(actions(path, obs), actor(as_batch(obs)))
    more = observations(of_critic[0].in_features)
    close(values(path, "value", more), of_critic(as_batch(more)))
    (tmp_path / "params" / "agent.yaml").write_text("actor: {activation: tanh}\ncritic: {activation: odd}\n")
    with pytest.raises(UnsupportedError):
        restore_agent(path).runnable("value")
    (tmp_path / "params" / "agent.yaml").write_text("policy: {activation: softsign}\n")
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(path).runnable("actor")
    golden(caught.value)
    (tmp_path / "params" / "agent.yaml").write_text("seed: 42\n")
    assert restore_agent(path).binding.facts.lacks == (NO_ACTIVATIONS,)


def test_a_deviation_that_depends_on_the_observation_is_not_played(tmp_path: Path, golden: Golden) -> None:
    torch.manual_seed(0)
    whole = file(4, mlp(OBS, 8, 2 * ACT, activation=nn.ELU), networks()[1], norm=False, log=False)
    del whole["actor_state_dict"]["std"]
    path = saved(tmp_path, "model_0.pt", whole)
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(path).runnable("actor")
    golden(caught.value)


@pytest.mark.parametrize("extra", ["memory_a.rnn.weight_ih_l0", "actor_cnns.camera.0.weight"])
def test_what_stands_before_the_layers_is_not_left_out(extra: str, tmp_path: Path, golden: Golden) -> None:
    whole = file(3, *networks(), norm=False, log=False)
    whole["model_state_dict"][extra] = torch.zeros(4, 4)
    path = saved(tmp_path, "model_0.pt", whole)
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(path).runnable("actor")
    golden(caught.value)


def test_without_an_iteration_it_is_another_ones_file(tmp_path: Path) -> None:
    whole = file(3, *networks(), norm=False, log=False)
    del whole["iter"]
    assert recognize_tree(open_checkpoint(saved(tmp_path, "m.pt", whole)).tree, "m.pt") is None
