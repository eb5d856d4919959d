"""The networks of a restored agent as modules of PyTorch and Keras: equal outputs, exact weights."""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.conversion import graph_modules
from ckpttool.core import CkpttoolError, MissingExtraError, UnsupportedError, UsageError, plugins
from ckpttool.core.sidecar import ACTIVATIONS
from ckpttool.evaluation.agent_facts import AgentFacts
from tests import agent_models, tensorflow_child
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.test_load_agent import needs_library, saved_agents  # noqa: F401  # a fixture

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.environment]

SAMPLE = str(TF_SAMPLE)


def agent_output(agent: ckpttool.LoadedAgent, name: str, obs: np.ndarray, actions: np.ndarray) -> Any:
    """Return what the agent itself computes."""
    if name == "actor":
        return agent.scores(obs) if agent.choices is not None else agent.act(obs)
    if name == "value":
        return agent.value(obs)[:, None]
    if name == "q":
        return agent.q_values(obs)
    return agent.q_values(obs, actions)[:, [int(name[-1]) - 1]]


@needs_library
@pytest.mark.parametrize(
    ("name", "online"),
    [
        ("dqn", ["q"]),
        ("ppo", ["actor", "value"]),
        ("ppo_box", ["actor", "value"]),
        ("sac", ["actor", "critic_1", "critic_2"]),
        ("td3", ["actor", "critic_1", "critic_2"]),
    ],
)
def test_modules_compute_what_the_agent_does(saved_agents: Any, name: str, online: list[str]) -> None:  # noqa: F811
    folder, answer = saved_agents
    obs = np.array(answer["obs"], np.float32)
    actions = np.random.default_rng(3).uniform(-1, 1, (len(obs), 2)).astype(np.float32)
    agent = ckpttool.load_agent(str(folder / f"{name}.zip"))
    modules = agent.networks("torch")
    assert [module for module in modules if "target" not in module] == online
    # A library's own file: every parameter of these networks, bit for bit.
    tree = ckpttool.open(str(folder / f"{name}.zip")).tree
    stored = {leaf.array().tobytes() for _, leaf in tree.tensors()}
    for title in online:
        module, inputs = modules[title], [torch.from_numpy(obs)]
        if title.startswith("critic"):
            inputs.append(torch.from_numpy(actions))
        output = module(*inputs)
        expected = agent_output(agent, title, obs, actions)
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(output.detach().numpy(), expected, rtol=0, atol=1e-6 * scale)
        parameters = dict(module.named_parameters())
        assert parameters
        assert all(parameter.requires_grad for parameter in parameters.values())
        assert all(parameter.detach().numpy().tobytes() in stored for parameter in parameters.values())
        output.sum().backward()
        assert all(parameter.grad is not None for n, parameter in parameters.items() if not n.endswith("row"))


@needs_library
def test_the_deviation_of_a_policy_is_trained_with_it(saved_agents: Any) -> None:  # noqa: F811
    folder, answer = saved_agents
    obs = np.array(answer["obs"], np.float32)
    for name in ("ppo_box", "sac"):
        agent = ckpttool.load_agent(str(folder / f"{name}.zip"))
        actor = agent.networks("torch", "actor")["actor"]
        mean, std = actor.distribution(torch.from_numpy(obs))
        for tensor, known in zip((mean, std), agent.distribution(obs), strict=True):
            np.testing.assert_allclose(tensor.detach().numpy(), known, rtol=1e-5, atol=1e-6)
        (mean.sum() + std.log().sum()).backward()
        assert all(parameter.grad is not None for parameter in actor.parameters())
    with pytest.raises(UnsupportedError):
        ckpttool.load_agent(SAMPLE).networks("torch", "actor")["actor"].distribution(torch.zeros(1, 3))


def test_modules_are_independent_copies() -> None:
    agent = ckpttool.load_agent(SAMPLE)
    obs = np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32)
    before, first = agent.act(obs), agent.networks("torch")["actor"]
    twin, double = copy.deepcopy(first), copy.deepcopy(first).double()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(agent.act(obs), before)
    for other in (twin, agent.networks("torch", "actor")["actor"], double):
        np.testing.assert_allclose(
            other(torch.from_numpy(obs)).detach().numpy(), before, rtol=1e-5, atol=1e-6
        )
    assert not first(torch.from_numpy(obs)).any()
    first.load_state_dict(twin.state_dict(), strict=True)
    np.testing.assert_allclose(first(torch.from_numpy(obs)).detach().numpy(), before, rtol=1e-5, atol=1e-6)


