"""A policy of another version sees its own values in its own places, or is told what it plays."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.evaluate import evaluate
from ckpttool.core import UsageError
from ckpttool.evaluation import environments, wrappers
from ckpttool.evaluation.gymnasium_engine import VectorEnv
from tests.conftest import TORCH_SAMPLE, in_process
from tests.golden_texts import Golden

pytestmark = [
    pytest.mark.environment,
    pytest.mark.skipif(
        importlib.util.find_spec("gymnasium") is None or importlib.util.find_spec("mujoco") is None,
        reason="gymnasium[mujoco] is not installed",
    ),
]
FORCES = {"use_contact_forces": True}
NO_FORCES = {"include_cfrc_ext_in_observation": False}
PLACED = {"exclude_current_positions_from_observation": False}


def observations(vector: VectorEnv, steps: int = 40) -> np.ndarray:
    """Return what is seen under equal actions, [steps, 2, obs_dim]; every other step moves one row alone."""
    rng, rows = np.random.default_rng(5), np.arange(2)
    arrays = []
    spec = vector.spec
    with vector:
        vector.reset(rows, rows)
        for number in range(steps):
            actions = rng.uniform(spec.action_low, spec.action_high, (2, spec.action_dim)).astype(np.float32)
            vector.step(actions, rows if number % 2 else rows[1:])
            arrays.append(np.array(vector.obs))
    return np.array(arrays)


def make(env_id: str, **options: Any) -> VectorEnv:
    return environments.make_vector_env(env_id, 2, trusted=True, **options)


# The versions share their dynamics and draws, so each is the referee of the other.
SAME = [
    ("Ant-v5", 27, "Ant-v4", {}),
    ("Ant-v5", 27, "Ant-v5", NO_FORCES),
    ("Ant-v5", 111, "Ant-v4", FORCES),
    ("Ant-v4", 111, "Ant-v4", FORCES),
    ("Ant-v4", 105, "Ant-v5", {}),
    ("Ant-v4", 29, "Ant-v4", PLACED),
    ("Humanoid-v5", 376, "Humanoid-v4", {}),
    ("Humanoid-v4", 348, "Humanoid-v5", {}),
    ("HumanoidStandup-v5", 376, "HumanoidStandup-v4", {}),
    ("InvertedDoublePendulum-v5", 11, "InvertedDoublePendulum-v4", {}),
    ("InvertedDoublePendulum-v4", 9, "InvertedDoublePendulum-v5", {}),
    ("Reacher-v5", 11, "Reacher-v4", {}),
    ("Reacher-v4", 10, "Reacher-v5", {}),
    ("Swimmer-v5", 10, "Swimmer-v5", PLACED),
]


@pytest.mark.parametrize(("played", "size", "referee", "kwargs"), SAME, ids=lambda value: str(value)[:20])
def test_the_policy_sees_what_the_other_version_shows(
    played: str, size: int, referee: str, kwargs: dict[str, Any]
) -> None:
    expected = observations(make(referee, kwargs=kwargs, engine="gymnasium"))
    assert expected.shape[2] == size
    positions = kwargs == PLACED
    adapted = make(played, obs_dim=size, adapter="current_positions" if positions else None)
    assert adapted.spec.obs_dim == size
    assert adapted.spec.id == played
    # A size alone is an assumption, and an adapter that was asked for is none.
    assert len(adapted.spec.assumed) == (0 if positions else 1)
    assert any(f" {size} " in sentence for sentence in (*adapted.spec.assumed, *adapted.notes))
    np.testing.assert_allclose(observations(adapted), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("env_id", "size", "first"),
    [("Humanoid-v4", 376, 292), ("Humanoid-v5", 348, 270), ("Ant-v4", 111, 27), ("Ant-v5", 105, 27)],
)
def test_contact_forces_are_zeros_only_if_asked(env_id: str, size: int, first: int, golden: Golden) -> None:
    shown = observations(make(env_id, obs_dim=size))
    zeroed = make(env_id, obs_dim=size, adapter="zero_contact_forces")
    golden(zeroed.notes[0])
    without = observations(zeroed)
    assert shown[:, :, first:].any(), "there were forces to hide"
    assert not without[:, :, first:].any()
    np.testing.assert_array_equal(without[:, :, :first], shown[:, :, :first])


def test_equal_sizes_are_left_alone() -> None:
    for obs_dim in (None, 105):
        with make("Ant-v5", obs_dim=obs_dim) as vector:
            assert not isinstance(vector, environments.AdaptedVector)
            assert not vector.notes


def test_what_costs_is_said(golden: Golden) -> None:
    with make("Ant-v4", obs_dim=111) as vector:
        golden(vector.spec.assumed[0])


def test_what_cannot_be_adapted_is_as_it_was() -> None:
    with make("Ant-v5", obs_dim=30) as vector:
        assert vector.spec.obs_dim == 105
    with make("Pendulum-v1", obs_dim=4) as vector:
        assert vector.spec.obs_dim == 3


@pytest.mark.parametrize(
    ("env_id", "size"), [("Walker2d-v5", 18), ("Hopper-v5", 12), ("Ant-v4", 29), ("Swimmer-v5", 10)]
)
def test_positions_are_not_shown_because_of_a_size(env_id: str, size: int) -> None:
    with make(env_id, obs_dim=size) as vector:
        assert vector.spec.obs_dim != size
        assert not vector.spec.arguments.get("exclude_current_positions_from_observation")


@pytest.mark.parametrize(
    ("trained", "adapts"),
    [("Ant-v3", True), ("Ant-v2", True), (None, True), ("Ant-v5", False), ("AntBulletEnv-v0", False)],
)
def test_the_version_of_training_decides_whether_a_size_is_that_of_a_version(
    trained: str | None, adapts: bool
) -> None:
    with make("Ant-v5", obs_dim=111, trained=trained) as vector:
        assert (vector.spec.obs_dim == 111) == adapts


def test_a_wrapper_of_another_size_leaves_no_size_alone_to_decide() -> None:
    wrapper = [wrappers.WrapperSpec("sb3_contrib.common.wrappers.TimeFeatureWrapper", {})]
    with make("Ant-v5", obs_dim=112, wrappers=wrapper) as vector:
        assert vector.spec.obs_dim == 106
    with make("Ant-v5", obs_dim=112, wrappers=wrapper, trained="Ant-v3") as vector:
        assert vector.spec.obs_dim == 112
        assert vector.spec.assumed


class TestRefusals:
    def test_an_unknown_adapter(self, golden: Golden) -> None:
        with pytest.raises(UsageError) as refused:
            make("Ant-v5", adapter="zero")
        golden(refused.value)

    @pytest.mark.parametrize(("env_id", "size"), [("HalfCheetah-v5", 17), ("Ant-v4", 27)])
    def test_no_contact_forces_to_hide(self, env_id: str, size: int, golden: Golden) -> None:
        with pytest.raises(UsageError) as refused:
            make(env_id, obs_dim=size, adapter="zero_contact_forces")
        golden(refused.value)

    def test_a_size_that_nothing_fits(self, golden: Golden) -> None:
        for env_id, sizes in (("Ant-v5", (17, 6)), ("Ant-v5", (50, 8))):
            golden(str(environments.suggest_tasks(env_id, *sizes)))
        assert environments.suggest_tasks("Pendulum-v1", 1000, 8) is None

    def test_the_command_offers_what_the_policy_plays(self, tmp_path: Path, golden: Golden) -> None:
        golden(in_process("eval", TORCH_SAMPLE, "--env", "Ant-v5", "--out", tmp_path / "x.json"))
        golden(in_process("eval", TORCH_SAMPLE, "--env", "Pendulum-v1", "--adapter", "zero_contact_forces"))


def test_help_lists_the_adapters() -> None:
    text = " ".join(in_process("eval", "--help").out.replace("│", " ").split())
    assert all(name in text for name in environments.ADAPTERS)


@pytest.mark.parametrize(("env_id", "sizes"), environments.SIZES.items())
def test_the_known_sizes_are_those_of_the_environments(env_id: str, sizes: tuple[int, int]) -> None:
    box2d = env_id.startswith(("Lunar", "Bipedal"))
    if box2d and importlib.util.find_spec("Box2D") is None:
        pytest.skip("Box2D is not installed")
    with environments.make_vector_env(env_id) as vector:
        assert (vector.spec.obs_dim, vector.spec.action_dim) == sizes


@pytest.mark.parametrize(
    ("words", "sizes", "result"),
    [
        ("models/TD3_HalfCheetah-v3_0_actor", (17, 6), ("HalfCheetah-v4",)),
        ("runs/Walker2d-v2/actor.pth", (17, 6), ("Walker2d-v4",)),
        ("runs/Walker2d-v4/actor.pth", (17, 6), ("Walker2d-v4",)),
        ("runs/Walker2d-v5/actor.pth", (17, 6), ("Walker2d-v5",)),
        ("Ant-v4/actor", (105, 8), ("Ant-v5",)),
        ("Pusher-v2/actor", (23, 7), ("Pusher-v5",)),
        ("x_actor", (17, 6), ("HalfCheetah-v5", "Walker2d-v5")),
        ("TD3_LunarLanderContinuous-v2_0_solved_actor.pth", (8, 2), ("LunarLanderContinuous-v3",)),
        ("BipedalWalker-v2/ONE/actor.pth", (24, 4), ("BipedalWalker-v3",)),
        ("Ant-v2/actor", (111, 8), ("Ant-v4",)),
        ("Ant-v4/actor", (27, 8), ("Ant-v4",)),
        ("Pendulum_v1_td3/policy.pth", (3, 1), ("Pendulum-v1",)),
        # A name whose sizes do not fit is no evidence.
        ("Pendulum-v1/actor", (17, 6), ("HalfCheetah-v5", "Walker2d-v5")),
        ("Pendulum-v1/actor", (6, 5), ()),
        ("MyRobot-v0/actor", (6, 5), ("MyRobot-v0",)),
        ("resnet-v2/actor", (6, 5), ()),
    ],
)
def test_candidates_are_those_that_the_name_and_the_sizes_support(
    words: str, sizes: tuple[int, int], result: tuple[str, ...]
) -> None:
    assert environments.candidate_environments(words, *sizes) == result


@pytest.mark.parametrize(("name", "registered"), [("Blackjack-v1", True), ("MyRobot-v0", False)])
def test_a_task_that_only_the_path_names_is_suggested_if_it_is_registered(
    name: str, registered: bool, tmp_path: Path
) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / name).mkdir()
    sizes = {"l1": (6, 32), "l2": (32, 5)}
    weights = {f"{layer}.weight": np.ones(shape[::-1], np.float32) for layer, shape in sizes.items()}
    biases = {f"{layer}.bias": np.ones(shape[1], np.float32) for layer, shape in sizes.items()}
    np.savez(tmp_path / name / "actor.npz", **weights, **biases)
    with pytest.raises(UsageError) as caught:
        evaluate(str(tmp_path / name / "actor.npz"))
    assert (f"--env {name}" in str(caught.value.hint)) is registered
    assert ("install the package" in str(caught.value.hint)) is not registered
    assert (environments.suggest_package(name) is None) is registered


def test_what_the_tables_list_exists() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    listed = {*environments.SIZES, *environments._DISCRETE, *environments._OLD_VERSIONS}
    listed |= {f"{task}-v{version}" for task in environments._KEPT_BY_V4 for version in (4, 5)}
    assert all(map(environments.is_listed, listed))
    assert listed <= set(gymnasium.registry)


@pytest.mark.parametrize(
    ("words", "sizes", "result"),
    [
        ("model.zip", (4, 2), "CartPole-v1"),
        ("dqn-LunarLander-v2/model.zip", (8, 4), "LunarLander-v3"),
        ("CartPole-v0/dqn.zip", (4, 2), "CartPole-v0"),
        ("MountainCar-v0/dqn.zip", (2, 3), "MountainCar-v0"),
        ("MiniGrid-v1/dqn.zip", (4, 2), "MiniGrid-v1"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out of date:DeprecationWarning")
def test_candidates_of_discrete_agents_exist_and_have_their_sizes(
    words: str, sizes: tuple[int, int], result: str
) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    assert environments.candidate_environments(words, *sizes, discrete=True) == (result,)
    if "MiniGrid" not in result and "LunarLander" not in result:
        with gymnasium.make(result) as task:
            assert (task.observation_space.shape[0], task.action_space.n) == sizes


@pytest.mark.parametrize(
    ("expected", "named"),
    [
        ("Walker2d-v3", "Walker2d-v4"),
        ("HumanoidStandup-v2", "HumanoidStandup-v4"),
        ("Pusher-v2", "Pusher-v5"),
        ("Pendulum-v0", "Pendulum-v1"),
        ("Walker2d-v9", "Walker2d-v5"),
        ("Pendulm-v1", "Pendulum-v1"),
    ],
)
def test_a_missing_version_is_replaced_by_the_one_that_continues_it(expected: str, named: str) -> None:
    with pytest.raises(UsageError) as refused:
        environments.make_vector_env(expected)
    assert str(refused.value.hint).split()[:3] == ["use", "--env", named]
