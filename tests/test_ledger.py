"""The ledger: what could change an agent's numbers is used, assumed, or named as not used."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.commands.doctor import diagnose
from ckpttool.conversion.export import export
from ckpttool.core import (
    CkpttoolError,
    LedgerEntry,
    Sidecar,
    TargetExistsError,
    UnsupportedError,
    UsageError,
    sidecar,
)
from ckpttool.evaluation import evidence, vocabulary
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import detect, open_checkpoint, sb3
from ckpttool.networks import numpy_backend
from tests import restored, sb3_files, schemas, warm_sb3
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
nn = torch.nn

GIVEN = AgentFacts(activations="tanh", head="tanh", action_low=-2, action_high=2)
WORDS = ("--activation", "tanh", "--head", "tanh", "--env", "Pendulum-v1", "--episodes", "1")
MEAN = np.array([1.0, -2.0, 0.5])
VAR = np.array([0.3, 4.0, 1.5])
COUNT = 100.0


def mlp(inputs: int = 3, outputs: int = 1) -> Any:
    torch.manual_seed(inputs)
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, outputs)
    )


def states(module: Any, prefix: str = "") -> dict[str, Any]:
    return {prefix + name: value.clone() for name, value in module.state_dict().items()}


def buffers(**arrays: Any) -> dict[str, Any]:
    return {name: torch.tensor(np.asarray(array, np.float32)) for name, array in arrays.items()}


def saved(path: Path, content: Mapping[str, Any]) -> str:
    torch.save(content, path)
    return str(path)


def agent(**more: Any) -> dict[str, Any]:
    return {"actor": states(mlp()), "critic": states(mlp(4)), **more}


def acts(path: str, facts: AgentFacts = GIVEN) -> np.ndarray:
    agent = restore_agent(path, facts=facts)
    part = agent.runnable("actor")
    assert part is not None
    network = restored.policy_network(agent.tree, part, restored.wiring(agent, [-2.0], [2.0]))
    return np.asarray(numpy_backend.build(network).step(restored.observations())[0])


def torch_actions(observations: np.ndarray) -> np.ndarray:
    """Return the actions of the policy for normalised observations, by torch."""
    with torch.no_grad():
        return 2 * np.tanh(mlp()(torch.tensor(observations.astype("f4"))).numpy())


def normal(epsilon: float = 1e-8, clip: float | None = None, *, outside: bool = False) -> np.ndarray:
    spread = np.sqrt(VAR) + epsilon if outside else np.sqrt(VAR + epsilon)
    normalized = (restored.observations() - MEAN) / spread
    return normalized if clip is None else np.clip(normalized, -clip, clip)


# --- Statistics in the same file ---------------------------------------------------------------------

RUNNING = buffers(running_mean=MEAN, running_var=VAR, count=COUNT)
EMPIRICAL = buffers(_mean=MEAN[None], _var=VAR[None], _std=np.sqrt(VAR)[None], count=COUNT)
STATISTICS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "arrays": (agent(obs_rms={"mean": MEAN, "var": VAR, "count": COUNT}), normal()),
    "tensors": (agent(obs_rms=buffers(mean=MEAN, var=VAR, count=COUNT)), normal()),
    "own epsilon and clip": (
        agent(obs_rms={"mean": MEAN, "var": VAR, "epsilon": 0.1, "clip": 2.0}),
        normal(0.1, 2.0),
    ),
    "a module's state_dict": (agent(obs_normalizer=RUNNING), normal(1e-5, 5.0)),
    "called normalizer": (agent(normalizer=RUNNING), normal(1e-5, 5.0)),
    "rsl_rl's": (agent(obs_normalizer=EMPIRICAL), normal(1e-2, outside=True)),
    "skrl's": (
        agent(state_preprocessor=buffers(running_mean=MEAN, running_variance=VAR, current_count=COUNT)),
        normal(1e-8, 5.0, outside=True),
    ),
    "mean and std": (agent(obs_mean=MEAN, obs_std=np.sqrt(VAR)), normal(0.0)),
    "lists": (agent(obs_mean=MEAN.tolist(), obs_std=np.sqrt(VAR).tolist()), normal(0.0)),
    "in the module": (
        {**states(mlp(), "net."), **{f"obs_rms.{name}": value for name, value in RUNNING.items()}},
        normal(1e-5, 5.0),
    ),
    "the wrapper's own limit": (
        agent(vec_normalize={"obs_rms": {"mean": MEAN, "var": VAR}, "clip_obs": 2.0, "epsilon": 0.1}),
        normal(0.1, 2.0),
    ),
    "a limit beside them": (agent(obs_rms={"mean": MEAN, "var": VAR}, obs_clip=2.0), normal(clip=2.0)),
    "beside a lone policy": (
        {"state_dict": states(mlp()), "obs_rms": {"mean": MEAN, "var": VAR}},
        normal(),
    ),
}


@pytest.mark.parametrize("case", STATISTICS)
def test_statistics_in_the_file_are_applied(case: str, tmp_path: Path) -> None:
    content, observed = STATISTICS[case]
    path = saved(tmp_path / "agent.pt", content)
    restored.same(acts(path), torch_actions(observed))
    assert not sidecar.has_open_entries(restore_agent(path, facts=GIVEN).ledger)


def test_statistics_go_with_an_export(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    path = saved(tmp_path / "agent.pt", agent(obs_rms={"mean": MEAN, "var": VAR, "count": COUNT}))
    export(path, str(tmp_path / "a.onnx"), facts=GIVEN)
    session = onnxruntime.InferenceSession(str(tmp_path / "a.onnx"))
    restored.same(session.run(None, {"obs": restored.observations()})[0], torch_actions(normal()))


@pytest.mark.parametrize(
    ("case", "to"),
    [
        ("beside a lone policy", "keras"),
        ("beside a lone policy", "tf"),
        ("beside a lone policy", "torch"),
        ("in the module", "tf"),
        ("in the module", "torch"),
        ("arrays", "keras"),
        ("arrays", "torch"),
    ],
)
def test_statistics_go_with_a_conversion(case: str, to: str, tmp_path: Path) -> None:
    content, observed = STATISTICS[case]
    path, target = saved(tmp_path / "agent.pt", content), str(tmp_path / "b")
    assert convert(path, target, to=to).written
    restored.same(acts(target), torch_actions(observed))


def test_given_statistics_win_and_the_contradiction_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent(obs_rms={"mean": MEAN + 9, "var": VAR}))
    stated = {"mean": MEAN.tolist(), "var": VAR.tolist()}
    facts = AgentFacts(activations="tanh", head="tanh", action_low=-2, action_high=2, obs_norm=stated)
    restored.same(acts(path, facts), torch_actions(normal()))
    assert any("obs_norm" in note for note in restore_agent(path, facts=facts).notes)


@pytest.mark.parametrize(
    "beside",
    [
        {"obs_rms": {"a": {"mean": MEAN[:2], "var": VAR[:2]}, "b": {"mean": MEAN[2:] * 0, "var": VAR[2:]}}},
        {"obs_rms": {"mean": MEAN, "var": VAR}, "state_rms": {"mean": MEAN + 1, "var": VAR + 1}},
        {"obs_rms": {"mean": MEAN}},
        {"config": {"normalize_observations": True}},
    ],
)
def test_statistics_that_cannot_be_applied_decide(beside: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent(**beside))
    assert sidecar.has_open_entries(restore_agent(path, facts=GIVEN).ledger)
    lone = saved(tmp_path / "lone.pt", {"model": states(mlp()), **beside})
    with contextlib.suppress(UnsupportedError):
        assert sidecar.has_open_entries(restore_agent(lone, facts=GIVEN).ledger)


@pytest.mark.parametrize(
    "beside",
    [
        {"ret_rms": {"mean": np.float64(1), "var": np.float64(2)}},
        {"reward_normalizer": buffers(running_mean=[0.0], running_var=[1.0])},
        {"value_mean_std": buffers(running_mean=np.zeros(3), running_var=np.ones(3))},
    ],
)
def test_statistics_of_rewards_are_no_part_of_the_policy(beside: dict[str, Any], tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent(**beside))
    restored.same(acts(path), torch_actions(restored.observations()))
    assert not sidecar.has_open_entries(restore_agent(path, facts=GIVEN).ledger)


# --- Statistics that a target has to hold -----------------------------------------------------------

NORM = {"mean": [0.1, -0.2, 1.0], "var": [0.5, 0.4, 9.0], "epsilon": 1e-5}
TARGETS = ("cleanrl", "tianshou", "fujimoto", "tf2rl", "spinningup", "elegantrl", "torch", "tf", "sb2")


@pytest.fixture(scope="module")
def normalised() -> np.ndarray:
    return acts(str(TORCH_SAMPLE), AgentFacts(obs_norm=NORM))


@pytest.mark.parametrize("to", TARGETS)
def test_folded_statistics_change_no_action(to: str, tmp_path: Path, normalised: np.ndarray) -> None:
    target = str(tmp_path / "b")
    facts = AgentFacts(obs_norm=NORM)
    done = convert(str(TORCH_SAMPLE), target, to=to, facts=facts, fold_normalizer=True, allow_missing=True)
    assert done.written
    np.testing.assert_allclose(restored.actions(target), normalised, rtol=0, atol=1e-5)
    # Also without the sidecar: the statistics are nowhere but in the layers.
    Path(f"{target}.ckpttool.json").unlink()
    left = restore_agent(target).known.obs_norm
    assert left is None or (set(left["mean"]), set(left["var"])) == ({0.0}, {1.0})


def test_a_limit_is_not_folded(tmp_path: Path) -> None:
    facts = AgentFacts(obs_norm={**NORM, "clip": 10.0})
    with pytest.raises(UnsupportedError) as error:
        convert(str(TORCH_SAMPLE), str(tmp_path / "b.pt"), facts=facts, fold_normalizer=True)
    assert "10" in str(error.value.found)
    with pytest.raises(UsageError):
        convert(str(TORCH_SAMPLE), str(tmp_path / "b.pt"), fold_normalizer=True)


@pytest.mark.parametrize("to", ["cleanrl", "fujimoto", "d3rlpy"])
def test_a_library_that_would_play_without_the_statistics_gets_nothing(to: str, tmp_path: Path) -> None:
    facts = AgentFacts(obs_norm={**NORM, "clip": 5.0})
    done = convert(str(TORCH_SAMPLE), str(tmp_path / "b"), to=to, facts=facts)
    assert "normalizer" in done.report.missing
    assert not done.written


LIBRARY = """
import json, sys, numpy, gymnasium
from stable_baselines3 import TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
found = []
for folder in sys.argv[1:]:
    venv = DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")])
    venv = VecNormalize.load(folder + "/vecnormalize.pkl", venv)
    model = TD3.load(folder + "/agent.zip", env=venv, device="cpu")
    obs = numpy.load(folder + "/obs.npy")
    actions = model.predict(venv.normalize_obs(obs), deterministic=True)[0]
    found.append([venv.training, venv.num_envs, actions.tolist()])
