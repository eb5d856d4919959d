"""The distribution that each library's policy draws its actions from, and which actions its noise gives.

The formulas are those of the libraries' own code, which the sources in the tables name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckpttool
from ckpttool.core import UnsupportedError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.rollout import ActionSampler
from tests.restored import HIGH, LOW, observations

torch = pytest.importorskip("torch")
from tests import (  # noqa: E402
    test_layout_cleanrl,
    test_layout_d3rlpy,
    test_layout_rl_games,
    test_layout_rsl_rl,
    test_layout_skrl,
    test_layout_spinningup,
    test_layout_tianshou,
)

pytestmark = [pytest.mark.torch, pytest.mark.environment]
nn = torch.nn

BOUNDS = {"action_low": LOW, "action_high": HIGH}
OBS = torch.from_numpy(observations()[:40])


class Expected(NamedTuple):
    """A file, its observations, the library's mean and standard deviation, and its action of a sample."""

    path: Path
    obs: Any
    mean: Any
    std: Any
    act: Callable[[Any], Any]
    facts: dict[str, Any]


def scaled(unit: Any) -> Any:
    """Map [-1, 1] to the bounds."""
    low, high = torch.tensor(LOW), torch.tensor(HIGH)
    return low + (high - low) * (unit + 1) / 2


def clipped(action: Any) -> Any:
    return torch.clamp(action, torch.tensor(LOW), torch.tensor(HIGH))


def cleanrl_sac(folder: Path) -> Expected:
    actor = test_layout_cleanrl.saved(folder / "a.cleanrl_model", gaussian=True)[0]
    hidden = torch.relu(actor.fc2(torch.relu(actor.fc1(OBS))))
    log_std = -5 + 0.5 * (2 - -5) * (torch.tanh(actor.fc_logstd(hidden)) + 1)
    act = lambda x: torch.tanh(x) * actor.action_scale + actor.action_bias  # noqa: E731
    return Expected(folder / "a.cleanrl_model", OBS, actor.fc_mean(hidden), log_std.exp(), act, {})


def cleanrl_ppo(folder: Path) -> Expected:
    torch.manual_seed(0)
    agent = nn.Module()
    agent.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    agent.actor_mean = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
    agent.actor_logstd = nn.Parameter(torch.tensor([[-1.0, 0.5]]))
    torch.save(agent.state_dict(), folder / "ppo.cleanrl_model")
    std = agent.actor_logstd.exp()
    return Expected(folder / "ppo.cleanrl_model", OBS, agent.actor_mean(OBS), std, clipped, BOUNDS)


def skrl_ppo(folder: Path) -> Expected:
    obs = torch.from_numpy(test_layout_skrl.observations(test_layout_skrl.OBS))
    model, value = test_layout_skrl.Gaussian(), test_layout_skrl.Critic(test_layout_skrl.OBS)
    model.log_std_parameter.data = torch.linspace(-1, 3, test_layout_skrl.ACT)  # above the default's limit
    torch.save(test_layout_skrl.ppo(model, value), folder / "agent.pt")
    size = test_layout_skrl.ACT
    facts = {"action_low": (-1.0,) * size, "action_high": (1.0,) * size}
    std = torch.clamp(model.log_std_parameter, -20, 2).exp()
    return Expected(folder / "agent.pt", obs, model(obs), std, lambda x: x, facts)


def rl_games(folder: Path) -> Expected:
    file, mu = test_layout_rl_games.saved(folder, normed=False)
    state = torch.load(file, weights_only=False)
    sigma = torch.linspace(-1, 0.5, test_layout_rl_games.ACT)
    state["model"]["a2c_network.sigma"] = sigma
    torch.save(state, file)
    obs = test_layout_rl_games.observations(test_layout_rl_games.OBS)
    size = test_layout_rl_games.ACT
    facts = {"activations": "elu", "action_low": (-1.0,) * size, "action_high": (3.0,) * size}
    act = lambda x: 2 * x.clamp(-1, 1) + 1  # noqa: E731
    return Expected(Path(file), torch.from_numpy(obs), mu(obs), sigma.exp(), act, facts)


