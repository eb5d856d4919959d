"""What d3rlpy's configuration (in a `.d3` file, or a params.json of version 2) says of an agent.

Sources, in github.com/takuseno/d3rlpy: d3rlpy/base.py (`LearnableConfigWithShape`),
d3rlpy/models/encoders.py, d3rlpy/models/utility.py (`create_activation`), d3rlpy/preprocessing/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.layouts.canonical import Binding, Facts, Norm, Part
from ckpttool.layouts.small_arrays import tensor
from ckpttool.leaf import ValueLeaf
from ckpttool.ledger import NO_ACTIVATIONS, unknown
from ckpttool.tree import Tree

Said = Mapping[str, object]

_PARAMS = "config/params/"
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "tanh": "tanh", "swish": "silu", "none": "linear"}


def below(tree: Tree, *top: str) -> dict[str, object]:
    """Return the plain values below the path, by the rest of their names."""
    cut = len(top)
    return {
        "/".join(str(step.value) for step in path[cut:]): leaf.value
        for path, leaf in tree.items()
        if isinstance(leaf, ValueLeaf) and tuple(step.value for step in path[:cut]) == top
    }


def told(binding: Binding, said: Said, where: str) -> Binding:
    """Return the binding with the facts that the configuration says; `where` is where it stands."""
    mine = {name.removeprefix(_PARAMS): value for name, value in said.items() if name.startswith(_PARAMS)}
    facts = binding.facts._replace(lacks=())
    facts = _bounds(facts, mine, said.get("action_size"), where)
    facts = _norm(facts, mine, said.get("observation_shape/0"), where)
    return _activated(replace(binding, facts=facts), mine, where)


def _bounds(facts: Facts, said: Said, size: object, where: str) -> Facts:
    kind = said.get("action_scaler/type", "none")
    if kind == "none" and isinstance(size, int) and 0 < size < 1 << 16:
        # Nothing is scaled: an action is tanh itself.
        return facts.read(where, action_low=(-1.0,) * size, action_high=(1.0,) * size)
    low, high = (_numbers(said, f"action_scaler/params/{name}") for name in ("minimum", "maximum"))
    if kind != "min_max" or not low or len(low) != len(high):
        return facts.lacking(unknown("action map", f"the action scaler ({kind})", decides=True))
    return facts.read(where, action_low=low, action_high=high)


def _norm(facts: Facts, said: Said, size: object, where: str) -> Facts:
    kind = said.get("observation_scaler/type", "none")
    if kind == "none":
        return facts
    params = "observation_scaler/params/"
    norm = None
    if kind == "standard":
        epsilon = said.get(f"{params}eps", 0.0)
        mean, std = _numbers(said, f"{params}mean"), _numbers(said, f"{params}std")
        if isinstance(epsilon, float) and mean and len(mean) == len(std):
            norm = Norm(tensor(mean, "mean"), std=tensor(std, "std"), epsilon=epsilon, outside=True)
    elif kind == "min_max":
        low, high = _numbers(said, f"{params}minimum"), _numbers(said, f"{params}maximum")
        if low and len(low) == len(high):
            middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
            half = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
            norm = Norm(tensor(middle, "middle"), std=tensor(half, "half"))
    elif kind == "pixel" and isinstance(size, int) and 0 < size < 1 << 16:
        norm = Norm(tensor([0.0] * size, "0"), std=tensor([255.0] * size, "255"))
    if norm is None:
        return facts.lacking(
            unknown("observation statistics", f"the observation scaler ({kind})", decides=True)
        )
    return facts.read(where, norm=norm)


def _activated(binding: Binding, said: Said, where: str) -> Binding:
    """Return the binding with the policy's activations; networks that have others cannot be run with it."""
    parts = sorted(binding.parts, key=lambda part: not part.acts)
    names = _activations(said, parts[0])
    facts, unplaced = binding.facts, dict(binding.unplaced)
    facts = facts.lacking(NO_ACTIVATIONS) if names is None else facts.read(where, activations=names)
    for part in parts[1:]:
        others = _activations(said, part)
        # The last one repeats: only where all are one may the numbers of layers differ.
        if others != names and not (others and names and len({*others, *names}) == 1):
            shown = f"{part.title} ({', '.join(others or ('unknown',))} activations, unlike {parts[0].title})"
            unplaced[part.component] = (*unplaced.get(part.component, ()), shown)
    return replace(binding, facts=facts, unplaced=unplaced)


_FACTORIES = {
    "actor": ("actor_encoder_factory", "encoder_factory"),
    "actor_target": ("actor_encoder_factory",),
    "value": ("value_encoder_factory",),
}


def _activations(said: Said, part: Part) -> tuple[str, ...] | None:
    """Return what follows each hidden layer of the network, None if that is not known."""
    factories = _FACTORIES.get(part.component, ("critic_encoder_factory",))
    params = next((f"{name}/params/" for name in factories if f"{name}/type" in said), "")
    name = ACTIVATIONS.get(str(said.get(f"{params}activation")))
    hidden = sum(layer.kind == "dense" for layer in part.layers) - 1
    if name is None or hidden < 1:
        return None
    last: str | None = name
    if said.get(f"{params}exclude_last_activation"):
        last = "linear"
    elif said.get(f"{params}last_activation"):
        last = ACTIVATIONS.get(str(said[f"{params}last_activation"]))
    return None if last is None else (*(name,) * (hidden - 1), last)


def _numbers(said: Said, name: str) -> tuple[float, ...]:
    """Return the numbers of a list, none unless it is one of numbers alone."""
    found: list[float] = []
    while isinstance(number := said.get(f"{name}/{len(found)}"), int | float):
        found.append(float(number))
    return tuple(found)
