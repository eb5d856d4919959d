"""Models of TensorFlow beside the programs exported from them; runs in child processes only."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from ckpttool.commands.verify import verify
from ckpttool.verification import two_models
from tests.shared_runners import InThisProcess


def image(keras: Any) -> Any:
    """Convolutions with and without an activation of their own, a batch norm, a flattened image."""
    layers = keras.layers
    inputs = layers.Input((8, 10, 3))
    x = layers.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    x = layers.Conv2D(4, 3, activation="relu", strides=(2, 1), name="conv2")(layers.ReLU(name="re")(x))
    x = layers.Dense(6, activation="gelu", name="mix")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(6, name="head")(x))


def text(keras: Any) -> Any:
    """An embedding, a layer norm, dense layers on sequences, and an LSTM."""
    layers = keras.layers
    inputs = layers.Input((6,), dtype="int32")
    x = layers.LayerNormalization(name="norm")(layers.Embedding(11, 8, name="embed")(inputs))
    x = layers.Dense(8, activation="tanh", name="mix")(x)
    return keras.Model(inputs, layers.Dense(2, name="head")(layers.LSTM(3, name="rnn")(x)))


MODELS: dict[str, Callable[[Any], Any]] = {"image": image, "text": text}


def compare(name: str, folder: str, wrong: str = "") -> None:
    """Print the comparison of a SavedModel with its Keras file, in which a layer's kernel is transposed."""
    import keras

    keras.utils.set_random_seed(3)
    model = MODELS[name](keras)
    for weight in model.weights:
        weight.assign(keras.random.uniform(weight.shape, 0.1, 0.7))
    model.export(f"{folder}/program", verbose=False)
    if wrong:
        layer = model.get_layer(wrong)
        kernel, *rest = layer.get_weights()
        axes = (*range(kernel.ndim - 2), kernel.ndim - 1, kernel.ndim - 2)
        layer.set_weights([kernel.transpose(axes), *rest])
    model.save(f"{folder}/model.keras")
    print_comparison(f"{folder}/program", f"{folder}/model.keras", folder)


def compare_module(folder: str) -> None:
    """Print the comparison of a SavedModel of plain operations with the module of the user's code."""
    import numpy as np
    import tensorflow as tf

    sys.path.insert(0, folder)
    Path(folder, "own_module.py").write_text(
        "import tensorflow as tf\n"
        "class Net(tf.Module):\n"
        "    def __init__(self):\n"
        "        self.w = tf.Variable(tf.ones((6, 4)))\n"
        "        self.b = tf.Variable(tf.ones((4,)))\n"
        "    def __call__(self, x):\n"
        "        return tf.nn.relu(x @ self.w + self.b)\n"
    )
    from own_module import Net  # type: ignore[import-not-found]

    net = Net()
    net.w.assign(np.random.default_rng(0).standard_normal((6, 4)))
    tf.train.Checkpoint(net=net).write(f"{folder}/ckpt")
    called = tf.function(net.__call__, input_signature=[tf.TensorSpec((None, 6), tf.float32)])
    tf.saved_model.save(net, f"{folder}/program", signatures=called.get_concrete_function())
    print_comparison(f"{folder}/program", f"{folder}/ckpt", folder, like_b="own_module:Net")


def print_comparison(first: str, second: str, folder: str, **options: Any) -> None:
    """Print the JSON of `verify` of two files; both models run in this process."""
    with mock.patch.object(two_models, "ModelProcess", InThisProcess):
        verification = verify(first, second, run_code=True, **options)
    sys.stdout.write("\n" + json.dumps(verification.document()))


def compare_keras2(folder: str, suffix: str, wrong: str = "") -> None:
    """Print the comparison of a model of Keras 2 in a file with the same model of the user's code."""
    Path(folder, "keras2_net.py").write_text(
        "from tf_keras import Sequential, layers\n"
        "def net(units=5):\n"
        "    return Sequential([layers.Input((7, 3)), layers.LSTM(units, return_sequences=True),\n"
        "        layers.GRU(4), layers.Dense(4, activation='elu'), layers.BatchNormalization(),\n"
        "        layers.Dense(4)])\n"
    )
    sys.path.insert(0, folder)
    import numpy as np
    from keras2_net import net  # type: ignore[import-not-found]

    model = net()
    draw = np.random.default_rng(0)
    model.set_weights([draw.uniform(0.1, 0.7, weight.shape) for weight in model.get_weights()])
    model.save(f"{folder}/model{suffix}")
    if wrong:
        layer = model.layers[int(wrong)]
        kernel, *rest = layer.get_weights()
        layer.set_weights([kernel.T, *rest])
    model.save_weights(f"{folder}/ckpt")
    print_comparison(f"{folder}/model{suffix}", f"{folder}/ckpt", folder, like_b="keras2_net:net")
