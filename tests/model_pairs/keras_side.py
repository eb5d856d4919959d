"""The programs in Keras: built, saved in every form, filled and judged. Runs in a process with TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.model_pairs.programs import Line, Program, program

EPSILON = 1e-3
STYLES = ("subclassed", "functional")


@keras.saving.register_keras_serializable("model_pairs")
class Positions(keras.layers.Layer):  # type: ignore[misc]
    """A trained table of positions, added."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=tuple(shape[1:]), name="table")

    def call(self, x: Any) -> Any:
        return x + self.table


@keras.saving.register_keras_serializable("model_pairs")
class Shuffle(keras.layers.Layer):  # type: ignore[misc]
    """TensorFlow's pixel shuffle, or its inverse."""

    def __init__(self, factor: int, *, up: bool, **settings: Any) -> None:
        super().__init__(**settings)
        self.factor, self.up = factor, up

    def call(self, x: Any) -> Any:
        return (tf.nn.depth_to_space if self.up else tf.nn.space_to_depth)(x, self.factor)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor, "up": self.up}


def _layer(line: Line, name: str) -> Any:
    k, args, shape, output_shape = keras.layers, line.args, line.ins[0].shape, line.out.shape
    rank = len(shape) - 1
    op = line.op
    if op in ("conv", "convt", "depthwise"):
        kind = {"conv": "Conv{}D", "convt": "Conv{}DTranspose", "depthwise": "DepthwiseConv{}D"}[op]
        # There is no depthwise convolution over three axes.
        cls = getattr(k, kind.format(rank))
        if op == "depthwise":
            return cls(args["kernel"], name=name)
        return cls(output_shape[0], args["kernel"], args["stride"], name=name)
    if op == "td_conv":
        return k.TimeDistributed(k.Conv2D(output_shape[1], args["kernel"]), name=name)
    if op == "prelu":
        return k.PReLU(name=name, shared_axes=list(range(1, rank + 1)) if rank else None)
    if op == "attention":
        return k.MultiHeadAttention(args["heads"], output_shape[-1] // args["heads"], name=name)
    simple = {
        "dense": lambda: k.Dense(output_shape[-1], use_bias=args.get("bias", True), name=name),
        "bn": lambda: k.BatchNormalization(epsilon=EPSILON, name=name),
        "ln": lambda: k.LayerNormalization(epsilon=EPSILON, name=name),
        "lstm": lambda: k.LSTM(output_shape[-1], return_sequences=args["sequences"], name=name),
        "gru": lambda: k.GRU(output_shape[-1], return_sequences=args["sequences"], name=name),
        "embed": lambda: k.Embedding(args["words"], output_shape[-1], name=name),
        "positions": lambda: Positions(name=name),
    }
    return simple[op]() if op in simple else None


def _step(line: Line, layer: Any, inputs: list[Any], *, layers: bool) -> Any:
    """Return what a step makes; with `layers` what moves numbers is a layer too, as in a functional model."""
    k, x, op = keras.layers, inputs[0], line.op
    if op == "attention":
        return layer(x, x)
    if layer is not None:
        return layer(x)
    rank = len(line.ins[0].shape) - 1
    if op == "flatten":
        frames = line.ins[0].kind == "frames"
        if line.args["order"] == "first":
            first = k.Permute((rank + 1, *range(1, rank + 1)))
            x = first(x) if layers else keras.ops.transpose(x, (0, rank + 1, *range(1, rank + 1)))
        if frames:
            return k.TimeDistributed(k.Flatten())(x) if layers else _reshape(x, line.out.shape, layers=False)
        return k.Flatten()(x) if layers else _reshape(x, (-1,), layers=False)
    if op == "image":
        channels, *size = line.out.shape
        if line.args["order"] == "first":
            x = _reshape(x, line.out.shape, layers=layers)
            axes = (*range(2, len(size) + 2), 1)
            return k.Permute(axes)(x) if layers else keras.ops.transpose(x, (0, *axes))
        return _reshape(x, (*size, channels), layers=layers)
    if op == "attend":
        q, key, v = inputs
        scores = keras.ops.matmul(q, keras.ops.transpose(key, (0, 2, 1))) / line.out.shape[-1] ** 0.5
        return keras.ops.matmul(keras.ops.softmax(scores, -1), v)
    if op in ("shuffle", "unshuffle"):
        return Shuffle(line.args["factor"], up=op == "shuffle")(x)
    names = {1: "1D", 2: "2D", 3: "3D"}
    places = tuple(range(1, rank + 1))
    if not layers:
        return {
            "relu": lambda: keras.ops.relu(x),
            "pool": lambda: keras.ops.max_pool(x, 2),
            "gap": lambda: keras.ops.mean(x, places),
            "mean": lambda: keras.ops.mean(x, 1),
            "scale": lambda: x * _reshape(inputs[1], (*(1,) * rank, -1), layers=False),
            "step": lambda: keras.ops.expand_dims(x, 1),
            "rows": lambda: _reshape(x, (-1,), layers=False),
            "patches": lambda: _reshape(x, line.out.shape, layers=False),
            "concat": lambda: keras.ops.concatenate(inputs, -1),
            "add": lambda: inputs[0] + inputs[1],
            "multiply": lambda: inputs[0] * inputs[1],
        }[op]()
    return {
        "relu": lambda: k.ReLU()(x),
        "pool": lambda: getattr(k, f"MaxPooling{names[rank]}")(2)(x),
        "gap": lambda: getattr(k, f"GlobalAveragePooling{names[rank]}")()(x),
        "mean": lambda: k.GlobalAveragePooling1D()(x),
        "scale": lambda: k.Multiply()([x, k.Reshape((*(1,) * rank, x.shape[-1]))(inputs[1])]),
        "step": lambda: k.Reshape((1, x.shape[-1]))(x),
        "rows": lambda: k.Flatten()(x),
        "patches": lambda: _reshape(x, line.out.shape, layers=True),
        "concat": lambda: k.Concatenate()(inputs),
        "add": lambda: k.Add()(inputs),
        "multiply": lambda: k.Multiply()(inputs),
    }[op]()


def _reshape(x: Any, shape: Any, *, layers: bool) -> Any:
    if layers:
        return keras.layers.Reshape(tuple(shape))(x)
    return keras.ops.reshape(x, (keras.ops.shape(x)[0], *shape))


class Net(keras.Model):  # type: ignore[misc]
    """A program's model as a class of one's own; its layers are attributes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layers_ = program(name)
        for line in self.layers_.lines:
            layer = _layer(line, line.name) if line.name and not hasattr(self, line.name) else None
            if layer is not None:
                setattr(self, line.name, layer)

    def call(self, *inputs: Any) -> Any:
        if len(inputs) == 1 and isinstance(inputs[0], list | tuple):
            inputs = tuple(inputs[0])
        values = {input_.number: x for input_, x in zip(self.layers_.inputs, inputs, strict=True)}
        for line in self.layers_.lines:
            layer = getattr(self, line.name) if line.name else None
            values[line.out.number] = _step(
                line, layer, [values[value.number] for value in line.ins], layers=False
            )
        results = [values[output.number] for output in self.layers_.outputs]
        return results if len(results) > 1 else results[0]


def functional(name: str) -> Any:
    """Return the program as a functional model, whose layers carry the program's names."""
    made_program = program(name)
    values: dict[int, Any] = {}
    for input_, shape in zip(made_program.inputs, shapes(made_program), strict=True):
        values[input_.number] = keras.Input(shape, dtype="int32" if input_.kind == "tokens" else None)
    inputs = list(values.values())
    layers: dict[str, Any] = {}
    for line in made_program.lines:
        if line.name and line.name not in layers:
            layers[line.name] = _layer(line, line.name)
        ins = [values[value.number] for value in line.ins]
        values[line.out.number] = _step(line, layers.get(line.name), ins, layers=True)
    results = [values[output.number] for output in made_program.outputs]
    return keras.Model(
        inputs if len(inputs) > 1 else inputs[0], results if len(results) > 1 else results[0], name="net"
    )


def model(name: str, style: str = "functional") -> Any:
    """Return a program's model with its variables made."""
    keras.utils.clear_session()
    net = functional(name) if style == "functional" else Net(name)
    net_program = program(name)
    call(net, [np.zeros((1, *s), "int32" if net_program.words else "float32") for s in shapes(net_program)])
    return net


def build(name: str, style: str = "functional", seed: int = 0) -> Any:
    """Return a program's model with random weights and statistics."""
    net = model(name, style)
    draw = np.random.default_rng(seed)
    for variable in net.variables:
        if "seed" in variable.path:
            continue
        shape = tuple(variable.shape)
        scale = 1.5 / max(1, np.prod(shape[:-1])) ** 0.5 if len(shape) > 1 else 0.5
        value = (draw.standard_normal(shape) * scale).astype(np.float32)
        variable.assign(np.abs(value) + 0.5 if "moving_variance" in variable.path else value)
    return net


def shapes(twin: Program) -> list[tuple[int, ...]]:
    """Return the shapes of a program's inputs in Keras."""
    return [_last(input_.kind, input_.shape) for input_ in twin.inputs]


def _last(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if kind == "image":
        return (*shape[1:], shape[0])
    return (shape[0], *shape[2:], shape[1]) if kind == "frames" else shape


def call(net: Any, inputs: list[np.ndarray]) -> Any:
    """Return what a model of either style makes of its inputs."""
    x = [tf.constant(array) for array in inputs]
    return net(x if len(x) > 1 else x[0])


def inputs(twin: Program, seed: int = 1) -> list[np.ndarray]:
    """Return random inputs as Keras takes them: those of torch_side, images with their channels last."""
    draw = np.random.default_rng(seed)
    arrays = []
    for input_ in twin.inputs:
        if input_.kind == "tokens":
            arrays.append(draw.integers(0, twin.words, (3, *input_.shape)))
            continue
        value = draw.standard_normal((3, *input_.shape)).astype(np.float32)
        axis = {"image": 1, "frames": 2}.get(input_.kind)
        arrays.append(np.moveaxis(value, axis, -1) if axis else value)
    return arrays


def outputs(net: Any, twin: Program) -> list[np.ndarray]:
    """Return what the model makes of the program's inputs, images with their channels first."""
    results = call(net, inputs(twin))
    results = results if isinstance(results, list | tuple) else [results]
    return [
        np.moveaxis(np.asarray(array), -1, 1) if value.kind == "image" else np.asarray(array)
        for array, value in zip(results, twin.outputs, strict=True)
    ]


def save(name: str, folder: Path, sources: Sequence[str]) -> None:
    """Write the model in these forms beside the outputs that it has."""
    own = [source for source in sources if source.startswith("own_")]
    for style in STYLES if own else ("functional",):
        net = build(name, style)
        at = f"{style}_"
        net.save_weights(folder / f"{at}.weights.h5")
        if style == "functional":
            # Checkpoints of objects number the layers.
            numbered = {f"_operations/{n}": layer.name for n, layer in enumerate(net.layers)}
            (folder / "names.json").write_text(json.dumps(numbered), encoding="utf-8")
            if "keras" in sources:
                net.save(folder / "functional.keras")
            if "h5" in sources:
                net.save(folder / "functional.h5")
            np.savez(folder / "keras.npz", **{value.path: np.asarray(value) for value in net.variables})
            if "saved_model" in sources:
                _export(net, name, folder / "saved_model")
        if {"objects", "own_objects"} & {*sources}:
            tf.train.Checkpoint(net).write(str(folder / f"{at}checkpoint"))
        np.savez(folder / f"{at}outputs.npz", *outputs(net, program(name)))


def _export(net: Any, name: str, target: Path) -> None:
    definition = program(name)
    dtype = "int32" if definition.words else "float32"
    specs = [tf.TensorSpec((None, *shape), dtype) for shape in shapes(definition)]
    archive = keras.export.ExportArchive()
    archive.track(net)
    archive.add_endpoint("serve", lambda *x: net(list(x) if len(x) > 1 else x[0]), specs)
    archive.write_out(str(target), verbose=False)


def load(name: str, style: str, file: Path) -> Any:
    """Return a model that loaded a weights file; raise what Keras raises."""
    net = build(name, style, 5)
    net.load_weights(str(file))
    return net
