"""Describe the layers of a model: classes, settings, order, output shapes, multiply-accumulate operations.

A layer is described from what the file records: its class and settings, the order in which layers are
applied, and shapes by arithmetic. Nothing is executed. The code of a custom class is not in the file: the
order of its parts and its output shape are unknown, unless the file records them elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckpttool.core.errors import CkpttoolError, UsageError, is_system_error
from ckpttool.libraries.recognize import KERAS_FORMATS, has_saver_graph, is_script
from ckpttool.listing.input_shapes import parse_shapes
from ckpttool.listing.layers import Architecture, Extents

if TYPE_CHECKING:
    from ckpttool.core.checkpoint import Checkpoint


def describe_architecture(checkpoint: Checkpoint, shapes: Sequence[str] = ()) -> tuple[Architecture, ...]:
    """Return the models whose layers the checkpoint records; none for weights alone.

    Args:
        checkpoint: any checkpoint; no tensor is read.
        shapes: input shapes without the batch, "3,32,32" or "PATH=3,32,32" for the input of one layer.
    """
    input_shapes = parse_shapes(shapes)
    models: tuple[Architecture, ...] = ()
    try:
        models = _describe(checkpoint, input_shapes)
    except UsageError:
        raise
    except CkpttoolError as error:
        # The listing does not depend on it; commands that run the model report the error.
        if is_system_error(error):
            raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
        if input_shapes:
            raise UsageError(
                "the model's configuration has an unexpected structure", file=checkpoint.path
            ) from None
    if input_shapes and not models:
        raise UsageError(
            "--input-shape requires a file that describes its layers",
            file=checkpoint.path,
            hint="a pickled module, a Keras model, TorchScript, ONNX, a checkpoint beside its "
            ".meta file; weights alone list no layers",
        )
    return models


def describe_unread_graph(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return a note on the graph of a Saver that cannot be listed; empty without one."""
    if not has_saver_graph(checkpoint):
        return ()
    from ckpttool.graphs.graph import read_graph
    from ckpttool.libraries.layer_connections import describe_unused_graph

    try:
        graph = read_graph(checkpoint)
    except CkpttoolError as error:
        if is_system_error(error):
            raise
        return (describe_unused_graph(error.message),)
    reason = "it has no network of these variables" if graph is None else "it has too many operations"
    return (describe_unused_graph(reason),)


def _describe(checkpoint: Checkpoint, shapes: Mapping[str, Extents]) -> tuple[Architecture, ...]:
    if checkpoint.format in KERAS_FORMATS:
        from ckpttool.listing import keras_architecture

        return keras_architecture.describe_keras(checkpoint, shapes)
    script = is_script(checkpoint.tree)
    if checkpoint.format == "onnx" or script or has_saver_graph(checkpoint):
        from ckpttool.listing import graph_architecture

        describe = graph_architecture.describe_script if script else graph_architecture.describe_graph
        return describe(checkpoint, shapes)
    from ckpttool.listing import torch_architecture

    return torch_architecture.describe_modules(checkpoint, shapes)
