"""From what a torch pickle says to a tree: paths, roles, shared storages, containers, inert records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from ckpttool import dtypes
from ckpttool.errors import FormatError
from ckpttool.formats.pickled.inert import KEYS, PLAIN, is_leaf, record, step_of
from ckpttool.formats.pytorch.tensors import Size, Storage, Tensor, array_source, source
from ckpttool.leaf import Key, Leaf, Path, Record, Role, ValueLeaf, attr, index
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Dict, Global, Object, Set

DEPTH = 200
# A list may be reached by many paths, and lists of lists by exponentially many: this often per node.
REVISITS = 16

# What torch's modules call their buffers (torch/nn/modules/batchnorm.py).
_BUFFERS: dict[object, Role] = {
    "running_mean": "buffer",
    "running_var": "buffer",
    "num_batches_tracked": "counter",
}
# How torch.nn.Module keeps its tensors; a state_dict's names leave these steps out.
_MODULE = {"_parameters": "plain", "_buffers": "buffers", "_modules": "plain"}

# Where in an optimizer's state_dict, or in a module, a value stands: it decides roles.
Place = Literal["plain", "state", "slots", "settings", "buffers"]
Child = tuple[Key, Any, Place]


class Usage(NamedTuple):
    """How many bytes a storage has and how many of them tensors show."""

    stored: int
    used: int


def native(path: Path) -> str:
    """Return the dotted name that torch lists: `l1.weight`, `state.0.exp_avg`."""
    if len(path) == 1:
        return str(path[0].value)
    return ".".join(str(s.value) for s in path if s.kind != "attr" or s.value not in _MODULE)


class Walk:
    """Goes once through the values of a pickle and collects the tree."""

    def __init__(self, *, big: bool, visits: int) -> None:
        """Take storages as big-endian if `big`; visit at most about `visits` values."""
        self.big = big
        self.left = visits
        self.leaves: dict[Path, Leaf | ValueLeaf] = {}
        self.aliases: dict[Path, tuple[Alias, ...]] = {}
        self.containers: dict[Path, Container] = {}
        self.usage: dict[str, Usage] = {}
        self.attributes = 0
        self._first: dict[tuple[object, ...], Path] = {}
        self._open: dict[int, Path] = {}
        self._seen: dict[int, Path] = {}

    def tree(self, value: Any) -> Tree:
        """Return the tree of a pickle's value."""
        self._value(value, (), "plain")
        return Tree(self.leaves, self.aliases, self.containers)

    def _value(self, value: Any, path: Path, place: Place) -> None:
        kind = type(value)
        if kind is Tensor:
            self._tensor(value, path, place)
        elif kind in PLAIN:
            self.leaves[path] = ValueLeaf(value, _value_role(path, place))
        elif kind is Array:
            self._array(value, path)
        elif kind is Storage:
            self._storage(value, path)
        elif isinstance(value, dict | list | tuple | Object) and kind is not Global:
            self._container(value, path, place)
        else:
            self.leaves[path] = ValueLeaf(record(value))

    def _tensor(self, tensor: Tensor, path: Path, place: Place) -> None:
        row = dtypes.BY_NAME.get(tensor.dtype)
        if row is None or not row.itemsize:
            shape = ", ".join(map(str, tensor.shape))
            self.leaves[path] = ValueLeaf(Record("torch.Tensor", f"{tensor.dtype}[{shape}]"))
            return
        self.attributes += tensor.attributes
        count = tensor.count
        first = self._first.setdefault(tensor.view, path) if count else path
        if first is not path:
            self.aliases[first] = (*self.aliases.get(first, ()), Alias(path, native(path)))
            return
        self._use(tensor.storage, count * row.itemsize)
        role, slot = _tensor_role(path, place)
        self.leaves[path] = Leaf(
            dtype=tensor.dtype,
            shape=tensor.shape,
            source=source(tensor, big=self.big),
            key=native(path),
            role=role,
            slot=slot,
            trainable=tensor.requires_grad if tensor.parameter else None,
        )

    def _use(self, storage: Storage, nbytes: int) -> None:
        usage = self.usage.get(storage.key)
        self.usage[storage.key] = Usage(storage.nbytes, nbytes + (usage.used if usage else 0))

    def _storage(self, storage: Storage, path: Path) -> None:
        dtype = storage.dtype or "uint8"
        count = storage.nbytes // dtypes.BY_NAME[dtype].itemsize
        self._tensor(Tensor(storage, dtype, 0, (count,), (1,)), path, "settings")

    def _array(self, array: Array, path: Path) -> None:
        parts = array.parts()
        if parts is not None and isinstance(parts.data, list):
            self._container(parts.data, path, "plain", Container("record", "numpy.ndarray"))
        elif parts is None or parts.type.name is None:
            shown = f"{parts.type.code}{list(parts.shape)}" if parts else ""
            self.leaves[path] = ValueLeaf(Record("numpy.ndarray", shown))
        else:
            found = array_source(parts)
            self.leaves[path] = Leaf(parts.type.name, parts.shape, found, native(path), "other")

    def _container(self, value: Any, path: Path, place: Place, kind: Container | None = None) -> None:
        where = self._open.get(id(value)) if value != () else None
        if where is not None or self._again(value):
            first = native(where if where is not None else self._seen[id(value)])
            self.leaves[path] = ValueLeaf(Record("the same object as", first or "the whole checkpoint"))
            return
        if len(path) > DEPTH:
            raise FormatError(f"values are nested more than {DEPTH} deep")
        if isinstance(value, Object) and is_leaf(value):
            self.leaves[path] = ValueLeaf(record(value))
            return
        self._seen.setdefault(id(value), path)
        self._open[id(value)] = path
        self.containers[path] = kind or _kind(value)
        for step, child, inner in _children(value, place):
            self._value(child, (*path, step), inner)
        del self._open[id(value)]

    def _again(self, value: Any) -> bool:
        """Say whether the value was shown before and there is no allowance left to show it again."""
        if not self.left and id(value) in self._seen:
            return True
        self.left = max(0, self.left - 1 - (0 if isinstance(value, Object) else len(value)))
        return False


