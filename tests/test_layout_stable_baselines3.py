"""Stable-Baselines3's agents: where every leaf goes, the same actions as plain torch, companions, writing."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.convert import convert
from ckpttool.conversion import agent_plan
from ckpttool.conversion.targets import parse_target_kind
from ckpttool.core import (
    CkpttoolError,
    FormatError,
    Leaf,
    Tree,
    UnsupportedError,
    UsageError,
    display,
    plugins,
    sidecar,
)
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import Agent, read_verified_sidecar, restore_agent, with_names
from ckpttool.formats import open_checkpoint, settings
from ckpttool.formats import sb3 as write
from ckpttool.libraries import recognize_tree, schema
from ckpttool.libraries import sb3 as stable_baselines3
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from ckpttool.networks import policy_network
from tests import sb3_files as sb3
from tests import warm_sb3
from tests.conftest import ROOT, in_process
from tests.golden_texts import Golden
from tests.test_layouts import LayoutContract

ZOO = ROOT / ".." / "shared" / "corpus" / "torch" / "sb3_zoo" / "ddpg"
NOBODY = ActionBounds((), (), "nobody")


def observations(size: int = sb3.OBS) -> np.ndarray:
    """Return 202 observations [202, size]: ordinary ones, large ones, zeros."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(150, size)), 100 * rng.normal(size=(50, size)), np.zeros((2, size))]
    return np.concatenate(parts).astype("f4")


def played(agent: Agent, obs: np.ndarray) -> np.ndarray:
    part = agent.runnable("actor")
    assert part is not None
    wiring, _ = derive_network_settings(agent, NOBODY)
    backend: Any = plugins.find("backends", "numpy").load()
    return np.asarray(backend.build(policy_network(agent.tree, part, wiring), "cpu").step(obs)[0])


def scaled(squashed: torch.Tensor) -> np.ndarray:
    """Return `BasePolicy.unscale_action` of common/policies.py."""
    low, high = (np.array(end, "f4") for end in (sb3.LOW, sb3.HIGH))
    return low + 0.5 * (squashed.detach().numpy() + 1.0) * (high - low)


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    scale = np.array(sb3.HIGH) - np.array(sb3.LOW)
    assert (np.abs(actual - expected) / scale).max() < 1e-6


class TestTD3(LayoutContract):
    name = "stable_baselines3"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(sb3.td3_agent(tmp_path / "agent.zip")).tree


class TestDDPG(LayoutContract):
    name = "stable_baselines3"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(sb3.td3_agent(tmp_path / "agent.zip", n_critics=1)).tree


class TestSAC(LayoutContract):
    name = "stable_baselines3"

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(sb3.sac_agent(tmp_path / "agent.zip")).tree


def agent_of(tmp_path: Path, module: nn.Module, policy: type, **more: Any) -> Agent:
    states = {"policy": module.state_dict()}
    return restore_agent(sb3.put(tmp_path / "a.zip", sb3.members(states, sb3.settings(policy, **more))))


def test_td3_acts_as_torch_does(tmp_path: Path) -> None:
    module = sb3.td3(activation=nn.Tanh)
    kwargs = {"net_arch": [5, 4], "activation_fn": nn.Tanh}
    agent = agent_of(tmp_path, module, sb3.TD3_POLICY, policy_kwargs=kwargs)
    obs = observations()
    close(played(agent, obs), scaled(module.actor.mu(torch.from_numpy(obs))))  # type: ignore[operator,union-attr]
    assert agent.known.is_read("activations")
    assert agent.known.origin("activations") == "data/policy_kwargs"
    assert agent.known.is_read("action_low")
    assert agent.known.origin("action_low") == "data/action_space"


@pytest.mark.parametrize("gsde", [False, True], ids=["plain", "gSDE"])
def test_sac_acts_by_its_squashed_mean(gsde: bool, tmp_path: Path) -> None:
    module: Any = sb3.sac(gsde=gsde)
    agent = agent_of(tmp_path, module, sb3.SAC_POLICY)
    obs = observations()
    mean = module.actor.mu(module.actor.latent_pi(torch.from_numpy(obs)))
    assert (mean.abs() == 2).any() == gsde
    close(played(agent, obs), scaled(mean.tanh()))


def test_another_limit_of_the_mean_is_not_played(tmp_path: Path, golden: Golden) -> None:
    kwargs = {"net_arch": [5, 4], "clip_mean": 3.0}
    agent = agent_of(tmp_path, sb3.sac(gsde=True), sb3.SAC_POLICY, policy_kwargs=kwargs)
    with pytest.raises(UnsupportedError) as caught:
        agent.runnable("actor")
    golden(caught.value)


def test_ppo_acts_by_its_limited_mean(tmp_path: Path) -> None:
    module: Any = sb3.ppo()
    with torch.no_grad():
        module.action_net.weight *= 4
    agent = agent_of(tmp_path, module, sb3.ON_POLICY)
    obs = observations()
    mean = module.action_net(module.mlp_extractor.policy_net(torch.from_numpy(obs)))
    expected = np.clip(mean.detach().numpy(), sb3.LOW, sb3.HIGH)
    close(played(agent, obs), expected)
    assert [part.title for part in agent.binding.parts] == ["actor", "value"]


@pytest.mark.parametrize("space", ["missing", "counts", "other"])
def test_an_unclear_space_of_discrete_actions_is_not_played(tmp_path: Path, space: str) -> None:
    spaces = {
        "missing": sb3.instance(sb3.DISCRETE, shape=()),
        "counts": sb3.instance(sb3.DISCRETE, n="two", shape=()),
        "other": pytest.importorskip("gymnasium").spaces.MultiBinary([2, 1]),
    }
    states = {"policy": sb3.ppo(act=2).state_dict()}
    data = sb3.settings(sb3.ON_POLICY, action_space=spaces[space])
    agent = restore_agent(sb3.put(tmp_path / "a.zip", sb3.members(states, data)))
    assert {part.component for part in agent.binding.parts} == {"actor", "value"}
    with pytest.raises(UnsupportedError) as caught:
        agent.runnable("actor")
    assert "discrete" in str(caught.value.found)


