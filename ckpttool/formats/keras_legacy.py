"""Writes the weights file of Keras 1 and 2: a group for every layer, and the order of both in attributes.

Source: keras/src/legacy/saving/legacy_h5_format.py, `save_weights_to_hdf5_group`. Keras loads by that order.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ckpttool.leaf import Leaf

if TYPE_CHECKING:
    import numpy as np

# What the file says of its writer: kernels are as Keras 2 has them.
_WRITER = {"keras_version": b"2.3.1", "backend": b"tensorflow"}


def data(layers: Mapping[str, Mapping[str, Leaf]]) -> bytes:
    """Return the file of these layers, each with its weights by names (`dense_1/kernel:0`), in order."""
    import h5py  # type: ignore[import-untyped]
    import numpy as np

    def texts(names: Iterable[str]) -> np.ndarray:
        return np.array([name.encode() for name in names], "S")

    file = io.BytesIO()
    with h5py.File(file, "w") as root:
        root.attrs["layer_names"] = texts(layers)
        for name, value in _WRITER.items():
            root.attrs[name] = np.bytes_(value)
        for layer, weights in layers.items():
            group = root.create_group(layer)
            group.attrs["weight_names"] = texts(weights)
            for path, leaf in weights.items():
                group.create_dataset(path, data=leaf.array(), track_times=False)
    return file.getvalue()
