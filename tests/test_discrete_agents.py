"""Agents with discrete actions, with each library's own names: their scores, actions and conversions."""

from __future__ import annotations

import copy
import json
import pickle
import runpy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.cli.next_steps import after_inspect
from ckpttool.commands.convert import convert
from ckpttool.commands.evaluate import evaluate
from ckpttool.commands.inspect import summary
from ckpttool.commands.verify import verify
from ckpttool.conversion.export import export
from ckpttool.core import CkpttoolError, EnvironmentMismatchError, UnsupportedError, plugins
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.playing import read_sampling
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.evaluation.rollout import ActionSampler
from ckpttool.networks import NOISE, numpy_backend, policy_network
from tests import test_format_stable_baselines2 as sb2
from tests.pickles import importable, instance, stand_in
from tests.restored import without_a_way
from tests.tensorflow_agents import tensorflow_tree
from tests.tensorflow_agents import written as checkpoint
from tests.test_format_d3rlpy import archive, written
from tests.test_layout_keras_rl import hdf5
from tests.torch_agents import whole

torch = pytest.importorskip("torch")
nn = torch.nn

OBS, ACTIONS = 4, 2  # CartPole's


class Made(NamedTuple):
    """What a library saves (for torch.save, or a function of a folder), the function of its scores.

    `facts` are those that the file does not contain.
    """

    saved: Any
    scores: Callable[[Any], Any]
    facts: AgentFacts = AgentFacts(activations=("elu",))


def mlp(outputs: int, *, inputs: int = OBS, activation: type[Any] = nn.ELU) -> Any:
    layers = (nn.Linear(inputs, 7), activation(), nn.Linear(7, 5), activation(), nn.Linear(5, outputs))
    network = nn.Sequential(*layers)
    for weight in network.parameters():
        weight.data *= 2.5  # so that every action is the best of some observations
    return network


def named(**parts: Any) -> Any:
    """Return a module with these modules; dots lead into modules, as underscores twice."""
    return whole({name.replace("__", "."): part for name, part in parts.items()})


def tianshou(kind: str, version: str) -> Made:
    """Return the state of policy/modelfree/{dqn,c51,qrdqn}.py (2.x: algorithm/modelfree)."""
    width = {"dqn": 1, "c51": 11, "qrdqn": 9}[kind]
    net, target = mlp(ACTIONS * width), mlp(ACTIONS * width)
    atoms = torch.linspace(-3, 7, 11)
    where = ("policy__model__model__model", "model_old__module__model__model")
    names = where if version == "2.x" else ("model__model__model", "model_old__model__model")
    state = named(**dict(zip(names, (net, target), strict=True))).state_dict()
    if kind == "c51":
        state["policy.support" if version == "2.x" else "support"] = atoms
    if kind == "qrdqn":
        state["tau_hat"] = torch.linspace(0.05, 0.95, 9).view(1, -1, 1)

    def scores(obs: Any) -> Any:
        values = net(obs).view(len(obs), ACTIONS, -1)
        return (values.softmax(2) * atoms).sum(2) if kind == "c51" else values.mean(2)

    return Made(state, scores)


def dueling_tianshou(version: str) -> Made:
    """Return a DQN's Net with dueling_param: the stream of the values is deeper than that of the state."""
    trunk, q, v = mlp(1)[:4], mlp(ACTIONS, inputs=5), mlp(1, inputs=5)
    for layers in (q, v):
        layers[1] = layers[3] = nn.ELU()
    parts = {"model__model__model": trunk, "model__Q__model": q, "model__V__model": v}
    top = "policy__" if version == "2.x" else ""
    target = "model_old__module__" if version == "2.x" else "model_old__"
    targets = {target + name.removeprefix("model__"): copy.deepcopy(part) for name, part in parts.items()}
    state = named(**{top + name: part for name, part in parts.items()}, **targets).state_dict()

    def scores(obs: Any) -> Any:
        advantages = q(trunk(obs))
        return advantages - advantages.mean(1, keepdim=True) + v(trunk(obs))

    return Made(state, scores)


def rainbow(*, noisy: bool, version: str = "1.x", quantiles: bool = False) -> Made:
    """Return a C51's or QR-DQN's Net with dueling_param, whose layers after the trunk may be NoisyLinear."""
    atoms = 11
    trunk = mlp(1)[:4]
    nets = {"Q": mlp(ACTIONS * atoms, inputs=5), "V": mlp(atoms, inputs=5)}
    parts = {"model__model__model": trunk, **{f"model__{name}__model": net for name, net in nets.items()}}
    top, target = ("policy__", "model_old__module__") if version == "2.x" else ("", "model_old__")
    targets = {target + name.removeprefix("model__"): copy.deepcopy(part) for name, part in parts.items()}
    state = named(**{top + name: part for name, part in parts.items()}, **targets).state_dict()
    if noisy:
        state_part = {}
        for name, tensor in state.items():
            layer, _, end = name.rpartition(".")
            mean = {"weight": "mu_W", "bias": "mu_bias"}[end]
            if ".Q." not in name and ".V." not in name:
                state_part[name] = tensor
                continue
            state_part |= {f"{layer}.{mean}": tensor, f"{layer}.{mean.replace('mu', 'sigma')}": tensor * 0.3}
            side = "eps_p" if end == "weight" else "eps_q"
            state_part[f"{layer}.{side}"] = torch.randn(tensor.shape[-1])
        state = state_part
    support = torch.linspace(-3, 7, atoms)
    if quantiles:
        state["tau_hat"] = torch.linspace(0.05, 0.95, atoms).view(1, -1, 1)
    else:
        state["policy.support" if version == "2.x" else "support"] = support

    def scores(obs: Any) -> Any:
        q, v = (nets[name](trunk(obs)).view(len(obs), -1, atoms) for name in "QV")
        values = q - q.mean(1, keepdim=True) + v
        return values.mean(2) if quantiles else (values.softmax(2) * support).sum(2)

    return Made(state, scores)


def skrl(kind: str, *, scaled: bool = False) -> Made:
    """Return what Agent.save writes; the models are those of a user."""
    names = ("q_network", "target_q_network") if kind == "dqn" else ("policy", "value")
    nets = {name: named(net=mlp(1 if name == "value" else ACTIONS)) for name in names}
    saved: dict[str, Any] = {name: net.state_dict() for name, net in nets.items()}
    saved["optimizer"] = {"state": {}, "param_groups": []}
    mean, var = (
        torch.linspace(-1, 1, OBS, dtype=torch.float64),
        torch.full((OBS,), 4.0, dtype=torch.float64),
    )
    if scaled:
        count = torch.tensor(9.0, dtype=torch.float64)
        saved["state_preprocessor"] = {"running_mean": mean, "running_variance": var, "current_count": count}

    def scores(obs: Any) -> Any:
        observed = ((obs - mean) / (var.sqrt() + 1e-8)).clamp(-5, 5).float() if scaled else obs
        return nets[names[0]].net(observed)

    return Made(saved, scores)


