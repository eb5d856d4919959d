"""PPO, A2C, DQN, QR-DQN and C51 moved between RL libraries: what each library loads, and the way back."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.commands.evidence import AgentFacts
from ckpttool.commands.load_agent import load_agent
from ckpttool.core import UnsupportedError, UsageError
from ckpttool.core.errors import EnvironmentMismatchError
from ckpttool.formats import sb3 as sb3_format
from ckpttool.libraries import schema
from tests import sb3_files, warm_sb3
from tests.pickles import instance
from tests.restored import recognised

torch = pytest.importorskip("torch")

OBS, ACTIONS, HIDDEN, ATOMS, QUANTILES = 4, 2, (7, 5), 11, 9
PPO, CONTINUOUS, DQN, C51, QRDQN = "ppo", "continuous ppo", "dqn", "c51", "qrdqn"
SUFFIX = {"sb3": ".zip", "cleanrl": ".cleanrl_model"}
TAU = (torch.linspace(0, 1, QUANTILES + 1)[:-1] + torch.linspace(0, 1, QUANTILES + 1)[1:]) / 2

Layers = tuple[str, ...]


def sequential(name: str, last: str | None = None) -> Layers:
    return (f"{name}.0", f"{name}.2", f"{name}.4" if last is None else last)


# The names of the dense layers of policy (or Q-network) and value (or target), as each library has them.
_TIANSHOU_VALUE = sequential("critic.preprocess.model.model", "critic.last.model.0")
_RL_GAMES_VALUE = sequential("a2c_network.critic_mlp", "a2c_network.value")
_SB3_VALUE = sequential("mlp_extractor.value_net", "value_net")
_SKRL = (sequential("policy.net_container"), sequential("value.net_container"))
_NET = "policy.model.model.model", "model_old.module.model.model"
LAYERS: Mapping[str, Mapping[str, tuple[Layers, Layers]]] = {
    PPO: {
        "sb3": (sequential("mlp_extractor.policy_net", "action_net"), _SB3_VALUE),
        "cleanrl": (sequential("actor"), sequential("critic")),
        "tianshou": (
            sequential("policy.actor.preprocess.model.model", "policy.actor.last.model.0"),
            _TIANSHOU_VALUE,
        ),
        "skrl": _SKRL,
        "rl_games": (sequential("a2c_network.actor_mlp", "a2c_network.logits"), _RL_GAMES_VALUE),
    },
    CONTINUOUS: {
        "sb3": (sequential("mlp_extractor.policy_net", "action_net"), _SB3_VALUE),
        "cleanrl": (sequential("actor_mean"), sequential("critic")),
        "tianshou": (
            sequential("policy.actor.preprocess.model.model", "policy.actor.mu.model.0"),
            _TIANSHOU_VALUE,
        ),
        "skrl": _SKRL,
        "rl_games": (sequential("a2c_network.actor_mlp", "a2c_network.mu"), _RL_GAMES_VALUE),
    },
    DQN: {
        "sb3": (sequential("q_net.q_net"), sequential("q_net_target.q_net")),
        "cleanrl": (sequential("network"), ()),
        "tianshou": (sequential(_NET[0]), sequential(_NET[1])),
        "skrl": (sequential("q_network.net_container"), sequential("target_q_network.net_container")),
    },
    C51: {
        "cleanrl": (sequential("network"), ()),
        "tianshou": (sequential(_NET[0]), sequential(_NET[1])),
    },
    QRDQN: {
        "sb3": (
            sequential("quantile_net.quantile_net"),
            sequential("quantile_net_target.quantile_net"),
        ),
        "tianshou": (sequential(_NET[0]), sequential(_NET[1])),
    },
}
# Parameters that are not in layers, and constants, by name and shape.
SPREAD = {
    "sb3": ("log_std", (ACTIONS,)),
    "cleanrl": ("actor_logstd", (1, ACTIONS)),
    "tianshou": ("policy.actor.sigma_param", (ACTIONS, 1)),
    "skrl": ("policy.log_std_parameter", (ACTIONS,)),
    "rl_games": ("a2c_network.sigma", (ACTIONS,)),
}
WIDTH = {C51: ACTIONS * ATOMS, QRDQN: ACTIONS * QUANTILES}
PAIRS = [(kind, *pair) for kind, libraries in LAYERS.items() for pair in permutations(libraries, 2)]
CHEAP = {
    (PPO, "sb3", "rl_games"),
    (PPO, "rl_games", "tianshou"),
    (PPO, "skrl", "cleanrl"),
    (CONTINUOUS, "sb3", "cleanrl"),
    (CONTINUOUS, "tianshou", "rl_games"),
    (DQN, "sb3", "skrl"),
    (C51, "cleanrl", "tianshou"),
    (QRDQN, "sb3", "tianshou"),
}


def parameter_order(kind: str, library: str) -> list[str]:
    """Return the names of the parameters in the order of the library's optimizer."""
    first, second = LAYERS[kind][library]
    layers = list(first if kind in (DQN, C51, QRDQN) else (*first, *second))
    if library == "sb3" and kind in (PPO, CONTINUOUS):
        layers = [*first[:2], *second[:2], first[2], second[2]]
    if library == "rl_games":
        layers = [*first[:2], *second, first[2]]
    names = [f"{layer}.{weight}" for layer in layers for weight in ("weight", "bias")]
    if kind == CONTINUOUS:
        names.insert(0, SPREAD[library][0])
    return ["policy.support", *names] if (kind, library) == (C51, "tianshou") else names


