"""A part of a checkpoint: the subtree under one path."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.tree import Alias, Leaf, Path, PathStep, Tree, ValueLeaf, display, key


def select_part(tree: Tree, part: str) -> tuple[Tree, tuple[str, ...]]:
    """Return the subtree under the display path `part`, and the names of entries that cannot be included.

    Aliases from outside are left out; an optimizer's slot whose parameter is outside is meaningless
    alone and is named instead, unless it belongs to a whole torch optimizer. Raise UsageError when
    nothing is under the path.
    """
    part = part.strip("/")
    paths = {path: rest for path in tree if (rest := _path_below(path, part)) is not None}
    if not paths:
        raise _unknown_part_error(tree, part)
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    lost: list[str] = []
    for path, rest in paths.items():
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            if leaf.of not in paths and not _is_numbered_slot(path, rest):
                lost.append(tree.names[path])
                continue
            leaf = replace(leaf, of=paths.get(leaf.of))
        leaves[rest] = leaf
    aliases = {
        rest: tuple(
            Alias(inside, alias.key)
            for alias in tree.aliases.get(path, ())
            if (inside := _path_below(alias.path, part)) is not None
        )
        for path, rest in paths.items()
    }
    containers = {
        rest: container
        for path, container in tree.containers.items()
        if (rest := () if display(path) == part else _path_below(path, part)) is not None
    }
    return Tree(leaves, {path: others for path, others in aliases.items() if others}, containers), tuple(lost)


def _unknown_part_error(tree: Tree, part: str) -> UsageError:
    """Return the error for a path with nothing under it, with similar paths."""
    names = list(tree.names.values())
    folders: dict[str, int] = {}
    for name in names:
        steps = name.split("/")
        for depth in range(1, len(steps)):
            folders.setdefault("/".join(steps[:depth]), depth)
    if part in names:
        above = part.rpartition("/")[0]
        hint = f"--part {above}" if above else "leave out --part"
        return UsageError("the path is a single entry with nothing under it", path=part, hint=hint)
    plain = part.replace(".", "/")
    close = [plain] if plain in folders else difflib.get_close_matches(part, folders, 1)
    top = [name for name, depth in folders.items() if depth == 1]
    hint = f"--part {close[0]}" if close else "run ckpttool inspect to list the checkpoint's paths"
    return UsageError(
        "the checkpoint has nothing under this path",
        path=part,
        found=abbreviate_list(top, 6) or None,
        hint=hint,
    )


def _path_below(path: Path, part: str) -> Path | None:
    """Return what follows `part` in the path, None if it is elsewhere; a dotted key may be split."""
    left = part
    for number, step in enumerate(path):
        shown = display((step,))
        if left == shown:
            return path[number + 1 :] or None
        if left.startswith(f"{shown}/"):
            left = left[len(shown) + 1 :]
            continue
        if step.kind == "key" and shown.startswith(f"{left}/"):
            return (_cut_key(step, len(left) + 1), *path[number + 1 :])
        return None
    return None


def _is_numbered_slot(path: Path, rest: Path) -> bool:
    """Return whether a slot belongs to a whole torch optimizer, with parameters by number or name."""
    return len(rest) > 2 and len(path) > 2 and rest[-3] == path[-3] == key("state")


def _cut_key(step: PathStep, at: int) -> PathStep:
    return key(str(step.value)[at:])


def full_names(tree: Tree, part: str | None) -> Mapping[Path, str]:
    """Return every leaf's name in the whole checkpoint, of which the tree is a part."""
    if part is None:
        return tree.names
    return {path: f"{part.strip('/')}/{name}" for path, name in tree.names.items()}
