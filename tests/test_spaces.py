"""Stored action and observation bounds are compared with those of the environment that is played."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from ckpttool.evaluation import environments, wrappers
from ckpttool.evaluation.restore import restore_agent
from ckpttool.libraries.schema import make_observation_space
from tests import sb3_files, warm_sb3
from tests.conftest import Ran, in_process
from tests.pickles import instance

pytest.importorskip("stable_baselines3")
gymnasium = pytest.importorskip("gymnasium")

PENDULUM = "Pendulum-v1"
EPISODES = 2

# Makes agents of the library behind wrappers, and prints what its own evaluation returns for each.
PROGRAM = """
import json, sys
import gymnasium, numpy as np, stable_baselines3, torch
from gymnasium import wrappers as w
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

one = np.float32(1)
wraps = {
    "plain": lambda env: env,
    "action": lambda env: w.RescaleAction(env, -one, one),
    "observation": lambda env: w.RescaleObservation(env, -one, one),
    "both": lambda env: w.RescaleObservation(w.RescaleAction(env, -one, one), -one, one),
    "stack": lambda env: w.FlattenObservation(w.FrameStackObservation(env, 3)),
    "normalize": w.NormalizeObservation,
}

class Seeded(gymnasium.Wrapper):
    number = 1000
    def reset(self, **_):
        self.number += 1
        return self.env.reset(seed=self.number - 1)

found = {}
for name, wrap in wraps.items():
    for algorithm in ("SAC", "PPO", "TD3"):
        torch.manual_seed(0)
        more = {} if algorithm == "PPO" else {"buffer_size": 2}
        env = wrap(Monitor(Seeded(gymnasium.make("Pendulum-v1"))))
        kind = getattr(stable_baselines3, algorithm)
        model = kind("MlpPolicy", env, policy_kwargs={"net_arch": [8]}, device="cpu", **more)
        with torch.no_grad():
            for parameter in model.policy.parameters():
                torch.nn.init.normal_(parameter, std=0.5)  # actions that differ
        model.save(f"{sys.argv[1]}/{algorithm}_{name}.zip")
        scores, _ = evaluate_policy(model, env, 2, return_episode_rewards=True, warn=False)
        found[f"{algorithm}_{name}"] = scores
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def agents_folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """Return a folder with agents, and their returns by name."""
    folder = tmp_path_factory.mktemp("spaces")
    return folder, warm_sb3.built(PROGRAM, folder)


def play(path: object, *words: str) -> Ran:
    return in_process("eval", path, "--env", PENDULUM, "--episodes", EPISODES, "--json", *words)


def form(folder: Path, name: str, kind: str, tmp_path: Path) -> Path:
    """Return the zip, or what it is converted to with its sidecar."""
    source, target = folder / f"{name}.zip", tmp_path / "agent.pt"
    if kind == "zip":
        return source
    assert in_process("convert", source, target).status == 0
    return target


def hint_of(ran: Ran) -> str:
    """Return the hint of a refusal."""
    assert ran.status == 2
    assert ran.json()["error"]["kind"] == "environment"
    return str(ran.json()["error"]["hint"])


def follow(ran: Ran) -> Ran:
    """Follow the hint of a refusal, which is a complete command."""
    return in_process(*shlex.split(hint_of(ran))[1:], "--episodes", EPISODES, "--json")


@pytest.mark.parametrize("kind", ["zip", "pt"])
@pytest.mark.parametrize("algorithm", ["SAC", "PPO", "TD3"])
@pytest.mark.parametrize("wrapper", ["action", "observation", "both"])
def test_rescaled_spaces_are_refused_and_the_hint_plays_as_in_training(
    agents_folder: Any, algorithm: str, wrapper: str, kind: str, tmp_path: Path
) -> None:
    folder, returns = agents_folder
    ran = play(form(folder, f"{algorithm}_{wrapper}", kind, tmp_path))
    for _ in range(2 if wrapper == "both" else 1):
        ran = follow(ran)
    assert ran.status == 0, ran.err
    expected = returns[f"{algorithm}_{wrapper}"]
    np.testing.assert_allclose(ran.json()["returns"], expected, rtol=1e-4)
    without = play(folder / f"{algorithm}_{wrapper}.zip", "--wrapper", "none").json()["returns"]
    assert np.abs(np.array(without) - expected).min() > 1


