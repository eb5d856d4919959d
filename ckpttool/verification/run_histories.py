"""Histories of a training run: norms and updates of its layers, and its findings, by checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise, repeat
from typing import Any

import numpy as np

from ckpttool.core import deferred
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import suppress_refusals
from ckpttool.core.source import Shape
from ckpttool.core.text import replace_nonfinite
from ckpttool.core.tree import Leaf, Path
from ckpttool.listing.findings import Finding
from ckpttool.verification.array_differences import Values, iter_values
from ckpttool.verification.moments import euclidean_norm

PreviousCheckpoint = tuple[str, Checkpoint, Mapping[Path, np.ndarray]]
"""the checkpoint before another one: its path, what it contains, and parameters that were read, by path"""


# Bytes of small parameters that stay in memory for the next checkpoint; others are read again.
_KEPT = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerHistory:
    """Parameters of one module over the checkpoints of a run.

    `norms` are Euclidean norms |W[t]| of all its parameters together, None for an unreadable checkpoint.
    `changes` are |W[t] - W[t-1]|: None also for the first checkpoint and where the parameters of the two
    differ in names or shapes.
    """

    path: str
    tensors: int
    parameters: int
    norms: tuple[float | None, ...]
    changes: tuple[float | None, ...]

    @property
    def updates(self) -> tuple[float | None, ...]:
        """Changes divided by the norms before them: infinite after a norm of zero, 0 without any change."""
        return tuple(map(_relative_change, (None, *self.norms[:-1]), self.changes))

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        document: dict[str, Any] = replace_nonfinite(
            {
                "path": self.path,
                "tensors": self.tensors,
                "parameters": self.parameters,
                "norms": list(self.norms),
                "updates": list(self.updates),
            }
        )
        return document


@dataclass(slots=True)
class LayerSums:
    """Norms of all parameters of one layer in one checkpoint, and of their change.

    `apart` is None if the change of some tensor is unknown.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    norm: float = 0.0
    apart: float | None = 0.0


class DriftRecorder:
    """Sums of each layer of one checkpoint; each array is compared with the one `before` while in memory."""

    def __init__(self, checkpoint: Checkpoint, before: PreviousCheckpoint | None) -> None:
        self.layers: dict[str, LayerSums] = {}
        self.before = before
        self.values: dict[Path, np.ndarray] = {}
        """parameters for the comparison with the next checkpoint, together at most `_KEPT` bytes"""
        self._room = _KEPT
        self._names = checkpoint.tree.names

    def add(self, at: Path, leaf: Leaf, array: Values) -> None:
        """Add one array."""
        if leaf.role != "parameter" or array.dtype.kind == "b":
            return
        layer, _, name = self._names[at].rpartition("/")
        sums = self.layers.setdefault(layer, LayerSums())
        sums.shapes[name] = leaf.shape
        sums.norm = math.hypot(sums.norm, _norm(array))
        if isinstance(array, np.ndarray) and array.nbytes <= self._room:
            self.values[at] = array
            self._room -= array.nbytes
        old = None if self.before is None else self.before[1].tree.get(at)
        if not isinstance(old, Leaf) or old.shape != leaf.shape or old.dtype != leaf.dtype:
            sums.apart = None
        elif sums.apart is not None and self.before is not None:
            values = self.before[2].get(at)
            with suppress_refusals(self._forget):
                sums.apart = math.hypot(sums.apart, _norm(array, old.values() if values is None else values))

    def _forget(self) -> None:
        """Drop the checkpoint before, whose values are unreadable: all changes are unknown."""
        self.before = None

    def finish(self) -> dict[str, LayerSums]:
        """Return the sums of all layers."""
        for sums in self.layers.values() if self.before is None else ():
            sums.apart = None
        return self.layers


def find_reshaped(columns: Sequence[Mapping[str, LayerSums] | None]) -> list[int]:
    """Return the columns whose parameters differ in names or shapes from those before."""
    return [
        at
        for at, (before, now) in enumerate(pairwise(columns), 1)
        if before is not None and now is not None and _shapes(before) != _shapes(now)
    ]


def trace_layers(columns: Sequence[Mapping[str, LayerSums] | None]) -> tuple[LayerHistory, ...]:
    """Return the history of each layer, in the order of the checkpoints' tensors."""
    order = dict.fromkeys(layer for column in reversed(columns) for layer in column or ())
    return tuple(_layer_history(layer, columns) for layer in order)


def _shapes(column: Mapping[str, LayerSums]) -> dict[str, dict[str, Shape]]:
    return {layer: sums.shapes for layer, sums in column.items()}


