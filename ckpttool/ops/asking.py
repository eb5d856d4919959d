"""What is told of a file that asks for more than plain data: its sentence, its notes, its JSON object."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ckpttool.errors import some
from ckpttool.shown import clean
from ckpttool.wire import asked
from ckpttool.wire.asked import Asked, By

PLAIN = "loading gives plain data"
_LINES = 20
_NAMED = 3
# What a person would load such a file with, by who would act.
_WHY: dict[By, str] = {
    "pickle": "pickle.load runs it, torch.load(weights_only=True) refuses it",
    "keras": "Keras refuses it in safe_mode",
    "torchscript": "torch.jit.load compiles it",
    "tensorflow": "TensorFlow runs it with the model",
}


def notes(asks: Iterable[Asked]) -> tuple[str, ...]:
    """Return a line for each name that unpickling would call or could have called; beyond twenty a count."""
    acting = [each for each in asked.of(asks, asked.CODE) if each.by == "pickle"]
    lines = [_note(each) for each in acting[:_LINES]]
    if len(acting) > _LINES:
        lines.append(f"unpickling this file would call {len(acting) - _LINES:,} more; --json names them")
    return tuple(lines)


def _note(each: Asked) -> str:
    if each.calls:
        return f"unpickling this file would call {each.name}; nothing was run, and it is listed as a record"
    return f"unpickling this file would import {each.name}, which can act; nothing was run"


def document(asks: Iterable[Asked]) -> dict[str, Any]:
    """Return the JSON object: the worst verdict, and every name with its own."""
    found = list(asks)
    return {"verdict": asked.verdict(found), "names": [each.document() for each in found]}


def sentence(asks: Sequence[Asked]) -> str:
    """Return what loading the file comes to; nothing where it asks for nothing."""
    if not asks:
        return ""
    worst = asked.verdict(asks)
    if worst == asked.PLAIN:
        return PLAIN
    found = asked.of(asks, worst)
    names = some([clean(each.name) for each in found], _NAMED)
    if worst == asked.CLASSES and found[0].by == "pickle":
        why = "pickle.load imports them, torch.load(weights_only=True) refuses them"
        return f"loading needs classes: {names} ({why})"
    why = _WHY[found[0].by] if worst == asked.CODE else "Keras loads them where they are registered"
    return f"loading {worst}: {names} ({why})"


def table(asks: Sequence[Asked]) -> list[str]:
    """Return a line for each name, the worst first: verdict, calls, name, and where it stands."""
    order = [each for verdict in (asked.CODE, asked.CLASSES, asked.PLAIN) for each in asked.of(asks, verdict)]
    width = max((len(f"{each.calls:,}") for each in order), default=0)
    return [f"{each.verdict:<14}  {_calls(each, width)}  {clean(each.name)}{_where(each)}" for each in order]


def _calls(each: Asked, width: int) -> str:
    return f"called {each.calls:>{width},}" if each.calls else f"{'named':<{width + 7}}"


def _where(each: Asked) -> str:
    said = [] if each.offset is None else [f"at byte {each.offset:,}"]
    said += [f"in {clean(each.where)}"] if each.where else []
    return f"  ({', '.join(said)})" if said else ""
