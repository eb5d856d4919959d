"""Finds for every layer of a target what it gets of the source: by name, by order, or by its only fit.

Names are compared from the root: modules of one name are one scope, and what lies in it goes nowhere else.
What no name decides is matched in order if all that is left on both sides of a scope agrees, kind by kind and
shape by shape; twins that only one side has words for (`mean`, `log_std`) stay open, and so do those whose
numbers say another order (`q2` before `q1`). A fit alone decides only where there is one layer of that kind
and shape on either side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from ckpttool.errors import UsageError
from ckpttool.mapping.layer_names import numbers, stem
from ckpttool.mapping.scopes import Candidate, Module, Signature, shared, tree_of
from ckpttool.mapping.siblings import alike, judged, says, twins

By = Literal["given", "name", "order", "only fit"]
# How far to trust a match, in words.
CONFIDENCE: dict[By, str] = {"given": "given", "name": "high", "order": "medium", "only fit": "low"}


class Pair(NamedTuple):
    """A source layer and the target layer that gets it, by their places in the two lists."""

    source: int
    target: int
    by: By


class Group(NamedTuple):
    """Layers of both sides that fit each other, of which nothing says which is which."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Solution(NamedTuple):
    """The pairs in the order of the targets, what is ambiguous, and pairs of one name that do not fit.

    `by_order` names modules and layers, source and target, that are like others beside them and that nothing
    but their order tells from those.
    """

    pairs: tuple[Pair, ...]
    ambiguous: tuple[Group, ...]
    misfits: tuple[Pair, ...]
    by_order: tuple[tuple[str, str], ...] = ()


def solve(
    sources: Sequence[Candidate],
    targets: Sequence[Candidate],
    *,
    in_order: bool = True,
    given: Sequence[tuple[str, str]] = (),
) -> Solution:
    """Return which target gets which source.

    `in_order` says that the source lists its layers in the order in which they were made; if not, only
    numbers in names say an order. `given` are names of modules or layers, source and target, that belong
    together. Raise UsageError for a name of `given` that nothing has.
    """
    return _Solver(sources, targets, in_order).solved(given)


