"""The layers of a tree, and their conversion one by one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckpttool.core import deferred
from ckpttool.core.deferred import NamedTuple
from ckpttool.core.errors import MappingError, UsageError
from ckpttool.core.kinds import LAYER_TYPES, kinds_by_class, list_kinds
from ckpttool.core.tree import Leaf, Path, Tree, display
from ckpttool.mapping import layer_kinds
from ckpttool.mapping.kind_table import (
    COMPOSED,
    KINDS,
    NUMBERED,
    candidate_kinds,
    kinds_by_names,
    oriented_kinds,
    selectable_kinds,
)
from ckpttool.mapping.layer_kinds import (
    IN_OUT,
    NO_FACTS,
    OUT_IN,
    ROW_BIAS,
    LayerFacts,
    LayerKind,
    LayerOption,
    Name,
    attention_children,
    attention_forms,
    own_attention,
)
from ckpttool.mapping.rules import KEEP, Rule, chain_rules, merge_parts

if TYPE_CHECKING:
    from ckpttool.core.activations import AxisOrder
_PART = deferred.compile(r"(?P<stored>(?:weight|bias)_(?:ih|hh|hr))_(?P<part>l\d+(?:_reverse)?)")
# Container of a recurrent layer's variables: its cell, by attribute or by the name of its class.
_CELL = deferred.compile(r"cell|(?:basic_)?(?:lstm|gru|simple_rnn|rnn)_cell(?:_\d+)?")
_PROJECTION = deferred.compile(r"_?(query|key|value|output)(?:_dense)?|attention_(output)")
NORM_KIND_NAMES = list_kinds("norm") - {"rms_norm"}
# A layer and its tensor in one word, from a program with parameters but no layers: `fc1_weight`.
_JOINED = deferred.compile(
    r"(?P<layer>.+)_(?P<stored>weights?|kernel|bias(?:es)?|embeddings|gamma|beta|[wbWB])"
)
# A tensor and its layer's number: `W1` beside `b1`.
_COUNTED = deferred.compile(r"(?P<stored>[wbWB]|weights?|bias)_?(?P<number>\d{1,4})", re.ASCII)
# Short names of a matrix and a bias in each framework's layers.
_SHORT = {
    "torch": {"w": "weight", "b": "bias", "weights": "weight", "kernel": "weight", "biases": "bias"},
    "tensorflow": {"w": "w", "b": "b", "weight": "kernel"},
}
# Classes that contain other layers, whose tensors may be recorded as theirs.
_HOLDERS = frozenset(
    (
        "Bidirectional",
        "TimeDistributed",
        "RNN",
        "StackedRNNCells",
        "Sequential",
        "Functional",
        "SpectralNormalization",
    )
)
# Framework base classes of a live model's own classes (networks/model_child.py).
_BASES = frozenset(("Module", "Layer", "Model"))
# GPT-2's x @ W, in Transformers (transformers/pytorch_utils.py, formerly modeling_utils.py, and
# modeling_tf_utils.py). networks/model_child.py uses these names for the classes of live models.
_IN_OUT_CLASSES = {
    "transformers.pytorch_utils.Conv1D": IN_OUT,
    "transformers.modeling_utils.Conv1D": IN_OUT,
    "transformers.modeling_tf_utils.TFConv1D": ROW_BIAS,
}
# A live model's dense layers with the orientation of the other framework, as observed in a call.
LINEAR_IN_OUT, DENSE_OUT_IN = "Linear [in, out]", "Dense [out, in]"
_TURNED = {LINEAR_IN_OUT: IN_OUT, DENSE_OUT_IN: OUT_IN}
# The setting that names a user-defined class whose call was not compared with its base class.
OWN_CALL = "(own call)"


class ModuleInfo(NamedTuple):
    """Facts from the file about a module besides its tensors: its class and plain settings.

    `own` marks a class of a program rather than of a framework.
    """

    cls: str = ""
    settings: Mapping[str, Any] = MappingProxyType({})
    own: bool = False


NO_MODULE_INFO = ModuleInfo()


def class_info(name: str, settings: Mapping[str, Any]) -> ModuleInfo:
    """Return the facts about a module from the full Python name of its class."""
    full = re.sub(r"___torch_mangle_\d+\.", "", name.removeprefix("__torch__."))
    return ModuleInfo(full, settings, own=not full.startswith("torch."))._replace(
        cls=full if full in _IN_OUT_CLASSES else full.rpartition(".")[2]
    )


class Layer(NamedTuple):
    """Tensors of one layer: the displayed name of their module, and each one's path by stored name.

    `kinds` are the kinds of layer that fit, empty if not computed (`find_modules`). A PyTorch module
    of several recurrent layers is split into several layers, each with its `part`: "l0",
    "l0_reverse". `told` contains facts from options, `about` facts from the file; `is_given` means that
    an option names its kind. `last` is the name of the module that contains the tensors, which
    differs from the layer's for a cell. `evidence` states why its kind was assumed among several.
    """

    name: Name
    kinds: tuple[LayerKind, ...]
    tensors: Mapping[str, Path]
    part: str = ""
    facts: LayerFacts = NO_FACTS
    about: ModuleInfo = NO_MODULE_INFO
    is_given: bool = False
    last: str = ""
    evidence: str = ""

    @property
    def title(self) -> str:
        """Return the name as one string."""
        return "/".join((*self.name, self.part) if self.part else self.name)

    @property
    def kind_names(self) -> frozenset[str]:
        """The names of the kinds that fit."""
        return frozenset(kind.name for kind in self.kinds)

    @property
    def kind(self) -> LayerKind:
        """The only kind that fits; raise MappingError if there are several."""
        if len(self.kinds) != 1:
            named = " or ".join(dict.fromkeys(kind.option for kind in self.kinds))
            raise MappingError("the kind of the layer is ambiguous", path=self.title, expected=named)
        return self.kinds[0]

    def group(self, tree: Tree) -> dict[str, Leaf]:
        """Return the layer's tensors by stored name."""
        return {name: leaf for name, path in self.tensors.items() if isinstance(leaf := tree[path], Leaf)}