def rl_games(*, separate: bool) -> Made:
    """Return network_builder.py's A2CBuilder of discrete actions in ModelA2C, with a normaliser."""
    trunks = {"actor_mlp": mlp(6), "critic_mlp": mlp(6)} if separate else {"actor_mlp": mlp(6)}
    for trunk in trunks.values():
        trunk.append(nn.ELU())
    network = named(**trunks, value=nn.Linear(6, 1), logits=nn.Linear(6, ACTIONS))
    network.logits.bias.data *= 0
    state = {f"a2c_network.{name}": tensor for name, tensor in network.state_dict().items()}
    mean, var = torch.linspace(-1, 1, OBS, dtype=torch.float64), torch.full((OBS,), 4.0, dtype=torch.float64)
    state |= {"running_mean_std.running_mean": mean, "running_mean_std.running_var": var}
    state["running_mean_std.count"] = torch.tensor(9.0, dtype=torch.float64)

    def scores(obs: Any) -> Any:
        observed = ((obs - mean) / (var + 1e-5).sqrt()).clamp(-5, 5).float()
        return network.logits(network.actor_mlp(observed))

    return Made({"model": state, "epoch": 1, "frame": 2, "env_state": None}, scores)


def spinningup() -> Made:
    """Return the state of ppo/core.py, MLPActorCritic, with discrete actions."""
    logits = mlp(ACTIONS)
    return Made(named(pi__logits_net=logits, v__v_net=mlp(1)).state_dict(), logits)


def d3rlpy(kind: str, q_function: str = "mean", critics: int = 1) -> Made:
    """Return the entries of a `.d3` file: the modules' states, and the configuration."""
    width = {"mean": 1, "qr": 9}[q_function]
    own = {
        "discrete_bc": ("imitator",),
        "discrete_sac": ("policy", "q_funcs__0", "q_funcs__1"),
        "discrete_bcq": ("q_funcs__0", "targ_q_funcs__0", "imitator"),
    }
    names = own.get(
        kind, tuple(f"{net}__{number}" for net in ("q_funcs", "targ_q_funcs") for number in range(critics))
    )
    heads = []
    for _ in names:
        net = mlp(ACTIONS * width)
        heads.append(named(_encoder___layers=net[:4], _fc=net[4]))
    encoder = {"type": "vector", "params": {"hidden_units": [7, 5], "activation": "tanh"}}
    factories = ("encoder_factory", "actor_encoder_factory", "critic_encoder_factory")
    params = dict.fromkeys(factories[1:] if kind == "discrete_sac" else factories[:1], encoder)
    params["q_func_factory"] = {"type": q_function, "params": {}}
    for head in heads:
        head._encoder._layers[1] = head._encoder._layers[3] = nn.Tanh()
    states: dict[str, Any] = {}
    for name, head in zip(names, heads, strict=True):
        entry, _, number = name.partition("__")
        prefix = f"{number}." if number else ""
        states.setdefault(entry, {}).update({prefix + n: t for n, t in head.state_dict().items()})
    settings = {
        "observation_shape": [OBS],
        "action_size": ACTIONS,
        "config": {"type": kind, "params": params},
    }

    def scores(obs: Any) -> Any:
        values = torch.stack([head._fc(head._encoder._layers(obs)) for head in heads[:critics]]).mean(0)
        return values.view(len(obs), ACTIONS, width).mean(2)

    # The configuration states the activations.
    entries = {"torch": archive(states), "config": json.dumps(settings)}
    return Made(lambda folder: written(folder / "agent.d3", **entries), scores, NO_FACTS)


def arrays_of(net: Any, names: list[str], ends: tuple[str, str]) -> dict[str, np.ndarray]:
    """Return the linear layers of a Sequential as TensorFlow's variables with these names."""
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    return {
        f"{name}/{end}": array.detach().numpy()
        for name, layer in zip(names, layers, strict=True)
        for end, array in zip(ends, (layer.weight.T, layer.bias), strict=True)
    }


def put_sb2(variables: Mapping[str, Any], policy: str, *, named: bool, act_fun: str | None) -> Any:
    """Return a function that writes an archive, or a cloudpickle with a list of variables."""

    def put(folder: Path) -> str:
        kind, function = stand_in(policy), stand_in(f"tensorflow.{act_fun}")
        discrete = stand_in("gym.spaces.discrete.Discrete")
        settings = {
            "policy": kind,
            "policy_kwargs": {} if act_fun is None else {"act_fun": function},
            "observation_space": sb2.box(OBS, 8.0),
            "action_space": instance(discrete, n=ACTIONS, dtype=np.dtype("i8"), shape=()),
        }
        with importable(sb2.BOX, discrete, kind, function):
            if not named:
                (folder / "agent.pkl").write_bytes(pickle.dumps((settings, list(variables.values())), 4))
                return str(folder / "agent.pkl")
            arrays = {f"{name}:0": array for name, array in variables.items()}
            return sb2.put(folder, sb2.zipped(arrays, sb2.serialized(settings)))

    return put


def sb2_dqn(*, dueling: bool = True, named: bool = True) -> Made:
    """Return the variables of deepq/policies.py, FeedForwardPolicy: two chains, or one, and their targets."""
    activation = nn.ELU if named else nn.ReLU
    streams = {"action_value": mlp(ACTIONS, activation=activation)}
    if dueling:
        streams["state_value"] = mlp(1, activation=activation)
    variables: dict[str, Any] = {"deepq/eps": np.float32(0.02)}
    names = ["fully_connected", "fully_connected_1", "fully_connected_2"]
    for scope in ("deepq/model", "deepq/target_q_func/model"):
        for stream, net in streams.items():
            tensors = arrays_of(net, names, ("weights", "biases"))
            variables |= {f"{scope}/{stream}/{name}": array for name, array in tensors.items()}

    def scores(obs: Any) -> Any:
        advantages = streams["action_value"](obs)
        if not dueling:
            return advantages
        return streams["state_value"](obs) + advantages - advantages.mean(1, keepdim=True)

    policy = "stable_baselines.deepq.policies.MlpPolicy"
    act_fun = "python.ops.gen_nn_ops.elu" if named else None
    saved = put_sb2(variables, policy, named=named, act_fun=act_fun)
    return Made(saved, scores, NO_FACTS if named else AgentFacts(activations=("relu",)))


def sb2_on_policy(*, shared: bool = False, named: bool = True, by_network: bool = False) -> Made:
    """Return the variables of common/policies.py, FeedForwardPolicy, in the order of their creation."""
    nets = {top: mlp(out, activation=nn.Tanh) for top, out in (("pi", ACTIONS), ("vf", 1))}
    if shared:
        nets["vf"][0] = nets["pi"][0]
    layers = {
        top: arrays_of(net, ["shared_fc0" if shared else f"{top}_fc0", f"{top}_fc1", top], ("w", "b"))
        for top, net in nets.items()
    }
    order = (
        ["pi_fc0", "pi_fc1", "vf_fc0", "vf_fc1"] if by_network else ["pi_fc0", "vf_fc0", "pi_fc1", "vf_fc1"]
    )
    order = ["shared_fc0", *(name for name in order if name[-1] == "1")] if shared else order
    every = layers["vf"] | layers["pi"]
    every |= arrays_of([nn.Linear(5, ACTIONS)], ["q"], ("w", "b"))
    names = [f"{layer}/{end}" for layer in (*order, "vf", "pi", "q") for end in ("w", "b")]
    variables = {f"model/{name}": every[name] for name in names}
    policy = "stable_baselines.common.policies.MlpPolicy"
    saved = put_sb2(variables, policy, named=named, act_fun=None)
    return Made(saved, nets["pi"], AgentFacts(activations=("tanh",)))


