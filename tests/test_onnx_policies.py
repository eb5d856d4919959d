"""Policies in ONNX: played as onnxruntime plays the same file, or refused by the operator's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.conversion.export import export
from ckpttool.core import ChecksumError, CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, build_part_network, derive_network_settings
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import Agent, restore_agent
from ckpttool.libraries import layer_widths
from ckpttool.libraries.schema import Choices
from ckpttool.networks import Activation, ArgMax, AtomMean, Dense, NetworkBuilder, QuantileMean, numpy_backend
from tests.conftest import ROOT, TF_SAMPLE
from tests.test_policy_alone import followed

onnx = pytest.importorskip("onnx", reason="the extra `onnx` makes the models")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra `onnx` runs the models")

CORPUS = ROOT.parent / "shared" / "corpus" / "exported" / "onnx"


def exported(model: nn.Module, path: Path, *inputs: torch.Tensor, **options: Any) -> Path:
    """Write a module as PyTorch's exporter of TorchScript does, with a free number of observations."""
    arguments = inputs or (torch.randn(1, 3),)
    named = {"input_names": ["obs"], "dynamic_axes": {"obs": {0: "batch"}}, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), arguments, str(path), dynamo=False, **named)
    return path


def actions_of(agent: Agent, observations: np.ndarray) -> np.ndarray:
    """Return the actions of the policy for rows of observations, from its first state."""
    part = agent.part("actor")
    assert part is not None
    count = layer_widths(agent.tree, part)[1]
    wiring, _ = derive_network_settings(agent, ActionBounds([-1.0] * count, [1.0] * count, None))
    return np.asarray(numpy_backend.build(build_part_network(agent, part, wiring)).step(observations)[0])


def runs_as_onnxruntime(path: Path, network: str = "actor", output: str | None = None) -> Agent:
    """Compare the policy with onnxruntime on the same file; return the agent."""
    agent = restore_agent(str(path), network=network)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    first = session.get_inputs()[0]
    rest = [
        n if isinstance(n, int) else layer_widths(agent.tree, agent.binding.parts[0])[0]
        for n in first.shape[1:]
    ]
    rows = np.random.default_rng(1).normal(0, 2, (16, *rest)).astype(np.float32)
    name = output or session.get_outputs()[0].name
    batches = rows[:, None] if first.shape[0] == 1 else [rows]
    expected = np.concatenate([session.run([name], {first.name: batch})[0] for batch in batches])
    actions = actions_of(agent, rows)
    np.testing.assert_allclose(actions, expected.reshape(actions.shape), rtol=1e-4, atol=2e-5)
    return agent


class Policy(nn.Module):
    """A policy of layers and a function before and after them."""

    def __init__(self, *layers: nn.Module, before: Any = None, after: Any = None) -> None:
        super().__init__()
        self.actor = nn.Sequential(*layers)
        self.register_buffer("mean", torch.tensor([0.5, -1.0, 2.0]))
        self.register_buffer("std", torch.tensor([0.5, 1.5, 2.5]))
        self.before, self.after = before, after

    def forward(self, obs: torch.Tensor) -> Any:
        obs = self.before(self, obs) if self.before else obs
        x = self.actor(obs)
        return self.after(self, x) if self.after else x


def mlp(activation: Callable[[], nn.Module] = nn.Tanh, out: int = 2, *, bias: bool = True) -> list[nn.Module]:
    return [nn.Linear(3, 16), activation(), nn.Linear(16, 16, bias=bias), activation(), nn.Linear(16, out)]


class Residual(nn.Module):
    """Layers that are added and joined to what they take."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(19, 2)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(obs))
        x = x + torch.relu(self.b(x))
        return torch.tanh(self.c(torch.cat([x, obs], dim=-1)))


class Gaussian(nn.Module):
    """A mean and a deviation from one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
        self.mean, self.log_std = nn.Linear(16, 2), nn.Linear(16, 2)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(obs)
        return torch.tanh(self.mean(x)), self.log_std(x).clamp(-5, 2)


