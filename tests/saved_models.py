"""SavedModels by TensorFlow and Keras, and what these say about them; runs in child processes only."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np


def build(folder: Path) -> dict[str, Any]:
    """TensorFlow 2 modules, a Keras 3 export, and TensorFlow 1 graphs."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(1)
    facts = {name: globals()[f"_{name}"](tf, folder / name) for name in ("module", "keras3", "constants")}
    facts["simple"] = _simple(tf, folder / "simple")
    facts["several"] = _several(tf, folder / "several")
    return facts


def build_keras2(folder: Path) -> dict[str, Any]:
    """A functional Keras 2 model, trained for one step."""
    import tensorflow as tf
    import tf_keras

    tf_keras.utils.set_random_seed(2)
    layers = tf_keras.layers
    first = tf_keras.Input((3,), name="seen")
    x = layers.Dense(4, activation="relu", name="one")(first)
    x = layers.BatchNormalization(epsilon=0.01, name="norm")(x)
    x = layers.LeakyReLU(alpha=0.25, name="leak")(x)
    model = tf_keras.Model(first, layers.Dense(2, activation="tanh", name="two")(x), name="policy")
    model.compile(tf_keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
    model.train_on_batch(np.ones((8, 3)), np.ones((8, 2)))
    model.save(str(folder / "keras2"), save_format="tf")
    facts = _loaded(tf, folder / "keras2")
    facts["layers"] = {layer.name: [type(layer).__name__, len(layer.weights)] for layer in model.layers}
    facts["trained"] = [variable.name.split(":")[0] for variable in model.trainable_variables]
    return facts


def _module(tf: Any, path: Path) -> dict[str, Any]:
    class Part(tf.Module):
        def __init__(self, width: int) -> None:
            self.w = tf.Variable(tf.random.normal([3, width]), name=f"w_{width}")
            self.b = tf.Variable(tf.random.normal([width]), name=f"b_{width}")

    class Model(tf.Module):
        def __init__(self) -> None:
            self.parts = [Part(2), Part(5)]
            self.again = self.parts[1]
            self.mean = tf.Variable(tf.random.normal([3]), trainable=False, name="mean")
            self.unused = tf.Variable(tf.random.normal([7]), name="unused")
            self.steps = tf.Variable(4, trainable=False, dtype=tf.int64, name="steps")
            self.text = tf.saved_model.Asset(str(text))

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, "obs")])
        def act(self, obs: Any) -> Any:
            return {"action": (obs - self.mean) @ self.parts[0].w + self.parts[0].b}

        @tf.function(input_signature=[tf.TensorSpec([4, 3], tf.float32, "obs")])
        def value(self, obs: Any) -> Any:
            return {"value": obs @ self.parts[1].w, "size": tf.size(obs)}

    text = path.parent / "words.txt"
    text.write_text("a\nb\n")
    model = Model()
    tf.saved_model.save(model, str(path), signatures={"act": model.act, "value": model.value})
    return _loaded(tf, path)


