"""Every layer kind against both frameworks: converted weights give the outputs that they gave before."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.core import File, Leaf, Span
from ckpttool.mapping import apply_plan, flattening, layer_kinds, layers
from tests import keras_layers, tensorflow_child
from tests.keras_layers import LAYERS
from tests.trees import tensorflow_tree

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-5
KINDS = ["square=dense", "embedding=embedding", "prelu=prelu:2", "depthwise=depthwise:2"]
KINDS += ["separable=separable:2", "attention=attention:2"]
FLATTEN = ["dense=no", "square=no"]


class Last:
    """Calls a module on arrays whose channels are last."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, given: Any) -> Any:
        import torch

        return torch.movedim(self.module(torch.movedim(given, -1, 1)), 1, -1)


def twins() -> dict[str, Any]:
    """Return a torch module for each of the layers."""
    from torch import nn

    separable = OrderedDict(depthwise=nn.Conv2d(3, 6, 3, groups=3, bias=False), pointwise=nn.Conv2d(6, 5, 1))
    return {
        "dense": nn.Linear(7, 5),
        "square": nn.Linear(7, 7, bias=False),
        "embedding": nn.Embedding(6, 6),
        "conv1": nn.Conv1d(4, 5, 3, dilation=2),
        "conv2": nn.Conv2d(4, 6, (3, 2), stride=2, groups=2),
        "conv3": nn.Conv3d(3, 5, 2),
        "transposed": nn.ConvTranspose2d(3, 5, 3, stride=2),
        "depthwise": nn.Conv2d(3, 6, 3, groups=3),
        "separable": nn.Sequential(separable),
        "batch_norm": nn.BatchNorm2d(3, eps=1e-3),
        "unscaled": nn.BatchNorm2d(3, eps=1e-3),
        "layer_norm": nn.LayerNorm(6, eps=1e-3),
        "prelu": nn.PReLU(3),
        "lstm": nn.LSTM(3, 5, batch_first=True),
        "gru": nn.GRU(3, 5, batch_first=True),
        "rnn": nn.RNN(3, 5, batch_first=True),
        "both_ways": nn.LSTM(3, 4, bidirectional=True, batch_first=True),
        "attention": nn.MultiheadAttention(8, 2, batch_first=True),
        "group_norm": nn.GroupNorm(2, 4, eps=1e-3),
    }


IMAGES = frozenset(("conv1", "conv2", "conv3", "transposed", "depthwise", "separable", "batch_norm"))
IMAGES |= frozenset(("unscaled", "prelu", "group_norm"))


def outputs(modules: dict[str, Any]) -> dict[str, np.ndarray]:
    import torch

    found = {}
    for name, given in keras_layers.inputs().items():
        module = modules[name].eval()
        tensor = torch.from_numpy(given)
        with torch.no_grad():
            if name == "attention":
                made = module(tensor, tensor, tensor)[0]
            else:
                made = Last(module)(tensor) if name in IMAGES else module(tensor)
        found[name] = np.asarray(made[0] if isinstance(made, tuple) else made)
    return found


def randomised(modules: dict[str, Any]) -> torch.nn.ModuleDict:
    import torch

    generator = torch.Generator().manual_seed(1)
    whole = torch.nn.ModuleDict(modules)
    for name, tensor in whole.state_dict().items():
        if tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator) * 0.4
            tensor.copy_(value.abs() + 0.5 if name.endswith("running_var") else value)
    return whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("kinds")
    (folder / "from_torch").mkdir()
    modules = twins()
    torch.save(randomised(modules).state_dict(), folder / "torch.pt")
    np.savez(folder / "torch.npz", **outputs(modules))
    for name, to in (("from_torch/ckpt-1", "tf"), ("from_torch.weights.h5", "keras")):
        done = convert(
            str(folder / "torch.pt"), str(folder / name), to=to, kinds=KINDS, flatten=FLATTEN, sync=False
        )
        assert done.report.complete, (done.report.unused, done.report.notes)
    assert tensorflow_child.run(keras_layers.__file__, "run", folder) == ["keras", "tf_keras"]
    return folder


