"""Filling a user's model."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.activations import NO_CALL, UNKNOWN, AxisOrder, CallPlace, Parts, WeightUse
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.digests import hash_tensor
from ckpttool.core.errors import MappingError, UsageError, abbreviate_list, did_you_mean
from ckpttool.core.kinds import list_kinds
from ckpttool.core.tree import Container, Leaf, Path, Tree, ValueLeaf, attr
from ckpttool.mapping import feature_orders, kind_notes, user_rules
from ckpttool.mapping.feature_orders import (
    AssumedParts,
    FeatureReordering,
    drop_unknown_orders,
    plan_reordering,
)
from ckpttool.mapping.flattening import (
    describe_image_sized_inputs,
    describe_pixel_shuffles,
    find_unknown_orders,
)
from ckpttool.mapping.kind_notes import layer_settings
from ckpttool.mapping.kind_table import NUMBERED, candidate_kinds, selectable_kinds
from ckpttool.mapping.layer_kinds import (
    IN_OUT,
    POINTWISE,
    WEIGHT_NORM,
    LayerFacts,
    LayerKind,
    LayerOption,
    Name,
    kernel_permutation,
)
from ckpttool.mapping.layers import (
    TITLE,
    Layer,
    ModuleInfo,
    canonical_tensors,
    convert_layer,
    describe_table,
    find_layers,
    find_modules,
    propose_options,
)
from ckpttool.mapping.rules import KEEP, Cast, Move, Permute, Plan, Reshape, Rule, apply_plan, chain_rules
from ckpttool.mapping.solver import (
    BIAS,
    FILE,
    PLACE,
    Ambiguity,
    By,
    FillResult,
    LayerCandidate,
    LayerMatch,
    LayerPair,
    Misfit,
    Signature,
    Solution,
    add_call_places,
    count_of_class,
    is_framework_counter,
    name_numbers,
    name_stem,
    name_tokens,
    part_depth,
    solve,
    steps_of_part,
)
from ckpttool.mapping.user_rules import RuleFile

BARE = "tensor"
STATES = ("parameter", "buffer")
# Their lengths follow from the others', or only one framework has them.
_SMALL = frozenset(("bias", "bias_input", "bias_recurrent"))
_NORMS = list_kinds("norm", "batch_norm")


class MatchSide(NamedTuple):
    """One side's layers, and its tensors outside of layers; `candidates` lists both in that order.

    `turned` are square kernels outside of layers that get the other framework's order of axes.
    """

    tree: Tree
    layers: tuple[Layer, ...]
    bare: tuple[Path, ...]
    candidates: tuple[LayerCandidate, ...]
    turned: frozenset[Path] = frozenset()

    @property
    def signatures(self) -> frozenset[Signature]:
        """The possible kinds and shapes of all candidates."""
        return frozenset(signature for candidate in self.candidates for signature in candidate.signatures)

    def title(self, number: int) -> str:
        """Return the displayed name of a layer or tensor."""
        if number < len(self.layers):
            return self.layers[number].title
        return self.tree.names[self.bare[number - len(self.layers)]]

    def spelled(self, number: int) -> str:
        """Return the possible kinds of a layer, in words."""
        signatures = self.candidates[number].signatures
        if not signatures and number < len(self.layers):
            why = next((kind.refused for kind in self.layers[number].kinds if kind.refused), None)
            return f"unknown kind: {why.replace(TITLE, self.title(number))}" if why else "unknown kind"
        return " or ".join(
            sorted(" ".join(map(_format_signature_part, signature)) for signature in signatures)
        )


def _format_signature_part(part: object) -> str:
    if isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
        return f"{part[0]} {list(part[1])}"
    return str(list(part)) if isinstance(part, tuple) else str(part)


def build_side(tree: Tree, layers: tuple[Layer, ...], *, in_order: bool = True) -> MatchSide:
    """Return a tree's layers and other tensors as match candidates, without slots and counters.

    With `in_order`, the tree lists its layers in the order of its model.
    """
    ranks = {n: n for n in range(len(layers))} if in_order else _class_ranks(tree, layers)
    within = {path for layer in layers for path in layer.tensors.values()}
    bare = tuple(p for p, leaf in tree.tensors() if leaf.role in STATES and p not in within)
    directions: dict[tuple[str, ...], set[bool]] = {}
    for layer in layers:
        if layer.part:
            directions.setdefault(layer.name, set()).add(layer.part.endswith("_reverse"))
    keys = [leaf.key for _, leaf in tree.tensors() if "/vars/" in leaf.key and leaf.role in STATES]
    candidates = [
        LayerCandidate(
            (*layer.name, *steps_of_part(layer.part, both=len(directions.get(layer.name, ())) > 1)),
            frozenset(s for kind in layer.kinds if (s := layer_signature(tree, layer, kind)) is not None),
            layer.title,
            ranks.get(number, -1),
            _call_place(tree, layer),
            settings=_comparable_settings(layer),
            listed=_is_saved_by_place(tree, layer, keys),
            created=_creation_places(tree, next(iter(layer.tensors.values())), number if in_order else -1),
        )
        for number, layer in enumerate(layers)
    ]
    for path in bare:
        leaf = tree[path]
        shape = leaf.shape if isinstance(leaf, Leaf) else ()
        name = tuple(tree.names[path].split("/"))
        use = leaf.use if isinstance(leaf, Leaf) else None
        call = NO_CALL if use is None else use.call
        created = _creation_places(tree, path, len(candidates) if in_order else -1)
        candidates.append(
            LayerCandidate(name, frozenset({(BARE, shape)}), call=call, lone=True, created=created)
        )
    return MatchSide(tree, layers, bare, tuple(candidates))


def _call_place(tree: Tree, layer: Layer) -> CallPlace:
    """Return the layer's place among the calls of its model, as its file's computation records it."""
    leaves = [tree[path] for path in layer.tensors.values()]
    uses = [leaf.use for leaf in leaves if isinstance(leaf, Leaf) and leaf.use is not None]
    calls = [use.call for use in uses if use.call.number >= 0]
    if not calls:
        return NO_CALL
    after = leads = own = 0
    for call in calls:
        after, leads, own = after | call.after, leads | call.leads, own | 1 << call.number
    return CallPlace(min(call.number for call in calls), after & ~own, leads)


def _comparable_settings(layer: Layer) -> frozenset[tuple[str, object]]:
    """Return the settings that must agree between two matching layers; epsilons are often changed."""
    settings: dict[str, object] = {
        name: value for name, value in layer_settings(layer).items() if name not in ("epsilon", "norm")
    }
    if _NORMS.isdisjoint(kind.name for kind in layer.kinds):  # whose offsets have other names
        settings[BIAS] = any("bias" in name for name in layer.tensors)
    return frozenset(settings.items())


def _is_saved_by_place(tree: Tree, layer: Layer, keys: Sequence[str]) -> bool:
    """Return whether a `.keras` or `.weights.h5` file stores the layer by its position in a list.

    An attribute name is not a position. If some layers of a model have attribute names, the model's
    own list contains the others in the order of their creation (keras/src/saving/saving_lib.py,
    _walk_saveable).
    """
    own = {leaf.key for path in layer.tensors.values() if isinstance(leaf := tree[path], Leaf)}
    for holder in {key_.rpartition("/vars/")[0] for key_ in own}:
        outer, _, step = holder.rpartition("/")
        if not is_framework_counter(step):
            return False
        model = outer.removesuffix("layers")
        if model != outer and any(k.startswith(model) and not k.startswith(outer) for k in keys):
            return False
    return all("/vars/" in key for key in own)


def _creation_places(tree: Tree, path: Path, number: int) -> frozenset[tuple[object, Any]]:
    """Return the positions of a layer's tensor in orders of creation: `number`, if not negative.

    A `.weights.h5` of Keras numbers the items of lists and the tensors of a layer; the own name of a layer
    that its program did not name is its class with the number of its creation, whatever attribute has it
    (keras/src/backend/common/name_scope.py, auto_name).
    """
    leaf, layer = tree[path], tree.containers.get(path[:-1])
    if not isinstance(leaf, Leaf) or "/vars/" not in leaf.key:
        return frozenset({(FILE, number)} if number >= 0 else ())
    steps = tuple(leaf.key.split("/"))
    own = layer.state.get("layer") if layer is not None and isinstance(layer.state, Mapping) else None
    counted = count_of_class(own) if isinstance(own, str) else None
    places = {(name_stem(steps), name_numbers(steps))} | ({counted} if counted is not None else set())
    return frozenset(places)


def _class_ranks(tree: Tree, layers: tuple[Layer, ...]) -> dict[int, int]:
    """Return the order of the layers that a `.weights.h5` of Keras numbers by class, as in the model's list.

    The groups of the file are numbered in that order, the layers' own names in the order of creation
    (keras/src/saving/saving_lib.py, _save_container_state).
    """
    stored: list[tuple[tuple[tuple[int, ...], ...], int]] = []
    for number, layer in enumerate(layers):
        leaf = tree[next(iter(layer.tensors.values()))]
        if not isinstance(leaf, Leaf) or "/vars/" not in leaf.key:
            return {}
        stored.append((name_numbers(tuple(leaf.key.rpartition("/vars/")[0].split("/"))), number))
    return {number: rank for rank, (_, number) in enumerate(sorted(stored))}


def layer_signature(tree: Tree, layer: Layer, kind: LayerKind) -> Signature | None:
    """Return the properties shared by two matching layers: the kind and the shapes of the large tensors."""
    if kind.refused is not None:
        return None
    try:
        tensors = canonical_tensors(tree, layer, kind)
    except MappingError:
        return None
    shapes = {n: leaf.shape for n, leaf in tensors.items() if n not in _SMALL and not n.endswith("_bias")}
    if kind.name == "depthwise" and "kernel" in shapes:
        # Channels times multiplier: only one framework records the two factors.
        *space, channels, multiplier = shapes["kernel"]
        return kind.name, (*space, channels * multiplier)
    if kind.name in _NORMS:
        # A norm may lack its scale or its offset; either one identifies it.
        return kind.name, next((leaf.shape for leaf in tensors.values()), ())
    return kind.name, *sorted(shapes.items())


@dataclass(frozen=True, slots=True)
class ModelModule:
    """One module of the model: its name, its framework's class, plain settings, its own tensors' paths.

    `orders` are those of its input features ("in") and output features ("out"), None if they could not be
    followed. `call` is its place among the calls of the model. `parts` are those of its input's features;
    `cut` means that the model uses its output in parts. `products` are the orders of the features that the
    tensors of an own class multiply, by their names.
    """

    name: Name
    cls: str
    settings: Mapping[str, Any]
    tensors: Mapping[str, Path]
    orders: Mapping[str, AxisOrder | None] = field(default_factory=dict)
    call: CallPlace = NO_CALL
    parts: Parts = ()
    cut: bool = False
    products: Mapping[str, AxisOrder] = field(default_factory=dict)

    def observed_orders(self) -> tuple[AxisOrder | None, AxisOrder | None]:
        """Return the orders of input and output: UNKNOWN if not followed, None if no call showed them."""
        takes, makes = (
            self.orders[side] or UNKNOWN if side in self.orders else None for side in ("in", "out")
        )
        return takes, makes


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A model as saved by its own framework: `tree` is the saved tree, `parts` its modules in order.

    `order` are its weights' paths with their positions in the framework's own list, which is the
    expression `weights`.
    """

    framework: str
    tree: Tree
    parts: Sequence[ModelModule]
    order: Mapping[Path, int] = field(default_factory=dict)
    weights: str = "model.weights"

    def named(self) -> tuple[Tree, Mapping[Path, Path]]:
        """Return the tensors by module and own name, each with its class, and their paths in `tree`."""
        leaves: dict[Path, Leaf | ValueLeaf] = {}
        places: dict[Path, Path] = {}
        containers: dict[Path, Container] = {}
        for part in self.parts:
            above = tuple(map(attr, part.name))
            containers[above] = Container("module", part.cls, dict(part.settings))
            for name, path in part.tensors.items():
                leaf = self.tree[path]
                if isinstance(leaf, Leaf) and name in part.products:
                    leaf = replace(leaf, use=WeightUse(part.products[name]))
                leaves[(*above, attr(name))] = leaf
                places[(*above, attr(name))] = path
        return Tree(leaves, containers=containers), places

    def layers(
        self,
        tree: Tree,
        options: Sequence[LayerOption] = (),
        *,
        classes: bool = True,
        composed: Iterable[str] = (),
    ) -> tuple[Layer, ...]:
        """Return the layers of `named`'s tree with all facts from the model's classes.

        See layers.layers for `options`, `classes` and `composed`.
        """
        parts = {part.name: part for part in self.parts}
        layers = find_layers(tree, self.framework, options, classes=classes, composed=composed)
        return tuple(_add_module_facts(layer, tree, parts) for layer in layers)


