"""Record one call of a user's model: what its modules receive and return, and what that shows of them.

The order of entries is traced (see ckpttool.core.activations). PyTorch reports every operation to a dispatch
mode (torch/utils/_python_dispatch.py), TensorFlow to an operation callback
(tensorflow/python/framework/op_callbacks.py). Operations that only move entries are repeated on the entries'
numbers. The syntax is Python 3.7's: interpreters of other environments run this code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator  # noqa: UP035 - Python 3.7's

from ckpttool.core.activations import MIXED, ActivationTracker, FeaturePart, TrackingLimitError, common_parts
from ckpttool.core.deferred import DeferredModule, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from ckpttool.networks.messages import ArrayRow, CallRow, OperationRow, RecordedCallRow
else:
    np = DeferredModule("numpy")


ROOT = "(model)"


def paired(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """Return the pairs of two collections of equal length; Python 3.7's own function does not check that."""
    left, right = list(one), list(other)
    return [(left[index], right[index]) for index in range(min(len(left), len(right)))]


def view_array(value: Any) -> Any:
    """Return a tensor of any framework as an array, which may share its memory; bfloat16 as float32.

    Complex numbers have a last axis of real and imaginary parts.
    """
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_conj().resolve_neg()
        array = value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    else:
        array = np.asarray(value.numpy() if hasattr(value, "numpy") else value)
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], -1)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def to_array(value: Any) -> Any:
    """Return a tensor of any framework as a separate array; bfloat16 as float32."""
    return np.array(view_array(value))


_MAPPED = 1 << 20  # bytes


def map_array(file: Path) -> Any:
    """Return the array of a file that does not change; the numbers of a large one stay there."""
    mode: Any = "r" if os.path.getsize(file) > _MAPPED else None
    return np.asarray(np.load(file, mode, allow_pickle=False))


def _is_tensor(value: Any) -> bool:
    try:
        return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)
    except RuntimeError:  # a lazy parameter
        return False


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the tensors of a nested result with their names; a single one is called `output`."""
    if _is_tensor(value):
        return [(name or "output", value)]
    if hasattr(value, "items"):
        parts = [(str(key), item) for key, item in value.items()]
    elif hasattr(value, "_fields"):
        parts = list(paired(value._fields, value))
    elif isinstance(value, (list, tuple)):
        parts = [(str(number), item) for number, item in enumerate(value)]
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        parts = [(field, getattr(value, field)) for field in value.__dataclass_fields__]
    else:
        return []
    if len(parts) == 1 and isinstance(value, (list, tuple)):
        return named_tensors(parts[0][1], name)
    return [row for key, item in parts for row in named_tensors(item, name + "/" + key if name else key)]


def list_tensors(value: Any) -> list[Any]:
    """Return the tensors of a nested value."""
    return [tensor for _, tensor in named_tensors(value)]


def tensor_shape(value: Any) -> tuple[int, ...]:
    """Return the shape with 1 for every free axis; () for what has none, e.g. a lazy parameter."""
    try:
        return tuple(1 if extent is None else int(extent) for extent in value.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ()


class CallRecorder:
    """Calls of a model's layers in order: layer, numbers, and the arrays of the wanted calls."""

    activations = True
    """whether `before_activation` is called"""

    def __init__(self, calls: set[tuple[str, int]] | None = None, folder: Path | None = None) -> None:
        self.calls: list[CallRow] = []
        self.kept: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._counts: dict[str, int] = {}
        self._selected, self._folder = calls, folder
        # Tensors and their files by id; they are kept, because an id may be reused.
        self._written: dict[int, tuple[Any, str]] = {}

    def enter(self, path: str, args: Any, kwargs: Any, module: Any = None) -> Any:
        """Record the start of a call; return its record, which `leave` completes."""
        del module
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        options = plain_settings(kwargs) if hasattr(kwargs, "items") else {}
        record: CallRow = {"path": path, "number": number, "options": options}
        if self._selected is not None and (path, number) not in self._selected:
            return None
        if self._selected is not None:
            record["given"] = self._arrays("given", (args, kwargs))
            self.kept[path, number] = args, kwargs
        return record

    def before_activation(self, record: CallRow, value: Any) -> None:
        """Record what a layer passes to its activation."""
        if "before" not in record:
            record["before"] = self._arrays("before", value)

    def leave(self, record: Any, outputs: Any) -> None:
        """Record the end of a call with its result."""
        if record is not None:
            record["made"] = self._arrays("made", outputs)
            self.calls.append(record)

    def _arrays(self, what: str, value: Any) -> list[ArrayRow]:
        rows: list[ArrayRow] = []
        for index, tensor in enumerate(list_tensors(value)):
            try:
                array = view_array(tensor)
            except Exception:  # noqa: BLE001, S112 - a symbolic tensor has no values
                continue
            row: ArrayRow = {"shape": list(array.shape), "kind": array.dtype.kind, "largest": _largest(array)}
            if self._folder is not None:
                row["file"] = self._file(
                    self._folder, tensor, array, f"call-{len(self.calls)}-{what}-{index}"
                )
            rows.append(row)
        return rows

    def _file(self, folder: Path, tensor: Any, array: Any, name: str) -> str:
        """Return the name of the file of a tensor: what a layer returns, the next one receives."""
        _, known = self._written.get(id(tensor), (None, ""))
        # A layer may write to what it receives.
        if known and np.array_equal(map_array(folder / known), array):
            return known
        file = f"{name}-{len(os.listdir(folder))}.npy"
        np.save(folder / file, array, allow_pickle=False)
        self._written[id(tensor)] = tensor, file
        return file


