"""What `doctor` says of a model beside a checkpoint: variables that no restore would fill, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool import live, plugins
from ckpttool.agents.skeleton.beside import Like
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UsageError, some
from ckpttool.leaf import display
from ckpttool.live import kinds
from ckpttool.ops import part as parts
from ckpttool.ops.findings import Finding
from ckpttool.ops.live_model import LiveModel
from ckpttool.ops.load_into import Meeting, meeting
from ckpttool.shown import count

_SHOWN = 4


def of_model(checkpoint: Checkpoint, model: Any, part: str | None, notes: list[str]) -> Iterator[Finding]:
    """Give what keeps the checkpoint, or its `part`, from filling a live model or the one that a Like names.

    Of a live one also what its own framework's restore, which goes by names, would leave as it is, and what
    saving it would leave out.
    """
    target = model if isinstance(model, Like) else LiveModel(model)
    met = meeting(target, checkpoint, part=part)
    yield from _open(met)
    if met.report.unused:
        unused = some(met.report.unused, _SHOWN)
        many = count(len(met.report.unused), "entry", "entries")
        notes.append(f"{met.model} has no place for {many}: {unused}")
    if isinstance(target, LiveModel):
        yield from _restored(checkpoint, target, part, met)


def _open(met: Meeting) -> Iterator[Finding]:
    names = [met.skeleton.names[path] for path in met.filling.unfilled]
    if names:
        many = count(len(names), "tensor")
        yield Finding("model", f"nothing fills {many} of {met.model}: {some(names, _SHOWN)}")
    for misfit in met.filling.misfits[:_SHOWN]:
        yield Finding("model", f"{misfit.error.message} (expected {misfit.expected}, found {misfit.found})")
    for group in met.filling.ambiguous[:_SHOWN]:
        could = f"{some(group.sources, _SHOWN)} could fill {some(group.targets, _SHOWN)}"
        yield Finding("model", could, "match={SOURCE: TARGET} in load_into says which fills which")


def _restored(checkpoint: Checkpoint, target: LiveModel, part: str | None, met: Meeting) -> Iterator[Finding]:
    """Give what the framework's own save and restore would leave out.

    Keras on another backend saves whole models only, which have what they have.
    """
    if target.framework != "torch" and not kinds.is_trackable(target.model):
        return
    tree = checkpoint.tree
    if part is not None:
        try:
            tree = parts.below(tree, part)[0]
        except UsageError:  # a network of the agent, which no restore knows by that name
            return
    owner = "torch" if target.framework == "torch" else "tensorflow"
    foreign = owner != plugins.find("formats", checkpoint.format).load().FRAMEWORK
    found = live.audit(target.model, None if foreign else tree)
    for row in found.unsaved[:_SHOWN]:
        yield Finding("model", f"saving {met.model} would leave out {display(row.path)}: {row.reason}")
    for path, reason in list(found.refused.items())[:_SHOWN]:
        yield Finding("model", f"{display(path)} cannot be saved: {reason}")
    left = [display(path) for path in found.unfilled]
    if left and not met.filling.unfilled:
        as_is = count(len(left), "variable as it is", "variables as they are")
        sentence = f"restoring by name would leave {as_is}: {some(left, _SHOWN)}"
        yield Finding("model", sentence, "ckpttool.load_into(model, path) fills all of them")
