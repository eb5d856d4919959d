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
    variables: list[Any] = []
    for function in loaded.signatures.values():
        variables += function.variables
    waiting, visited = [loaded], set()
    while waiting:
        trackable = waiting.pop()
        if id(trackable) not in visited:
            visited.add(id(trackable))
            variables += [trackable] if isinstance(trackable, tf.Variable) else []
            waiting += trackable._trackable_children().values()  # what the loader itself restores along
    return {
        "tensors": _tensors(tf, path),
        "variables": {v.name.split(":")[0]: bool(v.trainable) for v in variables},
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


SPINNING_UP = {
    "ppo": ("tanh", ("pi", "v")),
    "ppo_categorical": ("elu", ("pi", "v")),
    "ddpg": ("relu", ("main/pi", "main/q", "target/pi", "target/q")),
    "td3": ("elu", ("main/pi", "main/q1", "main/q2", "target/pi", "target/q1", "target/q2")),
    "sac": ("tanh", ("main/pi", "main/q1", "main/q2", "target/pi", "target/q1", "target/q2")),
}
"""By algorithm, the activation of the hidden layers, and the variable scopes of the networks."""


def build_spinningup(folder: Path) -> dict[str, Any]:
    """Agents of spinup/algos/tf1/*/core.py as utils/logx.py saves them, and what their graphs compute.

    Observations have 4 values, actions 2 (of 2 choices if categorical) with a limit of 2.
    """
    import tensorflow as tf

    return {name: _spinningup(tf, folder / name / "tf1_save", name) for name in SPINNING_UP}


def _spinningup(tf: Any, path: Path, name: str) -> dict[str, Any]:
    v1, (activation, scopes) = tf.compat.v1, SPINNING_UP[name]
    function, generator = getattr(tf.nn, activation), np.random.default_rng(3)

    def dense(x: Any, number: int, units: int, activate: Any = None) -> Any:
        with v1.variable_scope(f"dense_{number}" if number else "dense"):
            shape = (int(x.shape[-1]), units)
            draws = [generator.normal(size=shape) * shape[0] ** -0.5, generator.normal(size=units) / 4]
            kernel, bias = (
                v1.get_variable(name, initializer=tf.constant(array, tf.float32))
                for name, array in zip(("kernel", "bias"), draws, strict=True)
            )
            y = tf.nn.bias_add(x @ kernel, bias, name="BiasAdd")
            return y if activate is None else activate(y)

    def policy(x: Any) -> tuple[Any, Any]:
        """Return what the action is made of, and a sample of it."""
        x = dense(dense(x, 0, 17, function), 1, 9, function)
        mean = dense(x, 2, 2)
        if name == "ppo_categorical":
            return mean, tf.squeeze(v1.multinomial(mean, 1), axis=1)
        if name in ("ddpg", "td3"):
            return (2 * tf.tanh(mean),) * 2
        if name == "ppo":
            deviation = tf.exp(v1.get_variable("log_std", initializer=-0.5 * np.ones(2, np.float32)))
            return mean, mean + v1.random_normal(tf.shape(mean)) * deviation
        deviation = tf.exp(tf.clip_by_value(dense(x, 3, 2), -20, 2))
        return 2 * tf.tanh(mean), 2 * tf.tanh(mean + v1.random_normal(tf.shape(mean)) * deviation)

    observations = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        x, a = (v1.placeholder(tf.float32, [None, width]) for width in (4, 2))
        outputs: dict[str, Any] = {}
        for scope in scopes:
            with v1.variable_scope(scope):
                if scope.endswith("pi"):
                    outputs[scope] = policy(x)
                else:
                    inputs = x if scope == "v" else tf.concat([x, a], axis=-1)
                    outputs[scope] = dense(dense(dense(inputs, 0, 17, function), 1, 9, function), 2, 1)[:, 0]
        mean, sample = outputs.pop(scopes[0])
        for losses in ([mean], [outputs[scope] for scope in scopes[1:] if "target" not in scope]):
            loss = sum(map(tf.reduce_mean, losses))
            learned = [item for item in v1.trainable_variables() if v1.gradients(loss, item)[0] is not None]
            v1.train.AdamOptimizer().minimize(loss, var_list=learned)
        session.run(v1.global_variables_initializer())
        named = {"pi": sample, **({"mu": mean} if name == "sac" else {})}
        named |= {scope.rpartition("/")[2]: outputs[scope] for scope in scopes[1:] if "target" not in scope}
        v1.saved_model.simple_save(
            session, str(path), {"x": x, "a": a} if "v" not in scopes else {"x": x}, named
        )
        return {
            "observations": observations.tolist(),
            "outputs": session.run(mean, {x: observations}).tolist(),
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


def list_registry(_: Path) -> dict[str, Any]:
    """The operations of the installed TensorFlow: their state, functions, and texts that they take."""
    from tensorflow.core.framework import op_def_pb2, types_pb2
    from tensorflow.python.client import pywrap_tf_session

    listed = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    return {
        op.name: {
            "stateful": op.is_stateful,
            "functions": any("func" in attribute.type for attribute in op.attr),
            "strings": [
                *(argument.name for argument in op.input_arg if argument.type == types_pb2.DT_STRING),
                *(attribute.name for attribute in op.attr if "string" in attribute.type),
            ],
        }
        for op in listed.op
    }


def _save_function(tf: Any, path: Path, function: Any, *inputs: Any, **parts: Any) -> None:
    """Save a module with one function; `parts` are what it uses, as attributes."""
    module = tf.Module()
    module.w = tf.Variable([1.0])
    for name, part in parts.items():
        setattr(module, name, part)
    module.run = tf.function(function, input_signature=list(inputs))
    tf.saved_model.save(module, str(path))


def build_pure(folder: Path) -> dict[str, Any]:
    """Ordinary models, each with the number of its nodes."""
    import tensorflow as tf

    top = folder / "pure"
    top.mkdir()
    for build in (_pure_functions, _pure_tables, _pure_keras, _pure_tensorflow1):
        build(tf, top)
    counts = {}
    for path in sorted(top.iterdir()):
        model = path / "saved_model.pb"
        if model.is_file():
            graphs = _parse_model(model).meta_graphs
            functions = [f for graph in graphs for f in graph.graph_def.library.function]
            nodes = sum(len(graph.graph_def.node) for graph in graphs) + sum(
                len(f.node_def) for f in functions
            )
            counts[path.name] = {"nodes": nodes}
    return counts


def _parse_model(path: Path) -> Any:
    from tensorflow.core.protobuf import saved_model_pb2

    return saved_model_pb2.SavedModel.FromString(path.read_bytes())


def _pure_functions(tf: Any, top: Path) -> None:
    vector, text = tf.TensorSpec([4], tf.float32), tf.TensorSpec([None], tf.string)
    generator = tf.random.Generator.from_seed(1)

    def loops(x: Any) -> Any:
        x = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 2.0), (0, x))[1]
        x = tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: -x)
        return tf.map_fn(lambda y: y * 3.0, x) + tf.scan(lambda a, b: a + b, x)

    def random(x: Any) -> Any:
        x += tf.random.normal([4]) + generator.normal([4]) + tf.random.stateless_uniform([4], [1, 2])
        return tf.random.shuffle(x) + tf.random.gamma([4], 1.0) + tf.random.truncated_normal([4])

    def example(x: Any) -> Any:
        features = {"a": tf.io.FixedLenFeature([2], tf.float32), "b": tf.io.VarLenFeature(tf.int64)}
        parsed = tf.io.parse_example(x, features)
        return parsed["a"], tf.sparse.to_dense(parsed["b"])

    def image(x: Any) -> Any:
        resized = tf.image.resize(tf.io.decode_jpeg(x[0], channels=3), [8, 8])
        return tf.io.encode_png(tf.cast(resized, tf.uint8)), tf.io.decode_image(x[0])

    def words(x: Any) -> Any:
        parts = tf.strings.split(tf.strings.lower(x))
        return tf.strings.reduce_join(tf.strings.regex_replace(x, "[0-9]", "#")), parts.to_tensor("")

    def dataset(x: Any) -> Any:
        target = tf.data.Dataset.from_tensor_slices(x).map(lambda y: y * 2).filter(lambda y: y > 0).cache()
        return target.batch(2).prefetch(1).shuffle(3).reduce(0.0, lambda a, b: a + tf.reduce_sum(b))

    def printed(x: Any) -> Any:
        tf.print("x", x)
        tf.debugging.assert_positive(x)
        return tf.debugging.check_numerics(x, "x")

    def algebra(x: Any) -> Any:
        square = tf.linalg.diag(x) + tf.eye(4)
        return tf.linalg.inv(square) @ tf.linalg.svd(square)[1] + tf.einsum("ij,jk->ik", square, square)

    def audio(x: Any) -> Any:
        return tf.abs(tf.signal.stft(tf.audio.decode_wav(x[0], desired_channels=1)[0][:, 0], 64, 32))

    _save_function(tf, top / "random", random, vector, generator=generator)
    for function in (loops, dataset, printed, algebra):
        _save_function(tf, top / function.__name__, function, vector)
    for function in (example, image, words, audio):
        _save_function(tf, top / function.__name__, function, text)
    _save_function(tf, top / "compiled", tf.function(tf.nn.relu, jit_compile=True), vector)
    tf.saved_model.save(tf.saved_model.load(str(top / "random")), str(top / "saved_again"))
    options = tf.saved_model.SaveOptions(save_debug_info=True)
    tf.saved_model.save(tf.saved_model.load(str(top / "loops")), str(top / "debug_info"), options=options)


