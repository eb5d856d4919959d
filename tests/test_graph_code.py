"""`convert --code` of models with a graph: the code loads strictly and computes what the graph does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.conversion import graph_code
from ckpttool.conversion.graph_modules import GraphModules
from ckpttool.conversion.graph_texts import LANGUAGES
from ckpttool.core import Inline, Leaf, Tree, UnsupportedError, key
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.graphs import Graph, evaluate, read_graph
from ckpttool.mapping import BlockOrder, ChannelOrder
from ckpttool.networks import numpy_backend, policy_network
from tests import tensorflow_child
from tests.conftest import in_process, refused

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def outputs_of(
    source: Path, inputs: list[np.ndarray], suffix: str = "pt"
) -> tuple[np.ndarray, np.ndarray, str]:
    """Return what the graph of a file computes, what the written code computes, and the code."""
    target, code = source.with_name(f"model_out.{suffix}"), source.with_name("model_code.py")
    ran = in_process("convert", source, target, "--code", code, "--force")
    assert ran.status == 0, ran.err
    spec = importlib.util.spec_from_file_location("model_code", code)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    graph = read_graph(open_checkpoint(str(source)))
    assert graph is not None
    (expected, *_) = evaluate(graph, {v.name: x for v, x in zip(graph.inputs, inputs, strict=True)}).values()
    with torch.no_grad():
        result = module.load(str(target))(*map(torch.from_numpy, inputs)).numpy()
    return expected, result, code.read_text()


def require_equal(expected: np.ndarray, result: np.ndarray) -> None:
    """Compare with float32's rounding of the largest value: the sums have up to a few hundred terms."""
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= 1e-5 * max(1.0, float(np.abs(expected).max()))


def write(folder: Path, nodes: list[Any], extents: tuple[int, ...], /, **values: Any) -> Path:
    """Write an ONNX file with the input x, the output y, and these tensors."""
    helper = onnx.helper
    tensors = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()]
    made_nodes = [
        helper.make_node(op, names, [out] if isinstance(out, str) else out, **settings)
        for op, names, out, settings in nodes
    ]
    ends = [helper.make_tensor_value_info("x", 1, extents), helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph(made_nodes, "g", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


IMAGE = (2, 4, 9, 8)
# Operators after a convolution, whose weights each file needs: name, settings, further inputs.
AFTER = {
    **{
        op: (op, {}, {})
        for op in ("Relu", "Tanh", "Sigmoid", "Exp", "Abs", "Neg", "Erf", "Softsign", "HardSwish")
    },
    "elu": ("Elu", {"alpha": 0.5}, {}),
    "leaky": ("LeakyRelu", {"alpha": 0.3}, {}),
    "softmax": ("Softmax", {"axis": 1}, {}),
    "log softmax": ("LogSoftmax", {"axis": -1}, {}),
    "max pool": ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 1, 1, 1]}, {}),
    "average pool": ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, {}),
    "counted pool": (
        "AveragePool",
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1},
        {},
    ),
    "global pool": ("GlobalAveragePool", {}, {}),
    "flatten": ("Flatten", {}, {}),
    "reshape": ("Reshape", {}, {"shape": ints(0, 2, -1)}),
    "transpose": ("Transpose", {"perm": [0, 2, 3, 1]}, {}),
    "mean": ("ReduceMean", {"keepdims": 0}, {"axes": ints(2, 3)}),
    "max": ("ReduceMax", {}, {"axes": ints(1)}),
    "clip": ("Clip", {}, {"low": np.float32(-0.5), "high": np.float32(0.25)}),
    "pad": ("Pad", {}, {"pads": ints(0, 1, 2, 0, 0, 0, 1, 3), "value": np.float32(1.5)}),
    "padded axes": ("Pad", {}, {"pads": ints(1, 2), "value": np.float32(0), "axes": ints(2)}),
    "slice": (
        "Slice",
        {},
        {"starts": ints(1, 0), "ends": ints(4, 99), "axes": ints(1, 3), "steps": ints(2, 3)},
    ),
    "unsqueeze": ("Unsqueeze", {}, {"axes": ints(1, 3)}),
    "scale": ("Mul", {}, {"factor": np.float32(0.1)}),
    "divide": ("Div", {}, {"divisor": np.float32(3)}),
    **{op.lower(): (op, {}, {"other": np.float32(0.25)}) for op in ("Max", "Min")},
    **{op.lower(): (op, {}, {}) for op in ("Softplus", "Sin", "Cos", "Floor", "Sign", "Selu")},
    "power": ("Pow", {}, {"exponent": np.float32(2)}),
    "own selu": ("Selu", {"alpha": 1.5, "gamma": 1.25}, {}),
    "celu": ("Celu", {"alpha": 0.5}, {}),
    "hard sigmoid": ("HardSigmoid", {"alpha": 0.3, "beta": 0.25}, {}),
    "slopes": ("PRelu", {}, {"slopes": weights(4, 1, 1)}),
    "position": ("ArgMax", {"axis": 1, "keepdims": 0}, {}),
    "layer norm": ("LayerNormalization", {"epsilon": 1e-3}, {"scale": weights(8), "offset": weights(8)}),
    "instance norm": (
        "InstanceNormalization",
        {"epsilon": 1e-3},
        {"s": weights(4), "b": ints(1, 2, 3, 4).astype("f")},
    ),
    "entries": ("Gather", {"axis": 1}, {"indices": ints(2, -1, 2)}),
    "last entry": ("Gather", {"axis": -1}, {"index": np.array(-1)}),
    "shape": ("Shape", {"start": 1, "end": -1}, {}),
    "size": ("Size", {}, {}),
    "expand": ("Expand", {}, {"shape": ints(3, 1, 1, 1, 1)}),
    **{
        kind: (f"Reduce{kind}", {"keepdims": number % 2}, {"axes": ints(1, 3)})
        for number, kind in enumerate(("L1", "L2", "SumSquare", "LogSumExp"))
    },
    "means": ("Mean", {}, {"other": np.float32(0.25)}),
    "tile": ("Tile", {}, {"repeats": ints(1, 2, 1, 3)}),
    "product": ("Einsum", {"equation": "bchw->bhc"}, {}),
}


