"""PPO, A2C, DQN, QR-DQN and C51 moved between RL libraries: what each library loads, and the way back."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.conversion.parts import without_optimizers
from ckpttool.conversion.plan import recognize_source_agent
from ckpttool.conversion.targets import TARGETS
from ckpttool.core import CkpttoolError, EnvironmentMismatchError, UnsupportedError, UsageError, plugins
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.formats import open_checkpoint
from ckpttool.formats import sb3 as sb3_format
from ckpttool.libraries import schema, tianshou
from ckpttool.libraries.recognize import recognize_checkpoint
from tests import sb3_files, warm_sb3
from tests.pickles import instance

torch = pytest.importorskip("torch")

SAMPLE = Path(__file__).parent.parent / "sample_ckpts" / "td3_pendulum_torch" / "ckpt-15000.pt"
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
    (PPO, "rl_games", "tianshou"),
    (PPO, "skrl", "cleanrl"),
    (CONTINUOUS, "cleanrl", "tianshou"),
    (CONTINUOUS, "tianshou", "rl_games"),
    (DQN, "tianshou", "skrl"),
    (C51, "cleanrl", "tianshou"),
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
    tensors: dict[str, Any] = {}
    for layers, width in ((first, outputs), (second, last)):
        sizes = (OBS, *HIDDEN, width)
        for layer, n_in, n_out in zip(layers, sizes, sizes[1:], strict=False):
            tensors[f"{layer}.weight"] = torch.randn(n_out, n_in)
            tensors[f"{layer}.bias"] = torch.randn(n_out)
    if kind == CONTINUOUS:
        name, shape = SPREAD[library]
        tensors[name] = torch.linspace(-1, 0, ACTIONS).view(shape)
    # A state_dict has the order of the modules, as the optimizer does.
    order = [name for name in parameter_order(kind, library) if name in tensors]
    return {name: tensors[name] for name in dict.fromkeys((*order, *tensors))}


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
    nested: dict[str, Any] = {}
    for name, tensor in tensors.items():
        model, _, rest = name.partition(".")
        nested.setdefault(model, {})[rest] = tensor
    return nested


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
    contents = torch.load(path, weights_only=True)
    if library == "cleanrl":
        return dict(contents.get("model_weights", contents)), None
    if library == "tianshou":
        (optimizer,) = contents.pop("_optimizers")
        return dict(contents), optimizer
    optimizer = contents.pop("optimizer", None)
    if library == "skrl":
        models = {model: state for model, state in contents.items() if "preprocessor" not in model}
        return {f"{model}.{n}": t for model, state in models.items() for n, t in state.items()}, optimizer
    return dict(contents["model"]), optimizer


# Facts that a file of the library does not record.
def facts_of(kind: str, target: str) -> AgentFacts:
    if kind != CONTINUOUS:
        return AgentFacts(activations="tanh")
    # Clipped to [-1, 1]: equal maps of all libraries but skrl, whose program clips.
    head = "identity" if target == "skrl" else "clip"
    return AgentFacts(activations="tanh", head=head, action_low=-1.0, action_high=1.0)


def move(
    source: str, target: str, library: str, facts: AgentFacts, env: str | None = None
) -> ConversionResult:
    done = convert(
        source, target, to=library, facts=facts, env=env, allow_missing=True, sync=False, force=True
    )
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


def scores(
    kind: str, library: str, tensors: Mapping[str, Any], obs: np.ndarray, activation: str = "tanh"
) -> Any:
    """Return the outputs of the first network, in float64."""
    *hidden, last = LAYERS[kind][library][0]
    x = torch.from_numpy(obs).double()
    for layer in hidden:
        x = getattr(torch, activation)(
            x @ tensors[f"{layer}.weight"].double().T + tensors[f"{layer}.bias"].double()
        )
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
    [
        pytest.param(*pair, marks=[] if pair in CHEAP else pytest.mark.slow, id=" ".join(pair))
        for pair in PAIRS
    ],
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
    move(path, there, target, facts_of(kind, target), env)
    tensors, optimizer = load(there, target)
    expected = make_tensors(kind, target)
    assert {*expected} <= {*tensors}
    assert {*tensors} - {*expected} <= {"atoms", "policy.support", "tau_hat"}
    original, _ = load(path, source)
    requested = scores(kind, source, original, rows())
    actual = scores(kind, target, tensors, rows())
    if kind == QRDQN:  # quantiles and actions are in the other order
        shapes = {"sb3": (200, QUANTILES, ACTIONS), "tianshou": (200, ACTIONS, QUANTILES)}
        requested, actual = requested.view(shapes[source]), actual.view(shapes[target]).transpose(1, 2)
    torch.testing.assert_close(actual, requested, rtol=0, atol=1e-9)
    if source != "cleanrl" and optimizer is not None:
        assert_moments(kind, target, tensors, optimizer)
    Path(f"{there}.ckpttool.json").unlink()
    with contextlib.suppress(FileNotFoundError):
        Path(f"{there}.ckpttool.safetensors").unlink()
    if source == "sb3":
        needs(kind, source)
        request.getfixturevalue("forked")
    back = str(tmp_path / f"back{SUFFIX.get(source, '.pt')}")
    move(
        there,
        back,
        source,
        facts_of(kind, source),
        "CartPole-v1" if source == "sb3" and kind == PPO else None,
    )
    returned, _ = load(back, source)
    for name, tensor in original.items():
        # CleanRL saves no target: the way back starts with a copy of the network.
        if "target" not in name and "model_old" not in name:
            assert torch.equal(returned[name].reshape(tensor.shape), tensor), name


# --- The libraries themselves load what is written, and choose the same actions ---------------------------


def load_with_tianshou(kind: str, path: str) -> Callable[[np.ndarray], Any]:
    """Build the algorithm with the library's classes; return the function of its outputs."""
    pytest.importorskip("tianshou")
    algorithm, common, discrete = (
        importlib.import_module(f"tianshou.{name}")
        for name in ("algorithm", "utils.net.common", "utils.net.discrete")
    )
    optim = importlib.import_module("tianshou.algorithm.optim").AdamOptimizerFactory(lr=1e-3)
    env = importlib.import_module("gymnasium").make("CartPole-v1")
    spaces = {"action_space": env.action_space, "observation_space": env.observation_space}
    sizes = {"state_shape": (OBS,), "hidden_sizes": HIDDEN, "activation": torch.nn.Tanh}
    if kind == PPO:
        actor = discrete.DiscreteActor(
            preprocess_net=common.Net(**sizes), action_shape=ACTIONS, softmax_output=False
        )
        critic = discrete.DiscreteCritic(preprocess_net=common.Net(**sizes))
        reinforce = importlib.import_module("tianshou.algorithm.modelfree.reinforce")
        policy = reinforce.DiscreteActorPolicy(
            actor=actor, dist_fn=lambda x: torch.distributions.Categorical(logits=x), **spaces
        )
        ppo = algorithm.PPO(policy=policy, critic=critic, optim=optim)
    else:
        more: dict[str, Any] = {
            DQN: {},
            C51: {"num_atoms": ATOMS, "softmax": True},
            QRDQN: {"num_atoms": QUANTILES},
        }[kind]
        net = common.Net(action_shape=ACTIONS, **more, **sizes)
        module, name = {
            DQN: ("dqn", "DiscreteQLearningPolicy"),
            C51: ("c51", "C51Policy"),
            QRDQN: ("qrdqn", "QRDQNPolicy"),
        }[kind]
        own = {"num_atoms": ATOMS, "v_min": -3, "v_max": 7} if kind == C51 else {}
        modelfree = importlib.import_module(f"tianshou.algorithm.modelfree.{module}")
        policy = getattr(modelfree, name)(model=net, **own, **spaces)
        quantiles = {"num_quantiles": QUANTILES} if kind == QRDQN else {}
        factory = {DQN: algorithm.DQN, C51: algorithm.C51, QRDQN: algorithm.QRDQN}[kind]
        ppo = factory(policy=policy, optim=optim, target_update_freq=10, **quantiles)
    ppo.load_state_dict(torch.load(path, weights_only=True), strict=True)
    batch = importlib.import_module("tianshou.data").Batch

    def outputs(obs: np.ndarray) -> Any:
        output = ppo.policy.eval()(batch(obs=obs, info={}))
        return output.logits if kind == PPO else ppo.policy.compute_q_value(output.logits, None)

    return outputs