def test_a_module_learns() -> None:
    actor = ckpttool.load_agent(SAMPLE).networks("torch", "actor")["actor"]
    obs = torch.randn(64, 3)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = (actor(obs) - 0.7).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


def test_what_cannot_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = ckpttool.load_agent(SAMPLE)
    for wrong in (("numpy",), ("torch", "critic_9")):
        with pytest.raises(UsageError):
            agent.networks(*wrong)
    monkeypatch.setattr(plugins.Plugin, "available", lambda _self: False)
    monkeypatch.setattr(plugins.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError):
        agent.networks("tensorflow")


@needs_library
@pytest.mark.tensorflow
def test_keras_models_compute_what_the_agent_does(saved_agents: Any, tmp_path: Path) -> None:  # noqa: F811
    tensorflow_child.require("tensorflow", "keras")
    paths = [SAMPLE, *(str(saved_agents[0] / f"{name}.zip") for name in ("ppo", "ppo_box", "sac"))]
    (tmp_path / "paths.json").write_text(json.dumps(paths))
    answer = tensorflow_child.run(agent_models.__file__, "compare", tmp_path)
    assert list(answer) == paths
    for path, outcome in answer.items():
        assert outcome["apart"] < 1e-5, path
        assert outcome["critic"] < 1e-5, path
        assert all(outcome["holds"].values()), (path, outcome)


@pytest.mark.tensorflow
def test_keras_models_with_memory_and_images_compute_what_the_agent_does(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    nn = torch.nn
    torch.manual_seed(0)
    bounds = {"action_scale": torch.ones(2), "action_bias": torch.zeros(2)}
    for kind in ("LSTM", "GRU"):
        actor = nn.ModuleDict(
            {"memory": getattr(nn, kind)(3, 6), "l1": nn.Linear(6, 5), "l2": nn.Linear(5, 2)}
        )
        torch.save({"actor": {**actor.state_dict(), **bounds}, "total_it": 5}, tmp_path / f"{kind}_agent.pt")
    sizes = ((4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1))
    layers = [layer for size in sizes for layer in (nn.Conv2d(*size), nn.ReLU())]
    images = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 3))
    state = {f"network.{name}": tensor for name, tensor in images.state_dict().items()}
    torch.save(state, tmp_path / "images_agent.cleanrl_model")
    answer = tensorflow_child.run(agent_models.__file__, "compare_steps", tmp_path)
    # Outputs of two steps, and the states between them.
    assert {name: outcome["compared"] for name, outcome in answer.items()} == {
        "GRU_agent": 3, "LSTM_agent": 4, "images_agent": 1
    }  # fmt: skip
    for name, outcome in answer.items():
        assert outcome["apart"] < 1e-5, name
        assert outcome["gradients"], name


# The code that `convert --code` writes: it runs without this package, and acts as the written file does.

TARGETS = {"torch": "pt", "safetensors": "safetensors", "npz": "npz", "tf": "index", "keras": "h5"}
IMPORTED = {
    "torch": {"torch", "numpy", "safetensors"},
    "keras": {"keras", "tensorflow", "numpy", "safetensors", "contextlib", "h5py"},
}


def imported(code: str) -> set[str]:
    """Return the packages that a program imports."""
    nodes = [*ast.walk(ast.parse(code))]
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