def _add_module_facts(layer: Layer, tree: Tree, parts: Mapping[Name, ModelModule]) -> Layer:
    part = parts.get(layer.name)
    heads = part.settings.get("num_heads") if part is not None else None
    shapes = {name: leaf.shape for name, leaf in layer.group(tree).items()}
    facts = LayerFacts(heads if isinstance(heads, int) else None, None, shapes)
    if part is not None:
        takes, makes = part.observed_orders()
        facts = facts._replace(takes=takes, makes=makes, parts=part.parts, cut=part.cut)
    return layer._replace(facts=facts)


_NORMED = "it uses weight norm: fill the model before you add that"
NO_SOURCE_LAYER = "no source layer fits"  # beginning of a note; load_into shows it first
_SHOWN = 3
_SAID = 6
_OPTIONS = 24


@dataclass(frozen=True, slots=True)
class FillSource:
    """The tree that fills a model.

    Args:
        tree: the tensors, by the source's own names.
        framework: the framework whose names and orientation the tree uses.
        in_order: the tree lists its layers in the order of creation.
        listed: numbers in the layers' names follow the calls of a graph.
        described: facts in the file about the module of each tensor.
    """

    tree: Tree
    framework: str
    in_order: bool = True
    listed: bool = False
    described: Mapping[Path, ModuleInfo] | None = None

    def side(self, layers: tuple[Layer, ...]) -> MatchSide:
        """Return the layers and the other tensors as candidates."""
        return build_side(self.tree, layers, in_order=self.in_order)


@dataclass(frozen=True, slots=True)
class MatchOptions:
    """Options for matching the layers of a source with those of a model.

    Args:
        choices: the user's options for layers, the source's and the model's.
        pairs: names of layers or modules to be paired.
        rules: the user's own rules, which take precedence.
        strict: raise MappingError for the first layer that does not fit; otherwise add it to the misfits.
        accept_order: pair layers by order if no other evidence decides (see solver.solve).
        by_creation: assume the order of creation if no other evidence decides (see solver.solve).
        cast: round numbers to the types of the model.
        decided: pairs of layers that the outputs of both models decided (see conversion/filling_by_outputs).
        part_orders: orders of parts that the outputs of both models decided.
    """

    choices: Sequence[LayerOption] = ()
    pairs: Sequence[tuple[str, str]] = ()
    rules: RuleFile | None = None
    strict: bool = True
    accept_order: bool = False
    by_creation: bool = False
    cast: bool = False
    decided: Sequence[tuple[str, str]] = ()
    part_orders: Sequence[tuple[AssumedParts, tuple[int, ...]]] = ()


