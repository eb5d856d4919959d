"""Dense layers that may receive a flattened image, whose values the two frameworks order differently.

TensorFlow stores channels last, so that a flattened image is H, W, C; PyTorch stores them first. A checkpoint
does not record what was flattened. Sources: keras/src/layers/reshaping/flatten.py,
torch/nn/modules/flatten.py.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpttool.core.activations import UNKNOWN, AxisOrder
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError
from ckpttool.core.kinds import list_kinds
from ckpttool.core.tree import Tree
from ckpttool.mapping.layers import RECURRENT_KIND_NAMES, Layer, canonical_tensors

_BETWEEN = list_kinds("norm") | {"prelu"}
_CONVOLUTIONS = list_kinds("convolution")


class _ConvolutionOutput(NamedTuple):
    """Output of a convolution: channels, number of spatial axes, and the possible numbers of channels."""

    channels: int
    axes: int
    either: tuple[int, ...]


def find_unknown_orders(tree: Tree, layers: tuple[Layer, ...]) -> Mapping[str, str]:  # noqa: C901 - one walk
    """Return by title why layers cannot be converted without an option for their input or output order.

    This applies to layers after a convolution with more inputs than its channels: dense and recurrent
    layers and norms; to a dense layer whose input size is a multiple of the channels but not the
    output size of the layer before it (a second head); and, in files that list layers by name, to one
    before every convolution, if no dense layer has that output size. It also applies to a dense layer
    with more outputs than the channels of the convolution after it.
    """
    refused: dict[str, str] = {}
    images: _ConvolutionOutput | None = None
    every: dict[_ConvolutionOutput, str] = {}
    gives = 0
    waiting: list[Layer] = []
    outputs: set[int] = set()
    with_images = any(layer.kind_names & _CONVOLUTIONS for layer in layers)
    produced = _vector_widths(tree, layers) if with_images else set()
    # Whether no layer has used the output of the last convolution yet.
    pending = False
    by_name = is_by_name(tree, layers)
    last = _last_images(tree, layers)
    for layer in layers:
        names = layer.kind_names
        if names & _CONVOLUTIONS:
            images, gives, pending = _convolution_output(tree, layer), 0, True
            every.setdefault(images, layer.title)
        elif names & _NORMS and images is not None and not gives:
            width = _norm_width(tree, layer)
            images = _narrow_by_norm(images, width) if names == {"batch_norm"} else images
            if (
                width not in images.either
                and _is_input_unknown(layer)
                and _is_multiple(width, images.channels)
            ):
                refused[layer.title] = _explain_input(layer, width, images, "is a norm of")
        elif names == {"dense"}:
            if not every:
                waiting.append(layer)
            elif images is not None:
                inputs = _input_width(tree, layer)
                known = outputs | {output.channels for output in every}
                open_ = pending and _is_input_unknown(layer) and _is_multiple(inputs, images.channels)
                mixed = inputs not in produced and _is_mixed(layer, inputs, every)
                if (
                    open_
                    or mixed
                    or _is_unexplained_input(tree, layer, images, inputs if inputs in known else 0)
                ):
                    refused[layer.title] = _explain_candidates(
                        layer, inputs, images, _select_images(inputs, images, every, last, by_name), by_name
                    )
                pending = pending and layer.title not in refused and not _takes_image(layer)
                pending = pending and inputs != images.channels
            gives = _tensor_width(tree, layer, "kernel")
            outputs.add(gives)
        elif names <= RECURRENT_KIND_NAMES:
            if images is not None and not gives and _is_input_unknown(layer):
                inputs = _input_width(tree, layer)
                if _is_multiple(inputs, images.channels):
                    refused[layer.title] = _explain_input(layer, inputs, images)
            images, gives = None, 0
        elif not names <= _BETWEEN:
            # The output of an attention is not an image.
            images, gives = None, 0
    for layer in waiting:
        inputs = _input_width(tree, layer)
        if layer.title not in refused and inputs not in outputs:
            mixed = by_name and inputs not in produced
            for images in _refuse_image_input(tree, layer, every, mixed=mixed):
                refused[layer.title] = _explain_candidates(
                    layer, inputs, images, _select_images(inputs, images, every, last, by_name), by_name
                )
    if by_name and not refused and not any(_takes_image(layer) for layer in layers):
        refused = _refuse_untaken_images(tree, layers, every)
    unflattened = _refuse_unflattened(tree, layers)
    shuffled = _refuse_shuffled(tree, layers)
    refused |= _refuse_other_images(tree, layers, every, last)
    return {**shuffled, **_refuse_image_widths(tree, layers, refused, unflattened), **unflattened, **refused}


def decide_images(tree: Tree, result: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return the layers with the flattened images that the sizes of all layers leave possible, and sentences.

    An image that no convolution takes has to go somewhere. If a layer's input size is that of exactly one
    such image, with as many places as a square, and neither a vector nor another layer explains it, then
    the layer takes the image, in its framework's own order. All other inputs stay unknown.
    """
    if any(not _is_followed(layer) for layer in result) or not find_unknown_orders(tree, result):
        return result, ()
    if _refuse_unflattened(tree, result) or _refuse_shuffled(tree, result):
        return result, ()  # its images may come from dense layers, as in a decoder
    ends = _untaken_images(tree, result)
    inputs = {at: _input_width(tree, layer) for at, layer in enumerate(result) if _takes_vector(layer)}
    produced = _vector_widths(tree, result)
    dense = _vector_widths(tree, (layer for layer in result if not layer.kind_names & _CONVOLUTIONS))
    vectors = dense - set(inputs.values())
    able: dict[int, _ConvolutionOutput] = {}
    for at, width in inputs.items():
        fitting = [end for end in ends if _has_image_size(width, end)]
        joined = any(_has_image_size(width - vector, image) for image in fitting for vector in vectors)
        if width not in produced and len(fitting) == 1 and not joined:
            able[at] = fitting[0]
    for images, count in ends.items():
        sizes = {inputs[at] for at, image in able.items() if image == images}
        if len(sizes) > count or images.channels in set(inputs.values()) - dense:
            able = {at: image for at, image in able.items() if image != images}
    layers, sentences = list(result), []
    for at, images in able.items():
        shape = (*_places(inputs[at], images), images.channels)
        layers[at] = result[at]._replace(facts=result[at].facts._replace(flatten=shape))
        stated = ",".join(map(str, shape))
        sentences.append(
            f"{result[at].title} takes {stated} flattened, because no convolution takes the image of "
            f"{images.channels:,} channels (if not: --flatten '{result[at].title}=no')"
        )
    return tuple(layers), tuple(sentences)


