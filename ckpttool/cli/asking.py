"""What `inspect` prints of what loading a file would import, call or run."""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.cli.columns import wrapped
from ckpttool.cli.output import clean
from ckpttool.errors import some
from ckpttool.wire import asked
from ckpttool.wire.asked import Asked, By

_NAMED = 3
# What a person would load such a file with, by who would act.
_WHY: dict[By, str] = {
    "pickle": "pickle.load runs it, torch.load(weights_only=True) refuses it",
    "keras": "Keras refuses it in safe_mode",
    "torchscript": "torch.jit.load compiles it",
    "tensorflow": "TensorFlow runs it with the model",
}


def line(asks: Sequence[Asked]) -> list[str]:
    """Return the line that says what loading the file comes to; none where it asks for nothing."""
    if not asks:
        return []
    worst = asked.verdict(asks)
    if worst == asked.PLAIN:
        return ["loading gives plain data"]
    found = asked.of(asks, worst)
    names = some([clean(each.name) for each in found], _NAMED)
    if worst == asked.CLASSES and found[0].by == "pickle":
        why = "pickle.load imports them, torch.load(weights_only=True) refuses them"
        return [wrapped(f"loading needs classes: {names} ({why})")]
    why = _WHY[found[0].by] if worst == asked.CODE else "Keras loads them where they are registered"
    return [wrapped(f"loading {worst}: {names} ({why})")]


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