def fill(source: FillSource, skeleton: Skeleton, options: MatchOptions) -> FillResult:
    """Return how the source fills the skeleton: by the user's rules if there are any, otherwise by layers.

    Raise MappingError if two tensors that a name or the user pairs have different shapes, or if
    numbers would be rounded; unless strict, these are the result's misfits, and the caller must
    handle numbers of another width.
    """
    if options.rules is not None:
        return _fill_by_rules(source, skeleton, options.rules, options)
    return _fill_by_layers(source, skeleton, options)


def _fill_by_layers(source: FillSource, skeleton: Skeleton, options: MatchOptions) -> FillResult:
    tree, (target, places) = source.tree, skeleton.named()
    source_side, target_side, by_outputs = _add_calls(
        *_build_sides(source, options.choices, target, skeleton), source, skeleton
    )
    solution = solve(
        source_side.candidates,
        target_side.candidates,
        in_order=source.in_order,
        pairs=(*options.pairs, *options.decided),
        accept_order=options.accept_order,
        by_creation=options.by_creation,
    )
    solution = solution._replace(
        pairs=tuple(p for p in solution.pairs if not _by_length(p, source_side, target_side))
    )
    if options.decided:
        solution = _name_decided(solution, source_side, target_side, {*options.decided})
    misfits = [
        Misfit(
            source_side.title(pair.source),
            target_side.title(pair.target),
            source_side.spelled(pair.source),
            target_side.spelled(pair.target),
        )
        for pair in solution.misfits
    ]
    if misfits and options.strict:
        raise misfits[0].error
    builder = _FillBuilder(
        source_side, target_side, places, (source.framework, skeleton.framework), options.part_orders
    )
    for pair in builder.known(solution.pairs):
        builder.add(pair)
    needs = builder.describe_layers()
    different = list(builder.different_settings())
    if different and options.strict:
        raise different[0].error
    filled, unfit = _apply_moves(tree, skeleton.tree, builder, strict=options.strict, cast=options.cast)
    reached = ({move.target for move in builder.moves} | builder.added.keys()) - unfit.keys()
    used = {move.source for move in builder.moves} | builder.left
    linked = set(places.values())
    unfilled = [path for path in skeleton.tree if path in linked and path not in reached]
    unused = [path for path, leaf in tree.tensors() if leaf.role in STATES and path not in used]
    own = dict(_own_tables(skeleton.tree, unfilled))
    left = {**dict(_own_tables(tree, unused)), **dict(_copies(tree, unused, used))}
    return FillResult(
        filled,
        tuple(builder.moves),
        tuple(builder.matched),
        tuple(
            Ambiguity(
                tuple(map(source_side.title, group.sources)),
                tuple(map(target_side.title, group.targets)),
                group.ordered,
                group.differ,
            )
            for group in solution.ambiguous
        ),
        tuple(path for path in unfilled if path not in own),
        tuple(path for path in unused if path not in left),
        (
            *_describe_assumptions(source_side, target_side, solution),
            *(("both models return their outputs in the same order",) if by_outputs else ()),
            *dict.fromkeys(builder.assumed),
            *(f"{skeleton.tree.names[path]}: {what}, kept from the model" for path, what in own.items()),
            *(f"{tree.names[path]}: {what}, left out" for path, what in left.items()),
        ),
        (*builder.notes, *needs, *_describe_unmatched(source_side, target_side, solution, source.framework)),
        (*misfits, *different, *unfit.values()),
        builder.evidence,
        tuple(builder.assumed_parts),
    )


