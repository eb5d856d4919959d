"""Generated agents: programs have the recorded verdicts, and no agent is recorded as a fault."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import predictions
from tests import tensorflow_child
from tests.agent_truth import discrete, libraries, matrix, tf_actors


def test_no_recorded_agent_is_wrong_without_a_word():
    verdicts = matrix.recorded()
    assert len(verdicts) >= 260
    assert not [verdict for verdict in verdicts.values() if verdict.state in matrix.FAULTS]
    # Weights alone hold neither activations nor what stands between the layers.
    bare = ("_weights", "_ckpt")
    trained = [
        verdict
        for verdict in verdicts.values()
        if verdict.library != "variants" and not (verdict.library == "keras" and verdict.agent.endswith(bare))
    ]
    right = [verdict for verdict in trained if verdict.state in (matrix.RIGHT, matrix.ASSUMED)]
    assert len(right) / len(trained) >= 0.7


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agents")
    assert matrix.make(folder, ["programs"]) == []
    return folder


@pytest.mark.torch
def test_agents_of_programs_have_the_recorded_verdicts(programs):
    known = matrix.recorded()
    for verdict in matrix.judged(programs):
        assert verdict.state == known[verdict.agent].state, verdict.words


# Of the variants, which `python -m tests.agent_truth` goes through, one of each cause.
VARIANTS = [
    "statistics_greek", "statistics_lists", "statistics_stacked", "statistics_parts", "scale",
    "set_activations",
    "set_act_fn", "set_mish", "set_squash", "set_action_limit", "set_residual", "set_model", "beside_npy",
    "beside_csv", "beside_hydra_config_yaml", "class_args_txt", "inside_gain",
]  # fmt: skip


@pytest.mark.torch
def test_variants_of_a_program_have_the_recorded_verdicts(tmp_path):
    assert matrix.make(tmp_path, ["variants"]) == []
    known = matrix.recorded()
    names = [f"variant_{name}" for name in VARIANTS]
    verdicts = matrix.judged(tmp_path, names)
    assert len(verdicts) == len(names)
    for verdict in verdicts:
        assert verdict.state == known[verdict.agent].state, verdict.words


@pytest.mark.tensorflow
def test_actors_of_keras_have_the_recorded_verdicts(tmp_path):
    tensorflow_child.require("tensorflow", "keras")
    names = [f"tf_{name}" for name in tf_actors.FEW]
    assert matrix.make(tmp_path, ["keras"], names) == []
    known, verdicts = matrix.recorded(), matrix.judged(tmp_path)
    assert {verdict.agent for verdict in verdicts} == set(names)
    for verdict in verdicts:
        assert verdict.state == known[verdict.agent].state, verdict


# Agents of libraries' own code, one of each cause; `python -m tests.agent_truth` goes through all of them.
LIBRARIES = {
    "rllib": "ppo_default ppo_swish ppo_free_separate ppo_head_layer_norm ppo_filter_small_clip sac_head",
    "rllib_policies": "policy_ppo_relu policy_ppo_free_log_std policy_sac_tanh",
    "rl_games": "normalized_config relu relu_config learned_sigma mu_tanh separate",
    "elegantrl": "sac_tanh ppo_hardswish td3_gelu td3_tanh_state",
    "rsl_rl_models": "log_std lrelu_settings mish_settings state_dependent distilled_settings beta",
    "skrl_models": "gaussian_elu_normed gaussian_tanh_normed deterministic_tanh_output",
    "d3rlpy_more": "bear crr td3_min_max bc_tanh_standard td3_batch_norm",
    "tianshou_more": "ppo_policy sac_tanh ddpg_whole sac_whole ppo_statistics",
    "sb3_more": "ppo_silu ppo_mish sac_expln ppo_dict",
    "contrib_more": "crossq_eps tqc_gsde",
}
_PREFIXES = {"rllib_policies": "rllib", "rsl_rl_models": "rsl_rl", "skrl_models": "skrl_model"}


@pytest.mark.torch
@pytest.mark.parametrize("library", LIBRARIES)
def test_agents_of_a_library_have_the_recorded_verdicts(library, tmp_path):
    needed = libraries.MODULES[library].partition(".")[0]
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    names = [f"{_PREFIXES.get(library, library)}_{name}" for name in LIBRARIES[library].split()]
    if matrix.make(tmp_path, [library], names):
        pytest.skip(f"{needed} cannot be imported")
    known = matrix.recorded()
    verdicts = matrix.judged(tmp_path, names)
    assert len(verdicts) == len(names)
    for verdict in verdicts:
        assert verdict.state == known[verdict.agent].state, verdict.words


CHOOSING = sorted({agent.module for agent in discrete.AGENTS.values()})


@pytest.mark.torch
@pytest.mark.parametrize("module", CHOOSING)
def test_agents_of_discrete_actions_choose_as_their_library(module: str, tmp_path: Path) -> None:
    if not discrete.importable(module):
        pytest.skip(f"{module} cannot be imported")
    names = [name for name, agent in discrete.AGENTS.items() if agent.module == module]
    # A process of its own: libraries make optimizers, which a process with TensorFlow cannot.
    command = [sys.executable, "-m", "tests.agent_truth.discrete", str(tmp_path), *names]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    rows = {row.agent: row for row in predictions.compare_discrete(tmp_path, [], ["numpy"])}
    assert rows.keys() == {*names}
    assert all(row.is_equal for row in rows.values())


@pytest.mark.torch
def test_the_referee_finds_other_actions(programs, tmp_path):
    for file in programs.glob("cleanrl_td3*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "obs.npy").write_bytes((programs / "obs.npy").read_bytes())
    actions = tmp_path / "cleanrl_td3.npy"
    np.save(actions, 1.001 * np.load(actions))
    (verdict,) = matrix.judged(tmp_path)
    assert verdict.state == matrix.SILENT


@pytest.mark.torch
def test_a_hint_that_does_not_help_is_a_fault(programs):
    file = programs / "fujimoto_tanh_layers.json"
    case = json.loads(file.read_text())
    assert matrix.judge(file).state == matrix.WRONG_ASSUMED
    file.write_text(json.dumps(case | {"known": [["activation", "sigmoid"]]}))
    assert matrix.judge(file).state == matrix.WRONG_HINT
    file.write_text(json.dumps(case))
