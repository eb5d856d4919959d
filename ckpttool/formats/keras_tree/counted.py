"""Optimizers of Keras before 2.3: slots called `Variable_7`, told apart by their order alone.

Source: keras/optimizers.py of Keras 2.0 to 2.2 and tensorflow/python/keras/optimizers.py of TensorFlow 1.4 to
1.13: `get_updates` sets `self.weights = [self.iterations] + ms + vs + vhats` and the like, each list over the
model's trainable weights. RMSprop, Adagrad and Adadelta have no iteration there. An Adam without amsgrad has
vhats of one zero each since 2.1; SGD has its moments even without momentum.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpttool.formats.hdf5 import Dataset
from ckpttool.formats.keras_tree.config import Config
from ckpttool.formats.keras_tree.optimizers import Trained
from ckpttool.formats.object_graph.roles import slot_path
from ckpttool.leaf import Leaf, Path, Role, attr

_UNNAMED = re.compile(r"(?:.*/)?Variable(_\d+)?(:0)?", re.DOTALL)
_LISTS = {
    "Adam": ("m", "v"),
    "Nadam": ("m", "v"),
    "Adamax": ("m", "u"),
    "SGD": ("momentum",),
    "RMSprop": ("rms",),
    "Adagrad": ("accumulator",),
    "Adadelta": ("accumulated_grad", "accumulated_delta"),
}


def leaves(
    datasets: Sequence[tuple[str, Dataset]], at: Path, config: Config, trained: Sequence[Trained]
) -> dict[Path, Leaf] | None:
    """Return an optimizer's leaves, or None if its slots have names or do not fit the trained variables.

    `trained` are in the model's order. Counts and shapes must agree exactly.
    """
    settings = [each for each in datasets if not each[1].shape]
    slots = [each for each in datasets if each[1].shape]
    kinds = _LISTS.get(config.cls or "", ())
    if not kinds or not trained or not all(_UNNAMED.fullmatch(name) for name, _ in slots):
        return None
    if config.settings.get("amsgrad") is True:
        kinds = (*kinds, "vhat")
    wanted = [(kind, one) for kind in kinds for one in trained]
    rest = slots[len(wanted) :]
    if len(slots) < len(wanted) or any(dataset.shape != (1,) for _, dataset in rest):
        return None
    if rest and (config.cls != "Adam" or len(rest) != len(trained)):
        return None
    found: dict[Path, Leaf] = {}
    for (_, dataset), (kind, one) in zip(slots, wanted, strict=False):
        if dataset.shape != one.shape:
            return None
        path = slot_path(at, kind, one.path)
        found[path] = Leaf(dataset.dtype, dataset.shape, dataset.source, dataset.path, "slot", one.path, kind)
    for name, dataset in (*settings, *rest):
        counts = re.fullmatch(r"iterations?(_\d+)?(:0)?", name.rpartition("/")[2]) is not None
        last = (attr("iterations"),) if counts else tuple(map(attr, name.removesuffix(":0").split("/")))
        path = (*at, *last) if (*at, *last) not in found else (*at, *map(attr, name.split("/")))
        role: Role = "counter" if counts else "other"
        found[path] = Leaf(dataset.dtype, dataset.shape, dataset.source, dataset.path, role)
    return found if len(found) == len(datasets) else None
