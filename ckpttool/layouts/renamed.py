"""Writes an agent's networks under layer names that another codebase's classes prescribe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckpttool.errors import UnsupportedError, some
from ckpttool.layouts import canonical
from ckpttool.layouts.canonical import Binding, Facts, Part, PartLayer
from ckpttool.leaf import Key, Leaf, attr, display, key
from ckpttool.mapping.kinds import SPELLING
from ckpttool.mapping.report import Move
from ckpttool.tree import Tree


def dense_parts(binding: Binding, component: str, whose: str) -> tuple[Part, ...]:
    """Return the component's networks; raise UnsupportedError unless all their layers are dense.

    `whose` are the classes that are to take them ("the TD3 authors' program").
    """
    found = tuple(part for part in binding.parts if part.component == component)
    strange = [
        f"{part.title}/{'/'.join(layer.name)}: {layer.kind}"
        for part in found
        for layer in part.layers
        if layer.kind != "dense"
    ]
    left = [name for title, names in binding.unplaced.items() if title == component for name in names]
    if strange or left:
        raise UnsupportedError(f"{whose} has dense layers only", found=some([*strange, *left], 3))
    return found


def one_number_each(critics: Iterable[Part], agent: Tree, whose: str) -> None:
    """Raise UnsupportedError unless the Q-functions give one number; a distribution's weights are many."""
    for part in critics:
        kernel = agent.get(canonical.weight(part, len(part.layers) - 1, "kernel"))
        width = kernel.shape[-1] if isinstance(kernel, Leaf) else 1
        if width != 1:
            raise UnsupportedError(
                f"{whose} has Q-functions that give one number", found=f"{part.title} gives {width}"
            )


def named(
    part: Part, agent: Tree, top: Key, names: Sequence[str], branch: str | None = None
) -> Iterator[Move]:
    """Go through a network's tensors, weight before bias: its layers are entries of `top` by these names.

    With `branch` it is that further head instead. Raise UnsupportedError for a layer that has no bias,
    which `torch.nn.Linear` would have.
    """
    layers: Iterable[tuple[int | str, PartLayer]] = enumerate(part.layers)
    if branch is not None:
        layers = [(branch, dict(part.branches)[branch])]
    for (position, layer), name in zip(layers, names, strict=True):
        for weight in SPELLING["torch", layer.kind].weights:
            source = canonical.weight(part, position, weight.canonical)
            if source not in agent:
                raise UnsupportedError("the layer has no place without this tensor", path=display(source))
            yield Move(
                source, (top, key(f"{name}.{weight.name}")), weight.to_canonical.inverse(agent[source])
            )


def scaled_tanh(facts: Facts, agent: Tree) -> bool | None:
    """Say whether an agent's actions are tanh mapped to its bounds; None where its bounds are not known.

    max_action * tanh is that for bounds of one size. The two small tensors of the action's map are read.
    """
    bounds = action_bounds(agent)
    if facts.head == "affine":
        return True
    if facts.head not in ("tanh", "tanh_clip_affine"):
        return False
    if bounds is None:
        return None
    low, high = bounds
    if facts.head == "tanh_clip_affine":
        return high[0] == 1  # clipping 1 * tanh changes nothing
    return all(value == high[0] for value in high) and all(value == -high[0] for value in low)


def action_bounds(agent: Tree) -> tuple[list[float], list[float]] | None:
    """Return low and high of each action as the canonical agent's scale and bias give them, None without."""
    scale, bias = (agent.get((attr("actor"), attr(name))) for name in ("action_scale", "action_bias"))
    if not isinstance(scale, Leaf) or not isinstance(bias, Leaf):
        return None
    wide, middle = scale.array().reshape(-1), bias.array().reshape(-1)
    return (middle - wide).tolist(), (middle + wide).tolist()
