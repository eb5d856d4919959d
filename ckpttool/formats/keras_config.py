"""Keras configurations: classes, layers, the graph of a model, and what loading would run."""

from __future__ import annotations

import builtins
import json
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core import text as documents
from ckpttool.core.code_references import CLASSES, CODE, CodeReference, Verdict, merge_references
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import FormatError, LimitError
from ckpttool.core.source import Shape
from ckpttool.core.tree import Role
from ckpttool.encodings.pickle_values import Global
from ckpttool.formats.tf_common import MAX_TEXT, class_name, plain_facts

if TYPE_CHECKING:
    from ckpttool.formats.hdf5 import Hdf5Index


_KERAS = frozenset(("keras", "tf_keras", "tensorflow"))
# Steps of a module's name that are the place of Keras, not the purpose of the module.
_PLACES = frozenset(("api", "keras", "python", "src", "_tf_keras", "_v1", "_v2", "__internal__"))
# Modules below keras that define classes; tf_keras imports the module of a class.
_HOMES = frozenset(
    (
        *("", "activations", "applications", "constraints", "distillation", "dtype_policies", "engine"),
        *("feature_column", "initializers", "layers", "legacy", "losses", "metrics", "mixed_precision"),
        *("models", "ops", "optimizers", "premade_models", "quantizers", "random", "regularizers"),
        *("trainers", "utils"),
    )
)
# Modules whose functions compute; keras.utils and others have functions with side effects.
_FUNCTION_HOMES = frozenset(
    ("activations", "initializers", "losses", "metrics", "ops", "quantizers", "random", "regularizers")
)
_BUILTIN = frozenset(("dict", "list", "set", "slice", "tuple", "frozenset", "float", "int", "str", "bool"))
# Classes of Keras that act, by their names alone: code (Lambda, TorchModuleWrapper: torch.load of its bytes),
# functions (Jax, Flax), a SavedModel of another folder, a file of words.
ACTING = frozenset(
    (
        *("Lambda", "__lambda__", "TFSMLayer", "PyFunc", "TorchModuleWrapper", "JaxLayer", "FlaxLayer"),
        "VocabularyFileCategoricalColumn",
    )
)
# Optimizers that tf_keras registers as if a user had: `Custom>Adam` (tf_keras/src/optimizers/adam.py).
_REGISTERED = "Custom>"
# What Keras writes for settings that a class does not return (keras/src/legacy/saving/serialization.py).
_UNDEFINED = "layer was saved without config"
# Lists of words that are in the file, or the path of another one.
_WORDS = ("vocabulary", "idf_weights")
# Settings that must have one of these values: others name code or files (tf_keras/src/layers/rnn/
# cell_wrappers.py, keras/layers/core.py of Keras 1, tensorflow/python/feature_column/feature_column_v2.py).
_REQUIRED: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "DropoutWrapper": {"dropout_fn": (None, "_default_dropout_state_filter_visitor")},
    "EmbeddingColumn": {"ckpt_to_load_from": (None,)},
    "Merge": {
        "mode_type": (None, "raw"),
        "output_shape_type": (None, "raw"),
        "output_mask_type": (None, "raw"),
    },
    "ResidualWrapper": {"residual_fn": (None,)},
}
# TensorFlow's modules that define the functions which users pass as activations.
_TF_FUNCTIONS = deferred.compile(
    r"tensorflow\.python\.ops\.(gen_)?(array|clip|math|nn|special_math)(_ops|_impl)"
)
_TF_TYPES = deferred.compile(r"tensorflow\.python\.(framework|ops\.ragged)\.\w+")
# HDF5 attributes that Keras reads as configurations (keras/src/legacy/saving/legacy_h5_format.py).
ATTRIBUTES = ("model_config", "training_config")


class ConfigAudit(NamedTuple):
    """What loading the configurations would run, and a sentence for each that could not be checked."""

    code_references: tuple[CodeReference, ...] = ()
    unjudged: tuple[str, ...] = ()