def _value_role(path: Path, place: Place) -> Role:
    return "counter" if place == "slots" and path[-1].value == "step" else "other"


def _tensor_role(path: Path, place: Place) -> tuple[Role, str | None]:
    if place == "slots":
        name = str(path[-1].value)
        return ("counter", None) if name == "step" else ("slot", name)
    if place == "settings":
        return "other", None
    last = path[-1].value if path else None
    name = last.rpartition(".")[2] if isinstance(last, str) else ""
    return _BUFFERS.get(name, "buffer" if place == "buffers" else "parameter"), None


def _kind(value: Any) -> Container:
    if isinstance(value, Object):
        return Container("record", value.name)
    if isinstance(value, Dict):
        if value.name == "collections.OrderedDict":
            return Container("OrderedDict", None, plain(value.state))
        return Container("dict", value.name)
    if isinstance(value, Set):
        return Container("record", value.name)
    if isinstance(value, Size):
        return Container("tuple", "torch.Size")
    if isinstance(value, dict):
        # Keys that a path cannot hold are shown by a label: nobody could write such a dict back.
        return Container("dict") if all(type(k) in KEYS for k in value) else Container("record", "dict")
    return Container("list" if isinstance(value, list) else "tuple")


def _children(value: Any, place: Place) -> Iterator[Child]:
    if isinstance(value, dict):
        yield from _entries(value, place)
    elif isinstance(value, Object):
        yield from _members(value)
    else:
        inner: Place = "settings" if place in ("settings", "slots") else "plain"
        for position, item in enumerate(value):
            yield index(position), item, inner


def _entries(value: dict[Any, Any], place: Place) -> Iterator[Child]:
    optimizer = _is_optimizer(value)
    inner: Place = "slots" if place == "state" else place
    for position, (name, child) in enumerate(value.items()):
        if optimizer:
            inner = "state" if name == "state" else "settings"
        yield step_of(name, position), child, inner


def _is_optimizer(value: dict[Any, Any]) -> bool:
    # torch/optim/optimizer.py, state_dict(): parameters are numbered through all groups.
    if value.keys() != {"state", "param_groups"}:
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    return all(type(k) is int and isinstance(v, dict) for k, v in state.items())


def _members(value: Object) -> Iterator[Child]:
    if value.args:
        yield attr("__args__"), value.args, "plain"
    if value.kwargs:
        yield attr("__kwargs__"), dict(value.kwargs), "plain"
    yield from _state(value.state)
    yield from _entries(value.entries or {}, "plain")
    for position, item in enumerate(value.items or ()):
        yield index(position), item, "plain"


def _state(state: Any) -> Iterator[Child]:
    # Lib/pickle.py, load_build: a dict of attributes, or a pair of that and the values of slots.
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(s, dict | None) for s in state):
        for part in state:
            yield from _state(part)
    elif isinstance(state, dict) and all(type(name) is str for name in state):
        for name, child in state.items():
            place: Place = "buffers" if name == "_buffers" else "plain"
            yield attr(name), child, place
    elif state is not None:
        yield attr("__state__"), state, "plain"


def plain(value: Any, depth: int = 8) -> Any:
    """Return a container's own state (OrderedDict's `_metadata`) as plain data; what is not is left out."""
    if depth and isinstance(value, Dict | dict):
        made: dict[Any, Any] = OrderedDict() if getattr(value, "name", "").endswith("OrderedDict") else {}
        made.update((k, plain(v, depth - 1)) for k, v in value.items() if type(k) in PLAIN)
        return made
    if depth and type(value) in (list, tuple):
        return type(value)(plain(item, depth - 1) for item in value)
    return value if type(value) in PLAIN else None
