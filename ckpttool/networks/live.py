"""Compare live models with checkpoints: audit, comparison, filling."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from ckpttool.core import dtypes
from ckpttool.core.checkpoint import Checkpoint
from ckpttool.core.deferred import NamedTuple, dataclass
from ckpttool.core.errors import MappingError, UnsupportedError, abbreviate_list
from ckpttool.core.handles import Handle, to_torch
from ckpttool.core.source import Shape, as_array
from ckpttool.core.text import format_count
from ckpttool.core.tree import Leaf, Path, PathStep, Tree, ValueLeaf, attr, display, index, key, path_to_json
from ckpttool.networks import live_trees
from ckpttool.networks.live_trees import (
    LiveSource,
    LiveValue,
    OptimizerSlot,
    dtype_and_shape,
    sorted_attributes,
)

Said = tuple[str, Shape]


@dataclass(frozen=True, slots=True)
class LiveDifference:
    """Two leaves with the same name that differ in type or shape: live side and checkpoint side."""

    path: Path
    live: Said
    stored: Said

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": display(self.path),
            "live": {"dtype": self.live[0], "shape": list(self.live[1])},
            "stored": {"dtype": self.stored[0], "shape": list(self.stored[1])},
        }


@dataclass(frozen=True, slots=True)
class LiveComparison:
    """Matched leaves of the live tree and the checkpoint, and unmatched leaves of both."""

    pairs: Mapping[Path, Path]
    different: tuple[LiveDifference, ...]
    unfilled: tuple[Path, ...]
    unused: tuple[Path, ...]

    @property
    def equal(self) -> bool:
        """Return whether both sides have the same tensors by name, type and shape."""
        return not (self.different or self.unfilled or self.unused)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "pairs": {display(live): display(stored) for live, stored in self.pairs.items()},
            "different": [row.document() for row in self.different],
            "unfilled": [display(path) for path in self.unfilled],
            "unused": [display(path) for path in self.unused],
        }


def compare_names(live: Tree, stored: Tree) -> LiveComparison:
    """Match the tensors of two trees by name, aliases included; no data is read.

    Names are compared as a framework does on restore: attributes, keys and numbers alike, and dotted
    keys (`state_dict`) split into steps.
    """
    names: dict[tuple[str, ...], Path] = {}
    for path, _ in stored.tensors():
        for name in _path_names(stored, path):
            names.setdefault(name, path)
    pairs: dict[Path, Path] = {}
    different = []
    for path, leaf in live.tensors():
        match = next((names[name] for name in _path_names(live, path) if name in names), None)
        if match is None:
            continue
        pairs[path] = match
        other = _require_tensor(stored, match)
        row = LiveDifference(path, (leaf.dtype, leaf.shape), (other.dtype, other.shape))
        different += [row] if row.live != row.stored else []
    matched = set(pairs.values())
    return LiveComparison(
        pairs,
        tuple(different),
        tuple(path for path, _ in live.tensors() if path not in pairs),
        tuple(
            p
            for p, _ in stored.tensors()
            if p not in matched and tuple(live_trees.edge_names(p)) != live_trees.COUNTER
        ),
    )


def _path_names(tree: Tree, path: Path) -> Iterator[tuple[str, ...]]:
    yield tuple(live_trees.edge_names(path))
    for alias in tree.aliases.get(path, ()):
        yield tuple(live_trees.edge_names(alias.path))


def _require_tensor(tree: Tree, path: Path) -> Leaf:
    leaf = tree[path]
    assert isinstance(leaf, Leaf)  # noqa: S101 - `compare` pairs tensors only
    return leaf


def copy_values(skeleton: Tree, tree: Tree) -> Tree:
    """Return the skeleton's paths, keys, roles and aliases with the other tree's values.

    Either side may be the live one. Raise MappingError if a tensor of the skeleton has no counterpart,
    or one of another shape or type.
    """
    comparison = compare_names(skeleton, tree)
    if comparison.unfilled:
        names = [display(path) for path in comparison.unfilled]
        more = format_count(len(names), "more tensor")
        raise MappingError(f"no tensor found with the name of {abbreviate_list(names, 3)}", expected=more)
    for row in comparison.different:
        raise MappingError(
            "tensors of the same name differ in type or shape",
            path=display(row.path),
            expected=_format_type(row.live),
            found=_format_type(row.stored),
        )
    leaves: dict[Path, Leaf | ValueLeaf] = dict(skeleton.leaves)
    for path, other in comparison.pairs.items():
        leaves[path] = replace(_require_tensor(skeleton, path), source=_require_tensor(tree, other).source)
    return Tree(leaves, skeleton.aliases, skeleton.containers)


def _format_type(form: Said) -> str:
    return f"{form[0]}{list(form[1])}"


def _index_names(variables: Iterable[tuple[LiveValue, OptimizerSlot | None]]) -> dict[tuple[str, ...], Any]:
    """Return saved variables, and the slots of their optimizers, by every name."""
    by_name: dict[tuple[str, ...], Any] = {}
    names: dict[int, list[tuple[str, ...]]] = {}
    optimizers: dict[int, list[tuple[str, ...]]] = {}
    for live, slot in variables:
        own = tuple(live_trees.edge_names(live.path))
        by_name.setdefault(own, live.value)
        if slot is None:
            names.setdefault(id(live.value), []).append(own)
            optimizers.setdefault(id(live.owner), []).append(own[:-1])
            continue
        for optimizer, of in itertools.product(optimizers[id(live.owner)], names[id(slot.of)]):
            by_name.setdefault((*optimizer, "slots", slot.kind, *of), live.value)
    return by_name


_OPEN = ("SimpleNamespace", "Namespace")


class ReachableTensor(NamedTuple):
    """Tensor, its first path, and a description of the first step that leaves the saved objects."""

    path: Path
    value: Any
    reason: str


def find_unsaved(root: Any, roots: set[int], saved: set[int]) -> Iterator[ReachableTensor]:
    """Yield the tensors under `root` whose ids are not in `saved`, each once.

    `roots` are the ids of the objects that are saved as a whole.
    """
    reasons = {id(root): ""}

    def own(holder: LiveValue) -> Iterator[LiveValue]:
        for step, value in iter_references(holder.value):
            if value is None or isinstance(value, _ATOMS) or id(value) in reasons:
                continue
            lost = reasons[id(holder.value)] or _step_reason(holder.value, value, step)
            reasons[id(value)] = "" if id(value) in saved or id(value) in roots else lost
            yield LiveValue((*holder.path, step), value, holder.value)

    for path, value, _ in live_trees.visit_paths(root, own, most=-1):
        unsaved = id(value) not in saved and id(live_trees.unwrap_variable(value)) not in saved
        if unsaved and is_numeric(value, path[-1]):
            yield ReachableTensor(path, value, reasons[id(value)])


def is_numeric(value: Any, step: PathStep) -> bool:
    """Return whether the value is a tensor, or a NumPy array with a name."""
    if live_trees.is_array(value):
        return step.kind != "index" and not value.dtype.hasobject and bool(value.size)
    return live_trees.is_tensor(value)


def iter_references(value: Any) -> Iterator[tuple[PathStep, Any]]:
    """Yield all values in an object; nothing for types that cannot contain a relevant tensor."""
    if isinstance(value, _ATOMS) or live_trees.is_tensor(value):
        return
    if live_trees.is_nested(value):
        yield from live_trees.nest_items(value)
    elif isinstance(value, Set):
        yield from ((index(number), item) for number, item in enumerate(value))
    elif isinstance(value, _FUNCTIONS):
        yield from _function_items(value)
    elif live_trees.holds_variables(value):
        yield from sorted_attributes(value)
    else:
        yield from _object_items(value)


_ATOMS = (str, bytes, bytearray, int, float, complex, type, types.ModuleType)
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _function_items(value: Any) -> Iterator[tuple[PathStep, Any]]:
    if isinstance(value, types.FunctionType):
        yield from _closure_items(value)
        return
    names = ("__self__",) if isinstance(value, types.MethodType) else ("func", "args", "keywords")
    yield from ((attr(name), getattr(value, name)) for name in names)


def _closure_items(function: types.FunctionType) -> Iterator[tuple[PathStep, Any]]:
    if (function.__module__ or "").partition(".")[0] in live_trees.FRAMEWORKS:
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield key(name), cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    for number, default in enumerate(function.__defaults__ or ()):
        yield index(number), default


def _is_open(value: Any) -> bool:
    """Return whether the class may be the user's: not a framework's, not the standard library's."""
    name = live_trees.package_of(value)
    if name in live_trees.FRAMEWORKS:
        return False
    known = name in sys.stdlib_module_names and name != "__main__"
    return not known or type(value).__name__ in _OPEN


