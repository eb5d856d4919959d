"""Findings of `doctor` and `check`: a problem of a checkpoint, and its fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass
from ckpttool.core.urls import base_name, format_command, unused_name

Topic = Literal["loading", "numbers", "optimizer", "agent", "environment", "layout", "model"]


# Entries whose names mark them as networks, besides those of the canonical agent.
_MODELS = ("policy", "model", "state_dict", "model_state_dict")


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem; `fix` is a command or advice, None if there is no known fix."""

    topic: Topic
    sentence: str
    fix: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"topic": self.topic, "sentence": self.sentence, "fix": self.fix}


def data_only_command(path: str) -> str:
    """Return the command that keeps a checkpoint's data when loading it does more than return data."""
    target = unused_name(f"{base_name(path) or 'checkpoint'}.npz")
    return format_command("convert", path, target, "--allow-missing")


def unjudged_findings(sentences: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each part that may contain code and cannot be judged."""
    for sentence in sentences:
        yield Finding("loading", f"cannot determine whether loading runs code: {sentence}")


def weightless_findings(checkpoint: Checkpoint, *, values: bool) -> Iterator[Finding]:
    """Yield a finding for a checkpoint without weights, and for each network without weights.

    Without `values`, a file of plain values is not reported: many programs store settings in one.
    """
    tree = checkpoint.tree
    fix = f"run {format_command('inspect', checkpoint.path)} to list its contents"
    if not any(leaf.size for _, leaf in tree.tensors()):
        if values or not any(True for _ in tree.plain()):
            yield Finding("model", "the checkpoint contains no weights", fix)
        return
    from ckpttool.libraries.schema import NETWORKS, VALUES

    filled = {path[:1] for path in tree}
    named = {*NETWORKS, *VALUES, *_MODELS}
    for path in tree.containers:
        if len(path) == 1 and path not in filled and str(path[0].value) in named:
            yield Finding("model", f"{path[0].value} contains no weights", fix)
