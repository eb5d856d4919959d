"""Stable-Baselines 2's agents: where every variable goes, the actions of NumPy by hand and of the library."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import Tree, UnsupportedError, attr, display, plugins
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import Agent, restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree
from ckpttool.libraries.schema import DISCRETE_CHOICE
from ckpttool.mapping.rules import canonical_tree
from ckpttool.networks import policy_network, q_network
from tests import sb3_files
from tests import test_format_stable_baselines2 as sb2
from tests.conftest import ROOT
from tests.golden_texts import Golden
from tests.pickles import instance, stand_in
from tests.test_layouts import LayoutContract

ZOO = ROOT / ".." / "shared" / "corpus" / "tf" / "sb2" / "zoo"
OBS, LOW, HIGH = 3, np.array([-1.0, 0.0], "f4"), np.array([2.0, 0.5], "f4")
ACT = len(LOW)
HIDDEN = ("fc0", "fc1")


def network(
    location: str, sizes: tuple[int, ...], last: tuple[str, ...], *, norm: bool = False
) -> dict[str, Any]:
    """Return a perceptron's variables in the order in which common/tf_layers.py, mlp, makes them."""
    generator = np.random.default_rng(zlib.crc32(location.encode()))
    arrays: dict[str, Any] = {}

    def dense(name: str, rows: int, columns: int) -> None:
        arrays[f"{location}/{name}/kernel:0"] = generator.normal(size=(rows, columns)).astype("f4")
        arrays[f"{location}/{name}/bias:0"] = generator.normal(size=columns).astype("f4")

    for number in range(len(sizes) - 2):
        dense(f"fc{number}", sizes[number], sizes[number + 1])
        if norm:
            scope = f"{location}/LayerNorm{f'_{number}' if number else ''}"
            arrays[f"{scope}/beta:0"] = generator.normal(size=sizes[number + 1]).astype("f4")
            arrays[f"{scope}/gamma:0"] = generator.normal(size=sizes[number + 1]).astype("f4")
    for name in last:
        dense(name, sizes[-2], sizes[-1])
    return arrays


def td3(*, norm: bool = False) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for top in ("model", "target"):
        arrays |= network(f"{top}/pi", (OBS, 5, 4, ACT), ("dense",), norm=norm)
        for q in ("qf1", "qf2"):
            arrays |= network(f"{top}/values_fn/{q}", (OBS + ACT, 5, 4, 1), (q,), norm=norm)
    return arrays


def sac() -> dict[str, Any]:
    arrays = network("model/pi", (OBS, 5, 4, ACT), ("dense", "dense_1"))
    arrays |= network("model/values_fn/vf", (OBS, 5, 4, 1), ("vf",))
    for q in ("qf1", "qf2"):
        arrays |= network(f"model/values_fn/{q}", (OBS + ACT, 5, 4, 1), (q,))
    arrays["model/log_ent_coef:0"] = np.float32(-1.5)
    return arrays | network("target/values_fn/vf", (OBS, 5, 4, 1), ("vf",))


