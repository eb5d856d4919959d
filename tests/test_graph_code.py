"""`convert --code` of models with a graph: the code loads strictly and computes what the graph does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.formats import open_checkpoint
from ckpttool.graphs import evaluate, read_graph
from tests.conftest import in_process, refused

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def outputs_of(source: Path, inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, str]:
    """Return what the graph of a file computes, what the written code computes, and the code."""
    target, code = source.with_name("model_out.pt"), source.with_name("model_code.py")
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
    tensors = [onnx.numpy_helper.from_array(np.asarray(each), name) for name, each in values.items()]
    made = [helper.make_node(op, names, [out], **settings) for op, names, out, settings in nodes]
    ends = [helper.make_tensor_value_info("x", 1, extents), helper.make_tensor_value_info("y", 1, None)]
    graph = helper.make_graph(made, "g", ends[:1], ends[1:], tensors)
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
}


@pytest.mark.parametrize("name", AFTER)
def test_each_operator_is_written_as_it_is_computed(name: str, tmp_path: Path) -> None:
    op, settings, more = AFTER[name]
    kernel = {"kernel": weights(4, 4, 3, 3), "bias": weights(4)}
    nodes = [
        ("Conv", ["x", "kernel", "bias"], "h", {"pads": [1, 1, 1, 1]}),
        (op, ["h", *more], "y", settings),
    ]
    expected, result, _ = outputs_of(write(tmp_path, nodes, IMAGE, **kernel, **more), [weights(*IMAGE)])
    require_equal(expected, result)


CONVOLUTIONS = {
    "strided": {"strides": [2, 1], "pads": [1, 0, 1, 0]},
    "uneven": {"pads": [0, 1, 2, 3]},
    "dilated": {"dilations": [2, 1]},
    "same": {"auto_pad": "SAME_UPPER"},
    "valid": {"auto_pad": "VALID"},
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_settings_of_convolutions(name: str, tmp_path: Path) -> None:
    settings = CONVOLUTIONS[name]
    kernel = weights(4, 4, 3, 3 if name == "same" else 2)
    source = write(tmp_path, [("Conv", ["x", "kernel"], "y", settings)], IMAGE, kernel=kernel)
    expected, result, _ = outputs_of(source, [weights(*IMAGE)])
    require_equal(expected, result)


@pytest.mark.parametrize("settings", [{}, {"transB": 1}], ids=str)
def test_settings_of_products(settings: dict[str, Any], tmp_path: Path) -> None:
    kernel = weights(3, 5).T.copy() if settings.get("transB") else weights(3, 5)
    source = write(
        tmp_path, [("Gemm", ["x", "kernel", "bias"], "y", settings)], (3, 3), kernel=kernel, bias=weights(5)
    )
    expected, result, _ = outputs_of(source, [weights(3, 3)])
    require_equal(expected, result)


REFUSED = {
    "operator": [("Mod", ["h", "two"], "y", {"fmod": 1})],
    "attribute": [("Softplus", ["h"], "y", {})],
    "window": [("MaxPool", ["h"], "y", {"kernel_shape": [2, 2], "ceil_mode": 1})],
    "padding": [("Conv", ["h", "kernel"], "y", {"auto_pad": "SAME_UPPER", "strides": [2, 2]})],
    "whole numbers": [("Shape", ["h"], "s", {}), ("Div", ["s", "s"], "y", {})],
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


def test_a_model_whose_weights_are_no_policy_is_written_from_its_graph(tmp_path: Path) -> None:
    x = weights(3, 5)
    torch.jit.trace(Critic().eval(), torch.from_numpy(x)).save(str(tmp_path / "critic.pt"))
    expected, result, _ = outputs_of(tmp_path / "critic.pt", [x])
    require_equal(expected, result)


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