def written(source: str, folder: Path, name: str, target: str, **more: Any) -> str:
    """Convert with code, and store observations with the actions of the written file; return its path."""
    output = f"{folder / name}.{TARGETS[target]}"
    done = ckpttool.convert(source, output, to=target, code=f"{folder / name}.py", **more)
    agent = ckpttool.load_agent(done.target)
    shape = (64, *agent.observation_space.shape)
    obs = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    np.savez(folder / f"{name}.obs.npz", obs=obs, actions=agent.act(obs))
    assert done.load[-1] == f"actions = {name}.act(model, observations)"
    return done.target


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory, saved_agents: Any) -> tuple[Path, dict[str, str]]:  # noqa: F811
    folder, agents = tmp_path_factory.mktemp("code"), saved_agents[0]
    sources = {
        "sample": SAMPLE,
        **{n: str(agents / f"{n}.zip") for n in ("dqn", "several", "ppo_box", "sac")},
    }
    pairs = [(n, t) for n in sources for t in ("torch", "keras")]
    pairs += [("sample", "tf"), ("sac", "tf"), ("sample", "npz"), ("sac", "safetensors"), ("sac", "npz")]
    files = {f"{n}_{t}": written(sources[n], folder, f"{n}_{t}", t) for n, t in pairs}
    rng = np.random.default_rng(0)
    bare = {f"l{end}": torch.tensor(rng.normal(size=shape) / 2, dtype=torch.float32) for end, shape in SHAPES}
    torch.save(bare, folder / "bare.pt")
    torch.save({name: value.bfloat16() for name, value in bare.items()}, folder / "brain.pt")
    files["brain_npz"] = written(str(folder / "brain.pt"), folder, "brain_npz", "npz", facts=FACTS)
    numbers = {name.removeprefix("l."): value for name, value in bare.items()}
    torch.save(numbers, folder / "numbers.pt")
    for target in ("torch", "keras"):
        source = str(folder / "numbers.pt")
        files[f"numbers_{target}"] = written(source, folder, f"numbers_{target}", target, facts=FACTS)
    # Keras keeps such a deviation and the layers beside it in one object, which is no Sequential.
    actor = {f"actor_mean{name.removeprefix('l')}": value for name, value in bare.items()}
    critic = {
        f"critic{name.removeprefix('l')}": 1 + (value[:1] if ".2." in name else value)
        for name, value in bare.items()
    }
    torch.save({**actor, **critic, "actor_logstd": torch.zeros(1, 2)}, folder / "ppo.cleanrl_model")
    ends = AgentFacts(action_low=[-2.0], action_high=[2.0])
    source = str(folder / "ppo.cleanrl_model")
    files["cleanrl_keras"] = written(source, folder, "cleanrl_keras", "keras", facts=ends)
    for activation in ("leaky_relu(0.2)", *ACTIVATIONS):
        facts = dataclasses.replace(FACTS, activations=[activation])
        for target in ("torch", "keras"):
            name = f"{activation.partition('(')[0]}_{len(activation)}_{target}"
            files[name] = written(str(folder / "bare.pt"), folder, name, target, facts=facts)
    return folder, files


@needs_library
def test_code_runs_in_pytorch(coded: tuple[Path, dict[str, str]]) -> None:
    folder, files = coded
    programs = {name: (folder / f"{name}.py").read_text() for name in files}
    chosen = {n: files[n] for n, text in programs.items() if "torch" in imported(text)}
    assert {name.rpartition("_")[2] for name in chosen} == {"torch", "safetensors", "npz"}
    assert all(imported(programs[name]) <= IMPORTED["torch"] for name in chosen)
    (folder / "code.json").write_text(json.dumps(chosen))
    assert max(agent_models.run_code(folder).values()) <= 1e-6
    code = runpy.run_path(str(folder / "sac_torch.py"))
    obs, actions = torch.randn(9, 3), torch.rand(9, 2)
    values = ckpttool.load_agent(files["sac_torch"]).q_values(obs.numpy(), actions.numpy())
    critic = code["load"](files["sac_torch"]).critic
    for number, method in enumerate((critic.q1_output, critic.q2_output)):
        output = method(obs, actions).detach().numpy()[:, 0]
        np.testing.assert_allclose(output, values[:, number], rtol=1e-5, atol=1e-5)
    # The file is loaded strictly: a missing weight is an error.
    state = torch.load(files["sac_torch"], weights_only=True)
    del state["actor"]["mu.bias"]
    torch.save(state, folder / "less.pt")
    with pytest.raises(RuntimeError, match=r"mu\.bias"):
        code["load"](str(folder / "less.pt"))


