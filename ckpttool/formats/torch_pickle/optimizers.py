"""torch's optimizers in pickles: as their state_dicts, and as objects that were pickled whole.

Source: torch/optim/optimizer.py (state_dict, __getstate__): in a state_dict parameters are numbered through
all groups; in the object itself the slots are keyed by the parameters.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from ckpttool.formats.torch_pickle.views import Tensor
from ckpttool.wire.pickle_reader import Dict


def is_state_dict(value: dict[Any, Any]) -> bool:
    """Say whether the dict is what an optimizer's state_dict() returns."""
    if value.keys() != {"state", "param_groups"}:
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    return all(type(k) is int and isinstance(v, dict) for k, v in state.items())


def is_object(state: object) -> TypeGuard[dict[str, Any]]:
    """Say whether these are the attributes of an optimizer that was pickled whole."""
    if type(state) is not dict or not state.keys() >= {"state", "param_groups"}:
        return False
    return isinstance(state["state"], dict) and isinstance(state["param_groups"], list)


def numbered(state: dict[str, Any]) -> dict[Any, Any]:
    """Return such an object's slots by the numbers that state_dict() would give to their parameters.

    Return them as they are when they belong to others than the groups' parameters.
    """
    slots: dict[Any, Any] = state["state"]
    if type(next(iter(slots), None)) is not Tensor:
        return slots
    groups = [group.get("params") for group in state["param_groups"] if isinstance(group, dict)]
    order = (each for group in groups if isinstance(group, list) for each in group)
    numbers = {id(each): number for number, each in enumerate(order)}
    if not all(id(each) in numbers for each in slots):
        return slots
    made: dict[Any, Any] = Dict(slots.name) if isinstance(slots, Dict) else {}
    made.update((numbers[id(each)], value) for each, value in slots.items())
    return made
