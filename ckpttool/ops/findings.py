"""What `doctor` and `check` find: one thing that is wrong with a checkpoint, and what mends it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ckpttool import urls

Topic = Literal["loading", "numbers", "optimizer", "agent", "environment", "layout", "model"]


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
