"""Agents with discrete actions, with each library's own names: their scores, actions and conversions."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.evidence import NO_FACTS, AgentFacts
from ckpttool.commands.load_agent import load_agent
from ckpttool.commands.restore import restore_agent
from ckpttool.commands.verify import verify
from ckpttool.core import EnvironmentMismatchError, UnsupportedError
from tests import test_format_stable_baselines2 as sb2
from tests.pickles import importable, instance, stand_in
from tests.restored import recognised, without_a_way
from tests.test_format_d3rlpy import archive, written

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
    made = nn.Sequential(*layers)
    for weight in made.parameters():
        weight.data *= 2.5  # so that every action is the best of some observations
    return made


def named(**parts: Any) -> Any:
    """Return a module with these modules; dots lead into modules, as underscores twice."""
    top = nn.Module()
    for name, part in parts.items():
        *above, last = name.split("__")
        owner = top
        for step in above:
            if not hasattr(owner, step):
                setattr(owner, step, nn.Module())
            owner = getattr(owner, step)
        setattr(owner, last, part)
    return top


def tianshou(kind: str, version: str) -> Made:
    """Return the state of policy/modelfree/{dqn,c51,qrdqn}.py (2.x: algorithm/modelfree)."""
    each = {"dqn": 1, "c51": 11, "qrdqn": 9}[kind]
    net, target = mlp(ACTIONS * each), mlp(ACTIONS * each)
    atoms = torch.linspace(-3, 7, 11)
    where = ("policy__model__model__model", "model_old__module__model__model")
    names = where if version == "2.x" else ("model__model__model", "model_old__model__model")
    state = named(**dict(zip(names, (net, target), strict=True))).state_dict()
    if kind == "c51":
        state["policy.support" if version == "2.x" else "support"] = atoms
    if kind == "qrdqn":
        state["tau_hat"] = torch.linspace(0.05, 0.95, 9).view(1, -1, 1)

    def scores(obs: Any) -> Any:
        found = net(obs).view(len(obs), ACTIONS, -1)
        return (found.softmax(2) * atoms).sum(2) if kind == "c51" else found.mean(2)

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
        seen = ((obs - mean) / (var.sqrt() + 1e-8)).clamp(-5, 5).float() if scaled else obs
        return nets[names[0]].net(seen)

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
        seen = ((obs - mean) / (var + 1e-5).sqrt()).clamp(-5, 5).float()
        return network.logits(network.actor_mlp(seen))

    return Made({"model": state, "epoch": 1, "frame": 2, "env_state": None}, scores)


def spinningup() -> Made:
    """Return the state of ppo/core.py, MLPActorCritic, with discrete actions."""
    logits = mlp(ACTIONS)
    return Made(named(pi__logits_net=logits, v__v_net=mlp(1)).state_dict(), logits)


def d3rlpy(kind: str, q_function: str = "mean") -> Made:
    """Return the entries of a `.d3` file: the modules' states, and the configuration."""
    each = {"mean": 1, "qr": 9}[q_function]
    names = {"discrete_bc": ("imitator",), "discrete_sac": ("policy", "q_funcs__0", "q_funcs__1")}.get(
        kind, ("q_funcs__0", "targ_q_funcs__0")
    )
    heads = []
    for _ in names:
        net = mlp(ACTIONS * each)
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
        found = heads[0]._fc(heads[0]._encoder._layers(obs))
        return found.view(len(obs), ACTIONS, each).mean(2)

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
            found = {f"{name}:0": array for name, array in variables.items()}
            return sb2.put(folder, sb2.zipped(found, sb2.serialized(settings)))

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
    for weight in (each for net in (trunk, *heads.values()) for each in net.parameters()):
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


