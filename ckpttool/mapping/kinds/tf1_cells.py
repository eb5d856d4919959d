"""Recurrent cells of TensorFlow 1, and the cells that have no equivalent.

BasicLSTMCell and LSTMCell keep one kernel [in + units, 4 * units], inputs first, with the gates i, j, f, o,
and add a forget bias of 1 when they run: here it is the second bias, so that no number is rounded.
BasicRNNCell keeps such a kernel too, without gates.

Sources: tf_keras/src/layers/rnn/legacy_cells.py; keras/src/layers/rnn/gru.py (reset_after);
sonnet/src/recurrent.py (GRU); torch/nn/modules/rnn.py (proj_size).
"""

from __future__ import annotations

from functools import partial

from ckpttool import dtypes
from ckpttool.leaf import Leaf
from ckpttool.mapping.kinds.kind import Group, Kind, Row, Told, Way, Weight, require
from ckpttool.mapping.kinds.recurrent import BIASES, KERNELS
from ckpttool.mapping.parts import Blocks, Summed, Take, Term
from ckpttool.mapping.rules import KEEP, Rule, chained
from ckpttool.source import Inline

# i, j (which others call g), f, o.
_ORDER = (0, 2, 1, 3)
_FORGET = 1.0
_ASSUMED = "the forget bias that TensorFlow 1's LSTM cells add when they run is 1"


def _fits(gates: int, group: Group) -> bool:
    rows, width = group["kernel"].shape
    return width % gates == 0 and rows > width // gates and group["bias"].shape == (width,)


def _order(gates: int, axis: int) -> Rule:
    return Blocks(axis, _ORDER) if gates == len(_ORDER) else KEEP


def _forget(dtype: str, width: int, value: float) -> Leaf:
    """Return a canonical bias that is `value` for the forget gate and 0 for the others."""
    import numpy as np

    bias = np.zeros((4, width // 4), dtypes.numpy_dtype(dtype))
    bias[1] = value
    return Leaf(dtype, (width,), Inline(bias.tobytes()), "")


def _read(gates: int, group: Group, told: Told) -> Way:
    rows, width = group["kernel"].shape
    inputs = rows - width // gates
    order = _order(gates, 1)
    ways = (
        Row("kernel", KERNELS[0], chained(Take(0, 0, inputs, rows), order)),
        Row("kernel", KERNELS[1], chained(Take(0, inputs, rows, rows), order)),
        Row("bias", BIASES[0], _order(gates, 0)),
    )
    if gates == 1:
        return Way(ways)
    value = _FORGET if told.number is None else float(told.number)
    fills = {BIASES[1]: _forget(group["kernel"].dtype, width, value)}
    return Way(ways, fills, assumed=(_ASSUMED,) if told.number is None else ())


def _write(gates: int, canonical: Group, told: Told) -> Way:
    """Write one kernel, and one bias less what the cell will add."""
    require(BASIC[gates], canonical, (*KERNELS, BIASES[0]))
    (inputs, width), bias = canonical[KERNELS[0]].shape, canonical[BIASES[0]]
    whole = inputs + width // gates
    order = _order(gates, 1).inverse(canonical[KERNELS[0]])
    back = _order(gates, 0).inverse(bias)
    given = [name for name in BIASES if name in canonical]
    terms = len(given) + (gates > 1)
    last = (Term(terms),) if terms > 1 else ()
    rows = (
        Row("kernel", KERNELS[0], chained(order, Take(0, 0, inputs, whole).inverse(bias))),
        Row("kernel", KERNELS[1], chained(order, Take(0, inputs, whole, whole).inverse(bias))),
        *(Row("bias", name, chained(back, *last)) for name in given),
    )
    if gates == 1:
        return Way(rows)
    value = _FORGET if told.number is None else float(told.number)
    less = back.leaf(_forget(bias.dtype, width, -value))
    source = Summed(bias.dtype, (width,), terms, (less.source,) if isinstance(less, Leaf) else ())
    assumed = (_ASSUMED,) if told.number is None else ()
    return Way(rows, {"bias": Leaf(bias.dtype, (width,), source, "")}, assumed=assumed)


def _basic(name: str, gates: int, modules: str) -> Kind:
    return Kind(
        name,
        "tensorflow",
        (Weight("kernel", KERNELS[0], 2), Weight("bias", BIASES[0], 1)),
        "tf1",
        also=partial(_fits, gates),
        reading=partial(_read, gates),
        writing=partial(_write, gates),
        modules=modules,
    )


BASIC = {
    4: _basic("lstm", 4, r"(basic_)?lstm_cell(_\d+)?"),
    1: _basic("simple_rnn", 1, r"(basic_)?rnn_cell(_\d+)?"),
}
_RESETS_BEFORE = "a GRU that resets before the product (reset_after=False) has no equivalent in PyTorch"
_PROJECTED = "an LSTM with a projection has no equivalent in Keras, and PyTorch's another form"
_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def _is_gru(recurrent: str, group: Group) -> bool:
    units, width = group[recurrent].shape
    biases = [leaf.shape for leaf in group.values() if len(leaf.shape) == 1]
    return width == 3 * units and biases in ([], [(width,)])


def _refused(name: str, framework: str, why: str, *weights: Weight, cell: str = "", form: str = "") -> Kind:
    also = partial(_is_gru, cell) if cell else None
    return Kind(name, framework, weights, form, also=also, refused=why)


def _unread(name: str, *, optional: bool = False) -> Weight:
    return Weight(name, "", 1 if name.rpartition("/")[2].startswith("b") else 2, optional=optional)


_GRU = partial(_refused, "gru_reset_before", "tensorflow", _RESETS_BEFORE)
KINDS: tuple[Kind, ...] = (
    *BASIC.values(),
    _GRU(
        _unread("kernel"),
        _unread("recurrent_kernel"),
        _unread("bias", optional=True),
        cell="recurrent_kernel",
    ),
    _GRU(_unread("w_i"), _unread("w_h"), _unread("b"), cell="w_h", form="sonnet"),
    _GRU(*(_unread(f"{gate}/{name}") for gate in ("gates", "candidate") for name in ("kernel", "bias"))),
    _refused(
        "lstm_projected",
        "tensorflow",
        _PROJECTED,
        *map(_unread, ("kernel", "bias", "projection/kernel")),
        form="tf1",
    ),
    _refused(
        "lstm_projected",
        "torch",
        _PROJECTED,
        *(_unread(name, optional="bias" in name) for name in _PARTS),
        _unread("weight_hr"),
    ),
)