def audit_json(text: object, where: str) -> ConfigAudit:
    """Check the JSON text of a configuration, wherever Keras reads one.

    Text that is not JSON, not text or too large cannot be checked and is reported as such. What is in
    keras_names.json only computes; every other name is a finding. Both Keras 3 and tf_keras may read a file,
    so what either of them would do counts. Sources: keras/src/saving/serialization_lib.py
    (`deserialize_keras_object`, `_retrieve_class_or_fn`), keras/src/layers/core/lambda_layer.py,
    keras/src/export/tfsm_layer.py, keras/src/layers/preprocessing,
    tf_keras/src/saving/legacy/serialization.py.
    """
    if not isinstance(text, str | bytes):
        return ConfigAudit((), (f"{where} is not text, so it cannot be checked for code",))
    try:
        data = text.encode() if isinstance(text, str) else text
        return ConfigAudit(audit_document(documents.parse_json_value(data, where), where))
    except LimitError as error:
        return ConfigAudit((), (f"{error.message}, so it cannot be checked for code",))
    except (FormatError, UnicodeEncodeError):
        return ConfigAudit((), (f"{where} is not JSON, so it cannot be checked for code",))


def audit_attributes(index: Hdf5Index) -> ConfigAudit:
    """Check the configurations in the attributes of an HDF5 file, whatever else it contains."""
    return merge_audits(
        audit_json(group.attributes[name], f"{path}/{name}" if path else name)
        for path, group in index.groups.items()
        for name in ATTRIBUTES
        if name in group.attributes
    )


def merge_audits(audits: Iterable[ConfigAudit]) -> ConfigAudit:
    """Merge several records into one."""
    every = list(audits)
    unjudged = dict.fromkeys(name for one in every for name in one.unjudged)
    return ConfigAudit(merge_references(*(one.code_references for one in every)), tuple(unjudged))


def audit_document(document: Any, where: str) -> tuple[CodeReference, ...]:
    """Return what is not one of Keras's own classes in a configuration, at any depth."""
    return merge_references(_iter_findings(document, where))


def _iter_findings(document: Any, where: str) -> Iterator[CodeReference]:
    waiting = [document]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict):
            judged = _judge_object(value) if "class_name" in value else None
            if judged is not None:
                yield CodeReference(judged[0][:MAX_TEXT], judged[1], 1, None, where, "keras")
            waiting += reversed(list(value.values()))


class _Names(NamedTuple):
    """The names in keras_names.json; `tensorflow` are full names without `tf.`, `ops` their last parts."""

    classes: frozenset[str]
    optimizers: frozenset[str]
    lower_case: frozenset[str]  # optimizers, which tf_keras finds in any case
    values: frozenset[str]
    types: frozenset[str]
    functions: frozenset[str]
    tensorflow: frozenset[str]
    ops: frozenset[str]
    properties: frozenset[str]
    methods: frozenset[str]
    class_methods: frozenset[str]


@cache
def _read_names() -> _Names:
    """Return the names whose use only computes; read when the first object of a configuration is judged."""
    with open(os.path.join(os.path.dirname(__file__), "keras_names.json"), "rb") as file:
        table: dict[str, dict[str, list[str]]] = json.load(file)

    def names(part: str, *keys: str) -> frozenset[str]:
        rows = table[part]
        return frozenset(name for key in keys or rows for line in rows[key] for name in line.split())

    homes = table["tensorflow"]
    return _Names(
        names("classes"),
        names("classes", "optimizers"),
        frozenset(name.lower() for name in names("classes", "optimizers")),
        names("values", "serialized"),
        names("values", "type_specs"),
        names("functions"),
        frozenset(f"{home}.{name}".lstrip(".") for home in homes for name in names("tensorflow", home)),
        names("tensorflow"),
        names("attributes", "properties"),
        names("attributes", "methods"),
        names("attributes", "class_methods"),
    )


