"""Builds what a policy computes besides its layers: image encoders, joined inputs, recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import numpy as np

from ckpttool.agents.building import Builder, gru, lstm
from ckpttool.agents.network import Activation, Affine, Concat, Convolution, Dense, Flatten, Transpose
from ckpttool.layouts import fronts, memory
from ckpttool.layouts.fronts import Front, Stream
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.source import Shape
from ckpttool.tree import Tree

Shapes = Mapping[str, Shape]
"""Shapes of observations by the name of their input, without the batch."""


def fits(front: Front, seen: Shapes) -> bool:
    """Say whether observations of these shapes are what a front takes; images may have the channels last."""
    return seen.keys() == {stream.name for stream in front.streams} and all(
        seen[stream.name] in (stream.shape, *([_last(stream.shape)] if stream.image else []))
        for stream in front.streams
    )


def begun(agent: Tree, component: str, front: Front, seen: Shapes | None = None) -> Builder:
    """Return a network of a front's inputs and states; `seen` are an environment's shapes, which fit."""
    inputs = [(s.name, _plain(s.shape if seen is None else seen[s.name])) for s in front.streams]
    places = [(*fronts.memory(component, n), fronts.RECURRENT) for n in range(len(front.cells))]
    units = [cast(Leaf, agent[place]).shape[0] for place in places]
    slots = [_slots(n)[: _STATES[kind]] for n, kind in enumerate(front.cells)]
    return Builder(inputs, [(name, width) for own, width in zip(slots, units, strict=True) for name in own])


def encode(
    builder: Builder, agent: Tree, component: str, front: Front, normalise: Callable[[int], None]
) -> int:
    """Add a front to its inputs and return the number of what it gives, [batch, features].

    `normalise` adds the statistics of an only input that is no image, and is given its width.
    """
    joined = []
    for number, stream in enumerate(front.streams):
        builder.last = number
        if stream.image:
            _image(builder, agent, component, stream)
        elif len(stream.shape) > 1:
            builder.add(Flatten())
        if len(front.streams) == 1 and not stream.image:
            normalise(stream.size)
        joined.append(builder.last)
    if len(joined) > 1:
        builder.add(Concat(), *joined)
    for number, kind in enumerate(front.cells):
        _cell(builder, agent, fronts.memory(component, number), number, kind)
    return builder.last


def norms(agent: Tree, component: str, front: Front) -> dict[int, tuple[Affine, Affine]]:
    """Return a front's batch norms by the number of the dense layer that each stands before.

    In two steps, as statistics of observations are: the mean first, so that nothing cancels.
    """
    found = {}
    for number, epsilon in front.norms:
        place = fronts.norm(component, number)
        mean, var, scale, offset = (
            _array(agent, (*place, attr(name))) for name in ("mean", "var", "scale", "offset")
        )
        factor = (scale / np.sqrt(var.astype(np.float64) + epsilon)).astype(np.float32)
        found[number] = Affine(np.ones_like(mean), -mean), Affine(factor, offset)
    return found


def _plain(shape: Shape) -> int | Shape:
    return shape[0] if len(shape) == 1 else shape


def _last(shape: Shape) -> Shape:
    """Return an image's shape with the channels last."""
    return (*shape[1:], shape[0])


# How many states each kind carries: its output, and an LSTM's cell.
_STATES = {memory.LSTM: 2, memory.GRU: 1, memory.GRU_BEFORE: 1}


def _slots(number: int) -> tuple[str, str]:
    # An environment's inputs have no slash in front.
    return f"/hidden{number}", f"/cell{number}"


def _image(builder: Builder, agent: Tree, component: str, stream: Stream) -> None:
    """Add convolutions on images with the channels last, and the layers on what they give."""
    if builder.inputs[builder.last][1] == stream.shape:
        builder.add(Transpose((1, 2, 0)))
    if stream.scale != 1:
        builder.add(Affine(np.full(1, stream.scale, np.float32), np.zeros(1, np.float32)))
    places = [fronts.layer(component, stream.name, n) for n in range(len(stream.strides) + stream.dense)]
    for place, stride in zip(places, stream.strides, strict=False):
        kernel, bias = (_array(agent, (*place, name)) for name in (fronts.KERNEL, fronts.BIAS))
        builder.add(Convolution(kernel, bias, (stride, stride)))
        builder.add(Activation("relu"))
    builder.add(Transpose((2, 0, 1)))
    builder.add(Flatten())
    for place in places[len(stream.strides) :]:
        builder.add(Dense(*(_array(agent, (*place, name)) for name in (fronts.KERNEL, fronts.BIAS))))
        builder.add(Activation("relu"))


def _cell(builder: Builder, agent: Tree, place: Path, number: int, kind: str) -> None:
    kernel, recurrent = (_array(agent, (*place, name)) for name in (fronts.KERNEL, fronts.RECURRENT))
    biases = [
        _array(agent, (*place, name)) if (*place, name) in agent else np.zeros(kernel.shape[1], np.float32)
        for name in fronts.BIASES
    ]
    names = _slots(number)
    if kind == memory.LSTM:
        lstm(builder, names, kernel, recurrent, biases[0] + biases[1])
    else:
        after = kind == memory.GRU
        gru(builder, names[0], kernel, recurrent, (biases[0], biases[1]), reset_after=after)


def _array(agent: Tree, path: Path) -> np.ndarray:
    return cast(Leaf, agent[path]).array().astype(np.float32)
