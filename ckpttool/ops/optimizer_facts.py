"""What a sidecar tells of an agent's optimizers, and where their epsilon stands."""

from __future__ import annotations

from typing import cast

from ckpttool import plugins
from ckpttool.errors import UsageError
from ckpttool.layouts.canonical import JOINT, OPTIMIZED
from ckpttool.mapping.plan import Settings
from ckpttool.sidecar import Sidecar

# Adam's epsilon is added to the root of the bias-corrected second moment (torch/optim/adam.py), or to that of
# the moment as it is (keras/src/optimizers/adam.py, tensorflow/python/training/adam.py).
CORRECTED, UNCORRECTED = "corrected", "uncorrected"


def settings(known: Sidecar | None) -> Settings:
    """Return what a sidecar says of the optimizers, by optimizer and setting."""
    if known is None:
        return {}
    epsilon = {"epsilon": known.epsilon["adam"]} if known.epsilon and "adam" in known.epsilon else {}
    stated = known.optimizers or {}
    return {name: {**epsilon, **stated.get(name, {})} for name in (*OPTIMIZED, JOINT, *stated)}


def epsilon(known: Sidecar | None, layout: str | None) -> str:
    """Return where Adam's epsilon stands in the program that trained the agent.

    A conversion copies the number, so it goes on meaning what it meant there: the receipt says so
    (`source.epsilon`), a receipt without it names the source's layout.
    """
    origin = known.source if known is not None and known.source is not None else {}
    if origin.get("epsilon") in (CORRECTED, UNCORRECTED):
        return cast(str, origin["epsilon"])
    return CORRECTED if _framework(str(origin.get("layout") or layout)) == "torch" else UNCORRECTED


def _framework(layout: str) -> str | None:
    """Return whose programs the layout is of; a receipt may name a layout that is not installed here."""
    try:
        return cast(str, plugins.find("layouts", layout).load().TABLE.framework)
    except UsageError:
        return None
