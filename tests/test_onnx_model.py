"""Networks as ONNX models: every kind of layer and activation gives in onnxruntime what it gives in NumPy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.core.sidecar import ACTIVATIONS, ActivationName
from ckpttool.networks import (
    Activation,
    Affine,
    Clip,
    Dense,
    Layer,
    LayerNorm,
    Network,
    Node,
    numpy_backend,
)
from ckpttool.networks.build import HEADS
from ckpttool.verification.output_comparison import make_observations
from tests.test_network import EVERY_KIND, chain

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from ckpttool.networks import onnx_backend  # noqa: E402  # they need onnx
from ckpttool.networks.network_graph import network_graph  # noqa: E402
from ckpttool.networks.onnx_export import encode_graph  # noqa: E402

NAMES = ACTIVATIONS
WITHOUT_STATE = replace(EVERY_KIND, states=())


def encoded(network: Network, **metadata: str) -> bytes:
    places = [f"p{number}" for number in range(len(network.nodes))]
    return encode_graph(network_graph(network, places, "y"), metadata)


def fed(network: Network) -> dict[str, np.ndarray]:
    observations = make_observations(network)
    return {"obs": observations} if isinstance(observations, np.ndarray) else dict(observations)


def require_same(network: Network) -> None:
    """Assert that 1000 outputs agree to 1e-6 of the largest number on the way."""
    obs = fed(network)
    expected = numpy_backend.build(network).step(obs)[0]
    outputs = onnx_backend.run_model(encoded(network), obs)
    steps = [replace(network, output=len(network.inputs) + n) for n in range(len(network.nodes))]
    largest = max(float(np.abs(numpy_backend.build(step).step(obs)[0]).max()) for step in steps)
    assert outputs.shape == expected.shape
    assert outputs.dtype == expected.dtype
    assert np.abs(outputs - expected).max() <= 1e-6 * max(1.0, largest)


@pytest.mark.parametrize("name", NAMES)
def test_every_activation(name: ActivationName) -> None:
    # Up to 400 on either side, where exponentials overflow.
    spread = np.diag(np.array([1, 10, 100], "f4"))
    network = chain(3, Dense(spread), Activation(name, 0.3))
    require_same(network)
    assert np.isfinite(onnx_backend.run_model(encoded(network), fed(network))).all()


def test_every_kind_of_layer() -> None:
    generator = np.random.default_rng(3)

    def filled(layer: Layer) -> Layer:
        drawn = {
            name: generator.standard_normal(getattr(layer, name).shape).astype("f4")
            for name in ("kernel", "bias", "scale", "offset", "shift")
            if isinstance(getattr(layer, name, None), np.ndarray)
        }
        return replace(layer, **drawn) if drawn else layer

    nodes = tuple(replace(node, layer=filled(node.layer)) for node in WITHOUT_STATE.nodes)
    require_same(replace(WITHOUT_STATE, nodes=nodes))


def test_numbers_of_the_other_byte_order_and_order_of_axes() -> None:
    kernel = np.asfortranarray(np.arange(12, dtype=">f4").reshape(3, 4))
    network = chain(3, Dense(kernel, np.arange(4, dtype=">f4")))
    require_same(network)


def test_a_network_in_64_bits_stays_one() -> None:
    network = chain(3, Dense(np.eye(3)), Activation("tanh"), Affine(np.full(3, 2.0), np.full(3, 1e-9)))
    model = onnx.load_from_string(encoded(network))
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {
        onnx.TensorProto.DOUBLE
    }
    obs = {"obs": fed(network)["obs"].astype("f8")}
    outputs = onnx_backend.run_model(encoded(network), obs)
    assert np.abs(outputs - numpy_backend.build(network).step(obs)[0]).max() <= 1e-14


@st.composite
def policies(draw: st.DrawFn) -> Network:
    """Statistics with or without a limit, layers of any width, layer norms, every action map."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    obs, act = draw(st.integers(1, 20)), draw(st.integers(1, 6))
    sizes = [obs, *draw(st.lists(st.integers(1, 64), max_size=3)), act]
    layers: list[Layer] = []
    if draw(st.booleans()):
        mean = (100 * generator.standard_normal(obs)).astype("f4")
        layers += [Affine(np.ones(obs, "f4"), -mean)]
        layers += [Affine(generator.uniform(0.1, 2, obs).astype("f4"), np.zeros(obs, "f4"))]
        layers += [Clip(np.full(obs, -5, "f4"), np.full(obs, 5, "f4"))] if draw(st.booleans()) else []
    for rows, columns in pairwise(sizes):
        kernel = (generator.standard_normal((rows, columns)) / np.sqrt(rows)).astype("f4")
        bias = generator.standard_normal(columns).astype("f4") if draw(st.booleans()) else None
        layers.append(Dense(kernel, bias))
        if columns > 1 and draw(st.booleans()):
            # Close to no spread at all, a norm divides by its epsilon, and rounding is all that is left.
            scale, offset = (generator.standard_normal(columns).astype("f4") for _ in range(2))
            layers.append(LayerNorm(scale, offset, 1e-2))
        layers.append(Activation(draw(st.sampled_from(NAMES))))
    low = generator.uniform(-3, 0, act).astype("f4")
    layers += HEADS[draw(st.sampled_from(sorted(HEADS)))](low, (low + 2).astype("f4"))
    return chain(obs, *layers)


