"""Lone actors of Keras and TensorFlow in every form that they are saved in.

The model itself gives the actions, or, of a form that holds no more than a class's name, what Keras loads.

`known` holds what the person who wrote the model knows and a form may lack: weights alone hold no activation.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.agent_truth.agents import ACT, OBS, Agent

Build = Callable[[Any], Any]
"""From the module `keras` to a model."""
WHOLE = ("keras", "h5", "saved")
WEIGHTS = ("weights", "ckpt")
ORDER, NORMS = "follow one another", "layer norms before"
"""What is said of weights alone: that nothing stands between the layers but one activation."""


class Actor(NamedTuple):
    """One model, the forms it is saved in, and what its author knows.

    `open` is a word for what its weights leave open and no option states, `whole` one for what a whole model
    does. `loaded` are forms whose actions are those of the model that Keras loads from them.
    """

    name: str
    build: Build
    forms: Sequence[str] = ("keras",)
    bound: float = 100.0
    known: Mapping[str, str] = {}
    feed: Callable[[np.ndarray], Any] = lambda obs: obs
    choose: Callable[[Any], Any] = lambda output: output
    open: str = ""
    whole: str = ""
    loaded: Sequence[str] = ()


def scramble(model: Any) -> None:
    """Give a model's variables values with which every layer matters."""
    rng = np.random.default_rng(7)
    for variable in model.variables:
        name, shape = getattr(variable, "path", variable.name), tuple(variable.shape)
        kind = "float" in str(variable.dtype)
        if not kind or "mean" in name.split("/")[-1] or "count" in name or "normalization/var" in name:
            continue
        if "variance" in name:
            continue
        if "gamma" in name:
            value = rng.uniform(0.5, 1.5, shape)
        else:
            value = 1.5 * rng.normal(size=shape) / (shape[0] ** 0.5 if len(shape) > 1 else 4)
        variable.assign(value.astype("float32"))


def move_statistics(model: Any) -> None:
    """Give batch norms moving averages that matter."""
    rng = np.random.default_rng(8)
    for variable in model.variables:
        name = getattr(variable, "path", variable.name)
        if "moving_mean" in name:
            variable.assign(rng.normal(size=tuple(variable.shape)).astype("float32"))
        elif "moving_variance" in name:
            variable.assign(rng.uniform(0.3, 2, tuple(variable.shape)).astype("float32"))


def save(model: Any, form: str, path: Path) -> str:
    """Save the model in a form; return the file or folder."""
    tf = importlib.import_module("tensorflow")
    path.mkdir(parents=True)
    if form == "keras":
        model.save(file := str(path / "actor.keras"))
    elif form == "h5":
        model.save(file := str(path / "actor.h5"))
    elif form == "weights":
        model.save_weights(file := str(path / "actor.weights.h5"))
    elif form == "saved":
        tf.saved_model.save(model, file := str(path / "actor")) if not hasattr(
            model, "export"
        ) else model.export(file := str(path / "actor"), verbose=False)
    elif form == "traced":
        tf.saved_model.save(model, file := str(path / "actor"))
    else:
        file = tf.train.Checkpoint(actor=model).write(str(path / "ckpt"))
    return file


def _agent(actor: Actor, form: str) -> Agent:
    def write(path: Path, obs: np.ndarray) -> tuple[str, Any]:
        keras = importlib.import_module("keras")
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("float32")
        model = actor.build(keras)
        if hasattr(model, "variables"):
            model(actor.feed(obs))
            scramble(model)
            move_statistics(model)
        file = save(model, form, path)
        if form in actor.loaded:
            model = keras.models.load_model(file)
        return file, np.asarray(actor.choose(model(actor.feed(obs)))).astype("float32")

    whole = form in WHOLE or form == "traced"
    known, unstated = ({}, actor.whole) if whole else (actor.known, actor.open)
    bounds = (-actor.bound, actor.bound)
    return Agent(f"tf_{actor.name}_{form}", write, *bounds, known, open=unstated)


