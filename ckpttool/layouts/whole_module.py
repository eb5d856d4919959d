"""A torch module that was pickled whole, read as its state_dict: names of tensors, classes of its parts.

Source: torch/nn/modules/module.py, Module.__setstate__: a module's attributes are its state; its parts stand
in `_modules`, its tensors in `_parameters` and `_buffers`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ckpttool.layouts import activations
from ckpttool.leaf import Leaf, Path, ValueLeaf, attr, key
from ckpttool.tree import Tree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ckpttool.layouts.canonical import Binding

_MODULES = attr("_modules")
_TENSORS = (attr("_parameters"), attr("_buffers"))
# torch/nn/modules/activation.py: arguments that would make it another function, and their defaults.
_ARGUMENTS: Mapping[str, Mapping[str, object]] = {
    "ELU": {"alpha": 1.0},
    "LeakyReLU": {"negative_slope": 0.01},
    "GELU": {"approximate": "none"},
    "Softplus": {"beta": 1.0, "threshold": 20.0},
}
_ACTIVATION, _IDENTITY = "torch.nn.modules.activation.", "torch.nn.modules.linear.Identity"


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole module: its `state` under a state_dict's keys, their paths in the file, classes by module."""

    tree: Tree
    state: Tree
    sources: Mapping[Path, Path]
    classes: Mapping[str, str]

    def value(self, module: str, name: str) -> object:
        """Return a plain attribute of the module (`pi`, `pi.net.1`), None where it has none."""
        leaf = self.tree.get((*_place(module), attr(name)))
        return leaf.value if isinstance(leaf, ValueLeaf) else None

    def has(self, module: str, name: str) -> bool:
        """Say whether the module has an attribute, a buffer or a parameter of that name."""
        ways = ((attr(name),), *((kind, key(name)) for kind in _TENSORS))
        places = [(*_place(module), *way) for way in ways]
        return any(path[: len(place)] == place for path in self.tree for place in places)

    def children(self, module: str) -> list[str]:
        """Return the names of a Sequential's parts in the order of their use, which is that of the file."""
        return [name for name in self.classes if name.rpartition(".")[0] == module]

    def activation(self, module: str) -> str | None:
        """Return the canonical name of the activation that the module is, None for anything else."""
        return activation_of(self.classes.get(module, ""), lambda name: self.value(module, name))

    def bound(self, binding: Binding) -> Binding:
        """Return a binding of the state as one of the file: what is no tensor of it says how it was built."""
        moved = binding.moved(self.sources.__getitem__)
        plain = frozenset(path for path, _ in self.tree.plain())
        return replace(moved, consumed=moved.consumed | plain)


def activation_of(name: str, value: Callable[[str], object]) -> str | None:
    """Return the canonical activation of a class by its name, and by what `value` returns of its attributes.

    None for another class, and for one with another slope, limit or approximation than its default.
    """
    if name == _IDENTITY:
        return "linear"
    short = name.removeprefix(_ACTIVATION)
    if any(value(each) != default for each, default in _ARGUMENTS.get(short, {}).items()):
        return None
    return activations.TORCH.get(short) if name.startswith(_ACTIVATION) else None


def _place(module: str) -> Path:
    return tuple(step for part in module.split(".") for step in (_MODULES, key(part)))


def whole(tree: Tree) -> Whole | None:
    """Return the tree as a whole module, None if it is none."""
    sources: dict[Path, Path] = {(key(name),): path for path in tree if (name := _name(path)) is not None}
    if not sources:
        return None
    state = Tree({place: tree[path] for place, path in sources.items() if isinstance(tree[path], Leaf)})
    classes = {
        ".".join(names): container.name
        for path, container in tree.containers.items()
        if container.name and (names := _modules(path))
    }
    return Whole(tree, state, sources, classes)


def _name(path: Path) -> str | None:
    """Return a tensor's name in the state_dict: `pi.net.0.weight` for its path among modules' attributes."""
    if len(path) < 2 or path[-2] not in _TENSORS:
        return None
    above = _modules(path[:-2])
    return None if above is None else ".".join((*above, str(path[-1].value)))


def _modules(path: Path) -> list[str] | None:
    if len(path) % 2 or any(step != _MODULES for step in path[::2]):
        return None
    return [str(step.value) for step in path[1::2]]
