"""TensorFlow as the referee: random trees, strange objects, huge files; every tensor as it reads them."""

from __future__ import annotations

import hashlib
import importlib.util
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool.core import Checkpoint, Leaf, display
from ckpttool.formats import tf_bundle
from tests.golden_texts import Golden

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))
run_each = runpy.run_path(str(Path(__file__).with_name("tensorflow_child.py")))["run_each"]
CORPUS = Path(__file__).parents[2] / "shared" / "corpus" / "tf"
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
TREES = 12
FAR = (5 << 30) - 64  # in a file of 5 GiB, most of which is a hole

pytestmark = [
    pytest.mark.tensorflow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
without_keras_2 = pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)

NUMBERS = (
    *("float16", "float32", "float64", "bfloat16", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e5m2", "float8_e4m3fn"),
)
# TensorFlow has no variables of these.
CONSTANTS = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
# TensorFlow's own reader puts together slices of these.
CUT = ("float32", "float64", "int8", "int16", "int32", "int64", "uint8")
NARROW = {"int4": (-8, 8), "uint4": (0, 16), "int2": (-2, 2), "uint2": (0, 4)}
QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint16": "int16", "quint16": "uint16", "qint32": "int32"}


def sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def leaves(checkpoint: Checkpoint) -> dict[str, Leaf]:
    return {leaf.key: leaf for _, leaf in checkpoint.tree.tensors()}


def spelled(checkpoint: Checkpoint) -> dict[str, Leaf]:
    return {display(path): leaf for path, leaf in checkpoint.tree.tensors()}


# These functions run in a child process.


def build(folder: Path) -> dict[str, Any]:
    """Save everything; return by prefix what TensorFlow lists and reads."""
    import tensorflow as tf

    for seed in range(TREES):
        _save_random(tf, folder, seed)
    _save_ten_thousand(tf, folder)
    _save_by_operation(tf, folder)
    _save_strange(tf, folder)
    _save_registered(tf, folder)
    _save_policy(tf, folder)
    _save_keras_3(tf, folder)
    _save_far(folder)
    prefixes = sorted(str(path)[: -len(".index")] for path in folder.glob("*.index"))
    facts: dict[str, Any] = {Path(prefix).name: _facts(tf, prefix) for prefix in prefixes}
    facts["corpus"] = {prefix: _listed(tf, prefix) for prefix in corpus_prefixes()}
    return facts


def corpus_prefixes() -> list[str]:
    return sorted(str(path)[: -len(".index")] for path in CORPUS.rglob("*.index"))


def _listed(tf: Any, prefix: str) -> dict[str, list[int]]:
    return {key: list(shape) for key, shape in tf.train.list_variables(prefix)}


def _facts(tf: Any, prefix: str) -> dict[str, Any]:
    reader = tf.train.load_checkpoint(prefix)
    facts, types = {}, reader.get_variable_to_dtype_map()
    for key, shape in _listed(tf, prefix).items():
        fact: dict[str, Any] = {"dtype": types[key].name, "shape": shape}
        if key == GRAPH:
            continue
        if types[key] == tf.string:
            values = np.asarray(reader.get_tensor(key), dtype=object).reshape(-1).tolist()
            fact["strings"] = [value.decode("latin-1") for value in values]
        elif types[key] != tf.variant:
            fact["sha256"] = sha256(np.ascontiguousarray(reader.get_tensor(key)).tobytes())
        facts[key] = fact
    return facts


def _value(tf: Any, dice: np.random.Generator, types: tuple[str, ...]) -> Any:
    import ml_dtypes

    shapes = ((), (1,), (3,), (2, 3), (4, 1, 2), (0,), (3, 0, 2), (1,) * 8, (257,))
    shape = shapes[dice.integers(len(shapes))]
    count = int(np.prod(shape))
    name = types[dice.integers(len(types))]
    if name == "string":
        texts = [dice.bytes(int(dice.choice([0, 1, 5, 127, 128, 3000]))) for _ in range(count)]
        return tf.constant(texts, tf.string, shape) if count else tf.zeros(shape, tf.string)
    if name in NARROW:
        numbers = dice.integers(*NARROW[name], count).reshape(shape)
        return tf.constant(numbers.astype(getattr(ml_dtypes, name)))
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if name == "bool":
        return tf.constant(dice.integers(0, 2, count).astype(bool).reshape(shape))
    return tf.constant(np.frombuffer(dice.bytes(count * dtype.itemsize), dtype).reshape(shape))


def _grown(tf: Any, dice: np.random.Generator, depth: int, known: list[Any], types: tuple[str, ...]) -> Any:
    names = ("w", "b", "a.b", "c_d", "x-y", "layer", "l1", "net", "0", "11")
    kind = int(dice.integers(5)) if depth else 4
    if known and dice.random() < 0.1:
        return known[int(dice.integers(len(known)))]  # a tied variable
    if kind == 4:
        known.append(tf.Variable(_value(tf, dice, types), name=f"scope{depth}/v{len(known)}"))
        return known[-1]
    parts = [_grown(tf, dice, depth - 1, known, types) for _ in range(int(dice.integers(1, 6)))]
    if kind < 2:
        module = tf.Module()
        for name, part in zip(dice.permutation(names[3:8]), parts, strict=False):
            setattr(module, str(name).replace("-", "_"), part)
        return module
    if kind == 2:
        return {f"{names[int(dice.integers(len(names)))]}/{n}": part for n, part in enumerate(parts)}
    return parts


def _save_random(tf: Any, folder: Path, seed: int) -> None:
    dice = np.random.default_rng(seed)
    options = None
    types = (*NUMBERS, *NARROW, "string")
    if seed % 3 == 0:
        policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=int(dice.integers(256, 2000)))
        options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
        types = CUT
    known: list[Any] = []
    root = tf.train.Checkpoint(**{f"part{n}": tf.Module() for n in range(3)})
    for part in (root.part0, root.part1, root.part2):
        part.holds = _grown(tf, dice, 4, known, types)
        part.own = tf.Variable(_value(tf, dice, types))
    root.write(str(folder / f"tree-{seed}"), options=options)