def _is_followed(layer: Layer) -> bool:
    """Return whether a layer's kind is known, and its tensors have the sizes of its input and output."""
    names = layer.kind_names
    known = _CONVOLUTIONS | _NORMS | RECURRENT_KIND_NAMES | {"dense", "embedding"}
    return len(names) == 1 and names <= known


def _takes_vector(layer: Layer) -> bool:
    names = layer.kind_names
    return _is_input_unknown(layer) and (names == {"dense"} or names <= RECURRENT_KIND_NAMES)


def _untaken_images(tree: Tree, layers: tuple[Layer, ...]) -> Counter[_ConvolutionOutput]:
    """Return the outputs of convolutions that no convolution takes; none if one may be transposed."""
    outputs: Counter[_ConvolutionOutput] = Counter()
    input_counts: Counter[int] = Counter()
    for at, layer in enumerate(layers):
        if layer.kind_names & _CONVOLUTIONS:
            images = _convolution_output(tree, layer)
            norm = layers[at + 1] if at + 1 < len(layers) else layer
            if len(set(images.either)) > 1 and norm.kind_names == {"batch_norm"}:
                width = _norm_width(tree, norm)
                images = images._replace(channels=width, either=(width,) if width in images.either else ())
            if len(set(images.either)) != 1:
                return Counter()
            outputs[images] += 1
            inputs = set(_input_channels(tree, layer)) - {images.channels}
            input_counts.update(inputs or {images.channels})
    for images in list(outputs):
        outputs[images] -= input_counts[images.channels]
    return +outputs


