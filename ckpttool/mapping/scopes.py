"""The modules of a model as scopes: what their names say, which lie in which, their layers in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.mapping.layer_names import Word, stem, words

Signature = tuple[object, ...]


class Candidate(NamedTuple):
    """A layer of either side: its name's steps, what it could be (kinds with shapes), what people call it.

    `rank` is its place in the order in which its model lists or uses layers, -1 where the file has none.
    `call` is the number of its call in one of its model, -1 where none was seen, and `after` has the bits of
    the calls whose results it takes. `settings` are those that tell layers of one kind and shape apart, by
    name and value. `listed` says that a count in its name follows a list of its model or the calls of its
    graph, not the order in which its program made layers.
    """

    name: tuple[str, ...]
    signatures: frozenset[Signature]
    shown: str = ""
    rank: int = -1
    call: int = -1
    after: int = 0
    settings: frozenset[tuple[str, object]] = frozenset()
    listed: bool = False

    @property
    def title(self) -> str:
        """Return the name as one text."""
        return "/".join(self.name)


_NOTHING = Word(None)


@dataclass(slots=True, eq=False)
class Module:
    """A module: what its step of the name says, the modules in it, and the layers that it is."""

    children: dict[str, Module] = field(default_factory=dict)
    word: Word = _NOTHING
    own: list[int] = field(default_factory=list)

    def named(self) -> dict[str, Module]:
        """Return the modules in it by what their names say; two that say the same say nothing."""
        found: dict[str, Module | None] = {}
        for child in self.children.values():
            if child.word.text is not None:
                found[child.word.text] = None if child.word.text in found else child
        return {text: child for text, child in found.items() if child is not None}

    def numbered(self) -> dict[str, Module]:
        """Return the modules in it whose steps only count."""
        return {step: child for step, child in self.children.items() if child.word.text is None}

    def only(self) -> Module | None:
        """Return the one module in it, if it is nothing else."""
        return next(iter(self.children.values())) if len(self.children) == 1 and not self.own else None

    def layers(self, without: Iterable[Module] = ()) -> list[int]:
        """Return the layers in it in order, counted ones by number, without those of some modules."""
        left, found = set(map(id, without)), []
        waiting = [self]
        while waiting:
            node = waiting.pop()
            found += node.own
            children = [child for child in node.children.values() if id(child) not in left]
            if all(child.word.text is None for child in children) and node.counted():
                children.sort(key=lambda child: child.word.number)
            waiting += reversed(children)
        return found

    def counted(self) -> bool:
        """Say whether the numbers of the modules in it count them all in one row."""
        found = [child.word.number for child in self.children.values()]
        stems = {stem((step,)) for step in self.children}
        return len(set(found)) == len(found) and len(stems) == 1


def shared(
    theirs: Module, ours: Module, agree: Callable[[Module, Module], bool]
) -> list[tuple[Module, Module]]:
    """Return the modules of the same name in two modules.

    Numbers are names where both sides have the same, or all of one side's list are in the other's, and all of
    these modules `agree`.
    """
    named = ours.named()
    found = [(child, named[text]) for text, child in theirs.named().items() if text in named]
    mine, others = theirs.numbered(), ours.numbered()
    both = [step for step in mine if step in others]
    lists = all(step.isdecimal() for step in (*mine, *others))
    if both and (
        len(mine) == len(others) == len(both) or (lists and len(both) == min(len(mine), len(others)))
    ):
        counted = [(mine[step], others[step]) for step in both]
        if all(agree(one, other) for one, other in counted):
            found += counted
    return found


def tree_of(every: Sequence[Candidate], some: Iterable[int]) -> Module:
    """Return some of the layers as a tree of modules, in their order."""
    root = Module()
    for number in some:
        node = root
        for step, said in words(every[number].name):
            node = node.children.setdefault(step, Module(word=said))
        node.own.append(number)
    return root


def placed(theirs: Sequence[Candidate], ours: Sequence[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
    """Return both sides with each layer's place in the flow of calls among its settings.

    The place of a layer follows from its kind and shape, from what it needs and from what needs it. It is
    evidence only if both sides have equally many layers in each place; otherwise the settings stay.
    """
    sides = list(theirs), list(ours)
    known = frozenset.intersection(
        *(frozenset(s for each in side for s in each.signatures) for side in sides)
    )
    kinds = [[frozenset(each.signatures & known) for each in side] for side in sides]
    # A kind of which some layer's call was not seen says nothing, nor does one that only one side has.
    unseen = {
        s
        for side, own in zip(sides, kinds, strict=True)
        for each, kind in zip(side, own, strict=True)
        for s in kind
        if each.call < 0
    }
    marks: list[dict[int, object]] = [
        {n: tuple(sorted(map(repr, kind))) for n, kind in enumerate(own) if kind and not kind & unseen}
        for own in kinds
    ]
    if min(map(len, marks)) < 2 or len(marks[0]) > _MOST_PLACED:
        return sides
    numbers: dict[object, int] = {}
    before = 0
    for _ in range(_ROUNDS):
        marks = [_refined(side, mark, numbers) for side, mark in zip(sides, marks, strict=True)]
        counts = [sorted(map(str, mark.values())) for mark in marks]
        if counts[0] != counts[1]:
            return sides
        now = len(set(counts[0]))
        if now == before:
            break
        before = now
    for side, mark in zip(sides, marks, strict=True):
        for n, place in mark.items():
            side[n] = side[n]._replace(settings=side[n].settings | {(PLACE, place)})
    return sides


PLACE = "place in the flow of calls"
_ROUNDS = 8
_MOST_PLACED = 600


def _refined(
    side: Sequence[Candidate], marks: Mapping[int, object], numbers: dict[object, int]
) -> dict[int, object]:
    """Return each layer's mark with those of the layers before and after it."""
    above: dict[int, list[str]] = {n: [] for n in marks}
    below: dict[int, list[str]] = {n: [] for n in marks}
    calls = {side[n].call: n for n in marks}
    for n in marks:
        bits = side[n].after
        for call, other in calls.items():
            if bits >> call & 1 and other != n:
                above[n].append(str(marks[other]))
                below[other].append(str(marks[n]))
    return {
        n: numbers.setdefault((mark, tuple(sorted(above[n])), tuple(sorted(below[n]))), len(numbers))
        for n, mark in marks.items()
    }
