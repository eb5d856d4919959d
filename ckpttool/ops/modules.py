"""The modules of a listing: which entries each holds, and the sums below it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ckpttool import limits
from ckpttool.leaf import Leaf, ValueLeaf, display
from ckpttool.ops.rows import natural
from ckpttool.shown import clean

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
Sort = Literal["file", "size", "name"]

_NUMBERED = re.compile(r"(?:layer(?:_with_weights)?-)?[0-9]+")
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


def entries(module: Module, sort: Sort) -> list[tuple[str, TensorRow | ValueRow | Module]]:
    """Return what stands in the module by its names: its own entries before modules, or in another order."""
    found: list[tuple[str, TensorRow | ValueRow | Module]] = [*module.rows, *module.below.items()]
    if sort == "name":
        found.sort(key=lambda entry: natural(entry[0]))
    elif sort == "size":
        found.sort(key=lambda entry: -_nbytes(entry[1]))
    return found


def _nbytes(entry: TensorRow | ValueRow | Module) -> int:
    if isinstance(entry, Module):
        return entry.nbytes
    return entry.leaf.nbytes if isinstance(entry.leaf, Leaf) else 0


def through(name: str, module: Module) -> tuple[str, Module]:
    """Return the module that people see under the name: one that only holds another is no step of its own."""
    while module.step:
        (module,) = module.below.values()
        name = f"{name}/{module.name}"
    return name, module


def kind(module: Module) -> str:
    """Return a module's class and activation, `Dense relu`, as far as the file names them.

    Where Keras numbers its layers (`layer-3`, `_operations/3`), the layer's own name stands before them.
    """
    what = " ".join(clean(word) for word in (module.kind or "", activation(module.facts)) if word)
    return ": ".join(word for word in (clean(_layer(module)), what) if word)


def _layer(module: Module) -> str:
    """Return the name of a layer whose path has only its number: the file's, or that of its variables."""
    if not _NUMBERED.fullmatch(module.name):
        return ""
    named = module.facts.get("layer")
    if isinstance(named, str):
        return named
    stored = {
        row.leaf.name.rpartition("/")[0]
        for _, row in module.rows
        if isinstance(row.leaf, Leaf) and row.leaf.name
    }
    return stored.pop().rpartition("/")[2] if len(stored) == 1 else ""


def activation(facts: Mapping[str, Any]) -> str:
    """Return the activation that a module's facts name, "linear" left out because it is none."""
    named = facts.get("activation")
    return named if isinstance(named, str) and named != "linear" else ""


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
