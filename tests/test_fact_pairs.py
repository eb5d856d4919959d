"""`verify` of models that differ in one stated fact never passes; models that state it in two ways pass."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpttool
from ckpttool import convert
from ckpttool.commands.doctor import diagnose
from ckpttool.commands.verify import verify
from ckpttool.core import NotUnderstood, UnsupportedError, UsageError
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.restore import restore_agent
from ckpttool.graphs import evaluate, read_graph
from tests import fact_pairs
from tests.fact_pairs import FactPair

pytestmark = [pytest.mark.torch, pytest.mark.long]

# Pairs without a framework of their own: a policy whose facts NumPy computes, or a refusal.
CHEAP = tuple(pair for pair in fact_pairs.pairs() if pair.a.endswith(".onnx") and pair.b.endswith(".onnx"))
WHOLE = tuple(fact_pairs.pairs())


def test_the_table_has_60_pairs_of_each_kind() -> None:
    assert sum(pair.equal for pair in WHOLE) >= 60
    assert sum(not pair.equal for pair in WHOLE) >= 60
    assert len({pair.title for pair in WHOLE}) == len(WHOLE)


@pytest.fixture(scope="module")
def onnx_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("onnx")
    fact_pairs.write_onnx(str(folder))
    return folder


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    with fact_pairs.shared_processes():
        yield


def check(folder: Path, pair: FactPair) -> None:
    """Compare the outputs of both frameworks with what the table claims, then run `verify`."""
    computed = fact_pairs.outputs(folder)
    assert fact_pairs.is_same(computed[pair.a], computed[pair.b]) is pair.equal
    outcome = fact_pairs.compare(folder, pair)
    assert outcome.right, outcome


@pytest.mark.parametrize("pair", CHEAP, ids=lambda pair: pair.title)
def test_onnx_graphs_with_one_different_attribute_do_not_pass(
    onnx_files: Path, processes: None, pair: FactPair
) -> None:
    check(onnx_files, pair)


@pytest.fixture(scope="module")
def every_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    fact_pairs.write(folder)
    return folder


@pytest.mark.slow
@pytest.mark.tensorflow
def test_no_pair_with_a_different_fact_passes_and_every_equal_pair_does(
    every_file: Path, processes: None
) -> None:
    computed = fact_pairs.outputs(every_file)
    wrong = [pair for pair in WHOLE if fact_pairs.is_same(computed[pair.a], computed[pair.b]) != pair.equal]
    assert not wrong
    outcomes = [fact_pairs.compare(every_file, pair) for pair in WHOLE]
    assert not [outcome for outcome in outcomes if not outcome.right]


# One Keras policy with any activation in its configuration; written without Keras.


def keras_file(
    folder: Path, activation: Any, name: str = "model.keras", *before: dict[str, Any], dtype: str = "float32"
) -> str:
    """Write a `.keras` file of two hidden layers; `activation` is the setting as Keras serializes it.

    `before` are layers before the first one, `dtype` is the type of the input.
    """
    import h5py

    layers: list[dict[str, Any]] = [
        {
            "module": "keras.layers",
            "class_name": "InputLayer",
            "config": {"batch_shape": [None, 6], "dtype": dtype, "name": "input"},
            "registered_name": None,
        },
        *before,
    ]
    path = folder / name
    weights = folder / f"{name}.weights.h5"
    drawn = iter(fact_pairs.draw_weights([(6, 8), (8,), (8, 8), (8,), (8, 3), (3,)]))
    with h5py.File(weights, "w") as file:
        for number, width in enumerate((8, 8, 3)):
            title = f"dense_{number}" if number else "dense"
            config = {"name": title, "units": width, "activation": activation if number < 2 else "linear"}
            layers.append(
                {
                    "module": "keras.layers",
                    "class_name": "Dense",
                    "config": {**config, "use_bias": True, "dtype": "float32"},
                    "registered_name": None,
                }
            )
            group = file.create_group(f"layers/{title}/vars")
            group["0"], group["1"] = next(drawn), next(drawn)
    document = {
        "module": "keras",
        "class_name": "Sequential",
        "config": {"name": "sequential", "trainable": True, "layers": layers},
        "registered_name": None,
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", json.dumps({"keras_version": "3.15.1"}))
        archive.writestr("config.json", json.dumps(document))
        archive.write(weights, "model.weights.h5")
    return str(path)


def serialized(cls: str, **config: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": cls, "config": config, "registered_name": None}


def function(name: str) -> dict[str, Any]:
    return {
        "module": "builtins",
        "class_name": "function",
        "config": name,
        "registered_name": "function",
    }


STATED = {
    "function": function("sin"),
    "registered function": {**function("own"), "module": None, "registered_name": "own>act"},
    "object": serialized("PReLU", shared_axes=None),
    "object named relu": serialized("ELU", alpha=[1.0], name="relu"),
    "class of the user": {**serialized("Own", name="relu"), "module": "own", "registered_name": "own>Own"},
    "unknown name": "my_function",
}


@pytest.mark.parametrize("form", STATED)
def test_an_activation_that_is_stated_but_not_understood_is_not_taken_as_absent(
    tmp_path: Path, form: str
) -> None:
    path = keras_file(tmp_path, STATED[form])
    agent = restore_agent(path)
    stated = agent.binding.facts.stated["activations"]
    assert isinstance(stated, NotUnderstood)
    assert agent.known.activations is None
    assert any(entry.what == "activation" and entry.open for entry in agent.ledger)
    with pytest.raises(UnsupportedError) as error:
        convert(path, str(tmp_path / "out.onnx"))
    assert error.value.found == stated.text
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("form", ["registered function", "unknown name"])
def test_code_is_refused_for_the_fact_that_an_option_gives(tmp_path: Path, form: str) -> None:
    """The model's graph is refused as well: it has a layer whose activation no statement computes."""
    path, target = keras_file(tmp_path, STATED[form]), str(tmp_path / "out.pt")
    stated = restore_agent(path).binding.facts.stated["activations"]
    with pytest.raises(UsageError) as error:
        convert(path, target, code="-")
    assert isinstance(stated, NotUnderstood)
    assert error.value.found == stated.text
    ends = AgentFacts(activations="relu", action_low=-1.0, action_high=1.0)
    assert "relu" in str(convert(path, target, code="-", facts=ends).code)


