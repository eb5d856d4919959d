"""From what a torch pickle says to a tree: paths, roles, shared storages, containers, inert records."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ckpttool import dtypes, limits
from ckpttool.errors import FormatError, UnsupportedError
from ckpttool.formats.pickled.inert import PLAIN, record
from ckpttool.formats.pickled.traversal import Below, Traversal, Via
from ckpttool.formats.torch_pickle import optimizers, roles
from ckpttool.formats.torch_pickle.parts import Backed, Parts
from ckpttool.formats.torch_pickle.sources import Budget, array_source, cast
from ckpttool.formats.torch_pickle.views import Size, Storage, Tensor, view
from ckpttool.leaf import Key, Leaf, Path, Record, Role, ValueLeaf, attr
from ckpttool.tree import Container, Tree
from ckpttool.wire.pickle_numpy import Array
from ckpttool.wire.pickle_reader import Dict, Global, Object

_GENERATOR = "torch._C.Generator"

# Where in an optimizer's state_dict, or in a module, a value stands: it decides roles.
Place = Literal["plain", "state", "slots", "settings", "buffers", "parameters"]

# How torch.nn.Module keeps its tensors; a state_dict's names leave these steps out.
_MODULE: dict[object, Place] = {"_parameters": "plain", "_buffers": "buffers", "_modules": "plain"}


class Members(NamedTuple):
    """Which of a class's attributes are parameters and which are buffers (None: the file does not say)."""

    parameters: frozenset[str]
    buffers: frozenset[str] | None


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

    def __init__(self, *, big: bool, size: int, classes: Mapping[str, Members] | None = None) -> None:
        """Take storages as big-endian if `big`; `size` is that of the pickle in bytes.

        `classes` are those of which the file says what their attributes are. `attributes` will hold, by the
        native names of tensors, the plain values that the file sets on them.
        """
        super().__init__(size)
        self.big = big
        self.usage: dict[str, Usage] = {}
        self._budget = Budget()
        self._plain = _Plain(self.left)
        self._owners = 0
        self.attributes: dict[str, dict[str, Any]] = {}
        self._classes = classes or {}
        self._states: set[int] = set()
        self._first: dict[object, Path] = {}

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
        return kind._replace(state=self._plain.of(value.state)) if kind.kind == "OrderedDict" else kind

    def below(self, value: Any, place: Place) -> Below[Place]:
        """Return what says where entries stand: in an optimizer's state_dict, among a module's buffers."""
        made = isinstance(value, Object)
        attribute = self._attributes(value) if made else _plainly
        entries = (value.entries or {}) if made else value
        optimizer = isinstance(entries, dict) and optimizers.is_state_dict(entries)
        made_of: Place = "settings" if made and value.name == _GENERATOR else "plain"
        items: Place = "settings" if place in ("settings", "slots") and not made else made_of
        others: Place = "plain" if made else "slots" if place == "state" else place

        def standing(step: Key, via: Via) -> Place:
            if via == "entry":
                return others if not optimizer else "state" if step.value == "state" else "settings"
            return attribute(step) if via == "attr" else items

        return standing

    def container(self, value: Any, path: Path, place: Place, kind: Container | None = None) -> None:
        """Add a dict, a list, a tuple or an inert object; an optimizer's slots by their numbers."""
        if type(value) is Object:
            _check_made(value)
        if type(value) is Object and optimizers.is_object(value.state):
            value.state["state"] = optimizers.numbered(value.state)
        super().container(value, path, place, kind)

    def _attributes(self, value: Object) -> Callable[[Key], Place]:
        """Return what says where an object's attributes stand: those of a module are of three kinds."""
        known = self._classes.get(value.name)
        if known is not None:
            return lambda step: _in_script(step, known)
        if optimizers.is_object(value.state):
            return lambda step: "state" if step.value == "state" else "plain"
        if isinstance(value.state, dict) and "_parameters" in value.state:
            # torch.nn.Module.__setattr__ keeps whatever a state_dict lists in these three.
            return lambda step: _MODULE.get(step.value, "settings")
        return lambda step: "buffers" if step.value == "_buffers" else "plain"

    def value(self, value: Any, path: Path, place: Place) -> None:
        """Add what stands at the path."""
        self.require_free(path)
        kind = type(value)
        if kind is Tensor:
            self._tensor(value, path, place, path)
        elif kind is Parts:
            self._parts(value, path, place)
        elif kind is Backed:
            self._backed(value, path, place)
        elif kind is Record:
            self.leaves[path] = ValueLeaf(value)
        elif kind in PLAIN:
            self.leaves[path] = ValueLeaf(value, _value_role(path, place))
        elif kind is Array:
            self._array(value, path)
        elif kind is Storage:
            self._storage(value, path)
        elif kind is Object and _is_old_tensor(value):
            self._tensor(_old_tensor(value), path, place, path)
        elif isinstance(value, dict | list | tuple | Object) and kind is not Global:
            self.container(value, path, place)
        else:
            self.leaves[path] = ValueLeaf(record(value))

    def _tensor(self, tensor: Tensor, path: Path, place: Place, named: Path) -> None:
        """Add the tensor; `named` is the path that gives its name and role (its own, or that of a whole)."""
        row = dtypes.BY_NAME.get(tensor.dtype)
        if row is None or not row.itemsize or tensor.dtype in dtypes.PACKED:
            shape = ", ".join(map(str, tensor.shape))
            shown = f"{tensor.dtype.removeprefix('torch.')}[{shape}]"
            self.leaves[path] = ValueLeaf(Record("torch.Tensor", shown))
            return
        count = tensor.count
        if count and self._again_at(tensor.view, path, named):
            return
        nbytes = count * row.itemsize
        first = self._use(tensor.storage, nbytes)
        role, slot = _tensor_role(named, place)
        self.leaves[path] = Leaf(
            dtype=tensor.dtype,
            shape=tensor.shape,
            source=self._budget.source(tensor, nbytes, big=self.big, first=first),
            key=native(named),
            role=role,
            slot=slot,
            trainable=_trained(tensor) if tensor.parameter or place == "parameters" else None,
        )
        self._own(tensor.state, path, named)

    def _again_at(self, what: object, path: Path, named: Path | None = None) -> bool:
        """Say whether this stands at another path already; then the path becomes one of its aliases."""
        first = self._first.setdefault(what, path)
        if first is path:
            return False
        self.alias(first, path, native(named or path))
        return True

    def _parts(self, whole: Parts, path: Path, place: Place) -> None:
        """Add the parts below the path; the one with the elements is named as the whole."""
        self.containers[path] = Container("record", whole.kind)
        for name, part in whole.parts.items():
            at = (*path, attr(name))
            if name == whole.main:
                self._tensor(part, at, place, path)
            else:
                self.value(part, at, "settings")
        self._own(whole.state, path, path)

    def _backed(self, backed: Backed, path: Path, place: Place) -> None:
        parts = backed.array.parts()
        assert parts is not None  # noqa: S101 - a Backed is made of none else
        assert parts.type.name is not None  # noqa: S101
        role, slot = _tensor_role(path, place)
        self.leaves[path] = Leaf(
            dtype=backed.dtype,
            shape=parts.shape,
            source=cast(array_source(parts), parts.type.name, parts.shape, backed.dtype),
            key=native(path),
            role=role,
            slot=slot,
            trainable=backed.requires_grad if backed.parameter else None,
        )
        self._own(backed.state, path, path)

    def _own(self, state: object, path: Path, named: Path) -> None:
        """Keep the attributes that were set on a tensor: plain ones aside, others as entries beside it."""
        if not state or id(state) in self._states:
            return
        self._states.add(id(state))
        if isinstance(state, tuple) and len(state) == 2:
            # torch/_utils.py, _set_obj_state: attributes, and those that have slots.
            state = {k: v for part in state if isinstance(part, dict) for k, v in part.items()}
        if not isinstance(state, dict):
            return
        self._owners += 1
        if self._owners > self._limits.pickle_depth:
            raise limits.exceeded("pickle_depth", "tensors are nested as attributes of tensors", self._owners)
        for name, child in state.items():
            if type(child) in PLAIN or not path:
                shown = child if type(child) in (type(None), bool, int, float, str) else _text(child)
                self.attributes.setdefault(native(named), {})[str(name)] = shown
            else:
                self.value(child, (*path[:-1], attr(f"{path[-1].value}.{name}")), "settings")
        self._owners -= 1

    def _use(self, storage: Storage, nbytes: int) -> bool:
        """Count what a tensor shows of its storage; say whether it is the first that does."""
        usage = self.usage.get(storage.key)
        self.usage[storage.key] = Usage(storage.nbytes, nbytes + (usage.used if usage else 0))
        return usage is None

    def _storage(self, storage: Storage, path: Path) -> None:
        dtype = storage.dtype or "uint8"
        count = storage.nbytes // dtypes.BY_NAME[dtype].itemsize
        self._tensor(Tensor(storage, dtype, 0, (count,), (1,)), path, "settings", path)

    def _array(self, array: Array, path: Path) -> None:
        parts = array.parts()
        if parts is not None and isinstance(parts.data, list):
            self.container(parts.data, path, "plain", Container("record", "numpy.ndarray"))
        elif parts is None or parts.type.name is None:
            shown = f"{parts.type.code}{list(parts.shape)}" if parts else ""
            self.leaves[path] = ValueLeaf(Record("numpy.ndarray", shown))
        elif not self._again_at(("array", id(array)), path):
            found = array_source(parts)
            self.leaves[path] = Leaf(parts.type.name, parts.shape, found, native(path), "other")