def chain(*layers: Any, last: str = "linear") -> Build:
    """Return what builds a Sequential: numbers and (number, activation) are dense layers."""

    def build(keras: Any) -> Any:
        stack = [spec(keras) if callable(spec) else keras.layers.Dense(*_pair(spec)) for spec in layers]
        return keras.Sequential([keras.Input((OBS,)), *stack, keras.layers.Dense(ACT, last, name="out")])

    return build


def _pair(spec: Any) -> Any:
    return spec if isinstance(spec, tuple) else (spec, "relu")


def layer(name: str, *arguments: Any, **more: Any) -> Callable[[Any], Any]:
    """Return what builds a layer of keras.layers."""
    return lambda keras: getattr(keras.layers, name)(*arguments, **more)


def ending(*layers: Callable[[Any], Any], last: str = "tanh") -> Build:
    """Return what builds two hidden layers, a head, and layers behind it."""

    def build(keras: Any) -> Any:
        dense = keras.layers.Dense
        own = [dense(16, "relu"), dense(8, "relu"), dense(ACT, last)]
        return keras.Sequential([keras.Input((OBS,)), *own, *(make_layer(keras) for make_layer in layers)])

    return build


def functional(body: Callable[[Any, Any], Any], inputs: Callable[[Any], Any] | None = None) -> Build:
    """Return what builds a functional model of a function from `keras` and the input."""

    def build(keras: Any) -> Any:
        start = keras.Input((OBS,)) if inputs is None else inputs(keras)
        return keras.Model(start, body(keras, start))

    return build


def _dense(keras: Any, units: int, activation: Any = "relu", **more: Any) -> Any:
    return keras.layers.Dense(units, activation, **more)


def _adapted(keras: Any, *, low: float = 3.0, **more: Any) -> Any:
    norm = keras.layers.Normalization(**more)
    rng = np.random.default_rng(5)
    norm.adapt((rng.normal(size=(500, OBS)) * np.linspace(0.5, low, OBS) + np.arange(OBS)).astype("float32"))
    return norm


def _two_hidden(keras: Any, x: Any) -> Any:
    return _dense(keras, 8)(_dense(keras, 16)(x))


def _residual(keras: Any, x: Any) -> Any:
    first = _dense(keras, 16)(x)
    return _dense(keras, ACT, None)(keras.layers.Add()([first, _dense(keras, 16)(first)]))


def _skip(keras: Any, x: Any) -> Any:
    return _dense(keras, ACT, None)(keras.layers.Concatenate()([_dense(keras, 16)(x), x]))


def _gated(keras: Any, x: Any) -> Any:
    gate = _dense(keras, 16, "sigmoid")(x)
    return _dense(keras, ACT, None)(keras.layers.Multiply()([_dense(keras, 16)(x), gate]))


def _shared(keras: Any, x: Any) -> Any:
    again = _dense(keras, 16)
    return _dense(keras, ACT, None)(again(again(_dense(keras, 16)(x))))


def _nested(keras: Any, x: Any) -> Any:
    body = keras.Sequential([keras.Input((OBS,)), _dense(keras, 16, "elu"), _dense(keras, 8, "tanh")])
    return _dense(keras, ACT, "tanh")(body(x))


def _two_inputs(keras: Any) -> Any:
    return [keras.Input((3,), name="position"), keras.Input((OBS - 3,), name="velocity")]


def _joined(keras: Any, x: Any) -> Any:
    return _dense(keras, ACT, None)(_two_hidden(keras, keras.layers.Concatenate()(x)))


def _joined_backwards(keras: Any, x: Any) -> Any:
    return _dense(keras, ACT, None)(_two_hidden(keras, keras.layers.Concatenate()(x[::-1])))


def _dict_inputs(keras: Any) -> Any:
    return {"position": keras.Input((3,), name="position"), "velocity": keras.Input((2,), name="velocity")}


def _dict_joined(keras: Any, x: Any) -> Any:
    return _joined(keras, [x["velocity"], x["position"]])


