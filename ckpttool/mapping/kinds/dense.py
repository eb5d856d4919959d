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


def _row_bias() -> Kind:
    """Return the dense layer of Transformers' TFConv1D: x @ weight + bias [1, out]."""

    def read(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
        bias = Row("bias", "bias", Reshape(group["bias"].shape[1:]))
        return Way((Row("weight", "kernel"), bias))

    def write(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
        bias = Row("bias", "bias", Reshape((1, canonical["kernel"].shape[1])))
        return Way(tuple(row for row in (Row("weight", "kernel"), bias) if row.canonical in canonical))

    def fits(group: Group) -> bool:
        return group["bias"].shape == (1, group["weight"].shape[1])

    weights = (Weight("weight", "kernel", 2), Weight("bias", "bias", 2))
    return Kind("dense", "tensorflow", weights, ROW_BIAS, fits, read, write)


def _pointwise(name: str, framework: str, rank: int) -> Kind:
    """Return a convolution whose window is one place: a dense layer over the channels."""
    ones = (1,) * (rank - 2)

    def matrix(shape: Shape) -> Shape:
        return shape[:2] if framework == "torch" else shape[-2:]

    turned: Rule = TRANSPOSE if framework == "torch" else KEEP

    def read(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
        rows = (Row(name, "kernel", chained(Reshape(matrix(group[name].shape)), turned)), Row("bias", "bias"))
        return Way(tuple(row for row in rows if row.stored in group))

    def write(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
        inputs, outputs = canonical["kernel"].shape
        shape = (outputs, inputs, *ones) if framework == "torch" else (*ones, inputs, outputs)
        rows = (Row(name, "kernel", chained(turned, Reshape(shape))), Row("bias", "bias"))
        return Way(tuple(row for row in rows if row.canonical in canonical))

    def fits(group: Group) -> bool:
        shape = group[name].shape
        spatial = shape[2:] if framework == "torch" else shape[:-2]
        outputs = shape[0] if framework == "torch" else shape[-1]
        return spatial == ones and ("bias" not in group or group["bias"].shape == (outputs,))

    return Kind(
        "dense", framework, (Weight(name, "kernel", rank), _BIAS), POINTWISE, fits, read, write, asked=True
    )


POINTWISE = "pointwise"
_MATRICES = (("weight", "torch"), ("kernel", "tensorflow"))
_BIAS = Weight("bias", "bias", 1, optional=True)
# Matrices of a program's own layers: [in, out] in PyTorch (x @ W, as GPT-2's Conv1D), [out, in] in Keras.
IN_OUT, OUT_IN = "in_out", "out_in"
ROW_BIAS = "row_bias"
DENSE_TORCH = Kind(
    "dense",
    "torch",
    (Weight("weight", "kernel", 2, TRANSPOSE), _BIAS),
    also=_WEIGHT_BIASED,
    reading=_read,
    writing=_write,
)


def _computed(
    framework: str, why: str, *names: tuple[str, int], optional: tuple[str, ...] = ("bias",)
) -> Kind:
    """Return a layer whose weight is not stored but computed from other tensors, which nothing here does."""
    weights = tuple(Weight(name, "", rank, optional=name in optional) for name, rank in names)
    return Kind("computed_weight", framework, weights, refused=why)


_LORA = (
    "its weight has a LoRA update, and the file does not hold the update's alpha: model.save() and "
    "model.save_weights() store the sum of the two"
)
_QUANTISED = "its weight is quantised: a float copy of the layer has no such scale"
_WEIGHT_NORM = "it has weight norm: --fold-weight-norm makes one weight of its two tensors"
_SPECTRAL_NORM = "it has spectral norm, whose weight depends on a power iteration: remove it before saving"
# Sources: keras/src/layers/core/{dense,einsum_dense,embedding}.py (enable_lora, quantize);
# torch/nn/utils/{weight_norm,spectral_norm,parametrizations}.py
_COMPUTED = (
    *(
        _computed(
            "tensorflow", _LORA, ("kernel", rank), ("bias", 1), ("lora_kernel_a", rank), ("lora_kernel_b", 2)
        )
        for rank in (2, 3, 4, 5)
    ),
    _computed("tensorflow", _LORA, ("embeddings", 2), ("lora_embeddings_a", 2), ("lora_embeddings_b", 2)),
    *(
        _computed("tensorflow", _QUANTISED, ("kernel", rank), ("bias", 1), ("kernel_scale", scale))
        for rank in (2, 3)
        for scale in (1, 2, 3)
    ),
    _computed("tensorflow", _QUANTISED, ("embeddings", 2), ("embeddings_scale", 1)),
    *(
        kind
        for rank in (2, 3, 4, 5)
        for kind in (
            _computed("torch", _WEIGHT_NORM, ("bias", 1), ("weight_g", rank), ("weight_v", rank)),
            _computed("torch", _WEIGHT_NORM, ("original0", rank), ("original1", rank)),
            _computed(
                "torch", _SPECTRAL_NORM, ("bias", 1), ("weight_orig", rank), ("weight_u", 1), ("weight_v", 1)
            ),
            _computed("torch", _SPECTRAL_NORM, ("original", rank)),
        )
    ),
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
    # A program's own names: without a bias nothing shows that it is no embedding.
    Kind(
        "dense",
        "tensorflow",
        (Weight("weight", "kernel", 2), Weight("bias", "bias", 1)),
        "own",
        _KERNEL_BIASED,
    ),
    DENSE_TORCH,
    *(_pointwise(name, framework, rank) for name, framework in _MATRICES for rank in (3, 4)),
    _turned("weight", "torch", IN_OUT, _KERNEL_BIASED),
    _turned("kernel", "tensorflow", OUT_IN, _WEIGHT_BIASED),
    _row_bias(),
    *_COMPUTED,
    Kind("embedding", "tensorflow", (Weight("embeddings", "embeddings", 2, KEEP),)),
    Kind("embedding", "torch", (Weight("weight", "embeddings", 2, KEEP),)),
)
