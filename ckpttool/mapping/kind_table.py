"""The table of layer kinds: which kinds the tensors of a module can be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial

from ckpttool.core import dtypes
from ckpttool.core.kinds import count_gates, gate_order
from ckpttool.core.source import Inline, Shape
from ckpttool.core.tree import Leaf
from ckpttool.mapping import layer_kinds
from ckpttool.mapping.layer_kinds import (
    BIASES,
    KERNELS,
    TORCH_CELL_WEIGHTS,
    Group,
    LayerFacts,
    LayerKind,
    LayerMapping,
    TensorMapping,
    WeightSpec,
    require_tensors,
)
from ckpttool.mapping.rules import KEEP, AxisSlice, BlockOrder, Rule, SumSource, SumTerm, chain_rules

# BasicLSTMCell and LSTMCell store one kernel [in + units, 4 * units], inputs first, with the gates i, j, f,
# o, and add a forget bias of 1 at run time: here it is the second bias, so that no number is rounded.
# BasicRNNCell stores the same kind of kernel, without gates.
#
# Sources: tf_keras/src/layers/rnn/legacy_cells.py; keras/src/layers/rnn/gru.py (reset_after);
# sonnet/src/recurrent.py (GRU); torch/nn/modules/rnn.py (proj_size).
_FORGET = 1.0
_ASSUMED = "TensorFlow 1's LSTM cells add a forget bias of 1 at run time"


def _fits_cell(gates: int, group: Group) -> bool:
    rows, width = group["kernel"].shape
    return width % gates == 0 and rows > width // gates and group["bias"].shape == (width,)


def _gate_order_rule(gates: int, axis: int) -> Rule:
    return BlockOrder(axis, gate_order("lstm", "tf1")) if gates == count_gates("lstm") else KEEP


def _forget_bias(dtype: str, width: int, value: float) -> Leaf:
    """Return a canonical bias that is `value` for the forget gate and 0 for the others."""
    import numpy as np

    bias = np.zeros((4, width // 4), dtypes.numpy_dtype(dtype))
    bias[1] = value
    return Leaf(dtype, (width,), Inline(bias.tobytes()), "")


def _read_cell(gates: int, group: Group, facts: LayerFacts) -> LayerMapping:
    rows, width = group["kernel"].shape
    inputs = rows - width // gates
    order = _gate_order_rule(gates, 1)
    ways = (
        TensorMapping("kernel", KERNELS[0], chain_rules(AxisSlice(0, 0, inputs, rows), order)),
        TensorMapping("kernel", KERNELS[1], chain_rules(AxisSlice(0, inputs, rows, rows), order)),
        TensorMapping("bias", BIASES[0], _gate_order_rule(gates, 0)),
    )
    if gates == 1:
        return LayerMapping(ways)
    value = _FORGET if facts.number is None else float(facts.number)
    fills = {BIASES[1]: _forget_bias(group["kernel"].dtype, width, value)}
    return LayerMapping(ways, fills, assumed=(_ASSUMED,) if facts.number is None else ())


def _write_cell(gates: int, canonical: Group, facts: LayerFacts) -> LayerMapping:
    """Write one kernel, and one bias without the constant that the cell adds."""
    require_tensors(BASIC[gates], canonical, (*KERNELS, BIASES[0]))
    (inputs, width), bias = canonical[KERNELS[0]].shape, canonical[BIASES[0]]
    whole = inputs + width // gates
    order = _gate_order_rule(gates, 1).inverse(canonical[KERNELS[0]])
    back = _gate_order_rule(gates, 0).inverse(bias)
    biases = [name for name in BIASES if name in canonical]
    terms = len(biases) + (gates > 1)
    last = (SumTerm(terms),) if terms > 1 else ()
    rows = (
        TensorMapping("kernel", KERNELS[0], chain_rules(order, AxisSlice(0, 0, inputs, whole).inverse(bias))),
        TensorMapping(
            "kernel", KERNELS[1], chain_rules(order, AxisSlice(0, inputs, whole, whole).inverse(bias))
        ),
        *(TensorMapping("bias", name, chain_rules(back, *last)) for name in biases),
    )
    if gates == 1:
        return LayerMapping(rows)
    value = _FORGET if facts.number is None else float(facts.number)
    less = back.leaf(_forget_bias(bias.dtype, width, -value))
    source = SumSource(bias.dtype, (width,), terms, (less.source,) if isinstance(less, Leaf) else ())
    assumed = (_ASSUMED,) if facts.number is None else ()
    return LayerMapping(rows, {"bias": Leaf(bias.dtype, (width,), source, "")}, assumed=assumed)


def _basic_cell_kind(name: str, gates: int, modules: str) -> LayerKind:
    return LayerKind(
        name,
        "tensorflow",
        (WeightSpec("kernel", KERNELS[0], 2), WeightSpec("bias", BIASES[0], 1)),
        "tf1",
        also=partial(_fits_cell, gates),
        reading=partial(_read_cell, gates),
        writing=partial(_write_cell, gates),
        modules=modules,
    )


BASIC = {
    4: _basic_cell_kind("lstm", 4, r"(basic_)?lstm_cell(_\d+)?"),
    1: _basic_cell_kind("simple_rnn", 1, r"(basic_)?rnn_cell(_\d+)?"),
}
_RESETS_BEFORE = "a GRU that resets before the product (reset_after=False) has no equivalent in PyTorch"
_PROJECTED = "an LSTM with a projection has no equivalent in Keras, and PyTorch stores it differently"


def _is_gru(recurrent: str, group: Group) -> bool:
    units, width = group[recurrent].shape
    biases = [leaf.shape for leaf in group.values() if len(leaf.shape) == 1]
    return width == 3 * units and biases in ([], [(width,)])


def _refused_cell_kind(
    name: str, framework: str, why: str, *weights: WeightSpec, cell: str = "", form: str = ""
) -> LayerKind:
    also = partial(_is_gru, cell) if cell else None
    return LayerKind(name, framework, weights, form, also=also, refused=why)


def _unread_weight(name: str, *, optional: bool = False) -> WeightSpec:
    return WeightSpec(name, "", 1 if name.rpartition("/")[2].startswith("b") else 2, optional=optional)


_GRU = partial(_refused_cell_kind, "gru_reset_before", "tensorflow", _RESETS_BEFORE)
TF1_KINDS: tuple[LayerKind, ...] = (
    *BASIC.values(),
    _GRU(
        _unread_weight("kernel"),
        _unread_weight("recurrent_kernel"),
        _unread_weight("bias", optional=True),
        cell="recurrent_kernel",
    ),
    _GRU(_unread_weight("w_i"), _unread_weight("w_h"), _unread_weight("b"), cell="w_h", form="sonnet"),
    _GRU(
        *(_unread_weight(f"{gate}/{name}") for gate in ("gates", "candidate") for name in ("kernel", "bias"))
    ),
    _refused_cell_kind(
        "lstm_projected",
        "tensorflow",
        _PROJECTED,
        *map(_unread_weight, ("kernel", "bias", "projection/kernel")),
        form="tf1",
    ),
    _refused_cell_kind(
        "lstm_projected",
        "torch",
        _PROJECTED,
        *(_unread_weight(name, optional="bias" in name) for name in TORCH_CELL_WEIGHTS),
        _unread_weight("weight_hr"),
    ),
)


KINDS: tuple[LayerKind, ...] = (
    *layer_kinds.DENSE_KINDS,
    *layer_kinds.CONVOLUTION_KINDS,
    *layer_kinds.NORM_KINDS,
    *layer_kinds.RECURRENT_KINDS,
    *TF1_KINDS,
    *layer_kinds.KINDS,
)
# Layers with tensors in several child modules.
COMPOSED: tuple[LayerKind, ...] = tuple(kind for kind in KINDS if kind.is_composed)

# Layers whose variables a Keras file only numbers, in the order in which the layer creates them. The kind of
# such a layer comes only from a model to be filled or from the user (keras/src/saving/saving_lib.py,
# save_own_variables).
NUMBERED: tuple[LayerKind, ...] = (
    LayerKind("dense", "tensorflow", (WeightSpec("vars/0", "kernel", 2),)),
    LayerKind("embedding", "tensorflow", (WeightSpec("vars/0", "embeddings", 2),)),
    LayerKind(
        "layer_norm", "tensorflow", (WeightSpec("vars/0", "scale", 1), WeightSpec("vars/1", "offset", 1))
    ),
    LayerKind(
        "batch_norm",
        "tensorflow",
        tuple(
            WeightSpec(f"vars/{number}", name, 1)
            for number, name in enumerate(("scale", "offset", "mean", "variance"))
        ),
    ),
    LayerKind("rms_norm", "tensorflow", (WeightSpec("vars/0", "scale", 1),)),
    LayerKind("prelu", "tensorflow", (WeightSpec("vars/0", "alpha", 1),)),
    *layer_kinds.NUMBERED_DEPTHWISE,
)

# Names used for writing a kind; the first row of a framework that fits.
SPELLING: dict[tuple[str, str], LayerKind] = {}
for _kind in KINDS:
    SPELLING.setdefault((_kind.framework, _kind.name), _kind)


@cache
def kinds_by_names() -> Mapping[tuple[str, frozenset[str]], tuple[LayerKind, ...]]:
    """Return a framework's kinds by tensor names, because only a few kinds match any module's names."""
    kinds: dict[tuple[str, frozenset[str]], tuple[LayerKind, ...]] = {}
    for kind in KINDS:
        for names in kind.namings:
            kinds[kind.framework, names] = (*kinds.get((kind.framework, names), ()), kind)
    return kinds


# Layers in agents' networks, with the names used by their codebases.
_OF_AGENTS = frozenset(("dense", "layer_norm"))
_FORMS_OF_AGENTS = frozenset(("", "sonnet", "noisy"))


def candidate_kinds(group: Mapping[str, Leaf], framework: str, module: str = "") -> tuple[LayerKind, ...]:
    """Return every kind of layer that these tensors of one module can be, including refused ones.

    If the module's name determines the kind, return only that kind. Canonical names and orientations are
    TensorFlow's if it has one: dense kernel [in, out]. A kind is recognised by the names and ranks of the
    tensors in a module, never by a shape alone.
    """
    fitting = _fitting_kinds(framework, tuple((name, leaf.dtype, leaf.shape) for name, leaf in group.items()))
    named = [kind for kind in fitting if kind.modules is not None and re.fullmatch(kind.modules, module)]
    return tuple(named or (kind for kind in fitting if kind.modules is None))


@lru_cache(maxsize=4096)
def _fitting_kinds(framework: str, forms: tuple[tuple[str, str, Shape], ...]) -> tuple[LayerKind, ...]:
    """Return the kinds that tensors of these names, dtypes and shapes fit; networks repeat few forms."""
    group = {name: Leaf(dtype, shape, Inline(b""), name) for name, dtype, shape in forms}
    able = [kind for kind in kinds_by_names().get((framework, frozenset(group)), ()) if kind.fits(group)]
    # The unusual orientation of a matrix is used if the length of the bias excludes the usual one.
    usual = [kind for kind in able if not kind.is_selected]
    # A norm of one number computes nothing: a lone number is a slope.
    if all(leaf.shape == (1,) for leaf in group.values()):
        usual = [kind for kind in usual if kind.name == "prelu"] or usual
    biased = len(group) > 1 and any(len(leaf.shape) == 1 for leaf in group.values())
    return tuple(usual or (able if biased else []))


def selectable_kinds(group: Mapping[str, Leaf], framework: str) -> tuple[LayerKind, ...]:
    """Return the kinds that these tensors can be only if an option or a class selects them."""
    able = kinds_by_names().get((framework, frozenset(group)), ())
    return tuple(kind for kind in able if kind.is_selected and kind.fits(group))


def oriented_kinds(group: Mapping[str, Leaf], framework: str) -> tuple[LayerKind, ...]:
    """Return the dense layers that these tensors can be, in either orientation."""
    able = kinds_by_names().get((framework, frozenset(group)), ())
    return tuple(kind for kind in able if kind.name == "dense" and kind.fits(group))


def recognize_kind(group: Mapping[str, Leaf], framework: str) -> LayerKind | None:
    """Return the kind of an agent's layer formed by these tensors of one module, or None.

    A PyTorch matrix without a bias may be an embedding, which is not transposed: a layout must
    decide.
    """
    fitting = candidate_kinds(group, framework)
    if len({kind.name for kind in fitting}) != 1 or fitting[0].name not in _OF_AGENTS:
        return None
    if fitting[0].form not in _FORMS_OF_AGENTS:
        return None
    whole = len(group) == len(fitting[0].weights)
    return fitting[0] if whole or fitting[0].name == "dense" else None