def write_operator(folder: Path, name: str) -> Path:
    """Write an operator after a convolution."""
    op, settings, more = AFTER[name]
    kernel = {"kernel": weights(4, 4, 3, 3), "bias": weights(4)}
    nodes = [
        ("Conv", ["x", "kernel", "bias"], "h", {"pads": [1, 1, 1, 1]}),
        (op, ["h", *more], "y", settings),
    ]
    return write(folder, nodes, IMAGE, **kernel, **more)


@pytest.mark.parametrize("name", AFTER)
def test_each_operator_is_written_as_it_is_computed(name: str, tmp_path: Path) -> None:
    expected, result, _ = outputs_of(write_operator(tmp_path, name), [weights(*IMAGE)])
    require_equal(expected, result)


CONVOLUTIONS = {
    "strided": {"strides": [2, 1], "pads": [1, 0, 1, 0]},
    "uneven": {"pads": [0, 1, 2, 3]},
    "dilated": {"dilations": [2, 1]},
    "same": {"auto_pad": "SAME_UPPER"},
    "valid": {"auto_pad": "VALID"},
    "depthwise": {"group": 4},
}


def write_convolution(folder: Path, name: str) -> Path:
    """Write a convolution with these settings."""
    kernel = weights(4, 1 if name == "depthwise" else 4, *(3, 3) if name == "same" else (3, 2))
    return write(folder, [("Conv", ["x", "kernel"], "y", CONVOLUTIONS[name])], IMAGE, kernel=kernel)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_settings_of_convolutions(name: str, tmp_path: Path) -> None:
    expected, result, _ = outputs_of(write_convolution(tmp_path, name), [weights(*IMAGE)])
    require_equal(expected, result)


@pytest.mark.parametrize("settings", [{}, {"transB": 1}], ids=str)
def test_settings_of_products(settings: dict[str, Any], tmp_path: Path) -> None:
    kernel = weights(3, 5).T.copy() if settings.get("transB") else weights(3, 5)
    source = write(
        tmp_path, [("Gemm", ["x", "kernel", "bias"], "y", settings)], (3, 3), kernel=kernel, bias=weights(5)
    )
    expected, result, _ = outputs_of(source, [weights(3, 3)])
    require_equal(expected, result)


CELLS = {
    "LSTM": {},
    "GRU": {"linear_before_reset": 1},
    "GRU with reset first": {"linear_before_reset": 0},
    "RNN": {},
    "LSTM reverse": {"direction": "reverse"},
    "GRU bidirectional": {"direction": "bidirectional", "linear_before_reset": 1},
}


def write_keras_cell(folder: Path, cls: str, gates: int, bias: tuple[int, ...], **more: Any) -> Path:
    """Write a recurrent layer of Keras before a dense layer."""
    from tests.test_computation import node, write_functional

    settings = {"activation": "tanh", "recurrent_activation": "sigmoid", "use_bias": True, **more}
    layers = [
        node("x", [], "InputLayer", batch_shape=[None, None, 3]),
        node("layer", ["x"], cls, units=5, return_sequences=True, **settings),
        node("out", ["layer"], "Dense", units=2, activation="tanh", use_bias=True),
    ]
    arrays = {"dense": [weights(5, 2), weights(2)]}
    arrays[f"{cls.lower()}/cell"] = [weights(3, gates * 5), weights(5, gates * 5), weights(*bias)]
    return write_functional(folder, layers, ["x"], "out", arrays)


