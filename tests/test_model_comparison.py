"""How two models are opened, audited and given inputs, before they are compared."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool.commands.verify import verify
from ckpttool.core import CkpttoolError, NotFoundError, UsageError
from ckpttool.networks import ModelSpec, model_child, model_runner
from ckpttool.networks.tracing import map_array
from ckpttool.verification import causes, output_comparison, sides, two_models
from ckpttool.verification.inputs import InputFile, InputPair
from ckpttool.verification.sides import ModelSide
from ckpttool.verification.two_models import find_code
from tests import pair_models, warm
from tests.conftest import KERAS_2, ROOT
from tests.pair_models import SHAPES
from tests.shared_runners import InThisProcess

PAIR = (InputPair("image", "image", (3,), (3,)), InputPair("words", "words", (5,), (5,), "int32", below=11))


# Which files run, and which only with permission.


def keras_file(folder: Path, layer: dict[str, Any]) -> str:
    """Return a `.keras` archive of a Sequential model with one layer."""
    model = {"class_name": "Sequential", "module": "keras", "config": {"name": "net", "layers": [layer]}}
    with h5py.File(folder / "weights.h5", "w") as file:
        file.create_group("layers")
    with zipfile.ZipFile(folder / "net.keras", "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", json.dumps(model))
        archive.write(folder / "weights.h5", "model.weights.h5")
    return str(folder / "net.keras")


LAMBDA = {"class_name": "Lambda", "module": "keras.layers", "config": {"name": "act"}}
NEEDS_PERMISSION = {
    "lambda": LAMBDA,
    "download": {"class_name": "get_file", "module": "keras.utils", "config": {}},
    "own class": {"class_name": "Noisy", "module": "my.net", "config": {}},
    "registered class": {"class_name": "pkg>Net", "config": {}, "registered_name": "pkg>Net"},
    "vocabulary": {
        "class_name": "StringLookup",
        "module": "keras.layers",
        "config": {"vocabulary": "../bait"},
    },
    "other model": {"class_name": "TFSMLayer", "module": "keras.layers", "config": {"filepath": "/etc"}},
    "function": {"class_name": "function", "module": "builtins", "config": "my_activation"},
    "nested": {"class_name": "TimeDistributed", "module": "keras.layers", "config": {"layer": LAMBDA}},
}


@pytest.mark.parametrize("name", NEEDS_PERMISSION)
def test_a_keras_file_with_code_or_classes_needs_permission(name: str, tmp_path: Path) -> None:
    file = keras_file(tmp_path, NEEDS_PERMISSION[name])
    with pytest.raises(UsageError) as refused:
        verify(file, file)
    assert refused.value.file == file
    assert "--run-code" in (refused.value.hint or "")


@pytest.mark.parametrize("cls", ["Dense", "relu"])
def test_a_keras_file_of_plain_classes_needs_none(cls: str, tmp_path: Path) -> None:
    rows = {
        "Dense": {"class_name": "Dense", "module": "keras.layers", "config": {"name": "dense", "units": 3}},
        # Keras 2's form; no module is imported for it.
        "relu": {"class_name": "function", "config": "relu"},
    }
    side = ModelSide("A", keras_file(tmp_path, rows[cls]))
    assert side.kind == "keras"
    assert find_code(side.checkpoint, side.kind) is None


def test_permission_applies_to_a_model_of_one_lambda(tmp_path: Path) -> None:
    code = {"class_name": "Lambda", "config": {"name": "act", "function": ["4wEAAAA=", None, None]}}
    model = {"class_name": "Sequential", "config": {"name": "net", "layers": [code]}}
    with h5py.File(tmp_path / "net.h5", "w") as file:
        file.attrs["model_config"] = json.dumps(model)
        file.create_group("model_weights").attrs["layer_names"] = np.array([], "S1")
    with pytest.raises(UsageError) as refused:
        verify(str(tmp_path / "net.h5"), str(tmp_path / "net.h5"))
    assert "--run-code" in (refused.value.hint or "")


def test_weights_without_a_configuration_are_no_model(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "net.h5", "w") as file:
        group = file.create_group("model_weights/dense/dense")
        group["kernel:0"] = np.ones((3, 2), np.float32)
    assert ModelSide("A", str(tmp_path / "net.h5")).own_kind is None


def test_each_side_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def counted(path: str) -> Any:
        opened.append(os.path.basename(path))
        return inner(path)

    inner: Callable[[str], Any] = sides.open_checkpoint
    for name in ("verification.sides", "evaluation.restore"):
        monkeypatch.setattr(f"ckpttool.{name}.open_checkpoint", counted)
    monkeypatch.setattr("ckpttool.formats.detect.open_checkpoint", counted)
    samples = ROOT / "sample_ckpts"
    agent = str(samples / "td3_pendulum_torch/ckpt-15000.pt")
    other = str(samples / "td3_pendulum_tf/ckpt-15000")
    both = ModelSide("A", agent), ModelSide("B", other)
    assert [side.kind for side in both] == ["agent", "agent"]
    restored = [two_models.restore_agent(side.checkpoint) for side in both]
    assert all(restored)
    assert opened == ["ckpt-15000.pt", "ckpt-15000"]


@pytest.mark.parametrize("missing", ["b", "inputs"])
def test_files_are_looked_for_before_a_framework_starts(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "a.npz", x=IMAGE)
    paths = {name: str(tmp_path / "a.npz") for name in ("b", "inputs")}
    paths[missing] = str(tmp_path / "missing.npz")
    monkeypatch.setattr(f"{verify.__module__}.compare_models", lambda *_: pytest.fail("started"))
    with pytest.raises(NotFoundError):
        verify(str(tmp_path / "a.npz"), paths["b"], like_a="m:A", like_b="m:B", inputs=paths["inputs"])


# The user's inputs.


def inputs(tmp_path: Path, names: tuple[str, ...] = ("image", "words"), **arrays: Any) -> list[np.ndarray]:
    np.savez(tmp_path / "inputs.npz", **arrays)
    return InputFile(str(tmp_path / "inputs.npz"), names).inputs(PAIR, None)


IMAGE, WORDS = np.ones((2, 3), np.float32), np.ones((2, 5), np.int64)


def test_inputs_go_by_name_whatever_their_order(tmp_path: Path) -> None:
    first, second = inputs(tmp_path, words=WORDS, image=IMAGE)
    assert (first.shape, second.shape) == ((2, 3), (2, 5))


def test_inputs_without_names_go_by_order_which_is_reported(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", IMAGE, WORDS)
    input_file = InputFile(str(tmp_path / "inputs.npz"), ("image", "words"))
    assert len(input_file.notes) == 1
    assert input_file.shapes == {"image": (3,), "words": (5,)}


WRONG = {
    "missing": {"image": IMAGE},
    "another name": {"image": IMAGE, "word": WORDS},
    "objects": {"image": np.array([{}, {}], object), "words": WORDS},
    "strings": {"image": np.array([["a"], ["b"]]), "words": WORDS},
    "complex": {"image": IMAGE.astype(complex), "words": WORDS},
    "no batch": {"image": np.float32(1), "words": WORDS},
    "no rows": {"image": IMAGE[:0], "words": WORDS},
    "shape": {"image": IMAGE[:, :2], "words": WORDS},
    "fractions for integers": {"image": IMAGE, "words": WORDS + 0.5},
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_are_no_inputs_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        inputs(tmp_path, **WRONG[name])
    assert refused.value.file == str(tmp_path / "inputs.npz")


@pytest.mark.parametrize("data", [b"", b"no archive", b"PK\x03\x04 damaged", b"\x80\x04N."])
def test_files_that_are_no_arrays_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "inputs.npz").write_bytes(data)
    with pytest.raises(CkpttoolError) as refused:
        InputFile(str(tmp_path / "inputs.npz"), ("image",))
    assert refused.value.file == str(tmp_path / "inputs.npz")


def test_numbers_that_are_rounded_are_reported(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", image=np.full((2, 3), 0.1), words=WORDS)
    input_file = InputFile(str(tmp_path / "inputs.npz"), ("image", "words"))
    input_file.inputs(PAIR, None)
    assert len(input_file.notes) == 1
    with pytest.raises(UsageError):
        input_file.inputs(PAIR, 8)


# The forms of one layer in both frameworks.


def numbered(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


FORMS = {
    "recurrent": (
        {
            "weight_ih_l0": numbered(15, 3),
            "weight_hh_l0": numbered(15, 5),
            "bias_ih_l0": numbered(15),
            "bias_hh_l0": numbered(15) + 1,
        },
        {
            "cell/kernel": np.empty((3, 15)),
            "cell/recurrent_kernel": np.empty((5, 15)),
            "cell/bias": np.empty((2, 15)),
        },
    ),
    "attention": (
        {
            "in_proj_weight": numbered(24, 8),
            "in_proj_bias": numbered(24),
            "out_proj/weight": numbered(8, 8),
            "out_proj/bias": numbered(8),
        },
        {
            **{f"_{what}_dense/kernel": np.empty((8, 2, 4)) for what in ("query", "key", "value")},
            **{f"_{what}_dense/bias": np.empty((2, 4)) for what in ("query", "key", "value")},
            "_output_dense/kernel": np.empty((2, 4, 8)),
            "_output_dense/bias": np.empty(8),
        },
    ),
}


@pytest.mark.parametrize("family", FORMS)
def test_a_layer_goes_to_the_other_framework_and_back(family: str) -> None:
    torch, keras = FORMS[family]
    translated = causes.translate_tensors(torch, keras)
    assert {name: array.shape for name, array in translated.items()} == {n: e.shape for n, e in keras.items()}
    back = causes.translate_tensors(translated, torch)
    assert {*back} == {*torch}
    for name, array in torch.items():
        np.testing.assert_array_equal(back[name], array)


# Layers inside programs.


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run models in this process, and make `pair_models` importable."""
    monkeypatch.setattr(two_models, "ModelProcess", InThisProcess)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


