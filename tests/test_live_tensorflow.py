"""Live objects of TensorFlow and Keras: tf.Module's own walk and tf.train.Checkpoint are the referees."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpttool.formats import open_checkpoint
from ckpttool.networks import (
    audit,
    compare_names,
    flatten_with_path,
    live_trees,
    object_graph,
    submodules,
    tensor_identity,
    walk_values,
)
from tests import tensorflow_child

pytestmark = pytest.mark.tensorflow


class Pair(NamedTuple):
    """A named tuple: its fields are steps."""

    left: Any
    right: Any


def everything(folder: Path) -> Any:
    """Do in one child what needs no Keras 2: TensorFlow takes seconds to start."""
    parts = (walks, partial_restore, values, mixed)
    return {part.__name__: part(folder) for part in parts}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the child found out."""
    tensorflow_child.require("keras")
    return tensorflow_child.run(__file__, "everything", tmp_path_factory.mktemp("live"), once=True)


# --- In child processes ------------------------------------------------------------------------------


def random_modules(tf: Any, seed: int) -> Any:
    """Return a graph of modules with nested containers, shared variables, shared modules and cycles."""
    draw = random.Random(seed)
    modules = [tf.Module(name=f"m{n}") for n in range(draw.randint(1, 5))]
    variables = [tf.Variable(float(n), trainable=bool(n % 2)) for n in range(draw.randint(1, 4))]

    def value(depth: int) -> Any:
        kind = draw.choice(["variable", "module", "plain", "list", "tuple", "dict", "pair", "numbered"])
        if depth == 0 or kind in ("variable", "module", "plain"):
            return draw.choice([draw.choice(variables), draw.choice(modules), draw.choice([1, None, "x"])])
        several = [value(depth - 1) for _ in range(draw.randint(0, 3))]
        return {
            "list": several,
            "tuple": tuple(several),
            "dict": {draw.choice(["b", "a.b/c", "A", f"z{n}"]): v for n, v in enumerate(several)},
            "numbered": {draw.randint(-3, 12): v for v in several},
            "pair": Pair(value(depth - 1), value(depth - 1)),
        }[kind]

    for module in modules:
        for _ in range(draw.randint(0, 3)):
            setattr(module, draw.choice(["b", "a", "_c", "Z", "w10", "w9"]), value(2))
    return modules[0]


def walks(folder: Path) -> Any:
    """Return how many walks were compared, those that differ, and how many paths and cut edges there were."""
    import tensorflow as tf

    compared, paths, different = 0, 0, []
    predicates = [None, lambda v: isinstance(v, tf.Variable), lambda v: isinstance(v, tf.Module)]
    for seed in range(150):
        root = random_modules(tf, seed)
        for recursive in (True, False):
            for order in (None, lambda name: (len(name), name[::-1])):
                for number, predicate in enumerate(predicates):
                    selects = predicate or (lambda _: True)
                    name = list(
                        root._flatten(recursive, predicate, attribute_traversal_key=order, with_path=True)
                    )
                    values = walk_values(root, live_trees.is_tf_module, recursive=recursive, order=order)
                    own_walk = [
                        (tuple(step.value for step in value.path), value.value)
                        for value in values
                        if selects(value.value)
                    ]
                    compared, paths = compared + 1, paths + len(name)
                    same = [p for p, _ in name] == [p for p, _ in own_walk]
                    if not same or any(a is not b for (_, a), (_, b) in zip(name, own_walk, strict=True)):
                        different.append([seed, recursive, number])
        tree = flatten_with_path(root, enter=live_trees.is_tf_module, predicate=predicates[1])
        every = {tuple(s.value for s in p) for p in tree}
        every |= {tuple(s.value for s in a.path) for rest in tree.aliases.values() for a in rest}
        if every != {p for p, _ in root._flatten(with_path=True, predicate=predicates[1])}:
            different.append([seed, "tree"])
        if [id(m) for m in submodules(root).values()] != [id(m) for m in root.submodules]:
            different.append([seed, "submodules"])
    return {"compared": compared, "paths": paths, "different": different}


def test_paths_are_those_of_tf_module_in_the_same_order(live: Any) -> None:
    outcome = live["walks"]
    assert outcome["different"] == []
    assert outcome["compared"] == 150 * 12
    assert outcome["paths"] > 5_000


