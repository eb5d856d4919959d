"""TF-Agents: agents and exported policies by the names of its attributes, and their actions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.core import Alias, FormatError, Leaf, Tree, UnsupportedError, display
from ckpttool.core.sidecar import NO_ACTIVATIONS, NO_BOUNDS, NO_STATISTICS
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.loaded_agent import load_agent
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint, settings, tf_common
from ckpttool.libraries import plan_torch, recognize_tree
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from tests import warm
from tests.golden_texts import Golden
from tests.restored import HIGH, LOW, actions, chosen, observations, q_values, recognised, same, without_a_way
from tests.tensorflow_agents import Arrays, aliased, layers, optimized, run, tensorflow_tree, written
from tests.test_layouts import LayoutContract
from tests.trees import attributes, leaf

LAYERS = [f"agent/_actor_network/_mlp_layers/{number}" for number in (1, 2, 3)]
ENCODER = [f"agent/_actor_network/_encoder/_postprocessing_layers/{number}" for number in (1, 2)]
PROJECTION = "agent/_actor_network/_projection_networks"
Q_FUNCTIONS = [
    f"agent/{name}" for name in ("_critic_network_1", "_critic_network_2", "_target_critic_network_1")
]


def joint(name: str) -> list[str]:
    return [f"{name}/_joint_layers/{number}" for number in (1, 2, 3)]


def critics() -> Arrays:
    return {key: array for name in Q_FUNCTIONS for key, array in layers(joint(name), (5, 8, 6, 1)).items()}


def scaled(squashed: np.ndarray) -> np.ndarray:
    """Return `scale_to_spec` of tf_agents/utils/common.py."""
    low, high = np.array(LOW, "f4"), np.array(HIGH, "f4")
    return (high + low) / 2 + (high - low) / 2 * squashed


def td3() -> Arrays:
    return layers(LAYERS, (3, 16, 12, 2)) | critics()


def sac() -> Arrays:
    """The one layer that is two: TanhNormalProjectionNetwork."""
    arrays = layers([*ENCODER, f"{PROJECTION}/_projection_layer"], (3, 16, 12, 4)) | critics()
    return arrays | {"agent/_log_alpha": np.float32(0.5).reshape(())}


def whole(arrays: Arrays) -> Tree:
    """Return what `file_listing.Checkpointer(agent=, policy=, global_step=)` saves."""
    actor = ["agent/_actor_network"]
    tree = optimized(
        tensorflow_tree(arrays), {"agent/_actor_optimizer": actor, "agent/_critic_optimizer": Q_FUNCTIONS[:2]}
    )
    counter = leaf(np.array(9, np.int64), "agent/_train_step_counter", role="counter")
    tree = Tree({**tree.leaves, attributes("agent/_train_step_counter"): counter})
    return aliased(tree, {"agent/_actor_network": "policy/_actor_network"})


class TestTd3(LayoutContract):
    name = "tf_agents"

    @pytest.fixture
    def tree(self) -> Tree:
        return whole(td3())


class TestSac(LayoutContract):
    name = "tf_agents"

    @pytest.fixture
    def tree(self) -> Tree:
        return whole(sac())


def test_actions_and_values_are_its_networks(tmp_path: Path) -> None:
    arrays = td3()
    path = written(whole(arrays), tmp_path / "ckpt-3")
    same(actions(path), scaled(np.tanh(run(arrays, LAYERS, observations()))))
    inputs = np.concatenate([observations(), chosen()], 1)
    for number, name in enumerate(Q_FUNCTIONS[:2], start=1):
        same(q_values(path, f"critic/q{number}"), run(arrays, joint(name), inputs))
    assert without_a_way(path) == []
    assert recognised(path).facts.lacks == (NO_BOUNDS, NO_ACTIVATIONS)


def test_the_mean_is_the_first_half(tmp_path: Path) -> None:
    arrays = sac()
    path = written(whole(arrays), tmp_path / "ckpt-3")
    both = run(arrays, [*ENCODER, f"{PROJECTION}/_projection_layer"], observations())
    same(actions(path), scaled(np.tanh(both[:, :2])))
    tree = open_checkpoint(path).tree
    agent = {display(p): f for p, f in canonical_tree(tree, recognised(path).moves).items()}
    kernel = arrays[f"{PROJECTION}/_projection_layer/kernel"]
    for name, half in (("2", slice(0, 2)), ("log_std", slice(2, 4))):
        weight, moment = agent[f"actor/{name}/kernel"], agent[f"actor_optimizer/v/{name}/kernel"]
        assert isinstance(weight, Leaf)
        assert isinstance(moment, Leaf)
        assert np.array_equal(weight.array(), kernel[:, half])
        assert np.array_equal(moment.array(), np.arange(48, dtype="f4").reshape(12, 4)[:, half])
    assert "temperature/log_alpha" in agent


def test_the_count_of_calls_since_a_target_update_is_kept(tmp_path: Path) -> None:
    tree, name = whole(td3()), "agent/_update_target/_counter"
    count = leaf(np.array(3, np.int64), name, role="counter")
    path = written(Tree({**tree.leaves, attributes(name): count}, tree.aliases), tmp_path / "ckpt-3")
    for to in ("torch", "sb3"):
        done = convert(path, str(tmp_path / f"{to}-1"), to=to, facts=AgentFacts(action_low=-1, action_high=1))
        residue = json.loads((tmp_path / f"{to}-1.ckpttool.json").read_text())["residue"]
        assert (done.report.unused, [row["path"] for row in residue if row["path"] == name]) == (
            (),
            [name],
        )
    for to in ("tf", "tf_agents"):
        convert(path, str(tmp_path / f"{to}-1"), to=to)
        assert open_checkpoint(str(tmp_path / f"{to}-1")).tree[attributes(name)].array() == 3


@pytest.mark.parametrize("outputs", [5, 991])
def test_an_odd_number_of_logits_is_not_halved(outputs: int) -> None:
    arrays = layers([*ENCODER, f"{PROJECTION}/_projection_layer"], (3, 16, 12, outputs))
    certain = {**arrays, "agent/_log_alpha": np.float32(0.5).reshape(())}
    assert recognize_tree(tensorflow_tree(certain), "ckpt-3") is None
    binding = recognize_tree(tensorflow_tree(arrays), "ckpt-3")
    assert binding is not None
    assert binding.facts.head == "argmax"


def test_one_projection_is_a_deviation_only_with_evidence() -> None:
    arrays = layers([*ENCODER, f"{PROJECTION}/_projection_layer"], (3, 16, 12, 4))
    value = layers([f"agent/_value_net/_postprocessing_layers/{n}" for n in (1, 2)], (3, 16, 1))
    chooses = recognize_tree(tensorflow_tree(arrays | value), "ckpt-3")
    assert chooses is not None
    assert chooses.facts.head == "argmax"
    assert not any("_projection_layer" in line for line in chooses.moves.assumed)
    alone = recognize_tree(tensorflow_tree(arrays), "ckpt-3")
    assert alone is not None
    assert any("_projection_layer" in line for line in alone.moves.assumed)
    certain = recognize_tree(tensorflow_tree(sac()), "ckpt-3")
    assert certain is not None
    assert not any("_projection_layer" in line for line in certain.moves.assumed)


@pytest.mark.parametrize("beside", ["agent/_train_step_counter", "agent/_optimizer/iter"])
def test_an_agent_that_is_not_sac_chooses_with_one_projection(beside: str) -> None:
    arrays = layers([*ENCODER, f"{PROJECTION}/_projection_layer"], (3, 16, 12, 4))
    binding = recognize_tree(tensorflow_tree(arrays | {beside: np.int64(3).reshape(())}), "ckpt-3")
    assert binding is not None
    assert binding.facts.head == "argmax"


def test_a_deviation_of_its_own_layer_is_a_branch(tmp_path: Path) -> None:
    mean, std = (f"{PROJECTION}/_{name}_projection_layer" for name in ("means", "stddev"))
    arrays = layers([*ENCODER, mean], (3, 16, 12, 2)) | layers([std], (12, 2))
    path = written(whole(arrays), tmp_path / "ckpt-3")
    same(actions(path), scaled(np.tanh(run(arrays, [*ENCODER, mean], observations()))))
    binding = recognised(path)
    assert [name for name, _ in binding.parts[0].branches] == ["std"]
    agent = canonical_tree(open_checkpoint(path).tree, binding.moves)
    again = recognize_tree(apply_plan(agent, plan_torch(binding, agent, {})), "agent.pt")
    assert again is not None
    assert [name for name, _ in again.parts[0].branches] == ["std"]


def test_the_action_joins_encoded_observations(tmp_path: Path) -> None:
    critic = ["agent/_critic_network/_observation_layers/1", *joint("agent/_critic_network")[:2]]
    arrays = layers(LAYERS, (3, 16, 12, 2)) | layers(critic[:1], (3, 8)) | layers(critic[1:], (10, 6, 1))
    path = written(whole(arrays), tmp_path / "ckpt-3")
    encoded = np.maximum(run(arrays, critic[:1], observations()), 0)
    same(q_values(path), run(arrays, critic[1:], np.concatenate([encoded, chosen()], 1)))


@pytest.mark.parametrize(
    ("critic", "widths"),
    [
        (["_observation_layers/1", "_action_layers/1", "_joint_layers/1"], [(3, 2), (2, 5), (7, 1)]),
        (["_sequential_layers/4/_sequential_layers/0", "_sequential_layers/5"], [(5, 8), (8, 1)]),
    ],
    ids=["action layers", "sequential"],
)
def test_critics_that_are_no_chain_are_not_run(
    critic: list[str], widths: list[tuple[int, int]], tmp_path: Path, golden: Golden
) -> None:
    arrays = layers(LAYERS, (3, 16, 12, 2))
    for name, sizes in zip(critic, widths, strict=True):
        arrays |= layers([f"agent/_critic_network/{name}"], sizes)
    path = written(whole(arrays), tmp_path / "ckpt-3")
    assert actions(path).shape == (120, 2)
    with pytest.raises(UnsupportedError) as caught:
        q_values(path)
    golden(caught.value)


def test_images_are_not_run(tmp_path: Path) -> None:
    conv = {"agent/_actor_network/_mlp_layers/0/kernel": np.zeros((3, 3, 3, 4), "f4")}
    path = written(whole(td3() | conv), tmp_path / "ckpt-3")
    with pytest.raises(UnsupportedError, match="_mlp_layers/0/kernel"):
        actions(path)


def test_moments_without_a_list_of_variables_go_by_name(tmp_path: Path) -> None:
    # Keras 2.11 to 2.15 numbers them, and TF-Agents hands its critics' variables over as a set.
    tree = tensorflow_tree(td3())
    named = {path: f.name or tree.names[path].removeprefix("agent/_") for path, f in tree.tensors()}
    leaves = {p: leaf(f.array(), f.key, name=named[p]) for p, f in tree.tensors()}
    mine = [path for path in leaves if tree.names[path].startswith(tuple(Q_FUNCTIONS[:2]))]
    for number, path in enumerate(reversed(mine)):
        name = f"agent/_critic_optimizer/_momentums/{number}"
        moment = np.full(leaves[path].shape, number, "f4")
        leaves[attributes(name)] = leaf(moment, name, role="slot", slot="m", name=f"Adam/m/{named[path]}")
    binding = recognize_tree(Tree(leaves), "ckpt-3")
    assert binding is not None
    owners = {binding.of[path] for path in binding.of}
    assert owners == set(mine)
    assert all(leaves[slot].shape == leaves[of].shape for slot, of in binding.of.items())


def normalizer(arrays: Arrays) -> Arrays:
    generator = np.random.default_rng(4)
    top = "agent/_observation_normalizer"
    return arrays | {
        f"{top}/_count/0": np.full(3, 64, "f4"),
        f"{top}/_avg/0": generator.normal(size=3).astype("f4"),
        f"{top}/_m2/0": generator.uniform(10, 900, size=3).astype("f4"),
        f"{top}/_m2_carry/0": np.zeros(3, "f4"),
    }


def test_ppo_sees_normalised_observations(tmp_path: Path) -> None:
    names = [
        name.replace("_actor_network", "_actor_net")
        for name in (*ENCODER, f"{PROJECTION}/_means_projection_layer")
    ]
    values = [
        f"agent/_value_net/{name}" for name in ("_encoder/_postprocessing_layers/1", "_postprocessing_layers")
    ]
    arrays = normalizer(layers(names, (3, 16, 12, 2)) | layers(values, (3, 8, 1)))
    path = written(tensorflow_tree(arrays), tmp_path / "ckpt-3")
    mean, m2 = (arrays[f"agent/_observation_normalizer/{name}/0"].astype("f8") for name in ("_avg", "_m2"))
    observed = np.clip((observations() - mean) / np.sqrt(m2 / 64 + 1e-3), -5, 5).astype("f4")
    same(actions(path), scaled(np.tanh(run(arrays, names, observed))))
    binding = recognised(path)
    assert {part.title: len(part.layers) for part in binding.parts} == {"actor": 3, "value": 2}
    assert NO_ACTIVATIONS in binding.facts.lacks


def test_moving_averages_are_statistics_too_and_others_are_missed(tmp_path: Path) -> None:
    top = "agent/_observation_normalizer"
    moving = {f"{top}/_{name}_moving_avg/0": np.full(3, 2, "f4") for name in ("mean", "var")}
    path = written(tensorflow_tree(td3() | moving), tmp_path / "ckpt-3")
    observed = np.clip((observations() - 2) / np.sqrt(2 + 1e-3), -5, 5).astype("f4")
    same(actions(path), scaled(np.tanh(run(td3(), LAYERS, observed))))
    binding = recognize_tree(tensorflow_tree(td3() | {f"{top}/_scale/0": np.ones(3, "f4")}), "ckpt-3")
    assert binding is not None
    assert NO_STATISTICS in binding.facts.lacks


SPECS = r"""
dict_value {
  fields {
    key: "collect_data_spec"
    value { named_tuple_value { name: "Trajectory"
      values { key: "action" value { bounded_tensor_spec_value {
        name: "action"  # a comment
        shape { dim { size: 2 } } dtype: DT_FLOAT
        minimum { dtype: DT_FLOAT tensor_shape { dim { size: 2 } } MINIMUM }
        maximum: < dtype: DT_FLOAT; tensor_shape { dim { size: 2 } }
                   tensor_content: "\000\000\000@\000\000@@" >
      } } }
    } }
  }
}
"""


def exported(folder: Path, minimum: str) -> str:
    """Write a policy as PolicySaver does: variables as a list, and its own attributes below `_all_assets`."""
    arrays = {
        name.replace("agent/", "_all_assets/"): array for name, array in td3().items() if "critic" not in name
    }
    tree = tensorflow_tree(arrays)
    lists = {
        path: (Alias(attributes(f"_all_assets/_actor_network/variables/{n}"), None),)
        for n, path in enumerate(tree)
    }
    path = written(Tree(tree.leaves, lists), folder / "variables" / "variables")
    (folder / "policy_specs.pbtxt").write_text(SPECS.replace("MINIMUM", minimum))
    return path


@pytest.mark.parametrize(
    ("minimum", "low"),
    [
        (r'tensor_content: "\000\000\000\300\000\000\200\277"', (-2.0, -1.0)),
        ("float_val: -2.5 float_val: -1", (-2.5, -1.0)),
        ("float_val: -2", (-2.0, -2.0)),
    ],
)
def test_the_specs_beside_a_policy_tell_the_bounds(
    minimum: str, low: tuple[float, ...], tmp_path: Path
) -> None:
    path = exported(tmp_path / "policy", minimum)
    agent = restore_agent(path)
    assert (agent.known.action_low, agent.known.action_high) == (list(low), [2.0, 3.0])
    assert agent.known.is_read("action_high")
    assert agent.known.origin("action_high") == "policy_specs.pbtxt"
    (note,) = agent.notes
    assert note.startswith("../policy_specs.pbtxt ")
    same(
        actions(path, low, (2.0, 3.0))[:, 1:],
        ((3 + low[1]) / 2 + (3 - low[1]) / 2 * np.tanh(run(td3(), LAYERS, observations())))[:, 1:],
    )


@pytest.mark.parametrize("location", ["_all_assets/0/ref", "_all_assets/0/ref/_actor_network"])
def test_an_export_that_lists_its_attributes_is_a_policy(location: str, tmp_path: Path) -> None:
    arrays = {name.replace("agent/_actor_network", "model_variables/A"): a for name, a in td3().items()}
    mine = tensorflow_tree({name: array for name, array in arrays.items() if "critic" not in name})
    path = written(aliased(mine, {"model_variables/A": location}), tmp_path / "variables")
    same(actions(path), scaled(np.tanh(run(td3(), LAYERS, observations()))))


@pytest.mark.parametrize("minimum", ["float_val: inf", 'tensor_content: "abc"', "", 'float_val: "x"'])
def test_specs_that_say_no_bounds_tell_none(minimum: str, tmp_path: Path) -> None:
    agent = restore_agent(exported(tmp_path / "policy", minimum))
    assert agent.known.action_low is None


@pytest.mark.parametrize(
    "text", ["a {", "a: }", '"x"', "a: 'x", "a {" * 90, "\0", "a { b: 1 >>>", "x" * (1 << 21)], ids=range(8)
)
def test_what_is_no_text_of_a_message_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "policy_specs.pbtxt"
    file.write_text(text)
    with pytest.raises(FormatError):
        tf_common.read(str(file))


def test_a_message_is_read(tmp_path: Path) -> None:
    file = tmp_path / "x.pbtxt"
    file.write_text('a: 1 a: -2.5 b { c: "\\x41\\102\\n" } d: TRUE e <> # done')
    assert tf_common.read(str(file)) == {"a": [1, -2.5], "b": [{"c": ["AB\n"]}], "d": ["TRUE"], "e": [{}]}


SAVED = """
import sys
import tensorflow as tf

