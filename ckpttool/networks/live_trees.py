"""Read live models as trees."""

from __future__ import annotations

import array
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from dataclasses import replace
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import UnsupportedError, UsageError
from ckpttool.core.optimizers import KERAS_LISTS, RMSPROP_LISTS
from ckpttool.core.source import Inline, Shape
from ckpttool.core.tree import (
    Alias,
    Container,
    Leaf,
    Path,
    PathStep,
    Record,
    Role,
    Tree,
    ValueLeaf,
    attr,
    index,
    key,
)
from ckpttool.formats.tf_object_graph import slot_path
from ckpttool.networks.model_child import class_bases, is_tf_module, model_framework

FRAMEWORKS = frozenset(
    ("tensorflow", "tensorflow_core", "keras", "tf_keras", "torch", "jax", "jaxlib", "numpy", "wrapt")
)
_TENSORFLOW = ("tensorflow", "tensorflow_core")
_KERAS = ("keras", "tf_keras")
_VARIABLES = frozenset(
    [(top, "Variable") for top in (*_TENSORFLOW, "keras")]
    + [("keras", "KerasVariable"), ("torch", "Parameter"), ("torch", "Buffer")]
)
_TENSORS = _VARIABLES | {
    *((top, "EagerTensor") for top in _TENSORFLOW),
    ("torch", "Tensor"),
    ("jaxlib", "ArrayImpl"),
}
_OPTIMIZERS = frozenset(
    (top, name)
    for top in (*_KERAS, *_TENSORFLOW)
    for name in ("BaseOptimizer", "Optimizer", "OptimizerV2", "_BaseOptimizer")
)
# Objects with variables that are not modules: tf.train.Checkpoint is an AutoTrackable.
_HOLDERS = (
    _OPTIMIZERS
    | {(top, name) for top in _TENSORFLOW for name in ("Module", "AutoTrackable")}
    | {(top, name) for top in _KERAS for name in ("Metric", "SeedGenerator", "Layer")}
    | {("torch", name) for name in ("Module", "Optimizer")}
)


def package_of(value: object) -> str:
    """Return the package of the object's class."""
    return str(type(value).__module__).partition(".")[0]


def is_torch_instance(value: object, name: str) -> bool:
    """Return whether a base class of the object has this name and is torch's."""
    return ("torch", name) in class_bases(value)


def is_variable(value: object) -> bool:
    """Return whether the object is a TensorFlow or Keras variable, or a PyTorch Parameter or Buffer."""
    return not class_bases(value).isdisjoint(_VARIABLES)


def is_tensor(value: object) -> bool:
    """Return whether the object is a variable or other framework tensor that has a value now."""
    return not class_bases(value).isdisjoint(_TENSORS)


def is_array(value: object) -> bool:
    """Return whether the object is a NumPy array."""
    return ("numpy", "ndarray") in class_bases(value)


def is_torch_module(value: object) -> bool:
    """Return whether the object is a torch.nn.Module."""
    return is_torch_instance(value, "Module")


def is_torch_optimizer(value: object) -> bool:
    """Return whether the object is a PyTorch optimizer."""
    return is_torch_instance(value, "Optimizer")


def is_keras_optimizer(value: object) -> bool:
    """Return whether the object is a Keras or TensorFlow optimizer."""
    return not class_bases(value).isdisjoint(_OPTIMIZERS)


def holds_variables(value: object) -> bool:
    """Return whether the object is a module, an optimizer, a metric or another trackable object."""
    return not class_bases(value).isdisjoint(_HOLDERS)


def is_trackable(value: object) -> bool:
    """Return whether tf.train.Checkpoint can save the object (tensorflow/python/trackable/base.py)."""
    return any((name, "Trackable") in class_bases(value) for name in _TENSORFLOW)


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the object's own attributes without evaluating properties: `vars`, as in tf.Module."""
    attributes = getattr(value, "__dict__", None)
    return attributes if isinstance(attributes, dict) else {}


def unwrap_variable(variable: Any) -> Any:
    """Return the tensor in a Keras 3 variable, or the object itself.

    Source: keras/src/backend/common/variables.py.
    """
    if {("keras", "Variable"), ("keras", "KerasVariable")} & class_bases(variable):
        return own_attributes(variable).get("_value")
    return variable


_ATOMS = (str, bytes, bytearray, memoryview, range, array.array)
Items = Iterator[tuple[PathStep, Any]]


def is_nested(value: Any) -> bool:
    """Return whether tf.nest would enter the value."""
    # TensorFlow wraps dicts and tuples in proxies of one class, which report the wrapped class.
    kind: Any = type(value)
    return _is_container(value.__class__) or _is_flattened(kind)