_MOST_RECORDED = 1 << 27  # numbers


class OperationRecorder(CallRecorder):
    """Every operation of a call: its name, and the values that it and the layers receive and return."""

    activations = False

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[OperationRow] = []
        self.recorded: list[RecordedCallRow] = []
        self.values: list[Any] = []
        # Values that came by a way that is no operation, e.g. in a view of the tensor.
        self.written: list[int] = []
        self.whole = True
        self._size = 0
        # Tensors and the numbers of their values by id; they are kept, because an id may be reused.
        self._numbers: dict[int, tuple[Any, int]] = {}

    def enter(self, path: str, args: Any, kwargs: Any, module: Any = None) -> Any:
        """Record what a layer receives."""
        record: CallRow = super().enter(path, args, {}, module)
        inputs = [self._number(tensor) for tensor in list_tensors((args, kwargs))]
        return record["path"], record["number"], inputs, len(self.values)

    def leave(self, record: Any, outputs: Any) -> None:
        """Record what a layer returns."""
        numbers = [self._number(tensor) for tensor in list_tensors(outputs)]
        path, number, inputs, start = record
        row: RecordedCallRow = {
            "path": path,
            "number": number,
            "given": inputs,
            "made": numbers,
            "start": start,
            "end": len(self.values),
        }
        self.recorded.append(row)

    def operation(self, name: str, inputs: Any) -> Callable[[Any], None]:
        """Record an operation, which may write to what it receives; return what records its outputs."""
        received = self._plain(inputs)

        def finish(outputs: Any) -> None:
            numbers = [self._number(tensor, new=True) for tensor in list_tensors(outputs)]
            self.operations.append({"name": name, "given": received, "made": numbers})

        return finish

    def record_graph(self, ends: tuple[Any, Any], nodes: Any, layers: Any) -> None:
        """Record a graph that has run: operations and layers, each with what it receives and returns."""
        call = self.enter(ROOT, ends[0], {})
        for kind, inputs, outputs in nodes:
            self.operation(kind, inputs)(outputs)
        for path, inputs, outputs in layers:
            self.leave(self.enter(path, inputs, {}), outputs)
        self.leave(call, ends[1])

    def _plain(self, value: Any) -> Any:
        if _is_tensor(value):
            return {"value": self._number(value)}
        if isinstance(value, (list, tuple)):
            return [self._plain(item) for item in value]
        return value if isinstance(value, (bool, int, float, str)) else None

    def _number(self, tensor: Any, *, new: bool = False) -> int:
        """Return the number of a tensor's value: another one after the tensor was written to."""
        try:
            array = view_array(tensor)
        except Exception:  # noqa: BLE001 - e.g. a reference to a variable
            array = None
        _, number = self._numbers.get(id(tensor), (None, -1))
        if new or number < 0 or not _is_same(self.values[number], array):
            if not new and number >= 0:
                self.written.append(len(self.values))
            number = len(self.values)
            self._numbers[id(tensor)] = tensor, number
            self._size += 0 if array is None else array.size
            self.whole = self.whole and self._size <= _MOST_RECORDED
            self.values.append(np.array(array) if array is not None and self.whole else None)
        return number


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


class NumbersRecorder(CallRecorder):
    """Describes the results of all calls by numbers that the order of axes does not change."""

    activations = False

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def leave(self, record: Any, outputs: Any) -> None:
        """Describe the results of a call."""
        if record is not None:
            self.results += [describe_numbers(view_array(tensor)) for tensor in list_tensors(outputs)]


def describe_numbers(array: Any) -> Any:
    """Return size, mean, mean magnitude, root mean square, maximum and minimum; zeros if not floats."""
    x = np.asarray(array, np.float64).reshape(-1)
    if array.dtype.kind != "f" or x.size < 2:
        return np.zeros(6)
    with np.errstate(all="ignore"):
        return np.array([x.size, x.mean(), np.abs(x).mean(), np.sqrt((x * x).mean()), x.max(), x.min()])


def _largest(array: Any) -> float:
    """Return the largest finite magnitude, 0 without numbers."""
    if array.dtype.kind not in "fiub" or not array.size:
        return 0.0
    largest = float(np.maximum(float(array.max()), -float(array.min())))
    if np.isfinite(largest):
        return largest
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def plain_settings(value: Any) -> dict[str, Any]:
    """Return the attributes or settings of an object that are plain numbers, words or shapes."""
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in value.items()
        if isinstance(name, str) and not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) < 16 and all(isinstance(item, int) for item in value)
    return isinstance(value, (bool, int, float, str)) and len(str(value)) < 100