def write_cell(folder: Path, name: str) -> Path:
    """Write a recurrent layer: for ONNX, and for Keras where ONNX's has no counterpart in a conversion."""
    if "reset" in name:
        return write_keras_cell(folder, "GRU", 3, (15,), reset_after=False)
    op, settings = name.split()[0], CELLS[name]
    directions, gates = 1 + ("bidirectional" in name), {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    values = {"w": weights(directions, gates * 5, 3), "r": weights(directions, gates * 5, 5)}
    values["b"] = weights(directions, 2 * gates * 5)
    nodes = [(op, ["x", "w", "r", "b"], "y", {"hidden_size": 5, **settings})]
    return write(folder, nodes, (4, 2, 3), **values)


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_layers(name: str, tmp_path: Path) -> None:
    # No layer of PyTorch resets before the product, so that only names as they are fit such weights.
    suffix = "npz" if "reset" in name else "pt"
    expected, result, _ = outputs_of(write_cell(tmp_path, name), [weights(4, 2, 3)], suffix)
    require_equal(expected, result)


def run_in_keras(folder: Path) -> list[list[str]]:
    """Run the codes in a folder, in a process without PyTorch; return what each does, "" if it is right."""
    import runpy

    answers = []
    for code in sorted(folder.glob("*/model_code.py")):
        with np.load(code.with_name("known.npz")) as known:
            try:
                scope = runpy.run_path(str(code))
                (target,) = (path for path in code.parent.glob("out.*") if path.suffix in (".h5", ".index"))
                model = scope["load"](str(target).removesuffix(".index"))
                result = model(known["x"])
                result = np.asarray(result[0] if isinstance(result, tuple | list) else result)
                require_equal(known["y"], result)
                assert result.dtype == known["y"].dtype
                answers.append([code.parent.name, ""])
            except Exception as error:  # noqa: BLE001 - each code is tried
                answers.append([code.parent.name, f"{type(error).__name__}: {error}"])
    return answers


TIED: dict[str, list[tuple[str, list[str], str, dict[str, Any]]]] = {
    "products": [
        ("MatMul", ["x", "enc"], "h", {}),
        ("Relu", ["h"], "a", {}),
        ("Transpose", ["enc"], "t", {"perm": [1, 0]}),
        ("MatMul", ["a", "t"], "y", {}),
    ],
    "biases": [
        ("Gemm", ["x", "enc", "enc.bias"], "a", {}),
        ("Gemm", ["a", "enc", "dec.bias"], "y", {"transB": 1}),
    ],
    "biases without modules": [
        ("Gemm", ["x", "enc", "b"], "a", {}),
        ("Gemm", ["a", "enc", "c"], "y", {"transB": 1}),
    ],
    "one bias of two layers": [
        ("Gemm", ["x", "one.weight", "one.bias"], "a", {}),
        ("Gemm", ["a", "two.weight", "one.bias"], "y", {}),
    ],
}


def write_tied(folder: Path, name: str) -> Path:
    """Write two products that share a weight, transposed in the second, or a bias."""
    used = {tensor for _, names, _, _ in TIED[name] for tensor in names}
    shapes = {"enc": (3, 5), "b": (5,), "c": (3,), "enc.bias": (5,), "dec.bias": (3,)}
    shapes |= {"one.weight": (3, 5), "one.bias": (5,), "two.weight": (5, 5)}
    return write(folder, TIED[name], (4, 3), **{key: weights(*s) for key, s in shapes.items() if key in used})


WRITERS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "operators": (AFTER, write_operator, IMAGE),
    "convolutions": (CONVOLUTIONS, write_convolution, IMAGE),
    "cells": (CELLS, write_cell, (4, 2, 3)),
    "tied": (TIED, write_tied, (4, 3)),
}


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "kind", [pytest.param("operators", marks=pytest.mark.slow), "convolutions", "cells", "tied"]
)
def test_keras_computes_what_the_graph_does(kind: str, tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    names, make, shape = WRITERS[kind]
    unmapped = []
    for number, name in enumerate(names):
        folder = tmp_path / name
        folder.mkdir()
        source, (to, out) = make(folder, name), (("keras", "out.weights.h5"), ("tf", "out"))[number % 2]
        done = ckpttool.convert(str(source), str(folder / out), to=to, code=f"{folder}/model_code.py")
        if not done.written:
            unmapped.append(name)
            continue
        graph = read_graph(open_checkpoint(str(source)))
        assert graph is not None
        x = weights(*shape)
        np.savez(folder / "known.npz", x=x, y=next(iter(evaluate(graph, {"x": x}).values())))
    # A norm of images over their last axis, of which Keras's layers have none.
    assert unmapped == ["layer norm"] * (kind == "operators")
    answers = dict(tensorflow_child.run(__file__, "run_in_keras", tmp_path))
    assert answers == dict.fromkeys((name for name in names if name not in unmapped), "")


def test_a_split_gives_several_values(tmp_path: Path) -> None:
    nodes = [
        ("MatMul", ["x", "kernel"], "h", {}),
        ("Split", ["h", "sizes"], ["a", "b", "c"], {"axis": -1}),
        ("Concat", ["c", "a"], "y", {"axis": -1}),
    ]
    source = write(tmp_path, nodes, (2, 3), kernel=weights(3, 6), sizes=ints(1, 2, 3))
    expected, result, _ = outputs_of(source, [weights(2, 3)])
    require_equal(expected, result)


TURNED = {
    "undone": ([("Relu", ["a"], "b", {})], "b", 0),
    "scaled": ([("Mul", ["a", "two"], "b", {})], "b", 0),
    "of other axes": ([("Softmax", ["a"], "b", {"axis": 1})], "b", 2),
    "of a row": ([("Add", ["a", "row"], "b", {})], "b", 2),
    "used again": ([("Relu", ["a"], "c", {}), ("Add", ["a", "c"], "b", {})], "b", 2),
    "three times": ([("Transpose", ["a"], "b", {"perm": [0, 3, 1, 2]})], "b", 1),
}


@pytest.mark.parametrize("name", TURNED)
def test_transposes_that_undo_each_other_are_left_out(name: str, tmp_path: Path) -> None:
    between, last, left = TURNED[name]
    nodes = [
        ("Conv", ["x", "kernel"], "h", {}),
        ("Transpose", ["h"], "a", {"perm": [0, 2, 3, 1]}),
        *between,
        ("Transpose", [last], "d", {"perm": [0, 3, 1, 2]}),
        ("Sigmoid", ["d"], "y", {}),
    ]
    values = {"kernel": weights(4, 4, 3, 3), "two": np.float32(2), "row": weights(4)}
    expected, result, code = outputs_of(write(tmp_path, nodes, IMAGE, **values), [weights(*IMAGE)])
    require_equal(expected, result)
    assert code.count(".permute(") == left


def test_a_variable_is_free_after_its_last_use(tmp_path: Path) -> None:
    nodes = [
        ("MatMul", ["x", "kernel"], "1", {}),
        ("Relu", ["1"], "2", {}),
        ("Tanh", ["2"], "3", {}),
        ("Mul", ["2", "3"], "4", {}),
        ("Sub", ["half", "4"], "5", {}),
        ("Add", ["5", "1"], "y", {}),
    ]
    source = write(tmp_path, nodes, (3, 4), kernel=weights(4, 5), half=np.float32(0.5))
    expected, result, code = outputs_of(source, [weights(3, 4)])
    require_equal(expected, result)
    assert "v1 = " in code
    assert "v3 = " not in code


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool, tmp_path: Path) -> None:
    class Attention(torch.nn.Module):
        """One head of attention between two layers."""

        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.last = (torch.nn.Linear(8, size) for size in (8, 8, 8, 2))

        def forward(self, x: Any) -> Any:
            q, k, v = self.q(x), self.k(x), self.v(x)
            return self.last(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal))

    torch.jit.trace(Attention().eval(), torch.zeros(1, 5, 8)).save(str(tmp_path / "model.pt"))
    expected, result, _ = outputs_of(tmp_path / "model.pt", [weights(2, 5, 8)])
    require_equal(expected, result)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_scripted_memory_that_asks_for_its_rank(kind: str, tmp_path: Path) -> None:
    class Memory(torch.nn.Module):
        """A memory that begins with zeros, and a layer."""

        def __init__(self) -> None:
            super().__init__()
            self.memory, self.out = getattr(torch.nn, kind)(3, 4), torch.nn.Linear(4, 2)

        def forward(self, x):  # TorchScript reads annotations
            y, _ = self.memory(x)
            return self.out(torch.tanh(y[-1]))

    torch.jit.script(Memory().eval()).save(str(tmp_path / "model.pt"))
    expected, result, _ = outputs_of(tmp_path / "model.pt", [weights(5, 2, 3)])
    require_equal(expected, result)


