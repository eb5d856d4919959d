"""Runs nobuco on the pairs of models: `python -m tests.model_pairs.nobuco_peer NAME ...`.

nobuco imports Keras 2 as `keras`; here that name is tf_keras. It needs `sty` and torchvision, too, whose
operators a CPU build of PyTorch lacks: none of these models uses one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from typing import Any

import numpy as np

_LIBRARIES: list[Any] = []  # that live as long as their operators


class LegacyKeras(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports tf_keras for `keras`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a specification for `keras` and its modules."""
        del path, target
        return importlib.util.spec_from_loader(name, self) if name.partition(".")[0] == "keras" else None

    def create_module(self, spec: Any) -> Any:
        """Return the module of tf_keras."""
        return importlib.import_module(f"tf_{spec.name}")

    def exec_module(self, module: Any) -> None:
        """Do nothing: it has run."""


def define_operators() -> None:
    """Declare operators that a build of torchvision for another PyTorch lacks: no model here uses them."""
    import torch

    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        _LIBRARIES.append(library)
        for item in ("nms", "qnms"):
            library.define(f"{item}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def import_nobuco() -> Any:
    """Return nobuco, for which Keras 2 is `keras` from now on; other modules keep their Keras 3."""
    os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1")
    for name in [module for module in sys.modules if module.partition(".")[0] == "keras"]:
        del sys.modules[name]
    sys.meta_path.insert(0, LegacyKeras())
    import tensorflow  # before PyTorch: the two can abort in the other order
    import torch

    define_operators()
    import nobuco

    # It converts `functional.relu`, but not `torch.relu`: added in its documented way.
    strategy = nobuco.ChannelOrderingStrategy.MINIMUM_TRANSPOSITIONS
    nobuco.converter(torch.relu, channel_ordering_strategy=strategy)(lambda _: tensorflow.nn.relu)
    return nobuco


def main(names: list[str]) -> None:
    """Convert PyTorch modules to Keras 2; print a line of JSON for each outcome."""
    nobuco = import_nobuco()
    import torch

    from tests.model_pairs import harness, peers, torch_side

    for name in names:

        def convert(name: str = name) -> None:
            net = torch_side.build(name).eval()
            tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in torch_side.inputs(net.program)]
            order = nobuco.ChannelOrder.PYTORCH
            model = nobuco.pytorch_to_keras(
                net, args=tensors, inputs_channel_order=order, outputs_channel_order=order
            )
            outputs = model([x.numpy() for x in tensors] if len(tensors) > 1 else tensors[0].numpy())
            with torch.no_grad():
                expected = net(*tensors)
            both = [value if isinstance(value, list | tuple) else [value] for value in (outputs, expected)]
            for one, other in zip(*both, strict=True):
                harness.compare(np.asarray(one), other.numpy())

        peers.report(peers.timed(name, "keras", "nobuco", convert))


if __name__ == "__main__":
    main(sys.argv[1:])
