"""RLlib's old API stack: one policy's weights, its config, its spaces, and the filter of its observations."""

from __future__ import annotations

import base64
import io
import zlib
from typing import Any

import numpy as np
import pytest

from ckpttool.core import Leaf, Tree, unknown_fact
from ckpttool.core.sidecar import NO_BOUNDS, NO_ENVIRONMENT
from ckpttool.libraries import recognize_tree
from ckpttool.libraries.schema import Choices, canonical_weight_path
from ckpttool.mapping.rules import canonical_tree
from tests.golden_texts import Golden
from tests.restored import bound, played
from tests.test_layouts import LayoutContract
from tests.trees import torch_dense, torch_tree

OBS, ACT, HIDDEN = 3, 2, 8
POLICY = "policies/default_policy"
LOW, HIGH = (-2.0, 0.0), (2.0, 3.0)


def network(name: str, inputs: int, outputs: int, seed: int) -> dict[str, np.ndarray]:
    """A FullyConnectedNetwork: two hidden layers, the last one, and a value branch."""
    generator = np.random.default_rng(seed)
    sizes = {
        "_hidden_layers.0._model.0": (inputs, HIDDEN),
        "_hidden_layers.1._model.0": (HIDDEN, HIDDEN),
        "_logits._model.0": (HIDDEN, outputs),
        "_value_branch._model.0": (HIDDEN, 1),
    }
    return {
        f"{POLICY}/weights/{name}{key}": array
        for layer, size in sizes.items()
        for key, array in torch_dense(generator, layer, *size).items()
    }


def serialized(numbers: tuple[float, ...], dtype: type[np.generic] = np.float32) -> str:
    stream = io.BytesIO()
    np.save(stream, np.asarray(numbers, dtype))
    return base64.b64encode(zlib.compress(stream.getvalue())).decode()


def settings(**config: Any) -> dict[str, Any]:
    space = f"{POLICY}/policy_spec/action_space/space"
    record = {f"{space}/low": serialized(LOW), f"{space}/high": serialized(HIGH), f"{space}/dtype": "<f4"}
    return {**record, **{f"algorithm_state/config/{name}": value for name, value in config.items()}}


def sac(**config: Any) -> Tree:
    named = {"env": "Pendulum-v1", "policy_model_config/fcnet_activation": "relu", **config}
    return torch_tree(
        {
            **network("action_model.", OBS, 2 * ACT, 1),
            **network("q_net.", OBS + ACT, 1, 2),
            **network("twin_q_net.", OBS + ACT, 1, 3),
            f"{POLICY}/weights/log_alpha": np.zeros(1, np.float32),
            f"{POLICY}/weights/target_entropy": np.full(1, -2, np.float32),
            **settings(**named),
        }
    )


def ppo() -> Tree:
    generator = np.random.default_rng(4)
    value: dict[str, np.ndarray] = {}
    for number, size in enumerate([(OBS, HIDDEN), (HIDDEN, HIDDEN)]):
        value |= torch_dense(generator, f"_value_branch_separate.{number}._model.0", *size)
    value = {f"{POLICY}/weights/{name}": array for name, array in value.items()}
    return torch_tree({**network("", OBS, 2 * ACT, 1), **value, **settings()})


def ddpg() -> Tree:
    generator = np.random.default_rng(6)
    sizes = {
        "policy_model.action_0._model.0": (OBS, HIDDEN),
        "policy_model.action_out._model.0": (HIDDEN, ACT),
        "q_model.q_hidden_0._model.0": (OBS + ACT, HIDDEN),
        "q_model.q_out._model.0": (HIDDEN, 1),
    }
    named = {
        f"{POLICY}/weights/{key}": array
        for name, size in sizes.items()
        for key, array in torch_dense(generator, name, *size).items()
    }
    return torch_tree({**named, **settings()})


class TestSac(LayoutContract):
    name = "rllib_policy"

    @pytest.fixture
    def tree(self) -> Tree:
        return sac()


class TestPpo(LayoutContract):
    name = "rllib_policy"

    @pytest.fixture
    def tree(self) -> Tree:
        return ppo()


class TestDdpg(LayoutContract):
    name = "rllib_policy"

    @pytest.fixture
    def tree(self) -> Tree:
        return ddpg()


def by_hand(tree: Tree, names: list[str], obs: np.ndarray, hidden: Any) -> np.ndarray:
    arrays = {tree.names[path]: leaf.array() for path, leaf in tree.tensors()}
    x = obs
    for name in names:
        weights = f"{POLICY}/weights/{name}"
        x = x @ arrays[f"{weights}/weight"].T + arrays[f"{weights}/bias"]
        x = hidden(x) if name != names[-1] else x
    return x