def compare_program(tmp_path: Path, name: str, *, script: bool, wrong: str = "") -> Any:
    """Compare a program with the same model of a factory, or with one whose tensor `wrong` is transposed."""
    import torch

    model = getattr(pair_models, name)()
    state = pair_models.torch_state(name)
    model.load_state_dict(state)
    shape = [int(extent) for extent in SHAPES[name].split(",")]
    batch = torch.zeros(2, *shape, dtype=torch.int64 if name in ("text", "words") else torch.float32)
    model.eval()
    program = torch.jit.script(model) if script else torch.jit.trace(model, batch)
    program.save(str(tmp_path / "program.pt"))
    if wrong:
        state[wrong] = state[wrong].transpose(0, 1).contiguous()
    torch.save(state, tmp_path / "state.pt")
    like = ModelSpec(f"pair_models:{name}")
    files = str(tmp_path / "program.pt"), str(tmp_path / "state.pt")
    return verify(*files, like_b=like, input_shapes=(SHAPES[name],), run_code=True)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "script"), [("cnn", True), ("text", False)])
def test_the_modules_of_a_program_are_compared(name: str, script: bool, tmp_path: Path, here: None) -> None:
    comparison = compare_program(tmp_path, name, script=script)
    assert comparison.within
    assert comparison.models.exact
    assert len(comparison.models.layers) >= 5
    assert all(layer.within for layer in comparison.models.layers)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_difference_from_a_program_is_found_in_its_module(tmp_path: Path, here: None) -> None:
    comparison = compare_program(tmp_path, "mlp", script=False, wrong="2.weight")
    assert not comparison.within
    assert (comparison.models.first.a, comparison.models.first.b) == ("2", "2")
    assert comparison.models.first.confirmed


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_a_programs_own_methods_and_shared_modules_are_followed() -> None:
    import torch

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Tanh()])

        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner[0](self.inner[0](x))

        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return self.inner[1](self.twice(x)) * scale

    runner = model_runner.ScriptRunner(torch.jit.script(Shared()))
    recorder = model_runner.CallRecorder()
    with runner.observe(recorder):
        output = runner.call(["x"], [np.ones((2, 3), np.float32)])
    rows = [(call["path"], call["number"]) for call in recorder.calls]
    assert rows == [("inner.0", 0), ("inner.0", 1), ("inner.1", 0), ("(model)", 0)]
    assert recorder.calls[-1]["made"][0]["largest"] == pytest.approx(float(output.abs().max()))


