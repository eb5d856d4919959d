"""Graphs of Keras models: each layer and setting computes what Keras does with the same file."""

from __future__ import annotations

import functools
import inspect
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ckpttool
from ckpttool.core import Tree, UnsupportedError, kinds
from ckpttool.graphs import Graph, evaluate, infer_shapes, read_graph
from ckpttool.graphs.keras import read_document
from ckpttool.graphs.operators import is_known
from ckpttool.libraries.graph_programs import lower_policy
from ckpttool.networks import NetworkBuilder, numpy_backend
from ckpttool.networks.build import add_program
from ckpttool.verification.output_comparison import run_network
from tests import tensorflow_child

pytestmark = pytest.mark.tensorflow
BATCH = 3

# A branch takes Keras's layers and functions and the inputs, and returns one output of the model.
Branch = Callable[[Any, Any], Any]


def vectors(keras: Any) -> dict[str, Branch]:
    layers, ops = keras.layers, keras.ops
    rows: dict[str, Branch] = {
        f"activation_{name}": lambda x, name=name: layers.Dense(4, activation=name)(x)
        for name in (
            *("linear", "relu", "tanh", "sigmoid", "softplus", "softsign", "elu", "selu", "gelu", "silu"),
            *("exponential", "leaky_relu", "relu6", "celu", "mish", "hard_sigmoid", "hard_silu", "softmax"),
            *("log_softmax", "log_sigmoid", "squareplus", "soft_shrink", "hard_shrink", "tanh_shrink"),
            *("hard_tanh", "glu"),
        )
    }
    dense = layers.Dense
    shared = layers.Dense(6, activation="tanh")
    inner = keras.Sequential([dense(5, activation="relu"), layers.Dropout(0.5), dense(6)])
    side = keras.Input((6,))
    functional = keras.Model(side, [dense(3)(side), layers.Add()([dense(2)(side), dense(2)(side)])])
    rows |= {
        "no_bias": dense(4, use_bias=False),
        "activation_layer": lambda x: dense(4, activation=layers.LeakyReLU(negative_slope=0.1))(x),
        "activation_elu": lambda x: dense(4, activation=layers.ELU(alpha=0.5))(x),
        "relu_slope": layers.ReLU(negative_slope=0.25),
        "relu_limit": layers.ReLU(max_value=0.5),
        "relu_threshold": layers.ReLU(threshold=0.3, max_value=0.8),
        "prelu": layers.PReLU(alpha_initializer="random_normal"),
        "softmax_axes": lambda x: layers.Softmax(axis=[1, 2])(layers.Reshape((2, 3))(x)),
        "einsum": layers.EinsumDense("ab,cb->ac", output_shape=7, bias_axes="c"),
        "noise": lambda x: layers.GaussianNoise(0.3)(layers.AlphaDropout(0.2)(x)),
        "batch_norm": layers.BatchNormalization(epsilon=0.01),
        "batch_norm_plain": layers.BatchNormalization(center=False, scale=False),
        "layer_norm": layers.LayerNormalization(epsilon=0.1),
        "layer_norm_plain": layers.LayerNormalization(center=False, scale=False),
        "layer_norm_rms": layers.LayerNormalization(rms_scaling=True),
        "group_norm": layers.GroupNormalization(groups=3),
        "rms_norm": layers.RMSNormalization(),
        "unit_norm": layers.UnitNormalization(),
        "spectral_norm": lambda x: layers.SpectralNormalization(dense(3))(x),
        "normalization": layers.Normalization(mean=[1.0, 2, 3, 4, 5, 6], variance=[1.0, 4, 9, 0, 25, 36]),
        "normalization_inverted": layers.Normalization(mean=2.0, variance=4.0, axis=None, invert=True),
        "rescaling": layers.Rescaling(2.0, offset=-1.0),
        "repeat": layers.RepeatVector(4),
        "average": lambda x: layers.Average()([dense(3)(x), dense(3)(x), dense(3)(x)]),
        "maximum": lambda x: layers.Maximum()([dense(3)(x), dense(3)(x)]),
        "minimum": lambda x: layers.Minimum()([dense(3)(x), dense(3)(x)]),
        "subtract": lambda x: layers.Subtract()([dense(3)(x), dense(3)(x)]),
        "multiply": lambda x: layers.Multiply()([dense(3)(x), dense(3)(x)]),
        "concatenate": lambda x: layers.Concatenate()([dense(3)(x), x, dense(2)(x)]),
        "dot": lambda x: layers.Dot(axes=1, normalize=True)([dense(3)(x), dense(3)(x)]),
        "shared": lambda x: shared(shared(x)),
        "nested": lambda x: inner(inner(x)),
        "nested_outputs": lambda x: layers.Concatenate()(functional(x)),
        "second_output": lambda x: functional(dense(6)(x))[1],
        "double": layers.Dense(3, dtype="float64"),
        "ops_arithmetic": lambda x: (2.0 - x) * x / (1.5 + x**2) - (-x),
        "ops_compare": lambda x: ops.where(x > 0.2, x, ops.minimum(x, -0.5)),
        "ops_functions": lambda x: ops.exp(ops.sin(x)) + ops.log(ops.abs(x) + 1.0) + ops.sqrt(ops.square(x)),
        "ops_activations": lambda x: ops.gelu(x) + ops.softmax(x) + ops.leaky_relu(x) + ops.tanh(ops.silu(x)),
        "ops_reductions": lambda x: ops.mean(x, axis=1) + ops.var(x, axis=-1) + ops.logsumexp(x, axis=1),
        "ops_shapes": lambda x: ops.transpose(ops.reshape(ops.expand_dims(x, 1), (-1, 2, 3)), (0, 2, 1)),
        "ops_items": lambda x: ops.concatenate([x[:, 1:], x[..., :-2], x[:, None, 2]], axis=-1),
        "ops_stack": lambda x: ops.stack(ops.split(x, 2, axis=1) + ops.split(x, [3], axis=1), axis=1),
        "ops_einsum": lambda x: ops.einsum("ab,ac->abc", x, ops.clip(x, -0.5, 0.5)),
        "ops_argmax": lambda x: ops.argmax(x, axis=-1),
    }
    return rows


