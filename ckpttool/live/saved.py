"""What a framework would save of a live object, edge by edge, as the framework itself says it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.leaf import Key, Path, attr, index
from ckpttool.live import kinds, nest, roles
from ckpttool.live.walk import MOST, Found, properties

# tf.train.Checkpoint adds it when it saves, to whatever object (tensorflow/python/checkpoint/checkpoint.py).
COUNTER = ("save_counter",)


def is_saver(value: object) -> bool:
    """Say whether the object is one that a framework saves as a whole: a module, a variable, an optimizer."""
    return kinds.is_torch_module(value) or kinds.is_torch_optimizer(value) or kinds.is_trackable(value)


def children(value: Any) -> Mapping[str, Any]:
    """Return what is saved below an object by the name of its edge; raise ValueError as TensorFlow does.

    Of a trackable object that is what tf.train.Checkpoint asks (tensorflow/python/trackable/base.py,
    `_trackable_children`), of a torch.nn.Module what `state_dict` goes through, of a plain container or
    object all that it holds.
    """
    if kinds.is_torch_module(value):
        return roles.persistent(value)
    if kinds.is_tensor(value):
        return {}
    if kinds.is_trackable(value):
        found: Mapping[str, Any] = value._trackable_children()
        return found
    held = nest.items(value) if nest.is_nested(value) else properties(value)
    return {str(step.value): below for step, below in held}


def whole(value: Any) -> bool:
    """Say whether `children` of the object are saved with it."""
    return (is_saver(value) or nest.is_nested(value)) and not kinds.is_tensor(value)


def tensors(root: Any, refused: dict[int, str], most: int = MOST) -> Iterator[Found]:
    """Go through the tensors that are saved with an object by every path, as `Walk.found` goes.

    An object that its framework refuses to save goes to `refused` with the reason.
    """
    left, entered, above = most, set[int](), set[int]()
    waiting: list[Found | int] = [Found((), root, root)]
    while waiting:
        visit = waiting.pop()
        if isinstance(visit, int):
            above.discard(visit)
            continue
        path, value, owner = visit
        if id(value) in above or (left < 0 and id(value) in entered):
            continue
        above.add(id(value))
        entered.add(id(value))
        waiting.append(id(value))
        owner = owner if nest.is_nested(value) else value
        below: list[Found] = []
        for name, held in allowed(value, refused).items():
            left -= 1
            found = Found((*path, step(name)), held, owner)
            if kinds.is_tensor(held):
                yield found
            elif whole(held):
                below.append(found)
        waiting += reversed(below)


def allowed(value: Any, refused: dict[int, str]) -> Mapping[str, Any]:
    """Return an object's children, none if its framework refuses to save it: then say why in `refused`."""
    try:
        return children(value)
    except ValueError as error:
        # A list changed in another way than by append, a dict with keys that are no strings.
        refused[id(value)] = str(error).strip().partition("\n")[0].partition(". ")[0]
        return {}


def step(name: str) -> Key:
    """Return the step of an edge: those of lists are numbers."""
    return index(int(name)) if name.isdecimal() else attr(name)


def reached(roots: list[Any], refused: dict[int, str]) -> dict[int, Any]:
    """Return all objects that are saved with the roots by their numbers, slot variables too."""
    seen: dict[int, Any] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if kinds.is_tensor(value):
            inner = kinds.plain_value(value)
            seen[id(inner)] = inner
        elif whole(value):
            waiting += allowed(value, refused).values()
    variables = [value for value in seen.values() if kinds.is_variable(value)]
    for optimizer in [value for value in seen.values() if keeps_slots(value)]:
        seen |= {id(found): found for _, _, found in slots(optimizer, variables)}
    return seen


def keeps_slots(value: Any) -> bool:
    """Say whether saving the object asks it for slot variables (tensorflow/python/checkpoint/util.py)."""
    return hasattr(type(value), "get_slot_names") and hasattr(type(value), "get_slot")


def slots(optimizer: Any, variables: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Go through the slots of an optimizer of Keras 2 or TensorFlow 1: kind, variable, slot variable."""
    for kind in optimizer.get_slot_names():
        for variable in variables:
            found = slot(optimizer, kind, variable)
            if found is not None:
                yield kind, variable, found


def slot(optimizer: Any, kind: str, variable: Any) -> Any:
    """Return the slot variable of one kind for one variable, None if there is none."""
    try:
        return optimizer.get_slot(variable, kind)
    except KeyError:
        return None


def steps(path: Path) -> Iterator[str]:
    """Go through a path's names as edges have them: torch's dotted keys split, numbers as text."""
    for place in path:
        if place.kind == "key" and isinstance(place.value, str):
            yield from place.value.split(".")
        else:
            yield str(place.value)
