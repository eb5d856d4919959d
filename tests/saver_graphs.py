"""Builds graphs of TensorFlow 1 and saves them by name; runs in a child process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# Updates of an Adam of its own each: past the point where 0.9^t is nothing in float32.
COUNTS = (0, 1, 7, 150, 826, 827, 828, 829, 1100, 2500)


def build(folder: Path) -> dict[str, Any]:
    """Save every graph below; return each one's slots as TensorFlow knows them, and Adam's numbers."""
    import tensorflow as tf

    graphs = (adam, rmsprop, centered, others, several, scoped, inside, ambiguous, averages, partitioned)
    graphs += (cut_parts,)
    facts = {graph.__name__: _saved(tf, graph, folder / graph.__name__) for graph in graphs}
    facts["estimator"] = _saved(tf, estimator, folder / "estimator")
    facts["powers"] = _powers(tf)
    return facts


def _saved(tf: Any, graph: Callable[[Any, Any, dict[str, Any]], None], path: Path) -> dict[str, Any]:
    v1 = tf.compat.v1
    slots: dict[str, Any] = {}
    with tf.Graph().as_default(), v1.Session() as session:
        graph(tf, v1, slots)
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(path), write_meta_graph=False, write_state=False)
    return slots


def _note(slots: dict[str, Any], optimizer: Any, variables: Any) -> None:
    """Write down what the optimizer itself calls its slots."""
    for variable in variables:
        for kind in optimizer.get_slot_names():
            slot = optimizer.get_slot(variable, kind)
            if slot is not None:
                slots[slot.op.name] = [variable.op.name, kind]


def _network(tf: Any, v1: Any, scope: str = "pi") -> Any:
    with v1.variable_scope(scope):
        kernel = v1.get_variable("dense/kernel", [2, 3])
        bias = v1.get_variable("dense/bias", [3])
        # A scalar, as a policy's log_std may be.
        scale = v1.get_variable("log_std", [])
    return tf.reduce_sum(kernel) + tf.reduce_sum(bias) * scale


def _minimize(v1: Any, slots: dict[str, Any], optimizer: Any, loss: Any, variables: Any = None) -> None:
    optimizer.minimize(loss, var_list=variables)
    _note(slots, optimizer, v1.trainable_variables())


def adam(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    v1.train.get_or_create_global_step()
    v1.get_variable("Adam", [2], trainable=False)
    v1.get_variable("unrelated/Adam", [2], trainable=False)
    _minimize(v1, slots, v1.train.AdamOptimizer(), _network(tf, v1))


def rmsprop(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    _minimize(v1, slots, v1.train.RMSPropOptimizer(0.1, momentum=0.9), _network(tf, v1))


def centered(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    _minimize(v1, slots, v1.train.RMSPropOptimizer(0.1, centered=True), _network(tf, v1))


def others(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    loss, train = _network(tf, v1), v1.train
    for optimizer in (
        train.MomentumOptimizer(0.1, 0.9),
        train.AdagradOptimizer(0.1),
        train.AdadeltaOptimizer(0.1),
        train.FtrlOptimizer(0.1),
        train.ProximalAdagradOptimizer(0.1),
        train.AdagradDAOptimizer(0.1, train.get_or_create_global_step()),
        train.GradientDescentOptimizer(0.1),
    ):
        _minimize(v1, slots, optimizer, loss)


def several(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    """Two Adams over the same variables, and one with a name of its own."""
    loss = _network(tf, v1)
    for optimizer in (
        v1.train.AdamOptimizer(),
        v1.train.AdamOptimizer(),
        v1.train.AdamOptimizer(name="critic_opt"),
        v1.train.RMSPropOptimizer(0.1),
    ):
        _minimize(v1, slots, optimizer, loss)


def scoped(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    loss = _network(tf, v1)
    for scope in ("train_op", "another/train_op", "pi"):
        with v1.variable_scope(scope):
            _minimize(v1, slots, v1.train.AdamOptimizer(), loss)
    with v1.name_scope("no_variable_scope"):
        _minimize(v1, slots, v1.train.AdamOptimizer(), loss)
    with v1.variable_scope("agent"):
        _minimize(v1, slots, v1.train.AdamOptimizer(name="actor_opt"), loss)


def inside(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    """The optimizer in the network's own scope, as baselines and spinningup do it at times."""
    with v1.variable_scope("model"):
        loss = _network(tf, v1)
        _minimize(v1, slots, v1.train.MomentumOptimizer(0.1, 0.9), loss)


