"""Dense layers after a flattening, and mappings by layer kind."""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, permutations
from math import prod
from types import MappingProxyType

from ckpttool.core import deferred, dtypes
from ckpttool.core.activations import (
    MIXED,
    NO_IMAGE,
    UNKNOWN,
    AxisOrder,
    FeaturePart,
    Part,
    Parts,
    framework_order,
    plain_order,
)
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError, abbreviate_list
from ckpttool.core.kinds import LAYER_TYPES, SPELLINGS, kinds_by_class, list_kinds
from ckpttool.core.source import Shape
from ckpttool.core.tree import Container, Leaf, Path, Tree, key
from ckpttool.mapping.layer_kinds import HEADS, IN_OUT, NO_FACTS, OUT_IN, LayerFacts, LayerKind
from ckpttool.mapping.layers import (
    NORM_KIND_NAMES,
    OWN_CALL,
    RECURRENT_KIND_NAMES,
    TITLE,
    Layer,
    LayerConversion,
    LayerOption,
    ModuleInfo,
    Name,
    canonical_tensors,
    convert_layer,
    find_layers,
    framework_kind,
    tensorflow_names,
    torch_names,
)
from ckpttool.mapping.orientation import decide_kinds
from ckpttool.mapping.rules import (
    KEEP,
    BlockOrder,
    ChannelOrder,
    Label,
    Move,
    Plan,
    Rule,
    chain_rules,
    object_graph_paths,
)

# Notes on a conversion by kinds: facts missing from the file, and requirements of a layer besides its
# weights.
_MOST = 4
_MOST_OPTIONS = 12
_KIND = deferred.compile(rf"--kind '{TITLE}=[^']*'")


def describe_kinds(done: Iterable[Layer]) -> tuple[str, ...]:
    """Return one line for each kind that needs more than weights, with the relevant facts from the file."""
    fields: dict[str, dict[str, None]] = {}
    for layer in done:
        kind, settings = LAYER_TYPES.get(layer.kinds[0].name), layer.about.settings
        if kind is not None and kind.note:
            words = (word for name in kind.noted for word in SPELLINGS[name])
            facts = [f"{word} {settings[word]}" for word in dict.fromkeys(words) if word in settings]
            fields.setdefault(kind.note, {}).update({", ".join(facts): None} if facts else {})
    return tuple(
        f"{note} (here {'; '.join(list(facts)[:_MOST])})" if facts else note for note, facts in fields.items()
    )


# Fixed computation of PyTorch's cells, for which the Keras counterparts have a setting.
_OF_CELLS: dict[str, object] = {
    "activation": "tanh",
    "recurrent_activation": "sigmoid",
    "go_backwards": False,
}
_EPSILON_RANGE = 1e-3
# The half of a bidirectional cell that is reversed anyway.
_REVERSED = deferred.compile(r"_reverse\b|\bbackward")


def layer_settings(layer: Layer) -> dict[str, object]:
    """Return a layer's recorded settings that affect its results, in a common form."""
    kind, about, held = layer.kinds[0], layer.about, layer.about.settings
    found: dict[str, object] = {}
    for name in LAYER_TYPES[kind.name].settings if kind.name in LAYER_TYPES else ():
        value = _find_setting(held, name)
        if value is not None:
            found[name] = _normalize_setting(value, several=name in ("dilation", "stride"))
    if kind.name in ("lstm", "gru"):
        torch = kind.framework == "torch" and about.cls
        for name, usual in _OF_CELLS.items():
            if name == "go_backwards" and _REVERSED.search(layer.title):
                continue
            if torch or isinstance(held.get(name), (str, bool)):
                found[name] = usual if torch else held[name]
    cls = about.cls or _class_from_name(layer)
    if kind.name in NORM_KIND_NAMES and kind.name in kinds_by_class().get(cls, ()):
        many = _find_setting(held, "groups")
        of_groups = _INSTANCE if many == -1 else _GROUPS if many is None else f"over {many} groups"
        found["norm"] = "over all channels"
        if cls.startswith(("Group", "Instance")):
            found["norm"] = of_groups if cls.startswith("Group") else _INSTANCE
    return found


def _find_setting(held: Mapping[str, object], name: str) -> object:
    """Return a setting by any of its names, None if it is not recorded.

    The `group` of a layer in an HDF5 file is its path there, and no number of groups.
    """
    return next(
        (
            value
            for word in SPELLINGS[name]
            if (value := held.get(word)) is not None and not (name == "groups" and isinstance(value, str))
        ),
        None,
    )


def recorded_differences(source: Layer, target: Layer) -> Iterator[tuple[str, str, str]]:
    """Yield settings recorded on both sides that change the model's results.

    Each is a name with the source's and the model's value. Strides, groups and directions are
    omitted, because two layers may record them in different ways.
    """
    theirs, ours = layer_settings(source), layer_settings(target)
    for name in _DECIDING:
        known = name in theirs and name in ours and not _is_same_setting(theirs[name], ours[name])
        if known and "separable" not in f"{source.about.cls} {target.about.cls}".lower():
            yield name, _format_setting(theirs[name]), _format_setting(ours[name])


_DECIDING = ("epsilon", "norm", "number of heads", "dilation", "activation", "recurrent_activation")
_INSTANCE, _GROUPS = "over each channel", "over groups"


def _class_from_name(layer: Layer) -> str:
    """Return the class in a layer name chosen by Keras, such as `layer_normalization_1`."""
    step = re.sub(r"_\d+\Z", "", layer.name[-1]).replace("_", "") if layer.name else ""
    classes = (cls for row in LAYER_TYPES.values() for cls in row.keras)
    return next((cls for cls in classes if cls.lower() == step), "")


def _normalize_setting(value: object, *, several: bool) -> object:
    """Return a setting in its comparable form: a single number for several equal ones."""
    if isinstance(value, (list, tuple)) and several:
        return value[0] if len(set(map(str, value))) == 1 else tuple(value)
    return tuple(value) if isinstance(value, list) else value


def _usual_epsilon(kind: LayerKind) -> tuple[str, float] | None:
    """Return the library of a layer that does not record its epsilon, and that library's default."""
    library = {"torch": "PyTorch"}.get(kind.framework, kind.form.title() or "Keras")
    defaults = LAYER_TYPES[kind.name].epsilons if kind.name in LAYER_TYPES else {}
    if library not in defaults:
        return None
    value = defaults[library]
    return library, 2.0**-23 if value is None else value  # of float32