def ddpg(**more: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for top in ("model", "target"):
        arrays |= network(f"{top}/pi", (OBS, 5, 4, ACT), ("pi",))
        critic = network(f"{top}/qf", (OBS, 5, 4, 1), ("qf_output",))
        # The action joins what the first layer gives.
        critic[f"{top}/qf/fc1/kernel:0"] = np.full((5 + ACT, 4), 0.1, "f4")
        arrays |= critic
    return arrays | more


POLICIES = {name: stand_in(f"stable_baselines.{name}.policies.MlpPolicy") for name in ("sac", "ddpg")}
POLICIES["td3"] = sb2.POLICY


def settings(kind: str, **more: Any) -> dict[str, Any]:
    ends = {"low": LOW, "high": HIGH}
    return {
        "policy": POLICIES[kind],
        "policy_kwargs": {"layers": [5, 4]},
        "observation_space": sb2.box(OBS, 8.0),
        "action_space": instance(sb2.BOX, dtype=np.dtype("f4"), shape=(ACT,), **ends),
        "gamma": 0.99,
        "_vectorize_action": False,
        **more,
    }


def put(folder: Path, variables: Mapping[str, Any], kind: str, **more: Any) -> str:
    with sb2.importable(sb2.BOX, *POLICIES.values()):
        data = sb2.serialized(settings(kind, **more))
    return sb2.put(folder, sb2.zipped(dict(variables), data))


def forward(variables: Mapping[str, Any], location: str, last: str, x: np.ndarray) -> np.ndarray:
    """Return a perceptron's output in float64, with layer norms where there are some."""
    for name in HIDDEN:
        x = x @ variables[f"{location}/{name}/kernel:0"].astype("f8") + variables[f"{location}/{name}/bias:0"]
        scope = f"{location}/LayerNorm{'_1' if name == 'fc1' else ''}"
        if f"{scope}/gamma:0" in variables:
            x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
            x = x * variables[f"{scope}/gamma:0"] + variables[f"{scope}/beta:0"]
        x = np.maximum(x, 0)
    return np.asarray(
        x @ variables[f"{location}/{last}/kernel:0"].astype("f8") + variables[f"{location}/{last}/bias:0"]
    )


def observations() -> np.ndarray:
    """Return 150 observations [150, OBS], ordinary, large, and zeros."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(120, OBS)), 20 * rng.normal(size=(29, OBS)), np.zeros((1, OBS))]
    return np.concatenate(parts).astype("f4")


def played(agent: Agent, obs: np.ndarray, title: str = "actor") -> np.ndarray:
    part = agent.runnable(title)
    assert part is not None
    wiring, _ = derive_network_settings(agent, ActionBounds((), (), "nobody"))
    backend: Any = plugins.find("backends", "numpy").load()
    return np.asarray(backend.build(policy_network(agent.tree, part, wiring), "cpu").step(obs)[0])


def close(actual: np.ndarray, last: np.ndarray) -> None:
    expected = LOW + 0.5 * (np.tanh(last) + 1) * (HIGH - LOW)
    assert (np.abs(actual - expected) / (HIGH - LOW)).max() < 2e-6


class Contract(LayoutContract):
    name = "stable_baselines2"

    def test_moments_have_their_weights_shape(self, tree: Tree) -> None:
        assert not any(leaf.role == "slot" for _, leaf in tree.tensors())


class TestTD3(Contract):
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(put(tmp_path, td3(), "td3")).tree


class TestDDPG(Contract):
    def test_canonical_kernels_are_in_by_out_and_connected(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        agent = canonical_tree(tree, binding.moves)
        kernels = {display(path): leaf.shape for path, leaf in agent.tensors() if path[-1].value == "kernel"}
        # The action joins at the second layer.
        assert [kernels[f"critic/q1/{n}/kernel"] for n in range(3)] == [(OBS, 5), (5 + ACT, 4), (4, 1)]

    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(put(tmp_path, ddpg(), "ddpg")).tree


class TestSAC(Contract):
    @pytest.fixture
    def tree(self, tmp_path: Path) -> Tree:
        return open_checkpoint(put(tmp_path, sac(), "sac")).tree


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "layer norm"])
def test_td3_acts_as_by_hand(norm: bool, tmp_path: Path) -> None:
    variables = td3(norm=norm)
    agent = restore_agent(put(tmp_path, variables, "td3"))
    obs = observations()
    close(played(agent, obs), forward(variables, "model/pi", "dense", obs))
    close(played(agent, obs, "actor_target"), forward(variables, "target/pi", "dense", obs))
    titles = [part.title for part in agent.binding.parts]
    assert titles == [
        "actor",
        "actor_target",
        "critic/q1",
        "critic/q2",
        "critic_target/q1",
        "critic_target/q2",
    ]
    assert agent.binding.unplaced == {}


def test_the_second_critic_is_itself(tmp_path: Path) -> None:
    variables = td3(norm=True)
    agent = restore_agent(put(tmp_path, variables, "td3"))
    part = agent.part("critic/q2")
    assert part is not None
    wiring, _ = derive_network_settings(agent, ActionBounds((), (), "nobody"))
    backend: Any = plugins.find("backends", "numpy").load()
    network = backend.build(q_network(agent.tree, part, wiring, OBS, ACT), "cpu")
    obs, action = observations(), np.tanh(observations()[:, :ACT])
    values = network.step({"obs": obs, "action": action})[0]
    expected = forward(variables, "model/values_fn/qf2", "qf2", np.concatenate([obs, action], -1))
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


def test_sac_acts_by_its_squashed_mean(tmp_path: Path) -> None:
    variables = sac()
    agent = restore_agent(put(tmp_path, variables, "sac"))
    obs = observations()
    close(played(agent, obs), forward(variables, "model/pi", "dense", obs))
    assert [part.title for part in agent.binding.parts][-2:] == ["value", "value_target"]


def test_ddpg_limits_observations(tmp_path: Path) -> None:
    variables = ddpg()
    agent = restore_agent(
        put(tmp_path, variables, "ddpg", observation_range=(-5.0, 5.0), normalize_observations=False)
    )
    obs = observations()
    assert np.abs(obs).max() > 5
    close(played(agent, obs), forward(variables, "model/pi", "pi", np.clip(obs, -5, 5)))
    assert agent.known.is_read("obs_norm")
    assert agent.known.origin("obs_norm") == "data/observation_range"


def test_ddpg_keeps_statistics_of_its_own(tmp_path: Path) -> None:
    sums = {"runningsum": np.array([10.0, -20.0, 0.0]), "runningsumsq": np.array([300.0, 90.0, 1e-3])}
    variables = ddpg(**{f"input/obs_rms/{name}:0": array for name, array in sums.items()})
    variables["input/obs_rms/count:0"] = np.float64(100)
    more = {"observation_range": (-5.0, 5.0), "normalize_observations": True}
    agent = restore_agent(put(tmp_path, variables, "ddpg", **more))
    mean = sums["runningsum"] / 100
    std = np.sqrt(np.maximum(sums["runningsumsq"] / 100 - mean**2, 1e-2))
    obs = observations()
    observed = np.clip((obs - mean) / std, -5, 5)
    close(played(agent, obs), forward(variables, "model/pi", "pi", observed))
    assert agent.known.is_read("obs_norm")
    assert agent.known.origin("obs_norm") == "input/obs_rms"


def test_statistics_of_the_environment_come_before_ddpgs_limits(tmp_path: Path) -> None:
    variables = ddpg()
    path = put(tmp_path, variables, "ddpg", observation_range=(-2.0, 2.0), normalize_observations=False)
    sb3_files.statistics(tmp_path / "vec_normalize.pkl")
    obs = observations()
    observed = (obs - np.linspace(-1, 1, OBS)) / np.sqrt(np.linspace(0.5, 2, OBS) + 1e-8)
    close(played(restore_agent(path), obs), forward(variables, "model/pi", "pi", np.clip(observed, -2, 2)))


def unnamed(folder: Path, variables: Mapping[str, Any], kind: str, times: int = 1, **more: Any) -> str:
    with sb2.importable(sb2.BOX, *POLICIES.values()):
        data = sb2.pickle.dumps((settings(kind, **more), list(variables.values()) * times), 4)
    return sb2.put(folder, data, "agent.pkl")


@pytest.mark.parametrize("times", [1, 2])
def test_variables_without_names_are_in_the_order_of_the_policy(
    times: int, tmp_path: Path, golden: Golden
) -> None:
    variables = sac()
    del variables["model/log_ent_coef:0"]
    agent = restore_agent(unnamed(tmp_path, variables, "sac", times))
    obs = observations()
    close(played(agent, obs), forward(variables, "model/pi", "dense", obs))
    golden("\n".join(agent.binding.moves.assumed))
    moved = {move.source for move in agent.binding.moves.moves} | agent.binding.consumed
    assert moved == set(agent.checkpoint.tree)


@pytest.mark.parametrize("change", ["another number of layers", "one more", "another copy", "another policy"])
def test_lists_that_do_not_fit_the_policy_are_no_agent(change: str, tmp_path: Path) -> None:
    variables = td3()
    if change == "another number of layers":
        path = unnamed(tmp_path, variables, "td3", policy_kwargs={"layers": [5]})
    elif change == "one more":
        path = unnamed(tmp_path, {**variables, "more": np.zeros(2, "f4")}, "td3")
    elif change == "another copy":
        more = {f"{name} again": array + 1 for name, array in variables.items()}
        path = unnamed(tmp_path, {**variables, **more}, "td3")
    else:
        path = unnamed(tmp_path, variables, "ddpg")
    assert recognize_tree(open_checkpoint(path).tree, "agent.pkl") is None


@pytest.mark.parametrize("target", ["torch", "keras", "tf"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_conversion_keeps_every_tensor(target: str, norm: bool, tmp_path: Path) -> None:
    """Keras knows the variables of a norm by the layer's name, which no layout gives it."""
    source = put(tmp_path, td3(norm=norm) if norm else sac(), "td3" if norm else "sac")
    name = tmp_path / {"torch": "a.pt", "keras": "a.weights.h5", "tf": "a"}[target]
    done = convert(source, str(name), to=target)
    assert done.written, done.report
    before, after = restore_agent(source).tree, restore_agent(done.target).tree
    assert before.keys() <= after.keys()
    for path, leaf in before.tensors():
        np.testing.assert_array_equal(after[path].array(), leaf.array())  # type: ignore[union-attr]


def test_variables_of_tensorflow_1_keep_their_names(tmp_path: Path) -> None:
    source, target = put(tmp_path, td3(), "td3"), tmp_path / "out"
    left = convert(source, str(target), to="tf1")
    assert {name.partition("/")[0] for name in left.report.unused} == {"data"}
    assert not left.written
    assert convert(source, str(target), to="tf1", allow_missing=True).written
    before, after = (open_checkpoint(item).tree.tensors() for item in (source, str(target)))
    assert {display(path): leaf.array().tobytes() for path, leaf in after} == {
        display(path): leaf.array().tobytes() for path, leaf in before
    }
    # Values and all, they are listed once.
    assert len(left.report.unused) + len(left.report.mapped) == len(open_checkpoint(source).tree)


def test_ddpg_critics_have_no_place_in_stable_baselines3(tmp_path: Path, golden: Golden) -> None:
    source = put(tmp_path, ddpg(), "ddpg")
    with pytest.raises(UnsupportedError) as caught:
        convert(source, str(tmp_path / "a.zip"), to="sb3", force=True)
    golden(caught.value)


# What the library itself answers: stable_baselines 2.10.2, TensorFlow 1.14, `Class.load(file).predict(obs)`.
SEEN = np.array([[1, 0, 0], [0.6, -0.8, 2.5], [-1, 0, -7], [0, 1, 0.25], [0.28, 0.96, -0.5]], "f4")
LIBRARY = {
    "td3_Pendulum-v0.pkl": (-1.0997148752, 1.9770431519, -1.9999960661, 1.9999971390, 1.7697291374),
    "sac_Pendulum-v0.pkl": (-0.7383061647, 1.9588541985, -1.6213335991, 1.7416508198, 1.3813169003),
    "ddpg_Pendulum-v0.pkl": (1.9999475479, 1.9999973774, -1.9999904633, 1.2236385345, -1.8099150658),
}


@pytest.mark.corpus
@pytest.mark.parametrize("name", LIBRARY)
def test_real_agents_act_as_the_library_does(name: str) -> None:
    agent = restore_agent(str(ZOO / name))
    actions = played(agent, SEEN).reshape(-1)
    np.testing.assert_allclose(actions, LIBRARY[name], atol=4e-6)


def normed(x: np.ndarray, beta: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
    return np.maximum(x * gamma + beta, 0)


@pytest.mark.corpus
def test_a_real_dqn_subtracts_the_mean_of_its_advantages() -> None:
    """The list: eps, action_value and state_value of the network, the same of its target."""
    path = ZOO / "dqn_CartPole-v1.pkl"
    agent = load_agent(str(path), "CartPole-v1")
    tensors = [leaf for path, leaf in open_checkpoint(str(path)).tree.tensors() if path[0] == attr("params")]
    arrays = [leaf.array().astype("f8") for leaf in tensors][1:]
    obs = np.random.default_rng(3).normal(size=(200, 4)).astype("f4")
    streams = []
    for w, b, beta, gamma, last, last_b in (arrays[:6], arrays[6:12]):
        streams.append(normed(obs @ w + b, beta, gamma) @ last + last_b)
    expected = streams[1] + streams[0] - streams[0].mean(1, keepdims=True)
    assert np.abs(agent.scores(obs) - expected).max() < 1e-6 * np.abs(expected).max()
    np.testing.assert_array_equal(agent.act(obs), expected.argmax(1))


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("acer_CartPole-v1.pkl", [0, 4, 10]),
        ("ppo2_CartPoleBulletEnv-v1.zip", [0, 4, 10]),
        ("acktr_Pendulum-v0.zip", [0, 4, 10]),
    ],
)
def test_real_on_policy_agents_act_by_their_policy(name: str, layers: list[int]) -> None:
    """`layers` are the positions of the kernels: pi_fc0, vf_fc0, pi_fc1, vf_fc1, vf, pi."""
    agent = restore_agent(str(ZOO / name))
    tensors = [
        leaf for path, leaf in open_checkpoint(str(ZOO / name)).tree.tensors() if path[0] != attr("data")
    ]
    arrays = [tensor.array().astype("f8") for tensor in tensors]
    obs = np.random.default_rng(3).normal(size=(200, len(arrays[0]))).astype("f4")
    x = obs
    for position in layers:
        x = x @ arrays[position] + arrays[position + 1]
        x = np.tanh(x) if position != layers[-1] else x
    if "Pendulum" in name:
        assert np.abs(x).max() > 2
        np.testing.assert_allclose(played(agent, obs), np.clip(x, -2, 2), atol=1e-5)
    else:
        np.testing.assert_array_equal(played(agent, obs).reshape(-1), x.argmax(1))


