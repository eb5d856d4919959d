"""Which network an optimizer trains, and in which order, where an agent keeps several of both.

Keras stores nothing that says so (keras/src/saving/saving_lib.py). What is taken for certain: an optimizer
goes through its layers one after another (keras/src/layers/layer.py, trainable_variables), and every slot has
its variable's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpttool.formats.keras_tree import optimizers
from ckpttool.formats.keras_tree.config import Config
from ckpttool.formats.keras_tree.modules import Node, Walk
from ckpttool.leaf import Path, attr
from ckpttool.source import Shape

_MOST = 64  # optimizers: each is compared with every layer
_ENDS = ("_optimizer", "_optim", "_opt")


def network(at: Path, walk: Walk) -> Path | None:
    """Return what the optimizer at this path trains: `X` if it is `X_optimizer`, or all beside it.

    None if there is no such object, or several optimizers and no name that decides, or more than _MOST.
    """
    if len(walk.optimizers) > _MOST:
        return None
    beside = at[:-1]
    name = str(at[-1].value)
    for end in _ENDS:
        sibling = (*beside, attr(name.removesuffix(end)))
        if name.endswith(end) and sibling in walk.containers:
            return sibling
    others = [other for _, other in walk.optimizers if other[-1].value != optimizers.INNER]
    alone = sum(other[: len(beside)] == beside for other in others) == 1
    return beside if alone or name == "optimizer" else None


def trained(node: Node, config: Config, of: Path | None, walk: Walk) -> list[optimizers.Trained] | None:
    """Return the variables that an optimizer trains, in its order; None unless there is one answer."""
    if of is None:
        return None
    cut = len(of)
    layers = [each for path, each in walk.trained if each and path[:cut] == of]
    if not any(path[:cut] == of for path in walk.unsure):
        return [one for layer in layers for one in layer]
    rounds = optimizers.rounds(config.cls, config.settings)
    if not rounds:
        return None
    count, step = sum(map(len, layers)), len(rounds[0])
    for start in optimizers.starts(node.variables):
        slots = node.variables[start : start + count * step : step]
        order = parsed([one.shape for one in slots], layers)
        if order is not None:
            return order
    return None


def parsed(
    slots: Sequence[Shape], layers: Sequence[Sequence[optimizers.Trained]]
) -> list[optimizers.Trained] | None:
    """Return the trained variables in the optimizer's order, read off the first slots' shapes.

    An optimizer goes through layer after layer, each in its own order; which layer comes next must be plain
    from shapes at every step, and every layer must have its turn. Otherwise None.
    """
    waiting: dict[tuple[Shape, ...], list[Sequence[optimizers.Trained]]] = {}
    for layer in layers:
        waiting.setdefault(tuple(one.shape for one in layer), []).append(layer)
    if any(len(same) > 1 for same in waiting.values()):
        return None
    lengths = sorted({len(shapes) for shapes in waiting})
    order: list[optimizers.Trained] = []
    for _ in layers:
        at = len(order)
        left = [n for n in lengths if at + n <= len(slots)]
        fits = [found for n in left if (found := waiting.get(tuple(slots[at : at + n])))]
        if len(fits) != 1:
            return None
        (layer,) = fits[0]
        order += layer
        fits[0].clear()
    return order
