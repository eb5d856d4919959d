"""Actors of Keras with memory, as checkpoints, and what they give: a child process runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

UNITS, SCALE = 4, 3.0
CELLS = ("lstm", "after", "before")


def actors(folder: Path) -> list[str]:
    """Write a checkpoint for every cell, and its actions on obs.npy [batch, steps, n], n inputs a step."""
    import keras
    import tensorflow as tf

    class Actor(keras.Model):  # type: ignore[misc]  # Keras carries no types
        def __init__(self, cell: Any) -> None:
            super().__init__()
            self.memory = cell
            self.l1 = keras.layers.Dense(5, "relu")
            self.l2 = keras.layers.Dense(2, "tanh")

        def call(self, obs: Any) -> Any:
            return self.l2(self.l1(self.memory(obs)))

    obs = np.load(folder / "obs.npy")
    layers = {
        "lstm": keras.layers.LSTM(UNITS, return_sequences=True),
        "after": keras.layers.GRU(UNITS, return_sequences=True, reset_after=True),
        "before": keras.layers.GRU(UNITS, return_sequences=True, reset_after=False),
    }
    for number, (name, cell) in enumerate(layers.items()):
        sequence = keras.Sequential([keras.Input(obs.shape[1:]), cell, keras.layers.Dense(2, "tanh")])
        actor = sequence if name == "after" else Actor(cell)
        actor(obs)
        draw = np.random.default_rng(number)
        for weight in actor.weights:
            weight.assign(draw.normal(size=weight.shape) / 2)
        np.save(folder / f"{name}.npy", SCALE * np.asarray(actor(obs)))
        step = tf.Variable(3, dtype=tf.int64)
        tf.train.Checkpoint(actor=actor, total_it=step).write(str(folder / name))
    return list(layers)