def images(keras: Any) -> dict[str, Branch]:
    layers = keras.layers
    return {
        "conv": layers.Conv2D(4, 3, activation="relu"),
        "conv_same": layers.Conv2D(4, (3, 2), strides=2, padding="same", use_bias=False),
        "conv_dilated": layers.Conv2D(4, 2, dilation_rate=(2, 1), padding="same"),
        "conv_groups": layers.Conv2D(6, 3, groups=2),
        "depthwise": layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", strides=2),
        "separable": layers.SeparableConv2D(5, 3, depth_multiplier=2, activation="tanh"),
        "transposed": layers.Conv2DTranspose(3, 3, strides=2),
        "transposed_same": layers.Conv2DTranspose(3, 3, strides=2, padding="same"),
        "transposed_wide": layers.Conv2DTranspose(3, 2, strides=3, padding="same"),
        "transposed_valid_wide": layers.Conv2DTranspose(3, 2, strides=3),
        "transposed_output": layers.Conv2DTranspose(3, 3, strides=2, padding="same", output_padding=1),
        "max_pool": layers.MaxPooling2D(2),
        "max_pool_same": layers.MaxPooling2D(3, strides=2, padding="same"),
        "average_pool_same": layers.AveragePooling2D((3, 2), strides=2, padding="same"),
        "global_max": layers.GlobalMaxPooling2D(),
        "global_average": layers.GlobalAveragePooling2D(keepdims=True),
        "padding": layers.ZeroPadding2D(((1, 0), (2, 1))),
        "cropping": layers.Cropping2D(((1, 0), (2, 1))),
        "upsampling": layers.UpSampling2D((2, 3)),
        "upsampling_linear": layers.UpSampling2D(2, interpolation="bilinear"),
        "batch_norm": layers.BatchNormalization(),
        "batch_norm_axis": layers.BatchNormalization(axis=1),
        "batch_norm_middle": layers.BatchNormalization(axis=2),
        "layer_norm_axes": layers.LayerNormalization(axis=[2, 3]),
        "layer_norm_axis": layers.LayerNormalization(axis=[1, 2]),
        "group_norm": layers.GroupNormalization(groups=2),
        "instance_norm": layers.GroupNormalization(groups=-1),
        "group_norm_middle": layers.GroupNormalization(groups=2, axis=2),
        "prelu_shared": layers.PReLU(shared_axes=[1, 2], alpha_initializer="random_normal"),
        "permute": layers.Permute((3, 1, 2)),
        "flatten_first": layers.Flatten(data_format="channels_first"),
        "dense": layers.Dense(3),
        "network": lambda x: layers.Dense(3)(
            layers.Flatten()(layers.MaxPooling2D()(layers.Conv2D(4, 3, activation="elu")(x)))
        ),
        "volume": lambda x: layers.Conv3D(2, 2, padding="same")(layers.Reshape((6, 2, 3, 4))(x)),
        "volume_pool": lambda x: layers.AveragePooling3D(2, padding="same")(layers.Reshape((6, 2, 3, 4))(x)),
    }