_MOST_IN_TABLE = 1 << 24


def describe_table(leaf: Leaf) -> str | None:
    """Return what an integer table has if it is one that programs compute themselves, None otherwise.

    A program registers them as buffers (`position_ids` of Transformers, the mask of GPT-2). Others, such as a
    random permutation, are no such table.
    """
    if not re.match("u?int|bool", leaf.dtype) or not 1 < leaf.size <= _MOST_IN_TABLE:
        return None
    import numpy as np

    values, extent = leaf.array(), leaf.shape[-1]
    if not values.any():
        return "zeros"
    if leaf.size == extent and np.array_equal(values.reshape(-1), np.arange(extent)):
        return "positions"
    square = len(leaf.shape) > 1 and leaf.size == extent**2 == extent * leaf.shape[-2]
    if square and np.array_equal(values.reshape(extent, extent), np.tri(extent, dtype=values.dtype)):
        return "a causal mask"
    return None


def find_modules(
    tree: Tree,
    framework: str,
    requested: Mapping[str, Callable[[str], bool]],
    described: Mapping[Path, ModuleInfo] | None = None,
    named: Callable[[str], bool] | None = None,
) -> Iterator[Layer]:
    """Yield the modules in tree order, with layers of several child modules combined.

    Sources: torch/nn/modules/rnn.py (one module contains `weight_ih_l0`, `weight_ih_l0_reverse`,
    `weight_ih_l1`); keras/src/layers/attention/multi_head_attention.py (`_query_dense`, ..., called `query`,
    ... and `attention_output`); keras/src/layers/rnn/rnn.py and bidirectional.py (`cell`, `forward_layer`).

    Args:
        tree: the tensors.
        framework: the one whose names they have.
        requested: by kind that is not recognised by itself, whether it is requested for a module.
        described: for tensors of whole modules, the facts from the file about their module.
        named: returns whether an option states the kind of a name: then `fc1_weight` is a tensor of the layer
            `fc1`.
    """
    modules = _modules_by_name(tree, framework, named or (lambda _: False))
    composed: dict[_At, Layer] = {}
    used: set[_At] = set()
    for whole, members in _composed_modules(tree, modules, framework, requested):
        composed[members[0]] = whole
        used.update(members)
    for at, module in modules.items():
        if at in composed or at not in used:
            yield _as_layer(tree, composed.get(at, module), framework, described or {})


_At = tuple[Name, str]


_DEVIATION = deferred.compile(r"_?(?:log_?)?(?:std|sigma)(?:_dev)?")


def split_joined_name(name: str) -> tuple[str, str] | None:
    """Return the layer and the tensor named by a single word, None for other words.

    `fc1_weight` is the weight of `fc1`, `W1` that of `layer1`.
    """
    match = _JOINED.fullmatch(name)
    if match:
        return match["layer"], match["stored"]
    match = _COUNTED.fullmatch(name)
    return (f"layer{match['number']}", match["stored"]) if match else None


def _modules_by_name(tree: Tree, framework: str, named: Callable[[str], bool]) -> dict[_At, Layer]:
    groups: dict[_At, dict[str, Path]] = {}
    for path, shown in _iter_tensors(tree, framework):
        *module, name = shown.removesuffix(":0").split("/")
        one = split_joined_name(name)
        if one is not None and named("/".join((*module, one[0]))):
            module, name = [*module, one[0]], one[1]
        if name in ("W", "B") or named("/".join(module)):
            name = _SHORT[framework].get(name.lower(), name)
        if framework == "tensorflow" and module[-1:] == ["vars"] and name.isdecimal():
            # Variables of a Keras layer that are only numbered are stored beside named ones.
            module, name = module[:-1], f"vars/{name}"
        match = _PART.fullmatch(name) if framework == "torch" else None
        # Sonnet's cells store their kernels in private attributes (sonnet/src/recurrent.py).
        bare = name if framework == "torch" else name.removeprefix("_")
        part, stored = (match["part"], match["stored"]) if match else ("", bare)
        groups.setdefault((tuple(module), part), {})[stored] = path
    return {
        (at, part): Layer(at, (), _without_deviation(tensors, framework), part, last=at[-1] if at else "")
        for (at, part), tensors in groups.items()
    }


