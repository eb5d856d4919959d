"""Convolutions of one to three dimensions, transposed, depthwise and separable ones.

A transposed convolution's kernel is [H, W, O, I] in TensorFlow and [I, O, H, W] in PyTorch: the permutation
is that of a plain convolution, [H, W, I, O] to [O, I, H, W]. So the two are one kind here.

Sources: keras/src/layers/convolutional/base_conv.py, base_conv_transpose.py, base_depthwise_conv.py and
base_separable_conv.py; tf_keras/src/layers/convolutional/base_depthwise_conv.py (`depthwise_kernel`);
sonnet/src/conv.py; torch/nn/modules/conv.py.
"""

from __future__ import annotations

from dataclasses import replace

from ckpttool.errors import MappingError
from ckpttool.leaf import Leaf
from ckpttool.mapping.kinds.kind import Group, Kind, Row, Told, Way, Weight, require
from ckpttool.mapping.rules import Permute, Reshape, Rule, chained
from ckpttool.source import Shape


def _bias(name: str = "bias") -> Weight:
    return Weight(name, "bias", 1, optional=True)


_BIAS = _bias()


def to_last(dimensions: int) -> Permute:
    """Return the permutation of a torch weight [O, I, ...] to a kernel [..., I, O]."""
    return Permute((*range(2, dimensions + 2), 1, 0))


def _plain(dimensions: int) -> tuple[Kind, ...]:
    rank = dimensions + 2
    spelled = (("", "kernel", "bias"), ("sonnet", "w", "b"), ("slim", "weights", "biases"))
    rows = (
        Kind(
            "convolution",
            "tensorflow",
            (Weight(k, "kernel", rank), Weight(b, "bias", 1, optional=True)),
            form,
            _has_bias,
        )
        for form, k, b in spelled
    )
    return (
        *rows,
        Kind(
            "convolution",
            "torch",
            (Weight("weight", "kernel", rank, to_last(dimensions)), _BIAS),
            also=_has_torch_bias,
        ),
        # Keras's transposed convolutions have no groups.
        Kind(
            "grouped_transposed_convolution",
            "torch",
            (Weight("weight", "kernel", rank), Weight("bias", "bias", 1)),
            also=_is_grouped,
            refused="a transposed convolution of several groups has no equivalent in Keras",
        ),
    )


def _has_bias(group: Group) -> bool:
    """Say whether the bias is as long as the kernel's last axis, or if transposed as the one before."""
    kernel = max(group.values(), key=lambda leaf: len(leaf.shape))
    return all(leaf is kernel or leaf.shape[0] in kernel.shape[-2:] for leaf in group.values())


def _has_torch_bias(group: Group) -> bool:
    """Say whether the bias is as long as O in [O, I, ...], or in [I, O, ...] of a transposed one."""
    return "bias" not in group or group["bias"].shape[0] in group["weight"].shape[:2]


def _is_grouped(group: Group) -> bool:
    """Say whether the weight is [I, O / groups, ...] and the bias [O]."""
    inputs, outputs = group["weight"].shape[:2]
    length = group["bias"].shape[0]
    groups = length // outputs if outputs else 0
    return (
        groups > 1 and length == groups * outputs and inputs % groups == 0 and length not in (inputs, outputs)
    )


def _is_depthwise(group: Group) -> bool:
    """Say whether a torch weight [C * M, 1, ...] and its bias can be a depthwise convolution's."""
    weight, bias = group["weight"], group.get("bias")
    return weight.shape[1] == 1 and (bias is None or bias.shape[0] == weight.shape[0])


def _has_multiplied_bias(group: Group) -> bool:
    """Say whether a kernel [..., C, M] has a bias for each channel of the result, [C * M]."""
    kernel = next(leaf for name, leaf in group.items() if name.endswith("kernel"))
    bias = group.get("bias")
    return bias is None or bias.shape[0] == kernel.shape[-1] * kernel.shape[-2]


def _split(channels: int, multiplier: int, space: Shape) -> Rule:
    """Return the rule of a torch weight [C * M, 1, ...] to a kernel [..., C, M], the multiplier fastest."""
    last = Permute((*range(2, len(space) + 2), 0, 1))
    return chained(Reshape((channels, multiplier, *space)), last)


def _torch_depthwise(group: Group, told: Told) -> Way:
    weight = group["weight"]
    rule, assumed = depthwise_kernel(weight, told)
    rows = (Row("weight", "kernel", rule), Row("bias", "bias"))
    return Way(tuple(row for row in rows if row.stored in group), assumed=assumed)


