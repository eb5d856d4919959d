"""What two frameworks compute otherwise with the same state and the same settings.

Sources: keras/src/optimizers/{adam,rmsprop,adagrad,adamax}.py, tensorflow/python/training/{adam,rmsprop}.py,
torch/optim/{adam,rmsprop,adagrad,adamax}.py; tf_keras/src/optimizers/legacy/rmsprop.py, which adds epsilon
as torch does unless there is momentum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ckpttool.layouts import canonical
from ckpttool.layouts.optimizers.families import ADAGRAD, ADAM, ADAMAX, RMSPROP
from ckpttool.layouts.optimizers.known import Known
from ckpttool.leaf import attr
from ckpttool.tree import Tree

_PLACES: Mapping[str, str] = {
    ADAM.name: "TensorFlow adds it before the correction of the bias, PyTorch after it",
    RMSPROP.name: "TensorFlow adds it under the root, PyTorch to the root",
    ADAGRAD.name: "TensorFlow adds it under the root, PyTorch to the root",
    ADAMAX.name: "Keras adds it to the maximum, PyTorch to the gradient inside of the maximum",
}


def notes(
    agent: Tree, source: str, target: str, names: Iterable[str] = canonical.OPTIMIZERS
) -> tuple[str, ...]:
    """Return a sentence for each kind of optimizer whose epsilon is not the same thing in both frameworks."""
    if source == target:
        return ()
    named: dict[str, list[str]] = {}
    for name in names:
        if any(path[0] == attr(name) for path in agent):
            named.setdefault(Known(name, agent, {}, {}).family.name, []).append(name)
    return tuple(
        f"{' and '.join(mine)}: epsilon keeps its number; {_PLACES[family]}: updates differ where gradients "
        "are as small as it"
        for family, mine in named.items()
        if family in _PLACES
    )