def _has_image_size(count: int, images: _ConvolutionOutput) -> bool:
    """Return whether numbers may be an image: a square one, or one of many channels and nearly square."""
    places, rest = divmod(count, images.channels)
    if rest or min(places, images.channels) <= 1:
        return False
    many = images.channels >= _MANY
    if images.axes == 1 or round(places ** (1 / images.axes)) ** images.axes == places:
        return many or images.axes > 1
    sides = range(2, math.isqrt(places) + 1)
    # Twice a square is the size of two images that one encoder reads in turn, e.g. of a state and a goal.
    twice = any(places == 2 * side * side for side in sides)
    return many and not twice and any(places % side == 0 and places < 2 * side * side for side in sides)


def list_open_orders(tree: Tree, layers: tuple[Layer, ...]) -> frozenset[str]:
    """Return the titles of layers whose order of inputs or outputs only an option or a call states."""
    lost = (
        layer.title
        for layer in layers
        if not layer.kind_names & _CONVOLUTIONS
        and ((layer.facts.takes == UNKNOWN and layer.facts.flatten is None) or layer.facts.makes == UNKNOWN)
    )
    return frozenset((*lost, *find_unknown_orders(tree, layers)))


def is_by_name(tree: Tree, layers: Sequence[Layer]) -> bool:
    """Return whether a file may list layers by name, so that their order is unknown.

    Weight files of Keras 3 always do: HDF5 sorts the groups of a folder.
    """
    root = tree.containers.get(())
    titles = [layer.title for layer in layers]
    keras = root is not None and isinstance(root.state, dict) and "group" in root.state
    return keras or titles == sorted(titles)


def _last_images(tree: Tree, layers: Iterable[Layer]) -> Counter[int]:
    """Return the output channels of convolutions that are more than all convolutions take."""
    outputs: Counter[int] = Counter()
    inputs: Counter[int] = Counter()
    for layer in layers:
        if layer.kind_names & _CONVOLUTIONS:
            with contextlib.suppress(MappingError):  # refused because of its kind
                outputs[_convolution_output(tree, layer).channels] += 1
                inputs.update(_input_channels(tree, layer))
    return outputs - inputs


def _select_images(
    count: int,
    images: _ConvolutionOutput,
    every: Mapping[_ConvolutionOutput, str],
    last: Counter[int],
    by_name: bool,
) -> dict[_ConvolutionOutput, str]:
    """Return the images that `count` numbers may be, with the convolution of each.

    `images` is the one before the layer. Images that other convolutions take are candidates only if all are.
    """
    able = {image: title for image, title in every.items() if _is_multiple(count, image.channels)}
    ends = {image: title for image, title in able.items() if image.channels in last}
    if by_name or (ends and images.channels not in last):
        return ends or able
    return {images: every.get(images, "")}


def _refuse_other_images(
    tree: Tree, layers: Iterable[Layer], every: Mapping[_ConvolutionOutput, str], last: Counter[int]
) -> dict[str, str]:
    """Return why a stated image is refused: another convolution takes it, and no layer the last one's."""
    read: set[int] = set()
    stated: list[tuple[Layer, int]] = []
    for layer in layers:
        names = layer.kind_names
        if names == {"dense"} and layer.facts.flatten:
            stated.append((layer, layer.facts.flatten[-1]))
            read.add(layer.facts.flatten[-1])
        elif names == {"dense"} or names <= RECURRENT_KIND_NAMES:
            read.add(_input_width(tree, layer))
            read |= {channels for _, channels in layer.facts.takes.parts} if layer.facts.takes else set()
        elif not names & _CONVOLUTIONS and not names <= _NORMS:
            return {}
    refused: dict[str, str] = {}
    for layer, channels in stated:
        inputs = _input_width(tree, layer)
        ends = {e: t for e, t in every.items() if e.channels in last and _is_multiple(inputs, e.channels)}
        is_output = channels not in last and any(channels == image.channels for image in every)
        if is_output and ends and not read & {image.channels for image in ends}:
            stated_ = ",".join(map(str, layer.facts.flatten or ()))
            refused[layer.title] = (
                f"{layer.title} cannot take {stated_}: a convolution takes these {channels:,} channels, and "
                f"no layer would take those of {' and '.join(ends.values())} "
                f"({' or '.join(_flatten_option(layer, inputs, image) for image in ends)})"
            )
    return refused


