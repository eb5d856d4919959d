"""ElegantRL's networks: whole modules and state_dicts with its statistics, acted as plain torch acts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.core import Leaf, UnsupportedError, attr, display
from ckpttool.core.sidecar import NO_BOUNDS
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree
from ckpttool.mapping.rules import canonical_tree
from tests.pickles import importable
from tests.torch_agents import actions, as_batch, close, mlp, observations, saved

OBS, ACT = 4, 2


class _Network(nn.Module):
    """`ActorBase` and `CriticBase` of elegantrl/agents/net.py."""

    def __init__(self, *, value: bool = False) -> None:
        super().__init__()
        self.state_avg = nn.Parameter(torch.tensor([0.5, -1, 2, 0]), requires_grad=False)
        self.state_std = nn.Parameter(torch.tensor([1, 2, 0.5, 3]), requires_grad=False)
        if value:
            self.value_avg = nn.Parameter(torch.zeros(1), requires_grad=False)
            self.value_std = nn.Parameter(torch.ones(1), requires_grad=False)


class Actor(_Network):
    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.net = mlp(OBS, 16, 8, ACT, activation=activation)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.net((obs - self.state_avg) / self.state_std))


class ActorPPO(Actor):
    def __init__(self) -> None:
        super().__init__()
        self.action_std_log = nn.Parameter(torch.zeros(1, ACT))


class ActorDiscretePPO(Actor):
    pass


class ActorSAC(_Network):
    def __init__(self) -> None:
        super().__init__()
        self.net_s = nn.Sequential(*mlp(OBS, 16, 8), nn.ReLU())
        self.net_a = mlp(8, 2 * ACT)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        encoded = self.net_s((obs - self.state_avg) / self.state_std)
        return torch.tanh(self.net_a(encoded)[:, :ACT])


class Critic(_Network):
    def __init__(self, inputs: int) -> None:
        super().__init__(value=True)
        self.net = mlp(inputs, 8, 1)


for _kind in (Actor, ActorPPO, ActorDiscretePPO, ActorSAC, Critic):
    _kind.__module__, _kind.__qualname__ = "elegantrl.agents.net", _kind.__name__


def whole(folder: Path, module: nn.Module, name: str = "act.pth") -> str:
    with importable(type(module)):
        return saved(folder, name, module)


@pytest.mark.parametrize("kind", [Actor, ActorPPO, ActorSAC])
def test_an_actor_is_normalised_and_squashed(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    actor = kind()
    obs = observations(OBS)
    for path in (whole(tmp_path, actor), saved(tmp_path, "sd.pth", actor.state_dict())):
        close(actions(path, obs), actor(as_batch(obs)))
        assert restore_agent(path).binding.layout == "elegantrl"
        assert restore_agent(path).binding.facts.lacks == (NO_BOUNDS,)


def test_the_module_says_its_activations(tmp_path: Path) -> None:
    torch.manual_seed(0)
    actor = Actor(nn.SiLU)
    path = whole(tmp_path, actor, "actor__000000001024.pt")
    obs = observations(OBS)
    close(actions(path, obs), actor(as_batch(obs)))
    assert restore_agent(path).known.is_read("activations")
    assert restore_agent(path).known.origin("activations") == "net"


def test_every_tensor_of_a_policy_has_a_place(tmp_path: Path) -> None:
    tree = open_checkpoint(whole(tmp_path, ActorPPO())).tree
    binding = recognize_tree(tree, "act.pth")
    assert binding is not None
    moved = {move.source for move in binding.moves.moves}
    assert set(tree) == moved | binding.consumed
    assert {display(move.target) for move in binding.moves.moves} >= {
        "normalizer/mean",
        "normalizer/std",
        "actor/log_std",
    }


@pytest.mark.parametrize(("inputs", "title"), [(OBS + ACT, "critic/q1"), (OBS, "value")])
def test_a_critic_is_known_by_its_inputs(inputs: int, title: str, tmp_path: Path) -> None:
    path = whole(tmp_path, Critic(inputs), "cri.pth")
    agent = restore_agent(path)
    assert [part.title for part in agent.binding.parts] == [title]
    with pytest.raises(UnsupportedError, match="value_avg"):
        agent.runnable(title)


class QNetTwinDuel(_Network):
    def __init__(self) -> None:
        super().__init__(value=True)
        self.net_state = mlp(OBS, 16, 8, activation=nn.SiLU)
        self.net_adv1, self.net_val1 = mlp(8, 1), mlp(8, ACT)
        self.net_adv2, self.net_val2 = mlp(8, 1), mlp(8, ACT)
        self.soft_max = nn.Softmax(dim=1)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        encoded = self.net_state(obs)
        values = self.net_val1(encoded)
        return values - values.mean(1, keepdim=True) + self.net_adv1(encoded)


QNetTwinDuel.__module__, QNetTwinDuel.__qualname__ = "elegantrl.agents.net", "QNetTwinDuel"


@pytest.mark.parametrize("kind", [ActorDiscretePPO, QNetTwinDuel])
def test_a_module_of_discrete_actions_chooses(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = kind()
    agent = load_agent(whole(tmp_path, module), "CartPole-v1")
    obs = observations(OBS)
    with torch.no_grad():
        normed = (as_batch(obs) - module.state_avg) / module.state_std
        expected = module(normed) if kind is QNetTwinDuel else module.net(normed)
    np.testing.assert_allclose(agent.scores(obs), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(agent.act(obs), expected.argmax(1))


def test_the_last_layer_of_sac_is_two(tmp_path: Path) -> None:
    torch.manual_seed(0)
    actor = ActorSAC()
    tree = open_checkpoint(saved(tmp_path, "act.pth", actor.state_dict())).tree
    binding = recognize_tree(tree, "act.pth")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    kernel = agent[attr("actor"), attr("log_std"), attr("kernel")]
    assert isinstance(kernel, Leaf)
    np.testing.assert_array_equal(kernel.array(), actor.net_a[0].weight[ACT:].detach().numpy().T)


def test_a_sequential_alone_is_nobodys(tmp_path: Path) -> None:
    path = saved(tmp_path, "actor.pth", {f"net.{k}": v for k, v in mlp(OBS, 8, ACT).state_dict().items()})
    assert recognize_tree(open_checkpoint(path).tree, "actor.pth") is None