def sequences(keras: Any) -> dict[str, Branch]:
    layers = keras.layers
    cells = [layers.LSTMCell(4), layers.GRUCell(3), layers.SimpleRNNCell(5)]

    def states(x: Any) -> Any:
        _, h, c = layers.LSTM(4, return_state=True)(x)
        return layers.LSTM(4, return_sequences=True)(x, initial_state=[h, c])

    def attend(layer: Any, **settings: Any) -> Branch:
        return lambda x: layer(x, layers.Cropping1D((0, 2))(layers.Dense(6)(x)), **settings)

    return {
        "lstm": layers.LSTM(4),
        "lstm_sequences": layers.LSTM(4, return_sequences=True, use_bias=False, go_backwards=True),
        "lstm_activations": layers.LSTM(3, activation="relu", recurrent_activation="hard_sigmoid"),
        "lstm_states": states,
        "gru": layers.GRU(4),
        "gru_before": layers.GRU(4, reset_after=False, return_sequences=True),
        "gru_no_bias": layers.GRU(4, use_bias=False, activation="elu"),
        "simple": layers.SimpleRNN(4, activation="linear", go_backwards=True),
        "cell": lambda x: layers.RNN(layers.GRUCell(3), return_sequences=True)(x),
        "cells": lambda x: layers.RNN(cells, return_sequences=True)(x),
        "two_ways": layers.Bidirectional(layers.LSTM(3, return_sequences=True)),
        "two_ways_last": layers.Bidirectional(layers.GRU(3), merge_mode="ave"),
        "two_layers": layers.Bidirectional(
            layers.LSTM(3), backward_layer=layers.LSTM(3, go_backwards=True), merge_mode="mul"
        ),
        "distributed": lambda x: layers.TimeDistributed(layers.Conv1D(3, 2))(layers.Reshape((3, 4, 3))(x)),
        "distributed_dense": layers.TimeDistributed(layers.Dense(3, activation="relu")),
        "conv": layers.Conv1D(3, 3, padding="causal", dilation_rate=2),
        "conv_depthwise": layers.DepthwiseConv1D(2, strides=2),
        "conv_separable": layers.SeparableConv1D(3, 2, padding="same"),
        "conv_transposed": layers.Conv1DTranspose(3, 3, strides=2, padding="same"),
        "pool": layers.AveragePooling1D(3, strides=2, padding="same"),
        "pool_global": layers.GlobalAveragePooling1D(),
        "padding": layers.ZeroPadding1D((1, 2)),
        "cropping": layers.Cropping1D(1),
        "upsampling": layers.UpSampling1D(2),
        "masking": layers.Masking(mask_value=0.0),
        "heads": attend(layers.MultiHeadAttention(2, 3)),
        "heads_causal": lambda x: layers.MultiHeadAttention(2, 3, value_dim=4, use_bias=False)(
            x, x, use_causal_mask=True
        ),
        "heads_output": attend(layers.MultiHeadAttention(2, 3, output_shape=7)),
        "heads_grouped": attend(layers.GroupQueryAttention(3, 4, 2)),
        "attention": lambda x: layers.Attention(use_scale=True)([x, x]),
        "attention_concat": lambda x: layers.Attention(score_mode="concat")([x, x]),
        "attention_additive": lambda x: layers.AdditiveAttention()([x, x]),
        "dot": lambda x: layers.Dot(axes=(2, 2))([x, x]),
        "mean": lambda x: keras.ops.mean(x, axis=1, keepdims=True),
        "matmul": lambda x: keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1))),
        "embedding": lambda x: layers.Embedding(7, 3)(keras.ops.argmax(x, axis=-1)),
    }


