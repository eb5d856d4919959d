"""What ckpttool and the reference readers read in a file, in one form: contents by name.

Contents are `dtype[shape]sha256` for a tensor, the repr of a plain value, OPAQUE for what is listed without
its value, and UNREADABLE with the error for what a reader lists and refuses to read. A reference reader's
own errors are those that its documentation names or that its code raises on purpose.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import resource
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

OURS = "ckpttool"
OPAQUE = "?"
UNREADABLE = "!"
Form = dict[str, str]
Read = Callable[[str], Form]
Answer = tuple[str, str, Form]
# For one file: seconds of the processor, seconds by the clock, bytes beyond those that the process has.
SECONDS, WALL, MEMORY = 5, 120, 1 << 30
# Seconds of the processor for a small HDF5 file, which takes milliseconds: on one damaged file of a hundred
# the library runs to the limit, two or three times.
HDF5_SECONDS = 1
_HDF5 = (".h5", ".keras")
_DEEP, _MANY = 200, 20_000


class Refused(Exception):  # noqa: N818  # the reader's answer, not a fault
    """A reader raised its own error about the file."""


def tensor(dtype: str, shape: Sequence[int], data: bytes | memoryview) -> str:
    """Return the contents of a tensor as text."""
    return f"{dtype}{list(shape)}{hashlib.sha256(data).hexdigest()[:24]}"


def our_form(path: str) -> Form:
    """Return what ckpttool reads, by the names that the format itself uses."""
    from ckpttool.core import CkpttoolError
    from ckpttool.core.digests import digest_checkpoint
    from ckpttool.formats import open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
        digest_checkpoint(checkpoint)
        return _our_form_of(checkpoint) | (_saved_graph(path) if checkpoint.format == "saved_model" else {})
    except CkpttoolError as error:
        raise Refused(f"{error.message}: {error.found or ''}") from error


# Formats whose tensors have names of their own; those of the others are paths in nested containers.
_NAMED = ("tensor_bundle", "tensorflow_v1", "saved_model", "keras_h5", "keras_zip", "safetensors", "npz")


# A dataset that a note names, and that is not read.
_NOTED = re.compile(r"dataset (.+) holds [\d,]+ (?:strings|bytes of text), which are not listed")


def _our_form_of(saved: Any) -> Form:
    from ckpttool.core import Leaf

    named = saved.format in _NAMED
    form = {}
    shared = ((alias.path, saved.tree[of]) for of, names in saved.tree.aliases.items() for alias in names)
    for path, leaf in [*saved.tree.items(), *(() if named else shared)]:
        name = _spelt(path)
        if named:
            name = leaf.key if isinstance(leaf, Leaf) else "/".join(str(step.value) for step in path)
        if isinstance(leaf, Leaf):
            form[name] = tensor(leaf.dtype, leaf.shape, bytes(leaf.read()))
        else:
            form[name] = _plain(leaf.value)
    for note in saved.notes:
        if (named_only := _NOTED.fullmatch(note)) is not None:
            form[named_only[1]] = OPAQUE
    return form


def _saved_graph(path: str) -> Form:
    """Return what ckpttool reads in a SavedModel's graph: signatures, nodes, objects and variables."""
    from ckpttool.formats import tf_saved_model_messages as messages

    meter, form = messages.FieldMeter(), Form()
    data = memoryview(Path(path, "saved_model.pb").read_bytes())
    for number, meta in enumerate(messages.parse_saved_model(data, meter)):
        at = f"graph {number}"
        form[at] = repr((list(meta.tags), meta.version))
        for name, signature in meta.signatures.items():
            form[f"{at}/signature {name}"] = repr(signature.method)
            for side, tensors in (("input", signature.inputs), ("output", signature.outputs)):
                for title, tensor in tensors.items():
                    names = [_text(word) for word in tensor.names]
                    form[f"{at}/signature {name}/{side} {title}"] = repr((names, tensor.dtype, tensor.shape))
        if meta.nodes is not None:
            graph = messages.parse_graph_def(meta.nodes, meter)
            for name, node in graph.nodes.items():
                form[f"{at}/node {_text(name)}"] = repr((_text(node.op), list(map(_text, node.inputs))))
            form[f"{at}/sizes"] = repr((graph.count, graph.functions))
        if meta.objects is not None:
            form |= _saved_objects(messages.parse_object_graph(meta.objects, meter), at)
    return form


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _saved_objects(graph: Any, at: str) -> Form:
    form = {f"{at}/object {number}": repr(children) for number, children in enumerate(graph.children)}
    for number, variable in graph.variables.items():
        form[f"{at}/object {number}/variable"] = repr(tuple(variable))
    for number, user in graph.users.items():
        form[f"{at}/object {number}/user"] = repr(tuple(user))
    for number, functions in graph.functions.items():
        form[f"{at}/object {number}/functions"] = repr(functions)
    for name, captured in graph.captures.items():
        form[f"{at}/captures {name}"] = repr(captured)
    return form | {f"{at}/slots": repr(dict(sorted(graph.slots.items())))}