def keras_object(tf: Any, keras: Any, name: str) -> Any:
    """Return a model of one kind, built, with its optimizer's slots if it has one."""
    import numpy as np

    layers = keras.layers

    class Subclassed(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.Dense(2)
            self.blocks = [layers.Dense(2), keras.Sequential([layers.Dense(2)])]
            self.again = self.first
            self.heads = {"a": layers.Dense(1)}
            self.own = self.add_weight(shape=(2,), name="own")
            self.plain = tf.Variable(np.ones(3))
            self.hidden = (lambda value: lambda: value)(tf.Variable(3.0))

        def call(self, x: Any) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.heads["a"](self.again(x))

    def sequential() -> Any:
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.BatchNormalization()])
        model.add(layers.Dropout(0.5))
        model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
        model.train_on_batch(np.zeros((4, 3)), np.zeros((4, 4)))
        return model

    def functional() -> Any:
        inputs, shared = keras.Input((3,)), layers.Dense(3)
        inner = keras.Sequential([layers.Dense(2)], name="inner")
        return keras.Model(inputs, inner(shared(shared(inputs))))

    def subclassed() -> Any:
        model = Subclassed()
        model(np.zeros((1, 2), np.float32))
        return model

    def module() -> Any:
        whole = tf.Module()
        one = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
        whole.nets, whole.w, whole.opt = [one, {"k": functional()}], tf.Variable(1), keras.optimizers.Adam()
        whole.opt.build(one.trainable_variables)
        whole.some = {tf.Variable(2.0).ref()}
        return whole

    makers = {"sequential": sequential, "functional": functional, "subclassed": subclassed, "module": module}
    return makers[name]()


def _number(variables: dict[str, Any]) -> dict[str, float]:
    """Give every variable a value of its own; return those."""
    import numpy as np

    values = {}
    for number, (path, variable) in enumerate(variables.items(), start=2):
        kind = getattr(variable.dtype, "as_numpy_dtype", variable.dtype)
        variable.assign(np.full(tuple(variable.shape), number, kind))
        values[path] = float(number)
    return values


def _variables(tree: Any) -> dict[str, Any]:
    return {name_of(path): leaf.source.tensor for path, leaf in tree.tensors()}


def name_of(path: Any) -> str:
    return "/".join(str(step.value) for step in path)


def _value(variable: Any) -> float:
    import numpy as np

    return float(np.asarray(variable.numpy()).reshape(-1)[0])


def _checked(tf: Any, make: Any, folder: Path, name: str) -> dict[str, Any]:
    """Compare what is said of one object with what tf.train.Checkpoint does with numbered variables."""
    model = make()
    checkpoint = tf.train.Checkpoint(model=model)
    inputs = _number(_variables(flatten_with_path(model, predicate=live_trees.is_variable)))
    # What only a closure or a set leads to is no variable of the walk.
    hidden = {name_of(row.path) for row in audit(model).unsaved} - inputs.keys()
    file = checkpoint.save(str(folder / name / "ckpt"))
    reader = tf.train.load_checkpoint(file)
    values = {float(reader.get_tensor(key).reshape(-1)[0]) for key in _numeric(reader)}
    saved_by_tf = sorted(path for path, value in inputs.items() if value in values)
    unsaved = {name_of(row.path) for row in audit(model).unsaved}
    stored = open_checkpoint(file).tree
    other = make()
    reference = tf.train.Checkpoint(model=other)
    before = _variables(flatten_with_path(other, predicate=live_trees.is_variable))
    for variable in before.values():
        variable.assign(variable * 0 - 1)
    # `restore` leaves a save counter behind: what is said of the object comes first.
    report = audit(reference, stored)
    reference.restore(file).expect_partial()
    untouched = sorted(path for path, variable in before.items() if _value(variable) == -1)
    pairs = compare_names(object_graph(reference), stored)
    graph = {path: leaf.array().reshape(-1)[0] for path, leaf in object_graph(reference).tensors()}
    return {
        "saved_by_tf": saved_by_tf,
        "saved_by_us": sorted(inputs.keys() - unsaved),
        "hidden": sorted(hidden),
        "untouched": untouched,
        "unsaved": sorted(unsaved - hidden),
        "unfilled": [name_of(path) for path in report.unfilled],
        "unused": [name_of(path) for path in report.unused],
        "different": len(report.different),
        "compared": [pairs.equal, len(pairs.pairs)],
        "wrong": [
            name_of(live)
            for live, path in pairs.pairs.items()
            if graph[live] != stored[path].array().reshape(-1)[0]
        ],
        "slots": sum(leaf.role == "slot" and leaf.of is not None for _, leaf in stored.tensors()),
        "live_slots": sum(
            leaf.role == "slot" and leaf.of is not None for _, leaf in object_graph(model).tensors()
        ),
        "lacking": [
            variable.name
            for variable in model.variables
            if tensor_identity(variable)
            not in {tensor_identity(v) for v in _variables(flatten_with_path(model)).values()}
        ],
    }