def _without_deviation(tensors: dict[str, Path], framework: str) -> dict[str, Path]:
    """Return a module's tensors; if only a policy's deviation is too many for a layer, without it.

    stable_baselines/common/distributions.py (hill-a) creates `logstd` in the scope of the mean's layer.
    """
    kinds = kinds_by_names()
    rest = {name: path for name, path in tensors.items() if not _DEVIATION.fullmatch(name)}
    alone = (framework, frozenset(rest)) in kinds and (framework, frozenset(tensors)) not in kinds
    return rest if rest and alone else tensors


def _iter_tensors(tree: Tree, framework: str) -> Iterator[tuple[Path, str]]:
    # A batch norm's count of batches is stored beside its statistics.
    roles = ("parameter", "buffer", "counter") if framework == "torch" else ("parameter", "buffer")
    for path, leaf in tree.tensors():
        if leaf.role in roles:
            yield path, tree.names[path]
            # A torch module that shares a tensor lists it; TensorFlow objects have many names for one tensor.
            if framework == "torch":
                yield from ((path, display(alias.path)) for alias in tree.aliases.get(path, ()))


def _composed_modules(
    tree: Tree, modules: Mapping[_At, Layer], framework: str, requested: Mapping[str, Callable[[str], bool]]
) -> Iterator[tuple[Layer, list[_At]]]:
    """Yield layers made of several child modules, with these modules."""
    below: dict[Name, list[_At]] = {}
    for at in modules:
        if at[0]:
            below.setdefault(at[0][:-1], []).append(at)
    able = [kind for kind in COMPOSED if kind.framework == framework]
    for parent, members in below.items():
        for kind in (*able, *_own_attentions(modules, members, framework)):
            accepts = requested.get(kind.name)
            if kind.opt_in and (accepts is None or not accepts("/".join(parent))):
                continue
            # A buffer beside linear layers, such as a mask, is no part of their attention.
            has_own = any("/" not in weight.name for weight in kind.weights)
            own = [(parent, "")] if has_own and (parent, "") in modules else []
            whole, used = _compose_module(modules, parent, [*own, *members], kind)
            if kind.fits(whole.group(tree)):
                yield whole._replace(kinds=(kind,)), used
                break


def _own_attentions(modules: Mapping[_At, Layer], members: list[_At], framework: str) -> Iterator[LayerKind]:
    """Yield the attentions that linear layers in one module may be."""
    for form, (kernel, bias) in attention_forms(framework):
        linear = [
            _projection_name(at[0]) for at in members if {kernel} <= {*modules[at].tensors} <= {kernel, bias}
        ]
        if (children := attention_children(linear)) is not None:
            yield own_attention(framework, children, form)


def _compose_module(
    modules: Mapping[_At, Layer], parent: Name, members: list[_At], kind: LayerKind
) -> tuple[Layer, list[_At]]:
    children = {weight.name.split("/")[0] for weight in kind.weights if "/" in weight.name}
    tensors: dict[str, Path] = {}
    used = []
    for at in members:
        child = _projection_name(at[0]) if at[0] != parent else ""
        if child and child not in children:
            continue
        used.append(at)
        prefix = f"{child}/" if child else ""
        tensors |= {f"{prefix}{stored}": path for stored, path in modules[at].tensors.items()}
    whole = Layer(parent, (), tensors, last=parent[-1] if parent else "")
    return whole, sorted(used, key=lambda at: at == (parent, ""))


def _projection_name(name: Name) -> str:
    match = _PROJECTION.fullmatch(name[-1])
    return match[1] or match[2] if match else name[-1]


def _as_layer(tree: Tree, module: Layer, framework: str, described: Mapping[Path, ModuleInfo]) -> Layer:
    """Return the module under its layer's name, with the facts from containers."""
    # The module itself, without its child modules.
    stored = min(module.tensors, key=lambda name: name.count("/"))
    path = module.tensors[stored]
    if path in described:
        about = NO_MODULE_INFO if "/" in stored else described[path]
        return module._replace(about=_with_used_settings(tree, module, about))
    about = _with_used_settings(tree, module, _recorded_info(tree, path[: -1 - stored.count("/")]))
    if framework == "tensorflow" and len(module.name) > 1 and _CELL.fullmatch(module.last):
        outer = _recorded_info(tree, path[:-2])
        about = ModuleInfo(about.cls or outer.cls, {**outer.settings, **about.settings}, about.own)
        return module._replace(name=module.name[:-1], about=about)
    return module._replace(about=about)


def _with_used_settings(tree: Tree, module: Layer, about: ModuleInfo) -> ModuleInfo:
    """Return the facts about a module with the settings that its file's computation records."""
    leaves = [tree[path] for path in module.tensors.values()]
    uses = [leaf.use.settings for leaf in leaves if isinstance(leaf, Leaf) and leaf.use is not None]
    used = {name: value for settings in uses for name, value in (settings or {}).items()}
    return about._replace(settings={**used, **about.settings}) if used else about


def _recorded_info(tree: Tree, path: Path) -> ModuleInfo:
    container = tree.containers.get(path)
    if container is None or container.kind != "module":
        return NO_MODULE_INFO
    settings = container.state if isinstance(container.state, dict) else {}
    name = container.name or _numbered_class(settings)
    own = ">" in str(settings.get("registered_name", ""))
    return ModuleInfo(name if name in _IN_OUT_CLASSES else name.rpartition(".")[2], settings, own)


