"""Output shapes and operations of single layers and functions are those of the framework, or unknown."""

from __future__ import annotations

import functools
import json
import random
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckpttool.core import UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.listing.architecture import describe_architecture
from tests import warm

# Layers of torch with the shape of their input, without the batch. Torch refuses some of them.
LAYERS = [
    *[("Conv2d(4, 6, (3, 1), stride=(2, 1), padding=(1, 0), dilation=(2, 1), groups=2)", (4, 11, 9))],
    *[("Conv1d(3, 4, 3, padding='same', dilation=3, padding_mode='reflect')", (3, 8))],
    *[("Conv3d(2, 2, 2, padding='valid', stride=3)", (2, 5, 6, 7)), ("Conv2d(3, 4, 9)", (3, 8, 8))],
    *[("ConvTranspose2d(4, 6, 3, stride=(3, 2), padding=1, output_padding=(2, 1), groups=2)", (4, 5, 4))],
    *[("ConvTranspose1d(2, 3, 2, dilation=3, output_padding=2)", (2, 6))],
    *[("ConvTranspose1d(2, 3, 2, output_padding=1)", (2, 6))],
    *[("MaxPool2d(3, stride=2, padding=1, dilation=2, ceil_mode=True)", (2, 11, 8))],
    *[("MaxPool2d(2, padding=2)", (2, 8, 8)), ("AvgPool2d((2, 3), ceil_mode=True)", (2, 7, 7))],
    *[("MaxPool1d(2, return_indices=True)", (2, 8)), ("LPPool2d(2, 3, ceil_mode=True)", (2, 8, 10))],
    *[("AdaptiveAvgPool2d((3, None))", (2, 7, 5)), ("AdaptiveMaxPool3d(2)", (2, 5, 6, 7))],
    *[("ZeroPad2d((1, -2, 0, 3))", (2, 8, 8)), ("ReflectionPad1d(8)", (2, 8)), ("CircularPad1d(8)", (2, 8))],
    *[("ReplicationPad3d((1, 0, 2, 1, 0, 3))", (1, 3, 3, 3)), ("BatchNorm1d(4)", (4,))],
    *[("BatchNorm2d(4)", (4, 5)), ("InstanceNorm1d(3)", (2, 5)), ("InstanceNorm2d(3)", (3, 5))],
    *[("LayerNorm((4, 5))", (3, 4, 5)), ("LayerNorm(4)", (4, 5)), ("GroupNorm(2, 6)", (6, 3))],
    *[("Flatten()", (2, 3, 4)), ("Flatten(2, -2)", (2, 3, 4, 5)), ("Flatten(-5)", (2, 3, 4))],
    *[("Flatten(0)", (2, 3)), ("Unflatten(1, (2, -1))", (6, 5)), ("Unflatten(1, (4, -1))", (6, 5))],
    *[("Upsample(scale_factor=(1.3, 0.7))", (2, 9, 10)), ("Upsample(size=5, mode='bicubic')", (2, 9))],
    *[("UpsamplingBilinear2d(scale_factor=2.3)", (2, 4, 5)), ("PixelShuffle(2)", (8, 3, 2))],
    *[("PixelUnshuffle(2)", (2, 5, 4)), ("ChannelShuffle(2)", (3, 4, 4)), ("GLU()", (3, 8))],
    *[("GLU(4)", (2, 4)), ("GLU(0)", (2, 4)), ("Softmax2d()", (2, 3, 4)), ("Dropout1d()", (2, 3, 4))],
    *[("LSTM(6, 5, num_layers=3, bidirectional=True, proj_size=2, batch_first=True)", (4, 6))],
    *[("GRU(6, 5, num_layers=2, batch_first=True)", (4, 6)), ("RNN(3, 4, batch_first=True)", (2, 3))],
    *[("LSTMCell(6, 5)", (6,)), ("GRUCell(6, 5)", (6,)), ("Linear(5, 3)", (2, 4, 5)), ("Linear(5, 3)", (4,))],
    *[("TransformerEncoderLayer(6, 2, 9, batch_first=True, activation=nn.GELU())", (4, 6))],
    *[("Sequential(nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 4)]))", (3,))],
    *[("ModuleList([nn.Linear(3, 4)])", (3,)), ("EmbeddingBag(9, 3)", (4,)), ("Unfold(2)", (2, 4, 4))],
]

