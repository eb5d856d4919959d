"""What a Keras configuration asks of whoever loads it: code, files, classes of other modules.

Sources: keras/src/saving/serialization_lib.py (`deserialize_keras_object`, `_retrieve_class_or_fn`),
keras/src/layers/core/lambda_layer.py, keras/src/export/tfsm_layer.py, keras/src/layers/preprocessing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ckpttool import documents
from ckpttool.errors import FormatError, LimitError
from ckpttool.formats.hdf5 import Index
from ckpttool.formats.keras_facts import MAX_TEXT
from ckpttool.wire.asked import CLASSES, CODE, Asked, Verdict, merged
from ckpttool.wire.pickle_known import is_standard
from ckpttool.wire.pickle_values import Global

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
# What loads or runs what it is given, among what Keras keeps beside its classes.
_FUNCTIONS = frozenset(("clone_model", "deserialize", "get", "load_model", "model_from_json", "save_model"))
_MODELS = frozenset(("Functional", "Model", "Sequential"))
# Lambda: marshalled code. TorchModuleWrapper: torch.load of its bytes (keras/src/utils/torch_utils.py).
# JaxLayer and FlaxLayer hold functions. TFSMLayer: a SavedModel of another folder.
_RUNS = frozenset(
    ("Lambda", "__lambda__", "TFSMLayer", "PyFunc", "TorchModuleWrapper", "JaxLayer", "FlaxLayer")
)
# tf_keras/src/layers/core/tf_op_layer.py: layers that call any symbol of TensorFlow's interface, by its name.
_SYMBOLS = {"TFOpLambda": "function", "SlicingOpLambda": "function", "ClassMethod": "cls_symbol"}
_NUMERIC = frozenset(
    (
        *(
            "__operators__",
            "audio",
            "bitwise",
            "dtypes",
            "experimental.numpy",
            "fft",
            "image",
            "linalg",
            "math",
        ),
        *("nn", "quantization", "ragged", "random", "sets", "signal", "sparse", "strings"),
        *(
            "keras.activations",
            "keras.backend",
            "keras.losses",
            "keras.metrics",
            "RaggedTensor",
            "SparseTensor",
        ),
    )
)
_ACTS = frozenset(
    (
        *(
            "Assert",
            "function",
            "import_graph_def",
            "load_library",
            "load_op_library",
            "numpy_function",
            "print",
        ),
        *("py_func", "py_function"),
    )
)
# HDF5 attributes that Keras reads as configurations (keras/src/legacy/saving/legacy_h5_format.py).
ATTRIBUTES = ("model_config", "training_config")


class Judged(NamedTuple):
    """What configurations ask for, and a sentence on each that cannot be judged."""

    asks: tuple[Asked, ...] = ()
    unjudged: tuple[str, ...] = ()


def judged(text: object, where: str) -> Judged:
    """Judge the JSON text of a configuration, wherever Keras reads one.

    What is no text, or no JSON, or too large, is not judged, and said to be so.
    """
    if not isinstance(text, str | bytes):
        return Judged((), (f"{where} is no text: it cannot be judged",))
    try:
        data = text.encode() if isinstance(text, str) else text
        return Judged(asks(documents.value(data, where), where))
    except LimitError as error:
        return Judged((), (f"{error.message}: it cannot be judged",))
    except (FormatError, UnicodeEncodeError):
        return Judged((), (f"{where} is not JSON: it cannot be judged",))


def attributes(index: Index) -> Judged:
    """Judge the configurations in the attributes of an HDF5 file, whatever else it holds."""
    return together(
        judged(group.attributes[name], f"{path}/{name}" if path else name)
        for path, group in index.groups.items()
        for name in ATTRIBUTES
        if name in group.attributes
    )


def together(found: Iterable[Judged]) -> Judged:
    """Return one record of several."""
    every = list(found)
    unjudged = dict.fromkeys(each for one in every for each in one.unjudged)
    return Judged(merged(*(one.asks for one in every)), tuple(unjudged))


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
    own = cls.rpartition(">")[2]
    if own in _RUNS:
        return named, CODE
    if own in _SYMBOLS:
        symbol = settings.get(_SYMBOLS[own])
        return None if _is_numeric(symbol) else (f"{named} (calls tf.{symbol})", CODE)
    files = [settings[key] for key in ("vocabulary", "idf_weights") if isinstance(settings.get(key), str)]
    if files:
        return f"{named} (reads {files[0]})", CODE
    if isinstance(module, str) and module:
        return _of_module(module, cls, value)
    # A class that its user registered under a name of its own (keras.saving.register_keras_serializable).
    registered = value.get("registered_name")
    if ">" in cls or (isinstance(registered, str) and ">" in registered):
        return (registered if isinstance(registered, str) else cls), CLASSES
    return None


def _is_numeric(symbol: object) -> bool:
    """Say whether a name of TensorFlow's interface is a function of numbers: `math.add`, `concat`."""
    if not isinstance(symbol, str):
        return False
    name = symbol.removeprefix("compat.v1.").removeprefix("compat.v2.")
    home, _, last = name.rpartition(".")
    if not home:
        return last not in _ACTS
    steps = home.split(".")
    return any(".".join(steps[:end]) in _NUMERIC for end in range(1, len(steps) + 1)) and last not in _ACTS


def _of_module(module: str, cls: str, value: Mapping[str, Any]) -> tuple[str, Verdict] | None:
    config = value.get("config")
    if cls == "__typespec__" and isinstance(value.get("spec_name"), str):
        cls = value["spec_name"]
    name = config if cls == "function" and isinstance(config, str) else cls
    top, *rest = module.split(".")
    full = f"{module}.{name}"
    if top in _KERAS:
        steps = [step for step in rest if step not in ("api", "keras", "src", "_tf_keras", "python")]
        if not steps:
            return (full, CODE) if name in _FUNCTIONS else None
        harmless = steps[0] in _PLAIN and name not in _FUNCTIONS
        if steps[0] == "models":
            harmless = name in _MODELS
        return None if harmless else (full, CODE)
    if module == "builtins":
        if cls == "function":
            return (config if isinstance(config, str) else full), CLASSES
        return None if cls in _BUILTIN else (full, CODE)
    return full, CODE if is_standard(Global(module, name)) else CLASSES