@pytest.mark.parametrize("form", STATED)
def test_the_other_side_does_not_complete_what_a_file_states(
    tmp_path: Path, onnx_files: Path, processes: None, form: str
) -> None:
    import torch

    path = keras_file(tmp_path, STATED[form])
    weights = str(tmp_path / "relu.pt")
    convert(keras_file(tmp_path, "relu", "relu.keras"), weights, to="torch")
    assert torch.load(weights, weights_only=True)
    for pair in ((path, weights), (weights, path)):
        with pytest.raises(UnsupportedError):
            verify(*pair)


def test_weights_converted_from_a_model_keep_that_their_activation_is_unknown(tmp_path: Path) -> None:
    path = keras_file(tmp_path, function("sin"))
    convert(path, str(tmp_path / "out.pt"), to="torch")
    with pytest.raises(UnsupportedError):
        restore_agent(str(tmp_path / "out.pt"))


def test_a_given_activation_replaces_the_stated_one_and_both_are_reported(tmp_path: Path) -> None:
    path = keras_file(tmp_path, function("sin"))
    agent = restore_agent(path, facts=AgentFacts(activations="relu"))
    assert agent.known.activations == ["relu"]
    assert any("sin" in note for note in agent.notes)
    assert not any(entry.what == "activation" and entry.open for entry in agent.ledger)
    done = convert(path, str(tmp_path / "out.onnx"), facts=AgentFacts(activations="relu"))
    assert any("sin" in note for note in done.report.notes)


def test_doctor_reports_what_is_not_understood(tmp_path: Path) -> None:
    diagnosis = diagnose(keras_file(tmp_path, function("sin")))
    assert any("sin" in finding.sentence for finding in diagnosis.findings)


UNDERSTOOD = {
    "relu": ("relu", "relu"),
    "function": (function("relu"), "relu"),
    "object": (serialized("ReLU", negative_slope=0.0, max_value=None, threshold=0.0), "relu"),
    "leaky": (serialized("LeakyReLU", negative_slope=0.5, name="relu"), "leaky_relu(0.5)"),
    "leaky function": (function("leaky_relu"), "leaky_relu(0.2)"),
}


RESCALED = serialized("Rescaling", scale=0.5, offset=1.0, name="rescaling")


@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
@pytest.mark.parametrize("before", [[], [RESCALED]], ids=["plain", "rescaled"])
def test_a_policy_acts_as_its_whole_graph_computes(
    tmp_path: Path, before: list[dict[str, Any]], dtype: str
) -> None:
    path = keras_file(tmp_path, "relu", "model.keras", *before, dtype=dtype)
    graph = read_graph(ckpttool.open(path))
    assert graph is not None
    x = np.arange(-3, 3, dtype=dtype).reshape(1, 6)
    (expected,) = evaluate(graph, {graph.inputs[0].name: x}).values()
    with ckpttool.load_agent(path) as agent:
        # The layers of a model with an input of 16 bits compute in their own type.
        np.testing.assert_allclose(agent.act(x.astype("float32")), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("softmax", ["softmax", function("softmax"), serialized("Softmax", axis=-1)])
def test_no_option_replaces_an_activation_that_policies_do_not_have(tmp_path: Path, softmax: Any) -> None:
    path = keras_file(tmp_path, softmax)
    for facts in (AgentFacts(), AgentFacts(activations="relu")):
        with pytest.raises(UnsupportedError) as error:
            restore_agent(path, facts=facts)
        assert (error.value.path, error.value.found) == ("dense", "Softmax")


@pytest.mark.parametrize("form", UNDERSTOOD)
def test_activation_objects_are_judged_by_class_and_settings(tmp_path: Path, form: str) -> None:
    agent = restore_agent(keras_file(tmp_path, UNDERSTOOD[form][0]))
    assert not agent.binding.facts.stated
    program = agent.binding.parts[0].program
    names = (
        set(agent.known.activations or ())
        if program is None
        else {operation.value["name"] for operation in program.operations if operation.kind == "activation"}
    )
    assert names == {UNDERSTOOD[form][1]}
