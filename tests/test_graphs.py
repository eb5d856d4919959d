"""Graphs: ONNX's own tests of operators, older versions, functions, opaque nodes, shapes and limits."""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.conversion.graph_code import GraphPlan, Method, write_graph_code
from ckpttool.core import (
    FormatError,
    LimitError,
    Limits,
    Tree,
    UnsupportedError,
    UsageError,
    framework_order,
    using,
)
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats.tf_functions import FunctionNode, GraphFunction
from ckpttool.graphs import (
    Graph,
    OperatorNode,
    Value,
    evaluate,
    infer_shapes,
    list_operators,
    read_graph,
    tensorflow,
    torchscript,
)
from ckpttool.graphs.builder import GraphBuilder
from ckpttool.graphs.graph import OPSET, inline_integers
from ckpttool.graphs.keras import read_document
from ckpttool.graphs.operators import (
    OperatorNames,
    broadcast_shapes,
    compute_node,
    operator,
    spelled_operators,
)
from ckpttool.graphs.shapes import ShapeTracer, trace_graph
from ckpttool.graphs.torchscript import apply_operation
from ckpttool.graphs.torchscript_translator import ScriptTranslator
from ckpttool.graphs.weights import find_roles, number_calls
from ckpttool.libraries.activation_orders import trace_graph_orders
from ckpttool.libraries.graph_programs import lower_policy
from ckpttool.networks import onnx_export
from tests.conftest import ROOT

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
N = onnx.helper.make_node
RANDOM = np.random.default_rng(0)
PAGE = ROOT / "docs" / "formats" / "onnx.md"


def f(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def load(model: Any, path: Path) -> Graph:
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    graph = read_graph(ckpttool.open(str(path)))
    assert graph is not None
    return graph


def make_model(
    nodes: Sequence[Any],
    inputs: dict[str, np.ndarray],
    constants: dict[str, Any] | None = None,
    opset: int = 18,
    outputs: Sequence[str] = ("y",),
    **more: Any,
) -> Any:
    helper = onnx.helper
    tensors = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    infos = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", values, infos, tensors)
    imports = [helper.make_opsetid("", opset), *more.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=8, **more)


def run_onnxruntime(path: Path, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, inputs)]


def assert_same_numbers(
    actual: np.ndarray, expected: np.ndarray, rtol: float = 1e-3, atol: float = 1e-7
) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    if expected.dtype.kind in "fcV":
        # The last bit of a half or smaller number depends on the order of rounding.
        rtol = max(rtol, {2: 2e-3, 1: 0.0}.get(expected.dtype.itemsize, 0))
        rtol = 1.6e-2 if expected.dtype.name == "bfloat16" else rtol
        wide = np.complex128 if expected.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(actual.astype(wide), expected.astype(wide), rtol, atol)
    else:
        np.testing.assert_array_equal(actual, expected)


def test_keys_behind_a_short_mask_are_hidden(tmp_path: Path) -> None:
    """Attention of version 23: what the mask does not reach is masked, as if those keys were absent."""
    for mask in (f(4, 3), RANDOM.random((4, 3)) < 0.8):
        inputs = {"q": f(1, 2, 4, 6), "k": f(1, 2, 5, 6), "v": f(1, 2, 5, 6)}
        node = onnx.helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])
        results = []
        for arrays in (inputs, {**inputs, "k": inputs["k"][:, :, :3], "v": inputs["v"][:, :, :3]}):
            graph = load(make_model([node], arrays, {"mask": mask}, opset=23), tmp_path / "m.onnx")
            results.append(evaluate(graph, arrays)["y"])
        assert_same_numbers(*results)


# ONNX's own tests of every operator.


def collect_node_tests(skip: Callable[[str], bool]) -> Iterator[Any]:
    """Yield ONNX's tests of operators, without the exports whose names are skipped."""
    from onnx.backend.test.case import base

    def create(cls: Any, name: str, bases: tuple[Any, ...], members: dict[str, Any]) -> None:
        for member in members:
            if member.startswith("export") and not skip(member):
                np.random.seed(seed=0)
                getattr(cls, member)()

    # The tests are created by importing their modules.
    for name in [name for name in sys.modules if name.startswith("onnx.backend.test.case.node")]:
        del sys.modules[name]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(base._Exporter, "__init__", create)
        yield from importlib.import_module("onnx.backend.test.case.node").collect_testcases(None)


def to_array(value: Any) -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def has_tensors_only(case: Any) -> bool:
    return all(
        value.type.HasField("tensor_type") and value.type.tensor_type.elem_type != onnx.TensorProto.STRING
        for value in (*case.model.graph.input, *case.model.graph.output)
    )


