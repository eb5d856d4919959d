"""What a conversion by kinds must say: what it cannot know, and what a layer needs besides its weights.

Sources: keras/src/layers/normalization/*.py (epsilon 1e-3, momentum 0.99) and torch/nn/modules/batchnorm.py
(eps 1e-5, momentum 0.1 of the new value); keras/src/layers/rnn/*.py; the padding of
tensorflow/core/framework/common_shape_fns.cc (SAME).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ckpttool.errors import MappingError, some
from ckpttool.leaf import Leaf
from ckpttool.mapping.kinds import IN_OUT, OUT_IN
from ckpttool.mapping.kinds.attention import HEADS
from ckpttool.mapping.layers import Layer
from ckpttool.mapping.modules import OWN_CALL, TITLE

_EPSILON = "epsilon is 0.001 in Keras and 1e-5 in PyTorch unless the program says otherwise"
_SIGMOID = (
    "PyTorch's gates are sigmoids, and Keras's hard_sigmoid (the default of old versions) is another function"
)
NOTES: dict[str, str] = {
    "convolution": (
        "convolutions: for SAME and strides above 1 Keras pads the end more, unlike padding=k//2; a "
        "transposed one crops so too"
    ),
    "batch_norm": f"batch norms: {_EPSILON}; Keras's momentum m is PyTorch's 1 - m",
    "layer_norm": f"layer and group norms: {_EPSILON}",
    "rms_norm": "RMS norms: epsilon is 1e-6 in Keras, in PyTorch that of the element type",
    "lstm": f"LSTMs: {_SIGMOID}",
    "gru": f"GRUs: PyTorch's is Keras's with reset_after=True; {_SIGMOID}",
    "simple_rnn": "simple RNNs: the activation is tanh unless the program says relu",
    "attention": "attentions: PyTorch's module must be told the number of heads",
}
# What the file may say of it, by the settings' names in either framework.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "convolution": ("padding", "padding_mode", "output_padding", "strides", "stride", "data_format"),
    "batch_norm": ("epsilon", "eps", "momentum"),
    "layer_norm": ("epsilon", "eps"),
    "rms_norm": ("epsilon", "eps"),
    "lstm": ("activation", "recurrent_activation", "go_backwards"),
    "gru": ("activation", "recurrent_activation", "go_backwards"),
    "simple_rnn": ("activation", "nonlinearity", "go_backwards"),
    "attention": ("num_heads",),
}
_MOST = 4
_MOST_OPTIONS = 12
_KIND = re.compile(rf"--kind '{TITLE}=[^']*'")


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


# Settings by what they are called here: in which kinds, and their names in either framework.
_COMPARED: tuple[tuple[str, frozenset[str], tuple[str, ...]], ...] = (
    ("epsilon", frozenset(("batch_norm", "layer_norm", "layer_norm_images", "rms_norm")), ("epsilon", "eps")),
    ("dilation", frozenset(("convolution", "depthwise", "separable")), ("dilation_rate", "dilation")),
    ("strides", frozenset(("convolution", "depthwise", "separable")), ("strides", "stride")),
    ("groups", frozenset(("convolution",)), ("groups",)),
    ("heads", frozenset(("attention",)), ("num_heads",)),
    ("activation", frozenset(("simple_rnn",)), ("activation", "nonlinearity")),
    ("max_norm", frozenset(("embedding",)), ("max_norm",)),
)
# What PyTorch's cells compute, whose Keras counterparts have a setting for it.
_OF_CELLS: dict[str, object] = {
    "activation": "tanh",
    "recurrent_activation": "sigmoid",
    "go_backwards": False,
}
_EPSILON_RANGE = 1e-3
# The half of a bidirectional cell that goes backwards by itself.
_REVERSED = re.compile(r"_reverse\b|\bbackward")


def settings(layer: Layer) -> dict[str, object]:
    """Return what is recorded of a layer's settings that change what it computes, in one spelling."""
    kind, about, held = layer.kinds[0], layer.about, layer.about.settings
    found: dict[str, object] = {}
    for name, kinds, spellings in _COMPARED:
        value = next((held[each] for each in spellings if held.get(each) is not None), None)
        if value is not None and kind.name in kinds:
            found[name] = _plain(value, several=name in ("dilation", "strides"))
    if kind.name in ("lstm", "gru"):
        torch = kind.framework == "torch" and about.cls
        for name, usual in _OF_CELLS.items():
            if name == "go_backwards" and _REVERSED.search(layer.title):
                continue
            if torch or isinstance(held.get(name), (str, bool)):
                found[name] = usual if torch else held[name]
    cls = about.cls or _class_in(layer)
    if kind.name in _NORM_LAYERS and cls in _NORM_GROUPS:
        spelling = _NORM_GROUPS[cls]
        many = held.get(spelling)
        of_groups = _INSTANCE if many == -1 else _GROUPS if many is None else f"over {many} groups"
        found["norm"] = of_groups if spelling else "over all channels"
    return found


