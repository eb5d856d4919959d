"""What readers make of a file, as a text that says all that they read: ours, and those of the frameworks.

A reader's own errors are those that its documentation names or its code raises on purpose.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

OURS = "ckpttool"
Read = Callable[[str], str]


class Refused(Exception):  # noqa: N818  # the reader's answer, not a fault
    """The reader said that the file is damaged, in its own way."""


def ours(path: str) -> str:
    """Return everything that ckpttool takes from a checkpoint, as a text."""
    from ckpttool.errors import CkpttoolError
    from ckpttool.formats.resolve import open_checkpoint
    from ckpttool.ops.digest import digest_of

    try:
        found = open_checkpoint(path)
        whole = digest_of(found)
    except CkpttoolError as error:
        raise Refused(str(error)) from error
    lost = [note for note in found.notes if "cannot be read" in note]
    if lost:
        # Of a SavedModel whose graph is damaged the variables are listed, and a note says that it is.
        raise Refused(lost[0])
    tree = found.tree
    uses = [
        (leaf.key, leaf.role, leaf.of, leaf.slot, leaf.trainable, leaf.name) for _, leaf in tree.tensors()
    ]
    more = (
        found.writer,
        found.integrity,
        sorted(found.details.items(), key=str),
        tree.aliases,
        tree.containers,
    )
    return repr((found.format, whole.sha256, uses, *more))


def _said(value: Any) -> str:
    """Return a value with every array as its type, shape and bytes."""
    import numpy as np

    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name!r}: {_said(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_said, value)) + "]"
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(repr(value.tolist()).encode() if value.dtype == object else value.tobytes())
        return f"{value.dtype}{value.shape}{digest.hexdigest()}"
    return repr(value)


def _torch() -> Read:
    import pickle

    import torch

    def numbers(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            data = (
                value.contiguous().reshape(-1).view(torch.uint8).numpy() if value.numel() else value.numpy()
            )
            return [str(value.dtype), list(value.shape), data]
        if isinstance(value, Mapping):
            return {name: numbers(each) for name, each in value.items()}
        return [numbers(each) for each in value] if isinstance(value, list | tuple) else value

    def read(path: str) -> str:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise Refused from error
        return _said(numbers(found))

    return read


def _tensorflow() -> Read:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    import tensorflow as tf

    def read(path: str) -> str:
        try:
            found = tf.train.load_checkpoint(path)
            names = found.get_variable_to_shape_map()
            return _said({name: found.get_tensor(name) for name in sorted(names)})
        except tf.errors.OpError as error:
            raise Refused from error

    return read


def _safetensors() -> Read:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    def read(path: str) -> str:
        try:
            found = load_file(path)
        except SafetensorError as error:
            raise Refused from error
        return _said(dict(sorted(found.items())))

    return read


def _numpy() -> Read:
    import zipfile
    import zlib

    import numpy as np

    def read(path: str) -> str:
        try:
            with np.load(path, allow_pickle=False) as found:
                return _said({name: found[name] for name in sorted(found.files)})
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise Refused from error

    return read


def _h5py() -> Read:
    import h5py

    def read(path: str) -> str:
        found: dict[str, Any] = {}

        def note(name: str, item: Any) -> None:
            found[name] = item[()] if isinstance(item, h5py.Dataset) else sorted(item.attrs)

        try:
            with h5py.File(path, "r") as file:
                file.visititems(note)
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise Refused from error
        return _said(dict(sorted(found.items())))

    return read


def _keras() -> Read:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    warnings.simplefilter("ignore")
    import keras

    def read(path: str) -> str:
        try:
            model = keras.saving.load_model(path, compile=False)
        except (ValueError, TypeError, OSError, KeyError) as error:
            raise Refused from error
        return _said([model.get_config(), [variable.numpy() for variable in model.variables]])

    return read


_PEERS: Mapping[str, Callable[[], Read]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "safetensors": _safetensors,
    "numpy": _numpy,
    "h5py": _h5py,
    "keras": _keras,
}
# Each is made in a process of its own: the frameworks do not get on with each other in one.
READERS: Mapping[str, Callable[[], Read]] = {
    OURS: lambda: ours,
    **{name: make for name, make in _PEERS.items() if importlib.util.find_spec(name) is not None},
}