def _judge_object(value: Mapping[str, Any]) -> tuple[str, Verdict] | None:
    """Return the name and verdict of a serialized object; None for what only computes, and for values."""
    cls, config = value["class_name"], value.get("config")
    if not isinstance(cls, str):
        return "an object whose class_name is not text", CODE
    settings = config if isinstance(config, dict) else {}
    own = cls.rpartition(">")[2]
    why = _judge_settings(own, settings)
    if why is not None or own in ACTING:
        layer = settings.get("name")
        named = f"{cls} {layer!r}" if isinstance(layer, str) else cls
        return (f"{named} ({why})" if why else named), CODE
    if cls == "function":
        return _judge_function(value, config)
    if cls == "__typespec__":
        return _judge_type(value)
    reference = _judge_class(cls, value.get("module"), value.get("registered_name"))
    # A SavedModel has the functions of its objects: Keras does without a class that it does not find, and
    # creates nothing from a name without settings.
    optional = (
        value.get("must_restore_from_config") is False or _UNDEFINED in settings or "config" not in value
    )
    return None if reference == (cls, CLASSES) and optional and ">" not in cls else reference


def _judge_settings(cls: str, settings: Mapping[str, Any]) -> str | None:
    """Return what the settings of a class call or read, if it may act."""
    names = _read_names()
    for key in _WORDS:
        if key in settings and not _is_list_of_words(settings[key]):
            return f"reads {_short(settings[key])}"
    for key, values in _REQUIRED.get(cls, {}).items():
        if settings.get(key) not in values:
            return f"{key} {_short(settings[key])}"
    if cls in ("TFOpLambda", "SlicingOpLambda"):
        symbol = settings.get("function")
        return None if _is_in(symbol, names.tensorflow) else f"calls tf.{_short(symbol)}"
    if cls == "ClassMethod":
        owner, method = settings.get("cls_symbol"), settings.get("method_name")
        known = owner == "RaggedTensor" and _is_in(method, names.class_methods)
        return None if known else f"calls tf.{_short(owner)}.{_short(method)}"
    if cls in ("InstanceMethod", "InstanceProperty"):
        attribute = settings.get("attr_name")
        known = _is_in(attribute, names.methods if cls == "InstanceMethod" else names.properties)
        return None if known else f"takes the attribute {_short(attribute)}"
    if cls == "TensorFlowOpLayer":
        from ckpttool.formats.tf_operations import STATELESS_OPERATIONS

        node = settings.get("node_def")
        op = node.get("op") if isinstance(node, dict) else None
        return None if _is_in(op, STATELESS_OPERATIONS) else f"runs the operation {_short(op)}"
    return None


def _is_in(name: object, names: Container[str]) -> bool:
    return isinstance(name, str) and name in names


def _short(value: object) -> str:
    return str(value)[:MAX_TEXT]


def _is_list_of_words(value: object) -> bool:
    """Return whether words are in the file itself: none, a list, or what stands for a tuple or an array."""
    if isinstance(value, dict):
        inner = value.get("config")
        array_value = inner.get("value") if isinstance(inner, dict) else None
        kinds = {"__tuple__": value.get("items"), "__numpy__": array_value, "__tensor__": array_value}
        cls = value.get("class_name")
        value = kinds.get(cls, value) if isinstance(cls, str) else value
    return value is None or (
        isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)
    )


def _keras_home(module: object) -> str | None:
    """Return the first module below keras on the way to this one, None outside Keras."""
    if not isinstance(module, str):
        return None
    top, *rest = module.split(".")
    if top not in _KERAS or (top == "tensorflow" and "keras" not in rest[:2]):
        return None
    return next((step for step in rest if step not in _PLACES), "")


def _judge_class(cls: str, module: object, registered: object) -> tuple[str, Verdict] | None:
    names = _read_names()
    if cls in names.values and module is None and registered in (None, cls):
        return None
    user = registered if isinstance(registered, str) and ">" in registered else cls
    # A class that is registered under a package is looked up among those of the running program.
    own = user.removeprefix(_REGISTERED) in names.optimizers
    if module is None or module == "":
        if ">" in user:
            return None if own else (user, CLASSES)
        if cls in names.classes or cls.lower() in names.lower_case:
            return None if registered in (None, cls) else (_short(registered), CLASSES)
        return cls, _judge_case(cls)
    home = _keras_home(module)
    full = f"{_short(module)}.{cls}"
    if home is None:
        if module == "builtins":
            return None if cls in _BUILTIN else (full, CODE)
        return full, _judge_module(module, cls)
    if home not in _HOMES or cls not in names.classes:
        return full, CODE
    if registered is None or _is_in(registered, names.classes) or own:
        return None
    return (_short(registered), CLASSES) if ">" in user else (f"{_short(module)}.{_short(registered)}", CODE)


