"""The modules of a listing: which entries each holds, and the sums below it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpttool import limits
from ckpttool.leaf import ValueLeaf, display

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckpttool.leaf import Path
    from ckpttool.ops.rows import TensorRow, ValueRow
    from ckpttool.tree import Container

# Steps of paths by which Keras keeps its own lists of layers and variables, beside the names that people gave
# (keras/src/saving/legacy/saved_model and keras/src/models/functional.py of Keras 2: `_trackable_children`).
_OWN_LISTS = re.compile(
    r"(?:^|/)(?:_[^/]*|(?:non_)?(?:trainable_)?variables|regularization_losses|keras_api|layers/[0-9]+"
    r"|layer(?:_with_weights)?-[0-9]+)(?:/|$)"
)
# A configuration may nest as it likes; what is shown of it does not.
_DEEPEST_FACT = 6


@dataclass(slots=True, eq=False)
class Module:
    """One step of the paths: what stands at it and below it, in the order of the file.

    `name` is the last part of `path`. `kind` is the class that the file names, `facts` what it says about the
    object ("activation", "units"); `built` is false for an object that is listed and not built. The sums are
    over everything at and below the module; `parameters` counts the elements of trained tensors.
    """

    path: str
    name: str
    parent: Module | None
    kind: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    built: bool = True
    rows: list[tuple[str, TensorRow | ValueRow]] = field(default_factory=list)
    below: dict[str, Module] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    @property
    def step(self) -> bool:
        """Whether the module only holds one other module, so that it is no step of its own for people."""
        return not self.rows and self.kind is None and len(self.below) == 1

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "class": self.kind,
            "facts": _plain(self.facts, _DEEPEST_FACT),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
        }


def grouped(
    rows: Iterable[tuple[str, TensorRow | ValueRow]], containers: Mapping[Path, Container]
) -> tuple[Module, ...]:
    """Return the modules of the rows, which come with display paths: the root, each before those in it.

    Raise LimitError where a path has more steps than limits.path_depth.
    """
    root = Module("", "", None)
    known = {"": root}
    deepest = limits.current().path_depth
    for path, row in rows:
        at, _, name = path.rpartition("/")
        holder = known.get(at) or _made(known, at, deepest)
        holder.rows.append((name, row))
        leaf = row.leaf
        if not isinstance(leaf, ValueLeaf):
            holder.tensors += 1
            holder.nbytes += leaf.nbytes
            if leaf.role == "parameter":
                holder.parameters += leaf.size
    # Those below come later in `known` than what they are below.
    for module in reversed(known.values()):
        if module.parent is not None:
            module.parent.tensors += module.tensors
            module.parent.parameters += module.parameters
            module.parent.nbytes += module.nbytes
    for keys, container in containers.items():
        if container.kind in ("module", "record") and (named := known.get(display(keys))) is not None:
            named.kind = container.name or None
            named.built = container.kind == "module"
            if isinstance(container.state, Mapping):
                named.facts = container.state
    return tuple(known.values())


def _made(known: dict[str, Module], path: str, deepest: int) -> Module:
    """Make the module and those above it that are not there yet."""
    # Each of them is told by its path: what is told grows with the square of the depth.
    if (depth := path.count("/") + 2) > deepest:
        raise limits.exceeded("path_depth", "a tensor lies too deep", depth)
    missing = []
    at = path
    while at not in known:
        missing.append(at)
        at = at.rpartition("/")[0]
    module = known[at]
    for at in reversed(missing):
        name = at.rpartition("/")[2]
        module.below[name] = Module(at, name, module)
        module = known[at] = module.below[name]
    return module


def given(names: Iterable[str]) -> list[str]:
    """Return the names that people gave; not those under which a framework keeps lists of its own.

    A name that is spelled exactly (leaf.exact) reads like that of a tensor, and tells nobody more.
    """
    return [name for name in names if not name.startswith((".", "[")) and not _OWN_LISTS.search(name)]


def walk(module: Module) -> Iterator[Module]:
    """Go through the module and all below it, each before those in it."""
    waiting = [module]
    while waiting:
        here = waiting.pop()
        yield here
        waiting += reversed(here.below.values())


def _plain(value: object, deepest: int) -> Any:
    """Return what JSON can hold of a fact; what it cannot is told by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if deepest and isinstance(value, Mapping):
        return {str(name): _plain(item, deepest - 1) for name, item in value.items()}
    if deepest and isinstance(value, list | tuple):
        return [_plain(item, deepest - 1) for item in value]
    return f"({type(value).__name__})"
