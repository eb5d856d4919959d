"""Fills a target model's skeleton from a source: which layer gets which, by which rules, what stays open."""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool import dtypes
from ckpttool.errors import MappingError, UsageError, some
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.mapping import by_rules, cautions
from ckpttool.mapping.fitting import BARE, STATES, Side, side, signature
from ckpttool.mapping.flattened import (
    Reordering,
    followed,
    reordering,
    shuffled_as_they_are,
    taken_as_they_are,
    unknown,
)
from ckpttool.mapping.kinds import IN_OUT, NUMBERED, POINTWISE, Kind, asked, candidates
from ckpttool.mapping.layers import Choice, Layer, converted, layers, proposals
from ckpttool.mapping.matches import Ambiguity, Filling, Match, Misfit
from ckpttool.mapping.modules import TITLE, About, modules
from ckpttool.mapping.plan import Plan, build
from ckpttool.mapping.report import Move
from ckpttool.mapping.rule_file import RuleFile
from ckpttool.mapping.rules import KEEP, Cast, chain
from ckpttool.mapping.scopes import placed
from ckpttool.mapping.skeleton import Skeleton
from ckpttool.mapping.solver import By, Pair, Solution, solve
from ckpttool.tree import Tree

_SHOWN = 3
_SAID = 6
_OPTIONS = 24


def fill(
    tree: Tree,
    framework: str,
    skeleton: Skeleton,
    *,
    in_order: bool = True,
    listed: bool = False,
    choices: Sequence[Choice] = (),
    given: Sequence[tuple[str, str]] = (),
    strict: bool = True,
    accept_order: bool = False,
    cast: bool = False,
    described: Mapping[Path, About] | None = None,
) -> Filling:
    """Return how the source tree of a framework fills the skeleton.

    `in_order` says that the tree lists its layers as they were made, `listed` that counts in their names
    follow the calls of a graph, `choices` what somebody said of its
    layers, `given` which names belong together, `accept_order` that order may decide (see solver.solve),
    `cast` that numbers may be rounded, `described` what the file records of the module of each tensor.
    Raise MappingError where a name or the user says that two belong together and their shapes differ, or
    numbers would be rounded; unless `strict`, these are the filling's misfits, and numbers of another width
    are left to whoever puts them into the model.
    """
    target, places = skeleton.named()
    foreign = framework != skeleton.framework
    theirs, ours = _sides(
        tree, framework, choices, target, skeleton, foreign=foreign, in_order=in_order, described=described
    )
    if listed:
        theirs = theirs._replace(candidates=tuple(one._replace(listed=True) for one in theirs.candidates))
    calls = {part.name: part for part in skeleton.parts}
    parts = Counter(layer.name for layer in ours.layers)
    wanting = [
        one._replace(call=part.call, after=part.after)
        if (part := calls.get(layer.name)) is not None and parts[layer.name] == 1
        else one
        for one, layer in zip(ours.candidates, ours.layers, strict=False)
    ]
    having, wanting = placed(theirs.candidates, (*wanting, *ours.candidates[len(wanting) :]))
    theirs, ours = theirs._replace(candidates=tuple(having)), ours._replace(candidates=tuple(wanting))
    solution = solve(
        theirs.candidates, ours.candidates, in_order=in_order, given=given, accept_order=accept_order
    )
    misfits = [
        Misfit(
            theirs.title(pair.source),
            ours.title(pair.target),
            theirs.spelled(pair.source),
            ours.spelled(pair.target),
        )
        for pair in solution.misfits
    ]
    if misfits and strict:
        raise misfits[0].error
    made = _Made(theirs, ours, places, (framework, skeleton.framework))
    for pair in made.known(solution.pairs):
        made.add(pair)
    # Two models of one framework differ in nothing that these sentences say.
    needs = cautions.notes(made.done) if foreign else ()
    if foreign or made.turned:
        made.assumed += cautions.without_classes([(layer, layer.group(tree)) for layer in made.done])
    if foreign:
        made.assumed += taken_as_they_are(tree, tuple(made.done))
        made.assumed += shuffled_as_they_are(tree, tuple(made.done))
    made.assumed += cautions.differences(made.both, foreign=foreign)
    different = [
        Misfit(source.title, target.title, found, wanted, name)
        for source, target in made.both
        for name, found, wanted in cautions.recorded_differences(source, target)
    ]
    if different and strict:
        raise different[0].error
    misfits += different
    made.assumed += cautions.own_calls(target for _, target in made.both)
    filled, unfit = _filled(tree, skeleton.tree, made, strict=strict, cast=cast)
    reached = ({move.target for move in made.moves} | made.added.keys()) - unfit.keys()
    used = {move.source for move in made.moves} | made.left
    linked = set(places.values())
    return Filling(
        filled,
        tuple(made.moves),
        tuple(made.matched),
        tuple(
            Ambiguity(
                tuple(map(theirs.title, group.sources)), tuple(map(ours.title, group.targets)), group.ordered
            )
            for group in solution.ambiguous
        ),
        tuple(path for path in skeleton.tree if path in linked and path not in reached),
        tuple(path for path, leaf in tree.tensors() if leaf.role in STATES and path not in used),
        (*_assumed(theirs, ours, solution), *dict.fromkeys(made.assumed)),
        (*made.notes, *needs, *_unfit(theirs, ours, solution, framework)),
        (*misfits, *unfit.values()),
        made.evidence,
    )