@pytest.mark.torch
def test_a_call_has_the_keywords_that_a_layer_gets() -> None:
    import torch

    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(x) * scale

    class Caller(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, scale=0.5)

    runner, recorder = model_child.wrap_model(Caller()), model_runner.CallRecorder()
    with runner.observe(recorder):
        runner.call(["x"], [np.ones((4, 3), np.float32)])
    inner = next(call for call in recorder.calls if call["path"] == "inner")
    assert inner["options"] == {"scale": 0.5}
    layers = [{**layer, "tensors": []} for layer in runner.layers()]
    (called,) = (layer for layer in causes.called_layers(layers, [inner]) if layer.path == "inner")
    assert called.settings["scale"] == 0.5


@pytest.mark.torch
def test_a_recorded_layer_spans_the_values_that_it_computes() -> None:
    import torch

    runner = model_child.wrap_model(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.GELU()))
    recorder = model_runner.OperationRecorder()
    assert runner.record_operations(recorder, ["x"], [np.ones((4, 3), np.float32)], exact=False) == "torch"
    linear, gelu, model = recorder.recorded
    assert [row["path"] for row in (linear, gelu, model)] == ["0", "1", "(model)"]
    assert (gelu["given"], model["given"], model["made"]) == (linear["made"], linear["given"], gelu["made"])
    results = {number for operation in recorder.operations for number in operation["made"]}
    for row in (linear, gelu, model):
        assert {*row["made"]} <= results & {*range(row["start"], row["end"])}
    assert linear["end"] <= gelu["start"]