def on_policy(**kernels: tuple[int, int]) -> dict[str, Any]:
    """Return the variables of `linear` in common/tf_layers.py, for kernels of these shapes."""
    generator = np.random.default_rng(2)
    arrays: dict[str, Any] = {}
    for layer, shape in kernels.items():
        arrays[f"model/{layer}/w:0"] = generator.normal(size=shape).astype("f4")
        arrays[f"model/{layer}/b:0"] = generator.normal(size=shape[1]).astype("f4")
    return arrays


DISCRETE = stand_in("gym.spaces.discrete.Discrete")
BINARY = stand_in("gym.spaces.multi_binary.MultiBinary")


def put_choosing(folder: Path, variables: Mapping[str, Any], policy: str, space: Any = DISCRETE) -> str:
    kind = stand_in(policy)
    values = {"policy": kind, "observation_space": sb2.box(OBS, 8.0), "action_space": instance(space, n=ACT)}
    with sb2.importable(sb2.BOX, space, kind):
        return sb2.put(folder, sb2.zipped(dict(variables), sb2.serialized(values)))


COMMON = "stable_baselines.common.policies"


@pytest.mark.parametrize("layer", ["c1", "lstm1", "fc1"])
def test_policies_of_other_layers_are_refused_by_name(layer: str, tmp_path: Path) -> None:
    variables = on_policy(**{layer: (OBS, 5)}, vf=(5, 1), pi=(5, ACT), q=(5, ACT))
    with pytest.raises(UnsupportedError) as caught:
        load_agent(put_choosing(tmp_path, variables, f"{COMMON}.CnnPolicy"))
    assert layer in str(caught.value.found)