@given(policies())
@settings(deadline=None)
def test_any_policy_acts_as_in_numpy_and_is_the_same_file_twice(network: Network) -> None:
    require_same(network)
    assert encoded(network, a="b") == encoded(network, a="b")


def test_what_a_reader_of_the_file_sees() -> None:
    model = onnx.load_from_string(encoded(WITHOUT_STATE, env="Pendulum-v1"))
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 13)]
    assert model.ir_version == 7
    assert model.producer_name == "ckpttool"
    assert {prop.key: prop.value for prop in model.metadata_props} == {"env": "Pendulum-v1"}
    shown = {
        value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    assert shown == {"obs": ["batch", 3], "action": ["batch", 2], "h": ["batch", 4], "y": ["batch", 4]}
    constants = [constant.name for constant in model.graph.initializer]
    assert {"p2/kernel", "p2/bias", "p3/scale", "p3/offset", "p5/kernel", "p8/low"} <= set(constants)
    assert len(constants) == len(set(constants))
    assert not model.doc_string


def test_what_changes_nothing_is_left_out_and_an_input_can_be_the_result() -> None:
    network = chain(3, Affine(np.ones(3, "f4"), np.zeros(3, "f4")), Activation("linear"))
    model = onnx.load_from_string(encoded(network))
    assert [node.op_type for node in model.graph.node] == ["Identity"]
    require_same(network)


def test_the_result_may_be_used_on_the_way_too() -> None:
    nodes = (Node(Dense(np.eye(3, dtype="f4")), (0,)), Node(Activation("tanh"), (1,)))
    require_same(Network((("obs", 3),), nodes, 1))


def test_onnxruntime_joins_the_operators_that_the_opset_lacks(tmp_path: Path) -> None:
    layers = (Dense(np.eye(3, dtype="f4")), LayerNorm(np.ones(3, "f4"), np.zeros(3, "f4"), 1e-5))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "joined.onnx")
    model = encoded(chain(3, *layers, Activation("gelu"), Activation("silu")))
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in onnx.load(tmp_path / "joined.onnx").graph.node]
    assert "LayerNormalization" in operators
    assert "Gelu" in operators
    assert len(operators) <= 5


def test_without_onnxruntime_the_onnx_library_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    obs = fed(WITHOUT_STATE)
    expected = onnx_backend.run_model(encoded(WITHOUT_STATE), obs)
    assert onnx_backend.onnx_engine() == f"onnxruntime {onnxruntime.__version__}"
    monkeypatch.setattr(onnx_backend.importlib.util, "find_spec", lambda name: None)
    assert onnx_backend.onnx_engine().startswith("the reference evaluator of onnx")
    assert np.abs(onnx_backend.run_model(encoded(WITHOUT_STATE), obs) - expected).max() <= 1e-6


def test_a_network_with_memory_gives_its_next_state_too() -> None:
    model = onnx.load_from_string(encoded(EVERY_KIND))
    assert [value.name for value in model.graph.input] == ["obs", "action", "h"]
    assert [value.name for value in model.graph.output] == ["y", "next_h"]