def make_tensors(kind: str, library: str) -> dict[str, Any]:
    """Return the state of both networks with the library's names."""
    torch.manual_seed(5)
    first, second = LAYERS[kind][library]
    outputs = WIDTH.get(kind, ACTIONS)
    last = 1 if kind in (PPO, CONTINUOUS) else outputs
    found: dict[str, Any] = {}
    for layers, width in ((first, outputs), (second, last)):
        sizes = (OBS, *HIDDEN, width)
        for layer, n_in, n_out in zip(layers, sizes, sizes[1:], strict=False):
            found[f"{layer}.weight"] = torch.randn(n_out, n_in)
            found[f"{layer}.bias"] = torch.randn(n_out)
    if kind == CONTINUOUS:
        name, shape = SPREAD[library]
        found[name] = torch.linspace(-1, 0, ACTIONS).view(shape)
    # A state_dict has the order of the modules, as the optimizer does.
    order = [name for name in parameter_order(kind, library) if name in found]
    return {name: found[name] for name in dict.fromkeys((*order, *found))}


def make_adam(kind: str, library: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return Adam's state, whose moments are functions of the weights: none depends on the order."""
    names, state = parameter_order(kind, library), {}
    for number, name in enumerate(names):
        if name in tensors:  # the support of C51 has no gradient
            moments = {"exp_avg": tensors[name] * 0.5, "exp_avg_sq": tensors[name] ** 2}
            state[number] = {"step": torch.tensor(7.0), **moments}
    group = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-5, "weight_decay": 0, "amsgrad": False}
    return {"state": state, "param_groups": [{**group, "params": list(range(len(names)))}]}


