"""TensorFlow's variables by name and as objects, layers by kind, parts: on trees, without a framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.conversion import general, parts
from ckpttool.conversion.write import save
from ckpttool.core import (
    Inline,
    Leaf,
    MappingError,
    Tree,
    UnsupportedError,
    UsageError,
    ValueLeaf,
    attr,
    display,
    index,
    key,
    sidecar,
)
from ckpttool.formats import (
    VariableInfo,
    count_adam_steps,
    open_checkpoint,
    place_tree,
    tf_bundle,
    tree_by_name,
)
from ckpttool.libraries import optimizer_entries, tf_names
from ckpttool.mapping import Move, Plan, apply_plan, conversion_by_kinds
from ckpttool.mapping.rules import KEEP
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.test_layouts import fujimoto_set
from tests.trees import attributes, keys, torch_dense, torch_tree

BATCH_NORM = ("gamma", "beta", "moving_mean", "moving_variance")


def named(arrays: dict[str, Any]) -> Tree:
    """The tree of a file that stores these variables by name."""
    result = {}
    for name, value in arrays.items():
        array = np.asarray(value, None if isinstance(value, np.ndarray) else np.float32)
        result[name] = VariableInfo(array.dtype.name, array.shape, Inline(array.tobytes()))
    return tree_by_name(result)


def adam(owner: str, first: float, slots: tuple[str, str] = ("Adam", "Adam_1")) -> dict[str, Any]:
    shape = (2, 2)
    arrays = {owner: np.full(shape, first, np.float32)}
    arrays |= {f"{owner}/{slot}": np.full(shape, first + n, np.float32) for n, slot in enumerate(slots, 1)}
    return arrays


def powers(scope: str = "", suffix: str = "") -> dict[str, Any]:
    return {f"{scope}beta1_power{suffix}": 0.9, f"{scope}beta2_power{suffix}": 0.999}


def as_graph(tree: Tree) -> tuple[Tree, Any]:
    """The object graph of variables known by name, as it will be read from a file."""
    plan = tf_names.plan_variable_objects(tree)
    return tf_bundle.stored(apply_plan(tree, plan), graph=True), plan


def slots(tree: Tree) -> dict[str, tuple[str | None, str]]:
    return {
        tree.names[path]: (leaf.slot, display(leaf.of))
        for path, leaf in tree.tensors()
        if leaf.role == "slot" and leaf.of is not None
    }


def first(tree: Tree, name: str) -> float:
    leaf = next(leaf for path, leaf in tree.tensors() if tree.names[path] == name)
    return float(leaf.array().reshape(-1)[0])


# --- By name to objects ------------------------------------------------------------------------------


def test_one_adam_becomes_an_optimizer_with_slots() -> None:
    graph, plan = as_graph(named(adam("actor/l1/kernel", 1) | powers()))
    assert slots(graph) == {
        "optimizer/slots/m/actor/l1/kernel": ("m", "actor/l1/kernel"),
        "optimizer/slots/v/actor/l1/kernel": ("v", "actor/l1/kernel"),
    }
    assert first(graph, "optimizer/slots/v/actor/l1/kernel") == 3
    assert first(graph, "optimizer/beta1_power") == np.float32(0.9)
    assert not plan.notes


@pytest.mark.parametrize(
    ("scope", "optimizer"),
    [("training/", "training"), ("actor/", "actor/optimizer"), ("optimizer/", "optimizer")],
)
def test_an_optimizer_is_called_as_its_scope(scope: str, optimizer: str) -> None:
    graph, _ = as_graph(named(adam("actor/kernel", 1) | powers(scope)))
    assert set(slots(graph)) == {f"{optimizer}/slots/{slot}/actor/kernel" for slot in "mv"}
    assert f"{optimizer}/beta2_power" in graph.names.values()


def test_an_optimizer_does_not_take_a_variables_place() -> None:
    graph, _ = as_graph(named(adam("optimizer/kernel", 1) | powers()))
    assert set(slots(graph)) == {f"optimizer_1/slots/{slot}/optimizer/kernel" for slot in "mv"}


def test_optimizers_in_scopes_own_the_variables_there() -> None:
    both = adam("actor/kernel", 1) | adam("critic/kernel", 5) | powers("actor/") | powers("critic/")
    graph, plan = as_graph(named(both))
    assert set(slots(graph)) == {
        f"{c}/optimizer/slots/{s}/{c}/kernel" for c in ("actor", "critic") for s in "mv"
    }
    assert len(plan.assumed) == 2


def test_moments_of_nobody_for_sure_stay_plain_variables(golden: Golden) -> None:
    both = adam("actor/kernel", 1) | adam("critic/kernel", 5) | powers() | powers(suffix="_1")
    graph, plan = as_graph(named(both))
    assert not slots(graph)
    assert set(graph.names.values()) == set(both)
    golden(plan.notes[0])
    assert {m.target for m in plan.moves} == set(graph)


def test_optimizers_in_scopes_own_the_moments_there() -> None:
    # Two programs' optimizers train one variable, each in a scope of its own.
    both = {"w": np.zeros((2, 2), np.float32)} | powers("one/") | powers("two/")
    for number, scope in enumerate(("one", "two")):
        both |= {
            f"{scope}/w/Adam{end}": np.full((2, 2), 10 * number + n, np.float32)
            for n, end in enumerate(("", "_1"))
        }
    graph, plan = as_graph(named(both))
    assert len(plan.moves) == len(both)
    assert set(slots(graph)) == {f"{scope}/slots/{slot}/w" for scope in ("one", "two") for slot in "mv"}
    assert first(graph, "two/slots/v/w") == 11
    assert len(graph) == len(both)


def test_two_moments_of_one_kind_are_nobodys_for_sure(golden: Golden) -> None:
    tree = named(adam("w", 1) | powers())
    twin = {(attributes("x")[0], *path): leaf for path, leaf in tree.items() if "Adam" in tree.names[path]}
    graph, plan = as_graph(Tree({**tree.leaves, **twin}))
    assert not slots(graph)
    assert len(graph) == 7
    golden(plan.notes[0])


def test_two_entries_of_one_target_are_refused(golden: Golden) -> None:
    tree = named({"a": 1.0, "b": 2.0})
    one, other = tree
    with pytest.raises(MappingError) as caught:
        apply_plan(tree, Plan((Move(one, one, KEEP), Move(other, one, KEEP))))
    golden(caught.value)


def test_lists_and_output_names() -> None:
    tree = named(
        {"net/0/w:0": np.ones((2, 3), np.float32), "net/1/w:0": np.ones(3, np.float32), "n/01/w": 1.0}
    )
    graph, _ = as_graph(tree)
    assert [step.kind for step in next(p for p in graph if display(p) == "net/1/w")] == [
        "attr",
        "index",
        "attr",
    ]
    assert "n/01/w" in graph.names.values()


def test_there_and_back_is_where_it_was() -> None:
    tree = named(
        adam("actor/l1/kernel", 1) | adam("actor/l2/kernel", 7) | powers() | {"global_step": np.array(3)}
    )
    graph, _ = as_graph(tree)
    back = tf_bundle.stored(apply_plan(graph, tf_names.plan_variable_names(graph, {})), graph=False)
    assert {n: bytes(back[p].read()) for p, n in back.names.items()} == {  # type: ignore[union-attr]
        n: bytes(tree[p].read())  # type: ignore[union-attr]
        for p, n in tree.names.items()
    }
    assert slots(back) == slots(tree)


# --- Objects to names --------------------------------------------------------------------------------


def sample() -> Tree:
    return open_checkpoint(str(TF_SAMPLE)).tree


def test_keras_adam_becomes_tensorflow_1_adam(golden: Golden) -> None:
    tree = sample()
    plan = tf_names.plan_variable_names(tree, {})
    back = tf_bundle.stored(apply_plan(tree, plan), graph=False)
    kernel = "policy/critic/q2/l3/kernel"
    scope = "policy/critic_optimizer"
    assert slots(back)[f"{scope}/{kernel}/Adam"] == ("m", kernel)
    assert first(back, f"{scope}/{kernel}/Adam_1") == first(tree, "policy/critic_optimizer/_velocities/10")
    # The count of updates is in the powers, to the last bit, and beside them as Keras had it.
    powers_of = [first(back, f"policy/critic_optimizer/{name}") for name in optimizer_entries.POWERS]
    assert count_adam_steps(*powers_of) == first(tree, "policy/critic_optimizer/_iterations") == 14000
    golden("\n".join(plan.assumed))
    assert {move.source for move in plan.moves} == set(tree)


def test_betas_that_are_told_are_not_assumed() -> None:
    settings = {name: {"beta_1": 0.5, "beta_2": 0.75} for name in ("actor_optimizer", "critic_optimizer")}
    plan = tf_names.plan_variable_names(sample(), settings)
    assert not plan.assumed
    added = {display(path): leaf for path, leaf in plan.added.items()}
    power = added["policy/actor_optimizer/beta1_power"]
    assert isinstance(power, Leaf)
    assert power.array().item() == 0.0  # 0.5^7001 is no float32


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (("Momentum",), ("momentum",)),
        (("RMSProp", "RMSProp_1"), ("rms", "momentum")),
        (("Adagrad",), ("accumulator",)),
    ],
)
@pytest.mark.parametrize("scope", ["", "train/"])
def test_slots_without_powers_are_an_optimizers_slot_variables(
    names: tuple[str, ...], kinds: tuple[str, ...], scope: str
) -> None:
    variables_ = ("actor/fc/kernel", "actor/fc/bias")
    arrays = {name: np.full((2, 2), n, np.float32) for n, name in enumerate(variables_)}
    numbers = {}
    for of in variables_:
        for name, kind in zip(names, kinds, strict=True):
            numbers[f"{scope}optimizer/slots/{kind}/{of}".replace("train/optimizer", "train")] = (kind, of)
            arrays[f"{scope}{of}/{name}"] = np.full((2, 2), len(arrays), np.float32)
    stored, plan = as_graph(named(arrays))
    assert not plan.notes
    assert slots(stored) == numbers
    back = apply_plan(stored, tf_names.plan_variable_names(stored, {}))
    for name, (_, of) in numbers.items():
        assert first(stored, name) != first(stored, of)
    assert {path: leaf.array().tolist() for path, leaf in back.tensors() if leaf.role == "parameter"} == {
        tuple(map(attr, of.split("/"))): arrays[of].tolist() for of in variables_
    }


def test_slots_of_a_moving_average_stay_variables() -> None:
    arrays = {"w": np.ones((2, 2), np.float32), "w/ExponentialMovingAverage": np.zeros((2, 2), np.float32)}
    _, plan = as_graph(named(arrays))
    assert {display(move.target) for move in plan.moves} == set(arrays)


def test_momentum_without_its_learning_rate_is_not_multiplied_by_a_guess(golden: Golden) -> None:
    arrays = {"net/fc/kernel": np.ones((2, 2), np.float32), "net/fc/bias": np.ones(2, np.float32)}
    arrays |= {f"{name}/Momentum": 3 * value for name, value in arrays.items()}
    tree = named(arrays)
    plan = general.to_objects(tree, {}, file=True)
    assert plan is not None
    assert len(plan.missing) == 2
    golden("\n".join(plan.notes))
    record = general.to_objects(tree, {"optimizer": {"learning_rate": 0.5}}, file=True)
    assert record is not None
    assert not record.missing
    converted = {display(path): leaf.array().tolist() for path, leaf in apply_plan(tree, record).tensors()}
    assert converted["optimizer/momentums/0"] == [[-1.5, -1.5], [-1.5, -1.5]]
    assert converted["fc/kernel"] == [[1, 1], [1, 1]]


def test_epsilon_of_tensorflow_1_is_named_for_keras() -> None:
    tree = named(adam("net/fc/kernel", 1) | powers())
    plan = general.to_objects(tree, {}, file=True)
    assert plan is not None
    assert not plan.missing
    assert any("epsilon=1e-08" in note for note in plan.notes)


def test_two_optimizers_of_one_variable_have_a_scope_each() -> None:
    one = tf_names.plan_variable_objects(named(adam("kernel", 1) | powers("a/")))
    two = apply_plan(named(adam("kernel", 1) | powers("a/")), one)
    other = {
        tuple(s._replace(value="b") if s.value == "a" else s for s in path): leaf
        for path, leaf in two.items()
        if path[0].value == "a"
    }
    plan = tf_names.plan_variable_names(Tree({**two.leaves, **other}), {})
    assert {display(move.target) for move in plan.moves} == {
        "kernel", "a/kernel/Adam", "a/kernel/Adam_1", "b/kernel/Adam", "b/kernel/Adam_1",
        "a/beta1_power", "a/beta2_power", "b/beta1_power", "b/beta2_power",
    }  # fmt: skip


def test_a_count_that_no_file_should_have_is_no_danger() -> None:
    tree = sample()
    for count in (-5, 2**62):
        changed = {
            path: Leaf("int64", (), Inline(count.to_bytes(8, "little", signed=True)), leaf.key, leaf.role)
            if tree.names[path].endswith("_iterations") and isinstance(leaf, Leaf)
            else leaf
            for path, leaf in tree.items()
        }
        plan = tf_names.plan_variable_names(Tree(changed, tree.aliases), {})
        assert len(plan.added) == 4


def file_bytes(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{end}").read_bytes() for end in (".index", ".data-00000-of-00001")]


@pytest.mark.parametrize("source", [TF_SAMPLE, TORCH_SAMPLE])
def test_by_name_and_back_are_the_same_objects(source: Path, tmp_path: Path) -> None:
    straight, named_, back = (tmp_path / name for name in ("straight-7", "named-7", "back-7"))
    convert(str(source), str(straight), to="tf", sync=False)
    convert(str(source), str(named_), to="tf1", sync=False)
    done = convert(str(named_), str(back), to="tf", sync=False)
    assert done.report.complete
    assert file_bytes(back) == file_bytes(straight)
    # What was made is no longer known by name, and needs no memory of the objects.
    assert not sidecar.load_sidecar(str(back)).objects  # type: ignore[union-attr]


def test_without_its_sidecar_the_names_still_say_whose_moments_are_whose(tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "named-1"), to="tf1", sync=False)
    (tmp_path / "named-1.ckpttool.json").unlink()
    convert(str(tmp_path / "named-1"), str(tmp_path / "back-1"), to="tf", sync=False)
    tree = open_checkpoint(str(tmp_path / "back-1")).tree
    bias = "policy/actor/l2/bias"
    assert slots(tree)[f"policy/actor_optimizer/slots/v/{bias}"] == ("v", bias)
    assert len(slots(tree)) == 36
    assert first(tree, "policy/critic_optimizer/_iterations") == 14000


def test_names_go_to_torch_as_the_objects_do(tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "named-1"), to="tf1", sync=False)
    one = convert(str(TF_SAMPLE), str(tmp_path / "one.pt"), sync=False)
    other = convert(str(tmp_path / "named-1"), str(tmp_path / "other.pt"), sync=False)
    assert other.report.complete
    assert one.digest == other.digest


@pytest.mark.parametrize(
    "change",
    [
        {"graph": "no base64!"},
        {"graph": "AAAA"},
        {"graph": ""},
        {"keys": {"policy/total_it": "elsewhere"}},
        {"keys": {}},
    ],
)
def test_a_memory_of_other_objects_is_not_followed(change: dict[str, Any], tmp_path: Path) -> None:
    convert(str(TF_SAMPLE), str(tmp_path / "named-1"), to="tf1", sync=False)
    file = tmp_path / "named-1.ckpttool.json"
    content = json.loads(file.read_text())
    content["objects"] |= change
    content["undo"] = None
    file.write_text(json.dumps(content))
    done = convert(str(tmp_path / "named-1"), str(tmp_path / "back-1"), to="tf", sync=False)
    tree = open_checkpoint(str(tmp_path / "back-1")).tree
    assert len(tree) == len(open_checkpoint(str(tmp_path / "named-1")).tree)
    assert len(slots(tree)) == 36
    assert done.report.complete


# --- By kind -----------------------------------------------------------------------------------------


def torch_model() -> Tree:
    generator = np.random.default_rng(0)
    tensors = torch_dense(generator, "net.0", 4, 4) | torch_dense(generator, "head.out", 4, 2)
    tensors |= {"net.1.weight": np.ones(4, np.float32), "net.1.bias": np.zeros(4, np.float32)}
    return torch_tree({**tensors, "table.weight": np.ones((9, 5), np.float32)})


def test_torch_layers_go_by_kind_and_come_back() -> None:
    tree = torch_model()
    plan = conversion_by_kinds.plan_to_tensorflow(tree)
    moves, labels = plan.moves, plan.labels
    rules = {display(move.target): move.rule.name for move in moves}
    assert rules == {
        "net/0/kernel": "transpose",  # though it is square
        "net/0/bias": "keep",
        "net/1/gamma": "keep",
        "net/1/beta": "keep",
        "head/out/kernel": "transpose",
        "head/out/bias": "keep",
    }
    there = apply_plan(tree, Plan(moves, labels=labels))
    graph = tf_bundle.stored(there, graph=True)
    back = {
        display(m.target): m.rule.leaf(graph[m.source])
        for m in conversion_by_kinds.plan_to_torch(graph).moves
    }
    for path, leaf in tree.tensors():
        if "table" not in tree.names[path]:
            assert isinstance(again := back[tree.names[path]], Leaf)
            assert bytes(again.read()) == bytes(leaf.read())


def test_a_matrix_that_may_be_an_embedding_stops_the_conversion(tmp_path: Path) -> None:
    save(torch_model(), str(tmp_path / "model.pt"))
    ran = in_process("convert", "model.pt", "ckpt-1", "--to", "tf", "--json", cwd=tmp_path)
    assert ran.status == 1
    assert ran.json()["unused"] == ["table/weight"]
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


# --- Parts -------------------------------------------------------------------------------------------


def test_a_part_has_its_own_paths_and_no_strangers() -> None:
    tree, lost = parts.select_part(sample(), "policy/actor")
    assert set(tree.names.values()) == {f"l{n}/{name}" for n in (1, 2, 3) for name in ("kernel", "bias")}
    assert not tree.aliases
    assert not lost


def test_slots_of_what_is_outside_are_lost() -> None:
    tree, lost = parts.select_part(sample(), "policy/actor_optimizer")
    assert len(lost) == 12
    assert set(tree.names.values()) == {"_iterations", "_learning_rate"}
    whole, none = parts.select_part(sample(), "policy")
    assert not none
    assert slots(whole)["actor_optimizer/_momentums/0"] == ("m", "actor/l1/kernel")


def test_a_dotted_key_is_cut_in_two() -> None:
    tree, _ = parts.select_part(open_checkpoint(str(TORCH_SAMPLE)).tree, "critic/q1")
    assert (*keys("l1.weight"),) in tree
    assert len(tree) == 6
    assert set(parts.full_names(tree, "critic/q1").values()) == {
        f"critic/q1/l{n}/{name}" for n in (1, 2, 3) for name in ("weight", "bias")
    }


@pytest.mark.parametrize("part", ["policy/acto", "nothing", "policy/actor/l1/kernel"])
def test_a_part_must_be_there(part: str, golden: Golden) -> None:
    with pytest.raises(UsageError) as caught:
        parts.select_part(sample(), part)
    golden(caught.value)


def test_one_network_of_a_torch_agent(tmp_path: Path, golden: Golden) -> None:
    ran = in_process(
        "convert", TORCH_SAMPLE, "actor-1", "--to", "tf", "--part", "actor", "--json", cwd=tmp_path
    )
    assert ran.status == 0, ran.err
    assert ran.json()["mapped"][0]["source"] == "actor/l1/weight"
    assert ran.json()["mapped"][0]["target"] == "l1/kernel"
    names = open_checkpoint(str(tmp_path / "actor-1")).tree.names.values()
    assert set(names) == {"save_counter"} | {f"l{n}/{name}" for n in (1, 2, 3) for name in ("kernel", "bias")}
    ran = in_process("convert", TORCH_SAMPLE, "x-1", "--to", "tf", "--part", "nobody", cwd=tmp_path)
    golden(refused(ran))


# --- Agents ------------------------------------------------------------------------------------------


def test_an_agent_without_targets_gets_copies(tmp_path: Path) -> None:
    save(torch_tree(fujimoto_set()), str(tmp_path / "agent.pt"))  # type: ignore[arg-type]
    done = convert(str(tmp_path / "agent.pt"), str(tmp_path / "ckpt-1"), to="tf")
    assert done.written
    assert [
        name for line in done.report.assumed for name in ("actor_target", "critic_target") if name in line
    ]
    tree = open_checkpoint(str(tmp_path / "ckpt-1")).tree
    names = {name: tree[path] for path, name in tree.names.items()}
    for network in ("actor", "critic"):
        layers = [name for name in names if name.startswith(f"policy/{network}/")]
        assert layers
        for name in layers:
            copy = names[name.replace(f"/{network}/", f"/{network}_target/", 1)]
            assert np.array_equal(copy.array(), names[name].array())  # type: ignore[union-attr]


def test_an_agent_from_torch_by_name(tmp_path: Path) -> None:
    done = convert(str(TORCH_SAMPLE), str(tmp_path / "model-1"), to="tf1")
    assert done.written
    assert not done.report.assumed  # torch's file holds the betas
    tree = open_checkpoint(str(tmp_path / "model-1")).tree
    steps = [first(tree, f"policy/actor_optimizer/{name}") for name in optimizer_entries.POWERS]
    assert count_adam_steps(*steps) == first(tree, "policy/actor_optimizer/_iterations")
    scope, bias = "policy/actor_optimizer", "policy/actor/l2/bias"
    assert slots(tree)[f"{scope}/{bias}/Adam_1"] == ("v", bias)


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["t2t_transformer/model.ckpt-1", "tfx_estimator/model.ckpt-1000"])
def test_real_files_by_name_become_objects_and_names_again(corpus: Path, name: str, tmp_path: Path) -> None:
    source = corpus / "tf" / "tf1_name_v2" / name
    assert convert(str(source), str(tmp_path / "objects-1"), to="tf", sync=False).written
    assert convert(str(tmp_path / "objects-1"), str(tmp_path / "names-1"), to="tf1", sync=False).written
    before, after = (open_checkpoint(str(p)).tree for p in (source, tmp_path / "names-1"))
    old = {before.names[p]: bytes(leaf.read()) for p, leaf in before.tensors()}
    new = {after.names[p]: bytes(leaf.read()) for p, leaf in after.tensors()}
    assert old == new


def test_help_says_what_can_be_written() -> None:
    ran = in_process("convert", "--help", cwd=ROOT)
    from ckpttool.conversion.targets import TARGETS

    assert all(word in ran.out for word in TARGETS)
    assert "--part" in ran.out


def test_values_that_are_no_tensors_are_left_in_the_sidecar(tmp_path: Path) -> None:
    tree = torch_model()
    leaves: dict[Any, Any] = {path: leaf for path, leaf in tree.items() if "table" not in tree.names[path]}
    leaves |= {keys("gamma"): ValueLeaf(0.5), keys("worst"): ValueLeaf(float("-inf"))}
    leaves |= {keys("note"): ValueLeaf("x" * 5000)}
    save(Tree(leaves), str(tmp_path / "model.pt"))
    assert convert(str(tmp_path / "model.pt"), str(tmp_path / "a-1"), to="tf").report.complete
    stored = sidecar.load_sidecar(str(tmp_path / "a-1"))
    assert stored is not None
    residue = {row["path"]: (row["type"], row["value"]) for row in stored.residue}
    assert residue == {
        "gamma": ("float", 0.5),
        "worst": ("float", "-Infinity"),
        "note": ("str", "x" * 1000),
    }


# --- As it is ------------------------------------------------------------------------------------------


def test_a_tree_of_objects_is_saved_as_torchs_dicts(tmp_path: Path) -> None:
    tree = sample()
    saved_digest = save(tree, str(tmp_path / "agent.pt"))
    again = open_checkpoint(str(tmp_path / "agent.pt")).tree
    assert {again.names[path]: bytes(leaf.read()) for path, leaf in again.tensors()} == {
        tree.names[path].replace("/kernel", "/_kernel")
        if path[-1].value == "_kernel"
        else tree.names[path]: bytes(leaf.read())
        for path, leaf in tree.tensors()
    }
    assert {step.kind for path in again for step in path} == {"key", "index"}
    assert saved_digest.sha256 == digest(str(tmp_path / "agent.pt")).sha256


def test_a_list_of_some_items_is_a_dict_of_numbers(tmp_path: Path) -> None:
    tree = Tree({(attr("layers"), index(n)): Leaf("float32", (), Inline(bytes(4)), "") for n in (1, 3)})
    save(tree, str(tmp_path / "some.pt"))
    again = open_checkpoint(str(tmp_path / "some.pt")).tree
    assert list(again) == [(key("layers"), key(1)), (key("layers"), key(3))]


def test_an_attribute_and_a_key_of_one_name_are_two_things(tmp_path: Path, golden: Golden) -> None:
    two = Tree(
        {(attr("a"),): Leaf("bool", (), Inline(b"1"), ""), (key("a"),): Leaf("bool", (), Inline(b"0"), "")}
    )
    with pytest.raises(UnsupportedError) as caught:
        save(two, str(tmp_path / "two.pt"))
    golden(caught.value)
    assert not list(tmp_path.iterdir())


def test_replayed_experience_can_be_taken_out(tmp_path: Path) -> None:
    shapes = {
        "replay_buffer/obs": (5, 3),
        "replay_buffer/action": (5, 1),
        "pi/kernel": (3, 1),
        "pi/bias": (1,),
    }
    values = {name: np.arange(np.prod(shape), dtype="<f4").reshape(shape) for name, shape in shapes.items()}
    leaves = {
        tuple(map(attr, name.split("/"))): Leaf("float32", value.shape, Inline(value.tobytes()), name)
        for name, value in values.items()
    }
    save(Tree(leaves), str(tmp_path / "agent-1"), "tf1")
    target = tmp_path / "replay.pt"
    done = convert(str(tmp_path / "agent-1"), str(target), part="replay_buffer")
    assert done.report.complete
    assert {line.rule for line in done.report.mapped} == {"keep"}
    arrays = {leaf.key: leaf.array().tolist() for _, leaf in open_checkpoint(str(target)).tree.tensors()}
    assert arrays == {name: values[f"replay_buffer/{name}"].tolist() for name in ("obs", "action")}


# --- Forms of one model --------------------------------------------------------------------------------


def exported() -> dict[str, Any]:
    """The variables of `model.export()`: the list of a model's variables, and its copy in another order."""
    rng = np.random.default_rng(0)
    shapes = {
        "conv2d/kernel": (3, 3, 2, 4),
        "conv2d/bias": (4,),
        "dense/kernel": (4, 4),
        "dense/bias": (4,),
        "dense_1/kernel": (4, 4),
        "dense_1/bias": (4,),
    }
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    first = {f"variables/sequential/{name}": value for name, value in values.items()}
    return first | {f"_all_variables/sequential/{name}": values[name] for name in reversed(values)}