NORMALISED = {
    "statistics": lambda m, x: (x - m.mean) / m.std,
    "statistics-and-clip": lambda m, x: torch.clamp((x - m.mean) / torch.sqrt(m.std + 1e-8), -1.5, 1.5),
    "statistics-with-epsilon": lambda m, x: (x - m.mean) / (m.std + 1e-2),
    "scale": lambda _m, x: x * 0.5,
    "negated": lambda _m, x: -x,
    "clip-first": lambda _m, x: torch.clamp(x, -1, 1) * 3,
}
HEADS = {
    "tanh": lambda _m, x: torch.tanh(x),
    "scaled": lambda _m, x: torch.tanh(x) * 2.0,
    "scaled-and-shifted": lambda _m, x: torch.tanh(x) * torch.tensor([2.0, 0.5]) + torch.tensor([1.0, 0.0]),
    "clipped": lambda _m, x: torch.clamp(x, -0.5, 0.5),
    "clipped-and-divided": lambda _m, x: torch.clamp(x, -3, 3) / 3,
    "half": lambda _m, x: torch.tanh(x.chunk(2, dim=-1)[0]),
    "columns": lambda _m, x: x[:, 1:],
    "reshaped": lambda _m, x: x.reshape(-1, 2),
    "sigmoid": lambda _m, x: torch.sigmoid(x) * 2 - 1,
    "centred": lambda _m, x: x - x.mean(dim=-1, keepdim=True),
    "centred-and-weighted": lambda _m, x: (x - x.mean(dim=-1, keepdim=True)) * torch.tensor([2.0, 0.5]) * 3,
    "dueling": lambda _m, x: x[:, :1] + x - x.mean(dim=-1, keepdim=True),
    "dueling-less-mean": lambda _m, x: x[:, 1:] - x.mean(dim=-1, keepdim=True) + x,
}
LAYERS = {
    "relu": lambda: mlp(nn.ReLU),
    "elu": lambda: mlp(nn.ELU),
    "silu": lambda: mlp(nn.SiLU),
    "gelu": lambda: mlp(nn.GELU),
    "softplus": lambda: mlp(nn.Softplus),
    "leaky": lambda: mlp(lambda: nn.LeakyReLU(0.2)),
    "relu6": lambda: mlp(nn.ReLU6),
    "prelu": lambda: mlp(nn.PReLU),
    "no-bias": lambda: mlp(bias=False),
    "layer-norm": lambda: [nn.Linear(3, 16), nn.LayerNorm(16, eps=1e-3), nn.ELU(), nn.Linear(16, 2)],
    "norm-behind": lambda: [nn.Linear(3, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 2)],
    "batch-norm": lambda: [
        nn.BatchNorm1d(3),
        nn.Linear(3, 16),
        nn.BatchNorm1d(16),
        nn.ELU(),
        nn.Linear(16, 2),
    ],
    "two-linear": lambda: [nn.Linear(3, 16), nn.Linear(16, 2)],
    "dropout": lambda: [
        nn.Flatten(),
        nn.Linear(3, 9),
        nn.Dropout(),
        nn.Identity(),
        nn.Tanh(),
        nn.Linear(9, 2),
    ],
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_as_onnxruntime_does(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    runs_as_onnxruntime(exported(Policy(*LAYERS[name]()), tmp_path / "policy.onnx"))


@pytest.mark.parametrize("name", NORMALISED)
def test_observations_are_normalised_as_the_graph_does(name: str, tmp_path: Path) -> None:
    runs_as_onnxruntime(exported(Policy(*mlp(), before=NORMALISED[name]), tmp_path / "policy.onnx"))


@pytest.mark.parametrize("name", HEADS)
def test_actions_are_those_of_the_graph(name: str, tmp_path: Path) -> None:
    runs_as_onnxruntime(exported(Policy(*mlp(), after=HEADS[name]), tmp_path / "policy.onnx"))


def test_a_graph_that_is_no_chain_is_computed(tmp_path: Path) -> None:
    runs_as_onnxruntime(exported(Residual(), tmp_path / "policy.onnx"))


@pytest.mark.parametrize("version", [9, 13, 18])
def test_operators_of_all_versions(version: int, tmp_path: Path) -> None:
    layers = [nn.Linear(3, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2)]
    model = Policy(*layers, before=NORMALISED["statistics-and-clip"], after=HEADS["scaled"])
    runs_as_onnxruntime(exported(model, tmp_path / "policy.onnx", opset_version=version))


EXPANDED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "abs": lambda _m, x: x.abs(),
    "gelu": lambda _m, x: nn.functional.gelu(x, approximate="tanh"),
    "celu": lambda _m, x: nn.functional.celu(x, alpha=1.5),
    "negative": lambda _m, x: -torch.tanh(-x),
    "product": lambda m, x: torch.addmm(m.row, x, m.square, alpha=0.5, beta=2.0),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_operators_play_as_their_expansions(name: str, tmp_path: Path) -> None:
    model = Policy(*mlp(), after=EXPANDED[name])
    model.row, model.square = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2, 2))
    path = exported(model, tmp_path / "policy.onnx", opset_version=20)
    runs_as_onnxruntime(path)