@functools.lru_cache(maxsize=4096)
def _is_container(kind: Any) -> bool:
    return issubclass(kind, Sequence | Mapping | MappingView) and not issubclass(kind, _ATOMS)


@functools.lru_cache(maxsize=4096)
def _is_flattened(kind: Any) -> bool:
    return hasattr(kind, "__attrs_attrs__") or (
        hasattr(kind, "__tf_flatten__") and hasattr(kind, "__tf_unflatten__")
    )


def nest_items(value: Any) -> Items:
    """Yield a container's entries, each with its step.

    Source: tensorflow/python/util/nest_util.py (_tf_core_yield_sorted_items). Sets are not containers there.
    Two differences: a dict with unsortable keys keeps its order, where TensorFlow raises an error, and a
    `range` or a buffer of numbers is one value.
    """
    if type(value) is list:
        yield from _indexed_items(value)
    elif isinstance(value, Mapping):
        yield from _dict_items(value)
    elif hasattr(type(value), "__attrs_attrs__"):
        yield from ((attr(field.name), getattr(value, field.name)) for field in type(value).__attrs_attrs__)
    elif isinstance(value, tuple) and isinstance(getattr(value, "_fields", None), tuple):
        names: tuple[str, ...] = getattr(value, "_fields")  # noqa: B009 - of a named tuple, unknown to the types
        yield from ((attr(name), getattr(value, name)) for name in names)
    elif hasattr(type(value), "__tf_flatten__"):
        yield from _indexed_items(value.__tf_flatten__()[1])
    else:
        yield from _indexed_items(value)


def _dict_items(value: Mapping[Any, Any]) -> Items:
    try:
        names = sorted(value)
    except TypeError:
        names = list(value)
    for number, name in enumerate(names):
        yield entry_key(name, number), value[name]


def entry_key(name: object, number: int) -> PathStep:
    """Return the step to a dict entry; a key that is not a plain value becomes class and number."""
    if name is None or isinstance(name, str | int | float | bool):
        return key(name)
    if isinstance(name, tuple) and all(part is None or isinstance(part, str | int | float) for part in name):
        return key(repr(name))
    return key(f"<{type(name).__name__} {number}>")


def _indexed_items(value: Any) -> Items:
    for number, item in enumerate(value):
        yield index(number), item


