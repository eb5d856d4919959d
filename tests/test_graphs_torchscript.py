"""Graphs of TorchScript archives: layers and operations compute what PyTorch computes from the same file."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import FormatError, UnsupportedError
from ckpttool.graphs import Graph, evaluate, read_graph, torchscript
from ckpttool.graphs.graph import inline_constant
from ckpttool.graphs.operators import is_known
from ckpttool.graphs.weights import extract_module

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Code(nn.Module):
    """A module whose `forward` is one function; it must be traced."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Caller(nn.Module):
    """A module that calls a recurrent layer, whose scripted form has several methods."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: torch.Tensor):
        return self.layer(value)


class StateCaller(Caller):
    def forward(self, value: torch.Tensor, h: torch.Tensor, c: torch.Tensor):
        return self.layer(value, (h, c))


def x(*shape: int) -> Any:
    return torch.from_numpy(np.random.default_rng(len(shape)).normal(size=shape).astype("float32"))


VECTOR, MATRIX, SERIES, IMAGE, VOLUME = x(6), x(4, 6), x(2, 4, 9), x(2, 4, 7, 8), x(2, 2, 4, 5, 6)
WHOLE = torch.tensor([[3, -2, 0, 5]])
# Layers, with inputs; each is scripted and traced.
LAYERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "Linear": (lambda: nn.Linear(6, 3), (MATRIX,)),
    "Linear of a vector": (lambda: nn.Linear(6, 3, bias=False), (VECTOR,)),
    "Bilinear": (lambda: nn.Bilinear(6, 6, 2), (MATRIX, MATRIX)),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, 2, 1, 2, groups=2), (SERIES,)),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), bias=False), (IMAGE,)),
    "Conv2d same": (lambda: nn.Conv2d(4, 4, 4, padding="same", groups=4), (IMAGE,)),
    "Conv2d valid": (lambda: nn.Conv2d(4, 4, 2, padding="valid"), (IMAGE,)),
    "Conv2d reflect": (lambda: nn.Conv2d(4, 2, 3, padding=2, padding_mode="reflect"), (IMAGE,)),
    "Conv2d replicate": (lambda: nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="replicate"), (IMAGE,)),
    "Conv2d circular": (lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"), (IMAGE,)),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2, 2), (VOLUME,)),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2, dilation=2), (SERIES,)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, (2, 3), 1), (IMAGE,)),
    "ConvTranspose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, 2), (VOLUME,)),
    "MaxPool1d": (lambda: nn.MaxPool1d(3, 2, 1), (SERIES,)),
    "MaxPool2d": (lambda: nn.MaxPool2d((3, 2), (2, 1), 1, 2, ceil_mode=True), (IMAGE,)),
    "MaxPool3d": (lambda: nn.MaxPool3d(2), (VOLUME,)),
    "AvgPool1d": (lambda: nn.AvgPool1d(3, 2, 1), (SERIES,)),
    "AvgPool2d": (lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (IMAGE,)),
    "AvgPool3d": (lambda: nn.AvgPool3d(2), (VOLUME,)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(1), (IMAGE,)),
    "AdaptiveMaxPool1d": (lambda: nn.AdaptiveMaxPool1d(1), (SERIES,)),
    "LPPool2d": (lambda: nn.LPPool2d(2, 2), (IMAGE.abs(),)),
    "BatchNorm1d": (lambda: moved(nn.BatchNorm1d(6, eps=0.1)), (MATRIX,)),
    "BatchNorm2d": (lambda: moved(nn.BatchNorm2d(4, affine=False)), (IMAGE,)),
    "BatchNorm of batches": (lambda: nn.BatchNorm1d(6, track_running_stats=False), (MATRIX,)),
    "InstanceNorm2d": (lambda: moved(nn.InstanceNorm2d(4, affine=True)), (IMAGE,)),
    "InstanceNorm with statistics": (
        lambda: moved(nn.InstanceNorm1d(4, track_running_stats=True)),
        (SERIES,),
    ),
    "LayerNorm": (lambda: moved(nn.LayerNorm((7, 8), eps=0.01)), (IMAGE,)),
    "LayerNorm without weights": (lambda: nn.LayerNorm(6, elementwise_affine=False), (MATRIX,)),
    "LayerNorm without bias": (lambda: moved(nn.LayerNorm(6, bias=False)), (MATRIX,)),
    "RMSNorm": (lambda: moved(nn.RMSNorm(6)), (MATRIX,)),
    "RMSNorm with epsilon": (lambda: moved(nn.RMSNorm(6, eps=0.1)), (MATRIX,)),
    "GroupNorm": (lambda: moved(nn.GroupNorm(2, 4)), (IMAGE,)),
    "GroupNorm without weights": (lambda: nn.GroupNorm(2, 4, affine=False), (IMAGE,)),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(3), (IMAGE,)),
    "Embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), (WHOLE.abs(),)),
    "Dropout": (lambda: nn.Dropout(0.9), (MATRIX,)),
    "Flatten": (lambda: nn.Flatten(), (IMAGE,)),
    "Flatten of axes": (lambda: nn.Flatten(1, 2), (IMAGE,)),
    "Unflatten": (lambda: nn.Unflatten(1, (2, 3)), (MATRIX,)),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), (IMAGE,)),
    "PixelUnshuffle": (lambda: nn.PixelUnshuffle(2), (x(1, 3, 4, 6),)),
    "ConstantPad2d": (lambda: nn.ConstantPad2d((1, 0, -1, 2), 3.5), (IMAGE,)),
    "ReflectionPad1d": (lambda: nn.ReflectionPad1d((1, 3)), (SERIES,)),
    "ReplicationPad2d": (lambda: nn.ReplicationPad2d(2), (IMAGE,)),
    "CircularPad1d": (lambda: nn.CircularPad1d((1, 2)), (SERIES,)),
    "ZeroPad2d": (lambda: nn.ZeroPad2d(1), (IMAGE,)),
    "Upsample nearest": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=2)), (IMAGE,)),
    "Upsample to a size": (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample((11, 5))), (IMAGE,)),
    "Upsample bilinear": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=(1.5, 2), mode="bilinear")),
        (IMAGE,),
    ),
    "Upsample corners": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample((11, 5), mode="bilinear", align_corners=True)),
        (IMAGE,),
    ),
    "Upsample bicubic": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample((11, 12), mode="bicubic")),
        (IMAGE,),
    ),
    "Upsample linear": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.Upsample(13, mode="linear")), (SERIES,)),
    "PReLU": (lambda: nn.PReLU(4, 0.3), (IMAGE,)),
    "PReLU of one slope": (lambda: nn.PReLU(), (VECTOR,)),
    "Softmax": (lambda: nn.Softmax(1), (IMAGE,)),
    "Softmax2d": (lambda: nn.Softmax2d(), (IMAGE,)),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), (MATRIX,)),
    "LSTM": (lambda: Caller(nn.LSTM(9, 5)), (SERIES,)),
    "LSTM of layers": (
        lambda: Caller(nn.LSTM(9, 5, 2, batch_first=True, bidirectional=True, dropout=0.5)),
        (SERIES,),
    ),
    "LSTM with states": (lambda: StateCaller(nn.LSTM(9, 5, bias=False)), (SERIES, x(1, 4, 5), x(1, 4, 5))),
    "GRU": (lambda: Caller(nn.GRU(9, 5, batch_first=True)), (SERIES,)),
    "GRU of layers": (lambda: Caller(nn.GRU(9, 5, 2, bidirectional=True)), (SERIES,)),
    "RNN": (lambda: Caller(nn.RNN(9, 5, 2)), (SERIES,)),
    "RNN relu": (lambda: Caller(nn.RNN(9, 5, nonlinearity="relu", bidirectional=True)), (SERIES,)),
    "LSTMCell": (lambda: nn.LSTMCell(6, 5), (MATRIX,)),
    "GRUCell": (lambda: nn.GRUCell(6, 5), (MATRIX,)),
    "RNNCell": (lambda: nn.RNNCell(6, 5), (MATRIX,)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(9, 3), (SERIES, SERIES, SERIES)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(9, 3, 8, batch_first=True), (SERIES,)),
    **{
        name: (lambda cls=name, arguments=arguments: getattr(nn, cls)(*arguments), (MATRIX * 3,))
        for name, *arguments in [
            *(["ReLU", True], ["ReLU6"], ["ELU", 0.7], ["CELU", 1.3], ["SELU"], ["GELU"], ["GELU", "tanh"]),
            *(
                ["SiLU"],
                ["Mish"],
                ["LeakyReLU", 0.2],
                ["Softplus", 2, 1],
                ["Softsign"],
                ["Tanh"],
                ["Sigmoid"],
            ),
            *(
                ["Hardtanh", -0.5, 2.0],
                ["Hardswish"],
                ["Hardsigmoid"],
                ["Hardshrink", 0.7],
                ["Softshrink", 0.7],
            ),
            *(["Tanhshrink"], ["Threshold", 0.1, 20.0], ["LogSigmoid"], ["RReLU"], ["GLU"], ["Softmin", 1]),
            *(["Identity"], ["Softplus"], ["Tanhshrink"]),
        ]
    },
}


def moved(module: Any) -> Any:
    """Return a module whose weights and statistics are not those of its start."""
    with torch.no_grad():
        for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(0.5 + torch.arange(tensor.numel()).reshape(tensor.shape) / 10 + number)
    return module


FUNCTIONS: dict[str, Any] = {
    "arithmetic": lambda a: (a + 1, 2 - a, a * 0.1, a / 3, 1 / a, a**2, 2**a, -a, a // 0.7, a % 0.7, abs(a)),
    "types": lambda a: (
        a.long() * 2.5,
        a.double() + 1,
        a.to(torch.int32) // 2,
        a.half().float(),
        a > 0,
        ~(a > 0),
    ),
    "whole numbers": lambda a: (
        a.long() / 2,
        a.long() // -2,
        a.long() % 3,
        (a.long() * 3).sum(),
        a.int().float().mean(),
    ),
    "mixed types": lambda a: (a.double().sum() + a, a + torch.ones(1, dtype=torch.int64), (a > 0) * a),
    "functions": lambda a: (
        a.exp(),
        a.expm1(),
        a.abs().log1p(),
        a.abs().rsqrt(),
        a.round(),
        a.trunc(),
        a.sign(),
        a.erf(),
    ),
    "trigonometry": lambda a: (
        a.sin(),
        a.cos(),
        a.tanh(),
        a.atan(),
        a.sinh(),
        a.square(),
        a.abs().log2(),
        a.reciprocal(),
    ),
    "comparison": lambda a: (
        torch.where(a > 0, a, -1.0),
        a.masked_fill(a < 0, 9),
        (a == a).all(),
        (a > 9).any(1),
    ),
    "clamp": lambda a: (a.clamp(-1, 0.5), a.clamp(min=0), torch.maximum(a, a.mean()), a.clamp(max=a.mean())),
    "reductions": lambda a: (
        a.mean(),
        a.sum(1),
        a.amax((0, 1)),
        a.max(),
        a.max(1)[0],
        a.argmin(0, keepdim=True),
        a.prod(0),
    ),
    "statistics": lambda a: (
        a.std(),
        a.var(1, unbiased=False),
        a.std(0, keepdim=True),
        torch.var_mean(a, 1)[0],
        a.logsumexp(1),
    ),
    "norms": lambda a: (
        a.norm(),
        a.norm(1, 0),
        F.normalize(a),
        torch.linalg.vector_norm(a, dim=1),
        F.cosine_similarity(a, a + 1),
    ),
    "order": lambda a: (
        a.topk(2)[0],
        a.sort(1, descending=True)[1],
        a.argsort(0),
        a.cumsum(1),
        a.flip(1),
        a.roll(1, 1),
    ),
    "shapes": lambda a: (
        a.view(2, -1),
        a.reshape(a.shape[0] * 2, 3),
        a.t(),
        a[None],
        a.unsqueeze(-1).squeeze(-1),
        a.flatten(),
    ),
    "parts": lambda a: (
        *a.chunk(4, 1),
        *a.split(4, 1),
        *a.split([1, 5], -1),
        *a.unbind(0),
        a[1:, ::2],
        a[-1],
        a[:, -2],
    ),
    "together": lambda a: (
        torch.cat([a, a[:1]]),
        torch.stack([a, a], 1),
        a.repeat(2, 1, 2),
        a.expand(3, 4, 6),
        a[[0, 2]],
    ),
    "axes": lambda a: (
        a[None].permute(2, 0, 1),
        a.transpose(0, 1),
        a[None].movedim(0, 2),
        torch.einsum("ij,kj->ik", a, a),
    ),
    "new tensors": lambda a: (
        torch.zeros(a.shape[0], 2),
        torch.ones_like(a),
        torch.full((2, 2), 0.5),
        torch.arange(a.shape[1]),
    ),
    "products": lambda a: (
        a @ a.t(),
        torch.bmm(a[None], a.t()[None]),
        a @ a[0],
        torch.addmm(a, a, torch.eye(6), beta=2),
    ),
    "triangles": lambda a: (
        a.tril(),
        a.triu(1),
        torch.eye(3) + a.mean(),
        F.one_hot(a.argmax(1), 6),
        a.gather(1, a.argsort(1)),
    ),
    "in place": lambda a: (a + 1).mul_(2).relu_().add_(a),
    "adaptive pools": lambda a: (F.adaptive_avg_pool1d(a[None], 4), F.adaptive_avg_pool2d(a[None], (3, 4))),
    "attention": lambda a: (
        F.scaled_dot_product_attention(a[None], a[None], a[None], is_causal=True),
        F.scaled_dot_product_attention(a[None], a[None], a[None], a[:, :4] @ a[:4, :4], scale=0.3),
    ),
}


def save(module: Any, inputs: tuple[Any, ...], path: Path, *, traced: bool) -> Any:
    """Save a module and return the one that PyTorch reads from the file."""
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.trace(module, inputs, check_trace=False) if traced else torch.jit.script(module)
    script.save(str(path))
    return torch.jit.load(str(path)).eval()


def flat(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, torch.Tensor):
        yield value.detach().numpy()
    elif isinstance(value, dict):
        for item in value.values():
            yield from flat(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from flat(item)
    elif value is not None:
        yield np.asarray(value)


def load(path: Path) -> Graph:
    graph = read_graph(ckpttool.open(str(path)))
    assert graph is not None
    return graph


def run(graph: Graph, inputs: tuple[Any, ...]) -> list[np.ndarray]:
    names = [value.name for value in graph.inputs]
    return [*evaluate(graph, dict(zip(names, flat(inputs), strict=True))).values()]


def assert_same_numbers(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(actual) == len(expected)
    for array, reference in zip(actual, expected, strict=True):
        assert array.dtype == reference.dtype
        assert array.shape == reference.shape
        scale = max(1.0, float(np.abs(reference.astype(np.float64)).max(initial=0)))
        np.testing.assert_allclose(
            array.astype(np.float64), reference.astype(np.float64), rtol=0, atol=1e-6 * scale
        )


# Their code exchanges axes of inputs, whose number a scripted archive does not record.
TRACED_ONLY = ("MultiheadAttention", "TransformerEncoderLayer")
CASES = [(name, traced) for name in LAYERS for traced in (False, True) if traced or name not in TRACED_ONLY]


@pytest.mark.parametrize(
    ("name", "traced"), CASES, ids=[f"{n}-{'trace' if t else 'script'}" for n, t in CASES]
)
def test_layers_compute_what_pytorch_does(name: str, traced: bool, tmp_path: Path) -> None:
    make, inputs = LAYERS[name]
    module = save(make(), inputs, tmp_path / "m.pt", traced=traced)
    with torch.no_grad():
        expected = [*flat(module(*inputs))]
    assert_same_numbers(run(load(tmp_path / "m.pt"), inputs), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operations_compute_what_pytorch_does(name: str, tmp_path: Path) -> None:
    module = save(Code(FUNCTIONS[name]), (MATRIX,), tmp_path / "m.pt", traced=True)
    expected = [*flat(module(MATRIX))]
    assert_same_numbers(run(load(tmp_path / "m.pt"), (MATRIX,)), expected)


class Shapes(nn.Module):
    """Code that depends on the extents of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 5, num_layers=2, proj_size=2, batch_first=True, bidirectional=True)

    def forward(self, value: torch.Tensor):
        rows = value.unsqueeze(0)
        image = rows.unsqueeze(0)
        if value.size(0) > 100:
            return [image]
        total = torch.zeros(1)
        for part in value.split(3):
            total = total * 2 + part.sum()
        for row in value.unbind():
            total = total - row.max()
        outputs, state = self.cells(rows)
        return [
            F.adaptive_avg_pool2d(image, (3, 4)),
            F.adaptive_avg_pool2d(image, (2, 6)),
            F.adaptive_max_pool2d(image, (3, 4)),
            F.adaptive_max_pool1d(rows, 4),
            value.chunk(3)[1],
            total,
            outputs,
            state[0],
        ]