def load_with_skrl(kind: str, path: str) -> Callable[[np.ndarray], Any]:
    """Build the models with the library's instantiators; return the function of the policy's outputs."""
    instantiators = pytest.importorskip("skrl.utils.model_instantiators.torch")
    env = importlib.import_module("gymnasium").make("CartPole-v1")
    layers = [{"name": "net", "input": "OBSERVATIONS", "layers": list(HIDDEN), "activations": "tanh"}]
    roles = {
        PPO: (("policy", "categorical_model", "ACTIONS"), ("value", "deterministic_model", "ONE")),
        DQN: tuple((n, "deterministic_model", "ACTIONS") for n in ("q_network", "target_q_network")),
    }[kind]
    saved = torch.load(path, weights_only=True)
    models = {}
    for role, name, output in roles:
        model = getattr(instantiators, name)(
            observation_space=env.observation_space,
            action_space=env.action_space,
            device="cpu",
            network=layers,
            output=output,
        )
        model.init_state_dict(role=role)
        model.load_state_dict(saved[role], strict=True)
        models[role] = model
    trained = [p for role, model in models.items() if "target" not in role for p in model.parameters()]
    torch.optim.Adam(trained).load_state_dict(saved["optimizer"])
    acting = models[roles[0][0]]
    return lambda obs: acting.compute({"observations": torch.from_numpy(obs)}, "")[0]