def rsl_rl(folder: Path, *, log: bool = False) -> Expected:
    actor, critic = test_layout_rsl_rl.networks()
    state = test_layout_rsl_rl.file(5, actor, critic, norm=False, log=log)
    torch.save(state, folder / "model_1.pt")
    obs = torch.from_numpy(test_layout_rsl_rl.observations(test_layout_rsl_rl.OBS))
    std = torch.full((test_layout_rsl_rl.ACT,), 0.7)
    return Expected(folder / "model_1.pt", obs, actor(obs), std.exp() if log else std, lambda x: x, {})


def tianshou_ppo(folder: Path) -> Expected:
    policy = test_layout_tianshou.ppo()
    torch.save(policy.state_dict(), folder / "policy.pth")
    mean, std = policy.actor(OBS), policy.actor.sigma_param.view(1, -1).exp()
    facts = {"activations": "relu", **BOUNDS}
    return Expected(folder / "policy.pth", OBS, mean, std, lambda x: scaled(x.clamp(-1, 1)), facts)


def tianshou_sac(folder: Path) -> Expected:
    actor = test_layout_tianshou.Last(3, 2, ("mu", "sigma"))
    actor.sigma.model[0].weight.data *= 9
    critics = {name: test_layout_tianshou.Last(5, 1) for name in ("critic", "critic_old")}
    policy = test_layout_tianshou.whole({"actor": actor, **critics})
    torch.save(policy.state_dict(), folder / "policy.pth")
    std = torch.clamp(actor.sigma.model(actor.preprocess.model.model(OBS)), -20, 2).exp()
    return Expected(folder / "policy.pth", OBS, actor(OBS), std, lambda x: scaled(torch.tanh(x)), BOUNDS)


def spinningup_sac(folder: Path) -> Expected:
    actor = test_layout_spinningup.SquashedGaussianMLPActor(nn.ReLU)
    q = test_layout_spinningup.MLPQFunction
    agent = test_layout_spinningup.MLPActorCritic(actor, q1=q(nn.ReLU), q2=q(nn.ReLU))
    torch.save(agent.state_dict(), folder / "a.pt")
    hidden = actor.net(OBS)
    std = torch.clamp(actor.log_std_layer(hidden), -20, 2).exp()
    facts = {"action_low": (-2.0, -2.0), "action_high": (2.0, 2.0)}
    return Expected(folder / "a.pt", OBS, actor.mu_layer(hidden), std, lambda x: 2 * torch.tanh(x), facts)


def spinningup_ppo(folder: Path) -> Expected:
    actor = test_layout_spinningup.MLPGaussianActor(nn.Tanh)
    actor.log_std.data = torch.tensor([-0.5, 2.5])  # without SAC's limit
    critic = test_layout_spinningup.MLPCritic(nn.Tanh)
    torch.save(test_layout_spinningup.MLPActorCritic(actor, v=critic).state_dict(), folder / "a.pt")
    return Expected(folder / "a.pt", OBS, actor(OBS), actor.log_std.exp(), lambda x: x, {})


def d3rlpy_sac(folder: Path) -> Expected:
    path = test_layout_d3rlpy.d3(folder, test_layout_d3rlpy.sac(), test_layout_d3rlpy.config("sac"))
    torch.manual_seed(1)
    policy = test_layout_d3rlpy.Head(test_layout_d3rlpy.OBS, test_layout_d3rlpy.ACT, "_mu")
    obs = torch.from_numpy(test_layout_d3rlpy.observations(test_layout_d3rlpy.OBS))
    std = policy._logstd(policy._encoder(obs)).clamp(-20, 2).exp()
    return Expected(Path(path), obs, policy(obs), std, torch.tanh, {})


