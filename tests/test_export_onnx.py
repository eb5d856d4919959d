"""`convert --to onnx`: agents act in onnxruntime as they do here, and the file says what it is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.conversion import export, write
from ckpttool.conversion.export import derive_export_settings
from ckpttool.core import (
    EnvironmentMismatchError,
    FormatError,
    MissingExtraError,
    UnsupportedError,
    UsageError,
)
from ckpttool.evaluation import gymnasium_engine
from ckpttool.evaluation.agent_networks import build_part_network
from ckpttool.evaluation.restore import restore_agent
from ckpttool.graphs import Value, evaluate
from ckpttool.graphs.builder import GraphBuilder
from ckpttool.networks import Dense, numpy_backend
from ckpttool.verification.output_comparison import make_observations
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, ckpttool, in_process, refused
from tests.golden_texts import Golden

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from ckpttool.networks import network_graph, onnx_export  # noqa: E402  # it needs onnx


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def texts(path: Path) -> dict[str, str]:
    """Return what the file says of itself."""
    return {row.key: row.value for row in onnx.load(path).metadata_props}


def receipt(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(Path(f"{path}.ckpttool.json").read_text())
    return record


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_name_of_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ONNX"):
        export.export(str(TORCH_SAMPLE), str(tmp_path / "actor.pt"))
    assert not list(tmp_path.iterdir())


def exported(source: object, target: Path, title: str = "actor", env: str | None = None) -> ConversionResult:
    """Export, and assert that onnxruntime gives NumPy's outputs to 1e-6 of the largest sum on the way."""
    done = export.export(str(source), str(target), network=title, env=env, sync=False)
    assert done.written, done.parity
    agent = restore_agent(str(source))
    part = agent.runnable(title)
    assert part is not None
    network = build_part_network(agent, part, derive_export_settings(agent, part, env, "model.onnx")[0])
    rows = make_observations(network)
    expected = numpy_backend.build(network).step(rows)[0]
    (outputs,) = session(target).run(None, {"obs": rows} if isinstance(rows, np.ndarray) else rows)
    largest = 1.0
    for number, node in enumerate(network.nodes):
        if isinstance(node.layer, Dense):
            step = type(network)(network.inputs, network.nodes, len(network.inputs) + number)
            largest = max(largest, float(np.abs(numpy_backend.build(step).step(rows)[0]).max()))
    assert outputs.shape == expected.shape == (1000, network.width)
    assert np.abs(expected).max() > 0.01
    assert np.abs(outputs - expected).max() <= 1e-6 * largest
    return done


# --- what it computes -------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [TF_SAMPLE, TORCH_SAMPLE], ids=["tensorflow", "torch"])
@pytest.mark.parametrize("title", ["actor", "actor_target", "critic/q1", "critic_target/q2"])
def test_the_samples(sample: Path, title: str, tmp_path: Path, golden: Golden) -> None:
    done = exported(sample, tmp_path / "a.onnx", title)
    assert len(done.report.mapped) == 6
    assert done.report.complete
    assert done.report.assumed == ()
    (note,) = (note for note in done.report.notes if title in note)
    golden(note)
    model = session(tmp_path / "a.onnx")
    critic = title.startswith("critic")
    assert [input_.name for input_ in model.get_inputs()] == (["obs", "action"] if critic else ["obs"])
    assert [output.name for output in model.get_outputs()] == (["value"] if critic else ["action"])
    assert {value.type for value in (*model.get_inputs(), *model.get_outputs())} == {"tensor(float)"}
    assert model.get_inputs()[0].shape == ["batch", 3]


def test_one_observation_and_many_give_the_same(tmp_path: Path) -> None:
    exported(TORCH_SAMPLE, tmp_path / "a.onnx")
    onnx_session = session(tmp_path / "a.onnx")
    obs = np.random.default_rng(0).standard_normal((64, 3)).astype("f4")
    (many,) = onnx_session.run(None, {"obs": obs})
    one = np.concatenate([onnx_session.run(None, {"obs": obs[n : n + 1]})[0] for n in range(64)])
    assert np.abs(many - one).max() <= 1e-6
    assert np.abs(many).max() <= 2.0
    assert np.abs(many).max() > 1.0


