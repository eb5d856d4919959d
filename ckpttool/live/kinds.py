"""What a live object is, by the names of its class's bases: no framework is imported to ask."""

from __future__ import annotations

import functools
from typing import Any

FRAMEWORKS = frozenset(
    ("tensorflow", "tensorflow_core", "keras", "tf_keras", "torch", "jax", "jaxlib", "numpy", "wrapt")
)
_TENSORFLOW = ("tensorflow", "tensorflow_core")
_KERAS = ("keras", "tf_keras")
_VARIABLES = frozenset(
    [(top, "Variable") for top in (*_TENSORFLOW, "keras")]
    + [("keras", "KerasVariable"), ("torch", "Parameter"), ("torch", "Buffer")]
)
_TENSORS = _VARIABLES | {
    *((top, "EagerTensor") for top in _TENSORFLOW),
    ("torch", "Tensor"),
    ("jaxlib", "ArrayImpl"),
}
_TF_MODULES = frozenset((top, "Module") for top in _TENSORFLOW)
_KERAS_LAYERS = frozenset((top, "Layer") for top in _KERAS)
_TORCH_MODULES = frozenset([("torch", "Module")])
_MODULES = _TF_MODULES | _KERAS_LAYERS | _TORCH_MODULES
_OPTIMIZERS = frozenset(
    (top, name)
    for top in (*_KERAS, *_TENSORFLOW)
    for name in ("BaseOptimizer", "Optimizer", "OptimizerV2", "_BaseOptimizer")
)
# Objects that hold variables and are no modules: tf.train.Checkpoint is an AutoTrackable.
_HOLDERS = (
    _MODULES
    | _OPTIMIZERS
    | {(top, "AutoTrackable") for top in _TENSORFLOW}
    | {(top, name) for top in _KERAS for name in ("Metric", "SeedGenerator", "Layer")}
    | {("torch", "Optimizer")}
)


def bases(value: object) -> frozenset[tuple[str, str]]:
    """Return every base of the object's class as the package that it comes from and its name."""
    kind: Any = type(value)
    return _bases(kind)


@functools.lru_cache(maxsize=4096)
def _bases(kind: Any) -> frozenset[tuple[str, str]]:
    return frozenset((_top(base), base.__name__) for base in kind.__mro__)


def _top(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def top(value: object) -> str:
    """Return the package that the object's class comes from."""
    return _top(type(value))


def of_class(value: object, name: str) -> bool:
    """Say whether some base of the object's class has this name and is torch's."""
    return ("torch", name) in bases(value)


def is_variable(value: object) -> bool:
    """Say whether the object is a variable of TensorFlow or Keras, or a Parameter or Buffer of PyTorch."""
    return not bases(value).isdisjoint(_VARIABLES)


def is_tensor(value: object) -> bool:
    """Say whether the object is a variable or any other tensor of a framework that has a value now."""
    return not bases(value).isdisjoint(_TENSORS)


def is_array(value: object) -> bool:
    """Say whether the object is an array of NumPy."""
    return ("numpy", "ndarray") in bases(value)


def is_module(value: object) -> bool:
    """Say whether the object is a tf.Module, a Keras layer or a torch.nn.Module."""
    return not bases(value).isdisjoint(_MODULES)


def is_tf_module(value: object) -> bool:
    """Say whether the object is a tf.Module, which `tf.Module._flatten` would enter."""
    return not bases(value).isdisjoint(_TF_MODULES)


def is_torch_module(value: object) -> bool:
    """Say whether the object is a torch.nn.Module."""
    return not bases(value).isdisjoint(_TORCH_MODULES)


def is_torch_optimizer(value: object) -> bool:
    """Say whether the object is an optimizer of PyTorch."""
    return ("torch", "Optimizer") in bases(value)


def is_keras_optimizer(value: object) -> bool:
    """Say whether the object is an optimizer of Keras or TensorFlow."""
    return not bases(value).isdisjoint(_OPTIMIZERS)


def holds_variables(value: object) -> bool:
    """Say whether the object is a module, an optimizer, a metric or another trackable object."""
    return not bases(value).isdisjoint(_HOLDERS)


def is_checkpoint(value: object) -> bool:
    """Say whether the object is a tf.train.Checkpoint."""
    return any((name, "Checkpoint") in bases(value) for name in _TENSORFLOW)


def is_trackable(value: object) -> bool:
    """Say whether tf.train.Checkpoint can save the object (tensorflow/python/trackable/base.py)."""
    return any((name, "Trackable") in bases(value) for name in _TENSORFLOW)


def attributes(value: Any) -> dict[str, Any]:
    """Return what the object holds itself, no property asked: `vars`, as tf.Module does."""
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else {}


def plain_value(variable: Any) -> Any:
    """Return the tensor inside a variable of Keras 3 (keras/src/backend/common/variables.py), or itself."""
    if {("keras", "Variable"), ("keras", "KerasVariable")} & bases(variable):
        return attributes(variable).get("_value")
    return variable