# Functions of x [1, 5, 6] in traced code.
TRACED = [
    *[
        "x.var(-1)",
        "x.var(-1, keepdim=True)",
        "x.std(1, correction=0, keepdim=True)",
        "x.var(-1, False, True)",
    ],
    *["x.norm(dim=-1)", "x / x.norm(2, 1, True)", "x.max(1)[0]", "torch.max(x, x[:, :1])", "x.amin(1, True)"],
    *["torch.min(x[:, :1], x)", "torch.pow(x[:, :1], x)", "torch.clamp(x[:, :1], min=x)", "x.prod(1, True)"],
    *[
        "((x > 0) & (x[:, :1] < 1)).float()",
        "torch.logsumexp(x, 2)",
        "x.chunk(4, -1)[-1]",
        "x.unfold(1, 2, 1)",
    ],
    *["x.split([2, 4], -1)[1]", "x[:, 1:-1, ::2]", "x[:, [0, 2]]", "x.unflatten(2, (2, -1))", "x.tile(2)"],
    *["x.repeat(1, 2, 1)", "x.expand(2, 1, 5, 6)[0]", "F.pad(x, (1, 2, 0, 1))", "x @ x.transpose(1, 2)"],
    *[
        "F.interpolate(x, scale_factor=0.7)",
        "torch.einsum('bij,bkj->bik', x, x)",
        "torch.cat([x, x[:, :1]], 1)",
    ],
    *[
        "torch.stack([x, x], -1)",
        "x.mean((1, 2), keepdim=True)",
        "torch.where(x > 0, x, x[:, :1])",
        "x.argmax(-1)",
    ],
]

# Code whose result depends on values or grows without end: scripts of forward(self, x).
SCRIPTED = {
    "branch": "if x.sum() > 1e9:\n    return self.one(x)\nreturn self.two(x)",
    "truth": "if bool((x > 1e9).any()):\n    return self.one(x)\nreturn self.two(x)",
    "not": "if not (x.max() < 1e9):\n    return self.one(x)\nreturn self.two(x)",
    "sizes": "if x.dim() == 3 and not x.size(2) == 5:\n    return self.two(x)\nreturn self.one(x)",
    "projection": "return self.cells(x)[0]",
    "product": "n = 3\nfor i in range(60):\n    n = n * n\nreturn self.one(x) * n",
    "list": "n = [1]\nfor i in range(28):\n    n = n + n\nreturn self.one(x) * len(n)",
    "loops": "k = 0\nfor i in range(9000):\n    for j in range(9000):\n        k = j\nreturn self.one(x) * k",
}
ENDLESS = ("product", "list", "loops")

# The compiler reads the code of a class from its file.
BASE = textwrap.dedent("""
    import torch
    from torch import nn

    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 3)
            self.cells = nn.LSTM(6, 5, proj_size=2, batch_first=True)

""")

PROGRAM = textwrap.dedent("""
    import json, os, sys, textwrap, torch, torch.nn.functional as F
    from torch import nn
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    torch.backends.mkldnn.enabled = False
    torch.backends.mha.set_fastpath_enabled(False)

    def truth(model, batch, shape):
        whole = any(isinstance(each, nn.EmbeddingBag) for each in model.modules())
        x = torch.zeros(batch, *shape, dtype=torch.long) if whole else torch.rand(batch, *shape)
        try:
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
                made = model(x)
        except (RuntimeError, ValueError, IndexError, NotImplementedError, TypeError):
            return None
        made = made[0] if isinstance(made, tuple) else made
        return [list(made.shape), counter.get_total_flops() / 2]

    class Traced(nn.Module):
        def __init__(self, code):
            super().__init__()
            self.code = code

        def forward(self, x):
            return eval(self.code)

    LAYERS, TRACED, SCRIPTED, ENDLESS, BASE = json.loads(CASES)
    found = {}
    for number, (code, shape) in enumerate(LAYERS):
        model = eval("nn." + code).eval()
        torch.save(model, f"layer{number}.pt")
        model.train(not isinstance(model, nn.TransformerEncoderLayer))
        found[f"layer{number}"] = truth(model, 2, shape)
    for number, code in enumerate(TRACED):
        model = Traced(code)
        torch.jit.save(torch.jit.trace(model, torch.rand(1, 5, 6), check_trace=False), f"traced{number}.pt")
        found[f"traced{number}"] = truth(model, 1, (5, 6))
    with open("scripts_of_layers.py", "w") as file:
        file.write(BASE)
        for name, code in SCRIPTED.items():
            file.write(f"class {name.title()}(Scripted):\\n    def forward(self, x):\\n")
            file.write(textwrap.indent(code, " " * 8) + "\\n")
    sys.path.insert(0, os.getcwd())
    import scripts_of_layers
    for name in SCRIPTED:
        model = torch.jit.script(getattr(scripts_of_layers, name.title())())
        model.save(f"{name}.pt")
        found[name] = None if name in ENDLESS else truth(model, 1, (5, 6))
    print("RESULT" + json.dumps(found))
""")


@functools.cache
def expected(folder: Path, layers: Sequence[tuple[str, tuple[int, ...]]] = tuple(LAYERS)) -> Any:
    cases = json.dumps([layers, TRACED, SCRIPTED, ENDLESS, BASE])
    status, printed = warm.run("torch", PROGRAM.replace("CASES", repr(cases)), folder)
    assert status == 0, printed
    return json.loads(printed.partition("RESULT")[2])


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layers")


def described(path: Path, shape: tuple[int, ...] | None = None) -> tuple[Any, Any]:
    """Return the model's output shape and operations, None for unknown ones and for a refused input."""
    shapes = [] if shape is None else [",".join(map(str, shape))]
    try:
        architecture = describe_architecture(open_checkpoint(str(path)), shapes)
    except UsageError:
        return None, None
    return (architecture[0].root.output, architecture[0].root.macs) if architecture else (None, None)


