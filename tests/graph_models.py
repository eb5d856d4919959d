"""SavedModels whose signatures are layers and operations, and what TensorFlow computes; runs in a child."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def x(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def list_layers(keras: Any) -> dict[str, tuple[Any, tuple[int | None, ...]]]:
    """Return Keras layers with the shapes of their inputs; None is an open extent."""
    layers = keras.layers
    vector, matrix, series, image = (None, 6), (None, 6), (None, 8, 4), (None, 7, 8, 4)
    return {
        "dense": (layers.Dense(3, activation="relu"), vector),
        "dense_without_bias": (layers.Dense(3, use_bias=False, activation="tanh"), series),
        "conv1d": (layers.Conv1D(5, 3, 2, padding="same", activation="elu"), series),
        "conv1d_causal": (layers.Conv1D(5, 3, padding="causal", dilation_rate=2), series),
        "conv2d": (layers.Conv2D(5, (3, 2), (2, 1), padding="same"), image),
        "conv2d_valid": (layers.Conv2D(5, 3, dilation_rate=2, activation="sigmoid"), image),
        "conv2d_groups": (layers.Conv2D(6, 3, groups=2), image),
        "conv3d": (layers.Conv3D(3, 2, 2, padding="same"), (None, 4, 5, 6, 2)),
        "depthwise": (layers.DepthwiseConv2D(3, 2, padding="same", depth_multiplier=2), image),
        "separable": (layers.SeparableConv2D(5, 3), image),
        "transposed": (layers.Conv2DTranspose(5, 3, 2, padding="same"), image),
        "transposed_valid": (layers.Conv2DTranspose(5, 2, 3), image),
        "transposed1d": (layers.Conv1DTranspose(5, 4, 2, padding="same"), series),
        "max_pool": (layers.MaxPool2D(3, 2, padding="same"), image),
        "average_pool": (layers.AveragePooling2D(3, 2, padding="same"), image),
        "average_pool1d": (layers.AveragePooling1D(2), series),
        "max_pool3d": (layers.MaxPool3D(2), (None, 4, 5, 6, 2)),
        "global_average": (layers.GlobalAveragePooling2D(), image),
        "global_max": (layers.GlobalMaxPool1D(keepdims=True), series),
        "batch_norm": (layers.BatchNormalization(epsilon=0.01), image),
        "batch_norm_of_vectors": (layers.BatchNormalization(), vector),
        "layer_norm": (layers.LayerNormalization(epsilon=0.01), matrix),
        "layer_norm_of_axes": (layers.LayerNormalization(axis=(1, 2, 3)), image),
        "group_norm": (layers.GroupNormalization(2), image),
        "unit_norm": (layers.UnitNormalization(), matrix),
        "embedding": (layers.Embedding(5, 3), (None, 3)),
        "flatten": (layers.Flatten(), image),
        "permute": (layers.Permute((3, 1, 2)), image),
        "reshape": (layers.Reshape((4, -1)), image),
        "repeat": (layers.RepeatVector(3), vector),
        "cropping": (layers.Cropping2D(((1, 2), (0, 1))), image),
        "zero_padding": (layers.ZeroPadding2D(((1, 0), (2, 1))), image),
        "up_sampling": (layers.UpSampling2D(2), image),
        "up_sampling_bilinear": (layers.UpSampling2D((2, 3), interpolation="bilinear"), image),
        "resizing": (layers.Resizing(5, 9, interpolation="nearest"), image),
        "rescaling": (layers.Rescaling(0.5, -1.0), image),
        "normalization": (layers.Normalization(mean=[0.5] * 6, variance=[2.0] * 6), vector),
        "dropout": (layers.Dropout(0.5), vector),
        "prelu": (layers.PReLU("uniform"), vector),
        "leaky_relu": (layers.LeakyReLU(0.3), vector),
        "relu_of_limits": (layers.ReLU(1.5, 0.2, 0.3), vector),
        "softmax": (layers.Softmax(1), series),
        "lstm": (layers.LSTM(5), series),
        "lstm_sequences": (layers.LSTM(5, return_sequences=True, use_bias=False), series),
        "gru": (layers.GRU(5), series),
        "gru_before": (layers.GRU(5, reset_after=False, return_sequences=True), series),
        "simple_rnn": (layers.SimpleRNN(5, go_backwards=True), series),
        "bidirectional": (layers.Bidirectional(layers.LSTM(3, return_sequences=True)), series),
        "attention": (keras.Sequential([layers.Dense(4), _SelfAttention(keras)]), series),
        "time_distributed": (layers.TimeDistributed(layers.Dense(3)), series),
        **{
            f"activation_{name}": (layers.Activation(name), vector)
            for name in (
                *("selu", "gelu", "silu", "softplus", "softsign", "exponential", "hard_sigmoid", "mish"),
                *("relu6", "log_softmax", "hard_silu", "celu", "squareplus", "sparsemax", "log_sigmoid"),
            )
        },
    }


def _SelfAttention(keras: Any) -> Any:  # noqa: N802 - a layer
    class SelfAttention(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.MultiHeadAttention(2, 3)

        def call(self, value: Any) -> Any:
            return self.inner(value, value)

    return SelfAttention()


def list_functions(tf: Any) -> dict[str, Any]:
    """Return functions of a matrix of unknown height and six columns."""
    return {
        "arithmetic": lambda a: (a + 1, 2 - a, a * 0.1, a / 3, a**2, -a, a // 0.7, a % 0.7, abs(a)),
        "whole": lambda a: (tf.cast(a * 9, tf.int32) // 2, tf.cast(a * 9, tf.int64) % 5, tf.cast(a, tf.bool)),
        "functions": lambda a: (
            tf.exp(a),
            tf.math.expm1(a),
            tf.math.log1p(tf.abs(a)),
            tf.sqrt(tf.abs(a)),
            tf.sign(a),
        ),
        "more": lambda a: (
            tf.round(a),
            tf.floor(a),
            tf.math.erf(a),
            tf.sin(a),
            tf.atan(a),
            tf.square(a),
            tf.sinh(a),
        ),
        "comparison": lambda a: (
            tf.where(a > 0, a, -1.0),
            a >= 0.5,
            tf.not_equal(a, a),
            tf.math.is_finite(a / 0),
        ),
        "safe": lambda a: (tf.math.divide_no_nan(a, tf.nn.relu(a)), tf.math.multiply_no_nan(a, a * 0)),
        "limits": lambda a: (tf.clip_by_value(a, -1, 0.5), tf.maximum(a, tf.reduce_mean(a)), tf.nn.relu6(a)),
        "reductions": lambda a: (tf.reduce_mean(a), tf.reduce_sum(a, 1), tf.reduce_max(a, 0, keepdims=True)),
        "positions": lambda a: (tf.argmax(a, 1), tf.argmin(a, 0, tf.int32), tf.reduce_any(a > 2, 1)),
        "statistics": lambda a: (
            *tf.nn.moments(a, 1),
            tf.math.reduce_std(a),
            tf.reduce_logsumexp(a, 1),
            tf.norm(a),
        ),
        "order": lambda a: (*tf.math.top_k(a, 2), tf.cumsum(a, 1, exclusive=True), tf.reverse(a, [1])),
        "shapes": lambda a: (
            tf.reshape(a, [-1, 3]),
            tf.transpose(a),
            a[None],
            tf.squeeze(a[:1], 0),
            tf.shape(a),
        ),
        "slices": lambda a: (
            a[1:, ::2],
            a[-1],
            a[..., -2],
            a[:, tf.newaxis, 1:3],
            a[::-1],
            tf.slice(a, [0, 1], [-1, 3]),
        ),
        "parts": lambda a: (*tf.split(a, 3, 1), *tf.split(a, [1, 5], 1), *tf.unstack(a, axis=1)),
        "together": lambda a: (
            tf.concat([a, a[:1]], 0),
            tf.stack([a, a], 1),
            tf.tile(a, [2, 1]),
            tf.gather(a, [0, 2], axis=1),
        ),
        "new": lambda a: (
            tf.zeros_like(a),
            tf.ones([tf.shape(a)[0], 2]),
            tf.range(3),
            tf.fill([2, 2], 0.5),
            tf.one_hot([1, -1, 9], 3),
        ),
        "products": lambda a: (
            tf.matmul(a, a, transpose_b=True),
            tf.linalg.matmul(a[None], a[None], transpose_a=True),
        ),
        "einsum": lambda a: (tf.einsum("ij,kj->ik", a, a), tf.tensordot(a, a, [[1], [1]])),
        "padding": lambda a: (
            tf.pad(a, [[1, 0], [2, 1]], constant_values=3.0),
            tf.pad(a, [[1, 1], [0, 2]], "REFLECT"),
        ),
        "blocks": lambda a: tf.nn.depth_to_space(tf.nn.space_to_depth(tf.reshape(a, [1, 4, 6, 1]), 2) * 2, 2),
        "condition": lambda a: tf.cond(tf.reduce_sum(a) > 0, lambda: a * 2, lambda: a - 1),
        "loop": lambda a: tf.while_loop(lambda n, v: n < 3, lambda n, v: (n + 1, v * a), (0, a))[1],
        "rounded": lambda a: tf.image.resize(tf.reshape(a, [1, 4, 6, 1]), [7, 5], antialias=False),
        "determinant": lambda a: tf.linalg.det(tf.matmul(a, a, transpose_a=True)),
        "sorted": lambda a: tf.sort(a, 1),
        "rolled": lambda a: tf.roll(a, [1, -8], [0, 1]),
    }


# Layers of the usual test run; the others take 10 s more.
USUAL = (
    *("dense", "conv1d_causal", "conv2d_groups", "depthwise", "transposed", "batch_norm", "normalization"),
    *("lstm", "gru", "relu_of_limits"),
)


def build(folder: Path) -> None:
    """Write a SavedModel of all operations and the usual layers."""
    _write(folder, USUAL, functions=True)


def build_all(folder: Path) -> None:
    """Write a SavedModel of all other layers."""
    _write(folder, None, functions=False)


def _write(folder: Path, names: tuple[str, ...] | None, *, functions: bool) -> None:
    """Write a SavedModel, and each signature's input and outputs."""
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(1)
    module, arrays, signatures = tf.Module(), {}, {}
    module.layers = {}
    for name, (layer, shape) in list_layers(keras).items():
        if name not in names if names is not None else name in USUAL:
            continue
        value = x(*(3 if extent is None else extent for extent in shape))
        arrays[f"{name}/input"] = (
            np.array([[0, 4, 2], [1, 1, 3]], np.float32) if name == "embedding" else value
        )
        layer.build((None, *shape[1:]))
        for number, weight in enumerate(layer.weights):
            if weight.dtype == "float32":
                weight.assign(0.5 * x(*weight.shape, number + 1)[..., 0])
            if "variance" in weight.path:
                weight.assign(abs(weight) + 0.5)
        module.layers[name] = layer
        signatures[name] = _function(tf, layer, tf.TensorSpec(shape, tf.float32, "value"))
    for name, function in list_functions(tf).items() if functions else ():
        signatures[name] = _function(tf, function, tf.TensorSpec((None, 6), tf.float32, "value"))
        arrays[f"{name}/input"] = x(4, 6)
    if functions:
        module.count = tf.Variable(1.0)
        signatures["counter"] = _function(
            tf, lambda a: module.count.assign_add(1.0) + a, tf.TensorSpec((None, 6), tf.float32, "value")
        )
        arrays["counter/input"] = x(4, 6)
    tf.saved_model.save(module, str(folder / "model"), signatures=signatures)
    loaded = tf.saved_model.load(str(folder / "model"))
    for name, signature in loaded.signatures.items():
        for key, value in signature(tf.constant(arrays[f"{name}/input"])).items():
            arrays[f"{name}/output/{key}"] = value.numpy()
    np.savez(folder / "arrays.npz", **arrays)