def _text_table(tf: Any, path: Path) -> Any:
    path.write_text("a\nb\n")
    index = tf.lookup.TextFileIndex
    source = tf.lookup.TextFileInitializer(
        str(path), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER
    )
    return tf.lookup.StaticHashTable(source, -1)


def _pure_tables(tf: Any, top: Path) -> None:
    text = tf.TensorSpec([None], tf.string)
    table = _text_table(tf, top / "words.txt")
    _save_function(tf, top / "text_table", table.lookup, text, table=table)
    tf.saved_model.save(tf.saved_model.load(str(top / "text_table")), str(top / "text_table_again"))
    mutable = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)

    def insert(x: Any) -> Any:
        mutable.insert(x, tf.ones(tf.shape(x), tf.int64))
        return mutable.lookup(x)

    _save_function(tf, top / "mutable_table", insert, text, table=mutable)


def _pure_keras(tf: Any, top: Path) -> None:
    import keras

    layers = keras.layers
    layer = layers.LSTM(3, return_sequences=True)
    keras.Sequential([keras.Input((5, 2)), layer, layers.GRU(2)]).export(
        str(top / "recurrent"), verbose=False
    )
    words = keras.Input((1,), dtype="string")
    lookup = layers.StringLookup(vocabulary=["a", "b"])
    model = keras.Model(words, layers.Embedding(4, 2)(lookup(words)))
    model.export(str(top / "string_lookup"), verbose=False)
    lookup = layers.StringLookup(vocabulary=str(top / "words.txt"))
    keras.Model(words, lookup(words)).export(str(top / "vocabulary"), verbose=False)
    augmented = [layers.RandomFlip(), layers.Rescaling(0.5), layers.Conv2D(2, 3), layers.Flatten()]
    keras.Sequential([keras.Input((8, 8, 1)), *augmented]).export(str(top / "augmented"), verbose=False)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile("adam", "mse")
    model.train_on_batch(np.zeros((2, 3)), np.zeros((2, 1)))
    tf.saved_model.save(model, str(top / "trained"))