def check_shapes(graph: Graph, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    """Compare the shapes that the table's rules give; the inputs after the first one are known."""
    tracer = ShapeTracer(graph, {name: array.shape for name, array in inputs.items()})
    tracer.known.update(list(inputs.items())[1:])
    for node in graph.nodes:
        tracer.add(node)
    for name, array in outputs.items():
        assert tracer.shape(name) in (None, array.shape), name


def run_node_tests(cases: Iterator[Any], folder: Path) -> tuple[int, Counter[str], dict[str, str]]:
    """Return the number of tests that pass, the reasons of those left out, and the failures."""
    passed, left, failures = 0, Counter[str](), dict[str, str]()
    for case in cases:
        if not has_tensors_only(case):
            left["values that are no tensors of numbers"] += 1
            continue
        ((input_protos, output_protos),) = case.data_sets
        try:
            graph = load(case.model, folder / "model.onnx")
            names = [value.name for value in graph.inputs]
            inputs = dict(zip(names, map(to_array, input_protos), strict=True))
            results = evaluate(graph, inputs)
            for array, expected in zip(results.values(), map(to_array, output_protos), strict=True):
                assert_same_numbers(array, expected, case.rtol)
            check_shapes(graph, inputs, results)
        except UnsupportedError as error:
            left[error.found or "FLOAT4E2M1"] += 1
        except Exception as error:  # noqa: BLE001  # all failures are listed together
            failures[case.name] = f"{type(error).__name__}: {error}"
        else:
            passed += 1
    return passed, left, failures


def left_out_by_page() -> set[str]:
    """Return the names in the page's table of operators that are left out."""
    section = PAGE.read_text().partition("## Operators")[2].partition("\n## ")[0]
    return {
        name
        for row in re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", row)
    }


def test_the_table_passes_onnx_tests_of_its_operators(tmp_path: Path) -> None:
    # Without the pooling of three axes, whose expected values take a reference evaluator 8 s.
    cases = collect_node_tests(lambda name: "pool_3d" in name)
    plain = (case for case in cases if "_expanded" not in case.name)
    passed, left, failures = run_node_tests(plain, tmp_path)
    assert failures == {}
    assert passed > 1200
    assert set(left) - {"values that are no tensors of numbers"} <= left_out_by_page()


@pytest.mark.slow
def test_the_page_states_how_many_onnx_tests_pass(tmp_path: Path) -> None:
    passed, left, failures = run_node_tests(collect_node_tests(lambda _: False), tmp_path)
    assert failures == {}
    total = passed + left.total()
    assert f"{passed:,} of the {total:,} node tests" in " ".join(PAGE.read_text().split())


def test_the_page_states_the_operators_of_the_table() -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"{len(list_operators())} operators" in text
    assert f"operator set {OPSET}" in text
    names = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    deprecated = {"Scatter", "Upsample"}
    control = {"Constant", "If", "Loop", "Scan"}
    assert names - set(list_operators()) - deprecated - control == {
        name for name in left_out_by_page() if name in names and name not in list_operators()
    }


# Older versions of operators, against onnxruntime.

X, IMAGE = f(2, 3, 4), f(1, 2, 4, 4)
OLD: dict[str, tuple[int, list[Any], dict[str, Any]]] = {
    "softmax of a matrix": (11, [N("Softmax", ["x"], ["y"], axis=1)], {}),
    "softmax by default": (12, [N("LogSoftmax", ["x"], ["y"])], {}),
    "hardmax": (11, [N("Hardmax", ["x"], ["y"])], {}),
    "softmax last": (11, [N("Softmax", ["x"], ["y"], axis=-1)], {}),
    "clip": (10, [N("Clip", ["x"], ["y"], min=-0.5, max=0.25)], {}),
    "clip below": (7, [N("Clip", ["x"], ["y"], min=-0.5)], {}),
    "pad": (10, [N("Pad", ["x"], ["y"], pads=[0, 1, 0, 0, 0, 2], value=1.5)], {}),
    "pad reflected": (10, [N("Pad", ["x"], ["y"], pads=[0, 1, 0, 0, 0, 2], mode="reflect")], {}),
    "slice": (9, [N("Slice", ["x"], ["y"], starts=[1], ends=[-1], axes=[2])], {}),
    "squeeze": (11, [N("Unsqueeze", ["x"], ["z"], axes=[0]), N("Squeeze", ["z"], ["y"], axes=[0])], {}),
    "sum": (11, [N("ReduceSum", ["x"], ["y"], axes=[1], keepdims=0)], {}),
    "mean": (17, [N("ReduceMean", ["x"], ["y"], axes=[-1])], {}),
    "maximum": (11, [N("ReduceMax", ["x"], ["y"])], {}),
    "dropout": (10, [N("Dropout", ["x"], ["y"], ratio=0.7)], {}),
    "split": (11, [N("Split", ["x"], ["y", "z"], axis=2, split=[1, 3])], {}),
    "top": (9, [N("TopK", ["x"], ["y", "z"], axis=-1, k=2)], {}),
    "upsample": (9, [N("Upsample", ["i", "s"], ["y"], mode="nearest")], {"s": np.float32([1, 1, 2, 1.5])}),
    "upsample by attribute": (7, [N("Upsample", ["i"], ["y"], scales=[1.0, 1.0, 2.0, 2.0])], {}),
    "resize": (10, [N("Resize", ["i", "s"], ["y"], mode="linear")], {"s": np.float32([1, 1, 1.5, 2])}),
    "resize 11": (
        11,
        [N("Resize", ["i", "r", "s"], ["y"], mode="cubic", coordinate_transformation_mode="half_pixel")],
        {"r": np.zeros(0, np.float32), "s": np.float32([1, 1, 1.5, 2])},
    ),
    "batch norm": (
        9,
        [N("BatchNormalization", ["i", "a", "b", "m", "v"], ["y"], epsilon=0.1)],
        {"a": f(2), "b": f(2), "m": f(2), "v": np.abs(f(2))},
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_older_versions_compute_what_onnxruntime_does(name: str, tmp_path: Path) -> None:
    opset, nodes, constants = OLD[name]
    used = {name for node in nodes for name in node.input}
    inputs = {key: value for key, value in {"x": X, "i": IMAGE}.items() if key in used}
    model = make_model(nodes, inputs, constants, opset)
    graph = load(model, tmp_path / "m.onnx")
    (expected,) = run_onnxruntime(tmp_path / "m.onnx", inputs)
    output = evaluate(graph, inputs)["y"]
    assert_same_numbers(output, expected, 1e-5, 1e-6)
    assert infer_shapes(graph)["y"] in (None, output.shape)


@pytest.mark.parametrize(
    ("node", "opset", "name"),
    [
        (N("Add", ["x", "x"], ["y"], broadcast=1, axis=0), 6, "Add-6"),
        (N("Dropout", ["x"], ["y"], is_test=0), 6, "Dropout-6"),
        (N("PRelu", ["x", "x"], ["y"]), 6, "PRelu-6"),
        (N("Softmax", ["x"], ["y"]), OPSET + 1, f"Softmax-{OPSET + 1}"),
        (N("Relu", ["x"], ["y"], slope=0.5), 18, "Relu-18"),
        (N("FusedConv", ["x"], ["y"], domain="com.microsoft"), 18, "com.microsoft.FusedConv"),
        (N("Bernoulli", ["x"], ["y"]), 18, "Bernoulli"),
    ],
)
def test_nodes_without_a_row_are_listed_and_refused_by_name(
    node: Any, opset: int, name: str, tmp_path: Path
) -> None:
    graph = load(make_model([node, N("Neg", ["y"], ["z"])], {"x": X}, opset=opset), tmp_path / "m.onnx")
    assert graph.nodes[0].op == name
    assert infer_shapes(graph)["y"] is None
    with pytest.raises(UnsupportedError) as refused:
        evaluate(graph, {"x": X})
    assert refused.value.found == name


# Functions, branches, constants.


def test_functions_are_inlined_with_their_attributes_and_versions(tmp_path: Path) -> None:
    helper = onnx.helper
    leaky = N("LeakyRelu", ["a"], ["b"])
    kind = onnx.AttributeProto.FLOAT
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=kind))
    inner = helper.make_function(
        "own", "Leak", ["a"], ["b"], [leaky], [helper.make_opsetid("", 18)], attributes=["slope"]
    )
    outer = helper.make_function(
        *("own", "Layer", ["x", "w"], ["y"]),
        [
            N("Constant", [], ["two"], value=onnx.numpy_helper.from_array(np.float32(2))),
            N("MatMul", ["x", "w"], ["h"]),
            N("Leak", ["h"], ["k"], domain="own", slope=0.25),
            N("Mul", ["k", "two"], ["y"]),
        ],
        [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)],
    )
    nodes = [
        N("Layer", ["x", "w"], ["h"], domain="own", name="/actor/actor.0/Layer"),
        N("Layer", ["h", "v"], ["y"], domain="own", name="/actor/actor.1/Layer"),
    ]
    model = make_model(
        nodes,
        {"x": f(2, 3)},
        {"w": f(3, 4), "v": f(4, 2)},
        functions=[inner, outer],
        imports=[helper.make_opsetid("own", 1)],
    )
    graph = load(model, tmp_path / "m.onnx")
    inputs = {"x": f(2, 3)}
    assert_same_numbers(evaluate(graph, inputs)["y"], run_onnxruntime(tmp_path / "m.onnx", inputs)[0], 1e-5)
    assert [node.op for node in graph.nodes] == ["MatMul", "LeakyRelu", "Mul"] * 2
    assert [node.scope for node in graph.nodes] == [("actor", "0")] * 3 + [("actor", "1")] * 3
    # Constants of a function are leaves of the tree, too.
    tree = ckpttool.open(str(tmp_path / "m.onnx")).tree
    assert all(constant.path in tree for constant in graph.constants.values() if constant.path is not None)
    assert len([constant for constant in graph.constants.values() if constant.path is not None]) == 4


