"""Optimizers from TensorFlow to PyTorch and back: each goes on in the other framework as in its own.

The frameworks are the referees. A program of the first trains for some updates and saves; the second loads
what was converted, strictly, and both go on with the same gradients.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.commands.digest import digest
from ckpttool.core.optimizers import find_by_settings, find_torch_class
from tests.conftest import ROOT
from tests.golden_texts import Golden
from tests.optimizer_programs import CASES, RATE, STEPS, TF1, TINY, gradients, weights

if TYPE_CHECKING:
    import torch

EQUAL = 1e-6
NAME = "actor_optimizer"
KERNELS = {"weight_decay/0/kernel": 0.02, "weight_decay/1/kernel": 0.02}
TO_TORCH = [f"{family}-{case}" for family in ("keras3", "keras2") for case in CASES]
TO_TORCH += [f"legacy-{case}" for case in CASES if case != "adamw"] + [f"tf1-{case}" for case in TF1]

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What TensorFlow saved, our conversions of what torch saved, and what TensorFlow made of those."""
    for framework in ("tensorflow", "tf_keras", "torch"):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    from tests import optimizer_programs, tensorflow_child

    folder = tmp_path_factory.mktemp("optimizers")
    for case in CASES:
        _train(folder, case)
        convert(str(folder / f"torch-{case}.pt"), str(folder / f"torch-{case}-1"), to="tf")
    _train_groups(folder)
    convert(str(folder / "torch-l2.pt"), str(folder / "torch-l2-1"), to="tf")
    for case in TF1:
        target = str(folder / f"torch-{case}-named-1")
        convert(str(folder / f"torch-{case}.pt"), target, to="tf1")
    tensorflow_child.run_each(optimizer_programs.__file__, {"train": folder, "resume": folder})
    return folder


# --- Torch's side --------------------------------------------------------------------------------------


def _parameters(values: Mapping[str, np.ndarray]) -> dict[str, torch.nn.Parameter]:
    import torch

    return {
        name.replace("/kernel", ".weight").replace("/", "."): torch.nn.Parameter(
            torch.from_numpy(np.ascontiguousarray(array.T))
        )
        for name, array in values.items()
    }


def _go_on(
    parameters: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    first: int,
    scale: float = 1.0,
) -> None:
    import torch

    for step in gradients(first, scale):
        for parameter, gradient in zip(parameters.values(), step, strict=True):
            parameter.grad = torch.from_numpy(np.ascontiguousarray(gradient.T))
        optimizer.step()


