"""The count of updates that `inspect` reads off the powers of beta which TensorFlow 1's Adam keeps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.core import File, Inline, Span
from ckpttool.formats import VariableInfo, tree_by_name
from ckpttool.libraries import optimizers_read
from ckpttool.listing import training_counters
from tests.golden_texts import Golden


def tree(**powers: float):
    """A name-based tree with such scalars in a scope, beside a weight."""
    named = {f"train/{name}": np.float32(value) for name, value in powers.items()}
    scalars = {name: VariableInfo("float32", (), Inline(value.tobytes())) for name, value in named.items()}
    return tree_by_name({"w": VariableInfo("float32", (2,), Inline(bytes(8))), **scalars})


def power(beta: float, steps: int) -> float:
    product = np.float32(beta)
    for _ in range(steps):
        product *= np.float32(beta)
    return float(product)


@pytest.mark.parametrize("betas", optimizers_read.BETAS)
@pytest.mark.parametrize("steps", [0, 1, 137])
def test_the_count_is_said(betas: tuple[float, float], steps: int, golden: Golden) -> None:
    notes = training_counters.update_count_notes(
        tree(beta1_power=power(betas[0], steps), beta2_power=power(betas[1], steps))
    )
    assert len(notes) == 1
    golden(notes[0])


def test_every_optimizer_is_counted_by_itself() -> None:
    powers = {f"beta1_power{n}": power(0.9, 10 + k) for k, n in enumerate(("", "_1"))}
    powers |= {f"beta2_power{n}": power(0.999, 10 + k) for k, n in enumerate(("", "_1"))}
    notes = training_counters.update_count_notes(tree(**powers))
    assert [("10 updates" in note, "11 updates" in note) for note in notes] == [(True, False), (False, True)]


def test_other_numbers_say_nothing() -> None:
    assert training_counters.update_count_notes(tree(beta1_power=0.5, beta2_power=0.7)) == ()
    assert training_counters.update_count_notes(tree(beta1_power=power(0.9, 3))) == ()


def test_a_power_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(bytes(8))
    gone = VariableInfo("float32", (), Span(File.stamp(str(file)), 0, 4))
    file.unlink()
    assert (
        training_counters.update_count_notes(tree_by_name({"beta1_power": gone, "beta2_power": gone})) == ()
    )