def _numbered_class(settings: Mapping[str, Any]) -> str:
    """Return the class, in snake case, of a layer that Keras's file stores by class and number."""
    above, _, name = str(settings.get("group", "")).rpartition("/")
    return re.sub(r"_\d+\Z", "", name) if above.rpartition("/")[2] in _LISTS else ""


# Groups in Keras's files with a model's layers by class and number (keras/src/saving/saving_lib.py).
_LISTS = frozenset(("layers", "_layers"))


def narrow_kinds(
    kinds: tuple[LayerKind, ...], group: Mapping[str, Leaf], about: ModuleInfo, *, classes: bool = True
) -> tuple[LayerKind, ...]:
    """Return the kinds compatible with the facts about the module; drop equivalent ones.

    If `classes` matter, a layer whose class is not a layer of those kinds keeps them, with the reason
    why it is not converted.
    """
    named = _kinds_of_class(kinds, group, about)
    if named is not None:
        return named
    if (about.own or not about.cls) and (named := _recorded_kinds(kinds, group)):
        return named
    # The class of a layer made of several modules does not matter.
    classes = classes and not any("/" in name for name in group if not name.startswith("vars/"))
    why = _unknown_class_reason(kinds, group, about) if classes else None
    if why is not None:
        return tuple(replace(kind, refused=why) if kind.refused is None else kind for kind in kinds)
    if about.settings.get("reset_after") is True:
        kinds = tuple(kind for kind in kinds if kind.name != "gru_reset_before")
    if {kind.name for kind in kinds} == {"convolution", "depthwise"} and not _is_layout_ambiguous(
        kinds[0], group
    ):
        kinds = tuple(kind for kind in kinds if kind.name == "convolution")
    return kinds


def _kinds_of_class(
    kinds: tuple[LayerKind, ...], group: Mapping[str, Leaf], about: ModuleInfo
) -> tuple[LayerKind, ...] | None:
    """Return the kinds for the module's class, or for its own computation; None if neither decides."""
    if about.cls in _IN_OUT_CLASSES:
        able = (*kinds, *oriented_kinds(group, kinds[0].framework))
        return tuple(kind for kind in able if kind.form == _IN_OUT_CLASSES[about.cls])[:1] or None
    if about.cls in _TURNED:
        able = oriented_kinds(group, kinds[0].framework)
        return tuple(kind for kind in able if kind.form == _TURNED[about.cls]) or None
    if about.own or about.cls not in kinds_by_class():
        return None
    if about.cls == "EinsumDense":
        return _einsum_kinds(group, about) or None
    named = tuple(kind for kind in kinds if kind.name in kinds_by_class()[about.cls])
    named = named or tuple(
        kind
        for kind in selectable_kinds(group, kinds[0].framework)
        if kind.name in kinds_by_class()[about.cls]
    )
    if not named:
        return None
    if (groups := about.settings.get("groups")) is not None and named[0].framework == "torch":
        # Keras's depthwise convolutions have any number of channels; PyTorch's are grouped convolutions.
        weight = max(group.values(), key=lambda leaf: len(leaf.shape)).shape
        depthwise = groups == about.settings.get("in_channels") and groups > 1 and weight[1] == 1
        kind_name = "depthwise" if depthwise else "convolution"
        named = tuple(kind for kind in named if kind.name == kind_name) or named
    if about.settings.get("reset_after") is True:
        named = tuple(kind for kind in named if kind.name != "gru_reset_before") or named
    if about.settings.get("reset_after") is False:
        named = tuple(kind for kind in kinds if kind.name == "gru_reset_before") or named
    why = _incompatible_reason(about)
    if why is not None:
        named = tuple(replace(kind, refused=why) for kind in named)
    return named[:1] if len({kind.name for kind in named}) == 1 else named


def _recorded_kinds(kinds: tuple[LayerKind, ...], group: Mapping[str, Leaf]) -> tuple[LayerKind, ...]:
    """Return the norm, or the dense layer, that the file's computation records; () for another layer."""
    roles = sorted(leaf.use.role for leaf in group.values() if leaf.use is not None)
    if len(roles) != len(group):
        return ()
    if len(set(roles)) == 1 and (norms := tuple(kind for kind in kinds if kind.name == roles[0])):
        return norms
    matrix = [role for role in roles if role != "added"]
    if len(roles) > len(matrix) + 1 or matrix not in (["in_out"], ["out_in"]):
        return ()
    oriented = tuple(
        kind
        for kind in oriented_kinds(group, kinds[0].framework)
        for weight in kind.weights
        if weight.canonical == "kernel" and (weight.to_canonical == KEEP) == (matrix == ["in_out"])
    )
    # A table whose rows a product takes as well, e.g. of words, keeps its axes; a dense layer would not.
    tables = _kind_option(tuple(kind for kind in kinds if kind.name != "dense"))
    why = f"no layer with such names multiplies by its matrix as {matrix[0]}"
    return oriented or _refuse_kinds(kinds, f"{why}; {tables}" if tables else why)


def _incompatible_reason(about: ModuleInfo) -> str | None:
    """Return why a layer of a known class differs from the other framework's layer."""
    settings = about.settings
    if settings.get("rms_scaling") is True:
        return (
            "rms_scaling divides by the standard deviation without subtracting the mean, which no "
            "PyTorch layer does"
        )
    if about.cls.startswith("ConvTranspose") and settings.get("groups", 1) != 1:
        return "a grouped transposed convolution has no equivalent in Keras"
    if settings.get("quantization_config") is not None or settings.get("quantization_mode") is not None:
        return "its weights are quantised"
    return None


