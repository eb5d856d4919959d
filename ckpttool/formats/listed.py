"""What a place in a file holds when it is no checkpoint of its own: a tree, and what to say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.checkpoint import Checkpoint, Integrity
from ckpttool.leaf import Key, Leaf, Path, ValueLeaf
from ckpttool.source import File
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.asked import Asked


@dataclass(frozen=True, slots=True)
class Listed:
    """One file's part in a checkpoint; the fields are those of Checkpoint."""

    tree: Tree
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    asks: tuple[Asked, ...] = ()

    def checkpoint(self, location: str, name: str, *files: File) -> Checkpoint:
        """Return it as the checkpoint at `location`, of the format of that name, read from these files."""
        return Checkpoint(
            path=location,
            format=name,
            tree=self.tree,
            files=files,
            writer=self.writer,
            integrity=self.integrity,
            notes=self.notes,
            details=self.details,
            asks=self.asks,
        )


def joined(parts: Mapping[Key, Tree], name: Callable[[Key, str], str], top: Container) -> Tree:
    """Return one tree of several: each one's entries below its step; `name` gives a native key's new form."""
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    aliases: dict[Path, tuple[Alias, ...]] = {}
    containers: dict[Path, Container] = {(): top}
    for step, tree in parts.items():
        for path, leaf in tree.items():
            leaves[step, *path] = (
                replace(leaf, key=name(step, leaf.key), of=(step, *leaf.of) if leaf.of else None)
                if isinstance(leaf, Leaf)
                else leaf
            )
        for path, others in tree.aliases.items():
            aliases[step, *path] = tuple(
                Alias((step, *a.path), None if a.key is None else name(step, a.key)) for a in others
            )
        containers |= {(step, *path): container for path, container in tree.containers.items()}
    return Tree(leaves, aliases, containers)