def test_binary_actions_are_refused(tmp_path: Path) -> None:
    variables = on_policy(pi_fc0=(OBS, 5), vf_fc0=(OBS, 5), vf=(5, 1), pi=(5, ACT), q=(5, ACT))
    agent = restore_agent(put_choosing(tmp_path, variables, f"{COMMON}.MlpPolicy", BINARY))
    assert agent.binding.unplaced["actor"] == (DISCRETE_CHOICE,)


def test_a_custom_policy_class_decides_the_actions(tmp_path: Path) -> None:
    variables = on_policy(pi_fc0=(OBS, 5), vf_fc0=(OBS, 5), vf=(5, 1), pi=(5, ACT), q=(5, ACT))
    (tmp_path / "a").mkdir()
    own = restore_agent(put_choosing(tmp_path, variables, f"{COMMON}.MlpPolicy"))
    custom = restore_agent(put_choosing(tmp_path / "a", variables, "utils.CustomPolicy"))
    assert not any(entry.what == "custom code" for entry in own.ledger)
    assert any(entry.what == "custom code" and entry.decides for entry in custom.ledger)


def test_a_list_that_fits_two_orders_is_no_agent(tmp_path: Path) -> None:
    """With hidden layers as wide as the observations, pairs of layers look like one network after another."""
    for width, layout in ((OBS, None), (OBS + 1, "stable_baselines2")):
        shapes = {"pi_fc0": (OBS, width), "vf_fc0": (OBS, width), "pi_fc1": (width, width)}
        shapes |= {"vf_fc1": (width, width), "vf": (width, 1), "pi": (width, ACT), "q": (width, ACT)}
        kind = stand_in(f"{COMMON}.MlpPolicy")
        values = {"policy": kind, "action_space": instance(DISCRETE, n=ACT)}
        with sb2.importable(DISCRETE, kind):
            data = sb2.pickle.dumps((values, list(on_policy(**shapes).values())), 4)
        binding = recognize_tree(open_checkpoint(sb2.put(tmp_path, data, "agent.pkl")).tree, "agent.pkl")
        assert (binding and binding.layout) == layout


