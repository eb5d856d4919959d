"""Notes on a conversion by layer kinds: facts missing from the file, and requirements of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError, abbreviate_list
from ckpttool.core.kinds import LAYER_TYPES, SPELLINGS, kinds_by_class
from ckpttool.core.tree import Leaf, Tree
from ckpttool.mapping.layer_kinds import HEADS, IN_OUT, OUT_IN, LayerKind
from ckpttool.mapping.layers import NORM_KIND_NAMES, OWN_CALL, TITLE, Layer

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
    kind, about, settings = layer.kinds[0], layer.about, layer.about.settings
    comparable: dict[str, object] = {}
    for name in LAYER_TYPES[kind.name].settings if kind.name in LAYER_TYPES else ():
        value = _find_setting(settings, name)
        if value is not None:
            comparable[name] = _normalize_setting(value, several=name in ("dilation", "stride"))
    if kind.name in ("lstm", "gru"):
        torch = kind.framework == "torch" and about.cls
        for name, usual in _OF_CELLS.items():
            if name == "go_backwards" and _REVERSED.search(layer.title):
                continue
            if torch or isinstance(settings.get(name), (str, bool)):
                comparable[name] = usual if torch else settings[name]
    cls = about.cls or _class_from_name(layer)
    many = _find_setting(settings, "groups")
    if kind.name in NORM_KIND_NAMES and not cls and isinstance(many, int):
        comparable["norm"] = f"over {many} groups"  # of a graph's operator
    if kind.name in NORM_KIND_NAMES and kind.name in kinds_by_class().get(cls, ()):
        of_groups = _INSTANCE if many == -1 else _GROUPS if many is None else f"over {many} groups"
        comparable["norm"] = "over all channels"
        if cls.startswith(("Group", "Instance")):
            comparable["norm"] = of_groups if cls.startswith("Group") else _INSTANCE
    return comparable


def _find_setting(settings: Mapping[str, object], name: str) -> object:
    """Return a setting by any of its names, None if it is not recorded.

    The `group` of a layer in an HDF5 file is its path there, and no number of groups.
    """
    return next(
        (
            value
            for word in SPELLINGS[name]
            if (value := settings.get(word)) is not None and not (name == "groups" and isinstance(value, str))
        ),
        None,
    )


def recorded_differences(source: Layer, target: Layer) -> Iterator[tuple[str, str, str]]:
    """Yield settings recorded on both sides that change the model's results.

    Each is a name with the source's and the model's value. Strides, groups and directions are
    omitted, because two layers may record them in different ways.
    """
    source_settings, target_settings = layer_settings(source), layer_settings(target)
    for name in _DECIDING:
        known = (
            name in source_settings
            and name in target_settings
            and not _is_same_setting(source_settings[name], target_settings[name])
        )
        if known and "separable" not in f"{source.about.cls} {target.about.cls}".lower():
            yield name, _format_setting(source_settings[name]), _format_setting(target_settings[name])


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
    differences: dict[tuple[str, str, str], list[str]] = {}
    unrecorded: dict[tuple[str, float, str], list[str]] = {}
    for source, target in pairs:
        source_settings, target_settings = layer_settings(source), layer_settings(target)
        usual = _usual_epsilon(source.kinds[0])
        unsure = foreign and usual and "epsilon" in target_settings and "epsilon" not in source_settings
        if usual and unsure and not _is_same_setting(usual[1], target_settings["epsilon"]):
            unrecorded.setdefault((*usual, _format_setting(target_settings["epsilon"])), []).append(
                target.title
            )
        for name in source_settings.keys() & target_settings.keys():
            if not _is_same_setting(source_settings[name], target_settings[name]):
                differences.setdefault(
                    (name, _format_setting(source_settings[name]), _format_setting(target_settings[name])), []
                ).append(target.title)
    for (name, one, other), titles in differences.items():
        yield f"{abbreviate_list(titles, 3)}: {name} is {one} in the source and {other} in the model"
    for (framework, default, epsilon), titles in unrecorded.items():
        yield (
            f"{abbreviate_list(titles, 3)}: using the model's epsilon {epsilon}; the source does not record "
            f"one, and the default in {framework} is {default:g} (set this value unless the source "
            "program set another)"
        )


def describe_own_calls(targets: Iterable[Layer]) -> Iterator[str]:
    """Yield a sentence for each model layer whose class changes what its base class computes."""
    calls: dict[tuple[str, str], list[str]] = {}
    for layer in targets:
        own = layer.about.settings.get(OWN_CALL)
        if own:
            calls.setdefault((str(own), layer.about.cls), []).append(layer.title)
    for (own, base), titles in calls.items():
        yield f"{abbreviate_list(titles, 3)}: {own} computes the same as {base} from its weights"


def describe_assumed_products(targets: Iterable[Layer], tree: Tree) -> Iterator[str]:
    """Yield a sentence for square matrices of tf.Modules whose products no call shows."""
    titles = []
    for layer in targets:
        shapes = [leaf.shape for leaf in layer.group(tree).values() if len(leaf.shape) == 2]
        dense = layer.kinds[0].name == "dense" and layer.kinds[0].framework == "tensorflow"
        is_own = layer.about.cls != "Module" or OWN_CALL in layer.about.settings
        if dense and not is_own and any(rows == columns > 1 for rows, columns in shapes):
            titles.append(layer.title)
    if titles:
        yield f"{abbreviate_list(titles, 3)}: square in the model, assumed [in, out] because no call shows it"


def _is_same_setting(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= _EPSILON_RANGE * max(abs(one), abs(other))
    if {one, other} & {_INSTANCE, _GROUPS}:
        # One group per channel, or an unrecorded number of groups, may be any number of groups.
        return all(str(setting).endswith("groups") or setting == _INSTANCE for setting in (one, other))
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
        if layer.is_given or any(leaf.use is not None and leaf.use.role for leaf in group.values()):
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
    unsaid = layer.kinds[0].name == "convolution" and not (layer.about.cls or layer.is_given)
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