FAMILIES: Mapping[str, Callable[[], Made]] = {
    **{
        f"tianshou-{kind}-{version}": lambda kind=kind, version=version: tianshou(kind, version)  # type: ignore[misc]
        for kind in ("dqn", "c51", "qrdqn")
        for version in ("1.x", "2.x")
    },
    "tianshou-dueling-1.x": lambda: dueling_tianshou("1.x"),
    "tianshou-dueling-2.x": lambda: dueling_tianshou("2.x"),
    "skrl-dqn": lambda: skrl("dqn"),
    "skrl-ppo": lambda: skrl("ppo", scaled=True),
    "rl_games": lambda: rl_games(separate=False),
    "rl_games-separate": lambda: rl_games(separate=True),
    "spinningup": spinningup,
    "d3rlpy-dqn": lambda: d3rlpy("dqn"),
    "d3rlpy-qr": lambda: d3rlpy("double_dqn", "qr"),
    "d3rlpy-cql": lambda: d3rlpy("discrete_cql"),
    "d3rlpy-bc": lambda: d3rlpy("discrete_bc"),
    "d3rlpy-sac": lambda: d3rlpy("discrete_sac"),
    "rllib-dqn": lambda: rllib_dqn(dueling=False),
    "rllib-dueling": lambda: rllib_dqn(dueling=True),
    "rllib-c51": lambda: rllib_dqn(dueling=False, atoms=11),
    "rllib-dueling-c51": lambda: rllib_dqn(dueling=True, atoms=11),
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
    made = FAMILIES[request.param]()
    path = tmp_path / "agent.pt"
    if callable(made.saved):
        path = Path(made.saved(tmp_path))
    else:
        torch.save(made.saved, path)

    def scores(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(made.scores(torch.from_numpy(obs)))

    return Case(path, scores, made.facts)


def double_biases(state: Any) -> None:
    for name, value in state.items() if isinstance(state, dict) else ():
        if str(name).endswith("bias"):
            value *= 2
        double_biases(value)


def rows() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, size=(200, OBS)).astype(np.float32)


def require_close(found: np.ndarray, wanted: np.ndarray) -> None:
    """Assert equal scores, relative to the largest: a dueling network subtracts numbers of that size."""
    assert np.abs(found - wanted).max() <= 1e-6 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("agent", FAMILIES, indirect=True)
def test_an_agent_chooses_as_its_library_does(agent: Case) -> None:
    path, scores, facts = agent
    wanted = scores(rows())
    assert len(set(wanted.argmax(1))) == ACTIONS
    assert not without_a_way(path)
    for backend in ("numpy", "torch"):
        found = load_agent(str(path), "CartPole-v1", facts=facts, backend=backend)
        require_close(found.scores(rows()), wanted)
        np.testing.assert_array_equal(found.act(rows()), wanted.argmax(1))
    assert not any(entry.what == "action bounds" for entry in restore_agent(str(path)).ledger)
    for env in ("MountainCar-v0", "Acrobot-v1", "InvertedPendulum-v5"):
        with pytest.raises(EnvironmentMismatchError):
            load_agent(str(path), env, facts=facts)


@pytest.mark.parametrize("to", ["torch", "tf", "safetensors", "onnx"])
@pytest.mark.parametrize("agent", FAMILIES, indirect=True)
def test_a_converted_agent_chooses_the_same(agent: Case, to: str, tmp_path: Path) -> None:
    path, scores, facts = agent
    target = str(tmp_path / {"tf": "out"}.get(to, f"out.{to}"))
    # The settings of Stable-Baselines 2 have no place in a file of its own framework, whose names stay.
    settings = to == "tf" and path.suffix in (".zip", ".pkl")
    if settings and path.suffix == ".pkl":
        assert not convert(str(path), target, to=to, facts=facts).written
        return
    assert convert(str(path), target, to=to, facts=facts, allow_missing=settings).written
    found = load_agent(target, "CartPole-v1")
    require_close(found.scores(rows()), scores(rows()))
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


def test_a_dueling_network_of_noisy_layers_is_not_played_without_them(tmp_path: Path) -> None:
    """Rainbow's trunk alone could have the outputs of an action."""
    state = named(model__model__model=mlp(2)[:1], model_old__model__model=mlp(2)[:1]).state_dict()
    streams = [f"{net}.{stream}" for net in ("model", "model_old") for stream in "QV"]
    state |= {f"{stream}.model.0.mu_W": torch.ones(3, 7) for stream in streams}
    state["support"] = torch.linspace(-3, 7, 7)
    torch.save(state, tmp_path / "policy.pth")
    assert recognised(tmp_path / "policy.pth").layout == "tianshou"
    with pytest.raises(UnsupportedError) as caught:
        load_agent(str(tmp_path / "policy.pth"))
    assert "dueling" in str(caught.value.found)