def nest_leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the values in nested containers; a container inside itself is not entered again."""
    if not is_nested(value):
        yield path, value
        return
    open_: list[tuple[Path, int, Items]] = [(path, id(value), nest_items(value))]
    inside = {id(value)}
    while open_:
        here, number, rest = open_[-1]
        entry = next(rest, None)
        if entry is None:
            open_.pop()
            inside.discard(number)
            continue
        location, item = (*here, entry[0]), entry[1]
        if not is_nested(item):
            yield location, item
        elif id(item) not in inside:
            inside.add(id(item))
            open_.append((location, id(item), nest_items(item)))


def visit_once(
    roots: Sequence[tuple[Path, Any]], below: Callable[[Path, Any], Iterable[tuple[PathStep, Any]]]
) -> Iterator[tuple[Path, Any]]:
    """Yield every object once by its first path, depth first; `below` returns what an object leads to."""
    visited: dict[int, Any] = {}  # keeps the objects: the id of a deleted one may be reused
    waiting = [*reversed(roots)]
    while waiting:
        path, value = waiting.pop()
        if id(value) not in visited:
            visited[id(value)] = value
            yield path, value
            waiting += reversed([((*path, step), child) for step, child in below(path, value)])


# Objects that reference each other can have an intractable number of paths. After this many values only new
# objects are entered: each variable keeps its first path and loses further ones.
MOST = 200_000

Predicate = Callable[[Any], bool]
SortKey = Callable[[str], Any]

_IGNORED = frozenset(("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names"))
# Attributes in which Keras 3 duplicates other attributes, or that are not part of the network
# (keras/src/layers/layer.py, models/functional.py, trainers/trainer.py, optimizers/base_optimizer.py): they
# are visited last, in this order, so that the user's attribute names a variable.
_SECOND = (
    "_layers",
    "_operations",
    "_functional",
    "_seed_generators",
    "_trainable_variables",
    "_non_trainable_variables",
    "_variables",
    "_loss_tracker",
    "_metrics",
    "_compile_metrics",
    "optimizer",
)
_LATER = {name: number for number, name in enumerate(_SECOND, start=1)}
_KERAS_IGNORED = _IGNORED | {"_operations_by_depth", "_tracker", "_inputs", "_outputs"}
_LISTS = ("Sequential", "ModuleList", "ParameterList")
_DICTS = ("ModuleDict", "ParameterDict")


class LiveValue(NamedTuple):
    """Visited value: its path, and the object with the attribute that contains it."""

    path: Path
    value: Any
    owner: Any


def visit_paths(
    root: Any,
    own: Callable[[LiveValue], Iterable[LiveValue]],
    enter: Predicate = lambda _: True,
    most: int = MOST,
    *,
    repeated: bool = False,
) -> Iterator[LiveValue]:
    """Yield the values that `own` returns of the root and of every object that may be entered, by every path.

    Args:
        root: the object at the top.
        own: returns an object's values.
        enter: whether an object's own values are visited.
        most: the number of values after which only new objects are entered.
        repeated: of an object inside itself, yield the own values once more.
    """
    left, above = most, set[int]()
    entered: dict[int, Any] = {}  # keeps the objects: the id of a deleted one may be reused
    # A number marks the end of an object's descendants.
    waiting: list[LiveValue | int] = [LiveValue((), root, root)]
    while waiting:
        visit = waiting.pop()
        if isinstance(visit, int):
            above.discard(visit)
            continue
        number = id(visit.value)
        inside = number in above
        if (inside and not repeated) or (left < 0 and number in entered):
            continue
        entered[number] = visit.value
        below: list[LiveValue] = []
        for value in own(visit):
            left -= 1
            yield value
            if not inside and enter(value.value):
                below.append(value)
        if not inside:
            above.add(number)
            waiting += [number, *reversed(below)]


def walk_values(
    root: Any,
    enter: Predicate = holds_variables,
    *,
    recursive: bool = True,
    order: SortKey | None = None,
    most: int = MOST,
) -> Iterator[LiveValue]:
    """Yield every value under `root` by every path, in the order of `tf.Module._flatten`.

    See flatten_with_path. Source: tensorflow/python/module/module.py (_flatten_module). An object reached
    again from within itself yields its own leaves once more and is not followed further.

    Args:
        root: the object at the top.
        enter: whether an object's attributes are visited.
        recursive: also visit the attributes of objects below the root.
        order: the key by which attributes are sorted; by default their names.
        most: the number of values after which only new objects are entered; with -1, none is entered twice.
    """

    def own(visit: LiveValue) -> Iterator[LiveValue]:
        value = visit.value
        attributes = [] if is_nested(value) else sorted_attributes(value, order)
        parts = [((*visit.path, step), part) for step, part in attributes]
        for top, part in [(visit.path, value)] if is_nested(value) else parts:
            yield from (LiveValue(path, leaf, value) for path, leaf in nest_leaves(top, part))

    return visit_paths(root, own, enter if recursive else lambda _: False, most, repeated=True)


def sorted_attributes(value: Any, order: SortKey | None = None) -> list[tuple[PathStep, Any]]:
    """Return an object's sorted attributes; for torch modules, the registered entries too."""
    if is_torch_module(value):
        return _torch_items(value, order)
    if is_torch_optimizer(value):
        return _torch_optimizer_items(value)
    if any((name, "Checkpoint") in class_bases(value) for name in _TENSORFLOW):
        return _checkpoint_items(value, order)
    attributes = own_attributes(value)
    names, ignored = sorted(attributes, key=order), frozenset[str]()
    if is_tf_module(value):
        # tf_keras uses other names for them (tf_keras/src/engine/base_layer.py).
        ignored = frozenset(getattr(type(value), "_TF_MODULE_IGNORED_PROPERTIES", _IGNORED))
    elif holds_variables(value):  # of Keras 3
        ignored = _KERAS_IGNORED
        names = sorted(names, key=lambda name: _LATER.get(name, 0)) if order is None else names
    return [(attr(name), attributes[name]) for name in names if name not in ignored]


def _checkpoint_items(checkpoint: Any, order: SortKey | None) -> list[tuple[PathStep, Any]]:
    """Return the objects in a tf.train.Checkpoint by keyword (tensorflow/python/checkpoint/checkpoint.py)."""
    attributes = own_attributes(checkpoint)
    edges = [
        *attributes.get("_self_unconditional_checkpoint_dependencies", ()),
        *(attributes.get("_attached_dependencies") or ()),
    ]
    named = {edge.name: edge.ref for edge in edges}
    return [(attr(name), named[name]) for name in sorted(named, key=order)]


def _torch_items(module: Any, order: SortKey | None) -> list[tuple[PathStep, Any]]:
    """Return the registered entries of a torch.nn.Module as attributes, then its other attributes.

    Items of lists of modules or parameters are numbered, those of dicts of modules have raw keys
    (torch/nn/modules/container.py). Entries of `state_dict` come first: an LSTM has its weights a
    second time in `_flat_weights`.
    """
    attributes = own_attributes(module)
    registered = torch_registered(module)
    derived = _recomputed_attributes(attributes)
    others = [n for n in attributes if n not in _TORCH_PRIVATE and n not in registered and n not in derived]
    step: Callable[[str], PathStep] = attr
    numbers: list[str] = []
    if any(is_torch_instance(module, name) for name in _LISTS):
        numbers = [name for name in registered if name.isdecimal()]
    elif any(is_torch_instance(module, name) for name in _DICTS):
        step = key
    listed = [(index(int(name)), registered.pop(name)) for name in numbers]
    listed += [(step(name), registered[name]) for name in sorted(registered, key=order)]
    return listed + [(attr(name), attributes[name]) for name in sorted(others, key=order)]


