"""The lines that a conversion prints load what it wrote: they are executed beside hand-written models."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpttool
from ckpttool.conversion import loading_code
from ckpttool.conversion.loading_code import format_loading_code
from ckpttool.conversion.targets import TARGETS
from ckpttool.core import Inline, Leaf, Tree, attr
from tests import loading_keras, loading_torch, tensorflow_child
from tests.conftest import ROOT, in_process
from tests.loading_keras import observations

TF_SAMPLE = ROOT / "sample_ckpts" / "td3_pendulum_tf" / "ckpt-15000"
TORCH_SAMPLE = ROOT / "sample_ckpts" / "td3_pendulum_torch" / "ckpt-15000.pt"


class Actor(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(3, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x))))))


def loaded(source: object, target: str, *options: str, cwd: Path) -> list[str]:
    """Convert, and return the lines that the JSON document names."""
    ran = in_process("convert", source, target, *options, "--json", cwd=cwd)
    assert ran.status == 0, ran.err + ran.out
    lines: list[str] = json.loads(ran.out)["load"]
    assert 0 < len(lines) <= 8
    again = in_process("convert", source, target, *options, "--force", cwd=cwd)
    assert printed_lines(again.out) == lines
    return lines


def printed_lines(output: str) -> list[str]:
    """Return the lines after `load: `."""
    return [line.removeprefix("load: ") for line in output.splitlines() if line.startswith("load: ")]


def execute(lines: list[str], **names: Any) -> None:
    exec("\n".join(lines), {"torch": torch, "shutil": shutil, **names})


@pytest.mark.parametrize("key", [None, "actor", "policy_net", "model_state_dict", "state-dict"])
def test_one_network_in_torch(key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = Actor(), Actor()
    state = model.state_dict()
    torch.save(state if key is None else {key: state}, tmp_path / "a.pth")
    lines = loaded("a.pth", 'it\'s "b".pt', "--layout", "none", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    execute(lines, **dict.fromkeys(("actor", "model", "policy_net", "state_dict"), other))
    for name, value in other.state_dict().items():
        assert torch.equal(value, state[name])


# What loads the targets for which no line is printed: the call of the format's own library.
OWN_CALLS = {
    "safetensors": 'tensors = safetensors.numpy.load_file("{}")',
    "npz": 'tensors = numpy.load("{}")',
}


@pytest.mark.parametrize("source", [TF_SAMPLE, TORCH_SAMPLE], ids=["from_tf", "from_torch"])
def test_printed_lines_load_an_agent_in_a_process_without_this_package(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    expected = weights_of(source)
    shapes: dict[str, dict[str, list[int]]] = {}
    for path, values in expected.items():
        net, _, name = path.partition(".")
        shapes.setdefault(net, {})[name] = list(values.shape)
    cases = {}
    targets = {"torch": "a.pt", "dcp": "folder", "safetensors": "a.safetensors", "npz": "a.npz"}
    for target, name in targets.items():
        ran = in_process("convert", source, name, "--to", target, cwd=tmp_path)
        assert ran.status == 0, ran.err
        if target in OWN_CALLS:
            assert "load: " not in ran.out
            cases[target] = ("arrays", OWN_CALLS[target].format(name), shapes)
        else:
            cases[target] = (target, "\n".join(printed_lines(ran.out)), shapes)
    ran = in_process("convert", source, "b.pt", "--code", "written.py", cwd=tmp_path)
    cases["code"] = ("code", "\n".join(printed_lines(ran.out)), {})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, loading_torch.__file__, "cases.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    actions, _ = ckpttool.load_agent(str(source)).predict(np.float32([[0.1, -0.2, 0.3], [1, 0, -4]]))
    np.testing.assert_allclose(outcomes.pop("code")["actions"], actions, rtol=1e-5, atol=1e-5)
    for target, outcome in outcomes.items():
        values = {torch_name(name): value for name, value in outcome.items()}
        if target == "npz" and source == TF_SAMPLE:  # a file of no framework keeps the source's orientation
            values = {name: np.transpose(value) for name, value in values.items() if name in expected}
        assert expected.keys() <= values.keys(), target
        for path, weights in expected.items():
            assert np.array_equal(np.float32(values[path]), weights), (target, path)
    assert {*outcomes["torch"]["actor_optimizer"]} == {7000}
    assert {*outcomes["torch"]["critic_optimizer"]} == {14000}


def torch_name(name: str) -> str:
    """Return a name of a TensorFlow or PyTorch sample as in PyTorch."""
    return name.removeprefix("policy/").replace("/_kernel", "/weight").replace("/", ".")


def weights_of(source: Path) -> dict[str, Any]:
    """Return the weights of the four networks by PyTorch's names."""
    nets = ("actor", "actor_target", "critic", "critic_target")
    if source == TORCH_SAMPLE:
        saved = torch.load(source, weights_only=True)
        return {f"{net}.{name}": value.numpy() for net in nets for name, value in saved[net].items()}
    policy = ckpttool.open(str(source))["policy"]
    weights = {}
    for net in nets:
        for path, handle in policy[net].tensors().items():
            layer, _, kind = path.removeprefix(f"policy/{net}/").rpartition("/")
            name = "weight" if kind == "kernel" else kind
            weights[f"{net}.{layer.replace('/', '.')}.{name}"] = handle.numpy().T
    return weights


