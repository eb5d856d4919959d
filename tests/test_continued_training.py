"""Training continues with the optimizer state that `--like` converts, by the frameworks' own optimizers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.commands.convert import ConversionResult
from ckpttool.conversion.filling import load_into
from tests import tensorflow_child
from tests.conftest import ROOT
from tests.trained_models import (
    CASES,
    FORMS,
    STEPS,
    TRAINED,
    OptimizerCase,
    factory,
    keras_model,
    keras_optimizer,
    keras_steps,
    note_steps,
    torch_model,
    torch_optimizer,
    torch_steps,
    update_error,
)

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch, pytest.mark.slow]


def _fill(
    source: str, target: str, to: str, case: OptimizerCase, framework: str, **options: Any
) -> ConversionResult:
    from tests.test_like import fill

    done = fill(source, target, to, factory(case, framework), _SHAPES[framework], **options)
    if done.digest is None or done.ledger:
        raise AssertionError(f"{source}: {done.report.missing} {done.report.notes} {done.ledger}")
    return done


_SHAPES: dict[str, Any] = {"torch": [(2, 6, 5)], "keras": [(6, 5, 2)]}


# In a process with TensorFlow.


def trained_in_keras(folder: Path) -> list[str]:
    """Train every case, save it, and record the next updates."""
    import keras
    import tensorflow as tf

    for name, case in CASES.items():
        keras.utils.set_random_seed(3)
        model = keras_model(case.dtype)
        optimizer = keras_optimizer(case, model)
        keras_steps(model, optimizer, TRAINED)
        if FORMS[name] == "keras":
            model.compile(optimizer)
            model.save(folder / f"keras-{name}.keras")
        else:
            tf.train.Checkpoint(model, optimizer=optimizer).write(str(folder / f"keras-{name}-1"))
        note_steps(folder, f"keras-{name}", model, optimizer, "keras")
    return list(CASES)


def resumed_in_keras(folder: Path) -> dict[str, Any]:
    """Convert every case that PyTorch trained, load it, and record the next updates."""
    import tensorflow as tf

    sys.path.insert(0, str(ROOT / "tests"))
    outcomes: dict[str, Any] = {}
    for name, case in CASES.items():
        target = str(folder / f"to-keras-{name}") + (".weights.h5" if FORMS[name] == "keras" else "-1")
        done = _fill(str(folder / f"torch-{name}.pt"), target, FORMS[name], case, "keras")
        model = keras_model(case.dtype)
        optimizer = keras_optimizer(case, model)
        optimizer.learning_rate.assign(0.5)
        if FORMS[name] == "keras":
            model.compile(optimizer)
            model.load_weights(target)
        else:
            tf.train.Checkpoint(model, optimizer=optimizer).restore(target).assert_consumed()
        note_steps(folder, f"to-keras-{name}", model, optimizer, "keras")
        if name in LOADED:
            model = keras_model(case.dtype)
            optimizer = keras_optimizer(case, model)
            load_into(model, str(folder / f"torch-{name}.pt"), optimizer=optimizer)
            note_steps(folder, f"into-keras-{name}", model, optimizer, "keras")
        outcomes[name] = {"load": list(done.load), "notes": list(done.report.notes)}
    for name, case in {**LOST, **PARTIAL}.items():
        outcomes[name] = _followed_in_keras(folder, name, case)
    return outcomes


# Settings that Keras's optimizer does not have.
LOST = {
    "maximize": OptimizerCase("Adam", {}, "Adam", {"maximize": True}),
    "dampening": OptimizerCase("SGD", {}, "SGD", {"momentum": 0.5, "dampening": 0.5}),
    "lr_decay": OptimizerCase("Adagrad", {}, "Adagrad", {"lr_decay": 0.5}),
}
# Optimizers that never updated one layer, or exempt weights from weight decay.
_EXACT = {"betas": (0.875, 0.9921875), "eps": 1e-14}
PARTIAL = {
    "partial": OptimizerCase("Adam", {}, "Adam", _EXACT, limit=1e-10),
    "exempt": CASES["masked"],
}


def _followed_in_keras(folder: Path, name: str, case: OptimizerCase) -> dict[str, Any]:
    """Convert a case, run the lines that the conversion prints, and record the next updates."""
    import keras
    import tensorflow as tf

    from tests.test_like import fill

    target = str(folder / f"to-keras-{name}.weights.h5")
    source = str(folder / f"torch-{name}.pt")
    done = fill(source, target, "keras", factory(case, "keras"), _SHAPES["keras"])
    model = keras_model(case.dtype)
    if name in PARTIAL:
        stored: dict[str, Any] = {"model": model, "keras": keras, "tf": tf}
        exec("\n".join(done.load), stored)
        model.get_layer("head").trainable = name != "partial"
        note_steps(folder, f"to-keras-{name}", model, stored["optimizer"], "keras")
    return {"decides": [item.what for item in done.ledger if item.decides]}


# In a process with PyTorch.


def trained_in_torch(folder: Path) -> None:
    """Train every case, save it, and record the next updates."""
    import torch

    for name, case in CASES.items():
        torch.manual_seed(5)
        model = torch_model(case.dtype)
        optimizer = torch_optimizer(case, model)
        torch_steps(model, optimizer, TRAINED)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, folder / f"torch-{name}.pt")
        note_steps(folder, f"torch-{name}", model, optimizer, "torch")
    for name, case in {**LOST, **PARTIAL}.items():
        torch.manual_seed(6)
        model = torch_model(case.dtype)
        model.head.requires_grad_(name != "partial")
        optimizer = torch_optimizer(case, model)
        torch_steps(model, optimizer, TRAINED)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(states, folder / f"torch-{name}.pt")
        note_steps(folder, f"torch-{name}", model, optimizer, "torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of both frameworks' checkpoints and updates, and of the resumed runs in Keras."""
    tensorflow_child.require("tensorflow", "torch")
    path = tmp_path_factory.mktemp("continued")
    trained_in_torch(path)
    tensorflow_child.run_each(__file__, {"trained_in_keras": path, "resumed_in_keras": path})
    return path