def _recomputed_attributes(attributes: dict[str, Any]) -> set[str]:
    """Return the attributes that torch recomputes before every forward pass.

    Source: torch/nn/utils/weight_norm.py, spectral_norm.py, prune.py: a hook with its weight's name.
    """
    hooks = (attributes.get("_forward_pre_hooks") or {}).values()
    lines = [own_attributes(hook) for hook in hooks if package_of(hook) == "torch"]
    return {str(hook[name]) for hook in lines for name in ("name", "_tensor_name") if name in hook}


_TORCH_PRIVATE = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"))


def torch_registered(module: Any) -> dict[str, Any]:
    """Return a torch.nn.Module's parameters, buffers and modules by name, in `state_dict` order."""
    attributes = own_attributes(module)
    registered: dict[str, Any] = {}
    for kind in ("_parameters", "_buffers", "_modules"):
        registered.update(
            (name, value) for name, value in (attributes.get(kind) or {}).items() if value is not None
        )
    return registered


def _torch_optimizer_items(optimizer: Any) -> list[tuple[PathStep, Any]]:
    """Return the state of `Optimizer.state_dict` by parameter number (torch/optim/optimizer.py)."""
    attributes = own_attributes(optimizer)
    groups = attributes.get("param_groups", [])
    numbers: dict[int, int] = {}
    for group in groups:
        for parameter in group["params"]:
            numbers.setdefault(id(parameter), len(numbers))
    state = {numbers.get(id(p), n): dict(s) for n, (p, s) in enumerate(attributes.get("state", {}).items())}
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return [(attr("param_groups"), settings), (attr("state"), state)]


_OWN = frozenset(("_variables", "_trainable_variables"))


class OptimizerSlot(NamedTuple):
    """Kind of a slot variable, and its parameter or that parameter's name."""

    kind: str
    of: Any
    named: str | None = None


Slots = Mapping[int, OptimizerSlot]


def live_tensor_role(value: LiveValue) -> tuple[Role, bool | None]:
    """Return a tensor's role and whether it is trained; tensors that no framework saves are "other"."""
    if is_keras_optimizer(value.owner) or is_torch_optimizer(value.owner):
        return _optimizer_role(value)
    if is_torch_instance(value.value, "Tensor"):
        return _torch_role(value)
    if not is_variable(value.value):
        return "other", None
    trainable = bool(getattr(value.value, "trainable", False))
    return ("parameter" if trainable else "buffer"), trainable


def _optimizer_role(value: LiveValue) -> tuple[Role, bool | None]:
    name = str(value.path[-1].value)
    if name.strip("_") in ("iterations", "step"):
        return "counter", None
    mine = own_attributes(value.owner).get("_trainable_variables", ())
    if any(value.value is variable for variable in mine):
        return "parameter", bool(getattr(value.value, "trainable", True))
    return "other", None


def _torch_role(value: LiveValue) -> tuple[Role, bool | None]:
    if is_torch_module(value.owner):
        # In a `state_dict` all steps form one key; a buffer's own name has no dot.
        name = str(value.path[-1].value).rpartition(".")[2]
        attributes = own_attributes(value.owner)
        if (attributes.get("_buffers") or {}).get(name) is value.value:
            return ("buffer" if name not in attributes["_non_persistent_buffers_set"] else "other"), False
    if is_variable(value.value) and not is_torch_instance(value.value, "Buffer"):
        return "parameter", bool(value.value.requires_grad)
    return "other", None


def variable_name(value: Any) -> str | None:
    """Return a variable's own name: Keras 3's path, TensorFlow's name without the output number."""
    attributes = own_attributes(value)
    stored_name = attributes.get("_path") or attributes.get("_handle_name") or attributes.get("_shared_name")
    return stored_name.removesuffix(":0") if isinstance(stored_name, str) else None


