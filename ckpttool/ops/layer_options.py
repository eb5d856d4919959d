"""What the command line says of layers: `--kind PATTERN=KIND`, `--flatten` and `--unflatten PATTERN=H,W,C`.

Where a vector stands beside an image, parts are joined by `+`: `--flatten 'dense=7,7,64+5'`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod

from ckpttool.activations import NO_IMAGE, Order
from ckpttool.errors import UsageError, choice
from ckpttool.globs import matcher
from ckpttool.mapping.kinds import KINDS, Told
from ckpttool.mapping.layers import Choice

_SHAPE = re.compile(r"[1-9]\d{0,8}(?:,[1-9]\d{0,8})+", re.ASCII)
_PARTS = re.compile(r"[1-9]\d{0,8}(?:[,+][1-9]\d{0,8})*", re.ASCII)
_KIND = re.compile(r"(?P<name>\w+)(?::(?P<number>\d{1,9}))?", re.ASCII)
_NO = "no"


def choices(
    kinds: Sequence[str], flatten: Sequence[str], unflatten: Sequence[str] = ()
) -> tuple[Choice, ...]:
    """Return what was said of layers; raise UsageError for what makes no sense."""
    return (*_kinds(kinds), *_flattened(flatten), *_unflattened(unflatten))


def texts(given: Sequence[Choice]) -> tuple[list[str], list[str], list[str]]:
    """Return the values of --kind, --flatten and --unflatten that give these choices."""
    kinds, flatten, unflatten = [], [], []
    for choice_ in given:
        told = choice_.told
        if choice_.kind is not None:
            number = "" if told.number is None else f":{told.number}"
            kinds.append(f"{choice_.pattern}={choice_.kind}{number}")
        elif told.flatten is not None:
            flatten.append(f"{choice_.pattern}={','.join(map(str, told.flatten)) or _NO}")
        elif told.takes is not None:
            flatten.append(f"{choice_.pattern}={_spelled(told.takes)}")
        elif told.makes is not None:
            unflatten.append(f"{choice_.pattern}={_spelled(told.makes)}")
    return kinds, flatten, unflatten


def _spelled(order: Order) -> str:
    """Return the shape that `_order` reads as this order."""
    parts = (f"{places},{channels}" if places > 1 else str(channels) for places, channels in order.parts)
    return _NO if order == NO_IMAGE else "+".join(parts)


def _kinds(said: Sequence[str]) -> Iterator[Choice]:
    known = list(dict.fromkeys(kind.option for kind in KINDS if kind.refused is None))
    for text in said:
        pattern, wanted = _halves(text, "--kind", "PATTERN=KIND")
        match = _KIND.fullmatch(wanted)
        if match is None or match["name"] not in known:
            raise UsageError(f"{wanted} is no kind of layer", hint=choice(wanted, known))
        number = int(match["number"]) if match["number"] else None
        yield Choice(pattern, matcher(pattern), match["name"], Told(number))


def _flattened(said: Sequence[str]) -> Iterator[Choice]:
    for text in said:
        pattern, wanted = _halves(text, "--flatten", "PATTERN=H,W,C")
        if wanted == _NO or _SHAPE.fullmatch(wanted):
            shape = () if wanted == _NO else tuple(int(extent) for extent in wanted.split(","))
            yield Choice(pattern, matcher(pattern), None, Told(flatten=shape))
        else:
            yield Choice(pattern, matcher(pattern), None, Told(takes=_order(wanted, "--flatten")))


def _unflattened(said: Sequence[str]) -> Iterator[Choice]:
    for text in said:
        pattern, wanted = _halves(text, "--unflatten", "PATTERN=H,W,C")
        order = NO_IMAGE if wanted == _NO else _order(wanted, "--unflatten")
        yield Choice(pattern, matcher(pattern), None, Told(makes=order))


def _order(wanted: str, option: str) -> Order:
    """Return the parts of a shape such as `7,7,64+5`, whose order is the source's own."""
    if not _PARTS.fullmatch(wanted):
        raise UsageError(
            f"{wanted} is no shape of an image",
            hint=f"{option} 'dense=7,7,64', or 'dense=no' if it is none",
        )
    shapes = [tuple(int(extent) for extent in part.split(",")) for part in wanted.split("+")]
    return Order(tuple((prod(shape[:-1]), shape[-1]) for shape in shapes), ())


def _halves(text: str, option: str, form: str) -> tuple[str, str]:
    pattern, sign, wanted = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(f"{option} takes {form}, not {text}")
    return pattern, wanted
