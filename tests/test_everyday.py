"""The matrix of everyday checkpoints: a part of it has the recorded states, and its referees find faults."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import in_process
from tests.everyday import cases, matrix, more, torch_nets, users
from tests.everyday.newcomers import USERS, User
from tests.everyday.verdicts import DifferenceError, LoadingError

# A wrapper, an optimizer, an image, a cell with gates: where errors hid.
FAST = {
    "tutorial": ("inspect", "torch", "tf", "keras", "safetensors", "npz", "eval"),
    "whole_sequential": ("torch", "tf", "onnx"),
    "cnn": ("tf",),
    "lstm": ("tf",),
    "lightning": ("tf",),
    "authors_actor": ("keras",),
    "tf_weights": ("tf",),
    "actor_opt_step": ("torch", "tf", "npz"),
    "model_optimizer": ("keras",),
    "keras_sequential": ("torch", "tf"),
}


def named(name: str) -> cases.Case:
    (case,) = (case for case in cases.CASES if case.name == name)
    return case


def test_the_results_name_every_cell():
    expected = {(c.name, column) for c in cases.CASES for column in cases.COLUMNS if c.applies(column)}
    assert set(matrix.recorded()) == expected
    assert len(cases.CASES) >= 60
    assert {cell.state for cell in matrix.recorded().values()} <= {"works", "refused", "fails"}


@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.environment
def test_a_part_of_the_matrix_has_the_recorded_states(tmp_path):
    chosen = [named(name) for name in FAST]
    matrix.make(chosen, tmp_path)
    cells = matrix.judged([(named(name), column) for name, row in FAST.items() for column in row], tmp_path)
    assert matrix.changes(cells) == []


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory):
    """The folder of a file whose copy is what the source was."""
    folder = tmp_path_factory.mktemp("everyday")
    matrix.make([named("tutorial")], folder)
    return folder / "tutorial"


def judged(folder: Path, change) -> None:
    """Let the referee of PyTorch judge a copy of the file that was changed."""
    import torch

    from tests.everyday import torch_referee

    saved = torch.load(folder / "model.pt", weights_only=True)
    change(saved)
    torch.save(saved, folder / "changed.pt")
    with np.load(folder / "reference.npz") as file:
        lines = (
            f'checkpoint = torch.load("{folder}/changed.pt", weights_only=True)\n'
            'model.load_state_dict(checkpoint["model_state_dict"])\n'
            'if "optimizer_state_dict" in checkpoint:\n'
            '    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])'
        )
        torch_referee.judge(named("tutorial"), "torch", str(folder / "changed.pt"), dict(file), lines)


@pytest.mark.torch
@pytest.mark.environment
def test_the_referee_takes_the_file_itself(tutorial):
    judged(tutorial, lambda saved: None)


def transpose(saved):
    weights = saved["model_state_dict"]
    weights["fc2.weight"] = weights["fc2.weight"].T.clone()


def exchange_moments(saved):
    states = saved["optimizer_state_dict"]["state"]
    states[1]["exp_avg"], states[3]["exp_avg"] = states[3]["exp_avg"], states[1]["exp_avg"]


def lose_the_count(saved):
    for state in saved["optimizer_state_dict"]["state"].values():
        state["step"].zero_()


@pytest.mark.torch
@pytest.mark.environment
@pytest.mark.parametrize("change", [transpose, exchange_moments, lose_the_count])
def test_the_referee_finds_a_wrong_number(tutorial, change):
    with pytest.raises(DifferenceError):
        judged(tutorial, change)


def rename(saved):
    saved["model_state_dict"] = {f"x.{k}.y": v for k, v in saved["model_state_dict"].items()}


def lose_a_layer(saved):
    del saved["model_state_dict"]["fc3.bias"]


def lose_the_optimizer(saved):
    del saved["optimizer_state_dict"]


@pytest.mark.torch
@pytest.mark.environment
@pytest.mark.parametrize("change", [rename, lose_a_layer, lose_the_optimizer])
def test_the_referee_finds_what_does_not_load(tutorial, change):
    with pytest.raises(LoadingError):
        judged(tutorial, change)


@pytest.mark.torch
def test_a_wrong_order_of_a_flattened_image_changes_outputs():
    """The image is 5 by 2 by 6: no order of its axes is another one's."""
    import torch

    net = torch_nets.build("cnn")
    before = torch_nets.outputs(net, "cnn")
    weight = net.get_submodule("fc1").weight
    with torch.no_grad():
        weight.copy_(weight.reshape(7, 5, 2, 6).permute(0, 2, 3, 1).reshape(7, 60))
    assert np.abs(torch_nets.outputs(net, "cnn") - before).max() > 1e-3


@pytest.mark.skipif("CKPTTOOL_EVERYDAY" not in os.environ, reason="minutes: CKPTTOOL_EVERYDAY=1 runs it")
@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("side", ["torch", "tensorflow"])
def test_no_file_beyond_the_matrix_gives_other_numbers(tmp_path, side):
    states = [
        more.verdict(folder, "torch" if side == "tensorflow" else "tf")[0]
        for folder in made_files(side, tmp_path)
    ]
    assert states
    assert {"WRONG", "crash"}.isdisjoint(states)


def made_files(side: str, folder: Path) -> list[Path]:
    return [folder for _, folder in more.folders(side, more.listed(side, folder), folder)]