class _Solver:
    def __init__(self, sources: Sequence[Candidate], targets: Sequence[Candidate], in_order: bool) -> None:
        self.sources, self.targets, self.in_order = sources, targets, in_order
        self.pairs: list[Pair] = []
        self.ambiguous: list[Group] = []
        self.misfits: list[Pair] = []
        self.by_order: list[tuple[str, str]] = []

    def solved(self, given: Sequence[tuple[str, str]]) -> Solution:
        """Return the whole solution."""
        taken: tuple[set[int], set[int]] = set(), set()
        for theirs, ours in given:
            left = _below(self.sources, theirs, taken[0]), _below(self.targets, ours, taken[1])
            for known, said in zip(taken, left, strict=True):
                known |= set(said)
            self._given(*left)
        rest = [
            tree_of(every, [n for n in range(len(every)) if n not in known])
            for every, known in zip((self.sources, self.targets), taken, strict=True)
        ]
        self._close(*self._scope(*rest))
        return Solution(
            tuple(sorted(self.pairs, key=lambda pair: pair.target)),
            tuple(self.ambiguous),
            tuple(self.misfits),
            tuple(dict.fromkeys(self.by_order)),
        )

    def _given(self, sources: list[int], targets: list[int]) -> None:
        if len(sources) == len(targets) == 1:
            fits = self._fits(sources[0], targets[0])
            (self.pairs if fits else self.misfits).append(Pair(sources[0], targets[0], "given"))
            return
        before = len(self.pairs)
        self._close(*self._scope(tree_of(self.sources, sources), tree_of(self.targets, targets)))
        self.pairs[before:] = [pair._replace(by="given") for pair in self.pairs[before:]]

    def _fits(self, source: int, target: int) -> bool:
        return not self.sources[source].signatures.isdisjoint(self.targets[target].signatures)

    def _scope(self, theirs: Module, ours: Module) -> tuple[list[int], list[int]]:
        """Match what lies in two modules that belong together; return what is left on either side."""
        named, above = shared(theirs, ours), (theirs, ours)
        while not named:
            # One module alone around everything says nothing.
            if (inner := theirs.only()) is not None:
                theirs = inner
            elif (inner := ours.only()) is not None:
                ours = inner
            else:
                break
            named = shared(theirs, ours)
        left: tuple[list[int], list[int]] = ([], [])
        for one, other in named:
            rest = self._scope(one, other)
            if rest[0] and rest[1]:
                self._close(*rest)
            else:
                # What one side has too many may have its counterpart further out.
                left[0].extend(rest[0])
                left[1].extend(rest[1])
        sources = [*theirs.layers(one for one, _ in named), *left[0]]
        targets = [*ours.layers(other for _, other in named), *left[1]]
        if (theirs, ours) == above:
            sources, targets = self._by_name(theirs.own, ours.own, sources, targets)
        return self._in_order(sources, targets)

    def _by_name(
        self, theirs: list[int], ours: list[int], sources: list[int], targets: list[int]
    ) -> tuple[list[int], list[int]]:
        """Match the layers that two modules of one name are."""
        if len(theirs) != 1 or len(ours) != 1:
            return sources, targets
        source, target = theirs[0], ours[0]
        if not self._fits(source, target):
            self.misfits.append(Pair(source, target, "name"))
            return sources, targets
        self.pairs.append(Pair(source, target, "name"))
        return [n for n in sources if n != source], [n for n in targets if n != target]

    def _in_order(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Match two rows of layers if all of them agree; else those of one fit, then the rest again."""
        for last in (False, True):
            ordered = self._ordered(sources, targets)
            if ordered is not None:
                return self._paired(*ordered)
            if not last:
                sources, targets = self._only_fits(sources, targets)
        return sources, targets

    def _paired(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Match two rows in order; return those that words of one side alone tell from others like them."""
        groups = list(alike(self.sources, sources)), list(alike(self.targets, targets))
        theirs, ours = map(twins, groups)
        open_: set[Signature] = set()
        for s, t in zip(sources, targets, strict=True):
            if (s in theirs and not says(self.targets[t], theirs[s])) or (
                t in ours and not says(self.sources[s], ours[t])
            ):
                open_ |= self.sources[s].signatures | self.targets[t].signatures
        there = dict(zip(targets, sources, strict=True))
        left = {t for t in targets if not open_.isdisjoint(self.targets[t].signatures)}
        matched = {t: s for t, s in there.items() if t not in left}
        counted, said = judged(self.sources, self.targets, groups, matched)
        left |= counted
        self.by_order += said
        self.pairs += [Pair(s, t, "order") for t, s in there.items() if t not in left]
        return [s for t, s in there.items() if t in left], [t for t in there if t in left]

    def _ordered(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]] | None:
        if len(sources) != len(targets) or not sources:
            return None
        if not self.in_order:
            return self._counted(sources, targets)
        return (sources, targets) if all(map(self._fits, sources, targets)) else None

    def _counted(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]] | None:
        """Return both rows in one order, kind by kind; None unless numbers in names order the sources."""
        theirs, ours = _by_signature(self.sources, sources), _by_signature(self.targets, targets)
        both = [signature for signature in theirs if signature in ours]
        rows: tuple[list[int], list[int]] = ([], [])
        for signature in both:
            having, wanting = theirs[signature], ours[signature]
            stems = {stem(self.sources[n].name) for n in having}
            counts = {numbers(self.sources[n].name) for n in having}
            if len(having) != len(wanting) or len(stems) > 1 or len(counts) < len(having):
                return None
            rows[0].extend(sorted(having, key=lambda n: numbers(self.sources[n].name)))
            rows[1].extend(wanting)
        # A layer of two kinds would be there twice.
        once = all(sorted(r) == sorted(w) for r, w in zip(rows, (sources, targets), strict=True))
        return rows if once else None

    def _only_fits(self, sources: list[int], targets: list[int]) -> tuple[list[int], list[int]]:
        """Match, until nothing changes, each target that only one source fits, which no other needs."""
        left = sources, targets
        while True:
            theirs, ours = _by_signature(self.sources, left[0]), _by_signature(self.targets, left[1])
            found: dict[int, int] = {}
            for signature, wanting in ours.items():
                having = theirs.get(signature, [])
                if len(wanting) == len(having) == 1 and self._alone(having[0], wanting[0], theirs):
                    found[having[0]] = wanting[0]
            if not found:
                return left
            self.pairs += [Pair(source, target, "only fit") for source, target in found.items()]
            taken = set(found.values())
            left = [n for n in left[0] if n not in found], [n for n in left[1] if n not in taken]

    def _alone(self, source: int, target: int, theirs: dict[Signature, list[int]]) -> bool:
        return all(theirs.get(s, [source]) == [source] for s in self.targets[target].signatures)

    def _close(self, sources: list[int], targets: list[int]) -> None:
        """Note what is ambiguous of what is left in a scope."""
        theirs, ours = _by_signature(self.sources, sources), _by_signature(self.targets, targets)
        said: set[int] = set()
        for signature, wanting in ours.items():
            having = theirs.get(signature)
            if having and not said.issuperset(wanting):
                said |= set(wanting)
                self.ambiguous.append(Group(tuple(having), tuple(wanting)))


def _by_signature(every: Sequence[Candidate], some: Iterable[int]) -> dict[Signature, list[int]]:
    found: dict[Signature, list[int]] = {}
    for number in some:
        for signature in every[number].signatures:
            found.setdefault(signature, []).append(number)
    return found


def _below(every: Sequence[Candidate], name: str, taken: set[int]) -> list[int]:
    wanted = name.replace(".", "/").strip("/")
    found = [
        number
        for number, one in enumerate(every)
        if number not in taken
        and any(said == wanted or said.startswith(f"{wanted}/") for said in (one.title, one.shown))
    ]
    if not found:
        raise UsageError("--match names a layer that is not there", found=name)
    return found
