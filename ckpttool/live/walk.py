"""The walk of tf.Module: sorted attributes, own leaves first, every path, back edges cut.

Source: tensorflow/python/module/module.py (_flatten_module). An object that is reached again from within
itself shows its own leaves once more and is not followed any further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckpttool.leaf import Key, Path, attr, index, key
from ckpttool.live import kinds, nest

# Objects that hold each other can have more paths than there is time. After this many values only objects
# that were not entered yet are entered: each variable keeps its first path, and loses further ones.
MOST = 200_000

Predicate = Callable[[Any], bool]
SortKey = Callable[[str], Any]

_IGNORED = frozenset(("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names"))
# Where Keras 3 keeps a second time what attributes hold, and what is no part of the network
# (keras/src/layers/layer.py, models/functional.py, trainers/trainer.py, optimizers/base_optimizer.py): these
# come last, in this order, so that an attribute of the user's names a variable.
_SECOND = (
    "_layers",
    "_operations",
    "_functional",
    "_seed_generators",
    "_trainable_variables",
    "_non_trainable_variables",
    "_variables",
    "_loss_tracker",
    "_metrics",
    "_compile_metrics",
    "optimizer",
)
_LATER = {name: number for number, name in enumerate(_SECOND, start=1)}
_KERAS_IGNORED = _IGNORED | {"_operations_by_depth", "_tracker", "_inputs", "_outputs"}
_LISTS = ("Sequential", "ModuleList", "ParameterList")
_DICTS = ("ModuleDict", "ParameterDict")


class Found(NamedTuple):
    """A value that the walk came to: its path, and the object whose attribute it is or lies below."""

    path: Path
    value: Any
    owner: Any


@dataclass(frozen=True, slots=True)
class Walk:
    """How to walk: what is entered, whether at all, the order of attributes, the number of values."""

    enter: Predicate = kinds.holds_variables
    recursive: bool = True
    order: SortKey | None = None
    most: int = MOST

    def found(self, root: Any) -> Iterator[Found]:
        """Go through every value below `root` by every path, in the order of `tf.Module._flatten`."""
        left = self.most
        entered: set[int] = set()
        above: set[int] = set()
        # A number is the mark behind an object's last descendant.
        waiting: list[tuple[Path, Any] | int] = [((), root)]
        while waiting:
            visit = waiting.pop()
            if isinstance(visit, int):
                above.discard(visit)
                continue
            path, value = visit
            if left < 0 and id(value) in entered:
                continue
            entered.add(id(value))
            follow = self.recursive and id(value) not in above
            below: list[tuple[Path, Any]] = []
            for place, leaf in self.own(path, value):
                left -= 1
                yield Found(place, leaf, value)
                if follow and self.enter(leaf):
                    below.append((place, leaf))
            if follow:
                above.add(id(value))
                waiting.append(id(value))
                waiting += reversed(below)

    def once(self, root: Any) -> Iterator[Found]:
        """Go through every value once, by the first path that `tf.Module.submodules` would see."""
        seen = {id(root)}
        waiting: list[tuple[Path, Any]] = [((), root)]
        while waiting:
            path, value = waiting.pop()
            below = []
            for place, leaf in self.own(path, value):
                if id(leaf) in seen:
                    continue
                seen.add(id(leaf))
                yield Found(place, leaf, value)
                if self.recursive and self.enter(leaf):
                    below.append((place, leaf))
            waiting += reversed(below)

    def own(self, path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        """Go through what an object holds itself, containers opened."""
        if nest.is_nested(value):
            yield from nest.leaves(path, value)
            return
        for step, held in properties(value, self.order):
            yield from nest.leaves((*path, step), held)


def properties(value: Any, order: SortKey | None = None) -> list[tuple[Key, Any]]:
    """Return an object's attributes, sorted; those of torch's modules with what is registered in them."""
    if kinds.is_torch_module(value):
        return _torch(value, order)
    if kinds.is_torch_optimizer(value):
        return _torch_optimizer(value)
    if kinds.is_checkpoint(value):
        return _checkpoint(value, order)
    held = kinds.attributes(value)
    ignored = _ignored(value)
    if order is None and _is_keras_3(value):
        return [(attr(n), held[n]) for n in sorted(held, key=_second_last) if n not in ignored]
    return [(attr(n), held[n]) for n in sorted(held, key=order) if n not in ignored]


def _ignored(value: Any) -> frozenset[str]:
    if kinds.is_tf_module(value):
        # tf_keras has names of its own there (tf_keras/src/engine/base_layer.py).
        said = getattr(type(value), "_TF_MODULE_IGNORED_PROPERTIES", _IGNORED)
        return frozenset(said)
    return _KERAS_IGNORED if kinds.holds_variables(value) else frozenset()


def _is_keras_3(value: Any) -> bool:
    return not kinds.is_tf_module(value) and kinds.holds_variables(value)


def _second_last(name: str) -> tuple[int, str]:
    return _LATER.get(name, 0), name


def _checkpoint(checkpoint: Any, order: SortKey | None) -> list[tuple[Key, Any]]:
    """Return what a tf.train.Checkpoint saves, by keyword (tensorflow/python/checkpoint/checkpoint.py)."""
    held = kinds.attributes(checkpoint)
    edges = [
        *held.get("_self_unconditional_checkpoint_dependencies", ()),
        *(held.get("_attached_dependencies") or ()),
    ]
    named = {edge.name: edge.ref for edge in edges}
    return [(attr(name), named[name]) for name in sorted(named, key=order)]


def _torch(module: Any, order: SortKey | None) -> list[tuple[Key, Any]]:
    """Return what is registered in a torch.nn.Module as its attributes, then its other attributes.

    Items of lists of modules or parameters are numbered, those of dicts of modules have raw keys
    (torch/nn/modules/container.py). What `state_dict` names comes first: an LSTM keeps its weights a second
    time in `_flat_weights`.
    """
    held = kinds.attributes(module)
    registered = torch_registered(module)
    derived = _derived(held)
    others = [n for n in held if n not in _TORCH_PRIVATE and n not in registered and n not in derived]
    step: Callable[[str], Key] = attr
    numbers: list[str] = []
    if any(kinds.of_class(module, name) for name in _LISTS):
        numbers = [name for name in registered if name.isdecimal()]
    elif any(kinds.of_class(module, name) for name in _DICTS):
        step = key
    listed = [(index(int(name)), registered.pop(name)) for name in numbers]
    listed += [(step(name), registered[name]) for name in sorted(registered, key=order)]
    return listed + [(attr(name), held[name]) for name in sorted(others, key=order)]


def _derived(held: dict[str, Any]) -> set[str]:
    """Return the attributes that torch computes anew before every forward pass.

    Source: torch/nn/utils/weight_norm.py, spectral_norm.py, prune.py: a hook that knows its weight's name.
    """
    hooks = (held.get("_forward_pre_hooks") or {}).values()
    said = [kinds.attributes(hook) for hook in hooks if kinds.top(hook) == "torch"]
    return {str(hook[name]) for hook in said for name in ("name", "_tensor_name") if name in hook}


_TORCH_PRIVATE = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def torch_registered(module: Any) -> dict[str, Any]:
    """Return a torch.nn.Module's parameters, buffers and modules by name, in the order of `state_dict`."""
    held = kinds.attributes(module)
    found: dict[str, Any] = {}
    for kind in ("_parameters", "_buffers", "_modules"):
        found.update((name, value) for name, value in (held.get(kind) or {}).items() if value is not None)
    return found


def _torch_optimizer(optimizer: Any) -> list[tuple[Key, Any]]:
    """Return what `Optimizer.state_dict` says: state by the parameter's number (torch/optim/optimizer.py)."""
    held = kinds.attributes(optimizer)
    groups = held.get("param_groups", [])
    numbers: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    state = {numbers.get(id(p), n): dict(s) for n, (p, s) in enumerate(held.get("state", {}).items())}
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return [(attr("param_groups"), settings), (attr("state"), state)]