def _heads(keras: Any, x: Any) -> Any:
    hidden = _two_hidden(keras, x)
    return [_dense(keras, ACT, None, name="mean")(hidden), _dense(keras, ACT, None, name="log_std")(hidden)]


def _heads_turned(keras: Any, x: Any) -> Any:
    return _heads(keras, x)[::-1]


def _value_head(keras: Any, x: Any) -> Any:
    hidden = _two_hidden(keras, x)
    return [_dense(keras, ACT, "tanh", name="policy")(hidden), _dense(keras, 1, None, name="value")(hidden)]


def _mixed_head(keras: Any, x: Any) -> Any:
    hidden = _two_hidden(keras, x)
    return keras.layers.Concatenate()([_dense(keras, 1, "tanh")(hidden), _dense(keras, 1, "sigmoid")(hidden)])


def _operator(keras: Any, x: Any) -> Any:
    return 2.0 * keras.ops.tanh(_dense(keras, ACT, None)(_two_hidden(keras, x)))


def _operator_before(keras: Any, x: Any) -> Any:
    return _dense(keras, ACT, None)(_two_hidden(keras, x * 0.1))


def _operator_sine(keras: Any, x: Any) -> Any:
    return _dense(keras, ACT, None)(keras.ops.sin(_dense(keras, 16, None)(x)))


def _operator_relu(keras: Any, x: Any) -> Any:
    return _dense(keras, ACT, None)(keras.ops.relu(_dense(keras, 16, None)(x)))


def _operator_clip(keras: Any, x: Any) -> Any:
    return keras.ops.clip(_dense(keras, ACT, None)(_two_hidden(keras, x)), -1.0, 1.0)


def _rescaled_twice(keras: Any, x: Any) -> Any:
    out = _dense(keras, ACT, "tanh")(_two_hidden(keras, x))
    return keras.layers.Rescaling(0.5, offset=0.25)(keras.layers.Rescaling(4.0, offset=1.0)(out))


def _own_function(name: str, *, registered: bool) -> Build:
    """An activation of the program's own that has the name of another one."""

    def build(keras: Any) -> Any:
        def function(x: Any) -> Any:
            return keras.ops.sin(x)

        function.__name__ = function.__qualname__ = name
        if registered:
            function = keras.saving.register_keras_serializable("own")(function)
        return chain((16, function), (8, function))(keras)

    return build


def _own_dense(keras: Any) -> Any:
    class Dense(keras.layers.Dense):  # type: ignore[misc, name-defined]
        def call(self, x: Any, *_: Any, **__: Any) -> Any:
            return 2 * super().call(x)

    return keras.Sequential([keras.Input((OBS,)), Dense(16, "relu"), keras.layers.Dense(ACT)])


def _own_dense_registered(keras: Any) -> Any:
    @keras.saving.register_keras_serializable("own")
    class Dense(keras.layers.Dense):  # type: ignore[misc, name-defined]
        def call(self, x: Any, *_: Any, **__: Any) -> Any:
            return 2 * super().call(x)

    return keras.Sequential([keras.Input((OBS,)), Dense(16, "relu"), keras.layers.Dense(ACT)])


