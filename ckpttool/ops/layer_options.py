"""What the command line says of layers: `--kind PATTERN=KIND` and `--flatten PATTERN=H,W,C`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ckpttool.errors import UsageError, choice
from ckpttool.globs import matcher
from ckpttool.mapping.kinds import KINDS, Told
from ckpttool.mapping.layers import Choice

_SHAPE = re.compile(r"\d{1,9}(?:,\d{1,9})+", re.ASCII)
_KIND = re.compile(r"(?P<name>\w+)(?::(?P<number>\d{1,9}))?", re.ASCII)
_NO = "no"


def choices(kinds: Sequence[str], flatten: Sequence[str]) -> tuple[Choice, ...]:
    """Return what was said of layers; raise UsageError for what makes no sense."""
    return (*_kinds(kinds), *_flattened(flatten))


def texts(given: Sequence[Choice]) -> tuple[list[str], list[str]]:
    """Return the values of --kind and --flatten that give these choices."""
    kinds, flatten = [], []
    for choice_ in given:
        told = choice_.told
        if choice_.kind is not None:
            number = "" if told.number is None else f":{told.number}"
            kinds.append(f"{choice_.pattern}={choice_.kind}{number}")
        elif told.flatten is not None:
            flatten.append(f"{choice_.pattern}={','.join(map(str, told.flatten)) or _NO}")
    return kinds, flatten


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
        if wanted != _NO and not _SHAPE.fullmatch(wanted):
            raise UsageError(
                f"{wanted} is no shape of an image",
                hint="--flatten 'dense=7,7,64', or 'dense=no' if it is none",
            )
        shape = () if wanted == _NO else tuple(int(extent) for extent in wanted.split(","))
        yield Choice(pattern, matcher(pattern), None, Told(flatten=shape))


def _halves(text: str, option: str, form: str) -> tuple[str, str]:
    pattern, sign, wanted = text.rpartition("=")
    if not sign or not pattern:
        raise UsageError(f"{option} takes {form}, not {text}")
    return pattern, wanted
