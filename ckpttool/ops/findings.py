"""What `doctor` and `check` find: one thing that is wrong with a checkpoint, and what mends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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