def _pure_tensorflow1(tf: Any, top: Path) -> None:
    """A table from an asset, a graph with several savers, a `.meta` file, and frozen graphs."""
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = v1.placeholder(tf.string, [None], "x")
        weight = v1.get_variable("w", [3, 2])
        y = tf.gather(weight, _text_table(tf, top / "words1.txt").lookup(x) + 1)
        v1.train.AdamOptimizer().minimize(tf.reduce_mean(y))
        v1.summary.scalar("mean", tf.reduce_mean(y))
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        v1.train.Saver([weight], sharded=True, name="best")
        saver = v1.train.Saver()
        builder = v1.saved_model.builder.SavedModelBuilder(str(top / "builder"))
        info = v1.saved_model.build_tensor_info
        signature = v1.saved_model.build_signature_def({"x": info(x)}, {"y": info(y)}, "m")
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": signature},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()
    with tf.Graph().as_default() as graph, v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 3], "x")
        y = tf.identity(x @ v1.get_variable("w", [3, 2]), "y")
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver()
        (top / "session").mkdir()
        saver.save(session, str(top / "session" / "model.ckpt"))
        v1.train.write_graph(graph, str(top / "session"), "graph.pb", as_text=False)
        frozen = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["y"])
        (top / "session" / "frozen.pb").write_bytes(frozen.SerializeToString())