def test_discrete_actions_are_numbers_from_0_as_the_library_gives_them(tmp_path: Path) -> None:
    space = sb3.instance(sb3.DISCRETE, n=2, start=3, shape=())
    module: Any = sb3.ppo(act=2)
    data = sb3.settings(sb3.ON_POLICY, action_space=space)
    agent = restore_agent(sb3.put(tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, data)))
    obs = observations()
    scores = module.action_net(module.mlp_extractor.policy_net(torch.from_numpy(obs)))
    np.testing.assert_array_equal(played(agent, obs)[:, 0], scores.argmax(1).numpy())
    assert agent.known.choices is not None
    assert agent.known.is_read("choices")


def ars(tmp_path: Path, *, linear: bool = False, bias: bool = True, **kwargs: Any) -> tuple[Any, Agent]:
    """Return the action net of sb3_contrib/ars/policies.py and the agent of its file."""
    torch.manual_seed(5)
    sizes = (sb3.OBS, len(sb3.LOW)) if linear else (sb3.OBS, 5, len(sb3.LOW))
    net: Any = nn.Linear(*sizes, bias=bias) if linear else sb3.mlp(sizes, nn.ReLU, nn.Tanh)
    policy = sb3.stand_in(f"sb3_contrib.ars.policies.{'ARSLinearPolicy' if linear else 'ARSPolicy'}")
    data = sb3.settings(sb3.ON_POLICY, policy_kwargs=kwargs) | {"policy_class": str(policy)}
    states = {"policy": sb3.owner(action_net=net).state_dict()}
    path = sb3.put(tmp_path / "ars.zip", sb3.members(states, data))
    return net, restore_agent(path)


def test_ars_squashes_what_a_perceptron_gives(tmp_path: Path) -> None:
    # A policy of PPO would be tanh inside and limited outside.
    net, agent = ars(tmp_path)
    obs = observations()
    close(played(agent, obs), scaled(net(torch.from_numpy(obs))))


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_ars_limits_what_a_matrix_gives(bias: bool, tmp_path: Path) -> None:
    net, agent = ars(tmp_path, linear=True, bias=bias)
    obs = observations()
    expected = np.clip(net(torch.from_numpy(obs)).detach().numpy(), sb3.LOW, sb3.HIGH)
    close(played(agent, obs), expected)
    for to in ("torch", "tf", "keras"):
        assert convert(str(tmp_path / "ars.zip"), str(tmp_path / f"out_{to}"), to=to).report.complete


def test_ars_without_its_tanh_is_not_played(tmp_path: Path) -> None:
    _, agent = ars(tmp_path, squash_output=False)
    with pytest.raises(UnsupportedError):
        agent.runnable("actor")


def test_quantile_critics_have_a_place(tmp_path: Path) -> None:
    states = {"policy": sb3.sac(outputs=25).state_dict()}
    tree = open_checkpoint(
        sb3.put(tmp_path / "a.zip", sb3.members(states, sb3.settings(sb3.SAC_POLICY)))
    ).tree
    binding = recognize_tree(tree, "a.zip")
    assert binding is not None
    assert {part.title for part in binding.parts} >= {"critic/q1", "critic/q2", "critic_target/q2"}
    agent = canonical_tree(tree, binding.moves)
    shapes = {display(path): leaf.shape for path, leaf in agent.tensors()}
    assert shapes["critic/q2/1/kernel"] == (6, 25)


def test_images_of_unknown_bounds_are_not_played(tmp_path: Path, golden: Golden) -> None:
    image = sb3.instance(sb3.BOX, dtype=np.dtype("u1"), _shape=(1, 1, 3), low=np.zeros((1, 1, 3), "u1"))
    agent = agent_of(tmp_path, sb3.td3(), sb3.TD3_POLICY, observation_space=image)
    with pytest.raises(UnsupportedError) as caught:
        agent.runnable("actor")
    golden(caught.value)
    module: Any = sb3.td3()
    module.actor.features_extractor = sb3.owner(cnn=nn.Sequential(nn.Conv2d(1, 2, 3)))
    agent = agent_of(tmp_path, module, sb3.TD3_POLICY)
    with pytest.raises(UnsupportedError, match="features_extractor"):
        agent.runnable("actor")


@pytest.mark.parametrize("policy", [sb3.TD3_POLICY, sb3.ON_POLICY], ids=["TD3", "PPO"])
def test_a_features_extractor_of_dense_layers_is_not_guessed(policy: type, tmp_path: Path) -> None:
    module: Any = sb3.td3() if policy is sb3.TD3_POLICY else sb3.ppo()
    owner = module.actor if policy is sb3.TD3_POLICY else module
    owner.features_extractor = sb3.mlp((sb3.OBS, sb3.OBS), nn.ReLU)
    agent = agent_of(tmp_path, module, policy)
    with pytest.raises(UnsupportedError, match="features_extractor"):
        agent.runnable("actor")


def test_networks_that_no_layout_stores_keep_names_and_axes_between_files_of_pytorch(tmp_path: Path) -> None:
    # A matrix of [out, in] is not read as one of TensorFlow's.
    module: Any = sb3.td3()
    module.actor.features_extractor = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(36, sb3.OBS))
    state = module.state_dict()
    path = sb3.put(tmp_path / "a.zip", sb3.members({"policy": state}, sb3.settings(sb3.TD3_POLICY)))
    assert in_process("convert", path, tmp_path / "a.pt").status == 0
    policy = torch.load(tmp_path / "a.pt", weights_only=True)["policy"]
    assert policy.keys() == state.keys()
    assert all(torch.equal(policy[name], value) for name, value in state.items())


@pytest.mark.parametrize("net", ["q_net", "quantile_net"])
def test_a_features_extractor_of_a_q_network_is_not_left_out(net: str, tmp_path: Path) -> None:
    outputs = 2 if net == "q_net" else 10
    parts = [
        sb3.owner(**{net: sb3.mlp((sb3.OBS, 8, outputs), nn.ReLU), "features_extractor": extractor})
        for extractor in (nn.Linear(sb3.OBS, sb3.OBS), nn.Linear(sb3.OBS, sb3.OBS))
    ]
    module = sb3.owner(**dict(zip((net, f"{net}_target"), parts, strict=True)))
    data = sb3.settings(sb3.ON_POLICY, action_space=sb3.instance(sb3.DISCRETE, n=2, start=0, shape=()))
    agent = restore_agent(sb3.put(tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, data)))
    with pytest.raises(UnsupportedError) as caught:
        agent.playable(agent.title("actor"))
    assert "features_extractor" in str(caught.value.found)
    assert set(agent.binding.unplaced) == {"critic", "critic_target"}


