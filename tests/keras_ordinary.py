"""Ordinary models of Keras 3 and tf_keras for the audit of configurations; `build` runs in a child process.

Every layer class with usual settings, and models of several kinds, each saved as `.keras` and, if possible,
as `.h5`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Make = Callable[[Any], Any]
VECTOR, SERIES, IMAGE, VIDEO = (6,), (7, 4), (12, 12, 3), (6, 8, 8, 3)
WORDS, STRINGS, NUMBERS, BITS = "words", "strings", "numbers", "bits"
SHAPES: dict[Any, tuple[tuple[int, ...], str]] = {
    VECTOR: (VECTOR, "float32"),
    SERIES: (SERIES, "float32"),
    IMAGE: (IMAGE, "float32"),
    VIDEO: (VIDEO, "float32"),
    WORDS: ((5,), "int32"),
    STRINGS: ((1,), "string"),
    NUMBERS: ((1,), "int64"),
    BITS: ((3,), "bool"),
}
# By kind of input, what makes each layer of a module of layers.
LAYERS: dict[Any, dict[str, Make]] = {
    VECTOR: {
        "dense": lambda k: k.Dense(
            5, activation="relu", kernel_regularizer="l2", kernel_constraint="max_norm"
        ),
        "named functions": lambda k: k.Dense(
            4, "tanh", kernel_initializer="he_normal", bias_initializer="ones"
        ),
        "activation": lambda k: k.Activation("swish"),
        "activity": lambda k: k.ActivityRegularization(0.1, 0.2),
        "dropout": lambda k: k.Dropout(0.2, seed=3),
        "alpha dropout": lambda k: k.AlphaDropout(0.2),
        "gaussian dropout": lambda k: k.GaussianDropout(0.2),
        "gaussian noise": lambda k: k.GaussianNoise(0.2),
        "elu": lambda k: k.ELU(0.7),
        "relu": lambda k: k.ReLU(6.0, 0.1, 0.05),
        "leaky": lambda k: k.LeakyReLU(0.2),
        "prelu": lambda k: k.PReLU(),
        "softmax": lambda k: k.Softmax(),
        "batch norm": lambda k: k.BatchNormalization(momentum=0.9, epsilon=1e-4),
        "layer norm": lambda k: k.LayerNormalization(center=False),
        "unit norm": lambda k: k.UnitNormalization(),
        "einsum": lambda k: k.EinsumDense("ab,bc->ac", output_shape=4, bias_axes="c"),
        "reshape": lambda k: k.Reshape((2, 3)),
        "repeat": lambda k: k.RepeatVector(3),
        "flatten": lambda k: k.Flatten(),
        "normalization": lambda k: k.Normalization(mean=[1.0] * 6, variance=[2.0] * 6),
        "discretization": lambda k: k.Discretization(bin_boundaries=[0.0, 1.0]),
        "rescaling": lambda k: k.Rescaling(1 / 255.0, offset=-1),
        "identity": lambda k: k.Identity(),
    },
    SERIES: {
        "conv1": lambda k: k.Conv1D(3, 2, padding="causal", dilation_rate=2),
        "conv1 transposed": lambda k: k.Conv1DTranspose(3, 2),
        "depthwise 1": lambda k: k.DepthwiseConv1D(2, depth_multiplier=2),
        "separable 1": lambda k: k.SeparableConv1D(3, 2),
        "lstm": lambda k: k.LSTM(3, return_sequences=True, dropout=0.1, kernel_regularizer="l1"),
        "gru": lambda k: k.GRU(3, reset_after=False, go_backwards=True),
        "simple rnn": lambda k: k.SimpleRNN(3, stateful=False, unroll=True),
        "cells": lambda k: k.RNN([k.LSTMCell(3), k.GRUCell(2), k.SimpleRNNCell(2)]),
        "stacked": lambda k: k.RNN(k.StackedRNNCells([k.LSTMCell(3), k.LSTMCell(2)]), return_sequences=True),
        "both ways": lambda k: k.Bidirectional(
            k.LSTM(3), merge_mode="sum", backward_layer=k.GRU(3, go_backwards=True)
        ),
        "distributed": lambda k: k.TimeDistributed(k.Dense(3)),
        "masking": lambda k: k.Masking(-1.0),
        "max pool": lambda k: k.MaxPooling1D(2),
        "average pool": lambda k: k.AveragePooling1D(2),
        "global max": lambda k: k.GlobalMaxPooling1D(),
        "global average": lambda k: k.GlobalAveragePooling1D(keepdims=True),
        "cropping": lambda k: k.Cropping1D(1),
        "padding": lambda k: k.ZeroPadding1D(2),
        "upsampling": lambda k: k.UpSampling1D(2),
        "permute": lambda k: k.Permute((2, 1)),
        "spatial dropout": lambda k: k.SpatialDropout1D(0.1),
        "group norm": lambda k: k.GroupNormalization(2),
    },
    IMAGE: {
        "conv2": lambda k: k.Conv2D(4, 3, strides=2, padding="same", groups=1, activation="gelu"),
        "conv2 transposed": lambda k: k.Conv2DTranspose(4, 3, strides=2),
        "depthwise 2": lambda k: k.DepthwiseConv2D(3),
        "separable 2": lambda k: k.SeparableConv2D(4, 3),
        "max pool 2": lambda k: k.MaxPooling2D(2),
        "average pool 2": lambda k: k.AveragePooling2D(2),
        "global max 2": lambda k: k.GlobalMaxPooling2D(),
        "global average 2": lambda k: k.GlobalAveragePooling2D(),
        "cropping 2": lambda k: k.Cropping2D(1),
        "padding 2": lambda k: k.ZeroPadding2D(1),
        "upsampling 2": lambda k: k.UpSampling2D(2, interpolation="bilinear"),
        "spatial dropout 2": lambda k: k.SpatialDropout2D(0.1),
        "resizing": lambda k: k.Resizing(6, 6, interpolation="bilinear"),
        "center crop": lambda k: k.CenterCrop(8, 8),
        "flip": lambda k: k.RandomFlip("horizontal", seed=1),
        "rotation": lambda k: k.RandomRotation(0.1),
        "zoom": lambda k: k.RandomZoom(0.1),
        "translation": lambda k: k.RandomTranslation(0.1, 0.1),
        "contrast": lambda k: k.RandomContrast(0.1),
        "brightness": lambda k: k.RandomBrightness(0.1),
        "crop": lambda k: k.RandomCrop(8, 8),
    },
    VIDEO: {
        "conv3": lambda k: k.Conv3D(2, 2),
        "conv3 transposed": lambda k: k.Conv3DTranspose(2, 2),
        "conv lstm": lambda k: k.ConvLSTM2D(2, 3, padding="same"),
        "max pool 3": lambda k: k.MaxPooling3D(2),
        "average pool 3": lambda k: k.AveragePooling3D(2),
        "global max 3": lambda k: k.GlobalMaxPooling3D(),
        "global average 3": lambda k: k.GlobalAveragePooling3D(),
        "cropping 3": lambda k: k.Cropping3D(1),
        "padding 3": lambda k: k.ZeroPadding3D(1),
        "upsampling 3": lambda k: k.UpSampling3D(2),
        "spatial dropout 3": lambda k: k.SpatialDropout3D(0.1),
    },
    WORDS: {
        "embedding": lambda k: k.Embedding(7, 4, mask_zero=True, embeddings_initializer="uniform"),
        "category": lambda k: k.CategoryEncoding(7, output_mode="multi_hot"),
    },
    STRINGS: {
        "string lookup": lambda k: k.StringLookup(vocabulary=["a", "b"], output_mode="int", oov_token="[?]"),
        "vectorization": lambda k: k.TextVectorization(10, output_sequence_length=4, vocabulary=["a", "b"]),
        "tf-idf": lambda k: k.TextVectorization(output_mode="tf_idf", vocabulary=["a"], idf_weights=[0.5]),
        "hashing": lambda k: k.Hashing(5, salt=3),
    },
    NUMBERS: {
        "integer lookup": lambda k: k.IntegerLookup(vocabulary=[3, 5], num_oov_indices=2),
        "integer hashing": lambda k: k.Hashing(5),
    },
}
# Layers that only Keras 3 has.
KERAS_3: dict[Any, dict[str, Make]] = {
    VECTOR: {
        "rms norm": lambda k: k.RMSNormalization(),
        "spectral norm": lambda k: k.SpectralNormalization(k.Dense(3)),
        "quantized": lambda k: k.Dense(3, dtype="int8_from_float32"),
    },
    SERIES: {
        "grouped": lambda k: k.Conv1D(4, 2, groups=2),
        "conv lstm 1": lambda k: k.TimeDistributed(k.Dense(2, activation="hard_silu")),
    },
    IMAGE: {
        "color": lambda k: k.RandomColorJitter(value_range=(0, 1), brightness_factor=0.1),
        "contrasted": lambda k: k.AutoContrast(value_range=(0, 1)),
        "grayscale": lambda k: k.RandomGrayscale(0.3),
        "augment": lambda k: k.RandAugment(value_range=(0, 1)),
        "pipeline": lambda k: k.Pipeline([k.RandomFlip(), k.Rescaling(0.5)]),
        "blur": lambda k: k.RandomGaussianBlur(),
        "erasing": lambda k: k.RandomErasing(),
        "adaptive": lambda k: k.AdaptiveAveragePooling2D(2),
    },
    WORDS: {"reversible": lambda k: k.ReversibleEmbedding(7, 4)},
}
KERAS_2: dict[Any, dict[str, Make]] = {
    VECTOR: {"thresholded": lambda k: k.ThresholdedReLU(0.3)},
    SERIES: {"local 1": lambda k: k.LocallyConnected1D(3, 2), "grouped": lambda k: k.Conv1D(4, 2, groups=2)},
    IMAGE: {
        "local 2": lambda k: k.LocallyConnected2D(3, 2),
        "height": lambda k: k.RandomHeight(0.1),
        "width": lambda k: k.RandomWidth(0.1),
    },
}


def _layers(keras: Any, more: dict[Any, dict[str, Make]]) -> Iterator[tuple[str, Any, Make]]:
    for kind, rows in LAYERS.items():
        for name, make in {**rows, **more.get(kind, {})}.items():
            yield name, kind, make


def _input(keras: Any, kind: Any) -> Any:
    shape, dtype = SHAPES[kind]
    return keras.Input(shape, dtype=dtype)


def together(
    keras: Any, more: dict[Any, dict[str, Make]], kinds: Iterable[Any] = tuple(LAYERS)
) -> Iterator[tuple[str, Any]]:
    """Yield one model per kind of input, with every layer of that kind."""
    for kind in kinds:
        makers = [make for _, title, make in _layers(keras, more) if title == kind]
        x = _input(keras, kind)
        yield f"every {kind}", keras.Model(x, [make(keras.layers)(x) for make in makers])


def apart(keras: Any, more: dict[Any, dict[str, Make]]) -> Iterator[tuple[str, Any]]:
    """Yield a model for every layer."""
    for name, kind, make in _layers(keras, more):
        x = _input(keras, kind)
        yield name, keras.Model(x, make(keras.layers)(x))


def kinds(keras: Any) -> Iterator[tuple[str, Any]]:
    """Yield models of both libraries: graphs, attention, merges, several outputs, optimizers, policies."""
    k = keras.layers
    a, b = keras.Input(VECTOR, name="a"), keras.Input(VECTOR, name="b")
    merged = [
        k.Add(),
        k.Subtract(),
        k.Multiply(),
        k.Average(),
        k.Maximum(),
        k.Minimum(),
        k.Concatenate(),
        k.Dot(1),
    ]
    yield "merges", keras.Model([a, b], [merge([a, b]) for merge in merged])
    s = keras.Input(SERIES)
    attended = k.MultiHeadAttention(2, 3, dropout=0.1)(s, s, use_causal_mask=True)
    yield (
        "attention",
        keras.Model(s, [attended, k.Attention(use_scale=True)([s, s]), k.AdditiveAttention()([s, s])]),
    )
    inner = keras.Sequential([keras.Input(VECTOR), k.Dense(3, name="inside"), k.Dense(6)], name="inner")
    yield "nested", keras.Model(a, inner(k.Dense(6)(inner(a))))
    heads = keras.Model(a, {"policy": k.Dense(2, name="policy")(a), "value": k.Dense(1, name="value")(a)})
    losses, metrics = keras.losses, keras.metrics
    heads.compile(
        optimizer=keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 10), clipnorm=1.0),
        loss={
            "policy": losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
            "value": "mse",
        },
        loss_weights={"policy": 1.0, "value": 0.5},
        metrics={
            "policy": ["accuracy", metrics.TopKCategoricalAccuracy(2)],
            "value": [metrics.MeanAbsoluteError()],
        },
    )
    yield "two heads", heads
    schedules = keras.optimizers.schedules
    for index, rate in enumerate(
        (
            schedules.ExponentialDecay(0.1, 10, 0.9, staircase=True),
            schedules.PiecewiseConstantDecay([3, 6], [0.1, 0.01, 0.001]),
            schedules.PolynomialDecay(0.1, 9),
            schedules.InverseTimeDecay(0.1, 9, 0.5),
            schedules.CosineDecayRestarts(0.1, 9),
        )
    ):
        names = ("SGD", "RMSprop", "AdamW", "Nadam", "Adagrad")
        model = keras.Sequential([keras.Input(VECTOR), k.Dense(1)])
        model.compile(
            optimizer=getattr(keras.optimizers, names[index])(rate), loss=losses.Huber(0.5), metrics=["mae"]
        )
        yield f"optimizer {names[index]}", model
    for name in ("Adadelta", "Adamax", "Ftrl"):
        model = keras.Sequential([keras.Input(VECTOR), k.Dense(1, activation="sigmoid")])
        model.compile(
            name.lower(), "binary_crossentropy", metrics=[metrics.AUC(), metrics.Precision(), "acc"]
        )
        yield f"optimizer {name}", model
    regularized = k.Dense(
        3,
        activation=keras.activations.relu,
        kernel_initializer=keras.initializers.VarianceScaling(2.0, "fan_out"),
        kernel_regularizer=keras.regularizers.L1L2(0.1, 0.2),
        bias_regularizer=keras.regularizers.L2(0.1),
        kernel_constraint=keras.constraints.MinMaxNorm(0.1, 0.9),
        bias_constraint=keras.constraints.NonNeg(),
    )
    yield "objects", keras.Model(a, k.Activation(keras.activations.gelu)(regularized(a)))
    yield "half", keras.Model(a, k.Dense(2, dtype="float32")(k.Dense(3, dtype="mixed_float16")(a)))
    mixed = keras.mixed_precision
    policy = (
        mixed.Policy("mixed_bfloat16") if hasattr(mixed, "Policy") else mixed.DTypePolicy("mixed_bfloat16")
    )
    yield "policy", keras.Model(a, k.Dense(3, dtype=policy)(a))
    state = k.LSTM(3, return_state=True, return_sequences=True)(s)
    yield "states", keras.Model(s, k.LSTM(3)(s, initial_state=state[1:]))
    frozen = keras.Sequential([keras.Input(IMAGE), k.Conv2D(2, 3), k.Flatten(), k.Dense(2)])
    frozen.layers[0].trainable = False
    yield "frozen", frozen


def keras_3_only(keras: Any) -> Iterator[tuple[str, Any]]:
    """Yield models with operations of Keras 3."""
    k, ops = keras.layers, keras.ops
    a, s, image = keras.Input(VECTOR), keras.Input(SERIES), keras.Input(IMAGE)
    yield (
        "numbers",
        keras.Model(a, ops.sin(a) + ops.exp(a) * 2 - ops.clip(a, -1, 1) / ops.sqrt(ops.abs(a) + 1)),
    )
    yield "slices", keras.Model(s, [s[:, -1], s[:, :3], s[:, 1:, ..., None]])
    yield (
        "reductions",
        keras.Model(s, [ops.mean(s, 1), ops.max(s, axis=-1), ops.argmax(s, 1), ops.norm(s, axis=1)]),
    )
    shaped = [
        ops.concatenate([s, s], 1),
        ops.transpose(s, (0, 2, 1)),
        ops.reshape(s, (-1, 28)),
        ops.expand_dims(s, 1),
    ]
    yield (
        "shapes",
        keras.Model(
            s, [*shaped, *ops.split(s, 2, axis=2), ops.stack([s, s], axis=1), ops.squeeze(s[:, :1], 1)]
        ),
    )
    yield (
        "networks",
        keras.Model(a, [ops.relu(a), ops.softmax(a), ops.silu(a), ops.one_hot(ops.argmax(a, -1), 6)]),
    )
    yield "comparisons", keras.Model(a, ops.where(a > 0, a, -a))
    yield (
        "products",
        keras.Model(s, [ops.matmul(s, ops.transpose(s, (0, 2, 1))), ops.einsum("abc,abd->acd", s, s)]),
    )
    yield (
        "pictures",
        keras.Model(
            image, [ops.image.resize(image, (4, 4)), ops.max_pool(image, 2), ops.average_pool(image, 2)]
        ),
    )
    yield (
        "functions",
        keras.Model(a, k.Dense(2, activation=ops.tanh, kernel_initializer=keras.initializers.zeros)(a)),
    )
    yield "grouped", keras.Model(s, k.GroupQueryAttention(4, 4, 2)(s, s))
    low = keras.Sequential([keras.Input(VECTOR), k.Dense(4), k.Dense(2)])
    low.quantize("int8")
    yield "int8", low
    adapted = k.Normalization()
    adapted.adapt(np.arange(12, dtype=np.float32).reshape(2, 6))
    yield "adapted", keras.Model(a, adapted(a))
    scaled = keras.Sequential([keras.Input(VECTOR), k.Dense(1)])
    scaled.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), keras.losses.Tversky())
    yield "scaled", scaled


def keras_2_only(keras: Any) -> Iterator[tuple[str, Any]]:
    """Yield models with TensorFlow's functions, as layers of tf_keras call them."""
    import tensorflow as tf

    k, backend = keras.layers, keras.backend
    a, s, image = keras.Input(VECTOR), keras.Input(SERIES), keras.Input(IMAGE)
    yield "operators", keras.Model(a, -(a + 1) * 2 / 3 - a**2 + abs(a) % 3)
    yield "compared", keras.Model(a, tf.where((a > 0) & (a < 1) | ~(a >= 2), a, tf.zeros_like(a)))
    yield "sliced", keras.Model(s, [s[:, -1], s[:, :3], s[:, :, None], tf.boolean_mask(s, s[:, :, 0] > 0)])
    yield (
        "shaped",
        keras.Model(
            s,
            [
                tf.concat([s, s], 1),
                tf.transpose(s, (0, 2, 1)),
                tf.reshape(s, (-1, 28)),
                tf.expand_dims(s, 1),
                tf.stack([s, s], 1),
                tf.tile(s, (1, 2, 1)),
                tf.squeeze(s[:, :1], 1),
                tf.gather(s, [0, 1], axis=1),
                tf.pad(s, [[0, 0], [1, 1], [0, 0]]),
                tf.cast(s, "float16"),
                *tf.split(s, 2, axis=2),
                *tf.unstack(s, axis=2),
            ],
        ),
    )
    yield (
        "reduced",
        keras.Model(
            s,
            [
                tf.reduce_mean(s, 1),
                tf.reduce_sum(s, axis=1),
                tf.reduce_max(s, 1),
                tf.argmax(s, 1),
                tf.norm(s, axis=1),
                tf.math.l2_normalize(s, 1),
                tf.cumsum(s, 1),
                tf.math.reduce_std(s, 1),
                tf.linalg.matmul(s, s, transpose_a=True),
                tf.einsum("abc,abd->acd", s, s),
                tf.sort(s, axis=1),
                tf.math.top_k(s, 2)[0],
            ],
        ),
    )
    yield (
        "nets",
        keras.Model(
            a,
            [
                tf.nn.relu(a),
                tf.nn.softmax(a),
                tf.sigmoid(a),
                tf.tanh(a),
                tf.nn.leaky_relu(a),
                tf.nn.softplus(a),
                tf.clip_by_value(a, -1, 1),
                tf.exp(a),
                tf.math.log(a),
                tf.nn.dropout(a, 0.1),
                tf.one_hot(tf.argmax(a, -1), 6),
                tf.stop_gradient(a),
                tf.maximum(a, 0.0),
                tf.math.squared_difference(a, a),
                tf.nn.log_softmax(a),
                tf.identity(a),
            ],
        ),
    )
    yield (
        "of images",
        keras.Model(
            image,
            [
                tf.image.resize(image, (4, 4)),
                tf.image.rgb_to_grayscale(image),
                tf.nn.max_pool2d(image, 2, 2, "SAME"),
                tf.nn.depth_to_space(tf.concat([image] * 4, -1), 2),
                tf.image.flip_left_right(image),
            ],
        ),
    )
    yield (
        "backend",
        keras.Model(
            s,
            [
                backend.sum(s, 1),
                backend.mean(s, axis=1),
                backend.concatenate([s, s]),
                backend.batch_dot(s, s, axes=1),
                backend.softmax(s),
                backend.expand_dims(s),
                backend.permute_dimensions(s, (0, 2, 1)),
                backend.clip(s, 0, 1),
            ],
        ),
    )
    yield "activations", keras.Model(a, keras.activations.gelu(keras.activations.mish(a)))
    yield "chosen", keras.Model(a, k.Dense(2, activation=tf.nn.relu)(k.Dense(3, activation=tf.nn.softmax)(a)))
    ragged = keras.Input((None,), ragged=True)
    yield "ragged", keras.Model(ragged, [ragged.to_tensor(), tf.reduce_sum(ragged, 1), ragged.flat_values])
    scaled = keras.Sequential([keras.Input(VECTOR), k.Dense(1)])
    scaled.compile(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam()), "mse")
    yield "scaled", scaled
    old = keras.Sequential([keras.Input(VECTOR), k.Dense(1)])
    old.compile(keras.optimizers.legacy.Adam(), "mse", metrics=["accuracy"])
    yield "legacy", old
    wrapped = (
        k.RNN(tf.nn.RNNCellResidualWrapper(k.LSTMCell(4)))
        if hasattr(tf.nn, "RNNCellResidualWrapper")
        else None
    )
    if wrapped is not None:
        yield "residual", keras.Model(s, wrapped(s))