def test_images_go_through_convolutions(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 4, (2, 3)),
        nn.ELU(), nn.Flatten(), nn.Linear(4 * 3 * 2, 16), nn.ReLU(), nn.Linear(16, 2), nn.Tanh(),
    )  # fmt: skip
    runs_as_onnxruntime(exported(model, tmp_path / "policy.onnx", torch.randn(1, 3, 8, 8)))


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus of checkpoints is not there")
@pytest.mark.parametrize("name", ["g1", "go1", "t1"])
def test_policies_of_mujoco_playground(name: str) -> None:
    runs_as_onnxruntime(CORPUS / f"{name}_policy.onnx")


# Our own exports.


@pytest.mark.parametrize("after", [HEADS["scaled-and-shifted"], HEADS["clipped"], HEADS["half"]])
def test_an_export_of_a_model_is_read_back_as_it_is(after: Any, tmp_path: Path) -> None:
    model = Policy(*mlp(nn.ELU), before=NORMALISED["statistics-and-clip"], after=after)
    path, again = exported(model, tmp_path / "policy.onnx"), tmp_path / "again.onnx"
    facts = AgentFacts(env="Pendulum-v1")
    assert export(str(path), str(again), facts=facts).digest
    agent = runs_as_onnxruntime(again)
    assert agent.known.env == {"id": "Pendulum-v1"}
    rows = np.random.default_rng(3).normal(size=(8, 3)).astype(np.float32)
    expected = actions_of(restore_agent(str(path)), rows)
    np.testing.assert_allclose(actions_of(agent, rows), expected, rtol=1e-5, atol=1e-6)


def test_an_export_of_an_agent_is_of_no_layout_and_plays_as_its_graph(tmp_path: Path) -> None:
    path = tmp_path / "policy.onnx"
    export(str(TF_SAMPLE), str(path))
    agent = runs_as_onnxruntime(path)
    assert agent.binding.layout == "none"


def test_the_sidecar_of_another_model_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(str(exported(Policy(*mlp()), tmp_path / f"{name}_.onnx")), str(tmp_path / f"{name}.onnx"))
    (tmp_path / "one.onnx.ckpttool.json").replace(tmp_path / "two.onnx.ckpttool.json")
    with pytest.raises(ChecksumError):
        restore_agent(str(tmp_path / "two.onnx"))


# Several outputs.


def test_of_two_outputs_the_mean_is_the_action(tmp_path: Path) -> None:
    path = exported(Gaussian(), tmp_path / "policy.onnx", output_names=["mean", "log_std"])
    agent = runs_as_onnxruntime(path)
    assert any("log_std" in note for note in agent.notes)


def test_an_output_may_be_named(tmp_path: Path) -> None:
    path = exported(Gaussian(), tmp_path / "policy.onnx", output_names=["one", "two"])
    with pytest.raises(UsageError) as caught:
        restore_agent(str(path))
    assert "--network" in (caught.value.hint or "")
    runs_as_onnxruntime(path, network="two", output="two")


