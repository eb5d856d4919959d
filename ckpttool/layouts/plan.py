"""What a layout answers when it is asked to hold a canonical agent: where everything goes."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol, cast

from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.table import Table
from ckpttool.tree import Tree


class Layout(Protocol):
    """What every layout module offers; its names are module-level."""

    TABLE: Table

    def recognise(self, tree: Tree, name: str) -> Binding | None:
        """Return the tree's way to the canonical agent, or None; `name` is the checkpoint's file name."""
        ...


class Told(Protocol):
    """What a layout also offers whose agents are told about by files beside the checkpoint."""

    def companions(self, location: str) -> Sequence[str]:
        """Return the files that may tell more of the checkpoint at `location`, whether they exist or not."""
        ...

    def told_by(self, binding: Binding, file: str, tree: Tree) -> Binding:
        """Return the binding with what `tree`, read from one of those files, says."""
        ...


def told(layout: object) -> Told | None:
    """Return the layout as one that reads companions, None if it does not."""
    return cast(Told, layout) if hasattr(layout, "companions") else None


def writes(layout: ModuleType) -> bool:
    """Say whether the layout can also hold an agent (offers `plan(binding, canonical, told) -> Plan`)."""
    return hasattr(layout, "plan")


def never_run(layout: object) -> frozenset[str]:
    """Return the components whose networks no file of the layout says how to run (its `NEVER_RUN`)."""
    return cast(frozenset[str], getattr(layout, "NEVER_RUN", frozenset()))
