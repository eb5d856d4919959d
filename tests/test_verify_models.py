"""`verify` of two models: equal models pass, and each planted fault is found in its layer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import verifying
from ckpttool.cli import verification_tables
from ckpttool.cli.console import render_document
from ckpttool.commands.verify import Verification, verify
from ckpttool.core import UnsupportedError, UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.networks import ModelSpec
from ckpttool.verification import two_models
from ckpttool.verification.inputs import InputResolver
from tests import exported_faults, pair_models, planted_faults, ported_faults, right_pairs, schemas
from tests.conftest import ROOT
from tests.exported_faults import EXPORTED_FAULTS
from tests.pair_models import RIGHT, SHAPES
from tests.planted_faults import FAULTS, LATER_FAULTS, MORE_FAULTS, PROGRAMS, Fault, PlantedFaults
from tests.ported_faults import PORTED_FAULTS
from tests.shared_runners import InThisProcess, shared_runners

pytestmark = [pytest.mark.torch, pytest.mark.long]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run torch models in this process."""
    monkeypatch.setattr(two_models, "ModelProcess", InThisProcess)


def spec(name: str, options: dict[str, Any] | None = None) -> ModelSpec:
    return ModelSpec(f"pair_models:{name}", options or None)


@pytest.fixture(autouse=True)
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `pair_models` importable for the models' processes, and for this one."""
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


@pytest.fixture(scope="module")
def runners() -> Iterator[None]:
    """Serve all sides by one process of each framework."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        with shared_runners(planted_faults.framework_of):
            yield


# Equal models, one in each framework.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Return every model's `.keras` and `.pt`."""
    sides = planted_faults.Sides(tmp_path_factory.mktemp("pairs"))
    files = {}
    for name in RIGHT:
        torch_file = sides.torch(name, name, {})
        files[name] = sides.keras(name, name, {}), torch_file
    sides.write()
    return files


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("cnn", "lstm", "words") else pytest.mark.slow)
        for name in RIGHT
    ],
)
def test_equal_models_pass(files: dict[str, tuple[str, str]], name: str, runners: None) -> None:
    verification = verify(*files[name], like_b=spec(name))
    assert verification.within
    assert verification.models is not None
    assert verification.models.exact
    assert len(verification.models.layers) >= 2
    assert all(layer.within for layer in verification.models.layers)


# Faults, planted in the second of two torch models.


def compare_torch(tmp_path: Path, fault: Fault) -> Verification:
    import torch

    state = pair_models.torch_state(fault.model, **fault.right)
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    torch.save(state, paths[0])
    changed = {name: value.clone() for name, value in state.items()}
    if fault.change is not None:
        fault.change(changed)
    torch.save(changed, paths[1])
    specs = [spec(fault.model, settings) for settings in (fault.right, fault.options)]
    shapes = planted_faults.input_shapes(fault.model, "torch")
    return verify(*map(str, paths), like_a=specs[0], like_b=specs[1], input_shapes=shapes)


# Of the further architectures, a formula or a test of a layer of each kind.
FURTHER = (
    *("dropped residual", "concatenation exchanged", "causal mask missing", "halves of a gate", "8 bits"),
    *(
        "sigmoid for softmax",
        "padding at the end",
        "outputs exchanged",
        "clip missing",
        "directions exchanged",
    ),
    *("branches exchanged", "convolution of a shortcut dropped", "state exchanged", "positions not turned"),
    *("norm over the whole image", "words by one", "halves of a condition's weights", "norm without scale"),
    *("layer scale missing", "token of another model"),
)


# Faults whose layer is named, but not what differs in it (docs/roadmap.md).
LOCATED = ("order of fused parts",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *[pytest.mark.slow] * (name in (*MORE_FAULTS, *LATER_FAULTS) and name not in FURTHER),
                *[pytest.mark.xfail(strict=True, reason="located, without a cause")] * (name in LOCATED),
            ],
        )
        for name in FAULTS
    ],
)
def test_a_planted_fault_is_found_in_its_layer(name: str, tmp_path: Path, here: None) -> None:
    fault = FAULTS[name]
    verification = compare_torch(tmp_path, fault)
    assert not verification.within
    assert verification.models is not None
    first = verification.models.first
    assert first is not None
    assert re.fullmatch(fault.layer, first.b), first
    assert name in (*MORE_FAULTS, *LATER_FAULTS) or first.where == fault.where, first
    schemas.require("verify", json.loads(render_document(verification.document())))
    assert first.confirmed
    assert first.cause is not None
    assert re.search(fault.words, first.cause, re.IGNORECASE), first
    assert first.cause in verification_tables.render_verification(verification, quiet=False)