def describe_differences(pairs: Iterable[tuple[Layer, Layer]], *, foreign: bool) -> Iterator[str]:
    """Yield a sentence for each setting in which a layer and its match in the model differ, or may differ.

    If the source is `foreign` and does not record an epsilon, its framework's default is compared.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    unrecorded: dict[tuple[str, float, str], list[str]] = {}
    for source, target in pairs:
        theirs, ours = layer_settings(source), layer_settings(target)
        usual = _usual_epsilon(source.kinds[0])
        unsure = foreign and usual and "epsilon" in ours and "epsilon" not in theirs
        if usual and unsure and not _is_same_setting(usual[1], ours["epsilon"]):
            unrecorded.setdefault((*usual, _format_setting(ours["epsilon"])), []).append(target.title)
        for name in theirs.keys() & ours.keys():
            if not _is_same_setting(theirs[name], ours[name]):
                found.setdefault(
                    (name, _format_setting(theirs[name]), _format_setting(ours[name])), []
                ).append(target.title)
    for (name, one, other), titles in found.items():
        yield f"{abbreviate_list(titles, 3)}: {name} is {one} in the source and {other} in the model"
    for (framework, default, held), titles in unrecorded.items():
        yield (
            f"{abbreviate_list(titles, 3)}: using the model's epsilon {held}; the source does not record "
            f"one, and the default in {framework} is {default:g} (set this value unless the source "
            "program set another)"
        )


def describe_own_calls(targets: Iterable[Layer]) -> Iterator[str]:
    """Yield a sentence for each model layer whose class changes what its base class computes."""
    found: dict[tuple[str, str], list[str]] = {}
    for layer in targets:
        own = layer.about.settings.get(OWN_CALL)
        if own:
            found.setdefault((str(own), layer.about.cls), []).append(layer.title)
    for (own, base), titles in found.items():
        yield f"{abbreviate_list(titles, 3)}: {own} computes the same as {base} from its weights"


def describe_assumed_products(targets: Iterable[Layer], tree: Tree) -> Iterator[str]:
    """Yield a sentence for square matrices of tf.Modules whose products no call shows."""
    found = []
    for layer in targets:
        shapes = [leaf.shape for leaf in layer.group(tree).values() if len(leaf.shape) == 2]
        dense = layer.kinds[0].name == "dense" and layer.kinds[0].framework == "tensorflow"
        seen = layer.about.cls != "Module" or OWN_CALL in layer.about.settings
        if dense and not seen and any(rows == columns > 1 for rows, columns in shapes):
            found.append(layer.title)
    if found:
        yield f"{abbreviate_list(found, 3)}: square in the model, assumed [in, out] because no call shows it"


def _is_same_setting(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _EPSILON_RANGE * max(abs(one), abs(other))
    if {one, other} & {_INSTANCE, _GROUPS}:
        # One group per channel, or an unrecorded number of groups, may be any number of groups.
        return all(str(each).endswith("groups") or each == _INSTANCE for each in (one, other))
    return one == other


def _format_setting(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def describe_leftovers(names: Sequence[str]) -> tuple[str, ...]:
    """Return the sentence for tensors without a place in the target, if there are any."""
    if not names:
        return ()
    have = "has" if len(names) == 1 else "have"
    return (
        f"{abbreviate_list(names, 2)} {have} no place in the target, and the target's result does not "
        "depend on it",
    )


def describe_assumed_classes(done: Iterable[tuple[Layer, Mapping[str, Leaf]]]) -> tuple[str, ...]:
    """Return the assumptions about layers whose class the file does not record.

    For a matrix: which axis is the output axis; for a single weight [C, S, S]: that it belongs to a
    convolution, not to a norm over an image; for two vectors in a module without a norm-like name:
    that they belong to a norm. So are kinds with evidence in names and widths only. Raise MappingError
    for square matrices in a model whose other matrices
    have the opposite orientation, and for an EinsumDense without its equation.
    """
    square: dict[str, list[str]] = {}
    turned: dict[str, list[str]] = {}
    equations: list[str] = []
    images: list[str] = []
    norms: list[str] = []
    done = list(done)
    for layer, group in done:
        kind, about = layer.kinds[0], layer.about
        if _may_be_a_norm(layer, group):
            images.append(layer.title)
        shape = next((leaf.shape for leaf in group.values() if len(leaf.shape) == 2), (0, 1))
        if layer.given or any(leaf.use is not None and leaf.use.role for leaf in group.values()):
            continue  # stated, or recorded by the file's computation
        if kind.name != "dense":
            unsaid = kind.name == "layer_norm" and not (about.cls or _NORM.search(layer.title.lower()))
            norms += [layer.title] if unsaid else []
            continue
        if not about.cls and kind.form in (IN_OUT, OUT_IN):
            turned.setdefault(kind.framework, []).append(layer.title)
        elif shape[0] == shape[1] > 1:
            cls = about.cls or _class_from_name(layer)
            einsum = cls.replace("_", "").lower() == "einsumdense" and "equation" not in about.settings
            if einsum:
                equations.append(layer.title)
            elif not about.cls and not _is_dense_of_keras(layer, group):
                square.setdefault(kind.framework, []).append(layer.title)
    for name in turned.keys() & square.keys():
        raise MappingError(
            f"square matrices may be [out, in] or [in, out]: {abbreviate_list(turned[name], 2)} is "
            f"{_TURNED[name]}, according to the length of its bias",
            path=abbreviate_list(square[name], 3),
            hint=f"use --kind '{square[name][0]}=dense{_FORM[name]}' if it is also {_TURNED[name]}, "
            f"otherwise --kind '{square[name][0]}=dense'",
        )
    _require_equations(equations)
    by_bias = (
        f"{abbreviate_list(names, 3)}: matrix {_TURNED[name]}, according to the length of its bias"
        for name, names in turned.items()
    )
    by_default = (
        f"{abbreviate_list(names, 3)}: square, assumed {_USUAL[name]} because the file contains no "
        f"classes (if {_TURNED[name]}: {_format_kind_options(names, f'dense{_FORM[name]}')})"
        for name, names in square.items()
    )
    by_class = (
        f"{abbreviate_list(names, 3)}: {what}"
        for names, what in (
            (
                images,
                "read as Conv1d rather than a LayerNorm over an image, because the file contains no classes",
            ),
            (norms, "two vectors, read as a layer norm because the file contains no classes"),
        )
        if names
    )
    by_evidence = _describe_evidence(layer for layer, _ in done)
    return (*by_bias, *by_default, *by_class, *by_evidence)


def _describe_evidence(done: Iterable[Layer]) -> Iterator[str]:
    """Yield a sentence for layers of each kind that evidence decided."""
    decided: dict[tuple[str, str], list[str]] = {}
    for layer in done:
        if layer.evidence:
            decided.setdefault((layer.kinds[0].name, layer.evidence), []).append(layer.title)
    for (name, why), titles in decided.items():
        other = _format_kind_options(titles, _OTHER[name])
        yield f"{abbreviate_list(titles, 3)}: read as {name} because {why} (if not: {other})"


# The other kind that the tensors of a layer may have.
_OTHER = {"dense": "embedding", "embedding": "dense", "convolution": "depthwise", "depthwise": "convolution"}


def _is_dense_of_keras(layer: Layer, group: Mapping[str, Leaf]) -> bool:
    """Return whether Keras itself named the layer, and the kernel as in its HDF5 files: [in, out].

    Before version 2, Keras called the kernel W.
    """
    names = [leaf.name or "" for leaf in group.values() if len(leaf.shape) == 2]
    own = bool(layer.name) and re.fullmatch(r"dense(_\d+)?", layer.name[-1]) is not None
    return own and all(name.endswith(("/kernel:0", "_W", "_W:0")) for name in names)


def _require_equations(squares: Sequence[str]) -> None:
    """Raise MappingError for square matrices without a known equation."""
    if squares:
        raise MappingError(
            "the matrix of an EinsumDense is square, and the file does not contain its equation",
            path=abbreviate_list(squares, 3),
            hint=f"use --kind '{squares[0]}=dense' if the equation expects [in, out], as 'ab,bc->ac' "
            f"does, or --kind '{squares[0]}=dense_{OUT_IN}' if [out, in]",
        )


def _format_kind_options(titles: Sequence[str], kind: str) -> str:
    """Return the option that states the kind, for each of the layers."""
    shown = " ".join(f"--kind '{title}={kind}'" for title in titles[:_MOST_OPTIONS])
    more = len(titles) - _MOST_OPTIONS
    return f"{shown} and likewise for {more} more" if more > 0 else shown


def _may_be_a_norm(layer: Layer, group: Mapping[str, Leaf]) -> bool:
    """Return whether a convolution's only weight [C, S, S] could belong to a norm over a square image."""
    shape = next(iter(group.values())).shape if len(group) == 1 else ()
    unsaid = layer.kinds[0].name == "convolution" and not (layer.about.cls or layer.given)
    return unsaid and len(shape) == 3 and shape[1] == shape[2] > 1


# Words in the names of norms, including those of Flax, haiku, Hugging Face and timm.
_NORM = deferred.compile(r"norm|(^|[^a-z])ln|bn(\d|_|/|\Z)|layer_?n")
_FORM = {"torch": f"_{IN_OUT}", "tensorflow": f"_{OUT_IN}"}
_USUAL = {"torch": "nn.Linear [out, in]", "tensorflow": "Dense [in, out]"}
_TURNED = {"torch": "[in, out]", "tensorflow": "[out, in]"}


class LayerRefusal(NamedTuple):
    """Reason why a layer is not converted, and the option that helps, for a layer called `TITLE`."""

    reason: str
    hint: str = ""

    def sentence(self, titles: Sequence[str]) -> str:
        """Return the sentence for all layers with this reason, with an option for each of them."""
        hint, reason = (_KIND.sub(partial(_repeat_option, titles), text) for text in (self.hint, self.reason))
        return f"{abbreviate_list(titles, 3)}: {reason}" + (f" ({hint})" if hint else "")


def _repeat_option(titles: Sequence[str], option: re.Match[str]) -> str:
    """Return an option for each layer; if there are many, only for the first ones."""
    options = " ".join(option[0].replace(TITLE, title) for title in titles[:_MOST_OPTIONS])
    more = len(titles) - _MOST_OPTIONS
    return f"{options} and likewise for {more} more" if more > 0 else options


def refuse_ambiguous(layer: Layer) -> LayerRefusal:
    """Return the refusal of a layer that may be of several kinds."""
    names = list(dict.fromkeys(kind.option for kind in layer.kinds))
    able = dict.fromkeys(kind.option for kind in layer.kinds if kind.refused is None)
    options = " or ".join(f"--kind '{TITLE}={name}'" for name in able)
    return LayerRefusal(f"may be {' or '.join(names)}, which are converted differently", options)


def refusal_from_error(error: MappingError) -> LayerRefusal:
    """Return the refusal of a layer without an equivalent, or with missing facts."""
    if error.message == HEADS:
        return LayerRefusal(error.message, f"--kind '{TITLE}=attention:HEADS'")
    return LayerRefusal(error.message + (f" (found {error.found})" if error.found else ""))


# Dense layers that may receive a flattened image, whose values the two frameworks order differently.
#
# TensorFlow stores channels last, so that a flattened image is H, W, C; PyTorch stores them first. A
# checkpoint does not record what was flattened. Sources: keras/src/layers/reshaping/flatten.py,
# torch/nn/modules/flatten.py.