def _takes_image(layer: Layer) -> bool:
    takes = layer.facts.takes
    return bool(layer.facts.flatten) or (takes is not None and not takes.is_plain)


def _vector_widths(tree: Tree, layers: Iterable[Layer]) -> set[int]:
    """Return the output sizes of layers that are not images: of vectors, and channels."""
    widths: set[int] = set()
    for layer in layers:
        names = layer.kind_names
        with contextlib.suppress(MappingError):  # refused because of its kind
            if names & _CONVOLUTIONS:
                widths |= {_convolution_output(tree, layer).channels, *_output_channels(tree, layer)}
            elif names == {"dense"}:
                widths.add(_tensor_width(tree, layer, "kernel"))
            elif names <= RECURRENT_KIND_NAMES:
                widths.add(canonical_tensors(tree, layer, layer.kinds[0])["recurrent_kernel"].shape[0])
            elif names == {"embedding"}:
                widths.add(_tensor_width(tree, layer, "embeddings"))
    return widths


def describe_image_sized_inputs(tree: Tree, layers: tuple[Layer, ...]) -> Iterator[str]:
    """Yield a sentence for each dense layer with as many inputs as a colour image has values.

    A model without a convolution may flatten one too; no tensor shows it.
    """
    produced = _vector_widths(tree, layers)
    for layer in layers:
        if layer.kind_names != {"dense"} or not _is_input_unknown(layer):
            continue
        inputs = _input_width(tree, layer)
        places = inputs // 3
        sides = (
            n for n in range(_PICTURE, math.isqrt(places) + 1) if places % n == 0 and places <= 2 * n * n
        )
        if inputs % 3 == 0 and inputs not in produced and any(sides):
            yield (
                f"the {inputs:,} inputs of {layer.title} have the same order on both sides (if they are a "
                f"flattened 3-channel image: --flatten '{layer.title}={places},3')"
            )


def _refuse_shuffled(tree: Tree, layers: tuple[Layer, ...]) -> dict[str, str]:
    """Return why convolutions are refused whose channels may become places, or the reverse.

    One outputs 4, 9 or 16 times the input channels of another, and no layer has an input of that
    size, or the other way round. The frameworks order the channels of a pixel shuffle differently.
    """
    sides = _image_sides(tree, layers)
    refused: dict[str, str] = {}
    if any(takes is None or gives is None for _, takes, gives in sides):
        return refused
    dense = {
        _input_width(tree, layer) for layer in layers if layer.kind_names <= {"dense", *RECURRENT_KIND_NAMES}
    }
    depthwise = list(_depthwise_sides(tree, layers))
    inputs = {*(takes for _, takes, _ in sides), *(takes for takes, _ in depthwise)}
    outputs = [*(gives for _, _, gives in sides), *(gives for _, gives in depthwise)]
    for layer, takes, gives in sides:
        assert takes is not None and gives is not None  # noqa: S101, PT018 - as checked above
        used = gives in inputs or any(count % gives == 0 for count in dense)
        for square in _SQUARES:
            channels = gives // square if gives % square == 0 else 0
            if channels > 1 and channels in inputs and not used and layer.facts.makes is None:
                refused.setdefault(
                    layer.title,
                    f"{layer.title} outputs {gives:,} channels: either a pixel shuffle turns them into "
                    f"{channels:,}, which the two frameworks order differently (--unflatten "
                    f"'{layer.title}={square},{channels}'), or not (--unflatten '{layer.title}=no')",
                )
            before = takes // square if takes % square == 0 else 0
            joined = before > 1 and before in outputs and takes not in outputs and before not in inputs
            if joined and outputs.count(before) < square and _is_input_unknown(layer):
                refused.setdefault(
                    layer.title,
                    f"{layer.title} has {takes:,} input channels: either they are the places of "
                    f"{before:,} channels, which the two frameworks order differently (--flatten "
                    f"'{layer.title}={square},{before}'), or not (--flatten '{layer.title}=no')",
                )
    return refused