_MOST_FOLLOWED = 2_000
_MOST_PROBED = 500


class CallFacts(CallRecorder):
    """What a call shows of each module: its place among the calls, orders of features, its function.

    `runner` runs the model (see model_child.ModelRunner), `trace` follows the call's operations.
    """

    activations = False

    def __init__(self, runner: Any, trace: Trace) -> None:
        super().__init__()
        self._runner, self._trace = runner, trace
        # Modules with tensors in the order of their first calls, and as bits the modules before each one and
        # before each tensor. The tensors are kept, because an id may be reused.
        self._order: dict[int, int] = {}
        self._before: list[int] = []
        self._flow: dict[int, tuple[Any, int]] = {}
        # The results of the last call, which is the model's own.
        self._results: Any = None
        self._probed: dict[int, tuple[Any, Any]] = {}
        trace.flow = self.flow

    def enter(self, path: str, args: Any, kwargs: Any, module: Any = None) -> Any:
        """Record the start of a call."""
        if path == ROOT:
            self._trace.border((args, kwargs), self._runner.channel_axis)
            self._trace.enter((args, kwargs))
        return path, module, args, kwargs

    def leave(self, record: Any, outputs: Any) -> None:
        """Record the end of a call with its result."""
        path, module, args, kwargs = record
        self.flow(module, (args, kwargs), outputs)
        axis = self._runner.feature_axis(module)
        if axis is not None:
            self._trace.module(module, args, outputs, axis)
        tensors = list_tensors(args)
        alone = len(tensors) == 1 and len(tensor_shape(tensors[0])) > 1
        if alone and len(self._probed) < _MOST_PROBED and self._runner.has_own_call(module):
            # The class does not show whether it multiplies x @ W or W @ x, or whether its two vectors are a
            # norm's: its results for generated numbers do.
            self._probed.setdefault(id(module), (module, tensors[0]))
        if path == ROOT:
            self._trace.border(outputs, self._runner.channel_axis)

    def flow(self, module: Any, inputs: Any, outputs: Any) -> None:
        """Record which modules contribute to the output of a module or operation (None)."""
        before, self._results = 0, outputs
        for tensor in list_tensors(inputs):
            before |= self._flow.get(id(tensor), (None, 0))[1]
        if module is not None and self._runner.holds_tensors(module):
            if id(module) not in self._order and len(self._order) < _MOST_FOLLOWED:
                self._order[id(module)] = len(self._order)
                self._before.append(before)
            if id(module) in self._order:
                before |= 1 << self._order[id(module)]
        for tensor in list_tensors(outputs):
            self._flow[id(tensor)] = tensor, before | self._flow.get(id(tensor), (None, 0))[1]

    def facts(self) -> dict[int, dict[str, Any]]:
        """Return the facts of each module by its id, after the call.

        `call` is the number of its first call; `after` has a bit for each call that it depends on, `leads`
        one for each output of the model that depends on it. `orders` are those of its input and output
        features, `computes` is its function (see probe_module). What could not be followed is left out.
        """
        facts: dict[int, dict[str, Any]] = {}
        if self._trace.followed and len(self._order) < _MOST_FOLLOWED:
            outputs = [self._flow.get(id(tensor), (None, 0))[1] for tensor in list_tensors(self._results)]
            for module, number in self._order.items():
                leads = sum((bits >> number & 1) << index for index, bits in enumerate(outputs))
                facts[module] = {"call": number, "after": hex(self._before[number]), "leads": hex(leads)}
        for module, orders in self._trace.orders().items():
            facts.setdefault(module, {})["orders"] = orders
        for module, parts in self._trace.parts(self._order).items():
            facts.setdefault(module, {}).update(parts)
        for number, (module, like) in self._probed.items():
            try:
                tensors = self._runner.arrays_of(module)
                computes = probe_module(
                    tensors,
                    tensor_shape(like),
                    lambda x: self._runner.compute(module, x, like),  # noqa: B023
                )
            except Exception:  # noqa: BLE001, S112 - a module that takes no other numbers
                continue
            facts.setdefault(number, {})["computes"] = computes
        return facts


_MOST_PROBED_ENTRIES = 1 << 24
_CLOSE = 1e-3
_SMALL_INPUT = 3e-3
_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)