_EQUATION = deferred.compile(
    r"(?P<more>(?:\.\.\.)?[a-zA-Z]*)(?P<in>[a-zA-Z]),(?P<kernel>[a-zA-Z]{2})->(?P<made>\S*)(?P<out>[a-zA-Z])"
)


def _einsum_kinds(group: Mapping[str, Leaf], about: ModuleInfo) -> tuple[LayerKind, ...]:
    """Return the kinds of an EinsumDense: its equation or its bias shows the output axis."""
    able = oriented_kinds(group, "tensorflow")
    match = _EQUATION.fullmatch(str(about.settings.get("equation", "")).replace(" ", ""))
    if match is not None and match["made"] == match["more"] and match["in"] != match["out"]:
        orders = {match["in"] + match["out"]: "", match["out"] + match["in"]: OUT_IN}
        form = orders.get(match["kernel"])
        return tuple(kind for kind in able if kind.form == form) or _refuse_kinds(able, _EINSUM)
    if about.settings.get("equation") is not None:
        return _refuse_kinds(able, _EINSUM)
    return able


_EINSUM = "its equation is not that of a dense layer"


def _refuse_kinds(kinds: tuple[LayerKind, ...], why: str) -> tuple[LayerKind, ...]:
    return tuple(replace(kind, refused=why) for kind in kinds[:1])


def _unknown_class_reason(
    kinds: tuple[LayerKind, ...], group: Mapping[str, Leaf], about: ModuleInfo
) -> str | None:
    """Return why a class excludes every kind, None if it is unknown or contains other layers."""
    if not about.cls or (about.cls in _HOLDERS and not about.own):
        return None
    if about.cls == "Module" and kinds[0].framework == "tensorflow":
        return None  # a tf.Module: TensorFlow itself has no layers, and Sonnet's layers are tf.Modules
    name = "a class of the model" if about.cls in _BASES else about.cls
    if not about.own and about.cls in kinds_by_class():
        return f"its tensors do not match its class, {about.cls}"
    able = (*kinds, *oriented_kinds(group, kinds[0].framework))
    return f"its class ({name}) is not a known layer; {_kind_option(able)}"


def _kind_option(kinds: Sequence[LayerKind]) -> str:
    """Return the hint with the option for each of some kinds that tensors can be, "" without any."""
    able = list(dict.fromkeys(kind.option for kind in kinds))
    others = f", or {' or '.join(able[1:])}" if able[1:] else ""
    return f"use --kind '{TITLE}={able[0]}' to convert it as one{others}" if able else ""


def misfit_kinds(about: ModuleInfo, framework: str) -> tuple[LayerKind, ...]:
    """Return a refused kind for tensors of a layer class that match no kind."""
    if about.own or about.cls not in kinds_by_class():
        return ()
    return (LayerKind("misfit", framework, (), refused=f"its tensors do not match its class, {about.cls}"),)


# Placeholder for the layer's name in a reason.
TITLE = "\0"


def _is_layout_ambiguous(kind: LayerKind, group: Mapping[str, Leaf]) -> bool:
    """Return whether a kernel converts differently as a depthwise convolution and as a convolution.

    Between [H, W, 1, M] and [M, 1, H, W] the two are the same permutation. A kernel [H, W, C, M] with
    M > 1 is assumed to be a convolution's: the other would have another shape, so that it cannot be
    loaded by mistake.
    """
    weight = max(group.values(), key=lambda leaf: len(leaf.shape)).shape
    if kind.framework == "torch":
        return weight[0] > 1
    bias = [leaf.shape[0] for leaf in group.values() if len(leaf.shape) == 1]
    return weight[-2] > 1 and (weight[-1] == 1 or bool(bias))


class LayerConversion(NamedTuple):
    """Conversion of one layer: source paths to stored names of the target, and additional tensors.

    `left` are source leaves without a place in the target.
    """

    moves: tuple[tuple[Path, str, Rule], ...]
    added: Mapping[str, Leaf]
    left: tuple[Path, ...]
    assumed: tuple[str, ...]