def unsquashed(x: np.ndarray) -> np.ndarray:
    low, high = np.asarray(LOW), np.asarray(HIGH)
    return np.clip(low + (x + 1) * (high - low) / 2, low, high)


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


@pytest.fixture(scope="module")
def obs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(30, OBS)).astype(np.float32) * 3


def chain(prefix: str = "") -> list[str]:
    return [f"{prefix}_hidden_layers/{n}/_model/0" for n in range(2)] + [f"{prefix}_logits/_model/0"]


def test_sac_squashes_the_mean(obs: np.ndarray) -> None:
    tree = sac()
    mean = by_hand(tree, chain("action_model/"), obs, relu)[:, :ACT]
    np.testing.assert_allclose(played(tree, obs), unsquashed(np.tanh(mean)), atol=1e-5)


def test_ppo_limits_the_mean(obs: np.ndarray) -> None:
    tree = ppo()
    mean = by_hand(tree, chain(), obs, np.tanh)[:, :ACT]
    np.testing.assert_allclose(played(tree, obs), unsquashed(mean), atol=1e-5)


def test_ddpg_squashes_the_whole_layer(obs: np.ndarray) -> None:
    tree = ddpg()
    names = ["policy_model/action_0/_model/0", "policy_model/action_out/_model/0"]
    squashed = 2 / (1 + np.exp(-2 * by_hand(tree, names, obs, relu))) - 1
    np.testing.assert_allclose(played(tree, obs), unsquashed(squashed), atol=1e-5)


def with_filter(tree: Tree, count: int, **settings: object) -> Tree:
    above = "algorithm_state/worker/filters/default_policy"
    prefix = f"{above}/running_stats"
    stats = {
        f"{prefix}/mean_array": np.asarray([1.0, -1.0, 0.5]),
        f"{prefix}/sum_sq_diff_array": np.asarray([40.0, 10.0, 90.0]),
        f"{prefix}/num_pushes": count,
        **{f"{above}/{name}": value for name, value in settings.items()},
    }
    return Tree({**tree.leaves, **torch_tree(stats).leaves})


@pytest.mark.parametrize("count", [1, 11])
def test_the_filters_statistics_are_used(obs: np.ndarray, count: int) -> None:
    tree = with_filter(sac(), count)
    mean = np.asarray([1.0, -1.0, 0.5])
    # rllib/utils/filter.py, RunningStat.var: of one observation its square.
    var = np.asarray([40.0, 10.0, 90.0]) / 10 if count > 1 else np.square(mean)
    x = ((obs - mean) / (np.sqrt(var) + 1e-8)).astype(np.float32)
    expected = unsquashed(np.tanh(by_hand(sac(), chain("action_model/"), x, relu)[:, :ACT]))
    np.testing.assert_allclose(played(tree, obs), expected, atol=1e-5)


@pytest.mark.parametrize("limit", [0.75, np.asarray(0.75), None, 0])
def test_the_limit_of_a_filter_is_used(limit: Any, obs: np.ndarray) -> None:
    """rllib/utils/filter.py, MeanStdFilter: `clip` limits what it returns, if it is not None or 0."""
    tree = with_filter(sac(), 11, demean=True, destd=1, clip=limit)
    x = (obs - np.asarray([1.0, -1.0, 0.5])) / (np.sqrt(np.asarray([40.0, 10.0, 90.0]) / 10) + 1e-8)
    x = np.clip(x, -limit, limit) if limit else x
    expected = unsquashed(
        np.tanh(by_hand(sac(), chain("action_model/"), x.astype(np.float32), relu)[:, :ACT])
    )
    np.testing.assert_allclose(played(tree, obs), expected, atol=1e-5)


@pytest.mark.parametrize("setting", [{"demean": False}, {"destd": 0}, {"clip": "10"}, {"destd": "no"}])
def test_a_filter_with_another_formula_is_not_applied(setting: dict[str, object]) -> None:
    facts = bound(with_filter(sac(), 11, **setting)).facts
    assert facts.norm is None
    assert [lack.what for lack in facts.lacks if lack.decides] == ["observation statistics"]


def test_a_filter_that_saw_nothing_is_said(golden: Golden) -> None:
    (lacking,) = bound(with_filter(sac(), 0)).facts.lacks
    assert lacking == unknown_fact("observation statistics", lacking.value)
    golden(lacking.value)