def _sides(
    tree: Tree,
    framework: str,
    choices: Sequence[Choice],
    target: Tree,
    skeleton: Skeleton,
    *,
    foreign: bool,
    in_order: bool,
    described: Mapping[Path, About] | None = None,
) -> tuple[Side, Side]:
    """Return the candidates of both sides, each in the form that the other has where a kind has several.

    An attention may be one layer or several linear ones, a separable convolution two, a convolution of one
    place a dense layer.
    """
    choices, own = _choices(tree, framework, choices, target, skeleton)
    mine = layers(tree, framework, choices, described, classes=foreign)
    wanted = skeleton.layers(target, own, classes=foreign)
    names, others = _kind_names(mine), _kind_names(wanted)
    if more := (others - names) & _SEVERAL:
        with contextlib.suppress(UsageError):
            mine = layers(tree, framework, choices, described, classes=foreign, composed=more)
    if more := (names - others) & _SEVERAL:
        wanted = skeleton.layers(target, own, classes=foreign, composed=more)
    if more := _SEVERAL - names - others:
        # Neither has one layer for it: two ways to make it of several, if they are not the same.
        # A layer that the user names stays one of its own.
        with contextlib.suppress(UsageError):
            both = (
                layers(tree, framework, choices, described, classes=foreign, composed=more),
                skeleton.layers(target, own, classes=foreign, composed=more),
            )
            one, other = (_forms(found, more) for found in both)
            mine, wanted = both if one and other and one != other else (mine, wanted)
    theirs, ours = side(tree, mine, in_order=in_order), side(target, wanted)
    mine, wanted = _layers_alone(theirs, ours), _layers_alone(ours, theirs)
    theirs = theirs if mine == theirs.layers else side(tree, mine, in_order=in_order)
    ours = ours if wanted == ours.layers else side(target, wanted)
    if framework == "tensorflow" and foreign:
        mine = _numbered(theirs, ours, described)
        theirs = side(tree, mine, in_order=in_order)
    if foreign:
        mine, wanted = _tables(theirs, ours), _tables(ours, theirs)
        theirs, ours = side(tree, mine, in_order=in_order), side(target, wanted)
    said = [frozenset(s for each in one.candidates for s in each.signatures) for one in (theirs, ours)]
    mine, wanted = _in_other_forms(theirs, said[1]), _in_other_forms(ours, said[0])
    mine, wanted = _in_two(theirs, mine, said[1]), _in_two(ours, wanted, said[0])
    return (
        theirs if mine == theirs.layers else side(tree, mine, in_order=in_order),
        ours if wanted == ours.layers else side(target, wanted),
    )