class Layered(torch.nn.Module):
    """Layers of all kinds, and one tensor that is in none."""

    def __init__(self) -> None:
        super().__init__()
        nn = torch.nn
        self.image = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)
        )
        self.words, self.rows = nn.Embedding(7, 16), nn.Linear(16, 8)
        self.gate = nn.Linear(8, 8, bias=False)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.GroupNorm(2, 8)])
        self.memory = nn.GRU(8, 6, bidirectional=True)
        self.scale = nn.Parameter(torch.full((12,), 0.5))
        self.unused = nn.Linear(3, 2)
        self.register_buffer("chosen", torch.tensor([3, 1]))

    def forward(self, x: Any) -> Any:
        x = self.rows(self.image(x).flatten(1))
        x = x * torch.sigmoid(x) + self.gate(self.rows(self.words(self.chosen)))
        x = self.norms[1](self.norms[0](x))
        y, _ = self.memory(x.unsqueeze(0))
        return y[0] * self.scale


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_operators_whose_tensors_are_those_of_a_module_are_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layered()
    model(torch.randn(2, 2, 4, 4))
    torch.jit.trace(model.eval(), torch.zeros(2, 2, 4, 4)).save(str(tmp_path / "model.pt"))
    images = weights(2, 2, 4, 4)
    expected, result, code = outputs_of(tmp_path / "model.pt", [images])
    require_equal(expected, result)
    require_equal(model(torch.from_numpy(images)).detach().numpy(), result)
    scope: dict[str, Any] = {}
    exec(code, scope)
    own, written = dict(model.named_modules()), dict(scope["Model"]().named_modules())
    kinds = {
        name: type(module) for name, module in own.items() if [*module.parameters(recurse=False)] and name
    }
    # Numbers of constants look up rows of the matrix itself.
    kinds.pop("words")
    assert {name: type(written[name]) for name in kinds} == kinds
    assert {*scope["Model"]().state_dict()} == {*model.state_dict()}
    assert "F.silu" in code


