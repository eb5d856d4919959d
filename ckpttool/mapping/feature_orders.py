"""Orders of features that two models join or flatten differently, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, permutations
from math import prod
from types import MappingProxyType

from ckpttool.core.activations import (
    MIXED,
    NO_IMAGE,
    UNKNOWN,
    AxisOrder,
    FeaturePart,
    Part,
    Parts,
    framework_order,
    plain_order,
)
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError, UsageError, abbreviate_list
from ckpttool.core.kinds import LAYER_TYPES
from ckpttool.core.source import Shape
from ckpttool.core.tree import Tree
from ckpttool.mapping.flattening import format_order_option
from ckpttool.mapping.layer_kinds import LayerFacts, LayerKind
from ckpttool.mapping.layers import Layer, canonical_tensors
from ckpttool.mapping.rules import KEEP, BlockOrder, ChannelOrder, Rule, chain_rules

_LAST, _FIRST = "last", "first"
_OWN = {"torch": "PyTorch's", "tensorflow": "TensorFlow's"}


class FeatureReordering(NamedTuple):
    """Rules for a layer's canonical tensors between two frameworks, and the assumptions made for it.

    `flatten` is the image of a dense layer that each framework flattens in its own order. `assumed_parts`
    are the orders of parts that the source may have instead of the one that is assumed.
    """

    rules: Mapping[str, Rule] = MappingProxyType({})
    flatten: Shape | None = None
    assumed: tuple[str, ...] = ()
    assumed_parts: tuple[AssumedParts, ...] = ()


class AssumedParts(NamedTuple):
    """Parts of a layer's input ("takes") or output ("makes") whose order in the source is assumed.

    `orders` are the possible ones: the numbers of the target's parts, in the source's order, the assumed one
    first. `sentence` is the assumption.
    """

    sentence: str
    layer: str
    side: str
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]

    def rule(self, order: Sequence[int], axis: int) -> Rule:
        """Return the rule that puts the parts of an axis, which has them in this order, in the target's."""
        starts = dict(zip(order, accumulate((self.sizes[part] for part in order), initial=0), strict=False))
        blocks = (range(starts[part], starts[part] + size) for part, size in enumerate(self.sizes))
        return BlockOrder(axis, tuple(position for block in blocks for position in block))


_MOST_PARTS = 4


def format_part_order(order: Sequence[int]) -> str:
    """Return the value of --flatten or --unflatten that states this order of the model's parts."""
    return f"parts:{','.join(str(part + 1) for part in order)}"


def _describe_choice(title: str, option: str, orders: Sequence[Sequence[int]]) -> str:
    """Return the option that states another order of parts than the first one, "" if there is none."""
    if len(orders) < 2:
        return ""
    return (
        f" (if the source has the model's parts in another order: {option} "
        f"'{title}={format_part_order(orders[1])}')"
    )


