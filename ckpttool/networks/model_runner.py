"""Run any model with its own framework in a child process, and record what its layers compute."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import itertools
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ckpttool.core import sandbox
from ckpttool.core.errors import UnsupportedError, UsageError, WorkerError
from ckpttool.core.graph_layers import GraphLayer, GraphOperation, LayerGrouping
from ckpttool.networks import model_child, model_training
from ckpttool.networks.messages import Message, end_process, message_pipes, serve
from ckpttool.networks.model_child import ModelSession, class_bases, last_error_line, model_framework
from ckpttool.networks.model_training import paired

# The syntax of this file is Python 3.7's, because environments with old frameworks have old interpreters.

_BATCH = 2
_QUANTILES = 17
_MOST_TRIED = 4
ROOT = "(model)"


# Values of any framework as arrays by name.


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


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def named_tensors(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the tensors of a nested result with their names; a single one is called `output`."""
    if _is_tensor(value):
        return [(name or "output", value)]
    if hasattr(value, "items"):
        parts = [(str(key), each) for key, each in value.items()]
    elif hasattr(value, "_fields"):
        parts = list(paired(value._fields, value))
    elif isinstance(value, (list, tuple)):
        parts = [(str(number), each) for number, each in enumerate(value)]
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        parts = [(each, getattr(value, each)) for each in value.__dataclass_fields__]
    else:
        return []
    if len(parts) == 1 and isinstance(value, (list, tuple)):
        return named_tensors(parts[0][1], name)
    return [row for key, each in parts for row in named_tensors(each, name + "/" + key if name else key)]


def _tensors(value: Any) -> list[Any]:
    return [tensor for _, tensor in named_tensors(value)]


def describe_tensor(name: str, tensor: Any) -> dict[str, Any]:
    """Return the shape of a tensor, and a description of its values that no reordering changes."""
    array = view_array(tensor)
    flat = np.sort(array.reshape(-1).astype(np.float32, copy=False))
    flat += np.float32(0)  # the two zeros are one number
    at = np.linspace(0, max(flat.size - 1, 0), _QUANTILES).astype(int)
    return {
        "name": name,
        "shape": list(array.shape),
        "dtype": array.dtype.name,
        "values": hashlib.sha256(flat.data).hexdigest(),
        "constant": bool(flat.size == 0 or flat[0] == flat[-1]),
        "quantiles": [float(each) for each in flat[at]] if flat.size else [],
    }