def probe_module(tensors: dict[str, Any], shape: tuple[int, ...], compute: Any) -> dict[str, Any]:
    """Return a module's function of its tensors: its `kind`, the `form` of its matrix, its `epsilon`.

    Without a `kind` it matches none of the compared layers.
    """
    arrays = {name: np.asarray(tensor, "float64") for name, tensor in tensors.items()}
    ranks = sorted(array.ndim for array in arrays.values())
    if ranks not in ([2], [1, 2], [1], [1, 1]) or int(np.prod(shape)) > _MOST_PROBED_ENTRIES:
        raise ValueError("no layer that is compared")
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    vectors = [name for name, array in arrays.items() if array.ndim == 1]
    if 2 in ranks:
        (matrix,) = (array for array in arrays.values() if array.ndim == 2)
        return _as_matrix(x, matrix, [arrays[name] for name in vectors], compute)
    scale = next((name for name in vectors if name in ("weight", "gamma", "scale", "g", "a_2")), "")
    offset = next((arrays[name] for name in vectors if name != scale), None)
    if not scale or (offset is None and len(vectors) > 1):
        raise ValueError("no scale")
    return _as_norm(x * np.float32(_SMALL_INPUT), arrays[scale], offset, compute)


def _as_matrix(x: Any, matrix: Any, biases: list[Any], compute: Any) -> dict[str, Any]:
    result = np.asarray(compute(x), "float64")
    fitting = []
    for form, oriented in (("out_in", matrix.T), ("in_out", matrix)):
        if x.shape[-1] != oriented.shape[0] or result.shape != (*x.shape[:-1], oriented.shape[1]):
            continue
        if biases and biases[0].shape[0] != oriented.shape[1]:
            continue
        linear = x.astype("float64") @ oriented + (biases[0] if biases else 0.0)
        close = (
            np.abs(result - activated).max() <= _CLOSE * (np.abs(activated).max() + 1e-30)
            for activated in _iter_activations(linear)
        )
        if any(close):
            fitting.append(form)
    return {"kind": "dense", "form": fitting[0]} if len(fitting) == 1 else {}


def _iter_activations(x: Any) -> Iterator[Any]:
    """Yield the results of common activations."""
    sigmoid = 1 / (1 + np.exp(-x))
    yield from (x, np.maximum(x, 0), np.tanh(x), sigmoid, x * sigmoid, np.exp(x), np.log1p(np.exp(x)))
    yield np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)
    yield from (np.where(x > 0, x, slope * x) for slope in (0.01, 0.1, 0.2, 0.3))
    yield 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _as_norm(x: Any, scale: Any, offset: Any, compute: Any) -> dict[str, Any]:
    result = np.asarray(compute(x), "float64")
    x = x.astype("float64")
    best: tuple[float, dict[str, Any]] = (_CLOSE, {})
    for axis in (x.ndim - 1, 1):
        if result.shape != x.shape or x.shape[axis] != scale.shape[0]:
            continue
        along = [1] * x.ndim
        along[axis] = -1
        for kind, centred in (("layer_norm", x - x.mean(axis, keepdims=True)), ("rms_norm", x)):
            square = (centred**2).mean(axis, keepdims=True)
            for epsilon in _EPSILONS:
                normed = centred / np.sqrt(square + epsilon) * scale.reshape(along)
                normed = normed if offset is None else normed + offset.reshape(along)
                error = float(np.abs(result - normed).max() / (np.abs(normed).max() + 1e-30))
                if error < best[0]:
                    best = error, {"kind": kind, "epsilon": epsilon}
    return best[1]


_IMAGE_RANK = 3
UNKNOWN: dict[str, Any] = {"parts": None, "index": None}


class _OwnTensor(NamedTuple):
    """One of a model's tensors, or the result of operations on them alone.

    It is kept, because an id may be reused. `numbers` are those of the tensors whose features it has. Few
    layers take such a result, so that its entries get numbers when one does: `follow` gives them to it after
    its inputs have them.
    """

    tensor: Any
    numbers: tuple[int, ...] = ()
    inputs: tuple[Any, ...] = ()
    follow: Callable[[], None] | None = None