def load_with_rl_games(kind: str, path: str) -> Callable[[np.ndarray], Any]:
    """Build the model with the library's classes; return the function of its logits or means."""
    builder = pytest.importorskip("rl_games.algos_torch.network_builder").A2CBuilder()
    models = importlib.import_module("rl_games.algos_torch.models")
    nothing = {"name": "default"}
    space: dict[str, Any] = {"discrete": {}}
    if kind == CONTINUOUS:
        sigma = {"sigma_activation": "None", "sigma_init": {"name": "const_initializer", "val": 0}}
        space = {"continuous": {"mu_activation": "None", "mu_init": nothing, **sigma, "fixed_sigma": True}}
    mlp = {"units": list(HIDDEN), "activation": "tanh", "initializer": nothing, "d2rl": False}
    builder.load({"separate": True, "space": space, "mlp": mlp})
    saved = torch.load(path, weights_only=True)
    normed = any("running_mean_std" in name for name in saved["model"])
    model = (models.ModelA2C if kind == PPO else models.ModelA2CContinuousLogStd)(builder).build(
        {
            "actions_num": ACTIONS,
            "input_shape": (OBS,),
            "num_seqs": 1,
            "value_size": 1,
            "normalize_value": False,
            "normalize_input": normed,
        }
    )
    model.load_state_dict(saved["model"], strict=True)
    torch.optim.Adam(model.parameters()).load_state_dict(saved["optimizer"])
    assert {"epoch", "frame"} <= {*saved}

    def outputs(obs: np.ndarray) -> Any:
        # A scripted RunningMeanStd updates itself in training mode.
        normalized = model.eval().norm_obs(torch.from_numpy(obs))
        return model.a2c_network({"obs": normalized, "is_train": False})[0]

    return outputs


LOADERS = {"tianshou": load_with_tianshou, "skrl": load_with_skrl, "rl_games": load_with_rl_games}
OWN = [
    (kind, library)
    for library, loader in LOADERS.items()
    for kind in LAYERS
    if library in LAYERS[kind] and (kind != CONTINUOUS or library == "rl_games")
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "library"), OWN)
def test_the_library_loads_a_moved_agent_and_acts_alike(kind: str, library: str, tmp_path: Path) -> None:
    other = next(layer for layer in LAYERS[kind] if layer != library)
    path, there = save(tmp_path, kind, other), str(tmp_path / "there.pt")
    move(path, there, library, facts_of(kind, library))
    with torch.no_grad():
        outputs = LOADERS[library](kind, there)(rows()).double()
    tensors, _ = load(path, other)
    expected = scores(kind, other, tensors, rows())
    if kind == C51:
        expected = (expected.view(200, ACTIONS, ATOMS).softmax(2) * torch.linspace(-3, 7, ATOMS)).sum(2)
    if kind == QRDQN:
        expected = expected.view(200, QUANTILES, ACTIONS).mean(1)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(outputs.argmax(1), expected.argmax(1))


_PREDICT = """
import importlib, json, sys
import numpy as np
package, name, path, obs, wanted = sys.argv[1:6]
model = getattr(importlib.import_module(package), name).load(path)
action, _ = model.predict(np.load(obs), deterministic=True)
same = np.array_equal(action, np.load(wanted))
print(json.dumps([same, str(model.action_space), model.learning_rate]))
"""