def put_rllib(folder: Path, policy: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """Write an algorithm's checkpoint with one policy (rllib/algorithms/algorithm.py, `save_checkpoint`)."""
    about = json.dumps({"type": "Algorithm", "checkpoint_version": "1.1", "format": "cloudpickle"})
    states = {"algorithm_state": {"config": config}, "policies/default_policy/policy_state": policy}
    (folder / "policies" / "default_policy").mkdir(parents=True)
    (folder / "rllib_checkpoint.json").write_text(about)
    for name, state in states.items():
        (folder / f"{name}.pkl").write_bytes(pickle.dumps(state, 4))
    return str(folder)


def rllib_dqn(*, dueling: bool, atoms: int = 1) -> Made:
    """Return a checkpoint of dqn_torch_model.py: advantages and state value have layers of their own."""
    low, high = -3.0, 7.0
    trunk = nn.Sequential(nn.Linear(OBS, 7), nn.ELU(), nn.Linear(7, 5), nn.ELU())
    nets = {"advantage_module": ("A", ACTIONS * atoms), "value_module": ("V", atoms)}
    heads = {
        module: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, outputs))
        for module, (_, outputs) in nets.items()
        if dueling or module == "advantage_module"
    }
    for weight in (parameter for net in (trunk, *heads.values()) for parameter in net.parameters()):
        weight.data *= 2.5
    layers = {f"_hidden_layers.{number}": trunk[2 * number] for number in range(2)}
    layers["_value_branch"] = nn.Linear(5, 1)
    for module, net in heads.items():
        letter = nets[module][0]
        layers |= {f"{module}.dueling_{letter}_0": net[0], f"{module}.{letter}": net[2]}
    weights = {
        f"{name}._model.0.{end}": getattr(layer, end).detach().numpy()
        for name, layer in layers.items()
        for end in ("weight", "bias")
    }
    space = {"type": "discrete", "space": {"n": ACTIONS, "start": 0}}
    state = {"weights": weights, "policy_spec": {"action_space": space}}
    model = {"fcnet_activation": "elu", "fcnet_hiddens": [7, 5]}
    config = {"num_atoms": atoms, "v_min": low, "v_max": high, "env": "CartPole-v1", "model": model}

    def scores(obs: Any) -> Any:
        advantages = heads["advantage_module"](trunk(obs)).view(len(obs), ACTIONS, atoms)
        if dueling:
            value = heads["value_module"](trunk(obs)).view(len(obs), 1, atoms)
            advantages = advantages - advantages.mean(1, keepdim=True) + value
        if atoms == 1:
            return advantages[:, :, 0]
        return (advantages.softmax(2) * torch.linspace(low, high, atoms)).sum(2)

    return Made(lambda folder: put_rllib(folder / "agent", state, config), scores, NO_FACTS)


def elegantrl(kind: str) -> Made:
    """Return the state of a class of elegantrl/agents/net.py, whose values are not scaled by default."""
    statistics = {"state_avg": torch.linspace(-1, 1, OBS), "state_std": torch.linspace(0.5, 2, OBS)}
    scales = {"value_avg": torch.zeros(1), "value_std": torch.ones(1)}
    if kind == "QNet":
        net = mlp(ACTIONS, activation=nn.ReLU)
        return Made(
            {**statistics, **scales, **named(net=net).state_dict()},
            lambda obs: net((obs - statistics["state_avg"]) / statistics["state_std"]),
            NO_FACTS,
        )
    # No activation follows the encoder's last layer.
    encoder = mlp(1, activation=nn.ReLU)[:3]
    second = ("1", "2") if "Twin" in kind else ("",)
    heads = {f"net_val{number}": nn.Sequential(nn.Linear(5, ACTIONS)) for number in second}
    if "Duel" in kind:
        heads |= {f"net_adv{number}": nn.Sequential(nn.Linear(5, 1)) for number in second}

    def scores(obs: Any) -> Any:
        encoded = encoder((obs - statistics["state_avg"]) / statistics["state_std"])
        values = heads[f"net_val{second[0]}"](encoded)
        if "Duel" not in kind:
            return values
        return values - values.mean(1, keepdim=True) + heads[f"net_adv{second[0]}"](encoded)

    state = named(net_state=encoder, **heads).state_dict()
    return Made({**statistics, **scales, **state}, scores, NO_FACTS)


def keras_rl() -> Made:
    """Return the weights of a DQNAgent's model in HDF5."""
    net = mlp(ACTIONS)
    arrays = arrays_of(net, ["dense", "dense_1", "dense_2"], ("kernel", "bias"))

    def put(folder: Path) -> str:
        hdf5(arrays, folder / "dqn_weights.h5f")
        return str(folder / "dqn_weights.h5f")

    return Made(put, net)


def tf_agents(kind: str, *, scaled: bool = False) -> Made:
    """Return the checkpoint of an agent; PPO may normalise observations (utils/tensor_normalizer.py)."""
    ppo, net = kind == "ppo", mlp(ACTIONS, activation=nn.ReLU)
    inner, last = "_encoder/_postprocessing_layers", "_projection_networks/_projection_layer"
    tops = ("agent/_actor_net",) if ppo else ("agent/_q_network", "agent/_target_q_network")
    names = [f"{inner}/1", f"{inner}/2", last if ppo else "_q_value_layer"]
    if kind == "sequential":
        names = [f"_sequential_layers/{number}" for number in range(3)]
    arrays = {}
    for top in tops:
        arrays |= arrays_of(net, [f"{top}/{name}" for name in names], ("kernel", "bias"))
    rows = {"_avg": np.linspace(-1, 1, OBS), "_m2": np.full(OBS, 36.0), "_count": np.full(OBS, 9.0)}
    if ppo:
        value = [f"agent/_value_net/{inner}/1", f"agent/_value_net/{inner}/2"]
        arrays |= arrays_of(mlp(1), [*value, "agent/_value_net/_postprocessing_layers"], ("kernel", "bias"))
    if scaled:
        norm = "agent/_observation_normalizer"
        arrays |= {f"{norm}/{name}/0": row.astype("f4") for name, row in rows.items()}

    def scores(obs: Any) -> Any:
        if not scaled:
            return net(obs)
        mean, var = torch.from_numpy(rows["_avg"]).float(), torch.tensor(4.0)
        return net(((obs - mean) / (var + 1e-3).sqrt()).clamp(-5, 5))

    facts = NO_FACTS if kind == "dqn" else AgentFacts(activations=("relu",))
    return Made(lambda folder: checkpoint(tensorflow_tree(arrays), folder / "ckpt-3"), scores, facts)