def recorded_differences(source: Layer, target: Layer) -> Iterator[tuple[str, str, str]]:
    """Go through settings that both sides record and that make the model compute something else.

    Each is a name with the source's and the model's value. Strides, groups and directions are left out, which
    two layers may say in different ways.
    """
    theirs, ours = settings(source), settings(target)
    for name in _DECIDING:
        known = name in theirs and name in ours and not _same(theirs[name], ours[name])
        if known and "separable" not in f"{source.about.cls} {target.about.cls}".lower():
            yield name, _shown(theirs[name]), _shown(ours[name])


_DECIDING = ("epsilon", "norm", "heads", "dilation", "activation", "recurrent_activation")
_NORM_LAYERS = ("layer_norm", "layer_norm_images")
_INSTANCE, _GROUPS = "over each channel", "over groups"
# The setting of groups of the norms that are stored alike; a layer norm has none.
_NORM_GROUPS = {
    "LayerNorm": "",
    "LayerNormalization": "",
    "GroupNorm": "num_groups",
    "GroupNormalization": "groups",
}


def _class_in(layer: Layer) -> str:
    """Return the class that Keras's own name of a layer says, as `layer_normalization_1` does."""
    step = re.sub(r"_\d+\Z", "", layer.name[-1]) if layer.name else ""
    return {
        "layer_normalization": "LayerNormalization",
        "group_normalization": "GroupNormalization",
        "einsum_dense": "EinsumDense",
    }.get(step, "")


def _plain(value: object, *, several: bool) -> object:
    """Return a setting in the form that is compared: one number for several equal ones."""
    if isinstance(value, (list, tuple)) and several:
        return value[0] if len(set(map(str, value))) == 1 else tuple(value)
    return tuple(value) if isinstance(value, list) else value


# Where a program says nothing: keras/src/layers/normalization/*.py,
# torch/nn/modules/{batchnorm,normalization}.py.
_USUAL_EPSILON: dict[tuple[str, str], tuple[str, float]] = {
    ("tensorflow", "rms_norm"): ("Keras", 1e-6),
    ("torch", "rms_norm"): ("PyTorch", 2.0**-23),
    **{("tensorflow", kind): ("Keras", 1e-3) for kind in ("batch_norm", "layer_norm", "layer_norm_images")},
    **{("torch", kind): ("PyTorch", 1e-5) for kind in ("batch_norm", "layer_norm", "layer_norm_images")},
}


