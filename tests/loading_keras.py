"""Models of TensorFlow and Keras that load by the lines a conversion prints; run in child processes only."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import ROOT


def observations() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(16, 3)).astype(np.float32)


def load_all(folder: Path) -> dict[str, Any]:
    """Execute the lines beside models of TensorFlow and Keras; return what these give."""
    sys.path.insert(0, str(ROOT / "examples"))
    import keras
    import tensorflow as tf
    from td3_contract import AgentSpec
    from td3_tensorflow import TD3

    dense = keras.layers.Dense
    obs = observations()

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = dense(8, "relu"), dense(8, "relu"), dense(1, "tanh")

        def call(self, x: Any) -> Any:
            return self.fc3(self.fc2(self.fc1(x)))

    def built(model: Any) -> Any:
        model(obs)
        return model

    sequential = keras.Sequential([keras.Input((3,)), dense(8, "relu"), dense(8, "relu"), dense(1, "tanh")])
    models = {
        "objects": built(Model()),
        "below": built(Model()),
        "counted": built(Model()),
        "weights": built(Model()),
        "renamed": built(Model()),
        "numbered": sequential,
        "part": built(Model()),
    }
    result = {}
    cases = json.loads((folder / "lines.json").read_text())
    for name, model in models.items():
        scope = {"tf": tf, "shutil": shutil, "model": model, "policy": model, "net": model}
        scope["model_state_dict"] = model
        exec("\n".join(cases[name]), scope)
        result[name] = model(obs).numpy().tolist()
    policy = TD3(AgentSpec(3, 1, 2.0, (64, 64), 1e-3, adam_epsilon=1e-8))
    exec("\n".join(cases["agent"]), {"tf": tf, "policy": policy})
    result["agent"] = policy.actor(obs).numpy().tolist()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        shapes = {"fc1": (3, 8), "fc2": (8, 8), "fc3": (8, 1)}
        for layer, shape in shapes.items():
            tf.compat.v1.get_variable(f"{layer}/kernel", shape)
            tf.compat.v1.get_variable(f"{layer}/bias", shape[1:])
        exec("\n".join(cases["variables"]), {"tf": tf, "session": session})
        result["variables"] = session.run("fc1/kernel/Read/ReadVariableOp:0").tolist()
    return result


def restore_beside(folder: Path) -> dict[str, str]:
    """Restore a model by the printed lines, whatever number stands beside it in the file; return errors."""
    import keras
    import tensorflow as tf

    dense, errors = keras.layers.Dense, {}

    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.fc3 = dense(8, "relu"), dense(8, "relu"), dense(1, "tanh")

        def call(self, x: Any) -> Any:
            return self.fc3(self.fc2(self.fc1(x)))

    obs, outputs = observations(), []
    for case, lines in json.loads((folder / "lines.json").read_text()).items():
        model = Model()
        model(obs)
        try:
            exec("\n".join(lines), {"tf": tf, "model": model, "objects": {"net": model}})
        except Exception as error:  # noqa: BLE001  # TensorFlow raises whatever it meets
            errors[case] = f"{type(error).__name__}: {error}"[:300]
            continue
        outputs.append(model(obs).numpy())
        if not np.array_equal(outputs[0], outputs[-1]):
            errors[case] = "other outputs"
    return errors
