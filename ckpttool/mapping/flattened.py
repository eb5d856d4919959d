"""Dense layers that may take a flattened image, whose numbers the two frameworks order differently.

TensorFlow keeps channels last, so that a flattened image is H, W, C; PyTorch keeps them first. A checkpoint
does not say what was flattened. Sources: keras/src/layers/reshaping/flatten.py, torch/nn/modules/flatten.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckpttool.mapping.layers import Layer, canonical
from ckpttool.tree import Tree

_BETWEEN = frozenset(("layer_norm", "layer_norm_images", "rms_norm", "prelu"))
_CONVOLUTIONS = frozenset(("convolution", "depthwise", "separable"))


class _Images(NamedTuple):
    """What a convolution gives: channels, over how many axes it goes, and what the channels may be."""

    channels: int
    axes: int
    either: tuple[int, ...]


def unknown(tree: Tree, found: tuple[Layer, ...]) -> Mapping[str, str]:
    """Return by title why a dense layer cannot be converted before somebody says what it takes.

    That is so right after a convolution with fewer channels than the layer has inputs; for one that takes a
    multiple of the channels and not what the layer before it gives (a second head); and for one that stands
    before every convolution, where files list layers by name, if no dense layer gives what it takes.
    """
    refused: dict[str, str] = {}
    images: _Images | None = None
    every: dict[_Images, None] = {}
    gives = 0
    waiting: list[Layer] = []
    outputs: set[int] = set()
    for layer in found:
        names = {kind.name for kind in layer.kinds}
        if names & _CONVOLUTIONS:
            images, gives = _images(tree, layer), 0
            every[images] = None
        elif names == {"batch_norm"} and images is not None and not gives:
            images = _normed(images, _width(tree, layer, "mean"))
        elif names == {"dense"}:
            if not every:
                waiting.append(layer)
            elif images is not None and _is_odd(tree, layer, images, gives):
                refused[layer.title] = _reason(tree, layer, images)
            gives = _width(tree, layer, "kernel")
            outputs.add(gives)
        elif not names <= _BETWEEN:
            # What a recurrent layer or an attention gives is no image.
            images, gives = None, 0
    for layer in waiting:
        if layer.title not in refused and _inputs(tree, layer) not in outputs:
            refused |= _before(tree, layer, every)
    return refused


def _before(tree: Tree, layer: Layer, every: Iterable[_Images]) -> dict[str, str]:
    for images in every:
        if images.channels > 1 and _is_odd(tree, layer, images, -1):
            return {layer.title: _reason(tree, layer, images)}
    return {}


def _is_odd(tree: Tree, layer: Layer, images: _Images, gives: int) -> bool:
    """Say whether a dense layer takes more than the channels, and not what was given before it, if known."""
    inputs = _inputs(tree, layer)
    more = 0 < images.channels < inputs != gives and (not gives or inputs % images.channels == 0)
    return more and layer.told.flatten is None


def _inputs(tree: Tree, layer: Layer) -> int:
    return canonical(tree, layer, layer.kinds[0])["kernel"].shape[0]


def _width(tree: Tree, layer: Layer, name: str) -> int:
    return canonical(tree, layer, layer.kinds[0])[name].shape[-1]


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


def _reason(tree: Tree, layer: Layer, images: _Images) -> str:
    inputs, (channels, axes, _) = _inputs(tree, layer), images
    side = round((inputs / channels) ** (1 / axes))
    sides = [str(side)] * axes if side**axes * channels == inputs else list("DHW"[-axes:])
    return (
        f"{layer.title} takes {inputs:,} numbers after a convolution of {channels:,} channels: of a "
        f"flattened image, which the two order differently (--flatten "
        f"'{layer.title}={','.join((*sides, str(channels)))}'), or not (--flatten '{layer.title}=no')"
    )
