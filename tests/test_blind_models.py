"""Faults behind outputs that a careless comparison takes for equal: none of them passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.commands.verify import Verification, verify
from ckpttool.core import CkpttoolError, UsageError
from ckpttool.networks import ModelSpec
from ckpttool.networks.messages import Requests
from ckpttool.networks.model_child import last_error_line
from ckpttool.verification import causes, two_models
from ckpttool.verification.inputs import InputPair, draw_inputs, further_inputs
from ckpttool.verification.output_comparison import RoundingBound, measure_output, pair_outputs
from ckpttool.verification.sides import ModelSide
from tests.conftest import ROOT
from tests.test_verify_models import here

__all__ = ["here"]  # the fixture

# Whether the fault is in no output at all: then the comparison is refused.
CASES = {
    "Masked": False,
    "Infinite": False,
    "Saturated": False,
    "Scaled": False,
    "Branched": False,
    "Complex": False,
    "Large": False,
    "Dead": True,
    "Undefined": True,
    "Excluded": False,
    "Table": False,
    "Words": False,
    "Steps": False,
    "Padded": False,
    "Clipped": False,
    "Twice": False,
    "Fixed": False,
    "Attended": False,
}


@pytest.fixture(autouse=True)
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests"))


def compare(name: str, folder: Path, *, wrong: bool, **options: Any) -> Verification:
    import torch

    from tests import blind_models

    torch.manual_seed(0)
    cls = getattr(blind_models, name)
    torch.save(cls().state_dict(), folder / "net.pt")
    likes = [ModelSpec(f"blind_models:{name}", arguments) for arguments in ({}, {"wrong": wrong})]
    file = str(folder / "net.pt")
    return verify(file, file, like_a=likes[0], like_b=likes[1], input_shapes=cls.SHAPES, **options)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_a_fault_that_outputs_hide_does_not_pass(name: str, tmp_path: Path, here: None) -> None:
    if CASES[name]:
        with pytest.raises(UsageError) as refused:
            compare(name, tmp_path, wrong=True)
        assert "--inputs" in (refused.value.hint or "")
    else:
        assert not compare(name, tmp_path, wrong=True).within


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name, blind in CASES.items() if not blind])
def test_the_same_models_without_the_fault_pass(name: str, tmp_path: Path, here: None) -> None:
    assert compare(name, tmp_path, wrong=False).within


def first_of(name: str, folder: Path, a: dict[str, Any], b: dict[str, Any]) -> causes.Divergence | None:
    import torch

    from tests import blind_models

    torch.manual_seed(0)
    cls = getattr(blind_models, name)
    torch.save(cls(**a).state_dict(), folder / "net.pt")
    likes = [ModelSpec(f"blind_models:{name}", arguments) for arguments in (a, b)]
    file = str(folder / "net.pt")
    verification = verify(file, file, like_a=likes[0], like_b=likes[1], input_shapes=cls.SHAPES)
    assert verification.models is not None
    assert verification.within == (verification.models.first is None)
    return verification.models.first


@pytest.mark.torch
def test_a_class_named_after_a_layer_is_compared_by_its_layers(tmp_path: Path, here: None) -> None:
    divergence = first_of("GRUReader", tmp_path, {}, {"wrong": True})
    assert divergence is not None
    assert (divergence.after, divergence.b, divergence.confirmed) == ("mix", "out", True)


@pytest.mark.torch
def test_calls_of_one_layer_are_paired_by_their_inputs(tmp_path: Path, here: None) -> None:
    assert first_of("Twins", tmp_path, {}, {"reverse": True}) is None
    first = first_of("Twins", tmp_path, {}, {"reverse": True, "wrong": True})
    assert first is not None
    assert first.b == "out"
    assert first.cause == "A computes abs(encode - encode#2), B computes (encode - encode#2) ** 2"


@pytest.mark.torch
def test_operations_that_use_a_value_twice_are_followed_once(tmp_path: Path, here: None) -> None:
    first = first_of("Gated", tmp_path, {}, {"wrong": True})
    assert first is not None
    assert (first.b, first.confirmed) == ("out", True)
    assert first.cause is not None
    assert "sin(" in first.cause
    assert "tanh(" in first.cause


@pytest.mark.torch
def test_exchanged_layers_are_no_other_operation(tmp_path: Path, here: None) -> None:
    divergence = first_of("Exchanged", tmp_path, {}, {"wrong": True})
    assert divergence is not None
    assert {divergence.a, divergence.b} <= {"first", "second"}
    assert divergence.fix is None


@pytest.mark.torch
@pytest.mark.parametrize("a", [False, True])
def test_padding_before_a_layer_is_that_of_the_layer(a: bool, tmp_path: Path, here: None) -> None:
    assert first_of("Bordered", tmp_path, {"outside": a}, {"outside": not a}) is None
    divergence = first_of("Bordered", tmp_path, {"outside": a}, {"outside": not a, "wrong": True})
    assert divergence is not None
    assert divergence.b == "out"
    divergence = first_of("Bordered", tmp_path, {"outside": a, "width": 1}, {"width": 0})
    assert divergence is not None
    assert (divergence.b, divergence.where, divergence.confirmed) == ("conv", "layer", True)


def test_the_order_of_axes_is_that_with_which_the_models_can_be_called() -> None:
    class Side:
        """What a process answers if its model accepts steps before channels only."""

        def __init__(self, word: str, inputs: list[Any]) -> None:
            self.side = ModelSide(word, "file", ModelSpec("module:factory"))
            self.names: list[str] = []
            self.dtypes: dict[str, str] = {}
            self.opened, self.inputs = 0, inputs
            self.row = {"inputs": inputs, "channels": "last" if inputs else "first", "notes": []}
            self.ask = Requests(self.request)

        def begin(self, do: str, **values: Any) -> None:
            """Do nothing: `open` answers."""

        def open(self, *_: Any, **__: Any) -> dict[str, Any]:
            self.opened += 1
            return self.row

        def request(self, _: str, **values: Any) -> dict[str, Any]:
            if [row["shape"] for row in values["inputs"]] != [[20, 4]]:
                raise UsageError("the model cannot be called")
            return {"dtypes": ["float32"], "below": [None], "notes": [], "size": 1}

        def give(self, arrays: Any) -> None:
            self.shape = arrays[0].shape[1:]

    row = {"name": "x", "shape": [20, 4], "dtype": "float32", "batch": None}
    sides: Any = (Side("A", [row]), Side("B", []))
    options = two_models.ModelComparisonOptions()
    session = two_models.ComparedModels(sides, ("factory", "factory"))
    two_models._prepare(session, [shape.row for shape in sides], options)
    assert sides[1].shape == (20, 4)
    assert sides[1].opened == 1  # the failed call may have created variables
    assert len(session.assumed) == 1
    session = two_models.ComparedModels(sides, ("factory", "factory"))
    with pytest.raises(UsageError):
        two_models._prepare(session, [shape.row for shape in sides], replace(options, transpose=True))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo", "two"),
        (
            "Exception encountered when calling A.call().\n\n\x1b[1mno such operation\x1b[0m\n\n"
            "Arguments received by A.call():\n  • kwargs=<class 'inspect._empty'>",
            "no such operation",
        ),
        ("Arguments received by a program", "Arguments received by a program"),
    ],
)
def test_an_error_of_keras_is_its_reason_not_its_arguments(text: str, line: str) -> None:
    assert last_error_line(ValueError(text)) == f"ValueError: {line}"


@pytest.mark.torch
def test_outputs_that_change_from_call_to_call_do_not_pass(tmp_path: Path, here: None) -> None:
    verification = compare("Random", tmp_path, wrong=False)
    assert not verification.within
    assert verification.models is not None
    assert verification.models.first is not None
    assert verification.models.first.confirmed


@pytest.mark.torch
def test_the_hint_for_outputs_that_show_nothing_works(tmp_path: Path, here: None) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(0, 1e5, (8, 6)).astype(np.float32))
    assert compare("Dead", tmp_path, wrong=False, inputs=str(tmp_path / "data.npz")).within
    assert not compare("Dead", tmp_path, wrong=True, inputs=str(tmp_path / "data.npz")).within


BOUND = RoundingBound(1e9, 1e-6)


def measured(a: Any, b: Any, exact: tuple[Any, Any] = (None, None)) -> bool:
    return measure_output("y", (np.asarray(a), np.asarray(b)), exact, BOUND, None).parity.within


def test_infinite_numbers_have_the_same_places_and_the_others_may_differ_by_rounding() -> None:
    a = np.array([[1.0, -np.inf, 2.0]], np.float32)
    assert measured(a, a * np.float32(1 + 1e-7))
    assert not measured(a, np.array([[1.0, -np.inf, 2.1]], np.float32))
    assert not measured(a, np.array([[1.0, np.inf, 2.0]], np.float32))
    assert not measured(a, np.array([[1.0, -1e30, 2.0]], np.float32))
    assert not measured(a, np.array([[1.0, np.nan, 2.0]], np.float32))


def test_integers_are_equal_and_floats_are_judged_by_feature() -> None:
    assert not measured([100_000_001], [100_000_002])
    wide = np.array([[1e6, 1.0], [-1e6, -1.0]], np.float32)
    assert measured(wide, wide)
    assert not measured(wide, wide * np.array([1, -1], np.float32))
    # What is left of two equal sums is rounding.
    residue = np.array([[1.0, 0.0], [2.0, 6e-8]], np.float32)
    assert measured(residue, np.array([[1.0, 6e-8], [2.0, 0.0]], np.float32))


@pytest.mark.parametrize(
    ("a", "b", "pairs", "missing"),
    [
        (("logits", "value"), ("value", "logits", "hidden"), ["logits", "value"], []),
        (("value", "logits"), ("logits",), ["logits"], ["value"]),
        (("0", "1"), ("policy", "value"), ["policy", "value"], []),
    ],
)
def test_outputs_are_paired_by_name_if_they_can(
    a: tuple[str, ...], b: tuple[str, ...], pairs: list[str], missing: list[str]
) -> None:
    one, other = ({name: np.ones((2, 3)) for name in names} for names in (a, b))
    assumed: list[str] = []
    pairs_found, left = pair_outputs(one, other, set(), ("", ""), assumed)
    assert ([pair.b for pair in pairs_found], left) == (pairs, missing)
    assert bool(assumed) == (a[0] == "0")


@pytest.mark.parametrize(
    ("dtype", "below", "name", "lowest", "highest"),
    [
        ("int64", 30000, "ids", 0, 29999),
        ("uint8", None, "image", 0, 250),
        ("int32", None, "step", 0, 900),
        ("int64", 30000, "attention_mask", 0, 1),
        ("float32", None, "attention_mask", 0, 1),
        ("bool", None, "done", 0, 1),
    ],
)
def test_integers_cover_their_range(
    dtype: str, below: int | None, name: str, lowest: int, highest: int
) -> None:
    pair = InputPair(name, name, (12,), (12,), dtype, below=below)
    drawn = draw_inputs([pair], None)[0]
    assert drawn.dtype == dtype
    assert drawn.min() == lowest
    assert drawn.max() >= highest
    assert below is None or drawn.max() < below
    if "mask" in name:
        assert set(np.unique(drawn)) == {0, 1}
        assert all((arrays[0] <= 1).all() for _, arrays in further_inputs([pair], None, [drawn]))
    if name == "ids":
        assert (drawn[::2, -3:] == 0).all()


def test_a_short_float_on_one_side_rounds_the_inputs_of_both() -> None:
    pair = InputPair("x", "x", (3,), (3,))
    for kinds in (("float32", "float16"), ("float16", "float32")):
        a, b = ((kind, None) for kind in kinds)
        assert two_models._with_dtype(pair, a, b).dtype == "float16"


# Graphs of ONNX: inputs of other types, a fixed batch, several outputs, random operations.


def onnx_file(folder: Path, name: str, nodes: list[Any], dtype: int, shape: list[Any], **values: Any) -> str:
    import onnx
    from onnx import helper, numpy_helper

    outputs = values.pop("outputs")
    initializers = [numpy_helper.from_array(np.asarray(value), key) for key, value in values.items()]
    inputs = [helper.make_tensor_value_info("x", dtype, shape)]
    results = [helper.make_tensor_value_info(key, kind, None) for key, kind in outputs.items()]
    graph = helper.make_graph(
        [helper.make_node(*node[:3], **node[3]) for node in nodes], "g", inputs, results, initializers
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / name)
    return str(folder / name)


FLOAT, UINT8, UINT16 = 1, 2, 4


def two_heads(folder: Path, name: str, *, factor: float = 1.0, batch: Any = "n", extra: bool = True) -> str:
    drawn = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
    nodes = [
        ("MatMul", ["x", "w"], ["mean"], {}),
        ("MatMul", ["x", "v"], ["raw"], {}),
        ("Mul", ["raw", "k"], ["value"], {}),
    ]
    outputs = {"mean": FLOAT, **({"value": FLOAT} if extra else {})}
    values = {"w": drawn[0], "v": drawn[1], "k": np.float32(factor)}
    return onnx_file(folder, name, nodes, FLOAT, [batch, 6], outputs=outputs, **values)


@pytest.mark.torch
def test_an_output_beside_the_policy_is_compared(tmp_path: Path, here: None) -> None:
    pytest.importorskip("onnx")
    a = two_heads(tmp_path, "a.onnx")
    assert verify(a, two_heads(tmp_path, "b.onnx")).within
    verification = verify(a, two_heads(tmp_path, "b.onnx", factor=1.01))
    assert [network.name for network in verification.networks if not network.within] == ["value"]
    assert not verify(a, two_heads(tmp_path, "b.onnx", extra=False)).within


def pixels(folder: Path, name: str, dtype: int, *, most: float) -> str:
    drawn = np.random.default_rng(0).standard_normal((12, 2)).astype(np.float32)
    nodes = [
        ("Cast", ["x"], ["f"], {"to": FLOAT}),
        ("Div", ["f", "range"], ["unit"], {}),
        ("Min", ["unit", "most"], ["low"], {}),
        ("ReduceMax", ["low"], ["top"], {"axes": [1]}),
        ("MatMul", ["low", "w"], ["a"], {}),
        ("Add", ["a", "top"], ["y"], {}),
    ]
    values = {"range": np.float32(255), "most": np.float32(most), "w": drawn}
    return onnx_file(folder, name, nodes, dtype, ["n", 12], outputs={"y": FLOAT}, **values)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", [UINT8, UINT16])
def test_pixels_cover_their_range(dtype: int, tmp_path: Path, here: None) -> None:
    pytest.importorskip("onnx")
    files = [pixels(tmp_path, f"{most}.onnx", dtype, most=most) for most in (2000.0, 0.5)]
    assert verify(files[0], files[0]).within
    assert not verify(*files).within


def relu_net(folder: Path, name: str, dtype: type, *, wrong: bool) -> str:
    drawn = np.random.default_rng(0).standard_normal((2, 6, 6)).astype(dtype)
    if wrong:
        drawn[1, 2] += 1
    nodes = [("MatMul", ["x", "w"], ["a"], {}), ("Relu", ["a"], ["b"], {}), ("MatMul", ["b", "v"], ["y"], {})]
    kind = {np.float16: 10, np.float32: FLOAT}[dtype]
    return onnx_file(folder, name, nodes, kind, [1, 6], outputs={"y": kind}, w=drawn[0], v=drawn[1])


@pytest.mark.torch
def test_a_fixed_batch_of_one_does_not_hide_the_units_that_its_row_leaves_at_zero(
    tmp_path: Path, here: None
) -> None:
    pytest.importorskip("onnx")
    a, same, wrong = (relu_net(tmp_path, f"{n}.onnx", np.float16, wrong=n == 2) for n in range(3))
    assert verify(a, same).within
    assert not verify(a, wrong).within


@pytest.mark.torch
def test_random_operations_and_inputs_without_a_batch_do_not_pass(tmp_path: Path, here: None) -> None:
    pytest.importorskip("onnx")
    noise = [("RandomNormalLike", ["x"], ["r"], {"seed": 1.0}), ("Add", ["x", "r"], ["y"], {})]
    file = onnx_file(tmp_path, "noise.onnx", noise, FLOAT, ["n", 6], outputs={"y": FLOAT})
    assert not verify(file, file).within
    scalar = onnx_file(tmp_path, "scalar.onnx", [("Neg", ["x"], ["y"], {})], FLOAT, [], outputs={"y": FLOAT})
    with pytest.raises(CkpttoolError) as refused:
        verify(scalar, scalar)
    assert refused.value.path == "x"