class Trace:
    """Entry numbers of every tensor of one call, and those of each module's inputs and outputs."""

    library = ""
    """what names the operations"""

    def __init__(self) -> None:
        self.activations = ActivationTracker()
        # Whether operations are reported at all, and whether one of them could not be followed.
        self.followed = self.failed = False
        # Also called for every operation, with its inputs and outputs.
        self.flow: Callable[[None, Any, Any], None] | None = None
        # Called with the name of every operation, its inputs and settings; what it returns, with the outputs.
        self.operation: Callable[[str, Any], Callable[[Any], None]] | None = None
        # Tensors are kept, because an id may be reused.
        self._entries: dict[int, tuple[Any, Any]] = {}
        self._visited: dict[int, dict[str, list[Any]]] = {}
        # The results that are the model's inputs.
        self._inputs: list[int] = []
        # The model's own tensors, and what operations make of them alone.
        self._own: dict[int, _OwnTensor] = {}
        # The first numbers of the model's tensors, and their shapes.
        self._constants: list[tuple[int, tuple[int, ...]]] = []

    def following(self) -> contextlib.AbstractContextManager[None]:
        """Trace the operations of the framework in a block, if it reports them."""
        raise NotImplementedError

    def add_own(self, tensor: Any, number: int | None = None) -> None:
        """Record one of the model's tensors, or TensorFlow's reference to it: a weight, a query, a table.

        With a number, the products with it are recorded under that.
        """
        if tensor is not None:
            self._own[id(tensor)] = _OwnTensor(tensor, () if number is None else (number,))

    def _derive(
        self, inputs: list[Any], outputs: list[Any], follow: Callable[[], None], *, same: bool
    ) -> None:
        """Record the results of an operation if all numbers that it takes are the model's own tensors'.

        Integers are settings: axes, positions. `follow` numbers the results; `same` means that they have the
        features of the inputs.
        """
        own = [self._own[id(tensor)] for tensor in inputs if id(tensor) in self._own]
        others = [tensor for tensor in inputs if id(tensor) not in self._own and tensor_shape(tensor)]
        if own and not any("float" in str(tensor.dtype) for tensor in others):
            numbers = tuple(number for one in own for number in one.numbers) if same else ()
            for tensor in outputs:
                self._own[id(tensor)] = _OwnTensor(tensor, numbers, tuple(one.tensor for one in own), follow)

    def _is_numbered(self, tensor: Any) -> bool:
        """Return whether a tensor's entries have numbers, after those of the model's own tensors got them."""
        own = self._own.get(id(tensor))
        if own is not None and not self.is_followed(tensor):
            if own.follow is None:
                self.put(tensor, self.activations.plain(tensor_shape(tensor)))
                self._constants.append(
                    (self._entries[id(tensor)][1].min(initial=1 << 62), tensor_shape(tensor))
                )
            elif all(self._is_numbered(one) for one in own.inputs):
                with contextlib.suppress(Exception):  # what cannot be followed is not known
                    own.follow()
        return self.is_followed(tensor)

    def _is_constant(self, row: Any) -> bool:
        return any(((row >= n) & (row < n + int(np.prod(shape)))).any() for n, shape in self._constants)

    def _is_flattened(self, row: Any) -> bool:
        """Return whether a row has entries of several axes of one of the model's tensors.

        The other framework may store its axes in another order.
        """
        for start, shape in self._constants:
            at = row[(row >= start) & (row < start + int(np.prod(shape)))] - start
            if len(at) and sum(len(np.unique(axis)) > 1 for axis in np.unravel_index(at, shape)) > 1:
                return True
        return False

    def _multiply(self, x: Any, matrix: Any, output: Any) -> None:
        """Record the product of a value with a matrix that has the features of own tensors."""
        own = self._own.get(id(matrix))
        if own is not None and self.is_followed(x):
            for number in dict.fromkeys(own.numbers):
                self._use(number, "in", x, -1)
                self._use(number, "out", output, -1)

    def is_followed(self, tensor: Any) -> bool:
        """Return whether the tensor's entries already have numbers."""
        return id(tensor) in self._entries

    def entries(self, tensor: Any) -> Any:
        """Return the numbers of a tensor's entries; assign new ones if it has none."""
        if not self._is_numbered(tensor):
            self.put(tensor, self.activations.plain(tensor_shape(tensor)))
        return self._entries[id(tensor)][1]

    def put(self, tensor: Any, entries: Any) -> None:
        """Record the numbers of a tensor's entries."""
        self._entries[id(tensor)] = tensor, entries

    def convolved(self, inputs: Any, outputs: Any, channel: int) -> None:
        """Record an operation from images to images."""
        if len(tensor_shape(inputs)) >= _IMAGE_RANK:
            self.activations.take(self.entries(inputs), channel % len(tensor_shape(inputs)))
        if len(tensor_shape(outputs)) >= _IMAGE_RANK:
            self.put(
                outputs, self.activations.image(tensor_shape(outputs), channel % len(tensor_shape(outputs)))
            )

    def kept(self, inputs: list[Any], outputs: Any) -> bool:
        """Record an elementwise operation; return whether it is one: a traced input has its shape."""
        same = [
            leaf for leaf in inputs if self.is_followed(leaf) and tensor_shape(leaf) == tensor_shape(outputs)
        ]
        if not same:
            return False
        for tensor in inputs:
            # Keras adds two layers' outputs for one input like a bias, without the batch axis.
            if tensor is not same[0] and self.is_followed(tensor):
                entries = self.entries(tensor)
                if entries.size == self.entries(same[0]).size:
                    self.activations.link(self.entries(same[0]), entries.reshape(tensor_shape(outputs)))
        self.put(outputs, self.entries(same[0]))
        return True

    def module(self, module: Any, inputs: Any, outputs: Any, axis: Callable[[int], int]) -> None:
        """Record one call of a module; `axis` maps a tensor's rank to its feature axis."""
        for side, value in (("in", inputs), ("out", outputs)):
            tensor = next(iter(list_tensors(value)), None)
            shape = tensor_shape(tensor)
            if len(shape) > 1 and self._is_numbered(tensor):
                self._use(id(module), side, tensor, axis(len(shape)))
            elif len(shape) > 1 and side == "in":
                # Its way here was not reported, e.g. through NumPy.
                self._visited.setdefault(id(module), {}).setdefault(side, []).append(None)

    def _use(self, number: int, side: str, tensor: Any, axis: int) -> None:
        moved = np.moveaxis(self.entries(tensor), axis, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        # The first position may be padding, or a class token.
        whole = np.flatnonzero((rows >= 0).all(1))
        from_inputs = [at for at in whole if not self._is_constant(rows[at])] if self._constants else whole
        row = rows[[*from_inputs, *whole, 0][0]]
        calls = self._visited.setdefault(number, {}).setdefault(side, [])
        calls.append(None if self._constants and self._is_flattened(row) else row)

    def border(self, value: Any, channel: int) -> None:
        """Record the model's inputs or outputs; their rank shows whether they are images."""
        for tensor in list_tensors(value):
            shape = tensor_shape(tensor)
            if len(shape) > _IMAGE_RANK:
                self.activations.unless_known(self.entries(tensor), channel % len(shape))
            elif shape:
                self.entries(tensor)

    def enter(self, value: Any) -> None:
        """Record the model's inputs as the origins of features."""
        for tensor in list_tensors(value):
            if tensor_shape(tensor):
                self._inputs += [
                    number for number, _ in self.activations.results(self.entries(tensor).ravel())
                ]

    def parts(self, calls: dict[int, int]) -> dict[int, dict[str, Any]]:
        """Return by module the parts of its input (see FeaturePart) and whether its output is used in parts.

        `calls` are the numbers of the modules' calls.
        """
        if self.failed:
            return {}
        origins: dict[int, tuple[str, int]] = {input_: ("input", n) for n, input_ in enumerate(self._inputs)}
        origins[-1] = MIXED, -1
        for module, number in sorted(calls.items(), key=lambda item: item[1]):
            for row in self._visited.get(module, {}).get("out", []):
                results = self.activations.results(row)
                if len(results) == 1:
                    origins.setdefault(results[0][0], ("call", number))
        parts_: dict[int, dict[str, Any]] = {}
        for module, sides in self._visited.items():
            input_results = [self.activations.results(row) for row in sides.get("in", []) if row is not None]
            joined = [call if len(call) > 1 else () for call in input_results]
            several = [tuple(FeaturePart(n, *origins.get(i, ("", -1))) for i, n in call) for call in joined]
            output_results = [row for row in sides.get("out", []) if row is not None]
            parts_[module] = {
                "parts": [[*part] for part in common_parts(several)],
                "cut": any(self.activations.is_cut(row) for row in output_results),
            }
        return parts_

    def orders(self) -> dict[int, dict[str, Any]]:
        """Return the orders of inputs and outputs by module, as documents."""
        if self.failed:
            return {}
        self.activations.finish()
        documents: dict[int, dict[str, Any]] = {}
        for module, sides in self._visited.items():
            for side, calls in sides.items():
                orders = [None if call is None else self.activations.order(call) for call in calls]
                known = orders[0]
                same = known is not None and all(order == known for order in orders)
                documents.setdefault(module, {})[side] = known.document() if same and known else UNKNOWN
        return documents


_RESHAPED = frozenset(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "unflatten"))
_MOVED = frozenset(
    [
        "permute",
        "transpose",
        "t",
        "numpy_T",
        "movedim",
        "swapaxes",
        "expand",
        "cat",
        "stack",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "slice",
        "select",
        "index",
        "index_select",
        "gather",
        "clone",
        "contiguous",
        "alias",
        "detach",
        "flip",
        "roll",
        "rot90",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "narrow",
        "repeat",
        "repeat_interleave",
        "constant_pad_nd",
        "unfold",
        "diagonal",
        "tile",
        "expand_copy",
        "view_copy",
    ]
)
_TORCH_CUTS = frozenset(
    ("split", "split_with_sizes", "slice", "select", "narrow", "unbind", "index", "index_select")
)
_CONVOLVES = ("conv", "_pool", "upsample", "grid_sampler", "im2col", "col2im")
# Their results may have the shape of their input.
_MIXES = (
    "mm",
    "linear",
    "matmul",
    "attention",
    "encoder_layer",
    "rnn",
    "lstm",
    "gru",
    "bilinear",
    "cumsum",
    "sort",
)
# The last two inputs are a value and a matrix.
_PRODUCTS = frozenset(("mm", "addmm"))
_TURNS = frozenset(("t", "transpose", "permute", "numpy_T"))
_WRITES = frozenset(
    ("copy_", "index_put_", "_index_put_impl_", "scatter_", "slice_scatter", "select_scatter")
)