_BETWEEN = list_kinds("norm") | {"prelu"}
_CONVOLUTIONS = list_kinds("convolution")


class _ConvolutionOutput(NamedTuple):
    """Output of a convolution: channels, number of spatial axes, and the possible numbers of channels."""

    channels: int
    axes: int
    either: tuple[int, ...]


def find_unknown_orders(tree: Tree, found: tuple[Layer, ...]) -> Mapping[str, str]:  # noqa: C901 - one walk
    """Return by title why layers cannot be converted without an option for their input or output order.

    This applies to layers after a convolution with more inputs than its channels: dense and recurrent
    layers and norms; to a dense layer whose input size is a multiple of the channels but not the
    output size of the layer before it (a second head); and, in files that list layers by name, to one
    before every convolution, if no dense layer has that output size. It also applies to a dense layer
    with more outputs than the channels of the convolution after it.
    """
    refused: dict[str, str] = {}
    images: _ConvolutionOutput | None = None
    every: dict[_ConvolutionOutput, str] = {}
    gives = 0
    waiting: list[Layer] = []
    outputs: set[int] = set()
    with_images = any(layer.kind_names & _CONVOLUTIONS for layer in found)
    produced = _vector_widths(tree, found) if with_images else set()
    # Whether no layer has used the output of the last convolution yet.
    pending = False
    by_name = _is_by_name(tree, found)
    last = _last_images(tree, found)
    for layer in found:
        names = layer.kind_names
        if names & _CONVOLUTIONS:
            images, gives, pending = _convolution_output(tree, layer), 0, True
            every.setdefault(images, layer.title)
        elif names & _NORMS and images is not None and not gives:
            width = _norm_width(tree, layer)
            images = _narrow_by_norm(images, width) if names == {"batch_norm"} else images
            if (
                width not in images.either
                and _is_input_unknown(layer)
                and _is_multiple(width, images.channels)
            ):
                refused[layer.title] = _explain_input(layer, width, images, "is a norm of")
        elif names == {"dense"}:
            if not every:
                waiting.append(layer)
            elif images is not None:
                inputs = _input_width(tree, layer)
                known = outputs | {each.channels for each in every}
                open_ = pending and _is_input_unknown(layer) and _is_multiple(inputs, images.channels)
                mixed = inputs not in produced and _is_mixed(layer, inputs, every)
                if (
                    open_
                    or mixed
                    or _is_unexplained_input(tree, layer, images, inputs if inputs in known else 0)
                ):
                    refused[layer.title] = _explain_candidates(
                        layer, inputs, images, _select_images(inputs, images, every, last, by_name), by_name
                    )
                pending = pending and layer.title not in refused and not _takes_image(layer)
                pending = pending and inputs != images.channels
            gives = _tensor_width(tree, layer, "kernel")
            outputs.add(gives)
        elif names <= RECURRENT_KIND_NAMES:
            if images is not None and not gives and _is_input_unknown(layer):
                inputs = _input_width(tree, layer)
                if _is_multiple(inputs, images.channels):
                    refused[layer.title] = _explain_input(layer, inputs, images)
            images, gives = None, 0
        elif not names <= _BETWEEN:
            # The output of an attention is not an image.
            images, gives = None, 0
    for layer in waiting:
        inputs = _input_width(tree, layer)
        if layer.title not in refused and inputs not in outputs:
            mixed = by_name and inputs not in produced
            for images in _refuse_image_input(tree, layer, every, mixed=mixed):
                refused[layer.title] = _explain_candidates(
                    layer, inputs, images, _select_images(inputs, images, every, last, by_name), by_name
                )
    if by_name and not refused and not any(_takes_image(layer) for layer in found):
        refused = _refuse_untaken_images(tree, found, every)
    unflattened = _refuse_unflattened(tree, found)
    shuffled = _refuse_shuffled(tree, found)
    refused |= _refuse_other_images(tree, found, every, last)
    return {**shuffled, **_refuse_image_widths(tree, found, refused, unflattened), **unflattened, **refused}


def decide_images(tree: Tree, found: tuple[Layer, ...]) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    """Return the layers with the flattened images that the sizes of all layers leave possible, and sentences.

    An image that no convolution takes has to go somewhere. If a layer's input size is that of exactly one
    such image, with as many places as a square, and neither a vector nor another layer explains it, then
    the layer takes the image, in its framework's own order. All other inputs stay unknown.
    """
    if any(not _is_followed(layer) for layer in found) or not find_unknown_orders(tree, found):
        return found, ()
    if _refuse_unflattened(tree, found) or _refuse_shuffled(tree, found):
        return found, ()  # its images may come from dense layers, as in a decoder
    ends = _untaken_images(tree, found)
    inputs = {at: _input_width(tree, layer) for at, layer in enumerate(found) if _takes_vector(layer)}
    produced = _vector_widths(tree, found)
    dense = _vector_widths(tree, (each for each in found if not each.kind_names & _CONVOLUTIONS))
    vectors = dense - set(inputs.values())
    able: dict[int, _ConvolutionOutput] = {}
    for at, width in inputs.items():
        fitting = [each for each in ends if _has_image_size(width, each)]
        joined = any(_has_image_size(width - vector, each) for each in fitting for vector in vectors)
        if width not in produced and len(fitting) == 1 and not joined:
            able[at] = fitting[0]
    for images, count in ends.items():
        sizes = {inputs[at] for at, each in able.items() if each == images}
        if len(sizes) > count or images.channels in set(inputs.values()) - dense:
            able = {at: each for at, each in able.items() if each != images}
    layers, sentences = list(found), []
    for at, images in able.items():
        shape = (*_places(inputs[at], images), images.channels)
        layers[at] = found[at]._replace(facts=found[at].facts._replace(flatten=shape))
        stated = ",".join(map(str, shape))
        sentences.append(
            f"{found[at].title} takes {stated} flattened, because no convolution takes the image of "
            f"{images.channels:,} channels (if not: --flatten '{found[at].title}=no')"
        )
    return tuple(layers), tuple(sentences)


def _is_followed(layer: Layer) -> bool:
    """Return whether a layer's kind is known, and its tensors have the sizes of its input and output."""
    names = layer.kind_names
    known = _CONVOLUTIONS | _NORMS | RECURRENT_KIND_NAMES | {"dense", "embedding"}
    return len(names) == 1 and names <= known


def _takes_vector(layer: Layer) -> bool:
    names = layer.kind_names
    return _is_input_unknown(layer) and (names == {"dense"} or names <= RECURRENT_KIND_NAMES)


def _untaken_images(tree: Tree, found: tuple[Layer, ...]) -> Counter[_ConvolutionOutput]:
    """Return the outputs of convolutions that no convolution takes; none if one may be transposed."""
    given: Counter[_ConvolutionOutput] = Counter()
    taken: Counter[int] = Counter()
    for at, layer in enumerate(found):
        if layer.kind_names & _CONVOLUTIONS:
            images = _convolution_output(tree, layer)
            norm = found[at + 1] if at + 1 < len(found) else layer
            if len(set(images.either)) > 1 and norm.kind_names == {"batch_norm"}:
                width = _norm_width(tree, norm)
                images = images._replace(channels=width, either=(width,) if width in images.either else ())
            if len(set(images.either)) != 1:
                return Counter()
            given[images] += 1
            inputs = set(_input_channels(tree, layer)) - {images.channels}
            taken.update(inputs or {images.channels})
    for images in list(given):
        given[images] -= taken[images.channels]
    return +given


def _has_image_size(count: int, images: _ConvolutionOutput) -> bool:
    """Return whether numbers may be an image: a square one, or one of many channels and nearly square."""
    places, rest = divmod(count, images.channels)
    if rest or min(places, images.channels) <= 1:
        return False
    many = images.channels >= _MANY
    if images.axes == 1 or round(places ** (1 / images.axes)) ** images.axes == places:
        return many or images.axes > 1
    sides = range(2, math.isqrt(places) + 1)
    # Twice a square is the size of two images that one encoder reads in turn, e.g. of a state and a goal.
    twice = any(places == 2 * side * side for side in sides)
    return many and not twice and any(places % side == 0 and places < 2 * side * side for side in sides)


def list_open_orders(tree: Tree, found: tuple[Layer, ...]) -> frozenset[str]:
    """Return the titles of layers whose order of inputs or outputs only an option or a call states."""
    lost = (
        layer.title
        for layer in found
        if not layer.kind_names & _CONVOLUTIONS
        and ((layer.facts.takes == UNKNOWN and layer.facts.flatten is None) or layer.facts.makes == UNKNOWN)
    )
    return frozenset((*lost, *find_unknown_orders(tree, found)))


def _is_by_name(tree: Tree, found: Sequence[Layer]) -> bool:
    """Return whether a file may list layers by name, so that their order is unknown.

    Weight files of Keras 3 always do: HDF5 sorts the groups of a folder.
    """
    root = tree.containers.get(())
    titles = [layer.title for layer in found]
    keras = root is not None and isinstance(root.state, dict) and "group" in root.state
    return keras or titles == sorted(titles)