def _choices(
    tree: Tree, framework: str, choices: Sequence[Choice], target: Tree, skeleton: Skeleton
) -> tuple[Sequence[Choice], Sequence[Choice]]:
    """Return what was said of the source's layers and, of kinds, what was said of the model's.

    A name that no layer has stays with the source, which says so.
    """
    if not any(choice.kind for choice in choices):
        return choices, ()
    mine = [layer.title for layer in layers(tree, framework)]
    # Of the model only what its class leaves open: of the others the class decides.
    wanted = [layer.title for layer in skeleton.layers(target) if all(kind.refused for kind in layer.kinds)]
    own = [choice for choice in choices if choice.kind and any(map(choice.fits, wanted))]
    return [choice for choice in choices if choice not in own or any(map(choice.fits, mine))], own


def _numbered(theirs: Side, ours: Side, described: Mapping[Path, About] | None) -> tuple[Layer, ...]:
    """Return the source's layers, with those of numbered variables that can be layers of the model.

    A lone vector stays what it is where the model has such a tensor outside of layers.
    """
    wanted = {s for each in ours.candidates for s in each.signatures}
    known = {layer.name for layer in theirs.layers}
    found = list(theirs.layers)
    for module in modules(theirs.tree, "tensorflow", {}, described):
        group = module.group(theirs.tree)
        numbered = bool(group) and all(name.startswith("vars/") for name in group)
        if not numbered or module.name in known or module.about.cls:
            continue
        first = next(iter(group.values()))
        if len(group) == 1 and (BARE, first.shape) in wanted:
            continue
        able = []
        for kind in NUMBERED:
            layer = Layer(module.name, (kind,), module.tensors, module.part, about=module.about)
            if kind.fits(group) and signature(theirs.tree, layer, kind) in wanted:
                able.append(kind)
        if able:
            found.append(Layer(module.name, tuple(able), module.tensors, module.part, about=module.about))
    places = {path: n for n, path in enumerate(theirs.tree)}
    return tuple(sorted(found, key=lambda layer: min(places[path] for path in layer.tensors.values())))


_SEVERAL = frozenset(("attention", "separable"))


def _kind_names(found: Sequence[Layer]) -> frozenset[str]:
    return frozenset(kind.name for layer in found for kind in layer.kinds)


def _forms(found: Sequence[Layer], names: Collection[str]) -> frozenset[frozenset[str]]:
    """Return the tensors' names of the layers of these kinds, each set of names once."""
    return frozenset(frozenset(layer.tensors) for layer in found if _kind_names([layer]) <= frozenset(names))


def _tables(one: Side, other: Side) -> tuple[Layer, ...]:
    """Return a side's layers without the tables of embeddings that the other side keeps in no layer.

    Transformers' TensorFlow models have a variable of their own for each. Both sides have the same axes where
    these differ in length; a square table stays a layer.
    """
    there = frozenset(s for each in other.candidates for s in each.signatures)
    left = []
    for layer, candidate in zip(one.layers, one.candidates, strict=False):
        group = layer.group(one.tree)
        shapes = [leaf.shape for leaf in group.values() if "embedding" in _kind_names([layer])]
        alone = len(layer.tensors) == 1 and not candidate.signatures & there
        is_table = any(len({*shape}) == 2 and (BARE, shape) in there for shape in shapes)
        if not (alone and is_table):
            left.append(layer)
    return tuple(left)


def _in_other_forms(one: Side, other: Collection[object]) -> tuple[Layer, ...]:
    """Return a side's layers, where the other side has none such in the other form that they may have.

    A convolution of one place may be a dense layer, a depthwise one a convolution of many groups.
    """
    made = []
    for layer, candidate in zip(one.layers, one.candidates, strict=False):
        names, framework = _kind_names([layer]), layer.kinds[0].framework
        if candidate.signatures & frozenset(other) or layer.kinds[0].refused or layer.given:
            made.append(layer)
            continue
        if names == {"convolution"}:
            able = [k for k in asked(layer.group(one.tree), framework) if k.form == POINTWISE]
            layer = layer._replace(kinds=(*layer.kinds, *able))
        elif names == {"depthwise"} and framework == "torch":
            # Keras's Conv2D(groups=channels) has a kernel for each group, as PyTorch's.
            able = [k for k in candidates(layer.group(one.tree), framework) if k.name == "convolution"]
            layer = layer._replace(kinds=(*layer.kinds, *able))
        made.append(layer)
    return tuple(made)


