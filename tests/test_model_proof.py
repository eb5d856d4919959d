"""`convert --like` and `load_into` run both the source and the filled model: a difference changes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool.cli import convert
from ckpttool.commands.convert import ConversionResult, fill
from ckpttool.commands.verify import verify
from ckpttool.conversion import filling
from ckpttool.core import UsageError
from ckpttool.networks import ModelSpec
from ckpttool.verification import two_models
from tests import model_proofs, pair_models, replayed_faults, schemas, warm
from tests.conftest import ROOT
from tests.conftest import in_process as run
from tests.flattened_models import QUICK, SOURCES
from tests.golden_texts import Golden
from tests.shared_runners import InThisProcess

pytestmark = [pytest.mark.torch, pytest.mark.long]
PROGRAM = "from tests import model_proofs; model_proofs.main('.')"


# A Keras source, and a model of PyTorch: with the mapper as it is, and without one of its fixes.


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("proofs")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    status, output = warm.run("tensorflow", PROGRAM, folder, {**os.environ, "PYTHONPATH": path})
    assert status == 0, output[-4000:]
    return json.loads((folder / "outcomes.json").read_bytes())


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", ["right mlp", "right cnn"])
def test_a_right_conversion_is_verified(name: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    assert outcome["written"]
    assert outcome["verified"]
    assert outcome["float64"]
    assert len(outcome["engines"]) == 2
    schemas.require("sidecar", outcome["receipt"])
    record = outcome["receipt"]["verification"]
    assert {name: record[name] for name in ("verified", "reason", "seed")} == {
        "verified": True,
        "reason": None,
        "seed": 0,
    }
    assert all(output["within"] for output in record["outputs"])


# By fault: the layers of the source and of the model in which it must be found.
FAULTS = {
    "square kernel": ("second", "2"),
    "flattened image": ("head", "7"),
    "gate order": ("rnn", "rnn"),
    "statistics": ("norm", "1"),
    "epsilon": ("norm", "1"),
    "activation": ("first", "1"),
    "stated orientation": ("second", "2"),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_mapper_writes_nothing(name: str, outcomes: dict[str, Any]) -> None:
    outcome = outcomes[name]
    assert not outcome["written"]
    assert not outcome["within"]
    assert "receipt" not in outcome
    first = outcome["first_difference"]
    assert (first["a"], first["b"]) == FAULTS[name]
    number = [*outcomes].index(name)
    assert not [file for file in outcome["files"] if file.startswith(f"out{number}.")]
    assert not [file for file in outcome["files"] if "tmp" in file]


# A model in code states the input shape and the order of flattened images, which no weights file does.


def flattened(folder: Path, sources: Sequence[str]) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = f"from tests import flattened_models; flattened_models.main('.', *{tuple(sources)})"
    status, output = warm.run("tensorflow", program, folder, {**os.environ, "PYTHONPATH": path})
    assert status == 0, output[-4000:]
    outcomes: dict[str, Any] = json.loads((folder / "outcomes.json").read_bytes())
    return outcomes


@pytest.mark.tensorflow
@pytest.mark.parametrize("sources", [QUICK, pytest.param([*{*SOURCES} - {*QUICK}], marks=pytest.mark.slow)])
def test_a_call_of_the_source_states_how_images_are_flattened(sources: Sequence[str], tmp_path: Path) -> None:
    for name, outcome in flattened(tmp_path, sorted(sources)).items():
        assert outcome["like"] == {"written": True, "verified": True, "stated": [], "assumed": []}, name
        assert outcome["far"] < 1e-5, name
        assert outcome["plain"]["written"], name
        # The Keras twin of `moved` flattens as PyTorch does, which no file of a PyTorch model shows.
        assert outcome["plain"]["same"] is (name != "torch moved"), name
        assert len(outcome["plain"]["stated"]) == 1, name


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replays")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = "from tests import model_proofs; model_proofs.replay('.')"
    status, output = warm.run("tensorflow", program, folder, {**os.environ, "PYTHONPATH": path})
    assert status == 0, output[-4000:]
    outcomes: dict[str, Any] = json.loads((folder / "outcomes.json").read_bytes())
    return outcomes


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", replayed_faults.FAULTS)
def test_a_replayed_fault_writes_nothing(name: str, replays: dict[str, Any]) -> None:
    outcome, case = replays[name], replayed_faults.FAULTS[name]
    right = replays[f"right {case.model}"]
    assert right["written"]
    assert right["verified"]
    assert not outcome["written"]
    assert not outcome["verified"]
    assert not outcome["within"]
    assert "receipt" not in outcome
    assert (outcome["first_difference"]["a"], outcome["first_difference"]["b"]) == (case.a, case.b)
    assert not [file for file in outcome["files"] if file.startswith("wrong")]


@pytest.mark.tensorflow
def test_load_into_restores_a_model_that_computes_something_else(outcomes: dict[str, Any]) -> None:
    right = outcomes["right mlp"]["load_into"]
    assert right == {
        "verified": True,
        "reason": None,
        "unchanged": False,
        "training": True,
        "random": True,
    }
    for name in ("square kernel", "flattened image"):
        wrong = outcomes[name]["load_into"]
        assert wrong.pop("found")
        assert wrong == {
            "kind": "mapping",
            "path": FAULTS[name][1],
            "unchanged": True,
            "training": True,
            "random": True,
        }


# Sources that the user's own code builds, and sources that do not run, in this process.


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    monkeypatch.setattr(filling, "ModelProcess", model_proofs.InThisProcess)
    monkeypatch.setattr(two_models, "ModelProcess", model_proofs.InThisProcess)


def save(folder: Path, name: str = "mlp") -> str:
    import torch

    torch.save(pair_models.torch_state(name), folder / f"{name}.pt")
    return str(folder / f"{name}.pt")


def into(folder: Path, source: str, like: str, **options: Any) -> ConversionResult:
    """Convert into a model with an input of six numbers."""
    return fill(source, str(folder / "out.pt"), ModelSpec(like, shapes=((6,),)), **options)


def test_a_source_of_own_code_is_run(tmp_path: Path) -> None:
    done = into(tmp_path, save(tmp_path), "pair_models:mlp", like_source="pair_models:mlp")
    assert done.proof is not None
    assert done.proof.verified
    assert done.written
    schemas.require("convert", json.loads(json.dumps({"schema": 1, "tool": "ckpttool 1", **done.document()})))


def test_the_command_prints_the_first_difference(tmp_path: Path, golden: Golden) -> None:
    save(tmp_path)
    command = ("convert", "mlp.pt", "out.pt", "--like", "model_proofs:silu_mlp", "--input-shape", "6")
    golden.replace(version("torch"), "VERSION")
    ran = run(*command, "--like-source", "pair_models:mlp", cwd=tmp_path)
    assert ran.status == 1
    golden(ran)
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.pt"]
    printed = run(*command, "--like-source", "pair_models:mlp", "--json", cwd=tmp_path)
    schemas.require("convert", printed.json())
    assert printed.json()["verification"]["first_difference"]["a"] == "1"
    skipped = run(*command, "--like-source", "pair_models:mlp", "--no-verify", "--json", cwd=tmp_path)
    assert skipped.status == 0
    assert skipped.json()["verification"]["reason"] == "--no-verify was used"


@pytest.mark.parametrize("factory", ["nowhere:mlp", "pair_models:nothing", "pair_models:cnn"])
def test_own_code_that_does_not_run_the_source_is_an_error(factory: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        into(tmp_path, save(tmp_path), "pair_models:mlp", like_source=factory)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["mlp.pt"]


# Why the outputs are not compared: options, and what the reason begins with.
NOT_COMPARED: dict[str, dict[str, Any]] = {
    "the source contains weights": {},
    "--no-verify": {"verify": False, "like_source": "pair_models:mlp"},
    "--part": {"part": "model"},
    "some tensors": {"allow_missing": True, "like_source": "pair_models:mlp"},
    "--cast": {"cast": True, "fold_weight_norm": True, "like_source": "pair_models:mlp"},
}


@pytest.mark.parametrize("reason", NOT_COMPARED)
def test_a_mapping_that_is_not_verified_is_recorded_with_the_reason(reason: str, tmp_path: Path) -> None:
    import torch

    state = pair_models.torch_state("mlp")
    if reason == "--part":
        state = {"model": state}
    elif reason == "some tensors":
        del state["4.bias"]
    elif reason == "--cast":  # of weight norm, whose weight is computed
        state = {name: value.double() / 3 for name, value in state.items()}
        state["0.weight_v"] = state.pop("0.weight")
        state["0.weight_g"] = state["0.weight_v"].norm(dim=1)[:, None]
    torch.save(state, tmp_path / "mlp.pt")
    done = into(tmp_path, str(tmp_path / "mlp.pt"), "pair_models:mlp", **NOT_COMPARED[reason])
    assert done.written
    assert done.proof is not None
    assert (done.proof.reason or "").startswith(reason)
    receipt = json.loads((tmp_path / "out.pt.ckpttool.json").read_bytes())
    schemas.require("sidecar", receipt)
    assert not receipt["verification"]["verified"]
    assert receipt["verification"]["reason"].startswith(reason)
    command = receipt["verification"].get("command")
    assert command is None if reason == "--part" else command.startswith("ckpttool verify ")
    assert done.proof.sentence in done.report.notes


# Sources whose model is a part of their file, or whose weights are rounded: state, right model, options.
def _beside(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": state, "ema": {name: value + 1 for name, value in state.items()}, "step": 7}


def _prefixed(*starts: str) -> Any:
    """Return what puts a state under each of these prefixes; all but the last have other values."""

    def put(state: dict[str, Any]) -> dict[str, Any]:
        moved = {start: len(starts) - 1 - number for number, start in enumerate(starts)}
        return {
            f"{start}{name}": value + add for start, add in moved.items() for name, value in state.items()
        }

    return put


def _third(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() / 3 for name, value in state.items()}


COMPARED: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "part of a file": (_beside, "mlp", {"part": "model"}),
    "second part of a file": (
        lambda state: {"model": {name: value + 1 for name, value in state.items()}, "ema": state},
        "mlp",
        {"part": "ema"},
    ),
    "part by names": (_prefixed("value.", "policy.actor."), "mlp", {"part": "policy/actor"}),
    "part of a part": (
        lambda state: {"state_dict": _prefixed("other.", "model.")(state)},
        "mlp",
        {"part": "state_dict/model"},
    ),
    "wrapped": (_prefixed("module."), "mlp", {}),
    "rounded to float32": (_third, "mlp", {"cast": True}),
    "rounded to float16": (dict, "half_mlp", {"cast": True}),
    "missing buffer": (dict, "placed_mlp", {"allow_missing": True}),
}


_FAST = ("part by names", "rounded to float16", "missing buffer")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in _FAST)) for case in COMPARED]
)
def test_parts_and_rounded_weights_are_compared(case: str, tmp_path: Path) -> None:
    import torch

    make, name, options = COMPARED[case]
    torch.save(make(pair_models.torch_state("mlp")), tmp_path / "mlp.pt")
    module = "pair_models" if name == "mlp" else "model_proofs"
    source, options = str(tmp_path / "mlp.pt"), {**options, "like_source": "pair_models:mlp", "force": True}
    done = into(tmp_path, source, f"{module}:{name}", **options)
    assert done.proof is not None
    assert done.proof.verified, done.proof.sentence
    receipt = json.loads((tmp_path / "out.pt.ckpttool.json").read_bytes())
    schemas.require("sidecar", receipt)
    assert receipt["verification"].get("rounded") == (case.split()[-1] if "rounded" in case else None)
    if case != "missing buffer":
        wrong = into(tmp_path, source, f"model_proofs:{'half_' * (name == 'half_mlp')}silu_mlp", **options)
        assert not wrong.within
        assert not wrong.written


def test_a_live_model_stays_in_training_mode(tmp_path: Path) -> None:
    model, like = pair_models.mlp().train(), ModelSpec("pair_models:mlp", shapes=((6,),))
    filling.load_into(model, save(tmp_path), like_source=like)
    assert all(module.training for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["part of a file", *_FAST])
def test_a_model_in_memory_is_compared_with_a_part(name: str, tmp_path: Path) -> None:
    import torch

    make, model, options = COMPARED[name]
    torch.save(make(pair_models.torch_state("mlp")), tmp_path / "mlp.pt")
    arguments = {"part": options["part"]} if "part" in options else {"strict": name != "missing buffer"}
    net = getattr(pair_models if model == "mlp" else model_proofs, model)()
    more = {"like_source": "pair_models:mlp", "shapes": [(6,)], **arguments}
    done = filling.load_into(net, str(tmp_path / "mlp.pt"), **more)
    assert done.proof is not None
    assert done.proof.verified, done.proof.sentence


def test_a_part_that_the_file_does_not_have_for_the_own_code_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        into(tmp_path, save(tmp_path), "pair_models:mlp", like_source="pair_models:mlp", part="nothing")


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


def test_a_whole_module_is_unpickled_with_permission_only(tmp_path: Path) -> None:
    import torch

    model = pair_models.mlp()
    model.load_state_dict(pair_models.torch_state("mlp"))
    model.planted = Planted(str(tmp_path / "planted"))
    torch.save(model, tmp_path / "whole.pt")
    source, options = str(tmp_path / "whole.pt"), {"like_source": "pair_models:mlp"}
    with pytest.raises(UsageError) as caught:
        into(tmp_path, source, "pair_models:mlp", **options)
    assert caught.value.hint is not None
    assert "--run-code" in caught.value.hint
    with pytest.raises(UsageError) as caught:
        ckpttool.load_into(pair_models.mlp(), source, shapes=[(6,)], **options)
    assert caught.value.hint is not None
    assert "run_code=True" in caught.value.hint
    assert not (tmp_path / "planted").exists()
    done = into(tmp_path, source, "pair_models:mlp", run_code=True, **options)
    assert done.proof is not None
    assert done.proof.verified, done.proof.sentence
    wrong = into(tmp_path, source, "model_proofs:silu_mlp", run_code=True, force=True, **options)
    assert not wrong.within


def test_the_command_that_a_reason_names_compares_the_outputs(tmp_path: Path) -> None:
    done = into(tmp_path, save(tmp_path), "pair_models:mlp")
    assert done.proof is not None
    words = (done.proof.command or "").replace("MODULE:FACTORY", "pair_models:mlp").split()[1:]
    ran = run(*words, cwd=tmp_path)
    assert ran.status == 0, ran.err


@pytest.mark.parametrize("name", ["endless_mlp", "constant_mlp"])
def test_outputs_that_any_model_gives_prove_nothing(name: str, tmp_path: Path) -> None:
    like = f"model_proofs:{name}"
    done = into(tmp_path, save(tmp_path), like, like_source=like)
    assert done.written
    assert done.proof is not None
    assert not done.proof.verified
    assert done.proof.reason
    assert "verify" in (done.proof.command or "")


def test_a_wider_type_is_compared(tmp_path: Path) -> None:
    done = into(tmp_path, save(tmp_path), "model_proofs:double_mlp", like_source="pair_models:mlp")
    assert done.proof is not None
    assert done.proof.verified
    net = model_proofs.double_mlp()
    filled = filling.load_into(net, save(tmp_path), like_source="pair_models:mlp", shapes=[(6,)])
    assert filled.proof is not None
    assert filled.proof.verified


def test_a_dry_run_proves_nothing(tmp_path: Path) -> None:
    done = into(tmp_path, save(tmp_path), "pair_models:mlp", like_source="pair_models:mlp", dry_run=True)
    assert done.proof is not None
    assert not done.proof.verified
    assert done.document()["verification"]["reason"] == "--dry-run was used"


def test_a_failed_proof_keeps_the_former_target(tmp_path: Path) -> None:
    (tmp_path / "out.pt").write_bytes(b"before")
    like = "model_proofs:silu_mlp"
    done = into(tmp_path, save(tmp_path), like, like_source="pair_models:mlp", force=True)
    assert not done.written
    assert (tmp_path / "out.pt").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlp.pt", "out.pt"]


@pytest.mark.parametrize("verified", [True, False])
def test_calls_of_a_model_in_memory_leave_no_trace(verified: bool, tmp_path: Path) -> None:
    import random

    import numpy as np
    import torch

    source = save(tmp_path)
    net = model_proofs.counting_mlp()
    net[2].eval()
    net[0].weight.requires_grad = False
    buffers = dict(net.named_buffers())
    modes = [module.training for module in net.modules()]
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    done = filling.load_into(net, source, like_source="pair_models:mlp", shapes=[(6,)], verify=verified)
    assert done.proof is not None
    assert done.proof.verified == verified
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert modes == [module.training for module in net.modules()]
    assert not net[0].weight.requires_grad
    for name, buffer in net.named_buffers():
        assert buffer is buffers[name]
        assert float(buffer) == 0.0


@pytest.mark.filterwarnings("ignore")
def test_a_source_with_code_runs_with_permission_only(tmp_path: Path) -> None:
    import torch

    model = pair_models.mlp()
    model.load_state_dict(pair_models.torch_state("mlp"))
    torch.jit.script(model).save(str(tmp_path / "mlp.pt"))  # type: ignore[no-untyped-call]
    done = into(tmp_path, str(tmp_path / "mlp.pt"), "pair_models:mlp")
    assert done.proof is not None
    assert "--run-code" in (done.proof.reason or "")
    assert "--run-code" in (done.proof.command or "")
    done = into(tmp_path, str(tmp_path / "mlp.pt"), "pair_models:mlp", run_code=True, force=True)
    assert done.proof is not None
    assert done.proof.verified
    with_fault = into(tmp_path, str(tmp_path / "mlp.pt"), "model_proofs:silu_mlp", run_code=True, force=True)
    assert not with_fault.written
    assert not with_fault.within


def test_an_onnx_source_runs_by_itself(tmp_path: Path) -> None:
    import torch

    onnx = pytest.importorskip("onnx")
    from tests.test_onnx_operators import N, f, model

    nodes = [
        N("MatMul", ["obs", "W"], ["x"]),
        N("Add", ["x", "b"], ["y"]),
        N("Relu", ["y"], ["z"]),
        N("MatMul", ["z", "V"], ["action"]),
    ]
    proto = model(nodes, {"W": f(6, 6), "b": f(6), "V": f(6, 2)}, ("batch", 6))
    onnx.save(proto, tmp_path / "net.onnx")
    right = into(tmp_path, str(tmp_path / "net.onnx"), "model_proofs:rectified")
    assert right.proof is not None
    assert right.proof.verified, right.proof.sentence
    wrong = into(tmp_path, str(tmp_path / "net.onnx"), "model_proofs:bounded", force=True)
    assert not wrong.written
    assert not wrong.within
    # Without a float64 run of A, a tolerance bounds the difference of the models, too.
    comparison = {"like_b": "model_proofs:bounded", "tolerance": 1e-3}
    torch.save(model_proofs.bounded().state_dict(), tmp_path / "other.pt")
    assert not verify(str(tmp_path / "net.onnx"), str(tmp_path / "other.pt"), **comparison).within


def test_the_process_of_a_source_starts_before_the_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx = pytest.importorskip("onnx")
    from tests.test_onnx_operators import N, f, model

    nodes = [N("MatMul", ["obs", "W"], ["x"]), N("Add", ["x", "b"], ["y"]), N("Relu", ["y"], ["z"])]
    nodes.append(N("MatMul", ["z", "V"], ["action"]))
    onnx.save(model(nodes, {"W": f(6, 6), "b": f(6), "V": f(6, 2)}, ("batch", 6)), tmp_path / "net.onnx")
    requests: list[tuple[str, str]] = []
    for method in ("begin", "request"):
        monkeypatch.setattr(InThisProcess, method, watched(getattr(InThisProcess, method), requests))
    done = into(tmp_path, str(tmp_path / "net.onnx"), "model_proofs:rectified")
    assert done.proof is not None
    assert done.proof.verified
    assert requests[:2] == [("begin", "open"), ("request", "build")]
    # Without a comparison none starts.
    requests.clear()
    into(tmp_path, str(tmp_path / "net.onnx"), "model_proofs:rectified", force=True, verify=False)
    assert ("request", "build") in requests
    assert "open" not in {do for _, do in requests}


def watched(method: Callable[..., Any], requests: list[tuple[str, str]]) -> Callable[..., Any]:
    """Return a method of a process that notes its name and the request."""

    def noted(process: InThisProcess, do: str, **values: Any) -> Any:
        requests.append((method.__name__, do))
        return method(process, do, **values)

    return noted


def test_a_model_in_memory_is_compared_and_left_as_it_was(tmp_path: Path) -> None:
    import torch

    source = save(tmp_path)
    net = pair_models.mlp()
    done = filling.load_into(net, source, like_source="pair_models:mlp", shapes=[(6,)])
    assert done.proof is not None
    assert done.proof.verified
    assert net.training
    other = model_proofs.silu_mlp()
    optimizer = torch.optim.Adam(other.parameters())
    before = other[2].weight.clone()
    from ckpttool.core import MappingError

    with pytest.raises(MappingError):
        filling.load_into(other, source, like_source="pair_models:mlp", shapes=[(6,)])
    assert (other[2].weight == before).all()
    assert not optimizer.state
    skipped = filling.load_into(other, source, like_source="pair_models:mlp", shapes=[(6,)], verify=False)
    assert skipped.proof is not None
    assert skipped.proof.reason == "verify=False was used"
    assert (other[2].weight != before).any()


def test_a_verified_conversion_says_so(tmp_path: Path, golden: Golden) -> None:
    golden.replace(version("torch"), "VERSION")
    done = into(tmp_path, save(tmp_path), "pair_models:mlp", like_source="pair_models:mlp")
    golden.replace(f"{max(value.max_rel for value in done.proof.outputs):.1e}" if done.proof else "", "ERROR")
    golden(convert.render_conversion(done, quiet=False, whole=False))