def _last_images(tree: Tree, found: Iterable[Layer]) -> Counter[int]:
    """Return the output channels of convolutions that are more than all convolutions take."""
    given: Counter[int] = Counter()
    taken: Counter[int] = Counter()
    for layer in found:
        if layer.kind_names & _CONVOLUTIONS:
            with contextlib.suppress(MappingError):  # refused because of its kind
                given[_convolution_output(tree, layer).channels] += 1
                taken.update(_input_channels(tree, layer))
    return given - taken


def _select_images(
    count: int,
    images: _ConvolutionOutput,
    every: Mapping[_ConvolutionOutput, str],
    last: Counter[int],
    by_name: bool,
) -> dict[_ConvolutionOutput, str]:
    """Return the images that `count` numbers may be, with the convolution of each.

    `images` is the one before the layer. Images that other convolutions take are candidates only if all are.
    """
    able = {each: title for each, title in every.items() if _is_multiple(count, each.channels)}
    ends = {each: title for each, title in able.items() if each.channels in last}
    if by_name or (ends and images.channels not in last):
        return ends or able
    return {images: every.get(images, "")}


def _refuse_other_images(
    tree: Tree, found: Iterable[Layer], every: Mapping[_ConvolutionOutput, str], last: Counter[int]
) -> dict[str, str]:
    """Return why a stated image is refused: another convolution takes it, and no layer the last one's."""
    read: set[int] = set()
    stated: list[tuple[Layer, int]] = []
    for layer in found:
        names = layer.kind_names
        if names == {"dense"} and layer.facts.flatten:
            stated.append((layer, layer.facts.flatten[-1]))
            read.add(layer.facts.flatten[-1])
        elif names == {"dense"} or names <= RECURRENT_KIND_NAMES:
            read.add(_input_width(tree, layer))
            read |= {channels for _, channels in layer.facts.takes.parts} if layer.facts.takes else set()
        elif not names & _CONVOLUTIONS and not names <= _NORMS:
            return {}
    refused: dict[str, str] = {}
    for layer, channels in stated:
        inputs = _input_width(tree, layer)
        ends = {e: t for e, t in every.items() if e.channels in last and _is_multiple(inputs, e.channels)}
        taken = channels not in last and any(channels == each.channels for each in every)
        if taken and ends and not read & {each.channels for each in ends}:
            stated_ = ",".join(map(str, layer.facts.flatten or ()))
            refused[layer.title] = (
                f"{layer.title} cannot take {stated_}: a convolution takes these {channels:,} channels, and "
                f"no layer would take those of {' and '.join(ends.values())} "
                f"({' or '.join(_flatten_option(layer, inputs, each) for each in ends)})"
            )
    return refused


def _takes_image(layer: Layer) -> bool:
    takes = layer.facts.takes
    return bool(layer.facts.flatten) or (takes is not None and not takes.is_plain)


def _vector_widths(tree: Tree, found: Iterable[Layer]) -> set[int]:
    """Return the output sizes of layers that are not images: of vectors, and channels."""
    widths: set[int] = set()
    for layer in found:
        names = layer.kind_names
        with contextlib.suppress(MappingError):  # refused because of its kind
            if names & _CONVOLUTIONS:
                widths |= {_convolution_output(tree, layer).channels, *_output_channels(tree, layer)}
            elif names == {"dense"}:
                widths.add(_tensor_width(tree, layer, "kernel"))
            elif names <= RECURRENT_KIND_NAMES:
                widths.add(canonical_tensors(tree, layer, layer.kinds[0])["recurrent_kernel"].shape[0])
            elif names == {"embedding"}:
                widths.add(_tensor_width(tree, layer, "embeddings"))
    return widths


def describe_image_sized_inputs(tree: Tree, found: tuple[Layer, ...]) -> Iterator[str]:
    """Yield a sentence for each dense layer with as many inputs as a colour image has values.

    A model without a convolution may flatten one too; no tensor shows it.
    """
    produced = _vector_widths(tree, found)
    for layer in found:
        if layer.kind_names != {"dense"} or not _is_input_unknown(layer):
            continue
        inputs = _input_width(tree, layer)
        places = inputs // 3
        sides = (
            n for n in range(_PICTURE, math.isqrt(places) + 1) if places % n == 0 and places <= 2 * n * n
        )
        if inputs % 3 == 0 and inputs not in produced and any(sides):
            yield (
                f"the {inputs:,} inputs of {layer.title} have the same order on both sides (if they are a "
                f"flattened 3-channel image: --flatten '{layer.title}={places},3')"
            )


def _refuse_shuffled(tree: Tree, found: tuple[Layer, ...]) -> dict[str, str]:
    """Return why convolutions are refused whose channels may become places, or the reverse.

    One outputs 4, 9 or 16 times the input channels of another, and no layer has an input of that
    size, or the other way round. The frameworks order the channels of a pixel shuffle differently.
    """
    sides = _image_sides(tree, found)
    refused: dict[str, str] = {}
    if any(takes is None or gives is None for _, takes, gives in sides):
        return refused
    dense = {
        _input_width(tree, each) for each in found if each.kind_names <= {"dense", *RECURRENT_KIND_NAMES}
    }
    depthwise = list(_depthwise_sides(tree, found))
    taken = {*(takes for _, takes, _ in sides), *(takes for takes, _ in depthwise)}
    given = [*(gives for _, _, gives in sides), *(gives for _, gives in depthwise)]
    for layer, takes, gives in sides:
        assert takes is not None and gives is not None  # noqa: S101, PT018 - as checked above
        used = gives in taken or any(count % gives == 0 for count in dense)
        for square in _SQUARES:
            made = gives // square if gives % square == 0 else 0
            if made > 1 and made in taken and not used and layer.facts.makes is None:
                refused.setdefault(
                    layer.title,
                    f"{layer.title} outputs {gives:,} channels: either a pixel shuffle turns them into "
                    f"{made:,}, which the two frameworks order differently (--unflatten "
                    f"'{layer.title}={square},{made}'), or not (--unflatten '{layer.title}=no')",
                )
            before = takes // square if takes % square == 0 else 0
            joined = before > 1 and before in given and takes not in given and before not in taken
            if joined and given.count(before) < square and _is_input_unknown(layer):
                refused.setdefault(
                    layer.title,
                    f"{layer.title} has {takes:,} input channels: either they are the places of "
                    f"{before:,} channels, which the two frameworks order differently (--flatten "
                    f"'{layer.title}={square},{before}'), or not (--flatten '{layer.title}=no')",
                )
    return refused


def describe_pixel_shuffles(tree: Tree, found: tuple[Layer, ...]) -> Iterator[str]:
    """Yield a sentence for convolutions at the ends of a model that may be next to a pixel shuffle.

    The first has 4, 9 or 16 times as many input channels as a colour image; the last outputs that
    many times the input channels of the first.
    """
    sides = _image_sides(tree, found)
    taken, given = {takes for _, takes, _ in sides}, {gives for _, _, gives in sides}
    if None in taken | given or not sides:
        return
    colours = {3, *(takes for _, takes, _ in sides if takes is not None and 1 < takes < _COLOURS)}
    for layer, takes, gives in sides:
        for square in _SQUARES:
            if takes is not None and takes not in given and takes == 3 * square and _is_input_unknown(layer):
                yield (
                    f"the {takes:,} input channels of {layer.title} have the same order on both sides (if "
                    f"they are places of a 3-channel image: --flatten '{layer.title}={square},3')"
                )
            made = gives // square if gives is not None and gives % square == 0 else 0
            if made in colours and gives not in taken and layer.facts.makes is None:
                yield (
                    f"the {gives:,} output channels of {layer.title} have the same order on both sides "
                    f"(if they become places of an image of {made} channels: --unflatten "
                    f"'{layer.title}={square},{made}')"
                )


def _depthwise_sides(tree: Tree, found: Iterable[Layer]) -> Iterator[tuple[int, int]]:
    """Yield the input and output channels of depthwise convolutions, one for each in PyTorch."""
    for layer in found:
        if layer.kind_names == {"depthwise"}:
            channels, multiplier = canonical_tensors(tree, layer, layer.kinds[0])["kernel"].shape[-2:]
            several = layer.kinds[0].framework == "tensorflow"
            yield (channels if several else channels * multiplier), channels * multiplier


def _image_sides(tree: Tree, found: Iterable[Layer]) -> list[tuple[Layer, int | None, int | None]]:
    """Return the input and output channels of each convolution, None for both if ambiguous."""
    sides: list[tuple[Layer, int | None, int | None]] = []
    for layer in found:
        if layer.kind_names != {"convolution"}:
            continue
        leaves = canonical_tensors(tree, layer, layer.kinds[0])
        first, last = leaves["kernel"].shape[-2:]
        bias = leaves["bias"].shape[0] if "bias" in leaves else None
        if bias == last:
            sides.append((layer, first, last))
        elif bias == first:
            sides.append((layer, last, first))
        else:
            sides.append((layer, *((None, None) if first != last else (first, last))))
    return sides


