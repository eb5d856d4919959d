"""The TD3 authors' files: sets of every spelling are read, and what is written loads into their classes."""

from __future__ import annotations

import copy
import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import (
    MappingError,
    NotACheckpointError,
    TargetExistsError,
    UnsupportedError,
    attr,
    display,
)
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.mapping.rules import canonical_tree
from tests.conftest import TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.restored import actions, chosen, observations, q_values, recognised, same, without_a_way
from tests.torch_agents import run

torch = pytest.importorskip("torch")
nn = torch.nn
MAX = 2.0
_TARGETS = {"actor_target", "critic_target"}


def mlp(module: Any, first: int, sizes: list[int]) -> None:
    for number, (n_in, n_out) in enumerate(pairwise(sizes), start=first):
        setattr(module, f"l{number}", nn.Linear(n_in, n_out))


class Actor(nn.Module):  # type: ignore[misc, name-defined]
    """As in TD3.py: l1, l2, l3, ReLU, max_action times tanh."""

    def __init__(self, obs_dim: int = 3, act_dim: int = 2, hidden: int = 16) -> None:
        super().__init__()
        mlp(self, 1, [obs_dim, hidden, hidden, act_dim])

    def forward(self, state: Any) -> Any:
        a = torch.relu(self.l2(torch.relu(self.l1(state))))
        return MAX * torch.tanh(self.l3(a))


class Critic(nn.Module):  # type: ignore[misc, name-defined]
    """As in TD3.py: Q1 in l1 to l3, Q2 in l4 to l6."""

    def __init__(self, obs_dim: int = 3, act_dim: int = 2, hidden: int = 16) -> None:
        super().__init__()
        mlp(self, 1, [obs_dim + act_dim, hidden, hidden, 1])
        mlp(self, 4, [obs_dim + act_dim, hidden, hidden, 1])

    def forward(self, state: Any, action: Any) -> tuple[Any, Any]:
        both = torch.cat([state, action], 1)
        q1 = self.l3(torch.relu(self.l2(torch.relu(self.l1(both)))))
        return q1, self.l6(torch.relu(self.l5(torch.relu(self.l4(both)))))


class TD3:
    """What TD3.py saves and loads; `end` and `old` are what copies of it and old torch make of the files."""

    def __init__(self, *sizes: int) -> None:
        self.actor, self.critic = Actor(*sizes), Critic(*sizes)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=3e-4)

    def train(self) -> None:
        obs, action = torch.as_tensor(observations()), torch.as_tensor(chosen())
        losses = {
            self.critic_optimizer: lambda: sum((q**2).mean() for q in self.critic(obs, action)),
            self.actor_optimizer: lambda: -self.critic(obs, self.actor(obs))[0].mean(),
        }
        for _ in range(3):
            for optimizer, loss in losses.items():
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()

    def save(self, filename: str, end: str = "", *, old: bool = False) -> None:
        for name in ("critic", "critic_optimizer", "actor", "actor_optimizer"):
            state = getattr(self, name).state_dict()
            torch.save(state, f"{filename}_{name}{end}", _use_new_zipfile_serialization=not old)

    def load(self, filename: str) -> None:
        for name in ("critic", "critic_optimizer", "actor", "actor_optimizer"):
            getattr(self, name).load_state_dict(torch.load(f"{filename}_{name}", weights_only=True))
        self.critic_target = copy.deepcopy(self.critic)
        self.actor_target = copy.deepcopy(self.actor)


@pytest.fixture(scope="module")
def agent() -> TD3:
    torch.manual_seed(0)
    module = TD3()
    module.train()
    return module


@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
@pytest.mark.parametrize("end", ["", ".pth", ".pt", ".pkl"])
def test_a_set_of_any_spelling(tmp_path: Path, agent: TD3, end: str, old: bool) -> None:
    prefix = tmp_path / "TD3 Pendulum 0"
    agent.save(str(prefix), end, old=old)
    assert recognised(prefix).layout == "fujimoto"
    assert not without_a_way(prefix)
    same(actions(prefix, (-MAX, -MAX), (MAX, MAX)), run(agent.actor, observations()))
    for number, values in enumerate(run(agent.critic, observations(), chosen()), start=1):
        same(q_values(prefix, f"critic/q{number}"), values)
    # A folder stands for the one set in it, and any of its files for itself.
    assert open_checkpoint(str(tmp_path)).path == str(prefix)
    same(actions(f"{prefix}_actor{end}", (-MAX, -MAX), (MAX, MAX)), run(agent.actor, observations()))
    assert "l1.weight" in [leaf.key for _, leaf in open_checkpoint(f"{prefix}_critic{end}").tree.tensors()]


