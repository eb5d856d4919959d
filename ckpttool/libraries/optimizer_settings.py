"""Optimizer settings of a sidecar, and where their epsilon is added."""

from __future__ import annotations

from typing import cast

from ckpttool.core import plugins
from ckpttool.core.errors import UsageError
from ckpttool.core.sidecar import Sidecar
from ckpttool.libraries.schema import JOINT, OPTIMIZED
from ckpttool.mapping.rules import Settings

# Adam's epsilon is added to the root of the bias-corrected second moment (torch/optim/adam.py), or to that of
# the moment as it is (keras/src/optimizers/adam.py, tensorflow/python/training/adam.py).
CORRECTED, UNCORRECTED = "corrected", "uncorrected"


def sidecar_settings(known: Sidecar | None) -> Settings:
    """Return a sidecar's optimizer settings, by optimizer and setting."""
    if known is None:
        return {}
    epsilon = {"epsilon": known.epsilon["adam"]} if known.epsilon and "adam" in known.epsilon else {}
    stated = known.optimizers or {}
    return {name: {**epsilon, **stated.get(name, {})} for name in (*OPTIMIZED, JOINT, *stated)}


def epsilon_placement(known: Sidecar | None, layout: str | None) -> str:
    """Return where the program that trained the agent adds Adam's epsilon.

    A conversion copies the number without changing its meaning: the receipt records where it is added
    (`source.epsilon`); without it, the receipt names the source's layout.
    """
    origin = known.source if known is not None and known.source is not None else {}
    if origin.get("epsilon") in (CORRECTED, UNCORRECTED):
        return cast(str, origin["epsilon"])
    try:
        framework = layout_framework(str(origin.get("layout") or layout))
    except UsageError:
        return UNCORRECTED  # a receipt may name a layout that is not installed here
    return CORRECTED if framework == "torch" else UNCORRECTED


def layout_framework(layout: str) -> str:
    """Return the framework of the programs that use the layout."""
    return cast(str, plugins.find("layouts", layout).load().TABLE.framework)
