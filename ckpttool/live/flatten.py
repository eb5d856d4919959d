"""A live object as a tree of unread leaves, and the modules in it."""

from __future__ import annotations

from typing import Any

from ckpttool.errors import UsageError
from ckpttool.leaf import Path
from ckpttool.live import kinds
from ckpttool.live.listed import TorchNames
from ckpttool.live.making import Making
from ckpttool.live.walk import MOST, Predicate, SortKey, Walk
from ckpttool.tree import Tree


def flatten_with_path(
    obj: Any,
    *,
    predicate: Predicate | None = None,
    recursive: bool = True,
    attribute_traversal_key: SortKey | None = None,
    enter: Predicate | None = None,
    most: int = MOST,
) -> Tree:
    """Return what a live module, or a plain container of modules, holds: a tree of leaves read when asked.

    Paths and their order are those of `tf.Module._flatten(with_path=True)`; the first path of a value is its
    leaf, further ones are aliases. `predicate` is asked about every value and not only tensors, which is what
    None takes; `recursive` False stays with the object's own. `enter` says which objects are entered: None
    enters modules, layers, optimizers, metrics and other trackable objects, where TensorFlow enters
    tf.Modules only. After `most` values objects that were entered before are not entered again, so that
    every value keeps its first path. Raise UsageError for a tensor, which has no path.
    """
    if kinds.is_tensor(obj):
        raise UsageError("a tensor has nothing below it", hint="flatten a list or dict that holds it")
    walk = Walk(enter or kinds.holds_variables, recursive, attribute_traversal_key, most)
    wanted = predicate or kinds.is_tensor
    made, names = Making(), TorchNames(obj, most)
    for found in walk.found(obj):
        if wanted(found.value):
            made.add(found, names.leaf(found), names.alias(found))
    return made.tree()


def submodules(obj: Any) -> dict[Path, Any]:
    """Return every module below a live object by its first path, in the order of `tf.Module.submodules`."""
    walk = Walk()
    return {found.path: found.value for found in walk.once(obj) if kinds.is_module(found.value)}
