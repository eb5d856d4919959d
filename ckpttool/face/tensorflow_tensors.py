"""A handle as a tf.Tensor: the one place of the face that imports TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpttool import dtypes
from ckpttool.errors import MissingExtraError, UnsupportedError

if TYPE_CHECKING:
    from ckpttool.face.handle import Handle


def tensor(handle: Handle) -> Any:
    """Read the handle's value into a tf.Tensor; quantized types as plain integers.

    Raise UnsupportedError for a type that this TensorFlow lacks, MissingExtraError without TensorFlow.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise MissingExtraError(
            "tf() needs TensorFlow, which is not installed", hint="pip install 'ckpttool[tensorflow]'"
        ) from error
    number = dtypes.BY_NAME[dtypes.plain_name(handle.dtype)].tensorflow
    missing = f"TensorFlow {tf.__version__} has no tensors of type {handle.dtype}"
    if number is None:
        raise UnsupportedError(missing)
    value = handle.numpy()
    try:
        return tf.convert_to_tensor(value, dtype=tf.dtypes.as_dtype(number))
    except (TypeError, ValueError, tf.errors.OpError) as error:
        raise UnsupportedError(missing) from error