class Dense(tf.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = tf.Variable(tf.random.normal((inputs, outputs)))
        self.bias = tf.Variable(tf.zeros(outputs))

class Policy(tf.Module):
    def __init__(self, hidden):
        super().__init__()
        self._wrapped_policy = tf.Module()
        self._wrapped_policy._actor_network = network = tf.Module()
        network._mlp_layers = [Dense(3, 8), Dense(8, 8), Dense(8, 1)]
        self._train_step = tf.Variable(1)
        self.hidden = hidden

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec([None])])
    def action(self, observation, reward):
        x = observation
        *layers, last = self._wrapped_policy._actor_network._mlp_layers
        for layer in layers:
            x = self.hidden(x @ layer.kernel + layer.bias)
        return {"action": 2 * tf.tanh(x @ last.kernel + last.bias) + 0 * tf.reduce_sum(reward)}

for hidden in (tf.tanh, tf.nn.relu, tf.nn.elu):
    policy = Policy(hidden)
    tf.saved_model.save(policy, sys.argv[1] + "/" + hidden.__name__, signatures={"action": policy.action})
"""


@pytest.mark.tensorflow
def test_the_graph_of_an_exported_policy_overrules_the_habit(tmp_path: Path) -> None:
    status, output = warm.run(
        "tensorflow", f"import sys\nsys.argv = ['', {str(tmp_path)!r}]{SAVED}", tmp_path
    )
    assert status == 0, output
    for hidden in ("tanh", "relu", "elu"):
        agent = restore_agent(str(tmp_path / hidden))
        assert agent.binding.layout == "tf_agents"
        assert agent.known.activations == [hidden] * 2
        assert str(agent.known.provenance["activations"]).startswith("read")


def test_a_gin_configuration_beside_the_agent_is_named(tmp_path: Path) -> None:
    path = written(whole(sac()), tmp_path / "ckpt-3")
    text = "# Parameters:\nActorDistributionNetwork.activation_fn = \\\n    @tf.keras.activations.tanh\n"
    (tmp_path / "operative_config-0.gin").write_text(text)
    entries = [row for row in restore_agent(str(path)).ledger if row.what == "activation" and row.open]
    assert [entry.where.partition(":")[0] for entry in entries] == ["operative_config-0.gin"]


def test_values_of_a_gin_configuration() -> None:
    text = (
        "a/b.C.x = (1, 2)\nC.y = @m.ReLU()\nC.z = %lr\nlr = 3e-4\nC = 2\nno line\nD.s = 'of D'  # a comment\n"
        "D.on = False\nD.count = 0\n"
    )
    assert settings.parse_gin(text) == {"C": 2, "lr": 3e-4, "D": {"s": "of D", "on": False, "count": 0}}
    assert settings.parse_gin(text.replace("C = 2\n", ""))["C"] == {"x": [1, 2], "y": "ReLU"}


PREPROCESSED = """
import sys
import tensorflow as tf