def _layer_history(layer: str, columns: Sequence[Mapping[str, LayerSums] | None]) -> LayerHistory:
    layers_by_step = [None if column is None else column.get(layer) for column in columns]
    last = next(sums for sums in reversed(layers_by_step) if sums is not None)
    norms = tuple(None if sums is None else sums.norm for sums in layers_by_step)
    changes = tuple(map(_change, (None, *layers_by_step[:-1]), layers_by_step))
    sizes = sum(math.prod(shape) for shape in last.shapes.values())
    return LayerHistory(layer, len(last.shapes), sizes, norms, changes)


def _change(before: LayerSums | None, now: LayerSums | None) -> float | None:
    known = before is not None and now is not None and before.shapes == now.shapes
    return now.apart if known and now is not None else None


def _relative_change(before: float | None, change: float | None) -> float | None:
    if before is None or change is None:
        return None
    if before == 0:
        return math.inf if change else 0.0
    return change / before


def _norm(array: Values, other: Values | None = None) -> float:
    """Return the Euclidean norm of an array, or of its difference from another one of its shape."""
    total = 0.0
    pairs = zip(iter_values(array), repeat(None) if other is None else iter_values(other), strict=False)
    for values, before in pairs:
        piece = _to_real(values)
        if before is not None:
            with np.errstate(invalid="ignore", over="ignore"):
                piece = piece - _to_real(before)
        total = math.hypot(total, euclidean_norm(piece))
    return total


def _to_real(array: np.ndarray) -> np.ndarray:
    """Return real float64 numbers; of complex ones, real and imaginary parts."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128).view(np.float64)
    return array.astype(np.float64)


def fold_layers(layers: Sequence[LayerHistory], most: int) -> tuple[tuple[LayerHistory, ...], int]:
    """Join layers into the modules above them until at most `most` rows remain; return these and the depth.

    The depth is 0 if no layer was joined. Norms and updates of a module are those of all its parameters.
    """
    if len(layers) <= most:
        return tuple(layers), 0
    deepest = max(layer.path.count("/") for layer in layers) + 1
    for depth in range(deepest, 0, -1):
        groups: dict[str, list[LayerHistory]] = {}
        for layer in layers:
            groups.setdefault("/".join(layer.path.split("/")[:depth]), []).append(layer)
        if len(groups) <= most or depth == 1:
            return tuple(_join_layers(path, group) for path, group in groups.items())[:most], depth
    return tuple(layers[:most]), 1


def _join_layers(path: str, layers: Sequence[LayerHistory]) -> LayerHistory:
    totals = (sum(layer.tensors for layer in layers), sum(layer.parameters for layer in layers))
    norms, changes = [], []
    for at in range(len(layers[0].norms)):
        sizes = [layer.norms[at] for layer in layers if layer.norms[at] is not None]
        norms.append(_root_of_squares(sizes) if sizes else None)
        changes.append(_root_of_squares([layer.changes[at] for layer in layers]))
    return LayerHistory(path, *totals, tuple(norms), tuple(changes))


def _root_of_squares(values: Sequence[float | None]) -> float | None:
    """Return the norm of all parts from the norms of each; None if one is unknown."""
    known = [value for value in values if value is not None]
    return math.hypot(*known) if len(known) == len(values) else None


# What differs between sentences about different counts: numbers, and words in singular or plural.
_NUMBER = deferred.compile(r"-?[0-9][0-9,.]*(?:e[-+]?[0-9]+)?|\b(?:is|are|its|their|was|were|has|have)\b|s\b")


@dataclass(frozen=True, slots=True)
class FindingHistory:
    """One finding of doctor; `texts` has its sentences at each checkpoint, none where it does not occur.

    Findings that differ only in numbers are one: those of several tensors, and of several checkpoints.
    """

    topic: str
    texts: tuple[tuple[str, ...], ...]
    fix: str | None

    @property
    def sentences(self) -> tuple[str | None, ...]:
        """The text at each checkpoint, None where there is none."""
        return tuple("; ".join(text) if text else None for text in self.texts)

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {"topic": self.topic, "sentences": list(self.sentences), "fix": self.fix}


def trace_findings(columns: Sequence[Sequence[Finding] | None]) -> tuple[FindingHistory, ...]:
    """Return each finding with its text at each checkpoint; None columns are unreadable checkpoints."""
    histories: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    fixes: dict[tuple[str, str], str | None] = {}
    for at, column in enumerate(columns):
        for finding in column or ():
            key = finding.topic, _NUMBER.sub("#", finding.sentence)
            texts = histories.setdefault(key, [()] * len(columns))
            texts[at] = (*texts[at], finding.sentence)
            fixes[key] = finding.fix
    return tuple(FindingHistory(key[0], tuple(texts), fixes[key]) for key, texts in histories.items())