def _save_ten_thousand(tf: Any, folder: Path) -> None:
    """Save them by one operation, with the graph of objects that would hold them: a variable takes 1 ms."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    values: dict[str, Any] = {}

    def below(owner: Any, name: str) -> Any:
        owner.children.add(node_id=len(graph.nodes), local_name=name)
        return graph.nodes.add()

    blocks = below(below(graph.nodes.add(), "root"), "blocks")
    for block in range(100):
        parts = below(below(blocks, str(block)), "parts")
        for n in range(100):
            key = f"root/blocks/{block}/parts/part{n}/.ATTRIBUTES/VARIABLE_VALUE"
            attribute = below(parts, f"part{n}").attributes.add(name="VARIABLE_VALUE", checkpoint_key=key)
            attribute.full_name = "Variable"
            values[key] = tf.constant(float(n))
    values[GRAPH] = tf.constant(graph.SerializeToString())
    tf.raw_ops.SaveV2(
        prefix=str(folder / "ten_thousand"),
        tensor_names=list(values),
        shape_and_slices=[""] * len(values),
        tensors=list(values.values()),
    )


def _save_by_operation(tf: Any, folder: Path) -> None:
    """Save every type that `tf.io.write`-like operations take, quantized ones among them, by name."""
    import ml_dtypes
    from tensorflow.python.framework import dtypes

    values = {
        name: tf.constant(np.arange(low, high).astype(getattr(ml_dtypes, name)))
        for name, (low, high) in NARROW.items()
    }
    for name in CONSTANTS:
        values[name] = tf.constant(np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)))
    for name, plain in QUANTIZED.items():
        values[name] = tf.bitcast(tf.constant(np.arange(5).astype(plain)), getattr(dtypes, name))
    tf.raw_ops.SaveV2(
        prefix=str(folder / "operation"),
        tensor_names=list(values),
        shape_and_slices=[""] * len(values),
        tensors=list(values.values()),
    )


def _save_strange(tf: Any, folder: Path) -> None:
    auto = tf.__internal__.tracking.AutoTrackable

    class Odd(auto):  # type: ignore[misc,valid-type]
        def _serialize_to_tensors(self) -> Any:
            return {"a.b/c": tf.constant([1.0, 2.0]), "plain": tf.constant([3.0]), "d..e": tf.constant(4.0)}

        def _restore_from_tensors(self, restored: Any) -> Any:
            return tf.no_op()

    class State(tf.train.experimental.PythonState):  # type: ignore[misc]
        def serialize(self) -> str:
            return '{"epoch": 3}'

        def deserialize(self, value: Any) -> None:
            pass

    class Replay(tf.Module):
        """As TF-Agents' TFUniformReplayBuffer: a table of variables, and the last id."""

        def __init__(self) -> None:
            super().__init__(name="TFUniformReplayBuffer")
            self._table = tf.Module()
            self._table._slots = [
                tf.Variable(tf.zeros([7, 3]), name="TFUniformReplayBuffer/Table/observation"),
                tf.Variable(tf.zeros([7], tf.int64), name="TFUniformReplayBuffer/Table/action"),
            ]
            self._last_id = tf.Variable(-1, dtype=tf.int64, name="TFUniformReplayBuffer/last_id")

    root = tf.train.Checkpoint(odd=Odd(), state=State(), buffer=Replay(), w=tf.Variable([1.0]))
    root.generator = tf.random.Generator.from_seed(7)
    root.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
    root.table.insert(["x", "y"], [1.0, 2.0])
    root.dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, 0.0, -1, -2)
    root.dense.insert([1, 2], [1.0, 2.0])
    root.dataset = iter(tf.data.Dataset.range(10))
    root.holder = tf.Module()
    root.holder.nested = {"p.q/r": root.w, "inner": {"s/t": tf.Variable([2.0])}}
    root.write(str(folder / "strange"))