def _layers_alone(one: Side, other: Side) -> tuple[Layer, ...]:
    """Return a side's layers without those that names alone make, if the other has their vectors by name.

    A module with two vectors `gamma` and `beta` need not be a norm.
    """
    bare = {other.tree.names[path]: other.tree[path] for path in other.bare}

    def is_same(path: Path, leaf: Leaf) -> bool:
        found = bare.get(one.tree.names[path])
        return isinstance(found, Leaf) and found.shape == leaf.shape and len(leaf.shape) == 1

    return tuple(
        layer
        for layer in one.layers
        if layer.about.cls
        or layer.given
        or not all(is_same(layer.tensors[name], leaf) for name, leaf in layer.group(one.tree).items())
    )


def _in_two(one: Side, found: Sequence[Layer], other: Collection[object]) -> tuple[Layer, ...]:
    """Return a side's layers, separable convolutions as the two that they are if the other has none such.

    Only TensorFlow has one layer for both; modules of PyTorch that make one may have any names.
    """
    made: list[Layer] = []
    for layer, candidate in zip(found, one.candidates, strict=False):
        separable = _kind_names([layer]) == {"separable"} and layer.tensors.keys() >= _PARTS
        if not separable or candidate.signatures & frozenset(other):
            made.append(layer)
            continue
        framework = layer.kinds[0].framework
        for part in ("depthwise", "pointwise"):
            tensors = {"kernel": layer.tensors[f"{part}_kernel"]}
            if part == "pointwise" and "bias" in layer.tensors:
                tensors["bias"] = layer.tensors["bias"]
            half = layer._replace(name=(*layer.name, part), tensors=tensors)
            wanted = "convolution" if part == "pointwise" else "depthwise"
            fitting = [k for k in candidates(half.group(one.tree), framework) if k.name == wanted]
            made.append(half._replace(kinds=tuple(fitting)))
    return tuple(made)


_PARTS = frozenset(("depthwise_kernel", "pointwise_kernel"))


def fill_by_rules(tree: Tree, framework: str, skeleton: Skeleton, rules: RuleFile, **how: Any) -> Filling:
    """Return how a user's rules fill the skeleton.

    A rule's `to` is the name of a tensor in the model, with dots or slashes, and its `rule` is all that
    happens to the numbers. What no rule names is filled as `fill` does with `rest = "kinds"`, and else left.
    `how` are the options of `fill`. Raise MappingError for a name that the model does not have, or a shape
    that differs.
    """
    found = by_rules.applied(rules, tree)
    linked = {path for part in skeleton.parts for path in part.tensors.values()}
    names = {skeleton.tree.names[path]: path for path in linked}
    own = {
        "/".join((*part.name, name)): path for part in skeleton.parts for name, path in part.tensors.items()
    }
    places = {**names, **own}
    moves = []
    for source, name, rule in found.ways:
        place = places.get(name) or places.get(name.replace(".", "/"))
        if place is None:
            near = difflib.get_close_matches(name.replace(".", "/"), places, 1)
            raise MappingError(
                "the model has no tensor of this name",
                path=name,
                file=rules.path,
                hint=f'did you mean to = "{near[0]}"' if near else f"the model has {some(sorted(names), 6)}",
            )
        moves.append(Move(source, place, rule))
    leaves = dict(skeleton.tree.leaves)
    for path, leaf in build(tree, Plan(tuple(moves))).tensors():
        place_leaf = skeleton.tree[path]
        assert isinstance(place_leaf, Leaf)  # noqa: S101  # the modules' tensors
        if (leaf.dtype, leaf.shape) != (place_leaf.dtype, place_leaf.shape):
            shown = [f"{each.dtype}{list(each.shape)}" for each in (leaf, place_leaf)]
            error = Misfit(_sources(tree, moves, path), skeleton.tree.names[path], *shown).error
            error.hint = "the rules pair them"
            raise error
        leaves[path] = replace(place_leaf, source=leaf.source)
    filled = {move.target for move in moves}
    parts = [
        replace(part, tensors={n: path for n, path in part.tensors.items() if path not in filled})
        for part in skeleton.parts
    ]
    rest = Tree({path: tree[path] for path in found.rest}, {}, tree.containers)
    wanted = rest if rules.rest == "kinds" else Tree({}, {}, {})
    held = Tree(leaves, skeleton.tree.aliases, skeleton.tree.containers)
    other = fill(wanted, framework, Skeleton(skeleton.framework, held, parts), **how)
    left = () if rules.rest == "kinds" else tuple(p for p, leaf in rest.tensors() if leaf.role in STATES)
    matched = [Match(tree.names[m.source], skeleton.tree.names[m.target], BARE, "given") for m in moves]
    return replace(
        other,
        moves=(*moves, *other.moves),
        matched=(*matched, *other.matched),
        unused=(*other.unused, *left),
        evidence={**dict.fromkeys(filled, "given"), **other.evidence},
    )


