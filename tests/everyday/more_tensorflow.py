"""Ordinary TensorFlow and Keras files beyond the matrix, and what every variable is in PyTorch's axes.

Each maker writes into a folder and returns the path and the models with the optimizers that trained them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

k = keras.layers
Pairs = Sequence[tuple[Any, Any]]
MAKERS: dict[str, Callable[[Path], tuple[str, Pairs]]] = {}


class Model(keras.Model):  # type: ignore[misc]
    """A subclassed model with these attributes; a call builds nothing."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.built = True


class Module(tf.Module):  # type: ignore[misc]
    """A module with these attributes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def built(layer: Any, *shape: int) -> Any:
    layer.build((None, *shape))
    return layer


def dense(first: int = 3, last: int = 4, **rest: Any) -> Any:
    return built(k.Dense(last, **rest), first)


def mlp(*sizes: int) -> Any:
    return keras.Sequential([keras.Input((sizes[0],)), *(k.Dense(n, "relu") for n in sizes[1:])])


def update(variables: Sequence[Any], tool: Any, steps: int = 2) -> None:
    for _ in range(steps):
        tool.apply_gradients([(tf.random.normal(v.shape), v) for v in variables])


NETS: dict[str, Callable[[], Any]] = {
    "lists": lambda: Model(layers_=[dense(), dense(4, 2)], out=dense(2, 2)),
    "dicts": lambda: Model(heads={"left": dense(), "right": dense(3, 5)}),
    "nested": lambda: Model(encoder=Model(body=Model(fc=dense())), head=dense(4, 2)),
    "shared": lambda: (lambda d: Model(a=d, b=d, out=dense(4, 2)))(dense(4, 4)),
    "conv1d": lambda: keras.Sequential([keras.Input((9, 3)), k.Conv1D(4, 5), k.Conv1D(2, 3)]),
    "conv3d": lambda: keras.Sequential([keras.Input((5, 5, 5, 2)), k.Conv3D(3, 3), k.BatchNormalization()]),
    "transpose": lambda: keras.Sequential([keras.Input((5, 5, 3)), k.Conv2DTranspose(4, 3)]),
    "depthwise": lambda: keras.Sequential([keras.Input((7, 7, 3)), k.DepthwiseConv2D(3), k.Conv2D(4, 1)]),
    "separable": lambda: keras.Sequential([keras.Input((7, 7, 3)), k.SeparableConv2D(4, 3)]),
    "grouped": lambda: keras.Sequential([keras.Input((7, 7, 4)), k.Conv2D(6, 3, groups=2)]),
    "no_bias": lambda: keras.Sequential([keras.Input((3,)), k.Dense(4, use_bias=False), k.Dense(2)]),
    "batch_norm_bare": lambda: Model(fc=dense(), bn=built(k.BatchNormalization(center=False), 4)),
    "group_norm": lambda: keras.Sequential([keras.Input((5, 5, 4)), k.Conv2D(4, 3), k.GroupNormalization(2)]),
    "lstm_stacked": lambda: keras.Sequential(
        [keras.Input((4, 3)), k.LSTM(5, return_sequences=True), k.LSTM(4), k.Dense(2)]
    ),
    "bidirectional": lambda: keras.Sequential([keras.Input((4, 3)), k.Bidirectional(k.LSTM(5)), k.Dense(2)]),
    "gru": lambda: keras.Sequential([keras.Input((4, 3)), k.GRU(5), k.Dense(2)]),
    "gru_old": lambda: keras.Sequential([keras.Input((4, 3)), k.GRU(5, reset_after=False), k.Dense(2)]),
    "simple_rnn": lambda: keras.Sequential([keras.Input((4, 3)), k.SimpleRNN(5), k.Dense(2)]),
    "attention": lambda: Model(attn=_attention(), fc=dense(8, 2)),
    "embedding": lambda: keras.Sequential(
        [keras.Input((4,)), k.Embedding(11, 5), k.GlobalAveragePooling1D(), k.Dense(2)]
    ),
    "prelu": lambda: keras.Sequential([keras.Input((3,)), k.Dense(4), k.PReLU(), k.Dense(2)]),
    "float64": lambda: Model(fc=dense(dtype="float64"), out=dense(4, 2, dtype="float64")),
    "bfloat16": lambda: Model(fc=dense(dtype="bfloat16"), out=dense(4, 2, dtype="bfloat16")),
    "dropout": lambda: keras.Sequential([keras.Input((3,)), k.Dense(4), k.Dropout(0.5), k.Dense(2)]),
    "rescaling": lambda: keras.Sequential([keras.Input((3,)), k.Rescaling(2.0), k.Dense(4)]),
    "normalization": lambda: _normalized(),
    "functional_nested": lambda: _functional(),
    "two_inputs": lambda: _two_inputs(),
    "square": lambda: keras.Sequential([keras.Input((4,)), k.Dense(4), k.Dense(4), k.Dense(4)]),
    "einsum": lambda: Model(mix=built(k.EinsumDense("ab,bc->ac", 5), 3), fc=dense(5, 2)),
    "frozen": lambda: _frozen(),
}


def _attention() -> Any:
    layer = k.MultiHeadAttention(2, 4)
    layer.build((None, 3, 8), (None, 3, 8))
    return layer


def _normalized() -> Any:
    layer = k.Normalization()
    layer.adapt(np.random.default_rng(0).standard_normal((20, 3)))
    return keras.Sequential([keras.Input((3,)), layer, k.Dense(4)])


def _functional() -> Any:
    start = keras.Input((3,))
    return keras.Model(start, k.Dense(2, name="head")(mlp(3, 5, 4)(start)))


def _two_inputs() -> Any:
    first, second = keras.Input((3,), name="obs"), keras.Input((2,), name="goal")
    return keras.Model([first, second], k.Dense(4, name="join")(k.Concatenate()([first, second])))


def _frozen() -> Any:
    net = mlp(3, 4, 2)
    net.layers[0].trainable = False
    return net


def _checkpoint(folder: Path, **objects: Any) -> str:
    return str(tf.train.Checkpoint(**objects).save(str(folder / "ckpt")))


def _every(name: str, make: Callable[[], Any]) -> None:
    def plain(folder: Path) -> tuple[str, Pairs]:
        net = make()
        return _checkpoint(folder, model=net), [(net, None)]

    def trained(folder: Path) -> tuple[str, Pairs]:
        net, tool = make(), keras.optimizers.Adam(1e-2)
        tool.build(net.trainable_variables)
        update(net.trainable_variables, tool)
        return _checkpoint(folder, net=net, opt=tool, step=tf.Variable(3, dtype=tf.int64)), [(net, tool)]

    def weights(folder: Path) -> tuple[str, Pairs]:
        net = make()
        net.save_weights(str(folder / "x.weights.h5"))
        return str(folder / "x.weights.h5"), [(net, None)]

    def whole(folder: Path) -> tuple[str, Pairs]:
        net = make()
        net.compile("adam", "mse")
        net.optimizer.build(net.trainable_variables)
        update(net.trainable_variables, net.optimizer)
        net.save(str(folder / "x.keras"))
        return str(folder / "x.keras"), [(net, net.optimizer)]

    MAKERS[f"checkpoint:{name}"] = plain
    MAKERS[f"checkpoint+adam:{name}"] = trained
    MAKERS[f"weights:{name}"] = weights
    if name not in {"lists", "dicts", "nested", "shared", "batch_norm_bare", "attention", "einsum"} | {
        "float64",
        "bfloat16",
    }:
        MAKERS[f"keras:{name}"] = whole


for _name, _make in NETS.items():
    _every(_name, _make)

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "plain": lambda: keras.optimizers.SGD(0.1),
    "centered": lambda: keras.optimizers.RMSprop(1e-3, centered=True),
    "rmsprop_momentum": lambda: keras.optimizers.RMSprop(1e-3, momentum=0.9),
    "amsgrad": lambda: keras.optimizers.Adam(1e-3, amsgrad=True),
    "ema": lambda: keras.optimizers.Adam(1e-3, use_ema=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-3),
    "clipped": lambda: keras.optimizers.Adam(1e-3, clipnorm=1.0),
    "cosine": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-3, 100)),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "nadam": lambda: keras.optimizers.Nadam(1e-3),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-3),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3)),
}


def _optimizer(name: str, make: Callable[[], Any]) -> None:
    def compiled(folder: Path, suffix: str) -> tuple[str, Pairs]:
        net = mlp(3, 4, 2)
        net.compile(make(), "mse")
        net.fit(np.random.randn(8, 3), np.random.randn(8, 2), epochs=2, verbose=0)
        path = str(folder / f"x{suffix}")
        (net.save_weights if "weights" in suffix else net.save)(path)
        return path, [(net, net.optimizer)]

    def checkpoint(folder: Path) -> tuple[str, Pairs]:
        net, tool = mlp(3, 4, 2), make()
        tool.build(net.trainable_variables)
        update(net.trainable_variables, tool)
        return _checkpoint(folder, model=net, optimizer=tool), [(net, tool)]

    MAKERS[f"optimizer:{name}:checkpoint"] = checkpoint
    MAKERS[f"optimizer:{name}:keras"] = lambda folder: compiled(folder, ".keras")
    MAKERS[f"optimizer:{name}:weights"] = lambda folder: compiled(folder, ".weights.h5")
    MAKERS[f"optimizer:{name}:h5"] = lambda folder: compiled(folder, ".h5")


for _name, _tool in OPTIMIZERS.items():
    _optimizer(_name, _tool)


def maker(name: str) -> Callable[[Callable[[Path], tuple[str, Pairs]]], None]:
    def keep(function: Callable[[Path], tuple[str, Pairs]]) -> None:
        MAKERS[name] = function

    return keep


@maker("around:counters_and_strings")
def _(folder: Path) -> tuple[str, Pairs]:
    net = mlp(3, 4, 2)
    rest = {
        "epoch": tf.Variable(3),
        "best": tf.Variable(0.5),
        "name": tf.Variable("run"),
        "done": tf.Variable(True),
    }
    return _checkpoint(folder, model=net, **rest), [(net, None)]


@maker("around:iterator")
def _(folder: Path) -> tuple[str, Pairs]:
    net, data = mlp(3, 4, 2), iter(tf.data.Dataset.range(10).shuffle(3))
    next(data)
    return _checkpoint(folder, model=net, iterator=data), [(net, None)]


@maker("around:generator")
def _(folder: Path) -> tuple[str, Pairs]:
    net = mlp(3, 4, 2)
    return _checkpoint(folder, model=net, rng=tf.random.Generator.from_seed(3)), [(net, None)]


@maker("around:metrics")
def _(folder: Path) -> tuple[str, Pairs]:
    net, metric = mlp(3, 4, 2), keras.metrics.Mean()
    metric.update_state(3.0)
    return _checkpoint(folder, model=net, loss=metric), [(net, None)]


@maker("around:dict_of_models")
def _(folder: Path) -> tuple[str, Pairs]:
    nets = {"actor": mlp(3, 4, 2), "critic": mlp(3, 5, 1)}
    return _checkpoint(folder, models=nets), [(net, None) for net in nets.values()]


@maker("around:list_of_models")
def _(folder: Path) -> tuple[str, Pairs]:
    nets = [mlp(3, 4, 2), mlp(3, 5, 1)]
    return _checkpoint(folder, models=nets, step=tf.Variable(1)), [(net, None) for net in nets]


@maker("around:agents")
def _(folder: Path) -> tuple[str, Pairs]:
    nets = [Model(actor=mlp(3, 4, 2), critic=mlp(3, 4, 1)) for _ in range(2)]
    return _checkpoint(folder, agents=nets), [(net, None) for net in nets]


@maker("around:two_optimizers")
def _(folder: Path) -> tuple[str, Pairs]:
    nets = mlp(3, 4, 2), mlp(3, 5, 1)
    tools = keras.optimizers.Adam(1e-3), keras.optimizers.SGD(1e-3, momentum=0.9)
    for net, tool in zip(nets, tools, strict=True):
        tool.build(net.trainable_variables)
        update(net.trainable_variables, tool)
    objects = {"pi": nets[0], "vf": nets[1], "pi_opt": tools[0], "vf_opt": tools[1]}
    return _checkpoint(folder, **objects), list(zip(nets, tools, strict=True))


@maker("around:target_network")
def _(folder: Path) -> tuple[str, Pairs]:
    nets = mlp(3, 4, 2), mlp(3, 4, 2)
    return _checkpoint(folder, q=nets[0], q_target=nets[1]), [(net, None) for net in nets]


@maker("around:log_alpha")
def _(folder: Path) -> tuple[str, Pairs]:
    net = mlp(3, 4, 2)
    return _checkpoint(folder, actor=net, log_alpha=tf.Variable(0.3)), [(net, None)]


@maker("around:module_of_variables")
def _(folder: Path) -> tuple[str, Pairs]:
    net = Module(w=tf.Variable(tf.random.normal([3, 4])), b=tf.Variable(tf.random.normal([4])))
    return _checkpoint(folder, net=net), [(net, None)]


@maker("around:sharded")
def _(folder: Path) -> tuple[str, Pairs]:
    net = mlp(30, 400, 200)
    keras.saving.save_weights(net, str(folder / "x.weights.json"), max_shard_size=0.0002)
    return str(folder / "x.weights.json"), [(net, None)]


@maker("around:saved_model")
def _(folder: Path) -> tuple[str, Pairs]:
    net = Model(fc=dense(), out=dense(4, 2))
    tf.saved_model.save(net, str(folder / "saved"))
    return str(folder / "saved"), [(net, None)]


@maker("around:saved_module")
def _(folder: Path) -> tuple[str, Pairs]:
    net = Module(fc1=Module(w=tf.Variable(tf.random.normal([3, 4])), b=tf.Variable(tf.random.normal([4]))))
    tf.saved_model.save(net, str(folder / "saved"))
    return str(folder / "saved"), [(net, None)]


@maker("around:exported")
def _(folder: Path) -> tuple[str, Pairs]:
    net = _functional()
    net.export(str(folder / "exported"), verbose=False)
    return str(folder / "exported"), [(net, None)]


@maker("around:string_lookup")
def _(folder: Path) -> tuple[str, Pairs]:
    lookup = k.StringLookup(vocabulary=["a", "b"])
    net = keras.Sequential(
        [keras.Input((1,), dtype="string"), lookup, k.Embedding(3, 4), k.Flatten(), k.Dense(2)]
    )
    net.save(str(folder / "x.keras"))
    return str(folder / "x.keras"), [(net, None)]


@maker("around:weights_list_npz")
def _(folder: Path) -> tuple[str, Pairs]:
    net = mlp(3, 4, 2)
    np.savez(folder / "x.npz", **{v.path: np.asarray(v) for v in net.weights})
    return str(folder / "x.npz"), [(net, None)]


@maker("around:get_weights_pickle")
def _(folder: Path) -> tuple[str, Pairs]:
    net = mlp(3, 4, 2)
    (folder / "x.pkl").write_bytes(pickle.dumps(net.get_weights()))
    return str(folder / "x.pkl"), [(net, None)]


def _v1(name: str, more: Callable[[Any, Any], None], **rest: Any) -> None:
    """Register a program of TensorFlow 1 whose variables `more` completes."""

    def maker(folder: Path) -> tuple[str, Pairs]:
        v1 = tf.compat.v1
        with tf.Graph().as_default(), v1.Session() as session:
            at = [
                v1.get_variable(f"pi/fc{n}/kernel", shape, **rest)
                if len(shape) == 2
                else v1.get_variable(f"pi/fc{n}/bias", shape)
                for n, shape in ((1, (3, 4)), (1, (4,)), (2, (4, 2)), (2, (2,)))
            ]
            more(v1, at)
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(folder / "model.ckpt"), global_step=7)
            values = session.run(at)
        net = Module(fc1=Module(kernel=tf.Variable(values[0]), bias=tf.Variable(values[1])))
        net.fc2 = Module(kernel=tf.Variable(values[2]), bias=tf.Variable(values[3]))
        return str(folder / "model.ckpt-7"), [(net, None)]

    MAKERS[f"v1:{name}"] = maker


def _average(v1: Any, at: Any) -> None:
    with v1.control_dependencies([]):
        v1.train.ExponentialMovingAverage(0.9).apply(at)


_v1("plain", lambda v1, at: None)
_v1("shadow", _average)
_v1("global_step", lambda v1, at: v1.train.get_or_create_global_step())
_v1(
    "batch_norm",
    lambda v1, at: [
        v1.get_variable(f"pi/bn/{n}", [4]) for n in ("gamma", "beta", "moving_mean", "moving_variance")
    ],
)
_v1("adam", lambda v1, at: v1.train.AdamOptimizer().minimize(sum(tf.reduce_sum(v**2) for v in at)))
_v1("rmsprop", lambda v1, at: v1.train.RMSPropOptimizer(0.1).minimize(sum(tf.reduce_sum(v**2) for v in at)))
_v1("adagrad", lambda v1, at: v1.train.AdagradOptimizer(0.1).minimize(sum(tf.reduce_sum(v**2) for v in at)))
_v1("partitioned", lambda v1, at: None, partitioner=tf.compat.v1.fixed_size_partitioner(1))


# --- Truth ----------------------------------------------------------------------------------------------


def turned(layer: Any, name: str, array: np.ndarray) -> np.ndarray | None:
    """Return a variable in PyTorch's axes, None where a layer's form decides."""
    if isinstance(layer, k.Dense) and name == "kernel":
        return array.T
    if (
        isinstance(layer, tf.Module)
        and name in {"w", "kernel"}
        and array.ndim == 2
        and not isinstance(layer, k.Layer)
    ):
        return array.T
    if isinstance(layer, k.Conv1D | k.Conv2D | k.Conv3D | k.Conv2DTranspose) and name == "kernel":
        return None if getattr(layer, "groups", 1) > 1 else np.moveaxis(array, (-1, -2), (0, 1))
    if isinstance(
        layer, k.DepthwiseConv2D | k.SeparableConv2D | k.MultiHeadAttention | k.EinsumDense | k.RNN
    ):
        return None
    if isinstance(layer, k.Normalization) or "cell" in type(layer).__name__.lower():
        return None
    return array


def truth(pairs: Pairs) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every variable in both frameworks' axes, and the moments that belong to it."""
    for number, (net, tool) in enumerate(pairs):
        moments: dict[int, dict[str, Any]] = {}
        inner = getattr(tool, "inner_optimizer", tool)
        for slot, kind in (("_momentums", "exp_avg"), ("_velocities", "exp_avg_sq")):
            if type(inner).__name__ in {"Adam", "AdamW"}:
                for variable, value in zip(inner._trainable_variables, getattr(inner, slot), strict=True):
                    moments.setdefault(id(variable), {})[kind] = value
        observed: set[int] = set()
        holders = [net, *net.submodules] if isinstance(net, tf.Module) else list(net._flatten_layers())
        for position, holder in enumerate(holders):
            own = (
                holder._trainable_variables
                if isinstance(holder, k.Layer)
                else [v for v in vars(holder).values() if isinstance(v, tf.Variable)]
            )
            names = (
                [v.name for v in own]
                if isinstance(holder, k.Layer)
                else [n for n, v in vars(holder).items() if isinstance(v, tf.Variable)]
            )
            if isinstance(
                holder, k.RNN | k.MultiHeadAttention | k.EinsumDense | k.SeparableConv2D | k.DepthwiseConv2D
            ):
                continue
            if any(
                holder in getattr(h, "_layers", ())
                for h in holders
                if isinstance(h, k.RNN | k.MultiHeadAttention)
            ):
                continue
            for name, variable in zip(names, own, strict=True):
                if id(variable) in observed:
                    continue
                observed.add(id(variable))
                array = np.asarray(tf.cast(tf.convert_to_tensor(variable), tf.float64))
                other = turned(holder, name, array)
                if other is None:
                    continue
                title = f"{number}|{position}.{type(holder).__name__}.{name}"
                yield f"weight|{title}", other
                yield f"turned|{title}", array
                for kind, value in moments.get(id(variable), {}).items():
                    moment = np.asarray(value, np.float64)
                    yield f"turned:{kind}|{title}", moment
                    mine = turned(holder, name, moment)
                    assert mine is not None
                    yield f"{kind}|{title}", mine