def _spelt(path: Sequence[Any]) -> str:
    return "".join(
        f"[{step.value!r}]"
        if step.kind == "key"
        else f"#{step.value}"
        if step.kind == "index"
        else f".{step.value}"
        for step in path
    )


def _plain(value: Any) -> str:
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return repr(value)
    return OPAQUE


def _array(value: Any) -> str:
    """Return the contents of a NumPy array; other than numbers and texts are opaque."""
    import numpy as np

    if value.dtype == object:
        texts = [item.encode() if isinstance(item, str) else item for item in value.ravel().tolist()]
        if not all(isinstance(text, bytes) for text in texts):
            return OPAQUE
        data = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
        return tensor("string", value.shape, data)
    if value.dtype.kind == "U" and not value.shape:
        return repr(str(value))
    if value.dtype.kind not in "biufcV" or value.dtype.names or value.dtype.subdtype:
        return OPAQUE
    if value.dtype.kind == "V" and type(value.dtype).__module__ != "numpy.dtypes":
        name = value.dtype.name
    elif value.dtype.kind == "V":
        return OPAQUE
    else:
        name = value.dtype.name
        value = value.astype(value.dtype.newbyteorder("<"), copy=False)
    return tensor(name, value.shape, np.ascontiguousarray(value).tobytes())


def _walked(value: Any, name: str = "", depth: int = 0, form: Form | None = None) -> Form:
    """Return all tensors and plain values in nested containers."""
    import numpy as np

    form = {} if form is None else form
    if depth > _DEEP or len(form) > _MANY:
        raise RecursionError("the value is too deep, or has too many parts")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        form.update(_torch_tensors(torch, name, value))
    elif isinstance(value, np.ndarray | np.generic):
        form[name] = _array(np.asarray(value))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            plain = key is None or type(key) in (bool, int, float, str)
            _walked(item, f"{name}[{key if plain else repr(key)!r}]", depth + 1, form)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _walked(item, f"{name}#{number}", depth + 1, form)
    else:
        form[name] = _plain(value)
    return form


def _torch_tensors(torch: Any, name: str, value: Any) -> Form:
    """Return a tensor; of one quantised with one scale the parts, as ckpttool lists them."""
    if not value.is_quantized or value.qscheme() != torch.per_tensor_affine:
        return {name: _torch_tensor(torch, value)}
    return {
        f"{name}.int_repr": _torch_tensor(torch, value),
        f"{name}.scale": repr(value.q_scale()),
        f"{name}.zero_point": repr(value.q_zero_point()),
    }