@pytest.mark.parametrize("root", ["net.", "0.", "a.b.", "a.0."])
def test_names_above_all_modules_are_left_out(root: str, tmp_path: Path) -> None:
    values = {f"{root}{name}.weight": weights(4, 4) for name in ("2", "5")}
    last, nodes = "x", []
    for number, name in enumerate(values):
        nodes.append(("Gemm", [last, name], f"h{number}", {"transB": 1}))
        last = f"h{number}"
    source = write(tmp_path, [*nodes, ("Relu", [last], "y", {})], (3, 4), **values)
    expected, result, code = outputs_of(source, [weights(3, 4)])
    require_equal(expected, result)
    assert code.count("nn.Linear") == 2


class Tied(torch.nn.Module):
    """A layer whose matrix is used again by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.line(x) @ self.line.weight


def test_the_matrix_of_a_layer_may_be_used_again(tmp_path: Path) -> None:
    torch.jit.trace(Tied().eval(), torch.zeros(3, 4)).save(str(tmp_path / "model.pt"))
    expected, result, code = outputs_of(tmp_path / "model.pt", [weights(3, 4)])
    require_equal(expected, result)
    assert "self.line(x)" in code


@pytest.mark.parametrize("name", TIED)
def test_tied_weights_of_two_products(name: str, tmp_path: Path) -> None:
    source = write_tied(tmp_path, name)
    expected, result, _ = outputs_of(source, [weights(4, 3)])
    require_equal(expected, result)
    # The file has each vector of a layer, those of a tied one as well.
    stored = ckpttool.open(str(tmp_path / "model_out.pt")).tree
    count = sum(
        1 + len(stored.aliases.get(path, ())) for path, leaf in stored.tensors() if len(leaf.shape) == 1
    )
    assert count == sum(len(names) == 3 for op, names, _, _ in TIED[name] if op == "Gemm")


def test_layers_of_keras_have_attributes_of_their_own() -> None:
    names: list[tuple[str, ...]] = [("a", "b_c"), ("a_b", "c"), ("layer",), ("0",), ("stored",)]
    leaf = Leaf("float32", (3, 2), Inline(bytes(24)), "kernel")
    tensors = {(*one, "kernel"): leaf for one in names}
    modules = GraphModules(LANGUAGES["keras"], tensors)
    attributes = [modules.claim(one, ["kernel"], "keras.layers.Dense(2)") for one in names]
    assert len({*attributes}) == len(names)
    assert {"self.layer", "self.stored", "self.tensor"}.isdisjoint(attributes)
    assert all(attribute is not None and attribute[5:].isidentifier() for attribute in attributes)


REFUSED = {
    "operator": [("Mod", ["h", "two"], "y", {"fmod": 1})],
    "attribute": [("LSTM", ["x", "two", "two"], "y", {"clip": 1.0})],
    "window": [("MaxPool", ["h"], "y", {"kernel_shape": [2, 2], "ceil_mode": 1})],
    "padding": [("Conv", ["h", "kernel"], "y", {"auto_pad": "SAME_UPPER", "strides": [2, 2]})],
    "all axes": [("ReduceMean", ["h"], "y", {})],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_statement_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    values = {"kernel": weights(4, 4, 3, 3), "two": np.float32(2)}
    nodes = [("Conv", ["x", "kernel"], "h", {}), *REFUSED[name]]
    source = write(tmp_path, nodes, IMAGE, **values)
    refused(in_process("convert", source, tmp_path / "out.pt", "--code", tmp_path / "code.py"))
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


class Critic(torch.nn.Module):
    """Its weights alone are those of a critic, which is no policy."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, x: Any) -> Any:
        return self.critic(x)


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npz"])
def test_a_model_whose_weights_are_no_policy_is_written_from_its_graph(suffix: str, tmp_path: Path) -> None:
    x = weights(3, 5)
    torch.jit.trace(Critic().eval(), torch.from_numpy(x)).save(str(tmp_path / "critic.pt"))
    expected, result, code = outputs_of(tmp_path / "critic.pt", [x], suffix)
    require_equal(expected, result)
    if suffix == "npz":
        with np.load(tmp_path / "model_out.npz") as file:
            less = {name: file[name] for name in file if not name.endswith("weight")}
        np.savez(tmp_path / "less.npz", **less)
        scope: dict[str, Any] = {}
        exec(code, scope)
        with pytest.raises(RuntimeError, match="weight"):
            scope["load"](tmp_path / "less.npz")


