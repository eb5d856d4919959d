"""Tianshou's policies of every version's names: as plain torch code runs them, with its own action map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import EnvironmentMismatchError, Tree, UsageError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from tests.conftest import in_process
from tests.restored import HIGH, LOW, actions, chosen, observations, q_values, recognised, same, without_a_way
from tests.test_layouts import LayoutContract
from tests.torch_agents import whole

torch = pytest.importorskip("torch")
nn = torch.nn


class Net(nn.Module):  # type: ignore[misc, name-defined]
    """As utils/net/common.py: Net keeps an MLP, which keeps a Sequential, both called `model`."""

    def __init__(self, width: int, *, norm: bool = False, activation: type[Any] = nn.ReLU) -> None:
        super().__init__()
        self.model = nn.Module()
        steps = [nn.Linear(width, 16), *([nn.LayerNorm(16)] if norm else []), activation()]
        self.model.model = nn.Sequential(
            *steps, nn.Linear(16, 8), *([nn.LayerNorm(8)] if norm else []), activation()
        )


class Last(nn.Module):  # type: ignore[misc, name-defined]
    """A preprocess net and one more layer for each of `heads`, as in utils/net/continuous.py."""

    def __init__(
        self,
        width: int,
        out: int,
        heads: tuple[str, ...] = ("last",),
        *,
        norm: bool = False,
        activation: type[Any] = nn.ReLU,
    ) -> None:
        super().__init__()
        self.preprocess = Net(width, norm=norm, activation=activation)
        for head in heads:
            setattr(self, head, nn.Module())
            getattr(self, head).model = nn.Sequential(nn.Linear(8, out))

    def forward(self, x: Any) -> Any:
        head = self.last if hasattr(self, "last") else self.mu
        return head.model(self.preprocess.model.model(x))


NAMES = {
    "0.4": ("actor", "actor_old", "critic1", "critic1_old", "critic2", "critic2_old"),
    "1.x": ("actor", "actor_old", "critic", "critic_old", "critic2", "critic2_old"),
    "2.x": (
        "policy.actor",
        "actor_old.module",
        "critic",
        "critic_old.module",
        "critic2",
        "critic2_old.module",
    ),
}


def td3(version: str, *, norm: bool = False) -> Any:
    torch.manual_seed(0)
    networks = (Last(*((3, 2) if "actor" in name else (5, 1)), norm=norm) for name in NAMES[version])
    return whole(dict(zip(NAMES[version], networks, strict=True)))


def mapped(raw: np.ndarray, bound: str | None) -> np.ndarray:
    """policy.map_action: bound, then scale from [-1, 1]."""
    low, high = np.float32(LOW), np.float32(HIGH)
    if bound == "clip":
        raw = np.clip(raw, -1, 1)
    return low + (high - low) * (raw + 1) / 2


def run(module: Any, *inputs: np.ndarray) -> Any:
    with torch.no_grad():
        return module(torch.as_tensor(np.concatenate(inputs, 1))).numpy()


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("version", NAMES)
def test_td3_of_every_version(tmp_path: Path, version: str, norm: bool) -> None:
    policy = td3(version, norm=norm)
    path = tmp_path / "policy.pth"
    torch.save(policy.state_dict(), path)
    assert recognised(path).layout == "tianshou"
    assert not without_a_way(path)
    assert len(recognised(path).parts) == 6
    actor = policy.policy.actor if version == "2.x" else policy.actor
    # max_action is the first upper bound, 2: more than clipping lets through.
    same(actions(path), mapped(2 * np.tanh(run(actor, observations())), "clip"))
    same(q_values(path, "critic/q2"), run(policy.critic2, observations(), chosen()))
    lacks = restore_agent(str(path)).binding.facts.lacks
    assert {lack.what for lack in lacks} == {
        "action bounds",
        "activation",
        "action map",
        "observation statistics",
    }
    assert [lack.what for lack in lacks if lack.decides] == ["activation", "action map"]


def test_sac_acts_by_tanh_of_its_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    actor = Last(3, 2, ("mu", "sigma"))
    critics = {name: Last(5, 1) for name in ("critic", "critic_old", "critic2", "critic2_old")}
    torch.save(whole({"actor": actor, **critics}).state_dict(), tmp_path / "policy.pth")
    assert not without_a_way(tmp_path / "policy.pth")
    same(actions(tmp_path / "policy.pth"), mapped(np.tanh(run(actor, observations())), None))
    # The second head is written under a name that every layout knows.
    assert convert(str(tmp_path / "policy.pth"), str(tmp_path / "a.pt"), layout="tianshou").report.complete
    branches = [part.branches for part in recognised(tmp_path / "a.pt").parts if part.title == "actor"]
    assert [name for name, _ in branches[0]] == ["log_std"]


def test_ppo_has_a_value_and_clips_its_mean(tmp_path: Path) -> None:
    """As in examples/mujoco/mujoco_ppo.py: tanh, and a mean that nothing bounds."""
    torch.manual_seed(0)
    actor, critic = Last(3, 2, ("mu",), activation=nn.Tanh), Last(3, 1, activation=nn.Tanh)
    actor.sigma_param = nn.Parameter(torch.zeros(2, 1))
    policy = whole(
        {"actor": actor, "critic": critic, "_actor_critic.actor": actor, "_actor_critic.critic": critic}
    )
    torch.save(policy.state_dict(), tmp_path / "policy.pth")
    assert [part.title for part in recognised(tmp_path / "policy.pth").parts] == ["actor", "value"]
    assert not without_a_way(tmp_path / "policy.pth")
    same(actions(tmp_path / "policy.pth"), mapped(run(actor, observations()), "clip"))
    lacks = restore_agent(str(tmp_path / "policy.pth")).binding.facts.lacks
    assert {lack.what for lack in lacks if lack.decides} == {"activation", "action map"}


def ppo(*, gail: bool = False) -> Any:
    actor, critic = Last(3, 2, ("mu",)), Last(3, 1)
    actor.sigma_param = nn.Parameter(torch.full((2, 1), -0.5))
    more = {"disc_net": Last(5, 1)} if gail else {}
    return whole({"actor": actor, "critic": critic, "_actor_critic.actor": actor, **more})


def discrete_sac(*, numbered: bool) -> Any:
    first, second = ("critic1", "critic2") if numbered else ("critic", "critic2")
    nets = {name: Last(3, 4) for name in ("actor", first, f"{first}_old", second, f"{second}_old")}
    return whole(nets)


@pytest.mark.parametrize("to", ["torch", "tf", "keras"])
@pytest.mark.parametrize(
    ("policy", "networks"),
    [
        (ppo, {"actor", "value"}),
        (lambda: ppo(gail=True), {"actor", "value", "discriminator"}),
        (lambda: discrete_sac(numbered=True), {"actor", "critic", "critic_target"}),
        (lambda: discrete_sac(numbered=False), {"actor", "critic", "critic_target"}),
    ],
    ids=["PPO", "GAIL", "discrete SAC 0.4", "discrete SAC 1.0"],
)
def test_every_tensor_of_a_policy_converts(tmp_path: Path, policy: Any, networks: set[str], to: str) -> None:
    torch.manual_seed(0)
    module = policy()
    torch.save(module.state_dict(), tmp_path / "policy.pth")
    binding = recognised(tmp_path / "policy.pth")
    assert {part.component for part in binding.parts} == networks
    done = convert(str(tmp_path / "policy.pth"), str(tmp_path / "out"), to=to)
    assert done.written
    assert done.report.complete
    tree = open_checkpoint(str(tmp_path / "out")).tree
    stored = sorted(tuple(sorted(leaf.array().ravel().tolist())) for _, leaf in tree.tensors() if leaf.shape)
    expected = sorted(tuple(sorted(parameter.ravel().tolist())) for parameter in module.parameters())
    assert [parameter for parameter in stored if parameter in set(expected)] == expected


def test_a_discrete_policy_takes_the_largest_output(tmp_path: Path) -> None:
    """The file does not list the actions: an environment of as many does."""
    torch.manual_seed(0)
    module = discrete_sac(numbered=False)
    torch.save(module.state_dict(), tmp_path / "policy.pth")
    assert "discrete" in recognised(tmp_path / "policy.pth").evidence
    agent = load_agent(str(tmp_path / "policy.pth"))
    expected = run(module.actor, observations()).argmax(-1)
    np.testing.assert_array_equal(agent.act(observations()), expected)
    assert any("discrete" in sentence for sentence in agent.assumed)
    with pytest.raises(EnvironmentMismatchError):
        load_agent(str(tmp_path / "policy.pth"), "Pendulum-v1")


@pytest.mark.parametrize("end", ["policy.pth", "policy.safetensors"])
def test_a_critic_on_the_actors_own_layers_has_no_actions_as_inputs(end: str, tmp_path: Path) -> None:
    """As in examples of PPO with discrete actions: `Critic(net)` and `Actor(net, ...)` with one `Net`."""
    torch.manual_seed(0)
    actor, critic = Last(3, 4, activation=nn.Tanh), Last(3, 1)
    critic.preprocess = actor.preprocess
    torch.save(whole({"actor": actor, "critic": critic}).state_dict(), tmp_path / "policy.pth")
    path = tmp_path / end
    if path.suffix == ".safetensors":
        convert(str(tmp_path / "policy.pth"), str(path), to="safetensors")
    result = recognised(path)
    assert "discrete" in result.evidence
    assert result.facts.head == "argmax"
    agent = load_agent(str(path))
    expected = run(actor, observations()).argmax(-1)
    np.testing.assert_array_equal(agent.act(observations()), expected)
    shown = in_process("inspect", str(path))
    assert "bounds" not in shown.out
    assert "scale" not in shown.out


@pytest.mark.parametrize("numbered", [True, False])
def test_discrete_actions_have_no_bounds(tmp_path: Path, numbered: bool) -> None:
    torch.save(discrete_sac(numbered=numbered).state_dict(), tmp_path / "policy.pth")
    done = convert(str(tmp_path / "policy.pth"), str(tmp_path / "out"), to="tf")
    assert done.written
    assert not [entry for entry in done.ledger if entry.what == "action bounds"]


class RunningMeanStd:
    """As utils/statistics.py keeps it."""

    def __init__(self) -> None:
        generator = np.random.default_rng(4)
        self.mean, self.var = generator.standard_normal(3), generator.uniform(0.5, 2, 3)
        self.count, self.eps, self.clip_max = 100, np.finfo(np.float32).eps.item(), 1.5


def test_a_checkpoint_keeps_the_statistics(tmp_path: Path) -> None:
    policy, rms = td3("1.x"), RunningMeanStd()
    torch.save({"model": policy.state_dict(), "obs_rms": rms}, tmp_path / "checkpoint.pth")
    assert not without_a_way(tmp_path / "checkpoint.pth")
    observed = np.clip((observations() - rms.mean) / np.sqrt(rms.var + rms.eps), -1.5, 1.5).astype(np.float32)
    same(actions(tmp_path / "checkpoint.pth"), mapped(2 * np.tanh(run(policy.actor, observed)), "clip"))
    known = restore_agent(str(tmp_path / "checkpoint.pth")).known
    assert known.is_read("obs_norm")
    assert known.origin("obs_norm") == "obs_rms"
    # Without a layout, only the sidecar keeps the numbers of the statistics' class.
    for layout, name in (("tianshou", "a.pt"), (None, "b.pt"), (None, "c.npz")):
        done = convert(str(tmp_path / "checkpoint.pth"), str(tmp_path / name), layout=layout)
        assert done.written
        assert done.report.complete
        same(actions(tmp_path / name), mapped(2 * np.tanh(run(policy.actor, observed)), "clip"))


def trained() -> tuple[dict[str, Any], list[Any]]:
    """The state of an algorithm of version 2 after one update, and its optimizers."""
    algorithm = td3("2.x")
    networks = (algorithm.policy, algorithm.critic, algorithm.critic2)
    optimizers = [torch.optim.Adam(network.parameters(), lr=1e-3) for network in networks]
    for network, optimizer in zip(networks, optimizers, strict=True):
        sum((weight**2).sum() for weight in network.parameters()).backward()
        optimizer.step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    return algorithm.state_dict() | {"_optimizers": states}, optimizers


class TestTianshou(LayoutContract):
    name = "tianshou"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        torch.save(trained()[0], tmp_path / "policy.pth")
        return open_checkpoint(str(tmp_path / "policy.pth")).tree


def test_the_algorithm_of_version_2_keeps_its_optimizers(tmp_path: Path) -> None:
    state, optimizers = trained()
    torch.save(state, tmp_path / "policy.pth")
    assert not without_a_way(tmp_path / "policy.pth")
    assert convert(str(tmp_path / "policy.pth"), str(tmp_path / "a.pt"), layout="tianshou").report.complete
    written = torch.load(tmp_path / "a.pt", weights_only=True)["critic_optimizer"]["state"]
    first, second = (optimizer.state_dict()["state"] for optimizer in optimizers[1:])
    assert torch.equal(written[0]["exp_avg"], first[0]["exp_avg"])
    assert torch.equal(written[6]["exp_avg_sq"], second[0]["exp_avg_sq"])


def test_tensors_without_axes_beside_the_layers_are_converted(tmp_path: Path) -> None:
    actor = Last(3, 2, ("mu", "sigma"))
    spiking = nn.Module()
    spiking.register_buffer("threshold", torch.ones(16))
    spiking.register_buffer("graded_spikes_factor", torch.tensor(1.0))
    spiking.register_buffer("reset_mechanism_val", torch.tensor(0))
    actor.preprocess.model.lif_in = spiking
    critics = {name: Last(5, 1) for name in ("critic", "critic_old", "critic2", "critic2_old")}
    torch.save(whole({"actor": actor, **critics}).state_dict(), tmp_path / "policy.pth")
    done = convert(str(tmp_path / "policy.pth"), str(tmp_path / "ckpt"), to="tf")
    assert done.written
    assert any("part by part" in note for note in done.report.notes)
    assert sum("lif_in" in move.source for move in done.report.mapped) == 3


@pytest.mark.corpus
def test_an_offline_agent_is_whole(corpus: Path) -> None:
    assert len(recognised(next((corpus / "torch/tianshou").rglob("td3_bc/*/policy.pth"))).parts) == 6


def test_an_actor_alone_is_of_the_actions_of_its_environment(tmp_path: Path) -> None:
    """REINFORCE of discrete actions has an actor and nothing else, as has imitation of continuous ones."""
    layers = [nn.Linear(4, 7), nn.ELU(), nn.Linear(7, 2)]
    modules = {"policy.actor.preprocess.model.model.0": layers[0], "policy.actor.last.model.0": layers[2]}
    state = {f"{name}.{k}": v for name, layer in modules.items() for k, v in layer.state_dict().items()}
    path = str(tmp_path / "policy.pth")
    torch.save(state, path)
    observed = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with load_agent(path, "CartPole-v1", facts=AgentFacts(activations=("elu",))) as agent:
        with torch.no_grad():
            expected = nn.Sequential(*layers)(torch.from_numpy(observed)).numpy()
        np.testing.assert_allclose(agent.scores(observed), expected, atol=1e-5)
        assert any("CartPole" in sentence for sentence in agent.assumed)
    with pytest.raises(UsageError) as caught:
        load_agent(path, facts=AgentFacts(activations=("elu",)))
    assert "env" in str(caught.value.hint)