def _save(file: Path, parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    import torch

    actor = {name: parameter.detach() for name, parameter in parameters.items()}
    torch.save({"actor": actor, NAME: optimizer.state_dict()}, file)


def _values(parameters: Mapping[str, torch.nn.Parameter]) -> list[np.ndarray]:
    return [parameter.detach().numpy().T.copy() for parameter in parameters.values()]


def _train(folder: Path, case: str) -> None:
    import torch

    _, _, cls, settings = CASES[case]
    parameters = _parameters(weights())
    optimizer = getattr(torch.optim, cls)(parameters.values(), lr=RATE, **settings)
    _go_on(parameters, optimizer, 0)
    _save(folder / f"torch-{case}.pt", parameters, optimizer)
    _go_on(parameters, optimizer, STEPS)
    np.savez(folder / f"torch-{case}.npz", *_values(parameters))


def _groups(parameters: Mapping[str, torch.nn.Parameter], decay: float) -> list[dict[str, Any]]:
    kernels = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    others = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    return [{"params": kernels, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def _train_groups(folder: Path) -> None:
    import torch

    for name, cls in (("l2", torch.optim.Adam), ("groups", torch.optim.AdamW)):
        parameters = _parameters(weights())
        optimizer = cls(_groups(parameters, 0.02), lr=RATE, **CASES["adam"][3])
        _go_on(parameters, optimizer, 0)
        _save(folder / f"torch-{name}.pt", parameters, optimizer)
        _go_on(parameters, optimizer, STEPS)
        np.savez(folder / f"torch-{name}.npz", *_values(parameters))


def _class(name: str) -> str:
    family, _, case = name.partition("-")
    if family == "tf1":
        return {"adam": "Adam", "momentum": "SGD"}.get(case, "RMSprop")
    return CASES[case][2]


def _resumed(file: Path, cls: Any, groups: float | None = None, scale: float = 1.0) -> list[np.ndarray]:
    """Load what was converted, strictly, and return the weights after more updates."""
    import torch

    contents = torch.load(file, weights_only=True)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in contents["actor"].items()}
    every: Any = list(parameters.values()) if groups is None else _groups(parameters, groups)
    optimizer = (getattr(torch.optim, cls) if isinstance(cls, str) else cls)(every, lr=1.0)
    optimizer.load_state_dict(contents[NAME if NAME in contents else "optimizer"])
    _go_on(parameters, optimizer, STEPS, scale)
    return _values(parameters)


def _title(name: str) -> str:
    """Return the optimizer's name: variables of TensorFlow 1 give it none."""
    return "optimizer" if name.startswith("tf1-") else NAME


def _settings_to_state(name: str) -> Iterator[str]:
    """Go through the settings of the program that its checkpoint does not hold."""
    family, _, case = name.partition("-")
    title = _title(name)
    settings = TF1[case][1] if family == "tf1" else CASES[case][1]
    stored = {"legacy": ("beta_1", "beta_2", "rho", "momentum")}.get(family, ())
    for setting, value in settings.items():
        if setting not in (*stored, "amsgrad", "centered"):
            yield f"{title}/{setting}={json.dumps(value)}"
    if family == "tf1":
        yield f"{title}/learning_rate={RATE}"
    if name == "keras2-sgd":  # which has a slot without momentum too
        yield f"{title}/momentum=0"


def _apart(result: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Return the largest difference, relative to how far the weights moved."""
    pairs = zip(result, expected, weights().values(), strict=True)
    return float(max(np.abs(a - b).max() / np.abs(b - start).max() for a, b, start in pairs))


def _expected(folder: Path, name: str) -> list[np.ndarray]:
    with np.load(folder / f"{name}.npz") as archive:
        return [archive[key] for key in archive]


# --- The tests -----------------------------------------------------------------------------------------


def _to_torch(folder: Path, tmp_path: Path, name: str) -> ConversionResult:
    done = convert(
        str(folder / f"{name}-1"), str(tmp_path / "agent.pt"), optimizer=tuple(_settings_to_state(name))
    )
    assert done.written, (done.report.unused, done.report.missing)
    return done


@pytest.mark.parametrize("name", TO_TORCH)
def test_training_goes_on_in_torch_and_the_way_back_is_exact(folder: Path, tmp_path: Path, name: str) -> None:
    done = _to_torch(folder, tmp_path, name)
    # What TensorFlow 1 computes with beta in float32 torch computes in float64.
    bound = 1e-5 if name == "tf1-adam" else EQUAL
    assert _apart(_resumed(tmp_path / "agent.pt", _class(name)), _expected(folder, name)) < bound
    notes = " ".join(done.report.notes)
    case = name.partition("-")[2]
    assert ("epsilon" in notes) == (_class(name) != "SGD")
    assert ("rounding" in notes) == (case in ("momentum", "nesterov", "centered") and name != "tf1-momentum")
    to = "tf1" if name.startswith("tf1") else "tf"
    convert(str(tmp_path / "agent.pt"), str(tmp_path / "back-1"), to=to)
    assert digest(str(tmp_path / "back-1")).sha256 == digest(str(folder / f"{name}-1")).sha256


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_in_keras(folder: Path, tmp_path: Path, case: str) -> None:
    expected = _expected(folder, f"torch-{case}")
    assert _apart(_expected(folder, f"torch-{case}-after"), expected) < EQUAL
    convert(str(folder / f"torch-{case}-1"), str(tmp_path / "back.pt"))
    assert digest(str(tmp_path / "back.pt")).sha256 == digest(str(folder / f"torch-{case}.pt")).sha256


@pytest.mark.parametrize("case", TF1)
def test_training_goes_on_in_tensorflow_1(folder: Path, case: str) -> None:
    result = _expected(folder, f"torch-{case}-named-after")
    assert _apart(result, _expected(folder, f"torch-{case}")) < EQUAL


def _tiny(folder: Path, tmp_path: Path, case: str) -> tuple[Path, list[np.ndarray], str]:
    settings = {**CASES[case][1], "epsilon": 1e-7}
    options = [f"{NAME}/{name}={value}" for name, value in settings.items()]
    done = convert(str(folder / f"tiny-{case}-1"), str(tmp_path / "agent.pt"), optimizer=options)
    return tmp_path / "agent.pt", _expected(folder, f"tiny-{case}"), "\n".join(done.report.notes)


@pytest.mark.parametrize("case", ["adam", "rmsprop"])
def test_where_epsilon_counts_training_differs_and_the_report_says_so(
    folder: Path, tmp_path: Path, case: str, golden: Golden
) -> None:
    target, expected, report = _tiny(folder, tmp_path, case)
    assert _apart(_resumed(target, CASES[case][2], scale=TINY[case]), expected) > 1e-3
    golden(report)


def test_an_adam_that_adds_epsilon_as_keras_does_is_exact(folder: Path, tmp_path: Path) -> None:
    adam = runpy.run_path(str(ROOT / "examples" / "keras_adam.py"))["KerasAdam"]
    target, expected, _ = _tiny(folder, tmp_path, "adam")
    assert _apart(_resumed(target, adam, scale=TINY["adam"]), expected) < EQUAL


# --- Groups of parameters, penalties of the loss ---------------------------------------------------------


def test_penalties_become_groups_with_weight_decay_and_come_back(
    folder: Path, tmp_path: Path, golden: Golden
) -> None:
    import torch

    settings = [f"{NAME}/{name}={value}" for name, value in CASES["adam"][1].items()]
    target = tmp_path / "agent.pt"
    done = convert(str(folder / "l2-1"), str(target), l2=["actor/**/kernel=0.01"], optimizer=settings)
    groups = torch.load(target, weights_only=True)[NAME]["param_groups"]
    assert [(g["weight_decay"], g["params"], g["param_names"]) for g in groups] == [
        (0.02, [0, 1], ["l1.weight", "l2.weight"]),
        (0.0, [2, 3], ["l1.bias", "l2.bias"]),
    ]
    assert _apart(_resumed(target, "Adam", groups=0.5), _expected(folder, "l2")) < EQUAL
    golden("\n".join(done.report.notes))
    receipt = json.loads(Path(f"{target}.ckpttool.json").read_text())
    assert receipt["provenance"]["l2"] == "given: actor/**/kernel=0.01"
    back = convert(str(target), str(tmp_path / "back-1"), to="tf", layout="fujimoto")
    record = json.loads((tmp_path / "back-1.ckpttool.json").read_text())["optimizers"][NAME]
    assert record.items() >= KERNELS.items()
    golden("\n".join(back.report.notes))
    # The sidecar tells now what --l2 told before.
    convert(str(tmp_path / "back-1"), str(tmp_path / "again.pt"), layout="td3_tf")
    assert digest(str(tmp_path / "again.pt")).sha256 == digest(str(target)).sha256


def test_without_its_penalty_training_goes_elsewhere(folder: Path, tmp_path: Path) -> None:
    settings = [f"{NAME}/{name}={value}" for name, value in CASES["adam"][1].items()]
    convert(str(folder / "l2-1"), str(tmp_path / "agent.pt"), optimizer=settings)
    assert _apart(_resumed(tmp_path / "agent.pt", "Adam"), _expected(folder, "l2")) > 1e-3


def test_groups_of_torch_become_penalties_in_keras(folder: Path) -> None:
    assert _apart(_expected(folder, "torch-l2-after"), _expected(folder, "torch-l2")) < EQUAL


@pytest.mark.parametrize("name", ["l2", "groups"])
def test_groups_come_back_with_and_without_the_record_of_the_file(
    folder: Path, tmp_path: Path, name: str, golden: Golden
) -> None:
    source, over, back = folder / f"torch-{name}.pt", tmp_path / "over-1", tmp_path / "back.pt"
    done = convert(str(source), str(over), to="tf")
    assert done.report.complete
    golden("\n".join(done.report.notes))
    for layout in (None, "td3_tf"):
        convert(str(over), str(back), layout=layout, force=True)
        assert digest(str(back)).sha256 == digest(str(source)).sha256
        cls = "Adam" if name == "l2" else "AdamW"
        assert _apart(_resumed(back, cls, groups=0.5), _expected(folder, f"torch-{name}")) < EQUAL


# Classes of torch.optim that `verify --train-step` trains; the others are refused.
TRAINED = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "SGD")


@pytest.mark.torch
@pytest.mark.parametrize("cls", [*TRAINED, "Adafactor", "ASGD", "Muon", "Rprop"])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_class_of_torch_is_known_by_its_settings_and_state(cls: str, stepped: bool) -> None:
    import torch

    parameter = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = getattr(torch.optim, cls)([parameter], lr=0.1)
    if stepped:
        parameter.grad = torch.ones(2, 3)
        optimizer.step()
    saved = optimizer.state_dict()
    keys = {*saved["param_groups"][0]} - {"params"}
    state = {name for slots in saved["state"].values() for name in slots}
    family = find_torch_class(frozenset(keys), frozenset(state))
    assert (family and family.name) == (cls.replace("AdamW", "Adam") if cls in TRAINED else None)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"lr", "weight_decay"}, "Adam"),
        ({"lr", "dampening"}, "SGD"),
        ({"lr", "nesterov", "momentum"}, "SGD"),
        ({"lr", "rho"}, "RMSprop"),
        ({"lr", "rho", "weight_decay", "centered"}, "RMSprop"),
        ({"lr", "rho", "weight_decay"}, "Adadelta"),
        ({"lr", "lr_decay"}, "Adagrad"),
        ({"lr", "initial_accumulator_value"}, "Adagrad"),
    ],
    ids=lambda case: case if isinstance(case, str) else " ".join(sorted(case)),
)
def test_settings_alone_tell_an_optimizer_without_state(settings: set[str], name: str) -> None:
    assert find_by_settings(settings).name == name


OLDEST = {"lr", "betas", "eps", "weight_decay"}


@pytest.mark.parametrize(
    ("keys", "state", "cls"),
    [
        pytest.param(OLDEST, {"exp_avg", "exp_avg_sq"}, "Adam", id="PyTorch 0.3"),
        pytest.param(OLDEST, {"exp_avg", "exp_inf"}, "Adamax", id="PyTorch 1.0"),
        pytest.param({*OLDEST, "amsgrad"}, {"exp_avg", "exp_avg_sq"}, "Adam", id="PyTorch 1.0, Adam"),
        pytest.param({*OLDEST, "foreach"}, {"exp_avg", "exp_avg_sq"}, "RAdam", id="PyTorch 1.12"),
        pytest.param({*OLDEST, "correct_bias"}, {"exp_avg", "exp_avg_sq"}, None, id="transformers.AdamW"),
        pytest.param({*OLDEST} - {"eps"}, {"exp_avg"}, None, id="Lion"),
        pytest.param({*OLDEST, "amsgrad"}, {"exp_avg", "exp_avg_var"}, None, id="AdaBelief"),
    ],
)
def test_a_state_without_newer_settings_is_that_of_one_class_or_none(
    keys: set[str], state: set[str], cls: str | None
) -> None:
    family = find_torch_class(frozenset(keys), frozenset(("step", *state)))
    assert (family and family.name) == cls
