"""Graphs that TensorFlow 1's Saver stores: what they compute, and which of their values is the action."""

from __future__ import annotations

import inspect
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool.core import FormatError, Tree, UnsupportedError, UsageError
from ckpttool.core.activations import UNKNOWN
from ckpttool.graphs import Graph, evaluate, read_graph, tensorflow_saver
from ckpttool.libraries.activation_orders import read_orders
from ckpttool.libraries.recognize import has_saver_graph
from tests import saver_programs
from tests.bundle_writer import field
from tests.conftest import in_process
from tests.tensorflow_child import require, run

pytestmark = pytest.mark.tensorflow
BOUNDS = {"action_low": [-2.0, -2.0], "action_high": [2.0, 2.0]}
TARGET = re.compile("target")
# Programs that state which value is the action, and why.
STATED = {
    "ppo": "samples",
    "dqn": "only end",
    "discrete": "only end",
    "alone": "only end",
    "older": "only end",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("tensorflow")
    path = tmp_path_factory.mktemp("programs")
    run(saver_programs.__file__, "build", path)
    return path


def arrays_of(folder: Path, program: str) -> dict[str, np.ndarray]:
    with np.load(folder / program / "arrays.npz") as arrays:
        return {name.replace(".", "/"): array for name, array in arrays.items()}


def policy_of(folder: Path, program: str, network: str = "actor") -> Graph:
    policy = tensorflow_saver.read_policy(ckpttool.open(str(folder / program / "model")), network, TARGET)
    assert policy is not None
    return policy.graph


@pytest.mark.parametrize("program", saver_programs.NODES)
def test_nodes_compute_what_tensorflow_does(folder: Path, program: str) -> None:
    arrays = arrays_of(folder, program)
    for node in saver_programs.NODES[program]:
        graph = policy_of(folder, program, node)
        (input_,) = graph.inputs
        own = evaluate(graph, {input_.name: arrays["inputs"]})[graph.outputs[0].name]
        assert own.shape == arrays[node].shape
        np.testing.assert_allclose(own, arrays[node], rtol=0, atol=2e-6)


@pytest.mark.parametrize("program", STATED)
def test_the_only_possible_action_is_found_and_named(folder: Path, program: str) -> None:
    checkpoint = ckpttool.open(str(folder / program / "model"))
    policy = tensorflow_saver.read_policy(checkpoint, "actor", TARGET)
    assert policy is not None
    assert [value.name for value in policy.graph.outputs] == [saver_programs.NODES[program][0]]
    assert STATED[program] in policy.reason
    assert saver_programs.NODES[program][0] in policy.reason


@pytest.mark.parametrize(("program", "options"), [("ddpg", {"move/action", "noisy"}), ("pixels", set())])
def test_what_may_be_the_action_is_listed(folder: Path, program: str, options: set[str]) -> None:
    graph = policy_of(folder, program)
    assert {value.name for value in graph.outputs} >= (options or {saver_programs.NODES[program][0]})


def test_every_end_has_the_name_of_its_node(folder: Path) -> None:
    graph = policy_of(folder, "ddpg")
    names = [value.name for value in graph.outputs]
    assert "Neg" in names
    for name in names:
        (output,) = policy_of(folder, "ddpg", name).outputs
        assert output.name == name
        inputs = {value.name: arrays_of(folder, "ddpg")["inputs"] for value in graph.inputs}
        np.testing.assert_array_equal(
            evaluate(policy_of(folder, "ddpg", name), inputs)[name], evaluate(graph, inputs)[name]
        )


def test_several_possible_actions_are_an_error_that_names_them(folder: Path) -> None:
    path = str(folder / "ddpg" / "model")
    with pytest.raises(UsageError, match="several outputs") as caught:
        ckpttool.load_agent(path, facts=ckpttool.AgentFacts(**BOUNDS))
    assert "move/action" in str(caught.value.hint)
    assert "noisy" in str(caught.value.hint)


@pytest.mark.parametrize("program", ["ppo", "alone", "older", "shared", "ddpg"])
def test_an_agent_acts_as_tensorflow_does(folder: Path, program: str) -> None:
    arrays, node = arrays_of(folder, program), saver_programs.NODES[program][0]
    how = {"network": node} if program == "ddpg" else {}
    facts = None if program in ("alone", "older") else ckpttool.AgentFacts(**BOUNDS)
    if program in ("shared", "ddpg"):
        facts = ckpttool.AgentFacts(head="unit_tanh", **BOUNDS)
    with ckpttool.load_agent(str(folder / program / "model"), facts=facts, **how) as agent:
        np.testing.assert_allclose(agent.act(arrays["inputs"]), arrays[node], rtol=0, atol=2e-6)


@pytest.mark.torch
@pytest.mark.parametrize(("program", "network"), [("ddpg", "move/action"), ("ppo", None)])
def test_code_writes_the_chosen_policy_alone(
    folder: Path, tmp_path: Path, program: str, network: str | None
) -> None:
    torch = pytest.importorskip("torch")
    arrays, path = arrays_of(folder, program), str(folder / program / "model")
    target = str(tmp_path / "out.pt")
    done = ckpttool.convert(path, target, to="torch", code="-", network=network, optimizer=["none"])
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    model = scope["load"](target)
    assert len(inspect.signature(model.forward).parameters) == 1
    node = saver_programs.NODES[program][0]
    with torch.no_grad():
        output = model(torch.from_numpy(arrays["inputs"])).numpy()
    np.testing.assert_allclose(output, arrays[node], rtol=0, atol=2e-6)
    np.testing.assert_array_equal(scope["act"](model, arrays["inputs"]), output)


@pytest.mark.torch
def test_a_map_that_is_not_in_the_graph_is_not_left_out_of_act(folder: Path, tmp_path: Path) -> None:
    path, facts = str(folder / "ddpg" / "model"), ckpttool.AgentFacts(head="affine", **BOUNDS)
    how = {"to": "torch", "network": "move/action", "optimizer": ["none"], "facts": facts}
    done = ckpttool.convert(path, str(tmp_path / "out.pt"), code="-", **how)
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    assert "load" in scope
    assert "act" not in scope


@pytest.mark.torch
def test_code_of_several_possible_policies_is_that_of_the_whole_program(folder: Path, tmp_path: Path) -> None:
    path = str(folder / "ddpg" / "model")
    done = ckpttool.convert(path, str(tmp_path / "out.pt"), to="torch", code="-", optimizer=["none"])
    scope: dict[str, Any] = {}
    exec(str(done.code), scope)
    assert "act" not in scope
    arrays = arrays_of(folder, "ddpg")
    outputs = scope["load"](done.target)(pytest.importorskip("torch").from_numpy(arrays["inputs"]))
    expected = arrays["move/action"]
    same = [out.shape == expected.shape and np.allclose(out.detach(), expected, atol=2e-6) for out in outputs]
    assert len(same) > 1
    assert any(same)


def test_activations_that_the_graph_states_replace_a_layouts_defaults(folder: Path) -> None:
    arrays = arrays_of(folder, "named")
    facts = ckpttool.AgentFacts(action_low=-1.0, action_high=1.0)
    with ckpttool.load_agent(str(folder / "named" / "model"), facts=facts) as agent:
        np.testing.assert_allclose(agent.act(arrays["inputs"]), arrays["actor/action"], rtol=0, atol=2e-6)
        assert not any("activation" in sentence for sentence in agent.assumed)


def test_discrete_agents_act_as_tensorflow_does(folder: Path) -> None:
    for program, node in (("dqn", "q/choice"), ("discrete", "policy/probabilities")):
        arrays = arrays_of(folder, program)
        expected = arrays[node] if arrays[node].ndim == 1 else arrays[node].argmax(1)
        with ckpttool.load_agent(str(folder / program / "model")) as agent:
            np.testing.assert_array_equal(np.asarray(agent.act(arrays["inputs"])).reshape(-1), expected)


def test_the_order_of_flattened_images_is_recorded(folder: Path) -> None:
    checkpoint = ckpttool.open(str(folder / "pixels" / "model"))
    orders = {checkpoint.tree.names[path]: use for path, use in read_orders(checkpoint).items()}
    takes = orders["encoder/out/kernel"].takes
    assert takes is not UNKNOWN
    assert takes is not None


@pytest.mark.parametrize("damage", ["cut", "other", "link"])
def test_a_graph_that_does_not_fit_is_never_taken_silently(folder: Path, tmp_path: Path, damage: str) -> None:
    for file in (folder / "alone").iterdir():
        shutil.copy(file, tmp_path)
    meta = tmp_path / "model.meta"
    if damage == "cut":
        meta.write_bytes(meta.read_bytes()[:-400])
    elif damage == "other":
        shutil.copy(folder / "ppo" / "model.meta", meta)
    else:
        outside = tmp_path / "outside"
        outside.mkdir()
        checkpoint = outside / "x"
        checkpoint.mkdir()
        for file in (folder / "alone").iterdir():
            shutil.copy(file, checkpoint)
        (checkpoint / "model.meta").unlink()
        (checkpoint / "model.meta").symlink_to(meta)
        tmp_path = checkpoint
    checkpoint = ckpttool.open(str(tmp_path / "model"))
    with pytest.raises((FormatError, UnsupportedError)):
        raise_unless_read(checkpoint)
    facts = ckpttool.AgentFacts(activations="silu", head="tanh", **BOUNDS)
    with ckpttool.load_agent(str(tmp_path / "model"), facts=facts) as agent:
        assert any("graph beside the checkpoint is not used" in sentence for sentence in agent.assumed)


@pytest.mark.parametrize("program", ["ppo", "named"])
def test_a_damaged_graph_is_named_where_the_names_decide(folder: Path, tmp_path: Path, program: str) -> None:
    for file in (folder / program).iterdir():
        shutil.copy(file, tmp_path)
    meta = tmp_path / "model.meta"
    meta.write_bytes(meta.read_bytes()[:-400])
    facts = ckpttool.AgentFacts(**BOUNDS)
    if program == "ppo":  # two layers behind one: no chain without the graph
        with pytest.raises((UnsupportedError, UsageError), match="graph beside the checkpoint is not used"):
            ckpttool.load_agent(str(tmp_path / "model"), facts=facts)
        return
    with ckpttool.load_agent(str(tmp_path / "model"), facts=facts) as agent:
        assert any("graph beside the checkpoint is not used" in sentence for sentence in agent.assumed)


def raise_unless_read(checkpoint: ckpttool.Checkpoint) -> None:
    if read_graph(checkpoint) is None:
        raise UnsupportedError("no graph of these variables")


def test_damaged_graphs_are_refused_or_read(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "alone").iterdir():
        shutil.copy(file, tmp_path)
    whole, random, refused = (tmp_path / "model.meta").read_bytes(), np.random.default_rng(7), 0
    for _ in range(60):
        data = bytearray(whole)
        for index in random.integers(0, len(data), 4):
            data[index] = random.integers(0, 256)
        (tmp_path / "model.meta").write_bytes(data)
        checkpoint = ckpttool.open(str(tmp_path / "model"))
        for read in (read_graph, tensorflow_saver.read_activations):
            try:
                read(checkpoint)
            except ckpttool.CkpttoolError:
                refused += 1
    assert refused


def test_nodes_in_a_circle_end(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "alone").iterdir():
        shutil.copy(file, tmp_path)
    names = {
        "a": ("Add", "b", "scale/hidden/kernel"),
        "b": ("Identity", "a"),
        "missing": ("Shape", "nothing"),
    }
    names |= {"product": ("MatMul", "a", "scale/hidden/kernel"), "c": ("Add", "product", "d")}
    names |= {"d": ("Identity", "c"), "x": ("Placeholder",), "scale/hidden/kernel": ("VariableV2",)}
    nodes = (
        field(1, field(1, name) + field(2, op) + b"".join(field(3, input_) for input_ in inputs))
        for name, (op, *inputs) in names.items()
    )
    (tmp_path / "model.meta").write_bytes(field(2, b"".join(nodes)))
    checkpoint = ckpttool.open(str(tmp_path / "model"))
    assert read_graph(checkpoint) is None
    assert all(not operations for operations in tensorflow_saver.read_activations(checkpoint).values())


def test_the_graph_alone_leads_to_its_checkpoint(folder: Path) -> None:
    for program in ("alone", "older"):
        stem = str(folder / program / "model")
        with pytest.raises(ckpttool.CkpttoolError) as caught:
            ckpttool.open(f"{stem}.meta")
        assert stem in str(caught.value.hint)


def test_a_checkpoint_without_a_graph_has_none(folder: Path, tmp_path: Path) -> None:
    for file in (folder / "alone").iterdir():
        if file.suffix != ".meta":
            shutil.copy(file, tmp_path)
    checkpoint = ckpttool.open(str(tmp_path / "model"))
    assert isinstance(checkpoint.tree, Tree)
    assert not has_saver_graph(checkpoint)
    assert read_graph(checkpoint) is None


@pytest.mark.parametrize(("program", "networks"), [("ppo", 1), ("ddpg", None), ("older", 1)])
def test_inspect_lists_and_draws_the_graph(
    folder: Path, tmp_path: Path, program: str, networks: int | None
) -> None:
    drawing = ("--dataflow", "--graph", str(tmp_path / "flow.svg"))
    document = in_process("inspect", folder / program / "model", *drawing, "--json").json()
    (model,) = document["architecture"]
    assert [value["shape"] for value in model["inputs"]] == [[1, saver_programs.OBSERVATIONS]]
    sizes = {tensor["path"]: math.prod(tensor["shape"]) for tensor in document["tensors"]}
    trained = sum(size for path, size in sizes.items() if re.search(r"(kernel|bias)$", path))
    assert model["parameters"] == trained
    assert all(any(node in note for note in model["notes"]) for node in saver_programs.NODES[program])
    drawn = document["dataflow"]["networks"]
    # The policy alone where it is known, otherwise everything that the program computes.
    assert len(drawn) == networks if networks else len(drawn) > 1


def test_a_damaged_graph_is_named_in_listings_and_where_options_are_missing(
    folder: Path, tmp_path: Path
) -> None:
    for file in (folder / "alone").iterdir():
        shutil.copy(file, tmp_path)
    meta, stem = tmp_path / "model.meta", str(tmp_path / "model")
    meta.write_bytes(meta.read_bytes()[:-400])
    document = in_process("inspect", stem, "--json").json()
    assert document["architecture"] == []
    assert any("graph beside the checkpoint is not used" in note for note in document["notes"])
    with pytest.raises(UsageError, match=r"no file records.*graph beside the checkpoint is not used"):
        ckpttool.load_agent(stem, facts=ckpttool.AgentFacts(**BOUNDS))


def test_a_shape_for_several_inputs_names_them(folder: Path) -> None:
    """A network and its target have an input each: the hint has an option for both, with the user's shape."""
    shape = saver_programs.OBSERVATIONS
    refusal = in_process("inspect", "model", "--input-shape", shape, cwd=folder / "dqn")
    assert refusal.status == 2
    options = shlex.split(refusal.err.partition("hint: ")[2])
    assert len(options) == 4
    assert in_process("inspect", "model", *options, cwd=folder / "dqn").status == 0


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require("tensorflow")
    path = tmp_path_factory.mktemp("fed")
    run(saver_programs.__file__, "build_fed", path)
    return path


@pytest.mark.parametrize("program", saver_programs.FED)
def test_values_that_a_program_feeds_are_refused(fed: Path, program: str) -> None:
    """A graph with a fed rate, scale or condition is not played as if it had none."""
    checkpoint = ckpttool.open(str(fed / program / "model"))
    assert read_graph(checkpoint) is None
    with pytest.raises(ckpttool.CkpttoolError) as refused:
        tensorflow_saver.read_policy(checkpoint, "actor", TARGET)
    named = "fed" if program in ("rate", "scale") else "If" if program == "functional" else "Switch"
    assert named in str(refused.value)


def test_a_default_that_a_program_may_replace_is_an_assumption(fed: Path) -> None:
    policy = tensorflow_saver.read_policy(ckpttool.open(str(fed / "default" / "model")), "actor", TARGET)
    assert policy is not None
    assert "fed" in policy.reason.split(": ")[-1].split(", ")