FAMILIES: Mapping[str, Callable[[], Made]] = {
    **{
        f"tianshou-{kind}-{version}": lambda kind=kind, version=version: tianshou(kind, version)  # type: ignore[misc]
        for kind in ("dqn", "c51", "qrdqn")
        for version in ("1.x", "2.x")
    },
    "tianshou-dueling-1.x": lambda: dueling_tianshou("1.x"),
    "tianshou-dueling-2.x": lambda: dueling_tianshou("2.x"),
    "tianshou-rainbow-1.x": lambda: rainbow(noisy=True),
    "tianshou-rainbow-2.x": lambda: rainbow(noisy=True, version="2.x"),
    "tianshou-dueling-c51": lambda: rainbow(noisy=False),
    "tianshou-dueling-qr": lambda: rainbow(noisy=False, quantiles=True),
    "skrl-dqn": lambda: skrl("dqn"),
    "skrl-ppo": lambda: skrl("ppo", scaled=True),
    "rl_games": lambda: rl_games(separate=False),
    "rl_games-separate": lambda: rl_games(separate=True),
    "spinningup": spinningup,
    "d3rlpy-dqn": lambda: d3rlpy("dqn"),
    "d3rlpy-qr": lambda: d3rlpy("double_dqn", "qr"),
    "d3rlpy-mean": lambda: d3rlpy("dqn", critics=3),
    "d3rlpy-mean-qr": lambda: d3rlpy("double_dqn", "qr", critics=2),
    "d3rlpy-cql": lambda: d3rlpy("discrete_cql"),
    "d3rlpy-bc": lambda: d3rlpy("discrete_bc"),
    "d3rlpy-sac": lambda: d3rlpy("discrete_sac"),
    "rllib-dqn": lambda: rllib_dqn(dueling=False),
    "rllib-dueling": lambda: rllib_dqn(dueling=True),
    "rllib-c51": lambda: rllib_dqn(dueling=False, atoms=11),
    "rllib-dueling-c51": lambda: rllib_dqn(dueling=True, atoms=11),
    **{
        f"elegantrl-{kind}": lambda kind=kind: elegantrl(kind)  # type: ignore[misc]
        for kind in ("QNet", "QNetDuel", "QNetTwin", "QNetTwinDuel")
    },
    "keras_rl": keras_rl,
    **{
        f"tf_agents-{kind}": lambda kind=kind: tf_agents(kind)  # type: ignore[misc]
        for kind in ("dqn", "sequential", "ppo")
    },
    "sb2-dueling": sb2_dqn,
    "sb2-dqn": lambda: sb2_dqn(dueling=False),
    "sb2-dueling-list": lambda: sb2_dqn(named=False),
    "sb2-dqn-list": lambda: sb2_dqn(dueling=False, named=False),
    "sb2-ppo2": sb2_on_policy,
    "sb2-shared": lambda: sb2_on_policy(shared=True),
    "sb2-ppo2-list": lambda: sb2_on_policy(named=False),
    "sb2-a2c-list": lambda: sb2_on_policy(named=False, by_network=True),
}


class Case(NamedTuple):
    """The file of an agent, its scores [n, actions] for observations, and what its file does not contain."""

    path: Path
    scores: Callable[[np.ndarray], np.ndarray]
    facts: AgentFacts


@pytest.fixture
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    torch.manual_seed(4)
    case = FAMILIES[request.param]()
    path = tmp_path / "agent.pt"
    if callable(case.saved):
        path = Path(case.saved(tmp_path))
    else:
        torch.save(case.saved, path)

    def scores(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(case.scores(torch.from_numpy(obs)))

    return Case(path, scores, case.facts)


def double_biases(state: Any) -> None:
    for name, value in state.items() if isinstance(state, dict) else ():
        if str(name).endswith("bias"):
            value *= 2
        double_biases(value)


def rows() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, size=(200, OBS)).astype(np.float32)


def require_close(outputs: np.ndarray, expected: np.ndarray) -> None:
    """Assert equal scores, relative to the largest: a dueling network subtracts numbers of that size."""
    assert np.abs(outputs - expected).max() <= 1e-6 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("agent", FAMILIES, indirect=True)
def test_an_agent_chooses_as_its_library_does(agent: Case) -> None:
    path, scores, facts = agent
    expected = scores(rows())
    assert len(set(expected.argmax(1))) == ACTIONS
    assert not without_a_way(path)
    for backend in ("numpy", "torch"):
        loaded = load_agent(str(path), "CartPole-v1", facts=facts, backend=backend)
        require_close(loaded.scores(rows()), expected)
        np.testing.assert_array_equal(loaded.act(rows()), expected.argmax(1))
    assert not any(entry.what == "action bounds" for entry in restore_agent(str(path)).ledger)
    for env in ("MountainCar-v0", "Acrobot-v1", "InvertedPendulum-v5"):
        with pytest.raises(EnvironmentMismatchError):
            load_agent(str(path), env, facts=facts)


