"""Steps of Keras models and pickled modules as layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.kinds import ACTIVATION_KINDS, KERAS_ACTIVATIONS
from ckpttool.core.sidecar import NotUnderstood
from ckpttool.core.tree import Path
from ckpttool.formats.keras_config import MODELS, KerasConfig, config_of, is_described, list_references
from ckpttool.formats.tf_common import format_object
from ckpttool.graphs.torchscript_code import is_number
from ckpttool.libraries.recognize import TORCH_CLASSES, PickledModule
from ckpttool.mapping.layer_kinds import Name

_CONFIGURATION = "the model's configuration"


class ChainStep(NamedTuple):
    """One step: a `layer` by its name, an `activation`, an `affine` map, or `unknown` with a reason.

    `probabilities` of actions come last, and have the name of their function.

    The value of an activation is its name, NotUnderstood for another function that the configuration states,
    None where it states none.
    """

    kind: str
    name: Name = ()
    value: Any = None


class LayerTensors(NamedTuple):
    """Tensor paths of a layer whose steps were traced to them; the bias is optional.

    `framework` is the one whose axis order the weight has, for models that contain both.
    """

    weight: Path
    bias: Path | None
    epsilon: float | None = None
    framework: str | None = None


class ChainFacts(NamedTuple):
    """The steps described as a policy; None for what they leave open.

    `activations` follow the hidden layers; `scale` and `offset` map the last layer's tanh.
    """

    layers: tuple[Name, ...]
    activations: tuple[str, ...] | NotUnderstood | None
    head: str | NotUnderstood | None
    epsilon: float | None
    origin: str
    scale: Any = None
    offset: Any = 0.0
    assumed: tuple[str, ...] = ()

    def bounds(self, width: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the bounds of the scaled tanh."""
        scale, offset = (_to_row(value, width) for value in (self.scale, self.offset))
        low = tuple(o - s for s, o in zip(scale, offset, strict=True))
        return low, tuple(o + s for s, o in zip(scale, offset, strict=True))