# Layers whose shape is not computed here, though torch computes one.
UNKNOWN = (
    "return_indices",
    "Flatten(0",
    "GLU(0",
    "InstanceNorm1d(3)",
    "InstanceNorm2d(3)",
    "EmbeddingBag",
    "Unfold(2",
)


@pytest.mark.parametrize("number", range(len(LAYERS)), ids=[" ".join(map(str, layer)) for layer in LAYERS])
def test_a_layer_has_torchs_shape_and_operations_or_none(number: int, models: Path) -> None:
    reference, (code, shape) = expected(models)[f"layer{number}"], LAYERS[number]
    description = described(models / f"layer{number}.pt", shape)
    if reference is None or any(word in code for word in UNKNOWN):
        assert description == (None, None)
    else:
        (batch, *sizes), macs = reference
        assert description == (tuple(sizes), macs / batch)


@pytest.mark.parametrize("number", range(len(TRACED)), ids=TRACED)
def test_a_traced_function_has_torchs_shape_and_operations_or_none(number: int, models: Path) -> None:
    (shape, macs), text = expected(models)[f"traced{number}"], described(models / f"traced{number}.pt")
    assert text[0] in (tuple(shape), None)
    assert text[1] in (macs, None)
    assert text[0] is not None or any(word in TRACED[number] for word in ("unfold", "argmax", "[0, 2]"))


@pytest.mark.parametrize("name", SCRIPTED)
def test_code_that_depends_on_values_or_grows_has_no_shape(name: str, models: Path) -> None:
    reference, description = expected(models)[name], described(models / f"{name}.pt", (5, 6))
    if name in ("sizes", "projection"):
        assert description[0] == tuple(reference[0])
        assert description[1] in (reference[1], None)
    else:
        assert description == (None, None)


@pytest.mark.parametrize(
    ("shape", "known"), [("input 0=5,6", True), ("x=5,6", False), ("input 1=5,6", False)]
)
def test_an_input_of_code_is_named_by_its_position(shape: str, known: bool, models: Path) -> None:
    expected(models)
    checkpoint = open_checkpoint(str(models / "sizes.pt"))
    if known:
        assert describe_architecture(checkpoint, [shape])[0].root.output == (1, 5, 3)
    else:
        with pytest.raises(UsageError):
            describe_architecture(checkpoint, [shape])


def random_layers(count: int, seed: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield layers with random settings, valid or not, and shapes of their inputs."""
    draw = random.Random(seed)

    def numbers(count: int, low: int, high: int) -> object:
        sizes = tuple(draw.randint(low, high) for _ in range(count))
        return sizes[0] if draw.random() < 0.4 else sizes

    for _ in range(count):
        rank, groups = draw.randint(1, 3), draw.choice((1, 1, 2))
        channels, filters = groups * draw.randint(1, 3), groups * draw.randint(1, 3)
        shape = (channels, *(draw.randint(3, 12) for _ in range(rank)))
        window, step, pad = numbers(rank, 1, 4), numbers(rank, 1, 3), numbers(rank, 0, 2)
        wide, ceil = numbers(rank, 1, 3), draw.random() < 0.5
        sizes = f"{window}, stride={step}, padding={pad}"
        yield draw.choice(
            (
                (f"Conv{rank}d({channels}, {filters}, {sizes}, dilation={wide}, groups={groups})", shape),
                (
                    f"ConvTranspose{rank}d({channels}, {filters}, {sizes}, dilation={wide}, groups={groups}, "
                    f"output_padding={numbers(rank, 0, 2)})",
                    shape,
                ),
                (f"MaxPool{rank}d({sizes}, dilation={wide}, ceil_mode={ceil})", shape),
                # AvgPool3d of an image below its kernel is an error, whatever its padding and rounding.
                (f"{'Avg' if rank < 3 else 'Max'}Pool{rank}d({sizes}, ceil_mode={ceil})", shape),
                (f"ReplicationPad{rank}d({numbers(2 * rank, 0, 3)})", shape),
                (f"CircularPad{rank}d({numbers(2 * rank, 0, 5)})", shape),
                (f"Flatten({draw.randint(1, 5)}, {draw.randint(-4, 5)})", shape),
                (f"Upsample(scale_factor={draw.choice((0.6, 1.3, 1.5, 2.3, (1.5, 0.7)))})", shape),
            )
        )


@pytest.mark.slow
def test_layers_with_random_settings_have_torchs_shapes_and_operations(tmp_path: Path) -> None:
    layers = [*random_layers(1500, 0)]
    reference, known = expected(tmp_path, tuple(layers)), 0
    for number, (code, shape) in enumerate(layers):
        truth, description = reference[f"layer{number}"], described(tmp_path / f"layer{number}.pt", shape)
        known += truth is not None
        if truth is None:
            assert description == (None, None), (code, shape)
        else:
            (batch, *sizes), macs = truth
            assert description in ((tuple(sizes), macs / batch), (None, None)), (code, shape)
            assert description[0] is not None or batch != 2 or "Flatten" in code, (code, shape)
    assert known > 700