@pytest.mark.parametrize(
    ("low", "high", "known"),
    [
        ("[-1.  0.]", "[2.  0.5]", True),
        ("[-1. ... 0.]", "[2. ... 0.5]", False),
        ("[-inf -inf]", "[inf inf]", False),
        ("[[-1.\n  0.]]", "[[2.\n  0.5]]", True),
        ("low", "high", False),
    ],
)
def test_bounds_are_read_as_text_too(low: str, high: str, known: bool, tmp_path: Path) -> None:
    contents = sb3.members({"policy": sb3.td3().state_dict()}, None)
    space = {":type:": "<class 'gymnasium.spaces.box.Box'>", "low": low, "high": high, "shape": [2]}
    contents["data"] = json.dumps({"action_space": space}).encode()
    binding = recognize_tree(open_checkpoint(sb3.put(tmp_path / "a.zip", contents)).tree, "a.zip")
    assert binding is not None
    bounds = (binding.facts.action_low, binding.facts.action_high)
    assert bounds == ((sb3.LOW, sb3.HIGH) if known else (None, None))


def test_counters_and_entropy_are_carried(tmp_path: Path, golden: Golden) -> None:
    tree = open_checkpoint(sb3.sac_agent(tmp_path / "a.zip")).tree
    binding = recognize_tree(tree, "a.zip")
    assert binding is not None
    agent = {display(path): leaf for path, leaf in canonical_tree(tree, binding.moves).items()}
    for name, expected in (("total_it", 250), ("num_timesteps", 1_000), ("temperature/log_alpha", -0.25)):
        leaf = agent[name]
        assert isinstance(leaf, Leaf)
        assert leaf.array().reshape(-1).tolist() == [expected]
    assert "actor/log_std/kernel" in agent
    assert "temperature_optimizer/step" in agent
    golden("\n".join(binding.moves.notes))


ORDERED = "!!python/object/apply:collections.OrderedDict\n- "


def beside(folder: Path, name: str, **settings: object) -> None:
    """Write a file of RL-Zoo, a dump of an OrderedDict."""
    pairs = "\n  ".join(f"- - {key}\n    - {json.dumps(value)}" for key, value in settings.items())
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"{ORDERED}{pairs}\n")


PLACES: dict[str, tuple[str, str]] = {
    "zoo": ("Pendulum-v1_3/Pendulum-v1.zip", "Pendulum-v1_3/Pendulum-v1/vecnormalize.pkl"),
    "zoo, best model": ("Pendulum-v1_3/best_model.zip", "Pendulum-v1_3/Pendulum-v1/vecnormalize.pkl"),
    "callback": ("rl_model_500_steps.zip", "rl_model_vecnormalize_500_steps.pkl"),
    "hub": ("sac-pendulum.zip", "vec_normalize.pkl"),
}


@pytest.mark.parametrize(("agent_file", "statistics"), PLACES.values(), ids=PLACES)
def test_statistics_are_found_where_they_are_put(agent_file: str, statistics: str, tmp_path: Path) -> None:
    for name in (agent_file, statistics):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    module: Any = sb3.td3()
    sb3.put(tmp_path / agent_file, sb3.members(sb3.states(module), sb3.settings(sb3.TD3_POLICY)))
    sb3.statistics(tmp_path / statistics)
    agent = restore_agent(str(tmp_path / agent_file))
    obs = observations()
    mean, var = np.linspace(-1, 1, sb3.OBS), np.linspace(0.5, 2, sb3.OBS)
    observed = np.clip((obs - mean) / np.sqrt(var + 1e-8), -5, 5).astype("f4")
    close(played(agent, obs), scaled(module.actor.mu(torch.from_numpy(observed))))
    name = Path(statistics).name
    assert agent.known.is_read("obs_norm")
    assert agent.known.origin("obs_norm") == name
    assert any(name in note for note in agent.notes)


