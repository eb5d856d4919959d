"""Compares what we list of a Keras file with what Keras says of the model that it saved there."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.core import Checkpoint, Leaf, display

# What a Keras 3 optimizer calls its slots, by our kind.
WORDS = {
    "m": ("momentum",),
    "v": ("velocity",),
    "vhat": ("velocity_hat",),
    "u": ("norm",),
    "rms": ("velocity",),
    "momentum": ("momentum",),
    "mg": ("average_gradient",),
    "accumulator": ("accumulator",),
    "linear": ("linear",),
    "accumulated_grad": ("accumulated_grad",),
    "accumulated_delta": ("accumulated_delta_var",),
    "average": ("average",),
}


def sha256(leaf: Leaf) -> str:
    return hashlib.sha256(leaf.read()).hexdigest()


def weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the model's own leaves: display path to digest."""
    return {
        display(path): sha256(leaf)
        for path, leaf in checkpoint.tree.tensors()
        if leaf.role in ("parameter", "buffer") and path[0].value != "metrics"
    }


def assert_variables(checkpoint: Checkpoint, facts: Mapping[str, Any], *, named: bool = True) -> None:
    """Every variable is there once, with its value, its own name, and what is known of its training."""
    stored = {sha256(leaf): (path, leaf) for path, leaf in checkpoint.tree.tensors() if leaf.role in MODEL}
    assert len(stored) == sum(leaf.role in MODEL for _, leaf in checkpoint.tree.tensors())
    variables = {v["sha256"]: v for v in facts["variables"]}
    assert stored.keys() == variables.keys()
    for digest, variable in variables.items():
        path, leaf = stored[digest]
        assert (leaf.dtype, list(leaf.shape)) == (variable["dtype"], variable["shape"])
        if named:
            assert display(path[-1:]) == variable["path"].rpartition("/")[2], display(path)
        if leaf.trainable is not None:
            assert leaf.trainable == variable["trainable"], display(path)


MODEL = ("parameter", "buffer")


def assert_slots(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> int:
    """Every slot that says whose it is says the truth; return how many do."""
    owners: dict[str, Sequence[str]] = {}
    for variable in facts["optimizer"]:
        owners[variable["sha256"]] = (*owners.get(variable["sha256"], ()), variable["path"])
    names = {v["sha256"]: v["path"] for v in facts["variables"]}
    known = 0
    for path, leaf in checkpoint.tree.tensors():
        if leaf.role != "slot":
            continue
        result = owners[sha256(leaf)]
        if leaf.of is None:
            continue
        known += 1
        owner = checkpoint.tree[leaf.of]
        assert isinstance(owner, Leaf)
        stem = names[sha256(owner)].replace("/", "_")
        assert leaf.slot is not None
        expected = {f"{stem}_{word}" for word in WORDS[leaf.slot]}
        assert any(one.partition("/")[2] in expected for one in result), (display(path), result)
    return known
