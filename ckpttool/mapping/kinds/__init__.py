"""Layer kinds: what each framework calls a layer's tensors, and which rules take them to the canonical form.

Canonical names and orientations are TensorFlow's where it has one: dense kernel [in, out]. A kind is
recognised by the names and ranks that stand together under one module, never by a shape alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from ckpttool.leaf import Leaf
from ckpttool.mapping.kinds import attention, convolutions, dense, norms, recurrent, tf1_cells
from ckpttool.mapping.kinds.dense import IN_OUT, OUT_IN, POINTWISE, ROW_BIAS
from ckpttool.mapping.kinds.kind import UNTOLD, Group, Kind, Row, Told, Way, Weight
from ckpttool.mapping.kinds.norms import AXES

__all__ = [
    "AXES",
    "COMPOSED",
    "IN_OUT",
    "KINDS",
    "NUMBERED",
    "OUT_IN",
    "POINTWISE",
    "ROW_BIAS",
    "SPELLING",
    "UNTOLD",
    "Group",
    "Kind",
    "Row",
    "Told",
    "Way",
    "Weight",
    "asked",
    "candidates",
    "oriented",
    "recognise",
]

KINDS: tuple[Kind, ...] = (
    *dense.KINDS,
    *convolutions.KINDS,
    *norms.KINDS,
    *recurrent.KINDS,
    *tf1_cells.KINDS,
    *attention.KINDS,
)
# Those whose tensors stand in several modules below one.
COMPOSED: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind.is_composed)

# Layers whose variables a Keras file only numbers, in the order in which the layer makes them. What such a
# layer is, only a model that is filled or a user tells (keras/src/saving/saving_lib.py, save_own_variables).
NUMBERED: tuple[Kind, ...] = (
    Kind("dense", "tensorflow", (Weight("vars/0", "kernel", 2),)),
    Kind("embedding", "tensorflow", (Weight("vars/0", "embeddings", 2),)),
    Kind("layer_norm", "tensorflow", (Weight("vars/0", "scale", 1), Weight("vars/1", "offset", 1))),
    Kind(
        "batch_norm",
        "tensorflow",
        tuple(
            Weight(f"vars/{number}", name, 1)
            for number, name in enumerate(("scale", "offset", "mean", "variance"))
        ),
    ),
    Kind("rms_norm", "tensorflow", (Weight("vars/0", "scale", 1),)),
    Kind("prelu", "tensorflow", (Weight("vars/0", "alpha", 1),)),
    *convolutions.NUMBERED_DEPTHWISE,
)

# How a kind is spelled when it is written; the first row of a framework that fits.
SPELLING: dict[tuple[str, str], Kind] = {}
for _kind in KINDS:
    SPELLING.setdefault((_kind.framework, _kind.name), _kind)


@cache
def _by_names() -> Mapping[tuple[str, frozenset[str]], tuple[Kind, ...]]:
    """Return a framework's kinds by the names that their tensors have: few of many fit any module's."""
    found: dict[tuple[str, frozenset[str]], tuple[Kind, ...]] = {}
    for kind in KINDS:
        for names in kind.namings:
            found[kind.framework, names] = (*found.get((kind.framework, names), ()), kind)
    return found


# What agents' networks are made of, and whose spellings their codebases use.
_OF_AGENTS = frozenset(("dense", "layer_norm"))
_FORMS_OF_AGENTS = frozenset(("", "sonnet"))


def candidates(group: Mapping[str, Leaf], framework: str, module: str = "") -> tuple[Kind, ...]:
    """Return every kind of layer that these tensors of one module can be, refused ones too.

    A kind that the module's name tells is the only one.
    """
    able = [kind for kind in _by_names().get((framework, frozenset(group)), ()) if kind.fits(group)]
    # The orientation of a matrix that is not usual is taken where the length of the bias leaves no other.
    usual = [kind for kind in able if not kind.is_selected]
    biased = len(group) > 1 and any(len(leaf.shape) == 1 for leaf in group.values())
    fitting = usual or (able if biased else [])
    named = [kind for kind in fitting if kind.modules is not None and re.fullmatch(kind.modules, module)]
    return tuple(named or (kind for kind in fitting if kind.modules is None))


def asked(group: Mapping[str, Leaf], framework: str) -> tuple[Kind, ...]:
    """Return the kinds that these tensors can be only where an option or a class selects them."""
    able = _by_names().get((framework, frozenset(group)), ())
    return tuple(kind for kind in able if kind.is_selected and kind.fits(group))


def oriented(group: Mapping[str, Leaf], framework: str) -> tuple[Kind, ...]:
    """Return the dense layers that these tensors can be, of either orientation."""
    able = _by_names().get((framework, frozenset(group)), ())
    return tuple(kind for kind in able if kind.name == "dense" and kind.fits(group))


def recognise(group: Mapping[str, Leaf], framework: str) -> Kind | None:
    """Return the kind of an agent's layer that these tensors of one module make, or None.

    A PyTorch matrix without a bias may be an embedding, which is not transposed: a layout must say.
    """
    fitting = candidates(group, framework)
    if len({kind.name for kind in fitting}) != 1 or fitting[0].name not in _OF_AGENTS:
        return None
    if fitting[0].form not in _FORMS_OF_AGENTS:
        return None
    whole = len(group) == len(fitting[0].weights)
    return fitting[0] if whole or fitting[0].name == "dense" else None
