"""Trace the entries of activations through a call of a user's model.

See ckpttool.core.activations. PyTorch reports every operation to a dispatch mode
(torch/utils/_python_dispatch.py), TensorFlow to an operation callback
(tensorflow/python/framework/op_callbacks.py). Operations that only move entries are repeated on the
entries' numbers.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Callable, Iterator  # noqa: UP035 - Python 3.7's

from ckpttool.core.activations import ActivationTracker, TrackingLimitError

_IMAGE_RANK = 3
UNKNOWN: dict[str, Any] = {"parts": None, "index": None}


class Trace:
    """Entry numbers of every tensor of one call, and those of each module's inputs and outputs."""

    def __init__(self) -> None:
        self.activations = ActivationTracker()
        self.failed = False
        # Also called for every operation, with its inputs and outputs.
        self.flow: Callable[[None, Any, Any], None] | None = None
        # Tensors are kept, because an id may be reused.
        self._entries: dict[int, tuple[Any, Any]] = {}
        self._seen: dict[int, dict[str, list[Any]]] = {}
        # Variables by their handles, and the tensors read from them: kept, because an id may be reused.
        self._handles: dict[int, tuple[Any, int]] = {}
        self._read: dict[int, tuple[Any, int]] = {}

    def weigh(self, number: int, handle: Any) -> None:
        """Record under a number the products with a variable; `handle` is TensorFlow's reference to it."""
        if handle is not None:
            self._handles[id(handle)] = handle, number

    def is_followed(self, tensor: Any) -> bool:
        """Return whether the tensor's entries already have numbers."""
        return id(tensor) in self._entries

    def entries(self, tensor: Any) -> Any:
        """Return the numbers of a tensor's entries; assign new ones if it has none."""
        if id(tensor) not in self._entries:
            self.put(tensor, self.activations.plain(tensor_shape(tensor)))
        return self._entries[id(tensor)][1]

    def put(self, tensor: Any, entries: Any) -> None:
        """Record the numbers of a tensor's entries."""
        self._entries[id(tensor)] = tensor, entries

    def convolved(self, taken: Any, made: Any, channel: int) -> None:
        """Record an operation from images to images."""
        if len(tensor_shape(taken)) >= _IMAGE_RANK:
            self.activations.take(self.entries(taken), channel % len(tensor_shape(taken)))
        if len(tensor_shape(made)) >= _IMAGE_RANK:
            self.put(made, self.activations.image(tensor_shape(made), channel % len(tensor_shape(made))))

    def kept(self, given: list[Any], made: Any) -> bool:
        """Record an elementwise operation; return whether it is one: a traced input has its shape."""
        same = [each for each in given if self.is_followed(each) and tensor_shape(each) == tensor_shape(made)]
        if not same:
            return False
        for each in given:
            # Keras adds two layers' outputs for one input like a bias, without the batch axis.
            if each is not same[0] and self.is_followed(each):
                entries = self.entries(each)
                if entries.size == self.entries(same[0]).size:
                    self.activations.link(self.entries(same[0]), entries.reshape(tensor_shape(made)))
        self.put(made, self.entries(same[0]))
        return True

    def module(self, module: Any, given: Any, made: Any, axis: Callable[[int], int]) -> None:
        """Record one call of a module; `axis` maps a tensor's rank to its feature axis."""
        for side, value in (("in", given), ("out", made)):
            tensor = first_tensor(value)
            shape = tensor_shape(tensor)
            if len(shape) > 1 and (side == "in" or self.is_followed(tensor)):
                self._use(id(module), side, tensor, axis(len(shape)))

    def _use(self, number: int, side: str, tensor: Any, axis: int) -> None:
        moved = self.activations.numpy.moveaxis(self.entries(tensor), axis, -1)
        rows = moved.reshape(-1, moved.shape[-1])
        # The first position may be padding.
        whole = self.activations.numpy.flatnonzero((rows >= 0).all(1))
        self._seen.setdefault(number, {}).setdefault(side, []).append(rows[whole[0] if len(whole) else 0])

    def given(self, arrays: list[Any]) -> list[Any]:
        """Return the model's inputs as traced tensors; images have channels last."""
        torch = sys.modules["torch"] if isinstance(self, TorchTrace) else None
        constant: Any = torch.from_numpy if torch is not None else sys.modules["tensorflow"].constant
        tensors = [constant(each) for each in arrays]
        self.border(tensors, -1)
        return tensors

    def border(self, value: Any, channel: int) -> None:
        """Record the model's inputs or outputs; their rank shows whether they are images."""
        for tensor in iter_tensors(value):
            shape, entries = tensor_shape(tensor), self.entries(tensor)
            if len(shape) > _IMAGE_RANK:
                self.activations.unless_known(entries, channel % len(shape))

    def orders(self) -> dict[int, dict[str, Any]]:
        """Return the orders of inputs and outputs by module, as documents."""
        if self.failed:
            return {}
        self.activations.finish()
        found: dict[int, dict[str, Any]] = {}
        for module, sides in self._seen.items():
            for side, calls in sides.items():
                orders = [self.activations.order(each) for each in calls]
                known = orders[0]
                same = known is not None and all(each == known for each in orders)
                found.setdefault(module, {})[side] = known.document() if same and known else UNKNOWN
        return found


