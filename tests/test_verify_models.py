"""`verify` of two models: equal models pass, and each planted fault is found in its layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.commands.verify import Verification, VerificationOptions, verify
from tests import pair_models
from tests.conftest import ROOT
from tests.pair_models import RIGHT

pytestmark = [pytest.mark.torch, pytest.mark.tensorflow, pytest.mark.long]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with every model's `.pt` and `.keras`."""
    import numpy as np
    import torch

    folder = tmp_path_factory.mktemp("pairs")
    for name in RIGHT:
        state = pair_models.torch_state(name)
        torch.save(state, folder / f"{name}.pt")
        np.savez(folder / f"{name}.npz", **{key: value.numpy() for key, value in state.items()})
    command = [sys.executable, "-m", "tests.pair_models", str(folder), *RIGHT]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder


@pytest.fixture(autouse=True)
def factories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `pair_models` importable for the models' processes."""
    path = os.pathsep.join(filter(None, (str(ROOT / "tests"), os.environ.get("PYTHONPATH"))))
    monkeypatch.setenv("PYTHONPATH", path)


def compare(
    a: Path, b: Path, like_a: str | None = None, like_b: str | None = None, **given: object
) -> Verification:
    options = VerificationOptions(
        like_a=None if like_a is None else f"pair_models:{like_a}",
        like_b=None if like_b is None else f"pair_models:{like_b}",
    )
    return verify(str(a), str(b), options, **given)


@pytest.mark.parametrize("name", RIGHT)
def test_equal_models_pass(files: Path, name: str) -> None:
    found = compare(files / f"{name}.keras", files / f"{name}.pt", like_b=name)
    assert found.within
    assert found.models is not None
    assert found.models.exact
    assert len(found.models.layers) >= 2
    assert all(each.within for each in found.models.layers)
