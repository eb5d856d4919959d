"""Multi-head attention: four projections, which PyTorch keeps as one matrix of three and one of its own.

Canonical are matrices [in, heads * depth] and vectors; the number of heads is only in the shapes of Keras.

Sources: keras/src/layers/attention/multi_head_attention.py; torch/nn/modules/activation.py
(MultiheadAttention).
"""

from __future__ import annotations

from math import prod

from ckpttool.errors import MappingError
from ckpttool.mapping.kinds.kind import Group, Kind, Row, Told, Way, Weight, require
from ckpttool.mapping.parts import Take
from ckpttool.mapping.rules import KEEP, TRANSPOSE, Reshape, Rule, chained
from ckpttool.source import Shape

PROJECTIONS = ("query", "key", "value")
_OUT = "output"
_ALL = (*PROJECTIONS, _OUT)
HEADS = "the number of heads is not in PyTorch's tensors"


def _merged(name: str, shape: Shape) -> Rule:
    """Return the rule that makes one axis of heads and depth: the first two of the output, else the last."""
    rows = prod(shape[:-1]) if name == _OUT else shape[0]
    return Reshape((rows, prod(shape) // rows))


def _read_keras(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
    rows = []
    for name in _ALL:
        rows.append(Row(f"{name}/kernel", f"{name}_kernel", _merged(name, group[f"{name}/kernel"].shape)))
        if (bias := group.get(f"{name}/bias")) is not None:
            flat: Rule = Reshape((bias.size,))
            rows.append(Row(f"{name}/bias", f"{name}_bias", chained(flat) if name != _OUT else chained()))
    return Way(tuple(rows))


def _write_keras(canonical: Group, told: Told) -> Way:
    require(KERAS, canonical, [f"{name}_kernel" for name in _ALL])
    heads = told.number or _heads(told)
    if heads is None:
        raise MappingError(HEADS)
    rows = []
    for name in _ALL:
        kernel, bias = canonical[f"{name}_kernel"], canonical.get(f"{name}_bias")
        width = kernel.shape[0 if name == _OUT else 1]
        if heads < 1 or width % heads:
            raise MappingError(
                "the heads do not divide the attention's width", expected=str(width), found=f"{heads} heads"
            )
        split = (heads, width // heads)
        shape = (*split, kernel.shape[1]) if name == _OUT else (kernel.shape[0], *split)
        rows.append(Row(f"{name}/kernel", f"{name}_kernel", Reshape(shape)))
        if bias is not None:
            rows.append(
                Row(f"{name}/bias", f"{name}_bias", chained(Reshape(split)) if name != _OUT else chained())
            )
    return Way(tuple(rows))


def _heads(told: Told) -> int | None:
    wanted = told.wanted.get("query/kernel")
    return wanted[1] if wanted is not None and len(wanted) == 3 else None


def _read_torch(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
    width = group["out_proj/weight"].shape[0]
    rows = []
    for number, name in enumerate(PROJECTIONS):
        cut = Take(0, number * width, (number + 1) * width, 3 * width)
        if "in_proj_weight" in group:
            rows.append(Row("in_proj_weight", f"{name}_kernel", chained(cut, TRANSPOSE)))
        else:
            rows.append(Row(f"{name[0]}_proj_weight", f"{name}_kernel", TRANSPOSE))
        if "in_proj_bias" in group:
            rows.append(Row("in_proj_bias", f"{name}_bias", cut))
    rows.append(Row("out_proj/weight", "output_kernel", TRANSPOSE))
    if "out_proj/bias" in group:
        rows.append(Row("out_proj/bias", "output_bias"))
    return Way(tuple(rows))


def _write_torch(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
    require(TORCH, canonical, [f"{name}_kernel" for name in _ALL])
    kernels = {name: canonical[f"{name}_kernel"].shape for name in _ALL}
    width = kernels["query"][0]
    if any(kernels[name][1] != width for name in _ALL) or kernels[_OUT][0] != width:
        raise MappingError(
            "nn.MultiheadAttention takes, keeps and gives one width (heads times depth)",
            expected=str(width),
            found=", ".join(f"{name} {list(shape)}" for name, shape in kernels.items()),
        )
    apart = any(kernels[name][0] != width for name in PROJECTIONS)
    rows = []
    for number, name in enumerate(PROJECTIONS):
        place = Take(0, number * width, (number + 1) * width, 3 * width).inverse(canonical["query_kernel"])
        if apart:
            rows.append(Row(f"{name[0]}_proj_weight", f"{name}_kernel", TRANSPOSE))
        else:
            rows.append(Row("in_proj_weight", f"{name}_kernel", chained(TRANSPOSE, place)))
        if f"{name}_bias" in canonical:
            rows.append(Row("in_proj_bias", f"{name}_bias", place))
    rows.append(Row("out_proj/weight", "output_kernel", TRANSPOSE))
    if "output_bias" in canonical:
        rows.append(Row("out_proj/bias", "output_bias"))
    return Way(tuple(rows))


def _keras_fits(group: Group) -> bool:
    inner = {group[f"{name}/kernel"].shape[1:] for name in ("query", "key")}
    outer = group["output/kernel"].shape[:2]
    return len(inner) == 1 and outer == group["value/kernel"].shape[1:]


def _torch_fits(group: Group) -> bool:
    rows, width = group["out_proj/weight"].shape
    apart = all(f"{name[0]}_proj_weight" in group for name in PROJECTIONS)
    whole = "in_proj_weight" in group and group["in_proj_weight"].shape == (3 * width, width)
    return rows == width and whole != apart


_OPTIONAL = (("in_proj_weight", 2), *((f"{name[0]}_proj_weight", 2) for name in PROJECTIONS))
KERAS = Kind(
    "attention",
    "tensorflow",
    tuple(
        weight
        for name in _ALL
        for weight in (
            Weight(f"{name}/kernel", f"{name}_kernel", 3),
            Weight(f"{name}/bias", f"{name}_bias", 1 if name == _OUT else 2, optional=True),
        )
    ),
    also=_keras_fits,
    reading=_read_keras,
    writing=_write_keras,
)
TORCH = Kind(
    "attention",
    "torch",
    (
        *(Weight(name, "", rank, optional=True) for name, rank in _OPTIONAL),
        Weight("in_proj_bias", "", 1, optional=True),
        Weight("out_proj/weight", "output_kernel", 2),
        Weight("out_proj/bias", "output_bias", 1, optional=True),
    ),
    also=_torch_fits,
    reading=_read_torch,
    writing=_write_torch,
)


def _separate(names: tuple[str, str, str, str]) -> Kind:
    """Return an attention of four linear layers with these names, as programs of PyTorch build their own."""
    pairs = list(zip(_ALL, names, strict=True))
    return Kind(
        "attention",
        "torch",
        tuple(
            weight
            for name, child in pairs
            for weight in (
                Weight(f"{child}/weight", f"{name}_kernel", 2, TRANSPOSE),
                Weight(f"{child}/bias", f"{name}_bias", 1, optional=True),
            )
        ),
        "separate",
        asked=True,
    )


def _fused(joined: str, out: str, *, in_out: bool) -> Kind:  # noqa: C901  # its reading, its writing
    """Return an attention of two linear layers, of which the first gives query, key and value in this order.

    Where heads interleave (GPT-NeoX's `query_key_value`) the rows have another order, which is none of these.
    """
    axis, turned = (1, KEEP) if in_out else (0, TRANSPOSE)

    def read(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
        width = group[f"{joined}/weight"].shape[axis] // 3
        rows = []
        for number, name in enumerate(PROJECTIONS):
            start, end = number * width, (number + 1) * width
            cut = Take(axis, start, end, 3 * width)
            rows.append(Row(f"{joined}/weight", f"{name}_kernel", chained(cut, turned)))
            if f"{joined}/bias" in group:
                rows.append(Row(f"{joined}/bias", f"{name}_bias", Take(0, start, end, 3 * width)))
        rows.append(Row(f"{out}/weight", "output_kernel", turned))
        if f"{out}/bias" in group:
            rows.append(Row(f"{out}/bias", "output_bias"))
        return Way(tuple(rows), assumed=(_BLOCKS,))

    def write(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
        require(TORCH, canonical, [f"{name}_kernel" for name in _ALL])
        widths = {canonical[f"{name}_kernel"].shape for name in PROJECTIONS}
        if len(widths) != 1:
            raise MappingError(
                "one layer for query, key and value takes one width",
                found=", ".join(str(list(shape)) for shape in sorted(widths)),
            )
        width = canonical["query_kernel"].shape[1]
        rows = []
        for number, name in enumerate(PROJECTIONS):
            start, end = number * width, (number + 1) * width
            place = Take(axis, start, end, 3 * width).inverse(canonical["query_kernel"])
            rows.append(Row(f"{joined}/weight", f"{name}_kernel", chained(turned, place)))
            if f"{name}_bias" in canonical:
                place = Take(0, start, end, 3 * width).inverse(canonical[f"{name}_bias"])
                rows.append(Row(f"{joined}/bias", f"{name}_bias", place))
        rows.append(Row(f"{out}/weight", "output_kernel", turned))
        if "output_bias" in canonical:
            rows.append(Row(f"{out}/bias", "output_bias"))
        return Way(tuple(rows), assumed=(_BLOCKS,))

    def fits(group: Group) -> bool:
        shape = group[f"{joined}/weight"].shape
        wide, out_shape = shape[axis], group[f"{out}/weight"].shape
        bias = group.get(f"{joined}/bias")
        inner = out_shape[0 if in_out else 1]
        return wide == 3 * inner and (bias is None or bias.shape == (wide,))

    weights = tuple(
        Weight(f"{child}/{name}", "", rank, optional=rank == 1)
        for child in (joined, out)
        for name, rank in (("weight", 2), ("bias", 1))
    )
    form = "fused_in_out" if in_out else "fused"
    return Kind("attention", "torch", weights, form, fits, read, write, asked=True)


_BLOCKS = "one layer gives an attention's query, key and value as three blocks in this order"
_NAMES = (
    *(("q_proj", "k_proj", "v_proj", out) for out in ("out_proj", "o_proj", "proj", "out")),
    *(("q", "k", "v", out) for out in ("o", "out", "proj", "output", "out_proj")),
    *(("query", "key", "value", out) for out in ("output", "out", "proj", "out_proj", "dense")),
    *(("wq", "wk", "wv", "wo"), ("w_q", "w_k", "w_v", "w_o"), ("W_q", "W_k", "W_v", "W_o")),
    *(("to_q", "to_k", "to_v", "to_out"), ("q_lin", "k_lin", "v_lin", "out_lin")),
    *(("fc_q", "fc_k", "fc_v", "fc_o"), ("linear_q", "linear_k", "linear_v", "linear_out")),
)
# Sources: timm/layers/attention.py (qkv, proj); GPT-2 in Transformers (Conv1D) and nanoGPT (c_attn, c_proj).
KINDS: tuple[Kind, ...] = (
    KERAS,
    TORCH,
    *map(_separate, _NAMES),
    _fused("qkv", "proj", in_out=False),
    _fused("qkv", "out_proj", in_out=False),
    _fused("c_attn", "c_proj", in_out=False),
    _fused("c_attn", "c_proj", in_out=True),
)
