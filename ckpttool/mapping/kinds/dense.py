"""Dense layers and embeddings: both are a matrix, and only one of them is transposed.

Sources: keras/src/layers/core/dense.py and embedding.py; tensorflow/python/keras/legacy_tf_layers/core.py;
tf_slim (`weights`, `biases`); sonnet/src/linear.py (`w`, `b`); torch/nn/modules/linear.py and sparse.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


def _biased(outputs: int, group: Group) -> bool:
    """Say whether a bias, if there is one, is as long as the matrix's axis of outputs."""
    matrix = next(leaf.shape for leaf in group.values() if len(leaf.shape) == 2)
    return all(len(leaf.shape) != 1 or leaf.shape[0] == matrix[outputs] for leaf in group.values())


_KERNEL_BIASED, _WEIGHT_BIASED = partial(_biased, 1), partial(_biased, 0)


def _turned(name: str, framework: str, form: str, also: Callable[[Group], bool]) -> Kind:
    """Return a dense layer whose matrix has the orientation of the other framework."""
    weights = (Weight(name, "kernel", 2, TRANSPOSE if form == OUT_IN else KEEP), _BIAS)
    return Kind("dense", framework, weights, form, also, asked=True)


_BIAS = Weight("bias", "bias", 1, optional=True)
# Matrices of a program's own layers: [in, out] in PyTorch (x @ W, as GPT-2's Conv1D), [out, in] in Keras.
IN_OUT, OUT_IN = "in_out", "out_in"
DENSE_TORCH = Kind(
    "dense",
    "torch",
    (Weight("weight", "kernel", 2, TRANSPOSE), _BIAS),
    also=_WEIGHT_BIASED,
    reading=_read,
    writing=_write,
)
KINDS: tuple[Kind, ...] = (
    Kind("dense", "tensorflow", (Weight("kernel", "kernel", 2), _BIAS), also=_KERNEL_BIASED),
    Kind(
        "dense",
        "tensorflow",
        (Weight("w", "kernel", 2), Weight("b", "bias", 1, optional=True)),
        "sonnet",
        _KERNEL_BIASED,
    ),
    Kind(
        "dense",
        "tensorflow",
        (Weight("weights", "kernel", 2), Weight("biases", "bias", 1, optional=True)),
        "slim",
        _KERNEL_BIASED,
    ),
    DENSE_TORCH,
    _turned("weight", "torch", IN_OUT, _KERNEL_BIASED),
    _turned("kernel", "tensorflow", OUT_IN, _WEIGHT_BIASED),
    Kind("embedding", "tensorflow", (Weight("embeddings", "embeddings", 2, KEEP),)),
    Kind("embedding", "torch", (Weight("weight", "embeddings", 2, KEEP),)),
)