def test_code_is_translated_for_the_shapes_of_its_inputs(tmp_path: Path) -> None:
    module = save(Shapes(), (MATRIX,), tmp_path / "m.pt", traced=False)
    checkpoint = ckpttool.open(str(tmp_path / "m.pt"))
    shape = tuple(MATRIX.shape)
    # A vector has no rows to pool, and the cells have six inputs.
    graph = torchscript.read_for_shapes(checkpoint, [[(6,)], [(4, 7)], [shape, shape], [shape], [(4, 7)]])
    assert graph is not None
    assert [value.shape for value in graph.inputs] == [shape]
    assert all(is_known(node.op) and node.op != "If" for node in graph.nodes)
    with torch.no_grad():
        expected = [*flat(module(MATRIX))]
    assert_same_numbers(run(graph, (MATRIX,)), expected)
    assert torchscript.read_for_shapes(checkpoint, [[(6,)], []]) is None


class States(nn.Module):
    """A policy that keeps its state in buffers: one is overwritten in place, one is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(6, 5)
        self.register_buffer("h", torch.zeros(4, 5))
        self.register_buffer("c", torch.zeros(4, 5))

    def forward(self, value: torch.Tensor):
        h, c = self.cell(value, (self.h, self.c))
        self.h[:] = h
        self.c = c
        return h * 2


def test_overwritten_buffers_are_further_outputs(tmp_path: Path) -> None:
    module = save(States(), (MATRIX,), tmp_path / "m.pt", traced=False)
    graph = load(tmp_path / "m.pt")
    for _ in range(3):
        with torch.no_grad():
            expected = module(MATRIX).numpy()
        outputs = evaluate(graph, {"value": MATRIX.numpy()})
        assert [*outputs] == ["output", "h/next", "c/next"]
        assert_same_numbers([*outputs.values()], [expected, module.h.numpy(), module.c.numpy()])
        states = {name: inline_constant(outputs[f"{name}/next"]) for name in "hc"}
        graph = replace(graph, constants={**graph.constants, **states})


class Conditions(nn.Module):
    """Code that depends on the number of axes, on values, and on what does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.table = {"scale": 2.0}

    def forward(self, value: torch.Tensor):
        if value.dim() == 1:
            value = value.unsqueeze(0)
        if value.size(-1) != 6:
            raise ValueError("six numbers")
        total, factor = value, 1
        for number, layer in enumerate(self.layers):
            if number != 1:
                total = torch.relu(layer(total)) * self.table["scale"]
        if bool(value.sum() > 0):
            result, factor = (total + 1, value), 3
        else:
            result = (total - 1, total)
        return {"sum": result[0], "parts": [result[1] * factor, total]}