def test_an_exported_model_has_its_layers_once() -> None:
    tree = named(exported())
    plan = general.to_objects(tree, {}, file=False)
    assert plan is not None
    arrays = {display(path): leaf.array() for path, leaf in apply_plan(tree, plan).tensors()}
    assert len(arrays) == 6
    assert {*(move.source for move in plan.moves), *plan.consumed} == set(tree)
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, exported()[f"variables/sequential/{name}"])
    file = general.to_objects(tree, {}, file=True)
    assert file is not None
    places = place_tree(apply_plan(tree, file), "policy").datasets
    assert list(places) == [
        *("layers/conv2d/vars/0", "layers/conv2d/vars/1", "layers/dense/vars/0", "layers/dense/vars/1"),
        *("layers/dense_1/vars/0", "layers/dense_1/vars/1"),
    ]
    np.testing.assert_array_equal(places["layers/dense/vars/0"].array(), arrays["dense/kernel"])


def test_an_export_whose_lists_differ_is_not_taken_for_one_model() -> None:
    changed = exported()
    changed["_all_variables/sequential/dense/kernel"] = changed["variables/sequential/dense_1/kernel"]
    assert not parts.is_keras_export(named(changed))
    assert parts.is_keras_export(named(exported()))


def numbered_export() -> dict[str, np.ndarray]:
    """A Sequential model's variables in call order, and again in the order of a set."""
    rng = np.random.default_rng(0)
    shapes = ((8, 16), (16,), (16, 16), (16,), (16, 2), (2,))
    values = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    first = {f"variables/{n}": value for n, value in enumerate(values)}
    return first | {f"_all_variables/{n}": values[at] for n, at in enumerate((2, 1, 5, 0, 4, 3))}