class CallRecorder:
    """Calls of a model's layers in order: layer, numbers, and the arrays of the wanted calls."""

    def __init__(self, wanted: set[tuple[str, int]] | None = None, folder: Path | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self.kept: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._counts: dict[str, int] = {}
        self._wanted, self._folder = wanted, folder

    def enter(self, path: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """Record the start of a call; return its record, which `leave` completes."""
        number = self._counts.get(path, 0)
        self._counts[path] = number + 1
        record: dict[str, Any] = {"path": path, "number": number, "saved": {}}
        record["options"] = model_child.plain_settings(kwargs) if hasattr(kwargs, "items") else {}
        if self._wanted is not None and (path, number) not in self._wanted:
            return None
        if self._wanted is not None:
            record["given"] = self._arrays("given", (args, kwargs))
            self.kept[path, number] = args, kwargs
        return record

    def before_activation(self, record: dict[str, Any], value: Any) -> None:
        """Record what a layer passes to its activation."""
        if "before" not in record:
            record["before"] = self._arrays("before", value)

    def leave(self, record: dict[str, Any] | None, made: Any) -> None:
        """Record the end of a call with its result."""
        if record is not None:
            record["made"] = self._arrays("made", made)
            self.calls.append(record)

    def _arrays(self, what: str, value: Any) -> list[dict[str, Any]]:
        rows = []
        for place, tensor in enumerate(_tensors(value)):
            try:
                array = view_array(tensor)
            except Exception:  # noqa: BLE001, S112 - a symbolic tensor has no values
                continue
            row = {"shape": list(array.shape), "kind": array.dtype.kind, "largest": _largest(array)}
            if self._folder is not None:
                name = f"call-{len(self.calls)}-{what}-{place}-{len(os.listdir(self._folder))}.npy"
                np.save(self._folder / name, array, allow_pickle=False)
                row["file"] = name
            rows.append(row)
        return rows


def _largest(array: Any) -> float:
    """Return the largest finite magnitude, 0 without numbers."""
    if array.dtype.kind not in "fiub" or not array.size:
        return 0.0
    found = float(np.maximum(float(array.max()), -float(array.min())))
    if np.isfinite(found):
        return found
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


class ModelRunner:
    """A model that can be called; one subclass per framework."""

    framework = ""
    libraries: tuple[str, ...] = ()
    observable = True

    def __init__(self, model: Any) -> None:
        self.model = model
        self.style = 0
        self.exact: Any = None
        self.notes: list[str] = []
        self._recorder: CallRecorder | None = None

    def inputs(self) -> list[dict[str, Any]]:
        """Return the inputs that the model declares: name, shape without batch, dtype, batch."""
        return []

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs of the model in evaluation mode."""
        styles = self.styles(names, [self.tensor(each, exact=exact) for each in arrays])
        model = self.exact if exact else self.model
        return styles[self.style](model)

    def styles(self, names: list[str], given: list[Any]) -> list[Callable[[Any], Any]]:
        """Return the ways of passing inputs: by position, by name, as a dict."""
        by_name = dict(paired(names, given))
        return [lambda f: f(*given), lambda f: f(**by_name), lambda f: f(by_name)]

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return the array as the framework's tensor."""
        return array.astype(np.float64) if exact and array.dtype == np.float32 else array

    def named(self, made: Any) -> list[tuple[str, Any]]:
        """Return the outputs by name."""
        return named_tensors(made)

    def outputs(self, made: Any) -> list[tuple[str, Any]]:
        """Return the named output arrays."""
        return [(name, to_array(tensor)) for name, tensor in self.named(made)]

    def make_exact(self, names: list[str], arrays: list[Any]) -> None:
        """Create the model in float64; raise any error if that is impossible."""
        del names, arrays
        raise UnsupportedError(f"{self.framework} models of this kind have no float64 form")

    def layers(self) -> list[dict[str, Any]]:
        """Return path, class, settings and tensors (the framework's, by name) of every layer."""
        return []

    @contextlib.contextmanager
    def observe(self, recorder: CallRecorder, *, exact: bool = False) -> Iterator[None]:
        """Record the calls of all layers in the block: `call` records those of a graph."""
        del exact
        self._recorder = recorder
        try:
            yield
        finally:
            self._recorder = None

    def load(self, file: str, part: str | None = None, *, run_code: bool = False) -> list[str]:
        """Load the file, or a part of it, strictly with the framework's own loader; return notes.

        With `run_code`, a pickle may contain any classes: reading it runs their code.
        """
        del part, run_code
        raise UnsupportedError("this model cannot load a file", found=file)

    def round_weights(self, dtype: str) -> None:
        """Round all weights to a shorter type; they keep their own."""
        raise UnsupportedError(f"{self.framework} models of this kind have no variables", expected=dtype)

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return the result of one layer for a recorded call, with other tensors or settings."""
        del path, call, changes, exact
        raise UnsupportedError("layers of this model cannot be called alone")

    def versions(self) -> dict[str, str]:
        """Return the versions of the libraries that run the model."""
        loaded = {name: sys.modules[name] for name in self.libraries if name in sys.modules}
        return {name: str(getattr(module, "__version__", "?")) for name, module in loaded.items()}

    def channels(self) -> str:
        """Return where the model's convolutions expect channels: first, last or "" if it has none."""
        first = self.framework in ("torch", "onnx") and any("Conv" in each["class"] for each in self.layers())
        return "first" if first else ""


def _layer_row(path: str, cls: str, settings: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    return {"path": path or ROOT, "class": cls, "name": cls, "settings": settings, "tensors": tensors}


@contextlib.contextmanager
def _refusals(reader: str, file: str, hint: str | None = None) -> Iterator[None]:
    """Raise UsageError for whatever a library's reader raises."""
    try:
        yield
    except Exception as error:
        raise UsageError(f"{reader}: {_all_lines(error)}", file=file, hint=hint) from error


_CONVERT = "convert the checkpoint to this model first: ckpttool convert --like"


# PyTorch: modules of a factory, and TorchScript.

_PREFERRED = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")


class TorchRunner(ModelRunner):
    """A torch.nn.Module."""

    framework = "torch"
    libraries = ("torch",)

    def __init__(self, model: Any) -> None:
        super().__init__(model.eval())
        self._torch: Any = sys.modules["torch"]

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return a torch tensor; integers as int64, numbers in the only type of the parameters."""
        if array.dtype.kind in "iu":
            array = array.astype(np.int64)
        made = self._torch.from_numpy(np.ascontiguousarray(super().tensor(array, exact=exact)))
        if exact or not made.is_floating_point():
            return made
        own = {each.dtype for each in self.model.parameters() if each.is_floating_point()}
        return made.to(own.pop()) if len(own) == 1 else made

    def styles(self, names: list[str], given: list[Any]) -> list[Callable[[Any], Any]]:
        """Return the ways of passing inputs; several go by name first if the model has these parameters."""
        by_place, by_name, as_dict = super().styles(names, given)
        if len(names) > 1 and {*inspect.signature(self.model.forward).parameters}.issuperset(names):
            return [by_name, by_place, as_dict]
        return [by_place, by_name, as_dict]

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs without gradients."""
        with self._torch.no_grad():
            return super().call(names, arrays, exact=exact)

    def make_exact(self, names: list[str], arrays: list[Any]) -> None:
        """Create a copy in float64."""
        del names, arrays
        self.exact = copy.deepcopy(self.model).double().eval()

    def layers(self) -> list[dict[str, Any]]:
        """Return every module by its name in `named_modules`."""
        found = []
        for path, module in self.model.named_modules():
            held = vars(module) if "_parameters" in vars(module) else {}
            own = dict(module.named_parameters(recurse=False))
            own.update(module.named_buffers(recurse=False))
            cls = getattr(module, "original_name", None) or model_child.framework_class(module)
            tensors = {name: each for name, each in own.items() if not _is_missing(each)}
            row = _layer_row(path, cls, model_child.plain_settings(held), tensors)
            found.append(dict(row, name=type(module).__name__))
        return found

    @contextlib.contextmanager
    def observe(self, recorder: CallRecorder, *, exact: bool = False) -> Iterator[None]:
        """Record every module's calls by hooks."""
        hooks: list[Any] = []
        records: list[Any] = []

        def attach(module: Any, path: str) -> None:
            def begin(_: Any, args: Any, kwargs: Any) -> None:
                records.append(recorder.enter(path, args, kwargs))

            def end(_: Any, __: Any, ___: Any, made: Any) -> None:
                recorder.leave(records.pop(), made)

            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(end, with_kwargs=True))

        try:
            for path, module in (self.exact if exact else self.model).named_modules():
                attach(module, path or ROOT)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def load(self, file: str, part: str | None = None, *, run_code: bool = False) -> list[str]:
        """Load a state_dict strictly, from a torch, safetensors or npz file."""
        held = _read_torch_file(self._torch, file, run_code=run_code)
        found = [(repr(name) if name else "", each) for name, each in _state_dicts(held)]
        if part is not None:
            found = [(repr(part), _part_of(held, part.strip("/").split("/")))]
        if not found or found[0][1] is None:
            raise UsageError("the file contains no state_dict", file=file, path=part)
        found += [
            (f"{name} without {each}".lstrip(), bare)
            for name, whole in found
            for each, bare in _unwrapped(whole)
        ]
        fitting: list[str] = []
        first: Exception | None = None
        for name, held in found:
            try:
                if not fitting:
                    self.model.load_state_dict(held, strict=True)
                elif {*held} != {*self.model.state_dict()}:
                    continue
                fitting.append(name)
            except Exception as error:  # noqa: BLE001 - a hook of the user's model may raise anything
                first = first or error
        if not fitting:
            raise UsageError(
                f"load_state_dict(strict=True) refuses the file: {_all_lines(first)}",
                file=file,
                hint=_CONVERT,
            )
        also = f"; {', '.join(fitting[1:])} would fit, too" if fitting[1:] else ""
        return [f"the state_dict {fitting[0]} of the file was loaded{also}"] if fitting[0] or also else []

    def round_weights(self, dtype: str) -> None:
        """Round parameters and buffers."""
        short = getattr(self._torch, dtype)
        with self._torch.no_grad():
            for each in itertools.chain(self.model.parameters(), self.model.buffers()):
                if each.is_floating_point():
                    each.copy_(each.to(short).to(each.dtype))

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return a module's result with changed tensors and settings, which are restored afterwards."""
        model = self.exact if exact else self.model
        module = model if path == ROOT else _submodule(model, path)
        held: Any
        with contextlib.ExitStack() as undo, self._torch.no_grad():
            for full, array in changes["tensors"].items():
                part, _, name = full.rpartition("/")
                owner = _submodule(module, part.replace("/", "."))
                held = getattr(owner, name, None)
                value = self._torch.from_numpy(np.ascontiguousarray(array))
                value = value.to(next((each.dtype for each in module.parameters()), value.dtype))
                if held is None:
                    undo.callback(setattr, owner, name, None)
                    setattr(owner, name, self._torch.nn.Parameter(value))
                else:
                    undo.callback(setattr, held, "data", held.data)
                    held.data = value.to(held.dtype)
            for name, value in changes["settings"].items():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, tuple(value) if isinstance(value, list) else value)
            return module(*call[0], **call[1])


def _submodule(module: Any, path: str) -> Any:
    """Return a module by its path; programs have no get_submodule."""
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module


def _is_missing(tensor: Any) -> bool:
    """Return whether a parameter has no values: none at all, or those of the first call."""
    return tensor is None or type(tensor).__name__.startswith("Uninitialized")


class ScriptRunner(TorchRunner):
    """A TorchScript program, whose calls of modules are extra results of a copy of its graph.

    Hooks do not fire inside a program. A module called in a branch or a loop of the graph is not recorded.
    """

    observe = ModelRunner.observe

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs; with a recorder, those of the copy of the graph."""
        if self._recorder is None:
            return super().call(names, arrays, exact=exact)
        model = self.exact if exact else self.model
        given = [self.tensor(each, exact=exact) for each in arrays]
        with self._torch.no_grad():
            return self.styles(names, given)[self.style](
                lambda *args, **kwargs: self._record(model, "", "forward", _positional(model, args, kwargs))
            )

    def _record(self, module: Any, path: str, method: str, args: list[Any]) -> Any:
        """Call a method of a module and record it, and the calls inside it; return the result."""
        assert self._recorder is not None  # noqa: S101 - set while calls are recorded
        record = self._recorder.enter(path or ROOT, args, {}) if method.startswith("forward") else None
        observed, calls = _observed_method(self._torch, module._c._get_method(method))
        values: list[Any]
        made, *values = observed(module, *args) if calls else (getattr(module, method)(*args),)
        for name, inner, count in calls:
            given, values = list(values[:count]), values[count:]
            part = _submodule(module, name)
            below = ".".join(filter(None, (path, name)))
            nodes = part._c._get_method(inner).graph.nodes()
            if any(node.kind() == "prim::CallMethod" for node in nodes):
                self._record(part, below, inner, given)
            elif inner.startswith("forward"):
                self._recorder.leave(self._recorder.enter(below, given, {}), values[0])
            values = values[1:]
        if method.startswith("forward"):
            self._recorder.leave(record, made)
        return made


def _positional(model: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of a program's forward method by position, defaults included."""
    rest = model._c._get_method("forward").schema.arguments[1 + len(args) :]
    held = [each for each in rest if each.name in kwargs or each.has_default_value()]
    return [*args, *(kwargs.get(each.name, each.default_value) for each in held)]


def _module_path(value: Any) -> str:
    """Return the path of the module that a value of a graph is, from the graph's own module."""
    steps = []  # type: list[str]
    while value.node().kind() == "prim::GetAttr":
        steps.insert(0, value.node().s("name"))
        value = value.node().input()
    return ".".join(steps)


def _observed_method(torch: Any, method: Any) -> tuple[Any, list[tuple[str, str, int]]]:
    """Return a method that also returns inputs and results of the calls in it, and those calls in order.

    A call is the module's path, the method, and the number of inputs.
    """
    graph = method.graph.copy()
    calls = []
    for node in list(graph.nodes()):
        if node.kind() == "prim::CallMethod":
            module, *given = node.inputs()
            calls.append((_module_path(module), node.s("name"), len(given)))
            for value in (*given, node.output()):
                graph.registerOutput(value)
    if not calls:
        return None, []
    graph.makeMultiOutputIntoTuple()
    return torch._C._create_function_from_graph("observed", graph), calls


def _all_lines(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:600]


def _read_torch_file(torch: Any, file: str, *, run_code: bool) -> Any:
    if file.endswith(".npz"):
        with _refusals("NumPy refuses the file", file), np.load(file, allow_pickle=False) as held:
            return {name: torch.from_numpy(held[name]) for name in held.files}
    if file.endswith(".safetensors"):
        return _read_safetensors(file)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        # A pickle of other objects than tensors; with any other error it is no file of torch.
        names_code = isinstance(error, pickle.UnpicklingError)
        if names_code and run_code:
            return _unpickle(torch, file)
        named = re.search(r"GLOBAL (\S{1,200})", str(error))
        why = str(error).splitlines()[0][:200] if named is None else f"it uses {named[1]}"
        raise UsageError(
            f"torch.load(weights_only=True) refuses the file: {why}",
            file=file,
            hint="add --run-code if you trust the file: reading it then runs the code that it names"
            if names_code
            else None,
        ) from error


def _unpickle(torch: Any, file: str) -> Any:
    """Return what a pickle of any classes contains; this runs their code, in this process."""
    try:
        return torch.load(file, map_location="cpu", weights_only=False)
    except Exception as error:
        raise UsageError(
            f"torch.load(weights_only=False) refuses the file: {last_error_line(error)}",
            file=file,
            hint="add the folder of the module that defines its classes to PYTHONPATH"
            if isinstance(error, (ImportError, AttributeError))
            else None,
        ) from error


def _read_safetensors(file: str) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise UsageError(
            "safetensors is not installed in the environment that runs the model",
            file=file,
            hint="run pip install safetensors in that environment, or convert the file to .pt",
        ) from None
    with _refusals("safetensors refuses the file", file):
        return load_file(file)


def _state_dicts(held: Any, name: str = "", depth: int = 3) -> list[tuple[str, Any]]:
    """Return the dicts of tensors in a loaded file with their names, usual names first."""
    held = _opened(held)
    if not hasattr(held, "items") or not depth:
        return []
    found = [(name, held)] if any(hasattr(each, "detach") for each in held.values()) else []
    order = sorted(held, key=lambda key: _PREFERRED.index(key) if key in _PREFERRED else len(_PREFERRED))
    for key in order:
        found += _state_dicts(held[key], f"{name}.{key}" if name else str(key), depth - 1)
    return found


def _opened(held: Any) -> Any:
    """Return a whole module's state_dict; anything else as it is."""
    return held.state_dict() if hasattr(held, "named_modules") else held


def _part_of(held: Any, steps: list[str]) -> Any:
    """Return the dict below a path of keys, whose dots divide steps too; None without one."""
    held = _opened(held)
    if not steps:
        return held
    if not hasattr(held, "items"):
        return None
    for count in range(len(steps), 0, -1):
        for sign in "/.":
            key = sign.join(steps[:count])
            if hasattr(_opened(held.get(key)), "items"):
                return _part_of(held[key], steps[count:])
    start = ".".join(steps) + "."
    return {key[len(start) :]: each for key, each in held.items() if str(key).startswith(start)} or None


def _unwrapped(held: Any) -> Iterator[tuple[str, Any]]:
    """Yield a state_dict without the prefixes that all of its names have: a wrapper's, e.g. `module.`."""
    names = [str(key) for key in held]
    start = ""
    while names and all("." in name[len(start) :] for name in names):
        start = names[0][: names[0].index(".", len(start)) + 1]
        if not all(name.startswith(start) for name in names):
            return
        yield f"the prefix {start!r}", {str(key)[len(start) :]: each for key, each in held.items()}


# Keras 2 and 3, tf.Module and SavedModel.


class TensorFlowRunner(ModelRunner):
    """A tf.Module: every call of a module is recorded."""

    framework = "tensorflow"
    libraries: tuple[str, ...] = ("tensorflow",)

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return a TensorFlow tensor, or the array itself for a Keras of another backend."""
        given = super().tensor(array, exact=exact)
        tensorflow: Any = sys.modules.get("tensorflow")
        return given if tensorflow is None else tensorflow.constant(given)

    def load(self, file: str, part: str | None = None, *, run_code: bool = False) -> list[str]:
        """Restore a TensorFlow checkpoint; every variable of the model must have a value."""
        del run_code
        return _restore_tensorflow(self.model, file, part)

    def round_weights(self, dtype: str) -> None:
        """Round the floating-point variables."""
        tensorflow: Any = sys.modules["tensorflow"]
        variables = (
            self.model.weights if self.framework == "keras" else model_child.model_variables(self.model)
        )
        for each in variables:
            if tensorflow.as_dtype(each.dtype).is_floating:
                value = tensorflow.constant(to_array(each))
                each.assign(tensorflow.cast(tensorflow.cast(value, dtype), each.dtype))

    def layers(self) -> list[dict[str, Any]]:
        """Return every module by its first path."""
        variables = model_child.model_variables(self.model)
        return [_keras_row(each, variables) for each in model_child.describe_tensorflow(self.model)]

    @contextlib.contextmanager
    def observe(self, recorder: CallRecorder, *, exact: bool = False) -> Iterator[None]:
        """Record calls by wrapping `__call__` of the classes of all modules."""
        del exact
        found = [(each, "/".join(path) or ROOT) for path, each in model_child._iter_modules(self.model)]
        with _CallWrapper(recorder, found).wrapped():
            yield


def _keras_row(module: dict[str, Any], variables: list[Any]) -> dict[str, Any]:
    tensors = {name: variables[number] for name, number in module["tensors"]}
    return _layer_row("/".join(module["path"]), module["class"], module["facts"], tensors)


def _restore_tensorflow(model: Any, file: str, part: str | None) -> list[str]:
    tensorflow: Any = sys.modules["tensorflow"]
    with _refusals("TensorFlow cannot read the checkpoint", file):
        tops = [name.split("/")[0] for name, _ in tensorflow.train.list_variables(file)]
    first: Exception | None = None
    names = (
        [part.strip("/")] if part else ["", *dict.fromkeys(top for top in tops if not top.startswith("_"))]
    )
    for name in names:
        try:
            holder = model
            for step in reversed(name.split("/") if name else ()):
                holder = tensorflow.train.Checkpoint(**{step: holder})
            made = holder if name else model_child._make_checkpoint(model)
            # `restore` also expects the counter of saves, which a file of `Checkpoint.write` lacks.
            getattr(made, "read", made.restore)(file).assert_existing_objects_matched()
        except Exception as error:  # noqa: BLE001 - the next entry may fit
            first = first or error
        else:
            return [f"the object {name!r} of the checkpoint was restored"] if name else []
    raise UsageError(
        f"tf.train.Checkpoint does not restore every variable of the model: {_all_lines(first)}",
        file=file,
        hint=_CONVERT,
    )


class _CallWrapper:
    """Replaces `__call__` of layers' classes, and layers' activations, to record calls."""

    def __init__(self, recorder: CallRecorder, layers: list[tuple[Any, str]]) -> None:
        self._recorder, self._layers = recorder, layers
        self._paths = {id(each): path for each, path in layers}
        self._running: list[tuple[Any, Any]] = []

    def _recorded(self, inner: Any) -> Any:
        def outer(layer: Any, *args: Any, **kwargs: Any) -> Any:
            # A class's `__call__` also calls that of its base.
            if id(layer) not in self._paths or any(each is layer for each, _ in self._running):
                return inner(layer, *args, **kwargs)
            record = self._recorder.enter(self._paths[id(layer)], args, kwargs)
            self._running.append((layer, record))
            try:
                made = inner(layer, *args, **kwargs)
            finally:
                self._running.pop()
            self._recorder.leave(record, made)
            return made

        return outer

    def _activated(self, layer: Any, inner: Any) -> Any:
        def outer(value: Any, *args: Any, **kwargs: Any) -> Any:
            record = next((r for each, r in reversed(self._running) if each is layer), None)
            if record is not None:
                self._recorder.before_activation(record, value)
            return inner(value, *args, **kwargs)

        return outer

    @contextlib.contextmanager
    def wrapped(self) -> Iterator[None]:
        """Record calls in the block."""
        classes = {type(each) for each, _ in self._layers}
        owners = {next((b for b in cls.__mro__ if "__call__" in vars(b)), cls) for cls in classes}
        with contextlib.ExitStack() as undo:
            for owner in owners:
                if "__call__" in vars(owner):
                    undo.callback(setattr, owner, "__call__", vars(owner)["__call__"])
                    setattr(owner, "__call__", self._recorded(vars(owner)["__call__"]))  # noqa: B010 - mypy
            for layer, _ in self._layers:
                inner = getattr(layer, "activation", None)
                if inner is not None and callable(inner) and not isinstance(inner, type):
                    with contextlib.suppress(Exception):
                        layer.activation = self._activated(layer, inner)
                        undo.callback(setattr, layer, "activation", inner)
            yield


class KerasRunner(TensorFlowRunner):
    """A Keras model of any version and backend; `again` creates another one like it, without its values."""

    framework = "keras"
    libraries = ("keras", "tf_keras", "tensorflow", "jax", "torch")

    def __init__(self, model: Any, again: Callable[[], Any] | None = None) -> None:
        super().__init__(model)
        self._again = again

    def inputs(self) -> list[dict[str, Any]]:
        """Return the inputs of a functional or Sequential model."""
        try:
            given = list(self.model.inputs or ())
        except (AttributeError, ValueError, TypeError):
            return []
        names = list(getattr(self.model, "input_names", None) or (str(each.name) for each in given))
        rows = []
        for name, each in paired(names, given):
            shape = [None if extent is None else int(extent) for extent in each.shape]
            dtype = getattr(each.dtype, "name", str(each.dtype))
            rows.append(
                {"name": name.partition(":")[0], "shape": shape[1:], "dtype": dtype, "batch": shape[0]}
            )
        return rows

    def styles(self, names: list[str], given: list[Any]) -> list[Callable[[Any], Any]]:
        """Return Keras's ways: one input, a list, a dict by name, by position."""
        by_name = dict(paired(names, given))
        first = given[0] if len(given) == 1 else given
        return [lambda f: f(first), lambda f: f(by_name), lambda f: f(*given), lambda f: f(**by_name)]

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs, with the first state of layers that keep theirs from call to call."""
        for layer, _ in self._layers_by_path(exact=exact):
            reset = getattr(layer, "reset_states", None) or getattr(layer, "reset_state", None)
            if getattr(layer, "stateful", False) and reset is not None and getattr(layer, "built", False):
                reset()
        return super().call(names, arrays, exact=exact)

    def named(self, made: Any) -> list[tuple[str, Any]]:
        """Return the outputs by the names that a functional model gives to several."""
        found = super().named(made)
        names = list(getattr(self.model, "output_names", None) or ())
        if isinstance(made, (list, tuple)) and len(names) == len(found) == len({*names}):
            return [(str(name), tensor) for name, (_, tensor) in paired(names, found)]
        return found

    def make_exact(self, names: list[str], arrays: list[Any]) -> None:
        """Create the model in float64: from its configuration, or by another call of the factory."""
        keras = model_child._keras_library(self.model)
        floatx = keras.backend.floatx()
        try:
            keras.backend.set_floatx("float64")
            if self._again is not None:
                _set_policy(keras, "float64")
                made = self._again()
            else:
                made = type(self.model).from_config(_in_float64(self.model.get_config()))
            self.exact = made
            self.call(names, arrays, exact=True)
            made.set_weights(self.model.get_weights())
        except Exception:
            self.exact = None
            raise
        finally:
            keras.backend.set_floatx(floatx)
            if self._again is not None:
                _set_policy(keras, floatx)

    def load(self, file: str, part: str | None = None, *, run_code: bool = False) -> list[str]:
        """Load a weights file or a TensorFlow checkpoint."""
        del run_code
        if not os.path.isfile(file):
            return super().load(file, part)
        if part:
            raise UnsupportedError("Keras loads whole files only", file=file, path=part)
        with _refusals("load_weights refuses the file", file, _CONVERT):
            self.model.load_weights(file)
        return []

    def layers(self) -> list[dict[str, Any]]:
        """Return every layer by its first path."""
        variables = list(self.model.weights)
        return [_keras_row(each, variables) for each in model_child.describe_keras(self.model)]

    @contextlib.contextmanager
    def observe(self, recorder: CallRecorder, *, exact: bool = False) -> Iterator[None]:
        """Record calls by wrapping `__call__` of Keras's layers, and what they pass to their activations."""
        with _CallWrapper(recorder, self._layers_by_path(exact=exact)).wrapped():
            yield

    def _layers_by_path(self, *, exact: bool) -> list[tuple[Any, str]]:
        """Return every layer with its path in the model: automatic names of the float64 copy are others."""
        known = list(model_child.iter_keras_layers([], self.model, set()))
        found = list(model_child.iter_keras_layers([], self.exact, set())) if exact else known
        paths = known if len(found) == len(known) else found
        return [(each, "/".join(path) or ROOT) for (path, _), (_, each) in paired(paths, found)]

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return a layer's result with changed tensors and settings, which are restored afterwards."""
        layers = {found: each for each, found in self._layers_by_path(exact=exact)}
        layer = layers[path]
        variables = list((self.exact if exact else self.model).weights)
        numbers = {id(variable): place for place, variable in enumerate(variables)}
        own = dict(model_child.own_keras_weights(layer, numbers))
        for found, each in layers.items():
            if found.startswith(path + "/"):
                rows = model_child.own_keras_weights(each, numbers)
                own.update((found[len(path) + 1 :] + "/" + name, number) for name, number in rows)
        with contextlib.ExitStack() as undo:
            for name, array in changes["tensors"].items():
                variable = variables[own[name]]
                undo.callback(variable.assign, to_array(variable))
                variable.assign(array)
            for name, value in changes["settings"].items():
                undo.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, _keras_setting(layer, name, value))
            return layer(*call[0], **call[1])

    def channels(self) -> str:
        """Return the data format of the first convolution or pooling layer."""
        for each in self.layers():
            order = each["settings"].get("data_format")
            if order in ("channels_first", "channels_last"):
                return str(order)[9:]
        return ""


