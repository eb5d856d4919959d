"""What a live tensor is for: parameter or buffer, saved or not, an optimizer's slot and whose, a counter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ckpttool.leaf import Role
from ckpttool.live import kinds
from ckpttool.live.walk import Found, torch_registered

# The lists of slots that Keras's Adam has; others are called by the list's own name
# (keras/src/optimizers/adam.py, rmsprop.py).
_KINDS = {"_momentums": "m", "_velocities": "v", "_velocity_hats": "vhat", "momentums": "momentum"}
_RMSPROP = {"_velocities": "rms", "_momentums": "momentum"}
_OWN = frozenset(("_variables", "_trainable_variables"))


class Slot(NamedTuple):
    """A slot variable's kind, and the parameter that it belongs to, or that parameter's name."""

    kind: str
    of: Any
    named: str | None = None


Slots = Mapping[int, Slot]


def of(found: Found) -> tuple[Role, bool | None]:
    """Return the role of a tensor and whether it is trained; what no framework saves is "other"."""
    if kinds.is_keras_optimizer(found.owner) or kinds.is_torch_optimizer(found.owner):
        return _setting(found)
    if kinds.of_class(found.value, "Tensor"):
        return _torch_role(found)
    if not kinds.is_variable(found.value):
        return "other", None
    trainable = bool(getattr(found.value, "trainable", False))
    return ("parameter" if trainable else "buffer"), trainable


def _setting(found: Found) -> tuple[Role, bool | None]:
    name = str(found.path[-1].value)
    if name.strip("_") in ("iterations", "step"):
        return "counter", None
    mine = kinds.attributes(found.owner).get("_trainable_variables", ())
    if any(found.value is variable for variable in mine):
        return "parameter", bool(getattr(found.value, "trainable", True))
    return "other", None


def _torch_role(found: Found) -> tuple[Role, bool | None]:
    if kinds.is_torch_module(found.owner):
        # In a `state_dict` all steps are one key; a buffer's own name has no dot.
        name = str(found.path[-1].value).rpartition(".")[2]
        held = kinds.attributes(found.owner)
        if (held.get("_buffers") or {}).get(name) is found.value:
            return ("buffer" if name not in held["_non_persistent_buffers_set"] else "other"), False
    if kinds.is_variable(found.value) and not kinds.of_class(found.value, "Buffer"):
        return "parameter", bool(found.value.requires_grad)
    return "other", None


def persistent(module: Any) -> dict[str, Any]:
    """Return what a torch.nn.Module's own part of `state_dict` lists, and its modules."""
    without = kinds.attributes(module).get("_non_persistent_buffers_set") or ()
    return {name: value for name, value in torch_registered(module).items() if name not in without}


def name(value: Any) -> str | None:
    """Return a variable's own name: the path of Keras 3, TensorFlow's without the number of the output."""
    held = kinds.attributes(value)
    said = held.get("_path") or held.get("_handle_name") or held.get("_shared_name")
    return said.removesuffix(":0") if isinstance(said, str) else None


def slots(optimizer: Any) -> Slots:
    """Return the slot variables of an optimizer by their objects' numbers; none for any other object."""
    if kinds.is_torch_optimizer(optimizer):
        return {
            id(value): Slot(kind, parameter)
            for parameter, state in kinds.attributes(optimizer).get("state", {}).items()
            for kind, value in state.items()
            if kind != "step"
        }
    if not kinds.is_keras_optimizer(optimizer):
        return {}
    held = kinds.attributes(optimizer)
    trained = held.get("_trainable_variables")
    if trained is None:
        return _named(held)
    known = {id(variable) for variable in trained}
    names = {**_KINDS, **(_RMSPROP if type(optimizer).__name__ == "RMSprop" else {})}
    found: dict[int, Slot] = {}
    for edge, members in held.items():
        if edge in _OWN or not isinstance(members, list | tuple) or len(members) != len(trained):
            continue
        for variable, parameter in zip(members, trained, strict=True):
            if kinds.is_variable(variable) and id(variable) not in known:
                found[id(variable)] = Slot(names.get(edge, edge.strip("_")), parameter)
    return found


def _named(held: Mapping[str, Any]) -> dict[int, Slot]:
    """Return the slots of Keras 2's optimizers, which know their variables by name only.

    Source: tf_keras/src/optimizers/optimizer.py (`Adam/m/dense/kernel`), legacy/optimizer_v2.py (`_slots`:
    `Adam/dense/kernel/m`).
    """
    found: dict[int, Slot] = {}
    for edge, members in held.items():
        if edge not in _OWN and isinstance(members, list | tuple):
            for variable in members:
                if kinds.is_variable(variable):
                    kind, own = _KINDS.get(edge, edge.strip("_")), name(variable) or ""
                    # Without a name scope of the optimizer's: `m/dense/kernel`.
                    parts = own.split("/", 1 if own.startswith(f"{kind}/") else 2)
                    found[id(variable)] = Slot(kind, None, parts[-1])
    for by_kind in (held.get("_slots") or {}).values():
        for kind, variable in by_kind.items():
            parts = (name(variable) or "").split("/")
            found[id(variable)] = Slot(kind, None, "/".join(parts[1:-1]))
    return found
