"""What a codebase's classes cannot be, and what people should know of an agent that goes there."""

from __future__ import annotations

from itertools import pairwise

from ckpttool.errors import UnsupportedError, some
from ckpttool.layouts import canonical
from ckpttool.layouts.action_maps import acts_as
from ckpttool.layouts.canonical import Binding, Part
from ckpttool.layouts.naming import Names, Writing
from ckpttool.leaf import Leaf, Path, attr
from ckpttool.tree import Tree

MAPS = {
    "tanh": "one number times tanh",
    "affine": "tanh mapped to the action bounds",
    "identity": "the last layer as it is",
    "clip": "the last layer limited to the action bounds",
    "clip_affine": "the last layer limited to [-1, 1] and mapped to the action bounds",
    "tanh_clip_affine": "max_action times tanh, limited to [-1, 1] and mapped to the action bounds",
    "clip_tanh_affine": "tanh of the last layer limited to [-2, 2], mapped to the action bounds",
}
# Equal to tanh mapped to the bounds for some bounds only, and hardly for those that anybody has.
_CLIPPED = "tanh_clip_affine"
_SAVES = (attr("save_counter"),)


def require(writing: Writing, binding: Binding, agent: Tree) -> None:
    """Raise UnsupportedError for an agent that the codebase cannot hold, whatever its layers are called."""
    titles = {part.title for part in binding.parts}
    absent = [name for name in writing.needs if not any(t.partition("/")[0] == name for t in titles)]
    if absent:
        raise UnsupportedError(
            f"{writing.whose} saves no agent without {' and '.join(absent)}", found=", ".join(sorted(titles))
        )
    held = writing.held.keys()
    heads = {title.partition("/")[0] for title in held if "/" in title}
    many = sorted(title for title in titles - held if title.partition("/")[0] in heads)
    if many:
        raise UnsupportedError(f"{writing.whose} has fewer Q-functions", found=", ".join(many))
    if writing.values:
        _require_values(writing, binding, agent)
    fits = not writing.head or acts_as(binding.facts, agent, writing.head)
    if fits is False or (fits is None and binding.facts.head == _CLIPPED):
        raise UnsupportedError(
            f"{writing.whose} makes actions otherwise than this agent: {MAPS[writing.head]}",
            expected=writing.head,
            found=binding.facts.head,
            hint="--bounds LOW HIGH shows whether the two are equal" if fits is None else None,
        )


def _require_values(writing: Writing, binding: Binding, agent: Tree) -> None:
    for part in binding.parts:
        if part.head is None or part.title not in writing.held:
            continue
        found = shapes(part, agent)
        if found and found[-1][-1] != 1:
            raise UnsupportedError(
                f"{writing.whose} has Q-functions that give one number",
                found=f"{part.title} gives {found[-1][-1]}",
            )
        if not writing.late and any(one[-1] != two[0] for one, two in pairwise(found)):
            raise UnsupportedError(
                f"the Q-functions of {writing.whose} take observation and action at the first layer",
                found=f"{part.title} takes the action later",
            )


def require_layers(part: Part, names: Names, binding: Binding, writing: Writing) -> None:
    """Raise UnsupportedError for layers, or tensors of no known kind, that the network has no names for."""
    able = {"dense", *(["layer_norm"] if names.norm is not None else [])}
    strange = [
        f"{part.title}/{'/'.join(each.name)}: {each.kind}" for each in part.layers if each.kind not in able
    ]
    left = binding.unplaced.get(part.component, ())
    if strange or left:
        kinds = "dense layers only" if names.norm is None else "dense layers and layer norms only"
        raise UnsupportedError(f"{writing.whose} has {kinds}", found=some([*strange, *left], 3))
    wanted, found = {"log_std"} if names.joined else set(names.branches), {name for name, _ in part.branches}
    if part.acts and names.joined and not wanted <= found:
        raise UnsupportedError(
            f"the last layer of {writing.whose} gives mean and deviation, this policy has no deviation"
        )


def shapes(part: Part, agent: Tree) -> list[tuple[int, ...]]:
    """Return the shapes [in, out] of a network's kernels, in order."""
    kernels = [agent.get(canonical.weight(part, n, "kernel")) for n in range(len(part.layers))]
    return [leaf.shape for leaf in kernels if isinstance(leaf, Leaf)]


def consumed(agent: Tree) -> tuple[Path, ...]:
    """Return what the sidecar tells, and TensorFlow's count of saves, which is no agent's."""
    return tuple(path for path in agent if canonical.mapped_by_sidecar(path) or path == _SAVES)


def notes(writing: Writing, binding: Binding, agent: Tree) -> tuple[str, ...]:
    """Return what people should know: what stays behind, and what the library must be told to build."""
    found = list(writing.notes)
    names = set(binding.facts.activations or (binding.facts.hidden,))
    if writing.hidden and names != {writing.hidden}:
        wanted = ", ".join(sorted(names))
        found.append(f"{writing.whose} has {writing.hidden} in hidden layers unless told {wanted}")
    held = writing.held
    depths = {len(part.layers) for part in binding.parts if part.title in held}
    if writing.depth and depths != {writing.depth}:
        found.append(
            f"{writing.whose}'s own classes have {writing.depth} layers, this agent's another number"
        )
    sizes = {tuple(shape[-1] for shape in shapes(p, agent)[:-1]) for p in binding.parts if p.title in held}
    if writing.alike and len(sizes) > 1:
        found.append(f"{writing.whose} has one list of hidden sizes for all networks, this agent has several")
    if writing.head and acts_as(binding.facts, agent, writing.head) is None:
        found.append(f"unknown action bounds (--bounds LOW HIGH); {writing.whose} has {MAPS[writing.head]}")
    slow = {part.component for part in binding.parts if part.component.endswith("_target")}
    if slow and not any(place.partition("/")[0] in slow for place in held):
        found.append(f"{writing.whose} saves no targets")
    if _SAVES in agent:
        found.append("save_counter, TensorFlow's count of saves, stays behind")
    return tuple(found)