def _judge_case(name: str) -> Verdict:
    """Return the verdict on an unknown name in place of a class: a function has a lower-case one."""
    return CLASSES if name.rpartition(".")[2].lstrip("_")[:1].isupper() else CODE


def _judge_module(module: object, name: str) -> Verdict:
    """Return the verdict on an unknown class of a module outside Keras."""
    # Not a top-level import: most files with a configuration have no foreign name.
    from ckpttool.encodings.pickle_audit import is_stdlib_name

    if not isinstance(module, str) or module.split(".")[0] in _KERAS or is_stdlib_name(Global(module, name)):
        return CODE
    return _judge_case(name)


def _judge_function(value: Mapping[str, Any], name: object) -> tuple[str, Verdict] | None:
    """Judge a function by its name and module: a call of anything unknown may do anything."""
    names, module, registered = _read_names(), value.get("module"), value.get("registered_name")
    full = f"{_short(module)}.{_short(name)}" if module else _short(name)
    if not isinstance(name, str):
        return full, CODE
    same = registered in (None, "function", name) or (
        isinstance(registered, str) and registered.rpartition(">")[2] == name
    )
    if module in (None, "", "builtins"):
        if name in names.functions and same:
            return None
        acts = name.rpartition(">")[2] in ACTING or hasattr(builtins, name)
        return (full, CODE) if acts else (name, CLASSES)
    if module == "__main__":
        return full, CLASSES
    home = _keras_home(module)
    if home is None:
        known = _TF_FUNCTIONS.fullmatch(str(module)) and name.removesuffix("_v2") in names.ops
        return None if known and same else (full, CODE)
    if home in _FUNCTION_HOMES and name in names.functions:
        return None if same or _is_in(registered, names.functions) else (_short(registered), CODE)
    return full, CODE


def _judge_type(value: Mapping[str, Any]) -> tuple[str, Verdict] | None:
    """Judge a description of tensors: TensorFlow's own are made of shapes and dtypes."""
    module, name, registered = value.get("module"), value.get("spec_name"), value.get("registered_name")
    own = isinstance(module, str) and _TF_TYPES.fullmatch(module) is not None
    if own and _is_in(name, _read_names().types) and registered in (None, name):
        return None
    if isinstance(registered, str) and ">" in registered:
        return registered, CLASSES
    return f"{_short(module)}.{_short(name)}", _judge_module(module, _short(name))


UNNAMED = ""
SPECTRAL = "SpectralNormalization"


class KerasVariable(NamedTuple):
    """A variable's name, its role, and the setting that the layer needs to have it."""

    name: str
    role: Role = "parameter"
    flag: str | None = None