def _set_policy(keras: Any, name: str) -> None:
    if hasattr(keras, "config"):
        keras.config.set_dtype_policy(name)
    else:
        keras.mixed_precision.set_global_policy(name)


def _keras_setting(layer: Any, name: str, value: Any) -> Any:
    if name == "activation":
        return model_child._keras_library(layer).activations.get(value)
    return tuple(value) if isinstance(value, list) else value


def _in_float64(config: Any) -> Any:
    """Return a Keras configuration with float64 in place of float32."""
    if isinstance(config, dict):
        if config.get("class_name") in ("DTypePolicy", "Policy"):
            return dict(config, config={"name": "float64"})
        return {
            key: "float64" if key == "dtype" and value == "float32" else _in_float64(value)
            for key, value in config.items()
        }
    if isinstance(config, (list, tuple)):
        return type(config)([_in_float64(each) for each in config])
    return config


class SignatureRunner(TensorFlowRunner):
    """A signature of a SavedModel: its layers are groups of operations of its graph."""

    observe = ModelRunner.observe

    def __init__(self, loaded: Any, name: str) -> None:
        super().__init__(loaded.signatures[name])
        self._loaded = loaded  # the variables end with it
        self._graph: Any = None
        self._held: dict[str, Any] = {}
        self._groups: dict[str, GraphLayer] = {}
        try:
            self._find_layers()
        except Exception:  # noqa: BLE001 - a graph that cannot be copied still runs as a whole
            self.observable = False
            self._groups = {}

    def _find_layers(self) -> None:
        """Copy the graph with all functions inlined, and group its operations."""
        convert = importlib.import_module("tensorflow.python.framework.convert_to_constants")
        names = {id(variable.handle): variable.name for variable in self.model.variables}
        titles = {
            inner.op.name: names[id(outer)]
            for outer, inner in self.model.graph.captures
            if id(outer) in names
        }
        self._graph = convert.convert_variables_to_constants_v2(self.model, lower_control_flow=False)
        operations, weights, constants = [], set(), set()
        for each in self._graph.graph.get_operations():
            if each.type == "Const":
                constants.add(each.outputs[0].name)
                if each.outputs[0].dtype.is_floating and each.outputs[0].shape.num_elements() > 1:
                    weights.add(each.outputs[0].name)
            else:
                gives = [value.name for value in each.outputs]
                takes = [value.name for value in each.inputs]
                operations.append(
                    GraphOperation(each.name, each.type, takes, gives, _operation_settings(each))
                )
        outputs = [value.name for value in self._graph.outputs]
        found = LayerGrouping(operations, constants, weights, outputs).layers()
        self._groups = {each.path: each for each in found}
        for name in dict.fromkeys(name for each in found for name in each.held):
            title = titles.get(name.partition(":")[0], name).partition(":")[0].rpartition("/")[2]
            if title.startswith(("Variable", "unknown")):
                rank = len(self._graph.graph.get_tensor_by_name(name).shape)
                title = "kernel" if rank > 1 else "bias"
            self._held[name] = title

    def inputs(self) -> list[dict[str, Any]]:
        """Return the signature's inputs."""
        specs = self.model.structured_input_signature[1].items()
        known = {name: each.shape.as_list() for name, each in specs if each.shape.rank is not None}
        return [_declared_input(name, known.get(name), each.dtype.name) for name, each in specs]

    def styles(self, names: list[str], given: list[Any]) -> list[Callable[[Any], Any]]:
        """Return the only way: by name, in the dtypes of the signature."""
        tensorflow: Any = sys.modules["tensorflow"]
        specs = self.model.structured_input_signature[1]
        by_name = {name: tensorflow.cast(each, specs[name].dtype) for name, each in paired(names, given)}
        return [lambda f: f(**by_name)]

    def _named(self, layer: GraphLayer) -> dict[str, str]:
        """Return the constants of a layer by the names of their variables."""
        found: dict[str, str] = {}
        for name in layer.held:
            title = self._held[name]
            found[title if title not in found else f"{title}_{len(found)}"] = name
        return found

    def layers(self) -> list[dict[str, Any]]:
        """Return every group of operations with its weights."""
        values = {name: self._value(name) for name in self._held}
        named = {
            path: {title: values[name] for title, name in self._named(each).items()}
            for path, each in self._groups.items()
        }
        return [_layer_row(path, each.cls, each.settings, named[path]) for path, each in self._groups.items()]

    def _value(self, name: str) -> Any:
        tensorflow: Any = sys.modules["tensorflow"]
        operation = self._graph.graph.get_operation_by_name(name.partition(":")[0])
        return tensorflow.make_ndarray(operation.get_attr("value"))

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the signature's outputs; with a recorder, the values between layers are computed, too."""
        if self._recorder is not None:
            self._record(self._recorder, names, arrays)
        return super().call(names, arrays, exact=exact)

    def _record(self, recorder: CallRecorder, names: list[str], arrays: list[Any]) -> None:
        """Compute the values between the layers."""
        given = dict(paired(names, arrays))
        specs = self.model.structured_input_signature[1]
        by_tensor = {specs[name].name + ":0": given[name] for name in names}
        feeds = list(self._graph.inputs)
        wanted = dict.fromkeys(
            name for each in self._groups.values() for name in (each.takes, each.before, each.gives) if name
        )
        graph = self._graph.graph
        fetches = [name for name in wanted if name not in by_tensor]
        run = self._graph.prune(feeds, [graph.get_tensor_by_name(name) for name in fetches])
        made = run(*[self.tensor(by_tensor[each.name], exact=False) for each in feeds])
        values = dict(paired(fetches, made), **by_tensor)
        for path, each in self._groups.items():
            record = recorder.enter(path, (values[each.takes],), {})
            if record is not None and each.before:
                recorder.before_activation(record, values[each.before])
            recorder.leave(record, values[each.gives])

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return the value that a layer gives with other weights; its attributes are fixed."""
        del exact
        layer = self._groups[path]
        end = layer.gives
        if changes["settings"].get("activation") == "linear":
            end = layer.before or end
        elif changes["settings"]:
            raise UnsupportedError("operations of a graph have fixed attributes")
        names = self._named(layer)
        graph = self._graph.graph
        feeds = [layer.takes, *(names[title] for title in changes["tensors"])]
        given = [call[0][0], *changes["tensors"].values()]
        run = self._graph.prune(
            [graph.get_tensor_by_name(each) for each in feeds], graph.get_tensor_by_name(end)
        )
        return run(*[self.tensor(np.asarray(each), exact=False) for each in given])

    def make_exact(self, names: list[str], arrays: list[Any]) -> None:
        """Raise UnsupportedError: the graph has fixed dtypes."""
        del names, arrays
        raise UnsupportedError("the operations of a SavedModel have the dtypes of its graph")

    def channels(self) -> str:
        """Return the data format of the first convolution in the graph."""
        definition = self.model.graph.as_graph_def()
        functions = [each.node_def for each in definition.library.function]
        for node in itertools.chain(definition.node, *functions):
            if node.op.startswith(("Conv", "DepthwiseConv")) and "data_format" in node.attr:
                return "last" if node.attr["data_format"].s.endswith(b"C") else "first"
        return ""


_ATTRIBUTES = {"strides": "strides", "dilations": "dilations", "ksize": "pool_size"}


def _operation_settings(operation: Any) -> dict[str, Any]:
    """Return the settings of a TensorFlow operation in the form of Keras's."""
    held = operation.node_def.attr
    found: dict[str, Any] = {}
    if "padding" in held and held["padding"].s in (b"SAME", b"VALID"):
        found["padding"] = held["padding"].s.decode().lower()
    if "epsilon" in held:
        found["epsilon"] = held["epsilon"].f
    for name, title in _ATTRIBUTES.items():
        numbers = [int(each) for each in held[name].list.i] if name in held else []
        if len(numbers) > 2:
            found[title] = numbers[2:] if held["data_format"].s.startswith(b"NC") else numbers[1:-1]
    return found