def _assumed(theirs: Side, ours: Side, solution: Solution) -> Iterator[str]:
    """Go through sentences for pairs that rest on order, and for those that rest on a framework's count."""
    accepted = [pair for pair in solution.pairs if pair.by == "order"]
    for said, pairs in (
        ("order", accepted),
        ("numbers are the order of calls", solution.counted),
        ("numbers of both sides count the same layers", solution.numbered),
        ("the calls tell, and not the names", solution.renamed),
    ):
        if pairs:
            named = [f"{theirs.title(pair.source)} is {ours.title(pair.target)}" for pair in pairs]
            yield f"{said}: {some(named, _SAID)}"


def _unfit(theirs: Side, ours: Side, solution: Solution, framework: str) -> Iterator[str]:
    """Go through sentences for the target's layers that nothing in the source fits."""
    taken = {pair.source for pair in solution.pairs} | {n for g in solution.ambiguous for n in g.sources}
    filled = {pair.target for pair in solution.pairs} | {n for g in solution.ambiguous for n in g.targets}
    left = [n for n in range(len(theirs.candidates)) if n not in taken]
    named = some([f"{theirs.title(n)} ({theirs.spelled(n)})" for n in left], _SHOWN) or "nothing"
    open_ = [n for n in range(len(ours.candidates)) if n not in filled]
    for number in open_[:_SHOWN]:
        said = f"{ours.title(number)} ({ours.spelled(number)})"
        yield f"nothing in the source fits {said}; left there: {named}"
    bare = [theirs.bare[n - len(theirs.layers)] for n in left if n >= len(theirs.layers)]
    if open_ and (options := proposals(theirs.tree, framework, bare)):
        yield f"tensors of no layer: {' '.join(options[:_OPTIONS])} makes layers of them"