def _stored(facts: dict[str, np.ndarray], path: str) -> dict[str, np.ndarray]:
    """Return the parameters, and what belongs to them, whose numbers TensorFlow finds below a network."""
    reader = tf.train.load_checkpoint(path)
    arrays = [
        reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if "/.ATTRIBUTES/" in key and not key.startswith(("opt/", "optimizer/"))
    ]
    present = {
        key.partition("|")[2]
        for key, value in facts.items()
        if key.startswith("turned|")
        and any(array.shape == value.shape and np.allclose(array, value, atol=1e-2) for array in arrays)
    }
    return {key: value for key, value in facts.items() if key.partition("|")[2] in present}


def make(names: list[str], folder: str) -> None:
    """Write files with their truths, each in a folder; name those that the framework cannot save."""
    for name in names:
        keras.utils.set_random_seed(len(name))
        home = Path(folder, name.replace(":", "_").replace("+", "_"))
        home.mkdir(parents=True)
        try:
            path, pairs = MAKERS[name](home)
        except Exception as error:  # noqa: BLE001  # what Keras cannot save is no case
            print("unmade", name, type(error).__name__, str(error)[:100].replace("\n", " "))  # noqa: T201
            continue
        facts = dict(truth(pairs))
        if name.startswith("checkpoint") and Path(f"{path}.index").exists():
            # Keras 3 leaves the layers in plain lists and dicts of a model out of tf.train.Checkpoint.
            facts = _stored(facts, path)
        np.savez(home / "truth.npz", **facts)
        (home / "path").write_text(path)
