"""A policy that no layout names: each form plays as its own framework computes it, and nothing is guessed."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import shlex
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from torch import nn

import ckpttool
from ckpttool import load_agent
from ckpttool.commands.convert import convert
from ckpttool.commands.evaluate import evaluate
from ckpttool.conversion.export import export
from ckpttool.core import CkpttoolError, EnvironmentMismatchError, Tree, UnsupportedError, UsageError
from ckpttool.core.sidecar import NORMS_BEFORE
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, build_part_network, derive_network_settings
from ckpttool.evaluation.playing import choose_environment, prepare_agent
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.graphs.keras import read_document
from ckpttool.libraries import graph_programs
from ckpttool.libraries.schema import Choices
from ckpttool.networks import numpy_backend
from ckpttool.verification.output_comparison import run_network
from tests import policy_keras, tensorflow_child
from tests.conftest import in_process
from tests.policy_keras import observations

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

TASK = "Pendulum-v1"
GIVEN = AgentFacts(activations="relu", head="tanh")


class Actor(nn.Module):
    """A hand-written actor: what its forward computes is in no state_dict."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(self.fc1(x))
        x = torch.relu(self.fc2(x))
        return 2.0 * torch.tanh(self.fc3(x))


class Scaled(nn.Module):
    """An actor with CleanRL's buffers, and a head that a deterministic policy leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(3, 16), nn.Linear(16, 16)
        self.fc_mean, self.fc_logstd = nn.Linear(16, 1), nn.Linear(16, 1)
        self.register_buffer("action_scale", torch.tensor([1.5]))
        self.register_buffer("action_bias", torch.tensor([0.25]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.fc2(torch.tanh(self.fc1(x))))
        scale, bias = self.get_buffer("action_scale"), self.get_buffer("action_bias")
        return torch.tanh(self.fc_mean(x)) * scale + bias


def sequential(*, norm: bool = False) -> nn.Sequential:
    parts = [nn.Linear(3, 16), *([nn.LayerNorm(16, eps=1e-3)] if norm else []), nn.ELU(), nn.Linear(16, 16)]
    return nn.Sequential(*parts, nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1), nn.Tanh())


def played(
    path: Path, facts: AgentFacts = NO_FACTS, network: str = "actor"
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the actions for fixed observations, and what was assumed."""
    how = Protocol(network=network, wrappers=("none",))
    agent = restore_agent(str(path), facts=facts, network=network)
    environment = choose_environment(agent, TASK, how)
    with environment.make(1) as vector:
        entrant = prepare_agent(agent, environment, how, vector.spec)
    return run_network(numpy_backend.build(entrant.network), observations()), entrant.assumed


def model_actions(model: nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model.eval()(torch.from_numpy(observations())).numpy()


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def saved(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)
    return path


# --- State dicts: order by names and sizes, the rest given -------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sd: sd,
        lambda sd: {"model": sd, "epoch": 3},
        lambda sd: {"model_state_dict": sd, "loss": 0.1, "args": {"lr": 1e-3}},
        lambda sd: OrderedDict((f"module.{name}", value) for name, value in sd.items()),
        lambda sd: OrderedDict((f"_orig_mod.{name}", value) for name, value in sd.items()),
        lambda sd: OrderedDict(reversed(sd.items())),
        lambda sd: {"net": {"policy": sd}},
    ],
)
def test_a_state_dict_plays_as_torch_does(wrap: Any, tmp_path: Path) -> None:
    model = Actor()
    path = saved(tmp_path / "policy.pth", wrap(model.state_dict()))
    close(played(path, GIVEN)[0], model_actions(model))


def test_a_whole_checkpoint_with_its_optimizer_plays(tmp_path: Path) -> None:
    model = Actor()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.from_numpy(observations())).sum().backward()
    optimizer.step()
    states = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    close(played(saved(tmp_path / "c.pt", {"epoch": 1, **states}), GIVEN)[0], model_actions(model))


def test_arrays_and_safetensors_play_too(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Actor()
    np.savez(tmp_path / "a.npz", **{name: value.numpy() for name, value in model.state_dict().items()})
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    for name in ("a.npz", "a.safetensors"):
        close(played(tmp_path / name, GIVEN)[0], model_actions(model))


def test_buffers_of_the_action_are_its_map(tmp_path: Path) -> None:
    model = Scaled()
    path = saved(tmp_path / "a.pth", {"model": model.state_dict(), "step": 7})
    with pytest.raises(UsageError) as error:
        played(path)
    assert "--activation" in str(error.value)
    assert "--head" not in str(error.value.hint)
    close(played(path, AgentFacts(activations="tanh"))[0], model_actions(model))


def test_an_activation_for_each_layer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1))
    path = saved(tmp_path / "a.pth", model.state_dict())
    close(played(path, AgentFacts(activations="relu,tanh", head="linear"))[0], model_actions(model))
    with pytest.raises(UsageError) as error:
        played(path, AgentFacts(activations=["relu", "tanh", "relu"], head="linear"))
    assert (error.value.expected, error.value.found) == ("1 or 2", "3")


def test_squares_go_by_their_numbers_and_that_is_said(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(12)))
    shuffled = OrderedDict(sorted(model.state_dict().items(), key=lambda item: hash(item[0])))
    last = {"12.weight": torch.ones(1, 3), "12.bias": torch.ones(1)}
    path = saved(tmp_path / "b.pth", OrderedDict({**shuffled, **last}))
    actions, assumed = played(path, AgentFacts(activations="linear", head="linear"))
    whole = nn.Sequential(*model, nn.Linear(3, 1))
    whole[-1].load_state_dict({"weight": torch.ones(1, 3), "bias": torch.ones(1)})
    close(actions, model_actions(whole))
    assert any("10, 11, 12" in line for line in assumed)


@pytest.mark.parametrize("beside", [{}, {"running_mean_std.running_mean": torch.zeros(3)}])
def test_heads_and_normalisers_beside_the_networks_are_not_left_out(
    beside: dict[str, Any], tmp_path: Path
) -> None:
    actor, critic = (nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 6), nn.ELU()) for _ in range(2))
    mean, value = nn.Linear(6, 1), nn.Linear(6, 1)
    whole = nn.ModuleDict({"actor_mlp": actor, "critic_mlp": critic, "mu": mean, "value": value})
    path = saved(tmp_path / "a.pth", {"model": {**whole.state_dict(), "sigma": torch.zeros(1), **beside}})
    facts = AgentFacts(activations="elu", head="linear")
    if beside:
        with pytest.raises(UnsupportedError) as error:
            played(path, facts)
        assert "running_mean" in str(error.value.found)
    else:
        close(played(path, facts)[0], model_actions(nn.Sequential(actor, mean)))


@pytest.mark.parametrize("name", ["policy.q_net", "embed"])
def test_values_and_embeddings_are_no_policy(name: str, tmp_path: Path) -> None:
    path = saved(
        tmp_path / "a.pth", {f"{name}.0.weight": torch.ones(8, 3), f"{name}.2.weight": torch.ones(1, 8)}
    )
    with pytest.raises(CkpttoolError):
        played(path, GIVEN)


def test_a_trunk_and_a_head_are_one_network(tmp_path: Path) -> None:
    trunk = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    path = saved(tmp_path / "a.pth", nn.ModuleDict({"encoder": trunk, "head": head}).state_dict())
    actions, assumed = played(path, AgentFacts(activations="relu", head="linear"))
    close(actions, model_actions(nn.Sequential(trunk, head)))
    assert any("encoder/2" in line for line in assumed)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": (8, 3), "b": (8, 8), "c": (8, 8), "d": (1, 8)},  # two squares without numbers
        {"fc1": (8, 3), "fc3": (1, 9)},  # no chain
        {"left.0": (8, 3), "left.2": (1, 8), "right.0": (8, 3), "right.2": (1, 8)},  # two policies
        {"q1.0": (8, 4), "q1.2": (1, 8), "q2.0": (8, 4), "q2.2": (1, 8)},  # critics
    ],
)
def test_what_is_ambiguous_is_refused_with_what_was_found(tensors: dict[str, Any], tmp_path: Path) -> None:
    named = {f"{name}.weight": torch.ones(shape) for name, shape in tensors.items()}
    biases = {f"{name}.bias": torch.ones(shape[0]) for name, shape in tensors.items()}
    with pytest.raises(UsageError) as error:
        played(saved(tmp_path / "a.pth", {**named, **biases}), GIVEN)
    assert error.value.found


def test_of_several_networks_the_named_one_plays(tmp_path: Path) -> None:
    one, two = Actor(), Actor()
    path = saved(tmp_path / "a.pth", {"left": one.state_dict(), "right": two.state_dict()})
    close(played(path, GIVEN, network="right")[0], model_actions(two))


def test_a_critic_beside_is_left_out_by_its_name_and_that_is_said(tmp_path: Path) -> None:
    model, critic = Actor(), nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    path = saved(
        tmp_path / "a.pth", {"pi_net": {"x": 1}, "policy": model.state_dict(), "value": critic.state_dict()}
    )
    actions, assumed = played(path, GIVEN)
    close(actions, model_actions(model))
    assert any("policy" in line and "value" in line for line in assumed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conv.weight", torch.ones(4, 3, 3, 3)),
        ("scale", torch.ones(1)),
        ("obs_mean", torch.ones(3)),
        ("bn.running_mean", torch.ones(16)),
    ],
)
def test_a_tensor_that_nothing_explains_is_never_left_out(name: str, value: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", OrderedDict({**Actor().state_dict(), name: value}))
    with pytest.raises(UnsupportedError) as error:
        played(path, GIVEN)
    assert name.replace(".", "/") in str(error.value.found)


_BESIDE = {
    "loss": torch.tensor(0.4),
    "best_acc1": torch.tensor(76.1),
    "grad_norm": torch.tensor(1.0),
    "best_mean_reward": torch.tensor([-3.0]),
    "torch_rng": torch.zeros(5056, dtype=torch.uint8),
    "cuda_rng": [torch.zeros(16, dtype=torch.uint8)],
    "losses": torch.zeros(100),
    "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": torch.tensor(0.1)}},
}