def find_layers(
    tree: Tree,
    framework: str,
    options: Sequence[LayerOption] = (),
    described: Mapping[Path, ModuleInfo] | None = None,
    *,
    classes: bool = True,
    composed: Iterable[str] = (),
) -> tuple[Layer, ...]:
    """Return the layers of a framework's tree in order; tensors of unknown kinds are omitted.

    Raise UsageError for an option that matches no layer, or a kind that a layer cannot be. If several kinds
    fit, a layer carries all of them: an option or the file decides (`Choice`), never a guess from shapes.

    Args:
        tree: the tensors.
        framework: the one whose names they have.
        options: the user's options.
        described: for tensors of whole modules, the facts from the file about their module.
        classes: an unknown class prevents tensors from being read as a layer. Between two models of the same
            framework it has no effect.
        composed: kinds of several modules that are recognised without being requested.
    """
    requested: dict[str, Callable[[str], bool]] = {
        name: partial(_matches_choice, [choice for choice in options if choice.kind == name])
        for name in {choice.kind for choice in options}
        if name is not None
    }
    requested |= dict.fromkeys(composed, lambda _: True)
    layers = []
    used: set[int] = set()
    named = partial(_matches_choice, [choice for choice in options if choice.kind is not None])
    for module in find_modules(tree, framework, requested, described, named):
        group = module.group(tree)
        fitting = module.kinds or candidate_kinds(group, framework, module.last)
        if not fitting and framework == "tensorflow" and named("/".join(module.name)):
            fitting = tuple(kind for kind in NUMBERED if kind.fits(group))
        if not fitting and classes:
            fitting = misfit_kinds(module.about, framework)
        if not fitting:
            continue
        layer = module._replace(kinds=fitting, facts=_recorded_facts(module.about, fitting, group))
        recorded = {n: choice for n, choice in enumerate(options) if choice.fits(layer.title)}
        used |= recorded.keys()
        layer = _apply_options(layer, list(recorded.values()), group, framework)
        if not any(choice.kind for choice in recorded.values()):
            layer = layer._replace(kinds=narrow_kinds(layer.kinds, group, module.about, classes=classes))
        layers.append(layer)
    for number, choice in enumerate(options):
        if number not in used:
            raise UsageError(
                "no layer matches this name",
                path=choice.pattern,
                hint=(
                    "run ckpttool inspect to list the names; a pattern matches layer names, without "
                    "tensor names"
                ),
            )
    return _with_both_orientations(tree, layers)


def propose_options(tree: Tree, framework: str, left: Iterable[Path]) -> tuple[str, ...]:
    """Return tested options that form layers from tensors outside of layers.

    Examples are `fc1_weight` beside `fc1_bias`, and `W` beside `b`. `left` are tensors of unknown
    layers.
    """
    titles: dict[str, str] = {}
    for path in left:
        leaf, (*module, name) = tree[path], tree.names[path].removesuffix(":0").split("/")
        joined = split_joined_name(name)
        if not isinstance(leaf, Leaf) or not (joined or name in _MATRICES):
            continue
        title = "/".join((*module, joined[0]) if joined else module)
        if title and len(leaf.shape) > 1:
            kind = "embedding" if joined and joined[1] == "embeddings" else "dense"
            titles[title] = kind if len(leaf.shape) == 2 else "convolution"
    able = []
    parts = _split_by_title(tree, framework, titles)
    for title, kind in titles.items():
        option, part = LayerOption(title, title.__eq__, kind), parts.get(title, Tree({}))
        try:
            named = [layer for layer in find_layers(part, framework, [option]) if layer.title == title]
        except UsageError:
            continue
        able += [f"--kind '{title}={kind}'"] if named else []
    return tuple(able)


def _split_by_title(tree: Tree, framework: str, titles: Mapping[str, str]) -> dict[str, Tree]:
    """Return by layer the tree of only the tensors that an option for the layer would put into it."""
    paths: dict[str, list[Path]] = {}
    for path, shown in _iter_tensors(tree, framework):
        *module, name = shown.removesuffix(":0").split("/")
        joined = split_joined_name(name)
        owners = {"/".join(module), "/".join((*module, joined[0])) if joined else "/".join(module)}
        owners |= {"/".join(module[:-1])} if module[-1:] == ["vars"] else set()
        for title in owners & titles.keys():
            paths.setdefault(title, []).append(path)
    return {title: Tree({path: tree[path] for path in own}, tree.aliases) for title, own in paths.items()}


def numbered_kinds(tree: Tree, left: Collection[Path]) -> dict[str, tuple[str, ...]]:
    """Return by title the possible kinds of layers whose variables a Keras file only numbers.

    `left` are tensors of unknown layers; the result contains the layers with at least one of these
    tensors.
    """
    kinds: dict[str, tuple[str, ...]] = {}
    for module in find_modules(tree, "tensorflow", {}, None):
        group = module.group(tree)
        if any(path in left for path in module.tensors.values()):
            able = tuple(dict.fromkeys(kind.option for kind in NUMBERED if kind.fits(group)))
            kinds |= {"/".join(module.name): able} if able else {}
    return kinds


_MATRICES = frozenset(("w", "W", "weight", "weights", "kernel"))


def _matches_choice(choices: Sequence[LayerOption], title: str) -> bool:
    return any(choice.fits(title) for choice in choices)


