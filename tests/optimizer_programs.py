"""Programs that train with every optimizer of TensorFlow on fixed gradients, in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 4
RATE = 0.03125
SHAPES = {"l1/kernel": (3, 4), "l1/bias": (4,), "l2/kernel": (4, 2), "l2/bias": (2,)}
KERNELS = ("l1/kernel", "l2/kernel")

# Numbers that float32 holds: Keras rounds betas, momentum and decay to it even for weights of float64.
_KERAS = {"beta_1": 0.875, "beta_2": 0.9921875, "epsilon": 1e-14}
_TORCH = {"betas": (0.875, 0.9921875), "eps": 1e-14}
_RMS, _RMS_TORCH = {"epsilon": 1e-14, "rho": 0.75}, {"alpha": 0.75, "eps": 1e-14}
_ALL = {"momentum": 0.875, "centered": True}
_NESTEROV = {"momentum": 0.875, "nesterov": True}
# By name: the class in Keras, its arguments there, and torch's.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "adam": ("Adam", _KERAS, "Adam", _TORCH),
    "amsgrad": ("Adam", {**_KERAS, "amsgrad": True}, "Adam", {**_TORCH, "amsgrad": True}),
    "adamw": ("AdamW", {**_KERAS, "weight_decay": 0.03125}, "AdamW", {**_TORCH, "weight_decay": 0.03125}),
    "rmsprop": ("RMSprop", _RMS, "RMSprop", _RMS_TORCH),
    "centered": ("RMSprop", {**_RMS, **_ALL}, "RMSprop", {**_RMS_TORCH, **_ALL}),
    "sgd": ("SGD", {}, "SGD", {}),
    "momentum": ("SGD", {"momentum": 0.875}, "SGD", {"momentum": 0.875}),
    "nesterov": ("SGD", _NESTEROV, "SGD", _NESTEROV),
}
TF1 = {
    "adam": ("AdamOptimizer", {"epsilon": 1e-14}),
    "rmsprop": ("RMSPropOptimizer", {"epsilon": 1e-14}),
    "centered": ("RMSPropOptimizer", {"epsilon": 1e-14, **_ALL}),
    "momentum": ("MomentumOptimizer", {"momentum": 0.875}),
}
# Gradients of the size of epsilon, or of its root.
TINY = {"adam": 1e-7, "rmsprop": 1e-4}
# The same classes with the settings of torch's CASES.
TF1_OF_TORCH: dict[str, dict[str, Any]] = {
    "adam": {"beta1": 0.875, "beta2": 0.9921875, "epsilon": 1e-14},
    "rmsprop": {"epsilon": 1e-14, "decay": 0.75},
    "centered": {"epsilon": 1e-14, "decay": 0.75, **_ALL},
    "momentum": {"momentum": 0.875},
}


def weights() -> dict[str, np.ndarray]:
    """The weights that every program begins with, in TensorFlow's orientation."""
    generator = np.random.default_rng(3)
    return {name: generator.standard_normal(shape) for name, shape in SHAPES.items()}


def gradients(first: int, scale: float = 1.0) -> Iterator[list[np.ndarray]]:
    """The gradients of the steps from `first` on, in TensorFlow's orientation, the same in every process."""
    for step in range(first, first + STEPS):
        generator = np.random.default_rng(100 + step)
        yield [scale * generator.standard_normal(shape) for shape in SHAPES.values()]


# --- In the child --------------------------------------------------------------------------------------


