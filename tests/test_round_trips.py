"""There and back gives the same bytes under the same keys: any model of PyTorch and of TensorFlow."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.write import save
from ckpttool.core import Leaf, MappingError, Tree
from ckpttool.formats import open_checkpoint
from tests.trees import attributes, leaf

NAMES = st.text("abcxyz_", min_size=1, max_size=4).filter(lambda name: name.strip("_"))
SIZES = st.integers(1, 5)
KINDS = ("dense", "norm", "conv", "batch", "recurrent", "odd", "counter")
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def module(kind: str, n: int, m: int) -> Mapping[str, torch.Tensor]:
    """Return the state of a layer, or tensors of no known kind."""
    makers: dict[str, Any] = {
        "dense": lambda: torch.nn.Linear(n, m).state_dict(),
        "norm": lambda: torch.nn.LayerNorm(n).state_dict(),
        "conv": lambda: torch.nn.Conv2d(n + 1, m, 3).state_dict(),
        "batch": lambda: torch.nn.BatchNorm1d(n).state_dict(),
        "recurrent": lambda: torch.nn.LSTM(n, m).state_dict(),
        "odd": lambda: {"table": torch.randn(n, m, 2, 1, 1), "name": torch.arange(n)},
        "counter": lambda: {"steps": torch.tensor(n)},
    }
    return makers[kind]()  # type: ignore[no-any-return]


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    torch.manual_seed(draw(st.integers(0, 9)))
    layers = draw(st.lists(st.tuples(NAMES, st.sampled_from(KINDS), SIZES, SIZES), min_size=1, max_size=6))
    return {
        f"{name}{number}.{inner}": tensor
        for number, (name, kind, n, m) in enumerate(layers)
        for inner, tensor in module(kind, n, m).items()
    } | {"last.weight": torch.ones(2, 2), "last.bias": torch.zeros(2)}


@LAW
@given(states(), st.sampled_from(["tf", "tf1"]))
def test_pytorch_there_and_back(state: dict[str, torch.Tensor], to: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, there, back = (str(Path(folder, name)) for name in ("a.pt", "b-1", "c.pt"))
        torch.save(state, first)
        try:
            convert(first, there, to=to, allow_missing=True, sync=False)
        except MappingError:  # the largest matrix would be missing
            assert [path.name for path in Path(folder).iterdir()] == ["a.pt"]
            return
        convert(there, back, sync=False)
        contents = torch.load(back, weights_only=True)
        assert list(contents) == list(state)
        assert all(contents[name].dtype == state[name].dtype for name in state)
        assert all(torch.equal(contents[name], state[name]) for name in state)
        assert digest(back).sha256 == digest(first).sha256


@LAW
@given(
    st.lists(
        st.tuples(NAMES, st.sampled_from(["kernel", "table", "gamma"]), SIZES, SIZES), min_size=1, max_size=6
    )
)
def test_tensorflow_there_and_back(layers: list[tuple[str, str, int, int]]) -> None:
    numbers = np.random.default_rng(len(layers))
    leaves: dict[Any, Leaf] = {}
    for number, (name, kind, n, m) in enumerate(layers):
        shapes = {"kernel": (n, m), "bias": (m,)} if kind == "kernel" else {kind: (n, m, 2)}
        for inner, shape in shapes.items():
            path = f"net/{name}{number}/{inner}"
            leaves[attributes(path)] = leaf(numbers.standard_normal(shape).astype(np.float32), path)
    leaves[attributes("net/last/kernel")] = leaf(np.ones((2, 2), np.float32), "net/last/kernel")
    with tempfile.TemporaryDirectory() as folder:
        first, there, back = (str(Path(folder, name)) for name in ("a-1", "b.pt", "c-1"))
        save(Tree(leaves), first, "tf", sync=False)
        convert(first, there, allow_missing=True, sync=False)
        assert torch.load(there, weights_only=True)
        convert(there, back, to="tf", sync=False)
        assert digest(back).sha256 == digest(first).sha256
        keys = [[item.key for _, item in open_checkpoint(path).tree.tensors()] for path in (first, back)]
        assert sorted(keys[0]) == sorted(keys[1])


@pytest.mark.parametrize("name", ["optimizer", "shared"])
def test_a_model_that_trains_comes_back(name: str, tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    if name == "shared":
        net.append(net[0])
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    torch.save({"net": net.state_dict(), "optim": optimizer.state_dict(), "epoch": 3}, tmp_path / "a.pt")
    convert(str(tmp_path / "a.pt"), str(tmp_path / "b-1"), to="tf", allow_missing=True, sync=False)
    convert(str(tmp_path / "b-1"), str(tmp_path / "c.pt"), sync=False)
    contents = torch.load(tmp_path / "c.pt", weights_only=True)
    assert contents["epoch"] == 3
    net.load_state_dict(contents["net"])
    optimizer.load_state_dict(contents["optim"])
    assert digest(str(tmp_path / "c.pt")).sha256 == digest(str(tmp_path / "a.pt")).sha256
