"""What a file asks of whoever loads it: names to import, functions to call, code; with a verdict on each.

Nothing here is ever imported, called or compiled: the record is made by reading.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

# Plain data is rebuilt here as data, or is a data class of the standard library. Classes are whatever is
# installed under a name outside of the standard library: importing that runs it. Code acts by itself.
Verdict = Literal["plain data", "needs classes", "would run code"]
PLAIN: Verdict = "plain data"
CLASSES: Verdict = "needs classes"
CODE: Verdict = "would run code"
_RANK = {PLAIN: 0, CLASSES: 1, CODE: 2}

# Who would import or run it: an unpickler, Keras, TorchScript's interpreter, TensorFlow's runtime.
By = Literal["pickle", "keras", "torchscript", "tensorflow"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One name that a file asks for.

    `calls` is how often it is called (0: it is only named), `offset` where it stands first, in bytes of the
    file or of the member `where` (None: the file itself, or no bytes of any file).
    """

    name: str
    verdict: Verdict
    calls: int = 0
    offset: int | None = None
    where: str | None = None
    by: By = "pickle"

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "calls": self.calls,
            "offset": self.offset,
            "where": self.where,
            "by": self.by,
        }


def merged(*groups: Iterable[Asked]) -> tuple[Asked, ...]:
    """Return one record for each name of a checkpoint: the worst verdict, and where that was met first."""
    found: dict[str, Asked] = {}
    for group in groups:
        for each in group:
            known = found.get(each.name)
            if known is None:
                found[each.name] = each
                continue
            worse = each if _RANK[each.verdict] > _RANK[known.verdict] else known
            found[each.name] = replace(worse, calls=known.calls + each.calls)
    return tuple(found.values())


def standing(asks: Iterable[Asked], where: str) -> tuple[Asked, ...]:
    """Return the records as those of the member or file `where`, or of what they name within it."""
    return tuple(replace(each, where=f"{where}/{each.where}" if each.where else where) for each in asks)


def verdict(asks: Iterable[Asked]) -> Verdict:
    """Return the worst verdict; that of a file that asks for nothing is plain data."""
    return max((each.verdict for each in asks), key=lambda each: _RANK[each], default=PLAIN)


def of(asks: Iterable[Asked], wanted: Verdict) -> list[Asked]:
    """Return the records of one verdict."""
    return [each for each in asks if each.verdict == wanted]


def called(asks: Iterable[Asked]) -> list[str]:
    """Return the names of what unpickling would call that can act."""
    return [each.name for each in asks if each.verdict == CODE and each.calls and each.by == "pickle"]