def differences(pairs: Iterable[tuple[Layer, Layer]], *, foreign: bool) -> Iterator[str]:
    """Go through sentences for the settings in which a layer and that of the model differ, or may.

    Where the source is `foreign` and does not record an epsilon, its framework's default is compared.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    unrecorded: dict[tuple[str, float, str], list[str]] = {}
    for source, target in pairs:
        theirs, ours = settings(source), settings(target)
        usual = _USUAL_EPSILON.get((source.kinds[0].framework, source.kinds[0].name))
        unsure = foreign and usual and "epsilon" in ours and "epsilon" not in theirs
        if usual and unsure and not _same(usual[1], ours["epsilon"]):
            unrecorded.setdefault((*usual, _shown(ours["epsilon"])), []).append(target.title)
        for name in theirs.keys() & ours.keys():
            if not _same(theirs[name], ours[name]):
                found.setdefault((name, _shown(theirs[name]), _shown(ours[name])), []).append(target.title)
    for (name, one, other), titles in found.items():
        yield f"{some(titles, 3)}: {name} is {one} in the source and {other} in the model"
    for (framework, default, held), titles in unrecorded.items():
        yield (
            f"{some(titles, 3)}: epsilon is the model's {held}; the source does not record its own, and "
            f"{framework}'s default is {default:g} (set this if the source's program set none)"
        )


def own_calls(targets: Iterable[Layer]) -> Iterator[str]:
    """Go through sentences for the model's layers whose class changes what its base computes."""
    found: dict[tuple[str, str], list[str]] = {}
    for layer in targets:
        own = layer.about.settings.get(OWN_CALL)
        if own:
            found.setdefault((str(own), layer.about.cls), []).append(layer.title)
    for (own, base), titles in found.items():
        yield f"{some(titles, 3)}: {own} computes from its weights what {base} does"


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _EPSILON_RANGE * max(abs(one), abs(other))
    if {one, other} & {_INSTANCE, _GROUPS}:
        # A group for each channel, or an unrecorded number of groups, may be any number of them.
        return all(str(each).endswith("groups") or each == _INSTANCE for each in (one, other))
    return one == other


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def left(names: Sequence[str]) -> tuple[str, ...]:
    """Return the sentence for tensors without a place in the target, none if there are none."""
    if not names:
        return ()
    have = "has" if len(names) == 1 else "have"
    return (f"{some(names, 2)} {have} no place in the target, which computes the same without",)


def without_classes(done: Iterable[tuple[Layer, Mapping[str, Leaf]]]) -> tuple[str, ...]:
    """Return what is assumed of layers whose class the file does not record.

    Of a matrix, which axis has the outputs; of a lone weight [C, S, S], that it is a convolution's and no
    norm's over an image; of two vectors in a module that no word calls a norm, that they are one's. Raise
    MappingError for square matrices of a model whose other matrices are the other way round, and of an
    EinsumDense without its equation.
    """
    square: dict[str, list[str]] = {}
    turned: dict[str, list[str]] = {}
    equations: list[str] = []
    images: list[str] = []
    norms: list[str] = []
    for layer, group in done:
        kind, about = layer.kinds[0], layer.about
        if _may_be_a_norm(layer, group):
            images.append(layer.title)
        shape = next((leaf.shape for leaf in group.values() if len(leaf.shape) == 2), (0, 1))
        if layer.given:
            continue
        if kind.name != "dense":
            unsaid = kind.name == "layer_norm" and not (about.cls or _NORM.search(layer.title.lower()))
            norms += [layer.title] if unsaid else []
            continue
        if not about.cls and kind.form in (IN_OUT, OUT_IN):
            turned.setdefault(kind.framework, []).append(layer.title)
        elif shape[0] == shape[1] > 1:
            cls = about.cls or _class_in(layer)
            einsum = cls.replace("_", "").lower() == "einsumdense" and "equation" not in about.settings
            if einsum:
                equations.append(layer.title)
            elif not about.cls:
                square.setdefault(kind.framework, []).append(layer.title)
    for name in turned.keys() & square.keys():
        raise MappingError(
            f"square matrices may be [out, in] or [in, out]: {some(turned[name], 2)} is {_TURNED[name]}, as"
            " the length of its bias shows",
            path=some(square[name], 3),
            hint=f"--kind '{square[name][0]}=dense{_FORM[name]}' if it is {_TURNED[name]} as well,"
            f" --kind '{square[name][0]}=dense' if not",
        )
    _require_equations(equations)
    by_bias = (
        f"{some(names, 3)}: matrix {_TURNED[name]}, as the length of its bias shows"
        for name, names in turned.items()
    )
    by_default = (
        f"{some(names, 3)}: square, read as {_USUAL[name]} because the file has no classes"
        f" (if {_TURNED[name]}: {_options(names, _FORM[name])})"
        for name, names in square.items()
    )
    by_class = (
        f"{some(names, 3)}: {what}"
        for names, what in (
            (images, "read as Conv1d, not as a LayerNorm over an image, because the file has no classes"),
            (norms, "two vectors, read as a layer norm because the file has no classes"),
        )
        if names
    )
    return (*by_bias, *by_default, *by_class)


