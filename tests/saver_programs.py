"""Builds agents of TensorFlow 1 and saves them with their graphs; runs in a child process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

OBSERVATIONS, ACTIONS, ROWS = 5, 2, 7
# Nodes that are compared with TensorFlow, by program; the first one is the policy.
NODES = {
    "ppo": ("pi/mean",),
    "ddpg": ("move/action", "noisy"),
    "dqn": ("q/choice",),
    "discrete": ("policy/probabilities",),
    "shared": ("trunk/mean", "trunk/value"),
    "alone": ("scale/action",),
    "pixels": ("encoder/action",),
    "older": ("scale/action",),
    "named": ("actor/action",),
}


# Programs whose values depend on more than the observation.
FED = ("rate", "scale", "condition", "functional", "flag")


def build_fed(folder: Path) -> dict[str, Any]:
    """Save Q-networks whose hidden values a fed rate, scale, condition or flag changes."""
    import tensorflow as tf

    v1 = tf.compat.v1
    for name in (*FED, "default"):
        with tf.Graph().as_default(), v1.Session() as session:
            (v1.enable_control_flow_v2 if name == "functional" else v1.disable_control_flow_v2)()
            hidden = _dense(tf, v1, _observations(tf, v1), 16, "hidden", tf.nn.relu)
            if name == "rate":
                hidden = v1.nn.dropout(hidden, rate=v1.placeholder(tf.float32, [], name="fed"))
            elif name in ("scale", "default"):
                fed = v1.placeholder if name == "scale" else v1.placeholder_with_default
                hidden *= fed(tf.float32 if name == "scale" else 3.0, [], name="fed")
            else:
                flag = v1.placeholder_with_default(True, [], "fed") if name == "flag" else None
                flag = v1.placeholder(tf.bool, [], name="fed") if flag is None else flag
                inner = hidden
                hidden = v1.cond(flag, lambda h=inner: h * 2.0, lambda h=inner: h)
            tf.argmax(_dense(tf, v1, hidden, ACTIONS, "q"), 1, name="choice")
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(folder / name / "model"), write_state=False)
    return {}


def build(folder: Path) -> dict[str, Any]:
    """Save every program below, its inputs and the values of its nodes."""
    import tensorflow as tf

    for number, (name, nodes) in enumerate(NODES.items()):
        v1 = tf.compat.v1
        position = folder / name
        position.mkdir()
        random = np.random.default_rng(number)
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(number)
            x = PROGRAMS[name](tf, v1)
            session.run(v1.global_variables_initializer())
            for variable in v1.trainable_variables():
                variable.load(random.normal(0, 0.3, variable.shape).astype(np.float32), session)
            version = v1.train.SaverDef.V1 if name == "older" else v1.train.SaverDef.V2
            v1.train.Saver(write_version=version).save(session, str(position / "model"), write_state=False)
            inputs = random.normal(size=(ROWS, *x.shape[1:])).astype(np.float32)
            outputs = session.run([f"{node}:0" for node in nodes], {x: inputs})
        arrays = {node.replace("/", "."): value for node, value in zip(nodes, outputs, strict=True)}
        np.savez(position / "arrays.npz", inputs=inputs, **arrays)
    return {}


def _dense(tf: Any, v1: Any, x: Any, units: int, name: str, activation: Any = None) -> Any:
    kernel = v1.get_variable(f"{name}/kernel", [x.shape[-1], units])
    bias = v1.get_variable(f"{name}/bias", [units])
    value = tf.nn.bias_add(tf.matmul(x, kernel), bias)
    return value if activation is None else activation(value)


def _observations(tf: Any, v1: Any) -> Any:
    return v1.placeholder(tf.float32, [None, OBSERVATIONS], name="observations")


def ppo(tf: Any, v1: Any) -> Any:
    """Two policies of one shape, a sampled action, a critic, a clipped loss, and an optimizer."""
    x = _observations(tf, v1)
    used = v1.placeholder(tf.float32, [None, ACTIONS])
    gain = v1.placeholder(tf.float32, [None, 1])

    def policy(scope: str) -> Any:
        with v1.variable_scope(scope):
            hidden = _dense(tf, v1, x, 16, "hidden", tf.nn.relu6)
            mean = tf.multiply(_dense(tf, v1, hidden, ACTIONS, "mu", tf.tanh), 2.0, name="mean")
            return mean, _dense(tf, v1, hidden, ACTIONS, "spread", tf.nn.softplus)

    (mean, scale), (old_mean, old_scale) = policy("pi"), policy("oldpi")
    tf.clip_by_value(mean + scale * v1.random_normal(tf.shape(mean)), -2.0, 2.0)
    with v1.variable_scope("critic"):
        value = _dense(tf, v1, _dense(tf, v1, x, 16, "hidden", tf.nn.relu), 1, "value")

    def density(m: Any, s: Any) -> Any:
        return tf.exp(-0.5 * ((used - m) / s) ** 2) / s

    ratio = density(mean, scale) / (density(old_mean, old_scale) + 1e-5)
    loss = -tf.reduce_mean(tf.minimum(ratio * gain, tf.clip_by_value(ratio, 0.8, 1.2) * gain))
    v1.train.AdamOptimizer().minimize(loss + tf.reduce_mean((value - gain) ** 2))
    return x


def ddpg(tf: Any, v1: Any) -> Any:
    """An actor whose action gets noise, and is an input of the critic."""
    x = _observations(tf, v1)
    with v1.variable_scope("move"):
        action = _dense(tf, v1, _dense(tf, v1, x, 16, "hidden", tf.nn.elu), ACTIONS, "out")
        action = tf.tanh(action, name="action")
    tf.add(action, tf.constant([0.1, -0.1]), name="noisy")
    tf.negative(action)  # the node has the name of an operator
    with v1.variable_scope("judge"):
        value = _dense(tf, v1, tf.concat([x, action], 1), 16, "hidden", tf.nn.relu)
        value = _dense(tf, v1, value, 1, "out")
    v1.train.AdamOptimizer().minimize(-tf.reduce_mean(value))
    return x


def dqn(tf: Any, v1: Any) -> Any:
    """A Q-network, its target and their loss."""
    x, after = _observations(tf, v1), v1.placeholder(tf.float32, [None, OBSERVATIONS])
    used = v1.placeholder(tf.int32, [None])

    def network(scope: str, value: Any) -> Any:
        with v1.variable_scope(scope):
            return _dense(tf, v1, _dense(tf, v1, value, 16, "hidden", tf.nn.selu), 3, "out")

    q, target = network("q", x), network("target_q", after)
    tf.argmax(q, 1, name="q/choice")
    chosen = tf.reduce_sum(q * tf.one_hot(used, 3), 1)
    v1.train.RMSPropOptimizer(1e-3).minimize(tf.reduce_mean((chosen - tf.reduce_max(target, 1)) ** 2))
    return x


def discrete(tf: Any, v1: Any) -> Any:
    x = _observations(tf, v1)
    with v1.variable_scope("policy"):
        scores = _dense(tf, v1, _dense(tf, v1, x, 16, "hidden", tf.nn.leaky_relu), 4, "out")
        probabilities = tf.nn.softmax(scores, name="probabilities")
    used = v1.placeholder(tf.float32, [None, 4])
    v1.train.AdamOptimizer().minimize(-tf.reduce_mean(tf.math.log(tf.reduce_sum(probabilities * used, 1))))
    return x


def shared(tf: Any, v1: Any) -> Any:
    """One trunk with an action and a value."""
    x = _observations(tf, v1)
    with v1.variable_scope("trunk"):
        hidden = _dense(tf, v1, x, 16, "hidden", tf.nn.relu)
        tf.identity(_dense(tf, v1, hidden, ACTIONS, "action", tf.tanh), name="mean")
        tf.identity(_dense(tf, v1, hidden, 1, "critic"), name="value")
    return x


def alone(tf: Any, v1: Any) -> Any:
    """A policy alone, with an activation of two operations and a scale."""
    x = _observations(tf, v1)
    with v1.variable_scope("scale"):
        hidden = _dense(tf, v1, x, 16, "hidden")
        hidden = _dense(tf, v1, hidden * tf.sigmoid(hidden), ACTIONS, "out", tf.tanh)
        tf.multiply(hidden, [2.0, 0.5], name="action")
    return x


def older(tf: Any, v1: Any) -> Any:
    return alone(tf, v1)


def named(tf: Any, v1: Any) -> Any:
    """An actor and a critic by the names of a layout, whose activations are not its defaults."""
    x = _observations(tf, v1)
    with v1.variable_scope("actor"):
        hidden = _dense(tf, v1, _dense(tf, v1, x, 16, "l1", tf.nn.elu), 16, "l2", tf.tanh)
        action = tf.tanh(_dense(tf, v1, hidden, ACTIONS, "l3"), name="action")
    with v1.variable_scope("critic"):
        hidden = _dense(tf, v1, tf.concat([x, action], 1), 16, "l1", tf.nn.relu)
        value = _dense(tf, v1, _dense(tf, v1, hidden, 16, "l2", tf.nn.relu), 1, "l3")
    v1.train.AdamOptimizer().minimize(-tf.reduce_mean(value))
    return x


def pixels(tf: Any, v1: Any) -> Any:
    """Images with channels last, whose features are flattened."""
    x = v1.placeholder(tf.float32, [None, 8, 6, 3], name="images")
    with v1.variable_scope("encoder"):
        kernel = v1.get_variable("conv/kernel", [3, 3, 3, 4])
        bias = v1.get_variable("conv/bias", [4])
        hidden = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, [1, 2, 2, 1], "SAME"), bias))
        hidden = tf.reshape(hidden, [-1, 4 * 3 * 4])
        tf.tanh(_dense(tf, v1, hidden, ACTIONS, "out"), name="action")
    return x


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    function.__name__: function
    for function in (ppo, ddpg, dqn, discrete, shared, alone, named, pixels, older)
}