@pytest.mark.parametrize("target", ["torch", "npz"])
def test_tensors_of_one_dotted_name_are_refused(target: str) -> None:
    paths = ((key("a"), key("b")), (key("a.b"),))
    leaves = {
        path: Leaf("float32", (len(path),), Inline(bytes(4 * len(path))), name)
        for path, name in zip(paths, ("a/b", "a.b"), strict=True)
    }
    plan = graph_code.GraphPlan(Tree(leaves), (), Tree(leaves), {})
    with pytest.raises(UnsupportedError) as refusal:
        graph_code.write_graph_code([graph_code.Method(Graph((), (), (), {}))], plan, target, ())
    assert "a.b" in str(refusal.value.found)


def test_a_scripted_model_with_batch_norms_and_branches(tmp_path: Path) -> None:
    class Block(torch.nn.Module):
        """A residual block."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.BatchNorm2d(4)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.norm(self.conv(x))) + x

    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(), Block(), torch.nn.Flatten(), torch.nn.Linear(64, 3))
    for _ in range(3):
        model(torch.randn(8, 4, 4, 4))
    torch.jit.trace(model.eval(), torch.zeros(1, 4, 4, 4)).save(str(tmp_path / "model.pt"))
    images = weights(2, 4, 4, 4)
    expected, result, code = outputs_of(tmp_path / "model.pt", [images])
    require_equal(expected, result)
    require_equal(model(torch.from_numpy(images)).detach().numpy(), result)
    assert "ckpttool" not in "\n".join(
        line for line in code.splitlines() if line.startswith(("import", "from"))
    )


def test_keras_layers_in_channels_last_order_use_the_reordered_weights(tmp_path: Path) -> None:
    from tests.test_computation import node, write_functional

    window = {"strides": [1, 1], "padding": "valid", "dilation_rate": [1, 1], "groups": 1, "use_bias": True}
    window["data_format"] = "channels_last"
    layers = [
        node("image", [], "InputLayer", batch_shape=[None, 5, 5, 2]),
        node("conv", ["image"], "Conv2D", filters=3, kernel_size=[3, 3], activation="relu", **window),
        node("flat", ["conv"], "Flatten", data_format="channels_last"),
        node("out", ["flat"], "Dense", units=4, activation="tanh", use_bias=True),
    ]
    arrays = {"conv2d": [weights(3, 3, 2, 3), weights(3)], "dense": [weights(27, 4), weights(4)]}
    file = write_functional(tmp_path, layers, ["image"], "out", arrays)
    expected, result, _ = outputs_of(file, [weights(2, 5, 5, 2)])
    require_equal(expected, result)


@pytest.mark.parametrize("rule", [ChannelOrder(1, "first", ((3, 2), (1, 2))), BlockOrder(0, (1, 0))])
def test_a_stored_order_of_entries_is_undone(rule: ChannelOrder | BlockOrder) -> None:
    array = weights(4, 8, 3)
    leaf = Leaf("float32", array.shape, Inline(array.tobytes()), "a")
    plan = graph_code.GraphPlan(Tree({}), (), Tree({}), {})
    writer = graph_code._GraphWriter(Graph((), (), (), {}), plan, LANGUAGES["torch"])
    text = writer._changed("x", leaf, rule)
    result = eval(text, {"torch": torch, "x": torch.from_numpy(array)}).numpy()
    np.testing.assert_array_equal(result, rule.apply(array))


@pytest.mark.parametrize(
    ("cls", "gates", "bias", "more"), [("LSTM", 4, (20,), {}), ("GRU", 3, (2, 15), {"reset_after": True})]
)
def test_keras_memory_has_the_batch_first(
    cls: str, gates: int, bias: tuple[int, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    source = write_keras_cell(tmp_path, cls, gates, bias, **more)
    expected, result, _ = outputs_of(source, [weights(2, 4, 3)])
    require_equal(expected, result)


def test_code_states_what_the_conversion_assumed(tmp_path: Path) -> None:
    from tests.test_computation import node, write_functional

    policy = {"dtype": {"class_name": "DTypePolicy", "config": {"name": "mixed_float16"}}}
    layers = [
        node("x", [], "InputLayer", batch_shape=[None, 3]),
        node("layer", ["x"], "Dense", units=5, activation="relu", use_bias=True, **policy),
        node("out", ["layer"], "Dense", units=2, activation="tanh", use_bias=True, **policy),
    ]
    arrays = {"dense": [weights(3, 5), weights(5)], "dense_1": [weights(5, 2), weights(2)]}
    source = write_functional(tmp_path, layers, ["x"], "out", arrays)
    facts = AgentFacts(action_low=[-1.0], action_high=[1.0])
    done = ckpttool.convert(str(source), str(tmp_path / "out.pt"), to="torch", code="-", facts=facts)
    (types,) = (item for item in done.ledger if item.use == "assumed" and "mixed_float16" in item.value)
    assert types.sentence in str(done.code)


def test_whole_numbers_are_divided_without_a_rest(tmp_path: Path) -> None:
    nodes = [
        ("MatMul", ["x", "kernel"], "h", {}),
        ("Shape", ["h"], "s", {}),
        ("Div", ["s", "two"], "y", {}),
    ]
    source = write(tmp_path, nodes, (3, 3), kernel=weights(3, 5), two=ints(2, 2))
    expected, result, _ = outputs_of(source, [weights(3, 3)])
    assert expected.tolist() == result.tolist() == [1, 2]


# Policies with an encoder or memory, whose written weights alone are no policy.


def write_atari(folder: Path) -> tuple[Path, Any]:
    nn = torch.nn
    layers = [
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
    ]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())
    model = nn.ModuleDict({"network": network, "actor": nn.Linear(512, 3), "critic": nn.Linear(512, 1)})
    torch.save(model.state_dict(), folder / "ppo.cleanrl_model")
    return folder / "ppo.cleanrl_model", np.random.default_rng(0).integers(0, 256, (3, 4, 84, 84))


def write_sb3(name: str, kind: str) -> Any:
    def write_agent(folder: Path) -> tuple[Path, Any]:
        library = pytest.importorskip("stable_baselines3")
        spaces, env = pytest.importorskip("gymnasium").spaces, pytest.importorskip("gymnasium").Env()
        rng = np.random.default_rng(0)
        image, actions = spaces.Box(0, 255, (3, 36, 36), np.uint8), spaces.Box(-2, 2, (2,), np.float32)
        pixels = rng.integers(0, 256, (3, 3, 36, 36)).astype(np.uint8)
        env.observation_space, env.action_space, observations = image, actions, pixels
        if kind == "MultiInputPolicy":
            row = spaces.Box(-1, 1, (5,), np.float32)
            env.observation_space = spaces.Dict({"image": image, "row": row})
            observations = {"image": pixels, "row": rng.normal(size=(3, 5)).astype(np.float32)}
        if name == "DQN":
            env.action_space = spaces.Discrete(4, start=2)
        settings = {"n_steps": 8, "batch_size": 8} if name == "PPO" else {"buffer_size": 10}
        getattr(library, name)(kind, env, **settings).save(folder / "agent.zip")
        return folder / "agent.zip", observations

    return write_agent


ENCODERS = {
    "atari": write_atari,
    "cnn": write_sb3("PPO", "CnnPolicy"),
    "discrete cnn": write_sb3("DQN", "CnnPolicy"),
    "several inputs": write_sb3("PPO", "MultiInputPolicy"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
@pytest.mark.parametrize("name", ["cnn", "discrete cnn"])
def test_files_with_one_name_of_each_shared_tensor(name: str, suffix: str, tmp_path: Path) -> None:
    source, observations = ENCODERS[name](tmp_path)
    done = ckpttool.convert(str(source), f"{tmp_path / 'out'}.{suffix}", to=suffix, code="-")
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    actions = scope["act"](scope["load"](done.target), observations)
    np.testing.assert_allclose(actions, ckpttool.load_agent(str(source)).act(observations), atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENCODERS)
def test_code_of_a_policy_with_an_encoder_acts_as_the_source(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, observations = ENCODERS[name](tmp_path)
    done = ckpttool.convert(str(source), str(tmp_path / "out.pt"), to="torch", code="-")
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    model = scope["load"](done.target)
    inputs = observations.values() if isinstance(observations, dict) else [observations]
    actions, expected = scope["act"](model, *inputs), ckpttool.load_agent(str(source)).act(observations)
    assert actions.shape == expected.shape
    assert actions.dtype.kind == expected.dtype.kind
    np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-5)
    state = torch.load(done.target, weights_only=True)
    nested = (
        next(value for value in state.values() if isinstance(value, dict))
        if source.suffix == ".zip"
        else state
    )
    nested.pop(next(iter(nested)))
    torch.save(state, tmp_path / "less.pt")
    with pytest.raises(RuntimeError):
        scope["load"](str(tmp_path / "less.pt"))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_code_of_a_policy_with_memory_returns_its_states(kind: str, tmp_path: Path) -> None:
    nn = torch.nn
    torch.manual_seed(0)
    actor = nn.ModuleDict({"memory": getattr(nn, kind)(3, 6), "l1": nn.Linear(6, 5), "l2": nn.Linear(5, 2)})
    bounds = {"action_scale": torch.ones(2), "action_bias": torch.zeros(2)}
    source = str(tmp_path / "a_agent.pt")
    torch.save({"actor": {**actor.state_dict(), **bounds}, "total_it": 5}, source)
    done = ckpttool.convert(source, str(tmp_path / "out.pt"), to="torch", code="-")
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    model, agent = scope["load"](done.target), restore_agent(source)
    part = agent.playable("actor")
    assert part is not None
    settings, _ = derive_network_settings(agent, ActionBounds((), (), None))
    network = policy_network(agent.tree, part, settings, agent.front("actor"))
    policy = numpy_backend.build(network, "cpu")
    states: Any = [np.zeros((7, *slot.shape), np.float32) for slot in network.states]
    own: list[Any] = []  # zeros in the first step
    for step in range(3):
        observations = np.random.default_rng(step).normal(size=(7, 3)).astype(np.float32)
        expected, states = policy.step(observations, tuple(states))
        actions, *own = scope["act"](model, observations, *own)
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_code_of_a_policy_with_batch_norms_computes_them_from_the_stored_statistics(tmp_path: Path) -> None:
    from tests.test_fronts import crossq, sb3

    module = crossq()
    data = sb3.settings(sb3.SAC_POLICY, policy_kwargs={"net_arch": [5, 4]})
    source = str(sb3.put(tmp_path / "a.zip", sb3.members({"policy": module.state_dict()}, data)))
    done = ckpttool.convert(source, str(tmp_path / "out.pt"), to="torch", code="-")
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    model, observations = scope["load"](done.target), weights(7, sb3.OBS)
    with torch.no_grad():
        squashed = torch.tanh(module.actor.mu(module.actor.latent_pi(torch.tensor(observations)))).numpy()
    low, high = np.array(sb3.LOW), np.array(sb3.HIGH)
    actions = scope["act"](model, observations)
    np.testing.assert_allclose(actions, low + (squashed + 1) / 2 * (high - low), rtol=1e-5, atol=1e-5)


def act_in_keras(folder: Path) -> dict[str, list[float]]:
    """Run the policies in a folder for steps; return how far each step's actions are from the known ones."""
    import runpy

    apart = {}
    for code in sorted(folder.glob("*/code.py")):
        scope = runpy.run_path(str(code))
        (target,) = (path for path in code.parent.glob("out.*") if path.suffix in (".h5", ".index"))
        model, states, steps = scope["load"](str(target).removesuffix(".index")), [], []
        with np.load(code.with_name("known.npz")) as known:
            for step in range(2):
                inputs = [known[name] for name in known.files if name.startswith(f"x{step}")]
                result = scope["act"](model, *inputs, *states)
                actions, *states = result if isinstance(result, tuple) else (result,)
                steps.append(float(np.abs(actions - known[f"y{step}"]).max()))
        apart[code.parent.name] = steps
    return apart