@pytest.fixture(scope="module", params=["keras", "tf_keras"])
def loaded(
    folder: Path, request: pytest.FixtureRequest
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what a library's layers gave, and what torch's give with their weights, loaded strictly."""
    import torch

    # pytest may make this fixture twice, because workers take tests in any order.
    target = folder / f"{request.param}.pt"
    done = convert(str(folder / request.param / "ckpt"), str(target), flatten=FLATTEN, force=True, sync=False)
    assert done.report.complete, (done.report.unused, done.report.notes)
    modules = twins()
    theirs = dict(np.load(folder / f"{request.param}.npz"))
    whole = torch.nn.ModuleDict({name: modules[name] for name in theirs})
    state = torch.load(target, weights_only=True)
    assert whole.load_state_dict(state, strict=True)
    return theirs, outputs(modules)


@pytest.mark.parametrize("name", LAYERS)
def test_keras_layers_give_the_same_in_torch(
    name: str, loaded: tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
) -> None:
    theirs, ours = loaded
    if name not in theirs:
        assert name in keras_layers.ONLY_KERAS_3
        return
    np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("way", ["keras_restored", "tf_keras_restored", "keras_loaded"])
def test_torch_layers_give_the_same_in_keras(way: str, folder: Path) -> None:
    ours, theirs = np.load(folder / "torch.npz"), np.load(folder / f"{way}.npz")
    assert len(theirs.files) >= len(LAYERS) - 3
    for name in theirs.files:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("there", ["from_torch/ckpt-1", "from_torch.weights.h5"])
def test_the_way_back_gives_the_first_file_again(there: str, folder: Path, tmp_path: Path) -> None:
    done = convert(str(folder / there), str(tmp_path / "back.pt"), sync=False)
    assert done.report.complete, (done.report.unused, done.report.notes)
    assert done.digest == digest(str(folder / "torch.pt")).sha256


@pytest.mark.parametrize(
    ("name", "module"),
    [("one", "LSTM"), ("two", "LSTM"), ("three", "RNN"), ("four", "LSTM"), ("five", "GRU")],
)
def test_cells_of_tensorflow_1_and_cudnn(name: str, module: str, folder: Path) -> None:
    import torch

    cells = dict(np.load(folder / "cells.npz"))
    weights = {
        path: value for path, value in cells.items() if path.startswith(name) and "outputs" not in path
    }
    tree = tensorflow_tree(weights)
    plan = flattening.plan_to_torch(tree)
    there = apply_plan(tree, plan)
    state = {
        there.names[path].replace("/", ".").removeprefix(f"{name}."): torch.from_numpy(leaf.array().copy())
        for path, leaf in there.tensors()
    }
    cell = getattr(torch.nn, module)(keras_layers.CELLS_INPUT[2], keras_layers.UNITS, batch_first=True)
    cell.load_state_dict(state, strict=True)
    given = np.random.default_rng(4).standard_normal(keras_layers.CELLS_INPUT).astype(np.float32)
    with torch.no_grad():
        made = cell(torch.from_numpy(given))[0].numpy()
    np.testing.assert_allclose(made, cells[f"{name}/outputs"], rtol=0, atol=TOLERANCE)
    assumed = [said for said in plan.assumed if "forget bias" in said]
    assert len(assumed) == (name in ("one", "two"))


def leaf(rank: int) -> Leaf:
    return Leaf("float32", (2,) * rank, Span(File("x", 0, 0, 0), 0, 0), "x")


@pytest.mark.parametrize("kind", layers.KINDS, ids=lambda kind: f"{kind.framework} {kind.name} {kind.form}")
def test_kinds_found_by_their_names_are_all_that_fit(kind: layer_kinds.LayerKind) -> None:
    whole = {weight.name: leaf(weight.rank) for weight in kind.weights}
    groups = [
        whole,
        {w.name: leaf(w.rank) for w in kind.weights if not w.optional},
        *({name: each for name, each in whole.items() if name != left} for left in whole),
        {name: leaf(len(each.shape) + 1) for name, each in whole.items()},
        {**whole, "more": leaf(1)},
        {},
    ]
    for group in groups:
        for framework in ("torch", "tensorflow"):
            fitting = [each for each in layers.KINDS if each.framework == framework and each.fits(group)]
            plain = tuple(each for each in fitting if each.modules is None)
            usual = tuple(each for each in plain if not each.is_selected)
            # The unusual orientation of a matrix counts where a bias leaves no other.
            biased = len(group) > 1 and any(len(each.shape) == 1 for each in group.values())
            assert layers.candidate_kinds(group, framework) == (usual or (plain if biased else ()))