def _save(folder: Path, library: str, models: Iterable[tuple[str, Any]], ends: tuple[str, ...]) -> list[str]:
    """Save the models in files with these endings; return the paths."""
    import h5py  # type: ignore[import-untyped]

    saved = []
    for name, model in models:
        file = folder / f"{library} {name}"
        model.save(f"{file}.keras")
        saved.append(f"{file}.keras")
        if ".h5" not in ends:
            continue
        try:
            model.save(f"{file}.h5")
        except (NotImplementedError, TypeError, ValueError):  # some states are for `.keras` alone
            Path(f"{file}.h5").unlink(missing_ok=True)
            continue
        with h5py.File(f"{file}.h5") as archive:
            texts = {
                name: archive.attrs[name]
                for name in ("model_config", "training_config")
                if name in archive.attrs
            }
        Path(f"{file}.json").write_text(json.dumps(texts))
        saved.append(f"{file}.h5")
    return saved


def build(folder: Path) -> list[str]:
    """Save the models of the quick test; return the files."""
    import keras
    import tf_keras

    models = [*together(keras, KERAS_3, (VECTOR, SERIES, STRINGS)), *kinds(keras), *keras_3_only(keras)]
    saved = _save(folder, "keras", models, (".keras",))
    return [*saved, *_save(folder, "tf_keras", [*keras_2_only(tf_keras)], (".keras", ".h5"))]