@pytest.mark.parametrize("value", [x(6), x(4, 6), -x(4, 6)], ids=["vector", "matrix", "negative"])
def test_conditions_take_the_branch_that_pytorch_takes(value: Any, tmp_path: Path) -> None:
    module = save(Conditions(), (value,), tmp_path / "m.pt", traced=False)
    graph = load(tmp_path / "m.pt")
    with torch.no_grad():
        expected = [*flat(module(value))]
    assert_same_numbers(run(graph, (value,)), expected)
    assert [output.name for output in graph.outputs] == ["sum", "parts", "parts_1"]
    assert {node.scope for node in graph.nodes if node.op == "MatMul"} == {("layers", "0"), ("layers", "2")}


def test_an_input_for_which_the_code_raises_is_refused(tmp_path: Path) -> None:
    save(Conditions(), (), tmp_path / "m.pt", traced=False)
    with pytest.raises(UnsupportedError) as refused:
        run(load(tmp_path / "m.pt"), (x(4, 5),))
    assert refused.value.found == "RaiseException"


class Unknown(nn.Module):
    """A module with a loop that depends on a tensor."""

    def forward(self, value: torch.Tensor):
        while bool(value.sum() < 100):
            value = value * 2 + 1
        return value


@pytest.mark.parametrize(
    ("make", "traced", "op"),
    [
        (
            lambda: nn.Sequential(nn.Linear(6, 6), Unknown(), nn.Linear(6, 6)),
            False,
            f"__torch__.{__name__}.Unknown",
        ),
        (lambda: Code(lambda a: torch.linalg.det(a @ a.t()) + a), True, "aten::linalg_det"),
        (lambda: Code(lambda a: a + torch.rand(6)), True, "aten::rand"),
        (lambda: Code(lambda a: F.dropout(a, 0.5, training=True)), True, "aten::dropout"),
        (lambda: Code(lambda a: F.batch_norm(a, None, None, training=True).median()), True, "aten::median"),
        (
            lambda: nn.MultiheadAttention(6, 2),
            False,
            "__torch__.torch.nn.functional.multi_head_attention_forward",
        ),
    ],
    ids=["loop", "operation", "random", "dropout", "reduction", "attention"],
)
def test_what_has_no_operator_is_listed_and_refused_by_name(
    make: Any, traced: bool, op: str, tmp_path: Path
) -> None:
    save(make(), (MATRIX,), tmp_path / "m.pt", traced=traced)
    graph = load(tmp_path / "m.pt")
    assert op in [node.op for node in graph.nodes]
    with pytest.raises(UnsupportedError) as refused:
        evaluate(graph, {value.name: MATRIX.numpy() for value in graph.inputs})
    assert refused.value.found == op