def _object_items(value: Any) -> Iterator[tuple[PathStep, Any]]:
    attributes = live_trees.own_attributes(value) | _slots_attributes(value)
    # Of framework objects: a tf.function's Python function, and the target of `Variable.ref()`.
    names = sorted(attributes) if _is_open(value) else ("_python_function", "_wrapped")
    yield from ((attr(name), attributes[name]) for name in names if name in attributes)


def _slots_attributes(value: Any) -> dict[str, Any]:
    """Return the values in the `__slots__` of an object's class."""
    attributes: dict[str, Any] = {}
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = kind.__dict__.get(name)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not assigned yet
                    attributes[name] = member.__get__(value)
    return attributes


def _step_reason(holder: Any, value: Any, step: PathStep) -> str:
    """Return why the step from the holder to the held value is not saved."""
    inner, outer = type(value).__name__, type(holder).__name__
    if isinstance(value, _FUNCTIONS) or "_python_function" in live_trees.own_attributes(value):
        return "held by a function"
    if isinstance(holder, Set) or isinstance(value, Set):
        return "in a set"
    if live_trees.is_array(value):
        return "a NumPy array, which no framework saves"
    if live_trees.is_tensor(value):
        if not live_trees.is_torch_module(holder):
            return f"not tracked by the {outer} that holds it"
        without = live_trees.own_attributes(holder).get("_non_persistent_buffers_set") or ()
        if step.value in without:
            return "a buffer registered with persistent=False"
        return "a plain attribute: neither a Parameter nor a registered buffer"
    if live_trees.is_nested(value):
        return f"in a {inner} that is not tracked"
    if live_trees.holds_variables(value):
        return f"in a {inner} that the {outer} does not track"
    torch = live_trees.is_torch_module(holder) or live_trees.is_torch_optimizer(holder)
    return f"in a {inner}, which is not a {'Module' if torch else 'Trackable'}"


