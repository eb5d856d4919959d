"""Variables known by name alone: what a file says of one, what its name tells, and the tree of a whole file.

Used by every TensorFlow format; object graphs say more (object_graph.leaves).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.formats import slot_names
from ckpttool.leaf import Key, Leaf, Path, Role
from ckpttool.source import Shape, Source
from ckpttool.tree import Tree

if TYPE_CHECKING:
    import numpy as np

_STATISTICS = frozenset(
    ("moving_mean", "moving_variance", "moving_mean_squared", "moving_stddev", "renorm_mean", "renorm_stddev")
)
_COUNTERS = frozenset(("_iterations", "iterations", "iter", "save_counter", "step_counter", "global_step"))
# Below these edges are metrics and the state of mixed-precision training.
_APART = frozenset(("keras_api", "loss_scale"))
# Adam's own, in TensorFlow 1 (tensorflow/python/training/adam.py).
_POWER = re.compile(r"beta[12]_power(?:_\d+)?")
# State of a moving average that is corrected for its start (tensorflow/python/training/moving_averages.py).
_HELPER = re.compile(r"(?:biased|local_step)(?:_\d+)?")
# What Keras's optimizers store beside their slots (keras/optimizers/optimizer_v2/*.py, _set_hyper).
_SETTINGS = frozenset(
    ("learning_rate", "decay", "beta_1", "beta_2", "rho", "momentum", "beta", "learning_rate_power")
) | {"l1_regularization_strength", "l2_regularization_strength"}
_NO_NUMBERS = frozenset(("bool", "string", "variant"))
_INTEGERS = frozenset(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"))


class Tensor(NamedTuple):
    """What a file itself says about one tensor."""

    dtype: str
    shape: Shape
    source: Source


def by_name(tensors: Mapping[str, Tensor]) -> Tree:
    """Return the tree of a file that stores variables by name: paths are variable names split at `/`.

    Paths keep every part as stored, empty ones and a final `:0` among them, and the order of the file. A
    slot's path lies below its variable's, or below a scope; `Leaf.of` is the variable's (formats.slot_names).
    """
    names = _variable_names(tensors)
    slots = slot_names.slots({name: tensors[key].shape for name, key in names.items()})
    scopes = {slot.scope for slot in slots.values() if slot.scope}
    parts: dict[str, Key] = {}  # thousands of names share a few hundred parts
    paths = {name: _path(key, parts) for name, key in names.items()}
    leaves = {}
    for name, key in names.items():
        dtype, shape, source = tensors[key]
        slot = slots.get(name)
        if slot is None:
            role = _role(paths[name], name, tensors[key], scopes)
            leaves[paths[name]] = Leaf(dtype, shape, source, key, role, name=name)
        else:
            leaves[paths[name]] = Leaf(
                dtype, shape, source, key, "slot", of=paths[slot.of], slot=slot.kind, name=name
            )
    return Tree(leaves)


def _variable_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return keys by variable name: some programs store a variable under its output's name, `w:0`."""
    names: dict[str, str] = {}
    for key in tensors:
        name = key.removesuffix(":0")
        names[key if name in tensors else name] = key
    return names


def _path(key: str, parts: dict[str, Key]) -> Path:
    return tuple([parts.get(part) or parts.setdefault(part, Key("attr", part)) for part in key.split("/")])


def _role(path: Path, name: str, tensor: Tensor, scopes: set[str]) -> Role:
    scope, _, last = name.rpartition("/")
    if not tensor.shape and (_POWER.fullmatch(last) or (last in _SETTINGS and scope in scopes)):
        return "other"
    if _HELPER.fullmatch(last):
        return "other"
    return role_by_name(path, name, tensor.dtype, tensor.shape)


def adam_steps(
    beta1_power: float, beta2_power: float, beta1: float = 0.9, beta2: float = 0.999
) -> int | None:
    """Return how many updates a TensorFlow 1 Adam has made; None when the numbers do not tell.

    `beta1_power` and `beta2_power` are the values of the variables of those names. Both begin as beta and are
    multiplied by it after each update, in the variable's own type (tensorflow/python/training/adam.py,
    _finish), so after t updates they are beta^(t+1), rounded t times. The multiplications are repeated here,
    in float32 or float64, and the count is one only if it gives exactly the stored numbers: other betas give
    None.

    In float32, 0.9^(t+1) is below the smallest normal number from t = 828 on. What is left of it, often 0
    because TensorFlow flushes such numbers, says nothing more: beta2_power decides alone. For 0.999 it gets
    as small after 87,000 updates, and then nobody knows.
    """
    import numpy as np

    for kind in (np.float32, np.float64):
        if any(float(kind(power)) != power for power in (beta1_power, beta2_power)):
            continue
        first, second = _updates(beta1_power, beta1, kind), _updates(beta2_power, beta2, kind)
        if second is None or (first is None and beta1_power >= np.finfo(kind).tiny):
            continue
        small = beta1 ** (second + 1) < 1.01 * np.finfo(kind).tiny
        if first == second or (small and 0 <= beta1_power < np.finfo(kind).tiny):
            return second
    return None


# More updates than this are not counted again.
_MOST_UPDATES = 10_000_000


def _updates(power: float, beta: float, kind: type[np.floating]) -> int | None:
    """Return the t at which beta^(t+1), multiplied step by step, is exactly `power`."""
    import numpy as np

    if not (0 < beta < 1 and np.finfo(kind).tiny <= power <= beta * 1.001):
        return None
    about = math.log(power) / math.log(beta)
    if about > _MOST_UPDATES:
        return None
    # Rounding moves the count by less than this.
    powers = np.multiply.accumulate(np.full(int(about * 1.01) + 8, beta, kind))
    found = np.flatnonzero(powers == kind(power))
    return int(found[0]) if len(found) == 1 else None


def role_by_name(
    path: Path, full_name: str, dtype: str, shape: tuple[int, ...], *, setting: bool = False
) -> Role:
    """Say what a variable is for that is no slot; `setting` tells that an optimizer holds it directly."""
    steps = [str(step.value) for step in path]
    last = steps[-1] if steps else ""
    if last in _COUNTERS and dtype in _INTEGERS:
        return "counter"
    if setting:
        return "other"
    if "replay" in f"{full_name} {'/'.join(steps)}".lower():
        return "replay"
    if last in _STATISTICS:
        return "buffer"
    if dtype in _INTEGERS and not shape and "seed" not in full_name:
        return "counter"
    if dtype in _INTEGERS or dtype in _NO_NUMBERS or not _APART.isdisjoint(steps):
        return "other"
    return "parameter"
