"""Live objects of a program that runs: as trees, beside their checkpoints, and what would not be saved.

Nothing here imports a framework: one that nobody imported cannot own the object, and what an object is stands
in the names of its class's bases.
"""

from __future__ import annotations

from ckpttool.live.audit import Audit, Unsaved, audit
from ckpttool.live.compare import Comparison, Difference, compare, filled
from ckpttool.live.flatten import flatten_with_path, submodules
from ckpttool.live.listed import object_graph, state_dict

__all__ = [
    "Audit",
    "Comparison",
    "Difference",
    "Unsaved",
    "audit",
    "compare",
    "filled",
    "flatten_with_path",
    "object_graph",
    "state_dict",
    "submodules",
]