@pytest.mark.torch
def test_what_a_layer_returns_and_the_next_receives_is_written_once(tmp_path: Path) -> None:
    import torch

    class WritesToItsInput(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.detach().numpy()[:] = 7.0  # PyTorch does not count this as a change
            return x

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh(), WritesToItsInput())
    runner = model_child.wrap_model(model)
    recorder = model_runner.CallRecorder({(name, 0) for name in "012"}, tmp_path)
    with runner.observe(recorder):
        runner.call(["x"], [np.ones((4, 3), np.float32)])
    linear, tanh, last = recorder.calls
    assert linear["made"][0]["file"] == tanh["given"][0]["file"]
    assert tanh["made"][0]["file"] == last["given"][0]["file"]
    received, returned = (map_array(tmp_path / last[what][0]["file"]) for what in ("given", "made"))
    assert np.all(returned == 7.0)
    assert not np.any(received == 7.0)


def test_large_arrays_stay_in_their_file(tmp_path: Path) -> None:
    for size in (1, 1 << 18):
        np.save(tmp_path / "x.npy", np.arange(size, dtype=np.float32))
        array = map_array(tmp_path / "x.npy")
        assert np.array_equal(array, np.arange(size, dtype=np.float32))
        assert type(array) is np.ndarray
        assert isinstance(array.base, np.memmap) == (size > 1)


