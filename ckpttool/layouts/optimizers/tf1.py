"""What TensorFlow 1 does otherwise: slots below their variables, powers of betas for a count of updates.

Sources: tensorflow/python/training/{adam,rmsprop,momentum,adagrad,slot_creator}.py. RMSProp's mean of
squares begins with ones there, and it always has a slot of momentum.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from ckpttool.errors import CkpttoolError
from ckpttool.layouts import canonical
from ckpttool.layouts.modules import Segments
from ckpttool.layouts.optimizers.families import (
    ADADELTA,
    ADAGRAD,
    ADAM,
    ADAMAX,
    FAMILIES,
    RMSPROP,
    SGD,
    Family,
)
from ckpttool.layouts.table import Optimizer
from ckpttool.leaf import Leaf, Path, ValueLeaf
from ckpttool.mapping.numbers import Given
from ckpttool.mapping.report import Move
from ckpttool.mapping.rules import ToValue
from ckpttool.tree import Tree

POWERS = ("beta1_power", "beta2_power")
# The defaults of tensorflow/python/training/adam.py, those of "Attention Is All You Need", of DCGAN.
BETAS = ((0.9, 0.999), (0.9, 0.98), (0.5, 0.999))
_TAIL = re.compile(
    rf"(?:.*/)?({'|'.join(family.tf1 for family in FAMILIES if family.tf1)})(?:_\d+)?", re.DOTALL
)
_NUMBERED = re.compile(r"beta1_power(_\d+)?")


def is_momentum(leaf: Leaf | ValueLeaf) -> bool:
    """Say whether the slot is called as tf.train.MomentumOptimizer's."""
    return _tail(leaf) == SGD.tf1


def _tail(leaf: Leaf | ValueLeaf | None) -> str | None:
    found = _TAIL.fullmatch(leaf.name or leaf.key) if isinstance(leaf, Leaf) else None
    return found[1] if found else None


def is_named(slots: Mapping[Path, Path], tree: Tree) -> bool:
    """Say whether the slots are called as TensorFlow 1 calls them."""
    return any(_tail(tree[path]) for path in slots)


def is_proximal(leaf: Leaf | ValueLeaf) -> bool:
    """Whether a slot is called as tf.train.ProximalAdagradOptimizer's, which is no Adagrad."""
    return isinstance(leaf, Leaf) and "ProximalAdagrad" in (leaf.name or leaf.key)


def family(slots: Mapping[Path, Path], tree: Tree) -> Family | None:
    """Return the optimizer that these slots are of, by their kinds; None if there are none."""
    kinds = {leaf.slot for path in slots if isinstance(leaf := tree[path], Leaf)}
    if not kinds:
        return None
    if "u" in kinds or "accumulated_grad" in kinds:
        return ADAMAX if "u" in kinds else ADADELTA
    if kinds == {"accumulator"} and not any(leaf.slot == "linear" for _, leaf in tree.tensors()):
        return ADAGRAD  # Ftrl has an accumulator too
    return RMSPROP if "rms" in kinds else SGD if kinds == {"momentum"} else ADAM


def below_variables(optimizer: Optimizer, weights: Mapping[Path, object]) -> Iterator[tuple[Path, Path]]:
    """Go through the slots that stand below their own variables, `actor/l1/kernel/Adam`."""
    for path, leaf in optimizer.tree.tensors():
        owner = leaf.of
        below = owner is not None and owner in weights and path[: len(owner)] == owner
        if leaf.role == "slot" and owner is not None and below and _tail(leaf):
            yield path, owner


def powers(
    optimizer: Optimizer, mine: Mapping[Segments, Path], slots: Mapping[Path, Path]
) -> dict[str, Path]:
    """Return the powers of the optimizer's betas: its own, or those without a scope where it has none."""
    own = {name[0]: path for name, path in mine.items() if len(name) == 1 and name[0] in POWERS}
    below = any(slots[path] == path[: len(slots[path])] for path in slots)
    if own or not below:
        return own
    pairs = list(_unscoped(optimizer.tree))
    if not pairs:
        return {}
    # TensorFlow numbers several optimizers' powers and says nowhere which is whose.
    first, *others = [counted(optimizer.tree, pair) for pair in pairs]
    if any(other != first for other in others):
        return {}
    known = list(canonical.OPTIMIZERS)
    number = known.index(optimizer.name) if optimizer.name in known else 0
    return dict(zip(POWERS, pairs[min(number, len(pairs) - 1)], strict=True))


def _unscoped(tree: Tree) -> Iterator[tuple[Path, Path]]:
    by_name = {name: path for path, name in tree.names.items()}
    for name, path in by_name.items():
        found = _NUMBERED.fullmatch(name)
        other = by_name.get(f"{POWERS[1]}{found[1] or ''}") if found else None
        if other is not None:
            yield path, other


def count(optimizer: Optimizer, found: Mapping[str, Path]) -> tuple[Move, ...]:
    """Return the moves of the count of updates that the powers tell, and of the betas that they are of."""
    if found.keys() != set(POWERS):
        return ()
    first, second = (found[power] for power in POWERS)
    told = counted(optimizer.tree, (first, second))
    if told is None:
        return ()
    steps, betas = told
    return tuple(
        Move(path, canonical.setting(optimizer.name, name), Given(value))
        for path, name, value in (
            (first, "step", steps),
            (first, "beta_1", betas[0]),
            (second, "beta_2", betas[1]),
        )
    )


def counted(tree: Tree, pair: tuple[Path, Path]) -> tuple[int, tuple[float, float]] | None:
    """Return the updates that two powers tell under betas that are common, and those; None if they do not.

    The two scalars are read; one that cannot be read says nothing here, its own reader will be told.
    """
    from ckpttool.formats.variables import adam_steps

    try:
        values = [ToValue().leaf(tree[path]) for path in pair]
    except CkpttoolError:
        return None
    found = [value.value for value in values if isinstance(value, ValueLeaf)]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    for betas in BETAS if len(numbers) == len(pair) else ():
        steps = adam_steps(numbers[0], numbers[1], *betas)
        if steps is not None:
            return steps, betas
    return None