@pytest.mark.parametrize("wrapper", ["action", "observation"])
def test_an_exported_graph_is_not_played_in_the_raw_environment(
    agents_folder: Any, wrapper: str, tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    folder, returns = agents_folder
    target = tmp_path / "agent.onnx"
    assert in_process("convert", folder / f"SAC_{wrapper}.zip", target, "--to", "onnx").status == 0
    ran = play(target)
    assert ran.status == 2
    repeated = follow(ran)
    np.testing.assert_allclose(repeated.json()["returns"], returns[f"SAC_{wrapper}"], rtol=1e-4)


@pytest.mark.parametrize("kind", ["zip", "pt"])
@pytest.mark.parametrize("algorithm", ["SAC", "PPO", "TD3"])
@pytest.mark.parametrize("wrapper", ["plain", "stack"])
def test_equal_spaces_play_without_a_word(
    agents_folder: Any, algorithm: str, wrapper: str, kind: str, tmp_path: Path
) -> None:
    folder, returns = agents_folder
    path = form(folder, f"{algorithm}_{wrapper}", kind, tmp_path)
    stack = () if wrapper == "plain" else ("--wrapper", "FrameStackObservation:stack_size=3")
    ran = play(path, *stack)
    assert ran.status == 0, ran.err
    assert "bounds" not in " ".join(ran.json()["notes"])
    np.testing.assert_allclose(ran.json()["returns"], returns[f"{algorithm}_{wrapper}"], rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_bounds_of_an_older_version_of_the_task_need_no_wrapper(scale: float, tmp_path: Path) -> None:
    """LunarLander of gymnasium 0.29 has other bounds than that of 1.0, but the same observations."""
    low, high = (-1.5, -1.5, -5, -5, -np.pi, -5, 0, 0), (1.5, 1.5, 5, 5, np.pi, 5, 1, 1)
    module = sb3_files.owner(
        mlp_extractor=sb3_files.owner(policy_net=sb3_files.mlp((8, 5), nn.Tanh, nn.Tanh)),
        action_net=nn.Linear(5, 4),
    )
    spaces = {
        "observation_space": sb3_files.box([scale * end for end in low], [scale * end for end in high]),
        "action_space": instance(sb3_files.DISCRETE, n=np.int64(4), start=np.int64(0), _shape=()),
    }
    data = sb3_files.settings(sb3_files.ON_POLICY, **spaces)
    path = sb3_files.put(tmp_path / "a.zip", sb3_files.members({"policy": module.state_dict()}, data))
    ran = in_process("eval", path, "--env", "LunarLander-v3", "--episodes", 1, "--json")
    entries = [row for row in ran.json()["ledger"] if row["what"] == "wrapper"]
    assert ran.status == (1 if entries else 0), ran.err
    assert bool(entries) == (scale != 1)
    assert any("bounds" in note for note in ran.json()["notes"]) == (scale == 1)


@pytest.mark.parametrize("kind", ["zip", "pt"])
def test_unbounded_observations_of_training_decide(agents_folder: Any, kind: str, tmp_path: Path) -> None:
    folder, _ = agents_folder
    path = form(folder, "SAC_normalize", kind, tmp_path)
    ran = play(path)
    assert ran.status == 1
    (entry,) = [row for row in ran.json()["ledger"] if row["what"] == "wrapper"]
    assert (entry["use"], entry["decides"]) == ("cannot be known", True)
    statistics = tmp_path / "statistics.npz"
    np.savez(statistics, mean=np.zeros(3), var=np.ones(3))
    assert play(path, "--obs-norm", str(statistics)).status == 0


@pytest.mark.parametrize("name", ["SAC_action", "SAC_observation", "SAC_normalize"])
def test_that_no_wrapper_is_given_is_a_statement(agents_folder: Any, name: str) -> None:
    ran = play(agents_folder[0] / f"{name}.zip", "--wrapper", "none")
    assert ran.status == 0
    assert "bounds" in " ".join(ran.json()["notes"])


def test_given_bounds_replace_stored_ones_and_both_are_named(agents_folder: Any) -> None:
    ran = play(agents_folder[0] / "SAC_action.zip", "--bounds", "-2", "2")
    assert ran.status == 0
    assert "action_low" in " ".join(ran.json()["notes"])


def test_the_hint_repeats_given_facts(agents_folder: Any, tmp_path: Path) -> None:
    path = agents_folder[0] / "SAC_action.zip"
    repeated = follow(play(path, "--activation", "relu", "--head", "affine"))
    assert repeated.status == 0
    np.testing.assert_allclose(repeated.json()["returns"], agents_folder[1]["SAC_action"], rtol=1e-4)
    statistics = tmp_path / "statistics.npz"
    np.savez(statistics, mean=np.zeros(3), var=np.ones(3))
    ran = play(path, "--obs-norm", str(statistics))
    assert hint_of(ran) == "add --wrapper RescaleAction:min_action=-1,max_action=1"


@pytest.mark.parametrize("kind", ["zip", "pt"])
def test_files_keep_the_bounds_of_observations(agents_folder: Any, kind: str, tmp_path: Path) -> None:
    expected = {
        "plain": {"low": [-1.0, -1.0, -8.0], "high": [1.0, 1.0, 8.0]},
        "observation": {"low": [-1.0], "high": [1.0]},
        "normalize": {"low": [None], "high": [None]},
    }
    for name, bounds in expected.items():
        (tmp_path / name).mkdir()
        known = restore_agent(str(form(agents_folder[0], f"TD3_{name}", kind, tmp_path / name))).known
        assert known.observation_space == {"library": "gymnasium", "parts": {"obs": bounds}}
        assert known.origin("observation_space") == "data/observation_space"


@pytest.mark.parametrize("ends", [([0.0] * 5000, range(1, 5001)), (range(5000), [5000.0] * 5000)])
def test_thousands_of_different_bounds_are_left_out(ends: tuple[Any, Any]) -> None:
    parts = {"image": ends, "obs": ([0.0] * 5000, [1.0] * 5000)}
    space = make_observation_space("gymnasium", parts)
    assert space == {"library": "gymnasium", "parts": {"obs": {"low": [0.0], "high": [1.0]}}}


class TestRescaleObservation:
    @pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), ([-2.0, -1.0, -10.0], [1.0, 0.0, 1.0]), (0, 5)])
    def test_the_library_shows_the_same(self, low: Any, high: Any) -> None:
        ends = [np.asarray(np.broadcast_to(end, 3), np.float32) for end in (low, high)]
        env = gymnasium.wrappers.RescaleObservation(gymnasium.make(PENDULUM), *ends)
        spec = wrappers.WrapperSpec("RescaleObservation", {"min_obs": low, "max_obs": high})
        with environments.make_vector_env(PENDULUM, wrappers=[spec]) as vector:
            vector.reset(np.arange(1), np.array([7]))
            first, _ = env.reset(seed=7)
            np.testing.assert_array_equal(vector.obs[0], first)
            for action in np.linspace(-2, 2, 20, dtype="f4"):
                vector.step(np.array([[action]]), np.arange(1))
                np.testing.assert_array_equal(vector.obs[0], env.step([action])[0])
            bounds = vector.spec.observation_bounds["obs"]
            np.testing.assert_array_equal(bounds, [env.observation_space.low, env.observation_space.high])