class Rows(NamedTuple):
    """Branches of one input."""

    branches: Callable[[Any], dict[str, Branch]]
    shape: tuple[int, ...]


MODELS = {
    "vectors": Rows(vectors, (6,)),
    "images": Rows(images, (6, 6, 4)),
    "sequences": Rows(sequences, (6, 6)),
}
# Branches that Keras 3.15 itself cannot load from an h5 file: functions; and a list of axes, which its loader
# drops (keras/src/legacy/saving/saving_utils.py, model_from_config).
KERAS_ZIP_ONLY = (
    "ops_",
    "layer_norm_ax",
    "softmax_axes",
    "second_output",
    "mean",
    "matmul",
    "embedding",
    "attention",
)
FILES = [f"{name}.{form}" for name in MODELS for form in ("keras", "h5")]


class Answers(NamedTuple):
    """The graph of a file, its outputs, and those of Keras that reads the same file."""

    graph: Graph
    results: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]


def input_values(shape: tuple[int, ...]) -> np.ndarray:
    values = np.random.default_rng(0).normal(size=(BATCH, *shape)).astype(np.float32)
    values[0, 0] = 0.0  # a masked step
    return values


def set_numbers(model: Any) -> None:
    """Give each weight its own numbers, so that no two are equal and no bias is zero."""
    random = np.random.default_rng(1)
    for weight in model.weights:
        if "seed" in weight.path:
            continue
        numbers = random.normal(size=weight.shape, scale=0.4)
        weight.assign(np.abs(numbers) + 0.1 if "variance" in weight.path else numbers)


def keras_files(folder: Path) -> list[str]:
    """Save the models in both forms, with what Keras computes after loading each file."""
    import keras

    for name, rows in MODELS.items():
        x = keras.Input(rows.shape, name="x")
        outputs = {
            title: keras.layers.Identity(name=f"y_{title}")(branch(x))
            for title, branch in rows.branches(keras).items()
        }
        model = keras.Model(x, outputs)
        set_numbers(model)
        some = {title: y for title, y in outputs.items() if not title.startswith(KERAS_ZIP_ONLY)}
        for form, saved in (("keras", model), ("h5", keras.Model(x, some))):
            file = folder / f"{name}.{form}"
            saved.save(file)
            loaded = keras.models.load_model(file, compile=False)
            answers = loaded(input_values(rows.shape))
            np.savez(folder / f"{name}.{form}.npz", **{title: y.numpy() for title, y in answers.items()})
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]).save_weights(folder / "m.weights.h5")
    return FILES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensorflow_child.require("tensorflow", "keras")
    path = tmp_path_factory.mktemp("keras")
    tensorflow_child.run(__file__, "keras_files", path, once=True)
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> Callable[[str], Answers]:
    @functools.cache
    def answer(file: str) -> Answers:
        graph = read_graph(ckpttool.open(str(folder / file)))
        assert graph is not None
        with np.load(folder / f"{file}.npz") as arrays:
            expected = dict(arrays)
        x = input_values(MODELS[file.partition(".")[0]].shape)
        return Answers(graph, evaluate(graph, {"x": x}), expected)

    return answer


def assert_equal(array: np.ndarray, expected: np.ndarray) -> None:
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    scale = max(1.0, float(np.abs(expected).max()))
    assert float(np.abs(array.astype(np.float64) - expected).max()) <= 1e-6 * scale


@pytest.mark.parametrize("file", FILES)
def test_every_layer_computes_what_keras_does(file: str, answers: Callable[[str], Answers]) -> None:
    graph, results, expected = answers(file)
    assert [node.op for node in graph.nodes if not is_known(node.op)] == []
    assert results.keys() == expected.keys()
    wrong = []
    for name, value in expected.items():
        try:
            assert_equal(results[name], value)
        except AssertionError as error:
            wrong.append(f"{name}: {str(error)[:120]}")
    assert wrong == []


@pytest.mark.parametrize("file", FILES)
def test_shapes_and_modules_of_every_value_are_known(file: str, answers: Callable[[str], Answers]) -> None:
    graph, results, _ = answers(file)
    shapes = infer_shapes(graph, {"x": (BATCH, *MODELS[file.partition(".")[0]].shape)})
    assert {name: shapes[name] for name in results} == {name: y.shape for name, y in results.items()}
    assert all(node.scope and node.place for node in graph.nodes if node.place != "outputs")


