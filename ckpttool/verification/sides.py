"""The two sides of a verification: two agents, or two models that run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace

from ckpttool.core import sidecar
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntry
from ckpttool.evaluation.restore import Agent, read_verified_sidecar, restore_agent
from ckpttool.libraries.schema import NO_LAYOUT
from ckpttool.networks.worker import as_model_spec
from ckpttool.verification.options import VerificationOptions
from ckpttool.verification.two_models import ModelSide


def model_sides(first: str, second: str, options: VerificationOptions) -> tuple[ModelSide, ModelSide]:
    """Return both sides, each with its factory and its interpreter; nothing is opened yet."""
    likes = [None if spec is None else as_model_spec(spec) for spec in (options.like_a, options.like_b)]
    pythons = [python or options.python or sys.executable for python in (options.python_a, options.python_b)]
    return ModelSide("A", first, likes[0], pythons[0]), ModelSide("B", second, likes[1], pythons[1])


def are_models(sides: tuple[ModelSide, ModelSide], *, train: bool, stated: bool) -> bool:
    """Return whether a side is a model that runs, and a side is no recognised agent.

    With `stated` facts, agents are compared as agents.

    Two models that run are compared as such if the policy is not all that they compute, or if a fact of it
    would not come from its file; an actor alone, e.g. a chain of dense layers, is trained as such.
    """
    run = [side.own_kind is not None for side in sides]
    if all(run) and any(_has_other_outputs(side) or (not stated and _is_partly_read(side)) for side in sides):
        return True
    parts = [() if side.agent is None else side.agent.parts for side in sides]
    actors = all(part.component.startswith("actor") for binding_parts in parts for part in binding_parts)
    return any(run) and (not all(parts) or (train and all(run) and actors))


def _has_other_outputs(side: ModelSide) -> bool:
    """Return whether the agent of a side omits outputs or layers of the model."""
    return side.agent is not None and any(" left out: " in note for note in side.agent.moves.notes)


def _is_partly_read(side: ModelSide) -> bool:
    """Return whether the activations or the action map of a policy alone are not read from its file."""
    if side.agent is None or side.agent.layout != NO_LAYOUT:
        return False
    facts = side.agent.facts
    read = {"activations" if name == "hidden" else name for name in facts.origins}
    hidden = any(sum(layer.kind == "dense" for layer in part.layers) > 1 for part in side.agent.parts)
    return bool(facts.stated) or "head" not in read or (hidden and "activations" not in read)


def restore_side(
    sides: tuple[ModelSide, ModelSide], index: int, layout: str | None, options: VerificationOptions
) -> Agent:
    """Return a side as an agent; raise UsageError for weights that only the user's code can use."""
    side = sides[index]
    try:
        return restore_agent(side.checkpoint, layout, options.facts)
    except (UnsupportedError, UsageError) as error:
        own = read_verified_sidecar(side.checkpoint).sidecar
        computed = own is not None and own.computation is not None
        known = side.agent is not None and not computed
        if layout is not None or options.facts or known or side.own_kind is not None:
            raise
        bare = [
            model_side.word.lower()
            for model_side in sides
            if model_side.own_kind is None and (model_side.agent is None or (computed and model_side is side))
        ]
        factories = (word for name in bare for word in (f"--like-{name}", "MODULE:FACTORY"))
        hint = shlex.join(("ckpttool", "verify", *(model_side.path for model_side in sides), *factories))
        if side.agent is not None:
            error.hint = hint
            raise
        raise UsageError(
            f"{side.word} contains weights without the model that uses them, and is no recognised agent",
            file=side.path,
            hint=hint,
        ) from error


def side_entries(side: str, agent: Agent, other: Agent) -> Iterator[LedgerEntry]:
    """Yield one side's ledger entries; those equal on both sides belong to neither."""
    stated = {entry.what for entry in other.ledger if entry.use == "used"}
    for entry in agent.ledger:
        if entry in (sidecar.NO_ACTIVATIONS, sidecar.NO_ACTION_MAP) and entry.what in stated:
            # Both networks were built with the fact that the other side states.
            entry = replace(entry, use="assumed", origin=f"{side} records none, the other side's is used")
        yield entry if entry in other.ledger else replace(entry, where=f"{side}: {entry.where}".rstrip(": "))