def d3rlpy_iql(folder: Path) -> Expected:
    parts = test_layout_d3rlpy
    policy, value = parts.Head(parts.OBS, parts.ACT, "_mu"), parts.Head(parts.OBS, 1)
    state = {k: v for k, v in policy.state_dict().items() if not k.startswith("_logstd")}
    parameter = torch.linspace(-1, 2, parts.ACT)[None]
    file = {
        "policy": {"_logstd": parameter, **state},
        "q_funcs": parts.critics().state_dict(),
        "targ_q_funcs": parts.critics().state_dict(),
        "value_func": value.state_dict(),
    }
    path = parts.d3(folder, file, parts.config("iql", value_encoder_factory=parts.ENCODER))
    obs = torch.from_numpy(parts.observations(parts.OBS))
    std = (-5 + torch.sigmoid(parameter) * (2 - -5)).exp()
    return Expected(Path(path), obs, torch.tanh(policy(obs)), std, lambda x: x.clamp(-1, 1), {})


def rsl_rl_log(folder: Path) -> Expected:
    return rsl_rl(folder, log=True)


ROWS = (
    cleanrl_sac,
    cleanrl_ppo,
    skrl_ppo,
    rl_games,
    rsl_rl,
    rsl_rl_log,
    tianshou_ppo,
    tianshou_sac,
    spinningup_sac,
    spinningup_ppo,
    d3rlpy_sac,
    d3rlpy_iql,
)


@pytest.mark.parametrize("make", ROWS, ids=lambda make: make.__name__)
def test_actions_are_drawn_as_the_librarys_code_draws_them(
    make: Callable[[Path], Expected], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        expected = make(tmp_path)
        noise = ActionSampler.stream(3).standard_normal(expected.mean.shape)
        mean, std = (torch.as_tensor(moment).detach() for moment in (expected.mean, expected.std))
        sample = expected.act(mean + std * torch.from_numpy(noise).float())
    agent = ckpttool.load_agent(str(expected.path), facts=AgentFacts(**expected.facts))
    distribution = agent.distribution(expected.obs.numpy())
    np.testing.assert_allclose(distribution[0], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distribution[1], std.expand_as(mean), rtol=1e-5, atol=1e-9)
    agent.seed(3)
    actions = agent.act(expected.obs.numpy(), deterministic=False)
    np.testing.assert_allclose(actions, sample, rtol=1e-4, atol=1e-4)


def test_defaults_that_no_file_contains_are_named(tmp_path: Path) -> None:
    expected = skrl_ppo(tmp_path)
    agent = ckpttool.load_agent(str(expected.path), facts=AgentFacts(**expected.facts))
    assert not any("deviation" in assumption for assumption in agent.assumed)
    agent.act(expected.obs.numpy(), deterministic=False)
    assert any("deviation" in assumption for assumption in agent.assumed)


def test_a_deviation_without_its_algorithm_is_not_used(tmp_path: Path) -> None:
    """The limits of d3rlpy's deviation depend on the algorithm, which only a configuration names."""
    policy = test_layout_d3rlpy.Head(5, 3, "_mu")
    state = {k: v for k, v in policy.state_dict().items() if not k.startswith("_logstd")}
    file = {
        "policy": {"_logstd": torch.zeros(1, 3), **state},
        "q_funcs": test_layout_d3rlpy.critics().state_dict(),
        "targ_q_funcs": test_layout_d3rlpy.critics().state_dict(),
    }
    torch.save(file, tmp_path / "a.pt")
    facts = AgentFacts(action_low=(-1.0,) * 3, action_high=(1.0,) * 3)
    agent = ckpttool.load_agent(str(tmp_path / "a.pt"), facts=facts)
    with pytest.raises(UnsupportedError):
        agent.act(np.zeros(5, np.float32), deterministic=False)


def test_a_deterministic_policy_of_a_configuration_has_no_deviation(tmp_path: Path) -> None:
    state, *_ = test_layout_d3rlpy.td3()
    path = test_layout_d3rlpy.d3(tmp_path, state, test_layout_d3rlpy.config("td3"))
    assert json.dumps(ckpttool.load_agent(path).facts.action_high)
    with pytest.raises(UnsupportedError, match="deterministic"):
        ckpttool.load_agent(path).act(np.zeros(5, np.float32), deterministic=False)