def test_a_function_that_calls_itself_is_refused(tmp_path: Path) -> None:
    helper = onnx.helper
    own = helper.make_opsetid("own", 1)
    function = helper.make_function(
        "own", "F", ["a"], ["b"], [N("F", ["a"], ["b"], domain="own")], [helper.make_opsetid("", 18), own]
    )
    model = make_model([N("F", ["x"], ["y"], domain="own")], {"x": X}, functions=[function], imports=[own])
    with pytest.raises(UnsupportedError):
        load(model, tmp_path / "m.onnx")


def test_names_with_two_meanings_are_refused(tmp_path: Path) -> None:
    nodes = [N("Neg", ["x"], ["y/shape"]), N("Softmax", ["y/shape"], ["y"], axis=1)]
    with pytest.raises(FormatError):
        load(make_model(nodes, {"x": X}, opset=11), tmp_path / "m.onnx")


@pytest.mark.parametrize("flag", [True, False])
def test_branches_use_values_around_them(flag: bool, tmp_path: Path) -> None:
    helper = onnx.helper
    value = helper.make_tensor_value_info("out", 1, None)
    weight = onnx.numpy_helper.from_array(f(2, 3, 4), "w")
    one = helper.make_graph([N("Mul", ["h", "w"], ["out"])], "one", [], [value], [weight])
    two = helper.make_graph([N("Neg", ["h"], ["out"])], "two", [], [value])
    nodes = [
        N("Relu", ["x"], ["h"]),
        N("If", ["c"], ["y"], name="branch", then_branch=one, else_branch=two),
    ]
    inputs = {"x": X, "c": np.asarray(flag)}
    graph = load(make_model(nodes, inputs), tmp_path / "m.onnx")
    assert_same_numbers(evaluate(graph, inputs)["y"], run_onnxruntime(tmp_path / "m.onnx", inputs)[0], 1e-6)


def test_constants_stay_unread_until_they_are_used(tmp_path: Path) -> None:
    nodes = [N("MatMul", ["x", "w"], ["y"]), N("Shape", ["big"], ["s"])]
    path = tmp_path / "m.onnx"
    graph = load(make_model(nodes, {"x": f(2, 3)}, {"w": f(3, 4), "big": f(100, 100)}), path)
    path.write_bytes(path.read_bytes())
    # The file was replaced: every read of a tensor is an error from now on.
    assert infer_shapes(graph)["y"] == (2, 4)
    assert infer_shapes(graph)["s"] == (2,)
    with pytest.raises(ckpttool.CkpttoolError):
        evaluate(graph, {"x": f(2, 3)})


def test_wrong_inputs_are_named(tmp_path: Path) -> None:
    graph = load(
        make_model([N("MatMul", ["x", "w"], ["y"])], {"x": f(2, 3)}, {"w": f(3, 4)}), tmp_path / "m.onnx"
    )
    with pytest.raises(UsageError) as refused:
        evaluate(graph, {"z": X})
    assert (refused.value.expected, refused.value.found) == ("x", "z")
    with pytest.raises(FormatError) as unfit:
        evaluate(graph, {"x": f(2, 5)})
    assert unfit.value.found == "float32[2, 5], float32[3, 4]"


