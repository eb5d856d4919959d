"""The two sides of a verification: two agents, or two models that run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ckpttool.core import sidecar, urls
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import MappingError, UnsupportedError, UsageError
from ckpttool.core.sidecar import LedgerEntry
from ckpttool.evaluation.restore import Agent, read_verified_sidecar, recognize_playable_agent, restore_agent
from ckpttool.formats import keras_h5, onnx, tf_saved_model, torch_zip
from ckpttool.formats.detect import open_checkpoint
from ckpttool.libraries.schema import NO_LAYOUT, RecognizedAgent
from ckpttool.networks.worker import ModelSpec, as_model_spec
from ckpttool.verification.options import VerificationOptions


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


@dataclass(frozen=True)
class ModelSide:
    """One side of a comparison: its checkpoint, and the user's factory, if one is given.

    `process` runs the model instead of a new process, e.g. the one that holds a model already. `part` is
    the path of the model in its file, `rounded` a type to which its weights are rounded before it runs.
    `opened` is the checkpoint if it is open already.
    """

    word: str
    path: str
    like: ModelSpec | None = None
    python: str = sys.executable
    process: ModelHost | None = None
    part: str | None = None
    rounded: str | None = None
    opened: Checkpoint | None = None

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint, opened at the first use."""
        return self.opened or open_checkpoint(self.path)

    @cached_property
    def own_kind(self) -> str | None:
        """The kind of model that the checkpoint contains with its configuration or program, or None."""
        return find_model_kind(self.checkpoint)

    @cached_property
    def agent(self) -> RecognizedAgent | None:
        """The agent that a layout recognises in the checkpoint."""
        try:
            return recognize_playable_agent(self.checkpoint)
        except (MappingError, UnsupportedError, UsageError):
            return None

    @cached_property
    def kind(self) -> str:
        """How the model runs; raise UsageError for weights without a model."""
        if self.like is not None:
            return "factory"
        model_kind = self.own_kind
        if model_kind is None and self.agent is not None:
            return "agent"
        if model_kind is None:
            raise UsageError(
                f"{self.word} contains weights without the model that uses them",
                file=self.path,
                hint=f"name the code that builds the model: --like-{self.word.lower()} MODULE:FACTORY",
            )
        return model_kind


KINDS = {
    keras_h5.ARCHIVE_NAME: "keras",
    keras_h5.NAME: "keras",
    tf_saved_model.NAME: "saved_model",
    onnx.NAME: "onnx",
}


class ModelHost(Protocol):
    """What answers the requests for a model: a process, or this one."""

    @property
    def folder(self) -> Path:
        """The folder that both sides share."""

    def request(self, do: str, **values: Any) -> Any:
        """Send one request and return its answer."""


def find_model_kind(checkpoint: Checkpoint) -> str | None:
    """Return the kind of model that a local file contains with its configuration or program, or None."""
    if urls.is_url(checkpoint.path):
        return None
    if checkpoint.format == torch_zip.NAME:
        script = any(reference.by == "torchscript" for reference in checkpoint.code_references)
        return "torchscript" if script and os.path.isfile(checkpoint.path) else None
    if checkpoint.format == keras_h5.NAME:
        # Weights without the model's configuration do not run, and Keras goes by the suffix.
        whole = checkpoint.details.get("model") is not None
        return "keras" if whole and checkpoint.path.endswith((".h5", ".hdf5", ".keras")) else None
    return KINDS.get(checkpoint.format)