# Positions that a pixel shuffle merges into one, or the reverse.
_SQUARES = (4, 9, 16)


def _refuse_untaken_images(
    tree: Tree, found: tuple[Layer, ...], every: Iterable[_ConvolutionOutput]
) -> dict[str, str]:
    """Return why dense layers are refused whose input may be an image that no other layer reads."""
    taken: set[int] = set()
    for layer in found:
        names = layer.kind_names
        if names & _CONVOLUTIONS:
            taken |= set(_input_channels(tree, layer))
        elif names == {"dense"} or names <= RECURRENT_KIND_NAMES:
            taken.add(_input_width(tree, layer))
    refused: dict[str, str] = {}
    for images in every:
        for layer in found if images.channels not in taken else ():
            inputs = _input_width(tree, layer) if layer.kind_names == {"dense"} else 0
            if _is_multiple(inputs, images.channels) and _is_input_unknown(layer):
                refused.setdefault(layer.title, _explain_input(layer, inputs, images))
    return refused


def _is_mixed(layer: Layer, inputs: int, every: Iterable[_ConvolutionOutput]) -> bool:
    """Return whether a layer's input may be an image of at least two places and other numbers."""
    return _is_input_unknown(layer) and any(
        1 < 2 * each.channels <= inputs for each in every if each.channels > 1
    )


def _refuse_image_widths(
    tree: Tree, found: tuple[Layer, ...], refused: Mapping[str, str], unflattened: Mapping[str, str]
) -> dict[str, str]:
    """Return why layers with as many inputs or outputs as a flattened image has values are refused.

    No tensor shows whether these are that image: a second head, a gate, a norm, the layer of a
    decoder.
    """
    widths = _image_widths(tree, found, refused, unflattened)
    reasons: dict[str, str] = {}
    for layer in found:
        if layer.title in refused or layer.title in unflattened:
            continue
        for option, verb, width in _unknown_sides(tree, layer) if widths else ():
            if width in widths:
                other, parts = widths[width]
                where = f"the flattened image of {other}" if other != layer.title else "its input image"
                reasons.setdefault(
                    layer.title,
                    f"{layer.title} {verb} {width:,} numbers, the size of {where}: either that image "
                    f"({option} '{layer.title}={parts}'), or not ({option} '{layer.title}=no')",
                )
    return reasons


def _image_widths(
    tree: Tree, found: tuple[Layer, ...], refused: Mapping[str, str], unflattened: Mapping[str, str]
) -> dict[int, tuple[str, str]]:
    """Return by length the flattened images that are input or output of dense layers: layer and option."""
    widths: dict[int, tuple[str, str]] = {}
    for layer in found:
        if layer.kind_names != {"dense"}:
            continue
        takes, makes = layer.facts.takes, layer.facts.makes
        if layer.facts.flatten:
            widths[_input_width(tree, layer)] = layer.title, ",".join(map(str, layer.facts.flatten))
        elif takes is not None and not takes.is_plain:
            widths[_input_width(tree, layer)] = layer.title, format_order_option(takes)
        elif layer.title in refused and _is_input_unknown(layer):
            widths.setdefault(_input_width(tree, layer), (layer.title, "places,channels"))
        if makes is not None and not makes.is_plain:
            widths[_tensor_width(tree, layer, "kernel")] = layer.title, format_order_option(makes)
        elif layer.title in unflattened:
            widths.setdefault(_tensor_width(tree, layer, "kernel"), (layer.title, "places,channels"))
    return widths


def _unknown_sides(tree: Tree, layer: Layer) -> list[tuple[str, str, int]]:
    """Return the unknown sides of a layer: the option, the verb, and the size."""
    names = layer.kind_names
    found: list[tuple[str, str, int]] = []
    if names <= _NORMS and _is_input_unknown(layer):
        found.append(("--flatten", "is a norm of", _norm_width(tree, layer)))
    elif (names == {"dense"} or names <= RECURRENT_KIND_NAMES) and _is_input_unknown(layer):
        found.append(("--flatten", "takes", _input_width(tree, layer)))
    if names == {"dense"} and layer.facts.makes is None:
        found.append(("--unflatten", "gives", _tensor_width(tree, layer, "kernel")))
    return found


def format_order_option(order: AxisOrder) -> str:
    """Return an order as written in an option: places,channels of an image, the count of other numbers."""
    return "+".join(
        str(channels) if places == 1 else f"{places},{channels}" for places, channels in order.parts
    )


_NORMS = _BETWEEN | {"batch_norm"}
# A dense layer is not assumed to feed a convolution just by its position if that has as few input channels as
# a camera image.
_COLOURS = 4
# The minimum shorter side of a picture; the longer one is at most twice as long.
_PICTURE = 5
# Numbers beside an image are rarely a multiple of as many channels.
_MANY = 8
# One-dimensional images are rarely longer.
_SMALL_SIDE = 7


def _is_input_unknown(layer: Layer) -> bool:
    return layer.facts.flatten is None and layer.facts.takes is None


def _is_multiple(count: int, channels: int) -> bool:
    return 1 < channels < count and count % channels == 0


def _refuse_image_input(
    tree: Tree, layer: Layer, every: Iterable[_ConvolutionOutput], *, mixed: bool
) -> list[_ConvolutionOutput]:
    """Return the first image that may be the input of a layer listed before every convolution, if any."""
    for images in every:
        odd = images.channels > 1 and _is_unexplained_input(tree, layer, images, -1)
        if odd or (mixed and _is_mixed(layer, _input_width(tree, layer), (images,))):
            return [images]
    return []


def _refuse_unflattened(tree: Tree, found: tuple[Layer, ...]) -> dict[str, str]:
    """Return why dense layers and norms are refused whose outputs a convolution may read as an image."""
    refused: dict[str, str] = {}
    takes = {
        _input_width(tree, layer)
        for layer in found
        if layer.kind_names <= {"dense", *RECURRENT_KIND_NAMES} and not _takes_image(layer)
    }
    produced = {channels for layer in found for channels in _output_channels(tree, layer)}
    behind: list[tuple[Layer, int]] = []
    later: list[tuple[Layer, int]] = []
    for layer in found:
        names = layer.kind_names
        if names == {"dense"}:
            width = _tensor_width(tree, layer, "kernel")
            behind = [(layer, width)]
            later += [(layer, width)] if width not in takes else []
        elif names & _NORMS and behind and _norm_width(tree, layer) == behind[0][1]:
            behind.append((layer, behind[0][1]))
        elif names & _CONVOLUTIONS:
            inputs = _input_channels(tree, layer)
            for dense, width in (*behind, *later):
                wide = sorted(each for each in inputs if _is_multiple(width, each))
                wide = wide if (dense, width) in behind else [each for each in wide if each not in produced]
                far = len(dense.name) > 1 and dense.name[:1] != layer.name[:1] and max(inputs) <= _COLOURS
                if wide and not far and _is_order_unknown(dense):
                    refused.setdefault(dense.title, _explain_output(dense, width, wide, layer))
            behind = []
        else:
            behind = []
    return refused


def _is_order_unknown(layer: Layer) -> bool:
    """Return whether a dense layer's output order, or a norm's input order, is unknown."""
    if layer.kind_names == {"dense"}:
        return layer.facts.makes is None
    return layer.facts.takes is None


def _output_channels(tree: Tree, layer: Layer) -> tuple[int, ...]:
    """Return a convolution's number of output channels, if its bias shows it."""
    if not layer.kind_names & _CONVOLUTIONS:
        return ()
    found = canonical_tensors(tree, layer, layer.kinds[0])
    return (found["bias"].shape[0],) if "bias" in found else ()


def _explain_output(layer: Layer, width: int, channels: list[int], convolution: Layer) -> str:
    """Return why a layer's output is ambiguous, with an option for every possible number of channels."""
    dense = layer.kind_names == {"dense"}
    option = "--unflatten" if dense else "--flatten"
    able = [f"{option} '{layer.title}={width // each},{each}'" for each in channels]
    return (
        f"{layer.title} outputs {width:,} numbers, which may be an image of "
        f"{' or '.join(f'{each:,}' for each in channels)} channels for {convolution.title}: either "
        f"places and channels, which the two frameworks order differently ({' or '.join(able)}; with "
        f"fewer channels, as places,channels, if others are concatenated), or not ({option} "
        f"'{layer.title}=no')"
    )


def _input_channels(tree: Tree, layer: Layer) -> tuple[int, ...]:
    """Return the possible input channels of a convolution: without a bias it may be a transposed one."""
    found = canonical_tensors(tree, layer, layer.kinds[0])
    kernel = found["pointwise_kernel" if "pointwise_kernel" in found else "kernel"].shape
    either = tuple(dict.fromkeys(kernel[-2:]))
    bias = found["bias"].shape[0] if "bias" in found else None
    if bias in either and len(either) > 1 and layer.kinds[0].name == "convolution":
        return tuple(each for each in either if each != bias)
    return either


