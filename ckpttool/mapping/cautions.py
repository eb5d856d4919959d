"""What a conversion by kinds must say: what it cannot know, and what a layer needs besides its weights.

Sources: keras/src/layers/normalization/*.py (epsilon 1e-3, momentum 0.99) and torch/nn/modules/batchnorm.py
(eps 1e-5, momentum 0.1 of the new value); keras/src/layers/rnn/*.py; the padding of
tensorflow/core/framework/common_shape_fns.cc (SAME).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckpttool.errors import MappingError, some
from ckpttool.mapping.kinds.attention import HEADS
from ckpttool.mapping.layers import Layer

_EPSILON = "epsilon is 0.001 in Keras and 1e-5 in PyTorch unless the program says otherwise"
_SIGMOID = (
    "PyTorch's gates are sigmoids, and Keras's hard_sigmoid (the default of old versions) is another function"
)
NOTES: dict[str, str] = {
    "convolution": "convolutions: for SAME and strides above 1 Keras pads the end more, unlike padding=k//2",
    "batch_norm": f"batch norms: {_EPSILON}; Keras's momentum m is PyTorch's 1 - m",
    "layer_norm": f"layer and group norms: {_EPSILON}",
    "rms_norm": "RMS norms: epsilon is 1e-6 in Keras, in PyTorch that of the element type",
    "lstm": f"LSTMs: {_SIGMOID}",
    "gru": f"GRUs: {_SIGMOID}",
    "simple_rnn": "simple RNNs: the activation is tanh unless the program says relu",
    "attention": "attentions: PyTorch's module must be told the number of heads",
}
# What the file may say of it, by the settings' names in either framework.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "convolution": ("padding", "strides", "stride", "data_format"),
    "batch_norm": ("epsilon", "eps", "momentum"),
    "layer_norm": ("epsilon", "eps"),
    "rms_norm": ("epsilon", "eps"),
    "lstm": ("activation", "recurrent_activation", "go_backwards"),
    "gru": ("activation", "recurrent_activation", "go_backwards"),
    "simple_rnn": ("activation", "nonlinearity", "go_backwards"),
    "attention": ("num_heads",),
}
_MOST = 4


def notes(done: Iterable[Layer]) -> tuple[str, ...]:
    """Return one line for each kind that needs more than weights, with what the file tells of it."""
    told: dict[str, dict[str, None]] = {}
    for layer in done:
        name = layer.kinds[0].name
        if name in NOTES:
            facts = [f"{s} {layer.about.settings[s]}" for s in _SETTINGS[name] if s in layer.about.settings]
            told.setdefault(name, {}).update({", ".join(facts): None} if facts else {})
    return tuple(
        f"{NOTES[name]} (here {'; '.join(list(facts)[:_MOST])})" if facts else NOTES[name]
        for name, facts in told.items()
    )


def left(names: Sequence[str]) -> tuple[str, ...]:
    """Return the sentence for tensors without a place in the target, none if there are none."""
    if not names:
        return ()
    have = "has" if len(names) == 1 else "have"
    return (f"{some(names, 2)} {have} no place in the target, which computes the same without",)


class Why(NamedTuple):
    """Why a layer is not converted, and the option that helps, written for a layer called `_TITLE`."""

    reason: str
    hint: str = ""

    def sentence(self, titles: Sequence[str]) -> str:
        """Return the sentence for all layers of which this is true."""
        hint = self.hint.replace(_TITLE, titles[0])
        return f"{some(titles, 3)}: {self.reason}" + (f" ({hint})" if hint else "")


_TITLE = "\0"


def ambiguous(layer: Layer) -> Why:
    """Return that a layer may be of several kinds."""
    names = list(dict.fromkeys(kind.name for kind in layer.kinds))
    able = dict.fromkeys(kind.name for kind in layer.kinds if kind.refused is None)
    options = " or ".join(f"--kind '{_TITLE}={name}'" for name in able)
    return Why(f"may be {' or '.join(names)}, which go different ways", options)


def refused(error: MappingError) -> Why:
    """Return that a layer has no equivalent, or what is missing for one."""
    if error.message == HEADS:
        return Why(error.message, f"--kind '{_TITLE}=attention:8'")
    return Why(error.message + (f" (found {error.found})" if error.found else ""))
