"""A sample of the grid of layers; `python -m tests.layer_grid` runs all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import layer_grid, tensorflow_child

# One of every kind whose class, bias or settings decide what becomes of it.
SAMPLE = (
    "dense 5x5 bias=False",
    "padded embedding",
    "conv2d 4>6 groups=2 bias=True",
    "conv1d transposed 3>5 bias=True",
    "depthwise2d 3 x2 bias=False",
    "grouped conv2d transposed",
    "batch norm without statistics",
    "layer norm over images",
    "layer norm that does not centre",
    "rms norm over a square",
    "prelu of one",
    "GRU both ways bias=True",
    "GRU that resets before",
    "attention heads=2 bias=True",
    "old weight norm",
    "turned einsum dense",
    "lora dense",
    "own wide [in, out] layer",
    "own square [in, out] layer",
    "own square [out, in] kernel",
    "own gamma and beta",
)


@pytest.mark.torch
@pytest.mark.tensorflow
def test_layers_give_equal_outputs_or_are_refused(tmp_path: Path) -> None:
    tensorflow_child.require("torch", "tensorflow", "keras")
    wrong, cells, equal = layer_grid.faults(SAMPLE, tmp_path)
    assert not wrong
    assert cells > 5 * len(SAMPLE)
    assert equal > 3 * len(SAMPLE)
