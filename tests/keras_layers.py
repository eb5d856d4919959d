"""One layer of every kind in Keras: builds them in a process of their own, saves, restores and runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# name: what makes it of a module of layers, the shape of its input (batch first, channels last)
Make = Callable[[Any], Any]
LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "dense": (lambda k: k.Dense(5), (2, 7)),
    "square": (lambda k: k.Dense(7, use_bias=False), (2, 7)),
    "embedding": (lambda k: k.Embedding(6, 6), (2, 4)),
    "conv1": (lambda k: k.Conv1D(5, 3, dilation_rate=2), (2, 9, 4)),
    "conv2": (lambda k: k.Conv2D(6, (3, 2), strides=2, groups=2), (2, 9, 8, 4)),
    "conv3": (lambda k: k.Conv3D(5, 2), (2, 4, 5, 6, 3)),
    "transposed": (lambda k: k.Conv2DTranspose(5, 3, strides=2), (2, 4, 5, 3)),
    "depthwise": (lambda k: k.DepthwiseConv2D(3, depth_multiplier=2), (2, 6, 6, 3)),
    "separable": (lambda k: k.SeparableConv2D(5, 3, depth_multiplier=2), (2, 6, 6, 3)),
    "batch_norm": (lambda k: k.BatchNormalization(), (2, 5, 5, 3)),
    "unscaled": (lambda k: k.BatchNormalization(scale=False), (2, 5, 5, 3)),
    "layer_norm": (lambda k: k.LayerNormalization(), (2, 5, 6)),
    "prelu": (lambda k: k.PReLU(shared_axes=[1, 2]), (2, 5, 5, 3)),
    "lstm": (lambda k: k.LSTM(5, return_sequences=True), (2, 6, 3)),
    "gru": (lambda k: k.GRU(5, return_sequences=True), (2, 6, 3)),
    "rnn": (lambda k: k.SimpleRNN(5, return_sequences=True), (2, 6, 3)),
    "both_ways": (lambda k: k.Bidirectional(k.LSTM(4, return_sequences=True)), (2, 6, 3)),
    "attention": (lambda k: k.MultiHeadAttention(num_heads=2, key_dim=4), (2, 6, 8)),
    "group_norm": (lambda k: k.GroupNormalization(groups=2), (2, 5, 5, 4)),
}
# What one library has and the other has not, or stores otherwise than is written.
ONLY_KERAS_3 = frozenset(("group_norm",))
# Of Keras 2 the variable is called depthwise_kernel, which is read and not written.
NOT_RESTORED = {"keras": frozenset(("unscaled",)), "tf_keras": frozenset(("depthwise", "unscaled"))}


def inputs() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    arrays = {
        name: generator.standard_normal(shape).astype(np.float32) for name, (_, shape) in LAYERS.items()
    }
    return arrays | {"embedding": generator.integers(0, 6, LAYERS["embedding"][1])}


def _built(library: Any, name: str, array: np.ndarray) -> tuple[Any, Callable[[], np.ndarray]]:
    layer = LAYERS[name][0](library.layers)

    def run() -> np.ndarray:
        output = layer(array, array) if name == "attention" else layer(array)
        return np.asarray(output)

    run()
    return layer, run


def _randomise(layer: Any, generator: np.random.Generator) -> None:
    for variable in layer.weights:
        value = generator.standard_normal(tuple(variable.shape)).astype(np.float32) * 0.4
        variance = "variance" in (getattr(variable, "path", "") or variable.name)
        variable.assign(np.abs(value) + 0.5 if variance else value)


CELLS_INPUT = (2, 6, 3)
UNITS = 5


def _tf1_cells(tf: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Run TensorFlow 1's cells over a sequence; return weights by name and outputs as `NAME/outputs`."""
    from tf_keras.src.layers.rnn import legacy_cells

    sequence = np.random.default_rng(4).standard_normal(CELLS_INPUT).astype(np.float32)
    result: dict[str, np.ndarray] = {}
    for name, make in {
        "one/basic_lstm_cell": lambda: legacy_cells.BasicLSTMCell(UNITS),
        "two/lstm_cell": lambda: legacy_cells.LSTMCell(UNITS),
        "three/basic_rnn_cell": lambda: legacy_cells.BasicRNNCell(UNITS),
    }.items():
        cell = make()
        state = cell.zero_state(CELLS_INPUT[0], tf.float32)
        cell(sequence[:, 0], state)
        _randomise(cell, generator)
        outputs = []
        for step in range(CELLS_INPUT[1]):
            output, state = cell(sequence[:, step], state)
            outputs.append(np.asarray(output))
        for variable in cell.weights:
            result[f"{name}/{variable.name.rpartition('/')[2].removesuffix(':0')}"] = variable.numpy()
        result[f"{name.partition('/')[0]}/outputs"] = np.stack(outputs, 1)
    return result


