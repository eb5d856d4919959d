"""Build a user's model in a child process."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ckpttool.core import deferred, search_paths
from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UnsupportedError, UsageError, WorkerError
from ckpttool.networks.messages import Message
from ckpttool.networks.tracing import (
    TorchTrace,
    Trace,
    create_tracer,
    first_tensor,
    iter_tensors,
    tensor_shape,
)

# Evidence from one call of a model: the layers that flatten an image before a dense layer.

_IMAGE, _SEQUENCE, _VECTOR = 4, 3, 2
_MOST_FOLLOWED = 2_000


class CallLog:
    """Calls of a model's modules and functions in order: module id, input shape, output shape."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        # Vectors that are no longer an image's numbers, whatever their width, and the numbers of the calls
        # with such an input. They are kept, because an id may be reused.
        self._mixed: dict[int, Any] = {}
        self._taking: set[int] = set()
        # Modules with tensors in the order of their first calls, and as bits the modules before each one and
        # before each tensor. The tensors are kept, because an id may be reused.
        self._order: dict[int, int] = {}
        self._before: list[int] = []
        self._flow: dict[int, tuple[Any, int]] = {}
        # The results of the last call, which is the model's own.
        self._made: Any = None

    def flow(self, module: Any, given: Any, made: Any) -> None:
        """Record which modules contribute to the output of a module or function (None)."""
        before, self._made = 0, made
        for tensor in iter_tensors(given):
            before |= self._flow.get(id(tensor), (None, 0))[1]
        if module is not None and _own_tensors(module):
            if id(module) not in self._order and len(self._order) < _MOST_FOLLOWED:
                self._order[id(module)] = len(self._order)
                self._before.append(before)
            if id(module) in self._order:
                before |= 1 << self._order[id(module)]
        for tensor in iter_tensors(made):
            self._flow[id(tensor)] = tensor, before | self._flow.get(id(tensor), (None, 0))[1]

    def order(self) -> dict[int, dict[str, Any]]:
        """Return per module the number of its first call, the calls that it depends on, and its outputs.

        `after` has a bit for each call, `leads` one for each output of the model that depends on this one.
        """
        if len(self._order) == _MOST_FOLLOWED:
            return {}
        outputs = [self._flow.get(id(tensor), (None, 0))[1] for tensor in iter_tensors(self._made)]
        return {
            module: {
                "call": number,
                "after": hex(self._before[number]),
                "leads": hex(sum((bits >> number & 1) << place for place, bits in enumerate(outputs))),
            }
            for module, number in self._order.items()
        }

    def note(self, module: Any, given: Any, made: Any) -> None:
        """Record one call; values that are not tensors are ignored."""
        taken, gave = tensor_shape(first_tensor(given)), tensor_shape(first_tensor(made))
        if not (taken and gave):
            return
        known = id(first_tensor(given)) in self._mixed
        if known:
            self._taking.add(len(self.seen))
        if len(taken) == len(gave) == _VECTOR and (known or _mixes(module)):
            self._mixed[id(first_tensor(made))] = first_tensor(made)
        self.seen.append((id(module), taken, gave))

    def flattened(self) -> dict[int, list[int]]:
        """Return per module the shape, without batch, of the image that the module receives flattened.

        That is the last image before it if it has as many elements and more than one position; an empty
        shape means that the module receives a vector from another source. Other modules are left out:
        where a sequence is flattened, its channels may be first or last.
        """
        found: dict[int, list[int]] = {}
        image: tuple[int, ...] = ()
        vectors: set[int] = set()
        for count, (number, taken, gave) in enumerate(self.seen):
            if len(taken) == _VECTOR:
                if count in self._taking:
                    found.setdefault(number, [])
                elif taken[1] == _element_count(image) and max(image) != taken[1]:
                    if len(image) >= _IMAGE - 1:
                        found.setdefault(number, list(image))
                elif taken[1] in vectors or not image:
                    found.setdefault(number, [])
            if len(gave) >= _SEQUENCE:
                image, vectors = gave[1:], set()
            elif len(gave) == _VECTOR and gave[1] != _element_count(image):
                vectors.add(gave[1])
        return found


class ModuleProbes:
    """Modules of user-defined classes, called once more in isolation to determine their function.

    The class does not show whether such a module multiplies x @ W or W @ x, or whether its two vectors
    are a norm's: its results for generated numbers do.
    """

    def __init__(self) -> None:
        self._given: dict[int, tuple[Any, Any]] = {}

    def note(self, module: Any, given: Any) -> None:
        """Record a module with its one input tensor; modules with several are not called again."""
        tensors = list(iter_tensors(given))
        if len(tensors) == 1 and len(tensor_shape(tensors[0])) > 1 and len(self._given) < _MOST_PROBED:
            self._given.setdefault(id(module), (module, tensors[0]))

    def found(self, tensors: Any, compute: Any) -> dict[int, dict[str, Any]]:
        """Return each module's function: `tensors(module)` by name, `compute(module, array, like)`."""
        found = {}
        for number, (module, like) in self._given.items():
            try:
                shape = tensor_shape(like)
                computes = probe_module(tensors(module), shape, lambda x: compute(module, x, like))  # noqa: B023
            except Exception:  # noqa: BLE001, S112 - a module that takes no other numbers
                continue
            found[number] = {"computes": computes}
        return found