@pytest.mark.parametrize("attributes", [{"kernel_shape": [2, 2]}, {"pads": [0] * 6}])
@pytest.mark.parametrize("op", ["Conv", "ConvInteger", "QLinearConv"])
def test_windows_that_do_not_fit_their_weight_are_refused(
    op: str, attributes: dict[str, list[int]], tmp_path: Path
) -> None:
    kind = np.float32 if op == "Conv" else np.uint8
    constants = {
        "x": np.ones((1, 1, 4, 4), kind),
        "w": np.ones((1, 1, 3, 3), kind),
        "s": np.float32(1),
        "z": np.uint8(0),
    }
    names = ["x", "s", "z", "w", "s", "z", "s", "z"] if op == "QLinearConv" else ["x", "w"]
    for settings in ({}, attributes):
        graph = load(make_model([N(op, names, ["y"], **settings)], {}, constants), tmp_path / "m.onnx")
        if settings:
            with pytest.raises(FormatError):
                evaluate(graph, {})
        else:
            assert evaluate(graph, {})["y"].reshape(4).tolist() == [9] * 4


# Shapes and sizes.


def test_open_extents_keep_their_names(tmp_path: Path) -> None:
    nodes = [
        N("Shape", ["x"], ["s"]),
        N("Gather", ["s", "zero"], ["n"]),
        N("Unsqueeze", ["n", "zeros"], ["ns"]),
        N("Concat", ["ns", "minus"], ["to"], axis=0),
        N("Reshape", ["x", "to"], ["flat"]),
        N("Gemm", ["flat", "w"], ["g"]),
        N("Concat", ["g", "g"], ["both"], axis=0),
        N("Conv", ["x", "k"], ["c"]),
        N("Sum", ["g", "b"], ["y"]),
    ]
    constants = {
        "zero": np.int64(0),
        "zeros": np.int64([0]),
        "minus": np.int64([-1]),
        "w": f(2 * 5 * 5, 3),
        "k": f(4, 2, 3, 3),
        "b": f(3),
    }
    model = make_model(nodes, {"x": f(1, 2, 5, 5)}, constants)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    shapes = infer_shapes(load(model, tmp_path / "m.onnx"))
    assert shapes["flat"] == ("batch", 50)
    assert shapes["y"] == ("batch", 3)
    assert shapes["both"] == ("", 3)
    assert shapes["c"] == ("batch", 4, 3, 3)
    wide = infer_shapes(load(model, tmp_path / "m.onnx"), {"x": (7, 2, 5, "w")})
    assert wide["c"] == (7, 4, 3, "")