_KERNEL, _BIAS = KerasVariable("kernel"), KerasVariable("bias", flag="use_bias")
_GAMMA, _BETA = KerasVariable("gamma", flag="scale"), KerasVariable("beta", flag="center")
_LINEAR = (_KERNEL, _BIAS)
_CELL = (_KERNEL, KerasVariable("recurrent_kernel"), _BIAS)
_MOVING = (KerasVariable("moving_mean", "buffer"), KerasVariable("moving_variance", "buffer"))
_CONVOLUTIONS = ("Conv1D", "Conv2D", "Conv3D", "Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
_DEPTHWISE = KerasVariable("depthwise_kernel")
_SEPARABLE = (_DEPTHWISE, KerasVariable("pointwise_kernel"), _BIAS)

VARIABLES: dict[str, tuple[KerasVariable, ...]] = {
    **dict.fromkeys(("Dense", "EinsumDense", *_CONVOLUTIONS), _LINEAR),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _LINEAR),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _SEPARABLE),
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTMCell"), _CELL),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), (_GAMMA, _BETA)),
    "BatchNormalization": (_GAMMA, _BETA, *_MOVING),
    "RMSNormalization": (KerasVariable("scale"),),
    "Embedding": (KerasVariable("embeddings"),),
    "PReLU": (KerasVariable("alpha"),),
    "AdditiveAttention": (KerasVariable("scale", flag="use_scale"),),
    "Attention": (
        KerasVariable("scale", flag="use_scale"),
        KerasVariable("concat_score_weight", flag="concat"),
    ),
    "Normalization": (
        KerasVariable("mean", "buffer"),
        KerasVariable("variance", "buffer"),
        KerasVariable("count", "buffer"),
    ),
    "SeedGenerator": (KerasVariable("state", "other"),),
    # The kernel of its layer, which that layer stores too, and a vector that is not trained
    # (keras/src/layers/normalization/spectral_normalization.py).
    SPECTRAL: (KerasVariable(UNNAMED, "buffer"), KerasVariable("vector_u", "buffer")),
}
# Variables that a quantized layer stores after them: int8, int4, float8 (variable_serialization_spec of
# keras/src/layers/core/dense.py, einsum_dense.py and embedding.py).
_SCALES = ("scale", "amax_history")
_FLOAT8 = tuple(f"{part}_{scale}" for part in ("inputs", "kernel", "outputs_grad") for scale in _SCALES)
_LINEAR_SCALES = (("kernel_scale",), ("kernel_scale", "kernel_zero", "g_idx"), _FLOAT8)
_QUANTIZED: dict[str, tuple[tuple[str, ...], ...]] = {
    "Dense": _LINEAR_SCALES,
    "EinsumDense": _LINEAR_SCALES,
    "Embedding": (("embeddings_scale",), ("embeddings_scale", "embeddings_zero", "g_idx")),
}
# A recurrent layer keeps its variables in its cell, an attention layer in its own dense layers.
CELLS = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell"}
CELLS |= dict.fromkeys(("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"), "ConvLSTMCell")
ATTENTION = frozenset(("MultiHeadAttention", "GroupedQueryAttention", "GroupQueryAttention"))
# The order in which such a layer creates its parts, i.e. the order of its trainable variables.
PARTS = {
    "query_dense": 0,
    "key_dense": 1,
    "value_dense": 2,
    "output_dense": 3,
    "forward_layer": 0,
    "backward_layer": 1,
}
_OTHER_CLASSES = (
    *("InputLayer", "Dropout", "Activation", "ReLU", "LeakyReLU", "ELU", "Softmax", "Flatten", "Reshape"),
    *("Concatenate", "Add", "Multiply", "Average", "Subtract", "Dot", "Lambda", "Sequential", "Functional"),
    *("Bidirectional", "TimeDistributed", "RNN", "StackedRNNCells", "Permute", "RepeatVector", "Masking"),
    *("MaxPooling1D", "MaxPooling2D", "AveragePooling2D", "GlobalAveragePooling1D", "GlobalAveragePooling2D"),
    *("GlobalMaxPooling1D", "GlobalMaxPooling2D", "ZeroPadding2D", "UpSampling2D", "GaussianNoise"),
    *("Rescaling", "UnitNormalization", "SpatialDropout1D", "SpatialDropout2D", "Identity"),
)


def snake_case(name: str) -> str:
    """Return a class name as Keras writes it in paths (keras/src/utils/naming.py, to_snake_case)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


_KNOWN = {snake_case(name): name for name in (*VARIABLES, *CELLS, *sorted(ATTENTION), *_OTHER_CLASSES)}
_NUMBERED = deferred.compile(r"(.+?)(?:_(\d+))?", re.DOTALL)


def split_number(name: str) -> tuple[str, int]:
    """Split off the number that Keras appends to a name: `dense_2` gives dense and 2."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return name, 0
    return match[1], int(match[2][:9]) if match[2] else 0


def class_from_name(name: str) -> str | None:
    """Return the Keras class that a group or layer is named after (`dense_2`: Dense), else None."""
    return _KNOWN.get(split_number(name)[0])


def layer_variables(
    cls: str | None, config: Mapping[str, Any], shapes: Sequence[Shape]
) -> tuple[KerasVariable, ...] | None:
    """Return a layer's stored variables in order; None if class and settings do not determine them.

    Without settings, the count must be unambiguous. A batch normalisation with three variables lacks gamma or
    beta, and the file does not record which: that one is UNNAMED. A layer saves its trainable variables in
    creation order, then the others, as `vars/0`, `vars/1` ... (keras/src/layers/layer.py,
    save_own_variables). The names are those assigned by the classes in `build`
    (keras/src/layers/core/dense.py, normalization/*.py, rnn/*.py, convolutional/*.py ...).
    """
    if cls is None:
        return variables_by_shape(shapes)
    row = VARIABLES.get(cls)
    if row is None:
        return None
    variables = _stored_variables(cls, row, config, shapes)
    for names in _QUANTIZED.get(cls, ()) if variables is None else ():
        rest = _stored_variables(cls, row, config, shapes[: -len(names)])
        if rest:
            return (*rest, *(KerasVariable(name, "buffer") for name in names))
    return variables