def test_what_only_training_uses_is_left_out(tmp_path: Path) -> None:
    """As TRPO's copy of its last policy (trpo_mpi.py, `params`)."""
    shapes = {"pi_fc0": (OBS, 5), "vf_fc0": (OBS, 5), "vf": (5, 1), "pi": (5, ACT), "q": (5, ACT)}
    variables = on_policy(**shapes)
    variables |= {f"oldpi/{name}": array for name, array in variables.items()}
    path = put_choosing(tmp_path, variables, f"{COMMON}.MlpPolicy")
    done = convert(path, str(tmp_path / "a.pt"), to="torch")
    assert done.written
    assert not any("oldpi" in move.source or "/q/" in move.source for move in done.report.mapped)


@pytest.mark.parametrize("name", ["logstd", "log_std", "sigma"])
def test_a_deviation_in_the_scope_of_the_last_layer_is_no_part_of_it(name: str, tmp_path: Path) -> None:
    """As common/distributions.py, proba_distribution_from_latent, of PPO2, A2C, ACKTR and TRPO."""
    generator = np.random.default_rng(1)
    shapes = {"pi_fc0": (OBS, 5), "vf_fc0": (OBS, 5), "vf": (5, 1), "pi": (5, ACT), "q": (5, ACT)}
    arrays: dict[str, Any] = {}
    for layer, shape in shapes.items():
        arrays[f"model/{layer}/w:0"] = generator.normal(size=shape).astype("f4")
        arrays[f"model/{layer}/b:0"] = generator.normal(size=shape[1]).astype("f4")
    arrays[f"model/pi/{name}:0"] = generator.normal(size=(1, ACT)).astype("f4")
    path = sb2.put(tmp_path, sb2.zipped(arrays, b"{}"))
    done = convert(path, str(tmp_path / "a.pt"))
    assert done.written
    assert not done.report.unused
    moves = {move.source: move for move in done.report.mapped}
    assert moves["model/pi/w"].rule == "transpose"
    assert moves[f"model/pi/{name}"].rule == "keep"
