"""Images, memory and several inputs: every backend gives what PyTorch's modules and Keras's layers give."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import EnvironmentMismatchError, UnsupportedError, UsageError, plugins
from ckpttool.evaluation.agent_networks import ActionBounds, derive_network_settings
from ckpttool.evaluation.restore import restore_agent
from ckpttool.networks import (
    Activation,
    Add,
    Affine,
    Concat,
    Convolution,
    Dense,
    Flatten,
    Multiply,
    Network,
    NetworkBuilder,
    Node,
    Slice,
    Transpose,
    Worker,
    add_gru,
    add_lstm,
    policy_network,
    value_shapes,
)
from tests import recurrent_keras, tensorflow_child
from tests.golden_texts import Golden

torch = pytest.importorskip("torch")
STEPS, BATCH, OBS, UNITS = 20, 3, 5, 4


@pytest.fixture(scope="module")
def tensorflow(workers: Callable[[str], Worker]) -> Worker:
    pytest.importorskip("onnx")
    return workers("tensorflow")


@pytest.fixture(params=["numpy", "torch", "onnxruntime", "tensorflow"])
def backend(request: pytest.FixtureRequest) -> Any:
    plugin = plugins.find("backends", request.param)
    if not plugin.available():
        pytest.skip(f"{request.param} is not installed")
    return request.getfixturevalue("tensorflow") if request.param == "tensorflow" else plugin.load()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("f4")


def pictures(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)


def numbers(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.detach().numpy()
    return array


def batch_norm(norm: Any) -> Affine:
    """Return torch's batch norm with its running statistics: with the channels last it is an affine map."""
    scale = numbers(norm.weight) / np.sqrt(numbers(norm.running_var) + norm.eps)
    return Affine(scale, numbers(norm.bias) - numbers(norm.running_mean) * scale)


def image_network(model: Any, *, first: bool) -> Network:
    """Return torch's convolutions and linear layer on images with the channels first, or last."""
    builder = NetworkBuilder([("obs", (3, 20, 24) if first else (20, 24, 3))])
    if first:
        builder.add(Transpose((1, 2, 0)))
    builder.add(Affine(np.full(1, 1 / 255, "f4"), np.zeros(1, "f4")))
    for conv in (model[0], model[3]):
        kernel = numbers(conv.weight).transpose(2, 3, 1, 0)
        down, right = conv.padding
        bias = None if conv.bias is None else numbers(conv.bias)
        builder.add(Convolution(kernel, bias, conv.stride, ((down, down), (right, right))))
        if conv is model[0]:
            builder.add(batch_norm(model[1]))
        builder.add(Activation("relu"))
    builder.add(Transpose((2, 0, 1)))
    builder.add(Flatten())
    builder.add(Dense(numbers(model[6].weight).T, numbers(model[6].bias)))
    return builder.done()


@pytest.fixture(scope="module")
def convolutions() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, (5, 3), stride=(2, 3), padding=(1, 0)),
        torch.nn.BatchNorm2d(6, eps=1e-3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(6, 8, 3, bias=False),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 7 * 6, 4),
    ).eval()
    for tensor in (model[1].running_mean, model[1].running_var, model[1].weight, model[1].bias):
        torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return model


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("batch", [1, 7])
def test_images(backend: Any, convolutions: Any, batch: int, *, first: bool) -> None:
    obs = pictures(batch, 3, 20, 24)
    expected = numbers(convolutions(torch.tensor(obs).float() / 255))
    images = obs if first else np.ascontiguousarray(obs.transpose(0, 2, 3, 1))
    outputs, _ = backend.build(image_network(convolutions, first=first)).step(images)
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5)


def test_images_in_float64(backend: Any, convolutions: Any, golden: Golden) -> None:
    network = image_network(convolutions, first=False).cast("float64")
    obs = pictures(2, 20, 24, 3)
    if backend.NAME == "onnxruntime":
        with pytest.raises(UnsupportedError) as caught:
            backend.build(network)
        golden(caught.value)
        return
    expected, _ = plugins.find("backends", "numpy").load().build(network).step(obs)
    outputs, _ = backend.build(network).step(obs)
    assert outputs.dtype == np.float64
    np.testing.assert_allclose(outputs, expected, rtol=1e-12, atol=1e-12)