def test_a_folder_of_two_sets_stands_for_none(tmp_path: Path, agent: TD3, golden: Golden) -> None:
    for number in range(2):
        agent.save(str(tmp_path / f"TD3_{number}"))
    with pytest.raises(NotACheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    golden(caught.value.message)


def test_a_folder_called_like_a_member_is_none(tmp_path: Path) -> None:
    # A link back to itself would be followed for ever.
    for member in ("actor", "critic"):
        (tmp_path / f"a_{member}").symlink_to(tmp_path)
    with pytest.raises(NotACheckpointError):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("critic", ["critic_", "crtic_", "critic"])
def test_critics_in_files_of_their_own(tmp_path: Path, critic: str) -> None:
    torch.manual_seed(0)
    networks = {"actor": Actor(), "actor_target": Actor()}
    for name in (f"{critic}1", f"{critic}2"):
        for end in ("", "_target"):
            networks[name + end] = nn.Module()
            mlp(networks[name + end], 1, [5, 16, 16, 1])
    for name, network in networks.items():
        torch.save(network.state_dict(), f"{tmp_path}/x_{name}.pth")
    titles = [part.title for part in recognised(tmp_path / "x").parts]
    assert sorted(titles) == sorted(
        ["actor", "actor_target", *(f"{c}/q{n}" for c in ("critic", "critic_target") for n in (1, 2))]
    )
    assert not without_a_way(tmp_path / "x")
    second = networks[f"{critic}2"]
    both = torch.as_tensor(np.concatenate([observations(), chosen()], 1))
    with torch.no_grad():
        expected = second.l3(torch.relu(second.l2(torch.relu(second.l1(both)))))
    same(q_values(tmp_path / "x", "critic/q2"), expected)


def test_the_wiring_of_ddpg(tmp_path: Path) -> None:
    # DDPG.py: the action joins what the first layer gives.
    torch.manual_seed(0)
    actor, critic = Actor(), nn.Module()
    for number, sizes in enumerate([(3, 16), (18, 12), (12, 1)], start=1):
        setattr(critic, f"l{number}", nn.Linear(*sizes))
    torch.save(actor.state_dict(), tmp_path / "DDPG_actor.pth")
    torch.save(critic.state_dict(), tmp_path / "DDPG_critic.pth")
    with torch.no_grad():
        first = torch.relu(critic.l1(torch.as_tensor(observations())))
        expected = critic.l3(torch.relu(critic.l2(torch.cat([first, torch.as_tensor(chosen())], 1))))
    same(q_values(tmp_path / "DDPG"), expected)


def test_statistics_that_are_not_saved_are_named(tmp_path: Path, agent: TD3) -> None:
    agent.save(str(tmp_path / "TD3_BC_hopper-medium-v0_0"))
    lacks = restore_agent(str(tmp_path)).binding.facts.lacks
    assert "observation statistics" in {lack.what for lack in lacks}


# --- Written ---------------------------------------------------------------------------------------------


def test_what_is_written_loads_into_their_classes(tmp_path: Path, golden: Golden) -> None:
    target = tmp_path / "TD3_Pendulum-v1_0"
    done = convert(str(TORCH_SAMPLE), str(target), to="fujimoto", allow_missing=True)
    assert {name.split("/")[0] for name in done.report.unused} == {
        "actor_target",
        "critic_target",
    } & {str(path[0].value) for path in open_checkpoint(str(TORCH_SAMPLE)).tree}
    golden("\n".join(done.report.notes))
    loaded = TD3(3, 1, 64)
    loaded.load(str(target))
    same(actions(TORCH_SAMPLE), run(loaded.actor, observations()))
    source = torch.load(TORCH_SAMPLE, weights_only=True)
    q1, q2 = run(loaded.critic, observations(), chosen(1))
    same(q_values(TORCH_SAMPLE, "critic/q1", 1), q1)
    same(q_values(TORCH_SAMPLE, "critic/q2", 1), q2)
    for name in ("actor_optimizer", "critic_optimizer"):
        mine, reference = getattr(loaded, name).state_dict(), source[name]
        assert mine["param_groups"][0]["lr"] == reference["param_groups"][0]["lr"]
        for number, state in reference["state"].items():
            for slot, value in state.items():
                assert torch.equal(torch.as_tensor(mine["state"][number][slot]), torch.as_tensor(value))


def test_a_set_there_and_back_is_the_same(tmp_path: Path, agent: TD3) -> None:
    agent.save(str(tmp_path / "a"))
    first = convert(str(tmp_path / "a"), str(tmp_path / "agent.pt"), to="torch")
    assert first.report.complete
    second = convert(str(tmp_path / "agent.pt"), str(tmp_path / "b"), to="fujimoto")
    assert second.report.complete
    for name in ("actor", "critic", "actor_optimizer", "critic_optimizer"):
        one, two = (torch.load(f"{tmp_path}/{stem}_{name}", weights_only=True) for stem in "ab")
        assert list(one) == list(two)
        assert json.dumps(one, default=torch.Tensor.tolist) == json.dumps(two, default=torch.Tensor.tolist)


# --- Converted ---------------------------------------------------------------------------------------------


def ddpg(prefix: Path) -> None:
    """Write what DDPG.py saves: its critic takes the action after the first layer."""
    torch.manual_seed(1)
    critic = nn.Module()
    for number, sizes in enumerate([(3, 16), (18, 12), (12, 1)], start=1):
        setattr(critic, f"l{number}", nn.Linear(*sizes))
    for name, module in (("actor", Actor()), ("critic", critic)):
        torch.save(module.state_dict(), f"{prefix}_{name}")
        torch.save(torch.optim.Adam(module.parameters()).state_dict(), f"{prefix}_{name}_optimizer")


def our_ddpg(prefix: Path) -> None:
    """Write what OurDDPG.py saves: one Q-function that takes both inputs at its first layer."""
    torch.manual_seed(2)
    critic = nn.Module()
    mlp(critic, 1, [5, 16, 16, 1])
    for name, module in (("actor", Actor()), ("critic", critic)):
        torch.save(module.state_dict(), f"{prefix}_{name}")
        torch.save(torch.optim.Adam(module.parameters()).state_dict(), f"{prefix}_{name}_optimizer")


def td3(prefix: Path) -> None:
    torch.manual_seed(0)
    module = TD3()
    module.train()
    module.save(str(prefix))


def td3_with_suffix(prefix: Path) -> None:
    torch.manual_seed(0)
    TD3().save(str(prefix), ".pth")


@pytest.mark.parametrize("to", ["torch", "tf", "tf1", "keras", "skrl", "tianshou"])
@pytest.mark.parametrize("form", [td3, td3_with_suffix, ddpg, our_ddpg])
def test_targets_are_the_copies_that_their_load_makes(tmp_path: Path, form: Any, to: str) -> None:
    prefix, out = tmp_path / "TD3_Pendulum-v1_0", tmp_path / "out"
    form(prefix)
    if form is ddpg and to in ("tianshou", "skrl"):
        with pytest.raises(UnsupportedError):  # its critic takes the action first
            convert(str(prefix), str(out), to=to)
        return
    done = convert(str(prefix), str(out), to=to, allow_missing=to == "tianshou")
    assert done.written
    assert done.report.complete or to == "tianshou"
    (sentence,) = (line for line in done.report.assumed if "actor_target" in line)
    assert "load()" in sentence
    receipt = json.loads((tmp_path / "out.ckpttool.json").read_text())
    assert sentence in receipt["assumed"]
    checkpoint = open_checkpoint(str(out))
    binding = recognised(out)
    agent = canonical_tree(checkpoint.tree, binding.moves)
    online = [path for path in agent if path[0].value in ("actor", "critic")]
    assert online
    for path in online:
        there = (attr(f"{path[0].value}_target"), *path[1:])
        assert np.array_equal(agent[there].array(), agent[path].array())  # type: ignore[union-attr]
    # One variable of two networks would be trained with both.
    for path, others in checkpoint.tree.aliases.items():
        networks = _TARGETS & set(display(path).split("/"))
        assert all(networks == _TARGETS & set(display(alias.path).split("/")) for alias in others)


@pytest.mark.parametrize("to", ["tf", "keras"])
@pytest.mark.parametrize("member", ["actor", "critic"])
@pytest.mark.parametrize("form", [td3, ddpg, our_ddpg])
def test_one_network_converts_alone(tmp_path: Path, form: Any, member: str, to: str) -> None:
    form(tmp_path / "run")
    done = convert(str(tmp_path / f"run_{member}"), str(tmp_path / "out"), to=to)
    assert done.written
    assert done.report.complete
    if to == "keras":
        # A program loads it into a model of the network, whose layers its attributes are.
        tops = {str(path[0].value) for path in open_checkpoint(str(tmp_path / "out")).tree}
        assert tops
        assert member not in tops
        return
    assert {part.component for part in recognised(tmp_path / "out").parts} == {member}


@pytest.mark.parametrize("to", ["torch", "tf", "keras"])
@pytest.mark.parametrize("form", [td3, td3_with_suffix, ddpg])
def test_an_optimizer_alone_points_to_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any, to: str
) -> None:
    monkeypatch.chdir(tmp_path)
    form(Path("TD3 Pendulum_0"))
    for file in sorted(tmp_path.glob("*_optimizer*")):
        with pytest.raises(MappingError) as caught:
            convert(file.name, f"{file.name} out", to=to)
        assert caught.value.hint is not None
        ran = in_process(*shlex.split(caught.value.hint)[1:], cwd=tmp_path)
        assert ran.status == 0, ran.err
        assert recognised(f"{file.name} out").layout in ("td3_torch", "td3_tf")