@pytest.mark.parametrize("first", [False, True])
def test_fused_layers_of_a_trace_without_gradients(first: bool, tmp_path: Path) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = moved(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=first))
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, value: torch.Tensor):
            inner = self.encoder(value)
            return self.attention(inner, inner, inner, need_weights=False)[0]

    inputs = (x(2, 5, 4),)
    with torch.no_grad():
        module = save(Fused(), inputs, tmp_path / "m.pt", traced=True)
        expected = [*flat(module(*inputs))]
    code = module.encoder.code + module.attention.code
    assert all(name in code for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"))
    assert_same_numbers(run(load(tmp_path / "m.pt"), inputs), expected)


def write_through_a_view(a: Any) -> Any:
    b = a + 1
    b[0].mul_(2)
    return b


def write_before_a_view(a: Any) -> Any:
    b = a + 1
    c = b[0]
    b.mul_(2)
    return c


def write_to_parts(a: Any) -> Any:
    one, two = a.clone().chunk(2, 1)
    one.mul_(2)
    return one + two


@pytest.mark.parametrize("function", [write_through_a_view, write_before_a_view])
def test_values_that_were_overwritten_are_not_used(function: Any, tmp_path: Path) -> None:
    save(Code(function), (MATRIX,), tmp_path / "m.pt", traced=True)
    with pytest.raises(UnsupportedError, match="overwritten"):
        load(tmp_path / "m.pt")


def test_parts_that_do_not_overlap_may_be_overwritten(tmp_path: Path) -> None:
    module = save(Code(write_to_parts), (MATRIX,), tmp_path / "m.pt", traced=True)
    assert_same_numbers(run(load(tmp_path / "m.pt"), (MATRIX,)), [module(MATRIX).numpy()])


class Inputs(nn.Module):
    """A module with a dict, a pair, a number and an optional input."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(7, 6).double(), nn.Linear(6, 2).double()

    def forward(
        self,
        named: dict[str, torch.Tensor],
        pair: tuple[torch.Tensor, torch.Tensor],
        factor: float,
        mask: torch.Tensor | None = None,
    ):
        result = self.linear(named["state"] + self.embedding(pair[0])) * factor
        return result if mask is None else result * mask


def test_inputs_have_names_and_types(tmp_path: Path) -> None:
    state, where = MATRIX.double(), torch.tensor([0, 6, 2, 1])
    module = save(Inputs(), (), tmp_path / "m.pt", traced=False)
    graph = load(tmp_path / "m.pt")
    types = {value.name: value.dtype for value in graph.inputs}
    assert types == {"pair_0": "int64", "pair_1": "float64", "factor": "float64", "named.state": "float64"}
    inputs = {"named.state": state.numpy(), "pair_0": where.numpy(), "pair_1": state.numpy(), "factor": 0.3}
    with torch.no_grad():
        expected = module({"state": state}, (where, state), 0.3).numpy()
    assert_same_numbers([*evaluate(graph, inputs).values()], [expected])


def test_constants_are_unread_leaves_of_the_tree(tmp_path: Path) -> None:
    save(Caller(nn.LSTM(9, 5)), (SERIES,), tmp_path / "m.pt", traced=True)
    checkpoint = ckpttool.open(str(tmp_path / "m.pt"))
    graph = read_graph(checkpoint)
    assert graph is not None
    stored = {constant.path: constant for constant in graph.constants.values() if constant.path is not None}
    names = {".".join(str(step.value) for step in path): path for path in stored}
    assert {f"layer.{n}_l0" for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")} == names.keys()
    assert all(stored[path].leaf is checkpoint.tree[path] for path in stored)
    assert stored[names["layer.weight_ih_l0"]].shape == (1, 20, 9)
    assert stored[names["layer.weight_ih_l0"]].rule.name.startswith("blocks 0,3,1,2 on axis 0")


def test_frozen_archives_compute_the_same(tmp_path: Path) -> None:
    module = torch.jit.freeze(
        torch.jit.script(nn.Sequential(nn.Linear(6, 5), nn.ELU(), nn.Linear(5, 2)).eval())
    )
    module.save(str(tmp_path / "m.pt"))
    with torch.no_grad():
        expected = module(MATRIX).numpy()
    assert_same_numbers(run(load(tmp_path / "m.pt"), (MATRIX,)), [expected])


def test_other_files_of_pytorch_have_no_graph(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "m.pt")
    assert read_graph(ckpttool.open(str(tmp_path / "m.pt"))) is None


def test_real_policies_compute_what_pytorch_does(corpus: Path) -> None:
    """The policies of Unitree's robots keep the state of an LSTM in buffers."""
    files = sorted((corpus / "torch" / "torchscript").glob("unitree/*/motion.pt"))
    assert len(files) == 3
    for file in files:
        graph, module = load(file), torch.jit.load(str(file))
        width = dict(module.named_parameters())["memory.weight_ih_l0"].shape[1]
        with torch.no_grad():
            expected = [module(x(1, width)).numpy(), module.hidden_state.numpy(), module.cell_state.numpy()]
        assert_same_numbers(run(graph, (x(1, width),)), expected)


def rewrite_code(path: Path, body: str) -> None:
    """Replace the body of `forward` in the archive of a module of one file."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            if name.endswith(".py"):
                head, _, _ = data.decode().partition("-> Tensor:\n")
                data = (head + "-> Tensor:\n" + body).encode()
            archive.writestr(name, data)


HOSTILE = {
    "power": "    n = torch.pow(10, 1000000000)\n    return torch.mul(a, n)\n",
    "squares": "    n = 10\n    for i in range(99):\n      n = torch.mul(n, n)\n    return torch.mul(a, n)\n",
    "list": "    n = torch.list(range(1000000000000))\n    return torch.view(a, n)\n",
    "repeated list": "    n = torch.mul([0], 1000000000000)\n    return torch.view(a, n)\n",
    "doubled text": '    n = "ab"\n    for i in range(100):\n      n = torch.add(n, n)\n    return a\n',
    "endless loop": "    while True:\n      b = torch.add(a, 1)\n    return a\n",
    "nesting": "    return " + "torch.relu(" * 5000 + "a" + ")" * 5000 + "\n",
    "recursion": "    return (self).forward(a, )\n",
    "large number": f"    return torch.mul(a, {10**30})\n",
    "unknown name": "    return torch.add(b, 1)\n",
    "no result": "    pass\n",
    "error": '    ops.prim.RaiseException("no", "builtins.ValueError")\n    return a\n',
    "no code": "    return (\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_code_of_an_unexpected_form_is_refused(name: str, tmp_path: Path) -> None:
    save(Code(lambda a: a + 1), (MATRIX,), tmp_path / "m.pt", traced=True)
    rewrite_code(tmp_path / "m.pt", HOSTILE[name])
    with pytest.raises(UnsupportedError):
        run(load(tmp_path / "m.pt"), (MATRIX,))


@pytest.mark.parametrize(
    "call",
    [
        *(
            "torch.softmax(a, None)",
            "torch.view(a, 3)",
            "torch.permute(a, [9])",
            "torch.conv2d(a, a, a, [], [], [])",
        ),
        *(
            "torch.split(a, [])",
            "torch.add(a)",
            "torch.einsum(1, [a])",
            "torch.to(a, 99)",
            "torch.linear(a, 1)",
        ),
        *("torch.lstm(a, [a], [], True, 1, 0., False, False)", "torch.select(a, a, a)", "torch.cat(3)"),
        *("torch.flatten(a, None)", "torch.topk(a, None)", "torch.unknown(a, [1], 2, True, None)"),
    ],
)
def test_unexpected_arguments_leave_an_operation_opaque(call: str, tmp_path: Path) -> None:
    save(Code(lambda a: a + 1), (MATRIX,), tmp_path / "m.pt", traced=True)
    rewrite_code(tmp_path / "m.pt", f"    return {call}\n")
    with pytest.raises((UnsupportedError, FormatError)):
        run(load(tmp_path / "m.pt"), (MATRIX,))


def test_a_module_is_extracted_with_the_constants_that_it_needs(tmp_path):
    class RMS(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4) + 0.5)

        def forward(self, x):
            return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)

    model = nn.Sequential(nn.Linear(3, 4), RMS(), nn.Linear(4, 2))
    path = str(tmp_path / "m.pt")
    torch.jit.trace(model, torch.zeros(1, 3)).save(path)
    graph = read_graph(ckpttool.open(path))
    module = extract_module(graph, ("1",))
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    outputs = evaluate(module, {module.inputs[0].name: x})
    expected = model[1](torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(outputs[module.outputs[0].name], expected, rtol=1e-5)
    # The whole model has no node outside.
    assert extract_module(graph, ()) is not None
    assert extract_module(graph, ("no such module",)) is None