@pytest.mark.parametrize("name", _BESIDE)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_result_of_training_beside_the_network_is_named_and_left_out(
    name: str, prefix: str, tmp_path: Path
) -> None:
    model = Actor()
    states = {prefix + key: value for key, value in model.state_dict().items()}
    path = saved(tmp_path / "a.pth", {"state_dict": states, name: _BESIDE[name]})
    close(played(path, GIVEN)[0], model_actions(model))
    assert any(name in note for note in restore_agent(str(path)).binding.moves.notes)
    # The same tensor within the state_dict may be a part of what the module computes.
    if isinstance(_BESIDE[name], torch.Tensor) and not prefix:
        inside = saved(tmp_path / "b.pth", {"state_dict": {**states, name: _BESIDE[name]}})
        with pytest.raises(UnsupportedError):
            played(inside, GIVEN)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("obs_rms", {"mean": torch.zeros(4), "var": torch.ones(4)}),
        ("obs_rms", {"position": {"mean": np.zeros(2), "var": np.ones(2)}, "goal": {"mean": np.zeros(1)}}),
        ("obs_mean", np.zeros(3)),
        ("obs_mean", [0.5, 0.5, 0.5]),
        ("state_mean", np.zeros(3)),
        ("obs_best", torch.tensor(1.0)),
        ("max_action", torch.tensor(2.0)),
        ("scale", torch.tensor([2.0])),
        ("whitening", torch.eye(3)),
        ("something", torch.ones(3)),
        ("something", torch.ones(16)),
        ("head", {"unknown": torch.ones(1, 16, 1)}),
    ],
)
def test_what_may_change_actions_is_refused_beside_the_network_too(
    name: str, value: Any, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.pth", {"model": Actor().state_dict(), name: value})
    with pytest.raises(UnsupportedError) as error:
        played(path, GIVEN)
    assert name in str(error.value.found)
    assert "--part model" in str(error.value.hint)


def _noted(module: nn.Module, args: Any, output: Any) -> None:
    """Look at an output, and change nothing."""


@pytest.mark.parametrize("case", ["hook", "statistics"])
def test_the_conversion_that_a_refusal_names_gives_a_policy_that_plays(case: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), nn.Tanh())
    if case == "hook":
        model.register_forward_hook(_noted)
        path = saved(tmp_path / "an actor.pt", model)
    else:
        states = {"model": model.state_dict(), "obs_rms": {"mean": torch.zeros(4), "var": torch.ones(4)}}
        path = saved(tmp_path / "an actor.pt", states)
    with pytest.raises(UnsupportedError) as error:
        played(path, GIVEN)
    command = str(error.value.hint).partition("ckpttool ")[2].replace("OUT.pt", str(tmp_path / "out.pt"))
    ran = in_process(*shlex.split(command))
    assert ran.status == 0, ran.err
    close(played(tmp_path / "out.pt", GIVEN)[0], 2 * model_actions(model))


def test_a_layer_norm_behind_an_activation_needs_the_module(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))
    with pytest.raises(UnsupportedError):
        played(saved(tmp_path / "a.pth", model.state_dict()), GIVEN)
    close(played(saved(tmp_path / "b.pt", model))[0], model_actions(model))


class Normed(nn.Module):
    """An actor with batch norms behind its hidden layers, and before the first one if `first`."""

    def __init__(self, sizes: tuple[int, ...] = (3, 16, 16, 1), *, first: bool = False) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(sizes[0]) if first else None
        for number, (one, two) in enumerate(pairwise(sizes), start=1):
            self.add_module(f"fc{number}", nn.Linear(one, two))
            if number < len(sizes) - 1:
                self.add_module(f"bn{number}", nn.BatchNorm1d(two))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.first is None else self.first(x)
        x = torch.relu(self.bn1(self.fc1(x)))
        return 2 * torch.tanh(self.fc3(torch.relu(self.bn2(self.fc2(x)))))


def after_training(model: nn.Module) -> nn.Module:
    """Return the model with statistics, factors and offsets that each change the output."""
    generator = torch.Generator().manual_seed(3)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            for row in (layer.running_mean, layer.running_var, layer.weight, layer.bias):
                if row is not None:
                    row.data.uniform_(0.1, 2.0, generator=generator)
    return model.eval()


def in_sequence(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 1))


NORMED = {
    "named": Normed(),
    "before the first layer": Normed(first=True),
    "of other sizes": Normed((3, 16, 8, 1)),
    "numbered": in_sequence(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8)),
    "numbered, first": in_sequence(nn.BatchNorm1d(3), nn.Linear(3, 8)),
    "of one width": in_sequence(nn.Linear(8, 8), nn.BatchNorm1d(8)),
    "without factors": in_sequence(nn.BatchNorm1d(3, affine=False), nn.Linear(3, 8)),
}


def test_a_batch_norm_of_the_critic_is_no_statistic_of_rewards(tmp_path: Path) -> None:
    networks = {"actor": Normed(), "critic": in_sequence(nn.BatchNorm1d(4), nn.Linear(4, 8))}
    states = {name: network.state_dict() for name, network in networks.items()}
    path = saved(tmp_path / "a.pth", states)
    agent = restore_agent(str(path), facts=AgentFacts(activations="relu", head="tanh"))
    assert "reward statistics" not in {entry.what for entry in agent.ledger}


@pytest.mark.parametrize("name", NORMED)
def test_batch_norms_compute_as_torch_does_in_evaluation(name: str, tmp_path: Path) -> None:
    model = after_training(NORMED[name])
    path = saved(tmp_path / "a.pth", {"model": model.state_dict(), "epoch": 1})
    head = "tanh" if isinstance(model, Normed) else "linear"
    agent = restore_agent(str(path), facts=AgentFacts(activations="relu", head=head))
    settings, entries = derive_network_settings(agent, ActionBounds([-2.0], [2.0], None))
    network = build_part_network(agent, agent.binding.parts[0], settings)
    inputs = np.random.default_rng(5).normal(size=(50, network.inputs[0][1])).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs)).numpy()
    close(run_network(numpy_backend.build(network), inputs), expected)
    assert any(NORMS_BEFORE in line for line in agent.binding.moves.assumed)
    assert any(entry.what == "architecture" and "1e-05" in entry.value for entry in entries)


