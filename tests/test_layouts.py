"""Layouts: what each recognises, where every leaf goes, and that all meet in one canonical tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpttool import testing
from ckpttool.core import Leaf, MappingError, Plugin, Tree, UsageError, ValueLeaf, display, plugins
from ckpttool.formats import open_checkpoint, tf_bundle
from ckpttool.libraries import (
    AgentMetadata,
    LayoutTable,
    RecognizedAgent,
    add_targets,
    bind,
    fujimoto,
    recognize_tree,
    td3,
)
from ckpttool.mapping import apply_plan
from ckpttool.mapping.rules import canonical_tree
from ckpttool.testing.layouts import canonical_names, contents
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE
from tests.golden_texts import Golden
from tests.library_rows import require_no_difference
from tests.trees import attributes, dense, keys, leaf, tensorflow_tree, torch_dense, torch_tree

OBS, ACT = 3, 2


def networks(binding: RecognizedAgent) -> dict[str, list[str]]:
    return {part.title: ["/".join(layer.name) for layer in part.layers] for part in binding.parts}


class LayoutContract(testing.LayoutContract):
    """The laws for plug-ins, and one of this package's own table."""

    def test_its_row_admits_it_nested_and_wrapped(self, tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
        require_no_difference(tree, "agent", monkeypatch)


class TestTd3Tf(LayoutContract):
    name = "td3_tf"

    @pytest.fixture
    def tree(self) -> Tree:
        return open_checkpoint(str(TF_SAMPLE)).tree


class TestTd3Torch(LayoutContract):
    name = "td3_torch"

    @pytest.fixture
    def tree(self) -> Tree:
        return open_checkpoint(str(TORCH_SAMPLE)).tree


class Twins:
    """A layout whose table lists each Q-function's target directly after it."""

    TABLE = LayoutTable(
        name="twins",
        title="two Q-functions",
        framework="torch",
        components={
            "pi": "actor",
            "qa": "critic/q1",
            "qa_slow": "critic_target/q1",
            "qb": "critic/q2",
            "qb_slow": "critic_target/q2",
        },
        facts=AgentMetadata(head="tanh", hidden="relu", epsilon=1e-5),
    )

    @staticmethod
    def recognise(tree: Tree, _name: str) -> RecognizedAgent | None:
        return bind(tree, Twins.TABLE)


class TestTwins(testing.LayoutContract):
    """The order of a table is free: the laws hold for every one."""

    name = "twins"

    @pytest.fixture
    def tree(self, monkeypatch: pytest.MonkeyPatch) -> Tree:
        row = Plugin("twins", f"{__name__}:Twins")
        monkeypatch.setitem(plugins.BUILT_IN, "layouts", (*plugins.BUILT_IN["layouts"], row))
        sizes = {"pi": (3, 1), **dict.fromkeys(("qa", "qa_slow", "qb", "qb_slow"), (4, 1))}
        shapes = {
            f"{network}/{name}": shape
            for network, (inputs, outputs) in sizes.items()
            for name, shape in (("0.weight", (8, inputs)), ("2.weight", (outputs, 8)))
        }
        generator = np.random.default_rng(0)
        weights = {name: generator.normal(size=shape).astype("float32") for name, shape in shapes.items()}
        biases = {name.replace("weight", "bias"): array[:, 0] for name, array in weights.items()}
        return testing.build_tree(weights | biases)

    def test_it_is_registered(self, tree: Tree) -> None:  # the fixture registers it
        super().test_it_is_registered()


def adam_state(weights: dict[str, np.ndarray], step: int = 7) -> dict[str, object]:
    state: dict[str, object] = {}
    for number, array in enumerate(weights.values()):
        state[f"state/{number}/step"] = np.array(step, np.float32)
        state[f"state/{number}/exp_avg"] = np.full_like(array, number)
        state[f"state/{number}/exp_avg_sq"] = np.full_like(array, number + 0.5)
    settings = {
        "lr": 3e-4,
        "betas/0": 0.9,
        "betas/1": 0.999,
        "eps": 1e-8,
        "weight_decay": 0,
        "amsgrad": False,
    }
    state |= {f"param_groups/0/{name}": value for name, value in settings.items()}
    state |= {f"param_groups/0/params/{number}": number for number in range(len(weights))}
    return state


def gaussian_agent() -> Tree:
    """A SAC agent as a dict of state_dicts: an actor with two heads, value networks, a temperature."""
    generator = np.random.default_rng(5)
    networks = {
        "actor": {"l1": (OBS, 4), "l2": (4, 4), "mu": (4, ACT), "log_std": (4, ACT)},
        "critic": {"q1.l1": (OBS + ACT, 4), "q1.l2": (4, 1), "q2.l1": (OBS + ACT, 4), "q2.l2": (4, 1)},
        "value": {"v1": (OBS, 6), "v2": (6, 1)},
        "value_target": {"v1": (OBS, 6), "v2": (6, 1)},
    }
    entries: dict[str, object] = {}
    for component, layers in networks.items():
        weights: dict[str, np.ndarray] = {}
        for name, sizes in layers.items():
            weights |= torch_dense(generator, name, *sizes)
        entries |= {f"{component}/{name}": array for name, array in weights.items()}
        if not component.endswith("_target"):
            entries |= {f"{component}_optimizer/{n}": v for n, v in adam_state(weights).items()}
    entries["log_alpha"] = np.full(1, -1.5, np.float32)
    entries |= {
        f"temperature_optimizer/{n}": v for n, v in adam_state({"log_alpha": np.zeros(1, np.float32)}).items()
    }
    return torch_tree({**entries, "total_it": 9})  # type: ignore[arg-type]


class TestGaussianAgent(LayoutContract):
    name = "td3_torch"

    @pytest.fixture
    def tree(self) -> Tree:
        return gaussian_agent()

    def test_the_other_head_is_no_layer_of_the_mean(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        assert networks(binding) == {
            "actor": ["l1", "l2", "mu"],
            "critic/q1": ["q1/l1", "q1/l2"],
            "critic/q2": ["q2/l1", "q2/l2"],
            "value": ["v1", "v2"],
            "value_target": ["v1", "v2"],
        }
        assert [part.title for part in binding.parts if part.acts] == ["actor"]


def fujimoto_set(seed: int = 0, hidden: int = 5) -> dict[str, object]:
    generator = np.random.default_rng(seed)
    actor: dict[str, np.ndarray] = {}
    for name, (n_in, n_out) in {"l1": (OBS, hidden), "l2": (hidden, hidden), "l3": (hidden, ACT)}.items():
        actor |= torch_dense(generator, name, n_in, n_out)
    critic: dict[str, np.ndarray] = {}
    for first in (1, 4):
        for k, (n_in, n_out) in enumerate([(OBS + ACT, hidden), (hidden, hidden), (hidden, 1)]):
            critic |= torch_dense(generator, f"l{first + k}", n_in, n_out)
    entries: dict[str, object] = {f"actor/{name}": array for name, array in actor.items()}
    entries |= {f"critic/{name}": array for name, array in critic.items()}
    entries |= {f"actor_optimizer/{name}": value for name, value in adam_state(actor).items()}
    entries |= {f"critic_optimizer/{name}": value for name, value in adam_state(critic).items()}
    return entries


class TestFujimoto(LayoutContract):
    name = "fujimoto"

    @pytest.fixture
    def tree(self) -> Tree:
        return torch_tree(fujimoto_set())  # type: ignore[arg-type]

    def test_the_flat_critic_is_two_q_functions(self, tree: Tree) -> None:
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        assert networks(binding) == {
            "actor": ["l1", "l2", "l3"],
            "critic/q1": ["l1", "l2", "l3"],
            "critic/q2": ["l4", "l5", "l6"],
        }

    def test_steps_that_differ_are_refused(self, golden: Golden) -> None:
        entries = fujimoto_set()
        entries["critic_optimizer/state/3/step"] = np.array(8, np.float32)
        tree = torch_tree(entries)  # type: ignore[arg-type]
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        with pytest.raises(MappingError) as caught:
            canonical_tree(tree, binding.moves)
        golden(caught.value)

    def test_several_parameter_groups_are_left_unmapped(self) -> None:
        entries = fujimoto_set()
        entries["critic_optimizer/param_groups/1/lr"] = 1e-3
        tree = torch_tree(entries)  # type: ignore[arg-type]
        binding = recognize_tree(tree, "agent")
        assert binding is not None
        assert not [name for name in canonical_names(tree, binding) if name.startswith("critic_optimizer")]

    @pytest.mark.parametrize(
        ("name", "layers", "components"),
        [
            ("x_actor", 3, ["actor"]),
            ("x_critic", 3, ["critic/q1"]),
            ("x", 6, ["critic/q1", "critic/q2"]),
            ("x", 3, []),  # three layers of any program
        ],
    )
    def test_one_file_is_what_its_name_says(self, name: str, layers: int, components: list[str]) -> None:
        generator = np.random.default_rng(0)
        entries: dict[str, np.ndarray] = {}
        for n, sizes in zip(range(1, layers + 1), [(5, 4), (4, 4), (4, 1)] * 2, strict=False):
            entries |= torch_dense(generator, f"l{n}", *sizes)
        binding = recognize_tree(torch_tree(entries), name)
        assert (binding is not None) == bool(components)
        if binding is None:
            return
        assert list(networks(binding)) == components
        assert all(len(move.source) == 1 for move in binding.moves.moves)


def tf_agent(critic: dict[str, np.ndarray], root: str = "policy/") -> Tree:
    generator = np.random.default_rng(1)
    actor: dict[str, np.ndarray] = {}
    for n, sizes in enumerate([(OBS, 4), (4, 4), (4, ACT)], start=1):
        actor |= dense(generator, f"{root}actor/l{n}", *sizes)
    return tensorflow_tree(actor | critic)


def q_layers(prefix: str, names: list[str], first: int = OBS + ACT) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name, sizes in zip(names, [(first, 4), (4, 4), (4, 1)], strict=True):
        arrays |= dense(np.random.default_rng(2), f"{prefix}/{name}", *sizes)
    return arrays


@pytest.mark.parametrize(
    ("critic", "expected"),
    [
        (
            q_layers("policy/critic", ["l1", "l2", "l3"]) | q_layers("policy/critic", ["l4", "l5", "l6"]),
            {"critic/q1": ["l1", "l2", "l3"], "critic/q2": ["l4", "l5", "l6"]},
        ),
        (
            q_layers("policy/critic/q1", ["l1", "l2", "l3"])
            | q_layers("policy/critic/q2", ["l1", "l2", "l3"]),
            {"critic/q1": ["q1/l1", "q1/l2", "q1/l3"], "critic/q2": ["q2/l1", "q2/l2", "q2/l3"]},
        ),
        (
            q_layers("policy/critic/_functional/_operations", ["1", "2", "3"]),
            {"critic/q1": ["0", "2", "4"]},
        ),
        (
            q_layers("policy/critic/q1/_functional/_operations", ["1", "2", "3"])
            | q_layers("policy/critic/q2/_functional/_operations", ["1", "2", "3"]),
            {"critic/q1": ["q1/0", "q1/2", "q1/4"], "critic/q2": ["q2/0", "q2/2", "q2/4"]},
        ),
        (q_layers("policy/critic", ["l1", "l2", "l3"]), {"critic/q1": ["l1", "l2", "l3"]}),
    ],
    ids=["flat", "q1-q2", "sequential", "two sequentials", "single"],
)
def test_critics_of_every_nesting(critic: dict[str, np.ndarray], expected: dict[str, list[str]]) -> None:
    binding = recognize_tree(tf_agent(critic), "ckpt-1")
    assert binding is not None
    assert networks(binding) == {"actor": ["l1", "l2", "l3"], **expected}


def test_layers_are_ordered_by_their_numbers_not_by_the_file() -> None:
    names = [f"l{n}" for n in (10, 2, 1)]
    generator = np.random.default_rng(0)
    tree: dict[str, np.ndarray] = {}
    for name, sizes in zip(names, [(4, ACT), (4, 4), (OBS, 4)], strict=True):
        tree |= dense(generator, f"actor/{name}", *sizes)
    tree |= dense(generator, "critic/l1", OBS + ACT, 1)
    binding = recognize_tree(tensorflow_tree(tree), "ckpt-1")
    assert binding is not None
    assert networks(binding)["actor"] == ["l1", "l2", "l10"]


def test_a_head_beside_numbered_layers_does_not_disturb_their_order() -> None:
    generator = np.random.default_rng(0)
    tree: dict[str, np.ndarray] = {}
    for name, sizes in {"l3": (4, ACT), "log_std": (4, ACT), "l1": (OBS, 4), "l2": (4, 4)}.items():
        tree |= torch_dense(generator, f"actor/{name}", *sizes)
    tree |= torch_dense(generator, "critic/q.0", OBS + ACT, 1)
    binding = recognize_tree(torch_tree({**tree, "log_alpha": np.zeros(1, np.float32)}), "agent.pt")
    assert binding is not None
    assert networks(binding)["actor"] == ["l1", "l2", "l3"]
    assert not binding.unplaced


def test_a_policy_alone_is_an_agent_under_its_name() -> None:
    generator = np.random.default_rng(0)
    tree = torch_dense(generator, "actor/pi.0", OBS, 4) | torch_dense(generator, "actor/pi.2", 4, ACT)
    binding = recognize_tree(torch_tree(tree), "agent.pt")
    assert binding is not None
    assert binding.layout == "td3_torch"
    assert networks(binding) == {"actor": ["pi/0", "pi/2"]}


def test_the_action_may_enter_at_the_second_layer() -> None:
    # The DDPG wiring of the TD3 authors: l2 takes what l1 gives and the action.
    critic: dict[str, np.ndarray] = {}
    for name, sizes in {"l1": (OBS, 4), "l2": (4 + ACT, 4), "l3": (4, 1)}.items():
        critic |= dense(np.random.default_rng(0), f"policy/critic/{name}", *sizes)
    binding = recognize_tree(tf_agent(critic), "ckpt-1")
    assert binding is not None
    assert networks(binding)["critic/q1"] == ["l1", "l2", "l3"]


def test_layers_that_do_not_connect_are_no_network() -> None:
    critic = q_layers("policy/critic", ["l1", "l2", "l3"]) | dense(
        np.random.default_rng(0), "policy/critic/l2", 9, 9
    )
    binding = recognize_tree(tf_agent(critic), "ckpt-1")
    assert binding is not None
    assert list(networks(binding)) == ["actor"]


def test_layer_norms_have_places_of_their_own() -> None:
    generator = np.random.default_rng(0)
    arrays = dense(generator, "actor/l1", OBS, 4)
    arrays |= {f"actor/l1_norm/{n}": np.ones(4, np.float32) for n in ("gamma", "beta")}
    arrays |= dense(generator, "actor/l2", 4, ACT) | dense(generator, "critic/l1", OBS + ACT, 1)
    binding = recognize_tree(tensorflow_tree(arrays), "ckpt-1")
    assert binding is not None
    assert [layer.kind for layer in binding.parts[0].layers] == ["dense", "layer_norm", "dense"]


def test_an_unknown_tensor_is_left_unmapped() -> None:
    arrays = {"policy/mystery": np.zeros(3, np.float32)}
    tree = Tree({**tf_agent({}).leaves, **tensorflow_tree(arrays).leaves})
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    assert attributes("policy/mystery") not in {move.source for move in binding.moves.moves}


def test_a_network_that_shares_its_tensors_is_found_by_their_other_names() -> None:
    from ckpttool.core import Alias

    tree = tf_agent({})
    aliases = {path: (Alias(attributes(tree.names[path].replace("actor", "actor_target"))),) for path in tree}
    binding = recognize_tree(Tree(tree.leaves, aliases), "ckpt-1")
    assert binding is not None
    assert list(networks(binding)) == ["actor", "actor_target"]


def test_a_layout_that_was_named_must_fit(golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        recognize_tree(torch_tree({"x": np.zeros(3, np.float32)}), "x", "td3_tf")
    golden(caught.value)
    with pytest.raises(UsageError) as caught:
        recognize_tree(torch_tree({"x": np.zeros(3, np.float32)}), "x", "sb9")
    golden(caught.value.message)


def test_torch_to_canonical_to_torch_is_where_it_was() -> None:
    tree = open_checkpoint(str(TORCH_SAMPLE)).tree
    binding = td3.recognize_torch(tree, "x")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    plan = td3.plan_torch(binding, agent, {})
    assert not plan.assumed
    assert not plan.missing
    back = {move.target: move.rule.leaf(agent[move.source]) for move in plan.moves} | dict(plan.added)
    assert set(back) == set(tree)
    for path, result in tree.items():
        again = back[path]
        if isinstance(result, Leaf):
            assert isinstance(again, Leaf)
            assert (again.dtype, again.shape, bytes(again.read())) == (
                result.dtype,
                result.shape,
                bytes(result.read()),
            )
        else:
            assert isinstance(again, ValueLeaf)
            assert again.value == result.value


def test_no_other_layout_takes_a_sample() -> None:
    tf_tree, torch_one = (open_checkpoint(str(p)).tree for p in (TF_SAMPLE, TORCH_SAMPLE))
    assert td3.recognize_torch(tf_tree, "x") is None
    assert fujimoto.recognize_fujimoto(tf_tree, "x") is None
    assert fujimoto.recognize_fujimoto(torch_one, "x") is None
    assert td3.recognize_tf(torch_one, "x") is None


def test_trees_of_odd_shapes_are_not_agents() -> None:
    for tree in (Tree({}), Tree({(): leaf(np.zeros(2, np.float32))}), Tree({keys("actor"): ValueLeaf(3)})):
        assert recognize_tree(tree, "x") is None


def with_adam(tree: Tree, lists: dict[str, str], *, named: bool = True, step: int = 3) -> Tree:
    """Add an actor_optimizer as Keras 2.11 to 2.15 stores it: moments in lists, and no list of variables."""
    weights = [(path, result) for path, result in tree.tensors() if "actor" in tree.names[path]]
    leaves = dict(tree.leaves)
    for path, weight in weights:
        leaves[path] = replace(weight, name=tree.names[path].replace("policy/actor", "Actor"))
    for edge, slot in lists.items():
        for number, (path, weight) in enumerate(weights):
            kind = {
                "role": "slot",
                "slot": slot,
                "name": f"Adam/{slot}/{leaves[path].name}" if named else None,
            }
            at = attributes(f"policy/actor_optimizer/{edge}/{number}")
            leaves[at] = leaf(np.full(weight.shape, number, np.float32), "", **kind)
    leaves[attributes("policy/actor_optimizer/_iterations")] = leaf(np.array(step, np.int64), role="counter")
    return Tree(leaves)


LISTS = {"_momentums": "m", "_velocities": "v"}


def test_moments_without_owners_are_joined_by_order_and_name() -> None:
    tree = with_adam(tf_agent({}), LISTS)
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    agent = canonical_names(tree, binding)
    moment = agent["actor_optimizer/v/2/bias"]
    assert isinstance(moment, Leaf)
    assert set(moment.array()) == {5.0}
    assert binding.of[attributes("policy/actor_optimizer/_velocities/5")] == attributes(
        "policy/actor/l3/bias"
    )


def test_moments_whose_owners_nothing_confirms_are_left_unmapped() -> None:
    tree = with_adam(tf_agent({}), LISTS, named=False)
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    assert not [name for name in canonical_names(tree, binding) if name.startswith("actor_optimizer/m")]


@pytest.mark.parametrize(("step", "lost"), [(0, ()), (3, ("policy/actor_optimizer/_iterations",))])
def test_an_optimizer_before_its_first_update(step: int, lost: tuple[str, ...]) -> None:
    # torch keeps no state then; a count of updates without any moment has no place there.
    tree = with_adam(tf_agent({}), {}, step=step)
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    plan = td3.plan_torch(binding, agent, {})
    first = {move.target: move.source for move in binding.moves.moves}
    placed = {first[move.source] for move in plan.moves} | {first[path] for path in plan.consumed}
    assert tuple(tree.names[path] for path in tree if path not in placed) == lost


def hidden_layers(names: list[str]) -> Tree:
    sizes = [(OBS, 4), *[(4, 4)] * (len(names) - 2), (4, ACT)]
    arrays: dict[str, np.ndarray] = {}
    for name, size in zip(names, sizes, strict=True):
        arrays |= dense(np.random.default_rng(0), f"policy/actor/{name}", *size)
    return tensorflow_tree(arrays)


@pytest.mark.parametrize(
    "names",
    [
        ["h_one", "h_two", "h_three", "out"],
        ["f1", "f2", "hidden", "out"],
        ["inp", "mid", "action"],
        ["l1", "l2", "head"],
        ["fc1", "fc2", "mu"],
    ],
    ids=" ".join,
)
def test_layers_without_numbers_keep_the_order_of_the_file(names: list[str]) -> None:
    binding = recognize_tree(hidden_layers(names), "ckpt-1")
    assert binding is not None
    assert networks(binding)["actor"] == names
    # Users write such networks: where neither sizes nor numbers decide, the file's order is no evidence.
    assert not binding.moves.assumed
    assert bool(binding.unplaced) is (names[0] in ("h_one", "f1"))


def test_torch_counts_a_weight_before_its_bias() -> None:
    tree = hidden_layers(["l1", "l2", "l3"])
    backwards = dict(sorted(tree.leaves.items(), key=lambda item: tree.names[item[0]]))
    assert next(iter(backwards))[-1].value == "bias"
    tree = with_adam(Tree(backwards), LISTS)
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    plan = td3.plan_torch(binding, agent, {})
    targets = {display(m.target): m.rule.leaf(agent[m.source]) for m in plan.moves}
    weights = [path for name, path in targets.items() if name.startswith("actor/")]
    for number, weight in enumerate(weights):
        moment = targets[f"actor_optimizer/state/{number}/exp_avg"]
        assert isinstance(weight, Leaf)
        assert isinstance(moment, Leaf)
        assert moment.shape == weight.shape
        assert len(weight.shape) == 2 - number % 2


@pytest.mark.parametrize("kind", ["lamb", "lion_1", "nadam", "Ftrl", "adafactor_2"])
def test_what_is_not_known_is_not_taken_as_adam(kind: str, golden: Golden) -> None:
    tree = with_adam(tf_agent({}), LISTS)
    counter = attributes("policy/actor_optimizer/_iterations")
    counter_leaf = tree[counter]
    assert isinstance(counter_leaf, Leaf)
    tree = Tree({**tree.leaves, counter: replace(counter_leaf, name=f"{kind}/iteration")})
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    assert not [name for name in canonical_names(tree, binding) if name.startswith("actor_optimizer")]
    golden(binding.moves.notes[0])


def test_a_moment_of_every_kind_is_missed() -> None:
    tree = with_adam(tf_agent({}), {"_momentums": "m"})
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    plan = td3.plan_torch(binding, canonical_tree(tree, binding.moves), {})
    assert len(plan.missing) == 6
    assert all(name.endswith("exp_avg_sq") for name in plan.missing)


def test_moments_of_another_order_are_not_joined(golden: Golden) -> None:
    entries = fujimoto_set()
    for name in ("exp_avg", "exp_avg_sq"):
        one, other = (f"actor_optimizer/state/{n}/{name}" for n in (0, 1))
        entries[one], entries[other] = entries[other], entries[one]
    tree = torch_tree(entries)  # type: ignore[arg-type]
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    assert not [name for name in canonical_names(tree, binding) if name.startswith("actor_optimizer")]
    golden("\n".join(binding.moves.notes))


def test_a_counter_of_any_name_is_carried() -> None:
    arrays = {"policy/it": np.array(5, np.int64)}
    it = {path: replace(result, role="counter") for path, result in tensorflow_tree(arrays).tensors()}
    tree = Tree({**tf_agent({}).leaves, **it})
    binding = recognize_tree(tree, "ckpt-1")
    assert binding is not None
    plan = td3.plan_torch(binding, canonical_tree(tree, binding.moves), {})
    assert "it" in [display(move.target) for move in plan.moves]


def test_a_trunk_and_a_head_are_one_q_function() -> None:
    generator = np.random.default_rng(0)
    critic = dense(generator, "policy/critic/trunk/l1", OBS + ACT, 4) | dense(
        generator, "policy/critic/head/out", 4, 1
    )
    binding = recognize_tree(tf_agent(critic), "ckpt-1")
    assert binding is not None
    assert networks(binding)["critic/q1"] == ["trunk/l1", "head/out"]
    assert "critic/q2" not in networks(binding)


# --- The layout of TensorFlow's objects is written -----------------------------------------------------


def as_tensorflow(tree: Tree, settings: Any = None) -> tuple[Tree, Any]:
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    plan = td3.plan_tf(binding, agent, settings or {})
    return apply_plan(agent, plan), plan


def torch_agent(layers: list[str], kinds: dict[str, object] | None = None) -> Tree:
    """A torch actor with a flat critic of these layers, and an optimizer for the actor."""
    generator = np.random.default_rng(3)
    actor: dict[str, np.ndarray] = {}
    for name, sizes in zip(layers, [(OBS, 4), (4, 4), (4, ACT)], strict=True):
        actor |= torch_dense(generator, name, *sizes)
    entries: dict[str, object] = {f"actor/{name}": array for name, array in actor.items()}
    entries |= {f"actor_target/{name}": array for name, array in actor.items()}
    entries |= {
        f"actor_optimizer/{name}": value for name, value in (adam_state(actor) | (kinds or {})).items()
    }
    entries["total_it"] = 12
    return torch_tree(entries)  # type: ignore[arg-type]


def test_the_optimizers_lists_are_keras() -> None:
    tree, plan = as_tensorflow(open_checkpoint(str(TORCH_SAMPLE)).tree)
    optimizer = "policy/critic_optimizer"
    there = {
        display(alias.path): tree.names[path] for path, others in tree.aliases.items() for alias in others
    }
    listed = [there[f"{optimizer}/_variables/{n}"] for n in range(26)]
    assert listed[:2] == [f"{optimizer}/_iterations", f"{optimizer}/_learning_rate"]
    pairs = [(f"{optimizer}/_momentums/{n}", f"{optimizer}/_velocities/{n}") for n in range(12)]
    assert listed[2:] == [name for pair in pairs for name in pair]
    trained = [there[f"{optimizer}/_trainable_variables/{n}"] for n in range(12)]
    assert trained[:4] == [f"policy/critic/q1/{n}" for n in ("l1/kernel", "l1/bias", "l2/kernel", "l2/bias")]
    for number, name in enumerate(trained):
        moment = tree[attributes(f"{optimizer}/_velocities/{number}")]
        assert isinstance(moment, Leaf)
        assert moment.of is not None
        assert (display(moment.of), moment.slot, moment.role) == (name, "v", "slot")
    assert not plan.missing
    assert not plan.assumed


def test_a_torch_sequential_becomes_a_keras_one_and_comes_back() -> None:
    tree, _ = as_tensorflow(torch_agent(["net.0", "net.2", "net.4"]))
    assert "policy/actor/net/_functional/_operations/1/kernel" in tree.names.values()
    binding = td3.recognize_tf(tf_bundle.stored(tree, graph=True), "ckpt-1")
    assert binding is not None
    assert networks(binding)["actor"] == ["net/0", "net/2", "net/4"]


def test_amsgrad_has_its_third_moments_after_the_others() -> None:
    hats = {
        f"state/{n}/max_exp_avg_sq": np.full(s, n, np.float32)
        for n, s in enumerate([(4, OBS), (4,), (4, 4), (4,), (ACT, 4), (ACT,)])
    }
    tree, plan = as_tensorflow(torch_agent(["l1", "l2", "l3"], {**hats, "param_groups/0/amsgrad": True}))
    optimizer = "policy/actor_optimizer"
    there = {
        display(alias.path): tree.names[path] for path, others in tree.aliases.items() for alias in others
    }
    assert there[f"{optimizer}/_variables/13"] == f"{optimizer}/_velocities/5"
    assert there[f"{optimizer}/_variables/14"] == f"{optimizer}/_velocity_hats/0"
    assert there[f"{optimizer}/_variables/19"] == f"{optimizer}/_velocity_hats/5"
    assert "amsgrad=True" in plan.notes[-1]


def test_an_optimizer_that_has_not_begun_begins_with_zeros() -> None:
    tree = torch_agent(["l1", "l2", "l3"])
    rest = Tree({path: result for path, result in tree.items() if "/state/" not in tree.names[path]})
    written, plan = as_tensorflow(rest)
    moments = [slot for _, slot in written.tensors() if slot.role == "slot"]
    assert len(moments) == 12
    assert not any(moment.array().any() for moment in moments)
    steps = written[attributes("policy/actor_optimizer/_iterations")]
    assert isinstance(steps, Leaf)
    assert (steps.dtype, steps.array().item()) == ("int64", 0)
    assert not plan.missing


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        ({"weight_decay": 0.01}, {"weight_decay"}),
        ({"maximize": True}, {"maximize"}),
        ({"initial_lr": 0.1}, {"initial_lr"}),
        ({"decay": 0.1}, {"decay"}),
        ({"decay": 0.0}, set()),
        ({"weight_decay": 0.01, "decoupled_weight_decay": True}, set()),
        ({"foreach": True, "capturable": True}, set()),
    ],
)
def test_what_keras_cannot_do_is_left_over(settings: dict[str, object], lost: set[str]) -> None:
    tree = torch_agent(["l1", "l2", "l3"], {f"param_groups/0/{name}": v for name, v in settings.items()})
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    agent = canonical_tree(tree, binding.moves)
    plan = td3.plan_tf(binding, agent, {})
    placed = {move.source for move in plan.moves} | set(plan.consumed)
    assert {str(path[-1].value) for path in agent if path not in placed} == lost
    written = plan.settings["actor_optimizer"]
    assert all(written[name] == v for name, v in settings.items() if name not in lost)


def completed(tree: Tree) -> set[str]:
    """Return the networks that a conversion adds to an agent."""
    binding = recognize_tree(tree, "agent")
    assert binding is not None
    _, copies = add_targets(binding, canonical_tree(tree, binding.moves))
    return {str(path[0].value) for path in copies}


def test_targets_that_were_not_saved_are_copied_where_an_agent_trains_with_them() -> None:
    generator = np.random.default_rng(0)
    policy = torch_dense(generator, "actor/pi.0", OBS, 4) | torch_dense(generator, "actor/pi.2", 4, ACT)
    value = torch_dense(generator, "value/v.0", OBS, 1)
    critic = torch_dense(generator, "critic/q.0", OBS + ACT, 1)
    deviation = torch_dense(generator, "actor/log_std", 4, ACT)
    stored = torch_dense(generator, "critic_target/q.0", OBS + ACT, 1)
    cases: list[tuple[dict[str, Any], set[str]]] = [
        (fujimoto_set(), {"actor_target", "critic_target"}),
        (policy, set()),
        ({**policy, **value}, set()),
        (critic, set()),
        ({**policy, **critic}, {"actor_target", "critic_target"}),
        ({**policy, **deviation, **critic}, {"critic_target"}),
        ({**policy, **critic, **stored}, set()),
        ({**policy, **critic, **value}, set()),
    ]
    for entries, expected in cases:
        tree = torch_tree(entries)
        assert completed(tree) == expected
        _, plan = as_tensorflow(tree)
        assert not plan.missing


def test_a_lost_moment_is_missed_in_tensorflow() -> None:
    tree = torch_agent(["l1", "l2", "l3"])
    rest = Tree(
        {p: result for p, result in tree.items() if tree.names[p] != "actor_optimizer/state/3/exp_avg_sq"}
    )
    _, plan = as_tensorflow(rest)
    assert plan.missing == ("policy/actor_optimizer/_velocities/3",)


def test_a_told_learning_rate_is_exact_only_if_it_is_that_number() -> None:
    written, plan = as_tensorflow(torch_agent(["l1", "l2", "l3"]))
    binding = td3.recognize_tf(written, "ckpt-1")
    assert binding is not None
    agent = canonical_tree(written, binding.moves)
    for settings, rate in (
        (plan.settings, 3e-4),
        ({"actor_optimizer": {"learning_rate": 0.5}}, float(np.float32(3e-4))),
    ):
        back = apply_plan(agent, td3.plan_torch(binding, agent, settings))
        group = [path for path in back if path[0].value == "actor_optimizer" and path[-1].value == "lr"]
        assert contents(back[group[0]]) == rate
