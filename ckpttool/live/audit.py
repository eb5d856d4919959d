"""What saving a live object would leave out, and what restoring a checkpoint would leave untouched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.checkpoint import Checkpoint
from ckpttool.leaf import Path, display, typed
from ckpttool.live import kinds, nest, saved, search
from ckpttool.live.compare import Difference
from ckpttool.live.meeting import Meeting
from ckpttool.live.tensors import described
from ckpttool.live.walk import properties
from ckpttool.source import Shape
from ckpttool.tree import Tree


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A tensor that no file would hold: where it is, what it is, and why."""

    path: Path
    dtype: str
    shape: Shape
    reason: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": display(self.path),
            "keys": typed(self.path),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """What would not be saved; with a checkpoint, what does not meet.

    `refused` are the objects that the framework would refuse to save, with its reason. `unfilled` are the
    live variables that no entry of the checkpoint fills, `unused` the entries that nothing takes, `different`
    those that meet with another shape or type.
    """

    unsaved: tuple[Unsaved, ...]
    refused: Mapping[Path, str]
    unfilled: tuple[Path, ...] = ()
    unused: tuple[Path, ...] = ()
    different: tuple[Difference, ...] = ()

    @property
    def complete(self) -> bool:
        """Say whether everything is saved, and everything met."""
        return not (self.unsaved or self.refused or self.unfilled or self.unused or self.different)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "unsaved": [row.document() for row in self.unsaved],
            "refused": {display(path): reason for path, reason in self.refused.items()},
            "unfilled": [display(path) for path in self.unfilled],
            "unused": [display(path) for path in self.unused],
            "different": [row.document() for row in self.different],
        }


def audit(obj: Any, checkpoint: Checkpoint | Tree | None = None) -> Audit:
    """Return what saving `obj` would leave out, and what restoring the checkpoint into it would not reach.

    A module is taken as saved whole, by tf.train.Checkpoint or `state_dict`. Of a plain container or object
    every module, optimizer and TensorFlow variable is. No hook is run; trackable objects are asked for their
    children as `Checkpoint.save` asks them.
    """
    found = _roots(obj)
    refused: dict[int, str] = {}
    whole = saved.reached([value for _, value in found], refused)
    numbers = {id(value) for _, value in found}
    rows = tuple(
        Unsaved(row.path, *(described(row.value) or ("unknown", ())), row.reason)
        for row in search.unsaved(obj, numbers, set(whole))
    )
    places = _places(found, refused) if refused else {}
    if checkpoint is None:
        return Audit(rows, places)
    tree = checkpoint.tree if isinstance(checkpoint, Checkpoint) else checkpoint
    met = Meeting(obj)
    met.meet(tree)
    return Audit(rows, places, met.unfilled(found), tuple(met.unused), tuple(met.different))


def _roots(obj: Any) -> list[tuple[Path, Any]]:
    """Return the topmost objects that a framework saves as wholes."""
    seen: dict[int, Any] = {}  # the values too: the number of one that is gone may be given again
    found: list[tuple[Path, Any]] = []
    waiting: list[tuple[Path, Any]] = [((), obj)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        plain = nest.is_nested(value)
        if saved.is_saver(value) and not (plain and not path):
            found.append((path, value))
        else:
            waiting += reversed([((*path, step), held) for step, held in search.held_by(value)])
    return found


def _places(roots: list[tuple[Path, Any]], wanted: Mapping[int, str]) -> dict[Path, str]:
    """Return the first paths of the objects that were refused."""
    found: dict[Path, str] = {}
    seen: dict[int, Any] = {}
    waiting = list(reversed(roots))
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if id(value) in wanted:
            found[path] = wanted[id(value)]
        inside = nest.items(value) if nest.is_nested(value) else iter(())
        if not nest.is_nested(value) and kinds.holds_variables(value):
            inside = iter(properties(value))
        waiting += reversed([((*path, step), held) for step, held in inside])
    return found