def test_batch_norms_of_tensorflow_have_its_epsilon(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sizes = {"dense": (3, 8), "dense_1": (8, 8), "dense_2": (8, 1)}
    tensors = {f"{name}/kernel": generator.normal(size=size) for name, size in sizes.items()}
    rows = ("gamma", "beta", "moving_mean", "moving_variance")
    norms = {
        number: {f"batch_normalization{number}/{row}": generator.uniform(0.001, 0.1, 8) for row in rows}
        for number in ("_1", "")
    }
    np.savez(
        tmp_path / "a.npz", **{n: v.astype("f4") for n, v in {**tensors, **norms["_1"], **norms[""]}.items()}
    )
    x = observations().astype(np.float64)
    for kernel, norm in zip(tensors.values(), ("", "_1", None), strict=True):
        x = x @ kernel
        if norm is not None:
            gamma, beta, mean, variance = norms[norm].values()
            x = np.maximum((x - mean) / np.sqrt(variance + 1e-3) * gamma + beta, 0)
    output, assumed = played(tmp_path / "a.npz", AgentFacts(activations="relu", head="linear"))
    close(output, x)
    assert any("0.001" in line for line in assumed)


@pytest.mark.parametrize(("norm", "target"), [(nn.LayerNorm, "b.weights.h5"), (nn.BatchNorm1d, "b.index")])
def test_a_conversion_of_weights_keeps_the_epsilon_of_its_framework(
    norm: type[nn.Module], target: str, tmp_path: Path
) -> None:
    model = after_training(in_sequence(nn.Linear(3, 8), norm(8)))
    # Variances about as large as epsilon, so that another one changes the output.
    model[0].weight.data *= 0.01
    if norm is nn.BatchNorm1d:
        model[1].running_var *= 1e-4
    facts = AgentFacts(activations="relu", head="linear")
    source = saved(tmp_path / "a.pt", model.state_dict())
    done = convert(str(source), str(tmp_path / target), to="keras" if target.endswith("h5") else "tf")
    with torch.no_grad():
        expected = model(torch.from_numpy(observations())).numpy()
    output, assumed = played(Path(done.target), facts)
    close(output, expected)
    assert any("1e-05" in line and "a.pt" in line for line in assumed)
    back = convert(done.target, str(tmp_path / "c.pt"), to="torch").target
    close(played(Path(back), facts)[0], expected)


def test_moving_averages_are_no_observation_statistics(tmp_path: Path) -> None:
    tensors = {"dense/kernel": np.ones((3, 8), "f4"), "dense_1/kernel": np.ones((8, 1), "f4")}
    moving = {f"batch_normalization/moving_{name}": np.ones(3, "f4") for name in ("mean", "variance")}
    np.savez(tmp_path / "a.npz", **tensors, **moving)
    with pytest.raises(UnsupportedError) as error:
        played(tmp_path / "a.npz", GIVEN)
    assert "batch_normalization/moving_mean" in str(error.value.found)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 1)),
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1), nn.BatchNorm1d(1)),
        nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3)),
        nn.ModuleDict({"fc1": nn.Linear(3, 8), "fc2": nn.Linear(8, 3), "bn": nn.BatchNorm1d(3)}),
        nn.ModuleDict({"fc1": nn.Linear(8, 8), "fc2": nn.Linear(8, 1), "bn1": nn.BatchNorm1d(8)}),
        nn.ModuleDict({**dict(Normed(first=True).named_children()), "bn2": nn.Identity()}),
        nn.ModuleDict({**dict(Normed().named_children()), "bn2": nn.LayerNorm(16)}),
        nn.ModuleDict({**dict(Normed().named_children()), "bn3": nn.BatchNorm1d(16)}),
    ],
)
def test_batch_norms_with_several_places_are_refused(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises((UnsupportedError, UsageError)) as error:
        played(saved(tmp_path / "a.pth", model.state_dict()), GIVEN)
    assert error.value.path or error.value.found


def test_batch_norms_are_exported_and_written_as_code(tmp_path: Path) -> None:
    model = after_training(Normed(first=True))
    path, code = str(saved(tmp_path / "a.pth", model.state_dict())), tmp_path / "normed_actor.py"
    facts = AgentFacts(activations="relu", head="tanh", action_low=-2.0, action_high=2.0)
    export(path, str(tmp_path / "a.onnx"), facts=facts)
    close(played(tmp_path / "a.onnx")[0], model_actions(model))
    convert(path, str(tmp_path / "b.pt"), to="torch", code=str(code), facts=facts)
    written = runpy.run_path(str(code))
    actions = written["act"](written["load"](str(tmp_path / "b.pt")), torch.from_numpy(observations()))
    close(np.asarray(actions), model_actions(model))


@pytest.mark.parametrize("heads", [("mean", "log_std"), ("mu", "sigma"), ("mean/dense", "log_std/dense")])
def test_the_mean_head_of_tensorflow_1_acts(heads: tuple[str, str], tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sizes = {"dense": (3, 8), heads[1]: (8, 1), heads[0]: (8, 1)}
    tensors = {name: generator.normal(size=size).astype("f4") for name, size in sizes.items()}
    np.savez(tmp_path / "a.npz", **{f"pi/{name}/kernel": kernel for name, kernel in tensors.items()})
    output, _ = played(tmp_path / "a.npz", AgentFacts(activations="tanh", head="linear"))
    close(output, np.tanh(observations() @ tensors["dense"]) @ tensors[heads[0]])
    notes = restore_agent(str(tmp_path / "a.npz"), facts=GIVEN).binding.moves.notes
    assert any(f"pi/{heads[1]}" in note for note in notes)


# --- Models that hold their activations -------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
def test_a_sequential_pickled_whole_needs_the_scale_alone(norm: bool, tmp_path: Path) -> None:
    model = sequential(norm=norm)
    path = saved(tmp_path / "a.pt", model)
    with pytest.raises(UsageError) as error:
        played(path)
    assert "--head" in str(error.value.hint)
    assert "--activation" not in str(error.value.hint)
    close(played(path, AgentFacts(head="unit_tanh"))[0], model_actions(model))
    close(played(path, AgentFacts(head="affine"))[0], 2 * model_actions(model))


def test_a_sequential_that_ends_in_a_layer_is_the_action(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Linear(3, 8), nn.Sequential(nn.SiLU(), nn.Linear(8, 5), nn.Softplus()), nn.Linear(5, 1)
    )
    actions, assumed = played(saved(tmp_path / "a.pt", model))
    close(actions, model_actions(model))
    assert assumed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_sequential_of_another_type_is_run_in_float32_and_names_its_own(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)).to(dtype)
    path = saved(tmp_path / "a.pt", model)
    close(played(path)[0], model_actions(model.float()))
    agent = restore_agent(str(path))
    assert agent.known.activations == ["relu"]
    assert any(str(dtype).removeprefix("torch.") in note for note in agent.binding.moves.notes)


@pytest.mark.parametrize("last", [nn.Softmax(), nn.Softmax(-1), nn.LogSoftmax(1)])
def test_a_sequential_that_ends_in_probabilities_chooses_an_action(last: nn.Module, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", nn.Sequential(nn.Linear(3, 8), nn.ReLU6(), nn.Linear(8, 4), last))
    facts = restore_agent(str(path)).binding.facts
    assert facts.choices is not None
    assert (facts.head, facts.activations, facts.choices.counts) == ("argmax", ("relu6",), (4,))


@pytest.mark.parametrize("layer", [nn.ReLU(), nn.Hardsigmoid(), nn.PReLU(), nn.BatchNorm1d(8)])
def test_a_module_with_a_hook_is_not_played(layer: nn.Module, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 1))
    model.register_forward_hook(twice)
    with pytest.raises(CkpttoolError):
        played(saved(tmp_path / "a.pt", model))


def batch_norm(units: int, **settings: Any) -> nn.BatchNorm1d:
    """A batch norm in evaluation, whose statistics are those of a batch."""
    layer = nn.BatchNorm1d(units, momentum=1.0, **settings)
    layer(torch.from_numpy(np.random.default_rng(1).normal(3, 2, (64, units)).astype("f4")))
    nn.init.normal_(layer.weight) if layer.affine else None
    return layer.eval()


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(3, 8), batch_norm(8), nn.ReLU(), nn.Linear(8, 1)],
        [batch_norm(3, eps=0.1), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)],
        [nn.Linear(3, 8, bias=False), nn.Tanh(), batch_norm(8, affine=False), nn.Linear(8, 1)],
        [nn.Linear(3, 8), nn.PReLU(8, 0.3), nn.Dropout(), nn.Linear(8, 1)],
        [nn.Linear(3, 8), nn.Sequential(nn.LayerNorm(8), nn.PReLU()), nn.Linear(8, 1), nn.Hardtanh(-2, 2)],
    ],
)
def test_a_module_that_is_no_chain_plays_as_its_layers_compute(
    layers: list[nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(*layers)
    close(played(saved(tmp_path / "a.pt", model))[0], model_actions(model))


def twice(module: Any, inputs: Any, output: Any) -> Any:
    return 2 * output


class Summed(nn.Module):
    """Not a chain: the code cannot be followed, and the file holds no other order."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.a(x))
        return self.c(x + torch.relu(self.b(x)))


class Plain(nn.Module):
    """Layers used in another order than their numbers, one activation in place, constants of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.l3, self.l1, self.l2 = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.drop, self.act = nn.LayerNorm(8, eps=1e-2), nn.Dropout(0.9), nn.ELU(inplace=True)
        self.register_buffer("scale", torch.tensor([1.5]))
        self.limit = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.act(self.norm(self.l3(x))))
        x = nn.functional.leaky_relu(self.l1(x))
        return torch.tanh(self.l2(x)) * self.scale / 2 + self.limit


class Scaling(nn.Module):
    """Observations are normalised, and activations have settings that no chain of layers records."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.5, -1.0, 2.0]))
        self.l1, self.norm, self.act = nn.Linear(3, 8), nn.LayerNorm(8), nn.PReLU(8, 0.1)
        self.l2 = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(self.l1(torch.clamp((x - self.mean) / 2.5, -3.0, 3.0))))
        return torch.clamp(nn.functional.leaky_relu(self.l2(x), 0.3)[:, :1], max=0.7)


@pytest.mark.parametrize(
    "model", [Actor(), Plain(), nn.Sequential(Actor(), nn.Identity()), Summed(), Scaling()]
)
@pytest.mark.parametrize("how", ["script", "trace", "freeze"])
def test_torchscript_is_followed_to_its_activations_and_scale(
    model: nn.Module, how: str, tmp_path: Path
) -> None:
    model.eval()
    script = torch.jit.trace(model, torch.zeros(1, 3)) if how == "trace" else torch.jit.script(model)
    if how == "freeze":
        script = torch.jit.freeze(script)
    script.save(str(tmp_path / "a.pt"))
    close(played(tmp_path / "a.pt")[0], model_actions(model))


def test_given_facts_do_not_replace_what_torchscript_computes(tmp_path: Path) -> None:
    torch.jit.script(Summed().eval()).save(str(tmp_path / "a.pt"))
    with pytest.raises(CkpttoolError):
        played(tmp_path / "a.pt", GIVEN)


class Remembering(nn.Module):
    """A recurrent policy as rsl_rl exports it: its state is a buffer that each call overwrites."""

    def __init__(self, kind: str = "lstm", *, layers: int = 1, start: float = 0.0) -> None:
        super().__init__()
        self.memory = (nn.LSTM if kind == "lstm" else nn.GRU)(3, 8, layers)
        self.actor = nn.Sequential(nn.Linear(8, 4), nn.ELU(), nn.Linear(4, 1))
        self.register_buffer("hidden_state", torch.full((layers, 1, 8), start))
        self.register_buffer("cell_state", torch.zeros(layers, 1, 8))


class WithLstm(Remembering):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, c) = self.memory(x.unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = h
        self.cell_state[:] = c
        return self.actor(out.squeeze(0))


class WithGru(Remembering):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, h = self.memory(x.unsqueeze(0), self.hidden_state)
        self.hidden_state[:] = h
        return self.actor(out.squeeze(0))


class Forgetful(Remembering):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, (h, _) = self.memory(x.unsqueeze(0), (self.hidden_state, self.cell_state))
        self.hidden_state[:] = h
        return self.actor(out.squeeze(0))


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 1.0, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale + 1)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_recurrent_torchscript_carries_its_state(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = (WithLstm if name == "lstm" else WithGru)(name).eval()
    path = tmp_path / "policy.pt"
    torch.jit.script(model).save(str(path))
    agent = restore_agent(str(path))
    environment = choose_environment(agent, TASK, Protocol())
    with environment.make(1) as vector:
        policy = numpy_backend.build(prepare_agent(agent, environment, Protocol(), vector.spec).network)
    state: tuple[np.ndarray, ...] = ()
    for row in observations(6)[:, None]:
        actions, state = policy.step(row, state)
        with torch.no_grad():
            close(actions, model(torch.from_numpy(row)).numpy())
    with pytest.raises(UnsupportedError) as caught:
        export(str(path), str(tmp_path / "policy.onnx"), env=TASK)
    assert "state" in (caught.value.found or "")


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_policy_without_dense_layers_plays_and_exports(how: str, tmp_path: Path) -> None:
    model = Doubled().eval()
    path, target = tmp_path / "policy.pt", tmp_path / "policy.onnx"
    traced = torch.jit.script(model) if how == "script" else torch.jit.trace(model, torch.zeros(1, 3))
    traced.save(str(path))
    assert export(str(path), str(target)).written


@pytest.mark.parametrize(
    "model",
    [WithLstm(layers=2), WithLstm(start=0.5), Forgetful()],
    ids=["two-layers", "another-start", "a-state-that-is-not-kept"],
)
def test_a_recurrent_torchscript_that_does_else_is_refused_by_name(model: nn.Module, tmp_path: Path) -> None:
    torch.jit.script(model).save(str(tmp_path / "policy.pt"))
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(str(tmp_path / "policy.pt"))
    assert "LSTM" in (caught.value.found or "")


class Empirical(nn.Module):
    """The statistics of rsl_rl, with an epsilon of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.5
        self.register_buffer("_mean", torch.tensor([[1.0, -2.0, 0.5]]))
        self.register_buffer("_var", torch.tensor([[4.0, 9.0, 0.25]]))
        self.register_buffer("_std", torch.tensor([[2.0, 3.0, 0.5]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self._mean) / (self._std + self.eps)


class Exported(nn.Module):
    """A policy as Isaac Lab exports it: the names are those of an agent's layout, the code is not."""

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        self.is_recurrent = False
        self.actor = nn.Sequential(nn.Linear(3, 8), nn.ELU(), nn.Linear(8, 1))
        self.normalizer = normalizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.actor(self.normalizer(x))


@pytest.mark.parametrize("normalizer", [nn.Identity(), Empirical()], ids=["no-statistics", "statistics"])
def test_the_code_of_an_archive_goes_before_the_defaults_of_a_layout(
    normalizer: nn.Module, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, path = Exported(normalizer).eval(), tmp_path / "policy.pt"
    torch.jit.script(model).save(str(path))
    close(played(path)[0], model_actions(model))
    done = convert(str(path), str(tmp_path / "policy"), to="tf")
    assert done.written
    assert not done.open_entries
    assert not [entry for entry in done.ledger if entry.use == "assumed" and entry.what == "activation"]
    if isinstance(normalizer, nn.Identity):
        close(played(tmp_path / "policy")[0], model_actions(model))


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)),
        nn.Sequential(nn.Linear(3, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False)),
    ],
    ids=["flatten", "no-bias"],
)
def test_torchscript_flattens_and_has_layers_without_bias(model: nn.Module, how: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    script = torch.jit.script(model) if how == "script" else torch.jit.trace(model, torch.zeros(1, 3))
    script.save(str(path))
    close(played(path)[0], model_actions(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda y: torch.clamp(y, max=0.3),
        lambda y: nn.functional.elu(y, 0.2),
        lambda y: nn.functional.gelu(y, approximate="tanh"),
        lambda y: y[:, torch.arange(7, -1, -1)],
    ],
)
def test_facts_complete_no_torchscript_whose_code_computes_something_else(
    change: Any, tmp_path: Path
) -> None:
    class Changed(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.l2(change(self.l1(self.l3(x))))

    torch.jit.trace(Changed().eval(), torch.zeros(1, 3)).save(str(tmp_path / "a.pt"))
    with pytest.raises(CkpttoolError):
        played(tmp_path / "a.pt", GIVEN)


def test_a_sequential_of_names_is_played_in_its_own_order(tmp_path: Path) -> None:
    """Neither the alphabet nor numbers in names are the order of `_modules`."""
    layers = [
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.ELU(),
        nn.Linear(8, 1),
    ]
    for names in ("abfgdec", "acdbefg"):
        named = nn.Sequential(OrderedDict(zip([f"l_{n}" for n in names], layers, strict=True))).eval()
        torch.save(named, tmp_path / "a.pt")
        close(played(tmp_path / "a.pt", AgentFacts(action_low=-9, action_high=9))[0], model_actions(named))
    shared = nn.Tanh()
    twice = nn.Sequential(OrderedDict(z=layers[0], y=shared, x=layers[2], w=shared, v=layers[6])).eval()
    torch.save(twice, tmp_path / "a.pt")
    close(played(tmp_path / "a.pt", AgentFacts(action_low=-9, action_high=9))[0], model_actions(twice))


@pytest.mark.parametrize("activation", [nn.Softplus(1, 0.1), nn.Softplus(2), nn.Softsign()])
@pytest.mark.parametrize("last", [False, True])
def test_a_pickled_activation_that_has_no_equal_is_not_replaced(
    activation: nn.Module, last: bool, tmp_path: Path
) -> None:
    layers = [nn.Linear(3, 8), nn.Tanh() if last else activation, nn.Linear(8, 1), activation]
    torch.save(nn.Sequential(*layers[: 4 if last else 3]), tmp_path / "a.pt")
    with pytest.raises(UnsupportedError):
        played(tmp_path / "a.pt", GIVEN)


@pytest.mark.parametrize("activation", [nn.ELU(0.5), nn.Hardtanh(-2, 2), nn.CELU(0.5), nn.GELU("tanh")])
@pytest.mark.parametrize("last", [False, True])
def test_a_pickled_activation_with_arguments_is_computed_and_not_replaced(
    activation: nn.Module, last: bool, tmp_path: Path
) -> None:
    layers = [nn.Linear(3, 8), nn.Tanh() if last else activation, nn.Linear(8, 1), activation]
    model = nn.Sequential(*layers[: 4 if last else 3])
    path = saved(tmp_path / "a.pt", model)
    close(played(path)[0], model_actions(model))
    with pytest.raises(UsageError):
        played(path, GIVEN)


@pytest.mark.parametrize("name", ["obs_std", "std", "running_std", "input_sigma", "obs_log_std"])
@pytest.mark.parametrize("inside", [False, True])
def test_the_spread_of_observations_is_not_that_of_actions(name: str, inside: bool, tmp_path: Path) -> None:
    state = {f"actor.{k}": v for k, v in Actor().state_dict().items()}
    state |= {f"actor.{name}" if inside else name: torch.rand(3) + 0.5}
    with pytest.raises(UnsupportedError):
        played(saved(tmp_path / "a.pt", state), GIVEN)


@pytest.mark.parametrize(
    ("beside", "low", "high"),
    [
        ({"max_action": 1.5}, -1.5, 1.5),
        ({"args": {"max_action": 2, "lr": 1e-3}}, -2, 2),
        ({"action_scale": 1.5, "action_bias": 0.5}, -1, 2),
        ({"action_low": [-1.0], "action_high": [3.0]}, -1, 3),
        ({"act_limit": np.array([0.5], np.float32)}, -0.5, 0.5),
    ],
)
def test_numbers_beside_a_network_bound_its_actions(
    beside: dict[str, Any], low: float, high: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Actor()
    path = saved(tmp_path / "a.pt", {"actor": model.state_dict(), **beside})
    facts = AgentFacts(activations="relu", head="affine")
    known = restore_agent(str(path), facts=facts).known
    assert (known.action_low, known.action_high) == ([low], [high])
    close(played(path, facts)[0], model_actions(model) / 2 * (high - low) / 2 + (high + low) / 2)


@pytest.mark.parametrize(
    "beside",
    [
        {"max_action": 1.5, "action_scale": 2.0},
        {"max_action": [1.0, 2.0]},
        {"max_action": -1.0},
        {"max_action": "large"},
        {"action_low": -1.0},
    ],
)
def test_a_number_that_may_bound_actions_and_does_not_say_how_is_named(
    beside: dict[str, Any], tmp_path: Path
) -> None:
    _, assumed = played(saved(tmp_path / "a.pt", {"actor": Actor().state_dict(), **beside}), GIVEN)
    assert any(name in sentence for sentence in assumed for name in beside)


def test_a_sequential_without_an_activation_between_two_layers_gets_none(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with pytest.raises(UnsupportedError):
        played(saved(tmp_path / "a.pt", layers.state_dict()), GIVEN)
    listed = nn.ModuleList([nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)])
    played(saved(tmp_path / "a.pt", listed.state_dict()), GIVEN)


def test_a_sequential_of_named_parts_computes_in_the_order_of_the_file(tmp_path: Path) -> None:
    parts = [
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ELU(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 1),
    ]
    for names in (("in", "t", "b", "e", "a", "r", "out"), "9876543", ("a1", "b", "a2", "c", "a3", "d", "z")):
        model = nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
        close(played(saved(tmp_path / "a.pt", model))[0], model_actions(model))


@pytest.mark.parametrize("activation", [nn.Softplus(threshold=0.5), nn.Softplus(beta=2)])
def test_an_activation_with_other_arguments_is_not_taken_for_the_plain_one(
    activation: nn.Module, tmp_path: Path
) -> None:
    path = saved(tmp_path / "a.pt", nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 1)))
    with pytest.raises(CkpttoolError):
        played(path)


@pytest.mark.parametrize(
    "activation", [nn.LeakyReLU(0.2), nn.Mish(), nn.SELU(), nn.ReLU6(), nn.Hardtanh(), nn.Hardswish()]
)
def test_a_pickled_activation_keeps_its_function(activation: nn.Module, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), activation, nn.Linear(8, 1))
    actions, _ = played(saved(tmp_path / "a.pt", model))
    close(actions, model_actions(model))