def optimizer_slots(optimizer: Any) -> Slots:
    """Return an optimizer's slot variables by object id; empty for any other object."""
    if is_torch_optimizer(optimizer):
        return {
            id(value): OptimizerSlot(kind, parameter)
            for parameter, state in own_attributes(optimizer).get("state", {}).items()
            for kind, value in state.items()
            if kind != "step"
        }
    if not is_keras_optimizer(optimizer):
        return {}
    attributes = own_attributes(optimizer)
    trained = attributes.get("_trainable_variables")
    if trained is None:
        return _slots_by_name(attributes)
    known = {id(variable) for variable in trained}
    names = KERAS_LISTS | (RMSPROP_LISTS if type(optimizer).__name__ == "RMSprop" else {})
    slots: dict[int, OptimizerSlot] = {}
    for edge, members in attributes.items():
        if edge in _OWN or not isinstance(members, list | tuple) or len(members) != len(trained):
            continue
        for variable, parameter in zip(members, trained, strict=True):
            if is_variable(variable) and id(variable) not in known:
                slots[id(variable)] = OptimizerSlot(names.get(edge, edge.strip("_")), parameter)
    return slots


def _slots_by_name(attributes: Mapping[str, Any]) -> dict[int, OptimizerSlot]:
    """Return the slots of Keras 2's optimizers, which refer to their variables by name only.

    Source: tf_keras/src/optimizers/optimizer.py (`Adam/m/dense/kernel`), legacy/optimizer_v2.py
    (`_slots`: `Adam/dense/kernel/m`).
    """
    slots: dict[int, OptimizerSlot] = {}
    for edge, members in attributes.items():
        if edge not in _OWN and isinstance(members, list | tuple):
            for variable in members:
                if is_variable(variable):
                    kind, own = KERAS_LISTS.get(edge, edge.strip("_")), variable_name(variable) or ""
                    # Without the optimizer's name scope: `m/dense/kernel`.
                    parts = own.split("/", 1 if own.startswith(f"{kind}/") else 2)
                    slots[id(variable)] = OptimizerSlot(kind, None, parts[-1])
    for by_kind in (attributes.get("_slots") or {}).values():
        for kind, variable in by_kind.items():
            parts = (variable_name(variable) or "").split("/")
            slots[id(variable)] = OptimizerSlot(kind, None, "/".join(parts[1:-1]))
    return slots


@dataclass(frozen=True, slots=True, eq=False)
class LiveSource:
    """Current value of a tensor at each read; a pickled source contains the bytes of that moment."""

    tensor: Any

    def read(self) -> bytes:
        """Return a copy of the value: contiguous little-endian bytes, strings as u64 lengths before bytes.

        Raise UnsupportedError if the tensor has no dense value visible to this process.
        """
        tensor = unwrap_variable(self.tensor)
        return _torch_bytes(tensor) if is_torch_instance(tensor, "Tensor") else _tensor_bytes(tensor)

    def __reduce__(self) -> tuple[type[Inline], tuple[bytes]]:
        """Drop the live object when pickling: another process receives the value."""
        return Inline, (self.read(),)


def dtype_and_shape(tensor: Any) -> tuple[str, Shape] | None:
    """Return ckpttool's name of the type, and the shape; None if there is none (a lazy parameter)."""
    value = unwrap_variable(tensor)
    try:
        name = _type_name(value)
        shape = tuple(int(extent) for extent in _tensor_shape(value))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        # An unbuilt variable (None); a lazy Parameter raises RuntimeError when its shape is read.
        return None
    return None if name is None else (name, shape)


def _type_name(value: Any) -> str | None:
    kind = value.dtype
    number = getattr(kind, "as_datatype_enum", None)
    if number is not None:
        # References to TensorFlow 1 variables are numbered 100 higher (types.proto).
        row = dtypes.BY_TENSORFLOW.get(number % 100)
    elif is_torch_instance(value, "Tensor"):
        row = dtypes.BY_TORCH.get(str(kind).removeprefix("torch."))
    else:
        row = dtypes.BY_NAME.get(str(kind.name))
    return row.name if row is not None and row.name in dtypes.BY_NAME else None


def _tensor_shape(value: Any) -> Any:
    shape = value.shape
    if hasattr(shape, "is_fully_defined") and not shape.is_fully_defined():
        # tf.Variable(shape=tf.TensorShape(None)): only the value has a shape.
        return value.numpy().shape
    return shape


def tensor_identity(tensor: Any) -> object:
    """Return the identity that two names of one value share: the object, for torch the storage view."""
    value = unwrap_variable(tensor)
    if value is None:
        return id(tensor)
    if is_torch_instance(value, "Tensor") and type(value).__name__ in ("Tensor", "Parameter", "Buffer"):
        return _storage_view(value)
    return id(value)


def _storage_view(value: Any) -> object:
    if value.is_meta or str(value.layout) != "torch.strided" or not value.numel():
        return id(value)
    # `state_dict` creates a new tensor for every name of a tied weight.
    view = (value.data_ptr(), str(value.device), tuple(value.shape), tuple(value.stride()))
    return (*view, str(value.dtype), bool(value.is_conj()), bool(value.is_neg()))