def _plainly(step: Key) -> Place:  # noqa: ARG001 - whatever the attribute
    return "plain"


def _in_script(step: Key, known: Members) -> Place:
    if step.value in known.parameters:
        return "parameters"
    if known.buffers is None or step.value in known.buffers:
        return "buffers"
    return "settings"


def _is_old_tensor(value: Object) -> bool:
    # torch/_tensor.py, __setstate__: "legacy serialization of Tensor", its storage, offset, size and stride.
    state, kind = value.state, value.function
    whole = type(state) is tuple and len(state) == 4 and isinstance(state[0], Storage)
    return whole and type(kind) is Global and kind.module.partition(".")[0] == "torch"


_STORAGES = frozenset(f"torch.{name}" for name in ("UntypedStorage", *dtypes.BY_STORAGE))
_TENSORS = frozenset(("torch.Tensor", *(name.replace("Storage", "Tensor") for name in _STORAGES)))


def _check_made(value: Object) -> None:
    """Raise UnsupportedError for a call of a storage's class, or of a tensor's with its numbers or size."""
    if value.name in _STORAGES:
        raise UnsupportedError(f"the pickle makes a {value.name} by its class")
    if value.name in _TENSORS and (value.args or value.kwargs or value.items or value.entries):
        raise UnsupportedError(f"the pickle makes a {value.name} from arguments")