print(json.dumps(found))
"""


def test_stable_baselines3_plays_with_the_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3")
    pytest.importorskip("gymnasium")
    monkeypatch.setattr(sb3, "subprocess", warm_sb3.FORKING)
    limits = {tmp_path / "unlimited": None, tmp_path / "limited": 1.5}
    for folder, clip in limits.items():
        folder.mkdir()
        facts = AgentFacts(obs_norm={**NORM, "clip": clip})
        assert convert(str(TORCH_SAMPLE), str(folder / "agent.zip"), to="sb3", facts=facts).written
        np.save(folder / "obs.npy", restored.observations())
    played = warm_sb3.run_program(LIBRARY, *map(str, limits))
    for (folder, clip), (training, number, actions) in zip(limits.items(), played, strict=True):
        assert (training, number) == (False, 1)
        facts = AgentFacts(obs_norm={**NORM, "clip": clip})
        np.testing.assert_allclose(actions, acts(str(TORCH_SAMPLE), facts), rtol=0, atol=1e-5)
        (folder / "agent.zip.ckpttool.json").unlink()
        assert restore_agent(str(folder / "agent.zip")).known.obs_norm == {**NORM, "clip": clip}
        with pytest.raises(TargetExistsError):
            convert(str(TORCH_SAMPLE), str(folder / "other.zip"), to="sb3", facts=facts)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_a_zip_of_stable_baselines3_is_its_source(
    activation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own default is no setting in its file: its absence is no difference."""
    pytest.importorskip("stable_baselines3")
    monkeypatch.setattr(sb3, "subprocess", warm_sb3.FORKING)
    target = str(tmp_path / "agent.zip")
    convert(str(TORCH_SAMPLE), target, to="sb3", facts=AgentFacts(activations=activation))
    ran = in_process("diff", TORCH_SAMPLE, target, "--json")
    record = ran.json()
    assert (ran.status, record["changed"], record["only_left"]) == (0, [], [])


# --- Evidence that nothing uses ------------------------------------------------------------------------

