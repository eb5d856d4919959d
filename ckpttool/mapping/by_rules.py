"""Applies a user's rules to a tree: every leaf by its name or its native key, each line answerable."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.errors import CkpttoolError, MappingError
from ckpttool.leaf import Leaf, Path, ValueLeaf, key
from ckpttool.mapping.plan import Label, Plan, edges
from ckpttool.mapping.report import Move
from ckpttool.mapping.rule_file import HOLE, RuleFile, Way
from ckpttool.mapping.rules import Rule
from ckpttool.shown import count
from ckpttool.tree import Tree


class Applied(NamedTuple):
    """What a file does to a tree: where which leaf goes by name, what it drops, and what it does not name."""

    ways: tuple[tuple[Path, str, Rule], ...]
    dropped: tuple[Path, ...]
    rest: tuple[Path, ...]


def applied(rules: RuleFile, tree: Tree) -> Applied:
    """Return what the rules say of a tree.

    Raise MappingError, with the line, for a rule that no leaf fits or that does not fit its leaf.
    """
    ways: list[tuple[Path, str, Rule]] = []
    dropped: list[Path] = []
    rest: list[Path] = []
    used: set[int] = set()
    for path, leaf in tree.items():
        names = tuple(dict.fromkeys((tree.names[path], leaf.key if isinstance(leaf, Leaf) else "")))
        mine = [(way, found) for way in rules.ways if (found := _fits(way.source, names)) is not None]
        gone = [line for line, pattern in rules.dropped if _fits(pattern, names) is not None]
        used |= {way.line for way, _ in mine} | set(gone)
        for way, found in mine:
            _require_fit(rules, way, leaf, tree.names[path])
            ways.append((path, _filled(way.target, found), way.rule))
        if not mine:
            (dropped if gone else rest).append(path)
    for line in (*(way.line for way in rules.ways), *(line for line, _ in rules.dropped)):
        if line not in used:
            raise MappingError(f"line {line}: nothing in the checkpoint has such a name", file=rules.path)
    return Applied(tuple(ways), tuple(dropped), tuple(rest))


def _filled(target: str, found: Mapping[str, str]) -> str:
    return HOLE.sub(lambda hole: found[hole[1]], target)


def _fits(pattern: re.Pattern[str], names: tuple[str, ...]) -> Mapping[str, str] | None:
    for name in names:
        found = pattern.fullmatch(name) if name else None
        if found is not None:
            return found.groupdict()
    return None


def _require_fit(rules: RuleFile, way: Way, leaf: Leaf | ValueLeaf, name: str) -> None:
    try:
        way.rule.leaf(leaf)
    except CkpttoolError as error:
        raise MappingError(
            f"line {way.line}: {error.message}", file=rules.path, path=name, found=error.found
        ) from error


def plan(rules: RuleFile, found: Applied, *, objects: bool) -> Plan:
    """Return the way to what the rules name: entries of dicts, or with `objects` edges of TensorFlow's.

    A slash in a target's name leads into an inner dict or object; what the file drops is consumed.
    """
    names = [*(name for _, name, _ in found.ways), *(each.target for each in rules.added)]
    places = _places(names, objects=objects)
    dropped = count(len(found.dropped), "entry is", "entries are")
    return Plan(
        tuple(Move(path, places[name], rule) for path, name, rule in found.ways),
        {places[each.target]: each.leaf for each in rules.added},
        labels={places[name]: Label("parameter", name) for name in names} if objects else {},
        consumed=found.dropped,
        notes=(f"{dropped} dropped by the rules",) if found.dropped else (),
    )


def _places(names: Iterable[str], *, objects: bool) -> dict[str, Path]:
    split = {name: tuple(name.split("/")) for name in names}
    if not objects:
        return {name: tuple(map(key, steps)) for name, steps in split.items()}
    found = edges(split.values())
    return {name: found[steps] for name, steps in split.items()}
