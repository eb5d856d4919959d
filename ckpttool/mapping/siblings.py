"""Modules beside each other whose layers are alike: what tells them apart, and whether both sides say it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ckpttool.mapping.layer_names import counted_by_framework, numbers, stem, words
from ckpttool.mapping.scopes import Candidate, Module, Signature, tree_of

Name = tuple[str, ...]
Labels = tuple[str, str]
Held = Counter[Name]


class Sibling(NamedTuple):
    """One of several modules alike: its name (bookkeeping left out), its layers by their places."""

    name: Name
    module: Module
    layers: list[int]

    @property
    def text(self) -> str | None:
        """What the module's own step says, None if it only counts."""
        return self.module.word.text


class Row(NamedTuple):
    """Siblings that only numbers tell apart, with the other side's layers that are theirs, in order."""

    siblings: list[Sibling]
    partners: list[list[int]]


def alike(every: Sequence[Candidate], some: Sequence[int]) -> Iterator[list[Sibling]]:
    """Go through the groups of modules beside each other that hold the same layers, outer ones first."""
    waiting: list[tuple[Name, Module]] = [((), tree_of(every, some))]
    for name, module in waiting:
        found: dict[tuple[frozenset[Signature], ...], list[Sibling]] = {}
        for step, child in module.children.items():
            waiting.append(((*name, step), child))
            inner = child.layers()
            group = found.setdefault(tuple(every[n].signatures for n in inner), [])
            group.append(Sibling((*name, step), child, inner))
        yield from (group for group in found.values() if len(group) > 1)


def twins(groups: Iterable[list[Sibling]]) -> dict[int, str]:
    """Return by layer the word that alone tells it from another one of those alike.

    That is the word of a module (or of the layer itself) beside which another stands of the same layers under
    another word: `mean` beside `log_std`, but not `fc1` beside `fc2`, whose numbers say an order.
    """
    found: dict[int, str] = {}
    for group in groups:
        named = [(one, one.text) for one in group if one.text is not None]
        if len({_stem(one) for one, _ in named}) > 1:
            found |= {n: text for one, text in named for n in one.layers}
    return found


def says(one: Candidate, text: str) -> bool:
    """Say whether a step of a layer's name is this word."""
    return any(said.text == text for _, said in words(one.name))


def judged(
    sources: Sequence[Candidate],
    targets: Sequence[Candidate],
    groups: tuple[list[list[Sibling]], list[list[Sibling]]],
    matched: Mapping[int, int],
) -> tuple[set[int], list[Labels]]:
    """Return which targets, matched in order, have numbers that say another order; and what only order says.

    That is by names, source and target, of what stands beside others like it. `groups` are those alike of the
    sources and of the targets, `matched` are targets with their sources.
    """
    back = {source: target for target, source in matched.items()}
    theirs = list(_rows(groups[0], targets, back))
    ours = list(_rows(groups[1], sources, matched))
    open_ = {n for row in ours if _contradicted(row, sources) for one in row.siblings for n in one.layers}
    open_ |= {n for row in theirs if _contradicted(row, targets) for own in row.partners for n in own}
    held = _held(sources, back), _held(targets, matched)
    told, found = set(open_), []
    for row in ours:
        mine = {n for one in row.siblings for n in one.layers}
        if not mine <= told:
            found += [(source, target) for target, source in _labels(row, targets, sources, held[0])]
            told |= mine
    for row in theirs:
        mine = {n for own in row.partners for n in own}
        if not mine <= told:
            found += _labels(row, sources, targets, held[1])
            told |= mine
    return open_, found