NAMES: dict[str, list[str]] = {
    "observation statistics": [
        "obs_rms/mean", "agent/obs_normalizer/running_mean", "state_normalizer/mean", "normalize_obs",
        "obs_mean",
        "actor_critic/obs_rms/var", "running_mean_std/running_var", "input_mean", "observation_filter",
        "norm_obs", "obs_low", "state_scale", "clip_obs", "config/obs_clip",
        "obs_stats/mean", "state_preprocessor/running_variance", "empirical_normalization",
    ],
    "reward statistics": ["ret_rms/mean", "reward_scaling", "value_norm/running_mean", "normalize_rewards"],
    "action bounds": ["max_action", "config/action_scale", "act_limit", "action_high"],
    "activation": ["activation", "policy_kwargs/activation_fn", "hidden_nonlinearity", "head_activation",
                   "act_fn", "hidden_act", "act", "nonlin", "pi_act_fn"],
    "distribution": ["distribution", "dist_type", "squash_output", "tanh_squash", "action_dist",
                     "output_activation", "policy_out_activation", "final_act_fn"],
    "architecture": ["use_layer_norm", "residual", "dropout_rate", "batch_norm"],
    "wrapper": ["env_wrapper", "wrappers", "frame_stack", "env_wrapper_class"],
    "custom code": ["policy_class", "features_extractor_class", "custom_model", "custom_model_config"],
}  # fmt: skip
OTHERS = [
    "actor/fc1/weight", "log_alpha", "learning_rate", "gamma", "total_steps", "replay_buffer/obs", "epoch",
    "best_mean_reward", "normalize_images", "normalize_advantage", "optimizer/state/0/exp_avg", "seed",
    "transformer/h/0/attn/bias", "layer_norm1/weight", "bn1/weight", "action_space/shape", "target_entropy",
    "observation_space/low", "rng_state", "loss_scale", "version", "mean_return", "max_grad_norm",
    "n_actions", "actor/mu/weight", "n_acts", "fact", "contact", "state_dict", "input_dim", "obs_dim",
]  # fmt: skip


@pytest.mark.parametrize(("what", "name"), [(what, name) for what, names in NAMES.items() for name in names])
def test_names_have_a_topic(what: str, name: str) -> None:
    assert vocabulary.classify_topic(name) == what


@pytest.mark.parametrize("name", OTHERS)
def test_other_names_have_none(name: str) -> None:
    assert vocabulary.classify_topic(name) in (None, "reward statistics")


@pytest.mark.parametrize(
    ("config", "topics"),
    [
        ({"activation": "relu"}, {"activation"}),
        ({"activation": "tanh", "max_action": 2.0, "normalize_obs": False, "dropout": 0.0}, set()),
        ({"max_action": 3.0}, {"action bounds"}),
        ({"env_wrapper": "my.package.Scaler"}, {"wrapper"}),
        ({"env_wrapper": None, "frame_stack": 1}, set()),
        ({"features_extractor_class": "my.package.Net"}, {"custom code"}),
        ({"policy_class": "torch.nn.Sequential"}, set()),
        ({"critic_activation": "relu", "distribution": "tanh_normal", "use_layer_norm": False}, set()),
        ({"use_layer_norm": True, "residual": True}, {"architecture"}),
        # Functions that no network here has contradict every one that is played.
        ({"act_fn": "selu"}, {"activation"}),
        ({"hidden_act": "torch.nn.Mish", "nonlin": "hard_swish"}, {"activation"}),
        ({"output_activation": "Identity", "squash_output": False}, {"distribution"}),
        ({"output_activation": "tanh", "squash_output": True}, set()),
        ({"obs_clip": 5.0}, {"observation statistics"}),
        ({"min_action": -1.0}, {"action bounds"}),
    ],
)
@pytest.mark.parametrize("location", ["inside", "config.json", "params.yml"])
def test_settings_that_differ_are_not_used(
    config: dict[str, Any], topics: set[str], location: str, tmp_path: Path
) -> None:
    path = saved(tmp_path / "agent.pt", agent(**({"config": config} if location == "inside" else {})))
    if location.endswith("json"):
        (tmp_path / location).write_text(json.dumps({"agent": config}))
    elif location.endswith("yml"):
        lines = [f"  {name}: {json.dumps(value)}" for name, value in config.items()]
        (tmp_path / location).write_text("\n".join(["agent:", *lines]))
    assert {e.what for e in restore_agent(path, facts=GIVEN).ledger if e.use == "not used"} == topics


@pytest.mark.parametrize(
    ("config", "decides"),
    [
        ({"act_fn": "selu"}, True),
        ({"hidden_act": "tanh"}, False),
        ({"nonlinearity": "elu"}, True),
        ({"min_action": -1.0}, True),
        ({"output_activation": "linear"}, False),
    ],
)
def test_a_setting_that_certainly_contradicts_decides(
    config: dict[str, Any], decides: bool, tmp_path: Path
) -> None:
    path = saved(tmp_path / "agent.pt", agent(config=config))
    assert sidecar.has_open_entries(restore_agent(path, facts=GIVEN).ledger) == decides


def test_a_missing_squash_decides_against_a_default(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent(config={"squash": False}))
    assert sidecar.has_open_entries(
        restore_agent(path, facts=AgentFacts(activations="tanh", env="Pendulum-v1")).ledger
    )


