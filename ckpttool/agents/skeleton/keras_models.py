"""A Keras model of any age: built, described layer by layer, saved as objects or as a weights file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ckpttool.agents.skeleton import tensorflow_modules
from ckpttool.agents.skeleton.calls import Calls, Probes, known
from ckpttool.agents.skeleton.factory import bases, has_own_call, known_class, plain_facts
from ckpttool.agents.skeleton.tensorflow_modules import items, numbered
from ckpttool.agents.skeleton.tracing import Trace, tracer
from ckpttool.errors import UnsupportedError

FORMS = ("tf", "keras")
_SOME = 8
_OWN = ("_trainable_variables", "_non_trainable_variables", "_trainable_weights", "_non_trainable_weights")


def build(model: Any, shapes: list[list[int]], guessed: list[list[int]]) -> dict[int, dict[str, Any]]:
    """Call the model if it has no weights yet; return what a call tells of layers (see calls.known).

    Raise UsageError when it has none and no shape is known, or cannot be called.
    """
    has_weights = bool(model.weights) and bool(getattr(model, "built", True))
    if has_weights and not shapes and not _eager():
        return {}  # a call would add to TensorFlow's one graph
    wanted = shapes or ([] if not has_weights else _inputs(model)) or ([] if has_weights else guessed)
    if has_weights and not wanted:
        return {}
    return _followed(model, wanted, required=bool(shapes) or not has_weights)


def _followed(model: Any, wanted: list[list[int]], *, required: bool) -> dict[int, dict[str, Any]]:
    calls, trace, probes = Calls(), tracer(_computes(model)), Probes()
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
                _traced(trace, self, args[0], made)
        return made

    # Called layer by layer, a functional model shows what each of them takes.
    layer.__call__ = outer
    try:
        tensorflow_modules.called(model, wanted, trace)
    except Exception:
        if required:
            raise
    finally:
        layer.__call__ = inner
    if trace is None:
        return {layer: {"flatten": shape} for layer, shape in calls.flattened().items()}
    told = known(calls, trace)
    for number, each in probes.found(_held, _computed).items():
        told.setdefault(number, {}).update(each)
    return told


def _held(layer: Any) -> dict[str, Any]:
    """Return a layer's own weights by name, as arrays; raise ValueError if it has layers besides."""
    variables = list(layer.weights)
    if any(is_layer(value) for _, value in items(vars(layer))):
        raise ValueError("a layer with others in it")
    return {_attribute(layer, each) or str(each.name).partition(":")[0]: each.numpy() for each in variables}


def _computed(layer: Any, x: Any, like: Any) -> Any:
    tensorflow: Any = sys.modules["tensorflow"]
    return layer(tensorflow.cast(tensorflow.constant(x), like.dtype)).numpy()


def _computes(model: Any) -> str:
    """Return the framework that computes a model of Keras."""
    if (
        not tensorflow_modules.is_module(model)
        and "keras" in sys.modules
        and ("keras", "Layer") in bases(model)
    ):
        config: Any = getattr(sys.modules["keras"], "config", None)
        if hasattr(config, "backend"):
            return str(config.backend())
    return "tensorflow"


def _traced(trace: Trace, layer: Any, given: Any, made: Any) -> None:
    """Note a call of a layer with weights of its own."""
    axis = getattr(layer, "axis", -1)
    first = getattr(layer, "data_format", None) == "channels_first"
    place = 1 if first else axis if isinstance(axis, int) else -1
    if any(vars(layer).get(name) for name in _OWN) or hasattr(layer, "cell"):
        trace.module(layer, given, made, lambda rank: place % rank)


def _inputs(model: Any) -> list[list[int]]:
    """Return the shapes that a model knows of its inputs; a free axis gets some length."""
    try:
        found = [tuple(each.shape) for each in model.inputs or ()]
    except (AttributeError, TypeError, ValueError):
        return []
    return [[int(extent) if extent is not None else _SOME for extent in shape[1:]] for shape in found]


def describe(model: Any) -> list[dict[str, Any]]:
    """Return every layer by its first path; a tensor is named by its number in `model.weights`."""
    numbers = {id(variable): place for place, variable in enumerate(model.weights)}
    modules = []
    for path, layer in layers([], model, set()):
        modules.append(
            {
                "id": id(layer),
                "path": path,
                "class": known_class(layer),
                "own": type(layer).__name__ if has_own_call(layer, "call") else "",
                "facts": facts(layer),
                "tensors": own(layer, numbers),
            }
        )
    return modules