def _cudnn_cells(layers: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Give Keras weights of its cuDNN layers, which it converts; return them, and what it computes then."""
    from tf_keras.src.saving.legacy.hdf5_format import preprocess_weights_for_loading

    sequence = np.random.default_rng(4).standard_normal(CELLS_INPUT).astype(np.float32)
    outputs: dict[str, np.ndarray] = {}
    for name, cls, gates in (("four", layers.LSTM, 4), ("five", layers.GRU, 3)):
        layer = cls(UNITS, return_sequences=True)
        layer(sequence)
        shapes = ((CELLS_INPUT[2], gates * UNITS), (UNITS, gates * UNITS), (2 * gates * UNITS,))
        weights = [generator.standard_normal(shape).astype(np.float32) for shape in shapes]
        layer.set_weights(preprocess_weights_for_loading(layer, weights))
        names = ("kernel", "recurrent_kernel", "bias")
        outputs |= {f"{name}/{word}": weight for word, weight in zip(names, weights, strict=True)}
        outputs[f"{name}/outputs"] = np.asarray(layer(sequence))
    return outputs


def _loaded(keras: Any, file: Path, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what a model of Keras 3 gives with the weights of a file."""

    class Model(keras.Model):  # type: ignore[misc]
        """Every layer as an attribute."""

    model, calls = Model(), {}
    for name in LAYERS:
        if name not in NOT_RESTORED["keras"]:
            layer, calls[name] = _built(keras, name, arrays[name])
            setattr(model, name, layer)
    model.built = True
    model.load_weights(file)
    return {name: call() for name, call in calls.items()}


def run(folder: Path) -> list[str]:
    """Save every layer of both libraries with its outputs; restore what came from torch and run it."""
    import keras
    import tensorflow as tf
    import tf_keras

    arrays = inputs()
    names = []
    for library in (keras, tf_keras):
        word = "keras" if library is keras else "tf_keras"
        generator = np.random.default_rng(5)
        built = {
            name: _built(library, name, arrays[name])
            for name in LAYERS
            if library is keras or name not in ONLY_KERAS_3
        }
        for layer, _ in built.values():
            _randomise(layer, generator)
        outputs = {name: call() for name, (_, call) in built.items()}
        np.savez(folder / f"{word}.npz", **outputs)
        tf.train.Checkpoint(**{name: layer for name, (layer, _) in built.items()}).write(
            str(folder / word / "ckpt")
        )
        kept = {name: pair for name, pair in built.items() if name not in NOT_RESTORED[word]}
        status = tf.train.Checkpoint(**{name: layer for name, (layer, _) in kept.items()}).restore(
            str(folder / "from_torch" / "ckpt-1")
        )
        status.assert_existing_objects_matched()
        np.savez(folder / f"{word}_restored.npz", **{name: call() for name, (_, call) in kept.items()})
        names.append(word)
    np.savez(folder / "keras_loaded.npz", **_loaded(keras, folder / "from_torch.weights.h5", arrays))
    generator = np.random.default_rng(6)
    cells = _tf1_cells(tf, generator) | _cudnn_cells(tf_keras.layers, generator)
    np.savez(folder / "cells.npz", **cells)
    return names