@pytest.mark.parametrize("model", [*SHAPES])
def test_a_torch_model_is_equal_to_itself(model: str, tmp_path: Path, here: None) -> None:
    verification = compare_torch(tmp_path, Fault(model, ""))
    assert verification.within
    assert verification.models is not None
    assert verification.models.first is None


# Faults between the frameworks: the right source is A, the conversion with the fault is B.

# Each case starts both frameworks, which takes seconds: the table of all faults is made at night.
DAILY = {
    "gate order of GRU": "keras-torch",
    "BN statistics not copied": "torch-keras",
    "exact against tanh gelu": "keras-torch",
    "transposed square kernel": "torch-keras",
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PlantedFaults:
    return PlantedFaults(tmp_path_factory.mktemp("planted"), [*DAILY])


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", DAILY)
def test_a_fault_between_frameworks_is_found(name: str, planted: PlantedFaults, runners: None) -> None:
    finding = planted.find(name, DAILY[name])
    assert finding.detected, finding
    assert finding.layer_right, finding
    assert finding.cause_right, finding
    assert finding.confirmed, finding


# The right source is A, the fault is in a program exported from its framework, whose operations are recorded.

# An activation, an axis, an epsilon, the order of parts, a stride, a kernel over one axis.
EXPORTED = (
    *("swish for hard swish", "softmax over the decoder's steps", "larger epsilon"),
    *("maximum before the mean", "stride of the first convolution", "kernel over channels in reverse"),
    # The order of ONNX's gates, a transposed constant, a range.
    *("gates of a decoder's GRU", "bias of positions transposed", "actions clipped"),
    # Operators of an export that are one layer of A, and a tensor that is computed of others.
    *("weight of a norm without 1", "norm of a kernel lost"),
)
# What a layer computes of constants is a constant of an export.
FOLDED = ("rows of a table turned", "rows of kinds exchanged")
# In networks of agents: parts, states of a loop, operations on equal values, TorchScript of several inputs.
OF_AGENTS = {
    "three quantiles dropped": PROGRAMS,
    "cell not reset": (*PROGRAMS, "torch-script"),
    "shares not normalized again": ("keras-onnx", "torch-onnx"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> PlantedFaults:
    pytest.importorskip("onnx")
    names = (*EXPORTED, *FOLDED)
    return PlantedFaults(tmp_path_factory.mktemp("exported"), names, PORTED_FAULTS, lambda _: PROGRAMS)


@pytest.mark.tensorflow
@pytest.mark.parametrize("direction", PROGRAMS)
@pytest.mark.parametrize("name", EXPORTED)
def test_a_fault_in_an_exported_program_is_found(
    name: str, direction: str, exported: PlantedFaults, runners: None
) -> None:
    finding = exported.find(name, direction)
    assert finding.detected, finding
    assert finding.layer_right, finding
    assert finding.cause_right, finding
    assert finding.confirmed, finding


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", FOLDED)
def test_a_constant_of_an_export_is_compared_with_what_a_layer_computes(
    name: str, exported: PlantedFaults, runners: None
) -> None:
    finding = exported.find(name, "torch-onnx")
    assert finding.detected
    assert finding.confirmed
    # Both sides are named, and what differs: not that A computes one and B the other.
    assert f"A's {PORTED_FAULTS[name].layer}" in finding.cause
    assert "computes" not in finding.cause


@pytest.mark.tensorflow
def test_faults_of_exported_agents_are_found(tmp_path: Path, runners: None) -> None:
    pytest.importorskip("onnx")
    planted = PlantedFaults(tmp_path, [*OF_AGENTS], EXPORTED_FAULTS, OF_AGENTS.__getitem__)
    rows = [planted.find(name, direction) for name, chosen in OF_AGENTS.items() for direction in chosen]
    assert [row for row in rows if not (row.detected and row.layer_right and row.cause_right)] == []


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("faults", "directions"),
    [(EXPORTED_FAULTS, exported_faults.directions), (PORTED_FAULTS, lambda _: PROGRAMS)],
    ids=["of agents", "of programs"],
)
def test_nearly_all_faults_of_exports_have_their_cause(
    faults: dict[str, Fault],
    directions: Callable[[str], Sequence[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])))
    rows = list(PlantedFaults(tmp_path, [*faults], faults, directions).findings(directions))
    assert len(rows) >= 200
    for name, share in (("detected", 0.98), ("layer_right", 0.95), ("cause_right", 0.9)):
        missing = [row for row in rows if not getattr(row, name)]
        assert len(missing) <= (1 - share) * len(rows), missing


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_table_of_faults_is_at_least_the_recorded_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])))
    recorded = {(row["fault"], row["direction"]): row for row in planted_faults.recorded()}
    findings = PlantedFaults(tmp_path).findings(planted_faults.directions)
    rows = {(row.fault, row.direction): row for row in findings}
    assert {*rows} == {*recorded}
    for key, row in rows.items():
        assert row.detected, row
        assert row.layer_right >= recorded[key]["layer_right"], row
        assert row.cause_right >= recorded[key]["cause_right"], row


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("programs", "least"), [(False, (1.0, 0.98, 0.9)), (True, (0.99, 0.93, 0.85))], ids=["models", "programs"]
)
def test_nearly_all_faults_of_ported_architectures_have_their_cause(
    programs: bool, least: tuple[float, float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])))
    chosen = (lambda _: PROGRAMS) if programs else ported_faults.directions
    rows = list(PlantedFaults(tmp_path, [*PORTED_FAULTS], PORTED_FAULTS, chosen).findings(chosen))
    assert len(rows) >= 300
    for name, share in zip(("detected", "layer_right", "cause_right"), least, strict=True):
        missing = [row for row in rows if not getattr(row, name)]
        assert len(missing) <= (1 - share) * len(rows), missing


