"""Spinning Up's whole modules and TF1 saves: read without their classes, run as these run."""

from __future__ import annotations

import importlib.util
import pickle
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import UnsupportedError, display
from ckpttool.core.sidecar import NO_ACTIVATIONS, NO_BOUNDS
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import spinningup
from ckpttool.mapping.rules import canonical_tree
from tests import saved_models
from tests.golden_texts import Golden
from tests.restored import actions, chosen, observations, q_values, recognised, same, without_a_way
from tests.tensorflow_child import run_each
from tests.torch_agents import run
from tests.trees import dense, tensorflow_tree

torch = pytest.importorskip("torch")
nn = torch.nn
LIMIT = np.float32(2.0)


def mlp(sizes: list[int], activation: Any, output: Any = nn.Identity) -> Any:
    """As in core.py of every algorithm: Linear and activation by turns, the output's too."""
    steps = []
    for number, (n_in, n_out) in enumerate(pairwise(sizes)):
        steps += [nn.Linear(n_in, n_out), activation() if number < len(sizes) - 2 else output()]
    return nn.Sequential(*steps)


class MLPActor(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, activation: Any, output: Any = nn.Tanh) -> None:
        super().__init__()
        self.pi = mlp([3, 16, 8, 2], activation, output)
        self.act_limit = LIMIT

    def forward(self, obs: Any) -> Any:
        return self.act_limit * self.pi(obs)


