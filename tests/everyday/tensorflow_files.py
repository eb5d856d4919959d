"""Makers of the TensorFlow and Keras 3 files of the matrix, as users' programs make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.everyday import keras_nets as nets
from tests.everyday.cases import CASES, Case

keras = nets.keras


def make(names: Sequence[str], folder: str) -> None:
    """Make files and the references of what they compute, each in a folder of its name."""
    make_side("tensorflow", globals(), names, folder)


def make_side(side: str, makers: Mapping[str, Any], names: Sequence[str], folder: str) -> None:
    """Make the files of one side, whose functions have the names of the cases."""
    for case in CASES:
        if case.side == side and case.name in names:
            home = Path(folder, case.name)
            home.mkdir(parents=True)
            keras.utils.set_random_seed(7)
            refer(case, home, *makers[case.name](home))


def refer(case: Case, folder: Path, net: Any, tool: Any) -> None:
    """Record what the source computes, also after two more updates."""
    counted = net.trainable_variables
    if case.dtype != "float32":
        narrow, net = net, nets.build(case.net, case.layers)
        for variable, value in zip(net.weights, narrow.weights, strict=True):
            variable.assign(tf.cast(tf.convert_to_tensor(value), tf.float32))
    facts = {
        "outputs": nets.outputs(net, case.net),
        "parameters": np.array(sum(int(np.prod(v.shape)) for v in counted)),
    }
    for index, variable in enumerate(counted):
        last = str(getattr(variable, "path", variable.name)).rpartition("/")[2].partition(":")[0]
        last = ("b", "w")[index % 2] if case.name == "tf_module" else last
        facts[f"weight:{index}/{last}"] = np.asarray(variable).astype(np.float32)
    if case.policy:
        facts["returns"] = nets.returns(net, case.net)
    if isinstance(tool, np.ndarray):
        # A program of TensorFlow 1 has made its updates already.
        facts["continued"] = tool
    elif tool is not None and case.optimizer:
        facts["continued"] = nets.continued(net, case.net, tool)
    np.savez(folder / "reference.npz", **facts)


def _case(name: str) -> Case:
    (case,) = (c for c in CASES if c.name == name)
    return case


def trained(name: str, net: Any = None, *, compiled: bool = False) -> tuple[Any, Any]:
    """Return the network of a case after some training, and its optimizer."""
    case = _case(name)
    net = net or nets.build(case.net, case.layers)
    tool = nets.optimizer(case.optimizer or "sgd_plain")
    if compiled:
        net.compile(tool, "mse")
        net.optimizer.build(net.trainable_variables)
    nets.train(net, case.net, tool)
    return net, tool if case.optimizer else None


# --- tf.train.Checkpoint --------------------------------------------------------------------------------


def actor_opt_step(folder: Path) -> Any:
    net, tool = trained("actor_opt_step")
    tf.train.Checkpoint(actor=net, opt=tool, step=tf.Variable(300, dtype=tf.int64)).save(str(folder / "ckpt"))
    return net, tool


def _checkpoint(name: str, folder: Path) -> Any:
    net, tool = trained(name)
    tf.train.Checkpoint(model=net, optimizer=tool).save(str(folder / "ckpt"))
    return net, tool


def model_optimizer(folder: Path) -> Any:
    return _checkpoint("model_optimizer", folder)


def net_compiled(folder: Path) -> Any:
    net, tool = trained("net_compiled", compiled=True)
    tf.train.Checkpoint(net=net).save(str(folder / "ckpt"))
    return net, tool


def manager(folder: Path) -> Any:
    net, tool = trained("manager")
    checkpoint = tf.train.Checkpoint(step=tf.Variable(1), optimizer=tool, net=net)
    kept = tf.train.CheckpointManager(checkpoint, str(folder / "training"), max_to_keep=2)
    kept.save()
    checkpoint.step.assign_add(9)
    kept.save()
    return net, tool


def model_alone(folder: Path) -> Any:
    net, _ = trained("model_alone")
    tf.train.Checkpoint(net).save(str(folder / "ckpt"))
    return net, None


def pi_qf(folder: Path) -> Any:
    net, tool = trained("pi_qf")
    qf = keras.Sequential([keras.Input((4,)), keras.layers.Dense(24, "relu"), keras.layers.Dense(1)])
    qf_tool = keras.optimizers.Adam(1e-3)
    qf_tool.build(qf.trainable_variables)
    qf_tool.apply_gradients([(tf.ones(v.shape), v) for v in qf.trainable_variables])
    tf.train.Checkpoint(pi=net, qf=qf, pi_opt=tool, qf_opt=qf_tool).save(str(folder / "ckpt"))
    return net, tool


class Linear(tf.Module):  # type: ignore[misc]
    """A dense layer as people write it without Keras."""

    def __init__(self, inputs: int, outputs: int, names: tuple[str, str]) -> None:
        super().__init__()
        self.order = names
        setattr(self, names[0], tf.Variable(tf.random.normal([inputs, outputs]) * 0.3))
        setattr(self, names[1], tf.Variable(tf.zeros([outputs])))

    def __call__(self, x: Any) -> Any:
        return x @ getattr(self, self.order[0]) + getattr(self, self.order[1])


class Module(tf.Module):  # type: ignore[misc]
    def __init__(self, names: tuple[str, str] = ("w", "b")) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = Linear(3, 24, names), Linear(24, 24, names), Linear(24, 1, names)

    def __call__(self, x: Any) -> Any:
        return tf.tanh(self.fc3(tf.nn.relu(self.fc2(tf.nn.relu(self.fc1(x))))))


def tf_module(folder: Path) -> Any:
    net = Module()
    tool = tf.optimizers.Adam(1e-2)
    for index in range(3):
        nets.step(net, "mlp", tool, 10 + index)
    tf.train.Checkpoint(net=net, optimizer=tool).save(str(folder / "ckpt"))
    return net, tool


def sgd_checkpoint(folder: Path) -> Any:
    return _checkpoint("sgd_checkpoint", folder)


def rmsprop_checkpoint(folder: Path) -> Any:
    return _checkpoint("rmsprop_checkpoint", folder)


def adamw_checkpoint(folder: Path) -> Any:
    return _checkpoint("adamw_checkpoint", folder)


def adagrad_checkpoint(folder: Path) -> Any:
    return _checkpoint("adagrad_checkpoint", folder)


def schedule(folder: Path) -> Any:
    net = nets.build("mlp")
    tool = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(1e-2, 1000, 0.9))
    nets.train(net, "mlp", tool)
    tf.train.Checkpoint(model=net, optimizer=tool).save(str(folder / "ckpt"))
    return net, tool


def half_checkpoint(folder: Path) -> Any:
    net = nets.build("mlp", dtype="float16")
    tf.train.Checkpoint(model=net).save(str(folder / "ckpt"))
    return net, None


# --- Keras 3 files --------------------------------------------------------------------------------------


def weights_h5(folder: Path) -> Any:
    net, _ = trained("weights_h5")
    net.save_weights(str(folder / "x.weights.h5"))
    return net, None


def weights_h5_compiled(folder: Path) -> Any:
    net, tool = trained("weights_h5_compiled", compiled=True)
    net.save_weights(str(folder / "x.weights.h5"))
    return net, tool


def model_checkpoint(folder: Path) -> Any:
    net, tool = trained("model_checkpoint", compiled=True)
    callback = keras.callbacks.ModelCheckpoint(str(folder / "best.weights.h5"), save_weights_only=True)
    callback.set_model(net)
    net.stop_training = False
    net.fit(
        nets.inputs("mlp", 30, 8), np.zeros((8, 1), np.float32), epochs=1, verbose=0, callbacks=[callback]
    )
    return net, tool


def _sequential(name: str) -> Any:
    return trained(name, nets.sequential(_case(name).net), compiled=True)


def keras_sequential(folder: Path) -> Any:
    net, tool = _sequential("keras_sequential")
    net.save(str(folder / "model.keras"))
    return net, tool


def keras_functional(folder: Path) -> Any:
    start = keras.Input((3,), name="observation")
    h = keras.layers.Dense(24, "relu", name="fc1")(start)
    h = keras.layers.Dense(24, "relu", name="fc2")(h)
    net = keras.Model(start, keras.layers.Dense(1, "tanh", name="fc3")(h))
    net, tool = trained("keras_functional", net, compiled=True)
    net.save(str(folder / "model.keras"))
    return net, tool


def h5_sequential(folder: Path) -> Any:
    net, tool = _sequential("h5_sequential")
    net.save(str(folder / "model.h5"))
    return net, tool


def saved_model(folder: Path) -> Any:
    net, tool = _sequential("saved_model")
    tf.saved_model.save(net, str(folder / "saved"))
    return net, tool


def exported(folder: Path) -> Any:
    net, _ = _sequential("exported")
    net.export(str(folder / "exported"), verbose=False)
    return net, None


def cnn_checkpoint(folder: Path) -> Any:
    return _checkpoint("cnn_checkpoint", folder)


def cnn_keras(folder: Path) -> Any:
    net, tool = _sequential("cnn_keras")
    net.save(str(folder / "model.keras"))
    return net, tool


def lstm_checkpoint(folder: Path) -> Any:
    return _checkpoint("lstm_checkpoint", folder)


def lstm_weights(folder: Path) -> Any:
    net, tool = trained("lstm_weights", compiled=True)
    net.save_weights(str(folder / "x.weights.h5"))
    return net, tool


def gru_checkpoint(folder: Path) -> Any:
    return _checkpoint("gru_checkpoint", folder)


def block_checkpoint(folder: Path) -> Any:
    return _checkpoint("block_checkpoint", folder)


def encoder_checkpoint(folder: Path) -> Any:
    return _checkpoint("encoder_checkpoint", folder)


def embedding_checkpoint(folder: Path) -> Any:
    return _checkpoint("embedding_checkpoint", folder)


def layernorm_checkpoint(folder: Path) -> Any:
    return _checkpoint("layernorm_checkpoint", folder)


# --- TensorFlow 1 ---------------------------------------------------------------------------------------


def _graph(folder: Path, target: str, momentum: bool, scope: str) -> Any:
    """Train and save a TensorFlow 1 program; return its network and what that computes later."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(7)
        x = v1.placeholder(tf.float32, [None, 3])
        h = x
        names = ("fc1", "fc2", "fc3")
        for name, (n_in, n_out) in zip(names, ((3, 24), (24, 24), (24, 1)), strict=True):
            with v1.variable_scope(f"{scope}/{name}"):
                kernel = v1.get_variable("kernel", [n_in, n_out])
                bias = v1.get_variable("bias", [n_out], initializer=v1.zeros_initializer())
            h = h @ kernel + bias
            h = tf.tanh(h) if name == "fc3" else tf.nn.relu(h)
        expected = v1.placeholder(tf.float32, [None, 1])
        loss = tf.reduce_sum((h - 3 * expected) ** 2)
        count = v1.train.get_or_create_global_step()
        tool = v1.train.MomentumOptimizer(1e-3, 0.9) if momentum else v1.train.AdamOptimizer(1e-2)
        train = tool.minimize(loss, global_step=count)
        session.run(v1.global_variables_initializer())

        def update(seed: int) -> None:
            y = np.random.default_rng(seed + 100).standard_normal((8, 1)).astype(np.float32)
            session.run(train, {x: nets.inputs("mlp", seed, 8), expected: y})

        for index in range(3):
            update(10 + index)
        (folder / target).parent.mkdir(exist_ok=True)
        v1.train.Saver().save(session, str(folder / target), global_step=100)
        trainable = v1.trainable_variables()
        weights = session.run(trainable)
        for index in range(nets.STEPS):
            update(20 + index)
        after = session.run(h, {x: nets.inputs("mlp", 1)})
    net = nets.build("mlp")
    for variable, value in zip(net.trainable_variables, weights, strict=True):
        variable.assign(value)

    class Fixed:
        trainable_variables = net.trainable_variables

        def __call__(self, x: Any) -> Any:
            return net(x)

    return Fixed(), after


def saver_adam(folder: Path) -> Any:
    return _graph(folder, "model.ckpt", momentum=False, scope="actor")


def saver_momentum(folder: Path) -> Any:
    return _graph(folder, "model.ckpt", momentum=True, scope="actor")


def estimator(folder: Path) -> Any:
    return _graph(folder, "run/model.ckpt", momentum=False, scope="dnn")