@pytest.mark.parametrize(
    ("kind", "source", "algorithm"),
    [
        (PPO, "skrl", "PPO"),
        pytest.param(PPO, "skrl", "A2C", marks=pytest.mark.slow),
        pytest.param(DQN, "cleanrl", "DQN", marks=pytest.mark.slow),
        pytest.param(QRDQN, "tianshou", "QRDQN", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("forked")
def test_stable_baselines3_predicts_the_same_actions(
    kind: str, source: str, algorithm: str, tmp_path: Path
) -> None:
    needs(kind, "sb3")
    path, there = save(tmp_path, kind, source), str(tmp_path / "there.zip")
    done = move(path, there, "sb3", facts_of(kind, "sb3"), "CartPole-v1")
    assert done.report.complete or source == "cleanrl"
    tensors, _ = load(path, source)
    outputs = scores(kind, source, tensors, rows())
    if kind == QRDQN:
        outputs = outputs.view(200, ACTIONS, QUANTILES).mean(2)
    np.save(tmp_path / "obs.npy", rows())
    np.save(tmp_path / "wanted.npy", outputs.argmax(1).numpy())
    package = "sb3_contrib" if kind == QRDQN else "stable_baselines3"
    files = (str(tmp_path / "obs.npy"), str(tmp_path / "wanted.npy"))
    same, space, rate = warm_sb3.run_program(_PREDICT, package, algorithm, there, *files)
    assert same
    assert space == "Discrete(2)"
    assert rate == 3e-4 or source == "cleanrl"  # which saves no optimizer


# --- What a target cannot represent, and what it must be told ---------------------------------------------


def save_choices(path: Path, space: Any, outputs: int, value: Sequence[int] = HIDDEN) -> str:
    """Write a PPO agent of Stable-Baselines3 with this action space, and these hidden sizes of the value."""
    torch.manual_seed(2)
    nets = {"policy_net": (HIDDEN, "action_net", outputs), "value_net": (value, "value_net", 1)}
    tensors = {}
    for name, (hidden, last, width) in nets.items():
        sizes = (OBS, *hidden, width)
        layers = (*(f"mlp_extractor.{name}.{2 * n}" for n in range(len(hidden))), last)
        for layer, n_in, n_out in zip(layers, sizes, sizes[1:], strict=False):
            tensors |= {f"{layer}.weight": torch.randn(n_out, n_in), f"{layer}.bias": torch.zeros(n_out)}
    observed = sb3_files.box((-1.0,) * OBS, (1.0,) * OBS)
    data = sb3_files.settings(
        sb3_files.ON_POLICY,
        policy_kwargs={"net_arch": list(HIDDEN)},
        observation_space=observed,
        action_space=space,
    )
    return sb3_files.put(path, sb3_files.members({"policy": tensors}, data))


def test_agents_of_stable_baselines3_are_moved(tmp_path: Path) -> None:
    for kind, library in ((PPO, "rl_games"), (DQN, "tianshou"), (QRDQN, "tianshou")):
        folder = tmp_path / f"{kind}"
        folder.mkdir()
        path, there = save(folder, kind, "sb3"), str(folder / "there.pt")
        move(path, there, library, facts_of(kind, library))
        tensors, optimizer = load(there, library)
        assert optimizer is not None
        assert_moments(kind, library, tensors, optimizer)
        if kind == QRDQN:
            assert torch.equal(tensors["tau_hat"].reshape(-1), TAU)


@pytest.mark.parametrize("number", [1, 2, 9, 20, 51, 200])
def test_the_quantiles_of_tianshou_are_those_that_torch_computes(number: int) -> None:
    ends = torch.linspace(0, 1, number + 1)
    middles = tianshou._make_midpoints(number).array()
    np.testing.assert_array_equal(middles.reshape(-1), (ends[:-1] + ends[1:]) / 2)


@pytest.mark.parametrize("target", ["cleanrl", "tianshou", "skrl", "rl_games"])
def test_actions_that_do_not_start_at_0_are_refused(target: str, tmp_path: Path) -> None:
    # Stable-Baselines3 gives numbers from 0 whatever its space says; a sidecar may state others.
    source = str(tmp_path / "a.pt")
    convert(save_choices(tmp_path / "a.zip", discrete(3, start=1), 3), source, to="torch")
    sidecar = Path(f"{source}.ckpttool.json")
    document = json.loads(sidecar.read_text())
    assert document["choices"]["starts"] == [0]
    document["choices"]["starts"] = [1]
    sidecar.write_text(json.dumps(document))
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "b.pt"), to=target)
    assert caught.value.found == "Discrete(3, start=1)"
    assert not (tmp_path / "b.pt").exists()


def test_networks_of_unequal_sizes_are_refused_by_rl_games_only(tmp_path: Path) -> None:
    source = save_choices(tmp_path / "a.zip", discrete(3), 3, value=(6,))
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "b.pt"), to="rl_games")
    assert (caught.value.expected, caught.value.found) == ("[7, 5]", "[6]")
    assert convert(source, str(tmp_path / "c.pt"), to="skrl").written