def test_the_recorded_table_has_every_fault_in_its_directions() -> None:
    rows = planted_faults.recorded()
    assert all(row["detected"] for row in rows)
    for name in FAULTS:
        assert {row["direction"] for row in rows if row["fault"] == name} == {
            *planted_faults.directions(name)
        }
    assert len(planted_faults.PROMISED) >= 24
    promised = [row for row in rows if row["fault"] in planted_faults.PROMISED]
    assert all(row["layer_right"] for row in promised)
    wrong = [row["fault"] for row in promised if not row["cause_right"]]
    assert {*wrong} <= {"wrong statistics axis", "tied weights untied"}


@pytest.mark.parametrize(
    ("faults", "models", "cases"), [(MORE_FAULTS, 15, 170), (LATER_FAULTS, 30, 129)], ids=["more", "later"]
)
def test_nearly_all_recorded_faults_of_further_architectures_have_their_cause(
    faults: dict[str, Fault], models: int, cases: int
) -> None:
    rows = [row for row in planted_faults.recorded() if row["fault"] in faults]
    assert len({FAULTS[row["fault"]].model for row in rows}) >= models
    assert len(rows) >= cases
    right = {name: sum(row[name] for row in rows) / len(rows) for name in ("layer_right", "cause_right")}
    assert right["layer_right"] >= 0.95
    assert right["cause_right"] >= (0.95 if faults is MORE_FAULTS else 0.8)
    # A confirmed cause of something else is worse than none.
    assert sum(row["confirmed"] and not row["cause_right"] for row in rows) <= 2


def test_no_recorded_pair_of_equal_models_differs() -> None:
    rows = right_pairs.recorded()
    assert len(rows) >= 30
    assert [row["name"] for row in rows if not row["within"]] == []
    assert {"by hand", "agent", "twins", "transformers", "application"} == {row["kind"] for row in rows}
    assert [row["name"] for row in rows if not row["layers"] and row["kind"] != "agent"] == []


def test_the_page_of_results_is_that_of_the_record() -> None:
    assert verifying.DOCUMENT.read_text(encoding="utf-8") == verifying.document()


@pytest.mark.slow
@pytest.mark.tensorflow
def test_equal_pairs_still_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), os.environ["PYTHONPATH"])))
    pairs = list(right_pairs.pairs(tmp_path, ("hand", "agents", "twins"), ()))
    assert len(pairs) >= 30
    assert [row for row in pairs if not row.within] == []


# What runs, and what is refused.