def first_tensor(value: Any) -> Any:
    """Return the first tensor of a nested value."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value


def iter_tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors of a nested value."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from iter_tensors(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from iter_tensors(each)
    elif tensor_shape(value):
        yield value


def tensor_shape(value: Any) -> tuple[int, ...]:
    """Return the shape with 1 for every free axis; () for what has none, e.g. a lazy parameter."""
    try:
        return tuple(1 if extent is None else int(extent) for extent in value.shape)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return ()


# PyTorch.

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
_WRITES = frozenset(
    ("copy_", "index_put_", "_index_put_impl_", "scatter_", "slice_scatter", "select_scatter")
)


class TorchTrace(Trace):
    """A call of a PyTorch model."""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Trace operations in the block; do nothing if this PyTorch does not support it."""
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
                made = func(*args, **(kwargs or {}))
                if not trace.failed:
                    try:
                        trace._note(torch, func, args, kwargs or {}, made)
                    except Exception:  # noqa: BLE001 - what cannot be followed is not known
                        trace.failed = True
                return made

        mode: Any = Mode
        with mode():
            yield

    def _note(self, torch: Any, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        space, _, name = func._schema.name.partition("::")
        given = [each for value in args for each in iter_tensors(value) if isinstance(each, torch.Tensor)]
        outputs = [each for each in iter_tensors(made) if isinstance(each, torch.Tensor)]
        if not outputs or not any(self.is_followed(each) for each in given):
            return
        if space != "aten" or name in _WRITES:
            if space == "aten" and self.kept(given[1:], outputs[0]) and _owns_storage(given[0]):
                return
            self.failed = True
            return
        if name in _RESHAPED:
            self.put(outputs[0], self.entries(given[0]).reshape(tensor_shape(outputs[0])))
        elif name in _MOVED or name.startswith(("as_strided", "_reshape")):
            self._moved(torch, func, args, kwargs, outputs, name)
        elif any(part in name for part in _CONVOLVES) and len(tensor_shape(given[0])) >= _IMAGE_RANK:
            self.convolved(given[0], outputs[0], 1)
        elif any(part in name for part in _MIXES) or not self.kept(given, outputs[0]):
            for each in outputs:
                self.put(each, self.activations.plain(tensor_shape(each)))

    def _moved(self, torch: Any, func: Any, args: Any, kwargs: Any, outputs: list[Any], name: str) -> None:
        def numbers(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value):
                return [numbers(each) for each in value]
            if isinstance(value, torch.Tensor):
                return torch.from_numpy(self.entries(value).copy())
            return value

        if name.startswith(("as_strided", "_reshape")) and not args[0].is_contiguous():
            again: Any = [
                self.activations.untracked(self.activations.plain(tensor_shape(each))) for each in outputs
            ]
        else:
            first_one, rest = numbers(args[0]), list(args[1:])
            if name == "constant_pad_nd":
                rest, kwargs = [args[1], -1], {}
            kwargs = {key: value for key, value in kwargs.items() if key not in ("dtype", "memory_format")}
            again = [each.contiguous().numpy() for each in iter_tensors(func(first_one, *rest, **kwargs))]
        if name == "pixel_unshuffle":
            self.activations.take(self.entries(args[0]), 1)
        for number, each in enumerate(outputs):
            self.put(each, again[number])
        if name == "pixel_shuffle":
            self.activations.take(again[0], 1)


def _owns_storage(tensor: Any) -> bool:
    return getattr(tensor, "_base", None) is None


# TensorFlow.

_SAME_NUMBERS = frozenset(("Reshape", "ExpandDims", "Squeeze"))
_AGAIN = frozenset(
    [
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

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Trace operations in the block; do nothing if this TensorFlow does not support it."""
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
            if self.failed:
                return
            try:
                name = op.decode() if isinstance(op, bytes) else str(op)
                self._note(execute, name, list(inputs), attrs, list(outputs))
            except Exception:  # noqa: BLE001 - what cannot be followed is not known
                self.failed = True

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
        if op == "ReadVariableOp" and id(inputs[0]) in self._handles:
            self._read[id(outputs[0])] = outputs[0], self._handles[id(inputs[0])][1]
        if op in ("Cast", "Identity") and inputs and id(inputs[0]) in self._read:
            self._read[id(outputs[0])] = outputs[0], self._read[id(inputs[0])][1]
        if not outputs or not any(self.is_followed(each) for each in inputs):
            return
        x = inputs[0]
        if op in _SAME_NUMBERS:
            self.put(outputs[0], self.entries(x).reshape(tensor_shape(outputs[0])))
        elif op in ("Identity", "StopGradient", "EnsureShape"):
            self.put(outputs[0], self.entries(x))
        elif op == "IdentityN":
            for number, made in enumerate(outputs):
                self.put(made, self.entries(inputs[number]))
        elif op == "Transpose":
            self.put(outputs[0], self.entries(x).transpose(inputs[1].numpy()))
        elif op == "ConcatV2":
            numpy = self.activations.numpy
            whole = numpy.concatenate([self.entries(each) for each in inputs[:-1]], int(inputs[-1]))
            self.put(outputs[0], whole)
        elif op in ("Pad", "PadV2"):
            numpy = self.activations.numpy
            self.put(outputs[0], numpy.pad(self.entries(x), inputs[1].numpy(), constant_values=-1))
        elif op == "GatherV2" and self.is_followed(x):
            numpy = self.activations.numpy
            taken = numpy.take(self.entries(x), inputs[1].numpy(), axis=int(inputs[2]))
            self.put(outputs[0], taken.reshape(tensor_shape(outputs[0])))
        elif op in _AGAIN:
            self._again(execute, op, inputs, attrs, outputs)
        elif any(word in op for word in _IMAGE_WORDS):
            form = dict(_attribute_pairs(attrs)).get("data_format", b"")
            form = form.decode() if isinstance(form, bytes) else str(form)
            self.convolved(inputs[_IMAGES.get(op, 0)], outputs[0], 1 if form.startswith("NC") else -1)
        elif any(word in op for word in _MATRICES) or not self.kept(inputs, outputs[0]):
            for each in outputs:
                self.put(each, self.activations.plain(tensor_shape(each)))
            if op in ("MatMul", "BatchMatMulV2") and id(inputs[1]) in self._read and self.is_followed(x):
                number = self._read[id(inputs[1])][1]
                self._use(number, "in", x, -1)
                self._use(number, "out", outputs[0], -1)

    def _again(self, execute: Any, op: str, inputs: list[Any], attrs: Any, outputs: list[Any]) -> None:
        tensorflow: Any = sys.modules["tensorflow"]
        data = {"Split": [1], "Pack": range(len(inputs))}.get(op, [0])
        given = [
            tensorflow.constant(self.entries(each)) if n in data else each for n, each in enumerate(inputs)
        ]
        pairs = [(key, _INT64 if key == "T" else value) for key, value in _attribute_pairs(attrs)]
        flat = tuple(part for pair in pairs for part in pair)
        from tensorflow.python.eager import context

        last = dict(pairs).get("data_format") in (None, b"NHWC", "NHWC")
        if op == "SpaceToDepth" and last:
            self.activations.take(self.entries(inputs[0]), -1)
        made = execute.quick_execute(op, len(outputs), given, flat, context.context())
        for number, each in enumerate(outputs):
            self.put(each, made[number].numpy())
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