def _save_registered(tf: Any, folder: Path) -> None:
    from tensorflow.python.saved_model import registration

    class Stack(tf.__internal__.tracking.AutoTrackable):  # type: ignore[misc]
        def __init__(self, value: Any) -> None:
            self.value = value

    def save(trackables: Any, file_prefix: Any) -> Any:
        names = [f"stack..{name}.x" for name in trackables]
        values = [stack.value for stack in trackables.values()]
        tf.raw_ops.SaveV2(
            prefix=file_prefix, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values
        )
        return file_prefix

    registration.register_checkpoint_saver(
        name="Stacks",
        predicate=lambda kind: isinstance(kind, Stack),
        save_fn=save,
        restore_fn=lambda trackables, merged_prefix: None,
    )
    root = tf.train.Checkpoint(stack=Stack(tf.constant([1.0, 2.0])), w=tf.Variable(3.0))
    root.write(str(folder / "registered"))


def _save_policy(tf: Any, folder: Path) -> None:
    """As TF-Agents' PolicySaver.save_checkpoint: the policy's networks are reached by no edge."""
    names = [
        *("QNetwork/EncodingNetwork/dense/kernel", "QNetwork/EncodingNetwork/dense/bias"),
        *("QNetwork/dense_1/kernel", "QNetwork/dense_1/bias", "Twin/kernel", "Twin/kernel"),
        "QNetwork/norm/moving_mean",
    ]
    policy = tf.Module()
    policy.model_variables = [tf.Variable([float(n)], name=name) for n, name in enumerate(names)]
    root = tf.train.Checkpoint(
        policy=policy,
        model_variables=policy.model_variables,
        train_step=tf.Variable(5, dtype=tf.int64, name="train_step"),
        one_module=[tf.Variable([1.0], name="layer/kernel"), tf.Variable([1.0], name="layer/bias")],
    )
    root.write(str(folder / "policy"))