def describe_pixel_shuffles(tree: Tree, layers: tuple[Layer, ...]) -> Iterator[str]:
    """Yield a sentence for convolutions at the ends of a model that may be next to a pixel shuffle.

    The first has 4, 9 or 16 times as many input channels as a colour image; the last outputs that
    many times the input channels of the first.
    """
    sides = _image_sides(tree, layers)
    inputs, values = {takes for _, takes, _ in sides}, {gives for _, _, gives in sides}
    if None in inputs | values or not sides:
        return
    colours = {3, *(takes for _, takes, _ in sides if takes is not None and 1 < takes < _COLOURS)}
    for layer, takes, gives in sides:
        for square in _SQUARES:
            if takes is not None and takes not in values and takes == 3 * square and _is_input_unknown(layer):
                yield (
                    f"the {takes:,} input channels of {layer.title} have the same order on both sides (if "
                    f"they are places of a 3-channel image: --flatten '{layer.title}={square},3')"
                )
            channels = gives // square if gives is not None and gives % square == 0 else 0
            if channels in colours and gives not in inputs and layer.facts.makes is None:
                yield (
                    f"the {gives:,} output channels of {layer.title} have the same order on both sides "
                    f"(if they become places of an image of {channels} channels: --unflatten "
                    f"'{layer.title}={square},{channels}')"
                )


def _depthwise_sides(tree: Tree, layers: Iterable[Layer]) -> Iterator[tuple[int, int]]:
    """Yield the input and output channels of depthwise convolutions, one for each in PyTorch."""
    for layer in layers:
        if layer.kind_names == {"depthwise"}:
            channels, multiplier = canonical_tensors(tree, layer, layer.kinds[0])["kernel"].shape[-2:]
            several = layer.kinds[0].framework == "tensorflow"
            yield (channels if several else channels * multiplier), channels * multiplier


def _image_sides(tree: Tree, layers: Iterable[Layer]) -> list[tuple[Layer, int | None, int | None]]:
    """Return the input and output channels of each convolution, None for both if ambiguous."""
    sides: list[tuple[Layer, int | None, int | None]] = []
    for layer in layers:
        if layer.kind_names != {"convolution"}:
            continue
        leaves = canonical_tensors(tree, layer, layer.kinds[0])
        first, last = leaves["kernel"].shape[-2:]
        bias = leaves["bias"].shape[0] if "bias" in leaves else None
        if bias == last:
            sides.append((layer, first, last))
        elif bias == first:
            sides.append((layer, last, first))
        else:
            sides.append((layer, *((None, None) if first != last else (first, last))))
    return sides


# Positions that a pixel shuffle merges into one, or the reverse.
_SQUARES = (4, 9, 16)


def _refuse_untaken_images(
    tree: Tree, layers: tuple[Layer, ...], every: Iterable[_ConvolutionOutput]
) -> dict[str, str]:
    """Return why dense layers are refused whose input may be an image that no other layer reads."""
    input_widths: set[int] = set()
    for layer in layers:
        names = layer.kind_names
        if names & _CONVOLUTIONS:
            input_widths |= set(_input_channels(tree, layer))
        elif names == {"dense"} or names <= RECURRENT_KIND_NAMES:
            input_widths.add(_input_width(tree, layer))
    refused: dict[str, str] = {}
    for images in every:
        for layer in layers if images.channels not in input_widths else ():
            inputs = _input_width(tree, layer) if layer.kind_names == {"dense"} else 0
            if _is_multiple(inputs, images.channels) and _is_input_unknown(layer):
                refused.setdefault(layer.title, _explain_input(layer, inputs, images))
    return refused


def _is_mixed(layer: Layer, inputs: int, every: Iterable[_ConvolutionOutput]) -> bool:
    """Return whether a layer's input may be an image of at least two places and other numbers."""
    return _is_input_unknown(layer) and any(
        1 < 2 * image.channels <= inputs for image in every if image.channels > 1
    )