# ONNX: every node with initializers is a layer.

_MOST_EXACT = 1 << 22


class OnnxRunner(ModelRunner):
    """An ONNX model, run by onnxruntime, or by the onnx library's reference evaluator."""

    framework = "onnx"
    libraries = ("onnxruntime", "onnx")

    def __init__(self, file: str) -> None:
        import onnx

        super().__init__(onnx.load(file))
        self._onnx = onnx
        array = onnx.numpy_helper.to_array
        self._held = {each.name: array(each) for each in self.model.graph.initializer}
        self._run = self._session(self.model)
        self._nodes = list(self._layer_nodes())

    def _session(self, model: Any) -> Any:
        try:
            import onnxruntime
        except ImportError:
            return self._evaluator(model)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        data = model.SerializeToString()
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"]).run

    @staticmethod
    def _evaluator(model: Any) -> Any:
        """Return what runs a model in the dtypes of its inputs: onnx's own evaluator, in NumPy."""
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model).run

    def make_exact(self, names: list[str], arrays: list[Any]) -> None:
        """Create a copy with constants and casts in float64 for onnx's own evaluator, which is slow."""
        del names, arrays
        if sum(each.size for each in self._held.values()) > _MOST_EXACT:
            raise UnsupportedError("the model is too large for the float64 evaluator of onnx")
        made = copy.deepcopy(self.model)
        for each in made.graph.initializer:
            each.CopyFrom(self._in_float64(each))
        for node in made.graph.node:
            for attribute in node.attribute:
                if attribute.name == "to" and attribute.i == 1:
                    attribute.i = 11
                elif attribute.name == "value" and attribute.t.data_type == 1:
                    attribute.t.CopyFrom(self._in_float64(attribute.t))
        self.exact = made

    def _in_float64(self, tensor: Any) -> Any:
        numbers = self._onnx.numpy_helper
        if tensor.data_type != 1:
            return tensor
        return numbers.from_array(numbers.to_array(tensor).astype(np.float64), tensor.name)

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return the result of a node with other initializers or attributes."""
        row = next(each for each in self._nodes if each["path"] == path)
        make, given = self._onnx.helper, call[0][0]
        nodes = [copy.deepcopy(each) for each in row["parts"]]
        for name, value in changes["settings"].items():
            kept = [each for each in nodes[0].attribute if each.name != name]
            del nodes[0].attribute[:]
            nodes[0].attribute.extend([*kept, make.make_attribute(name, value)])
        held = []
        for name in row["held"]:
            array = np.asarray(changes["tensors"].get(name, self._held[name]))
            array = array.astype(given.dtype) if array.dtype.kind == "f" else array
            held.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        kind = make.np_dtype_to_tensor_dtype(given.dtype)
        takes = [make.make_tensor_value_info(row["takes"], kind, given.shape)]
        gives = [self._onnx.ValueInfoProto(name=row["gives"])]
        graph = make.make_graph(nodes, "layer", takes, gives, held)
        model = make.make_model(
            graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version
        )
        run = self._evaluator(model) if exact else self._session(model)
        return run(None, {row["takes"]: given})[0]

    def inputs(self) -> list[dict[str, Any]]:
        """Return the graph's inputs without initializers."""
        rows = []
        for each in self.model.graph.input:
            if each.name in self._held:
                continue
            kind = each.type.tensor_type
            shape = [int(d.dim_value) if d.dim_value else None for d in kind.shape.dim]
            known = shape if kind.HasField("shape") else None
            dtype = "string"
            if kind.elem_type != self._onnx.TensorProto.STRING:
                dtype = str(self._onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name)
            rows.append(_declared_input(each.name, known, dtype))
        return rows

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs; with a recorder, every layer's inputs and output, too."""
        given = dict(paired(names, [self.tensor(each, exact=exact) for each in arrays]))
        outputs = [each.name for each in self.model.graph.output]
        if self._recorder is None:
            run = self._evaluator(self.exact) if exact else self._run
            return dict(paired(outputs, run(None, given)))
        observed = copy.deepcopy(self.exact if exact else self.model)
        between = dict.fromkeys(name for row in self._nodes for name in (row["takes"], row["gives"]))
        wanted = [name for name in between if name not in given and name not in outputs and name]
        observed.graph.output.extend(self._onnx.ValueInfoProto(name=name) for name in wanted)
        run = self._evaluator(observed) if exact else self._session(observed)
        made = dict(paired([*outputs, *wanted], run(None, given)))
        known = dict(given, **made)
        for row in self._nodes:
            if row["takes"] in known and row["gives"] in known:
                record = self._recorder.enter(row["path"], (known[row["takes"]],), {})
                self._recorder.leave(record, known[row["gives"]])
        # A session of its own would begin again with the seeds of random operations.
        return (
            {name: made[name] for name in outputs} if exact else dict(paired(outputs, self._run(None, given)))
        )

    def _layer_nodes(self) -> Iterator[dict[str, Any]]:
        nodes = list(self.model.graph.node)
        users: dict[str, list[Any]] = {}
        for node in nodes:
            for name in node.input:
                users.setdefault(name, []).append(node)
        merged: set[int] = set()
        for number, node in enumerate(nodes):
            if number in merged or not node.output:
                continue
            held, parts = [name for name in node.input if name in self._held], [node]
            takes = next((name for name in node.input if name not in self._held), "")
            gives = node.output[0]
            after = users.get(gives, [])
            if node.op_type == "MatMul" and len(after) == 1 and after[0].op_type == "Add":
                biases = [name for name in after[0].input if name in self._held]
                if held and biases:
                    held, gives = [*held, *biases], after[0].output[0]
                    merged.add(nodes.index(after[0]))
                    parts.append(after[0])
            path = node.name or f"{node.op_type}_{number}"
            yield {
                "path": path,
                "class": node.op_type,
                "node": node,
                "parts": parts,
                "held": held,
                "takes": takes,
                "gives": gives,
            }

    def layers(self) -> list[dict[str, Any]]:
        """Return every node with its initializers and attributes."""
        value, rows = self._onnx.helper.get_attribute_value, []
        for each in self._nodes:
            settings = model_child.plain_settings({one.name: value(one) for one in each["node"].attribute})
            tensors = {name: self._held[name] for name in each["held"]}
            rows.append(_layer_row(each["path"], each["class"], settings, tensors))
        return rows