def test_an_exported_list_of_variables_may_be_repeated_in_another_order(tmp_path: Path) -> None:
    arrays = numbered_export()
    save(named(arrays), str(tmp_path / "variables"), "tf")
    done = convert(str(tmp_path / "variables"), str(tmp_path / "net.pt"))
    assert done.written
    assert not done.report.unused
    moves = {move.target: move for move in done.report.mapped}
    assert [moves[f"variables/{n}/weight"].shape_out for n in range(3)] == [(16, 8), (16, 16), (2, 16)]
    arrays["_all_variables/0"] = arrays["_all_variables/0"].T.copy()
    assert not parts.is_keras_export(named(arrays))


def test_an_h5_file_of_weights_becomes_keras_3s_by_class_and_order(tmp_path: Path) -> None:
    layers = {
        "up": {"kernel": np.ones((3, 3, 2, 4), np.float32)},
        "zeta": {"kernel": np.full((4, 4), 2, np.float32), "bias": np.full(4, 3, np.float32)},
        "n": {name: np.full(4, at, np.float32) for at, name in enumerate(BATCH_NORM)},
        "alpha": {"kernel": np.full((4, 4), 5, np.float32), "bias": np.full(4, 6, np.float32)},
    }
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["layer_names"] = np.array([*layers, "empty"], "S")
        file.create_group("empty").attrs["weight_names"] = np.array([], "S")
        for layer, weights in layers.items():
            group = file.create_group(layer)
            group.attrs["weight_names"] = np.array([f"{layer}/{name}:0" for name in weights], "S")
            for name, value in weights.items():
                group[f"{layer}/{name}:0"] = value
    done = convert(str(tmp_path / "x.h5"), str(tmp_path / "y.weights.h5"), sync=False)
    assert done.written
    assert done.report.complete
    groups = {"up": "conv2d", "zeta": "dense", "n": "batch_normalization", "alpha": "dense_1"}
    with h5py.File(tmp_path / "y.weights.h5") as file:
        for layer, group in groups.items():
            for at, value in enumerate(layers[layer].values()):
                np.testing.assert_array_equal(file[f"layers/{group}/vars/{at}"][()], value)