def _refuse_image_widths(
    tree: Tree, layers: tuple[Layer, ...], refused: Mapping[str, str], unflattened: Mapping[str, str]
) -> dict[str, str]:
    """Return why layers with as many inputs or outputs as a flattened image has values are refused.

    No tensor shows whether these are that image: a second head, a gate, a norm, the layer of a
    decoder.
    """
    widths = _image_widths(tree, layers, refused, unflattened)
    reasons: dict[str, str] = {}
    for layer in layers:
        if layer.title in refused or layer.title in unflattened:
            continue
        for option, verb, width in _unknown_sides(tree, layer) if widths else ():
            if width in widths:
                other, parts = widths[width]
                where = f"the flattened image of {other}" if other != layer.title else "its input image"
                reasons.setdefault(
                    layer.title,
                    f"{layer.title} {verb} {width:,} numbers, the size of {where}: either that image "
                    f"({option} '{layer.title}={parts}'), or not ({option} '{layer.title}=no')",
                )
    return reasons


def _image_widths(
    tree: Tree, layers: tuple[Layer, ...], refused: Mapping[str, str], unflattened: Mapping[str, str]
) -> dict[int, tuple[str, str]]:
    """Return by length the flattened images that are input or output of dense layers: layer and option."""
    widths: dict[int, tuple[str, str]] = {}
    for layer in layers:
        if layer.kind_names != {"dense"}:
            continue
        takes, makes = layer.facts.takes, layer.facts.makes
        if layer.facts.flatten:
            widths[_input_width(tree, layer)] = layer.title, ",".join(map(str, layer.facts.flatten))
        elif takes is not None and not takes.is_plain:
            widths[_input_width(tree, layer)] = layer.title, format_order_option(takes)
        elif layer.title in refused and _is_input_unknown(layer):
            widths.setdefault(_input_width(tree, layer), (layer.title, "places,channels"))
        if makes is not None and not makes.is_plain:
            widths[_tensor_width(tree, layer, "kernel")] = layer.title, format_order_option(makes)
        elif layer.title in unflattened:
            widths.setdefault(_tensor_width(tree, layer, "kernel"), (layer.title, "places,channels"))
    return widths


def _unknown_sides(tree: Tree, layer: Layer) -> list[tuple[str, str, int]]:
    """Return the unknown sides of a layer: the option, the verb, and the size."""
    names = layer.kind_names
    sides: list[tuple[str, str, int]] = []
    if names <= _NORMS and _is_input_unknown(layer):
        sides.append(("--flatten", "is a norm of", _norm_width(tree, layer)))
    elif (names == {"dense"} or names <= RECURRENT_KIND_NAMES) and _is_input_unknown(layer):
        sides.append(("--flatten", "takes", _input_width(tree, layer)))
    if names == {"dense"} and layer.facts.makes is None:
        sides.append(("--unflatten", "gives", _tensor_width(tree, layer, "kernel")))
    return sides


def format_order_option(order: AxisOrder) -> str:
    """Return an order as written in an option: places,channels of an image, the count of other numbers."""
    return "+".join(
        str(channels) if places == 1 else f"{places},{channels}" for places, channels in order.parts
    )


_NORMS = _BETWEEN | {"batch_norm"}
# A dense layer is not assumed to feed a convolution just by its position if that has as few input channels as
# a camera image.
_COLOURS = 4
# The minimum shorter side of a picture; the longer one is at most twice as long.
_PICTURE = 5
# Numbers beside an image are rarely a multiple of as many channels.
_MANY = 8
# One-dimensional images are rarely longer.
_SMALL_SIDE = 7


def _is_input_unknown(layer: Layer) -> bool:
    return layer.facts.flatten is None and layer.facts.takes is None


def _is_multiple(count: int, channels: int) -> bool:
    return 1 < channels < count and count % channels == 0


def _refuse_image_input(
    tree: Tree, layer: Layer, every: Iterable[_ConvolutionOutput], *, mixed: bool
) -> list[_ConvolutionOutput]:
    """Return the first image that may be the input of a layer listed before every convolution, if any."""
    for images in every:
        odd = images.channels > 1 and _is_unexplained_input(tree, layer, images, -1)
        if odd or (mixed and _is_mixed(layer, _input_width(tree, layer), (images,))):
            return [images]
    return []