def write_memory(folder: Path) -> tuple[Path, Any]:
    nn = torch.nn
    actor = nn.ModuleDict({"memory": nn.LSTM(3, 6), "l1": nn.Linear(6, 5), "l2": nn.Linear(5, 2)})
    bounds = {"action_scale": torch.ones(2), "action_bias": torch.zeros(2)}
    torch.save({"actor": {**actor.state_dict(), **bounds}, "total_it": 5}, folder / "a_agent.pt")
    return folder / "a_agent.pt", weights(7, 3)


def write_norms(folder: Path) -> tuple[Path, Any]:
    from tests.test_fronts import crossq, sb3

    members = sb3.members(
        {"policy": crossq().state_dict()}, sb3.settings(sb3.SAC_POLICY, policy_kwargs={"net_arch": [5, 4]})
    )
    return sb3.put(folder / "a.zip", members), weights(7, sb3.OBS)


def write_discrete(folder: Path) -> tuple[Path, Any]:
    library, gymnasium = pytest.importorskip("stable_baselines3"), pytest.importorskip("gymnasium")
    env = gymnasium.Env()
    env.observation_space, env.action_space = gymnasium.spaces.Discrete(6), gymnasium.spaces.Discrete(4)
    library.PPO("MlpPolicy", env, n_steps=8, batch_size=8).save(folder / "agent.zip")
    return folder / "agent.zip", np.arange(6)


@pytest.mark.tensorflow
@pytest.mark.filterwarnings("ignore")
def test_policies_of_every_kind_act_in_keras(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    torch.manual_seed(0)
    kinds = {**ENCODERS, "memory": write_memory, "norms": write_norms, "discrete": write_discrete}
    for name, write_agent in kinds.items():
        folder = tmp_path / name
        folder.mkdir()
        source, observations = write_agent(folder)
        # A weight file of Keras has no place for the library's own norms.
        to, out = ("tf", "out") if name == "norms" else ("keras", "out.weights.h5")
        ckpttool.convert(str(source), str(folder / out), to=to, code=f"{folder}/code.py")
        agent, state, known = ckpttool.load_agent(str(source)), None, {}
        for step in range(2):
            actions, state = agent.predict(observations, state)
            rows = observations.values() if isinstance(observations, dict) else [observations]
            known |= {f"x{step}_{number}": row for number, row in enumerate(rows)} | {f"y{step}": actions}
        np.savez(folder / "known.npz", **known)
    apart = tensorflow_child.run(__file__, "act_in_keras", tmp_path)
    assert apart.keys() == kinds.keys()
    assert max(map(max, apart.values())) < 1e-5, apart
