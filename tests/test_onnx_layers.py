"""Layers of ONNX graphs as state_dicts: PyTorch's own numbers and names, whatever the exporter did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.core import CkpttoolError, Leaf, UsageError, display
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from tests.test_onnx_policies import NORMALISED, Policy, actions_of, exported, mlp

onnx = pytest.importorskip("onnx", reason="the extra `onnx` makes the models")


class Sequence(nn.Module):
    """A network of layers below one attribute."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class Words(nn.Module):
    """An embedding and an LSTM in both directions."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, *, both: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.rnn = kind(5, 4, bidirectional=both)
        self.out = nn.Linear(8 if both else 4, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(self.table(x))[0])


IMAGE = torch.randn(2, 3, 8, 8)
CASES: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "mlp": (Sequence(*mlp()), torch.randn(2, 3)),
    "three-axes": (Sequence(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)), torch.randn(2, 5, 3)),
    "square": (Sequence(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4)), torch.randn(2, 3, 4)),
    "convolutions": (
        Sequence(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8),
            nn.ConvTranspose2d(8, 4, 2), nn.BatchNorm2d(4), nn.PReLU(4), nn.Flatten(),
            nn.Linear(4 * 7 * 7, 2),
        ),
        IMAGE,
    ),
    "image": (
        Sequence(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ELU(), nn.Flatten(),
                 nn.Linear(144, 2)),
        IMAGE,
    ),
    "norms": (Sequence(nn.Linear(3, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2)), torch.randn(2, 3)),
    "lstm": (Words(), torch.randint(0, 11, (3, 2))),
    "gru": (Words(nn.GRU, both=False), torch.randint(0, 11, (3, 2))),
}  # fmt: skip


def done(source: Path, target: Path, **options: Any) -> ConversionResult:
    result = convert(str(source), str(target), **options)
    assert not result.report.unused, result.report.unused
    return result


@pytest.mark.parametrize(("version", "folding"), [(17, True), (11, False)])
@pytest.mark.parametrize("name", CASES)
def test_a_module_loads_what_its_export_holds(name: str, version: int, folding: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, inputs = CASES[name]
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    path = exported(
        model, tmp_path / "m.onnx", inputs, opset_version=version, do_constant_folding=folding,
        dynamic_axes={}, training=torch.onnx.TrainingMode.PRESERVE,
    )  # fmt: skip
    done(path, tmp_path / "m.pt")
    state = torch.load(tmp_path / "m.pt", weights_only=True)
    expected = {n: value for n, value in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    assert set(state) == set(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(state[key].numpy(), value.numpy(), err_msg=key)
    type(model).load_state_dict(model, state, strict="batches" not in "".join(model.state_dict()))


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        *((name, ".weights.h5") for name in ("mlp", "square", "norms", "gru", "image")),
        ("gru", ".npz"),
        ("mlp", ".safetensors"),
    ],
)
def test_other_targets_get_what_the_state_dict_gives_them(name: str, suffix: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, inputs = CASES[name]
    path = exported(model, tmp_path / "m.onnx", inputs, dynamic_axes={})
    done(path, tmp_path / f"from_onnx{suffix}")
    state = {n: value for n, value in model.state_dict().items() if not n.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "m.pt")
    kinds = {
        "gru": ["table=embedding", "out=dense"],
        "square": ["net/0=dense"],
    }
    flatten = {"image": ["net/5=6,6,4"]} if suffix == ".weights.h5" else {}
    requested = kinds.get(name, []) if suffix == ".weights.h5" else []
    done(tmp_path / "m.pt", tmp_path / f"from_torch{suffix}", kinds=requested, flatten=flatten.get(name, []))
    one, two = (tensors(tmp_path / f"{word}{suffix}") for word in ("from_onnx", "from_torch"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        np.testing.assert_array_equal(value, two[key], err_msg=key)


def tensors(path: Path) -> dict[str, np.ndarray]:
    tree = open_checkpoint(str(path)).tree
    return {display(p): leaf.array() for p, leaf in tree.items() if isinstance(leaf, Leaf)}


@pytest.mark.parametrize("head", ["tanh", "plain"])
def test_a_converted_policy_plays_with_the_facts_of_the_graph(head: str, tmp_path: Path) -> None:
    after = (lambda _m, x: 2 * torch.tanh(x)) if head == "tanh" else None
    model = Policy(*mlp(nn.ELU), before=NORMALISED["statistics-and-clip"], after=after)
    path = exported(model, tmp_path / "policy.onnx")
    done(path, tmp_path / "policy.pt")
    rows = np.random.default_rng(0).normal(0, 3, (32, 3)).astype(np.float32)
    with torch.no_grad():
        expected = model(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(
        actions_of(restore_agent(str(tmp_path / "policy.pt")), rows), expected, rtol=1e-4, atol=1e-5
    )


def edited(path: Path, change: Any) -> Path:
    model = onnx.load(str(path))
    change(model)
    onnx.save(model, str(path))
    return path


def test_a_weight_in_a_node_of_constants_is_a_weight(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        for tensor in list(model.graph.initializer):
            node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
            model.graph.node.insert(0, node)
            model.graph.initializer.remove(tensor)

    path = edited(exported(Sequence(*mlp()), tmp_path / "m.onnx"), change)
    done(path, tmp_path / "m.pt")
    assert "net.0.weight" in torch.load(tmp_path / "m.pt", weights_only=True)


@pytest.mark.parametrize("factor", ["alpha", "beta"])
def test_a_layer_that_is_scaled_by_its_operator_is_not_taken_as_it_is(factor: str, tmp_path: Path) -> None:
    def change(model: Any) -> None:
        node = next(node for node in model.graph.node if node.op_type == "Gemm")
        next(attribute for attribute in node.attribute if attribute.name == factor).f = 2.0

    path = edited(exported(Sequence(*mlp()), tmp_path / "m.onnx"), change)
    result = convert(str(path), str(tmp_path / "m.pt"))
    assert "net/0/weight" in result.report.unused
    assert not (tmp_path / "m.pt").exists()


def test_constants_of_unknown_operators_are_not_lost_in_silence(tmp_path: Path) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.table = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.matmul(self.table, self.a(x).unsqueeze(-1)).squeeze(-1)

    path = exported(Product(), tmp_path / "m.onnx")
    assert convert(str(path), str(tmp_path / "m.pt")).report.unused == ("table",)


@pytest.mark.parametrize("options", [{"part": "net"}, {"layout": "td3_torch"}, {"to": "sb3"}])
def test_what_a_graph_has_no_place_for_is_a_usage_error(options: dict[str, str], tmp_path: Path) -> None:
    path = exported(Sequence(*mlp()), tmp_path / "m.onnx")
    with pytest.raises(UsageError):
        convert(str(path), str(tmp_path / "m.pt"), **options)


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    path = exported(Sequence(nn.Tanh()), tmp_path / "m.onnx")
    with pytest.raises(CkpttoolError):
        convert(str(path), str(tmp_path / "m.pt"))