def _own_tables(tree: Tree, paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield integer tables that the other model computes itself, and what they have."""
    for path in paths:
        leaf = tree[path]
        if isinstance(leaf, Leaf) and (what := describe_table(leaf)) is not None:
            yield path, f"integer table with {what}"


def without_buffers(filling: FillResult, source: Tree, model: Tree, constants: Sequence[str]) -> FillResult:
    """Return the filling if the model keeps its own buffers, and those of the source are left out.

    So are these constants of the source's graph. The assumptions state that outputs prove both.
    """
    source_buffers, model_buffers = (
        [path for path in paths if getattr(tree[path], "role", "") == "buffer"]
        for tree, paths in ((source, filling.unused), (model, filling.unfilled))
    )
    assumed = [*filling.assumed]
    if model_buffers:
        names = abbreviate_list([model.names[path] for path in model_buffers], _SHOWN)
        assumed.append(f"{names}: kept from the model, whose outputs are the source's with this")
    if left := [*(source.names[path] for path in source_buffers), *constants]:
        names = abbreviate_list(left, _SHOWN)
        assumed.append(f"{names}: left out, as the model's outputs are the source's without this")
    return replace(
        filling,
        unfilled=tuple(path for path in filling.unfilled if path not in model_buffers),
        unused=tuple(path for path in filling.unused if path not in source_buffers),
        assumed=tuple(assumed),
    )


def _copies(tree: Tree, unused: Iterable[Path], used: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Yield unused matrices with the bits of a used one: a tied layer that the file has several times."""
    every = ((path, tree[path]) for path in unused)
    matrices = [(path, leaf) for path, leaf in every if isinstance(leaf, Leaf) and len(leaf.shape) > 1]
    forms = {(leaf.dtype, leaf.shape) for _, leaf in matrices if leaf.size > 1}
    known: dict[tuple[object, ...], Path] = {}
    for path in used:
        leaf = tree[path]
        if isinstance(leaf, Leaf) and (leaf.dtype, leaf.shape) in forms:
            known.setdefault((leaf.dtype, leaf.shape, hash_tensor(leaf)), path)
    for path, leaf in matrices:
        if (other := known.get((leaf.dtype, leaf.shape, hash_tensor(leaf)))) is not None:
            values = leaf.array()
            if (values == values).all() and not (values == values.flat[0]).all():  # neither NaN nor constant
                yield path, f"same numbers as {tree.names[other]}"


def _by_length(pair: LayerPair, source: MatchSide, target: MatchSide) -> bool:
    """Return whether only their length pairs two vectors in different axes: no name, no place in calls."""
    one, other = source.candidates[pair.source], target.candidates[pair.target]
    if pair.by != "only fit" or not (one.lone and other.lone):
        return False
    bare = source.bare[pair.source - len(source.layers)], target.bare[pair.target - len(target.layers)]
    shapes = {
        getattr(side.tree[path], "shape", ()) for side, path in zip((source, target), bare, strict=True)
    }
    if any(len(_squeezed(shape)) > 1 for shape in shapes):
        return False
    placed = any(name == PLACE for name, _ in one.settings & other.settings)
    return len(shapes) > 1 and not (placed or name_tokens(one.name) & name_tokens(other.name))


def _name_decided(
    solution: Solution, source: MatchSide, target: MatchSide, decided: Collection[tuple[str, str]]
) -> Solution:
    """Return the solution with the evidence of the pairs that outputs decided."""
    pairs = (
        pair._replace(by="outputs")
        if pair.by == "given" and (source.title(pair.source), target.title(pair.target)) in decided
        else pair
        for pair in solution.pairs
    )
    return solution._replace(pairs=tuple(pairs))


def _add_calls(
    source_side: MatchSide, target_side: MatchSide, source: FillSource, skeleton: Skeleton
) -> tuple[MatchSide, MatchSide, bool]:
    """Return both sides with the positions of their layers in the calls of their models.

    The third result is whether the order of the models' outputs decides some of them.
    """
    if source.listed:
        source_side = source_side._replace(
            candidates=tuple(one._replace(listed=True) for one in source_side.candidates)
        )
    calls = {part.name: part.call for part in skeleton.parts if part.call.number >= 0}
    # A recurrent module calls its layers one after the other, each separately.
    depths: dict[Name, set[int]] = {}
    for layer in target_side.layers:
        depths.setdefault(layer.name, set()).add(part_depth(layer.part))
    stride = 1 + max((call.number for call in calls.values()), default=0)
    inner = {
        call.number: sum(1 << call.number + depth * stride for depth in depths[name])
        for name, call in calls.items()
        if depths.get(name, {0}) != {0}
    }
    wanting = list(target_side.candidates)
    for n, layer in enumerate(target_side.layers):
        if (call := calls.get(layer.name, NO_CALL)) is not NO_CALL:
            depth, after = part_depth(layer.part), call.after
            for number, bits in inner.items():
                after |= bits if number != call.number and after >> number & 1 else 0
            after |= sum(
                1 << call.number + offset * stride for offset in depths[layer.name] if offset < depth
            )
            wanting[n] = wanting[n]._replace(call=CallPlace(call.number + depth * stride, after, call.leads))
    # A lone tensor is used where its module is called, if the module has no other parts.
    owners = {
        path: part for part in skeleton.parts if part.call.number >= 0 for path in part.tensors.values()
    }
    inner_names = {part.name[:-1] for part in skeleton.parts if part.name}
    for n, path in enumerate(target_side.bare, start=len(target_side.layers)):
        if (owner := owners.get(path)) is not None and owner.name not in inner_names:
            wanting[n] = wanting[n]._replace(call=owner.call)
    having, wanting, by_outputs = add_call_places(source_side.candidates, wanting)
    source_side, target_side = (
        source_side._replace(candidates=tuple(having)),
        target_side._replace(candidates=tuple(wanting)),
    )
    return source_side, target_side, by_outputs


def _build_sides(
    source: FillSource, choices: Sequence[LayerOption], target: Tree, skeleton: Skeleton
) -> tuple[MatchSide, MatchSide]:
    """Return the candidates of both sides, in the same form where a kind has several forms.

    An attention may be one layer or several linear layers, a separable convolution two layers, a
    convolution with a window of one place a dense layer.
    """
    foreign, described = source.framework != skeleton.framework, source.described
    mine, target_layers = _find_both(source, choices, target, skeleton)
    source_side, target_side = source.side(mine), build_side(target, target_layers)

    def changed(change: Callable[[MatchSide, MatchSide], tuple[Layer, ...]]) -> tuple[MatchSide, MatchSide]:
        mine, target_layers = change(source_side, target_side), change(target_side, source_side)
        return (
            source_side if mine == source_side.layers else source.side(mine),
            target_side if target_layers == target_side.layers else build_side(target, target_layers),
        )

    source_side, target_side = changed(_drop_name_only_layers)
    source_side, target_side = changed(_drop_lone_tensors)
    if source.framework == "tensorflow" and foreign:
        source_side = source.side(_identify_numbered(source_side, target_side, described))
    if foreign:
        source_side, target_side = changed(_drop_bare_embeddings)
    source_side, target_side = changed(_use_alternative_forms)
    source_side, target_side = changed(_split_separable)
    if not foreign:
        return source_side, target_side
    source_side = _use_lone_forms(source_side, target_side, source.framework)
    return source_side, _use_lone_forms(target_side, source_side)


def _find_both(
    source: FillSource, choices: Sequence[LayerOption], target: Tree, skeleton: Skeleton
) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return the layers of both sides, combining several where the other side has a single layer for them."""
    classes = source.framework != skeleton.framework
    choices, own = _split_choices(source.tree, source.framework, choices, target, skeleton)

    def find(composed: Iterable[str] = ()) -> tuple[Layer, ...]:
        tree, framework = source.tree, source.framework
        return find_layers(tree, framework, choices, source.described, classes=classes, composed=composed)

    def find_own(composed: Iterable[str] = ()) -> tuple[Layer, ...]:
        return skeleton.layers(target, own, classes=classes, composed=composed)

    mine, target_layers = find(), find_own()
    names, others = _kind_names(mine), _kind_names(target_layers)
    if more := (others - names) & _SEVERAL:
        with contextlib.suppress(UsageError):
            mine = find(more)
    if more := (names - others) & _SEVERAL:
        target_layers = find_own(more)
    if more := _SEVERAL - names - others:
        # Neither side has a single layer for it: two ways to build it from several layers may differ. A layer
        # named by the user stays separate.
        with contextlib.suppress(UsageError):
            both = find(more), find_own(more)
            one, other = (_composed_forms(layers, more, foreign=classes) for layers in both)
            mine, target_layers = both if one and other and one != other else (mine, target_layers)
    return mine, target_layers


def _split_choices(
    tree: Tree, framework: str, choices: Sequence[LayerOption], target: Tree, skeleton: Skeleton
) -> tuple[Sequence[LayerOption], Sequence[LayerOption]]:
    """Return the options for the source's layers, and those about kinds for the model's layers.

    An option for an unknown name stays with the source, which raises the error.
    """
    if not any(choice.kind for choice in choices):
        return choices, ()
    mine = [layer.title for layer in find_layers(tree, framework)]
    # For the model, only options that its class leaves open.
    titles = [layer.title for layer in skeleton.layers(target) if all(kind.refused for kind in layer.kinds)]
    own = [choice for choice in choices if choice.kind and any(map(choice.fits, titles))]
    return [choice for choice in choices if choice not in own or any(map(choice.fits, mine))], own


def _identify_numbered(
    source: MatchSide, target: MatchSide, described: Mapping[Path, ModuleInfo] | None
) -> tuple[Layer, ...]:
    """Return the source's layers, including those of numbered variables that match layers of the model.

    A single vector stays as it is if the model has such a tensor outside of layers.
    """
    target_signatures = target.signatures
    known = {layer.name for layer in source.layers}
    layers = list(source.layers)
    for module in find_modules(source.tree, "tensorflow", {}, described):
        group = module.group(source.tree)
        numbered = bool(group) and all(name.startswith("vars/") for name in group)
        if not numbered or module.name in known or module.about.cls:
            continue
        first = next(iter(group.values()))
        if len(group) == 1 and (BARE, first.shape) in target_signatures:
            continue
        able = []
        for kind in NUMBERED:
            layer = module._replace(kinds=(kind,))
            if kind.fits(group) and layer_signature(source.tree, layer, kind) in target_signatures:
                able.append(kind)
        if able:
            layers.append(module._replace(kinds=tuple(able)))
    places = {path: n for n, path in enumerate(source.tree)}
    return tuple(sorted(layers, key=lambda layer: min(places[path] for path in layer.tensors.values())))


_SEVERAL = frozenset(("attention", "separable"))


def _kind_names(layers: Sequence[Layer]) -> frozenset[str]:
    return frozenset(kind.name for layer in layers for kind in layer.kinds)


def _composed_forms(
    layers: Sequence[Layer], names: Collection[str], *, foreign: bool
) -> frozenset[frozenset[str] | int]:
    """Return how the layers of these kinds are composed: the names of tensors, or only their number."""
    composed = [layer for layer in layers if _kind_names([layer]) <= frozenset(names)]
    kernels = [frozenset(name for name in layer.tensors if "bias" not in name) for layer in composed]
    return frozenset(len(one) if foreign else one for one in kernels)


def _drop_bare_embeddings(one: MatchSide, other: MatchSide) -> tuple[Layer, ...]:
    """Return a side's layers without the embedding tables that the other side stores outside of layers.

    Transformers' TensorFlow models have a separate variable for each. Both sides have the same axes
    where these differ in length; a square table stays a layer.
    """
    there = other.signatures
    left = []
    for layer, candidate in zip(one.layers, one.candidates, strict=False):
        group = layer.group(one.tree)
        shapes = [leaf.shape for leaf in group.values() if "embedding" in _kind_names([layer])]
        alone = len(layer.tensors) == 1 and not candidate.signatures & there
        is_table = any(len({*shape}) == 2 and (BARE, shape) in there for shape in shapes)
        if not (alone and is_table):
            left.append(layer)
    return tuple(left)


def _use_alternative_forms(one: MatchSide, other: MatchSide) -> tuple[Layer, ...]:
    """Return a side's layers, changed to the other form where the other side has no such layer.

    A convolution with a window of one place may be a dense layer, a depthwise one a grouped
    convolution.
    """
    alternatives, there = [], other.signatures
    for layer, candidate in zip(one.layers, one.candidates, strict=False):
        names, framework = _kind_names([layer]), layer.kinds[0].framework
        if candidate.signatures & there or layer.kinds[0].refused or layer.is_given:
            alternatives.append(layer)
            continue
        if names == {"convolution"}:
            able = [k for k in selectable_kinds(layer.group(one.tree), framework) if k.form == POINTWISE]
            layer = layer._replace(kinds=(*layer.kinds, *able))
        elif names == {"depthwise"} and framework == "torch":
            # Keras's Conv2D(groups=channels) has one kernel per group, like PyTorch's.
            able = [k for k in candidate_kinds(layer.group(one.tree), framework) if k.name == "convolution"]
            layer = layer._replace(kinds=(*layer.kinds, *able))
        alternatives.append(layer)
    return tuple(alternatives)


def _drop_name_only_layers(one: MatchSide, other: MatchSide) -> tuple[Layer, ...]:
    """Return a side's layers without those found only by name, if the other side has the vectors by name.

    A module with two vectors `gamma` and `beta` is not necessarily a norm, nor is a whole model with a vector
    `scale`, whatever its class.
    """
    bare = {other.tree.names[path]: other.tree[path] for path in other.bare}

    def is_same(path: Path, leaf: Leaf) -> bool:
        name = one.tree.names[path]
        other = bare.get(name) or bare.get(name.rpartition("/")[2])
        return isinstance(other, Leaf) and other.shape == leaf.shape and len(leaf.shape) == 1

    return tuple(
        layer
        for layer in one.layers
        if (layer.about.cls and not all(kind.refused for kind in layer.kinds))
        or layer.is_given
        or not all(is_same(layer.tensors[name], leaf) for name, leaf in layer.group(one.tree).items())
    )


def _drop_lone_tensors(one: MatchSide, other: MatchSide) -> tuple[Layer, ...]:
    """Return a side's layers without tensors of own classes that the other side stores outside of layers.

    A scale that one program makes a layer is a parameter of a block in another one, and so are the matrices
    of a noisy layer or of a model that calls functions.
    """
    there, forms = other.signatures, _squeezed_signatures(other)
    left = []
    for layer, candidate in zip(one.layers, one.candidates, strict=False):
        shapes = [leaf.shape for leaf in layer.group(one.tree).values()]
        own = not layer.about.cls or all(kind.refused for kind in layer.kinds)
        free = own and not layer.is_given and candidate.signatures.isdisjoint(there)
        # Several vectors are one norm or one affine map.
        lone = len(shapes) == 1 or any(len(shape) > 1 for shape in shapes)
        # The axes of a layer's square matrix would be a guess.
        lone = lone and not any(len(shape) == 2 and shape[0] == shape[1] for shape in shapes)
        framework = layer.kinds[0].framework
        if not (free and lone and all(_lone_forms(shape, framework) & forms for shape in shapes)):
            left.append(layer)
    return tuple(left)


def _lone_forms(shape: tuple[int, ...], framework: str) -> frozenset[Signature]:
    """Return the signatures that a tensor outside of layers may have in a program of the other framework.

    PyTorch scales the channels of images by `[96, 1, 1]`, Keras by `[96]`; kernels have other axes.
    """
    turned = _turned_kernel(len(shape), framework).output("", shape)[1] if framework else shape
    return frozenset((BARE, form) for form in (shape, turned, _squeezed(shape)))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without axes of extent 1."""
    return tuple(extent for extent in shape if extent != 1)


def _squeezed_signatures(side: MatchSide) -> frozenset[Signature]:
    """Return the signatures of a side, those of lone tensors also without axes of extent 1."""
    shapes = (signature[1] for signature in side.signatures if signature[0] == BARE)
    return side.signatures | {(BARE, _squeezed(shape)) for shape in shapes if isinstance(shape, tuple)}


def _takes_image(rows: int, channels: Collection[int]) -> bool:
    """Return whether a matrix with these rows may take an image with one of these numbers of channels."""
    return any(0 < count < rows and rows % count == 0 for count in channels)


def _are_orders_recorded(leaf: Leaf | ValueLeaf, other: MatchSide) -> bool:
    """Return whether both models record the same images in the rows of a matrix and all it may fill."""
    shape = leaf.shape[::-1] if isinstance(leaf, Leaf) else ()
    able = [own for path in other.bare if isinstance(own := other.tree[path], Leaf) and own.shape == shape]
    return bool(able) and all(_matrix_rows(leaf, own) is not None for own in able)


def _matrix_rows(leaf: Leaf | ValueLeaf, own: Leaf | ValueLeaf) -> tuple[AxisOrder, AxisOrder] | None:
    """Return the recorded orders of what two matrices multiply, None unless both have the same images."""
    uses = [tensor.use for tensor in (leaf, own) if isinstance(tensor, Leaf) and tensor.use is not None]
    orders = [use.takes for use in uses if use.takes not in (None, UNKNOWN)]
    if len(orders) < 2 or orders[0] is None or orders[1] is None or orders[0].parts != orders[1].parts:
        return None
    return orders[0], orders[1]


def _turned_kernel(rank: int, framework: str) -> Permute:
    """Return the rule from a kernel of a framework to that of the other one; vectors stay as they are."""
    permutation = kernel_permutation(rank - 2) if rank > 1 else Permute(tuple(range(rank)))
    return permutation if framework == "torch" else Permute(permutation.inverse_axes)


def _use_lone_forms(one: MatchSide, other: MatchSide, framework: str = "") -> MatchSide:
    """Return a side whose lone tensors have the form of the other framework's if it has only that.

    With a framework, kernels are turned as well: where their shapes show it, and square ones that have the
    name of such a kernel. A matrix that may take a flattened image is excluded, unless the computations
    of both models record the order of its rows.
    """
    there = _squeezed_signatures(other)
    shapes = [leaf.shape for _, leaf in one.tree.tensors() if leaf.role in STATES]
    channels = {shape[0 if framework == "torch" else -1] for shape in shapes if len(shape) > 2}
    candidates, stems, squares = list(one.candidates), set[str](), dict[Path, str]()
    for number, path in enumerate(one.bare, start=len(one.layers)):
        candidate, leaf = candidates[number], one.tree[path]
        shape = leaf.shape if isinstance(leaf, Leaf) else ()
        forms, stem = _lone_forms(shape, framework), name_stem(candidate.name)[-1]
        if (BARE, shape) in other.signatures:
            if (
                framework
                and len(shape) > 1
                and shape == _turned_kernel(len(shape), framework).output("", shape)[1]
            ):
                squares[path] = stem
        elif len(fitting := forms & there) == 1 and not (
            framework
            and len(shape) == 2
            and _takes_image(shape[framework == "torch"], channels)
            and not _are_orders_recorded(leaf, other)
        ):
            candidates[number] = candidate._replace(signatures=fitting)
            stems |= {stem} - ({stem} if (BARE, _squeezed(shape)) in fitting else set())
    turned = frozenset(path for path, stem in squares.items() if stem in stems)
    return one._replace(candidates=tuple(candidates), turned=turned)


def _split_separable(one: MatchSide, other: MatchSide) -> tuple[Layer, ...]:
    """Return a side's layers, with separable convolutions split in two if the other side has none.

    Only TensorFlow has one layer for both; PyTorch modules that form one may have any names.
    """
    halves: list[Layer] = []
    there = other.signatures
    for layer, candidate in zip(one.layers, one.candidates, strict=False):
        separable = _kind_names([layer]) == {"separable"} and layer.tensors.keys() >= _PARTS
        if not separable or candidate.signatures & there:
            halves.append(layer)
            continue
        framework = layer.kinds[0].framework
        for part in ("depthwise", "pointwise"):
            tensors = {"kernel": layer.tensors[f"{part}_kernel"]}
            if part == "pointwise" and "bias" in layer.tensors:
                tensors["bias"] = layer.tensors["bias"]
            half = layer._replace(name=(*layer.name, part), tensors=tensors)
            kind_name = "convolution" if part == "pointwise" else "depthwise"
            fitting = [k for k in candidate_kinds(half.group(one.tree), framework) if k.name == kind_name]
            halves.append(half._replace(kinds=tuple(fitting)))
    return tuple(halves)


_PARTS = frozenset(("depthwise_kernel", "pointwise_kernel"))


def _fill_by_rules(
    source: FillSource, skeleton: Skeleton, rules: RuleFile, options: MatchOptions
) -> FillResult:
    """Return how a user's rules fill the skeleton.

    A rule's `to` is the name of a tensor in the model, with dots or slashes, and its `rule` is the
    only change to the numbers. Tensors without a rule are filled by layers with `rest = "kinds"`, and
    otherwise left. Raise MappingError for a name that the model does not have, or for a different
    shape.
    """
    tree = source.tree
    outcome = user_rules.apply_rules(rules, tree)
    moves = list(_rule_moves(skeleton, rules, outcome.ways))
    partial = Tree(_checked_values(tree, skeleton, moves), skeleton.tree.aliases, skeleton.tree.containers)
    filled = {move.target for move in moves}
    parts = [
        replace(part, tensors={n: path for n, path in part.tensors.items() if path not in filled})
        for part in skeleton.parts
    ]
    rest = Tree({path: tree[path] for path in outcome.rest}, {}, tree.containers)
    by_layers = replace(source, tree=rest if rules.rest == "kinds" else Tree({}, {}, {}))
    other = _fill_by_layers(by_layers, Skeleton(skeleton.framework, partial, parts), options)
    left = () if rules.rest == "kinds" else tuple(p for p, leaf in rest.tensors() if leaf.role in STATES)
    matched = [LayerMatch(tree.names[m.source], skeleton.tree.names[m.target], BARE, "given") for m in moves]
    return replace(
        other,
        moves=(*moves, *other.moves),
        matched=(*matched, *other.matched),
        unused=(*other.unused, *left),
        evidence={**dict.fromkeys(filled, "given"), **other.evidence},
    )


def _rule_moves(
    skeleton: Skeleton, rules: RuleFile, ways: Iterable[tuple[Path, str, Rule]]
) -> Iterator[Move]:
    """Yield the moves to the model's tensors named in the rules, by names in a file or in the modules."""
    linked = {path for part in skeleton.parts for path in part.tensors.values()}
    names = {skeleton.tree.names[path]: path for path in linked}
    own = {
        "/".join((*part.name, name)): path for part in skeleton.parts for name, path in part.tensors.items()
    }
    places = {**names, **own}
    for source, name, rule in ways:
        target = places.get(name) or places.get(name.replace(".", "/"))
        if target is None:
            near = difflib.get_close_matches(name.replace(".", "/"), places, 1)
            raise MappingError(
                "the model has no tensor with this name",
                path=name,
                file=rules.path,
                hint=did_you_mean(f'to = "{near[0]}"')
                if near
                else f"choose from {abbreviate_list(sorted(names), 6)}",
            )
        yield Move(source, target, rule)


def _checked_values(tree: Tree, skeleton: Skeleton, moves: Sequence[Move]) -> dict[Path, Leaf | ValueLeaf]:
    """Return the model's leaves with the moved tensors; raise MappingError if type or shape differs."""
    leaves = dict(skeleton.tree.leaves)
    for path, leaf in apply_plan(tree, Plan(tuple(moves))).tensors():
        target = skeleton.tree[path]
        assert isinstance(target, Leaf)  # noqa: S101  # the modules' tensors
        if (leaf.dtype, leaf.shape) != (target.dtype, target.shape):
            shown = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in (leaf, target)]
            error = Misfit(_format_sources(tree, moves, path), skeleton.tree.names[path], *shown).error
            error.hint = "the pair comes from a rule in your rule file"
            raise error
        leaves[path] = replace(target, source=leaf.source)
    return leaves