def _torch_bytes(tensor: Any) -> bytes:
    """Return the bytes of a tensor on any device (torch.Tensor: detach, cpu, resolve_conj, resolve_neg)."""
    torch: Any = sys.modules["torch"]
    if tensor.is_meta:
        raise UnsupportedError("the tensor is on the meta device and has no value")
    if str(tensor.layout) != "torch.strided":
        raise UnsupportedError(
            f"a live tensor with layout {str(tensor.layout).removeprefix('torch.')} has no dense value",
            hint="flatten the result of its to_dense()",
        )
    try:
        here = tensor.detach().cpu().resolve_conj().resolve_neg()
        if here.is_quantized:
            here = here.int_repr()
        flat = here.contiguous().reshape(-1).view(torch.uint8).numpy()
        width = here.element_size() // (2 if here.is_complex() else 1)
        if sys.byteorder == "big" and width > 1:
            flat = flat.reshape(-1, width)[:, ::-1]
        return bytes(flat.tobytes())
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(f"cannot read the value of a {type(tensor).__name__}: {reason}") from error


def _tensor_bytes(tensor: Any) -> bytes:
    import numpy as np

    try:
        numbers = tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        # A TensorFlow 1 graph variable, a deleted one, or one inside a traced function.
        raise UnsupportedError(
            f"cannot read the value of a {type(tensor).__name__}: {str(error).partition(chr(10))[0]}",
            hint="read it in eager mode, or save it and read the checkpoint",
        ) from error
    array = np.asarray(numbers)
    if array.dtype.hasobject:
        elements = [bytes(element) for element in array.reshape(-1)]
        return b"".join(len(element).to_bytes(8, "little") + element for element in elements)
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class LiveTreeBuilder:
    """Leaves by path, and the first path of every value."""

    def __init__(self) -> None:
        self.first: dict[object, Path] = {}
        self.containers: dict[Path, Container] = {}
        self._leaves: dict[Path, Leaf | ValueLeaf] = {}
        self._aliases: dict[Path, list[Alias]] = {}
        self._slots: dict[Path, OptimizerSlot] = {}
        self._optimizers: dict[int, Slots] = {}
        # Objects identified by id stay alive until the tree is complete, so that no id is reused.
        self._kept: list[Any] = []

    def add(self, value: LiveValue, name: str, alias: str | None, slot: OptimizerSlot | None = None) -> None:
        """Add a value as a leaf with native name `name`, or as an alias with native name `alias`."""
        if isinstance(value.value, _PLAIN):
            self._leaves[value.path] = ValueLeaf(value.value)
            return
        tensor = is_tensor(value.value) or is_array(value.value)
        known = tensor_identity(value.value) if tensor else id(value.value)
        first = self.first.setdefault(known, value.path)
        if first is not value.path:
            self._aliases.setdefault(first, []).append(Alias(value.path, alias))
            return
        self._kept.append(value.value)
        form = dtype_and_shape(value.value) if tensor else None
        if form is None:
            kind = type(value.value)
            self._leaves[value.path] = ValueLeaf(Record(f"{kind.__module__}.{kind.__qualname__}"))
            return
        slot = slot or self._slot(value)
        if slot is not None:
            self._slots[value.path] = slot
        role, trainable = ("slot", None) if slot is not None else live_tensor_role(value)
        own = variable_name(value.value)
        self._leaves[value.path] = Leaf(
            *form, LiveSource(value.value), name, role, slot=slot and slot.kind, trainable=trainable, name=own
        )

    def _slot(self, value: LiveValue) -> OptimizerSlot | None:
        number = id(value.owner)
        if number not in self._optimizers:
            self._kept.append(value.owner)
            self._optimizers[number] = optimizer_slots(value.owner)
        return self._optimizers[number].get(id(value.value))

    def tree(self) -> Tree:
        """Return the tree; slots refer to their parameters by path, where the tree contains those."""
        leaves = dict(self._leaves)
        named = {leaf.name: path for path, leaf in leaves.items() if isinstance(leaf, Leaf) and leaf.name}
        for path, slot in self._slots.items():
            of = named.get(slot.named or "") if slot.of is None else self.first.get(tensor_identity(slot.of))
            leaf = leaves[path]
            if isinstance(leaf, Leaf):
                leaves[path] = replace(leaf, of=of)
        aliases = {path: tuple(others) for path, others in self._aliases.items()}
        return Tree(leaves, aliases, self.containers)


# tf.train.Checkpoint adds it to any object when it saves (tensorflow/python/checkpoint/checkpoint.py).
COUNTER = ("save_counter",)


def is_saver(value: object) -> bool:
    """Return whether a framework saves the object as a whole: a module, a variable, an optimizer."""
    return is_torch_module(value) or is_torch_optimizer(value) or is_trackable(value)