class Dense(tf.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.kernel = tf.Variable(tf.random.normal((inputs, outputs)))
        self.bias = tf.Variable(tf.zeros(outputs))

def agent(before):
    made = tf.Module()
    made._q_network = network = tf.Module()
    network._encoder = encoder = tf.Module()
    if before is not None:
        encoder._flat_preprocessing_layers = before
    encoder._postprocessing_layers = [tf.Module(), Dense(4, 8), Dense(8, 6)]
    network._q_value_layer = Dense(6, 2)
    return made

for name, before in (("none", None), ("dense", [Dense(4, 4)]), ("function", [tf.Module()])):
    made = agent(before)
    tf.train.Checkpoint(agent=made).write(f"{sys.argv[1]}/{name}/ckpt-1")
    top = tf.Module()
    top._all_assets = made
    tf.saved_model.save(top, f"{sys.argv[1]}/{name}/saved")
"""


@pytest.mark.tensorflow
def test_preprocessing_layers_are_refused_also_without_variables(tmp_path: Path) -> None:
    """networks/encoding_network.py: an agent with a Lambda of them was played without it."""
    program = f"import sys\nsys.argv = ['', {str(tmp_path)!r}]{PREPROCESSED}"
    status, output = warm.run("tensorflow", program, tmp_path)
    assert status == 0, output
    facts = AgentFacts(activations=("relu",))
    for name in ("none", "dense", "function"):
        for location in ("ckpt-1", "saved"):
            path = str(tmp_path / name / location)
            if name == "none":
                load_agent(path, "CartPole-v1", facts=facts).close()
                continue
            with pytest.raises(UnsupportedError) as caught:
                load_agent(path, "CartPole-v1", facts=facts)
            assert "preprocessing" in str(caught.value.found)


def test_an_actor_that_counts_from_another_number_is_refused(tmp_path: Path) -> None:
    """networks/categorical_projection_network.py counts from 0, and tf_policy.py limits that to the spec."""
    path = exported(tmp_path / "policy", "")
    number = "{ dtype: DT_INT32 tensor_shape { } int_val: %d }"
    spec = f"shape {{ }} dtype: DT_INT32 minimum {number % 1} maximum {number % 2}"
    value = f'key: "action" value {{ bounded_tensor_spec_value {{ {spec} }} }}'
    specs = (
        'dict_value { fields { key: "collect_data_spec" value { named_tuple_value { name: "Trajectory" '
        f"values {{ {value} }} }} }} }} }}"
    )
    (tmp_path / "policy" / "policy_specs.pbtxt").write_text(specs)
    agent = restore_agent(path)
    assert any("from 1" in sentence for sentence in agent.binding.unplaced["actor"])
