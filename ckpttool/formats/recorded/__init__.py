"""A tree recorded as text, for formats that hold only named arrays: paths, values, aliases, containers.

Formats in which a tree has no place of its own (safetensors, npz) keep it beside their arrays as one JSON
document, ASCII only, so that what is written is read back as the same tree. docs/formats/safetensors.md
describes it. It is data: nothing in it is imported or called.
"""

from __future__ import annotations

from ckpttool.formats.recorded.names import named
from ckpttool.formats.recorded.read import DamagedError, restored
from ckpttool.formats.recorded.write import needed, recorded

__all__ = ["KEY", "DamagedError", "named", "needed", "recorded", "restored"]

KEY = "ckpttool.tree"
