"""rl_games: an A2C model's state_dict, its running statistics, and the settings beside the folder nn.

Followed in github.com/Denys88/rl_games: rl_games/algos_torch/network_builder.py, models.py, players.py. The
library's own models are compared by `python -m tests.agent_truth --libraries rl_games`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import convert
from ckpttool.core import UnsupportedError
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import require_understood, restore_agent
from ckpttool.networks import numpy_backend, policy_network
from tests import tensorflow_child
from tests.golden_texts import Golden
from tests.restored import observations, same, wiring

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
nn = torch.nn

OBS, ACT = 5, 2
GIVEN = AgentFacts(activations="elu")
MEAN, VAR = np.linspace(-1, 1, OBS), np.linspace(0.3, 3, OBS)


def close(file: str, facts: AgentFacts, obs: np.ndarray, expected: Any) -> None:
    """Assert that the restored policy acts so between -1 and 3."""
    agent = restore_agent(file, facts=facts)
    part = agent.runnable("actor")
    assert part is not None
    network = policy_network(agent.tree, part, wiring(agent, (-1.0,) * ACT, (3.0,) * ACT))
    same(np.asarray(numpy_backend.build(network).step(obs)[0]), expected.detach().numpy())


class Network(nn.Module):  # type: ignore[misc, name-defined]
    """A2CBuilder.Network of two hidden layers."""

    def __init__(self, activation: Any, *, learned: bool, separate: bool) -> None:
        super().__init__()
        mlp = lambda: nn.Sequential(nn.Linear(OBS, 16), activation(), nn.Linear(16, 8), activation())  # noqa: E731
        self.actor_mlp = mlp()
        self.critic_mlp = mlp() if separate else nn.Sequential()
        self.value = nn.Linear(8, 1)
        self.mu = nn.Linear(8, ACT)
        self.sigma = nn.Linear(8, ACT) if learned else nn.Parameter(torch.zeros(ACT))


def saved(
    path: Path,
    activation: Any = nn.ELU,
    *,
    normed: bool = True,
    learned: bool = False,
    separate: bool = False,
) -> tuple[str, Any]:
    """Save the file of a training; return it and what gives mu of observations."""
    torch.manual_seed(3)
    network = Network(activation, learned=learned, separate=separate)
    state = {f"a2c_network.{name}": tensor for name, tensor in network.state_dict().items()}
    if normed:
        for name, rows in {"running_mean": MEAN, "running_var": VAR, "count": np.array(9.0)}.items():
            state[f"running_mean_std.{name}"] = torch.from_numpy(rows)
    (path / "nn").mkdir()
    file = path / "nn" / "agent.pth"
    torch.save({"model": state, "epoch": 3, "frame": 300, "last_mean_rewards": 1.0, "env_state": None}, file)

    def mu(obs: np.ndarray) -> Any:
        x = np.clip((obs - MEAN) / np.sqrt(VAR + 1e-5), -5, 5) if normed else obs
        return network.mu(network.actor_mlp(torch.from_numpy(x.astype(np.float32))))

    return str(file), mu


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("learned", "separate"), [(False, False), (True, False), (False, True)])
def test_mu_is_limited_and_mapped_to_the_bounds(
    normed: bool, learned: bool, separate: bool, tmp_path: Path
) -> None:
    file, mu = saved(tmp_path, normed=normed, learned=learned, separate=separate)
    obs = observations(OBS)
    agent = restore_agent(file, facts=GIVEN)
    assert agent.binding.layout == "rl_games"
    close(file, GIVEN, obs, 2 * mu(obs).clamp(-1, 1) + 1)
    assert not [entry for entry in agent.ledger if entry.open]
    assert [entry.what for entry in restore_agent(file).ledger if entry.open] == ["activation"]


@pytest.mark.tensorflow
@pytest.mark.parametrize("separate", [False, True])
def test_statistics_of_the_returns_leave_the_agent_playable(separate: bool, tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow")
    file, mu = saved(tmp_path, separate=separate)
    stored = torch.load(file, weights_only=True)
    for name, row in {"running_mean": [3.0], "running_var": [2.0], "count": 9.0}.items():
        stored["model"][f"value_mean_std.{name}"] = torch.tensor(row, dtype=torch.float64)
    torch.save(stored, file)
    target = str(tmp_path / "out")
    done = convert(file, target, to="tf", facts=GIVEN)
    assert not done.report.unused
    obs = observations(OBS)
    close(target, GIVEN, obs, 2 * mu(obs).clamp(-1, 1) + 1)
    assert any("value_mean_std" in note for note in done.report.notes)


def test_a_file_is_written_with_an_activation_of_the_library_only(tmp_path: Path) -> None:
    file, _ = saved(tmp_path, nn.SiLU)
    done = convert(file, str(tmp_path / "a.pth"), to="rl_games", facts=AgentFacts(activations="silu"))
    assert any("activation swish" in note for note in done.report.notes)
    with pytest.raises(UnsupportedError) as caught:
        convert(file, str(tmp_path / "b.pth"), to="rl_games", facts=AgentFacts(activations="leaky_relu(0.2)"))
    assert caught.value.found == "leaky_relu(0.2)"


@pytest.mark.parametrize("path", ["config.yaml", "params/agent.yaml"])
def test_settings_beside_the_folder_state_the_activation(path: str, tmp_path: Path, golden: Golden) -> None:
    file, mu = saved(tmp_path, nn.ReLU)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    text = (
        "params: {network: {mlp: {activation: relu}, space: {continuous: {mu_activation: MU}}}, config: {}}\n"
    )
    (tmp_path / path).write_text(text.replace("MU", "None"))
    obs = observations(OBS)
    close(file, NO_FACTS, obs, 2 * mu(obs).clamp(-1, 1) + 1)
    assert not [entry for entry in restore_agent(file).ledger if entry.open]
    (tmp_path / path).write_text(text.replace("MU", "tanh"))
    close(file, NO_FACTS, obs, 2 * mu(obs).tanh() + 1)
    (tmp_path / path).write_text(text.replace("relu", "softsign"))
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(file).runnable("actor")
    golden(caught.value)


SETTINGS = (
    "params: {network: {mlp: {activation: elu}, space: {continuous: {mu_activation: None}}}, config: {%s}}"
)


@pytest.mark.parametrize("off", ["false", "0", "0.0"])
def test_a_switch_of_the_settings_is_off_in_any_type(off: str, tmp_path: Path) -> None:
    """Players do not map actions without `clip_actions`, whatever the type of the switch."""
    file, mu = saved(tmp_path)
    (tmp_path / "config.yaml").write_text(SETTINGS % f"clip_actions: {off}, normalize_input: 1")
    obs = observations(OBS)
    close(file, NO_FACTS, obs, mu(obs))
    assert not [entry for entry in restore_agent(file).ledger if entry.open]


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("clip_actions: maybe", "action map"),
        ("normalize_input: maybe", "observation statistics"),
        ("normalize_input: 0", "observation statistics"),
    ],
)
def test_a_setting_that_is_unclear_or_contradicts_the_file_is_refused(
    setting: str, what: str, tmp_path: Path
) -> None:
    file, _ = saved(tmp_path)
    (tmp_path / "config.yaml").write_text(SETTINGS % setting)
    agent = restore_agent(file)
    assert [entry.what for entry in agent.ledger if entry.open] == [what]
    with pytest.raises(UnsupportedError) as refused:
        require_understood(agent.binding, agent.known)
    assert "config.yaml" in str(refused.value)


def test_a_missing_activation_does_not_hide_other_settings(tmp_path: Path) -> None:
    file, _ = saved(tmp_path, normed=False)
    (tmp_path / "config.yaml").write_text("params: {config: {normalize_input: true}}")
    assert "observation statistics" in [entry.what for entry in restore_agent(file).ledger if entry.open]


@pytest.mark.parametrize("value", [np.inf, np.nan, 1e39])
def test_statistics_that_overflowed_are_refused_and_their_tensors_converted(
    value: float, tmp_path: Path
) -> None:
    """A run that diverged has a variance that is not finite: neither played, nor an unexpected error."""
    file, _ = saved(tmp_path)
    stored = torch.load(file, weights_only=True)
    stored["model"]["running_mean_std.running_var"][1] = value
    torch.save(stored, file)
    convert(file, str(tmp_path / "out.npz"), facts=GIVEN)
    with np.load(tmp_path / "out.npz") as written:
        row = next(written[name] for name in written.files if name.endswith("running_var"))
    np.testing.assert_array_equal(row, stored["model"]["running_mean_std.running_var"].numpy())
    agent = restore_agent(file, facts=GIVEN)
    assert agent.known.obs_norm is None
    with pytest.raises(UnsupportedError) as refused:
        require_understood(agent.binding, agent.known)
    assert str(refused.value.hint).startswith("--obs-norm FILE")
    np.savez(tmp_path / "rms.npz", mean=MEAN, var=VAR)
    complete = restore_agent(file, facts=AgentFacts(activations="elu", obs_norm=str(tmp_path / "rms.npz")))
    require_understood(complete.binding, complete.known)


COUNTS = (3, 2, 4)


def save_actions(path: Path) -> tuple[str, Any]:
    """Save the file of ModelA2CMultiDiscrete, with Adam's state; return it and what gives the logits."""
    torch.manual_seed(3)
    network = nn.Module()
    for name in ("actor_mlp", "critic_mlp"):
        setattr(network, name, nn.Sequential(nn.Linear(OBS, 16), nn.ELU(), nn.Linear(16, 8), nn.ELU()))
    network.value = nn.Linear(8, 1)
    network.logits = nn.ModuleList(nn.Linear(8, count) for count in COUNTS)
    state = {f"a2c_network.{name}": tensor.clone() for name, tensor in network.state_dict().items()}
    twin = copy.deepcopy(network)
    adam = torch.optim.Adam(twin.parameters(), 1e-3)
    for parameter in twin.parameters():
        parameter.grad = torch.randn_like(parameter)
    adam.step()
    file = path / "agent.pth"
    saved = {"model": state, "optimizer": adam.state_dict(), "epoch": 3, "frame": 300, "env_state": None}
    torch.save(saved, file)

    def logits(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            x = network.actor_mlp(torch.from_numpy(obs))
            return np.concatenate([head(x).numpy() for head in network.logits], axis=1)

    return str(file), logits


def test_each_of_several_actions_has_a_layer(tmp_path: Path) -> None:
    file, logits = save_actions(tmp_path)
    obs = observations(OBS)
    parts = np.split(logits(obs), np.cumsum(COUNTS)[:-1], axis=1)
    expected = np.stack([part.argmax(1) for part in parts], axis=1)
    for backend in ("numpy", "torch"):
        agent = load_agent(file, facts=GIVEN, backend=backend)
        same(agent.scores(obs), logits(obs))
        np.testing.assert_array_equal(agent.act(obs), expected)
    assert agent.choices is not None
    assert agent.choices.title == "MultiDiscrete([3, 2, 4])"
    target = str(tmp_path / "agent.onnx")
    assert convert(file, target, to="onnx", facts=GIVEN).written
    np.testing.assert_array_equal(load_agent(target).act(obs), expected)


def test_several_actions_move_to_another_library_and_back(tmp_path: Path) -> None:
    """The layers become one, and its moments too; without sidecars the way back gives equal tensors."""
    file, logits = save_actions(tmp_path)
    there, back = str(tmp_path / "there.pt"), str(tmp_path / "back.pth")
    assert convert(file, there, to="skrl", facts=GIVEN).written
    same(load_agent(there).scores(observations(OBS)), logits(observations(OBS)))
    joined = torch.load(there, weights_only=True)["policy"]["net_container.4.weight"]
    assert joined.shape == (sum(COUNTS), 8)
    choices = Path(f"{there}.ckpttool.json").read_text()
    assert json.loads(choices)["choices"]["counts"] == list(COUNTS)
    assert convert(there, back, to="rl_games").written
    first, second = (torch.load(location, weights_only=False) for location in (file, back))
    assert {*first["model"]} == {*second["model"]}
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    for number, moments in first["optimizer"]["state"].items():
        assert torch.equal(moments["exp_avg"], second["optimizer"]["state"][number]["exp_avg"]), number
