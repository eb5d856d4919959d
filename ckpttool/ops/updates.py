"""How often TensorFlow 1's Adam optimizers were applied, from the powers of beta that they keep."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ckpttool.errors import CkpttoolError, DeadlineError
from ckpttool.layouts.optimizers.tf1 import BETAS, POWERS
from ckpttool.leaf import Leaf, Path
from ckpttool.shown import count
from ckpttool.tree import Tree

_SCALARS = {"float32": "<f", "float64": "<d"}


def notes(tree: Tree) -> tuple[str, ...]:
    """Return a sentence for each Adam whose two powers tell a count under betas that are common.

    These scalars are read; one that cannot be read says nothing here, its own reader will be told.
    """
    return tuple(_sentences(tree))


def _sentences(tree: Tree) -> Iterator[str]:
    for path, leaf in tree.tensors():
        last = str(path[-1].value) if path else ""
        if not last.startswith(POWERS[0]) or leaf.role != "other" or leaf.shape:
            continue
        other: Path = (*path[:-1], path[-1]._replace(value=POWERS[1] + last.removeprefix(POWERS[0])))
        yield from _counted(tree.names[path], leaf, tree.get(other))


def _counted(name: str, first: Leaf, second: object) -> Iterator[str]:
    if not isinstance(second, Leaf):
        return
    powers = _scalar(first), _scalar(second)
    if powers[0] is None or powers[1] is None:
        return
    # Not at the top: few checkpoints have such variables, and counting needs numpy.
    from ckpttool.formats.variables import adam_steps

    for betas in BETAS:
        steps = adam_steps(powers[0], powers[1], *betas)
        if steps is not None:
            made = count(steps, "update")
            yield f"{name}: this Adam has made {made} (if its betas are {betas[0]} and {betas[1]})"
            return


def _scalar(leaf: Leaf) -> float | None:
    form = _SCALARS.get(leaf.dtype)
    if form is None or leaf.shape:
        return None
    try:
        return float(struct.unpack(form, leaf.read())[0])
    except DeadlineError:
        raise
    except CkpttoolError:
        return None
