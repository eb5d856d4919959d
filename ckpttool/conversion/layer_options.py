"""Layer options of the command line: `--kind PATTERN=KIND`, `--flatten` and `--unflatten PATTERN=H,W,C`.

For a vector beside an image, parts are joined by `+`: `--flatten 'dense=7,7,64+5'`. `--flatten
'fc=parts:2,1'` states that the source's layer takes first the second of the parts that the model joins; with
`--unflatten`, that it makes them in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from ckpttool.core import deferred
from ckpttool.core.errors import UsageError, suggest_choice
from ckpttool.core.text import compile_glob
from ckpttool.mapping.kind_table import KINDS
from ckpttool.mapping.layer_kinds import LayerFacts, LayerOption

if TYPE_CHECKING:
    from ckpttool.core.activations import AxisOrder


_SHAPE = deferred.compile(r"[1-9]\d{0,8}(?:,[1-9]\d{0,8})+", re.ASCII)
_PARTS = deferred.compile(r"[1-9]\d{0,8}(?:[,+][1-9]\d{0,8})*", re.ASCII)
_KIND = deferred.compile(r"(?P<name>\w+)(?::(?P<number>\d{1,9}))?", re.ASCII)
PART_ORDER = deferred.compile(r"parts:(?P<numbers>[1-9](?:,[1-9])+)", re.ASCII)
_NO = "no"
_SIDES = {"--flatten": "takes", "--unflatten": "makes"}


def parse_layer_options(
    kinds: Sequence[str], flatten: Sequence[str], unflatten: Sequence[str] = ()
) -> tuple[LayerOption, ...]:
    """Return the parsed layer options; raise UsageError for invalid ones."""
    shapes = (*_parse_shapes(flatten, "--flatten"), *_parse_shapes(unflatten, "--unflatten"))
    return (*_parse_kinds(kinds), *shapes)


def format_layer_options(options: Sequence[LayerOption]) -> tuple[list[str], list[str], list[str]]:
    """Return the values of --kind, --flatten and --unflatten that express these choices."""
    kinds, flatten, unflatten = [], [], []
    for choice_ in options:
        facts = choice_.facts
        if choice_.kind is not None:
            number = "" if facts.number is None else f":{facts.number}"
            kinds.append(f"{choice_.pattern}={choice_.kind}{number}")
        elif facts.flatten is not None:
            flatten.append(f"{choice_.pattern}={','.join(map(str, facts.flatten)) or _NO}")
        elif facts.takes is not None:
            flatten.append(f"{choice_.pattern}={_format_order(facts.takes)}")
        elif facts.makes is not None:
            unflatten.append(f"{choice_.pattern}={_format_order(facts.makes)}")
        for side, texts in (("takes", flatten), ("makes", unflatten)):
            if side in facts.part_orders:
                from ckpttool.mapping.feature_orders import format_part_order

                texts.append(f"{choice_.pattern}={format_part_order(facts.part_orders[side])}")
    return kinds, flatten, unflatten


def describe_layer_options(options: Sequence[LayerOption]) -> Iterator[str]:
    """Yield the note on the options that a call of the source's model stands for."""
    words = ("--kind", "--flatten", "--unflatten")
    texts = [
        f"{word} {value!r}"
        for word, values in zip(words, format_layer_options(options), strict=True)
        for value in values
    ]
    if texts:
        yield f"as a call of the source's model shows: {' '.join(texts)}"


def _format_order(order: AxisOrder) -> str:
    """Return the shape that `_parse_order` parses as this order."""
    from ckpttool.core.activations import NO_IMAGE

    parts = (f"{places},{channels}" if places > 1 else str(channels) for places, channels in order.parts)
    return _NO if order == NO_IMAGE else "+".join(parts)


def _parse_kinds(lines: Sequence[str]) -> Iterator[LayerOption]:
    known = list(dict.fromkeys(kind.option for kind in KINDS if kind.refused is None))
    for text in lines:
        pattern, kind = _split_option(text, "--kind", "PATTERN=KIND")
        match = _KIND.fullmatch(kind)
        if match is None or match["name"] not in known:
            raise UsageError(f"unknown layer kind '{kind}'", hint=suggest_choice(kind, known))
        number = int(match["number"]) if match["number"] else None
        yield LayerOption(pattern, compile_glob(pattern), match["name"], LayerFacts(number))


def _parse_shapes(lines: Sequence[str], option: str) -> Iterator[LayerOption]:
    for text in lines:
        pattern, order = _split_option(text, option, "PATTERN=H,W,C")
        if (parts := PART_ORDER.fullmatch(order)) is not None:
            numbers = tuple(int(number) - 1 for number in parts["numbers"].split(","))
            facts = LayerFacts(part_orders={_SIDES[option]: numbers})
        elif option == "--unflatten":
            from ckpttool.core.activations import NO_IMAGE

            facts = LayerFacts(makes=NO_IMAGE if order == _NO else _parse_order(order, option))
        elif order == _NO or _SHAPE.fullmatch(order):
            shape = () if order == _NO else tuple(int(extent) for extent in order.split(","))
            facts = LayerFacts(flatten=shape)
        else:
            facts = LayerFacts(takes=_parse_order(order, option))
        yield LayerOption(pattern, compile_glob(pattern), None, facts)


def _parse_order(text: str, option: str) -> AxisOrder:
    """Return the parts of a shape like `7,7,64+5`, in the source's own order."""
    if not _PARTS.fullmatch(text):
        raise UsageError(
            f"invalid image shape '{text}'",
            hint=f"use {option} 'PATTERN=H,W,C', or 'PATTERN=no' if it is not an image",
        )
    from ckpttool.core.activations import AxisOrder

    shapes = [tuple(int(extent) for extent in part.split(",")) for part in text.split("+")]
    return AxisOrder(tuple((prod(shape[:-1]), shape[-1]) for shape in shapes), ())


def _split_option(text: str, option: str, form: str) -> tuple[str, str]:
    pattern, sign, value = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(f"invalid {option} '{text}'; use {form}")
    return pattern, value
