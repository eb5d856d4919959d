"""Operators of ONNX one by one: each computes what onnxruntime computes, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import CkpttoolError, UnsupportedError
from ckpttool.evaluation.restore import restore_agent
from tests.test_onnx_policies import onnx, runs_as_onnxruntime

N = onnx.helper.make_node
FLOATS = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return FLOATS.normal(size=shape).astype(np.float32)


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def model(
    nodes: list[Any], constants: dict[str, Any], shape: tuple[Any, ...] = ("batch", 3), opset: int = 17
) -> Any:
    """Return a model from `obs` to `action`."""
    helper = onnx.helper
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    action = helper.make_tensor_value_info("action", 1, None)
    observation = helper.make_tensor_value_info("obs", 1, list(shape))
    graph = helper.make_graph(nodes, "g", [observation], [action], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


W, V, B = f(3, 2), f(2, 2), f(2)
# By name: nodes and constants, further arguments of `model`, and what a refusal names (None: it is followed).
CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], str | None]] = {
    "matmul+add reversed": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Add", ["b", "x"], ["action"])],
        {"W": W, "b": B},
        {},
        None,
    ),
    "bias [1,n]": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Add", ["x", "b"], ["action"])],
        {"W": W, "b": B[None]},
        {},
        None,
    ),
    "bias [n,1] square batch": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Add", ["x", "b"], ["action"])],
        {"W": W, "b": B[:, None]},
        {"shape": (2, 3)},
        "Add",
    ),
    "gemm alpha beta": (
        [N("Gemm", ["obs", "W", "b"], ["action"], alpha=0.5, beta=2.0)],
        {"W": W, "b": B},
        {},
        None,
    ),
    "gemm transB": ([N("Gemm", ["obs", "W", "b"], ["action"], transB=1)], {"W": f(2, 3), "b": B}, {}, None),
    "gemm scalar C": ([N("Gemm", ["obs", "W", "b"], ["action"])], {"W": W, "b": np.float32(0.5)}, {}, None),
    "gemm C [1]": ([N("Gemm", ["obs", "W", "b"], ["action"])], {"W": W, "b": f(1)}, {}, None),
    "gemm transA": (
        [N("Gemm", ["obs", "W", "b"], ["action"], transA=1)],
        {"W": f(1, 2), "b": B},
        {"shape": (1, 3)},
        "Gemm",
    ),
    "transposed weight node": (
        [N("Transpose", ["W"], ["Wt"], perm=[1, 0]), N("Gemm", ["obs", "Wt", "b"], ["action"])],
        {"W": f(2, 3), "b": B},
        {},
        None,
    ),
    "square transposed+transB": (
        [N("Transpose", ["W"], ["Wt"]), N("Gemm", ["obs", "Wt", "b"], ["action"], transB=1)],
        {"W": f(3, 3), "b": f(3)},
        {},
        None,
    ),
    "prelu slopes 1.5": (
        [N("MatMul", ["obs", "W"], ["x"]), N("PRelu", ["x", "s"], ["action"])],
        {"W": W, "s": row(1.5)},
        {},
        None,
    ),
    "prelu slopes -0.5": (
        [N("MatMul", ["obs", "W"], ["x"]), N("PRelu", ["x", "s"], ["action"])],
        {"W": W, "s": row(-0.5)},
        {},
        None,
    ),
    "prelu per channel": (
        [N("MatMul", ["obs", "W"], ["x"]), N("PRelu", ["x", "s"], ["action"])],
        {"W": W, "s": row(0.5, 0.1)},
        {},
        None,
    ),
    "leaky 0.01": (
        [N("MatMul", ["obs", "W"], ["x"]), N("LeakyRelu", ["x"], ["y"]), N("MatMul", ["y", "V"], ["action"])],
        {"W": W, "V": V},
        {},
        None,
    ),
    "elu alpha 2": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Elu", ["x"], ["action"], alpha=2.0)],
        {"W": W},
        {},
        None,
    ),
    "clip min only": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Clip", ["x", "lo"], ["action"])],
        {"W": W, "lo": np.float32(-0.1)},
        {},
        None,
    ),
    "clip max only": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Clip", ["x", "", "hi"], ["action"])],
        {"W": W, "hi": np.float32(0.1)},
        {},
        None,
    ),
    "clip reversed": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Clip", ["x", "lo", "hi"], ["action"])],
        {"W": W, "lo": np.float32(0.5), "hi": np.float32(-0.5)},
        {},
        None,
    ),
    "c - x": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Sub", ["c", "x"], ["action"])],
        {"W": W, "c": B},
        {},
        None,
    ),
    "c / x": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Div", ["c", "x"], ["action"])],
        {"W": W, "c": B},
        {},
        "Div",
    ),
    "x / 0": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Div", ["x", "c"], ["action"])],
        {"W": W, "c": row(1, 0)},
        {},
        "Div",
    ),
    "expanding add": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Add", ["x", "c"], ["action"])],
        {"W": f(3, 1), "c": B},
        {},
        "Add",
    ),
    "x+x shared": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Add", ["x", "b"], ["y"]), N("Add", ["x", "y"], ["action"])],
        {"W": W, "b": B},
        {},
        None,
    ),
    "x*sigmoid(x) shared other": (
        [
            N("MatMul", ["obs", "W"], ["x"]),
            N("Sigmoid", ["x"], ["s"]),
            N("Mul", ["x", "s"], ["y"]),
            N("Add", ["y", "s"], ["action"]),
        ],
        {"W": W},
        {},
        None,
    ),
    "neg scale normaliser": (
        [N("Mul", ["obs", "c"], ["x"]), N("MatMul", ["x", "W"], ["action"])],
        {"W": W, "c": row(-1, 2, 0.5)},
        {},
        None,
    ),
    "normaliser big mean": (
        [N("Sub", ["obs", "mu"], ["x0"]), N("Div", ["x0", "c"], ["x"]), N("MatMul", ["x", "W"], ["action"])],
        {"W": W, "mu": row(1000, 2, 0.5), "c": row(1e-2, 2, 0.5)},
        {},
        None,
    ),
    "split uneven": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Split", ["x", "s"], ["action", "z"], axis=1)],
        {"W": f(3, 5), "s": np.array([2, 3])},
        {},
        None,
    ),
    "split second": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Split", ["x", "s"], ["z", "action"], axis=-1)],
        {"W": f(3, 5), "s": np.array([3, 2])},
        {},
        None,
    ),
    "split batch axis": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Split", ["x"], ["z", "action"], axis=0)],
        {"W": W},
        {"shape": (2, 3), "opset": 13},
        "Split",
    ),
    "slice neg": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Slice", ["x", "a", "e", "ax"], ["action"])],
        {"W": f(3, 5), "a": np.array([-2]), "e": np.array([2**62]), "ax": np.array([-1])},
        {},
        None,
    ),
    "slice step": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Slice", ["x", "a", "e", "ax", "st"], ["action"])],
        {"W": f(3, 4), "a": np.array([0]), "e": np.array([4]), "ax": np.array([-1]), "st": np.array([2])},
        {},
        "Slice",
    ),
    "gather cols": (
        [N("Gather", ["obs", "i"], ["x"], axis=1), N("MatMul", ["x", "W"], ["action"])],
        {"W": f(2, 2), "i": np.array([1, 2])},
        {},
        None,
    ),
    "gather permuted": (
        [N("Gather", ["obs", "i"], ["x"], axis=1), N("MatMul", ["x", "W"], ["action"])],
        {"W": f(2, 2), "i": np.array([2, 1])},
        {},
        "Gather",
    ),
    "concat obs,obs": (
        [N("Concat", ["obs", "obs"], ["x"], axis=1), N("MatMul", ["x", "W"], ["action"])],
        {"W": f(6, 2)},
        {},
        None,
    ),
    "concat batch axis": (
        [N("Concat", ["obs", "obs"], ["x"], axis=0), N("MatMul", ["x", "W"], ["action"])],
        {"W": W},
        {"shape": (1, 3)},
        "Concat",
    ),
    "reducemean all": (
        [
            N("MatMul", ["obs", "W"], ["x"]),
            N("ReduceMean", ["x"], ["mn"], axes=[0, 1], keepdims=1),
            N("Sub", ["x", "mn"], ["action"]),
        ],
        {"W": W},
        {"opset": 13},
        "ReduceMean",
    ),
    "LN axis": (
        [
            N("LayerNormalization", ["obs", "s", "o"], ["x"], axis=-1, epsilon=1e-2),
            N("MatMul", ["x", "W"], ["action"]),
        ],
        {"W": W, "s": f(3), "o": f(3)},
        {},
        None,
    ),
    "LN no bias": (
        [N("LayerNormalization", ["obs", "s"], ["x"]), N("MatMul", ["x", "W"], ["action"])],
        {"W": W, "s": f(3)},
        {},
        None,
    ),
    "LN axis0": (
        [N("LayerNormalization", ["obs", "s"], ["x"], axis=0), N("MatMul", ["x", "W"], ["action"])],
        {"W": W, "s": np.ones((1, 3), np.float32)},
        {"shape": (1, 3)},
        "LayerNormalization",
    ),
    "softplus/abs": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Softplus", ["x"], ["action"])],
        {"W": W},
        {},
        None,
    ),
    "reshape mixing": (
        [N("Reshape", ["obs", "s"], ["x"]), N("MatMul", ["x", "W"], ["action"])],
        {"W": f(1, 2), "s": np.array([-1, 1])},
        {"shape": (1, 3)},
        "Reshape",
    ),
    "reshape same": (
        [N("Reshape", ["obs", "s"], ["x"]), N("MatMul", ["x", "W"], ["action"])],
        {"W": W, "s": np.array([1, -1])},
        {"shape": (1, 3)},
        None,
    ),
    "opset 6": ([N("MatMul", ["obs", "W"], ["action"])], {"W": W}, {"opset": 6}, "6"),
    "unknown width": ([N("MatMul", ["obs", "W"], ["action"])], {"W": W}, {"shape": ("batch", "n")}, None),
    "no batch": ([N("MatMul", ["obs", "W"], ["action"])], {"W": W}, {"shape": (3,)}, "[3]"),
    "const output": ([N("Identity", ["W"], ["action"])], {"W": W}, {}, "a constant"),
    "where": (
        [
            N("MatMul", ["obs", "W"], ["x"]),
            N("Greater", ["x", "z"], ["g"]),
            N("Where", ["g", "x", "z"], ["action"]),
        ],
        {"W": W, "z": np.float32(0)},
        {},
        "Greater",
    ),
    "pow 2 of plain": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Pow", ["x", "z"], ["action"])],
        {"W": W, "z": np.float32(2)},
        {},
        "Pow",
    ),
    "float64": (
        [
            N("Cast", ["obs"], ["o"], to=11),
            N("MatMul", ["o", "W"], ["x"]),
            N("Cast", ["x"], ["action"], to=1),
        ],
        {"W": W.astype(np.float64)},
        {},
        None,
    ),
    "int weights cast": (
        [N("Cast", ["Wi"], ["W"], to=1), N("MatMul", ["obs", "W"], ["action"])],
        {"Wi": np.array([[1, 2], [3, 4], [5, 6]], np.int32)},
        {},
        None,
    ),
    "max with const then min": (
        [N("MatMul", ["obs", "W"], ["x"]), N("Max", ["x", "lo"], ["y"]), N("Min", ["hi", "y"], ["action"])],
        {"W": W, "lo": row(-0.1, -0.2), "hi": row(0.3, 0.1)},
        {},
        None,
    ),
    "max of two flows": (
        [
            N("MatMul", ["obs", "W"], ["x"]),
            N("Max", ["x", "y"], ["action"]),
        ],
        {"W": W, "y": f(2)},
        {},
        None,
    ),
    "min of flows": (
        [
            N("MatMul", ["obs", "W"], ["x"]),
            N("MatMul", ["obs", "V"], ["y"]),
            N("Min", ["x", "y"], ["action"]),
        ],
        {"W": W, "V": f(3, 2)},
        {},
        "Min",
    ),
    "dq": (
        [N("DequantizeLinear", ["Wi", "s"], ["W"]), N("MatMul", ["obs", "W"], ["action"])],
        {"Wi": np.array([[1, 2], [3, 4], [5, 6]], np.int8), "s": np.float32(0.1)},
        {},
        "DequantizeLinear",
    ),
    "conv auto_pad": (
        [
            N("Conv", ["obs", "K"], ["x"], auto_pad="SAME_UPPER"),
            N("Flatten", ["x"], ["y"]),
            N("MatMul", ["y", "W"], ["action"]),
        ],
        {"K": f(2, 1, 3, 3), "W": f(32, 2)},
        {"shape": ("batch", 1, 4, 4)},
        "Conv",
    ),
    "conv dilated": (
        [
            N("Conv", ["obs", "K"], ["x"], dilations=[2, 2]),
            N("Flatten", ["x"], ["y"]),
            N("MatMul", ["y", "W"], ["action"]),
        ],
        {"K": f(2, 1, 2, 2), "W": f(8, 2)},
        {"shape": ("batch", 1, 4, 4)},
        "Conv",
    ),
    "nhwc": (
        [
            N("Transpose", ["obs"], ["o"], perm=[0, 3, 1, 2]),
            N("Conv", ["o", "K"], ["x"]),
            N("Transpose", ["x"], ["xx"], perm=[0, 2, 3, 1]),
            N("Flatten", ["xx"], ["y"]),
            N("MatMul", ["y", "W"], ["action"]),
        ],
        {"K": f(2, 3, 2, 2), "W": f(24, 2)},
        {"shape": ("batch", 4, 5, 3)},
        None,
    ),
    "squeeze out": (
        [
            N("MatMul", ["obs", "W"], ["x"]),
            N("Unsqueeze", ["x", "a"], ["y"]),
            N("Tanh", ["y"], ["z"]),
            N("Squeeze", ["z", "a"], ["action"]),
        ],
        {"W": W, "a": np.array([0])},
        {},
        None,
    ),
    **{
        op: ([N("MatMul", ["obs", "W"], ["x"]), N(op, ["x"], ["action"])], {"W": W}, {"opset": 18}, None)
        for op in ("HardSigmoid", "HardSwish", "Mish", "Selu", "Celu")
    },
    "norm as one factor and one offset": (
        [
            N("ReduceMean", ["obs"], ["m"], axes=[1]),
            N("Sub", ["obs", "m"], ["d"]),
            N("Mul", ["d", "d"], ["q"]),
            N("ReduceMean", ["q"], ["v"], axes=[1]),
            N("Add", ["v", "eps"], ["w"]),
            N("Sqrt", ["w"], ["s"]),
            N("Reciprocal", ["s"], ["r"]),
            N("Mul", ["r", "g"], ["f"]),
            N("Mul", ["m", "f"], ["mf"]),
            N("Sub", ["o", "mf"], ["rest"]),
            N("Mul", ["obs", "f"], ["xf"]),
            N("Add", ["xf", "rest"], ["action"]),
        ],
        {"eps": np.float32(0.01), "g": f(3), "o": f(3)},
        {},
        None,
    ),
    "norm with another factor of the mean": (
        [
            N("ReduceMean", ["obs"], ["m"], axes=[1]),
            N("Sub", ["obs", "m"], ["d"]),
            N("Mul", ["d", "d"], ["q"]),
            N("ReduceMean", ["q"], ["v"], axes=[1]),
            N("Add", ["v", "eps"], ["w"]),
            N("Sqrt", ["w"], ["s"]),
            N("Div", ["obs", "s"], ["xs"]),
            N("Add", ["m", "xs"], ["action"]),
        ],
        {"eps": np.float32(0.01)},
        {},
        "ReduceMean",
    ),
    "gelu of a negative, scaled": (
        [
            N("Neg", ["obs"], ["x"]),
            N("Mul", ["x", "c"], ["z"]),
            N("Erf", ["z"], ["e"]),
            N("Sub", ["one", "e"], ["p"]),
            N("Mul", ["obs", "half"], ["h"]),
            N("Mul", ["h", "p"], ["g"]),
            N("Mul", ["g", "k"], ["action"]),
        ],
        {"c": np.float32(0.5**0.5), "one": np.float32(1), "half": np.float32(0.5), "k": f(3)},
        {},
        None,
    ),
    "erf alone": ([N("Mul", ["obs", "c"], ["z"]), N("Erf", ["z"], ["action"])], {"c": row(0.5)}, {}, "Erf"),
    "softplus in two parts": (
        [
            N("Greater", ["obs", "t"], ["above"]),
            N("Softplus", ["obs"], ["s"]),
            N("Where", ["above", "obs", "s"], ["action"]),
        ],
        {"t": np.float32(20)},
        {},
        None,
    ),
    "softplus that ends early": (
        [
            N("Greater", ["obs", "t"], ["above"]),
            N("Softplus", ["obs"], ["s"]),
            N("Where", ["above", "obs", "s"], ["action"]),
        ],
        {"t": np.float32(1)},
        {},
        "Greater",
    ),
    "silu of another view": (
        [
            N("Sigmoid", ["obs"], ["s"]),
            N("Unsqueeze", ["s", "a"], ["t"]),
            N("Mul", ["obs", "t"], ["action"]),
        ],
        {"a": np.array([1])},
        {},
        "Mul",
    ),
    "norm with the mean of another view": (
        [
            N("Unsqueeze", ["obs", "a"], ["t"]),
            N("ReduceMean", ["t"], ["m"], axes=[2]),
            N("Sub", ["obs", "m"], ["action"]),
        ],
        {"a": np.array([1])},
        {},
        "ReduceMean",
    ),
    "integers": (
        [
            N("Cast", ["obs"], ["n"], to=6),
            N("Div", ["n", "two"], ["h"]),
            N("Cast", ["h"], ["x"], to=1),
            N("MatMul", ["x", "W"], ["action"]),
        ],
        {"two": np.int32(2), "W": W},
        {},
        "Cast",
    ),
    "number of observations as a factor": (
        [
            N("Shape", ["obs"], ["s"]),
            N("Gather", ["s", "i"], ["n"]),
            N("Cast", ["n"], ["c"], to=1),
            N("Div", ["obs", "c"], ["action"]),
        ],
        {"i": np.int64(0)},
        {},
        "Div",
    ),
    "number of observations in a shape": (
        [
            N("Shape", ["obs"], ["s"]),
            N("Gather", ["s", "i"], ["n"], axis=0),
            N("Concat", ["n", "w"], ["t"], axis=0),
            N("MatMul", ["obs", "W"], ["x"]),
            N("Reshape", ["x", "t"], ["action"]),
        ],
        {"i": np.array([0]), "w": np.array([2]), "W": W},
        {},
        None,
    ),
    "half weights cast": (
        [N("Cast", ["h"], ["W"], to=1), N("MatMul", ["obs", "W"], ["action"])],
        {"h": W.astype(np.float16)},
        {},
        None,
    ),
    "half arithmetic": (
        [
            N("Cast", ["obs"], ["o"], to=10),
            N("MatMul", ["o", "h"], ["x"]),
            N("Cast", ["x"], ["action"], to=1),
        ],
        {"h": W.astype(np.float16)},
        {},
        "Cast",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operator_computes_as_onnxruntime_does_or_is_refused(name: str, tmp_path: Path) -> None:
    nodes, constants, options, word = CASES[name]
    path = tmp_path / "policy.onnx"
    onnx.save(model(nodes, constants, **options), str(path))
    if word is None:
        runs_as_onnxruntime(path)
        return
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(str(path))
    assert caught.value.found == word


@pytest.mark.parametrize("code", [2, 6, 7])
def test_arithmetic_of_integers_is_refused(code: int, tmp_path: Path) -> None:
    # ONNX rounds quotients of integers, and a uint8 that is too large starts again at 0.
    dtype = onnx.helper.tensor_dtype_to_np_dtype(code)
    nodes = [
        N("Div", ["obs", "two"], ["h"]),
        N("Cast", ["h"], ["x"], to=1),
        N("MatMul", ["x", "W"], ["action"]),
    ]
    edited = model(nodes, {"two": np.array(2, dtype), "W": W})
    edited.graph.input[0].type.tensor_type.elem_type = code
    onnx.save(edited, str(tmp_path / "policy.onnx"))
    with pytest.raises(UnsupportedError) as caught:
        restore_agent(str(tmp_path / "policy.onnx"))
    assert caught.value.found == "Div"


def changed(change: Callable[[Any], None], path: Path) -> Path:
    proto = model([N("MatMul", ["obs", "W"], ["x"]), N("Add", ["x", "b"], ["action"])], {"W": W, "b": B})
    change(proto.graph)
    onnx.save(proto, str(path))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph.node.append(N("Neg", ["obs"], ["x"])),
        lambda graph: graph.node.reverse(),
        lambda graph: graph.node.pop(),
        lambda graph: graph.output.pop(),
        lambda graph: graph.input.pop(),
    ],
    ids=["two-values-of-one-name", "no-order", "no-output-value", "no-output", "no-input"],
)
def test_a_graph_that_is_none_is_refused(change: Callable[[Any], None], tmp_path: Path) -> None:
    with pytest.raises(CkpttoolError):
        restore_agent(str(changed(change, tmp_path / "policy.onnx")))