def test_statistics_that_were_not_used(tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    sb3.statistics(tmp_path / "vec_normalize.pkl", norm_obs=False)
    beside(tmp_path / "agent", "config.yml", normalize=True)
    agent = restore_agent(path)
    assert agent.known.obs_norm is None
    assert not [entry for entry in agent.ledger if entry.use in ("not used", "cannot be known")]


OFF = [False, 0, 0.0, np.False_, np.int64(0), np.array(False), np.array([0], "u1")]


@pytest.mark.parametrize("stored", OFF, ids=repr)
def test_a_switch_that_is_off_in_any_type_is_off(stored: object, tmp_path: Path) -> None:
    """Observations that training did not normalise are not normalised, whatever the type of the switch."""
    path = sb3.td3_agent(tmp_path / "agent.zip")
    file = sb3.statistics(tmp_path / "vec_normalize.pkl", norm_obs=stored)
    agent = restore_agent(path)
    assert agent.known.obs_norm is None
    assert not [entry for entry in agent.ledger if entry.use in ("not used", "cannot be known")]
    with pytest.raises(UsageError) as refused:
        AgentFacts(obs_norm=file)
    assert refused.value.path == "norm_obs"


@pytest.mark.parametrize("stored", [True, 1, np.True_, np.array(1)], ids=repr)
def test_a_switch_that_is_on_in_any_type_is_on(stored: object, tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    file = sb3.statistics(tmp_path / "vec_normalize.pkl", norm_obs=stored)
    used = restore_agent(path).known.obs_norm
    assert used is not None
    assert AgentFacts(obs_norm=file).known["obs_norm"] == used


@pytest.mark.parametrize("stored", ["no", 2, -1, None, [True], np.array([0, 1]), float("nan")], ids=repr)
def test_a_switch_that_is_not_understood_is_neither(stored: object, tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    file = sb3.statistics(tmp_path / "vec_normalize.pkl", norm_obs=stored)
    agent = restore_agent(path)
    assert agent.known.obs_norm is None
    assert [entry.open for entry in agent.ledger if entry.what == "observation statistics"] == [True]
    with pytest.raises(UsageError) as refused:
        AgentFacts(obs_norm=file)
    assert refused.value.path == "norm_obs"


@pytest.mark.parametrize("number", [np.float64(2.5), np.float32(2.5), np.array(2.5), np.ones(1)], ids=repr)
def test_numbers_of_any_type_are_used(number: Any, tmp_path: Path) -> None:
    """A limit and an epsilon that are stored as NumPy's numbers replace the defaults."""
    path = sb3.td3_agent(tmp_path / "agent.zip")
    file = sb3.statistics(tmp_path / "vec_normalize.pkl", clip_obs=number, epsilon=number)
    used = restore_agent(path).known
    assert used.obs_norm is not None
    assert (used.obs_norm["clip"], used.obs_norm["epsilon"]) == (float(np.sum(number)),) * 2
    assert AgentFacts(obs_norm=file).known["obs_norm"] == used.obs_norm


@pytest.mark.parametrize("setting", ["clip_obs", "epsilon"])
@pytest.mark.parametrize("stored", ["5", [5.0, 5.0], np.ones(3), True], ids=repr)
def test_settings_that_are_not_understood_are_not_defaults(
    setting: str, stored: object, tmp_path: Path
) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    sb3.statistics(tmp_path / "vec_normalize.pkl", **{setting: stored})
    agent = restore_agent(path)
    assert agent.known.obs_norm is None
    assert [entry.open for entry in agent.ledger if entry.what == "observation statistics"] == [True]


def test_statistics_of_dict_observations_are_said(tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    rms = sb3.instance(sb3.MEAN_STD, mean=np.zeros(2), var=np.ones(2), count=1.0)
    sb3.statistics(tmp_path / "vec_normalize.pkl", obs_rms={"goal": rms})
    agent = restore_agent(path)
    assert agent.known.obs_norm is None
    assert any(entry.open and entry.what == "observation statistics" for entry in agent.ledger)


@pytest.mark.parametrize(
    ("normalize", "missing"),
    [
        (True, True),
        (False, False),
        ("{'norm_obs': False, 'norm_reward': True}", False),
        ("dict(gamma=1)", True),
        ({"norm_reward": False}, True),
        ({"norm_obs": False}, False),
    ],
)
def test_missing_statistics_are_said(normalize: object, missing: bool, tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    beside(tmp_path / "agent", "config.yml", normalize=normalize, n_timesteps=20_000)
    statistics = [e for e in restore_agent(path).ledger if e.what == "observation statistics"]
    assert [entry.open for entry in statistics] == [True] * missing


def test_nobody_telling_of_statistics_is_said(tmp_path: Path) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")

    def doubts() -> list[bool]:
        return [e.decides for e in restore_agent(path).ledger if e.what == "observation statistics"]

    assert doubts() == [False]
    # A file of another program is silent on it; the zoo's, which has no such key, is not.
    beside(tmp_path / "agent", "config.yml", learning_rate=0.1)
    assert doubts() == [False]
    beside(tmp_path / "agent", "config.yml", policy="MlpPolicy")
    assert doubts() == []


@pytest.mark.parametrize(
    ("facts", "env"),
    [
        ({"env": "Pendulum-v1", "env_kwargs": None}, "Pendulum-v1"),
        ({"env": "seals/Hopper-v1"}, "seals/Hopper-v1"),
        ({"env": "somebody.code:Thing-v0"}, None),
        ({"env": 3}, None),
    ],
)
def test_an_environment_is_a_plain_id_or_nothing(
    facts: dict[str, object], env: str | None, tmp_path: Path
) -> None:
    path = sb3.td3_agent(tmp_path / "agent.zip")
    beside(tmp_path / "agent", "args.yml", **facts)
    known = restore_agent(path).known
    assert known.env == ({"id": env} if env is not None else None)


def test_yaml_is_data_whatever_its_tags(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = (
        f"{ORDERED}- - a\n    - !!python/object/apply:os.system ['touch {marker}']\n"
        "  - - b\n    - !!python/name:os.getcwd\n  - - c\n    - [1, 2.5, yes, null, text]\n"
    )
    (tmp_path / "config.yml").write_text(text)
    tree = settings.read_yaml(str(tmp_path / "config.yml"))
    values = {display(path): leaf.value for path, leaf in tree.plain()}
    assert values == {
        "a/0": f"touch {marker}",
        "b": "",
        "c/0": 1,
        "c/1": 2.5,
        "c/2": True,
        "c/3": None,
        "c/4": "text",
    }
    assert not marker.exists()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(b)}: &{chr(b)} [{', '.join([f'*{chr(b - 1)}'] * 10)}]\n" for b in range(ord("b"), ord("j"))
)
BAD_YAML = {
    "aliases of aliases": BOMB,
    "aliases of nothing": BOMB.replace("x", "[]"),
    "an alias of itself": "a: &a [*a]",
    "deep": "[" * 5_000,
    "deep and closed": "[" * 500 + "]" * 500,
    "no YAML": "a: [1",
    "large": "a: 1\n" * 100_000,
    "a number that is none": "a: !!int x",
    "an empty number": 'a: !!float ""',
    "a sign alone": 'a: !!int "-"',
    "a truth that is none": "a: !!bool maybe",
    "base 60 beyond floats": f"a: {'1:' * 200}1.5",
    "base 60 beyond what Python prints": f"a: {'1:' * 4000}1",
    "a number that Python does not print": f"a: 0x{'f' * 5000}",
    "keys that are merged": "a: &x {b: 1}\nc: {<<: *x}\n",
    "a key of any length": f"{'k' * 201}: 1\n{'k' * 201}l: 2\n",
    "a pair whose key is a list": "? [1, 2]\n: 3\n",
}


def test_what_yaml_would_merge_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_text(BAD_YAML["keys that are merged"])
    with pytest.raises(FormatError):
        settings.read_yaml(str(tmp_path / "x.yml"))


@pytest.mark.parametrize("text", BAD_YAML.values(), ids=BAD_YAML)
def test_hostile_yaml_ends_soon(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_text(text)
    try:
        tree = settings.read_yaml(str(tmp_path / "x.yml"))
    except FormatError as error:
        assert error.file == str(tmp_path / "x.yml")  # noqa: PT017  # either outcome is right
    else:
        assert len(tree) <= 1


# Writing, which the library itself does.

needs_library = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("stable_baselines3"), reason="stable_baselines3 is absent"
)
# The library loads what we wrote, acts, and shows that its optimizers have their state.
REFEREE = """
import sys, json, numpy, stable_baselines3
answers = {}
for name, kind, path in json.loads(sys.argv[1]):
    model = getattr(stable_baselines3, kind).load(path, device="cpu")
    obs = numpy.load(sys.argv[2])
    state = model.critic.optimizer.state_dict()["state"]
    answers[name] = {
        "actions": model.predict(obs, deterministic=True)[0].tolist(),
        "steps": [int(each["step"]) for each in state.values()],
        "updates": model._n_updates,
        "timesteps": model.num_timesteps,
        "log_alpha": float(model.log_ent_coef) if kind == "SAC" else None,
    }
print(json.dumps(answers))
"""


@needs_library
def test_a_rate_below_zero_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sb3, "RATE", -1e-6)  # a linear schedule that ended late
    monkeypatch.setattr(write, "subprocess", warm_sb3.FORKING)
    source, again = sb3.td3_agent(tmp_path / "a.zip"), str(tmp_path / "again.zip")
    done = convert(source, again, to="sb3")
    assert any("-1e-06" in note for note in done.report.notes)
    for path in (source, again):
        tree = restore_agent(path).checkpoint.tree
        rates = [leaf.value for path, leaf in tree.plain() if display(path).endswith("param_groups/0/lr")]
        assert rates == [-1e-6, -1e-6]


@pytest.mark.parametrize(("rates", "named"), [((3e-4, 3e-4), 0), ((3e-4, 1e-2), 1), ((-1e-6, 3e-4), 2)])
def test_rates_that_one_setting_cannot_be_are_named(
    rates: tuple[float, ...], named: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, critic = rates

    def adam(module: nn.Module, step: int = 7) -> dict[str, Any]:
        state = plain_adam(module, step)
        state["param_groups"][0]["lr"] = actor if hasattr(module, "mu") else critic
        return state

    plain_adam = sb3.adam
    monkeypatch.setattr(sb3, "adam", adam)
    source = sb3.td3_agent(tmp_path / "a.zip")
    notes = convert(source, str(tmp_path / "again.zip"), to="sb3", dry_run=True).report.notes
    assert sum("learning rate of" in note for note in notes) == named


@needs_library
def test_the_library_loads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    monkeypatch.setattr(write, "subprocess", warm_sb3.FORKING)
    for name, kind, make in (("td3", "TD3", sb3.td3_agent), ("sac", "SAC", sb3.sac_agent)):
        source = make(tmp_path / f"{name}.zip")
        # By way of PyTorch's own form, so that nothing of the source file is left.
        convert(source, str(tmp_path / f"{name}.pt"), to="torch")
        done = convert(str(tmp_path / f"{name}.pt"), str(tmp_path / f"{name}_again.zip"), to="sb3")
        assert done.written, done.report
        requests.append((name, kind, str(tmp_path / f"{name}_again.zip")))
        before, after = (restore_agent(path).tree for path in (source, requests[-1][2]))
        assert before.keys() == after.keys()
        for path, leaf in before.tensors():
            other = after[path]
            assert isinstance(other, Leaf)
            assert bytes(leaf.read()) == bytes(other.read()), display(path)
    monkeypatch.undo()
    convert(str(tmp_path / "sac.pt"), str(tmp_path / "sac_twice.zip"), to="sb3")
    assert (tmp_path / "sac_again.zip").read_bytes() == (tmp_path / "sac_twice.zip").read_bytes()
    obs = observations()
    np.save(tmp_path / "obs.npy", obs)
    answers = warm_sb3.run_program(REFEREE, json.dumps(requests), str(tmp_path / "obs.npy"))
    for name, _, path in requests:
        answer = answers[name]
        close(played(restore_agent(path), obs), np.array(answer["actions"]))
        assert (set(answer["steps"]), answer["updates"], answer["timesteps"]) == ({7}, 250, 1_000)
    assert answers["sac"]["log_alpha"] == -0.25


def test_a_file_keeps_its_observation_space(tmp_path: Path) -> None:
    tree = open_checkpoint(sb3.td3_agent(tmp_path / "a.zip")).tree
    binding = recognize_tree(tree, "a.zip")
    assert binding is not None
    space = [leaf for path, leaf in tree.tensors() if "observation_space/" in tree.names[path]]
    assert space
    converted = apply_plan(
        tree, agent_plan.plan_agent_conversion(tree, binding, parse_target_kind("b.zip", "sb3"), {}, None)
    )
    ends = write.build_request(converted)["observation_space"]
    assert [dtype for dtype, _ in ends] == [space[0].dtype] * 2
    assert [[float(text) for text in numbers] for _, numbers in ends] == [
        leaf.array().tolist() for leaf in space[:2]
    ]


@pytest.mark.parametrize(("n_critics", "algorithm"), [(1, "DDPG"), (2, "TD3"), (3, "TD3")])
def test_one_critic_is_ddpg(n_critics: int, algorithm: str, tmp_path: Path) -> None:
    tree = open_checkpoint(sb3.td3_agent(tmp_path / "a.zip", n_critics=n_critics)).tree
    binding = recognize_tree(tree, "a.zip")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    built = apply_plan(agent, stable_baselines3.plan(binding, agent, {}))
    request = write.build_request(built)
    assert request["algorithm"] == algorithm
    assert request["policy_kwargs"] == {"net_arch": {"pi": [5, 4], "qf": [6]}, "n_critics": n_critics}
    assert request["obs_dim"] == sb3.OBS
    assert request["action_space"] == {"low": list(sb3.LOW), "high": list(sb3.HIGH)}


def test_without_the_library_a_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    source = sb3.td3_agent(tmp_path / "a.zip")
    with pytest.raises(CkpttoolError) as caught:
        convert(source, str(tmp_path / "b.zip"), to="sb3")
    golden(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.zip"]


def refused(tmp_path: Path, module: nn.Module, policy: type, **more: Any) -> str:
    states = {"policy": module.state_dict()}
    source = sb3.put(tmp_path / "a.zip", sb3.members(states, sb3.settings(policy, **more)))
    with pytest.raises(CkpttoolError) as caught:
        convert(source, str(tmp_path / "b.zip"), to="sb3", allow_missing=True)
    return str(caught.value)


def test_what_the_library_cannot_hold_is_refused(tmp_path: Path, golden: Golden) -> None:
    golden(refused(tmp_path, sb3.sac(outputs=25), sb3.SAC_POLICY))
    golden(refused(tmp_path, sb3.sac(gsde=True), sb3.SAC_POLICY))
    unbounded = sb3.box((-np.inf,) * 2, (np.inf,) * 2)
    golden(refused(tmp_path, sb3.td3(), sb3.TD3_POLICY, action_space=unbounded))


@pytest.mark.parametrize(
    "word", ["sb3", "cleanrl", "skrl", "spinningup", "rsl_rl", "tianshou", "rl_games", "elegantrl"]
)
def test_a_matrix_of_deviations_is_not_one_for_each_action(word: str, tmp_path: Path) -> None:
    module: Any = sb3.ppo()
    module.log_std = torch.nn.Parameter(torch.zeros(4, len(sb3.LOW)))
    settings = sb3.settings(sb3.ON_POLICY, use_sde=True)
    source = sb3.put(tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, settings))
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "b"), to=word, dry_run=True)
    assert caught.value.path == "actor/log_std"
    assert caught.value.expected == f"[{len(sb3.LOW)}]"
    assert convert(source, str(tmp_path / "b.pt"), to="torch").written
    kept = torch.load(tmp_path / "b.pt", weights_only=True)
    assert kept["actor"]["log_std"].shape == (4, len(sb3.LOW))


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0"])
def test_real_agents_return_what_they_did(name: str) -> None:
    path = ZOO / f"{name}_1" / f"{name}.zip"
    ran = in_process("eval", path, "--episodes", 6, "--seed", 1000, "--json")
    document = ran.json()
    assert document["env"] == name
    rows = json.loads((ZOO.parents[2] / "RETURNS.json").read_text())["runs"]
    row = next(r for r in rows if r["agent"].endswith(f"{name}.zip") and "sb3_zoo" in r["agent"])
    np.testing.assert_allclose(document["returns"], row["returns"][:6], atol=0.02)


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["Pendulum-v1", "MountainCarContinuous-v0", "LunarLanderContinuous-v2"])
def test_real_agents_act_as_torch_does(name: str) -> None:
    path = ZOO / f"{name}_1" / f"{name}.zip"
    with zipfile.ZipFile(path) as archive:
        weights = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
    agent = restore_agent(str(path))
    obs = observations(weights["actor.mu.0.weight"].shape[1])
    x, largest = torch.from_numpy(obs), 1.0
    for number in (0, 2, 4):
        x = nn.functional.linear(x, *(weights[f"actor.mu.{number}.{part}"] for part in ("weight", "bias")))
        largest = max(largest, float(x.abs().max()))
        x = x.relu() if number < 4 else x.tanh()
    low, high = (np.array(getattr(agent.known, f"action_{end}")) for end in ("low", "high"))
    expected = low + 0.5 * (x.numpy() + 1.0) * (high - low)
    # A sum of thousands is rounded by more than tanh's whole slope: the scale is that of the largest sum.
    assert (np.abs(played(agent, obs) - expected) / (high - low)).max() < 1e-6 * largest


# Whatever was pickled by an old Python or by gym is given: spaces by us, the rest is not needed to act.
ZOO_REFEREE = """
import json, sys, zipfile, gymnasium, numpy, stable_baselines3
answers = []
for path, obs_path, low, high in json.loads(sys.argv[1]):
    settings = json.loads(zipfile.ZipFile(path).read("data"))
    given = {k: None for k, v in settings.items() if isinstance(v, dict) and ":serialized:" in v}
    del given["policy_class"]
    obs = numpy.load(obs_path)
    given["observation_space"] = gymnasium.spaces.Box(-numpy.inf, numpy.inf, obs.shape[1:])
    given["action_space"] = gymnasium.spaces.Box(numpy.float32(low), numpy.float32(high))
    given |= {"learning_rate": 0.0, "train_freq": 1, "lr_schedule": lambda _: 0.0}
    given["policy_kwargs"] = {k: v for k, v in settings["policy_kwargs"].items() if k[0] != ":"}
    model = stable_baselines3.DDPG.load(path, device="cpu", custom_objects=given)
    answers.append(model.predict(obs, deterministic=True)[0].tolist())
print(json.dumps(answers))
"""


@needs_library
@pytest.mark.corpus
def test_real_agents_act_as_the_library_does(tmp_path: Path) -> None:
    agents, requests = [], []
    for name, width in (("Pendulum-v1", 3), ("MountainCarContinuous-v0", 2), ("LunarLanderContinuous-v2", 8)):
        path = ZOO / f"{name}_1" / f"{name}.zip"
        agent = restore_agent(str(path))
        obs = observations(width)
        np.save(tmp_path / f"{name}.npy", obs)
        agents.append((agent, obs))
        low, high = (list(getattr(agent.known, f"action_{end}")) for end in ("low", "high"))
        requests.append([str(path), str(tmp_path / f"{name}.npy"), low, high])
    answers = warm_sb3.run_program(ZOO_REFEREE, json.dumps(requests))
    for (agent, obs), answer in zip(agents, answers, strict=True):
        expected = np.array(answer)
        assert np.abs(expected).max() > 0.9
        # Sums of thousands, of which float32 keeps seven digits, meet tanh where it is steep.
        np.testing.assert_allclose(played(agent, obs), expected, atol=4e-5)


ALGORITHMS = """
import json, sys
import gymnasium, numpy as np, stable_baselines3 as sb3
from stable_baselines3.common.logger import configure
folder = sys.argv[1]
net = lambda: dict(policy_kwargs=dict(net_arch=[5, 4]))  # SAC changes what it is given
on = dict(n_steps=16, device="cpu", seed=0)
one = dict(batch_size=16, n_epochs=1)
off = dict(learning_starts=8, batch_size=8, device="cpu", seed=0, buffer_size=64)
made = {
    "ppo_box": sb3.PPO("MlpPolicy", "Pendulum-v1", **one, **net(), **on),
    "ppo_gsde": sb3.PPO("MlpPolicy", "Pendulum-v1", use_sde=True, **one, **net(), **on),
    "ppo_discrete": sb3.PPO("MlpPolicy", "CartPole-v1", **one, **net(), **on),
    "a2c_box": sb3.A2C("MlpPolicy", "Pendulum-v1", **net(), **on),
    "a2c_adam": sb3.A2C("MlpPolicy", "CartPole-v1", use_rms_prop=False, **net(), **on),
    "sac": sb3.SAC("MlpPolicy", "Pendulum-v1", **net(), **off),
    "sac_fixed": sb3.SAC("MlpPolicy", "Pendulum-v1", ent_coef=0.2, **net(), **off),
    "sac_gsde": sb3.SAC("MlpPolicy", "Pendulum-v1", use_sde=True, **net(), **off),
    "dqn": sb3.DQN("MlpPolicy", "CartPole-v1", **net(), **off),
    "td3": sb3.TD3("MlpPolicy", "Pendulum-v1", **net(), **off),
}
answer = {}
for name, model in made.items():
    model.set_logger(configure(folder, []))
    model.learn(16)
    model.save(f"{folder}/{name}.zip")
    policy, found = model.policy, {}
    optimizers = {"policy": policy.optimizer} if getattr(policy, "optimizer", None) else {}
    for part in ("actor", "critic"):
        if getattr(getattr(policy, part, None), "optimizer", None) is not None:
            optimizers[part] = getattr(policy, part).optimizer
    for owner, optimizer in optimizers.items():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state.get(parameter, {})
            slots = {k: v.detach().numpy().tolist() for k, v in state.items() if k != "step"}
            found[f"{owner}{len(found)}"] = [parameter.detach().numpy().tolist(), slots]
    answer[name] = list(found.values())
json.dump(answer, open(f"{folder}/answer.json", "w"))
print("null")
"""
_SLOTS_OF = {"exp_avg": "m", "exp_avg_sq": "v", "square_avg": "rms"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Agents that the library trained for a few steps, and every parameter with its moments there."""
    folder = tmp_path_factory.mktemp("sb3")
    warm_sb3.built(ALGORITHMS, folder)
    return folder, json.loads((folder / "answer.json").read_text())


ON_POLICY = ("ppo_box", "ppo_gsde", "ppo_discrete", "a2c_box", "a2c_adam")
OFF_POLICY = ("sac", "sac_fixed", "sac_gsde", "dqn", "td3")


@needs_library
@pytest.mark.parametrize("to", ["torch", "tf", "keras"])
@pytest.mark.parametrize("name", [*ON_POLICY, *OFF_POLICY])
def test_every_algorithm_converts_with_its_optimizer(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, name: str, to: str
) -> None:
    folder, answer = trained
    target = tmp_path / ("agent.weights.h5" if to == "keras" else "agent")
    done = convert(str(folder / f"{name}.zip"), str(target), to=to)
    assert done.written
    assert done.report.complete
    agent = restored_canonical(str(target))
    moments: dict[bytes, dict[str, np.ndarray]] = {}
    for path, leaf in agent.tensors():
        for optimizer in schema.OPTIMIZERS:
            if schema.is_trained_by(optimizer, path):
                slots = {
                    s: agent.get(schema.canonical_slot_path(optimizer, s, path)) for s in _SLOTS_OF.values()
                }
                arrays = {s: slot.array() for s, slot in slots.items() if isinstance(slot, Leaf)}
                moments.setdefault(leaf.array().tobytes(), {}).update(arrays)
    for weight, slots in answer[name]:
        value = np.array(weight, "f4")
        own = moments.get((value.T if value.ndim == 2 else value).copy().tobytes())
        own = own or moments.get(value.tobytes())
        if not slots:
            continue
        assert own is not None
        for reference, numbers in slots.items():
            expected = np.array(numbers, "f4")
            mine = own[_SLOTS_OF[reference]]
            assert np.array_equal(mine, expected) or np.array_equal(mine, expected.T)


def restored_canonical(path: str) -> Tree:
    """Return the whole canonical agent of a checkpoint that a conversion wrote."""
    checkpoint = open_checkpoint(path)
    known = read_verified_sidecar(checkpoint).sidecar
    binding = recognize_tree(checkpoint.tree, Path(path).name)
    assert binding is not None
    return canonical_tree(checkpoint.tree, with_names(binding, checkpoint.tree, known).moves)


# Policies without their algorithm, and spaces whose preprocessing no weights show.
ALONE = """
import json, sys
import gymnasium, numpy as np, stable_baselines3 as sb3, torch
from gymnasium import spaces
folder = sys.argv[1]

class Env(gymnasium.Env):
    def __init__(self, seen, acts):
        self.observation_space, self.action_space = seen, acts
    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}
    def step(self, action):
        return self.observation_space.sample(), 0.0, True, False, {}

vector = spaces.Box(-np.inf, np.inf, (5,), np.float32)
box = spaces.Box(np.array([-2, -1], np.float32), np.array([2, 3], np.float32))
image = spaces.Box(0, 255, (12, 12, 3), np.uint8)
off = dict(device="cpu", seed=0, buffer_size=16)
on = dict(device="cpu", seed=0, n_steps=16)
ppo = dict(batch_size=16, **on)
net = lambda **more: dict(net_arch=[8, 6], **more)
nn = torch.nn
made = {
    "ppo": sb3.PPO("MlpPolicy", Env(vector, box), policy_kwargs=net(activation_fn=nn.SiLU), **ppo),
    "a2c": sb3.A2C("MlpPolicy", Env(vector, spaces.Discrete(3)), policy_kwargs=net(), **on),
    "sac": sb3.SAC("MlpPolicy", Env(vector, box), policy_kwargs=net(activation_fn=nn.Tanh), **off),
    "td3": sb3.TD3("MlpPolicy", Env(vector, box), policy_kwargs=net(activation_fn=nn.ELU), **off),
    "dqn": sb3.DQN(
        "MlpPolicy", Env(vector, spaces.Discrete(3)), policy_kwargs=net(activation_fn=nn.Tanh), **off
    ),
    "cubes": sb3.PPO(
        "MlpPolicy", Env(spaces.Box(-1, 1, (2, 3, 4), np.float32), box), policy_kwargs=net(), **ppo
    ),
    "images": sb3.PPO("MlpPolicy", Env(image, box), policy_kwargs=net(), **ppo),
    "clipped": sb3.SAC(
        "MlpPolicy", Env(vector, box), use_sde=True, policy_kwargs=net(clip_mean=3.0), **off
    ),
}
obs = 2 * np.random.default_rng(0).normal(size=(64, 5)).astype("f4")
np.save(f"{folder}/obs.npy", obs)
answer = {}
for name, model in made.items():
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.copy_(1.5 * torch.randn_like(parameter) / max(1, parameter.shape[-1]) ** 0.5)
    model.save(f"{folder}/{name}.zip")
    model.policy.save(f"{folder}/{name}_save.pt")
    torch.save(model.policy.state_dict(), f"{folder}/{name}_state.pt")
    torch.save(model.policy, f"{folder}/{name}_whole.pt")
    if name in ("sac", "td3"):
        model.actor.save(f"{folder}/{name}_actor.pt")
    if name == "cubes":
        seen = np.random.default_rng(0).uniform(-1, 1, (64, 2, 3, 4)).astype("f4")
        np.save(f"{folder}/cubes.npy", seen)
    answer[name] = model.predict(seen if name == "cubes" else obs, deterministic=True)[0].tolist() if (
        name not in ("images", "clipped")
    ) else None
print(json.dumps(answer))
"""
STATED = {"ppo": "silu", "a2c": "tanh", "sac": "tanh", "td3": "elu", "dqn": "tanh"}
FORMS = [(name, form) for name in STATED for form in ("save", "state", "whole")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Policies that the library saved alone, and the actions that it computes."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, warm_sb3.built(ALONE, folder)


def acts(path: Path, obs: np.ndarray, facts: AgentFacts = NO_FACTS) -> tuple[np.ndarray, Agent]:
    """Return the actions [n, act] of a policy within the space of the fixture's agents."""
    agent = restore_agent(str(path), facts=facts)
    title = next(part.title for part in agent.binding.parts if part.acts)
    part = agent.playable(title)
    assert part is not None
    wiring, _ = derive_network_settings(agent, ActionBounds([-2.0, -1.0], [2.0, 3.0], "the space"))
    network = policy_network(agent.tree, part, wiring, agent.front(part.title))
    backend: Any = plugins.find("backends", "numpy").load()
    return np.asarray(backend.build(network, "cpu").step(obs, ())[0]), agent


@needs_library
@pytest.mark.parametrize(("name", "form"), [*FORMS, ("sac", "actor"), ("td3", "actor")])
def test_a_policy_alone_acts_as_the_library_does(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, name: str, form: str
) -> None:
    folder, answer = alone
    path, obs = folder / f"{name}_{form}.pt", np.load(folder / "obs.npy")
    expected = np.array(answer[name]).reshape(len(obs), -1)
    # A state_dict has no settings: its activations are left open until they are given, in every target.
    bare = form == "state"
    facts = AgentFacts(activations=STATED[name]) if bare else NO_FACTS
    actions, agent = acts(path, obs, facts)
    np.testing.assert_allclose(actions, expected, atol=2e-5)
    assert agent.binding.layout == "stable_baselines3"
    if bare:
        assert sidecar.has_open_entries(restore_agent(str(path)).ledger)
    else:
        assert not sidecar.has_open_entries(agent.ledger)
        assert agent.known.is_read("activations")
    for to in ("torch", "tf"):
        target = tmp_path / f"{to}.pt" if to == "torch" else tmp_path / to
        assert convert(str(path), str(target), to=to).written
        actions, agent = acts(target, obs, facts)
        np.testing.assert_allclose(actions, expected, atol=2e-5)
        assert sidecar.has_open_entries(restore_agent(str(target)).ledger) == bare


@needs_library
def test_observations_of_three_axes_that_are_no_images_are_flattened(
    alone: tuple[Path, dict[str, Any]],
) -> None:
    folder, answer = alone
    actions, _ = acts(folder / "cubes.zip", np.load(folder / "cubes.npy").reshape(64, -1))
    np.testing.assert_allclose(actions, answer["cubes"], atol=2e-5)


@needs_library
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("images", form) for form in (".zip", "_save.pt", "_whole.pt")),
        # The pickled module has noise matrices as well, which are reported as unmapped.
        *(("clipped", form) for form in (".zip", "_save.pt")),
    ],
)
def test_what_is_more_than_layers_is_not_played_of_a_target(
    alone: tuple[Path, dict[str, Any]], tmp_path: Path, name: str, form: str
) -> None:
    folder, _ = alone
    source = folder / f"{name}{form}"
    if name != "images":  # a policy that flattens these plays from its own file alone
        with pytest.raises(UnsupportedError):
            restore_agent(str(source)).playable("actor")
    for to, target in (("torch", "out.pt"), ("tf", "out"), ("safetensors", "out.safetensors")):
        assert convert(str(source), str(tmp_path / target), to=to).written
        with pytest.raises(UnsupportedError):
            restore_agent(str(tmp_path / target)).playable("actor")