def _old_tensor(value: Object) -> Tensor:
    state: Any = value.state
    storage, offset, shape, strides = state
    dtype = storage.dtype or "uint8"
    if value.args or value.kwargs or value.items or value.entries:
        raise FormatError("a tensor is made from arguments, or changed, beside its storage")
    name = value.name.rpartition(".")[2]
    row = dtypes.BY_STORAGE.get(name.replace("Tensor", "Storage") if name != "Tensor" else "FloatStorage")
    if row is not dtypes.BY_NAME[dtype]:
        raise FormatError("a tensor's class is not that of its storage", found=f"{name[:40]} of {dtype}")
    return view(storage, dtype, offset, shape, strides)


def _trained(tensor: Tensor) -> bool:
    # Before 0.4 BUILD gave a Variable (requires_grad, volatile, hooks), torch/autograd/variable.py.
    state = tensor.state
    if isinstance(state, tuple) and len(state) == 3:
        return state[0] is True
    return tensor.requires_grad


def _text(value: Any) -> str:
    return record(value).name if type(value) not in PLAIN else repr(value)[:200]


def _value_role(path: Path, place: Place) -> Role:
    return "counter" if place == "slots" and path[-1].value == "step" else "other"


def _tensor_role(path: Path, place: Place) -> tuple[Role, str | None]:
    if place == "slots":
        name = str(path[-1].value)
        return ("counter", None) if name == "step" else ("slot", name)
    if place == "settings":
        return "other", None
    return roles.by_name(path) or ("buffer" if place == "buffers" else "parameter"), None


class _Plain:
    """Makes containers' own states (OrderedDict's `_metadata`) plain data; what is not is left out."""

    def __init__(self, most: int) -> None:
        """Go through at most about `most` values: lists of lists may be shared, and are copied."""
        self.left = most

    def of(self, value: Any, depth: int = 8) -> Any:
        """Return the value as plain data, at most `depth` levels of it."""
        if isinstance(value, list | tuple | dict):
            self.left -= 1 + len(value)
        if depth and self.left > 0 and isinstance(value, Dict | dict):
            made: dict[Any, Any] = OrderedDict() if getattr(value, "name", "").endswith("OrderedDict") else {}
            made.update((k, self.of(v, depth - 1)) for k, v in value.items() if type(k) in PLAIN)
            return made
        if depth and self.left > 0 and type(value) in (list, tuple):
            return type(value)(self.of(item, depth - 1) for item in value)
        return value if type(value) in PLAIN else None