def _declared_input(name: str, shape: Any, dtype: str) -> dict[str, Any]:
    """Return an input of a graph; raise UnsupportedError for one that cannot get rows of numbers."""
    if dtype == "string":
        raise UnsupportedError("an input of strings has no random values", path=name, found=dtype)
    if not shape:
        found = "no number of axes" if shape is None else "a single number"
        raise UnsupportedError("every input must have a batch as its first axis", path=name, found=found)
    # NumPy has no bfloat16: the framework rounds.
    known = "float32" if dtype == "bfloat16" else dtype
    return {"name": name, "shape": list(shape[1:]), "dtype": known, "batch": shape[0]}


# Opening a side: a file that contains a whole model, or the user's factory.


def open_keras(file: str, version: str, *, run_code: bool) -> KerasRunner:
    """Open a `.keras` or `.h5` model that a version of Keras wrote.

    The caller has audited the configuration: without `run_code` it names plain classes of Keras only.
    """
    keras = _import_keras(version)
    given: dict[str, Any] = {"compile": False}
    # Keras 2 before 2.13 runs any code of a file: the audit is the only protection there.
    if "safe_mode" in inspect.signature(keras.models.load_model).parameters:
        given["safe_mode"] = not run_code
    with _refusals("Keras cannot open the model", file):
        return KerasRunner(keras.models.load_model(file, **given))