HUGE = np.int64([1 << 20, 1 << 20])
MANY = [f"t{n}" for n in range(12)]
HOSTILE: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "expand": ([N("Expand", ["one", "huge"], ["y"])], {"one": f(1)}),
    "fill": ([N("ConstantOfShape", ["huge"], ["y"])], {}),
    "tile": ([N("Tile", ["m", "huge"], ["y"])], {"m": f(1, 1)}),
    "pad": ([N("Pad", ["m", "p"], ["y"])], {"m": f(1, 1), "p": np.int64([1 << 40, 0, 0, 0])}),
    "range": (
        [N("Range", ["a", "b", "c"], ["y"])],
        {"a": np.int64(0), "b": np.int64(1 << 40), "c": np.int64(1)},
    ),
    "one hot": (
        [N("OneHot", ["i", "d", "v"], ["y"])],
        {"i": np.int64([1]), "d": np.int64(1 << 40), "v": f(2)},
    ),
    "product": (
        [N("MatMul", ["a", "b"], ["y"])],
        {"a": np.zeros((1 << 15, 1), np.float32), "b": np.zeros((1, 1 << 15), np.float32)},
    ),
    "sum": (
        [N("Add", ["a", "b"], ["y"])],
        {"a": np.zeros((1 << 15, 1), np.float32), "b": np.zeros((1, 1 << 15), np.float32)},
    ),
    "convolution": (
        [N("Conv", ["i", "k"], ["y"], pads=[1 << 20] * 4)],
        {"i": f(1, 1, 2, 2), "k": f(1, 1, 1, 1)},
    ),
    "resize": (
        [N("Resize", ["i", "", "", "s"], ["y"])],
        {"i": f(1, 1, 2, 2), "s": np.int64([1, 1, 1 << 20, 1 << 20])},
    ),
    "window": ([N("HannWindow", ["n"], ["y"])], {"n": np.int64(1 << 40)}),
    "matrix of a resize": (
        [N("Resize", ["i", "", "", "s"], ["y"], mode="linear")],
        {"i": np.zeros((1, 1 << 15), np.float32), "s": np.int64([1, 1 << 16])},
    ),
    "many values": (
        [
            *(N("Tile", ["m", "r"], [f"t{n}"]) for n in range(12)),
            N("Sum", [f"t{n}" for n in range(12)], ["y"]),
        ],
        {"m": f(1 << 10), "r": np.int64([1 << 10])},
    ),
    "gather": (
        [N("Gather", ["a", "i"], ["y"])],
        {"a": np.zeros((1, 1 << 15), np.float32), "i": np.zeros(1 << 15, np.int64)},
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_sizes_that_a_file_states_are_limited(name: str, tmp_path: Path) -> None:
    nodes, constants = HOSTILE[name]
    used = {name for node in nodes for name in node.input}
    constants = constants | ({"huge": HUGE} if "huge" in used else {})
    graph = load(make_model(nodes, {}, constants), tmp_path / "m.onnx")
    with using(Limits(value_entries=1 << 20)), pytest.raises(LimitError):
        evaluate(graph, {})


@pytest.mark.parametrize(
    "shapes",
    [
        (),
        ((),),
        ((3,), ()),
        ((2, 1), (3,)),
        ((0,), (1,)),
        ((2,), (0,)),
        ((2, 3), (3, 2)),
        ((4, 1, 2), (3, 1)),
    ],
)
def test_shapes_are_broadcast_as_numpy_does(shapes: tuple[tuple[int, ...], ...]) -> None:
    try:
        expected = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(ValueError, match=re.escape(str(shapes))):
            broadcast_shapes(*shapes)
    else:
        assert broadcast_shapes(*shapes) == expected


@pytest.mark.parametrize(
    ("op", "shapes", "numbers", "attributes"),
    [
        *(
            ("Reshape", [(2, 6)], listed, {})
            for listed in ([3, 4], [0, -1], [-1], [5, -1], [-1, -1], [2, 2, 0])
        ),
        *(
            ("Reshape", [(0, 3)], listed, {"allowzero": zero})
            for listed in ([0, 3], [0, -1])
            for zero in (0, 1)
        ),
        *(
            ("Transpose", [(2, 3, 4)], None, {"perm": p})
            for p in ((2, 0, 1), (-1, 0, 1), (0, 0, 1), (0, 1), (0, 1, 3))
        ),
        ("Transpose", [(2, 3, 4)], None, {}),
        *(("Concat", [(2, 3), (2, 4)], None, {"axis": axis}) for axis in (0, 1, -1, 2)),
        *(("Concat", shapes, None, {"axis": 0}) for shapes in ([(2,), (3,)], [(2, 1), (2,)], [(), ()])),
    ],
)
def test_shapes_of_movements_are_those_of_their_values(
    op: str, shapes: list[tuple[int, ...]], numbers: list[int] | None, attributes: dict[str, Any]
) -> None:
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    names = [f"x{n}" for n in range(len(shapes))]
    node = OperatorNode(op, (*names, *(["n"] if numbers else [])), ("y",), attributes)
    tracer = ShapeTracer(
        Graph((), (), (), {"n": inline_integers(numbers or [])}), dict(zip(names, shapes, strict=True))
    )
    tracer.add(node)
    try:
        (value,) = compute_node(node, [*arrays, *([np.array(numbers)] if numbers else [])])
    except FormatError:
        assert (tracer.shape("y"), tracer.misfits) == (None, [node])
    else:
        assert tracer.shape("y") == value.shape


def test_operations_have_costs_and_the_weights_that_they_use(tmp_path: Path) -> None:
    nodes = [
        N("Transpose", ["w"], ["t"], name="/net/0/Transpose"),
        N("MatMul", ["x", "t"], ["h"], name="/net/0/MatMul"),
        N("Softmax", ["h"], ["y"], name="/net/1/Softmax", axis=0),
    ]
    traced = trace_graph(load(make_model(nodes, {"x": f(2, 3)}, {"w": f(4, 3)}, 11), tmp_path / "m.onnx"), {})
    assert traced is not None
    # A constant is no operation, and a softmax of an older version is one.
    assert [(call.name, call.kind, call.output, call.macs) for call in traced.calls] == [
        ("/net/0/MatMul", "MatMul", (2, 4), 24),
        ("/net/1/Softmax", "Softmax", (2, 4), 0),
    ]
    assert [[path[-1].value for path in call.weights] for call in traced.calls] == [["w"], []]
    assert [call.inputs for call in traced.calls] == [(-1,), (0,)]


# Real files.


@pytest.mark.corpus
def test_real_policies_compute_what_onnxruntime_does(corpus: Path) -> None:
    paths = sorted((corpus / "exported" / "onnx").glob("*.onnx"))
    assert len(paths) >= 3
    for path in paths:
        graph = read_graph(ckpttool.open(str(path)))
        assert graph is not None
        inputs = {
            value.name: f(*(e if isinstance(e, int) else 3 for e in value.shape or ()))
            for value in graph.inputs
        }
        outputs = list(evaluate(graph, inputs).values())
        for array, expected in zip(outputs, run_onnxruntime(path, inputs), strict=True):
            assert_same_numbers(array, expected, 1e-4, 1e-5)


def find_paths(graph: Graph) -> dict[str, Any]:
    """Return the paths of a graph's weights by their last name."""
    return {str(leaf.path[-1].value): leaf.path for leaf in graph.constants.values() if leaf.path}


def test_calls_of_weights_are_numbered_with_what_their_inputs_depend_on(tmp_path: Path) -> None:
    a, b, c, rows = f(4, 4), f(4, 4), f(4, 4), f(6, 4)
    nodes = [
        # A lookup at computed positions is a call. Nodes that compute with constants only are no calls.
        N("Range", ["zero", "four", "one"], ["positions"]),
        N("Gather", ["rows", "positions"], ["embedded"]),
        N("Add", ["x", "embedded"], ["h"]),
        N("Transpose", ["b"], ["turned"], perm=[1, 0]),
        N("MatMul", ["h", "a"], ["left"]),
        N("MatMul", ["h", "turned"], ["right"]),
        N("Shape", ["left"], ["extents"]),
        N("Reshape", ["right", "extents"], ["again"]),
        N("MatMul", ["again", "c"], ["y"]),
    ]
    integers = {name: np.asarray(value, np.int64) for name, value in (("zero", 0), ("one", 1), ("four", 4))}
    constants = {"a": a, "b": b, "c": c, "rows": rows, **integers}
    graph = load(make_model(nodes, {"x": f(4, 4)}, constants, outputs=("left", "y")), tmp_path / "m.onnx")
    paths, calls = find_paths(graph), number_calls(graph)
    numbers = {name: calls[paths[name]].number for name in ("rows", "a", "b", "c")}
    assert sorted(numbers, key=numbers.__getitem__) == ["rows", "a", "b", "c"]
    after = {
        name: {other for other, number in numbers.items() if calls[paths[name]].after >> number & 1}
        for name in numbers
    }
    # The extents of a value are not its numbers.
    assert after == {"rows": set(), "a": {"rows"}, "b": {"rows"}, "c": {"rows", "b"}}
    assert {name: calls[paths[name]].leads for name in numbers} == {"rows": 3, "a": 1, "b": 2, "c": 2}


def test_roles_and_settings_of_weights(tmp_path: Path) -> None:
    constants = {
        "w": f(4, 4),
        "v": f(4, 4),
        "b": f(4),
        "s": f(4),
        "both": f(4, 4),
        "k": f(2, 1, 3),
        "t": f(4),
        "g": f(4),
        "n": f(4),
    }
    nodes = [
        N("MatMul", ["x", "w"], ["h"]),
        N("Add", ["b", "h"], ["i"]),
        N("Gemm", ["i", "v", "s"], ["j"], transB=1),
        N("MatMul", ["j", "both"], ["o"]),
        N("Gemm", ["o", "both"], ["p"], transB=1),
        N("LayerNormalization", ["p", "t"], ["q"], epsilon=1e-3),
        N("GroupNormalization", ["q", "g", "n"], ["e"], epsilon=1e-2, num_groups=2),
        N("Unsqueeze", ["e", "axis"], ["r"]),
        N("Conv", ["r", "k"], ["y"], dilations=[2], kernel_shape=[3], pads=[2, 2]),
    ]
    graph = load(
        make_model(nodes, {"x": f(4, 4)}, {**constants, "axis": np.asarray([1])}, 21), tmp_path / "m.onnx"
    )
    paths, roles = find_paths(graph), find_roles(graph)
    known = {name: roles[paths[name]][0] for name in constants if paths[name] in roles}
    # A matrix that is used in both orientations has no role.
    assert known == {"w": "in_out", "v": "out_in", "b": "added", "s": "added", "k": "", "t": "", "g": ""}
    assert roles[paths["k"]][1]["dilation"] == (2,)
    assert roles[paths["t"]][1]["epsilon"] == pytest.approx(1e-3)
    assert roles[paths["g"]][1]["epsilon"] == pytest.approx(1e-2)


def test_no_two_values_get_one_name() -> None:
    build = GraphBuilder()
    names = [build.unique_name(stem) for stem in ("x", "x", "x_1", "x", "", "")]
    assert len(set(names)) == len(names)
    assert all(names)


# One row adds an operator to every language that has it.


def toy_onnx(path: Path) -> Graph:
    return load(make_model([N("Toy", ["x"], ["y"])], {"x": f(2, 3)}), path)


def toy_keras(_path: Path) -> Graph:
    first = {"class_name": "InputLayer", "config": {"name": "x", "batch_shape": [2, 3]}, "name": "x"}
    toy = {"class_name": "Toy", "module": "keras.src.ops.numpy", "config": {"name": "y"}, "name": "y"}
    toy["inbound_nodes"] = [[["x", 0, 0, {}]]]
    config = {"name": "m", "layers": [first, toy], "input_layers": [["x", 0, 0]]}
    config["output_layers"] = [["y", 0, 0]]
    return read_document({"class_name": "Functional", "config": config}, Tree({}), "x.keras", 3)


def toy_torchscript(_path: Path) -> Graph:
    code = "class Net(Module):\n  def forward(self, x: Tensor) -> Tensor:\n    return torch.toy(x)\n"
    tree = Tree({}, {}, {(): ckpttool.core.Container("record", "__torch__.Net")})
    translator = ScriptTranslator(
        tree, {"__torch__": code}, operation=apply_operation, integers=set(), shapes=[(2, 3)]
    )
    return translator.graph(())


def toy_tensorflow(_path: Path) -> Graph:
    translator = tensorflow.FunctionTranslator({}, Tree({}))
    function = GraphFunction(("x",), {"n": FunctionNode("ToyV2", ("x",), {})}, ("n:y:0",))
    results = translator.call(function, [tensorflow.TensorName("x", "float32")])
    return translator.graph([Value("x", "float32", (2, 3))], {"y": results[0]})


@pytest.fixture
def toy_row() -> Iterator[None]:
    caches = (spelled_operators, tensorflow.list_operations, torchscript.list_operations)
    table, spelling = list_operators(), OperatorNames(1, "toy", "Toy", "ToyV2")
    expand = lambda add, number, x: add("Add", add("Mul", x, number(2)), number(1))  # noqa: E731
    row = operator("Toy", shapes=table["Abs"].shapes, kind="elementwise", spelling=spelling, expand=expand)
    row(lambda x: 2 * x + 1)
    for cache in caches:
        cache.cache_clear()
    yield
    del table["Toy"]
    for cache in caches:
        cache.cache_clear()


@pytest.mark.usefixtures("toy_row")
@pytest.mark.parametrize("read", [toy_onnx, toy_keras, toy_torchscript, toy_tensorflow])
def test_one_row_adds_an_operator_to_every_language(read: Callable[[Path], Graph], tmp_path: Path) -> None:
    graph = read(tmp_path / "toy.onnx")
    (name,) = (value.name for value in graph.inputs)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(*evaluate(graph, {name: x}).values(), 2 * x + 1)
    assert {*infer_shapes(graph).values()} == {(2, 3)}
    traced = trace_graph(graph, {})
    assert traced is not None
    assert [(call.output, call.macs) for call in traced.calls if call.kind == "Toy"] == [((2, 3), 0)]
    (first, second) = lower_policy(graph, "actor", "toy.onnx").program.operations
    assert (first.kind, first.value["scale"], first.value["shift"]) == ("affine", 2, 0)
    assert (second.kind, second.value["scale"], second.value["shift"]) == ("affine", 1, 1)


@pytest.mark.usefixtures("toy_row")
def test_one_row_lets_an_operator_play(tmp_path: Path) -> None:
    constants = {"w": f(3, 4), "v": f(4, 2)}
    nodes = [N("MatMul", ["x", "w"], ["a"]), N("Toy", ["a"], ["b"]), N("MatMul", ["b", "v"], ["y"])]
    graph = load(make_model(nodes, {"x": f(1, 3)}, constants), tmp_path / "toy.onnx")
    x = f(1, 3)
    with ckpttool.load_agent(str(tmp_path / "toy.onnx")) as agent:
        np.testing.assert_allclose(agent.act(x), evaluate(graph, {"x": x})["y"], rtol=1e-6)


LIMITS = (np.float32(0), np.float32(6), np.float32(-1), np.float32(1))
# Operators between layers that are activations of policies: the operator, its constants and attributes.
BETWEEN: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "leaky_relu(0.25)": ("LeakyRelu", (), {"alpha": 0.25}),
    "leaky_relu": ("LeakyRelu", (), {}),
    "relu6": ("Clip", LIMITS[:2], {}),
    "hardtanh": ("Clip", LIMITS[2:], {}),
    "selu": ("Selu", (), {}),
    "mish": ("Mish", (), {}),
    "hardswish": ("HardSwish", (), {}),
    "elu": ("Celu", (), {}),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_activations_in_a_graph_are_those_of_its_converted_layers(name: str, tmp_path: Path) -> None:
    op, settings, attributes = BETWEEN[name]
    constants = {"w": f(3, 8), "c": f(8), "v": f(8, 2), "d": f(2)}
    limits = {f"s{number}": value for number, value in enumerate(settings)}
    nodes = [
        N("Gemm", ["x", "w", "c"], ["a"]),
        N(op, ["a", *limits], ["b"], **attributes),
        N("Gemm", ["b", "v", "d"], ["y"]),
    ]
    model = make_model(nodes, {"x": 3 * f(1, 3)}, {**constants, **limits}, opset=22)
    load(model, tmp_path / "a.onnx")
    ckpttool.convert(str(tmp_path / "a.onnx"), str(tmp_path / "a.pt"), to="torch")
    x = 3 * f(1, 3)
    (expected,) = run_onnxruntime(tmp_path / "a.onnx", {"x": x})
    for path in ("a.onnx", "a.pt"):
        assert restore_agent(str(tmp_path / path)).known.activations == [name]
        with ckpttool.load_agent(str(tmp_path / path)) as agent:
            np.testing.assert_allclose(agent.act(x), expected, rtol=1e-5, atol=1e-6)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


# Operators that leave columns of a row of 6 numbers: their constants and attributes.
COLUMNS: dict[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "slice": ("Slice", [ints(1), ints(4), ints(1)], {}),
    "slice from the end": ("Slice", [ints(-3), ints((1 << 63) - 1), ints(-1)], {}),
    "slice to the largest int32": ("Slice", [ints(2), ints((1 << 31) - 1), ints(1)], {}),
    "gather": ("Gather", [ints(2, -3, 4)], {"axis": -1}),
    "compress": ("Compress", [np.array([False, True, True, False])], {"axis": 1}),
    "crop": ("CenterCropPad", [ints(4)], {"axes": [1]}),
    "tile": ("Tile", [ints(1, 1)], {}),
    "pad": ("Pad", [ints(0, 0, 0, 0)], {}),
    "crop by negative pads": ("Pad", [ints(0, -1, 0, -2)], {}),
    "expand": ("Expand", [ints(1, 6)], {}),
}
NO_COLUMNS: dict[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "every second": ("Slice", [ints(0), ints(6), ints(1), ints(2)], {}),
    "another order": ("Gather", [ints(2, 1)], {"axis": 1}),
    "first observations": ("Slice", [ints(0), ints(2), ints(0)], {}),
    "repeated": ("Tile", [ints(1, 2)], {}),
    "padded": ("Pad", [ints(0, 1, 0, 0)], {}),
    "padded with ones": ("Pad", [ints(0, 1, 0, 0), np.float32(1)], {}),
    "lower triangle": ("Trilu", [np.int64(0)], {"upper": 0}),
}


def cut_graph(case: tuple[str, list[np.ndarray], dict[str, Any]], path: Path) -> Graph:
    op, settings, attributes = case
    constants = {"w": f(6, 6), **{f"s{number}": array for number, array in enumerate(settings)}}
    nodes = [N("MatMul", ["x", "w"], ["a"]), N(op, ["a", *list(constants)[1:]], ["y"], **attributes)]
    return load(make_model(nodes, {"x": f(1, 6)}, constants), path)


@pytest.mark.parametrize("case", COLUMNS.values(), ids=COLUMNS)
def test_a_policy_takes_columns_by_every_operator_that_moves_entries(
    case: tuple[str, list[np.ndarray], dict[str, Any]], tmp_path: Path
) -> None:
    graph, x = cut_graph(case, tmp_path / "cut.onnx"), f(1, 6)
    with ckpttool.load_agent(str(tmp_path / "cut.onnx")) as agent:
        np.testing.assert_allclose(agent.act(x), evaluate(graph, {"x": x})["y"], rtol=1e-6)


@pytest.mark.parametrize("case", NO_COLUMNS.values(), ids=NO_COLUMNS)
def test_entries_in_another_order_are_no_columns(
    case: tuple[str, list[np.ndarray], dict[str, Any]], tmp_path: Path
) -> None:
    graph = cut_graph(case, tmp_path / "cut.onnx")
    with pytest.raises(UnsupportedError) as error:
        lower_policy(graph, "actor", "cut.onnx")
    assert error.value.found == case[0]


# Inputs and attributes with which an operator is expanded, besides numbers of one shape and the defaults.
EXPANDED: dict[str, list[tuple[list[np.ndarray], dict[str, Any]]]] = {
    "Sum": [([f(2, 3)], {}), ([f(2, 3), f(3), f(2, 3)], {})],
    "Mean": [([f(2, 3)], {}), ([f(2, 3), f(3), f(2, 3)], {})],
    "Gelu": [([f(2, 3)], {"approximate": "tanh"})],
    "Selu": [([f(2, 3)], {}), ([f(2, 3)], {"alpha": 1.5, "gamma": 1.2})],
    "Celu": [([f(2, 3)], {}), ([f(2, 3)], {"alpha": 1.5})],
    "HardSigmoid": [([3 * f(4, 9)], {}), ([3 * f(4, 9)], {"alpha": 0.3, "beta": 0.4})],
    "Swish": [([f(2, 3)], {}), ([f(2, 3)], {"alpha": 1.702})],
    "SwiGLU": [([f(2, 3), f(2, 3)], {}), ([f(2, 3), f(2, 3)], {"alpha": 1.5})],
    "Gemm": [
        ([f(2, 3), f(3, 4)], {}),
        ([f(2, 3), f(3, 4), f(4)], {"alpha": 2.0, "beta": 0.5}),
        ([f(3, 2), f(4, 3), f(2, 4)], {"transA": 1, "transB": 1}),
    ],
}


@pytest.mark.parametrize("op", [name for name, row in list_operators().items() if row.expand is not None])
def test_an_expansion_computes_what_its_operator_does(op: str) -> None:
    row = list_operators()[op]
    for inputs, attributes in EXPANDED.get(op, [([f(2, 3)], {})]):
        build = GraphBuilder()
        names = [build.unique_name("x") for _ in inputs]
        numbers = lambda value: build.number(value, "float64")  # noqa: B023, E731
        node = OperatorNode(op, tuple(names), ("y",), attributes)
        result = row.expanded(node, build.one, numbers)
        graph = build.graph([Value(name) for name in names], [Value(result)])
        wide = [array.astype(np.float64) for array in inputs]
        (expected,) = compute_node(node, wide)
        actual = evaluate(graph, dict(zip(names, wide, strict=True)))[result]
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.usefixtures("toy_row")
@pytest.mark.parametrize(("target", "call"), [("torch", "torch.toy("), ("keras", "ops.toy(")])
def test_one_row_is_written_as_code(target: str, call: str, tmp_path: Path) -> None:
    graph = toy_onnx(tmp_path / "toy.onnx")
    code = write_graph_code([Method(graph)], GraphPlan(Tree({}), (), Tree({}), {}), target, ())
    assert code.count(call) == 1


@pytest.mark.usefixtures("toy_row")
@pytest.mark.parametrize("inner", ["Relu", "Swish", "SwiGLU"])
def test_one_row_exports_an_operator_to_onnx(inner: str, tmp_path: Path) -> None:
    """An expansion may have operators that are expanded again."""
    expand = lambda add, number, x: add("Add", add(inner, *[x] * (1 + (inner == "SwiGLU"))), number(1))  # noqa: E731
    list_operators()["Toy"] = list_operators()["Toy"]._replace(expand=expand)  # type: ignore[index]
    graph = toy_onnx(tmp_path / "toy.onnx")
    x = f(2, 3)
    shaped = replace(graph, outputs=(Value("y", "float32", (2, 3)),))
    (tmp_path / "old.onnx").write_bytes(onnx_export.encode_graph(shaped, {}))
    model = onnx.load(str(tmp_path / "old.onnx"))
    assert {node.op_type for node in model.graph.node}.isdisjoint({"Toy", "Swish", "SwiGLU"})
    (exported,) = evaluate(load(model, tmp_path / "again.onnx"), {"x": x}).values()
    gate = {"Relu": np.maximum(x, 0), "Swish": x / (1 + np.exp(-x)), "SwiGLU": x * x / (1 + np.exp(-x))}
    np.testing.assert_allclose(exported, gate[inner] + 1, rtol=1e-6)
    (run,) = run_onnxruntime(tmp_path / "old.onnx", {"x": x})
    np.testing.assert_allclose(run, gate[inner] + 1, rtol=1e-6)


@pytest.mark.usefixtures("toy_row")
def test_an_operator_without_an_expansion_is_not_exported(tmp_path: Path) -> None:
    list_operators()["Toy"] = list_operators()["Toy"]._replace(expand=None)  # type: ignore[index]
    with pytest.raises(UnsupportedError) as error:
        onnx_export.encode_graph(toy_onnx(tmp_path / "toy.onnx"), {})
    assert error.value.found == "Toy"


@pytest.mark.usefixtures("toy_row")
def test_one_row_lets_a_policy_be_exported(tmp_path: Path) -> None:
    constants = {"w": f(3, 4), "v": f(4, 2)}
    nodes = [N("MatMul", ["x", "w"], ["a"]), N("Toy", ["a"], ["b"]), N("MatMul", ["b", "v"], ["y"])]
    load(make_model(nodes, {"x": f(1, 3)}, constants), tmp_path / "toy.onnx")
    ckpttool.export(str(tmp_path / "toy.onnx"), str(tmp_path / "out.onnx"))
    x = f(1, 3)
    with ckpttool.load_agent(str(tmp_path / "out.onnx")) as agent:
        np.testing.assert_allclose(agent.act(x), (2 * (x @ constants["w"]) + 1) @ constants["v"], rtol=1e-5)


@pytest.mark.usefixtures("toy_row")
def test_one_row_gives_the_order_of_images_behind_an_operator(tmp_path: Path) -> None:
    constants = {"k": f(4, 3, 2, 2), "w": f(24, 5)}
    orders = []
    for op in ("Toy", "Relu"):
        nodes = [N("Conv", ["x", "k"], ["a"]), N(op, ["a"], ["b"]), N("Flatten", ["b"], ["c"])]
        model = make_model([*nodes, N("MatMul", ["c", "w"], ["y"])], {"x": f(1, 3, 3, 4)}, constants)
        graph = load(model, tmp_path / f"{op}.onnx")
        tree = ckpttool.open(str(tmp_path / f"{op}.onnx")).tree
        orders.append({str(path[-1].value): use for path, use in trace_graph_orders(graph, tree, 1).items()})
    assert orders[0] == orders[1]
    assert orders[0]["w"].takes == framework_order(((6, 4),), "torch")