@pytest.mark.parametrize("names", [("mean_", "scale_"), ("loc", "scale"), ("mu", "sigma"), ("low", "high")])
@pytest.mark.parametrize("group", ["scaler", "preproc", "zf"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_of_numbers_of_the_observations_are_never_silent(
    names: tuple[str, str], group: str, kind: str, tmp_path: Path
) -> None:
    rows = {
        name: row if kind == "numpy" else torch.tensor(row)
        for name, row in zip(names, (MEAN, VAR), strict=True)
    }
    for content in (agent(**{group: rows}), {"policy": states(mlp()), group: rows}):
        path = saved(tmp_path / f"{len(content)}.pt", content)
        try:
            restored_agent = restore_agent(path, facts=GIVEN)
        except UnsupportedError:
            continue  # refused: a lone policy may compute with what stands beside it
        topics = {entry.what for entry in restored_agent.ledger if entry.use != "assumed"}
        assert "observation statistics" in topics
        used = restored_agent.binding.facts.norm is not None
        assert used or sidecar.has_open_entries(restored_agent.ledger)


@pytest.mark.parametrize("name", ["vecnormalize.npz", "obs_normalizer.npz", "normalizer.json", "obs_rms.npz"])
@pytest.mark.parametrize("size", [3, 5])
def test_a_file_of_statistics_beside_the_checkpoint(name: str, size: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent())
    rows = {"mean": np.zeros(size), "var": np.ones(size)}
    if name.endswith("json"):
        (tmp_path / name).write_text(json.dumps({key: row.tolist() for key, row in rows.items()}))
    else:
        np.savez(tmp_path / name, **rows)
    (entry,) = (e for e in restore_agent(path, facts=GIVEN).ledger if e.use == "not used")
    assert (entry.what, entry.where, entry.decides) == ("observation statistics", name, size == 3)
    if size == 3:  # the hint works
        ran = in_process("eval", path, *WORDS, *str(entry.hint).split())
        assert ran.status == 0, ran.err


def test_stated_statistics_settle_what_other_vectors_are(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent(offsets=MEAN))
    (entry,) = (e for e in restore_agent(path, facts=GIVEN).ledger if e.use == "not used")
    assert (entry.what, entry.where, entry.decides) == ("observation statistics", "offsets", True)
    stated = replace(GIVEN, obs_norm={"mean": MEAN.tolist(), "var": VAR.tolist()})
    assert [e for e in restore_agent(path, facts=stated).ledger if e.use == "not used"] == []


def test_a_folder_of_many_files_hides_none_and_is_listed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "agent.pt", agent())
    for n in range(2_100):
        (tmp_path / f"ckpt-{n}.txt").touch()
    rows = {"mean": MEAN, "std": np.sqrt(VAR)}
    np.savez(tmp_path / "obs_stats.npz", **rows)
    settled = time.time() - 60
    os.utime(tmp_path, (settled, settled))
    listed: list[object] = []
    monkeypatch.setattr(os, "listdir", lambda at, own=os.listdir: listed.append(at) or own(at))
    for _ in range(3):
        ledger = restore_agent(open_checkpoint(path), facts=GIVEN).ledger
        assert [entry.where for entry in ledger if entry.decides] == ["obs_stats.npz"]
    # Once for what is beside the agent, once for the sidecars of interrupted conversions.
    assert listed.count(str(tmp_path)) == 2
    # A changed folder is listed again.
    np.savez(tmp_path / "obs_rms.npz", **rows)
    ledger = restore_agent(path, facts=GIVEN).ledger
    assert {entry.where for entry in ledger if entry.decides} == {"obs_stats.npz", "obs_rms.npz"}


def test_files_that_were_not_opened_are_named(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent())
    for n in range(45):
        (tmp_path / f"config_{n}.yaml").write_text("lr: 1\n")
    np.savez(tmp_path / "obs_stats.npz", mean=MEAN, std=np.sqrt(VAR))
    ledger = restore_agent(path, facts=GIVEN).ledger
    assert [entry.where for entry in ledger if entry.decides] == ["obs_stats.npz"]
    unknown = [entry for entry in ledger if entry.use == "cannot be known" and entry.where == str(tmp_path)]
    assert [entry.value.split()[0] for entry in unknown] == ["6"]


def test_run_folders_that_were_not_listed_are_named(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    path = saved(tmp_path / "best" / "agent.pt", agent())
    for n in range(99):
        (tmp_path / f"a{n}").mkdir()
    assert all(entry.use != "cannot be known" for entry in restore_agent(path, facts=GIVEN).ledger)
    for n in range(3):
        (tmp_path / f"b{n}").mkdir()
    (entry,) = (entry for entry in restore_agent(path, facts=GIVEN).ledger if entry.use == "cannot be known")
    assert (entry.what, entry.where) == ("observation statistics", f"{tmp_path}: 2 more folders of the run")


def test_another_checkpoint_is_no_file_of_statistics(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent())
    saved(tmp_path / "obs_rms.pt", agent())
    (tmp_path / "config.json").write_text("[not json")
    assert [e for e in restore_agent(path, facts=GIVEN).ledger if e.use == "not used"] == []


def test_weights_of_keras_models_are_not_opened_as_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "agent.pt", agent())
    for name in ("norm.weights.h5", "mean_std.weights.h5", "stats.h5"):
        (tmp_path / name).write_bytes(b"\x89HDF\r\n\x1a\n")
    opened: list[str] = []
    right = detect.open_checkpoint
    monkeypatch.setattr(detect, "open_checkpoint", lambda file: opened.append(Path(file).name) or right(file))
    restore_agent(path, facts=GIVEN)
    assert [name for name in opened if name.endswith(".h5")] == ["stats.h5"]


# --- What stands between the layers ----------------------------------------------------------------


def sequential(*kinds: str) -> Any:
    """Return a Sequential of 16 units: linear, norm, plain (a norm without parameters) and relu."""
    modules: list[Any] = []
    width = 3
    for number, kind in enumerate(kinds):
        if kind == "linear":
            last = "linear" not in kinds[number + 1 :]
            modules.append(nn.Linear(width, 1 if last else 16))
            width = 16
        else:
            plain = nn.LayerNorm(16, elementwise_affine=False)
            modules.append({"norm": nn.LayerNorm(16), "plain": plain, "relu": nn.ReLU()}[kind])
    return nn.Sequential(*modules)


JOINTS: dict[tuple[str, ...], str | None] = {
    ("linear", "norm", "relu", "linear"): "played",
    ("linear", "relu", "linear", "relu", "linear"): "played",
    ("linear", "relu", "norm", "linear"): None,
    ("linear", "relu", "norm", "linear", "relu", "norm", "linear"): None,
    ("linear", "relu", "linear", "linear"): None,
    ("linear", "plain", "relu", "linear"): "assumed",
    ("linear", "relu", "plain", "linear", "relu", "linear"): "assumed",
}


@pytest.mark.parametrize("kinds", JOINTS, ids=" ".join)
@pytest.mark.parametrize("whole", [True, False], ids=["agent", "lone"])
def test_the_place_of_norms_and_activations_is_that_of_the_file(
    kinds: tuple[str, ...], whole: bool, tmp_path: Path
) -> None:
    module = sequential(*kinds)
    content = {**agent(), "actor": states(module)} if whole else states(module)
    path = saved(tmp_path / "agent.pt", content)
    facts = AgentFacts(activations="relu", head="tanh", action_low=-2, action_high=2)
    if JOINTS[kinds] is None:
        with pytest.raises((UnsupportedError, UsageError)):
            acts(path, facts)
        return
    entries = derive_network_settings(restore_agent(path, facts=facts), ActionBounds([-2.0], [2.0], None))[1]
    if JOINTS[kinds] == "assumed":
        assert any("without weights" in entry.value for entry in entries)
        return
    with torch.no_grad():
        actions = 2 * torch.tanh(module(torch.tensor(restored.observations()))).numpy()
    restored.same(acts(path, facts), actions)


def state_of_layers(**sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Return the state_dict of dense layers with these names and sizes."""
    rows = ((name.replace("__", "."), nn.Linear(*size)) for name, size in sizes.items())
    return {f"{name}.{tensor}": value for name, layer in rows for tensor, value in states(layer).items()}


@pytest.mark.parametrize(
    "name", ["res1", "residual_block", "skip", "gate", "shortcut_2", "attn", "skipLayer"]
)
def test_names_of_joined_layers_decide(name: str, tmp_path: Path) -> None:
    content = state_of_layers(**{"inp": (3, 16), name: (16, 16), "out": (16, 1)})
    agent_ = restore_agent(saved(tmp_path / "a.pt", {**agent(), "actor": content}), facts=GIVEN)
    assert sidecar.has_open_entries(agent_.ledger)
    # Of a policy alone no file records the order of the layers.
    with pytest.raises(UnsupportedError):
        restore_agent(saved(tmp_path / "lone.pt", content), facts=GIVEN)


BRANCHES = {
    "a block of two layers": {
        "inp": (3, 8),
        "blocks__0__fc1": (8, 8),
        "blocks__0__fc2": (8, 8),
        "out": (8, 1),
    },
    "a wide block": {"inp": (3, 8), "block1__fc1": (8, 32), "block1__fc2": (32, 8), "out": (8, 1)},
    "a projection between": {"inp": (3, 8), "fc1": (8, 8), "proj": (8, 4), "branch": (4, 4), "out": (4, 1)},
}
CHAINS = {
    "blocks of one layer": {"block1": (3, 8), "block2": (8, 8), "out": (8, 1)},
    "projections at the ends": {"in_proj": (3, 8), "fc1": (8, 8), "out_proj": (8, 1)},
    "one width": {"fc1": (3, 8), "fc2": (8, 8), "fc3": (8, 8), "out": (8, 1)},
}


@pytest.mark.parametrize("case", [*BRANCHES, *CHAINS])
def test_blocks_and_projections_of_one_width_are_no_chain(case: str, tmp_path: Path) -> None:
    content = state_of_layers(**(BRANCHES | CHAINS)[case])
    path = saved(tmp_path / "lone.pt", content)
    # The same layers weigh the same in a library's agent.
    beside = restore_agent(saved(tmp_path / "a.pt", {**agent(), "actor": content}), facts=GIVEN)
    assert sidecar.has_open_entries(beside.ledger) == (case in BRANCHES)
    if case in CHAINS:
        assert not sidecar.has_open_entries(restore_agent(path, facts=GIVEN).ledger)
        return
    with pytest.raises(UnsupportedError) as refused_:
        restore_agent(path, facts=GIVEN)
    assert refused_.value.found is not None


def test_one_number_times_tanh_is_not_for_uneven_bounds(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    path = saved(tmp_path / "agent.pt", agent())
    uneven = {"action_low": -1.0, "action_high": 3.0}
    with pytest.raises(UsageError):
        export(path, str(tmp_path / "a.onnx"), facts=AgentFacts(**uneven))
    for head in ("tanh", "affine"):
        export(path, str(tmp_path / f"{head}.onnx"), facts=AgentFacts(head=head, **uneven))


# --- Sidecars that contradict the checkpoint -----------------------------------------------------------


def sidecar_of(path: str, facts: Mapping[str, Any]) -> None:
    provenance = dict.fromkeys(facts, "read from x.pt")
    built = Sidecar(digest(path).sha256, **facts, provenance=provenance)
    Path(f"{path}.ckpttool.json").write_bytes(built.encode())


def recording(path: Path) -> str:
    """Write an agent whose file records bounds and activation, with statistics beside it."""
    sb3_files.td3_agent(path, policy_kwargs={"activation_fn": nn.Tanh})
    sb3_files.statistics(path.parent / "vecnormalize.pkl")
    return str(path)


@pytest.mark.parametrize(
    "planted",
    [
        {"action_low": [-9.0, -9.0], "action_high": [9.0, 9.0]},
        {"obs_norm": {"mean": [5.0] * 3, "var": [1.0] * 3, "epsilon": 1e-8, "clip": 5.0}},
        {"activations": ["relu", "relu"]},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_a_planted_fact_is_a_finding_and_is_not_used(planted: dict[str, Any], tmp_path: Path) -> None:
    path = recording(tmp_path / "agent.zip")
    before = restore_agent(path).known
    sidecar_of(path, planted)
    agent = restore_agent(path)
    assert sidecar.has_open_entries(agent.ledger)
    for name in planted:
        assert getattr(agent.known, name) == getattr(before, name)
    assert any(finding.topic == "agent" for finding in diagnose(path).findings)


def test_a_sidecar_that_says_what_the_checkpoint_says_is_no_finding(tmp_path: Path) -> None:
    path = recording(tmp_path / "agent.zip")
    known = restore_agent(path).known
    names = ("action_low", "action_high", "obs_norm", "activations")
    sidecar_of(path, {name: getattr(known, name) for name in names})
    assert not [entry for entry in restore_agent(path).ledger if entry.use == "not used"]


class Normalizer(nn.Module):
    """Statistics of observations with a formula that only the code states."""

    def __init__(self, outside: bool = False, limit: float = 0.0, epsilon: float = 0.02) -> None:
        super().__init__()
        self.outside, self.limit, self.epsilon = outside, limit, epsilon
        self.register_buffer("running_mean", torch.tensor([0.5, -0.5, 1.0]))
        self.register_buffer("running_var", torch.tensor([0.25, 1e-3, 4.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.outside:
            x = (x - self.running_mean) / (torch.sqrt(self.running_var) + self.epsilon)
        else:
            x = (x - self.running_mean) / torch.sqrt(self.running_var + self.epsilon)
        return torch.clamp(x, -self.limit, self.limit) if self.limit > 0 else x


class NormalizedPolicy(nn.Module):
    """A policy with such statistics."""

    def __init__(self, normalizer: Normalizer) -> None:
        super().__init__()
        self.normalizer, self.l1, self.l2 = normalizer, nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.l2(torch.relu(self.l1(self.normalizer(x)))))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_a_sidecar_completes_the_formula_of_stored_statistics(
    outside: bool, limit: float, to: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, target = NormalizedPolicy(Normalizer(outside, limit)), str(tmp_path / "target")
    torch.jit.script(model).save(tmp_path / "script.pt")
    convert(str(tmp_path / "script.pt"), target, to=to)
    agent = restore_agent(target)
    assert not [entry for entry in agent.ledger if entry.use == "not used" or "normalised" in entry.value]
    played = ckpttool.load_agent(target, facts=AgentFacts(head="affine", action_low=-1.0, action_high=1.0))
    observations = torch.randn(16, 3)
    np.testing.assert_allclose(
        played.act(observations.numpy()), model(observations).detach().numpy(), rtol=0, atol=1e-6
    )
    # Another variance than the stored one is no formula.
    own = json.loads(Path(f"{target}.ckpttool.json").read_text())
    own["obs_norm"]["var"][1] *= 2
    Path(f"{target}.ckpttool.json").write_text(json.dumps(own))
    assert [entry.what for entry in restore_agent(target).ledger if entry.use == "not used"] == [
        "observation statistics"
    ]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_numbers_of_a_trace_are_no_part_of_a_state_dict(tmp_path: Path) -> None:
    model, target = NormalizedPolicy(Normalizer()), str(tmp_path / "target.pt")
    torch.jit.trace(model, torch.zeros(1, 3)).save(tmp_path / "trace.pt")
    convert(str(tmp_path / "trace.pt"), target)
    model.load_state_dict(torch.load(target))
    known = restore_agent(target).known.obs_norm
    assert known is not None
    np.testing.assert_allclose(known["var"], [0.27, 0.021, 4.02], rtol=1e-6)


def test_an_assumed_formula_stays_one_in_a_target(tmp_path: Path) -> None:
    torch.save(NormalizedPolicy(Normalizer()).state_dict(), tmp_path / "policy.pt")
    convert(str(tmp_path / "policy.pt"), str(tmp_path / "target.safetensors"))
    for name in ("policy.pt", "target.safetensors"):
        assert [entry for entry in restore_agent(str(tmp_path / name)).ledger if "normalised" in entry.value]


# --- The commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "status"), [(True, 1), (False, 0)])
def test_the_commands_exit_with_one_where_it_certainly_matters(
    value: bool, status: int, tmp_path: Path, shared_workers: None
) -> None:
    path = saved(tmp_path / "agent.pt", agent(config={"normalize_obs": value}))
    facts = WORDS[:6]
    commands = {
        "eval": [path, *WORDS],
        "verify": [path, path, *facts],
        "convert": [path, tmp_path / f"{value}.onnx", *facts],
        "doctor": [path, *facts],
    }
    for name, words in commands.items():
        ran = in_process(name, *words, "--json")
        assert ran.status == status, (name, ran.err)
        document = ran.json()
        assert sidecar.has_open_entries(sidecar.parse_entries(document["ledger"])) == bool(status), name
        schemas.require(name, document)
    text = in_process("eval", path, *WORDS).out
    assert ("not used:" in text) == bool(status)


def test_the_sidecar_of_another_checkpoint_is_no_evidence(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", agent())
    document = {"action_low": [-7.0], "action_high": [7.0], "activations": ["elu"]}
    for name in ("other.pt", "agent.pt-1"):
        (tmp_path / f"{name}.ckpttool.json").write_text(json.dumps(document))
    assert not [entry for entry in restore_agent(path, facts=GIVEN).ledger if "ckpttool.json" in entry.where]


def test_entries_survive_json() -> None:
    entries = (
        LedgerEntry("not used", "wrapper", "x", "config.yml", decides=True, hint="leave it out"),
        LedgerEntry("assumed", "activation", "relu", origin="default"),
    )
    assert sidecar.parse_entries(json.loads(json.dumps(sidecar.entries_to_json(entries)))) == entries


# --- What programs call it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("beside", "decides"),
    [
        ({"mu": MEAN, "sigma": VAR}, True),
        ({"norm": [MEAN.tolist(), VAR.tolist()]}, True),
        ({"whatever": np.stack([MEAN, VAR])}, True),
        ({"shift": np.zeros(3), "scale": np.ones(3)}, False),
        ({"last_obs": MEAN[None]}, False),
        ({"observation_space": {"low": MEAN, "high": VAR}}, False),
        ({"other": {"weight": np.ones((4, 3)), "bias": MEAN}}, False),
        ({"episode": np.arange(3)}, False),
    ],
)
def test_numbers_per_observation_count_under_any_name(
    beside: dict[str, Any], decides: bool, tmp_path: Path
) -> None:
    ledger = restore_agent(saved(tmp_path / "agent.pt", agent(**beside)), facts=GIVEN).ledger
    assert sidecar.has_open_entries(ledger) is decides


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"activation": "relu"}, {"activations": ["relu", "relu"]}),
        ({"actor": {"hidden_act": "torch.nn.ELU"}}, {"activations": ["elu", "elu"]}),
        ({"activations": ["relu", "tanh"]}, {"activations": ["relu", "tanh"]}),
        ({"max_action": 0.5}, {"action_low": [-0.5], "action_high": [0.5]}),
        ({"action_low": [-1.0], "action_high": [3.0]}, {"action_low": [-1.0], "action_high": [3.0]}),
    ],
)
def test_settings_of_the_file_overrule_the_default(
    config: dict[str, Any], facts: dict[str, list[Any]], tmp_path: Path
) -> None:
    agent = restore_agent(saved(tmp_path / "agent.pt", {**named_layers(), "config": config}))
    assert {name: list(getattr(agent.known, name)) for name in facts} == facts
    assert all(
        agent.known.provenance[name].startswith("read from config") for name in facts if "high" not in name
    )
    assert not sidecar.has_open_entries(agent.ledger)


@pytest.mark.parametrize(
    "config",
    [
        {"activation": "softsign"},
        {"activation": "relu", "nonlinearity": "tanh"},
        {"squash_output": False},
        {"last_activation": "none"},
        {"obs_scale": 0.1},
        {"action_repeat": 4},
        {"actor_cls": "mine.Gated"},
    ],
)
def test_settings_that_cannot_be_applied_decide(config: dict[str, Any], tmp_path: Path) -> None:
    agent = restore_agent(saved(tmp_path / "agent.pt", {**named_layers(), "config": config}))
    assert sidecar.has_open_entries(agent.ledger)


@pytest.mark.parametrize("name", ["obs_low", "obs_high", "observation_limit", "state_max"])
def test_limits_of_observations_that_are_not_used_are_named(name: str, tmp_path: Path) -> None:
    ledger = restore_agent(saved(tmp_path / "agent.pt", agent(config={name: 5.0})), facts=GIVEN).ledger
    assert [entry.use for entry in ledger if entry.where.endswith(name)] == ["not used"]


def named_layers() -> dict[str, Any]:
    """Return an agent with the names of TD3's authors, whose layout has defaults."""
    names = {"0": "l1", "2": "l2", "4": "l3"}
    return {
        part: {f"{names[key[0]]}{key[1:]}": value for key, value in tensors.items()}
        for part, tensors in agent().items()
    }


@pytest.mark.corpus
def test_real_agents_have_no_false_evidence(corpus: Path) -> None:
    result = {}
    for file in sorted(corpus.rglob("*")):
        if file.suffix in (".zip", ".pth", ".h5f", ".keras") and file.stat().st_size < 1 << 20:
            try:
                entries = restore_agent(str(file)).ledger
            except CkpttoolError:
                continue
            result[file] = [entry for entry in entries if entry.use == "not used"]
    assert len(result) > 10
    assert not {file: entries for file, entries in result.items() if entries}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("args.txt", "policy: MyResidualPolicy"),
        ("args.txt", "Namespace(policy='MyResidualPolicy', lr=0.1)"),
        ("args.yml", "policy: ResNetPolicy"),
        ("config.json", '{"actor": {"class_name": "GatedActor"}}'),
        (".hydra/config.yaml", "agent: {actor: {_target_: ResidualActor}}"),
        ("config.yaml", "network: residual_mlp"),
    ],
)
def test_a_class_of_ones_own_beside_the_checkpoint_decides(file: str, text: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"actor": states(mlp()), "critic": states(mlp(4))})
    assert not [entry for entry in restore_agent(path, facts=GIVEN).ledger if entry.open]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text + "\n")
    entries = [entry for entry in restore_agent(path, facts=GIVEN).ledger if entry.open]
    assert [entry.what for entry in entries] == ["custom code"]
    assert entries[0].where.startswith(file)


