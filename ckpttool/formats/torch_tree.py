"""Trees of PyTorch checkpoints: modules, optimizers, owners."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeGuard

from ckpttool.core import deferred, dtypes, limits
from ckpttool.core.checkpoint import Integrity
from ckpttool.core.deferred import NamedTuple, dataclass, field
from ckpttool.core.errors import FormatError, UnsupportedError, abbreviate_list
from ckpttool.core.tree import (
    Container,
    Leaf,
    Path,
    PathStep,
    Record,
    Role,
    Tree,
    ValueLeaf,
    attr,
    display,
    key,
)
from ckpttool.encodings.archives import UTF8, ZipMember
from ckpttool.encodings.pickle_reader import PickleContents
from ckpttool.encodings.pickle_values import Array, Dict, Global, PickleObject
from ckpttool.formats import name_roles
from ckpttool.formats.file_listing import FileListing
from ckpttool.formats.pickles import PLAIN, Below, PickleTraversal, Via, inert_record
from ckpttool.formats.torch_tensors import (
    ArrayBackedTensor,
    CompositeTensor,
    ExpansionBudget,
    Size,
    Storage,
    Tensor,
    array_source,
    build_view,
    cast_source,
)

# A moment with another shape than its parameter (Adafactor's rows and columns) is no evidence.
_ALIKE = frozenset(
    ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg")
) | {"acc_delta", "sum", "prev", "step_size", "ax"}
_STATE, _GROUPS, _PARAMS, _NAMES = key("state"), key("param_groups"), key("params"), key("param_names")
_FLAT = "state."  # distributed ones can be a single dict of names such as `state.l1.weight.exp_avg`
# Every optimizer is compared with every network; a checkpoint with more networks is left unchanged.
_MOST = 64


class OwnedTree(NamedTuple):
    """A tree whose slots name their parameters where these are certain, and notes for the user."""

    tree: Tree
    notes: tuple[str, ...]


@dataclass(slots=True)
class _OptimizerState:
    """One optimizer's state_dict.

    `slots` are by number, or by name, in `state`; `numbers` are those of all `groups`, in order.
    """

    slots: dict[str, dict[Path, Leaf]] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    groups: set[PathStep] = field(default_factory=set)

    def named(self) -> Mapping[str, str] | None:
        """Return the parameters' names by their keys in the state, None if incomplete."""
        if not any(step.isdigit() for step in self.slots):
            return {step: step for step in self.slots}
        if not self.names or len(self.names) != len(self.numbers) or not self.slots.keys() <= {*self.numbers}:
            return None
        fields = dict(zip(self.numbers, self.names, strict=True))
        return {step: fields[step] for step in self.slots}


def assign_slot_owners(tree: Tree) -> OwnedTree:
    """Return the tree with `Leaf.of` for every slot whose parameter is identified by name or by order.

    Order is used only for an optimizer with a single group, if exactly one network has the same number of
    parameters, with the shapes of the slots. torch numbers the parameters of an optimizer through its groups,
    in the order in which they were passed to it; `module.parameters()` has the order of the module's
    state_dict without its buffers (torch/optim/optimizer.py, state_dict(); torch/nn/modules/module.py,
    _save_to_state_dict). Optimizers created from `named_parameters()` store names in `param_names` (since
    torch 2.6), distributed ones use names instead of numbers (torch/distributed/checkpoint/state_dict.py).
    """
    optimizers = _find_optimizer_states(tree)
    if not optimizers or len(optimizers) > _MOST:
        return OwnedTree(tree, ())
    networks = _find_networks(tree, optimizers.keys())
    leaves, notes = dict(tree.items()), []
    for top, optimizer in optimizers.items() if len(networks) <= _MOST else ():
        owner = _find_network(tree, optimizer, networks)
        if owner is None:
            continue
        network, order, how = owner
        for step, slots in optimizer.slots.items():
            leaves |= {path: replace(leaf, of=order[step]) for path, leaf in slots.items()}
        mine, network_name = display(top) or "the optimizer", display(network) or "the weights"
        notes.append(f"{mine}: optimizer state matched to {network_name} by parameter {how}")
    return OwnedTree(Tree(leaves, tree.aliases, tree.containers) if notes else tree, tuple(notes))