def _import_keras(version: str) -> Any:
    """Return the Keras that wrote the file, by its version; else the installed one."""
    names = ["keras", "tf_keras"]
    if version.startswith(("0.", "1.", "2.")):
        names.reverse()
    first: ImportError | None = None
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            first = first or error
    assert first is not None  # noqa: S101 - both imports failed
    raise UsageError(
        f"Keras cannot be imported in this environment: {last_error_line(first)}",
        hint="use --python-a or --python-b to select the interpreter of another environment",
    ) from first


def open_script(file: str) -> ScriptRunner:
    """Open a TorchScript program."""
    import torch

    return ScriptRunner(torch.jit.load(file, map_location="cpu"))  # type: ignore[no-untyped-call]


def open_saved_model(file: str) -> SignatureRunner:
    """Open a SavedModel's serving signature, or its only one."""
    import tensorflow

    loaded = tensorflow.saved_model.load(file)
    names = list(loaded.signatures)
    usual = [name for name in ("serving_default", "serve") if name in names]
    if not names:
        raise UsageError(
            "the SavedModel has no signature, which names its inputs and outputs",
            file=file,
            hint="save it with one: tf.saved_model.save(model, folder, signatures=function), or compare its "
            "checkpoint in your own model with --like-a or --like-b",
        )
    chosen = (usual or names)[0]
    runner = SignatureRunner(loaded, chosen)
    left = [name for name in names if name != chosen]
    if left:
        runner.notes.append(f"signature {chosen} is compared, not {', '.join(left)}")
    return runner