def _agent(tf: Any, keras: Any, optimizer: Any) -> Any:
    class Actor(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            # In float32 the corrections of Adam's bias alone differ by 1e-5 after a few updates.
            self.l1 = keras.layers.Dense(4, "relu", dtype="float64")
            self.l2 = keras.layers.Dense(2, "tanh", dtype="float64")

        def call(self, x: Any) -> Any:
            return self.l2(self.l1(x))

    agent = tf.Module()
    agent.actor = Actor()
    agent.actor(np.zeros((1, 3)))
    agent.actor_optimizer = optimizer
    for variable, value in zip(agent.actor.trainable_variables, weights().values(), strict=True):
        variable.assign(value)
    return agent


def _go_on(agent: Any, first: int, scale: float = 1.0) -> None:
    variables = agent.actor.trainable_variables
    for step in gradients(first, scale):
        agent.actor_optimizer.apply_gradients(zip(step, variables, strict=True))


def _noted(agent: Any, file: Path) -> None:
    pairs = zip(SHAPES, agent.actor.trainable_variables, strict=True)
    np.savez(file, **{name.replace("/", "_"): variable.numpy() for name, variable in pairs})


def _build_optimizer(cls: Any, settings: dict[str, Any], rate: float = RATE) -> Any:
    return cls(learning_rate=rate, **settings)


def _families() -> Iterator[tuple[str, Any, Any]]:
    import keras
    import tf_keras

    yield "keras3", keras, keras.optimizers
    yield "keras2", tf_keras, tf_keras.optimizers
    yield "legacy", tf_keras, tf_keras.optimizers.legacy


def train(folder: Path) -> list[str]:
    """Save every optimizer after STEPS updates, and what the weights are after STEPS more."""
    import tensorflow as tf

    done = []
    for family, keras, classes in _families():
        for case, (cls, settings, _, _) in CASES.items():
            if not hasattr(classes, cls):
                continue
            agent = _agent(tf, keras, _build_optimizer(getattr(classes, cls), settings))
            _go_on(agent, 0)
            name = f"{family}-{case}"
            tf.train.Checkpoint(policy=agent).write(str(folder / f"{name}-1"))
            _go_on(agent, STEPS)
            _noted(agent, folder / f"{name}.npz")
            done.append(name)
    _train_tf1(tf, folder, done)
    _train_l2(tf, folder)
    _train_tiny(tf, folder)
    return done


def _graph(tf: Any, cls: str, settings: dict[str, Any]) -> tuple[Any, list[Any], list[Any], Any]:
    v1 = tf.compat.v1
    with v1.variable_scope("actor"):
        variables = [
            v1.get_variable(name, initializer=tf.constant(value)) for name, value in weights().items()
        ]
    fed = [v1.placeholder(tf.float64, shape) for shape in SHAPES.values()]
    step = getattr(v1.train, cls)(RATE, **settings).apply_gradients(zip(fed, variables, strict=True))
    return v1.train.Saver(), variables, fed, step


def _train_tf1(tf: Any, folder: Path, done: list[str]) -> None:
    for case in TF1:
        with tf.Graph().as_default():
            saver, variables, fed, step = _graph(tf, *TF1[case])
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                for grads in gradients(0):
                    session.run(step, dict(zip(fed, grads, strict=True)))
                saver.save(session, str(folder / f"tf1-{case}-1"), write_meta_graph=False)
                for grads in gradients(STEPS):
                    session.run(step, dict(zip(fed, grads, strict=True)))
                values = session.run(variables)
        named = {name.replace("/", "_"): value for name, value in zip(SHAPES, values, strict=True)}
        np.savez(folder / f"tf1-{case}.npz", **named)
        done.append(f"tf1-{case}")


def _l2(tf: Any, agent: Any, first: int) -> None:
    """Train with a loss whose gradients are ours and that has a penalty of the kernels."""
    variables = agent.actor.trainable_variables
    for step in gradients(first):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.constant(g) * v) for g, v in zip(step, variables, strict=True)])
            loss += tf.add_n([0.01 * tf.reduce_sum(tf.square(v)) for v in (variables[0], variables[2])])
        agent.actor_optimizer.apply(tape.gradient(loss, variables), variables)


def _train_l2(tf: Any, folder: Path) -> None:
    import keras

    agent = _agent(tf, keras, keras.optimizers.Adam(RATE, **_KERAS))
    _l2(tf, agent, 0)
    tf.train.Checkpoint(policy=agent).write(str(folder / "l2-1"))
    _l2(tf, agent, STEPS)
    _noted(agent, folder / "l2.npz")


def _train_tiny(tf: Any, folder: Path) -> None:
    """Train with gradients that are as small as epsilon."""
    import keras

    for case, scale in TINY.items():
        settings = {**CASES[case][1], "epsilon": 1e-7}
        agent = _agent(tf, keras, _build_optimizer(getattr(keras.optimizers, CASES[case][0]), settings))
        _go_on(agent, 0, scale)
        tf.train.Checkpoint(policy=agent).write(str(folder / f"tiny-{case}-1"))
        _go_on(agent, STEPS, scale)
        _noted(agent, folder / f"tiny-{case}.npz")


def resume(folder: Path) -> list[str]:
    """Restore what was converted from torch, strictly, and train on."""
    import keras
    import tensorflow as tf

    done = []
    for case, (cls, settings, _, _) in CASES.items():
        agent = _agent(tf, keras, _build_optimizer(getattr(keras.optimizers, cls), settings, rate=0.5))
        agent.actor_optimizer.build(agent.actor.trainable_variables)
        tf.train.Checkpoint(policy=agent).restore(str(folder / f"torch-{case}-1")).assert_consumed()
        _go_on(agent, STEPS)
        _noted(agent, folder / f"torch-{case}-after.npz")
        done.append(case)
    agent = _agent(tf, keras, keras.optimizers.Adam(0.5, **_KERAS))
    agent.actor_optimizer.build(agent.actor.trainable_variables)
    tf.train.Checkpoint(policy=agent).restore(str(folder / "torch-l2-1")).assert_consumed()
    _l2(tf, agent, STEPS)
    _noted(agent, folder / "torch-l2-after.npz")
    for case in TF1:
        _resume_tf1(tf, folder, case)
    return done


def _resume_tf1(tf: Any, folder: Path, case: str) -> None:
    with tf.Graph().as_default():
        _, variables, fed, step = _graph(tf, TF1[case][0], TF1_OF_TORCH[case])
        every = {v.op.name: v for v in tf.compat.v1.global_variables()}
        # Its own Saver saves all of them: each must be there, below the agent's name in our files.
        named = {name if name.startswith("beta") else f"policy/{name}": v for name, v in every.items()}
        saver = tf.compat.v1.train.Saver(named)
        with tf.compat.v1.Session() as session:
            saver.restore(session, str(folder / f"torch-{case}-named-1"))
            for grads in gradients(STEPS):
                session.run(step, dict(zip(fed, grads, strict=True)))
            values = session.run(variables)
    named = {name.replace("/", "_"): value for name, value in zip(SHAPES, values, strict=True)}
    np.savez(folder / f"torch-{case}-named-after.npz", **named)
