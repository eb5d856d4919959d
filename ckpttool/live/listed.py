"""What a framework would list of a live object: torch's `state_dict`, TensorFlow's object graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.leaf import Path, key
from ckpttool.live import kinds, nest, roles, saved
from ckpttool.live.making import Making
from ckpttool.live.tensors import identity
from ckpttool.live.walk import Found
from ckpttool.tree import Container, Tree


def state_dict(obj: Any) -> Tree:
    """Return what `obj.state_dict()` of a torch.nn.Module would list, under the same dotted keys.

    In a plain container each module's entries lie below its place there. No hook runs, and `get_extra_state`
    is not asked. A second name of a tensor is an alias with a key.
    """
    made = Making()
    for place, module in _roots(obj):
        made.containers[place] = Container("OrderedDict")
        for found in saved.tensors(module, {}):
            name = ".".join(str(step.value) for step in found.path)
            made.add(found._replace(path=(*place, key(name))), name, name)
    return made.tree()


def object_graph(obj: Any) -> Tree:
    """Return the variables that tf.train.Checkpoint would save with `obj`, by the paths of its object graph.

    These are the paths by which a restore finds them; Keras 2 has edges of its own, such as
    `layer_with_weights-0`. What TensorFlow refuses to save is left out (see `audit`).
    """
    made = Making()
    keepers: dict[int, tuple[Path, Any]] = {}
    variables: dict[int, Any] = {}
    for found in saved.tensors(obj, {}):
        made.add(found, "/".join(saved.steps(found.path)), None)
        variables[id(found.value)] = found.value
        if saved.keeps_slots(found.owner):
            keepers.setdefault(id(found.owner), (found.path[:-1], found.owner))
    for place, optimizer in keepers.values():
        for kind, variable, slot in saved.slots(optimizer, list(variables.values())):
            path = slot_path(place, kind, made.first[identity(variable)])
            made.add(
                Found(path, slot, optimizer), "/".join(saved.steps(path)), None, roles.Slot(kind, variable)
            )
    return made.tree()


def _roots(obj: Any) -> Iterator[tuple[Path, Any]]:
    for path, value in nest.leaves((), obj):
        if kinds.is_torch_module(value):
            yield path, value


class TorchNames:
    """The keys of torch's `state_dict`, by path and by tensor."""

    def __init__(self, root: Any, most: int) -> None:
        self._paths: set[tuple[str, ...]] = set()
        self._first: dict[object, str] = {}
        for place, module in _roots(root):
            before = tuple(str(step.value) for step in place)
            for found in saved.tensors(module, {}, most):
                names = (*before, *(str(step.value) for step in found.path))
                self._paths.add(names)
                self._first.setdefault(identity(found.value), ".".join(names))

    def alias(self, found: Found) -> str | None:
        """Return the key under which torch lists a further path, if it lists that."""
        names = tuple(str(step.value) for step in found.path)
        return ".".join(names) if names in self._paths else None

    def leaf(self, found: Found) -> str:
        """Return the key of a leaf; for what torch does not list, the path joined."""
        names = tuple(str(step.value) for step in found.path)
        if not kinds.of_class(found.value, "Tensor"):
            return "/".join(names)
        known = None if names in self._paths else self._first.get(identity(found.value))
        return known or ".".join(names)