def nest(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return one state_dict for each of skrl's models."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        model, _, rest = name.partition(".")
        found.setdefault(model, {})[rest] = tensor
    return found


def save(folder: Path, kind: str, library: str, scaler: Mapping[str, Any] | None = None) -> str:
    """Write what the library saves, with Adam's state where it has one; return the path."""
    tensors = make_tensors(kind, library)
    optimizer = make_adam(kind, library, tensors)
    path = folder / f"source{SUFFIX.get(library, '.pt')}"
    atoms = torch.linspace(-3, 7, ATOMS)
    if library == "sb3":
        return save_sb3(path, kind, tensors, optimizer)
    if library == "cleanrl":
        saved = {"model_weights": {**tensors, "atoms": atoms}, "args": {"n_atoms": ATOMS}}
        torch.save(saved if kind == C51 else tensors, path)
    if library == "tianshou":
        more = {C51: {"policy.support": atoms}, QRDQN: {"tau_hat": TAU.view(1, -1, 1)}}.get(kind, {})
        torch.save({**more, **tensors, "_optimizers": [optimizer]}, path)
    if library == "skrl":
        statistics = {} if scaler is None else {"observation_preprocessor": dict(scaler)}
        torch.save({**nest(tensors), "optimizer": optimizer, **statistics}, path)
    if library == "rl_games":
        torch.save({"model": tensors, "epoch": 3, "frame": 1_000, "optimizer": optimizer}, path)
    return str(path)


def save_sb3(path: Path, kind: str, tensors: Mapping[str, Any], optimizer: Mapping[str, Any]) -> str:
    data = sb3_files.settings(
        sb3_files.ON_POLICY,
        policy_kwargs={"net_arch": list(HIDDEN)},
        observation_space=sb3_files.box((-1.0,) * OBS, (1.0,) * OBS),
        action_space=discrete(ACTIONS) if kind != CONTINUOUS else sb3_files.box((-1, -1), (1, 1)),
    )
    return sb3_files.put(path, sb3_files.members({"policy": tensors, "policy.optimizer": optimizer}, data))


def discrete(number: int, start: int = 0) -> Any:
    return instance(sb3_files.DISCRETE, n=np.int64(number), start=np.int64(start), _shape=())


def load(path: str, library: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the tensors of a file by the library's names, and its optimizer's state."""
    if library == "sb3":
        import zipfile

        with zipfile.ZipFile(path) as archive:
            members = {
                name: torch.load(archive.open(name), weights_only=True)
                for name in ("policy.pth", "policy.optimizer.pth")
            }
        return members["policy.pth"], members["policy.optimizer.pth"]
    found = torch.load(path, weights_only=True)
    if library == "cleanrl":
        return dict(found.get("model_weights", found)), None
    if library == "tianshou":
        (optimizer,) = found.pop("_optimizers")
        return dict(found), optimizer
    optimizer = found.pop("optimizer")
    if library == "skrl":
        models = {model: state for model, state in found.items() if "preprocessor" not in model}
        return {f"{model}.{n}": t for model, state in models.items() for n, t in state.items()}, optimizer
    return dict(found["model"]), optimizer


# Facts that a file of the library does not record.
def facts_of(kind: str, library: str) -> AgentFacts:
    bounds = {"action_low": -1.0, "action_high": 1.0} if kind == CONTINUOUS and library != "sb3" else {}
    if kind == CONTINUOUS:
        # Clipped to [-1, 1]: equal maps of all libraries but skrl, whose program clips.
        return AgentFacts(activations="tanh", head="clip", **bounds)
    return AgentFacts(activations="tanh")


def move(source: str, target: str, library: str, facts: AgentFacts, env: str | None = None) -> ConversionResult:
    done = convert(source, target, to=library, facts=facts, env=env, allow_missing=True, sync=False, force=True)
    assert done.written
    assert done.within
    assert done.parity
    return done


def assert_moments(kind: str, library: str, tensors: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
    """Assert that every moment is that of its weight, whatever the order of the parameters."""
    names = parameter_order(kind, library)
    (group,) = optimizer["param_groups"]
    assert group["params"] == list(range(len(names)))
    assert (group["lr"], group["eps"]) == (3e-4, 1e-5)
    for number, name in enumerate(names):
        if name != "policy.support":
            assert torch.equal(optimizer["state"][number]["exp_avg"], tensors[name] * 0.5), name
            assert optimizer["state"][number]["step"] == 7


def scores(kind: str, library: str, tensors: Mapping[str, Any], obs: np.ndarray, activation: str = "tanh") -> Any:
    """Return the outputs of the first network, in float64."""
    *hidden, last = LAYERS[kind][library][0]
    x = torch.from_numpy(obs).double()
    for layer in hidden:
        x = getattr(torch, activation)(x @ tensors[f"{layer}.weight"].double().T + tensors[f"{layer}.bias"].double())
    return x @ tensors[f"{last}.weight"].double().T + tensors[f"{last}.bias"].double()


def rows() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, size=(200, OBS)).astype(np.float32)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sb3_format, "subprocess", warm_sb3.FORKING)


def needs(kind: str, *libraries: str) -> None:
    if "sb3" in libraries:
        pytest.importorskip("stable_baselines3")
    if "sb3" in libraries and kind == QRDQN:
        pytest.importorskip("sb3_contrib")


@pytest.mark.parametrize(
    ("kind", "source", "target"),
    [pytest.param(*pair, marks=[] if pair in CHEAP else pytest.mark.slow, id=" ".join(pair)) for pair in PAIRS],
)
def test_a_moved_agent_has_the_names_and_shapes_of_its_library(
    kind: str, source: str, target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The names, the tensors, the moments, the outputs; and the way back gives equal tensors."""
    if target == "sb3":
        needs(kind, target)
        request.getfixturevalue("forked")
    path, there = save(tmp_path, kind, source), str(tmp_path / f"there{SUFFIX.get(target, '.pt')}")
    env = "CartPole-v1" if target == "sb3" and kind == PPO else None
    move(path, there, target, facts_of(kind, source), env)
    tensors, optimizer = load(there, target)
    expected = make_tensors(kind, target)
    assert {*expected} <= {*tensors}
    assert {*tensors} - {*expected} <= {"atoms", "policy.support", "tau_hat"}
    original, _ = load(path, source)
    wanted = scores(kind, source, original, rows())
    found = scores(kind, target, tensors, rows())
    if kind == QRDQN:  # quantiles and actions are in the other order
        shapes = {"sb3": (200, QUANTILES, ACTIONS), "tianshou": (200, ACTIONS, QUANTILES)}
        wanted, found = wanted.view(shapes[source]), found.view(shapes[target]).transpose(1, 2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    if source != "cleanrl" and optimizer is not None:
        assert_moments(kind, target, tensors, optimizer)
    Path(f"{there}.ckpttool.json").unlink()
    with contextlib.suppress(FileNotFoundError):
        Path(f"{there}.ckpttool.safetensors").unlink()
    if source == "sb3":
        needs(kind, source)
        request.getfixturevalue("forked")
    back = str(tmp_path / f"back{SUFFIX.get(source, '.pt')}")
    move(there, back, source, facts_of(kind, target), "CartPole-v1" if source == "sb3" and kind == PPO else None)
    returned, _ = load(back, source)
    for name, tensor in original.items():
        # CleanRL saves no target: the way back starts with a copy of the network.
        if "target" not in name and "model_old" not in name:
            assert torch.equal(returned[name].reshape(tensor.shape), tensor), name
