"""A user's model in its process: built by the user's code, walked, called, filled and saved.

The syntax is Python 3.7's: interpreters of other environments run this code.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import difflib
import functools
import importlib
import inspect
import itertools
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred, search_paths
from ckpttool.core.errors import CkpttoolError, UnsupportedError, UsageError, did_you_mean
from ckpttool.networks.messages import Message
from ckpttool.networks.tracing import (
    ROOT,
    CallFacts,
    CallRecorder,
    OperationRecorder,
    Trace,
    create_tracer,
    named_tensors,
    paired,
    plain_settings,
    probe_module,
    tensor_shape,
    to_array,
)

if TYPE_CHECKING:
    from typing import TypedDict  # younger than Python 3.7

    import numpy as np

    from ckpttool.networks.messages import InputRow

    BuiltLayer = TypedDict(
        "BuiltLayer",
        {"path": str, "class": str, "name": str, "settings": dict[str, Any], "tensors": dict[str, Any]},
    )
else:
    np = deferred.DeferredModule("numpy")


_SHOWN, _NAMES = 300, 5


def call_factory(name: str, arguments: Any) -> Any:
    """Return the result of the named factory; `arguments` is None, a list or a dict (by keyword).

    Raise a one-line UsageError if the module or factory does not exist, or if it raises.
    """
    constructor = find_named_object(name, "--like")
    if not callable(constructor) or (arguments is None and is_model(constructor)):
        return constructor
    inputs = {} if arguments is None else arguments
    try:
        return constructor(**inputs) if isinstance(inputs, dict) else constructor(*inputs)
    except (Exception, SystemExit) as error:
        hint = f"correct it, or {_explain_arguments(constructor)}"
        raise UsageError(f"{name} raises {last_error_line(error)}", hint=hint) from error


def _explain_arguments(constructor: Any) -> str:
    """Return which arguments a factory takes, as a part of a hint."""
    try:
        names = [*inspect.signature(constructor).parameters]
    except (TypeError, ValueError):
        names = ["NAME"]
    if not names:
        return "leave out --like-args: it takes no arguments"
    return "pass its arguments: --like-args '{{{}}}'".format(", ".join(f'"{name}": VALUE' for name in names))


def find_named_object(name: str, option: str) -> Any:
    """Return the object that `package.module:name` denotes; raise UsageError if there is none."""
    where, colon, what = name.partition(":")
    if not (where and colon and what):
        kind = "factory" if option == "--like" else "function"
        module = (name[:-3] if name.endswith(".py") else name).replace("/", ".").rstrip(":")
        names = _defined_names(module) or ["NAME"]
        hint = (
            "use {} {}".format(option, " or ".join(f"{module}:{name}" for name in names)) if module else None
        )
        raise UsageError(f"{option} requires package.module:{kind}", found=name, hint=hint)
    target = _import_module(where, name)
    for part in what.split("."):
        if not hasattr(target, part):
            close = difflib.get_close_matches(part, dir(target), 1)
            names = _defined_names(where)
            listed = "it defines {}".format(", ".join(names)) if names else None
            hint = did_you_mean(close[0]) if close else listed
            raise UsageError(f"{where} has no attribute {what}", hint=hint)
        target = getattr(target, part)
    return target


def _defined_names(module: str) -> list[str]:
    """Return the first classes and functions that a module of the working directory defines, unrun."""
    try:
        with open(module.replace(".", os.sep) + ".py", "rb") as source:
            statements = ast.parse(source.read()).body
    except (OSError, SyntaxError, ValueError):
        return []
    defined = [
        statement.name for statement in statements if isinstance(statement, (ast.ClassDef, ast.FunctionDef))
    ]
    return [name for name in defined if name[0] != "_"][:_NAMES]


def find_user_module(name: str) -> None:
    """Make a module in the working directory importable; raise UsageError if one is installed too."""
    other = search_paths.enable_user_module(name)
    if other is not None:
        raise UsageError(
            f"two modules are named {name}: one is installed, the other is in the working directory",
            file=other,
            hint="rename the file, or add its folder to PYTHONPATH to select it",
        )


def _import_module(where: str, name: str) -> Any:
    if where.endswith(".py") or os.sep in where:
        hint = "--like {}".format(name.replace(".py:", ":").replace(os.sep, "."))
        raise UsageError("--like requires the name of a module, not of a file", found=where, hint=hint)
    find_user_module(where)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if where == missing or where.startswith(missing + "."):
            hint = "modules are searched in the current folder and PYTHONPATH"
            raise UsageError(f"no module named {missing}", hint=hint) from error
        python = f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
        raise UsageError(
            f"{where} imports {missing}, which is not installed for Python {python}",
            hint="use --python INTERPRETER of the model's environment",
        ) from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"importing {where} raises {last_error_line(error)}") from error


def class_bases(value: Any) -> frozenset[tuple[str, str]]:
    """Return the package and the name of every base class of the object."""
    kind: Any = type(value)
    return _mro_names(kind)


@functools.lru_cache(maxsize=4096)
def _mro_names(kind: Any) -> frozenset[tuple[str, str]]:
    return frozenset((str(base.__module__).partition(".")[0], base.__name__) for base in kind.__mro__)


def framework_class(value: Any) -> str:
    """Return the name of the first framework base class; of Transformers' Conv1D, the full name."""
    for base in type(value).__mro__:
        if base.__module__.startswith("transformers.") and base.__name__ in ("Conv1D", "TFConv1D"):
            return f"{base.__module__}.{base.__name__}"
        if base.__module__.partition(".")[0] in ("torch", "keras", "tf_keras", "tensorflow", "sonnet"):
            return base.__name__
    return type(value).__name__


_CALLS = {"torch": "forward", "keras": "call", "tensorflow": "__call__"}


def has_own_call(value: Any) -> bool:
    """Return whether a user-defined class above the first framework class defines the forward pass."""
    method = _CALLS.get(model_framework(value) or "")
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] in ("torch", "keras", "tf_keras", "tensorflow", "sonnet"):
            return False
        if method in vars(base):
            return True
    return False


def is_own_class(module: Any) -> bool:
    """Return whether a user-defined class, or a list of parameters, has a module's tensors."""
    framework = model_framework(module)
    listed = framework_class(module) in ("ParameterList", "ParameterDict")
    return framework == "tensorflow" or listed or has_own_call(module)


def model_framework(value: Any) -> str | None:
    """Return the framework of the model: torch, keras or tensorflow."""
    # Keras 2 is inside tensorflow until 2.12 (tensorflow.python.keras), or is installed as keras or tf_keras.
    # A Keras 3 model with the torch backend is a torch.nn.Module too, but its layers cannot be identified
    # there.
    if is_keras_layer(value):
        return "keras"
    if ("torch", "Module") in class_bases(value):
        return "torch"
    return "tensorflow" if is_tf_module(value) else None


def require_model(value: Any, sentence: str, hint: str | None = None) -> str:
    """Return the framework of the model; raise UsageError with the sentence for another object."""
    framework = model_framework(value)
    if framework is None or isinstance(value, type):
        kind = value.__name__ if isinstance(value, type) else type(value).__name__
        expected = "a torch.nn.Module, a keras.Model or a tf.Module"
        raise UsageError(sentence, expected=expected, found=kind, hint=hint)
    return framework


_TF_MODULES = frozenset((top, "Module") for top in ("tensorflow", "tensorflow_core"))
_KERAS_LAYERS = frozenset((top, "Layer") for top in ("keras", "tf_keras", "tensorflow", "tensorflow_core"))