def saved(tmp_path: Path, name: str) -> tuple[Any, str]:
    """Return the torch model, and the path of its state_dict."""
    import torch

    model = getattr(pair_models, name)()
    model.load_state_dict(pair_models.torch_state(name))
    torch.save(model.state_dict(), tmp_path / f"{name}.pt")
    return model.eval(), str(tmp_path / f"{name}.pt")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cnn", "words", "lstm"])
def test_an_onnx_file_runs(name: str, tmp_path: Path, here: None) -> None:
    pytest.importorskip("onnx")
    import torch

    model, weights = saved(tmp_path, name)
    dtype = torch.int64 if name == "words" else torch.float32
    batch = torch.zeros(2, *map(int, SHAPES[name].split(",")), dtype=dtype)
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(
        model,
        (batch,),
        file,
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "n"}},
    )
    verification = verify(file, weights, like_b=spec(name))
    assert verification.within
    assert verification.models is not None
    assert verification.models.layers


@pytest.mark.filterwarnings("ignore")
def test_a_program_runs_with_permission_only(tmp_path: Path, here: None) -> None:
    import torch

    model, weights = saved(tmp_path, "mlp")
    script = str(tmp_path / "script.pt")
    torch.jit.trace(model, torch.zeros(2, 6)).save(script)
    with pytest.raises(UsageError) as refused:
        verify(script, weights, like_b=spec("mlp"), input_shapes=("6",))
    assert refused.value.file == script
    assert "--run-code" in (refused.value.hint or "")
    verification = verify(script, weights, like_b=spec("mlp"), input_shapes=("6",), run_code=True)
    assert verification.within
    assert verification.models is not None
    assert verification.models.layers


def test_weights_alone_do_not_run(tmp_path: Path, here: None) -> None:
    _, weights = saved(tmp_path, "cnn")
    with pytest.raises(UsageError) as refused:
        verify(weights, weights, like_a=spec("cnn"), input_shapes=(SHAPES["cnn"],))
    assert "--like-b" in (refused.value.hint or "")


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, here: None) -> None:
    _, one = saved(tmp_path, "mlp")
    _, other = saved(tmp_path, "words")
    with pytest.raises(UsageError) as refused:
        verify(one, other, like_a=spec("mlp"), like_b=spec("mlp"), input_shapes=("6",))
    assert refused.value.file is not None
    assert refused.value.file.endswith("words.pt")


def test_own_inputs(tmp_path: Path, here: None) -> None:
    _, weights = saved(tmp_path, "mlp")
    np.savez(tmp_path / "inputs.npz", x=np.ones((5, 6), np.float32))
    verification = verify(
        weights, weights, like_a=spec("mlp"), like_b=spec("mlp"), inputs=str(tmp_path / "inputs.npz")
    )
    assert verification.within
    assert [network.n for network in verification.networks] == [5]


@pytest.mark.parametrize("rows", [[2999], range(100, 140), range(3000)])
def test_rows_of_a_table_that_the_inputs_did_not_reach_are_reached(
    rows: Sequence[int], tmp_path: Path, here: None
) -> None:
    import torch

    state = pair_models.torch_state("vocabulary")
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt")]
    torch.save(state, paths[0])
    state["0.weight"][rows] += 0.5
    torch.save(state, paths[1])
    like = spec("vocabulary")
    verification = verify(*paths, like_a=like, like_b=like, input_shapes=("5",))
    assert not verification.within
    assert verification.models is not None
    assert verification.models.first is not None
    assert verification.models.first.b == "0"
    if len(rows) < 3000:
        assert f" {len(rows):,} of 3,000 rows" in str(verification.models.first.cause)
    # The user's inputs are not changed: the rows are named.
    np.savez(tmp_path / "inputs.npz", x=np.arange(25).reshape(5, 5))
    verification = verify(*paths, like_a=like, like_b=like, inputs=str(tmp_path / "inputs.npz"))
    assert verification.within == (len(rows) < 3000)
    assert any(f"{len(rows):,} of 3,000 rows" in note for note in verification.notes) == verification.within


def test_several_named_inputs(tmp_path: Path, here: None) -> None:
    _, weights = saved(tmp_path, "several")
    like = spec("several")
    verification = verify(weights, weights, like_a=like, like_b=like, input_shapes=("words=5", "image=4"))
    assert verification.within
    assert verification.models is not None
    assert [input_.dtype for input_ in verification.models.inputs] == ["int32", "float32"]
    assert sorted(network.name for network in verification.networks) == ["action", "value"]


