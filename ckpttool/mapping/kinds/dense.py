"""Dense layers and embeddings: both are a matrix, and only one of them is transposed.

Sources: keras/src/layers/core/dense.py and embedding.py; tensorflow/python/keras/legacy_tf_layers/core.py;
tf_slim (`weights`, `biases`); sonnet/src/linear.py (`w`, `b`); torch/nn/modules/linear.py and sparse.py.
"""

from __future__ import annotations

from math import prod

from ckpttool.errors import MappingError
from ckpttool.mapping.kinds.kind import Group, Kind, Row, Told, Way, Weight, require
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Permute, Reshape, Rule, chained
from ckpttool.source import Shape


def unflattened(shape: Shape, outputs: int) -> Rule:
    """Return the rule for a kernel [H * W * C, out] of channels last to the weight [out, C * H * W].

    TensorFlow flattens an image with its channels last, PyTorch with its channels first.
    """
    rank = len(shape)
    return chained(
        Reshape((*shape, outputs)),
        Permute((rank, rank - 1, *range(rank - 1))),
        Reshape((outputs, prod(shape))),
    )


def _fitting(shape: Shape, inputs: int) -> Shape:
    if prod(shape) != inputs:
        raise MappingError(
            "the dense layer does not take that many numbers flattened",
            expected=f"{inputs} inputs",
            found=" x ".join(map(str, shape)),
        )
    return shape


def _read(group: Group, told: Told) -> Way:
    weight = group["weight"]
    rule: Rule = TRANSPOSE
    if told.flatten:
        outputs, inputs = weight.shape
        there = unflattened(_fitting(told.flatten, inputs), outputs)
        rule = there.inverse(TRANSPOSE.leaf(weight))
    rows = (Row("weight", "kernel", rule), Row("bias", "bias"))
    return Way(tuple(row for row in rows if row.stored in group))


def _write(canonical: Group, told: Told) -> Way:
    require(DENSE_TORCH, canonical, ("kernel",))
    inputs, outputs = canonical["kernel"].shape
    rule = unflattened(_fitting(told.flatten, inputs), outputs) if told.flatten else TRANSPOSE
    rows = (Row("weight", "kernel", rule), Row("bias", "bias"))
    return Way(tuple(row for row in rows if row.canonical in canonical))


DENSE_TORCH = Kind(
    "dense",
    "torch",
    (Weight("weight", "kernel", 2, TRANSPOSE), Weight("bias", "bias", 1, optional=True)),
    reading=_read,
    writing=_write,
)
KINDS: tuple[Kind, ...] = (
    Kind("dense", "tensorflow", (Weight("kernel", "kernel", 2), Weight("bias", "bias", 1, optional=True))),
    Kind("dense", "tensorflow", (Weight("w", "kernel", 2), Weight("b", "bias", 1, optional=True)), "sonnet"),
    Kind(
        "dense",
        "tensorflow",
        (Weight("weights", "kernel", 2), Weight("biases", "bias", 1, optional=True)),
        "slim",
    ),
    DENSE_TORCH,
    Kind("embedding", "tensorflow", (Weight("embeddings", "embeddings", 2, KEEP),)),
    Kind("embedding", "torch", (Weight("weight", "embeddings", 2, KEEP),)),
)