def test_a_shared_layer_uses_its_constants_twice(answers: Callable[[str], Answers]) -> None:
    graph = answers("vectors.keras").graph
    uses = [name for node in graph.nodes for name in node.inputs if name in graph.constants]
    stored = {name: constant.path for name, constant in graph.constants.items() if constant.path is not None}
    assert max(uses.count(name) for name in stored) == 2
    # One tensor with one rule is one constant.
    assert len({(leaf.path, leaf.rule) for leaf in graph.constants.values() if leaf.path}) == len(stored)


# Configurations that no test can save: other versions of Keras, settings of the future, damaged files.


def layer(cls: str, name: str, inputs: list[Any], **settings: Any) -> dict[str, Any]:
    return {"class_name": cls, "name": name, "config": {"name": name, **settings}, "inbound_nodes": inputs}


def listing(*layers: dict[str, Any], version: int | None = 3) -> Graph:
    """The graph of a functional model without weights whose input has 4 entries."""
    names = [layer["name"] for layer in layers]
    first = layer("InputLayer", "x", [], batch_shape=[None, 4], dtype="float32")
    config = {"name": "m", "layers": [first, *layers], "input_layers": [["x", 0, 0]]}
    config["output_layers"] = [[names[-1], 0, 0]]
    return read_document({"class_name": "Functional", "config": config}, Tree({}), "x.keras", version)


X = [[["x", 0, 0, {}]]]


@pytest.mark.parametrize(
    "wrong",
    [
        layer("Softmax", "y", X, axis=-1, new_setting=3),
        layer("Softmax", "y", X, axis="last"),
        layer("Softmax", "y", [[["x", 0, 0, {"mask": ["x", 0, 0]}]]], axis=-1),
        layer("Dropout", "y", [[["x", 0, 0, {"training": True}]]], rate=0.5),
        layer("Sequential", "y", [[["x", 0, 0, {"training": True}]]], layers=[layer("ReLU", "r", [])]),
        layer("GroupNormalization", "y", X, groups=1 << 40, axis=-1, epsilon=0.1),
        layer("Dense", "y", X, units=3, activation="relu", use_bias=True),  # no tensors
        layer("Activation", "y", X, activation="my_function"),
        layer(
            "Activation", "y", X, activation={"class_name": "function", "config": "relu", "module": "mine"}
        ),
        layer("Lambda", "y", X, function=["code"]),
        layer("Lambda", "y", X) | {"config": {"op": "sum", "inputs": 2, "outputs": 3, "name": "y"}},
        layer("LayerNormalization", "y", X, axis=-1, scale=False, center=False),  # no epsilon
        layer("ReLU", "y", X, negative_slope=0.5, max_value=1.0),
        layer("ReLU", "y", X, max_value=True),
        layer("RepeatVector", "y", X, n={"class_name": 3}),
        layer("Bidirectional", "y", X, layer=[1], merge_mode=["sum"]),
        layer("ReLU", "y", X, dtype="int8_from_float32"),
        layer("ReLU", "y", X) | {"module": "mine.layers", "registered_name": "mine>ReLU"},
        layer("Reshape", "y", X, target_shape=[2, None]),
        layer("Flatten", "y", X, data_format="other"),
        layer("Concatenate", "y", X, axis="1"),
        layer("Add", "y", X),
    ],
    ids=lambda wrong: wrong["class_name"],
)
def test_what_is_not_understood_is_listed_and_refused_by_its_class(wrong: dict[str, Any]) -> None:
    graph = listing(wrong, layer("ReLU", "z", [[["y", 0, 0, {}]]]))
    (opaque,) = [node for node in graph.nodes if not is_known(node.op)]
    assert opaque.op.removeprefix("keras.") == wrong["class_name"]
    assert (opaque.scope, set(opaque.inputs)) == (("y",), {"x"})
    with pytest.raises(UnsupportedError) as error:
        evaluate(graph, {"x": np.zeros((2, 4), np.float32)})
    assert error.value.found == opaque.op