class _Made:
    """What the pairs come to; targets are places in the skeleton's tree."""

    def __init__(
        self, theirs: Side, ours: Side, places: Mapping[Path, Path], frameworks: tuple[str, str]
    ) -> None:
        self.theirs, self.ours, self.places = theirs, ours, places
        self._frameworks, self._foreign = frameworks, frameworks[0] != frameworks[1]
        self._reordered: dict[int, Reordering] = {}
        self.moves: list[Move] = []
        self.added: dict[Path, Leaf] = {}
        self.left: set[Path] = set()
        self.matched: list[Match] = []
        self.assumed: list[str] = []
        self.done: list[Layer] = []
        # Whether a matrix has the other orientation in a model of the same framework.
        self.turned = False
        self.both: list[tuple[Layer, Layer]] = []
        self.evidence: dict[Path, By] = {}
        self.notes = [
            f"{layer.title}: {kind.refused.replace(TITLE, layer.title)}"
            for layer in theirs.layers
            for kind in layer.kinds
            if kind.refused
        ]
        self._layers = list(theirs.layers)
        # Tied tensors of the target are filled once: who did it first.
        self._owners: dict[Path, list[Move]] = {}

    def known(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return the pairs without layers of which nobody knows whether they take or make a flattened image.

        The target's call tells what the source's layer takes; between trees of one framework nothing has to
        be known.
        """
        if not self._foreign:
            return list(pairs)
        own: dict[str, str] = {}
        for pair in self._of_layers(pairs):
            layer, target = self._layers[pair.source], self.ours.layers[pair.target]
            source_kind, _ = self._kinds(layer, target)
            if (target.told.takes, target.told.makes, target.told.flatten) == (None, None, None):
                # Of a model that was not called, sizes say what has to be known.
                layer = self._layers[pair.source] = layer._replace(told=followed(layer.told))
            try:
                made = reordering(self.theirs.tree, layer, source_kind, target.told, self._frameworks)
            except MappingError as error:
                own[layer.title] = error.message
                continue
            self._reordered[pair.source] = made
            # What a call of the target told, the source need not.
            takes = layer.told.takes or target.told.takes
            makes = layer.told.makes or target.told.makes
            flatten = target.told.flatten if layer.told.flatten is None else layer.told.flatten
            self._layers[pair.source] = layer._replace(
                told=layer.told._replace(flatten=flatten, takes=takes, makes=makes)
            )
        refused = {**unknown(self.theirs.tree, tuple(self._layers)), **own}
        asked = {self.theirs.title(pair.source) for pair in pairs} & refused.keys()
        self.notes += [sentence for title, sentence in refused.items() if title in asked]
        return [pair for pair in pairs if self.theirs.title(pair.source) not in asked]

    def _of_layers(self, pairs: Sequence[Pair]) -> Iterator[Pair]:
        return (pair for pair in pairs if pair.source < len(self._layers))

    def add(self, pair: Pair) -> None:
        """Take one pair: its moves, what it adds, and how it was found."""
        if pair.source >= len(self._layers):
            self._add_bare(pair)
            return
        layer, target = self._layers[pair.source], self.ours.layers[pair.target]
        source_kind, target_kind = self._kinds(layer, target)
        made = self._reordered.get(pair.source, Reordering())
        told = target.told._replace(flatten=made.flatten)
        # How a depthwise kernel divides is in the shapes of the one framework only.
        layer = layer._replace(told=layer.told._replace(flatten=made.flatten, wanted=target.told.wanted))
        done = converted(self.theirs.tree, layer, source_kind, target_kind, told, made.rules)
        self.assumed += made.assumed
        self.turned |= (
            not self._foreign
            and source_kind.form != target_kind.form
            and IN_OUT in (source_kind.form, target_kind.form)
        )
        self.done.append(layer._replace(kinds=(source_kind,)))
        self.both.append((self.done[-1], target._replace(kinds=(target_kind,))))
        self.matched.append(Match(layer.title, target.title, source_kind.name, pair.by))
        stored = {name: self.places[path] for name, path in target.tensors.items()}
        wanted = [Move(source, stored[name], rule) for source, name, rule in done.moves if name in stored]
        # What no other framework has, such as the count of a batch norm's batches, goes on in its own.
        own = {} if self._foreign else {n: layer.tensors[n] for n in done.added if n in layer.tensors}
        wanted += [Move(source, stored[name], KEEP) for name, source in own.items() if name in stored]
        mine: dict[Path, list[Move]] = {}
        for move in wanted:
            mine.setdefault(move.target, []).append(move)
        for place, moves in mine.items():
            if self._is_first(place, moves):
                self.moves += moves
                self.evidence[place] = pair.by
        self.added |= {
            stored[name]: leaf for name, leaf in done.added.items() if name in stored and name not in own
        }
        self.left |= {path for path in done.left if self._is_buffer(path)}
        self.assumed += done.assumed

    def _kinds(self, layer: Layer, target: Layer) -> tuple[Kind, Kind]:
        """Return as what the two are read and written: the target decides where the source is open."""
        for theirs in layer.kinds:
            wanted = signature(self.theirs.tree, layer, theirs)
            for ours in target.kinds:
                if wanted is not None and wanted == signature(self.ours.tree, target, ours):
                    return theirs, ours
        raise AssertionError("the solver pairs what fits")

    def _is_first(self, place: Path, moves: list[Move]) -> bool:
        """Say whether nothing filled the place yet; raise MappingError if something else did."""
        before = self._owners.setdefault(place, moves)
        if before is moves:
            return True
        one, other = (_value(self.theirs.tree, each) for each in (before, moves))
        if one != other:
            raise MappingError(
                "the model has one tensor where the source has two that differ",
                expected=self.theirs.tree.names[before[0].source],
                found=self.theirs.tree.names[moves[0].source],
            )
        self.left |= {move.source for move in moves}
        return False

    def _is_buffer(self, path: Path) -> bool:
        leaf = self.theirs.tree[path]
        return isinstance(leaf, Leaf) and leaf.role == "buffer"

    def _add_bare(self, pair: Pair) -> None:
        source = self.theirs.bare[pair.source - len(self._layers)]
        place = self.places[self.ours.bare[pair.target - len(self.ours.layers)]]
        leaf, name = self.theirs.tree[source], self.theirs.title(pair.source)
        self.matched.append(Match(name, self.ours.title(pair.target), BARE, pair.by))
        if self._foreign and isinstance(leaf, Leaf) and len(leaf.shape) > 1:
            self.assumed.append(f"{name}, which is no known layer's, has the same axes in the model")
        move = Move(source, place, KEEP)
        if self._is_first(place, [move]):
            self.moves.append(move)
            self.evidence[place] = pair.by


def _value(tree: Tree, moves: list[Move]) -> bytes:
    (leaf,) = build(tree, Plan(tuple(moves))).leaves.values()
    return bytes(leaf.read()) if isinstance(leaf, Leaf) else b""


def _filled(
    tree: Tree, skeleton: Tree, made: _Made, *, strict: bool, cast: bool
) -> tuple[Tree, Mapping[Path, Misfit]]:
    """Return the skeleton with the source's values, and the places that these do not fit.

    Numbers that a wider type of the model holds exactly become that, and with `cast` others are rounded.
    Raise MappingError for the first place that does not fit where `strict`; else numbers of another width
    fit.
    """
    casts: dict[Path, Cast] = {}
    leaves = dict(skeleton.leaves)
    unfit: dict[Path, Misfit] = {}
    added: Mapping[Path, Leaf | ValueLeaf] = made.added
    for moves in _rounds(made.moves):
        for path, leaf in build(tree, Plan(moves, added)).tensors():
            place = skeleton[path]
            if not isinstance(place, Leaf):
                continue
            if strict and place.shape == leaf.shape and dtypes.alike(place.dtype, leaf.dtype):
                exact = dtypes.widens(leaf.dtype, place.dtype)
                if place.dtype != leaf.dtype and (exact or cast):
                    casts[path] = Cast(place.dtype, rounded=not exact)
                    leaf = _cast(leaf, casts[path])
            same = place.dtype == leaf.dtype or (not strict and dtypes.alike(place.dtype, leaf.dtype))
            if same and place.shape == leaf.shape:
                leaves[path] = replace(place, dtype=leaf.dtype, source=leaf.source)
                continue
            names = _sources(tree, made.moves, path), skeleton.names[path]
            unfit[path] = Misfit(*names, *(f"{each.dtype}{list(each.shape)}" for each in (leaf, place)))
            if strict:
                wide = place.shape == leaf.shape and dtypes.alike(place.dtype, leaf.dtype)
                error = unfit[path].error
                error.hint = "--cast rounds to the model's type" if wide else error.hint
                raise error
        added = {}
    if casts:
        made.moves[:] = [
            move
            if move.target not in casts
            else Move(move.source, move.target, chain(move.rule, casts[move.target]))
            for move in made.moves
        ]
        for rule in dict.fromkeys(casts.values()):
            reached = [skeleton.names[path] for path, each in casts.items() if each == rule]
            what = "rounded" if rule.rounded else "exactly"
            made.notes.append(f"{rule.name} ({what}), the model's type: {some(reached, _SHOWN)}")
    return Tree(leaves, skeleton.aliases, skeleton.containers), unfit


def _cast(leaf: Leaf, rule: Cast) -> Leaf:
    made = rule.leaf(leaf)
    assert isinstance(made, Leaf)  # noqa: S101  # a tensor stays one
    return made


def _sources(tree: Tree, moves: Sequence[Move], target: Path) -> str:
    return some([tree.names[move.source] for move in moves if move.target == target], 3) or "nowhere"


def _rounds(moves: Sequence[Move]) -> Iterator[tuple[Move, ...]]:
    """Go through the moves in parts: a plan takes two places of one source for one shared tensor."""
    first: dict[tuple[Path, str], Path] = {}
    early: list[Move] = []
    late: list[Move] = []
    for move in moves:
        place = first.setdefault((move.source, move.rule.name), move.target)
        (early if place == move.target else late).append(move)
    yield tuple(early)
    for move in late:
        yield (move,)
