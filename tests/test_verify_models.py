"""`verify` of two models: equal models pass, and each planted fault is found in its layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli import tables
from ckpttool.cli.common import render_document
from ckpttool.commands import model_comparison
from ckpttool.commands.verify import Verification, verify
from ckpttool.core import UnsupportedError, UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.networks import ModelSpec, model_runner
from tests import pair_models, schemas
from tests.conftest import ROOT
from tests.pair_models import RIGHT, SHAPES

pytestmark = [pytest.mark.torch, pytest.mark.long]
State = dict[str, Any]


class InThisProcess:
    """What ChildProcess does, without a process: its start takes most of a test's time."""

    folder: Path

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def start(self) -> None:
        InThisProcess.count += 1
        self.folder = InThisProcess.root / str(InThisProcess.count)
        self.folder.mkdir()
        self.session = model_runner.RunnerSession(self.folder)

    def stop(self, _: object) -> None:
        pass

    def request(self, do: str, values: dict[str, Any]) -> dict[str, Any]:
        given = json.loads(json.dumps(values))
        return json.loads(json.dumps(model_runner.HANDLERS[do](self.session, given)))

    root: Path
    count = 0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run torch models in this process."""
    (tmp_path / "sides").mkdir()
    InThisProcess.root = tmp_path / "sides"
    monkeypatch.setattr(model_comparison, "ChildProcess", InThisProcess)


def spec(name: str, options: dict[str, Any] | None = None) -> ModelSpec:
    return ModelSpec(f"pair_models:{name}", options or None)


@pytest.fixture(autouse=True)
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `pair_models` importable for the models' processes, and for this one."""
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


# Equal models, one in each framework.


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every model's `.pt` and `.keras`."""
    import torch

    folder = tmp_path_factory.mktemp("pairs")
    for name in RIGHT:
        state = pair_models.torch_state(name)
        torch.save(state, folder / f"{name}.pt")
        np.savez(folder / f"{name}.npz", **{key: value.numpy() for key, value in state.items()})
    command = [sys.executable, "-m", "tests.pair_models", str(folder), *RIGHT]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("cnn", "lstm", "words") else pytest.mark.slow)
        for name in RIGHT
    ],
)
def test_equal_models_pass(files: Path, name: str) -> None:
    found = verify(str(files / f"{name}.keras"), str(files / f"{name}.pt"), like_b=spec(name))
    assert found.within
    assert found.models is not None
    assert found.models.exact
    assert len(found.models.layers) >= 2
    assert all(each.within for each in found.models.layers)


# Faults, planted in the second of two torch models.


