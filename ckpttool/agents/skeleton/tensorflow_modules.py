"""A tf.Module: described by its attributes, saved and restored as TensorFlow's objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ckpttool.agents.skeleton.calls import zeros
from ckpttool.agents.skeleton.factory import bases, framework, known_class, last_line, plain_facts
from ckpttool.agents.skeleton.tracing import tracer
from ckpttool.errors import UnsupportedError, UsageError

FORMS = ("tf",)


def build(model: Any, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Call a module if shapes are given or it has no variables yet; return what its products show.

    A tf.Module calls no layers: each variable by which something is multiplied stands for its module.
    """
    if not shapes and _has_variables(model):
        return {}
    trace = tracer("tensorflow") if _has_variables(model) else None
    if trace is None:
        called(model, shapes or guessed)
        trace = tracer("tensorflow")
    held = {id(variable): variable for variable in variables(model)}
    if trace is None:
        return {}
    for number, variable in held.items():
        trace.weigh(number, getattr(variable, "handle", None))
    called(model, shapes or guessed, trace)
    orders = trace.orders()
    found: dict[int, dict[str, Any]] = {}
    for _, module in _modules(model):
        names = items(_held(module)) if is_module(module) else items(vars(module))
        for each in (orders[id(value)] for _, value in names if id(value) in orders and id(value) in held):
            found.setdefault(id(module), {}).setdefault("orders", each)
    return found


def _has_variables(model: Any) -> bool:
    try:
        return bool(variables(model))
    except ValueError:  # Sonnet's way of saying that there are none yet (sonnet/src/base.py)
        return False


def called(model: Any, shapes: list[list[int]], trace: Any = None) -> None:
    """Call a model of TensorFlow or Keras with zeros, followed by `trace`; raise UsageError if that fails."""
    import numpy

    if not shapes:
        raise UsageError(
            "the model has no weights before its first call",
            hint="--input-shape 17 or --input-shape 84,84,4 tells what it is called with",
        )
    first = None
    for dtype in ("float32", "int32"):
        given = zeros(numpy, shapes, dtype)
        if trace is not None:
            given = trace.given(given)
        for arguments in [given] if len(given) == 1 else [given, [given]]:
            try:
                if trace is None:
                    model(*arguments)
                else:
                    with trace.following():
                        made = model(*arguments)
                    trace.border(made, -1)
            except Exception as error:  # noqa: BLE001 - whatever the user's code raises is told
                first = first or error
            else:
                return
    assert first is not None  # noqa: S101 - no call went well
    shown = " and ".join(map(str, shapes))
    raise UsageError(
        f"the model cannot be called with inputs of shape {shown}: {last_line(first)}"
    ) from first


def variables(model: Any) -> list[Any]:
    """Return the variables of a module, then those of Keras 3's layers in it, which are no tf.Modules."""
    found = {id(variable): variable for variable in model.variables}
    for _, module in _modules(model):
        if not is_module(module):
            found.update((id(variable), variable) for variable in module.weights)
    return list(found.values())


def describe(model: Any) -> list[dict[str, Any]]:
    """Return every module by its first path; a tensor is named by its number in `variables(model)`."""
    numbers = {id(variable): place for place, variable in enumerate(variables(model))}
    return [
        {
            "id": id(module),
            "path": path,
            "class": known_class(module),
            "facts": plain_facts(vars(module)) if is_module(module) else _of_keras().facts(module),
            "tensors": _own(module, numbers) if is_module(module) else _of_keras().own(module, numbers),
        }
        for path, module in _modules(model)
    ]


def _modules(model: Any) -> Iterator[tuple[list[str], Any]]:
    """Go through a module and those in it, Keras 3's layers too, each by its first path."""
    seen = {id(model)}
    waiting = [([], model)]  # type: list[tuple[list[str], Any]]
    while waiting:
        path, module = waiting.pop(0)
        yield path, module
        below = []
        for name, value in items(_held(module)) if is_module(module) else ():
            if id(value) in seen:
                continue
            if is_module(value):
                seen.add(id(value))
                below.append(([*path, *name], value))
            elif framework(value) == "keras" and not isinstance(value, type):
                # They are given each once, and stay in the order in which they are found.
                below += list(_of_keras().layers([*path, *name], value, seen))
        waiting = below + waiting


def _held(module: Any) -> dict[str, Any]:
    # `_self_...` is TensorFlow's own bookkeeping (tensorflow/python/trackable/autotrackable.py).
    return {name: value for name, value in vars(module).items() if not name.startswith("_self_")}


def _own(module: Any, numbers: dict[int, int]) -> list[list[Any]]:
    return [[name[-1], numbers[id(value)]] for name, value in items(_held(module)) if id(value) in numbers]


def _of_keras() -> Any:
    # It imports this module.
    from ckpttool.agents.skeleton import keras_models

    return keras_models


def is_module(value: Any) -> bool:
    """Say whether the object is a tf.Module."""
    return any((top, "Module") in bases(value) for top in ("tensorflow", "tensorflow_core"))


def items(held: Any) -> Iterator[tuple[list[str], Any]]:
    """Go through what attributes hold, lists and dicts opened, by the names that lead there."""
    for name, value in held.items():
        yield from _opened([str(name)], value, 4)


def _opened(path: list[str], value: Any, depth: int) -> Iterator[tuple[list[str], Any]]:
    if depth and isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            yield from _opened([*path, str(place)], each, depth - 1)
    elif depth and isinstance(value, dict):
        for name, each in value.items():
            yield from _opened([*path, str(name)], each, depth - 1)
    else:
        yield path, value


def number(model: Any) -> bool:
    """Fill every variable with its own number, so that its place in a file can be seen."""
    for place, variable in enumerate(variables(model)):
        # Keras 3's variables name their types.
        dtype = getattr(variable.dtype, "as_numpy_dtype", variable.dtype)
        variable.assign(numbered(place, variable.shape, dtype))
    return True


def numbered(place: int, shape: Any, dtype: Any) -> Any:
    """Return an array of the shape whose elements' bits are the number: every type has enough of them."""
    import numpy

    width = numpy.dtype(dtype).itemsize
    whole = numpy.full(tuple(int(extent) for extent in shape), place + 1, f"uint{8 * min(width, 8)}")
    return whole.view(dtype) if width <= 8 else whole.astype(dtype)


def save(model: Any, file: str, form: str) -> str:
    """Write the model's objects; return the prefix."""
    del form
    return str(_checkpoint(model).save(file))


def load(model: Any, file: str, form: str) -> None:
    """Restore the prefix; raise AssertionError unless every value has its variable and the reverse."""
    del form
    _checkpoint(model).restore(file).assert_consumed()


def _checkpoint(model: Any) -> Any:
    tensorflow: Any = sys.modules["tensorflow"]
    try:
        return tensorflow.train.Checkpoint(model)
    except TypeError:
        raise UnsupportedError(
            f"TensorFlow {tensorflow.__version__} saves no object as a whole", hint="--to keras"
        ) from None