@pytest.mark.torch
def test_a_model_saved_for_its_own_parent_has_no_checksums(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    file = model_child.wrap_model(model).save(str(tmp_path / "own"), "torch")
    assert {item.CRC for item in zipfile.ZipFile(file).infolist()} == {0}
    assert torch.equal(torch.load(file)["weight"], model.weight)
    torch.save(model.state_dict(), tmp_path / "other.pt")
    assert zipfile.ZipFile(tmp_path / "other.pt").testzip() is None


def test_keras_is_imported_without_its_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = []

    def imported(name: str) -> str:
        hidden.extend(item for item in ("matplotlib", "cv2") if sys.modules.get(item, "") is None)
        assert not gc.isenabled()
        return name

    for name in ("matplotlib", "cv2"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib, "import_module", imported)
    assert model_runner._import_keras("3.0") == "keras"
    assert hidden == ["matplotlib", "cv2"]
    assert not {"matplotlib", "cv2"} & {*sys.modules}
    assert gc.isenabled()


def tensorflow_comparison(call: str, tmp_path: Path) -> dict[str, Any]:
    """Return what a function of tests/program_sides.py prints."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom tests import program_sides\n"
    status, output = warm.run("tensorflow", f"{program}program_sides.{call}", tmp_path)
    assert status == 0, output
    return dict(json.loads(output.splitlines()[-1]))


@pytest.mark.tensorflow
@pytest.mark.parametrize(("name", "layers"), [("image", 6), pytest.param("text", 5, marks=pytest.mark.slow)])
def test_the_layers_of_a_saved_model_are_compared(name: str, layers: int, tmp_path: Path) -> None:
    report = tensorflow_comparison(f"compare({name!r}, {str(tmp_path)!r})", tmp_path)
    assert report["within"]
    rows = report["models"]["layers"]
    assert len(rows) >= layers
    assert all(row["within"] for row in rows), rows


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    ("name", "wrong"), [pytest.param("image", "conv2", marks=pytest.mark.slow), ("text", "mix")]
)
def test_a_difference_from_a_saved_model_is_found_in_its_layer(name: str, wrong: str, tmp_path: Path) -> None:
    report = tensorflow_comparison(f"compare({name!r}, {str(tmp_path)!r}, {wrong!r})", tmp_path)
    assert not report["within"]
    first = report["models"]["first_difference"]
    assert first["b"] == wrong
    assert wrong in first["a"]
    assert first["confirmed"]


@pytest.mark.tensorflow
def test_a_saved_model_without_names_of_layers_runs_beside_its_module(tmp_path: Path) -> None:
    report = tensorflow_comparison(f"compare_module({str(tmp_path)!r})", tmp_path)
    assert report["within"]


# The bound of an output.


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("runs", ["both", "A", "B", "none"])
@pytest.mark.parametrize("tolerance", [None, 1e-4])
def test_a_wrong_output_fails_whichever_side_has_a_float64_run(
    wrong: bool, runs: str, tolerance: float | None
) -> None:
    right = np.random.default_rng(0).standard_normal((8, 3))
    own = right + (0.01 if wrong else 0.0)
    exact = (right if runs in ("both", "A") else None, own if runs in ("both", "B") else None)
    outputs = right.astype(np.float32), own.astype(np.float32)
    bound = output_comparison.RoundingBound(4.0, 1e-6)
    measured = output_comparison.measure_output("y", outputs, exact, bound, tolerance)
    assert measured.parity.within == (not wrong)


@pytest.mark.parametrize(("moved", "within"), [(None, False), (1e-6, False), (4e-6, True)])
def test_float64_runs_differ_by_what_last_bits_of_the_inputs_change(
    moved: float | None, within: bool
) -> None:
    a = np.linspace(-4, 4, 20).reshape(10, 2)
    sensitivity = None if moved is None else np.full_like(a, moved)
    bound = output_comparison.RoundingBound(4.0, 1e-6)
    output = output_comparison.measure_output("y", (a, a + 7e-6), (a, a + 7e-6), bound, None, sensitivity)
    assert output.parity.within == within


@pytest.mark.parametrize("apart", [2e-6, 1e-3])
@pytest.mark.parametrize(("rate", "within"), [(1.0, True), (0.0, False)])
def test_rounding_costs_an_output_that_grows_with_its_inputs_as_many_last_bits(
    apart: float, rate: float, within: bool
) -> None:
    """An exponential moves in proportion to the inputs' last bits, a threshold at once."""
    a = np.exp(np.linspace(-8, -4, 20)).reshape(10, 2)
    moved = np.full_like(a, 4e-7)
    further = moved * (output_comparison.MANY_BITS if rate else 1)
    smooth = output_comparison.is_smooth(moved, further)
    assert smooth == bool(rate)
    bound = output_comparison.RoundingBound(0.01, 1e-6)
    measured = output_comparison.measure_output(
        "y", (a, a + apart), (a, a), bound, None, moved, smooth=smooth
    )
    assert measured.parity.within == (within and apart < 1e-4)


def test_a_jump_at_a_last_bit_excuses_no_larger_difference() -> None:
    a = np.linspace(-4, 4, 20).reshape(10, 2)
    sensitivity = np.zeros_like(a)
    sensitivity[3] = 1.0
    bound = output_comparison.RoundingBound(4.0, 1e-6)
    outputs = (a, a + 2e-4)
    assert not output_comparison.measure_output("y", outputs, outputs, bound, None, sensitivity).parity.within


@pytest.mark.parametrize(("output", "credible"), [(1.0, True), (1.0 + 1e-6, True), (1.2, False)])
def test_a_float64_run_of_something_else_is_no_reference(output: float, credible: bool) -> None:
    plain = {"y": np.array([1.0, np.inf], np.float32)}
    assert output_comparison.are_close(plain, {"y": np.array([output, np.inf])}) == credible


@pytest.mark.tensorflow
@pytest.mark.skipif(not KERAS_2.is_dir(), reason="Keras 2 is not installed")
@pytest.mark.parametrize(
    ("suffix", "wrong"), [(".h5", ""), pytest.param(".keras", "2", marks=pytest.mark.slow)]
)
def test_models_of_keras_2_run_in_keras_2(suffix: str, wrong: str, tmp_path: Path) -> None:
    report = tensorflow_comparison(f"compare_keras2({str(tmp_path)!r}, {suffix!r}, {wrong!r})", tmp_path)
    assert all("tf_keras" in engine for engine in report["models"]["engines"])
    assert report["models"]["float64"]
    assert len(report["models"]["layers"]) == 5
    assert report["within"] == (not wrong)
    if wrong:
        assert report["models"]["first_difference"]["b"].startswith("dense")
        assert report["models"]["first_difference"]["confirmed"]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "wrong", "node"),
    [("cnn", "", ""), ("cnn", "7.weight", "Gemm"), ("vision", "conv2.weight", "conv2")],
)
def test_an_onnx_file_is_compared_in_float64(
    name: str, wrong: str, node: str, tmp_path: Path, here: None
) -> None:
    pytest.importorskip("onnx")
    import torch

    model, state = getattr(pair_models, name)(), pair_models.torch_state(name)
    torch.save(state, tmp_path / "state.pt")
    if wrong:
        state[wrong] = state[wrong].flip(1)
    model.load_state_dict(state)
    batch = torch.zeros(2, *map(int, SHAPES[name].split(",")))
    how: dict[str, Any] = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
    torch.onnx.export(model.eval(), (batch,), str(tmp_path / "model.onnx"), **how)
    like = ModelSpec(f"pair_models:{name}")
    verification = verify(str(tmp_path / "state.pt"), str(tmp_path / "model.onnx"), like_a=like)
    assert verification.models is not None
    assert verification.models.exact
    assert verification.within == (not wrong)
    if wrong:
        first = verification.models.first
        assert first is not None
        assert first.a == wrong.partition(".")[0]
        assert node in first.b
        assert first.confirmed


