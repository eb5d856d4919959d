"""A user's own rules: a TOML file of patterns with holes (mapping.by_rules applies them).

[[rule]] has `from`, `to` and optionally `rule` (text as reports show it, or a list of such), [[drop]] has
`from`, [[add]] has `to`, `value`, `dtype` and `shape`; `rest` says what becomes of what no rule names. A hole
`{n}` stands for a part of one segment, `{n*}` for any text.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from ckpttool import dtypes
from ckpttool.errors import NotFoundError, UsageError, choice
from ckpttool.leaf import Leaf
from ckpttool.mapping.parts import filled
from ckpttool.mapping.rules import Rule, chained
from ckpttool.mapping.spelling import parsed

_MOST_BYTES = 4 << 20
_MOST_ELEMENTS = 1 << 24
HOLE = re.compile(r"\{([A-Za-z_]\w*)(\*?)\}", re.ASCII)
_TABLES: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "rule": {"from": str, "to": str, "rule": (str, list)},
    "drop": {"from": str},
    "add": {"to": str, "value": (int, float), "dtype": str, "shape": list},
}
_OPTIONAL = frozenset((("rule", "rule"), ("add", "shape")))
Rest = Literal["unmapped", "kinds", "keep"]


class Way(NamedTuple):
    """Where a tensor goes by its name: the names that `source` fits go to `target`, changed by `rule`."""

    line: int
    source: re.Pattern[str]
    target: str
    rule: Rule


class Added(NamedTuple):
    """A tensor that the target needs and no source has."""

    line: int
    target: str
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class RuleFile:
    """What a user's file says, each line with its number; `rest` is what becomes of what it does not name."""

    path: str
    ways: tuple[Way, ...] = ()
    dropped: tuple[tuple[int, re.Pattern[str]], ...] = ()
    added: tuple[Added, ...] = ()
    rest: Rest = "unmapped"


def load(path: str) -> RuleFile:
    """Read a file of rules; raise UsageError, with the line, for whatever is not one."""
    import tomllib  # most conversions need no rules

    if not os.path.isfile(path):
        raise NotFoundError("there is no such file of rules", file=path)
    if os.path.getsize(path) > _MOST_BYTES:
        raise UsageError(
            "the file is too large for rules", file=path, expected=f"at most {_MOST_BYTES:,} bytes"
        )
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        text = data.decode()
        said = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the rules are not TOML: {error}", file=path) from error
    lines = _Lines(path, text)
    for name in said.keys() - {*_TABLES, "rest"}:
        raise lines.wrong(f"{name} means nothing here", name, hint=choice(name, (*_TABLES, "rest")))
    if said.get("rest", "unmapped") not in get_args(Rest):
        raise lines.wrong("rest is one of three words", "rest", expected=", ".join(get_args(Rest)))
    made = {name: list(_items(said, name, lines)) for name in _TABLES}
    return RuleFile(
        path,
        tuple(_way(item, lines) for item in made["rule"]),
        tuple((item.line, _pattern(item, lines)) for item in made["drop"]),
        tuple(_added(item, lines) for item in made["add"]),
        cast(Rest, said.get("rest", "unmapped")),
    )


class _Item(NamedTuple):
    line: int
    said: Mapping[str, Any]


class _Lines:
    """Where in the text a table stands: the parser does not tell."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text.splitlines()

    def of(self, table: str) -> Iterator[int]:
        """Go through the lines of all [[table]], and on with 1: one may be written in another way."""
        head = f"[[{table}]]"
        yield from (
            n for n, line in enumerate(self.text, 1) if line.strip().replace(" ", "").startswith(head)
        )
        yield from itertools.repeat(1)

    def wrong(self, message: str, key: str, item: int = 0, **more: Any) -> UsageError:
        """Return the error for a key: its line is the first with that key after the line of its item.

        Without an item it is a name at the top, of a value or of a table.
        """
        pattern = (
            rf'\s*"?{re.escape(key)}"?\s*=' if item else rf'\s*(\[\[?\s*)?"?{re.escape(key)}"?\s*(=|\]|\.)'
        )
        lines = enumerate(self.text[item:], item + 1)
        found = next((n for n, line in lines if re.match(pattern, line)), item or 1)
        return UsageError(f"line {found}: {message}", file=self.path, **more)


def _items(said: Mapping[str, Any], table: str, lines: _Lines) -> Iterator[_Item]:
    listed = said.get(table, [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise lines.wrong(f"{table} is written [[{table}]]", table)
    allowed = _TABLES[table]
    for item, line in zip(listed, lines.of(table), strict=False):
        for name in item.keys() - allowed.keys():
            raise lines.wrong(f"a {table} has no {name}", name, line, hint=choice(name, allowed))
        for name, kind in allowed.items():
            if name not in item and (table, name) not in _OPTIONAL:
                raise lines.wrong(f"a {table} needs {name}", table, line)
            if name in item and (not isinstance(item[name], kind) or isinstance(item[name], bool)):
                raise lines.wrong(f"{name} is of another type", name, line, found=type(item[name]).__name__)
        yield _Item(line, item)


def _way(item: _Item, lines: _Lines) -> Way:
    source = _pattern(item, lines)
    for hole in HOLE.findall(item.said["to"]):
        if hole[0] not in source.groupindex:
            raise lines.wrong(f"{{{hole[0]}}} is no hole of from", "to", item.line)
    told = item.said.get("rule", "keep")
    rules = (_rule(text, item, lines) for text in (told if isinstance(told, list) else [told]))
    return Way(item.line, source, item.said["to"], chained(*rules))


def _rule(text: object, item: _Item, lines: _Lines) -> Rule:
    rule = parsed(text) if isinstance(text, str) else None
    if rule is None:
        raise lines.wrong(
            "this is no rule",
            "rule",
            item.line,
            found=str(text)[:60],
            expected="such as transpose, permute 3,2,0,1, reshape [64, 3], take 0:64 of 256 on axis 1",
        )
    return rule


def _pattern(item: _Item, lines: _Lines) -> re.Pattern[str]:
    text, at, pieces = item.said["from"], 0, []
    names: set[str] = set()
    for hole in HOLE.finditer(text):
        name, wide = hole.groups()
        pieces.append(re.escape(text[at : hole.start()]))
        held = ".*" if wide else "[^/.]+"
        pieces.append(f"(?P={name})" if name in names else f"(?P<{name}>{held})")
        names.add(name)
        at = hole.end()
    pieces.append(re.escape(text[at:]))
    if "{" in "".join(HOLE.split(text)[::3]) or not text:
        raise lines.wrong("a hole is written {n} or {n*}", "from", item.line, found=text[:60])
    return re.compile("".join(pieces), re.DOTALL)


def _added(item: _Item, lines: _Lines) -> Added:
    shape, dtype = item.said.get("shape", []), item.said["dtype"]
    if dtype not in dtypes.BY_NAME:
        raise lines.wrong("there is no such type", "dtype", item.line, hint=choice(dtype, dtypes.BY_NAME))
    if not all(type(n) is int and n >= 0 for n in shape):
        raise lines.wrong("a shape is a list of numbers", "shape", item.line)
    if math.prod(shape) > _MOST_ELEMENTS:
        raise lines.wrong("the added tensor is too large", "shape", item.line)
    try:
        return Added(item.line, item.said["to"], filled(dtype, tuple(shape), item.said["value"]))
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise lines.wrong(f"no {dtype} has this value", "value", item.line) from error