@pytest.mark.parametrize("agent", ["rl_games", "spinningup"], indirect=True)
def test_logits_give_the_probabilities_of_drawn_actions(agent: Case) -> None:
    path, scores, facts = agent
    loaded, obs = load_agent(str(path), facts=facts), rows()[:1]
    expected = np.exp(scores(obs)[0])
    drawn = loaded.act(np.repeat(obs, 4000, axis=0), deterministic=False)
    shares = np.bincount(drawn, minlength=ACTIONS) / len(drawn)
    np.testing.assert_allclose(shares, expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize("agent", ["skrl-ppo", "skrl-dqn", "d3rlpy-sac", "tianshou-dqn-2.x"], indirect=True)
def test_scores_that_may_be_no_logits_are_not_drawn_from(agent: Case) -> None:
    loaded = load_agent(str(agent.path), facts=agent.facts)
    with pytest.raises(UnsupportedError):
        loaded.act(rows(), deterministic=False)


@pytest.mark.parametrize("agent", ["tianshou-dueling-2.x"], indirect=True)
def test_streams_of_a_dueling_network_share_their_first_layers(agent: Case) -> None:
    """The library's module has them once: they are computed and trained once."""
    path, scores, facts = agent
    module = load_agent(str(path), facts=facts).networks("torch", "q")["q"]
    np.testing.assert_allclose(
        module(torch.from_numpy(rows())).detach(), scores(rows()), rtol=1e-5, atol=1e-6
    )
    stored = torch.load(path, weights_only=False)
    own = [tensor for name, tensor in stored.items() if not name.startswith("model_old")]
    arrays = sorted(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    assert arrays == sorted(tensor.numpy().tobytes() for tensor in own)


# Conversions start from the canonical agent: of these libraries one of each kind of network is enough.
OFTEN = ("sb2-dueling", "tianshou-rainbow-1.x")
SELDOM = (
    "sb2-",
    "rllib-",
    "tf_agents-",
    "elegantrl-",
    "keras_rl",
    "tianshou-rainbow-",
    "tianshou-dueling-c51",
)
CONVERTED = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith(SELDOM) and name not in OFTEN else name
    for name in FAMILIES
]


@pytest.mark.parametrize("to", ["torch", "tf", "safetensors", "onnx"])
@pytest.mark.parametrize("agent", CONVERTED, indirect=True)
def test_a_converted_agent_chooses_the_same(agent: Case, to: str, tmp_path: Path) -> None:
    path, scores, facts = agent
    target = str(tmp_path / {"tf": "out"}.get(to, f"out.{to}"))
    # The settings of Stable-Baselines 2 have no place in a file of its own framework, whose names stay.
    settings = to == "tf" and path.suffix in (".zip", ".pkl")
    assert convert(str(path), target, to=to, facts=facts, allow_missing=settings).written
    loaded = load_agent(target, "CartPole-v1")
    require_close(loaded.scores(rows()), scores(rows()))
    if to == "onnx":
        runtime = pytest.importorskip("onnxruntime").InferenceSession(target)
        np.testing.assert_array_equal(
            runtime.run(["action"], {"obs": rows()})[0][:, 0], scores(rows()).argmax(1)
        )


@pytest.mark.parametrize(
    "agent",
    ["tianshou-dqn-2.x", *[pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]],
    indirect=["agent"],
)
def test_the_scores_of_a_converted_agent_are_compared(agent: Case, tmp_path: Path) -> None:
    target, changed = tmp_path / "out.pt", tmp_path / "changed.pt"
    source, facts = str(agent.path), agent.facts
    assert convert(source, str(target), to="torch", facts=facts).written
    assert verify(source, str(target), facts=facts).within
    state = torch.load(target, weights_only=True)
    double_biases(state)
    torch.save(state, changed)
    assert not verify(source, str(changed), facts=facts).within


@pytest.mark.parametrize("agent", FAMILIES, indirect=True)
def test_the_environment_that_is_suggested_has_the_choices_of_the_agent(agent: Case) -> None:
    """Of the environments with four observations, only CartPole has two choices; others have one number."""
    (command,) = (words for words in after_inspect(summary(str(agent.path))) if words[0] == "eval")
    assert "--env" not in command or command[command.index("--env") + 1] in ("CartPole-v1", "ID")


def test_a_ppo_of_tf_agents_normalises_its_observations(tmp_path: Path) -> None:
    """Conversions of its statistics, which are sums, are refused."""
    case = tf_agents("ppo", scaled=True)
    agent = load_agent(case.saved(tmp_path), "CartPole-v1", facts=case.facts)
    with torch.no_grad():
        expected = case.scores(torch.from_numpy(rows())).numpy()
    require_close(agent.scores(rows()), expected)
    np.testing.assert_array_equal(agent.act(rows()), expected.argmax(1))


def categorical_dqn(folder: Path) -> tuple[str, Any]:
    """Write categorical_q_network.py's QNetwork in a network, and return it with its layers.

    No variable has min_q_value and max_q_value.
    """
    net, inner = mlp(ACTIONS * 11), "agent/_q_network/_q_network"
    names = [f"{inner}/_encoder/_postprocessing_layers/{n}" for n in (1, 2)] + [f"{inner}/_q_value_layer"]
    return checkpoint(tensorflow_tree(arrays_of(net, names, ("kernel", "bias"))), folder / "ckpt-3"), net


@pytest.mark.parametrize(("least", "most"), [(-10.0, 10.0), (-3.0, 7.0), (100.0, 500.0)])
def test_the_best_action_of_equidistant_atoms_does_not_depend_on_their_values(
    least: float, most: float, tmp_path: Path
) -> None:
    path, net = categorical_dqn(tmp_path)
    with torch.no_grad():
        shares = net(torch.from_numpy(rows())).view(len(rows()), ACTIONS, -1).softmax(2)
        expected = (shares.double() * torch.linspace(least, most, 11)).sum(2).numpy()
    for backend in ("numpy", "torch"):
        agent = load_agent(path, "CartPole-v1", facts=AgentFacts(activations=("elu",)), backend=backend)
        np.testing.assert_array_equal(agent.act(rows()), expected.argmax(1))
    assert any("11 atoms" in assumption for assumption in agent.assumed)
    if most == 10:
        require_close(agent.scores(rows()), expected)


def test_without_an_environment_the_number_of_atoms_is_asked_for(tmp_path: Path) -> None:
    path, _ = categorical_dqn(tmp_path)
    facts = AgentFacts(activations=("elu",))
    for call in (lambda: load_agent(path, facts=facts), lambda: export(path, f"{path}.onnx", facts=facts)):
        with pytest.raises(CkpttoolError) as caught:
            call()
        assert "--env" in str(caught.value.hint)
    with pytest.raises(EnvironmentMismatchError):
        load_agent(path, "Acrobot-v1", facts=facts)


@pytest.mark.parametrize("to", ["tianshou", "cleanrl"])
@pytest.mark.parametrize("source", ["tf_agents", "rllib"])
def test_the_values_of_atoms_are_written_where_the_source_has_no_tensor(
    source: str, to: str, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    if source == "rllib":
        case = rllib_dqn(dueling=False, atoms=11)
        path, facts, ends = case.saved(tmp_path), AgentFacts(), (-3, 7)
    else:
        path, facts, ends = categorical_dqn(tmp_path)[0], AgentFacts(activations=("elu",)), (-10, 10)
    target = str(tmp_path / ("out.cleanrl_model" if to == "cleanrl" else "out.pt"))
    facts_given = replace(facts, env="CartPole-v1")
    assert convert(path, target, to=to, facts=facts_given, allow_missing=to == "cleanrl").written
    saved = torch.load(target, weights_only=True)
    support = saved["policy.support"] if to == "tianshou" else saved["model_weights"]["atoms"]
    torch.testing.assert_close(support, torch.linspace(*ends, 11))
    first, second = load_agent(path, "CartPole-v1", facts=facts), load_agent(target, "CartPole-v1")
    require_close(second.scores(rows()), first.scores(rows()))


def rllib_noisy(folder: Path, *, dueling: bool, atoms: int) -> tuple[str, Callable[[Any, Any], Any], int]:
    """Write a policy with the layers of modules/noisy_layer.py.

    Return its path, the function of the values [rows, actions] for observations and the factors of each row's
    noise, [rows, number], and their number.
    """
    trunk = nn.Sequential(nn.Linear(OBS, 7), nn.ELU(), nn.Linear(7, 5), nn.ELU())
    weights = {
        f"_hidden_layers.{number}._model.0.{end}": getattr(trunk[2 * number], end).detach().numpy()
        for number in range(2)
        for end in ("weight", "bias")
    }
    nets: dict[str, list[dict[str, Any]]] = {}
    for module, letter, outputs in (("advantage_module", "A", ACTIONS * atoms), ("value_module", "V", atoms)):
        if module == "advantage_module" or dueling:
            for name, rows_, columns in ((f"dueling_{letter}_0", 5, 6), (letter, 6, outputs)):
                shapes = {"w": (rows_, columns), "b": (columns,)}
                layer = {
                    n: torch.randn(s)
                    for n, s in (shapes | {f"sigma_{k}": v for k, v in shapes.items()}).items()
                }
                nets.setdefault(module, []).append(layer)
                weights |= {f"{module}.{name}.{n}": tensor.numpy() for n, tensor in layer.items()}
    space = {"type": "discrete", "space": {"n": ACTIONS, "start": 0}}
    state = {"weights": weights, "policy_spec": {"action_space": space}}
    model = {"fcnet_activation": "elu", "fcnet_hiddens": [7, 5]}
    config = {"num_atoms": atoms, "v_min": -3.0, "v_max": 7.0, "env": "CartPole-v1", "model": model}
    number = sum(sum(layer["w"].shape) for net in nets.values() for layer in net)

    def scores(obs: Any, factors: Any) -> Any:
        """Return what a pass of one row computes, for each row."""
        rows_ = []
        for row, mine in zip(torch.from_numpy(obs), map(iter, torch.from_numpy(factors)), strict=True):
            outputs = []
            for net in nets.values():
                x = trunk(row)
                for n, layer in enumerate(net):
                    size, width = layer["w"].shape
                    ins, outs = (torch.stack([next(mine) for _ in range(count)]) for count in (size, width))
                    kernel = layer["w"] + layer["sigma_w"] * torch.outer(ins, outs)
                    x = x @ kernel + layer["b"] + layer["sigma_b"] * outs
                    x = x.relu() if n == 0 else x
                outputs.append(x.view(-1, atoms))
            values = outputs[0]
            if dueling:
                values = values - values.mean(0, keepdim=True) + outputs[1]
            support = torch.linspace(-3.0, 7.0, atoms)
            rows_.append((values.softmax(1) * support).sum(1) if atoms > 1 else values[:, 0])
        return torch.stack(rows_).detach().numpy()

    return put_rllib(folder, state, config), scores, number


@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow", "onnxruntime"])
@pytest.mark.parametrize(("dueling", "atoms"), [(False, 1), (True, 1), (True, 11)])
def test_noise_of_rllibs_layers_is_drawn(*, dueling: bool, atoms: int, backend: str, tmp_path: Path) -> None:
    """The library draws it in evaluation too, for each pass, which has one row there."""
    if not plugins.find("backends", backend).available():
        pytest.skip(f"{backend} is not installed")
    torch.manual_seed(4)
    path, scores, number = rllib_noisy(tmp_path / "agent", dueling=dueling, atoms=atoms)
    with load_agent(path, "CartPole-v1", backend=backend) as agent:
        actions = agent.act(rows(), deterministic=False)
        draws = ActionSampler.stream(0)
        normal = np.stack([draws.standard_normal(number) for _ in rows()])
        factors = (np.sign(normal) * np.sqrt(abs(normal))).astype("f4")
        expected = scores(rows(), factors)
        assert len(set(expected.argmax(1))) == ACTIONS
        np.testing.assert_array_equal(actions, expected.argmax(1))
        np.testing.assert_array_equal(
            agent.act(torch.from_numpy(rows()), deterministic=False).numpy() < 9, True
        )


@pytest.fixture
def noisy(tmp_path: Path) -> str:
    torch.manual_seed(4)
    return rllib_noisy(tmp_path / "agent", dueling=True, atoms=1)[0]


# Calls that draw nothing.
WITHOUT_DRAWING: dict[str, Callable[[Any], Any]] = {
    "act": lambda agent: agent.act(rows()),
    "tensor": lambda agent: agent.act(torch.from_numpy(rows())),
    "predict": lambda agent: agent.predict(rows()),
    "scores": lambda agent: agent.scores(rows()),
    "q_values": lambda agent: agent.q_values(rows()),
    "epsilon": lambda agent: agent.act(rows(), epsilon=0.1),
}


@pytest.mark.parametrize(
    "call",
    [*WITHOUT_DRAWING.values(), lambda agent: agent.networks("torch")],
    ids=[*WITHOUT_DRAWING, "networks"],
)
def test_noisy_layers_without_drawing_are_refused(noisy: str, call: Callable[[Any], Any]) -> None:
    with load_agent(noisy) as agent, pytest.raises(UnsupportedError) as caught:
        call(agent)
    assert "deterministic=False" in str(caught.value.hint)


def test_noisy_layers_play_with_the_hint_of_their_refusal(noisy: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        evaluate(noisy, "CartPole-v1")
    assert "--stochastic" in str(caught.value.hint)
    played = [evaluate(noisy, "CartPole-v1", Protocol(episodes=3, stochastic=True)) for _ in range(2)]
    assert len({tuple(evaluation.rollout.returns.tolist()) for evaluation in played}) == 1


@pytest.mark.parametrize("to", ["torch", "tf", "keras", "tianshou", "sb3", "onnx"])
def test_noisy_layers_are_not_written_without_their_noise(noisy: str, to: str, tmp_path: Path) -> None:
    """Their means alone would be another agent."""
    target = tmp_path / "out"
    with pytest.raises(UnsupportedError):
        convert(noisy, str(target), to=to, facts=AgentFacts(env="CartPole-v1"), allow_missing=True)
    assert not target.exists()


@pytest.mark.parametrize("kind", ["discrete_bcq", "discrete_new"])
def test_other_discrete_algorithms_of_d3rlpy_are_refused(kind: str, tmp_path: Path) -> None:
    """The imitator of BCQ, which limits the choice, was played as a policy."""
    path = Path(d3rlpy(kind).saved(tmp_path))
    alone = tmp_path / "model.pt"
    alone.write_bytes(pickle.loads(path.read_bytes())["torch"])
    for file in (path, alone) if kind == "discrete_bcq" else (path,):
        with pytest.raises(UnsupportedError) as caught:
            load_agent(str(file), "CartPole-v1", facts=AgentFacts(activations=("tanh",)))
        assert ("BCQ" if kind == "discrete_bcq" else kind) in str(caught.value.found)


def test_scaled_values_of_elegantrl_are_refused(tmp_path: Path) -> None:
    state = elegantrl("QNet").saved
    torch.save({**state, "value_std": torch.full((1,), 2.0)}, tmp_path / "act.pth")
    with pytest.raises(UnsupportedError) as caught:
        load_agent(str(tmp_path / "act.pth"), "CartPole-v1")
    assert "value_std" in str(caught.value.found)


def test_a_dueling_network_of_keras_rl_has_one_output_more(tmp_path: Path) -> None:
    """rl/agents/dqn.py: a Lambda adds the first output to the others less their mean."""
    path, expected = dueling_keras_rl(tmp_path)
    facts = AgentFacts(activations=("elu",))
    for backend in ("numpy", "torch"):
        agent = load_agent(path, "CartPole-v1", facts=facts, backend=backend)
        require_close(agent.scores(rows()), expected)
        np.testing.assert_array_equal(agent.act(rows()), expected.argmax(1))
    assert any("dueling" in assumption for assumption in agent.assumed)
    # Without an environment the outputs may be as many actions.
    assert any("dueling" in entry.value for entry in load_agent(path, facts=facts).ledger)
    with pytest.raises(EnvironmentMismatchError):
        load_agent(path, "MountainCar-v0", facts=facts)


def dueling_keras_rl(folder: Path) -> tuple[str, np.ndarray]:
    """Write rl/agents/dqn.py's model of one output more; return it with its values of `rows`."""
    net = mlp(ACTIONS + 1)
    hdf5(arrays_of(net, ["dense", "dense_1", "dense_2"], ("kernel", "bias")), folder / "dqn_weights.h5f")
    with torch.no_grad():
        values = net(torch.from_numpy(rows()))
        expected = values[:, :1] + values[:, 1:] - values[:, 1:].mean(1, keepdim=True)
    return str(folder / "dqn_weights.h5f"), expected.numpy()


def test_a_dueling_network_of_keras_rl_moves_to_tianshou(tmp_path: Path) -> None:
    path, expected = dueling_keras_rl(tmp_path)
    target, facts = str(tmp_path / "there.pt"), AgentFacts(activations=("elu",), env="CartPole-v1")
    assert convert(path, target, to="tianshou", facts=facts).written
    state = torch.load(target, weights_only=True)
    assert state["policy.model.Q.model.0.weight"].shape == (ACTIONS, 5)
    assert state["policy.model.V.model.0.weight"].shape == (1, 5)
    require_close(tianshou_scores(state, torch.from_numpy(rows())).numpy(), expected)
    require_close(load_agent(target, "CartPole-v1").scores(rows()), expected)


@pytest.mark.parametrize("to", ["sb3", "cleanrl", "skrl"])
def test_values_in_front_of_advantages_are_not_written_as_actions(to: str, tmp_path: Path) -> None:
    path, _ = dueling_keras_rl(tmp_path)
    facts = AgentFacts(activations=("elu",), env="CartPole-v1")
    with pytest.raises(UnsupportedError) as caught:
        convert(path, str(tmp_path / ("there.zip" if to == "sb3" else "there")), to=to, facts=facts)
    assert caught.value.found == "value_first"


class Fractions(nn.Module):
    """utils/net/discrete.py: ImplicitQuantileNetwork, or with `proposes` FullQuantileFunction (FQF)."""

    def __init__(self, *, cosines: int = 13, number: int = 9, proposes: bool = True) -> None:
        super().__init__()
        linear = nn.Linear(5, 6)  # the width is a Net's action_shape: no activation follows
        self.net = named(
            preprocess__model__model=nn.Sequential(nn.Linear(OBS, 5), nn.ELU(), linear),
            last__model=nn.Sequential(nn.Linear(6, 7), nn.ELU(), nn.Linear(7, ACTIONS)),
            embed_model__net=nn.Sequential(nn.Linear(cosines, 6), nn.ReLU()),
        )
        self.fractions = named(net=nn.Linear(6, number)) if proposes else None
        self.steps = torch.pi * torch.arange(1, cosines + 1)
        for weight in self.parameters():
            weight.data *= 2

    def save(self, path: Path, version: str = "2.x") -> str:
        online, target = ("policy.model", "model_old.module") if version == "2.x" else ("model", "model_old")
        names = {"2.x": "policy.fraction_model", "1.x": "fraction_model", "0.x": "propose_model"}
        state = {
            f"{top}.{name}": tensor.clone()
            for top in (online, target)
            for name, tensor in self.net.state_dict().items()
        }
        if self.fractions is not None:
            state |= {f"{names[version]}.{name}": t for name, t in self.fractions.state_dict().items()}
        torch.save(state | {"tau_hat": torch.zeros(1, 9, 1)}, path)
        return str(path)

    def quantiles(self, encoded: Any, fractions: Any) -> Any:
        embedded = self.net.embed_model.net(torch.cos(fractions[..., None] * self.steps))
        return self.net.last.model(encoded[:, None] * embedded)

    @torch.no_grad()
    def scores(self, obs: np.ndarray, fractions: Any = None) -> np.ndarray:
        """Return the values [n, actions]; of drawn fractions [n, number] those with equal weights."""
        encoded = self.net.preprocess.model.model(torch.from_numpy(obs))
        if self.fractions is None:
            return np.asarray(self.quantiles(encoded, fractions).mean(1))
        shares = self.fractions.net(encoded).softmax(1)
        ends = nn.functional.pad(shares.cumsum(1), (1, 0))
        middles = (ends[:, :-1] + ends[:, 1:]) / 2
        return np.asarray((shares[..., None] * self.quantiles(encoded, middles)).sum(1))


@pytest.mark.parametrize("version", ["0.x", "1.x", "2.x"])
def test_fractions_that_a_network_proposes_are_those_of_fqf(version: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    network = Fractions()
    path, expected = network.save(tmp_path / "policy.pth", version), network.scores(rows())
    assert len(set(expected.argmax(1))) == ACTIONS
    for activations in (("elu",), ("elu", "linear", "elu")):
        facts = AgentFacts(activations=activations)
        for backend in ("numpy", "torch") if version == "2.x" else ("numpy",):
            loaded = load_agent(path, "CartPole-v1", facts=facts, backend=backend)
            # The cosines of up to 13 pi.
            assert np.abs(loaded.scores(rows()) - expected).max() <= 1e-6 * 13 * np.pi
            np.testing.assert_array_equal(loaded.act(rows()), expected.argmax(1))
    for env in ("MountainCar-v0", "Acrobot-v1"):
        with pytest.raises(EnvironmentMismatchError):
            load_agent(path, env, facts=facts)


def test_an_exported_fqf_chooses_the_same(tmp_path: Path) -> None:
    torch.manual_seed(4)
    network = Fractions()
    path, target = network.save(tmp_path / "policy.pth"), str(tmp_path / "out.onnx")
    export(path, target, facts=AgentFacts(activations=("elu",), env="CartPole-v1"))
    runtime = pytest.importorskip("onnxruntime").InferenceSession(target)
    chosen = runtime.run(["action"], {"obs": rows()})[0][:, 0]
    np.testing.assert_array_equal(chosen, network.scores(rows()).argmax(1))


def test_a_copy_of_fqf_has_the_names_of_its_library(tmp_path: Path) -> None:
    """Its target, whose fractions are the online network's, is not compared alone."""
    torch.manual_seed(4)
    network, target = Fractions(), str(tmp_path / "out.pt")
    path, facts = network.save(tmp_path / "policy.pth"), AgentFacts(activations=("elu",))
    assert convert(path, target, to="torch", facts=facts).written
    np.testing.assert_array_equal(load_agent(target).act(rows()), network.scores(rows()).argmax(1))
    assert verify(path, target, facts=facts).within


@pytest.mark.parametrize("to", ["tianshou", "skrl"])
def test_networks_of_fractions_are_not_written(to: str, tmp_path: Path) -> None:
    path = Fractions().save(tmp_path / "policy.pth")
    facts = AgentFacts(activations=("elu",), env="CartPole-v1")
    with pytest.raises(UnsupportedError) as caught:
        convert(path, str(tmp_path / "out.pt"), to=to, facts=facts)
    assert caught.value.found == "proposed_fractions"


def test_fractions_of_iqn_are_drawn(tmp_path: Path) -> None:
    """The library draws them in evaluation too, so that no action is certain."""
    torch.manual_seed(4)
    network = Fractions(proposes=False)
    path, facts = network.save(tmp_path / "policy.pth"), AgentFacts(activations=("elu",))
    with pytest.raises(UnsupportedError) as caught:
        evaluate(path, "CartPole-v1", facts=facts)
    assert "--stochastic" in str(caught.value.hint)
    result = evaluate(path, "CartPole-v1", Protocol(episodes=3, stochastic=True), facts=facts)
    assert any("sample_size" in assumption for assumption in result.assumed)
    again = evaluate(path, "CartPole-v1", Protocol(episodes=3, stochastic=True), facts=facts)
    assert again.rollout.returns.tolist() == result.rollout.returns.tolist()


@pytest.fixture
def iqn(tmp_path: Path) -> tuple[str, AgentFacts, Fractions]:
    torch.manual_seed(4)
    network = Fractions(proposes=False)
    return network.save(tmp_path / "policy.pth"), AgentFacts(activations=("elu",)), network


@pytest.mark.parametrize("env", [None, "CartPole-v1"])
@pytest.mark.parametrize("backend", ["numpy", "torch", "tensorflow", "onnxruntime"])
def test_iqn_acts_with_drawn_fractions(
    iqn: tuple[str, AgentFacts, Fractions], backend: str, env: str | None
) -> None:
    if not plugins.find("backends", backend).available():
        pytest.skip(f"{backend} is not installed")
    path, facts, network = iqn
    with load_agent(path, env, facts=facts, backend=backend) as agent:
        assert any("sample_size" in assumption for assumption in agent.assumed)
        actions = agent.act(rows(), deterministic=False)
        draws = ActionSampler.stream(0)
        fractions = np.stack([draws.random(32) for _ in rows()]).astype("f4")
        np.testing.assert_array_equal(actions, network.scores(rows(), torch.from_numpy(fractions)).argmax(1))
        agent.seed(0)
        tensor = agent.act(torch.from_numpy(rows()), deterministic=False)
        np.testing.assert_array_equal(tensor.numpy(), actions)


@pytest.mark.parametrize("call", WITHOUT_DRAWING.values(), ids=WITHOUT_DRAWING)
def test_iqn_without_drawing_is_refused(
    iqn: tuple[str, AgentFacts, Fractions], call: Callable[[Any], Any]
) -> None:
    path, facts, _ = iqn
    with load_agent(path, facts=facts, backend="torch") as agent:
        for _ in range(2):
            with pytest.raises(UnsupportedError) as caught:
                call(agent)
            assert "deterministic=False" in str(caught.value.hint)


def test_iqn_draws_what_eval_draws(iqn: tuple[str, AgentFacts, Fractions]) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    path, facts, _ = iqn
    how = Protocol(episodes=1, seed=31, stochastic=True)
    (length,) = evaluate(path, "CartPole-v1", how, facts=facts).rollout.lengths
    env = gymnasium.make("CartPole-v1")
    with load_agent(path, "CartPole-v1", facts=facts) as agent:
        agent.seed(31)
        obs, _ = env.reset(seed=31)
        steps, over = 0, False
        while not over:
            action, _ = agent.predict(obs, deterministic=False)
            obs, _, terminated, truncated, _ = env.step(int(action))
            steps, over = steps + 1, terminated or truncated
    env.close()
    assert steps == length


def test_drawn_fractions_are_inputs_of_the_network(tmp_path: Path) -> None:
    torch.manual_seed(4)
    network = Fractions(proposes=False)
    path = network.save(tmp_path / "policy.pth")
    agent = restore_agent(path, facts=AgentFacts(activations=("elu",)))
    part = agent.playable("critic/q1")
    settings, _ = derive_network_settings(agent, ActionBounds((), (), None))
    settings, sampler = read_sampling(agent, part, settings, Protocol(stochastic=True))
    built = numpy_backend.build(policy_network(agent.tree, part, settings))
    streams = [np.random.default_rng(number) for number in range(len(rows()))]
    inputs = sampler.with_noise(rows(), streams)
    fractions = torch.from_numpy(inputs[NOISE]).float()
    assert 0 <= fractions.min() < 0.01 < 0.99 < fractions.max() <= 1
    expected = network.scores(rows(), fractions).argmax(1)
    outputs, _ = built.step({name: array.astype(np.float32) for name, array in inputs.items()})
    np.testing.assert_array_equal(outputs[:, 0], expected)


def bdq(path: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Write the state of BDQ's BranchingNet (utils/net/common.py); return the function of its values."""
    trunk, value = mlp(1)[:4], mlp(1, inputs=5)
    branches = [mlp(4, inputs=5) for _ in range(3)]
    parts = {"common__model": trunk, "value__model": value}
    parts |= {f"branches__{number}__model": branch for number, branch in enumerate(branches)}
    nets = ("policy__model", "model_old__module")
    torch.save(
        named(**{f"{n}__{p}": copy.deepcopy(net) for n in nets for p, net in parts.items()}).state_dict(),
        path,
    )

    def scores(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            common = trunk(torch.from_numpy(obs))
            values = torch.stack([branch(common) for branch in branches], 1)
            return (value(common)[:, None] + values - values.mean(2, keepdim=True)).numpy()

    return scores


def test_branches_choose_one_action_each(tmp_path: Path) -> None:
    torch.manual_seed(4)
    path, facts = tmp_path / "policy.pth", AgentFacts(activations=("elu",))
    expected = bdq(path)(rows())
    for backend in ("numpy", "torch"):
        loaded = load_agent(str(path), facts=facts, backend=backend)
        require_close(loaded.scores(rows()), expected.reshape(len(expected), -1))
        np.testing.assert_array_equal(loaded.act(rows()), expected.argmax(2))
    assert loaded.choices is not None
    assert loaded.choices.title == "MultiDiscrete([4, 4, 4])"
    with pytest.raises(EnvironmentMismatchError):
        load_agent(str(path), "CartPole-v1", facts=facts)


@pytest.mark.parametrize("to", ["torch", "tianshou", "onnx", pytest.param("tf", marks=pytest.mark.slow)])
def test_converted_branches_choose_the_same(to: str, tmp_path: Path) -> None:
    torch.manual_seed(4)
    path, target = tmp_path / "policy.pth", str(tmp_path / ("out.onnx" if to == "onnx" else "out.pt"))
    target = str(tmp_path / "out") if to == "tf" else target
    expected = bdq(path)(rows())
    facts = AgentFacts(activations=("elu",))
    assert convert(str(path), target, to=to, facts=facts, allow_missing=to == "tianshou").written
    np.testing.assert_array_equal(load_agent(target).act(rows()), expected.argmax(2))
    if to == "tianshou":
        first, second = (torch.load(file, weights_only=True) for file in (path, target))
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def tianshou_scores(state: Mapping[str, Any], obs: Any) -> Any:
    """Return what utils/net/common.py's Net with dueling_param computes from its state, in float64."""

    def run(x: Any, net: str, *, last: bool) -> Any:
        names = [
            name.removesuffix(".weight") for name in state if name.startswith(f"{net}.") and "weight" in name
        ]
        for name in names:
            x = x @ state[f"{name}.weight"].double().T + state[f"{name}.bias"].double()
            x = x if last and name == names[-1] else nn.functional.elu(x)
        return x

    common = run(obs.double(), "policy.model.model", last=False)
    advantages = run(common, "policy.model.Q", last=True)
    return advantages - advantages.mean(1, keepdim=True) + run(common, "policy.model.V", last=True)


@pytest.mark.parametrize(
    ("agent", "trunk"),
    [
        ("sb2-dueling", 0),
        ("tianshou-dueling-1.x", 2),
        pytest.param("tianshou-dueling-2.x", 2, marks=pytest.mark.slow),
    ],
    indirect=["agent"],
)
def test_a_dueling_agent_moves_to_tianshou(agent: Case, trunk: int, tmp_path: Path) -> None:
    """The layers that its streams share are written once; a dueling Net may have none."""
    target, source = str(tmp_path / "there.pt"), str(agent.path)
    assert convert(source, target, to="tianshou", facts=agent.facts, allow_missing=True).written
    state = torch.load(target, weights_only=True)
    names = {name for name in state if name.startswith("policy.model.model.") and name.endswith("weight")}
    assert len(names) == trunk
    own = {name.replace("policy.model", "model_old.module") for name in state if name.startswith("policy.")}
    assert own == {name for name in state if name.startswith("model_old.")}
    require_close(tianshou_scores(state, torch.from_numpy(rows())).numpy(), agent.scores(rows()))
    require_close(load_agent(target).scores(rows()), agent.scores(rows()))


@pytest.mark.parametrize("agent", ["tianshou-dueling-1.x"], indirect=True)
@pytest.mark.parametrize("to", ["sb3", "cleanrl", "skrl"])
def test_libraries_without_dueling_networks_refuse_them_by_name(agent: Case, to: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        convert(str(agent.path), str(tmp_path / "there"), to=to, facts=agent.facts)
    assert caught.value.found == "dueling"


def test_several_q_functions_without_their_configuration_are_refused(tmp_path: Path) -> None:
    """Outputs may be values or quantiles, which a lone file does not show."""
    path, alone = Path(d3rlpy("dqn", critics=2).saved(tmp_path)), tmp_path / "model.pt"
    alone.write_bytes(pickle.loads(path.read_bytes())["torch"])
    with pytest.raises(UnsupportedError) as caught:
        load_agent(str(alone), "CartPole-v1", facts=AgentFacts(activations=("tanh",)))
    assert "several" in str(caught.value.found)


def test_code_of_branches_chooses_the_same_actions(tmp_path: Path) -> None:
    bdq(tmp_path / "policy.pth")
    source, target, facts = (
        str(tmp_path / "policy.pth"),
        tmp_path / "out.pt",
        AgentFacts(activations=("elu",)),
    )
    convert(source, str(target), to="torch", code=str(tmp_path / "actor.py"), facts=facts)
    code = runpy.run_path(str(tmp_path / "actor.py"))
    obs = np.random.default_rng(0).normal(size=(100, 4)).astype("f4")
    actions = code["act"](code["load"](str(target)), obs)
    assert (actions == load_agent(source, facts=facts).act(obs)).all()
    assert len(np.unique(actions)) > 1