@dataclass(frozen=True, slots=True)
class UnsavedTensor:
    """Tensor that no file would contain: location, type and reason."""

    path: Path
    dtype: str
    shape: Shape
    reason: str

    def document(self) -> dict[str, Any]:
        """Return the JSON object."""
        return {
            "path": display(self.path),
            "keys": path_to_json(self.path),
            "dtype": self.dtype,
            "shape": list(self.shape),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Audit:
    """Tensors that would not be saved; with a checkpoint, also the mismatches.

    `refused` are the objects that the framework would refuse to save, with its reason. `unfilled` are
    the live variables that no entry of the checkpoint fills, `unused` the entries without a variable,
    `different` those that differ in shape or type.
    """

    unsaved: tuple[UnsavedTensor, ...]
    refused: Mapping[Path, str]
    unfilled: tuple[Path, ...] = ()
    unused: tuple[Path, ...] = ()
    different: tuple[LiveDifference, ...] = ()

    @property
    def complete(self) -> bool:
        """Return whether everything is saved and everything matches."""
        return not (self.unsaved or self.refused or self.unfilled or self.unused or self.different)

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "unsaved": [row.document() for row in self.unsaved],
            "refused": {display(path): reason for path, reason in self.refused.items()},
            "unfilled": [display(path) for path in self.unfilled],
            "unused": [display(path) for path in self.unused],
            "different": [row.document() for row in self.different],
        }


def audit(obj: Any, checkpoint: Checkpoint | Tree | None = None) -> Audit:
    """Report what saving `obj` would omit, and what restoring the checkpoint into it would not fill.

    A module is assumed to be saved whole, by tf.train.Checkpoint or `state_dict`; in a plain container
    or object, every module, optimizer and TensorFlow variable. No hook runs; the children of trackable
    objects are requested as in `Checkpoint.save`.
    """
    roots = _saved_roots(obj)
    refused: dict[Path, str] = {}
    whole = live_trees.reachable_objects(roots, refused)
    numbers = {id(value) for _, value in roots}
    rows = tuple(
        UnsavedTensor(row.path, *(dtype_and_shape(row.value) or ("unknown", ())), row.reason)
        for row in find_unsaved(obj, numbers, set(whole))
    )
    if checkpoint is None:
        return Audit(rows, refused)
    tree = checkpoint.tree if isinstance(checkpoint, Checkpoint) else checkpoint
    variables = [*live_trees.saved_variables(roots)]
    names, filled, unused = _index_names(variables), set[int](), []
    different: list[LiveDifference] = []
    for path, leaf in tree.tensors():
        matches = [names[name] for name in _path_names(tree, path) if name in names]
        if not matches and tuple(live_trees.edge_names(path)) != live_trees.COUNTER:
            unused.append(path)
        filled |= {id(object_) for live in matches for object_ in (live, live_trees.unwrap_variable(live))}
        forms = [form for live in matches if (form := dtype_and_shape(live)) is not None]
        stored = leaf.dtype, leaf.shape
        different += [LiveDifference(path, form, stored) for form in forms if form != stored]
    first: dict[int, Path] = {}
    for live, _ in variables:
        first.setdefault(id(live.value), live.path)
    unfilled = tuple(path for number, path in first.items() if number not in filled)
    return Audit(rows, refused, unfilled, tuple(unused), tuple(dict.fromkeys(different)))