def _rows(
    groups: list[list[Sibling]], theirs: Sequence[Candidate], partners: Mapping[int, int]
) -> Iterator[Row]:
    """Go through the siblings of one side that its program numbered and for which the other has no number.

    `partners` says which layer of the other side each of ours is, in the order in which they were matched.
    """
    for group in groups:
        by_stem: dict[str, list[Sibling]] = {}
        for one in group:
            given = one.text is not None or (one.name[-1].isdecimal() and one.module.children)
            if given and partners.keys() >= {*one.layers}:
                by_stem.setdefault(_stem(one), []).append(one)
        for siblings in by_stem.values():
            row = Row(siblings, [[partners[n] for n in one.layers] for one in siblings])
            if len(siblings) > 1 and not _named(row, theirs):
                yield row


def _stem(one: Sibling) -> str:
    return stem((one.name[-1].lower(),))[0]


def _named(row: Row, theirs: Sequence[Candidate]) -> bool:
    """Say whether the other side calls all of a row by the same words or the same numbers."""
    said = zip(row.siblings, row.partners, strict=True)
    if all(one.text is not None and all(says(theirs[n], one.text) for n in own) for one, own in said):
        return True
    steps = _steps(row, theirs)
    if any(map(counted_by_framework, steps)):
        return False
    return [numbers((step,)) for step in steps] == [numbers((one.name[-1],)) for one in row.siblings]


def _steps(row: Row, theirs: Sequence[Candidate]) -> list[str]:
    """Return the first step of the other side's names in which they differ, none if they do not."""
    names = [_steps_of(theirs[own[0]]) for own in row.partners]
    return next((list(steps) for steps in zip(*names, strict=False) if len({*steps}) > 1), [])


def _contradicted(row: Row, theirs: Sequence[Candidate]) -> bool:
    """Say whether the numbers of the row say another order than the one in which it was matched.

    Numbers of the other side's own count for that, those that its framework gave do not.
    """
    mine = [numbers((one.name[-1],)) for one in row.siblings]
    steps = _steps(row, theirs)
    if not steps or any(map(counted_by_framework, steps)):
        return mine != sorted(mine)
    other = [numbers((step,)) for step in steps]
    return sorted(range(len(mine)), key=mine.__getitem__) != sorted(range(len(mine)), key=other.__getitem__)


def _labels(row: Row, ours: Sequence[Candidate], theirs: Sequence[Candidate], held: Held) -> list[Labels]:
    """Return by what names a row was matched, its own side's first: modules, or layers where one has none."""
    found = []
    for one, own in zip(row.siblings, row.partners, strict=True):
        whole = _whole(theirs, own, held)
        if whole is None:
            found += [(_title(ours[n]), _title(theirs[m])) for n, m in zip(one.layers, own, strict=True)]
        elif one.module.children:
            found.append((_above(ours[one.layers[0]].name, len(one.name)), whole))
        else:
            found.append((_title(ours[one.layers[0]]), whole))
    return found


def _held(every: Sequence[Candidate], some: Iterable[int]) -> Held:
    """Return how many of the layers each module holds."""
    names = [_steps_of(every[n]) for n in some]
    return Counter(name[:depth] for name in names for depth in range(1, len(name) + 1))


def _whole(every: Sequence[Candidate], some: list[int], held: Held) -> str | None:
    """Return what holds these layers and no others of those counted, None if nothing does."""
    if len(some) == 1:
        return _title(every[some[0]])
    names = sorted(_steps_of(every[n]) for n in some)
    # What the first and the last of sorted names share, all between them do.
    depth = next((d for d, (a, b) in enumerate(zip(names[0], names[-1], strict=False)) if a != b), 0)
    return _above(every[some[0]].name, depth) if depth and held[names[0][:depth]] == len(some) else None


def _steps_of(one: Candidate) -> Name:
    return tuple(step for step, _ in words(one.name))


def _above(name: Name, depth: int) -> str:
    """Return the beginning of a name with so many of the steps that are no bookkeeping."""
    end = next(end for end in range(len(name) + 1) if len(words(name[:end])) == depth)
    return "/".join(name[:end])


def _title(one: Candidate) -> str:
    return one.shown or one.title