class SquashedGaussianMLPActor(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.net = mlp([3, 16, 8], activation, activation)
        self.mu_layer, self.log_std_layer = nn.Linear(8, 2), nn.Linear(8, 2)
        self.act_limit = LIMIT

    def forward(self, obs: Any) -> Any:
        return self.act_limit * torch.tanh(self.mu_layer(self.net(obs)))


class MLPGaussianActor(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((2,), -0.5))
        self.mu_net = mlp([3, 16, 8, 2], activation)

    def forward(self, obs: Any) -> Any:
        return self.mu_net(obs)


class MLPCategoricalActor(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.logits_net = mlp([3, 16, 8, 4], activation)


class MLPQFunction(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.q = mlp([5, 16, 8, 1], activation)

    def forward(self, obs: Any, act: Any) -> Any:
        return self.q(torch.cat([obs, act], dim=-1)).squeeze(-1)


class MLPCritic(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.v_net = mlp([3, 16, 8, 1], activation)


class MLPActorCritic(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, pi: Any, **critics: Any) -> None:
        super().__init__()
        self.pi = pi
        for name, critic in critics.items():
            setattr(self, name, critic)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> str:
    """The classes as those of a package that nobody has when the file is read."""
    name = "spinup.algos.pytorch.td3.core"
    packages = [name.rsplit(".", cut)[0] for cut in range(5)]
    for package in packages:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for module_class in (
        MLPActor,
        SquashedGaussianMLPActor,
        MLPGaussianActor,
        MLPCategoricalActor,
        MLPQFunction,
        MLPCritic,
        MLPActorCritic,
    ):
        monkeypatch.setattr(module_class, "__module__", name)
        setattr(sys.modules[name], module_class.__name__, module_class)
    return name


def saved(run_folder: Path, agent: Any, *, old: bool = False) -> Path:
    """As logx.py saves it, below a run's folder with what lies beside it."""
    path = run_folder / "pyt_save" / "model.pt"
    path.parent.mkdir(parents=True)
    with warnings.catch_warnings():
        # The stream keeps the classes' source where it finds it.
        warnings.simplefilter("ignore", UserWarning)
        torch.save(agent, path, _use_new_zipfile_serialization=not old)
    (run_folder / "config.json").write_text('{"exp_name": "test"}')
    return path


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.ELU, nn.SiLU, nn.LeakyReLU])
@pytest.mark.parametrize("policy", [MLPActor, SquashedGaussianMLPActor])
def test_a_whole_module_acts_as_its_classes_do(
    tmp_path: Path, policy: Any, activation: Any, old: bool
) -> None:
    torch.manual_seed(0)
    agent = MLPActorCritic(policy(activation), q1=MLPQFunction(activation), q2=MLPQFunction(activation))
    path = saved(tmp_path, agent, old=old)
    assert recognised(path).layout == "spinningup"
    assert not without_a_way(path)
    same(actions(path), run(agent.pi, observations()))
    same(q_values(path, "critic/q2"), run(agent.q2, observations(), chosen()))
    known = restore_agent(str(path)).known
    assert known.is_read("action_high")
    assert known.origin("action_high") == "act_limit"
    assert known.is_read("activations")
    assert known.origin("activations").startswith("pi.")
    assert known.action_high == [2.0, 2.0]


@pytest.mark.usefixtures("core")
def test_the_folder_of_a_run_stands_for_its_model(tmp_path: Path) -> None:
    path = saved(tmp_path, MLPActorCritic(MLPActor(nn.ReLU), q=MLPQFunction(nn.ReLU)))
    for location in (tmp_path, path.parent, path):
        assert open_checkpoint(str(location)).path == str(path)


@pytest.mark.usefixtures("core")
def test_a_ppo_agent_acts_by_its_mean(tmp_path: Path) -> None:
    agent = MLPActorCritic(MLPGaussianActor(nn.Tanh), v=MLPCritic(nn.Tanh))
    path = saved(tmp_path, agent)
    assert not without_a_way(path)
    same(actions(path), run(agent.pi, observations()))
    assert [part.title for part in recognised(path).parts] == ["actor", "value"]


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    "policy",
    [
        MLPActor(nn.PReLU),
        MLPActor(nn.ReLU, nn.Sigmoid),
        MLPActor(lambda: nn.ELU(0.5)),
    ],
    ids=["prelu", "another output", "elu of another slope"],
)
def test_what_cannot_be_run_is_said(tmp_path: Path, policy: Any, golden: Golden) -> None:
    path = saved(tmp_path, MLPActorCritic(policy, q=MLPQFunction(nn.ReLU)))
    with pytest.raises(UnsupportedError) as caught:
        actions(path)
    golden(caught.value)


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize(
    "limit",
    [torch.ones(2), [1.0, 2.0], -1.0, float("inf"), 10**400, "2"],
    ids=["tensor", "list", "negative", "infinite", "huge", "text"],
)
def test_a_limit_that_is_no_number_is_said(tmp_path: Path, limit: object, golden: Golden) -> None:
    policy = MLPActor(nn.ReLU)
    policy.act_limit = limit
    path = saved(tmp_path, MLPActorCritic(policy, q=MLPQFunction(nn.ReLU)))
    with pytest.raises(UnsupportedError) as caught:
        actions(path)
    golden(caught.value)


@pytest.mark.usefixtures("core")
def test_it_becomes_a_plain_agent(tmp_path: Path, golden: Golden) -> None:
    agent = MLPActorCritic(MLPActor(nn.ELU), q1=MLPQFunction(nn.ELU), q2=MLPQFunction(nn.ELU))
    path = saved(tmp_path, agent)
    assert convert(str(path), str(tmp_path / "a.pt"), layout="spinningup").report.complete
    same(actions(tmp_path / "a.pt"), run(agent.pi, observations()))
    # The authors' classes are of ReLU, and the set's sidecar says what this agent's are.
    done = convert(str(path), str(tmp_path / "set"), to="fujimoto")
    golden("\n".join(note for note in done.report.notes if "relu" in note))
    same(actions(tmp_path / "set"), run(agent.pi, observations()))


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("policy", [MLPActor, SquashedGaussianMLPActor])
def test_its_state_dict_acts_as_its_sidecar_says(tmp_path: Path, policy: Any) -> None:
    agent = MLPActorCritic(policy(nn.ELU), q1=MLPQFunction(nn.ELU), q2=MLPQFunction(nn.ELU))
    path = saved(tmp_path, agent)
    report = convert(str(path), str(tmp_path / "a.pt"), allow_missing=True).report
    assert {line.target.replace("/", ".") for line in report.mapped} == set(agent.state_dict())
    assert recognised(tmp_path / "a.pt").layout == "spinningup"
    same(actions(tmp_path / "a.pt"), run(agent.pi, observations()))


@pytest.mark.parametrize(
    ("pi", "critics", "head", "hidden"),
    [
        (MLPActor(nn.ReLU), {"q": MLPQFunction(nn.ReLU)}, "tanh", "relu"),
        (MLPGaussianActor(nn.Tanh), {"v": MLPCritic(nn.Tanh)}, "identity", "tanh"),
    ],
    ids=["ddpg", "ppo"],
)
def test_a_state_dict_alone_has_the_habits_of_core(
    tmp_path: Path, pi: Any, critics: dict[str, Any], head: str, hidden: str
) -> None:
    agent = MLPActorCritic(pi, **critics)
    torch.save(agent.state_dict(), tmp_path / "a.pt")
    binding = recognised(tmp_path / "a.pt")
    assert (binding.layout, binding.facts.head, binding.facts.hidden) == ("spinningup", head, hidden)
    assert {*binding.facts.lacks} == {NO_BOUNDS, NO_ACTIVATIONS}
    assert not binding.unplaced
    assert not without_a_way(tmp_path / "a.pt")


@pytest.mark.parametrize("whole", [True, False])
def test_the_largest_logit_is_chosen(whole: bool, tmp_path: Path) -> None:
    """The module contains its activations; a state_dict has the default."""
    module = MLPActorCritic(MLPCategoricalActor(nn.ELU if whole else nn.Tanh), v=MLPCritic(nn.Tanh))
    path = tmp_path / "a.pt"
    if whole:
        path = saved(tmp_path, module)
    else:
        torch.save(module.state_dict(), path)
    agent = load_agent(str(path))
    with torch.no_grad():
        expected = module.pi.logits_net(torch.from_numpy(observations())).numpy()
    same(agent.scores(observations()), expected)
    np.testing.assert_array_equal(agent.act(observations()), expected.argmax(1))
    assert not any(entry.what == "action bounds" for entry in restore_agent(str(path)).ledger)


# --- TF1: variables by name ------------------------------------------------------------------------------


def variables(policy: list[tuple[int, int]], critics: tuple[str, ...]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for scope in ("main", "target"):
        for name, sizes in {"pi": policy, **{q: [(5, 16), (16, 8), (8, 1)] for q in critics}}.items():
            for number, size in enumerate(sizes):
                layer = f"dense_{number}" if number else "dense"
                arrays |= dense(generator, f"{scope}/{name}/{layer}", *size)
    return arrays


@pytest.mark.parametrize(
    ("policy", "critics", "titles"),
    [
        ([(3, 16), (16, 8), (8, 2)], ("q",), {"actor", "critic/q1"}),
        ([(3, 16), (16, 8), (8, 2)], ("q1", "q2"), {"actor", "critic/q1", "critic/q2"}),
        ([(3, 16), (16, 8), (8, 2), (8, 2)], ("q1", "q2"), {"actor", "critic/q1", "critic/q2"}),
    ],
    ids=["ddpg", "td3", "sac"],
)
def test_variables_of_tensorflow_1(
    policy: list[tuple[int, int]], critics: tuple[str, ...], titles: set[str]
) -> None:
    tree = tensorflow_tree(variables(policy, critics))
    binding = spinningup.recognise(tree, "tf1_save")
    assert binding is not None
    targets = {title.replace("actor", "actor_target").replace("critic", "critic_target") for title in titles}
    assert {part.title for part in binding.parts} == titles | targets
    assert {move.source for move in binding.moves.moves} == set(tree)
    agent = {display(path) for path in canonical_tree(tree, binding.moves)}
    assert ("actor/log_std/kernel" in agent) is (len(policy) == 4)
    assert "actor/3/kernel" not in agent


def test_moments_without_owners_are_no_layers() -> None:
    weights = variables([(3, 16), (16, 8), (8, 2)], ("q",))
    moments = {f"{name}/{slot}": value for name, value in weights.items() for slot in ("Adam", "Adam_1")}
    tree = tensorflow_tree({**weights, **moments})
    binding = spinningup.recognise(tree, "tf1_save")
    assert binding is not None
    assert not binding.unplaced
    assert len(binding.moves.moves) == len(weights)


def test_variables_of_tensorflow_1_with_a_state_value() -> None:
    generator = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, last in (("pi", 2), ("v", 1)):
        for number, size in enumerate([(3, 16), (16, 8), (8, last)]):
            arrays |= dense(generator, f"{name}/{f'dense_{number}' if number else 'dense'}", *size)
    for more, head in (({}, "argmax"), ({"pi/log_std": np.zeros(2, "f4")}, "identity")):
        tree = tensorflow_tree({**arrays, **more})
        binding = spinningup.recognise(tree, "tf1_save")
        assert binding is not None
        assert {part.title for part in binding.parts} == {"actor", "value"}
        assert {move.source for move in binding.moves.moves} == set(tree)
        assert binding.facts.head == head


@pytest.fixture(scope="module")
def tf1_saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    folder = tmp_path_factory.mktemp("spinningup")
    facts = run_each(str(Path(saved_models.__file__)), {"build_spinningup": folder})
    return folder, facts["build_spinningup"]


@pytest.mark.parametrize("location", ["", "tf1_save"])
@pytest.mark.parametrize("name", saved_models.SPINNING_UP)
def test_tf1_save_plays_as_its_graph(
    tf1_saves: tuple[Path, dict[str, Any]], name: str, location: str, tmp_path: Path
) -> None:
    """The run's folder, which has vars.pkl beside it, and the SavedModel itself."""
    folder, row = tf1_saves
    source, truth = (
        str(folder / name / location),
        {key: np.float32(value) for key, value in row[name].items()},
    )
    (folder / name / "vars.pkl").write_bytes(pickle.dumps({"env": None}, 3))
    facts = AgentFacts(action_low=(-2.0, -2.0), action_high=(2.0, 2.0)) if "ppo" not in name else AgentFacts()
    target = str(tmp_path / "out.pt")
    assert convert(source, target, to="torch", facts=facts).written
    for path in (source, target):
        with load_agent(path, facts=facts) as agent:
            assert agent.facts.activations[0] == saved_models.SPINNING_UP[name][0]
            obs = truth["observations"]
            outputs = agent.scores(obs) if agent.choices is not None else agent.act(obs)
            np.testing.assert_allclose(outputs, truth["outputs"], atol=5e-6)
            if agent.choices is not None:
                np.testing.assert_array_equal(agent.act(obs), truth["outputs"].argmax(1))
                assert len(set(agent.act(obs))) == 2