# Outputs that cannot be compared, and layers that differ behind equal outputs.

OWN_CODE = """
import dataclasses
import torch
from torch import nn

@dataclasses.dataclass
class Made:
    value: torch.Tensor
    extra: torch.Tensor

class Net(nn.Module):
    def __init__(self, form="tensor", last=1.0):
        super().__init__()
        self.form, self.last = form, last
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 4)

    def forward(self, x):
        y = self.two(x + self.last * self.one(x))
        return {"tensor": y, "flat": y[:, :2], "made": Made(y, y + 1), "none": "nothing"}[self.form]
"""


def compare_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, b: dict[str, Any], **a: Any) -> Any:
    """Compare two models of OWN_CODE; B's first matrix is transposed if `last` is 0."""
    import torch

    (tmp_path / "own_net.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    import own_net  # type: ignore[import-not-found]

    torch.manual_seed(0)
    state = own_net.Net().state_dict()
    torch.save(state, tmp_path / "a.pt")
    if b.get("last") == 0:
        state["one.weight"] = state["one.weight"].T.contiguous()
    torch.save(state, tmp_path / "b.pt")
    likes = {"like_a": ModelSpec("own_net:Net", a), "like_b": ModelSpec("own_net:Net", b)}
    return verify(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), input_shapes=("6",), **likes)


