"""The modules of a model as scopes: what their names say, which lie in which, their layers in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ckpttool.mapping.layer_names import Word, stem, words

Signature = tuple[object, ...]


class Candidate(NamedTuple):
    """A layer of either side: its name's steps, what it could be (kinds with shapes), what people call it."""

    name: tuple[str, ...]
    signatures: frozenset[Signature]
    shown: str = ""

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


def shared(theirs: Module, ours: Module) -> list[tuple[Module, Module]]:
    """Return the modules of the same name in two modules."""
    named = ours.named()
    return [(child, named[text]) for text, child in theirs.named().items() if text in named]


def tree_of(every: Sequence[Candidate], some: Iterable[int]) -> Module:
    """Return some of the layers as a tree of modules, in their order."""
    root = Module()
    for number in some:
        node = root
        for step, said in words(every[number].name):
            node = node.children.setdefault(step, Module(word=said))
        node.own.append(number)
    return root