def _describe_assumptions(source: MatchSide, target: MatchSide, solution: Solution) -> Iterator[str]:
    """Yield a sentence for pairs based on order, and for those based on a framework's numbering."""
    orders = {by: [pair for pair in solution.pairs if pair.by == by] for by in ("order", "creation")}
    for reason, pairs in (
        ("order", orders["order"]),
        ("created in the order of the model's calls (for others: --match SOURCE=TARGET)", orders["creation"]),
        ("numbers follow the order of calls", solution.counted),
        ("numbers count the same layers on both sides", solution.numbered),
        ("paired by the order of calls, not by name", solution.renamed),
        ("paired as their modules, not by words of their names", solution.inner),
        ("batch norms are paired as the layers of which they have the name or the place", solution.normed),
    ):
        if pairs:
            named = [f"{source.title(pair.source)} -> {target.title(pair.target)}" for pair in pairs]
            yield f"{reason}: {abbreviate_list(named, _SAID)}"


def _describe_unmatched(
    source: MatchSide, target: MatchSide, solution: Solution, framework: str
) -> Iterator[str]:
    """Yield a sentence for each target layer that no source layer fits."""
    matched = {pair.source for pair in solution.pairs} | {n for g in solution.ambiguous for n in g.sources}
    filled = {pair.target for pair in solution.pairs} | {n for g in solution.ambiguous for n in g.targets}
    left = [n for n in range(len(source.candidates)) if n not in matched]
    named = abbreviate_list([f"{source.title(n)} ({source.spelled(n)})" for n in left], _SHOWN) or "nothing"
    open_ = [n for n in range(len(target.candidates)) if n not in filled]
    for number in open_[:_SHOWN]:
        spelled = target.spelled(number).replace(WEIGHT_NORM, _NORMED)
        sentence = f"{target.title(number)} ({spelled})"
        yield f"{NO_SOURCE_LAYER} {sentence}; unused source layers: {named}"
    bare = [source.bare[n - len(source.layers)] for n in left if n >= len(source.layers)]
    if open_ and (options := propose_options(source.tree, framework, bare)):
        yield f"tensors outside any layer: use {' '.join(options[:_OPTIONS])} to treat them as layers"


