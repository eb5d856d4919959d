"""Agents with discrete actions, with each library's own names: their scores, actions and conversions."""

from __future__ import annotations

import copy
import json
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
from tests.restored import recognised, without_a_way
from tests.test_format_d3rlpy import archive, written

torch = pytest.importorskip("torch")
nn = torch.nn

OBS, ACTIONS = 4, 2  # CartPole's


class Made(NamedTuple):
    """What a library saves, and the function of its scores."""

    saved: Any
    scores: Callable[[Any], Any]


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

    return Made(D3({"torch": archive(states), "config": json.dumps(settings)}), scores)


class D3(dict[str, Any]):
    """The entries of a `.d3` file."""


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
}
ELU = AgentFacts(activations=("elu",))


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
    if isinstance(made.saved, D3):
        path = Path(written(tmp_path / "agent.d3", **made.saved))
    else:
        torch.save(made.saved, path)

    def scores(obs: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(made.scores(torch.from_numpy(obs)))

    # d3rlpy's configuration states the activations.
    return Case(path, scores, NO_FACTS if isinstance(made.saved, D3) else ELU)


def double_biases(state: Any) -> None:
    for name, value in state.items() if isinstance(state, dict) else ():
        if str(name).endswith("bias"):
            value *= 2
        double_biases(value)


def rows() -> np.ndarray:
    return np.random.default_rng(1).normal(0, 2, size=(200, OBS)).astype(np.float32)


@pytest.mark.parametrize("agent", FAMILIES, indirect=True)
def test_an_agent_chooses_as_its_library_does(agent: Case) -> None:
    path, scores, facts = agent
    wanted = scores(rows())
    assert len(set(wanted.argmax(1))) == ACTIONS
    assert not without_a_way(path)
    found = load_agent(str(path), "CartPole-v1", facts=facts)
    np.testing.assert_allclose(found.scores(rows()), wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.act(rows()), wanted.argmax(1))
    assert not any(entry.what == "action bounds" for entry in restore_agent(str(path)).ledger)
    for env in ("MountainCar-v0", "Acrobot-v1", "InvertedPendulum-v5"):
        with pytest.raises(EnvironmentMismatchError):
            load_agent(str(path), env, facts=facts)


@pytest.mark.parametrize("agent", ["rl_games", "spinningup"], indirect=True)
def test_logits_give_the_probabilities_of_drawn_actions(agent: Case) -> None:
    path, scores, facts = agent
    found, obs = load_agent(str(path), facts=facts), rows()[:1]
    wanted = np.exp(scores(obs)[0])
    drawn = found.act(np.repeat(obs, 4000, axis=0), deterministic=False)
    shares = np.bincount(drawn, minlength=ACTIONS) / len(drawn)
    np.testing.assert_allclose(shares, wanted / wanted.sum(), atol=0.03)


@pytest.mark.parametrize("agent", ["skrl-ppo", "skrl-dqn", "d3rlpy-sac", "tianshou-dqn-2.x"], indirect=True)
def test_scores_that_may_be_no_logits_are_not_drawn_from(agent: Case) -> None:
    found = load_agent(str(agent.path), facts=agent.facts)
    with pytest.raises(UnsupportedError):
        found.act(rows(), deterministic=False)


@pytest.mark.parametrize("agent", ["tianshou-dueling-2.x"], indirect=True)
def test_streams_of_a_dueling_network_share_their_first_layers(agent: Case) -> None:
    """The library's module has them once: they are computed and trained once."""
    path, scores, facts = agent
    module = load_agent(str(path), facts=facts).networks("torch", "q")["q"]
    np.testing.assert_allclose(
        module(torch.from_numpy(rows())).detach(), scores(rows()), rtol=1e-5, atol=1e-6
    )
    stored = torch.load(path, weights_only=False)
    own = [each for name, each in stored.items() if not name.startswith("model_old")]
    arrays = sorted(each.detach().numpy().tobytes() for each in module.parameters())
    assert arrays == sorted(each.numpy().tobytes() for each in own)


@pytest.mark.parametrize("to", ["torch", "tf", "safetensors", "onnx"])
@pytest.mark.parametrize("agent", FAMILIES, indirect=True)
def test_a_converted_agent_chooses_the_same(agent: Case, to: str, tmp_path: Path) -> None:
    path, scores, facts = agent
    target = str(tmp_path / {"tf": "out"}.get(to, f"out.{to}"))
    assert convert(str(path), target, to=to, facts=facts).written
    found = load_agent(target, "CartPole-v1")
    np.testing.assert_allclose(found.scores(rows()), scores(rows()), rtol=1e-5, atol=1e-6)
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