def _save_keras_3(tf: Any, folder: Path) -> None:
    import keras

    inputs = keras.Input([4])
    hidden = keras.layers.Dense(5, activation="relu")(inputs)
    hidden = keras.layers.Dropout(0.1)(keras.layers.BatchNormalization()(hidden))
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    root = tf.train.Checkpoint(model=model)
    momentum = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9}}
    for name in ("SGD", "RMSprop", "Adam", "AdamW", "Adamax", "Ftrl", "Lion"):
        optimizer = getattr(keras.optimizers, name)(**momentum.get(name, {}))
        optimizer.build(model.trainable_variables)
        setattr(root, name.lower(), optimizer)
    root.write(str(folder / "keras_3"))


def _save_far(folder: Path) -> None:
    """A bundle whose one shard is a hole of 5 GiB with 64 bytes at its end."""
    value = np.arange(16, dtype=np.float32).tobytes()
    shard = folder / "far.data-00000-of-00001"
    with shard.open("wb") as stream:
        stream.truncate(FAR + 64)
        stream.seek(FAR)
        stream.write(value)
        stream.seek((1 << 32) + 1)
        stream.write(value[:16])
    entries = {
        b"": W["header"](),
        b"far": W["entry"](1, W["shape"](4, 4), FAR, 64, W["masked"](value)),
        b"past_32_bits": W["entry"](1, W["shape"](4), (1 << 32) + 1, 16, W["masked"](value[:16])),
    }
    (folder / "far.index").write_bytes(W["table"](sorted(entries.items())))


def build_keras_2(folder: Path) -> dict[str, Any]:
    """Save a Keras 2 model with every generation of its optimizers."""
    import tensorflow as tf
    import tf_keras as keras

    model = keras.Sequential(
        [keras.layers.Dense(3, activation="tanh", input_shape=(4,)), keras.layers.BatchNormalization()]
    )
    for name, make in (
        ("legacy", lambda: keras.optimizers.legacy.Adam(amsgrad=True)),
        ("legacy_sgd", lambda: keras.optimizers.legacy.SGD(momentum=0.9)),
        ("modern", lambda: keras.optimizers.Adam()),
        ("modern_rmsprop", lambda: keras.optimizers.RMSprop(momentum=0.9)),
    ):
        optimizer = make()
        gradients = [tf.ones_like(variable) for variable in model.trainable_variables]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(folder / name))
    model.save_weights(str(folder / "weights"))
    prefixes = sorted(str(path)[: -len(".index")] for path in folder.glob("*.index"))
    return {Path(prefix).name: _facts(tf, prefix) for prefix in prefixes}


# What we read of them.

Written = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    programs = ["build", *(["build_keras_2"] if importlib.util.find_spec("tf_keras") else [])]
    folders = {name: tmp_path_factory.mktemp(name) for name in programs}
    return {name: (folders[name], facts) for name, facts in run_each(__file__, folders).items()}


@pytest.fixture(scope="module")
def written(both: dict[str, Written]) -> Iterator[Written]:
    folder, facts = both["build"]
    yield folder, facts
    (folder / "far.data-00000-of-00001").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def keras_2(both: dict[str, Written]) -> Written:
    return both["build_keras_2"]


def compare(prefix: Path, facts: dict[str, Any]) -> Checkpoint:
    """Assert that every tensor is listed and read as TensorFlow does."""
    checkpoint = tf_bundle.read(str(prefix))
    listed = leaves(checkpoint)
    assert listed.keys() == facts.keys()
    for key, fact in facts.items():
        leaf = listed[key]
        assert (leaf.dtype, list(leaf.shape)) == (fact["dtype"], fact["shape"]), key
        if "strings" in fact:
            assert [text.decode("latin-1") for text in leaf.strings()] == fact["strings"], key
        elif "sha256" in fact:
            assert sha256(leaf.read()) == fact["sha256"], key
    names = list(checkpoint.tree.names.values())
    assert len(names) == len(set(names))
    return checkpoint


