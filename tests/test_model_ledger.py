"""Every tensor of a source that fills a user's model is used, left out for a reason, or an error."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.cli import convert
from ckpttool.conversion.filled_model import _optimizer_entries
from ckpttool.conversion.filling import load_into
from ckpttool.conversion.plan import ConversionPlan
from ckpttool.conversion.preparation import PreparedTree
from ckpttool.core import Inline, Leaf, MappingError, Tree, UsageError, ValueLeaf, display, sidecar
from ckpttool.libraries.optimizer_states import ConvertedOptimizers
from ckpttool.mapping import MappingReport
from tests import schemas
from tests.golden_texts import Golden
from tests.test_like import HERE, fill
from tests.trees import attributes, leaf

pytestmark = pytest.mark.torch
FLOATS = np.random.default_rng(1)

# Tensors that nothing of the model takes, and the kind that their names show.
EXTRA = {
    "fc/lora_A/default": "low-rank weights",
    "ema/fc/kernel": "averaged weights",
    "fc/weight_scale/value": "quantisation scales",
    "norm/moving_mean": "running statistics",
    "mystery": None,
}


def source(folder: Path, *extra: str) -> str:
    shapes = {"fc/kernel": (4, 4), "fc/bias": (4,), **dict.fromkeys(extra, (4, 2))}
    shapes |= {name: (4,) for name in extra if "moving" in name}
    np.savez(
        folder / "source.npz",
        **{name: FLOATS.standard_normal(shape).astype("float32") for name, shape in shapes.items()},
    )
    return str(folder / "source.npz")


def named() -> Any:
    sys.path.insert(0, str(HERE))
    import like_small

    return like_small.Named()


@pytest.mark.parametrize("name", EXTRA)
def test_an_unused_tensor_is_an_error(name: str, tmp_path: Path, golden: Golden) -> None:
    done = fill(source(tmp_path, name), str(tmp_path / "out.pt"), "torch", "like_small:Named")
    assert done.report.unused == (name,)
    assert not done.written
    assert [path.name for path in tmp_path.iterdir()] == ["source.npz"]
    if name in ("fc/lora_A/default", "mystery"):
        golden(convert.render_conversion(done, quiet=False, whole=False))
    net = named()
    before = net.fc.weight.clone()
    with pytest.raises(MappingError) as caught:
        load_into(net, str(tmp_path / "source.npz"))
    assert caught.value.path == name
    assert (caught.value.found or "").partition(":")[0] == (EXTRA[name] or "")
    assert (net.fc.weight == before).all()


@pytest.mark.parametrize("name", EXTRA)
def test_a_pattern_permits_an_unused_tensor_and_is_recorded(name: str, tmp_path: Path) -> None:
    patterns = [name.replace("fc/", "**/")]
    target = tmp_path / "out.pt"
    path = source(tmp_path, name)
    done = fill(path, str(target), "torch", "like_small:Named", allow_unused=patterns)
    assert done.written
    assert not sidecar.has_open_entries(done.ledger)
    reason = f"--allow-unused '{patterns[0]}'"
    assert [entry.document() for entry in done.left_out] == [{"path": name, "reason": reason}]
    receipt = json.loads((tmp_path / "out.pt.ckpttool.json").read_bytes())
    schemas.require("sidecar", receipt)
    assert receipt["source"]["options"] == {"allow_unused": patterns}
    assert receipt["residue"] == [{"path": name, "reason": reason}]
    loaded_model = load_into(named(), path, allow_unused=patterns)
    assert loaded_model.loaded
    assert not loaded_model.decides
    assert [entry.path for entry in loaded_model.left_out] == [name]


@pytest.mark.parametrize("beside", ["lora_A", "weight_ema", "weight_scale"])
def test_a_tensor_beside_a_kernel_is_left_out(beside: str, tmp_path: Path) -> None:
    import torch

    state = {**named().state_dict(), f"fc.{beside}": torch.randn(8)}
    torch.save(state, tmp_path / "source.pt")
    path, target = str(tmp_path / "source.pt"), str(tmp_path / "out.pt")
    done = fill(path, target, "torch", "like_small:Named")
    assert not done.written
    assert f"fc/{beside}" in done.report.unused
    every = fill(path, target, "torch", "like_small:Named", allow_unused=["fc/**"])
    assert not every.written
    assert "fc/weight" in every.report.missing
    done = fill(path, target, "torch", "like_small:Named", allow_unused=[f"**/{beside}"])
    assert done.written
    assert [entry.path for entry in done.left_out] == [f"fc/{beside}"]
    contents = torch.load(target)
    assert all(torch.equal(contents[name], value) for name, value in state.items() if beside not in name)
    net = named()
    assert load_into(net, path, allow_unused=[f"**/{beside}"]).loaded
    assert torch.equal(net.fc.weight, state["fc.weight"])


def test_a_pattern_permits_what_it_matches_only(tmp_path: Path) -> None:
    path = source(tmp_path, *EXTRA)
    done = fill(
        path,
        str(tmp_path / "out.pt"),
        "torch",
        "like_small:Named",
        allow_unused=["fc/*/*", "ema/**", "norm/*"],
    )
    assert done.report.unused == ("mystery",)
    assert len(done.left_out) == 4
    assert not done.written


@pytest.mark.parametrize("pattern", ["fc/lora_b/default", "fc/kernel", "nothing"])
def test_a_pattern_that_permits_nothing_is_an_error(pattern: str, tmp_path: Path, golden: Golden) -> None:
    path = source(tmp_path, "fc/lora_A/default")
    for call in (
        lambda: fill(path, str(tmp_path / "o.pt"), "torch", "like_small:Named", allow_unused=[pattern]),
        lambda: load_into(named(), path, allow_unused=[pattern]),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        golden(caught.value)
    assert not (tmp_path / "o.pt").exists()


@pytest.mark.parametrize(
    "names",
    [
        ["extra"],
        [f"more/{n}/fc_{n}/scale" for n in range(12)],
        [f"more/{chr(97 + n) * 30}/scale" for n in range(12)],
        [f"{chr(97 + n) * 30}/scale" for n in range(12)],
    ],
)
def test_the_hint_for_unused_tensors_leaves_out_all_of_them(names: list[str], tmp_path: Path) -> None:
    import torch

    net = named()
    torch.save({**net.state_dict(), **{name: torch.ones(5) for name in names}}, tmp_path / "a.pt")
    with pytest.raises(MappingError) as caught:
        load_into(named(), tmp_path / "a.pt")
    argument = re.search(r"allow_unused=(\[[^]]*\])", caught.value.hint or "")
    assert argument is not None
    filled = named()
    done = load_into(filled, tmp_path / "a.pt", allow_unused=ast.literal_eval(argument[1]))
    assert {entry.path for entry in done.left_out} == {*names}
    assert torch.equal(filled.fc.weight, net.fc.weight)


@pytest.mark.parametrize("role", ["buffer", "parameter"])
def test_the_hint_for_a_tensor_of_the_model_alone_keeps_only_buffers(role: str, tmp_path: Path) -> None:
    import torch

    net, other = named(), named()
    torch.save(net.state_dict(), tmp_path / "a.pt")
    table = torch.tensor([[4.0, 2.0, 7.0]])
    other.register_buffer("table", table) if role == "buffer" else other.register_parameter(
        "table", torch.nn.Parameter(table)
    )
    with pytest.raises(MappingError) as caught:
        load_into(other, tmp_path / "a.pt")
    assert ("strict=False if" in (caught.value.hint or "")) == (role == "buffer")
    if role == "buffer":
        done = load_into(other, tmp_path / "a.pt", strict=False)
        assert done.report.missing == ("table",)
        assert torch.equal(other.table, table)
        assert torch.equal(other.fc.weight, net.fc.weight)


def test_a_pattern_for_a_source_without_unused_tensors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        load_into(named(), source(tmp_path), allow_unused=["fc/**"])


def test_the_reasons_of_what_is_left_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = named()
    optimizer = torch.optim.NAdam(net.parameters())
    net.fc(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    norm = torch.nn.BatchNorm1d(4)
    contents = {"model": net.state_dict(), "norm": norm.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(contents, tmp_path / "run.pt")
    path, target = str(tmp_path / "run.pt"), str(tmp_path / "out.pt")
    done = fill(path, target, "torch", "like_small:Named", part="model")
    reasons = {entry.path: entry.reason for entry in done.left_out}
    assert reasons["norm/weight"] == "outside the selected part"
    assert reasons["norm/num_batches_tracked"] == "counter"
    assert reasons["optimizer/state/0/exp_avg"] == "optimizer state"
    assert {*reasons} == {*reasons} - {move.source for move in done.report.mapped}
    # A batch norm's running statistics are weights of the network: without a place they are an error.
    whole = fill(path, str(tmp_path / "out2.pt"), "torch", "like_small:Named")
    assert {"norm/running_mean", "norm/weight"} <= {*whole.report.unused}


def test_a_rule_file_leaves_nothing_out_by_itself(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\nfrom = "fc/kernel"\nto = "fc.weight"\nrule = "transpose"\n'
        '[[rule]]\nfrom = "fc/bias"\nto = "fc.bias"\n'
    )
    path = source(tmp_path, "mystery")
    done = fill(path, str(tmp_path / "o.pt"), "torch", "like_small:Named", rules=str(rules))
    assert done.report.unused == ("mystery",)
    permitted = fill(
        path,
        str(tmp_path / "o.pt"),
        "torch",
        "like_small:Named",
        rules=str(rules),
        allow_unused=["mystery"],
    )
    assert permitted.written


def test_a_constant_that_no_layer_of_a_graph_reads_is_an_error(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from tests.test_onnx_operators import N, f, model

    nodes = [
        N("MatMul", ["obs", "W"], ["x"]),
        N("Add", ["x", "b"], ["y"]),
        N("Add", ["y", "table"], ["action"]),
    ]
    proto = model(nodes, {"W": f(4, 4), "b": f(4), "table": f(2, 4)}, (2, 4))
    onnx.save(proto, tmp_path / "net.onnx")
    done = fill(str(tmp_path / "net.onnx"), str(tmp_path / "out.pt"), "torch", "like_small:Named")
    assert done.report.unused == ("table",)
    assert not done.written


@pytest.mark.parametrize(
    "names", [["optimizer/nesterov"], ["optimizer/m"], ["optimizer/nesterov", "optimizer/m"]]
)
def test_what_an_optimizer_loses_decides(names: list[str]) -> None:
    leaves = {attributes(name): leaf(np.ones(2, np.float32), name) for name in ("net/kernel", "optimizer/m")}
    tree = Tree({**leaves, attributes("optimizer/nesterov"): ValueLeaf(value=True)})
    ready = PreparedTree(tree, {path: display(path) for path in tree}, {})
    left = tuple(map(attributes, names))
    entries = [*_optimizer_entries(ready, ConvertedOptimizers(tree, left=left))]
    assert [entry.where for entry in entries] == names
    assert all(entry.decides and entry.hint for entry in entries)


def test_tensors_beside_a_target_are_those_that_pytorch_stores() -> None:
    words = Leaf("string", (1,), Inline(b"\1a"), "s")
    tree = Tree({attributes("a"): leaf(np.ones(2, np.float32)), attributes("s"): words})
    names = {path: display(path) for path in tree}
    plan = ConversionPlan(PreparedTree(tree, names, {}), tree, MappingReport(0, (), ()), kept=("a", "s"))
    assert [display(path) for path in plan.kept_tensors()] == ["a"]