def test_what_the_config_says() -> None:
    facts = bound(sac()).facts
    assert (facts.env, facts.action_low, facts.action_high, facts.hidden) == (
        "Pendulum-v1",
        LOW,
        HIGH,
        "relu",
    )
    assert facts.origins["hidden"] == "algorithm_state/config"
    assert NO_ENVIRONMENT in bound(sac(env="evil:Env-v0")).facts.lacks


@pytest.mark.parametrize(
    "text", ["", "!", "eJwDAAAAAAE=", base64.b64encode(zlib.compress(b"\0" * 99)).decode()]
)
def test_bounds_that_are_no_array_are_not_known(text: str) -> None:
    facts = bound(sac(**{f"../../{POLICY}/policy_spec/action_space/space/low": text})).facts
    assert facts.action_low == LOW  # another name says nothing
    tree = sac()
    path = next(path for path in tree if tree.names[path].endswith("action_space/space/low"))
    broken = Tree({**tree.leaves, path: torch_tree({"x": text})[next(iter(torch_tree({"x": text})))]})
    facts = bound(broken).facts
    assert facts.action_low is None
    assert NO_BOUNDS in facts.lacks


def test_two_policies_are_no_single_agent() -> None:
    tree = sac()
    other = {name.replace("default_policy", "other"): np.zeros(1, "f4") for name in tree.names.values()}
    assert recognize_tree(Tree({**tree.leaves, **torch_tree(other).leaves}), "folder") is None


@pytest.mark.parametrize(("other", "actual"), [("relu", "relu"), ("tanh", "tanh"), ("swish", "silu")])
def test_critics_have_their_own_activation(other: str, actual: str) -> None:
    facts = bound(sac(**{"q_model_config/fcnet_activation": other})).facts
    assert facts.activations_of("actor") == ("relu",)
    assert {*facts.activations_of("critic")} == {*facts.activations_of("critic_target")} == {actual}


@pytest.mark.parametrize("count", [3, 4])
def test_logits_of_discrete_actions_are_not_divided(count: int) -> None:
    space = f"{POLICY}/policy_spec/action_space/space"
    record = {f"{space}/space": "discrete", f"{space}/n": count, f"{space}/start": 0}
    binding = bound(torch_tree({**network("", OBS, count, 1), **record}))
    assert binding.facts.choices == Choices((count,), (0,))
    policy = next(part for part in binding.parts if part.acts)
    assert not policy.branches
    tree = torch_tree({**network("", OBS, count, 1), **record})
    agent = canonical_tree(tree, bound(tree).moves)
    kernel = agent[canonical_weight_path(policy, 2, "kernel")]
    assert isinstance(kernel, Leaf)
    logits = network("", OBS, count, 1)[f"{POLICY}/weights/_logits._model.0.weight"]
    np.testing.assert_array_equal(kernel.array().T, logits)


SPACE = f"{POLICY}/policy_spec/action_space/space"
TUPLE = {
    f"{SPACE}/spaces/{n}/{key}": value for n in (0, 1) for key, value in (("space", "discrete"), ("n", n + 2))
}


@pytest.mark.parametrize(
    "settings",
    [
        {
            f"{SPACE}/space": "multi-discrete",
            f"{SPACE}/nvec": serialized((2, 3), np.int64),
            f"{SPACE}/dtype": "<i8",
        },
        {f"{SPACE}/space": "tuple", **TUPLE},
    ],
    ids=["array", "tuple"],
)
def test_several_discrete_actions_are_chosen_each(settings: dict[str, Any]) -> None:
    binding = bound(torch_tree({**network("", OBS, 5, 1), **settings}))
    assert binding.facts.choices == Choices((2, 3), (0, 0), single=False)
    assert not binding.unplaced


@pytest.mark.parametrize(
    "settings",
    [
        {f"{SPACE}/space": "multi-discrete"},
        {f"{SPACE}/space": "multi-discrete", f"{SPACE}/nvec": serialized((2, 3)), f"{SPACE}/dtype": "<i8"},
        {f"{SPACE}/space": "multi-binary", f"{SPACE}/n": 4},
        {f"{SPACE}/space": "tuple", **TUPLE, f"{SPACE}/spaces/1/space": "multi-binary"},
        {f"{SPACE}/space": "tuple", **TUPLE, f"{SPACE}/spaces/1/space": "box"},
        {f"{SPACE}/space": "dict", f"{SPACE}/spaces/0/n": 4},
    ],
    ids=["no number", "another type", "binary", "binary in a tuple", "box in a tuple", "dict"],
)
def test_discrete_actions_of_an_unclear_number_are_refused(settings: dict[str, Any]) -> None:
    binding = bound(torch_tree({**network("", OBS, 4, 1), **settings}))
    assert binding.unplaced["actor"]