def _named(name: str, **arguments: Any) -> wrappers.WrapperSpec:
    return wrappers.WrapperSpec(name, arguments)


LIBRARY: dict[str, tuple[wrappers.WrapperSpec, Callable[[Any], Any]]] = {
    "stack": (
        _named("FrameStackObservation", stack_size=2),
        lambda env: gymnasium.wrappers.FlattenObservation(gymnasium.wrappers.FrameStackObservation(env, 2)),
    ),
    "limit": (_named("TimeLimit", max_episode_steps=9), lambda env: env),
    "action": (
        _named("RescaleAction", min_action=-1, max_action=1),
        lambda env: gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1)),
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_wrappers_change_the_bounds_as_the_library_does(name: str) -> None:
    spec, wrap = LIBRARY[name]
    space = wrap(gymnasium.make(PENDULUM)).observation_space
    with environments.make_vector_env(PENDULUM, wrappers=[spec]) as vector:
        np.testing.assert_array_equal(vector.spec.observation_bounds["obs"], [space.low, space.high])


def test_other_sizes_have_the_bounds_of_their_parts_or_none() -> None:
    rows = {
        "TimeFeatureWrapper": ([-1, -1, -8, 0], [1, 1, 8, 1]),
        "HistoryWrapper": ([*[-1, -1, -8] * 2, -2, -2], [*[1, 1, 8] * 2, 2, 2]),
        "TimeAwareObservation": None,
    }
    for name, expected in rows.items():
        with environments.make_vector_env(PENDULUM, wrappers=[_named(name)]) as vector:
            bounds = vector.spec.observation_bounds.get("obs")
            assert (bounds is None) if expected is None else np.array_equal(bounds, expected)
