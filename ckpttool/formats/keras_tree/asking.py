"""What a Keras configuration asks of whoever loads it: code, files, classes of other modules.

Sources: keras/src/saving/serialization_lib.py (`deserialize_keras_object`, `_retrieve_class_or_fn`),
keras/src/layers/core/lambda_layer.py, keras/src/export/tfsm_layer.py, keras/src/layers/preprocessing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.formats.keras_facts import MAX_TEXT
from ckpttool.wire.asked import CLASSES, CODE, Asked, Verdict, merged

_KERAS = frozenset(("keras", "tf_keras", "tensorflow"))
# Where Keras's own classes live; others of its modules (keras.utils.get_file, ...) have functions that act.
_PLAIN = frozenset(
    (
        *(
            "activations",
            "constraints",
            "dtype_policies",
            "initializers",
            "layers",
            "losses",
            "metrics",
            "models",
        ),
        *("ops", "optimizers", "quantizers", "random", "regularizers"),
    )
)
_BUILTIN = frozenset(("dict", "list", "set", "slice", "tuple", "frozenset", "float", "int", "str", "bool"))
_RUNS = frozenset(("Lambda", "__lambda__", "TFSMLayer", "PyFunc"))


def asks(document: Any, where: str) -> tuple[Asked, ...]:
    """Return what is beyond Keras's own classes in a configuration, wherever it stands in it."""
    return merged(_each(document, where))


def _each(document: Any, where: str) -> Iterator[Asked]:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict):
            told = _told(value)
            if told is not None:
                yield Asked(told[0][:MAX_TEXT], told[1], 1, None, where, "keras")
            waiting += reversed(list(value.values()))


def _told(value: Mapping[str, Any]) -> tuple[str, Verdict] | None:
    """Return the name and the verdict of a serialized object; None for one of Keras's own, and for data."""
    cls, module = value.get("class_name"), value.get("module")
    if not isinstance(cls, str):
        return None
    config = value.get("config")
    settings = config if isinstance(config, dict) else {}
    layer = settings.get("name")
    named = f"{cls} {layer!r}" if isinstance(layer, str) else cls
    if cls.rpartition(">")[2] in _RUNS:
        return named, CODE
    if isinstance(settings.get("vocabulary"), str) or isinstance(settings.get("idf_weights"), str):
        return f"{named} (reads {settings.get('vocabulary')})", CODE
    if isinstance(module, str) and module:
        return _of_module(module, cls, config)
    # A class that its user registered under a name of its own (keras.saving.register_keras_serializable).
    registered = value.get("registered_name")
    if ">" in cls or (isinstance(registered, str) and ">" in registered):
        return (registered if isinstance(registered, str) else cls), CLASSES
    return None


def _of_module(module: str, cls: str, config: object) -> tuple[str, Verdict] | None:
    top, *rest = module.split(".")
    full = f"{module}.{cls}"
    if top in _KERAS:
        steps = [step for step in rest if step not in ("api", "keras", "src", "_tf_keras", "python")]
        return None if not steps or steps[0] in _PLAIN else (full, CODE)
    if module == "builtins":
        if cls == "function":
            return (config if isinstance(config, str) else full), CLASSES
        return None if cls in _BUILTIN else (full, CODE)
    return full, CODE if top in sys.stdlib_module_names else CLASSES
