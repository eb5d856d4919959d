"""TorchRL's state_dicts: what the last layer outputs, told by the file or by the number of actions."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.conversion.export import export
from ckpttool.core import UnsupportedError, UsageError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.libraries.schema import HALVES
from tests.torch_agents import mlp

torch = pytest.importorskip("torch")
nn = torch.nn

OBS = 4
LOW, HIGH = np.float32([-1, -2]), np.float32([3, 2])
BOUNDS = {"action_low": LOW.tolist(), "action_high": HIGH.tolist()}


def net(outputs: int) -> Any:
    torch.manual_seed(2)
    network = mlp(OBS, 7, 5, outputs, activation=nn.ELU)
    for weight in network.parameters():
        weight.data *= 2
    return network


def state(network: Any, where: str = "", **more: Any) -> dict[str, Any]:
    """Return the state_dict of an actor with this network, under a name; `__` is a dot."""
    tensors = {f"{where}module.0.module.{name}": tensor for name, tensor in network.state_dict().items()}
    return tensors | {name.replace("__", "."): torch.as_tensor(value) for name, value in more.items()}


def saved(folder: Path, value: Any) -> str:
    torch.save(value, folder / "actor.pt")
    return str(folder / "actor.pt")


def rows() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, size=(200, OBS)).astype(np.float32)


def outputs(network: Any) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(network(torch.from_numpy(rows())))


def mapped(mean: np.ndarray) -> np.ndarray:
    return (HIGH - LOW) / 2 * np.tanh(mean) + (HIGH + LOW) / 2


def facts(**known: Any) -> AgentFacts:
    return AgentFacts(activations=("elu",), **known)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(actual - expected).max() <= 1e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize(
    "more",
    [
        {},  # QValueActor, or logits of a categorical actor
        {"module__1__eps_init": 1.0, "module__1__eps_end": 0.1, "module__1__eps": 0.5},
    ],
)
def test_two_outputs_are_two_discrete_actions_where_the_environment_has_them(
    more: dict[str, Any], tmp_path: Path
) -> None:
    network = net(2)
    tensors = state(network)
    if more:  # behind an actor, which is the first of a sequence
        tensors = {f"module.0.{name}": tensor for name, tensor in tensors.items()}
    path = saved(tmp_path, tensors | {name.replace("__", "."): torch.tensor(v) for name, v in more.items()})
    assert restore_agent(path).binding.layout == "torchrl"
    for backend in ("numpy", "torch"):
        agent = load_agent(path, "CartPole-v1", facts=facts(), backend=backend)
        close(agent.scores(rows()), outputs(network))
        np.testing.assert_array_equal(agent.act(rows()), outputs(network).argmax(1))


def test_a_target_of_a_loss_shows_a_q_network(tmp_path: Path) -> None:
    network = net(3)
    loss = state(network, "value_network_params.") | state(net(3), "target_value_network_params.")
    agent = load_agent(saved(tmp_path, loss), facts=facts())
    np.testing.assert_array_equal(agent.act(rows()), outputs(network).argmax(1))


def test_the_atoms_of_a_number_lie_together(tmp_path: Path) -> None:
    network, support = net(11 * 3), torch.linspace(-3, 7, 11)
    path = saved(tmp_path, state(network, support=support, module__2__support=support))
    shares = torch.from_numpy(outputs(network)).view(-1, 11, 3).softmax(1)
    agent = load_agent(path, facts=facts())
    close(agent.scores(rows()), (shares * support[:, None]).sum(1).numpy())


@pytest.mark.parametrize("where", ["", "actor_network_params.", "policy."])
def test_the_first_half_is_the_means_where_there_are_half_as_many_actions(where: str, tmp_path: Path) -> None:
    network = nn.Sequential(net(4))  # in a sequence with NormalParamExtractor
    path = saved(tmp_path, state(network, where))
    assert HALVES in restore_agent(path).ledger
    agent = load_agent(path, facts=facts(head="affine", **BOUNDS))
    close(agent.act(rows()), mapped(outputs(network)[:, :2]))
    assert any("first 2 of 4 outputs" in sentence for sentence in agent.assumed)
    four = {"action_low": [-1.0] * 4, "action_high": [1.0] * 4}
    whole = load_agent(path, facts=facts(head="affine", **four))
    close(whole.act(rows()), np.tanh(outputs(network)))
    export(path, str(tmp_path / "out.onnx"), facts=facts(head="affine", **BOUNDS))
    close(load_agent(str(tmp_path / "out.onnx")).act(rows()), mapped(outputs(network)[:, :2]))


def test_without_the_number_of_actions_nothing_is_played(tmp_path: Path) -> None:
    path = saved(tmp_path, state(net(4)))
    one = {"action_low": [-1.0], "action_high": [1.0]}
    for known in (one, {"action_low": [-1.0] * 3, "action_high": [1.0] * 3}):
        with pytest.raises(UsageError) as caught:
            load_agent(path, facts=facts(head="affine", **known))
        assert "--env" in str(caught.value.hint)
    with pytest.raises(UsageError):
        export(path, str(tmp_path / "out.onnx"), facts=facts(head="affine", **one))


@pytest.mark.parametrize("where", ["", "actor_network_params."])
def test_what_follows_the_network_shows_its_outputs(where: str, tmp_path: Path) -> None:
    network = net(2)
    tensors = state(network, where)
    ends = {
        f"{where}module.1.action_low": torch.tensor(LOW),
        f"{where}module.1.action_high": torch.tensor(HIGH),
    }
    agent = load_agent(saved(tmp_path, tensors | ends), facts=facts())
    close(agent.act(rows()), mapped(outputs(network)))
    assert not agent.assumed
    inner = state(nn.Sequential(network), where)
    scaled = inner | {f"{where}module.0.module.1.state_independent_scale": torch.ones(2)}
    agent = load_agent(saved(tmp_path, scaled), facts=facts(head="affine", **BOUNDS))
    close(agent.act(rows()), mapped(outputs(network)))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"module.1.module.0.weight": torch.ones(2, 2)}, "module/1"),
        ({"module.0.module.5.weight": torch.ones(3, 3), "module.0.module.5.bias": torch.ones(3)}, "5"),
        ({"obs_norm.loc": torch.ones(4), "obs_norm.scale": torch.ones(4)}, "obs_norm"),
        ({"support": torch.linspace(0, 1, 3)}, "support"),
        (state(net(3), "other."), "other"),
    ],
)
def test_other_networks_are_refused(more: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = saved(tmp_path, state(net(3)) | more)
    with pytest.raises((UnsupportedError, UsageError)) as caught:
        load_agent(path, facts=facts(head="affine", action_low=[-1.0] * 3, action_high=[1.0] * 3))
    assert reason in str(caught.value.found)


@pytest.mark.parametrize("kind", ["q", "tanh normal", "tanh module", "scale"])
def test_the_library_acts_the_same(kind: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("torchrl") is None:
        pytest.skip("the library is not installed")
    import torchrl.modules as m
    from tensordict import TensorDict
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule, TensorDictSequential
    from torchrl.data import Bounded, OneHot
    from torchrl.envs.utils import ExplorationType, set_exploration_type

    space = Bounded(torch.tensor(LOW), torch.tensor(HIGH), (2,))
    ends = {"low": space.space.low, "high": space.space.high}
    network = m.MLP(OBS, 4 if kind == "tanh normal" else 2, num_cells=[7, 5], activation_class=nn.ELU)
    more = {"head": "affine", **BOUNDS} if kind in ("tanh normal", "scale") else {}
    if kind == "q":
        actor: Any = m.QValueActor(network, in_keys=["observation"], spec=OneHot(2))
    elif kind == "tanh module":
        first = TensorDictModule(network, ["observation"], ["param"])
        actor = TensorDictSequential(first, m.TanhModule(in_keys=["param"], out_keys=["action"], spec=space))
    else:
        last = m.NormalParamExtractor() if kind == "tanh normal" else AddStateIndependentNormalScale(2)
        inner = TensorDictModule(nn.Sequential(network, last), ["observation"], ["loc", "scale"])
        names = ["loc", "scale"]
        actor = m.ProbabilisticActor(
            inner, names, distribution_class=m.TanhNormal, distribution_kwargs=ends, spec=space
        )
    path = saved(tmp_path, actor.state_dict())
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        expected = actor(TensorDict({"observation": torch.from_numpy(rows())}, [200]))["action"].numpy()
    agent = load_agent(path, "CartPole-v1" if kind == "q" else None, facts=facts(**more))
    if kind == "q":
        np.testing.assert_array_equal(agent.act(rows()), expected.argmax(1))
    else:
        close(agent.act(rows()), expected)
