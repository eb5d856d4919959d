"""Paths, aliases, roles and owners against the live objects, and graphs that are made to break the walk."""

from __future__ import annotations

import importlib.util
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.core import FormatError, Inline, Tree
from ckpttool.core import Path as TreePath
from ckpttool.formats import VariableInfo, tf_bundle, tf_object_graph, tree_from_graph
from tests.golden_texts import Golden

W = runpy.run_path(str(Path(__file__).with_name("bundle_writer.py")))
run = runpy.run_path(str(Path(__file__).with_name("tensorflow_child.py")))["run"]
node, graph, variable = W["node"], W["graph"], W["variable"]

without_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


def spelled(path: TreePath) -> str:
    return "/".join(str(key.value) for key in path)


# What TensorFlow's own objects say. These functions run in a child process.

CRITICS = ("flat", "sequential", "twin")
CASES = [
    f"{critic}-{when}-{alias}"
    for critic in CRITICS
    for when in ("before", "after")
    for alias in ("best", "none")
]


def build_agents(folder: Path) -> dict[str, Any]:
    """Save one agent a case, every variable with a value of its own; return what the live objects say."""
    return {case: _save_agent(folder, *case.split("-")) for case in CASES}


def _save_agent(folder: Path, kind: str, when: str, alias: str) -> list[dict[str, Any]]:
    import keras
    import tensorflow as tf

    dense = keras.layers.Dense

    class Net(keras.Model):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, dense(3))

        def call(self, x):
            for name in sorted(n for n in dir(self) if n[0] == "l" and n[1:].isdigit()):
                x = getattr(self, name)(x)
            return x

    class Twin(keras.Model):
        def __init__(self):
            super().__init__()
            self.q1, self.q2 = Net(["l1", "l2"]), Net(["l1", "l2"])

        def call(self, x):
            return self.q1(x), self.q2(x)

    def critic():
        makers = {
            "flat": lambda: Net([f"l{n}" for n in range(1, 7)]),
            "twin": Twin,
            "sequential": lambda: keras.Sequential([dense(3), keras.layers.BatchNormalization(), dense(1)]),
        }[kind]()
        makers(tf.zeros([1, 3]))
        return makers

    class Agent(tf.Module):
        def __init__(self):
            super().__init__()
            if when == "before":
                self.critic_optimizer = keras.optimizers.Adam()
                self.actor_optimizer = keras.optimizers.Adam()
            self.actor, self.actor_target = Net(["l1", "l2", "l3"]), Net(["l1", "l2", "l3"])
            for net in self.actor, self.actor_target:
                net(tf.zeros([1, 3]))
            self.critic, self.critic_target = critic(), critic()
            if alias == "best":
                self.best = self.actor.l1
                self.best_critic_layer = self.critic.layers[-1]
            if when == "after":
                self.critic_optimizer = keras.optimizers.Adam()
                self.actor_optimizer = keras.optimizers.Adam()
            self.critic_optimizer.build(self.critic.trainable_variables)
            self.actor_optimizer.build(self.actor.trainable_variables)
            self.total_it = tf.Variable(0, dtype=tf.int64, trainable=False)

    agent = Agent()
    checkpoint = tf.train.Checkpoint(agent=agent)
    checkpoint.save_counter  # noqa: B018 - makes it
    facts = _live_facts(agent, checkpoint)
    for number, fact in enumerate(facts.values()):
        variable = fact.pop("variable")
        variable.assign(tf.cast(tf.fill(variable.shape, number), variable.dtype))
        fact["value"] = number
    # `write` leaves the counter alone, `save` would count.
    checkpoint.write(str(folder / f"{kind}-{when}-{alias}"))
    answer = list(facts.values())
    for fact in answer:
        if fact["of"] is not None:
            fact["of"] = facts[fact["of"]]["path"]
    return answer


