"""Gathers an optimizer's leaves into the one numbered list that Keras 3 stores and loads.

Source: keras/src/optimizers/base_optimizer.py: iteration, learning rate, then each round of slots over the
trained variables (the order of the rounds: keras/src/optimizers/*.py, see keras_tree.optimizers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpttool.errors import UnsupportedError
from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.leaf import Leaf, Path, display

_ROUNDS = (
    (("m", "v"),),
    (("m", "v"), ("vhat",)),
    (("m", "u"),),
    (("m",),),
    (("rms",),),
    (("rms",), ("momentum",)),
    (("rms",), ("mg",)),
    (("rms",), ("momentum",), ("mg",)),
    (("momentum",),),
    (("accumulator",),),
    (("accumulator", "linear"),),
    (("accumulated_grad", "accumulated_delta"),),
)
_BY_KINDS = {frozenset(kind for kinds in rounds for kind in kinds): rounds for rounds in _ROUNDS}
_SETTINGS = {"iterations": 0, "iteration": 0, "learning_rate": 1}


class Slots:
    """The optimizers of a tree, each found by its slots."""

    def __init__(self, leaves: Mapping[Path, Leaf], names: Mapping[Path, Path]) -> None:
        """Look at the leaves; `names` are the paths that they will have."""
        self.leaves, self.names = leaves, names
        self.slots: dict[Path, dict[tuple[str, Path], Path]] = {}
        for path, leaf in leaves.items():
            if leaf.role == "slot" and leaf.of is not None and leaf.of in leaves and leaf.slot:
                self.slots.setdefault(_optimizer(path, leaf), {})[leaf.slot, leaf.of] = path
        self.settings: dict[Path, dict[int, Path]] = {at: {} for at in self.slots}
        for path in leaves:
            name = str(path[-1].value).removeprefix("_")
            if path[:-1] in self.settings and name in _SETTINGS:
                self.settings[path[:-1]].setdefault(_SETTINGS[name], path)

    def owns(self, path: Path) -> bool:
        """Say whether the leaf is one of an optimizer's."""
        leaf = self.leaves[path]
        if leaf.role == "slot":
            of = leaf.of if leaf.of is not None else ()
            return self.slots.get(_optimizer(path, leaf), {}).get((leaf.slot or "", of)) == path
        return path in self.settings.get(path[:-1], {}).values()

    def complete(self, position: Mapping[int, int]) -> Iterator[tuple[Path, list[Leaf]]]:
        """Go through the optimizers: the path of each and its variables in Keras's order.

        `position` says by a leaf's identity which variable comes first in the file.

        A learning rate that a schedule computes is no variable. Raise UnsupportedError for an optimizer that
        lacks a slot or its iteration.
        """
        for at, slots in self.slots.items():
            first = next(iter(slots.values()))
            rounds = _BY_KINDS.get(frozenset(kind for kind, _ in slots))
            if rounds is None or 0 not in self.settings[at]:
                lacks = "kinds that no Keras optimizer has" if rounds is None else "no iteration"
                raise UnsupportedError(
                    f"the slot has no place: its optimizer has {lacks}", path=display(first)
                )
            trained = [path for path in self.leaves if any((kind, path) in slots for kind in rounds[0])]
            trained.sort(key=lambda path: position.get(id(self.leaves[path]), -1))
            order = [path for _, path in sorted(self.settings[at].items())]
            for kinds in rounds:
                for one in trained:
                    for kind in kinds:
                        if (kind, one) not in slots:
                            sentence = f"the optimizer has no slot {kind} of this variable"
                            raise UnsupportedError(sentence, path=display(one))
                        order.append(slots[kind, one])
            yield self._moved(at, first), [self.leaves[path] for path in order]

    def _moved(self, at: Path, example: Path) -> Path:
        # What was taken from the front of every path is not part of the optimizer's either.
        return at[len(example) - len(self.names[example]) :] if self.names[example] != example else at


def _optimizer(path: Path, leaf: Leaf) -> Path:
    """Return the path of a slot's optimizer, whether the slot has a path of its own or stands in a list."""
    if leaf.of is not None and leaf.slot is not None:
        short = len(path) - len(leaf.of) - 2
        if short >= 0 and path == slot_path(path[:short], leaf.slot, leaf.of):
            return path[:short]
    return path[:-2]
