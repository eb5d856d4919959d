"""Dense layers that may take a flattened image, whose numbers the two frameworks order differently.

TensorFlow keeps channels last, so that a flattened image is H, W, C; PyTorch keeps them first. A checkpoint
does not say what was flattened. Sources: keras/src/layers/reshaping/flatten.py, torch/nn/modules/flatten.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import NamedTuple

from ckpttool.activations import NO_IMAGE, UNKNOWN, Order, natural, plain
from ckpttool.errors import MappingError
from ckpttool.mapping.kinds import Kind, Told
from ckpttool.mapping.layers import Layer, canonical
from ckpttool.mapping.parts import Blocks, Channels
from ckpttool.mapping.rules import Rule, chained
from ckpttool.source import Shape
from ckpttool.tree import Tree

_BETWEEN = frozenset(("layer_norm", "layer_norm_images", "rms_norm", "prelu"))
_CONVOLUTIONS = frozenset(("convolution", "depthwise", "separable"))


class _Images(NamedTuple):
    """What a convolution gives: channels, over how many axes it goes, and what the channels may be."""

    channels: int
    axes: int
    either: tuple[int, ...]


def unknown(tree: Tree, found: tuple[Layer, ...]) -> Mapping[str, str]:  # noqa: C901 - one walk
    """Return by title why a layer cannot be converted before somebody says what it takes or makes.

    That is so for what follows a convolution and takes more than its channels: a dense or recurrent layer, or
    a norm; for a dense layer that takes a multiple of the channels and not what the layer before it gives (a
    second head); and for one that stands before every convolution, where files list layers by name, if no
    dense layer gives what it takes. It is so, too, for a dense layer that gives more than the channels of a
    convolution that follows it.
    """
    refused: dict[str, str] = {}
    images: _Images | None = None
    every: dict[_Images, None] = {}
    gives = 0
    waiting: list[Layer] = []
    outputs: set[int] = set()
    with_images = any({kind.name for kind in layer.kinds} & _CONVOLUTIONS for layer in found)
    produced = _produced(tree, found) if with_images else set()
    # Whether nothing took what the last convolution gives.
    pending = False
    by_name = _is_by_name(found)
    for layer in found:
        names = {kind.name for kind in layer.kinds}
        if names & _CONVOLUTIONS:
            images, gives, pending = _images(tree, layer), 0, True
            every[images] = None
        elif names & _NORMS and images is not None and not gives:
            width = _norm_width(tree, layer)
            images = _normed(images, width) if names == {"batch_norm"} else images
            if width not in images.either and _is_untold(layer) and _is_more(width, images.channels):
                refused[layer.title] = _reason(layer, width, images, "is a norm of")
        elif names == {"dense"}:
            if not every:
                waiting.append(layer)
            elif images is not None:
                inputs = _inputs(tree, layer)
                known = outputs | {each.channels for each in every}
                open_ = pending and _is_untold(layer) and _is_more(inputs, images.channels)
                mixed = inputs not in produced and _is_mixed(layer, inputs, every)
                if open_ or mixed or _is_odd(tree, layer, images, inputs if inputs in known else 0):
                    others = tuple(every) if by_name else ()
                    refused[layer.title] = _reason(layer, inputs, images, others=others)
                pending = pending and layer.title not in refused and not _takes_image(layer)
                pending = pending and inputs != images.channels
            gives = _width(tree, layer, "kernel")
            outputs.add(gives)
        elif names <= _RECURRENT:
            if images is not None and not gives and _is_untold(layer):
                inputs = _inputs(tree, layer)
                if _is_more(inputs, images.channels):
                    refused[layer.title] = _reason(layer, inputs, images)
            images, gives = None, 0
        elif not names <= _BETWEEN:
            # What an attention gives is no image.
            images, gives = None, 0
    for layer in waiting:
        if layer.title not in refused and _inputs(tree, layer) not in outputs:
            refused |= _before(tree, layer, every, mixed=by_name and _inputs(tree, layer) not in produced)
    if by_name and not refused and not any(_takes_image(layer) for layer in found):
        refused = _untaken(tree, found, every)
    unflattened = _unflattened(tree, found)
    shuffled = _shuffled(tree, found)
    return {**shuffled, **_as_wide(tree, found, refused, unflattened), **unflattened, **refused}


def _is_by_name(found: Sequence[Layer]) -> bool:
    """Say whether a file may list layers by name, which does not say what follows what."""
    titles = [layer.title for layer in found]
    return titles == sorted(titles)


def _takes_image(layer: Layer) -> bool:
    takes = layer.told.takes
    return bool(layer.told.flatten) or (takes is not None and not takes.is_plain)


def _produced(tree: Tree, found: Iterable[Layer]) -> set[int]:
    """Return how many numbers layers give that are no image: those of vectors, and channels."""
    widths: set[int] = set()
    for layer in found:
        names = {kind.name for kind in layer.kinds}
        with contextlib.suppress(MappingError):  # refused for what it is
            if names & _CONVOLUTIONS:
                widths |= {_images(tree, layer).channels, *_outputs(tree, layer)}
            elif names == {"dense"}:
                widths.add(_width(tree, layer, "kernel"))
            elif names <= _RECURRENT:
                widths.add(canonical(tree, layer, layer.kinds[0])["recurrent_kernel"].shape[0])
            elif names == {"embedding"}:
                widths.add(_width(tree, layer, "embeddings"))
    return widths


def taken_as_they_are(tree: Tree, found: tuple[Layer, ...]) -> Iterator[str]:
    """Yield a sentence on each dense layer that takes as many numbers as a picture in colours has.

    A model without a convolution may flatten one, too; no tensor shows that.
    """
    produced = _produced(tree, found)
    for layer in found:
        if {kind.name for kind in layer.kinds} != {"dense"} or not _is_untold(layer):
            continue
        inputs = _inputs(tree, layer)
        places = inputs // 3
        sides = (
            n for n in range(_PICTURE, math.isqrt(places) + 1) if places % n == 0 and places <= 2 * n * n
        )
        if inputs % 3 == 0 and inputs not in produced and any(sides):
            yield (
                f"{layer.title} takes {inputs:,} numbers in one order in both: if they are a flattened "
                f"picture of 3 channels, --flatten '{layer.title}={places},3'"
            )


def _shuffled(tree: Tree, found: tuple[Layer, ...]) -> dict[str, str]:
    """Return why convolutions are refused between which channels may become places, or the reverse.

    One gives 4, 9 or 16 times what another takes, and nothing takes what it gives, or the other way round.
    The frameworks order the channels of a pixel shuffle differently.
    """
    sides = _image_sides(tree, found)
    refused: dict[str, str] = {}
    if any(takes is None or gives is None for _, takes, gives in sides):
        return refused
    dense = {_inputs(tree, each) for each in found if {k.name for k in each.kinds} <= {"dense", *_RECURRENT}}
    taken = {takes for _, takes, _ in sides}
    given = [gives for _, _, gives in sides]
    for layer, takes, gives in sides:
        assert takes is not None and gives is not None  # noqa: S101, PT018 - as asked above
        used = gives in taken or any(count % gives == 0 for count in dense)
        for square in _SQUARES:
            made = gives // square if gives % square == 0 else 0
            if made > 1 and made in taken and not used and layer.told.makes is None:
                refused.setdefault(
                    layer.title,
                    f"{layer.title} gives {gives:,} channels, of which a pixel shuffle may make {made:,}, "
                    f"which the two order differently (--unflatten '{layer.title}={square},{made}'), or not "
                    f"(--unflatten '{layer.title}=no')",
                )
            before = takes // square if takes % square == 0 else 0
            joined = before > 1 and before in given and takes not in given and before not in taken
            if joined and given.count(before) < square and _is_untold(layer):
                refused.setdefault(
                    layer.title,
                    f"{layer.title} takes {takes:,} channels, which may be the places of {before:,}, which "
                    f"the two order differently (--flatten '{layer.title}={square},{before}'), or not "
                    f"(--flatten '{layer.title}=no')",
                )
    return refused


def shuffled_as_they_are(tree: Tree, found: tuple[Layer, ...]) -> Iterator[str]:
    """Yield a sentence on convolutions at the ends of a model that may stand beside a pixel shuffle.

    The first takes 4, 9 or 16 times the channels of a picture in colours; the last gives so many times what
    the first takes.
    """
    sides = _image_sides(tree, found)
    taken, given = {takes for _, takes, _ in sides}, {gives for _, _, gives in sides}
    if None in taken | given or not sides:
        return
    colours = {3, *(takes for _, takes, _ in sides if takes is not None and 1 < takes < _COLOURS)}
    for layer, takes, gives in sides:
        for square in _SQUARES:
            if takes is not None and takes not in given and takes == 3 * square and _is_untold(layer):
                yield (
                    f"{layer.title} takes {takes:,} channels in one order in both: if they are places of a "
                    f"picture of 3 channels, --flatten '{layer.title}={square},3'"
                )
            made = gives // square if gives is not None and gives % square == 0 else 0
            if made in colours and gives not in taken and layer.told.makes is None:
                yield (
                    f"{layer.title} gives {gives:,} channels in one order in both: if they become places of "
                    f"a picture of {made} channels, --unflatten '{layer.title}={square},{made}'"
                )


def _image_sides(tree: Tree, found: Iterable[Layer]) -> list[tuple[Layer, int | None, int | None]]:
    """Return what each convolution takes and gives, None for both where its tensors do not tell which."""
    sides: list[tuple[Layer, int | None, int | None]] = []
    for layer in found:
        if {kind.name for kind in layer.kinds} != {"convolution"}:
            continue
        leaves = canonical(tree, layer, layer.kinds[0])
        first, last = leaves["kernel"].shape[-2:]
        bias = leaves["bias"].shape[0] if "bias" in leaves else None
        if bias == last:
            sides.append((layer, first, last))
        elif bias == first:
            sides.append((layer, last, first))
        else:
            sides.append((layer, *((None, None) if first != last else (first, last))))
    return sides


# Places of which a pixel shuffle makes one, or the reverse.
_SQUARES = (4, 9, 16)


def _untaken(tree: Tree, found: tuple[Layer, ...], every: Iterable[_Images]) -> dict[str, str]:
    """Return why dense layers are refused that may take an image which no other layer takes."""
    taken: set[int] = set()
    for layer in found:
        names = {kind.name for kind in layer.kinds}
        if names & _CONVOLUTIONS:
            taken |= set(_channels(tree, layer))
        elif names == {"dense"} or names <= _RECURRENT:
            taken.add(_inputs(tree, layer))
    refused: dict[str, str] = {}
    for images in every:
        for layer in found if images.channels not in taken else ():
            inputs = _inputs(tree, layer) if {kind.name for kind in layer.kinds} == {"dense"} else 0
            if _is_more(inputs, images.channels) and _is_untold(layer):
                refused.setdefault(layer.title, _reason(layer, inputs, images))
    return refused


def _is_mixed(layer: Layer, inputs: int, every: Iterable[_Images]) -> bool:
    """Say whether a layer may take an image of two places at least, and other numbers beside it."""
    return _is_untold(layer) and any(1 < 2 * each.channels <= inputs for each in every if each.channels > 1)


def _as_wide(
    tree: Tree, found: tuple[Layer, ...], refused: Mapping[str, str], unflattened: Mapping[str, str]
) -> dict[str, str]:
    """Return why layers that take or make as many numbers as a flattened image has are refused.

    Nothing shows whether they take or make that image: a second head, a gate, a norm, the layer of a decoder.
    """
    widths = _image_widths(tree, found, refused, unflattened)
    reasons: dict[str, str] = {}
    for layer in found:
        if layer.title in refused or layer.title in unflattened:
            continue
        for option, verb, width in _open_sides(tree, layer) if widths else ():
            if width in widths:
                other, parts = widths[width]
                where = f"the flattened image of {other}" if other != layer.title else "the image it takes"
                reasons.setdefault(
                    layer.title,
                    f"{layer.title} {verb} {width:,} numbers, as many as {where} has: that image "
                    f"({option} '{layer.title}={parts}'), or not ({option} '{layer.title}=no')",
                )
    return reasons


def _image_widths(
    tree: Tree, found: tuple[Layer, ...], refused: Mapping[str, str], unflattened: Mapping[str, str]
) -> dict[int, tuple[str, str]]:
    """Return by length the flattened images that dense layers take or make: of which layer, as an option."""
    widths: dict[int, tuple[str, str]] = {}
    for layer in found:
        if {kind.name for kind in layer.kinds} != {"dense"}:
            continue
        takes, makes = layer.told.takes, layer.told.makes
        if layer.told.flatten:
            widths[_inputs(tree, layer)] = layer.title, ",".join(map(str, layer.told.flatten))
        elif takes is not None and not takes.is_plain:
            widths[_inputs(tree, layer)] = layer.title, _option(takes)
        elif layer.title in refused and _is_untold(layer):
            widths.setdefault(_inputs(tree, layer), (layer.title, "places,channels"))
        if makes is not None and not makes.is_plain:
            widths[_width(tree, layer, "kernel")] = layer.title, _option(makes)
        elif layer.title in unflattened:
            widths.setdefault(_width(tree, layer, "kernel"), (layer.title, "places,channels"))
    return widths


def _open_sides(tree: Tree, layer: Layer) -> list[tuple[str, str, int]]:
    """Return the sides of a layer of which nothing is known: the option, the verb, and how many numbers."""
    names = {kind.name for kind in layer.kinds}
    found: list[tuple[str, str, int]] = []
    if names <= _NORMS and _is_untold(layer):
        found.append(("--flatten", "is a norm of", _norm_width(tree, layer)))
    elif (names == {"dense"} or names <= _RECURRENT) and _is_untold(layer):
        found.append(("--flatten", "takes", _inputs(tree, layer)))
    if names == {"dense"} and layer.told.makes is None:
        found.append(("--unflatten", "gives", _width(tree, layer, "kernel")))
    return found


def _option(order: Order) -> str:
    """Return an order as an option spells it: places,channels of an image, the count of other numbers."""
    return "+".join(
        str(channels) if places == 1 else f"{places},{channels}" for places, channels in order.parts
    )


_NORMS = _BETWEEN | {"batch_norm"}
_RECURRENT = frozenset(("lstm", "gru", "simple_rnn"))
# A convolution over as many channels as an image of a camera has takes no dense layer's output by its order.
_COLOURS = 4
# The shorter side of a picture, at least; the longer one has up to twice that.
_PICTURE = 5
# Images with one side are rarely longer.
_SMALL_SIDE = 7


def _is_untold(layer: Layer) -> bool:
    return layer.told.flatten is None and layer.told.takes is None


def _is_more(count: int, channels: int) -> bool:
    return 1 < channels < count and count % channels == 0


def _before(tree: Tree, layer: Layer, every: Iterable[_Images], *, mixed: bool) -> dict[str, str]:
    for images in every:
        odd = images.channels > 1 and _is_odd(tree, layer, images, -1)
        if odd or (mixed and _is_mixed(layer, _inputs(tree, layer), (images,))):
            return {layer.title: _reason(layer, _inputs(tree, layer), images)}
    return {}


def _unflattened(tree: Tree, found: tuple[Layer, ...]) -> dict[str, str]:
    """Return why dense layers and norms whose outputs a convolution may take as an image are refused."""
    refused: dict[str, str] = {}
    takes = {
        _inputs(tree, layer)
        for layer in found
        if {k.name for k in layer.kinds} <= {"dense", *_RECURRENT} and not _takes_image(layer)
    }
    produced = {channels for layer in found for channels in _outputs(tree, layer)}
    behind: list[tuple[Layer, int]] = []
    later: list[tuple[Layer, int]] = []
    for layer in found:
        names = {kind.name for kind in layer.kinds}
        if names == {"dense"}:
            width = _width(tree, layer, "kernel")
            behind = [(layer, width)]
            later += [(layer, width)] if width not in takes else []
        elif names & _NORMS and behind and _norm_width(tree, layer) == behind[0][1]:
            behind.append((layer, behind[0][1]))
        elif names & _CONVOLUTIONS:
            inputs = _channels(tree, layer)
            for dense, width in (*behind, *later):
                wide = sorted(each for each in inputs if _is_more(width, each))
                wide = wide if (dense, width) in behind else [each for each in wide if each not in produced]
                far = len(dense.name) > 1 and dense.name[:1] != layer.name[:1] and max(inputs) <= _COLOURS
                if wide and not far and _is_open(dense):
                    refused.setdefault(dense.title, _made(dense, width, wide, layer))
            behind = []
        else:
            behind = []
    return refused


def _is_open(layer: Layer) -> bool:
    """Say whether nobody told what a dense layer makes, or what a norm takes."""
    if {kind.name for kind in layer.kinds} == {"dense"}:
        return layer.told.makes is None
    return layer.told.takes is None


def _outputs(tree: Tree, layer: Layer) -> tuple[int, ...]:
    """Return how many channels a convolution gives, if its bias tells."""
    if not {kind.name for kind in layer.kinds} & _CONVOLUTIONS:
        return ()
    found = canonical(tree, layer, layer.kinds[0])
    return (found["bias"].shape[0],) if "bias" in found else ()


def _made(layer: Layer, width: int, channels: list[int], convolution: Layer) -> str:
    """Return why what a layer makes is open, with an option for every number of channels that fits."""
    dense = {kind.name for kind in layer.kinds} == {"dense"}
    option = "--unflatten" if dense else "--flatten"
    able = [f"{option} '{layer.title}={width // each},{each}'" for each in channels]
    return (
        f"{layer.title} gives {width:,} numbers, which {convolution.title} may take as an image of "
        f"{' or '.join(f'{each:,}' for each in channels)} channels: places and channels, which the two order "
        f"differently ({' or '.join(able)}; with fewer channels, as places,channels, where others are joined "
        f"to them), or not ({option} '{layer.title}=no')"
    )


def _channels(tree: Tree, layer: Layer) -> tuple[int, ...]:
    """Return how many channels a convolution may take: one without a bias may be a transposed one."""
    found = canonical(tree, layer, layer.kinds[0])
    kernel = found["pointwise_kernel" if "pointwise_kernel" in found else "kernel"].shape
    either = tuple(dict.fromkeys(kernel[-2:]))
    bias = found["bias"].shape[0] if "bias" in found else None
    if bias in either and len(either) > 1 and layer.kinds[0].name == "convolution":
        return tuple(each for each in either if each != bias)
    return either


def _is_odd(tree: Tree, layer: Layer, images: _Images, gives: int) -> bool:
    """Say whether a dense layer takes more than the channels, and not what was given before it, if known."""
    inputs = _inputs(tree, layer)
    # The numbers of an image of one place or one channel have the same order everywhere.
    wide = [each for each in images.either if each > 1]
    more = bool(wide) and 2 * min(wide) <= inputs != gives and (not gives or inputs % images.channels == 0)
    return more and _is_untold(layer)


def _inputs(tree: Tree, layer: Layer) -> int:
    return canonical(tree, layer, layer.kinds[0])["kernel"].shape[0]


def _width(tree: Tree, layer: Layer, name: str) -> int:
    return canonical(tree, layer, layer.kinds[0])[name].shape[-1]


def _norm_width(tree: Tree, layer: Layer) -> int:
    try:
        shapes = [leaf.shape for leaf in canonical(tree, layer, layer.kinds[0]).values()]
    except MappingError:
        return 0  # refused for what it is
    return shapes[0][0] if shapes and len(shapes[0]) == 1 else 0


def _images(tree: Tree, layer: Layer) -> _Images:
    found = canonical(tree, layer, layer.kinds[0])
    kernel = found["pointwise_kernel" if "pointwise_kernel" in found else "kernel"].shape
    channels = kernel[-1] * (kernel[-2] if layer.kinds[0].name == "depthwise" else 1)
    if "bias" in found:
        channels = found["bias"].shape[0]
        return _Images(channels, len(kernel) - 2, (channels,))
    return _Images(channels, len(kernel) - 2, (channels, *kernel[-2:]))


def _normed(images: _Images, width: int) -> _Images:
    """Return what a norm of this width says of the convolution before it.

    One without a bias may be a transposed one, whose kernel ends in its inputs. A norm of another width than
    its axes have stands behind a flattened image and says nothing.
    """
    return images._replace(channels=width) if width in images.either else images


def _reason(
    layer: Layer, count: int, images: _Images, verb: str = "takes", others: tuple[_Images, ...] = ()
) -> str:
    channels, axes, _ = images
    able = sorted({each.channels for each in others if _is_more(count, each.channels)})
    if len(able) > 1:
        options = " or ".join(f"--flatten '{layer.title}={count // each},{each}'" for each in able)
        return (
            f"{layer.title} {verb} {count:,} numbers: of a flattened image of one of the convolutions, which "
            f"the two order differently ({options}), or not (--flatten '{layer.title}=no')"
        )
    start = f"{layer.title} {verb} {count:,} numbers after a convolution of {channels:,} channels: "
    count_of_places = count // channels
    prime = axes > 1 and all(count_of_places % n for n in range(2, count_of_places))
    if count % channels or (prime and count_of_places > _SMALL_SIDE):
        return (
            f"{start}an image and other numbers, or none (--flatten '{layer.title}=no'); write the parts in "
            f"their order, places,channels+numbers, or fill your own model "
            f"with --like and --input-shape"
        )
    side = round((count / channels) ** (1 / axes))
    # The order of places is the same on both sides: only their number counts.
    places = [side] * axes if side**axes * channels == count else [count // channels]
    return (
        f"{start}of a flattened image, which the two order differently (--flatten "
        f"'{layer.title}={','.join(map(str, (*places, channels)))}'), or not (--flatten '{layer.title}=no'); "
        f"numbers beside an image are written as places,channels+numbers"
    )


# --- Orders of features -------------------------------------------------------------------------------

# The axes of canonical tensors that go by the order of what a layer takes or makes.
_NORM = {name: {"takes": 0} for name in ("scale", "offset", "mean", "variance")}
_FEATURES: Mapping[str, Mapping[str, Mapping[str, int]]] = {
    "dense": {"kernel": {"takes": 0, "makes": 1}, "bias": {"makes": 0}},
    "convolution": {"kernel": {"takes": -2, "makes": -1}, "bias": {"makes": 0}},
    "embedding": {"embeddings": {"makes": 1}},
    **{name: {"kernel": {"takes": 0}} for name in ("lstm", "gru", "simple_rnn")},
    "batch_norm": _NORM,
    "layer_norm": _NORM,
    "rms_norm": _NORM,
    "prelu": {"alpha": {"takes": 0}},
}
_LAST, _FIRST = "last", "first"
_OWN = {"torch": "PyTorch's", "tensorflow": "TensorFlow's"}


class Reordering(NamedTuple):
    """What happens to a layer's canonical tensors between two frameworks, and what was assumed for it.

    `flatten` is the image of a dense layer that each framework flattens in its own order.
    """

    rules: Mapping[str, Rule] = MappingProxyType({})
    flatten: Shape | None = None
    assumed: tuple[str, ...] = ()


def reordering(tree: Tree, layer: Layer, kind: Kind, ours: Told, frameworks: tuple[str, str]) -> Reordering:
    """Return how the features of a layer go from one framework's model to another's.

    `layer.told` has the orders of the source, `ours` those of the target. A source of which nothing is known
    is assumed to have its framework's own order, if the target's order is its own framework's or the
    source's: then both are plain, or the two were made to agree. Raise MappingError where the target orders
    features in a third way, where the two do not agree, or where one cannot be followed.
    """
    axes = _FEATURES.get(kind.name, {})
    found = {name: leaf.shape for name, leaf in canonical(tree, layer, kind).items() if name in axes}
    ranks = _RANKS
    if kind.name == "convolution":
        # Only a pixel shuffle before or behind it shows; an input that is padded shows nothing.
        layer, ours = layer._replace(told=_followed(layer.told)), _followed(ours)
        ranks = {"kernel": len(found["kernel"])}
        axes = {**axes, "kernel": {side: ranks["kernel"] + at for side, at in axes["kernel"].items()}}
    rules: dict[str, list[Rule]] = {}
    assumed: list[str] = []
    flatten: Shape | None = () if layer.told.flatten == () else None
    for side in ("takes", "makes"):
        places = [(name, axes[name][side]) for name in found if side in axes[name]]
        lengths = {found[name][axis] for name, axis in places if axis < len(found[name])}
        if len(lengths) != 1 or any(len(found[name]) != ranks.get(name, 1) for name, _ in places):
            continue
        made = _Side(layer, side, lengths.pop(), ours, frameworks).meeting()
        if made is None:
            continue
        theirs, target, said = made
        assumed += said
        if theirs.positions == target.positions:
            continue
        single = side == "takes" and kind.name == "dense" and len(theirs.parts) == 1
        if single and (theirs, target) == tuple(natural(theirs.parts, each) for each in frameworks):
            flatten = layer.told.flatten or theirs.parts[0]
            continue
        for name, axis in places:
            rules.setdefault(name, []).append(_rule(axis, theirs, target))
    return Reordering({name: chained(*each) for name, each in rules.items()}, flatten, tuple(assumed))


_RANKS: Mapping[str, int] = {"kernel": 2, "embeddings": 2}


def _followed(told: Told) -> Told:
    """Return what is known without orders that could not be followed."""
    return told._replace(
        takes=None if told.takes == UNKNOWN else told.takes,
        makes=None if told.makes == UNKNOWN else told.makes,
    )


class _Side:
    """One side of a layer, what it takes or makes, in both models."""

    def __init__(self, layer: Layer, side: str, length: int, ours: Told, frameworks: tuple[str, str]) -> None:
        self.layer, self.side, self.length, self.frameworks = layer, side, length, frameworks
        said = getattr(layer.told, side)
        self.stated = said == NO_IMAGE or (side == "takes" and layer.told.flatten is not None)
        self.theirs = self._theirs()
        self.ours = self._fitting(getattr(ours, side))
        if self.ours is None and side == "takes" and ours.flatten:
            self.ours = self._image(ours.flatten, frameworks[1])

    def _theirs(self) -> Order | None:
        flatten = self.layer.told.flatten if self.side == "takes" else None
        if self.stated:
            return self._image(flatten, self.frameworks[0]) if flatten else plain(self.length)
        return self._fitting(getattr(self.layer.told, self.side))

    def _image(self, shape: Shape, framework: str) -> Order | None:
        if prod(shape) != self.length:
            return None
        return natural(((prod(shape[:-1]), shape[-1]),), framework)

    def _fitting(self, order: Order | None) -> Order | None:
        """Return the order unless it is that of something of another length."""
        return order if order is None or order is UNKNOWN or len(order.positions) == self.length else None

    def meeting(self) -> tuple[Order, Order, tuple[str, ...]] | None:
        """Return the orders of the source and of the target, None where nothing is to be done."""
        theirs, ours = self.theirs, self.ours
        if theirs is None and ours is None:
            return None
        if self.stated and theirs is not None and theirs.is_plain:
            return None
        if UNKNOWN in (theirs, ours):
            known = theirs if ours == UNKNOWN else ours
            if known is not None and known.is_plain and known != UNKNOWN:
                return None
            raise self._error("cannot be followed through the model", known)
        if theirs is None:
            assert ours is not None  # noqa: S101 - one is known
            usual = [natural(ours.parts, framework) for framework in self.frameworks]
            if ours not in usual and not ours.is_plain:
                raise self._error("has an order of the target's own, and nothing records the source's", ours)
            return self._assumed(ours, 0), ours, self._sentence(ours, 0)
        if ours is None:
            said = () if self.stated else self._sentence(theirs, 1)
            return theirs, self._assumed(theirs, 1), said
        if theirs.is_plain and ours.is_plain:
            return None
        if theirs.parts != ours.parts:
            said_ = f"is {_spelled(theirs)} in the source and {_spelled(ours)} in the target"
            raise self._error(said_, ours)
        return theirs, ours, ()

    def _assumed(self, known: Order, side: int) -> Order:
        """Return the order of the side of which nothing is known: images in its framework's own order."""
        blocks = known.blocks
        if blocks is None:
            raise self._error("is of several images whose numbers alternate")
        index: list[int] = []
        for block, part in zip(blocks, known.parts, strict=True):
            own = block if 1 in part else natural((part,), self.frameworks[side]).positions
            index += _moved(own, len(index))
        return Order(known.parts, tuple(index))

    def _sentence(self, known: Order, side: int) -> tuple[str, ...]:
        if known.is_plain:
            return ()
        what = "takes" if self.side == "takes" else "makes"
        sentence = (
            f"{self.layer.title} {what} {_spelled(known)} flattened in {_OWN[self.frameworks[side]]} own "
            f"order in the {('source', 'target')[side]}"
        )
        other = ("target", "source")[side]
        return (f"{sentence} (if in the order of the {other}: {self._option} '{self.layer.title}=no')",)

    @property
    def _option(self) -> str:
        return "--flatten" if self.side == "takes" else "--unflatten"

    def _error(self, why: str, known: Order | None = None) -> MappingError:
        name, own = self.layer.title, _OWN[self.frameworks[0]]
        able = [f"{self._option} '{name}=no' if both have it in one order, or no image is flattened there"]
        if known is not None and known != UNKNOWN and not known.is_plain:
            able.append(f"{self._option} '{name}={_option(known)}' if the source has it in {own} own order")
        elif known is None:
            able.append(f"{self._option} '{name}=H,W,C' if it is an image in {own} own order")
        return MappingError(f"the order of what {name} {self.side} {why} ({'; '.join(able)})")


def _moved(index: Iterable[int], start: int) -> list[int]:
    return [start + each for each in index]


def _spelled(order: Order) -> str:
    return " and ".join(
        f"{channels:,} numbers" if places == 1 else f"an image of {places:,} places and {channels:,} channels"
        for places, channels in order.parts
    )


def _rule(axis: int, theirs: Order, ours: Order) -> Rule:
    """Return the rule that brings an axis from one order to the other."""
    forms = natural(theirs.parts, "tensorflow"), natural(theirs.parts, "torch")
    if (theirs, ours) == forms:
        return Channels(axis, _FIRST, theirs.parts)
    if (ours, theirs) == forms:
        return Channels(axis, _LAST, theirs.parts)
    at = {place: position for position, place in enumerate(theirs.positions)}
    return Blocks(axis, tuple(at[place] for place in ours.positions))
