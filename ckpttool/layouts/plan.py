"""What a layout answers when it is asked to hold a canonical agent: where everything goes."""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.table import Table
from ckpttool.tree import Tree


class Layout(Protocol):
    """What every layout module offers; its names are module-level."""

    TABLE: Table

    def recognise(self, tree: Tree, name: str) -> Binding | None:
        """Return the tree's way to the canonical agent, or None; `name` is the checkpoint's file name."""
        ...


def writes(layout: ModuleType) -> bool:
    """Say whether the layout can also hold an agent (offers `plan(binding, canonical, told) -> Plan`)."""
    return hasattr(layout, "plan")
