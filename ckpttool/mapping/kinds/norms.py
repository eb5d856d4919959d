"""Batch, layer and group normalisation, RMS norm, and PReLU: vectors as long as there are channels.

Layer and group norm are stored alike in each framework and are one kind here.

Sources: keras/src/layers/normalization/*.py, keras/src/layers/activations/prelu.py;
sonnet/src/layer_norm.py; torch/nn/modules/batchnorm.py, normalization.py, activation.py.
"""

from __future__ import annotations

from ckpttool.errors import MappingError
from ckpttool.mapping.kinds.kind import Group, Kind, Row, Told, Way, Weight, left_over, require
from ckpttool.mapping.parts import filled
from ckpttool.mapping.rules import KEEP, Permute, Reshape
from ckpttool.source import Shape

_TAKEN_FOR_GRANTED = {"scale": 1.0, "offset": 0.0}
_PAIR = {"scale": "weight", "offset": "bias"}
_SPELLED = {"scale": "gamma", "offset": "beta"}


def _norm_weights(scale: str, offset: str, rank: int = 1) -> tuple[Weight, ...]:
    return Weight(scale, "scale", rank, optional=True), Weight(offset, "offset", rank, optional=True)


def _write_pair(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
    """Write `weight` and `bias`; PyTorch's norms have a weight where they have a bias."""
    rows = tuple(Row(stored, name) for name, stored in _PAIR.items() if name in canonical)
    if "scale" in canonical:
        return Way(rows, left=left_over(canonical, rows))
    like = canonical["offset"]
    fills = {"weight": filled(like.dtype, like.shape, _TAKEN_FOR_GRANTED["scale"])}
    return Way(rows, fills, left_over(canonical, rows), ("norms without gamma have weight 1",))


def _write_batch(canonical: Group, told: Told) -> Way:  # noqa: ARG001  # as every writing
    """Write a batch norm; PyTorch's has both of weight and bias, or neither."""
    require(BATCH_TORCH, canonical, ("mean", "variance"))
    names = {**_PAIR, "mean": "running_mean", "variance": "running_var"}
    rows = tuple(Row(stored, name) for name, stored in names.items() if name in canonical)
    like = canonical["mean"]
    absent = [name for name in _PAIR if name not in canonical]
    fills = {}
    assumed = []
    if len(absent) == 1:
        value = _TAKEN_FOR_GRANTED[absent[0]]
        fills[_PAIR[absent[0]]] = filled(like.dtype, like.shape, value)
        assumed = [f"batch norms without {_SPELLED[absent[0]]} have {_PAIR[absent[0]]} {value:g}"]
    # What has no statistics of its own counts no batches: torch uses the number only with momentum=None.
    fills["num_batches_tracked"] = filled("int64", (), 0, role="buffer")
    return Way(rows, fills, left_over(canonical, rows), tuple(assumed))


def _read_batch(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
    names = {"weight": "scale", "bias": "offset", "running_mean": "mean", "running_var": "variance"}
    rows = tuple(Row(stored, name) for stored, name in names.items() if stored in group)
    return Way(rows, left=tuple(name for name in group if name not in names))


def _write_batch_keras(canonical: Group, told: Told) -> Way:
    """Write a batch norm; gamma and beta that a target wants and the source lacks are 1 and 0."""
    require(BATCH_KERAS, canonical, ("mean", "variance"))
    rows = tuple(Row(stored, name) for name, stored in _BATCH.items() if name in canonical)
    like = canonical["mean"]
    fills = {
        stored: filled(like.dtype, like.shape, _TAKEN_FOR_GRANTED[name])
        for name, stored in _SPELLED.items()
        if name not in canonical and stored in told.wanted
    }
    return Way(rows, fills, left_over(canonical, rows))


_BATCH = {**_SPELLED, "mean": "moving_mean", "variance": "moving_variance"}
BATCH_KERAS = Kind(
    "batch_norm",
    "tensorflow",
    (
        *_norm_weights("gamma", "beta"),
        Weight("moving_mean", "mean", 1),
        Weight("moving_variance", "variance", 1),
    ),
    writing=_write_batch_keras,
)
BATCH_TORCH = Kind(
    "batch_norm",
    "torch",
    (
        *_norm_weights("weight", "bias"),
        Weight("running_mean", "mean", 1),
        Weight("running_var", "variance", 1),
        Weight("num_batches_tracked", "", 0, optional=True),
    ),
    reading=_read_batch,
    writing=_write_batch,
)


def _shares_axes(shape: Shape) -> bool:
    return all(extent == 1 for extent in shape[:-1])


def _read_alpha(group: Group, told: Told) -> Way:  # noqa: ARG001  # as every reading
    shape = group["alpha"].shape
    if not _shares_axes(shape):
        raise MappingError(
            "a PReLU with a slope for every place has no equivalent in PyTorch: share its spatial axes",
            found=str(list(shape)),
        )
    return Way((Row("alpha", "alpha", Reshape((shape[-1],)) if len(shape) > 1 else KEEP),))


def _write_alpha(canonical: Group, told: Told) -> Way:
    (channels,) = canonical["alpha"].shape
    wanted = told.wanted.get("alpha", (*(1,) * (told.number or 0), channels))
    return Way((Row("alpha", "alpha", Reshape(wanted) if len(wanted) > 1 else KEEP),))


def _images(rank: int) -> tuple[Kind, ...]:
    """Return the kinds of a layer norm over whole images: [H, W, C] in Keras, [C, H, W] in PyTorch."""
    last = Permute((*range(1, rank), 0))
    kept, moved = "layer_norm", "layer_norm_images"
    torch = tuple(Weight(stored, name, rank, last, optional=True) for name, stored in _PAIR.items())
    return (
        Kind(kept, "tensorflow", _norm_weights("gamma", "beta", rank)),
        Kind(kept, "torch", _norm_weights("weight", "bias", rank), also=_has_both),
        Kind(moved, "tensorflow", _norm_weights("gamma", "beta", rank)),
        Kind(moved, "torch", torch, also=_has_both),
    )


def _has_weight(group: Group) -> bool:
    return "weight" in group


def _has_both(group: Group) -> bool:
    # A weight of several axes alone is another layer's.
    return "weight" in group and "bias" in group


AXES = "axes"
KINDS: tuple[Kind, ...] = (
    Kind("layer_norm", "tensorflow", _norm_weights("gamma", "beta")),
    Kind("layer_norm", "tensorflow", (Weight("scale", "scale", 1), Weight("offset", "offset", 1)), "sonnet"),
    Kind("layer_norm", "torch", _norm_weights("weight", "bias"), also=_has_weight, writing=_write_pair),
    *_images(2)[:2],
    *_images(3),
    *_images(4),
    BATCH_KERAS,
    BATCH_TORCH,
    Kind("rms_norm", "tensorflow", (Weight("scale", "scale", 1),)),
    Kind("rms_norm", "torch", (Weight("weight", "scale", 1),)),
    # Over several axes, a matrix that nothing but the class tells from a dense layer's.
    Kind("rms_norm", "tensorflow", (Weight("scale", "scale", 2),)),
    Kind("rms_norm", "torch", (Weight("weight", "scale", 2),), AXES, asked=True),
    Kind("layer_norm", "torch", (Weight("weight", "scale", 2),), AXES, asked=True),
    *(
        Kind(
            "prelu",
            "tensorflow",
            (Weight("alpha", "alpha", rank),),
            reading=_read_alpha,
            writing=_write_alpha,
        )
        for rank in (1, 2, 3, 4)
    ),
    Kind("prelu", "torch", (Weight("weight", "alpha", 1),)),
)