# Operations of graphs that act, each with the graph's function of one string.


def _acting_operations(tf: Any) -> dict[str, tuple[Any, list[str]]]:
    raw = tf.raw_ops
    path = "/nonexistent/ckpttool"
    packed = _packed_dataset(tf)

    def nested(x: Any) -> Any:
        return tf.cond(tf.size(x) > 0, lambda: tf.function(_writer(tf))(x), lambda: x)

    def loop(x: Any) -> Any:
        return tf.while_loop(lambda i: i < 2, lambda i: _writer(tf)(x, i + 1), (0,))[0]

    def dataset(x: Any) -> Any:
        return _count(tf, tf.data.Dataset.range(2).map(lambda i: _writer(tf)(x, i)))

    def unpacked(graph: Any) -> Any:
        variant = raw.DatasetFromGraph(graph_def=graph)
        return raw.DatasetToSingleElement(dataset=variant, output_types=[tf.int64], output_shapes=[[]])[0]

    def table(x: Any) -> Any:
        lookup = raw.HashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
        raw.InitializeTableFromTextFileV2(table_handle=lookup, filename=path, key_index=-2, value_index=-1)
        return raw.LookupTableFindV2(table_handle=lookup, keys=x, default_value=tf.constant(0, tf.int64))

    def summary(x: Any) -> Any:
        writer = raw.SummaryWriter()
        raw.CreateSummaryFileWriter(
            writer=writer, logdir=path, max_queue=1, flush_millis=1, filename_suffix="x"
        )
        return x

    save = {"tensor_names": ["a"], "shape_and_slices": [""]}
    collective = {"group_size": 2, "group_key": 1, "instance_key": 1}
    return {
        "write": (_writer(tf), ["WriteFile"]),
        "write_nested": (nested, ["WriteFile"]),
        "write_loop": (loop, ["WriteFile"]),
        "write_dataset": (dataset, ["WriteFile"]),
        "packed": (lambda _: unpacked(tf.constant(packed)), ["DatasetFromGraph", "WriteFile"]),
        "compressed": (
            lambda x: unpacked(tf.io.decode_compressed(x, "ZLIB")),
            ["DatasetFromGraph"],
        ),
        "save": (lambda x: _then(x, raw.SaveV2(prefix=path, tensors=[x], **save)), ["SaveV2"]),
        "save_argument": (lambda x: _then(x, raw.SaveV2(prefix=x, tensors=[x], **save)), ["SaveV2"]),
        "restore": (lambda _: raw.RestoreV2(prefix=path, dtypes=[tf.float32], **save)[0], ["RestoreV2"]),
        "merge": (
            lambda x: _then(x, raw.MergeV2Checkpoints(checkpoint_prefixes=[x], destination_prefix=path)),
            ["MergeV2Checkpoints"],
        ),
        "table": (table, ["InitializeTableFromTextFileV2"]),
        "abort": (lambda x: _then(x, raw.Abort()), ["Abort"]),
        "python": (lambda x: tf.py_function(lambda v: v, [x], tf.string), ["EagerPyFunc"]),
        "numpy": (lambda x: tf.numpy_function(lambda v: v, [x], tf.string), ["PyFunc"]),
        "read": (tf.io.read_file, ["ReadFile"]),
        "matching": (tf.io.matching_files, ["MatchingFiles"]),
        "debug": (lambda x: raw.DebugIdentity(input=x, debug_urls=[f"file://{path}"]), ["DebugIdentity"]),
        "print": (lambda x: _then(x, tf.print(x, output_stream=f"file://{path}")), ["PrintV2"]),
        "summary": (summary, ["SummaryWriter", "CreateSummaryFileWriter"]),
        "filesystem": (
            lambda x: _then(x, raw.FileSystemSetConfiguration(scheme=x, key=x, value=x)),
            ["FileSystemSetConfiguration"],
        ),
        "text": (lambda x: _count(tf, tf.data.TextLineDataset(x)), ["TextLineDataset"]),
        "records": (lambda x: _count(tf, tf.data.TFRecordDataset(x)), ["TFRecordDataset"]),
        "cache": (lambda x: _count(tf, tf.data.Dataset.range(2).cache(x)), ["CacheDatasetV2"]),
        "snapshot": (lambda _: _count(tf, tf.data.Dataset.range(2).snapshot(path)), ["SnapshotDatasetV2"]),
        "reduce": (
            lambda _: raw.CollectiveReduceV2(
                input=[1.0], ordering_token=[], merge_op="Add", final_op="Id", **collective
            ),
            ["CollectiveReduceV2"],
        ),
        "mapped": (
            lambda _: raw.ImmutableConst(dtype=tf.float32, shape=[2], memory_region_name=path),
            ["ImmutableConst"],
        ),
        "proto": (
            lambda x: tf.io.decode_proto(x, "a.B", ["c"], [tf.int32], descriptor_source=path)[1][0],
            ["DecodeProtoV2"],
        ),
        "tpu": (lambda _: raw.ConfigureDistributedTPU(), ["ConfigureDistributedTPU"]),
        "remote": (
            lambda x: raw.RemoteCall(
                target=x, args=[x], Tout=[tf.string], f=tf.function(tf.identity).get_concrete_function(x)
            )[0],
            ["RemoteCall"],
        ),
    }


