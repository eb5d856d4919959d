"""From what a torch pickle says to a tree: paths, roles, shared storages, containers, inert records."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Literal, NamedTuple

from ckpttool import dtypes
from ckpttool.formats.pickled.inert import PLAIN, record
from ckpttool.formats.pickled.traversal import Below, Traversal, Via
from ckpttool.formats.torch_pickle.tensors import Size, Storage, Tensor, array_source, source
from ckpttool.leaf import Key, Leaf, Path, Record, Role, ValueLeaf
from ckpttool.tree import Alias, Container, Tree
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Dict, Global, Object

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


class Usage(NamedTuple):
    """How many bytes a storage has and how many of them tensors show."""

    stored: int
    used: int


def native(path: Path) -> str:
    """Return the dotted name that torch lists: `l1.weight`, `state.0.exp_avg`."""
    if len(path) == 1:
        return str(path[0].value)
    return ".".join(str(s.value) for s in path if s.kind != "attr" or s.value not in _MODULE)


class Walk(Traversal[Place]):
    """Goes once through the values of a pickle and collects the tree."""

    whole = "checkpoint"

    def __init__(self, *, big: bool, visits: int) -> None:
        """Take storages as big-endian if `big`; visit at most about `visits` values."""
        super().__init__(visits)
        self.big = big
        self.usage: dict[str, Usage] = {}
        self.attributes = 0
        self._first: dict[tuple[object, ...], Path] = {}

    def tree(self, value: Any) -> Tree:
        """Return the tree of a pickle's value."""
        self.value(value, (), "plain")
        return Tree(self.leaves, self.aliases, self.containers)

    def native(self, path: Path) -> str:
        """Return the dotted name that torch lists."""
        return native(path)

    def kind(self, value: Any) -> Container:
        """Return the container's kind; torch.Size and what an OrderedDict carries are kept."""
        if isinstance(value, Size):
            return Container("tuple", "torch.Size")
        kind = super().kind(value)
        return kind._replace(state=plain(value.state)) if kind.kind == "OrderedDict" else kind

    def below(self, value: Any, place: Place) -> Below[Place]:
        """Return what says where entries stand: in an optimizer's state_dict, among a module's buffers."""
        made = isinstance(value, Object)
        entries = (value.entries or {}) if made else value
        optimizer = isinstance(entries, dict) and _is_optimizer(entries)
        items: Place = "settings" if place in ("settings", "slots") and not made else "plain"
        others: Place = "plain" if made else "slots" if place == "state" else place

        def standing(step: Key, via: Via) -> Place:
            if via == "entry":
                return others if not optimizer else "state" if step.value == "state" else "settings"
            if via == "attr":
                return "buffers" if step.value == "_buffers" else "plain"
            return items

        return standing

    def value(self, value: Any, path: Path, place: Place) -> None:
        """Add what stands at the path."""
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
            self.container(value, path, place)
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
            self.container(parts.data, path, "plain", Container("record", "numpy.ndarray"))
        elif parts is None or parts.type.name is None:
            shown = f"{parts.type.code}{list(parts.shape)}" if parts else ""
            self.leaves[path] = ValueLeaf(Record("numpy.ndarray", shown))
        else:
            found = array_source(parts)
            self.leaves[path] = Leaf(parts.type.name, parts.shape, found, native(path), "other")


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


def _is_optimizer(value: dict[Any, Any]) -> bool:
    # torch/optim/optimizer.py, state_dict(): parameters are numbered through all groups.
    if value.keys() != {"state", "param_groups"}:
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    return all(type(k) is int and isinstance(v, dict) for k, v in state.items())


def plain(value: Any, depth: int = 8) -> Any:
    """Return a container's own state (OrderedDict's `_metadata`) as plain data; what is not is left out."""
    if depth and isinstance(value, Dict | dict):
        made: dict[Any, Any] = OrderedDict() if getattr(value, "name", "").endswith("OrderedDict") else {}
        made.update((k, plain(v, depth - 1)) for k, v in value.items() if type(k) in PLAIN)
        return made
    if depth and type(value) in (list, tuple):
        return type(value)(plain(item, depth - 1) for item in value)
    return value if type(value) in PLAIN else None