def test_unknown_inputs_are_refused(tmp_path: Path, here: None) -> None:
    _, weights = saved(tmp_path, "mlp")
    with pytest.raises(UsageError) as refused:
        verify(weights, weights, like_a=spec("mlp"), like_b=spec("mlp"))
    assert "--input-shape" in (refused.value.hint or "")


def test_an_agent_against_an_own_model(tmp_path: Path, here: None) -> None:
    import torch

    agent = str(ROOT / "sample_ckpts/td3_pendulum_torch/ckpt-15000.pt")
    actor = torch.load(agent, weights_only=True)["actor"]
    torch.save(actor, tmp_path / "actor.pt")
    verification = verify(agent, str(tmp_path / "actor.pt"), like_b=spec("policy"))
    assert verification.within


@pytest.mark.parametrize(
    ("a", "b", "channels", "transpose", "moved"),
    [
        ((8, 9, 3), (3, 8, 9), ("", ""), None, "first"),
        ((3, 8, 9), (8, 9, 3), ("", ""), None, "last"),
        ((8, 9, 3), None, ("last", "first"), None, "first"),
        ((8, 9, 3), None, ("last", "first"), False, ""),
        ((8, 9, 3), None, ("", ""), None, ""),
        ((8, 9, 3), None, ("", ""), True, "first"),
        ((4, 4, 4), (4, 4, 4), ("last", "first"), None, "first"),
        ((4, 4, 4), (4, 4, 4), ("", ""), None, ""),
        ((7,), None, ("last", "first"), None, ""),
        ((3, 2, 6, 5), (3, 6, 5, 2), ("first", "last"), None, "last in each frame"),
    ],
)
def test_the_order_of_axes(a: Any, b: Any, channels: Any, transpose: bool | None, moved: str) -> None:
    def side(shape: Any, order: str) -> dict[str, Any]:
        row = {"name": "x", "shape": shape, "dtype": "float32", "batch": None}
        return {"inputs": [] if shape is None else [row], "channels": order}

    resolver = two_models.InputResolver([side(a, channels[0]), side(b, channels[1])], transpose)
    (pair,) = resolver.pairs({})
    assert pair.transposed == moved
    # A decision by evidence is reported; the user's own is not.
    assert bool(resolver.assumed) == (transpose is None and bool(moved))


@pytest.mark.parametrize("name", ["payload-keras-lambda", "payload-keras-module-os", "keras-h5-lambda"])
def test_code_in_a_keras_file_is_refused_before_keras_opens_it(name: str, tmp_path: Path) -> None:
    from tests.hostile import crafted_payloads

    case = next(case for case in crafted_payloads.CASES if case.name == name)
    file = str(case.make(tmp_path))
    assert two_models.find_code(open_checkpoint(file), "keras") is not None
    with pytest.raises((UsageError, UnsupportedError)) as refused:
        verify(file, file)
    assert refused.value.file == file


@pytest.mark.parametrize(
    ("shapes", "stated", "transpose", "hint"),
    [
        (([8], [16, 16, 3]), {}, None, None),
        (([8], [16, 16, 3]), {}, True, None),
        (([16, 16, 3], [3, 16, 16]), {}, False, "leave out --no-transpose-inputs"),
        (([16, 16, 3], [16, 16, 3]), {}, True, "leave out --transpose-inputs"),
        (([None], [8]), {"": (5,)}, None, "use --input-shape 8"),
    ],
)
def test_a_hint_on_shapes_makes_them_equal(
    shapes: tuple[list[int | None], list[int]],
    stated: dict[str, tuple[int, ...]],
    transpose: bool | None,
    hint: str | None,
) -> None:
    def resolve(stated: dict[str, tuple[int, ...]], transpose: bool | None) -> None:
        rows = [{"name": "x", "shape": shape, "dtype": "float32", "batch": True} for shape in shapes]
        opened = [{"inputs": [row], "channels": "last"} for row in rows]
        InputResolver(opened, transpose).pairs(stated)

    with pytest.raises(UsageError) as caught:
        resolve(stated, transpose)
    assert caught.value.hint == hint
    if hint is not None:
        size = re.search("--input-shape ([0-9,]+)", hint)
        resolve({"": tuple(map(int, size[1].split(",")))} if size else stated, transpose if size else None)
