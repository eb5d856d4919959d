"""What a SavedModel's graph says that belongs to no tensor, as JSON values of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ckpttool.formats.saved_model.messages import MetaGraph, Signature, TensorInfo

MAX_ENTRIES = 50_000  # paths, tensors, functions and operations in all


class Details:
    """The facts of all graphs; `left_out` counts what did not fit any more."""

    def __init__(self, room: int = MAX_ENTRIES) -> None:
        self.left_out = 0
        self.initializers: dict[str, str] = {}
        self._room = room
        self._signatures: dict[str, Any] = {}
        self._functions: dict[str, Any] = {}
        self._kinds: Counter[str] = Counter()

    def signature(self, name: str, what: Signature, used: Sequence[str], tags: Sequence[str]) -> None:
        """Add a signature; one that another graph has too gets its graph's tags behind its name."""
        if name in self._signatures:
            name = f"{name} ({', '.join(tags)})"
        if self._take(1):
            self._signatures[name] = {
                "method": what.method,
                "inputs": self._tensors(what.inputs),
                "outputs": self._tensors(what.outputs),
                "variables": list(used[: self._take(len(used))]),
            }

    def function(self, name: str, holder: str | None, captures: Sequence[str]) -> None:
        """Add a concrete function, the path of the object that holds it, and the variables it captures."""
        if self._take(1):
            self._functions[name] = {
                "object": holder,
                "captures": list(captures[: self._take(len(captures))]),
            }

    def kinds(self, found: Mapping[str, int]) -> None:
        """Count objects by what they are."""
        self._kinds.update(found)

    def document(self, graphs: Sequence[MetaGraph]) -> dict[str, Any]:
        """Return everything as JSON values; empty without a graph."""
        if not graphs:
            return {}
        return {
            "tags": [list(graph.tags[: self._take(len(graph.tags))]) for graph in graphs],
            "producer": graphs[0].version or None,
            "signatures": self._signatures,
            "functions": self._functions,
            "initializers": dict(list(self.initializers.items())[: self._take(len(self.initializers))]),
            "objects": dict(self._kinds.most_common(self._take(len(self._kinds)))),
        }

    def _tensors(self, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
        kept = list(tensors.items())[: self._take(len(tensors))]
        return {
            name: {"dtype": tensor.dtype, "shape": None if tensor.shape is None else list(tensor.shape)}
            for name, tensor in kept
        }

    def _take(self, count: int) -> int:
        taken = min(count, self._room)
        self._room -= taken
        self.left_out += count - taken
        return taken