def build_images(folder: Path) -> None:
    """Write SavedModels that flatten images: `orders` with signatures, `functions` without."""
    import tensorflow as tf

    class Net(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.kernel = tf.Variable(x(2, 2, 3, 4), name="kernel")
            for name in ("last", "first", "rows", "open", "both"):
                setattr(self, name, tf.Variable(x(24, 7), name=name))
            self.recurrent = tf.Variable(x(7, 7), name="recurrent")

        def image(self, value: Any) -> Any:
            return tf.nn.relu(tf.nn.conv2d(value, self.kernel, 1, "VALID"))

        @tf.function(input_signature=[tf.TensorSpec((None, 3, 4, 3))])  # type: ignore[untyped-decorator]
        def __call__(self, value: Any) -> Any:
            image = self.image(value)
            last = tf.reshape(image, (-1, 24)) @ self.last
            first = tf.reshape(tf.transpose(image, (0, 3, 1, 2)), (-1, 24)) @ self.first
            unknown = tf.reshape(tf.sort(image, 3), (-1, 24)) @ self.open
            return last + first + unknown + tf.reshape(image, (-1, 24)) @ self.both

        @tf.function(input_signature=[tf.TensorSpec((5, 3, 4, 3))])  # type: ignore[untyped-decorator]
        def steps(self, value: Any) -> Any:
            image = self.image(value)
            rows = tf.TensorArray(tf.float32, 5).unstack(tf.reshape(image, (5, 1, 24)))
            turned = tf.reshape(tf.transpose(image, (0, 3, 1, 2)), (-1, 24)) @ self.both
            state = tf.zeros((1, 7))
            for n in tf.range(5):
                state = tf.tanh(rows.read(n) @ self.rows + state @ self.recurrent)
            return state + tf.reduce_sum(turned)

    net = Net()
    tf.saved_model.save(net, str(folder / "functions"))
    signatures = {"serving_default": net.__call__, "steps": net.steps}
    tf.saved_model.save(net, str(folder / "orders"), signatures=signatures)


def _function(tf: Any, function: Any, spec: Any) -> Any:
    def call(value: Any) -> dict[str, Any]:
        result = function(value)
        results = result if isinstance(result, tuple | list) else [result]
        return {f"part_{number}": result for number, result in enumerate(results)}

    return tf.function(call, input_signature=[spec]).get_concrete_function()


def build_nodes(folder: Path) -> None:
    """Write a SavedModel of TensorFlow 1: a graph with variables, and one that changes a variable first."""
    import tensorflow as tf

    v1 = tf.compat.v1
    arrays = {"value": x(4, 6)}
    for name in ("plain", "changed"):
        with tf.Graph().as_default(), v1.Session() as session:
            value = v1.placeholder(tf.float32, [None, 6], "value")
            kernel = v1.get_variable("layer/kernel", [6, 3], use_resource=name == "plain")
            bias = v1.get_variable("layer/bias", [3], use_resource=False)
            before = [v1.assign(bias, [1.0, 2.0, 3.0])] if name == "changed" else []
            with tf.control_dependencies(before):
                result = tf.nn.relu(tf.matmul(value, kernel) + tf.identity(bias), "result")
            session.run(v1.global_variables_initializer())
            arrays[name] = session.run(result, {value: arrays["value"]})
            v1.saved_model.simple_save(session, str(folder / name), {"value": value}, {"result": result})
    np.savez(folder / "nodes.npz", **arrays)