def _then(x: Any, _: Any) -> Any:
    """Return `x`; the other argument is an operation of the graph."""
    return x


def _writer(tf: Any) -> Any:
    def write(x: Any, result: Any = None) -> Any:
        tf.io.write_file("/nonexistent/ckpttool", x)
        return x if result is None else result

    return write


def _count(tf: Any, dataset: Any) -> Any:
    return dataset.reduce(tf.constant(0), lambda count, _: count + 1)


def _packed_dataset(tf: Any) -> bytes:
    dataset = tf.data.Dataset.range(2).map(lambda i: _writer(tf)("x", i))
    graph = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=1,
    )
    return bytes(graph.numpy())


def build_acting(folder: Path) -> dict[str, Any]:
    """Models that do more than compute, each with the operations that do."""
    import tensorflow as tf

    top = folder / "acting"
    top.mkdir()
    text = tf.TensorSpec([], tf.string, "text")
    models = {}
    for name, (function, operations) in _acting_operations(tf).items():
        _save_function(tf, top / name, function, text)
        models[name] = operations
    return models | _acting_savers(tf, top) | _acting_tables(tf, top)


def _change_graph(path: Path, change: Any) -> None:
    model = _parse_model(path / "saved_model.pb")
    change(model.meta_graphs[0])
    (path / "saved_model.pb").write_bytes(model.SerializeToString())


