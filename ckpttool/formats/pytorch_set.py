"""Several PyTorch files that are one agent: PREFIX_actor, PREFIX_critic, their targets and optimizers.

Source of the names: github.com/sfujim/TD3, TD3.py, `TD3.save`; programs that copied it keep two critics
apart (`PREFIX_critic_1`) and save the targets too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckpttool import places
from ckpttool.checkpoint import Checkpoint
from ckpttool.errors import UnsupportedError
from ckpttool.formats import pytorch
from ckpttool.formats.listed import joined
from ckpttool.formats.probe import Piece, Probe
from ckpttool.leaf import Key, display, key
from ckpttool.tree import Container, Tree
from ckpttool.wire.asked import merged, standing

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "pytorch_set"
TITLE = "PyTorch files of one agent with a common prefix"
WRITES = True
FRAMEWORK = "torch"

_CRITICS = ("critic", *(f"{name}{number}" for name in ("critic_", "crtic_", "critic") for number in (1, 2)))
_MEMBERS = tuple(
    f"{network}{end}" for network in ("actor", *_CRITICS) for end in ("", "_target", "_optimizer")
)
_SUFFIXES = ("", ".pth", ".pt", ".pkl")
_ACTOR = re.compile(r"(.+)_actor(\.pth|\.pt|\.pkl)?")


def claims(probe: Probe) -> str | None:
    """Return the prefix if no file has that name but an actor's and a critic's files begin with it.

    A folder stands for the one set that it holds.
    """
    if probe.kind == "missing":
        return probe.path if _is_set(_files(probe.path, probe.names)) else None
    return _only(probe.path, probe.names) if probe.kind == "folder" else None


def read(location: str) -> Checkpoint:
    """List all files of the set as one tree: each file's entries under its member's name.

    Native keys are `actor:l1.weight`. Each file is read as what its bytes say it is.
    """
    from ckpttool.formats.resolve import open_checkpoint

    folder = os.path.dirname(location) or "."
    names = _files(location, frozenset(places.listdir(folder)))
    read_files = {member: open_checkpoint(file) for member, file in names.items()}
    tree = joined({key(member): one.tree for member, one in read_files.items()}, _native, Container("dict"))
    parts = tuple(read_files.values())
    return Checkpoint(
        path=location,
        format=NAME,
        tree=tree,
        files=tuple(file for one in parts for file in one.files),
        writer=parts[0].writer,
        integrity="crc32" if all(one.integrity == "crc32" for one in parts) else "none",
        notes=tuple(dict.fromkeys(note for one in parts for note in one.notes)),
        asks=merged(*(standing(one.asks, member) for member, one in read_files.items())),
        unjudged=tuple(f"{member}: {each}" for member, one in read_files.items() for each in one.unjudged),
    )


def members(location: str) -> tuple[str, ...]:
    """Return the files that a set of this prefix has, or would have if it were complete."""
    return tuple(_files(location, Probe(location).names).values())


def pieces(tree: Tree) -> tuple[Piece, ...]:
    """Return a torch file for every member at the top of the tree, without a suffix, as TD3.save does.

    Raise UnsupportedError, before anything is written, for a tree that is no set, and for what a torch
    pickle cannot hold.
    """
    return tuple(
        Piece(f"_{member}", piece.write)
        for member, one in _members(tree).items()
        for piece in pytorch.pieces(one)
    )


def stored(tree: Tree) -> Tree:
    """Return the tree with the paths by which it will be read; raise UnsupportedError as `pieces` does."""
    parts = {key(member): pytorch.stored(one) for member, one in _members(tree).items()}
    return joined(parts, _native, Container("dict"))


def _native(member: Key, name: str) -> str:
    return f"{member.value}:{name}"


def _members(tree: Tree) -> Mapping[str, Tree]:
    """Return the files' trees by their member's name, in the order of `_MEMBERS`."""
    found = {str(path[0].value) if len(path) > 1 else display(path): path[0] for path in tree if path}
    strange = [name for name in found if name not in _MEMBERS]
    if strange or not _is_set(found):
        raise UnsupportedError(
            "a set of files holds an actor and its critic, their targets and optimizers, and nothing else",
            found=", ".join(map(repr, strange or found)),
        )
    for path, others in tree.aliases.items():
        if any(alias.path[:1] != path[:1] for alias in others):
            raise UnsupportedError("two files cannot share a tensor", path=display(path))
    return {member: tree.below((found[member],)) for member in _MEMBERS if member in found}


def _is_set(members: Iterable[str]) -> bool:
    there = set(members)
    return "actor" in there and not there.isdisjoint(_CRITICS)


def _only(folder: str, names: frozenset[str]) -> str | None:
    stems = {match[1] for name in names if (match := _ACTOR.fullmatch(name)) and not name.startswith(".")}
    sets = (stem for stem in sorted(stems) if _is_set(_files(os.path.join(folder, stem), names)))
    first, more = next(sets, None), next(sets, None)
    return os.path.join(folder, first) if first is not None and more is None else None


def _files(prefix: str, names: frozenset[str]) -> dict[str, str]:
    """Return the set's files by member: regular ones only, so that no folder can lead back to itself."""
    folder, stem = os.path.split(prefix)
    found = {
        member: os.path.join(folder, f"{stem}_{member}{suffix}")
        for member in _MEMBERS
        for suffix in reversed(_SUFFIXES)
        if f"{stem}_{member}{suffix}" in names
    }
    return {member: file for member, file in found.items() if places.isfile(file)}