def test_each_size_of_an_encoder_of_images_counts() -> None:
    kernels = [(32, 4, 8, 8), (64, 32, 4, 4), (48, 64, 3, 3), (512, 48 * 9 * 6)]
    fitting = [
        (number, axis)
        for number, kernel in enumerate(kernels)
        for axis, size in enumerate(kernel)
        if stable_baselines3.fits_nature_encoder(
            (4, 100, 76),
            [*kernels[:number], (*kernel[:axis], size + 1, *kernel[axis + 1 :]), *kernels[number + 1 :]],
        )
    ]
    assert stable_baselines3.fits_nature_encoder((4, 100, 76), kernels)
    assert not stable_baselines3.fits_nature_encoder((100, 76), kernels)
    assert fitting == [(3, 0)]  # only the number of features is free


def test_an_exported_model_keeps_the_action_space_and_what_is_left_open(tmp_path: Path) -> None:
    whole, bare = sb3.td3_agent(tmp_path / "a.zip"), tmp_path / "b.pt"
    torch.save(sb3.td3().state_dict(), bare)
    ends = [",".join(map(str, end)) for end in (sb3.LOW, sb3.HIGH)]
    for source, more, left_open in ((whole, (), False), (bare, ("--bounds", *ends), True)):
        target = tmp_path / f"{left_open}.onnx"
        ran = in_process("convert", source, target, "--to", "onnx", *more, cwd=tmp_path)
        assert ran.status == int(left_open), ran.err
        agent = restore_agent(str(target))
        assert sidecar.has_open_entries(agent.ledger) == left_open
        # The graph's last factor is no space: an environment with other bounds would be played silently.
        assert agent.known.origin("action_low").endswith(sidecar.OUTPUT_RANGE) == left_open
        assert agent.known.is_read("action_low")
