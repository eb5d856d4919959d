"""Steps of Keras models and pickled modules as layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import UnsupportedError
from ckpttool.core.sidecar import NotUnderstood
from ckpttool.core.tree import Path
from ckpttool.formats.keras_config import config_of, is_described
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


_SEQUENTIAL = f"{TORCH_CLASSES}container.Sequential"


def is_sequential(cls: str) -> bool:
    """Return whether a class is torch's Sequential, whose parts are stored in the order of use."""
    return cls == _SEQUENTIAL


def is_hooked(module: PickledModule) -> bool:
    """Return whether the module has forward hooks: they may change its inputs or outputs."""
    names = ("_forward_hooks", "_forward_pre_hooks")
    return any(step.value in names for path in module.tree for step in path[:-1]) or any(
        step.value in names for path in module.tree.containers for step in path[:-1]
    )