def build_all(folder: Path) -> list[str]:
    """Save models of every kind and a model for every layer; return the files."""
    import keras
    import tf_keras

    saved = []
    for name, library, more, only in (
        ("keras", keras, KERAS_3, keras_3_only),
        ("tf_keras", tf_keras, KERAS_2, keras_2_only),
    ):
        models = [*apart(library, more), *together(library, more), *kinds(library), *only(library)]
        saved += _save(folder, name, models, (".keras", ".h5"))
    return saved


def registries(folder: Path) -> dict[str, Any]:
    """Return the names that the installed libraries find: classes, functions, TensorFlow's symbols."""
    import keras
    import tensorflow as tf  # noqa: F401 - its modules are imported with it
    import tf_keras  # noqa: F401
    from keras.src.api_export import REGISTERED_NAMES_TO_OBJS
    from tensorflow.python.util import tf_export
    from tf_keras.src import constraints, initializers, losses, metrics, regularizers
    from tf_keras.src.layers import serialization

    del folder
    serialization.populate_deserializable_objects()
    initializers.populate_deserializable_objects()
    exported = {name: item for name, item in REGISTERED_NAMES_TO_OBJS.items() if callable(item)}
    symbols = {name: item for name, item in tf_export._NAME_TO_SYMBOL_MAPPING.items() if callable(item)}
    return {
        "classes": {name: item.__name__ for name, item in exported.items() if isinstance(item, type)},
        "functions": [name for name, item in exported.items() if not isinstance(item, type)],
        "operations": sorted(
            item.__name__ for item in _subclasses(keras.Operation) if ".ops." in item.__module__
        ),
        "tf_keras": {
            "layers": sorted(serialization.LOCAL.ALL_OBJECTS),
            "initializers": sorted(initializers.LOCAL.ALL_OBJECTS),
            **{
                module.__name__.rpartition(".")[2]: [
                    name for name, item in vars(module).items() if callable(item)
                ]
                for module in (constraints, losses, metrics, regularizers)
            },
        },
        "symbols": {name: _defined_in(item) for name, item in symbols.items()},
    }


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _defined_in(function: Any) -> str:
    """Return the module of a function or class below its decorators."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return str(getattr(function, "__module__", ""))