@pytest.mark.parametrize(("outer", "setting"), [("Activation", "activation"), ("TimeDistributed", "layer")])
def test_an_unknown_setting_of_an_inner_layer_is_not_ignored(outer: str, setting: str) -> None:
    for more in ({}, {"new_setting": 3}):
        inner = {setting: layer("ReLU", "relu", [], **more)}
        graph = listing(layer("RepeatVector", "r", X, n=3), layer(outer, "y", [[["r", 0, 0, {}]]], **inner))
        opaque = [node.op for node in graph.nodes if not is_known(node.op)]
        assert opaque == ([outer] if more else [])


@pytest.mark.parametrize(
    ("wrong", "missing"),
    [
        (layer("Softmax", "y", X, axis=-1, new_setting=3), "setting new_setting"),
        (layer("Softmax", "y", [[["x", 0, 0, {"mask": ["x", 0, 0]}]]], axis=-1), "argument mask"),
        (layer("Dense", "y", X, units=3, activation="relu", use_bias=True), "tensor kernel"),
        (layer("Activation", "y", X, activation="my_function"), "setting activation"),
        (layer("Lambda", "y", X, function=["code"]), None),
        ({**layer("Dense", "y", X, units=3), "registered_name": "own>Dense"}, "custom class"),
    ],
    ids=lambda case: case["class_name"] if isinstance(case, dict) else str(case),
)
def test_a_program_names_what_is_not_understood(wrong: dict[str, Any], missing: str | None) -> None:
    graph = listing(wrong)
    (opaque,) = [node for node in graph.nodes if not is_known(node.op)]
    assert opaque.attributes.get("not_understood") == missing
    with pytest.raises(UnsupportedError) as error:
        lower_policy(graph, "y", "x.keras", half=True)
    assert (error.value.path, error.value.file) == ("y", "x.keras")
    expected = [word for word in (wrong["class_name"], missing) if word]
    assert (error.value.found or "").split(", ")[: len(expected)] == expected


@pytest.mark.parametrize(("version", "slope"), [(1, 0.2), (2, 0.2), (3, 1 / 6)])
def test_the_hard_sigmoid_is_that_of_the_version(version: int, slope: float) -> None:
    graph = listing(layer("Activation", "y", X, activation="hard_sigmoid"), version=version)
    x = np.linspace(-4, 4, 8, dtype=np.float32).reshape(2, 4)
    (output,) = evaluate(graph, {"x": x}).values()
    np.testing.assert_allclose(output, np.clip(slope * x + 0.5, 0, 1), rtol=1e-6)
    unknown = listing(layer("Activation", "y", X, activation="hard_sigmoid"), version=None)
    assert next(node.op for node in unknown.nodes) == "Activation"


