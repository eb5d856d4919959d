"""Names and paths of Keras layers in object graphs, from the names of variables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckpttool.core.source import Shape
from ckpttool.core.tree import Path, attr, index


def object_graph_paths(names: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], Path]:
    """Return each name's path in an object graph: attributes, and indices where all siblings are numbers.

    An object whose children all have decimal numbers as names is a list (see formats.object_graph).
    """
    names = list(names)
    below: dict[tuple[str, ...], bool] = {}
    for name in names:
        for depth, step in enumerate(name):
            below[name[:depth]] = below.get(name[:depth], True) and _is_index(step)
    return {
        name: tuple(index(int(s)) if below[name[:d]] else attr(s) for d, s in enumerate(name))
        for name in names
    }


# Edges from a Keras model to its layers (keras/src/models/sequential.py; number 0 is the input layer).
SEQUENTIAL_EDGES = ("_functional", "_operations")
_VECTORS = frozenset(("gamma", "beta", "moving_mean", "moving_variance"))


def sequential_names(
    shapes: Mapping[tuple[str, ...], Shape], first: int | None = None
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the names that a network's variables have if its numbered layers are Keras Sequentials.

    Numbered objects are a Sequential if numbers are missing, which are modules without weights, or if each
    one takes what the one before returns. Other numbers stay list indices. Keras numbers the layers without
    weights, too; an activation is an argument of the dense layer or convolution before it, not a layer.

    Args:
        shapes: the variables of networks with their shapes in TensorFlow.
        first: number of the first layer; by default, modules before it count.
    """
    below: dict[tuple[str, ...], dict[str, None]] = {}
    layers: dict[tuple[str, ...], dict[str, Shape]] = {}
    for name, shape in shapes.items():
        layers.setdefault(name[:-1], {})[name[-1]] = shape
        for depth, step in enumerate(name):
            below.setdefault(name[:depth], {})[step] = None
    edges: dict[tuple[str, ...], tuple[str, ...]] = {}
    for parent, steps in below.items():
        numbers = sorted(int(step) for step in steps if _is_index(step) and (*parent, step) in below)
        run = [(*parent, str(number)) for number in numbers]
        gaps = numbers != list(range(len(numbers)))
        if numbers and (gaps or _chain_sizes(run, layers, below) is not None):
            merging = ["kernel" in layers.get(name, {}) for name in run]
            for name, counted in zip(run, _count_layers(numbers, merging, first), strict=True):
                edges[name] = (*SEQUENTIAL_EDGES, str(counted))
    return {
        name: tuple(word for depth, s in enumerate(name) for word in edges.get(name[: depth + 1], (s,)))
        for name in shapes
    }


_Sizes = tuple[int, int, bool]


def _chain_sizes(
    run: Iterable[tuple[str, ...]],
    layers: Mapping[tuple[str, ...], Mapping[str, Shape]],
    below: Mapping[tuple[str, ...], Mapping[str, None]],
) -> _Sizes | None:
    """Return the sizes of layers of which each takes what the one before returns, None for others."""
    sizes: list[_Sizes] = []
    for name in run:
        own = _layer_sizes(layers[name]) if name in layers else None
        steps = below[name]
        if name not in layers and all(map(_is_index, steps)):
            own = _chain_sizes(((*name, step) for step in sorted(steps, key=int)), layers, below)
        if own is None or (sizes and not _follows(own, sizes[-1])):
            return None
        sizes.append(own)
    return (sizes[0][0], sizes[-1][1], sizes[-1][2]) if sizes else None


def _follows(layer: _Sizes, before: _Sizes) -> bool:
    """Return whether the layer takes what the one before returns; images may be flattened."""
    return layer[0] % before[1] == 0 if before[2] else layer[0] == before[1]


def _layer_sizes(variables: Mapping[str, Shape]) -> _Sizes | None:
    """Return a layer's numbers of inputs and outputs and whether it returns an image, None if unknown."""
    kernel = variables.get("kernel", ())
    if len(kernel) > 1 and variables.keys() <= {"kernel", "bias"} and all(kernel):
        return kernel[-2], kernel[-1], len(kernel) > 2
    vectors = set(variables.values())
    if variables.keys() <= _VECTORS and len(vectors) == 1 and len(shape := vectors.pop()) == 1 and shape[0]:
        return shape[0], shape[0], "moving_mean" in variables  # of images or of vectors
    return None


def _count_layers(numbers: list[int], merging: list[bool], first: int | None) -> Iterator[int]:
    """Yield Keras's numbers of the layers; the gaps between `numbers` are modules without weights.

    `merging` layers take an activation as their argument.
    """
    count, before, merges = 0, -1 if first is None else numbers[0] - first, False
    for number, merging_too in zip(numbers, merging, strict=True):
        between = number - before - 1
        count += 1 + between - (merges and between > 0)
        yield count
        before, merges = number, merging_too


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10 and str(int(name)) == name