def saved_children(value: Any) -> Mapping[str, Any]:
    """Return an object's saved children by edge name; raise ValueError as TensorFlow does.

    For a trackable object these are the ones of tf.train.Checkpoint
    (tensorflow/python/trackable/base.py, `_trackable_children`), for a torch.nn.Module those of
    `state_dict`, for a plain container or object all its entries.
    """
    if is_torch_module(value):
        without = own_attributes(value).get("_non_persistent_buffers_set") or ()
        return {name: entry for name, entry in torch_registered(value).items() if name not in without}
    if is_tensor(value):
        return {}
    if is_trackable(value):
        children: Mapping[str, Any] = value._trackable_children()
        return children
    items = nest_items(value) if is_nested(value) else sorted_attributes(value)
    return {str(step.value): below for step, below in items}


def saves_children(value: Any) -> bool:
    """Return whether `children` of the object are saved with it."""
    return (is_saver(value) or is_nested(value)) and not is_tensor(value)


def saved_tensors(root: Any, most: int = MOST) -> Iterator[LiveValue]:
    """Yield the tensors that are saved with an object by every path, like `LiveWalk.found`."""

    def own(visit: LiveValue) -> Iterator[LiveValue]:
        owner = visit.owner if is_nested(visit.value) else visit.value
        for name, child in _allowed_children(visit.value, visit.path, {}).items():
            yield LiveValue((*visit.path, edge_key(name)), child, owner)

    for value in visit_paths(root, own, saves_children, most):
        if is_tensor(value.value):
            yield value


def _allowed_children(value: Any, path: Path, refused: dict[Path, str]) -> Mapping[str, Any]:
    """Return an object's children; none if its framework refuses to save it: `refused` gets the reason."""
    try:
        return saved_children(value)
    except ValueError as error:
        # A list changed by other means than append, or a dict with non-string keys.
        refused[path] = str(error).strip().partition("\n")[0].partition(". ")[0]
        return {}


def edge_key(name: str) -> PathStep:
    """Return the step of an edge: list items have numbers."""
    return index(int(name)) if name.isdecimal() else attr(name)


def reachable_objects(roots: Sequence[tuple[Path, Any]], refused: dict[Path, str]) -> dict[int, Any]:
    """Return all objects saved with the roots by id, including slot variables.

    An object that its framework refuses to save is added to `refused` with the reason.
    """

    def below(path: Path, value: Any) -> Iterable[tuple[PathStep, Any]]:
        if is_tensor(value):
            return [(attr("value"), unwrap_variable(value))]
        children = _allowed_children(value, path, refused) if saves_children(value) else {}
        return [(edge_key(name), child) for name, child in children.items()]

    objects = {id(value): value for _, value in visit_once(roots, below)}
    variables = [value for value in objects.values() if is_variable(value)]
    for optimizer in [value for value in objects.values() if keeps_slots(value)]:
        objects |= {id(slot): slot for _, _, slot in iter_slots(optimizer, variables)}
    return objects


def keeps_slots(value: Any) -> bool:
    """Return whether saving the object requests its slot variables (tensorflow/python/checkpoint/util.py)."""
    return hasattr(type(value), "get_slot_names") and hasattr(type(value), "get_slot")


