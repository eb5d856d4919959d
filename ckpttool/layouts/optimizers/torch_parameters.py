"""How the weights of an agent become torch's parameters, and those its groups.

Source: torch/optim/optimizer.py: a group is a dict of settings and the parameters that they are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ckpttool.layouts import canonical
from ckpttool.layouts.optimizers.families import FAMILIES
from ckpttool.layouts.optimizers.known import PLACES, Known, is_state
from ckpttool.leaf import Path
from ckpttool.mapping.report import Move

_OURS = frozenset(ours for family in FAMILIES for ours in family.torch_settings.values())


class Parameter(NamedTuple):
    """One parameter of torch's, and the weights of the agent that go into it: two if a layer is two."""

    target: Path
    weights: tuple[Move, ...]

    @property
    def weight(self) -> Path:
        """The canonical path that settings are known by."""
        return self.weights[0].source


def parameters(weights: Sequence[Move]) -> list[Parameter]:
    """Return the parameters that the moves of a network make, in their order."""
    places: dict[Path, list[Move]] = {}
    for move in weights:
        places.setdefault(move.target, []).append(move)
    return [Parameter(path, tuple(moves)) for path, moves in places.items()]


def groups(known: Known, every: Sequence[Parameter]) -> list[list[Parameter]]:
    """Return the groups: as they were, if that is known; else one for each set of settings."""
    marks = [known.value(canonical.GROUP, each.weight) for each in every]
    wanted = [_signature(known, each) for each in every]
    told = all(isinstance(mark, int) for mark in marks)
    fits = told and len(set(zip(marks, wanted, strict=True))) == len(set(marks))
    found: dict[object, list[Parameter]] = {}
    for each, mark, own in zip(every, marks, wanted, strict=True):
        found.setdefault(mark if fits else own, []).append(each)
    order = sorted(found, key=lambda mark: int(str(mark))) if fits else list(found)
    return [sorted(found[mark], key=lambda each: _rank(known, each)) for mark in order]


def _rank(known: Known, parameter: Parameter) -> float:
    return known.number(canonical.NUMBER, parameter.weight) or 0.0


def _signature(known: Known, parameter: Parameter) -> tuple[str, ...]:
    names = [name for name in known.settings if name not in (*PLACES, "step") and not is_state(name)]
    return tuple(repr(known.value(name, parameter.weight)) for name in names)


def settings(known: Known, weight: Path) -> list[tuple[str, str]]:
    """Return a group's settings, canonical and torch's names: torch's own first, then what else is known."""
    own = {ours: theirs for theirs, ours in known.family.torch_settings.items()}
    others = [
        name
        for name in known.settings
        if name not in (*own, *PLACES, "step")
        and not is_state(name)
        and (known.source(name, weight) is not None or name not in _OURS)
    ]
    return [*own.items(), *((other, other) for other in others)]