def _possible_orders(sizes: Sequence[int], stated: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of parts of these sizes that give the source's sizes, where these are known."""
    if len(sizes) > _MOST_PARTS or 0 in sizes:
        return ()
    known = list(stated) if sorted(stated) == sorted(sizes) else None
    orders = permutations(range(len(sizes)))
    return tuple(order for order in orders if known is None or [sizes[part] for part in order] == known)


def stated_parts(
    layer: Layer, parts: Sequence[AssumedParts]
) -> Iterator[tuple[AssumedParts, tuple[int, ...]]]:
    """Yield the orders that the user states for a layer, each with the parts among these whose order is open.

    Raise UsageError for an order that the parts cannot have, or where no order is open.
    """
    for side, order in layer.facts.part_orders.items():
        mine = next((part for part in parts if part.side == side), None)
        if mine is None or order not in mine.orders:
            able = "" if mine is None else abbreviate_list([*map(format_part_order, mine.orders)], 6)
            raise UsageError(
                f"{layer.title} {side} no parts that could be in this order",
                path=layer.title,
                expected=able or "no statement: this conversion leaves no order of its parts open",
                found=format_part_order(order),
                hint="leave out this order" if mine is None else "state the order as one of those",
            )
        yield mine, order


def plan_reordering(
    tree: Tree, layer: Layer, kind: LayerKind, facts: LayerFacts, frameworks: tuple[str, str]
) -> FeatureReordering:
    """Return how the features of a layer are reordered between the models of two frameworks.

    A source without known order is assumed to use its framework's order, if the target's order is its own
    framework's or the source's: then both are plain, or the two were made to agree. Raise MappingError if the
    target orders features in a third way, if the two do not agree, or if one cannot be followed.

    Args:
        tree: the source.
        layer: the layer, with the orders of the source among its facts.
        kind: how the source stores it.
        facts: the orders of the target.
        frameworks: the source's and the target's.
    """
    axes = LAYER_TYPES[kind.name].features if kind.name in LAYER_TYPES else {}
    shapes = {name: leaf.shape for name, leaf in canonical_tensors(tree, layer, kind).items() if name in axes}
    ranks = _RANKS
    if kind.name == "convolution":
        # Only a pixel shuffle before or after it is evidence; a padded input is not.
        layer, facts = layer._replace(facts=drop_unknown_orders(layer.facts)), drop_unknown_orders(facts)
        ranks = {"kernel": len(shapes["kernel"])}
        axes = {**axes, "kernel": {side: ranks["kernel"] + at for side, at in axes["kernel"].items()}}
    rules: dict[str, list[Rule]] = {}
    assumed: list[str] = []
    flatten: Shape | None = () if layer.facts.flatten == () else None
    for side in ("takes", "makes"):
        places = [(name, axes[name][side]) for name in shapes if side in axes[name]]
        lengths = {shapes[name][axis] for name, axis in places if axis < len(shapes[name])}
        if len(lengths) != 1 or any(len(shapes[name]) != ranks.get(name, 1) for name, _ in places):
            continue
        orders_of_both = _FeatureSide(layer, side, lengths.pop(), facts, frameworks).meeting()
        if orders_of_both is None:
            continue
        source, target, sentence = orders_of_both
        assumed += sentence
        if source.positions == target.positions:
            continue
        single = side == "takes" and kind.name == "dense" and len(source.parts) == 1
        if single and (source, target) == tuple(
            framework_order(source.parts, framework) for framework in frameworks
        ):
            flatten = layer.facts.flatten or source.parts[0]
            continue
        for name, axis in places:
            rules.setdefault(name, []).append(order_rule(axis, source, target))
    return FeatureReordering(
        {name: chain_rules(*pair) for name, pair in rules.items()}, flatten, tuple(assumed)
    )


def arrange_parts(
    layer: Layer,
    kind: LayerKind,
    reordering: FeatureReordering,
    source: Parts,
    facts: LayerFacts,
    kernel: Shape,
) -> FeatureReordering:
    """Return the reordering of a layer with that of the parts that its input and output have.

    If both models record where the parts come from, they decide, and so do images that only one part can be;
    otherwise the order is assumed, and so is that of an output that the target uses in parts.

    Args:
        layer: the layer.
        kind: how the source stores it.
        reordering: the reordering within the parts.
        source: the parts of the input in the source, with the calls of the target.
        facts: the target's facts about its parts.
        kernel: the shape of the canonical kernel [..., inputs, outputs].
    """
    if kind.name not in ("dense", "convolution", "depthwise"):
        return reordering
    assumed = []
    parts: list[AssumedParts] = []
    rules = dict(reordering.rules)
    divided = kind.name != "depthwise" and not reordering.rules and reordering.flatten is None
    if max(len(source), len(facts.parts)) > 1 and not _are_told_apart(layer.facts, source, facts):
        followed = all(part.origin and part.number >= 0 for part in (*source, *facts.parts))
        whole = len({*source}) == len(source) and len({*facts.parts}) == len(facts.parts)
        same = followed and whole and sorted(source) == sorted(facts.parts)
        plain = not reordering.rules and reordering.flatten is None
        if same and source != facts.parts and kind.name == "dense" and plain:
            starts = dict(zip(source, accumulate((part.size for part in source), initial=0), strict=False))
            order = (range(starts[part], starts[part] + part.size) for part in facts.parts)
            rules["kernel"] = BlockOrder(0, tuple(position for block in order for position in block))
        elif not same or source != facts.parts:
            sizes = [f"{part.size:,}" for part in facts.parts or source if part.size]
            many = f" of {abbreviate_list(sizes, _MOST_PARTS)} numbers" if len(sizes) > 1 else ""
            own, other = ([part.size for part in side] for side in (facts.parts or source, source))
            orders = _possible_orders(own, other) if divided and sum(own) == kernel[-2] else ()
            by_size = facts.parts and len(orders) == 1
            paired = "paired by their sizes" if by_size else "in the same order in both models"
            assumed.append(f"{layer.title} takes joined parts{many}, {paired}")
            if orders:
                assumed[-1] += _describe_choice(layer.title, "--flatten", orders)
                parts.append(AssumedParts(assumed[-1], layer.title, "takes", tuple(own), orders))
    if facts.cut:
        assumed.append(f"{layer.title} makes numbers that the models use in parts, in the same order")
        if divided and kernel[-1] % 2 == 0:
            halves, orders = (kernel[-1] // 2,) * 2, ((0, 1), (1, 0))
            assumed[-1] += _describe_choice(layer.title, "--unflatten", orders)
            parts.append(AssumedParts(assumed[-1], layer.title, "makes", halves, orders))
    return reordering._replace(
        rules=rules, assumed=(*reordering.assumed, *assumed), assumed_parts=tuple(parts)
    )


def _are_told_apart(facts: LayerFacts, parts: Parts, target_facts: LayerFacts) -> bool:
    """Return whether each part is known to be the same in both models, which record the same images.

    A part is known by its origin, or as the only image of its size; the recorded orders arrange the
    entries of an image. A vector beside images is known by its size, if it is in the order of its result.
    """
    images = facts.takes.parts if facts.takes is not None else ()
    if facts.flatten:
        images = ((prod(facts.flatten[:-1]), facts.flatten[-1]),)
    target = target_facts.takes.parts if target_facts.takes is not None else ()
    if facts.takes is None and not facts.flatten and len(target) == 1 and 1 not in target[0]:
        images = target  # One image: the source's order of its entries is assumed, not that of parts.
    if not images or images != target:
        return False
    sides = [[*_parts_by_image(parts, images)] for parts in (parts, target_facts.parts)]
    return len(sides[0]) == len(sides[1]) > 0 and all(
        _is_same_part(one, other, image if image == same and images.count(image) == 1 else None)
        for (one, image), (other, same) in zip(*sides, strict=True)
    )


def _is_same_part(one: FeaturePart, other: FeaturePart, image: Part | None) -> bool:
    """Return whether two parts are known to be the same, by their origins or as the image of both models."""
    if all(part.origin and part.number >= 0 for part in (one, other)):
        return one == other
    vector = image is not None and 1 in image
    return (
        image is not None and one.size == other.size and not (vector and MIXED in (one.origin, other.origin))
    )


def _parts_by_image(parts: Parts, images: Sequence[Part]) -> Iterator[tuple[FeaturePart, Part | None]]:
    """Yield each part with its image, or None if it is one of several vectors in a row.

    Without recorded parts, each image is one. Yield a part of no size where images are not whole parts.
    """
    left = [part for part in parts if part.size] or [FeaturePart(prod(image)) for image in images]
    for image in images:
        own: list[FeaturePart] = []
        while left and sum(part.size for part in own) < prod(image):
            own.append(left.pop(0))
        if sum(part.size for part in own) != prod(image) or (len(own) > 1 and 1 not in image):
            left.append(FeaturePart(0))
            break
        yield from ((part, image if len(own) == 1 else None) for part in own)
    yield from ((part._replace(size=0, origin=""), None) for part in left)


_RANKS: Mapping[str, int] = {"kernel": 2, "embeddings": 2}


def drop_unknown_orders(facts: LayerFacts) -> LayerFacts:
    """Return the facts without orders that could not be followed."""
    return facts._replace(
        takes=None if facts.takes == UNKNOWN else facts.takes,
        makes=None if facts.makes == UNKNOWN else facts.makes,
    )


class _FeatureSide:
    """The input or output side of a layer, in both models."""

    def __init__(
        self, layer: Layer, side: str, length: int, facts: LayerFacts, frameworks: tuple[str, str]
    ) -> None:
        self.layer, self.side, self.length, self.frameworks = layer, side, length, frameworks
        order = getattr(layer.facts, side)
        self.stated = order == NO_IMAGE or (side == "takes" and layer.facts.flatten is not None)
        self.source_order = self._source_order()
        self.target_order = self._fitting(getattr(facts, side))
        if self.target_order is None and side == "takes" and facts.flatten:
            self.target_order = self._image(facts.flatten, frameworks[1])

    def _source_order(self) -> AxisOrder | None:
        flatten = self.layer.facts.flatten if self.side == "takes" else None
        if self.stated:
            return self._image(flatten, self.frameworks[0]) if flatten else plain_order(self.length)
        return self._fitting(getattr(self.layer.facts, self.side))

    def _image(self, shape: Shape, framework: str) -> AxisOrder | None:
        if prod(shape) != self.length:
            return None
        return framework_order(((prod(shape[:-1]), shape[-1]),), framework)

    def _fitting(self, order: AxisOrder | None) -> AxisOrder | None:
        """Return the order unless its length differs from the side's."""
        return order if order is None or order is UNKNOWN or len(order.positions) == self.length else None

    def meeting(self) -> tuple[AxisOrder, AxisOrder, tuple[str, ...]] | None:
        """Return the orders of the source and of the target, None if no reordering is needed."""
        source, target = self.source_order, self.target_order
        if source is None and target is None:
            return None
        if self.stated and source is not None and source.is_plain:
            return None
        if UNKNOWN in (source, target):
            known = source if target == UNKNOWN else target
            if known is not None and known.is_plain and known != UNKNOWN:
                return None
            raise self._error("cannot be followed through the model", known)
        if source is None:
            assert target is not None  # noqa: S101 - one is known
            usual = [framework_order(target.parts, framework) for framework in self.frameworks]
            if target not in usual and not target.is_plain:
                raise self._error("is specific to the target, and the source's order is not recorded", target)
            return self._assumed(target, 0), target, self._sentence(target, 0)
        if target is None:
            sentences = () if self.stated else self._sentence(source, 1)
            return source, self._assumed(source, 1), sentences
        if source.is_plain and target.is_plain:
            return None
        if source.parts != target.parts:
            text = f"is {_describe_order(source)} in the source and {_describe_order(target)} in the target"
            raise self._error(text, target)
        return source, target, ()

    def _assumed(self, known: AxisOrder, side: int) -> AxisOrder:
        """Return the order of the unknown side: images in its framework's own order."""
        blocks = known.blocks
        if blocks is None:
            raise self._error("is that of several interleaved images")
        index: list[int] = []
        for block, part in zip(blocks, known.parts, strict=True):
            own = block if 1 in part else framework_order((part,), self.frameworks[side]).positions
            index += _shift_indices(own, len(index))
        return AxisOrder(known.parts, tuple(index))

    def _sentence(self, known: AxisOrder, side: int) -> tuple[str, ...]:
        if known.is_plain:
            return ()
        what = "takes" if self.side == "takes" else "makes"
        sentence = (
            f"{self.layer.title} {what} {_describe_order(known)} flattened in {_OWN[self.frameworks[side]]} own "  # noqa: E501
            f"order in the {('source', 'target')[side]}"
        )
        other = ("target", "source")[side]
        return (f"{sentence} (if it is in the {other}'s order: {self._option} '{self.layer.title}=no')",)

    @property
    def _option(self) -> str:
        return "--flatten" if self.side == "takes" else "--unflatten"

    def _error(self, why: str, known: AxisOrder | None = None) -> MappingError:
        name, own = self.layer.title, _OWN[self.frameworks[0]]
        able = [
            f"{self._option} '{name}=no' if both sides use the same order, or no image is flattened there"
        ]
        if known is not None and known != UNKNOWN and not known.is_plain:
            able.append(
                f"{self._option} '{name}={format_order_option(known)}' if the source uses {own} own order"
            )
        elif known is None:
            able.append(f"{self._option} '{name}=H,W,C' if it is an image in {own} own order")
        return MappingError(f"the order of what {name} {self.side} {why} ({'; '.join(able)})")


def _shift_indices(index: Iterable[int], start: int) -> list[int]:
    return [start + number for number in index]


def _describe_order(order: AxisOrder) -> str:
    return " and ".join(
        f"{channels:,} numbers" if places == 1 else f"an image of {places:,} places and {channels:,} channels"
        for places, channels in order.parts
    )


def order_rule(axis: int, source: AxisOrder, target: AxisOrder) -> Rule:
    """Return the rule that changes an axis from one order to the other."""
    if source.positions == target.positions:
        return KEEP
    forms = framework_order(source.parts, "tensorflow"), framework_order(source.parts, "torch")
    if (source, target) == forms:
        return ChannelOrder(axis, _FIRST, source.parts)
    if (target, source) == forms:
        return ChannelOrder(axis, _LAST, source.parts)
    at = {number: position for position, number in enumerate(source.positions)}
    return BlockOrder(axis, tuple(at[number] for number in target.positions))