def test_commands_that_are_named_lead_to_a_policy_that_plays(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(self.a(x)), self.b(x)

    path = exported(Two(), tmp_path / "two.onnx", output_names=["one", "two"])
    command = followed("eval", path, "--env", "Pendulum-v1", "--episodes", "1")
    assert {"--network", "--head"} <= set(command)


# Memory.


class Recurrent(nn.Module):
    """An actor behind a recurrent layer, as rsl_rl's exporter calls it: obs, h_in, c_in."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(3, 8)
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 2))

    def forward(self, obs: torch.Tensor, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state_input = state if len(state) > 1 else state[0]
        x, after = self.rnn(obs.unsqueeze(0), state_input)
        return (self.actor(x.squeeze(0)), *(after if isinstance(after, tuple) else (after,)))


@pytest.mark.parametrize(("kind", "names"), [(nn.LSTM, ["h", "c"]), (nn.GRU, ["h"])])
def test_a_recurrent_policy_carries_its_state(
    kind: type[nn.RNNBase], names: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    state = [torch.zeros(1, 1, 8) for _ in names]
    path = exported(
        Recurrent(kind), tmp_path / "policy.onnx", torch.randn(1, 3), *state,
        input_names=["obs", *(f"{n}_in" for n in names)],
        output_names=["actions", *(f"{n}_out" for n in names)],
        dynamic_axes={},
    )  # fmt: skip
    agent = restore_agent(str(path))
    part = agent.part("actor")
    assert part is not None
    wiring, _ = derive_network_settings(agent, ActionBounds([-1.0] * 2, [1.0] * 2, None))
    policy = numpy_backend.build(build_part_network(agent, part, wiring))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    mine: tuple[Any, ...] = ()
    reference: Sequence[np.ndarray] = [np.zeros((1, 1, 8), np.float32) for _ in names]
    for row in np.random.default_rng(0).normal(size=(6, 1, 3)).astype(np.float32):
        actions, mine = policy.step(row, mine)
        fed = {f"{n}_in": value for n, value in zip(names, reference, strict=True)}
        expected, *reference = session.run(None, {"obs": row, **fed})
        np.testing.assert_allclose(actions, expected, rtol=1e-5, atol=1e-5)


# What is refused.


REFUSED: dict[str, tuple[Any, str]] = {
    "argmin": (lambda _m, x: x.argmin(dim=-1, keepdim=True), "ArgMin"),
    "softmax": (lambda _m, x: torch.softmax(x, dim=-1) * 2, "Softmax"),
    "softmax-of-rows": (lambda _m, x: torch.softmax(x, dim=0), "Softmax"),
    "exp": (lambda _m, x: torch.exp(x), "Exp"),
    "noise": (lambda _m, x: x + torch.randn_like(x), "RandomNormalLike"),
    "sorted": (lambda _m, x: x.sort(dim=-1)[0], "TopK"),
    "mean": (lambda _m, x: x - x.mean(dim=0, keepdim=True), "ReduceMean"),
    "largest": (lambda _m, x: x - x.amax(dim=-1, keepdim=True), "ReduceMax"),
    "half": (lambda _m, x: x.half().float(), "Cast"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_that_is_not_known_is_named(name: str, tmp_path: Path) -> None:
    after, word = REFUSED[name]
    path = exported(Policy(*mlp(), after=after), tmp_path / "policy.onnx")
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(str(path))
    assert caught.value.found == word
    assert caught.value.file == str(path)


def test_an_unknown_operator_beside_the_way_to_the_action_is_no_hindrance(tmp_path: Path) -> None:
    model = Policy(*mlp(), after=lambda _m, x: (torch.tanh(x), torch.softmax(x, dim=-1)))
    path = exported(model, tmp_path / "policy.onnx", output_names=["action", "probability"])
    runs_as_onnxruntime(path)


class TwoInputs(nn.Module):
    """A policy of two observations."""

    def forward(self, obs: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.cat([obs, goal], dim=-1))


def test_several_inputs_are_named(tmp_path: Path) -> None:
    path = exported(
        TwoInputs(), tmp_path / "p.onnx", torch.randn(1, 3), torch.randn(1, 2),
        input_names=["obs", "goal"], dynamic_axes={},
    )  # fmt: skip
    with pytest.raises(CkpttoolError) as caught:
        restore_agent(str(path))
    assert "goal" in (caught.value.found or "")


# Discrete actions.

CHOICES = {
    "values": ((), ArgMax((5,), (0,))),
    "first action": ((), ArgMax((5,), (-2,))),
    "several": ((), ArgMax((2, 4, 3), (0, 1, 0))),
    "quantiles": ((QuantileMean(7),), ArgMax((3,), (0,))),
    "quantiles_last": ((QuantileMean(7, last=True),), ArgMax((3,), (0,))),
    "atoms": ((AtomMean(np.float32([-1, 0.5, 2, 4, 8, 9, 11])),), ArgMax((3,), (0,))),
    "limited atoms": ((AtomMean(np.float32([-1, 0.5, 2, 4, 8, 9, 11]), 0.1),), ArgMax((3,), (0,))),
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_export_of_discrete_actions_is_read_back(name: str, tmp_path: Path) -> None:
    from ckpttool.networks.network_graph import network_graph
    from ckpttool.networks.onnx_export import encode_graph

    before, chosen = CHOICES[name]
    width = sum(chosen.counts) * (7 if before else 1)
    generator, path = np.random.default_rng(4), tmp_path / "a.onnx"
    builder = NetworkBuilder([("obs", 3)])
    for rows, columns in ((3, 7), (7, width)):
        kernel, bias = generator.normal(size=(rows, columns)), generator.normal(size=columns)
        builder.add(Dense(kernel.astype(np.float32), bias.astype(np.float32)))
        builder.add(Activation("tanh"))  # also after the last layer
    for layer in (*before, chosen):
        builder.add(layer)
    network = builder.done()
    places = [f"/{n}" for n in range(len(network.nodes))]
    path.write_bytes(encode_graph(network_graph(network, places, "action", "scores"), {}))
    obs = generator.normal(size=(300, 3)).astype(np.float32)
    scores, expected = onnxruntime.InferenceSession(str(path)).run(None, {"obs": obs})
    agent = load_agent(str(path))
    assert agent.choices is not None
    assert agent.choices == Choices(chosen.counts, chosen.starts, single=len(chosen.counts) == 1)
    np.testing.assert_allclose(agent.scores(obs), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(agent.act(obs).reshape(expected.shape), expected)
    assert len(np.unique(expected[:, 0])) > 1


class Greedy(nn.Module):
    """A Q-network that returns the number of the best action, as programs export it."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.q, self.after = nn.Sequential(nn.Linear(4, 9), nn.ELU(), nn.Linear(9, 2)), after

    def forward(self, obs: torch.Tensor) -> Any:
        return self.after(self.q(obs))


@pytest.mark.parametrize(
    "after", [lambda q: q.argmax(1), lambda q: q.argmax(-1, keepdim=True), lambda q: q.argmax(1).float()]
)
def test_an_exported_arg_max_chooses(after: Any, tmp_path: Path) -> None:
    path = exported(Greedy(after), tmp_path / "q.onnx", torch.randn(1, 4))
    obs = np.random.default_rng(2).normal(size=(300, 4)).astype(np.float32)
    (expected,) = onnxruntime.InferenceSession(str(path)).run(None, {"obs": obs})
    agent = load_agent(str(path), "CartPole-v1")
    np.testing.assert_array_equal(agent.act(obs), expected.reshape(-1))
    with pytest.raises(EnvironmentMismatchError):
        load_agent(str(path), "Acrobot-v1")
    with pytest.raises(EnvironmentMismatchError):
        load_agent(str(path), "Pendulum-v1")


@pytest.mark.parametrize(
    "after",
    [
        lambda q: q.softmax(-1),
        lambda q: q.log_softmax(1),
        lambda q: (q.softmax(1), q.sum(1, keepdim=True)),
        lambda q: q.softmax(-1).argmax(1),
    ],
    ids=["softmax", "log_softmax", "beside a value", "arg_max"],
)
def test_the_most_probable_action_is_played(after: Any, tmp_path: Path) -> None:
    model = Greedy(after)
    path = exported(model, tmp_path / "p.onnx", torch.randn(1, 4))
    obs = np.random.default_rng(2).normal(size=(300, 4)).astype(np.float32)
    with torch.no_grad():
        scores = model.q(torch.from_numpy(obs)).numpy()
    agent = load_agent(str(path), "CartPole-v1")
    np.testing.assert_allclose(agent.scores(obs), scores, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(agent.act(obs), scores.argmax(1))
    with pytest.raises(EnvironmentMismatchError):
        load_agent(str(path), "Pendulum-v1")


@pytest.mark.parametrize(
    "after",
    [
        lambda q: q.argmax(1, keepdim=True) * 2.0,
        lambda q: q.argmax(1, keepdim=True) + 0.5,
        lambda q: q.argmin(1),
    ],
    ids=["doubled", "half", "smallest"],
)
def test_other_uses_of_an_arg_max_are_refused(after: Any, tmp_path: Path) -> None:
    path = exported(Greedy(after), tmp_path / "q.onnx", torch.randn(1, 4))
    with pytest.raises(UnsupportedError):
        load_agent(str(path), "CartPole-v1")
