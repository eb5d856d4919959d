"""A part of a checkpoint: what lies below one path, as a tree of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.errors import UsageError, some
from ckpttool.leaf import Key, Leaf, Path, ValueLeaf, display, key
from ckpttool.tree import Alias, Tree


def below(tree: Tree, part: str) -> tuple[Tree, tuple[str, ...]]:
    """Return the subtree under the path that people read as `part`, and the names of what cannot come along.

    Other paths to the same storage that lead from outside are left out; an optimizer's slot whose parameter
    is outside has no meaning alone and is named instead, unless it is one of a whole torch optimizer. Raise
    UsageError when nothing lies below the path.
    """
    part = part.strip("/")
    paths = {path: rest for path in tree if (rest := _rest(path, part)) is not None}
    if not paths:
        raise _unknown(tree, part)
    leaves: dict[Path, Leaf | ValueLeaf] = {}
    lost: list[str] = []
    for path, rest in paths.items():
        leaf = tree[path]
        if isinstance(leaf, Leaf) and leaf.of is not None:
            if leaf.of not in paths and not _numbered(path, rest):
                lost.append(tree.names[path])
                continue
            leaf = replace(leaf, of=paths.get(leaf.of))
        leaves[rest] = leaf
    aliases = {
        rest: tuple(
            Alias(inside, alias.key)
            for alias in tree.aliases.get(path, ())
            if (inside := _rest(alias.path, part)) is not None
        )
        for path, rest in paths.items()
    }
    containers = {
        rest: container
        for path, container in tree.containers.items()
        if (rest := () if display(path) == part else _rest(path, part)) is not None
    }
    return Tree(leaves, {path: others for path, others in aliases.items() if others}, containers), tuple(lost)


def _unknown(tree: Tree, part: str) -> UsageError:
    """Return the error for a path below which nothing lies, with the paths that could be meant."""
    import difflib

    names = list(tree.names.values())
    folders: dict[str, int] = {}
    for name in names:
        steps = name.split("/")
        for depth in range(1, len(steps)):
            folders.setdefault("/".join(steps[:depth]), depth)
    if part in names:
        above = part.rpartition("/")[0]
        hint = f"--part {above}" if above else "leave --part out"
        return UsageError("the path is a single entry: nothing below this path", path=part, hint=hint)
    plain = part.replace(".", "/")
    close = [plain] if plain in folders else difflib.get_close_matches(part, folders, 1)
    top = [name for name, depth in folders.items() if depth == 1]
    hint = f"--part {close[0]}" if close else "ckpttool inspect shows the checkpoint's paths"
    return UsageError(
        "the checkpoint has nothing below this path", path=part, found=some(top, 6) or None, hint=hint
    )


def _rest(path: Path, part: str) -> Path | None:
    """Return what follows `part` in the path, None if it is elsewhere; a dotted key may be cut in two."""
    left = part
    for number, step in enumerate(path):
        shown = display((step,))
        if left == shown:
            return path[number + 1 :] or None
        if left.startswith(f"{shown}/"):
            left = left[len(shown) + 1 :]
            continue
        if step.kind == "key" and shown.startswith(f"{left}/"):
            return (_cut(step, len(left) + 1), *path[number + 1 :])
        return None
    return None


def _numbered(path: Path, rest: Path) -> bool:
    """Say whether a slot is one of a whole torch optimizer, which knows its parameters by number or name."""
    return len(rest) > 2 and len(path) > 2 and rest[-3] == path[-3] == key("state")


def _cut(step: Key, at: int) -> Key:
    return key(str(step.value)[at:])


def full_names(tree: Tree, part: str | None) -> Mapping[Path, str]:
    """Return every leaf's name in the whole checkpoint, of which the tree is the part."""
    if part is None:
        return tree.names
    return {path: f"{part.strip('/')}/{name}" for path, name in tree.names.items()}