def is_tf_module(value: Any) -> bool:
    """Return whether the object is a tf.Module, which `tf.Module._flatten` would enter."""
    return not class_bases(value).isdisjoint(_TF_MODULES)


def is_keras_layer(value: Any) -> bool:
    """Return whether the object is a Keras layer."""
    return not class_bases(value).isdisjoint(_KERAS_LAYERS)


def is_model(value: Any) -> bool:
    """Return whether the object is already a model, not a factory."""
    return not isinstance(value, type) and model_framework(value) is not None


_ESCAPES = deferred.compile(r"\x1b\[[0-9;]*m")


def last_error_line(error: BaseException) -> str:
    """Return an error like the end of a traceback: its type and the last line of its text.

    Keras prints its own text in bold, and below it the arguments of the layer.
    """
    lines = [line.strip() for line in _ESCAPES.sub("", str(error)).splitlines() if line.strip()]
    ends = [
        number for number, line in enumerate(lines) if line.startswith("Arguments received by") and number
    ]
    lines = lines[: ends[0]] if ends else lines
    return "{}: {}".format(type(error).__name__, lines[-1][:_SHOWN] if lines else "no reason given")


def iter_modules(model: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield a model's modules, each once by its first path, the model first."""
    framework = model_framework(model)
    if framework == "torch":
        yield from ((path.split(".") if path else [], module) for path, module in model.named_modules())
    else:
        yield from (_iter_keras_layers if framework == "keras" else _iter_tf_modules)([], model, set())


def _iter_keras_layers(path: list[str], layer: Any, visited: set[int]) -> Iterator[tuple[list[str], Any]]:
    """Yield a layer and its descendants, by attribute and then by name."""
    visited.add(id(layer))
    yield path, layer
    value = [(name, value) for name, value in iter_attributes(vars(layer)) if is_keras_layer(value)]
    below = [(name, value) for name, value in value if not name[0].startswith("_")]
    # A Sequential or functional model lists its layers in order of use.
    listed = getattr(layer, "layers", None)
    below += [([layer.name], layer) for layer in listed or () if is_keras_layer(layer)]
    # Private lists repeat the values of private attributes.
    for name, item in below + sorted(value, key=lambda name: len(name[0])):
        if id(item) not in visited:
            yield from _iter_keras_layers([*path, *name], item, visited)


def _iter_tf_modules(path: list[str], module: Any, visited: set[int]) -> Iterator[tuple[list[str], Any]]:
    """Yield a tf.Module and its descendants, Keras 3 layers too."""
    visited.add(id(module))
    yield path, module
    below = []
    for name, value in iter_attributes(_module_attributes(module)):
        if id(value) not in visited and is_tf_module(value):
            visited.add(id(value))
            below.append(([*path, *name], value))
        elif id(value) not in visited and is_keras_layer(value):
            below += list(_iter_keras_layers([*path, *name], value, visited))
    for inner, value in below:
        if is_tf_module(value):
            yield from _iter_tf_modules(inner, value, visited)
        else:
            yield inner, value


def _module_attributes(module: Any) -> dict[str, Any]:
    # `_self_...` attributes are TensorFlow's bookkeeping (tensorflow/python/trackable/autotrackable.py).
    return {name: value for name, value in vars(module).items() if not name.startswith("_self_")}


def iter_attributes(owner: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield the values in attributes, lists and dicts by the names on the way."""
    for name, value in owner.items():
        if isinstance(value, (list, tuple, dict)):
            yield from _open_containers([str(name)], value, 4)
        else:
            yield [str(name)], value


def _open_containers(path: list[str], value: Any, depth: int) -> Iterator[tuple[list[str], Any]]:
    if depth and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _open_containers([*path, str(index)], item, depth - 1)
    elif depth and isinstance(value, dict):
        for name, item in value.items():
            yield from _open_containers([*path, str(name)], item, depth - 1)
    else:
        yield path, value


def model_variables(model: Any) -> list[Any]:
    """Return a Keras model's weights, or a module's variables and then those of its Keras 3 layers.

    Raise ValueError for Sonnet's marker that there are no variables yet (sonnet/src/base.py).
    """
    if is_keras_layer(model):
        return list(model.weights)
    variables = {id(variable): variable for variable in model.variables}
    for _, module in iter_modules(model):
        if not is_tf_module(module):
            variables.update((id(variable), variable) for variable in module.weights)
    return list(variables.values())


def _handle(tensor: Any) -> Any:
    """Return TensorFlow's reference to a variable, which Keras 3 has inside its own; PyTorch's tensor."""
    inner = tensor if hasattr(tensor, "handle") else getattr(tensor, "_value", tensor)
    return getattr(inner, "handle", tensor)


_SOME = 8
_OWN = ("_trainable_variables", "_non_trainable_variables", "_trainable_weights", "_non_trainable_weights")


def own_tensors(module: Any, variables: Collection[int] = ()) -> list[tuple[str, Any]]:
    """Return a module's own tensors with their names.

    `variables` are the ids of the model's variables, which those of TensorFlow and Keras are among.
    """
    value = vars(module)
    if model_framework(module) == "torch":
        if "_parameters" in value:
            return [*value["_parameters"].items(), *value["_buffers"].items()]
        # Of a TorchScript program.
        return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    keras = is_keras_layer(module)
    named = [
        (name[-1].lstrip("_") if keras else name[-1], value)
        for name, value in iter_attributes(value if keras else _module_attributes(module))
        if id(value) in variables
    ]
    if not keras:
        return named
    names = {id(value): (name, value) for name, value in named}
    for item in [item for name in _OWN for item in value.get(name, ()) if id(item) in variables]:
        alone = next((name.lstrip("_") for name, value in value.items() if value is item), None)
        names[id(item)] = alone or str(item.name).rpartition("/")[2].partition(":")[0], item
    return list(names.values())


def describe_module(module: Any) -> dict[str, Any]:
    """Return the framework's class of a module, and its plain settings."""
    framework, value, cls = model_framework(module), vars(module), framework_class(module)
    if ("torch", "ScriptModule") in class_bases(module):
        value, cls = value if "_parameters" in value else {}, getattr(module, "original_name", cls)
    settings = _keras_settings(module) if framework == "keras" else plain_settings(value)
    return {"class": cls, "settings": settings}


def _keras_settings(layer: Any) -> dict[str, Any]:
    try:
        configuration = layer.get_config()
    except Exception:  # noqa: BLE001 - a user's layer may lack its settings
        configuration = vars(layer)
    return dict(plain_settings(configuration), name=layer.name)


_MOST_TRIED = 4
_MOST_STEPS = 1024  # of a sequence whose length is a guess


def _zeros(shape: list[int], dtype: str, _: int) -> Any:
    return np.zeros((1, *shape), dtype)


class ModelRunner:
    """A model that can be called; one subclass per framework."""

    framework = ""
    libraries: tuple[str, ...] = ()
    observable = True
    forms: tuple[str, ...] = ()
    """kinds of files that `save` writes and `fill` loads"""
    channel_axis = -1
    """that of the images that the model takes and returns"""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.style = 0
        self.exact: Any = None
        self.notes: list[str] = []
        self._recorder: CallRecorder | None = None

    def inputs(self) -> list[InputRow]:
        """Return the inputs that the model declares: name, shape without batch, dtype, batch."""
        return []

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs of the model in evaluation mode."""
        styles = self.styles(names, [self.tensor(array, exact=exact) for array in arrays])
        model = self.exact if exact else self.model
        return styles[self.style](model)

    def styles(self, names: list[str], inputs: list[Any]) -> list[Callable[[Any], Any]]:
        """Return the ways of passing inputs: by position, by name, as a dict, several as a list."""
        by_name = dict(paired(names, inputs))
        ways = [lambda f: f(*inputs), lambda f: f(**by_name), lambda f: f(by_name), lambda f: f(inputs)]
        return ways if len(inputs) > 1 else ways[:3]

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return the array as the framework's tensor."""
        return array.astype(np.float64) if exact and array.dtype == np.float32 else array

    def named(self, outputs: Any) -> list[tuple[str, Any]]:
        """Return the outputs by name."""
        return named_tensors(outputs)

    def outputs(self, outputs: Any) -> list[tuple[str, Any]]:
        """Return the named output arrays."""
        return [(name, to_array(tensor)) for name, tensor in self.named(outputs)]

    def make_exact(self, names: list[str], arrays: list[Any], *, copied: bool) -> None:
        """Create the model in float64; raise any error if that is impossible.

        A `copied` one has float64 weights, another one may be the model itself, which casts its own.
        """
        del names, arrays, copied
        raise UnsupportedError(f"{self.framework} models of this kind have no float64 form")

    def layers(self) -> list[BuiltLayer]:
        """Return path, class, settings and tensors (the framework's, by name) of every layer."""
        if self.model is None:
            return []
        sign, variables = "." if self.framework == "torch" else "/", {*map(id, self.variables())}
        rows = []
        for path, module in iter_modules(self.model):
            facts = describe_module(module)
            tensors = {name: x for name, x in own_tensors(module, variables) if not is_missing(x)}
            rows.append(layer_row(sign.join(path), facts["class"], facts["settings"], tensors))
            if self.framework == "torch":
                rows[-1]["name"] = type(module).__name__
        return rows

    def variables(self) -> list[Any]:
        """Return the model's variables, whose number names each one in a description; none of PyTorch."""
        return model_variables(self.model)

    def describe(self, called: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return every module by its first path, with the facts of a call (see build).

        `own` names a user-defined class that defines the call. `tensors` are its own tensors: name, and
        number among the variables, or key in PyTorch's state_dict.
        """
        numbers = {id(variable): index for index, variable in enumerate(self.variables())}
        stored = self.model.state_dict(keep_vars=True) if self.framework == "torch" else {}
        rows = []
        for path, module in iter_modules(self.model):
            own = type(module).__name__ if self.has_own_call(module) else ""
            named = [
                [name, numbers.get(id(tensor), ".".join([*path, name]))]
                for name, tensor in own_tensors(module, numbers)
            ]
            tensors = [row for row in named if isinstance(row[1], int) or row[1] in stored]
            row = dict(describe_module(module), path=path, own=own, tensors=tensors)
            row["products"] = {
                name: called[id(tensor)]["orders"]
                for name, tensor in own_tensors(module, numbers)
                if id(tensor) in called and is_own_class(module)
            }
            rows.append(dict(row, **called.get(id(module), {})))
        return rows

    def number(self) -> bool:
        """Fill every variable with its own number, so that its position in a file can be identified.

        Return False if names identify the tensors.
        """
        for index, variable in enumerate(self.variables()):
            # Keras 3's variables name their types.
            dtype = getattr(variable.dtype, "as_numpy_dtype", variable.dtype)
            variable.assign(numbered_array(index, variable.shape, dtype))
        return True

    def stored(self) -> Any:
        """Return the tensors by what names them in a description: their numbers, or keys in PyTorch."""
        return self.variables()

    def put(self, values: Mapping[Any, Any]) -> None:
        """Give values to the tensors that a description names: by number, or by key in PyTorch."""
        variables = self.variables()
        for index, array in values.items():
            dtype = getattr(variables[index].dtype, "as_numpy_dtype", variables[index].dtype)
            variables[index].assign(array.astype(dtype))

    def save(self, file: str, form: str) -> str:
        """Write the model in one of `forms` to a file without a suffix; return the path to read."""
        raise NotImplementedError

    def outline(self, file: str, form: str) -> tuple[str, bool]:
        """Write what `save` does, perhaps without numbers; return the path, and whether they are there."""
        return self.save(file, form), True

    def fill(self, file: str, form: str, optimizers: list[dict[str, Any]]) -> None:
        """Load such a path strictly, and the optimizers in it, which are created as a program would.

        Raise the framework's error unless values and variables match one to one.
        """
        raise NotImplementedError

    def bounded(self, guessed: list[list[int]]) -> list[list[int]]:
        """Return the guessed shapes, none if a model of words would compute that many steps."""
        long = any(len(shape) == 1 and shape[0] > _MOST_STEPS for shape in guessed)
        words = long and any("Embedding" in framework_class(module) for _, module in iter_modules(self.model))
        return [] if words else guessed

    def build(self, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
        """Create missing weights by a call with inputs of these shapes; return the facts of the call.

        `shapes` are the user's, without the batch. Raise UsageError if a shape is missing, or if the model
        cannot be called.
        """
        raise NotImplementedError

    def follow(self, shapes: list[list[int]]) -> dict[int, dict[str, Any]]:
        """Call the model with zeros; return the facts of the call by module id (see CallFacts)."""

        def attempt(names: list[str], arrays: list[Any]) -> dict[int, dict[str, Any]]:
            trace = self.trace()
            if trace is None:
                self.call(names, arrays)
                return {}
            facts = CallFacts(self, trace)
            with self.observe(facts), trace.following():
                self.call(names, arrays)
            return facts.facts()

        calls: dict[int, dict[str, Any]] = self.call_first(attempt, shapes)
        return calls

    def call_first(
        self,
        attempt: Callable[[list[str], list[Any]], Any],
        shapes: list[list[int]],
        named: Mapping[str, str | None] | None = None,
        make: Callable[[list[int], str, int], Any] = _zeros,
        hint: str | None = None,
    ) -> Any:
        """Return what `attempt` does for the first dtypes and way of passing inputs that work.

        Args:
            attempt: called with the names of the inputs and their arrays.
            shapes: the shapes of the inputs, without the batch.
            named: the dtypes of the inputs by name; None for one that is numbers or integers.
            make: returns an input by its shape, dtype and number.
            hint: the hint of the error.

        Raise UsageError with the error of the first attempt if none works.
        """
        declared = named or {f"input {index}": None for index in range(len(shapes))}
        names, dtypes = list(declared), [dtype or "float32" for dtype in declared.values()]
        free = [index for index, dtype in enumerate(declared.values()) if dtype is None][:_MOST_TRIED]
        first: Exception | None = None
        for chosen in itertools.product(("float32", "int32"), repeat=len(free)):
            for position, dtype in paired(free, chosen):
                dtypes[position] = dtype
            arrays = [make(shape, dtypes[index], index) for index, shape in enumerate(shapes)]
            for style in range(len(self.styles(names, arrays))):
                self.style = style
                try:
                    return attempt(names, arrays)
                except Exception as error:  # noqa: BLE001 - whatever the user's code raises
                    first = first or error
        assert first is not None  # noqa: S101 - there is an attempt
        shown = " and ".join(map(str, shapes))
        raise UsageError(
            f"the model cannot be called with inputs of shape {shown}: {last_error_line(first)}", hint=hint
        ) from first

    def trace(self) -> Trace | None:
        """Return a new trace of the framework that computes, None if it cannot be traced.

        It also records the products with the tensors of own classes, under their ids.
        """
        trace = create_tracer(self._backend())
        if trace is None:
            return None
        variables = {*map(id, self.variables())}
        for _, module in iter_modules(self.model):
            own = is_own_class(module)
            for _, tensor in own_tensors(module, variables):
                trace.add_own(_handle(tensor), id(tensor) if own else None)
        return trace

    def _backend(self) -> str:
        return self.framework

    def record_operations(
        self, recorder: OperationRecorder, names: list[str], arrays: list[Any], *, exact: bool
    ) -> str:
        """Call the model and record its operations; return the library that names them, "" if none does."""
        trace = self.trace()
        if trace is None or not self.observable:
            return ""
        trace.failed = True  # orders of entries are not needed
        trace.operation = recorder.operation
        with self.observe(recorder, exact=exact), trace.following():
            self.call(names, arrays, exact=exact)
        return trace.library

    def has_own_call(self, module: Any) -> bool:
        """Return whether a module's function is that of a user-defined class."""
        return has_own_call(module)

    def feature_axis(self, module: Any) -> Callable[[int], int] | None:
        """Return the axis of a module's features by the rank of a tensor, None if it has no own tensors."""
        del module
        return None

    def holds_tensors(self, module: Any) -> bool:
        """Return whether a module has tensors."""
        return bool(getattr(module, "weights", None))

    def arrays_of(self, module: Any) -> dict[str, Any]:
        """Return a module's own tensors by name as arrays; raise ValueError if it contains modules."""
        if next(itertools.islice(iter_modules(module), 1, None), None) is not None:
            raise ValueError("the module contains other modules")
        named = own_tensors(module, {*map(id, getattr(module, "weights", None) or ())})
        return {name: to_array(tensor) for name, tensor in named if tensor is not None}

    def compute(self, module: Any, x: Any, like: Any) -> Any:
        """Return a module's result for an array as a tensor of the type of `like`."""
        tensorflow: Any = sys.modules["tensorflow"]
        return module(tensorflow.cast(tensorflow.constant(x), like.dtype)).numpy()

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
        first = self.framework in ("torch", "onnx") and any("Conv" in part["class"] for part in self.layers())
        return "first" if first else ""


def numbered_array(index: int, shape: Any, dtype: Any) -> Any:
    """Return an array whose elements have the number's bits: every type has enough bits."""
    width = np.dtype(dtype).itemsize
    whole = np.full(tuple(int(extent) for extent in shape), index + 1, f"uint{8 * min(width, 8)}")
    return whole.view(dtype) if width <= 8 else whole.astype(dtype)


def layer_row(path: str, cls: str, settings: dict[str, Any], tensors: dict[str, Any]) -> BuiltLayer:
    """Return the row of a layer."""
    return {"path": path or ROOT, "class": cls, "name": cls, "settings": settings, "tensors": tensors}


@contextlib.contextmanager
def refusals(reader: str, file: str, hint: str | None = None) -> Iterator[None]:
    """Raise UsageError for whatever a library's reader raises."""
    try:
        yield
    except CkpttoolError:
        raise
    except Exception as error:
        raise UsageError(f"{reader}: {_all_lines(error)}", file=file, hint=hint) from error


# For weights of another model; ckpttool.verification.two_models completes it with the files' names.
CONVERT = "convert the checkpoint to this model first"


_PREFERRED = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights")


class TorchRunner(ModelRunner):
    """A torch.nn.Module."""

    framework = "torch"
    libraries = ("torch",)
    forms = ("torch",)
    channel_axis = 1

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._torch: Any = sys.modules["torch"]

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return a torch tensor; integers as int64, numbers in the only type of the parameters."""
        if array.dtype.kind in "iu":
            array = array.astype(np.int64)
        tensor = self._torch.from_numpy(np.ascontiguousarray(super().tensor(array, exact=exact)))
        if exact or not tensor.is_floating_point():
            return tensor
        own = {parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point()}
        return tensor.to(own.pop()) if len(own) == 1 else tensor

    def styles(self, names: list[str], inputs: list[Any]) -> list[Callable[[Any], Any]]:
        """Return the ways of passing inputs; several go by name first if the model has these parameters."""
        ways = super().styles(names, inputs)
        if len(names) > 1 and {*self.parameter_names()}.issuperset(names):
            ways[:2] = ways[1::-1]
        return ways

    def parameter_names(self) -> list[str]:
        """Return the names of what the model's call receives."""
        return list(inspect.signature(self.model.forward).parameters)

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs without gradients."""
        self.model.eval()
        with self._torch.no_grad():
            return super().call(names, arrays, exact=exact)

    def make_exact(self, names: list[str], arrays: list[Any], *, copied: bool) -> None:
        """Create a copy in float64, without one of the parameters in their own type."""
        del names, arrays, copied
        plain = [param for param in self.model.parameters() if type(param) is self._torch.nn.Parameter]
        known = {
            id(parameter): self._torch.nn.Parameter(parameter.detach().double(), parameter.requires_grad)
            for parameter in plain
            if parameter.is_floating_point()
        }
        self.exact = copy.deepcopy(self.model, known).double().eval()

    def variables(self) -> list[Any]:
        """Return nothing: names identify the tensors."""
        return []

    def number(self) -> bool:
        """Return False: keys identify the tensors."""
        return False

    def stored(self) -> Any:
        """Return parameters and buffers by their keys."""
        return self.model.state_dict(keep_vars=True)

    def put(self, values: Mapping[Any, Any]) -> None:
        """Copy values to parameters and buffers by their keys."""
        stored = self.stored()
        with self._torch.no_grad():
            for key, array in values.items():
                stored[key].copy_(self._torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape)))

    def outline(self, file: str, form: str) -> tuple[str, bool]:
        """Write the state_dict without its numbers, since torch 2.6."""
        skip = getattr(self._torch.serialization, "skip_data", contextlib.nullcontext)
        with skip():
            return self.save(file, form), skip is contextlib.nullcontext

    def save(self, file: str, form: str) -> str:
        """Write the state_dict, since torch 2.6 without checksums, which take longer than the rest."""
        del form
        options = self._torch.serialization
        change = getattr(options, "set_crc32_options", lambda _: None)
        with contextlib.ExitStack() as undo:
            undo.callback(change, getattr(options, "get_crc32_options", lambda: None)())
            change(False)
            # To a path it writes in small pieces.
            self._torch.save(self.model.state_dict(), undo.enter_context(open(file + ".pt", "wb")))
        return file + ".pt"

    def fill(self, file: str, form: str, optimizers: list[dict[str, Any]]) -> None:
        """Load the file strictly; raise ValueError for a state of another shape."""
        del form
        contents, named = _load(self._torch, file), dict(self.model.named_parameters())
        # A file with optimizers has the state_dict of the model beside theirs.
        self.model.load_state_dict(
            contents["model"] if isinstance(contents.get("model"), dict) else contents, strict=True
        )
        # With both frameworks in one process, creating an optimizer can abort it.
        for row in [] if "tensorflow" in sys.modules else optimizers:
            groups = [{"params": [named[name] for name in group]} for group in row["groups"]]
            optimizer = getattr(self._torch.optim, row["class"])(groups, lr=0.0)
            optimizer.load_state_dict(contents[row["name"]])
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if getattr(value, "ndim", 0) and value.shape != parameter.shape:
                        raise ValueError(f"the optimizer's {name} has the shape of another parameter")

    def build(self, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
        """Materialise lazy parameters by a call; return the facts of the call."""
        guessed = self.bounded(guessed)
        lazy = [name for name, parameter in self.model.named_parameters() if is_missing(parameter)]
        if lazy and not (shapes or guessed):
            raise UsageError(
                "the model has parameters without a shape before its first call",
                path=lazy[0],
                hint="pass its input shape: --input-shape N, or --input-shape C,H,W for images",
            )
        if shapes or lazy:
            return self.follow(shapes or guessed)
        # A configuration indicates images with channels last.
        for shape in _guess_shapes(guessed):
            with contextlib.suppress(Exception):  # the shape was a guess
                return _drop_input_orders(self.follow(shape), shape)
        return {}

    def feature_axis(self, module: Any) -> Callable[[int], int] | None:
        """Return the second axis for layers of images, else the last one."""
        if not own_tensors(module):
            return None
        name = framework_class(module)
        channels = any(part in name for part in ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "PReLU"))
        return lambda rank: 1 if channels else rank - 1

    def holds_tensors(self, module: Any) -> bool:
        """Return whether a module itself has parameters."""
        return bool(vars(module).get("_parameters"))

    def compute(self, module: Any, x: Any, like: Any) -> Any:
        """Return a module's result for an array as a tensor of the type of `like`."""
        with self._torch.no_grad():
            return module(self._torch.from_numpy(x).to(like.device, like.dtype)).cpu().numpy()

    @contextlib.contextmanager
    def observe(self, recorder: CallRecorder, *, exact: bool = False) -> Iterator[None]:
        """Record every module's calls by hooks."""
        hooks: list[Any] = []
        records: list[tuple[Any, Any]] = []

        def attach(module: Any, path: str) -> None:
            def begin(_: Any, args: Any, kwargs: Any = None) -> None:
                records.append((module, recorder.enter(path, args, kwargs or {}, module)))

            def end(_: Any, args: Any, *rest: Any) -> None:
                del args
                while records[-1][0] is not module:
                    records.pop()  # its call raised an error, which the model caught
                recorder.leave(records.pop()[1], rest[-1])

            for register, hook in (
                (module.register_forward_pre_hook, begin),
                (module.register_forward_hook, end),
            ):
                try:
                    hooks.append(register(hook, with_kwargs=True))
                except TypeError:  # before torch 2.0
                    hooks.append(register(hook))

        try:
            for path, module in iter_modules(self.exact if exact else self.model):
                attach(module, ".".join(path) or ROOT)
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def load(self, file: str, part: str | None = None, *, run_code: bool = False) -> list[str]:
        """Load a state_dict strictly, from a torch, safetensors or npz file."""
        contents = _read_torch_file(self._torch, file, run_code=run_code)
        candidates = [(repr(name) if name else "", tensors) for name, tensors in _state_dicts(contents)]
        if part is not None:
            candidates = [(repr(part), _part_of(contents, part.strip("/").split("/")))]
        if not candidates or candidates[0][1] is None:
            raise UsageError("the file contains no state_dict", file=file, path=part)
        candidates += [
            (f"{name} without {prefix}".lstrip(), bare)
            for name, whole in candidates
            for prefix, bare in _unwrapped(whole)
        ]
        fitting: list[str] = []
        first: Exception | None = None
        for name, contents in candidates:
            try:
                if not fitting:
                    self.model.load_state_dict(contents, strict=True)
                elif {*contents} != {*self.model.state_dict()}:
                    continue
                fitting.append(name)
            except Exception as error:  # noqa: BLE001 - a hook of the user's model may raise anything
                first = first or error
        if not fitting:
            raise UsageError(
                f"load_state_dict(strict=True) refuses the file: {_all_lines(first)}",
                file=file,
                hint=CONVERT,
            )
        also = f"; {', '.join(fitting[1:])} would fit, too" if fitting[1:] else ""
        return [f"the state_dict {fitting[0]} of the file was loaded{also}"] if fitting[0] or also else []

    def round_weights(self, dtype: str) -> None:
        """Round parameters and buffers."""
        short = getattr(self._torch, dtype)
        with self._torch.no_grad():
            for tensor in itertools.chain(self.model.parameters(), self.model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(tensor.to(short).to(tensor.dtype))

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return a module's result with changed tensors and settings, which are restored afterwards."""
        model = self.exact if exact else self.model
        module = model if path == ROOT else submodule(model, path)
        original: Any
        with contextlib.ExitStack() as undo, self._torch.no_grad():
            for full, array in changes["tensors"].items():
                part, _, name = full.rpartition("/")
                owner = submodule(module, part.replace("/", "."))
                original = getattr(owner, name, None)
                value = self._torch.from_numpy(np.ascontiguousarray(array))
                value = value.to(next((parameter.dtype for parameter in module.parameters()), value.dtype))
                if original is None:
                    undo.callback(setattr, owner, name, None)
                    setattr(owner, name, self._torch.nn.Parameter(value))
                else:
                    undo.callback(setattr, original, "data", original.data)
                    original.data = value.to(original.dtype)
            for name, value in changes["settings"].items():
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, tuple(value) if isinstance(value, list) else value)
            return module(*call[0], **call[1])


def submodule(module: Any, path: str) -> Any:
    """Return a module by its path; programs have no get_submodule."""
    for name in path.split(".") if path else ():
        module = getattr(module, name)
    return module


def is_missing(tensor: Any) -> bool:
    """Return whether a parameter has no values: none at all, or those of the first call."""
    return tensor is None or type(tensor).__name__.startswith("Uninitialized")


def _drop_input_orders(
    calls_by_module: dict[int, dict[str, Any]], guessed: list[list[int]]
) -> dict[int, dict[str, Any]]:
    """Return the facts of a call, without the order of vectors of guessed length.

    A module with such an input may receive a flattened image: a model that flattens accepts a vector
    too.
    """
    vectors = [[[1, shape[0]]] for shape in guessed if len(shape) == 1]
    for calls in calls_by_module.values():
        takes = calls.get("orders", {}).get("in")
        if isinstance(takes, dict) and [list(part) for part in takes["parts"] or ()] in vectors:
            del calls["orders"]["in"]
    return calls_by_module


def _guess_shapes(guessed: list[list[int]]) -> list[list[list[int]]]:
    if not guessed:
        return []
    first = [[shape[-1], *shape[:-1]] if len(shape) > 2 else shape for shape in guessed]
    rows = [[*shape[1:], shape[0]] if len(shape) == 2 else shape for shape in first]
    frames = [[s[0], s[-1], *s[1:-1]] if len(s) > 3 else s for s in guessed]
    return [first, rows, frames, guessed]


def _all_lines(error: BaseException | None) -> str:
    return " ".join(str(error).split())[:600]


def _read_torch_file(torch: Any, file: str, *, run_code: bool) -> Any:
    if file.endswith(".npz"):
        with refusals("NumPy refuses the file", file), np.load(file, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    if file.endswith(".safetensors"):
        return _read_safetensors(file)
    if not os.path.isfile(file):  # a prefix or a folder
        raise UsageError("PyTorch loads only single files", file=file, hint=CONVERT)
    try:
        return _load(torch, file, weights_only=True)
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
            else CONVERT,
        ) from error


def _load(torch: Any, file: str, **options: Any) -> Any:
    """Return what a file of torch contains; tensors of an archive are read when they are used."""
    if "mmap" in inspect.signature(torch.load).parameters and zipfile.is_zipfile(file):  # since torch 2.1
        options["mmap"] = True
    return torch.load(file, map_location="cpu", **options)


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
    with refusals("safetensors refuses the file", file):
        return load_file(file)


def _state_dicts(contents: Any, name: str = "", depth: int = 3) -> list[tuple[str, Any]]:
    """Return the dicts of tensors in a loaded file with their names, usual names first."""
    contents = _opened(contents)
    if not hasattr(contents, "items") or not depth:
        return []
    dicts = [(name, contents)] if any(hasattr(item, "detach") for item in contents.values()) else []
    order = sorted(contents, key=lambda key: _PREFERRED.index(key) if key in _PREFERRED else len(_PREFERRED))
    for key in order:
        dicts += _state_dicts(contents[key], f"{name}.{key}" if name else str(key), depth - 1)
    return dicts


def _opened(contents: Any) -> Any:
    """Return a whole module's state_dict; anything else as it is."""
    return contents.state_dict() if hasattr(contents, "named_modules") else contents


def _part_of(data: Any, steps: list[str]) -> Any:
    """Return the dict below a path of keys, whose dots divide steps too; None without one."""
    data = _opened(data)
    if not steps:
        return data
    if not hasattr(data, "items"):
        return None
    for count in range(len(steps), 0, -1):
        for sign in "/.":
            key = sign.join(steps[:count])
            if hasattr(_opened(data.get(key)), "items"):
                return _part_of(data[key], steps[count:])
    start = ".".join(steps) + "."
    return {key[len(start) :]: tensor for key, tensor in data.items() if str(key).startswith(start)} or None


def _unwrapped(tensors: Any) -> Iterator[tuple[str, Any]]:
    """Yield a state_dict without the prefixes that all of its names have: a wrapper's, e.g. `module.`."""
    names = [str(key) for key in tensors]
    start = ""
    while names and all("." in name[len(start) :] for name in names):
        start = names[0][: names[0].index(".", len(start)) + 1]
        if not all(name.startswith(start) for name in names):
            return
        yield f"the prefix {start!r}", {str(key)[len(start) :]: tensor for key, tensor in tensors.items()}


class TensorFlowRunner(ModelRunner):
    """A tf.Module: every call of a module is recorded."""

    framework = "tensorflow"
    libraries: tuple[str, ...] = ("tensorflow",)
    forms: tuple[str, ...] = ("tf",)

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return a TensorFlow tensor, or the array itself if TensorFlow is not loaded."""
        tensor = super().tensor(array, exact=exact)
        tensorflow: Any = sys.modules.get("tensorflow")
        return tensor if tensorflow is None else tensorflow.constant(tensor)

    def load(self, file: str, part: str | None = None, *, run_code: bool = False) -> list[str]:
        """Restore a TensorFlow checkpoint; every variable of the model must have a value."""
        del run_code
        return restore_tensorflow(self.model, file, part)

    def round_weights(self, dtype: str) -> None:
        """Round the floating-point variables."""
        tensorflow: Any = sys.modules["tensorflow"]
        for variable in self.variables():
            if tensorflow.as_dtype(variable.dtype).is_floating:
                value = tensorflow.constant(to_array(variable))
                variable.assign(tensorflow.cast(tensorflow.cast(value, dtype), variable.dtype))

    @contextlib.contextmanager
    def observe(self, recorder: CallRecorder, *, exact: bool = False) -> Iterator[None]:
        """Record calls by wrapping `__call__` of the classes of all modules."""
        with _CallWrapper(recorder, self.modules_by_path(exact=exact)).wrapped():
            yield

    def modules_by_path(self, *, exact: bool) -> list[tuple[Any, str]]:
        """Return every module with its path."""
        del exact
        return [(module, "/".join(path) or ROOT) for path, module in iter_modules(self.model)]

    def save(self, file: str, form: str) -> str:
        """Write the model's objects; return the prefix."""
        del form
        return str(_make_checkpoint(self.model).save(file))

    def fill(self, file: str, form: str, optimizers: list[dict[str, Any]]) -> None:
        """Restore the model and its optimizers from a prefix."""
        if optimizers:
            self._resume(file, form, optimizers)
        else:
            _make_checkpoint(self.model).restore(file).assert_consumed()

    def _resume(self, file: str, form: str, optimizers: list[dict[str, Any]]) -> None:
        """Load the model with its optimizers; raise the framework's error if something does not match."""
        model, weights, arguments = self.model, self.variables(), {}
        for row in optimizers:
            cls = getattr(keras_library(model, self.framework).optimizers, row["class"])
            arguments[row["name"]] = cls(learning_rate=0.0, **row["arguments"])
            arguments[row["name"]].build([weights[number] for number in row["groups"][0]])
        if form == "keras":
            model.compile(optimizer=next(iter(arguments.values())))
            model.load_weights(file)
            return
        tensorflow: Any = sys.modules["tensorflow"]
        if getattr(model, "optimizer", None) is not None and "optimizer" in arguments:
            model.compile(optimizer=arguments.pop("optimizer"))
        tensorflow.train.Checkpoint(model, **arguments).restore(file).assert_consumed()

    def build(self, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
        """Call a module if shapes are given or it has no variables yet; return the facts from its products.

        A tf.Module calls no layers: each variable used as a factor represents its module.
        """
        if not shapes and _has_variables(self.model):
            return self._probe_modules()
        if not _has_variables(self.model):
            self._create_weights(shapes or guessed)
        facts, products = self._probe_modules(), self.follow(shapes or guessed)
        for _, module in iter_modules(self.model):
            for _, variable in own_tensors(module, products):
                facts.setdefault(id(module), {}).setdefault("orders", products[id(variable)]["orders"])
        return facts

    def _probe_modules(self) -> dict[int, dict[str, Any]]:
        """Return how modules of a program's own classes multiply their inputs with a square matrix."""
        facts: dict[int, dict[str, Any]] = {}
        numbers = {*map(id, self.variables())}
        for _, module in iter_modules(self.model) if _is_eager() else ():
            if is_keras_layer(module) or not has_own_call(module):
                continue
            tensors = dict(own_tensors(module, numbers))
            matrix = next((tensor for tensor in tensors.values() if len(tensor_shape(tensor)) == 2), None)
            if matrix is None or len(set(tensor_shape(matrix))) > 1:
                continue
            before = {name: tensor.numpy() for name, tensor in tensors.items()}
            try:
                # Zeros, or an identity, are their own transpose.
                for number, (name, value) in enumerate(before.items()):
                    tensors[name].assign(np.random.default_rng(number).standard_normal(value.shape))
                drawn = {name: tensor.numpy() for name, tensor in tensors.items()}
                shape = (_SOME, tensor_shape(matrix)[0])
                computes = probe_module(drawn, shape, lambda x: self.compute(module, x, matrix))  # noqa: B023
            except Exception:  # noqa: BLE001, S112 - a module that takes other inputs
                continue
            finally:
                for name, value in before.items():
                    tensors[name].assign(value)
            if computes.get("kind") == "dense":
                names = {name: "kernel" if tensor is matrix else "bias" for name, tensor in tensors.items()}
                facts[id(module)] = {"computes": computes, "own": type(module).__name__}
                if computes["form"] == "out_in":
                    facts[id(module)]["names"] = names
        return facts

    def has_own_call(self, module: Any) -> bool:
        """Return False: a tf.Module has no call that shows its function."""
        del module
        return False

    def holds_tensors(self, module: Any) -> bool:
        """Return False: a tf.Module calls no layers."""
        del module
        return False

    def _create_weights(self, shapes: list[list[int]]) -> None:
        """Call the model with zeros; raise UsageError without shapes, or if that fails."""
        if not shapes:
            raise UsageError(
                "the model has no weights before its first call",
                hint="pass its input shape: --input-shape N, or --input-shape H,W,C for images",
            )
        self.call_first(self.call, shapes)


def _has_variables(model: Any) -> bool:
    try:
        return bool(model_variables(model))
    except ValueError:  # Sonnet's marker that there are no variables yet (sonnet/src/base.py).
        return False


def _make_checkpoint(model: Any, **others: Any) -> Any:
    tensorflow: Any = sys.modules["tensorflow"]
    try:
        return tensorflow.train.Checkpoint(model, **others)
    except TypeError:
        raise UnsupportedError(
            f"TensorFlow {tensorflow.__version__} cannot save an object as a whole", hint="use --to keras"
        ) from None


def restore_tensorflow(model: Any, file: str, part: str | None, **others: Any) -> list[str]:
    """Restore a model from the part of a checkpoint, or the first object that fits; return a note on it.

    `others` are restored at the same time, by name. Raise UsageError unless every variable has a value.
    """
    tensorflow: Any = sys.modules["tensorflow"]
    with refusals("TensorFlow cannot read the checkpoint", file):
        tops = [name.split("/")[0] for name, _ in tensorflow.train.list_variables(file)]
    first: Exception | None = None
    names = dict.fromkeys(top for top in tops if not top.startswith("_") and top not in others)
    for name in [part.strip("/")] if part else ["", *names]:
        try:
            top, *below = name.split("/")
            holder = model
            for step in reversed(below):
                holder = tensorflow.train.Checkpoint(**{step: holder})
            named = dict(others, **{top: holder})
            whole = tensorflow.train.Checkpoint(**named) if name else _make_checkpoint(model, **others)
            # `restore` also expects the counter of saves, which a file of `Checkpoint.write` lacks.
            getattr(whole, "read", whole.restore)(file).assert_existing_objects_matched()
        except Exception as error:  # noqa: BLE001 - the next entry may fit
            first = first or error
        else:
            return [f"the object {name!r} of the checkpoint was restored"] if name else []
    raise UsageError(
        f"tf.train.Checkpoint does not restore every variable of the model: {_all_lines(first)}",
        file=file,
        hint=CONVERT,
    )


class _CallWrapper:
    """Replaces `__call__` of layers' classes, and layers' activations, to record calls."""

    def __init__(self, recorder: CallRecorder, layers: list[tuple[Any, str]]) -> None:
        self._recorder, self._layers = recorder, layers
        self._paths = {id(layer): path for layer, path in layers}
        self._running: list[tuple[Any, Any]] = []

    def _recorded(self, inner: Any) -> Any:
        def outer(layer: Any, *args: Any, **kwargs: Any) -> Any:
            # A class's `__call__` also calls that of its base.
            if id(layer) not in self._paths or any(running is layer for running, _ in self._running):
                return inner(layer, *args, **kwargs)
            record = self._recorder.enter(self._paths[id(layer)], args, kwargs, layer)
            self._running.append((layer, record))
            try:
                result = inner(layer, *args, **kwargs)
            finally:
                self._running.pop()
            self._recorder.leave(record, result)
            return result

        return outer

    def _activated(self, layer: Any, inner: Any) -> Any:
        def outer(value: Any, *args: Any, **kwargs: Any) -> Any:
            record = next((r for running, r in reversed(self._running) if running is layer), None)
            if record is not None:
                self._recorder.before_activation(record, value)
            return inner(value, *args, **kwargs)

        return outer

    @contextlib.contextmanager
    def wrapped(self) -> Iterator[None]:
        """Record calls in the block."""
        classes = {type(hook) for hook, _ in self._layers}
        owners = {next((b for b in cls.__mro__ if "__call__" in vars(b)), cls) for cls in classes}
        with contextlib.ExitStack() as undo:
            for owner in owners:
                if "__call__" in vars(owner):
                    undo.callback(setattr, owner, "__call__", vars(owner)["__call__"])
                    setattr(owner, "__call__", self._recorded(vars(owner)["__call__"]))  # noqa: B010 - mypy
            for layer, _ in self._layers if self._recorder.activations else ():
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
    forms = ("tf", "keras")

    def __init__(self, model: Any, again: Callable[[], Any] | None = None) -> None:
        super().__init__(model)
        self._again = again
        self._in_place = False

    def inputs(self) -> list[InputRow]:
        """Return the inputs of a functional or Sequential model."""
        try:
            tensors = list(self.model.inputs or ())
        except (AttributeError, ValueError, TypeError):
            return []
        names = list(getattr(self.model, "input_names", None) or (str(tensor.name) for tensor in tensors))
        rows: list[InputRow] = []
        for name, tensor in paired(names, tensors):
            shape = [None if extent is None else int(extent) for extent in tensor.shape]
            dtype = getattr(tensor.dtype, "name", str(tensor.dtype))
            rows.append(
                {"name": name.partition(":")[0], "shape": shape[1:], "dtype": dtype, "batch": shape[0]}
            )
        return rows

    def tensor(self, array: Any, *, exact: bool) -> Any:
        """Return a tensor of Keras's backend, or the array itself for JAX."""
        if self._backend() == "torch":
            return sys.modules["torch"].from_numpy(ModelRunner.tensor(self, array, exact=exact))
        return super().tensor(array, exact=exact)

    def styles(self, names: list[str], inputs: list[Any]) -> list[Callable[[Any], Any]]:
        """Return Keras's ways: one input, a list, a dict by name, by position."""
        by_name = dict(paired(names, inputs))
        first = inputs[0] if len(inputs) == 1 else inputs
        return [lambda f: f(first), lambda f: f(by_name), lambda f: f(*inputs), lambda f: f(**by_name)]

    def call(self, names: list[str], arrays: list[Any], *, exact: bool = False) -> Any:
        """Return the outputs, with the first state of layers that keep theirs from call to call."""
        layers = [layer for _, layer in iter_modules(self.exact if exact else self.model)]
        for layer in layers:
            reset = getattr(layer, "reset_states", None) or getattr(layer, "reset_state", None)
            if getattr(layer, "stateful", False) and reset is not None and getattr(layer, "built", False):
                reset()
        with self._precision(layers if exact and self._in_place else []):
            return super().call(names, arrays, exact=exact)

    @contextlib.contextmanager
    def _precision(self, layers: list[Any]) -> Iterator[None]:
        """Let layers of Keras 3 compute in float64 with the weights that they have, which it casts."""
        if layers:
            policy = keras_library(self.model).DTypePolicy("float64")
            policy._variable_dtype = "float32"
        policies = [layer._dtype_policy for layer in layers]
        try:
            for layer in layers:
                layer._dtype_policy = policy
            yield
        finally:
            for layer, own in paired(layers, policies):
                layer._dtype_policy = own

    def named(self, outputs: Any) -> list[tuple[str, Any]]:
        """Return the outputs by the names that a functional model gives to several."""
        named_outputs = super().named(outputs)
        names = list(getattr(self.model, "output_names", None) or ())
        if isinstance(outputs, (list, tuple)) and len(names) == len(named_outputs) == len({*names}):
            return [(str(name), tensor) for name, (_, tensor) in paired(names, named_outputs)]
        return named_outputs

    def make_exact(self, names: list[str], arrays: list[Any], *, copied: bool) -> None:
        """Let Keras 3 compute in float64; create a copy from the configuration, or by the factory."""
        keras = keras_library(self.model)
        self._in_place = not copied and hasattr(keras, "DTypePolicy")
        if self._in_place:
            self.exact = self.model
            return
        floatx = keras.backend.floatx()
        try:
            keras.backend.set_floatx("float64")
            if self._again is not None:
                _set_policy(keras, "float64")
                exact = self._again()
            else:
                with zero_initializers(keras):
                    exact = type(self.model).from_config(_in_float64(self.model.get_config()))
            self.exact = exact
            if len(exact.weights) != len(self.model.weights):
                self.call(names, arrays, exact=True)  # the first call creates the others
            for variable, value in paired(exact.weights, self.model.weights):
                array = to_array(value)
                variable.assign(array.astype(np.float64) if array.dtype == np.float32 else array)
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
        with refusals("load_weights refuses the file", file, CONVERT):
            self.model.load_weights(file)
        return []

    def modules_by_path(self, *, exact: bool) -> list[tuple[Any, str]]:
        """Return every layer with its path in the model: automatic names of the float64 copy are others."""
        known = list(iter_modules(self.model))
        modules = list(iter_modules(self.exact)) if exact and self.exact is not self.model else known
        paths = known if len(modules) == len(known) else modules
        return [(module, "/".join(path) or ROOT) for (path, _), (_, module) in paired(paths, modules)]

    def number(self) -> bool:
        """Fill every weight with its own number."""
        weights = self.model.get_weights()
        self.model.set_weights(
            [numbered_array(n, weight.shape, weight.dtype) for n, weight in enumerate(weights)]
        )
        return True

    def stored(self) -> Any:
        """Return the weights by their numbers; the arrays in a session of TensorFlow 1."""
        return self.variables() if _is_eager() else self.model.get_weights()

    def put(self, values: Mapping[Any, Any]) -> None:
        """Give values to weights by their numbers, in a session of TensorFlow 1 too."""
        weights = self.model.get_weights()
        for index, array in values.items():
            weights[index] = array.astype(weights[index].dtype)
        self.model.set_weights(weights)

    def save(self, file: str, form: str) -> str:
        """Write the model as TensorFlow objects or a `.weights.h5` file; return the prefix or the file."""
        if form == "keras":
            self.model.save_weights(file + ".weights.h5")
            return file + ".weights.h5"
        if self._saves_from_session():
            self.model.save_weights(file, save_format="tf")
            return file
        return super().save(file, form)

    def fill(self, file: str, form: str, optimizers: list[dict[str, Any]]) -> None:
        """Load the file, with its optimizers."""
        if optimizers:
            self._resume(file, form, optimizers)
        elif form == "keras":
            self.model.load_weights(file)
        elif self._saves_from_session():
            status = self.model.load_weights(file)
            if _tensorflow_version() >= (2, 0):
                # TensorFlow 1 also requests objects without values; the comparison afterwards is the proof
                # there.
                status.assert_consumed()
        else:
            super().fill(file, form, optimizers)

    def _saves_from_session(self) -> bool:
        """Return whether Keras has the session that an old TensorFlow saves from."""
        if not is_tf_module(self.model) and ("keras", "Layer") in class_bases(self.model):
            if self._backend() != "tensorflow":
                raise UnsupportedError(
                    f"this Keras uses the {self._backend()} backend", hint="use --to keras"
                )
            return False
        # Before 2.4 tf.train.Checkpoint accepts no root object.
        return _tensorflow_version() < (2, 4) or not _is_eager()

    def build(self, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
        """Call the model if it has no weights yet; return the facts of a call.

        A built model is called with the inputs that it declares, unless shapes are given.
        """
        has_weights = bool(self.model.weights) and bool(getattr(self.model, "built", True))
        if has_weights and not shapes and not _is_eager():
            return {}  # a call would add to TensorFlow's single graph
        if not has_weights:
            shapes = shapes or self.bounded(guessed)
            self._create_weights(shapes)  # building calls the layers with symbols, which have no order
            return self.follow(shapes)
        if shapes:
            return self.follow(shapes)
        declared = [[_SOME if extent is None else extent for extent in row["shape"]] for row in self.inputs()]
        with contextlib.suppress(Exception):  # the lengths of free axes are guessed
            return self.follow(declared) if declared else {}
        return {}

    def _backend(self) -> str:
        if (
            not is_tf_module(self.model)
            and "keras" in sys.modules
            and ("keras", "Layer") in class_bases(self.model)
        ):
            config: Any = getattr(sys.modules["keras"], "config", None)
            if hasattr(config, "backend"):
                return str(config.backend())
        return "tensorflow"

    def has_own_call(self, module: Any) -> bool:
        """Return whether a layer's function is that of a user-defined class."""
        return has_own_call(module)

    def holds_tensors(self, module: Any) -> bool:
        """Return whether a layer has weights."""
        return bool(getattr(module, "weights", None))

    def feature_axis(self, module: Any) -> Callable[[int], int] | None:
        """Return the axis that a layer's settings name, None for a layer without own weights."""
        if not (any(vars(module).get(name) for name in _OWN) or hasattr(module, "cell")):
            return None
        axis = getattr(module, "axis", -1)
        first = getattr(module, "data_format", None) == "channels_first"
        index = 1 if first else axis if isinstance(axis, int) else -1
        return lambda rank: index % rank

    def call_layer(self, path: str, call: tuple[Any, Any], changes: Message, *, exact: bool) -> Any:
        """Return a layer's result with changed tensors and settings, which are restored afterwards."""
        layers = {path: layer for layer, path in self.modules_by_path(exact=exact)}
        layer = layers[path]
        known = {*map(id, (self.exact if exact else self.model).weights)}
        own = dict(own_tensors(layer, known))
        start = "" if path == ROOT else path + "/"
        for layer_path, child in layers.items():
            if layer_path.startswith(start) and layer_path != path:
                rows = own_tensors(child, known)
                own.update((layer_path[len(start) :] + "/" + name, variable) for name, variable in rows)
        with contextlib.ExitStack() as undo:
            for name, array in changes["tensors"].items():
                variable = own[name]
                undo.callback(variable.assign, to_array(variable))
                variable.assign(array)
            for name, value in changes["settings"].items():
                undo.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, _keras_setting(layer, name, value))
            whole = exact and self._in_place
            with self._precision([module for _, module in iter_modules(self.model)] if whole else []):
                return layer(*call[0], **call[1])

    def channels(self) -> str:
        """Return the data format of the first convolution or pooling layer."""
        for layer in self.layers():
            order = layer["settings"].get("data_format")
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
        return keras_library(layer).activations.get(value)
    return tuple(value) if isinstance(value, list) else value


@contextlib.contextmanager
def zero_initializers(keras: Any) -> Iterator[None]:
    """Let weights begin with zeros in the block, not with drawn numbers: values of a file replace them."""
    zeros = keras.initializers.Zeros()
    drawing = [
        kind
        for kind in vars(keras.initializers).values()
        if isinstance(kind, type) and "seed" in inspect.signature(kind).parameters
    ]
    owners = {next(base for base in kind.__mro__ if "__call__" in vars(base)) for kind in drawing}
    with contextlib.ExitStack() as undo:
        for owner in owners:
            undo.callback(setattr, owner, "__call__", vars(owner)["__call__"])
            setattr(owner, "__call__", lambda _, *args, **kwargs: zeros(*args, **kwargs))  # noqa: B010 - mypy
        yield


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
        return type(config)([_in_float64(item) for item in config])
    return config


def keras_library(model: Any, framework: str = "keras") -> Any:
    """Return the Keras of a model or layer: keras, tf_keras, or that of TensorFlow, also for its modules."""
    tops = [base.__module__.partition(".")[0] for base in type(model).__mro__ if framework == "keras"]
    name = next((top for top in tops if top in ("keras", "tf_keras")), "")
    return sys.modules[name] if name else sys.modules["tensorflow"].keras


def _tensorflow_version() -> tuple[int, ...]:
    version: str = sys.modules["tensorflow"].__version__
    return tuple(map(int, version.split(".")[:2]))


def _is_eager() -> bool:
    tensorflow: Any = sys.modules.get("tensorflow")
    return tensorflow is None or bool(tensorflow.executing_eagerly())


def wrap_model(model: Any, again: Callable[[], Any] | None = None) -> ModelRunner:
    """Return what runs a model of any framework; `again` creates another one like it."""
    framework = model_framework(model)
    if framework == "torch":
        return TorchRunner(model)
    return KerasRunner(model, again) if framework == "keras" else TensorFlowRunner(model)