def open_onnx(file: str) -> OnnxRunner:
    """Open an ONNX file."""
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise UsageError(
            "the onnx library is not installed in this environment", hint="pip install onnx onnxruntime"
        ) from None
    return OnnxRunner(file)


def wrap_model(model: Any, again: Callable[[], Any] | None = None) -> ModelRunner:
    """Return what runs a model of any framework; `again` creates another one like it."""
    framework = model_framework(model)
    if framework == "torch":
        return TorchRunner(model)
    return KerasRunner(model, again) if framework == "keras" else TensorFlowRunner(model)


# Program of the process.


class RunnerSession(ModelSession):
    """A model's process: a user's model may be filled before it runs. `kept` calls may be repeated."""

    def __init__(self, folder: Path, model: Any = None) -> None:
        super().__init__()
        self.folder, self.model = folder, model
        self.runner = ModelRunner(None)
        self.kept: dict[tuple[str, int], tuple[Any, Any]] = {}
        self.trainer: Any = None
        self._layers: list[dict[str, Any]] | None = None

    def layers(self) -> list[dict[str, Any]]:
        """Return the layers of the prepared model: the first call may create some."""
        if self._layers is None:
            self._layers = self.runner.layers()
        return self._layers

    def given(self, count: int) -> list[Any]:
        """Return the inputs that the parent wrote."""
        return [np.load(self.folder / f"input-{place}.npy", allow_pickle=False) for place in range(count)]


def _open(session: RunnerSession, message: Message) -> Message:
    kind, file = message["kind"], message["file"]
    if kind == "factory":
        if session.model is None:
            session.build(message["factory"], message["arguments"])
        runner = wrap_model(session.model, session.again)
    elif kind == "keras":
        runner = open_keras(file, message["version"] or "", run_code=message["run_code"])
    elif kind == "torchscript":
        runner = open_script(file)
    elif kind == "saved_model":
        runner = open_saved_model(file)
    else:
        runner = open_onnx(file)
    session.runner = runner
    return {
        "framework": runner.framework,
        "inputs": runner.inputs(),
        "versions": runner.versions(),
        "channels": runner.channels() if runner.framework != "keras" or runner.model.built else "",
        "observable": runner.observable,
        "notes": runner.notes,
        "tensor_class": sorted(name for _, name in class_bases(runner.model))[:8],
    }


def _prepare(session: RunnerSession, message: Message) -> Message:
    """Find how the model is called and which inputs are integers; load the file strictly."""
    runner, names = session.runner, message["names"]
    shapes, dtypes = message["shapes"], message["dtypes"]
    lazy = runner.framework != "torch" or any(
        _is_missing(each) for each in itertools.chain(runner.model.parameters(), runner.model.buffers())
    )

    def load() -> list[str]:
        sandbox.confine()
        return runner.load(message["file"], message["part"], run_code=message["run_code"])

    notes = [] if lazy or not message["file"] else load()
    found, ids = _first_call(runner, names, shapes, dtypes, message["batch"] or _BATCH)
    if lazy and message["file"]:
        notes = load()
    if message["rounded"] is not None:
        _round(runner, message["rounded"])
    size = sum(int(np.prod(each.shape)) for row in session.layers() for each in row["tensors"].values())
    protections = sandbox.protections()
    missing = sandbox.describe_missing("its process", protections.missing if protections else {})
    notes += [missing] if missing else []
    return {"dtypes": found, "below": ids, "notes": notes, "size": size}


