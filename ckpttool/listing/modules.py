"""The modules of a listing: the entries of each, and the sums below it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ckpttool.core import deferred, limits
from ckpttool.core.deferred import dataclass, field
from ckpttool.core.text import clean, describe_record, natural_sort_key
from ckpttool.core.tree import Leaf, Path, ValueLeaf, display
from ckpttool.listing.rows import TensorRow, ValueRow

if TYPE_CHECKING:
    from ckpttool.core.tree import Container


# Path steps of Keras's own lists of layers and variables, beside user-given names
# (keras/src/saving/legacy/saved_model and keras/src/models/functional.py of Keras 2: `_trackable_children`).
_OWN_LISTS = deferred.compile(
    r"(?:^|/)(?:_[^/]*|(?:non_)?(?:trainable_)?variables|regularization_losses|keras_api|layers/[0-9]+"
    r"|layer(?:_with_weights)?-[0-9]+)(?:/|$)"
)
Sort = Literal["file", "size", "name"]

_DIGIT = deferred.compile("[0-9]")
_Entry = TypeVar("_Entry", bound="TensorRow | ValueRow | ModuleSummary")
_NUMBERED = deferred.compile(r"(?:layer(?:_with_weights)?-)?[0-9]+")
# A configuration may be nested to any depth; the displayed part is limited.
_DEEPEST_FACT = 6


@dataclass(slots=True, eq=False)
class ModuleSummary:
    """One path component: its own entries and all below it, in file order.

    `name` is the last part of `path`. `kind` is the class recorded in the file, `facts` its recorded
    properties ("activation", "units"); `built` is false for an object that is listed but not built.
    Sums cover everything at and below the module; `parameters` counts the elements of trained
    tensors.
    """

    __repr__ = describe_record

    path: str
    name: str
    parent: ModuleSummary | None
    kind: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    built: bool = True
    rows: list[tuple[str, TensorRow | ValueRow]] = field(default_factory=list)
    below: dict[str, ModuleSummary] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0

    @property
    def step(self) -> bool:
        """Return whether the module contains only one other module, so that display can skip it."""
        return not self.rows and self.kind is None and len(self.below) == 1

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": self.path,
            "class": self.kind,
            "facts": _json_fact(self.facts, _DEEPEST_FACT),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "nbytes": self.nbytes,
        }


def group_by_module(
    rows: Iterable[tuple[str, TensorRow | ValueRow]], containers: Mapping[Path, Container]
) -> tuple[ModuleSummary, ...]:
    """Return the modules of rows with display paths: the root first, each before its children.

    Raise LimitError where a path has more steps than limits.path_depth.
    """
    root = ModuleSummary("", "", None)
    modules = {"": root}
    deepest = limits.current().deepest_path
    for path, row in rows:
        at, _, name = path.rpartition("/")
        holder = modules.get(at) or _make_module(modules, at, deepest)
        holder.rows.append((name, row))
        leaf = row.leaf
        if not isinstance(leaf, ValueLeaf):
            holder.tensors += 1
            holder.nbytes += leaf.nbytes
            if leaf.role == "parameter":
                holder.parameters += leaf.size
    # Children come after their parents in `modules`.
    for module in reversed(modules.values()):
        if module.parent is not None:
            module.parent.tensors += module.tensors
            module.parent.parameters += module.parameters
            module.parent.nbytes += module.nbytes
    for keys, container in containers.items():
        if container.kind in ("module", "record") and (named := modules.get(display(keys))) is not None:
            named.kind = container.name or None
            named.built = container.kind == "module"
            if isinstance(container.state, Mapping):
                named.facts = container.state
    return tuple(modules.values())


def _make_module(modules: dict[str, ModuleSummary], path: str, deepest: int) -> ModuleSummary:
    """Create the module and any missing ancestors."""
    # Each is stored under its full path, so the total size grows with the square of the depth.
    if (depth := path.count("/") + 2) > deepest:
        raise limits.limit_error("path_depth", "a tensor path has too many levels", depth)
    missing = []
    at = path
    while at not in modules:
        missing.append(at)
        at = at.rpartition("/")[0]
    module = modules[at]
    for at in reversed(missing):
        name = at.rpartition("/")[2]
        module.below[name] = ModuleSummary(at, name, module)
        module = modules[at] = module.below[name]
    return module


def user_given_names(names: Iterable[str]) -> list[str]:
    """Return user-given names, without those of a framework's own lists.

    A name spelled exactly (leaf.exact) equals that of a tensor and adds no information.
    """
    return [name for name in names if not name.startswith((".", "[")) and not _OWN_LISTS.search(name)]


def module_entries(
    module: ModuleSummary, sort: Sort
) -> list[tuple[str, TensorRow | ValueRow | ModuleSummary]]:
    """Return the module's contents by name: its own entries before modules, or in another order.

    Where a file lists names alphabetically, numbers are in natural order (2 before 10).
    """
    if sort == "file":
        return [*_in_natural_order(module.rows), *_in_natural_order([*module.below.items()])]
    entries: list[tuple[str, TensorRow | ValueRow | ModuleSummary]] = [*module.rows, *module.below.items()]
    if sort == "name":
        entries.sort(key=lambda entry: natural_sort_key(entry[0]))
    elif sort == "size":
        entries.sort(key=lambda entry: -_nbytes(entry[1]))
    return entries


def _in_natural_order(entries: list[tuple[str, _Entry]]) -> list[tuple[str, _Entry]]:
    """Return entries in alphabetical order in natural order; others as they are."""
    names = [name for name, _ in entries]
    if len(names) < 2 or not any(map(_DIGIT.search, names)) or names != sorted(names):
        return entries
    return sorted(entries, key=lambda entry: natural_sort_key(entry[0]))


def _nbytes(entry: TensorRow | ValueRow | ModuleSummary) -> int:
    if isinstance(entry, ModuleSummary):
        return entry.nbytes
    return entry.leaf.nbytes if isinstance(entry.leaf, Leaf) else 0


def skip_wrapping_modules(name: str, module: ModuleSummary) -> tuple[str, ModuleSummary]:
    """Return the module displayed under the name, skipping those that only contain another one."""
    while module.step:
        (module,) = module.below.values()
        name = f"{name}/{module.name}"
    return name, module


def describe_module_kind(module: ModuleSummary) -> str:
    """Return a module's class and activation, `Dense relu`, as far as the file records them.

    Where Keras numbers its layers (`layer-3`, `_operations/3`), the layer's own name comes first.
    """
    what = " ".join(clean(word) for word in (module.kind or "", module_activation(module.facts)) if word)
    return ": ".join(word for word in (clean(_layer_name(module)), what) if word)


def _layer_name(module: ModuleSummary) -> str:
    """Return the name of a layer whose path has only its number: from the file or from its variables."""
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


def module_activation(facts: Mapping[str, Any]) -> str:
    """Return the activation in a module's facts; "linear" is omitted, because it is no activation."""
    named = facts.get("activation")
    return named if isinstance(named, str) and named != "linear" else ""


def walk_modules(module: ModuleSummary) -> Iterator[ModuleSummary]:
    """Yield the module and all below it, parents first."""
    waiting = [module]
    while waiting:
        here = waiting.pop()
        yield here
        waiting += reversed(here.below.values())


def _json_fact(value: object, deepest: int) -> Any:
    """Return a fact as JSON; a value that JSON cannot represent becomes its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if deepest and isinstance(value, Mapping):
        return {str(name): _json_fact(item, deepest - 1) for name, item in value.items()}
    if deepest and isinstance(value, list | tuple):
        return [_json_fact(item, deepest - 1) for item in value]
    return f"({type(value).__name__})"