def iter_slots(optimizer: Any, variables: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the slots of a Keras 2 or TensorFlow 1 optimizer: kind, variable, slot variable."""
    for kind in optimizer.get_slot_names():
        for variable in variables:
            with contextlib.suppress(KeyError):
                slot = optimizer.get_slot(variable, kind)
                if slot is not None:
                    yield kind, variable, slot


def saved_variables(roots: Sequence[tuple[Path, Any]]) -> Iterator[tuple[LiveValue, OptimizerSlot | None]]:
    """Yield the tensors that are saved with objects at these paths, then the slots that saving requests."""
    variables: dict[int, tuple[Path, Any]] = {}
    optimizers: dict[int, tuple[Path, Any]] = {}
    for root_path, root in roots:
        below = (
            LiveValue((*root_path, *value.path), value.value, value.owner) for value in saved_tensors(root)
        )
        for value in [LiveValue(root_path, root, None)] if is_tensor(root) else below:
            yield value, None
            variables.setdefault(id(value.value), (value.path, value.value))
            if keeps_slots(value.owner):
                optimizers.setdefault(id(value.owner), (value.path[:-1], value.owner))
    for root_path, optimizer in optimizers.values():
        for kind, variable, slot in iter_slots(optimizer, [variable for _, variable in variables.values()]):
            path = slot_path(root_path, kind, variables[id(variable)][0])
            yield LiveValue(path, slot, optimizer), OptimizerSlot(kind, variable)


def edge_names(path: Path) -> Iterator[str]:
    """Yield a path's names as edge names: torch's dotted keys split, numbers as text."""
    for step in path:
        if step.kind == "key" and isinstance(step.value, str):
            yield from step.value.split(".")
        else:
            yield str(step.value)


def state_dict(obj: Any) -> Tree:
    """Return the entries of a torch.nn.Module's `state_dict()`, under the same dotted keys.

    In a plain container each module's entries are under its place. No hook runs, and `get_extra_state`
    is not called. A second name of a tensor is an alias with a key.
    """
    builder = LiveTreeBuilder()
    for path, module in _torch_roots(obj):
        builder.containers[path] = Container("OrderedDict")
        for value in saved_tensors(module):
            name = ".".join(str(step.value) for step in value.path)
            builder.add(value._replace(path=(*path, key(name))), name, name)
    return builder.tree()


def object_graph(obj: Any) -> Tree:
    """Return the variables that tf.train.Checkpoint would save with `obj`, by object-graph path.

    A restore uses these paths; Keras 2 has additional edges, e.g. `layer_with_weights-0`. Objects that
    TensorFlow refuses to save are left out (see `audit`).
    """
    builder = LiveTreeBuilder()
    for value, slot in saved_variables([] if is_tensor(obj) else [((), obj)]):
        builder.add(value, "/".join(edge_names(value.path)), None, slot)
    return builder.tree()


def _torch_roots(obj: Any) -> Iterator[tuple[Path, Any]]:
    for path, value in nest_leaves((), obj):
        if is_torch_module(value):
            yield path, value


class TorchNames:
    """Keys of torch's `state_dict`, by path and by tensor."""

    def __init__(self, root: Any, most: int) -> None:
        self._paths: set[tuple[str, ...]] = set()
        self._first: dict[object, str] = {}
        for path, module in _torch_roots(root):
            before = tuple(str(step.value) for step in path)
            for value in saved_tensors(module, most):
                names = (*before, *(str(step.value) for step in value.path))
                self._paths.add(names)
                self._first.setdefault(tensor_identity(value.value), ".".join(names))

    def alias(self, value: LiveValue) -> str | None:
        """Return torch's key for a further path, if it has one."""
        names = tuple(str(step.value) for step in value.path)
        return ".".join(names) if names in self._paths else None

    def leaf(self, value: LiveValue) -> str:
        """Return the key of a leaf; without a torch key, the joined path."""
        names = tuple(str(step.value) for step in value.path)
        if not is_torch_instance(value.value, "Tensor"):
            return "/".join(names)
        known = None if names in self._paths else self._first.get(tensor_identity(value.value))
        return known or ".".join(names)


def flatten_with_path(
    obj: Any,
    *,
    predicate: Predicate | None = None,
    recursive: bool = True,
    attribute_traversal_key: SortKey | None = None,
    enter: Predicate | None = None,
    most: int = MOST,
) -> Tree:
    """Return the values of a live module, or plain container of modules, as a tree of lazy leaves.

    Paths and their order equal `tf.Module._flatten(with_path=True)`; the first path of a value is its
    leaf, further ones are aliases. Raise UsageError for a tensor, which has no path.

    Args:
        obj: the module or container.
        predicate: selects values of any kind; None selects tensors.
        recursive: False includes only the object's own values.
        attribute_traversal_key: sort key of the attributes, as in `tf.Module._flatten`.
        enter: selects objects to enter; None: all trackable objects (TensorFlow: tf.Modules only).
        most: number of values after which no object is entered twice; first paths are kept.

    >>> import ckpttool, numpy
    >>> holder = {"actor": [numpy.zeros((3, 64), "float32")]}
    >>> tree = ckpttool.flatten_with_path(holder, predicate=lambda value: isinstance(value, numpy.ndarray))
    >>> [(ckpttool.display(path), leaf.shape) for path, leaf in tree.items()]
    [('actor/0', (3, 64))]
    """
    if is_tensor(obj):
        raise UsageError("a tensor has no children", hint="flatten a list or dict that contains it")
    selects = predicate or is_tensor
    builder, names = LiveTreeBuilder(), TorchNames(obj, most)
    values = walk_values(
        obj, enter or holds_variables, recursive=recursive, order=attribute_traversal_key, most=most
    )
    for value in values:
        if selects(value.value):
            builder.add(value, names.leaf(value), names.alias(value))
    return builder.tree()


def submodules(obj: Any) -> dict[Path, Any]:
    """Return every module under a live object by first path, in the order of `tf.Module.submodules`."""
    modules: dict[int, LiveValue] = {}
    for value in walk_values(obj, most=-1):
        if value.value is not obj and model_framework(value.value) is not None:
            modules.setdefault(id(value.value), value)
    return {module.path: module.value for module in modules.values()}