def test_objects_of_tensorflow_above_the_model_are_left_out_of_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = Actor(), Actor()
    torch.save({"net": model.state_dict()}, tmp_path / "a.pth")
    loaded("a.pth", "ckpt-1", "--to", "tf", cwd=tmp_path)
    lines = loaded("ckpt-1", "back.pt", cwd=tmp_path)
    (tmp_path / "ckpt-1.ckpttool.json").unlink()
    again = loaded("ckpt-1", "again.pt", "--allow-missing", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    for code in (lines, again):
        other = Actor()
        execute(code, model=other, net=other)
        assert torch.equal(other.fc2.weight, model.fc2.weight)


def test_quiet_prints_none_and_no_line_is_long(tmp_path: Path) -> None:
    torch.save(Actor().state_dict(), tmp_path / "a.pth")
    assert "load:" not in in_process("convert", "a.pth", "q.pt", "--quiet", cwd=tmp_path).out
    shown = in_process("convert", TORCH_SAMPLE, "c-1", "--to", "tf", cwd=tmp_path).out
    lines = [line for line in shown.splitlines() if line.startswith("load:")]
    assert 0 < len(lines) <= 8
    assert max(map(len, lines)) <= 80


def test_the_reason_for_exit_status_1_is_shown_with_quiet(tmp_path: Path) -> None:
    torch.save({"net": {**Actor().state_dict(), "odd": torch.ones(2, 3)}}, tmp_path / "a.pth")
    ran = in_process("convert", "a.pth", "q-1", "--to", "tf", "--quiet", cwd=tmp_path)
    assert ran.status == 1
    assert ran.err.startswith("exit status 1: ")
    assert "net/odd" in ran.err


def test_other_targets_have_none() -> None:
    for name in ("sb3", "cleanrl", "safetensors"):
        assert format_loading_code("x", TARGETS[name], Tree({})) == ()


# --- TensorFlow, in a process of its own -------------------------------------------------------------


@pytest.mark.tensorflow
def test_the_lines_load_into_models_of_tensorflow_and_keras(tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    model = Actor()
    torch.save(model.state_dict(), tmp_path / "a.pth")
    torch.save({"net": model.state_dict()}, tmp_path / "n.pth")
    counted = {"epoch": 3, "model_state_dict": model.state_dict(), "loss": torch.tensor(0.5)}
    torch.save(counted, tmp_path / "c.pth")
    numbers = {
        f"{2 * n}.{k}": v for n in range(3) for k, v in getattr(model, f"fc{n + 1}").state_dict().items()
    }
    torch.save(numbers, tmp_path / "s.pth")
    torch.save({"actor": model.state_dict()}, tmp_path / "agent.pth")
    cases = {
        "objects": ("a.pth", "objects-1", "--to", "tf"),
        "below": ("n.pth", "below-1", "--to", "tf"),
        "counted": ("c.pth", "counted-1", "--to", "tf"),
        "weights": ("a.pth", "a.weights.h5", "--to", "keras"),
        "renamed": ("a.pth", "a.h5"),
        "numbered": ("s.pth", "s.weights.h5", "--to", "keras"),
        "part": ("agent.pth", "agent.weights.h5", "--to", "keras"),
        "agent": (TORCH_SAMPLE, "agent-1", "--to", "tf"),
        "variables": ("a.pth", "named-1", "--to", "tf1"),
    }
    lines = {name: loaded(*case, cwd=tmp_path) for name, case in cases.items()}
    (tmp_path / "lines.json").write_text(json.dumps(lines))
    outcomes = tensorflow_child.run(loading_keras.__file__, "load_all", tmp_path)
    with torch.no_grad():
        expected = model(torch.from_numpy(observations())).numpy()
    for name in ("objects", "below", "counted", "weights", "renamed", "numbered", "part"):
        np.testing.assert_allclose(outcomes[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(np.float32(outcomes["variables"]), model.fc1.weight.detach().numpy().T)
    assert os.path.exists(tmp_path / "a.weights.h5")


# --- Values beside networks ----------------------------------------------------------------------------

RESERVED = (
    *("iter", "iterations", "_iterations", "step", "save_counter", "global_step", "epoch", "root", "self"),
    *("model", "optimizer", "variables", "layers", "beta1_power", "learning_rate", "param_groups", "state"),
    *("_CHECKPOINTABLE_OBJECT_GRAPH", "policy", "_functional", "0", "a b", "log_alpha", "kernel", "vars"),
)
VALUES: dict[str, Any] = {
    "int": 3,
    "text": "a",
    "count": torch.tensor(7),
    "number": torch.tensor(0.5),
    "vector": torch.tensor([1.0, 2.0]),
}


@pytest.mark.parametrize("places", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["torch", "tf", "tf1", "keras", "safetensors", "npz"])
@pytest.mark.parametrize("name", RESERVED)
def test_whatever_fails_fails_before_anything_is_written(
    name: str, target: str, places: int, tmp_path: Path
) -> None:
    state = Actor().state_dict()
    # With one place, the kinds of values take turns, and begin at the other place for the next name.
    turn = RESERVED.index(name)
    for number, (kind, value) in enumerate(VALUES.items(), start=turn):
        for below in ("net", None) if places == 2 else (("net", None)[number % 2],):
            contents = {**state, name: value} if below is None else {below: state, name: value}
            torch.save(contents, tmp_path / "a.pt")
            folder = tmp_path / f"{kind}_{below}"
            folder.mkdir()
            suffix = {"torch": ".pt", "keras": ".weights.h5"}.get(target, f".{target}")
            out = folder / ("out" if target.startswith("tf") else f"out{suffix}")
            ran = in_process("convert", tmp_path / "a.pt", out, "--to", target, cwd=tmp_path)
            assert "unexpected" not in ran.err, (kind, below, ran.err)
            assert "Traceback" not in ran.err, (kind, below, ran.err)
            assert ran.status == 0 or not [*folder.iterdir()], (kind, below, ran.err, ran.out)


ROOTS: dict[str, Any] = {
    "array": np.ones((3, 4), "float32"),
    "vector": np.ones(3),
    "number": np.float64(0.5),
    "truth": np.array([True, False]),
    "nothing": np.zeros((0, 2), "float32"),
    "objects": np.array([1, "a"], dtype=object),
    "tensor": torch.ones(3, 4),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "int": 3,
    "text": "a.b",
    "none": None,
    "list": [np.ones(2), torch.ones(2)],
    "tuple": (torch.ones(2, 3),),
    "empty dict": {},
    "numbered": {0: torch.ones(2, 2), (1, 2): torch.ones(2)},
}


@pytest.mark.parametrize("target", ["torch", "tf", "tf1", "keras", "safetensors", "npz"])
@pytest.mark.parametrize("name", ROOTS)
def test_a_root_of_any_kind_is_converted_or_refused(name: str, target: str, tmp_path: Path) -> None:
    torch.save(ROOTS[name], tmp_path / "a.pt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(ROOTS[name]))
    suffix = {"torch": ".pt", "keras": ".weights.h5"}.get(target, f".{target}")
    for source in ("a.pt", "a.pkl"):
        folder = tmp_path / f"{source}_out"
        folder.mkdir()
        out = folder / ("out" if target.startswith("tf") else f"out{suffix}")
        ran = in_process("convert", source, out, "--to", target, cwd=tmp_path)
        assert "unexpected" not in ran.err, (source, ran.err)
        assert "Traceback" not in ran.err, (source, ran.err)
        assert ran.status == 0 or not [*folder.iterdir()], (source, ran.err, ran.out)


@pytest.mark.tensorflow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_network_is_restored_beside_any_number(count: int, tmp_path: Path) -> None:
    tensorflow_child.require("tensorflow", "keras")
    state, cases = Actor().state_dict(), {}
    kinds = ("int", "count", "number", "vector") * 2
    for number, name in enumerate(RESERVED):
        for kind in kinds[number % 4 :][:count]:
            torch.save({"net": state, name: VALUES[kind]}, tmp_path / "a.pt")
            ran = in_process(
                "convert", "a.pt", f"{number}{kind}-1", "--to", "tf", "--force", "--json", cwd=tmp_path
            )
            if ran.status == 0:
                cases[f"{name} {kind}"] = json.loads(ran.out)["load"]
    (tmp_path / "lines.json").write_text(json.dumps(cases))
    assert len(cases) > 0.75 * count * len(RESERVED)
    assert tensorflow_child.run(loading_keras.__file__, "restore_beside", tmp_path) == {}


def test_no_more_names_are_read_than_a_line_holds() -> None:
    names = iter([f"layer{number}" for number in range(100_000)])
    line = loading_code._format_names("# ", names)
    assert len(line) <= 80
    assert line.endswith(", ...")
    assert len(list(names)) > 99_900


class ReadCounter(dict[Any, Leaf]):
    """Leaves by path; `reads` is how often one was looked at."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        for path in super().__iter__():
            self.reads += 1
            yield path

    def items(self) -> Any:
        return ((path, self[path]) for path in self)


@pytest.mark.parametrize("kind", ["torch", "tf", "keras"])
@pytest.mark.parametrize("pattern", ["block{}.fc.weight", "net{}/fc.weight", "net/layer{}/kernel", "w{}"])
def test_the_work_grows_with_the_number_of_tensors(kind: str, pattern: str) -> None:
    counts = []
    for number in (50, 400):
        names = [pattern.format(n) for n in range(number)]
        paths = {name: tuple(map(attr, name.split("/"))) for name in names}
        leaves = ReadCounter({paths[n]: Leaf("float32", (2, 2), Inline(b""), n, "parameter") for n in names})
        format_loading_code("target.pt", TARGETS[kind], Tree(leaves), foreign=True)
        counts.append(leaves.reads)
    assert counts[1] == 8 * counts[0] > 0
