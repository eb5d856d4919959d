"""Parts of a checkpoint: the subtree under one path, optimizers, copies, the main matrices."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from ckpttool.core.errors import UsageError, abbreviate_list
from ckpttool.core.tree import Alias, Leaf, Path, PathStep, Tree, ValueLeaf, attr, display, key
from ckpttool.libraries.optimizer_entries import OPTIMIZER, has_rate, list_optimizers


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
    import difflib  # for errors only

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


_VARIABLES, _COPIED = attr("variables"), attr("_all_variables")


def is_keras_export(tree: Tree) -> bool:
    """Return whether the tree consists of the variable list that Keras's export writes, and its copy."""
    return any(path[:1] == (_COPIED,) for path in tree) and len(without_copies(tree)) < len(tree)


def largest_matrices(tree: Tree) -> set[Path]:
    """Return the matrices with the most elements; other kernels are no part of every network."""
    sizes = {
        path: leaf.size
        for path, leaf in tree.tensors()
        if len(leaf.shape) == 2 and leaf.role == "parameter" and "float" in leaf.dtype
    }
    largest = max(sizes.values(), default=0)
    return {path for path, size in sizes.items() if size == largest}


def without_optimizers(tree: Tree) -> tuple[Tree, tuple[str, ...]]:
    """Return the tree without optimizer state, and notes; raise UsageError if there is none."""
    from ckpttool.conversion import averages

    tops = list_optimizers(tree)
    slots = {path for path, leaf in tree.tensors() if leaf.role == "slot"}
    gone = slots.union(*tops.values())
    if not gone:
        raise UsageError("the checkpoint has no optimizer", hint="leave out --optimizer none")
    names = [display(top) or OPTIMIZER for top in tops if tops[top]] or [
        tree.names[path] for path in sorted(slots, key=display)
    ]
    left = {path: leaf for path, leaf in tree.items() if path not in gone}
    return averages.select_entries(tree, left), (f"left out: {abbreviate_list(names, 3)} (--optimizer none)",)


def has_older_optimizer(tree: Tree) -> bool:
    """Return whether a slot belongs to a TensorFlow 1 optimizer, which stores no learning rate."""
    from ckpttool.formats.tf_object_graph import slot_optimizer

    return any(
        leaf.role == "slot" and not has_rate(tree, slot_optimizer(path, leaf))
        for path, leaf in tree.tensors()
    )


def without_copies(tree: Tree) -> Tree:
    """Return the tree without the second variable list of Keras's export.

    Source: keras/src/export/saved_model.py, ExportArchive: `_all_variables` beside `variables`. Lists of a
    Sequential model's numbered variables may be in two orders.
    """
    copies = [path for path in tree if path[:1] == (_COPIED,)]
    sizes = _count_shapes(tree, (_VARIABLES,))
    if not copies or _count_shapes(tree, (_COPIED,)) - sizes:
        return tree
    if _count_contents(tree, (_COPIED,)) - _count_contents(tree, (_VARIABLES,)):
        return tree
    left = {path: leaf for path, leaf in tree.items() if path[:1] != (_COPIED,)}
    return Tree(left, tree.aliases, tree.containers)


def _count_shapes(tree: Tree, below: Path) -> Counter[object]:
    leaves = (leaf for path, leaf in tree.items() if path[: len(below)] == below)
    # Values that are no tensors are equal to nothing.
    return Counter((leaf.dtype, leaf.shape) if isinstance(leaf, Leaf) else object() for leaf in leaves)


def _count_contents(tree: Tree, below: Path) -> Counter[object]:
    """Count the tensors of one list by content; by name, too, where names have more than a number.

    A variable's own name is that of both lists, which its path in one of them need not contain.
    """
    counts: Counter[object] = Counter()
    for path, leaf in tree.items():
        if path[: len(below)] == below and isinstance(leaf, Leaf):
            name = tree.names[path].partition("/")[2]
            own = "" if name.isdecimal() else name
            if leaf.name and not leaf.name.startswith(str(below[0].value)):
                own = leaf.name
            counts[own, leaf.dtype, leaf.shape, hashlib.sha256(leaf.read()).digest()] += 1
    return counts