def _numeric(reader: Any) -> list[str]:
    return [name for name, kind in reader.get_variable_to_dtype_map().items() if kind.name != "string"]


def keras_3(folder: Path) -> Any:
    import keras
    import tensorflow as tf

    names = ["sequential", "functional", "subclassed", "module"]
    return {name: _checked(tf, partial(keras_object, tf, keras, name), folder, name) for name in names}


def keras_2(folder: Path) -> Any:
    import tensorflow as tf
    import tf_keras as keras

    names = ["sequential", "functional", "subclassed", "module"]
    outcomes = {name: _checked(tf, partial(keras_object, tf, keras, name), folder, name) for name in names}
    for name in names:
        model = keras_object(tf, keras, name)
        reference = [path for path, _ in model._flatten(predicate=live_trees.is_variable, with_path=True)]
        walk = walk_values(model, live_trees.is_tf_module)
        own_walk = [tuple(s.value for s in f.path) for f in walk if live_trees.is_variable(f.value)]
        outcomes[name]["walk"] = [reference == own_walk, len(reference)]

    # An optimizer of the old kind is asked for its slots.
    def legacy() -> Any:
        import numpy as np

        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.legacy.Adam(), "mse", run_eagerly=True)
        model.train_on_batch(np.zeros((4, 3)), np.zeros((4, 4)))
        return model

    outcomes["legacy"] = _checked(tf, legacy, folder, "legacy")
    return outcomes


@pytest.mark.parametrize("keras", ["keras_3", "keras_2"])
def test_what_is_said_to_be_saved_is_what_tensorflow_saves(keras: str, tmp_path: Path) -> None:
    tensorflow_child.require("keras" if keras == "keras_3" else "tf_keras")
    rows = tensorflow_child.run(__file__, keras, tmp_path)
    for name, row in rows.items():
        assert row["saved_by_us"] == row["saved_by_tf"], name
        assert row["untouched"] == row["unsaved"], name
        assert (row["unfilled"], row["unused"], row["different"], row["wrong"]) == ([], [], 0, []), name
        assert row["compared"][0], name
        assert row["live_slots"] == row["slots"], name
        assert row["saved_by_tf"], name
        assert row["lacking"] == [], name
        assert row.get("walk", [True])[0], name
    assert rows["subclassed"]["hidden"] == ["hidden/value"]
    assert rows["module"]["hidden"] == ["some/0/_wrapped"]
    # Keras 3 keeps lists and dicts of layers in containers that TensorFlow does not track.
    blocks = [path for path in rows["subclassed"]["unsaved"] if path.startswith("blocks/")]
    assert len(blocks) == (4 if keras == "keras_3" else 0)
    assert rows["sequential"]["live_slots"] == (8 if keras == "keras_3" else rows["sequential"]["slots"])
    if keras == "keras_2":
        assert rows["legacy"]["live_slots"] == 4