@pytest.mark.parametrize(("version", "factor"), [(2, 1e6), (3, 1e12)])
def test_short_vectors_are_normalized_as_in_the_version(version: int, factor: float) -> None:
    # keras/src/ops/nn.py limits the factor, tf.math.l2_normalize the square of the norm.
    graph = listing(layer("UnitNormalization", "y", X, axis=-1), version=version)
    x = np.float32([[0, 0, 0, 1e-15], [0, 3, 4, 0]])
    (output,) = evaluate(graph, {"x": x}).values()
    np.testing.assert_allclose(output, [[0, 0, 0, factor * 1e-15], [0, 0.6, 0.8, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"layers": []},
        {"output_layers": []},
        {"output_layers": [["y", 7, 0]]},
        {"output_layers": [["y", 0, 300]]},
        {"input_layers": [["none", 0, 0]]},
        {"input_layers": [["x", 0, 0], ["x", 0, 0]]},
        {"node": [[["y", 0, 0, {}]]]},
        {"node": [[["x", "first", None]]]},
        {"node": "x"},
        {"shape": [None, -4]},
        {"sparse": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_damaged_structure_is_refused(change: dict[str, Any]) -> None:
    first = layer(
        "InputLayer", "x", [], batch_shape=change.get("shape", [None, 4]), sparse=change.get("sparse")
    )
    config = {"layers": [first, layer("ReLU", "y", change.get("node", X))]}
    config |= {"input_layers": [["x", 0, 0]], "output_layers": [["y", 0, 0]]}
    with pytest.raises(UnsupportedError):
        read_document({"class_name": "Functional", "config": config | change}, Tree({}), "x.keras", 3)


@pytest.mark.parametrize("cls", ["LSTM", "Softmax", "GlobalAveragePooling1D", "Attention"])
def test_a_layer_that_uses_a_mask_is_opaque_behind_one(cls: str) -> None:
    masked = layer("Masking", "m", [[["r", 0, 0, {}]]], mask_value=0.0)
    reshaped = layer("Reshape", "r", X, target_shape=[2, 2])
    dropped = layer("Dropout", "d", [[["m", 0, 0, {}]]], rate=0.1)
    graph = listing(reshaped, masked, dropped, layer(cls, "y", [[["d", 0, 0, {}], ["d", 0, 0, {}]]]))
    assert [node.scope for node in graph.nodes if not is_known(node.op)] == [("y",)]


def test_a_model_with_its_own_class_records_no_computation(folder: Path, tmp_path: Path) -> None:
    assert read_graph(ckpttool.open(str(folder / "m.weights.h5"))) is None
    own = {"class_name": "Agent", "config": {"layers": []}, "module": "mine", "registered_name": "mine>Agent"}
    path = tmp_path / "own.keras"
    with zipfile.ZipFile(folder / "vectors.keras") as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            target.writestr(name, json.dumps(own) if name == "config.json" else source.read(name))
    assert read_graph(ckpttool.open(str(path))) is None


# Programs of policies: what steps of one observation can compute.

NO_PROGRAM = {
    *(f"activation_{name}" for name in ("softsign", "exponential", "squareplus")),
    *("activation_soft_shrink", "activation_hard_shrink", "relu_threshold", "softmax_axes"),
    *("layer_norm_rms", "group_norm", "rms_norm", "unit_norm", "repeat", "maximum", "minimum", "dot"),
    *("ops_arithmetic", "ops_compare", "ops_functions", "ops_activations", "ops_reductions", "ops_shapes"),
    *("ops_items", "ops_stack", "ops_einsum"),
}


@pytest.mark.parametrize("file", ["vectors.keras", "vectors.h5"])
def test_programs_compute_what_keras_does(file: str, answers: Callable[[str], Answers]) -> None:
    graph, _, expected = answers(file)
    x = input_values(MODELS["vectors"].shape)
    refused = set[tuple[str, bool]]()  # the output, and whether the error names the layer
    for name, value in expected.items():
        try:
            program, *_, choices = lower_policy(graph, name, file, half=True)
        except UnsupportedError as error:
            refused.add((name, bool(error.path)))
            continue
        builder = NetworkBuilder([("obs", x.shape[1])])
        add_program(builder, program)
        outputs = run_network(numpy_backend.build(builder.done()), x)
        if choices is not None:  # of scores, or of probabilities, whose softmax is left out
            outputs, value = outputs.argmax(-1), value.argmax(-1) if value.ndim == outputs.ndim else value
        np.testing.assert_allclose(outputs, value, rtol=2e-6, atol=2e-6, err_msg=name)
    assert refused == {(name, True) for name in NO_PROGRAM & expected.keys()}


def test_a_program_reads_only_the_tensors_of_its_output(answers: Callable[[str], Answers]) -> None:
    graph = answers("vectors.keras").graph
    used = lower_policy(graph, "shared", "x.keras", half=True).used
    assert [str(path[-1].value) for path in used] == ["kernel", "bias"]


def catalogue_faults(_folder: Path) -> list[str]:
    """Return what of core/kinds.py Keras does not have, or has with another default."""
    import keras

    old = {"ThresholdedReLU"}  # of Keras 2
    classes = {
        item for row in kinds.LAYER_TYPES.values() for name in row.keras for item in kinds.ranked(name)
    }
    classes |= {row.layer for row in kinds.ACTIVATION_KINDS.values()} - {""}
    faults = [name for name in sorted(classes - old) if not hasattr(keras.layers, name)]
    for name in sorted(classes - old - {*faults}):
        known = inspect.signature(getattr(keras.layers, name)).parameters
        expected = kinds.default_epsilon(name, "Keras")
        if "epsilon" in known and known["epsilon"].default != expected:
            faults.append(f"{name}: {known['epsilon'].default}, {expected}")
    functions = (name for row in kinds.ACTIVATION_KINDS.values() for name in row.keras)
    return faults + [name for name in functions if keras.activations.get(name) is None]


@pytest.mark.slow
def test_the_catalogue_has_the_names_and_defaults_of_keras(tmp_path: Path) -> None:
    assert tensorflow_child.run(__file__, "catalogue_faults", tmp_path) == []