class _Forms:
    """Forms of a model that record its activations."""

    @staticmethod
    def whole(model: nn.Module, folder: Path) -> Path:
        return saved(folder / "a.pt", model)

    @staticmethod
    def script(model: nn.Module, folder: Path) -> Path:
        torch.jit.trace(model.eval(), torch.zeros(1, 3)).save(str(folder / "a.pt"))
        return folder / "a.pt"


@pytest.mark.parametrize("form", [_Forms.whole, _Forms.script])
@pytest.mark.parametrize("target", ["b.pt", "b.safetensors", "b.npz", "b.weights.h5", "b"])
def test_a_conversion_carries_recorded_activations_into_the_sidecar(
    form: Any, target: str, tmp_path: Path
) -> None:
    model = nn.Sequential(
        nn.Linear(3, 8), nn.LayerNorm(8, eps=0.25), nn.Tanh(), nn.Linear(8, 8), nn.ELU(), nn.Linear(8, 1)
    )
    source, options = form(model, tmp_path), ("--to", "tf") if target == "b" else ()
    ran = in_process("convert", source, tmp_path / target, *options)
    assert ran.status == 0, ran.err
    close(played(tmp_path / target)[0], model_actions(model))
    if target in ("b.weights.h5", "b"):  # the others keep the module's own attributes
        again = in_process("convert", tmp_path / target, tmp_path / "again.pt")
        assert again.status == 0, again.err
        close(played(tmp_path / "again.pt")[0], model_actions(model))