def _find_network(
    tree: Tree, optimizer: _OptimizerState, networks: Mapping[Path, Mapping[str, Path]]
) -> tuple[Path, Mapping[str, Path], str] | None:
    """Return the only network that matches, its parameters by their keys in the state, and the evidence."""
    names = optimizer.named()
    sure = []
    for top, parameters in networks.items():
        order: dict[str, Path] | None = None
        if names is not None:
            if parameters.keys() >= set(names.values()):
                order = {step: parameters[name] for step, name in names.items()}
        elif len(optimizer.groups) == 1 and len(parameters) == len(optimizer.numbers):
            order = dict(zip(optimizer.numbers, parameters.values(), strict=True))
        if order is not None and _shapes_agree(tree, optimizer, order):
            sure.append((top, order, "order and shapes" if names is None else "names"))
    return sure[0] if len(sure) == 1 else None


def _shapes_agree(tree: Tree, optimizer: _OptimizerState, order: Mapping[str, Path]) -> bool:
    """Return whether there are slots that must have their parameter's shape, and all of them do."""
    if not optimizer.slots.keys() <= order.keys():
        return False
    pairs = [
        (leaf.shape, owner.shape)
        for step, slots in optimizer.slots.items()
        for leaf in slots.values()
        if leaf.slot in _ALIKE and isinstance(owner := tree[order[step]], Leaf)
    ]
    return bool(pairs) and all(one == other for one, other in pairs)


def _find_optimizer_states(tree: Tree) -> dict[Path, _OptimizerState]:
    """Return the optimizers that have slots, by path; each leaf is visited once."""
    states: dict[Path, _OptimizerState] = {}
    for path, leaf in tree.tensors():
        if leaf.slot is None:
            continue
        last = str(path[-1].value)
        if len(path) > 2 and path[-3] == _STATE:
            top, owner = path[:-3], str(path[-2].value)
        elif last.startswith(_FLAT) and last.endswith(f".{leaf.slot}"):
            top, owner = path[:-1], last[len(_FLAT) : -len(leaf.slot) - 1]
        else:
            continue
        states.setdefault(top, _OptimizerState()).slots.setdefault(owner, {})[path] = leaf
    for path, value in tree.plain() if states else ():
        # `param_groups`, a group, `params` or `param_names`, a position.
        if len(path) < 4 or path[-4] != _GROUPS or path[:-4] not in states:
            continue
        optimizer = states[path[:-4]]
        if path[-2] == _PARAMS:
            optimizer.groups.add(path[-3])
            optimizer.numbers.append(str(value.value))
        elif path[-2] == _NAMES and isinstance(value.value, str):
            optimizer.names.append(value.value)
    return states


def _find_networks(tree: Tree, optimizers: Collection[Path]) -> dict[Path, dict[str, Path]]:
    """Return the parameters by name of every dict that contains tensors by name, except optimizers."""
    networks: dict[Path, dict[str, Path]] = {}
    depths = {len(top) for top in optimizers}
    for path, leaf in tree.tensors():
        if leaf.role != "parameter" or not path or path[-1].kind != "key":
            continue
        if isinstance(path[-1].value, str) and not any(path[:n] in optimizers for n in depths):
            networks.setdefault(path[:-1], {})[path[-1].value] = path
    return networks