@pytest.mark.torch
def test_an_optimizers_order_is_not_that_of_a_files_groups(tmp_path: Path) -> None:
    import torch

    # A model that makes `zeta`, a layer norm, before `alpha`: Keras saves the two the other way round.
    weights = [np.full(3, 1.0), np.full(3, 2.0), np.full((3, 2), 3.0), np.full(2, 4.0)]
    with h5py.File(tmp_path / "x.weights.h5", "w", track_order=True) as file:
        for group, name, values in (
            ("alpha", "dense", weights[2:]),
            ("layers/layer_normalization", "layer_normalization", weights[:2]),
            ("optimizer", "adam", [np.int64(5), np.float32(0.01), *(10 * w for w in weights for _ in "mv")]),
        ):
            leaves = file.create_group(f"{group}/vars", track_order=True)
            leaves.attrs["name"] = name
            for at, value in enumerate(values):
                leaves[str(at)] = value if np.ndim(value) == 0 else value.astype(np.float32)
    done = convert(str(tmp_path / "x.weights.h5"), str(tmp_path / "t"), to="tf", sync=False)
    assert done.written
    leaves = {
        leaf.key.partition("/.A")[0]: leaf for _, leaf in open_checkpoint(str(tmp_path / "t")).tree.tensors()
    }
    moments = [leaves[f"optimizer/_momentums/{at}"].array() for at in range(4)]
    for moment, weight in zip(moments, weights, strict=True):
        np.testing.assert_array_equal(moment, 10 * weight)
    done = convert(str(tmp_path / "x.weights.h5"), str(tmp_path / "t.pt"), sync=False)
    assert done.written
    content = torch.load(tmp_path / "t.pt")
    assert [tuple(w.shape) for w in content["model"].values()] == [(3,), (3,), (2, 3), (2,)]
    for at, weight in enumerate(content["model"].values()):
        np.testing.assert_array_equal(content["optimizer"]["state"][at]["exp_avg"], 10 * weight)