def partial_restore(folder: Path) -> Any:
    """Restore a file into an object that has more and lacks something: what happened, and what was said."""
    import tensorflow as tf

    def output(*names: str) -> Any:
        whole = tf.Module()
        for number, name in enumerate(names):
            setattr(whole, name, tf.Module())
            getattr(whole, name).w = tf.Variable([float(number + 1)])
        whole.listed = [tf.Variable([7.0]), {"k": tf.Variable([8.0])}]
        return whole

    file = tf.train.Checkpoint(output("a", "b")).save(str(folder / "part"))
    live = output("b", "c")
    live.listed.append(tf.Variable([9.0]))
    for variable in live.variables:
        variable.assign([-1.0])
    stored = open_checkpoint(file).tree
    report = audit(live, stored)
    tf.train.Checkpoint(live).restore(file).expect_partial()
    untouched = [
        path for path, v in live._flatten(True, live_trees.is_variable, with_path=True) if float(v[0]) == -1
    ]
    got = {float(v[0]) for v in live.variables}
    unread = [name_of(path) for path, leaf in stored.tensors() if leaf.array().reshape(-1)[0] not in got]
    live.listed.insert(0, tf.Variable([1.0]))
    refused = audit(live).refused
    try:
        tf.train.Checkpoint(live).save(str(folder / "never"))
        reason = ""
    except ValueError as error:
        reason = str(error)
    narrow = output("a", "b")
    narrow.a.w = tf.Variable([1.0, 2.0], dtype=tf.float64)
    return {
        "untouched": sorted("/".join(map(str, path)) for path in untouched),
        "unfilled": sorted(map(name_of, report.unfilled)),
        "unread": unread,
        "unused": [name_of(path) for path in report.unused],
        "refused": {name_of(path): why for path, why in refused.items()},
        "reason": reason,
        "different": [row.document() for row in audit(narrow, stored).different],
    }


def test_a_partial_restore_is_foretold(live: Any) -> None:
    outcome = live["partial_restore"]
    assert outcome["unfilled"] == outcome["untouched"] == ["c/w", "listed/2"]
    assert outcome["unused"] == ["a/w"]
    # TensorFlow's save counter is taken by the Checkpoint, not by the object.
    assert sorted(set(outcome["unread"]) - {"save_counter"}) == ["a/w"]
    (path, why), *others = outcome["refused"].items()
    assert path == "listed"
    assert not others
    assert outcome["reason"].strip().startswith(why)
    live, stored = ({"dtype": "float64", "shape": [2]}, {"dtype": "float32", "shape": [1]})
    assert outcome["different"] == [{"path": "a/w", "live": live, "stored": stored}]


def values(folder: Path) -> Any:
    """Read variables of every type; save a live object and restore it into another by TensorFlow."""
    import numpy as np
    import tensorflow as tf

    import ckpttool

    kinds_ = (
        "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 complex64 bool"
    )
    wrong = []
    for name in [*kinds_.split(), "complex128", "float8_e5m2", "float8_e4m3fn"]:
        value = tf.cast([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0]], getattr(tf, name, None) or name)
        ((_, leaf),) = flatten_with_path({"v": tf.Variable(value)}).tensors()
        if (leaf.dtype, leaf.array().tobytes()) != (name, value.numpy().tobytes()):
            wrong.append(name)
    ((_, text),) = flatten_with_path([tf.constant([["a"], ["\u00e9"]])]).tensors()
    ((_, odd),) = flatten_with_path([tf.Variable([1.0, 2.0], shape=tf.TensorShape(None))]).tensors()
    with tf.Graph().as_default():
        ((_, graph),) = flatten_with_path([tf.compat.v1.get_variable("x", [2])]).tensors()
        try:
            graph.read()
            unread = ""
        except ckpttool.CkpttoolError as error:
            unread = str(error)

    def output(start: float) -> Any:
        whole = tf.Module()
        whole.layer = tf.Module()
        whole.layer.kernel = tf.Variable(np.full((2, 3), start, np.float32))
        whole.listed = [tf.Variable(start), {"k": tf.Variable(start + 1)}]
        whole.again = whole.layer
        return whole

    live, other = output(1.0), output(5.0)
    written = ckpttool.save(object_graph(live), str(folder / "ckpt-1"), "tf")
    status = tf.train.Checkpoint(other).restore(str(folder / "ckpt-1"))
    status.assert_existing_objects_matched()
    plain = ckpttool.save(flatten_with_path(live), str(folder / "ckpt-2"), "tf")
    third = output(6.0)
    tf.train.Checkpoint(third).restore(str(folder / "ckpt-2")).assert_existing_objects_matched()
    return {
        "wrong": wrong,
        "text": [s.decode() for s in text.strings()],
        "odd": list(odd.shape),
        "graph": unread,
        "restored": [[float(np.max(v)) for v in m.variables] for m in (live, other, third)],
        "tensors": [len(written.tensors), len(plain.tensors)],
    }