def test_a_file_of_the_old_set_is_not_taken_over(tmp_path: Path, agent: TD3, golden: Golden) -> None:
    agent.save(str(tmp_path / "a"))
    torch.save(agent.actor.state_dict(), tmp_path / "a_actor_target")
    with pytest.raises(TargetExistsError) as caught:
        convert(str(TORCH_SAMPLE), str(tmp_path / "a"), to="fujimoto", allow_missing=True, force=True)
    golden(caught.value)
    (tmp_path / "a_actor_target").unlink()
    convert(str(TORCH_SAMPLE), str(tmp_path / "a"), to="fujimoto", allow_missing=True, force=True)
    assert recognised(tmp_path / "a").layout == "fujimoto"


def test_networks_that_their_classes_cannot_be_are_refused(tmp_path: Path, golden: Golden) -> None:
    actor = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))
    critic = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    torch.save({"actor": actor.state_dict(), "critic": critic.state_dict(), "total_it": 3}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError) as caught:
        convert(str(tmp_path / "a.pt"), str(tmp_path / "b"), to="fujimoto", allow_missing=True)
    golden(caught.value)
    torch.save({"actor": critic.state_dict(), "total_it": 3}, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError) as caught:
        convert(str(tmp_path / "a.pt"), str(tmp_path / "b"), to="fujimoto", allow_missing=True)
    golden(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt"]


# --- Other people's files --------------------------------------------------------------------------------


@pytest.mark.corpus
@pytest.mark.parametrize("env", ["BipedalWalker-v2/ONE", "LunarLanderContinuous-v2"])
def test_split_critics_of_other_people_are_one_agent(corpus: Path, env: str) -> None:
    folder = corpus / "torch" / "fujimoto" / "nikhil" / env
    path = str(next(folder.glob("*_actor.pth")))
    whole = restore_agent(path.removesuffix("_actor.pth"))
    assert {part.title for part in whole.binding.parts} >= {"actor", "critic/q1", "critic_target/q2"}
    assert derive_network_settings(whole, ActionBounds((-1.0,), (1.0,), "x"))[0].head == "tanh"


# --- Buffers with the action map --------------------------------------------------------------------------

MAPS: dict[str, dict[str, list[float]]] = {
    "scale and bias": {"action_scale": [2.0, 0.5], "action_bias": [0.25, -0.5]},
    "one scale": {"action_scale": [1.5]},
    "largest action": {"max_action": [1.5]},
    "limit per action": {"action_limit": [2.0, 0.5]},
}


@pytest.mark.parametrize("form", ["one dict", "one dict without targets", "set of files"])
@pytest.mark.parametrize("case", MAPS)
def test_buffers_with_the_action_map_are_taken(case: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    actor, critic = Actor(), Critic()
    for name, values in MAPS[case].items():
        actor.register_buffer(name, torch.tensor(values))
    path = tmp_path / "agent.pt"
    if form == "set of files":
        path = tmp_path / "agent"
        torch.save(actor.state_dict(), tmp_path / "agent_actor")
        torch.save(critic.state_dict(), tmp_path / "agent_critic")
    else:
        whole = {"actor": actor.state_dict(), "critic": critic.state_dict(), "total_it": 7}
        if form == "one dict":
            whole |= {"actor_target": actor.state_dict(), "critic_target": critic.state_dict()}
        torch.save(whole, path)
    agent = restore_agent(str(path))
    scale, bias = (np.array(MAPS[case].get(name, [0.0])) for name in (next(iter(MAPS[case])), "action_bias"))
    np.testing.assert_allclose(agent.known.action_low, np.broadcast_to(bias - scale, 2), atol=1e-6)
    np.testing.assert_allclose(agent.known.action_high, np.broadcast_to(bias + scale, 2), atol=1e-6)
    with torch.no_grad():
        expected = Actor.forward(actor, torch.from_numpy(observations())).numpy() / MAX * scale + bias
    same(actions(path), expected)
    target = tmp_path / ("converted" if form == "one dict" else "converted.pt")
    convert(str(path), str(target), to="tf" if form == "one dict" else "torch")
    same(actions(target), expected)
