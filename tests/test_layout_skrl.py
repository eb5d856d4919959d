"""skrl's agents: files built as skrl saves them, acted as plain torch acts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool import load_agent
from ckpttool.commands.convert import convert
from ckpttool.core import Tree, UnsupportedError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree
from tests.test_layouts import LayoutContract, networks
from tests.torch_agents import actions, adam, as_batch, close, mlp, observations, saved, values

OBS, ACT, HIGH = 5, 2, 2.0


class Policy(nn.Module):
    """The deterministic model of skrl's examples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_layer_1 = nn.Linear(OBS, 16)
        self.linear_layer_2 = nn.Linear(16, 8)
        self.action_layer = nn.Linear(8, ACT)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.linear_layer_2(torch.relu(self.linear_layer_1(obs))))
        return HIGH * torch.tanh(self.action_layer(hidden))


class Critic(nn.Module):
    def __init__(self, inputs: int = OBS + ACT, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.net = mlp(inputs, 12, 6, 1, activation=activation)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat(inputs, dim=1))  # type: ignore[no-any-return]


class Gaussian(nn.Module):
    """What skrl's model instantiators make; with `value` the shared model of both roles."""

    def __init__(self, *, value: bool = False) -> None:
        super().__init__()
        self.net_container = nn.Sequential(nn.Linear(OBS, 16), nn.ELU(), nn.Linear(16, 8), nn.ELU())
        self.policy_layer = nn.Linear(8, ACT)
        self.log_std_parameter = nn.Parameter(torch.full((ACT,), -0.5))
        if value:
            self.value_layer = nn.Linear(8, 1)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.policy_layer(self.net_container(obs))  # type: ignore[no-any-return]


def scaler(size: int = OBS) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "running_mean": torch.randn(size, generator=generator, dtype=torch.float64),
        "running_variance": torch.rand(size, generator=generator, dtype=torch.float64) * 3 + 0.1,
        "current_count": torch.tensor(512.0, dtype=torch.float64),
    }


def scaled(obs: np.ndarray) -> torch.Tensor:
    """RunningStandardScaler._compute of skrl/resources/preprocessors/torch/running_standard_scaler.py."""
    of = scaler()
    deviation = torch.sqrt(of["running_variance"].float()) + 1e-8
    return torch.clamp((as_batch(obs) - of["running_mean"].float()) / deviation, -5.0, 5.0)


def td3(*, ddpg: bool = False) -> tuple[dict[str, Any], dict[str, nn.Module]]:
    torch.manual_seed(0)
    numbers = [""] if ddpg else ["_1", "_2"]
    models: dict[str, nn.Module] = {"policy": Policy(), "target_policy": Policy()}
    models |= {f"{which}critic{n}": Critic() for which in ("", "target_") for n in numbers}
    trained = [p for n in numbers for p in models[f"critic{n}"].parameters()]
    optimizers = {"policy_optimizer": adam(models["policy"].parameters()), "critic_optimizer": adam(trained)}
    return {name: model.state_dict() for name, model in models.items()} | optimizers, models


def ppo(model: nn.Module, value: nn.Module) -> dict[str, Any]:
    return {
        "policy": model.state_dict(),
        "value": value.state_dict(),
        "optimizer": adam([*model.parameters(), *value.parameters()]),
        "value_preprocessor": scaler(1),
    }


class TestTD3(LayoutContract):
    name = "skrl"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(saved(tmp_path, "agent_100.pt", td3()[0])).tree


class TestDDPG(LayoutContract):
    name = "skrl"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(saved(tmp_path, "best_agent.pt", td3(ddpg=True)[0])).tree


@pytest.mark.parametrize("preprocessor", [None, "state_preprocessor", "observation_preprocessor"])
def test_td3_acts_and_judges_as_torch_does(preprocessor: str | None, tmp_path: Path) -> None:
    file, models = td3()
    obs = observations(OBS)
    inputs = as_batch(obs)
    if preprocessor is not None:
        file[preprocessor], inputs = scaler(), scaled(obs)
    path = saved(tmp_path, "agent_100.pt", file)
    close(actions(path, obs, HIGH), models["policy"](inputs), HIGH)
    action = np.random.default_rng(1).uniform(-HIGH, HIGH, (len(obs), ACT)).astype("f4")
    for number in (1, 2):
        expected = models[f"critic_{number}"](inputs, as_batch(action))
        close(values(path, f"critic/q{number}", obs, action), expected)


