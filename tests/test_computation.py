"""The drawing of a computation: every operation has a box, and every edge is one of the graph's."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool.commands.inspect import summary
from ckpttool.listing.strips import FlowStage, FlowStrip
from ckpttool.pages import computation
from ckpttool.pages.computation import MOST_BOXES, Computation, draw_strips, find_computation
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.test_architecture import keras_file


def drawn(path: Path | str) -> Computation | None:
    listing = summary(str(path))
    return find_computation(listing.checkpoint, listing.binding, None)


def edges(of: Computation) -> set[tuple[str, str]]:
    """Return the edges by the first lines of their boxes."""
    return {(of.boxes[at].lines[0], box.lines[0]) for box in of.boxes for at in box.inputs}


def node(layer: str, inputs: list[str], cls: str, **config: Any) -> dict[str, Any]:
    """Return a layer of a functional model of Keras 3, called once."""
    calls = [
        {"class_name": "__keras_tensor__", "config": {"shape": [None, 4], "keras_history": [name, 0, 0]}}
        for name in inputs
    ]
    arguments: list[Any] = [calls] if len(calls) > 1 else calls
    called = [{"args": arguments, "kwargs": {}}] if inputs else []
    document = {"module": "keras.layers", "class_name": cls, "config": {"name": layer, **config}}
    return {**document, "name": layer, "inbound_nodes": called}


def write_functional(
    folder: Path, layers: list[dict[str, Any]], inputs: list[str], output: str, arrays: dict[str, list[Any]]
) -> Path:
    """Write a functional model of Keras 3 with these weights, by the names in its file of weights."""
    ends = {"input_layers": [[name, 0, 0] for name in inputs], "output_layers": [[output, 0, 0]]}
    config = {"name": "functional", "layers": layers, **ends}
    file = keras_file(folder, {"class_name": "Functional", "config": config})
    weights = file.with_name("w.h5")
    with h5py.File(weights, "w") as stored:
        for name, of_layer in arrays.items():
            for number, array in enumerate(of_layer):
                stored[f"layers/{name}/vars/{number}"] = np.asarray(array, np.float32)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in {**entries, "model.weights.h5": weights.read_bytes()}.items():
            archive.writestr(name, content)
    return file


WEIGHTS = {"dense": (4, 4), "dense_1": (8, 2)}


@pytest.fixture(scope="module")
def branched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A functional model with two inputs and a connection around a layer."""
    layers = [
        node("left", [], "InputLayer", batch_shape=[None, 4]),
        node("right", [], "InputLayer", batch_shape=[None, 4]),
        node("around", ["left"], "Dense", units=4, activation="relu"),
        node("sum", ["around", "left"], "Add"),
        node("both", ["sum", "right"], "Concatenate", axis=-1),
        node("out", ["both"], "Dense", units=2, activation="linear"),
    ]
    folder = tmp_path_factory.mktemp("keras")
    arrays = {name: [np.zeros(shape), np.zeros(shape[1])] for name, shape in WEIGHTS.items()}
    return write_functional(folder, layers, ["left", "right"], "out", arrays)


def test_a_keras_model_is_drawn_by_its_layers_and_branches(branched: Path) -> None:
    result = drawn(branched)
    assert result is not None
    assert edges(result) >= {
        ("left", "Dense relu"),
        ("Dense relu", "Add"),
        ("left", "Add"),
        ("Add", "Concatenate"),
        ("right", "Concatenate"),
        ("Concatenate", "Dense"),
    }
    assert len(edges(result) - {("Dense", "output")}) == 6


@pytest.mark.parametrize("sample", [TF_SAMPLE, TORCH_SAMPLE], ids=["tf", "torch"])
def test_an_agents_networks_are_chains_below_their_titles(sample: Path) -> None:
    result = drawn(sample)
    assert result is not None
    titles = [box.lines[0] for box in result.boxes if box.kind == "title"]
    assert titles == ["actor", "critic/q1"]
    assert all(len(box.inputs) == (box.kind != "title") for box in result.boxes)
    assert result.edges == len(result.boxes) - 2 * len(titles)
    assert [line.split(" -> ")[-1] for line in result.lines()] == ["action [1] -2 to 2", "Q [1]"]


def test_weights_alone_have_no_computation(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", w=np.ones((2, 3, 4)))
    assert drawn(tmp_path / "weights.npz") is None


@pytest.fixture
def residual(tmp_path: Path) -> Path:
    """A graph of many residual blocks: sixty modules of ten operations."""
    onnx = pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    nodes, value = [], "x"
    for block in range(60):
        start = value
        for at in range(9):
            nodes.append(
                helper.make_node("Relu", [value], [f"b{block}_{at}"], f"/net/block{block}/Relu_{at}")
            )
            value = f"b{block}_{at}"
        nodes.append(helper.make_node("Add", [value, start], [f"b{block}"], f"/net/block{block}/Add"))
        value = f"b{block}"
    ends = [helper.make_tensor_value_info(name, kind, [1, 3]) for name in ("x", value)]
    model = helper.make_model(helper.make_graph(nodes, "deep", ends[:1], ends[1:]))
    onnx.save(model, str(tmp_path / "deep.onnx"))
    return tmp_path / "deep.onnx"


def test_operations_of_a_module_share_a_box_where_there_are_many(
    residual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = drawn(residual)
    assert result is not None
    assert len(result.boxes) == 61
    assert result.notes
    assert [box.inputs for box in result.boxes] == [(), *((at,) for at in range(60))]
    for most in (2, 7, 1000):
        monkeypatch.setattr(computation, "MOST_BOXES", most)
        small = drawn(residual)
        assert small is not None
        assert len(small.boxes) <= max(most, 3)
        assert bool(small.notes) == (most < 600)
        listed = (
            sum(int(box.lines[1].split()[0].replace(",", "")) for box in small.boxes[1:]) if most < 9 else 600
        )
        assert listed == 600
        assert all(at < number for number, box in enumerate(small.boxes) for at in box.inputs)


def test_of_many_and_deep_networks_the_ends_are_drawn() -> None:
    stages = tuple(FlowStage("layer", f"dense {at}", (4,), 20) for at in range(900))
    strips = [FlowStrip(f"network {at}", stages) for at in range(80)]
    for few in (strips[:1], strips[:7], strips):
        result = draw_strips(few)
        assert len(result.boxes) <= MOST_BOXES + len(few) + 10
        names = {box.lines[0] for box in result.boxes}
        assert {"network 0", "dense 0", "dense 899"} <= names
    assert result.notes


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_script_is_drawn_by_its_modules_with_the_traced_shapes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Gate(torch.nn.Module):
        """A layer whose input goes around it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.inner(x)) + x

    class Choice(torch.nn.Module):
        """A condition, whose branches use a value from outside."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            return y * 2 if bool(x.sum() > 0) else y - 1

    torch.jit.save(torch.jit.trace(Gate().eval(), torch.zeros(2, 4)), str(tmp_path / "gate.pt"))
    gate = drawn(tmp_path / "gate.pt")
    assert gate is not None
    kinds = [box.lines[0] for box in gate.boxes]
    assert kinds[1:4] == ["Linear", "Relu", "Add"]
    assert gate.boxes[3].inputs == (2, 0)
    assert gate.boxes[1].lines[2] == "[2, 4]"
    torch.jit.save(torch.jit.script(Choice()), str(tmp_path / "choice.pt"))
    choice = drawn(tmp_path / "choice.pt")
    assert choice is not None
    assert ("Tanh", "If") in edges(choice)