@pytest.mark.torch
@pytest.mark.environment
def test_what_a_layout_chose_keeps_its_name_without_the_layout(tmp_path):
    case = named("authors_actor")
    matrix.make([case], tmp_path)
    target = tmp_path / "actor.safetensors"
    assert in_process("convert", tmp_path / case.name / case.path, target).status == 0
    ran = in_process("eval", target, "--env", "Pendulum-v1", "--episodes", 1, "--json")
    ledger = json.loads(ran.out)["ledger"]
    origins = {entry["what"]: entry["origin"] for entry in ledger if entry["use"] == "assumed"}
    assert "fujimoto" in origins["activation"]
    assert "fujimoto" in origins["action map"]


# --- New users -----------------------------------------------------------------------------------------


def test_the_recorded_users_follow_every_hint_without_a_failure():
    rows = users.recorded()
    assert {row["user"] for row in rows} == set(USERS)
    assert {row["FAIL"] for row in rows} == {"0"}
    for row in rows:
        assert int(row["commands"]) == len(USERS[row["user"]].commands)
        assert int(row["hints"]) == sum(int(row[verdict]) for verdict in users.VERDICTS)
        assert int(row["right"]) > 10


STEPS = {
    "a command": ("ckpttool inspect a.pt lists its tensors", ["ckpttool inspect a.pt"]),
    "a sentence before": ("run it on one: ckpttool eval a/m.pt", ["ckpttool eval a/m.pt"]),
    "two commands": ("ckpttool stats a, or ckpttool doctor a", ["ckpttool stats a", "ckpttool doctor a"]),
    "another program": (
        "pipx inject ckpttool 'ckpttool[onnx]'",
        ["pipx inject ckpttool 'ckpttool[onnx]'"],
    ),
    "a placeholder": ("ckpttool eval a.pt --env ID", []),
    "several paths": ("ckpttool check PATH...", []),
    "an option": ("use --force to replace it", ["ckpttool convert a.pt b.pt --head tanh --force"]),
    "a choice": (
        "add --activation NAME (relu, tanh) and --head NAME (clip, tanh), as the program has it",
        ["ckpttool convert a.pt b.pt --activation relu --head clip"],
    ),
    "an open value": ("add --env ID", []),
    "less": ("leave out --head", ["ckpttool convert a.pt b.pt"]),
    "a target": (
        "use --to npz and the target b.npz to copy tensors, or --map FILE",
        ["ckpttool convert a.pt b.npz --head tanh --to npz"],
    ),
    "a name": ("did you mean c.pt?", ["ckpttool convert c.pt b.pt --head tanh"]),
    "prose": ("copy or download it again", []),
}


@pytest.mark.parametrize(("hint", "steps"), STEPS.values(), ids=STEPS)
def test_a_hint_is_read_as_a_person_reads_it(hint, steps):
    assert users.steps_of(hint, "ckpttool convert a.pt b.pt --head tanh", "a.pt: refused") == steps


CELLS = {
    "a keyword": ("use to='torch'", "unexpected keyword argument 'too'", ["f('a', to='torch')"]),
    "a record": (
        "add activations='NAME' (relu, tanh) and head='NAME' (clip); in facts=ckpttool.AgentFacts(...)",
        "",
        ["f('a', too=1, facts=ckpttool.AgentFacts(activations='relu', head='clip'))"],
    ),
    "a call": ("ckpttool.load_agent('a', env='E')", "", ["ckpttool.load_agent('a', env='E')"]),
    "an open value": ("add env='ID'", "", []),
}


@pytest.mark.parametrize(("hint", "refusal", "cells"), CELLS.values(), ids=CELLS)
def test_a_hint_in_a_notebook_is_read_as_a_person_reads_it(hint, refusal, cells):
    assert users.steps_of(hint, ">>> f('a', too=1)", refusal) == [f">>> {cell}" for cell in cells]


def test_wrapped_hints_are_joined():
    screen = "x\nhint: one\n    two\nnext: ckpttool a \\\n    b\nload: x = 1\n"
    screen += "    fix: three\n    four\nload: y\n"
    expected = [("hint", "one two"), ("next", "ckpttool a b"), ("fix", "three four"), ("load", "x = 1\ny")]
    assert [tuple(hint) for hint in users.hints_on(screen)] == expected


# What a hint prints, what its command does, and how that is judged.
JUDGED = {
    "a finding": ("exit 1", "right"),
    "a new fact": ("echo ckpttool: a.pt: is damaged; exit 2", "next fact"),
    "a wrong option": ("echo ckpttool: unknown option --x; exit 2", "FAIL"),
    "the same refusal": ("echo ckpttool: refused; exit 2", "FAIL"),
    "a crash": ("exit 3", "FAIL"),
}


@pytest.mark.parametrize(("does", "verdict"), JUDGED.values(), ids=JUDGED)
def test_what_a_hint_leads_to_is_judged(does, verdict, tmp_path):
    user = User("one", "", ("echo ckpttool: refused; echo hint: ckpttool again; exit 2",))
    session = users.Session(user, tmp_path / "one", 1)
    (tmp_path / "one" / "bin" / "ckpttool").write_text(f"#!/bin/sh\n{does}\n")
    tally = session.play()
    assert [outcome.verdict for outcome in tally.outcomes] == [verdict]


@pytest.mark.parametrize(
    ("line", "verdict"), [("assert 1 + 1 == 2", "right"), ("import no_such_module", "FAIL")]
)
def test_lines_that_load_are_run(line, verdict, tmp_path):
    user = User("one", "", (f"echo 'load: {line}'",))
    tally = users.Session(user, tmp_path / "one", 1).play()
    assert [outcome.verdict for outcome in tally.outcomes] == [verdict]