@pytest.mark.parametrize("name", ["action_head", "actions", "fc_logits", "action_probs"])
def test_a_head_of_actions_acts_beside_a_value_head(name: str, tmp_path: Path) -> None:
    # github.com/pytorch/examples, reinforcement_learning/actor_critic.py
    torch.manual_seed(0)
    trunk, head, value = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)
    path = saved(
        tmp_path / "a.pt", nn.ModuleDict({"affine1": trunk, name: head, "value_head": value}).state_dict()
    )
    agent = load_agent(str(path), "CartPole-v1", facts=AgentFacts(activations="relu"))
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    expected = head(torch.relu(trunk(torch.from_numpy(obs)))).argmax(1).numpy()
    np.testing.assert_array_equal(agent.act(obs), expected)


# Names and hidden layers of the streams of dueling networks and actor-critics on shared layers.
STREAMS = {
    "heads": (("val", 0), ("adv", 0), "feature"),
    "suffixed heads": (("value_head", 0), ("advantage_head", 0), "feature"),
    "modules": (("value_stream", 1), ("advantage_stream", 1), "feature"),
    "camel case": (("valueStream", 1), ("advantageStream", 1), "net"),
    "letters": (("V", 0), ("A", 0), "hidden"),
    "numbered letters": (("V", 2), ("A", 2), "fc1"),
    "numbered names": (("fc_val", 2), ("fc_act", 2), "fc1"),
    "policy": (("fc_value", 2), ("fc_policy", 2), "fc1"),
    "actor-critic": (("critic", 1), ("actor", 1), "shared"),
}


def stream(name: str, inputs: int, outputs: int, depth: int) -> dict[str, nn.Module]:
    """Return the layers of a stream: `name`, a Sequential of that name, or `name1` and `name2`."""
    hidden, last = nn.Linear(inputs, inputs), nn.Linear(inputs, outputs)
    if depth == 0:
        return {name: nn.Linear(inputs, outputs)}
    return (
        {name: nn.Sequential(hidden, nn.ReLU(), last)}
        if depth == 1
        else {f"{name}1": hidden, f"{name}2": last}
    )


def streams(case: str, *, actions: int = 2) -> tuple[nn.ModuleDict, Any]:
    """Return a network of the streams on shared layers, and what computes its scores."""
    torch.manual_seed(0)
    value, choice, shared = STREAMS[case]
    trunk = nn.Linear(4, 16)
    parts = [stream(name, 16, n, depth) for (name, depth), n in ((value, 1), (choice, actions))]
    kept = trunk if shared == "fc1" else nn.Sequential(trunk, nn.ReLU())

    def run(part: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
        first, *more = part.values()
        return more[0](torch.relu(first(x))) if more else first(x)

    def scores(obs: torch.Tensor) -> torch.Tensor:
        x = torch.relu(trunk(obs))
        values, advantages = (run(part, x) for part in parts)
        return values + advantages - advantages.mean(1, keepdim=True)

    # The value's layers first, as in most programs: their order in the file decides nothing.
    return nn.ModuleDict({shared: kept, **parts[0], **parts[1]}), scores


@pytest.mark.parametrize("form", ["alone", "named", "target"])
@pytest.mark.parametrize("case", STREAMS)
def test_the_stream_that_chooses_plays_beside_the_value_of_the_state(
    case: str, form: str, tmp_path: Path
) -> None:
    net, scores = streams(case)
    other = {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    content = {
        "alone": net.state_dict(),
        "named": {"model_state_dict": net.state_dict(), "epsilon": 0.05},
        "target": {"online": net.state_dict(), "target": other},
    }
    path = saved(tmp_path / "dqn.pt", content[form])
    agent = load_agent(str(path), "CartPole-v1", facts=AgentFacts(activations="relu"))
    obs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    with torch.no_grad():
        expected = scores(torch.from_numpy(obs)).argmax(1).numpy()
    assert len({*expected.tolist()}) == 2
    np.testing.assert_array_equal(agent.act(obs), expected)


def test_advantages_need_no_action_map_and_no_name_of_a_q_network(tmp_path: Path) -> None:
    net, scores = streams("modules", actions=3)
    path = saved(tmp_path / "weights.pt", net.state_dict())
    agent = load_agent(str(path), facts=AgentFacts(activations="relu"))
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    with torch.no_grad():
        expected = scores(torch.from_numpy(obs)).argmax(1).numpy()
    np.testing.assert_array_equal(agent.act(obs), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"value2.weight": torch.ones(3, 16), "value2.bias": torch.ones(3)},
        {"value1.weight": torch.ones(16, 4)},
        {"advantage2.weight": torch.ones(1, 16), "advantage2.bias": torch.ones(1)},
        {"value3.weight": torch.ones(1, 5), "value3.bias": torch.ones(1)},
        {"extra.weight": torch.ones(7, 9), "extra.bias": torch.ones(7)},
    ],
)
def test_streams_of_other_sizes_are_refused(change: dict[str, torch.Tensor], tmp_path: Path) -> None:
    net = nn.ModuleDict(
        {"fc1": nn.Linear(4, 16), **stream("value", 16, 1, 2), **stream("advantage", 16, 2, 2)}
    )
    path = saved(tmp_path / "weights.pt", {**net.state_dict(), **change})
    with pytest.raises((UsageError, UnsupportedError)):
        load_agent(str(path), "CartPole-v1", facts=AgentFacts(activations="relu"))


def test_a_model_beside_an_actor_and_a_critic_is_no_layer_that_they_share(tmp_path: Path) -> None:
    chains = {"model": (6, 16, 4), "actor": (4, 16, 2), "critic": (4, 16, 1)}
    net = nn.ModuleDict(
        {
            name: nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c))
            for name, (a, b, c) in chains.items()
        }
    )
    path = saved(tmp_path / "weights.pt", net.state_dict())
    agent = load_agent(str(path), "CartPole-v1", facts=AgentFacts(activations="relu"))
    obs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    np.testing.assert_array_equal(agent.act(obs), net["actor"](torch.from_numpy(obs)).argmax(1).numpy())


@pytest.mark.parametrize("target", ["b.onnx", "b.pt"])
def test_discrete_actions_of_an_environment_are_the_action_map_of_a_conversion(
    target: str, tmp_path: Path
) -> None:
    net, scores = streams("actor-critic")
    path = saved(tmp_path / "weights.pt", net.state_dict())
    code = ("--code", tmp_path / "b.py") if target == "b.pt" else ()
    options = ("--activation", "relu", "--env", "CartPole-v1", *code)
    done = in_process("convert", path, tmp_path / target, *options)
    assert done.status == 0, done.err
    obs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    with torch.no_grad():
        expected = scores(torch.from_numpy(obs)).argmax(1).numpy()
    np.testing.assert_array_equal(load_agent(str(tmp_path / target)).act(obs), expected)
    if code:
        written = runpy.run_path(str(code[1]))
        actions = written["act"](written["load"](str(tmp_path / target)), obs)
        np.testing.assert_array_equal(np.asarray(actions), expected)
    other = in_process(
        "convert", path, tmp_path / f"c{target}", "--activation", "relu", "--env", "Acrobot-v1"
    )
    assert other.status == (2 if target == "b.onnx" else 0), other.err


def test_a_q_network_acts_beside_its_target(tmp_path: Path) -> None:
    torch.manual_seed(0)
    online, target = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    networks = {"online_network": online, "target_network": target}
    content = {name: nn.ModuleDict({"model": network}).state_dict() for name, network in networks.items()}
    path = saved(tmp_path / "ddqn.pt", {"algorithm": "ddqn", **content})
    agent = load_agent(str(path), "CartPole-v1", facts=AgentFacts(activations="relu"))
    obs = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    np.testing.assert_array_equal(agent.act(obs), online(torch.from_numpy(obs)).argmax(1).numpy())