def torch_lstm(layers: int) -> tuple[Any, Network]:
    torch.manual_seed(1)
    cell = torch.nn.LSTM(OBS, UNITS, layers, batch_first=True)
    names = [(f"h{n}", f"c{n}") for n in range(layers)]
    builder = NetworkBuilder([("obs", OBS)], [(name, UNITS) for pair in names for name in pair])
    for n, pair in enumerate(names):
        w, r, b, rb = (
            numbers(getattr(cell, f"{name}_l{n}"))
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        add_lstm(builder, pair, w.T, r.T, b + rb)
    return cell, builder.done()


def torch_gru() -> tuple[Any, Network]:
    torch.manual_seed(2)
    cell = torch.nn.GRU(OBS, UNITS, batch_first=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    # PyTorch's gates are r, z, n.
    order = np.concatenate([np.arange(UNITS, 2 * UNITS), np.arange(UNITS), np.arange(2 * UNITS, 3 * UNITS)])
    w, r, b, rb = (numbers(getattr(cell, name))[order] for name in names)
    builder = NetworkBuilder([("obs", OBS)], [("h", UNITS)])
    add_gru(builder, "h", w.T, r.T, (b, rb))
    return cell, builder.done()


@pytest.mark.parametrize("factory", [lambda: torch_lstm(1), lambda: torch_lstm(2), torch_gru])
def test_cells_of_torch(backend: Any, factory: Callable[[], tuple[Any, Network]]) -> None:
    cell, network = factory()
    obs = normal(STEPS, BATCH, OBS)
    expected = numbers(cell(torch.tensor(obs.transpose(1, 0, 2)))[0])
    policy, state = backend.build(network), ()
    for step, inputs in enumerate(obs):
        outputs, state = policy.step(inputs, state)
        np.testing.assert_allclose(outputs, expected[:, step], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def keras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keras")
    np.save(folder / "obs.npy", normal(BATCH, STEPS, OBS))
    tensorflow_child.run(recurrent_keras.__file__, "actors", folder)
    return folder


@pytest.mark.tensorflow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed")
@pytest.mark.parametrize("name", recurrent_keras.CELLS)
def test_actors_of_keras_with_memory(backend: Any, keras: Path, name: str) -> None:
    agent = restore_agent(str(keras / name))
    part, limit = agent.playable("actor"), (recurrent_keras.SCALE,) * 2
    assert part is not None
    wiring, _ = derive_network_settings(agent, ActionBounds([-n for n in limit], limit, None))
    policy, state = backend.build(policy_network(agent.tree, part, wiring, agent.front("actor"))), ()
    expected = np.load(keras / f"{name}.npy")
    assert np.ptp(expected, axis=1).min() > 0.1
    for step, inputs in enumerate(np.load(keras / "obs.npy").transpose(1, 0, 2)):
        outputs, state = policy.step(inputs, state)
        np.testing.assert_allclose(outputs, expected[:, step], rtol=1e-5, atol=1e-5)


def test_several_inputs_of_other_shapes(backend: Any) -> None:
    nodes = (
        Node(Flatten(), (0,)),
        Node(Concat(), (2, 1)),
        Node(Slice(2, 6), (3,)),
        Node(Multiply(), (4, 4, 4)),
        Node(Add(), (5, 4)),
    )
    network = Network((("grid", (2, 2)), ("vector", 3)), nodes, 6)
    obs = {"vector": normal(BATCH, 3), "grid": normal(BATCH, 2, 2)}
    values = np.concatenate([obs["grid"].reshape(BATCH, 4), obs["vector"]], axis=1)[:, 2:6]
    outputs, _ = backend.build(network).step(obs)
    np.testing.assert_allclose(outputs, values**3 + values, rtol=1e-5, atol=1e-6)


def chain(shape: tuple[int, ...], layer: Any) -> Network:
    return Network((("obs", shape),), (Node(layer, (0,)),), 1)


KERNEL = np.zeros((5, 3, 2, 8), "f4")


@pytest.mark.parametrize(
    "network",
    [
        pytest.param(chain((9, 9, 3), Convolution(KERNEL)), id="channels"),
        pytest.param(chain((9, 2, 2), Convolution(KERNEL)), id="small"),
        pytest.param(chain((9, 9, 2), Convolution(KERNEL, np.zeros(7))), id="bias"),
        pytest.param(chain((9, 9), Transpose((1, 2, 0))), id="axes"),
        pytest.param(chain((9,), Slice(4, 10)), id="slice"),
        pytest.param(Network((("a", 2), ("b", 3)), (Node(Add(), (0, 1)),), 2), id="add"),
    ],
)
def test_what_does_not_fit_is_refused(network: Network, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        value_shapes(network)
    golden(caught.value)


def test_another_size_of_image_says_both(backend: Any) -> None:
    policy = backend.build(chain((9, 9, 2), Convolution(np.ones((5, 3, 2, 8), "f4"))))
    with pytest.raises(EnvironmentMismatchError, match=r"9, 9, 2.*8, 9, 2"):
        policy.step(np.zeros((1, 8, 9, 2), "f4"))
