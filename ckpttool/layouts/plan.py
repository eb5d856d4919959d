"""What a layout answers when it is asked to hold a canonical agent: where everything goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Protocol

from ckpttool.layouts.canonical import Binding
from ckpttool.layouts.table import Table
from ckpttool.leaf import Path, ValueLeaf
from ckpttool.mapping.report import Move
from ckpttool.tree import Container, Tree


@dataclass(frozen=True, slots=True)
class Plan:
    """The way from the canonical tree: moves in the target's order, and what the target needs besides.

    `added` are values that no source leaf gives (an index list, a default); those that matter for
    training are named in `assumed`. `missing` are targets that nothing fills; `consumed` are canonical
    leaves that the target says without an entry of its own.
    """

    moves: tuple[Move, ...]
    added: Mapping[Path, ValueLeaf] = field(default_factory=dict)
    containers: Mapping[Path, Container] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    consumed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


class Layout(Protocol):
    """What every layout module offers; its names are module-level."""

    TABLE: Table

    def recognise(self, tree: Tree, name: str) -> Binding | None:
        """Return the tree's way to the canonical agent, or None; `name` is the checkpoint's file name."""
        ...


def writes(layout: ModuleType) -> bool:
    """Say whether the layout can also hold an agent (offers `plan(binding, canonical) -> Plan`)."""
    return hasattr(layout, "plan")