def _live_facts(agent: Any, checkpoint: Any) -> dict[int, dict[str, Any]]:
    import keras
    import tensorflow as tf

    facts: dict[int, dict[str, Any]] = {}

    def say(variable, path, role="parameter", of=None, slot=None, trainable=None):
        of = None if of is None else id(of)
        facts[id(variable)] = {
            "variable": variable, "path": path, "role": role, "of": of, "slot": slot, "trainable": trainable,
        }  # fmt: skip

    def module(path, obj):
        if isinstance(obj, keras.Sequential):
            for number, layer in enumerate(obj._functional._operations):
                module(f"{path}/_functional/_operations/{number}", layer)
            return
        for name in ("_kernel", "bias", "gamma", "beta", "moving_mean", "moving_variance"):
            if isinstance(getattr(obj, name, None), keras.Variable):
                say(getattr(obj, name), f"{path}/{name}", "buffer" if "moving" in name else "parameter")
        for name in ("l1", "l2", "l3", "l4", "l5", "l6", "q1", "q2"):
            if hasattr(obj, name):
                module(f"{path}/{name}", getattr(obj, name))

    for name in ("actor", "actor_target", "critic", "critic_target"):
        module(f"agent/{name}", getattr(agent, name))
    say(agent.total_it, "agent/total_it", "counter")
    say(checkpoint.save_counter, "save_counter", "counter")
    for name in ("actor", "critic"):
        optimizer = getattr(agent, f"{name}_optimizer")
        top = f"agent/{name}_optimizer"
        say(optimizer._iterations, f"{top}/_iterations", "counter")
        say(optimizer._learning_rate, f"{top}/_learning_rate", "other")
        for number, trained in enumerate(getattr(agent, name).trainable_variables):
            facts[id(trained)]["trainable"] = True
            for edge, slot in (("_momentums", "m"), ("_velocities", "v")):
                say(getattr(optimizer, edge)[number], f"{top}/{edge}/{number}", "slot", trained, slot)

    paths: dict[int, list[str]] = {}

    def walk(obj, path, passed):
        if isinstance(obj, keras.Variable | tf.Variable):
            paths.setdefault(id(obj), []).append("/".join(path))
            return
        for name, child in obj._trackable_children().items():
            if id(child) not in passed:
                walk(child, (*path, name), passed | {id(child)})

    walk(checkpoint, (), frozenset({id(checkpoint)}))
    assert paths.keys() == facts.keys()
    for number, fact in facts.items():
        fact["paths"] = paths[number]
    return facts