@pytest.mark.parametrize(
    "text",
    [
        "policy: MlpPolicy", "policy: TD3", "policy: ActorCriticPolicy", "model: Actor", "agent: SACAgent",
        "policy: MLPActorCritic", "network: mlp", "model_name: MyBestRun", "policy: stochastic",
        "policy: SquashedGaussianMLPActor", "policy: ContinuousActorProbabilistic",
        "optimizer: {_target_: torch.optim.Adam}", "agent: {_target_: agents.sac.SACAgent}",
        "critic: {_target_: MyResidualCritic}", "policy: MultiInputPolicy", "agent_type: TD3Agent",
    ],
)  # fmt: skip
def test_a_librarys_class_beside_the_checkpoint_decides_nothing(text: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"actor": states(mlp()), "critic": states(mlp(4))})
    (tmp_path / "config.yaml").write_text(text + "\n")
    assert not [entry for entry in restore_agent(path, facts=GIVEN).ledger if entry.open]


class Pickled(nn.Module):  # type: ignore[misc, name-defined]
    """An actor of a program's own: layers by name, one activation for all of them."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.act = activation


class ResidualPart(nn.Module):  # type: ignore[misc, name-defined]
    """A part of an actor whose class's name shows a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.l2 = nn.Linear(16, 16)


