"""What is known of an agent: its sidecar first, then its files, then habits; how that becomes an action."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import Inline, Leaf, Sidecar, Tree, attr
from ckpttool.evaluation import restore
from ckpttool.evaluation.restore import select_network_leaves
from ckpttool.libraries import AgentMetadata, ObservationNormalizer, recognize_tree
from ckpttool.networks import Affine, Clip, NetworkSettings, numpy_backend, policy_network, value_network
from ckpttool.networks.build import HEADS
from tests.test_layouts import gaussian_agent, torch_agent
from tests.trees import leaf, torch_tree

FACTS = AgentMetadata("tanh", "relu", 1e-5)


def vector(*values: float, dtype: str = "float64") -> Leaf:
    return leaf(np.asarray(values, dtype))


def test_a_fact_that_a_file_says_is_no_habit() -> None:
    binding = recognize_tree(torch_agent(["l1", "l2", "l3"]), "agent")
    assert binding is not None
    facts = binding.facts.read("data/spaces", action_low=(-2.0,), action_high=(2.0,)).read("args", env="A-v1")
    tree = select_network_leaves(torch_agent(["l1", "l2", "l3"]), binding)
    read = restore.read_metadata(replace(binding, facts=facts), tree)
    assert (read.action_low, read.action_high, read.env) == ([-2.0], [2.0], {"id": "A-v1"})
    assert read.is_read("action_low")
    assert read.origin("action_low") == "data/spaces"
    assert read.is_read("env")
    assert read.origin("env") == "args"
    assert read.is_assumed("head")
    assert read.origin("head").endswith("td3_torch")


SAID = {"head": "read from x"}
GUESSED = {"head": "assumed: y"}


@pytest.mark.parametrize(
    ("record", "read", "expected"),
    [
        (Sidecar("", head="clip", provenance=SAID), Sidecar("", head="tanh", provenance=SAID), "clip"),
        (Sidecar("", head="clip"), Sidecar("", head="tanh", provenance=SAID), "clip"),
        (Sidecar("", head="clip", provenance=GUESSED), Sidecar("", head="tanh", provenance=SAID), "tanh"),
        (Sidecar("", head="clip", provenance=GUESSED), Sidecar("", head="tanh", provenance=GUESSED), "clip"),
        (Sidecar(""), Sidecar("", head="tanh", provenance=GUESSED), "tanh"),
        (None, Sidecar("", head="tanh", provenance=GUESSED), "tanh"),
    ],
)
def test_who_is_believed(record: Sidecar | None, read: Sidecar, expected: str) -> None:
    metadata = restore.merge_metadata(record, read)
    assert metadata.head == expected
    assert ("head" in metadata.provenance) == bool(record is None or record.provenance or expected == "tanh")


numbers = st.floats(-100, 100, width=32)
variances = st.floats(1e-4, 1e4)


@given(
    st.lists(st.tuples(numbers, variances), min_size=1, max_size=4),
    st.sampled_from([0.0, 1e-8, 1e-2]),
    st.booleans(),
    st.booleans(),
)
def test_every_form_of_statistics_is_one_form(
    pairs: list[tuple[float, float]], epsilon: float, outside: bool, by_std: bool
) -> None:
    mean, var = (np.asarray(column) for column in zip(*pairs, strict=True))
    stored = {"std": leaf(np.sqrt(var))} if by_std else {"var": leaf(var)}
    fact = restore._statistics_fact(
        ObservationNormalizer(leaf(mean), epsilon=epsilon, outside=outside, **stored)
    )
    assert fact is not None
    x = np.linspace(-3, 3, len(pairs))
    expected = (x - mean) / (np.sqrt(var) + epsilon if outside else np.sqrt(var + epsilon))
    got = (x - np.asarray(fact["mean"])) / np.sqrt(np.asarray(fact["var"]) + fact["epsilon"])
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def test_the_weights_own_action_map_gives_the_bounds_and_comes_back() -> None:
    tree = torch_agent(["l1", "l2", "l3"])
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    agent = select_network_leaves(tree, binding)
    scale, bias = (attr("actor"), attr("action_scale")), (attr("actor"), attr("action_bias"))
    act = 2
    other_tree = Tree({**agent, scale: vector(*[3.0] * act), bias: vector(*[1.0] * act)})
    read = restore.read_metadata(binding, other_tree)
    assert (read.action_low, read.action_high) == ([-2.0] * act, [4.0] * act)
    assert read.is_read("action_low")
    assert read.origin("action_low") == "weights"
    bounds = restore.action_map(read, agent)
    assert [bounds[path].array().tolist() for path in (scale, bias)] == [[3.0] * act, [1.0] * act]
    assert restore.action_map(read, other_tree) == {}
    assert restore.action_map(Sidecar(""), agent) == {}


def apply(layers: list[object], x: np.ndarray) -> np.ndarray:
    for layer in layers:
        if isinstance(layer, Affine):
            x = x * layer.scale + layer.shift
        elif isinstance(layer, Clip):
            x = np.clip(x, layer.low, layer.high)
        else:
            x = np.tanh(x)
    return x


def test_what_each_head_makes_of_the_last_layer() -> None:
    low, high = np.asarray([-1.0, 0.0], np.float32), np.asarray([2.0, 4.0], np.float32)
    x = np.linspace(-4, 4, 18, dtype=np.float32).reshape(-1, 2)
    by_hand = {
        "tanh": np.tanh(x) * high[0],
        "affine": low + (np.tanh(x) + 1) / 2 * (high - low),
        "identity": x,
        "unit_tanh": np.tanh(x),
        "clip": np.clip(x, low, high),
        "clip_affine": low + (np.clip(x, -1, 1) + 1) / 2 * (high - low),
        "tanh_clip_affine": low + (np.clip(np.tanh(x) * high[0], -1, 1) + 1) / 2 * (high - low),
        "clip_tanh_affine": low + (np.tanh(np.clip(x, -2, 2)) + 1) / 2 * (high - low),
    }
    assert by_hand.keys() == HEADS.keys()
    for name, expected in by_hand.items():
        np.testing.assert_allclose(apply(HEADS[name](low, high), x), expected, rtol=1e-6, atol=1e-6)


def test_a_gaussian_policys_other_head_is_carried_and_not_played() -> None:
    rng = np.random.default_rng(0)

    def layer(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
        weights = rng.normal(size=(rows, columns)).astype("f4")
        return {f"{name}.weight": weights, f"{name}.bias": np.zeros(rows, "f4")}

    actor = {**layer("l1", 4, 3), **layer("l2", 4, 4), **layer("mu", 2, 4), **layer("log_std", 2, 4)}
    copies = {f"{top}/{name}": array for top in ("actor", "actor_target") for name, array in actor.items()}
    tree = torch_tree({**copies, "log_alpha": np.zeros(1, "f4")})
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    part = binding.parts[0]
    assert [layer.name for layer in part.layers] == [("l1",), ("l2",), ("mu",)]
    assert [name for name, _ in part.branches] == ["log_std"]
    assert {move.source for move in binding.moves.moves} == set(tree)
    wiring = NetworkSettings(("relu",), "identity", 1e-5, (-1.0,) * 2, (1.0,) * 2)
    network = policy_network(select_network_leaves(tree, binding), part, wiring)
    assert network.width == 2


def test_a_leaf_is_read_from_where_it_lies() -> None:
    assert restore._to_flat_array(Leaf("float32", (1,), Inline(np.float32([3]).tobytes()), "x")).tolist() == [
        3.0
    ]


def test_a_value_of_the_state_takes_observations_alone() -> None:
    tree = gaussian_agent()
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    part = next(part for part in binding.parts if part.title == "value")
    norm = {"mean": [1.0, 2.0, 3.0], "var": [4.0] * 3, "epsilon": 0.0, "clip": 1.5}
    wiring = NetworkSettings(("relu",), "tanh", 1e-5, (-1.0,) * 2, (1.0,) * 2, norm)
    agent = select_network_leaves(tree, binding)
    obs = np.random.default_rng(0).normal(size=(5, 3)).astype("f4")
    arrays = {tree.names[path]: result.array() for path, result in tree.tensors()}
    hidden = np.clip((obs - [1, 2, 3]) / 2, -1.5, 1.5) @ arrays["value/v1/weight"].T + arrays["value/v1/bias"]
    expected = np.maximum(hidden, 0) @ arrays["value/v2/weight"].T + arrays["value/v2/bias"]
    got, _ = numpy_backend.build(value_network(agent, part, wiring)).step(obs)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