def _stored_variables(
    cls: str, row: tuple[KerasVariable, ...], config: Mapping[str, Any], shapes: Sequence[Shape]
) -> tuple[KerasVariable, ...] | None:
    if cls == "LayerNormalization" and config.get("rms_scaling"):
        row = (_GAMMA,)
    if cls == "Attention" and "score_mode" in config:
        config = {**config, "concat": config["score_mode"] == "concat"}
    flags = [v.flag for v in row if v.flag is not None]
    if all(isinstance(config.get(flag), bool) for flag in flags):
        variables = tuple(v for v in row if v.flag is None or config[v.flag])
        return variables if len(variables) == len(shapes) else None
    answers = [
        tuple(v for v in row if v.flag not in absent)
        for count in range(len(flags) + 1)
        for absent in combinations(flags, count)
        if len(row) - count == len(shapes)
    ]
    if cls == "BatchNormalization" and len(shapes) == len(row) - 1:
        return (KerasVariable(UNNAMED), *_MOVING)
    return answers[0] if len(answers) == 1 else None


def variables_by_shape(shapes: Sequence[Shape]) -> tuple[KerasVariable, ...] | None:
    """Return the variables of a layer of unknown class if their shapes fit only one kind of layer."""
    ranks = [len(shape) for shape in shapes]
    # An EinsumDense with several output axes has a bias with all of them.
    if len(shapes) == 2 and ranks[0] > ranks[1] >= 1 and shapes[0][-ranks[1] :] == shapes[1]:
        return _LINEAR
    if ranks == [1, 1, 1, 1] and len(set(shapes)) == 1:
        return VARIABLES["BatchNormalization"]
    if len(shapes) == 3 and ranks[:2] == [2, 2] and shapes[0][1] == shapes[1][1] == shapes[2][-1]:
        return _CELL if shapes[1][1] % shapes[1][0] == 0 else None
    return None


_NOTES = 64


class KerasConfig(NamedTuple):
    """The class and settings of one object; empty for an unknown object.

    `foreign` marks a class that is not Keras's own (see has_foreign_class). Sources:
    keras/src/saving/serialization_lib.py (Keras 3: `module`, `class_name`, `config`),
    keras/src/legacy/saving/serialization.py (Keras 1 and 2: `class_name`, `config`; a Keras 1 Sequential's
    config is a list).
    """

    cls: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})
    foreign: bool = False

    @property
    def name(self) -> str | None:
        """The layer name chosen by the user."""
        stored_name = self.settings.get("name")
        return stored_name if isinstance(stored_name, str) else None

    @property
    def trainable(self) -> bool | None:
        """Whether the layer is trainable; None if not recorded."""
        flag = self.settings.get("trainable")
        return flag if isinstance(flag, bool) else None

    def layers(self) -> list[KerasConfig]:
        """Return the layers of a Sequential or functional model in order."""
        layers = self.settings.get("layers")
        return [config_of(layer) for layer in layers] if isinstance(layers, list) else []

    def facts(self) -> dict[str, Any]:
        """Return the plain values (see keras_facts)."""
        return plain_facts(self.settings)


NOTHING = KerasConfig()