@dataclass(frozen=True)
class Fault:
    """A change of the state or of the code's options, and the layer where it must be found."""

    model: str
    layer: str
    change: Callable[[State], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    right: dict[str, Any] = field(default_factory=dict)
    where: str = "layer"
    confirmed: bool = True
    words: str = ""


def put(name: str, make: Callable[[Any], Any]) -> Callable[[State], None]:
    def change(state: State) -> None:
        state[name] = make(state[name]).contiguous()

    return change


def blocks(count: int, *order: int) -> Callable[[Any], Any]:
    def turned(value: Any) -> Any:
        import torch

        return torch.cat([value.chunk(count)[place] for place in order])

    return turned


def on_all(make: Callable[[Any], Any], words: str = "") -> Callable[[State], None]:
    def change(state: State) -> None:
        for name, value in state.items():
            if words in name and value.dtype.is_floating_point:
                state[name] = make(value).contiguous()

    return change


def swap(*names: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        for end in ("weight", "bias"):
            one, other = (f"{name}.{end}" for name in names)
            state[one], state[other] = state[other], state[one]

    return change


def without(*words: str) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name in [name for name in state if any(word in name for word in words)]:
            del state[name]

    return change


def averaged(value: Any) -> Any:
    return value * 0.98 + 0.01 * value.flip(0)


def untied(state: State) -> None:
    state["out.weight"] = state["out.weight"] * 0.5


def forgotten_statistics(state: State) -> None:
    state["1.running_mean"] = state["1.running_mean"] * 0
    state["1.running_var"] = state["1.running_var"] * 0 + 1


FAULTS = {
    "transposed square kernel": Fault("mlp", "2", put("2.weight", lambda x: x.T)),
    "statistics not copied": Fault("cnn", "1", forgotten_statistics),
    "swapped heads": Fault(
        "block", "attention", put("attention.in_proj_weight", blocks(6, 1, 0, 2, 3, 4, 5))
    ),
    "swapped queries and keys": Fault("block", "attention", on_all(blocks(3, 1, 0, 2), "in_proj")),
    "swapped query and key layers": Fault("text", "key", swap("query", "key"), confirmed=False, words="key"),
    "bfloat16": Fault("mlp", "0", on_all(lambda x: x.bfloat16().float()), words="bfloat16"),
    "averaged for raw weights": Fault("mlp", "0", on_all(averaged), words="EMA"),
    "gates of an LSTM": Fault("lstm", "rnn", on_all(blocks(4, 0, 2, 1, 3), "rnn.")),
    "gates of a GRU": Fault("gru", "rnn", on_all(blocks(3, 1, 0, 2), "rnn.")),
    "channel order": Fault("cnn", "0", put("0.weight", lambda x: x.flip(1)), words="reverse"),
    "flattened in another order": Fault(
        "cnn", "7", put("7.weight", lambda x: x.reshape(4, 5, 2, 3).permute(0, 2, 3, 1).reshape(4, 30))
    ),
    "layers in another order": Fault("text", "mix", swap("mix", "up"), words="A's up"),
    "untied weights": Fault("text", "out", untied, {"tied": False}, words="tied"),
    "epsilon": Fault("block", "norm", options={"eps": 1e-6}, words="epsilon"),
    "form of gelu": Fault("block", "down", options={"approximate": "tanh"}, where="between", words="gelu"),
    "activation": Fault("activated", "1", options={"activation": "SiLU"}, words="silu"),
    "padding": Fault("vision", "conv", options={"padding": 0}, words="padding"),
    "padding mode": Fault("vision", "conv", options={"mode": "reflect"}, words="mode"),
    "dilation": Fault("vision", "conv2", options={"dilation": 2}, words="dilation"),
    "stride order": Fault("vision", "conv2", options={"stride": (1, 2)}, words="stride"),
    "pooling": Fault("vision", "pool", options={"pool": True}, words="padding"),
    "missing bias": Fault("vision", "conv2", without("conv2.bias"), {"bias": False}, words="bias"),
    "normaliser": Fault(
        "vision", "conv", without("mean"), {}, {"mean": (0.1, 0.5, 0.9)}, where="between", words="normaliser"
    ),
    "dropped position embedding": Fault(
        "text", "query", without("position"), {"position": False}, where="between", words="position"
    ),
    "dropped adapter": Fault("text", "mix", without("lora"), {"lora": False}, confirmed=False, words="lora"),
    "dropout left on": Fault("text", "mix", options={"dropout": True}, where="between", words="dropout"),
    "frozen scale": Fault("text", "up", without("scale"), {"scale": False}, where="between"),
    "statistics over a wrong axis": Fault(
        "text", "mix", options={"axis": 1}, where="between", confirmed=False
    ),
}


def compare_torch(tmp_path: Path, fault: Fault) -> Verification:
    import torch

    state = pair_models.torch_state(fault.model, **fault.right)
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    torch.save(state, paths[0])
    changed = {name: value.clone() for name, value in state.items()}
    if fault.change is not None:
        fault.change(changed)
    torch.save(changed, paths[1])
    specs = [spec(fault.model, each) for each in (fault.right, fault.options)]
    shape = SHAPES[fault.model]
    return verify(*map(str, paths), like_a=specs[0], like_b=specs[1], input_shapes=(shape,))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_in_its_layer(name: str, tmp_path: Path, here: None) -> None:
    fault = FAULTS[name]
    found = compare_torch(tmp_path, fault)
    assert not found.within
    assert found.models is not None
    first = found.models.first
    assert first is not None
    assert (first.b, first.where) == (fault.layer, fault.where), first
    assert first.cause is not None
    assert fault.words.lower() in first.cause.lower(), first
    assert first.confirmed == fault.confirmed, first
    schemas.require("verify", json.loads(render_document(found.document())))
    shown = tables.render_verification(found, quiet=False)
    assert first.cause in shown


@pytest.mark.parametrize("model", [*SHAPES])
def test_a_torch_model_is_equal_to_itself(model: str, tmp_path: Path, here: None) -> None:
    found = compare_torch(tmp_path, Fault(model, ""))
    assert found.within
    assert found.models is not None
    assert found.models.first is None


# Faults in a Keras model, against the right torch model and the other way round.

CROSSED = {
    "mlp@transposed": ("second", "2", put("2.weight", lambda x: x.T)),
    "mlp@activation": ("second", "2", None),
    "mlp@bfloat16": ("first", "0", on_all(lambda x: x.bfloat16().float())),
    "cnn@statistics": ("norm", "1", forgotten_statistics),
    "cnn@epsilon": ("norm", "1", None),
    "cnn@flatten": (
        "head",
        "7",
        put("7.weight", lambda x: x.reshape(4, 2, 3, 5).permute(0, 3, 1, 2).reshape(4, 30)),
    ),
    "cnn@channels": ("conv", "0", put("0.weight", lambda x: x.flip(1))),
    "lstm@gates": ("rnn", "rnn", on_all(blocks(4, 0, 2, 1, 3), "rnn.")),
    "gru@gates": ("rnn", "rnn", on_all(blocks(3, 1, 0, 2), "rnn.")),
    "attention@epsilon": ("norm", "norm", None),
    "attention@gelu": ("down", "down", None),
    "attention@swapped": ("attention", "attention", on_all(blocks(3, 1, 0, 2), "in_proj")),
}


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the right `.pt` of every model and a wrong `.keras` of every fault."""
    import torch

    folder = tmp_path_factory.mktemp("crossed")
    for title, (_, _, change) in CROSSED.items():
        name = title.partition("@")[0]
        state = pair_models.torch_state(name)
        torch.save(state, folder / f"{name}.pt")
        if change is not None:
            change(state)
        np.savez(folder / f"{title}.npz", **{key: value.numpy() for key, value in state.items()})
    command = [sys.executable, "-m", "tests.pair_models", str(folder), *CROSSED]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder


# Each case starts both frameworks, which takes seconds: the others run at night.
DAILY = {
    ("lstm@gates", "torch"),
    ("cnn@statistics", "keras"),
    ("attention@gelu", "torch"),
    ("mlp@transposed", "keras"),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("title", "direction"),
    [
        pytest.param(title, direction, marks=() if (title, direction) in DAILY else pytest.mark.slow)
        for title in CROSSED
        for direction in ("keras", "torch")
    ],
)
def test_a_fault_between_frameworks_is_found(title: str, direction: str, crossed: Path) -> None:
    keras, torch, _ = CROSSED[title]
    name = title.partition("@")[0]
    files, like = (str(crossed / f"{title}.keras"), str(crossed / f"{name}.pt")), spec(name)
    likes = {"like_a": like} if direction == "torch" else {"like_b": like}
    found = verify(*(files[::-1] if direction == "torch" else files), **likes)
    assert not found.within
    assert found.models is not None
    first = found.models.first
    assert first is not None
    assert {first.a, first.b} == {keras, torch}, first
    assert first.cause, first


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
    given = torch.zeros(2, *map(int, SHAPES[name].split(",")), dtype=dtype)
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(
        model,
        (given,),
        file,
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "n"}},
    )
    found = verify(file, weights, like_b=spec(name))
    assert found.within
    assert found.models is not None
    assert found.models.layers


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
    found = verify(script, weights, like_b=spec("mlp"), input_shapes=("6",), run_code=True)
    assert found.within
    assert found.not_compared


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
    found = verify(
        weights, weights, like_a=spec("mlp"), like_b=spec("mlp"), inputs=str(tmp_path / "inputs.npz")
    )
    assert found.within
    assert [each.n for each in found.networks] == [5]


def test_several_named_inputs(tmp_path: Path, here: None) -> None:
    _, weights = saved(tmp_path, "several")
    like = spec("several")
    found = verify(weights, weights, like_a=like, like_b=like, input_shapes=("words=5", "image=4"))
    assert found.within
    assert found.models is not None
    assert [each.dtype for each in found.models.inputs] == ["int32", "float32"]
    assert sorted(each.name for each in found.networks) == ["action", "value"]


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
    found = verify(agent, str(tmp_path / "actor.pt"), like_b=spec("policy"))
    assert found.within


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

    resolver = model_comparison.InputResolver([side(a, channels[0]), side(b, channels[1])], transpose)
    (pair,) = resolver.pairs({})
    assert pair.transposed == moved
    # A decision by evidence is reported; the user's own is not.
    assert bool(resolver.assumed) == (transpose is None and bool(moved))


@pytest.mark.parametrize("name", ["payload-keras-lambda", "payload-keras-module-os", "keras-h5-lambda"])
def test_code_in_a_keras_file_is_refused_before_keras_opens_it(name: str, tmp_path: Path) -> None:
    from tests.hostile import crafted_payloads

    case = next(each for each in crafted_payloads.CASES if each.name == name)
    file = str(case.make(tmp_path))
    assert model_comparison.find_code(open_checkpoint(file), "keras") is not None
    with pytest.raises((UsageError, UnsupportedError)) as refused:
        verify(file, file)
    assert refused.value.file == file