def _refuse_unflattened(tree: Tree, layers: tuple[Layer, ...]) -> dict[str, str]:
    """Return why dense layers and norms are refused whose outputs a convolution may read as an image."""
    refused: dict[str, str] = {}
    takes = {
        _input_width(tree, layer)
        for layer in layers
        if layer.kind_names <= {"dense", *RECURRENT_KIND_NAMES} and not _takes_image(layer)
    }
    produced = {channels for layer in layers for channels in _output_channels(tree, layer)}
    behind: list[tuple[Layer, int]] = []
    later: list[tuple[Layer, int]] = []
    for layer in layers:
        names = layer.kind_names
        if names == {"dense"}:
            width = _tensor_width(tree, layer, "kernel")
            behind = [(layer, width)]
            later += [(layer, width)] if width not in takes else []
        elif names & _NORMS and behind and _norm_width(tree, layer) == behind[0][1]:
            behind.append((layer, behind[0][1]))
        elif names & _CONVOLUTIONS:
            inputs = _input_channels(tree, layer)
            for dense, width in (*behind, *later):
                wide = sorted(input_ for input_ in inputs if _is_multiple(width, input_))
                wide = (
                    wide
                    if (dense, width) in behind
                    else [number for number in wide if number not in produced]
                )
                far = len(dense.name) > 1 and dense.name[:1] != layer.name[:1] and max(inputs) <= _COLOURS
                if wide and not far and _is_order_unknown(dense):
                    refused.setdefault(dense.title, _explain_output(dense, width, wide, layer))
            behind = []
        else:
            behind = []
    return refused


def _is_order_unknown(layer: Layer) -> bool:
    """Return whether a dense layer's output order, or a norm's input order, is unknown."""
    if layer.kind_names == {"dense"}:
        return layer.facts.makes is None
    return layer.facts.takes is None


def _output_channels(tree: Tree, layer: Layer) -> tuple[int, ...]:
    """Return a convolution's number of output channels, if its bias shows it."""
    if not layer.kind_names & _CONVOLUTIONS:
        return ()
    tensors = canonical_tensors(tree, layer, layer.kinds[0])
    return (tensors["bias"].shape[0],) if "bias" in tensors else ()


def _explain_output(layer: Layer, width: int, channels: list[int], convolution: Layer) -> str:
    """Return why a layer's output is ambiguous, with an option for every possible number of channels."""
    dense = layer.kind_names == {"dense"}
    option = "--unflatten" if dense else "--flatten"
    able = [f"{option} '{layer.title}={width // count},{count}'" for count in channels]
    return (
        f"{layer.title} outputs {width:,} numbers, which may be an image of "
        f"{' or '.join(f'{count:,}' for count in channels)} channels for {convolution.title}: either "
        f"places and channels, which the two frameworks order differently ({' or '.join(able)}; with "
        f"fewer channels, as places,channels, if others are concatenated), or not ({option} "
        f"'{layer.title}=no')"
    )


def _input_channels(tree: Tree, layer: Layer) -> tuple[int, ...]:
    """Return the possible input channels of a convolution: without a bias it may be a transposed one."""
    tensors = canonical_tensors(tree, layer, layer.kinds[0])
    kernel = tensors["pointwise_kernel" if "pointwise_kernel" in tensors else "kernel"].shape
    either = tuple(dict.fromkeys(kernel[-2:]))
    bias = tensors["bias"].shape[0] if "bias" in tensors else None
    if bias in either and len(either) > 1 and layer.kinds[0].name == "convolution":
        return tuple(size for size in either if size != bias)
    return either


def _is_unexplained_input(tree: Tree, layer: Layer, images: _ConvolutionOutput, gives: int) -> bool:
    """Return whether a dense layer has more inputs than the channels, and than the known output before it."""
    inputs = _input_width(tree, layer)
    # An image of one position or one channel has the same order in both frameworks.
    wide = [size for size in images.either if size > 1]
    more = bool(wide) and 2 * min(wide) <= inputs != gives and (not gives or inputs % images.channels == 0)
    return more and _is_input_unknown(layer)