def _saved_roots(obj: Any) -> list[tuple[Path, Any]]:
    """Return the topmost objects that a framework saves as a whole."""

    def is_whole(path: Path, value: Any) -> bool:
        return live_trees.is_saver(value) and (bool(path) or not live_trees.is_nested(value))

    def below(path: Path, value: Any) -> Iterable[tuple[PathStep, Any]]:
        return () if is_whole(path, value) else iter_references(value)

    return [root for root in live_trees.visit_once([((), obj)], below) if is_whole(*root)]


def assign(values: Iterable[tuple[str, Any, Leaf]]) -> Callable[[], None]:
    """Assign values to live tensors: name, variable or torch.Tensor, and unread value of each.

    Return the function that restores the former values. All values are in memory at once. The model's types
    (e.g. bfloat16) and devices do not change; gradients are not recorded. Raise errors of reading,
    MappingError for a value of another shape or kind, UnsupportedError for a tensor that cannot be changed.
    Every value is read, checked and cast to its tensor's type before the first tensor changes; if an
    assignment still fails, the previous ones are rolled back.
    """
    staged = [_Assignment(name, variable, leaf) for name, variable, leaf in values]
    done: list[_Assignment] = []
    try:
        for assignment in staged:
            assignment.swap()
            done.append(assignment)
    except BaseException as error:
        for assignment in reversed(done):
            assignment.swap()
        if not isinstance(error, Exception):  # Ctrl-C
            raise
        name = staged[len(done)].name
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedError(f"cannot change the tensor: {reason}", path=name) from error

    def undo() -> None:
        for assignment in reversed(done):
            assignment.swap()

    return undo


def set_value(tensor: Any, value: Any) -> None:
    """Put a value of the same shape into a torch.Tensor, or a variable of TensorFlow or Keras."""
    if hasattr(tensor, "assign"):
        tensor.assign(value)
        return
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        tensor.copy_(value)


class _Assignment:
    """A tensor and its next value; raise MappingError or UnsupportedError if the tensor cannot have it."""

    def __init__(self, name: str, tensor: Any, leaf: Leaf) -> None:
        form = dtype_and_shape(tensor)
        if form is None or form[1] != leaf.shape or not dtypes.same_family(form[0], leaf.dtype):
            expected = "a tensor with a shape" if form is None else f"{form[0]}{list(form[1])}"
            actual = f"{leaf.dtype}{list(leaf.shape)}"
            raise MappingError(
                "the value does not match the model", path=name, expected=expected, found=actual
            )
        self.name, self._tensor, self._form = name, tensor, form
        if hasattr(tensor, "assign"):
            value = Handle(name, leaf).numpy()
            string = form[0] == "string"
            self._next: Any = value if string else value.astype(dtypes.numpy_dtype(form[0]), copy=False)
            # A TensorFlow 1 graph has no values here, and assigning would only add to the graph.
            self._now()
            return
        _require_changeable(name, tensor)
        self._next = to_torch(leaf).to(tensor.dtype)

    def _now(self) -> Any:
        if not hasattr(self._tensor, "assign"):
            return self._tensor.detach().to("cpu", copy=True)
        if self._form[0] == "string":
            return live_trees.unwrap_variable(self._tensor).numpy()
        return as_array(LiveSource(self._tensor).read(), *self._form)

    def swap(self) -> None:
        """Swap the tensor's value and the next one."""
        before = self._now()
        set_value(self._tensor, self._next)
        self._next = before


def _require_changeable(name: str, tensor: Any) -> None:
    """Raise UnsupportedError for a torch.Tensor without memory, or one that only inference mode changes."""
    if tensor.is_meta:
        raise UnsupportedError(
            "the model is on the meta device and has no memory for values",
            path=name,
            hint="allocate memory with model.to_empty(device=...)",
        )
    torch: Any = sys.modules["torch"]
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UnsupportedError(
            "the tensor was created in inference mode and can be changed only there", path=name
        )