def _own_scale(keras: Any) -> Any:
    class Scale(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def call(self, x: Any) -> Any:
            return 3 * x

    return keras.Sequential(
        [keras.Input((OBS,)), Scale(), keras.layers.Dense(16, "relu"), keras.layers.Dense(ACT)]
    )


def _own_sequential(keras: Any) -> Any:
    class Sequential(keras.Sequential):  # type: ignore[misc, name-defined]
        def call(self, x: Any, *_: Any, **__: Any) -> Any:
            return 2 * super().call(x)

    return Sequential([keras.Input((OBS,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(ACT)])


def _half(keras: Any) -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((OBS,)), dense(16, "relu"), dense(ACT, dtype="float32")])


def _bfloat(keras: Any) -> Any:
    keras.config.set_dtype_policy("bfloat16")
    dense = keras.layers.Dense
    return keras.Sequential([keras.Input((OBS,)), dense(16, "relu"), dense(ACT)])


def _lora(keras: Any) -> Any:
    model = chain(16, 8)(keras)
    model.layers[0].enable_lora(2)
    return model


def _quantized(keras: Any) -> Any:
    model = chain(16, 8)(keras)
    scramble(model)
    model.quantize("int8")
    return model


def _trained(keras: Any) -> Any:
    model = chain((16, "tanh"), 8)(keras)
    model.compile("adam", "mse")
    model.fit(np.ones((4, OBS), "float32"), np.ones((4, ACT), "float32"), verbose=0)
    return model


def _subclass(
    run: Callable[[Any, Any], Any], order: Sequence[str] = ("one", "two", "out"), **more: Any
) -> Build:
    """A model whose layers are attributes, made in this order, and whose `call` is `run(self, x)`."""

    def build(keras: Any) -> Any:
        tf = importlib.import_module("tensorflow")
        units = {"one": 16, "two": 16, "out": ACT}

        class Policy(keras.Model):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                for name in order:
                    setattr(self, name, keras.layers.Dense(units[name], more.get(name)))
                if "norm" in more:
                    self.norm = keras.layers.LayerNormalization()
                if "scale" in more:
                    self.scale = tf.Variable([2.0, 2.0], trainable=False, name="scale")

            def call(self, x: Any) -> Any:
                return run(self, x)

        model = Policy()
        model(np.zeros((1, OBS), "float32"))
        return model

    return build


def _relu_relu(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return model.out(tf.nn.relu(model.two(tf.nn.relu(model.one(x)))))


def _relu_tanh_two(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return 2.0 * tf.tanh(_relu_relu(model, x))


def _tanh_relu(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return model.out(tf.nn.relu(model.two(tf.tanh(model.one(x)))))


def _sum(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    one = tf.nn.relu(model.one(x))
    return model.out(one + tf.nn.relu(model.two(one)))


def _norm_late(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return model.out(tf.nn.relu(model.two(model.norm(tf.nn.relu(model.one(x))))))


def _times_scale(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return model.scale * tf.tanh(_relu_relu(model, x))


def _tenth(model: Any, x: Any) -> Any:
    return _relu_relu(model, 0.1 * x)


def _leaky(model: Any, x: Any) -> Any:
    tf = importlib.import_module("tensorflow")
    return model.out(tf.nn.leaky_relu(model.two(tf.nn.leaky_relu(model.one(x)))))


def _module(kind: str) -> Build:
    """A tf.Module with matrices: [in, out] (`x @ w`), or [out, in] (`w @ x`)."""

    def build(_: Any) -> Any:
        tf = importlib.import_module("tensorflow")
        rng = np.random.default_rng(3)

        class Policy(tf.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                sizes = (OBS, 16, 16, ACT)
                self.w, self.b = [], []
                for one, two in pairwise(sizes):
                    shape = (two, one) if kind == "turned" else (one, two)
                    self.w.append(tf.Variable(rng.normal(size=shape).astype("float32") / 3))
                    self.b.append(tf.Variable(rng.normal(size=two).astype("float32")))

            @tf.function(input_signature=[tf.TensorSpec((None, OBS), tf.float32)])  # type: ignore[untyped-decorator]
            def __call__(self, x: Any) -> Any:
                for n, (w, b) in enumerate(zip(self.w, self.b, strict=True)):
                    x = tf.matmul(x, w, transpose_b=kind == "turned") + b
                    if n < 2:
                        x = tf.tanh(x) if kind != "relu6" else tf.nn.relu6(x)
                return x

        return Policy()

    return build


def _split(obs: np.ndarray) -> Any:
    return [obs[:, :3], obs[:, 3:]]


def _split_dict(obs: np.ndarray) -> Any:
    return {"position": obs[:, :3], "velocity": obs[:, 3:]}


def _first(output: Any) -> Any:
    return output[0]


def _second(output: Any) -> Any:
    return output[1]


def actors() -> Iterator[Actor]:
    """Yield the models."""
    relu, tanh = {"activation": "relu"}, {"activation": "tanh"}
    straight = {"activation": "relu", "head": "identity"}
    everywhere = (*WHOLE, *WEIGHTS)
    yield Actor("relu", chain(16, 8), everywhere, known=straight)
    yield Actor("tanh_head", chain(16, 8, last="tanh"), everywhere, 1.0, relu | {"head": "unit_tanh"})
    yield Actor("tanh", chain((16, "tanh"), (8, "tanh")), everywhere, known=tanh | {"head": "identity"})
    yield Actor("mixed", chain((16, "tanh"), (8, "elu")), WHOLE)
    yield Actor("no_bias", chain(layer("Dense", 16, "relu", use_bias=False), 8), WHOLE)
    yield Actor("scaled", ending(layer("Rescaling", 2.0)), everywhere, 2.0, relu | {"head": "affine"})
    yield Actor("scaled_rows", ending(layer("Rescaling", [2.0, 1.0], offset=[0.5, -1.0])), WHOLE, 2.0)
    yield Actor("scaled_negative", ending(layer("Rescaling", -2.0)), WHOLE, 2.0)
    yield Actor("scaled_linear", ending(layer("Rescaling", 2.0), last="linear"), WHOLE)
    yield Actor("scaled_twice", functional(_rescaled_twice), WHOLE, 3.0)
    yield Actor("scaled_input", chain(layer("Rescaling", 0.1), 16, 8), everywhere, known=straight, open=ORDER)
    yield Actor("scaled_input_rows", chain(layer("Rescaling", [0.1] * OBS, offset=[1.0] * OBS), 16), WHOLE)
    yield Actor("sigmoid_scaled", ending(layer("Rescaling", 2.0, offset=-1.0), last="sigmoid"), WHOLE, 2.0)
    yield Actor("normalized", chain(_adapted, 16, 8), everywhere, known=straight)
    yield Actor("normalized_scalar", chain(lambda k: _adapted(k, axis=None), 16), WHOLE)
    constant = layer("Normalization", mean=[0.0, 1, 2, 3, 4], variance=[1.0, 2, 3, 4, 5])
    yield Actor("normalized_constant", chain(constant, 16), everywhere, known=straight, open=ORDER)
    yield Actor("normalized_zero", chain(layer("Normalization", mean=1.0, variance=0.0), 16), ("keras",))
    inverted = layer("Normalization", mean=[0.5, -0.5], variance=[4.0, 9.0], invert=True)
    yield Actor("denormalized", ending(inverted, last="linear"), WHOLE)
    yield Actor("lambda_end", ending(layer("Lambda", lambda x: 2 * x)), ("keras", "h5", "saved"), 2)
    yield Actor("lambda_hidden", chain((16, "linear"), layer("Lambda", lambda x: x * x)), WHOLE)
    yield Actor("lambda_first", chain(layer("Lambda", lambda x: 3 * x), 16), WHOLE)
    for name in ("own_sine", "relu", "tanh"):
        for registered in (False, True):
            suffix = "_registered" if registered else ""
            function = _own_function(name, registered=registered)
            # Keras records a function by its name, and loads its own one of that name.
            loaded = ("keras", "h5") if name != "own_sine" and not registered else ()
            yield Actor(f"function_{name}{suffix}", function, ("keras", "h5"), loaded=loaded)
    for name in (
        "selu", "gelu", "swish", "silu", "mish", "elu", "softplus", "softsign", "leaky_relu", "relu6",
        "exponential", "hard_sigmoid", "celu", "hard_silu", "sigmoid",
    ):  # fmt: skip
        yield Actor(f"act_{name}", chain((16, name), (8, name)), ("keras", "saved"))
    yield Actor("weights_elu", chain((16, "elu")), WEIGHTS, known={"activation": "elu", "head": "identity"})
    yield Actor("gelu_tanh", chain((16, "linear"), layer("Activation", "gelu")), WHOLE)
    for name, arguments in {
        "LeakyReLU": {}, "PReLU": {}, "ELU": {"alpha": 0.5}, "Softmax": {}, "ReLU": {},
    }.items():  # fmt: skip
        yield Actor(
            f"layer_{name.lower()}", chain((16, None), layer(name, **arguments)), ("keras", "h5", "saved")
        )
    yield Actor("relu_max", chain((16, None), layer("ReLU", max_value=0.5)), WHOLE)
    yield Actor("relu_slope", chain((16, None), layer("ReLU", negative_slope=0.3)), WHOLE)
    batch = layer("BatchNormalization")
    yield Actor(
        "batch_before", chain((16, None), batch, layer("Activation", "relu")), everywhere, known=straight
    )
    yield Actor("batch_after", chain(16, batch), everywhere, known=straight)
    yield Actor("batch_first", chain(batch, 16), everywhere, known=straight)
    yield Actor(
        "batch_plain", chain((16, None), layer("BatchNormalization", scale=False, center=False)), WHOLE
    )
    yield Actor("batch_last", ending(batch, layer("Activation", "tanh"), last="linear"), WHOLE, 1.0)
    norm = layer("LayerNormalization")
    yield Actor(
        "norm_before", chain((16, None), norm, layer("Activation", "relu")), everywhere, known=straight
    )
    yield Actor("norm_after", chain(16, norm), everywhere, known=straight, open=NORMS)
    yield Actor("norm_first", chain(norm, 16), everywhere, known=straight)
    wide = layer("LayerNormalization", epsilon=0.1)
    yield Actor("norm_epsilon", chain((16, "relu"), wide), WEIGHTS, known=straight, open=NORMS)
    early = (chain((16, None), layer("LayerNormalization", epsilon=0.1), layer("ReLU")), everywhere)
    yield Actor("norm_wide", *early, known=straight, open="epsilon")
    yield Actor("rms_norm", chain((16, None), layer("RMSNormalization"), layer("ReLU")), ("keras", "saved"))
    yield Actor(
        "unit_norm",
        chain(16, layer("UnitNormalization")),
        ("keras", "saved", *WEIGHTS),
        known=straight,
        open=ORDER,
    )
    yield Actor(
        "group_norm",
        chain(16, layer("GroupNormalization", 4)),
        ("keras", "saved", *WEIGHTS),
        known=straight,
        open=NORMS,
    )
    noises = (layer("Dropout", 0.5), layer("GaussianNoise", 0.5), layer("ActivityRegularization", l2=0.1))
    yield Actor("inactive", chain(16, *noises, 8), WHOLE)
    yield Actor("constraints", chain(layer("Dense", 16, "relu", kernel_constraint="max_norm",
                                           kernel_regularizer="l2")), WHOLE)  # fmt: skip
    for name, body in (
        ("residual", _residual), ("skip", _skip), ("gated", _gated), ("shared", _shared),
        ("mixed_head", _mixed_head), ("operator_sine", _operator_sine), ("operator_before", _operator_before),
    ):  # fmt: skip
        yield Actor(name, functional(body), ("keras", "h5", "saved", *WEIGHTS), known=straight, open=ORDER)
    kinds = {"activation": "elu,tanh", "head": "unit_tanh"}
    yield Actor("nested", functional(_nested), everywhere, 1.0, kinds)
    yield Actor("operator_relu", functional(_operator_relu), ("keras", "h5"))
    yield Actor("operator_tanh", functional(_operator), ("keras", "saved"), 2.0)
    yield Actor("operator_clip", functional(_operator_clip), ("keras", "saved"))
    two = {"feed": _split}
    yield Actor("two_inputs", functional(_joined, _two_inputs), ("keras", "h5", "saved"), **two)
    yield Actor(
        "two_inputs_weights", functional(_joined_backwards, _two_inputs), ("keras", *WEIGHTS),
        known=straight, open=ORDER, **two,
    )  # fmt: skip
    yield Actor("dict_inputs", functional(_dict_joined, _dict_inputs), ("keras", "saved", "weights"),
                known=straight, feed=_split_dict, open=ORDER)  # fmt: skip
    yield Actor("mean_log_std", functional(_heads), everywhere, known=straight, choose=_first)
    yield Actor("log_std_mean", functional(_heads_turned), everywhere, known=straight, choose=_second)
    halves = {"known": straight, "open": "different sizes", "choose": lambda output: output[:, :ACT]}
    yield Actor("split_head", functional(lambda k, x: _dense(k, 2 * ACT, None)(_two_hidden(k, x))),
                everywhere, **halves)  # fmt: skip
    policy = relu | {"head": "unit_tanh"}
    yield Actor("value_head", functional(_value_head), everywhere, 1.0, policy, choose=_first)
    yield Actor("own_dense", _own_dense, ("keras", "h5", "saved"), loaded=("h5",))
    yield Actor("own_dense_registered", _own_dense_registered, ("keras", "h5"))
    yield Actor("own_scale", _own_scale, ("keras", "h5", "saved"))
    yield Actor("own_sequential", _own_sequential, ("keras", "h5", "saved"), loaded=("h5",))
    yield Actor("half", _half, whole="computed in float32")
    yield Actor("bfloat", _bfloat, whole="computed in float32")
    yield Actor("lora", _lora, ("keras", "weights"), known=straight)
    yield Actor("quantized", _quantized, ("keras", "weights"), known=straight)
    yield Actor("trained", _trained, ("keras", "h5"))
    wrapped = lambda k: k.layers.SpectralNormalization(k.layers.Dense(16, "relu"))  # noqa: E731
    yield Actor("spectral", chain(wrapped), ("keras", "weights"), known=straight)
    yield Actor("reshaped", chain(layer("Reshape", (1, OBS)), layer("Flatten"), 16), ("keras", "saved"))
    yield Actor(
        "permuted",
        chain(layer("Reshape", (OBS, 1)), layer("Permute", (2, 1)), layer("Flatten"), 16),
        ("keras",),
    )
    yield Actor(
        "einsum",
        chain(lambda k: k.layers.EinsumDense("ab,bc->ac", 16, bias_axes="c"), layer("ReLU")),
        ("keras", "weights"),
        known=straight,
    )
    yield Actor(
        "einsum_turned",
        chain(lambda k: k.layers.EinsumDense("ab,cb->ac", 16, bias_axes="c"), layer("ReLU")),
        ("keras", "weights"),
        known=straight,
    )
    late = {"forms": ("weights", "ckpt", "saved"), "known": straight, "open": ORDER}
    yield Actor("subclass", _subclass(_relu_relu), **late)
    yield Actor("subclass_order", _subclass(_relu_relu, ("out", "two", "one")), **late)
    yield Actor("subclass_inside", _subclass(_tanh_relu, one="linear"), **late)
    yield Actor("subclass_sum", _subclass(_sum), **late)
    yield Actor("subclass_norm_late", _subclass(_norm_late, norm=True), **late)
    scaled = relu | {"head": "affine"}
    yield Actor("subclass_scaled", _subclass(_relu_tanh_two), late["forms"], 2.0, scaled)
    yield Actor("subclass_variable", _subclass(_times_scale, scale=True), late["forms"], 2.0, scaled)
    yield Actor("subclass_tenth", _subclass(_tenth), **late)
    yield Actor("subclass_leaky", _subclass(_leaky), ("saved",))
    yield Actor("module", _module("plain"), ("traced", "ckpt"), known=tanh | {"head": "identity"})
    yield Actor("module_turned", _module("turned"), ("traced", "ckpt"), known=tanh | {"head": "identity"})
    yield Actor("module_relu6", _module("relu6"), ("traced",))


def keras_actors() -> Iterator[Agent]:
    """Yield every model in each of its forms."""
    for actor in actors():
        for form in actor.forms:
            yield _agent(actor, form)


FEW = (
    "relu_saved", "scaled_input_keras", "normalized_h5", "lambda_hidden_keras", "act_gelu_saved",
    "batch_first_h5", "norm_after_weights", "residual_keras", "skip_saved", "value_head_keras", "half_keras",
)  # fmt: skip
"""Some of the causes, which the tests go through; `python -m tests.agent_truth` goes through all."""
