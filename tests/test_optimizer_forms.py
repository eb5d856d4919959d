"""Optimizers without a framework: parameter groups of torch, what nobody tells, what two options say."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.commands.convert import convert
from ckpttool.conversion.optimizer_options import add_stated_settings
from ckpttool.conversion.options import NO_OPTIMIZER_OPTIONS
from ckpttool.conversion.write import save
from ckpttool.core import Container, Leaf, Tree, UsageError, ValueLeaf, attr, display, key
from ckpttool.core import Path as TreePath
from ckpttool.core.optimizers import ADAMW_DEFAULTS, UNCONVERTED
from ckpttool.formats import open_checkpoint, plain_facts
from ckpttool.libraries import RecognizedAgent, recognize_tree, td3
from ckpttool.libraries.optimizer_states import (
    ConvertedOptimizers,
    KerasStates,
    OptimizerSettings,
    WrittenOptimizer,
)
from ckpttool.libraries.optimizers_read import StoredOptimizer, from_torch
from ckpttool.mapping import Plan, Scale, apply_plan
from ckpttool.mapping.rules import KEEP, canonical_tree
from ckpttool.verification.training import describe_keras_optimizer
from tests.conftest import ROOT, TF_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.trees import leaf, torch_dense, torch_tree

NAME = "actor_optimizer"
WEIGHTS = {
    name: array
    for number, sizes in enumerate([(3, 4), (4, 4), (4, 4), (4, 2)], start=1)
    for name, array in torch_dense(np.random.default_rng(number), f"l{number}", *sizes).items()
}
ADAM = {"lr": 0.5, "betas/0": 0.9, "betas/1": 0.999, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
SGD = {"lr": 0.5, "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": False}


def agent(
    groups: list[list[str]], *settings: dict[str, object], slots: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> Tree:
    """A torch actor of four layers and the state_dict of its optimizer, in these groups of parameters."""
    entries: dict[str, object] = {f"actor/{name}": array for name, array in WEIGHTS.items()}
    entries["actor_target/l1.weight"] = WEIGHTS["l1.weight"]
    entries["actor_target/l1.bias"] = WEIGHTS["l1.bias"]
    number = 0
    for group, (names, own) in enumerate(zip(groups, settings, strict=True)):
        entries |= {f"{NAME}/param_groups/{group}/{key}": value for key, value in own.items()}
        for position, name in enumerate(names):
            entries[f"{NAME}/param_groups/{group}/params/{position}"] = number
            entries[f"{NAME}/state/{number}/step"] = np.array(7, np.float32)
            entries |= {
                f"{NAME}/state/{number}/{slot}": np.full_like(WEIGHTS[name], number + 1) for slot in slots
            }
            number += 1
    return torch_tree({**entries, "total_it": 1})


def bound(tree: Tree) -> RecognizedAgent:
    agent = recognize_tree(tree, "agent")
    assert agent is not None
    return agent


def canonical(tree: Tree) -> dict[str, Leaf | ValueLeaf]:
    agent_tree = canonical_tree(tree, bound(tree).moves)
    return {agent_tree.names[path]: result for path, result in agent_tree.items()}


def in_keras(tree: Tree) -> Plan:
    binding = bound(tree)
    return td3.plan_tf(binding, canonical_tree(tree, binding.moves), {})


KERNELS = [name for name in WEIGHTS if name.endswith("weight")]
BIASES = [name for name in WEIGHTS if name.endswith("bias")]


@pytest.mark.parametrize("first", [KERNELS, BIASES])
def test_kernels_and_biases_apart_are_known_by_their_shapes(first: list[str]) -> None:
    groups = [first, [name for name in WEIGHTS if name not in first]]
    leaves = canonical(agent(groups, {**ADAM, "weight_decay": 0.25}, ADAM))
    for number, name in enumerate([*groups[0], *groups[1]]):
        layer, _, kind = name.partition(".")
        weight = f"{int(layer[1]) - 1}/{'kernel' if kind == 'weight' else 'bias'}"
        moment = leaves[f"{NAME}/m/{weight}"]
        assert isinstance(moment, Leaf)
        assert moment.array().reshape(-1)[0] == number + 1
        assert leaves[f"{NAME}/weight_decay/{weight}"] == ValueLeaf(0.25 if name in first else 0.0)
    assert leaves[f"{NAME}/learning_rate"] == ValueLeaf(0.5)  # on which they agree


def test_groups_that_could_be_shared_out_in_two_ways_are_left_unmapped(golden: Golden) -> None:
    # Layers 2 and 3 are alike: either could be the first group's.
    groups = [["l2.weight", "l2.bias"], [name for name in WEIGHTS if not name.startswith("l2")]]
    binding = bound(agent(groups, ADAM, ADAM))
    assert not any(move.target[0].value == NAME for move in binding.moves.moves)
    golden("\n".join(binding.moves.notes))


def test_names_tell_what_shapes_do_not() -> None:
    groups = [["l2.bias", "l2.weight"], [name for name in WEIGHTS if not name.startswith("l2")]]
    named = [
        {**ADAM, "lr": rate, **{f"param_names/{n}": name for n, name in enumerate(names)}}
        for names, rate in zip(groups, (0.25, 0.5), strict=True)
    ]
    tree = agent(groups, *named)
    leaves = canonical(tree)
    assert leaves[f"{NAME}/learning_rate/1/kernel"] == ValueLeaf(0.25)
    assert leaves[f"{NAME}/learning_rate/2/kernel"] == ValueLeaf(0.5)
    moment = leaves[f"{NAME}/m/1/kernel"]
    assert isinstance(moment, Leaf)
    assert moment.array()[0, 0] == 2  # the second parameter of its group


@pytest.mark.parametrize("seed", range(3))
def test_groups_go_through_the_canonical_agent_and_come_back(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    names = list(WEIGHTS)
    generator.shuffle(names)
    groups = [names[:2], names[2:5], names[5:]]
    settings = [
        {**ADAM, "weight_decay": 0.1 * n, **{f"param_names/{k}": name for k, name in enumerate(group)}}
        for n, group in enumerate(groups)
    ]
    save(agent(groups, *settings), str(tmp_path / "a.pt"))
    convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), layout="td3_torch")
    before, after = (open_checkpoint(str(tmp_path / name)).tree for name in ("a.pt", "b.pt"))
    there = {after.names[path]: _content(result) for path, result in after.items()}
    assert all(there[before.names[path]] == _content(result) for path, result in before.items())


def _content(result: Leaf | ValueLeaf) -> object:
    return bytes(result.read()) if isinstance(result, Leaf) else result.value


@pytest.mark.parametrize(
    ("settings", "slots", "whose"),
    [
        ({"betas/0": 0.9, "momentum_decay": 0.1}, ("exp_avg", "exp_avg_sq"), "NAdam"),
        ({"betas/0": 0.9, "foreach": None}, ("exp_avg", "exp_avg_sq"), "RAdam"),
    ],
)
def test_other_optimizers_of_torch_are_named(
    settings: dict[str, object], slots: tuple[str, ...], whose: str
) -> None:
    binding = bound(agent([list(WEIGHTS)], {"lr": 0.1, **settings}, slots=slots))
    assert not any(move.target[0].value == NAME for move in binding.moves.moves)
    assert any(whose in note for note in binding.moves.notes)


@pytest.mark.parametrize(
    ("settings", "doubted"),
    [
        pytest.param({}, False, id="PyTorch 1.0"),
        pytest.param({"amsgrad": None}, True, id="PyTorch 0.3"),
        pytest.param({"amsgrad": None, "correct_bias": False}, True, id="transformers.AdamW"),
        pytest.param({"amsgrad": None, "max_grad_norm": 1.0}, True, id="LAMB"),
    ],
)
def test_a_class_that_settings_do_not_show_is_assumed(settings: dict[str, object], doubted: bool) -> None:
    own = {name: value for name, value in {**ADAM, **settings}.items() if value is not None}
    tree = agent([list(WEIGHTS)], own)
    weights = tuple((path, path, KEEP) for path, name in tree.names.items() if name.startswith("actor/"))
    moves = from_torch(StoredOptimizer(NAME, (NAME,), tree, weights))
    assert moves.moves
    assert (NAME in moves.assumed) == doubted


def test_rates_that_differ_are_kept_beside_keras_optimizer() -> None:
    groups = [KERNELS, BIASES]
    tree = agent(groups, {**ADAM, "lr": 0.25}, ADAM)
    plan = in_keras(tree)
    agent_tree = canonical_tree(tree, bound(tree).moves)
    placed = {move.source for move in plan.moves} | set(plan.consumed)
    assert {agent_tree.names[path] for path in agent_tree if path not in placed} == set()
    rates = {name: rate for name, rate in plan.settings[NAME].items() if name.startswith("learning_rate/")}
    assert sorted(set(rates.values())) == [0.25, 0.5]
    assert len(rates) == len(WEIGHTS)
    assert any("0.25" in note and "learning_rate" in note for note in plan.notes)


def test_dampening_has_no_place_in_keras() -> None:
    tree = agent([list(WEIGHTS)], {**SGD, "dampening": 0.1}, slots=("momentum_buffer",))
    plan = in_keras(tree)
    agent_tree = canonical_tree(tree, bound(tree).moves)
    placed = {move.source for move in plan.moves} | set(plan.consumed)
    assert {agent_tree.names[path] for path in agent_tree if path not in placed} == {f"{NAME}/dampening"}


def test_a_velocity_is_minus_the_buffer_times_the_rate() -> None:
    tree = agent([list(WEIGHTS)], SGD, slots=("momentum_buffer",))
    rules = [
        move.rule
        for move in in_keras(tree).moves
        if len(move.source) > 2 and move.source[1].value == "buffer"
    ]
    assert len(rules) == len(WEIGHTS)
    assert all(rule.leaf(leaf(np.ones((2, 2), np.float32), "")).array().max() == -0.5 for rule in rules)  # type: ignore[union-attr]


@given(
    value=st.floats(width=32, min_value=-1e6, max_value=1e6, allow_subnormal=False),
    factor=st.floats(min_value=1e-6, max_value=1e3),
)
def test_a_scaled_number_comes_back_but_for_rounding(value: float, factor: float) -> None:
    before = leaf(np.array([value], np.float32), "")
    rule = Scale(-factor)
    between = rule.leaf(before)
    after = rule.inverse(before).leaf(between)
    assert isinstance(between, Leaf)
    assert isinstance(after, Leaf)
    if abs(between.array().item()) > 1e-30:
        np.testing.assert_allclose(after.array(), before.array(), rtol=2e-7)


# --- What a person says ----------------------------------------------------------------------------------


@pytest.fixture
def momentum(tmp_path: Path) -> Path:
    """Objects of Keras whose optimizer is SGD with momentum, without a sidecar."""
    save(agent([list(WEIGHTS)], SGD, slots=("momentum_buffer",)), str(tmp_path / "sgd.pt"))
    convert(str(tmp_path / "sgd.pt"), str(tmp_path / "sgd-1"), to="tf", allow_missing=True)
    (tmp_path / "sgd-1.ckpttool.json").unlink()
    return tmp_path / "sgd-1"


def test_a_momentum_that_nobody_tells_is_missing(momentum: Path, tmp_path: Path) -> None:
    done = convert(str(momentum), str(tmp_path / "out.pt"))
    assert not done.written
    assert done.report.missing == (f"{NAME}/param_groups/0/momentum",)
    assert any(f"--optimizer {NAME}/momentum=0.9" in note for note in done.report.notes)
    done = convert(str(momentum), str(tmp_path / "out.pt"), optimizer=[f"{NAME}/momentum=0.5"])
    assert done.written
    tree = open_checkpoint(str(tmp_path / "out.pt")).tree
    values = {tree.names[path]: result.value for path, result in tree.plain()}
    assert values[f"{NAME}/param_groups/0/momentum"] == 0.5
    moments = {tree.names[path]: result.array() for path, result in tree.tensors() if result.slot}
    assert [moments[f"{NAME}/state/{n}/momentum_buffer"].max() for n in range(3)] == [1, 2, 3]
    receipt = json.loads((tmp_path / "out.pt.ckpttool.json").read_text())
    assert receipt["provenance"]["optimizer"] == f"given: {NAME}/momentum=0.5"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--optimizer", "x_optimizer/momentum=1"), id="unknown-optimizer"),
        pytest.param(("--optimizer", "critic_optimizer/nomentum=1"), id="unknown-setting"),
        pytest.param(("--optimizer", "x=2"), id="no-setting"),
        pytest.param(("--optimizer", "critic_optimizer/epsilon=small"), id="not-a-number"),
        pytest.param(("--optimizer", "critic_optimizer/learning_rate=1"), id="in-the-checkpoint"),
        pytest.param(("--l2", "critic/**/kernel"), id="no-factor"),
        pytest.param(("--l2", "critic/**/kernel=-1"), id="negative-factor"),
        pytest.param(("--l2", "critic/**/kernle=0.01"), id="no-such-weight"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(
    tmp_path: Path, options: tuple[str, ...], golden: Golden
) -> None:
    ran = in_process("convert", TF_SAMPLE, tmp_path / "x.pt", *options)
    assert ran.status == 2
    golden(ran)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(("lr=1",), id="unknown"),
        pytest.param(("momentum=0.9",), id="of-another-optimizer"),
        pytest.param(("epsilon=true",), id="not-a-number"),
        pytest.param(("amsgrad=2",), id="not-a-flag"),
        pytest.param(("epsilon=1", "beta_1=0.5", "epsilon=1"), id="twice"),
    ],
)
def test_a_setting_that_the_optimizer_has_not_is_refused(
    tmp_path: Path, text: tuple[str, ...], golden: Golden
) -> None:
    with pytest.raises(UsageError) as caught:
        convert(str(TF_SAMPLE), str(tmp_path / "x.pt"), optimizer=[f"{NAME}/{option}" for option in text])
    golden(caught.value)


def test_settings_of_two_optimizers_are_two_settings(tmp_path: Path) -> None:
    options = [f"{name}_optimizer/epsilon={value}" for name, value in (("actor", 0.25), ("critic", 0.5))]
    assert convert(str(TF_SAMPLE), str(tmp_path / "x.pt"), optimizer=options).written
    tree = open_checkpoint(str(tmp_path / "x.pt")).tree
    values = {tree.names[path]: result.value for path, result in tree.plain()}
    assert [values[f"{name}_optimizer/param_groups/0/eps"] for name in ("actor", "critic")] == [0.25, 0.5]


def test_penalties_are_keras_own(tmp_path: Path, golden: Golden) -> None:
    save(agent([list(WEIGHTS)], ADAM), str(tmp_path / "a.pt"))
    with pytest.raises(UsageError) as caught:
        convert(str(tmp_path / "a.pt"), str(tmp_path / "b-1"), to="tf", l2=["actor/**=0.1"])
    golden(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_penalties_in_the_configurations_of_layers_are_taken(version: int, golden: Golden) -> None:
    config = {"class_name": "L2", "config": {"l2": 0.25}}
    if version == 3:
        config |= {"module": "keras.regularizers", "registered_name": None}
    facts = plain_facts({"units": 4, "kernel_regularizer": config, "bias_regularizer": None})
    assert facts == {"units": 4, "kernel_regularizer": "L2", "kernel_regularizer_l2": 0.25}
    tree = open_checkpoint(str(TF_SAMPLE)).tree
    binding = recognize_tree(tree, TF_SAMPLE.name)
    assert binding is not None
    containers = {
        path[:-1]: Container("module", "Dense", facts) for path in tree if "critic/q1/l" in tree.names[path]
    }
    known = add_stated_settings(
        NO_OPTIMIZER_OPTIONS, None, binding, Tree(tree.leaves, tree.aliases, containers)
    )
    assert known is not None
    assert known.optimizers == {
        "critic_optimizer": {
            "weight_decay": 0.0,
            **{f"weight_decay/q1/{number}/kernel": 0.5 for number in range(3)},
        }
    }
    golden(known.provenance["l2"])
    assert add_stated_settings(NO_OPTIMIZER_OPTIONS, None, binding, tree) is None


@pytest.mark.parametrize("config", [{"l1": 0.1, "l2": 0.1}, {"l1": 0.1}, {"l2": "much"}, None])
def test_other_penalties_are_none_of_ours(config: object) -> None:
    assert "kernel_regularizer_l2" not in plain_facts(
        {"kernel_regularizer": {"class_name": "L1L2", "config": config}}
    )


def test_one_penalty_makes_groups_of_every_optimizer_it_names(tmp_path: Path) -> None:
    done = convert(str(TF_SAMPLE), str(tmp_path / "x.pt"), l2=["critic/**/kernel=0.01"])
    assert done.written
    tree = open_checkpoint(str(tmp_path / "x.pt")).tree
    values = {tree.names[path]: result.value for path, result in tree.plain()}
    assert [values[f"critic_optimizer/param_groups/{n}/weight_decay"] for n in range(2)] == [0.02, 0.0]
    assert "actor_optimizer/param_groups/1/lr" not in values
    names = [values[f"critic_optimizer/param_groups/1/param_names/{n}"] for n in range(6)]
    assert all(str(name).endswith("bias") for name in names)


# --- Optimizers of TensorFlow whose class, rate or momentum is not what their slots suggest ------------


def keras_tree(cls: str | None, slots: tuple[str, ...], more: dict[str, float], **state: object) -> Tree:
    """Objects of a dense layer and its optimizer, with a configuration if there is a class."""
    weight = (attr("model"), attr("kernel"))
    top = (attr("optimizer"),)
    leaves: dict[TreePath, Leaf | ValueLeaf] = {
        weight: leaf(np.ones((2, 3), np.float32), "kernel"),
        (*top, attr("iterations")): replace(leaf(np.array(7, np.int64), "iterations"), role="counter"),
    }
    for slot in slots:
        own = leaf(np.full((2, 3), 2, np.float32), slot)
        leaves[*top, attr("slots"), attr(slot), *weight] = replace(own, role="slot", slot=slot, of=weight)
    for name, value in more.items():
        leaves[*top, attr(name)] = replace(leaf(np.array(value, np.float32), name), role="other")
    containers = {} if cls is None else {top: Container("module", cls, {"layer": cls, **state})}
    return Tree(leaves, containers=containers)


def in_torch(tree: Tree) -> tuple[Plan | None, list[str]]:
    """The plan of the tree's optimizer as torch's state_dict, and the notes."""
    states = KerasStates(tree, OptimizerSettings({}))
    weight = (attr("model"), attr("kernel"))
    bound_states, notes, _ = states.bind_states([(weight, ("model", "kernel"), KEEP)])
    if not bound_states:
        return None, notes
    rows, paths = [(weight, ("weight",), KEEP)], {("weight",): (key("weight"),)}
    plan = states.write_torch(bound_states[0], rows, paths, (key("optimizer"),))
    return plan, notes


RATE = {"learning_rate": 0.5}


@pytest.mark.parametrize(
    ("cls", "slots", "more", "slot"),
    [
        pytest.param("Adamax", ("m", "v"), RATE, "exp_inf", id="old Adamax"),
        pytest.param("Adam", ("m", "v"), RATE, "exp_avg_sq", id="Adam"),
        pytest.param(None, ("m", "v"), RATE, "exp_avg_sq", id="like Adam"),
    ],
)
def test_the_class_of_a_file_decides_what_its_slots_are(
    cls: str | None, slots: tuple[str, ...], more: dict[str, float], slot: str
) -> None:
    plan, _ = in_torch(keras_tree(cls, slots, more))
    assert plan is not None
    assert slot in {str(move.target[-1].value) for move in plan.moves}
    assert any("same slots" in sentence for sentence in plan.assumed) == (cls is None)
    assert not plan.missing


def test_every_default_of_a_restored_optimizer_is_assumed(tmp_path: Path) -> None:
    tree = keras_tree(None, ("m", "v"), RATE)
    count = (attr("optimizer"), attr("iterations"))
    # Only the name of a variable shows AdamW, whose weight decay no variable holds.
    named = replace(tree[count], name="adamw/iteration")
    save(Tree({**tree, count: named}), str(tmp_path / "a"), to="tf")
    restored = describe_keras_optimizer(str(tmp_path / "a"))
    assert restored is not None
    request, assumed = restored
    assert request["arguments"]["weight_decay"] == ADAMW_DEFAULTS["weight_decay"].value
    numbers = {name for name, value in request["arguments"].items() if not isinstance(value, bool)}
    assert numbers == {name for name in numbers for sentence in assumed if f" {name} = " in sentence}


@pytest.mark.parametrize("cls", sorted(UNCONVERTED))
def test_a_class_that_only_looks_like_adam_is_left_out(cls: str) -> None:
    plan, notes = in_torch(keras_tree(cls, ("m", "v"), RATE))
    assert plan is None
    assert any(UNCONVERTED[cls] in note for note in notes)


@pytest.mark.parametrize("own", ["_u_product", "momentum_cache"])
def test_nadam_is_known_by_its_own_variable(own: str) -> None:
    plan, notes = in_torch(keras_tree(None, ("m", "v"), {**RATE, own: 0.9}))
    assert plan is None
    assert any("nadam" in note for note in notes)


@pytest.mark.parametrize(
    ("slots", "more", "state", "missing"),
    [
        pytest.param((), {**RATE, "decay": 0.25}, {}, False, id="variable"),
        pytest.param(("m", "v"), RATE, {"decay": 0.25}, False, id="configuration"),
        pytest.param(("momentum",), {**RATE, "decay": 0.25, "momentum": 0.5}, {}, True, id="momentum"),
    ],
)
def test_a_decaying_rate_is_named(
    slots: tuple[str, ...], more: dict[str, float], state: dict[str, object], *, missing: bool
) -> None:
    plan, _ = in_torch(keras_tree("SGD" if slots != ("m", "v") else "Adam", slots, more, **state))
    assert plan is not None
    assert any("0.25" in note for note in plan.notes)
    assert bool(plan.missing) == missing


def test_a_velocity_of_a_schedule_is_not_divided_by_its_first_rate() -> None:
    state = {"learning_rate": "ExponentialDecay", "learning_rate_initial": 0.5, "momentum": 0.5}
    plan, notes = in_torch(keras_tree("SGD", ("momentum",), {}, **state))
    assert plan is not None
    assert any("ExponentialDecay" in note for note in notes)
    assert plan.missing == ("optimizer/state/0/momentum_buffer",)


def test_loss_scales_are_named() -> None:
    _, notes = in_torch(keras_tree("Adam", ("m", "v"), RATE, loss_scale_factor=8.0))
    assert any("loss_scale_factor = 8.0" in note for note in notes)


def test_momentum_at_rate_zero_is_missing_in_keras() -> None:
    tree = agent([list(WEIGHTS)], {**SGD, "lr": 0.0}, slots=("momentum_buffer",))
    assert len(in_keras(tree).missing) == len(WEIGHTS)
    idle = agent([list(WEIGHTS)], {**SGD, "lr": 0.0, "momentum": 0.0}, slots=("momentum_buffer",))
    assert not in_keras(idle).missing


def test_constructors_get_floats() -> None:
    """Keras refuses integers."""
    tree = agent([list(WEIGHTS)], {**SGD, "momentum": 0}, slots=())
    (note,) = [note for note in in_keras(tree).notes if "keras.optimizers." in note]
    call = ast.parse(note[note.index("keras.optimizers.") :], mode="eval").body
    assert isinstance(call, ast.Call)
    values = [keyword.value.value for keyword in call.keywords if isinstance(keyword.value, ast.Constant)]
    assert values
    assert all(isinstance(value, float | bool) for value in values)


def test_the_lines_that_load_name_the_variables() -> None:
    paths = [(attr(name),) for name in "abc"]
    written = WrittenOptimizer("AdamW", {}, [[paths[0], paths[2]]], "keras.optimizers.AdamW()", [paths[2]])
    order = {path: n for n, path in enumerate(paths)}
    converted = ConvertedOptimizers(Tree({}), written={"optimizer": written}, order=order, parameters=3)
    lines = converted.loading_code(["model.load_weights('x')"], "keras")
    assert lines[1:3] == (
        "optimizer.exclude_from_weight_decay([model.weights[2]])",
        "optimizer.build([model.weights[n] for n in (0, 2)])",
    )
    whole = converted._replace(parameters=2).loading_code([], "keras")
    assert "optimizer.build(model.trainable_variables)" in whole


# An optimizer of torch and Keras that no library has: one row of the table.
_ROW = """
from ckpttool.core import optimizers
slot = optimizers.SlotSpec("sign", "exp_sign", "sign", "_signs", "sign")
row = optimizers.OptimizerFamily("Signer", (slot,), torch=("lr", "gamma"), arguments=("gamma",))
optimizers.FAMILIES += (row,)
from tests.test_optimizer_forms import follow_new_row
follow_new_row()
"""


def follow_new_row() -> None:
    """Convert the state of a new class to Keras's object and back, in a process whose table has its row."""
    tree = agent([list(WEIGHTS)], {"lr": 0.5, "gamma": 0.25}, slots=("exp_sign",))
    binding = bound(tree)
    objects = apply_plan(
        source := canonical_tree(tree, binding.moves), plan := td3.plan_tf(binding, source, {})
    )
    names = {display(path): leaf for path, leaf in objects.items()}
    (top,) = {name.partition("_signs")[0] for name in names if "_signs" in name}
    assert {f"{top}_iterations", f"{top}_learning_rate", f"{top}_signs/0"} <= names.keys()
    assert plan.settings == {NAME: {"learning_rate": 0.5, "gamma": 0.25}}
    back = recognize_tree(objects, "agent")
    assert back is not None
    file = apply_plan(
        again := canonical_tree(objects, back.moves), td3.plan_torch(back, again, plan.settings)
    )
    values = {display(path): _content(leaf) for path, leaf in file.items() if path[0] == key(NAME)}
    assert values == {display(path): _content(leaf) for path, leaf in tree.items() if path[0] == key(NAME)}


@pytest.mark.long
def test_an_optimizer_is_one_row_of_the_table() -> None:
    done = subprocess.run([sys.executable, "-c", _ROW], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