def layers(path: list[str], layer: Any, seen: set[int]) -> Iterator[tuple[list[str], Any]]:
    """Go through a layer and those in it: by its attributes, then by their names, each once."""
    seen.add(id(layer))
    yield path, layer
    held = {name: value for name, value in vars(layer).items() if not name.startswith("_")}
    below = [(name, value) for name, value in items(held) if is_layer(value)]
    # A Sequential or functional model keeps its layers in the order of use.
    listed = getattr(layer, "layers", None)
    below += [([each.name], each) for each in listed or () if is_layer(each)]
    hidden = [(name, value) for name, value in items(vars(layer)) if is_layer(value)]
    # Private lists name once more what private attributes name.
    for name, each in below + sorted(hidden, key=lambda found: len(found[0])):
        if id(each) not in seen:
            yield from layers([*path, *name], each, seen)


def is_layer(value: Any) -> bool:
    """Say whether the object is a layer of Keras."""
    return any(
        (top, "Layer") in bases(value) for top in ("keras", "tf_keras", "tensorflow", "tensorflow_core")
    )


def own(layer: Any, numbers: dict[int, int]) -> list[list[Any]]:
    """Return the layer's own weights: the name of each and its number."""
    names = {id(value): name[-1].lstrip("_") for name, value in items(vars(layer)) if id(value) in numbers}
    held = [each for name in _OWN for each in vars(layer).get(name, ()) if id(each) in numbers]
    for each in held:
        names[id(each)] = _attribute(layer, each) or str(each.name).rpartition("/")[2].partition(":")[0]
    return [[name, numbers[number]] for number, name in names.items()]


def _attribute(layer: Any, variable: Any) -> str | None:
    mine = (name for name, value in vars(layer).items() if value is variable)
    return next((name.lstrip("_") for name in mine), None)


def facts(layer: Any) -> dict[str, Any]:
    """Return the plain settings of a layer."""
    try:
        said = layer.get_config()
    except Exception:  # noqa: BLE001 - a user's layer need not know its own settings
        said = vars(layer)
    return dict(plain_facts(said), name=layer.name)


def number(model: Any) -> bool:
    """Fill every weight with its own number, so that its place in a file can be seen."""
    model.set_weights([numbered(n, w.shape, w.dtype) for n, w in enumerate(model.get_weights())])
    return True


def save(model: Any, file: str, form: str) -> str:
    """Write the model as TensorFlow's objects or as a `.weights.h5` file; return the prefix or the file."""
    if form == "keras":
        model.save_weights(file + ".weights.h5")
        return file + ".weights.h5"
    if _by_itself(model):
        model.save_weights(file, save_format="tf")
        return file
    return tensorflow_modules.save(model, file, form)


def load(model: Any, file: str, form: str) -> None:
    """Load the file; raise whatever Keras or TensorFlow raises unless every weight is in it."""
    if form == "keras":
        model.load_weights(file)
    elif _by_itself(model):
        status = model.load_weights(file)
        if _version() >= (2, 0):
            # TensorFlow 1 also asks for what holds no values; the comparison that follows is the proof there.
            status.assert_consumed()
    else:
        tensorflow_modules.load(model, file, form)


def _by_itself(model: Any) -> bool:
    """Say whether Keras keeps the session that an old TensorFlow would save from."""
    if not tensorflow_modules.is_module(model) and ("keras", "Layer") in bases(model):
        backend = sys.modules["keras"].config.backend()
        if backend != "tensorflow":
            raise UnsupportedError(f"this Keras computes with {backend}", hint="--to keras")
        return False
    # Before 2.4 tf.train.Checkpoint takes no object as its root.
    return _version() < (2, 4) or not _eager()


def _version() -> tuple[int, ...]:
    version: str = sys.modules["tensorflow"].__version__
    return tuple(map(int, version.split(".")[:2]))


def _eager() -> bool:
    tensorflow: Any = sys.modules.get("tensorflow")
    return tensorflow is None or bool(tensorflow.executing_eagerly())
