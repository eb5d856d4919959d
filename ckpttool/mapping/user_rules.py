"""Rule files of users."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast, get_args

from ckpttool.core import deferred, dtypes
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import CkpttoolError, MappingError, NotFoundError, UsageError, suggest_choice
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, Tree, ValueLeaf, key
from ckpttool.mapping.keras_names import object_graph_paths
from ckpttool.mapping.rules import Label, Move, Plan, Rule, chain_rules, constant_tensor, parse_rule

_MOST_BYTES = 4 << 20
_MOST_ELEMENTS = 1 << 24
HOLE = deferred.compile(r"\{([A-Za-z_]\w*)(\*?)\}", re.ASCII)
_TABLES: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "rule": {"from": str, "to": str, "rule": (str, list)},
    "drop": {"from": str},
    "add": {"to": str, "value": (int, float), "dtype": str, "shape": list},
}
_OPTIONAL = frozenset((("rule", "rule"), ("add", "shape")))
Rest = Literal["unmapped", "kinds", "keep"]


class RuleEntry(NamedTuple):
    """Mapping of tensors by name: names matching `source` become `target`, changed by `rule`."""

    line: int
    source: re.Pattern[str]
    target: str
    rule: Rule


class AddedTensor(NamedTuple):
    """A tensor that the target needs and the source does not have."""

    line: int
    target: str
    leaf: Leaf


@dataclass(frozen=True, slots=True)
class RuleFile:
    """Contents of a user's file, with line numbers; `rest` is the treatment of unmatched tensors."""

    path: str
    ways: tuple[RuleEntry, ...] = ()
    dropped: tuple[tuple[int, re.Pattern[str]], ...] = ()
    added: tuple[AddedTensor, ...] = ()
    rest: Rest = "unmapped"


_EXAMPLE = 'an entry is [[rule]] with the lines from = "a/kernel" and to = "b/weight"'


def load_rules(path: str) -> RuleFile:
    """Read a rule file; raise UsageError, with the line, for anything invalid.

    [[rule]] has `from`, `to` and optionally `rule` (text as in reports, or a list of texts), [[drop]] has
    `from`, [[add]] has `to`, `value`, `dtype` and `shape`; `rest` is the treatment of unmatched tensors. A
    hole `{n}` stands for a part of one segment, `{n*}` for any text.
    """
    import tomllib  # most conversions need no rules

    if not os.path.isfile(path):
        raise NotFoundError(
            "rule file not found", file=path, hint="use --dry-run instead of --map to list the entries to map"
        )
    if os.path.getsize(path) > _MOST_BYTES:
        raise UsageError("the rule file is too large", file=path, expected=f"at most {_MOST_BYTES:,} bytes")
    with open(path, "rb") as stream:
        data = stream.read()
    try:
        text = data.decode()
        document = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise UsageError("the rule file is not text", file=path, hint=_EXAMPLE) from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the rule file is not valid TOML: {error}", file=path, hint=_EXAMPLE) from error
    lines = _TableLines(path, text)
    for name in document.keys() - {*_TABLES, "rest"}:
        raise lines.wrong(f"unknown key {name}", name, hint=suggest_choice(name, (*_TABLES, "rest")))
    if document.get("rest", "unmapped") not in get_args(Rest):
        raise lines.wrong("invalid value for rest", "rest", expected=", ".join(get_args(Rest)))
    tables = {name: list(_parse_items(document, name, lines)) for name in _TABLES}
    return RuleFile(
        path,
        tuple(_parse_entry(item, lines) for item in tables["rule"]),
        tuple((item.line, _parse_pattern(item, lines)) for item in tables["drop"]),
        tuple(_parse_addition(item, lines) for item in tables["add"]),
        cast(Rest, document.get("rest", "unmapped")),
    )


class _TableItem(NamedTuple):
    line: int
    fields: Mapping[str, Any]