_MOST_PROBED = 500
_MOST_PROBED_ENTRIES = 1 << 24
_CLOSE = 1e-3
_SMALL_INPUT = 3e-3
_EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-8, 1e-12)


def probe_module(tensors: dict[str, Any], shape: tuple[int, ...], compute: Any) -> dict[str, Any]:
    """Return a module's function of its tensors: its `kind`, the `form` of its matrix, its `epsilon`.

    Without a `kind` it matches none of the compared layers.
    """
    import numpy as np

    held = {name: np.asarray(each, "float64") for name, each in tensors.items()}
    ranks = sorted(each.ndim for each in held.values())
    if ranks not in ([2], [1, 2], [1], [1, 1]) or _element_count(shape) > _MOST_PROBED_ENTRIES:
        raise ValueError("no layer that is compared")
    x = np.random.default_rng(0).standard_normal(shape).astype("float32")
    vectors = [name for name, each in held.items() if each.ndim == 1]
    if 2 in ranks:
        (matrix,) = (each for each in held.values() if each.ndim == 2)
        return _as_matrix(np, x, matrix, [held[name] for name in vectors], compute)
    scale = next((name for name in vectors if name in ("weight", "gamma", "scale", "g", "a_2")), "")
    offset = next((held[name] for name in vectors if name != scale), None)
    if not scale or (offset is None and len(vectors) > 1):
        raise ValueError("no scale")
    return _as_norm(np, x * np.float32(_SMALL_INPUT), held[scale], offset, compute)


def _as_matrix(np: Any, x: Any, matrix: Any, biases: list[Any], compute: Any) -> dict[str, Any]:
    made = np.asarray(compute(x), "float64")
    fitting = []
    for form, each in (("out_in", matrix.T), ("in_out", matrix)):
        if x.shape[-1] != each.shape[0] or made.shape != (*x.shape[:-1], each.shape[1]):
            continue
        if biases and biases[0].shape[0] != each.shape[1]:
            continue
        linear = x.astype("float64") @ each + (biases[0] if biases else 0.0)
        close = (
            np.abs(made - activated).max() <= _CLOSE * (np.abs(activated).max() + 1e-30)
            for activated in _iter_activations(np, linear)
        )
        if any(close):
            fitting.append(form)
    return {"kind": "dense", "form": fitting[0]} if len(fitting) == 1 else {}


def _iter_activations(np: Any, x: Any) -> Any:
    """Yield the results of common activations."""
    sigmoid = 1 / (1 + np.exp(-x))
    yield from (x, np.maximum(x, 0), np.tanh(x), sigmoid, x * sigmoid, np.exp(x), np.log1p(np.exp(x)))
    yield np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)
    yield from (np.where(x > 0, x, slope * x) for slope in (0.01, 0.1, 0.2, 0.3))
    yield 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _as_norm(np: Any, x: Any, scale: Any, offset: Any, compute: Any) -> dict[str, Any]:
    made = np.asarray(compute(x), "float64")
    x = x.astype("float64")
    best: tuple[float, dict[str, Any]] = (_CLOSE, {})
    for axis in (x.ndim - 1, 1):
        if made.shape != x.shape or x.shape[axis] != scale.shape[0]:
            continue
        along = [1] * x.ndim
        along[axis] = -1
        for kind, centred in (("layer_norm", x - x.mean(axis, keepdims=True)), ("rms_norm", x)):
            square = (centred**2).mean(axis, keepdims=True)
            for epsilon in _EPSILONS:
                normed = centred / np.sqrt(square + epsilon) * scale.reshape(along)
                normed = normed if offset is None else normed + offset.reshape(along)
                error = float(np.abs(made - normed).max() / (np.abs(normed).max() + 1e-30))
                if error < best[0]:
                    best = error, {"kind": kind, "epsilon": epsilon}
    return best[1]


