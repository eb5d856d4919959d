"""The part of a checkpoint that one file contains; several parts joined to one tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard

from ckpttool.core import text as documents
from ckpttool.core.checkpoint import Checkpoint, Integrity
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.errors import abbreviate_list
from ckpttool.core.source import File, Storage
from ckpttool.core.tree import Alias, Container, Leaf, Path, PathStep, Tree, ValueLeaf, key

if TYPE_CHECKING:
    from ckpttool.core.code_references import CodeReference


@dataclass(frozen=True, slots=True)
class FileListing:
    """One file's part of a checkpoint; the fields are those of Checkpoint."""

    tree: Tree
    writer: str | None = None
    integrity: Integrity = "none"
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    code_references: tuple[CodeReference, ...] = ()
    unjudged: tuple[str, ...] = ()
    plain: frozenset[Storage] = frozenset()

    def checkpoint(self, location: str, name: str, *files: File) -> Checkpoint:
        """Return it as the checkpoint at `location`, in the named format, read from these files."""
        return Checkpoint(
            path=location,
            format=name,
            tree=self.tree,
            files=files,
            writer=self.writer,
            integrity=self.integrity,
            notes=self.notes,
            details=self.details,
            code_references=self.code_references,
            unjudged=self.unjudged,
            plain=self.plain,
        )


_NAMED = 3


def is_file_name(name: object) -> TypeGuard[str]:
    """Return whether a value from a file is the name of a file in the same folder."""
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and os.path.basename(name) == name
        and "\0" not in name
    )


def note_unknown_members(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note that names members of an archive that its format does not define, if there are any."""
    files = [documents.clean(name) for name in names if not name.endswith("/")]
    return (f"members not read: {abbreviate_list(files, _NAMED)}",) if files else ()


def join_trees(parts: Mapping[PathStep, Tree], name: Callable[[PathStep, str], str], top: Container) -> Tree:
    """Merge several trees, each under its own step; `name` maps native keys to their new form."""
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


def member_key(member: PathStep, native: str) -> str:
    """Return the native key of a tensor in one of several files, e.g. `actor:l1.weight`."""
    return f"{member.value}:{native}"


def join_checkpoints(
    location: str, format_: str, parts: Mapping[str, Checkpoint], settings: Mapping[str, Tree] | None = None
) -> Checkpoint:
    """Merge several files into one checkpoint; the entries of each are under its member name.

    `settings` are additional trees of values that belong to the checkpoint.
    """
    # A single file needs them only if it refers to code.
    from ckpttool.core.code_references import merge_references, relocate_references

    trees = {key(member): one.tree for member, one in parts.items()}
    trees |= {key(member): tree for member, tree in (settings or {}).items()}
    files = tuple(parts.values())
    checksums = {one.integrity for one in files}
    return Checkpoint(
        path=location,
        format=format_,
        tree=join_trees(trees, member_key, Container("dict")),
        files=tuple(file for one in files for file in one.files),
        writer=files[0].writer,
        integrity=files[0].integrity if len(checksums) == 1 else "none",
        notes=tuple(dict.fromkeys(note for one in files for note in one.notes)),
        code_references=merge_references(
            *(relocate_references(one.code_references, member) for member, one in parts.items())
        ),
        unjudged=tuple(f"{member}: {content}" for member, one in parts.items() for content in one.unjudged),
    )