def test_values_are_read_and_a_live_object_is_saved(live: Any) -> None:
    outcome = live["values"]
    assert outcome["wrong"] == []
    assert outcome["text"] == ["a", "\u00e9"]
    assert outcome["odd"] == [2]
    assert "ResourceVariable" in outcome["graph"]
    assert outcome["restored"][0] == outcome["restored"][1] == outcome["restored"][2] == [1.0, 2.0, 1.0]


def mixed(folder: Path) -> Any:
    """Put layers of Keras 3 into a tf.Module: TensorFlow's walk stops there, ours goes on."""
    import keras
    import tensorflow as tf

    whole = tf.Module()
    whole.a, whole.net = tf.Variable(1.0), keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    whole.z = tf.Module()
    whole.z.w = tf.Variable(2.0)
    agent = {"whole": whole, "checkpoint": tf.train.Checkpoint(net=whole.net)}
    return {
        "theirs": [
            "/".join(map(str, p)) for p, _ in whole._flatten(True, live_trees.is_variable, with_path=True)
        ],
        "ours": [name_of(path) for path in flatten_with_path(whole)],
        "modules": [name_of(path) for path in submodules(whole)],
        "agent": [name_of(path) for path in flatten_with_path(agent)],
        "names": [leaf.name for _, leaf in flatten_with_path(whole.net).tensors()],
    }


def test_layers_of_keras_3_are_entered_where_tensorflow_stops(live: Any) -> None:
    outcome = live["mixed"]
    assert outcome["theirs"] == ["a", "z/w"]
    assert outcome["ours"] == ["a", "net/_layers/1/_kernel", "net/_layers/1/bias", "z/w"]
    assert outcome["modules"][:2] == ["net", "z"]
    assert outcome["agent"][:2] == ["checkpoint/net/_layers/1/_kernel", "checkpoint/net/_layers/1/bias"]
    assert outcome["names"] == ["sequential/dense/kernel", "sequential/dense/bias"]


def moved_entries(folder: Path) -> dict[str, bool]:
    """Return for each operation that only moves entries whether the trace has the numbers of its result."""
    import numpy as np
    import tensorflow as tf

    from ckpttool.networks import tracing

    x = tf.constant(np.arange(24, dtype=np.float32).reshape(2, 3, 4))
    operations = {
        "reshape": lambda: tf.reshape(x, (2, -1)),
        "expand": lambda: tf.expand_dims(x, 1),
        "squeeze": lambda: tf.squeeze(tf.reshape(x, (2, 1, 12))),
        "squeeze an axis": lambda: tf.squeeze(tf.reshape(x, (2, 1, 12)), [1]),
        "identity": lambda: tf.identity(x),
        "stop": lambda: tf.stop_gradient(x),
        "ensure": lambda: tf.ensure_shape(x, (2, None, 4)),
        "transpose": lambda: tf.transpose(x, (0, 2, 1)),
        "concat": lambda: tf.concat([x, x[:, :1]], 1),
        "gather": lambda: tf.gather(x, [2, 0], axis=1),
        "gather by row": lambda: tf.gather(x, tf.constant([[0, 1], [2, 0]]), axis=1, batch_dims=1),
        "slice": lambda: x[:, 1:, ::2],
        "stack": lambda: tf.stack([x, x], 1),
        "unstack": lambda: tf.unstack(x, axis=1)[1],
        "split": lambda: tf.split(x, 2, axis=2)[1],
        "tile": lambda: tf.tile(x, (1, 2, 1)),
        "flatten": lambda: tf.keras.layers.Flatten()(x),
    }
    followed = {}
    for name, operation in operations.items():
        trace = tracing.TensorFlowTrace()
        trace.border(x, -1)
        first = int(trace.entries(x).min())
        with trace.following():
            outcome = operation()
        expected = outcome.numpy().astype(int) + first
        followed[name] = (
            not trace.failed
            and trace.is_followed(outcome)
            and bool(np.array_equal(trace.entries(outcome), expected))
        )
    return followed


def test_operations_that_move_entries_are_followed(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow")
    followed = tensorflow_child.run(__file__, "moved_entries", tmp_path)
    assert len(followed) == 17
    assert [name for name, right in followed.items() if not right] == []