def test_an_input_of_actions_is_no_head(tmp_path: Path) -> None:
    parts = nn.ModuleDict({"fc1": nn.Linear(4, 8), "action_value": nn.Linear(2, 8), "q": nn.Linear(8, 1)})
    with pytest.raises(EnvironmentMismatchError):
        load_agent(
            str(saved(tmp_path / "q.pt", parts.state_dict())),
            "CartPole-v1",
            facts=AgentFacts(activations="relu"),
        )


@pytest.mark.parametrize("last", [nn.Softmax(dim=-1), nn.LogSoftmax(dim=1)])
@pytest.mark.parametrize("form", [_Forms.whole, _Forms.script])
@pytest.mark.parametrize("target", [None, "b.pt", "b.npz", "b.weights.h5"])
def test_the_most_probable_action_is_played(
    form: Any, last: nn.Module, target: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), last)
    path = form(model, tmp_path)
    if target is not None:
        ran = in_process("convert", path, tmp_path / target)
        assert ran.status == 0, ran.err
        path = tmp_path / target
    obs = observations()
    agent = load_agent(str(path))
    assert agent.choices == Choices((4,), (0,))
    np.testing.assert_array_equal(agent.act(obs), model(torch.from_numpy(obs)).argmax(1).numpy())


def test_probabilities_of_a_batch_are_no_policy(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(dim=0))
    for form in (_Forms.whole, _Forms.script):
        with pytest.raises(UnsupportedError):
            load_agent(str(form(model, tmp_path)))


class Skipping(Actor):
    """An actor with a sum between its layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.fc1(x))
        return torch.tanh(self.fc3(x + torch.relu(self.fc2(x))))


def require_no_chain(source: Path, target: Path, *options: str) -> None:
    """Convert the source; its target, and what is made of that, is refused as a policy."""
    ran = in_process("convert", source, target, *options)
    assert ran.status == 0, ran.err
    for facts in (NO_FACTS, GIVEN, AgentFacts(activations="relu", head="identity")):
        with pytest.raises(UnsupportedError) as error:
            played(target, facts)
        assert error.value.file == str(target)
    again = target.with_name("again.npz")
    assert in_process("convert", target, again).status == 0
    with pytest.raises(UnsupportedError):
        played(again, GIVEN)
    assert in_process("convert", target, target.with_name("c.onnx"), "--env", TASK).status == 2


@pytest.mark.parametrize("target", ["b.pt", "b.safetensors", "b.npz", "b.weights.h5"])
def test_weights_of_torchscript_that_is_no_chain_are_not_played_as_one(target: str, tmp_path: Path) -> None:
    require_no_chain(_Forms.script(Skipping(), tmp_path), tmp_path / target)
    assert in_process("doctor", tmp_path / target).status == 1
    for file in tmp_path.glob("*.ckpttool.json"):
        file.unlink()
    assert played(tmp_path / target, GIVEN)[1]  # weights alone


def test_weights_of_a_sequential_with_an_unknown_part_are_not_played(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Softmax(-1), nn.Linear(8, 1))
    require_no_chain(_Forms.whole(model, tmp_path), tmp_path / "b.npz")


def test_the_class_of_a_whole_module_is_named_where_its_weights_play(tmp_path: Path) -> None:
    assert in_process("convert", _Forms.whole(Skipping(), tmp_path), tmp_path / "b.npz").status == 0
    assert any("Skipping" in sentence for sentence in played(tmp_path / "b.npz", GIVEN)[1])


class Choosing(nn.Module):
    """A policy that chooses by the mean of some outputs for each action: its code is in no file."""

    def __init__(self, quantiles: int) -> None:
        super().__init__()
        self.action_space = gymnasium.spaces.Discrete(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3 * quantiles))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs).view(len(obs), 3, -1).mean(2).argmax(1)


def test_a_stored_action_space_contradicts_other_outputs_of_a_whole_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    obs = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    model = Choosing(1)
    agent = load_agent(str(_Forms.whole(model, tmp_path)))
    np.testing.assert_array_equal(agent.act(obs), model(torch.from_numpy(obs)).numpy())
    assert any(Choosing.__name__ in sentence for sentence in agent.assumed)
    with pytest.raises(UnsupportedError) as caught:
        load_agent(str(_Forms.whole(Choosing(7), tmp_path)))
    assert "3" in str(caught.value.expected)
    assert "21" in str(caught.value.found)
    words = shlex.split(str(caught.value.hint).partition(" writes ")[0])[1:]
    assert in_process(words[0], words[1], str(tmp_path / words[2])).status == 0


def test_a_given_fact_wins_over_the_activations_that_a_conversion_carries(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    ran = in_process("convert", saved(tmp_path / "a.pt", model), tmp_path / "b.npz", "--activation", "relu")
    assert ran.status == 0, ran.err
    close(played(tmp_path / "b.npz")[0], model_actions(nn.Sequential(model[0], nn.ReLU(), model[2])))


def test_activations_are_not_carried_to_layers_of_another_order(tmp_path: Path) -> None:
    parts = [
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ELU(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 1),
    ]
    model = nn.Sequential(OrderedDict(zip("0546321", parts, strict=True)))
    source = saved(tmp_path / "a.pt", model)
    close(played(source)[0], model_actions(model))
    assert in_process("convert", source, tmp_path / "b.weights.h5").status == 0
    with pytest.raises(UsageError):  # the order of the names is another one
        played(tmp_path / "b.weights.h5", GIVEN)


# --- Facts ------------------------------------------------------------------------------------------


def test_the_command_that_is_named_works(tmp_path: Path) -> None:
    path = saved(tmp_path / "it's an actor.pth", Actor().state_dict())
    facts = ("--activation", "relu", "--head", "tanh")
    refused = in_process(
        "eval", "--seed=7", path, *facts, "--episodes", "2", "--bounds", "-1.5", "2", "--json"
    )
    assert refused.status == 2
    command = json.loads(refused.out)["error"]["hint"].removeprefix("ckpttool ")
    # The command is complete: what was given is in it, whatever its form was, and works unchanged.
    words = shlex.split(command)
    options = {"--seed": ["7"], "--env": [TASK], "--episodes": ["2"], "--bounds": ["-1.5", "2"]}
    assert words[:2] == ["eval", str(path)]
    assert all(words[words.index(name) + 1 :][: len(values)] == values for name, values in options.items())
    ran = in_process(*words)
    assert ran.status in (0, 1), ran.err
    assert any(note.startswith("given: ") and "head tanh" in note for note in json.loads(ran.out)["notes"])


def named_facts(hint: str) -> tuple[str, ...]:
    """Return the options of facts that a hint names, with values of this module's policies."""
    values = {
        "--env": TASK,
        "--activation": "relu",
        "--head": "affine" if "--head affine" in hint else "tanh",
    }
    return tuple(word for name, value in values.items() if name in hint for word in (name, value))


def followed(*words: object, most: int = 4) -> tuple[str, ...]:
    """Run a command and then what its hints complete it with, until it works; return the last command."""
    command = tuple(map(str, words))
    for _ in range(most):
        ran = in_process(*command)
        if ran.status == 0:
            return command
        assert ran.status == 2, ran.err
        hint = ran.err.split("hint: ", 1)[1].strip()
        if hint.startswith("ckpttool eval"):
            command = tuple(shlex.split(hint)[1:])
            continue
        more = named_facts(hint)
        if not more:
            # One of several networks is as good as another.
            first = re.search(r"--network (?P<name>'[^']*'|\S+)", hint)
            assert first is not None, hint
            more = ("--network", *shlex.split(first["name"]))
        command = (*command, *more)
    raise AssertionError(command)


ALONE: dict[str, Any] = {
    "state-dict.pth": lambda path: saved(path, Actor().state_dict()),
    "wrapped.pt": lambda path: saved(path, {"model_state_dict": Actor().state_dict(), "epoch": 3}),
    "bounded.pt": lambda path: saved(path, {"actor": Actor().state_dict(), "max_action": 2.0}),
    "buffers.pt": lambda path: saved(path, Scaled().state_dict()),
    "module.pt": lambda path: saved(path, Actor()),
    "sequential.pt": lambda path: saved(path, sequential()),
    "script.pt": lambda path: torch.jit.script(sequential(norm=True)).save(path),
    "two.pt": lambda path: saved(
        path, {"one": sequential().state_dict(), "two": sequential(norm=True).state_dict()}
    ),
    "arrays.npz": lambda path: np.savez(path, **{k: v.numpy() for k, v in Actor().state_dict().items()}),
}


@pytest.mark.parametrize("name", ALONE)
def test_commands_that_are_named_lead_to_a_policy_that_plays(name: str, tmp_path: Path) -> None:
    ALONE[name](tmp_path / name)
    followed("eval", tmp_path / name, "--env", TASK, "--episodes", "1")


def test_an_export_names_its_command_too_and_records_what_was_given(tmp_path: Path) -> None:
    model = Actor()
    path, target = saved(tmp_path / "a.pth", model.state_dict()), tmp_path / "a.onnx"
    refused = in_process("convert", path, target)
    assert refused.status == 2
    ran = in_process("convert", path, target, *named_facts(refused.err.split("hint: ")[1]), "--json")
    assert ran.status == 0, ran.err
    receipt = json.loads((tmp_path / "a.onnx.ckpttool.json").read_text())
    assert (receipt["head"], receipt["activations"], receipt["env"]["id"]) == ("tanh", ["relu"], TASK)
    assert [receipt["provenance"][name] for name in ("head", "activations", "env")] == ["given"] * 3
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(target))
    (actions,) = session.run(None, {session.get_inputs()[0].name: observations()})
    close(actions, model_actions(model))


