"""Rules as text: what reports and receipts call them, read back as the rules that they were."""

from __future__ import annotations

import re
from collections.abc import Callable

from ckpttool import dtypes
from ckpttool.mapping.parts import Blocks, Channels, Into, Take
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Cast, Permute, Reshape, Rule, chained

_NUMBERS = r"(\d{1,18}(?:,\d{1,18})*)"
_SIZES = r"(\d{1,18}(?:, ?\d{1,18})*)"
_PLACE = r"(\d{1,18}):(\d{1,18}) of (\d{1,18}) on axis (\d{1,2})"
# Between two rules of a chain; a shape has its commas in brackets.
_NEXT = re.compile(r", (?![^\[]*\])")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


_SPELLINGS: tuple[tuple[str, Callable[..., Rule | None]], ...] = (
    ("keep", lambda: KEEP),
    ("transpose", lambda: TRANSPOSE),
    (f"permute {_NUMBERS}", lambda axes: _permute(_numbers(axes))),
    (rf"reshape \[(?:{_SIZES})?\]", lambda shape: Reshape(_numbers(shape or ""))),
    (f"take {_PLACE}", lambda start, stop, whole, axis: Take(int(axis), int(start), int(stop), int(whole))),
    (f"into {_PLACE}", lambda start, stop, whole, axis: Into(int(axis), int(start), int(stop), int(whole))),
    (f"blocks {_NUMBERS} on axis (\\d{{1,2}})", lambda order, axis: _blocks(_numbers(order), int(axis))),
    (
        r"channels (first|last) (\d{1,9}x\d{1,9}(?:,\d{1,9}x\d{1,9})*) on axis (\d{1,2})",
        lambda to, parts, axis: Channels(int(axis), to, _parts(parts)),
    ),
    (r"cast to (\w+)", lambda dtype: Cast(dtype) if dtype in dtypes.BY_NAME else None),
)


def parsed(text: str) -> Rule | None:
    """Return the rule that has this name, None for text that names none or does not say all of it."""
    steps = [_step(step) for step in _NEXT.split(text)]
    known = [step for step in steps if step is not None]
    return chained(*known) if len(known) == len(steps) else None


def _step(text: str) -> Rule | None:
    for pattern, made in _SPELLINGS:
        found = re.fullmatch(pattern, text, re.ASCII)
        if found is not None:
            return made(*found.groups())
    return None


def _parts(text: str) -> tuple[tuple[int, int], ...]:
    pairs = (part.split("x") for part in text.split(","))
    return tuple((int(places), int(channels)) for places, channels in pairs)


def _permute(axes: tuple[int, ...]) -> Rule | None:
    return Permute(axes) if sorted(axes) == list(range(len(axes))) else None


def _blocks(order: tuple[int, ...], axis: int) -> Rule | None:
    return Blocks(axis, order) if sorted(order) == list(range(len(order))) else None