class _TableLines:
    """Locations of tables in the text, which the parser does not report."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text.splitlines()

    def of(self, table: str) -> Iterator[int]:
        """Yield the lines of all [[table]], then 1 forever: a table may be written in another way."""
        head = f"[[{table}]]"
        yield from (
            n for n, line in enumerate(self.text, 1) if line.strip().replace(" ", "").startswith(head)
        )
        yield from itertools.repeat(1)

    def wrong(self, message: str, key: str, item: int = 0, **more: Any) -> UsageError:
        """Return the error for a key: its line is the first with that key after the line of its item.

        Without an item, the key is a name at the top level, of a value or of a table.
        """
        pattern = (
            rf'\s*"?{re.escape(key)}"?\s*=' if item else rf'\s*(\[\[?\s*)?"?{re.escape(key)}"?\s*(=|\]|\.)'
        )
        lines = enumerate(self.text[item:], item + 1)
        number = next((n for n, line in lines if re.match(pattern, line)), item or 1)
        return UsageError(f"line {number}: {message}", file=self.path, **more)


def _parse_items(recorded: Mapping[str, Any], table: str, lines: _TableLines) -> Iterator[_TableItem]:
    listed = recorded.get(table, [])
    if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
        raise lines.wrong(f"{table} must be written as [[{table}]]", table)
    allowed = _TABLES[table]
    for item, line in zip(listed, lines.of(table), strict=False):
        for name in item.keys() - allowed.keys():
            raise lines.wrong(
                f"unknown key {name} in a {table}", name, line, hint=suggest_choice(name, allowed)
            )
        for name, kind in allowed.items():
            if name not in item and (table, name) not in _OPTIONAL:
                raise lines.wrong(f"a {table} requires the key {name}", table, line)
            if name in item and (not isinstance(item[name], kind) or isinstance(item[name], bool)):
                raise lines.wrong(f"{name} has the wrong type", name, line, found=type(item[name]).__name__)
        yield _TableItem(line, item)


def _parse_entry(item: _TableItem, lines: _TableLines) -> RuleEntry:
    source = _parse_pattern(item, lines)
    for hole in HOLE.findall(item.fields["to"]):
        if hole[0] not in source.groupindex:
            raise lines.wrong(f"{{{hole[0]}}} is not a hole of from", "to", item.line)
    rules_text = item.fields.get("rule", "keep")
    rules = (
        _parse_item_rule(text, item, lines)
        for text in (rules_text if isinstance(rules_text, list) else [rules_text])
    )
    return RuleEntry(item.line, source, item.fields["to"], chain_rules(*rules))


def _parse_item_rule(text: object, item: _TableItem, lines: _TableLines) -> Rule:
    rule = parse_rule(text) if isinstance(text, str) else None
    if rule is None:
        raise lines.wrong(
            "invalid rule",
            "rule",
            item.line,
            found=str(text)[:60],
            expected="e.g. transpose, permute 3,2,0,1, reshape [64, 3], take 0:64 of 256 on axis 1",
        )
    return rule


def _parse_pattern(item: _TableItem, lines: _TableLines) -> re.Pattern[str]:
    text, at, pieces = item.fields["from"], 0, []
    names: set[str] = set()
    for hole in HOLE.finditer(text):
        name, wide = hole.groups()
        pieces.append(re.escape(text[at : hole.start()]))
        wildcard = ".*" if wide else "[^/.]+"
        pieces.append(f"(?P={name})" if name in names else f"(?P<{name}>{wildcard})")
        names.add(name)
        at = hole.end()
    pieces.append(re.escape(text[at:]))
    if "{" in "".join(HOLE.split(text)[::3]) or not text:
        raise lines.wrong("a hole must be written {n} or {n*}", "from", item.line, found=text[:60])
    return re.compile("".join(pieces), re.DOTALL)


def _parse_addition(item: _TableItem, lines: _TableLines) -> AddedTensor:
    shape, dtype = item.fields.get("shape", []), item.fields["dtype"]
    if dtype not in dtypes.BY_NAME:
        raise lines.wrong("unknown data type", "dtype", item.line, hint=suggest_choice(dtype, dtypes.BY_NAME))
    if not all(type(n) is int and n >= 0 for n in shape):
        raise lines.wrong("a shape must be a list of non-negative integers", "shape", item.line)
    if math.prod(shape) > _MOST_ELEMENTS:
        raise lines.wrong("the added tensor is too large", "shape", item.line)
    try:
        return AddedTensor(
            item.line, item.fields["to"], constant_tensor(dtype, tuple(shape), item.fields["value"])
        )
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise lines.wrong(f"the value cannot be stored as {dtype}", "value", item.line) from error


class RuleApplication(NamedTuple):
    """Effect of a rule file on a tree: named targets of leaves, dropped leaves, and unmatched leaves."""

    ways: tuple[tuple[Path, str, Rule], ...]
    dropped: tuple[Path, ...]
    rest: tuple[Path, ...]


def apply_rules(rules: RuleFile, tree: Tree) -> RuleApplication:
    """Apply the rules to a tree.

    Raise MappingError, with the line, for a rule that matches no leaf or does not fit its leaf.
    """
    ways: list[tuple[Path, str, Rule]] = []
    dropped: list[Path] = []
    rest: list[Path] = []
    used: set[int] = set()
    for path, leaf in tree.items():
        names = tuple(dict.fromkeys((tree.names[path], leaf.key if isinstance(leaf, Leaf) else "")))
        mine = [(way, holes) for way in rules.ways if (holes := _match_names(way.source, names)) is not None]
        gone = [line for line, pattern in rules.dropped if _match_names(pattern, names) is not None]
        used |= {way.line for way, _ in mine} | set(gone)
        for way, holes in mine:
            _require_fit(rules, way, leaf, tree.names[path])
            ways.append((path, _fill_holes(way.target, holes), way.rule))
        if not mine:
            (dropped if gone else rest).append(path)
    for line in (*(way.line for way in rules.ways), *(line for line, _ in rules.dropped)):
        if line not in used:
            raise MappingError(f"line {line}: no name in the checkpoint matches", file=rules.path)
    return RuleApplication(tuple(ways), tuple(dropped), tuple(rest))


def _fill_holes(target: str, holes: Mapping[str, str]) -> str:
    return HOLE.sub(lambda hole: holes[hole[1]], target)


def _match_names(pattern: re.Pattern[str], names: tuple[str, ...]) -> Mapping[str, str] | None:
    for name in names:
        match = pattern.fullmatch(name) if name else None
        if match is not None:
            return match.groupdict()
    return None


def _require_fit(rules: RuleFile, way: RuleEntry, leaf: Leaf | ValueLeaf, name: str) -> None:
    try:
        way.rule.leaf(leaf)
    except CkpttoolError as error:
        raise MappingError(
            f"line {way.line}: {error.message}", file=rules.path, path=name, found=error.found
        ) from error


def plan_from_rules(rules: RuleFile, application: RuleApplication, *, objects: bool) -> Plan:
    """Return the plan for named targets: entries of dicts, or with `objects` edges of TensorFlow's objects.

    A slash in a target's name leads into an inner dict or object; leaves dropped by the file are
    consumed.
    """
    names = [*(name for _, name, _ in application.ways), *(row.target for row in rules.added)]
    places = _target_paths(names, objects=objects)
    dropped = format_count(len(application.dropped), "entry is", "entries are")
    return Plan(
        tuple(Move(path, places[name], rule) for path, name, rule in application.ways),
        {places[row.target]: row.leaf for row in rules.added},
        labels={places[name]: Label("parameter", name) for name in names} if objects else {},
        consumed=application.dropped,
        notes=(f"{dropped} dropped by the rules",) if application.dropped else (),
    )


def _target_paths(names: Iterable[str], *, objects: bool) -> dict[str, Path]:
    split = {name: tuple(name.split("/")) for name in names}
    if not objects:
        return {name: tuple(map(key, steps)) for name, steps in split.items()}
    paths = object_graph_paths(split.values())
    return {name: paths[steps] for name, steps in split.items()}