def call_facts(calls: CallLog, trace: Any, computed: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the facts of a call per module: `orders` of inputs and outputs or, untraced, `flatten`.

    `computed` are those of modules that were called once more (see ModuleProbes).
    """
    found = calls.order()
    orders = trace.orders()
    key = "orders" if orders else "flatten"
    for module, each in (orders or calls.flattened()).items():
        found.setdefault(module, {})[key] = each
    for module, computes in computed.items():
        found.setdefault(module, {}).update(computes)
    return found


def _element_count(shape: tuple[int, ...]) -> int:
    count = 1 if shape else 0
    for extent in shape:
        count *= extent
    return count


def _mixes(module: Any) -> bool:
    """Return whether a module has its own matrix, which mixes the order of its input."""
    return any(len(tensor_shape(each)) > 1 for each in _own_tensors(module))


def _own_tensors(module: Any) -> list[Any]:
    """Return a module's own tensors: a torch module's parameters, all weights of a Keras layer."""
    held = getattr(module, "_parameters", None)
    return list(held.values()) if isinstance(held, dict) else list(getattr(module, "weights", None) or ())


def call_in_first_way(
    attempts: Iterator[Callable[[], Any]], shapes: list[list[int]], hint: str | None = None
) -> Any:
    """Return the result of the first attempt to call a model that succeeds.

    Raise UsageError with the error of the first attempt if none does.
    """
    first: Exception | None = None
    for attempt in attempts:
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises
            first = first or error
    assert first is not None  # noqa: S101 - there is an attempt
    shown = " and ".join(map(str, shapes))
    raise UsageError(
        f"the model cannot be called with inputs of shape {shown}: {last_error_line(first)}", hint=hint
    ) from first


# The user's factory, named as `package.module:factory`.

_SHOWN = 300


def call_factory(name: str, arguments: Any) -> Any:
    """Return the result of the named factory; `arguments` is None, a list or a dict (by keyword).

    Raise a one-line UsageError if the module or factory does not exist, or if it raises.
    """
    found = find_named_object(name, "--like")
    if not callable(found) or (arguments is None and is_model(found)):
        return found
    given = {} if arguments is None else arguments
    try:
        return found(**given) if isinstance(given, dict) else found(*given)
    except (Exception, SystemExit) as error:
        hint = "correct it, or pass its arguments: --like-args '{\"NAME\": VALUE}'"
        raise UsageError(f"{name} raises {last_error_line(error)}", hint=hint) from error


def find_named_object(name: str, option: str) -> Any:
    """Return the object that `package.module:name` denotes; raise UsageError if there is none."""
    where, colon, what = name.partition(":")
    if not (where and colon and what):
        wanted, example = ("factory", "Actor") if option == "--like" else ("function", "loss")
        module = (name[:-3] if name.endswith(".py") else name).replace("/", ".")
        hint = f"e.g. {option} {module}:{example}, for the class or function {example}" if module else None
        raise UsageError(f"{option} requires package.module:{wanted}", found=name, hint=hint)
    found = _import_module(where, name)
    for part in what.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), 1)
            hint = f"did you mean {close[0]}" if close else None
            raise UsageError(f"{where} has no attribute {what}", hint=hint)
        found = getattr(found, part)
    return found


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
            hint="use --python to select the interpreter of the model's environment",
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


def has_own_call(value: Any, method: str) -> bool:
    """Return whether a user-defined class above the first framework class defines the forward pass."""
    for base in type(value).__mro__:
        if base.__module__.partition(".")[0] in ("torch", "keras", "tf_keras", "tensorflow", "sonnet"):
            return False
        if method in vars(base):
            return True
    return False


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


def plain_settings(held: Any) -> dict[str, Any]:
    """Return the attributes or settings of an object that are plain numbers, words or shapes."""
    return {
        name: list(value) if isinstance(value, (list, tuple)) else value
        for name, value in held.items()
        if isinstance(name, str) and not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) < 16 and all(isinstance(each, int) for each in value)
    return isinstance(value, (bool, int, float, str)) and len(str(value)) < 100


# A tf.Module: described by its attributes, saved and restored as a TensorFlow object.


def build_tensorflow(
    model: Any, shapes: list[list[int]], guessed: list[list[int]]
) -> dict[int, dict[str, Any]]:
    """Call a module if shapes are given or it has no variables yet; return the facts from its products.

    A tf.Module calls no layers: each variable used as a factor represents its module.
    """
    if not shapes and _has_variables(model):
        return _probe_modules(model)
    trace = create_tracer("tensorflow") if _has_variables(model) else None
    if trace is None:
        call_model(model, shapes or guessed)
        trace = create_tracer("tensorflow")
    held = {id(variable): variable for variable in model_variables(model)}
    found = _probe_modules(model)
    if trace is None:
        return found
    for number, variable in held.items():
        trace.weigh(number, getattr(variable, "handle", None))
    call_model(model, shapes or guessed, trace)
    orders = trace.orders()
    for _, module in _iter_modules(model):
        names = iter_attributes(_module_attributes(module) if is_tf_module(module) else vars(module))
        for each in (orders[id(value)] for _, value in names if id(value) in orders and id(value) in held):
            found.setdefault(id(module), {}).setdefault("orders", each)
    return found


def _probe_modules(model: Any) -> dict[int, dict[str, Any]]:
    """Return how modules of a program's own classes multiply their inputs with a square matrix."""
    import numpy

    found: dict[int, dict[str, Any]] = {}
    numbers = {id(variable): place for place, variable in enumerate(model_variables(model))}
    for _, module in _iter_modules(model) if _is_eager() else ():
        if not (is_tf_module(module) and has_own_call(module, "__call__")):
            continue
        attributes = iter_attributes(_module_attributes(module))
        held = {name[-1]: value for name, value in attributes if id(value) in numbers}
        matrix = next((each for each in held.values() if len(tensor_shape(each)) == _VECTOR), None)
        if matrix is None or len(set(tensor_shape(matrix))) > 1:
            continue
        before = {name: each.numpy() for name, each in held.items()}
        try:
            # Zeros, or an identity, are their own transpose.
            for number, (name, value) in enumerate(before.items()):
                held[name].assign(numpy.random.default_rng(number).standard_normal(value.shape))
            drawn = {name: each.numpy() for name, each in held.items()}
            shape = (_SOME, tensor_shape(matrix)[0])
            computes = probe_module(drawn, shape, lambda x: _compute_keras(module, x, matrix))  # noqa: B023
        except Exception:  # noqa: BLE001, S112 - a module that takes other inputs
            continue
        finally:
            for name, value in before.items():
                held[name].assign(value)
        if computes.get("kind") == "dense":
            names = {name: "kernel" if each is matrix else "bias" for name, each in held.items()}
            found[id(module)] = {"computes": computes, "own": type(module).__name__}
            if computes["form"] == "out_in":
                found[id(module)]["names"] = names
    return found


def _has_variables(model: Any) -> bool:
    try:
        return bool(model_variables(model))
    except ValueError:  # Sonnet's marker that there are no variables yet (sonnet/src/base.py).
        return False


def call_model(model: Any, shapes: list[list[int]], trace: Any = None) -> None:
    """Call a TensorFlow or Keras model with zeros, traced by `trace`; raise UsageError if that fails."""
    import numpy

    if not shapes:
        raise UsageError(
            "the model has no weights before its first call",
            hint="pass its input shape: --input-shape N, or --input-shape H,W,C for images",
        )

    def call(arguments: list[Any]) -> None:
        if trace is None:
            model(*arguments)
            return
        with trace.following():
            made = model(*arguments)
        trace.border(made, -1)

    def attempts() -> Iterator[Callable[[], None]]:
        for dtype in ("float32", "int32"):
            given = [numpy.zeros((1, *shape), dtype) for shape in shapes]
            given = given if trace is None else trace.given(given)
            yield lambda: call(given)  # noqa: B023 - called at once
            if len(given) > 1:
                yield lambda: call([given])  # noqa: B023 - called at once

    call_in_first_way(attempts(), shapes)


def model_variables(model: Any) -> list[Any]:
    """Return a module's variables, then those of its Keras 3 layers, which are not tf.Modules."""
    found = {id(variable): variable for variable in model.variables}
    for _, module in _iter_modules(model):
        if not is_tf_module(module):
            found.update((id(variable), variable) for variable in module.weights)
    return list(found.values())


def describe_tensorflow(model: Any) -> list[dict[str, Any]]:
    """Return every module by first path; a tensor's name is its number in `variables(model)`."""
    numbers = {id(variable): place for place, variable in enumerate(model_variables(model))}
    return [
        {
            "id": id(module),
            "path": path,
            "class": framework_class(module),
            "facts": plain_settings(vars(module)) if is_tf_module(module) else keras_settings(module),
            "tensors": [
                [name[-1], numbers[id(value)]]
                for name, value in iter_attributes(_module_attributes(module))
                if id(value) in numbers
            ]
            if is_tf_module(module)
            else own_keras_weights(module, numbers),
        }
        for path, module in _iter_modules(model)
    ]


def _iter_modules(model: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield a module and its descendants, Keras 3 layers too, each by its first path."""
    seen = {id(model)}
    waiting = [([], model)]  # type: list[tuple[list[str], Any]]
    while waiting:
        path, module = waiting.pop(0)
        yield path, module
        below = []
        for name, value in iter_attributes(_module_attributes(module)) if is_tf_module(module) else ():
            if id(value) in seen:
                continue
            if is_tf_module(value):
                seen.add(id(value))
                below.append(([*path, *name], value))
            elif is_keras_layer(value):
                # Each is yielded once, in order of discovery.
                below += list(iter_keras_layers([*path, *name], value, seen))
        waiting = below + waiting


def _module_attributes(module: Any) -> dict[str, Any]:
    # `_self_...` attributes are TensorFlow's bookkeeping (tensorflow/python/trackable/autotrackable.py).
    return {name: value for name, value in vars(module).items() if not name.startswith("_self_")}


def is_tf_module(value: Any) -> bool:
    """Return whether the object is a tf.Module, which `tf.Module._flatten` would enter."""
    return any((top, "Module") in class_bases(value) for top in ("tensorflow", "tensorflow_core"))


def iter_attributes(held: Any) -> Iterator[tuple[list[str], Any]]:
    """Yield the values in attributes, lists and dicts by the names on the way."""
    for name, value in held.items():
        yield from _open_containers([str(name)], value, 4)


def _open_containers(path: list[str], value: Any, depth: int) -> Iterator[tuple[list[str], Any]]:
    if depth and isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _open_containers([*path, str(place)], each, depth - 1)
    elif depth and isinstance(value, dict):
        for name, each in value.items():
            yield from _open_containers([*path, str(name)], each, depth - 1)
    else:
        yield path, value


def number_variables(model: Any) -> bool:
    """Fill every variable with its own number, so that its position in a file can be identified."""
    for place, variable in enumerate(model_variables(model)):
        # Keras 3's variables name their types.
        dtype = getattr(variable.dtype, "as_numpy_dtype", variable.dtype)
        variable.assign(numbered_array(place, variable.shape, dtype))
    return True


def numbered_array(place: int, shape: Any, dtype: Any) -> Any:
    """Return an array whose elements have the number's bits: every type has enough bits."""
    import numpy

    width = numpy.dtype(dtype).itemsize
    whole = numpy.full(tuple(int(extent) for extent in shape), place + 1, f"uint{8 * min(width, 8)}")
    return whole.view(dtype) if width <= 8 else whole.astype(dtype)


def save_tensorflow(model: Any, file: str, form: str) -> str:
    """Write the model's objects; return the prefix."""
    del form
    return str(_make_checkpoint(model).save(file))


def load_tensorflow(model: Any, file: str, form: str) -> None:
    """Restore from the prefix; raise AssertionError unless values and variables match one to one."""
    del form
    _make_checkpoint(model).restore(file).assert_consumed()


def _make_checkpoint(model: Any) -> Any:
    tensorflow: Any = sys.modules["tensorflow"]
    try:
        return tensorflow.train.Checkpoint(model)
    except TypeError:
        raise UnsupportedError(
            f"TensorFlow {tensorflow.__version__} cannot save an object as a whole", hint="use --to keras"
        ) from None


# A Keras model of any version: built, described layer by layer, saved as objects or a weights file.

_SOME = 8
_OWN = ("_trainable_variables", "_non_trainable_variables", "_trainable_weights", "_non_trainable_weights")


def build_keras(model: Any, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Call the model if it has no weights yet; return the facts of the call (see call_facts).

    Raise UsageError if it has no weights and no shape is known, or if it cannot be called.
    """
    has_weights = bool(model.weights) and bool(getattr(model, "built", True))
    if has_weights and not shapes and not _is_eager():
        return {}  # a call would add to TensorFlow's single graph
    wanted = shapes or ([] if not has_weights else _input_shapes(model)) or ([] if has_weights else guessed)
    if has_weights and not wanted:
        return {}
    if not has_weights:
        call_model(model, wanted)  # building calls the layers with symbols, which have no order
    return _follow_keras_call(model, wanted, required=bool(shapes) or not has_weights)


def _follow_keras_call(model: Any, wanted: list[list[int]], *, required: bool) -> dict[int, dict[str, Any]]:
    calls, trace, probes = CallLog(), create_tracer(_keras_backend(model)), ModuleProbes()
    if trace is not None:
        trace.flow = calls.flow
    layer: Any = next(base for base in type(model).__mro__ if base.__name__ == "Layer")
    inner = layer.__call__

    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = inner(self, *args, **kwargs)
        if args:
            calls.note(self, args[0], made)
            calls.flow(self, (args, kwargs), made)
            if has_own_call(self, "call"):
                probes.note(self, args)
            if trace is not None:
                _note_keras_call(trace, self, args[0], made)
        return made

    # Calling a functional model layer by layer shows each layer's input.
    layer.__call__ = outer
    try:
        call_model(model, wanted, trace)
    except Exception:
        if required:
            raise
    finally:
        layer.__call__ = inner
    if trace is None:
        return {layer: {"flatten": shape} for layer, shape in calls.flattened().items()}
    return call_facts(calls, trace, probes.found(_keras_weights, _compute_keras))


def _keras_weights(layer: Any) -> dict[str, Any]:
    """Return a layer's own weights by name as arrays; raise ValueError if it contains layers."""
    variables = list(layer.weights)
    if any(is_keras_layer(value) for _, value in iter_attributes(vars(layer))):
        raise ValueError("the layer contains other layers")
    return {
        _attribute_name(layer, each) or str(each.name).partition(":")[0]: each.numpy() for each in variables
    }


def _compute_keras(layer: Any, x: Any, like: Any) -> Any:
    tensorflow: Any = sys.modules["tensorflow"]
    return layer(tensorflow.cast(tensorflow.constant(x), like.dtype)).numpy()


def _keras_backend(model: Any) -> str:
    """Return the framework behind a Keras model."""
    if not is_tf_module(model) and "keras" in sys.modules and ("keras", "Layer") in class_bases(model):
        config: Any = getattr(sys.modules["keras"], "config", None)
        if hasattr(config, "backend"):
            return str(config.backend())
    return "tensorflow"


def _note_keras_call(trace: Trace, layer: Any, given: Any, made: Any) -> None:
    """Record a call of a layer with its own weights."""
    axis = getattr(layer, "axis", -1)
    first = getattr(layer, "data_format", None) == "channels_first"
    place = 1 if first else axis if isinstance(axis, int) else -1
    if any(vars(layer).get(name) for name in _OWN) or hasattr(layer, "cell"):
        trace.module(layer, given, made, lambda rank: place % rank)


def _input_shapes(model: Any) -> list[list[int]]:
    """Return the input shapes that the model defines; a free axis gets an arbitrary length."""
    try:
        found = [tuple(each.shape) for each in model.inputs or ()]
    except (AttributeError, TypeError, ValueError):
        return []
    return [[int(extent) if extent is not None else _SOME for extent in shape[1:]] for shape in found]


def describe_keras(model: Any) -> list[dict[str, Any]]:
    """Return every layer by first path; a tensor's name is its number in `model.weights`."""
    numbers = {id(variable): place for place, variable in enumerate(model.weights)}
    return [
        {
            "id": id(layer),
            "path": path,
            "class": framework_class(layer),
            "own": type(layer).__name__ if has_own_call(layer, "call") else "",
            "facts": keras_settings(layer),
            "tensors": own_keras_weights(layer, numbers),
        }
        for path, layer in iter_keras_layers([], model, set())
    ]


def iter_keras_layers(path: list[str], layer: Any, seen: set[int]) -> Iterator[tuple[list[str], Any]]:
    """Yield a layer and its descendants, by attribute and then by name, each once."""
    seen.add(id(layer))
    yield path, layer
    held = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    below = [(name, value) for name, value in iter_attributes(held) if is_keras_layer(value)]
    # A Sequential or functional model lists its layers in order of use.
    listed = getattr(layer, "layers", None)
    below += [([each.name], each) for each in listed or () if is_keras_layer(each)]
    hidden = [(name, value) for name, value in iter_attributes(vars(layer)) if is_keras_layer(value)]
    # Private lists repeat the values of private attributes.
    for name, each in below + sorted(hidden, key=lambda found: len(found[0])):
        if id(each) not in seen:
            yield from iter_keras_layers([*path, *name], each, seen)


def is_keras_layer(value: Any) -> bool:
    """Return whether the object is a Keras layer."""
    return any(
        (top, "Layer") in class_bases(value) for top in ("keras", "tf_keras", "tensorflow", "tensorflow_core")
    )


def own_keras_weights(layer: Any, numbers: dict[int, int]) -> list[list[Any]]:
    """Return the name and number of each of the layer's own weights."""
    names = {
        id(value): name[-1].lstrip("_")
        for name, value in iter_attributes(vars(layer))
        if id(value) in numbers
    }
    held = [each for name in _OWN for each in vars(layer).get(name, ()) if id(each) in numbers]
    for each in held:
        names[id(each)] = _attribute_name(layer, each) or str(each.name).rpartition("/")[2].partition(":")[0]
    return [[name, numbers[number]] for number, name in names.items()]


def _attribute_name(layer: Any, variable: Any) -> str | None:
    mine = (name for name, value in vars(layer).items() if value is variable)
    return next((name.lstrip("_") for name in mine), None)


def keras_settings(layer: Any) -> dict[str, Any]:
    """Return the layer's plain settings."""
    try:
        configuration = layer.get_config()
    except Exception:  # noqa: BLE001 - a user's layer may lack its settings
        configuration = vars(layer)
    return dict(plain_settings(configuration), name=layer.name)


def number_keras_weights(model: Any) -> bool:
    """Fill every weight with its own number, so that its position in a file can be identified."""
    model.set_weights([numbered_array(n, w.shape, w.dtype) for n, w in enumerate(model.get_weights())])
    return True


def save_keras(model: Any, file: str, form: str) -> str:
    """Write the model as TensorFlow objects or a `.weights.h5` file; return the prefix or the file."""
    if form == "keras":
        model.save_weights(file + ".weights.h5")
        return file + ".weights.h5"
    if _saves_from_session(model):
        model.save_weights(file, save_format="tf")
        return file
    return save_tensorflow(model, file, form)


def load_keras(model: Any, file: str, form: str) -> None:
    """Load the file; raise the error of Keras or TensorFlow unless it contains every weight."""
    if form == "keras":
        model.load_weights(file)
    elif _saves_from_session(model):
        status = model.load_weights(file)
        if _tensorflow_version() >= (2, 0):
            # TensorFlow 1 also requests objects without values; the comparison afterwards is the proof there.
            status.assert_consumed()
    else:
        load_tensorflow(model, file, form)


def _saves_from_session(model: Any) -> bool:
    """Return whether Keras has the session that an old TensorFlow saves from."""
    if not is_tf_module(model) and ("keras", "Layer") in class_bases(model):
        backend = sys.modules["keras"].config.backend()
        if backend != "tensorflow":
            raise UnsupportedError(f"this Keras uses the {backend} backend", hint="use --to keras")
        return False
    # Before 2.4 tf.train.Checkpoint accepts no root object.
    return _tensorflow_version() < (2, 4) or not _is_eager()


def _tensorflow_version() -> tuple[int, ...]:
    version: str = sys.modules["tensorflow"].__version__
    return tuple(map(int, version.split(".")[:2]))


def _is_eager() -> bool:
    tensorflow: Any = sys.modules.get("tensorflow")
    return tensorflow is None or bool(tensorflow.executing_eagerly())


# A torch.nn.Module: described, saved as its state_dict, loaded strictly.


def build_torch(model: Any, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Materialise lazy parameters by a call; return the facts of the call (see call_facts).

    `shapes` are the inputs' without batch, as given by the user. Raise UsageError if the model cannot
    be called with them.
    """
    lazy = [n for n, p in model.named_parameters() if type(p).__name__ == "UninitializedParameter"]
    if lazy and not (shapes or guessed):
        raise UsageError(
            "the model has parameters without a shape before its first call",
            path=lazy[0],
            hint="pass its input shape: --input-shape N, or --input-shape C,H,W for images",
        )
    if not (shapes or lazy):
        # A configuration indicates images with channels last.
        for each in _guess_shapes(guessed):
            try:
                return _drop_input_orders(_follow_torch_call(model, each), each)
            except Exception:  # noqa: BLE001, S112 - the shape was a guess
                continue
        return {}
    return _follow_torch_call(model, shapes or guessed)


def _drop_input_orders(
    calls_by_module: dict[int, dict[str, Any]], guessed: list[list[int]]
) -> dict[int, dict[str, Any]]:
    """Return the facts of a call, without the order of vectors of guessed length.

    A module with such an input may receive a flattened image: a model that flattens accepts a vector
    too.
    """
    vectors = [[[1, shape[0]]] for shape in guessed if len(shape) == 1]
    for each in calls_by_module.values():
        takes = each.get("orders", {}).get("in")
        if isinstance(takes, dict) and [list(part) for part in takes["parts"] or ()] in vectors:
            del each["orders"]["in"]
    return calls_by_module


def _guess_shapes(guessed: list[list[int]]) -> list[list[list[int]]]:
    if not guessed:
        return []
    first = [[shape[-1], *shape[:-1]] if len(shape) > 2 else shape for shape in guessed]
    rows = [[*shape[1:], shape[0]] if len(shape) == 2 else shape for shape in first]
    frames = [[s[0], s[-1], *s[1:-1]] if len(s) > 3 else s for s in guessed]
    return [first, rows, frames, guessed]


def _follow_torch_call(model: Any, shapes: list[list[int]]) -> dict[int, dict[str, Any]]:
    calls, trace, probes = CallLog(), TorchTrace(), ModuleProbes()

    def noted(module: Any, given: Any, made: Any) -> None:
        _note_torch_call(calls, trace, module, given, made)
        if vars(module).get("_parameters") and has_own_call(module, "forward"):
            probes.note(module, given)

    hooks = [module.register_forward_hook(noted) for module in model.modules()]
    trained = [(module, module.training) for module in model.modules()]
    try:
        _call_torch(model.eval(), shapes, calls, trace)
        for hook in hooks:
            hook.remove()
        found = probes.found(_torch_tensors, _compute_torch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in trained:
            module.training = training
    return call_facts(calls, trace, found)


def _torch_tensors(module: Any) -> dict[str, Any]:
    """Return a module's own tensors by name as arrays; raise ValueError if it contains modules."""
    if vars(module).get("_modules"):
        raise ValueError("the module contains other modules")
    held = {**vars(module).get("_parameters", {}), **vars(module).get("_buffers", {})}
    return {name: each.detach().cpu().numpy() for name, each in held.items() if each is not None}


def _compute_torch(module: Any, x: Any, like: Any) -> Any:
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        return module(torch.from_numpy(x).to(like.device, like.dtype)).cpu().numpy()


def _note_torch_call(calls: CallLog, trace: Trace, module: Any, given: Any, made: Any) -> None:
    calls.note(module, given, made)
    calls.flow(module, given, made)
    if vars(module).get("_parameters") or vars(module).get("_buffers"):
        name = framework_class(module)
        channels = any(part in name for part in ("Conv", "BatchNorm", "InstanceNorm", "GroupNorm", "PReLU"))
        trace.module(module, given, made, lambda rank: 1 if channels else rank - 1)


def _call_torch(model: Any, shapes: list[list[int]], calls: CallLog, trace: TorchTrace) -> None:
    torch: Any = sys.modules["torch"]

    def call(dtype: Any) -> None:
        given = [torch.zeros((1, *shape), dtype=dtype) for shape in shapes]
        trace.border(given, 1)
        with trace.following():
            made = model(*given)
        trace.border(made, 1)

    with torch.no_grad(), _note_functions(torch, calls):
        weights = (each.dtype for each in model.parameters() if each.is_floating_point())
        # A model with embeddings requires integers.
        dtypes = (next(weights, torch.get_default_dtype()), torch.int64)
        call_in_first_way((functools.partial(call, dtype) for dtype in dtypes), shapes)


def _note_functions(torch: Any, calls: CallLog) -> Any:
    """Return a context that also records torch's functions: pooling, flattening, reshaping."""
    try:
        mode = torch.overrides.TorchFunctionMode
    except AttributeError:  # before torch 1.13
        return contextlib.nullcontext()

    def noted(self: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del self, types
        made = function(*args, **(kwargs or {}))
        if type(made).__name__ == "Tensor" and args:
            calls.note(None, args[0], made)
        calls.flow(None, (args, kwargs or {}), made)
        return made

    return type("Functions", (mode,), {"__torch_function__": noted})()


def describe_torch(model: Any) -> list[dict[str, Any]]:
    """Return every module in order of definition; a tensor's name is its key in the state_dict."""
    known = model.state_dict(keep_vars=True)
    modules = []
    for path, module in model.named_modules():
        held = vars(module)
        names = [*held.get("_parameters", ()), *held.get("_buffers", ())]
        keys = {name: path + "." + name if path else name for name in names}
        modules.append(
            {
                "id": id(module),
                "path": path.split(".") if path else [],
                "class": framework_class(module),
                "own": type(module).__name__ if has_own_call(module, "forward") else "",
                "facts": plain_settings(held),
                "tensors": [[name, key] for name, key in keys.items() if key in known],
            }
        )
    return modules


def number_torch_tensors(model: Any) -> bool:
    """Return False: keys identify the tensors."""
    del model
    return False


def save_torch(model: Any, file: str, form: str) -> str:
    """Write the state_dict; return the file."""
    del form
    torch: Any = sys.modules["torch"]
    torch.save(model.state_dict(), file + ".pt")
    return file + ".pt"


def load_torch(model: Any, file: str, form: str) -> None:
    """Load the file strictly."""
    del form
    torch: Any = sys.modules["torch"]
    held = torch.load(file, map_location="cpu")
    # A file with optimizers has the state_dict of the model beside theirs.
    model.load_state_dict(held["model"] if isinstance(held.get("model"), dict) else held, strict=True)


# Optimizers that continue training, created as a program would and loaded strictly.


def resume_torch(model: Any, file: str, optimizers: list[dict[str, Any]]) -> None:
    """Load the state_dicts of optimizers; raise ValueError for a state of another shape."""
    torch: Any = sys.modules["torch"]
    if "tensorflow" in sys.modules:
        return  # both frameworks in one process: creating an optimizer can abort it
    held, named = torch.load(file, map_location="cpu"), dict(model.named_parameters())
    for each in optimizers:
        groups = [{"params": [named[name] for name in group]} for group in each["groups"]]
        made = getattr(torch.optim, each["class"])(groups, lr=0.0)
        made.load_state_dict(held[each["name"]])
        for parameter, state in made.state.items():
            for name, value in state.items():
                if getattr(value, "ndim", 0) and value.shape != parameter.shape:
                    raise ValueError(f"the optimizer's {name} has the shape of another parameter")


def resume_keras(model: Any, framework: str, message: Message, optimizers: list[dict[str, Any]]) -> None:
    """Load the model with its optimizers; raise the framework's error if something does not match."""
    weights = list(model.weights) if framework == "keras" else model_variables(model)
    library = _keras_library(model, framework)
    made = {}
    for each in optimizers:
        trained = [weights[number] for number in each["groups"][0]]
        made[each["name"]] = getattr(library.optimizers, each["class"])(
            learning_rate=0.0, **each["arguments"]
        )
        made[each["name"]].build(trained)
    if message["form"] == "keras":
        model.compile(optimizer=next(iter(made.values())))
        model.load_weights(message["file"])
        return
    tensorflow: Any = sys.modules["tensorflow"]
    if getattr(model, "optimizer", None) is not None and "optimizer" in made:
        model.compile(optimizer=made.pop("optimizer"))
    tensorflow.train.Checkpoint(model, **made).restore(message["file"]).assert_consumed()


def _keras_library(model: Any, framework: str = "keras") -> Any:
    """Return the Keras of a model or layer: keras, tf_keras, or that of TensorFlow, also for its modules."""
    tops = [base.__module__.partition(".")[0] for base in type(model).__mro__ if framework == "keras"]
    name = next((each for each in tops if each in ("keras", "tf_keras")), "")
    return sys.modules[name] if name else sys.modules["tensorflow"].keras


# What the process with a user's model (see worker.py) answers while the model is built and filled. Its run
# (model_runner) does not depend on that: it loads the written file with the framework's own loader.
#
# The syntax of these files is Python 3.7's, because environments with old frameworks have old interpreters.


@dataclass(frozen=True)
class ModelFramework:
    """Functions for the models of one framework; the model is the first argument."""

    forms: tuple[str, ...]
    """kinds of files that `save` writes and `load` reads"""
    build: Callable[[Any, list[list[int]], list[list[int]]], dict[int, dict[str, Any]]]
    """creates missing weights by a call with inputs of these shapes (given, guessed); returns its facts"""
    describe: Callable[[Any], list[dict[str, Any]]]
    """returns every module with the names of its tensors"""
    number: Callable[[Any], bool]
    """fills every tensor with its own number; False where a file's keys name the tensors"""
    save: Callable[[Any, str, str], str]
    """writes a file without a suffix in one of `forms`; returns the path to read"""
    load: Callable[[Any, str, str], None]
    """loads such a path strictly"""


FRAMEWORKS = {
    "torch": ModelFramework(
        ("torch",), build_torch, describe_torch, number_torch_tensors, save_torch, load_torch
    ),
    "keras": ModelFramework(
        ("tf", "keras"), build_keras, describe_keras, number_keras_weights, save_keras, load_keras
    ),
    "tensorflow": ModelFramework(
        ("tf",), build_tensorflow, describe_tensorflow, number_variables, save_tensorflow, load_tensorflow
    ),
}


class ModelSession:
    """The model in this process, its framework's name, and what creates another one like it."""

    def __init__(self) -> None:
        self.model: Any = None
        self.framework = ""
        self.again: Callable[[], Any] | None = None

    def build(self, factory: str, arguments: Any) -> None:
        """Create the user's model; raise UsageError if the factory does not return one."""
        made = call_factory(factory, arguments)
        self.framework = require_model(
            made,
            f"{factory} does not return a model",
            "name the class of the model, or a function that returns it: MODULE:NAME",
        )
        self.model, self.again = made, lambda: call_factory(factory, arguments)

    @property
    def functions(self) -> ModelFramework:
        """Return the functions for the model's framework."""
        return FRAMEWORKS[self.framework]


def _build(session: ModelSession, message: Message) -> Message:
    session.build(message["factory"], message["arguments"])
    return {"framework": session.framework, "forms": list(session.functions.forms)}


def _describe(session: ModelSession, message: Message) -> Message:
    shapes, guessed = message["shapes"] or [], message["guessed"] or []
    called = session.functions.build(session.model, shapes, guessed)
    modules = session.functions.describe(session.model)
    for module in modules:
        module.update(called.get(module.pop("id"), {}))
    return {"modules": modules}


def _save(session: ModelSession, message: Message) -> Message:
    form = message["form"]
    if form not in session.functions.forms:
        raise UnsupportedError(f"a {session.framework} model cannot be loaded from this form", found=form)
    return {"file": session.functions.save(session.model, message["file"], form)}


def _number(session: ModelSession, message: Message) -> Message:
    del message
    return {"done": session.functions.number(session.model)}


def _load(session: ModelSession, message: Message) -> Message:
    try:
        optimizers = message.get("optimizers") or []
        if optimizers and session.framework != "torch":
            resume_keras(session.model, session.framework, message, optimizers)
        else:
            session.functions.load(session.model, message["file"], message["form"])
        if optimizers and session.framework == "torch":
            resume_torch(session.model, message["file"], optimizers)
    except Exception as error:
        raise WorkerError("the model cannot load the written file: " + last_error_line(error)) from error
    return {}


HANDLERS = {"build": _build, "describe": _describe, "save": _save, "number": _number, "load": _load}
