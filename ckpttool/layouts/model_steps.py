"""What a model's own configuration says it computes, step by step: Keras's settings, torch's pickled modules.

Sources: keras/src/models/sequential.py and functional.py (`layers` in the order of their use),
keras/src/layers/**; torch/nn/modules/container.py (Sequential applies its parts in the order of `_modules`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.formats.keras_tree.config import config_of
from ckpttool.layouts.whole_module import Whole
from ckpttool.leaf import Path

Name = tuple[str, ...]


class Step(NamedTuple):
    """One step: a `layer` by its name, an `activation`, an `affine` map, or `unknown` with why."""

    kind: str
    name: Name = ()
    value: Any = None


class Weights(NamedTuple):
    """A layer's tensors by their paths, where its steps were followed to them; a bias may be absent.

    `framework` is that whose order of axes a weight has, where one model has both.
    """

    weight: Path
    bias: Path | None
    epsilon: float | None = None
    framework: str | None = None


class Cell(NamedTuple):
    """A recurrent layer by its module's path, with the paths of the buffers that keep its states."""

    module: Path
    states: tuple[Path, ...]


class ChainFacts(NamedTuple):
    """What the steps are in the terms of a policy; None for what they leave open.

    `activations` follow the hidden layers, `scale` and `offset` map what the last layer's tanh gives.
    """

    layers: tuple[Name, ...]
    activations: tuple[str, ...] | None
    head: str | None
    epsilon: float | None
    origin: str
    scale: Any = None
    offset: Any = 0.0
    notes: tuple[str, ...] = ()

    def bounds(self, width: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the bounds that tanh, scaled, cannot leave."""
        scale, offset = (_row(value, width) for value in (self.scale, self.offset))
        low = tuple(o - s for s, o in zip(scale, offset, strict=True))
        return low, tuple(o + s for s, o in zip(scale, offset, strict=True))


def _row(value: Any, width: int) -> tuple[float, ...]:
    values = tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),)
    return values * (width // len(values)) if len(values) == 1 else values


def read(steps: Sequence[Step], file: str, origin: str = "the model's configuration") -> ChainFacts:
    """Return the steps as a policy; raise UnsupportedError for what no policy here computes."""
    layers = [step for step in steps if step.kind in ("dense", "layer_norm")]
    dense = [n for n, step in enumerate(steps) if step.kind == "dense"]
    if not dense:
        raise UnsupportedError("the model has no dense layer", file=file)
    between = [steps[a + 1 : b] for a, b in zip([-1, *dense], [*dense, len(steps)], strict=True)]
    _require_none(between[0], file)
    hidden = [_activation(each, file) for each in between[1:-1]]
    head, scale, offset, notes = _head(between[-1], file)
    epsilons = {step.value for step in steps if step.kind == "layer_norm"}
    if len(epsilons) > 1:
        raise UnsupportedError(
            "the layer norms have different epsilons", file=file, found=", ".join(map(str, sorted(epsilons)))
        )
    known = None if None in hidden else tuple(name for name in hidden if name is not None)
    return ChainFacts(
        tuple(step.name for step in layers),
        known,
        head,
        next(iter(epsilons), None),
        origin,
        scale,
        offset,
        notes,
    )


def _require_none(steps: Sequence[Step], file: str) -> None:
    for step in steps:
        raise UnsupportedError(
            "the model computes something before its first dense layer",
            file=file,
            path="/".join(step.name),
            found=str(step.value if step.value is not None else step.kind),
        )


def _activation(steps: Sequence[Step], file: str) -> str | None:
    """Return the one activation after a hidden layer, None where it is of no known name."""
    steps = [s for s in steps if not (s.kind == "activation" and s.value == "linear")]
    acting = [s for s in steps if s.kind == "activation"]
    late = ("activation", "layer_norm") in pairwise([s.kind for s in steps])
    others = [s for s in steps if s.kind not in ("activation", "layer_norm")]
    norms = [s for s in steps if s.kind == "layer_norm"]
    if others or len(acting) > 1 or len(norms) > 1 or (late and acting):
        wrong = next(iter(others or acting[1:] or norms))
        raise UnsupportedError(
            "a hidden layer is followed by more than a layer norm and one activation",
            file=file,
            path="/".join(wrong.name),
            found=str(wrong.value if wrong.kind != "layer_norm" else "a layer norm"),
        )
    if not acting:
        return "linear"
    return None if acting[0].value is None else str(acting[0].value)


def _head(steps: Sequence[Step], file: str) -> tuple[str | None, Any, Any, tuple[str, ...]]:
    """Return what makes an action of the last layer: the map, scale and offset, and notes."""
    names = [(s.kind, s.value) for s in steps if not (s.kind == "activation" and s.value == "linear")]
    if not names:
        return "identity", None, 0.0, ()
    if names == [("activation", "tanh")]:
        return "unit_tanh", None, 0.0, ()
    maps = [value for kind, value in names if kind == "affine"]
    if len(names) == 2 and names[0] == ("activation", "tanh") and len(maps) == 1:
        scale, offset = maps[0]
        if all(s > 0 for s in _row(scale, 1)):
            return "affine", scale, offset, ()
    open_ = steps[-1]
    if open_.kind == "code" or (open_.kind == "activation" and open_.value is None):
        return None, None, 0.0, (f"the code of {'/'.join(open_.name)} is not run: its effect is unknown",)
    raise UnsupportedError(
        "the model ends in no action map that is known",
        file=file,
        path="/".join(open_.name),
        found=", ".join(str(value) for _, value in names),
        hint="a policy ends in its last dense layer, in tanh, or in tanh and one scale and offset",
    )


# Keras: activations by the names of keras/src/activations/__init__.py that mean the same function here. Its
# leaky_relu has another slope (0.2) than torch's.
_KERAS = {
    **{n: n for n in ("relu", "tanh", "sigmoid", "elu", "gelu", "silu", "softplus", "linear")},
    "swish": "silu",
}
# Further functions of keras/src/activations/__init__.py, of both versions: no policy here computes them.
_OTHER_KERAS = frozenset(
    (
        "leaky_relu",
        "selu",
        "celu",
        "relu6",
        "softsign",
        "hard_sigmoid",
        "hard_silu",
        "hard_swish",
        "hard_tanh",
    )
) | {"hard_shrink", "soft_shrink", "tanh_shrink", "squareplus", "mish", "exponential", "softmax", "glu"}
_OTHER_KERAS |= {"log_softmax", "log_sigmoid", "sparse_plus", "sparse_sigmoid", "sparsemax", "threshold"}
_SKIPPED = frozenset(
    ("InputLayer", "Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout", "Identity")
)
_LAYERS = {"ReLU": "relu", "ELU": "elu"}
MODELS = frozenset(("Sequential", "Functional", "Model"))
# Where the classes of those names come from; a program's own class may have the same name.
_KERAS_MODULES = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")


def is_described(document: Mapping[str, Any]) -> bool:
    """Return whether a Keras model is of Keras's own class: its configuration lists what it computes."""
    config = config_of(dict(document))
    return (
        config.cls in MODELS and isinstance(config.settings.get("layers"), list) and not is_foreign(document)
    )


def own_class(document: Mapping[str, Any]) -> str | None:
    """Return the class of a Keras model whose code is the program's own, None for Keras's classes."""
    cls = config_of(dict(document)).cls
    return cls if cls is not None and not is_described(document) else None


def precisions(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types in which a Keras model's layers compute, float32 and float64 left out."""
    found: dict[str, None] = {}
    waiting: list[Any] = [document]
    while waiting and len(found) < _MOST_TYPES:
        config = config_of(waiting.pop())
        kind = config.settings.get("dtype")
        kind = config_of(kind).name if isinstance(kind, dict) else kind
        if isinstance(kind, str) and kind not in ("float32", "float64") and config.cls != "InputLayer":
            found[kind] = None
        waiting += reversed([each for each in config.settings.get("layers") or () if isinstance(each, dict)])
    return tuple(found)


_MOST_TYPES = 8


def of_keras(document: Mapping[str, Any]) -> tuple[Step, ...] | None:
    """Return the steps of a Keras model's configuration, None if it lists no layers.

    `document` is that of `model.save`: `class_name`, `config`. A functional model is followed from its output
    to its input; one that is no chain has an unknown step.
    """
    if not is_described(document):
        return None
    found = list(_model_steps(document, ()))
    return tuple(found) if any(step.kind == "dense" for step in found) else None


def _model_steps(document: Mapping[str, Any], above: Name) -> Iterator[Step]:
    config = config_of(dict(document))
    layers = [each for each in config.settings.get("layers") or () if isinstance(each, dict)]
    if config.cls != "Sequential":
        chain = _chain(layers, config.settings.get("output_layers"))
        if chain is None:
            yield Step("unknown", above, "layers that are no chain")
            return
        layers = chain
    for layer in layers:
        inner = config_of(layer)
        name = (*above, str(inner.name or layer.get("name") or "?"))
        if is_foreign(layer):
            yield Step("unknown", name, f"{inner.cls}, a class of another package")
        elif inner.cls in MODELS:
            yield from _model_steps(layer, name)
        else:
            yield from _keras_layer(str(inner.cls), name, inner.facts())


def is_foreign(layer: Mapping[str, Any]) -> bool:
    """Return whether a layer's or a model's class is the program's own, whatever it is called."""
    module, registered = layer.get("module"), layer.get("registered_name")
    own = isinstance(module, str) and not module.startswith(_KERAS_MODULES)
    return own or ">" in str(layer.get("class_name")) or (isinstance(registered, str) and ">" in registered)


def _chain(layers: Sequence[dict[str, Any]], outputs: Any) -> list[dict[str, Any]] | None:
    """Return a functional model's layers from input to output, None unless each has one input and one use."""
    by_name = {str(layer.get("name") or config_of(layer).name): layer for layer in layers}
    ends = outputs if isinstance(outputs, list) else []
    ends = [ends] if ends and isinstance(ends[0], str) else ends
    if len(by_name) != len(layers) or len(ends) != 1 or not isinstance(ends[0], list):
        return None
    found: list[dict[str, Any]] = []
    name = str(ends[0][0])
    while name in by_name and len(found) < len(layers):
        layer = by_name[name]
        found.append(layer)
        nodes = layer.get("inbound_nodes")
        if not nodes:
            return found[::-1] if len(found) == len(layers) else None
        sources = _sources(nodes) if isinstance(nodes, list) and len(nodes) == 1 else []
        if len(sources) != 1:
            return None
        name = sources[0]
    return None


def _sources(node: Any) -> list[str]:
    """Return the layers whose outputs a node takes, in the spelling of Keras 3 or of Keras 2."""
    if isinstance(node, dict):
        history = node.get("keras_history")
        if isinstance(history, list) and history:
            return [str(history[0])]
        return [name for value in node.values() for name in _sources(value)]
    if isinstance(node, list):
        if len(node) in (3, 4) and isinstance(node[0], str) and isinstance(node[1], int):
            return [node[0], *_sources(node[3:])]
        return [name for value in node for name in _sources(value)]
    return []


def _keras_layer(cls: str, name: Name, state: dict[str, Any]) -> Iterator[Step]:
    if cls in _SKIPPED:
        return
    if state.get("quantization_config") is not None:
        yield Step("unknown", name, f"a quantised {cls}")
        return
    if cls == "Dense":
        yield Step("dense", name)
        yield _keras_activation(name, state.get("activation", "linear" if "units" in state else None))
    elif cls == "Activation":
        yield _keras_activation(name, state.get("activation"))
    elif cls in _LAYERS and _is_plain(cls, state):
        yield Step("activation", name, _LAYERS[cls])
    elif cls == "LayerNormalization" and state.get("axis", [-1]) in ([-1], -1, [1], 1):
        if state.get("rms_scaling") or not state.get("center", True) or not state.get("scale", True):
            yield Step("unknown", name, "a layer norm without offset or scale")
        else:
            yield Step("layer_norm", name, float(state.get("epsilon", 1e-3)))
    elif cls == "Rescaling":
        yield Step("affine", name, (state.get("scale", 1.0), state.get("offset", 0.0)))
    elif cls == "Lambda":
        yield Step("code", name, "Lambda")
    else:
        yield Step("unknown", name, cls)


def _keras_activation(name: Name, said: Any) -> Step:
    """Return the step of an activation; one that is named and has no equal here is unknown."""
    if isinstance(said, str) and said in _KERAS:
        return Step("activation", name, _KERAS[said])
    if isinstance(said, str) and said in _OTHER_KERAS:
        return Step("unknown", name, said)
    return Step("activation", name, None)


def _is_plain(cls: str, state: dict[str, Any]) -> bool:
    """Say whether the layer is the function of its name: no slope, threshold or limit of its own."""
    if cls == "ELU":
        return bool(state.get("alpha", 1.0) == 1.0)
    plain = not state.get("negative_slope") and not state.get("threshold")
    return plain and state.get("max_value") is None


_TORCH = "torch.nn.modules."
_SEQUENTIAL, _LINEAR = f"{_TORCH}container.Sequential", f"{_TORCH}linear.Linear"
_NORM = f"{_TORCH}normalization.LayerNorm"
_PASSED = ("dropout.", "flatten.Flatten", "linear.Identity")


def of_whole(module: Whole, name: Name) -> tuple[Step, ...] | None:
    """Return the steps of the pickled Sequential that holds a network, None if another class does.

    What a user's own class computes is code, which is not in the file; its Sequential's activations are.
    """
    top = module.tree.containers.get(())
    outer = (top.name or "") if top is not None else ""
    title = ".".join(name)
    cls = module.classes.get(title, outer if not title else "")
    if cls != _SEQUENTIAL:
        return None
    found = list(_torch_steps(module, title))
    if title:
        found.append(Step("code", (outer.rpartition(".")[2] or "module",), "forward"))
    return tuple(found)


def is_sequential(cls: str) -> bool:
    """Return whether a class is torch's Sequential, whose parts a file lists in the order of their use."""
    return cls == _SEQUENTIAL


def is_hooked(module: Whole) -> bool:
    """Return whether a function was hooked into a forward: it may change what goes in or comes out."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return any(step.value in names for path in module.tree for step in path[:-1]) or any(
        step.value in names for path in module.tree.containers for step in path[:-1]
    )


def _torch_steps(module: Whole, title: str) -> Iterator[Step]:
    # A Sequential applies its parts in the order of `_modules`, which is that of the file, not of the names.
    for child in [n for n in module.classes if n.rpartition(".")[0] == title and (title or "." not in n)]:
        cls, name = module.classes[child], tuple(child.split("."))
        short = cls.removeprefix(_TORCH)
        if cls == _SEQUENTIAL:
            yield from _torch_steps(module, child)
        elif cls == _LINEAR:
            yield Step("dense", name)
        elif cls == _NORM:
            epsilon = module.value(child, "eps")
            yield Step("layer_norm", name, float(epsilon) if isinstance(epsilon, int | float) else 1e-5)
        elif short.startswith(_PASSED):
            continue
        elif (activation := module.activation(child)) is not None:
            yield Step("activation", name, activation)
        else:
            # The file names the function, so that no other one may be given in its place.
            yield Step("unknown", name, short.removeprefix("activation."))