@pytest.mark.parametrize("seed", range(TREES))
def test_random_trees(written: Written, seed: int) -> None:
    folder, facts = written
    checkpoint = compare(folder / f"tree-{seed}", facts[f"tree-{seed}"])
    # TensorFlow's policy loses tensors that its graph names; they are noted, and in neither listing.
    assert len(checkpoint.notes) <= (seed % 3 == 0)
    assert all("VARIABLE_VALUE" in note and note.endswith("index") for note in checkpoint.notes)


def test_the_random_trees_have_every_type_and_several_shards(written: Written) -> None:
    folder, facts = written
    trees = [facts[f"tree-{seed}"] for seed in range(TREES)]
    assert {fact["dtype"] for tree in trees for fact in tree.values()} == {*NUMBERS, *NARROW, "string"}
    assert any(len(list(folder.glob(f"tree-{seed}.data-*"))) > 2 for seed in range(TREES))
    assert any([] in [fact["shape"] for fact in tree.values()] for tree in trees)
    assert any(0 in fact["shape"] for tree in trees for fact in tree.values())
    tied = [tf_bundle.read(str(folder / f"tree-{seed}")).tree.aliases for seed in range(TREES)]
    assert any(tied)


def test_ten_thousand_variables(written: Written) -> None:
    folder, facts = written
    assert len(compare(folder / "ten_thousand", facts["ten_thousand"]).tree) == 10_000


def test_types_below_a_byte_and_quantized_ones(written: Written) -> None:
    folder, facts = written
    listed = leaves(compare(folder / "operation", facts["operation"]))
    assert {leaf.dtype for leaf in listed.values()} == {*NARROW, *CONSTANTS, *QUANTIZED}
    for name, (low, high) in NARROW.items():
        assert listed[name].array().astype(int).tolist() == list(range(low, high))
        assert len(listed[name].read()) == high - low


def test_strange_objects(written: Written) -> None:
    folder, facts = written
    checkpoint = compare(folder / "strange", facts["strange"])
    assert checkpoint.notes == ()
    roles = {tuple(str(step.value) for step in path): leaf.role for path, leaf in checkpoint.tree.tensors()}
    assert roles == {
        ("w",): "parameter",
        ("odd", "a.b/c"): "parameter",
        ("odd", "plain"): "parameter",
        ("odd", "d..e"): "parameter",
        ("state", "py_state"): "other",
        ("buffer", "_table", "_slots", "0"): "replay",
        ("buffer", "_table", "_slots", "1"): "replay",
        ("buffer", "_last_id"): "replay",
        ("generator", "_state_var"): "other",
        ("table", "table-keys"): "other",
        ("table", "table-values"): "other",
        ("dense", "table-keys"): "other",
        ("dense", "table-values"): "other",
        ("dataset", "ITERATOR_STATE"): "other",
        ("holder", "nested", "inner", "s/t"): "parameter",
    }
    keys = leaves(checkpoint).keys()
    assert "odd/.ATTRIBUTES/a...Sb..c" not in keys
    assert any(key.startswith("odd/.ATTRIBUTES/a....b..Sc") for key in keys)


def test_registered_savers_are_named(written: Written, golden: Golden) -> None:
    folder, facts = written
    checkpoint = compare(folder / "registered", facts["registered"])
    (own,) = [path for path, leaf in checkpoint.tree.tensors() if leaf.key.startswith("stack..")]
    assert [step.value for step in own] == leaves(checkpoint)[display(own)].key.split("/")
    golden("\n".join(checkpoint.notes))


