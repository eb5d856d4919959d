"""Makers of the Keras 2 files of the matrix, in a process whose EVERYDAY_KERAS is tf_keras."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tests.everyday import keras_nets as nets
from tests.everyday.tensorflow_files import make_side, trained

keras = nets.keras


def make(names: Sequence[str], folder: str) -> None:
    """Make files and the references of what they compute, each in a folder of its name."""
    make_side("keras_2", globals(), names, folder)


def h5_compiled(folder: Path) -> Any:
    net, tool = trained("h5_compiled", nets.sequential("mlp"), compiled=True)
    net.save(str(folder / "model.h5"))
    return net, tool


def h5_weights(folder: Path) -> Any:
    net, _ = trained("h5_weights")
    net.save_weights(str(folder / "x.h5"))
    return net, None


def tf_weights(folder: Path) -> Any:
    net, tool = trained("tf_weights", compiled=True)
    net.save_weights(str(folder / "x"), save_format="tf")
    return net, tool


def keras_2_checkpoint(folder: Path) -> Any:
    net, tool = trained("keras_2_checkpoint")
    tf.train.Checkpoint(model=net, optimizer=tool).save(str(folder / "ckpt"))
    return net, tool


def keras_2_saved_model(folder: Path) -> Any:
    net, tool = trained("keras_2_saved_model", nets.sequential("mlp"), compiled=True)
    net.save(str(folder / "saved"), save_format="tf")
    return net, tool


def keras_1_h5(folder: Path) -> Any:
    """Write the names of Keras 1.2's `save_weights`, which nothing installed here can run."""
    net, _ = trained("keras_1_h5")
    with h5py.File(folder / "old.h5", "w") as file:
        names = ["dense_1", "dense_2", "dense_3"]
        file.attrs["layer_names"] = np.array(names, "S")
        file.attrs["keras_version"] = np.bytes_("1.2.2")
        file.attrs["backend"] = np.bytes_("tensorflow")
        values = [np.asarray(v) for v in net.trainable_variables]
        for index, name in enumerate(names):
            group = file.create_group(name)
            group.attrs["weight_names"] = np.array([f"{name}_W", f"{name}_b"], "S")
            group[f"{name}_W"], group[f"{name}_b"] = values[2 * index : 2 * index + 2]
    return net, None