class TorchTrace(Trace):
    """A call of a PyTorch model."""

    library = "torch"

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Trace operations in the block."""
        torch: Any = sys.modules["torch"]
        try:
            from torch.utils._python_dispatch import TorchDispatchMode
        except ImportError:
            self.failed = True
            yield
            return
        trace = self

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call,misc,unused-ignore]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                del types
                finish = None
                if trace.operation is not None:
                    inputs = [*args, *(kwargs or {}).values()]
                    finish = trace.operation(func._schema.name.partition("::")[2], inputs)
                result = func(*args, **(kwargs or {}))
                if finish is not None:
                    finish(result)
                if trace.flow is not None:
                    trace.flow(None, (args, kwargs or {}), result)
                if not trace.failed:
                    try:
                        trace._note(torch, func, args, kwargs or {}, result)
                    except Exception:  # noqa: BLE001 - what cannot be followed is not known
                        trace.failed = True
                return result

            if "torch._dynamo" not in sys.modules:
                # torch/_compile.py would import the compiler for this method, which takes longer than torch.
                setattr(__torch_dispatch__, "__dynamo_disable", __torch_dispatch__)

        mode: Any = Mode
        self.followed = True
        with mode():
            yield

    def _note(  # noqa: C901 - one operation after the other
        self, torch: Any, func: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        space, _, name = func._schema.name.partition("::")
        inputs, outputs = (
            [tensor for tensor in list_tensors(value) if isinstance(tensor, torch.Tensor) and tensor.ndim]
            for value in (args, result)
        )
        if not outputs:
            return
        if not any(self.is_followed(tensor) for tensor in inputs):
            follow = functools.partial(self._note, torch, func, args, kwargs, result)
            if not inputs:
                self.add_own(outputs[0])  # zeros, a range
            elif space == "aten" and name not in _WRITES:
                same = name in _TURNS or tensor_shape(inputs[0]) == tensor_shape(outputs[0])
                self._derive(inputs, outputs, follow, same=same)
            return
        if space != "aten" or name in _WRITES:
            if space == "aten" and self.kept(inputs[1:], outputs[0]) and _owns_storage(inputs[0]):
                return
            self.failed = True
            return
        if name in _RESHAPED:
            self.put(outputs[0], self.entries(inputs[0]).reshape(tensor_shape(outputs[0])))
        elif name in _MOVED or name.startswith(("as_strided", "_reshape")):
            self._moved(torch, func, args, kwargs, outputs, name)
        elif any(part in name for part in _CONVOLVES) and len(tensor_shape(inputs[0])) >= _IMAGE_RANK:
            self.convolved(inputs[0], outputs[0], 1)
        elif any(part in name for part in _MIXES) or not self.kept(inputs, outputs[0]):
            for output in outputs:
                self.put(output, self.activations.plain(tensor_shape(output)))
            if name in _PRODUCTS:
                self._multiply(inputs[-2], inputs[-1], outputs[0])
            if name == "glu":
                self.activations.cut(np.split(self.entries(inputs[0]), 2, (*args, -1)[1])[0])

    def _moved(self, torch: Any, func: Any, args: Any, kwargs: Any, outputs: list[Any], name: str) -> None:
        def numbers(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in value):
                return [numbers(item) for item in value]
            if isinstance(value, torch.Tensor):
                return torch.from_numpy(self.entries(value).copy())
            return value

        if name.startswith(("as_strided", "_reshape")) and not args[0].is_contiguous():
            again: Any = [
                self.activations.untracked(self.activations.plain(tensor_shape(output))) for output in outputs
            ]
        else:
            first_one, rest = numbers(args[0]), list(args[1:])
            if name == "constant_pad_nd":
                rest, kwargs = [args[1], -1], {}
            kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "memory_format")}
            again = [tensor.contiguous().numpy() for tensor in list_tensors(func(first_one, *rest, **kwargs))]
        if name == "pixel_unshuffle":
            self.activations.take(self.entries(args[0]), 1)
        for number, output in enumerate(outputs):
            self.put(output, again[number])
            if name in _TORCH_CUTS:
                self.activations.cut(again[number])
        if name == "pixel_shuffle":
            self.activations.take(again[0], 1)


def _owns_storage(tensor: Any) -> bool:
    return getattr(tensor, "_base", None) is None


_AGAIN = frozenset(
    [
        "Reshape",
        "ExpandDims",
        "Squeeze",
        "Identity",
        "StopGradient",
        "EnsureShape",
        "Transpose",
        "ConcatV2",
        "GatherV2",
        "Slice",
        "StridedSlice",
        "Split",
        "SplitV",
        "Unpack",
        "Pack",
        "Tile",
        "SpaceToDepth",
        "DepthToSpace",
        "ReverseV2",
        "Reverse",
        "BroadcastTo",
        "Roll",
        "MirrorPad",
    ]
)
_TENSORFLOW_CUTS = frozenset(("Split", "SplitV", "StridedSlice", "Slice", "Unpack", "GatherV2"))
# The image input.
_IMAGES = {"Conv2DBackpropInput": 2, "Conv3DBackpropInputV2": 2, "Conv3DBackpropInput": 2}
_IMAGE_WORDS = (
    "Conv",
    "MaxPool",
    "AvgPool",
    "ResizeNearest",
    "ResizeBilinear",
    "ResizeBicubic",
    "ResizeArea",
)
_MATRICES = ("MatMul", "Einsum", "Cumsum", "SelfAdjoint", "LSTM", "GRU", "Rnn", "RNN")
_INT64 = 9  # tensorflow/core/framework/types.proto


class TensorFlowTrace(Trace):
    """A call of a TensorFlow model, operation by operation."""

    library = "tensorflow"

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Trace operations in the block."""
        tensorflow: Any = sys.modules.get("tensorflow")
        try:
            from tensorflow.python.eager import execute
            from tensorflow.python.framework import op_callbacks

            eager = bool(tensorflow.executing_eagerly())
            before = tensorflow.config.functions_run_eagerly()
        except (ImportError, AttributeError):
            eager = False
        if not eager:
            self.failed = True
            yield
            return

        def noted(
            op: Any, inputs: Any, attrs: Any, outputs: Any, op_name: Any = None, graph: Any = None
        ) -> None:
            del op_name
            if graph is not None:
                return
            if self.flow is not None:
                self.flow(None, list(inputs), list(outputs))
            name = op.decode() if isinstance(op, bytes) else str(op)
            if self.operation is not None:
                self.operation(name, list(inputs))(list(outputs))
            if self.failed:
                return
            try:
                self._note(execute, name, list(inputs), attrs, list(outputs))
            except Exception:  # noqa: BLE001 - what cannot be followed is not known
                self.failed = True

        self.followed = True
        tensorflow.config.run_functions_eagerly(True)
        op_callbacks.add_op_callback(noted)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(noted)
            tensorflow.config.run_functions_eagerly(before)

    def _note(  # noqa: C901 - one operation after the other
        self, execute: Any, op: str, inputs: list[Any], attrs: Any, outputs: list[Any]
    ) -> None:
        if op == "ReadVariableOp" and id(inputs[0]) in self._own:
            self.add_own(outputs[0], *self._own[id(inputs[0])].numbers)
            return
        if not outputs:
            return
        if not any(self.is_followed(input_) for input_ in inputs):
            same = op == "Transpose" or tensor_shape(inputs[0] if inputs else None) == tensor_shape(
                outputs[0]
            )
            self._derive(inputs, outputs, lambda: self._note(execute, op, inputs, attrs, outputs), same=same)
            return
        x = inputs[0]
        if op == "IdentityN":
            for number, output in enumerate(outputs):
                self.put(output, self.entries(inputs[number]))
        elif op in ("Pad", "PadV2"):
            self.put(outputs[0], np.pad(self.entries(x), inputs[1].numpy(), constant_values=-1))
        elif op in _AGAIN and (op != "GatherV2" or self.is_followed(x)):
            self._again(execute, op, inputs, attrs, outputs)
        elif any(word in op for word in _IMAGE_WORDS):
            form = dict(_attribute_pairs(attrs)).get("data_format", b"")
            form = form.decode() if isinstance(form, bytes) else str(form)
            self.convolved(inputs[_IMAGES.get(op, 0)], outputs[0], 1 if form.startswith("NC") else -1)
        elif any(word in op for word in _MATRICES) or not self.kept(inputs, outputs[0]):
            for tensor in outputs:
                self.put(tensor, self.activations.plain(tensor_shape(tensor)))
            if op in ("MatMul", "BatchMatMulV2"):
                self._multiply(x, inputs[1], outputs[0])

    def _again(self, execute: Any, op: str, inputs: list[Any], attrs: Any, outputs: list[Any]) -> None:
        tensorflow: Any = sys.modules["tensorflow"]
        several = {"Split": range(1, 2), "Pack": range(len(inputs)), "ConcatV2": range(len(inputs) - 1)}
        data = several.get(op, range(1))
        arguments = [
            tensorflow.constant(self.entries(value)) if n in data else value for n, value in enumerate(inputs)
        ]
        # None stands for the default, which an operation itself does not accept.
        given_attributes = ((k, value) for k, value in _attribute_pairs(attrs) if value is not None)
        pairs = [(k, _INT64 if k in ("T", "Tparams") else value) for k, value in given_attributes]
        flat = tuple(part for pair in pairs for part in pair)
        from tensorflow.python.eager import context

        last = dict(pairs).get("data_format") in (None, b"NHWC", "NHWC")
        if op == "SpaceToDepth" and last:
            self.activations.take(self.entries(inputs[0]), -1)
        results = execute.quick_execute(op, len(outputs), arguments, flat, context.context())
        for number, output in enumerate(outputs):
            self.put(output, results[number].numpy())
            if op in _TENSORFLOW_CUTS:
                self.activations.cut(self.entries(output))
        if op == "DepthToSpace" and last:
            self.activations.take(self.entries(outputs[0]), -1)


def _attribute_pairs(attrs: Any) -> list[tuple[str, Any]]:
    return [(attrs[n], attrs[n + 1]) for n in range(0, len(attrs or ()), 2)]


def create_tracer(framework: str) -> Trace | None:
    """Return the tracer for a framework; None if there is none."""
    try:
        if framework == "torch":
            return TorchTrace()
        return TensorFlowTrace() if framework == "tensorflow" else None
    except (ImportError, TrackingLimitError):
        return None
