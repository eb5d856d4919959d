"""What `doctor` and `check` find: one thing that is wrong with a checkpoint, and what mends it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ckpttool import urls
from ckpttool.checkpoint import Checkpoint
from ckpttool.layouts.canonical import NETWORKS, VALUES

Topic = Literal["loading", "numbers", "optimizer", "agent", "environment", "layout", "model"]


# Entries of a file that are networks by their names.
_NETWORKS = frozenset((*NETWORKS, *VALUES, "policy", "model", "state_dict", "model_state_dict"))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong; `fix` is a command or what else helps, None where nothing is known to."""

    topic: Topic
    sentence: str
    fix: str | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"topic": self.topic, "sentence": self.sentence, "fix": self.fix}


def command(verb: str, path: str, *words: str) -> str:
    """Return what a person types about a checkpoint: a shell takes its name as one word, whatever it is."""
    return shlex.join(("ckpttool", verb, urls.spelled(path), *words))


def data_alone(path: str) -> str:
    """Return the command that keeps the data of a checkpoint whose loading does more than give data."""
    return command("convert", path, "safe.npz", "--allow-missing")


def unjudged(sentences: Iterable[str]) -> Iterator[Finding]:
    """Give a finding for each part of a checkpoint that may hold code and cannot be judged."""
    for sentence in sentences:
        yield Finding("loading", f"whether loading runs code cannot be judged: {sentence}")


def weightless(checkpoint: Checkpoint, *, values: bool) -> Iterator[Finding]:
    """Give a finding for a checkpoint without weights, and for each network of one that has none.

    Without `values`, a file of plain values is none: many programs keep their settings in one.
    """
    tree = checkpoint.tree
    fix = f"{command('inspect', checkpoint.path)} shows what it holds"
    if not any(leaf.size for _, leaf in tree.tensors()):
        if values or not any(True for _ in tree.plain()):
            yield Finding("model", "the checkpoint holds no weights", fix)
        return
    held = {path[:1] for path in tree}
    for path in tree.containers:
        if len(path) == 1 and path not in held and str(path[0].value) in _NETWORKS:
            yield Finding("model", f"{path[0].value} holds no weights", fix)