def _is_unexplained_input(tree: Tree, layer: Layer, images: _ConvolutionOutput, gives: int) -> bool:
    """Return whether a dense layer has more inputs than the channels, and than the known output before it."""
    inputs = _input_width(tree, layer)
    # An image of one position or one channel has the same order in both frameworks.
    wide = [each for each in images.either if each > 1]
    more = bool(wide) and 2 * min(wide) <= inputs != gives and (not gives or inputs % images.channels == 0)
    return more and _is_input_unknown(layer)


def _input_width(tree: Tree, layer: Layer) -> int:
    return canonical_tensors(tree, layer, layer.kinds[0])["kernel"].shape[0]


def _tensor_width(tree: Tree, layer: Layer, name: str) -> int:
    return canonical_tensors(tree, layer, layer.kinds[0])[name].shape[-1]


def _norm_width(tree: Tree, layer: Layer) -> int:
    try:
        shapes = [leaf.shape for leaf in canonical_tensors(tree, layer, layer.kinds[0]).values()]
    except MappingError:
        return 0  # refused because of its kind
    return shapes[0][0] if shapes and len(shapes[0]) == 1 else 0


def _convolution_output(tree: Tree, layer: Layer) -> _ConvolutionOutput:
    found = canonical_tensors(tree, layer, layer.kinds[0])
    kernel = found["pointwise_kernel" if "pointwise_kernel" in found else "kernel"].shape
    channels = kernel[-1] * (kernel[-2] if layer.kinds[0].name == "depthwise" else 1)
    if "bias" in found:
        channels = found["bias"].shape[0]
        return _ConvolutionOutput(channels, len(kernel) - 2, (channels,))
    return _ConvolutionOutput(channels, len(kernel) - 2, (channels, *kernel[-2:]))


def _narrow_by_norm(images: _ConvolutionOutput, width: int) -> _ConvolutionOutput:
    """Return the convolution's output, narrowed by a norm of this width after it.

    A convolution without a bias may be transposed; the last axis of its kernel is then its inputs. A
    norm with another width than the kernel's axes follows a flattened image and gives no information.
    """
    return images._replace(channels=width) if width in images.either else images


def _explain_candidates(
    layer: Layer,
    count: int,
    images: _ConvolutionOutput,
    candidates: Mapping[_ConvolutionOutput, str],
    by_name: bool,
) -> str:
    """Return why a layer's input is unknown, with an option for each convolution whose image it may be."""
    if not by_name and len(candidates) == 1:
        return _explain_input(layer, count, next(iter(candidates)))
    options = [
        f"{_flatten_option(layer, count, each)} for {title}"
        for each, title in candidates.items()
        if _is_rectangular(count, each)
    ]
    if not options:
        return _explain_input(layer, count, images)
    return (
        f"{layer.title} takes {count:,} numbers: either the flattened image of a convolution, which the two "
        f"frameworks order differently ({' or '.join(options)}), or not (--flatten '{layer.title}=no'); the "
        "file does not record which, a call of its own model shows it (--like-source MODULE:FACTORY)"
    )


def _is_rectangular(count: int, images: _ConvolutionOutput) -> bool:
    """Return whether the numbers can be an image of these channels that is no long single row."""
    places = count // images.channels
    prime = images.axes > 1 and all(places % n for n in range(2, places))
    return not count % images.channels and not (prime and places > _SMALL_SIDE)


def _flatten_option(layer: Layer, count: int, images: _ConvolutionOutput) -> str:
    shape = (*_places(count, images), images.channels)
    return f"--flatten '{layer.title}={','.join(map(str, shape))}'"


