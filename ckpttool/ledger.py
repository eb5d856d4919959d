"""The ledger of an agent: what could change its numbers, and whether it was used.

Every command that restores an agent builds one list of entries while it does so, prints it in the same words
and puts it into its JSON document under `ledger`. Layouts add entries to `Binding.ledger`; what no layout
reads is found by ops/evidence.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

Use = Literal["used", "assumed", "not used", "cannot be known"]
Topic = Literal[
    "observation statistics",
    "reward statistics",
    "action bounds",
    "action map",
    "activation",
    "distribution",
    "architecture",
    "wrapper",
    "custom code",
    "environment",
    "weights",
    "averaged weights",
    "low-rank weights",
    "quantisation scales",
    "running statistics",
    "optimizer",
    "setting",
]


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that could change what an agent computes.

    Args:
        use: whether it is part of what is played, exported or written.
        what: the kind of thing.
        value: what it is, in a few words ("hidden activations relu", "mean and variance of 17 values").
        where: path in the checkpoint, or name of the file beside it, that holds it; empty if none does.
        origin: who states it where no file does: "default of layout fujimoto", "given", an action space.
        decides: whether leaving it out certainly changes the numbers; the exit status is 1 then.
        hint: what to do about it.

    """

    use: Use
    what: Topic
    value: str
    where: str = ""
    origin: str = ""
    decides: bool = False
    hint: str | None = None

    @property
    def sentence(self) -> str:
        """What people read of it, without the label."""
        if self.use in ("assumed", "cannot be known"):
            return f"{self.value}: {self.origin}" if self.origin else self.value
        return f"{self.what} {self.value}" + (f" ({self.source})" if self.source else "")

    @property
    def source(self) -> str:
        """Where it is from: the file, and what that file claims of its origin."""
        return ": ".join(filter(None, (self.where, self.origin)))

    @property
    def open(self) -> bool:
        """Whether the numbers are certainly others than those of the trained agent."""
        return self.decides and self.use in ("not used", "cannot be known")

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return dataclasses.asdict(self)


Entries = tuple[Entry, ...]


def unknown(what: Topic, value: str, *, decides: bool = False, hint: str | None = None) -> Entry:
    """Return the entry of a fact that no file holds; one that `decides` was certainly part of training."""
    return Entry("cannot be known", what, value, decides=decides, hint=hint)


# Facts that no file of several libraries holds. An environment or the command line gives the bounds.
NO_BOUNDS = unknown("action bounds", "the action bounds")
NO_ENVIRONMENT = unknown("environment", "the environment")
# What the users of a library choose: its default is one of several choices.
NO_ACTIVATIONS = unknown("activation", "the activations", decides=True)
NO_STATISTICS = unknown("observation statistics", "the observation statistics", decides=True)


def assumed(what: Topic, sentences: Iterable[str]) -> Entries:
    """Return an entry for each assumption that is stated as a whole sentence."""
    return tuple(Entry("assumed", what, sentence) for sentence in sentences)


def assumptions(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the sentences of what was assumed."""
    return tuple(dict.fromkeys(entry.sentence for entry in entries if entry.use == "assumed"))


def merged(*lists: Iterable[Entry]) -> Entries:
    """Return all entries in their order, each once."""
    return tuple(dict.fromkeys(entry for entries in lists for entry in entries))


def settled(entries: Iterable[Entry]) -> Entries:
    """Return the entries without unknown action bounds, where those of an environment are used."""
    entries = tuple(entries)
    given = any(entry.what == "action bounds" and entry.use in ("used", "assumed") for entry in entries)
    return tuple(entry for entry in entries if not (given and entry == NO_BOUNDS))


def decides(entries: Iterable[Entry]) -> bool:
    """Return whether something that certainly changes the numbers is not used."""
    return any(entry.open for entry in entries)


def documents(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the JSON array."""
    return [entry.document() for entry in entries]


def read(found: Iterable[Mapping[str, Any]]) -> Entries:
    """Return the entries of a JSON array that `documents` made."""
    names = [field.name for field in dataclasses.fields(Entry)]
    return tuple(Entry(**{name: cast(Any, each)[name] for name in names}) for each in found)


def lines(entries: Iterable[Entry]) -> list[str]:
    """Return what people read: all that was used in one line, then a labelled line for each other entry.

    Assumptions are not among them: commands print those with their other assumptions.
    """
    entries = tuple(entries)
    sources: dict[str, dict[str, None]] = {}
    for entry in entries:
        if entry.use == "used":
            sources.setdefault(entry.source, {})[f"{entry.what} {entry.value}"] = None
    used = [", ".join(facts) + (f" ({source})" if source else "") for source, facts in sources.items()]
    found = [f"used: {'; '.join(used)}"] if used else []
    for use in ("not used", "cannot be known"):
        found += dict.fromkeys(f"{use}: {entry.sentence}" for entry in entries if entry.use == use)
    return found