def is_state_dict(value: dict[Any, Any]) -> bool:
    """Return whether the dict has the form of an optimizer's state_dict()."""
    if value.keys() != {"state", "param_groups"}:
        return False
    state, groups = value["state"], value["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    return all(type(k) is int and isinstance(v, dict) for k, v in state.items())


def is_object(state: object) -> TypeGuard[dict[str, Any]]:
    """Return whether these are the attributes of an optimizer that was pickled as an object."""
    if type(state) is not dict or not state.keys() >= {"state", "param_groups"}:
        return False
    return isinstance(state["state"], dict) and isinstance(state["param_groups"], list)


def number_slots(state: dict[str, Any]) -> dict[Any, Any]:
    """Return such an object's slots by the parameter numbers that state_dict() would assign.

    Return them unchanged if they belong to other parameters than those in the groups. Source:
    torch/optim/optimizer.py (state_dict, __getstate__): a state_dict numbers parameters through all groups;
    in the object itself the parameters are the keys of the slots.
    """
    slots: dict[Any, Any] = state["state"]
    if type(next(iter(slots), None)) is not Tensor:
        return slots
    groups = [group.get("params") for group in state["param_groups"] if isinstance(group, dict)]
    order = (parameter for group in groups if isinstance(group, list) for parameter in group)
    numbers = {id(parameter): number for number, parameter in enumerate(order)}
    if not all(id(slot) in numbers for slot in slots):
        return slots
    numbered: dict[Any, Any] = Dict(slots.name) if isinstance(slots, Dict) else {}
    numbered.update((numbers[id(parameter)], value) for parameter, value in slots.items())
    return numbered


_GENERATOR = "torch._C.Generator"

# Context of a value in an optimizer's state_dict, or in a module; it determines roles.
Place = Literal["plain", "state", "slots", "settings", "buffers", "parameters"]

# Attributes in which torch.nn.Module stores its tensors; names in a state_dict omit these steps.
_MODULE: dict[object, Place] = {"_parameters": "plain", "_buffers": "buffers", "_modules": "plain"}


class ClassMembers(NamedTuple):
    """Attributes of a class that are parameters, and those that are buffers (None: unknown)."""

    parameters: frozenset[str]
    buffers: frozenset[str] | None


class StorageUsage(NamedTuple):
    """Number of bytes in a storage, and number of those that tensors use."""

    stored: int
    used: int


def native_name(path: Path) -> str:
    """Return the dotted name as torch lists it: `l1.weight`, `state.0.exp_avg`."""
    if len(path) == 1:
        return str(path[0].value)
    return ".".join([str(value) for kind, value in path if kind != "attr" or value not in _MODULE])


class TorchWalk(PickleTraversal[Place]):
    """Visitor that walks the values of a pickle once and builds the tree."""

    whole = "checkpoint"

    def __init__(self, *, big: bool, size: int, classes: Mapping[str, ClassMembers] | None = None) -> None:
        """Treat storages as big-endian if `big`; `size` is the pickle's size in bytes.

        `classes` are the classes whose attributes the file describes. `attributes` will contain, by the
        native names of tensors, the plain values that the file sets on them.
        """
        super().__init__(size)
        self.big = big
        self.usage: dict[str, StorageUsage] = {}
        self._budget = ExpansionBudget()
        self._plain = _PlainStates(self.left)
        self._owners = 0
        self.attributes: dict[str, dict[str, Any]] = {}
        self._classes = classes or {}
        self._states: set[int] = set()
        self._first: dict[object, Path] = {}
        self._views: dict[str, tuple[object, Path]] = {}

    def tree(self, value: Any) -> Tree:
        """Return the tree of a pickle's value."""
        self.value(value, (), "plain")
        return Tree(self.leaves, self.aliases, self.containers)

    def native(self, path: Path) -> str:
        """Return the dotted name as torch lists it."""
        return native_name(path)

    def kind(self, value: Any) -> Container:
        """Return the container's kind; torch.Size and the attributes of an OrderedDict are kept."""
        if isinstance(value, Size):
            return Container("tuple", "torch.Size")
        kind = super().kind(value)
        return kind._replace(state=self._plain.of(value.state)) if kind.kind == "OrderedDict" else kind

    def below(self, value: Any, context: Place) -> Below[Place]:
        """Return the context of entries: in an optimizer's state_dict, among a module's buffers."""
        is_object = isinstance(value, PickleObject)
        attribute = self._attributes(value) if is_object else _plain_place
        entries = (value.entries or {}) if is_object else value
        optimizer = isinstance(entries, dict) and is_state_dict(entries)
        made_of: Place = "settings" if is_object and value.name == _GENERATOR else "plain"
        items: Place = "settings" if context in ("settings", "slots") and not is_object else made_of
        others: Place = "plain" if is_object else "slots" if context == "state" else context

        def standing(step: PathStep, via: Via) -> Place:
            if via == "entry":
                return others if not optimizer else "state" if step.value == "state" else "settings"
            return attribute(step) if via == "attr" else items

        return standing

    def container(self, value: Any, path: Path, context: Place, kind: Container | None = None) -> None:
        """Add a dict, a list, a tuple or an inert object; number an optimizer's slots."""
        if type(value) is PickleObject:
            _check_made(value)
        if type(value) is PickleObject and is_object(value.state):
            value.state["state"] = number_slots(value.state)
        super().container(value, path, context, kind)

    def _attributes(self, value: PickleObject) -> Callable[[PathStep], Place]:
        """Return the context of an object's attributes; those of a module are of three kinds."""
        known = self._classes.get(value.name)
        if known is not None:
            return lambda step: _script_place(step, known)
        if is_object(value.state):
            return lambda step: "state" if step.value == "state" else "plain"
        if isinstance(value.state, dict) and "_parameters" in value.state:
            # torch.nn.Module.__setattr__ stores everything that a state_dict lists in these three.
            return lambda step: _MODULE.get(step.value, "settings")
        return lambda step: "buffers" if step.value == "_buffers" else "plain"

    def value(self, value: Any, path: Path, context: Place) -> None:
        """Add the value at the path."""
        self.require_free(path)
        kind = type(value)
        if kind is Tensor:
            self._tensor(value, path, context, path)
        elif kind is CompositeTensor:
            self._parts(value, path, context)
        elif kind is ArrayBackedTensor:
            self._backed(value, path, context)
        elif kind is Record:
            self.leaves[path] = ValueLeaf(value)
        elif kind in PLAIN:
            self.leaves[path] = ValueLeaf(value, _value_role(path, context))
        elif kind is Array:
            self._array(value, path)
        elif kind is Storage:
            self._storage(value, path)
        elif kind is PickleObject and _is_old_tensor(value):
            self._tensor(_build_old_tensor(value), path, context, path)
        elif isinstance(value, dict | list | tuple | PickleObject) and kind is not Global:
            self.container(value, path, context)
        else:
            self.leaves[path] = ValueLeaf(inert_record(value))

    def _tensor(self, tensor: Tensor, path: Path, context: Place, named: Path) -> None:
        """Add the tensor; `named` is the path that determines its name and role (its own, or the whole's)."""
        row = dtypes.BY_NAME.get(tensor.dtype)
        if row is None or not row.itemsize or tensor.dtype in dtypes.PACKED:
            shape = ", ".join(map(str, tensor.shape))
            shown = f"{tensor.dtype.removeprefix('torch.')}[{shape}]"
            self.leaves[path] = ValueLeaf(Record("torch.Tensor", shown))
            return
        count = tensor.count
        if count and self._is_known_view(tensor, path, named):
            return
        nbytes = count * row.itemsize
        first = self._use(tensor.storage, nbytes)
        role, slot = _tensor_role(named, context)
        self.leaves[path] = Leaf(
            dtype=tensor.dtype,
            shape=tensor.shape,
            source=self._budget.source(tensor, nbytes, big=self.big, first=first),
            key=native_name(named),
            role=role,
            slot=slot,
            trainable=_is_trainable(tensor) if tensor.parameter or context == "parameters" else None,
        )
        self._own(tensor.state, path, named)

    def _is_known_view(self, tensor: Tensor, path: Path, named: Path) -> bool:
        """Return whether another tensor reads the same memory in the same way; the path is then an alias."""
        view, known = self._views.setdefault(tensor.storage.key, (tensor.view, path))
        if known is path:
            return False
        if view == tensor.view:
            self.alias(known, path, native_name(named))
            return True
        # As text, whose hash is randomised: a file could choose strides that collide.
        return self._again_at(f"{tensor.view} {tensor.storage.key}", path, named)

    def _again_at(self, what: object, path: Path, named: Path | None = None) -> bool:
        """Return whether the value is already at another path; then the path becomes an alias."""
        first = self._first.setdefault(what, path)
        if first is path:
            return False
        self.alias(first, path, native_name(named or path))
        return True

    def _parts(self, whole: CompositeTensor, path: Path, context: Place) -> None:
        """Add the parts under the path; the one with the elements has the name of the whole."""
        self.containers[path] = Container("record", whole.kind)
        for name, part in whole.parts.items():
            at = (*path, attr(name))
            if name == whole.main:
                self._tensor(part, at, context, path)
            else:
                self.value(part, at, "settings")
        self._own(whole.state, path, path)

    def _backed(self, backed: ArrayBackedTensor, path: Path, context: Place) -> None:
        parts = backed.array.parts()
        assert parts is not None  # noqa: S101 - a Backed is made of none else
        assert parts.type.name is not None  # noqa: S101
        role, slot = _tensor_role(path, context)
        self.leaves[path] = Leaf(
            dtype=backed.dtype,
            shape=parts.shape,
            source=cast_source(array_source(parts), parts.type.name, parts.shape, backed.dtype),
            key=native_name(path),
            role=role,
            slot=slot,
            trainable=backed.requires_grad if backed.parameter else None,
        )
        self._own(backed.state, path, path)

    def _own(self, state: object, path: Path, named: Path) -> None:
        """Keep the attributes set on a tensor: plain ones separately, others as entries beside it."""
        if not state or id(state) in self._states:
            return
        self._states.add(id(state))
        if isinstance(state, tuple) and len(state) == 2:
            # torch/_utils.py, _set_obj_state: attributes, and a dict of slots.
            state = {k: v for part in state if isinstance(part, dict) for k, v in part.items()}
        if not isinstance(state, dict):
            return
        self._owners += 1
        if self._owners > self._limits.pickle_depth:
            raise limits.limit_error(
                "pickle_depth", "tensors are nested as attributes of tensors", self._owners
            )
        for name, child in state.items():
            if type(child) in PLAIN or not path:
                shown = child if type(child) in (type(None), bool, int, float, str) else _text(child)
                self.attributes.setdefault(native_name(named), {})[str(name)] = shown
            else:
                self.value(child, (*path[:-1], attr(f"{path[-1].value}.{name}")), "settings")
        self._owners -= 1

    def _use(self, storage: Storage, nbytes: int) -> bool:
        """Count the bytes of the storage that a tensor uses; return whether it is the first to use it."""
        usage = self.usage.get(storage.key)
        self.usage[storage.key] = StorageUsage(storage.nbytes, nbytes + (usage.used if usage else 0))
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
            source = array_source(parts)
            self.leaves[path] = Leaf(parts.type.name, parts.shape, source, native_name(path), "other")


def _plain_place(step: PathStep) -> Place:  # noqa: ARG001 - whatever the attribute
    return "plain"


def _script_place(step: PathStep, known: ClassMembers) -> Place:
    if step.value in known.parameters:
        return "parameters"
    if known.buffers is None or step.value in known.buffers:
        return "buffers"
    return "settings"


def _is_old_tensor(value: PickleObject) -> bool:
    # torch/_tensor.py, __setstate__: "legacy serialization of Tensor", its storage, offset, size and stride.
    state, kind = value.state, value.function
    whole = type(state) is tuple and len(state) == 4 and isinstance(state[0], Storage)
    return whole and type(kind) is Global and kind.module.partition(".")[0] == "torch"


_STORAGES = frozenset(f"torch.{name}" for name in ("UntypedStorage", *dtypes.BY_STORAGE))
_TENSORS = frozenset(("torch.Tensor", *(name.replace("Storage", "Tensor") for name in _STORAGES)))


def _check_made(value: PickleObject) -> None:
    """Raise UnsupportedError for a call of a storage class, or of a tensor class with numbers or a size."""
    if value.name in _STORAGES:
        raise UnsupportedError(f"the pickle calls the class {value.name}")
    if value.name in _TENSORS and (value.args or value.kwargs or value.items or value.entries):
        raise UnsupportedError(f"the pickle calls {value.name} with arguments")


def _build_old_tensor(value: PickleObject) -> Tensor:
    state: Any = value.state
    storage, offset, shape, strides = state
    dtype = storage.dtype or "uint8"
    if value.args or value.kwargs or value.items or value.entries:
        raise FormatError("a tensor is built from arguments, or changed, in addition to its storage")
    name = value.name.rpartition(".")[2]
    row = dtypes.BY_STORAGE.get(name.replace("Tensor", "Storage") if name != "Tensor" else "FloatStorage")
    if row is not dtypes.BY_NAME[dtype]:
        raise FormatError("a tensor's class does not match its storage", found=f"{name[:40]} of {dtype}")
    return build_view(storage, dtype, offset, shape, strides)


def _is_trainable(tensor: Tensor) -> bool:
    # Before 0.4, BUILD set (requires_grad, volatile, hooks) on a Variable, torch/autograd/variable.py.
    state = tensor.state
    if isinstance(state, tuple) and len(state) == 3:
        return state[0] is True
    return tensor.requires_grad


def _text(value: Any) -> str:
    return inert_record(value).name if type(value) not in PLAIN else repr(value)[:200]


def _value_role(path: Path, context: Place) -> Role:
    return "counter" if context == "slots" and path[-1].value == "step" else "other"


def _tensor_role(path: Path, context: Place) -> tuple[Role, str | None]:
    if context == "slots":
        name = str(path[-1].value)
        return ("counter", None) if name == "step" else ("slot", name)
    if context == "settings":
        return "other", None
    return name_roles.role_by_module_name(path) or ("buffer" if context == "buffers" else "parameter"), None


class _PlainStates:
    """Converter of containers' own states (OrderedDict's `_metadata`) to plain data, omitting the rest."""

    def __init__(self, most: int) -> None:
        """Visit at most about `most` values: lists of lists may be shared, and are copied."""
        self.left = most

    def of(self, value: Any, depth: int = 8) -> Any:
        """Return the value as plain data, down to at most `depth` levels."""
        if isinstance(value, list | tuple | dict):
            self.left -= 1 + len(value)
        if depth and self.left > 0 and isinstance(value, Dict | dict):
            plain: dict[Any, Any] = (
                OrderedDict() if getattr(value, "name", "").endswith("OrderedDict") else {}
            )
            plain.update((k, self.of(v, depth - 1)) for k, v in value.items() if type(k) in PLAIN)
            return plain
        if depth and self.left > 0 and type(value) in (list, tuple):
            return type(value)(self.of(item, depth - 1) for item in value)
        return value if type(value) in PLAIN else None


def list_pickle(
    pickled: PickleContents,
    writer: str,
    *,
    big: bool = False,
    integrity: Integrity = "none",
    notes: tuple[str, ...] = (),
    details: Mapping[str, Any] | None = None,
    classes: Mapping[str, ClassMembers] | None = None,
) -> FileListing:
    """Return the tree of a pickle whose storages have been located, with notes for the user.

    Args:
        pickled: the pickle's value and names.
        writer: the program that wrote the file.
        big: storages are big-endian.
        integrity: which checksums the file has.
        notes: sentences about the file, after those about the tree.
        details: facts about the file for the listing.
        classes: parameters and buffers of some classes.
    """
    walk = TorchWalk(big=big, size=pickled.end, classes=classes)
    owned = assign_slot_owners(walk.tree(pickled.value))
    all_notes = (*_notes(walk), *owned.notes, *notes)
    facts = dict(details or {})
    if walk.attributes:
        facts["attributes"] = walk.attributes
    return FileListing(owned.tree, writer, integrity, all_notes, facts, pickled.code_references)


def _notes(walk: TorchWalk) -> tuple[str, ...]:
    notes = []
    kept = [u for u in walk.usage.values() if u.used < u.stored]
    if kept:
        total = StorageUsage(sum(u.stored for u in kept), sum(u.used for u in kept))
        what = "a view keeps a larger storage" if len(kept) == 1 else "views keep larger storages"
        notes.append(f"{what}: {total.stored:,} bytes stored, {total.used:,} used")
    if walk.attributes:
        notes.append(f"tensors with extra attributes (listed by --json): {len(walk.attributes):,}")
    return tuple(notes)


_PICKLE = deferred.compile(r"[^/]+/data\.pkl")
# Members that torch writes beside the storages, and those of TorchScript; code and extra files are listed
# separately (torch_zip.py).
_BESIDE = deferred.compile(
    r"data\.pkl|version|byteorder|\.(?:data/(?:version|serialization_id)|format_version|storage_alignment)"
)
_SCRIPTED = deferred.compile(
    r"(?:constants|bytecode|attributes|mobile_debug_handles)\.pkl|(?:code|extra)/.*", re.DOTALL
)
_SOURCE = ("code/", "extra/")
_SHOWN, _LONG = 3, 60


def find_top_folder(members: Mapping[str, object], file: str) -> str:
    """Return the folder that contains data.pkl; raise FormatError unless torch opens the same one.

    Source: caffe2/serialize/inline_container.cc (PyTorchStreamReader): the first member's folder is the
    archive's, and member lookup ignores case (miniz, mz_zip_reader_locate_file).
    """
    pickles = [name for name in members if _PICKLE.fullmatch(name)]
    if len(pickles) != 1:
        raise FormatError(
            "expected exactly one data.pkl in the archive",
            file=file,
            found=", ".join(map(_printable_name, pickles[:_SHOWN])) or "none",
        )
    folder = pickles[0].removesuffix("/data.pkl")
    first = next(iter(members)).partition("/")[0]
    if first != folder:
        raise FormatError(
            "the archive does not begin with the folder that contains data.pkl",
            file=file,
            expected=_printable_name(folder),
            found=_printable_name(first),
        )
    for name, member in members.items():
        if isinstance(member, ZipMember) and not name.isascii() and not member.flags & UTF8:
            # miniz and torch read the name's bytes as UTF-8 whatever the flag.
            raise FormatError(
                "a member's name is not marked as UTF-8", file=file, found=_printable_name(name)
            )
    _require_one_case(members, folder, file)
    return folder


# Names that torch looks up, ignoring case.
_WANTED = (
    "data.pkl constants.pkl bytecode.pkl model.json byteorder version .data/version .format_version "
    ".storage_alignment"
)


def _require_one_case(members: Collection[str], folder: str, file: str) -> None:
    exact_names = {f"{folder}/{name}".lower(): f"{folder}/{name}" for name in _WANTED.split()}
    for name in members:
        exact = exact_names.get(name.lower(), name)
        if exact != name:
            raise FormatError(
                "a member's name differs only in case from a name that torch looks up",
                file=file,
                expected=_printable_name(exact),
                found=_printable_name(name),
            )
    source = tuple(f"{folder}/{name}" for name in _SOURCE)
    names: dict[str, str] = {}
    for name in members:
        other = names.setdefault(name.lower(), name)
        if other is not name and not name.startswith(source):
            raise FormatError(
                "two members' names differ only in case, which torch ignores",
                file=file,
                found=f"{_printable_name(other)} and {_printable_name(name)}",
            )


def description_members(members: Iterable[str], folder: str) -> list[str]:
    """Return torch's records of how it wrote the file: small members that no pickle references."""
    marks = (f"{folder}/version", f"{folder}/byteorder", f"{folder}/.")
    return [name for name in members if name.startswith(marks)]


def note_unused_members(members: Collection[str], folder: str, used: Collection[str]) -> tuple[str, ...]:
    """Return a note on unreferenced members, if there are any."""
    start = f"{folder}/"
    known = (_BESIDE, _SCRIPTED) if f"{folder}/constants.pkl" in members else (_BESIDE,)
    unread = [
        name
        for name in members
        if name not in used
        and not name.endswith("/")
        and not (name.startswith(start) and any(pattern.fullmatch(name, len(start)) for pattern in known))
    ]
    if not unread:
        return ()
    shown = abbreviate_list([*map(_printable_name, unread[:_SHOWN]), *unread[_SHOWN:]], _SHOWN)
    return (f"members not referenced by the checkpoint, not read: {shown}",)


def _printable_name(name: str) -> str:
    return repr(name) if len(name) <= _LONG else f"{name[:_LONG]!r}..."