def _places(count: int, images: _ConvolutionOutput) -> list[int]:
    """Return the sides of a square image, else the number of places: their order is that of both sides."""
    side = round((count / images.channels) ** (1 / images.axes))
    square = side**images.axes * images.channels == count
    return [side] * images.axes if square else [count // images.channels]


def _explain_input(layer: Layer, count: int, images: _ConvolutionOutput, verb: str = "takes") -> str:
    channels = images.channels
    start = f"{layer.title} {verb} {count:,} numbers after a convolution of {channels:,} channels: "
    if not _is_rectangular(count, images):
        return (
            f"{start}either an image beside other numbers, in this order (--flatten '{layer.title}="
            f"PLACES,{channels}+NUMBERS'), or not (--flatten '{layer.title}=no'); a call of your own model "
            "shows it (--like with --input-shape)"
        )
    return (
        f"{start}either a flattened image, which the two frameworks order differently "
        f"({_flatten_option(layer, count, images)}), or not (--flatten '{layer.title}=no'); write numbers "
        "beside an image as places,channels+numbers"
    )


# --- Orders of features -------------------------------------------------------------------------------

_LAST, _FIRST = "last", "first"
_OWN = {"torch": "PyTorch's", "tensorflow": "TensorFlow's"}


class FeatureReordering(NamedTuple):
    """Rules for a layer's canonical tensors between two frameworks, and the assumptions made for it.

    `flatten` is the image of a dense layer that each framework flattens in its own order. `assumed_parts`
    are the orders of parts that the source may have instead of the one that is assumed.
    """

    rules: Mapping[str, Rule] = MappingProxyType({})
    flatten: Shape | None = None
    assumed: tuple[str, ...] = ()
    assumed_parts: tuple[AssumedParts, ...] = ()


class AssumedParts(NamedTuple):
    """Parts of a layer's input ("takes") or output ("makes") whose order in the source is assumed.

    `orders` are the possible ones: the numbers of the target's parts, in the source's order, the assumed one
    first. `sentence` is the assumption.
    """

    sentence: str
    layer: str
    side: str
    sizes: tuple[int, ...]
    orders: tuple[tuple[int, ...], ...]

    def rule(self, order: Sequence[int], axis: int) -> Rule:
        """Return the rule that puts the parts of an axis, which has them in this order, in the target's."""
        starts = dict(zip(order, accumulate((self.sizes[part] for part in order), initial=0), strict=False))
        blocks = (range(starts[part], starts[part] + size) for part, size in enumerate(self.sizes))
        return BlockOrder(axis, tuple(position for block in blocks for position in block))


_MOST_PARTS = 4


def _possible_orders(sizes: Sequence[int], theirs: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the orders of parts of these sizes that give the source's sizes, where these are known."""
    if len(sizes) > _MOST_PARTS or 0 in sizes:
        return ()
    known = list(theirs) if sorted(theirs) == sorted(sizes) else None
    orders = permutations(range(len(sizes)))
    return tuple(each for each in orders if known is None or [sizes[part] for part in each] == known)


def plan_reordering(
    tree: Tree, layer: Layer, kind: LayerKind, ours: LayerFacts, frameworks: tuple[str, str]
) -> FeatureReordering:
    """Return how the features of a layer are reordered between the models of two frameworks.

    `layer.facts` contains the orders of the source, `ours` those of the target. A source without known
    order is assumed to use its framework's order, if the target's order is its own framework's or the
    source's: then both are plain, or the two were made to agree. Raise MappingError if the target
    orders features in a third way, if the two do not agree, or if one cannot be followed.
    """
    axes = LAYER_TYPES[kind.name].features if kind.name in LAYER_TYPES else {}
    found = {name: leaf.shape for name, leaf in canonical_tensors(tree, layer, kind).items() if name in axes}
    ranks = _RANKS
    if kind.name == "convolution":
        # Only a pixel shuffle before or after it is evidence; a padded input is not.
        layer, ours = layer._replace(facts=drop_unknown_orders(layer.facts)), drop_unknown_orders(ours)
        ranks = {"kernel": len(found["kernel"])}
        axes = {**axes, "kernel": {side: ranks["kernel"] + at for side, at in axes["kernel"].items()}}
    rules: dict[str, list[Rule]] = {}
    assumed: list[str] = []
    flatten: Shape | None = () if layer.facts.flatten == () else None
    for side in ("takes", "makes"):
        places = [(name, axes[name][side]) for name in found if side in axes[name]]
        lengths = {found[name][axis] for name, axis in places if axis < len(found[name])}
        if len(lengths) != 1 or any(len(found[name]) != ranks.get(name, 1) for name, _ in places):
            continue
        made = _FeatureSide(layer, side, lengths.pop(), ours, frameworks).meeting()
        if made is None:
            continue
        theirs, target, sentence = made
        assumed += sentence
        if theirs.positions == target.positions:
            continue
        single = side == "takes" and kind.name == "dense" and len(theirs.parts) == 1
        if single and (theirs, target) == tuple(framework_order(theirs.parts, each) for each in frameworks):
            flatten = layer.facts.flatten or theirs.parts[0]
            continue
        for name, axis in places:
            rules.setdefault(name, []).append(_order_rule(axis, theirs, target))
    return FeatureReordering(
        {name: chain_rules(*each) for name, each in rules.items()}, flatten, tuple(assumed)
    )


def arrange_parts(
    layer: Layer,
    kind: LayerKind,
    made: FeatureReordering,
    theirs: Parts,
    ours: LayerFacts,
    kernel: Shape,
) -> FeatureReordering:
    """Return the reordering of a layer with that of the parts that its input and output have.

    `theirs` are the parts of the input in the source, with the calls of the target, `kernel` is the shape of
    the canonical kernel [..., inputs, outputs]. If both models record
    where the parts come from, they decide, and so do images that only one part can be; otherwise the order
    is assumed, and so is that of an output that the target uses in parts.
    """
    if kind.name not in ("dense", "convolution", "depthwise"):
        return made
    assumed = []
    parts: list[AssumedParts] = []
    rules = dict(made.rules)
    divided = kind.name != "depthwise" and not made.rules and made.flatten is None
    if max(len(theirs), len(ours.parts)) > 1 and not _are_told_apart(layer.facts, theirs, ours):
        followed = all(part.origin and part.number >= 0 for part in (*theirs, *ours.parts))
        whole = len({*theirs}) == len(theirs) and len({*ours.parts}) == len(ours.parts)
        same = followed and whole and sorted(theirs) == sorted(ours.parts)
        plain = not made.rules and made.flatten is None
        if same and theirs != ours.parts and kind.name == "dense" and plain:
            starts = dict(zip(theirs, accumulate((part.size for part in theirs), initial=0), strict=False))
            order = (range(starts[part], starts[part] + part.size) for part in ours.parts)
            rules["kernel"] = BlockOrder(0, tuple(position for block in order for position in block))
        elif not same or theirs != ours.parts:
            sizes = [f"{part.size:,}" for part in ours.parts or theirs if part.size]
            many = f" of {abbreviate_list(sizes, _MOST)} numbers" if len(sizes) > 1 else ""
            assumed.append(f"{layer.title} takes joined parts{many}, in the same order in both models")
            own, other = ([part.size for part in side] for side in (ours.parts or theirs, theirs))
            orders = _possible_orders(own, other) if divided and sum(own) == kernel[-2] else ()
            if orders:
                parts.append(AssumedParts(assumed[-1], layer.title, "takes", tuple(own), orders))
    if ours.cut:
        assumed.append(f"{layer.title} makes numbers that the models use in parts, in the same order")
        if divided and kernel[-1] % 2 == 0:
            halves = (kernel[-1] // 2,) * 2
            parts.append(AssumedParts(assumed[-1], layer.title, "makes", halves, ((0, 1), (1, 0))))
    return made._replace(rules=rules, assumed=(*made.assumed, *assumed), assumed_parts=tuple(parts))


def _are_told_apart(facts: LayerFacts, theirs: Parts, ours: LayerFacts) -> bool:
    """Return whether each part is known to be the same in both models, which record the same images.

    A part is known by its origin, or as the only image of its size; the recorded orders arrange the
    entries of an image. A vector beside images is known by its size, if it is in the order of its result.
    """
    images = facts.takes.parts if facts.takes is not None else ()
    if facts.flatten:
        images = ((prod(facts.flatten[:-1]), facts.flatten[-1]),)
    target = ours.takes.parts if ours.takes is not None else ()
    if facts.takes is None and not facts.flatten and len(target) == 1 and 1 not in target[0]:
        images = target  # One image: the source's order of its entries is assumed, not that of parts.
    if not images or images != target:
        return False
    sides = [[*_parts_by_image(parts, images)] for parts in (theirs, ours.parts)]
    return len(sides[0]) == len(sides[1]) > 0 and all(
        _is_same_part(one, other, image if image == same and images.count(image) == 1 else None)
        for (one, image), (other, same) in zip(*sides, strict=True)
    )


def _is_same_part(one: FeaturePart, other: FeaturePart, image: Part | None) -> bool:
    """Return whether two parts are known to be the same, by their origins or as the image of both models."""
    if all(part.origin and part.number >= 0 for part in (one, other)):
        return one == other
    vector = image is not None and 1 in image
    return (
        image is not None and one.size == other.size and not (vector and MIXED in (one.origin, other.origin))
    )


def _parts_by_image(parts: Parts, images: Sequence[Part]) -> Iterator[tuple[FeaturePart, Part | None]]:
    """Yield each part with its image, or None if it is one of several vectors in a row.

    Without recorded parts, each image is one. Yield a part of no size where images are not whole parts.
    """
    left = [part for part in parts if part.size] or [FeaturePart(prod(image)) for image in images]
    for image in images:
        own: list[FeaturePart] = []
        while left and sum(part.size for part in own) < prod(image):
            own.append(left.pop(0))
        if sum(part.size for part in own) != prod(image) or (len(own) > 1 and 1 not in image):
            left.append(FeaturePart(0))
            break
        yield from ((part, image if len(own) == 1 else None) for part in own)
    yield from ((part._replace(size=0, origin=""), None) for part in left)


_RANKS: Mapping[str, int] = {"kernel": 2, "embeddings": 2}


def drop_unknown_orders(facts: LayerFacts) -> LayerFacts:
    """Return the facts without orders that could not be followed."""
    return facts._replace(
        takes=None if facts.takes == UNKNOWN else facts.takes,
        makes=None if facts.makes == UNKNOWN else facts.makes,
    )


class _FeatureSide:
    """The input or output side of a layer, in both models."""

    def __init__(
        self, layer: Layer, side: str, length: int, ours: LayerFacts, frameworks: tuple[str, str]
    ) -> None:
        self.layer, self.side, self.length, self.frameworks = layer, side, length, frameworks
        order = getattr(layer.facts, side)
        self.stated = order == NO_IMAGE or (side == "takes" and layer.facts.flatten is not None)
        self.theirs = self._theirs()
        self.ours = self._fitting(getattr(ours, side))
        if self.ours is None and side == "takes" and ours.flatten:
            self.ours = self._image(ours.flatten, frameworks[1])

    def _theirs(self) -> AxisOrder | None:
        flatten = self.layer.facts.flatten if self.side == "takes" else None
        if self.stated:
            return self._image(flatten, self.frameworks[0]) if flatten else plain_order(self.length)
        return self._fitting(getattr(self.layer.facts, self.side))

    def _image(self, shape: Shape, framework: str) -> AxisOrder | None:
        if prod(shape) != self.length:
            return None
        return framework_order(((prod(shape[:-1]), shape[-1]),), framework)

    def _fitting(self, order: AxisOrder | None) -> AxisOrder | None:
        """Return the order unless its length differs from the side's."""
        return order if order is None or order is UNKNOWN or len(order.positions) == self.length else None

    def meeting(self) -> tuple[AxisOrder, AxisOrder, tuple[str, ...]] | None:
        """Return the orders of the source and of the target, None if no reordering is needed."""
        theirs, ours = self.theirs, self.ours
        if theirs is None and ours is None:
            return None
        if self.stated and theirs is not None and theirs.is_plain:
            return None
        if UNKNOWN in (theirs, ours):
            known = theirs if ours == UNKNOWN else ours
            if known is not None and known.is_plain and known != UNKNOWN:
                return None
            raise self._error("cannot be followed through the model", known)
        if theirs is None:
            assert ours is not None  # noqa: S101 - one is known
            usual = [framework_order(ours.parts, framework) for framework in self.frameworks]
            if ours not in usual and not ours.is_plain:
                raise self._error("is specific to the target, and the source's order is not recorded", ours)
            return self._assumed(ours, 0), ours, self._sentence(ours, 0)
        if ours is None:
            sentences = () if self.stated else self._sentence(theirs, 1)
            return theirs, self._assumed(theirs, 1), sentences
        if theirs.is_plain and ours.is_plain:
            return None
        if theirs.parts != ours.parts:
            said_ = f"is {_describe_order(theirs)} in the source and {_describe_order(ours)} in the target"
            raise self._error(said_, ours)
        return theirs, ours, ()

    def _assumed(self, known: AxisOrder, side: int) -> AxisOrder:
        """Return the order of the unknown side: images in its framework's own order."""
        blocks = known.blocks
        if blocks is None:
            raise self._error("is that of several interleaved images")
        index: list[int] = []
        for block, part in zip(blocks, known.parts, strict=True):
            own = block if 1 in part else framework_order((part,), self.frameworks[side]).positions
            index += _shift_indices(own, len(index))
        return AxisOrder(known.parts, tuple(index))

    def _sentence(self, known: AxisOrder, side: int) -> tuple[str, ...]:
        if known.is_plain:
            return ()
        what = "takes" if self.side == "takes" else "makes"
        sentence = (
            f"{self.layer.title} {what} {_describe_order(known)} flattened in {_OWN[self.frameworks[side]]} own "  # noqa: E501
            f"order in the {('source', 'target')[side]}"
        )
        other = ("target", "source")[side]
        return (f"{sentence} (if it is in the {other}'s order: {self._option} '{self.layer.title}=no')",)

    @property
    def _option(self) -> str:
        return "--flatten" if self.side == "takes" else "--unflatten"

    def _error(self, why: str, known: AxisOrder | None = None) -> MappingError:
        name, own = self.layer.title, _OWN[self.frameworks[0]]
        able = [
            f"{self._option} '{name}=no' if both sides use the same order, or no image is flattened there"
        ]
        if known is not None and known != UNKNOWN and not known.is_plain:
            able.append(
                f"{self._option} '{name}={format_order_option(known)}' if the source uses {own} own order"
            )
        elif known is None:
            able.append(f"{self._option} '{name}=H,W,C' if it is an image in {own} own order")
        return MappingError(f"the order of what {name} {self.side} {why} ({'; '.join(able)})")


def _shift_indices(index: Iterable[int], start: int) -> list[int]:
    return [start + each for each in index]


def _describe_order(order: AxisOrder) -> str:
    return " and ".join(
        f"{channels:,} numbers" if places == 1 else f"an image of {places:,} places and {channels:,} channels"
        for places, channels in order.parts
    )


def _order_rule(axis: int, theirs: AxisOrder, ours: AxisOrder) -> Rule:
    """Return the rule that changes an axis from one order to the other."""
    forms = framework_order(theirs.parts, "tensorflow"), framework_order(theirs.parts, "torch")
    if (theirs, ours) == forms:
        return ChannelOrder(axis, _FIRST, theirs.parts)
    if (ours, theirs) == forms:
        return ChannelOrder(axis, _LAST, theirs.parts)
    at = {place: position for position, place in enumerate(theirs.positions)}
    return BlockOrder(axis, tuple(at[place] for place in ours.positions))


# Convert a tree without a known layout by layer kinds: TensorFlow variables and a torch state_dict.

_STATISTICS = frozenset(("moving_mean", "moving_variance"))


class TreeConversion(NamedTuple):
    """Converted layers of a tree with the names of their tensors in the target, and notes.

    `refused` are the tensors of layers that are not converted; a note gives the reason. `oriented`
    records the assumed output axes of matrices for which neither a class nor a shape decides, and
    layers with as many inputs as an image has values.
    """

    done: tuple[tuple[Layer, LayerConversion, Mapping[str, Name]], ...]
    notes: tuple[str, ...]
    refused: frozenset[Path] = frozenset()
    oriented: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[Name, ...]:
        """The names of all tensors in the target."""
        return tuple(name for _, _, names in self.done for name in names.values())

    @property
    def left(self) -> tuple[Path, ...]:
        """The source tensors of converted layers without a place in the target."""
        return tuple(path for _, done, _ in self.done for path in done.left)

    @property
    def assumed(self) -> tuple[str, ...]:
        """The sentences on assumed defaults."""
        sentence = dict.fromkeys(sentence for _, done, _ in self.done for sentence in done.assumed)
        return (*sentence, *self.oriented)

    def moves(self, paths: Mapping[Name, Path]) -> tuple[Move, ...]:
        """Return the moves to the paths for the names."""
        return tuple(
            Move(source, paths[names[stored]], rule)
            for _, done, names in self.done
            for source, stored, rule in done.moves
        )

    def added(self, paths: Mapping[Name, Path]) -> dict[Path, Leaf]:
        """Return the tensors that only the target has, by the paths for their names."""
        return {
            paths[names[stored]]: leaf for _, done, names in self.done for stored, leaf in done.added.items()
        }


def convert_to_torch(tree: Tree, given: Sequence[LayerOption] = ()) -> TreeConversion:
    """Return the conversion of a TensorFlow tree's layers to PyTorch."""
    return _convert_layers(tree, find_layers(tree, "tensorflow", given), "torch", torch_names)


def convert_to_tensorflow(
    tree: Tree, given: Sequence[LayerOption] = (), described: Mapping[Path, ModuleInfo] | None = None
) -> TreeConversion:
    """Return the conversion of a PyTorch tree's layers to TensorFlow; see layers() for `described`."""
    return _convert_layers(tree, find_layers(tree, "torch", given, described), "tensorflow", tensorflow_names)


def plan_to_torch(tree: Tree, given: Sequence[LayerOption] = ()) -> Plan:
    """Return the plan for every layer whose kind is certain: `a/l1/kernel` becomes `a.l1.weight`.

    Replay data belongs to no layer: its tensors are copied unchanged. Tensors that fit no kind (other
    ranks, other siblings) have no move and are reported as unused; so are layers that may be of
    several kinds, which a note lists.
    """
    placed = convert_to_torch(tree, given)
    paths = {name: (key(".".join(name)),) for name in placed.names}
    moves = (*placed.moves(paths), *_replay_moves(tree))
    containers: dict[Path, Container] = {(): Container("OrderedDict")}
    return Plan(
        moves, placed.added(paths), containers, placed.assumed, consumed=placed.left, notes=placed.notes
    )


def _replay_moves(tree: Tree) -> Iterator[Move]:
    for path, leaf in tree.tensors():
        if leaf.role == "replay" and dtypes.BY_NAME[leaf.dtype].torch is not None:
            yield Move(path, (key(tree.names[path].replace("/", ".")),), KEEP)


def plan_to_tensorflow(tree: Tree, given: Sequence[LayerOption] = ()) -> Plan:
    """Return the inverse of `to_torch`, `a.l1.weight` to `a/l1/kernel`, with each target's label.

    A number in a name is a list index, as in a Sequential, and stays one.
    """
    placed = convert_to_tensorflow(tree, given)
    paths = object_graph_paths(placed.names)
    labels = {paths[name]: variable_label(name) for name in placed.names}
    return Plan(
        placed.moves(paths),
        placed.added(paths),
        assumed=placed.assumed,
        consumed=placed.left,
        notes=placed.notes,
        labels=labels,
    )


def variable_label(name: Name) -> Label:
    """Return the label of a layer's variable in TensorFlow."""
    return Label("buffer" if name[-1] in _STATISTICS else "parameter", "/".join(name))


def _convert_layers(
    tree: Tree,
    found: tuple[Layer, ...],
    framework: str,
    naming: Callable[[tuple[Layer, ...]], Callable[[Layer, str], Name]],
) -> TreeConversion:
    done: list[tuple[Layer, LayerConversion, Mapping[str, Name]]] = []
    refused: list[str] = []
    not_done: set[Path] = set()
    requested: dict[LayerRefusal, list[str]] = {}
    found = decide_kinds(tree, found, ordered=not _is_by_name(tree, found))
    found, images = decide_images(tree, found)
    named = naming(found)
    unknown = find_unknown_orders(tree, found)
    for layer in found:
        if layer.title in unknown:
            refused.append(unknown[layer.title])
            not_done.update(layer.tensors.values())
            continue
        ways, why = _find_conversions(tree, layer, framework)
        if len(ways) == 1 and not why:
            stored = dict.fromkeys((*(name for _, name, _ in ways[0].moves), *ways[0].added))
            done.append((layer, ways[0], {name: named(layer, name) for name in stored}))
        else:
            reason = why[0] if len(layer.kinds) == 1 else refuse_ambiguous(layer)
            requested.setdefault(reason, []).append(layer.title)
            not_done.update(layer.tensors.values())
    refused += [reason.sentence(titles) for reason, titles in requested.items()]
    left = [tree.names[path] for _, made, _ in done for path in made.left]
    sentences = (*describe_leftovers(left), *describe_kinds(layer for layer, _, _ in done))
    oriented = describe_assumed_classes([(layer, layer.group(tree)) for layer, _, _ in done])
    converted_ = tuple(layer for layer, _, _ in done)
    pictures = (
        *images,
        *describe_image_sized_inputs(tree, converted_),
        *describe_pixel_shuffles(tree, converted_),
    )
    return TreeConversion(tuple(done), (*refused, *sentences), frozenset(not_done), (*oriented, *pictures))


def _find_conversions(
    tree: Tree, layer: Layer, framework: str
) -> tuple[list[LayerConversion], list[LayerRefusal]]:
    """Return the possible conversions of a layer without duplicates, and why some of its kinds have none."""
    ways: list[LayerConversion] = []
    why: list[LayerRefusal] = []
    frameworks = ("tensorflow" if framework == "torch" else "torch", framework)
    for kind in layer.kinds:
        try:
            target = framework_kind(tree, layer, kind, framework)
            made = plan_reordering(tree, layer, kind, NO_FACTS, frameworks)
            facts = layer.facts._replace(flatten=made.flatten)
            done = convert_layer(tree, layer._replace(facts=facts), kind, target, facts, made.rules)
            done = done._replace(assumed=(*done.assumed, *made.assumed))
        except MappingError as error:
            why.append(refusal_from_error(error))
            continue
        if not any(done.moves == other.moves and done.added.keys() == other.added.keys() for other in ways):
            ways.append(done)
    return ways, why