def parse_config(data: bytes | str | None, what: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the JSON object; if there is none, an empty one and a note, as weights do not need it.

    Raise LimitError if it exceeds a reader's limits: that is not damage.
    """
    if data is None:
        return {}, ()
    try:
        return documents.parse_json(data.encode() if isinstance(data, str) else data, what), ()
    except LimitError:
        raise
    except FormatError as error:
        return {}, (f"{error.message}; layer information is not available",)


def config_of(value: Any) -> KerasConfig:
    """Return class and settings of a serialized object; empty for anything else."""
    if not isinstance(value, dict):
        return NOTHING
    cls, settings = value.get("class_name"), value.get("config")
    if isinstance(settings, list):  # a Keras 1 or early Keras 2 Sequential
        settings = {"layers": settings}
    if not isinstance(cls, str) or not isinstance(settings, dict):
        return NOTHING
    return KerasConfig(class_name(cls[:MAX_TEXT]), settings, has_foreign_class(value))


def note_lambdas(root: KerasConfig) -> tuple[str, ...]:
    """Return a note for each Lambda layer; its code is treated as data."""
    notes: list[str] = []
    stack = [root]
    while stack and len(notes) < _NOTES:
        config = stack.pop()
        if config.cls == "Lambda":
            notes.append(f"layer {config.name or '?'} is a Lambda layer: its code is not run")
        stack += reversed(config.layers())
        stack += [child for key in ("layer", "cell") if (child := config_of(config.settings.get(key))).cls]
    return tuple(notes)


def child_config(config: KerasConfig, edge: str) -> KerasConfig:
    """Return a layer's configuration of the part under an attribute."""
    cls = config.cls
    if cls in CELLS and edge == "cell":
        return KerasConfig(CELLS[cls], {k: v for k, v in config.settings.items() if k != "name"})
    if cls in ATTENTION and edge.endswith("_dense"):
        return KerasConfig("EinsumDense", {"use_bias": config.settings.get("use_bias")})
    if edge in ("cell", "layer", "backward_layer"):
        child = config_of(config.settings.get(edge))
        if child.cls is None and edge == "backward_layer":
            return KerasConfig(config_of(config.settings.get("layer")).cls, {})
        return child
    return config_of(config.settings.get("layer")) if edge == "forward_layer" else NOTHING


MODELS = frozenset(("Sequential", "Functional", "Model"))
# Packages of those class names; a custom class may have the same name.
_KERAS_MODULES = ("keras", "tf_keras", "tensorflow.keras", "tensorflow.python.keras")


def is_described(document: Mapping[str, Any]) -> bool:
    """Return whether a Keras model has Keras's own class: its configuration lists the computation."""
    config = config_of(dict(document))
    return (
        config.cls in MODELS
        and isinstance(config.settings.get("layers"), list)
        and not has_foreign_class(document)
    )


def has_foreign_class(layer: Mapping[str, Any]) -> bool:
    """Return whether a layer's or a model's class is custom, whatever its name."""
    module, registered = layer.get("module"), layer.get("registered_name")
    own = isinstance(module, str) and not module.startswith(_KERAS_MODULES)
    # A class of a script or notebook has no module, only its name (Keras 3); Keras's classes have both.
    own = own or ("module" in layer and module is None and isinstance(registered, str))
    return own or ">" in str(layer.get("class_name")) or (isinstance(registered, str) and ">" in registered)


def stored_names(layers: Sequence[KerasConfig]) -> dict[str, KerasConfig]:
    """Return the layers by their storage group: class in snake case, numbered from the second.

    Source: keras/src/saving/saving_lib.py, _save_container_state.
    """
    counts: dict[str, int] = {}
    configs: dict[str, KerasConfig] = {}
    for layer in layers:
        if layer.cls is None:
            continue
        stem = snake_case(layer.cls)
        number = counts.get(stem, 0)
        counts[stem] = number + 1
        configs[f"{stem}_{number}" if number else stem] = layer
    return configs


_MOST_LAYERS = 20_000


def list_references(value: Any) -> list[tuple[str, int, int]]:
    """Return a node's input tensors: layer, node, place (Keras 2: lists, 3: histories).

    Source: keras/src/models/functional.py.
    """
    references: list[tuple[str, int, int]] = []
    stack = [value]
    while stack and len(references) < _MOST_LAYERS:
        item = stack.pop()
        if isinstance(item, dict):
            history = item.get("keras_history")
            item = history if isinstance(history, list) else list(item.values())
        if not isinstance(item, list):
            continue
        if len(item) > 2 and isinstance(item[0], str) and type(item[1]) is int and type(item[2]) is int:
            references.append((item[0], item[1], item[2]))
        else:
            stack += reversed(item)
    return references