@pytest.mark.torch
def test_an_output_of_another_shape_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    verification = compare_own(tmp_path, monkeypatch, {"form": "flat"})
    assert not verification.within
    assert verification.models.first.confirmed


@pytest.mark.torch
def test_a_model_without_tensors_in_its_result_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    with pytest.raises(UsageError) as refused:
        compare_own(tmp_path, monkeypatch, {"form": "none"}, form="none")
    assert refused.value.file == str(tmp_path / "a.pt")


@pytest.mark.torch
def test_the_fields_of_a_dataclass_are_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    verification = compare_own(tmp_path, monkeypatch, {"form": "made"}, form="made")
    assert verification.within
    assert [network.name for network in verification.networks] == ["value", "extra"]


@pytest.mark.torch
def test_a_layer_that_differs_behind_equal_outputs_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    right = compare_own(tmp_path, monkeypatch, {}, last=1.0)
    verification = compare_own(tmp_path, monkeypatch, {"last": 0.0}, last=0.0)
    assert verification.within
    assert len(verification.notes) == len(right.notes) + 1


def test_between_layers_a_normaliser_is_a_cause() -> None:
    x = np.random.default_rng(0).standard_normal((4, 5, 6))
    assert causes.between_cause((x * np.arange(1, 7) + 2, x), 1e-6) is not None
    assert causes.between_cause((x, x + np.sin(x)), 1e-6) is None
    # Computations between layers are not searched.
    assert causes.between_cause((x - x.mean(1, keepdims=True), x - x.mean(2, keepdims=True)), 1e-6) is None


@pytest.mark.parametrize(
    ("offset", "modulo", "named"),
    [(1, 99, "plus 1:"), (-2, 99, "plus -2:"), (1, 10, "plus 1, modulo 10"), (-3, 10, "plus -3, modulo 10")],
)
def test_indices_of_another_table_are_named_by_the_step_of_most(offset: int, modulo: int, named: str) -> None:
    a = np.arange(4, 10) if modulo == 99 else np.arange(10)
    cause = causes.integer_cause(a, (a + offset) % modulo)
    assert cause is not None
    assert named in cause.text


@pytest.mark.parametrize("users", [1, 2])
def test_a_product_and_its_bias_are_one_layer_unless_the_product_is_used_elsewhere(
    users: int, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Add", ["m", "b"], ["y"])]
    nodes += [helper.make_node("Relu", ["m"], ["z"])] * (users - 1)
    ends = [helper.make_tensor_value_info(name, 1, [None, 2]) for name in "yz"[:users]]
    arrays = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [None, 3])], ends, tensors)
    imports = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), tmp_path / "m.onnx")
    layers = [row["gives"] for row in model_runner.OnnxRunner(str(tmp_path / "m.onnx"))._nodes]
    assert layers == ([["y"]] if users == 1 else [["m"], ["y"], ["z"]])
