"""CleanRL's tuples: read as their classes run them, written so that these load them strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import MappingError, NotACheckpointError, UnsupportedError, UsageError
from ckpttool.core.sidecar import NO_BOUNDS, STATISTICS_UNKNOWN
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import AgentMetadata, matches_action_map
from tests.conftest import TORCH_SAMPLE
from tests.golden_texts import Golden
from tests.restored import HIGH, LOW, actions, chosen, observations, q_values, recognised, same, without_a_way
from tests.torch_agents import run
from tests.trees import tensorflow_tree

torch = pytest.importorskip("torch")
nn = torch.nn


class Actor(nn.Module):  # type: ignore[misc, name-defined]
    """As in td3_continuous_action.py and, with `gaussian`, sac_continuous_action.py."""

    def __init__(self, obs: int = 3, act: int = 2, hidden: int = 16, *, gaussian: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(obs, hidden), nn.Linear(hidden, hidden)
        if gaussian:
            self.fc_mean, self.fc_logstd = nn.Linear(hidden, act), nn.Linear(hidden, act)
        else:
            self.fc_mu = nn.Linear(hidden, act)
        low, high = torch.tensor(LOW[:act]), torch.tensor(HIGH[:act])
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_bias", (high + low) / 2)

    def forward(self, x: Any) -> Any:
        last = self.fc_mu if hasattr(self, "fc_mu") else self.fc_mean
        x = torch.tanh(last(torch.relu(self.fc2(torch.relu(self.fc1(x))))))
        return x * self.action_scale + self.action_bias


class QNetwork(nn.Module):  # type: ignore[misc, name-defined]
    """As in the same files; SAC calls it SoftQNetwork."""

    def __init__(self, obs: int = 3, act: int = 2, hidden: int = 16) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = (
            nn.Linear(obs + act, hidden),
            nn.Linear(hidden, hidden),
            nn.Linear(hidden, 1),
        )

    def forward(self, x: Any, a: Any) -> Any:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(torch.cat([x, a], 1))))))


def saved(path: Path, critics: int = 2, *, gaussian: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(0)
    modules = (Actor(gaussian=gaussian), *(QNetwork() for _ in range(critics)))
    torch.save(tuple(module.state_dict() for module in modules), path)
    return modules


@pytest.mark.parametrize(
    ("critics", "gaussian"), [(2, False), (1, False), (2, True)], ids=["td3", "ddpg", "sac"]
)
def test_it_acts_as_its_classes_do(tmp_path: Path, critics: int, gaussian: bool) -> None:
    path = tmp_path / "a.cleanrl_model"
    actor, *networks = saved(path, critics, gaussian=gaussian)
    assert recognised(path).layout == "cleanrl"
    assert not without_a_way(path)
    # The bounds are the file's own, whatever the environment says.
    same(actions(path, (-9.0, -9.0), (9.0, 9.0)), run(actor, observations()))
    for number, network in enumerate(networks, start=1):
        same(q_values(path, f"critic/q{number}"), run(network, observations(), chosen()))
    known = restore_agent(str(path)).known
    assert (known.action_low, known.action_high) == (list(LOW), list(HIGH))
    assert known.is_read("action_high")
    assert known.origin("action_high") == "weights"


def test_a_scale_of_one_number_is_every_actions(tmp_path: Path) -> None:
    actor, *networks = saved(tmp_path / "a.pt")
    state = actor.state_dict() | {"action_scale": torch.tensor(2.0), "action_bias": torch.tensor(0.0)}
    torch.save((state, *(network.state_dict() for network in networks)), tmp_path / "a.pt")
    actor.action_scale, actor.action_bias = state["action_scale"], state["action_bias"]
    same(actions(tmp_path / "a.pt"), run(actor, observations()))


def test_a_ppo_agent_acts_by_its_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = [nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()]
    agent = nn.Module()
    agent.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    agent.actor_mean = nn.Sequential(*sizes, nn.Linear(16, 2))
    agent.actor_logstd = nn.Parameter(torch.zeros(1, 2))
    agent.actor_mean[4].weight.data *= 9
    torch.save(agent.state_dict(), tmp_path / "ppo.cleanrl_model")
    assert recognised(tmp_path / "ppo.cleanrl_model").layout == "cleanrl"
    assert not without_a_way(tmp_path / "ppo.cleanrl_model")
    expected = np.clip(run(agent.actor_mean, observations()).numpy(), LOW, HIGH)
    same(actions(tmp_path / "ppo.cleanrl_model"), expected)
    lacks = restore_agent(str(tmp_path / "ppo.cleanrl_model")).binding.facts.lacks
    assert lacks == (NO_BOUNDS, STATISTICS_UNKNOWN)


def test_a_tuple_of_other_networks_is_not_claimed(tmp_path: Path) -> None:
    torch.save((nn.Linear(3, 2).state_dict(), nn.Linear(3, 2).state_dict()), tmp_path / "a.pt")
    with pytest.raises(AssertionError):
        recognised(tmp_path / "a.pt")


def test_parameters_of_jax_are_named(tmp_path: Path, golden: Golden) -> None:
    # flax.serialization.to_bytes([{"params": {}}, {"params": {}}])
    (tmp_path / "a.cleanrl_model").write_bytes(b"\x82\xa10\x81\xa6params\x80\xa11\x81\xa6params\x80")
    with pytest.raises(NotACheckpointError) as caught:
        open_checkpoint(str(tmp_path / "a.cleanrl_model"))
    golden(caught.value)


# --- Written ---------------------------------------------------------------------------------------------


def loaded(path: Path, actor: Any, networks: list[Any]) -> None:
    states = torch.load(path, weights_only=True)
    assert type(states) is tuple
    assert len(states) == 1 + len(networks)
    for module, state in zip((actor, *networks), states, strict=True):
        module.load_state_dict(state, strict=True)


def test_what_is_written_loads_strictly(tmp_path: Path) -> None:
    target = tmp_path / "a.cleanrl_model"
    done = convert(str(TORCH_SAMPLE), str(target), allow_missing=True)
    assert not done.report.missing
    actor, networks = Actor(3, 1, 64), [QNetwork(3, 1, 64), QNetwork(3, 1, 64)]
    loaded(target, actor, networks)
    assert (actor.action_scale.tolist(), actor.action_bias.tolist()) == ([2.0], [0.0])
    same(actions(TORCH_SAMPLE), run(actor, observations()))
    for number, network in enumerate(networks, start=1):
        same(q_values(TORCH_SAMPLE, f"critic/q{number}", 1), run(network, observations(), chosen(1)))


@pytest.mark.parametrize("gaussian", [False, True])
def test_there_and_back_is_the_same(tmp_path: Path, gaussian: bool) -> None:
    saved(tmp_path / "a.cleanrl_model", gaussian=gaussian)
    assert convert(
        str(tmp_path / "a.cleanrl_model"), str(tmp_path / "b.pt"), layout="cleanrl"
    ).report.complete
    assert convert(str(tmp_path / "b.pt"), str(tmp_path / "c.cleanrl_model")).report.complete
    one, two = (torch.load(tmp_path / f"{name}.cleanrl_model", weights_only=True) for name in "ac")
    for mine, other in zip(one, two, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_an_actor_without_bounds_is_never_written(tmp_path: Path) -> None:
    actor, *networks = saved(tmp_path / "a.cleanrl_model")
    names = {"fc1": "l1", "fc2": "l2", "fc_mu": "l3", "fc3": "l3"}
    for member, module in (("actor", actor), ("critic", networks[0])):
        state = {
            f"{names[name.split('.')[0]]}.{name.split('.')[1]}": value
            for name, value in module.state_dict().items()
            if "." in name
        }
        torch.save(state, tmp_path / f"set_{member}")
    target = tmp_path / "b.cleanrl_model"
    for allow_missing in (False, True):
        with pytest.raises(UsageError) as caught:
            convert(str(tmp_path / "set"), str(target), allow_missing=allow_missing)
        assert "--bounds LOW HIGH" in str(caught.value.hint)
        assert not target.exists()
    bounded = AgentFacts(action_low=-2, action_high=2)
    assert convert(str(tmp_path / "set"), str(target), facts=bounded).written
    loaded(target, actor, networks[:1])
    assert actor.action_scale.tolist() == [2.0, 2.0]


def test_an_agent_without_q_functions_is_refused(tmp_path: Path, golden: Golden) -> None:
    torch.manual_seed(0)
    layers = {"l1": nn.Linear(3, 8), "l2": nn.Linear(8, 8), "l3": nn.Linear(8, 2)}
    torch.save({"actor": nn.ModuleDict(layers).state_dict()}, tmp_path / "actor.pt")
    with pytest.raises(UnsupportedError) as caught:
        convert(str(tmp_path / "actor.pt"), str(tmp_path / "b.cleanrl_model"), allow_missing=True)
    golden(caught.value)


@pytest.mark.parametrize("to", ["cleanrl", "fujimoto", "tf"])
def test_statistics_that_only_the_sidecar_keeps_are_noted(tmp_path: Path, to: str, golden: Golden) -> None:
    torch.manual_seed(0)
    actor, critic = (
        nn.Sequential(nn.Linear(n, 8), nn.ReLU(), nn.Linear(8, out)) for n, out in ((3, 2), (5, 1))
    )
    agent = {"actor": actor.state_dict(), "critic": critic.state_dict(), "total_it": 3}
    agent["normalizer"] = {"mean": torch.ones(3), "var": torch.full((3,), 4.0)}
    torch.save(agent, tmp_path / "a.pt")
    target = str(tmp_path / "b-1")
    facts = AgentFacts(action_low=-1, action_high=1) if to == "cleanrl" else NO_FACTS
    notes = convert(str(tmp_path / "a.pt"), target, to=to, allow_missing=True, facts=facts).report.notes
    golden("\n".join(notes))
    if to == "tf":  # the others' bounds are missing or given
        same(actions(target), actions(tmp_path / "a.pt"))
    del agent["normalizer"]
    torch.save(agent, tmp_path / "a.pt")
    again = convert(str(tmp_path / "a.pt"), target, to=to, allow_missing=True, force=True, facts=facts)
    assert not any("statistics" in note for note in again.report.notes)


@pytest.mark.parametrize("to", ["cleanrl", "fujimoto"])
def test_q_functions_of_distributions_are_refused(tmp_path: Path, to: str, golden: Golden) -> None:
    actor, critic = (
        nn.Sequential(nn.Linear(n, 8), nn.ReLU(), nn.Linear(8, out)) for n, out in ((3, 2), (5, 11))
    )
    agent = {"actor": actor.state_dict(), "critic": critic.state_dict(), "total_it": 3}
    torch.save(agent, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError) as caught:
        convert(str(tmp_path / "a.pt"), str(tmp_path / "b"), to=to, allow_missing=True)
    golden(caught.value)


@pytest.mark.parametrize(
    ("head", "low", "high", "it_is"),
    [
        ("affine", (-1.0, 0.0), (1.0, 3.0), True),
        ("tanh", (-2.0, -2.0), (2.0, 2.0), True),
        ("tanh", (-1.0, -2.0), (2.0, 2.0), False),
        ("tanh", None, None, None),
        ("tanh_clip_affine", (0.0, -5.0), (1.0, 5.0), True),
        ("tanh_clip_affine", (-2.0, -2.0), (2.0, 2.0), False),
        ("clip", (-1.0, -1.0), (1.0, 1.0), False),
    ],
)
def test_which_action_maps_tanh_and_bounds_are(
    head: str, low: tuple[float, ...] | None, high: tuple[float, ...] | None, it_is: bool | None
) -> None:
    arrays = {}
    if low is not None and high is not None:
        a, b = np.float32(low), np.float32(high)
        arrays = {"actor/action_scale": (b - a) / 2, "actor/action_bias": (b + a) / 2}
    facts = AgentMetadata(head=head, hidden="relu", epsilon=0.0)
    assert matches_action_map(facts, tensorflow_tree(arrays), "affine") is it_is


def test_a_scale_of_another_size_is_refused(tmp_path: Path, golden: Golden) -> None:
    actor, *networks = saved(tmp_path / "a.pt")
    state = actor.state_dict() | {"action_scale": torch.ones(3)}
    torch.save((state, *(network.state_dict() for network in networks)), tmp_path / "a.pt")
    with pytest.raises(MappingError) as caught:
        restore_agent(str(tmp_path / "a.pt"))
    golden(caught.value)


def discrete(name: str) -> tuple[Any, Any]:
    """Return an agent as dqn.py, c51.py and ppo.py keep it, and its scores for observations."""

    def mlp(width: int, activation: type[Any]) -> Any:
        return nn.Sequential(
            nn.Linear(4, 12), activation(), nn.Linear(12, 8), activation(), nn.Linear(8, width)
        )

    torch.manual_seed(0)
    module = nn.Module()
    if name == "ppo":
        module.critic, module.actor = mlp(1, nn.Tanh), mlp(2, nn.Tanh)
        return module, module.actor
    if name == "dqn":
        module.network = mlp(2, nn.ReLU)
        return module, module.network
    module.register_buffer("atoms", torch.linspace(-3, 7, steps=11))
    module.network = mlp(2 * 11, nn.ReLU)
    return module, lambda x: (module.network(x).view(len(x), 2, 11).softmax(2) * module.atoms).sum(2)


@pytest.mark.parametrize("name", ["dqn", "c51", "ppo"])
def test_discrete_agents_take_the_best_action(name: str, tmp_path: Path) -> None:
    module, scores = discrete(name)
    path = tmp_path / f"{name}.cleanrl_model"
    state = module.state_dict()
    torch.save({"model_weights": state, "args": {"env_id": "CartPole-v1"}} if name == "c51" else state, path)
    assert not without_a_way(path)
    obs = np.random.default_rng(1).normal(size=(200, 4)).astype(np.float32)
    agent = load_agent(str(path), None if name == "c51" else "CartPole-v1")
    with torch.no_grad():
        expected = scores(torch.from_numpy(obs))
    np.testing.assert_allclose(agent.scores(obs), expected.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(agent.act(obs), expected.argmax(1).numpy())
    assert bool(agent.facts.env) == (name == "c51")
    for target in ("out.pt", "out.npz", *([] if name == "c51" else ["out.weights.h5"])):
        done = convert(str(path), str(tmp_path / target))
        assert done.written
        again = load_agent(str(tmp_path / target), None if name == "c51" else "CartPole-v1")
        np.testing.assert_array_equal(again.act(obs), expected.argmax(1).numpy())