def test_the_lines_that_load_create_the_optimizer(folder: Path) -> None:
    outcomes = json.loads((folder / "resumed_in_keras.json").read_text())
    for name in CASES:
        assert outcomes[name]["load"][0].startswith(f"optimizer = keras.optimizers.{CASES[name].keras}(")
        lines = outcomes[name]["load"]
        if CASES[name].masked:
            assert lines.pop(1).startswith("optimizer.exclude_from_weight_decay([model.weights[1], ")
        assert lines[1] == "optimizer.build(model.trainable_variables)"
        line = lines[2]
        assert line == "model.compile(optimizer)" if FORMS[name] == "keras" else "optimizer=optimizer" in line


@pytest.mark.parametrize("name", LOST)
def test_a_setting_that_keras_lacks_decides(name: str, folder: Path) -> None:
    outcomes = json.loads((folder / "resumed_in_keras.json").read_text())
    assert outcomes[name]["decides"] == ["setting"]


@pytest.mark.parametrize("name", PARTIAL)
def test_the_lines_that_load_continue_training(name: str, folder: Path) -> None:
    # Keras lists the trained variables only.
    _require_equal_updates(folder, f"to-keras-{name}", f"torch-{name}", PARTIAL[name])


@pytest.mark.parametrize("name", CASES)
def test_keras_continues_as_torch_does(name: str, folder: Path) -> None:
    _require_equal_updates(folder, f"torch-{name}", f"to-keras-{name}", CASES[name])


# No file of Keras lists the variables that are exempt from weight decay.
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.masked])
def test_torch_continues_as_keras_does(name: str, folder: Path) -> None:
    import torch

    case = CASES[name]
    ending = ".keras" if FORMS[name] == "keras" else "-1"
    target = folder / f"to-torch-{name}.pt"
    # TensorFlow's checkpoints contain none of the settings that are no variables.
    stated = [] if FORMS[name] == "keras" else [f"optimizer/{k}={str(v).lower()}" for k, v in _unstored(case)]
    _fill(str(folder / f"keras-{name}{ending}"), str(target), "torch", case, "torch", optimizer=stated)
    states = torch.load(target, weights_only=True)
    model = torch_model(case.dtype)
    optimizer = torch_optimizer(case, model)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    note_steps(folder, f"to-torch-{name}", model, optimizer, "torch")
    _require_equal_updates(folder, f"keras-{name}", f"to-torch-{name}", case)


def _unstored(case: OptimizerCase) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in case.settings.items() if name != "amsgrad")


LOADED = ("adam", "centered", "nesterov32")


@pytest.mark.parametrize("name", LOADED)
def test_a_live_keras_optimizer_continues(name: str, folder: Path) -> None:
    _require_equal_updates(folder, f"torch-{name}", f"into-keras-{name}", CASES[name])


@pytest.mark.parametrize("name", ["adam", "rmsprop32", "nesterov"])
def test_a_live_torch_optimizer_continues(name: str, folder: Path) -> None:
    case = CASES[name]
    assert FORMS[name] == "keras"
    model = torch_model(case.dtype)
    optimizer = torch_optimizer(case, model)
    source = str(folder / f"keras-{name}.keras")
    load_into(model, source, shapes=_SHAPES["torch"], optimizer=optimizer)
    note_steps(folder, f"into-torch-{name}", model, optimizer, "torch")
    _require_equal_updates(folder, f"keras-{name}", f"into-torch-{name}", case)


def _require_equal_updates(folder: Path, source: str, target: str, case: OptimizerCase) -> None:
    errors = [update_error(folder, source, target, count) for count in STEPS]
    assert max(errors) <= case.limit
