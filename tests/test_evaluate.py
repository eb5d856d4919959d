"""`eval`: the samples score what their certificates say; options, results, refusals."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.evaluate import evaluate
from ckpttool.core import EnvironmentMismatchError, MappingError, UsageError
from ckpttool.evaluation.playing import choose_environment, play_stacked, prepare_agent
from ckpttool.evaluation.protocol import Protocol
from ckpttool.evaluation.restore import restore_agent
from ckpttool.networks import NetworkSettings, policy_network, q_network
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, ckpttool, in_framework, in_process, refused
from tests.golden_texts import Golden
from tests.test_layouts import fujimoto_set
from tests.test_samples import certificate

pytestmark = pytest.mark.environment


@pytest.fixture(autouse=True, scope="module")
def _needs_gymnasium() -> None:
    pytest.importorskip("gymnasium")


@pytest.mark.parametrize(
    ("folder", "path"), [("td3_pendulum_tf", TF_SAMPLE), ("td3_pendulum_torch", TORCH_SAMPLE)]
)
def test_a_sample_scores_what_its_certificate_says(folder: str, path: Path) -> None:
    evaluation = evaluate(str(path), protocol=Protocol(episodes=100, seed=1000))
    final = certificate(folder)["final"]
    assert isinstance(final, dict)
    # Pendulum forgives rounding: the returns agree one by one, not only in the mean.
    np.testing.assert_allclose(evaluation.rollout.returns, final["returns"], atol=0.05)
    assert evaluation.statistics.mean >= -200
    assert evaluation.env == "Pendulum-v1"
    assert not evaluation.assumed, "the sidecar knows everything"
    assert not evaluation.notes


@pytest.mark.parametrize("backend", ["numpy", pytest.param("torch", marks=pytest.mark.torch)])
def test_stacked_checkpoints_score_what_each_scores_alone(backend: str) -> None:
    pytest.importorskip("torch")
    paths = [str(TF_SAMPLE.with_name(f"ckpt-{step}")) for step in (2500, 10000, 15000)]
    how = Protocol(episodes=3, num_envs=2, backend=backend)
    agents = [restore_agent(path) for path in paths]
    env = choose_environment(agents[0], None, how)
    with env.make(how.at_once * len(agents)) as vector:
        together = play_stacked(tuple(prepare_agent(a, env, how, vector.spec) for a in agents), how, vector)
    for path, evaluation in zip(paths, together, strict=True):
        alone = evaluate(path, protocol=how)
        # Pendulum forgives rounding, once a policy has learnt to hold it up.
        np.testing.assert_allclose(evaluation.rollout.returns, alone.rollout.returns, atol=0.5)
        assert evaluation.checkpoint == path
        assert evaluation.rollout.seeds.tolist() == [1000, 1001, 1002]
        assert (evaluation.stacked, alone.stacked) == (3, 1)
        assert evaluation.document()["protocol"]["stacked"] == 3
        assert evaluation.rollout.num_envs == 2


@pytest.mark.torch
def test_original_and_converted_play_alike(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    convert(str(TF_SAMPLE), str(tmp_path / "agent.pt"))
    how = Protocol(episodes=100, seed=1000)
    original = evaluate(str(TF_SAMPLE), protocol=how)
    converted = evaluate(
        str(tmp_path / "agent.pt"), protocol=Protocol(episodes=100, seed=1000, backend="torch")
    )
    np.testing.assert_allclose(converted.rollout.returns, original.rollout.returns, atol=0.05)
    assert original.statistics.mean == pytest.approx(converted.statistics.mean, abs=0.01)


@pytest.mark.tensorflow
def test_the_tensorflow_backend_plays_it_too() -> None:
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    ran = in_framework("tensorflow", "eval", TF_SAMPLE, "--backend", "tensorflow", "--episodes", 16, "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    final = certificate("td3_pendulum_tf")["final"]
    assert isinstance(final, dict)
    np.testing.assert_allclose(document["returns"], final["returns"][:16], atol=0.05)
    assert document["protocol"]["backend"] == "tensorflow"
    assert "tensorflow" in document["versions"]


def test_the_same_command_gives_the_same_returns() -> None:
    how = Protocol(episodes=6, seed=5, num_envs=3)
    one, two = (evaluate(str(TORCH_SAMPLE), protocol=how) for _ in range(2))
    np.testing.assert_array_equal(one.rollout.returns, two.rollout.returns, strict=True)
    assert one.statistics == two.statistics


@pytest.mark.corpus
def test_what_is_assumed_of_a_set_of_files_is_said(corpus: Path, golden: Golden) -> None:
    prefix = str(corpus / "torch/fujimoto/bmcnns/models/TD3_HalfCheetah-v3_0")
    evaluation = evaluate(prefix, "HalfCheetah-v5", Protocol(episodes=1))
    assert len(evaluation.assumed) == 3
    golden("\n".join(evaluation.assumed))


def test_the_document(tmp_path: Path, golden: Golden) -> None:
    out = tmp_path / "result.json"
    ran = in_process("eval", TORCH_SAMPLE, "--episodes", 3, "--seed", 7, "--out", out, "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    assert json.loads(out.read_text()) == document
    assert document["protocol"] == {
        "episodes": 3,
        "seeds": [7, 8, 9],
        "num_envs": 3,
        "stacked": 1,
        "deterministic": True,
        "noise": None,
        "stochastic": False,
        "epsilon": None,
        "device": "cpu",
        "backend": "numpy",
        "engine": "pendulum.batch",
        "adapter": None,
        "wrappers": None,
        "network": "actor",
        "dtype": "float32",
    }
    assert document["lengths"] == [200, 200, 200]
    assert document["truncated"] == [True] * 3
    assert document["mean"] == pytest.approx(np.mean(document["returns"]))
    assert document["std"] == pytest.approx(np.std(document["returns"], ddof=1))
    low, high = document["ci95"]
    assert low < document["mean"] < high
    assert {"gymnasium", "numpy", "python", "ckpttool"} <= set(document["versions"])
    again = in_process("eval", TORCH_SAMPLE, "--episodes", 1, "--out", out)
    golden(refused(again))


def test_several_checkpoints_are_one_document() -> None:
    paths = [TORCH_SAMPLE.with_name(f"ckpt-{step}.pt") for step in (2500, 15000)]
    ran = in_process("eval", *paths, "--episodes", 2, "--json")
    means = [row["mean"] for row in ran.json()["evaluations"]]
    assert means[0] < means[1]
    text = in_process("eval", *paths, "--episodes", 2).out
    assert "ckpt-2500" in text
    assert "IQM" in text


def test_finished_results_survive_a_path_that_fails(golden: Golden) -> None:
    ran = in_process("eval", TORCH_SAMPLE, "nosuch.pt", "--episodes", 2)
    assert ran.status == 2
    assert str(TORCH_SAMPLE) in ran.out
    golden(ran.err)


def test_a_taken_result_file_is_said_before_playing(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "have.json").write_text("mine")
    ran = in_process("eval", TORCH_SAMPLE, "--episodes", 100_000_000, "--out", tmp_path / "have.json")
    golden(refused(ran))
    assert "--force" in ran.err


def seconds(pid: int) -> float:
    """Return how long a process has had a core."""
    spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not tell a process's time")
def test_ctrl_c_keeps_what_is_finished() -> None:
    import signal
    import subprocess
    import sys
    import time

    # The third means the first again: each checkpoint is there once.
    paths = [str(TORCH_SAMPLE.with_name(f"ckpt-{step}.pt")) for step in (15000, 2500, 15000)]
    arguments = [*paths, "--episodes", "1000000", "--num-envs", "1", "--json"]
    command = [sys.executable, "-m", "ckpttool", "eval", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            # Enough for its start and an episode of each, however slow the machine is.
            while child.poll() is None and seconds(child.pid) < 2.5:
                time.sleep(0.05)
            child.send_signal(signal.SIGINT)
            out, _ = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 130
    first, second = json.loads(out)["evaluations"]
    for evaluation in (first, second):
        assert evaluation["interrupted"]
        assert 0 < len(evaluation["returns"]) < 1_000_000
        assert evaluation["protocol"]["seeds"] == first["protocol"]["seeds"]


def test_a_minimum_return_decides_the_status() -> None:
    assert in_process("eval", TORCH_SAMPLE, "--episodes", 2, "--min-return", -2000).status == 0
    assert in_process("eval", TORCH_SAMPLE, "--episodes", 2, "--min-return", 0).status == 1


def test_the_target_network_can_be_played() -> None:
    online = evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=3))
    target = evaluate(str(TORCH_SAMPLE), protocol=Protocol(episodes=3, network="actor_target"))
    assert (online.rollout.returns != target.rollout.returns).any()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--env", "MountainCarContinuous-v0"],
        ["--network", "critic"],
        ["--backend", "jax9"],
        ["--env", "CartPole-v1"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_played(arguments: list[str], golden: Golden) -> None:
    golden(refused(in_process("eval", TORCH_SAMPLE, *arguments)))


def test_an_unknown_environment_is_named() -> None:
    assert "'Pendulumm-v1'" in refused(in_process("eval", TORCH_SAMPLE, "--env", "Pendulumm-v1"))


def test_a_missing_gpu_is_named() -> None:
    assert "'cuda:99'" in refused(in_process("eval", TORCH_SAMPLE, "--device", "cuda:99"))


def test_without_a_sidecar_the_environment_is_asked_for(tmp_path: Path, golden: Golden) -> None:
    import shutil

    shutil.copy(TORCH_SAMPLE, tmp_path / "x.pt")
    with pytest.raises(UsageError) as caught:
        evaluate(str(tmp_path / "x.pt"))
    golden(caught.value)
    evaluation = evaluate(str(tmp_path / "x.pt"), "Pendulum-v1", Protocol(episodes=1))
    assert len(evaluation.assumed) == 4
    assert {entry.what for entry in evaluation.ledger if entry.open} == {"activation", "action map"}
    assert evaluation.statistics.std is None


def test_a_sidecar_never_makes_code_run(tmp_path: Path) -> None:
    import shutil

    mark = tmp_path / "MARK"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    shutil.copy(TORCH_SAMPLE, tmp_path / "x.pt")
    record = json.loads(Path(f"{TORCH_SAMPLE}.ckpttool.json").read_text())
    record["env"]["id"] = "evil:Evil-v0"
    (tmp_path / "x.pt.ckpttool.json").write_text(json.dumps(record))
    ran = ckpttool("eval", "x.pt", cwd=tmp_path, env={"PYTHONPATH": f"{Path.cwd()}:{tmp_path}"})
    refused(ran)
    assert not mark.exists()


WIRING = NetworkSettings(("relu",), "tanh", 1e-5, (-2.0, -2.0), (2.0, 2.0))


def fujimoto_agent(tmp_path: Path) -> str:
    from ckpttool.conversion.write import save
    from tests.trees import torch_tree

    save(torch_tree(fujimoto_set()), str(tmp_path / "agent.pt"))  # type: ignore[arg-type]
    return str(tmp_path / "agent.pt")


def test_networks_against_plain_numpy(tmp_path: Path, golden: Golden) -> None:
    from ckpttool.networks import numpy_backend

    agent = restore_agent(fujimoto_agent(tmp_path))
    entries = fujimoto_set()
    obs, action = np.ones((4, 3), np.float32), np.full((4, 2), 0.5, np.float32)

    def layer(x: np.ndarray, name: str) -> np.ndarray:
        weight, bias = (np.asarray(entries[f"{name}.{part}"]) for part in ("weight", "bias"))
        result: np.ndarray = x @ weight.T + bias
        return result

    def mlp(x: np.ndarray, names: list[str]) -> np.ndarray:
        for name in names[:-1]:
            x = np.maximum(layer(x, name), 0)
        return layer(x, names[-1])

    actor = agent.part("actor")
    assert actor is not None
    out, _ = numpy_backend.build(policy_network(agent.tree, actor, WIRING)).step(obs)
    expected = 2 * np.tanh(mlp(obs, ["actor/l1", "actor/l2", "actor/l3"]))
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    second = agent.part("critic/q2")
    assert second is not None
    q, _ = numpy_backend.build(q_network(agent.tree, second, WIRING, 3, 2)).step(
        {"obs": obs, "action": action}
    )
    both = np.concatenate([obs, action], axis=1)
    np.testing.assert_allclose(q, mlp(both, ["critic/l4", "critic/l5", "critic/l6"]), rtol=1e-5)
    with pytest.raises(MappingError) as caught:
        q_network(agent.tree, second, WIRING, 7, 2)
    golden(caught.value)


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("tanh", lambda x, low, high: high[0] * np.tanh(x)),
        ("affine", lambda x, low, high: low + (np.tanh(x) + 1) / 2 * (high - low)),
        ("identity", lambda x, low, high: x),
        ("clip", lambda x, low, high: np.clip(x, low, high)),
    ],
)
def test_action_maps(tmp_path: Path, head: str, expected: object) -> None:
    from ckpttool.networks import numpy_backend

    agent = restore_agent(fujimoto_agent(tmp_path))
    actor = agent.part("actor")
    assert actor is not None
    bounds = {"action_low": (-1.0, 0.0), "action_high": (3.0, 5.0)}
    obs = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32)
    raw = numpy_backend.build(
        policy_network(agent.tree, actor, NetworkSettings(("relu",), "identity", 1e-5, **bounds))
    )
    mapped = numpy_backend.build(
        policy_network(agent.tree, actor, NetworkSettings(("relu",), head, 1e-5, **bounds))
    )
    low, high = (np.array(bounds[name], np.float32) for name in ("action_low", "action_high"))
    np.testing.assert_allclose(
        mapped.step(obs)[0],
        expected(raw.step(obs)[0], low, high),  # type: ignore[operator]
        rtol=1e-5,
        atol=1e-6,
    )


def test_observation_statistics(tmp_path: Path, golden: Golden) -> None:
    from ckpttool.networks import numpy_backend

    agent = restore_agent(fujimoto_agent(tmp_path))
    actor = agent.part("actor")
    assert actor is not None
    norm = {"mean": [1.0, -2.0, 0.0], "var": [4.0, 1.0, 1e-4], "epsilon": 1e-8, "clip": 10.0}
    from dataclasses import replace

    with_norm = numpy_backend.build(policy_network(agent.tree, actor, replace(WIRING, obs_norm=norm)))
    without = numpy_backend.build(policy_network(agent.tree, actor, WIRING))
    obs = np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32) * 3
    scaled = (obs - np.array(norm["mean"])) / np.sqrt(np.array(norm["var"]) + 1e-8)
    expected = without.step(np.clip(scaled, -10, 10).astype(np.float32))[0]
    np.testing.assert_allclose(with_norm.step(obs)[0], expected, rtol=1e-4, atol=1e-5)
    short = {**norm, "mean": [1.0], "var": [1.0]}
    with pytest.raises(EnvironmentMismatchError) as caught:
        policy_network(agent.tree, actor, replace(WIRING, obs_norm=short))
    golden(caught.value)


@pytest.mark.parametrize("changes", [{"head": "sinh"}, {"hidden": ("mish9",)}])
def test_unknown_functions_are_refused(tmp_path: Path, changes: dict[str, object], golden: Golden) -> None:
    from dataclasses import replace

    agent = restore_agent(fujimoto_agent(tmp_path))
    actor = agent.part("actor")
    assert actor is not None
    with pytest.raises(UsageError) as caught:
        policy_network(agent.tree, actor, replace(WIRING, **changes))  # type: ignore[arg-type]
    golden(caught.value)


def strange_actor(tmp_path: Path, name: str, array: np.ndarray) -> str:
    from ckpttool.conversion.write import save
    from tests.trees import torch_dense, torch_tree

    generator = np.random.default_rng(0)
    entries: dict[str, np.ndarray | int] = {"total_it": 1}
    for layer, sizes in {"l1": (3, 8), "l3": (8, 1)}.items():
        entries |= {f"actor/{n}": a for n, a in torch_dense(generator, layer, *sizes).items()}
    save(torch_tree({**entries, f"actor/{name}": array}), str(tmp_path / "strange.pt"))
    return str(tmp_path / "strange.pt")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("l2.weight", np.eye(8, dtype=np.float32)),  # a matrix without a bias may be an embedding
        ("act.weight", np.full(1, 0.25, np.float32)),
        ("bn.running_mean", np.zeros(8, np.float32)),
    ],
)
def test_a_network_with_an_unknown_layer_is_not_run_without_it(
    tmp_path: Path, name: str, array: np.ndarray
) -> None:
    path = strange_actor(tmp_path, name, array)
    assert f"actor/{name.replace('.', '/')}" in refused(in_process("eval", path, "--env", "Pendulum-v1"))
    assert f"actor/{name.replace('.', '/')}" in refused(in_process("verify", path, path))


def test_update_counts_that_differ_do_not_matter_for_playing(tmp_path: Path) -> None:
    from ckpttool.conversion.write import save
    from tests.trees import torch_tree

    entries = fujimoto_set()
    entries["actor_optimizer/state/0/step"] = np.array(8, np.float32)
    save(torch_tree(entries), str(tmp_path / "agent.pt"))  # type: ignore[arg-type]
    assert restore_agent(str(tmp_path / "agent.pt")).part("actor") is not None


def test_a_sidecar_that_is_not_used_is_named_when_it_is_missed(tmp_path: Path, golden: Golden) -> None:
    import shutil

    shutil.copy(TORCH_SAMPLE, tmp_path / "x.pt")
    shutil.copy(f"{TORCH_SAMPLE.with_name('ckpt-2500.pt')}.ckpttool.json", tmp_path / "x.pt.ckpttool.json")
    ran = in_process("eval", tmp_path / "x.pt")
    refused(ran)
    golden(ran)


def test_existing_files_are_replaced_only_with_force(tmp_path: Path) -> None:
    """`--force` means in `eval` what it means in `convert` and `report`."""
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("a.json", "a.csv", "a.svg", "a.gif", "a.png")}
    options = ("-o", "--csv", "--plot", "--video", "--strip")
    words = [word for pair in zip(options, files.values(), strict=True) for word in pair]
    command = ("eval", TORCH_SAMPLE, "--env", "Pendulum-v1", "--episodes", "1", "--video-width", "32")
    for file in files.values():
        file.write_bytes(b"mine")
        option = words[words.index(file) - 1]
        refused(in_process(*command[:6], option, file))
    assert {file.read_bytes() for file in files.values()} == {b"mine"}
    assert in_process(*command, *words, "--force", "-q").status == 0
    assert all(len(file.read_bytes()) > 100 for file in files.values())