@pytest.fixture(scope="session")
def agents(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("agents")
    return folder, run(__file__, "build_agents", folder)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.tensorflow
@without_tensorflow
def test_agents_are_named_as_the_live_objects(agents: tuple[Path, dict[str, Any]], case: str) -> None:
    folder, facts = agents
    tree = tf_bundle.read(str(folder / case)).tree
    result = {}
    for path, leaf in tree.tensors():
        others = [spelled(alias.path) for alias in tree.aliases.get(path, ())]
        result[int(leaf.array().flat[0])] = {
            "value": int(leaf.array().flat[0]),
            "path": spelled(path),
            "paths": sorted([spelled(path), *others]),
            "role": leaf.role,
            "of": None if leaf.of is None else spelled(leaf.of),
            "slot": leaf.slot,
            "trainable": leaf.trainable,
        }
    assert len(result) == len(tree)
    assert result == {fact["value"]: {**fact, "paths": sorted(fact["paths"])} for fact in facts[case]}


@pytest.mark.tensorflow
@without_tensorflow
def test_the_cases_are_the_hard_ones(agents: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = agents
    keys = {leaf.key for _, leaf in tf_bundle.read(str(folder / "sequential-before-best")).tree.tensors()}
    assert any(key.startswith("agent/critic_optimizer/_trainable_variables/") for key in keys)
    assert any(key.startswith("agent/best/") for key in keys)
    assert not any(key.startswith("agent/actor/l1/") for key in keys)


# Graphs made by hand.


def tensors(*keys: str) -> dict[str, VariableInfo]:
    names = sorted(f"{key}/.ATTRIBUTES/VARIABLE_VALUE" for key in keys)
    return {name: VariableInfo("float32", (1,), Inline(b"abcd")) for name in names}


def listed(tree: Tree) -> dict[str, list[str]]:
    return {
        spelled(path): [spelled(alias.path) for alias in tree.aliases.get(path, ())]
        for path, _ in tree.tensors()
    }


def named(*nodes: bytes, keys: tuple[str, ...]) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    tree, notes = tree_from_graph(graph(*nodes), tensors(*keys))
    return listed(tree), notes


def test_lists_have_positions_and_dicts_keep_their_keys() -> None:
    tree, notes = tree_from_graph(
        graph(
            node([("layers", 1), ("d", 2)]),
            node([("0", 3), ("10", 4)]),
            node([("a/b.c", 5), ("7", 6)]),
            *(variable(key) for key in "pqrs"),
        ),
        tensors("p", "q", "r", "s"),
    )
    assert notes == ()
    assert [[(key.kind, key.value) for key in path] for path in tree] == [
        [("attr", "layers"), ("index", 0)],
        [("attr", "layers"), ("index", 10)],
        [("attr", "d"), ("attr", "a/b.c")],
        [("attr", "d"), ("attr", "7")],
    ]


def test_cycles_and_self_edges_end() -> None:
    paths, notes = named(
        node([("root", 0), ("a", 1), ("b", 2)]),
        node([("back", 0), ("self", 1), ("b", 2), ("v", 3)]),
        node([("a", 1), ("root", 0)]),
        variable("k"),
        keys=("k",),
    )
    assert paths == {"a/v": ["b/a/v"]}
    assert notes == ()


@pytest.mark.long
@pytest.mark.parametrize(("depth", "named_by"), [(90, "path"), (50_000, "key")])
def test_deep_graphs(depth: int, named_by: str) -> None:
    nodes = [node([("n", number + 1)]) for number in range(depth)]
    started = time.process_time()
    paths, notes = named(*nodes, variable("k/e/y"), keys=("k/e/y",))
    assert time.process_time() - started < 10
    assert list(paths) == ["/".join("n" * depth) if named_by == "path" else "k/e/y"]
    assert bool(notes) == (named_by == "key")


@pytest.mark.long
def test_deep_cycles() -> None:
    nodes = [node([("n", number + 1), ("up", max(0, number - 1))]) for number in range(50_000)]
    started = time.process_time()
    paths, _ = named(*nodes, variable("k"), keys=("k",))
    assert time.process_time() - started < 20
    assert list(paths) == ["k"]


def test_fans_of_4_to_the_30(golden: Golden) -> None:
    nodes = [node([(name, number + 1) for name in "abcd"]) for number in range(30)]
    started = time.process_time()
    paths, notes = named(*nodes, variable("k"), keys=("k",))
    assert time.process_time() - started < 10
    first = "/".join("a" * 30)
    assert list(paths) == [first]
    assert len(paths[first]) == len(set(paths[first])) == tf_object_graph.MAX_ALIASES
    golden("\n".join(notes).replace(first, "FIRST"))


FEW = 3_000
SHARED = ("_variables", "_trainable_variables", "_momentums")
OPTIMIZER = [("_iterations", FEW + 1), ("_learning_rate", FEW + 2)]
TRAINER = [("_iterations", 1), ("_learning_rate", 1), ("_variables", 2), ("_trainable_variables", 3)]


def many(count: int) -> list[bytes]:
    return [variable(f"k{n}", f"m{n % 7}/w{n}") for n in range(count)]


def keys(count: int) -> list[str]:
    return [f"k{n}" for n in range(count)]


# Graphs of many objects or values, each a way to make a careless reader do quadratic work.
BROAD: dict[str, Callable[[], tuple[list[bytes], list[str]]]] = {
    "children": lambda: (
        [node([(f"v{n}", n + 1) for n in range(40_000)]), *many(40_000)],
        keys(40_000),
    ),
    "list": lambda: (
        [node([("l", 1)]), node([(str(n), n + 2) for n in range(20_000)]), *many(20_000)],
        keys(20_000),
    ),
    "one key": lambda: ([node([(f"v{n}", n + 1) for n in range(20_000)]), *[variable("k")] * 20_000], ["k"]),
    "one attribute": lambda: (
        [node(attributes=[("A", "", f"{key}/.ATTRIBUTES/VARIABLE_VALUE") for key in keys(20_000)])],
        keys(20_000),
    ),
    "prefixes": lambda: (
        [node(attributes=[("A", "", "k" * n) for n in range(1, 2000)])],
        ["k" * 2000 + key for key in keys(20_000)],
    ),
    "optimizers": lambda: (
        [
            node([(f"o{n}", n + 1) for n in range(FEW)]),
            *(node([*OPTIMIZER, ("_variables", FEW + 3 + n)]) for n in range(FEW)),
            variable("i"),
            variable("lr"),
            *(node([("0", 2 * FEW + 3 + n)]) for n in range(FEW)),
            *(variable(f"s{n}", f"Adam/m/{n}") for n in range(FEW)),
        ],
        ["i", "lr", *(f"s{n}" for n in range(FEW))],
    ),
    "one list of many optimizers": lambda: (
        [
            node([(f"o{n}", n + 1) for n in range(FEW)]),
            *(node([*OPTIMIZER, *((edge, FEW + 3) for edge in SHARED)]) for _ in range(FEW)),
            variable("i"),
            variable("lr"),
            node([(str(n), FEW + 4 + n) for n in range(FEW)]),
            *(variable(f"s{n}", f"Adam/m/{n}") for n in range(FEW)),
        ],
        ["i", "lr", *(f"s{n}" for n in range(FEW))],
    ),
    "slots": lambda: (
        [
            node([(f"o{n}", n + 1) for n in range(FEW)]),
            *(node(slots=[(FEW + 1, "m", FEW + 2)]) for _ in range(FEW)),
            variable("w"),
            variable("s"),
        ],
        ["w", "s"],
    ),
    "long name": lambda: (
        [
            node(TRAINER),
            variable("i"),
            node([("0", 4)]),
            node([("0", 5)]),
            variable("s", "Adam/" + "_" * 500_000),
            variable("w", "w"),
        ],
        ["i", "s", "w"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", list(BROAD))
def test_broad_graphs_are_read_in_bounded_time(kind: str) -> None:
    nodes, names = BROAD[kind]()
    data, known = graph(*nodes), tensors(*names)
    started = time.process_time()
    tree, _ = tree_from_graph(data, known)
    assert time.process_time() - started < 8
    assert {leaf.key for _, leaf in tree.tensors()} == known.keys()


@pytest.mark.long
def test_a_complete_graph_is_bounded() -> None:
    nodes = [node([(f"e{n}", n) for n in range(60)] + [("v", 60)]) for _ in range(60)]
    started = time.process_time()
    paths, notes = named(*nodes, variable("k"), keys=("k",))
    assert time.process_time() - started < 20
    ((first, others),) = paths.items()
    assert len(others) == tf_object_graph.MAX_ALIASES
    assert others[0] == "v" != first
    assert notes


def test_short_aliases_are_complete() -> None:
    # Every path that repeats no object, against a search that knows no shortcut.
    edges = {
        0: {"a": 1, "b": 2, "c": 3},
        1: {"x": 2, "v": 4},
        2: {"y": 1, "z": 3},
        3: {"w": 1, "v": 4},
        4: {},
    }

    def search(number: int, path: tuple[str, ...], passed: frozenset[int]) -> list[str]:
        if number == 4:
            return ["/".join(path)]
        steps = [(name, child) for name, child in edges[number].items() if child not in passed]
        return [alias for name, child in steps for alias in search(child, (*path, name), passed | {child})]

    nodes = [node(list(edges[number].items())) for number in range(4)]
    paths, _ = named(*nodes, variable("k"), keys=("k",))
    ((first, others),) = paths.items()
    assert sorted([first, *others]) == sorted(search(0, (), frozenset({0})))
    assert [other.count("/") for other in others] == sorted(other.count("/") for other in others)


@given(st.lists(st.lists(st.integers(0, 12), max_size=5), min_size=13, max_size=13))
def test_any_graph_is_named_once(edges: list[list[int]]) -> None:
    nodes = [
        node([(f"e{n}", target) for n, target in enumerate(targets)], [("VARIABLE_VALUE", "", f"k{number}")])
        for number, targets in enumerate(edges)
    ]
    parsed = tf_object_graph.parse_graph(graph(*nodes))
    tree = tf_object_graph.choose_paths(parsed)
    reached, waiting = {0}, [0]
    while waiting:
        fresh = set(edges[waiting.pop()]) - reached
        reached |= fresh
        waiting += fresh
    assert tree.paths.keys() == reached
    aliases = tf_object_graph.find_aliases(parsed, tree, reached)
    everything = [*tree.paths.values(), *(path for paths in aliases.paths.values() for path in paths)]
    assert len(everything) == len(set(everything))
    for number, path in [(n, p) for n, paths in aliases.paths.items() for p in (*paths, tree.paths[n])]:
        at, passed = 0, [0]
        for key in path:
            at = parsed[at].children[str(key.value)]
            passed.append(at)
        assert at == number
        assert len(passed) == len(set(passed))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(graph(node([("a", 77)])), id="no-such-object"),
        pytest.param(graph(node([("a", -1)])), id="no-such-object-2"),
        pytest.param(graph(node([("a", 2**31 - 1)])), id="no-such-object-3"),
        pytest.param(graph(node([("a", 1), ("a", 2)]), node(), node()), id="two-children"),
        pytest.param(graph(node(slots=[(77, "m", 0)])), id="no-such-object-4"),
        pytest.param(graph(node(slots=[(0, "m", -1)])), id="no-such-object-5"),
        pytest.param(b"\xff" * 20, id="varint"),
        pytest.param(b"\x0a\x7f", id="longer"),
        pytest.param(graph(W["field"](1, 5)), id="number"),
        pytest.param(graph(W["field"](2, W["field"](3, 5))), id="number-2"),
    ],
)
def test_broken_graphs(data: bytes, golden: Golden) -> None:
    with pytest.raises(FormatError) as caught:
        tree_from_graph(data, {})
    golden(caught.value)


def test_what_graph_and_index_do_not_share_is_noted(golden: Golden) -> None:
    paths, notes = named(node([("a", 1), ("b", 2)]), variable("a"), variable("gone"), keys=("a", "x..y/z.Sw"))
    assert paths == {"a": [], "x.y/z/w": []}
    golden("\n".join(notes))


def test_an_empty_graph_lists_by_key() -> None:
    paths, notes = named(keys=("a/b",))
    assert paths == {"a/b": []}
    assert len(notes) == 1


def test_two_objects_with_one_entry_are_aliases() -> None:
    paths, _ = named(node([("a", 1), ("b", 2)]), variable("k"), variable("k"), keys=("k",))
    assert paths == {"a": ["b"]}


def test_the_slot_of_a_second_name_is_that_of_the_entry() -> None:
    slot = "k/.OPTIMIZER_SLOT/optimizer/momentum"
    for owner in (1, 2):
        tree, _ = tree_from_graph(
            graph(
                node([("a", 1), ("b", 2), ("optimizer", 3)]),
                *(variable("k"), variable("k")),
                node(slots=[(owner, "momentum", 4)]),
                variable(slot),
            ),
            tensors("k", slot),
        )
        assert listed(tree)["a"] == ["b"]
        assert [spelled(leaf.of) for _, leaf in tree.tensors() if leaf.of is not None] == ["a"]


def test_legacy_slots_and_sgd_momentum() -> None:
    tree, notes = tree_from_graph(
        graph(
            node([("net", 1), ("optimizer", 2)]),
            node([("kernel", 3)]),
            node([("iter", 4), ("decay", 5), ("momentum", 6)], slots=[(3, "momentum", 7)]),
            *(variable(key) for key in ("net/kernel", "iter", "decay", "momentum")),
            variable("net/kernel/.OPTIMIZER_SLOT/optimizer/momentum"),
        ),
        tensors("net/kernel", "iter", "decay", "momentum", "net/kernel/.OPTIMIZER_SLOT/optimizer/momentum"),
    )
    assert notes == ()
    roles = {
        spelled(path): (leaf.role, leaf.slot, leaf.of and spelled(leaf.of)) for path, leaf in tree.tensors()
    }
    assert roles == {
        "net/kernel": ("parameter", None, None),
        "optimizer/iter": ("other", None, None),  # a float here
        "optimizer/decay": ("other", None, None),
        "optimizer/momentum": ("other", None, None),
        "optimizer/slots/momentum/net/kernel": ("slot", "momentum", "net/kernel"),
    }


def test_the_form_of_2018() -> None:
    """What tf.contrib.eager.Checkpoint writes, TensorFlow 1.7 to 1.9.

    Source: tensorflow/contrib/eager/python/checkpointable_utils.py (_serialize_checkpointables and
    _serialize_slot_variables). Field numbers, escapes and slots are those of today; attribute names are
    stored as they are and escaped in keys only; the counter is held by two edges, `save_counter` and
    `_save_counter`. The graph is like one that TensorFlow 1.8 saved.
    """
    kernel, slot = "net/l1/kernel", "net/l1/kernel/.OPTIMIZER_SLOT/optimizer/m"
    tree, notes = tree_from_graph(
        graph(
            node([("net", 1), ("optimizer", 2), ("save_counter", 3), ("_save_counter", 3)]),
            node([("l1", 4)]),
            node([("beta1_power", 5)], slots=[(6, "m", 7)]),
            variable("save_counter", "save_counter"),
            node([("kernel", 6)], [("a.b/c", "", "net/l1/.ATTRIBUTES/a..b.Sc")]),
            variable("optimizer/beta1_power", "beta1_power"),
            variable(kernel, "net/dense/kernel"),
            variable(slot, "net/dense/kernel/Adam"),
        ),
        tensors(kernel, slot, "save_counter", "optimizer/beta1_power")
        | {"net/l1/.ATTRIBUTES/a..b.Sc": VariableInfo("float32", (1,), Inline(b"abcd"))},
    )
    assert notes == ()
    roles = {
        tuple(s.value for s in path): (
            leaf.role,
            leaf.slot,
            leaf.of and spelled(leaf.of),
            leaf.name,
        )
        for path, leaf in tree.tensors()
    }
    assert roles == {
        ("net", "l1", "kernel"): ("parameter", None, None, "net/dense/kernel"),
        ("net", "l1", "a.b/c"): ("parameter", None, None, None),
        ("optimizer", "beta1_power"): ("other", None, None, "beta1_power"),
        ("save_counter",): ("parameter", None, None, "save_counter"),  # a float here
        ("optimizer", "slots", "m", "net", "l1", "kernel"): (
            *("slot", "m", "net/l1/kernel"),
            "net/dense/kernel/Adam",
        ),
    }
    assert listed(tree)["save_counter"] == ["_save_counter"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a.b/c", "a.b/c"), ("a..b.Sc", "a.b/c"), ("a..b", "a.b"), ("a.b", "a.b"), ("py_state", "py_state")],
)
def test_attributes_stored_escaped_or_not(name: str, shown: str) -> None:
    assert [step.value for step in tf_object_graph.attribute_path(name)] == [shown]


def test_keys_outside_the_grammar_stay_as_they_are(golden: Golden) -> None:
    tree, notes = tree_from_graph(
        graph(node([("w", 1), ("x", 2)]), variable("w"), node(saver="Custom.Stacks")),
        tensors("w") | {"stack..x.Sy/z": VariableInfo("float32", (1,), Inline(b"abcd"))},
    )
    assert [[step.value for step in path] for path in tree] == [["w"], ["stack..x.Sy", "z"]]
    golden("\n".join(notes))


def test_values_with_one_path_are_all_listed() -> None:
    own = [("VARIABLE_VALUE", "", key) for key in ("p", "q", "r")]
    tree, _ = tree_from_graph(
        graph(node([("v", 1)]), node([(".ATTRIBUTES", 2)], own), variable("s")),
        {key: VariableInfo("float32", (1,), Inline(b"abcd")) for key in ("p", "q", "r")} | tensors("s"),
    )
    assert len(tree) == len({leaf.key for _, leaf in tree.tensors()}) == 4
    assert len(set(tree.names.values())) == 4


def test_keras_2_slots_are_owned_by_name() -> None:
    slots = [("Adam/m/net/w", "0"), ("Adam/v/net/w", "1"), ("Adam/m/net/b", "2"), ("Adam/v/net/b", "3")]
    tree, _ = tree_from_graph(
        graph(
            node([("w", 1), ("b", 2), ("optimizer", 3)]),
            variable("w", "net/w"),
            variable("b", "net/b"),
            node([("_iterations", 4), ("_learning_rate", 5), ("_variables", 6)]),
            variable("i", "iteration"),
            variable("lr", "learning_rate"),
            node([("0", 4), *((str(n), 6 + n) for n in range(1, 5))]),
            *(variable(key, name) for name, key in slots),
        ),
        tensors("w", "b", "i", "lr", "0", "1", "2", "3"),
    )
    owners = {
        leaf.name: (leaf.slot, leaf.of and spelled(leaf.of))
        for _, leaf in tree.tensors()
        if leaf.role == "slot"
    }
    assert owners == {
        "Adam/m/net/w": ("m", "w"),
        "Adam/v/net/w": ("v", "w"),
        "Adam/m/net/b": ("m", "b"),
        "Adam/v/net/b": ("v", "b"),
    }


# The canonical path, case by case: which of two names a person would use.


def layer(kernel: int) -> bytes:
    return node([("kernel", kernel)])


@pytest.mark.parametrize("first", ["best", "net"])
def test_a_layer_belongs_to_its_network(first: str) -> None:
    # agent.best = agent.net.l1, in either order.
    edges = sorted([("best", 2), ("net", 1)], key=lambda edge: edge[0] != first)
    net = node([("l1", 2), ("l2", 3)])
    paths, _ = named(node(edges), net, layer(4), layer(5), variable("p"), variable("q"), keys=("p", "q"))
    assert paths == {"net/l1/kernel": ["best/kernel"], "net/l2/kernel": []}


def test_a_network_does_not_belong_to_one_that_refers_to_it() -> None:
    # actor.critic = agent.critic, made late.
    paths, _ = named(
        node([("actor", 1), ("critic", 2)]),
        node([("l1", 3), ("critic", 2)]),
        node([("q1", 4)]),
        layer(5),
        node([("l1", 6)]),
        variable("p"),
        layer(7),
        variable("q"),
        keys=("p", "q"),
    )
    assert paths == {"actor/l1/kernel": [], "critic/q1/l1/kernel": ["actor/critic/q1/l1/kernel"]}


def test_lists_of_variables_own_nothing() -> None:
    paths, _ = named(
        node([("all", 1), ("net", 2)]),
        node([("0", 4)]),
        node([("l1", 3)]),
        layer(4),
        variable("p"),
        keys=("p",),
    )
    assert paths == {"net/l1/kernel": ["all/0"]}


def test_private_attributes_are_names_when_there_is_no_other() -> None:
    agent, net = node([("best", 2), ("_net", 1)]), node([("l1", 2), ("l2", 3)])
    paths, _ = named(agent, net, layer(4), layer(5), variable("p"), variable("q"), keys=("p", "q"))
    assert paths == {"_net/l1/kernel": ["best/kernel"], "_net/l2/kernel": []}


def test_attributes_come_before_keras_lists() -> None:
    paths, _ = named(
        node([("layer-0", 1), ("layer_with_weights-0", 1), ("hidden", 1)]),
        layer(2),
        variable("p"),
        keys=("p",),
    )
    assert paths == {"hidden/kernel": ["layer-0/kernel", "layer_with_weights-0/kernel"]}


def test_an_agent_with_a_counter_called_iter_is_no_optimizer() -> None:
    tree, _ = tree_from_graph(
        graph(node([("iter", 1), ("w", 2)]), variable("i"), variable("w")), tensors("i", "w")
    )
    assert [leaf.role for _, leaf in tree.tensors()] == ["parameter", "parameter"]


# Optimizers and layers of other libraries, as the objects of their checkpoints look.


def roles_of(*nodes: bytes, keys: tuple[str, ...]) -> dict[str, tuple[str, str | None, str | None]]:
    tree, _ = tree_from_graph(graph(*nodes), tensors(*keys))
    return {
        spelled(path): (leaf.role, leaf.slot, None if leaf.of is None else spelled(leaf.of))
        for path, leaf in tree.tensors()
    }


@pytest.mark.parametrize("prefix", ["adapt_", ""])
def test_running_statistics_of_a_normalization_layer_are_buffers(prefix: str) -> None:
    roles = roles_of(
        node([("norm", 1), ("mean", 5)]),
        node([(f"{prefix}mean", 2), (f"{prefix}variance", 3), ("count", 4)]),
        *(variable(key) for key in "abcd"),
        keys=tuple("abcd"),
    )
    assert {roles[f"norm/{name}"][0] for name in (f"{prefix}mean", f"{prefix}variance", "count")} == {
        "buffer"
    }
    assert roles["mean"][0] == "parameter"


def test_averages_of_sonnet_are_buffers() -> None:
    roles = roles_of(
        node([("moving_mean", 1)]),
        node([("_counter", 2), ("_hidden", 3), ("average", 4)]),
        *(variable(key) for key in "abc"),
        keys=tuple("abc"),
    )
    assert roles["moving_mean/_hidden"][0] == roles["moving_mean/average"][0] == "buffer"


def test_slots_of_sonnet_optimizers() -> None:
    roles = roles_of(
        node([("net", 1), ("target", 2), ("opt", 3)]),
        node([("w", 6), ("b", 7)]),
        node([("b", 8)]),
        node([("m", 4), ("v", 5)]),
        node([("0", 9), ("1", 10)]),
        node([("0", 11), ("1", 12)]),
        *(variable("a", "net/w"), variable("b", "net/b"), variable("c", "net/b")),
        *(variable("d", "adam/m/net/w"), variable("e", "adam/m/net/b")),
        *(variable("f", "adam/v/net/w"), variable("g", "adam/v/other")),
        keys=tuple("abcdefg"),
    )
    assert roles["opt/m/0"] == ("slot", "m", "net/w")
    assert roles["opt/m/1"] == ("slot", "m", None)  # two networks have a variable of that name
    assert roles["opt/v/0"] == ("slot", "v", "net/w")
    assert roles["opt/v/1"][0] == "parameter"


@pytest.mark.parametrize(
    ("edge", "listed", "name", "kind"),
    [
        ("_momentums", [("0", 3), ("1", 7)], "m/dense/kernel", "m"),
        # Adafactor's scalars for variables of one dimension, in Keras 2, which are in the list of their kind
        # only (tf_keras/src/optimizers/adafactor.py).
        ("_r", [("0", 3)], "Adafactor/r/dense/kernel", "r"),
    ],
)
def test_slots_of_an_optimizer_without_a_name(
    edge: str, listed: list[tuple[str, int]], name: str, kind: str
) -> None:
    roles = roles_of(
        node([("w", 1), ("opt", 2)]),
        variable("a", "dense/kernel"),
        node([("_iterations", 3), ("_learning_rate", 4), (edge, 5), ("_variables", 6)]),
        *(variable("b", "iteration"), variable("c", "learning_rate")),
        node([("0", 7)]),
        node(listed),
        variable("d", name),
        keys=tuple("abcd"),
    )
    assert roles[f"opt/{edge}/0"] == ("slot", kind, "w")