def test_returns_are_those_of_a_torch_loop(tmp_path: Path) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    model = Actor().eval()
    path = saved(tmp_path / "a.pth", model.state_dict())
    evaluation = evaluate(str(path), TASK, Protocol(episodes=2, engine="gymnasium"), facts=GIVEN)
    env, returns = gymnasium.make(TASK), []
    for seed in (1000, 1001):
        obs, _ = env.reset(seed=seed)
        total, done = 0.0, False
        while not done:
            with torch.no_grad():
                action = model(torch.from_numpy(obs)[None]).numpy()[0]
            obs, reward, terminated, truncated, _ = env.step(action)
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    np.testing.assert_allclose(evaluation.rollout.returns, returns, rtol=1e-3)


def test_facts_given_to_a_conversion_play_its_target(tmp_path: Path) -> None:
    model = Actor()
    path = saved(tmp_path / "a.pth", model.state_dict())
    facts = AgentFacts(activations="relu", head="tanh", action_low=-2, action_high=2)
    for target, to in (("b.safetensors", None), ("c-1", "tf"), ("d-1", "tf1"), ("e.weights.h5", "keras")):
        ckpttool.convert(str(path), str(tmp_path / target), to=to, env=TASK, facts=facts)
        receipt = json.loads((tmp_path / f"{target}.ckpttool.json").read_text())
        assert {receipt["provenance"][n] for n in ("head", "activations", "action_low", "env")} == {"given"}
        close(played(tmp_path / target)[0], model_actions(model))
    done = in_process("verify", path, tmp_path / "b.safetensors", "--json")
    assert done.status == 0, done.err


def test_a_given_fact_wins_over_the_file_and_the_contradiction_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", sequential())
    facts = AgentFacts(activations="relu", head="affine")
    agent = restore_agent(str(path), facts=facts)
    assert agent.known.activations == ["relu"]
    assert any("activations" in note and "elu" in note for note in agent.notes)
    diagnosis = ckpttool.doctor(str(path), TASK, facts=facts)
    assert any("activations" in finding.sentence for finding in diagnosis.findings)


