"""What a model's own configuration says it computes, step by step: Keras's settings, torch's pickled modules.

Sources: keras/src/models/sequential.py and functional.py (`layers` in the order of their use),
keras/src/layers/**; torch/nn/modules/container.py (Sequential applies its parts in the order of their names).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ckpttool.errors import UnsupportedError
from ckpttool.layouts.whole_module import Whole
from ckpttool.leaf import attr
from ckpttool.tree import Container, Tree

Name = tuple[str, ...]


class Step(NamedTuple):
    """One step: a `layer` by its name, an `activation`, an `affine` map, or `unknown` with why."""

    kind: str
    name: Name = ()
    value: Any = None


class Listed(NamedTuple):
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


def read(steps: Sequence[Step], file: str, origin: str = "the model's configuration") -> Listed:
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
    return Listed(
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
_SKIPPED = frozenset(
    ("InputLayer", "Dropout", "GaussianNoise", "GaussianDropout", "AlphaDropout", "Identity")
)
_LAYERS = {"ReLU": "relu", "ELU": "elu"}
_MODELS = frozenset(("Sequential", "Functional", "Model"))


def of_keras(tree: Tree, name: Name) -> tuple[Step, ...] | None:
    """Return the steps of the Keras model at a module's name, None if the file holds no configuration."""
    root = tuple(map(attr, name))
    while True:
        top = tree.containers.get(root)
        if top is not None and top.kind == "module" and (top.name or "").rpartition(".")[2] in _MODELS:
            break
        if not root:
            return None
        root = root[:-1]
    found = list(_keras_steps(tree, root))
    return tuple(found) if any(step.kind == "dense" for step in found) else None


def _keras_steps(tree: Tree, root: tuple[Any, ...]) -> Iterator[Step]:
    outputs = _state(tree.containers[root]).get("output_layers")
    if isinstance(outputs, list) and outputs and isinstance(outputs[0], list) and len(outputs) > 1:
        yield Step("unknown", (), f"{len(outputs)} outputs")
    for path, container in tree.containers.items():
        if len(path) != len(root) + 1 or path[: len(root)] != root or container.kind != "module":
            continue
        name = tuple(str(step.value) for step in path)
        cls = (container.name or "").rpartition(".")[2]
        if cls in _MODELS:
            yield from _keras_steps(tree, path)
        else:
            yield from _keras_layer(cls, name, _state(container))


def _state(container: Container) -> dict[str, Any]:
    return container.state if isinstance(container.state, dict) else {}


def _keras_layer(cls: str, name: Name, state: dict[str, Any]) -> Iterator[Step]:
    if cls in _SKIPPED:
        return
    if cls == "Dense":
        yield Step("dense", name)
        said = state.get("activation", "linear" if "units" in state else None)
        yield Step("activation", name, _KERAS.get(str(said)))
    elif cls == "Activation":
        yield Step("activation", name, _KERAS.get(str(state.get("activation"))))
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


def _torch_steps(module: Whole, title: str) -> Iterator[Step]:
    children = [n for n in module.classes if n.rpartition(".")[0] == title and (title or "." not in n)]
    for child in sorted(children, key=_order):
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
        elif short.startswith("activation."):
            yield Step("activation", name, module.activation(child))
        else:
            yield Step("unknown", name, cls)


def _order(child: str) -> tuple[int, str]:
    last = child.rpartition(".")[2]
    return (int(last), "") if last.isdigit() and len(last) < 10 else (-1, last)