def _round(runner: ModelRunner, dtype: str) -> None:
    try:
        runner.round_weights(dtype)
    except Exception as error:
        raise UnsupportedError(
            f"the model's weights cannot be rounded to {dtype}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, UnsupportedError) else last_error_line(error)


def _first_call(
    runner: ModelRunner, names: list[str], shapes: list[list[int]], dtypes: list[str | None], batch: int
) -> tuple[list[str], list[int | None]]:
    """Call the model in the first way that works; return the inputs' dtypes, and the limits of integers."""
    free = [place for place, dtype in enumerate(dtypes) if dtype is None][:_MOST_TRIED]
    tried = [each or "float32" for each in dtypes]

    def attempts() -> Iterator[Callable[[], list[int | None]]]:
        for chosen in itertools.product(("float32", "int32"), repeat=len(free)):
            for place, dtype in paired(free, chosen):
                tried[place] = dtype
            rows = paired(shapes, tried)
            given = [_pattern([batch, *shape], dtype, place) for place, (shape, dtype) in enumerate(rows)]
            for style in range(len(runner.styles(names, given))):
                runner.style = style
                yield lambda: _embedding_rows(runner, names, given)  # noqa: B023 - called at once

    hint = "pass the shape of each input without the batch: --input-shape NAME=3,32,32"
    below: list[int | None] = model_child.call_in_first_way(attempts(), shapes, hint)
    return tried, below


def _pattern(shape: list[int], dtype: str, place: int) -> Any:
    """Return zeros and ones, valid for every embedding with two rows; others for every input."""
    return np.random.RandomState(place).randint(0, 2, shape).astype(dtype)


_ROWS = ("num_embeddings", "input_dim")
_MOST_ROWS = 1 << 18


def _embedding_rows(runner: ModelRunner, names: list[str], given: list[Any]) -> list[int | None]:
    """Call the model; return per input how many integers it accepts, None if there is no limit.

    That is the number of rows of the embedding that receives the input. Where none does, the model itself is
    called with larger and larger integers.
    """
    recorder = _EmbeddingRecorder(given)
    with runner.observe(recorder):
        runner.call(names, given)
    found: list[int | None] = [None] * len(given)
    embeddings = (
        each for each in runner.layers() if "Embedding" in each["class"] or each["class"] == "Gather"
    )
    rows = {each["path"]: _row_count(each) for each in embeddings}
    for path, place in recorder.hits:
        size = rows.get(path)
        if size is not None:
            found[place] = min(size, found[place] or size)
    return [
        _accepted_integers(runner, names, given, place) if size is None and each.dtype.kind in "iu" else size
        for place, (size, each) in enumerate(paired(found, given))
    ]


def _accepted_integers(runner: ModelRunner, names: list[str], given: list[Any], place: int) -> int | None:
    """Return the number below which the model accepts integers for an input, None without a limit."""

    def accepts(value: int) -> bool:
        changed = given[place].copy()
        changed.reshape(-1)[-1:] = value
        try:
            runner.call(names, [*given[:place], changed, *given[place + 1 :]])
        except Exception:  # noqa: BLE001 - whatever a look-up out of range raises
            return False
        return True

    low, high = 1, 2
    while high <= min(_MOST_ROWS, int(np.iinfo(given[place].dtype).max)):
        if not accepts(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if accepts(middle) else (low, middle)
            return high
        low, high = high, 2 * high
    return None


def _row_count(layer: dict[str, Any]) -> int | None:
    stated = [layer["settings"].get(name) for name in _ROWS]
    tables = [int(each.shape[0]) for each in layer["tensors"].values() if len(each.shape) == 2]
    return next((each for each in (*stated, *tables) if isinstance(each, int)), None)


class _EmbeddingRecorder(CallRecorder):
    """Records which layers receive a model's inputs unchanged."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self._inputs = given
        self.hits: list[tuple[str, int]] = []

    def enter(self, path: str, args: Any, kwargs: Any) -> dict[str, Any] | None:
        """Compare the layer's first tensor with the model's inputs."""
        for tensor in _tensors((args, kwargs))[:1]:
            with contextlib.suppress(Exception):
                array = to_array(tensor)
                places = [
                    place
                    for place, each in enumerate(self._inputs)
                    if array.shape == each.shape and np.array_equal(array, each)
                ]
                # Inputs of few numbers may be equal: which one it is remains open.
                self.hits += [(path, place) for place in places[:1] if len(places) == 1]
        return None

    def before_activation(self, record: dict[str, Any], value: Any) -> None:
        """Record nothing."""


def _exact(session: RunnerSession, message: Message) -> Message:
    """Create the float64 form of the model and return whether it exists."""
    try:
        session.runner.make_exact(message["names"], session.given(len(message["names"])))
    except Exception as error:  # noqa: BLE001 - a model without such a form is compared in float32
        return {"made": False, "reason": _reason(error)}
    return {"made": True, "reason": ""}


def _run(session: RunnerSession, message: Message) -> Message:
    """Call the model; write its outputs, and return the calls of its layers."""
    runner, names = session.runner, message["names"]
    given, exact = session.given(len(names)), message["exact"]
    recorder = CallRecorder()
    try:
        if message["observe"]:
            with runner.observe(recorder, exact=exact):
                made = runner.call(names, given, exact=exact)
        else:
            made = runner.call(names, given, exact=exact)
        outputs = runner.outputs(made)
    except Exception as error:
        raise WorkerError(f"calling the model raises {last_error_line(error)}") from error
    for place, (name, array) in enumerate(outputs):
        if array.dtype.kind not in "biuf":
            raise UnsupportedError("an output is no tensor of numbers", path=name, found=str(array.dtype))
        np.save(session.folder / f"output-{place}.npy", array, allow_pickle=False)
    return {"outputs": _distinct_names([name for name, _ in outputs]), "calls": recorder.calls}


def _distinct_names(names: list[str]) -> list[str]:
    """Return the names, each one that occurred before with its number."""
    found = []  # type: list[str]
    for place, name in enumerate(names):
        found.append(name if name not in found else f"{name} ({place})")
    return found


def _layers(session: RunnerSession, message: Message) -> Message:
    """Return every layer with a description of its tensors."""
    del message
    return {
        "layers": [
            dict(each, tensors=[describe_tensor(name, tensor) for name, tensor in each["tensors"].items()])
            for each in session.layers()
        ]
    }


def _capture(session: RunnerSession, message: Message) -> Message:
    """Call the model; write the inputs and outputs of the wanted calls of layers."""
    runner, names, exact = session.runner, message["names"], message["exact"]
    folder = session.folder / "calls"
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    recorder = CallRecorder({(path, number) for path, number in message["wanted"]}, folder)
    with runner.observe(recorder, exact=exact):
        runner.call(names, session.given(len(names)), exact=exact)
    session.kept = recorder.kept
    return {"calls": recorder.calls}


def _read_tensors(session: RunnerSession, message: Message) -> Message:
    """Write the tensors of one layer, and of its parts if they are requested."""
    path = message["path"]
    held = dict(next(each["tensors"] for each in session.layers() if each["path"] == path))
    for each in session.layers() if message["parts"] else ():
        part = each["path"][len(path) + 1 :].replace(".", "/")
        if part and each["path"].startswith((path + ".", path + "/")):
            held.update((part + "/" + name, tensor) for name, tensor in each["tensors"].items())
    for place, tensor in enumerate(held.values()):
        np.save(session.folder / f"tensor-{place}.npy", view_array(tensor), allow_pickle=False)
    return {"names": list(held)}


def _repeat(session: RunnerSession, message: Message) -> Message:
    """Repeat a recorded call of one layer with other tensors or settings; write the result."""
    tensors = {
        name: np.load(session.folder / file, allow_pickle=False) for name, file in message["tensors"].items()
    }
    changes = {"tensors": tensors, "settings": message["settings"]}
    call = session.kept[message["path"], message["number"]]
    try:
        made = session.runner.call_layer(message["path"], call, changes, exact=message["exact"])
    except Exception as error:  # noqa: BLE001 - this change does not fit the layer
        return {"made": -1, "reason": last_error_line(error)}
    arrays = [to_array(each) for each in _tensors(made)]
    for place, array in enumerate(arrays):
        np.save(session.folder / f"repeated-{place}.npy", array, allow_pickle=False)
    return {"made": len(arrays), "reason": ""}


HANDLERS = {
    "open": _open,
    "prepare": _prepare,
    "exact": _exact,
    "run": _run,
    "layers": _layers,
    "capture": _capture,
    "tensors": _read_tensors,
    "repeat": _repeat,
    "close": end_process,
    **model_child.HANDLERS,
    **model_training.HANDLERS,
}


def main(folder: str) -> None:
    """Run the process that fills or runs a model for its parent."""
    with message_pipes() as (requests, answers):
        serve(RunnerSession(Path(folder)), HANDLERS, requests, answers)