def test_ppo_acts_by_its_mean(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, value = Gaussian(), Critic(OBS, nn.ELU)
    path = saved(tmp_path, "agent.pt", ppo(model, value) | {"state_preprocessor": scaler()})
    obs = observations(OBS)
    close(actions(path, obs), model(scaled(obs)))
    close(values(path, "value", obs), value(scaled(obs)))
    agent = restore_agent(path)
    assert agent.known.head == "identity"
    assert any(lack.what == "action map" and lack.decides for lack in agent.binding.facts.lacks)
    assert str(agent.known.provenance["head"]).startswith("assumed")


def test_a_schedulers_rate_and_the_scale_of_values_are_kept_beside_the_target(tmp_path: Path) -> None:
    file = ppo(Gaussian(), Critic(OBS))
    file["optimizer"]["param_groups"][0]["initial_lr"] = 0.25
    done = convert(saved(tmp_path, "agent.pt", file), str(tmp_path / "agent-1"), to="tf", sync=False)
    assert done.written, done.report
    kept = next(note for note in done.report.notes if note.startswith("kept in the sidecar: 4 values"))
    assert "initial_lr" in kept
    assert "value_preprocessor" in kept
    assert any(leaf.role == "slot" for _, leaf in open_checkpoint(done.target).tree.tensors())


def test_one_model_of_both_roles_is_its_policy(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model = Gaussian(value=True)
    path = saved(tmp_path, "agent.pt", ppo(model, model))
    obs = observations(OBS)
    close(actions(path, obs), model(as_batch(obs)))
    binding = restore_agent(path).binding
    assert networks(binding) == {"actor": ["net_container/0", "net_container/2", "policy_layer"]}


class Shared(nn.Module):
    """A model of both roles with a custom class, whose heads may have hidden layers."""

    def __init__(self, names: tuple[str, str, str], *, deep: bool, categorical: bool) -> None:
        super().__init__()
        self.names = names
        sizes = (16, 16) if deep else (16,)
        parts = (mlp(OBS, 16, 16, activation=nn.ELU), mlp(*sizes, 3), mlp(*sizes, 1))
        parts[0].append(nn.ELU())
        for name, part in zip(names, parts, strict=True):
            self.add_module(name, part if deep or part is parts[0] else part[0])
        if not categorical:
            self.log_std_parameter = nn.Parameter(torch.zeros(3))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        trunk, head = (self.get_submodule(name) for name in self.names[:2])
        return head(trunk(obs))  # type: ignore[no-any-return]


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    "names",
    [
        ("net", "mean_net", "value_net"),
        ("trunk", "actor", "critic"),
        ("net_container", "policy_layer", "value_layer"),
    ],
)
@pytest.mark.parametrize("categorical", [False, True])
def test_a_shared_model_of_a_users_class_is_its_policy(
    names: tuple[str, str, str], deep: bool, categorical: bool, tmp_path: Path
) -> None:
    torch.manual_seed(2)
    model = Shared(names, deep=deep, categorical=categorical)
    path = saved(tmp_path, "agent.pt", ppo(model, model))
    obs = observations(OBS)
    agent = restore_agent(path)
    assert agent.binding.layout == "skrl"
    assert agent.known.head == ("argmax" if categorical else "identity")
    facts = AgentFacts(activations="elu") if not deep else AgentFacts(activations=("elu", "elu", "relu"))
    acted = load_agent(str(path), facts=facts).act(obs)
    expected = model(as_batch(obs))
    if categorical:
        np.testing.assert_array_equal(acted.ravel(), expected.argmax(1).numpy())
    else:
        close(acted, expected)


def test_the_deviation_and_statistics_are_carried(tmp_path: Path) -> None:
    path = saved(tmp_path, "agent.pt", ppo(Gaussian(), Critic(OBS)) | {"observation_preprocessor": scaler()})
    tree = open_checkpoint(path).tree
    binding = recognize_tree(tree, "agent.pt")
    assert binding is not None
    targets = {"/".join(str(step.value) for step in move.target) for move in binding.moves.moves}
    assert targets >= {"actor/log_std", "normalizer/mean", "normalizer/var", "normalizer/count"}


def test_actions_that_the_program_clips_are_no_part_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, "agent.pt", ppo(Gaussian(), Critic(OBS)))
    with pytest.raises(UnsupportedError) as caught:
        convert(path, str(tmp_path / "out.pt"), to="skrl", facts=AgentFacts(head="clip"), sync=False)
    assert (caught.value.expected, caught.value.found) == ("identity", "clip")
    assert "--head identity" in str(caught.value.hint)
    done = convert(path, str(tmp_path / "out.pt"), to="skrl", facts=AgentFacts(head="identity"), sync=False)
    assert done.written, done.report
    own_file, name = torch.load(done.target, weights_only=True), torch.load(path, weights_only=True)
    assert torch.equal(own_file["policy"]["net_container.0.weight"], name["policy"]["net_container.0.weight"])


def test_names_alone_are_no_agent_of_skrl(tmp_path: Path) -> None:
    path = saved(tmp_path, "x.pt", {"policy": Policy().state_dict(), "steps": 3})
    assert recognize_tree(open_checkpoint(path).tree, "x.pt") is None