def _torch_tensor(torch: Any, value: Any) -> str:
    if value.layout != torch.strided or value.device.type != "cpu":
        return OPAQUE
    name = str(value.dtype).removeprefix("torch.")
    if value.is_quantized:
        value = value.int_repr()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    data = value.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tensor(name, value.shape, data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")


# The reference readers. Each function imports its library and returns the reader.


def _torch() -> Read:
    import pickle

    import torch

    def read(path: str) -> Form:
        try:
            return _walked(torch.load(path, map_location="cpu", weights_only=True))
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise Refused(str(error)) from error

    return read


def _torch_tar() -> Read:
    """Return torch's reader of tar archives, which takes no weights_only; classes are restricted instead."""
    import pickle
    import tarfile
    import types

    import torch

    plain = types.SimpleNamespace(
        __name__="restricted",
        Unpickler=_restricted(pickle.Unpickler, {"torch": None, "torch.storage": None, "torch._utils": None}),
        load=lambda stream, **options: plain.Unpickler(stream, **options).load(),
        **{name: getattr(pickle, name) for name in ("UnpicklingError", "PickleError")},
    )

    def read(path: str) -> Form:
        warnings.simplefilter("ignore")
        try:
            return _walked(torch.load(path, map_location="cpu", weights_only=False, pickle_module=plain))
        except (pickle.UnpicklingError, RuntimeError, tarfile.TarError) as error:
            raise Refused(str(error)) from error

    return read


_SAFE: Mapping[str, frozenset[str] | None] = {
    "collections": frozenset(("OrderedDict", "defaultdict", "deque")),
    "builtins": frozenset(
        ("complex", "bytearray", "set", "frozenset", "list", "dict", "tuple", "int", "float")
    ),
    "_codecs": frozenset(("encode",)),
    "numpy": frozenset(("ndarray", "dtype", "float32", "float64", "int64")),
    **{
        f"numpy.{core}.{part}": frozenset(("_reconstruct", "scalar", "_frombuffer"))
        for core in ("core", "_core")
        for part in ("multiarray", "numeric")
    },
}


def _restricted(base: Any, more: Mapping[str, frozenset[str] | None] | None = None) -> Any:
    """Return an unpickler that imports nothing but containers, NumPy's arrays and what `more` names."""
    import pickle

    allowed = {**_SAFE, **(more or {})}

    class Restricted(base):  # type: ignore[misc]
        def find_class(self, module: str, name: str) -> Any:
            names = allowed.get(module, frozenset())
            storages = names is None and (
                name.endswith("Storage") or name.startswith("_rebuild") or name == "Size"
            )
            if not storages and (names is None or name not in names):
                raise pickle.UnpicklingError(f"class outside the allow list: {module}.{name}")
            return super().find_class(module, name)

    return Restricted


def _pickle() -> Read:
    import pickle

    reader = _restricted(pickle.Unpickler)

    def read(path: str) -> Form:
        try:
            with open(path, "rb") as stream:
                return _walked(reader(stream).load())
        except (pickle.UnpicklingError, EOFError) as error:
            raise Refused(str(error)) from error

    return read


def _torch_dcp() -> Read:
    import pickle

    import torch
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    class Metadata(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            known = module.startswith(("torch.distributed.checkpoint.", "torch.serialization"))
            if (
                known
                or module in ("collections", "torch", "pathlib")
                or name in ("getattr", "Storage", "dtype")
            ):
                return super().find_class(module, name)
            raise pickle.UnpicklingError(f"class outside the allow list: {module}.{name}")

    # The metadata is a pickle, and torch's reader would run what it names.
    filesystem.pickle = type(sys)("restricted")  # type: ignore[attr-defined]
    filesystem.pickle.load = lambda stream: Metadata(stream).load()  # type: ignore[attr-defined]

    def read(path: str) -> Form:
        warnings.simplefilter("ignore")
        state: dict[str, Any] = {}
        try:
            reader = filesystem.FileSystemReader(path)
            _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        except (
            pickle.UnpicklingError,
            RuntimeError,
            torch.distributed.checkpoint.CheckpointException,
        ) as error:
            raise Refused(str(error)) from error
        return _walked(state)

    return read


def _sb3() -> Read:
    """Return a reader of an agent's parameters as SB3 reads them: zipfile, then torch.load."""
    import pickle
    import zipfile

    import torch

    def read(path: str) -> Form:
        form: Form = {}
        try:
            with zipfile.ZipFile(path) as opened:
                for name in opened.namelist():
                    if name.endswith(".pth") and not name.startswith("pytorch_variables"):
                        data = io.BytesIO(opened.read(name))
                        _walked(torch.load(data, "cpu", weights_only=True), f"[{name[:-4]!r}]", 0, form)
        except (pickle.UnpicklingError, RuntimeError, zipfile.BadZipFile) as error:
            raise Refused(str(error)) from error
        return form

    return read


def _tensorflow() -> Read:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    import tensorflow as tf

    def contents(reader: Any, name: str, dtype: Any) -> str:
        import numpy as np

        value = reader.get_tensor(name)
        if isinstance(value, bytes | str):
            value = np.array(value.encode() if isinstance(value, str) else value, object)
        value = np.asarray(value)
        if value.dtype == object:
            return _array(value)
        return tensor(dtype.name, value.shape, np.ascontiguousarray(value).tobytes())

    def read(path: str) -> Form:
        try:
            reader = tf.train.load_checkpoint(path)
            types = reader.get_variable_to_dtype_map()
            names = sorted(reader.get_variable_to_shape_map())
            return {name: contents(reader, name, types[name]) for name in names if name != GRAPH}
        except tf.errors.OpError as error:
            raise Refused(str(error)) from error

    return read


# Not a tensor of ckpttool's tree.
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def _safetensors() -> Read:
    from safetensors import SafetensorError, safe_open

    def read(path: str) -> Form:
        import numpy as np
        import torch  # NumPy alone has no bfloat16

        try:
            with safe_open(path, "pt") as file:
                return {name: _torch_tensor(torch, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise Refused(str(error)) from error
        finally:
            del np

    return read


def _numpy() -> Read:
    import zipfile
    import zlib

    import numpy as np

    errors = (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error)

    def member(file: Any, name: str) -> str:
        # One array that cannot be read does not keep the others from being read.
        try:
            value = file[name]
        except (*errors, MemoryError) as error:
            return f"{UNREADABLE}{error}"
        return _array(value) if isinstance(value, np.ndarray) else OPAQUE

    def read(path: str) -> Form:
        try:
            file = np.load(path, allow_pickle=False)
            if isinstance(file, np.ndarray):
                return {"arr_0": _array(file)}
            with file:
                return {name: member(file, name) for name in sorted(file.files)}
        except errors as error:
            raise Refused(str(error)) from error

    return read


def _datasets(file: Any) -> Form:
    """Return every dataset by its first name, the members of a group before what lies in its groups.

    A second name is an alias, whatever the number of names is that the object records.
    """
    import h5py

    form: Form = {}
    root = h5py.h5g.open(file.id, b"/")
    observed = {h5py.h5o.get_info(root).addr}
    groups = [("", root)]
    while groups:
        path, group = groups.pop()
        links: list[tuple[bytes, Any]] = []
        below = []
        tracked = group.get_create_plist().get_link_creation_order() & h5py.h5p.CRT_ORDER_TRACKED
        order = h5py.h5.INDEX_CRT_ORDER if tracked else h5py.h5.INDEX_NAME
        group.links.iterate(lambda *link, to=links: to.append(link), idx_type=order, info=True)
        for raw, info in links:
            if info.type != h5py.h5l.TYPE_HARD:
                continue
            item = h5py.h5o.open(group, raw)
            address = h5py.h5o.get_info(item).addr
            if address in observed:
                continue
            observed.add(address)
            name = path + raw.decode("utf-8", "backslashreplace")
            if isinstance(item, h5py.h5g.GroupID):
                below.append((f"{name}/", item))
            elif isinstance(item, h5py.h5d.DatasetID):
                value = h5py.Dataset(item)[()]
                form[name] = OPAQUE if isinstance(value, h5py.Empty) else _array(_numbers(value))
        groups += reversed(below)
    return form


def _numbers(value: Any) -> Any:
    import numpy as np

    array = np.array(value, object) if isinstance(value, bytes | str) else np.asarray(value)
    return array.astype(object) if array.dtype.kind == "S" else array


def _h5py() -> Read:
    import h5py

    def read(path: str) -> Form:
        try:
            with h5py.File(path, "r") as file:
                return _datasets(file)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise Refused(str(error)) from error

    return read


def _keras_zip() -> Read:
    """Return a reader of the weights in a .keras file by the libraries that Keras uses: zipfile and h5py."""
    import zipfile
    import zlib

    import h5py

    def read(path: str) -> Form:
        try:
            with zipfile.ZipFile(path) as opened:
                data = io.BytesIO(opened.read("model.weights.h5"))
                opened.read("config.json")
            with h5py.File(data, "r") as file:
                return _datasets(file)
        except (OSError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
            raise Refused(str(error)) from error

    return read


def _saved_model() -> Read:
    """Return a reader of a SavedModel's variables and graph by TensorFlow's own messages."""
    variables = _tensorflow()
    from google.protobuf.message import DecodeError
    from tensorflow.core.protobuf import saved_model_pb2  # type: ignore[import-untyped]

    def read(path: str) -> Form:
        message = saved_model_pb2.SavedModel()
        try:
            message.ParseFromString(Path(path, "saved_model.pb").read_bytes())
        except DecodeError as error:
            raise Refused(str(error)) from error
        form = variables(os.path.join(path, "variables", "variables"))
        for number, meta in enumerate(message.meta_graphs):
            form |= _meta_graph(meta, f"graph {number}")
        return form

    return read


def _require_entries(message: Any, *maps: int) -> None:
    """Raise for an entry of a map that has a field besides: this library drops it, that of C++ reads it."""
    from google.protobuf.unknown_fields import UnknownFieldSet

    if any(unknown.field_number in maps for unknown in UnknownFieldSet(message)):
        raise Refused("an entry of a map has an unknown field")


def _meta_graph(meta: Any, at: str) -> Form:
    _require_entries(meta, 5)
    form = {at: repr((list(meta.meta_info_def.tags), meta.meta_info_def.tensorflow_version))}
    for name, signature in meta.signature_def.items():
        if name in ("__saved_model_init_op", "__saved_model_train_op"):  # not for callers
            continue
        _require_entries(signature, 1, 2)
        form[f"{at}/signature {name}"] = repr(signature.method_name)
        for side, tensors in (("input", signature.inputs), ("output", signature.outputs)):
            for title, tensor in tensors.items():
                names: list[str] = []
                kind = tensor.WhichOneof("encoding")
                if kind == "name":
                    names = [tensor.name]
                elif kind == "coo_sparse":
                    coo = tensor.coo_sparse
                    stored = (coo.values_tensor_name, coo.indices_tensor_name, coo.dense_shape_tensor_name)
                    names = [word for word in stored if word]
                elif kind == "composite_tensor":
                    names = [part.name for part in tensor.composite_tensor.components if part.name]
                content = (names, _type_name(tensor.dtype), _partial_shape(tensor.tensor_shape))
                form[f"{at}/signature {name}/{side} {title}"] = repr(content)
    if meta.HasField("graph_def"):
        for node in meta.graph_def.node:
            form[f"{at}/node {node.name}"] = repr((node.op, list(node.input)))
        form[f"{at}/sizes"] = repr((len(meta.graph_def.node), len(meta.graph_def.library.function)))
    if meta.HasField("object_graph_def"):
        form |= _object_graph(meta.object_graph_def, at)
    return form


def _object_graph(graph: Any, at: str) -> Form:
    _require_entries(graph, 2)
    form, slots = Form(), {}
    for number, item in enumerate(graph.nodes):
        children: dict[str, int] = {}
        for child in item.children:
            children.setdefault(child.local_name, child.node_id)
        form[f"{at}/object {number}"] = repr(children)
        for slot in item.slot_variables:
            slots[number, slot.original_variable_node_id, slot.slot_name] = slot.slot_variable_node_id
        kind = item.WhichOneof("kind")
        if kind == "variable":
            variable = item.variable
            shape = _partial_shape(variable.shape)
            content = (variable.name, _type_name(variable.dtype), shape, variable.trainable)
            form[f"{at}/object {number}/variable"] = repr(content)
        elif kind == "user_object":
            user = item.user_object
            content = (user.identifier, user.metadata.encode(), item.registered_name)
            form[f"{at}/object {number}/user"] = repr(content)
        elif kind == "function":
            form[f"{at}/object {number}/functions"] = repr(tuple(item.function.concrete_functions))
        elif kind == "bare_concrete_function":
            name = item.bare_concrete_function.concrete_function_name
            form[f"{at}/object {number}/functions"] = repr((name,) if name else ())
    for name, function in graph.concrete_functions.items():
        form[f"{at}/captures {name}"] = repr(tuple(function.bound_inputs))
    return form | {f"{at}/slots": repr(dict(sorted(slots.items())))}


def _type_name(number: int) -> str:
    import tensorflow as tf

    from ckpttool.core import dtypes

    try:
        name: str = tf.dtypes.as_dtype(number).base_dtype.name
    except TypeError:
        return f"type {number}"
    return name if name in dtypes.BY_NAME else f"type {number}"


def _partial_shape(shape: Any) -> tuple[int, ...] | None:
    return None if shape.unknown_rank else tuple(dim.size for dim in shape.dim)


def _onnx() -> Read:
    """Return a reader of all constants of a model: in its graph, in the graphs of nodes, in functions."""
    import onnx
    from google.protobuf.message import DecodeError

    def read(path: str) -> Form:
        form: Form = {}
        try:
            model = onnx.load(path)
            _onnx_graph(onnx, model.graph, "", form)
            for function in model.functions:
                _onnx_nodes(onnx, function.node, f"[{f'{function.domain}.{function.name}'!r}]", form)
        except (DecodeError, onnx.checker.ValidationError) as error:
            raise Refused(str(error)) from error
        return form

    return read


def _onnx_graph(onnx: Any, graph: Any, above: str, form: Form) -> None:
    for tensor_ in graph.initializer:
        form[f"{above}[{_named(tensor_.name)!r}]"] = _onnx_tensor(onnx, tensor_)
    for sparse in graph.sparse_initializer:
        form[f"{above}[{_named(sparse.values.name)!r}]"] = OPAQUE
    _onnx_nodes(onnx, graph.node, above, form)


def _onnx_nodes(onnx: Any, nodes: Any, above: str, form: Form) -> None:
    for node in nodes:
        constant = node.op_type == "Constant" and len(node.output) == 1
        title = _named(node.name or next(filter(None, node.output), node.op_type))
        for attribute in node.attribute:
            stated = [field.name for field, _ in attribute.ListFields()]
            only = [name for name in ("t", "g", "sparse_tensor") if name in stated]
            # Before version 2 of the format, attributes had no type.
            value = getattr(attribute, only[0]) if only else None
            if attribute.type:
                value = onnx.helper.get_attribute_value(attribute)
            values = list(value) if isinstance(value, tuple | list) else [value]
            for number, item in enumerate(values):
                name = _named(attribute.name) + (f"_{number}" if len(values) > 1 else "")
                if constant and name not in ("value", "sparse_value"):
                    continue
                location = (
                    f"{above}[{_named(node.output[0])!r}]" if constant else f"{above}[{title!r}][{name!r}]"
                )
                if isinstance(item, onnx.GraphProto) and not constant:
                    _onnx_graph(onnx, item, f"{above}[{title!r}].{name}", form)
                elif isinstance(item, onnx.TensorProto):
                    form[location] = _onnx_tensor(onnx, item)
                elif isinstance(item, onnx.SparseTensorProto):
                    form[location] = OPAQUE


def _named(name: str | bytes) -> str:
    """Return a name; the library gives those that are not UTF-8 as bytes."""
    return _text(name) if isinstance(name, bytes) else name


def _onnx_tensor(onnx: Any, proto: Any) -> str:
    import numpy as np

    if proto.data_type == onnx.TensorProto.STRING:
        if proto.HasField("raw_data"):
            return f"{UNREADABLE}a string tensor has raw data"
        return _array(np.array([*proto.string_data, None], object)[:-1].reshape(tuple(proto.dims)))
    try:
        value = onnx.numpy_helper.to_array(proto)
    except (ValueError, TypeError, KeyError) as error:
        return f"{UNREADABLE}{type(error).__name__}: {error}"
    return tensor(value.dtype.name, value.shape, np.ascontiguousarray(value).tobytes())


def _torch_script() -> Read:
    """Return torch's reader of TorchScript, which compiles the code; only the tensors are compared."""
    import torch

    def read(path: str) -> Form:
        try:
            state = torch.jit.load(path, map_location="cpu").state_dict()
        except RuntimeError as error:
            raise Refused(str(error)) from error
        return {f".{name}": _torch_tensor(torch, value) for name, value in state.items()}

    return read


READERS: Mapping[str, Callable[[], Read]] = {
    OURS: lambda: our_form,
    "torch": _torch,
    "torch_tar": _torch_tar,
    "torch_dcp": _torch_dcp,
    "sb3": _sb3,
    "pickle": _pickle,
    "tensorflow": _tensorflow,
    "safetensors": _safetensors,
    "numpy": _numpy,
    "h5py": _h5py,
    "keras_zip": _keras_zip,
    "saved_model": _saved_model,
    "onnx": _onnx,
    "torch_script": _torch_script,
}
# The library that the process of a reader has imported before it forks.
LIBRARIES = {
    OURS: "tests.hostile.started",
    **dict.fromkeys(("torch", "torch_tar", "torch_script", "sb3", "safetensors"), "torch"),
    "torch_dcp": "torch.distributed.checkpoint",
    "pickle": "numpy",
    "numpy": "numpy",
    "onnx": "onnx",
    "tensorflow": "tensorflow",
    "saved_model": "tensorflow",
    "h5py": "h5py",
    "keras_zip": "h5py",
}


def batch(reader: str, paths: Sequence[str], out: str, alone: bool) -> None:
    """Read each file; append `[word, detail, form]` for it to the file `out`, a line of JSON each.

    The word is "read", "refused" (the reader's own error), "untyped" (any other exception) or "memory".
    A crash and a time-out end the process: the lines are those of the files before.
    `alone` lets ckpttool list an HDF5 file in a process of its own, as it does outside of tests.
    """
    if reader != OURS:
        _attempt_all(READERS[reader](), paths, out)
        return
    from ckpttool.core import limits
    from tests.hostile.room import Forked, Within, forked_children

    most = replace(limits.Limits(), hdf5_seconds=HDF5_SECONDS)
    with forked_children(Forked if alone else Within), limits.using(most):
        _attempt_all(our_form, paths, out)


def _attempt_all(read: Read, paths: Sequence[str], out: str) -> NoReturn:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    lines = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        for path in paths:
            signal.setitimer(signal.ITIMER_PROF, HDF5_SECONDS if path.endswith(_HDF5) else SECONDS)
            signal.alarm(WALL)
            answer = _attempt(read, path)
            os.write(lines, (json.dumps(answer) + "\n").encode())
        os._exit(0)
    except BaseException:  # noqa: BLE001  # the harness is wrong, not the reader
        sys.stdout.write(traceback.format_exc())
        sys.stdout.flush()
    finally:
        os._exit(1)


def _attempt(read: Read, path: str) -> Answer:
    try:
        return "read", "", read(path)
    except Refused as refused:
        return "refused", _brief(str(refused)), {}
    except MemoryError as error:
        return "memory", _brief(str(error)), {}
    except BaseException as error:  # noqa: BLE001  # what is counted
        return "untyped", _brief(f"{type(error).__name__}: {error}"), {}


def _brief(text: str) -> str:
    return text if len(text) < 400 else f"{text[:100]} ... {text[-300:]}"


def _answer(word: str, detail: str, form: Form) -> Answer:
    return word, detail, form


def attempts(reader: str, paths: Sequence[str], folder: Path, alone: bool = False) -> Iterator[Answer]:
    """Let a reader's warm process read each file in a fork; one that dies is replaced for the next file."""
    from tests import warm

    done = 0
    while done < len(paths):
        out = folder / f"{reader}.jsonl"
        out.unlink(missing_ok=True)
        arguments = (reader, list(paths[done:]), str(out), alone)
        program = f"from tests.hostile.readers import batch; batch(*{arguments!r})"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HDF5_PLUGIN_PRELOAD": "::"}
        status, output = warm.run(LIBRARIES[reader], program, folder, environment)
        for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
            yield _answer(*json.loads(line))
            done += 1
        if done == len(paths):
            return
        if status >= 0:
            raise AssertionError(f"{reader} ended with status {status} at {paths[done]}: {output[-2000:]}")
        if reader == OURS and not alone:
            yield from attempts(reader, paths[done : done + 1], folder, alone=True)
        else:
            name = signal.Signals(-status).name
            yield ("hang" if name in ("SIGALRM", "SIGPROF") else "crash"), name, {}
        done += 1


ROOT = Path(__file__).resolve().parent.parent.parent