class _FillBuilder:
    """Result of the pairs; targets are paths in the skeleton's tree."""

    def __init__(
        self,
        source: MatchSide,
        target: MatchSide,
        places: Mapping[Path, Path],
        frameworks: tuple[str, str],
        part_orders: Sequence[tuple[AssumedParts, tuple[int, ...]]] = (),
    ) -> None:
        self.source, self.target, self.places = source, target, places
        self._part_orders = part_orders
        self.assumed_parts: list[AssumedParts] = []
        self._frameworks, self._foreign = frameworks, frameworks[0] != frameworks[1]
        self._reordered: dict[int, FeatureReordering] = {}
        self._partners: dict[int, int] = {}
        self.moves: list[Move] = []
        self.added: dict[Path, Leaf] = {}
        self.left: set[Path] = set()
        self.matched: list[LayerMatch] = []
        self.assumed: list[str] = []
        self.done: list[Layer] = []
        # Whether a matrix has the other orientation in a model of the same framework.
        self.turned = False
        self.both: list[tuple[Layer, Layer]] = []
        self.evidence: dict[Path, By] = {}
        self.notes = [
            f"{layer.title}: {kind.refused.replace(TITLE, layer.title)}"
            for layer in source.layers
            for kind in layer.kinds
            if kind.refused
        ]
        self._layers = list(source.layers)
        # Tied tensors of the target are filled once: the moves that did so first.
        self._owners: dict[Path, list[Move]] = {}

    def known(self, pairs: Sequence[LayerPair]) -> list[LayerPair]:
        """Return the pairs without layers whose flattened image, as input or output, is unknown.

        The target's call shows the input of the source's layer; between trees of the same framework no
        knowledge is needed.
        """
        if not self._foreign:
            for layer in self._layers:
                list(feature_orders.stated_parts(layer, ()))
            return list(pairs)
        own: dict[str, str] = {}
        for pair in (pair for pair in pairs if pair.source < len(self._layers)):
            layer, target = self._layers[pair.source], self.target.layers[pair.target]
            source_kind, _ = self._kinds(layer, target)
            if target.facts.takes is None and target.facts.makes is None:
                # For a model that was not called, sizes show what has to be determined.
                layer = self._layers[pair.source] = layer._replace(facts=drop_unknown_orders(layer.facts))
            try:
                order = plan_reordering(self.source.tree, layer, source_kind, target.facts, self._frameworks)
            except MappingError as error:
                own[layer.title] = error.message
                continue
            self._reordered[pair.source] = self._arrange_parts(pair, order, pairs)
            # Order observed in a call of the target, so that the source need not record it.
            takes = layer.facts.takes or target.facts.takes
            makes = layer.facts.makes or target.facts.makes
            self._layers[pair.source] = layer._replace(facts=layer.facts._replace(takes=takes, makes=makes))
        refused = {**find_unknown_orders(self.source.tree, tuple(self._layers)), **own}
        requested = {self.source.title(pair.source) for pair in pairs} & refused.keys()
        self.notes += [sentence for title, sentence in refused.items() if title in requested]
        return [pair for pair in pairs if self.source.title(pair.source) not in requested]

    def _arrange_parts(
        self, pair: LayerPair, reordering: FeatureReordering, pairs: Sequence[LayerPair]
    ) -> FeatureReordering:
        """Return the reordering with that of parts which the two models join in different orders."""
        layer, target = self._layers[pair.source], self.target.layers[pair.target]
        kind, _ = self._kinds(layer, target)
        if not self._partners:
            self._partners.update(self._calls_of_partners(pairs))
        facts_of_parts = tuple(
            part._replace(number=self._partners.get(part.number, -1)) if part.origin == "call" else part
            for part in layer.facts.parts
        )
        shapes = {name: leaf.shape for name, leaf in canonical_tensors(self.source.tree, layer, kind).items()}
        if "kernel" not in shapes:
            return reordering
        arranged = feature_orders.arrange_parts(
            layer, kind, reordering, facts_of_parts, target.facts, shapes["kernel"]
        )
        stated = list(feature_orders.stated_parts(layer, arranged.assumed_parts))
        decided = [row for row in self._part_orders if row[0] in arranged.assumed_parts]
        for by, rows in (("as stated", stated), ("by outputs", decided)):
            for parts, order in rows:
                numbers = ", ".join(str(part + 1) for part in order)
                self.notes.append(
                    f"{by}: {layer.title} {parts.side} the model's parts {numbers} in this order"
                )
                arranged = _with_parts_in_order(arranged, parts, order, shapes)
        self.assumed_parts += arranged.assumed_parts
        for parts in arranged.assumed_parts:
            if sorted(parts.orders[0]) != [*parts.orders[0]]:  # only this order has the sizes
                rules = _with_parts_in_order(arranged, parts, parts.orders[0], shapes).rules
                arranged = arranged._replace(rules=rules)
        return arranged

    def _calls_of_partners(self, pairs: Sequence[LayerPair]) -> Iterator[tuple[int, int]]:
        """Yield the calls of the source's layers, each with that of the paired layer in the target."""
        for pair in pairs:
            for path in self._layers[pair.source].tensors.values() if pair.source < len(self._layers) else ():
                leaf = self.source.tree[path]
                use = leaf.use if isinstance(leaf, Leaf) else None
                if use is not None and use.call.number >= 0:
                    yield use.call.number, self.target.candidates[pair.target].call.number

    def add(self, pair: LayerPair) -> None:
        """Add one pair: its moves, its additional tensors, and its evidence."""
        if pair.source >= len(self._layers):
            self._add_bare(pair)
            return
        layer, target = self._layers[pair.source], self.target.layers[pair.target]
        source_kind, target_kind = self._kinds(layer, target)
        order = self._reordered.get(pair.source, FeatureReordering())
        facts = target.facts._replace(flatten=order.flatten)
        # Only one framework's shapes show how a depthwise kernel is divided.
        layer = layer._replace(
            facts=layer.facts._replace(flatten=order.flatten, target_shapes=target.facts.target_shapes)
        )
        done = convert_layer(self.source.tree, layer, source_kind, target_kind, facts, order.rules)
        self.assumed += order.assumed
        self.turned |= (
            not self._foreign
            and source_kind.form != target_kind.form
            and IN_OUT in (source_kind.form, target_kind.form)
        )
        self.done.append(layer._replace(kinds=(source_kind,)))
        self.both.append((self.done[-1], target._replace(kinds=(target_kind,))))
        self.matched.append(LayerMatch(layer.title, target.title, source_kind.name, pair.by))
        stored = {name: self.places[path] for name, path in target.tensors.items()}
        named_moves = [
            Move(source, stored[name], rule) for source, name, rule in done.moves if name in stored
        ]
        # Tensors that only this framework has, such as a batch norm's count of batches.
        own = {} if self._foreign else {n: layer.tensors[n] for n in done.added if n in layer.tensors}
        named_moves += [Move(source, stored[name], KEEP) for name, source in own.items() if name in stored]
        mine: dict[Path, list[Move]] = {}
        for move in named_moves:
            mine.setdefault(move.target, []).append(move)
        for path, moves in mine.items():
            if self._is_first(path, moves):
                self.moves += moves
                self.evidence[path] = pair.by
        self.added |= {
            stored[name]: leaf for name, leaf in done.added.items() if name in stored and name not in own
        }
        left = ((path, self.source.tree[path]) for path in done.left)
        self.left |= {path for path, leaf in left if isinstance(leaf, Leaf) and leaf.role == "buffer"}
        self.assumed += [f"{layer.title}: {sentence}" for sentence in done.assumed]

    def describe_layers(self) -> Sequence[str]:
        """Record the assumptions about matched layers; return notes on the requirements of their kinds."""
        tree, done = self.source.tree, self.done
        # These differences do not exist between two models of the same framework.
        needs = kind_notes.describe_kinds(done) if self._foreign else ()
        if self._foreign or self.turned:
            self.assumed += kind_notes.describe_assumed_classes(
                [(layer, layer.group(tree)) for layer in done]
            )
        if self._foreign:
            self.assumed += describe_image_sized_inputs(tree, tuple(done))
            self.assumed += describe_pixel_shuffles(tree, tuple(done))
            targets = [target for _, target in self.both]
            self.assumed += kind_notes.describe_assumed_products(targets, self.target.tree)
        self.assumed += kind_notes.describe_differences(self.both, foreign=self._foreign)
        self.assumed += kind_notes.describe_own_calls(target for _, target in self.both)
        return tuple(needs)

    def different_settings(self) -> Iterator[Misfit]:
        """Yield the recorded settings in which a layer and its match differ."""
        for source, target in self.both:
            for name, source_value, target_value in kind_notes.recorded_differences(source, target):
                yield Misfit(source.title, target.title, source_value, target_value, name)

    def _kinds(self, layer: Layer, target: Layer) -> tuple[LayerKind, LayerKind]:
        """Return the kinds for reading and writing; the target decides if the source is ambiguous."""
        for source_kind in layer.kinds:
            signature = layer_signature(self.source.tree, layer, source_kind)
            for target_kind in target.kinds:
                if signature is not None and signature == layer_signature(
                    self.target.tree, target, target_kind
                ):
                    return source_kind, target_kind
        raise AssertionError("the solver pairs what fits")

    def _is_first(self, path: Path, moves: list[Move]) -> bool:
        """Return whether the place is still empty; raise MappingError if it was filled with other values."""
        before = self._owners.setdefault(path, moves)
        if before is moves:
            return True
        one, other = (_read_value(self.source.tree, move) for move in (before, moves))
        if one != other:
            raise MappingError(
                "the model has one shared tensor where the source has two different ones",
                expected=self.source.tree.names[before[0].source],
                found=self.source.tree.names[moves[0].source],
            )
        self.left |= {move.source for move in moves}
        return False

    def _add_bare(self, pair: LayerPair) -> None:
        source = self.source.bare[pair.source - len(self._layers)]
        path = self.places[self.target.bare[pair.target - len(self.target.layers)]]
        leaf, name = self.source.tree[source], self.source.title(pair.source)
        self.matched.append(LayerMatch(name, self.target.title(pair.target), BARE, pair.by))
        own = self.target.tree[self.target.bare[pair.target - len(self.target.layers)]]
        rule: Rule = KEEP
        if self._foreign and isinstance(leaf, Leaf) and isinstance(own, Leaf):
            extents = f"{list(leaf.shape)} here, {list(own.shape)} in the model"
            if leaf.shape != own.shape and _squeezed(leaf.shape) == _squeezed(own.shape):
                rule, reason = Reshape(own.shape), f"axes of extent 1, {extents}"
            elif leaf.shape != own.shape or source in self.source.turned:
                rule = _turned_kernel(len(leaf.shape), self._frameworks[0])
                if len(leaf.shape) == 2 and (rows := _matrix_rows(leaf, own)) is not None:
                    axis = 0 if self._frameworks[1] == "tensorflow" else 1
                    rule = chain_rules(rule, feature_orders.order_rule(axis, *rows))
                reason = f"not part of a known layer, taken as a kernel with its framework's axes, {extents}"
            else:
                reason = "not part of a known layer, so its axes stay as they are"
            if len(leaf.shape) > 1 or rule is not KEEP:
                self.assumed.append(f"{name}: {reason}")
        move = Move(source, path, rule)
        if self._is_first(path, [move]):
            self.moves.append(move)
            self.evidence[path] = pair.by