def _with_both_orientations(tree: Tree, layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the layers; if the bias of one shows [in, out], square ones get both orientations.

    A model that computes x @ W in one layer (GPT-2) does so in others, whose shapes do not show it.
    """
    if not any(layer.kinds[0].form in (layer_kinds.IN_OUT, layer_kinds.OUT_IN) for layer in layers):
        return tuple(layers)
    layers_ = []
    for layer in layers:
        group = layer.group(tree)
        both = oriented_kinds(group, layer.kinds[0].framework)
        recorded = _recorded_kinds(layer.kinds, group)
        decided = layer.about.cls or layer.kinds[0].refused or layer.is_given or recorded
        unsure = len(both) > 1 and layer.kind_names == {"dense"} and not decided
        layers_.append(layer._replace(kinds=both) if unsure else layer)
    return tuple(layers_)


def _recorded_facts(about: ModuleInfo, fitting: Sequence[LayerKind], group: Mapping[str, Leaf]) -> LayerFacts:
    """Return facts recorded in the file: flattened images, heads of an attention, a multiplier."""
    from ckpttool.core.activations import UNKNOWN, WeightUse

    heads = about.settings.get("num_heads")
    names = {kind.name for kind in fitting}
    # A weight file of Keras whose layers reorder axes, without the configuration that states how.
    unknown = UNKNOWN if about.settings.get("axis_order") == "unknown" else None
    facts = LayerFacts(takes=unknown, makes=unknown)
    for leaf in group.values():
        use = leaf.use or WeightUse()
        takes, makes = use.takes, use.makes
        facts = facts._replace(
            parts=facts.parts or use.parts,
            takes=takes if takes not in (None, UNKNOWN) else facts.takes or takes,
            makes=makes if makes not in (None, UNKNOWN) else facts.makes or makes,
        )
    if isinstance(heads, int) and heads > 0 and names == {"attention"}:
        return facts._replace(number=heads)
    channels, groups = about.settings.get("out_channels"), about.settings.get("groups")
    if "depthwise" in names and isinstance(channels, int) and isinstance(groups, int) and groups > 0:
        return facts._replace(number=channels // groups)
    return facts


def _apply_options(
    layer: Layer, lines: Sequence[LayerOption], group: Mapping[str, Leaf], framework: str
) -> Layer:
    from ckpttool.core.activations import NO_IMAGE, framework_order

    for choice in lines:
        facts, dense = layer.facts, "dense" in layer.kind_names
        if choice.facts.flatten is not None or choice.facts.takes is not None:
            _require_features(layer)
        takes, makes = (
            _to_framework_order(order, framework) for order in (choice.facts.takes, choice.facts.makes)
        )
        if choice.facts.flatten and not dense:
            shape = choice.facts.flatten
            takes = framework_order(((prod(shape[:-1]), shape[-1]),), framework)
            choice = choice._replace(facts=choice.facts._replace(flatten=None))
        elif choice.facts.flatten == () and not dense:
            takes = NO_IMAGE
            choice = choice._replace(facts=choice.facts._replace(flatten=None))
        layer = layer._replace(
            facts=facts._replace(
                number=facts.number if choice.facts.number is None else choice.facts.number,
                flatten=facts.flatten if choice.facts.flatten is None else choice.facts.flatten,
                target_shapes=choice.facts.target_shapes or facts.target_shapes,
                part_orders={**facts.part_orders, **choice.facts.part_orders},
                takes=takes or facts.takes,
                makes=makes or facts.makes,
            )
        )
        if choice.kind is None:
            continue
        fitting = tuple(
            kind
            for kind in (*KINDS, *NUMBERED)
            if kind.framework == framework and kind.option == choice.kind and kind.fits(group)
        ) or tuple(
            # Another form of the kind, if the shapes fit no usual one.
            kind
            for kind in (*KINDS, *layer.kinds)
            if kind.framework == framework and kind.name == choice.kind and kind.fits(group)
        )
        if not fitting:
            able = dict.fromkeys(kind.option for kind in layer.kinds)
            raise UsageError(
                f"the kind of the layer cannot be {choice.kind}", path=layer.title, expected=" or ".join(able)
            )
        layer = layer._replace(kinds=fitting[:1], is_given=True)
    return layer


def _require_features(layer: Layer) -> None:
    if not layer.kind_names & _FEATURES:
        raise UsageError(
            "only dense, recurrent and convolutional layers and norms can have a flattened image as input",
            path=layer.title,
        )


_FEATURES = frozenset(
    row.name for row in LAYER_TYPES.values() if any("takes" in axes for axes in row.features.values())
)


def _to_framework_order(order: AxisOrder | None, framework: str) -> AxisOrder | None:
    """Return the order of the given parts, as the framework flattens them."""
    from ckpttool.core.activations import NO_IMAGE, framework_order

    return framework_order(order.parts, framework) if order is not None and order != NO_IMAGE else order


def convert_layer(
    tree: Tree,
    layer: Layer,
    source: LayerKind,
    target: LayerKind,
    facts: LayerFacts | None = None,
    between: Mapping[str, Rule] = MappingProxyType({}),
) -> LayerConversion:
    """Return the conversion of a layer; raise MappingError if the target has no such layer.

    Args:
        tree: the source.
        layer: the layer.
        source: the kind as which it is read.
        target: the kind as which it is written.
        facts: facts about the target (its own shapes, ...), by default those about the layer.
        between: rules for canonical tensors in between.
    """
    refused = source.refused or target.refused
    if refused is not None:
        raise MappingError(refused, path=layer.title)
    try:
        return _convert_layer(tree, layer, source, target, layer.facts if facts is None else facts, between)
    except MappingError as error:
        raise error.located(path=layer.title) from error.__cause__


def _convert_layer(
    tree: Tree,
    layer: Layer,
    source: LayerKind,
    target: LayerKind,
    facts: LayerFacts,
    between: Mapping[str, Rule],
) -> LayerConversion:
    reading = source.read(layer.group(tree), layer.facts)
    writing = target.write(canonical_tensors(tree, layer, source), facts)
    moves: list[tuple[Path, str, Rule]] = []
    added = dict(writing.fills)
    for stored, name, back in writing.rows:
        if name in reading.fills:
            _add_part(added, stored, back, reading.fills[name])
        moves += [
            (layer.tensors[row.stored], stored, chain_rules(row.rule, between.get(name, KEEP), back))
            for row in reading.rows
            if row.canonical == name
        ]
    moved = {path for path, _, _ in moves}
    left = tuple(path for path in layer.tensors.values() if path not in moved)
    return LayerConversion(tuple(moves), added, left, (*reading.assumed, *writing.assumed))


def canonical_tensors(tree: Tree, layer: Layer, kind: LayerKind) -> dict[str, Leaf]:
    """Return a layer's canonical tensors, read as one kind; raise MappingError if they do not fit."""
    group = layer.group(tree)
    try:
        reading = kind.read(group, layer.facts)
    except MappingError as error:
        raise error.located(path=layer.title) from error.__cause__
    tensors = dict(reading.fills)
    for row in reading.rows:
        leaf = row.rule.leaf(group[row.stored])
        if isinstance(leaf, Leaf):
            tensors[row.canonical] = leaf
    return tensors


def _add_part(added: dict[str, Leaf], stored: str, rule: Rule, leaf: Leaf) -> None:
    """Add a rule's result for a tensor that only one framework has, merging parts of one tensor."""
    result = rule.leaf(leaf)
    if not isinstance(result, Leaf):
        return
    whole = merge_parts(added[stored], result) if stored in added else result
    if whole is None:
        raise MappingError("two tensors have the same place in the target", path=stored)
    added[stored] = replace(whole, name=None)


def framework_kind(tree: Tree, layer: Layer, kind: LayerKind, framework: str) -> LayerKind:
    """Return how a framework stores a layer of a kind; raise MappingError if it has no such layer."""
    if kind.refused is not None:
        raise MappingError(kind.refused, path=layer.title)
    ranks = {name: len(leaf.shape) for name, leaf in canonical_tensors(tree, layer, kind).items()}
    able = [item for item in KINDS if (item.framework, item.name, item.form) == (framework, kind.name, "")]
    for candidate in able:
        ranks_of_kind = {weight.canonical: weight.rank for weight in candidate.weights}
        if all(ranks_of_kind.get(name) == rank for name, rank in ranks.items()):
            return candidate
    for candidate in able:
        if candidate.writing is not None or candidate.shapes is not None:
            return candidate
    for candidate in KINDS:
        # A norm over several axes, which only its class distinguishes from a dense layer.
        if (
            (candidate.framework, candidate.name) == (framework, kind.name)
            and candidate.is_selected
            and candidate.form == layer_kinds.AXES
        ):
            return candidate
    raise MappingError(f"{framework} has no equivalent of this {kind.name}", path=layer.title)


RECURRENT_KIND_NAMES = frozenset(("lstm", "gru", "simple_rnn"))
DIRECTION_NAME = deferred.compile(r"(forward|backward)_(?:layer|lstm|gru|simple_rnn|rnn)(?:_\d+)?")
_REVERSE = "_reverse"

Naming = Callable[[Layer, str], Name]


def _kind_name(layer: Layer) -> str:
    return layer.kinds[0].name


def torch_names(layers: tuple[Layer, ...]) -> Naming:
    """Return the names of Keras layers' tensors in a state_dict.

    Keras stores a recurrent layer's variables in its cell, the two directions of a Bidirectional in separate
    layers, and the projections of an attention in four dense layers; torch has one module each, and one for
    several recurrent layers. Sources: keras/src/layers/rnn/bidirectional.py,
    keras/src/layers/attention/multi_head_attention.py, torch/nn/modules/rnn.py.
    """
    directions: dict[Name, set[str]] = {}
    for layer in layers:
        match = DIRECTION_NAME.fullmatch(layer.name[-1]) if layer.name else None
        if match and _kind_name(layer) in RECURRENT_KIND_NAMES:
            directions.setdefault(layer.name[:-1], set()).add(match[1])

    def named(layer: Layer, stored: str) -> Name:
        if _kind_name(layer) not in RECURRENT_KIND_NAMES:
            return (*layer.name, *stored.split("/"))
        if layer.name and len(directions.get(layer.name[:-1], ())) == 2:
            back = layer.name[-1].startswith("backward")
            return (*layer.name[:-1], f"{stored}_l0{_REVERSE if back else ''}")
        return (*layer.name, f"{stored}_l0")

    return named


def tensorflow_names(layers: tuple[Layer, ...]) -> Naming:
    """Return the names of torch layers' tensors under Keras objects."""
    parts: dict[Name, set[str]] = {}
    for layer in layers:
        if layer.part:
            parts.setdefault(layer.name, set()).add(layer.part)

    def named(layer: Layer, stored: str) -> Name:
        if _kind_name(layer) == "attention":
            projection, name = stored.split("/")
            return (*layer.name, f"_{projection}_dense", name)
        if not layer.part:
            return (*layer.name, *stored.split("/"))
        own = parts[layer.name]
        number = layer.part.removesuffix(_REVERSE)
        owner = layer.name
        if len({part.removesuffix(_REVERSE) for part in own}) > 1:
            owner = (*owner[:-1], f"{owner[-1]}_{number}") if owner else (number,)
        if number + _REVERSE in own:
            owner = (*owner, "backward_layer" if layer.part.endswith(_REVERSE) else "forward_layer")
        return (*owner, "cell", stored)

    return named