class WithPart(nn.Module):  # type: ignore[misc, name-defined]
    """An actor with a part of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.l1, self.part, self.l3 = nn.Linear(3, 16), ResidualPart(), nn.Linear(16, 1)


def pickled(path: Path, actor: Any) -> str:
    return saved(path / "m.pt", {"actor": actor, "critic": states(mlp(4))})


@pytest.mark.parametrize(
    ("actor", "activation"),
    [
        (Pickled(nn.SiLU()), "silu"),
        (Pickled(nn.Tanh()), "tanh"),
        (
            nn.Sequential(
                nn.Linear(3, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU(), nn.Linear(16, 1), nn.Tanh()
            ),
            "elu",
        ),
    ],
)  # fmt: skip
def test_the_parts_of_a_pickled_module_state_its_activations(
    actor: Any, activation: str, tmp_path: Path
) -> None:
    agent = restore_agent(pickled(tmp_path, actor))
    assert agent.known.activations == [activation] * 2
    assert str(agent.known.provenance["activations"]).startswith("read")


@pytest.mark.parametrize("function", [nn.Hardsigmoid(), nn.ELU(alpha=0.5), nn.PReLU()])
def test_a_pickled_activation_that_cannot_be_computed_is_refused(function: Any, tmp_path: Path) -> None:
    agent = restore_agent(pickled(tmp_path, Pickled(function)))
    with pytest.raises(UnsupportedError):
        agent.runnable("actor")


def test_a_pickled_part_with_a_sum_in_its_name_decides(tmp_path: Path) -> None:
    topics = [entry.what for entry in restore_agent(pickled(tmp_path, WithPart())).ledger if entry.open]
    assert "custom code" in topics


# --- Conversions of models -----------------------------------------------------------------------------


def classifier() -> dict[str, Any]:
    """Return the state_dict of a model whose layers no policy has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return dict(model.state_dict())