def _with_parts_in_order(
    reordering: FeatureReordering,
    parts: AssumedParts,
    order: Sequence[int],
    shapes: Mapping[str, tuple[int, ...]],
) -> FeatureReordering:
    """Return the reordering with that of parts whose order in the source is known."""
    rank, rules = len(shapes["kernel"]), dict(reordering.rules)
    places = {"kernel": rank - 2} if parts.side == "takes" else {"kernel": rank - 1, "bias": 0}
    for name, axis in places.items():
        if name in shapes:
            rules[name] = chain_rules(*filter(None, (rules.get(name),)), parts.rule(order, axis))
    return reordering._replace(
        rules=rules,
        assumed=tuple(assumption for assumption in reordering.assumed if assumption != parts.sentence),
        assumed_parts=tuple(part for part in reordering.assumed_parts if part != parts),
    )


def _read_value(tree: Tree, moves: list[Move]) -> bytes:
    (leaf,) = apply_plan(tree, Plan(tuple(moves))).leaves.values()
    return bytes(leaf.read()) if isinstance(leaf, Leaf) else b""


def _apply_moves(
    tree: Tree, skeleton: Tree, builder: _FillBuilder, *, strict: bool, cast: bool
) -> tuple[Tree, Mapping[Path, Misfit]]:
    """Return the skeleton with the source's values, and the places where they do not fit.

    Numbers are converted if a wider type of the model represents them exactly; with `cast`, others
    are rounded. If `strict`, raise MappingError for the first place that does not fit; otherwise
    numbers of another width are accepted.
    """
    casts: dict[Path, Cast] = {}
    leaves = dict(skeleton.leaves)
    unfit: dict[Path, Misfit] = {}
    added: Mapping[Path, Leaf | ValueLeaf] = builder.added
    for moves in _split_shared_sources(builder.moves):
        for path, leaf in apply_plan(tree, Plan(moves, added)).tensors():
            target = skeleton[path]
            if not isinstance(target, Leaf):
                continue
            if strict and target.shape == leaf.shape and dtypes.same_family(target.dtype, leaf.dtype):
                exact = dtypes.is_widening(leaf.dtype, target.dtype)
                if target.dtype != leaf.dtype and (exact or cast):
                    casts[path] = Cast(target.dtype, rounded=not exact)
                    leaf = _cast_leaf(leaf, casts[path])
            same = target.dtype == leaf.dtype or (not strict and dtypes.same_family(target.dtype, leaf.dtype))
            if same and target.shape == leaf.shape:
                leaves[path] = replace(target, dtype=leaf.dtype, source=leaf.source)
                continue
            names = _format_sources(tree, builder.moves, path), skeleton.names[path]
            unfit[path] = Misfit(*names, *(f"{leaf.dtype}{list(leaf.shape)}" for leaf in (leaf, target)))
            if strict:
                wide = target.shape == leaf.shape and dtypes.same_family(target.dtype, leaf.dtype)
                error = unfit[path].error
                error.hint = "use --cast to round to the model's type" if wide else error.hint
                raise error
        added = {}
    if casts:
        builder.moves[:] = [
            move
            if move.target not in casts
            else Move(move.source, move.target, chain_rules(move.rule, casts[move.target]))
            for move in builder.moves
        ]
        for rule in dict.fromkeys(casts.values()):
            reached = [skeleton.names[path] for path, dtype in casts.items() if dtype == rule]
            what = "rounded" if rule.rounded else "exactly"
            builder.notes.append(
                f"{rule.name} ({what}), the type in the model: {abbreviate_list(reached, _SHOWN)}"
            )
    return Tree(leaves, skeleton.aliases, skeleton.containers), unfit


def _cast_leaf(leaf: Leaf, rule: Cast) -> Leaf:
    converted = rule.leaf(leaf)
    assert isinstance(converted, Leaf)  # noqa: S101  # a tensor stays one
    return converted


def _format_sources(tree: Tree, moves: Sequence[Move], target: Path) -> str:
    return (
        abbreviate_list([tree.names[move.source] for move in moves if move.target == target], 3) or "nowhere"
    )


def _split_shared_sources(moves: Sequence[Move]) -> Iterator[tuple[Move, ...]]:
    """Yield the moves in parts: a plan reads two places of one source for one shared tensor."""
    first: dict[tuple[Path, str], Path] = {}
    early: list[Move] = []
    late: list[Move] = []
    for move in moves:
        target = first.setdefault((move.source, move.rule.name), move.target)
        (early if target == move.target else late).append(move)
    yield tuple(early)
    for move in late:
        yield (move,)