@needs_library
@pytest.mark.tensorflow
def test_code_runs_in_keras(coded: tuple[Path, dict[str, str]]) -> None:
    tensorflow_child.require("tensorflow", "keras")
    folder, files = coded
    programs = {name: (folder / f"{name}.py").read_text() for name in files}
    chosen = {n: files[n] for n, text in programs.items() if "keras" in imported(text)}
    assert all(imported(programs[n]) <= IMPORTED["keras"] for n in chosen)
    (folder / "code.json").write_text(json.dumps(chosen))
    apart = tensorflow_child.run(agent_models.__file__, "run_code", folder)
    assert {name.rpartition("_")[2] for name in apart} == {"tf", "keras", "npz"}
    assert max(apart.values()) <= 1e-6


HOSTILE = ("a b", 'x"]=0;import os#', "\\", "import os", "é", "class", "0x", "{x}", "%s", "\\N{DIGIT ONE}")


def hostile_codes(folder: Path) -> list[str]:
    """Return the code of policies with hostile names of layers and of files."""
    codes = []
    for number, name in enumerate(HOSTILE):
        state = {f"{name}{end}": torch.randn(*shape) for end, shape in SHAPES}
        source = folder / f"{number} coding=utf-7 {name.encode().hex()}\nimport os#.pt"
        torch.save(state, source)
        done = ckpttool.convert(str(source), str(folder / f"{number}.pt"), code="-", force=True, facts=FACTS)
        codes.append(str(done.code))
        model = exec_code(codes[-1])["load"](done.target)
        assert {k.removeprefix("net.") for k in model.state_dict()} == {*state}
    return codes


SHAPES = ((".0.weight", (4, 3)), (".0.bias", (4,)), (".2.weight", (2, 4)), (".2.bias", (2,)))
FACTS = AgentFacts(activations=["tanh"], head="affine", action_low=[-2.0, -2.0], action_high=[2.0, 2.0])


def exec_code(code: str) -> dict[str, Any]:
    """Run a program; what it defines."""
    scope: dict[str, Any] = {}
    exec(compile(code, "code", "exec"), scope)
    return scope


def test_names_in_the_file_are_never_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(imported(code) == {"torch", "numpy"} for code in hostile_codes(tmp_path))
    # The test can fail: names that are not escaped end the string or the line.
    monkeypatch.setattr(graph_modules, "python_literal", lambda value: f'"{value}"')
    with pytest.raises((SyntaxError, AssertionError, KeyError, RuntimeError)):
        hostile_codes(tmp_path)


def test_code_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    code = tmp_path / "own.py"
    code.write_text("mine = 1\n")
    for target, more in (("a.pt", {}), ("a.zip", {"to": "sb3", "force": True}), ("a.onnx", {"force": True})):
        with pytest.raises(CkpttoolError):
            ckpttool.convert(SAMPLE, str(tmp_path / target), code=str(code), **more)
    odd = {**{f"l{end}": torch.randn(*shape) for end, shape in SHAPES}, "l.0.further": torch.ones(4)}
    torch.save({"actor": odd}, tmp_path / "odd.pt")
    with pytest.raises(CkpttoolError):
        ckpttool.convert(str(tmp_path / "odd.pt"), str(tmp_path / "b.pt"), code="-", facts=FACTS)
    assert {path.name for path in tmp_path.iterdir()} == {"own.py", "odd.pt"}
    assert code.read_text() == "mine = 1\n"


