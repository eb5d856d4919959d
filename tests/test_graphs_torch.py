"""Graphs of pickled PyTorch modules: each layer and setting computes what PyTorch does with the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.core import UnsupportedError
from ckpttool.graphs import Graph, evaluate, read_graph
from ckpttool.graphs.operators import is_known
from ckpttool.graphs.torch_modules import TorchLayerShapes

VECTOR, SEQUENCE, IMAGE, VOLUME = (3, 6), (3, 4, 8), (2, 4, 6, 6), (2, 2, 4, 5, 4)
ACTIVATIONS = [
    *(nn.ReLU(), nn.Tanh(), nn.Sigmoid(), nn.Softsign(), nn.Mish(), nn.SELU(), nn.SiLU(), nn.Hardswish()),
    *(nn.LeakyReLU(0.2), nn.ELU(0.5), nn.CELU(0.7), nn.Softshrink(0.3), nn.Hardshrink(0.3), nn.Hardsigmoid()),
    *(nn.Tanhshrink(), nn.LogSigmoid(), nn.Hardtanh(-0.5, 0.7), nn.ReLU6(), nn.Softplus(), nn.Softplus(2.0)),
    *(nn.GELU(), nn.GELU("tanh"), nn.GLU(), nn.PReLU(), nn.Softmax(dim=-1), nn.LogSoftmax(dim=1)),
    *(nn.Identity(), nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)),
]
LAYERS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Linear(6, 5), VECTOR),
    (nn.Linear(8, 5, bias=False), SEQUENCE),
    (nn.BatchNorm1d(6, eps=0.1), VECTOR),
    (nn.BatchNorm1d(4, affine=False), SEQUENCE),
    (nn.BatchNorm2d(4), IMAGE),
    (nn.InstanceNorm2d(4), IMAGE),
    (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), SEQUENCE),
    (nn.GroupNorm(2, 4), IMAGE),
    (nn.GroupNorm(2, 4, affine=False), SEQUENCE),
    (nn.LayerNorm(8), SEQUENCE),
    (nn.LayerNorm((6, 6), elementwise_affine=False), IMAGE),
    (nn.LayerNorm(6, bias=False), VECTOR),
    (nn.RMSNorm(6), VECTOR),
    (nn.Flatten(), IMAGE),
    (nn.Conv1d(4, 3, 3, padding=2, dilation=2), SEQUENCE),
    (nn.Conv2d(4, 3, 3, stride=2, bias=False), IMAGE),
    (nn.Conv2d(4, 6, (3, 5), groups=2, dilation=(1, 2), padding="same"), IMAGE),
    (nn.Conv2d(4, 3, 3, padding=1, padding_mode="reflect"), IMAGE),
    (nn.Conv2d(4, 3, 3, padding="same", padding_mode="circular"), IMAGE),
    (nn.Conv2d(4, 3, 3, padding="valid", padding_mode="replicate"), IMAGE),
    (nn.Conv3d(2, 3, 2), VOLUME),
    (nn.ConvTranspose1d(4, 3, 3, stride=2), SEQUENCE),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), IMAGE),
    (nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True), IMAGE),
    (nn.MaxPool1d(2, dilation=2), SEQUENCE),
    (nn.AvgPool2d(3, stride=2, padding=1), IMAGE),
    (nn.AvgPool2d(2, stride=3, ceil_mode=True, count_include_pad=False), IMAGE),
    (nn.AvgPool3d(2), VOLUME),
    (nn.AdaptiveAvgPool2d(1), IMAGE),
    (nn.AdaptiveMaxPool1d(1), SEQUENCE),
    (nn.ZeroPad2d((1, 2, 0, 1)), IMAGE),
    (nn.ConstantPad1d(2, 1.5), SEQUENCE),
    (nn.ReflectionPad2d(2), IMAGE),
    (nn.ReplicationPad1d((1, 2)), SEQUENCE),
    (nn.CircularPad2d(1), IMAGE),
    (nn.Upsample(scale_factor=2), IMAGE),
    (
        nn.Sequential(
            nn.Conv2d(4, 3, 3), nn.ReLU(), nn.Flatten(), nn.Sequential(nn.Linear(48, 2), nn.Tanh())
        ),
        IMAGE,
    ),
    (nn.Sequential(), VECTOR),
    (nn.Softmin(dim=-1), VECTOR),
    (nn.Softplus(2.0, threshold=1.5), VECTOR),
    (nn.Threshold(0.1, 2.0), VECTOR),
    (nn.RReLU(0.1, 0.3), VECTOR),
    (nn.Softmax2d(), IMAGE),
    (nn.AvgPool2d(2, divisor_override=3), IMAGE),
    (nn.LPPool2d(2, 2), IMAGE),
    (nn.UpsamplingBilinear2d(scale_factor=2), IMAGE),
    (nn.Upsample(scale_factor=1.5, mode="bilinear"), IMAGE),
    (nn.Upsample(size=(5, 9), mode="bicubic", align_corners=True), IMAGE),
    (nn.RNN(8, 5, nonlinearity="relu", bias=False), SEQUENCE),
    (nn.GRU(8, 5, 2), SEQUENCE),
    (nn.LSTM(8, 5, 2, bidirectional=True, batch_first=True), SEQUENCE),
    (nn.LSTMCell(6, 3), VECTOR),
    (nn.GRUCell(6, 3), VECTOR),
    (nn.RNNCell(6, 3, nonlinearity="relu"), VECTOR),
]
# Modules whose operators depend on the shape of the input, which is not in the file.
SHAPED: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Flatten(2), IMAGE),
    (nn.Unflatten(1, (2, -1)), IMAGE),
    (nn.ChannelShuffle(2), IMAGE),
    (nn.PixelShuffle(2), IMAGE),
    (nn.PixelUnshuffle(2), IMAGE),
    (nn.PReLU(4), IMAGE),
    (nn.AdaptiveAvgPool2d((4, None)), IMAGE),
    (nn.AdaptiveMaxPool2d((5, 2)), IMAGE),
    (nn.LocalResponseNorm(2, alpha=0.5), IMAGE),
    (nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    (nn.BatchNorm1d(6, track_running_stats=False), VECTOR),
    (nn.LSTM(8, 5, 2, bidirectional=True, proj_size=3, batch_first=True), SEQUENCE),
    (nn.LSTM(8, 5, proj_size=3, bias=False), SEQUENCE),
    (nn.MultiheadAttention(8, 2), SEQUENCE),
    (nn.MultiheadAttention(8, 2, bias=False, batch_first=True), SEQUENCE),
]


def read_module(module: nn.Module, path: Path, **settings: Any) -> Graph:
    torch.save(module, path, **settings)
    graph = read_graph(ckpttool.open(str(path)))
    assert graph is not None
    return graph


def set_numbers(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                numbers = torch.randn(tensor.shape, generator=generator) * 0.4
                tensor.copy_(numbers.abs() + 0.1 if name.endswith("var") else numbers)


def assert_same_results(graph: Graph, module: nn.Module, x: torch.Tensor) -> None:
    assert [node.op for node in graph.nodes if not is_known(node.op)] == []
    with torch.no_grad():
        results = module.eval()(x)
    (value,) = graph.inputs
    # An LSTM returns (steps, (states, cells)).
    expected = list(tensors(results))
    for output, tensor in zip(evaluate(graph, {value.name: x.numpy()}).values(), expected, strict=True):
        assert_close(output, tensor.numpy())


def tensors(results: Any) -> Iterator[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        yield results
    else:
        for result in results:
            yield from tensors(result)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert np.abs(actual - expected).max() <= 1e-6 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    ("module", "shape"),
    [*((activation, VECTOR) for activation in ACTIVATIONS), *LAYERS],
    ids=lambda case: type(case).__name__,
)
def test_every_layer_computes_what_pytorch_does(
    module: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    set_numbers(module)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert_same_results(read_module(module, tmp_path / "m.pt"), module, x)


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # of PyTorch, on its own speed
@pytest.mark.parametrize(("module", "shape"), SHAPED, ids=lambda case: type(case).__name__)
def test_a_layer_computes_what_pytorch_does_for_a_shape(
    module: nn.Module, shape: tuple[int, ...], tmp_path: Path
) -> None:
    set_numbers(module)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    torch.save(module, tmp_path / "m.pt")
    tree = ckpttool.open(str(tmp_path / "m.pt")).tree
    cls = tree.containers[()].name
    graph = TorchLayerShapes(tree).graph((), str(cls), shape)
    outputs = list(evaluate(graph, {graph.inputs[0].name: x.numpy()}).values())
    with torch.no_grad():
        results = module.eval()(*[x] * (3 if isinstance(module, nn.MultiheadAttention) else 1))
    assert_close(outputs[0], next(tensors(results)).numpy())
    assert TorchLayerShapes(tree).infer((), str(cls), shape)[0] == outputs[0].shape


def test_the_default_epsilon_of_a_norm_is_that_of_its_type(tmp_path: Path) -> None:
    # Numbers so small that the epsilon decides.
    for dtype in (torch.float32, torch.float64):
        module = nn.RMSNorm(6).to(dtype)
        x = torch.full(VECTOR, 1e-4, dtype=dtype)
        assert_same_results(read_module(module, tmp_path / "m.pt"), module, x)


def test_a_layer_behind_one_with_several_results_is_opaque(tmp_path: Path) -> None:
    for module in (nn.Tanh(), nn.Sequential(nn.Tanh(), nn.ReLU())):
        graph = read_module(nn.Sequential(nn.LSTM(8, 5), module, nn.ELU()), tmp_path / "m.pt")
        assert [node.op for node in graph.nodes if not is_known(node.op)] == ["torch.Tanh"]


def test_an_embedding_takes_integers(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2))
    graph = read_module(module, tmp_path / "m.pt", _use_new_zipfile_serialization=False)
    assert graph.inputs[0].dtype == "int64"
    assert_same_results(graph, module, torch.tensor([[1, 2], [6, 0]]))


def test_a_layer_that_is_used_twice_keeps_all_its_tensors(tmp_path: Path) -> None:
    layer, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight, other.bias = layer.weight, layer.bias
    module = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), other)
    set_numbers(module)
    x = torch.randn(VECTOR, generator=torch.Generator().manual_seed(1))
    assert_same_results(read_module(module, tmp_path / "m.pt"), module, x)


class Doubled(nn.Linear):
    """A class of the user."""


def add_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(print)
    return module


def change(module: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Doubled(6, 6),
        add_hook(nn.Linear(6, 6)),
        add_hook(nn.Sequential(nn.Linear(6, 6))),
        change(nn.Linear(6, 6), new_setting=3),
        change(nn.Linear(6, 6), extra=nn.Parameter(torch.zeros(2))),
        change(nn.Tanh(), forward=torch.relu),
        nn.Softmax(),
        nn.Bilinear(2, 2, 2),
        nn.AdaptiveAvgPool1d(3),
        nn.utils.spectral_norm(nn.Linear(6, 6)),
        nn.MultiheadAttention(6, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_not_understood_is_listed_and_refused_by_its_class(module: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save(nn.Sequential(nn.Linear(6, 6), module), path)
    graph = read_graph(ckpttool.open(str(path)))
    assert graph is not None
    opaque = [node for node in graph.nodes if not is_known(node.op)]
    assert [node.scope for node in opaque] == [("1",)]
    assert opaque[0].op.removeprefix("torch.") == type(module).__name__
    with pytest.raises(UnsupportedError) as error:
        evaluate(graph, {"input": np.zeros(VECTOR, np.float32)})
    assert error.value.found == opaque[0].op


def test_other_files_record_no_computation(tmp_path: Path) -> None:
    for value in (nn.Linear(2, 2).state_dict(), Doubled(2, 2), {"model": nn.Linear(2, 2)}):
        torch.save(value, tmp_path / "m.pt")
        assert read_graph(ckpttool.open(str(tmp_path / "m.pt"))) is None


def test_tensors_stay_leaves_by_path(tmp_path: Path) -> None:
    graph = read_module(nn.Sequential(nn.Sequential(nn.Linear(2, 3))), tmp_path / "m.pt")
    constant = graph.constants["0.0.weight/transpose"]
    assert [step.value for step in constant.path or ()] == [
        "_modules",
        "0",
        "_modules",
        "0",
        "_parameters",
        "weight",
    ]
    assert (constant.shape, constant.rule.name) == ((2, 3), "transpose")