def test_a_q_network_is_not_written_for_a_library_without_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError):
        convert(save(tmp_path, DQN, "skrl"), str(tmp_path / "b.pt"), to="rl_games")


@pytest.mark.parametrize(
    ("kind", "target"), [(QRDQN, "skrl"), (QRDQN, "cleanrl"), (C51, "skrl"), (C51, "sb3")]
)
def test_distributions_are_refused_where_a_library_has_values(kind: str, target: str, tmp_path: Path) -> None:
    path = str(tmp_path / ("b.zip" if target == "sb3" else "b.pt"))
    with pytest.raises(UnsupportedError) as caught:
        convert(save(tmp_path, kind, "tianshou"), path, to=target)
    assert caught.value.found == {QRDQN: "quantiles_last", C51: "atoms"}[kind]


def test_only_an_optimizer_without_a_place_has_its_own_option(tmp_path: Path) -> None:
    target, facts = str(tmp_path / "b.cleanrl_model"), facts_of(PPO, "cleanrl")
    source = save(tmp_path, PPO, "skrl")
    refused = convert(source, target, facts=facts)
    assert (refused.written, refused.report.remedy) == (False, "--optimizer none")
    assert convert(source, target, facts=facts, optimizer=("none",)).written
    # A target network has no place either.
    q_network = save(tmp_path, DQN, "skrl")
    assert convert(q_network, target, facts=facts, force=True).report.remedy == "--allow-missing"


@pytest.mark.parametrize(
    ("kind", "library"),
    [(kind, library) for kind in LAYERS for library in LAYERS[kind] if library != "cleanrl"],
)
def test_an_agent_is_one_without_its_optimizer(kind: str, library: str, tmp_path: Path) -> None:
    """The state of an optimizer may be all that shows the layout."""
    path = save(tmp_path, kind, library)
    checkpoint = open_checkpoint(path)
    whole = recognize_checkpoint(checkpoint)
    reduced, _ = without_optimizers(checkpoint.tree)
    binding, _ = recognize_source_agent(checkpoint, reduced, None, None)
    assert whole is not None
    assert binding is not None
    assert (binding.layout, binding.parts) == (whole.layout, whole.parts)
    assert all(move.source in reduced for move in binding.moves.moves)


def test_unknown_discrete_actions_are_asked_for(tmp_path: Path) -> None:
    """The hint is followed by the test of Stable-Baselines3's predictions."""
    source = save(tmp_path, PPO, "skrl")
    with pytest.raises(UsageError) as caught:
        convert(source, str(tmp_path / "b.zip"), to="sb3")
    assert "--env" in str(caught.value.hint)
    pytest.importorskip("gymnasium")
    for env in ("Acrobot-v1", "Pendulum-v1"):
        with pytest.raises(EnvironmentMismatchError):
            convert(source, str(tmp_path / "b.zip"), to="sb3", env=env)
    assert not (tmp_path / "b.zip").exists()


def test_the_hint_of_a_clipped_policy_is_a_command_that_works(tmp_path: Path) -> None:
    source = save(tmp_path, CONTINUOUS, "sb3")
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "b.pt"), to="skrl")
    assert "--head identity" in str(caught.value.hint)
    assert convert(source, str(tmp_path / "b.pt"), to="skrl", facts=AgentFacts(head="identity")).written
    with pytest.raises(UnsupportedError) as caught:
        convert(save(tmp_path, CONTINUOUS, "skrl"), str(tmp_path / "c.pt"), to="cleanrl")
    assert "--head clip" in str(caught.value.hint)