def torch_agent(folder: Path, dtype: str = "float32", norm: bool = False, bounds: bool = True) -> Path:
    """Write a TD3 agent of torch with ELU inside, and what its sidecar says."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)

    def layers(*sizes: int) -> dict[str, Any]:
        tensors = {}
        for number, (rows, columns) in enumerate(pairwise(sizes), start=1):
            weight = torch.randn(columns, rows, generator=generator, dtype=getattr(torch, dtype))
            tensors[f"l{number}.weight"], tensors[f"l{number}.bias"] = weight, weight[:, 0].clone()
        return tensors

    path = folder / "agent.pt"
    heads = {f"{q}.{name}": tensor for q in ("q1", "q2") for name, tensor in layers(6, 16, 1).items()}
    torch.save({"actor": layers(4, 16, 16, 2), "critic": heads}, path)
    statistics = {"mean": [100.0, -3.0, 0.0, 1.0], "var": [4.0, 0.1, 1.0, 9.0], "epsilon": 1e-8, "clip": 5.0}
    facts = {
        "schema": 1,
        "target_sha256": in_process("digest", path, "--json").json()["sha256"],
        "activations": ["elu"],
        "head": "affine",
        **({"action_low": [-1.0, 0.0], "action_high": [2.0, 0.5]} if bounds else {}),
        **({"obs_norm": statistics} if norm else {}),
    }
    Path(f"{path}.ckpttool.json").write_text(json.dumps(facts))
    return path


@pytest.mark.torch
def test_statistics_of_the_sidecar_are_inside(tmp_path: Path) -> None:
    exported(torch_agent(tmp_path, norm=True), tmp_path / "a.onnx")
    model = session(tmp_path / "a.onnx")
    mean = np.array([[100.0, -3.0, 0.0, 1.0]], "f4")
    spread = np.sqrt(np.array([[4.0, 0.1, 1.0, 9.0]])).astype("f4")
    # What is further than five deviations from the mean is limited there.
    near, far = (model.run(None, {"obs": mean + times * spread})[0] for times in (5.0, 50.0))
    assert np.abs(near - far).max() <= 1e-4
    constants = {constant.name for constant in onnx.load(tmp_path / "a.onnx").graph.initializer}
    assert {"obs/0/mean", "obs/1/scale", "obs/2/low", "actor/0/kernel", "action/9/shift"} <= constants


@pytest.mark.torch
def test_weights_in_64_bits_become_a_model_in_32(tmp_path: Path, golden: Golden) -> None:
    done = exported(torch_agent(tmp_path, "float64"), tmp_path / "a.onnx")
    golden(next(note for note in done.report.notes if "float64" in note))
    low, high = np.array([-1.0, 0.0]), np.array([2.0, 0.5])
    (outputs,) = session(tmp_path / "a.onnx").run(None, {"obs": 100 * np.eye(4, dtype="f4")})
    assert ((outputs >= low) & (outputs <= high)).all()
    assert (np.isclose(outputs, low) | np.isclose(outputs, high)).all()


@pytest.mark.torch
def test_stable_baselines3_with_statistics_and_sac_by_its_mean(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tests import sb3_files

    td3 = sb3_files.td3_agent(tmp_path / "td3.zip")
    sb3_files.statistics(tmp_path / "vecnormalize.pkl")
    exported(td3, tmp_path / "td3.onnx")
    assert any(name.startswith("obs/") for name in constants_of(tmp_path / "td3.onnx"))
    (tmp_path / "alone").mkdir()
    sac = sb3_files.sac_agent(tmp_path / "alone" / "sac.zip")
    done = exported(sac, tmp_path / "sac.onnx")
    assert not any("log_std" in line.source for line in done.report.mapped)
    exported(sac, tmp_path / "q.onnx", "critic/q2")


def constants_of(path: Path) -> list[str]:
    return [constant.name for constant in onnx.load(path).graph.initializer]


@pytest.mark.torch
def test_layer_norms_and_statistics_in_the_checkpoint_itself(tmp_path: Path) -> None:
    from tests.test_layout_rsl_rl import file, networks
    from tests.torch_agents import saved

    actor, critic = networks()
    path = saved(tmp_path, "model_250.pt", file(3, actor, critic, norm=True, log=True))
    # Its action is the last layer as it is: nobody is asked for bounds.
    done = exported(path, tmp_path / "a.onnx")
    folded = [line.target for line in done.report.mapped if line.rule == "folded"]
    assert "normalizer/mean" in folded
    assert "action_low" not in texts(tmp_path / "a.onnx")
    assert not [sentence for sentence in done.report.assumed if "bounds" in sentence]
    # The critic sees more than the policy, and none of the policy's statistics.
    done = exported(path, tmp_path / "v.onnx", "value")
    assert not [line for line in done.report.mapped if line.rule == "folded"]
    assert texts(tmp_path / "v.onnx")["obs_dim"] != texts(tmp_path / "a.onnx")["obs_dim"]


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("torch/sb3_zoo/ddpg/Pendulum-v1_1/Pendulum-v1.zip", None),
        ("torch/sb3_zoo/ddpg/MountainCarContinuous-v0_1/MountainCarContinuous-v0.zip", None),
        ("tf/sb2/zoo/ddpg_Pendulum-v0.pkl", None),
        ("tf/sb2/zoo/her_FetchReach-v1.pkl", None),
        ("torch/tianshou/Pendulum-v1/td3/policy.pth", "Pendulum-v1"),
        ("torch/fujimoto/bmcnns/models/TD3_HalfCheetah-v3_1_actor", "HalfCheetah-v5"),
    ],
)
def test_agents_of_other_people(corpus: Path, name: str, env: str | None, tmp_path: Path) -> None:
    if env is not None:
        pytest.importorskip("mujoco" if "Cheetah" in env else "gymnasium")
    done = exported(corpus / name, tmp_path / "a.onnx", env=env)
    assert bool([text for text in done.report.assumed if "action bounds" in text]) == (env is not None)


@pytest.mark.corpus
def test_a_critic_on_which_right_answers_differ_is_not_refused(corpus: Path, tmp_path: Path) -> None:
    # onnxruntime's product is 2.5 times as far from float64 as NumPy's here.
    exported(corpus / "tf/sb2/zoo/her_FetchReach-v1.pkl", tmp_path / "q.onnx", "critic/q1")


# --- what the file and its receipt say --------------------------------------------------------------


def test_the_same_conversion_gives_the_same_bytes_whenever_and_wherever(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        shutil.copytree(TORCH_SAMPLE.parent, tmp_path / folder)
        ran = ckpttool("convert", TORCH_SAMPLE.name, "policy.onnx", cwd=tmp_path / folder)
        assert ran.status == 0, ran.err
    for name in ("policy.onnx", "policy.onnx.ckpttool.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_file_and_the_receipt_say_where_everything_is_from(tmp_path: Path) -> None:
    done = exported(TF_SAMPLE, tmp_path / "a.onnx")
    source = in_process("digest", TF_SAMPLE, "--json").json()["sha256"]
    row, facts = receipt(tmp_path / "a.onnx"), texts(tmp_path / "a.onnx")
    assert row["target_sha256"] == done.digest == sha256(tmp_path / "a.onnx")
    known = {"path": "ckpt-15000", "sha256": source, "format": "tensor_bundle", "layout": "td3_tf"}
    assert row["source"] == {**known, "network": "actor"}
    (parity,) = row["parity"]
    assert (parity["name"], parity["within"]) == ("actor", True)
    assert [rule["target"] for rule in row["rules"]] == [m.target for m in done.report.mapped]
    assert (row["env"]["id"], row["action_low"], row["action_high"]) == ("Pendulum-v1", [-2.0], [2.0])
    assert facts["tool"].startswith("ckpttool ")
    assert (facts["source"], facts["source_sha256"], facts["network"]) == ("ckpt-15000", source, "actor")
    assert (facts["env"], facts["obs_dim"]) == ("Pendulum-v1", "3")
    assert json.loads(facts["action_low"]) == [-2.0]
    assert json.loads(facts["provenance"])["action_low"] == row["provenance"]["action_low"]
    assert json.loads(facts["assumed"]) == []
    # The constants have the names of the report.
    constants = set(constants_of(tmp_path / "a.onnx"))
    assert constants - {m.target for m in done.report.mapped} == {"action/6/scale"}


def test_the_command_prints_what_it_did(tmp_path: Path) -> None:
    ran = in_process("convert", TORCH_SAMPLE, "a", "--to", "onnx", "--json", cwd=tmp_path)
    assert ran.status == 0, ran.err
    document = ran.json()
    (network,) = document["parity"]
    assert (network["name"], network["n"], network["within"]) == ("actor", 1000, True)
    assert document["written"]
    assert document["digest"] == sha256(tmp_path / "a")
    assert any("onnxruntime" in note for note in document["notes"])
    ran = in_process("convert", TORCH_SAMPLE, "b.onnx", "--network", "critic/q1", cwd=tmp_path)
    assert ran.status == 0, ran.err
    assert any("critic/q1" in line and "1,000" in line for line in ran.out.splitlines())
    looked = in_process("inspect", tmp_path / "b.onnx", "--json")
    assert list(looked.json()["details"]["inputs"]) == ["obs", "action"]


def test_a_dry_run_shows_the_mapping_and_needs_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    without(monkeypatch, "onnx")
    done = convert(str(TORCH_SAMPLE), str(tmp_path / "a.onnx"), dry_run=True)
    assert (done.written, done.parity, list(tmp_path.iterdir())) == (False, (), [])
    assert [line.rule for line in done.report.mapped] == ["transpose", "keep"] * 3
    with pytest.raises(MissingExtraError) as caught:
        convert(str(TORCH_SAMPLE), str(tmp_path / "a.onnx"))
    golden(caught.value)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make libraries look as if they were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in names else real(name, *rest),
    )


# --- bounds that no file tells ----------------------------------------------------------------------


@pytest.mark.torch
def test_bounds_that_nobody_tells_are_asked_for(tmp_path: Path, golden: Golden) -> None:
    path = torch_agent(tmp_path, bounds=False)
    golden(refused(in_process("convert", path, tmp_path / "a.onnx")))
    assert not (tmp_path / "a.onnx").exists()
    # A critic does not need them.
    exported(path, tmp_path / "q.onnx", "critic/q1")


@pytest.mark.environment
def test_an_environment_tells_the_bounds(tmp_path: Path, golden: Golden) -> None:
    pytest.importorskip("gymnasium")
    alone = tmp_path / "alone.pt"
    shutil.copy(TORCH_SAMPLE, alone)
    done = exported(alone, tmp_path / "a.onnx", env="Pendulum-v1")
    golden("\n".join(done.report.assumed))
    row = receipt(tmp_path / "a.onnx")
    assert (row["action_low"], row["action_high"], row["env"]["id"]) == ([-2.0], [2.0], "Pendulum-v1")
    golden(json.dumps(row["provenance"], indent=2))
    with pytest.raises(EnvironmentMismatchError) as caught:
        convert(str(alone), str(tmp_path / "b.onnx"), env="MountainCarContinuous-v0")
    golden(caught.value)


def spec(high: Sequence[float]) -> Any:
    bound = np.array(high, "f4")
    return gymnasium_engine.EnvSpec("Wide-v0", (("obs", (3,), "float32"),), -bound, bound, None, {})


def test_an_environment_without_bounds_bounds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    shutil.copy(TORCH_SAMPLE, tmp_path / "alone.pt")
    monkeypatch.setattr(export, "_environment_spec", lambda *_: spec([np.inf]))
    with pytest.raises(EnvironmentMismatchError) as caught:
        convert(str(tmp_path / "alone.pt"), str(tmp_path / "a.onnx"))
    golden(caught.value)


def test_an_environment_that_a_file_names_runs_no_code(tmp_path: Path, golden: Golden) -> None:
    shutil.copy(TORCH_SAMPLE, tmp_path / "alone.pt")
    digest = in_process("digest", tmp_path / "alone.pt", "--json").json()["sha256"]
    facts = {"schema": 1, "target_sha256": digest, "env": {"id": "antigravity:X-v0"}}
    (tmp_path / "alone.pt.ckpttool.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError) as caught:
        convert(str(tmp_path / "alone.pt"), str(tmp_path / "a.onnx"))
    golden(caught.value)


# --- what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--network", "critic"),
        ("--part", "actor"),
        ("--fold-weight-norm",),
        ("--no-verify",),
        ("--map", "rules.toml"),
        ("--kind", "actor/**=embedding"),
        ("--to", "torch", "--network", "actor"),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_one_sentence(
    arguments: tuple[str, ...], tmp_path: Path, golden: Golden
) -> None:
    golden(refused(in_process("convert", TORCH_SAMPLE, "a.onnx", *arguments, cwd=tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_agent_is_refused(tmp_path: Path, golden: Golden) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    golden(refused(in_process("convert", tmp_path / "x.npz", tmp_path / "a.onnx")))


def test_nothing_is_overwritten_without_force(tmp_path: Path, golden: Golden) -> None:
    target = tmp_path / "a.onnx"
    target.write_bytes(b"mine")
    golden(refused(in_process("convert", TORCH_SAMPLE, target)))
    assert target.read_bytes() == b"mine"
    assert in_process("convert", TORCH_SAMPLE, target, "--force").status == 0
    assert onnx.load(target).producer_name == "ckpttool"
    target.unlink()
    assert "a.onnx.ckpttool.json" in refused(in_process("convert", TORCH_SAMPLE, target))
    shutil.copy(TORCH_SAMPLE, tmp_path / "b.pt")
    with pytest.raises(UsageError) as caught:
        convert(str(tmp_path / "b.pt"), str(tmp_path / "b.pt"), to="onnx", force=True)
    golden(caught.value)


def test_a_tree_cannot_be_saved_as_onnx(tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        write.save(restore_agent(str(TORCH_SAMPLE)).tree, str(tmp_path / "a.onnx"))
    golden(caught.value)


@pytest.mark.torch
def test_what_gives_no_numbers_cannot_be_compared(tmp_path: Path, golden: Golden) -> None:
    torch = pytest.importorskip("torch")
    contents = torch.load(TORCH_SAMPLE, weights_only=True)
    contents["actor"]["l2.weight"][0, 0] = float("nan")
    torch.save(contents, tmp_path / "a.pt")
    with pytest.raises(UnsupportedError) as caught:
        convert(str(tmp_path / "a.pt"), str(tmp_path / "a.onnx"), env="Pendulum-v1")
    golden(caught.value)


MUTANTS = {
    "clip for tanh": "m.ACTIVATION_NODES['tanh'] = lambda add, number, x: add('HardSigmoid', x)",
    "no hidden activation": "m.ACTIVATION_NODES['relu'] = lambda add, number, x: x",
    "no scaling": "m.LAYERS[m.Affine] = lambda g, l, x: x",
    "transposed squares": (
        "d = m.LAYERS[m.Dense]; m.LAYERS[m.Dense] = lambda g, l, x: "
        "d(g, m.Dense(l.kernel.T if l.kernel.shape[0] == l.kernel.shape[1] else l.kernel, l.bias), x)"
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_a_model_that_computes_something_else_is_not_written(
    mutant: str, tmp_path: Path, golden: Golden
) -> None:
    with mock.patch.dict(network_graph.ACTIVATION_NODES), mock.patch.dict(network_graph.LAYERS):
        exec(mutant, {"m": network_graph})
        ran = in_process("convert", TORCH_SAMPLE, "a.onnx", "--allow-missing", cwd=tmp_path)
    assert ran.status == 1, ran.err
    golden(ran.out.splitlines()[-1])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_what_was_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    put = export._write_model
    monkeypatch.setattr(export, "_write_model", lambda stream, data: put(stream, data[:-1]))
    with pytest.raises(FormatError) as caught:
        convert(str(TORCH_SAMPLE), str(tmp_path / "a.onnx"))
    golden(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_operators_and_versions_are_those_that_the_documents_name() -> None:
    page = (ROOT / "docs" / "howto" / "onnx.md").read_text(encoding="utf-8")
    assert f"opset {onnx_export.OPSET}" in page
    assert f"IR version {onnx_export.IR_VERSION}" in page


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("op", "settings"),
    [
        *[(op, {}) for op in ("Gelu", "Swish", "Selu", "Elu", "LeakyRelu", "Mish", "HardSwish", "Softplus")],
        ("Gelu", {"approximate": "tanh"}),
        *[("Swish", {"alpha": 1.7}), ("Selu", {"alpha": 0.5, "gamma": 1.5})],
        *[("Elu", {"alpha": 0.5}), ("LeakyRelu", {"alpha": 0.3})],
    ],
)
def test_composed_operators_keep_their_settings(op: str, settings: dict[str, Any], dtype: str) -> None:
    nodes = GraphBuilder()
    shape = ("batch", 9)
    result = nodes.one(op, "x", **settings)
    graph = nodes.graph([Value("x", dtype, shape)], [Value(result, dtype, shape)], "g")
    x = np.linspace(-4, 4, 18).reshape(2, 9).astype(dtype)
    if op == "Gelu" and dtype == "float64":
        with pytest.raises(UnsupportedError):
            onnx_export.encode_graph(graph, {})
        return
    model = onnxruntime.InferenceSession(onnx_export.encode_graph(graph, {}))
    np.testing.assert_allclose(model.run(None, {"x": x})[0], evaluate(graph, {"x": x})[result], 2e-6, 1e-6)


def test_a_composed_norm_of_several_axes_is_refused() -> None:
    nodes, shape = GraphBuilder(), ("batch", 3, 4)
    scale, offset = (nodes.named(name, np.ones((3, 4), np.float32)) for name in ("scale", "offset"))
    result = nodes.one("LayerNormalization", "x", scale, offset, axis=1, epsilon=1e-5)
    graph = nodes.graph([Value("x", "float32", shape)], [Value(result, "float32", shape)], "g")
    with pytest.raises(UnsupportedError):
        onnx_export.encode_graph(graph, {})