def _keras3(tf: Any, path: Path) -> dict[str, Any]:
    import keras

    layers = [keras.layers.Dense(4, activation="relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])
    for weight in model.weights:
        weight.assign(np.random.default_rng(len(weight.path)).normal(size=weight.shape))
    model.export(str(path), verbose=False)
    return _loaded(tf, path)


def _constants(tf: Any, path: Path) -> dict[str, Any]:
    module = tf.Module()
    module.double = tf.function(lambda x: x * tf.constant([2.0]), input_signature=[tf.TensorSpec([1])])
    tf.saved_model.save(module, str(path))
    return {}


def _loaded(tf: Any, path: Path) -> dict[str, Any]:
    """What tf.saved_model.load finds: variables by bundle key, and what each signature has and uses."""
    loaded = tf.saved_model.load(str(path))
    found: list[Any] = []
    for function in loaded.signatures.values():
        found += function.variables
    waiting, seen = [loaded], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            found += [each] if isinstance(each, tf.Variable) else []
            waiting += each._trackable_children().values()  # what the loader itself restores along
    return {
        "tensors": _tensors(tf, path),
        "variables": {v.name.split(":")[0]: bool(v.trainable) for v in found},
        "signatures": {
            name: {
                "inputs": {
                    key: [spec.dtype.name, spec.shape.as_list()]
                    for key, spec in function.structured_input_signature[1].items()
                },
                "outputs": {
                    key: [spec.dtype.name, spec.shape.as_list()]
                    for key, spec in function.structured_outputs.items()
                },
                "variables": sorted(v.name.split(":")[0] for v in function.variables),
            }
            for name, function in loaded.signatures.items()
        },
    }


def _tensors(tf: Any, path: Path) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    return {
        key: hashlib.sha256(np.ascontiguousarray(reader.get_tensor(key)).tobytes()).hexdigest()
        for key in reader.get_variable_to_shape_map()
        if key != "_CHECKPOINTABLE_OBJECT_GRAPH"
    }


def _simple(tf: Any, path: Path) -> dict[str, Any]:
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], name="x")
        w = v1.get_variable("net/w", [3, 2], initializer=v1.truncated_normal_initializer(stddev=0.1))
        b = v1.get_variable("net/b", [2], initializer=v1.zeros_initializer())
        u = v1.get_variable("u", [2, 2], initializer=v1.random_uniform_initializer(-1, 1), use_resource=True)
        v1.get_variable("mean", [3], initializer=v1.ones_initializer(), trainable=False)
        with v1.variable_scope("cut", partitioner=v1.fixed_size_partitioner(2)):
            cut = v1.get_variable("p", [4, 3], initializer=v1.random_normal_initializer())
        v1.train.get_or_create_global_step()
        y = tf.add(x @ w, b, name="y")
        z = tf.matmul(y, u, name="z")
        p = tf.matmul(x, tf.transpose(tf.convert_to_tensor(cut)), name="p")
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(path), {"x": x, "y": y}, {"z": z, "p": p})
    return _graph_facts(tf, path, ["serve"])


def _several(tf: Any, path: Path) -> dict[str, Any]:
    """Two graphs over the same variables, which are stored under other names than their own."""
    v1 = tf.compat.v1
    builder = v1.saved_model.builder.SavedModelBuilder(str(path))
    for tags in (["train", "gpu"], ["serve"]):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [2], name="x")
            w = v1.get_variable("w", initializer=tf.constant([3.0, 4.0]))
            r = v1.get_variable("r", initializer=tf.constant([5.0, 6.0]), use_resource=True, trainable=False)
            other = tf.multiply(x, w if tags == ["serve"] else r, name="y")
            info = v1.saved_model.build_tensor_info
            signature = v1.saved_model.build_signature_def({"x": info(x)}, {"y": info(other)}, "m")
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver({"averages/w": w, "averages/r": r})
            if tags == ["serve"]:
                builder.add_meta_graph(tags, {"run": signature}, saver=saver)
            else:
                builder.add_meta_graph_and_variables(session, tags, {"run": signature}, saver=saver)
    builder.save()
    return _graph_facts(tf, path, ["serve"])


def _graph_facts(tf: Any, path: Path, tags: list[str]) -> dict[str, Any]:
    """What the loader of TensorFlow 1 finds; which variables a signature needs by extract_sub_graph."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        meta = v1.saved_model.loader.load(session, tags, str(path))
        trained = {v.op.name for v in v1.trainable_variables()}
        variables = {v.op.name: v.op.name in trained for v in v1.global_variables()}
        used = {}
        for name, signature in meta.signature_def.items():
            outputs = [info.name.split(":")[0] for info in signature.outputs.values()]
            whole = graph.as_graph_def()
            fed = {info.name.split(":")[0] for info in signature.inputs.values()}
            for node in whole.node:
                if node.name in fed:
                    del node.input[:]
            needed = v1.graph_util.extract_sub_graph(whole, outputs)
            used[name] = sorted(n.name for n in needed.node if n.op in ("VariableV2", "VarHandleOp"))
    return {"tensors": _tensors(tf, path), "variables": variables, "used": used}
