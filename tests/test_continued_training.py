"""Training continues with the optimizer state that `--like` converts, by the frameworks' own optimizers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.commands.convert import ConversionResult
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

LIMITS = {"float64": 1e-10, "float32": 1e-4}

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]


def _fill(source: str, target: str, to: str, case: OptimizerCase, framework: str) -> ConversionResult:
    from tests.test_like import fill

    done = fill(source, target, to, factory(case, framework), _SHAPES[framework])
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
    found: dict[str, Any] = {}
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
        found[name] = {"load": list(done.load), "notes": list(done.report.notes)}
    return found


# In a process with PyTorch.


def trained_in_torch(folder: Path) -> None:
    """Train every case, save it, and record the next updates."""
    import torch

    for name, case in CASES.items():
        torch.manual_seed(5)
        model = torch_model(case.dtype)
        optimizer = torch_optimizer(case, model)
        torch_steps(model, optimizer, TRAINED)
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(held, folder / f"torch-{name}.pt")
        note_steps(folder, f"torch-{name}", model, optimizer, "torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of both frameworks' checkpoints and updates, and of the resumed runs in Keras."""
    tensorflow_child.require("tensorflow", "torch")
    place = tmp_path_factory.mktemp("continued")
    trained_in_torch(place)
    tensorflow_child.run_each(__file__, {"trained_in_keras": place, "resumed_in_keras": place})
    return place


@pytest.mark.parametrize("name", CASES)
def test_keras_continues_as_torch_does(name: str, folder: Path) -> None:
    _require_equal_updates(folder, f"torch-{name}", f"to-keras-{name}", CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_torch_continues_as_keras_does(name: str, folder: Path) -> None:
    import torch

    case = CASES[name]
    ending = ".keras" if FORMS[name] == "keras" else "-1"
    target = folder / f"to-torch-{name}.pt"
    _fill(str(folder / f"keras-{name}{ending}"), str(target), "torch", case, "torch")
    held = torch.load(target, weights_only=True)
    model = torch_model(case.dtype)
    optimizer = torch_optimizer(case, model)
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    note_steps(folder, f"to-torch-{name}", model, optimizer, "torch")
    _require_equal_updates(folder, f"keras-{name}", f"to-torch-{name}", case)


def _require_equal_updates(folder: Path, source: str, target: str, case: OptimizerCase) -> None:
    found = [update_error(folder, source, target, count) for count in STEPS]
    assert max(found) <= LIMITS[case.dtype]