@pytest.mark.parametrize("target", ["b.pt", "b.safetensors"])
def test_statistics_beside_the_networks_are_loaded_with_them(target: str, tmp_path: Path) -> None:
    networks = {f"l{n}{end}": torch.randn(*shape) for n in (1, 2) for end, shape in SHAPES[2 * n - 2 : 2 * n]}
    networks = {name.replace(".0", "").replace(".2", ""): value for name, value in networks.items()}
    statistics = {"state_mean": torch.full((3,), 5.0), "state_std": torch.tensor([1.0, 2.0, 3.0])}
    torch.save({"actor": networks, **statistics}, tmp_path / "a.pt")
    path = str(tmp_path / target)
    done = ckpttool.convert(str(tmp_path / "a.pt"), path, code="-", facts=FACTS)
    code, obs = exec_code(str(done.code)), np.random.default_rng(1).normal(size=(9, 3)).astype(np.float32)
    model = code["load"](path)
    np.testing.assert_allclose(code["act"](model, obs), ckpttool.load_agent(path).act(obs), rtol=0, atol=1e-6)
    assert {"state_mean", "state_std"} <= {*model.state_dict()}
    # They are computed with, so that the code also runs a later file of the run.
    before = code["act"](model, obs)
    with torch.no_grad():
        model.state_mean += 1
        changed = code["act"](model, obs)
        model.state_mean -= 1
        model.state_std *= 2
    assert all(abs(before - actions).max() > 1e-3 for actions in (changed, code["act"](model, obs)))
    folded = ckpttool.convert(
        str(tmp_path / "a.pt"), path, code="-", facts=FACTS, fold_normalizer=True, force=True
    )
    code = exec_code(str(folded.code))
    np.testing.assert_allclose(code["act"](code["load"](path), obs), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("units", "computed"), [(6, True), (3, False)])
def test_a_critic_beside_a_memory_is_computed_if_its_inputs_are_those_of_the_policy(
    units: int, computed: bool, tmp_path: Path
) -> None:
    nn = torch.nn
    torch.manual_seed(0)
    actor = nn.ModuleDict({"memory": nn.LSTM(3, units), "l1": nn.Linear(units, 4), "l2": nn.Linear(4, 2)})
    critic = nn.ModuleDict({"l1": nn.Linear(5, 8), "l2": nn.Linear(8, 1)})
    bounds = {"action_scale": torch.ones(2), "action_bias": torch.zeros(2)}
    state = {"actor": {**actor.state_dict(), **bounds}, "critic": critic.state_dict(), "total_it": 5}
    torch.save(state, tmp_path / "a.pt")
    facts = AgentFacts(activations=["relu"])
    done = ckpttool.convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), code="-", facts=facts)
    model = exec_code(str(done.code))["load"](str(tmp_path / "b.pt"))
    # Of as many numbers as an observation has, the critic may as well receive what the memory computes.
    assert ("# not computed here: critic" in str(done.code)) is not computed
    if computed:
        obs, actions = torch.randn(9, 3), torch.randn(9, 2)
        expected = critic["l2"](torch.relu(critic["l1"](torch.cat([obs, actions], -1))))
        torch.testing.assert_close(model.critic(obs, actions), expected)


@pytest.mark.parametrize("written", [True, False])
def test_code_of_a_policy_names_what_it_does_not_apply(written: bool, tmp_path: Path) -> None:
    sizes = {"l1": (5, 16), "l2": (16, 8), "l3": (8, 2)}
    actor = torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in sizes.items()})
    torch.save(actor.state_dict(), tmp_path / "td3_actor")
    (tmp_path / "config.json").write_text(json.dumps({"activation": "tanh"}))
    code = ["--code", tmp_path / "code.py"] * written
    ran = in_process("convert", tmp_path / "td3_actor", tmp_path / "out.pt", *code, "--bounds", "-2", "2")
    # Weights alone compute nothing.
    assert ran.status == int(written), ran.err
    if written:
        assert "# not used: activation" in (tmp_path / "code.py").read_text()


def test_code_needs_the_bounds_that_the_environment_gives(tmp_path: Path) -> None:
    source, target = tmp_path / "a.pt", str(tmp_path / "b.pt")
    source.write_bytes(TORCH_SAMPLE.read_bytes())
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(str(source), target, code="-")
    assert not (tmp_path / "b.pt").exists()
    assert all(word in str(caught.value.hint) for word in ("env=", "action_low=", "action_high="))
    for more in ({"env": "Pendulum-v1"}, {"facts": AgentFacts(action_low=[-2.0], action_high=[2.0])}):
        code = ckpttool.convert(str(source), target, code="-", force=True, **more).code
        model = exec_code(str(code))
        actions = model["act"](model["load"](target), 9 * np.ones((5, 3), np.float32))
        assert abs(actions).max() > 1.5


def test_reserved_names_are_those_of_the_frameworks() -> None:
    own = {name for name in dir(torch.nn.Module()) if not name.startswith("_")}
    assert own <= graph_modules._RESERVED