def test_doctor_names_what_no_file_holds(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", Actor().state_dict())
    findings = ckpttool.doctor(str(path), TASK).findings
    assert any({"activations", "head"} <= set(re.findall(r"\w+", finding.fix or "")) for finding in findings)
    assert not [f for f in ckpttool.doctor(str(path), TASK, facts=GIVEN).findings if f.topic == "agent"]


STATISTICS = {"mean": np.array([0.5, -1.0, 2.0]), "var": np.array([0.25, 4.0, 9.0])}


@pytest.mark.parametrize("form", ["npz", "torch", "nested", "vecnormalize", "json", "std"])
def test_statistics_of_observations_from_any_file(form: str, tmp_path: Path) -> None:
    model, file = Actor(), tmp_path / "norm"
    plain = {name: value.tolist() for name, value in STATISTICS.items()}
    if form == "npz":
        file = tmp_path / "norm.npz"
        np.savez(file, **STATISTICS, epsilon=1e-8)
    elif form == "json":
        file = tmp_path / "norm.json"
        file.write_text(json.dumps(plain))
    elif form == "vecnormalize":
        rms = {"mean": STATISTICS["mean"], "var": STATISTICS["var"], "count": 10.0}
        returns = {"mean": np.zeros(()), "var": np.ones(()), "count": 10.0}
        file.write_bytes(pickle.dumps({"obs_rms": rms, "ret_rms": returns, "clip_obs": 1.5, "epsilon": 1e-8}))
    else:
        value = {name: torch.from_numpy(array) for name, array in STATISTICS.items()}
        if form == "std":
            value = {"mean": value["mean"], "std": value["var"].sqrt()}
        torch.save({"obs_rms": value, "ret_rms": {"mean": torch.zeros(1), "var": torch.ones(1)}}
                   if form == "nested" else value, file)  # fmt: skip
    facts = AgentFacts(activations="relu", head="tanh", obs_norm=str(file))
    rows = (observations() - STATISTICS["mean"]) / np.sqrt(STATISTICS["var"] + 1e-8)
    rows = np.clip(rows, -1.5, 1.5) if form == "vecnormalize" else rows
    path = saved(tmp_path / "a.pth", model.state_dict())
    with torch.no_grad():
        expected = model(torch.from_numpy(rows.astype(np.float32))).numpy()
    close(played(path, facts)[0], expected)


@pytest.mark.parametrize("name", ["epsilon", "clip"])
@pytest.mark.parametrize("form", ["npz", "json", "torch", "top", "python"])
def test_what_is_not_one_number_in_statistics_is_refused(form: str, name: str, tmp_path: Path) -> None:
    """A limit for each observation is not taken as none."""
    file, value = tmp_path / f"norm.{form}", [1.5, 2.5, 3.5]
    plain = {what: array.tolist() for what, array in STATISTICS.items()}
    if form == "npz":
        np.savez(file, **STATISTICS, **{name: np.array(value)})
    elif form == "json":
        file.write_text(json.dumps({**plain, name: value}))
    else:
        tensors = {what: torch.from_numpy(array) for what, array in STATISTICS.items()}
        torch.save(tensors | {name: value} if form == "torch" else {"obs_rms": tensors, name: "large"}, file)
    with pytest.raises(UsageError) as refused:
        AgentFacts(obs_norm={**plain, name: value} if form == "python" else str(file))
    assert refused.value.path == name


def test_statistics_outside_float64_are_refused() -> None:
    for name in ("mean", "var"):
        with pytest.raises(UsageError):
            AgentFacts(obs_norm={"mean": [0.0], "var": [1.0], name: [10**400]})


@pytest.mark.parametrize(
    "facts",
    [
        {"activations": "rellu"},
        {"head": "than"},
        {"action_low": 1.0},
        {"action_low": 1.0, "action_high": 1.0},
        {"action_low": [0.0, float("nan")], "action_high": [1.0, 2.0]},
        {"action_low": [0.0, 0.0], "action_high": [1.0, 2.0, 3.0]},
        {"obs_norm": {"mean": [0.0]}},
        {"obs_norm": {"mean": [0.0], "var": [-1.0]}},
        {"obs_norm": {"mean": [0.0], "var": [float("inf")]}},
        {"obs_norm": {"mean": [0.0], "var": [1.0, 2.0]}},
        {"obs_norm": {"mean": [0.0], "var": [0.0], "epsilon": 0.0}},
    ],
)
def test_a_wrong_fact_is_a_usage_error(facts: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        AgentFacts(**facts)


@pytest.mark.parametrize(
    "options",
    [
        ("--activation", "relu,,tanh"),
        ("--head", "softmax"),
        ("--bounds", "a", "b"),
        ("--bounds", "-1,-1", "1"),
        ("--obs-norm", "absent.npz"),
        ("--layout", "nonesuch"),
    ],
)
def test_a_wrong_option_ends_with_2_and_one_sentence(options: tuple[str, ...], tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", Actor().state_dict())
    ran = in_process("eval", path, "--env", TASK, *options, cwd=tmp_path)
    assert ran.status == 2
    assert "Traceback" not in ran.err


def test_bounds_on_the_command_line_take_negative_numbers(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", Actor().state_dict())
    options = ("--activation", "relu", "--head", "affine", "--bounds", "-1.5", "0.5", "--layout", "none")
    ran = in_process("eval", path, "--env", TASK, "--episodes", "1", "--json", *options)
    assert ran.status == 0, ran.err
    assert any("action_low -1.5" in note for note in json.loads(ran.out)["notes"])


def test_statistics_of_another_size_are_refused(tmp_path: Path) -> None:
    facts = AgentFacts(activations="relu", head="tanh", obs_norm={"mean": [0.0] * 4, "var": [1.0] * 4})
    with pytest.raises(CkpttoolError):
        played(saved(tmp_path / "a.pth", Actor().state_dict()), facts)


def test_export_without_an_environment_takes_given_bounds(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pth", Actor().state_dict())
    facts = AgentFacts(activations="relu", head="tanh", action_low=-2.0, action_high=2.0)
    assert export(str(path), str(tmp_path / "a.onnx"), facts=facts).digest


# --- TensorFlow -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keras_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    tensorflow_child.require("tensorflow", "keras")
    folder = tmp_path_factory.mktemp("keras")
    return folder, tensorflow_child.run(policy_keras.__file__, "keras_files", folder, once=True)


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "name",
    # The last two are no chain: they are computed as configured.
    [
        *("scaled.keras", "scaled.h5", "functional.keras", "functional.h5"),
        *("skipping.keras", "leaky.keras"),
    ],
)
def test_a_keras_model_needs_no_facts(name: str, keras_folder: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = keras_folder
    close(played(folder / name)[0], np.asarray(expected[name], np.float32))


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["bare.weights.h5", "bare"])
def test_keras_weights_play_with_the_facts(name: str, keras_folder: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = keras_folder
    facts = AgentFacts(activations=["relu", "silu"], head="unit_tanh")
    close(played(folder / name, facts)[0], np.asarray(expected["bare"], np.float32))
    close(
        played(folder / "bare.keras", AgentFacts(head="affine"))[0],
        2 * np.asarray(expected["bare"], np.float32),
    )


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["skipping.keras", "softmax.keras", "summed"])
def test_weights_of_a_model_that_is_no_chain_are_not_played_as_one(
    name: str, keras_folder: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    require_no_chain(keras_folder[0] / name, tmp_path / "b.pt")


@pytest.mark.tensorflow
def test_a_keras_model_with_another_layer_is_refused_by_its_name(
    keras_folder: tuple[Path, dict[str, Any]],
) -> None:
    with pytest.raises(UnsupportedError) as error:
        played(keras_folder[0] / "softmax.keras")
    assert error.value.found == "Softmax"


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []},
        {"output_layers": [["dense", 7, 0]]},
        {"output_layers": [["dense", 0, 3]]},
        {"output_layers": "dense"},
        {"input_layers": [["none", 0, 0], ["none", 0, 0]]},
        {"history": ["input", "x", None]},
        {"history": ["dense", 0, 0]},
    ],
)
def test_a_damaged_configuration_is_refused(change: dict[str, Any]) -> None:
    history = {"class_name": "__keras_tensor__", "config": {"keras_history": change.get("history")}}
    node = {"args": [history], "kwargs": {}}
    dense = {"class_name": "Dense", "config": {"name": "dense"}, "name": "dense", "inbound_nodes": [node]}
    config = {"class_name": "InputLayer", "config": {"name": "input", "batch_shape": [None, 3]}}
    settings = {"layers": [config | {"name": "input", "inbound_nodes": []}, dense], "name": "model"}
    settings |= {"input_layers": [["input", 0, 0]], "output_layers": [["dense", 0, 0]]}
    document = {"class_name": "Functional", "config": settings | change}
    with pytest.raises(UnsupportedError):
        graph_programs.lower_policy(read_document(document, Tree({}), "x.keras"), "actor", "x.keras")


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["bare_saved", "bare_exported"])
def test_a_saved_models_graph_is_followed(name: str, keras_folder: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = keras_folder
    with pytest.raises(UsageError) as error:
        played(folder / name)
    assert "--activation" not in str(error.value.hint)
    close(played(folder / name, AgentFacts(head="unit_tanh"))[0], np.asarray(expected["bare"], np.float32))


@pytest.mark.tensorflow
def test_a_function_of_a_module_is_followed_or_left_alone(keras_folder: tuple[Path, dict[str, Any]]) -> None:
    folder, expected = keras_folder
    for name in ("module", "summed", "hidden_scale", "leaky_saved"):
        close(played(folder / name)[0], np.asarray(expected[name], np.float32))
    with pytest.raises(UnsupportedError) as error:
        played(folder / "sine")
    assert error.value.found == "Sin"


def test_a_folder_is_swept_with_the_facts_and_its_critics_are_passed_over(tmp_path: Path) -> None:
    critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    for number in (1, 2):
        saved(tmp_path / "run" / f"policy_{number}.pth", Actor().state_dict())
        saved(tmp_path / "run" / f"critic_{number}.pth", critic.state_dict())
    options = ("--activation", "relu", "--head", "tanh", "--episodes", "2", "--json")
    ran = in_process("eval", tmp_path / "run", "--env", TASK, *options)
    assert ran.status == 0, ran.err
    assert len(json.loads(ran.out)["evaluations"]) == 2


def test_a_folder_without_agents_plays_its_policies_and_names_the_facts(tmp_path: Path) -> None:
    folder = tmp_path / "step_100"
    saved(folder / "model.pth", Actor().state_dict())
    saved(folder / "scheduler.pth", {"step_size": 3, "gamma": 0.1})
    ran = in_process("eval", folder, "--env", TASK, "--episodes", "1", "--json")
    assert ran.status == 2
    facts = named_facts(json.loads(ran.out)["error"]["hint"])
    assert facts == ("--activation", "relu", "--head", "tanh")
    ran = in_process("eval", folder, "--env", TASK, *facts, "--episodes", "1", "--json")
    assert len(json.loads(ran.out)["evaluations"]) == 1


def test_a_folder_of_other_networks_names_the_way_to_the_reason(tmp_path: Path) -> None:
    saved(tmp_path / "run" / "embedding.pth", {"embed.weight": torch.ones(4, 3)})
    ran = in_process("eval", tmp_path / "run", "--env", TASK, "--json")
    assert ran.status == 2
    words = shlex.split(json.loads(ran.out)["error"]["hint"].partition(" lists ")[0])
    assert in_process(*words[1:]).status == 0
    assert words[-1].endswith("embedding.pth")


def pieces(*names: str, memory: bool = False) -> dict[str, Any]:
    """Return networks of two layers under these names: 3 -> 5 -> 4 or, if called last, 4 -> 6 -> 2 values."""
    data: dict[str, Any] = {}
    for name in names:
        sizes = (4, 6, 2) if name.endswith("last") else (3, 5, 4)
        for number, (n_in, n_out) in enumerate(pairwise(sizes)):
            data |= {f"{name}.{2 * number}.{k}": v for k, v in nn.Linear(n_in, n_out).state_dict().items()}
    if memory:
        data |= {f"rnn.{name}": value for name, value in nn.GRU(4, 4).state_dict().items()}
    return data


def test_parts_of_one_network_are_not_offered_as_the_policy(tmp_path: Path) -> None:
    """Discrete BCQ of Tianshou: a trunk, and two heads on it."""
    names = ("model.front", "model.last", "second.last")
    path = saved(tmp_path / "policy.pth", pieces(*names) | pieces("third"))
    with pytest.raises(UsageError) as caught:
        load_agent(str(path), facts=AgentFacts(activations=("relu",), head="tanh"))
    assert "network='model'" not in str(caught.value.hint)
    assert "network='third'" in str(caught.value.hint)


def test_networks_that_a_memory_may_join_are_not_offered(tmp_path: Path) -> None:
    path = saved(tmp_path / "policy.pth", pieces("trunk.mlp", "other.last", memory=True))
    with pytest.raises(UnsupportedError) as caught:
        load_agent(str(path), facts=AgentFacts(activations=("relu",), head="tanh"))
    assert "rnn/weight_ih_l0" in str(caught.value.found)
    assert "--network" not in str(caught.value.hint)


def test_outputs_of_other_discrete_actions_need_no_action_map(tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    path = saved(tmp_path / "policy.pth", layers.state_dict())
    facts = AgentFacts(activations=("relu",))
    with pytest.raises(EnvironmentMismatchError) as caught:
        load_agent(str(path), "CartPole-v1", facts=facts)
    assert "Discrete(2)" in str(caught.value.expected)
    assert "5" in str(caught.value.found)


NAMED = {
    "rsl_rl's": ({"_mean": [1.0], "_var": [4.0], "_std": [2.0], "count": 9}, [1.0], [2.01**2], 0.0, None),
    "rl_games'": ({"running_mean": [1.0], "running_var": [4.0], "count": 9}, [1.0], [4.0], 1e-5, 5.0),
    "skrl's": (
        {"running_mean": [1.0], "running_variance": [4.0], "current_count": 9},
        [1.0],
        [(2 + 1e-8) ** 2],
        0.0,
        5.0,
    ),
    "rsl_rl's with its epsilon": (
        {"_mean": [1.0], "_std": [2.0], "eps": 0.5},
        [1.0],
        [2.5**2],
        0.0,
        None,
    ),
    "its own": ({"mean": [1.0], "var": [4.0], "eps": 0.5, "clip_max": 3.0}, [1.0], [4.0], 0.5, 3.0),
}


@pytest.mark.parametrize("case", NAMED)
def test_statistics_of_a_library_have_its_formula(case: str, tmp_path: Path) -> None:
    """`--obs-norm` applies the formula of the class that the names of the buffers show."""
    stored, mean, var, epsilon, clip = NAMED[case]
    file = saved(tmp_path / "norm.pt", {k: torch.tensor(v, dtype=torch.float64) for k, v in stored.items()})
    known = AgentFacts(obs_norm=str(file)).known["obs_norm"]
    np.testing.assert_allclose(known["mean"], mean)
    np.testing.assert_allclose(known["var"], var, rtol=1e-12)
    assert (known["epsilon"], known["clip"]) == (epsilon, clip)


@pytest.mark.parametrize("name", ["scale", "weight", "num_batches_tracked", "clip_low", "shift", "min"])
@pytest.mark.parametrize("form", ["torch", "nested", "json", "python"])
def test_settings_beside_statistics_that_are_not_understood_are_refused(
    form: str, name: str, tmp_path: Path
) -> None:
    """A setting that may change the numbers is not passed over; the hint's file is accepted."""
    plain: dict[str, Any] = {"mean": [0.0, 1.0], "var": [1.0, 4.0], "count": 9.0}
    stored = {**plain, name: 2.0}
    file = tmp_path / "norm.json"
    if form == "json":
        file.write_text(json.dumps(stored))
    elif form != "python":
        file = tmp_path / "norm.pt"
        tensors = {what: torch.tensor(value) for what, value in stored.items()}
        torch.save({"obs_rms": tensors} if form == "nested" else tensors, file)
    with pytest.raises(UsageError) as refused:
        AgentFacts(obs_norm=stored if form == "python" else str(file))
    assert str(refused.value.path).rpartition("/")[2] == name
    assert refused.value.hint is not None
    option, written = refused.value.hint.split()[-2:]
    assert option == "--obs-norm"
    (tmp_path / written).write_text(json.dumps({**plain, "epsilon": 1e-8, "clip": None}))
    assert AgentFacts(obs_norm=str(tmp_path / written)).known["obs_norm"]["mean"] == [0.0, 1.0]


@pytest.mark.parametrize("stored", [False, 0], ids=repr)
@pytest.mark.parametrize("form", ["json", "torch", "python"])
def test_statistics_that_training_did_not_apply_are_refused(
    form: str, stored: object, tmp_path: Path
) -> None:
    plain = {"mean": [0.0, 1.0], "var": [1.0, 4.0], "norm_obs": stored}
    file = tmp_path / f"norm.{form}"
    if form == "json":
        file.write_text(json.dumps(plain))
    elif form == "torch":
        torch.save({name: torch.tensor(value) for name, value in plain.items()}, file)
    with pytest.raises(UsageError) as refused:
        AgentFacts(obs_norm=plain if form == "python" else str(file))
    assert refused.value.path == "norm_obs"