def test_the_variables_of_a_saved_policy_have_names(written: Written) -> None:
    folder, facts = written
    checkpoint = compare(folder / "policy", facts["policy"])
    tree = checkpoint.tree
    result = {
        display(path): (leaf.key.split("/.A")[0], [display(a.path) for a in tree.aliases.get(path, ())])
        for path, leaf in tree.tensors()
    }
    names = {name: key for name, (key, _) in result.items()}
    assert names == {
        "model_variables/QNetwork/EncodingNetwork/dense/kernel": "model_variables/0",
        "model_variables/QNetwork/EncodingNetwork/dense/bias": "model_variables/1",
        "model_variables/QNetwork/dense_1/kernel": "model_variables/2",
        "model_variables/QNetwork/dense_1/bias": "model_variables/3",
        "model_variables/Twin/kernel/4": "model_variables/4",
        "model_variables/Twin/kernel/5": "model_variables/5",
        "model_variables/QNetwork/norm/moving_mean": "model_variables/6",
        "one_module/0": "one_module/0",
        "one_module/1": "one_module/1",
        "train_step": "train_step",
    }
    assert result["model_variables/Twin/kernel/5"][1] == ["model_variables/5", "policy/model_variables/5"]
    roles = {display(path): leaf.role for path, leaf in tree.tensors()}
    assert roles["model_variables/QNetwork/norm/moving_mean"] == "buffer"
    assert roles["train_step"] == "counter"


def test_keras_3(written: Written) -> None:
    folder, facts = written
    checkpoint = compare(folder / "keras_3", facts["keras_3"])
    parameters = [leaf for _, leaf in checkpoint.tree.tensors() if leaf.role == "parameter"]
    assert sum(leaf.size for leaf in parameters) == 4 * 5 + 5 + 2 * 5 + 5 * 2 + 2
    slots = [leaf for _, leaf in checkpoint.tree.tensors() if leaf.role == "slot"]
    assert {leaf.slot for leaf in slots} >= {"m", "v", "rms", "momentum", "accumulator", "linear", "u"}
    assert all(leaf.of in checkpoint.tree for leaf in slots)


def test_far_beyond_32_bits(written: Written) -> None:
    folder, facts = written
    shard = folder / "far.data-00000-of-00001"
    assert shard.stat().st_size == 5 << 30
    assert shard.stat().st_blocks * 512 < 1 << 20
    checkpoint = compare(folder / "far", facts["far"])
    assert leaves(checkpoint)["far"].array().reshape(-1).tolist() == list(range(16))
    assert leaves(checkpoint)["past_32_bits"].array().tolist() == [0, 1, 2, 3]


@without_keras_2
@pytest.mark.parametrize("name", ["legacy", "legacy_sgd", "modern", "modern_rmsprop", "weights"])
def test_keras_2(keras_2: Written, name: str) -> None:
    folder, facts = keras_2
    checkpoint = compare(folder / name, facts[name])
    assert checkpoint.notes == ()
    kinds = {
        "legacy": {"m", "v", "vhat"},
        "legacy_sgd": {"momentum"},
        "modern": {"m", "v"},
        "modern_rmsprop": {"rms", "momentum"},
        "weights": set(),
    }
    slots = [leaf for _, leaf in checkpoint.tree.tensors() if leaf.role == "slot"]
    assert {leaf.slot for leaf in slots} == kinds[name]
    assert all(leaf.of in checkpoint.tree for leaf in slots)
    assert len(slots) == 4 * len(kinds[name])
    parameters = [leaf for _, leaf in checkpoint.tree.tensors() if leaf.role == "parameter"]
    assert sum(leaf.size for leaf in parameters) == 4 * 3 + 3 + 2 * 3


@pytest.mark.corpus
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the shared corpus is not beside the project")
def test_the_corpus_is_listed_as_tensorflow_lists_it(written: Written) -> None:
    facts = written[1]["corpus"]
    assert facts
    for prefix, listed in facts.items():
        result = leaves(tf_bundle.read(prefix))
        shapes = {key: list(leaf.shape) for key, leaf in result.items()}
        assert shapes == {key: shape for key, shape in listed.items() if key != GRAPH}, prefix