def _to_row(value: Any, width: int) -> tuple[float, ...]:
    values = tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),)
    return values * (width // len(values)) if len(values) == 1 else values


def read_chain_facts(steps: Sequence[ChainStep], file: str, origin: str = _CONFIGURATION) -> ChainFacts:
    """Return the steps as a policy; raise UnsupportedError for unsupported operations."""
    layers = [step for step in steps if step.kind in ("dense", "layer_norm")]
    dense = [n for n, step in enumerate(steps) if step.kind == "dense"]
    if not dense:
        raise UnsupportedError("the model has no dense layer", file=file)
    between = [steps[a + 1 : b] for a, b in zip([-1, *dense], [*dense, len(steps)], strict=True)]
    _require_none(between[0], file)
    hidden = [_activation(step, file) for step in between[1:-1]]
    head, scale, offset, assumed = _read_head(between[-1], file)
    epsilons = {step.value for step in steps if step.kind == "layer_norm"}
    if len(epsilons) > 1:
        raise UnsupportedError(
            "the layer norms have different epsilons", file=file, found=", ".join(map(str, sorted(epsilons)))
        )
    unclear = [step for step in hidden if isinstance(step, NotUnderstood)]
    known: tuple[str, ...] | NotUnderstood | None = None
    if unclear:
        text = ", ".join(dict.fromkeys(step.text for step in unclear))
        known = NotUnderstood(text, origin)
    elif None not in hidden:
        known = tuple(str(name) for name in hidden)
    return ChainFacts(
        tuple(step.name for step in layers),
        known,
        head,
        next(iter(epsilons), None),
        origin,
        scale,
        offset,
        assumed,
    )


def _require_none(steps: Sequence[ChainStep], file: str) -> None:
    for step in steps:
        raise UnsupportedError(
            "the model has operations before its first dense layer",
            file=file,
            path="/".join(step.name),
            found=str(step.value if step.value is not None else step.kind),
        )


def _activation(steps: Sequence[ChainStep], file: str) -> str | NotUnderstood | None:
    """Return the one activation after a hidden layer, None if the configuration states none."""
    steps = [s for s in steps if not (s.kind == "activation" and s.value == "linear")]
    acting = [s for s in steps if s.kind == "activation"]
    late = ("activation", "layer_norm") in pairwise([s.kind for s in steps])
    others = [s for s in steps if s.kind not in ("activation", "layer_norm")]
    norms = [s for s in steps if s.kind == "layer_norm"]
    if others or len(acting) > 1 or len(norms) > 1 or (late and acting):
        wrong = next(iter(others or acting[1:] or norms))
        raise UnsupportedError(
            "a hidden layer is followed by more than one layer norm and one activation",
            file=file,
            path="/".join(wrong.name),
            found=str(wrong.value if wrong.kind != "layer_norm" else "a layer norm"),
        )
    if not acting:
        return "linear"
    value: str | NotUnderstood | None = acting[0].value
    return value


def _read_head(
    steps: Sequence[ChainStep], file: str
) -> tuple[str | NotUnderstood | None, Any, Any, tuple[str, ...]]:
    """Return the action map of the last layer: its name, scale, offset and assumptions."""
    names = [(s.kind, s.value) for s in steps if not (s.kind == "activation" and s.value == "linear")]
    if not names:
        return "identity", None, 0.0, ()
    if names == [("activation", "tanh")]:
        return "unit_tanh", None, 0.0, ()
    if [kind for kind, _ in names] == ["probabilities"]:
        return "argmax", None, 0.0, ()
    maps = [value for kind, value in names if kind == "affine"]
    if len(names) == 2 and names[0] == ("activation", "tanh") and len(maps) == 1:
        scale, offset = maps[0]
        if all(s > 0 for s in _to_row(scale, 1)):
            return "affine", scale, offset, ()
    open_ = steps[-1]
    if isinstance(open_.value, NotUnderstood):
        return open_.value, None, 0.0, ()
    if open_.kind == "code" or (open_.kind == "activation" and open_.value is None):
        return (
            None,
            None,
            0.0,
            (f"the code of {'/'.join(open_.name)}, not run, only applies its layers in sequence",),
        )
    raise UnsupportedError(
        "the model ends in an unsupported action map",
        file=file,
        path="/".join(open_.name),
        found=", ".join(str(value) for _, value in names),
        hint=(
            "a policy must end in its last dense layer, in tanh, or in tanh followed by one scale and offset"
        ),
    )


_SKIPPED = frozenset(
    ("InputLayer", "Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout", "Identity")
)
_LAYERS = {ACTIVATION_KINDS[name].layer: name for name in ("relu", "elu")}


def own_class(document: Mapping[str, Any]) -> str | None:
    """Return the custom class of a Keras model, None for Keras's own classes."""
    cls = config_of(dict(document)).cls
    return cls if cls is not None and not is_described(document) else None


def list_precisions(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the dtypes in which a Keras model's layers compute, without float32 and float64."""
    precisions: dict[str, None] = {}
    waiting: list[Any] = [document]
    while waiting and len(precisions) < _MOST_TYPES:
        config = config_of(waiting.pop())
        kind = config.settings.get("dtype")
        kind = config_of(kind).name if isinstance(kind, dict) else kind
        if isinstance(kind, str) and kind not in ("float32", "float64") and config.cls != "InputLayer":
            precisions[kind] = None
        waiting += reversed([part for part in config.settings.get("layers") or () if isinstance(part, dict)])
    return tuple(precisions)


_MOST_TYPES = 8


def read_keras_steps(document: Mapping[str, Any]) -> tuple[ChainStep, ...] | None:
    """Return the steps of a Keras model's configuration, None if it lists no layers.

    `document` is the one written by `model.save`: `class_name`, `config`. A model that is not a chain has an
    unknown step. Sources: keras/src/models/sequential.py and functional.py (`layers` in the order of their
    use), keras/src/layers/**; torch/nn/modules/container.py (Sequential applies its parts in the order of
    `_modules`).
    """
    if not is_described(document):
        return None
    steps = tuple(_model_steps(config_of(dict(document)), ()))
    return steps if any(step.kind == "dense" for step in steps) else None


def _model_steps(model: KerasConfig, name: Name) -> Iterator[ChainStep]:
    """Yield the steps of a model's layers, also of those in nested models."""
    layers = _chained_layers(model)
    if layers is None:
        yield ChainStep("unknown", name, "layers that do not form a chain")
    for layer in layers or ():
        own = (*name, layer.name or "?")
        if layer.cls == "InputLayer":
            continue
        if layer.foreign:
            yield ChainStep("unknown", own, f"{layer.cls}, a class from another package")
        elif layer.cls in MODELS:
            yield from _model_steps(layer, own)
        else:
            yield from _keras_layer(str(layer.cls), own, layer.settings)


def _chained_layers(model: KerasConfig) -> list[KerasConfig] | None:
    """Return the layers in the order of their calls: each once, for the result of the one before.

    None if they are called otherwise, or if a layer is not on the way to the only output.
    """
    stored = model.settings.get("layers")
    if not isinstance(stored, list) or model.cls == "Sequential":
        return model.layers() if isinstance(stored, list) else None
    by_name = {
        str(layer.get("name") or config_of(layer).name or ""): layer
        for layer in stored
        if isinstance(layer, dict)
    }
    calls, chain = list_references(model.settings.get("output_layers")), list[KerasConfig]()
    while len(calls) == 1 and calls[0][0] in by_name:
        (name, call, output) = calls[0]
        layer = by_name.pop(name)
        chain.append(config_of(layer))
        nodes = layer.get("inbound_nodes") or [[]]
        legal = isinstance(nodes, list) and 0 <= call < len(nodes) and output == 0
        calls = list_references(nodes[call]) if legal else calls
    starts = not calls and bool(chain) and chain[-1].cls == "InputLayer"
    return chain[::-1] if starts and len(chain) == len(stored) else None


def _keras_layer(cls: str, name: Name, state: Mapping[str, Any]) -> Iterator[ChainStep]:
    if cls in _SKIPPED:
        return
    if state.get("quantization_config") is not None:
        yield ChainStep("unknown", name, f"a quantised {cls}")
        return
    if cls == "Dense":
        yield ChainStep("dense", name)
        yield _keras_activation(name, state.get("activation", "linear" if "units" in state else None))
    elif cls == "Activation":
        yield _keras_activation(name, state.get("activation"))
    elif cls in _LAYERS and _is_plain(cls, state):
        yield ChainStep("activation", name, _LAYERS[cls])
    elif cls == "LayerNormalization" and state.get("axis", [-1]) in ([-1], -1, [1], 1):
        yield _keras_layer_norm(name, state)
    elif cls == "Rescaling":
        maps = state.get("scale", 1.0), state.get("offset", 0.0)
        whole = all(map(_is_row, maps))
        yield ChainStep("affine", name, maps) if whole else ChainStep("unknown", name, cls)
    elif cls == "Lambda":
        yield ChainStep("code", name, NotUnderstood("a Lambda, whose code is not executed", _CONFIGURATION))
    else:
        yield ChainStep("unknown", name, cls)


def _keras_layer_norm(name: Name, state: Mapping[str, Any]) -> ChainStep:
    """Return the step of a layer norm; one without factor or offset, or of another kind, is unknown."""
    epsilon = state.get("epsilon", 1e-3)
    if state.get("rms_scaling") or not state.get("center", True) or not state.get("scale", True):
        return ChainStep("unknown", name, "a layer norm without offset or scale")
    if not is_number(epsilon):
        return ChainStep("unknown", name, f"a layer norm with epsilon {epsilon}")
    return ChainStep("layer_norm", name, float(epsilon))


def _keras_activation(name: Name, activation: Any) -> ChainStep:
    """Return the step of an activation; a named one without an equivalent is unknown."""
    if isinstance(activation, str) and activation in KERAS_ACTIVATIONS:
        return ChainStep("activation", name, KERAS_ACTIVATIONS[activation])
    if activation in ("softmax", "log_softmax"):
        return ChainStep("probabilities", name, activation)
    if isinstance(activation, str) and any(activation in row.keras for row in ACTIVATION_KINDS.values()):
        return ChainStep("unknown", name, activation)
    if activation is None:
        return ChainStep("activation", name, None)
    return ChainStep("activation", name, NotUnderstood(format_object(activation), _CONFIGURATION))


def _is_row(value: Any) -> bool:
    """Return whether a setting is a number or a list of numbers."""
    return all(map(is_number, value)) if isinstance(value, list) else is_number(value)


def _is_plain(cls: str, state: Mapping[str, Any]) -> bool:
    """Return whether the layer is the plain function of its name: no custom slope, threshold or limit."""
    if cls == "ELU":
        return bool(state.get("alpha", 1.0) == 1.0)
    plain = not state.get("negative_slope") and not state.get("threshold")
    return plain and state.get("max_value") is None


_SEQUENTIAL, _LINEAR = f"{TORCH_CLASSES}container.Sequential", f"{TORCH_CLASSES}linear.Linear"
_NORM = f"{TORCH_CLASSES}normalization.LayerNorm"
_PROBABILITIES = ("activation.Softmax", "activation.LogSoftmax")
_PASSED = ("dropout.", "flatten.Flatten", "linear.Identity")


def read_sequential_steps(module: PickledModule, name: Name) -> tuple[ChainStep, ...] | None:
    """Return the steps of the pickled Sequential that contains a network, None for another class.

    The code of a custom class is not in the file; a Sequential's activations are.
    """
    top = module.tree.containers.get(())
    outer = (top.name or "") if top is not None else ""
    title = ".".join(name)
    cls = module.classes.get(title, outer if not title else "")
    if cls != _SEQUENTIAL:
        return None
    steps = list(_torch_steps(module, title))
    if title:
        steps.append(ChainStep("code", (outer.rpartition(".")[2] or "module",), "forward"))
    return tuple(steps)


def is_sequential(cls: str) -> bool:
    """Return whether a class is torch's Sequential, whose parts are stored in the order of use."""
    return cls == _SEQUENTIAL


def is_hooked(module: PickledModule) -> bool:
    """Return whether the module has forward hooks: they may change its inputs or outputs."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return any(step.value in names for path in module.tree for step in path[:-1]) or any(
        step.value in names for path in module.tree.containers for step in path[:-1]
    )


def _torch_steps(module: PickledModule, title: str) -> Iterator[ChainStep]:
    # A Sequential applies its parts in the order of `_modules`, which is file order, not name order.
    for child in [n for n in module.classes if n.rpartition(".")[0] == title and (title or "." not in n)]:
        cls, name = module.classes[child], tuple(child.split("."))
        short = cls.removeprefix(TORCH_CLASSES)
        if cls == _SEQUENTIAL:
            yield from _torch_steps(module, child)
        elif cls == _LINEAR:
            yield ChainStep("dense", name)
        elif cls == _NORM:
            epsilon = module.value(child, "eps")
            yield ChainStep("layer_norm", name, float(epsilon) if isinstance(epsilon, int | float) else 1e-5)
        elif short.startswith(_PASSED):
            continue
        elif short in _PROBABILITIES and module.value(child, "dim") in (-1, 1, None):
            yield ChainStep("probabilities", name, short.removeprefix("activation."))
        elif (activation := module.activation(child)) is not None:
            yield ChainStep("activation", name, activation)
        else:
            # The file names the function, so no other one may be substituted.
            yield ChainStep("unknown", name, short.removeprefix("activation."))