def depthwise_kernel(weight: Leaf, told: Told) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule of a torch weight [C * M, 1, ...] to a kernel [..., C, M], and what was assumed of M.

    M is told as a number, or by a kernel that is wanted; else it is 1.
    """
    outputs, space = weight.shape[0], weight.shape[2:]
    wanted = next((s for name, s in told.wanted.items() if name.endswith("kernel")), None)
    multiplier = told.number or (wanted[-1] if wanted else 1)
    if multiplier < 1 or outputs % multiplier:
        raise MappingError(
            "a depthwise convolution's outputs are its channels times its multiplier",
            expected=f"a multiple of {multiplier}",
            found=str(outputs),
        )
    rule = _split(outputs // multiplier, multiplier, space)
    known = told.number or wanted or outputs == 1
    return rule, () if known else ("depthwise convolutions have one output for each channel",)


def _from_depthwise(stored: str, canonical: str, kernel: Leaf) -> Row:
    *space, channels, multiplier = kernel.shape
    there = _split(channels, multiplier, tuple(space))
    weight = replace(kernel, shape=(channels * multiplier, 1, *space))
    return Row(stored, canonical, there.inverse(weight))


def _to_torch_depthwise(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
    require(_TORCH_DEPTHWISE[0], canonical, ("kernel",))
    weight = _from_depthwise("weight", "kernel", canonical["kernel"])
    return Way((weight, *((Row("bias", "bias"),) if "bias" in canonical else ())))


def _depthwise(dimensions: int) -> tuple[Kind, ...]:
    rank = dimensions + 2
    return tuple(
        Kind("depthwise", "tensorflow", (Weight(name, "kernel", rank), _BIAS), form, _has_multiplied_bias)
        for form, name in (("", "kernel"), ("tf_keras", "depthwise_kernel"))
    )


def _numbered_bias_fits(group: Group) -> bool:
    names = {"vars/0": "kernel", "vars/1": "bias"}
    return _has_multiplied_bias({names[stored]: leaf for stored, leaf in group.items()})


# As a Keras file numbers its variables (keras/src/layers/convolutional/base_depthwise_conv.py, build).
NUMBERED_DEPTHWISE = tuple(
    Kind(
        "depthwise",
        "tensorflow",
        (Weight("vars/0", "kernel", dimensions + 2), Weight("vars/1", "bias", 1, optional=True)),
        also=_numbered_bias_fits,
    )
    for dimensions in (1, 2)
)

_TORCH_DEPTHWISE = tuple(
    Kind(
        "depthwise",
        "torch",
        (Weight("weight", "kernel", dimensions + 2), _BIAS),
        also=_is_depthwise,
        reading=_torch_depthwise,
        writing=_to_torch_depthwise,
    )
    for dimensions in (1, 2)
)


def _two_convolutions(group: Group, told: Told) -> Way:
    rule, assumed = depthwise_kernel(group["depthwise/weight"], told)
    pointwise = to_last(len(group["pointwise/weight"].shape) - 2)
    rows = (
        Row("depthwise/weight", "depthwise_kernel", rule),
        Row("pointwise/weight", "pointwise_kernel", pointwise),
        Row("pointwise/bias", "bias"),
    )
    return Way(tuple(row for row in rows if row.stored in group), assumed=assumed)


def _to_two_convolutions(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
    require(_TORCH_SEPARABLE[0], canonical, ("depthwise_kernel", "pointwise_kernel"))
    pointwise = canonical["pointwise_kernel"]
    rows = (
        _from_depthwise("depthwise/weight", "depthwise_kernel", canonical["depthwise_kernel"]),
        Row("pointwise/weight", "pointwise_kernel", to_last(len(pointwise.shape) - 2).inverse(pointwise)),
        Row("pointwise/bias", "bias"),
    )
    return Way(tuple(row for row in rows if row.canonical in canonical))


def _separable(dimensions: int) -> Kind:
    rank = dimensions + 2
    names = ("depthwise_kernel", "pointwise_kernel")
    return Kind("separable", "tensorflow", (*(Weight(name, name, rank) for name in names), _BIAS))


# Two modules that PyTorch's users call so; each is a convolution of its own unless somebody says otherwise.
_TORCH_SEPARABLE = tuple(
    Kind(
        "separable",
        "torch",
        (
            Weight("depthwise/weight", "depthwise_kernel", dimensions + 2),
            Weight("pointwise/weight", "pointwise_kernel", dimensions + 2),
            Weight("pointwise/bias", "bias", 1, optional=True),
        ),
        reading=_two_convolutions,
        writing=_to_two_convolutions,
        asked=True,
    )
    for dimensions in (1, 2)
)
KINDS: tuple[Kind, ...] = (
    *(kind for dimensions in (1, 2, 3) for kind in _plain(dimensions)),
    *(kind for dimensions in (1, 2) for kind in _depthwise(dimensions)),
    *_TORCH_DEPTHWISE,
    *(_separable(dimensions) for dimensions in (1, 2)),
    *_TORCH_SEPARABLE,
)