def _acting_savers(tf: Any, top: Path) -> dict[str, list[str]]:
    """Savers with other paths, or run by others."""
    v1 = tf.compat.v1
    for name, scope in (("signature_save", ""), ("signature_saver", "save/")):
        with tf.Graph().as_default(), v1.Session() as session, v1.name_scope(scope):
            weight = v1.get_variable("w", [2])
            path = tf.constant("model", name="Const")
            saved = tf.raw_ops.SaveV2(
                prefix=path, tensor_names=["a"], shape_and_slices=[""], tensors=[weight]
            )
            with tf.control_dependencies([saved]):
                output = tf.identity(weight)
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, str(top / name), {"w": weight}, {"y": output})

    def suffix(meta: Any) -> None:
        for function in meta.graph_def.library.function:
            for node in function.node_def:
                if list(node.attr["value"].tensor.string_val) == [b"_temp/part"]:
                    node.attr["value"].tensor.string_val[0] = b"/../../x"

    def called(meta: Any) -> None:
        nodes = meta.graph_def.node
        saver = meta.saver_def.save_tensor_name.split(":")[0]
        extra = nodes.add()
        extra.CopyFrom(next(node for node in nodes if node.name == saver))
        extra.name = "extra"
        next(node for node in nodes if node.op == "NoOp").input.append("^extra")

    def default(meta: Any) -> None:
        for node in meta.graph_def.node:
            if node.name == "save/filename/input":
                node.attr["value"].tensor.string_val[0] = b"/nonexistent/ckpttool"

    for name, change in (("suffix", suffix), ("called", called)):
        _save_function(tf, top / name, tf.identity, tf.TensorSpec([], tf.string))
        _change_graph(top / name, change)
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", [2])
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(top / "default"), {"w": weight}, {"y": weight * 2})
    _change_graph(top / "default", default)
    names = {key: ["SaveV2"] for key in ("signature_save", "signature_saver", "suffix", "called")}
    return names | {"default": ["RestoreV2", "SaveV2"]}


def _acting_tables(tf: Any, top: Path) -> dict[str, list[str]]:
    """Tables whose asset is outside the model's folder, or is not the one that is read."""
    text = tf.TensorSpec([None], tf.string)
    table = _text_table(tf, top / "words.txt")

    def outside(meta: Any) -> None:
        meta.asset_file_def[0].filename = "../../x"

    def other(meta: Any) -> None:
        meta.asset_file_def[0].tensor_info.name = "elsewhere:0"

    def assigned(meta: Any) -> None:
        """Assign a constant to the variable that has the path of the asset."""
        nodes = meta.graph_def.node
        assign = next(node for node in nodes if "asset_path_initializer" in node.input)
        constant = nodes.add(name="path", op="Const")
        constant.attr["dtype"].type = tf.string.as_datatype_enum
        constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/nonexistent/ckpttool"))
        extra = nodes.add()
        extra.CopyFrom(assign)
        extra.name = "extra"
        extra.input[1] = "path"

    def shared(meta: Any) -> None:
        """Give the variable of the asset's path a second handle, to which a constant is assigned."""
        assigned(meta)
        nodes = {node.name: node for node in meta.graph_def.node}
        extra = meta.graph_def.node.add()
        extra.CopyFrom(nodes[nodes["extra"].input[0]])
        extra.name = "second"
        nodes["extra"].input[0] = "second"

    def bound(meta: Any) -> None:
        """Bind another object than the asset to the function that fills the table."""
        nodes = meta.object_graph_def.nodes
        for node in nodes:
            if node.WhichOneof("kind") == "asset":
                node.constant.operation = "Const"

    changes = {"asset_outside": outside, "asset_other": other, "asset_assigned": assigned}
    changes |= {"asset_shared": shared, "asset_bound": bound}
    for name, change in changes.items():
        _save_function(tf, top / name, table.lookup, text, table=table)
        _change_graph(top / name, change)
    return {key: ["InitializeTableFromTextFileV2"] for key in changes}