def _input_width(tree: Tree, layer: Layer) -> int:
    return canonical_tensors(tree, layer, layer.kinds[0])["kernel"].shape[0]


def _tensor_width(tree: Tree, layer: Layer, name: str) -> int:
    return canonical_tensors(tree, layer, layer.kinds[0])[name].shape[-1]


def _norm_width(tree: Tree, layer: Layer) -> int:
    try:
        shapes = [leaf.shape for leaf in canonical_tensors(tree, layer, layer.kinds[0]).values()]
    except MappingError:
        return 0  # refused because of its kind
    return shapes[0][0] if shapes and len(shapes[0]) == 1 else 0


def _convolution_output(tree: Tree, layer: Layer) -> _ConvolutionOutput:
    tensors = canonical_tensors(tree, layer, layer.kinds[0])
    kernel = tensors["pointwise_kernel" if "pointwise_kernel" in tensors else "kernel"].shape
    channels = kernel[-1] * (kernel[-2] if layer.kinds[0].name == "depthwise" else 1)
    if "bias" in tensors:
        channels = tensors["bias"].shape[0]
        return _ConvolutionOutput(channels, len(kernel) - 2, (channels,))
    return _ConvolutionOutput(channels, len(kernel) - 2, (channels, *kernel[-2:]))


def _narrow_by_norm(images: _ConvolutionOutput, width: int) -> _ConvolutionOutput:
    """Return the convolution's output, narrowed by a norm of this width after it.

    A convolution without a bias may be transposed; the last axis of its kernel is then its inputs. A
    norm with another width than the kernel's axes follows a flattened image and gives no information.
    """
    return images._replace(channels=width) if width in images.either else images


def _explain_candidates(
    layer: Layer,
    count: int,
    images: _ConvolutionOutput,
    candidates: Mapping[_ConvolutionOutput, str],
    by_name: bool,
) -> str:
    """Return why a layer's input is unknown, with an option for each convolution whose image it may be."""
    if not by_name and len(candidates) == 1:
        return _explain_input(layer, count, next(iter(candidates)))
    options = [
        f"{_flatten_option(layer, count, image)} for {title}"
        for image, title in candidates.items()
        if _is_rectangular(count, image)
    ]
    if not options:
        return _explain_input(layer, count, images)
    return (
        f"{layer.title} takes {count:,} numbers: either the flattened image of a convolution, which the two "
        f"frameworks order differently ({' or '.join(options)}), or not (--flatten '{layer.title}=no'); the "
        "file does not record which, a call of its own model shows it (--like-source MODULE:FACTORY)"
    )


def _is_rectangular(count: int, images: _ConvolutionOutput) -> bool:
    """Return whether the numbers can be an image of these channels that is no long single row."""
    places = count // images.channels
    prime = images.axes > 1 and all(places % n for n in range(2, places))
    return not count % images.channels and not (prime and places > _SMALL_SIDE)


def _flatten_option(layer: Layer, count: int, images: _ConvolutionOutput) -> str:
    shape = (*_places(count, images), images.channels)
    return f"--flatten '{layer.title}={','.join(map(str, shape))}'"


def _places(count: int, images: _ConvolutionOutput) -> list[int]:
    """Return the sides of a square image, else the number of places: their order is that of both sides."""
    side = round((count / images.channels) ** (1 / images.axes))
    square = side**images.axes * images.channels == count
    return [side] * images.axes if square else [count // images.channels]


def _explain_input(layer: Layer, count: int, images: _ConvolutionOutput, verb: str = "takes") -> str:
    channels = images.channels
    start = f"{layer.title} {verb} {count:,} numbers after a convolution of {channels:,} channels: "
    if not _is_rectangular(count, images):
        return (
            f"{start}either an image beside other numbers, in this order (--flatten '{layer.title}="
            f"PLACES,{channels}+NUMBERS'), or not (--flatten '{layer.title}=no'); a call of your own model "
            "shows it (--like with --input-shape)"
        )
    return (
        f"{start}either a flattened image, which the two frameworks order differently "
        f"({_flatten_option(layer, count, images)}), or not (--flatten '{layer.title}=no'); write numbers "
        "beside an image as places,channels+numbers"
    )