def _require_equations(squares: Sequence[str]) -> None:
    """Raise MappingError for square matrices of which the equation is not known."""
    if squares:
        raise MappingError(
            "the matrix of an EinsumDense is square, and the file does not hold its equation",
            path=some(squares, 3),
            hint=f"--kind '{squares[0]}=dense' if the equation takes [in, out], as 'ab,bc->ac' does, --kind"
            f" '{squares[0]}=dense_{OUT_IN}' if [out, in]",
        )


def _options(titles: Sequence[str], form: str) -> str:
    """Return the option that states the orientation, for each of the layers."""
    shown = " ".join(f"--kind '{title}=dense{form}'" for title in titles[:_MOST_OPTIONS])
    more = len(titles) - _MOST_OPTIONS
    return f"{shown} and so on for {more} more" if more > 0 else shown


def _may_be_a_norm(layer: Layer, group: Mapping[str, Leaf]) -> bool:
    """Return whether a convolution's lone weight [C, S, S] could be a norm's over an image of equal sides."""
    shape = next(iter(group.values())).shape if len(group) == 1 else ()
    unsaid = layer.kinds[0].name == "convolution" and not (layer.about.cls or layer.given)
    return unsaid and len(shape) == 3 and shape[1] == shape[2] > 1


# Words in the names of norms: of Flax, haiku, Hugging Face and timm as well.
_NORM = re.compile(r"norm|(^|[^a-z])ln|bn(\d|_|/|\Z)|layer_?n")
_FORM = {"torch": f"_{IN_OUT}", "tensorflow": f"_{OUT_IN}"}
_USUAL = {"torch": "nn.Linear [out, in]", "tensorflow": "Dense [in, out]"}
_TURNED = {"torch": "[in, out]", "tensorflow": "[out, in]"}


class Why(NamedTuple):
    """Why a layer is not converted, and the option that helps, written for a layer called `TITLE`."""

    reason: str
    hint: str = ""

    def sentence(self, titles: Sequence[str]) -> str:
        """Return the sentence for all layers of which this is true, with an option for each of them."""
        hint, reason = (_KIND.sub(partial(_each, titles), text) for text in (self.hint, self.reason))
        return f"{some(titles, 3)}: {reason}" + (f" ({hint})" if hint else "")


def _each(titles: Sequence[str], option: re.Match[str]) -> str:
    """Return an option once for each layer, of many for the first ones."""
    options = " ".join(option[0].replace(TITLE, title) for title in titles[:_MOST_OPTIONS])
    more = len(titles) - _MOST_OPTIONS
    return f"{options} and so on for {more} more" if more > 0 else options


def ambiguous(layer: Layer) -> Why:
    """Return that a layer may be of several kinds."""
    names = list(dict.fromkeys(kind.option for kind in layer.kinds))
    able = dict.fromkeys(kind.option for kind in layer.kinds if kind.refused is None)
    options = " or ".join(f"--kind '{TITLE}={name}'" for name in able)
    return Why(f"may be {' or '.join(names)}, which go different ways", options)


def refused(error: MappingError) -> Why:
    """Return that a layer has no equivalent, or what is missing for one."""
    if error.message == HEADS:
        return Why(error.message, f"--kind '{TITLE}=attention:HEADS'")
    return Why(error.message + (f" (found {error.found})" if error.found else ""))