def test_several_choices_are_written_as_each_library_has_them(tmp_path: Path) -> None:
    space = instance(sb3_files.MULTI_DISCRETE, nvec=np.array([2, 3]), start=np.array([0, 0]), _shape=(2,))
    source = save_choices(tmp_path / "a.zip", space, 5)
    assert convert(source, str(tmp_path / "b.pt"), to="skrl").written
    assert convert(source, str(tmp_path / "d.pt"), to="rl_games", allow_missing=True).written
    rl_games = torch.load(tmp_path / "d.pt", weights_only=True)["model"]
    assert [len(rl_games[f"a2c_network.logits.{number}.bias"]) for number in range(2)] == [2, 3]
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "c.pt"), to="tianshou")
    assert caught.value.found == "MultiDiscrete([2, 3])"


def test_the_state_of_another_optimizer_is_refused_and_left_out_by_the_hint(tmp_path: Path) -> None:
    """Stable-Baselines3's A2C trains with RMSprop."""
    tensors = make_tensors(PPO, "sb3")
    names = parameter_order(PPO, "sb3")
    group = {"lr": 7e-4, "momentum": 0, "alpha": 0.99, "eps": 1e-5, "centered": False, "weight_decay": 0}
    state = {n: {"step": 7, "square_avg": tensors[name] ** 2} for n, name in enumerate(names)}
    optimizer = {"state": state, "param_groups": [{**group, "params": list(range(len(names)))}]}
    source = save_sb3(tmp_path / "a2c.zip", PPO, tensors, optimizer)
    done = convert(source, str(tmp_path / "a.pt"), to="skrl")
    assert not done.written
    assert any("--optimizer none" in note for note in done.report.notes)
    assert convert(source, str(tmp_path / "a.pt"), to="skrl", optimizer=("none",)).report.complete
    _, fresh = load(str(tmp_path / "a.pt"), "skrl")
    assert fresh is not None
    torch.optim.Adam([torch.nn.Parameter(tensors[name]) for name in names]).load_state_dict(fresh)