def ambiguous(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    """Names of which the shorter half names a variable too."""
    variables = [v1.get_variable(name, [4]) for name in ("a/w", "a/w_1", "w")]
    loss = tf.reduce_sum(variables[0] * variables[1] * variables[2])
    _minimize(v1, slots, v1.train.AdamOptimizer(), loss)
    with v1.variable_scope("a"):
        _minimize(v1, slots, v1.train.MomentumOptimizer(0.1, 0.9), loss)


def averages(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    loss = _network(tf, v1)
    v1.get_variable("bn/moving_mean", [3], trainable=False)
    _minimize(v1, slots, v1.train.AdamOptimizer(), loss)
    plain = v1.train.ExponentialMovingAverage(0.99)
    plain.apply(v1.global_variables())
    with v1.variable_scope("avg"):
        named = v1.train.ExponentialMovingAverage(0.9, name="polyak")
        named.apply(v1.trainable_variables())
    for average, kind in ((plain, "average"), (named, "polyak")):
        for variable in v1.global_variables():
            shadow = average.average(variable)
            if shadow is not None:
                slots[shadow.op.name] = [variable.op.name, kind]
    v1.train.ExponentialMovingAverage(0.99, zero_debias=True).apply([loss * 2])


def partitioned(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    with v1.variable_scope("scope", partitioner=v1.fixed_size_partitioner(3)):
        w = v1.get_variable("w", [10, 4])
    v1.train.AdamOptimizer().minimize(tf.reduce_sum(tf.convert_to_tensor(w)))
    slots |= {"scope/w/Adam": ["scope/w", "m"], "scope/w/Adam_1": ["scope/w", "v"]}


def cut_parts(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    """A scope around the optimizer of a partitioned variable: no slot's name has all of its slices."""
    with v1.variable_scope("scope", partitioner=v1.fixed_size_partitioner(3)):
        w = v1.get_variable("w", [10, 4])
    with v1.variable_scope("train"):
        v1.train.AdamOptimizer().minimize(tf.reduce_sum(tf.convert_to_tensor(w)))
    for number in range(3):
        slots[f"scope/w/art_{number}/Adam"] = ["scope/w", "m"]
        slots[f"scope/w/art_{number}/Adam_1"] = ["scope/w", "v"]


def estimator(tf: Any, v1: Any, slots: dict[str, Any]) -> None:
    """The names that a Keras optimizer writes below an estimator."""
    for name, dims in (("dnn/layer_0/kernel", [2, 3]), ("dnn/layer_0/bias", [3])):
        v1.get_variable(name, dims)
        for kind in ("m", "v"):
            slot = v1.get_variable(f"training/Adam/{name}/{kind}", dims)
            slots[slot.op.name] = [name, kind]
    for name in ("learning_rate", "decay", "beta_1", "beta_2"):
        v1.get_variable(f"training/Adam/{name}", [])
    v1.get_variable("training/Adam/iter", [], tf.int64, initializer=tf.zeros_initializer)


def _powers(tf: Any) -> list[dict[str, Any]]:
    """Return what float32 and float64 Adams hold after so many updates, as exact numbers."""
    v1 = tf.compat.v1
    rows = []
    with tf.Graph().as_default(), v1.Session() as session:
        runs = []
        for dtype in (tf.float32, tf.float64):
            for betas in ((0.9, 0.999), (0.5, 0.98)):
                w = v1.get_variable(f"w_{dtype.name}_{betas[0]}", [1], dtype)
                optimizer = v1.train.AdamOptimizer(0.1, *betas)
                step = optimizer.minimize(tf.reduce_sum(w * w), var_list=[w])
                runs.append((dtype.name, betas, step, optimizer._get_beta_accumulators()))
        session.run(v1.global_variables_initializer())
        steps = [run[2] for run in runs]
        for count in range(max(COUNTS) + 1):
            if count in COUNTS:
                for dtype, betas, _, powers in runs:
                    values = [float(value).hex() for value in session.run(powers)]
                    rows.append({"dtype": dtype, "betas": betas, "count": count, "powers": values})
            session.run(steps)
    return rows