def archive(**arrays: Any) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


ADAPTED = {"0.lora_A.weight": torch.ones(4, 6), "0.lora_B.weight": torch.ones(16, 4)}
RAW = {"mean": torch.ones(6), "var": torch.full((6,), 2.0)}
# What lies in the file or beside it, how it is converted, and what the ledger names with its weight.
MODELS: dict[str, tuple[dict[str, Any], dict[str, bytes], dict[str, Any], list[tuple[str, bool]]]] = {
    "nothing": (classifier(), {}, {}, []),
    "statistics beside it": (
        classifier(),
        {"obs_rms.npz": archive(mean=np.zeros(6), var=np.ones(6))},
        {},
        [("observation statistics", True)],
    ),
    "statistics of another size": (
        classifier(),
        {"obs_rms.npz": archive(mean=np.zeros(5), var=np.ones(5))},
        {},
        [("observation statistics", False)],
    ),
    "a scaler in JSON": (
        classifier(),
        {"scaler.json": json.dumps({"mean": [1.0] * 6, "scale": [2.0] * 6}).encode()},
        {},
        [("observation statistics", True)],
    ),
    "a pickled scaler": (
        classifier(),
        {"scaler.pkl": pickle.dumps({"mean_": np.ones(6), "scale_": np.ones(6)})},
        {},
        [("observation statistics", True)],
    ),
    "a setting": (
        classifier(),
        {"config.yaml": b"normalize_observations: true\nlayer_norm: false\n"},
        {},
        [("observation statistics", True)],
    ),
    "another setting": (
        classifier(),
        {"config.json": b'{"hidden_act": "gelu", "layer_norm_eps": 1e-5}'},
        {},
        [],
    ),
    "statistics outside of the part": (
        {"model": classifier(), "obs_rms": RAW},
        {},
        {"part": "model"},
        [("observation statistics", True)],
    ),
    "statistics that are written": ({"model": classifier(), "obs_rms": RAW}, {}, {}, []),
    "an average outside of the part": (
        {"model": classifier(), "ema": {name: value + 1 for name, value in classifier().items()}},
        {},
        {"part": "model"},
        [("averaged weights", False)],
    ),
    "low-rank weights": (
        {**classifier(), **ADAPTED},
        {},
        {"allow_missing": True},
        [("low-rank weights", True)],
    ),
    "low-rank weights of another part": (
        {"model": classifier(), "other": {**classifier(), **ADAPTED}},
        {},
        {"part": "model"},
        [("low-rank weights", False)],
    ),
    "scales of another part": (
        {"model": classifier(), "other": {"0.weight": torch.ones(3, 2), "0.weight_scale": torch.ones(3)}},
        {},
        {"part": "model"},
        [("quantisation scales", False)],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_what_a_model_depends_on_and_is_not_written_is_named(case: str, tmp_path: Path) -> None:
    content, beside, how, named = MODELS[case]
    for name, data in beside.items():
        (tmp_path / name).write_bytes(data)
    path = saved(tmp_path / "model.pt", content)
    done = convert(path, str(tmp_path / "out"), to="keras", **how)
    assert done.written
    assert [(entry.what, entry.decides) for entry in done.ledger if entry.use == "not used"] == named


def test_a_model_of_ones_own_is_filled_with_the_same_ledger(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", {"model": classifier(), "obs_rms": RAW})
    (tmp_path / "scaler.json").write_text(json.dumps({"mean": [1.0] * 6, "scale": [2.0] * 6}))
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    done = ckpttool.load_into(model, path, part="model")
    assert done.decides
    assert [entry.where for entry in done.ledger] == ["obs_rms/mean", "scaler.json"]
    schemas_of = sidecar.parse_entries(done.document()["ledger"])
    assert schemas_of == done.ledger
    converted = convert(path, str(tmp_path / "out"), to="keras", part="model")
    assert converted.ledger == done.ledger


def test_a_norm_that_is_written_without_its_running_statistics_decides(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path / "model.pt", classifier()))
    names = {name for name in checkpoint.tree.names.values() if "running" not in name}
    entries = evidence.unconverted_entries(checkpoint, names)
    assert [(entry.what, entry.where, entry.decides) for entry in entries] == [
        ("running statistics", "1/running_mean", True)
    ]


def test_kinds_of_layers_are_stated_to_load_into(tmp_path: Path) -> None:
    embedding = nn.Embedding(7, 4)
    path = saved(tmp_path / "model.pt", {"table.weight": embedding.weight.detach().clone()})
    model = nn.ModuleDict({"table": nn.Embedding(7, 4)})
    done = ckpttool.load_into(model, path, kinds={"table": "embedding"})
    assert done.matched[0].kind == "embedding"
    with pytest.raises(UsageError):
        ckpttool.load_into(model, path, kinds={"table": "nothing"})


def test_a_command_that_leaves_statistics_behind_exits_1(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.pt", {"model": classifier(), "obs_rms": RAW})
    ran = in_process("convert", path, str(tmp_path / "out"), "--to", "keras", "--part", "model", "--json")
    assert ran.status == 1
    assert sidecar.has_open_entries(sidecar.parse_entries(ran.json()["ledger"]))
    assert in_process("convert", path, str(tmp_path / "all"), "--to", "keras").status == 0


def test_statistics_in_another_file_are_not_part_of_a_conversion(tmp_path: Path) -> None:
    """The source is converted whole; only what plays or exports it needs them."""
    path = saved(tmp_path / "model.pt", agent())
    np.savez(tmp_path / "obs_norm.npz", mean=np.zeros(3), var=np.ones(3))
    facts = ("--activation", "relu", "--head", "tanh", "--bounds", "-2", "2")
    for target, status in (("out", 0), ("out.onnx", 1)):
        options = ("--to", "tf") if status == 0 else facts
        ran = in_process("convert", path, str(tmp_path / target), *options, "--json")
        assert ran.status == status, ran.err
        rows = [row for row in ran.json()["ledger"] if row["where"] == "obs_norm.npz"]
        assert {row["concerns"] for row in rows} == {"playing"}


# --- One ledger in all commands ------------------------------------------------------------------------


def ledgers_of(path: str, folder: Path) -> dict[str, set[LedgerEntry]]:
    """Return the ledger of each command that reads the checkpoint alone."""
    ledgers = {"doctor": set(diagnose(path).ledger)}
    runs: dict[str, Callable[[], sidecar.LedgerEntries]] = {
        "restore": lambda: restore_agent(path).ledger,
        "convert to torch": lambda: convert(path, str(folder / "a"), to="torch", dry_run=True).ledger,
        "convert to keras": lambda: convert(path, str(folder / "a"), to="keras", dry_run=True).ledger,
        "export": lambda: export(path, str(folder / "a.onnx"), dry_run=True).ledger,
    }
    for name, run in runs.items():
        with contextlib.suppress(CkpttoolError):  # one that cannot be done has no ledger
            ledgers[name] = set(run())
    return ledgers


def require_one_ledger(path: str, folder: Path) -> set[LedgerEntry]:
    ledgers = ledgers_of(path, folder)
    base = ledgers.get("restore", ledgers["doctor"])
    for name, entries in ledgers.items():
        # An environment gives bounds; a target's own defaults are assumed.
        assert base - entries <= {sidecar.NO_BOUNDS}, (path, name)
        assert {entry.use for entry in entries - base} <= {"assumed"}, (path, name)
    return base


@pytest.mark.parametrize("sample", [TORCH_SAMPLE, TF_SAMPLE])
def test_all_commands_have_one_ledger(sample: Path, tmp_path: Path) -> None:
    base = require_one_ledger(str(sample), tmp_path)
    assert {entry.what for entry in base} == {"activation", "action map", "action bounds", "environment"}


@pytest.mark.parametrize("case", ["a limit beside them", "beside a lone policy", "in the module"])
def test_all_commands_have_one_ledger_of_statistics(case: str, tmp_path: Path) -> None:
    content, _ = STATISTICS[case]
    base = require_one_ledger(saved(tmp_path / "agent.pt", content), tmp_path)
    assert ("used", "observation statistics") in {(entry.use, entry.what) for entry in base}


def test_verify_and_eval_have_the_ledger_of_the_others(tmp_path: Path) -> None:
    path = saved(tmp_path / "agent.pt", {**named_layers(), "config": {"obs_high": 5.0}})
    base = set(restore_agent(path).ledger)
    assert {entry.use for entry in base} >= {"not used", "assumed", "cannot be known"}
    played = in_process("eval", path, "--env", "Pendulum-v1", "--episodes", "1", "--json").json()
    compared = in_process("verify", path, path, "--json").json()
    for document in (played, compared):
        entries = set(sidecar.parse_entries(document["ledger"]))
        assert base - entries <= {sidecar.NO_BOUNDS}
        assert {entry.use for entry in entries - base} <= {"assumed"}


@pytest.mark.corpus
def test_all_commands_have_one_ledger_of_real_checkpoints(corpus: Path, tmp_path: Path) -> None:
    zips = sorted((corpus / "torch" / "sb3_zoo").rglob("*.zip"))[::6]
    others = [
        *(corpus / "torch").rglob("*.pth"),
        *(corpus / "tf").rglob("*.keras"),
        *(corpus / "tf").rglob("*.h5"),
    ]
    checked = 0
    for file in (*zips, *sorted(others)[::4]):
        with contextlib.suppress(CkpttoolError):
            require_one_ledger(str(file), tmp_path)
            checked += 1
    assert checked > 8


@pytest.mark.corpus
def test_conversions_of_real_models_have_no_false_evidence(corpus: Path, tmp_path: Path) -> None:
    """A slice of the corpus: nothing that is written lacks statistics, low-rank parts or averages."""
    result = {}
    for file in sorted(corpus.rglob("*"))[::2]:
        if file.suffix in (".zip", ".pth", ".pt", ".h5", ".keras", ".safetensors", ".bin"):
            with contextlib.suppress(CkpttoolError):
                done = convert(str(file), str(tmp_path / "a"), to="torch", dry_run=True)
                result[file] = [entry for entry in done.ledger if entry.open]
    assert len(result) > 20
    assert not {file: entries for file, entries in result.items() if entries and file.suffix != ".pth"}