_NORMALIZED = """
import json, sys
import numpy as np
import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
path, statistics, obs, wanted = sys.argv[1:5]
venv = VecNormalize.load(statistics, DummyVecEnv([lambda: gym.make("CartPole-v1")]))
model = PPO.load(path, env=venv)
action, _ = model.predict(venv.normalize_obs(np.load(obs)), deterministic=True)
print(json.dumps(float(np.mean(action == np.load(wanted)))))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_stable_baselines3_loads_the_statistics_of_discrete_agents(tmp_path: Path) -> None:
    needs(PPO, "sb3")
    path, there = save(tmp_path, PPO, "skrl", scaler()), str(tmp_path / "there.zip")
    move(path, there, "sb3", facts_of(PPO, "sb3"), "CartPole-v1")
    np.save(tmp_path / "obs.npy", 10 * rows())
    np.save(tmp_path / "wanted.npy", expected_scores(path).argmax(1))
    files = ("vecnormalize.pkl", "obs.npy", "wanted.npy")
    assert warm_sb3.run_program(_NORMALIZED, there, *(str(tmp_path / name) for name in files)) == 1


def scaler() -> dict[str, Any]:
    count = torch.tensor(9.0, dtype=torch.float64)
    mean = torch.linspace(-1, 1, OBS, dtype=torch.float64)
    var = torch.full((OBS,), 4.0, dtype=torch.float64)
    return {"running_mean": mean, "running_variance": var, "current_count": count}


def test_statistics_are_computed_for_another_formula_or_missing_by_name(tmp_path: Path) -> None:
    """skrl adds epsilon outside the square root, rl_games inside; both limit to 5, Tianshou has none."""
    path, there = save(tmp_path, PPO, "skrl", scaler()), str(tmp_path / "there.pt")
    facts = facts_of(PPO, "rl_games")
    assert move(path, there, "rl_games", facts).report.complete
    Path(f"{there}.ckpttool.json").unlink()
    for file in (path, there):
        agent = load_agent(file, "CartPole-v1", facts=facts)
        np.testing.assert_allclose(agent.scores(10 * rows()), expected_scores(path), rtol=1e-5, atol=1e-5)
    for target in ("tianshou", "cleanrl"):
        done = convert(path, str(tmp_path / f"x{SUFFIX.get(target, '.pt')}"), to=target, facts=facts)
        assert schema.NORMALIZER in done.report.missing
        assert not done.written


def expected_scores(path: str) -> np.ndarray:
    mean, var = (scaler()[name].numpy() for name in ("running_mean", "running_variance"))
    normalized = ((10 * rows() - mean) / (np.sqrt(var) + 1e-8)).clip(-5, 5)
    tensors, _ = load(path, "skrl")
    return np.asarray(scores(PPO, "skrl", tensors, normalized))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit.script, which rl_games calls
def test_rl_games_normalises_as_skrl_did(tmp_path: Path) -> None:
    path, there = save(tmp_path, PPO, "skrl", scaler()), str(tmp_path / "there.pt")
    move(path, there, "rl_games", facts_of(PPO, "rl_games"))
    with torch.no_grad():
        outputs = load_with_rl_games(PPO, there)(10 * rows())
    np.testing.assert_allclose(outputs, expected_scores(path), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [PPO, pytest.param(CONTINUOUS, marks=pytest.mark.slow)])
def test_a_moved_agent_draws_the_same_actions(kind: str, tmp_path: Path) -> None:
    """Also where the files of the library do not state how it draws them."""
    path, obs = save(tmp_path, kind, "sb3"), np.repeat(rows()[:2], 50, axis=0)
    agent = load_agent(path)
    agent.seed(3)
    expected = agent.act(obs, deterministic=False)
    assert len(np.unique(expected[:50].round(6), axis=0)) > 1
    for library in ("cleanrl", "tianshou", "skrl", "rl_games", "torch"):
        there, facts = str(tmp_path / f"{library}{SUFFIX.get(library, '.pt')}"), facts_of(kind, library)
        convert(path, there, to=library, facts=facts, allow_missing=True, sync=False)
        moved = load_agent(there, facts=facts)
        moved.seed(3)
        drawn = moved.act(obs, deterministic=False)
        # Programs of skrl clip the action.
        np.testing.assert_allclose(drawn if kind == PPO else drawn.clip(-1, 1), expected, atol=1e-6)
        path = there
    if kind == PPO:
        (tmp_path / "tianshou.pt.ckpttool.json").unlink()
        with pytest.raises(UnsupportedError):
            load_agent(str(tmp_path / "tianshou.pt"), facts=facts).act(obs, deterministic=False)


def test_the_hint_counts_actions_not_their_quantiles(tmp_path: Path) -> None:
    from ckpttool.commands.evaluate import evaluate

    with pytest.raises(UsageError) as caught:
        evaluate(save(tmp_path, QRDQN, "sb3"))
    assert str(caught.value.hint).endswith("--env CartPole-v1")


ALGORITHMS = {PPO: "PPO", CONTINUOUS: "continuous PPO", DQN: "DQN", C51: "C51", QRDQN: "QR-DQN", "td3": "TD3"}
HEADS = ("identity", "clip", "affine", "clip_affine")


@pytest.mark.parametrize("kind", ALGORITHMS)
@pytest.mark.parametrize("target", [name for name, item in TARGETS.items() if item.agent and name != "sb3"])
def test_the_tables_list_what_is_written(kind: str, target: str, tmp_path: Path) -> None:
    """A continuous policy is written if its action map, which is stated here, is one of the target's.

    Without its value it is one of behaviour cloning.
    """
    table = plugins.find("layouts", TARGETS[target].layout).load().TABLE
    listed = {*table.writes} | ({"continuous PPO"} if {"PPO", "BC"} & {*table.writes} else set())
    path, facts_given = str(SAMPLE), [AgentFacts()]
    if kind != "td3":
        path, facts_given = save(tmp_path, kind, "tianshou"), [AgentFacts(activations="tanh")]
    if kind == CONTINUOUS:
        facts_given = [replace(facts_given[0], head=head, action_low=-1.0, action_high=1.0) for head in HEADS]
    written, refused = [], []
    for number, facts in enumerate(facts_given):
        there = str(tmp_path / f"there{number}{SUFFIX.get(target, TARGETS[target].ending)}")
        options = {"allow_missing": True, "sync": False, "optimizer": () if kind == "td3" else ("none",)}
        try:
            written.append(convert(path, there, to=target, facts=facts, **options).written)
        except CkpttoolError as error:
            refused.append(error)
    assert any(written) == (ALGORITHMS[kind] in listed), refused
